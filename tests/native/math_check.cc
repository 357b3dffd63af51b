// The arithmetic of cc/math over whole arrays, for tests/native/test_math.py: compiled there, called by ctypes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "cc/math/activation_bound.h"
#include "cc/math/code_pairs.h"
#include "cc/math/e2m1.h"
#include "cc/math/narrow.h"
#include "cc/math/rotate.h"
#include "cc/math/scales.h"

using namespace grouped;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

template <class T>
void encode_all(int64_t n, const float* x, uint8_t* codes) {
  for (int64_t i = 0; i < n; ++i) codes[i] = encode<T>(x[i]);
}
template <class T>
void decode_all(float* values) {
  for (int code = 0; code < 256; ++code) values[code] = decode<T>(static_cast<uint8_t>(code));
}

// How often a multiplication by fl(1 / max) gives another code than a division by max, of every amax there is.
template <class T>
int64_t reciprocals_that_differ(int64_t first, int64_t last, int64_t step) {
  int64_t count = 0;
  for (int64_t at = first; at <= last; at += step) {
    const uint32_t bits = static_cast<uint32_t>(at);
    count += e8m0_code<T>(bits_float(bits)) != e8m0_code_of_ratio(fl_div(bits_float(bits), T::kMax));
  }
  return count;
}

}  // namespace

EXPORT void encode_e4m3(int64_t n, const float* x, uint8_t* codes) { encode_all<E4M3>(n, x, codes); }
EXPORT void encode_e5m2(int64_t n, const float* x, uint8_t* codes) { encode_all<E5M2>(n, x, codes); }
EXPORT void encode_e2m1(int64_t n, const float* x, uint8_t* codes) { encode_all<E2M1>(n, x, codes); }

EXPORT void encode_pairs(int64_t n, const float* x, uint16_t* e4m3, uint16_t* e5m2) {
  for (int64_t i = 0; i < n / 2; ++i) {
    e4m3[i] = encode_pair<E4M3>(x[2 * i], x[2 * i + 1]);
    e5m2[i] = encode_pair<E5M2>(x[2 * i], x[2 * i + 1]);
  }
}

EXPORT void decode_codes(float* e4m3, float* e5m2, float* e2m1, float* e8m0) {
  decode_all<E4M3>(e4m3);
  decode_all<E5M2>(e5m2);
  decode_all<E2M1>(e2m1);
  for (int code = 0; code < 256; ++code) e8m0[code] = decode_e8m0(static_cast<uint8_t>(code));
}

namespace {

// The codes of n words under each scale: `to` is [256 scales, n, 4 or 8 codes], for E4M3 alone [1, n, 4].
template <pairs::Codes kCodes>
void widen_words(int64_t n, const uint32_t* words, uint16_t* to) {
  for (uint32_t scale = 0; scale < (kCodes == pairs::Codes::e4m3 ? 1u : 256u); ++scale) {
    const pairs::Factor factor = pairs::factor_of<kCodes>(scale);
    for (int64_t i = 0; i < n; ++i) {
      uint32_t found[pairs::is_nibbles(kCodes) ? 4 : 2];
      if (pairs::needs_second<kCodes>(scale)) {
        pairs::widen<kCodes, 1, true>(words + i, factor, found);
      } else {
        pairs::widen<kCodes, 1, false>(words + i, factor, found);
        // The second product changes nothing where it is not needed: a warp makes it for all of its threads.
        uint32_t twice[pairs::is_nibbles(kCodes) ? 4 : 2];
        pairs::widen<kCodes, 1, true>(words + i, factor, twice);
        for (int each = 0; each < int(sizeof found / sizeof *found); ++each) {
          if (twice[each] != found[each]) found[each] = ~0u;
        }
      }
      for (uint32_t pair : found) {
        *to++ = static_cast<uint16_t>(pair);
        *to++ = static_cast<uint16_t>(pair >> 16);
      }
    }
  }
}

}  // namespace

EXPORT void widen_mxfp4(int64_t n, const uint32_t* words, uint16_t* to) {
  widen_words<pairs::Codes::mxfp4>(n, words, to);
}
EXPORT void widen_nvfp4(int64_t n, const uint32_t* words, uint16_t* to) {
  widen_words<pairs::Codes::nvfp4>(n, words, to);
}
EXPORT void widen_mxfp8(int64_t n, const uint32_t* words, uint16_t* to) {
  widen_words<pairs::Codes::mxfp8>(n, words, to);
}
EXPORT void widen_e4m3(int64_t n, const uint32_t* words, uint16_t* to) {
  widen_words<pairs::Codes::e4m3>(n, words, to);
}

EXPORT void pack(int64_t n, const uint8_t* codes, uint8_t* bytes, uint8_t* back) {
  for (int64_t i = 0; i < n; i += 2) bytes[i / 2] = pack_e2m1(codes[i], i + 1 < n ? codes[i + 1] : 0);
  for (int64_t i = 0; i < n; ++i) back[i] = unpack_e2m1(bytes[i / 2], i % 2);
}

EXPORT void encode_stochastic(int64_t n, const float* x, const uint32_t* random, uint8_t* codes) {
  for (int64_t i = 0; i < n; ++i) codes[i] = encode_e2m1_stochastic(x[i], random[i]);
}

// Codes of magnitudes, without NaN, eight in a word; `random` null: to the nearest.
EXPORT void encode_by_adder(int64_t n, const float* x, const uint32_t* random, uint32_t* words) {
  for (int64_t i = 0; i < n / 8; ++i) {
    uint32_t found[8];
    for (int64_t j = 0; j < 8; ++j) {
      const float y = x[8 * i + j];
      found[j] = random ? stochastic_e2m1(y, random[8 * i + j]) : nearest_e2m1(y);
    }
    words[i] = random ? pack_codes<kStochasticBase>(found) : pack_codes<kNearestBase>(found);
  }
}

// How often the adder gives another code to the nearest: all mantissas from 2^-4 to 2^4, where codes change, and some
// of each other binade.
EXPORT void codes_that_differ(int64_t* count) {
  *count = 0;
  for (uint32_t bits = 0; bits <= kInfinityBits;) {
    *count += nearest_e2m1(bits_float(bits)) - kNearestBase != encode<E2M1>(bits_float(bits));
    bits += bits >> 23 < 123 || bits >> 23 > 131 ? 0x8000u : 1u;
  }
}

EXPORT void amax(int64_t n, int64_t block, const float* x, float* result) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits = 0;
    for (int64_t j = 0; j < block; ++j) bits = amax_with(bits, x[i * block + j]);
    result[i] = bits_float(bits);
  }
}

EXPORT void scales_fp32(int64_t n, const float* a, float max, float eps, float overflow, int power_of_two, float* e,
                        float* d) {
  for (int64_t i = 0; i < n; ++i) {
    e[i] = fp32_scale(a[i], {max, eps, overflow, power_of_two != 0});
    d[i] = scale_inv(e[i]);
  }
}

// How often, of all mantissas in some binades, integers give another power of two than a division, or its reciprocal.
EXPORT void powers_of_two_that_differ(float max, int64_t* count) {
  *count = 0;
  for (const uint32_t exponent : {0u, 1u, 7u, 126u, 127u, 135u, 253u, 254u}) {
    int64_t differ = 0;  // of a loop without branches, which a compiler can vectorise
    for (uint32_t mantissa = exponent == 0; mantissa < 1u << 23; ++mantissa) {
      const float a = bits_float(exponent << 23 | mantissa);
      const float quotient = fl_div(max, a);
      const uint32_t finite = float_bits(quotient) == kInfinityBits ? float_bits(kFloatMax) : float_bits(quotient);
      const float found = power_of_two_quotient(max, a);
      differ += float_bits(found) != (finite & 0xFF800000u);
      differ += float_bits(scale_inv_of_power_of_two(found)) != float_bits(scale_inv(found));
    }
    *count += differ;
  }
}

EXPORT void scales_e8m0(int64_t n, const float* a, uint8_t* e4m3, uint8_t* e5m2, uint8_t* e2m1) {
  for (int64_t i = 0; i < n; ++i) {
    e4m3[i] = e8m0_code<E4M3>(a[i]);
    e5m2[i] = e8m0_code<E5M2>(a[i]);
    e2m1[i] = e8m0_code<E2M1>(a[i]);
  }
}

EXPORT void encode_scales_e8m0(float* e) {
  for (int code = 0; code < 256; ++code) e[code] = e8m0_scale(static_cast<uint8_t>(code));
}

EXPORT void scales_nvfp4(int64_t n, const float* group_amax, const float* block_amax, float range, float stretch,
                         float* e_group, float* d_group, uint8_t* s_block, float* e_block) {
  for (int64_t i = 0; i < n; ++i) {
    e_group[i] = nvfp4_group_scale(group_amax[i], range);
    d_group[i] = scale_inv(e_group[i]);
    s_block[i] = nvfp4_block_scale_inv(block_amax[i], e_group[i], stretch);
    e_block[i] = nvfp4_block_scale(s_block[i], d_group[i]);
  }
}

EXPORT void values_nvfp4(const float* group_scales, int64_t n, float* values) {  // [n, 256, 16]
  for (int64_t i = 0; i < n * 256 * 16; ++i) {
    values[i] = nvfp4_value(static_cast<uint8_t>(i % 16), static_cast<uint8_t>(i / 16), group_scales[i / 4096]);
  }
}

EXPORT void four_over_six(int64_t n, const float* x, const uint8_t* s_block, const float* d_group, int squares,
                          float* rows, float* blocks) {
  for (int64_t i = 0; i < n; ++i) {  // [n, 16, 16]
    float sums[16];
    for (int r = 0; r < 16; ++r) {
      sums[r] = nvfp4_row_error(x + (i * 16 + r) * 16, 1, 16, s_block[i], d_group[i], squares != 0);
      rows[i * 16 + r] = sums[r];
    }
    blocks[i] = nvfp4_block_error(sums);
  }
}

EXPORT void update_delayed(int64_t length, int64_t columns, float* history, float* scale, float max, int most_recent) {
  for (int64_t c = 0; c < columns; ++c) {
    scale[c] = delayed_update(history + c, history + c, length, columns, scale[c], max, most_recent != 0);
  }
}

EXPORT void rotate_all(int64_t n, float* x) {
  for (int64_t i = 0; i < n; ++i) rotate(x + 16 * i);
}

EXPORT void philox_all(int64_t n, const uint32_t* counters, const uint64_t* keys, uint32_t* words) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t* c = counters + 4 * i;
    const Words4 found = philox({{c[0], c[1], c[2], c[3]}}, keys[i]);
    for (int j = 0; j < 4; ++j) words[4 * i + j] = found.word[j];
  }
}

EXPORT void random_all(uint64_t key, int64_t rows, int64_t columns, uint32_t group, uint32_t stream, uint32_t* words) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      const Words4 four = random_words(key, static_cast<uint32_t>(c), static_cast<uint32_t>(r), group, stream);
      words[r * columns + c] = four.word[c % 4];
    }
  }
}

// Of floats from encoding `first` to `last`, each `step`-th.
EXPORT void reciprocals(int64_t first, int64_t last, int64_t step, int64_t* counts) {
  counts[0] = reciprocals_that_differ<E4M3>(first, last, step);
  counts[1] = reciprocals_that_differ<E5M2>(first, last, step);
  counts[2] = reciprocals_that_differ<E2M1>(first, last, step);
}

// The largest share of activation_bound() that values and derivatives of a kind have over all finite bf16 gates, beside
// linear halves `u`: t, dt/da and dt/du. Zeros where the kind has no bound.
EXPORT void shares_of_bounds(int64_t kind, int64_t n, const float* u, float alpha, float limit, float offset,
                             float beta1, float beta2, float* shares) {
  const ActivationSpec spec = {static_cast<ActivationKind>(kind), alpha, limit, offset, beta1, beta2};
  std::fill_n(shares, 3, 0.0f);
  with_activation(spec.kind, [&](auto each) {
    constexpr ActivationKind kKind = decltype(each)::value;
    const ActivationBound bound = activation_bound<kKind>(spec);
    for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
      const float a = bits_float(bits << 16);
      if (!std::isfinite(a)) continue;
      const double f = std::max(a, bound.least);
      const double slope = std::min(std::max(0.5 + double{bound.rise} * a, 0.5), double{bound.most});
      for (int64_t i = 0; i < n; ++i) {
        const double v = is_gated(kKind) ? std::abs(double{u[i]}) + bound.offset : 1.0;
        const auto found = ActivationOf<kKind>::grad(spec, a, u[i]);
        const double most[3] = {f * v, slope * v, is_gated(kKind) ? f : 0.0}, values[3] = {found.t, found.da, found.du};
        for (int which = 0; which < 3; ++which) {
          const double magnitude = std::min(std::abs(values[which]), double{std::numeric_limits<float>::max()});
          const double value = std::max(magnitude - std::numeric_limits<float>::denorm_min(), 0.0);
          const float share = value == 0 ? 0.0f : static_cast<float>(value / most[which]);
          shares[which] = std::isnan(magnitude) ? INFINITY : std::max(shares[which], share);
        }
      }
    }
  });
}

// The kinds of shares_of_bounds() by number; null behind the last one.
EXPORT const char* activation_name(int64_t kind) {
  static const char* const names[] = {
#define X(name, tag, gated) name,
      GROUPED_ACTIVATIONS(X)
#undef X
          nullptr};
  return names[kind];
}
