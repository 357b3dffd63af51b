// What the sums of a group are multiplied by, first of all: the product of its operands' scales, null where there are
// none.
#pragma once

namespace grouped {
namespace device {

__device__ inline float group_factor(const float* lhs, const float* rhs, int group) {
  return __fmul_rn(lhs ? lhs[group] : 1.0f, rhs ? rhs[group] : 1.0f);
}

}  // namespace device
}  // namespace grouped
