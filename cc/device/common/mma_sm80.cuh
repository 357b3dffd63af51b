// The instructions of the portable path, one function each; everything here exists since sm_80, but for products of
// 8-bit codes, which came with sm_89.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cc/device/common/copy_async.cuh"

namespace grouped {
namespace device {

__device__ inline void store16(uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ inline uint32_t load_word(uint32_t from) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(word) : "r"(from) : "memory");
  return word;
}

// Four 8x8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8.
template <bool kTranspose>
__device__ void load_matrices(uint32_t from, uint32_t (&to)[4]) {
  if constexpr (kTranspose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
  }
}

// sums[16x8] += a[16x16] b[16x8], fp32 accumulation.
template <class T>
__device__ void multiply_add(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ inline void multiply_add<__nv_bfloat16>(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void multiply_add<__half>(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// m16n8k8 of float32 numbers as tf32: [16x8] x [8x8]. kFirst: the sums begin with these products.
template <bool kFirst>
__device__ void multiply_add_tf32(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kFirst) sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};\n"
      : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(sums[0]), "f"(sums[1]), "f"(sums[2]),
        "f"(sums[3]));
}

// m16n8k4: [16x4] x [4x8].
__device__ inline void multiply_add_tf32(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};\n"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// m16n8k32 of codes of 8 bits: [16x32] x [32x8]; since sm_89.
enum class Code { e4m3, e5m2 };
template <Code kLhs, Code kRhs, bool kFirst>
__device__ void multiply_add_codes(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kFirst) sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
#if __CUDA_ARCH__ >= 890
#define GROUPED_MULTIPLY_CODES(lhs, rhs)                                                                          \
  if constexpr (kLhs == Code::lhs && kRhs == Code::rhs) {                                                         \
    asm("mma.sync.aligned.m16n8k32.row.col.f32." #lhs "." #rhs                                                    \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "                                                     \
        "{%10, %11, %12, %13};\n"                                                                                 \
        : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3])                                              \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(sums[0]), "f"(sums[1]), "f"(sums[2]), \
          "f"(sums[3]));                                                                                          \
  }
  GROUPED_MULTIPLY_CODES(e4m3, e4m3)
  GROUPED_MULTIPLY_CODES(e4m3, e5m2)
  GROUPED_MULTIPLY_CODES(e5m2, e4m3)
  GROUPED_MULTIPLY_CODES(e5m2, e5m2)
#undef GROUPED_MULTIPLY_CODES
#endif
}

}  // namespace device
}  // namespace grouped
