// The body of every wgmma product: a persistent, warp-specialised kernel of CTA pairs, 128 rows by kCols a tile.
//
//   warpgroup 0   warp 0 (one lane)  loads: for each work item, for each k block: wait empty -> TMA -> full
//                 warp 1             schedules: draws the pair's next items and hands them out through a ring
//                 warps 2, 3         where an epilogue has operands of its own: fetch these, store results (fetch.cuh)
//   warpgroups 1, 2                  multiply and store whole tiles in turn: one stores while the other multiplies
//                                    wait full -> 4 k16 steps of wgmma, 2 x 64 rows -> empty of the block before
//   warpgroup 3                      of weights that come as codes: widens them to the tile that is multiplied
//                                    (widen_tiles.cuh)
//
//   full[s]    1 arrival (with the bytes of both CTAs' loads) a block      loader -> consumers
//              and 4 more, one a warp, where there is a warpgroup 3        it -> consumers
//   codes[s]   1 arrival with the bytes of a block's codes                 loader -> warpgroup 3
//   empty[s]   1 arrival of each warp of a warpgroup, in both CTAs         consumers -> both loaders
//   work       kWorkDepth items; full 1 arrival, empty 1 + 8 (2 more with sets, 4 with codes)
//                                                                          scheduler -> loader, consumers
//   turn[w]    4 arrivals a tile, the warps of the other warpgroup
//
// A warpgroup hands over its turn once it has seen its last block arrive: the other then is never more than one phase
// ahead of a full barrier, which is as far as parity can tell.
#pragma once

#include "cc/device/epilogue.cuh"
#include "cc/device/fetch.cuh"
#include "cc/device/load.cuh"
#include "cc/device/ptx.cuh"
#include "cc/device/ring.cuh"
#include "cc/device/schedule.cuh"

namespace grouped::sm90 {

constexpr int kThreads = 384;
constexpr int kConsumerWarps = 8;
constexpr int kWideningWarps = 4;
constexpr int kWorkDepth = 3;
constexpr int kSharedLimit = 227 * 1024;

template <int kCols_, int kStages_, int kSlots_, int kSlotBytes_ = kSlotBytes, int kCodeBytes_ = 0>
struct TileShape {
  static constexpr int kCols = kCols_, kStages = kStages_, kSlots = kSlots_;
  using WarpSlots = Slots<kSlots, kSlotBytes_>;
  static constexpr int kCodesAt = 2 * kBlockBytes + kCols * 128;  // in a stage, behind what is multiplied
  static constexpr int kCodeBytes = kCodeBytes_;                  // of a column of them; 0: weights come as numbers
  static constexpr bool kWidens = kCodeBytes != 0;
  static constexpr int kStageBytes = kCodesAt + kCols * kCodeBytes;
  static constexpr int kBlockThreads = kThreads + (kWidens ? 32 * kWideningWarps : 0);

  // Shared memory, from a 1024-byte aligned start: stages, slots of each consumer warp, a slot for the scheduler, work
  // items, barriers.
  static constexpr int kSlotsAt = kStages * kStageBytes;
  static constexpr int kSpareAt = kSlotsAt + kConsumerWarps * WarpSlots::kBytes;
  static constexpr int kWorkAt = kSpareAt + kSlotBytes;
  static constexpr int kBarriersAt = kWorkAt + kWorkDepth * int(sizeof(Work));
  static constexpr int kFull = 0, kEmpty = kStages, kWorkFull = 2 * kStages, kWorkEmpty = kWorkFull + kWorkDepth;
  static constexpr int kTurn = kWorkEmpty + kWorkDepth;
  static constexpr int kMail = kTurn + 2;
  static constexpr int kSlotFull = kMail + Mailbox::kWords;  // of fetches into slots
  static constexpr int kCodesFull = kSlotFull + kConsumerWarps * kSlots;
  static constexpr int kSharedBytes = kBarriersAt + 8 * (kCodesFull + (kWidens ? kStages : 0));
  static_assert(kSharedBytes <= kSharedLimit);
  static constexpr int kSets = 0;  // the epilogue has no operands

  // Of the 168 a thread at launch; where codes are widened, of 128.
  static constexpr int kProducerRegisters = kWidens ? 32 : 40, kConsumerRegisters = kWidens ? 224 : 232;
  static constexpr int kWideningRegisters = 32;
};

// For epilogues with operands of their own: sets of fetch.cuh instead of slots, behind everything else.
template <int kCols_, int kStages_, int kSets_, int kCodeBytes_ = 0>
struct FetchingShape : TileShape<kCols_, kStages_, 0, kSlotBytes, kCodeBytes_> {
  using Base = TileShape<kCols_, kStages_, 0, kSlotBytes, kCodeBytes_>;
  static constexpr int kSets = kSets_;
  static constexpr int kSetFullAt = Base::kSharedBytes, kSetDoneAt = kSetFullAt + 8 * kSets;
  static constexpr int kSetEmptyAt = kSetDoneAt + 8 * kSets, kSetTurnAt = kSetEmptyAt + 8 * kSets;
  static constexpr int kSetsAt = (kSetTurnAt + 16 + 1023) / 1024 * 1024;
  static constexpr int kSharedBytes = kSetsAt + kSets * kSetBytes;
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

 private:
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

// Order of the consumer warpgroups' main loops.
template <class Shape>
class Turn {
 public:
  __device__ Turn(uint32_t barriers, int consumer)
      : mine_(barriers + 8 * (Shape::kTurn + consumer)),
        other_(barriers + 8 * (Shape::kTurn + (consumer ^ 1))),
        parity_(consumer ^ 1) {}
  __device__ void take() {
    ptx::barrier_wait(mine_, parity_);
    parity_ ^= 1;
  }
  __device__ void hand_over() {
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(other_);
  }
  // Of the last turn taken.
  __device__ uint32_t parity() const { return parity_ ^ 1; }

 private:
  uint32_t mine_, other_, parity_;
};

// Multiplies one tile, kHalves times 64 rows by its first kCols columns. Leaves the accumulators complete and all
// blocks released. A ragged sum stops at the step of 16 that holds its last element.
template <class Product, int kHalves, int kCols>
__device__ inline void multiply(float (&acc)[2][Product::Shape::kCols / 2], Ring<Product::Shape::kStages>& ring,
                                Turn<typename Product::Shape>& turn, int length, uint64_t lhs, uint64_t rhs,
                                uint32_t barriers) {
  using Shape = typename Product::Shape;
  constexpr int kTransposedA = Product::kLhsMajor != Major::k, kTransposedB = Product::kRhsMajor != Major::k;
  const int lane = threadIdx.x % 32;
  uint32_t before = 0;
  int left = length;
  const auto block = [&](auto steps) {
    ptx::barrier_wait(barriers + 8 * (Shape::kFull + ring.slot), ring.parity);
    if (left <= kBlockK) turn.hand_over();
    const uint64_t stage = uint64_t(ring.slot * (Shape::kStageBytes >> 4));
    ptx::wgmma_fence();
    // NOTE: rolled, or with the element type chosen inside of one kernel, this compiles faster, but ptxas then fences
    // each wgmma: 1.2 to 1.9 times as slow (docs/kernels.md).
#pragma unroll
    for (int k = 0; k < decltype(steps)::value; ++k) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        ptx::wgmma<typename Product::Element, kCols, kTransposedA, kTransposedB>(
            reinterpret_cast<float (&)[kCols / 2]>(acc[h]),
            lhs + stage + h * (kBlockBytes >> 4) + k * descriptor_step(Product::kLhsMajor),
            rhs + stage + k * descriptor_step(Product::kRhsMajor), left != length || k != 0);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (left != length && lane < 2) ptx::barrier_arrive_peer(barriers + 8 * (Shape::kEmpty + before), lane);
    before = ring.slot;
    ring.advance();
    left -= kBlockK;
  };
  turn.take();
  constexpr int kWhole = Product::kRaggedSums ? 48 : 0;
  while (left > kWhole) block(std::integral_constant<int, 4>{});
  if constexpr (!Product::kRaggedSums) {
  } else if (left > 32) {
    block(std::integral_constant<int, 3>{});
  } else if (left > 16) {
    block(std::integral_constant<int, 2>{});
  } else if (left > 0) {
    block(std::integral_constant<int, 1>{});
  }
  ptx::wgmma_wait<0>();
  if (lane < 2) ptx::barrier_arrive_peer(barriers + 8 * (Shape::kEmpty + before), lane);
}

// The same barrier traffic for a tile with nothing to multiply.
template <class Shape>
__device__ inline void pass(Ring<Shape::kStages>& ring, Turn<Shape>& turn, int k_blocks, uint32_t barriers) {
  const int lane = threadIdx.x % 32;
  turn.take();
  if (k_blocks == 0) turn.hand_over();
  for (int kb = 0; kb < k_blocks; ++kb) {
    ptx::barrier_wait(barriers + 8 * (Shape::kFull + ring.slot), ring.parity);
    __syncwarp();
    if (kb + 1 == k_blocks) turn.hand_over();
    if (lane < 2) ptx::barrier_arrive_peer(barriers + 8 * (Shape::kEmpty + ring.slot), lane);
    ring.advance();
  }
}

template <class Product>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Product::Shape::kBlockThreads, 1)
    grouped_product_sm90(const __grid_constant__ typename Product::Params p) {
  using Shape = typename Product::Shape;
  constexpr int kWidening = Shape::kWidens ? kWideningWarps : 0;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = ptx::shared_address(memory), barriers = shared + Shape::kBarriersAt;
  const uint32_t rank = ptx::cluster_rank();
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  Work* items = reinterpret_cast<Work*>(memory + Shape::kWorkAt);

  if (threadIdx.x == 0) {
    for (int s = 0; s < Shape::kStages; ++s) {
      ptx::barrier_init(barriers + 8 * (Shape::kFull + s), 1 + kWidening);
      ptx::barrier_init(barriers + 8 * (Shape::kEmpty + s), kConsumerWarps);
      if constexpr (Shape::kWidens) ptx::barrier_init(barriers + 8 * (Shape::kCodesFull + s), 1);
    }
    for (int s = 0; s < kWorkDepth; ++s) {
      ptx::barrier_init(barriers + 8 * (Shape::kWorkFull + s), 1);
      ptx::barrier_init(barriers + 8 * (Shape::kWorkEmpty + s),
                        1 + 2 * (Shape::kSets != 0) + kConsumerWarps + kWidening);
    }
    for (int w = 0; w < 2; ++w) ptx::barrier_init(barriers + 8 * (Shape::kTurn + w), kConsumerWarps / 2);
    for (int s = 0; s < 2 * kMailDepth; ++s) ptx::barrier_init(barriers + 8 * (Shape::kMail + s), 1);
    for (int s = 0; s < kConsumerWarps * Shape::kSlots; ++s) {
      ptx::barrier_init(barriers + 8 * (Shape::kSlotFull + s), 1);
    }
    if constexpr (Shape::kSets != 0) init_sets<Shape>(shared);
    ptx::barrier_init_fence();
  }
  __syncwarp();
  ptx::cluster_barrier();

  if (warp < 4) {
    ptx::set_max_registers_down<Shape::kProducerRegisters>();
    if (warp == 0) {
      if (lane == 0) {
        WorkReader<Shape, false> reader(barriers, items);
        Ring<Shape::kStages> ring;
        while (true) {
          const Work work = reader.get();
          reader.release();
          if (work.kind == Work::kDone) break;
          if (work.kind != Work::kTile) continue;
          const int halves = work.valid_rows > 64 ? 2 : 1;
          const bool columns = work.col0 < p.cols;  // else the tile is the empty half of an `across` pair
          const uint32_t bytes = halves * kBlockBytes + (columns ? Product::rhs_bytes(p.cols - work.col0) : 0);
          for (int kb = 0; kb < work.k_blocks(); ++kb) {
            const uint32_t full = barriers + 8 * (Shape::kFull + ring.slot);
            const uint32_t stage = shared + ring.slot * Shape::kStageBytes;
            ptx::barrier_wait(barriers + 8 * (Shape::kEmpty + ring.slot), ring.parity ^ 1);
            if constexpr (Shape::kWidens) {
              const uint32_t arrived = barriers + 8 * (Shape::kCodesFull + ring.slot);
              const bool coded = columns && Product::from_codes(p, kb);
              if (coded) {
                Product::load_codes(p, work, kb * kBlockK, stage + Shape::kCodesAt, arrived);
              } else {
                ptx::barrier_arrive(arrived);
              }
              ptx::barrier_arrive_expect(full, coded ? halves * kBlockBytes : bytes);
              Product::load(p, work, kb * kBlockK, halves, columns && !coded, rank, stage, full);
            } else {
              ptx::barrier_arrive_expect(full, bytes);
              Product::load(p, work, kb * kBlockK, halves, columns, rank, stage, full);
            }
            ring.advance();
          }
        }
      }
    } else if (warp == 1) {
      WorkWriter<Shape> writer(barriers, items);
      Product::schedule(p, rank, barriers + 8 * Shape::kMail, shared + Shape::kSpareAt,
                        [&](const Work& work) { writer.push(work); });
    } else if constexpr (Shape::kSets != 0) {
      if (lane == 0) {
        WorkReader<Shape, false> reader(barriers, items);
        SetFetcher<Shape> fetched(shared);
        SetStorer<Shape> stored(shared);
        while (true) {
          const Work work = reader.get();
          reader.release();
          if (work.kind == Work::kDone) break;
          if (work.kind != Work::kTile) continue;
          if (warp == 2) Product::fetch(p, work, fetched);
          if (warp == 3) Product::store_sets(p, work, stored);
        }
      }
    }
    __syncwarp();
  } else if (Shape::kWidens && warp >= 4 + kConsumerWarps) {
    if constexpr (Shape::kWidens) {
      ptx::set_max_registers_down<Shape::kWideningRegisters>();
      Product::widen(p, shared, barriers, items);
      __syncwarp();
    }
  } else {
    ptx::set_max_registers_up<Shape::kConsumerRegisters>();
    const int consumer = warp / 4 - 1, first_row = 16 * (warp % 4);  // this warp's, in each half
    WorkReader<Shape, true> reader(barriers, items);
    Ring<Shape::kStages> ring;
    Turn<Shape> turn(barriers, consumer);
    typename Shape::WarpSlots slots{shared + Shape::kSlotsAt + (warp - 4) * Shape::WarpSlots::kBytes,
                                    barriers + 8 * (Shape::kSlotFull + (warp - 4) * Shape::kSlots)};
    std::conditional_t<Shape::kSets != 0, SetReader<Shape>, NoSets> sets(shared, consumer);
    const uint64_t lhs = descriptor(shared, Product::kLhsMajor);
    const uint64_t rhs = descriptor(shared + 2 * kBlockBytes, Product::kRhsMajor);
    for (int tile = 0;; reader.release()) {
      const Work& work = reader.get();
      if (work.kind == Work::kDone) break;
      if (work.kind == Work::kTail) {
        Product::clear_tail(p, work, rank, threadIdx.x - 128);
        continue;
      }
      if ((tile ^= 1) == consumer) {  // the other warpgroup's
        ring.advance(work.k_blocks());
        sets.skip(work, p.cols);
        continue;
      }
      const int valid_cols = p.cols - work.col0;
      if (valid_cols <= 0) {
        pass<Shape>(ring, turn, work.k_blocks(), barriers);
        sets.take_turn(turn.parity());
        sets.hand_over();
        continue;
      }
      auto held = Product::begin(p, work, first_row, valid_cols, slots);
      float acc[2][Shape::kCols / 2];
      if constexpr (Product::kRaggedSums) {
        multiply<Product, 2, Shape::kCols>(acc, ring, turn, work.length, lhs, rhs, barriers);
      } else {
        // Hidden behind the other warpgroup. Both halves need a value on both paths, or every wgmma is serialised.
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int i = 0; i < Shape::kCols / 2; ++i) acc[h][i] = 0;
        Product::multiply_cols(valid_cols, [&](auto cols) {
          if (work.valid_rows <= 64) {
            multiply<Product, 1, decltype(cols)::value>(acc, ring, turn, work.length, lhs, rhs, barriers);
          } else {
            multiply<Product, 2, decltype(cols)::value>(acc, ring, turn, work.length, lhs, rhs, barriers);
          }
        });
      }
      if constexpr (Shape::kSets != 0) {
        sets.take_turn(turn.parity());
        Product::store_tile(p, work, first_row, valid_cols, acc, sets);
      } else if constexpr (Product::kOneStore) {
        // One copy of the code for both halves, at the price of moving the second one: an epilogue that knows all kinds
        // of activation is large, for the compiler and for the instruction cache.
#pragma unroll 1
        for (int row = first_row; row < work.valid_rows && row < kTileRows; row += 64) {
          Product::store(p, work, row, valid_cols, acc[0], slots, held);
#pragma unroll
          for (int i = 0; i < Shape::kCols / 2; ++i) acc[0][i] = acc[1][i];
        }
      } else {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = first_row + 64 * h;
          if (row < work.valid_rows) Product::store(p, work, row, valid_cols, acc[h], slots, held);
        }
      }
    }
    if (lane == 0) ptx::store_wait_read<0>();
    __syncwarp();
  }
  // A peer may still arrive on our barriers: leave together.
  ptx::cluster_barrier();
}

}  // namespace grouped::sm90
