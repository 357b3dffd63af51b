// Fused calls whose result is stored in a quantised format, two rows per table.
//
// `*_quantized_fp8_cuda`, where no product's kernel has the activation in its epilogue: the product, then, as a second
// part, one pass that activates and stores. Activated rows that it does not store have a quantiser behind. Workspace:
// what the product gives, unless it is asked for, activated rows likewise, then memory that the steps share.
//
// `*_quantized_cpu`, `*_quantized_cuda`, for all others: the plain call, then, as a second part, a quantiser for each
// array, through dispatch. Workspace: the plain rows where the caller does not ask for them, then memory that the steps
// share.
#include "cc/dispatch/quantized.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cc/api/operands.h"
#include "cc/api/product_inside.h"
#include "cc/api/schema.h"
#include "cc/dispatch/columns.h"
#include "cc/dispatch/parts.h"
#include "cc/kernels/kernels.h"
#include "cc/math/activation.h"

namespace grouped {
namespace {

// Rows for the parts of a call, out of its workspace.
class Space {
 public:
  explicit Space(void* workspace) : at_(static_cast<char*>(workspace)) {}
  TensorView rows(DType dtype, int64_t count, int64_t width) {
    const TensorView rows = matrix_of(dtype, count, width, at_ + taken_);
    taken_ += padded_bytes(rows);
    return rows;
  }
  size_t taken() const { return taken_; }

 private:
  char* at_;
  size_t taken_ = 0;
};

template <class Call>
struct Parts {
  Call inner;
  Quantize store;
  Quantize activated;  // `store` of the activated rows; without values: there is none
  size_t taken = 0;    // bytes of the workspace that hold plain rows
};

Quantize quantized_rows(const Quantizing& how, const TensorView& rows, const TensorView& group_sizes) {
  Quantize store;
  static_cast<Quantizing&>(store) = how;
  store.source = rows;
  store.group_sizes = group_sizes;
  return store;
}

// Columns of what is stored.
int64_t quantized_width(const GroupedMatmulAct& call) {
  ActivationKind kind{};
  const int64_t wide = whole_rhs(call).dims[3 - call.rhs_axis];
  return activation_named(call.activation.kind, &kind) && is_gated(kind) ? wide / 2 : wide;
}
int64_t quantized_width(const GroupedMatmulDact& call) { return call.hidden.dims[1]; }

void set_activated(const GroupedMatmulAct&, Space*, Parts<GroupedMatmulAct>*) {}
void set_activated(const GroupedMatmulDact& call, Space* space, Parts<GroupedMatmulDact>* p) {
  p->inner.quantized_activated = QuantizingActivated{};
  if (!call.quantized_activated.stores()) return;
  if (!call.activated.present()) {
    const int64_t width = product_columns(call);
    p->inner.activated = space->rows(call.hidden.dtype, call.lhs.dims[0], width);
  }
  p->activated = quantized_rows(call.quantized_activated, p->inner.activated, call.group_sizes);
}

template <class Call>
Parts<Call> parts(const Call& call, void* workspace) {
  Parts<Call> p;
  Space space(workspace);
  p.inner = call;
  p.inner.quantized = Quantizing{};
  if (!call.result.present()) {
    p.inner.result = space.rows(compute_type(call), call.lhs.dims[0], quantized_width(call));
  }
  p.store = quantized_rows(call.quantized, p.inner.result, call.group_sizes);
  set_activated(call, &space, &p);
  p.taken = space.taken();
  return p;
}

template <class Call>
std::string refuses(const Call& call, const Target& target) {
  if (!call.quantized.stores()) return "is for results in a quantised format";
  const Parts<Call> p = parts(call, nullptr);
  std::string reason = refusal(p.inner, target);
  if (reason.empty()) reason = refusal(p.store, target);
  return reason.empty() && p.activated.stores() ? refusal(p.activated, target) : reason;
}

template <bool kAligned>
size_t bytes_of_store(const Quantize& store, const Target& target) {
  return store.stores() ? choose(store, target, "").bytes(kAligned) : 0;
}

template <class Call, bool kAligned>
size_t workspace(const Call& call, const Target& target) {
  const Parts<Call> p = parts(call, nullptr);
  return p.taken + std::max({choose(p.inner, target, "").bytes(kAligned), bytes_of_store<kAligned>(p.store, target),
                             bytes_of_store<kAligned>(p.activated, target)});
}

template <class Call>
void launch(const Call& call, const Context& context) {
  const Parts<Call> p = parts(call, context.workspace);
  const Context inner = behind(context, p.taken);
  if (context.runs(0)) run_part(p.inner, inner);
  if (!context.runs(1)) return;
  run_part(p.store, inner);
  if (p.activated.stores()) run_part(p.activated, inner);
}

// Bits of the slots of a call whose names `belongs` takes.
template <class Call, class Belongs>
uint64_t slots_where(Belongs belongs) {
  uint64_t found = 0, bit = 1;
  for (const SlotSchema& slot : schema<Call>().slots) {
    if (belongs(slot.name)) found |= bit;
    bit <<= 1;
  }
  return found;
}

template <class Call>
bool has_slot(const std::string& name) {
  return slots_where<Call>([&](const std::string& own) { return own == name; }) != 0;
}

// A quantiser reads the sizes, its own operands, and the plain rows, which are results or in the workspace.
template <class Call>
std::vector<uint64_t> slots_of_parts(const Call&) {
  const uint64_t sizes = slots_where<Call>([](const std::string& name) { return name == "group_sizes"; });
  const uint64_t rows =
      slots_where<Call>([](const std::string& name) { return name == "result" || name == "activated"; });
  const uint64_t quantized = slots_where<Call>([](const std::string& name) {
    const std::string prefix = "activated_";
    return has_slot<Quantize>(name.rfind(prefix, 0) == 0 ? name.substr(prefix.size()) : name);
  });
  return {~quantized | sizes, quantized | rows | sizes};
}

#if GROUPED_WITH_CUDA

// The product, and what follows it.
struct OnePass {
  GroupedMatmul product;
  ActivatedStore rest;
  Quantize activated;  // behind the pass, which gives its rows; without values: there is none
  size_t taken = 0;
};

void set_rest(const GroupedMatmulAct&, Space*, OnePass* p) { p->rest.hidden = p->product.result; }
void set_rest(const GroupedMatmulDact& call, Space* space, OnePass* p) {
  p->rest.hidden = call.hidden;
  p->rest.grad = p->product.result;
  p->rest.row_base = call.row_base;
  p->rest.result = call.result;
  p->rest.activated = call.activated;
  p->rest.row_sum = call.row_sum;
  if (!call.quantized_activated.stores()) return;
  p->rest.store_activated = quantized_rows(call.quantized_activated, p->product.result, call.group_sizes);
  if (stores_activated(p->rest)) return;
  if (!call.activated.present()) {
    const TensorView& like = p->product.result;
    p->rest.activated = space->rows(like.dtype, like.dims[0], like.dims[1]);
  }
  p->activated = quantized_rows(call.quantized_activated, p->rest.activated, call.group_sizes);
  p->rest.store_activated = Quantize{};
}

const TensorView* asked_for(const GroupedMatmulAct& call) { return call.hidden.present() ? &call.hidden : nullptr; }
const TensorView* asked_for(const GroupedMatmulDact&) { return nullptr; }

template <class Call>
OnePass one_pass(const Call& call, void* workspace) {
  OnePass p;
  Space space(workspace);
  p.product = product_inside(call);
  const TensorView& between = p.product.result;
  const TensorView* given = asked_for(call);
  p.product.result = given ? *given : space.rows(between.dtype, between.dims[0], between.dims[1]);
  p.rest.store = parts(call, nullptr).store;
  p.rest.row_scale = call.row_scale;
  p.rest.activation = call.activation;
  p.rest.zero_tail = call.zero_tail;
  set_rest(call, &space, &p);
  p.taken = space.taken();
  return p;
}

bool has_pair(const GroupedMatmulAct& call) { return call.rhs_up.present(); }
bool has_pair(const GroupedMatmulDact&) { return false; }

template <class Call>
std::string refuses_one_pass(const Call& call, const Target& target) {
  if (!call.quantized.stores()) return "is for results in a quantised format";
  if (has_pair(call)) return "takes a weight in one array";
  const Choice<Call> plain = choose(parts(call, nullptr).inner, target, "");
  if (plain.kernel && plain.kernel->kind != Kind::composed) {
    return std::string("leaves product and activation to ") + plain.kernel->name;
  }
  const OnePass p = one_pass(call, nullptr);
  std::string reason = refusal(p.product, target);
  if (reason.empty()) reason = refuses_activated_store(p.rest, target);
  return reason.empty() && p.activated.stores() ? refusal(p.activated, target) : reason;
}

template <class Call, bool kAligned>
size_t one_pass_bytes(const Call& call, const Target& target) {
  const OnePass p = one_pass(call, nullptr);
  return p.taken + std::max({choose(p.product, target, "").bytes(kAligned), activated_store_bytes(p.rest),
                             bytes_of_store<kAligned>(p.activated, target)});
}

template <class Call>
void launch_one_pass(const Call& call, const Context& context) {
  const OnePass p = one_pass(call, context.workspace);
  const Context inner = behind(context, p.taken);
  if (context.runs(0)) run_part(p.product, inner);
  if (!context.runs(1)) return;
  launch_activated_store(p.rest, inner);
  if (p.activated.stores()) run_part(p.activated, inner);
}

// The pass reads nothing that the product reads but the sizes, and the hidden rows where the product gives them.
template <class Call>
std::vector<uint64_t> slots_of_one_pass(const Call&) {
  const uint64_t both =
      slots_where<Call>([](const std::string& name) { return name == "group_sizes" || name == "hidden"; });
  const uint64_t product = slots_where<Call>(
      [](const std::string& name) { return name != "row_scale" && name != "result" && has_slot<GroupedMatmul>(name); });
  return {product | both, ~product | both};
}

#endif

}  // namespace

#define GROUPED_QUANTIZED(Call, name, arch)          \
  const Kernel<Call> name = {#name,                  \
                             arch,                   \
                             Kind::special,          \
                             refuses<Call>,          \
                             workspace<Call, false>, \
                             launch<Call>,           \
                             1,                      \
                             workspace<Call, true>,  \
                             true,                   \
                             false,                  \
                             slots_of_parts<Call>};
GROUPED_QUANTIZED(GroupedMatmulAct, grouped_matmul_act_quantized_cpu, Arch::cpu)
GROUPED_QUANTIZED(GroupedMatmulDact, grouped_matmul_dact_quantized_cpu, Arch::cpu)
#if GROUPED_WITH_CUDA
GROUPED_QUANTIZED(GroupedMatmulAct, grouped_matmul_act_quantized_cuda, Arch::cuda)
GROUPED_QUANTIZED(GroupedMatmulDact, grouped_matmul_dact_quantized_cuda, Arch::cuda)
#endif
#undef GROUPED_QUANTIZED

#if GROUPED_WITH_CUDA
#define GROUPED_ONE_PASS(Call, name, arch)                \
  const Kernel<Call> name = {#name,                       \
                             arch,                        \
                             Kind::special,               \
                             refuses_one_pass<Call>,      \
                             one_pass_bytes<Call, false>, \
                             launch_one_pass<Call>,       \
                             kAlignment,                  \
                             one_pass_bytes<Call, true>,  \
                             true,                        \
                             false,                       \
                             slots_of_one_pass<Call>};
GROUPED_ONE_PASS(GroupedMatmulAct, grouped_matmul_act_quantized_fp8_cuda, Arch::cuda)
GROUPED_ONE_PASS(GroupedMatmulDact, grouped_matmul_dact_quantized_fp8_cuda, Arch::cuda)
#undef GROUPED_ONE_PASS
#endif

}  // namespace grouped
