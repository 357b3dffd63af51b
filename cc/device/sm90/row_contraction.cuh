// What contractions over a group's rows share: groups in the order of their length, the work items made of them, and
// the places of results. Results are [groups, rows, cols], sums run over rows of the operands.
#pragma once

#include "cc/device/common/group_walk.cuh"
#include "cc/device/sm90/epilogue.cuh"
#include "cc/device/sm90/layout_fp8.cuh"
#include "cc/device/sm90/pace.cuh"
#include "cc/device/sm90/pipeline.cuh"

namespace grouped::sm90 {

struct alignas(16) GroupSpan {
  int32_t group, rows, end;
  int32_t first;  // where its segment starts, if rows are padded to segments
};
struct alignas(16) Draws {
  unsigned long long counter;  // of both ends, schedule.cuh
  int64_t mean_rows;           // of a group
};

// ---- groups, longest first ----

// Row counts in buckets of at most 1.6 %: the exponent and six bits of the number of k blocks; 0 for an empty group.
constexpr int kBuckets = 26 * 64;
__device__ inline int bucket(int rows) {
  if (rows == 0) return 0;
  const float blocks = float((rows + kBlockK - 1) / kBlockK);
  return (__float_as_int(blocks) >> 17) - (127 << 6) + 1;
}

constexpr int kOrderThreads = 1024;

// One block. Groups of one bucket come in any order: which tile is computed when has no influence on its bits. With
// kSegmented groups are in segments as segment_codes says.
template <bool kSegmented>
__global__ void __launch_bounds__(kOrderThreads) order_groups(const int32_t* sizes, int groups, int64_t max_rows,
                                                              GroupSpan* spans, GroupSpan* unordered, Draws* draws) {
  __shared__ int32_t start[kBuckets];
  __shared__ int64_t of_warp[33];
  for (int i = threadIdx.x; i < kBuckets; i += kOrderThreads) start[i] = 0;
  __syncthreads();
  const auto size_of = [&](int g) { return sizes[g]; };
  const auto use = [&](int g, int64_t first, int64_t end, int64_t codes) {
    const int rows = int(end - first);
    unordered[g] = {g, rows, int32_t(end), int32_t(codes)};
    atomicAdd(&start[bucket(rows)], 1);
  };
  device::GroupTotals<> all;
  if constexpr (kSegmented) {
    const auto codes_of = [](int64_t rows) { return segment_codes(rows); };
    all = device::walk_groups<kOrderThreads>(groups, max_rows, of_warp, size_of, codes_of, use);
  } else {
    all = device::walk_groups<kOrderThreads>(groups, max_rows, of_warp, size_of, nullptr, use);
  }
  if (threadIdx.x == 0) *draws = {0, all.rows / groups};
  __syncthreads();
  int64_t after = 0;  // groups in longer buckets
  for (int first = 0; first < kBuckets; first += kOrderThreads) {
    const int i = kBuckets - 1 - first - int(threadIdx.x);
    const int64_t count = i >= 0 ? start[i] : 0;
    int64_t total;
    const int64_t at = after + device::exclusive_sum<kOrderThreads / 32>(count, of_warp, &total);
    after += total;
    if (i >= 0) start[i] = int32_t(at);
  }
  __syncthreads();
  for (int g = threadIdx.x; g < groups; g += kOrderThreads) {
    const GroupSpan span = unordered[g];
    spans[atomicAdd(&start[bucket(span.rows)], 1)] = span;
  }
}

// Bytes: spans, unordered spans, draws.
inline size_t contraction_workspace(int64_t groups) { return sizeof(GroupSpan) * 2 * size_t(groups) + sizeof(Draws); }

struct ContractionParams {
  CUtensorMap lhs, rhs, out;
  const GroupSpan* spans;
  Draws* draws;
  const int64_t* into_table;  // addresses of the results, 0 skips a group; null where they are packed
  int64_t out_base;           // address that `out` starts at
  int32_t groups, rows, cols;
  bool accumulate;
  FetchedSlices fetched;          // of float32 results, where they are added
  int32_t window = kWindowPairs;  // pairs of row tiles before the next column
  bool in_order;                  // items are drawn from the front alone
};

// The tiles of a group share its rows, which are few.
__device__ inline NoPace pace_of(const ContractionParams&, uint32_t) { return {}; }

__device__ inline ptx::Coords contraction_at(const Work& work, int row) {
  return {{work.col0, work.row0 + row, work.slice2, work.slice3}};
}

// Draws the pair's items and pushes this CTA's tile of each, kRows by kCols; `place(work, span)` sets what the sum
// runs over: length, rows, end. Tiles of empty groups are stored here, as zeros.
template <class Out, int kCols, int kRows = kTileRows, class Place, class Push>
__device__ inline void schedule_contraction(const ContractionParams& p, uint32_t rank, uint32_t mail, uint32_t spare,
                                            Place place, Push push) {
  const int row_tiles = (p.rows + kRows - 1) / kRows;
  const int col_tiles = (p.cols + kCols - 1) / kCols;
  const int per_group = int(pair_count(row_tiles, col_tiles)), items = per_group * p.groups;
  Mailbox pair(rank, mail);
  const Zeros<Out, kCols, kRows> zeros(spare);
  // Rows drawn beyond the mean. Pairs start at different points of the mix, not all with a long sum.
  int64_t surplus = int64_t(p.spans[0].rows) * (blockIdx.x / 2) / (gridDim.x / 2);
  const int64_t mean_rows = p.draws->mean_rows;
  int64_t next = 0;
  const auto draw = [&] {
    if (!pair.leader() || threadIdx.x % 32 != 0) return;
    const uint64_t step = surplus > 0 && !p.in_order ? kFromBack : kFromFront;
    next = drawn_item(atomicAdd(&p.draws->counter, step), step, items);
  };
  draw();
  while (true) {
    const int64_t item = pair.share(next);
    if (item < 0) break;
    const int4 packed = __ldg(reinterpret_cast<const int4*>(p.spans + int(item) / per_group));
    const GroupSpan span = {packed.x, packed.y, packed.z, packed.w};
    surplus += span.rows - mean_rows;
    draw();  // one ahead
    Work work{};
    work.slice2 = span.group;
    if (p.into_table != nullptr) {
      const uint64_t address = uint64_t(p.into_table[span.group]);
      if (address == 0) continue;
      const Slice slice = slice_of(address - uint64_t(p.out_base));
      work.slice2 = slice.near;
      work.slice3 = slice.far;
    }
    const Tile tile = windowed_pair_at(int(item) % per_group, row_tiles, col_tiles, rank, p.window);
    work.kind = Work::kTile;
    work.row0 = tile.row * kRows;
    work.col0 = tile.col * kCols;
    work.valid_rows = p.rows - work.row0;
    work.across = tile.across;
    work.group = span.group;
    place(work, span);
    if (span.rows != 0) {
      push(work);
    } else if (!p.accumulate) {
      zeros.store(&p.out, contraction_at(work, 0), work.valid_rows, p.cols - work.col0);
    }
  }
  push(Work{});
  zeros.finish();
}

}  // namespace grouped::sm90
