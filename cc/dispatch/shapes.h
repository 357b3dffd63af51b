// Whether a call's shapes agree with one another and with its parameters (cc/api/calls.h), each of which is legal by
// itself (legal.h). Kernels rely on it and check nothing of the kind: what is launched with other shapes reads and
// writes out of bounds.
#pragma once

#include <string>

#include "cc/api/calls.h"

namespace grouped {

// Empty, or what disagrees, in words. Every axis but that of rows has at least one element (MAT-7). Looks at presence,
// ranks, dims and the dtypes that calls.h fixes, never at data.
#define X(Call) std::string disagreement(const Call& call);
GROUPED_CALLS(X)
#undef X

}  // namespace grouped
