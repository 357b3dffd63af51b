// Rows of bfloat16 against weights that come as codes (MXFP4, NVFP4, MXFP8, E4M3) on Hopper: forward and dgrad of
// frozen quantised weights, for any number of rows. The codes, [G, lines, line], are contracted along either axis.
// Nothing of the size of the weights is written. Bits are those of grouped_matmul_bf16_sm90 on widened weights, with
// NVFP4 as long as sums times 2^-8 are float32 numbers that are neither subnormal nor infinite.
//
// Codes of 4 bits are widened in registers, once for 256 rows: weights are the operand of wgmma that comes from there
// (operands swapped, pipeline_swapped.cuh).
//
//   loader: rows by boxes of 128 x 64 k, multicast to the pair; codes of 128 columns x 64 k, each CTA its own. Blocks
//           of a low-rank product, whose weights are bf16 values, follow those of K and take the place of codes
//   2 warps: scales -> factors, pairs of bfloat16
//            |  ring of blocks: rows 256 x 64, codes or low-rank weights 128 x 64, factors
//            v
//   2 consumer warpgroups of 64 columns each: codes * factors -> fragments; wgmma m64n256k16, fp32 in registers
//            |  * scale of the group, + bias, * row scale, one rounding; transposed into slots in shared memory
//            v
//   ragged store, clipped at the group's last row
//
// Codes of 8 bits are widened in shared memory, once for every 128 rows, by a warpgroup of its own (widen_tiles.cuh).
// The rest is grouped_matmul_bf16_sm90: 2 consumer warpgroups in turn, wgmma m64n192k16.
//
//   codes     tile        accumulators     ring         slots           registers by warpgroup
//   4 bits    256 x 128   128 per thread   4 x 50 KiB   8 x 3 x 1 KiB   40 / 232, 232
//   8 bits    128 x 192   192 per thread   4 x 52 KiB   8 x 1 x 2 KiB   24 / 224, 224 / 40
#include "cc/api/kernel.h"
#include "cc/kernels/grouped_matmul_codes_sm90.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {

namespace sm90 {
extern template void launch_coded<true>(const GroupedMatmul&, const CodedRowsParams&, void*);
extern template void launch_coded<false>(const GroupedMatmul&, const CodedRowsParams&, void*);
}  // namespace sm90

namespace {

using namespace sm90;

std::string refuses(const GroupedMatmul& c, const Target&) {
  if (c.contract_rows) return "is for ragged rows; this call contracts over rows";
  if (c.rhs_up.present() || c.result_half) return "takes weights and results of one array each";
  const std::string coded = refuses_coded(c);
  if (!coded.empty()) return coded;
  if (c.result.dtype != DType::bf16 && c.result.dtype != DType::f32) {
    return std::string("gives bfloat16 or float32, not ") + dtype_name(c.result.dtype);
  }
  if (std::string reason = refuses_bias(c.bias, DType::bf16); !reason.empty()) return reason;
  if (c.accumulate) return "does not accumulate into ragged rows";
  const int64_t m = c.lhs.dims[0], k = c.lhs.dims[1], n = c.result.dims[1];
  return first_of({refuses_extents(m, {n, k}), refuses_16_bytes({{"K", k, 8}, {"N", n, 8}}),
                   refuses_row_tiles(m, c.group_sizes.dims[0], n, 128)});
}

size_t workspace(const GroupedMatmul&, const Target&) { return sizeof(RowDraws); }

void launch(const GroupedMatmul& call, const Context& context) {
  if (call.lhs.dims[0] == 0) return;
  CodedRowsParams p{};
  set_matmul(call, context, &p);
  p.factors = floats_or_null(call.scales.rhs_group_scales);
  p.length = p.first_depth = static_cast<int32_t>(call.lhs.dims[1]);
  return has_nibbles(call) ? launch_coded<true>(call, p, context.stream) : launch_coded<false>(call, p, context.stream);
}

}  // namespace

const Kernel<GroupedMatmul> grouped_matmul_codes_sm90 = {"grouped_matmul_codes_sm90",
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
