// A call decoded and chosen once, launched any number of times: the one way in which all three edges run a kernel.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cc/api/archs.h"
#include "cc/api/check.h"
#include "cc/bind/device.h"
#include "cc/bind/signature.h"
#include "cc/cpu/parallel.h"
#include "cc/dispatch/dispatch.h"
#include "cc/dispatch/legal.h"
#include "cc/dispatch/shapes.h"

namespace grouped {

// Scratch memory starts at a multiple of this. Edges allocate as much again, because neither XLA nor torch on the CPU
// promises such an alignment.
constexpr size_t kWorkspaceAlign = 256;

// What an edge brings to a launch.
struct Buffers {
  const uintptr_t* addresses = nullptr;  // inputs in slot order, then outputs; 0 where absent or read through a table
  uintptr_t workspace = 0;               // of any alignment
  size_t workspace_bytes = 0;            // as allocated, alignment included
  void* stream = nullptr;
  Pool* pool = nullptr;
  ZeroMemory* zeros = nullptr;
  int part = kEveryPart;  // the one to run; addresses of slots that it does not touch are not looked at
};

// Which addresses a launch cannot do without: a null or unshared buffer would be a crash or a silent copy.
class AddressRules {
 public:
  template <class Call>
  static AddressRules of(Call call) {
    const Schema& slots = schema<Call>();
    AddressRules rules;
    Views views;
    call.visit(views);
    const auto tabled = [&](size_t i) {
      const int table = slots.slots[i].table;
      return table >= 0 && views.all[table]->present();
    };
    for (size_t i = 0; i < slots.slots.size(); ++i) {
      const TensorView& view = *views.all[i];
      if (!view.present() || view.elements() == 0 || tabled(i)) continue;
      rules.required_ |= uint64_t{1} << i;
      const uint64_t bytes = static_cast<uint64_t>(dtype_bytes(view.dtype));
      if (bytes > 1) rules.wide_.emplace_back(i, bytes);
    }
    for (const auto& [into, result] : slots.shared) {
      if (views.all[into]->present() && !tabled(into)) rules.shared_.emplace_back(into, result);
    }
    return rules;
  }

  // Empty, or what is wrong with these addresses; `touched`: bits of the slots that the launch touches.
  template <class Call>
  std::string wrong(const uintptr_t* addresses, uint64_t touched) const {
    for (uint64_t left = required_ & touched; left != 0; left &= left - 1) {
      const size_t slot = static_cast<size_t>(__builtin_ctzll(left));
      if (addresses[slot] == 0) return "the address of `" + schema<Call>().slots[slot].name + "` is null";
    }
    for (const auto& [slot, bytes] : wide_) {
      if (addresses[slot] % bytes == 0 || (touched >> slot & 1) == 0) continue;
      return "the address of `" + schema<Call>().slots[slot].name + "` is no multiple of " + std::to_string(bytes) +
             " bytes, those of an element; copy the array";
    }
    for (const auto& [into, result] : shared_) {
      if (addresses[into] == addresses[result] || (touched >> result & 1) == 0) continue;
      return "`" + schema<Call>().slots[into].name + "` and the result are not the same buffer; alias them";
    }
    return "";
  }

 private:
  uint64_t required_ = 0;                          // bit i: slot i must have an address
  std::vector<std::pair<size_t, uint64_t>> wide_;  // those of elements of several bytes, and how many
  std::vector<std::pair<size_t, size_t>> shared_;  // slots that are one buffer
};

// Puts addresses where a decoded call has none yet.
struct AddressSetter {
  const uintptr_t* next;

  void input(const char*, TensorView& view, const char*) { view.data = reinterpret_cast<void*>(*next++); }
  void optional(const char*, TensorView& view, const char*) { view.data = reinterpret_cast<void*>(*next++); }
  void output(const char*, TensorView& view, const char*) { view.data = reinterpret_cast<void*>(*next++); }
  void optional_output(const char*, TensorView& view, const char*) { view.data = reinterpret_cast<void*>(*next++); }
  template <class T>
  void param(const char*, T&) {}
};

template <class Call>
class Prepared {
 public:
  Prepared(std::string_view arch, std::string_view implementation, const std::vector<TensorView>& inputs,
           const std::vector<TensorView>& outputs, const Params& params)
      : call_(decode_call<Call>(inputs, outputs, params)) {
    if (!parse_arch(std::string(arch), &target_)) {
      throw std::invalid_argument("arch \"" + std::string(arch) +
                                  "\" is unknown; expected \"cpu\", \"sm_\" and a compute capability, such as "
                                  "\"sm_80\" or \"sm_100\", or \"sm_90a\"; pass one of these forms");
    }
    std::string wrong = illegal(call_);
    if (wrong.empty()) wrong = disagreement(call_);
    if (!wrong.empty()) throw std::invalid_argument(wrong + " in " + describe());
    rules_ = AddressRules::of(call_);
    choice_ = choose(call_, target_, std::string(implementation));
    if (choice_.kernel != nullptr && choice_.kernel->parts != nullptr) parts_ = choice_.kernel->parts(call_);
  }

  const Choice<Call>& choice() const { return choice_; }
  const Target& target() const { return target_; }
  const std::vector<uint64_t>& parts() const { return parts_; }  // those of the kernel; empty: it is one
  std::string describe() const { return describe_call(call_); }

  // Bytes of workspace to allocate for operands and results at these addresses, room for alignment included; 0: none.
  size_t workspace_bytes(const uintptr_t* addresses) const {
    Call call = call_;
    call.visit(AddressSetter{addresses});
    return with_room(workspace_for(choice_, call));
  }
  // Whether `parts` are those of the kernel that runs at these addresses.
  bool in_parts(const uintptr_t* addresses) const {
    Call call = call_;
    call.visit(AddressSetter{addresses});
    return !parts_.empty() && kernel_for(choice_, call) == choice_.kernel;
  }
  static size_t with_room(size_t bytes) { return bytes == 0 ? 0 : bytes + kWorkspaceAlign; }

  void launch(const Buffers& buffers) const {
    if (choice_.kernel == nullptr) throw InternalError("no kernel takes " + describe() + refusals());
    const uint64_t touched = buffers.part == kEveryPart ? ~uint64_t{0} : parts_.at(static_cast<size_t>(buffers.part));
    if (std::string wrong = rules_.template wrong<Call>(buffers.addresses, touched); !wrong.empty()) {
      throw std::invalid_argument(wrong + " in " + describe());
    }
    Call call = call_;
    call.visit(AddressSetter{buffers.addresses});
    Context context;
    context.target = target_;
    context.stream = buffers.stream;
    context.pool = buffers.pool;
    context.part = buffers.part;
    context.zeros = buffers.zeros;
    const Kernel<Call>* kernel = kernel_for(choice_, call);
    if (kernel == nullptr || (buffers.part != kEveryPart && kernel != choice_.kernel)) {
      throw std::invalid_argument(misaligned(*choice_.kernel, call) + "; do not pin it, or a part of it, for " +
                                  describe());
    }
    context.workspace_bytes = workspace_for(choice_, call);
    if (context.workspace_bytes > 0) context.workspace = workspace_of(buffers, context.workspace_bytes, call);
    if (target_.platform == Platform::cpu) {
      const FloatEnvironment environment;
      kernel->launch(call, context);
    } else {
      const ContextGuard guard(target_.platform, buffers.stream);
      kernel->launch(call, context);
    }
  }

 private:
  std::string refusals() const {
    std::string text;
    for (const Refusal& refusal : choice_.refusals) text += "; " + refusal.kernel + ": " + refusal.reason;
    return text;
  }
  void* workspace_of(const Buffers& buffers, size_t needed, const Call& call) const {
    const uintptr_t start = (buffers.workspace + kWorkspaceAlign - 1) / kWorkspaceAlign * kWorkspaceAlign;
    const size_t skipped = start - buffers.workspace;
    if (buffers.workspace == 0 || buffers.workspace_bytes < skipped + needed) {
      throw std::invalid_argument(too_small(buffers.workspace_bytes, needed, call));
    }
    return reinterpret_cast<void*>(start);
  }
  std::string too_small(size_t given, size_t needed, const Call& call) const {
    std::string text = "the workspace has " + std::to_string(given) + " bytes, expected " +
                       std::to_string(with_room(needed)) + " in " + describe();
    const std::string odd = unaligned(call, kAlignment);
    if (odd.empty() || choice_.aligned_workspace_bytes == choice_.workspace_bytes) {
      return text + "; allocate as many";
    }
    return text + ", because the address of `" + odd + "` is no multiple of " + std::to_string(kAlignment) +
           "; align it, or allocate as many";
  }

  Call call_;
  AddressRules rules_;
  Target target_;
  Choice<Call> choice_;
  std::vector<uint64_t> parts_;
};

}  // namespace grouped
