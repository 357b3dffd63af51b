// Vectors of one instruction set: included once by a source that CMake compiles for each set with GROUPED_ISA naming
// the namespace. Everything here is internal to that namespace, so that no copy built for a newer set can be linked
// into code for an older one. GCC's vector types carry what they can; intrinsics are used where the choice matters.
#pragma once

#include <cstdint>
#include <cstring>

#include "cc/math/casts.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace grouped {
namespace GROUPED_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float F32 __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U32 __attribute__((vector_size(4 * kLanes)));
typedef int32_t I32 __attribute__((vector_size(4 * kLanes)));
typedef uint16_t U16 __attribute__((vector_size(2 * kLanes)));

#define GROUPED_INLINE inline __attribute__((always_inline))

template <class V>
GROUPED_INLINE V load(const void* from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}
template <class V>
GROUPED_INLINE void store(void* to, V v) {
  memcpy(to, &v, sizeof v);
}

GROUPED_INLINE F32 broadcast(float x) { return x - F32{}; }

// NOTE: GCC 12 lowers __builtin_convertvector between these types poorly.
GROUPED_INLINE U32 widen(U16 v) {
#if defined(__AVX512F__)
  return (U32)_mm512_maskz_cvtepu16_epi32(0xFFFF, (__m256i)v);
#elif defined(__AVX2__)
  return (U32)_mm256_cvtepu16_epi32((__m128i)v);
#else
  return __builtin_convertvector(v, U32);
#endif
}
// Of values below 2^16.
GROUPED_INLINE U16 narrow(U32 v) {
#if defined(__AVX512F__)
  return (U16)_mm512_maskz_cvtepi32_epi16(0xFFFF, (__m512i)v);
#elif defined(__AVX2__)
  return (U16)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
#else
  return __builtin_convertvector(v, U16);
#endif
}

// The product sum of float panels: one rounding where the machine has a fused form, two elsewhere (numerics 6.1: bits
// belong to an instruction set).
GROUPED_INLINE F32 multiply_add(F32 a, F32 b, F32 sum) {
#if defined(__AVX512F__)
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX2__)
  return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__ARM_NEON)
  return (F32)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#elif defined(__FP_FAST_FMAF)
  for (int i = 0; i < kLanes; ++i) sum[i] = __builtin_fmaf(a[i], b[i], sum[i]);
  return sum;
#else
  return a * b + sum;
#endif
}

// Element types as memory holds them, kLanes at a time.
struct Float32 {
  using Stored = float;
  using Vector = F32;
  static GROUPED_INLINE F32 decode(Vector v) { return v; }
  static GROUPED_INLINE Vector encode(F32 v) { return v; }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Vector = U16;
  static GROUPED_INLINE F32 decode(Vector v) { return (F32)(widen(v) << 16); }
  static GROUPED_INLINE Vector encode(F32 v) {
    // NOTE: vcvtneps2bf16 would flush subnormals.
    const U32 bits = (U32)v;
    const U32 rounded = bits + (0x7FFFu + ((bits >> 16) & 1u));
    const U32 nan = (U32)((I32)(bits & 0x7FFFFFFFu) > 0x7F800000);
    return narrow((((bits | 0x400000u) & nan) | (rounded & ~nan)) >> 16);
  }
};

struct Float16 {
  using Stored = uint16_t;
  using Vector = U16;
  static GROUPED_INLINE F32 decode(Vector v) {
#if defined(__AVX512F__)
    return (F32)_mm512_maskz_cvtph_ps(0xFFFF, (__m256i)v);
#elif defined(__AVX2__)
    return (F32)_mm256_cvtph_ps((__m128i)v);
#elif defined(__ARM_NEON)
    return (F32)vcvt_f32_f16((float16x4_t)v);
#else
    F32 wide = {};
    for (int i = 0; i < kLanes; ++i) wide[i] = f16_to_float(v[i]);
    return wide;
#endif
  }
  static GROUPED_INLINE Vector encode(F32 v) {
#if defined(__AVX512F__)
    return (Vector)_mm512_maskz_cvtps_ph(0xFFFF, (__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
    return (Vector)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__ARM_NEON)
    return (Vector)vcvt_f16_f32((float32x4_t)v);
#else
    Vector code = {};
    for (int i = 0; i < kLanes; ++i) code[i] = float_to_f16(v[i]);
    return code;
#endif
  }
};

// `count` elements (at most kLanes) as floats, zeros behind them; nothing past them is touched.
template <class Type>
GROUPED_INLINE F32 load_decoded(const typename Type::Stored* from, int64_t count) {
  if (count >= kLanes) return Type::decode(load<typename Type::Vector>(from));
  typename Type::Vector some = {};
  if (count > 0) memcpy(&some, from, static_cast<size_t>(count) * sizeof *from);
  return Type::decode(some);
}
template <class Type>
GROUPED_INLINE void store_encoded(typename Type::Stored* to, F32 value, int64_t count) {
  const typename Type::Vector code = Type::encode(value);
  if (count >= kLanes) return store(to, code);
  if (count > 0) memcpy(to, &code, static_cast<size_t>(count) * sizeof *to);
}

// Lanes I of `a`, followed by `b`.
template <int... I>
GROUPED_INLINE U32 shuffled(U32 a, U32 b) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, I...);
#else  // GCC's own name, the only one that GCC 11 knows
  return __builtin_shuffle(a, b, U32{static_cast<uint32_t>(I)...});
#endif
}

// One step of the transposition: swaps the off-diagonal blocks of width H of rows `upper` and `lower`.
template <int H, int... I>
struct Swap {
  static GROUPED_INLINE void run(U32& upper, U32& lower) {
    const U32 first = shuffled<((I & H) ? kLanes + I - H : I)...>(upper, lower);
    lower = shuffled<((I & H) ? kLanes + I : I + H)...>(upper, lower);
    upper = first;
  }
};
#if defined(__AVX512F__)
template <int H>
using SwapLanes = Swap<H, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>;
#elif defined(__AVX2__)
template <int H>
using SwapLanes = Swap<H, 0, 1, 2, 3, 4, 5, 6, 7>;
#else
template <int H>
using SwapLanes = Swap<H, 0, 1, 2, 3>;
#endif

template <int H>
GROUPED_INLINE void transpose_blocks(U32* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if ((i & H) == 0) SwapLanes<H>::run(rows[i], rows[i + H]);
  }
  if constexpr (H > 1) transpose_blocks<H / 2>(rows);
}

// A square of kLanes by kLanes, in registers.
GROUPED_INLINE void transpose(U32* rows) { transpose_blocks<kLanes / 2>(rows); }

}  // namespace
}  // namespace GROUPED_ISA
}  // namespace grouped
