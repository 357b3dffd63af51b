// Python values -> what the edges work with. The Python objects must outlive the views and texts made of them.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <string_view>
#include <vector>

#include "cc/bind/signature.h"

namespace grouped {

std::string_view text_of(nanobind::handle value);
nanobind::tuple pair_of(nanobind::handle value, const std::string& what);
Params params_of(nanobind::dict params);
// [(dtype name, shape) | None, ...]: None is an absent operand.
std::vector<TensorView> views_of(nanobind::sequence specs);

}  // namespace grouped
