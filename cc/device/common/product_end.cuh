// What becomes of a product's sums, one by one: bias and row scale, before one rounding. Which lane holds which row and
// column is the kernel's affair: a row is known by its scale, a column by its bias.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace grouped {
namespace device {

__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(__half v) { return __half2float(v); }
__device__ inline float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

struct BiasParams {
  int32_t width;              // columns of a bias
  const void* bias;           // [groups, width], or null
  const int64_t* bias_table;  // addresses of the biases, or null
  const float* row_scale;     // [rows], or null
  bool float_bias;            // else of the operands' type
};

// A bias of float32, or else of T: its values have `bytes(p)`; value(p, bias, i) is one of them.
template <class T>
struct BiasOf {
  static __device__ int64_t bytes(const BiasParams& p) { return p.float_bias ? 4 : sizeof(T); }
  static __device__ float value(const BiasParams& p, const char* bias, int i) {
    return p.float_bias ? reinterpret_cast<const float*>(bias)[i] : to_float(reinterpret_cast<const T*>(bias)[i]);
  }
};

// The bias of a group from column `col` on; null: none.
template <class Bias, class Params>
__device__ inline const char* bias_at(const Params& p, int group, int col) {
  const int64_t bytes = Bias::bytes(p);
  if (p.bias_table != nullptr) return reinterpret_cast<const char*>(p.bias_table[group]) + bytes * col;
  const char* bias = static_cast<const char*>(p.bias);
  return bias == nullptr ? nullptr : bias + bytes * (int64_t(group) * p.width + col);
}

// A sum's end; of what is absent the scale is 1 and the bias 0. `scale_bias`: the scale multiplies the bias alone,
// since the sum has it already.
__device__ inline float ended(float sum, float scale, float bias, bool scale_bias) {
  return scale_bias ? sum + scale * bias : scale * (sum + bias);
}

}  // namespace device
}  // namespace grouped
