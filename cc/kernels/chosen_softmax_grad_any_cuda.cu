// The gradient of logits from weights that are a softmax over the chosen experts, a warp per token and one launch.
//
//   w_j, d_j --slot j in lane j--> share q_j = w_j / scale --SHFL, slot by slot--> mean = sum of d q
//   scale q_j (d_j - mean) --SHFL, slot by slot--> lane i: experts i, i + 32, ... --> result
//
// No shared memory and no barrier; 32 registers (sm_90). Per token it reads k weights, gradients and experts, and it
// writes E floats.
#include "cc/device/common/expert_scores.cuh"
#include "cc/device/common/launch.h"
#include "cc/device/common/refusals.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

struct Problem {
  const float* weights;
  const int32_t* experts;
  const int32_t* kept;  // null: absent
  const float* d_weights;
  float* result;
  float scale;
  int64_t tokens;
  int count, slots;  // E, k
};

__global__ void __launch_bounds__(kTokenThreads) route_back(const __grid_constant__ Problem p) {
  const int64_t token = warp_token();
  if (token >= p.tokens) return;
  const int64_t at = token * p.slots + lane_id();
  const int32_t named = lane_id() < p.slots ? p.experts[at] : -1;
  const bool chosen = named >= 0 && named < p.count;
  const float gradient = chosen && (!p.kept || p.kept[at] >= 0) ? p.d_weights[at] : 0.0f;
  const float share = chosen ? fl_div(p.weights[at], p.scale) : 0.0f;
  const float product = chosen ? fl_mul(gradient, share) : 0.0f;
  float mean = 0.0f;
  for (int j = 0; j < p.slots; ++j) mean = fl_add(mean, __shfl_sync(~0u, product, j));
  const float mine = fl_mul(share, fl_mul(p.scale, fl_sub(gradient, mean)));
  const int own = chosen ? named : -1;
  for (int first = 0; first < p.count; first += 32) {
    const int expert = first + lane_id();
    float sum = 0.0f;  // in the order of the slots: a given choice may name an expert twice
    for (int j = 0; j < p.slots; ++j) {
      const float value = __shfl_sync(~0u, mine, j);
      if (__shfl_sync(~0u, own, j) == expert) sum = fl_add(sum, value);
    }
    if (expert < p.count) p.result[token * p.count + expert] = sum;
  }
}

void launch(const ChosenSoftmaxGrad& call, const Context& context) {
  const int64_t tokens = call.result.dims[0];
  if (tokens == 0) return;
  const Problem p = {call.weights.as<const float>(),
                     call.experts.as<const int32_t>(),
                     data_or_null<const int32_t>(call.kept),
                     call.d_weights.as<const float>(),
                     call.result.as<float>(),
                     call.scale,
                     tokens,
                     static_cast<int>(call.result.dims[1]),
                     static_cast<int>(call.experts.dims[1])};
  route_back<<<token_grid(tokens), kTokenThreads, 0, static_cast<cudaStream_t>(context.stream)>>>(p);
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const Kernel<ChosenSoftmaxGrad> chosen_softmax_grad_any_cuda = {
    "chosen_softmax_grad_any_cuda", Arch::cuda, Kind::reference, takes_any, no_workspace, launch};

}  // namespace grouped
