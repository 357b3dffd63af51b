// Rows of the tables that widen quantised operands in a pass of their own and hand plain ones on, whoever takes these.
#pragma once

#include "cc/api/calls.h"
#include "cc/api/kernel.h"

namespace grouped {

#if GROUPED_WITH_CUDA
extern const Kernel<GroupedMatmul> grouped_matmul_widened_cuda;
extern const Kernel<GroupedMatmulAct> grouped_matmul_act_widened_cuda;
extern const Kernel<GroupedMatmulDact> grouped_matmul_dact_widened_cuda;
#endif

}  // namespace grouped
