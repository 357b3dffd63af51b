// Every native call: its operands in slot order, its result, its static parameters. All bindings read these lists
// through `visit`; a test compares them with grouped_core/calls.py.
//
// Letters: G groups, M rows, K contracted feature axis, N result's feature axis.
// group_sizes is int32 [G] on the device. Group g owns rows end(g-1) ... end(g)-1, end(g) = min(M, sum of
// max(size, 0) up to g), summed in 64 bits. Rows past the last end are the tail: never read; written as zero, or left
// alone where the result is the caller's buffer (`into`).
#pragma once

#include <string>

#include "cc/api/routing.h"
#include "cc/api/tensor.h"

namespace grouped {

// The scales of two quantised operands (numerics 2.4), and how their blocks are laid out. A value is code * scale *
// group scale; what is absent counts as 1. An operand of uint8 holds two E2M1 codes per byte, the even one in the low
// half, along its last axis. The blocks of a weight run along its last axis, which rhs_axis = 2 contracts. With
// rhs_axis = 1 `grouped_matmul` and `grouped_matmul_dact` contract the other axis of the same values,
// `grouped_matmul_act` only that of 8-bit codes without scales of blocks.
struct OperandScales {
  TensorView lhs_scales;  // of blocks along the contracted axis; shapes below
  TensorView rhs_scales;  // likewise
  TensorView lhs_group_scales, rhs_group_scales;
  int64_t lhs_block = 0;  // contracted elements that share a scale; 0: no such scales
  int64_t rhs_block = 0;
  int64_t rhs_block_outer = 1;        // rows of the stored rhs that share a scale (square blocks); 1: none do
  std::string promote = "every_128";  // fp8 partial sums go to fp32 "every_128" contracted elements, or "never" (fast)

  template <class Visitor>
  void visit_inputs(Visitor& v) {
    v.optional("lhs_scales", lhs_scales, "[?, ?] scale");
    v.optional("rhs_scales", rhs_scales, "[?, ?] | [G, +, +] scale");
    v.optional("lhs_group_scales", lhs_group_scales, "[G] float32");
    v.optional("rhs_group_scales", rhs_group_scales, "[G] float32");
  }
  template <class Visitor>
  void visit_params(Visitor& v) {
    v.param("lhs_block", lhs_block);
    v.param("rhs_block", rhs_block);
    v.param("rhs_block_outer", rhs_block_outer);
    v.param("promote", promote);
  }
};

// A product of low rank that is added to another in its fp32 sums, in front of everything else (numerics 10): rows
// [M, R] times the weight of their group. Absent, or both are there, plain and of one type.
struct LowRank {
  TensorView low_lhs;
  TensorView low_rhs;        // [G, R, N] or [G, N, R]; data is null where low_rhs_table is present
  TensorView low_rhs_table;  // addresses of one weight per group
  int64_t low_rhs_axis = 1;  // contracted axis of low_rhs: 1 or 2

  bool present() const { return low_lhs.present(); }

  template <class Visitor>
  void visit_inputs(Visitor& v) {
    v.optional("low_lhs", low_lhs, "[M, R] plain");
    v.optional("low_rhs", low_rhs, "[G, +, +] as low_lhs, with low_lhs");
    v.optional("low_rhs_table", low_rhs_table, "[G] int64");
  }
  template <class Visitor>
  void visit_params(Visitor& v) {
    v.param("low_rhs_axis", low_rhs_axis);
  }
};

// Ragged rows (contract_rows = 0), [M, N]:  result[r] = s(r) * (lhs[r] @ rhs[g(r)] + bias[g(r)]), s = row_scale or 1;
//   with scale_bias the scale multiplies the bias alone. rhs is [G, K, N] (rhs_axis = 1) or [G, N, K] (rhs_axis = 2).
//   Its contraction may be cut into two arrays of equal shape, `rhs` and `rhs_up` (halves.h): the bits are those of
//   one. result_half: 1, 2 make the first, second half of the columns of a result (and take that of the bias) twice as
//   wide as the product, and touch no others, in tail rows neither.
// Ragged contraction (contract_rows = 1), [G, A, B]:  result[g] = sum over the rows r of g of outer(lhs[r], rhs[r])
//   (+ into[g] with accumulate); lhs is [M, A], rhs is [M, B], rhs_axis = 0. An empty group gives zero, and with
//   accumulate is not written. lhs_half and rhs_half: 1, 2 read the first, second half of that operand's columns only.
//   Quantised operands have rows padded to segments: with `segment` = S, group g starts at row S * sum of
//   ceil(size / S) of the groups before it, of a fixed number P of rows; lhs is [P, A], rhs [P, B], or, with
//   `transposed`, [A, P] and [B, P]. A group's segment is contracted whole: behind its last row are zero codes, or the
//   rest of a rotated block.
// Neither a weight in two arrays nor halves of columns come beside quantised operands, or beside a low-rank product.
// Shapes of block scales, C contracted, b the block: float32 [C/b, M] for lhs, [G, N/outer, C/b] for rhs; with segments
//   [P/b, A] and [P/b, B]; of other types [M, C/b] for lhs, the same for the rest. Divisions round up.
// Sums are fp32; the order of the epilogue is scale, bias, row scale, accumulate, one rounding (numerics 1).
struct GroupedMatmul {
  static constexpr const char* kName = "grouped_matmul";
  TensorView lhs;
  TensorView rhs;  // data is null where rhs_table is present; dims are those of the packed form
  TensorView group_sizes;
  TensorView bias;        // ragged rows only; data is null where bias_table is present
  TensorView row_scale;   // ragged rows only
  TensorView into;        // the caller's buffer, the same memory as `result`; data is null where into_table is present
  TensorView rhs_table;   // addresses of one [K, N] (or [N, K]) weight per group
  TensorView bias_table;  // addresses of one [N] bias per group
  TensorView into_table;  // addresses of one [A, B] destination per group; 0 skips the group
  TensorView rhs_up;      // the rest of the contraction, shaped as `rhs`; ragged rows only
  OperandScales scales;
  LowRank low;  // ragged rows only
  TensorView result;
  int64_t contract_rows = 0;    // 0: rows are grouped (forward, dgrad); 1: the sum runs over a group's rows (wgrad)
  int64_t rhs_axis = 1;         // contracted axis of rhs: 1 or 2, 0 with contract_rows
  int64_t scale_bias = 0;       // 1: row_scale multiplies the bias only
  int64_t accumulate = 0;       // 1: add to what `into` holds; 0 beside a low-rank product
  int64_t batch_invariant = 0;  // 1: bits of a row depend neither on M nor on G, those of a group's gradient not on G
  int64_t aligned_tables = 1;   // 1: every address in a table is a multiple of 16 bytes
  int64_t rows_hint = 0;        // usual rows per group, for tile choice; 0: unknown. Never changes meaning
  int64_t lhs_half = 0;         // 1, 2: with contract_rows, the half of the columns of lhs that is read; 0: all
  int64_t rhs_half = 0;         // of rhs
  int64_t result_half = 0;      // 1, 2: with ragged rows, the half of the columns of the result that is made; 0: all
  std::string fp32_mode = "tf32x3";  // float32 operands on tensor cores: tf32x3, tf32; ieee elsewhere
  int64_t segment = 0;               // contract_rows: rows of a group are padded to a multiple of this; 0: they are not
  int64_t transposed = 0;            // 1: padded rows are the last axis of both operands
  int64_t rows = 0;                  // M, where segments hide it

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("lhs", lhs, "[?, ?] number");
    v.input("rhs", rhs, "[?, ?] | [G, +, +] number");
    v.input("group_sizes", group_sizes, "[G] int32");
    v.optional("bias", bias, "[G, N] plain");
    v.optional("row_scale", row_scale, "[M] float32");
    v.optional("into", into, "as result");
    v.optional("rhs_table", rhs_table, "[G] int64");
    v.optional("bias_table", bias_table, "[G] int64");
    v.optional("into_table", into_table, "[G] int64");
    v.optional("rhs_up", rhs_up, "as rhs");
    scales.visit_inputs(v);
    low.visit_inputs(v);
    v.output("result", result, "[M, N] | [G, A, B] plain");
    v.param("contract_rows", contract_rows);
    v.param("rhs_axis", rhs_axis);
    v.param("scale_bias", scale_bias);
    v.param("accumulate", accumulate);
    v.param("batch_invariant", batch_invariant);
    v.param("aligned_tables", aligned_tables);
    v.param("rows_hint", rows_hint);
    v.param("lhs_half", lhs_half);
    v.param("rhs_half", rhs_half);
    v.param("result_half", result_half);
    v.param("fp32_mode", fp32_mode);
    scales.visit_params(v);
    low.visit_params(v);
    v.param("segment", segment);
    v.param("transposed", transposed);
    v.param("rows", rows);
  }
};

// What the second factor B of a low-rank adapter makes of dy [M, N] in backward (numerics 10), in one pass over dy:
//   rows_grad[r] = rows[r] @ factor[g(r)]^T, [M, R];  factor_grad[g] = sum over the rows r of g of outer(low_rows[r],
//   rows[r]).
// `factor` is [G, R, N] (factor_axis = 2) or [G, N, R] (1), and its gradient has the same layout. Bits are those of two
// products.
struct LowRankGrads {
  static constexpr const char* kName = "low_rank_grads";
  TensorView rows;      // dy
  TensorView factor;    // data is null where factor_table is present
  TensorView low_rows;  // what `factor` multiplied in forward
  TensorView group_sizes;
  TensorView factor_table;  // addresses of one factor per group
  TensorView rows_grad, factor_grad;
  int64_t factor_axis = 2;      // that of N
  int64_t batch_invariant = 0;  // the next four as in GroupedMatmul
  int64_t aligned_tables = 1;
  int64_t rows_hint = 0;
  std::string fp32_mode = "tf32x3";

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("rows", rows, "[M, N] plain");
    v.input("factor", factor, "[G, +, +] as rows");
    v.input("low_rows", low_rows, "[M, R] as rows");
    v.input("group_sizes", group_sizes, "[G] int32");
    v.optional("factor_table", factor_table, "[G] int64");
    v.output("rows_grad", rows_grad, "[M, R] plain");
    v.output("factor_grad", factor_grad, "[G, +, +] plain");
    v.param("factor_axis", factor_axis);
    v.param("batch_invariant", batch_invariant);
    v.param("aligned_tables", aligned_tables);
    v.param("rows_hint", rows_hint);
    v.param("fp32_mode", fp32_mode);
  }
};

// result[g] = sum over the rows r of g of s(r) * rows[r], [G, N]; s = row_scale or 1. Fixed order, fp32, one rounding.
struct GroupSum {
  static constexpr const char* kName = "group_sum";
  TensorView rows, group_sizes, row_scale, result;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("rows", rows, "[M, N] plain");
    v.input("group_sizes", group_sizes, "[G] int32");
    v.optional("row_scale", row_scale, "[M] float32");
    v.output("result", result, "[G, N] plain");
  }
};

// result[r] = <lhs[r], rhs[r]> + <group_lhs[r], group_rhs[g(r)]>, [M] float32; either pair may be absent. One fp32 sum
// in a fixed order; tail rows are zero.
struct RowDot {
  static constexpr const char* kName = "row_dot";
  TensorView group_sizes, lhs, rhs, group_lhs;
  TensorView group_rhs;        // data is null where group_rhs_table is present
  TensorView group_rhs_table;  // addresses of one [N] vector per group
  TensorView result;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("group_sizes", group_sizes, "[G] int32");
    v.optional("lhs", lhs, "[M, K] plain");
    v.optional("rhs", rhs, "[M, K] plain, with lhs");
    v.optional("group_lhs", group_lhs, "[M, N] plain");
    v.optional("group_rhs", group_rhs, "[G, N] plain, with group_lhs");
    v.optional("group_rhs_table", group_rhs_table, "[G] int64");
    v.output("result", result, "[M] float32");
  }
};

// result[r] = row_scale[r] * rows[r], [M, N], in fp32 with one rounding; tail rows are zero, or kept in `into`.
struct ScaleRows {
  static constexpr const char* kName = "scale_rows";
  TensorView rows, row_scale, group_sizes;
  TensorView into;  // the caller's buffer, the same memory as `result`
  TensorView result;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("rows", rows, "[M, N] plain");
    v.input("row_scale", row_scale, "[M] float32");
    v.input("group_sizes", group_sizes, "[G] int32");
    v.optional("into", into, "as result");
    v.output("result", result, "[M, N] plain");
  }
};

// result[r] = base[r] + factor * m * rows[r], [M, N], in fp32 with one rounding; base is 0 where it is absent. With a
// key, m drops elements at random: 0 where the upper 24 bits of their random word, over 2^24, are below `rate`, else 1;
// word `column mod 4` of Philox at the counter (column / 4, row in its group, group, stream). A term of 0 leaves base
// as it is, the sign of a zero included. Tail rows are zero, or kept in `into`.
struct AddRows {
  static constexpr const char* kName = "add_rows";
  TensorView rows, group_sizes, base;
  TensorView key;   // low word first
  TensorView into;  // the caller's buffer, the same memory as `result`
  TensorView result;
  float factor = 1;
  float rate = 0;      // 0 to 1, without 1
  int64_t stream = 0;  // number of the mask among those of one key

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("rows", rows, "[M, N] plain");
    v.input("group_sizes", group_sizes, "[G] int32");
    v.optional("base", base, "[M, N] float32");
    v.optional("key", key, "[2] uint32");
    v.optional("into", into, "as result");
    v.output("result", result, "[M, N] plain");
    v.param("factor", factor);
    v.param("rate", rate);
    v.param("stream", stream);
  }
};

// An activation as parameters: numerics 5 has the formulas, cc/math/activation.h the arithmetic. Its input row holds
// the gate half and the linear half in blocks of `interleave` columns (0: each half in one piece); kinds that are not
// gated have the gate alone. Parameters that a kind lacks are ignored.
struct ActivationParams {
  std::string kind = "swiglu";  // a name of activation_kinds()
  float alpha = 0;              // factor inside the logistic function
  float limit = 0;              // clamp; infinite: none
  float offset = 0;             // added to the linear half after its clamp
  float beta1 = 0;              // ranges of the two tanh
  float beta2 = 0;
  int64_t interleave = 0;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.param("kind", kind);
    v.param("alpha", alpha);
    v.param("limit", limit);
    v.param("offset", offset);
    v.param("beta1", beta1);
    v.param("beta2", beta2);
    v.param("interleave", interleave);
  }
};

// The two forms of a source that is stored in a quantised format, each made if its `values` are asked for.
struct QuantizedForms {
  TensorView values, scales, group_scales, cross_values, cross_scales, cross_group_scales;

  template <class Visitor>
  void visit_forms(Visitor&& v) {
    v.optional_output("values", values, "[?, ?] | [G, ?, ?] code");
    v.optional_output("scales", scales, "[?, ?] | [G, ?, ?] scale");
    v.optional_output("group_scales", group_scales, "[G] float32");
    v.optional_output("cross_values", cross_values, "[?, ?] | [G, ?, ?] code");
    v.optional_output("cross_scales", cross_scales, "[?, ?] | [G, ?, ?] scale");
    v.optional_output("cross_group_scales", cross_group_scales, "[G] float32");
  }
};

// The caller's buffers, each the memory of the form's array of that name.
struct QuantizedBuffers {
  TensorView into_values, into_scales, into_group_scales, into_cross_values, into_cross_scales, into_cross_group_scales;

  template <class Visitor>
  void visit_buffers(Visitor&& v) {
    v.optional("into_values", into_values, "as values");
    v.optional("into_scales", into_scales, "as scales");
    v.optional("into_group_scales", into_group_scales, "as group_scales");
    v.optional("into_cross_values", into_cross_values, "as cross_values");
    v.optional("into_cross_scales", into_cross_scales, "as cross_scales");
    v.optional("into_cross_group_scales", into_cross_group_scales, "as cross_group_scales");
  }
};

// What a call that stores in a quantised format has beside its source: numerics 2 has the formats, cc/math/scales.h the
// arithmetic. Two forms of the source, rows [M, X] with group_sizes or weights [G, A, B], each made if its `values` are
// asked for, from one pass:
//   values, the last axis contracted:   [M, X] or [G, A, B]
//   cross_values, the axis before it:   [G, B, A], or rows padded to segments: [P, X], transposed [X, P] (see
//                                       GroupedMatmul)
// of E4M3, E5M2, or uint8 with two E2M1 codes per byte along the last axis, whose length is then halved, rounding up.
// Block scales have the shapes that GroupedMatmul reads; group scales are float32 [G]. Blocks along rows start again
// with each group. Rows past the groups and padding hold what quantising zeros gives.
struct Quantizing : QuantizedForms {
  TensorView scale;           // scales, given (delayed scaling) instead of found; 0: none yet
  TensorView key;             // of stochastic rounding, low word first; absent: zero
  TensorView into_amax;       // [G] float32, the memory of `amax`: magnitudes that the maximum is merged with
  TensorView amax;            // largest magnitude of the group's values, merged with into_amax
  std::string rule = "fp32";  // fp32 (2.2), e8m0 (2.3), nvfp4: an E4M3 scale per block and an fp32 one per group
  int64_t block = 0;          // contracted elements that share a scale; 0: the whole group does
  int64_t block_outer = 1;    // elements of the other axis that share it too (square blocks); 1: none do
  int64_t segment = 0;        // of the cross form of rows
  int64_t transposed = 0;     // likewise
  int64_t pow2 = 0;           // fp32 rule: scales are rounded down to powers of two
  float eps = 0;              // fp32 rule: least amax
  int64_t starts_at_one = 0;  // with scale: where that is 0 the scale is 1, instead of found as without `scale`
  int64_t stochastic = 0;     // E2M1 codes are rounded stochastically
  int64_t stream = 0;         // of random numbers: that of `values`, the next one is that of `cross_values`
  int64_t rotate = 0;         // cross form of rows: Hadamard transform of each block
  std::string four_over_six;  // nvfp4: "absolute" or "square" errors choose between two scales; empty: no choice
  int64_t full_range = 0;     // beside four_over_six: groups are scaled to the range that they have without

  bool stores() const { return values.present() || cross_values.present(); }

  template <class Visitor>
  void visit_inputs(Visitor&& v) {
    v.optional("scale", scale, "[G] float32");
    v.optional("key", key, "[2] uint32");
    v.optional("into_amax", into_amax, "as amax");
  }
  template <class Visitor>
  void visit_results(Visitor&& v) {
    visit_forms(v);
    v.optional_output("amax", amax, "[G] float32");
  }
  template <class Visitor>
  void visit_params(Visitor&& v) {
    v.param("rule", rule);
    v.param("block", block);
    v.param("block_outer", block_outer);
    v.param("segment", segment);
    v.param("transposed", transposed);
    v.param("pow2", pow2);
    v.param("eps", eps);
    v.param("starts_at_one", starts_at_one);
    v.param("stochastic", stochastic);
    v.param("stream", stream);
    v.param("rotate", rotate);
    v.param("four_over_six", four_over_six);
    v.param("full_range", full_range);
  }
};

// What a call stores of the activated rows [M, F] beside its result: the cross form alone, which a weight gradient
// reads, and no magnitudes.
struct QuantizingActivated : Quantizing {
  template <class Visitor>
  void visit_inputs(Visitor&& v) {
    v.optional("activated_scale", scale, "[G] float32");
  }
  template <class Visitor>
  void visit_results(Visitor&& v) {
    v.optional_output("activated_values", cross_values, "[?, ?] code");
    v.optional_output("activated_scales", cross_scales, "[?, ?] scale");
    v.optional_output("activated_group_scales", cross_group_scales, "[G] float32");
  }
  template <class Visitor>
  void visit_params(Visitor&& v) {
    v.param("activated_rule", rule);
    v.param("activated_block", block);
    v.param("activated_segment", segment);
    v.param("activated_transposed", transposed);
    v.param("activated_pow2", pow2);
    v.param("activated_eps", eps);
    v.param("activated_starts_at_one", starts_at_one);
    v.param("activated_stochastic", stochastic);
    v.param("activated_rotate", rotate);
    v.param("activated_four_over_six", four_over_six);
    v.param("activated_full_range", full_range);
  }
};

// Letters of the four calls below: F expert width, W = 2F for gated kinds and F for others; h a row of W columns in the
// activation's order; t = act(h) unscaled; s(r) = row_scale[r] or 1. `result` and friends are written in valid rows;
// tail rows are zero with zero_tail, else undefined (on the CPU zero too). row_sum is zero there always.

// hidden[r] = lhs[r] @ rhs[g(r)] + bias[g(r)], rounded to the dtype `compute` (empty: that of lhs);  result[r] = s(r) *
// act(hidden[r]), rounded to the dtype `compute` where `quantized` says how it is quantised; then `result` is absent.
struct GroupedMatmulAct {
  static constexpr const char* kName = "grouped_matmul_act";
  TensorView lhs;
  TensorView rhs;  // [G, K, W] or [G, W, K]; data is null where rhs_table is present
  TensorView group_sizes;
  TensorView bias;  // data is null where bias_table is present
  TensorView row_scale;
  TensorView rhs_table;   // addresses of one weight per group
  TensorView bias_table;  // addresses of one [W] bias per group
  TensorView rhs_up;      // the linear halves; then rhs has the gates, [G, K, F] or [G, F, K], not interleaved
  OperandScales scales;
  LowRank low;
  Quantizing quantized;
  TensorView result;
  TensorView hidden;     // absent: not stored. Rounded to `compute` either way
  int64_t rhs_axis = 1;  // contracted axis of rhs: 1 or 2
  ActivationParams activation;
  int64_t zero_tail = 1;
  int64_t batch_invariant = 0;  // the next four as in GroupedMatmul
  int64_t aligned_tables = 1;
  int64_t rows_hint = 0;
  std::string fp32_mode = "tf32x3";
  std::string compute;  // element type of hidden rows, stored or not; empty: that of lhs

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("lhs", lhs, "[M, ?] number");
    v.input("rhs", rhs, "[G, +, +] number");
    v.input("group_sizes", group_sizes, "[G] int32");
    v.optional("bias", bias, "[G, W] plain");
    v.optional("row_scale", row_scale, "[M] float32");
    v.optional("rhs_table", rhs_table, "[G] int64");
    v.optional("bias_table", bias_table, "[G] int64");
    v.optional("rhs_up", rhs_up, "as rhs");
    scales.visit_inputs(v);
    low.visit_inputs(v);
    quantized.visit_inputs(v);
    v.optional_output("result", result, "[M, F] plain");
    v.optional_output("hidden", hidden, "[M, W] plain");
    quantized.visit_results(v);
    v.param("rhs_axis", rhs_axis);
    activation.visit(v);
    v.param("zero_tail", zero_tail);
    v.param("batch_invariant", batch_invariant);
    v.param("aligned_tables", aligned_tables);
    v.param("rows_hint", rows_hint);
    v.param("fp32_mode", fp32_mode);
    scales.visit_params(v);
    low.visit_params(v);
    v.param("compute", compute);
    quantized.visit_params(v);
  }
};

// Gradients at the hidden row, with dz[r] = lhs[r] @ rhs[g(r)] (lhs is dy; dz is fp32 where it stays in registers and
// is rounded to the dtype of hidden where it is stored):
//   result[r] = s(r) * dz[r] * act'(hidden[r]), [M, W];  activated[r] = s(r) * act(hidden[r]), [M, F];
//   row_sum[r] = row_base[r] + <dz[r], act(hidden[r])>, [M], one fp32 sum in a fixed order.
// Any of the three results may be absent, but not all. `quantized`: what quantised forms of `result` are wanted, beside
// it or in its place; `quantized_activated`, beside these: that of activated[r] rounded to the dtype of hidden.
struct GroupedMatmulDact {
  static constexpr const char* kName = "grouped_matmul_dact";
  TensorView lhs;
  TensorView rhs;  // [G, N, F] or [G, F, N]; data is null where rhs_table is present
  TensorView group_sizes, hidden, row_scale, row_base;
  TensorView rhs_table;  // addresses of one weight per group
  OperandScales scales;
  LowRank low;
  Quantizing quantized;
  QuantizingActivated quantized_activated;
  TensorView result, activated, row_sum;
  int64_t rhs_axis = 1;  // contracted axis of rhs: 1 or 2
  ActivationParams activation;
  int64_t zero_tail = 1;
  int64_t batch_invariant = 0;  // the next four as in GroupedMatmul
  int64_t aligned_tables = 1;
  int64_t rows_hint = 0;
  std::string fp32_mode = "tf32x3";

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("lhs", lhs, "[M, ?] number");
    v.input("rhs", rhs, "[G, +, +] number");
    v.input("group_sizes", group_sizes, "[G] int32");
    v.input("hidden", hidden, "[M, W] plain");
    v.optional("row_scale", row_scale, "[M] float32");
    v.optional("row_base", row_base, "[M] float32");
    v.optional("rhs_table", rhs_table, "[G] int64");
    scales.visit_inputs(v);
    low.visit_inputs(v);
    quantized.visit_inputs(v);
    quantized_activated.visit_inputs(v);
    v.optional_output("result", result, "[M, W] plain");
    v.optional_output("activated", activated, "[M, F] plain");
    v.optional_output("row_sum", row_sum, "[M] float32");
    quantized.visit_results(v);
    quantized_activated.visit_results(v);
    v.param("rhs_axis", rhs_axis);
    activation.visit(v);
    v.param("zero_tail", zero_tail);
    v.param("batch_invariant", batch_invariant);
    v.param("aligned_tables", aligned_tables);
    v.param("rows_hint", rows_hint);
    v.param("fp32_mode", fp32_mode);
    scales.visit_params(v);
    low.visit_params(v);
    quantized.visit_params(v);
    quantized_activated.visit_params(v);
  }
};

// result[r] = s(r) * act(rows[r]), in fp32 with one rounding.
struct ActivationForward {
  static constexpr const char* kName = "activation";
  TensorView rows, group_sizes, row_scale, result;
  ActivationParams activation;
  int64_t zero_tail = 1;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("rows", rows, "[M, W] plain");
    v.input("group_sizes", group_sizes, "[G] int32");
    v.optional("row_scale", row_scale, "[M] float32");
    v.output("result", result, "[M, F] plain");
    activation.visit(v);
    v.param("zero_tail", zero_tail);
  }
};

// The element type of what is between the product and the activation.
inline DType compute_type(const GroupedMatmulAct& call) {
#define X(name, tag, bytes) \
  if (call.compute == name) return DType::tag;
  GROUPED_DTYPES(X)
#undef X
  return call.lhs.dtype;
}
inline DType compute_type(const GroupedMatmulDact& call) { return call.hidden.dtype; }

// What GroupedMatmulDact does with dz, given dz.
struct ActivationGrad {
  static constexpr const char* kName = "activation_grad";
  TensorView grad;  // dz
  TensorView rows;  // the hidden rows
  TensorView group_sizes, row_scale, row_base, result, activated, row_sum;
  ActivationParams activation;
  int64_t zero_tail = 1;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("grad", grad, "[M, F] plain");
    v.input("rows", rows, "[M, W] plain");
    v.input("group_sizes", group_sizes, "[G] int32");
    v.optional("row_scale", row_scale, "[M] float32");
    v.optional("row_base", row_base, "[M] float32");
    v.optional_output("result", result, "[M, W] plain");
    v.optional_output("activated", activated, "[M, F] plain");
    v.optional_output("row_sum", row_sum, "[M] float32");
    activation.visit(v);
    v.param("zero_tail", zero_tail);
  }
};

// Stores rows or weights in a quantised format. With `places` the rows are gathered: row r is that of place places[r]
// of the source, whose rows have `slots` places each, or zeros if there is no such place.
struct Quantize : Quantizing, QuantizedBuffers {
  static constexpr const char* kName = "quantize";
  TensorView source;  // float32, bfloat16 or float16; data is null where source_table is present
  TensorView places;
  TensorView group_sizes;   // absent: weights, one member per group
  TensorView source_table;  // addresses of one [A, B] weight per group
  TensorView skip;          // not zero leaves every result as it is; wants all `into_`
  int64_t slots = 1;

  // What is quantised: the rows that are gathered, or the source.
  TensorView rows() const {
    TensorView gathered = source;
    if (places.present()) gathered.dims[0] = places.dims[0];
    return gathered;
  }

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("source", source, "[M, X] | [G, A, B] plain");
    v.optional("group_sizes", group_sizes, "[G] int32");
    v.optional("source_table", source_table, "[G] int64");
    visit_inputs(v);
    v.optional("skip", skip, "[1] int32");
    v.optional("places", places, "[P] int32");
    visit_buffers(v);
    visit_results(v);
    visit_params(v);
    v.param("slots", slots);
  }
};

// The values of one quantised form, in fp32 and rounded once to the dtype of `result`: rows [M, X] with group_sizes,
// else weights [G, A, B]. `cross` says which form `values` are. Rows past the groups are zero.
struct Dequantize {
  static constexpr const char* kName = "dequantize";
  TensorView values;
  TensorView group_sizes;  // absent: weights
  TensorView scales;       // of blocks
  TensorView group_scales, result;
  int64_t cross = 0;
  int64_t block = 0;  // the next four as in Quantize
  int64_t block_outer = 1;
  int64_t segment = 0;
  int64_t transposed = 0;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("values", values, "[?, ?] | [G, ?, ?] code");
    v.optional("group_sizes", group_sizes, "[G] int32");
    v.optional("scales", scales, "[?, ?] | [G, ?, ?] scale");
    v.optional("group_scales", group_scales, "[G] float32");
    v.output("result", result, "[M, X] | [G, A, B] plain");
    v.param("cross", cross);
    v.param("block", block);
    v.param("block_outer", block_outer);
    v.param("segment", segment);
    v.param("transposed", transposed);
  }
};

// Weights [G, A, B] that are quantised in parts, each by the rank that holds it: two calls, and between them a maximum
// of `amax` over ranks, as int32. `source_table` [3, G] int64 has for each member the address of the elements that are
// here, 0 for none, which of the member's A * B elements is the first, and how many there are; a first one of -1 leaves
// the member's codes and scales as they are. `source` says shape and dtype and has no data.
//
// amax[g], [G, S] int32, has the bits of the largest magnitudes among the elements of this shard, 0 where none do: of
// the member; then of its blocks along B, [A / outer, B / block]; then, unless blocks are square, of those along A,
// [B, A / block]. Divisions round up; without blocks S is 1.
struct ShardAmax {
  static constexpr const char* kName = "shard_amax";
  TensorView source;
  TensorView source_table;
  TensorView into_amax;  // the caller's buffer, the memory of `amax`
  TensorView amax;
  int64_t block = 0;  // as in Quantize, with the next
  int64_t block_outer = 1;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("source", source, "[G, A, B] plain");
    v.input("source_table", source_table, "[3, G] int64");
    v.optional("into_amax", into_amax, "as amax");
    v.output("amax", amax, "[G, L] int32");
    v.param("block", block);
    v.param("block_outer", block_outer);
  }
};

// Given amax of whole members: the codes of the elements of this shard, no others, and every scale. The bits are those
// of Quantize.
struct ShardCast : QuantizedForms, QuantizedBuffers {
  static constexpr const char* kName = "shard_cast";
  TensorView source;
  TensorView source_table, amax;
  TensorView scale;           // scales of delayed scaling
  TensorView skip;            // not zero leaves every result as it is
  std::string rule = "fp32";  // as in Quantize, with the next
  int64_t block = 0;
  int64_t block_outer = 1;
  int64_t pow2 = 0;
  float eps = 0;
  int64_t starts_at_one = 0;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("source", source, "[G, A, B] plain");
    v.input("source_table", source_table, "[3, G] int64");
    v.input("amax", amax, "[G, L] int32");
    v.optional("scale", scale, "[G] float32");
    v.optional("skip", skip, "[1] int32");
    visit_buffers(v);
    visit_forms(v);
    v.param("rule", rule);
    v.param("block", block);
    v.param("block_outer", block_outer);
    v.param("pow2", pow2);
    v.param("eps", eps);
    v.param("starts_at_one", starts_at_one);
  }
};

// The call that has the same results, where the shard has all elements.
inline Quantize whole_of(const ShardCast& call) {
  Quantize whole;
  whole.source = call.source;
  whole.scale = call.scale;
  whole.skip = call.skip;
  whole.into_values = call.into_values;
  whole.into_scales = call.into_scales;
  whole.into_group_scales = call.into_group_scales;
  whole.into_cross_values = call.into_cross_values;
  whole.into_cross_scales = call.into_cross_scales;
  whole.into_cross_group_scales = call.into_cross_group_scales;
  whole.values = call.values;
  whole.scales = call.scales;
  whole.group_scales = call.group_scales;
  whole.cross_values = call.cross_values;
  whole.cross_scales = call.cross_scales;
  whole.cross_group_scales = call.cross_group_scales;
  whole.rule = call.rule;
  whole.block = call.block;
  whole.block_outer = call.block_outer;
  whole.pow2 = call.pow2;
  whole.eps = call.eps;
  whole.starts_at_one = call.starts_at_one;
  return whole;
}

// Delayed scaling, once per step: scales from the history of amaxes (numerics 2.5), for R operand roles at once.
struct ScaleUpdate {
  static constexpr const char* kName = "scale_update";
  TensorView scale;           // those before
  TensorView history;         // amaxes, slot 0 the newest
  TensorView top;             // the largest value * 2^-margin of each role
  TensorView into_new_scale;  // the caller's buffers, each the memory of the result of that name
  TensorView into_new_history, new_scale, new_history;
  std::string algorithm = "max";  // over the history: max, most_recent

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("scale", scale, "[R, G] float32");
    v.input("history", history, "[R, L, G] float32");
    v.input("top", top, "[R] float32");
    v.optional("into_new_scale", into_new_scale, "as new_scale");
    v.optional("into_new_history", into_new_history, "as new_history");
    v.output("new_scale", new_scale, "[R, G] float32");
    v.output("new_history", new_history, "[R, L, G] float32");
    v.param("algorithm", algorithm);
  }
};

// The list that every binding iterates over.
#define GROUPED_CALLS(X) \
  X(GroupedMatmul)       \
  X(LowRankGrads)        \
  X(GroupSum)            \
  X(RowDot)              \
  X(ScaleRows)           \
  X(AddRows)             \
  X(GroupedMatmulAct)    \
  X(GroupedMatmulDact)   \
  X(ActivationForward)   \
  X(ActivationGrad)      \
  X(Quantize)            \
  X(Dequantize)          \
  X(ScaleUpdate)         \
  X(ShardAmax) X(ShardCast) GROUPED_ROUTING_CALLS(X)

}  // namespace grouped
