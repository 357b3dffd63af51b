// The gradient of a router's logits, a warp per token and one launch (two with more than 32 sequences).
//
//   logits --lane i: experts i, i + 32, ...--> softmax, scores
//   d_weights --slot j in lane j--> gradients of the chosen scores or logits --SHFL, slot by slot--> their lanes
//   slopes of the token's sequence --> gradients of probs, then of scores
//   all of them --> through the scores --> + the squared logsumexp's --> result
//
// With w_j = scale part_j / divisor and the gradients d_j of the slots, part_j has the gradient
//   scale (d_j - sum of d_i part_i / divisor) / divisor    where the divisor is the sum of the parts,
//   scale d_j                                              where it is 1.
// Of probs p_e = s_e / D and c_e = slopes_e d_losses[0], D the sum of s: ds_e = (c_e - sum of c_i p_i) / D. Of softmax
// D is 1 and ds_e = c_e; then dl_e = s_e (ds_e - sum of s_i ds_i), which subtracts the mean itself. Other scores depend
// on their own logit: dl_e = ds_e s'(l_e). With after_topk the parts are exp(l - most): the part's gradient times the
// part is the chosen logit's, and nothing of it goes through the scores. Last, d (logsumexp)^2 = 2 logsumexp softmax_e.
// Losses without coefficients, whose slopes are 0, add nothing, whatever the logits and d_losses are.
//
// No shared memory and no barrier; arrays stay in registers: 32, 34, 44, 58, 90 and 152 of them for up to 32, 64, 128,
// 256, 512 and 1024 experts (sm_90), nothing spilled.
#include <string>

#include "cc/device/common/expert_scores.cuh"
#include "cc/device/common/refusals.h"
#include "cc/device/common/token_sequences.cuh"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

struct Problem {
  const float* logits;
  const int32_t* experts;
  const uint8_t* mask;  // null, as the next two: absent
  const int32_t* kept;
  const float* d_weights;
  Sequences sequences;  // and what follows: only where they have sizes
  const float* slopes;
  const float* z_slope;
  const float* d_losses;
  float* result;
  Scoring scoring;
  int64_t tokens;
  int count, slots;  // E, k
};

// What a token's slots give, slot j in lane j: the gradient of the chosen score, or of the chosen logit with
// after_topk.
struct SlotGradient {
  int expert;  // -1: none
  float value;
};

template <int kPer>
__device__ SlotGradient slot_gradient(const Problem& p, int64_t token, const float (&raw)[kPer]) {
  const int64_t at = token * p.slots + lane_id();
  SlotGradient mine = {lane_id() < p.slots ? p.experts[at] : -1, 0.0f};
  if (mine.expert < 0 || mine.expert >= p.count) mine.expert = -1;
  if (!p.d_weights) return mine;
  const bool valid = mine.expert >= 0;
  const float gradient = valid && (!p.kept || p.kept[at] >= 0) ? p.d_weights[at] : 0.0f;
  const Parts parts = weight_parts(p.scoring, p.slots, valid, value_of_expert(raw, mine.expert));
  const float share = valid ? fl_div(parts.part, parts.divisor) : 0.0f;
  float mean = 0.0f;  // of the slots' gradients, weighted with their parts
  if (p.scoring.after_topk || p.scoring.normalize) {
    const float product = valid ? fl_mul(gradient, share) : 0.0f;
    for (int j = 0; j < p.slots; ++j) mean = fl_add(mean, __shfl_sync(~0u, product, j));
  }
  const float above = fl_mul(p.scoring.scale, fl_sub(gradient, mean));
  mine.value = p.scoring.after_topk ? fl_mul(share, above) : fl_div(above, parts.divisor);
  return mine;
}

// values[...] of the slots' experts, in the order of the slots: a given choice may name an expert twice.
template <int kPer>
__device__ void add_slots(const Problem& p, const SlotGradient& mine, float (&values)[kPer]) {
  for (int j = 0; j < p.slots; ++j) {
    const int expert = __shfl_sync(~0u, mine.expert, j);
    const float value = __shfl_sync(~0u, mine.value, j);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (i * 32 + lane_id() == expert) values[i] = fl_add(values[i], value);
    }
  }
}

template <int kPer>
__device__ void add_probs_gradient(const Problem& p, int sequence, const float (&scores)[kPer], float (&grads)[kPer]) {
  const float* slopes = p.slopes + static_cast<int64_t>(sequence) * p.count;
  const float d_aux = p.d_losses[0];
  bool any = false;
  for_experts<kPer>(p.count, [&](int i, int expert) {
    grads[i] = slopes[expert];
    any |= grads[i] != 0.0f;
  });
  if (!__any_sync(~0u, any)) return;  // no coefficient: 0 times NaN would be NaN
#pragma unroll
  for (int i = 0; i < kPer; ++i) grads[i] = fl_mul(grads[i], d_aux);
  if (p.scoring.score == Score::softmax) return;
  const float divisor = divisor_of(p.scoring.score, scores, p.count);
  const float mean = sum_experts<kPer>(p.count, [&](int i) { return fl_mul(grads[i], fl_div(scores[i], divisor)); });
  for_experts<kPer>(p.count, [&](int i, int) { grads[i] = fl_div(fl_sub(grads[i], mean), divisor); });
}

// Blocks that should fit on a multiprocessor: 48 registers per thread for few experts, 72, 96 and 168 for more.
constexpr int grad_blocks(int per_lane) { return per_lane <= 4 ? 10 : per_lane <= 8 ? 7 : per_lane <= 16 ? 5 : 3; }

template <int kPer>
__global__ void __launch_bounds__(kTokenThreads, grad_blocks(kPer)) route_back(const __grid_constant__ Problem p) {
  const int64_t token = warp_token();
  if (token >= p.tokens) return;
  float* result = p.result + token * p.count;
  if (p.mask && p.mask[token] == 0) {
    for_experts<kPer>(p.count, [&](int, int expert) { result[expert] = 0.0f; });
    return;
  }
  float logits[kPer], scores[kPer], grads[kPer];
  load_experts(p.logits + token * p.count, p.count, logits);
#pragma unroll
  for (int i = 0; i < kPer; ++i) grads[i] = 0.0f;
  const bool after_topk = p.scoring.after_topk;
  const int sequence = p.sequences.sizes ? sequence_of(p.sequences, token) : -1;
  const Softmax softmax = score_experts(p.scoring.score, logits, p.count, sequence >= 0, scores);
  const SlotGradient mine = after_topk ? slot_gradient(p, token, logits) : slot_gradient(p, token, scores);
  if (sequence >= 0) add_probs_gradient(p, sequence, scores, grads);
  if (!after_topk) add_slots(p, mine, grads);
  if (p.scoring.score == Score::softmax) {
    const float mean = sum_experts<kPer>(p.count, [&](int i) { return fl_mul(scores[i], grads[i]); });
#pragma unroll
    for (int i = 0; i < kPer; ++i) grads[i] = fl_mul(scores[i], fl_sub(grads[i], mean));
    if (after_topk) add_slots(p, mine, grads);
  } else {
#pragma unroll
    for (int i = 0; i < kPer; ++i) grads[i] = fl_mul(grads[i], own_score(p.scoring.score, logits[i]).slope);
  }
  const float z_slope = sequence >= 0 ? p.z_slope[0] : 0.0f;
  if (z_slope != 0.0f) {  // likewise
    const float factor = fl_mul(fl_mul(2.0f, softmax.log_sum()), fl_mul(z_slope, p.d_losses[1]));
    for_experts<kPer>(p.count,
                      [&](int i, int) { grads[i] = fl_add(grads[i], fl_mul(factor, softmax.value(logits[i]))); });
  }
  for_experts<kPer>(p.count, [&](int i, int expert) { result[expert] = grads[i]; });
}

size_t workspace(const RouterGrad& call, const Target&) {
  return call.sequence_sizes.present() ? Sequences::bytes(call.sequence_sizes.dims[0]) : 0;
}

void launch(const RouterGrad& call, const Context& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const int64_t tokens = call.logits.dims[0];
  if (tokens == 0) return;
  Sequences sequences = {};
  if (call.sequence_sizes.present()) {
    sequences = Sequences::prepare(call.sequence_sizes.as<const int32_t>(), call.sequence_sizes.dims[0], tokens,
                                   context.workspace, stream);
  }
  const Problem p = {call.logits.as<const float>(),
                     call.experts.as<const int32_t>(),
                     data_or_null<const uint8_t>(call.mask),
                     data_or_null<const int32_t>(call.kept),
                     data_or_null<const float>(call.d_weights),
                     sequences,
                     data_or_null<const float>(call.slopes),
                     data_or_null<const float>(call.z_slope),
                     data_or_null<const float>(call.d_losses),
                     call.result.as<float>(),
                     Scoring(call.scores),
                     tokens,
                     static_cast<int>(call.logits.dims[1]),
                     static_cast<int>(call.experts.dims[1])};
  with_experts_per_lane(p.count, [&](auto per_lane) {
    route_back<decltype(per_lane)::value><<<token_grid(tokens), kTokenThreads, 0, stream>>>(p);
  });
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const Kernel<RouterGrad> router_grad_any_cuda = {
    "router_grad_any_cuda", Arch::cuda, Kind::reference, takes_any, workspace, launch};

}  // namespace grouped
