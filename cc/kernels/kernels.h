// Every kernel, by table; registry.cc lists them, best first.
#pragma once

#include "cc/api/activated.h"
#include "cc/api/calls.h"
#include "cc/api/kernel.h"
#include "cc/api/widening.h"

namespace grouped {

// CPU. The first takes the best instruction set of the machine; the others are pinned to one, for tests, and refuse
// where the machine lacks it.
extern const Kernel<GroupedMatmul> grouped_matmul_any_cpu;
extern const Kernel<GroupedMatmul> grouped_matmul_any_cpu_plain;
#if defined(__x86_64__)
extern const Kernel<GroupedMatmul> grouped_matmul_any_cpu_avx2;
extern const Kernel<GroupedMatmul> grouped_matmul_any_cpu_avx512;
#endif

extern const Kernel<GroupSum> group_sum_any_cpu;
extern const Kernel<RowDot> row_dot_any_cpu;
extern const Kernel<ScaleRows> scale_rows_any_cpu;
extern const Kernel<AddRows> add_rows_any_cpu;

extern const Kernel<ActivationForward> activation_any_cpu;
extern const Kernel<ActivationForward> activation_any_cpu_plain;
extern const Kernel<ActivationGrad> activation_grad_any_cpu;
extern const Kernel<ActivationGrad> activation_grad_any_cpu_plain;
#if defined(__x86_64__)
extern const Kernel<ActivationForward> activation_any_cpu_avx2;
extern const Kernel<ActivationForward> activation_any_cpu_avx512;
extern const Kernel<ActivationGrad> activation_grad_any_cpu_avx2;
extern const Kernel<ActivationGrad> activation_grad_any_cpu_avx512;
#endif

extern const Kernel<Quantize> quantize_any_cpu;
extern const Kernel<Quantize> quantize_any_cpu_plain;
extern const Kernel<Dequantize> dequantize_any_cpu;
extern const Kernel<Dequantize> dequantize_any_cpu_plain;
#if defined(__x86_64__)
extern const Kernel<Quantize> quantize_any_cpu_avx2;
extern const Kernel<Quantize> quantize_any_cpu_avx512;
extern const Kernel<Dequantize> dequantize_any_cpu_avx2;
extern const Kernel<Dequantize> dequantize_any_cpu_avx512;
#endif
extern const Kernel<ScaleUpdate> scale_update_any_cpu;
extern const Kernel<ShardAmax> shard_amax_any_cpu;
extern const Kernel<ShardCast> shard_cast_any_cpu;

// Routing.
extern const Kernel<Jitter> jitter_any_cpu;
extern const Kernel<Sinkhorn> sinkhorn_any_cpu;
extern const Kernel<Router> router_any_cpu;
extern const Kernel<RouterSums> router_sums_any_cpu;
extern const Kernel<RouterGrad> router_grad_any_cpu;
extern const Kernel<ChosenSoftmaxGrad> chosen_softmax_grad_any_cpu;
extern const Kernel<RouterLosses> router_losses_any_cpu;
extern const Kernel<CountExperts> count_experts_any_cpu;
extern const Kernel<DropSlots> drop_slots_any_cpu;
extern const Kernel<SortSlots> sort_slots_any_cpu;
extern const Kernel<SendOrder> send_order_any_cpu;
extern const Kernel<RankSlots> rank_slots_any_cpu;
extern const Kernel<RowSlots> row_slots_any_cpu;
extern const Kernel<PadGroups> pad_groups_any_cpu;
extern const Kernel<GatherRows> gather_rows_any_cpu;
extern const Kernel<CombineRows> combine_rows_any_cpu;
extern const Kernel<CombineDot> combine_dot_any_cpu;
extern const Kernel<HashExperts> hash_experts_any_cpu;
extern const Kernel<BiasUpdate> bias_update_any_cpu;
extern const Kernel<MarginHistogram> margin_histogram_any_cpu;
extern const Kernel<QuantileBias> quantile_bias_any_cpu;
extern const Kernel<SplitParts> split_parts_any_cpu;
extern const Kernel<SumParts> sum_parts_any_cpu;

#if GROUPED_WITH_CUDA
// Hopper's tensor cores (wgmma): bf16 and fp16, ragged rows and the contraction over rows.
extern const Kernel<GroupedMatmul> grouped_matmul_bf16_sm90;
extern const Kernel<GroupedMatmul> grouped_matmul_bf16_wgrad_sm90;
// Few bf16 rows against quantised weights, which are widened in registers.
extern const Kernel<GroupedMatmul> grouped_matmul_weight_only_sm90;
// Any number of bf16 rows against such weights, which are widened in shared memory.
extern const Kernel<GroupedMatmul> grouped_matmul_codes_sm90;
// The same for fp32 in the modes tf32 and tf32x3.
extern const Kernel<GroupedMatmul> grouped_matmul_fp32_sm90;
// 8-bit operands with scales: with fast accumulation, and with partial sums that go to fp32.
extern const Kernel<GroupedMatmul> grouped_matmul_fp8_fast_sm90;
extern const Kernel<GroupedMatmul> grouped_matmul_fp8_sm90;
extern const Kernel<GroupedMatmul> grouped_matmul_fp8_mn_sm90;
extern const Kernel<GroupedMatmul> grouped_matmul_fp8_wgrad_sm90;
extern const Kernel<GroupedMatmulAct> grouped_matmul_act_bf16_sm90;
extern const Kernel<GroupedMatmulAct> grouped_matmul_act_codes_sm90;
extern const Kernel<GroupedMatmulDact> grouped_matmul_dact_bf16_sm90;
extern const Kernel<GroupedMatmulDact> grouped_matmul_dact_codes_sm90;

// Any NVIDIA GPU from sm_80 on.
extern const Kernel<GroupedMatmul> grouped_matmul_any_cuda;
extern const Kernel<GroupedMatmul> grouped_matmul_narrow_cuda;
extern const Kernel<GroupedMatmul> grouped_matmul_tf32_cuda;
extern const Kernel<GroupedMatmul> grouped_matmul_fp8_cuda;  // from sm_89 on
extern const Kernel<GroupSum> group_sum_any_cuda;
extern const Kernel<RowDot> row_dot_any_cuda;
extern const Kernel<ScaleRows> scale_rows_any_cuda;
extern const Kernel<AddRows> add_rows_any_cuda;
extern const Kernel<ActivationForward> activation_any_cuda;
extern const Kernel<ActivationGrad> activation_grad_any_cuda;
extern const Kernel<Quantize> quantize_fp8_rows_cuda;  // where bandwidth counts, as the next three
extern const Kernel<Quantize> quantize_fp8_current_cuda;
extern const Kernel<Quantize> quantize_fp8_cuda;
extern const Kernel<Quantize> quantize_fp4_cuda;
extern const Kernel<Quantize> quantize_any_cuda;
extern const Kernel<Dequantize> dequantize_any_cuda;
extern const Kernel<ScaleUpdate> scale_update_any_cuda;
extern const Kernel<ShardAmax> shard_amax_any_cuda;
extern const Kernel<ShardCast> shard_cast_any_cuda;
extern const Kernel<Jitter> jitter_any_cuda;
extern const Kernel<Sinkhorn> sinkhorn_any_cuda;
extern const Kernel<Router> router_any_cuda;
extern const Kernel<RouterSums> router_sums_any_cuda;
extern const Kernel<RouterGrad> router_grad_any_cuda;
extern const Kernel<ChosenSoftmaxGrad> chosen_softmax_grad_any_cuda;
extern const Kernel<RouterLosses> router_losses_any_cuda;
extern const Kernel<CountExperts> count_experts_any_cuda;
extern const Kernel<LowRankGrads> low_rank_grads_sm90;
extern const Kernel<DropSlots> drop_slots_any_cuda;
extern const Kernel<SortSlots> sort_slots_any_cuda;
extern const Kernel<SendOrder> send_order_any_cuda;
extern const Kernel<RankSlots> rank_slots_any_cuda;
extern const Kernel<RowSlots> row_slots_any_cuda;
extern const Kernel<PadGroups> pad_groups_any_cuda;
extern const Kernel<GatherRows> gather_rows_any_cuda;
extern const Kernel<CombineRows> combine_rows_any_cuda;
extern const Kernel<CombineDot> combine_dot_any_cuda;
extern const Kernel<HashExperts> hash_experts_any_cuda;
extern const Kernel<BiasUpdate> bias_update_any_cuda;
extern const Kernel<MarginHistogram> margin_histogram_any_cuda;
extern const Kernel<QuantileBias> quantile_bias_any_cuda;
extern const Kernel<SplitParts> split_parts_any_cuda;
extern const Kernel<SumParts> sum_parts_any_cuda;

// For cc/dispatch, which has no CUDA of its own.
// result = round(value * scale), dense, of one or two arrays. Exact in fp32 but for float32 scales that are no powers
// of two. Beside them sizes are padded, where `padding` says so.
void launch_widenings(const Widening* arrays, int count, const SizePadding& padding, void* stream);

// Activation, or gradients at hidden rows, and FP8 codes of them in one pass; workspace as the function says.
std::string refuses_activated_store(const ActivatedStore& call, const Target& target);
// Whether the pass can store `store_activated`, of a call that it takes without; else a quantiser of its own has to.
bool stores_activated(const ActivatedStore& call);
size_t activated_store_bytes(const ActivatedStore& call);
void launch_activated_store(const ActivatedStore& call, const Context& context);
// Two dense matrices of `lines` lines of `bytes` bytes side by side, at `to`; for cc/dispatch, which has no CUDA.
void join_lines_cuda(void* to, const void* first, const void* second, int64_t lines, int64_t bytes, void* stream);
#endif

}  // namespace grouped
