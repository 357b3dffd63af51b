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

template <int W>
__device__ bool whole_vector(const void* base, DType type, int64_t first, int count) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(base) + first * bytes_of(type);
  return count >= W && bytes_of(type) > 1 && address % 16 == 0;
}

// values[i] = element first + i, 0 from `count` on.
template <int W>
__device__ void load_values(const void* base, DType type, int64_t first, int count, float (&values)[W]) {
  static_assert(W == 8, "a vector is 16 bytes of 16-bit values, or 32 of float32");
  if (!whole_vector<W>(base, type, first, count)) {
#pragma unroll
    for (int i = 0; i < W; ++i) values[i] = i < count ? load_value(base, type, first + i) : 0.0f;
  } else if (type == DType::f32) {
    const float4* at = reinterpret_cast<const float4*>(static_cast<const float*>(base) + first);
    const float4 low = at[0], high = at[1];
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
  } else {
    const uint4 raw = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(base) + first);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < W; ++i) values[i] = to_float(static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2))), type);
  }
}

// Stores the first `count` values, each rounded once, to nearest even. Results are float32, bfloat16 or float16.
template <int W>
__device__ void store_values(void* base, DType type, int64_t first, int count, const float (&values)[W]) {
  static_assert(W == 8, "a vector is 16 bytes of 16-bit values, or 32 of float32");
  const bool whole = whole_vector<W>(base, type, first, count);
  if (type == DType::f32) {
    float* at = static_cast<float*>(base) + first;
    if (whole) {
      reinterpret_cast<float4*>(at)[0] = make_float4(values[0], values[1], values[2], values[3]);
      reinterpret_cast<float4*>(at)[1] = make_float4(values[4], values[5], values[6], values[7]);
    } else {
#pragma unroll
      for (int i = 0; i < W; ++i) {
        if (i < count) at[i] = values[i];
      }
    }
    return;
  }
  uint16_t bits[W];
#pragma unroll
  for (int i = 0; i < W; ++i) bits[i] = to_bits(values[i], type);
  uint16_t* at = static_cast<uint16_t*>(base) + first;
  if (whole) {
    uint32_t words[W / 2];
#pragma unroll
    for (int i = 0; i < W / 2; ++i) words[i] = bits[2 * i] | static_cast<uint32_t>(bits[2 * i + 1]) << 16;
    *reinterpret_cast<uint4*>(at) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      if (i < count) at[i] = bits[i];
    }
  }
}

// The end of one tile's sums. Pointers stand at the tile's first element, row and column.
struct Finish {
  void* result;
  int64_t result_stride;   // elements from one row to the next
  const void* bias;        // null: none
  const float* row_scale;  // null: none
  DType result_type;
  DType bias_type;
  bool scale_bias;  // row_scale multiplies the bias alone
  bool accumulate;  // add what `result` holds
  int rows;         // how much of the tile exists
  int cols;
};

// NOTE: each operation is spelled, so that no compiler contracts two into one and every kernel gives the same bits.
template <int W>
__device__ void finish_row(const Finish& f, int row, int col, float (&sums)[W]) {
  if (row >= f.rows || col >= f.cols) return;
  const int count = min(W, f.cols - col);
  const float scale = f.row_scale ? f.row_scale[row] : 1.0f;
  const float bias_scale = f.scale_bias ? scale : 1.0f;
  const float sum_scale = f.scale_bias ? 1.0f : scale;
  float extra[W];
  if (f.bias) {
    load_values(f.bias, f.bias_type, col, count, extra);
#pragma unroll
    for (int i = 0; i < W; ++i) sums[i] = __fadd_rn(sums[i], __fmul_rn(bias_scale, extra[i]));
  }
#pragma unroll
  for (int i = 0; i < W; ++i) sums[i] = __fmul_rn(sum_scale, sums[i]);
  const int64_t first = row * f.result_stride + col;
  if (f.accumulate) {
    load_values(f.result, f.result_type, first, count, extra);
#pragma unroll
    for (int i = 0; i < W; ++i) sums[i] = __fadd_rn(sums[i], extra[i]);
  }
  store_values(f.result, f.result_type, first, count, sums);
}

}  // namespace device
}  // namespace grouped
