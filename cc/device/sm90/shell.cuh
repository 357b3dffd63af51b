// The shell of every product on wgmma: a persistent, warp-specialised kernel whose warps hand one another work items
// and stages of operands through rings in shared memory. What a stage holds and what becomes of it is a pipeline's.
//
//   warpgroup 0   warp 0 (one lane)  loads: for each work item, for each block: wait empty -> TMA -> full
//                 warp 1             schedules: draws items and hands them out through a ring
//                 warps 2, 3         what the pipeline gives them
//   the others    the pipeline's: multiply and store, or prepare what is multiplied
//
//   full[s]    1 arrival with the bytes of a block, and the pipeline's          loader -> readers of the stage
//   empty[s]   as the pipeline says                                             readers of the stage -> loader
//   work       kWorkDepth items; full 1 arrival, empty 1 of each reading warp   scheduler -> loader, readers
//
// A Pipeline<Product> says
//   kPairs                      whether CTAs come in clusters of two, which leave together
//   rings(p)                    arrivals that the barriers of the rings wait for
//   init(shell), fill(memory)   its own barriers, by thread 0; its own memory, by all threads
//   Loads(p, work)              how a tile is loaded: `blocks`, bytes_of(block), load(p, work, block, ...)
//   schedule(p, shell, push)    pushes work items, the last one empty
//   help(p, shell, warp)        what warps 2 and 3 do
//   work(p, shell, warp)        what the other warpgroups do, registers included
//
// Parameters have a `pace_of(p, rank)`, which the loader asks before each block (pace.cuh).
//
// NOTE: all is inlined into one kernel, and what ptxas makes of it hangs on details: loops over work items are written
// out, since the parameters cost more instructions where a lambda captures them, and `lane` is computed once.
#pragma once

#include "cc/device/common/copy_async.cuh"
#include "cc/device/sm90/epilogue.cuh"
#include "cc/device/sm90/ptx.cuh"
#include "cc/device/sm90/ring.cuh"
#include "cc/device/sm90/schedule.cuh"

namespace grouped::sm90 {

constexpr int kConsumerWarps = 8;
constexpr int kWorkDepth = 3;
constexpr int kSharedLimit = 227 * 1024;

// Shared memory, from a 1024-byte aligned start: stages, slots of each consumer warp, a slot for the scheduler, work
// items, barriers.
template <int kStageBytes_, int kStages_, int kSlots_, int kSlotBytes_ = kSlotBytes, int kWarps_ = kConsumerWarps>
struct ShellShape {
  static constexpr int kWarps = kWarps_;  // that store results
  static constexpr int kRowBoxes = 2;     // of 64 rows in a tile of a pair, unless a shape says otherwise
  static constexpr int kStageBytes = kStageBytes_, kStages = kStages_, kSlots = kSlots_;
  using WarpSlots = Slots<kSlots, kSlotBytes_>;
  static constexpr int kSlotsAt = kStages * kStageBytes;
  static constexpr int kSpareAt = kSlotsAt + kWarps * WarpSlots::kBytes;
  static constexpr int kWorkAt = kSpareAt + kSlotBytes;
  static constexpr int kBarriersAt = kWorkAt + kWorkDepth * int(sizeof(Work));
  static constexpr int kFull = 0, kEmpty = kStages, kWorkFull = 2 * kStages, kWorkEmpty = kWorkFull + kWorkDepth;
  static constexpr int kTurn = kWorkEmpty + kWorkDepth;      // of pipelines whose consumers take turns
  static constexpr int kMail = kTurn + 2;                    // of pairs
  static constexpr int kSlotFull = kMail + Mailbox::kWords;  // of fetches into slots
  static constexpr int kSharedBytes = kBarriersAt + 8 * (kSlotFull + kWarps * kSlots);
  static_assert(kSharedBytes <= kSharedLimit);
};

// The work ring's reading end: for a whole warp, or for one lane alone. An item stays in shared memory, and holds its
// place in the ring, until it is released: its fields are read where they are used and cost no registers meanwhile.
template <class Shape, bool kWholeWarp>
class WorkReader {
 public:
  __device__ WorkReader(uint32_t barriers, const Work* items) : barriers_(barriers), items_(items) {}
  __device__ const Work& get() {
    ptx::barrier_wait(barriers_ + 8 * (Shape::kWorkFull + ring_.slot), ring_.parity);
    return items_[ring_.slot];
  }
  __device__ void release() {
    if (kWholeWarp) __syncwarp();
    if (!kWholeWarp || threadIdx.x % 32 == 0) ptx::barrier_arrive(barriers_ + 8 * (Shape::kWorkEmpty + ring_.slot));
    ring_.advance();
  }
  // Goes on to the next item and keeps this one, which is before() until the next release() or hold(), by which time
  // release_before() must have released it.
  __device__ void hold() {
    static_assert(kWorkDepth >= 3, "the scheduler has room for two items beside the one that is kept");
    ring_.advance();
  }
  __device__ const Work& before() const { return items_[slot_before()]; }
  __device__ void release_before() {
    if (kWholeWarp) __syncwarp();
    if (!kWholeWarp || threadIdx.x % 32 == 0) {
      ptx::barrier_arrive(barriers_ + 8 * (Shape::kWorkEmpty + slot_before()));
    }
  }

 private:
  __device__ uint32_t slot_before() const { return ring_.slot == 0 ? kWorkDepth - 1 : ring_.slot - 1; }

  uint32_t barriers_;
  const Work* items_;
  Ring<kWorkDepth> ring_;
};

// Its writing end, for the scheduling warp; every lane brings the same item.
template <class Shape>
class WorkWriter {
 public:
  __device__ WorkWriter(uint32_t barriers, Work* items) : barriers_(barriers), items_(items) {}
  __device__ void push(const Work& work) {
    ptx::barrier_wait(barriers_ + 8 * (Shape::kWorkEmpty + ring_.slot), ring_.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
      items_[ring_.slot] = work;
      ptx::barrier_arrive(barriers_ + 8 * (Shape::kWorkFull + ring_.slot));  // releases the writes above
    }
    __syncwarp();
    ring_.advance();
  }

 private:
  uint32_t barriers_;
  Work* items_;
  Ring<kWorkDepth> ring_;
};

// Where a warp of the shell is.
template <class Shape>
struct Shell {
  uint32_t shared, barriers;  // addresses
  uint32_t rank;              // in the pair
  int lane;
  Work* items;

  __device__ uint32_t full(uint32_t slot) const { return barriers + 8 * (Shape::kFull + slot); }
  __device__ uint32_t empty(uint32_t slot) const { return barriers + 8 * (Shape::kEmpty + slot); }
  __device__ uint32_t stage(uint32_t slot) const { return shared + slot * Shape::kStageBytes; }
  // Of the consumer warp `at`.
  __device__ typename Shape::WarpSlots slots(int at) const {
    return {shared + Shape::kSlotsAt + at * Shape::WarpSlots::kBytes,
            barriers + 8 * (Shape::kSlotFull + at * Shape::kSlots)};
  }

  // body(work) for each tile, by one lane, which keeps the item in registers.
  template <class Body>
  __device__ __forceinline__ void lane_tiles(Body body) const {
    WorkReader<Shape, false> reader(barriers, items);
    while (true) {
      const Work work = reader.get();
      reader.release();
      if (work.kind == Work::kDone) break;
      if (work.kind == Work::kTile) body(work);
    }
  }
  // At the end of a warp that stores: nothing may be under way.
  __device__ void finish_stores() const {
    if (lane == 0) ptx::store_wait_read<0>();
    __syncwarp();
  }
};

// A warp of a pair waits for a stage that it does not read and releases it to both loaders.
template <class Shape>
__device__ inline void skip_block(Ring<Shape::kStages>& ring, uint32_t barriers) {
  ptx::barrier_wait(barriers + 8 * (Shape::kFull + ring.slot), ring.parity);
  __syncwarp();
  if (threadIdx.x % 32 < 2) ptx::barrier_arrive_peer(barriers + 8 * (Shape::kEmpty + ring.slot), threadIdx.x % 32);
  ring.advance();
}

// Arrivals at the barriers of a stage, and warps that read work items beside the loader.
struct RingArrivals {
  uint32_t full, empty, readers;
};

template <class Product, template <class> class Pipeline_>
__device__ __forceinline__ void run_shell(const typename Product::Params& p) {
  using Pipeline = Pipeline_<Product>;
  using Shape = typename Product::Shape;
  extern __shared__ __align__(1024) uint8_t memory[];
  Shell<Shape> shell;
  shell.shared = device::shared_address(memory);
  shell.barriers = shell.shared + Shape::kBarriersAt;
  shell.rank = ptx::cluster_rank();
  shell.items = reinterpret_cast<Work*>(memory + Shape::kWorkAt);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  shell.lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    const RingArrivals arrivals = Pipeline::rings(p);
    for (int s = 0; s < Shape::kStages; ++s) {
      ptx::barrier_init(shell.full(s), arrivals.full);
      ptx::barrier_init(shell.empty(s), arrivals.empty);
    }
    for (int s = 0; s < kWorkDepth; ++s) {
      ptx::barrier_init(shell.barriers + 8 * (Shape::kWorkFull + s), 1);
      ptx::barrier_init(shell.barriers + 8 * (Shape::kWorkEmpty + s), 1 + arrivals.readers);
    }
    if constexpr (Pipeline::kPairs) {
      for (int s = 0; s < 2 * kMailDepth; ++s) ptx::barrier_init(shell.barriers + 8 * (Shape::kMail + s), 1);
    }
    for (int s = 0; s < Shape::kWarps * Shape::kSlots; ++s) {
      ptx::barrier_init(shell.barriers + 8 * (Shape::kSlotFull + s), 1);
    }
    Pipeline::init(shell);
    ptx::barrier_init_fence();
  }
  Pipeline::fill(memory);
  if constexpr (Pipeline::kPairs) {
    __syncwarp();
    ptx::cluster_barrier();
  } else {
    __syncthreads();
  }

  if (warp < 4) {
    ptx::set_max_registers_down<Shape::kProducerRegisters>();
    if (warp == 0) {
      if (shell.lane == 0) {
        WorkReader<Shape, false> reader(shell.barriers, shell.items);
        Ring<Shape::kStages> ring;
        auto pace = pace_of(p, shell.rank);
        while (true) {
          const Work work = reader.get();
          reader.release();
          if (work.kind == Work::kDone) break;
          if (work.kind != Work::kTile) continue;
          const typename Pipeline::Loads loads(p, work);
          for (int b = 0; b < loads.blocks; ++b) {
            pace.step();
            const uint32_t full = shell.full(ring.slot), stage = shell.stage(ring.slot);
            ptx::barrier_wait(shell.empty(ring.slot), ring.parity ^ 1);
            ptx::barrier_arrive_expect(full, loads.bytes_of(b));
            loads.load(p, work, b, shell.rank, stage, full);
            ring.advance();
          }
        }
        pace.finish();
      }
    } else if (warp == 1) {
      WorkWriter<Shape> writer(shell.barriers, shell.items);
      Pipeline::schedule(p, shell, [&](const Work& work) { writer.push(work); });
    } else {
      Pipeline::help(p, shell, warp);
    }
    __syncwarp();
  } else {
    Pipeline::work(p, shell, warp);
  }
  // A peer may still arrive on our barriers: leave together.
  if constexpr (Pipeline::kPairs) ptx::cluster_barrier();
}

}  // namespace grouped::sm90
