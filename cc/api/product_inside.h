// The plain product inside of a fused call: the first of two halves, with its result's type and shape, nowhere yet.
// cc/dispatch/compose.cc, which takes fused calls apart, defines it.
#pragma once

#include "cc/api/calls.h"

namespace grouped {

GroupedMatmul product_inside(const GroupedMatmulAct& call);
GroupedMatmul product_inside(const GroupedMatmulDact& call);
inline const GroupedMatmul& product_inside(const GroupedMatmul& call) { return call; }

}  // namespace grouped
