// Scores of experts, the choice of k of them per token, sums over sequences, losses, and the gradient of the logits.
// Tasks split tokens; sums over experts have the order of `lane_sum`, sums over chosen experts that of the slots.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cc/cpu/formats.h"
#include "cc/cpu/groups.h"
#include "cc/cpu/parallel.h"
#include "cc/kernels/kernels.h"
#include "cc/math/routing.h"

namespace grouped {
namespace {

bool is_masked(const TensorView& mask, int64_t token) { return mask.present() && mask.as<const uint8_t>()[token] == 0; }

// ---- Scores of one token

struct Softmax {
  float most;  // the largest logit
  float sum;   // of exp(logit - most)

  static Softmax of(const float* logits, int64_t count) {
    float most = -std::numeric_limits<float>::infinity();
    for (int64_t e = 0; e < count; ++e) most = logits[e] > most ? logits[e] : most;
    return {most, lane_sum(count, [&](int64_t e) { return exp_below(logits[e], most); })};
  }
  float value(float logit) const { return fl_div(exp_below(logit, most), sum); }
  float log_sum() const { return fl_add(most, std::log(sum)); }
};

// scores[e] of all experts.
void score_all(Score score, const Softmax& softmax, const float* logits, int64_t count, float* scores) {
  for (int64_t e = 0; e < count; ++e) {
    scores[e] = score == Score::softmax ? softmax.value(logits[e]) : own_score(score, logits[e]).value;
  }
}

// Of probs = scores / divisor; 1 where scores sum to 1 already.
float divisor_of(Score score, const float* scores, int64_t count) {
  if (score == Score::softmax) return 1.0f;
  return fl_add(lane_sum(count, [&](int64_t e) { return scores[e]; }), kTinySum);
}

// ---- The choice

// The best `wanted` of the candidates, best first: by rank, then by index. Returns their places in `ranks`.
void choose_best(const std::vector<uint32_t>& ranks, int64_t first, int64_t count, int64_t wanted, int64_t* chosen) {
  thread_local std::vector<int32_t> order;
  order.resize(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) order[static_cast<size_t>(i)] = static_cast<int32_t>(first + i);
  std::partial_sort(order.begin(), order.begin() + wanted, order.end(), [&](int32_t a, int32_t b) {
    const uint32_t x = ranks[static_cast<size_t>(a)], y = ranks[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  });
  std::copy_n(order.begin(), wanted, chosen);
}

// Excludes the experts of all groups but the best ones.
void limit_groups(const Router& call, const std::vector<float>& values, std::vector<uint32_t>* ranks) {
  const int64_t groups = call.num_groups, size = static_cast<int64_t>(values.size()) / groups;
  std::vector<uint32_t> group_ranks(static_cast<size_t>(groups));
  std::vector<int64_t> best(static_cast<size_t>(std::max(call.group_topk, groups)));
  for (int64_t g = 0; g < groups; ++g) {
    choose_best(*ranks, g * size, size, call.group_topk, best.data());
    float sum = 0.0f;
    for (int64_t i = 0; i < call.group_topk; ++i) {
      sum = fl_add(sum, values[static_cast<size_t>(best[static_cast<size_t>(i)])]);
    }
    group_ranks[static_cast<size_t>(g)] = rank_of(sum);
  }
  choose_best(group_ranks, 0, groups, groups, best.data());
  for (int64_t i = call.topk_groups; i < groups; ++i) {
    const int64_t first = best[static_cast<size_t>(i)] * size;
    std::fill_n(ranks->begin() + first, size, kExcluded);
  }
}

void choose(const Router& call, int64_t token, const float* logits, const std::vector<float>& scores,
            int64_t* experts) {
  const int64_t count = call.logits.dims[1], k = call.experts.dims[1];
  if (call.given.present()) {
    std::copy_n(call.given.as<const int32_t>() + token * k, k, experts);
    return;
  }
  const float* by = call.ranking.present()   ? call.ranking.as<const float>() + token * count
                    : call.scores.after_topk ? logits
                                             : scores.data();
  std::vector<float> values(by, by + count);
  std::vector<uint32_t> ranks(values.size());
  for (size_t e = 0; e < values.size(); ++e) {
    if (call.bias.present()) values[e] = fl_add(values[e], call.bias.as<const float>()[e]);
    ranks[e] = rank_of(values[e]);
  }
  if (call.topk_groups < call.num_groups) limit_groups(call, values, &ranks);
  choose_best(ranks, 0, count, k, experts);
}

// ---- Weights of the chosen experts

// What is divided by what: weight = scale * part / divisor.
struct Parts {
  float part[kMostSlots];
  float divisor;
};

template <class Expert>
Parts weight_parts(const ScoreParams& scores, const float* logits, const float* all_scores, int64_t experts, int64_t k,
                   const Expert& expert) {
  const auto valid = [&](int64_t j) { return expert(j) >= 0 && expert(j) < experts; };
  Parts parts{};
  float most = -std::numeric_limits<float>::infinity();
  for (int64_t j = 0; j < k; ++j) {
    if (valid(j)) most = logits[expert(j)] > most ? logits[expert(j)] : most;
  }
  float sum = 0.0f;
  for (int64_t j = 0; j < k; ++j) {
    if (!valid(j)) continue;
    parts.part[j] = scores.after_topk ? exp_below(logits[expert(j)], most) : all_scores[expert(j)];
    sum = fl_add(sum, parts.part[j]);
  }
  parts.divisor = scores.after_topk ? sum : scores.normalize ? fl_add(sum, kTinySum) : 1.0f;
  return parts;
}

void route(const Router& call, int64_t token) {
  const int64_t count = call.logits.dims[1], k = call.experts.dims[1];
  float* weights = call.weights.as<float>() + token * k;
  int32_t* experts = call.experts.as<int32_t>() + token * k;
  if (is_masked(call.mask, token)) {
    std::fill_n(weights, k, 0.0f);
    std::fill_n(experts, k, -1);
    return;
  }
  const float* logits = call.logits.as<const float>() + token * count;
  const Score score = score_named(call.scores.score);
  const Softmax softmax = Softmax::of(logits, count);
  std::vector<float> scores(static_cast<size_t>(count));
  score_all(score, softmax, logits, count, scores.data());
  int64_t chosen[kMostSlots];
  choose(call, token, logits, scores, chosen);
  const auto expert = [&](int64_t j) { return chosen[j]; };
  const Parts parts = weight_parts(call.scores, logits, scores.data(), count, k, expert);
  for (int64_t j = 0; j < k; ++j) {
    const bool valid = chosen[j] >= 0 && chosen[j] < count;
    experts[j] = valid ? static_cast<int32_t>(chosen[j]) : -1;
    weights[j] = valid ? fl_mul(fl_div(parts.part[j], parts.divisor), call.scores.scale) : 0.0f;
  }
}

void launch_router(const Router& call, const Context& context) {
  parallel_rows(context.pool, 0, call.logits.dims[0], [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) route(call, t);
  });
}

// ---- Sums over sequences, in the order that cc/math/routing.h gives
//
// Partial sums have E + kTokenStats columns. Tasks split runs, then sequences.

// Adds a token's probabilities and what goes with them. `probs` is scratch.
void add_token(Score score, const float* logits, int64_t count, std::vector<float>* probs, float* sums) {
  const Softmax softmax = Softmax::of(logits, count);
  score_all(score, softmax, logits, count, probs->data());
  const float divisor = divisor_of(score, probs->data(), count);
  for (float& p : *probs) p = fl_div(p, divisor);
  for (int64_t e = 0; e < count; ++e) sums[e] = fl_add(sums[e], (*probs)[static_cast<size_t>(e)]);
  const float log_sum = softmax.log_sum();
  const float entropy = -lane_sum(count, [&](int64_t e) {
    const float p = (*probs)[static_cast<size_t>(e)];
    return p > 0.0f ? fl_mul(p, std::log(p)) : p;
  });
  float* stats = sums + count;
  stats[0] = fl_add(stats[0], fl_mul(log_sum, log_sum));
  stats[1] = fl_add(stats[1], entropy);
  stats[2] = fl_add(stats[2], 1.0f);
}

void count_slots(const RouterSums& call, int64_t begin, int64_t end, int32_t* counts) {
  const int64_t count = call.logits.dims[1], k = call.experts.dims[1];
  std::fill_n(counts, count, 0);
  for (int64_t t = begin; t < end; ++t) {
    if (is_masked(call.mask, t)) continue;
    const int32_t* experts = call.experts.as<const int32_t>() + t * k;
    for (int64_t j = 0; j < k; ++j) {
      if (experts[j] >= 0 && experts[j] < count) ++counts[experts[j]];
    }
  }
}

void launch_sums(const RouterSums& call, const Context& context) {
  const int64_t tokens = call.logits.dims[0], count = call.logits.dims[1], columns = count + kTokenStats;
  const Score score = score_named(call.score);
  const std::vector<int64_t> ends = group_ends(call.sequence_sizes, tokens);
  const int64_t sequences = static_cast<int64_t>(ends.size()), runs = token_runs(tokens);
  std::vector<float> partials(static_cast<size_t>((runs + sequences) * columns));
  parallel_for(context.pool, runs, [&](int64_t run) {
    std::vector<float> probs(static_cast<size_t>(count));
    const int64_t end = std::min((run + 1) * kTokensARun, ends.back());
    for (int64_t t = run * kTokensARun; t < end; ++t) {
      if (is_masked(call.mask, t)) continue;
      float* sums = partials.data() + (run + group_of_row(ends, t)) * columns;
      add_token(score, call.logits.as<const float>() + t * count, count, &probs, sums);
    }
  });
  parallel_for(context.pool, sequences, [&](int64_t s) {
    const int64_t begin = group_begin(ends, s), end = ends[static_cast<size_t>(s)];
    const int64_t first = begin / kTokensARun, own = begin < end ? (end - 1) / kTokensARun + 1 - first : 0;
    const float* rows = partials.data() + (first + s) * columns;
    const auto sum = [&](int64_t column) {
      return own ? lane_sum(own, [&](int64_t i) { return rows[i * columns + column]; }) : 0.0f;
    };
    for (int64_t e = 0; e < count; ++e) call.prob_sums.as<float>()[s * count + e] = sum(e);
    for (int i = 0; i < kTokenStats; ++i) call.stat_sums.as<float>()[s * kTokenStats + i] = sum(count + i);
    count_slots(call, begin, end, call.counts.as<int32_t>() + s * count);
  });
}

// ---- The gradient of the logits
//
// d_s, the gradient of the scores, has two parts. Of the weights w_j = scale * part_j / divisor with the slots'
// gradients d_j: scale * (d_j - sum of d_i part_i / divisor) / divisor where the divisor is a sum of the parts, else
// scale * d_j. Of probs p_e = s_e / D: (c_e - sum of c_i p_i) / D with c_e = slopes_e * d_losses[0]. Then dl_e = s_e
// (d_s_e - sum of s_i d_s_i) for softmax, in which D = 1 and c goes in whole, and dl_e = d_s_e s'(l_e) for the others.
// With after_topk the weights are functions of the chosen logits, and the first part is added to dl. Last comes what
// the squared logsumexp gives: 2 logsumexp softmax_e z_slope d_losses[1]. Losses without coefficients, whose slopes are
// 0, add nothing, whatever the logits and d_losses are: 0 times NaN would be NaN.

void route_back(const RouterGrad& call, const std::vector<int64_t>& ends, int64_t token) {
  const int64_t count = call.logits.dims[1], k = call.experts.dims[1];
  float* result = call.result.as<float>() + token * count;
  std::fill_n(result, count, 0.0f);
  if (is_masked(call.mask, token)) return;
  const float* logits = call.logits.as<const float>() + token * count;
  const int32_t* experts = call.experts.as<const int32_t>() + token * k;
  const Score score = score_named(call.scores.score);
  const Softmax softmax = Softmax::of(logits, count);
  std::vector<float> scores(static_cast<size_t>(count)), slopes(static_cast<size_t>(count), 0.0f);
  score_all(score, softmax, logits, count, scores.data());

  float of_parts[kMostSlots] = {};  // gradients of the chosen scores, or of the chosen logits with after_topk
  if (call.d_weights.present()) {
    const float* given = call.d_weights.as<const float>() + token * k;
    const int32_t* kept = call.kept.present() ? call.kept.as<const int32_t>() + token * k : experts;
    float d_weights[kMostSlots];
    for (int64_t j = 0; j < k; ++j) d_weights[j] = kept[j] >= 0 ? given[j] : 0.0f;
    const auto expert = [&](int64_t j) { return experts[j]; };
    const Parts parts = weight_parts(call.scores, logits, scores.data(), count, k, expert);
    const bool sums = call.scores.after_topk || call.scores.normalize;
    float mean = 0.0f;  // of the gradients, weighted with the parts
    for (int64_t j = 0; sums && j < k; ++j) {
      if (experts[j] >= 0 && experts[j] < count) {
        mean = fl_add(mean, fl_mul(d_weights[j], fl_div(parts.part[j], parts.divisor)));
      }
    }
    for (int64_t j = 0; j < k; ++j) {
      const float above = fl_mul(call.scores.scale, fl_sub(d_weights[j], mean));
      of_parts[j] =
          call.scores.after_topk ? fl_mul(fl_div(parts.part[j], parts.divisor), above) : fl_div(above, parts.divisor);
    }
  }
  const bool losses = call.sequence_sizes.present() && token < ends.back();
  const float* of_probs = losses ? call.slopes.as<const float>() + group_of_row(ends, token) * count : nullptr;
  if (losses && std::any_of(of_probs, of_probs + count, [](float slope) { return slope != 0.0f; })) {
    const float d_aux = call.d_losses.as<const float>()[0];
    const auto c = [&](int64_t e) { return fl_mul(of_probs[e], d_aux); };
    const float divisor = divisor_of(score, scores.data(), count);
    const float mean = score == Score::softmax ? 0.0f : lane_sum(count, [&](int64_t e) {
      return fl_mul(c(e), fl_div(scores[static_cast<size_t>(e)], divisor));
    });
    for (int64_t e = 0; e < count; ++e) slopes[static_cast<size_t>(e)] = fl_div(fl_sub(c(e), mean), divisor);
  }
  if (!call.scores.after_topk) {
    for (int64_t j = 0; j < k; ++j) {
      if (experts[j] >= 0 && experts[j] < count) {
        float& slope = slopes[static_cast<size_t>(experts[j])];
        slope = fl_add(slope, of_parts[j]);
      }
    }
  }
  if (score == Score::softmax) {
    const float mean = lane_sum(
        count, [&](int64_t e) { return fl_mul(scores[static_cast<size_t>(e)], slopes[static_cast<size_t>(e)]); });
    for (int64_t e = 0; e < count; ++e) {
      const auto at = static_cast<size_t>(e);
      result[e] = fl_mul(scores[at], fl_sub(slopes[at], mean));
    }
  } else {
    for (int64_t e = 0; e < count; ++e) {
      result[e] = fl_mul(slopes[static_cast<size_t>(e)], own_score(score, logits[e]).slope);
    }
  }
  for (int64_t j = 0; call.scores.after_topk && j < k; ++j) {
    if (experts[j] >= 0 && experts[j] < count) result[experts[j]] = fl_add(result[experts[j]], of_parts[j]);
  }
  const float z_slope = losses ? call.z_slope.as<const float>()[0] : 0.0f;
  if (z_slope != 0.0f) {
    const float slope = fl_mul(z_slope, call.d_losses.as<const float>()[1]);
    const float factor = fl_mul(fl_mul(2.0f, softmax.log_sum()), slope);
    for (int64_t e = 0; e < count; ++e) result[e] = fl_add(result[e], fl_mul(factor, softmax.value(logits[e])));
  }
}

void launch_router_grad(const RouterGrad& call, const Context& context) {
  const int64_t tokens = call.logits.dims[0];
  const auto ends =
      call.sequence_sizes.present() ? group_ends(call.sequence_sizes, tokens) : std::vector<int64_t>{tokens};
  parallel_rows(context.pool, 0, tokens, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) route_back(call, ends, t);
  });
}

// ---- Losses

void launch_losses(const RouterLosses& call, const Context&) {
  const int64_t sequences = call.prob_sums.dims[0], experts = call.prob_sums.dims[1];
  const float* stats = call.stat_sums.as<const float>();
  float tokens = 0.0f, squares = 0.0f, entropy = 0.0f, present = 0.0f;
  for (int64_t s = 0; s < sequences; ++s) {
    squares = fl_add(squares, stats[kTokenStats * s]);
    entropy = fl_add(entropy, stats[kTokenStats * s + 1]);
    tokens = fl_add(tokens, stats[kTokenStats * s + 2]);
    if (stats[kTokenStats * s + 2] > 0.0f) present = fl_add(present, 1.0f);
  }
  const float all = std::max(tokens, 1.0f);
  float aux = 0.0f;
  for (int64_t s = 0; s < sequences; ++s) {
    const float* sums = call.prob_sums.as<const float>() + s * experts;
    const int32_t* counts = call.counts.as<const int32_t>() + s * experts;
    float* slopes = call.slopes.as<float>() + s * experts;
    const float n = std::max(stats[kTokenStats * s + 2], 1.0f);
    const float share = fl_div(call.aux_coeff, std::max(present, 1.0f));
    const float factor =
        fl_div(fl_mul(share, static_cast<float>(experts)), fl_mul(fl_mul(static_cast<float>(call.slots), n), n));
    for (int64_t e = 0; e < experts; ++e) slopes[e] = fl_mul(factor, static_cast<float>(counts[e]));
    if (factor == 0.0f) continue;  // without a coefficient 0, though 0 times NaN is NaN
    aux = fl_add(aux, lane_sum(experts, [&](int64_t e) { return fl_mul(slopes[e], sums[e]); }));
  }
  const float z_slope = fl_div(call.z_coeff, all);
  float* losses = call.losses.as<float>();
  losses[0] = aux;
  losses[1] = z_loss(z_slope, squares);
  losses[2] = fl_div(entropy, all);
  call.z_slope.as<float>()[0] = z_slope;
  const int32_t lost = call.dropped.present() ? call.dropped.as<const int32_t>()[0] : 0;
  call.lost.as<int32_t>()[0] = lost;
  call.overflow.as<uint8_t>()[0] = lost > 0;
}

// ---- Changed logits

void launch_jitter(const Jitter& call, const Context& context) {
  const int64_t experts = call.logits.dims[1];
  const uint64_t key = key_of(call.key.as<const uint32_t>());
  parallel_rows(context.pool, 0, call.logits.dims[0], [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const float* logits = call.logits.as<const float>() + t * experts;
      float* result = call.result.as<float>() + t * experts;
      for (int64_t e = 0; e < experts; ++e) {
        const Words4 words = random_words(key, static_cast<uint32_t>(e), static_cast<uint32_t>(t), 0, 0);
        result[e] = fl_mul(logits[e], jitter_factor(words.word[e % 4], call.eps));
      }
    }
  });
}

// Rows and columns are scaled in turns: a[t] = 1 / (n (sum over e of b[e] C[t, e] + tiny)), b[e] likewise with E and
// the sum over tokens, n the number of tokens that count, C = exp(logits - the row's largest), which a[t] undoes. Sums
// over tokens are those of blocks of kBlock tokens, in order; rows with a NaN add nothing to them.
constexpr int64_t kBlock = 64;

void launch_sinkhorn(const Sinkhorn& call, const Context& context) {
  const int64_t tokens = call.logits.dims[0], experts = call.logits.dims[1];
  const int64_t blocks = (tokens + kBlock - 1) / kBlock;
  float* result = call.result.as<float>();
  std::vector<float> a(static_cast<size_t>(tokens), 1.0f), b(static_cast<size_t>(experts), 1.0f);
  std::vector<float> partial(static_cast<size_t>(blocks * experts));
  int64_t counted = 0;
  for (int64_t t = 0; t < tokens; ++t) counted += !is_masked(call.mask, t);
  parallel_rows(context.pool, 0, tokens, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const float* logits = call.logits.as<const float>() + t * experts;
      if (is_masked(call.mask, t)) {
        std::fill_n(result + t * experts, experts, 0.0f);
        continue;
      }
      const float most = Softmax::of(logits, experts).most;
      for (int64_t e = 0; e < experts; ++e) result[t * experts + e] = exp_below(logits[e], most);
    }
  });
  const float rows = static_cast<float>(std::max<int64_t>(counted, 1)), columns = static_cast<float>(experts);
  for (int64_t i = 0; i < call.iterations; ++i) {
    parallel_for(context.pool, blocks, [&](int64_t block) {
      float* sums = partial.data() + block * experts;
      std::fill_n(sums, experts, 0.0f);
      for (int64_t t = block * kBlock; t < std::min(tokens, (block + 1) * kBlock); ++t) {
        const float* c = result + t * experts;
        const float sum = lane_sum(experts, [&](int64_t e) { return fl_mul(b[static_cast<size_t>(e)], c[e]); });
        const float scale = fl_div(1.0f, fl_mul(rows, fl_add(sum, kTinySum)));
        a[static_cast<size_t>(t)] = scale;
        if (is_masked(call.mask, t) || std::isnan(scale)) continue;
        for (int64_t e = 0; e < experts; ++e) sums[e] = fl_add(sums[e], fl_mul(scale, c[e]));
      }
    });
    for (int64_t e = 0; e < experts; ++e) {
      float sum = 0.0f;
      for (int64_t block = 0; block < blocks; ++block) {
        sum = fl_add(sum, partial[static_cast<size_t>(block * experts + e)]);
      }
      b[static_cast<size_t>(e)] = fl_div(1.0f, fl_mul(columns, fl_add(sum, kTinySum)));
    }
  }
  parallel_rows(context.pool, 0, tokens, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      if (is_masked(call.mask, t)) continue;  // zeros already, whatever the others hold
      for (int64_t e = 0; e < experts; ++e) {
        float& c = result[t * experts + e];
        c = fl_mul(fl_mul(a[static_cast<size_t>(t)], c), b[static_cast<size_t>(e)]);
      }
    }
  });
}

}  // namespace

const Kernel<Router> router_any_cpu = {"router_any_cpu", Arch::cpu,    Kind::reference,
                                       takes_any,        no_workspace, launch_router};
const Kernel<RouterSums> router_sums_any_cpu = {"router_sums_any_cpu", Arch::cpu,  Kind::reference, takes_any,
                                                no_workspace,          launch_sums};
const Kernel<RouterGrad> router_grad_any_cpu = {"router_grad_any_cpu", Arch::cpu,         Kind::reference, takes_any,
                                                no_workspace,          launch_router_grad};
const Kernel<RouterLosses> router_losses_any_cpu = {
    "router_losses_any_cpu", Arch::cpu, Kind::reference, takes_any, no_workspace, launch_losses};
const Kernel<Jitter> jitter_any_cpu = {"jitter_any_cpu", Arch::cpu,    Kind::reference,
                                       takes_any,        no_workspace, launch_jitter};
const Kernel<Sinkhorn> sinkhorn_any_cpu = {"sinkhorn_any_cpu", Arch::cpu,    Kind::reference,
                                           takes_any,          no_workspace, launch_sinkhorn};

}  // namespace grouped
