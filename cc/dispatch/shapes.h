// Whether a call's shapes agree with one another and with its parameters (cc/api/calls.h), each of which is legal by
// itself (legal.h). Kernels rely on it and check nothing of the kind: what is launched with other shapes reads and
// writes out of bounds.
#pragma once

#include <string>

#include "cc/api/calls.h"

namespace grouped {

// Empty, or what disagrees, in words. Every axis but that of rows has at least one element (MAT-7). Looks at presence,
// ranks, dims and the dtypes that calls.h fixes, never at data.
std::string disagreement(const GroupedMatmul& call);
std::string disagreement(const GroupSum& call);
std::string disagreement(const RowDot& call);
std::string disagreement(const ScaleRows& call);
std::string disagreement(const GroupedMatmulAct& call);
std::string disagreement(const GroupedMatmulDact& call);
std::string disagreement(const ActivationForward& call);
std::string disagreement(const ActivationGrad& call);
std::string disagreement(const Quantize& call);
std::string disagreement(const Dequantize& call);
std::string disagreement(const ScaleUpdate& call);
std::string disagreement(const ShardAmax& call);
std::string disagreement(const ShardCast& call);

}  // namespace grouped
