// FP8 codes of bf16 or fp16 values under current scaling: a scale per group, known when all of the group's values are.
// Values are read once: a block keeps them in shared memory from the measuring to the storing (held_tiles.cuh).
//
// 264 blocks on Hopper, two per SM, of 320 threads. A tile is 64 rows x 128 columns of one group, or 8 x 1024 where
// rows alone are stored: 8 warps with 8 rows x 128 columns each, 4 columns of 8 rows per lane. A step of a block:
//
//     workers   cp.async of tile i + 5 | codes of tile i | amax of tile i + 5
//     planner   draws a tile, finds it, asks whether the scale of tile i + 1 is known: the next step
//     publisher atomicMax on the amax of the group, one more of its tiles; behind the last one its scale
//
//     codes     8 bytes per row and lane --> * scale --> 4 codes --> rows: lines of 128 bytes
//                                                               --> columns: 4 x 4 bytes transposed in registers -->
//                                                                   8 KiB of shared memory --> lines of 64 bytes
//
// Six slots of 16 KiB, so an H200 holds 26 MB of values; 8 KiB of transposed codes, 2 of tiles, 4 bytes per
// tile that may be forgotten, 8 or 12 bytes per group (fewer slots if there are many). 80 registers, no spills. Bound
// by memory: 3 bytes per value for one form, 4 for both. Members of a list that are not aligned are read value by
// value.
#include <algorithm>
#include <string>

#include "cc/api/operands.h"
#include "cc/device/quantize/fp8_tile.cuh"
#include "cc/device/quantize/held_tiles.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr int kBlocks = 2;  // of an SM
constexpr int kEach = 4;    // columns of a lane
constexpr int kWarpColumns = 32 * kEach;
constexpr int kPieces = kWarpColumns / 8;      // of 16 bytes, in a row of a warp
constexpr int kWarpUnits = kVector * kPieces;  // of 16 bytes, of a warp
constexpr int kSlotUnits = kWarpUnits * kStoreWarps;
constexpr int kSlotBytes = kSlotUnits * static_cast<int>(sizeof(uint4));
constexpr int kLeastSlots = 3;                      // one that is loaded, one that is stored, and one that waits
constexpr int64_t kMostWeight = int64_t{16} << 20;  // bytes of a weight that the grid holds

template <bool kWide>
struct HeldShape {
  static constexpr int kRows = kWide ? kVector : kVector * kStoreWarps;
  static constexpr int kColumns = kWide ? kWarpColumns * kStoreWarps : kWarpColumns;

  // Of the warp.
  int row = kWide ? 0 : threadIdx.x / 32 * kVector;
  int column = kWide ? threadIdx.x / 32 * kWarpColumns : 0;
};

// `redo` and the table follow it.
struct Shared {
  uint64_t transposed[kWarpColumns / 2][16];  // 8 rows of a column in a word, two columns in a row of 128 bytes
  HeldShared held;
  int64_t sums[34];
};

// Starts the copies of a warp's rows, two at a time. Of gathered rows lanes look up one each.
template <DType kFrom, bool kWide, bool kGather>
__device__ inline void load_tile(const StoreProblem& p, const HeldTile& tile, uint4* slot) {
  const HeldShape<kWide> at;
  const int64_t pitch = 2 * p.width;
  const int lane = threadIdx.x % 32, row = at.row + lane / kPieces, column = at.column + lane % kPieces * 8;
  uint4* const to = slot + threadIdx.x / 32 * kWarpUnits + lane;
  if constexpr (kGather) {
    const int looked = at.row + lane % kVector;
    const int own = looked < tile.rows ? p.gather.row(tile.source + looked) : -1;
    const char* const from = tile.values + 2 * column;
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      const int found = __shfl_sync(~0u, own, 2 * i + lane / kPieces);
      copy_vector(to + 32 * i, from + max(found, 0) * pitch, found >= 0 && column < tile.columns);
    }
  } else {
    const int exist = column < tile.columns ? (tile.rows - row + 1) / 2 : 0;
    copy_lines<kFrom, kVector / 2>(to, 32, tile.values + row * pitch + 2 * column, 2 * pitch, exist,
                                   has_vectors(tile.values));
  }
}

template <DType kFrom>
__device__ inline uint32_t largest_of_warp(const uint4* slot) {
  const uint4* const from = slot + threadIdx.x / 32 * kWarpUnits + threadIdx.x % 32;
  uint4 found = {};
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) found = larger_of(found, from[32 * i]);
  return __reduce_max_sync(~0u, largest_of(found));
}

// Four codes of each row of this lane.
template <class T, DType kFrom>
__device__ inline void encode_rows(const uint4* slot, float scale, uint32_t (&codes)[kVector]) {
  const uint2* const from = reinterpret_cast<const uint2*>(slot + threadIdx.x / 32 * kWarpUnits) + threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const uint2 raw = from[32 * i];
    const uint4 values = {raw.x, raw.y, 0, 0};
    const auto pair = [&](int c) {
      return encode_pair<T>(fl_mul(value_at<kFrom>(values, c), scale), fl_mul(value_at<kFrom>(values, c + 1), scale));
    };
    codes[i] = joined(pair(0), pair(2));
  }
}

template <bool kWide>
__device__ inline void put_row_codes(const StoreProblem& p, const HeldTile& tile, const uint32_t (&codes)[kVector]) {
  const HeldShape<kWide> at;
  const QuantizedForm& form = p.forms[0];
  const int column = at.column + threadIdx.x % 32 * kEach, count = column < tile.columns ? tile.rows - at.row : 0;
  uint8_t* to = form.values + (tile.source + at.row) * form.pitch + tile.column + column;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < count) *reinterpret_cast<uint32_t*>(to) = codes[i];
    to += form.pitch;
  }
}

__device__ inline void put_column_codes(const StoreProblem& p, const HeldTile& tile, const uint32_t (&codes)[kVector],
                                        Shared* s) {
  constexpr int kTall = HeldShape<false>::kRows, kChunks = kTall / 16;  // of 16 bytes, in a line
  constexpr int kLines = kHeldWorkers / kChunks;                        // at once
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t words[kEach][2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint32_t rows[4] = {codes[4 * k], codes[4 * k + 1], codes[4 * k + 2], codes[4 * k + 3]};
    uint32_t columns[4];
    turn_codes(rows, columns);
#pragma unroll
    for (int c = 0; c < kEach; ++c) words[c][k] = columns[c];
  }
  // Sixteen lanes write the same word of columns that are 4 apart, to different banks.
#pragma unroll
  for (int c = 0; c < kEach; ++c) {
    s->transposed[2 * lane + c / 2][(c % 2 * 8 + warp) ^ (lane % 16)] = words[c][0] | static_cast<uint64_t>(words[c][1])
                                                                                          << 32;
  }
  meet_workers();
  const QuantizedForm& form = p.forms[1];
  uint8_t* const to = form.values + ((p.ragged ? 0 : tile.group * p.width) + tile.column) * form.pitch +
                      (p.ragged ? tile.padded : tile.row);
  const int chunk = threadIdx.x % kChunks;
#pragma unroll
  for (int i = 0; i < kWarpColumns / kLines; ++i) {
    const int column = threadIdx.x / kChunks + i * kLines, swap = column / kEach % 16;
    const ulonglong2 v =
        *reinterpret_cast<const ulonglong2*>(&s->transposed[column / 2][(column % 2 * 8 + 2 * chunk) ^ (swap & ~1)]);
    if (column >= tile.columns) continue;
    uint8_t* const line = to + column * form.pitch + chunk * 16;
    if (chunk * 16 < tile.count) {
      *reinterpret_cast<ulonglong2*>(line) = swap & 1 ? ulonglong2{v.y, v.x} : v;
    }
    // Padding behind the tile, codes of zeros: segments are up to two tiles long, and scales are finite.
    if (kTall + chunk * 16 < tile.count) *reinterpret_cast<uint4*>(line + kTall) = uint4{};
  }
}

__device__ inline void put_group_scale(const StoreProblem& p, int group, float scale) {
  const float inverse = scale_inv(scale);
  if (p.forms[0].group_scales) p.forms[0].group_scales[group] = inverse;
  if (p.forms[1].group_scales) p.forms[1].group_scales[group] = inverse;
}

// What a step stores, by all workers.
template <DType kFrom, int kForms>
__device__ inline void store_tile(const StoreProblem& p, const HeldStep& step, const uint4* slots, Shared* s) {
  constexpr bool kWide = kForms == kRows;
  const HeldTile& tile = s->held.tiles[info_of(step.store)];
  if (tile.group == p.scan.count) return store_nothing(p, tile, HeldShape<kWide>::kRows, kHeldWorkers);
  if (threadIdx.x == 0 && tile.row == 0 && tile.column == 0) put_group_scale(p, tile.group, step.scale);
  uint32_t codes[kVector];
  with_type(p.type, [&](auto type) {
    encode_rows<decltype(type), kFrom>(slots + slot_of(step.store) * kSlotUnits, step.scale, codes);
  });
  if constexpr ((kForms & kRows) != 0) put_row_codes<kWide>(p, tile, codes);
  if constexpr ((kForms & kColumns) != 0) put_column_codes(p, tile, codes, s);
}

template <DType kFrom, int kForms, bool kGather>
__global__ void __launch_bounds__(kHeldThreads, kBlocks)
    store_current(const __grid_constant__ StoreLaunch p, const __grid_constant__ HeldPlan plan) {
  constexpr bool kWide = kForms == kRows;
  using Tile = HeldShape<kWide>;
  extern __shared__ uint4 dynamic_shared[];
  if (p.skip && *p.skip != 0) return;
  uint4* const slots = dynamic_shared;
  Shared* const s = reinterpret_cast<Shared*>(slots + plan.slots * kSlotUnits);
  uint32_t* const redo = reinterpret_cast<uint32_t*>(s + 1);
  const GroupTable table(p, redo + plan.most_redo);
  if (p.ragged) scan_held<Tile::kRows>(p, table, plan.held_rows, s->sums);
  if (p.ragged && blockIdx.x == 0) {
    const float none = group_scale(p.rule, true, 0).scale;
    for (int g = threadIdx.x; g < p.scan.count; g += kHeldThreads) {
      if (table.offsets[g + 1] == table.offsets[g]) put_group_scale(p, g, none);  // no tile will
    }
  }
  begin_held(&s->held);
  const int warp = threadIdx.x / 32;
  if (warp == kStoreWarps) {
    WarpPlanner planner = {p, &s->held, static_cast<int>(threadIdx.x % 32)};
    return plan_steps(planner, plan, p.scan.count, redo, [&](uint32_t item, int near, HeldTile* tile) {
      return find_held<Tile::kRows, Tile::kColumns>(p, plan, table, item, near, tile);
    });
  }
  if (warp > kStoreWarps) return publish_amaxes<kFrom>(p, &s->held);
  for (int turn = 0;; turn ^= 1) {
    meet_for_step();
    const HeldStep step = s->held.steps[turn];
    if (step.done) return;
    if (step.load >= 0) {
      load_tile<kFrom, kWide, kGather>(p, s->held.tiles[info_of(step.load)], slots + slot_of(step.load) * kSlotUnits);
    }
    if (step.store >= 0) store_tile<kFrom, kForms>(p, step, slots, s);
    wait_all_copies();
    __syncwarp();
    if (step.measures) {
      const uint32_t amax = largest_of_warp<kFrom>(slots + slot_of(step.load) * kSlotUnits);
      if (threadIdx.x % 32 == 0) tell_amax(&s->held, step, amax);
    }
  }
}

std::string refuses(const Quantize& call, const Target& target) {
  const std::string reason = refuses_tiles(call, target);
  if (!reason.empty()) return reason;
  const bool ragged = call.group_sizes.present();
  if (call.rule != "fp32" || call.block != 0 || call.scale.present()) return "takes current scaling";
  if (call.source.dtype == DType::f32) return "takes 16-bit values, not " + describe(call.source);
  if (has_small_blocks(target)) return "holds more than the shared memory of this device";
  if (ragged && groups_of(call) > kFewGroups) return "takes up to " + std::to_string(kFewGroups) + " groups of rows";
  const int64_t tall = call.source.dims[ragged ? 0 : 1], width = call.source.dims[ragged ? 1 : 2];
  if (!ragged && 2 * tall * width > kMostWeight) return "takes weights of up to 16 MiB";
  // Tiles of a group that is too large count twice.
  if (most_row_tiles_of(call, kVector) * divide_up(width, kWarpColumns) >= kMostRows / 2) {
    return "takes fewer than 2^30 tiles of 8 rows x 128 columns";
  }
  return refuses_fp8_forms(call);
}

size_t workspace(const Quantize& call, const Target&) { return StoreScan::bytes(groups_of(call)); }

template <DType kFrom, int kForms, bool kGather>
void run_one(const Quantize& call, const StoreLaunch& p, cudaStream_t stream) {
  using Tile = HeldShape<kForms == kRows>;
  constexpr auto kKernel = store_current<kFrom, kForms, kGather>;
  const int64_t column_tiles = divide_up(p.width, Tile::kColumns);
  const int64_t tiles = most_row_tiles_of(call, Tile::kRows) * column_tiles;
  const int64_t grid = std::min(tiles, int64_t{kBlocks} * multiprocessors());
  const int most_bytes = shared_memory_of_sm() / kBlocks - kReserved;
  HeldPlan plan = {};
  plan.most_redo = HeldPlan::most_redo_of(static_cast<int>(grid));
  const int own =
      static_cast<int>(sizeof(Shared) + sizeof(uint32_t) * static_cast<size_t>(plan.most_redo)) + GroupTable::bytes(p);
  plan.slots = std::max(std::min((most_bytes - own) / kSlotBytes, kMostSlots), kLeastSlots);
  plan.held_rows = HeldPlan::held_rows_of(static_cast<int>(grid), plan.slots, column_tiles);
  plan.column_tiles = Divider::of(static_cast<uint32_t>(column_tiles));
  const int64_t tall = std::max<int64_t>(divide_up(p.rows, Tile::kRows), 1);  // of a weight
  plan.weight_items = Divider::of(static_cast<uint32_t>(tall + std::max<int64_t>(tall - plan.held_rows, 0)));
  allow_shared_memory<kKernel>(most_bytes);
  kKernel<<<static_cast<unsigned>(grid), kHeldThreads, own + plan.slots * kSlotBytes, stream>>>(p, plan);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

template <DType kFrom, int kForms>
void run(const Quantize& call, const StoreLaunch& p, cudaStream_t stream) {
  if (p.gather.places) return run_one<kFrom, kForms, true>(call, p, stream);
  run_one<kFrom, kForms, false>(call, p, stream);
}

template <DType kFrom>
void run_forms(const Quantize& call, const StoreLaunch& p, cudaStream_t stream) {
  if (!p.forms[0].values) return run<kFrom, kColumns>(call, p, stream);
  if (!p.forms[1].values) return run<kFrom, kRows>(call, p, stream);
  run<kFrom, kRows + kColumns>(call, p, stream);
}

void launch(const Quantize& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  StoreLaunch p = launch_of<StoreLaunch>(call, context);
  p.scan.count_in(zeros_or_clear(context, p.scan.drawn, p.scan.counters()));
  p.drawn = p.scan.drawn;
  call.source.dtype == DType::bf16 ? run_forms<DType::bf16>(call, p, stream) : run_forms<DType::f16>(call, p, stream);
  if (call.amax.present()) launch_finish(call, p, stream);
}

}  // namespace

const Kernel<Quantize> quantize_fp8_current_cuda = {
    "quantize_fp8_current_cuda", Arch::cuda, Kind::special, refuses, workspace, launch, kAlignment};

}  // namespace grouped
