// Fused calls whose result is stored in a quantised format, two rows a table.
//
// `*_stored_fp8_cuda`, where no product's kernel has the activation in its epilogue: the product, then one pass that
// activates and stores. Workspace: what the product gives, unless it is asked for, then what the two need.
//
// `*_stored_cpu`, `*_stored_cuda`, for all others: the plain call, then the quantiser, each through dispatch.
// Workspace: the plain rows where the caller does not ask for them, then what the two need, who share it.
#include "cc/dispatch/stored.h"

#include <algorithm>
#include <string>

#include "cc/api/halves.h"
#include "cc/dispatch/compose.h"
#include "cc/dispatch/parts.h"
#include "cc/kernels/kernels.h"
#include "cc/math/activation.h"

namespace grouped {
namespace {

template <class Call>
struct Parts {
  Call inner;
  Quantize store;
  size_t taken = 0;  // bytes of the workspace that hold plain rows
};

// Columns of what is stored.
int64_t stored_width(const GroupedMatmulAct& call) {
  ActivationKind kind{};
  const int64_t wide = whole_rhs(call).dims[3 - call.rhs_axis];
  return activation_named(call.activation.kind, &kind) && is_gated(kind) ? wide / 2 : wide;
}
int64_t stored_width(const GroupedMatmulDact& call) { return call.hidden.dims[1]; }

template <class Call>
Parts<Call> parts(const Call& call, void* workspace) {
  Parts<Call> p;
  p.inner = call;
  p.inner.stored = Storing{};
  if (!call.result.present()) {
    TensorView rows;
    rows.data = workspace;
    rows.dtype = compute_type(call);
    rows.rank = 2;
    rows.dims[0] = call.lhs.dims[0];
    rows.dims[1] = stored_width(call);
    p.inner.result = rows;
    p.taken = padded_bytes(rows);
  }
  static_cast<Storing&>(p.store) = call.stored;
  p.store.source = p.inner.result;
  p.store.group_sizes = call.group_sizes;
  return p;
}

template <class Call>
std::string refuses(const Call& call, const Target& target) {
  if (!call.stored.stores()) return "is for results in a quantised format";
  const Parts<Call> p = parts(call, nullptr);
  const std::string reason = refusal(p.inner, target);
  return reason.empty() ? refusal(p.store, target) : reason;
}

template <class Call, bool kAligned>
size_t workspace(const Call& call, const Target& target) {
  const Parts<Call> p = parts(call, nullptr);
  return p.taken + std::max(choose(p.inner, target, "").bytes(kAligned), choose(p.store, target, "").bytes(kAligned));
}

template <class Call>
void launch(const Call& call, const Context& context) {
  const Parts<Call> p = parts(call, context.workspace);
  Context inner = context;
  inner.workspace = static_cast<char*>(context.workspace) + p.taken;
  inner.workspace_bytes = context.workspace_bytes - p.taken;
  run_part(p.inner, inner);
  run_part(p.store, inner);
}

#if GROUPED_WITH_CUDA

// The product, and what follows it.
struct OnePass {
  GroupedMatmul product;
  ActivatedStore rest;
  size_t taken = 0;
};

void set_rest(const GroupedMatmulAct&, OnePass* p) { p->rest.hidden = p->product.result; }
void set_rest(const GroupedMatmulDact& call, OnePass* p) {
  p->rest.hidden = call.hidden;
  p->rest.grad = p->product.result;
  p->rest.row_base = call.row_base;
  p->rest.result = call.result;
  p->rest.activated = call.activated;
  p->rest.row_sum = call.row_sum;
}

const TensorView* asked_for(const GroupedMatmulAct& call) { return call.hidden.present() ? &call.hidden : nullptr; }
const TensorView* asked_for(const GroupedMatmulDact&) { return nullptr; }

template <class Call>
OnePass one_pass(const Call& call, void* workspace) {
  OnePass p;
  p.product = product_inside(call);
  if (const TensorView* given = asked_for(call)) {
    p.product.result = *given;
  } else {
    p.product.result.data = workspace;
    p.taken = padded_bytes(p.product.result);
  }
  set_rest(call, &p);
  p.rest.row_scale = call.row_scale;
  p.rest.activation = call.activation;
  p.rest.zero_tail = call.zero_tail;
  p.rest.store = parts(call, nullptr).store;
  return p;
}

bool has_pair(const GroupedMatmulAct& call) { return call.rhs_up.present(); }
bool has_pair(const GroupedMatmulDact&) { return false; }

template <class Call>
std::string refuses_one_pass(const Call& call, const Target& target) {
  if (!call.stored.stores()) return "is for results in a quantised format";
  if (has_pair(call)) return "takes a weight in one array";
  const Choice<Call> plain = choose(parts(call, nullptr).inner, target, "");
  if (plain.kernel && std::string(plain.kernel->name).find("_composed_") == std::string::npos) {
    return std::string("leaves product and activation to ") + plain.kernel->name;
  }
  const OnePass p = one_pass(call, nullptr);
  const std::string reason = refusal(p.product, target);
  return reason.empty() ? refuses_activated_store(p.rest, target) : reason;
}

template <class Call, bool kAligned>
size_t one_pass_bytes(const Call& call, const Target& target) {
  const OnePass p = one_pass(call, nullptr);
  return p.taken + std::max(choose(p.product, target, "").bytes(kAligned), activated_store_bytes(p.rest));
}

template <class Call>
void launch_one_pass(const Call& call, const Context& context) {
  const OnePass p = one_pass(call, context.workspace);
  Context inner = context;
  inner.workspace = static_cast<char*>(context.workspace) + p.taken;
  inner.workspace_bytes = context.workspace_bytes - p.taken;
  run_part(p.product, inner);
  launch_activated_store(p.rest, inner);
}

#endif

}  // namespace

#define GROUPED_STORED(Call, name) \
  const Kernel<Call> name = {#name, refuses<Call>, workspace<Call, false>, launch<Call>, 1, workspace<Call, true>};
GROUPED_STORED(GroupedMatmulAct, grouped_matmul_act_stored_cpu)
GROUPED_STORED(GroupedMatmulDact, grouped_matmul_dact_stored_cpu)
#if GROUPED_WITH_CUDA
GROUPED_STORED(GroupedMatmulAct, grouped_matmul_act_stored_cuda)
GROUPED_STORED(GroupedMatmulDact, grouped_matmul_dact_stored_cuda)
#endif
#undef GROUPED_STORED

#if GROUPED_WITH_CUDA
#define GROUPED_ONE_PASS(Call, name)                                                             \
  const Kernel<Call> name = {                                                                    \
      #name,      refuses_one_pass<Call>,    one_pass_bytes<Call, false>, launch_one_pass<Call>, \
      kAlignment, one_pass_bytes<Call, true>};
GROUPED_ONE_PASS(GroupedMatmulAct, grouped_matmul_act_stored_fp8_cuda)
GROUPED_ONE_PASS(GroupedMatmulDact, grouped_matmul_dact_stored_fp8_cuda)
#undef GROUPED_ONE_PASS
#endif

}  // namespace grouped
