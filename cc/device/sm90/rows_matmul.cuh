// The product over grouped rows whose result is stored as it is, for the kernels that differ in what their weights are.
#pragma once

#include "cc/device/sm90/low_rank.cuh"
#include "cc/device/sm90/product_launch.cuh"

namespace grouped::sm90 {

struct HalvesParams : MatmulParams {
  CUtensorMap rhs_up;   // of a second array of weights, whose k follow those of the first
  int32_t first_depth;  // k of the first, a multiple of kBlockK where there is a second; else all
  LowMaps low;          // beside weights in one array
};

// All maps but `out`, with weights in boxes of Rhs; a low-rank product adds to `length`.
template <class Rhs>
void map_halves(const GroupedMatmul& call, HalvesParams* p) {
  map_operands<Rhs>(call, p);
  p->first_depth = int32_t(call.rhs.dims[call.rhs_axis]);
  p->low = low_maps(call.low, p->groups, Rhs::kBoxCols, Rhs::kBoxRows, &p->length);
  p->paced = keeps_pace(p->length);
  if (call.rhs_up.present()) p->rhs_up = map_of_weights<Rhs>(call.rhs_up, call.rhs_up.data, false);
}

template <class T, class Out, Major kWeights, class Shape_>
struct RowsProduct {
  using Params = HalvesParams;
  using Element = T;
  using Shape = Shape_;
  static constexpr Major kLhsMajor = Major::k, kRhsMajor = kWeights;
  static constexpr bool kRaggedSums = false, kShortEnd = true, kOneStore = false;
  using Rhs = RhsTile<kRhsMajor, Shape::kTileCols>;
  static constexpr int kEdgeCols = 128;  // multiplied where no more exist: 192 rarely divides a width
  static __device__ uint32_t rhs_bytes(int) { return Rhs::kBytes; }
  template <class Multiply>
  static __device__ void multiply_cols(int cols, Multiply multiply) {
    if constexpr (Shape::kCols <= kEdgeCols) {
      multiply(std::integral_constant<int, Shape::kCols>{});
    } else if (cols > kEdgeCols) {
      multiply(std::integral_constant<int, Shape::kCols>{});
    } else {
      multiply(std::integral_constant<int, kEdgeCols>{});
    }
  }

  template <class Push>
  static __device__ void schedule(const Params& p, uint32_t rank, uint32_t mail, uint32_t, Push push) {
    schedule_rows(p, Shape::kTileCols, rank, mail, push);
  }

  static __device__ void load(const Params& p, const Work& work, int k, int boxes, bool columns, uint32_t rank,
                              uint32_t to, uint32_t full) {
    const FromLow part(p.low, work, k);
    load_lhs<1>(part.low ? &p.low.lhs : &p.lhs, ragged_at(work, part.at, 0), boxes, work.across, rank, to, full);
    if (columns) load_rhs(p, work, part, rank, to + 2 * kBlockBytes, full);
  }
  static __device__ void load_rhs(const Params& p, const Work& work, const FromLow& part, uint32_t rank, uint32_t to,
                                  uint32_t full) {
    const OneOfTwo from = part.low ? OneOfTwo{false, part.at} : one_of_two(part.at, p.first_depth);
    const int32_t c0 = kRhsMajor == Major::k ? from.at : work.col0, c1 = kRhsMajor == Major::k ? work.col0 : from.at;
    Rhs::load(part.low      ? &p.low.rhs
              : from.second ? &p.rhs_up
                            : &p.rhs,
              {{c0, c1, part.slice.near, part.slice.far}}, work.across, rank, to, full);
  }

  using Epilogue = NothingHeld;
  static __device__ Epilogue begin(const Params&, const Work&, int, int, const Slots<Shape::kSlots>&) { return {}; }

  static __device__ void store(const Params& p, const Work& work, int row, int cols, float (&acc)[Shape::kCols / 2],
                               Slots<Shape::kSlots>& slots, Epilogue& held) {
    finish_and_store<device::BiasOf<T>, Out, Shape::kCols>(p, work, row, cols, acc, slots, held, [](float (&)[4]) {});
  }

  static __device__ void clear_tail(const Params& p, const Work& work, uint32_t rank, int thread) {
    clear_result<Out>(p, work, rank, thread);
  }
};

}  // namespace grouped::sm90
