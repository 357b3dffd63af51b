// Rows of bfloat16 against weights that come as codes (MXFP4, NVFP4, MXFP8, E4M3) on Hopper: forward and dgrad of
// frozen quantised weights, for any number of rows. The codes, [G, lines, line], are contracted along either axis.
// Nothing of the size of the weights is written: a tile is widened in shared memory, by a warpgroup of its own, for
// every 128 rows that it meets. Bits are those of grouped_matmul_bf16_sm90 on widened weights.
//
//   scheduler, mailbox, work rings: as in grouped_matmul_bf16_sm90.cu
//   loader: lhs rows by a ragged map, codes by boxes of 64 columns x 64 k, each CTA its own. Blocks of a low-rank
//           product, which are numbers, follow those of K and go straight to the tile (low_rank.cuh)
//            |  ring of blocks: lhs 128 x 64, weights 64 x 192 as bf16, codes 64 x 192
//            v
//   widening warpgroup: codes, and their scales from the first cache -> bf16 tile of the same stage (widen_tiles.cuh)
//            |
//            v
//   2 consumer warpgroups in turn: wgmma m64n192k16, fp32 in registers
//            |  * scale of the group, + bias, * row scale, one rounding; slots of 16 rows in shared memory
//            v
//   ragged store, clipped at the group's last row
//
//   codes     tile        accumulators   ring         slots           registers, 128 + 256 + 128 threads
//   4 bits    128 x 192   192 a thread   4 x 46 KiB   8 x 2 x 2 KiB   24 / 224 / 40
//   8 bits    128 x 192   192 a thread   4 x 52 KiB   8 x 1 x 2 KiB   24 / 224 / 40
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

size_t workspace(const GroupedMatmul&, const Target&) { return sizeof(unsigned long long); }

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
