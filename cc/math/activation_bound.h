// Upper bounds of activations, for what looks for their largest magnitudes (cc/device/quantize/activation_bounds.cuh).
#pragma once

#include <limits>

#include "cc/math/activation.h"

namespace grouped {

// What the magnitudes of a value and its derivatives are never above: |t| <= f v, |dt/da| <= slope v and |dt/du| <= f,
// where f = max(a, least), slope = 1/2 + rise a, but at least 1/2 and at most `most`, and v = |u| + offset, or 1
// without a linear half. NaN where nothing is known. test_bounds_of_activations tries all gates.
struct ActivationBound {
  float least, rise, most, offset;
};

template <ActivationKind kKind>
GROUPED_MATH ActivationBound activation_bound(const ActivationSpec& spec) {
  using K = ActivationKind;
  // f' - 1/2 is odd, so its rise at 0 is its largest; below 0 the magnitude of f' is largest at 0.
  constexpr float kSiluLeast = 0.2785f, kSiluMost = 1.1f;
  if constexpr (kKind == K::silu || kKind == K::swiglu || kKind == K::silu_clamped_glu || kKind == K::situ_glu) {
    return {kSiluLeast, 0.5f, kSiluMost, 0.0f};
  }
  if constexpr (kKind == K::gelu_tanh || kKind == K::gelu_erf || kKind == K::geglu_tanh || kKind == K::geglu_erf) {
    return {0.1705f, 0.8f, 1.13f, 0.0f};
  }
  if constexpr (kKind == K::relu) return {0.0f, std::numeric_limits<float>::infinity(), 1.0f, 0.0f};
  if constexpr (kKind == K::quick_gelu || kKind == K::quick_geglu || kKind == K::clamped_qgeglu) {
    const float offset = kKind == K::clamped_qgeglu ? activation_math::magnitude(spec.offset) : 0.0f;
    if (spec.alpha > 0 && spec.alpha <= std::numeric_limits<float>::max()) {
      return {kSiluLeast / spec.alpha, 0.5f * spec.alpha, kSiluMost, offset};
    }
  }
  constexpr float kUnknown = std::numeric_limits<float>::quiet_NaN();
  return {kUnknown, kUnknown, kUnknown, kUnknown};
}

}  // namespace grouped
