// What the checks of shapes are made of: the first disagreement of a call, in words.
#pragma once

#include <initializer_list>
#include <string>

#include "cc/api/operands.h"

namespace grouped {

using Dims = std::initializer_list<int64_t>;

// Whether an operand of a product is more than its elements.
template <class Call>
bool has_codes(const Call& call) {
  const OperandScales& s = call.scales;
  return call.lhs.dtype == DType::u8 || call.rhs.dtype == DType::u8 || s.lhs_scales.present() ||
         s.rhs_scales.present() || s.lhs_group_scales.present() || s.rhs_group_scales.present();
}

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
  }
  // Axes from `first_axis` on; those before it count rows, of which there may be none.
  void not_empty(const char* name, const TensorView& t, int first_axis) {
    for (int i = first_axis; i < t.rank; ++i) {
      require(t.dims[i] > 0, [&] { return named(name, t) + ", expected no empty axis but that of rows"; });
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
    require(!has_codes(call),
            [&] { return named("rhs_up", call.rhs_up) + ", expected none beside quantised operands; pass one array"; });
    require(call.rhs_axis == 1 || call.rhs_axis == 2, [] { return "rhs_axis: expected 1 or 2"; });
    rank("rhs", call.rhs, 3);
    if (!wrong.empty()) return call.rhs;
    shape("rhs_up", call.rhs_up, {call.rhs.dims[0], call.rhs.dims[1], call.rhs.dims[2]});
    dtype("rhs_up", call.rhs_up, call.rhs.dtype);
    absent("rhs_table", call.rhs_table);
    return whole_rhs(call);
  }
  void absent(const char* name, const TensorView& t) {
    require(!t.present(), [&] { return named(name, t) + ", expected none here"; });
  }
  static std::string named(const char* name, const TensorView& t) {
    return std::string("`") + name + "`: " + describe(t);
  }

  std::string wrong;
};

constexpr int64_t kMostGroups = 65535;  // GRP-11

inline void some_groups(Check* check, const char* name, const TensorView& t, int axis = 0) {
  check->require(t.dims[axis] >= 1 && t.dims[axis] <= kMostGroups,
                 [&] { return Check::named(name, t) + ", expected 1 to " + std::to_string(kMostGroups) + " groups"; });
}

// What every call has: sizes, and rows that may carry a scale.
inline int64_t groups_of(Check* check, const TensorView& sizes, const char* name = "group_sizes") {
  check->rank(name, sizes, 1);
  check->dtype(name, sizes, DType::i32);
  some_groups(check, name, sizes);
  return sizes.dims[0];
}

// A buffer that is one with a result, if it is given.
inline void same_buffer(Check* check, const char* name, const TensorView& into, const TensorView& result) {
  if (!into.present() || !check->wrong.empty()) return;
  bool same = into.rank == result.rank && into.dtype == result.dtype;
  for (int i = 0; same && i < result.rank; ++i) same = into.dims[i] == result.dims[i];
  check->require(same, [&] { return Check::named(name, into) + ", expected " + describe(result) + " = the result"; });
}

}  // namespace grouped
