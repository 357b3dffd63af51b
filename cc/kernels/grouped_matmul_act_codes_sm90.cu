// Up projection with its activation on Hopper, of rows of bfloat16 and weights [G, W, K] that come as codes: the
// products of grouped_matmul_codes_sm90.cu with the epilogue of grouped_matmul_act_bf16_sm90.cu. Bits are those of the
// same call on widened weights.
//
//   loader: codes by boxes of 64 or 32 columns x 64 k, of gates and of linear halves
//   4 bits: a lane has a gate and the linear value of the same result, for two rows in eight; pieces of 32 rows by 32
//           columns leave through slots that four warps share, two sets of three or, of kinds without a linear half,
//           one of four
//
//   codes     tile               accumulators     ring         slots           registers by warpgroup
//   4 bits    256 x (64 + 64)    128 per thread   4 x 50 KiB   8 x 3 x 1 KiB   40 / 232, 232
//   8 bits    128 x (96 + 96)    192 per thread   4 x 52 KiB   8 x 2 x 1 KiB   24 / 224, 224 / 40
#include "cc/api/kernel.h"
#include "cc/api/product_inside.h"
#include "cc/kernels/grouped_matmul_act_codes_sm90.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {

namespace sm90 {
extern template void launch_coded_up<true>(const GroupedMatmulAct&, CodedUpParams, void*);
extern template void launch_coded_up<false>(const GroupedMatmulAct&, CodedUpParams, void*);
}  // namespace sm90

namespace {

using namespace sm90;

std::string refuses(const GroupedMatmulAct& c, const Target& target) {
  if (c.quantized.stores()) return "gives plain rows";
  if (c.rhs_up.present()) return "takes weights in one array";
  const std::string coded = refuses_coded(c);
  if (!coded.empty()) return coded;
  if (c.rhs_axis != 2) return "takes weights stored [G, N, K]";
  if (c.scales.rhs_block_outer != 1) return "takes blocks of one line";
  for (const TensorView* t : {&c.result, &c.hidden}) {
    if (t->present() && t->dtype != DType::bf16) return std::string("gives bfloat16, not ") + dtype_name(t->dtype);
  }
  if (std::string reason = refuses_bias(c.bias, DType::bf16); !reason.empty()) return reason;
  if (!c.low.present() && grouped_matmul_weight_only_sm90.refuses(product_inside(c), target).empty()) {
    return "leaves products with few rows per group to grouped_matmul_weight_only_sm90";
  }
  return refuses_up(c);
}

size_t workspace(const GroupedMatmulAct&, const Target&) { return sizeof(RowDraws); }

void launch(const GroupedMatmulAct& call, const Context& context) {
  if (call.lhs.dims[0] == 0) return;
  CodedUpParams p{up_params(call, context), {}, floats_or_null(call.scales.rhs_group_scales)};
  return has_nibbles(call) ? launch_coded_up<true>(call, p, context.stream)
                           : launch_coded_up<false>(call, p, context.stream);
}

}  // namespace

const Kernel<GroupedMatmulAct> grouped_matmul_act_codes_sm90 = {"grouped_matmul_act_codes_sm90",
                                                                Arch::sm90,
                                                                Kind::special,
                                                                refuses,
                                                                workspace,
                                                                launch,
                                                                kAlignment,
                                                                nullptr,
                                                                true,
                                                                true};

}  // namespace grouped
