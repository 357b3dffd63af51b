// A product with a low-rank one beside it, where no kernel adds both in its sums: each gives fp32 rows, with bias and
// row scale, and one pass adds and rounds them. Workspace: the rows of both, then memory that the three share.
// And the gradients of a low-rank product, where no kernel makes them in one pass: two products that share their
// workspace.
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
  p.low = product_for(call);
  p.low.lhs = call.low.low_lhs;
  p.low.rhs = call.low.low_rhs;
  p.low.rhs_table = call.low.low_rhs_table;
  p.low.rhs_axis = call.low.low_rhs_axis;
  if (!call.scale_bias) p.low.row_scale = call.row_scale;
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

struct Grads {
  GroupedMatmul of_rows, of_factor;
};

Grads grads(const LowRankGrads& call) {
  Grads g = {product_for(call), product_for(call)};
  g.of_rows.lhs = call.rows;
  g.of_rows.rhs = call.factor;
  g.of_rows.rhs_table = call.factor_table;
  g.of_rows.rhs_axis = call.factor_axis;
  g.of_rows.result = call.rows_grad;
  const bool is_first = call.factor_axis == 1;
  g.of_factor.lhs = is_first ? call.rows : call.low_rows;
  g.of_factor.rhs = is_first ? call.low_rows : call.rows;
  g.of_factor.contract_rows = 1;
  g.of_factor.rhs_axis = 0;
  g.of_factor.result = call.factor_grad;
  return g;
}

std::string refuses_grads(const LowRankGrads& call, const Target& target) {
  const Grads g = grads(call);
  return first_of({refusal(g.of_rows, target), refusal(g.of_factor, target)});
}

template <bool kAligned>
size_t grads_workspace(const LowRankGrads& call, const Target& target) {
  const Grads g = grads(call);
  return std::max(choose(g.of_rows, target, "").bytes(kAligned), choose(g.of_factor, target, "").bytes(kAligned));
}

void launch_grads(const LowRankGrads& call, const Context& context) {
  const Grads g = grads(call);
  const Context inner = behind(context, 0);
  run_part(g.of_rows, inner);
  run_part(g.of_factor, inner);
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

#define GROUPED_LOW_RANK_GRADS(name, arch)                                                                            \
  const Kernel<LowRankGrads> name = {#name,        arch, Kind::composed,       refuses_grads, grads_workspace<false>, \
                                     launch_grads, 1,    grads_workspace<true>};
GROUPED_LOW_RANK_GRADS(low_rank_grads_composed_cpu, Arch::cpu)
#if GROUPED_WITH_CUDA
GROUPED_LOW_RANK_GRADS(low_rank_grads_composed_cuda, Arch::cuda)
#endif
#undef GROUPED_LOW_RANK_GRADS

}  // namespace grouped
