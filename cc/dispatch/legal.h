// What each parameter may be by itself, whatever else the call has: the values that calls.h gives a meaning. How they
// fit the operands is said by shapes.h.
#pragma once

#include <string>

#include "cc/api/calls.h"

namespace grouped {

// Empty, or the first parameter that is none, in words.
template <class Call>
std::string illegal(const Call& call);

}  // namespace grouped
