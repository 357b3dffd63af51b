// plan_steps (held_order.h) for blocks that are threads: random groups, grids of which some blocks run, start late or
// stall, and few slots. Every tile has to be measured once and stored once, with the scale of its group, out of a slot
// that holds it; nothing may wait for ever. test_held.py compiles and runs this: held_check SEED RUNS.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "cc/device/quantize/held_order.h"

namespace {

using namespace grouped;
using namespace grouped::device;

void fail(const char* what) {
  std::printf("%s\n", what);
  std::_Exit(1);
}
void expect(bool holds, const char* what) {
  if (!holds) fail(what);
}

struct Tile {
  int group, kind;
  uint32_t item, of_group, end;
  uint32_t index;  // among the tiles of all groups
};

// The items of a launch, and what happened to its tiles.
struct Launch {
  HeldPlan plan = {};
  uint32_t columns, items = 0, tiles = 0, drawn = 0;
  std::vector<int> tall;              // row tiles of each group
  std::vector<uint32_t> first, base;  // row item and tile of each group
  std::vector<uint32_t> scales, counted;
  std::vector<int> measured, stored;

  Launch(std::mt19937& random, int grid) : columns(1 + random() % 4) {
    plan.slots = 3 + static_cast<int>(random() % 4);
    plan.most_redo = HeldPlan::most_redo_of(grid);
    plan.held_rows = HeldPlan::held_rows_of(grid, plan.slots, columns);
    tall.resize(1 + random() % 6);
    for (int& each : tall) {
      each = 1 + static_cast<int>(random() % static_cast<unsigned>(2 * plan.held_rows + 4));
      first.push_back(items);
      base.push_back(tiles);
      items += static_cast<uint32_t>(each + std::max(each - plan.held_rows, 0));
      tiles += static_cast<uint32_t>(each) * columns;
    }
    items *= columns;
    scales.resize(tall.size());
    counted.resize(tall.size());
    measured.resize(tiles);
    stored.resize(tiles);
  }

  int groups() const { return static_cast<int>(tall.size()); }

  // As find_held().
  bool find(uint32_t item, Tile* tile) const {
    if (item >= items) return false;
    uint32_t row = item / columns, column = item % columns;
    const size_t g = static_cast<size_t>(std::upper_bound(first.begin(), first.end(), row) - first.begin()) - 1;
    int at = static_cast<int>(row - first[g]);
    const int alone = std::max(tall[g] - plan.held_rows, 0);
    const int kind = at < alone ? kMeasures : at < tall[g] ? kMeasures | kStores : kStores;
    if (at >= tall[g]) {
      at = alone - 1 - (at - tall[g]);
      column = columns - 1 - column;
    }
    const uint32_t of_group = static_cast<uint32_t>(tall[g]) * columns;
    *tile = {static_cast<int>(g),
             kind,
             item,
             of_group,
             first[g] * columns + of_group,
             base[g] + static_cast<uint32_t>(at) * columns + column};
    return true;
  }
};

// A barrier of two threads.
class Meeting {
 public:
  void meet() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int mine = meetings_;
    if (++here_ == 2) {
      here_ = 0;
      ++meetings_;
      both_.notify_all();
    } else {
      both_.wait(lock, [&] { return meetings_ != mine; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable both_;
  int here_ = 0, meetings_ = 0;
};

// What the threads of a block share.
struct Block {
  Launch& launch;
  Tile tiles[kHeldInfos + 2];
  HeldStep steps[2];
  struct {
    int group;
    uint32_t of_group;
  } measured[kHeldQueue];
  std::atomic<uint32_t> told[kHeldQueue] = {};  // the tile of an entry, and 1
  std::atomic<uint32_t> published{0}, end{0};
  Meeting step;
};

// A planner of one lane.
struct Planner {
  using Tile = ::Tile;
  Block& b;

  bool leads() const { return true; }
  uint32_t draw() const { return __atomic_fetch_add(&b.launch.drawn, 1u, __ATOMIC_SEQ_CST); }
  uint32_t share(uint32_t value) const { return value; }
  uint32_t scale(int group) const {
    std::this_thread::yield();
    return __atomic_load_n(&b.launch.scales[static_cast<size_t>(group)], __ATOMIC_SEQ_CST);
  }
  Tile& tile(uint32_t info) const { return b.tiles[info]; }
  uint32_t published() const { return b.published; }
  void measure(uint32_t place, const Tile& tile) const { b.measured[place] = {tile.group, tile.of_group}; }
  HeldStep& step(int turn) const { return b.steps[turn]; }
  void finish(uint32_t end) const { b.end = end; }
  void sync() const {}
  void meet() const { b.step.meet(); }
  void pause(unsigned) const { std::this_thread::yield(); }
};

// As publish_amaxes(): the scale of a group is its number and 1.
void publish(Block& b, bool stalls) {
  for (uint32_t done = 0;;) {
    const uint32_t end = b.end, place = done % kHeldQueue;
    if (b.told[place] != done + 1) {
      if (end == done + 1) return;
      std::this_thread::yield();
      continue;
    }
    for (int i = 0; stalls && i < 50; ++i) std::this_thread::yield();
    const auto tile = b.measured[place];
    const size_t group = static_cast<size_t>(tile.group);
    const uint32_t count = __atomic_add_fetch(&b.launch.counted[group], 1u, __ATOMIC_SEQ_CST);
    expect(count <= tile.of_group, "more tiles are measured than a group has");
    if (count == tile.of_group) {
      __atomic_store_n(&b.launch.scales[group], kTold | static_cast<uint32_t>(tile.group + 1), __ATOMIC_SEQ_CST);
    }
    b.published = ++done;
  }
}

// The steps of a block, as its workers do them.
void run_block(Launch& launch, unsigned seed, bool stalls) {
  Block b{launch, {}, {}, {}, {}, {}, {}, {}};
  std::vector<uint32_t> redo(static_cast<size_t>(launch.plan.most_redo));
  std::thread planning([&] {
    Planner planner{b};
    plan_steps(planner, launch.plan, launch.groups(), redo.data(),
               [&](uint32_t item, int, Tile* tile) { return launch.find(item, tile); });
  });
  std::thread publishing([&] { publish(b, stalls); });
  std::vector<int64_t> slots(static_cast<size_t>(launch.plan.slots), -1);  // the tile in each
  std::mt19937 random(seed);
  const auto held = [&](int at) -> int64_t& {
    expect(slot_of(at) < launch.plan.slots, "a slot is past the last one");
    return slots[static_cast<size_t>(slot_of(at))];
  };
  for (int turn = 0;; turn ^= 1) {
    b.step.meet();
    const HeldStep step = b.steps[turn];
    if (step.done) break;
    if (stalls && random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    if (step.load >= 0) {
      expect(step.store < 0 || slot_of(step.store) != slot_of(step.load), "a step loads over what it stores");
      held(step.load) = b.tiles[info_of(step.load)].index;
    }
    if (step.store >= 0) {
      const Tile& tile = b.tiles[info_of(step.store)];
      expect(held(step.store) == tile.index, "a slot holds another tile than is stored");
      expect(float_bits(step.scale) == static_cast<uint32_t>(tile.group + 1), "the scale is that of another group");
      expect(__atomic_fetch_add(&launch.stored[tile.index], 1, __ATOMIC_SEQ_CST) == 0, "a tile is stored twice");
    }
    if (step.measures) {
      const Tile& tile = b.tiles[info_of(step.load)];
      expect(__atomic_fetch_add(&launch.measured[tile.index], 1, __ATOMIC_SEQ_CST) == 0, "a tile is measured twice");
      b.told[step.measured % kHeldQueue] = step.measured + 1;
    }
  }
  planning.join();
  publishing.join();
}

}  // namespace

int main(int, char** arguments) {
  std::mt19937 random(static_cast<unsigned>(std::atoi(arguments[1])));
  const int runs = std::atoi(arguments[2]);
  for (int run = 0; run < runs; ++run) {
    const int grid = 1 + static_cast<int>(random() % 10), together = 1 + static_cast<int>(random() % 5) % grid;
    Launch launch(random, grid);
    const bool stalls = random() % 3 == 0;
    std::vector<std::thread> blocks;
    for (int i = 0; i < together; ++i) {
      blocks.emplace_back(run_block, std::ref(launch), static_cast<unsigned>(random()), stalls && i == 0);
    }
    for (std::thread& each : blocks) each.join();
    for (int i = together; i < grid; ++i) run_block(launch, static_cast<unsigned>(random()), false);
    for (const int count : launch.measured) expect(count == 1, "a tile is not measured");
    for (const int count : launch.stored) expect(count == 1, "a tile is not stored");
  }
  std::printf("%d runs\n", runs);
}
