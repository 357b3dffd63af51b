// The ways in which the three edges (XLA, plans, DLPack) fill a call. Everything here is read off `visit`, so that a
// new call needs nothing in cc/bind.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "cc/api/calls.h"
#include "cc/api/schema.h"

namespace grouped {

// One static parameter as an edge found it. The text belongs to the edge and lives as long as the decoding.
using ParamValue = std::variant<int64_t, float, std::string_view>;
using Params = std::vector<std::pair<std::string_view, ParamValue>>;

// Puts operands and parameters into a call. A parameter that is missing keeps the default of calls.h, so that a program
// exported before it existed still runs; one that the call does not know is an error.
class Decoder {
 public:
  Decoder(const char* call, const std::vector<TensorView>& inputs, const std::vector<TensorView>& outputs,
          const Params& params)
      : call_(call), inputs_(inputs), outputs_(outputs), params_(params) {}

  void input(const char* name, TensorView& view, const char* words) {
    optional(name, view, words);
    if (!view.present()) fail("operand `" + std::string(name) + "` is absent; it must be given");
  }
  void optional(const char*, TensorView& view, const char*) { view = inputs_[next_input_++]; }
  void output(const char* name, TensorView& view, const char* words) {
    optional_output(name, view, words);
    if (!view.present()) fail("result `" + std::string(name) + "` is absent; it must be given");
  }
  void optional_output(const char*, TensorView& view, const char*) { view = outputs_[next_output_++]; }
  void param(const char* name, int64_t& value) { decode(name, &value, "an integer"); }
  void param(const char* name, float& value) { decode(name, &value, "a float"); }
  void param(const char* name, std::string& value) { decode(name, &value, "a string"); }

  void finish() const {
    if (decoded_params_ != params_.size()) fail("an unknown or repeated parameter among " + param_names());
  }

 private:
  template <class T>
  void decode(const char* name, T* value, const char* wanted) {
    using Held = std::conditional_t<std::is_same_v<T, std::string>, std::string_view, T>;
    for (const auto& [given, held] : params_) {
      if (given != name) continue;
      if (!std::holds_alternative<Held>(held)) fail("parameter `" + std::string(name) + "` must be " + wanted);
      *value = T(std::get<Held>(held));
      ++decoded_params_;
      return;
    }
  }
  std::string param_names() const {
    std::string names;
    for (const auto& param : params_) names += (names.empty() ? "" : ", ") + std::string(param.first);
    return names;
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw std::invalid_argument(std::string(call_) + ": " + what);
  }

  const char* call_;
  const std::vector<TensorView>& inputs_;
  const std::vector<TensorView>& outputs_;
  const Params& params_;
  size_t next_input_ = 0;
  size_t next_output_ = 0;
  size_t decoded_params_ = 0;
};

template <class Call>
Call decode_call(const std::vector<TensorView>& inputs, const std::vector<TensorView>& outputs, const Params& params) {
  const Schema& s = schema<Call>();
  if (inputs.size() != s.inputs || outputs.size() != s.outputs()) {
    throw std::invalid_argument(std::string(Call::kName) + ": got " + std::to_string(inputs.size()) + " operands and " +
                                std::to_string(outputs.size()) + " results, expected " + std::to_string(s.inputs) +
                                " and " + std::to_string(s.outputs()));
  }
  Call call;
  Decoder decoder(Call::kName, inputs, outputs, params);
  call.visit(decoder);
  decoder.finish();
  return call;
}

// "grouped_matmul(lhs bfloat16[8, 16], ..., rhs_axis 1)", for messages.
struct Describer {
  std::string text;

  void input(const char* name, TensorView& view, const char*) { add(name, describe(view)); }
  void optional(const char* name, TensorView& view, const char*) {
    if (view.present()) add(name, describe(view));
  }
  void output(const char* name, TensorView& view, const char*) { add(name, describe(view)); }
  void optional_output(const char* name, TensorView& view, const char* words) { optional(name, view, words); }
  void param(const char* name, int64_t& value) { add(name, std::to_string(value)); }
  void param(const char* name, float& value) { add(name, std::to_string(value)); }
  void param(const char* name, std::string& value) { add(name, value); }
  void add(const char* name, const std::string& value) {
    text += (text.empty() ? "" : ", ") + std::string(name) + " " + value;
  }
};

template <class Call>
std::string describe_call(Call call) {
  Describer describer;
  call.visit(describer);
  return std::string(Call::kName) + "(" + describer.text + ")";
}

// The element type that NumPy and ml_dtypes call `name`.
inline DType dtype_named(std::string_view name) {
#define X(text, tag, bytes) \
  if (name == text) return DType::tag;
  GROUPED_DTYPES(X)
#undef X
  std::string known;
#define X(text, tag, bytes) known += std::string(known.empty() ? "" : ", ") + text;
  GROUPED_DTYPES(X)
#undef X
  throw std::invalid_argument("dtype " + std::string(name) + " is not known to the native calls; expected one of " +
                              known);
}

}  // namespace grouped
