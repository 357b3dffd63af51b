// What the magnitudes of activated values, and of their gradients, are never above, for a tenth (values) to a fifth
// (gradients) of the instructions that they take by count: what looks for the largest magnitude makes a row's values
// only where they may have a larger one.
//
// activation_bound() in bf16, two values per instruction. A step rounds by at most 2^-9. Constants and the row's scale
// are raised by kSlack, so each factor is a bound itself and is infinite where the exact one is; four more steps, at
// most, are in kSlack once more. kTiny is added to products, so that one that is subnormal, which may lose more, is not
// below the exact one. Steps keep NaN, and an infinite gate gives NaN: the bits of infinities and
// of NaN are above those of all numbers.
#pragma once

#include <cuda_bf16.h>

#include "cc/device/quantize/tiles.cuh"
#include "cc/math/activation_bound.h"

namespace grouped {
namespace device {

// Largest magnitudes, or what these are not above, as bits of floats.
struct Amaxes {
  uint32_t result;     // of act(h) times the row's scale, or of the gradients at both halves
  uint32_t activated;  // of act(h) times the row's scale, with gradients
};

template <ActivationKind kKind, bool kGrad>
class ActivationBounds {
 public:
  __device__ explicit ActivationBounds(const ActivationSpec& spec) {
    const ActivationBound bound = activation_bound<kKind>(spec);
    least_ = raised(bound.least), rise_ = raised(bound.rise), most_ = raised(bound.most);
    offset_ = raised(bound.offset);
  }

  // Of eight columns of a row.
  __device__ Amaxes operator()(const uint4& gate, const uint4& linear, const uint4& grad, float scale) const {
    constexpr bool kGated = is_gated(kKind), kOffset = kKind == ActivationKind::clamped_qgeglu;
    const Pair zero = pair(0.0f), half = raised(0.5f), tiny = pair(kTiny);
    const float row = bounded(scale);
    const Pair factor = raised(row);
    uint32_t largest_grad = 0, largest_value = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Pair a = pair(word_of(gate, i));
      const Pair f = __hmax2_nan(a, __hfma2(a, zero, least_));
      Pair v = pair(1.0f), value = f;
      if constexpr (kGated) {
        v = __habs2(pair(word_of(linear, i)));
        if constexpr (kOffset) v = __hfma2(v, raised(1.0f), offset_);
        value = __hfma2(v, f, tiny);
      }
      largest_value = __vmaxu2(largest_value, bits(value));
      if constexpr (kGrad) {
        Pair slope = __hmin2_nan(__hmax2_nan(__hfma2(a, rise_, half), half), most_);
        slope = kGated ? __hmax2_nan(__hfma2(v, slope, tiny), f) : __hfma2(a, zero, slope);
        const Pair dz = __hfma2(__habs2(pair(word_of(grad, i))), factor, tiny);
        largest_grad = __vmaxu2(largest_grad, bits(__hmul2(dz, slope)));
      }
    }
    const float value = __uint_as_float(both(largest_value) << 16);
    const uint32_t activated = float_bits(__fmul_rn(__fmul_rn(value, row), kSlack)) & kMagnitude;
    if constexpr (!kGrad) return {activated, activated};
    return {float_bits(__fmul_rn(__uint_as_float(both(largest_grad) << 16), kSlack)) & kMagnitude, activated};
  }

 private:
  using Pair = __nv_bfloat162;
  static constexpr float kSlack = 1.01f;
  static constexpr float kTiny = 7.888609e-31f;         // 2^-100
  static constexpr float kMostScale = 16777216.0f;      // 2^24: kTiny times it is still tiny
  static constexpr float kLeastScale = 1.1754944e-38f;  // the least one that is not subnormal

  __device__ static Pair pair(float value) { return __float2bfloat162_rn(value); }
  __device__ static Pair raised(float value) { return pair(__fmul_rn(value, kSlack)); }
  __device__ static Pair pair(uint32_t word) { return *reinterpret_cast<const Pair*>(&word); }
  __device__ static uint32_t bits(Pair value) { return *reinterpret_cast<const uint32_t*>(&value); }
  // A scale whose products with what is a little above zero are bounds as well.
  __device__ static float bounded(float scale) {
    const float magnitude = __uint_as_float(float_bits(scale) & kMagnitude);
    return magnitude <= kMostScale ? fmaxf(magnitude, kLeastScale) : bits_float(kInfinityBits);
  }

  Pair least_, rise_, most_, offset_;
};

}  // namespace device
}  // namespace grouped
