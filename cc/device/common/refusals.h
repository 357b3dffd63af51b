// What kernels for any GPU ask of a call's operands and target.
#pragma once

#include <cstdint>
#include <string>

#include "cc/api/context.h"
#include "cc/api/tensor.h"

namespace grouped {

inline std::string refuses_unless_cuda(const Target& target) {
  return target.platform == Platform::cuda ? "" : "is a CUDA kernel";
}

// Of kernels that address a row of a matrix by its number times 32 bits.
inline std::string refuses_wide_rows(const TensorView& rows, const Target& target) {
  if (target.platform == Platform::cuda && rows.rank == 2 && rows.dims[1] * dtype_bytes(rows.dtype) > UINT32_MAX) {
    return "takes rows of less than 4 GiB, got " + describe(rows);
  }
  return refuses_unless_cuda(target);
}

// Null where the operand is absent.
template <class T>
T* data_or_null(const TensorView& t) {
  return t.present() ? t.as<T>() : nullptr;
}

}  // namespace grouped
