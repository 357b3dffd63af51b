"""Native calls of routing: choosing experts, ordering slots, gathering and summing rows (cc/api/routing.h).

Letters: T tokens, E experts, k experts per token, S sequences, M rows, H columns, G groups. A slot is one of a token's
k places, numbered token * k + place; the expert -1 means none.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from grouped_core.calls import ArraySpec, Call, Given, new_call
from grouped_core.schema import Param

SCORES = ("softmax", "sigmoid", "sqrt_softplus")
"""What scores may be made of logits."""
MAX_EXPERTS = 1024
"""Experts of one router: a warp holds a token's scores in registers."""
MAX_SLOTS = 32
"""Experts per token; `margin_histogram` takes fewer, because it ranks one score more than it has slots."""
MAX_BINS = 65536
"""Bins of a histogram of margins."""


class Scores(NamedTuple):
    """How scores follow from logits and weights from scores.

    Attributes:
        score: "softmax", "sigmoid" or "sqrt_softplus". after_topk: weights are the softmax of the chosen logits.
        normalize: weights are divided by their sum over the chosen experts. scale: factor of the weights.
    """

    score: str = "softmax"
    after_topk: bool = False
    normalize: bool = False
    scale: float = 1.0

    def params(self) -> dict[str, Param]:
        """The parameters of native calls."""
        flags = {"after_topk": int(self.after_topk), "normalize": int(self.normalize)}
        return {"score": self.score, **flags, "scale": float(self.scale)}


class GroupLimit(NamedTuple):
    """Choice among the experts of the best groups: `topk_groups` of the `num_groups` groups take part; a group's score
    is the sum of its `group_topk` best scores.
    """

    num_groups: int = 1
    topk_groups: int = 1
    group_topk: int = 1


@lru_cache(maxsize=1024)
def jitter(logits: ArraySpec, eps: float) -> Call:
    """[T, E] = logits times random factors of 1 - eps to 1 + eps; the gradient is the same call."""
    return new_call("jitter", {"logits": logits, "key": True}, params={"eps": float(eps)})


@lru_cache(maxsize=1024)
def split_parts(source: ArraySpec, axis: int, order: str) -> Call:
    """bf16 parts of a float32 array side by side along `axis`: digit p of `order`, "1" to "3", names the part that
    place p holds, "1" the largest.
    """
    shape = source.shape
    result = ArraySpec((*shape[:axis], shape[axis] * len(order), *shape[axis + 1 :]), "bfloat16")
    return new_call("split_parts", {"source": source}, result, {"axis": axis, "order": int(order)})


@lru_cache(maxsize=1024)
def sum_parts(source: ArraySpec, axis: int, count: int) -> Call:
    """The sum of `count` equal parts of a float32 array along `axis`, from the last one to the first."""
    shape = source.shape
    result = ArraySpec((*shape[:axis], shape[axis] // count, *shape[axis + 1 :]), "float32")
    return new_call("sum_parts", {"source": source}, result, {"axis": axis, "count": count})


@lru_cache(maxsize=1024)
def sinkhorn(logits: ArraySpec, iterations: int, mask: ArraySpec | None = None) -> Call:
    """[T, E] = exp(logits) with rows and columns scaled in turns, so that experts get equal shares."""
    return new_call("sinkhorn", {"logits": logits, "mask": mask}, params={"iterations": iterations})


@lru_cache(maxsize=1024)
def router(
    logits: ArraySpec,
    k: int,
    scores: Scores,
    limit: GroupLimit,
    *,
    bias: ArraySpec | None = None,
    mask: ArraySpec | None = None,
    given: ArraySpec | None = None,
    ranking: ArraySpec | None = None,
) -> Call:
    """Weights and experts [T, k] of each token."""
    operands = {"logits": logits, "bias": bias, "mask": mask, "given": given, "ranking": ranking}
    return new_call("router", operands, params=scores.params() | limit._asdict(), lengths={"k": k})


@lru_cache(maxsize=1024)
def router_sums(
    logits: ArraySpec, experts: ArraySpec, sequence_sizes: ArraySpec, score: str, mask: ArraySpec | None = None
) -> Call:
    """Sums over the tokens of each sequence: normalised scores [S, E], slots [S, E], and squared logsumexp, entropy and
    the number of tokens [S, 3].
    """
    operands = {"logits": logits, "experts": experts, "mask": mask, "sequence_sizes": sequence_sizes}
    return new_call("router_sums", operands, params={"score": score})


@lru_cache(maxsize=1024)
def router_grad(
    logits: ArraySpec,
    k: int,
    scores: Scores,
    *,
    mask: ArraySpec | None = None,
    kept: ArraySpec | None = None,
    weights: bool = True,
    sequence_sizes: ArraySpec | None = None,
) -> Call:
    """[T, E]: the gradient of the logits, of the weights and, with sequences, of the losses."""
    operands: dict[str, Given] = {
        "logits": logits,
        "experts": True,
        "mask": mask,
        "kept": kept,
        "d_weights": weights,
        "sequence_sizes": sequence_sizes,
        **dict.fromkeys(("slopes", "z_slope", "d_losses"), sequence_sizes is not None),
    }
    return new_call("router_grad", operands, params=scores.params(), lengths={"k": k})


@lru_cache(maxsize=1024)
def chosen_softmax_grad(weights: ArraySpec, experts: int, scale: float, kept: ArraySpec | None = None) -> Call:
    """[T, E]: the gradient of the logits, of weights [T, k] that are `scale` times the softmax over chosen experts."""
    operands: dict[str, Given] = {"weights": weights, "experts": True, "kept": kept, "d_weights": True}
    return new_call("chosen_softmax_grad", operands, params={"scale": float(scale)}, lengths={"E": experts})


@lru_cache(maxsize=1024)
def router_losses(prob_sums: ArraySpec, slots: int, aux_coeff: float, z_coeff: float, *, dropped: bool = False) -> Call:
    """Losses [3] (auxiliary, z, entropy), slopes [S, E] and z_slope [1] from sums over sequences; and how many slots
    were dropped, int32 [1], 0 without `dropped`, and whether any was, uint8 [1].
    """
    operands = {"prob_sums": prob_sums, "counts": True, "stat_sums": True, "dropped": dropped}
    params: dict[str, Param] = {"slots": slots, "aux_coeff": float(aux_coeff), "z_coeff": float(z_coeff)}
    return new_call("router_losses", operands, params=params)


@lru_cache(maxsize=1024)
def count_experts(experts: ArraySpec, sequence_sizes: ArraySpec, num_experts: int) -> Call:
    """[S, E]: slots per sequence and expert."""
    operands = {"experts": experts, "sequence_sizes": sequence_sizes}
    return new_call("count_experts", operands, lengths={"G": num_experts})


@lru_cache(maxsize=1024)
def drop_slots(experts: ArraySpec, num_experts: int, capacity: int, *, by_weight: bool) -> Call:
    """Experts and weights [T, k], -1 and 0 for slots beyond the capacity of their expert, and how many."""
    params: dict[str, Param] = {"num_experts": num_experts, "capacity": capacity, "by_weight": int(by_weight)}
    return new_call("drop_slots", {"experts": experts, "weights": True}, params=params)


@lru_cache(maxsize=1024)
def sort_slots(experts: ArraySpec, num_groups: int, rows: int, align: int, *, weights: bool = False) -> Call:
    """Group sizes [G], slot of each row [M], row of each slot [T, k], the number of slots without a row [1], and with
    `weights` the weight of each row [M].
    """
    operands, lengths = {"experts": experts, "weights": weights}, {"G": num_groups, "M": rows}
    return new_call("sort_slots", operands, {"row_weights": weights}, {"align": align}, lengths=lengths)


@lru_cache(maxsize=1024)
def send_order(
    group_sizes: ArraySpec, source: ArraySpec, inverse: ArraySpec, ranks: int, budget: int, *, weights: bool = False
) -> Call:
    """The order of slots by expert, cut into `budget` places for each of `ranks` ranks: rows per expert that have a
    place [E], slot and expert of each place [P B], place of each slot [T, k], the number of slots with a row and
    without a place [1], and with `weights` the weight of each place [P B].
    """
    operands = {"group_sizes": group_sizes, "source": source, "inverse": inverse, "weights": weights}
    places = {"P": ranks * budget}
    return new_call("send_order", operands, {"row_weights": weights}, {"ranks": ranks}, lengths=places)


@lru_cache(maxsize=1024)
def rank_slots(experts: ArraySpec, num_experts: int, ranks: int) -> Call:
    """[T, k]: the rank of each slot's expert, or -1 if an earlier slot of the same token has the same rank."""
    return new_call("rank_slots", {"experts": experts}, params={"num_experts": num_experts, "ranks": ranks})


@lru_cache(maxsize=1024)
def row_slots(
    experts: ArraySpec, sent: ArraySpec, num_experts: int, ranks: int, entries: int, *, weights: bool = False
) -> Call:
    """The local experts of tokens that are sent to a rank once: up to j = `entries` for each place [P, j], the entry of
    each slot among all of them [T, k], the number of slots that have an expert but no entry [1], and with `weights` the
    weight of each entry [P, j].
    """
    operands: dict[str, Given] = {"experts": experts, "sent": sent, "places": True, "weights": weights}
    params: dict[str, Param] = {"num_experts": num_experts, "ranks": ranks}
    return new_call("row_slots", operands, {"row_weights": weights}, params, lengths={"j": entries})


@lru_cache(maxsize=1024)
def pad_groups(group_sizes: ArraySpec, rows: int, align: int) -> Call:
    """Padded sizes [G], the row in each padded row [P], and the place of each row [M]."""
    padded = -(-(rows + group_sizes.shape[0] * (align - 1)) // align) * align
    lengths = {"P": padded, "M": rows}
    return new_call("pad_groups", {"group_sizes": group_sizes}, params={"align": align}, lengths=lengths)


@lru_cache(maxsize=1024)
def gather_rows(
    rows: ArraySpec,
    source: ArraySpec,
    slots: int = 1,
    weights: ArraySpec | None = None,
    places: ArraySpec | None = None,
    *,
    axis: int = 0,
) -> Call:
    """[M, H] = rows[source / slots], times weights[source] if given; zeros where the source is out of range.

    Rows may be single elements [N], and the source a matrix [T, k]. With `axis` 1 columns [C, N] are gathered. `places`
    [N, slots]: the row of each slot, if no slot comes twice; kernels may read it instead of the source.
    """
    shape = (rows.shape[0], *source.shape) if axis else (*source.shape, *rows.shape[1:])
    operands = {"rows": rows, "source": source, "weights": weights, "places": places}
    return new_call("gather_rows", operands, ArraySpec(shape, rows.dtype), {"slots": slots, "axis": axis})


@lru_cache(maxsize=1024)
def combine_rows(
    rows: ArraySpec, inverse: ArraySpec, dtype: str, weights: ArraySpec | None = None, into: ArraySpec | None = None
) -> Call:
    """[T, H]: the sum of the (weighted) rows of each token's slots, in fp32, rounded once."""
    return new_call("combine_rows", {"rows": rows, "inverse": inverse, "weights": weights, "into": into}, dtype)


@lru_cache(maxsize=1024)
def combine_dot(rows: ArraySpec, grad: ArraySpec, inverse: ArraySpec) -> Call:
    """[T, k] float32 = <rows[inverse], grad>: the gradient of the weights of `combine_rows`."""
    return new_call("combine_dot", {"rows": rows, "grad": grad, "inverse": inverse})


@lru_cache(maxsize=1024)
def hash_experts(token_ids: ArraySpec, k: int, num_experts: int, table: ArraySpec | None = None) -> Call:
    """[T, k]: k distinct experts that depend on the id of the token alone, or those of its row of the table."""
    operands = {"token_ids": token_ids, "table": table}
    return new_call("hash_experts", operands, params={"num_experts": num_experts}, lengths={"k": k})


@lru_cache(maxsize=1024)
def bias_update(bias: ArraySpec, rate: float) -> Call:
    """[E] = bias + rate * sign(mean load - load)."""
    return new_call("bias_update", {"bias": bias, "load": True}, params={"rate": float(rate)})


@lru_cache(maxsize=1024)
def margin_histogram(
    logits: ArraySpec, k: int, score: str, bins: int, low: float, high: float, mask: ArraySpec | None = None
) -> Call:
    """[E, bins]: tokens per expert whose margin is in each bin of [low, high)."""
    operands = {"logits": logits, "bias": True, "mask": mask}
    params: dict[str, Param] = {"slots": k, "score": score, "low": float(low), "high": float(high)}
    return new_call("margin_histogram", operands, params=params, lengths={"bins": bins})


@lru_cache(maxsize=1024)
def quantile_bias(counts: ArraySpec, k: int, low: float, high: float) -> Call:
    """[E]: the upper edge of the first bin that reaches k / E of an expert's counts, minus the mean over experts."""
    params: dict[str, Param] = {"slots": k, "low": float(low), "high": float(high)}
    return new_call("quantile_bias", {"counts": counts}, params=params)
