// Columns of a product with ragged rows. Where the weight is packed along them, two codes per byte, the last code may
// be padding, so another operand gives their number.
#pragma once

#include "cc/api/halves.h"
#include "cc/math/activation.h"

namespace grouped {

template <class Call>
bool packs_columns(const Call& call) {
  return call.rhs.dtype == DType::u8 && call.rhs_axis == 1;
}

inline int64_t product_columns(const GroupedMatmul& call) {
  return packs_columns(call) ? call.result.dims[1] : whole_rhs(call).dims[3 - call.rhs_axis];
}
inline int64_t product_columns(const GroupedMatmulAct& call) { return whole_rhs(call).dims[3 - call.rhs_axis]; }
inline int64_t product_columns(const GroupedMatmulDact& call) {
  if (!packs_columns(call)) return call.rhs.dims[3 - call.rhs_axis];
  ActivationKind kind{};
  const bool gated = activation_named(call.activation.kind, &kind) && is_gated(kind);
  return gated ? call.hidden.dims[1] / 2 : call.hidden.dims[1];
}

}  // namespace grouped
