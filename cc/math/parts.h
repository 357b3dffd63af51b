// A float32 as the sum of three bfloat16 of 8 bits each: the leading bits, cut off, three times. Nothing overflows,
// every difference is exact, and the sum is the value, but for bits below the smallest bfloat16, 2^-133.
#pragma once

#include "cc/math/exact.h"

namespace grouped {

constexpr int kMostParts = 6;  // that one call stores: the pairs of parts whose product counts in fp32

struct Parts {
  uint16_t bits[3];  // the largest first
};

// Infinities and NaN have one part, so that products with them are those of the value.
GROUPED_HOST_DEVICE static inline Parts parts_of(float value) {
  Parts parts = {};
  if (magnitude_bits(value) >= kInfinityBits) {
    const bool nan = is_nan_bits(magnitude_bits(value));
    parts.bits[0] = static_cast<uint16_t>((nan ? kNanBits : float_bits(value)) >> 16);
    return parts;
  }
  float left = value;
  GROUPED_UNROLL
  for (int i = 0; i < 3; ++i) {
    const uint32_t leading = float_bits(left) & 0xFFFF0000u;
    parts.bits[i] = static_cast<uint16_t>(leading >> 16);
    left = fl_sub(left, bits_float(leading));
  }
  return parts;
}

// Which part is where: `order` has one decimal digit per place, 1 for the largest part.
struct PartOrder {
  int count;
  uint8_t part[kMostParts];  // 0 to 2
};

// False where a digit is none of 1 to 3, or there are too many.
inline bool read_order(int64_t order, PartOrder* result) {
  int64_t digits[kMostParts];
  int count = 0;
  for (; order > 0; order /= 10) {
    if (count == kMostParts || order % 10 < 1 || order % 10 > 3) return false;
    digits[count++] = order % 10;
  }
  result->count = count;
  for (int i = 0; i < count; ++i) result->part[i] = static_cast<uint8_t>(digits[count - 1 - i] - 1);
  return count > 0;
}

}  // namespace grouped
