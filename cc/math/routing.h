// The arithmetic of routing, for both CPU and CUDA (docs/numerics.md, "Routing"): scores of experts, how experts are
// ranked, random factors and draws. All of it is fp32; sums over a token's experts have one order, see `lane_sum`, and
// so have sums over a sequence's tokens.
#pragma once

#include <cmath>
#include <string>

#include "cc/math/activation.h"
#include "cc/math/exact.h"
#include "cc/math/rotate.h"

namespace grouped {

enum class Score : int { softmax, sigmoid, sqrt_softplus };

inline Score score_named(const std::string& name) {
  return name == "sigmoid" ? Score::sigmoid : name == "sqrt_softplus" ? Score::sqrt_softplus : Score::softmax;
}

// Experts per token, where the kernels choose them.
constexpr int64_t kMostSlots = 32;

// Keeps the sums that divide scores away from zero.
constexpr float kTinySum = 1e-20f;

// Sums over experts: lane i of kLaneCount adds elements i, i + kLaneCount, ... in this order, and the lanes are added
// as a balanced tree, i with i + 16, then + 8, and so on. A warp does it with one expert per lane and shuffles.
constexpr int kLaneCount = 32;

template <class Value>
inline float lane_sum(int64_t count, const Value& value) {
  float lanes[kLaneCount] = {};
  int64_t i = 0;
  for (; i + kLaneCount <= count; i += kLaneCount) {
    for (int j = 0; j < kLaneCount; ++j) lanes[j] = fl_add(lanes[j], value(i + j));
  }
  for (int j = 0; i + j < count; ++j) lanes[j] = fl_add(lanes[j], value(i + j));
  for (int half = kLaneCount / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] = fl_add(lanes[i], lanes[i + half]);
  }
  return lanes[0];
}

// Sums over the tokens of a sequence: run w has the tokens from w * kTokensARun on. A run's tokens that belong to one
// sequence are added in order, from zero on; the sequence's partial sums, one per run, are added by `lane_sum`. The
// partial of run w and sequence s has place w + s: no other pair with tokens has it, as neither falls along the tokens.
constexpr int kTokensARun = 8;
constexpr int64_t token_runs(int64_t tokens) { return (tokens + kTokensARun - 1) / kTokensARun; }

// Beside the probabilities: squared logsumexp, entropy, tokens.
constexpr int kTokenStats = 3;

// The z-loss from the sum of the squared logsumexp, which may overflow where nobody asks for the loss.
GROUPED_HOST_DEVICE static inline float z_loss(float z_slope, float squares) {
  return z_slope == 0.0f ? 0.0f : fl_mul(z_slope, squares);
}

// A score that depends on its own logit alone, and its derivative.
struct OwnScore {
  float value;
  float slope;
};

// softplus(x) = max(x, 0) + log(1 + exp(-|x|)); its root's derivative is logistic(x) / (2 root), 0 where the root is 0.
GROUPED_MATH OwnScore own_score(Score score, float x) {
  const activation_math::Logistic s = activation_math::logistic(x);
  if (score == Score::sigmoid) return {s.value, s.slope};
  const float e = activation_math::exp_negative(activation_math::magnitude(x));
  const float root = sqrtf(fl_add(activation_math::at_least(x, 0.0f), log1pf(e)));
  return {root, root > 0.0f ? fl_div(s.value, fl_mul(2.0f, root)) : root != root ? root : 0.0f};
}

// exp(x - most) for x <= most, as softmax and logsumexp use it.
GROUPED_MATH float exp_below(float x, float most) { return activation_math::exp_negative(fl_sub(most, x)); }

// Ranks floats as unsigned integers: larger is better, NaN best, and both zeros the same.
GROUPED_HOST_DEVICE static inline uint32_t rank_of(float value) {
  const uint32_t bits = float_bits(fl_add(value, 0.0f));
  if (is_nan_bits(bits & 0x7FFFFFFFu)) return 0xFFFFFFFFu;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// What is never chosen while anything else is left: less than the rank of any float.
constexpr uint32_t kExcluded = 0;

// 1 + eps * (2 u - 1) with u = the upper 24 bits of `word` / 2^24.
GROUPED_HOST_DEVICE static inline float jitter_factor(uint32_t word, float eps) {
  const float u = fl_mul(static_cast<float>(word >> 8), 1.0f / 16777216.0f);
  return fl_add(1.0f, fl_mul(eps, fl_sub(fl_mul(2.0f, u), 1.0f)));
}

// k distinct numbers below n, drawn without replacement: draw j is the d-th, counted from 0, of the n - j numbers that
// are left, d = word * (n - j) / 2^32 with word j of the random stream of counter (j / 4, id, 0, 0) under key 0.
constexpr int kMostDraws = static_cast<int>(kMostSlots);

template <class Store>
GROUPED_HOST_DEVICE static inline void draw_distinct(uint32_t id, int k, int n, const Store& store) {
  int sorted[kMostDraws];
  Words4 words{};
  for (int j = 0; j < k; ++j) {
    if (j % 4 == 0) words = philox({{static_cast<uint32_t>(j / 4), id, 0, 0}}, 0);
    int drawn = static_cast<int>((static_cast<uint64_t>(words.word[j % 4]) * static_cast<uint32_t>(n - j)) >> 32);
    int at = 0;
    for (; at < j && sorted[at] <= drawn; ++at) ++drawn;  // skips those that are taken
    for (int i = j; i > at; --i) sorted[i] = sorted[i - 1];
    sorted[at] = drawn;
    store(j, drawn);
  }
}

// Bin of a margin that is not NaN: floor((margin - low) * bins / (high - low)), kept in range.
GROUPED_HOST_DEVICE static inline int margin_bin(float margin, float low, float high, int bins) {
  const float at = fl_mul(fl_sub(margin, low), fl_div(static_cast<float>(bins), fl_sub(high, low)));
  if (!(at > 0.0f)) return 0;
  return at < static_cast<float>(bins) ? static_cast<int>(at) : bins - 1;
}

// Upper edge of a bin.
GROUPED_HOST_DEVICE static inline float bin_edge(int bin, float low, float high, int bins) {
  const float part = fl_div(static_cast<float>(bin + 1), static_cast<float>(bins));
  return fl_add(low, fl_mul(part, fl_sub(high, low)));
}

}  // namespace grouped
