// What products over grouped rows share: their operands, the order of their tiles, and their tail.
#pragma once

#include "cc/device/common/product_end.cuh"
#include "cc/device/sm90/pace.cuh"
#include "cc/device/sm90/pipeline.cuh"

namespace grouped::sm90 {

struct RowsParams {
  CUtensorMap lhs, rhs;
  const int32_t* sizes;
  RowDraws* draws;           // 0 at the start
  const int64_t* rhs_table;  // addresses of the weights; null where they are packed
  int64_t rhs_base;          // address that `rhs` starts at
  int64_t rows;
  int32_t groups, cols, length;  // cols: of what the tiles cover
  bool clear_tail;
  bool paced;  // pace.cuh
};

__device__ inline Pace pace_of(const RowsParams& p, uint32_t rank) {
  return Pace(p.paced ? &p.draws->reports : nullptr, rank);
}

using device::BiasParams;

// And what becomes of a result: bias and row scale, then one rounding.
struct MatmulParams : RowsParams, BiasParams {
  CUtensorMap out;
  int32_t first_col;  // of the result's `width`, the first that is made
  uint8_t* result;
  bool scale_bias;
};

struct IgnoreTail {
  __device__ void operator()(int32_t) const {}
};

// What an item's group says of it: rows, and where its weights are.
__device__ inline void set_group(const RowsParams& p, const FoundItem& found, Work* work) {
  work->length = p.length;
  work->group = found.group;
  work->rows = found.rows;
  work->end = found.end;
  work->slice2 = found.group;
  if (p.rhs_table == nullptr) return;
  const Slice slice = slice_of(uint64_t(p.rhs_table[found.group]) - uint64_t(p.rhs_base));
  work->slice2 = slice.near;
  work->slice3 = slice.far;
}

// Draws the pair's items and pushes this CTA's tile of each, kRows by `tile_cols` and in the order of kTileAt; with
// kEven the tiles of a group are of the same height, which is at most kRows. `at_tail` is told the first tail row.
template <auto kTileAt = pair_at, int kRows = kTileRows, bool kEven = false, class Push, class AtTail = IgnoreTail>
__device__ inline void schedule_rows(const RowsParams& p, int tile_cols, uint32_t rank, uint32_t mail, Push push,
                                     AtTail at_tail = {}) {
  const int col_tiles = (p.cols + tile_cols - 1) / tile_cols;
  RowScan<kRows> scan(p.sizes, p.groups, p.rows, col_tiles);
  Mailbox pair(rank, mail);
  uint32_t next = blockIdx.x / 2;
  while (true) {
    const FoundItem found = scan.find(uint32_t(pair.share(next)));
    if (pair.leader() && threadIdx.x % 32 == 0) next = uint32_t(atomicAdd(&p.draws->items, 1ull)) + gridDim.x / 2;
    Work work{};
    if (found.tile) {
      const Tile tile = kTileAt(found.item, (found.rows + kRows - 1) / kRows, col_tiles, rank);
      work.kind = Work::kTile;
      set_group(p, found, &work);
      const int height = kEven ? even_height(found.rows, kRows) : kRows;
      work.row0 = tile.row * height;
      work.col0 = tile.col * tile_cols;
      work.valid_rows = found.rows - work.row0;
      if (kEven && work.valid_rows > height) work.valid_rows = height;
      work.across = tile.across;
    } else {
      at_tail(found.end);
      const int64_t first = found.end + int64_t(found.item) * kTailRows;
      if (!p.clear_tail || first >= p.rows) break;
      work.kind = Work::kTail;
      work.end = int32_t(first);
    }
    push(work);
  }
  push(Work{});
}

// Coordinates of a row of a tile in a ragged map, `row` counted from the tile's first.
__device__ inline ptx::Coords ragged_at(const Work& work, int col, int row) {
  return {{col, kRagged - work.rows + work.row0 + row, kRagged, work.end}};
}

// Scales of this lane's rows of a tile, `row` + l/4 and 8 further; 1 past the group's last.
__device__ inline void row_scales(const float* of_rows, const Work& work, int row, float (&scale)[2]) {
  const int lane = threadIdx.x % 32;
  scale[0] = scale[1] = 1;
  if (of_rows == nullptr) return;
  of_rows += work.end - work.rows + work.row0 + row;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (row + lane / 4 + 8 * i < work.valid_rows) scale[i] = of_rows[lane / 4 + 8 * i];
  }
}

// The same of tiles with swapped operands, in which a lane has rows 8 j + 2t and 1 on.
__device__ inline void swapped_row_scales(const float* of_rows, const Work& work, int j, float (&scale)[2]) {
  scale[0] = scale[1] = 1;
  if (of_rows == nullptr) return;
  of_rows += work.end - work.rows + work.row0;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int row = 8 * j + 2 * (threadIdx.x % 4) + e;
    if (row < work.valid_rows) scale[e] = __ldg(of_rows + row);
  }
}

// Ends and stores the warp's 16 rows of a tile, the first of which is `row`; `first(v)` sees the four values of a
// column pair before anything else.
template <class Bias, class Out, int kCols, int kSlots, class Params, class Held_, class First>
__device__ inline void finish_and_store(const Params& p, const Work& work, int row, int cols, float (&acc)[kCols / 2],
                                        Slots<kSlots>& slots, Held_& held, First first) {
  float scale[2];
  row_scales(p.row_scale, work, row, scale);
  const char* bias = device::bias_at<Bias>(p, work.group, p.first_col + work.col0);
  const bool plain = bias == nullptr && p.row_scale == nullptr;
  const auto change = [&](int col, float (&v)[4]) {
    first(v);
    if (plain) return;
    float b[2] = {0, 0};
    if (bias != nullptr) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (col + i < cols) b[i] = Bias::value(p, bias, col + i);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = device::ended(v[i], scale[i / 2], b[i % 2], p.scale_bias);
  };
  store_part<Out, kCols>(acc, &p.out, ragged_at(work, work.col0, row), cols, slots, held, change);
}

// Zeros in `width` bytes of each of the kTailRows rows from work.end on, which are `pitch` bytes apart: half of the
// rows per CTA, by its consumer warps, a warp per row.
__device__ inline void clear_rows(const RowsParams& p, const Work& work, uint32_t rank, int thread, uint8_t* result,
                                  int64_t width, int64_t pitch) {
  const int64_t first = work.end + rank * (kTailRows / 2);
  int64_t end = first + kTailRows / 2;
  if (end > p.rows) end = p.rows;
  for (int64_t row = first + thread / 32; row < end; row += kConsumerWarps) {
    for (int64_t at = 16 * (thread % 32); at < width; at += 16 * 32) {
      *reinterpret_cast<int4*>(result + row * pitch + at) = int4{0, 0, 0, 0};
    }
  }
}

// The same in the columns that a product makes.
template <class Out>
__device__ inline void clear_result(const MatmulParams& p, const Work& work, uint32_t rank, int thread) {
  constexpr int64_t kBytes = sizeof(Out);
  clear_rows(p, work, rank, thread, p.result + p.first_col * kBytes, p.cols * kBytes, p.width * kBytes);
}

}  // namespace grouped::sm90
