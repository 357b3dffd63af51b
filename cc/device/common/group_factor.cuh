// What the sums of a group are multiplied by, first of all: the product of its operands' scales, null where there are
// none.
#pragma once

namespace grouped {
namespace device {

__device__ inline float group_factor(const float* lhs, const float* rhs, int group) {
  return __fmul_rn(lhs ? lhs[group] : 1.0f, rhs ? rhs[group] : 1.0f);
}

template <int kCount>
__device__ inline void scale_sums(float (&sums)[kCount], float factor) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] *= factor;
}

}  // namespace device
}  // namespace grouped
