// Compiled once for each instruction set, GROUPED_ISA naming the namespace (see panel.cc). Plain loops over strips:
// cc/math/activation.h has no branches and no calls here, so compilers make vectors of them.
#include "cc/cpu/panel.h"

namespace grouped {
namespace GROUPED_ISA {
namespace {

template <ActivationKind kKind>
void values(const ActivationSpec spec, const float* __restrict a, const float* __restrict u, int64_t count,
            float* __restrict t) {
  for (int64_t i = 0; i < count; ++i) t[i] = ActivationOf<kKind>::value(spec, a[i], u[i]);
}

template <ActivationKind kKind>
void gradients(const ActivationSpec spec, const float* __restrict a, const float* __restrict u,
               const float* __restrict grad, int64_t count, float* __restrict t, float* __restrict da,
               float* __restrict du) {
  for (int64_t i = 0; i < count; ++i) {
    const typename ActivationOf<kKind>::Grad g = ActivationOf<kKind>::grad(spec, a[i], u[i]);
    t[i] = g.t;
    da[i] = grad[i] * g.da;
    du[i] = grad[i] * g.du;
  }
}

}  // namespace

void activate(const ActivationSpec& spec, const float* a, const float* u, int64_t count, float* t) {
  with_activation(spec.kind, [&](auto kind) { values<kind()>(spec, a, u, count, t); });
}

void activate_grad(const ActivationSpec& spec, const float* a, const float* u, const float* grad, int64_t count,
                   float* t, float* da, float* du) {
  with_activation(spec.kind, [&](auto kind) { gradients<kind()>(spec, a, u, grad, count, t, da, du); });
}

}  // namespace GROUPED_ISA
}  // namespace grouped
