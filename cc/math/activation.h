// Every activation: value and derivative, in fp32, for both CPU and CUDA (numerics 5). `a` is the gate half of a
// hidden row and `u` the linear half; kinds that are not gated read `a` alone. Fused operations are spelled out, so
// that every kernel that recomputes a value gets the bits of the first; the CPU and a GPU differ in last places.
//
// Relative accuracy down to the far negative tails (on a GPU to arguments of -87.3; below, the logistic function is 0):
// all rest on e = exp(-x), x >= 0, with x in two parts where one float is too coarse. The logistic function is 1/(1+e)
// or e/(1+e), its slope e/(1+e)^2, 1 - tanh^2 four times that of twice the argument: nothing cancels. A logistic value
// costs two special-function operations on the device. CPU code has no branches and no calls, so that compilers
// vectorise loops around it.
#pragma once

#include <string>
#include <type_traits>

#include "cc/math/casts.h"

namespace grouped {

// The one list of kinds that are computed: name, tag, whether it has a linear half. Kinds that are one of these with
// certain parameters are rows of grouped_core/activations.py alone.
#define GROUPED_ACTIVATIONS(X)                  \
  X("relu", relu, false)                        \
  X("srelu", srelu, false)                      \
  X("silu", silu, false)                        \
  X("gelu_tanh", gelu_tanh, false)              \
  X("gelu_erf", gelu_erf, false)                \
  X("quick_gelu", quick_gelu, false)            \
  X("swiglu", swiglu, true)                     \
  X("geglu_tanh", geglu_tanh, true)             \
  X("geglu_erf", geglu_erf, true)               \
  X("quick_geglu", quick_geglu, true)           \
  X("clamped_qgeglu", clamped_qgeglu, true)     \
  X("silu_clamped_glu", silu_clamped_glu, true) \
  X("situ_glu", situ_glu, true)

enum class ActivationKind : int {
#define X(name, tag, gated) tag,
  GROUPED_ACTIVATIONS(X)
#undef X
};

// Whether there is such a kind; sets it.
inline bool activation_named(const std::string& name, ActivationKind* kind) {
#define X(text, tag, gated)      \
  if (name == text) {            \
    *kind = ActivationKind::tag; \
    return true;                 \
  }
  GROUPED_ACTIVATIONS(X)
#undef X
  return false;
}

GROUPED_HOST_DEVICE constexpr bool is_gated(ActivationKind kind) {
  switch (kind) {
#define X(name, tag, gated) \
  case ActivationKind::tag: \
    return gated;
    GROUPED_ACTIVATIONS(X)
#undef X
  }
  return false;
}

// Where the gate of an activated column is in hidden rows with halves in alternating blocks of `block` columns
// (numerics 5); the linear half of the column is `block` further.
template <class Index>
GROUPED_HOST_DEVICE constexpr Index gate_column_of(Index column, Index block) {
  return column + column / block * block;
}

// A kind and its parameters as a kernel takes them.
struct ActivationSpec {
  ActivationKind kind;
  float alpha;   // factor inside the logistic function
  float limit;   // clamp; infinite: none
  float offset;  // added to the linear half after its clamp
  float beta1;   // ranges of the two tanh
  float beta2;
};

// From ActivationParams of cc/api/calls.h, whose kind has been checked.
template <class Params>
ActivationSpec activation_spec(const Params& params) {
  ActivationSpec spec{{}, params.alpha, params.limit, params.offset, params.beta1, params.beta2};
  activation_named(params.kind, &spec.kind);
  return spec;
}

// body(std::integral_constant<ActivationKind, kind>{}): the switch is outside of the loop.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class Body>
GROUPED_HOST_DEVICE inline void with_activation(ActivationKind kind, Body&& body) {
  switch (kind) {
#define X(name, tag, gated) \
  case ActivationKind::tag: \
    return body(std::integral_constant<ActivationKind, ActivationKind::tag>{});
    GROUPED_ACTIVATIONS(X)
#undef X
  }
}

// NOTE: always inlined, as this header is compiled for several instruction sets in one program (cc/math/casts.h).
#if defined(__CUDACC__)
#define GROUPED_MATH __host__ __device__ __forceinline__
#else
#define GROUPED_MATH inline __attribute__((always_inline))
#endif

namespace activation_math {

// ---- Arithmetic that devices spell differently.

// a * b + c, rounded once where the machine can.
GROUPED_MATH float mul_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#elif defined(__FMA__) || defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// What rounding took from the product p = a * b.
GROUPED_MATH float residue(float a, float b, float p) {
#if defined(__CUDA_ARCH__) || defined(__FMA__) || defined(__FP_FAST_FMAF)
  return mul_add(a, b, -p);
#else
  return static_cast<float>(static_cast<double>(a) * b - p);
#endif
}

// Clamps that keep NaN.
GROUPED_MATH float at_least(float x, float limit) { return x < limit ? limit : x; }
GROUPED_MATH float at_most(float x, float limit) { return x > limit ? limit : x; }
GROUPED_MATH float within(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }

GROUPED_MATH float magnitude(float x) { return bits_float(float_bits(x) & 0x7FFFFFFFu); }

// 1 / x for x >= 1; on a GPU zero from 2^126 on.
GROUPED_MATH float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  return 1.0f / x;
#endif
}

// 1 / (x + c), correct to about half an ulp: the sum's rounding and the approximation's error are taken out.
GROUPED_MATH float reciprocal_of_sum(float x, float c) {
  const float d = x + c;
  const float near = reciprocal(d);
  return mul_add(near, mul_add(-(x - (d - c)), near, mul_add(-d, near, 1.0f)), near);
}

constexpr float kVanishes = 128.0f;  // exp(-x) is zero from here on

// exp(-(high + low)) for high >= 0; `low` is a part of a few ulp of it, or left out.
template <class... Low>
GROUPED_MATH float exp_negative(float high, Low... low) {
  const float x = at_most(high, kVanishes);
#if defined(__CUDA_ARCH__)
  // 2^y with y = -x log2(e), rounded; what the rounding left over, in natural units, goes in as a factor 1 - rest.
  const float y = __fmul_rn(x, -1.442695f);
  float rest = __fmaf_rn(y, -1.9046542e-9f, __fmaf_rn(y, 0.6931472f, x));
  ((rest = __fadd_rn(rest, low)), ...);
  float e;
  asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(y));  // subnormal results are kept
  return __fmaf_rn(-e, rest, e);
#else
  // 2^-n exp(r), |r| < 0.35. ln 2 has 16 bits in its first part, so n times it is exact.
  constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23
  const float shifted = x * 1.442695f + kToInteger;
  const float n = shifted - kToInteger;
  float r = (n * 0.69314575f - x) + n * 1.4286068e-6f;
  ((r = r - low), ...);
  float p = 0.0013950809f;
  p = mul_add(p, r, 0.008369073f);
  p = mul_add(p, r, 0.041666202f);
  p = mul_add(p, r, 0.16666517f);
  p = mul_add(p, r, 0.5f);
  p = mul_add(mul_add(p, r, 1.0f), r, 1.0f);
  // Two factors, as 2^-n alone may be too small for a float.
  const uint32_t whole = float_bits(shifted) - float_bits(kToInteger);
  const uint32_t half = whole >> 1;
  return p * bits_float((127u - half) << 23) * bits_float((127u - (whole - half)) << 23);
#endif
}

// The logistic function and its derivative.
struct Logistic {
  float value;
  float slope;
};
template <class... Low>
GROUPED_MATH Logistic logistic(float x, Low... low) {
#if defined(__CUDA_ARCH__)
  // exp(-x) itself, whatever its sign: fused products are bound by power, so every instruction shows. Where the value
  // would be subnormal, from -87.4 down, the reciprocal is zero; a little lower exp(-x) would overflow.
  const float c = at_most(at_least(x, -88.1f), 88.1f);
  const float y = __fmul_rn(c, -1.442695f);
  float rest = __fmaf_rn(y, -1.9046542e-9f, __fmaf_rn(y, 0.6931472f, c));
  ((rest = __fadd_rn(rest, low)), ...);
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(y));
  e = __fmaf_rn(-e, rest, e);
  const float r = reciprocal(__fadd_rn(1.0f, e));
  return {r, __fmul_rn(__fmul_rn(e, r), r)};
#else
  const bool negative = x < 0;
  const float e = exp_negative(magnitude(x), (negative ? -low : low)...);
  const float r = reciprocal(1.0f + e);
  const float er = e * r;
  return {negative ? er : r, er * r};
#endif
}

// tanh(a / beta) and its derivative by the quotient.
struct Tanh {
  float value;
  float slope;
};
GROUPED_MATH Tanh hyperbolic_tangent(float a, float beta) {
  const float inverse = 1.0f / beta;
  const float x = a * inverse;
  const float y = magnitude(x);
  // What the quotient lacks counts in the far tails of the derivative; an infinite one lacks nothing.
  const float low = y < kVanishes ? -residue(x, beta, a) * inverse : 0.0f;
  const float e = exp_negative(2.0f * y, 2.0f * (x < 0 ? -low : low));
  const float r = reciprocal_of_sum(e, 1.0f);
  const float large = (1.0f - e) * r;
  // Near zero the difference above would cancel: an odd polynomial.
  const float q = x * x;
  float p = -0.005905868f;
  p = mul_add(p, q, 0.020805385f);
  p = mul_add(p, q, -0.053786684f);
  p = mul_add(p, q, 0.13331959f);
  p = mul_add(p, q, -0.333333f);
  const float small = mul_add(p * q, x, x);
  return {y < 0.6f ? small : x < 0 ? -large : large, 4.0f * (e * r * r)};
}

// ---- Functions of the gate half: f(a) and f'(a).

struct Gate {
  float value;
  float slope;
};

// a * logistic(alpha a)
GROUPED_MATH Gate quick_gelu(float a, float alpha) {
  const float x = alpha * a;
  // NOTE: an infinite x of a finite a has no residue, and times a slope of 0 it would be NaN.
  const bool varies = magnitude(x) < kVanishes;
  const Logistic s = logistic(x, varies ? residue(alpha, a, x) : 0.0f);
  return {a * s.value, mul_add(varies ? x : a, s.slope, s.value)};
}

GROUPED_MATH Gate silu(float a) {
  const Logistic s = logistic(a);
  return {a * s.value, mul_add(a, s.slope, s.value)};
}

constexpr float kGeluRange = 16.0f;  // beyond it gelu is a or zero

// a * logistic(x), x = 2 sqrt(2/pi) a (1 + 0.044715 a^2): half of 1 + tanh(x/2), without its cancellation.
GROUPED_MATH Gate gelu_tanh(float a) {
  constexpr float k0 = 1.5957692f, k0_low = -4.534068e-8f;
  constexpr float k1 = 0.071354814f, k1_low = 2.3988325e-9f;
  const float c = within(a, kGeluRange);
  const float q = c * c;
  const float p = k1 * q;
  const float p_low = mul_add(k1, residue(c, c, q), mul_add(k1_low, q, residue(k1, q, p)));
  const float w = k0 + p;
  const float seen = w - k0;  // of p; the rest of the line is what the sum lost
  const float w_low = ((k0 - (w - seen)) + (p - seen)) + (p_low + k0_low);
  const float x = c * w;
  const Logistic s = logistic(x, mul_add(c, w_low, residue(c, w, x)));
  return {a * s.value, mul_add(a * s.slope, mul_add(3.0f * k1, q, k0), s.value)};
}

// a * Phi(a). Phi(-x) = exp(-x^2/2) Q(x) for x >= 0, where Q falls slowly from 1/2.
GROUPED_MATH Gate gelu_erf(float a) {
  const float x = at_most(magnitude(a), kGeluRange);
  const float q = x * x;
  const float e = exp_negative(0.5f * q, 0.5f * residue(x, x, q));
  // Q is a polynomial in 1 / (x + 2.5) times that; errors of the reciprocal would count twice.
  const float v = reciprocal_of_sum(x, 2.5f);
  float p = 309.69803f;
  p = mul_add(p, v, -679.7604f);
  p = mul_add(p, v, 588.1669f);
  p = mul_add(p, v, -230.7627f);
  p = mul_add(p, v, 29.95445f);
  p = mul_add(p, v, -2.7789977f);
  p = mul_add(p, v, 3.5879984f);
  p = mul_add(p, v, 2.0787246f);
  p = mul_add(p, v, 0.9977404f);
  p = mul_add(p, v, 0.39893848f);
  const float below = e * (p * v);
  const float phi = a > 0 ? 1.0f - below : below;
  return {a * phi, mul_add(a, 0.3989423f * e, phi)};
}

// ---- All of a kind: t, dt/da, dt/du.

struct Derivatives {
  float t, da, du;
};

GROUPED_MATH Derivatives plain(Gate f) { return {f.value, f.slope, 0.0f}; }
GROUPED_MATH Derivatives gated(Gate f, float u) { return {f.value * u, f.slope * u, f.value}; }

GROUPED_MATH Derivatives clamped_quick_geglu(const ActivationSpec& s, float a, float u) {
  const Gate f = quick_gelu(at_most(a, s.limit), s.alpha);
  const float v = within(u, s.limit) + s.offset;
  // Masks are inclusive, and NaN is not beyond a limit.
  return {f.value * v, a > s.limit ? 0.0f : f.slope * v, magnitude(u) > s.limit ? 0.0f : f.value};
}

GROUPED_MATH Derivatives silu_clamped_glu(const ActivationSpec& s, float a, float u) {
  const Gate f = silu(a);
  const float g = at_most(f.value, s.limit);
  const float v = within(u, s.limit);
  return {g * v, f.value > s.limit ? 0.0f : f.slope * v, magnitude(u) > s.limit ? 0.0f : g};
}

GROUPED_MATH Derivatives situ_glu(const ActivationSpec& spec, float a, float u) {
  const Tanh gate = hyperbolic_tangent(a, spec.beta1);
  const Tanh linear = hyperbolic_tangent(u, spec.beta2);
  const Logistic s = logistic(a);
  const float g = spec.beta1 * gate.value;
  const float f = g * s.value;
  const float v = spec.beta2 * linear.value;
  return {f * v, mul_add(gate.slope, s.value, g * s.slope) * v, f * linear.slope};
}

}  // namespace activation_math

// One kind. `value` has the bits of grad().t: it is the same computation.
template <ActivationKind kKind>
struct ActivationOf {
  using Grad = activation_math::Derivatives;

  static GROUPED_MATH float value(const ActivationSpec& spec, float a, float u) { return grad(spec, a, u).t; }

  static GROUPED_MATH Grad grad(const ActivationSpec& spec, float a, float u) {
    using namespace activation_math;
    const float positive = a <= 0 ? 0.0f : a;  // NaN stays
    if constexpr (kKind == ActivationKind::relu) return {positive, a > 0 ? 1.0f : 0.0f, 0.0f};
    if constexpr (kKind == ActivationKind::srelu) return {positive * positive, 2.0f * positive, 0.0f};
    if constexpr (kKind == ActivationKind::silu) return plain(activation_math::silu(a));
    if constexpr (kKind == ActivationKind::gelu_tanh) return plain(activation_math::gelu_tanh(a));
    if constexpr (kKind == ActivationKind::gelu_erf) return plain(activation_math::gelu_erf(a));
    if constexpr (kKind == ActivationKind::quick_gelu) return plain(activation_math::quick_gelu(a, spec.alpha));
    if constexpr (kKind == ActivationKind::swiglu) return gated(activation_math::silu(a), u);
    if constexpr (kKind == ActivationKind::geglu_tanh) return gated(activation_math::gelu_tanh(a), u);
    if constexpr (kKind == ActivationKind::geglu_erf) return gated(activation_math::gelu_erf(a), u);
    if constexpr (kKind == ActivationKind::quick_geglu) return gated(activation_math::quick_gelu(a, spec.alpha), u);
    if constexpr (kKind == ActivationKind::clamped_qgeglu) return clamped_quick_geglu(spec, a, u);
    if constexpr (kKind == ActivationKind::silu_clamped_glu) return activation_math::silu_clamped_glu(spec, a, u);
    if constexpr (kKind == ActivationKind::situ_glu) return activation_math::situ_glu(spec, a, u);
  }
};

}  // namespace grouped
