// A grouped product and an activation, one after the other through dispatch. Workspace: the matrix between the two
// where the caller does not ask for it, rounded to its compute type, then memory that the two share. A weight in
// two arrays makes two products, each of which writes its half of that matrix.
#include "cc/dispatch/compose.h"

#include <algorithm>
#include <string>
#include <vector>

#include "cc/api/operands.h"
#include "cc/api/product_inside.h"
#include "cc/dispatch/columns.h"
#include "cc/dispatch/parts.h"

namespace grouped {
namespace {

// A fused call as its parts. `between` is what the products write and the activation reads; without an address it is at
// the start of the workspace.
template <class Activation>
struct Parts {
  std::vector<GroupedMatmul> products;
  Activation activation;
  TensorView between;
};

template <class Call>
GroupedMatmul product_of(const Call& call, const TensorView& result) {
  GroupedMatmul product = product_for(call);
  product.lhs = call.lhs;
  product.rhs = call.rhs;
  product.rhs_table = call.rhs_table;
  product.rhs_axis = call.rhs_axis;
  product.scales = call.scales;
  product.low = call.low;
  product.result = result;
  return product;
}

bool in_workspace(const GroupedMatmulAct& call) { return !call.hidden.present(); }
bool in_workspace(const GroupedMatmulDact&) { return true; }

Parts<ActivationForward> parts(const GroupedMatmulAct& call, void* workspace) {
  Parts<ActivationForward> p;
  const int64_t width = product_columns(call);
  p.between = in_workspace(call) ? matrix_of(compute_type(call), call.lhs.dims[0], width, workspace) : call.hidden;
  GroupedMatmul product = product_of(call, p.between);
  product.bias = call.bias;
  product.bias_table = call.bias_table;
  if (call.rhs_up.present()) {
    product.result_half = 1;
    p.products.push_back(product);
    product.rhs = call.rhs_up;
    product.result_half = 2;
  }
  p.products.push_back(product);
  p.activation.rows = p.between;
  p.activation.group_sizes = call.group_sizes;
  p.activation.row_scale = call.row_scale;
  p.activation.result = call.result;
  p.activation.activation = call.activation;
  p.activation.zero_tail = call.zero_tail;
  return p;
}

Parts<ActivationGrad> parts(const GroupedMatmulDact& call, void* workspace) {
  Parts<ActivationGrad> p;
  p.between = matrix_of(compute_type(call), call.lhs.dims[0], product_columns(call), workspace);
  p.products = {product_of(call, p.between)};
  p.activation.grad = p.between;
  p.activation.rows = call.hidden;
  p.activation.group_sizes = call.group_sizes;
  p.activation.row_scale = call.row_scale;
  p.activation.row_base = call.row_base;
  p.activation.result = call.result;
  p.activation.activated = call.activated;
  p.activation.row_sum = call.row_sum;
  p.activation.activation = call.activation;
  p.activation.zero_tail = call.zero_tail;
  return p;
}

template <class Call>
std::string refuses(const Call& call, const Target& target) {
  if (call.quantized.stores()) return "gives plain rows";
  const auto p = parts(call, nullptr);
  for (const GroupedMatmul& product : p.products) {
    const std::string reason = refusal(product, target);
    if (!reason.empty()) return reason;
  }
  return refusal(p.activation, target);
}

template <class Call, bool kAligned>
size_t workspace(const Call& call, const Target& target) {
  const auto p = parts(call, nullptr);
  size_t inner = choose(p.activation, target, "").bytes(kAligned);
  for (const GroupedMatmul& product : p.products) {
    inner = std::max(inner, choose(product, target, "").bytes(kAligned));
  }
  return (in_workspace(call) ? padded_bytes(p.between) : 0) + inner;
}

template <class Call>
void launch(const Call& call, const Context& context) {
  const auto p = parts(call, context.workspace);
  const Context inner = behind(context, in_workspace(call) ? padded_bytes(p.between) : 0);
  for (const GroupedMatmul& product : p.products) run_part(product, inner);
  run_part(p.activation, inner);
}

}  // namespace

GroupedMatmul product_inside(const GroupedMatmulAct& call) { return parts(call, nullptr).products.front(); }
GroupedMatmul product_inside(const GroupedMatmulDact& call) { return parts(call, nullptr).products.front(); }

#define GROUPED_COMPOSED(Call, name, arch)                                                                     \
  const Kernel<Call> name = {#name,        arch, Kind::composed,        refuses<Call>, workspace<Call, false>, \
                             launch<Call>, 1,    workspace<Call, true>, true};
GROUPED_COMPOSED(GroupedMatmulAct, grouped_matmul_act_composed_cpu, Arch::cpu)
GROUPED_COMPOSED(GroupedMatmulDact, grouped_matmul_dact_composed_cpu, Arch::cpu)
#if GROUPED_WITH_CUDA
GROUPED_COMPOSED(GroupedMatmulAct, grouped_matmul_act_composed_cuda, Arch::cuda)
GROUPED_COMPOSED(GroupedMatmulDact, grouped_matmul_dact_composed_cuda, Arch::cuda)
#endif
#undef GROUPED_COMPOSED

}  // namespace grouped
