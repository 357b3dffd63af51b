// Tensors of a library that offers DLPack's C exchange interface (PyTorch does): read in tens of nanoseconds each,
// where asking Python for shape, dtype, device and address takes most of a microsecond.
#pragma once

#include <nanobind/nanobind.h>

namespace grouped {

void define_exchange(nanobind::module_& module);

}  // namespace grouped
