// A place in a ring of barriers, and the parity that it waits for.
#pragma once

#include <cstdint>

namespace grouped::sm90 {

template <int kDepth>
struct Ring {
  uint32_t slot = 0, parity = 0;
  __device__ void advance() {
    if (++slot == kDepth) slot = 0, parity ^= 1;
  }
  __device__ void advance(int steps) {
    const uint32_t at = slot + steps;
    parity ^= (at / kDepth) & 1;
    slot = at % kDepth;
  }
};

}  // namespace grouped::sm90
