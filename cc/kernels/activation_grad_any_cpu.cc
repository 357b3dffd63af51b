// Gradients at hidden rows, activated rows and the dot products of rows with them (cc/cpu/lanes.h; row_base is added
// last). Tasks split rows.
#include "cc/cpu/formats.h"
#include "cc/cpu/groups.h"
#include "cc/cpu/hidden.h"
#include "cc/cpu/lanes.h"
#include "cc/cpu/panel.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

template <const Isa* isa>
std::string refuses(const ActivationGrad& call, const Target&) {
  return first_of({refuses_unless_runs(isa), refuses_unless_plain("grad", call.grad),
                   refuses_unless_plain("rows", call.rows), refuses_unless_plain("result", call.result),
                   refuses_unless_plain("activated", call.activated)});
}

const char* place(const TensorView& matrix, int64_t row, int64_t column) {
  return matrix.as<const char>() + (row * matrix.dims[1] + column) * dtype_bytes(matrix.dtype);
}

void grad_row(const ActivationGrad& call, const HiddenStrips& hidden, int64_t r) {
  const int64_t width = call.grad.dims[1];
  const float scale = call.row_scale.present() ? call.row_scale.as<const float>()[r] : 1.0f;
  float sums[kSums] = {};
  for (int64_t column = 0; column < width;) {
    const int64_t count = hidden.strip(column);
    float a[kStrip], u[kStrip], dz[kStrip], scaled[kStrip], t[kStrip], da[kStrip], du[kStrip];
    hidden.read(call.rows, r, column, count, a, u);
    hidden.isa.decode(call.grad.dtype, place(call.grad, r, column), count, dz);
    for (int64_t i = 0; i < count; ++i) scaled[i] = scale * dz[i];
    hidden.isa.activate_grad(hidden.spec, a, u, scaled, count, t, da, du);
    if (call.row_sum.present()) add_products(dz, t, count, sums);
    if (call.result.present()) hidden.write(call.result, r, column, count, da, du);
    if (call.activated.present()) {
      for (int64_t i = 0; i < count; ++i) t[i] *= scale;
      hidden.isa.encode(call.activated.dtype, t, count, const_cast<char*>(place(call.activated, r, column)));
    }
    column += count;
  }
  if (call.row_sum.present()) {
    const float base = call.row_base.present() ? call.row_base.as<const float>()[r] : 0.0f;
    call.row_sum.as<float>()[r] = base + tree_sum(sums);
  }
}

template <const Isa* isa>
void launch(const ActivationGrad& call, const Context& context) {
  const int64_t rows = call.rows.dims[0];
  const std::vector<int64_t> ends = group_ends(call.group_sizes, rows);
  const HiddenStrips hidden(pinned_or_best(isa), call.activation, call.grad.dims[1]);
  parallel_rows(context.pool, 0, ends.back(), [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) grad_row(call, hidden, r);
  });
  for (const TensorView* result : {&call.result, &call.activated, &call.row_sum}) {
    if (result->present()) zero_rows(context.pool, *result, ends.back(), rows);
  }
}

}  // namespace

const Kernel<ActivationGrad> activation_grad_any_cpu = {"activation_grad_any_cpu", Arch::cpu,    Kind::reference,
                                                        refuses<nullptr>,          no_workspace, launch<nullptr>};
const Kernel<ActivationGrad> activation_grad_any_cpu_plain = {
    "activation_grad_any_cpu_plain", Arch::cpu, Kind::reference, refuses<&kIsaPlain>, no_workspace, launch<&kIsaPlain>};
#if defined(__x86_64__)
const Kernel<ActivationGrad> activation_grad_any_cpu_avx2 = {
    "activation_grad_any_cpu_avx2", Arch::cpu, Kind::reference, refuses<&kIsaAvx2>, no_workspace, launch<&kIsaAvx2>};
const Kernel<ActivationGrad> activation_grad_any_cpu_avx512 = {"activation_grad_any_cpu_avx512",
                                                               Arch::cpu,
                                                               Kind::reference,
                                                               refuses<&kIsaAvx512>,
                                                               no_workspace,
                                                               launch<&kIsaAvx512>};
#endif

}  // namespace grouped
