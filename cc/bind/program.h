// The steps of a rule, planned: a program allocates results, launches kernels and frees what no later step reads,
// without a line of Python between two launches. And the cache that finds a program by the facts of its operands.
#pragma once

#include <nanobind/nanobind.h>

namespace grouped {

void define_program(nanobind::module_& module);

}  // namespace grouped
