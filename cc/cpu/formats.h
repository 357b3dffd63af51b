// What the CPU kernels that decode element by element take.
#pragma once

#include <string>

#include "cc/api/operands.h"
#include "cc/api/tensor.h"

namespace grouped {

// The reason to refuse, or nothing: absent operands pass.
inline std::string refuses_unless_plain(const char* name, const TensorView& operand) {
  if (!operand.present() || is_plain(operand.dtype)) return "";
  return std::string(name) + " is " + describe(operand) + "; this kernel takes float32, bfloat16 or float16";
}

constexpr int64_t kStrip = 256;  // elements decoded at a time by the kernels that stream rows: 1 KiB of floats

}  // namespace grouped
