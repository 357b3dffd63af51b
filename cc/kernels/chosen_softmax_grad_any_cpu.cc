// The gradient of logits from weights that are a softmax over the chosen experts. Tasks split tokens.
#include <algorithm>

#include "cc/cpu/groups.h"
#include "cc/cpu/parallel.h"
#include "cc/kernels/kernels.h"
#include "cc/math/routing.h"

namespace grouped {
namespace {

// Slot j has the share q_j = w_j / scale, and its logit the gradient scale q_j (d_j - sum of d_i q_i).
void route_back(const ChosenSoftmaxGrad& call, int64_t token) {
  const int64_t count = call.result.dims[1], k = call.experts.dims[1];
  const float* weights = call.weights.as<const float>() + token * k;
  const float* d_weights = call.d_weights.as<const float>() + token * k;
  const int32_t* experts = call.experts.as<const int32_t>() + token * k;
  const int32_t* kept = call.kept.present() ? call.kept.as<const int32_t>() + token * k : experts;
  float* result = call.result.as<float>() + token * count;
  std::fill_n(result, count, 0.0f);
  const auto is_chosen = [&](int64_t j) { return experts[j] >= 0 && experts[j] < count; };
  const auto share = [&](int64_t j) { return fl_div(weights[j], call.scale); };
  const auto gradient = [&](int64_t j) { return kept[j] >= 0 ? d_weights[j] : 0.0f; };
  float mean = 0.0f;
  for (int64_t j = 0; j < k; ++j) {
    if (is_chosen(j)) mean = fl_add(mean, fl_mul(gradient(j), share(j)));
  }
  for (int64_t j = 0; j < k; ++j) {
    if (!is_chosen(j)) continue;
    float& of_logit = result[experts[j]];
    of_logit = fl_add(of_logit, fl_mul(share(j), fl_mul(call.scale, fl_sub(gradient(j), mean))));
  }
}

void launch(const ChosenSoftmaxGrad& call, const Context& context) {
  parallel_rows(context.pool, 0, call.result.dims[0], [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) route_back(call, t);
  });
}

}  // namespace

const Kernel<ChosenSoftmaxGrad> chosen_softmax_grad_any_cpu = {
    "chosen_softmax_grad_any_cpu", Arch::cpu, Kind::reference, takes_any, no_workspace, launch};

}  // namespace grouped
