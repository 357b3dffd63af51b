// A part of grouped_matmul_fp8_sm90: tiles of even height for scales of groups and results of 16 bits.
//
//   loader: weight codes 128 x 128 in two boxes, row codes by a ragged map in boxes of 64; shared tiles multicast
//            |  ring of blocks: weights 128 x 128 bytes, rows up to 192 x 128 bytes
//            v
//   2 consumer warpgroups, 64 columns each, operands swapped: a block's sums of R rows by wgmma m64n(R/2)k32 in two
//   parts, of which one multiplies while the other is added to fp32 (pipeline_fp8.cuh, whose barriers these are)
//            |  * both scales of the group, + bias, * row scale, one rounding; all rows, transposed, in shared memory
//            v
//   stores of 16 rows x 64 columns, as far as the tile has rows, clipped at the group's last one
//
//   tile        accumulators         ring         slots           registers, 128 + 256 threads
//   192 x 128   96 + 96 per thread   4 x 40 KiB   2 x 24 KiB      56 / 224
#include "cc/device/common/group_factor.cuh"
#include "cc/device/sm90/pipeline_even.cuh"
#include "cc/device/sm90/pipeline_fp8.cuh"
#include "cc/device/sm90/rows_product_fp8.cuh"
#include "cc/dispatch/tiles_sm90.h"

namespace grouped::sm90 {
namespace {

struct Shape : ShellShape<(kEvenRows + kEvenCols) * 128, kPromoting.stages, kPromoting.slots> {
  static constexpr int kRows = kEvenRows, kRowBoxes = kRows / 64, kParts = 2, kScaleBytes = 0;
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;  // of the 168 per thread at launch
};

template <bool kWideRows, bool kWideWeights, class Out>
struct EvenFp8Product : EvenTiles<Major::k, kEvenCols> {
  using Params = Fp8RowsParams;
  using Element = ptx::Fp8Pair<kWideWeights, kWideRows>;  // as wgmma has them
  using Shape = sm90::Shape;
  using Slots = EvenSlots<1, kEvenRows * 128>;
  static_assert(2 * Slots::kBytes == Shape::kWarps * Shape::WarpSlots::kBytes);

  static __device__ void load(const Params& p, const Work& work, int k, int boxes, bool columns, uint32_t rank,
                              uint32_t to, uint32_t full) {
    const int32_t code = kCodesPerElement * k;
    load_lhs<1, Shape::kRowBoxes>(&p.lhs, ragged_at(work, code, 0), boxes, work.across, rank, to + Rhs::kBytes, full);
    if (!columns) return;
    Rhs::load(&p.rhs, &p.rhs, {{code, work.col0, work.slice2, work.slice3}}, kEvenCols / 2, work.across, rank, to,
              full);
  }

  static __device__ void store(const Params& p, const Work& work, int col0, int warp, float (&sums)[kEvenRows / 2],
                               const Alpha& group, Slots& slots) {
    using Bias = device::BiasOf<Out>;
    device::scale_sums(sums, __fmul_rn(group.lhs, group.rhs));
    end_even<Bias>(p, work, col0, even_columns(warp), sums);
    store_even<Out, kEvenRows>(p, work, col0, warp, sums, slots);
  }

  static __device__ void clear_tail(const Params& p, const Work& work, uint32_t rank, int thread) {
    clear_whole_rows<Out>(p, work, rank, thread);
  }
};

template <class Product>
struct EvenPromoting : PairedPipeline<Product> {
  using typename PairedPipeline<Product>::Params;

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
    const uint64_t weights = descriptor(shell.shared + consumer * kBlockBytes, Major::k);
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
        for (int b = 0; b < work.k_blocks(); ++b) skip_block<Shape>(ring, shell.barriers);
        continue;
      }
      const Alpha group(p.lhs_group_scales, p.rhs_group_scales, work.group);  // fetched while the tile multiplies
      float acc[kEvenRows / 2];
#pragma unroll
      for (float& sum : acc) sum = 0;
      with_even_rows(work.valid_rows, [&](auto count) {
        multiply_promoting<Product, Scaling::none, decltype(count)::value>(acc, ring, work.length, 0, weights, rows,
                                                                           shell.barriers, 0, NothingMeanwhile{});
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

template <bool kWideRows, bool kWideWeights>
void launch_result(const GroupedMatmul& call, Fp8RowsParams p, void* stream) {
  const auto launch = [&](auto out) {
    using Product = EvenFp8Product<kWideRows, kWideWeights, decltype(out)>;
    launch_rows_product<Product, kEvenCols>(even_product_fp8_sm90<Product>, p, stream);
  };
  return call.result.dtype == DType::f16 ? launch(__half{}) : launch(__nv_bfloat16{});
}

}  // namespace

// `p` has all but the map of the weights.
void launch_even_fp8_rows(const GroupedMatmul& call, Fp8RowsParams p, void* stream) {
  map_weights<EvenWeights<Major::k>>(call, &p);
  const bool wide_rows = call.lhs.dtype == DType::e5m2, wide_weights = call.rhs.dtype == DType::e5m2;
  if (wide_rows) {
    return wide_weights ? launch_result<true, true>(call, p, stream) : launch_result<true, false>(call, p, stream);
  }
  return wide_weights ? launch_result<false, true>(call, p, stream) : launch_result<false, false>(call, p, stream);
}

}  // namespace grouped::sm90
