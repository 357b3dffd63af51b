// Selection biases that balance the load of experts.
//
// bias_update        one block: the sum of the load in integers, then a thread per expert
// margin_histogram   clear --> a warp per token, lane i: experts i, i + 32, ...: scores, the (k + 1)-th largest
//                    score + bias by k + 1 rounds (cc/device/common/expert_scores.cuh), a bin per expert, counted in
//                    the result
// quantile_bias      a block per expert: the sum of its counts, then 256 bins at a time --> workspace
//                    one block: the mean in the order of lane_sum, then a thread per expert
//
// Counts are integers, which no order changes. Registers (sm_90): count_margins 19, 20, 23, 31, 48 and 79 for up to 32,
// 64, 128, 256, 512 and 1024 experts, the others up to 32; 268 bytes of shared memory.
#include <climits>
#include <string>

#include "cc/device/common/block_sum.cuh"
#include "cc/device/common/expert_scores.cuh"
#include "cc/device/common/group_scan.cuh"
#include "cc/device/common/refusals.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kWideThreads = 1024;  // of a block that works alone

// ---- By the sign of what an expert lacks

__global__ void __launch_bounds__(kWideThreads)
    update_bias(const float* bias, const int32_t* load, int experts, float rate, float* result) {
  __shared__ int64_t scratch[33];
  int64_t own = 0, all;
  for (int e = threadIdx.x; e < experts; e += kWideThreads) own += load[e];
  exclusive_sum<kWideThreads / 32>(own, scratch, &all);
  for (int e = threadIdx.x; e < experts; e += kWideThreads) {
    const int64_t lacks = all - static_cast<int64_t>(load[e]) * experts;
    const float sign = lacks > 0 ? 1.0f : lacks < 0 ? -1.0f : 0.0f;
    result[e] = fl_add(bias[e], fl_mul(rate, sign));
  }
}

void launch_update(const BiasUpdate& call, const Context& context) {
  update_bias<<<1, kWideThreads, 0, static_cast<cudaStream_t>(context.stream)>>>(
      call.bias.as<const float>(), call.load.as<const int32_t>(), static_cast<int>(call.bias.dims[0]), call.rate,
      call.result.as<float>());
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

// ---- By a quantile of margins

struct Margins {
  const float* logits;
  const float* bias;
  const uint8_t* mask;  // null: absent
  int32_t* counts;
  int64_t tokens;
  int experts, slots, bins;
  Score score;
  float low, high;
};

constexpr int margin_blocks(int per_lane) { return per_lane <= 4 ? 12 : per_lane <= 8 ? 8 : per_lane <= 16 ? 6 : 4; }

template <int kPer>
__global__ void __launch_bounds__(kTokenThreads, margin_blocks(kPer)) count_margins(const __grid_constant__ Margins p) {
  const int64_t token = warp_token();
  if (token >= p.tokens || (p.mask && p.mask[token] == 0)) return;
  float scores[kPer];
  load_experts(p.logits + token * p.experts, p.experts, scores);
  score_experts(p.score, scores, p.experts, false, scores);
  uint32_t ranks[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) ranks[i] = kExcluded;
  for_experts<kPer>(p.experts, [&](int i, int expert) { ranks[i] = rank_of(fl_add(scores[i], p.bias[expert])); });
  uint32_t rank = kExcluded;
  for (int j = 0; j <= p.slots; ++j) rank = take_best(ranks).rank;
  const float alpha = ranked_value(rank);
  for_experts<kPer>(p.experts, [&](int i, int expert) {
    const float margin = fl_sub(alpha, scores[i]);
    if (margin != margin) return;
    atomicAdd(p.counts + static_cast<int64_t>(expert) * p.bins + margin_bin(margin, p.low, p.high, p.bins), 1);
  });
}

void launch_margins(const MarginHistogram& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  GROUPED_CUDA_CHECK(cudaMemsetAsync(call.counts.data, 0, static_cast<size_t>(call.counts.bytes()), stream));
  const Margins p = {call.logits.as<const float>(),
                     call.bias.as<const float>(),
                     data_or_null<const uint8_t>(call.mask),
                     call.counts.as<int32_t>(),
                     call.logits.dims[0],
                     static_cast<int>(call.logits.dims[1]),
                     static_cast<int>(call.slots),
                     static_cast<int>(call.counts.dims[1]),
                     score_named(call.score),
                     call.low,
                     call.high};
  if (p.tokens == 0) return;
  with_experts_per_lane(p.experts, [&](auto per_lane) {
    count_margins<decltype(per_lane)::value><<<token_grid(p.tokens), kTokenThreads, 0, stream>>>(p);
  });
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

struct Quantile {
  const int32_t* counts;
  float* edges;  // [E], in the workspace
  float* result;
  int64_t slots;
  int experts, bins;
  float low, high;
};

__global__ void __launch_bounds__(kThreads) find_quantiles(const __grid_constant__ Quantile p) {
  __shared__ int64_t scratch[33];
  __shared__ int found;
  const int expert = static_cast<int>(blockIdx.x);
  const int32_t* counts = p.counts + static_cast<int64_t>(expert) * p.bins;
  int64_t own = 0, all;
  for (int i = threadIdx.x; i < p.bins; i += kThreads) own += counts[i];
  if (threadIdx.x == 0) found = INT_MAX;
  exclusive_sum<kWarps>(own, scratch, &all);
  int64_t below = 0;
  int bin = INT_MAX;
  for (int first = 0; all > 0 && bin == INT_MAX && first < p.bins; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const int64_t count = i < p.bins ? counts[i] : 0;
    int64_t total;
    const int64_t up_to = below + exclusive_sum<kWarps>(count, scratch, &total) + count;
    below += total;
    if (i < p.bins && up_to * p.experts >= all * p.slots) atomicMin(&found, i);
    __syncthreads();
    bin = found;
  }
  if (threadIdx.x == 0) p.edges[expert] = bin < p.bins ? bin_edge(bin, p.low, p.high, p.bins) : 0.0f;
}

__global__ void __launch_bounds__(kWideThreads) center_quantiles(const __grid_constant__ Quantile p) {
  __shared__ float shared_mean;
  if (threadIdx.x < 32) {
    float sum = 0.0f;
#pragma unroll 8
    for (int e = threadIdx.x; e < p.experts; e += 32) sum = fl_add(sum, p.edges[e]);
    sum = warp_sum(sum);
    if (threadIdx.x == 0) shared_mean = fl_div(sum, static_cast<float>(p.experts));
  }
  __syncthreads();
  const float mean = shared_mean;
  for (int e = threadIdx.x; e < p.experts; e += kWideThreads) p.result[e] = fl_sub(p.edges[e], mean);
}

size_t quantile_bytes(const QuantileBias& call, const Target&) {
  return align_up(sizeof(float) * static_cast<size_t>(call.counts.dims[0]));
}

void launch_quantile(const QuantileBias& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const Quantile p = {call.counts.as<const int32_t>(),
                      static_cast<float*>(context.workspace),
                      call.result.as<float>(),
                      call.slots,
                      static_cast<int>(call.counts.dims[0]),
                      static_cast<int>(call.counts.dims[1]),
                      call.low,
                      call.high};
  find_quantiles<<<static_cast<unsigned>(p.experts), kThreads, 0, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
  center_quantiles<<<1, kWideThreads, 0, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const Kernel<BiasUpdate> bias_update_any_cuda = {"bias_update_any_cuda", Arch::cuda,   Kind::reference, takes_any,
                                                 no_workspace,           launch_update};
const Kernel<MarginHistogram> margin_histogram_any_cuda = {
    "margin_histogram_any_cuda", Arch::cuda, Kind::reference, takes_any, no_workspace, launch_margins};
const Kernel<QuantileBias> quantile_bias_any_cuda = {
    "quantile_bias_any_cuda", Arch::cuda, Kind::reference, takes_any, quantile_bytes, launch_quantile};

}  // namespace grouped
