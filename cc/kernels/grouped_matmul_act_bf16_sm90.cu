// Up projection with its activation on Hopper, bf16 and fp16: hidden = lhs @ rhs + bias, rounded, and result =
// row_scale * act(hidden), rounded, in one pass. Bits are those of the plain product followed by the activation.
//
//   loader: lhs rows by a ragged map; weights by boxes of 32 columns, first those of the gates, then those of the
//           linear halves, wherever the interleave puts them, or each from an array of its own. Blocks of a low-rank
//           product follow those of K (low_rank.cuh)
//            |  ring of blocks: lhs 128 x 64, weights 64 x (96 + 96)
//            v
//   2 consumer warpgroups in turn: wgmma m64n192k16, fp32 in registers; accumulators i and i + 16 of a thread are gate
//   and linear half of one element (boxes of both alternate)
//            |  a slice of 32 result columns at a time: + bias, one rounding -> hidden; activation of what was rounded,
//            |  * row scale, one rounding -> result; each piece of 16 rows x 32 columns through a slot in shared memory
//            v
//   ragged stores, clipped at the group's last row and at the halves' last column
//
//   tile               accumulators     ring         slots           registers, 128 + 256 threads
//   128 x (96 + 96)    192 per thread   5 x 40 KiB   8 x 3 x 1 KiB   40 / 232
//
// Kinds that are not gated have 192 result columns per tile and no pairs. Where the number of rows per group asks for
// tiles of even height: grouped_matmul_act_bf16_even_sm90.cu.
#include "cc/api/kernel.h"
#include "cc/kernels/grouped_matmul_act_bf16_sm90.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {

namespace sm90 {
void launch_even_up(const GroupedMatmulAct&, const UpParams&, void* stream);
extern template void launch_up_pairs<__nv_bfloat16, Major::k>(const GroupedMatmulAct&, const UpParams&, void*);
extern template void launch_up_pairs<__nv_bfloat16, Major::mn32>(const GroupedMatmulAct&, const UpParams&, void*);
extern template void launch_up_pairs<__half, Major::k>(const GroupedMatmulAct&, const UpParams&, void*);
extern template void launch_up_pairs<__half, Major::mn32>(const GroupedMatmulAct&, const UpParams&, void*);
}  // namespace sm90

namespace {

using namespace sm90;

template <class T>
void launch_types(const GroupedMatmulAct& call, const UpParams& p, void* stream) {
  return call.rhs_axis == 2 ? launch_up_pairs<T, Major::k>(call, p, stream)
                            : launch_up_pairs<T, Major::mn32>(call, p, stream);
}

std::string refuses(const GroupedMatmulAct& c, const Target&) {
  if (!has_plain_operands(c) || has_group_scales(c.scales)) return "takes no scaled operands";
  if (c.quantized.stores()) return "gives plain rows";
  if (std::string reason = refuses_16_bit_lhs(c.lhs.dtype); !reason.empty()) return reason;
  for (const TensorView* t : {&c.rhs, &c.rhs_up, &c.result, &c.hidden}) {
    if (t->present() && t->dtype != c.lhs.dtype) {
      return std::string("takes and gives one type, that of lhs, ") + dtype_name(c.lhs.dtype) + ", not " +
             dtype_name(t->dtype);
    }
  }
  if (std::string reason = refuses_bias(c.bias, c.lhs.dtype); !reason.empty()) return reason;
  return refuses_up(c);
}

size_t workspace(const GroupedMatmulAct&, const Target&) { return sizeof(RowDraws); }

void launch(const GroupedMatmulAct& call, const Context& context) {
  if (call.lhs.dims[0] == 0) return;
  const UpParams p = up_params(call, context);
  if (is_gated(p.activation.kind) && even_tiles_with_activation_sm90(p.rows, p.groups)) {
    return launch_even_up(call, p, context.stream);
  }
  return call.lhs.dtype == DType::bf16 ? launch_types<__nv_bfloat16>(call, p, context.stream)
                                       : launch_types<__half>(call, p, context.stream);
}

}  // namespace

const Kernel<GroupedMatmulAct> grouped_matmul_act_bf16_sm90 = {
    "grouped_matmul_act_bf16_sm90", Arch::sm90, Kind::special, refuses, workspace, launch, kAlignment, nullptr, true};

}  // namespace grouped
