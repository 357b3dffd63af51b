// Rows of the fused calls whose result is stored in a quantised format.
#pragma once

#include "cc/api/calls.h"
#include "cc/api/kernel.h"

namespace grouped {

extern const Kernel<GroupedMatmulAct> grouped_matmul_act_quantized_cpu;
extern const Kernel<GroupedMatmulDact> grouped_matmul_dact_quantized_cpu;
#if GROUPED_WITH_CUDA
extern const Kernel<GroupedMatmulAct> grouped_matmul_act_quantized_cuda;
extern const Kernel<GroupedMatmulDact> grouped_matmul_dact_quantized_cuda;
extern const Kernel<GroupedMatmulAct> grouped_matmul_act_quantized_fp8_cuda;
extern const Kernel<GroupedMatmulDact> grouped_matmul_dact_quantized_fp8_cuda;
#endif

}  // namespace grouped
