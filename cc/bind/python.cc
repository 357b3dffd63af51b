#include "cc/bind/python.h"

#include <string>

namespace nb = nanobind;

namespace grouped {
namespace {

// NOTE: through __index__, so that NumPy's scalars pass and floats do not.
int64_t integer_of(nb::handle value) {
  const int64_t number = PyLong_AsLongLong(value.ptr());
  if (number == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return number;
}

}  // namespace

std::string_view text_of(nb::handle value) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(value.ptr(), &size);
  if (text == nullptr) throw nb::python_error();
  return std::string_view(text, static_cast<size_t>(size));
}

nb::tuple pair_of(nb::handle value, const std::string& what) {
  nb::tuple pair;
  if (!nb::try_cast(value, pair) || pair.size() != 2) throw nb::type_error((what + " must be a pair or None").c_str());
  return pair;
}

Params params_of(nb::dict params) {
  Params result;
  for (auto [name, value] : params) {
    if (nb::isinstance<nb::str>(value)) {
      result.emplace_back(text_of(name), text_of(value));
    } else if (nb::isinstance<nb::float_>(value)) {
      result.emplace_back(text_of(name), nb::cast<float>(value));
    } else {
      result.emplace_back(text_of(name), integer_of(value));
    }
  }
  return result;
}

std::vector<TensorView> views_of(nb::sequence specs) {
  std::vector<TensorView> views;
  for (nb::handle spec : specs) {
    TensorView view;
    if (!spec.is_none()) {
      const nb::tuple pair = pair_of(spec, "an operand's (dtype name, shape)");
      view.dtype = dtype_named(text_of(pair[0]));
      nb::tuple shape;
      if (!nb::try_cast(pair[1], shape)) throw nb::type_error("an operand's shape must be a tuple of integers");
      if (shape.size() > kMaxRank) {
        throw std::invalid_argument("an operand has rank " + std::to_string(shape.size()) + ", expected at most " +
                                    std::to_string(kMaxRank));
      }
      view.rank = static_cast<int>(shape.size());
      for (int i = 0; i < view.rank; ++i) view.dims[i] = integer_of(shape[static_cast<size_t>(i)]);
    }
    views.push_back(view);
  }
  return views;
}

}  // namespace grouped
