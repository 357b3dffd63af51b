// Tiles that a block holds in shared memory from the measuring of their values to the storing of their codes, because
// the scale of a group wants the amax of all of its values first. What is here is the order of that work, without
// values and codes; quantize_fp8_current_cuda.cu draws the pipeline.
//
// Blocks draw items from a counter. An item is a tile that is measured and stored. Of a group with more row tiles than
// the grid holds (HeldPlan) the first ones are measured alone, and come a second time behind the others, last first.
//
// A block waits for tiles alone that running blocks have drawn, so it does not matter which blocks run. Where all of
// its slots wait for long for a group of which tiles may still have to be drawn, mostly because fewer blocks run than
// the grid has, it forgets the values of its oldest tile, measures on, and reads them again when the group's scale is
// known (`redo`). It does so too for a slot in which it can read again what it had forgotten.
#pragma once

#include "cc/device/quantize/tiles.cuh"

namespace grouped {

constexpr int kHeldWorkers = kStoreThreads;
constexpr int kHeldThreads = kHeldWorkers + 64;  // and a warp that plans, and one that publishes
constexpr int kMostSlots = 8;
constexpr int kHeldInfos = 16;  // a tile is known until the step that stores it has ended
static_assert(kMostSlots + 3 < kHeldInfos);

// Division of numbers below 2^31 by a number that the host knows.
struct Divider {
  uint32_t divisor, multiplier;
  int shift;

  static Divider of(uint32_t divisor) {
    int bits = 0;
    while (uint64_t{1} << bits < divisor) ++bits;
    const uint64_t one = uint64_t{1} << (31 + bits);
    return {divisor, static_cast<uint32_t>((one + divisor - 1) / divisor), 31 + bits};
  }
  __device__ uint32_t operator()(uint32_t value) const {
    return static_cast<uint32_t>(uint64_t{value} * multiplier >> shift);
  }
};

// Of one launch.
struct HeldPlan {
  Divider column_tiles;
  Divider weight_items;  // in rows: items of a weight
  int slots;             // tiles that a block holds
  int held_rows;         // row tiles of a group that the grid holds
  int most_redo;         // entries of `redo`: more than those, and one
};

namespace device {

enum HeldKind : int { kMeasures = 1, kStores = 2 };  // what an item asks for, a set

struct HeldTile : SourceTile {
  int kind;
  uint32_t item;
  uint32_t of_group;  // tiles of the group
  uint32_t end;       // the first item behind those of the group that are measured
  int count;          // rows of the transposed form, padding included
};

// What a block does in one step: tiles as held_at() has them, or -1.
struct HeldStep {
  int load, store;
  bool measures;      // what it loads
  uint32_t measured;  // tiles before this step
  float scale;        // of what is stored
  bool done;
};

// A tile's entry in HeldShared, and the slot of its values.
__device__ inline int held_at(int info, int slot) { return info << 8 | slot; }
__device__ inline int info_of(int at) { return at >> 8; }
__device__ inline int slot_of(int at) { return at & 0xFF; }

struct HeldShared {
  static constexpr int kQueue = 8;  // tiles on their way from the workers to the warp that publishes

  HeldTile tiles[kHeldInfos + 2];  // the last ones: of `redo`, by turns
  HeldStep steps[2];
  struct {
    int group;
    uint32_t of_group;
  } measured_tiles[kQueue];
  // Amaxes of 16-bit values, by warp; the upper half says which tile it is, so nobody waits at a barrier.
  volatile uint32_t amax[kQueue][kStoreWarps];
  volatile uint32_t published;  // tiles
  volatile uint32_t end;        // in the end: tiles that were measured, and 1
};

// By all threads, before their ways part.
__device__ inline void begin_held(HeldShared* s) {
  if (threadIdx.x < HeldShared::kQueue * kStoreWarps) {
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
  s->amax[step.measured % HeldShared::kQueue][threadIdx.x / 32] = (step.measured + 1) << 16 | amax;
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

constexpr uint32_t kTold = 0x80000000u;  // beside the bits of a scale, which has no sign

// What lane 0 reads of shared memory, in all lanes.
__device__ inline uint32_t read_by_warp(const volatile uint32_t& from) {
  const uint32_t value = __shfl_sync(~0u, threadIdx.x % 32 == 0 ? from : 0u, 0);
  __threadfence_block();
  return value;
}

// The warp that plans: one step at a time, while the workers do the one before. `find(item, near, tile)` is
// find_held.
template <class Find>
__device__ inline void plan_steps(const StoreLaunch& p, const HeldPlan& plan, HeldShared* s, uint32_t* redo,
                                  Find find) {
  constexpr int kPatience = 32;  // looks at a group before values are forgotten
  const int lane = threadIdx.x % 32;
  const uint32_t slots = static_cast<uint32_t>(plan.slots), most_redo = static_cast<uint32_t>(plan.most_redo);
  uint32_t head = 0, tail = 0;      // tiles that were stored or forgotten, and loaded: those between are in slots
  uint32_t measured = 0, seen = 0;  // tiles; behind the last item that was drawn
  uint32_t redo_first = 0, redo_count = 0;
  uint32_t scale = 0;
  int turn = 0, looks = 0, again = 0, near = 0;  // `near`: the group of the last item
  bool more = true, hurried = false;
  // Of the oldest tile, and of the next one.
  uint32_t head_slot = 0, tail_slot = 0;
  const auto next_slot = [&](uint32_t slot) { return slot + 1 == slots ? 0 : slot + 1; };
  const auto oldest = [&]() -> const HeldTile& { return s->tiles[head % kHeldInfos]; };
  // Whether the scale of a group is known: then `scale` is it.
  const auto is_told = [&](int group) {
    scale = __shfl_sync(~0u, load_relaxed(p.scan.told + group), 0);  // lanes may read at different times
    return (scale & kTold) != 0;
  };
  const auto keep = [&](int at, const HeldTile& tile) {
    if (lane == 0) s->tiles[info_of(at)] = tile;
    __syncwarp();
  };
  const auto emit = [&](int load, int store, bool done = false) {
    const bool measures = load >= 0 && s->tiles[info_of(load)].kind & kMeasures;
    if (measures) {
      while (measured - read_by_warp(s->published) >= HeldShared::kQueue) __nanosleep(50);
    }
    if (lane == 0) {
      if (measures) {
        const HeldTile& tile = s->tiles[info_of(load)];
        s->measured_tiles[measured % HeldShared::kQueue] = {tile.group, tile.of_group};
      }
      s->steps[turn] = {load, store, measures, measured, __uint_as_float(scale & ~kTold), done};
    }
    if (measures) ++measured;
    if (done && lane == 0) s->end = measured + 1;
    __syncwarp();
    meet_for_step();
    turn ^= 1;
  };
  while (true) {
    // What was forgotten, if its scale is known now: one after the other, in a slot that is free.
    bool owed = false;
    if (redo_count) {
      HeldTile tile;
      find(redo[redo_first], 0, &tile);
      owed = is_told(tile.group);
      if (owed && tail - head < slots) {
        tile.kind = kStores;
        const int at = held_at(kHeldInfos + again, tail_slot);
        keep(at, tile);
        emit(at, -1);
        emit(-1, at);
        again ^= 1;
        redo_first = redo_first + 1 == most_redo ? 0 : redo_first + 1;
        hurried = --redo_count != 0;
        continue;
      }
    }
    // NOTE: drawn as late as can be, though memory takes its time to answer: blocks then work on neighbouring tiles,
    // and groups are complete early.
    const bool draws = more && !owed && tail - head < slots;
    uint32_t item = 0;
    if (draws && lane == 0) item = atomicAdd(p.drawn, 1u);
    int load = -1, store = -1;
    bool ends = false;  // the oldest tile is done with
    if (head != tail) {
      const int kind = oldest().kind, group = oldest().group;
      ends = !(kind & kStores) || group == p.scan.count || is_told(group);
      if (ends && kind & kStores) store = held_at(head % kHeldInfos, head_slot);
    }
    if (draws) {
      HeldTile tile;
      item = __shfl_sync(~0u, item, 0);
      more = find(item, near, &tile);
      if (more) {
        const int at = held_at(tail % kHeldInfos, tail_slot);
        keep(at, tile);
        if (tile.group < p.scan.count) load = at;
        ++tail;
        tail_slot = next_slot(tail_slot);
        seen = item + 1;
        near = tile.group;
      }
    }
    if (ends) {
      ++head;
      head_slot = next_slot(head_slot);
    }
    if (load >= 0 || store >= 0) {
      emit(load, store);
      looks = 0;
      continue;
    }
    if (ends || draws) continue;
    if (head == tail) {
      if (!more && !redo_count) break;
      continue;
    }
    // Nothing to do but to wait for the oldest group. Some of its tiles may still have to be drawn, by this block.
    if ((hurried || ++looks >= kPatience) && (owed || seen < oldest().end) && redo_count + !owed < most_redo) {
      if (lane == 0) redo[(redo_first + redo_count) % most_redo] = oldest().item;
      __syncwarp();
      ++redo_count;
      ++head;
      head_slot = next_slot(head_slot);
      looks = 0;
      hurried = true;
    }
  }
  emit(-1, -1, true);
}

// The warp that publishes amaxes of tiles, of as many at once as there are, and the scale of a group behind its last
// one.
template <DType kFrom>
__device__ inline void publish_amaxes(const StoreLaunch& p, HeldShared* s) {
  constexpr int kAtOnce = 32 / kStoreWarps;
  const int lane = threadIdx.x % 32, which = lane / kStoreWarps;
  for (uint32_t done = 0;;) {
    const uint32_t end = read_by_warp(s->end), tile = done + which, place = tile % HeldShared::kQueue;
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
