// The array edge: anything that speaks DLPack or the buffer protocol, one call at a time.
#pragma once

#include <nanobind/nanobind.h>

namespace grouped {

void define_array_call(nanobind::module_& module);

}  // namespace grouped
