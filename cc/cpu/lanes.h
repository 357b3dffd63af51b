// Dot products of rows that are read in strips. The order of their sums is a promise about bits: lane j of kSums adds
// the products of a strip's elements j, j + kSums, ..., strip after strip, and the lanes are added as a balanced tree.
#pragma once

#include <cstdint>

#include "cc/cpu/formats.h"

namespace grouped {

constexpr int64_t kSums = 16;
static_assert(kStrip % kSums == 0, "a strip behind full ones starts at lane 0");

inline void add_products(const float* x, const float* y, int64_t count, float* sums) {
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (int64_t j = 0; j < kSums; ++j) sums[j] += x[i + j] * y[i + j];
  }
  for (int64_t j = 0; i + j < count; ++j) sums[j] += x[i + j] * y[i + j];
}

// The sum of the lanes, which it uses up.
inline float tree_sum(float* sums) {
  for (int64_t half = kSums / 2; half > 0; half /= 2) {
    for (int64_t j = 0; j < half; ++j) sums[j] += sums[j + half];
  }
  return sums[0];
}

}  // namespace grouped
