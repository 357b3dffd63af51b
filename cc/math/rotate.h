// What is done to values before a cast: the 16-point Hadamard rotation with random signs, and the counter-based random
// stream of stochastic rounding. Both depend on the element alone, not on threads, tiles or layout.
#pragma once

#include "cc/math/exact.h"

namespace grouped {

constexpr int kRotation = 16;
constexpr uint32_t kRotationSigns = 0xD7E8;  // bit i set: value i is negated. + + + - + - - - - - - + - + - -

// v <- H (signs * v) / 4, H the Sylvester-Hadamard matrix: signs, four stages of (a + b, a - b) with strides 1, 2, 4,
// 8, a quarter, in this order and in fp32. Its own inverse but for the signs; cancels in a product of two rotated
// operands.
GROUPED_HOST_DEVICE static inline void rotate(float* v) {
  GROUPED_UNROLL
  for (int i = 0; i < kRotation; ++i) v[i] = (kRotationSigns >> i & 1u) ? -v[i] : v[i];
  GROUPED_UNROLL
  for (int stride = 1; stride < kRotation; stride *= 2) {
    GROUPED_UNROLL
    for (int i = 0; i < kRotation; ++i) {
      if (i & stride) continue;
      const float a = v[i], b = v[i + stride];
      v[i] = fl_add(a, b);
      v[i + stride] = fl_sub(a, b);
    }
  }
  GROUPED_UNROLL
  for (int i = 0; i < kRotation; ++i) v[i] = fl_mul(v[i], 0.25f);
}

struct Words4 {
  uint32_t word[4];
};

// Philox4x32-10 (Salmon et al., SC 2011): four random words for a counter under a key.
GROUPED_HOST_DEVICE static inline Words4 philox(Words4 counter, uint64_t key) {
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  Words4 c = counter;
  GROUPED_UNROLL
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = static_cast<uint64_t>(0xD2511F53u) * c.word[0];
    const uint64_t second = static_cast<uint64_t>(0xCD9E8D57u) * c.word[2];
    c = {{static_cast<uint32_t>(second >> 32) ^ c.word[1] ^ key0, static_cast<uint32_t>(second),
          static_cast<uint32_t>(first >> 32) ^ c.word[3] ^ key1, static_cast<uint32_t>(first)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

// The key that a call's two words hold, the low one first.
static inline uint64_t key_of(const uint32_t* words) { return static_cast<uint64_t>(words[1]) << 32 | words[0]; }

// The words of columns 4i ... 4i + 3, i = column / 4, of a row inside its group. Stream: 0 for the form along columns,
// 1 for the one along rows, plus twice the number of the call.
GROUPED_HOST_DEVICE static inline Words4 random_words(uint64_t key, uint32_t column, uint32_t row, uint32_t group,
                                                      uint32_t stream) {
  return philox({{column / 4, row, group, stream}}, key);
}

}  // namespace grouped
