// Which kernel runs a call: the first of its table that accepts, else every kernel's reason to refuse. A pure function
// of shapes, dtypes, parameters and target, asked at trace time; for parts of a call the answer is looked up at launch.
#pragma once

#include <string>
#include <vector>

#include "cc/api/calls.h"
#include "cc/api/check.h"
#include "cc/api/kernel.h"

namespace grouped {

// The kernels of a platform, best first; defined in registry.cc for every call of GROUPED_CALLS.
template <class Call>
struct Table {
  const Kernel<Call>* begin;
  const Kernel<Call>* end;
};
template <class Call>
Table<Call> table(Platform platform);

struct Refusal {
  std::string kernel;
  std::string reason;
};

template <class Call>
struct Chosen {
  const Kernel<Call>* kernel = nullptr;  // null: no kernel takes the call
  const Kernel<Call>* spare = nullptr;   // runs where the addresses do not suit `kernel`; null: `kernel` takes any
};

template <class Call>
struct Choice : Chosen<Call> {
  std::vector<Refusal> refusals;       // of the kernels asked before the chosen one, best first
  size_t workspace_bytes = 0;          // enough for both, whatever the addresses
  size_t aligned_workspace_bytes = 0;  // enough for `kernel` where the addresses are multiples of kAlignment

  size_t bytes(bool aligned) const { return aligned ? aligned_workspace_bytes : workspace_bytes; }
};

// Why a kernel does not take a call on this target, whatever the addresses; empty: it does.
template <class Call>
std::string refusal_of(const Kernel<Call>& kernel, const Call& call, const Target& target);

// `implementation` pins: empty asks the table; a comma list of kernel names asks these alone, in the list's order;
// "reference" names the kernels of kind `reference` and `composed`, "composed" for the latter.
template <class Call>
Choice<Call> choose(const Call& call, const Target& target, const std::string& implementation);

// As `choose` without an implementation, but kept by target, operands and parameters: parts of a call want their
// kernels at each launch, and asking every kernel of a table takes ten microseconds and more.
template <class Call>
Chosen<Call> chosen_before(const Call& call, const Target& target);

// The kernel of `choice` for these addresses; null where neither takes them (a pinned kernel has no spare).
template <class Call>
const Kernel<Call>* kernel_for(const Chosen<Call>& choice, const Call& call);

// The name of the first operand or result whose address is no multiple of `alignment`, of those that kernels want
// aligned; empty: none.
template <class Call>
std::string unaligned(const Call& call, int alignment);

// What is wrong with the addresses of `call` where `kernel` does not take them, for messages.
template <class Call>
std::string misaligned(const Kernel<Call>& kernel, const Call& call);

// Bytes of workspace that the kernel for these addresses needs.
template <class Call>
size_t workspace_for(const Choice<Call>& choice, const Call& call);

}  // namespace grouped
