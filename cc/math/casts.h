// bfloat16 and float16 to and from float, one element: exact decode, encode to the nearest (ties to even), subnormals
// and infinities kept, NaN stays NaN with its sign and gets the quiet bit. Integer arithmetic, so neither the rounding
// mode nor flush-to-zero matters. Vector forms of the same bits are in cc/cpu/simd.h.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define GROUPED_HOST_DEVICE __host__ __device__
#else
#define GROUPED_HOST_DEVICE
#endif

namespace grouped {

// NOTE: `static`, not plain `inline`: this header is compiled for several instruction sets in one program, and the
// linker would keep one copy of an inline function for all of them.
GROUPED_HOST_DEVICE static inline uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

GROUPED_HOST_DEVICE static inline float bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

GROUPED_HOST_DEVICE static inline float bf16_to_float(uint16_t code) {
  return bits_float(static_cast<uint32_t>(code) << 16);
}

GROUPED_HOST_DEVICE static inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

GROUPED_HOST_DEVICE static inline float f16_to_float(uint16_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x8000u) << 16;
  const uint32_t magnitude = code & 0x7FFFu;
  if (magnitude > 0x7C00u) return bits_float(sign | 0x7FC00000u | (magnitude << 13));
  if (magnitude == 0x7C00u) return bits_float(sign | 0x7F800000u);
  if (magnitude >= 0x0400u) return bits_float(sign | ((magnitude << 13) + (112u << 23)));
  // A subnormal is magnitude * 2^-24: small integers and powers of two, exact.
  return bits_float(sign | float_bits(static_cast<float>(magnitude) * 5.9604644775390625e-8f));
}

GROUPED_HOST_DEVICE static inline uint16_t float_to_f16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7C00u);  // 2^16 and above
  if (magnitude >= 0x38800000u) {  // normal: rebias, round; a carry runs into the exponent, up to infinity
    return static_cast<uint16_t>(sign | ((magnitude - (112u << 23) + 0x0FFFu + ((magnitude >> 13) & 1u)) >> 13));
  }
  if (magnitude < 0x33000000u) return static_cast<uint16_t>(sign);  // below half of the least subnormal
  const uint32_t shift = 126u - (magnitude >> 23);                  // 14 ... 24
  const uint32_t mantissa = (magnitude & 0x7FFFFFu) | 0x800000u;
  const uint32_t kept = mantissa >> shift;
  const uint32_t rest = mantissa & ((1u << shift) - 1u);
  const uint32_t half = 1u << (shift - 1u);
  return static_cast<uint16_t>(sign | (kept + (rest > half || (rest == half && (kept & 1u)))));
}

}  // namespace grouped
