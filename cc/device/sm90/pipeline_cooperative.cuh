// The pipeline of 16-bit products with long sums, in the shell of shell.cuh: CTA pairs, 128 rows by 256 columns per
// tile, which both consumer warpgroups share.
//
//   warpgroups 1, 2       all 128 rows by 128 columns each: wait full -> 4 k16 steps of wgmma, 2 x 64 rows -> empty of
//                         the block before; then each stores its part, while the other may still multiply
//
//   full[s]    1 arrival (with the bytes of both CTAs' loads) per block    loader -> consumers
//   empty[s]   1 arrival of each consumer warp, in both CTAs               consumers -> both loaders
//   work       empty 1 + 8 arrivals                                        scheduler -> loader, consumers
//
// Rows cross L2 and the chip once for 256 columns instead of 192: a seventh less energy for operands on their way to
// shared memory, which is a third of what a product takes. In turn only as much of a store is hidden as one warpgroup
// runs ahead of the other, about 4000 cycles per tile; so it pays where sums are long (docs/kernels.md).
#pragma once

#include "cc/device/sm90/pipeline.cuh"

namespace grouped::sm90 {

// 128 rows by twice kCols, which are a warpgroup's.
template <int kCols_, int kStages_, int kSlots_>
struct CooperativeShape : ShellShape<2 * kBlockBytes + 2 * kCols_ * 128, kStages_, kSlots_> {
  static constexpr int kCols = kCols_, kTileCols = 2 * kCols_;
  static constexpr int kSets = 0;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // of the 168 per thread at launch
};

// Nothing orders the main loops.
struct NoTurn {
  __device__ void take() const {}
  __device__ void hand_over() const {}
};

template <class Product>
struct Cooperative : PairedPipeline<Product> {
  using typename PairedPipeline<Product>::Params;
  using typename PairedPipeline<Product>::Shape;

  static __device__ RingArrivals rings(const Params&) { return {1, 2 * kConsumerWarps, kConsumerWarps}; }
  static __device__ void init(const Shell<Shape>) {}
  static __device__ void fill(uint8_t*) {}
  static __device__ __forceinline__ void help(const Params&, const Shell<Shape>, int) {}

  static __device__ __forceinline__ void work(const Params& p, const Shell<Shape> shell, int warp) {
    ptx::set_max_registers_up<Shape::kConsumerRegisters>();
    const int first_col = (warp / 4 - 1) * Shape::kCols, first_row = 16 * (warp % 4);  // in the tile, in each half
    WorkReader<Shape, true> reader(shell.barriers, shell.items);
    Ring<Shape::kStages> ring;
    NoTurn turn;
    auto slots = shell.slots(warp - 4);
    const uint64_t lhs = descriptor(shell.shared, Product::kLhsMajor);
    const uint64_t rhs = descriptor(shell.shared + 2 * kBlockBytes + first_col * 128, Product::kRhsMajor);
    for (;; reader.release()) {
      const Work& work = reader.get();
      if (work.kind == Work::kDone) break;
      if (work.kind == Work::kTail) {
        Product::clear_tail(p, work, shell.rank, threadIdx.x - 128);
        continue;
      }
      const int valid_cols = p.cols - work.col0 - first_col;
      if (valid_cols <= 0) {  // the other warpgroup and the peer wait for this one
        for (int b = 0; b < work.k_blocks(); ++b) skip_block<Shape>(ring, shell.barriers);
        continue;
      }
      float acc[2][Shape::kCols / 2];
      // Both halves need a value on both paths, or every wgmma is serialised.
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int i = 0; i < Shape::kCols / 2; ++i) acc[h][i] = 0;
      if (work.valid_rows <= 64) {
        multiply<Product, 1, Shape::kCols>(acc, ring, turn, work.length, lhs, rhs, shell.barriers);
      } else {
        multiply<Product, 2, Shape::kCols>(acc, ring, turn, work.length, lhs, rhs, shell.barriers);
      }
      Work mine = work;
      mine.col0 += first_col;
      NothingHeld held;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first_row + 64 * h;
        if (row < mine.valid_rows) Product::store(p, mine, row, valid_cols, acc[h], slots, held);
      }
    }
    shell.finish_stores();
  }
};

template <class Product>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    cooperative_product_sm90(const __grid_constant__ typename Product::Params p) {
  run_shell<Product, Cooperative>(p);
}

}  // namespace grouped::sm90
