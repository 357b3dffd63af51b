// The pipeline of 16-bit products whose tiles are of even height, in the shell of shell.cuh: CTA pairs, up to 192 rows
// by 128 columns per tile, operands swapped. Weights are the operand A of wgmma, two times 64 columns, and the rows of
// a tile are the columns of B, of which any multiple of 16 can be multiplied. All tiles of a group are equally high, so
// that a group costs hardly more than its rows, and both CTAs of a pair take the same time.
//
//   warpgroups 1, 2       multiply and store whole tiles in turn, with the barriers of pipeline.cuh
//                         wait full -> 4 k16 steps of wgmma, or 1, 2 x 64 columns -> empty of the block before
//
// A block of h rows takes the tensor cores 4 h cycles, and shared memory 3 h + 256, at 128 bytes per cycle: for 192
// rows 40 KiB are written and 64 KiB read by wgmma, 832 cycles beside 768. The lower a tile, the more this bounds it.
#pragma once

#include "cc/device/sm90/even_epilogue.cuh"
#include "cc/device/sm90/low_rank.cuh"
#include "cc/device/sm90/pipeline.cuh"

namespace grouped::sm90 {

template <int kStages_, int kSlots_, int kSlotBytes_ = kSlotBytes>
struct EvenShape : TileShape<kEvenRows, kStages_, kSlots_, kSlotBytes_> {
  static constexpr int kTileCols = kEvenCols, kRowBoxes = kEvenRows / 64;
};

// The weights of a tile, in front of its rows: two boxes of 64 columns x 64 k, the second one `part` columns further in
// the map `second`. What the pair shares (not across) is loaded a box per CTA.
template <Major kMajor>
struct EvenWeights {
  static constexpr uint32_t kBytes = 2 * kBlockBytes, kBoxCols = 64, kBoxRows = 64;
  static constexpr int kColsDim = kMajor == Major::k ? 1 : 0;

  static __device__ void load(const CUtensorMap* first, const CUtensorMap* second, ptx::Coords at, int part,
                              bool across, uint32_t rank, uint32_t to, uint32_t barrier) {
    if (across) {
      ptx::tensor_load(to, first, at, barrier);
      at.c[kColsDim] += part;
      ptx::tensor_load(to + kBlockBytes, second, at, barrier);
    } else {
      at.c[kColsDim] += part * int(rank);
      ptx::tensor_load_multicast(to + kBlockBytes * rank, rank != 0 ? second : first, at, barrier, kBothCtas);
    }
  }
};

// What products with such tiles share; a tile has kResultCols columns of the result.
template <Major kWeights, int kResultCols>
struct EvenTiles {
  static constexpr Major kLhsMajor = kWeights, kRhsMajor = Major::k;  // as wgmma has them
  static constexpr bool kRaggedSums = false, kShortEnd = true;
  using Rhs = EvenWeights<kWeights>;
  static __device__ uint32_t rhs_bytes(int) { return Rhs::kBytes; }

  template <class Params, class Push>
  static __device__ void schedule(const Params& p, uint32_t rank, uint32_t mail, uint32_t, Push push) {
    schedule_rows<pair_at, kEvenRows, true>(p, kResultCols, rank, mail, push);
  }
};

// The rows of a tile, from `lhs`, or for blocks of a low-rank product from its own.
template <class Params>
__device__ inline void load_even_rows(const Params& p, const Work& work, const FromLow& part, int boxes, uint32_t rank,
                                      uint32_t stage, uint32_t full) {
  load_lhs<1, kEvenRows / 64>(part.low ? &p.low.lhs : &p.lhs, ragged_at(work, part.at, 0), boxes, work.across, rank,
                              stage + 2 * kBlockBytes, full);
}

// multiply(count) for the least multiple of kEvenStep that is not below `rows`.
template <int kRows = kEvenStep, class Multiply>
__device__ __forceinline__ void with_even_rows(int rows, Multiply multiply) {
  if constexpr (kRows == kEvenRows) {
    multiply(std::integral_constant<int, kRows>{});
  } else if (rows <= kRows) {
    multiply(std::integral_constant<int, kRows>{});
  } else {
    with_even_rows<kRows + kEvenStep>(rows, multiply);
  }
}

template <class Product>
struct EvenPipeline : Pingpong<Product> {
  using typename PairedPipeline<Product>::Params;
  using typename PairedPipeline<Product>::Shape;

  static __device__ __forceinline__ void work(const Params& p, const Shell<Shape> shell, int warp) {
    ptx::set_max_registers_up<Shape::kConsumerRegisters>();
    const int consumer = warp / 4 - 1;
    WorkReader<Shape, true> reader(shell.barriers, shell.items);
    Ring<Shape::kStages> ring;
    Turn<Shape> turn(shell.barriers, consumer);
    typename Product::Slots slots(shell.slots(0).base, consumer);
    const uint64_t weights = descriptor(shell.shared, Product::kLhsMajor);
    const uint64_t rows = descriptor(shell.shared + 2 * kBlockBytes, Major::k);
    for (int tile = 0;; reader.release()) {
      const Work& work = reader.get();
      if (work.kind == Work::kDone) break;
      if (work.kind == Work::kTail) {
        Product::clear_tail(p, work, shell.rank, threadIdx.x - 128);
        continue;
      }
      if ((tile ^= 1) == consumer) {  // the other warpgroup's
        ring.advance(work.k_blocks());
        continue;
      }
      if (work.col0 >= p.cols) {
        pass<Shape>(ring, turn, work.k_blocks(), shell.barriers);
        continue;
      }
      float acc[2][kEvenRows / 2];  // with values on all paths, or every wgmma is serialised
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int i = 0; i < kEvenRows / 2; ++i) acc[h][i] = 0;
      with_even_rows(work.valid_rows, [&](auto count) {
        multiply<Product, 2, decltype(count)::value>(acc, ring, turn, work.length, weights, rows, shell.barriers);
      });
      Product::store(p, work, warp % 4, acc, slots);
    }
    shell.finish_stores();
  }
};

template <class Product>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    even_product_sm90(const __grid_constant__ typename Product::Params p) {
  run_shell<Product, EvenPipeline>(p);
}

}  // namespace grouped::sm90
