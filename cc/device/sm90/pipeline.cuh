// The pipeline of 16-bit products, and of 8-bit ones that tensor cores sum alone, in the shell of shell.cuh: CTA pairs,
// 128 rows by kCols per tile.
//
//   warps 2, 3            where an epilogue has operands of its own: fetch these, store results (epilogue_fetch.cuh)
//   warpgroups 1, 2       multiply and store whole tiles in turn: one stores while the other multiplies
//                         wait full -> 4 k16 steps of wgmma, or 1, 2 x 64 rows -> empty of the block before
//
//   full[s]    1 arrival (with the bytes of both CTAs' loads) per block    loader -> consumers
//   empty[s]   1 arrival of each warp of a warpgroup, in both CTAs         consumers -> both loaders
//   work       empty 1 + 8 arrivals (2 more with sets)                     scheduler -> loader, consumers
//   turn[w]    4 arrivals per tile, the warps of the other warpgroup
//
// A warpgroup hands over its turn once it has seen its last block arrive: the other then is never more than one phase
// ahead of a full barrier, which is as far as parity can tell.
#pragma once

#include "cc/device/sm90/epilogue_fetch.cuh"
#include "cc/device/sm90/operand_loads.cuh"
#include "cc/device/sm90/shell.cuh"

namespace grouped::sm90 {

constexpr int kThreads = 384;

// 128 rows by kCols.
template <int kCols_, int kStages_, int kSlots_, int kSlotBytes_ = kSlotBytes>
struct TileShape : ShellShape<2 * kBlockBytes + kCols_ * 128, kStages_, kSlots_, kSlotBytes_> {
  static constexpr int kCols = kCols_, kTileCols = kCols_;
  static constexpr int kSets = 0;  // the epilogue has no operands

  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // of the 168 per thread at launch
};

// For epilogues with operands of their own: sets of epilogue_fetch.cuh behind everything else, instead of slots.
template <class Base, int kSets_>
struct FetchingShape : Base {
  static_assert(Base::kSlots == 0);
  static constexpr int kSets = kSets_;
  static constexpr int kSetFullAt = Base::kSharedBytes, kSetDoneAt = kSetFullAt + 8 * kSets;
  static constexpr int kSetEmptyAt = kSetDoneAt + 8 * kSets, kSetTurnAt = kSetEmptyAt + 8 * kSets;
  static constexpr int kSetsAt = (kSetTurnAt + 16 + 1023) / 1024 * 1024;
  static constexpr int kSharedBytes = kSetsAt + kSets * kSetBytes;
  static_assert(kSharedBytes <= kSharedLimit);
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

// Multiplies one tile, kHalves times 64 rows by its first kCols columns; `length` is at least 1. Leaves the
// accumulators complete and all blocks released. A ragged sum stops at the step of 16 that holds its last element.
// Others multiply whole blocks, but with kShortEnd a last one of at most 16 elements, as adapters of rank 16 have it,
// in one step: each number of steps is a copy of the code. Their first block is always whole, since with a path from
// the cleared accumulators to that single step ptxas serialises every wgmma (C7515).
template <class Product, int kHalves, int kCols, class Turn_>
__device__ inline void multiply(float (&acc)[2][Product::Shape::kCols / 2], Ring<Product::Shape::kStages>& ring,
                                Turn_& turn, int length, uint64_t lhs, uint64_t rhs, uint32_t barriers) {
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
  if constexpr (Product::kRaggedSums) {
    while (left > 48) block(std::integral_constant<int, 4>{});
    if (left > 32) {
      block(std::integral_constant<int, 3>{});
    } else if (left > 16) {
      block(std::integral_constant<int, 2>{});
    } else if (left > 0) {
      block(std::integral_constant<int, 1>{});
    }
  } else if constexpr (Product::kShortEnd) {
    if (left > 0) {  // always, but without the question ptxas spills
      do block(std::integral_constant<int, 4>{});
      while (left > 16);
      if (left > 0) block(std::integral_constant<int, 1>{});
    }
  } else {
    while (left > 0) block(std::integral_constant<int, 4>{});
  }
  ptx::wgmma_wait<0>();
  if (lane < 2) ptx::barrier_arrive_peer(barriers + 8 * (Shape::kEmpty + before), lane);
}

// The same barrier traffic for a tile with nothing to multiply.
template <class Shape>
__device__ inline void pass(Ring<Shape::kStages>& ring, Turn<Shape>& turn, int k_blocks, uint32_t barriers) {
  turn.take();
  for (int kb = 0; kb < k_blocks; ++kb) skip_block<Shape>(ring, barriers);
  turn.hand_over();
}

// How the blocks of a tile are loaded by a pair: boxes of 64 rows as far as there are any, and the columns.
template <class Product>
struct PairLoads {
  int boxes, blocks;
  bool columns;  // else the tile is the empty half of an `across` pair
  uint32_t bytes;

  __device__ PairLoads(const typename Product::Params& p, const Work& work)
      : boxes(work.valid_rows > 64 ? 2 : 1), blocks(work.k_blocks()), columns(work.col0 < p.cols) {
    if (Product::Shape::kRowBoxes > 2 && work.valid_rows > 2 * 64) boxes = Product::Shape::kRowBoxes;
    bytes = boxes * kBlockBytes + (columns ? Product::rhs_bytes(p.cols - work.col0) : 0);
  }
  __device__ uint32_t bytes_of(int) const { return bytes; }
  __device__ void load(const typename Product::Params& p, const Work& work, int block, uint32_t rank, uint32_t stage,
                       uint32_t full) const {
    Product::load(p, work, block * kBlockK, boxes, columns, rank, stage, full);
  }
};

// What pipelines of pairs share.
template <class Product>
struct PairedPipeline {
  using Params = typename Product::Params;
  using Shape = typename Product::Shape;
  using Loads = PairLoads<Product>;
  static constexpr bool kPairs = true;

  template <class Push>
  static __device__ void schedule(const Params& p, const Shell<Shape> shell, Push push) {
    Product::schedule(p, shell.rank, shell.barriers + 8 * Shape::kMail, shell.shared + Shape::kSpareAt, push);
  }
};

template <class Product>
struct Pingpong : PairedPipeline<Product> {
  using typename PairedPipeline<Product>::Params;
  using typename PairedPipeline<Product>::Shape;

  static __device__ RingArrivals rings(const Params&) {
    return {1, kConsumerWarps, 2 * (Shape::kSets != 0) + kConsumerWarps};
  }
  static __device__ void init(const Shell<Shape> shell) {
    for (int w = 0; w < 2; ++w) ptx::barrier_init(shell.barriers + 8 * (Shape::kTurn + w), kConsumerWarps / 2);
    if constexpr (Shape::kSets != 0) init_sets<Shape>(shell.shared);
  }
  static __device__ void fill(uint8_t*) {}

  static __device__ __forceinline__ void help(const Params& p, const Shell<Shape> shell, int warp) {
    if constexpr (Shape::kSets != 0) {
      if (threadIdx.x % 32 == 0) {
        SetFetcher<Shape> fetched(shell.shared);
        SetStorer<Shape> stored(shell.shared);
        shell.lane_tiles([&](const Work& work) {
          if (warp == 2) Product::fetch(p, work, fetched);
          if (warp == 3) Product::store_sets(p, work, stored);
        });
      }
    }
  }

  static __device__ __forceinline__ void work(const Params& p, const Shell<Shape> shell, int warp) {
    ptx::set_max_registers_up<Shape::kConsumerRegisters>();
    const int consumer = warp / 4 - 1, first_row = 16 * (warp % 4);  // this warp's, in each half
    WorkReader<Shape, true> reader(shell.barriers, shell.items);
    Ring<Shape::kStages> ring;
    Turn<Shape> turn(shell.barriers, consumer);
    auto slots = shell.slots(warp - 4);
    std::conditional_t<Shape::kSets != 0, SetReader<Shape>, NoSets> sets(shell.shared, consumer);
    const uint64_t lhs = descriptor(shell.shared, Product::kLhsMajor);
    const uint64_t rhs = descriptor(shell.shared + 2 * kBlockBytes, Product::kRhsMajor);
    for (int tile = 0;; reader.release()) {
      const Work& work = reader.get();
      if (work.kind == Work::kDone) break;
      if (work.kind == Work::kTail) {
        Product::clear_tail(p, work, shell.rank, threadIdx.x - 128);
        continue;
      }
      if ((tile ^= 1) == consumer) {  // the other warpgroup's
        ring.advance(work.k_blocks());
        sets.skip(work, p.cols);
        continue;
      }
      const int valid_cols = p.cols - work.col0;
      if (valid_cols <= 0) {
        pass<Shape>(ring, turn, work.k_blocks(), shell.barriers);
        sets.take_turn(turn.parity());
        sets.hand_over();
        continue;
      }
      auto held = Product::begin(p, work, first_row, valid_cols, slots);
      float acc[2][Shape::kCols / 2];
      if constexpr (Product::kRaggedSums) {
        multiply<Product, 2, Shape::kCols>(acc, ring, turn, work.length, lhs, rhs, shell.barriers);
      } else {
        // Hidden behind the other warpgroup. Both halves need a value on both paths, or every wgmma is serialised.
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int i = 0; i < Shape::kCols / 2; ++i) acc[h][i] = 0;
        Product::multiply_cols(valid_cols, [&](auto cols) {
          if (work.valid_rows <= 64) {
            multiply<Product, 1, decltype(cols)::value>(acc, ring, turn, work.length, lhs, rhs, shell.barriers);
          } else {
            multiply<Product, 2, decltype(cols)::value>(acc, ring, turn, work.length, lhs, rhs, shell.barriers);
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
    shell.finish_stores();
  }
};

template <class Product>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    grouped_product_sm90(const __grid_constant__ typename Product::Params p) {
  run_shell<Product, Pingpong>(p);
}

}  // namespace grouped::sm90
