// The pipeline of 8-bit products in tiles of even height with scales of groups (pipeline_even.cuh), whose partial sums
// go to fp32 every 128 codes: 64 columns for each of two consumer warpgroups, which take every tile. What the stages of
// a tile hold and how a block is multiplied is the product's, in registers that it says.
#pragma once

#include "cc/device/common/group_factor.cuh"
#include "cc/device/sm90/pipeline_even.cuh"
#include "cc/device/sm90/rows_product_fp8.cuh"

namespace grouped::sm90 {

// Registers are of the 168 per thread at launch.
template <int kStages_, int kSlots_, int kProducerRegisters_, int kConsumerRegisters_>
struct EvenFp8Shape : ShellShape<(kEvenRows + kEvenCols) * 128, kStages_, kSlots_> {
  static constexpr int kRows = kEvenRows, kRowBoxes = kRows / 64;
  static constexpr int kProducerRegisters = kProducerRegisters_, kConsumerRegisters = kConsumerRegisters_;
};

using EvenFp8Slots = EvenSlots<1, kEvenRows * 128>;  // all rows of 64 columns in 16 bits

// What such products share; Out is the type of results.
template <class Out, class Shape_>
struct EvenFp8Rows {
  using Params = Fp8RowsParams;
  using Shape = Shape_;
  using Slots = EvenFp8Slots;
  static_assert(2 * Slots::kBytes == Shape::kWarps * Shape::WarpSlots::kBytes);

  static __device__ void clear_tail(const Params& p, const Work& work, uint32_t rank, int thread) {
    clear_whole_rows<Out>(p, work, rank, thread);
  }
};

template <class Product>
struct EvenPromoting : PairedPipeline<Product> {
  using typename PairedPipeline<Product>::Params;
  using typename PairedPipeline<Product>::Shape;
  using Loads = typename Product::Loads;

  static __device__ RingArrivals rings(const Params&) { return {1, 2 * Shape::kWarps, Shape::kWarps}; }
  static __device__ void init(const Shell<Shape>) {}
  static __device__ void fill(uint8_t*) {}
  static __device__ void help(const Params&, const Shell<Shape>, int) {}

  static __device__ __forceinline__ void work(const Params& p, const Shell<Shape> shell, int warp) {
    ptx::set_max_registers_up<Shape::kConsumerRegisters>();
    const int consumer = warp / 4 - 1;
    WorkReader<Shape, true> reader(shell.barriers, shell.items);
    Ring<Shape::kStages> ring;
    typename Product::Slots slots(shell.slots(0).base, consumer);
    const typename Product::Weights weights(shell, consumer, warp - 4);
    const uint64_t rows = descriptor(shell.shared + Product::Rhs::kBytes, Major::k);
    for (;; reader.release()) {
      const Work& work = reader.get();
      if (work.kind == Work::kDone) break;
      if (work.kind == Work::kTail) {
        Product::clear_tail(p, work, shell.rank, threadIdx.x - 128);
        continue;
      }
      const int col0 = work.col0 + 64 * consumer;
      if (col0 >= p.cols) {  // nothing to multiply
        for (int b = 0; b < Product::stages(work); ++b) skip_block<Shape>(ring, shell.barriers);
        continue;
      }
      const Alpha group(p.lhs_group_scales, p.rhs_group_scales, work.group);  // fetched while the tile multiplies
      float acc[kEvenRows / 2];
#pragma unroll
      for (float& sum : acc) sum = 0;
      with_even_rows(work.valid_rows, [&](auto count) {
        Product::template multiply<decltype(count)::value>(acc, ring, work.length, weights, rows, shell.barriers);
      });
      Product::store(p, work, col0, warp % 4, acc, group, slots);
    }
    shell.finish_stores();
  }
};

template <class Product>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    even_product_fp8_sm90(const __grid_constant__ typename Product::Params p) {
  run_shell<Product, EvenPromoting>(p);
}

}  // namespace grouped::sm90
