// Rows of the fused calls whose result is stored in a quantised format.
#pragma once

#include "cc/api/calls.h"
#include "cc/api/kernel.h"

namespace grouped {

extern const Kernel<GroupedMatmulAct> grouped_matmul_act_stored_cpu;
extern const Kernel<GroupedMatmulDact> grouped_matmul_dact_stored_cpu;
#if GROUPED_WITH_CUDA
extern const Kernel<GroupedMatmulAct> grouped_matmul_act_stored_cuda;
extern const Kernel<GroupedMatmulDact> grouped_matmul_dact_stored_cuda;
extern const Kernel<GroupedMatmulAct> grouped_matmul_act_stored_fp8_cuda;
extern const Kernel<GroupedMatmulDact> grouped_matmul_dact_stored_fp8_cuda;
#endif

}  // namespace grouped
