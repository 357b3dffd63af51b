// Gradients at the hidden rows on Hopper, of rows of bfloat16 and weights that come as codes, contracted along either
// axis: as grouped_matmul_dact_bf16_sm90.cu has them, with a warpgroup that widens the codes of a stage to the tile
// that is multiplied, as in grouped_matmul_codes_sm90.cu. Bits are those of the same call on widened weights.
//
//   codes     tile        accumulators     ring         sets         registers, 128 + 256 + 128 threads
//   4 bits    128 x 128   128 per thread   4 x 36 KiB   2 x 24 KiB   24 / 224 / 40
//   8 bits    128 x 128   128 per thread   4 x 40 KiB   2 x 24 KiB   24 / 224 / 40
#include "cc/api/kernel.h"
#include "cc/api/product_inside.h"
#include "cc/kernels/grouped_matmul_dact_codes_sm90.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {

namespace sm90 {
extern template void launch_coded_dact<true>(const GroupedMatmulDact&, CodedDactParams, cudaStream_t);
extern template void launch_coded_dact<false>(const GroupedMatmulDact&, CodedDactParams, cudaStream_t);
}  // namespace sm90

namespace {

using namespace sm90;

std::string refuses(const GroupedMatmulDact& c, const Target& target) {
  if (c.quantized.stores() || c.quantized_activated.stores()) return "gives plain rows";
  const std::string coded = refuses_coded(c);
  if (!coded.empty()) return coded;
  for (const TensorView* t : {&c.hidden, &c.result, &c.activated}) {
    if (t->present() && t->dtype != DType::bf16) return "takes and gives bfloat16; there is " + describe(*t);
  }
  if (!c.low.present() && grouped_matmul_weight_only_sm90.refuses(product_inside(c), target).empty()) {
    return "leaves products with few rows per group to grouped_matmul_weight_only_sm90";
  }
  return refuses_dact(c);
}

size_t workspace(const GroupedMatmulDact& c, const Target&) { return dact_workspace(c, DactShape::kCols); }

void launch(const GroupedMatmulDact& call, const Context& context) {
  if (call.lhs.dims[0] == 0) return;
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const CodedDactParams p{dact_params(call, context), {}, floats_or_null(call.scales.rhs_group_scales)};
  return has_nibbles(call) ? launch_coded_dact<true>(call, p, stream) : launch_coded_dact<false>(call, p, stream);
}

}  // namespace

const Kernel<GroupedMatmulDact> grouped_matmul_dact_codes_sm90 = {"grouped_matmul_dact_codes_sm90",
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
