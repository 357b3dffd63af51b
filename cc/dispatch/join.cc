// The row for contractions over two arrays that no kernel reads in place: the halves are copied side by side into the
// workspace, and the call runs through dispatch with one weight. So its bits are those of that weight, whatever takes
// it.
#include <cstring>
#include <string>

#include "cc/api/halves.h"
#include "cc/dispatch/compose.h"
#include "cc/dispatch/parts.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

constexpr size_t kAlign = 256;
constexpr int64_t kMostPitch = INT32_MAX;  // of the copy engine, bytes

// [lines, bytes] of either half; a line of the weight is one of the first and one of the second.
struct Lines {
  int64_t count, bytes;
};
Lines lines_of(const GroupedMatmul& call) {
  const TensorView& half = call.rhs;
  Lines lines = {1, dtype_bytes(half.dtype)};
  for (int i = 0; i < half.rank; ++i) (i < call.rhs_axis ? lines.count : lines.bytes) *= half.dims[i];
  return lines;
}

GroupedMatmul joined(const GroupedMatmul& call, void* workspace) {
  GroupedMatmul whole = call;
  whole.rhs = whole_rhs(call);
  whole.rhs.data = workspace;
  whole.rhs_up = TensorView{};
  return whole;
}

size_t joined_bytes(const GroupedMatmul& call) {
  return (static_cast<size_t>(whole_rhs(call).bytes()) + kAlign - 1) / kAlign * kAlign;
}

std::string refuses(const GroupedMatmul& call, const Target& target) {
  if (!call.rhs_up.present()) return "is for a weight in two arrays; this call has one";
  if (2 * lines_of(call).bytes > kMostPitch) return "joins halves whose lines have less than 2^30 bytes";
  const Choice<GroupedMatmul> choice = choose(joined(call, nullptr), target, "");
  if (choice.kernel == nullptr) {
    return choice.refusals.empty() ? "no kernel takes the joined weight" : choice.refusals.back().reason;
  }
  // Then halves in place have the bits of the joined weight.
  if (refusal_of(*choice.kernel, call, target).empty()) return std::string(choice.kernel->name) + " reads it in place";
  return "";
}

template <bool kAligned>
size_t workspace(const GroupedMatmul& call, const Target& target) {
  return joined_bytes(call) + choose(joined(call, nullptr), target, "").bytes(kAligned);
}

void join(void* to, const GroupedMatmul& call, [[maybe_unused]] const Context& context) {
  const Lines lines = lines_of(call);
#if GROUPED_WITH_CUDA
  if (context.target.platform == Platform::cuda) {
    return join_lines_cuda(to, call.rhs.data, call.rhs_up.data, lines.count, lines.bytes, context.stream);
  }
#endif
  char* next = static_cast<char*>(to);
  for (int64_t i = 0; i < lines.count; ++i) {
    for (const TensorView* half : {&call.rhs, &call.rhs_up}) {
      std::memcpy(next, half->as<const char>() + i * lines.bytes, static_cast<size_t>(lines.bytes));
      next += lines.bytes;
    }
  }
}

void launch(const GroupedMatmul& call, const Context& context) {
  join(context.workspace, call, context);
  const GroupedMatmul whole = joined(call, context.workspace);
  run_part(whole, behind(context, joined_bytes(call)));
}

}  // namespace

#define GROUPED_JOINED(name, arch)                                                             \
  const Kernel<GroupedMatmul> name = {#name,  arch, Kind::special,  refuses, workspace<false>, \
                                      launch, 1,    workspace<true>};
GROUPED_JOINED(grouped_matmul_joined_cpu, Arch::cpu)
#if GROUPED_WITH_CUDA
GROUPED_JOINED(grouped_matmul_joined_cuda, Arch::cuda)
#endif
#undef GROUPED_JOINED

}  // namespace grouped
