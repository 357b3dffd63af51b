// A fused call that stores what it gives: the plain call, then the quantiser, each through dispatch. Workspace: the
// plain rows where the caller does not ask for them, then what the two need, who share it.
#include "cc/dispatch/stored.h"

#include <algorithm>
#include <string>

#include "cc/api/halves.h"
#include "cc/dispatch/dispatch.h"
#include "cc/math/activation.h"

namespace grouped {
namespace {

constexpr size_t kAlign = 256;

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
    p.taken = (static_cast<size_t>(rows.bytes()) + kAlign - 1) / kAlign * kAlign;
  }
  static_cast<Storing&>(p.store) = call.stored;
  p.store.source = p.inner.result;
  p.store.group_sizes = call.group_sizes;
  return p;
}

template <class Part>
std::string refusal(const Part& part, const Target& target) {
  const Choice<Part> choice = choose(part, target, "");
  if (choice.kernel) return "";
  return choice.refusals.back().kernel + ": " + choice.refusals.back().reason;
}

template <class Call>
std::string refuses(const Call& call, const Target& target) {
  if (!call.stored.stores()) return "is for results in a quantised format";
  const Parts<Call> p = parts(call, nullptr);
  const std::string reason = refusal(p.inner, target);
  return reason.empty() ? refusal(p.store, target) : reason;
}

template <class Call>
size_t workspace(const Call& call, const Target& target) {
  const Parts<Call> p = parts(call, nullptr);
  return p.taken + std::max(choose(p.inner, target, "").workspace_bytes, choose(p.store, target, "").workspace_bytes);
}

template <class Part>
void run(const Part& part, const Context& context) {
  const Choice<Part> choice = choose(part, context.target, "");
  kernel_for(choice, part)->launch(part, context);
}

template <class Call>
void launch(const Call& call, const Context& context) {
  const Parts<Call> p = parts(call, context.workspace);
  Context inner = context;
  inner.workspace = static_cast<char*>(context.workspace) + p.taken;
  inner.workspace_bytes = context.workspace_bytes - p.taken;
  run(p.inner, inner);
  run(p.store, inner);
}

}  // namespace

#define GROUPED_STORED(Call, name) const Kernel<Call> name = {#name, refuses<Call>, workspace<Call>, launch<Call>};
GROUPED_STORED(GroupedMatmulAct, grouped_matmul_act_stored_cpu)
GROUPED_STORED(GroupedMatmulDact, grouped_matmul_dact_stored_cpu)
#if GROUPED_WITH_CUDA
GROUPED_STORED(GroupedMatmulAct, grouped_matmul_act_stored_cuda)
GROUPED_STORED(GroupedMatmulDact, grouped_matmul_dact_stored_cuda)
#endif
#undef GROUPED_STORED

}  // namespace grouped
