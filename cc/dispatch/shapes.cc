#include "cc/dispatch/shapes.h"

#include <algorithm>
#include <utility>

#include "cc/api/operands.h"
#include "cc/dispatch/columns.h"
#include "cc/dispatch/shape_check.h"
#include "cc/math/activation.h"
#include "cc/math/shards.h"
#include "cc/math/store.h"

namespace grouped {
namespace {

void table(Check* check, const char* name, const TensorView& t, int64_t groups, const TensorView& packed) {
  check->shape_if_given(name, t, {groups});
  check->dtype(name, t, DType::i64);
  check->require(!t.present() || packed.present(),
                 [&] { return Check::named(name, t) + ", expected its packed operand beside it"; });
}

// Rows of an axis padded to segments: room for any sizes of `groups` groups that sum to at most `rows`.
int64_t padded_rows(int64_t rows, int64_t groups, int64_t segment) {
  return (rows + groups * (segment - 1)) / segment * segment;
}

bool is_scale(DType dtype) { return dtype == DType::f32 || dtype == DType::e8m0 || dtype == DType::e4m3fn; }

void group_scales(Check* check, const char* name, const TensorView& t, int64_t groups) {
  check->shape_if_given(name, t, {groups});
  check->dtype(name, t, DType::f32);
}

// Block scales of an operand whose float32 ones lie as `fp32` and others as `narrow`.
void block_scales(Check* check, const char* name, const TensorView& t, int64_t block, Dims fp32, Dims narrow) {
  check->require(t.present() == (block > 0), [&] {
    return Check::named(name, t) + ", expected scales if and only if their block is not 0: it is " +
           std::to_string(block);
  });
  if (!t.present() || !check->wrong.empty()) return;
  check->require(is_scale(t.dtype), [&] { return Check::named(name, t) + ", expected the type of a scale"; });
  check->shape(name, t, t.dtype == DType::f32 ? fp32 : narrow);
}

// Scales of a product with ragged rows: lhs [rows, depth], rhs [groups, columns, depth] as stored, or with `turns`
// [groups, depth, columns].
void row_product_scales(Check* check, const OperandScales& s, const TensorView& lhs, const TensorView& rhs,
                        int64_t rhs_axis, int64_t groups, bool turns = false) {
  group_scales(check, "lhs_group_scales", s.lhs_group_scales, groups);
  group_scales(check, "rhs_group_scales", s.rhs_group_scales, groups);
  if (!check->wrong.empty()) return;
  const int64_t rows = lhs.dims[0];
  const int64_t lhs_depth = lhs.dims[1] * (lhs.dtype == DType::u8 ? 2 : 1);
  const int64_t rhs_depth = rhs.dims[2] * (rhs.dtype == DType::u8 ? 2 : 1);
  check->require(turns || rhs_axis == 2 || (s.rhs_block == 0 && rhs.dtype != DType::u8),
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
                        int64_t rhs_width, int64_t groups) {
  group_scales(check, "lhs_group_scales", s.lhs_group_scales, groups);
  group_scales(check, "rhs_group_scales", s.rhs_group_scales, groups);
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
bool wants_gradients(const GroupedMatmulDact& call) { return call.result.present() || call.stored.stores(); }

// What the gradients at the hidden rows have in common, with or without the product in front; F = width.
template <class Call>
void hidden_grads(Check* check, const Call& call, const TensorView& hidden, int64_t rows, int64_t width) {
  const int64_t wide = hidden_width(check, call.activation, width);
  if (!check->wrong.empty()) return;
  check->shape("hidden rows", hidden, {rows, wide});
  check->shape_if_given("row_scale", call.row_scale, {rows});
  check->dtype("row_scale", call.row_scale, DType::f32);
  check->shape_if_given("row_base", call.row_base, {rows});
  check->dtype("row_base", call.row_base, DType::f32);
  check->shape_if_given("result", call.result, {rows, wide});
  check->shape_if_given("activated", call.activated, {rows, width});
  check->shape_if_given("row_sum", call.row_sum, {rows});
  check->dtype("row_sum", call.row_sum, DType::f32);
  check->require(wants_gradients(call) || call.activated.present() || call.row_sum.present(),
                 [] { return "results: expected at least one of them"; });
}

// Whether the contracted axes of lhs [M, C] and rhs have one length; of two codes a byte the last may be padding.
bool same_depth(const TensorView& lhs, const TensorView& rhs, int64_t rhs_axis) {
  const bool lhs_packed = lhs.dtype == DType::u8, rhs_packed = rhs.dtype == DType::u8 && rhs_axis == 2;
  const int64_t a = lhs.dims[1], b = rhs.dims[rhs_axis];
  if (lhs_packed == rhs_packed) return a == b;
  return lhs_packed ? a == divide_up(b, 2) : divide_up(a, 2) == b;
}

// lhs [M, C] against rhs [G, ...] with the contracted axis `rhs_axis`; the width of the product, 0 if they disagree.
int64_t product_width(Check* check, const TensorView& lhs, const TensorView& rhs, int64_t rhs_axis, int64_t groups) {
  check->require(rhs_axis == 1 || rhs_axis == 2, [] { return "rhs_axis: expected 1 or 2"; });
  check->rank("lhs", lhs, 2);
  check->rank("rhs", rhs, 3);
  if (!check->wrong.empty()) return 0;
  check->require(rhs.dims[0] == groups && same_depth(lhs, rhs, rhs_axis), [&] {
    return Check::named("rhs", rhs) + ", expected to match lhs " + describe(lhs) + " and " + std::to_string(groups) +
           " groups";
  });
  const int64_t width = rhs.dims[3 - rhs_axis];
  check->not_empty("rhs", rhs, 0);
  return width;
}

// The low-rank product beside another one, whose result has `width` columns.
template <class Call>
void low_rank(Check* check, const Call& call, int64_t groups, int64_t width) {
  const LowRank& low = call.low;
  check->require(low.low_lhs.present() == low.low_rhs.present(),
                 [] { return "`low_lhs` and `low_rhs`: expected both or none"; });
  table(check, "low_rhs_table", low.low_rhs_table, groups, low.low_rhs);
  if (!low.present() || !check->wrong.empty()) return;
  check->require(low.low_rhs_axis == 1 || low.low_rhs_axis == 2, [] { return "low_rhs_axis: expected 1 or 2"; });
  check->rank("low_lhs", low.low_lhs, 2);
  check->not_empty("low_lhs", low.low_lhs, 1);
  check->require(is_plain(low.low_lhs.dtype),
                 [&] { return Check::named("low_lhs", low.low_lhs) + ", expected plain numbers"; });
  check->dtype("low_rhs", low.low_rhs, low.low_lhs.dtype);
  if (!check->wrong.empty()) return;
  const int64_t rank = low.low_lhs.dims[1];
  check->shape("low_lhs", low.low_lhs, {call.lhs.dims[0], rank});
  if (low.low_rhs_axis == 1) {
    check->shape("low_rhs", low.low_rhs, {groups, rank, width});
  } else {
    check->shape("low_rhs", low.low_rhs, {groups, width, rank});
  }
}

// What a contraction over rows asks of its operands.
void contraction(Check* check, const GroupedMatmul& call, int64_t groups) {
  check->require(call.contract_rows == 1 && call.rhs_axis == 0,
                 [] { return "contract_rows and rhs_axis contradict each other"; });
  check->rank("rhs", call.rhs, 2);
  check->absent("bias", call.bias);
  check->absent("row_scale", call.row_scale);
  check->absent("rhs_table", call.rhs_table);
  check->absent("bias_table", call.bias_table);
  check->rank("result", call.result, 3);
  check->absent("rhs_up", call.rhs_up);
  check->absent("low_lhs", call.low.low_lhs);
  check->absent("low_rhs", call.low.low_rhs);
  check->absent("low_rhs_table", call.low.low_rhs_table);
  check->require(call.turned == 0 || call.segment > 0, [] { return "turned: expected 0, or 1 beside segments"; });
  check->require(call.turned == 0 || (call.lhs.dtype != DType::u8 && call.rhs.dtype != DType::u8),
                 [] { return "turned: expected 0, codes of four bits stay in place"; });
  check->require(call.result_half == 0, [] { return "result_half: expected 0 in a contraction over rows"; });
  check->require((call.lhs_half == 0 && call.rhs_half == 0) || (call.segment == 0 && !has_codes(call)),
                 [] { return "lhs_half, rhs_half: expected 0 beside quantised operands; pass one array"; });
  if (!check->wrong.empty()) return;
  check->not_empty("result", call.result, 0);
  const int64_t lhs_width = call.result.dims[1], rhs_width = call.result.dims[2];
  const int64_t padded = call.segment ? padded_rows(call.rows, groups, call.segment) : call.lhs.dims[0];
  check->shape("result", call.result, {groups, lhs_width, rhs_width});
  if (call.turned) {
    check->shape("lhs", call.lhs, {lhs_width, padded});
    check->shape("rhs", call.rhs, {rhs_width, padded});
  } else {
    const int64_t lhs_halves = call.lhs_half ? 2 : 1, rhs_halves = call.rhs_half ? 2 : 1;
    check->shape("lhs", call.lhs, {padded, row_bytes(call.lhs.dtype, lhs_halves * lhs_width)});
    check->shape("rhs", call.rhs, {padded, row_bytes(call.rhs.dtype, rhs_halves * rhs_width)});
  }
  contraction_scales(check, call.scales, call.segment, padded, lhs_width, rhs_width, groups);
}

}  // namespace

std::string disagreement(const GroupedMatmul& call) {
  Check check;
  const int64_t groups = groups_of(&check, call.group_sizes);
  check.rank("lhs", call.lhs, 2);
  if (call.contract_rows) {
    contraction(&check, call, groups);
  } else {
    check.require(call.lhs_half == 0 && call.rhs_half == 0,
                  [] { return "lhs_half, rhs_half: expected 0 beside ragged rows"; });
    check.require(call.result_half == 0 || !has_codes(call),
                  [] { return "result_half: expected 0 beside quantised operands; pass one array"; });
    int64_t made = product_width(&check, call.lhs, check.whole_weight(call), call.rhs_axis, groups);
    check.rank("result", call.result, 2);
    if (check.wrong.empty()) {
      // Where columns are packed, the last code may stand for nothing.
      const int64_t columns = call.result.dims[1];
      if (packs_columns(call) && row_bytes(DType::u8, columns) == made) made = columns;
      const int64_t rows = call.lhs.dims[0], width = made * (call.result_half ? 2 : 1);
      check.shape("result", call.result, {rows, width});
      check.shape_if_given("bias", call.bias, {groups, width});
      check.shape_if_given("row_scale", call.row_scale, {rows});
      check.dtype("row_scale", call.row_scale, DType::f32);
      row_product_scales(&check, call.scales, call.lhs, call.rhs, call.rhs_axis, groups, true);
      check.require(!call.low.present() || (call.result_half == 0 && !call.rhs_up.present()),
                    [] { return "low_lhs: expected none beside halves; pass one array"; });
      low_rank(&check, call, groups, width);
    }
    check.absent("into_table", call.into_table);
    check.require(call.segment == 0 && call.turned == 0, [] { return "segment, turned: expected 0 beside rows"; });
  }
  same_buffer(&check, "into", call.into, call.result);
  table(&check, "rhs_table", call.rhs_table, groups, call.rhs);
  table(&check, "bias_table", call.bias_table, groups, call.bias);
  table(&check, "into_table", call.into_table, groups, call.into);
  check.require(!call.accumulate || call.into.present(), [] { return "accumulate: expected `into` beside it"; });
  return check.wrong;
}

std::string disagreement(const GroupSum& call) {
  Check check;
  const int64_t groups = groups_of(&check, call.group_sizes);
  check.rank("rows", call.rows, 2);
  check.not_empty("rows", call.rows, 1);
  check.shape_if_given("row_scale", call.row_scale, {call.rows.dims[0]});
  check.dtype("row_scale", call.row_scale, DType::f32);
  check.shape("result", call.result, {groups, call.rows.dims[1]});
  return check.wrong;
}

std::string disagreement(const RowDot& call) {
  Check check;
  const int64_t groups = groups_of(&check, call.group_sizes);
  check.rank("result", call.result, 1);
  check.dtype("result", call.result, DType::f32);
  const int64_t rows = call.result.dims[0];
  check.require(call.lhs.present() == call.rhs.present(), [] { return "`lhs` and `rhs`: expected both or none"; });
  if (call.lhs.present()) {
    check.rank("lhs", call.lhs, 2);
    check.not_empty("lhs", call.lhs, 1);
    check.shape("lhs", call.lhs, {rows, call.lhs.dims[1]});
    check.shape("rhs", call.rhs, {rows, call.lhs.dims[1]});
  }
  check.require(call.group_lhs.present() == call.group_rhs.present(),
                [] { return "`group_lhs` and `group_rhs`: expected both or none"; });
  if (call.group_lhs.present()) {
    check.rank("group_lhs", call.group_lhs, 2);
    check.not_empty("group_lhs", call.group_lhs, 1);
    check.shape("group_lhs", call.group_lhs, {rows, call.group_lhs.dims[1]});
    check.shape("group_rhs", call.group_rhs, {groups, call.group_lhs.dims[1]});
  }
  table(&check, "group_rhs_table", call.group_rhs_table, groups, call.group_rhs);
  return check.wrong;
}

std::string disagreement(const ScaleRows& call) {
  Check check;
  groups_of(&check, call.group_sizes);
  check.rank("rows", call.rows, 2);
  check.not_empty("rows", call.rows, 1);
  check.shape("row_scale", call.row_scale, {call.rows.dims[0]});
  check.dtype("row_scale", call.row_scale, DType::f32);
  check.shape("result", call.result, {call.rows.dims[0], call.rows.dims[1]});
  same_buffer(&check, "into", call.into, call.result);
  return check.wrong;
}

std::string disagreement(const AddRows& call) {
  Check check;
  groups_of(&check, call.group_sizes);
  check.rank("rows", call.rows, 2);
  check.not_empty("rows", call.rows, 1);
  check.shape_if_given("base", call.base, {call.rows.dims[0], call.rows.dims[1]});
  check.dtype("base", call.base, DType::f32);
  check.shape_if_given("key", call.key, {2});
  check.dtype("key", call.key, DType::u32);
  check.shape("result", call.result, {call.rows.dims[0], call.rows.dims[1]});
  check.require(call.rate >= 0.0f && call.rate < 1.0f, [] { return "rate: expected 0 to 1, without 1"; });
  check.require(call.key.present() == (call.rate > 0.0f), [] { return "key: expected one if and only if rate > 0"; });
  same_buffer(&check, "into", call.into, call.result);
  return check.wrong;
}

namespace {

bool is_float(DType dtype) { return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16; }

// One stored form of `source`; what the two forms differ in is their shapes.
struct StoredForm {
  const char* name;
  const TensorView& values;
  const TensorView& scales;
  const TensorView& group_scales;
};

// Shapes of the form of rows [M, X] or weights [G, A, B] that contracts the last axis (`cross` 0) or the one before.
template <class Call>
void stored_form(Check* check, const Call& call, const StoredForm& form, const TensorView& source, bool ragged,
                 bool cross, int64_t groups) {
  if (!form.values.present()) {
    check->require(!form.scales.present() && !form.group_scales.present(),
                   [&] { return std::string(form.name) + ": absent, expected codes beside their scales"; });
    return;
  }
  const DType type = form.values.dtype;
  const int64_t b = std::max<int64_t>(call.block, 1);
  check->require(is_code(type), [&] { return Check::named(form.name, form.values) + ", expected codes"; });
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
    if (call.turned) {
      check->shape(form.name, form.values, {width, padded});
      check->require(type != DType::u8, [] { return "turned: expected 0, codes of four bits stay in place"; });
    } else {
      check->shape(form.name, form.values, {padded, row_bytes(type, width)});
    }
    check->shape_if_given("scales", form.scales, {padded / b, width});
  }
  group_scales(check, "group_scales", form.group_scales, groups);
}

// What the rule, its blocks and its options ask of each other, and of the element types; of magnitudes alone too.
void store_format(Check* check, const Storing& call, bool ragged) {
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
  check->require(!call.encode.present() || (fp32 && call.block == 0),
                 [] { return "encode: expected only with one fp32 scale a group"; });
  check->require(!call.stochastic || !call.stores() || type == DType::u8,
                 [] { return "stochastic: expected only for uint8 values"; });
  check->require(!call.rotate || (nvfp4 && ragged), [] { return "rotate: expected only for rows and nvfp4"; });
  check->require(call.four_over_six.empty() || (nvfp4 && !call.rotate && !call.stochastic),
                 [] { return "four_over_six: expected only for nvfp4, neither rotated nor stochastic"; });
  check->require(!call.full_range || !call.four_over_six.empty(),
                 [] { return "full_range: expected only with four_over_six"; });
}

// A call that stores nothing in a quantised format: whatever belongs to it would be left as it is.
struct Unstored {
  Check* check;

  void optional(const char* name, const TensorView& t) {
    check->require(!t.present(), [&] { return Check::named(name, t) + ", expected none without codes"; });
  }
  void optional_output(const char* name, const TensorView& t) { optional(name, t); }
};

template <class Stored>
void nothing_stored(Check* check, Stored stored) {
  stored.visit_inputs(Unstored{check});
  stored.visit_results(Unstored{check});
}

// All that a call stores of `source`, and what it stores it with.
void storing(Check* check, const Storing& call, const TensorView& source, bool ragged, int64_t groups) {
  if (!check->wrong.empty()) return;
  stored_form(check, call, {"values", call.values, call.scales, call.group_scales}, source, ragged, false, groups);
  stored_form(check, call, {"cross_values", call.cross_values, call.cross_scales, call.cross_group_scales}, source,
              ragged, true, groups);
  store_format(check, call, ragged);
  group_scales(check, "encode", call.encode, groups);
  group_scales(check, "amax", call.amax, groups);
  check->shape_if_given("key", call.key, {2});
  check->dtype("key", call.key, DType::u32);
  same_buffer(check, "into_amax", call.into_amax, call.amax);
}

}  // namespace

std::string disagreement(const GroupedMatmulAct& call) {
  Check check;
  const int64_t groups = groups_of(&check, call.group_sizes);
  const int64_t wide = product_width(&check, call.lhs, check.whole_weight(call), call.rhs_axis, groups);
  ActivationKind kind{};
  check.require(!call.rhs_up.present() || (activation_named(call.activation.kind, &kind) && is_gated(kind) &&
                                           call.activation.interleave == 0),
                [] { return "activation: expected a gated kind without interleave beside `rhs_up`"; });
  const bool plain = call.result.present();
  if (plain) check.rank("result", call.result, 2);
  check.require(plain != call.stored.stores(), [] { return "result: expected it, or values in its place"; });
  if (!check.wrong.empty()) return check.wrong;
  const int64_t rows = call.lhs.dims[0];
  const int64_t width = activation_named(call.activation.kind, &kind) && is_gated(kind) ? wide / 2 : wide;
  const int64_t expected = hidden_width(&check, call.activation, width);
  check.require(expected == wide, [&] {
    return "activation: expected one of " + std::to_string(expected) + " columns, not of " + std::to_string(wide);
  });
  check.shape_if_given("result", call.result, {rows, width});
  if (plain) {
    nothing_stored(&check, call.stored);
  } else {
    storing(&check, call.stored, matrix_of(compute_type(call), rows, width), true, groups);
  }
  check.shape_if_given("hidden", call.hidden, {rows, wide});
  check.require(!call.hidden.present() || call.hidden.dtype == compute_type(call),
                [&] { return Check::named("hidden", call.hidden) + ", expected the type of `compute`"; });
  check.shape_if_given("bias", call.bias, {groups, wide});
  check.shape_if_given("row_scale", call.row_scale, {rows});
  check.dtype("row_scale", call.row_scale, DType::f32);
  table(&check, "rhs_table", call.rhs_table, groups, call.rhs);
  table(&check, "bias_table", call.bias_table, groups, call.bias);
  row_product_scales(&check, call.scales, call.lhs, call.rhs, call.rhs_axis, groups);
  check.require(!call.low.present() || !call.rhs_up.present(),
                [] { return "low_lhs: expected none beside a weight in two arrays; pass one array"; });
  low_rank(&check, call, groups, wide);
  return check.wrong;
}

std::string disagreement(const GroupedMatmulDact& call) {
  Check check;
  const int64_t groups = groups_of(&check, call.group_sizes);
  const int64_t made = product_width(&check, call.lhs, call.rhs, call.rhs_axis, groups);
  check.rank("hidden rows", call.hidden, 2);
  if (!check.wrong.empty()) return check.wrong;
  // Where columns are packed, the last code may stand for nothing.
  const int64_t wanted = product_columns(call);
  const int64_t width = packs_columns(call) && row_bytes(DType::u8, wanted) == made ? wanted : made;
  hidden_grads(&check, call, call.hidden, call.lhs.dims[0], width);
  if (call.stored.stores()) {
    storing(&check, call.stored, call.hidden, true, groups);
  } else {
    nothing_stored(&check, call.stored);
  }
  const StoringActivated& z = call.stored_activated;
  if (!z.stores()) nothing_stored(&check, z);
  if (z.stores() && check.wrong.empty()) {
    check.dtype("activated", call.activated, call.hidden.dtype);  // what is stored is rounded to it
    check.require(call.stored.stores(),
                  [] { return "activated_values: expected values of the gradients beside them"; });
    const TensorView activated = matrix_of(call.hidden.dtype, call.lhs.dims[0], width);
    storing(&check, z, activated, true, groups);
  }
  table(&check, "rhs_table", call.rhs_table, groups, call.rhs);
  row_product_scales(&check, call.scales, call.lhs, call.rhs, call.rhs_axis, groups, true);
  low_rank(&check, call, groups, width);
  return check.wrong;
}

std::string disagreement(const ActivationForward& call) {
  Check check;
  groups_of(&check, call.group_sizes);
  check.rank("rows", call.rows, 2);
  check.rank("result", call.result, 2);
  check.not_empty("result", call.result, 1);
  if (!check.wrong.empty()) return check.wrong;
  const int64_t rows = call.rows.dims[0], width = call.result.dims[1];
  const int64_t wide = hidden_width(&check, call.activation, width);
  check.shape("rows", call.rows, {rows, wide});
  check.shape("result", call.result, {rows, width});
  check.shape_if_given("row_scale", call.row_scale, {rows});
  check.dtype("row_scale", call.row_scale, DType::f32);
  return check.wrong;
}

std::string disagreement(const ActivationGrad& call) {
  Check check;
  groups_of(&check, call.group_sizes);
  check.rank("grad", call.grad, 2);
  check.not_empty("grad", call.grad, 1);
  if (!check.wrong.empty()) return check.wrong;
  hidden_grads(&check, call, call.rows, call.grad.dims[0], call.grad.dims[1]);
  return check.wrong;
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

// Groups of a call whose source may be weights.
int64_t groups_of_source(Check* check, const TensorView& source, const TensorView& group_sizes) {
  check->not_empty("source", source, 1);
  if (group_sizes.present()) {
    check->rank("source", source, 2);
    return groups_of(check, group_sizes);
  }
  check->rank("source", source, 3);
  some_groups(check, "source", source);
  return source.dims[0];
}

}  // namespace

std::string disagreement(const Quantize& call) {
  Check check;
  const int64_t groups = groups_of_source(&check, call.source, call.group_sizes);
  check.require(is_float(call.source.dtype), [&] { return Check::named("source", call.source) + ", expected floats"; });
  check.require(call.values.present() || call.cross_values.present() || call.amax.present(),
                [] { return "results: expected at least one of them"; });
  if (!check.wrong.empty()) return check.wrong;
  storing(&check, call, call.source, call.group_sizes.present(), groups);
  if (!check.wrong.empty()) return check.wrong;
  reused_if_skipped(&check, call);
  check.require(!call.source_table.present() || !call.group_sizes.present(),
                [] { return "source_table: expected for weights only"; });
  table(&check, "source_table", call.source_table, groups, call.source);
  check.shape_if_given("skip", call.skip, {1});
  check.dtype("skip", call.skip, DType::i32);
  same_buffer(&check, "into_values", call.into_values, call.values);
  same_buffer(&check, "into_scales", call.into_scales, call.scales);
  same_buffer(&check, "into_group_scales", call.into_group_scales, call.group_scales);
  same_buffer(&check, "into_cross_values", call.into_cross_values, call.cross_values);
  same_buffer(&check, "into_cross_scales", call.into_cross_scales, call.cross_scales);
  same_buffer(&check, "into_cross_group_scales", call.into_cross_group_scales, call.cross_group_scales);
  return check.wrong;
}

std::string disagreement(const Dequantize& call) {
  Check check;
  const int64_t groups = groups_of_source(&check, call.result, call.group_sizes);
  check.require(is_float(call.result.dtype), [&] { return Check::named("result", call.result) + ", expected floats"; });
  check.require(call.block_outer == 1 || (call.block_outer == call.block && !call.group_sizes.present()),
                [] { return "block_outer: expected 1, or for weights that of square blocks"; });
  check.require(!call.scales.present() || is_scale(call.scales.dtype),
                [&] { return Check::named("scales", call.scales) + ", expected the type of a scale"; });
  if (!check.wrong.empty()) return check.wrong;
  stored_form(&check, call, {"values", call.values, call.scales, call.group_scales}, call.result,
              call.group_sizes.present(), call.cross != 0, groups);
  return check.wrong;
}

std::string disagreement(const ScaleUpdate& call) {
  Check check;
  check.rank("scale", call.scale, 2);
  check.rank("history", call.history, 3);
  if (!check.wrong.empty()) return check.wrong;
  const int64_t roles = call.scale.dims[0], groups = call.scale.dims[1], length = call.history.dims[1];
  check.shape("history", call.history, {roles, length, groups});
  check.not_empty("history", call.history, 0);
  some_groups(&check, "scale", call.scale, 1);
  check.shape("top", call.top, {roles});
  check.shape("new_scale", call.new_scale, {roles, groups});
  check.shape("new_history", call.new_history, {roles, length, groups});
  for (const TensorView* view : {&call.scale, &call.history, &call.top, &call.new_scale, &call.new_history}) {
    check.dtype("operand", *view, DType::f32);
  }
  same_buffer(&check, "into_new_scale", call.into_new_scale, call.new_scale);
  same_buffer(&check, "into_new_history", call.into_new_history, call.new_history);
  return check.wrong;
}

namespace {

// What the calls of parts of weights have in common.
template <class Call>
void shards(Check* check, const Call& call) {
  check->rank("source", call.source, 3);
  some_groups(check, "source", call.source);
  check->not_empty("source", call.source, 1);
  check->require(is_float(call.source.dtype),
                 [&] { return Check::named("source", call.source) + ", expected floats"; });
  check->require(call.block_outer == 1 || call.block_outer == call.block,
                 [] { return "block_outer: expected 1, or that of square blocks"; });
  if (!check->wrong.empty()) return;
  check->shape("source_table", call.source_table, {3, call.source.dims[0]});
  check->dtype("source_table", call.source_table, DType::i64);
  check->shape("amax", call.amax, {call.source.dims[0], ShardSlots::of(call).count});
  check->dtype("amax", call.amax, DType::i32);
}

}  // namespace

std::string disagreement(const ShardAmax& call) {
  Check check;
  shards(&check, call);
  same_buffer(&check, "into_amax", call.into_amax, call.amax);
  return check.wrong;
}

std::string disagreement(const ShardCast& call) {
  Check check;
  shards(&check, call);
  const Quantize whole = whole_of(call);
  for (const auto& [result, into] : {std::pair{&whole.values, &whole.into_values},
                                     {&whole.scales, &whole.into_scales},
                                     {&whole.group_scales, &whole.into_group_scales},
                                     {&whole.cross_values, &whole.into_cross_values},
                                     {&whole.cross_scales, &whole.into_cross_scales},
                                     {&whole.cross_group_scales, &whole.into_cross_group_scales}}) {
    check.require(result->present() == into->present(),
                  [] { return "results: expected a buffer for every one, for others have written their part"; });
  }
  return check.wrong.empty() ? disagreement(whole) : check.wrong;
}

}  // namespace grouped
