// A token's experts in the registers of a warp: lane i holds experts i, i + 32, ..., kPer of them. Scores, sums in the
// order of `lane_sum`, and the choice of the best.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cc/api/routing.h"
#include "cc/math/routing.h"

namespace grouped {

// ScoreParams as kernels take it.
struct Scoring {
  Score score;
  bool after_topk, normalize;
  float scale;

  explicit Scoring(const ScoreParams& p)
      : score(score_named(p.score)), after_topk(p.after_topk != 0), normalize(p.normalize != 0), scale(p.scale) {}
};

// launch(std::integral_constant<int, experts per lane>{}): arrays of that many stay in registers.
template <class Launch>
void with_experts_per_lane(int64_t experts, const Launch& launch) {
  if (experts <= 32) return launch(std::integral_constant<int, 1>{});
  if (experts <= 64) return launch(std::integral_constant<int, 2>{});
  if (experts <= 128) return launch(std::integral_constant<int, 4>{});
  if (experts <= 256) return launch(std::integral_constant<int, 8>{});
  if (experts <= 512) return launch(std::integral_constant<int, 16>{});
  launch(std::integral_constant<int, 32>{});
}

namespace device {

// A warp has a token, and a small block frees its place early.
constexpr int kTokensABlock = 4;
constexpr int kTokenThreads = 32 * kTokensABlock;
inline unsigned token_grid(int64_t tokens) {
  return static_cast<unsigned>((tokens + kTokensABlock - 1) / kTokensABlock);
}

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x % 32); }
__device__ inline int64_t warp_token() {
  return static_cast<int64_t>(blockIdx.x) * kTokensABlock + static_cast<int>(threadIdx.x / 32);
}

constexpr float kBelowAll = -INFINITY;

// The tree of lane_sum. Both sides of a pair add the same two numbers, so all lanes get the same bits.
__device__ inline float warp_sum(float lane) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) lane = fl_add(lane, __shfl_xor_sync(~0u, lane, d));
  return lane;
}

// NaN is passed over.
__device__ inline float larger(float a, float b) { return b > a ? b : a; }
__device__ inline float warp_max(float lane) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) lane = larger(lane, __shfl_xor_sync(~0u, lane, d));
  return lane;
}

// body(i, expert) for the experts of this lane that exist.
template <int kPer, class Body>
__device__ inline void for_experts(int count, const Body& body) {
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int expert = i * 32 + lane_id();
    if (expert < count) body(i, expert);
  }
}

// lane_sum of value(i). Adding nothing is adding zero here: sums start at +0, so none of them is -0. What value(i) is
// where there is no expert does not matter; that it is asked for keeps the code free of branches.
template <int kPer, class Value>
__device__ inline float sum_experts(int count, const Value& value) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const float one = value(i);
    sum = fl_add(sum, i * 32 + lane_id() < count ? one : 0.0f);
  }
  return warp_sum(sum);
}

template <int kPer>
__device__ inline void load_experts(const float* row, int count, float (&values)[kPer]) {
#pragma unroll
  for (int i = 0; i < kPer; ++i) values[i] = kBelowAll;
  for_experts<kPer>(count, [&](int i, int expert) { values[i] = row[expert]; });
}

struct Softmax {
  float most;  // the largest logit
  float sum;   // of exp(logit - most)

  __device__ float value(float logit) const { return fl_div(exp_below(logit, most), sum); }
  __device__ float log_sum() const { return fl_add(most, logf(sum)); }
};

// Scores of all experts, zero where there is none; logits and scores may be one array. The softmax of the logits is
// returned if it is wanted, and if the scores are it.
template <int kPer>
__device__ inline Softmax score_experts(Score score, const float (&logits)[kPer], int count, bool wants_softmax,
                                        float (&scores)[kPer]) {
  Softmax softmax = {0.0f, 1.0f};
  if (score == Score::softmax || wants_softmax) {
    softmax.most = kBelowAll;
#pragma unroll
    for (int i = 0; i < kPer; ++i) softmax.most = larger(softmax.most, logits[i]);
    softmax.most = warp_max(softmax.most);
    float powers[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) powers[i] = exp_below(logits[i], softmax.most);
    softmax.sum = sum_experts<kPer>(count, [&](int i) { return powers[i]; });
    if (score == Score::softmax) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        scores[i] = i * 32 + lane_id() < count ? fl_div(powers[i], softmax.sum) : 0.0f;
      }
      return softmax;
    }
  }
  // The kind of score is known inside of each loop.
  if (score == Score::sigmoid) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      scores[i] = i * 32 + lane_id() < count ? own_score(Score::sigmoid, logits[i]).value : 0.0f;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      scores[i] = i * 32 + lane_id() < count ? own_score(Score::sqrt_softplus, logits[i]).value : 0.0f;
    }
  }
  return softmax;
}

// Of probs = scores / divisor; 1 where scores sum to 1 already.
template <int kPer>
__device__ inline float divisor_of(Score score, const float (&scores)[kPer], int count) {
  if (score == Score::softmax) return 1.0f;
  return fl_add(sum_experts<kPer>(count, [&](int i) { return scores[i]; }), kTinySum);
}

// values[...] of the lane's own choice of an expert, whatever it is where that is none.
template <int kPer>
__device__ inline float value_of_expert(const float (&values)[kPer], int expert) {
  float mine = 0.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const float value = __shfl_sync(~0u, values[i], expert % 32);
    mine = expert / 32 == i ? value : mine;
  }
  return mine;
}

// ---- The choice of the best

// What rank_of made of a float, but for the sign of zero and the bits of NaN.
__device__ inline float ranked_value(uint32_t rank) {
  return bits_float(rank & 0x80000000u ? rank ^ 0x80000000u : ~rank);
}

struct Best {
  uint32_t rank;
  int expert;
};

// The best by rank, then by index, and takes it out. Something must be left.
template <int kPer>
__device__ inline Best take_best(uint32_t (&ranks)[kPer]) {
  uint32_t best = kExcluded;
  int at = 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (ranks[i] > best) best = ranks[i], at = i;
  }
  const uint32_t top = __reduce_max_sync(~0u, best);
  const unsigned mine = static_cast<unsigned>(at * 32 + lane_id());
  const int expert = static_cast<int>(__reduce_min_sync(~0u, best == top ? mine : ~0u));
  const int inside = expert - lane_id();
#pragma unroll
  for (int i = 0; i < kPer; ++i) ranks[i] = inside == i * 32 ? kExcluded : ranks[i];
  return {top, expert};
}

// ---- Weights of the chosen experts: of slot j in lane j

// weight = scale * part / divisor.
struct Parts {
  float part;
  float divisor;
};

// `raw` is the score of the slot's expert, or its logit with after_topk; `valid` says that it has one.
__device__ inline Parts weight_parts(const Scoring& scoring, int k, bool valid, float raw) {
  Parts parts = {valid ? raw : 0.0f, 1.0f};
  if (!scoring.after_topk && !scoring.normalize) return parts;
  if (scoring.after_topk) {
    const float most = warp_max(valid ? larger(kBelowAll, raw) : kBelowAll);
    parts.part = valid ? exp_below(raw, most) : 0.0f;
  }
  float sum = 0.0f;
  for (int j = 0; j < k; ++j) sum = fl_add(sum, __shfl_sync(~0u, parts.part, j));
  parts.divisor = scoring.after_topk ? sum : fl_add(sum, kTinySum);
  return parts;
}

}  // namespace device
}  // namespace grouped
