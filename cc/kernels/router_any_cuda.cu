// Scores of experts and the choice of k of them, a warp per token and one launch.
//
//   logits --lane i: experts i, i + 32, ...--> max, exp, sum over the warp --> scores
//                                                                                |
//   ranking or scores or logits, + bias --> ranks, unsigned integers <-----------+
//     [groups: sums of the best of each --> the best groups; ranks of the others are 0]
//     k rounds: REDUX.MAX of ranks, REDUX.MIN of the index --> slot j in lane j, with its score
//                                                                |
//                          parts summed in the order of slots --> weights, experts
//
// No shared memory and no barrier; loops over experts are unrolled, so that arrays stay in registers:
//   experts up to             32   64  128  256  512  1024
//   registers (sm_90)         32   32   40   60   96   178      nothing is spilled
//   warps per multiprocessor  64   64   48   32   20     8
// Predicted for T = 8192, E = 128, k = 8 on an H200: about 650 instructions per token, 27 of them per round of the
// choice, 6.5 us; the bytes, 4 MiB, take 1 us of it.
#include <string>

#include "cc/device/common/expert_scores.cuh"
#include "cc/device/common/launch.h"
#include "cc/device/common/refusals.h"
#include "cc/kernels/kernels.h"

namespace grouped {
namespace {

using namespace device;

struct Problem {
  const float* logits;
  const float* bias;  // null, as the next three: absent
  const uint8_t* mask;
  const int32_t* given;
  const float* ranking;
  float* weights;
  int32_t* experts;
  Scoring scoring;
  int64_t tokens;
  int count, slots;  // E, k
  int groups, kept_groups, group_best, group_size;
};

__device__ void write_nothing(const Problem& p, int64_t token) {
  const int lane = lane_id();
  if (lane < p.slots) {
    p.weights[token * p.slots + lane] = 0.0f;
    p.experts[token * p.slots + lane] = -1;
  }
}

// Excludes the experts of all groups but the best. Group g is kept by lane g % 32, as an expert of that number is.
template <int kPer>
__device__ void limit_groups(const Problem& p, uint32_t (&ranks)[kPer]) {
  uint32_t groups[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) groups[i] = kExcluded;
  for (int g = 0; g < p.groups; ++g) {
    const int first = g * p.group_size;
    uint32_t left[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int inside = i * 32 + lane_id() - first;
      left[i] = inside >= 0 && inside < p.group_size ? ranks[i] : kExcluded;
    }
    float sum = 0.0f;
    for (int n = 0; n < p.group_best; ++n) sum = fl_add(sum, ranked_value(take_best(left).rank));
    const uint32_t rank = rank_of(sum);
#pragma unroll
    for (int i = 0; i < kPer; ++i) groups[i] = i * 32 + lane_id() == g ? rank : groups[i];
  }
  uint32_t kept = 0;  // bit i: group i * 32 + lane
  for (int n = 0; n < p.kept_groups; ++n) {
    const int best = take_best(groups).expert;
    if (best % 32 == lane_id()) kept |= 1u << (best / 32);
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int group = min((i * 32 + lane_id()) / p.group_size, p.groups - 1);
    const uint32_t of_lane = __shfl_sync(~0u, kept, group % 32);
    if (!(of_lane >> (group / 32) & 1u)) ranks[i] = kExcluded;
  }
}

// The slots of a token: of slot j in lane j.
struct Slot {
  int expert;
  float raw;  // its score, or its logit with after_topk
};

template <int kPer>
__device__ Slot read_given(const Problem& p, int64_t token, const float (&raw)[kPer]) {
  Slot mine = {lane_id() < p.slots ? p.given[token * p.slots + lane_id()] : -1, 0.0f};
  if (mine.expert < 0 || mine.expert >= p.count) mine.expert = -1;
  mine.raw = value_of_expert(raw, mine.expert);
  return mine;
}

template <int kPer>
__device__ Slot choose(const Problem& p, int64_t token, const float (&raw)[kPer]) {
  uint32_t ranks[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) ranks[i] = kExcluded;
  const float* ranking = p.ranking ? p.ranking + token * p.count : nullptr;
  for_experts<kPer>(p.count, [&](int i, int expert) {
    float value = ranking ? ranking[expert] : raw[i];
    if (p.bias) value = fl_add(value, p.bias[expert]);
    ranks[i] = rank_of(value);
  });
  if (p.kept_groups < p.groups) limit_groups(p, ranks);
  Slot mine = {-1, 0.0f};
  for (int j = 0; j < p.slots; ++j) {
    const int expert = take_best(ranks).expert;
    mine.expert = lane_id() == j ? expert : mine.expert;
  }
  mine.raw = value_of_expert(raw, mine.expert);
  return mine;
}

// Blocks that should fit on a multiprocessor: 40 registers per thread for few experts, 64, 96 and 255 for more.
constexpr int route_blocks(int per_lane) { return per_lane <= 4 ? 12 : per_lane <= 8 ? 8 : per_lane <= 16 ? 5 : 2; }

template <int kPer>
__global__ void __launch_bounds__(kTokenThreads, route_blocks(kPer)) route(const __grid_constant__ Problem p) {
  const int64_t token = warp_token();
  if (token >= p.tokens) return;
  if (p.mask && p.mask[token] == 0) return write_nothing(p, token);
  float raw[kPer];  // logits, then scores where weights follow from those
  load_experts(p.logits + token * p.count, p.count, raw);
  if (!p.scoring.after_topk) score_experts(p.scoring.score, raw, p.count, false, raw);
  const Slot mine = p.given ? read_given(p, token, raw) : choose(p, token, raw);
  const bool valid = mine.expert >= 0;
  const Parts parts = weight_parts(p.scoring, p.slots, valid, mine.raw);
  if (lane_id() >= p.slots) return;
  p.experts[token * p.slots + lane_id()] = mine.expert;
  p.weights[token * p.slots + lane_id()] = valid ? fl_mul(fl_div(parts.part, parts.divisor), p.scoring.scale) : 0.0f;
}

void launch(const Router& call, const Context& context) {
  Problem p = {call.logits.as<const float>(),
               data_or_null<const float>(call.bias),
               data_or_null<const uint8_t>(call.mask),
               data_or_null<const int32_t>(call.given),
               data_or_null<const float>(call.ranking),
               call.weights.as<float>(),
               call.experts.as<int32_t>(),
               Scoring(call.scores),
               call.logits.dims[0],
               static_cast<int>(call.logits.dims[1]),
               static_cast<int>(call.experts.dims[1]),
               static_cast<int>(call.num_groups),
               static_cast<int>(call.topk_groups),
               static_cast<int>(call.group_topk),
               static_cast<int>(call.logits.dims[1] / call.num_groups)};
  if (p.tokens == 0) return;
  with_experts_per_lane(p.count, [&](auto per_lane) {
    route<decltype(per_lane)::value>
        <<<token_grid(p.tokens), kTokenThreads, 0, static_cast<cudaStream_t>(context.stream)>>>(p);
  });
  GROUPED_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

const Kernel<Router> router_any_cuda = {"router_any_cuda", Arch::cuda,   Kind::reference,
                                        takes_any,         no_workspace, launch};

}  // namespace grouped
