// Codes of weights as pairs of bfloat16 in their order in memory, for kernels that widen codes on their way to
// the tensor cores. Bits are taken apart by masks and one integer multiplication, which leaves an exponent that is too
// small by a constant; one multiplication of two bfloat16 numbers with a power of two or a scale makes it good. The
// results are code * scale, rounded once to bfloat16, as widening gives them (numerics 4).
#pragma once

#include <cstdint>

#include "cc/math/casts.h"
#include "cc/math/exact.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#endif

namespace grouped::pairs {

// Codes of E2M1, two per byte, or of E4M3; and what multiplies them within a row.
enum class Codes { mxfp4, nvfp4, mxfp8, e4m3 };

constexpr bool is_nibbles(Codes codes) { return codes == Codes::mxfp4 || codes == Codes::nvfp4; }
constexpr int bias_of(Codes codes) { return is_nibbles(codes) ? 126 : 120; }  // bits are 2^-bias of the values
// Elements that share a scale; 0: all do, and it multiplies sums.
constexpr int block_of(Codes codes) { return codes == Codes::e4m3 ? 0 : codes == Codes::nvfp4 ? 16 : 32; }

// Scales of 32 codes.
constexpr int scales_of_32(Codes codes) { return block_of(codes) == 0 ? 0 : 32 / block_of(codes); }

// Kernels that have one product for a pair and its scale take E4M3 scales times 2^118 instead of 2^126, which may
// exceed bfloat16's range, and multiply the sums by 2^8 at the end.
constexpr int kE4M3Shift = 8;

constexpr uint32_t kBoth = 0x00010001;     // one in each half
constexpr uint32_t kNaN = 0x7fc0 * kBoth;  // two of them

// Four of the bytes of two words, a digit of `selector` each: its low three bits name the byte; with the fourth one,
// eight times that byte's sign.
GROUPED_HOST_DEVICE inline uint32_t chosen_bytes(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef __CUDA_ARCH__
  uint32_t chosen;
  asm("prmt.b32 %0, %1, %2, %3;\n" : "=r"(chosen) : "r"(low), "r"(high), "r"(selector));
  return chosen;
#else
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t chosen = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = selector >> (4 * i) & 0xf, byte = static_cast<uint32_t>(bytes >> (8 * (digit & 7)) & 0xff);
    chosen |= (digit & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << (8 * i);
  }
  return chosen;
#endif
}

// Two products, each rounded once.
GROUPED_HOST_DEVICE inline uint32_t times(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  const __nv_bfloat162 product =
      __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&product);
#else
  uint32_t products = 0;
  for (int i = 0; i < 32; i += 16) {
    const float x = bf16_to_float(static_cast<uint16_t>(a >> i)), y = bf16_to_float(static_cast<uint16_t>(b >> i));
    products |= uint32_t{float_to_bf16(x * y)} << i;
  }
  return products;
#endif
}

// Of a power of two, from -126 on, in both halves.
GROUPED_HOST_DEVICE constexpr uint32_t power_of_two(int exponent) {
  return static_cast<uint32_t>(exponent + 127) * (kBoth << 7);
}

// 8 codes of a word as pairs (0 1), (2 3), (4 5), (6 7). The even ones go to the low halves: both are cut out, a byte
// each, and brought together by a choice of bytes, whose other bytes are signs of bytes without one. The multiplication
// makes two copies of a code: one has its sign at bit 15, one its magnitude at bits 8 to 6.
GROUPED_HOST_DEVICE inline void from_nibbles(uint32_t word, uint32_t (&to)[4]) {
  const uint32_t even = word & 0x0f0f0f0fu, odd = word >> 4 & 0x0f0f0f0fu;
  for (uint32_t i = 0; i < 4; ++i) to[i] = chosen_bytes(even, odd, 0x8480 + 0x1111 * i) * 0x1040 & 0x81c081c0u;
}

// 4 codes of a word as pairs (0 1), (2 3). Shifted by 4, a code has its sign at bit 11: adding 0x7800 carries one that
// is set to bit 15.
GROUPED_HOST_DEVICE inline void from_bytes(uint32_t word, uint32_t& first, uint32_t& second) {
  first = (chosen_bytes(word, 0, 0x4140) * 16 + 0x7800 * kBoth) & 0x87f087f0u;
  second = (chosen_bytes(word, 0, 0x4342) * 16 + 0x7800 * kBoth) & 0x87f087f0u;
}
// Of E4M3: the highest bits of the bytes that are NaN, whose bits above are those of 480.
GROUPED_HOST_DEVICE inline uint32_t nan_bytes(uint32_t word) {
  return ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
}

// What multiplies a pair: `first`, and in a second product `second`, which is one where `needs_second` does not hold.
struct Factor {
  uint32_t first, second;
};

// By its scale's code. An E8M0 scale is an exponent: the product of it and 2^bias is one factor unless it is too large,
// or the scale is NaN, which is rare. An E4M3 scale is a factor of its own, since its product with 2^126 may be too
// large.
template <Codes kCodes>
constexpr uint32_t largest_of_one() {
  return static_cast<uint32_t>(254 - bias_of(kCodes));
}
// Whether that is a question of the scale: with NVFP4 all need the second product, without blocks none.
constexpr bool may_need_second(Codes codes) { return codes == Codes::mxfp4 || codes == Codes::mxfp8; }
template <Codes kCodes>
GROUPED_HOST_DEVICE constexpr bool needs_second(uint32_t scale) {
  return may_need_second(kCodes) ? scale > largest_of_one<kCodes>() : kCodes == Codes::nvfp4;
}
template <Codes kCodes>
GROUPED_HOST_DEVICE inline Factor factor_of(uint32_t scale) {
  constexpr int kBias = bias_of(kCodes);
  if constexpr (kCodes == Codes::e4m3) {
    return {power_of_two(kBias), power_of_two(0)};
  } else if constexpr (kCodes == Codes::nvfp4) {
    uint32_t bits, none;
    from_bytes(scale * 0x0101, bits, none);
    const uint32_t value = times(bits, power_of_two(120));
    return {power_of_two(kBias), (scale & 0x7f) == 0x7f ? kNaN : value};
  } else {
    constexpr uint32_t kLargest = largest_of_one<kCodes>(), kExponent = kBoth << 7;
    const uint32_t first = scale < kLargest ? scale : kLargest;
    return {(first + kBias) * kExponent, scale == 255 ? kNaN : (scale - first + 127) * kExponent};
  }
}

// The pairs of kWords words that share a scale; kTwice: with the second product.
template <Codes kCodes, int kWords, bool kTwice>
GROUPED_HOST_DEVICE inline void widen(const uint32_t* words, const Factor& factor,
                                      uint32_t (&to)[kWords * (is_nibbles(kCodes) ? 4 : 2)]) {
  constexpr int kPairs = is_nibbles(kCodes) ? 4 : 2;  // of a word
  uint32_t nan = 0;
  for (int w = 0; w < kWords; ++w) {
    if constexpr (is_nibbles(kCodes)) {
      from_nibbles(words[w], reinterpret_cast<uint32_t (&)[4]>(to[kPairs * w]));
    } else {
      from_bytes(words[w], to[kPairs * w], to[kPairs * w + 1]);
      nan |= nan_bytes(words[w]);
    }
  }
  for (int i = 0; i < kWords * kPairs; ++i) {
    to[i] = times(to[i], factor.first);
    if constexpr (kTwice) to[i] = times(to[i], factor.second);
  }
  if (!is_nibbles(kCodes) && nan != 0) {
    for (int w = 0; w < kWords; ++w) {
      const uint32_t found = nan_bytes(words[w]) >> 7;
      to[kPairs * w] |= chosen_bytes(found, 0, 0x4140) * 0x7fc0;
      to[kPairs * w + 1] |= chosen_bytes(found, 0, 0x4342) * 0x7fc0;
    }
  }
}

}  // namespace grouped::pairs
