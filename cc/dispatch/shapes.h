// Whether a call's slots are as its schema says (cc/api/schema.h), and agree with its parameters, each of which is
// legal by itself (legal.h). Kernels rely on it and check nothing of the kind: what is launched with other shapes reads
// and writes out of bounds.
#pragma once

#include <string>

#include "cc/api/calls.h"

namespace grouped {

// Empty, or what disagrees, in words. Looks at presence, ranks, dims and dtypes, never at data.
template <class Call>
std::string disagreement(const Call& call);

}  // namespace grouped
