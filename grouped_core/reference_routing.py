"""The reference of routing: what the native calls of `routing_calls` compute, in NumPy.

Calls on integers and copies have one result, and so have sums with a fixed order: their bits are guaranteed. The others
are computed in float64. Letters as in `routing_calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grouped_core import rounding
from grouped_core.calls import RESULTS, SLOTS, ArraySpec, Call

Arrays = dict[str, Any]
"""Operands or results by slot; None where one is absent."""

TINY = 1e-20
"""Keeps the sums that divide scores away from zero."""

_DRAWS = 4
"""Words of one block of the random stream."""


def _masked(o: Arrays, tokens: int) -> NDArray[np.bool_]:
    """Tokens that do not count."""
    return np.zeros(tokens, bool) if o.get("mask") is None else np.asarray(o["mask"]) == 0


def _ends(sizes: NDArray[Any], rows: int) -> NDArray[np.int64]:
    return np.minimum(np.cumsum(np.maximum(np.asarray(sizes, np.int64), 0)), rows)


def _sequence_of(sizes: NDArray[Any], tokens: int) -> NDArray[np.int64]:
    """The sequence of each token; the number of sequences for a token past all of them."""
    return np.searchsorted(_ends(sizes, tokens), np.arange(tokens), side="right")


# ---------------------------------------------------------------------------------------------------------------------
# Scores


def softmax(x: NDArray[Any]) -> NDArray[Any]:
    """Along the last axis."""
    with np.errstate(all="ignore"):
        e = np.exp(x - x.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)


def log_sum(x: NDArray[Any]) -> NDArray[Any]:
    """The logarithm of the sum of exponentials along the last axis."""
    with np.errstate(all="ignore"):
        most = x.max(axis=-1)
        return most + np.log(np.exp(x - most[..., None]).sum(axis=-1))


def scores_of(score: str, logits: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Scores [T, E], and their derivatives where each depends on its own logit alone."""
    with np.errstate(all="ignore"):
        if score == "softmax":
            s = softmax(logits)
            return s, np.zeros_like(s)
        logistic = np.where(logits >= 0, 1 / (1 + np.exp(-logits)), np.exp(logits) / (1 + np.exp(logits)))
        logistic = np.where(logits < -700, 0.0, logistic)
        if score == "sigmoid":
            return logistic, logistic * (1 - logistic)
        root = np.sqrt(np.maximum(logits, 0) + np.log1p(np.exp(-np.abs(logits))))
        return root, np.where(root > 0, logistic / (2 * np.where(root > 0, root, 1)), 0.0)


def probs_of(score: str, scores: NDArray[Any]) -> NDArray[Any]:
    """Scores that sum to 1 over the experts."""
    return scores if score == "softmax" else scores / (scores.sum(axis=-1, keepdims=True) + TINY)


def best(values: NDArray[Any], count: int) -> NDArray[np.int64]:
    """[T, count]: the indices of the largest values, best first; ties to the lower index, NaN first."""
    keyed = np.where(np.isnan(values), np.inf, values)
    order = np.lexsort((np.broadcast_to(np.arange(values.shape[-1]), values.shape), -keyed, ~np.isnan(values)), axis=-1)
    return order[..., :count]


def choose(ranking: NDArray[Any], k: int, num_groups: int, topk_groups: int, group_topk: int) -> NDArray[np.int64]:
    """[T, k]: the best experts of each token, of the best groups alone."""
    tokens, experts = ranking.shape
    if topk_groups < num_groups:
        grouped = ranking.reshape(tokens, num_groups, experts // num_groups)
        sums = np.take_along_axis(grouped, best(grouped, group_topk), axis=-1).sum(axis=-1)
        kept = np.zeros((tokens, num_groups), bool)
        np.put_along_axis(kept, best(sums, topk_groups), True, axis=-1)
        inside = np.repeat(kept, experts // num_groups, axis=1)
        # Experts of other groups rank behind everything, minus infinity too.
        order = np.argsort(~np.take_along_axis(inside, best(ranking, experts), axis=1), axis=1, kind="stable")
        return np.take_along_axis(best(ranking, experts), order, axis=1)[:, :k]
    return best(ranking, k)


def _parts(p: Mapping[str, Any], logits: NDArray[Any], scores: NDArray[Any], experts: NDArray[Any]) -> tuple[Any, Any]:
    """(parts [T, k], divisors [T, 1]) of the weights scale * part / divisor."""
    inside = (experts >= 0) & (experts < logits.shape[1])
    at = np.where(inside, experts, 0)
    if p["after_topk"]:
        chosen = np.where(inside, np.take_along_axis(logits, at, axis=1), -np.inf)
        most = np.where(inside.any(axis=1), chosen.max(axis=1, initial=-np.inf), 0.0)[:, None]
        parts = np.where(inside, np.exp(chosen - most), 0.0)
        return parts, parts.sum(axis=1, keepdims=True)
    parts = np.where(inside, np.take_along_axis(scores, at, axis=1), 0.0)
    return parts, parts.sum(axis=1, keepdims=True) + TINY if p["normalize"] else np.ones((len(parts), 1))


def _router(o: Arrays, p: Mapping[str, Any], results: Arrays) -> None:
    logits, (tokens, k) = o["logits"], results["experts"].shape
    masked = _masked(o, tokens)
    logits = np.where(masked[:, None], 0.0, logits)
    scores = scores_of(p["score"], logits)[0]
    if o["given"] is not None:
        experts = np.asarray(o["given"], np.int64)
    else:
        ranking = o["ranking"] if o["ranking"] is not None else logits if p["after_topk"] else scores
        ranking = ranking if o["bias"] is None else ranking + o["bias"]
        experts = choose(ranking, k, p["num_groups"], p["topk_groups"], p["group_topk"])
    with np.errstate(all="ignore"):
        parts, divisors = _parts(p, logits, scores, experts)
        weights = p["scale"] * parts / np.where(divisors == 0, 1, divisors)
    out = masked[:, None] | (experts < 0) | (experts >= logits.shape[1])
    results["weights"][...] = np.where(out, 0.0, weights)
    results["experts"][...] = np.where(out, -1, experts)


def token_stats(score: str, logits: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Normalised scores [T, E], and squared logsumexp, entropy and 1 [T, 3]."""
    probs = probs_of(score, scores_of(score, logits)[0])
    with np.errstate(all="ignore"):
        entropy = -np.where(probs > 0, probs * np.log(np.where(probs > 0, probs, 1)), probs).sum(axis=1)
    return probs, np.stack([log_sum(logits) ** 2, entropy, np.ones(len(logits))], axis=1)


def tokens_that_count(o: Arrays) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Which tokens `router_sums` counts, and the sequence of each of these."""
    tokens = len(o["logits"])
    sequence = _sequence_of(o["sequence_sizes"], tokens)
    counted = ~_masked(o, tokens) & (sequence < len(o["sequence_sizes"]))
    return counted, sequence[counted]


def _router_sums(o: Arrays, p: Mapping[str, Any], results: Arrays) -> None:
    counted, sequence = tokens_that_count(o)
    probs, stats = token_stats(p["score"], np.asarray(o["logits"])[counted])
    np.add.at(results["prob_sums"], sequence, probs)
    np.add.at(results["stat_sums"], sequence, stats)
    experts = np.asarray(o["experts"], np.int64)[counted]
    inside = (experts >= 0) & (experts < results["counts"].shape[1])
    np.add.at(results["counts"], (np.broadcast_to(sequence[:, None], experts.shape)[inside], experts[inside]), 1)


def _router_grad(o: Arrays, p: Mapping[str, Any], results: Arrays) -> None:
    experts, (tokens, count) = np.asarray(o["experts"], np.int64), o["logits"].shape
    masked = _masked(o, tokens)
    logits = np.where(masked[:, None], 0.0, o["logits"])
    scores, own = scores_of(p["score"], logits)
    inside = (experts >= 0) & (experts < count)
    of_scores, of_logits = np.zeros_like(scores), np.zeros_like(scores)
    if o["d_weights"] is not None:
        parts, divisors = _parts(p, logits, scores, experts)
        shares = parts / np.where(divisors == 0, 1, divisors)
        above = o["d_weights"] if o["kept"] is None else np.where(np.asarray(o["kept"]) < 0, 0.0, o["d_weights"])
        if p["after_topk"] or p["normalize"]:
            above = above - np.where(inside, above * shares, 0.0).sum(axis=1, keepdims=True)
        above = p["scale"] * above * (shares if p["after_topk"] else 1 / divisors)
        target = of_logits if p["after_topk"] else of_scores
        np.add.at(target, (np.arange(tokens)[:, None], np.where(inside, experts, 0)), np.where(inside, above, 0.0))
    if o["sequence_sizes"] is not None:
        sequence = _sequence_of(o["sequence_sizes"], tokens)
        counted = sequence < len(o["slopes"])
        # Losses without coefficients, whose slopes are 0, add nothing, whatever the logits are: 0 times NaN is NaN.
        slopes = np.where(counted[:, None], o["slopes"][np.where(counted, sequence, 0)], 0.0)
        has_aux = slopes.any(axis=1)
        slopes, given = slopes[has_aux] * o["d_losses"][0], scores[has_aux]
        if p["score"] != "softmax":
            sums = given.sum(axis=1, keepdims=True) + TINY
            slopes = (slopes - (slopes * given / sums).sum(axis=1, keepdims=True)) / sums
        of_scores[has_aux] += slopes
        if o["z_slope"][0]:
            factor = 2 * log_sum(logits[counted]) * o["z_slope"][0] * o["d_losses"][1]
            of_logits[counted] += factor[:, None] * softmax(logits[counted])
    if p["score"] == "softmax":
        of_logits += scores * (of_scores - (scores * of_scores).sum(axis=1, keepdims=True))
    else:
        of_logits += of_scores * own
    results["result"][...] = np.where(masked[:, None], 0.0, of_logits)


def _chosen_softmax_grad(o: Arrays, p: Mapping[str, Any], results: Arrays) -> None:
    experts, (tokens, count) = np.asarray(o["experts"], np.int64), results["result"].shape
    inside, scale = (experts >= 0) & (experts < count), o["weights"].dtype.type(p["scale"])
    counts = inside if o["kept"] is None else inside & (np.asarray(o["kept"]) >= 0)
    shares, gradients = np.where(inside, o["weights"] / scale, 0), np.where(counts, o["d_weights"], 0)
    mean = np.zeros_like(gradients[:, 0])
    for product in (gradients * shares).T:
        mean = mean + product
    of_logits = shares * (scale * (gradients - mean[:, None]))
    results["result"][...] = 0
    np.add.at(results["result"], (np.arange(tokens)[:, None], np.where(inside, experts, 0)), of_logits)


def _router_losses(o: Arrays, p: Mapping[str, Any], results: Arrays) -> None:
    squares, entropy, tokens = np.asarray(o["stat_sums"]).T
    experts, all_tokens = o["counts"].shape[1], max(tokens.sum(), 1.0)
    share = p["aux_coeff"] / max((tokens > 0).sum(), 1)
    slopes = (share * experts / (p["slots"] * np.maximum(tokens, 1.0) ** 2))[:, None] * o["counts"]
    z_slope = p["z_coeff"] / all_tokens
    # Sums may be NaN or infinite where nobody asks for the loss.
    aux_loss = (slopes * o["prob_sums"]).sum() if share else 0.0
    z_loss = z_slope * squares.sum() if z_slope else 0.0
    results["losses"][...] = aux_loss, z_loss, entropy.sum() / all_tokens
    results["slopes"][...], results["z_slope"][...] = slopes, z_slope
    lost = 0 if o["dropped"] is None else int(np.asarray(o["dropped"])[0])
    results["lost"][...], results["overflow"][...] = lost, lost > 0


def _sinkhorn(o: Arrays, p: Mapping[str, Any], results: Arrays) -> None:
    logits = o["logits"]
    tokens, experts = logits.shape
    masked = _masked(o, tokens)
    safe = np.where(masked[:, None], 0.0, logits)
    values = np.where(masked[:, None], 0.0, np.exp(safe - safe.max(axis=1, keepdims=True, initial=-np.inf)))
    a, b, counted = np.ones(tokens), np.ones(experts), max(int((~masked).sum()), 1)
    for _ in range(p["iterations"]):
        a = 1 / (counted * (values @ b + TINY))
        apart = masked | np.isnan(a)  # rows with a NaN add nothing to the others
        b = 1 / (experts * (np.where(apart, 0.0, a) @ np.where(apart[:, None], 0.0, values) + TINY))
    results["result"][...] = np.where(masked[:, None], 0.0, a[:, None] * values * b)


def _jitter(o: Arrays, p: Mapping[str, Any], results: Arrays) -> None:
    tokens, experts = o["logits"].shape
    key = int(o["key"][0]) | int(o["key"][1]) << 32
    words = rounding.random_words(key, tokens, experts, 0, 0)
    u = (words >> 8).astype(np.float32) * np.float32(2.0**-24)
    factors = np.float32(1) + np.float32(p["eps"]) * (np.float32(2) * u - np.float32(1))
    results["result"][...] = o["logits"] * factors


# ---------------------------------------------------------------------------------------------------------------------
# Slots


def _count_experts(o: Arrays, p: Mapping[str, Any], results: Arrays) -> None:
    experts, counts = np.asarray(o["experts"]), results["counts"]
    sequence = _sequence_of(o["sequence_sizes"], len(experts))
    for s in range(len(counts)):
        chosen = experts[sequence == s].reshape(-1)
        counts[s] = np.bincount(chosen[(chosen >= 0) & (chosen < counts.shape[1])], minlength=counts.shape[1])


def _drop_slots(o: Arrays, p: Mapping[str, Any], results: Arrays) -> None:
    experts = np.asarray(o["experts"]).reshape(-1)
    kept = np.where((experts >= 0) & (experts < p["num_experts"]), experts, -1)
    had = int((kept >= 0).sum())
    for e in np.unique(kept[kept >= 0]):
        (own,) = np.nonzero(kept == e)
        if p["by_weight"]:
            own = own[best(np.asarray(o["weights"], np.float64).reshape(1, -1)[:, own], len(own))[0]]
        kept[own[p["capacity"] :]] = -1
    results["kept"][...] = kept.reshape(o["experts"].shape)
    results["kept_weights"][...] = np.where(results["kept"] >= 0, o["weights"], 0)
    results["dropped"][...] = had - int((kept >= 0).sum())


def _sort_slots(o: Arrays, p: Mapping[str, Any], results: Arrays) -> None:
    experts = np.asarray(o["experts"]).reshape(-1)
    rows, groups = len(results["source"]), len(results["group_sizes"])
    source, inverse = np.full(rows, -1, np.int64), np.full(experts.size, -1, np.int64)
    begin, dropped = 0, 0
    ends = []
    for g in range(groups):
        (own,) = np.nonzero(experts == g)
        at = begin + np.arange(own.size)
        kept = at < rows
        source[at[kept]], inverse[own[kept]] = own[kept], at[kept]
        dropped += int((~kept).sum())
        begin += -(-own.size // p["align"]) * p["align"]
        ends.append(min(begin, rows))
    results["group_sizes"][...] = np.diff(ends, prepend=0)
    results["source"][...], results["inverse"][...] = source, inverse.reshape(o["experts"].shape)
    results["dropped"][...] = dropped
    if o["weights"] is not None:
        results["row_weights"][source >= 0] = np.asarray(o["weights"]).reshape(-1)[source[source >= 0]]


def _send_order(o: Arrays, p: Mapping[str, Any], results: Arrays) -> None:
    source, inverse = np.asarray(o["source"]), np.asarray(o["inverse"]).reshape(-1)
    experts, ranks, places = len(results["kept_sizes"]), p["ranks"], len(results["sent"])
    budget, own = places // ranks, experts // ranks
    ends = _ends(o["group_sizes"], len(source))
    expert = np.searchsorted(ends, np.arange(ends[-1]), side="right")  # of each row
    rank = expert // own
    at = np.arange(len(rank)) - np.searchsorted(rank, rank)  # among the rows of its rank
    kept = at < budget
    place = np.where(kept, rank * budget + at, -1)
    results["sent"][...], results["experts"][...] = -1, -1
    results["sent"][place[kept]] = source[: len(place)][kept]
    results["experts"][place[kept]] = (expert % own)[kept]
    results["kept_sizes"][...] = np.bincount(expert[kept], minlength=experts)
    results["dropped"][...] = (~kept).sum()
    inside, row = _inside(inverse, len(place))
    found = np.where(inside, place[row], -1) if len(place) else np.full_like(inverse, -1)
    results["places"][...] = found.reshape(results["places"].shape)
    if o["weights"] is not None:
        inside, slot = _inside(results["sent"], inverse.size)
        weights = np.append(np.asarray(o["weights"]).reshape(-1), 0)
        results["row_weights"][...] = np.where(inside, weights[slot], 0)


def _rank_slots(o: Arrays, p: Mapping[str, Any], results: Arrays) -> None:
    inside, expert = _inside(o["experts"], p["num_experts"])
    ranks = np.where(inside, expert // (p["num_experts"] // p["ranks"]), -1)
    for j in range(ranks.shape[1]):
        again = (ranks[:, :j] == ranks[:, j : j + 1]).any(axis=1)
        results["slot_ranks"][:, j] = np.where(again, -1, ranks[:, j])


def _row_slots(o: Arrays, p: Mapping[str, Any], results: Arrays) -> None:
    experts, (places, entries) = np.asarray(o["experts"], np.int64), results["local"].shape
    (tokens, k), own = experts.shape, p["num_experts"] // p["ranks"]
    inside, _ = _inside(experts, p["num_experts"])
    ranks = np.where(inside, experts // own, -1)
    results["local"][...] = results["inverse"][...] = -1
    sends, sent = _inside(o["sent"], experts.size)
    for place in np.flatnonzero(sends):
        token, rank = sent[place] // k, place // (places // p["ranks"])
        (slots,) = np.nonzero(ranks[token] == rank)
        slots = slots[:entries]
        results["local"][place, : slots.size] = experts[token, slots] - rank * own
        if o["weights"] is not None:
            results["row_weights"][place, : slots.size] = np.asarray(o["weights"])[token, slots]
    has, at = _inside(o["places"], places)
    for j in range(k):
        shares = ranks[:, : j + 1] == ranks[:, j : j + 1]
        first, before = shares.argmax(axis=1), shares.sum(axis=1) - 1
        kept = inside[:, j] & has[np.arange(tokens), first] & (before < entries)
        results["inverse"][kept, j] = (at[np.arange(tokens), first] * entries + before)[kept]
    results["dropped"][...] = (inside & (results["inverse"] < 0)).sum()


def _pad_groups(o: Arrays, p: Mapping[str, Any], results: Arrays) -> None:
    results["source"][...], results["inverse"][...] = -1, -1
    begin = first = 0
    for g, end in enumerate(_ends(o["group_sizes"], len(results["inverse"]))):
        rows = np.arange(first, end)
        results["source"][begin : begin + rows.size] = rows
        results["inverse"][rows] = begin + np.arange(rows.size)
        results["padded_sizes"][g] = padded = -(-rows.size // p["align"]) * p["align"]
        begin, first = begin + padded, end


def _hash_experts(o: Arrays, p: Mapping[str, Any], results: Arrays) -> None:
    ids, experts = np.asarray(o["token_ids"]), results["experts"]
    k, count = experts.shape[1], p["num_experts"]
    if o["table"] is not None:
        inside = (ids >= 0) & (ids < len(o["table"]))
        experts[...] = np.where(inside[:, None], np.asarray(o["table"])[np.where(inside, ids, 0)], -1)
        return
    counters = np.zeros((len(ids), -(-k // _DRAWS), 4), np.uint32)
    counters[..., 0], counters[..., 1] = np.arange(counters.shape[1]), ids.astype(np.uint32)[:, None]
    words = rounding.philox(counters, 0).reshape(len(ids), _DRAWS * counters.shape[1])
    for t in range(len(ids)):
        left = list(range(count))
        experts[t] = [left.pop(int(words[t, j]) * (count - j) >> 32) for j in range(k)]


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def _inside(index: Any, count: int) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Which indices are in range, and the indices with 0 for the others."""
    index = np.asarray(index, np.int64)
    inside = (index >= 0) & (index < count)
    return inside, np.where(inside, index, 0)


def _gather_rows(o: Arrays, p: Mapping[str, Any], results: Arrays) -> None:
    rows, slots = np.asarray(o["rows"]), p["slots"]
    if p["axis"]:
        inside, source = _inside(o["source"], rows.shape[1] * slots)
        results["result"][:, inside] = rows[:, source[inside] // slots]
        return
    inside, source = _inside(o["source"], len(rows) * slots)
    if not len(rows):
        return
    taken = rows[source // slots]
    if o["weights"] is not None:
        wide = np.float64 if taken.dtype == np.float64 else np.float32
        factors = np.asarray(o["weights"]).astype(wide).reshape(-1)[source]
        factors = factors.reshape(factors.shape + (1,) * (rows.ndim - 1))
        taken = (factors * taken.astype(wide)).astype(rows.dtype)
    results["result"][inside] = taken[inside]


def _combine_rows(o: Arrays, p: Mapping[str, Any], results: Arrays) -> None:
    rows = np.asarray(o["rows"])
    wide = np.float64 if rows.dtype == np.float64 else np.float32
    total = np.zeros(results["result"].shape, wide)
    for j in range(o["inverse"].shape[1]):
        inside, at = _inside(np.asarray(o["inverse"])[:, j], len(rows))
        if not len(rows):
            continue
        weight = np.ones(len(total), wide) if o["weights"] is None else np.asarray(o["weights"]).astype(wide)[:, j]
        term = weight[:, None] * rows[at].astype(wide)
        total[inside] = (total + term)[inside]
    results["result"][...] = total.astype(results["result"].dtype)


def _combine_dot(o: Arrays, p: Mapping[str, Any], results: Arrays) -> None:
    rows = np.asarray(o["rows"], np.float64)
    for j in range(o["inverse"].shape[1]):
        inside, at = _inside(np.asarray(o["inverse"])[:, j], len(rows))
        if len(rows):
            dots = (rows[at] * np.asarray(o["grad"], np.float64)).sum(axis=1)
            results["result"][:, j] = np.where(inside, dots, 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Balance


def _bias_update(o: Arrays, p: Mapping[str, Any], results: Arrays) -> None:
    load = np.asarray(o["load"], np.int64)
    sign = np.sign(load.sum() - load * load.size).astype(np.float32)
    results["result"][...] = o["bias"] + np.float32(p["rate"]) * sign


def _margin_histogram(o: Arrays, p: Mapping[str, Any], results: Arrays) -> None:
    counts = results["counts"]
    bins = counts.shape[1]
    kept = np.asarray(o["logits"])[~_masked(o, len(o["logits"]))]
    scores = scores_of(p["score"], kept)[0]
    ranked = scores + o["bias"]
    at = best(ranked, p["slots"] + 1)[:, p["slots"] :]
    margins = np.take_along_axis(ranked, at, axis=1) - scores
    with np.errstate(invalid="ignore"):
        place = np.clip(np.floor((margins - p["low"]) * (bins / (p["high"] - p["low"]))), 0, bins - 1)
    for e in range(len(counts)):
        own = place[~np.isnan(margins[:, e]), e].astype(np.int64)
        counts[e] = np.bincount(own, minlength=bins)


def _quantile_bias(o: Arrays, p: Mapping[str, Any], results: Arrays) -> None:
    counts = np.asarray(o["counts"], np.int64)
    experts, bins = counts.shape
    below, everything = counts.cumsum(axis=1), counts.sum(axis=1)
    first = (below * experts >= everything[:, None] * p["slots"]).argmax(axis=1)
    low, high = np.float32(p["low"]), np.float32(p["high"])
    part = (first + 1).astype(np.float32) / np.float32(bins)
    edges = np.where(everything > 0, low + part * (high - low), np.float32(0)).astype(np.float32)
    results["result"][...] = edges - edges.astype(np.float64).mean()


# ---------------------------------------------------------------------------------------------------------------------
# Parts


def _split_at(shape: tuple[int, ...], axis: int) -> tuple[int, int]:
    """Elements before an axis, and from it on."""
    return int(np.prod(shape[:axis])), int(np.prod(shape[axis:]))


def _split_parts(o: Arrays, p: Mapping[str, Any], results: Arrays) -> None:
    source, order = np.asarray(o["source"]), str(p["order"])
    left = source.reshape(_split_at(source.shape, p["axis"]))
    parts: dict[str, NDArray[Any]] = {}
    for number in "123":
        if source.dtype == np.float64:  # nothing is rounded: the first part is all
            parts[number], left = left, np.zeros_like(left)
            continue
        leading = (left.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        leading = np.where(np.isnan(left), np.float32(np.nan), leading)
        parts[number] = leading
        left = np.where(np.isfinite(left), left - np.where(np.isfinite(left), leading, 0), np.float32(0))
    result = np.stack([parts[number] for number in order], axis=1)
    results["result"][...] = result.reshape(results["result"].shape)


def _sum_parts(o: Arrays, p: Mapping[str, Any], results: Arrays) -> None:
    source, count = np.asarray(o["source"]), p["count"]
    outer, inner = _split_at(source.shape, p["axis"])
    parts = source.reshape(outer, count, inner // count)
    total = parts[:, count - 1]
    for i in range(count - 2, -1, -1):
        total = parts[:, i] + total
    results["result"][...] = total.reshape(results["result"].shape)


_MEANING: dict[str, Callable[[Arrays, Mapping[str, Any], Arrays], None]] = {
    "jitter": _jitter,
    "sinkhorn": _sinkhorn,
    "router": _router,
    "router_sums": _router_sums,
    "router_grad": _router_grad,
    "chosen_softmax_grad": _chosen_softmax_grad,
    "router_losses": _router_losses,
    "count_experts": _count_experts,
    "drop_slots": _drop_slots,
    "sort_slots": _sort_slots,
    "send_order": _send_order,
    "rank_slots": _rank_slots,
    "row_slots": _row_slots,
    "pad_groups": _pad_groups,
    "gather_rows": _gather_rows,
    "combine_rows": _combine_rows,
    "combine_dot": _combine_dot,
    "hash_experts": _hash_experts,
    "bias_update": _bias_update,
    "margin_histogram": _margin_histogram,
    "quantile_bias": _quantile_bias,
    "split_parts": _split_parts,
    "sum_parts": _sum_parts,
}

CALLS = tuple(_MEANING)

EXACT = (
    *("jitter", "count_experts", "drop_slots", "sort_slots", "pad_groups", "gather_rows", "combine_rows"),
    *("send_order", "rank_slots", "row_slots", "hash_experts", "bias_update", "split_parts", "sum_parts"),
    "chosen_softmax_grad",
)
"""Calls whose bits are guaranteed."""

_INTEGERS = ("int32", "uint8", "uint32")


def run(
    call: Call, operands: Arrays, specs: Mapping[str, ArraySpec | None], dtypes: Callable[[str], Any], *, exact: bool
) -> Arrays:
    """Results of `call` by slot.

    Args:
        specs: those of the operands. dtypes: NumPy's dtypes by the names of element types.
        exact: floats are float64 and results are not rounded; otherwise operands of calls with guaranteed bits keep
            their types, and every result is rounded to its own.
    """
    kept = call.name in EXACT and not exact
    taken: Arrays = dict.fromkeys(operands)
    for name, array in operands.items():
        spec = specs[name]
        if array is not None and spec is not None:
            whole = kept or spec.dtype in _INTEGERS
            taken[name] = np.asarray(array).astype(dtypes(spec.dtype) if whole else np.float64)
    slots = {name: spec for name, spec in zip(RESULTS[call.name], call.outputs, strict=True) if spec is not None}
    results: Arrays = {
        name: np.zeros(s.shape, dtypes(s.dtype) if kept or s.dtype in _INTEGERS else np.float64)
        for name, s in slots.items()
    }
    _MEANING[call.name](taken, dict(call.params), results)
    if exact:
        return results
    return {name: array.astype(dtypes(slots[name].dtype)) for name, array in results.items()}


def meaning(call: Call, arrays: Sequence[Any], params: Mapping[str, Any]) -> Arrays:
    """Results of `call` in float64 with other parameters, which may have the accuracy of float64."""
    slots = zip(RESULTS[call.name], call.outputs, strict=True)
    results: Arrays = {
        name: np.zeros(s.shape, np.int64 if s.dtype in _INTEGERS else np.float64) for name, s in slots if s is not None
    }
    _MEANING[call.name](dict(zip(SLOTS[call.name], arrays, strict=True)), params, results)
    return results
