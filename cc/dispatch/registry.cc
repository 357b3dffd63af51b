// The tables, best first, one per platform. A kernel that is not listed here does not exist; nothing registers itself.
#include "cc/dispatch/compose.h"
#include "cc/dispatch/dispatch.h"
#include "cc/dispatch/quantized.h"
#include "cc/dispatch/widen.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

template <class Call, size_t N>
Table<Call> rows_of(const Kernel<Call> (&rows)[N]) {
  return {rows, rows + N};
}

// The rows, or none at all: a build without CUDA has empty tables for it.
template <class Call, size_t N>
Table<Call> rows_if(bool condition, const Kernel<Call> (&rows)[N]) {
  return {rows, condition ? rows + N : rows};
}

}  // namespace

// The tables of a call that has one kernel per platform.
#if GROUPED_WITH_CUDA
#define GROUPED_TABLE(Call, name)                                     \
  template <>                                                         \
  Table<Call> table<Call>(Platform platform) {                        \
    static const Kernel<Call> cpu[] = {name##_any_cpu};               \
    static const Kernel<Call> cuda[] = {name##_any_cuda};             \
    return platform == Platform::cuda ? rows_of(cuda) : rows_of(cpu); \
  }
#else
#define GROUPED_TABLE(Call, name)                       \
  template <>                                           \
  Table<Call> table<Call>(Platform platform) {          \
    static const Kernel<Call> cpu[] = {name##_any_cpu}; \
    return rows_if(platform == Platform::cpu, cpu);     \
  }
#endif

template <>
Table<GroupedMatmul> table<GroupedMatmul>(Platform platform) {
  static const Kernel<GroupedMatmul> cpu[] = {
      grouped_matmul_any_cpu,
      grouped_matmul_joined_cpu,
      grouped_matmul_low_composed_cpu,
#if defined(__x86_64__)
      // Never reached unless pinned: they take what the first row takes, at most.
      grouped_matmul_any_cpu_avx512,
      grouped_matmul_any_cpu_avx2,
#endif
      grouped_matmul_any_cpu_plain,
  };
#if GROUPED_WITH_CUDA
  static const Kernel<GroupedMatmul> cuda[] = {
      grouped_matmul_narrow_cuda, grouped_matmul_bf16_sm90,         grouped_matmul_bf16_wgrad_sm90,
      grouped_matmul_fp32_sm90,   grouped_matmul_fp8_fast_sm90,     grouped_matmul_fp8_sm90,
      grouped_matmul_fp8_mn_sm90, grouped_matmul_fp8_wgrad_sm90,    grouped_matmul_weight_only_sm90,
      grouped_matmul_codes_sm90,
      grouped_matmul_joined_cuda,  // where a kernel above takes the joined weight, its bits count, not those below
      grouped_matmul_fp8_cuda,    grouped_matmul_widened_cuda,      grouped_matmul_tf32_cuda,
      grouped_matmul_any_cuda,    grouped_matmul_low_composed_cuda,
  };
  if (platform == Platform::cuda) return rows_of(cuda);
#endif
  return rows_if(platform == Platform::cpu, cpu);
}

template <>
Table<LowRankGrads> table<LowRankGrads>(Platform platform) {
  static const Kernel<LowRankGrads> cpu[] = {low_rank_grads_composed_cpu};
#if GROUPED_WITH_CUDA
  static const Kernel<LowRankGrads> cuda[] = {low_rank_grads_sm90, low_rank_grads_composed_cuda};
  if (platform == Platform::cuda) return rows_of(cuda);
#endif
  return rows_if(platform == Platform::cpu, cpu);
}

GROUPED_TABLE(GroupSum, group_sum)
GROUPED_TABLE(RowDot, row_dot)
GROUPED_TABLE(ScaleRows, scale_rows)
GROUPED_TABLE(AddRows, add_rows)

template <>
Table<GroupedMatmulAct> table<GroupedMatmulAct>(Platform platform) {
  static const Kernel<GroupedMatmulAct> cpu[] = {grouped_matmul_act_quantized_cpu, grouped_matmul_act_composed_cpu};
#if GROUPED_WITH_CUDA
  static const Kernel<GroupedMatmulAct> cuda[] = {
      grouped_matmul_act_bf16_sm90,          grouped_matmul_act_codes_sm90,     grouped_matmul_act_widened_cuda,
      grouped_matmul_act_quantized_fp8_cuda, grouped_matmul_act_quantized_cuda, grouped_matmul_act_composed_cuda};
  if (platform == Platform::cuda) return rows_of(cuda);
#endif
  return rows_if(platform == Platform::cpu, cpu);
}

template <>
Table<GroupedMatmulDact> table<GroupedMatmulDact>(Platform platform) {
  static const Kernel<GroupedMatmulDact> cpu[] = {grouped_matmul_dact_quantized_cpu, grouped_matmul_dact_composed_cpu};
#if GROUPED_WITH_CUDA
  static const Kernel<GroupedMatmulDact> cuda[] = {
      grouped_matmul_dact_bf16_sm90,          grouped_matmul_dact_codes_sm90,     grouped_matmul_dact_widened_cuda,
      grouped_matmul_dact_quantized_fp8_cuda, grouped_matmul_dact_quantized_cuda, grouped_matmul_dact_composed_cuda};
  if (platform == Platform::cuda) return rows_of(cuda);
#endif
  return rows_if(platform == Platform::cpu, cpu);
}

template <>
Table<ActivationForward> table<ActivationForward>(Platform platform) {
  static const Kernel<ActivationForward> cpu[] = {
      activation_any_cpu,
#if defined(__x86_64__)
      activation_any_cpu_avx512,
      activation_any_cpu_avx2,
#endif
      activation_any_cpu_plain,
  };
#if GROUPED_WITH_CUDA
  static const Kernel<ActivationForward> cuda[] = {activation_any_cuda};
  if (platform == Platform::cuda) return rows_of(cuda);
#endif
  return rows_if(platform == Platform::cpu, cpu);
}

template <>
Table<ActivationGrad> table<ActivationGrad>(Platform platform) {
  static const Kernel<ActivationGrad> cpu[] = {
      activation_grad_any_cpu,
#if defined(__x86_64__)
      activation_grad_any_cpu_avx512,
      activation_grad_any_cpu_avx2,
#endif
      activation_grad_any_cpu_plain,
  };
#if GROUPED_WITH_CUDA
  static const Kernel<ActivationGrad> cuda[] = {activation_grad_any_cuda};
  if (platform == Platform::cuda) return rows_of(cuda);
#endif
  return rows_if(platform == Platform::cpu, cpu);
}

template <>
Table<Quantize> table<Quantize>(Platform platform) {
  static const Kernel<Quantize> cpu[] = {
      quantize_any_cpu,
#if defined(__x86_64__)
      quantize_any_cpu_avx512,
      quantize_any_cpu_avx2,
#endif
      quantize_any_cpu_plain,
  };
#if GROUPED_WITH_CUDA
  static const Kernel<Quantize> cuda[] = {quantize_fp8_rows_cuda, quantize_fp8_current_cuda, quantize_fp8_cuda,
                                          quantize_fp4_cuda, quantize_any_cuda};
  if (platform == Platform::cuda) return rows_of(cuda);
#endif
  return rows_if(platform == Platform::cpu, cpu);
}

template <>
Table<Dequantize> table<Dequantize>(Platform platform) {
  static const Kernel<Dequantize> cpu[] = {
      dequantize_any_cpu,
#if defined(__x86_64__)
      dequantize_any_cpu_avx512,
      dequantize_any_cpu_avx2,
#endif
      dequantize_any_cpu_plain,
  };
#if GROUPED_WITH_CUDA
  static const Kernel<Dequantize> cuda[] = {dequantize_any_cuda};
  if (platform == Platform::cuda) return rows_of(cuda);
#endif
  return rows_if(platform == Platform::cpu, cpu);
}

GROUPED_TABLE(ScaleUpdate, scale_update)
GROUPED_TABLE(ShardAmax, shard_amax)
GROUPED_TABLE(ShardCast, shard_cast)

GROUPED_TABLE(Jitter, jitter)
GROUPED_TABLE(Sinkhorn, sinkhorn)
GROUPED_TABLE(Router, router)
GROUPED_TABLE(RouterSums, router_sums)
GROUPED_TABLE(RouterGrad, router_grad)
GROUPED_TABLE(ChosenSoftmaxGrad, chosen_softmax_grad)
GROUPED_TABLE(RouterLosses, router_losses)
GROUPED_TABLE(CountExperts, count_experts)
GROUPED_TABLE(DropSlots, drop_slots)
GROUPED_TABLE(SortSlots, sort_slots)
GROUPED_TABLE(SendOrder, send_order)
GROUPED_TABLE(RankSlots, rank_slots)
GROUPED_TABLE(RowSlots, row_slots)
GROUPED_TABLE(PadGroups, pad_groups)
GROUPED_TABLE(GatherRows, gather_rows)
GROUPED_TABLE(CombineRows, combine_rows)
GROUPED_TABLE(CombineDot, combine_dot)
GROUPED_TABLE(HashExperts, hash_experts)
GROUPED_TABLE(BiasUpdate, bias_update)
GROUPED_TABLE(MarginHistogram, margin_histogram)
GROUPED_TABLE(QuantileBias, quantile_bias)
GROUPED_TABLE(SplitParts, split_parts)
GROUPED_TABLE(SumParts, sum_parts)
#undef GROUPED_TABLE

}  // namespace grouped
