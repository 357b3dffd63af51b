// Shapes of the calls of routing (cc/api/routing.h).
#include "cc/dispatch/shape_check.h"
#include "cc/dispatch/shapes.h"
#include "cc/math/parts.h"

namespace grouped {
namespace {

constexpr int64_t kMostExperts = 1024;  // of one router: the kernels hold a token's scores in registers
constexpr int64_t kMostSlots = 32;      // experts per token

void floats(Check* check, const char* name, const TensorView& t, Dims wanted) {
  check->shape(name, t, wanted);
  check->dtype(name, t, DType::f32);
}
void floats_if_given(Check* check, const char* name, const TensorView& t, Dims wanted) {
  if (t.present()) floats(check, name, t, wanted);
}
void integers(Check* check, const char* name, const TensorView& t, Dims wanted) {
  check->shape(name, t, wanted);
  check->dtype(name, t, DType::i32);
}
void mask_if_given(Check* check, const TensorView& mask, int64_t tokens) {
  check->shape_if_given("mask", mask, {tokens});
  check->dtype("mask", mask, DType::u8);
}

void at_most(Check* check, const char* name, const TensorView& t, int axis, int64_t most, const char* what) {
  check->require(t.dims[axis] >= 1 && t.dims[axis] <= most,
                 [&] { return Check::named(name, t) + ", expected 1 to " + std::to_string(most) + " " + what; });
}

// Logits [T, E]; T may be 0.
void logits(Check* check, const TensorView& t) {
  check->rank("logits", t, 2);
  check->dtype("logits", t, DType::f32);
  if (check->wrong.empty()) at_most(check, "logits", t, 1, kMostExperts, "experts");
}

// Slots [T, k] of `tokens`, or of as many as there are.
void slots(Check* check, const char* name, const TensorView& t, int64_t tokens = -1) {
  check->rank(name, t, 2);
  check->dtype(name, t, DType::i32);
  check->not_empty(name, t, 1);
  check->require(tokens < 0 || t.dims[0] == tokens,
                 [&] { return Check::named(name, t) + ", expected " + std::to_string(tokens) + " tokens"; });
  check->require(t.elements() <= INT32_MAX, [&] { return Check::named(name, t) + ", expected fewer than 2^31 slots"; });
}

void chosen(Check* check, const char* name, const TensorView& t, const TensorView& logits) {
  slots(check, name, t, logits.dims[0]);
  at_most(check, name, t, 1, std::min(kMostSlots, logits.dims[1]), "slots per token");
}

void score(Check* check, const ScoreParams& s) {
  check->require(!s.after_topk || s.score == "softmax", [] { return "after_topk: expected only with softmax"; });
}

// Rows of one or more columns, few enough to be numbered with 32 bits.
void rows(Check* check, const char* name, const TensorView& t) {
  check->rank(name, t, 2);
  check->not_empty(name, t, 1);
  check->require(t.dims[0] <= INT32_MAX, [&] { return Check::named(name, t) + ", expected fewer than 2^31 rows"; });
}

void wide(Check* check, const char* name, const TensorView& t) {
  check->require(is_plain(t.dtype), [&] { return Check::named(name, t) + ", expected float32, bfloat16 or float16"; });
}

// `whole` is `part` repeated `count` times along `axis`.
void repeats(Check* check, const char* name, const TensorView& whole, const TensorView& part, int64_t axis,
             int64_t count) {
  check->not_empty(name, part, 1);
  check->require(part.rank >= 1 && axis < part.rank,
                 [&] { return "axis: expected below " + std::to_string(part.rank); });
  bool same = whole.rank == part.rank;
  for (int i = 0; same && i < part.rank; ++i) same = whole.dims[i] == part.dims[i] * (i == axis ? count : 1);
  check->require(same, [&] {
    return Check::named(name, whole) + ", expected that of " + describe(part) + " with axis " + std::to_string(axis) +
           " times " + std::to_string(count);
  });
}

void range(Check* check, float low, float high) {
  check->require(low < high, [] { return "low, high: expected low < high"; });
}

}  // namespace

std::string disagreement(const Jitter& call) {
  Check check;
  logits(&check, call.logits);
  if (!check.wrong.empty()) return check.wrong;
  check.shape("key", call.key, {2});
  check.dtype("key", call.key, DType::u32);
  floats(&check, "result", call.result, {call.logits.dims[0], call.logits.dims[1]});
  return check.wrong;
}

std::string disagreement(const Sinkhorn& call) {
  Check check;
  logits(&check, call.logits);
  if (!check.wrong.empty()) return check.wrong;
  mask_if_given(&check, call.mask, call.logits.dims[0]);
  floats(&check, "result", call.result, {call.logits.dims[0], call.logits.dims[1]});
  return check.wrong;
}

std::string disagreement(const Router& call) {
  Check check;
  logits(&check, call.logits);
  if (!check.wrong.empty()) return check.wrong;
  const int64_t tokens = call.logits.dims[0], experts = call.logits.dims[1];
  chosen(&check, "experts", call.experts, call.logits);
  if (!check.wrong.empty()) return check.wrong;
  const int64_t k = call.experts.dims[1];
  floats_if_given(&check, "bias", call.bias, {experts});
  mask_if_given(&check, call.mask, tokens);
  if (call.given.present()) integers(&check, "given", call.given, {tokens, k});
  floats_if_given(&check, "ranking", call.ranking, {tokens, experts});
  floats(&check, "weights", call.weights, {tokens, k});
  score(&check, call.scores);
  const int64_t parts = call.num_groups;
  check.require(parts <= experts && experts % parts == 0 && call.topk_groups <= parts, [&] {
    return "num_groups, topk_groups: expected a divisor of " + std::to_string(experts) + " experts and at most that";
  });
  if (!check.wrong.empty()) return check.wrong;
  check.require(call.group_topk <= experts / parts && call.topk_groups * (experts / parts) >= k, [] {
    return "group_topk, topk_groups: expected at most the experts of a group, and k experts in the groups that are "
           "kept";
  });
  return check.wrong;
}

std::string disagreement(const RouterSums& call) {
  Check check;
  logits(&check, call.logits);
  if (!check.wrong.empty()) return check.wrong;
  chosen(&check, "experts", call.experts, call.logits);
  const int64_t sequences = groups_of(&check, call.sequence_sizes, "sequence_sizes");
  if (!check.wrong.empty()) return check.wrong;
  const int64_t experts = call.logits.dims[1];
  mask_if_given(&check, call.mask, call.logits.dims[0]);
  floats(&check, "prob_sums", call.prob_sums, {sequences, experts});
  integers(&check, "counts", call.counts, {sequences, experts});
  floats(&check, "stat_sums", call.stat_sums, {sequences, 3});
  return check.wrong;
}

std::string disagreement(const RouterGrad& call) {
  Check check;
  logits(&check, call.logits);
  if (!check.wrong.empty()) return check.wrong;
  const int64_t tokens = call.logits.dims[0], experts = call.logits.dims[1];
  chosen(&check, "experts", call.experts, call.logits);
  if (!check.wrong.empty()) return check.wrong;
  mask_if_given(&check, call.mask, tokens);
  if (call.kept.present()) integers(&check, "kept", call.kept, {tokens, call.experts.dims[1]});
  floats_if_given(&check, "d_weights", call.d_weights, {tokens, call.experts.dims[1]});
  const bool losses = call.sequence_sizes.present();
  for (const TensorView* t : {&call.slopes, &call.z_slope, &call.d_losses}) {
    check.require(t->present() == losses,
                  [] { return "losses: expected sequence_sizes, slopes, z_slope and d_losses together"; });
  }
  check.require(losses || call.d_weights.present(), [] { return "gradients: expected d_weights or those of losses"; });
  if (losses && check.wrong.empty()) {
    const int64_t sequences = groups_of(&check, call.sequence_sizes, "sequence_sizes");
    floats(&check, "slopes", call.slopes, {sequences, experts});
    floats(&check, "z_slope", call.z_slope, {1});
    floats(&check, "d_losses", call.d_losses, {2});
  }
  floats(&check, "result", call.result, {tokens, experts});
  score(&check, call.scores);
  return check.wrong;
}

std::string disagreement(const RouterLosses& call) {
  Check check;
  check.rank("prob_sums", call.prob_sums, 2);
  if (!check.wrong.empty()) return check.wrong;
  const int64_t sequences = call.prob_sums.dims[0], experts = call.prob_sums.dims[1];
  some_groups(&check, "prob_sums", call.prob_sums);
  at_most(&check, "prob_sums", call.prob_sums, 1, kMostExperts, "experts");
  floats(&check, "prob_sums", call.prob_sums, {sequences, experts});
  integers(&check, "counts", call.counts, {sequences, experts});
  floats(&check, "stat_sums", call.stat_sums, {sequences, 3});
  floats(&check, "losses", call.losses, {3});
  floats(&check, "slopes", call.slopes, {sequences, experts});
  floats(&check, "z_slope", call.z_slope, {1});
  if (call.dropped.present()) integers(&check, "dropped", call.dropped, {1});
  integers(&check, "lost", call.lost, {1});
  check.shape("overflow", call.overflow, {1});
  check.dtype("overflow", call.overflow, DType::u8);
  return check.wrong;
}

std::string disagreement(const CountExperts& call) {
  Check check;
  slots(&check, "experts", call.experts);
  const int64_t sequences = groups_of(&check, call.sequence_sizes, "sequence_sizes");
  check.rank("counts", call.counts, 2);
  if (!check.wrong.empty()) return check.wrong;
  some_groups(&check, "counts", call.counts, 1);
  integers(&check, "counts", call.counts, {sequences, call.counts.dims[1]});
  return check.wrong;
}

std::string disagreement(const DropSlots& call) {
  Check check;
  slots(&check, "experts", call.experts);
  if (!check.wrong.empty()) return check.wrong;
  floats(&check, "weights", call.weights, {call.experts.dims[0], call.experts.dims[1]});
  integers(&check, "kept", call.kept, {call.experts.dims[0], call.experts.dims[1]});
  floats(&check, "kept_weights", call.kept_weights, {call.experts.dims[0], call.experts.dims[1]});
  integers(&check, "dropped", call.dropped, {1});
  check.require(call.num_experts <= kMostGroups,
                [] { return "num_experts: expected 1 to " + std::to_string(kMostGroups); });
  return check.wrong;
}

std::string disagreement(const SortSlots& call) {
  Check check;
  slots(&check, "experts", call.experts);
  groups_of(&check, call.group_sizes);
  check.rank("source", call.source, 1);
  check.dtype("source", call.source, DType::i32);
  if (!check.wrong.empty()) return check.wrong;
  check.require(call.source.dims[0] <= INT32_MAX,
                [&] { return Check::named("source", call.source) + ", expected fewer than 2^31 rows"; });
  integers(&check, "inverse", call.inverse, {call.experts.dims[0], call.experts.dims[1]});
  integers(&check, "dropped", call.dropped, {1});
  floats_if_given(&check, "weights", call.weights, {call.experts.dims[0], call.experts.dims[1]});
  floats_if_given(&check, "row_weights", call.row_weights, {call.source.dims[0]});
  check.require(call.weights.present() == call.row_weights.present(),
                [] { return "row_weights: expected them if and only if there are weights"; });
  return check.wrong;
}

std::string disagreement(const SendOrder& call) {
  Check check;
  const int64_t experts = groups_of(&check, call.group_sizes);
  check.rank("source", call.source, 1);
  check.dtype("source", call.source, DType::i32);
  slots(&check, "inverse", call.inverse);
  check.rank("sent", call.sent, 1);
  check.dtype("sent", call.sent, DType::i32);
  if (!check.wrong.empty()) return check.wrong;
  const int64_t places = call.sent.dims[0];
  check.require(call.source.dims[0] <= INT32_MAX && places <= INT32_MAX,
                [] { return "source, sent: expected fewer than 2^31 rows and places"; });
  check.require(call.ranks >= 1 && experts % call.ranks == 0 && places % call.ranks == 0, [&] {
    return Check::named("sent", call.sent) + ", ranks " + std::to_string(call.ranks) +
           ": expected ranks that divide experts and places";
  });
  floats_if_given(&check, "weights", call.weights, {call.inverse.dims[0], call.inverse.dims[1]});
  integers(&check, "kept_sizes", call.kept_sizes, {experts});
  integers(&check, "experts", call.experts, {places});
  integers(&check, "places", call.places, {call.inverse.dims[0], call.inverse.dims[1]});
  integers(&check, "dropped", call.dropped, {1});
  floats_if_given(&check, "row_weights", call.row_weights, {places});
  check.require(call.weights.present() == call.row_weights.present(),
                [] { return "row_weights: expected them if and only if there are weights"; });
  return check.wrong;
}

std::string disagreement(const PadGroups& call) {
  Check check;
  const int64_t groups = groups_of(&check, call.group_sizes);
  integers(&check, "padded_sizes", call.padded_sizes, {groups});
  check.rank("source", call.source, 1);
  check.dtype("source", call.source, DType::i32);
  check.rank("inverse", call.inverse, 1);
  check.dtype("inverse", call.inverse, DType::i32);
  if (!check.wrong.empty()) return check.wrong;
  const int64_t least = call.inverse.dims[0] + groups * (call.align - 1);
  check.require(call.source.dims[0] >= least && call.source.dims[0] <= INT32_MAX, [&] {
    return Check::named("source", call.source) + ", expected at least " + std::to_string(least) +
           " rows, and fewer than 2^31";
  });
  return check.wrong;
}

std::string disagreement(const GatherRows& call) {
  Check check;
  const TensorView &from = call.rows, &source = call.source;
  check.require(from.rank == 1 || from.rank == 2,
                [&] { return Check::named("rows", from) + ", expected rank 1 or 2"; });
  check.require(source.rank == 1 || source.rank == 2,
                [&] { return Check::named("source", source) + ", expected rank 1 or 2"; });
  check.dtype("source", source, DType::i32);
  check.require(call.axis <= 1, [] { return "axis: expected 0 or 1"; });
  const bool columns = call.axis == 1;
  if (!columns) check.not_empty("rows", from, 1);
  check.not_empty("source", source, 1);
  if (!check.wrong.empty()) return check.wrong;
  check.require(!columns || (from.rank == 2 && source.rank == 1 && !call.weights.present()),
                [] { return "axis: expected 0 but for a matrix, a source [M] and no weights"; });
  check.require(!columns || from.dims[0] > 0,
                [&] { return Check::named("rows", from) + ", expected no empty axis but that of gathered columns"; });
  check.require(from.dims[columns ? 1 : 0] <= INT32_MAX / call.slots && source.elements() <= INT32_MAX,
                [] { return "rows, source: expected fewer than 2^31 slots and rows"; });
  if (call.weights.present()) wide(&check, "rows", from);
  floats_if_given(&check, "weights", call.weights, {from.dims[0], call.slots});
  int64_t dims[3] = {columns ? from.dims[0] : source.dims[0]};
  int rank = 1;
  if (columns) dims[rank++] = source.dims[0];
  if (source.rank == 2) dims[rank++] = source.dims[1];
  if (from.rank == 2 && !columns) dims[rank++] = from.dims[1];
  bool same = call.result.rank == rank;
  for (int i = 0; same && i < rank; ++i) same = call.result.dims[i] == dims[i];
  check.require(same, [&] {
    return Check::named("result", call.result) + ", expected the axes of the source, then those of a row";
  });
  check.dtype("result", call.result, from.dtype);
  return check.wrong;
}

std::string disagreement(const CombineRows& call) {
  Check check;
  rows(&check, "rows", call.rows);
  slots(&check, "inverse", call.inverse);
  if (!check.wrong.empty()) return check.wrong;
  wide(&check, "rows", call.rows);
  wide(&check, "result", call.result);
  floats_if_given(&check, "weights", call.weights, {call.inverse.dims[0], call.inverse.dims[1]});
  check.shape("result", call.result, {call.inverse.dims[0], call.rows.dims[1]});
  same_buffer(&check, "into", call.into, call.result);
  return check.wrong;
}

std::string disagreement(const CombineDot& call) {
  Check check;
  rows(&check, "rows", call.rows);
  slots(&check, "inverse", call.inverse);
  if (!check.wrong.empty()) return check.wrong;
  wide(&check, "rows", call.rows);
  wide(&check, "grad", call.grad);
  check.shape("grad", call.grad, {call.inverse.dims[0], call.rows.dims[1]});
  floats(&check, "result", call.result, {call.inverse.dims[0], call.inverse.dims[1]});
  return check.wrong;
}

std::string disagreement(const HashExperts& call) {
  Check check;
  slots(&check, "experts", call.experts);
  if (!check.wrong.empty()) return check.wrong;
  const int64_t k = call.experts.dims[1];
  integers(&check, "token_ids", call.token_ids, {call.experts.dims[0]});
  if (call.table.present()) {
    check.rank("table", call.table, 2);
    if (check.wrong.empty()) at_most(&check, "table", call.table, 0, INT32_MAX, "rows");
    integers(&check, "table", call.table, {call.table.dims[0], k});
  }
  check.require(call.num_experts <= kMostGroups && k <= kMostSlots && k <= call.num_experts, [&] {
    return "num_experts: expected k = " + std::to_string(k) + " to " + std::to_string(kMostGroups) +
           ", and k at most " + std::to_string(kMostSlots);
  });
  return check.wrong;
}

std::string disagreement(const BiasUpdate& call) {
  Check check;
  check.rank("bias", call.bias, 1);
  if (!check.wrong.empty()) return check.wrong;
  some_groups(&check, "bias", call.bias);
  floats(&check, "bias", call.bias, {call.bias.dims[0]});
  integers(&check, "load", call.load, {call.bias.dims[0]});
  floats(&check, "result", call.result, {call.bias.dims[0]});
  return check.wrong;
}

std::string disagreement(const MarginHistogram& call) {
  Check check;
  logits(&check, call.logits);
  check.rank("counts", call.counts, 2);
  if (!check.wrong.empty()) return check.wrong;
  const int64_t tokens = call.logits.dims[0], experts = call.logits.dims[1];
  floats(&check, "bias", call.bias, {experts});
  mask_if_given(&check, call.mask, tokens);
  check.require(call.slots < experts && call.slots < kMostSlots, [&] {
    return "slots: " + std::to_string(call.slots) + ", expected fewer than " + std::to_string(experts) +
           " experts, and fewer than " + std::to_string(kMostSlots);
  });
  at_most(&check, "counts", call.counts, 1, 65536, "bins");
  integers(&check, "counts", call.counts, {experts, call.counts.dims[1]});
  range(&check, call.low, call.high);
  return check.wrong;
}

std::string disagreement(const QuantileBias& call) {
  Check check;
  check.rank("counts", call.counts, 2);
  if (!check.wrong.empty()) return check.wrong;
  some_groups(&check, "counts", call.counts);
  at_most(&check, "counts", call.counts, 1, 65536, "bins");
  integers(&check, "counts", call.counts, {call.counts.dims[0], call.counts.dims[1]});
  floats(&check, "result", call.result, {call.counts.dims[0]});
  range(&check, call.low, call.high);
  return check.wrong;
}

std::string disagreement(const SplitParts& call) {
  Check check;
  PartOrder order;
  check.require(read_order(call.order, &order), [&] {
    return "order: " + std::to_string(call.order) + ", expected 1 to " + std::to_string(kMostParts) + " digits 1 to 3";
  });
  check.dtype("source", call.source, DType::f32);
  check.dtype("result", call.result, DType::bf16);
  if (check.wrong.empty()) repeats(&check, "result", call.result, call.source, call.axis, order.count);
  return check.wrong;
}

std::string disagreement(const SumParts& call) {
  Check check;
  check.dtype("source", call.source, DType::f32);
  check.dtype("result", call.result, DType::f32);
  check.require(call.count <= kMostParts, [] { return "count: expected at most " + std::to_string(kMostParts); });
  if (check.wrong.empty()) repeats(&check, "source", call.source, call.result, call.axis, call.count);
  return check.wrong;
}

}  // namespace grouped
