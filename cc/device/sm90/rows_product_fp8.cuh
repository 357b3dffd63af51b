// What products of 8-bit rows and weights share, whether their partial sums go to fp32 or not: operands, epilogue and
// refusals. Codes are K-major in both operands.
#pragma once

#include <string>
#include <type_traits>

#include "cc/api/calls.h"
#include "cc/api/kernel.h"
#include "cc/device/sm90/operands_fp8.cuh"
#include "cc/device/sm90/product_launch.cuh"

namespace grouped::sm90 {

struct Fp8RowsParams : MatmulParams {  // `length` is that of a row in 16-bit elements
  const float* lhs_group_scales;       // [groups], or null
  const float* rhs_group_scales;       // likewise
  const float* lhs_scales;             // [blocks, rows], or null
  const float* rhs_scales;             // [groups, column blocks, blocks], or null
  bool scaled;                         // by block
};

// Results are as wide as what a product makes of them, so their tails are cleared without `first_col` and `width`.
template <class Out>
__device__ inline void clear_whole_rows(const Fp8RowsParams& p, const Work& work, uint32_t rank, int thread) {
  const int64_t bytes = int64_t(p.cols) * sizeof(Out);
  clear_rows(p, work, rank, thread, p.result, bytes, bytes);
}

template <class Pair, class Out, class Shape_>
struct Fp8Rows {
  using Params = Fp8RowsParams;
  using Element = Pair;
  using Shape = Shape_;
  using Result = Out;
  static constexpr Major kLhsMajor = Major::k, kRhsMajor = Major::k;
  static constexpr bool kRaggedSums = false, kShortEnd = false, kOneStore = false;
  using Rhs = RhsTile<kRhsMajor, Shape::kCols>;
  static __device__ uint32_t rhs_bytes(int) { return Rhs::kBytes; }
  template <class Multiply>
  static __device__ void multiply_cols(int cols, Multiply multiply) {
    fp8_tile_cols<Shape::kCols>(cols, multiply);
  }

  template <class Push>
  static __device__ void schedule(const Params& p, uint32_t rank, uint32_t mail, uint32_t, Push push) {
    schedule_rows(p, Shape::kCols, rank, mail, push);
  }

  static __device__ void load(const Params& p, const Work& work, int k, int boxes, bool columns, uint32_t rank,
                              uint32_t to, uint32_t full) {
    const int32_t code = kCodesPerElement * k;
    load_lhs<1>(&p.lhs, ragged_at(work, code, 0), boxes, work.across, rank, to, full);
    if (!columns) return;
    Rhs::load(&p.rhs, {{code, work.col0, work.slice2, work.slice3}}, work.across, rank, to + 2 * kBlockBytes, full);
  }

  struct Epilogue : NothingHeld {
    Alpha group;  // fetched while a tile multiplies
    __device__ void start(const Slots<Shape::kSlots>&) const {}
  };
  static __device__ Epilogue begin(const Params& p, const Work& work, int, int, const Slots<Shape::kSlots>&) {
    return {{}, Alpha(p.lhs_group_scales, p.rhs_group_scales, work.group)};
  }

  template <int kSums>
  static __device__ void store(const Params& p, const Work& work, int row, int cols, float (&acc)[kSums],
                               Slots<Shape::kSlots>& slots, Epilogue& held) {
    using Bias = device::BiasOf<std::conditional_t<sizeof(Out) == 2, Out, __nv_bfloat16>>;
    if (p.bias == nullptr && p.bias_table == nullptr && p.row_scale == nullptr) {  // no questions for every column
      store_part<Out, Shape::kCols>(acc, &p.out, ragged_at(work, work.col0, row), cols, slots, held, held.group);
    } else {
      finish_and_store<Bias, Out, Shape::kCols>(p, work, row, cols, acc, slots, held,
                                                [&](float (&v)[4]) { held.group(0, v); });
    }
  }

  static __device__ void clear_tail(const Params& p, const Work& work, uint32_t rank, int thread) {
    clear_whole_rows<Out>(p, work, rank, thread);
  }
};

// For weights that are contracted along their lines (axis 2), or across them (1).
inline std::string refuses_fp8_rows(const GroupedMatmul& c, const Target&, int64_t rhs_axis = 2) {
  if (c.contract_rows) return "is for ragged rows; this call contracts over rows";
  if (!is_fp8(c.lhs.dtype) || !is_fp8(c.rhs.dtype)) {
    return std::string("takes float8_e4m3fn and float8_e5m2; lhs is ") + dtype_name(c.lhs.dtype) + ", rhs " +
           dtype_name(c.rhs.dtype);
  }
  const OperandScales& s = c.scales;
  if (!s.lhs_scales.present() && !s.rhs_scales.present() && !s.lhs_group_scales.present() &&
      !s.rhs_group_scales.present()) {
    return "is for operands with scales: those without are multiplied exactly";
  }
  if (c.rhs_axis != rhs_axis) {
    return rhs_axis == 2 ? "takes weights stored as [G, N, K], their contracted axis last"
                         : "takes weights stored as [G, K, N], their contracted axis first";
  }
  const DType out = c.result.dtype;
  if (out != DType::bf16 && out != DType::f16 && out != DType::f32) {
    return std::string("gives bfloat16, float16 or float32, not ") + dtype_name(out);
  }
  if (std::string reason = refuses_bias(c.bias, out == DType::f32 ? DType::bf16 : out); !reason.empty()) return reason;
  if (c.accumulate) return "does not accumulate into ragged rows";
  const int64_t m = c.lhs.dims[0], k = c.lhs.dims[1], n = c.result.dims[1];
  return first_of({refuses_extents(m, {n, k}), refuses_16_bytes({{"K", k, 16}, {"N", n, 8}}),
                   refuses_row_tiles(m, c.group_sizes.dims[0], n, 128)});
}

inline size_t fp8_rows_workspace(const GroupedMatmul&, const Target&) { return sizeof(RowDraws); }

// Calls launch(product, params) for the types of a call, with Product_<types of the operands, type of the result>. The
// map of the weights is left to it.
template <template <class, class> class Product_, class Launch>
void launch_fp8_rows(const GroupedMatmul& call, const Context& context, Launch launch) {
  if (call.lhs.dims[0] == 0) return;
  with_fp8_types(call, [&](auto pair, auto out) {
    using Product = Product_<decltype(pair), decltype(out)>;
    Fp8RowsParams p{};
    set_matmul(call, context, &p);
    set_scales(call.scales, &p);
    p.length = int32_t(call.lhs.dims[1] / kCodesPerElement);
    p.paced = keeps_pace(p.length);
    p.lhs = map_of_rows(call.lhs);
    map_result(call, &p);
    launch(Product{}, p);
  });
}

}  // namespace grouped::sm90
