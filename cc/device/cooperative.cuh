// The body of wgmma products whose epilogue reads operands of its own: like that of pipeline.cuh, but both warpgroups
// work on one tile of 128 rows by kCols, 64 rows each, so that their epilogue has the shared memory to itself.
//
//   warpgroup 0   warp 0 (one lane)  loads operands       (runs ahead: the ring is full again when an epilogue ends)
//                 warp 1             schedules
//                 warp 2 (one lane)  fetches what the epilogue reads, in sets, as far ahead as there are sets
//   warpgroups 1, 2                  multiply; then, set by set: wait full -> change in place -> store -> empty
//
//   full[s]       1 arrival (with the bytes of both CTAs' loads) a block      loader -> consumers
//   empty[s]      1 arrival of each consumer warp, in both CTAs               consumers -> both loaders
//   set full[s]   1 arrival, with the bytes                                   fetcher -> consumers
//   set empty[s]  1 arrival of each consumer warp                             consumers -> fetcher
//   work          as in pipeline.cuh, with one reader more
#pragma once

#include "cc/device/pipeline.cuh"

namespace grouped::sm90 {

// A set is 64 columns of a tile: for each row half two blocks of 64 rows by 128 bytes, 128-byte swizzle.
constexpr int kSetCols = 64;
constexpr int kSetBytes = 4 * kBlockBytes;

// Of TileShape the operand ring, the slots, and the rings of work; sets lie behind.
template <int kCols_, int kStages_, int kSlots_, int kSets_>
struct FetchingShape : TileShape<kCols_, kStages_, kSlots_> {
  using Base = TileShape<kCols_, kStages_, kSlots_>;
  static constexpr int kSets = kSets_;
  static constexpr int kSetFullAt = Base::kSharedBytes, kSetEmptyAt = kSetFullAt + 8 * kSets;
  static constexpr int kSetsAt = (kSetEmptyAt + 8 * kSets + 1023) / 1024 * 1024;
  static constexpr int kSharedBytes = kSetsAt + kSets * kSetBytes;
  static_assert(kSharedBytes <= kSharedLimit);
};

// Sets of a tile with `valid_cols` columns.
template <class Shape>
__device__ inline int sets_across(int valid_cols) {
  return valid_cols <= 0 ? 0 : ((valid_cols < Shape::kCols ? valid_cols : Shape::kCols) + kSetCols - 1) / kSetCols;
}

// The filling end of the sets, one lane.
template <class Shape>
class SetWriter {
 public:
  __device__ explicit SetWriter(uint32_t shared) : shared_(shared) {}

  // `load(to, barrier)` issues copies of `bytes` into the set.
  template <class Load>
  __device__ void fill(uint32_t bytes, Load load) {
    const uint32_t full = shared_ + Shape::kSetFullAt + 8 * ring_.slot;
    ptx::barrier_wait(shared_ + Shape::kSetEmptyAt + 8 * ring_.slot, ring_.parity ^ 1);
    ptx::barrier_arrive_expect(full, bytes);
    load(shared_ + Shape::kSetsAt + ring_.slot * kSetBytes, full);
    ring_.advance();
  }

 private:
  uint32_t shared_;
  Ring<Shape::kSets> ring_;
};

// The emptying end, a whole warp, also one that has no valid row in a set.
template <class Shape>
class SetReader {
 public:
  __device__ explicit SetReader(uint32_t shared) : shared_(shared) {}

  __device__ void wait() const { ptx::barrier_wait(shared_ + Shape::kSetFullAt + 8 * ring_.slot, ring_.parity); }
  __device__ uint32_t address() const { return shared_ + Shape::kSetsAt + ring_.slot * kSetBytes; }

  // Ends the work on the set, with the warp's stores from it, which lane 0 has issued.
  __device__ void advance() {
    if (threadIdx.x % 32 == 0) ptx::store_commit();
    ring_.advance();
    taken_ = true;
  }
  // Releases the set before, once the warp's stores have read it and the slots.
  __device__ void settle() {
    if (!taken_) return;
    if (threadIdx.x % 32 == 0) {
      ptx::store_wait_read<0>();
      const uint32_t before = ring_.slot == 0 ? Shape::kSets - 1 : ring_.slot - 1;
      ptx::barrier_arrive(shared_ + Shape::kSetEmptyAt + 8 * before);
    }
    taken_ = false;
    __syncwarp();
  }

 private:
  uint32_t shared_;
  Ring<Shape::kSets> ring_;
  bool taken_ = false;
};

// 64 rows of a tile. Leaves the accumulators complete and all blocks released.
template <class Product>
__device__ inline void multiply_rows(float (&acc)[Product::Shape::kCols / 2], Ring<Product::Shape::kStages>& ring,
                                     int length, uint64_t lhs, uint64_t rhs, uint32_t barriers) {
  using Shape = typename Product::Shape;
  constexpr int kTransposedA = Product::kLhsMajor != Major::k, kTransposedB = Product::kRhsMajor != Major::k;
  const int lane = threadIdx.x % 32;
  uint32_t before = 0;
  for (int left = length; left > 0; left -= kBlockK) {
    ptx::barrier_wait(barriers + 8 * (Shape::kFull + ring.slot), ring.parity);
    const uint64_t stage = uint64_t(ring.slot * (Shape::kStageBytes >> 4));
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBlockK / 16; ++k) {
      ptx::wgmma<typename Product::Element, Shape::kCols, kTransposedA, kTransposedB>(
          acc, lhs + stage + k * descriptor_step(Product::kLhsMajor),
          rhs + stage + k * descriptor_step(Product::kRhsMajor), left != length || k != 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (left != length && lane < 2) ptx::barrier_arrive_peer(barriers + 8 * (Shape::kEmpty + before), lane);
    before = ring.slot;
    ring.advance();
  }
  ptx::wgmma_wait<0>();
  if (lane < 2) ptx::barrier_arrive_peer(barriers + 8 * (Shape::kEmpty + before), lane);
}

// The same barrier traffic with nothing to multiply.
template <class Shape>
__device__ inline void pass_rows(Ring<Shape::kStages>& ring, int k_blocks, uint32_t barriers) {
  const int lane = threadIdx.x % 32;
  for (int kb = 0; kb < k_blocks; ++kb) {
    ptx::barrier_wait(barriers + 8 * (Shape::kFull + ring.slot), ring.parity);
    __syncwarp();
    if (lane < 2) ptx::barrier_arrive_peer(barriers + 8 * (Shape::kEmpty + ring.slot), lane);
    ring.advance();
  }
}

template <class Product>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    cooperative_product_sm90(const __grid_constant__ typename Product::Params p) {
  using Shape = typename Product::Shape;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = ptx::shared_address(memory), barriers = shared + Shape::kBarriersAt;
  const uint32_t rank = ptx::cluster_rank();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  Work* items = reinterpret_cast<Work*>(memory + Shape::kWorkAt);

  if (threadIdx.x == 0) {
    for (int s = 0; s < Shape::kStages; ++s) {
      ptx::barrier_init(barriers + 8 * (Shape::kFull + s), 1);
      ptx::barrier_init(barriers + 8 * (Shape::kEmpty + s), 2 * kConsumerWarps);
    }
    for (int s = 0; s < kWorkDepth; ++s) {
      ptx::barrier_init(barriers + 8 * (Shape::kWorkFull + s), 1);
      ptx::barrier_init(barriers + 8 * (Shape::kWorkEmpty + s), 2 + kConsumerWarps);
    }
    for (int s = 0; s < 2 * kMailDepth; ++s) ptx::barrier_init(barriers + 8 * (Shape::kMail + s), 1);
    for (int s = 0; s < Shape::kSets; ++s) {
      ptx::barrier_init(shared + Shape::kSetFullAt + 8 * s, 1);
      ptx::barrier_init(shared + Shape::kSetEmptyAt + 8 * s, kConsumerWarps);
    }
    ptx::barrier_init_fence();
  }
  __syncwarp();
  ptx::cluster_barrier();

  if (warp < 4) {
    ptx::set_max_registers_down<Shape::kProducerRegisters>();
    if (warp == 1) {
      WorkWriter<Shape> writer(barriers, items);
      Product::schedule(p, rank, barriers + 8 * Shape::kMail, shared + Shape::kSpareAt,
                        [&](const Work& work) { writer.push(work); });
    } else if (warp != 3 && lane == 0) {
      WorkReader<Shape, false> reader(barriers, items);
      Ring<Shape::kStages> ring;
      SetWriter<Shape> sets(shared);
      while (true) {
        const Work work = reader.get();
        reader.release();
        if (work.kind == Work::kDone) break;
        if (work.kind != Work::kTile) continue;
        const int halves = work.valid_rows > 64 ? 2 : 1;
        const bool columns = work.col0 < p.cols;  // else the tile is the empty half of an `across` pair
        if (warp == 2) {
          Product::fetch(p, work, halves, sets);
          continue;
        }
        const uint32_t bytes = halves * kBlockBytes + (columns ? Shape::kCols * 128 : 0);
        for (int kb = 0; kb < work.k_blocks(); ++kb) {
          const uint32_t full = barriers + 8 * (Shape::kFull + ring.slot);
          const uint32_t stage = shared + ring.slot * Shape::kStageBytes;
          ptx::barrier_wait(barriers + 8 * (Shape::kEmpty + ring.slot), ring.parity ^ 1);
          ptx::barrier_arrive_expect(full, bytes);
          Product::load(p, work, kb * kBlockK, halves, columns, rank, stage, full);
          ring.advance();
        }
      }
    }
    __syncwarp();
  } else {
    ptx::set_max_registers_up<Shape::kConsumerRegisters>();
    const int half = warp / 4 - 1, first_row = 64 * half + 16 * (warp % 4);
    WorkReader<Shape, true> reader(barriers, items);
    Ring<Shape::kStages> ring;
    Slots<Shape::kSlots> slots{shared + Shape::kSlotsAt + (warp - 4) * Shape::kSlots * kSlotBytes, 0};
    SetReader<Shape> sets(shared);
    const uint64_t lhs = descriptor(shared + half * kBlockBytes, Product::kLhsMajor);
    const uint64_t rhs = descriptor(shared + 2 * kBlockBytes, Product::kRhsMajor);
    for (;; reader.release()) {
      const Work& work = reader.get();
      if (work.kind == Work::kDone) break;
      if (work.kind == Work::kTail) {
        Product::clear_tail(p, work, rank, threadIdx.x - 128);
        continue;
      }
      const int valid_cols = p.cols - work.col0;
      if (valid_cols <= 0) {
        pass_rows<Shape>(ring, work.k_blocks(), barriers);
        continue;
      }
      float acc[Shape::kCols / 2];
      // They need a value on both paths, or every wgmma is serialised.
#pragma unroll
      for (int i = 0; i < Shape::kCols / 2; ++i) acc[i] = 0;
      if (64 * half < work.valid_rows) {
        multiply_rows<Product>(acc, ring, work.length, lhs, rhs, barriers);
      } else {
        pass_rows<Shape>(ring, work.k_blocks(), barriers);
      }
      Product::store_tile(p, work, first_row, valid_cols, acc, slots, sets);
    }
    if (lane == 0) ptx::store_wait_read<0>();
    __syncwarp();
  }
  // A peer may still arrive on our barriers: leave together.
  ptx::cluster_barrier();
}

}  // namespace grouped::sm90
