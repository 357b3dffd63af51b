// What errors say, out of line: nvcc compiles the headers three times for each file of kernels.
#include "cc/api/check.h"
#include "cc/api/tensor.h"

namespace grouped {

void fail(const char* file, int line, const std::string& what) {
  throw InternalError(std::string("INTERNAL ") + file + ":" + std::to_string(line) + ": " + what);
}

std::string describe(const TensorView& t) {
  if (!t.present()) return "absent";
  std::string s = std::string(dtype_name(t.dtype)) + "[";
  for (int i = 0; i < t.rank; ++i) s += (i ? ", " : "") + std::to_string(t.dims[i]);
  return s + "]";
}

}  // namespace grouped
