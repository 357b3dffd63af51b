// A call decoded and chosen once, launched any number of times: the one way in which all three edges run a kernel.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cc/api/check.h"
#include "cc/bind/signature.h"
#include "cc/cpu/parallel.h"
#include "cc/dispatch/dispatch.h"
#include "cc/dispatch/shapes.h"

namespace grouped {

// Scratch memory starts at a multiple of this. Edges allocate as much again, because neither XLA nor torch on the CPU
// promises such an alignment.
constexpr size_t kWorkspaceAlign = 256;
constexpr size_t kMaxSlots = 64;  // inputs and outputs of one call

// What an edge brings to a launch.
struct Buffers {
  const uintptr_t* addresses = nullptr;  // inputs in slot order, then outputs; 0 where absent or read through a table
  uintptr_t workspace = 0;               // of any alignment
  size_t workspace_bytes = 0;            // as allocated, alignment included
  void* stream = nullptr;
  Pool* pool = nullptr;
};

// Which addresses a launch cannot do without, found once for each plan: a null or unshared buffer would be a crash or
// a silent copy.
class AddressRules {
 public:
  template <class Call>
  static AddressRules of(Call call) {
    AddressRules rules;
    Operands operands;
    call.visit(operands);
    GROUPED_CHECK(operands.names.size() <= kMaxSlots, std::string(Call::kName) + " has more slots than kMaxSlots");
    for (size_t i = 0; i < operands.names.size(); ++i) {
      const TensorView& view = operands.views[i];
      const bool is_result = i >= operands.inputs;
      // A destination that is reached through addresses has no packed buffer, on either side.
      const bool tabled = operands.present((is_result ? "into" : operands.names[i]) + "_table");
      if (view.present() && view.elements() > 0 && !tabled) rules.required_ |= uint64_t{1} << i;
      if (operands.names[i] == "into" && view.present() && !tabled) {
        rules.into_ = i;
        rules.result_ = operands.inputs;
      }
    }
    return rules;
  }

  // Empty, or what is wrong with these addresses.
  template <class Call>
  std::string wrong(const uintptr_t* addresses) const {
    for (uint64_t left = required_; left != 0; left &= left - 1) {
      const size_t slot = static_cast<size_t>(__builtin_ctzll(left));
      if (addresses[slot] == 0) return "the address of " + name<Call>(slot) + " is null";
    }
    if (addresses[into_] != addresses[result_]) return "`into` and the result are not the same buffer; alias them";
    return "";
  }

 private:
  struct Operands {
    std::vector<std::string> names;
    std::vector<TensorView> views;
    size_t inputs = 0;

    void input(const char* name, TensorView& view) { optional(name, view); }
    void optional(const char* name, TensorView& view) {
      output(name, view);
      ++inputs;
    }
    void output(const char* name, TensorView& view) {
      names.emplace_back(name);
      views.push_back(view);
    }
    template <class T>
    void param(const char*, T&) {}

    bool present(const std::string& name) const {
      for (size_t i = 0; i < inputs; ++i) {
        if (names[i] == name) return views[i].present();
      }
      return false;
    }
  };

  template <class Call>
  static std::string name(size_t slot) {
    const Signature& s = signature<Call>();
    return "`" + (slot < s.inputs.size() ? s.inputs[slot].name : s.outputs[slot - s.inputs.size()]) + "`";
  }

  uint64_t required_ = 0;  // bit i: slot i must have an address
  size_t into_ = 0;        // equal to result_ where the call has no shared buffer
  size_t result_ = 0;
};

// Puts addresses where a decoded call has none yet.
struct AddressSetter {
  const uintptr_t* next;

  void input(const char*, TensorView& view) { view.data = reinterpret_cast<void*>(*next++); }
  void optional(const char*, TensorView& view) { view.data = reinterpret_cast<void*>(*next++); }
  void output(const char*, TensorView& view) { view.data = reinterpret_cast<void*>(*next++); }
  template <class T>
  void param(const char*, T&) {}
};

template <class Call>
class Prepared {
 public:
  Prepared(std::string_view arch, std::string_view implementation, const std::vector<TensorView>& inputs,
           const std::vector<TensorView>& outputs, const Params& params)
      : call_(decode_call<Call>(inputs, outputs, params)), rules_(AddressRules::of(call_)) {
    if (!parse_target(std::string(arch), &target_)) {
      throw std::invalid_argument("arch \"" + std::string(arch) +
                                  "\" is none; expected \"cpu\", \"sm_80\", \"sm_90a\"");
    }
    if (std::string wrong = disagreement(call_); !wrong.empty()) {
      throw std::invalid_argument(wrong + " in " + describe());
    }
    choice_ = choose(call_, target_, std::string(implementation));
  }

  const Choice<Call>& choice() const { return choice_; }
  const Target& target() const { return target_; }
  std::string describe() const { return describe_call(call_); }

  void launch(const Buffers& buffers) const {
    if (choice_.kernel == nullptr) throw InternalError("no kernel takes " + describe() + refusals());
    if (std::string wrong = rules_.template wrong<Call>(buffers.addresses); !wrong.empty()) {
      throw std::invalid_argument(wrong + " in " + describe());
    }
    Call call = call_;
    call.visit(AddressSetter{buffers.addresses});
    Context context;
    context.target = target_;
    context.stream = buffers.stream;
    context.pool = buffers.pool;
    context.workspace_bytes = choice_.workspace_bytes;
    if (choice_.workspace_bytes > 0) context.workspace = aligned_workspace(buffers);
    const Kernel<Call>* kernel = kernel_for(choice_, call);
    if (kernel == nullptr) {
      throw std::invalid_argument(std::string(choice_.kernel->name) + " needs addresses that are multiples of " +
                                  std::to_string(choice_.kernel->alignment) + " bytes; do not pin it for " +
                                  describe());
    }
    if (target_.platform == Platform::cpu) {
      const FloatEnvironment environment;
      kernel->launch(call, context);
    } else {
      kernel->launch(call, context);
    }
  }

 private:
  std::string refusals() const {
    std::string text;
    for (const Refusal& refusal : choice_.refusals) text += "; " + refusal.kernel + ": " + refusal.reason;
    return text;
  }
  void* aligned_workspace(const Buffers& buffers) const {
    const uintptr_t start = (buffers.workspace + kWorkspaceAlign - 1) / kWorkspaceAlign * kWorkspaceAlign;
    const size_t skipped = start - buffers.workspace;
    if (buffers.workspace == 0 || buffers.workspace_bytes < skipped + choice_.workspace_bytes) {
      throw std::invalid_argument("the workspace has " + std::to_string(buffers.workspace_bytes) + " bytes, expected " +
                                  std::to_string(choice_.workspace_bytes + kWorkspaceAlign) + " in " + describe());
    }
    return reinterpret_cast<void*>(start);
  }

  Call call_;
  AddressRules rules_;
  Target target_;
  Choice<Call> choice_;
};

}  // namespace grouped
