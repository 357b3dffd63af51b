// Every native call: its operands in slot order, its result, its static parameters. All bindings read these lists
// through `visit`; a test compares them with grouped_core/calls.py.
//
// Letters: G groups, M rows, K contracted feature axis, N result's feature axis.
// group_sizes is int32 [G] on the device. Group g owns rows end(g-1) ... end(g)-1, end(g) = min(M, sum of
// max(size, 0) up to g), summed in 64 bits. Rows past the last end are the tail: never read; written as zero, or left
// alone where the result is the caller's buffer (`into`).
#pragma once

#include <string>

#include "cc/api/tensor.h"

namespace grouped {

// Ragged rows (contract_rows = 0), [M, N]:  result[r] = s(r) * (lhs[r] @ rhs[g(r)] + bias[g(r)]), s = row_scale or 1;
//   with scale_bias the scale multiplies the bias alone. rhs is [G, K, N] (rhs_axis = 1) or [G, N, K] (rhs_axis = 2).
//   Its contraction may be cut into two arrays of equal shape, `rhs` and `rhs_up` (halves.h): the bits are those of
//   one. result_half: 1, 2 make the first, second half of the columns of a result (and take that of the bias) twice as
//   wide as the product, and touch no others, in tail rows neither.
// Ragged contraction (contract_rows = 1), [G, A, B]:  result[g] = sum over the rows r of g of outer(lhs[r], rhs[r])
//   (+ into[g] with accumulate); lhs is [M, A], rhs is [M, B], rhs_axis = 0. An empty group gives zero, and with
//   accumulate is not written. lhs_half and rhs_half: 1, 2 read the first, second half of that operand's columns only.
// Sums are fp32; the order of the epilogue is scale, bias, row scale, accumulate, one rounding (numerics 1).
struct GroupedMatmul {
  static constexpr const char* kName = "grouped_matmul";
  TensorView lhs;
  TensorView rhs;          // data is null where rhs_table is present; dims are those of the packed form
  TensorView group_sizes;  // [G] int32
  TensorView bias;         // [G, N]; ragged rows only; data is null where bias_table is present
  TensorView row_scale;    // [M] float32; ragged rows only
  TensorView into;         // the caller's buffer, the same memory as `result`; data is null where into_table is present
  TensorView rhs_table;    // [G] int64: addresses of one [K, N] (or [N, K]) weight a group
  TensorView bias_table;   // [G] int64: addresses of one [N] bias a group
  TensorView into_table;   // [G] int64: addresses of one [A, B] destination a group; 0 skips the group
  TensorView rhs_up;       // the rest of the contraction, shaped as `rhs`; ragged rows only
  TensorView result;
  int64_t contract_rows = 0;    // 0: rows are grouped (forward, dgrad); 1: the sum runs over a group's rows (wgrad)
  int64_t rhs_axis = 1;         // contracted axis of rhs: 1 or 2, 0 with contract_rows
  int64_t scale_bias = 0;       // 1: row_scale multiplies the bias only
  int64_t accumulate = 0;       // 1: add to what `into` holds
  int64_t batch_invariant = 0;  // 1: a row's bits depend neither on M nor on G
  int64_t aligned_tables = 1;   // 1: every address in a table is a multiple of 16 bytes
  int64_t rows_hint = 0;        // usual rows a group, for tile choice; 0: unknown. Never changes meaning
  int64_t lhs_half = 0;         // 1, 2: with contract_rows, the half of the columns of lhs that is read; 0: all
  int64_t rhs_half = 0;         // of rhs
  int64_t result_half = 0;      // 1, 2: with ragged rows, the half of the columns of the result that is made; 0: all
  std::string fp32_mode = "tf32x3";  // float32 operands on tensor cores: tf32x3, tf32; ieee elsewhere

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("lhs", lhs);
    v.input("rhs", rhs);
    v.input("group_sizes", group_sizes);
    v.optional("bias", bias);
    v.optional("row_scale", row_scale);
    v.optional("into", into);
    v.optional("rhs_table", rhs_table);
    v.optional("bias_table", bias_table);
    v.optional("into_table", into_table);
    v.optional("rhs_up", rhs_up);
    v.output("result", result);
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
  }
};

// result[g] = sum over the rows r of g of s(r) * rows[r], [G, N]; s = row_scale or 1. Fixed order, fp32, one rounding.
struct GroupSum {
  static constexpr const char* kName = "group_sum";
  TensorView rows;         // [M, N]
  TensorView group_sizes;  // [G] int32
  TensorView row_scale;    // [M] float32
  TensorView result;       // [G, N]

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("rows", rows);
    v.input("group_sizes", group_sizes);
    v.optional("row_scale", row_scale);
    v.output("result", result);
  }
};

// result[r] = <lhs[r], rhs[r]> + <group_lhs[r], group_rhs[g(r)]>, [M] float32; either pair may be absent. One fp32 sum
// in a fixed order; tail rows are zero.
struct RowDot {
  static constexpr const char* kName = "row_dot";
  TensorView group_sizes;      // [G] int32
  TensorView lhs;              // [M, K]
  TensorView rhs;              // [M, K]
  TensorView group_lhs;        // [M, N]
  TensorView group_rhs;        // [G, N]; data is null where group_rhs_table is present
  TensorView group_rhs_table;  // [G] int64: addresses of one [N] vector a group
  TensorView result;           // [M] float32

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("group_sizes", group_sizes);
    v.optional("lhs", lhs);
    v.optional("rhs", rhs);
    v.optional("group_lhs", group_lhs);
    v.optional("group_rhs", group_rhs);
    v.optional("group_rhs_table", group_rhs_table);
    v.output("result", result);
  }
};

// result[r] = row_scale[r] * rows[r], [M, N], in fp32 with one rounding; tail rows are zero, or kept in `into`.
struct ScaleRows {
  static constexpr const char* kName = "scale_rows";
  TensorView rows;         // [M, N]
  TensorView row_scale;    // [M] float32
  TensorView group_sizes;  // [G] int32
  TensorView into;         // the caller's buffer, the same memory as `result`
  TensorView result;       // [M, N]

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("rows", rows);
    v.input("row_scale", row_scale);
    v.input("group_sizes", group_sizes);
    v.optional("into", into);
    v.output("result", result);
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

// Letters of the four calls below: F expert width, W = 2F for gated kinds and F for others; h a row of W columns in the
// activation's order; t = act(h) unscaled; s(r) = row_scale[r] or 1. `result` and friends are written in valid rows;
// tail rows are zero with zero_tail, else undefined (on the CPU zero too). row_sum is zero there always.

// hidden[r] = lhs[r] @ rhs[g(r)] + bias[g(r)], rounded;  result[r] = s(r) * act(hidden[r]), rounded.
struct GroupedMatmulAct {
  static constexpr const char* kName = "grouped_matmul_act";
  TensorView lhs;          // [M, K]
  TensorView rhs;          // [G, K, W] or [G, W, K]; data is null where rhs_table is present
  TensorView group_sizes;  // [G] int32
  TensorView bias;         // [G, W]; data is null where bias_table is present
  TensorView row_scale;    // [M] float32
  TensorView rhs_table;    // [G] int64: addresses of one weight a group
  TensorView bias_table;   // [G] int64: addresses of one [W] bias a group
  TensorView rhs_up;       // the linear halves; then rhs has the gates, [G, K, F] or [G, F, K], not interleaved
  TensorView result;       // [M, F]
  TensorView hidden;       // [M, W]; absent: not stored. Rounded to the dtype of lhs either way
  int64_t rhs_axis = 1;    // contracted axis of rhs: 1 or 2
  ActivationParams activation;
  int64_t zero_tail = 1;
  int64_t batch_invariant = 0;  // the next four as in GroupedMatmul
  int64_t aligned_tables = 1;
  int64_t rows_hint = 0;
  std::string fp32_mode = "tf32x3";

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("lhs", lhs);
    v.input("rhs", rhs);
    v.input("group_sizes", group_sizes);
    v.optional("bias", bias);
    v.optional("row_scale", row_scale);
    v.optional("rhs_table", rhs_table);
    v.optional("bias_table", bias_table);
    v.optional("rhs_up", rhs_up);
    v.output("result", result);
    v.optional_output("hidden", hidden);
    v.param("rhs_axis", rhs_axis);
    activation.visit(v);
    v.param("zero_tail", zero_tail);
    v.param("batch_invariant", batch_invariant);
    v.param("aligned_tables", aligned_tables);
    v.param("rows_hint", rows_hint);
    v.param("fp32_mode", fp32_mode);
  }
};

// Gradients at the hidden row, with dz[r] = lhs[r] @ rhs[g(r)] (lhs is dy; dz is fp32 where it stays in registers and
// is rounded to the dtype of lhs where it is stored):
//   result[r] = s(r) * dz[r] * act'(hidden[r]), [M, W];  activated[r] = s(r) * act(hidden[r]), [M, F];
//   row_sum[r] = row_base[r] + <dz[r], act(hidden[r])>, [M], one fp32 sum in a fixed order.
// Any of the three results may be absent, but not all.
struct GroupedMatmulDact {
  static constexpr const char* kName = "grouped_matmul_dact";
  TensorView lhs;          // [M, N]
  TensorView rhs;          // [G, N, F] or [G, F, N]; data is null where rhs_table is present
  TensorView group_sizes;  // [G] int32
  TensorView hidden;       // [M, W]
  TensorView row_scale;    // [M] float32
  TensorView row_base;     // [M] float32
  TensorView rhs_table;    // [G] int64: addresses of one weight a group
  TensorView result;       // [M, W]
  TensorView activated;    // [M, F]
  TensorView row_sum;      // [M] float32
  int64_t rhs_axis = 1;    // contracted axis of rhs: 1 or 2
  ActivationParams activation;
  int64_t zero_tail = 1;
  int64_t batch_invariant = 0;  // the next four as in GroupedMatmul
  int64_t aligned_tables = 1;
  int64_t rows_hint = 0;
  std::string fp32_mode = "tf32x3";

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("lhs", lhs);
    v.input("rhs", rhs);
    v.input("group_sizes", group_sizes);
    v.input("hidden", hidden);
    v.optional("row_scale", row_scale);
    v.optional("row_base", row_base);
    v.optional("rhs_table", rhs_table);
    v.optional_output("result", result);
    v.optional_output("activated", activated);
    v.optional_output("row_sum", row_sum);
    v.param("rhs_axis", rhs_axis);
    activation.visit(v);
    v.param("zero_tail", zero_tail);
    v.param("batch_invariant", batch_invariant);
    v.param("aligned_tables", aligned_tables);
    v.param("rows_hint", rows_hint);
    v.param("fp32_mode", fp32_mode);
  }
};

// result[r] = s(r) * act(rows[r]), in fp32 with one rounding.
struct ActivationForward {
  static constexpr const char* kName = "activation";
  TensorView rows;         // [M, W]
  TensorView group_sizes;  // [G] int32
  TensorView row_scale;    // [M] float32
  TensorView result;       // [M, F]
  ActivationParams activation;
  int64_t zero_tail = 1;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("rows", rows);
    v.input("group_sizes", group_sizes);
    v.optional("row_scale", row_scale);
    v.output("result", result);
    activation.visit(v);
    v.param("zero_tail", zero_tail);
  }
};

// What GroupedMatmulDact does with dz, given dz.
struct ActivationGrad {
  static constexpr const char* kName = "activation_grad";
  TensorView grad;         // [M, F]: dz
  TensorView rows;         // [M, W]: the hidden rows
  TensorView group_sizes;  // [G] int32
  TensorView row_scale;    // [M] float32
  TensorView row_base;     // [M] float32
  TensorView result;       // [M, W]
  TensorView activated;    // [M, F]
  TensorView row_sum;      // [M] float32
  ActivationParams activation;
  int64_t zero_tail = 1;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("grad", grad);
    v.input("rows", rows);
    v.input("group_sizes", group_sizes);
    v.optional("row_scale", row_scale);
    v.optional("row_base", row_base);
    v.optional_output("result", result);
    v.optional_output("activated", activated);
    v.optional_output("row_sum", row_sum);
    activation.visit(v);
    v.param("zero_tail", zero_tail);
  }
};

// The list that every binding iterates over.
#define GROUPED_CALLS(X) \
  X(GroupedMatmul)       \
  X(GroupSum) X(RowDot) X(ScaleRows) X(GroupedMatmulAct) X(GroupedMatmulDact) X(ActivationForward) X(ActivationGrad)

}  // namespace grouped
