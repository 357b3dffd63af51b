// What a quantiser does with the largest magnitude of a block: the rules of cc/math/scales.h behind one function, so
// that kernels know no formats. And where stored scales are (numerics 2.4).
#pragma once

#include <string>

#include "cc/api/tensor.h"
#include "cc/math/rotate.h"
#include "cc/math/scales.h"

namespace grouped {

enum class ScaleRule : int { fp32, e8m0, nvfp4 };

struct StoreRule {
  ScaleRule kind;
  Fp32ScaleRule fp32;
  float range;         // nvfp4: what the amax of a group is mapped to
  bool starts_at_one;  // delayed scaling: a group without a scale yet has 1, not that of its amax
};

// A scale and its inverse, which is stored. Rules without a group's scale have 1 and 1.
struct GroupScale {
  float scale;
  float scale_inv;
};

struct BlockScale {
  float scale;
  uint32_t scale_inv;  // bits of an fp32 scale_inv, or its code
};

// Of a Quantize of cc/api/calls.h that has been checked; `max` is the largest value of the element type.
template <class Call>
StoreRule store_rule(const Call& call, float max, bool bf16_source) {
  StoreRule rule = {};
  rule.kind = call.rule == "fp32" ? ScaleRule::fp32 : call.rule == "e8m0" ? ScaleRule::e8m0 : ScaleRule::nvfp4;
  rule.fp32 = {max, call.eps, call.block > 0 && bf16_source ? kOverflowScaleBf16 : kFloatMax, call.pow2 != 0};
  rule.starts_at_one = call.starts_at_one != 0;
  rule.range = call.four_over_six.empty() || call.full_range ? kNvfp4Range : kFourOverSixRange;
  return rule;
}

// The amax as it is told to others: one NaN for all.
GROUPED_HOST_DEVICE static inline float amax_value(uint32_t amax) {
  return bits_float(is_nan_bits(amax) ? kNanBits : amax);
}

// Of a whole group; `per_group` says that an fp32 scale is the group's, not the block's.
GROUPED_HOST_DEVICE static inline GroupScale group_scale(const StoreRule& rule, bool per_group, uint32_t amax) {
  float e = 1.0f;
  if (rule.kind == ScaleRule::nvfp4) e = nvfp4_group_scale(bits_float(amax), rule.range);
  if (rule.kind == ScaleRule::fp32 && per_group) e = fp32_scale(bits_float(amax), rule.fp32);
  return {e, scale_inv(e)};
}

// Of a whole group under delayed scaling, which gives it a scale, or 0 where it has none yet.
GROUPED_HOST_DEVICE static inline GroupScale delayed_group_scale(const StoreRule& rule, float given, uint32_t amax) {
  float e = given;
  if (e == 0.0f) e = rule.starts_at_one ? 1.0f : fp32_scale(bits_float(amax), rule.fp32);
  return {e, scale_inv(e)};
}

GROUPED_HOST_DEVICE static inline BlockScale fp32_block_scale(const Fp32ScaleRule& rule, uint32_t amax) {
  const float e = fp32_scale(bits_float(amax), rule);
  return {e, float_bits(rule.power_of_two ? scale_inv_of_power_of_two(e) : scale_inv(e))};
}

template <class T>
GROUPED_HOST_DEVICE static inline BlockScale e8m0_block_scale(uint32_t amax) {
  const uint8_t code = e8m0_code<T>(bits_float(amax));
  return {e8m0_scale(code), code};
}

template <class T>
GROUPED_HOST_DEVICE static inline BlockScale block_scale(const StoreRule& rule, uint32_t amax, GroupScale group) {
  if (rule.kind == ScaleRule::fp32) return fp32_block_scale(rule.fp32, amax);
  if (rule.kind == ScaleRule::e8m0) return e8m0_block_scale<T>(amax);
  const uint8_t code = nvfp4_block_scale_inv(bits_float(amax), group.scale, 1.0f);
  return {nvfp4_block_scale(code, group.scale_inv), code};
}

// One value of a quantised form: code * scale of its block * scale of its group, whichever there are; one NaN for all.
GROUPED_HOST_DEVICE static inline float dequantized_value(float code, float block, float group) {
  const float value = fl_mul(fl_mul(code, block), group);
  return is_nan_bits(magnitude_bits(value)) ? bits_float(kNanBits) : value;
}

GROUPED_HOST_DEVICE constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bytes of a row of codes: E2M1 codes are two per byte.
inline int64_t row_bytes(DType type, int64_t codes) { return type == DType::u8 ? divide_up(codes, 2) : codes; }

// Where the block scales of one form are: of (row of blocks, column of blocks) as the source has them.
struct ScalePlace {
  int64_t group_step;  // between the groups of weights
  int64_t row_step;
  int64_t column_step;

  // `wide`: the columns of blocks of the whole source, and `tall` its rows of blocks: those of one weight, of all M
  // rows (of P / b, in the padded form).
  static ScalePlace of(const TensorView& scales, bool ragged, bool cross, int64_t tall, int64_t wide) {
    if (!ragged) return cross ? ScalePlace{tall * wide, 1, tall} : ScalePlace{tall * wide, wide, 1};
    if (!cross && scales.dtype == DType::f32) return {0, 1, tall};
    return {0, wide, 1};
  }
  GROUPED_HOST_DEVICE int64_t at(int64_t group, int64_t row, int64_t column) const {
    return group * group_step + row * row_step + column * column_step;
  }
};

}  // namespace grouped
