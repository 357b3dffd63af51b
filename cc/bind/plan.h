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

  std::string kernel;                  // empty: no kernel takes the call
  std::string spare;                   // runs where addresses do not suit the kernel; empty: it takes any
  std::vector<Refusal> refusals;       // of the kernels asked before the chosen one
  size_t workspace_bytes = 0;          // to allocate whatever the addresses, room for alignment included; 0: none
  size_t aligned_workspace_bytes = 0;  // the same where operands and results are at multiples of kAlignment
  size_t slots = 0;                    // inputs and outputs
  std::vector<size_t> slot_bytes;      // of each slot's buffer; 0 where absent or read through a table
  std::vector<uint64_t> parts;         // bits of the slots that each part of the kernel touches; empty: it is one
  Platform platform = Platform::cpu;

  // The same for these addresses, one per slot; 0 counts as aligned.
  virtual size_t workspace_for(const uintptr_t* addresses) const = 0;

  // Whether `parts` are those of the kernel that runs at these addresses, likewise.
  virtual bool in_parts(const uintptr_t* addresses) const = 0;

  // `bytes`: of the workspace, as allocated. `threads`: at most so many on the CPU; 0: one per usable processor.
  // `part`: the one to run, where `in_parts` says that there are several. Throws std::invalid_argument, also where the
  // workspace is too small for these addresses, or InternalError.
  virtual void launch(const uintptr_t* addresses, uintptr_t workspace, size_t bytes, void* stream, int threads = 0,
                      int part = kEveryPart, ZeroMemory* zeros = nullptr) const = 0;
};

// Inputs are in slot order, an absent one with rank -1. Throws std::invalid_argument where they do not fit the call.
std::unique_ptr<Plan> make_plan(std::string_view call_name, std::string_view arch, std::string_view implementation,
                                const std::vector<TensorView>& inputs, const std::vector<TensorView>& outputs,
                                const Params& params);

}  // namespace grouped
