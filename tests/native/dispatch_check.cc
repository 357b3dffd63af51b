// A part of a call at addresses that its only kernel takes, and at one that it does not: prints what the error says.
#include <cstdio>
#include <stdexcept>

#include "cc/api/calls.h"
#undef GROUPED_CALLS  // all of them take the compiler fourteen seconds
#define GROUPED_CALLS(X) X(GroupedMatmul)
#include "cc/dispatch/dispatch.cc"
#include "cc/dispatch/parts.h"

namespace grouped {
namespace {

int g_launches = 0;

const Kernel<GroupedMatmul> kOnly = {"only_aligned", Arch::cpu,
                                     Kind::special,  takes_any,
                                     no_workspace,   [](const GroupedMatmul&, const Context&) { ++g_launches; },
                                     kAlignment};

}  // namespace

template <>
Table<GroupedMatmul> table<GroupedMatmul>(Platform) {
  return {&kOnly, &kOnly + 1};
}

}  // namespace grouped

int main() {
  alignas(grouped::kAlignment) char memory[64] = {};
  grouped::GroupedMatmul product;
  for (grouped::TensorView* view : {&product.lhs, &product.rhs, &product.result}) view->data = memory;
  const grouped::Context context;
  grouped::run_part(product, context);
  std::printf("%d launch\n", grouped::g_launches);
  product.rhs.data = memory + 2;
  try {
    grouped::run_part(product, context);
  } catch (const std::invalid_argument& error) {
    std::printf("%s\n", error.what());
  }
  return 0;
}
