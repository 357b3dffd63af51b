// Every activation: value and derivative, in fp32, for CPU and CUDA alike (numerics 5). `a` is the gate half of a
// hidden row and `u` the linear half; kinds that are not gated read `a` alone. Fused operations are spelled out, so
// that every kernel that recomputes a value gets the bits of the first.
#pragma once

#include <string>

#include "cc/math/casts.h"

namespace grouped {

// The one list of kinds: name, tag, whether it has a linear half.
#define GROUPED_ACTIVATIONS(X)              \
  X("relu", relu, false)                    \
  X("srelu", srelu, false)                  \
  X("silu", silu, false)                    \
  X("gelu_tanh", gelu_tanh, false)          \
  X("gelu_erf", gelu_erf, false)            \
  X("quick_gelu", quick_gelu, false)        \
  X("swiglu", swiglu, true)                 \
  X("geglu_tanh", geglu_tanh, true)         \
  X("geglu_erf", geglu_erf, true)           \
  X("quick_geglu", quick_geglu, true)       \
  X("clamped_qgeglu", clamped_qgeglu, true) \
  X("situ_glu", situ_glu, true)

enum class ActivationKind : int {
#define X(name, tag, gated) tag,
  GROUPED_ACTIVATIONS(X)
#undef X
};

// Whether there is such a kind; sets it.
inline bool activation_named(const std::string& name, ActivationKind* kind) {
#define X(text, tag, gated)      \
  if (name == text) {            \
    *kind = ActivationKind::tag; \
    return true;                 \
  }
  GROUPED_ACTIVATIONS(X)
#undef X
  return false;
}

GROUPED_HOST_DEVICE constexpr bool is_gated(ActivationKind kind) {
  switch (kind) {
#define X(name, tag, gated) \
  case ActivationKind::tag: \
    return gated;
    GROUPED_ACTIVATIONS(X)
#undef X
  }
  return false;
}

}  // namespace grouped
