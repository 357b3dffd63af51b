// One IEEE fp32 operation each: round to nearest even, subnormals kept, true division, never fused with a neighbour
// (`fl` of numerics 1). Scales, casts and everything else whose bits are promised are made of these.
#pragma once

#include "cc/math/casts.h"

// Arrays indexed by an unrolled loop live in registers.
#if defined(__CUDA_ARCH__)
#define GROUPED_UNROLL _Pragma("unroll")
#else
#define GROUPED_UNROLL
#endif

namespace grouped {

#if defined(__CUDA_ARCH__)
__device__ static inline float fl_add(float a, float b) { return __fadd_rn(a, b); }
__device__ static inline float fl_sub(float a, float b) { return __fsub_rn(a, b); }
__device__ static inline float fl_mul(float a, float b) { return __fmul_rn(a, b); }
__device__ static inline float fl_div(float a, float b) { return __fdiv_rn(a, b); }
#else
// The build switches contraction off and knows no fast-math; FloatEnvironment clears flush-to-zero (numerics 8).
GROUPED_HOST_DEVICE static inline float fl_add(float a, float b) { return a + b; }
GROUPED_HOST_DEVICE static inline float fl_sub(float a, float b) { return a - b; }
GROUPED_HOST_DEVICE static inline float fl_mul(float a, float b) { return a * b; }
GROUPED_HOST_DEVICE static inline float fl_div(float a, float b) { return a / b; }
#endif

constexpr uint32_t kInfinityBits = 0x7F800000u;
constexpr uint32_t kNanBits = 0x7FC00000u;  // the NaN that decoding and dequantising give, whatever came in
constexpr float kFloatMax = 3.402823466385288598e38f;

GROUPED_HOST_DEVICE static inline uint32_t magnitude_bits(float x) { return float_bits(x) & 0x7FFFFFFFu; }

GROUPED_HOST_DEVICE static inline bool is_nan_bits(uint32_t magnitude) { return magnitude > kInfinityBits; }

// Not min(): NaN passes.
GROUPED_HOST_DEVICE static inline float at_most_float_max(float x) { return x > kFloatMax ? kFloatMax : x; }

}  // namespace grouped
