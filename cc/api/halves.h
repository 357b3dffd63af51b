// Weights in two halves, and operands of which one half of the columns is read: both come of gate and linear halves
// that are arrays of their own (MAT-3).
#pragma once

#include "cc/api/calls.h"

namespace grouped {

// The axis of the weight along which `rhs` and `rhs_up` lie side by side: the result's columns where lhs is as deep as
// `rhs` is, else the contraction, which then runs over `rhs` first.
template <class Call>
int64_t joined_axis(const Call& call) {
  return call.lhs.dims[1] == call.rhs.dims[call.rhs_axis] ? 3 - call.rhs_axis : call.rhs_axis;
}

// The weight as if it lay in one piece; without an address if it does not.
template <class Call>
TensorView whole_rhs(const Call& call) {
  TensorView whole = call.rhs;
  if (!call.rhs_up.present()) return whole;
  whole.dims[joined_axis(call)] *= 2;
  whole.data = nullptr;
  return whole;
}

inline TensorView whole_rhs(const GroupedMatmulDact& call) { return call.rhs; }  // never in two halves

inline bool contracts_pair(const GroupedMatmul& call) {
  return call.rhs_up.present() && joined_axis(call) == call.rhs_axis;
}

// Columns that are read of a row.
struct Columns {
  int64_t first, count;
};
inline Columns columns_read(const TensorView& rows, int64_t half) {
  const int64_t count = half != 0 ? rows.dims[1] / 2 : rows.dims[1];
  return {half == 2 ? count : 0, count};
}

}  // namespace grouped
