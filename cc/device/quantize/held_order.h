// The order in which a block loads, measures and stores the tiles that it holds (held_tiles.cuh), for the warp that
// plans it, and for tests/native/held_check.cc, which plans for blocks that are threads of a CPU.
//
// Blocks draw items from a counter. An item is a tile that is measured and stored. Of a group with more row tiles than
// the grid holds (HeldPlan) the first ones are measured alone, and come a second time behind the others, last first.
//
// A block waits for tiles alone that running blocks have drawn, so it does not matter which blocks run. Where all of
// its slots wait for long for a group of which tiles may still have to be drawn, mostly because fewer blocks run than
// the grid has, it forgets the values of its oldest tile, measures on, and reads them again when the group's scale is
// known (`redo`). It does so too for a slot in which it can read again what it had forgotten.
#pragma once

#include <cstdint>

#include "cc/math/casts.h"

namespace grouped {

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
  GROUPED_HOST_DEVICE uint32_t operator()(uint32_t value) const {
    return static_cast<uint32_t>(uint64_t{value} * multiplier >> shift);
  }
};

constexpr int kHeldPerBlock = 4;  // tiles of a group that a block holds while others come and go

// Of one launch.
struct HeldPlan {
  Divider column_tiles;
  Divider weight_items;  // in rows: items of a weight
  int slots;             // tiles that a block holds
  int held_rows;         // row tiles of a group that the grid holds
  int most_redo;         // entries of `redo`: more than those, and one

  static int most_redo_of(int grid) { return grid * kHeldPerBlock + kMostSlots; }
  static int held_rows_of(int grid, int slots, int64_t column_tiles) {
    return static_cast<int>(grid * (slots < kHeldPerBlock ? slots : kHeldPerBlock) / column_tiles);
  }
};

namespace device {

enum HeldKind : int { kMeasures = 1, kStores = 2 };  // what an item asks for, a set

// What a block does in one step: tiles as held_at() has them, or -1.
struct HeldStep {
  int load, store;
  bool measures;      // what it loads
  uint32_t measured;  // tiles before this step
  float scale;        // of what is stored
  bool done;
};

// A tile's entry in HeldShared, and the slot of its values.
GROUPED_HOST_DEVICE inline int held_at(int info, int slot) { return info << 8 | slot; }
GROUPED_HOST_DEVICE inline int info_of(int at) { return at >> 8; }
GROUPED_HOST_DEVICE inline int slot_of(int at) { return at & 0xFF; }

constexpr int kHeldQueue = 8;            // tiles on their way from the workers to the warp that publishes
constexpr uint32_t kTold = 0x80000000u;  // beside the bits of a scale, which has no sign

// Plans one step at a time, while the workers do the one before, for `groups` groups. find(item, near, tile) is
// find_held(); `redo` has plan.most_redo entries. Of a Planner, one or more lanes that do the same:
//
//   Tile                  a tile: group, kind, item, of_group, end
//   leads()               whether this lane is the one that draws, and that writes
//   draw(), share(value)  the next item, for the lane that leads; what that lane has, for all
//   scale(group)          the bits of a group's scale and kTold, or 0
//   tile(info)            a tile that is kept
//   published()           tiles whose amaxes have left the block
//   measure(place, tile)  writes which tile the queue has
//   step(turn)            the step that the workers read
//   finish(end)           tells how many tiles were measured, and 1
//   sync(), meet()        the lanes see what one wrote; so do the workers, which have done the step before
//   pause(nanoseconds)
template <class Planner, class Find>
GROUPED_HOST_DEVICE inline void plan_steps(Planner& w, const HeldPlan& plan, int groups, uint32_t* redo, Find find) {
  using Tile = typename Planner::Tile;
  constexpr int kPatience = 32;  // looks at a group before values are forgotten
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
  const auto oldest = [&]() -> const Tile& { return w.tile(head % kHeldInfos); };
  // Whether the scale of a group is known: then `scale` is it.
  const auto is_told = [&](int group) {
    scale = w.scale(group);
    return (scale & kTold) != 0;
  };
  const auto keep = [&](int at, const Tile& tile) {
    if (w.leads()) w.tile(info_of(at)) = tile;
    w.sync();
  };
  const auto emit = [&](int load, int store, bool done = false) {
    const bool measures = load >= 0 && w.tile(info_of(load)).kind & kMeasures;
    if (measures) {
      while (measured - w.published() >= kHeldQueue) w.pause(50);
    }
    if (w.leads()) {
      if (measures) w.measure(measured % kHeldQueue, w.tile(info_of(load)));
      w.step(turn) = {load, store, measures, measured, bits_float(scale & ~kTold), done};
    }
    if (measures) ++measured;
    if (done && w.leads()) w.finish(measured + 1);
    w.meet();
    turn ^= 1;
  };
  while (true) {
    // What was forgotten, if its scale is known now: one after the other, in a slot that is free.
    bool owed = false;
    if (redo_count) {
      Tile tile;
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
    if (draws && w.leads()) item = w.draw();
    int load = -1, store = -1;
    bool ends = false;  // the oldest tile is done with
    if (head != tail) {
      const int kind = oldest().kind, group = oldest().group;
      ends = !(kind & kStores) || group == groups || is_told(group);
      if (ends && kind & kStores) store = held_at(head % kHeldInfos, head_slot);
    }
    if (draws) {
      Tile tile;
      item = w.share(item);
      more = find(item, near, &tile);
      if (more) {
        const int at = held_at(tail % kHeldInfos, tail_slot);
        keep(at, tile);
        if (tile.group < groups) load = at;
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
      if (w.leads()) redo[(redo_first + redo_count) % most_redo] = oldest().item;
      w.sync();
      ++redo_count;
      ++head;
      head_slot = next_slot(head_slot);
      looks = 0;
      hurried = true;
    }
  }
  emit(-1, -1, true);
}

}  // namespace device
}  // namespace grouped
