// Losses of a router and what their gradients need, from sums over sequences.
//
//   slopes   one warp per sequence: sequences with tokens are counted, then slopes, and their product with prob_sums
//            summed in the order of lane_sum --> workspace
//   losses   one warp: four sums over sequences, one per lane, in order
//
// Up to 32 sequences are one block, whose first warp is the one of the losses; of more, losses are a second launch. On
// Hopper either begins beside what comes before it and waits. 32 and 30 registers (sm_90); 32 bytes of shared memory.
#include <algorithm>
#include <string>

#include "cc/device/common/early_launch.cuh"
#include "cc/device/common/expert_scores.cuh"
#include "cc/device/common/group_scan.cuh"
#include "cc/device/common/launch.h"
#include "cc/device/common/refusals.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int64_t kMostBlocks = 1024;
constexpr int kOneBlock = 32;  // sequences

struct Problem {
  const float* prob_sums;
  const int32_t* counts;
  const float* stat_sums;
  float* losses;
  float* slopes;
  float* z_slope;
  const int32_t* dropped;  // null: absent
  int32_t* lost;
  uint8_t* overflow;
  float* aux;  // [S], in the workspace
  int sequences, experts;
  float slots, aux_coeff, z_coeff;
};

// As std::max on the CPU: NaN in front stays.
__device__ float at_least_one(float value) { return value < 1.0f ? 1.0f : value; }

// Called by one warp, which finds the workspace filled.
__device__ void find_losses(const Problem& p) {
  const int lane = lane_id();
  // Lanes 0 to 2 sum the columns of stat_sums, the others what the sequences give to the first loss.
  const float* values = lane < 3 ? p.stat_sums + lane : p.aux;
  const int step = lane < 3 ? 3 : 1;
  float sum = 0.0f;
#pragma unroll 8
  for (int s = 0; s < p.sequences; ++s) sum = fl_add(sum, values[static_cast<int64_t>(s) * step]);
  const float squares = __shfl_sync(~0u, sum, 0), entropy = __shfl_sync(~0u, sum, 1);
  const float all = at_least_one(__shfl_sync(~0u, sum, 2));
  const float z_slope = fl_div(p.z_coeff, all);
  if (lane != 3) return;
  p.losses[0] = sum;
  p.losses[1] = z_loss(z_slope, squares);
  p.losses[2] = fl_div(entropy, all);
  p.z_slope[0] = z_slope;
  const int32_t lost = p.dropped ? *p.dropped : 0;
  *p.lost = lost;
  *p.overflow = lost > 0;
}

__global__ void __launch_bounds__(kThreads) find_slopes(const __grid_constant__ Problem p) {
  __shared__ int counted[kWarps];
  wait_for_launch_before();
  int present = 0;
  for (int s = threadIdx.x; s < p.sequences; s += kThreads) present += p.stat_sums[3 * s + 2] > 0.0f;
  present = __reduce_add_sync(~0u, present);
  if (lane_id() == 0) counted[threadIdx.x / 32] = present;
  __syncthreads();
  present = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) present += counted[w];
  const float share = fl_div(p.aux_coeff, at_least_one(static_cast<float>(present)));
  const float experts = static_cast<float>(p.experts);
  for (int s = blockIdx.x * kWarps + threadIdx.x / 32; s < p.sequences; s += gridDim.x * kWarps) {
    const int64_t first = static_cast<int64_t>(s) * p.experts;
    const float n = at_least_one(p.stat_sums[3 * s + 2]);
    const float factor = fl_div(fl_mul(share, experts), fl_mul(fl_mul(p.slots, n), n));
    float sum = 0.0f;
    for (int e = lane_id(); e < p.experts; e += 32) {
      const float slope = fl_mul(factor, static_cast<float>(p.counts[first + e]));
      p.slopes[first + e] = slope;
      sum = fl_add(sum, fl_mul(slope, p.prob_sums[first + e]));
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) p.aux[s] = factor == 0.0f ? 0.0f : sum;  // without a coefficient 0, though 0 times NaN is NaN
  }
  if (p.sequences > kOneBlock) return;
  __syncthreads();
  if (threadIdx.x < 32) find_losses(p);
}

__global__ void __launch_bounds__(32) find_losses_of_many(const __grid_constant__ Problem p) {
  wait_for_launch_before();
  find_losses(p);
}

template <class Kernel>
void launch_behind(Kernel kernel, int64_t blocks, unsigned threads, const Problem& p, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  if (context.target.sm >= 90) return launch_early(kernel, static_cast<unsigned>(blocks), threads, 0, stream, p);
  kernel<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

size_t workspace(const RouterLosses& call, const Target&) {
  return align_up(sizeof(float) * static_cast<size_t>(call.prob_sums.dims[0]));
}

void launch(const RouterLosses& call, const Context& context) {
  const int64_t sequences = call.prob_sums.dims[0];
  const Problem p = {call.prob_sums.as<const float>(),
                     call.counts.as<const int32_t>(),
                     call.stat_sums.as<const float>(),
                     call.losses.as<float>(),
                     call.slopes.as<float>(),
                     call.z_slope.as<float>(),
                     data_or_null<const int32_t>(call.dropped),
                     call.lost.as<int32_t>(),
                     call.overflow.as<uint8_t>(),
                     static_cast<float*>(context.workspace),
                     static_cast<int>(sequences),
                     static_cast<int>(call.prob_sums.dims[1]),
                     static_cast<float>(call.slots),
                     call.aux_coeff,
                     call.z_coeff};
  const int64_t blocks = sequences <= kOneBlock ? 1 : std::min((sequences + kWarps - 1) / kWarps, kMostBlocks);
  launch_behind(find_slopes, blocks, kThreads, p, context);
  if (sequences > kOneBlock) launch_behind(find_losses_of_many, 1, 32, p, context);
}

}  // namespace

const Kernel<RouterLosses> router_losses_any_cuda = {
    "router_losses_any_cuda", Arch::cuda, Kind::reference, takes_any, workspace, launch};

}  // namespace grouped
