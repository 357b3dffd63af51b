// Terms that are dropped at random, and added to what they complete.
#pragma once

#include "cc/math/exact.h"

namespace grouped {

// Whether the upper 24 bits of `word`, over 2^24, are below `rate`.
GROUPED_HOST_DEVICE static inline bool drops(uint32_t word, float rate) {
  return fl_mul(static_cast<float>(word >> 8), 1.0f / 16777216.0f) < rate;
}

// base + term. A term of 0 leaves a base of -0 as it is.
GROUPED_HOST_DEVICE static inline float with_term(float base, float term) {
  return term == 0.0f ? base : fl_add(base, term);
}

}  // namespace grouped
