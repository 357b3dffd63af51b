#include "cc/bind/plan.h"

#include "cc/bind/launch.h"

namespace grouped {
namespace {

template <class Call>
class PlanOf final : public Plan {
 public:
  explicit PlanOf(Prepared<Call> prepared) : prepared_(std::move(prepared)) {
    const Choice<Call>& choice = prepared_.choice();
    if (choice.kernel != nullptr) kernel = choice.kernel->name;
    if (choice.spare != nullptr) spare = choice.spare->name;
    refusals = choice.refusals;
    workspace_bytes = prepared_.with_room(choice.workspace_bytes);
    aligned_workspace_bytes = prepared_.with_room(choice.aligned_workspace_bytes);
    slots = schema<Call>().slots.size();
    parts = prepared_.parts();
    platform = prepared_.target().platform;
  }

  size_t workspace_for(const uintptr_t* addresses) const override { return prepared_.workspace_bytes(addresses); }
  bool in_parts(const uintptr_t* addresses) const override { return prepared_.in_parts(addresses); }

  void launch(const uintptr_t* addresses, uintptr_t workspace, size_t bytes, void* stream, int threads, int part,
              ZeroMemory* zeros) const override {
    Buffers buffers;
    buffers.addresses = addresses;
    buffers.workspace = workspace;
    buffers.workspace_bytes = bytes;
    buffers.stream = stream;
    buffers.part = part;
    buffers.zeros = zeros;
    if (platform != Platform::cpu) return prepared_.launch(buffers);
    ThreadsOf pool(own_pool(), threads);
    buffers.pool = &pool;
    prepared_.launch(buffers);
  }

 private:
  Prepared<Call> prepared_;
};

std::vector<size_t> bytes_of(const std::vector<TensorView>& inputs, const std::vector<TensorView>& outputs) {
  std::vector<size_t> bytes;
  for (const std::vector<TensorView>* views : {&inputs, &outputs}) {
    for (const TensorView& view : *views) bytes.push_back(view.present() ? static_cast<size_t>(view.bytes()) : 0);
  }
  return bytes;
}

}  // namespace

std::unique_ptr<Plan> make_plan(std::string_view call_name, std::string_view arch, std::string_view implementation,
                                const std::vector<TensorView>& inputs, const std::vector<TensorView>& outputs,
                                const Params& params) {
#define X(Call)                                                                                                \
  if (call_name == Call::kName) {                                                                              \
    auto plan = std::make_unique<PlanOf<Call>>(Prepared<Call>(arch, implementation, inputs, outputs, params)); \
    plan->slot_bytes = bytes_of(inputs, outputs);                                                              \
    return plan;                                                                                               \
  }
  GROUPED_CALLS(X)
#undef X
  std::string known;
#define X(Call) known += std::string(known.empty() ? "" : ", ") + Call::kName;
  GROUPED_CALLS(X)
#undef X
  throw std::invalid_argument("call \"" + std::string(call_name) + "\" is none; expected one of " + known);
}

}  // namespace grouped
