// What the operands of a product are multiplied as.
#pragma once

#include <type_traits>

#include "cc/api/halves.h"

namespace grouped {

inline bool is_plain(DType dtype) { return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16; }
inline bool is_fp8(DType dtype) { return dtype == DType::e4m3fn || dtype == DType::e5m2; }
inline bool is_code(DType dtype) { return is_fp8(dtype) || dtype == DType::u8; }

// Rows [count, width], without memory unless `data` is given.
inline TensorView matrix_of(DType dtype, int64_t count, int64_t width, void* data = nullptr) {
  TensorView rows;
  rows.data = data;
  rows.dtype = dtype;
  rows.rank = 2;
  rows.dims[0] = count;
  rows.dims[1] = width;
  return rows;
}

// Elements along the last axis; uint8 holds two codes per byte.
inline int64_t last_axis(const TensorView& t) { return t.dims[t.rank - 1] * (t.dtype == DType::u8 ? 2 : 1); }

inline const float* floats_or_null(const TensorView& t) { return t.present() ? t.as<const float>() : nullptr; }

inline bool has_group_scales(const OperandScales& s) {
  return s.lhs_group_scales.present() || s.rhs_group_scales.present();
}

// Whether calls of this kind may have a low-rank product beside theirs.
template <class Call>
constexpr bool has_low = std::is_same_v<Call, GroupedMatmul> || std::is_same_v<Call, GroupedMatmulAct> ||
                         std::is_same_v<Call, GroupedMatmulDact>;

// Whether both operands are what a kernel of plain ones reads, but for group scales.
template <class Call>
bool has_plain_operands(const Call& call) {
  return is_plain(call.lhs.dtype) && is_plain(call.rhs.dtype) && !call.scales.lhs_block && !call.scales.rhs_block;
}

// The type in which operands meet (numerics 4). Codes, with E8M0 or E4M3 scales too, are bfloat16 numbers; with float32
// scales they are not.
template <class Call>
DType multiplied_type(const Call& call) {
  if (call.lhs.dtype == call.rhs.dtype && is_plain(call.lhs.dtype)) return call.lhs.dtype;
  for (const TensorView* scales : {&call.scales.lhs_scales, &call.scales.rhs_scales}) {
    if (scales->present() && scales->dtype == DType::f32) return DType::f32;
  }
  const auto narrow = [](DType dtype) { return dtype == DType::bf16 || is_code(dtype); };
  return narrow(call.lhs.dtype) && narrow(call.rhs.dtype) ? DType::bf16 : DType::f32;
}

// Length of the contracted axis of ragged rows. Where one operand has two codes per byte and the other has not, the
// last code may be padding.
template <class Call>
int64_t contracted_length(const Call& call) {
  const TensorView weight = whole_rhs(call);
  const int64_t lhs = last_axis(call.lhs), rhs = call.rhs_axis == 2 ? last_axis(weight) : weight.dims[1];
  return lhs < rhs ? lhs : rhs;
}

}  // namespace grouped
