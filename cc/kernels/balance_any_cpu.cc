// Selection biases that balance the load of experts: by the sign of what an expert lacks, or by a quantile of margins.
#include <algorithm>
#include <limits>
#include <vector>

#include "cc/cpu/formats.h"
#include "cc/kernels/kernels.h"
#include "cc/math/routing.h"

namespace grouped {
namespace {

void launch_update(const BiasUpdate& call, const Context&) {
  const int64_t experts = call.bias.dims[0];
  const int32_t* load = call.load.as<const int32_t>();
  int64_t all = 0;
  for (int64_t e = 0; e < experts; ++e) all += load[e];
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t lacks = all - load[e] * experts;
    const float sign = lacks > 0 ? 1.0f : lacks < 0 ? -1.0f : 0.0f;
    call.result.as<float>()[e] = fl_add(call.bias.as<const float>()[e], fl_mul(call.rate, sign));
  }
}

void launch_histogram(const MarginHistogram& call, const Context&) {
  const int64_t tokens = call.logits.dims[0], experts = call.logits.dims[1], bins = call.counts.dims[1];
  const Score score = score_named(call.score);
  const float* bias = call.bias.as<const float>();
  int32_t* counts = call.counts.as<int32_t>();
  std::fill_n(counts, call.counts.elements(), 0);
  std::vector<float> scores(static_cast<size_t>(experts)), ranked(scores.size());
  for (int64_t t = 0; t < tokens; ++t) {
    if (call.mask.present() && call.mask.as<const uint8_t>()[t] == 0) continue;
    const float* logits = call.logits.as<const float>() + t * experts;
    float most = -std::numeric_limits<float>::infinity(), sum = 1.0f;
    if (score == Score::softmax) {
      for (int64_t e = 0; e < experts; ++e) most = logits[e] > most ? logits[e] : most;
      sum = lane_sum(experts, [&](int64_t e) { return exp_below(logits[e], most); });
    }
    for (size_t e = 0; e < scores.size(); ++e) {
      scores[e] = score == Score::softmax ? fl_div(exp_below(logits[e], most), sum) : own_score(score, logits[e]).value;
      ranked[e] = fl_add(scores[e], bias[e]);
    }
    std::nth_element(ranked.begin(), ranked.begin() + call.slots, ranked.end(),
                     [](float a, float b) { return rank_of(a) > rank_of(b); });
    const float alpha = ranked[static_cast<size_t>(call.slots)];
    for (int64_t e = 0; e < experts; ++e) {
      const float margin = fl_sub(alpha, scores[static_cast<size_t>(e)]);
      if (margin == margin) {
        ++counts[e * bins + margin_bin(margin, call.low, call.high, static_cast<int>(bins))];
      }
    }
  }
}

void launch_quantile(const QuantileBias& call, const Context&) {
  const int64_t experts = call.counts.dims[0], bins = call.counts.dims[1];
  float* result = call.result.as<float>();
  for (int64_t e = 0; e < experts; ++e) {
    const int32_t* counts = call.counts.as<const int32_t>() + e * bins;
    int64_t all = 0, below = 0;
    for (int64_t i = 0; i < bins; ++i) all += counts[i];
    result[e] = 0.0f;
    for (int64_t i = 0; all > 0 && i < bins; ++i) {
      below += counts[i];
      if (below * experts >= all * call.slots) {
        result[e] = bin_edge(static_cast<int>(i), call.low, call.high, static_cast<int>(bins));
        break;
      }
    }
  }
  const float mean = fl_div(lane_sum(experts, [&](int64_t e) { return result[e]; }), static_cast<float>(experts));
  for (int64_t e = 0; e < experts; ++e) result[e] = fl_sub(result[e], mean);
}

}  // namespace

const Kernel<BiasUpdate> bias_update_any_cpu = {"bias_update_any_cpu", Arch::cpu,    Kind::reference, takes_any,
                                                no_workspace,          launch_update};
const Kernel<MarginHistogram> margin_histogram_any_cpu = {
    "margin_histogram_any_cpu", Arch::cpu, Kind::reference, takes_any, no_workspace, launch_histogram};
const Kernel<QuantileBias> quantile_bias_any_cpu = {
    "quantile_bias_any_cpu", Arch::cpu, Kind::reference, takes_any, no_workspace, launch_quantile};

}  // namespace grouped
