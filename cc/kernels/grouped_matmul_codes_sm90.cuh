// The product of plain rows and weights that come as codes, as grouped_matmul_codes_sm90.cu draws it, and its launch,
// which one file for each width of codes instantiates.
#pragma once

#include "cc/api/calls.h"
#include "cc/device/common/group_factor.cuh"
#include "cc/device/sm90/rows_matmul.cuh"
#include "cc/device/sm90/swapped_epilogue.cuh"
#include "cc/device/sm90/widen_tiles.cuh"
#include "cc/dispatch/tiles_sm90.h"

namespace grouped::sm90 {

struct CodedRowsParams : HalvesParams {
  CodedWeights coded;
  const float* factors;  // [groups]: scales of groups, or null
};
// Not bound by memory.
__device__ inline NoPace pace_of(const CodedRowsParams&, uint32_t) { return {}; }

using ByteTile = CodedTileShape<false, kCodedBytes.cols, kCodedBytes.stages, kCodedBytes.slots>;

// Codes of 8 bits, which are widened in shared memory.
template <class Out, Major kWeights>
struct ByteRowsProduct : RowsProduct<__nv_bfloat16, Out, kWeights, ByteTile>,
                         CodedBoxes<false, kWeights, ByteTile::kCols> {
  using Shape = ByteTile;
  using Base = RowsProduct<__nv_bfloat16, Out, kWeights, Shape>;
  using Params = CodedRowsParams;
  static constexpr int kRowsBox = 64, kLinesBox = kCodedBox;  // rows of boxes
  static constexpr bool kShortEnd = false;                    // more code would spill

  static __device__ void widen(const Params& p, const Shell<Shape> shell) {
    widen_any<false, ByteRowsProduct>(p, shell);
  }

  static __device__ void store(const Params& p, const Work& work, int row, int cols, float (&acc)[Shape::kCols / 2],
                               typename Shape::WarpSlots& slots, NothingHeld& held) {
    if (p.factors != nullptr) device::scale_sums(acc, device::group_factor(nullptr, p.factors, work.group));
    Base::store(p, work, row, cols, acc, slots, held);
  }
};

using NibbleTile = SwappedShape<kSwapped.stages, kSwapped.slots>;
static_assert(NibbleTile::kCols == kSwapped.cols);

// Codes of 4 bits, which are widened in registers.
template <class Out, Major kWeights>
struct NibbleRowsProduct : RowsProduct<__nv_bfloat16, Out, kWeights, NibbleTile>,
                           CodedBoxes<true, kWeights, NibbleTile::kCols> {
  using Shape = NibbleTile;
  using Params = CodedRowsParams;
  static constexpr ColumnOrder kOrder = ColumnOrder::neighbours;
  static constexpr int kRowsBox = kSwappedRowsBox, kLinesBox = kWeights == Major::k ? Shape::kCols : kBlockK;

  // Where the codes of a tile are, but for k: boxes of 64 codes by 128 lines, or two of 64 lines.
  struct CodesAt {
    static constexpr int kBoxes = kWeights == Major::k ? 1 : 2, kBoxBytes = Shape::kCodesBytes / kBoxes;
    int group, col;
    __device__ CodesAt(const Params&, const Work& work) : group(work.group), col(work.col0) {}
    __device__ void load(const Params& p, int k, uint32_t to, uint32_t full) const {
#pragma unroll
      for (int i = 0; i < kBoxes; ++i) {
        const int code = kWeights == Major::k ? k : col + i * kCodedBox, line = kWeights == Major::k ? col : k;
        ptx::tensor_load(to + i * kBoxBytes, &p.coded.map, {{code / 2, line, group, 0}}, full);
      }
    }
  };

  template <class Push>
  static __device__ void schedule(const Params& p, uint32_t rank, uint32_t mail, uint32_t, Push push) {
    schedule_rows<two_columns_at, kSwappedRows>(p, Shape::kCols, rank, mail, push);
  }

  // Of the tile's columns from the first of a warpgroup on.
  static __device__ int columns_left(const Params& p, const Work& work, int consumer) {
    return p.cols - work.col0 - consumer * kSwappedCols;
  }

  static __device__ auto slots(const Shell<Shape>& shell, int warp) {
    return typename SwappedOut<NibbleTile, Out, kWeights>::Slots(shell.slots(0).base, warp);
  }
  template <class Slots_>
  static __device__ void store_swapped(const Params& p, const Work& work, int warp, float (&acc)[kSwappedRows / 2],
                                       Slots_& slots) {
    if (p.factors != nullptr) device::scale_sums(acc, device::group_factor(nullptr, p.factors, work.group));
    store_swapped_tile<NibbleRowsProduct, device::BiasOf<__nv_bfloat16>, Out>(p, work, warp, acc, slots);
  }
};

template <bool kNibbles, class Out, Major kWeights>
void launch_coded_major(const GroupedMatmul& call, CodedRowsParams p, void* stream) {
  using Product = std::conditional_t<kNibbles, NibbleRowsProduct<Out, kWeights>, ByteRowsProduct<Out, kWeights>>;
  using Rhs = typename Product::Rhs;
  p.coded = coded_weights(call, Product::kLinesBox);
  p.lhs = map_of_rows(call.lhs, Product::kRowsBox);
  p.low = low_maps(call.low, p.groups, Rhs::kBoxCols, Rhs::kBoxRows, &p.length, Product::kRowsBox);
  if constexpr (kNibbles) {
    map_result(call, &p, SwappedOut<NibbleTile, Out, kWeights>::kCols, SwappedOut<NibbleTile, Out, kWeights>::kRows);
    launch_rows_product<Product>(swapped_product_sm90<Product>, p, stream);
  } else {
    map_result(call, &p);
    launch_rows_product<Product>(coded_product_sm90<Product>, p, stream, kCodedThreads);
  }
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
