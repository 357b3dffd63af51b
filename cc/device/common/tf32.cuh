// fp32 numbers as operands of tf32 tensor cores, which read the sign, 8 bits of exponent and 10 of mantissa and ignore
// the 13 bits below: one rounded operand, or two whose sum is the number to 23 bits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace grouped {
namespace device {

constexpr uint32_t kTf32Ignored = 0x1fff;       // bits that tensor cores do not read
constexpr uint32_t kTf32HalfStep = 0x1000;      // added before they are dropped: nearest, ties away
constexpr uint32_t kTf32RoundsUp = 0x7f7ff000;  // the least magnitude that would round to infinity

__device__ inline bool rounds_to_finite(uint32_t bits) {
  return fabsf(__uint_as_float(bits)) < __uint_as_float(kTf32RoundsUp);
}

// Rounded; a finite number stays finite and a NaN a NaN, whatever its bits.
__device__ inline uint32_t as_tf32(uint32_t bits) {
  const float a = __uint_as_float(bits);
  return rounds_to_finite(bits) ? bits + kTf32HalfStep
                                : __float_as_uint(__fadd_rn(a, 0.0f));  // gives the canonical NaN
}

// a = high + low with at most 2^-23 |a| lost, for products low high' + high low' + high high'. What does not round to a
// finite number is `low`, beside a high part of 1 that carries the sign: so no infinity meets the zero or the other
// sign of a remainder, two infinities have an infinite product, and the largest finite numbers keep 11 bits.
struct Tf32Parts {
  uint32_t high, low;
};
__device__ inline Tf32Parts split_tf32(uint32_t bits) {
  constexpr uint32_t kSign = 0x80000000, kOne = 0x3f800000;
  const uint32_t high = rounds_to_finite(bits) ? (bits + kTf32HalfStep) & ~kTf32Ignored : (bits & kSign) | kOne;
  return {high, __float_as_uint(__fsub_rn(__uint_as_float(bits), __uint_as_float(high)))};
}

}  // namespace device
}  // namespace grouped
