#include "cc/dispatch/shapes.h"

#include <initializer_list>

#include "cc/api/halves.h"
#include "cc/math/activation.h"

namespace grouped {
namespace {

using Dims = std::initializer_list<int64_t>;

// Collects the first disagreement; later ones may only follow from it. Words are functions, called for that one alone:
// XLA's edge asks at every run.
class Check {
 public:
  template <class Words>
  void require(bool fine, Words words) {
    if (wrong.empty() && !fine) wrong = words();
  }
  void rank(const char* name, const TensorView& t, int wanted) {
    require(t.present() && t.rank == wanted,
            [&] { return named(name, t) + ", expected rank " + std::to_string(wanted); });
    for (int i = 0; i < t.rank; ++i) {
      require(t.dims[i] >= 0, [&] { return named(name, t) + ", expected no negative axis"; });
    }
  }
  void shape(const char* name, const TensorView& t, Dims wanted) {
    rank(name, t, static_cast<int>(wanted.size()));
    if (!wrong.empty()) return;
    bool same = true;
    int axis = 0;
    for (int64_t dim : wanted) same = same && t.dims[axis++] == dim;
    require(same, [&] {
      std::string text;
      for (int64_t dim : wanted) text += (text.empty() ? "" : ", ") + std::to_string(dim);
      return named(name, t) + ", expected [" + text + "]";
    });
  }
  void shape_if_given(const char* name, const TensorView& t, Dims wanted) {
    if (t.present()) shape(name, t, wanted);
  }
  void dtype(const char* name, const TensorView& t, DType wanted) {
    require(!t.present() || t.dtype == wanted, [&] { return named(name, t) + ", expected " + dtype_name(wanted); });
  }
  // The weight, of two arrays if it lies in two.
  template <class Call>
  TensorView whole_weight(const Call& call) {
    if (!call.rhs_up.present()) return call.rhs;
    require(call.rhs_axis == 1 || call.rhs_axis == 2, [] { return "rhs_axis: expected 1 or 2"; });
    rank("rhs", call.rhs, 3);
    if (!wrong.empty()) return call.rhs;
    shape("rhs_up", call.rhs_up, {call.rhs.dims[0], call.rhs.dims[1], call.rhs.dims[2]});
    dtype("rhs_up", call.rhs_up, call.rhs.dtype);
    absent("rhs_table", call.rhs_table);
    return whole_rhs(call);
  }
  // Columns that count of [M, columns], half of them where `half` says so.
  int64_t columns(const char* name, const TensorView& t, int64_t half) {
    require(half >= 0 && half <= 2 && (half == 0 || t.dims[1] % 2 == 0),
            [&] { return named(name, t) + ", expected 0, or for an even width 1 or 2, as its half"; });
    return columns_of(t, half).count;
  }
  void absent(const char* name, const TensorView& t) {
    require(!t.present(), [&] { return named(name, t) + ", expected none here"; });
  }
  static std::string named(const char* name, const TensorView& t) {
    return std::string("`") + name + "`: " + describe(t);
  }

  std::string wrong;
};

// What every call has: sizes, and rows that may carry a scale.
int64_t groups_of(Check* check, const TensorView& sizes) {
  check->rank("group_sizes", sizes, 1);
  check->dtype("group_sizes", sizes, DType::i32);
  return sizes.dims[0];
}

void into_is_result(Check* check, const TensorView& into, const TensorView& result) {
  if (!into.present() || !check->wrong.empty()) return;
  bool same = into.rank == result.rank && into.dtype == result.dtype;
  for (int i = 0; same && i < result.rank; ++i) same = into.dims[i] == result.dims[i];
  check->require(same, [&] { return Check::named("into", into) + ", expected " + describe(result) + " = the result"; });
}

void table(Check* check, const char* name, const TensorView& t, int64_t groups, const TensorView& packed) {
  check->shape_if_given(name, t, {groups});
  check->dtype(name, t, DType::i64);
  check->require(!t.present() || packed.present(),
                 [&] { return Check::named(name, t) + ", expected its packed operand beside it"; });
}

// Columns of a hidden row in front of `width` activated ones; 0 where the parameters contradict themselves.
int64_t hidden_width(Check* check, const ActivationParams& activation, int64_t width) {
  ActivationKind kind{};
  check->require(activation_named(activation.kind, &kind), [&] { return "kind: no activation " + activation.kind; });
  if (!check->wrong.empty()) return 0;
  const int64_t s = activation.interleave;
  check->require(s == 0 || (s > 0 && is_gated(kind) && width % s == 0), [&] {
    return "interleave: " + std::to_string(s) + ", expected 0 or, for a gated kind, a divisor of " +
           std::to_string(width);
  });
  return is_gated(kind) ? 2 * width : width;
}

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
  check->require(call.result.present() || call.activated.present() || call.row_sum.present(),
                 [] { return "results: expected at least one of them"; });
}

// lhs [M, C] against rhs [G, ...] with the contracted axis `rhs_axis`; the width of the product, 0 if they disagree.
int64_t product_width(Check* check, const TensorView& lhs, const TensorView& rhs, int64_t rhs_axis, int64_t groups) {
  check->require(rhs_axis == 1 || rhs_axis == 2, [] { return "rhs_axis: expected 1 or 2"; });
  check->rank("lhs", lhs, 2);
  check->rank("rhs", rhs, 3);
  if (!check->wrong.empty()) return 0;
  check->require(rhs.dims[0] == groups && rhs.dims[rhs_axis] == lhs.dims[1], [&] {
    return Check::named("rhs", rhs) + ", expected to match lhs " + describe(lhs) + " and " + std::to_string(groups) +
           " groups";
  });
  const int64_t width = rhs.dims[3 - rhs_axis];
  check->require(width > 0 && lhs.dims[1] > 0, [&] { return Check::named("rhs", rhs) + ", expected no empty axis"; });
  return width;
}

}  // namespace

std::string disagreement(const GroupedMatmul& call) {
  Check check;
  const int64_t groups = groups_of(&check, call.group_sizes);
  check.rank("lhs", call.lhs, 2);
  const int64_t rows = call.lhs.dims[0];
  if (call.contract_rows) {
    check.require(call.contract_rows == 1 && call.rhs_axis == 0,
                  [] { return "contract_rows and rhs_axis contradict each other"; });
    check.rank("rhs", call.rhs, 2);
    check.require(call.rhs.dims[0] == rows,
                  [&] { return Check::named("rhs", call.rhs) + ", expected the rows of lhs " + describe(call.lhs); });
    const int64_t a = check.columns("lhs", call.lhs, call.lhs_half), b = check.columns("rhs", call.rhs, call.rhs_half);
    check.shape("result", call.result, {groups, a, b});
    check.absent("rhs_up", call.rhs_up);
    check.absent("bias", call.bias);
    check.absent("row_scale", call.row_scale);
    check.absent("rhs_table", call.rhs_table);
    check.absent("bias_table", call.bias_table);
    check.require(call.result_half == 0, [] { return "result_half: expected 0 in a contraction over rows"; });
  } else {
    check.require(call.rhs_axis == 1 || call.rhs_axis == 2, [] { return "rhs_axis: expected 1 or 2"; });
    check.require(call.lhs_half == 0 && call.rhs_half == 0 && call.result_half >= 0 && call.result_half <= 2,
                  [] { return "halves: with ragged rows expected one of the result alone, 1 or 2, or none"; });
    check.rank("rhs", call.rhs, 3);
    const TensorView rhs = check.whole_weight(call);
    if (check.wrong.empty()) {
      const int64_t width = rhs.dims[3 - call.rhs_axis] * (call.result_half != 0 ? 2 : 1);
      check.require(rhs.dims[0] == groups && rhs.dims[call.rhs_axis] == call.lhs.dims[1], [&] {
        return Check::named("rhs", rhs) + ", expected to match lhs " + describe(call.lhs) + " and " +
               std::to_string(groups) + " groups";
      });
      check.shape("result", call.result, {rows, width});
      check.shape_if_given("bias", call.bias, {groups, width});
      check.shape_if_given("row_scale", call.row_scale, {rows});
      check.dtype("row_scale", call.row_scale, DType::f32);
    }
    check.absent("into_table", call.into_table);
  }
  into_is_result(&check, call.into, call.result);
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
    check.shape("lhs", call.lhs, {rows, call.lhs.dims[1]});
    check.shape("rhs", call.rhs, {rows, call.lhs.dims[1]});
  }
  check.require(call.group_lhs.present() == call.group_rhs.present(),
                [] { return "`group_lhs` and `group_rhs`: expected both or none"; });
  if (call.group_lhs.present()) {
    check.rank("group_lhs", call.group_lhs, 2);
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
  check.shape("row_scale", call.row_scale, {call.rows.dims[0]});
  check.dtype("row_scale", call.row_scale, DType::f32);
  check.shape("result", call.result, {call.rows.dims[0], call.rows.dims[1]});
  into_is_result(&check, call.into, call.result);
  return check.wrong;
}

std::string disagreement(const GroupedMatmulAct& call) {
  Check check;
  const int64_t groups = groups_of(&check, call.group_sizes);
  const int64_t wide = product_width(&check, call.lhs, check.whole_weight(call), call.rhs_axis, groups);
  ActivationKind kind{};
  check.require(!call.rhs_up.present() || (activation_named(call.activation.kind, &kind) && is_gated(kind) &&
                                           call.activation.interleave == 0),
                [] { return "activation: expected a gated kind without interleave beside `rhs_up`"; });
  check.rank("result", call.result, 2);
  if (!check.wrong.empty()) return check.wrong;
  const int64_t rows = call.lhs.dims[0];
  const int64_t expected = hidden_width(&check, call.activation, call.result.dims[1]);
  check.require(expected == wide, [&] {
    return Check::named("result", call.result) + ", expected the activation of " + std::to_string(wide) + " columns";
  });
  check.shape("result", call.result, {rows, call.result.dims[1]});
  check.shape_if_given("hidden", call.hidden, {rows, wide});
  check.dtype("hidden", call.hidden, call.lhs.dtype);
  check.shape_if_given("bias", call.bias, {groups, wide});
  check.shape_if_given("row_scale", call.row_scale, {rows});
  check.dtype("row_scale", call.row_scale, DType::f32);
  table(&check, "rhs_table", call.rhs_table, groups, call.rhs);
  table(&check, "bias_table", call.bias_table, groups, call.bias);
  return check.wrong;
}

std::string disagreement(const GroupedMatmulDact& call) {
  Check check;
  const int64_t groups = groups_of(&check, call.group_sizes);
  const int64_t width = product_width(&check, call.lhs, call.rhs, call.rhs_axis, groups);
  if (!check.wrong.empty()) return check.wrong;
  hidden_grads(&check, call, call.hidden, call.lhs.dims[0], width);
  table(&check, "rhs_table", call.rhs_table, groups, call.rhs);
  return check.wrong;
}

std::string disagreement(const ActivationForward& call) {
  Check check;
  groups_of(&check, call.group_sizes);
  check.rank("rows", call.rows, 2);
  check.rank("result", call.result, 2);
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
  if (!check.wrong.empty()) return check.wrong;
  hidden_grads(&check, call, call.rows, call.grad.dims[0], call.grad.dims[1]);
  return check.wrong;
}

}  // namespace grouped
