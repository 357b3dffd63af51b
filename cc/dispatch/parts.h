// What calls share that run others through dispatch: why no kernel takes a part, how it runs, and what a matrix between
// two parts takes of the workspace.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

#include "cc/dispatch/dispatch.h"

namespace grouped {

inline size_t padded_bytes(const TensorView& view) {
  constexpr size_t kAlign = 256;
  return (static_cast<size_t>(view.bytes()) + kAlign - 1) / kAlign * kAlign;
}

// The reason of the table's last row, which takes most; empty: a kernel takes the part.
template <class Part>
std::string refusal(const Part& part, const Target& target) {
  const Choice<Part> choice = choose(part, target, "");
  if (choice.kernel) return "";
  if (choice.refusals.empty()) return std::string("no kernel of ") + Part::kName + " on this platform";
  return choice.refusals.back().kernel + ": " + choice.refusals.back().reason;
}

// A product with the groups and the options of a call that it is a part of, and no operands yet.
template <class Call>
GroupedMatmul product_for(const Call& call) {
  GroupedMatmul product;
  product.group_sizes = call.group_sizes;
  product.batch_invariant = call.batch_invariant;
  product.aligned_tables = call.aligned_tables;
  product.rows_hint = call.rows_hint;
  product.fp32_mode = call.fp32_mode;
  return product;
}

// What runs behind the first `taken` bytes of a call's workspace, with all of its own parts.
inline Context behind(const Context& context, size_t taken) {
  Context rest = context;
  rest.part = kEveryPart;
  rest.workspace = static_cast<char*>(context.workspace) + taken;
  rest.workspace_bytes = context.workspace_bytes - taken;
  return rest;
}

template <class Part>
void run_part(const Part& part, const Context& context) {
  const Chosen<Part> choice = chosen_before(part, context.target);
  const Kernel<Part>* kernel = kernel_for(choice, part);
  if (kernel == nullptr) {
    throw std::invalid_argument(misaligned(*choice.kernel, part) + "; align it, for no other kernel of " + Part::kName +
                                " takes this part of the call");
  }
  kernel->launch(part, context);
}

}  // namespace grouped
