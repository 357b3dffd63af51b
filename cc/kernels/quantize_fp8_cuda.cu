// FP8 codes of bf16, fp16 or fp32 values: a scale per group, blocks of 128 (or 128 x 128), MXFP8's blocks of 32 in
// place. Both forms come from one read; quantize_fp8_rows_cuda.cu has blocks along rows where rows alone are wanted.
//
// One launch: each block scans the group sizes into its shared memory, then draws tiles of 128 x 128 values of one
// group, 256 threads with 8 columns of 8 rows each. Current scaling, where quantize_fp8_current_cuda.cu refuses it, has
// a launch before, of which only amaxes remain; the second one then starts from the last tile. Under delayed scaling
// groups that have no scale yet are measured by the launch that stores, before its first tile (start_groups).
//
//     cp.async, 16 bytes per row --> own part of shared memory --> 32 registers --> amaxes, two values per word
//                 ^ the next tile's, as soon as this one's are in registers: no other thread reads them, no barrier
//     rows:    amax over 16 lanes (4 for blocks of 32), scattered so that each lane finds the scale of one row
//              --> scales back by shuffles --> codes, 8 bytes per row and lane
//     columns: amax over the 8 warps through shared memory, a scale per thread --> codes of two rows per conversion
//              --> transposed: 16 KiB of shared memory, swizzled by 8 bytes --> lines of 128 bytes
//
// 32 KiB of raw values, 16 of transposed codes, 4 of amaxes and factors, 8 or 12 bytes per group; 4 blocks per SM (64
// registers) keep 128 KiB in flight, 2 (128 registers) 64 KiB where both forms are made. Bound by memory: 3.03 bytes a
// value for one form, 4.06 for both.
//
// fp32 values: the same tiles, 64 KiB and 64 registers of values, so 2 blocks per SM (128 registers) for all forms. A
// thread's 8 columns are 32 bytes of a row there, of which a warp would read half sectors: its lanes load a row in
// turn, 512 bytes, and find their own in the warp's 8 KiB, swizzled by 16 bytes. 5.03 and 6.06 bytes per value.
// Members of a list that are not aligned are read value by value (copy_lines). Of gathered rows eight lanes find the
// places, one row each, before the tile's copies start.
#include <string>
#include <type_traits>

#include "cc/api/operands.h"
#include "cc/device/quantize/fp8_tile.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr int kThreads = kStoreThreads;
constexpr int kWarps = kStoreWarps;
// Blocks of an SM. Both forms, and values of 32 bits, want registers more than blocks.
template <DType kFrom, int kForms>
constexpr int kBlocks = kFrom == DType::f32 || kForms == kRows + kColumns ? 2 : 4;

// Rows alone with scales of groups, and the amaxes of these.
template <bool kSquare, int kForms>
constexpr bool kIsWide = !kSquare && kForms <= kRows;

// The table follows it.
template <DType kFrom>
struct Shared {
  uint4 raw[kVector * kBytes<kFrom> / 2][kThreads];
  SourceTile next[kWarps];
  uint32_t warp_amax[kWarps];
  int64_t sums[34];
  Turns::Shared turns;
};
template <DType kFrom>
struct ColumnShared : Shared<kFrom> {
  ColumnScratch<kFrom> columns;
};

// Of fp32 values: where in a row of 16-byte pieces, 32 of a warp, a piece is. Eight lanes that read every other one
// find them in different banks.
__device__ inline int swizzled(int piece) { return piece ^ (piece >> 3 & 1); }

template <DType kFrom, bool kWide, bool kGather>
__device__ inline void load_tile(const StoreProblem& p, const SourceTile& tile, Shared<kFrom>* s) {
  const Shape<kWide> at;
  const int64_t pitch = kBytes<kFrom> * p.width;
  const bool vectors = has_vectors(tile.values);
  if constexpr (kGather) {
    // Eight lanes of those that share rows look up one each.
    const int row = at.row + threadIdx.x % kVector;
    const int own = row < tile.rows ? p.gather.row(tile.source + row) : -1;
    const char* const from = tile.values + 2 * at.column;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const int found = __shfl_sync(~0u, own, threadIdx.x % 32 / kLanes * kLanes + i);
      copy_vector(&s->raw[i][threadIdx.x], from + max(found, 0) * pitch, found >= 0 && at.column < tile.columns);
    }
  } else if constexpr (kFrom != DType::f32) {
    copy_lines<kFrom, kVector>(&s->raw[0][threadIdx.x], kThreads, tile.values + at.row * pitch + 2 * at.column, pitch,
                               at.column < tile.columns ? tile.rows - at.row : 0, vectors);
  } else {
    // Of the warp's 8 rows of 256 columns, or 16 of 128: runs of 128 columns, of which a lane has 4.
    constexpr int kParts = kWide ? 2 : 1, kLines = 2 * kVector / kParts;
    const int lane = threadIdx.x % 32, row = at.row - (kWide ? 0 : lane / kLanes * kVector);
    const int first = at.column - (kWide ? lane * kVector : lane % kLanes * kVector) + 4 * lane;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int column = first + part * kStoreColumns;
      copy_lines<kFrom, kLines>(&s->raw[part * kLines][threadIdx.x - lane + swizzled(lane)], kThreads,
                                tile.values + row * pitch + 4 * column, pitch,
                                column < tile.columns ? tile.rows - row : 0, vectors);
    }
  }
  commit_copies();
}

template <DType kFrom>
__device__ inline void take_tile(const Shared<kFrom>* s, Eight<kFrom> (&raw)[kVector]) {
  wait_all_copies();
  if constexpr (kFrom != DType::f32) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) raw[i] = s->raw[i][threadIdx.x];
  } else {
    // Lines of the upper half of lanes follow those of the lower one: rows 8 to 15, or columns 128 to 255.
    const int lane = threadIdx.x % 32, line = lane / kLanes * kVector, piece = lane % kLanes * 2;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const uint4* from = &s->raw[line + i][threadIdx.x - lane];
      raw[i] = {from[swizzled(piece)], from[swizzled(piece + 1)]};
    }
    __syncwarp();  // from here on the next tile may come
  }
}

// The scale of a whole tile, of either form: square blocks.
template <DType kFrom>
__device__ inline float square_factor(const StoreProblem& p, const StoreTile& tile, const Eight<kFrom> (&raw)[kVector],
                                      Shared<kFrom>* s) {
  const uint32_t warp = __reduce_max_sync(~0u, largest(raw));
  if (threadIdx.x % 32 == 0) s->warp_amax[threadIdx.x / 32] = warp;
  __syncthreads();
  uint32_t amax = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) amax = max(amax, s->warp_amax[w]);
  const BlockScale of_block = scale_of<kStoreRows>(p, amax_of<kFrom>(amax));
  const int64_t row = tile.row / kStoreRows, column = tile.column / kStoreColumns;
  if (threadIdx.x == 0) {
    for (const QuantizedForm& form : p.forms) {
      if (form.values) put_scale(form.scales, true, form.place.at(tile.group, row, column), of_block.scale_inv);
    }
  }
  return of_block.scale;
}

template <DType kFrom, int kForms>
using SharedOf = typename std::conditional<(kForms & kColumns) != 0, ColumnShared<kFrom>, Shared<kFrom>>::type;

// Raises the amaxes of groups that have not started. NOTE: in first steps alone. It is called where nothing is alive
// yet and finds everything again, because inlined, or called later, it would cost other steps registers.
template <DType kFrom, bool kWide, bool kGather>
__device__ __noinline__ void start_groups(const StoreLaunch& p, uint32_t column_tiles, Shared<kFrom>* s,
                                          void* table_memory) {
  using Tile = Shape<kWide>;
  const GroupTable table(p, table_memory);
  if (p.ragged) scan_sizes<Tile::kRows>(p, table, s->sums);
  const uint32_t tiles = tiles_in_all<Tile::kRows>(p, table, column_tiles);
  measure_first(p, tiles, &s->warp_amax[0], [&](uint32_t item) {
    SourceTile tile;
    if (!find_source<kFrom, Tile::kRows, Tile::kColumns>(p, table, item, column_tiles, &tile)) return false;
    if (tile.group == p.scan.count || has_started(p, tile.group)) return true;
    load_tile<kFrom, kWide, kGather>(p, tile, s);
    Eight<kFrom> raw[kVector];
    take_tile<kFrom>(s, raw);
    raise_amax(p.scan.amax + tile.group, amax_of<kFrom>(largest(raw)));
    return true;
  });
}

// kBlock 0: one scale per group; kSquare: of blocks 128 x 128. kForms 0: amaxes alone. kGather: of gathered rows.
template <DType kFrom, int kBlock, bool kSquare, int kForms, bool kGather>
__global__ void __launch_bounds__(kThreads, kBlocks<kFrom, kForms>)
    store_tiles(const __grid_constant__ StoreLaunch p, uint32_t column_tiles) {
  constexpr bool kWide = kIsWide<kSquare, kForms>;
  using Tile = Shape<kWide>;
  extern __shared__ uint4 dynamic_shared[];
  if (p.skip && *p.skip != 0) return;
  using Scratch = SharedOf<kFrom, kForms>;
  Scratch* s = reinterpret_cast<Scratch*>(dynamic_shared);
  if constexpr (kBlock == 0 && kForms != 0) {
    if (p.starting && must_start(p)) start_groups<kFrom, kWide, kGather>(p, column_tiles, s, s + 1);
  }
  const GroupTable table(p, s + 1);
  Turns turns(p, &s->turns);
  if (p.ragged) scan_sizes<Tile::kRows>(p, table, s->sums);
  SourceTile tile;
  SourceTile& next = s->next[threadIdx.x / 32];
  const auto find = [&](uint32_t item, SourceTile* found) {
    return find_source<kFrom, Tile::kRows, Tile::kColumns>(p, table, item, column_tiles, found);
  };
  bool more = find(blockIdx.x, &tile);
  if (more && tile.group < p.scan.count) load_tile<kFrom, kWide, kGather>(p, tile, s);
  if (kBlock == 0 && kForms && blockIdx.x == 0) store_group_scales(p);
  for (; more; tile = next, turns.advance()) {
    turns.draw();
    // While this tile's values arrive.
    more = find_next(next, [&](SourceTile* found) { return find(turns.next(), found); });
    if (tile.group == p.scan.count) {
      if constexpr (kForms == 0) break;  // nothing comes behind
      store_nothing(p, tile, Tile::kRows, kThreads);
      if (more && next.group < p.scan.count) load_tile<kFrom, kWide, kGather>(p, next, s);
      turns.meet();
      continue;
    }
    Eight<kFrom> raw[kVector];
    take_tile<kFrom>(s, raw);
    if (more && next.group < p.scan.count) load_tile<kFrom, kWide, kGather>(p, next, s);
    turns.meet();  // the codes and amaxes of the tile before have left shared memory
    if (!kForms || p.measure) turns.see(amax_of<kFrom>(largest(raw)), tile.group);
    if constexpr (kForms == 0) continue;
    float shared = 1.0f;
    if (kBlock == 0) shared = group_scale_of(p.scan, p.rule, true, p.scale, false, tile.group).scale;
    if (kSquare) shared = square_factor<kFrom>(p, tile, raw, s);
    float factors[kVector];
    if constexpr ((kForms & kRows) != 0) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) factors[i] = shared;
      if constexpr (kBlock > 0 && !kSquare) row_factors<kFrom, kBlock, Tile>(p, tile, raw, factors);
      const QuantizedForm& form = p.forms[0];
      with_type(p.type, [&](auto type) {
        put_rows<decltype(type), kFrom, Tile>(tile, raw, form.values + tile.source * form.pitch + tile.column,
                                              form.pitch, tile.rows, [&](int i, int) { return factors[i]; });
      });
    }
    if constexpr ((kForms & kColumns) != 0) {
      if constexpr (kForms == kRows + kColumns) {
        forget_values(raw);
        asm volatile("" : "+f"(shared));
      }
      const int count = p.segment ? (tile.rows + p.segment - 1) / p.segment * p.segment : tile.rows;
#pragma unroll
      for (int i = 0; i < kVector; ++i) factors[i] = shared;
      if constexpr (kBlock > 0 && !kSquare) column_factors<kFrom, kBlock>(p, tile, raw, count, &s->columns, factors);
      const QuantizedForm& form = p.forms[1];
      with_type(p.type, [&](auto type) {
        if (kBlock == 32 && !p.transposed) {
          put_rows<decltype(type), kFrom, Tile>(tile, raw, form.values + tile.padded * form.pitch + tile.column,
                                                form.pitch, count, [&](int, int c) { return factors[c]; });
        } else {
          put_transposed<decltype(type), kFrom>(p, tile, raw, factors, count, &s->columns);
        }
      });
    }
  }
  turns.finish();
}

std::string refuses(const Quantize& call, const Target& target) {
  const std::string reason = refuses_tiles(call, target);
  if (!reason.empty()) return reason;
  if (call.places.present() && call.source.dtype == DType::f32) return "gathers rows of 16-bit values";
  if (call.rule != "fp32" && call.rule != "e8m0") return "has no rule " + call.rule;
  if (call.rule == "fp32" && call.block != 0 && call.block != 128) return "takes blocks of 128";
  if (call.rule == "e8m0" && (call.block != 32 || call.block_outer != 1)) return "takes blocks of 32";
  const bool along_rows = call.block != 0 && call.block_outer == 1;
  if (!call.cross_values.present() && along_rows) return "takes blocks along rows where the cross form is wanted too";
  return refuses_fp8_forms(call);
}

size_t workspace(const Quantize& call, const Target&) { return StoreScan::bytes(groups_of(call)); }

template <DType kFrom, int kBlock, bool kSquare, int kForms, bool kGather>
void run_one(const Quantize& call, StoreLaunch p, const LaunchOptions& how) {
  using Tile = Shape<kIsWide<kSquare, kForms>>;
  constexpr auto kKernel = store_tiles<kFrom, kBlock, kSquare, kForms, kGather>;
  constexpr int kOwnBytes = sizeof(SharedOf<kFrom, kForms>);
  const int bytes = kOwnBytes + GroupTable::bytes(p);
  allow_shared_memory<kKernel>(most_shared_bytes<kOwnBytes>());
  const int64_t column_tiles = divide_up(p.width, Tile::kColumns);
  const int64_t tiles = most_row_tiles_of(call, Tile::kRows) * column_tiles;
  const unsigned grid = blocks_for(tiles, kBlocks<kFrom, kForms>, bytes);
  if (grid == 0) return;
  ready_to_draw(&p, tiles, grid, how);
  kKernel<<<grid, kThreads, bytes, how.stream>>>(p, static_cast<uint32_t>(column_tiles));
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

template <DType kFrom, int kBlock, bool kSquare, int kForms>
void run(const Quantize& call, const StoreLaunch& p, const LaunchOptions& how) {
  if constexpr (kFrom != DType::f32 && !kSquare) {
    if (p.gather.places) return run_one<kFrom, kBlock, kSquare, kForms, true>(call, p, how);
  }
  run_one<kFrom, kBlock, kSquare, kForms, false>(call, p, how);
}

template <DType kFrom, int kBlock, bool kSquare>
void run_forms(const Quantize& call, const StoreLaunch& p, const LaunchOptions& how) {
  if (!p.forms[0].values) return run<kFrom, kBlock, kSquare, kColumns>(call, p, how);
  if constexpr (kBlock == 0 || kSquare) {
    if (!p.forms[1].values) return run<kFrom, kBlock, kSquare, kRows>(call, p, how);
  }
  run<kFrom, kBlock, kSquare, kRows + kColumns>(call, p, how);
}

template <DType kFrom>
void launch_as(const Quantize& call, const Context& context) {
  launch_tiles<StoreLaunch>(
      call, context, [&](const StoreLaunch& p, const LaunchOptions& how) { run<kFrom, 0, false, 0>(call, p, how); },
      [&](const StoreLaunch& p, const LaunchOptions& how) {
        if (p.block == 0) return run_forms<kFrom, 0, false>(call, p, how);
        if (p.block == 32) return run_forms<kFrom, 32, false>(call, p, how);
        if (p.block_outer > 1) return run_forms<kFrom, 128, true>(call, p, how);
        run_forms<kFrom, 128, false>(call, p, how);
      });
}

void launch(const Quantize& call, const Context& context) {
  if (call.source.dtype == DType::f32) return launch_as<DType::f32>(call, context);
  if (call.source.dtype == DType::bf16) return launch_as<DType::bf16>(call, context);
  launch_as<DType::f16>(call, context);
}

}  // namespace

const Kernel<Quantize> quantize_fp8_cuda = {"quantize_fp8_cuda", Arch::cuda, Kind::special, refuses,
                                            workspace,           launch,     kAlignment};

}  // namespace grouped
