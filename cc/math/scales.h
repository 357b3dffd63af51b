// From the largest magnitude of a group or block to its scales: one function for each rule of numerics 2. Values are
// multiplied by the scale e before the cast; what is stored is always its inverse d, scale_inv: value = code * d.
#pragma once

#include "cc/math/narrow.h"

namespace grouped {

// The larger of `amax` and |x|, as bits: exact and independent of order. Infinity beats numbers, NaN beats infinity. An
// empty set has 0.
GROUPED_HOST_DEVICE static inline uint32_t amax_with(uint32_t amax, float x) {
  const uint32_t magnitude = magnitude_bits(x);
  return magnitude > amax ? magnitude : amax;
}

// --- fp32 scales (numerics 2.2) ---

constexpr float kOverflowScaleBf16 = 3.38953138925153547590e38f;  // largest finite bf16

struct Fp32ScaleRule {
  float max;             // largest finite value of the element type
  float eps;             // amax counts as at least this; 0: no floor
  float overflow_scale;  // e where max / amax is infinite: kFloatMax; kOverflowScaleBf16 for blocks of bf16 sources
  bool power_of_two;     // e is rounded down to a power of two
};

// 2^(exponent - 127), for exponents from 1 on; the largest finite power of two above 254.
GROUPED_HOST_DEVICE static inline float power_of_two(int exponent) {
  return bits_float(static_cast<uint32_t>(exponent > 254 ? 254 : exponent) << 23);
}

// max / a rounded down to a power of two, as integers: a quotient is below 2^n exactly if its mantissas say so, for
// rounding never carries it there. Overflow gives the power of two below any overflow_scale.
GROUPED_HOST_DEVICE static inline float power_of_two_quotient(float max, float a) {
  const uint32_t m = float_bits(max), v = float_bits(a);
  const int smaller = (v & 0x7FFFFFu) > (m & 0x7FFFFFu) ? 1 : 0;
  return power_of_two(static_cast<int>(m >> 23) - static_cast<int>(v >> 23) + 127 - smaller);
}

GROUPED_HOST_DEVICE static inline float fp32_scale(float amax, const Fp32ScaleRule& rule) {
  float a = amax < rule.eps ? rule.eps : amax;  // false for NaN
  if (a == 0.0f || float_bits(a) >= kInfinityBits) return 1.0f;
  if (rule.power_of_two) return power_of_two_quotient(rule.max, a);
  const float e = fl_div(rule.max, a);
  return float_bits(e) == kInfinityBits ? rule.overflow_scale : e;
}

// Of fp32 scales, per-group NVFP4 scales and delayed scaling. May be subnormal.
GROUPED_HOST_DEVICE static inline float scale_inv(float e) { return fl_div(1.0f, e); }

// The same of a normal power of two.
GROUPED_HOST_DEVICE static inline float scale_inv_of_power_of_two(float e) {
  const uint32_t bits = float_bits(e);
  return bits_float(bits == 254u << 23 ? 0x00400000u : (254u << 23) - bits);
}

// --- E8M0 (numerics 2.3) ---

// fl(1 / max): it gives the same code as a division for every fp32 value.
template <class T>
GROUPED_HOST_DEVICE constexpr uint32_t reciprocal_of_max() {
  return T::kBits == 4 ? 0x3E2AAAABu : T::kMantissaBits == 3 ? 0x3B124925u : 0x37924925u;
}

// Of a ratio amax / max: 127 + its binary logarithm, rounded UP, so that no scaled value exceeds the type's largest.
// Rounding to the nearest or down, as other E8M0 casts do, would saturate.
GROUPED_HOST_DEVICE static inline uint8_t e8m0_code_of_ratio(float ratio) {
  const uint32_t v = float_bits(ratio);
  if (v > kInfinityBits) return 255;
  if (v == kInfinityBits) return 254;
  const uint32_t exponent = v >> 23, mantissa = v & 0x7FFFFFu;
  if (exponent == 254 || (exponent == 0 && mantissa <= 0x400000u)) return static_cast<uint8_t>(exponent);
  return static_cast<uint8_t>(exponent + (mantissa != 0));
}

template <class T>
GROUPED_HOST_DEVICE static inline uint8_t e8m0_code(float amax) {
  return e8m0_code_of_ratio(fl_mul(amax, bits_float(reciprocal_of_max<T>())));
}

// 2^(127 - code).
GROUPED_HOST_DEVICE static inline float e8m0_scale(uint8_t code) {
  if (code == 255) return bits_float(kNanBits);
  return bits_float(code == 254 ? 0x00400000u : static_cast<uint32_t>(254 - code) << 23);
}

// --- NVFP4: an E4M3 scale per block, an fp32 scale per group (numerics 2.5) ---

constexpr float kNvfp4Range = 2688.0f;             // 448 * 6: what a group's amax is mapped to
constexpr float kFourOverSixRange = 1536.0f;       // 256 * 6: leaves room for block scales 1.5 times as large
constexpr float kSixth = 0.16666667163372039795f;  // fl(1/6)

// e_g.
GROUPED_HOST_DEVICE static inline float nvfp4_group_scale(float amax, float range) {
  if (amax == 0.0f || float_bits(amax) >= kInfinityBits) return 1.0f;
  return at_most_float_max(fl_div(range, amax));
}

// s_b, an E4M3 code. `stretch` is 1, or 1.5 for the second candidate of 4over6.
GROUPED_HOST_DEVICE static inline uint8_t nvfp4_block_scale_inv(float amax, float group_scale, float stretch) {
  return encode<E4M3>(fl_mul(stretch, fl_mul(amax, fl_mul(group_scale, kSixth))));
}

// e_b. A NaN scale gives NaN, so that every code of the block is NaN's.
GROUPED_HOST_DEVICE static inline float nvfp4_block_scale(uint8_t block_scale_inv, float group_scale_inv) {
  return at_most_float_max(fl_div(1.0f, fl_mul(decode<E4M3>(block_scale_inv), group_scale_inv)));
}

// The value of a code: the first product is exact.
GROUPED_HOST_DEVICE static inline float nvfp4_value(uint8_t code, uint8_t block_scale_inv, float group_scale_inv) {
  return fl_mul(fl_mul(decode<E2M1>(code), decode<E4M3>(block_scale_inv)), group_scale_inv);
}

// 4over6: what a candidate scale costs `count` values of one row of a block, `step` apart, summed left to right. The
// candidate with the smaller sum is kept, the first if they are equal (or NaN).
GROUPED_HOST_DEVICE static inline float nvfp4_row_error(const float* values, int64_t step, int count,
                                                        uint8_t block_scale_inv, float group_scale_inv, bool squares) {
  const float e = nvfp4_block_scale(block_scale_inv, group_scale_inv);
  float sum = 0.0f;
  for (int i = 0; i < count; ++i) {
    const float x = values[i * step];
    const float error = fl_sub(nvfp4_value(encode<E2M1>(fl_mul(x, e)), block_scale_inv, group_scale_inv), x);
    sum = fl_add(sum, squares ? fl_mul(error, error) : bits_float(magnitude_bits(error)));
  }
  return sum;
}

// Sums of the 16 rows of a 2-D block, added pairwise at distance 8, 4, 2, 1. Destroys `rows`.
GROUPED_HOST_DEVICE static inline float nvfp4_block_error(float* rows) {
  for (int distance = 8; distance; distance /= 2) {
    for (int i = 0; i < distance; ++i) rows[i] = fl_add(rows[i], rows[i + distance]);
  }
  return rows[0];
}

// --- delayed scaling (numerics 2.5) ---

// Whether the step of one (role, group) leaves scale and history as they are but for slot 0, which is cleared: the
// newest amax is zero, or none that is finite.
GROUPED_HOST_DEVICE static inline bool delayed_keeps(float newest) {
  return newest == 0.0f || (float_bits(newest) & kInfinityBits) == kInfinityBits;
}

// The new scale. `peak` are the bits of the largest magnitude; `max` is the type's largest value * 2^-margin.
GROUPED_HOST_DEVICE static inline float delayed_scale(uint32_t peak, float max) {
  return at_most_float_max(fl_div(max, bits_float(peak)));
}

// The step of one (role, group): from history in[0 .. length), elements `stride` apart, slot 0 live, to `out`, which
// may be `in`, and the new scale.
GROUPED_HOST_DEVICE static inline float delayed_update(const float* in, float* out, int64_t length, int64_t stride,
                                                       float scale, float max, bool most_recent) {
  const float newest = in[0];
  const bool keep = delayed_keeps(newest);
  uint32_t peak = magnitude_bits(newest);
  for (int64_t i = 1; i < length; ++i) {
    const float next = in[i * stride];
    if (!most_recent) peak = amax_with(peak, next);
    if (keep) {
      out[i * stride] = next;
    } else if (i > 1) {
      out[(i - 1) * stride] = next;
    }
  }
  out[0] = 0.0f;
  if (keep) return scale;
  if (length > 1) out[(length - 1) * stride] = newest;
  return delayed_scale(peak, max);
}

}  // namespace grouped
