// The product of plain rows and weights that come as codes, as grouped_matmul_codes_sm90.cu draws it, and its launch,
// which one file for each width of codes instantiates.
#pragma once

#include "cc/api/calls.h"
#include "cc/device/common/group_factor.cuh"
#include "cc/device/sm90/rows_matmul.cuh"
#include "cc/device/sm90/widen_tiles.cuh"
#include "cc/dispatch/tiles_sm90.h"

namespace grouped::sm90 {

struct CodedRowsParams : HalvesParams {
  CodedWeights coded;
  const float* factors;  // [groups]: scales of groups, or null
};

template <const TileChoice& kChoice, bool kNibbles>
using CodedTile = CodedTileShape<kNibbles, kChoice.cols, kChoice.stages, kChoice.slots>;

template <bool kNibbles, class Out, Major kWeights>
struct CodedRowsProduct
    : RowsProduct<__nv_bfloat16, Out, kWeights, CodedTile<kNibbles ? kCodedNibbles : kCodedBytes, kNibbles>>,
      CodedBoxes<kNibbles, kWeights, CodedTile<kNibbles ? kCodedNibbles : kCodedBytes, kNibbles>::kCols> {
  using Shape = CodedTile<kNibbles ? kCodedNibbles : kCodedBytes, kNibbles>;
  using Base = RowsProduct<__nv_bfloat16, Out, kWeights, Shape>;
  using Params = CodedRowsParams;

  static __device__ void widen(const Params& p, const Shell<Shape> shell) {
    widen_any<kNibbles, CodedRowsProduct>(p, shell);
  }

  static __device__ void store(const Params& p, const Work& work, int row, int cols, float (&acc)[Shape::kCols / 2],
                               typename Shape::WarpSlots& slots, NothingHeld& held) {
    if (p.factors != nullptr) device::scale_sums(acc, device::group_factor(nullptr, p.factors, work.group));
    Base::store(p, work, row, cols, acc, slots, held);
  }
};

template <bool kNibbles, class Out, Major kWeights>
void launch_coded_major(const GroupedMatmul& call, CodedRowsParams p, void* stream) {
  using Product = CodedRowsProduct<kNibbles, Out, kWeights>;
  using Rhs = typename Product::Rhs;
  p.coded = coded_weights(call, kCodedBox);
  p.lhs = map_of_rows(call.lhs);
  p.low = low_maps(call.low, p.groups, Rhs::kBoxCols, Rhs::kBoxRows, &p.length);
  map_result(call, &p);
  launch_rows_product<Product>(coded_product_sm90<Product>, p, stream, kCodedThreads);
}

// By the layout of weights and the result's type.
template <bool kNibbles>
void launch_coded(const GroupedMatmul& call, const CodedRowsParams& p, void* stream) {
  const bool wide = call.result.dtype == DType::f32;
  if (call.rhs_axis == 2) {
    return wide ? launch_coded_major<kNibbles, float, Major::k>(call, p, stream)
                : launch_coded_major<kNibbles, __nv_bfloat16, Major::k>(call, p, stream);
  }
  return wide ? launch_coded_major<kNibbles, float, Major::mn>(call, p, stream)
              : launch_coded_major<kNibbles, __nv_bfloat16, Major::mn>(call, p, stream);
}

}  // namespace grouped::sm90
