// A product with a low-rank one beside it, where no kernel adds both in its sums: each gives fp32 rows, with bias and
// row scale, and one pass adds and rounds them. Workspace: the rows of both, then what the three need, who share it.
#include <algorithm>
#include <string>

#include "cc/api/operands.h"
#include "cc/dispatch/compose.h"
#include "cc/dispatch/parts.h"

namespace grouped {
namespace {

struct Parts {
  GroupedMatmul base, low;
  AddRows sum;
  size_t taken = 0;
};

Parts parts(const GroupedMatmul& call, void* workspace) {
  Parts p;
  const int64_t rows = call.result.dims[0], width = call.result.dims[1];
  const auto space = [&] {
    TensorView view = matrix_of(DType::f32, rows, width, static_cast<char*>(workspace) + p.taken);
    p.taken += padded_bytes(view);
    return view;
  };
  p.base = call;
  p.base.low = LowRank{};
  p.base.into = TensorView{};
  p.base.result = space();
  p.low.lhs = call.low.low_lhs;
  p.low.rhs = call.low.low_rhs;
  p.low.rhs_table = call.low.low_rhs_table;
  p.low.rhs_axis = call.low.low_rhs_axis;
  p.low.group_sizes = call.group_sizes;
  if (!call.scale_bias) p.low.row_scale = call.row_scale;
  p.low.batch_invariant = call.batch_invariant;
  p.low.aligned_tables = call.aligned_tables;
  p.low.rows_hint = call.rows_hint;
  p.low.fp32_mode = call.fp32_mode;
  p.low.result = space();
  p.sum.rows = p.low.result;
  p.sum.base = p.base.result;
  p.sum.group_sizes = call.group_sizes;
  p.sum.into = call.into;
  p.sum.result = call.result;
  return p;
}

std::string refuses(const GroupedMatmul& call, const Target& target) {
  if (!call.low.present()) return "is for a product with a low-rank one beside it";
  const Parts p = parts(call, nullptr);
  for (const GroupedMatmul* product : {&p.base, &p.low}) {
    const std::string reason = refusal(*product, target);
    if (!reason.empty()) return reason;
  }
  return refusal(p.sum, target);
}

template <bool kAligned>
size_t workspace(const GroupedMatmul& call, const Target& target) {
  const Parts p = parts(call, nullptr);
  return p.taken + std::max({choose(p.base, target, "").bytes(kAligned), choose(p.low, target, "").bytes(kAligned),
                             choose(p.sum, target, "").bytes(kAligned)});
}

void launch(const GroupedMatmul& call, const Context& context) {
  const Parts p = parts(call, context.workspace);
  const Context inner = behind(context, p.taken);
  run_part(p.base, inner);
  run_part(p.low, inner);
  run_part(p.sum, inner);
}

}  // namespace

#define GROUPED_LOW_RANK(name, arch)                                                            \
  const Kernel<GroupedMatmul> name = {#name,  arch, Kind::composed,  refuses, workspace<false>, \
                                      launch, 1,    workspace<true>, true};
GROUPED_LOW_RANK(grouped_matmul_low_composed_cpu, Arch::cpu)
#if GROUPED_WITH_CUDA
GROUPED_LOW_RANK(grouped_matmul_low_composed_cuda, Arch::cuda)
#endif
#undef GROUPED_LOW_RANK

}  // namespace grouped
