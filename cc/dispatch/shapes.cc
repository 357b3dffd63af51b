#include "cc/dispatch/shapes.h"

#include <algorithm>
#include <utility>

#include "cc/api/operands.h"
#include "cc/api/schema.h"
#include "cc/dispatch/columns.h"
#include "cc/dispatch/shape_check.h"
#include "cc/math/activation.h"
#include "cc/math/shards.h"
#include "cc/math/store.h"

namespace grouped {
namespace {

// Rows of an axis padded to segments: room for any sizes of `groups` groups that sum to at most `rows`.
int64_t padded_rows(int64_t rows, int64_t groups, int64_t segment) {
  return (rows + groups * (segment - 1)) / segment * segment;
}

// Block scales of an operand, of shape `fp32` where they are float32 and of shape `narrow` else.
void block_scales(Check* check, const char* name, const TensorView& t, int64_t block, Dims fp32, Dims narrow) {
  check->require(t.present() == (block > 0), [&] {
    return Check::named(name, t) + ", expected scales if and only if their block is not 0: it is " +
           std::to_string(block);
  });
  if (!t.present() || !check->wrong.empty()) return;
  check->shape(name, t, t.dtype == DType::f32 ? fp32 : narrow);
}

// Scales of a product with ragged rows: lhs [rows, depth], rhs [groups, columns, depth] as stored, or with `transposes`
// [groups, depth, columns].
void row_product_scales(Check* check, const OperandScales& s, const TensorView& lhs, const TensorView& rhs,
                        int64_t rhs_axis, int64_t groups, bool transposes = false) {
  const int64_t rows = lhs.dims[0];
  const int64_t lhs_depth = lhs.dims[1] * (lhs.dtype == DType::u8 ? 2 : 1);
  const int64_t rhs_depth = rhs.dims[2] * (rhs.dtype == DType::u8 ? 2 : 1);
  check->require(transposes || rhs_axis == 2 || (s.rhs_block == 0 && rhs.dtype != DType::u8),
                 [] { return "rhs_axis: expected 2, quantised weights have their contracted axis last here"; });
  const int64_t lb = std::max<int64_t>(s.lhs_block, 1), rb = std::max<int64_t>(s.rhs_block, 1);
  // A packed last byte may hold one code, so a packed length is known but for one.
  const int64_t outer = divide_up(rhs.dims[1], s.rhs_block_outer);
  block_scales(check, "lhs_scales", s.lhs_scales, s.lhs_block, {divide_up(lhs_depth, lb), rows},
               {rows, divide_up(lhs_depth, lb)});
  block_scales(check, "rhs_scales", s.rhs_scales, s.rhs_block, {groups, outer, divide_up(rhs_depth, rb)},
               {groups, outer, divide_up(rhs_depth, rb)});
}

// Scales of a contraction over padded rows: P of them, of `lhs_width` and `rhs_width` columns.
void contraction_scales(Check* check, const OperandScales& s, int64_t segment, int64_t padded, int64_t lhs_width,
                        int64_t rhs_width) {
  check->require(s.rhs_block_outer == 1, [] { return "rhs_block_outer: expected 1 in a contraction over rows"; });
  for (const int64_t block : {s.lhs_block, s.rhs_block}) {
    check->require(block == 0 || (segment > 0 && segment % block == 0), [&] {
      return "segment: " + std::to_string(segment) + ", expected a multiple of the block " + std::to_string(block);
    });
  }
  if (!check->wrong.empty()) return;
  const int64_t lb = std::max<int64_t>(s.lhs_block, 1), rb = std::max<int64_t>(s.rhs_block, 1);
  block_scales(check, "lhs_scales", s.lhs_scales, s.lhs_block, {padded / lb, lhs_width}, {padded / lb, lhs_width});
  block_scales(check, "rhs_scales", s.rhs_scales, s.rhs_block, {padded / rb, rhs_width}, {padded / rb, rhs_width});
}

// Columns of a hidden row in front of `width` activated ones.
int64_t hidden_width(Check* check, const ActivationParams& activation, int64_t width) {
  ActivationKind kind{};
  activation_named(activation.kind, &kind);
  const int64_t s = activation.interleave;
  check->require(s == 0 || (is_gated(kind) && width % s == 0), [&] {
    return "interleave: " + std::to_string(s) + ", expected 0 or, for a gated kind, a divisor of " +
           std::to_string(width);
  });
  return is_gated(kind) ? 2 * width : width;
}

bool wants_gradients(const ActivationGrad& call) { return call.result.present(); }
bool wants_gradients(const GroupedMatmulDact& call) { return call.result.present() || call.quantized.stores(); }

// What the gradients at the hidden rows have in common, with or without the product in front; F = width.
template <class Call>
void hidden_grads(Check* check, const Call& call, const TensorView& hidden, int64_t rows, int64_t width) {
  const int64_t wide = hidden_width(check, call.activation, width);
  check->shape("hidden rows", hidden, {rows, wide});
  check->shape_if_given("activated", call.activated, {rows, width});
  check->require(wants_gradients(call) || call.activated.present() || call.row_sum.present(),
                 [] { return "results: expected at least one of them"; });
}

// Whether the contracted axes of lhs [M, C] and rhs have one length; of two codes per byte the last may be padding.
bool same_depth(const TensorView& lhs, const TensorView& rhs, int64_t rhs_axis) {
  const bool lhs_packed = lhs.dtype == DType::u8, rhs_packed = rhs.dtype == DType::u8 && rhs_axis == 2;
  const int64_t a = lhs.dims[1], b = rhs.dims[rhs_axis];
  if (lhs_packed == rhs_packed) return a == b;
  return lhs_packed ? a == divide_up(b, 2) : divide_up(a, 2) == b;
}

// lhs [M, C] against rhs [G, ...] with the contracted axis `rhs_axis`; the width of the product.
int64_t product_width(Check* check, const TensorView& lhs, const TensorView& rhs, int64_t rhs_axis) {
  check->require(rhs_axis == 1 || rhs_axis == 2, [] { return "rhs_axis: expected 1 or 2"; });
  if (!check->wrong.empty()) return 0;
  check->require(same_depth(lhs, rhs, rhs_axis),
                 [&] { return Check::named("rhs", rhs) + ", expected to match lhs " + describe(lhs); });
  return rhs.dims[3 - rhs_axis];
}

// The weight, of two arrays if it comes in two.
template <class Call>
TensorView whole_weight(Check* check, const Call& call) {
  if (!call.rhs_up.present()) return call.rhs;
  check->require(!has_codes(call), [&] {
    return Check::named("rhs_up", call.rhs_up) + ", expected none beside quantised operands; pass one array";
  });
  check->require(call.rhs_axis == 1 || call.rhs_axis == 2, [] { return "rhs_axis: expected 1 or 2"; });
  check->absent("rhs_table", call.rhs_table);
  return check->wrong.empty() ? whole_rhs(call) : call.rhs;
}

// The low-rank product beside another one, whose result has `width` columns.
template <class Call>
void low_rank(Check* check, const Call& call, int64_t width) {
  const LowRank& low = call.low;
  if (!low.present()) return;
  check->require(low.low_rhs_axis == 1 || low.low_rhs_axis == 2, [] { return "low_rhs_axis: expected 1 or 2"; });
  const int64_t groups = call.group_sizes.dims[0], rank = low.low_lhs.dims[1];
  check->shape("low_lhs", low.low_lhs, {call.lhs.dims[0], rank});
  if (low.low_rhs_axis == 1) {
    check->shape("low_rhs", low.low_rhs, {groups, rank, width});
  } else {
    check->shape("low_rhs", low.low_rhs, {groups, width, rank});
  }
}

// What a contraction over rows asks of its operands.
void contraction(Check* check, const GroupedMatmul& call) {
  check->require(call.contract_rows == 1 && call.rhs_axis == 0,
                 [] { return "contract_rows and rhs_axis contradict each other"; });
  check->require(call.rhs.rank == 2 && call.result.rank == 3, [&] {
    return Check::named("rhs", call.rhs) + " and " + Check::named("result", call.result) +
           ", expected rank 2 and 3 in a contraction over rows";
  });
  check->absent("bias", call.bias);
  check->absent("row_scale", call.row_scale);
  check->absent("rhs_table", call.rhs_table);
  check->absent("bias_table", call.bias_table);
  check->absent("rhs_up", call.rhs_up);
  check->absent("low_lhs", call.low.low_lhs);
  check->require(call.transposed == 0 || call.segment > 0,
                 [] { return "transposed: expected 0, or 1 beside segments"; });
  check->require(call.transposed == 0 || (call.lhs.dtype != DType::u8 && call.rhs.dtype != DType::u8),
                 [] { return "transposed: expected 0, codes of four bits stay in place"; });
  check->require(call.result_half == 0, [] { return "result_half: expected 0 in a contraction over rows"; });
  check->require((call.lhs_half == 0 && call.rhs_half == 0) || (call.segment == 0 && !has_codes(call)),
                 [] { return "lhs_half, rhs_half: expected 0 beside quantised operands; pass one array"; });
  if (!check->wrong.empty()) return;
  const int64_t lhs_width = call.result.dims[1], rhs_width = call.result.dims[2];
  const int64_t padded =
      call.segment ? padded_rows(call.rows, call.group_sizes.dims[0], call.segment) : call.lhs.dims[0];
  if (call.transposed) {
    check->shape("lhs", call.lhs, {lhs_width, padded});
    check->shape("rhs", call.rhs, {rhs_width, padded});
  } else {
    const int64_t lhs_halves = call.lhs_half ? 2 : 1, rhs_halves = call.rhs_half ? 2 : 1;
    check->shape("lhs", call.lhs, {padded, row_bytes(call.lhs.dtype, lhs_halves * lhs_width)});
    check->shape("rhs", call.rhs, {padded, row_bytes(call.rhs.dtype, rhs_halves * rhs_width)});
  }
  contraction_scales(check, call.scales, call.segment, padded, lhs_width, rhs_width);
}

}  // namespace

void own_rules(Check* check, const GroupedMatmul& call) {
  check->require(!call.accumulate || call.into.present(), [] { return "accumulate: expected `into` beside it"; });
  if (call.contract_rows) return contraction(check, call);
  check->absent("into_table", call.into_table);
  check->require(call.segment == 0 && call.transposed == 0,
                 [] { return "segment, transposed: expected 0 beside rows"; });
  check->require(call.lhs_half == 0 && call.rhs_half == 0,
                 [] { return "lhs_half, rhs_half: expected 0 beside ragged rows"; });
  check->require(call.result_half == 0 || !has_codes(call),
                 [] { return "result_half: expected 0 beside quantised operands; pass one array"; });
  check->require(call.rhs.rank == 3 && call.result.rank == 2, [&] {
    return Check::named("rhs", call.rhs) + " and " + Check::named("result", call.result) +
           ", expected rank 3 and 2 beside ragged rows";
  });
  if (!check->wrong.empty()) return;
  int64_t made = product_width(check, call.lhs, whole_weight(check, call), call.rhs_axis);
  // Where columns are packed, the last code may be padding.
  const int64_t columns = call.result.dims[1];
  if (packs_columns(call) && row_bytes(DType::u8, columns) == made) made = columns;
  const int64_t width = made * (call.result_half ? 2 : 1);
  check->shape("result", call.result, {call.lhs.dims[0], width});
  row_product_scales(check, call.scales, call.lhs, call.rhs, call.rhs_axis, call.group_sizes.dims[0], true);
  check->require(!call.low.present() || (call.result_half == 0 && !call.rhs_up.present()),
                 [] { return "low_lhs: expected none beside halves; pass one array"; });
  check->require(!call.low.present() || !call.accumulate,
                 [] { return "accumulate: expected 0 beside `low_lhs`; add the rows in a call of their own"; });
  low_rank(check, call, width);
}

void own_rules(Check* check, const LowRankGrads& call) {
  check->require(call.factor_axis == 1 || call.factor_axis == 2, [] { return "factor_axis: expected 1 or 2"; });
  const int64_t groups = call.group_sizes.dims[0], width = call.rows.dims[1], rank = call.low_rows.dims[1];
  for (const auto& [name, t] : {std::pair{"factor", &call.factor}, std::pair{"factor_grad", &call.factor_grad}}) {
    if (call.factor_axis == 1) {
      check->shape(name, *t, {groups, width, rank});
    } else {
      check->shape(name, *t, {groups, rank, width});
    }
  }
}

void own_rules(Check* check, const AddRows& call) {
  check->require(call.rate >= 0.0f && call.rate < 1.0f, [] { return "rate: expected 0 to 1, without 1"; });
  check->require(call.key.present() == (call.rate > 0.0f), [] { return "key: expected one if and only if rate > 0"; });
}

namespace {

// One quantised form of `source`; what the two forms differ in is their shapes.
struct QuantizedForm {
  const char* name;
  const TensorView& values;
  const TensorView& scales;
  const TensorView& group_scales;
};

// Shapes of the form of rows [M, X] or weights [G, A, B] that contracts the last axis (`cross` 0) or the one before.
template <class Call>
void quantized_form(Check* check, const Call& call, const QuantizedForm& form, const TensorView& source, bool ragged,
                    bool cross, int64_t groups) {
  if (!form.values.present()) {
    check->require(!form.scales.present() && !form.group_scales.present(),
                   [&] { return std::string(form.name) + ": absent, expected codes beside their scales"; });
    return;
  }
  const DType type = form.values.dtype;
  const int64_t b = std::max<int64_t>(call.block, 1);
  check->require(form.scales.present() == (call.block > 0), [&] {
    return std::string(form.name) + ": expected scales beside them if and only if block is not 0";
  });
  if (!check->wrong.empty()) return;
  if (!ragged) {  // weights, stored with the contracted axis last
    const int64_t outer = source.dims[cross ? 2 : 1], depth = source.dims[cross ? 1 : 2];
    check->shape(form.name, form.values, {groups, outer, row_bytes(type, depth)});
    check->shape_if_given("scales", form.scales, {groups, divide_up(outer, call.block_outer), divide_up(depth, b)});
  } else if (!cross) {
    const int64_t rows = source.dims[0], depth = source.dims[1];
    check->shape(form.name, form.values, {rows, row_bytes(type, depth)});
    if (form.scales.dtype == DType::f32) {
      check->shape_if_given("scales", form.scales, {divide_up(depth, b), rows});
    } else {
      check->shape_if_given("scales", form.scales, {rows, divide_up(depth, b)});
    }
  } else {
    check->require(call.segment > 0 && (call.block == 0 || call.segment % call.block == 0),
                   [] { return "segment: expected a multiple of block"; });
    if (!check->wrong.empty()) return;
    const int64_t padded = padded_rows(source.dims[0], groups, call.segment), width = source.dims[1];
    if (call.transposed) {
      check->shape(form.name, form.values, {width, padded});
      check->require(type != DType::u8, [] { return "transposed: expected 0, codes of four bits stay in place"; });
    } else {
      check->shape(form.name, form.values, {padded, row_bytes(type, width)});
    }
    check->shape_if_given("scales", form.scales, {padded / b, width});
  }
}

// What the rule, its blocks and its options ask of each other, and of the element types; of magnitudes alone too.
void store_format(Check* check, const Quantizing& call, bool ragged) {
  const bool fp32 = call.rule == "fp32", nvfp4 = call.rule == "nvfp4";
  const DType type = (call.values.present() ? call.values : call.cross_values).dtype;
  const DType scale = fp32 ? DType::f32 : nvfp4 ? DType::e4m3fn : DType::e8m0;
  check->dtype("cross_values", call.cross_values, type);
  check->dtype("scales", call.scales, scale);
  check->dtype("cross_scales", call.cross_scales, scale);
  check->require(call.block == 0 ? fp32 : !nvfp4 || call.block == 16,
                 [&] { return "block: " + std::to_string(call.block) + ", expected 16 (nvfp4), 16 to 128, 0 (fp32)"; });
  check->require(call.block_outer == 1 || (call.block_outer == call.block && !ragged),
                 [] { return "block_outer: expected 1, or for weights that of square blocks"; });
  check->require(!call.stores() || (type == DType::u8 ? !fp32 : !nvfp4), [&] {
    return std::string("values of ") + dtype_name(type) + ", expected another type for rule " + call.rule;
  });
  check->require(!call.scale.present() || (fp32 && call.block == 0),
                 [] { return "scale: expected only with one fp32 scale per group"; });
  check->require(!call.stochastic || !call.stores() || type == DType::u8,
                 [] { return "stochastic: expected only for uint8 values"; });
  check->require(!call.rotate || (nvfp4 && ragged), [] { return "rotate: expected only for rows and nvfp4"; });
  check->require(call.four_over_six.empty() || (nvfp4 && !call.rotate && !call.stochastic),
                 [] { return "four_over_six: expected only for nvfp4, neither rotated nor stochastic"; });
  check->require(!call.full_range || !call.four_over_six.empty(),
                 [] { return "full_range: expected only with four_over_six"; });
}

// A call that stores nothing in a quantised format: whatever belongs to it would be left as it is.
struct Unquantized {
  Check* check;

  void optional(const char* name, const TensorView& t, const char*) {
    check->require(!t.present(), [&] { return Check::named(name, t) + ", expected none without codes"; });
  }
  void optional_output(const char* name, const TensorView& t, const char* words) { optional(name, t, words); }
};

template <class Quantized>
void nothing_quantized(Check* check, Quantized quantized) {
  quantized.visit_inputs(Unquantized{check});
  quantized.visit_results(Unquantized{check});
}

// All that a call stores of `source`, and what it stores it with.
void quantizing(Check* check, const Quantizing& call, const TensorView& source, bool ragged, int64_t groups) {
  if (!check->wrong.empty()) return;
  quantized_form(check, call, {"values", call.values, call.scales, call.group_scales}, source, ragged, false, groups);
  quantized_form(check, call, {"cross_values", call.cross_values, call.cross_scales, call.cross_group_scales}, source,
                 ragged, true, groups);
  store_format(check, call, ragged);
}

}  // namespace

void own_rules(Check* check, const GroupedMatmulAct& call) {
  const int64_t groups = call.group_sizes.dims[0];
  const int64_t wide = product_width(check, call.lhs, whole_weight(check, call), call.rhs_axis);
  ActivationKind kind{};
  const bool gated = activation_named(call.activation.kind, &kind) && is_gated(kind);
  check->require(!call.rhs_up.present() || (gated && call.activation.interleave == 0),
                 [] { return "activation: expected a gated kind without interleave beside `rhs_up`"; });
  const bool plain = call.result.present();
  check->require(plain != call.quantized.stores(), [] { return "result: expected it, or values in its place"; });
  const int64_t rows = call.lhs.dims[0], width = gated ? wide / 2 : wide;
  const int64_t expected = hidden_width(check, call.activation, width);
  check->require(expected == wide, [&] {
    return "activation: expected one of " + std::to_string(expected) + " columns, not of " + std::to_string(wide);
  });
  check->shape_if_given("result", call.result, {rows, width});
  check->shape_if_given("hidden", call.hidden, {rows, wide});
  check->shape_if_given("bias", call.bias, {groups, wide});
  if (plain) {
    nothing_quantized(check, call.quantized);
  } else {
    quantizing(check, call.quantized, matrix_of(compute_type(call), rows, width), true, groups);
  }
  check->require(!call.hidden.present() || call.hidden.dtype == compute_type(call),
                 [&] { return Check::named("hidden", call.hidden) + ", expected the type of `compute`"; });
  row_product_scales(check, call.scales, call.lhs, call.rhs, call.rhs_axis, groups);
  check->require(!call.low.present() || !call.rhs_up.present(),
                 [] { return "low_lhs: expected none beside a weight in two arrays; pass one array"; });
  low_rank(check, call, wide);
}

void own_rules(Check* check, const GroupedMatmulDact& call) {
  const int64_t groups = call.group_sizes.dims[0];
  const int64_t made = product_width(check, call.lhs, call.rhs, call.rhs_axis);
  if (!check->wrong.empty()) return;
  // Where columns are packed, the last code may be padding.
  const int64_t wanted = product_columns(call);
  const int64_t width = packs_columns(call) && row_bytes(DType::u8, wanted) == made ? wanted : made;
  hidden_grads(check, call, call.hidden, call.lhs.dims[0], width);
  if (call.quantized.stores()) {
    quantizing(check, call.quantized, call.hidden, true, groups);
  } else {
    nothing_quantized(check, call.quantized);
  }
  const QuantizingActivated& z = call.quantized_activated;
  if (z.stores()) {
    check->dtype("activated", call.activated, call.hidden.dtype);  // what is stored is rounded to it
    check->require(call.quantized.stores(),
                   [] { return "activated_values: expected values of the gradients beside them"; });
    quantizing(check, z, matrix_of(call.hidden.dtype, call.lhs.dims[0], width), true, groups);
  } else {
    nothing_quantized(check, z);
  }
  row_product_scales(check, call.scales, call.lhs, call.rhs, call.rhs_axis, groups, true);
  low_rank(check, call, width);
}

void own_rules(Check* check, const ActivationForward& call) {
  const int64_t wide = hidden_width(check, call.activation, call.result.dims[1]);
  check->shape("rows", call.rows, {call.result.dims[0], wide});
}

void own_rules(Check* check, const ActivationGrad& call) {
  hidden_grads(check, call, call.rows, call.grad.dims[0], call.grad.dims[1]);
}

namespace {

// A launch that may write nothing needs results that hold something.
void reused_if_skipped(Check* check, const Quantize& call) {
  const std::pair<const TensorView*, const TensorView*> results[] = {
      {&call.values, &call.into_values},
      {&call.scales, &call.into_scales},
      {&call.group_scales, &call.into_group_scales},
      {&call.cross_values, &call.into_cross_values},
      {&call.cross_scales, &call.into_cross_scales},
      {&call.cross_group_scales, &call.into_cross_group_scales},
      {&call.amax, &call.into_amax},
  };
  for (const auto& [result, into] : results) {
    check->require(!call.skip.present() || result->present() == into->present(),
                   [] { return "skip: expected a buffer for every result beside it"; });
  }
}

// Groups of a call whose source is rows with group sizes, or weights.
int64_t groups_of_source(Check* check, const char* name, const TensorView& source, const TensorView& group_sizes) {
  const bool ragged = group_sizes.present();
  check->require(source.rank == (ragged ? 2 : 3), [&] {
    return Check::named(name, source) + ", expected " + (ragged ? "rows beside" : "weights without") + " group_sizes";
  });
  return ragged ? group_sizes.dims[0] : source.dims[0];
}

}  // namespace

void own_rules(Check* check, const Quantize& call) {
  const bool ragged = call.group_sizes.present();
  const int64_t groups = groups_of_source(check, "source", call.source, call.group_sizes);
  check->require(call.values.present() || call.cross_values.present() || call.amax.present(),
                 [] { return "results: expected at least one of them"; });
  check->require(call.slots >= 1 && (call.places.present() || call.slots == 1),
                 [&] { return "slots: " + std::to_string(call.slots) + ", expected 1 or more, 1 without places"; });
  check->require(!call.places.present() || (ragged && call.source.dims[0] <= INT32_MAX / call.slots),
                 [] { return "places: expected beside group_sizes, for fewer than 2^31 rows of source times slots"; });
  if (!check->wrong.empty()) return;
  quantizing(check, call, call.rows(), ragged, groups);
  reused_if_skipped(check, call);
  check->require(!call.source_table.present() || !ragged, [] { return "source_table: expected for weights only"; });
}

void own_rules(Check* check, const Dequantize& call) {
  const int64_t groups = groups_of_source(check, "result", call.result, call.group_sizes);
  check->require(call.block_outer == 1 || (call.block_outer == call.block && !call.group_sizes.present()),
                 [] { return "block_outer: expected 1, or for weights that of square blocks"; });
  if (!check->wrong.empty()) return;
  quantized_form(check, call, {"values", call.values, call.scales, call.group_scales}, call.result,
                 call.group_sizes.present(), call.cross != 0, groups);
}

namespace {

// What the calls of parts of weights have in common.
template <class Call>
void shards(Check* check, const Call& call) {
  check->require(call.block_outer == 1 || call.block_outer == call.block,
                 [] { return "block_outer: expected 1, or that of square blocks"; });
  check->shape("amax", call.amax, {call.source.dims[0], ShardSlots::of(call).count});
}

}  // namespace

void own_rules(Check* check, const ShardAmax& call) { shards(check, call); }

void own_rules(Check* check, const ShardCast& call) {
  shards(check, call);
  const Quantize whole = whole_of(call);
  for (const auto& [result, into] : {std::pair{&whole.values, &whole.into_values},
                                     {&whole.scales, &whole.into_scales},
                                     {&whole.group_scales, &whole.into_group_scales},
                                     {&whole.cross_values, &whole.into_cross_values},
                                     {&whole.cross_scales, &whole.into_cross_scales},
                                     {&whole.cross_group_scales, &whole.into_cross_group_scales}}) {
    check->require(result->present() == into->present(),
                   [] { return "results: expected a buffer for every one, for others have written their part"; });
  }
  own_rules(check, whole);
}

template <class Call>
std::string disagreement(const Call& call) {
  Views views;
  const_cast<Call&>(call).visit(views);  // `visit` serves visitors that write, too; this one reads
  Check check;
  check.wrong = mismatch(schema<Call>(), views);
  if (check.wrong.empty()) own_rules(&check, call);
  return check.wrong;
}

#define X(Call) template std::string disagreement<Call>(const Call&);
GROUPED_CALLS(X)
#undef X

}  // namespace grouped
