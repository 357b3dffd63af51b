// Gradients at the hidden rows through weights that come as codes, as grouped_matmul_dact_codes_sm90.cu draws them, and
// their launch, which one file for each width of codes instantiates.
#pragma once

#include "cc/device/common/group_factor.cuh"
#include "cc/device/sm90/widen_tiles.cuh"
#include "cc/kernels/grouped_matmul_dact_bf16_sm90.cuh"

namespace grouped::sm90 {

struct CodedDactParams : DactParams {
  CodedWeights coded;
  const float* factors;  // [groups]: scales of groups, or null
};

template <bool kNibbles>
using CodedDactShape = FetchingShape<CodedTileShape<kNibbles, DactShape::kCols, 4, 0>, 2>;

template <bool kNibbles, Major kWeights>
struct CodedDactProduct : DactProduct<__nv_bfloat16, kWeights, CodedDactShape<kNibbles>>,
                          CodedBoxes<kNibbles, kWeights, DactShape::kCols> {
  using Shape = CodedDactShape<kNibbles>;
  using Base = DactProduct<__nv_bfloat16, kWeights, Shape>;
  using Params = CodedDactParams;
  static constexpr bool kShortEnd = false;  // as in the other products of codes

  static __device__ void widen(const Params& p, const Shell<Shape> shell) {
    widen_any<kNibbles, CodedDactProduct>(p, shell);
  }

  static __device__ void store_tile(const Params& p, const Work& work, int first_row, int cols,
                                    float (&acc)[2][Shape::kCols / 2], SetReader<Shape>& sets) {
    if (p.factors != nullptr) {
      const float factor = device::group_factor(nullptr, p.factors, work.group);
      for (float (&half)[Shape::kCols / 2] : acc) device::scale_sums(half, factor);
    }
    Base::store_tile(p, work, first_row, cols, acc, sets);
  }
};

template <class Product>
void launch_coded_major(const GroupedMatmulDact& call, const CodedDactParams& p, cudaStream_t stream) {
  launch_dact_product<Product>(coded_product_sm90<Product>, call, p, kCodedThreads, stream);
}

// By the layout of weights.
template <bool kNibbles>
void launch_coded_dact(const GroupedMatmulDact& call, CodedDactParams p, cudaStream_t stream) {
  p.coded = coded_weights(call, kCodedBox);
  return call.rhs_axis == 2 ? launch_coded_major<CodedDactProduct<kNibbles, Major::k>>(call, p, stream)
                            : launch_coded_major<CodedDactProduct<kNibbles, Major::mn>>(call, p, stream);
}

}  // namespace grouped::sm90
