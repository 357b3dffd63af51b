"""The native calls of routing, each kernel against the oracle: bits where they are promised, else bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from grouped_core import calls, reference_routing
from grouped_core import routing_calls as routing
from grouped_core.calls import SLOTS, Call, spec_of
from grouped_core.reference import Oracle
from grouped_core.routing_calls import GroupLimit, Scores
from tests import asserts, bounds, cases
from tests.native.runner import Native, kernels

SHAPES = ((0, 4, 2), (1, 1, 1), (7, 5, 5), (65, 33, 3), (200, 128, 8), (40, 1024, 32), (33, 257, 6))
"""(T, E, k)."""
SCORES = (
    *(Scores(score, normalize=normalize) for score in routing.SCORES for normalize in (False, True)),
    Scores("softmax", after_topk=True),
    Scores("sigmoid", normalize=True, scale=2.5),
)


def run(kernel: str, call: Call, **arrays: Any) -> tuple[Any, ...]:
    """The results of `call` on arrays by slot, compared with the oracle."""
    return Native(kernel)(call, [arrays.get(slot) for slot in SLOTS[call.name]])


def draw(*shape: int, seed: object = 0, scale: float = 1.5) -> NDArray[np.float32]:
    return (cases.normal(shape, "float32", "routing", seed) * np.float32(scale)).astype(np.float32)


def slots(tokens: int, k: int, experts: int, seed: object, missing: float = 0.0) -> NDArray[np.int32]:
    """[T, k] distinct experts per token, some of them -1 or out of range."""
    random = cases.generator("slots", tokens, k, experts, seed)
    chosen = np.argsort(random.random((tokens, experts)), axis=1)[:, :k].astype(np.int32)
    away = random.random((tokens, k)) < missing
    return np.where(away, random.choice([-1, experts, -(2**31), 2**31 - 1], (tokens, k)), chosen).astype(np.int32)


def mask_of(tokens: int) -> NDArray[np.uint8]:
    return (np.arange(tokens) % 5 != 3).astype(np.uint8)


# ---- the router


@pytest.mark.rule("LYR-1", "LYR-2")
@pytest.mark.matrix(kernel=kernels("router"), shape=SHAPES, scores=SCORES, bias=(False, True), masked=(False, True))
def test_weights_and_experts(kernel, shape, scores, bias, masked):
    tokens, experts, k = shape
    given = {"logits": draw(tokens, experts)}
    given |= {"bias": draw(experts, seed="bias", scale=0.1)} if bias else {}
    given |= {"mask": mask_of(tokens)} if masked else {}
    specs = {name: spec_of(array) for name, array in given.items()}
    if masked:  # what masked tokens hold is not read
        given["logits"][given["mask"] == 0] = np.nan
    call = routing.router(specs.pop("logits"), k, scores, GroupLimit(), **specs)
    weights, chosen = run(kernel, call, **given)
    valid = given["mask"] != 0 if masked else np.ones(tokens, bool)
    assert (np.sort(chosen[valid], axis=1)[:, 1:] > np.sort(chosen[valid], axis=1)[:, :-1]).all(), "k distinct experts"
    asserts.filled(chosen[~valid], -1, "experts of padding")
    asserts.zero(weights[~valid], "weights of padding")


@pytest.mark.rule("LYR-1")
@pytest.mark.matrix(
    kernel=kernels("router"),
    case=(
        (64, 8, 4, 2, 8),
        (64, 8, 3, 1, 6),
        (32, 4, 1, 2, 2),
        (256, 8, 4, 2, 8),
        (12, 12, 5, 1, 5),
        (512, 2, 1, 3, 32),
    ),
    bias=(False, True),
    score=("softmax", "sigmoid"),
)
def test_choice_among_the_best_groups(kernel, case, bias, score):
    experts, groups, kept, best, k = case
    given = {"logits": draw(50, experts)} | ({"bias": draw(experts, seed="bias")} if bias else {})
    specs = {name: spec_of(array) for name, array in given.items()}
    call = routing.router(
        specs.pop("logits"), k, Scores(score, normalize=True), GroupLimit(groups, kept, best), **specs
    )
    chosen = run(kernel, call, **given)[1]
    assert max(len(set(row)) for row in chosen // (experts // groups)) <= kept


@pytest.mark.rule("LYR-2", "ALL-6")
@pytest.mark.parametrize("kernel", kernels("router"))
def test_ties_go_to_the_lower_index_and_nan_ranks_first(kernel):
    logits = np.zeros((5, 70), np.float32)
    logits[0, ::2] = -0.0  # equal to 0
    logits[1, 40:] = 1.0
    logits[2, 69] = np.nan
    logits[3] = -np.inf
    logits[3, 7] = np.inf
    ranking = logits.copy()
    logits = np.where(np.isfinite(logits), logits, 0.0).astype(np.float32)
    call = routing.router(spec_of(logits), 3, Scores(), GroupLimit(), ranking=spec_of(ranking))
    chosen = run(kernel, call, logits=logits, ranking=ranking)[1]
    asserts.bitwise(chosen, np.array([[0, 1, 2], [40, 41, 42], [69, 0, 1], [7, 0, 1], [0, 1, 2]], np.int32))


@pytest.mark.rule("ALL-6")
@pytest.mark.parametrize("kernel", kernels("router"))
@pytest.mark.parametrize("score", routing.SCORES)
def test_a_bad_logit_stays_with_its_token(kernel, score):
    good = draw(6, 40)
    bad = good.copy()
    bad[2, 11], bad[4, 0] = np.nan, np.inf
    call = routing.router(spec_of(good), 4, Scores(score), GroupLimit())
    native = Native(kernel, check=False)
    before, after = (native(call, [logits, None, None, None, None]) for logits in (good, bad))
    others = np.array([0, 1, 3, 5])
    for name, one, two in zip(calls.RESULTS["router"], before, after, strict=True):
        asserts.bitwise(two[others], one[others], name)
    assert ((after[1] >= 0) & (after[1] < 40)).all()
    assert np.isnan(after[0][2]).any()


@pytest.mark.rule("LYR-15")
@pytest.mark.matrix(kernel=kernels("router"), shape=SHAPES, scores=SCORES)
def test_given_experts_replace_the_choice(kernel, shape, scores):
    tokens, experts, k = shape
    logits, given = draw(tokens, experts), slots(tokens, k, experts, "given", missing=0.2)
    call = routing.router(spec_of(logits), k, scores, GroupLimit(), given=spec_of(given))
    weights, chosen = run(kernel, call, logits=logits, given=given)
    inside = (given >= 0) & (given < experts)
    asserts.bitwise(chosen, np.where(inside, given, -1).astype(np.int32))
    asserts.zero(weights[~inside])
    if not scores.after_topk:  # replaying one's own choice gives its bits
        own = routing.router(spec_of(logits), k, scores, GroupLimit())
        first = run(kernel, own, logits=logits)
        again = run(kernel, call, logits=logits, given=first[1])
        asserts.bitwise(again[0], first[0])


@pytest.mark.rule("LYR-1", "LYR-3")
@pytest.mark.matrix(
    kernel=kernels("router_grad"), shape=SHAPES, scores=SCORES, masked=(False, True), of=("weights", "losses", "both")
)
def test_gradients_of_logits(kernel, shape, scores, masked, of):
    tokens, experts, k = shape
    given: dict[str, Any] = {"logits": draw(tokens, experts), "experts": slots(tokens, k, experts, "grad", 0.1)}
    options: dict[str, Any] = {"weights": of != "losses"}
    if of != "losses":
        given["d_weights"] = draw(tokens, k, seed="dw")
    if of != "weights":
        sizes = np.array([tokens // 3, 0, tokens // 2], np.int32)
        given |= {"sequence_sizes": sizes, "slopes": np.abs(draw(3, experts, seed="slopes"))}
        given |= {"z_slope": np.array([0.3], np.float32), "d_losses": np.array([0.7, -1.1], np.float32)}
        options["sequence_sizes"] = spec_of(sizes)
    if of == "both":
        given["kept"] = np.where(slots(tokens, k, experts, "kept", 0.3) < 0, -1, given["experts"]).astype(np.int32)
        options["kept"] = spec_of(given["kept"])
    if masked:
        given["mask"] = mask_of(tokens)
        options["mask"] = spec_of(given["mask"])
        given["logits"][given["mask"] == 0] = np.nan
    run(kernel, routing.router_grad(spec_of(given["logits"]), k, scores, **options), **given)


@pytest.mark.rule("LYR-3")
@pytest.mark.matrix(kernel=kernels("router_grad"), scores=SCORES)
def test_a_loss_without_a_coefficient_adds_nothing_to_gradients(kernel, scores):
    """Whatever the logits and the gradients of the losses are."""
    logits, sizes = draw(9, 40), np.array([4, 5], np.int32)
    logits[0, 3], logits[1, 5], logits[2, 9], logits[6, 7] = np.nan, np.inf, -np.inf, np.nan
    given: dict[str, Any] = {"logits": logits, "experts": slots(9, 4, 40, "off"), "d_weights": draw(9, 4, seed="dw")}
    off = {"sequence_sizes": sizes, "slopes": np.zeros((2, 40), np.float32), "z_slope": np.zeros(1, np.float32)}
    off["d_losses"] = np.array([np.inf, np.nan], np.float32)

    def gradient(runner: Any, **arrays: Any) -> Any:
        of_losses = spec_of(sizes) if "sequence_sizes" in arrays else None
        call = routing.router_grad(spec_of(logits), 4, scores, weights=True, sequence_sizes=of_losses)
        return runner(call, [arrays.get(slot) for slot in SLOTS[call.name]])[0]

    for runner in (Native(kernel, check=False), Oracle()):
        alone = gradient(runner, **given)
        asserts.bitwise(gradient(runner, **given, **off), alone)
        asserts.bitwise(np.isfinite(alone[2:6]), np.ones((4, 40), bool), "gradients of the weights")
        if scores.score == "sigmoid":  # an infinite logit has an infinite logsumexp, but the other loss is finite
            balanced = off | {"slopes": np.abs(draw(2, 40, seed="slopes")), "d_losses": np.ones(2, np.float32)}
            found = gradient(runner, **given, **balanced)
            asserts.bitwise(np.isfinite(found[1]), np.ones(40, bool), "gradients of the auxiliary loss")
            assert (found[1] != alone[1]).any()


@pytest.mark.rule("LYR-1")
@pytest.mark.matrix(kernel=kernels("chosen_softmax_grad"), shape=SHAPES, scale=(1.0, 2.5, -0.3), dropped=(False, True))
def test_gradients_of_logits_from_weights(kernel, shape, scale, dropped):
    tokens, experts, k = shape
    powers, chosen = np.exp(draw(tokens, k)), slots(tokens, k, experts, "grad", 0.1)
    powers[chosen < 0] = 0
    weights = np.float32(scale) * powers / np.maximum(powers.sum(axis=1, keepdims=True), np.float32(1e-20))
    given = {"weights": weights.astype(np.float32), "experts": chosen, "d_weights": draw(tokens, k, seed="dw")}
    given["weights"][chosen < 0] = np.nan  # is not read
    if dropped:
        given["kept"] = np.where(slots(tokens, k, experts, "kept", 0.3) < 0, -1, chosen).astype(np.int32)
    of_kept = spec_of(given["kept"]) if dropped else None
    run(kernel, routing.chosen_softmax_grad(spec_of(weights), experts, scale, of_kept), **given)


def sizes_of(sequences: str, tokens: int) -> NDArray[np.int32]:
    """Sizes of sequences: one of all tokens, few with an empty one and a rest, or more than there are tokens."""
    if sequences == "one":
        return np.array([tokens], np.int32)
    if sequences == "few":
        return np.array([tokens // 4, 0, -3, tokens // 2, 0], np.int32)
    return np.where(np.arange(2 * tokens + 40) % 3 == 1, np.arange(2 * tokens + 40) % 4, 0).astype(np.int32)


def sums_call(score: str, given: dict[str, Any]) -> Call:
    """`router_sums` of arrays by slot."""
    specs = {name: spec_of(array) for name, array in given.items()}
    return routing.router_sums(specs["logits"], specs["experts"], specs["sequence_sizes"], score, specs.get("mask"))


@pytest.mark.rule("LYR-3")
@pytest.mark.matrix(
    kernel=kernels("router_sums"),
    shape=(*SHAPES, (3000, 16, 2)),
    score=routing.SCORES,
    masked=(False, True),
    sequences=("one", "few", "many"),
)
def test_sums_of_losses(kernel, shape, score, masked, sequences):
    tokens, experts, k = shape
    sizes = sizes_of(sequences, tokens)
    given = {"logits": draw(tokens, experts), "experts": slots(tokens, k, experts, "sums", 0.1)}
    given |= {"sequence_sizes": sizes} | ({"mask": mask_of(tokens)} if masked else {})
    ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), tokens)
    sequence = np.searchsorted(ends, np.arange(tokens), side="right")
    counted = sequence < len(sizes)
    counted &= given["mask"] != 0 if masked else True
    given["logits"][~counted] = np.nan  # is not read
    call = sums_call(score, given)
    prob_sums, counts, stat_sums = run(kernel, call, **given)
    tokens_of = np.bincount(sequence[counted], minlength=len(sizes))
    asserts.bitwise(stat_sums[:, 2], tokens_of.astype(np.float32), "tokens")
    for name, array in (("probs", prob_sums), ("counts", counts), ("stats", stat_sums)):
        asserts.zero(array[tokens_of == 0], f"{name} of sequences without tokens")


@pytest.mark.rule("LYR-3", "ALL-6")
@pytest.mark.parametrize("kernel", kernels("router_sums"))
@pytest.mark.parametrize("score", routing.SCORES)
def test_a_bad_logit_stays_with_its_sequence(kernel, score):
    given = {"logits": draw(30, 40), "experts": slots(30, 4, 40, "sums")}
    given["sequence_sizes"] = np.array([7, 5, 12, 6], np.int32)
    call = sums_call(score, given)
    native = Native(kernel, check=False)
    bad = given["logits"].copy()
    bad[9, 11], bad[25, 0] = np.nan, np.nan
    before, after = (
        native(call, [(given | {"logits": logits}).get(slot) for slot in SLOTS[call.name]])
        for logits in (given["logits"], bad)
    )
    for name, one, two in zip(calls.RESULTS["router_sums"], before, after, strict=True):
        asserts.bitwise(two[[0, 2]], one[[0, 2]], name)
    assert np.isnan(after[0][[1, 3]]).any(axis=1).all()
    asserts.bitwise(after[1], before[1], "counts")


@pytest.mark.rule("LYR-3")
@pytest.mark.parametrize("kernel", kernels("router_sums"))
def test_the_order_of_sums_over_tokens(kernel):
    """The bits are those of numerics 9: runs of 8 tokens in order, then 32 lanes of runs as a tree."""
    tokens, experts = 1203, 5
    given: dict[str, Any] = {"logits": draw(tokens, experts), "experts": slots(tokens, 2, experts, "order")}
    each = given | {"sequence_sizes": np.ones(tokens, np.int32)}
    (probs, _, stats), begin = run(kernel, sums_call("sigmoid", each), **each), 3
    values = np.concatenate([probs, stats], axis=1)
    size = tokens - 10
    whole = given | {"sequence_sizes": np.array([begin, 0, size], np.int32)}
    found, _, found_stats = run(kernel, sums_call("sigmoid", whole), **whole)
    lanes = np.zeros((32, values.shape[1]), np.float32)
    for n, first in enumerate(range(0, begin + size, 8)):
        partial = np.zeros(values.shape[1], np.float32)
        for row in values[max(first, begin) : min(first + 8, begin + size)]:
            partial += row
        lanes[n % 32] += partial
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    asserts.bitwise(np.concatenate([found[2], found_stats[2]]), lanes[0])


@pytest.mark.rule("LYR-3")
@pytest.mark.parametrize("kernel", kernels("router_losses"))
@pytest.mark.parametrize(("sequences", "dropped"), [(1, None), (5, 7), (33, 0)])
def test_losses(kernel, sequences, dropped):
    tokens = np.arange(sequences, dtype=np.float32) * 3  # of the first sequence none, where there are more
    tokens = tokens if sequences > 1 else tokens + 17
    given = {
        "prob_sums": np.abs(draw(sequences, 40)),
        "counts": np.arange(sequences * 40, dtype=np.int32).reshape(sequences, 40) % 7,
        "stat_sums": np.stack([tokens * 2, tokens * 3, tokens], axis=1).astype(np.float32),
    }
    given |= {} if dropped is None else {"dropped": np.array([dropped], np.int32)}
    call = routing.router_losses(spec_of(given["prob_sums"]), 4, 0.01, 0.001, dropped=dropped is not None)
    *_, lost, overflow = run(kernel, call, **given)
    assert (int(lost[0]), int(overflow[0])) == (dropped or 0, (dropped or 0) > 0)


@pytest.mark.rule("LYR-3")
@pytest.mark.matrix(
    kernel=kernels("router_losses"),
    coefficients=((0.0, 0.0), (0.5, 0.0), (0.0, 0.25)),
    bad=("inf", "nan"),
    sequences=(1, 33),
)
def test_a_loss_without_a_coefficient_is_zero_whatever_its_sums(kernel, coefficients, bad, sequences):
    given = {
        "prob_sums": np.full((sequences, 8), float(bad), np.float32),
        "counts": np.ones((sequences, 8), np.int32),
        "stat_sums": np.tile(np.array([float(bad), 1, 4], np.float32), (sequences, 1)),
    }
    losses, *_ = run(kernel, routing.router_losses(spec_of(given["prob_sums"]), 2, *coefficients), **given)
    np.testing.assert_array_equal(losses[:2], [float(bad) if coefficient else 0 for coefficient in coefficients])


@pytest.mark.parametrize("kernel", kernels("jitter"))
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (70, 129)])
def test_jitter(kernel, shape):
    given = {"logits": draw(*shape), "key": np.array([12345, 678], np.uint32)}
    (found,) = run(kernel, routing.jitter(spec_of(given["logits"]), 0.125), **given)
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = found / given["logits"]
    assert (np.abs(factors - 1) <= 0.1251).all()


PART_SHAPES = (((0, 8), 1), ((3, 5), 1), ((70, 128), 1), ((1, 24, 40), 1), ((1, 9, 16), 2), ((40,), 0))
"""Shapes and the axis of the parts."""


@pytest.mark.matrix(
    kernel=kernels("split_parts"), shape=PART_SHAPES, order=("1", "123", "112123", "321"), unaligned=(False, True)
)
def test_bf16_parts(kernel, shape, order, unaligned):
    dims, axis = shape
    source = draw(*dims, seed="parts") * np.exp2(np.arange(dims[-1]) % 60 - 30).astype(np.float32)
    Native(kernel, unaligned=unaligned)(routing.split_parts(spec_of(source), axis, order), [source])


@pytest.mark.parametrize("kernel", kernels("split_parts"))
def test_bf16_parts_add_up_to_the_value(kernel):
    values = [1.0, -1.0, 3.4028235e38, 1.1754944e-38, 2.0**-120, -0.0, np.pi, np.inf, -np.inf, np.nan]
    source = np.array([values], np.float32)
    (found,) = run(kernel, routing.split_parts(spec_of(source), 1, "123"), source=source)
    parts = np.asarray(found).astype(np.float64).reshape(3, -1)
    np.testing.assert_array_equal(parts[:, :-3].sum(axis=0), source[0, :-3].astype(np.float64))
    np.testing.assert_array_equal(parts[:, -3:], [source[0, -3:], [0, 0, 0], [0, 0, 0]])


@pytest.mark.matrix(kernel=kernels("sum_parts"), shape=PART_SHAPES, count=(1, 3, 6), unaligned=(False, True))
def test_sums_of_parts(kernel, shape, count, unaligned):
    dims, axis = shape
    source = draw(*dims[:axis], dims[axis] * count, *dims[axis + 1 :], seed="sums")
    Native(kernel, unaligned=unaligned)(routing.sum_parts(spec_of(source), axis, count), [source])


@pytest.mark.matrix(
    kernel=kernels("sinkhorn"), shape=((0, 3), (1, 1), (70, 33), (300, 128)), iterations=(0, 1, 8), masked=(False, True)
)
def test_sinkhorn(kernel, shape, iterations, masked):
    given = {"logits": draw(*shape)} | ({"mask": mask_of(shape[0])} if masked else {})
    specs = {name: spec_of(array) for name, array in given.items()}
    (found,) = run(kernel, routing.sinkhorn(specs["logits"], iterations, specs.get("mask")), **given)
    if iterations == 8 and shape[0]:
        asserts.within_ulps(found.sum(axis=0), np.full(shape[1], 1 / shape[1], np.float32), bounds.BALANCED_ULPS)


@pytest.mark.rule("ALL-6")
@pytest.mark.parametrize("kernel", kernels("sinkhorn"))
def test_tokens_of_nan_leave_the_balance_of_the_others_alone(kernel):
    """It is that without them; how many tokens count only scales both factors."""
    logits, mask = draw(150, 33), np.ones(150, np.uint8)
    bad = [3, 70, 149]
    logits[bad, [0, 32, 5]] = np.nan, np.inf, np.nan
    mask[bad] = 0
    (found,) = Native(kernel, check=False)(routing.sinkhorn(spec_of(logits), 4), [logits, None])
    call = routing.sinkhorn(spec_of(logits), 4, spec_of(mask))
    (expected,) = Native(kernel, check=False)(call, [logits, mask])
    assert np.isnan(found[bad]).all()
    asserts.within_ulps(np.delete(found, bad, axis=0), np.delete(expected, bad, axis=0), bounds.BALANCED_WITHOUT_ULPS)


# ---- slots


@pytest.mark.rule("LYR-3")
@pytest.mark.matrix(kernel=kernels("count_experts"), shape=SHAPES, sequences=(1, 3), missing=(0.0, 0.3))
def test_counts(kernel, shape, sequences, missing):
    tokens, experts, k = shape
    chosen = slots(tokens, k, experts, "count", missing)
    sizes = np.array([tokens] if sequences == 1 else [tokens // 4, 0, tokens // 2], np.int32)
    run(
        kernel,
        routing.count_experts(spec_of(chosen), spec_of(sizes), experts),
        experts=chosen,
        sequence_sizes=sizes,
    )


@pytest.mark.rule("LYR-5", "GRP-11")
@pytest.mark.matrix(
    kernel=kernels("sort_slots"),
    shape=(*SHAPES, (3000, 16, 4), (500, 5000, 2), (64, 65535, 1)),
    align=(1, 8, 16),
    missing=(0.0, 0.4),
    rows=("enough", "few", "one"),
    weighted=(False, True),
)
def test_order_of_slots(kernel, shape, align, missing, rows, weighted):
    tokens, experts, k = shape
    chosen = slots(tokens, k, experts, "sort", missing)
    worst = -(-(tokens * k + experts * (align - 1)) // align) * align
    count = {"enough": worst, "few": -(-tokens * k // (2 * align)) * align, "one": align}[rows]
    call = routing.sort_slots(spec_of(chosen), experts, count, align, weights=weighted)
    weights = draw(tokens, k, seed="weights") if weighted else None
    sizes, source, inverse, dropped, _ = run(kernel, call, experts=chosen, weights=weights)
    assert (sizes % align == 0).all()
    assert sizes.sum() <= count
    placed = inverse.reshape(-1)
    asserts.bitwise(source[placed[placed >= 0]], np.flatnonzero(placed >= 0).astype(np.int32))
    inside = (chosen >= 0) & (chosen < experts)
    assert dropped[0] == (inside & (inverse < 0)).sum()


@pytest.mark.parametrize("kernel", kernels("sort_slots"))
def test_one_expert_takes_all(kernel):
    chosen = np.full((5000, 1), 2, np.int32)
    sizes, source, *_ = run(kernel, routing.sort_slots(spec_of(chosen), 4, 5000, 1), experts=chosen)
    asserts.bitwise(sizes, np.array([0, 0, 5000, 0], np.int32))
    asserts.bitwise(source, np.arange(5000, dtype=np.int32))


@pytest.mark.rule("LYR-9", "LYR-10")
@pytest.mark.matrix(
    kernel=kernels("send_order"),
    shape=((0, 4, 2, 2), (1, 1, 1, 1), (7, 6, 5, 3), (200, 128, 8, 8), (33, 256, 6, 256), (3000, 16, 4, 4)),
    budget=(0, 1, 24, 2000),
    missing=(0.0, 0.4),
    weighted=(False, True),
)
def test_order_cut_into_what_ranks_get(kernel, shape, budget, missing, weighted):
    tokens, experts, k, ranks = shape
    chosen = slots(tokens, k, experts, "send", missing)
    order = routing.sort_slots(spec_of(chosen), experts, tokens * k, 1)
    sizes, source, inverse, *_ = Native(kernels("sort_slots")[0])(order, [chosen, None])
    call = routing.send_order(spec_of(sizes), spec_of(source), spec_of(inverse), ranks, budget, weights=weighted)
    given = {"group_sizes": sizes, "source": source, "inverse": inverse}
    given |= {"weights": draw(tokens, k, seed="weights")} if weighted else {}
    kept, sent, found, places, dropped, _ = run(kernel, call, **given)
    placed = places.reshape(-1)
    asserts.bitwise(sent[placed[placed >= 0]], np.flatnonzero(placed >= 0).astype(np.int32))
    assert kept.sum() + dropped[0] == sizes.sum()
    assert kept.reshape(ranks, -1).sum(1).max() <= budget
    own = experts // ranks
    for rank, (ids, slot) in enumerate(zip(found.reshape(ranks, -1), sent.reshape(ranks, -1), strict=True)):
        asserts.bitwise(chosen.reshape(-1)[slot[slot >= 0]], (ids[ids >= 0] + rank * own).astype(np.int32))


@pytest.mark.rule("GRP-4")
@pytest.mark.parametrize("kernel", kernels("send_order"))
def test_bad_orders_stay_in_bounds(kernel):
    """Sizes that no order has, and maps that lead outside."""
    sizes = np.array([-3, 2**31 - 1, 4, 9], np.int32)
    source = np.array([5, -7, 2**31 - 1, 0, 3], np.int32)
    inverse = np.array([[0, -2], [9, 4], [2**31 - 1, 1]], np.int32)
    call = routing.send_order(spec_of(sizes), spec_of(source), spec_of(inverse), 2, 4, weights=True)
    run(kernel, call, group_sizes=sizes, source=source, inverse=inverse, weights=draw(3, 2))


@pytest.mark.rule("LYR-18")
@pytest.mark.matrix(
    kernel=kernels("rank_slots"),
    shape=((0, 4, 2, 2), (1, 1, 1, 1), (7, 6, 5, 3), (200, 128, 8, 8), (33, 256, 6, 256), (3000, 16, 4, 4)),
    missing=(0.0, 0.4),
)
def test_ranks_of_slots(kernel, shape, missing):
    tokens, experts, k, ranks = shape
    chosen = slots(tokens, k, experts, "ranks", missing)
    (found,) = run(kernel, routing.rank_slots(spec_of(chosen), experts, ranks), experts=chosen)
    for mine, theirs in zip(found, chosen, strict=True):
        inside = theirs[(theirs >= 0) & (theirs < experts)]
        assert sorted(mine[mine >= 0]) == sorted(set(inside // (experts // ranks))), "each rank of a token once"


@pytest.mark.rule("LYR-18")
@pytest.mark.matrix(
    kernel=kernels("row_slots"),
    shape=((0, 4, 2, 2), (1, 1, 1, 1), (7, 6, 5, 3), (200, 128, 8, 8), (33, 256, 6, 256), (3000, 16, 4, 4)),
    budget=(0, 1, 24, 2000),
    missing=(0.0, 0.4),
    entries=("all", "one"),
    twice=(False, True),
    weighted=(False, True),
)
def test_what_rows_of_several_slots_say(kernel, shape, budget, missing, entries, twice, weighted):
    tokens, experts, k, ranks = shape
    own = experts // ranks
    chosen = slots(tokens, k, experts, "rows", missing)
    if twice:
        chosen[::2, k // 2 :] = chosen[::2, :1]
    (firsts,) = Native(kernels("rank_slots")[0])(routing.rank_slots(spec_of(chosen), experts, ranks), [chosen])
    order = routing.sort_slots(spec_of(firsts), ranks, tokens * k, 1)
    sizes, source, inverse, *_ = Native(kernels("sort_slots")[0])(order, [firsts, None])
    cut = routing.send_order(spec_of(sizes), spec_of(source), spec_of(inverse), ranks, budget)
    _, sent, _, places, *_ = Native(kernels("send_order")[0])(cut, [sizes, source, inverse, None])
    each = min(k, own) if entries == "all" else 1
    call = routing.row_slots(spec_of(chosen), spec_of(sent), experts, ranks, each, weights=weighted)
    given = {"experts": chosen, "sent": sent, "places": places}
    given |= {"weights": draw(tokens, k, seed="weights")} if weighted else {}
    local, at, dropped, of_rows = run(kernel, call, **given)
    placed = at.reshape(-1) >= 0
    entry = at.reshape(-1)[placed]
    assert len(set(entry)) == len(entry) == (local >= 0).sum()
    rank = entry // each // max(budget, 1)
    asserts.bitwise(local.reshape(-1)[entry], (chosen.reshape(-1)[placed] - rank * own).astype(np.int32))
    asserts.bitwise(sent[entry // each] // k, (np.flatnonzero(placed) // k).astype(np.int32), "the token of the row")
    assert dropped[0] + placed.sum() == ((chosen >= 0) & (chosen < experts)).sum()
    if weighted:
        asserts.bitwise(of_rows.reshape(-1)[entry], given["weights"].reshape(-1)[placed])


@pytest.mark.rule("GRP-4")
@pytest.mark.parametrize("kernel", kernels("row_slots"))
def test_rows_of_bad_orders_stay_in_bounds(kernel):
    """Maps that lead outside, and to places of other tokens and ranks."""
    chosen = np.array([[0, 3], [2**31 - 1, -(2**31)], [1, 0]], np.int32)
    sent = np.array([5, -7, 2**31 - 1, 0, 3, 3, -(2**31), 6], np.int32)
    places = np.array([[9, -2], [8, 4], [2**31 - 1, -(2**31)]], np.int32)
    call = routing.row_slots(spec_of(chosen), spec_of(sent), 4, 2, 2, weights=True)
    run(kernel, call, experts=chosen, sent=sent, places=places, weights=draw(3, 2))


@pytest.mark.rule("LYR-8")
@pytest.mark.matrix(
    kernel=kernels("drop_slots"),
    shape=(*SHAPES, (3000, 4, 2)),
    capacity=(1, 7, 600),
    weighted=(False, True),
    missing=(0.0, 0.3),
)
def test_capacity(kernel, shape, capacity, weighted, missing):
    tokens, experts, k = shape
    given: dict[str, Any] = {"experts": slots(tokens, k, experts, "drop", missing)}
    # Few different weights, so that there are ties, and some that are no numbers.
    given["weights"] = (np.abs(draw(tokens, k, seed="weights")) * 4).astype(np.int32).astype(np.float32)
    given["weights"].reshape(-1)[::97] = np.nan
    call = routing.drop_slots(spec_of(given["experts"]), experts, capacity, by_weight=weighted)
    kept, *_ = run(kernel, call, **given)
    counts = np.bincount(kept[kept >= 0], minlength=experts)
    assert counts.max(initial=0) <= capacity


@pytest.mark.rule("LYR-15")
@pytest.mark.parametrize("kernel", kernels("hash_experts"))
@pytest.mark.parametrize("shape", [(0, 4, 2), (100, 1, 1), (999, 64, 6), (50, 40, 32), (70, 32, 32)], ids=str)
def test_experts_by_token_id(kernel, shape):
    tokens, experts, k = shape
    ids = np.arange(tokens, dtype=np.int32) * 7919 - 300
    (found,) = run(kernel, routing.hash_experts(spec_of(ids), k, experts), token_ids=ids)
    assert ((found >= 0) & (found < experts)).all()
    assert all(len(set(row)) == k for row in found)


@pytest.mark.parametrize("kernel", kernels("hash_experts"))
def test_experts_from_a_table(kernel):
    ids, table = np.array([2, 0, -1, 3, 2**31 - 1], np.int32), np.arange(6, dtype=np.int32).reshape(3, 2)
    call = routing.hash_experts(spec_of(ids), 2, 6, spec_of(table))
    (found,) = run(kernel, call, token_ids=ids, table=table)
    asserts.bitwise(found, np.array([[4, 5], [0, 1], [-1, -1], [-1, -1], [-1, -1]], np.int32))


# ---- rows

WIDTHS = (1, 3, 8, 100, 257, 2048)


@pytest.mark.rule("LYR-5", "MAT-7")
@pytest.mark.matrix(
    kernel=kernels("gather_rows"),
    width=WIDTHS,
    dtype=(*cases.DTYPES, "float8_e4m3fn", "uint8", "int32"),
    slots_per_row=(1, 3),
    weighted=(False, True),
    unaligned=(False, True),
    valid=lambda dtype, weighted, **_: not weighted or dtype in cases.DTYPES,
)
def test_gathered_rows(kernel, width, dtype, slots_per_row, weighted, unaligned):
    rows = np.abs(cases.normal((37, width), "float32", "gather")).astype(cases.numpy_dtype(dtype))
    source = np.random.default_rng(1).integers(-2, 37 * slots_per_row + 2, 201).astype(np.int32)
    source[5], source[6] = 2**31 - 1, -(2**31)
    weights = draw(37, slots_per_row, seed="weights") if weighted else None
    call = routing.gather_rows(spec_of(rows), spec_of(source), slots_per_row, spec_of(weights) if weighted else None)
    (found,) = Native(kernel, unaligned=unaligned)(call, [rows, source, weights, None])
    asserts.zero(found[[5, 6]].astype(np.float32), "rows without a source")


@pytest.mark.rule("LYR-5", "MAT-7")
@pytest.mark.parametrize("kernel", kernels("gather_rows"))
@pytest.mark.parametrize(("width", "unaligned"), [(2816, False), (2816, True), (2820, False)])
@pytest.mark.parametrize("order", ["permuted", "placed", "any"])
def test_gathered_rows_of_a_large_result(kernel, width, unaligned, order):
    """Of 26 MB, which kernels may write in another order: each slot once, its place given or not, or any again and
    again."""
    rows, slots, count = draw(1500, width).astype(cases.numpy_dtype("bfloat16")), 3, 4700
    generator = np.random.default_rng(3)
    source = np.concatenate([generator.permutation(1500 * slots), np.full(count - 1500 * slots, -1)]).astype(np.int32)
    if order == "any":
        source[::7], source[3], source[4] = (
            generator.integers(-2, 1500 * slots + 2, len(source[::7])),
            -(2**31),
            2**31 - 1,
        )
        source[20:40] = source[20]
    places = None
    if order == "placed":
        source[10:3000:3] = -1  # slots without a row, and rows without a slot
        places = np.full(1500 * slots, -1, np.int32)
        places[source[source >= 0]] = np.flatnonzero(source >= 0)
        places = np.where(places < 0, np.resize([-1, count, 2**31 - 1, -(2**31)], places.shape), places)
        places = places.astype(np.int32).reshape(1500, slots)
    given = None if places is None else spec_of(places)
    call = routing.gather_rows(spec_of(rows), spec_of(source), slots, None, given)
    (found,) = Native(kernel, unaligned=unaligned)(call, [rows, source, None, places])
    asserts.zero(found[source < 0].astype(np.float32), "rows without a source")


@pytest.mark.parametrize("kernel", kernels("gather_rows"))
@pytest.mark.parametrize("rank", [1, 2])
def test_gathered_elements(kernel, rank):
    """What rows have per slot comes back in the order of the slots, such as gradients of their weights."""
    rows = draw(*(90, 33)[:rank])
    source = np.random.default_rng(5).integers(-2, 92, (41, 3)).astype(np.int32)
    run(kernel, routing.gather_rows(spec_of(rows), spec_of(source)), rows=rows, source=source)


@pytest.mark.rule("LYR-16")
@pytest.mark.matrix(
    kernel=kernels("gather_rows"),
    shape=((1, 1), (7, 90), (56, 37)),
    dtype=("float32", "float8_e8m0fnu"),
    slots_per_row=(1, 3),
)
def test_gathered_columns(kernel, shape, dtype, slots_per_row):
    codes = np.arange(np.prod(shape)).reshape(shape).astype(np.uint8) % 255
    rows = draw(*shape) if dtype == "float32" else codes.view(cases.numpy_dtype(dtype))
    source = np.random.default_rng(6).integers(-2, shape[1] * slots_per_row + 2, 70).astype(np.int32)
    call = routing.gather_rows(spec_of(rows), spec_of(source), slots_per_row, axis=1)
    run(kernel, call, rows=rows, source=source)


@pytest.mark.rule("LYR-7", "GRP-4")
@pytest.mark.matrix(
    kernel=kernels("pad_groups"),
    sizes=((5, 0, 16, 3), (0, 0), (-4, 30, 2), (2**31 - 1, 7), (16, 32, 0, 16), (1,) * 3000),
    align=(1, 8, 16),
)
def test_padded_groups(kernel, sizes, align):
    sizes = np.array(sizes, np.int32)
    padded, source, inverse = run(kernel, routing.pad_groups(spec_of(sizes), 64, align), group_sizes=sizes)
    asserts.bitwise(source[inverse[inverse >= 0]], np.flatnonzero(inverse >= 0).astype(np.int32))
    if not (np.maximum(sizes, 0) % align).any() and sizes.sum() <= 64:
        asserts.bitwise(padded, np.maximum(sizes, 0).astype(np.int32))


@pytest.mark.rule("LYR-6", "ALL-2")
@pytest.mark.matrix(
    kernel=kernels("combine_rows"),
    width=WIDTHS,
    dtype=cases.DTYPES,
    result=cases.DTYPES,
    k=(1, 2, 5, 32),
    weighted=(False, True),
    unaligned=(False, True),
)
def test_combined_rows(kernel, width, dtype, result, k, weighted, unaligned):
    rows = cases.normal((90, width), dtype, "combine")
    inverse = np.random.default_rng(2).integers(-3, 93, (41, k)).astype(np.int32)
    inverse[7] = -1
    weights = draw(41, k, seed="weights") if weighted else None
    call = routing.combine_rows(spec_of(rows), spec_of(inverse), result, spec_of(weights) if weighted else None)
    (found,) = Native(kernel, unaligned=unaligned)(call, [rows, inverse, weights, None])
    asserts.zero(found[7], "a token without rows")


@pytest.mark.rule("LYR-6")
@pytest.mark.matrix(
    kernel=kernels("combine_dot"), width=WIDTHS, dtype=cases.DTYPES, k=(1, 2, 5, 32), unaligned=(False, True)
)
def test_gradients_of_combining_weights(kernel, width, dtype, k, unaligned):
    rows, grad = cases.normal((90, width), dtype, "dot"), cases.normal((41, width), dtype, "grad")
    inverse = np.random.default_rng(3).integers(-3, 93, (41, k)).astype(np.int32)
    call = routing.combine_dot(spec_of(rows), spec_of(grad), spec_of(inverse))
    Native(kernel, unaligned=unaligned)(call, [rows, grad, inverse])


@pytest.mark.rule("ALL-6", "GRP-5")
@pytest.mark.parametrize("kernel", kernels("combine_rows"))
def test_rows_without_a_slot_are_not_read(kernel):
    rows, inverse = draw(4, 64), np.array([[0, -1], [2, 4]], np.int32)
    rows[[1, 3]] = np.nan
    call = routing.combine_rows(spec_of(rows), spec_of(inverse), "float32")
    (found,) = run(kernel, call, rows=rows, inverse=inverse)
    asserts.bitwise(found, rows[[0, 2]])


# ---- balance


@pytest.mark.rule("LYR-4")
@pytest.mark.parametrize("kernel", kernels("bias_update"))
def test_bias_follows_the_sign_of_what_an_expert_lacks(kernel):
    bias, load = draw(5), np.array([3, 4, 5, 2**31 - 1, 4], np.int32)
    run(kernel, routing.bias_update(spec_of(bias), 0.001), bias=bias, load=load)
    load = np.array([3, 4, 5, 4, 4], np.int32)
    (found,) = run(kernel, routing.bias_update(spec_of(bias), 0.001), bias=bias, load=load)
    asserts.bitwise(found[[1, 3, 4]], bias[[1, 3, 4]])


@pytest.mark.rule("LYR-14")
@pytest.mark.matrix(
    kernel=kernels("margin_histogram"),
    shape=((0, 4, 2), (200, 16, 4), (3000, 128, 8), (60, 1024, 31)),
    masked=(False, True),
)
@pytest.mark.parametrize("score", routing.SCORES)
def test_histograms_of_margins(kernel, shape, masked, score):
    tokens, experts, k = shape
    given = {"logits": draw(tokens, experts), "bias": draw(experts, seed="bias", scale=0.1)}
    mask = mask_of(tokens) if masked else None
    call = routing.margin_histogram(
        spec_of(given["logits"]), k, score, 50, -0.5, 0.5, mask if mask is None else spec_of(mask)
    )
    arrays = [given["logits"], given["bias"], mask]
    (found,) = Native(kernel, check=False)(call, arrays)
    valid = tokens if mask is None else int((mask != 0).sum())
    assert (found.sum(axis=1) == valid).all()
    # Margins near an edge may be on either side, so sums up to a bin are between those with shifted edges.
    step = np.float32(bounds.MARGIN_STEP)
    shifted = [dict(call.params) | {"low": -0.5 + move, "high": 0.5 + move} for move in (step, -step)]
    more, fewer = (reference_routing.meaning(call, arrays, each)["counts"].cumsum(axis=1) for each in shifted)
    ours = found.cumsum(axis=1)
    assert ((fewer <= ours) & (ours <= more)).all()


@pytest.mark.rule("LYR-14")
@pytest.mark.parametrize("kernel", kernels("quantile_bias"))
def test_bias_from_quantiles(kernel):
    counts = np.random.default_rng(4).integers(0, 9, (40, 100)).astype(np.int32)
    counts[3], counts[5] = 0, 2**20
    run(kernel, routing.quantile_bias(spec_of(counts), 4, -1.0, 1.0), counts=counts)
