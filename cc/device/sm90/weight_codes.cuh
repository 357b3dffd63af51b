// Codes of weights in registers, as pairs of bfloat16: bits apart by masks, then one multiplication with the scale,
// which has what the bits lack of the exponent. Exact wherever codes times scales are bfloat16 (numerics 4).
//
// Which k a lane owns, and how they meet the rows of the other operand, is in layout_codes.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "cc/device/common/elements.cuh"
#include "cc/device/sm90/layout_codes.cuh"
#include "cc/math/code_pairs.h"

namespace grouped::sm90 {

__device__ inline uint32_t times(uint32_t pair, uint32_t factor) {
  const __nv_bfloat162 product =
      __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair), *reinterpret_cast<const __nv_bfloat162*>(&factor));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// --- scales ---

using pairs::kE4M3Shift;
static_assert(Codes<true>::kBias - kE4M3Shift == 118, "the exponent below");

// Factors, as pairs of bfloat16, that make values of the bits above: of parts 0 and 1, and of 2 and 3. They come from a
// lane's scale codes of a row and slab. Scales of E8M0 are exponents; where the product of 2^kBias and one is no
// bfloat16, or the scale is NaN, it takes a second multiplication. That cannot be where no scale is large, 2 or more.
template <Scale kScale, int kBias>
struct Factors {  // codes alone, or float32 scales, which multiply sums
  static constexpr bool kLarge = false;
  static __device__ void make(uint32_t, uint32_t (&to)[2]) { to[0] = to[1] = (127 + kBias) * 0x00800080u; }
};
template <int kBias>
struct Factors<Scale::e8m0, kBias> {
  static constexpr bool kLarge = true;
  static constexpr uint32_t kLargest = 254 - kBias, kExponent = 0x00800080u;  // of two bfloat16
  static_assert(kLargest >= 127, "what is not large takes one multiplication");
  static __device__ void make(uint32_t code, uint32_t (&to)[2]) {
    to[0] = to[1] = code * kExponent + kBias * kExponent;
  }
  // Of any scale: the first and the second factor.
  static __device__ void make_both(uint32_t code, uint32_t (&to)[2], uint32_t& second) {
    code &= 0xff;
    make(min(code, kLargest), to);
    second = code == 255 ? 0x7fc07fc0u : (max(code, kLargest) - kLargest + 127) * kExponent;
  }
};
template <int kBias>
struct Factors<Scale::e4m3, kBias> {
  static constexpr bool kLarge = false;
  static __device__ void make(uint32_t codes, uint32_t (&to)[2]) {
    const __half2 two(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3));
    const float first = __low2float(two) * 0x1p118f, second = __high2float(two) * 0x1p118f;
    to[0] = device::packed(first, first, DType::bf16);
    to[1] = device::packed(second, second, DType::bf16);
  }
};

template <int kBias>
struct Factors<Scale::e8m0_lines, kBias> : Factors<Scale::e8m0, kBias> {};
template <int kBias>
struct Factors<Scale::e4m3_lines, kBias> : Factors<Scale::e4m3, kBias> {};

}  // namespace grouped::sm90
