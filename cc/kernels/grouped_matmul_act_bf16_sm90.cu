// Up projection with its activation on Hopper, bf16 and fp16: hidden = lhs @ rhs + bias, rounded, and result =
// row_scale * act(hidden), rounded, in one pass. Bits are those of the plain product followed by the activation.
//
//   loader: lhs rows by a ragged map; weights by boxes of 32 columns, first those of the gates, then those of the
//           linear halves, wherever the interleave puts them, or each from an array of its own. Blocks of a low-rank
//           product follow those of K (low_rank.cuh)
//            |  ring of blocks: lhs 128 x 64, weights 64 x (96 + 96)
//            v
//   2 consumer warpgroups in turn: wgmma m64n192k16, fp32 in registers; accumulators i and i + 16 of a thread are gate
//   and linear half of one element (boxes of both lie by turns)
//            |  a slice of 32 result columns at a time: + bias, one rounding -> hidden; activation of what was rounded,
//            |  * row scale, one rounding -> result; each piece of 16 rows x 32 columns through a slot in shared memory
//            v
//   ragged stores, clipped at the group's last row and at the halves' last column
//
//   tile               accumulators   ring         slots           registers, 128 + 256 threads
//   128 x (96 + 96)    192 a thread   5 x 40 KiB   8 x 3 x 1 KiB   40 / 232
//
// Kinds that are not gated have 192 result columns a tile and no pairs.
#include "cc/api/kernel.h"
#include "cc/kernels/grouped_matmul_act_bf16_sm90.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {

namespace sm90 {
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
  if (c.stored.stores()) return "gives plain rows";
  if (std::string reason = refuses_16_bit_lhs(c.lhs.dtype); !reason.empty()) return reason;
  for (const TensorView* t : {&c.rhs, &c.rhs_up, &c.result, &c.hidden}) {
    if (t->present() && t->dtype != c.lhs.dtype) {
      return std::string("takes and gives one type, that of lhs, ") + dtype_name(c.lhs.dtype) + ", not " +
             dtype_name(t->dtype);
    }
  }
  if (std::string reason = refuses_bias(c.bias, c.lhs.dtype); !reason.empty()) return reason;
  ActivationKind kind{};
  if (!activation_named(c.activation.kind, &kind)) return "knows no activation " + c.activation.kind;
  const int64_t m = c.lhs.dims[0], k = c.lhs.dims[1], f = c.result.dims[1], s = c.activation.interleave;
  if (is_gated(kind) && s != 0 && s != f && s != kSliceCols && s != 1) {
    return "takes an interleave of 0, 1 or 32, not " + std::to_string(s);
  }
  return first_of({refuses_low(c.low, c.lhs.dtype, c.rhs_axis), refuses_extents(m, {2 * f, k}),
                   refuses_16_bytes({{"K", k, 8}, {"F", f, 8}}), refuses_row_tiles(m, c.group_sizes.dims[0], f, 64)});
}

size_t workspace(const GroupedMatmulAct&, const Target&) { return sizeof(unsigned long long); }

void launch(const GroupedMatmulAct& call, const Context& context) {
  if (call.lhs.dims[0] == 0) return;
  UpParams p{};
  set_rows(call, context.workspace, context.stream, &p);
  set_bias(call, &p);
  p.cols = int32_t(call.result.dims[1]);
  p.length = int32_t(call.lhs.dims[1]);
  p.clear_tail = call.zero_tail != 0;
  p.result = call.result.as<uint8_t>();
  p.hidden_rows = call.hidden.present() ? call.hidden.as<uint8_t>() : nullptr;
  p.activation = activation_spec(call.activation);
  const bool gated = is_gated(p.activation.kind);
  const bool apart = gated && (call.activation.interleave == 0 || call.activation.interleave == p.cols);
  p.width = gated ? 2 * p.cols : p.cols;
  p.across = gated && !apart ? 2 : 1;
  p.step = apart ? kSliceCols : 2 * kSliceCols;
  p.part = apart ? p.cols : kSliceCols;
  p.weight_part = call.rhs_up.present() ? 0 : p.part;
  p.hidden_part = apart ? 0 : p.part;
  return call.lhs.dtype == DType::bf16 ? launch_types<__nv_bfloat16>(call, p, context.stream)
                                       : launch_types<__half>(call, p, context.stream);
}

}  // namespace

const Kernel<GroupedMatmulAct> grouped_matmul_act_bf16_sm90 = {
    "grouped_matmul_act_bf16_sm90", Arch::sm90, Kind::special, refuses, workspace, launch, kAlignment, nullptr, true};

}  // namespace grouped
