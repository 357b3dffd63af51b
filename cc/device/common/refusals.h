// What kernels for any GPU ask of a call's operands.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "cc/api/operands.h"
#include "cc/api/tensor.h"

namespace grouped {

// Float32, bfloat16 and float16 alone, absent operands aside.
inline std::string refuses_unless_plain(std::initializer_list<const TensorView*> operands) {
  for (const TensorView* t : operands) {
    if (t->present() && !is_plain(t->dtype)) return "takes and gives float32, bfloat16 or float16, not " + describe(*t);
  }
  return "";
}

// Of kernels that address a row of a matrix by its number times 32 bits.
inline std::string refuses_wide_rows(const TensorView& rows) {
  if (rows.rank == 2 && rows.dims[1] * dtype_bytes(rows.dtype) > UINT32_MAX) {
    return "takes rows of less than 4 GiB, got " + describe(rows);
  }
  return "";
}

// Null where the operand is absent.
template <class T>
T* data_or_null(const TensorView& t) {
  return t.present() ? t.as<T>() : nullptr;
}

}  // namespace grouped
