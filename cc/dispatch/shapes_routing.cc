// What is peculiar to the calls of routing (cc/api/routing.h).
#include <algorithm>

#include "cc/dispatch/shape_check.h"
#include "cc/math/parts.h"
#include "cc/math/routing.h"

namespace grouped {
namespace {

constexpr int64_t kMostGroups = 65535;  // GRP-11

// Slots [T, k] of a router of E experts.
void chosen(Check* check, const TensorView& experts, int64_t of) {
  const int64_t most = std::min(kMostSlots, of);
  check->require(experts.dims[1] <= most, [&] {
    return Check::named("experts", experts) + ", expected 1 to " + std::to_string(most) + " slots per token";
  });
}

void score(Check* check, const ScoreParams& s) {
  check->require(!s.after_topk || s.score == "softmax", [] { return "after_topk: expected only with softmax"; });
}

// `whole` is `part` repeated `count` times along `axis`.
void repeats(Check* check, const char* name, const TensorView& whole, const TensorView& part, int64_t axis,
             int64_t count) {
  bool same = whole.rank == part.rank && axis < part.rank;
  for (int i = 0; same && i < part.rank; ++i) {
    same = whole.dims[i] == part.dims[i] * (i == axis ? count : 1) && (i == 0 || part.dims[i] > 0);
  }
  check->require(same, [&] {
    return Check::named(name, whole) + ", expected that of " + describe(part) + " with axis " + std::to_string(axis) +
           " times " + std::to_string(count) + ", and no empty axis but the first";
  });
}

// Experts that ranks own in equal shares.
void shared_out(Check* check, int64_t experts, int64_t ranks) {
  check->require(experts <= kMostGroups && experts % ranks == 0, [&] {
    return "num_experts: " + std::to_string(experts) + ", expected a multiple of " + std::to_string(ranks) +
           " ranks, at most " + std::to_string(kMostGroups);
  });
}

void range(Check* check, float low, float high) {
  check->require(low < high, [] { return "low, high: expected low < high"; });
}

}  // namespace

void own_rules(Check* check, const Router& call) {
  const int64_t experts = call.logits.dims[1], parts = call.num_groups, k = call.experts.dims[1];
  chosen(check, call.experts, experts);
  score(check, call.scores);
  check->require(parts <= experts && experts % parts == 0 && call.topk_groups <= parts, [&] {
    return "num_groups, topk_groups: expected a divisor of " + std::to_string(experts) + " experts and at most that";
  });
  check->require(call.group_topk <= experts / parts && call.topk_groups * (experts / parts) >= k, [] {
    return "group_topk, topk_groups: expected at most the experts of a group, and k experts in the groups that are "
           "kept";
  });
}

void own_rules(Check* check, const RouterSums& call) { chosen(check, call.experts, call.logits.dims[1]); }

void own_rules(Check* check, const RouterGrad& call) {
  chosen(check, call.experts, call.logits.dims[1]);
  check->require(call.sequence_sizes.present() || call.d_weights.present(),
                 [] { return "gradients: expected d_weights or those of losses"; });
  score(check, call.scores);
}

void own_rules(Check* check, const ChosenSoftmaxGrad& call) {
  chosen(check, call.experts, call.result.dims[1]);
  check->require(call.scale != 0.0f, [] { return "scale: 0, expected another factor, by which weights are divided"; });
}

void own_rules(Check* check, const DropSlots& call) {
  check->require(call.num_experts <= kMostGroups,
                 [] { return "num_experts: expected 1 to " + std::to_string(kMostGroups); });
}

void own_rules(Check* check, const SendOrder& call) {
  const int64_t experts = call.group_sizes.dims[0], places = call.sent.dims[0];
  check->require(experts % call.ranks == 0 && places % call.ranks == 0, [&] {
    return Check::named("sent", call.sent) + ", ranks " + std::to_string(call.ranks) +
           ": expected ranks that divide experts and places";
  });
}

void own_rules(Check* check, const RankSlots& call) { shared_out(check, call.num_experts, call.ranks); }

void own_rules(Check* check, const RowSlots& call) {
  const int64_t places = call.local.dims[0], of_place = call.local.dims[1];
  shared_out(check, call.num_experts, call.ranks);
  check->require(places % call.ranks == 0 && of_place <= INT32_MAX / std::max<int64_t>(places, 1), [&] {
    return Check::named("local", call.local) + ", expected a multiple of " + std::to_string(call.ranks) +
           " places, and fewer than 2^31 entries";
  });
}

void own_rules(Check* check, const PadGroups& call) {
  const int64_t least = call.inverse.dims[0] + call.group_sizes.dims[0] * (call.align - 1);
  check->require(call.source.dims[0] >= least, [&] {
    return Check::named("source", call.source) + ", expected at least " + std::to_string(least) + " rows";
  });
}

void own_rules(Check* check, const GatherRows& call) {
  const TensorView &from = call.rows, &source = call.source;
  const bool columns = call.axis == 1;
  check->require(call.axis <= 1, [] { return "axis: expected 0 or 1"; });
  check->require(!columns || (from.rank == 2 && source.rank == 1 && !call.weights.present()),
                 [] { return "axis: expected 0 but for a matrix, a source [M] and no weights"; });
  // The axis that is gathered may be empty.
  check->require(from.rank == 1 || from.dims[columns ? 0 : 1] > 0,
                 [&] { return Check::named("rows", from) + ", expected no empty axis but that which is gathered"; });
  check->require(from.dims[columns ? 1 : 0] <= INT32_MAX / call.slots,
                 [] { return "rows, slots: expected fewer than 2^31 slots"; });
  check->require(!call.weights.present() || is_plain(from.dtype),
                 [&] { return Check::named("rows", from) + ", expected float32, bfloat16 or float16"; });
  check->shape_if_given("weights", call.weights, {from.dims[0], call.slots});
  check->shape_if_given("places", call.places, {from.dims[columns ? 1 : 0], call.slots});
  int64_t dims[3] = {columns ? from.dims[0] : source.dims[0]};
  int rank = 1;
  if (columns) dims[rank++] = source.dims[0];
  if (source.rank == 2) dims[rank++] = source.dims[1];
  if (from.rank == 2 && !columns) dims[rank++] = from.dims[1];
  check->require(call.result.rank == rank && std::equal(dims, dims + rank, call.result.dims), [&] {
    return Check::named("result", call.result) + ", expected the axes of the source, then those of a row";
  });
}

void own_rules(Check* check, const HashExperts& call) {
  const int64_t k = call.experts.dims[1];
  check->require(call.num_experts <= kMostGroups && k <= kMostSlots && k <= call.num_experts, [&] {
    return "num_experts: expected k = " + std::to_string(k) + " to " + std::to_string(kMostGroups) +
           ", and k at most " + std::to_string(kMostSlots);
  });
}

void own_rules(Check* check, const MarginHistogram& call) {
  const int64_t experts = call.logits.dims[1];
  check->require(call.slots < experts && call.slots < kMostSlots, [&] {
    return "slots: " + std::to_string(call.slots) + ", expected fewer than " + std::to_string(experts) +
           " experts, and fewer than " + std::to_string(kMostSlots);
  });
  range(check, call.low, call.high);
}

void own_rules(Check* check, const QuantileBias& call) {
  const int64_t most = std::min(kMostSlots, call.counts.dims[0]);
  check->require(call.slots <= most, [&] {
    return "slots: " + std::to_string(call.slots) + ", expected 1 to " + std::to_string(most) +
           ", at most one per expert";
  });
  range(check, call.low, call.high);
}

void own_rules(Check* check, const SplitParts& call) {
  PartOrder order;
  check->require(read_order(call.order, &order), [&] {
    return "order: " + std::to_string(call.order) + ", expected 1 to " + std::to_string(kMostParts) + " digits 1 to 3";
  });
  if (check->wrong.empty()) repeats(check, "result", call.result, call.source, call.axis, order.count);
}

void own_rules(Check* check, const SumParts& call) {
  check->require(call.count <= kMostParts, [] { return "count: expected at most " + std::to_string(kMostParts); });
  repeats(check, "source", call.source, call.result, call.axis, call.count);
}

}  // namespace grouped
