// E2M1 codes by the floating-point adder, whose rounding is the cast's: no comparisons, no shifts of single codes. For
// kernels that are bound by instructions; the bits of `encode<E2M1>` and `encode_e2m1_stochastic` of cc/math/narrow.h.
//
// A code is a place on the line of codes, p(y) = min(2y, y + 2, y/2 + 4, 7) for y >= 0, rounded: neighbours of a code
// are the codes beside it, and even mantissas have even codes. Results are `base + code`, so that codes of several
// values are packed by additions, and what the bases leave is one constant (`pack_codes`).
#pragma once

#include "cc/math/exact.h"

namespace grouped {

#if defined(__CUDA_ARCH__)
// 0 ... 1; NaN is 0.
__device__ static inline float scaled_in_unit(float a, float power) {
  float result;
  asm("mul.rn.sat.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(power));
  return result;
}
__device__ static inline float scaled_add_in_unit(float a, float power, float b) {
  float result;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(power), "f"(b));
  return result;
}
// One rounding: `power` is a power of two.
__device__ static inline float scaled_add(float a, float power, float b) { return __fmaf_rn(a, power, b); }
// Rounded up.
__device__ static inline float add_up(float a, float b) { return __fadd_ru(a, b); }
__device__ static inline float scaled_add_up(float a, float power, float b) { return __fmaf_ru(a, power, b); }
#else
GROUPED_HOST_DEVICE static inline float in_unit(float a) { return a > 0.0f ? a < 1.0f ? a : 1.0f : 0.0f; }
GROUPED_HOST_DEVICE static inline float scaled_in_unit(float a, float power) { return in_unit(fl_mul(a, power)); }
GROUPED_HOST_DEVICE static inline float scaled_add(float a, float power, float b) {
  return fl_add(fl_mul(a, power), b);
}
GROUPED_HOST_DEVICE static inline float scaled_add_in_unit(float a, float power, float b) {
  return in_unit(scaled_add(a, power, b));
}
// The sum to nearest and what that lost, which is exact (Knuth), say where the next number is wanted.
GROUPED_HOST_DEVICE static inline float add_up(float a, float b) {
  const float sum = fl_add(a, b), part = fl_sub(sum, a);
  const float lost = fl_add(fl_sub(a, fl_sub(sum, part)), fl_sub(b, part));
  if (!(lost > 0.0f)) return sum;
  if (sum == 0.0f) return bits_float(1);
  return bits_float(float_bits(sum) + (sum > 0.0f ? 1u : ~0u));
}
GROUPED_HOST_DEVICE static inline float scaled_add_up(float a, float power, float b) {
  return add_up(fl_mul(a, power), b);
}
#endif

constexpr uint32_t kNearestBase = 0x4B7FFFFCu;     // 2^24 - 4
constexpr uint32_t kStochasticBase = 0x4B400000u;  // 1.5 * 2^23

// kNearestBase + the code of y, to nearest, ties to even; y >= 0, or NaN, whose code is then to be mended.
//
// Below 2^24 neighbours are 1 apart, from there on 2. So adding 2 * min(y, 4) to 2^24 - 4 rounds 2y to an integer up to
// y = 2, and to an even one above: y rounded. From y = 4 on that is code 6, and 2 * (y/2 - 2) is added, at most 2,
// in steps of 2. Products are exact, differences of y < 8 too, and the steps of a float have codes one apart.
GROUPED_HOST_DEVICE static inline uint32_t nearest_e2m1(float y) {
  const float low = scaled_add(scaled_in_unit(y, 0.25f), 8.0f, bits_float(kNearestBase));
  return float_bits(scaled_add(scaled_add_in_unit(y, 0.5f, -2.0f), 2.0f, low));
}

// kStochasticBase + the code of y >= 0 (NaN: that of 6), `random` being the 32 bits of `encode_e2m1_stochastic`.
//
// With w = the upper 24 bits of them * 2^-24, the upper neighbour is taken where w < the fractional part of p(y): the
// code is p(y) - w rounded up to an integer. Rounding up twice is rounding up once, and an integer may be added
// between, so each piece of p has its own two sums, and the least of them is the code.
GROUPED_HOST_DEVICE static inline uint32_t stochastic_e2m1(float y, uint32_t random) {
  constexpr float kBase = 12582912.0f;
  const float omega = fl_mul(static_cast<float>(random >> 8), 0x1p-24f);
  const float x = y < 6.0f ? y : 6.0f;
  const uint32_t first = float_bits(add_up(scaled_add_up(x, 2.0f, -omega), kBase));
  const uint32_t second = float_bits(add_up(add_up(x, -omega), kBase + 2.0f));
  const uint32_t third = float_bits(add_up(scaled_add_up(x, 0.5f, -omega), kBase + 4.0f));
  const uint32_t low = first < second ? first : second;
  return low < third ? low : third;
}

// Eight codes in a word, the first lowest, of what the functions above gave.
template <uint32_t kBase>
GROUPED_HOST_DEVICE static inline uint32_t pack_codes(const uint32_t (&found)[8]) {
  uint32_t word = found[7], bases = kBase;
  GROUPED_UNROLL
  for (int i = 6; i >= 0; --i) {
    word = word * 16 + found[i];
    bases = bases * 16 + kBase;
  }
  return word - bases;
}

}  // namespace grouped
