// Activated rows, times their scales, one rounding. Tasks split rows.
#include "cc/cpu/formats.h"
#include "cc/cpu/groups.h"
#include "cc/cpu/hidden.h"
#include "cc/cpu/panel.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

template <const Isa* isa>
std::string refuses(const ActivationForward& call, const Target&) {
  return first_of(
      {refuses_unless_runs(isa), refuses_unless_plain("rows", call.rows), refuses_unless_plain("result", call.result)});
}

void activate_row(const ActivationForward& call, const HiddenStrips& hidden, int64_t r) {
  const int64_t width = call.result.dims[1];
  for (int64_t column = 0; column < width;) {
    const int64_t count = hidden.strip(column);
    float a[kStrip], u[kStrip], t[kStrip];
    hidden.read(call.rows, r, column, count, a, u);
    hidden.isa.activate(hidden.spec, a, u, count, t);
    if (call.row_scale.present()) {
      const float scale = call.row_scale.as<const float>()[r];
      for (int64_t i = 0; i < count; ++i) t[i] *= scale;
    }
    hidden.isa.encode(call.result.dtype, t, count,
                      call.result.as<char>() + (r * width + column) * dtype_bytes(call.result.dtype));
    column += count;
  }
}

template <const Isa* isa>
void launch(const ActivationForward& call, const Context& context) {
  const int64_t rows = call.rows.dims[0];
  const std::vector<int64_t> ends = group_ends(call.group_sizes, rows);
  const HiddenStrips hidden(pinned_or_best(isa), call.activation, call.result.dims[1]);
  parallel_rows(context.pool, 0, ends.back(), [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) activate_row(call, hidden, r);
  });
  zero_rows(context.pool, call.result, ends.back(), rows);
}

}  // namespace

const Kernel<ActivationForward> activation_any_cpu = {"activation_any_cpu", Arch::cpu,    Kind::reference,
                                                      refuses<nullptr>,     no_workspace, launch<nullptr>};
const Kernel<ActivationForward> activation_any_cpu_plain = {
    "activation_any_cpu_plain", Arch::cpu, Kind::reference, refuses<&kIsaPlain>, no_workspace, launch<&kIsaPlain>};
#if defined(__x86_64__)
const Kernel<ActivationForward> activation_any_cpu_avx2 = {"activation_any_cpu_avx2", Arch::cpu,    Kind::reference,
                                                           refuses<&kIsaAvx2>,        no_workspace, launch<&kIsaAvx2>};
const Kernel<ActivationForward> activation_any_cpu_avx512 = {
    "activation_any_cpu_avx512", Arch::cpu, Kind::reference, refuses<&kIsaAvx512>, no_workspace, launch<&kIsaAvx512>};
#endif

}  // namespace grouped
