// What kernels for any GPU ask of a call's operands and target.
#pragma once

#include <string>

#include "cc/api/context.h"
#include "cc/api/tensor.h"

namespace grouped {

inline std::string refuses_unless_cuda(const Target& target) {
  return target.platform == Platform::cuda ? "" : "is a CUDA kernel";
}

// Null where the operand is absent.
template <class T>
T* data_or_null(const TensorView& t) {
  return t.present() ? t.as<T>() : nullptr;
}

}  // namespace grouped
