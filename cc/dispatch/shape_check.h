// What the checks of shapes are made of: the first disagreement of a call, in words.
#pragma once

#include <initializer_list>
#include <string>

#include "cc/api/operands.h"

namespace grouped {

using Dims = std::initializer_list<int64_t>;

#define GROUPED_CALLS_WITH_RULES(X) \
  X(GroupedMatmul)                  \
  X(LowRankGrads)                   \
  X(GroupedMatmulAct)               \
  X(GroupedMatmulDact)              \
  X(ActivationForward)              \
  X(ActivationGrad)                 \
  X(AddRows)                        \
  X(Quantize)                       \
  X(Dequantize)                     \
  X(ShardAmax)                      \
  X(ShardCast)                      \
  X(Router)                         \
  X(RouterSums)                     \
  X(RouterGrad)                     \
  X(ChosenSoftmaxGrad)              \
  X(DropSlots)                      \
  X(SendOrder)                      \
  X(RankSlots)                      \
  X(RowSlots)                       \
  X(PadGroups)                      \
  X(GatherRows)                     \
  X(HashExperts)                    \
  X(MarginHistogram)                \
  X(QuantileBias)                   \
  X(SplitParts) X(SumParts)

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
  void shape(const char* name, const TensorView& t, Dims wanted) {
    bool same = t.rank == static_cast<int>(wanted.size());
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
  void absent(const char* name, const TensorView& t) {
    require(!t.present(), [&] { return named(name, t) + ", expected none here"; });
  }
  static std::string named(const char* name, const TensorView& t) {
    return std::string("`") + name + "`: " + describe(t);
  }

  std::string wrong;
};

// What is peculiar to a call, once its slots are as its schema says.
template <class Call>
void own_rules(Check*, const Call&) {}
#define X(Call) void own_rules(Check* check, const Call& call);
GROUPED_CALLS_WITH_RULES(X)
#undef X

}  // namespace grouped
