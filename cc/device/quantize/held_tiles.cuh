// Tiles that a block holds in shared memory from the measuring of their values to the storing of their codes, because
// the scale of a group wants the amax of all of its values first. held_order.h has the order of that work; what is here
// are tiles and what a block shares, without values and codes. quantize_fp8_current_cuda.cu draws the pipeline.
#pragma once

#include "cc/device/quantize/held_order.h"
#include "cc/device/quantize/tiles.cuh"

namespace grouped {

constexpr int kHeldWorkers = kStoreThreads;
constexpr int kHeldThreads = kHeldWorkers + 64;  // and a warp that plans, and one that publishes

namespace device {

struct HeldTile : SourceTile {
  int kind;
  uint32_t item;
  uint32_t of_group;  // tiles of the group
  uint32_t end;       // the first item behind those of the group that are measured
  int count;          // rows of the transposed form, padding included
};

struct HeldShared {
  HeldTile tiles[kHeldInfos + 2];  // the last ones: of `redo`, by turns
  HeldStep steps[2];
  struct {
    int group;
    uint32_t of_group;
  } measured_tiles[kHeldQueue];
  // Amaxes of 16-bit values, by warp; the upper half says which tile it is, so nobody waits at a barrier.
  volatile uint32_t amax[kHeldQueue][kStoreWarps];
  volatile uint32_t published;  // tiles
  volatile uint32_t end;        // in the end: tiles that were measured, and 1
};

// By all threads, before their ways part.
__device__ inline void begin_held(HeldShared* s) {
  if (threadIdx.x < kHeldQueue * kStoreWarps) {
    s->amax[threadIdx.x / kStoreWarps][threadIdx.x % kStoreWarps] = 0;
  }
  if (threadIdx.x == 0) s->published = s->end = 0;
  __syncthreads();
}

// The workers and the warp that plans, once per step.
__device__ inline void meet_for_step() { asm volatile("bar.sync 1, %0;\n" ::"n"(kHeldWorkers + 32) : "memory"); }
// The workers.
__device__ inline void meet_workers() { asm volatile("bar.sync 2, %0;\n" ::"n"(kHeldWorkers) : "memory"); }

// By one lane of each warp of workers: its largest magnitude of the tile that the step measures.
__device__ inline void tell_amax(HeldShared* s, const HeldStep& step, uint32_t amax) {
  __threadfence_block();
  s->amax[step.measured % kHeldQueue][threadIdx.x / 32] = (step.measured + 1) << 16 | amax;
}

// Where groups are; `tiles` counts items. By all threads.
template <int kTileRows>
__device__ inline void scan_held(const StoreProblem& p, const GroupTable& t, int held_rows, int64_t* scratch) {
  list_groups<kHeldThreads, 4, kTileRows, false>(
      t, p.scan.count, p.rows, p.padded_rows, p.segment, scratch, [&](int g) { return p.sizes[g]; },
      [&](int64_t rows) {
        const int64_t tiles = divide_up(rows, kTileRows);
        return tiles + max(tiles - held_rows, int64_t{0});
      });
  __syncthreads();
}

// Item `item`; false behind the last one. By a whole warp. `near`: a group at or before that of the item, or 0.
template <int kTileRows, int kTileColumns>
__device__ inline bool find_held(const StoreLaunch& p, const HeldPlan& plan, const GroupTable& t, uint32_t item,
                                 int near, HeldTile* tile) {
  const uint32_t columns = plan.column_tiles.divisor, row_item = plan.column_tiles(item);
  uint32_t column = item - row_item * columns, first;
  int g, rows;
  int64_t source, padded = 0;
  if (p.ragged) {
    const int groups = p.scan.count + 1, wanted = static_cast<int>(row_item);
    if (wanted >= t.tiles[groups]) return false;
    // Most often one of the next groups.
    const int probe = near + static_cast<int>(threadIdx.x % 32);
    const uint32_t below = __ballot_sync(~0u, probe < groups && t.tiles[probe] <= wanted);
    g = ~below ? near + __popc(below) - 1 : near + 31 + find_last(t.tiles + near + 31, groups - near - 31, wanted);
    first = t.tiles[g];
    source = t.offsets[g];
    rows = g < p.scan.count ? t.offsets[g + 1] - t.offsets[g] : 0;
    if (p.segment) padded = t.segments[g];
  } else {
    g = static_cast<int>(plan.weight_items(row_item));
    if (g >= p.scan.count) return false;
    first = g * plan.weight_items.divisor;
    rows = static_cast<int>(p.rows);
    source = int64_t{g} * rows;
  }
  tile->group = g;
  tile->item = item;
  int at = static_cast<int>(row_item - first);
  if (g == p.scan.count) {  // what no group owns
    tile->kind = kStores;
    tile->row = at * kTileRows;
    tile->rows = 0;
  } else {
    const int tall = (rows + kTileRows - 1) / kTileRows, alone = max(tall - plan.held_rows, 0);
    tile->kind = at < alone ? kMeasures : at < tall ? kMeasures | kStores : kStores;
    if (at >= tall) {  // once more, last first
      at = alone - 1 - (at - tall);
      column = columns - 1 - column;
    }
    tile->of_group = tall * columns;
    tile->end = first * columns + tile->of_group;
    const int row = at * kTileRows, left = rows - row;
    tile->row = row;
    tile->rows = min(left, kTileRows);
    tile->count = p.segment && left <= kTileRows ? ((rows + p.segment - 1) & -p.segment) - row : tile->rows;
  }
  source += tile->row;
  const char* base = static_cast<const char*>(p.source);
  int64_t row = source;
  if (p.table && g < p.scan.count) {
    base = reinterpret_cast<const char*>(p.table[g]);
    row = tile->row;
  }
  if (p.gather.places) row = 0;
  tile->source = source;
  tile->padded = padded + tile->row;
  tile->column = column * kTileColumns;
  tile->columns = min(static_cast<int>(p.width) - static_cast<int>(tile->column), kTileColumns);
  tile->values = base + 2 * (row * p.width + tile->column);
  return true;
}

// What lane 0 reads of shared memory, in all lanes.
__device__ inline uint32_t read_by_warp(const volatile uint32_t& from) {
  const uint32_t value = __shfl_sync(~0u, threadIdx.x % 32 == 0 ? from : 0u, 0);
  __threadfence_block();
  return value;
}

// The warp that plans (plan_steps).
struct WarpPlanner {
  using Tile = HeldTile;

  const StoreLaunch& p;
  HeldShared* s;
  int lane;

  __device__ bool leads() const { return lane == 0; }
  __device__ uint32_t draw() const { return atomicAdd(p.drawn, 1u); }
  __device__ uint32_t share(uint32_t value) const { return __shfl_sync(~0u, value, 0); }
  // Lanes may read at different times.
  __device__ uint32_t scale(int group) const { return __shfl_sync(~0u, load_relaxed(p.scan.told + group), 0); }
  __device__ HeldTile& tile(int info) const { return s->tiles[info]; }
  __device__ uint32_t published() const { return read_by_warp(s->published); }
  __device__ void measure(uint32_t place, const HeldTile& tile) const {
    s->measured_tiles[place] = {tile.group, tile.of_group};
  }
  __device__ HeldStep& step(int turn) const { return s->steps[turn]; }
  __device__ void finish(uint32_t end) const { s->end = end; }
  __device__ void sync() const { __syncwarp(); }
  __device__ void meet() const {
    __syncwarp();
    meet_for_step();
  }
  __device__ void pause(unsigned nanoseconds) const { __nanosleep(nanoseconds); }
};

// The warp that publishes amaxes of tiles, of as many at once as there are, and the scale of a group behind its last
// one.
template <DType kFrom>
__device__ inline void publish_amaxes(const StoreLaunch& p, HeldShared* s) {
  constexpr int kAtOnce = 32 / kStoreWarps;
  const int lane = threadIdx.x % 32, which = lane / kStoreWarps;
  for (uint32_t done = 0;;) {
    const uint32_t end = read_by_warp(s->end), tile = done + which, place = tile % kHeldQueue;
    uint32_t amax = s->amax[place][lane % kStoreWarps];
    const uint32_t missing = ~__ballot_sync(~0u, amax >> 16 == ((tile + 1) & 0xFFFF));
    const int count = missing ? (__ffs(missing) - 1) / kStoreWarps : kAtOnce;
    if (count == 0) {
      if (end == done + 1) return;
      __nanosleep(20);
      continue;
    }
    __threadfence_block();
    amax &= 0xFFFF;
#pragma unroll
    for (int mask = 1; mask < kStoreWarps; mask *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, mask));
    if (which < count && lane % kStoreWarps == 0) {
      const int group = s->measured_tiles[place].group;
      const uint32_t of_group = s->measured_tiles[place].of_group;
      atomicMax(p.scan.amax + group, float_bits(amax_value(amax_of<kFrom>(amax))));
      __threadfence();
      if (atomicAdd(p.scan.counted + group, 1u) + 1 == of_group) {
        __threadfence();
        const float scale = group_scale(p.rule, true, load_relaxed(p.scan.amax + group)).scale;
        store_relaxed(p.scan.told + group, float_bits(scale) | kTold);
      }
    }
    __syncwarp();
    __threadfence_block();
    done += count;
    if (lane == 0) s->published = done;
  }
}

}  // namespace device
}  // namespace grouped
