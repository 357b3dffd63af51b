// The narrow element types, numerics 2.1: decode, saturating encode to the nearest (ties to even), stochastic rounding.
// E8M0 represents powers of two and is a scale only; its encoding is a rule of cc/math/scales.h.
//
// NaN is written as one code whatever its sign; everything above the largest finite value, infinity included, becomes
// that value; subnormals and the sign of zero are kept. The bits are those of PTX `cvt.rn.satfinite`. Loops over the
// host forms vectorise: no branches, no variable shifts, no calls.
#pragma once

#include "cc/math/exact.h"

namespace grouped {

struct E4M3 {
  static constexpr int kMantissaBits = 3, kBias = 7, kBits = 8;
  static constexpr uint32_t kMaxCode = 0x7E, kNanCode = 0x7F, kInfinityCode = 0xFF;  // no infinity
  static constexpr float kMax = 448.0f;
};

struct E5M2 {
  static constexpr int kMantissaBits = 2, kBias = 15, kBits = 8;
  static constexpr uint32_t kMaxCode = 0x7B, kNanCode = 0x7F, kInfinityCode = 0x7C;
  static constexpr float kMax = 57344.0f;
};

// NOTE: code 7 is 6, the largest value. A NaN is told by the scale of its block alone.
struct E2M1 {
  static constexpr int kMantissaBits = 1, kBias = 1, kBits = 4;
  static constexpr uint32_t kMaxCode = 0x7, kNanCode = 0x7, kInfinityCode = 0xFF;
  static constexpr float kMax = 6.0f;
};

template <class T>
GROUPED_HOST_DEVICE static inline uint8_t encode(float x) {
  constexpr int kDropped = 23 - T::kMantissaBits;
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - T::kBias) << 23;
  // Added to a value below the least normal, it leaves a multiple of the least subnormal in the low bits of the sum.
  constexpr uint32_t kShifter = static_cast<uint32_t>(151 - T::kBias - T::kMantissaBits) << 23;
  const uint32_t bits = float_bits(x);
  const int32_t magnitude = static_cast<int32_t>(bits & 0x7FFFFFFFu);
  const uint32_t rounding = (1u << (kDropped - 1)) - 1u + ((static_cast<uint32_t>(magnitude) >> kDropped) & 1u);
  const int32_t normal = static_cast<int32_t>((static_cast<uint32_t>(magnitude) - kRebias + rounding) >> kDropped);
  const float shifted = fl_add(bits_float(static_cast<uint32_t>(magnitude)), bits_float(kShifter));
  const int32_t subnormal = static_cast<int32_t>(float_bits(shifted) - kShifter);
  int32_t code = magnitude < static_cast<int32_t>(kRebias + (1u << 23)) ? subnormal : normal;
  code = code < static_cast<int32_t>(T::kMaxCode) ? code : static_cast<int32_t>(T::kMaxCode);
  code |= static_cast<int32_t>((bits >> 31) << (T::kBits - 1));
  return static_cast<uint8_t>(magnitude > static_cast<int32_t>(kInfinityBits) ? T::kNanCode : code);
}

// Bits above the type's are ignored.
template <class T>
GROUPED_HOST_DEVICE static inline float decode(uint8_t code) {
  constexpr int kDropped = 23 - T::kMantissaBits;
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - T::kBias) << 23;
  constexpr uint32_t kLeastNormal = kRebias + (1u << 23);
  const uint32_t magnitude = code & ((1u << (T::kBits - 1)) - 1u);
  const uint32_t sign = static_cast<uint32_t>(code >> (T::kBits - 1)) << 31;
  const uint32_t bits = (magnitude << kDropped) + kRebias;
  // A subnormal is read as if it were of the least normal binade, whose start is then taken away: exact.
  const float below = fl_sub(bits_float(bits + (1u << 23)), bits_float(kLeastNormal));
  uint32_t value = bits < kLeastNormal ? float_bits(below) : bits;
  value = magnitude == T::kInfinityCode ? kInfinityBits : value;
  value |= sign;
  constexpr uint32_t kLastNumber = T::kInfinityCode < T::kNanCode ? T::kInfinityCode : T::kMaxCode;
  return bits_float(magnitude > kLastNumber ? kNanBits : value);
}

// Two codes in 16 bits, `low` in the low byte: one instruction where the machine has it.
template <class T>
GROUPED_HOST_DEVICE static inline uint16_t encode_pair(float low, float high) {
  static_assert(T::kBits == 8, "bytes");
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t codes;
  if constexpr (T::kMantissaBits == 3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  }
  return codes;
#else
  return static_cast<uint16_t>(encode<T>(low) | encode<T>(high) << 8);
#endif
}

// Element 2i of a row has the low half of byte i. An odd end is filled with code 0.
GROUPED_HOST_DEVICE static inline uint8_t pack_e2m1(uint8_t even, uint8_t odd) {
  return static_cast<uint8_t>((even & 0xFu) | odd << 4);
}
GROUPED_HOST_DEVICE static inline uint8_t unpack_e2m1(uint8_t byte, int odd) {
  return static_cast<uint8_t>(odd ? byte >> 4 : byte & 0xFu);
}

// 2^(code - 127) of a code of 8 bits; 255 is NaN.
GROUPED_HOST_DEVICE static inline float decode_e8m0(uint32_t code) {
  const uint32_t bits = code == 0 ? 0x00400000u : code << 23;
  return bits_float(code == 0xFF ? kNanBits : bits);
}

// Away from zero with the probability of the distance from the lower neighbour, in units of the distance between both:
// `random` is 32 random bits, of which the upper 24 count. A value on the grid stays.
GROUPED_HOST_DEVICE static inline uint8_t encode_e2m1_stochastic(float x, uint32_t random) {
  const uint32_t bits = float_bits(x);
  float magnitude = bits_float(bits & 0x7FFFFFFFu);
  const bool nan = is_nan_bits(bits & 0x7FFFFFFFu);
  magnitude = magnitude < E2M1::kMax ? magnitude : E2M1::kMax;
  // Lower neighbour and distance of the two: 0 ... 2 in steps of 1/2, 2 ... 4 of 1, 4 and 6. All of it is exact.
  const float steps = magnitude < 2.0f ? 2.0f : magnitude < 4.0f ? 1.0f : 0.5f;  // per unit
  const float base = magnitude < 2.0f ? 0.0f : magnitude < 4.0f ? 2.0f : 4.0f;
  const uint32_t base_code = magnitude < 2.0f ? 0u : magnitude < 4.0f ? 4u : 6u;
  const float scaled = fl_mul(fl_sub(magnitude, base), steps);
  const uint32_t whole = static_cast<uint32_t>(scaled);
  const float rest = fl_sub(scaled, static_cast<float>(whole));
  const float omega = fl_mul(static_cast<float>(random >> 8), 0x1p-24f);
  const uint32_t code = base_code + whole + (omega < rest ? 1u : 0u);
  return static_cast<uint8_t>(nan ? E2M1::kNanCode : code | (bits >> 31) << 3);
}

}  // namespace grouped
