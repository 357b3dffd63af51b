// The last rows of the fused calls: they compose plain calls, take whatever these take, and are what the fused kernels
// are measured against. And those of contractions over two arrays, which join them first (join.cc), and of products
// with a low-rank one beside them, and gradients of low-rank ones (low_rank.cc).
#pragma once

#include "cc/api/calls.h"
#include "cc/api/kernel.h"

namespace grouped {

extern const Kernel<GroupedMatmul> grouped_matmul_joined_cpu;
extern const Kernel<GroupedMatmul> grouped_matmul_low_composed_cpu;
extern const Kernel<LowRankGrads> low_rank_grads_composed_cpu;
extern const Kernel<GroupedMatmulAct> grouped_matmul_act_composed_cpu;
extern const Kernel<GroupedMatmulDact> grouped_matmul_dact_composed_cpu;
#if GROUPED_WITH_CUDA
extern const Kernel<GroupedMatmul> grouped_matmul_joined_cuda;
extern const Kernel<GroupedMatmul> grouped_matmul_low_composed_cuda;
extern const Kernel<LowRankGrads> low_rank_grads_composed_cuda;
extern const Kernel<GroupedMatmulAct> grouped_matmul_act_composed_cuda;
extern const Kernel<GroupedMatmulDact> grouped_matmul_dact_composed_cuda;
#endif

}  // namespace grouped
