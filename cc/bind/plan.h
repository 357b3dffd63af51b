// Shapes once, then addresses and a stream: the edge of the torch bridge, whose every call costs host time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cc/bind/signature.h"
#include "cc/dispatch/dispatch.h"

namespace grouped {

class Plan {
 public:
  virtual ~Plan() = default;

  std::string kernel;             // empty: no kernel takes the call
  std::string spare;              // runs where addresses do not suit the kernel; empty: it takes any
  std::vector<Refusal> refusals;  // of the kernels asked before the chosen one
  size_t workspace_bytes = 0;     // to allocate, room for alignment included; 0: none
  size_t slots = 0;               // inputs and outputs
  Platform platform = Platform::cpu;

  // `addresses`: one a slot. The workspace has the bytes above. Throws std::invalid_argument or InternalError.
  virtual void launch(const uintptr_t* addresses, uintptr_t workspace, void* stream) const = 0;
};

// Inputs stand in slot order, an absent one with rank -1. Throws std::invalid_argument where they do not fit the call.
std::unique_ptr<Plan> make_plan(std::string_view call_name, std::string_view arch, std::string_view implementation,
                                const std::vector<TensorView>& inputs, const std::vector<TensorView>& outputs,
                                const Params& params);

}  // namespace grouped
