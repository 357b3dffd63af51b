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
#include "cc/device/sm90/pipeline_even_fp8.cuh"
#include "cc/device/sm90/pipeline_fp8.cuh"
#include "cc/dispatch/tiles_sm90.h"

namespace grouped::sm90 {
namespace {

struct Shape : EvenFp8Shape<kPromoting.stages, kPromoting.slots, 56, 224> {
  static constexpr int kParts = 2, kScaleBytes = 0;
};

// The descriptor of a warpgroup's 64 columns in stage 0.
struct EvenDescriptor {
  uint64_t of_weights;
  __device__ EvenDescriptor(const Shell<Shape>& shell, int consumer, int)
      : of_weights(descriptor(shell.shared + consumer * kBlockBytes, Major::k)) {}
};

template <bool kWideRows, bool kWideWeights, class Out>
struct EvenFp8Product : EvenTiles<Major::k, kEvenCols>, EvenFp8Rows<Out, Shape> {
  using Params = Fp8RowsParams;
  using Element = ptx::Fp8Pair<kWideWeights, kWideRows>;  // as wgmma has them
  using Weights = EvenDescriptor;
  using Loads = PairLoads<EvenFp8Product>;
  static __device__ int stages(const Work& work) { return work.k_blocks(); }

  static __device__ void load(const Params& p, const Work& work, int k, int boxes, bool columns, uint32_t rank,
                              uint32_t to, uint32_t full) {
    const int32_t code = kCodesPerElement * k;
    load_lhs<1, Shape::kRowBoxes>(&p.lhs, ragged_at(work, code, 0), boxes, work.across, rank, to + Rhs::kBytes, full);
    if (!columns) return;
    Rhs::load(&p.rhs, &p.rhs, {{code, work.col0, work.slice2, work.slice3}}, kEvenCols / 2, work.across, rank, to,
              full);
  }

  template <int kRows>
  static __device__ void multiply(float* acc, Ring<Shape::kStages>& ring, int length, const Weights& weights,
                                  uint64_t rows, uint32_t barriers) {
    multiply_promoting<EvenFp8Product, Scaling::none, kRows>(acc, ring, length, 0, weights.of_weights, rows, barriers,
                                                             0, NothingMeanwhile{});
  }

  static __device__ void store(const Params& p, const Work& work, int col0, int warp, float (&sums)[kEvenRows / 2],
                               const Alpha& group, EvenFp8Slots& slots) {
    using Bias = device::BiasOf<Out>;
    device::scale_sums(sums, __fmul_rn(group.lhs, group.rhs));
    end_even<Bias>(p, work, col0, even_columns(warp), sums);
    store_even<Out, kEvenRows>(p, work, col0, warp, sums, slots);
  }
};

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
