// The up projection with its activation, of weights that come as codes, as grouped_matmul_act_codes_sm90.cu draws it,
// and its launch, which one file for each width of codes instantiates.
#pragma once

#include "cc/device/common/group_factor.cuh"
#include "cc/device/sm90/widen_tiles.cuh"
#include "cc/kernels/grouped_matmul_act_bf16_sm90.cuh"

namespace grouped::sm90 {

struct CodedUpParams : UpParams {
  CodedWeights coded;
  const float* factors;  // [groups]: scales of groups, or null
};

template <bool kNibbles, const TileChoice& kChoice = kNibbles ? kCodedNibblesWithActivation : kCodedBytesWithActivation>
using CodedUpShape = CodedTileShape<kNibbles, kChoice.cols, kChoice.stages, kChoice.slots, kNarrowSlotBytes>;

template <bool kNibbles, Pairs kPairs>
struct CodedUpProduct : UpProduct<__nv_bfloat16, Major::k, kPairs, CodedUpShape<kNibbles>> {
  using Shape = CodedUpShape<kNibbles>;
  using Base = UpProduct<__nv_bfloat16, Major::k, kPairs, Shape>;
  using Params = CodedUpParams;
  static constexpr int kBoxCols = 32;

  // As CodedBoxes has them (widen_tiles.cuh). Two boxes, one of each part, are 64 columns of a tile.
  static __device__ bool from_codes(const Params& p, int block) { return block * kBlockK < p.low.first; }
  static __device__ int coded_cols(int cols) { return 2 * kBoxCols * Base::boxes(cols); }
  static __device__ int coded_column(const Params& p, const Work& work, int col) {
    return p.across * work.col0 + col / kBoxCols * p.weight_part + col % kBoxCols;
  }
  static __device__ int coded_move(const Params& p, int by) { return by / (2 * kBoxCols) * p.step; }

  static __device__ void load_codes(const Params& p, const Work& work, int k, uint32_t to, uint32_t arrived) {
    load_coded<kNibbles>(
        p.coded, work.group, 2 * Base::boxes(p.cols - work.col0), kBoxCols, to, arrived, [&](int) { return k; },
        [&](int box) { return p.across * work.col0 + box / 2 * p.step + box % 2 * p.weight_part; });
  }
  static __device__ void widen(const Params& p, const Shell<Shape> shell) {
    widen_any<kNibbles, CodedUpProduct>(p, shell);
  }

  static __device__ void store(const Params& p, const Work& work, int row, int cols, float (&acc)[kTileCols / 2],
                               typename Base::WarpSlots& slots, NothingHeld& held) {
    if (p.factors != nullptr) device::scale_sums(acc, device::group_factor(nullptr, p.factors, work.group));
    Base::store(p, work, row, cols, acc, slots, held);
  }
};

template <class Product>
void launch_coded_pairs(const GroupedMatmulAct& call, const CodedUpParams& p, void* stream) {
  launch_up_product<Product>(coded_product_sm90<Product>, call, p, kCodedThreads, stream);
}

// By how gates and linear halves lie.
template <bool kNibbles>
void launch_coded_up(const GroupedMatmulAct& call, CodedUpParams p, void* stream) {
  p.coded = coded_weights(call, CodedUpProduct<kNibbles, Pairs::none>::kBoxCols);
  if (!is_gated(p.activation.kind)) return launch_coded_pairs<CodedUpProduct<kNibbles, Pairs::none>>(call, p, stream);
  return call.activation.interleave == 1 ? launch_coded_pairs<CodedUpProduct<kNibbles, Pairs::columns>>(call, p, stream)
                                         : launch_coded_pairs<CodedUpProduct<kNibbles, Pairs::blocks>>(call, p, stream);
}

}  // namespace grouped::sm90
