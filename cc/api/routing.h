// The native calls of routing: which experts a token goes to, where its rows are, and how rows are gathered and
// summed. docs/numerics.md, "Routing", has the arithmetic.
//
// Letters: T tokens, E experts, k experts per token, S sequences, M rows sorted by expert, H columns, G groups (experts
// that have rows here). A slot is one of a token's k places, numbered token * k + place; an expert of -1 (or anything
// else outside of 0 ... E - 1) is none. Every index is checked where it is used, so no data leads out of bounds.
#pragma once

#include <string>

#include "cc/api/tensor.h"

namespace grouped {

// result = logits * (1 + eps * (2 u - 1)), u in [0, 1) the 24 upper bits of the element's word of the random stream.
// The gradient of the logits is the same call on the gradient of the result.
struct Jitter {
  static constexpr const char* kName = "jitter";
  TensorView logits;
  TensorView key;  // low word first
  TensorView result;
  float eps = 0;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("logits", logits, "[T, E] float32");
    v.input("key", key, "[2] uint32");
    v.output("result", result, "[T, E] float32");
    v.param("eps", eps);
  }
};

// result = a[t] * exp(logits[t, e]) * b[e], whose rows sum to 1 / T and whose columns nearly to 1 / E: `iterations` of
// scaling rows, then columns. Masked tokens take no part; their rows are zero.
struct Sinkhorn {
  static constexpr const char* kName = "sinkhorn";
  TensorView logits;
  TensorView mask;  // 0 for padding
  TensorView result;
  int64_t iterations = 0;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("logits", logits, "[T, E] float32");
    v.optional("mask", mask, "[T] uint8");
    v.output("result", result, "[T, E] float32");
    v.param("iterations", iterations);
  }
};

// How scores follow from logits and weights from scores.
struct ScoreParams {
  std::string score = "softmax";  // softmax, sigmoid, sqrt_softplus
  int64_t after_topk = 0;         // 1: weights are the softmax of the chosen logits
  int64_t normalize = 0;          // 1: weights are divided by their sum over the chosen experts
  float scale = 1;                // factor of the weights

  template <class Visitor>
  void visit(Visitor& v) {
    v.param("score", score);
    v.param("after_topk", after_topk);
    v.param("normalize", normalize);
    v.param("scale", scale);
  }
};

// The k experts of each token, best first, and their weights. Experts are ranked by `ranking`, or else by the score (by
// the logit with after_topk), plus the bias; ties go to the lower index, NaN ranks first. With topk_groups, only those
// of the best groups take part: experts are in num_groups groups of equal size, and a group's score is the sum of its
// group_topk best. `given` replaces the choice. Masked tokens have experts -1 and weights of zero.
struct Router {
  static constexpr const char* kName = "router";
  TensorView logits, bias;
  TensorView mask;   // 0 for padding
  TensorView given;  // experts chosen elsewhere
  TensorView ranking, weights, experts;
  ScoreParams scores;
  int64_t num_groups = 1;
  int64_t topk_groups = 1;
  int64_t group_topk = 1;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("logits", logits, "[T, E] float32");
    v.optional("bias", bias, "[E] float32");
    v.optional("mask", mask, "[T] uint8");
    v.optional("given", given, "[T, k] int32");
    v.optional("ranking", ranking, "[T, E] float32");
    v.output("weights", weights, "[T, k] float32");
    v.output("experts", experts, "[T, k] int32");
    scores.visit(v);
    v.param("num_groups", num_groups);
    v.param("topk_groups", topk_groups);
    v.param("group_topk", group_topk);
  }
};

// Sums over the tokens of each sequence, of which losses are made: of probs, the scores divided by their sum over all
// experts; of the slots that chose an expert in 0 ... E - 1; and of the squared logsumexp, the entropy of probs in nats
// and 1. Masked tokens and those past the sequences count nowhere, and their logits are not read.
struct RouterSums {
  static constexpr const char* kName = "router_sums";
  TensorView logits;
  TensorView experts;  // as the router gave them
  TensorView mask;     // 0 for padding
  TensorView sequence_sizes, prob_sums, counts, stat_sums;
  std::string score = "softmax";  // as of ScoreParams

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("logits", logits, "[T, E] float32");
    v.input("experts", experts, "[T, k] int32");
    v.optional("mask", mask, "[T] uint8");
    v.input("sequence_sizes", sequence_sizes, "[S] int32");
    v.output("prob_sums", prob_sums, "[S, E] float32");
    v.output("counts", counts, "[S, E] int32");
    v.output("stat_sums", stat_sums, "[S, 3] float32");
    v.param("score", score);
  }
};

// The gradient of the logits: of the weights (d_weights), of sum over e of slopes[s, e] * probs[t, e] times
// d_losses[0], s the sequence of token t, and of the squared logsumexp times z_slope[0] * d_losses[1]. Tokens past the
// sequences have no part of the latter two. Losses without coefficients, whose slopes are 0, add nothing, whatever the
// logits are: slopes that are 0 throughout a sequence, and a z_slope of 0.
struct RouterGrad {
  static constexpr const char* kName = "router_grad";
  TensorView logits;
  TensorView experts;  // as the router gave them
  TensorView mask;
  TensorView kept;  // negative where a slot was dropped, whose weight has no gradient then
  TensorView d_weights;
  TensorView sequence_sizes;  // present where the next three are
  TensorView slopes, z_slope, d_losses, result;
  ScoreParams scores;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("logits", logits, "[T, E] float32");
    v.input("experts", experts, "[T, k] int32");
    v.optional("mask", mask, "[T] uint8");
    v.optional("kept", kept, "[T, k] int32");
    v.optional("d_weights", d_weights, "[T, k] float32");
    v.optional("sequence_sizes", sequence_sizes, "[S] int32");
    v.optional("slopes", slopes, "[S, E] float32, with sequence_sizes");
    v.optional("z_slope", z_slope, "[1] float32, with sequence_sizes");
    v.optional("d_losses", d_losses, "[2] float32, with sequence_sizes");
    v.output("result", result, "[T, E] float32");
    scores.visit(v);
  }
};

// The gradient of logits of which weights are `scale` times the softmax over the chosen experts, by whatever rule the
// router found them: that of RouterGrad without losses, from the weights [T, k] and without the logits.
struct ChosenSoftmaxGrad {
  static constexpr const char* kName = "chosen_softmax_grad";
  TensorView weights;  // as the router gave them, before slots were dropped
  TensorView experts;  // likewise
  TensorView kept;     // negative where a slot was dropped, whose weight has no gradient then
  TensorView d_weights, result;
  float scale = 1;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("weights", weights, "[T, k] float32");
    v.input("experts", experts, "[T, k] int32");
    v.optional("kept", kept, "[T, k] int32");
    v.input("d_weights", d_weights, "[T, k] float32");
    v.output("result", result, "[T, E] float32");
    v.param("scale", scale);
  }
};

// Losses and what their gradients need. With P, C, Z, H, n the sums over a sequence of probs, counts, squared
// logsumexp, entropy and tokens, k = slots per token, R the number of sequences with tokens:
//   losses[0] = aux_coeff / R * sum over s of E / (k n_s^2) * sum over e of P_se C_se     losses[1] = z_coeff Z / n
//   losses[2] = H / n        slopes[s, e] = d losses[0] / d P_se        z_slope[0] = d losses[1] / d Z
// A loss whose coefficient is 0 is 0, whatever the sums are.
// Slots that were dropped pass through, 0 where they are absent, so that metrics need no launch of their own.
struct RouterLosses {
  static constexpr const char* kName = "router_losses";
  TensorView prob_sums, counts, stat_sums, dropped, losses, slopes, z_slope, lost;
  TensorView overflow;  // whether any slot was dropped
  int64_t slots = 1;    // k
  float aux_coeff = 0;
  float z_coeff = 0;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("prob_sums", prob_sums, "[S, E] float32");
    v.input("counts", counts, "[S, E] int32");
    v.input("stat_sums", stat_sums, "[S, 3] float32");
    v.optional("dropped", dropped, "[1] int32");
    v.output("losses", losses, "[3] float32");
    v.output("slopes", slopes, "[S, E] float32");
    v.output("z_slope", z_slope, "[1] float32");
    v.output("lost", lost, "[1] int32");
    v.output("overflow", overflow, "[1] uint8");
    v.param("slots", slots);
    v.param("aux_coeff", aux_coeff);
    v.param("z_coeff", z_coeff);
  }
};

// counts[s, e] = slots of sequence s that chose expert e; tokens past the sequences count nowhere.
struct CountExperts {
  static constexpr const char* kName = "count_experts";
  TensorView experts, sequence_sizes, counts;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("experts", experts, "[T, k] int32");
    v.input("sequence_sizes", sequence_sizes, "[S] int32");
    v.output("counts", counts, "[S, G] int32");
  }
};

// At most `capacity` slots per expert: those with the largest weights (ties: the lower slot; NaN is largest), or with
// by_weight = 0 the first ones. The others become -1 in `kept` and 0 in `kept_weights`; dropped[0] counts them.
struct DropSlots {
  static constexpr const char* kName = "drop_slots";
  TensorView experts, weights, kept, kept_weights, dropped;
  int64_t num_experts = 0;  // E
  int64_t capacity = 0;
  int64_t by_weight = 0;  // 1: the largest weights stay; 0: the first slots

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("experts", experts, "[T, k] int32");
    v.input("weights", weights, "[T, k] float32");
    v.output("kept", kept, "[T, k] int32");
    v.output("kept_weights", kept_weights, "[T, k] float32");
    v.output("dropped", dropped, "[1] int32");
    v.param("num_experts", num_experts);
    v.param("capacity", capacity);
    v.param("by_weight", by_weight);
  }
};

// Slots in rows, by expert, then token, then place. Each group is padded to a multiple of `align` rows, an empty one
// stays empty; slots that find no row among M are dropped, the last ones first.
struct SortSlots {
  static constexpr const char* kName = "sort_slots";
  TensorView experts;
  TensorView weights;      // present where row_weights are
  TensorView group_sizes;  // [G] int32, with padding
  TensorView source;       // slot of each row, -1 for padding and behind the last row
  TensorView inverse;      // row of each slot, -1 where it has none
  TensorView dropped;      // slots that have an expert and no row
  TensorView row_weights;  // weight of the slot in each row, 0 where there is none
  int64_t align = 1;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("experts", experts, "[T, k] int32");
    v.optional("weights", weights, "[T, k] float32");
    v.output("group_sizes", group_sizes, "[G] int32");
    v.output("source", source, "[M] int32");
    v.output("inverse", inverse, "[T, k] int32");
    v.output("dropped", dropped, "[1] int32");
    v.optional_output("row_weights", row_weights, "[M] float32, with weights");
    v.param("align", align);
  }
};

// The order of slots by expert, cut into what each rank of an exchange gets. Rank d owns E / P consecutive experts; its
// rows of the order, at most B of them, have places from d * B on, and those behind the first B are dropped. `places`
// has the place of each slot; `sent`, `experts` and `row_weights` tell what each place holds.
struct SendOrder {
  static constexpr const char* kName = "send_order";
  TensorView group_sizes;  // [E] int32, without padding
  TensorView source;       // slot of each row, by expert
  TensorView inverse;      // row of each slot, -1 where it has none
  TensorView weights;      // present where row_weights are
  TensorView kept_sizes;   // rows of each expert that have a place
  TensorView sent;         // slot in each place, -1 where there is none
  TensorView experts;      // its expert, counted from the first of the rank, -1 where there is none
  TensorView places;       // place of each slot, -1 where it has none
  TensorView dropped;      // slots that have a row and no place
  TensorView row_weights;  // weight of the slot in each place, 0 where there is none
  int64_t ranks = 1;       // P

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("group_sizes", group_sizes, "[G] int32");
    v.input("source", source, "[M] int32");
    v.input("inverse", inverse, "[T, k] int32");
    v.optional("weights", weights, "[T, k] float32");
    v.output("kept_sizes", kept_sizes, "[G] int32");
    v.output("sent", sent, "[P] int32");
    v.output("experts", experts, "[P] int32");
    v.output("places", places, "[T, k] int32");
    v.output("dropped", dropped, "[1] int32");
    v.optional_output("row_weights", row_weights, "[P] float32, with weights");
    v.param("ranks", ranks);
  }
};

// Of slots that may share a row: the rank of the slot's expert, of P ranks that own E / P consecutive experts each,
// where no slot of the token in front of it has that rank, else -1; -1 too where a slot has no expert.
struct RankSlots {
  static constexpr const char* kName = "rank_slots";
  TensorView experts, slot_ranks;
  int64_t num_experts = 0;  // E
  int64_t ranks = 1;        // P

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("experts", experts, "[T, k] int32");
    v.output("slot_ranks", slot_ranks, "[T, k] int32");
    v.param("num_experts", num_experts);
    v.param("ranks", ranks);
  }
};

// What a token that is sent to a rank once says there. Of the token whose slot is in a place of rank d
// (`send_order` of `rank_slots`): its experts on rank d, counted from the first one of the rank, in the order of slots,
// and -1 behind them; at most j. A slot whose token has no place with its rank, or that is not among the first j there,
// is dropped.
struct RowSlots {
  static constexpr const char* kName = "row_slots";
  TensorView experts;      // of all ranks
  TensorView sent;         // slot in each place, any outside of 0 ... T k - 1 for none
  TensorView places;       // place of each slot that is the first one of its token on a rank
  TensorView weights;      // present where row_weights are
  TensorView local;        // experts of each place
  TensorView inverse;      // entry of each slot among the P j of `local`, -1 where it has none
  TensorView dropped;      // slots that have an expert and no entry
  TensorView row_weights;  // weight of each entry, 0 where there is none
  int64_t num_experts = 0;
  int64_t ranks = 1;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("experts", experts, "[T, k] int32");
    v.input("sent", sent, "[P] int32");
    v.input("places", places, "[T, k] int32");
    v.optional("weights", weights, "[T, k] float32");
    v.output("local", local, "[P, j] int32");
    v.output("inverse", inverse, "[T, k] int32");
    v.output("dropped", dropped, "[1] int32");
    v.optional_output("row_weights", row_weights, "[P, j] float32, with weights");
    v.param("num_experts", num_experts);
    v.param("ranks", ranks);
  }
};

// Where rows are once each group is padded to a multiple of `align` rows (an empty one stays empty): padded sizes, the
// row that each padded row holds, -1 for padding, and the place of each row, -1 for rows past the groups.
struct PadGroups {
  static constexpr const char* kName = "pad_groups";
  TensorView group_sizes, padded_sizes;
  TensorView source;  // P is at least M + G (align - 1)
  TensorView inverse;
  int64_t align = 1;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("group_sizes", group_sizes, "[G] int32");
    v.output("padded_sizes", padded_sizes, "[G] int32");
    v.output("source", source, "[P] int32");
    v.output("inverse", inverse, "[M] int32");
    v.param("align", align);
  }
};

// result[r] = rows[source[r] / slots], zeros where source[r] is outside of 0 ... N * slots - 1. With weights it is
// multiplied by weights[source[r]], in fp32 with one rounding; without, elements of any type are copied. Rows may be
// single elements [N], and the source a matrix; the result has the axes of the source, then those of a row. With axis =
// 1 columns are gathered: result[:, r] = rows[:, source[r] / slots], from rows [C, N] by a source [M]. `places`, where
// no slot comes twice: the row of each slot, any outside of 0 ... M - 1 for none. It says nothing that the source does
// not say, so kernels may read either.
struct GatherRows {
  static constexpr const char* kName = "gather_rows";
  TensorView rows;
  TensorView source;
  TensorView weights;
  TensorView places;  // [N, slots]
  TensorView result;  // [M, H], [M], [T, k, H] or [T, k], the type of rows
  int64_t slots = 1;  // rows of the result that may come from one row
  int64_t axis = 0;   // 1: columns in place of rows

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("rows", rows, "[?, ?] | [?] any");
    v.input("source", source, "[M] | [T, k] int32");
    v.optional("weights", weights, "[?, ?] float32");
    v.optional("places", places, "[?, ?] int32");
    v.output("result", result, "[?] | [?, ?] | [?, ?, ?] as rows");
    v.param("slots", slots);
    v.param("axis", axis);
  }
};

// result[t] = sum over places j of weights[t, j] * rows[inverse[t, j]], j rising, in fp32: a product and a sum per
// place, each rounded, and one rounding to the result's type. Places whose index is outside of 0 ... M - 1 add nothing.
struct CombineRows {
  static constexpr const char* kName = "combine_rows";
  TensorView rows, inverse;
  TensorView weights;  // absent: 1
  TensorView into;     // the caller's buffer, the same memory as `result`
  TensorView result;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("rows", rows, "[M, H] plain");
    v.input("inverse", inverse, "[T, k] int32");
    v.optional("weights", weights, "[T, k] float32");
    v.optional("into", into, "as result");
    v.output("result", result, "[T, H] plain");
  }
};

// result[t, j] = <rows[inverse[t, j]], grad[t]>, one fp32 sum in a fixed order; 0 where the index is out of range.
struct CombineDot {
  static constexpr const char* kName = "combine_dot";
  TensorView rows, grad, inverse, result;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("rows", rows, "[M, H] plain");
    v.input("grad", grad, "[T, H] plain");
    v.input("inverse", inverse, "[T, k] int32");
    v.output("result", result, "[T, k] float32");
  }
};

// k distinct experts per token from its id: the rows of `table`, or random draws without replacement that depend on the
// id alone. An id outside of the table has experts -1.
struct HashExperts {
  static constexpr const char* kName = "hash_experts";
  TensorView token_ids, table, experts;
  int64_t num_experts = 0;  // E

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("token_ids", token_ids, "[T] int32");
    v.optional("table", table, "[V, k] int32");
    v.output("experts", experts, "[T, k] int32");
    v.param("num_experts", num_experts);
  }
};

// result[e] = bias[e] + rate * sign(mean of load - load[e]); the sign is found in integers.
struct BiasUpdate {
  static constexpr const char* kName = "bias_update";
  TensorView bias, load, result;
  float rate = 0;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("bias", bias, "[G] float32");
    v.input("load", load, "[G] int32");
    v.output("result", result, "[G] float32");
    v.param("rate", rate);
  }
};

// counts[e, i] = tokens whose margin alpha_t - score_te is in bin i of [low, high), margins outside in the first and
// the last bin; alpha_t is the (k + 1)-th largest of score + bias. Masked tokens and NaN margins count nowhere.
struct MarginHistogram {
  static constexpr const char* kName = "margin_histogram";
  TensorView logits, bias, mask, counts;
  int64_t slots = 1;              // k
  std::string score = "sigmoid";  // as of ScoreParams
  float low = 0;
  float high = 0;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("logits", logits, "[T, E] float32");
    v.input("bias", bias, "[E] float32");
    v.optional("mask", mask, "[T] uint8");
    v.output("counts", counts, "[E, bins] int32");
    v.param("slots", slots);
    v.param("score", score);
    v.param("low", low);
    v.param("high", high);
  }
};

// result[e] = q[e] - mean of q, q[e] the upper edge of the first bin at which the counts of expert e, summed from the
// first bin on, reach k / E of all its counts; 0 for an expert without counts.
struct QuantileBias {
  static constexpr const char* kName = "quantile_bias";
  TensorView counts, result;
  int64_t slots = 1;  // k
  float low = 0;
  float high = 0;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("counts", counts, "[G, bins] int32");
    v.output("result", result, "[G] float32");
    v.param("slots", slots);
    v.param("low", low);
    v.param("high", high);
  }
};

// The bfloat16 parts of `source` (cc/math/parts.h) side by side along `axis`: place p holds the part that digit p of
// `order` names, 1 for the largest. Products of parts add up to products of float32.
struct SplitParts {
  static constexpr const char* kName = "split_parts";
  TensorView source;  // float32, of any rank
  TensorView result;  // bfloat16, `axis` as often as there are digits
  int64_t axis = 0;
  int64_t order = 123;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("source", source, "[...] float32");
    v.output("result", result, "[...] bfloat16");
    v.param("axis", axis);
    v.param("order", order);
  }
};

// The sum of `count` equal parts of `source` along `axis`, from the last part to the first.
struct SumParts {
  static constexpr const char* kName = "sum_parts";
  TensorView source;  // float32, of any rank
  TensorView result;  // float32
  int64_t axis = 0;
  int64_t count = 1;

  template <class Visitor>
  void visit(Visitor&& v) {
    v.input("source", source, "[...] float32");
    v.output("result", result, "[...] float32");
    v.param("axis", axis);
    v.param("count", count);
  }
};

#define GROUPED_ROUTING_CALLS(X) \
  X(Jitter)                      \
  X(Sinkhorn)                    \
  X(Router)                      \
  X(RouterSums)                  \
  X(RouterGrad)                  \
  X(ChosenSoftmaxGrad)           \
  X(RouterLosses)                \
  X(CountExperts)                \
  X(DropSlots)                   \
  X(SortSlots)                   \
  X(SendOrder)                   \
  X(RankSlots)                   \
  X(RowSlots)                    \
  X(PadGroups)                   \
  X(GatherRows)                  \
  X(CombineRows)                 \
  X(CombineDot)                  \
  X(HashExperts)                 \
  X(BiasUpdate)                  \
  X(MarginHistogram)             \
  X(QuantileBias) X(SplitParts) X(SumParts)

}  // namespace grouped
