// Weights in two arrays, and matrices of which one half of the columns counts: both come of gate and linear halves that
// are arrays of their own (MAT-3).
#pragma once

#include "cc/api/calls.h"

namespace grouped {

// The weight as if it were in one piece, `rhs` before `rhs_up`; without an address if it is not.
inline TensorView joined_rhs(TensorView rhs, const TensorView& rhs_up, int64_t axis) {
  if (!rhs_up.present()) return rhs;
  rhs.dims[axis] *= 2;
  rhs.data = nullptr;
  return rhs;
}
inline TensorView whole_rhs(const GroupedMatmul& call) { return joined_rhs(call.rhs, call.rhs_up, call.rhs_axis); }
inline TensorView whole_rhs(const GroupedMatmulAct& call) {
  return joined_rhs(call.rhs, call.rhs_up, 3 - call.rhs_axis);
}
inline TensorView whole_rhs(const GroupedMatmulDact& call) { return call.rhs; }  // never in two arrays

// Columns of a matrix, or of one vector per group, that a call reads or makes.
struct Columns {
  int64_t first, count;
};
inline Columns columns_of(const TensorView& rows, int64_t half) {
  const int64_t count = half != 0 ? rows.dims[1] / 2 : rows.dims[1];
  return {half == 2 ? count : 0, count};
}

}  // namespace grouped
