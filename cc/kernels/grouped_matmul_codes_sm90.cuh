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
    : RowsProduct<__nv_bfloat16, Out, kWeights, CodedTile<kNibbles ? kCodedNibbles : kCodedBytes, kNibbles>> {
  using Shape = CodedTile<kNibbles ? kCodedNibbles : kCodedBytes, kNibbles>;
  using Base = RowsProduct<__nv_bfloat16, Out, kWeights, Shape>;
  using Params = CodedRowsParams;
  using Coded = CodedBoxes<kNibbles, kWeights, Shape::kCols>;

  static __device__ bool from_codes(const Params& p, int block) { return block * kBlockK < p.low.first; }
  static __device__ int coded_cols(int cols) { return Coded::cols(cols); }
  // The line, or for MN-major weights the code in a line, of column `col` of a tile, below 64; and how much further it
  // is for the column `by` on, a multiple of 64.
  static __device__ int coded_column(const Params&, const Work& work, int col) { return work.col0 + col; }
  static __device__ int coded_move(const Params&, int by) { return by; }
  static __device__ void load_codes(const Params& p, const Work& work, int k, uint32_t to, uint32_t arrived) {
    Coded::load(p.coded, work, p.cols, k, to, arrived);
  }
  static __device__ void widen(const Params& p, const Shell<Shape> shell) {
    widen_any<kNibbles, CodedRowsProduct>(p, shell);
  }

  static __device__ void store(const Params& p, const Work& work, int row, int cols, float (&acc)[Shape::kCols / 2],
                               typename Shape::WarpSlots& slots, NothingHeld& held) {
    if (p.factors != nullptr) {
      const float factor = device::group_factor(nullptr, p.factors, work.group);
#pragma unroll
      for (int i = 0; i < Shape::kCols / 2; ++i) acc[i] *= factor;
    }
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
