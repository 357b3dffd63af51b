// Values of any element type at any address, as fp32; and the arithmetic every product ends with (numerics 1).
// Vectors of W values use 16-byte accesses where the address allows and single ones elsewhere: same values, same bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cc/api/tensor.h"

namespace grouped {
namespace device {

__host__ __device__ constexpr int bytes_of(DType type) {
  return type == DType::f32 ? 4 : type == DType::bf16 || type == DType::f16 ? 2 : 1;
}

// Element types of results, biases and accumulators.
constexpr bool is_wide(DType type) { return type == DType::f32 || type == DType::bf16 || type == DType::f16; }

// fp8 codes as fp16 bits: every value is exact there. E5M2 is fp16 cut short; E4M3 differs by 2^8 in bias and has a
// NaN, but no infinity, at its largest codes.
__device__ inline uint16_t half_bits_of_e5m2(uint8_t code) { return static_cast<uint16_t>(code << 8); }
__device__ inline uint16_t half_bits_of_e4m3(uint8_t code) {
  const uint16_t sign = static_cast<uint16_t>((code & 0x80) << 8);
  if ((code & 0x7f) == 0x7f) return sign | 0x7fff;
  const __half scaled = __hmul(__ushort_as_half(static_cast<uint16_t>((code & 0x7f) << 7)), __float2half_rn(256.0f));
  return sign | __half_as_ushort(scaled);
}

__device__ inline float to_float(uint16_t bits, DType type) {
  return type == DType::bf16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16)
                             : __half2float(__ushort_as_half(bits));
}
__device__ inline uint16_t to_bits(float value, DType type) {
  return type == DType::bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(value))
                             : __half_as_ushort(__float2half_rn(value));
}

__device__ inline float load_value(const void* base, DType type, int64_t i) {
  switch (type) {
    case DType::f32:
      return static_cast<const float*>(base)[i];
    case DType::e4m3fn:
      return to_float(half_bits_of_e4m3(static_cast<const uint8_t*>(base)[i]), DType::f16);
    case DType::e5m2:
      return to_float(half_bits_of_e5m2(static_cast<const uint8_t*>(base)[i]), DType::f16);
    default:
      return to_float(static_cast<const uint16_t*>(base)[i], type);
  }
}

__device__ inline void store_value(void* base, DType type, int64_t i, float value) {
  if (type == DType::f32) {
    static_cast<float*>(base)[i] = value;
  } else {
    static_cast<uint16_t*>(base)[i] = to_bits(value, type);
  }
}

// The bits of two 16-bit values, each rounded once, to nearest even.
__device__ inline uint32_t packed(float low, float high, DType type) {
  if (type == DType::bf16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Eight values of a wide type at a multiple of 16 bytes, or one anywhere.
__device__ inline void load_vector(const void* base, DType type, int64_t first, float (&values)[8]) {
  if (type == DType::f32) {  // loads into place, without a look at what comes: several can be in flight
    const float4* at = reinterpret_cast<const float4*>(static_cast<const float*>(base) + first);
    const float4 low = at[0], high = at[1];
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
  } else {
    const uint4 raw = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(base) + first);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = to_float(static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2))), type);
  }
}
__device__ inline void load_vector(const void* base, DType type, int64_t first, float (&values)[1]) {
  values[0] = load_value(base, type, first);
}

__device__ inline void store_vector(void* base, DType type, int64_t first, const float (&v)[8]) {
  if (type == DType::f32) {
    float4* at = reinterpret_cast<float4*>(static_cast<float*>(base) + first);
    at[0] = make_float4(v[0], v[1], v[2], v[3]);
    at[1] = make_float4(v[4], v[5], v[6], v[7]);
  } else {
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(base) + first) = make_uint4(
        packed(v[0], v[1], type), packed(v[2], v[3], type), packed(v[4], v[5], type), packed(v[6], v[7], type));
  }
}
__device__ inline void store_vector(void* base, DType type, int64_t first, const float (&v)[1]) {
  store_value(base, type, first, v[0]);
}

template <int W>
__device__ bool whole_vector(const void* base, DType type, int64_t first, int count) {
  static_assert(W == 8, "a vector is 16 bytes of 16-bit values, or 32 of float32");
  const uintptr_t address = reinterpret_cast<uintptr_t>(base) + first * bytes_of(type);
  return count >= W && bytes_of(type) > 1 && address % 16 == 0;
}

// values[i] = element first + i, 0 from `count` on.
template <int W>
__device__ void load_values(const void* base, DType type, int64_t first, int count, float (&values)[W]) {
  if (whole_vector<W>(base, type, first, count)) {
    load_vector(base, type, first, values);
  } else {
#pragma unroll
    for (int i = 0; i < W; ++i) values[i] = i < count ? load_value(base, type, first + i) : 0.0f;
  }
}

// Stores the first `count` values, each rounded once, to nearest even. Results are float32, bfloat16 or float16.
template <int W>
__device__ void store_values(void* base, DType type, int64_t first, int count, const float (&values)[W]) {
  if (whole_vector<W>(base, type, first, count)) {
    store_vector(base, type, first, values);
  } else {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      if (i < count) store_value(base, type, first + i, values[i]);
    }
  }
}

// The end of one tile's sums. Pointers are to the tile's first element, row and column.
struct Finish {
  void* result;
  int64_t result_stride;   // elements from one row to the next
  const void* bias;        // null: none
  const float* row_scale;  // null: none
  float factor;            // of the sums, first of all
  DType result_type;
  DType bias_type;
  bool scale_bias;  // row_scale multiplies the bias alone
  bool accumulate;  // add what `result` holds
  bool vectors;     // vectors of 8 columns are whole, and aligned in the result and the bias
  int rows;         // how much of the tile exists
  int cols;
};

// Ends R rows, `step` apart, in columns col ... col + W - 1; W = 8 asks for f.vectors. Loads come first, all of them:
// each is a trip to memory. NOTE: each operation is spelled, so that no compiler contracts two into one and every
// kernel gives the same bits.
template <int R, int W>
__device__ void finish_rows(const Finish& f, int row, int step, int col, float (&sums)[R][W]) {
  if (col >= f.cols) return;
  const int64_t first = row * f.result_stride + col, row_step = step * f.result_stride;
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int i = 0; i < W; ++i) sums[r][i] = __fmul_rn(sums[r][i], f.factor);
  }
  float scales[R];
  if (f.row_scale) {
#pragma unroll
    for (int r = 0; r < R; ++r) scales[r] = row + r * step < f.rows ? f.row_scale[row + r * step] : 1.0f;
  }
  if (f.bias) {
    float bias[W];
    load_vector(f.bias, f.bias_type, col, bias);
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int i = 0; i < W; ++i) {
        sums[r][i] = __fadd_rn(sums[r][i], f.scale_bias ? __fmul_rn(scales[r], bias[i]) : bias[i]);
      }
    }
  }
  if (f.row_scale && !f.scale_bias) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int i = 0; i < W; ++i) sums[r][i] = __fmul_rn(scales[r], sums[r][i]);
    }
  }
  if (f.accumulate) {
    float old[R][W] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (row + r * step < f.rows) load_vector(f.result, f.result_type, first + r * row_step, old[r]);
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int i = 0; i < W; ++i) sums[r][i] = __fadd_rn(sums[r][i], old[r][i]);
    }
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (row + r * step < f.rows) store_vector(f.result, f.result_type, first + r * row_step, sums[r]);
  }
}

}  // namespace device
}  // namespace grouped
