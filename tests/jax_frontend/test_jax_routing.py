"""Routing in JAX: against published formulas, against the rules on the native kernels, and under transformations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

import jax_grouped
from grouped_core import routing
from grouped_core.calls import spec_of
from grouped_core.routing_spec import router_option
from jax_grouped import route
from tests import asserts, bounds, cases
from tests.native.runner import Native

T, E, K = 24, 16, 4


def draw(*shape: int, seed: object = 0) -> NDArray[np.float32]:
    return cases.normal(shape, "float32", "jax routing", seed)


# ---- definitions of published models, in float64


def top(values: NDArray[np.float64], k: int) -> NDArray[np.int64]:
    return np.argsort(-values, axis=-1, kind="stable")[..., :k]


def softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-x))


def of_best_groups(
    choice: NDArray[np.float64], groups: int, kept: int, scores: NDArray[np.float64]
) -> NDArray[np.float64]:
    """`choice` with minus infinity outside of the `kept` groups with the best `scores` [T, groups]."""
    mask = np.zeros((len(choice), groups))
    np.put_along_axis(mask, top(scores, kept), 1.0, axis=-1)
    return np.where(np.repeat(mask, choice.shape[1] // groups, axis=1) > 0, choice, -np.inf)


def deepseek_v3(z: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """modeling_deepseek_v3: sigmoid, bias for the choice, sums of the two best per group, 4 of 8 groups, times 2.5."""
    scores = sigmoid(z)
    choice = scores + b
    grouped = np.sort(choice.reshape(len(z), 8, -1), axis=-1)[..., -2:].sum(axis=-1)
    experts = top(of_best_groups(choice, 8, 4, grouped), 8)
    weights = np.take_along_axis(scores, experts, axis=1)
    return 2.5 * weights / (weights.sum(axis=1, keepdims=True) + 1e-20), experts


def deepseek_v2(z: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """group_limited_greedy: softmax, the best of each group, 3 of 8 groups, times 16, not normalised."""
    scores = softmax(z)
    experts = top(of_best_groups(scores, 8, 3, scores.reshape(len(z), 8, -1).max(axis=-1)), 6)
    return 16.0 * np.take_along_axis(scores, experts, axis=1), experts


def qwen3(z: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Softmax, top 8, norm_topk_prob."""
    scores = softmax(z)
    experts = top(scores, 8)
    weights = np.take_along_axis(scores, experts, axis=1)
    return weights / weights.sum(axis=1, keepdims=True), experts


def mixtral(z: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Softmax, top 2, normalised: the softmax of the chosen logits."""
    scores = softmax(z)
    experts = top(scores, 2)
    weights = np.take_along_axis(scores, experts, axis=1)
    return weights / weights.sum(axis=1, keepdims=True), experts


def gpt_oss(z: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Top 4 of the logits, softmax of these."""
    experts = top(z, 4)
    return softmax(np.take_along_axis(z, experts, axis=1)), experts


def olmoe(z: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Softmax, top 8, norm_topk_prob off."""
    scores = softmax(z)
    experts = top(scores, 8)
    return np.take_along_axis(scores, experts, axis=1), experts


def biased_sigmoid(k: int, scale: float) -> Any:
    """GLM-4.5 and Kimi-K2: DeepSeek-V3 with one group."""

    def define(z: NDArray[Any], b: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        scores = sigmoid(z)
        experts = top(scores + b, k)
        weights = np.take_along_axis(scores, experts, axis=1)
        return scale * weights / (weights.sum(axis=1, keepdims=True) + 1e-20), experts

    return define


ONE_GROUP = {"num_groups": 1, "topk_groups": 1, "score": "sigmoid"}
MODELS: dict[str, tuple[Any, int, int, dict[str, Any]]] = {
    "deepseek_v3": (
        deepseek_v3,
        *(256, 8),
        {"score": "sigmoid", "num_groups": 8, "topk_groups": 4, "group_topk": 2, "scale": 2.5},
    ),
    "deepseek_v2": (deepseek_v2, 160, 6, {"num_groups": 8, "topk_groups": 3, "group_topk": 1, "scale": 16.0}),
    "qwen3": (qwen3, 128, 8, {"normalize": True}),
    "mixtral": (mixtral, 8, 2, {"normalize": True}),
    "mixtral_after": (mixtral, 8, 2, {"after_topk": True}),
    "gpt_oss": (gpt_oss, 128, 4, {"after_topk": True}),
    "olmoe": (olmoe, 64, 8, {}),
    "glm": (biased_sigmoid(8, 1.0), 160, 8, ONE_GROUP),
    "kimi": (biased_sigmoid(8, 2.827), 384, 8, ONE_GROUP | {"scale": 2.827}),
}


@pytest.mark.rule("LYR-1", "LYR-2")
@pytest.mark.parametrize("name", MODELS)
def test_routers_of_published_models(name: str) -> None:
    define, experts, k, options = MODELS[name]
    logits = draw(64, experts, seed=name)
    bias = 0.1 * draw(experts, seed="bias") if "score" in options else None
    weights, chosen, _ = route.topk_router(logits, k, bias=bias, **options)
    wide = np.asarray(logits, np.float64)
    expected, expected_experts = define(wide, 0.0 if bias is None else np.asarray(bias, np.float64))
    asserts.bitwise(chosen, expected_experts.astype(np.int32), "experts")
    error = bounds.score_rate(wide, k) * np.abs(expected)
    asserts.within(weights, bounds.Bounded(expected, error, "float32"), "weights")


# ---- the rules, on the same kernels

OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "normalized": {"normalize": True, "scale": 2.0},
    "after_topk": {"after_topk": True},
    "sigmoid": {"score": "sigmoid"},
    "groups": {"score": "sqrt_softplus", "num_groups": 4, "topk_groups": 2},
    "jitter": {"jitter": 0.25},
    "sinkhorn": {"score": "sigmoid", "sinkhorn": 8},
    "capacity": {"capacity_factor": 0.75},
    "position": {"score": "sigmoid", "capacity_factor": 0.75, "drop": "position"},
}
KEY = np.array([5, 6], np.uint32)
D_LOSSES = np.array([1.5, -0.5], np.float32)


def by_the_rule(logits: Any, options: dict[str, Any], given: dict[str, Any], d_weights: Any) -> tuple[Any, ...]:
    """weights, experts, load, dropped, losses, gradient of the logits: from the rule on NumPy arrays."""
    run = Native(check=False)
    op = router_option(logits.shape[1], K, **options)
    tokens = np.array([len(logits)], np.int32)
    chosen = routing.choose(run, op, logits, tokens, **given)
    found = routing.losses(run, op, chosen.sums)
    back = {name: given[name] for name in ("mask", "key", "sequence_sizes") if name in given}
    saved = (chosen.read, chosen.first, chosen.experts, found, tokens)
    gradient = routing.router_grad(run, op, *saved, d_weights, D_LOSSES, spec_of(logits), **back)
    dropped = 0 if chosen.dropped is None else int(chosen.dropped[0])
    return chosen.weights, chosen.experts, chosen.load[0], dropped, found.values, gradient


def value(logits: Any, d_weights: Any, arguments: dict[str, Any]) -> Any:
    weights, experts, aux = route.topk_router(logits, K, **arguments)
    total = (weights * d_weights).sum() + D_LOSSES[0] * aux.aux_loss + D_LOSSES[1] * aux.z_loss
    return total, (weights, experts, aux)


def extras(names: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Operands as the public function and as the rule takes them."""
    public: dict[str, Any] = {}
    if "bias" in names:
        public["bias"] = 0.2 * draw(E, seed="bias")
    if "mask" in names:
        public["mask"] = np.arange(T) % 5 != 3
    if "sequences" in names:
        public["sequence_sizes"] = np.array([7, 0, 11, 6], np.int32)
    if "replay" in names:
        public["experts"] = np.stack([np.roll(np.arange(E), t)[:K] for t in range(T)]).astype(np.int32)
        public["experts"][::4, 1] = -1
    own = {name: each.astype(np.uint8) if name == "mask" else each for name, each in public.items()}
    return {name: jnp.asarray(each) for name, each in public.items()}, own


@pytest.mark.rule("ALL-1", "LYR-1", "LYR-3", "LYR-8", "LYR-15")
@pytest.mark.matrix(
    name=tuple(OPTIONS), given=("plain", "bias mask", "sequences", "replay mask sequences"), with_losses=(True, False)
)
def test_values_and_gradients_are_those_of_the_rule(name: str, given: str, with_losses: bool) -> None:
    logits, d_weights = draw(T, E, seed=name), draw(T, K, seed="dw")
    options = OPTIONS[name] | ({"aux_coeff": 0.3, "z_coeff": 0.2} if with_losses else {})
    public, own = extras(given)
    if "jitter" in options:
        public["key"], own["key"] = jnp.asarray(KEY), KEY
    expected = by_the_rule(logits, options, own, d_weights)
    run = jax.jit(jax.value_and_grad(lambda z, operands: value(z, d_weights, options | operands), has_aux=True))
    (_, (weights, experts, aux)), gradient = run(jnp.asarray(logits), public)
    losses = np.stack([aux.aux_loss, aux.z_loss, aux.entropy])
    found = (weights, experts, aux.load, int(aux.dropped), losses, gradient)
    for what, a, e in zip(
        ("weights", "experts", "load", "dropped", "losses", "d_logits"), found, expected, strict=True
    ):
        asserts.bitwise(a, e, what) if not isinstance(e, int) else None
    assert found[3] == expected[3]
    assert bool(aux.overflow) == (expected[3] > 0)


@pytest.mark.rule("LYR-3", "ALL-4")
def test_only_what_has_a_gradient_is_computed() -> None:
    logits = jnp.asarray(draw(T, E))

    def calls_of(part: Any) -> str:
        return str(jax.make_jaxpr(jax.grad(lambda z: part(*route.topk_router(z, K, aux_coeff=1.0))))(logits))

    assert "name='router_grad'" in calls_of(lambda weights, experts, aux: weights.sum())
    assert "name='router_grad'" in calls_of(lambda weights, experts, aux: aux.aux_loss)
    for part in ("entropy", "z_loss"):
        gradient = jax.grad(lambda z, part=part: getattr(route.topk_router(z, K, aux_coeff=1.0)[2], part))(logits)
        asserts.zero(gradient, part)
    assert "router_grad" not in calls_of(lambda weights, experts, aux: aux.entropy)
    plain = jax.make_jaxpr(jax.grad(lambda s: s * route.topk_router(logits, K)[0].sum()))(1.0)
    assert "router_grad" not in str(plain), "the logits are constant"


@pytest.mark.rule("LYR-1", "LYR-16")
def test_logits_are_kept_only_where_their_gradient_reads_them() -> None:
    def kept(**options: Any) -> set[tuple[int, ...]]:
        _, back = jax.vjp(lambda z: route.topk_router(z, K, **options)[0], jnp.asarray(draw(T, E)))
        return {each.shape for each in jax.tree.leaves(back)}

    assert (T, E) in kept()
    assert (T, E) in kept(after_topk=True, aux_coeff=0.1)
    assert (T, E) not in kept(after_topk=True)
    assert (T, E) not in kept(normalize=True, capacity_factor=0.75)


@pytest.mark.rule("LYR-3")
def test_losses_of_sequences_are_means() -> None:
    """Each sequence on its own, averaged over those that have tokens; the z-loss is the mean over tokens."""
    logits, sizes = draw(T, E), [7, 0, 11, 6]
    options = {"aux_coeff": 0.3, "z_coeff": 0.2}
    aux = route.topk_router(logits, K, sequence_sizes=np.array(sizes, np.int64), **options)[2]
    ends = np.cumsum(sizes)
    parts = [
        route.topk_router(logits[end - size : end], K, **options)[2]
        for size, end in zip(sizes, ends, strict=True)
        if size
    ]
    expected = np.mean([float(part.aux_loss) for part in parts])
    asserts.within(aux.aux_loss, bounds.Bounded(np.float64(expected), np.float64(bounds.FUNCTIONS), "float32"))
    asserts.bitwise(aux.load, np.sum([part.load for part in parts], axis=0).astype(np.int32))


@pytest.mark.rule("LYR-8")
def test_capacity_drops_what_it_says() -> None:
    """All tokens want expert 0: with capacity C the C largest weights stay, and dropped ones have no gradient."""
    logits = draw(T, E).copy()
    logits[:, 0] += 20
    capacity = int(np.ceil(T * K * 0.5 / E))

    def run(z: Any) -> Any:
        weights, experts, aux = route.topk_router(z, K, score="sigmoid", normalize=False, capacity_factor=0.5)
        return weights.sum(), (weights, experts, aux)

    (_, (weights, experts, aux)), gradient = jax.value_and_grad(run, has_aux=True)(jnp.asarray(logits))
    full, first, _ = route.topk_router(logits, K, score="sigmoid", normalize=False)
    kept = np.asarray(experts) >= 0
    for e in range(E):
        (slots,) = np.nonzero(np.asarray(first).ravel() == e)
        best = slots[np.argsort(-np.asarray(full).ravel()[slots], kind="stable")][:capacity]
        assert set(np.nonzero(kept.ravel() & (np.asarray(first).ravel() == e))[0]) == set(best), f"expert {e}"
    asserts.zero(weights[~kept], "weights of dropped slots")
    assert int(aux.dropped) == (~kept).sum()
    assert int(aux.load.sum()) == T * K, "the load counts what was asked for"
    touched = np.zeros((T, E), bool)
    np.put_along_axis(touched, np.asarray(first), kept, axis=1)
    asserts.zero(np.asarray(gradient)[~touched], "gradients of dropped slots")


@pytest.mark.rule("LYR-15")
def test_replay_has_the_bits_of_the_pass_that_chose() -> None:
    logits, d = jnp.asarray(draw(T, E)), draw(T, K, seed="dw")

    def run(z: Any, given: Any) -> Any:
        weights, experts, aux = route.topk_router(z, K, score="sigmoid", experts=given, aux_coeff=1.0)
        return (weights * d).sum() + aux.aux_loss, experts

    (first, experts), gradient = jax.value_and_grad(run, has_aux=True)(logits, None)
    (again, same), repeated = jax.value_and_grad(run, has_aux=True)(logits, experts)
    for a, e in ((again, first), (same, experts), (repeated, gradient)):
        asserts.bitwise(a, e)


@pytest.mark.rule("LYR-15")
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_experts_given_out_of_range_are_none(dtype: str) -> None:
    """Also those that 4 bytes would hold as experts."""
    limits = np.iinfo(dtype)
    outside = [each for each in (-1, E, 2**32, 2**32 + 1, -(2**32) + 2) if limits.min <= each <= limits.max]
    with jax.enable_x64(True):
        given = jnp.asarray([[each, 1] for each in outside], dtype)
        logits = jnp.zeros((len(outside), E), jnp.float32)
        weights, experts, aux = route.topk_router(logits, 2, experts=given)
    asserts.filled(np.asarray(experts)[:, 0], -1, "experts")
    asserts.zero(np.asarray(weights)[:, 0], "weights")
    asserts.filled(np.asarray(experts)[:, 1], 1, "experts in range")
    assert int(aux.load.sum()) == len(outside)


@pytest.mark.rule("LYR-15")
def test_hashed_experts() -> None:
    ids = np.array([3, 7, 3, 2**20, 0], np.int32)
    experts = np.asarray(jax.jit(lambda ids: route.hash_experts(ids, K, E))(ids))
    asserts.bitwise(experts, routing.hash_experts(Native(check=False), ids, K, E))
    assert all(len(set(row)) == K for row in experts)
    asserts.bitwise(experts[0], experts[2])
    table = np.arange(8, dtype=np.int64).reshape(4, 2)
    chosen = route.hash_experts(np.array([1, 3, 4, -1], np.int32), 2, E, table=table.astype(np.int32))
    asserts.bitwise(chosen, np.array([[2, 3], [6, 7], [-1, -1], [-1, -1]], np.int32))
    with asserts.refused(ValueError, ("`k` of hash_experts: 17", "1 to 16")):
        route.hash_experts(ids, 17, E)


@pytest.mark.rule("LYR-1")
def test_jitter_depends_on_the_key_alone() -> None:
    logits = jnp.asarray(draw(T, E))
    one, same, other = (
        route.topk_router(logits, K, jitter=0.1, key=jnp.asarray(key, jnp.uint32))[0]
        for key in ([1, 2], [1, 2], [1, 3])
    )
    asserts.bitwise(one, same)
    assert np.any(np.asarray(one) != np.asarray(other))
    with asserts.refused(ValueError, ("`key` of topk_router", "None with jitter", "pass both")):
        route.topk_router(logits, K, jitter=0.1)


@pytest.mark.rule("LYR-14")
@pytest.mark.parametrize("masked", [False, True])
def test_quantile_balancing_against_the_formula(masked: bool) -> None:
    """A float64 histogram, whose bins are wider than what float32 changes in a margin."""
    tokens, bins, low, high = 512, 100, -1.0, 1.0
    logits, bias = draw(tokens, E, seed="q"), 0.1 * draw(E, seed="bias")
    mask = np.arange(tokens) % 3 != 0 if masked else np.ones(tokens, bool)
    new = route.balance_quantile(
        logits, bias, K, bins=bins, low=low, high=high, mask=jnp.asarray(mask) if masked else None
    )
    scores = sigmoid(np.asarray(logits, np.float64))
    margins = np.sort(scores + bias, axis=1)[:, -K - 1][:, None] - scores
    width = (high - low) / bins
    at = np.clip(np.floor((margins[mask] - low) / width), 0, bins - 1).astype(int)
    expected = np.zeros(E)
    for e in range(E):
        counts = np.cumsum(np.bincount(at[:, e], minlength=bins))
        expected[e] = low + width * (np.argmax(counts * E >= K * counts[-1]) + 1)
    expected -= expected.mean()
    asserts.within(new, bounds.Bounded(expected, np.full(E, width / 2), "float32"))
    load = route.topk_router(logits, K, score="sigmoid", bias=new)[2].load
    before = route.topk_router(logits, K, score="sigmoid", bias=bias)[2].load
    assert np.ptp(np.asarray(load)) < np.ptp(np.asarray(before))


# ---- padding of groups


@pytest.mark.rule("LYR-7")
@pytest.mark.parametrize("align", [1, 4, 16])
def test_padding_there_and_back(align: int) -> None:
    sizes, rows = np.array([3, 0, 8, 1], np.int64), draw(14, 5)  # two rows of tail
    d = draw(-(-(14 + 4 * (align - 1)) // align) * align, 5, seed="d")
    (padded, new_sizes, places), pull = jax.vjp(
        jax.jit(lambda rows: route.pad_groups(rows, sizes.astype(np.int32), align)), jnp.asarray(rows)
    )
    expected = [-(-size // align) * align for size in sizes]
    asserts.bitwise(new_sizes, np.asarray(expected, np.int32))
    starts, begin = np.cumsum(expected) - expected, np.cumsum(sizes) - sizes
    wanted, d_rows = np.zeros_like(d), np.zeros_like(rows)
    for start, first, size in zip(starts, begin, sizes, strict=True):
        wanted[start : start + size] = rows[first : first + size]
        d_rows[first : first + size] = d[start : start + size]
    asserts.bitwise(padded, wanted, "padded")
    zeros = jax.tree.map(lambda each: np.zeros(each.shape, jax.dtypes.float0), (new_sizes, places))
    asserts.bitwise(pull((jnp.asarray(d), *zeros))[0], d_rows, "gradient")
    back, pull = jax.vjp(lambda rows: route.unpad_groups(rows, places), padded)
    asserts.bitwise(back[:12], rows[:12])
    asserts.zero(back[12:], "tail")
    placed = np.zeros_like(d)
    for start, first, size in zip(starts, begin, sizes, strict=True):
        placed[start : start + size] = rows[first : first + size]
    asserts.bitwise(pull(jnp.asarray(rows))[0], placed, "gradient of unpadding")
    again, same_sizes, _ = route.pad_groups(padded, new_sizes, align)
    asserts.bitwise(again[: len(padded)], padded, "padding twice")
    asserts.bitwise(same_sizes, new_sizes)
    with asserts.refused(ValueError, ("`rows` of unpad_groups", "3 rows", "expected", "all rows of `pad_groups`")):
        route.unpad_groups(jnp.ones((3, 5)), places)


@pytest.mark.rule("GRP-10")
def test_no_tokens() -> None:
    x, experts = jnp.zeros((0, 5)), jnp.zeros((0, K), jnp.int32)
    weights, chosen, aux = route.topk_router(jnp.zeros((0, E)), K, aux_coeff=1.0, z_coeff=1.0, capacity_factor=1.0)
    assert weights.shape == chosen.shape == (0, K)
    asserts.zero(jnp.stack([aux.aux_loss, aux.z_loss, aux.entropy]), "losses of no tokens")
    rows, sizes, permutation = route.permute(x, experts, E)
    asserts.zero(sizes, "sizes")
    assert rows.shape == route.unpermute(rows, permutation).shape == (0, 5)
    assert route.hash_experts(jnp.zeros(0, jnp.int32), K, E).shape == (0, K)
    padded, new_sizes, _ = route.pad_groups(x, sizes, 4)
    asserts.zero(padded, "padding alone")
    asserts.zero(new_sizes, "empty groups stay empty")
    asserts.zero(route.balance_quantile(jnp.zeros((0, E)), jnp.zeros(E), K), "bias")


@pytest.mark.rule("LYR-5")
@pytest.mark.parametrize("dtype", ["uint8", "float8_e4m3fn", "int32", "float16"])
def test_rows_of_any_dtype_are_copied(dtype: str) -> None:
    x = jnp.arange(10).reshape(2, 5).astype(dtype)
    rows, _, permutation = route.permute(x, jnp.array([[0, 2], [1, 0]], jnp.int32), 3)
    asserts.bitwise(rows, np.asarray(x)[np.asarray(permutation.source) // 2])


@pytest.mark.rule("LYR-5", "ERR-1")
def test_a_gradient_of_rows_in_8_bits_is_refused() -> None:
    x, experts = jnp.ones((4, 8), jnp.float8_e4m3fn), jnp.zeros((4, 2), jnp.int32)
    with asserts.refused(ValueError, ["`x` of permute", "float8_e4m3fn that needs a gradient", "float16", "cast it"]):
        jax.grad(lambda x: route.permute(x, experts, 3)[0].astype("float32").sum())(x)


@pytest.mark.rule("LYR-5", "ERR-1")
def test_rows_of_other_dtypes_are_refused() -> None:
    x, sizes = jnp.zeros((2, 4), jnp.int16), jnp.array([2], jnp.int32)
    fragments = ("int16", "expected one of float32", "cast it")
    with asserts.refused(TypeError, ("`x` of permute", *fragments)):
        route.permute(x, jnp.zeros((2, 1), jnp.int32), 3)
    with asserts.refused(TypeError, ("`rows` of pad_groups", *fragments)):
        route.pad_groups(x, sizes, 4)
    with asserts.refused(TypeError, ("`rows` of unpad_groups", *fragments)):
        route.unpad_groups(x, route.pad_groups(jnp.zeros((2, 4)), sizes, 1)[2])


@pytest.mark.rule("LYR-5", "ERR-1")
def test_tokens_without_slots_and_rows_without_columns_are_refused() -> None:
    x, none = jnp.zeros((2, 4)), jnp.zeros((2, 0), jnp.int32)
    with asserts.refused(ValueError, ("`experts` of permute", "(2, 0)", "k of 1 or more", "pass -1")):
        route.permute(x, none, 3)
    with asserts.refused(ValueError, ("`experts` of routed_mlp", "(2, 0)", "k of 1 or more", "pass -1")):
        jax_grouped.routed_mlp(x, none, jnp.zeros((2, 0)), jnp.zeros((3, 4, 2)), jnp.zeros((3, 1, 4)))
    with asserts.refused(ValueError, ("`x` of permute", "(2, 0)", "1 or more columns", "pass rows")):
        route.permute(x[:, :0], none, 3)
    with asserts.refused(ValueError, ("`rows` of pad_groups", "(2, 0)", "1 or more columns", "pass rows")):
        route.pad_groups(x[:, :0], jnp.array([2], jnp.int32), 4)


@pytest.mark.rule("ERR-1", "ACC-10")
def test_arguments_that_are_no_arrays_and_mapped_axes() -> None:
    with asserts.refused(TypeError, ("`logits`", "list", "expected a JAX or NumPy array [T, E]", "jnp.asarray")):
        route.topk_router([[1.0, 2.0]], 1)
    with asserts.refused(ValueError, ("`key` of topk_router", "shape ()", "one axis [2]", "low word first")):
        route.topk_router(jnp.zeros((T, E)), K, jitter=0.1, key=jax.random.key(0))
    with asserts.refused(ValueError, ("`high` of balance_quantile", "inf", "finite", "pass another")):
        route.balance_quantile(jnp.zeros((T, E)), jnp.zeros(E), K, high=float("inf"))
    with asserts.refused(ValueError, ("`rate` of update_bias", "nan", "finite", "pass another")):
        route.update_bias(jnp.zeros(E), jnp.zeros(E, jnp.int32), float("nan"))
    with asserts.refused(NotImplementedError, ("jax.vmap of router", "over axis 0", "without a mapped axis", "fold")):
        jax.vmap(lambda z: route.topk_router(z, K)[0])(jnp.zeros((2, T, E)))


MASKED = np.ma.masked_array(np.ones(4, np.float32), mask=[True, False, False, False])
ONE = np.ones(1, np.int32)
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "permutation": (
        lambda: route.unpermute(jnp.ones((2, 3)), (1, 2)),
        TypeError,
        ("`permutation` of unpermute", "tuple", "the Permutation that `permute` returns", "pass that"),
    ),
    "padding": (
        lambda: route.unpad_groups(jnp.ones((2, 3)), None),
        TypeError,
        ("`map` of unpad_groups", "NoneType", "the GroupPadding that `pad_groups` returns", "pass that"),
    ),
    "axis_number": (
        lambda: route.topk_router(jnp.ones((T, E)), K, aux_coeff=1.0, axis_name=0),
        TypeError,
        ("`axis_name` of topk_router", "0", "a name or a tuple of names", "axes of the mesh"),
    ),
    "axis_unknown": (
        lambda: route.update_bias(jnp.ones(E), jnp.ones(E, jnp.int32), 0.1, axis_name="data"),
        ValueError,
        ("`axis_name` of update_bias", "'data'", "axes that are manual here", "inside jax.shard_map"),
    ),
    "axis_quantile": (
        lambda: route.balance_quantile(jnp.ones((T, E)), jnp.ones(E), K, axis_name=("data",)),
        ValueError,
        ("`axis_name` of balance_quantile", "'data'", "axes that are manual here", "inside jax.shard_map"),
    ),
    "masked": (
        lambda: route.update_bias(MASKED, np.ones(4, np.int32), 0.1),
        TypeError,
        ("`bias`", "a masked array", "without a mask [E]", "bias.filled"),
    ),
    "rate_array": (
        lambda: route.update_bias(jnp.ones(E), jnp.ones(E, jnp.int32), jnp.ones(2)),
        TypeError,
        ("`rate` of update_bias", "Array([1., 1.]", "known when the function is called", "pass a float"),
    ),
    "rate_traced": (
        lambda: jax.jit(lambda rate: route.update_bias(jnp.ones(E), jnp.ones(E, jnp.int32), rate))(0.1),
        TypeError,
        ("`rate` of update_bias", "float32[]", "known when the function is called", "static argument"),
    ),
    "k_traced": (
        lambda: jax.jit(lambda k: route.topk_router(jnp.ones((T, E)), k)[0])(2),
        TypeError,
        ("`k` of topk_router", "int32[]", "known when the function is called", "static argument"),
    ),
    "scale": (
        lambda: route.topk_router(jnp.ones((T, E)), K, scale=1e39),
        ValueError,
        ("`scale` of topk_router", "1e+39", "finite", "pass another"),
    ),
    "one_expert": (
        lambda: route.balance_quantile(jnp.ones((T, 1)), jnp.ones(1), 1),
        ValueError,
        ("`logits` of balance_quantile", "1 experts", "2 to 1024", "nothing to balance"),
    ),
    "no_groups": (
        lambda: route.pad_groups(jnp.ones((2, 3)), ONE[:0], 4),
        ValueError,
        ("`sizes` of pad_groups", "0 elements", "1 to 65535", "one size per group"),
    ),
    "sizes_floats": (
        lambda: route.pad_groups(jnp.ones((2, 3)), jnp.ones(1), 4),
        TypeError,
        ("`sizes` of pad_groups", "float32", "integers", "cast it to int32"),
    ),
    "no_experts": (
        lambda: route.update_bias(jnp.ones(0), ONE[:0], 0.1),
        ValueError,
        ("`bias` of update_bias", "0 elements", "1 to 65535", "one value per expert"),
    ),
    "alignment": (
        lambda: route.alignment_for("mxfp8"),
        TypeError,
        ("`recipe` of alignment_for", "str", "None or a Recipe", "pass one"),
    ),
}


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    call, kind, fragments = WRONG[name]
    with asserts.refused(kind, fragments):
        call()


@pytest.mark.rule("LYR-8")
def test_a_capacity_above_all_slots_drops_nothing() -> None:
    logits = jnp.asarray(draw(T, E))
    for factor in (float(E), 1e9, 1e38):
        weights, experts, aux = route.topk_router(logits, K, capacity_factor=factor)
        asserts.bitwise(weights, route.topk_router(logits, K)[0])
        assert int(aux.dropped) == 0
        assert int(experts.min()) == 0


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("k", lambda k: route.topk_router(jnp.ones((2, 8)), k)[1]),
        ("num_groups", lambda groups: route.permute(jnp.ones((2, 4)), jnp.ones((2, 1), jnp.int32), groups)[0]),
        ("align", lambda align: route.pad_groups(jnp.ones((2, 4)), jnp.ones(2, jnp.int32), align)[0]),
        ("k", lambda k: route.hash_experts(jnp.ones(2, jnp.int32), k, 8)),
        ("bins", lambda bins: route.balance_quantile(jnp.ones((2, 8)), jnp.zeros(8), 2, bins=bins)),
    ],
)
def test_numbers_of_other_types_do_not_reach_caches(name: str, call: Callable[[Any], jax.Array]) -> None:
    """The number is in no other test, so nothing is cached for it: 7.0 and NumPy's 7 have the hash of 7."""
    with asserts.refused(TypeError, [f"`{name}`", "7.0", "expected an integer", "pass an int"]):
        call(7.0)
    first = call(np.int64(7))
    asserts.bitwise(first, call(7), "an int after a number of NumPy")


# ---- transformations


@pytest.mark.rule("LYR-1", "ACC-7")
def test_under_scan_and_remat() -> None:
    logits, d = jnp.asarray(draw(3, T, E)), draw(T, K, seed="dw")

    def total(z: Any) -> Any:
        return value(z, d, {"aux_coeff": 0.3, "z_coeff": 0.2, "capacity_factor": 1.0})[0]

    def scanned(stack: Any) -> Any:
        return jax.lax.scan(lambda sum, z: (sum + jax.checkpoint(total)(z), None), jnp.float32(0), stack)[0]

    gradient = jax.jit(jax.grad(scanned))(logits)
    for at in range(3):
        asserts.bitwise(gradient[at], jax.jit(jax.grad(total))(logits[at]))


@pytest.mark.rule("LYR-3", "ACC-8")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("shape", [(8,), (2, 4)])
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_losses_over_mesh_axes_equal_the_unsharded_ones(where: str, shape: tuple[int, ...], check_vma: bool) -> None:
    """The loss is one value for all shards: its gradient is that of the unsharded loss. Where the gradient is taken
    inside of shard_map without `check_vma`, JAX adds the cotangents of all shards, as for its own psum.
    """
    names = ("data", "model")[: len(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    logits, d = jnp.asarray(draw(64, E)), jnp.asarray(draw(64, K, seed="dw"))
    options = {"score": "sigmoid", "aux_coeff": 0.3, "z_coeff": 0.2}

    def total(z: Any, d: Any, axis: str | None) -> Any:
        weights, _, aux = route.topk_router(z, K, axis_name=axis, **options)
        of_weights = (weights * d).sum()
        losses = 2 * aux.aux_loss + 3 * aux.z_loss
        return (of_weights if axis is None else jax.lax.psum(of_weights, axis)) + losses, aux.entropy

    (_, entropy), expected = jax.jit(jax.value_and_grad(lambda z: total(z, d, None), has_aux=True))(logits)
    rows, whole = P("data"), P()
    if where == "outside":
        sharded = jax.shard_map(
            lambda z, d: total(z, d, "data"), mesh=mesh, in_specs=(rows, rows), out_specs=whole, check_vma=check_vma
        )
        (_, found_entropy), found = jax.jit(jax.value_and_grad(lambda z: sharded(z, d), has_aux=True))(logits)
    else:
        inside = jax.shard_map(
            lambda z, d: jax.value_and_grad(lambda z: total(z, d, "data"), has_aux=True)(z),
            mesh=mesh,
            in_specs=(rows, rows),
            out_specs=((whole, whole), rows),
            check_vma=check_vma,
        )
        (_, found_entropy), found = jax.jit(inside)(logits, d)
        found = found if check_vma else found / shape[0]
    size = np.abs(np.asarray(expected, np.float64)).max()
    asserts.within(
        found, bounds.Bounded(np.asarray(expected, np.float64), bounds.FUNCTIONS * size + 0 * expected, "float32")
    )
    asserts.within(found_entropy, bounds.Bounded(np.float64(entropy), np.float64(4 * bounds.FUNCTIONS), "float32"))


@pytest.mark.rule("LYR-3")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("split", [False, True])
def test_sequences_of_shards(split: bool, check_vma: bool) -> None:
    """Each shard has sequences of its own, as many as the others; with `split_sequences` each has a part of all."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    logits = jnp.asarray(draw(32, E))
    own, whole = [[6, 10, 0], [1, 2, 13]], [6, 10, 1, 2, 13]  # an empty sequence does not count
    if split:
        own, whole = [[12, 4, 0], [0, 10, 6]], [12, 14, 6]
    options = {"score": "sigmoid", "aux_coeff": 0.5, "z_coeff": 0.25}

    def losses(z: Any, sizes: Any, **how: Any) -> Any:
        aux = route.topk_router(z, K, sequence_sizes=sizes, **how, **options)[2]
        return 2 * aux.aux_loss + 3 * aux.z_loss

    sharded = jax.shard_map(
        lambda z, sizes: losses(z, sizes, axis_name="data", split_sequences=split),
        mesh=mesh,
        in_specs=(P("data"), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    sizes = jnp.array(own, jnp.int32).reshape(-1)
    found, of_found = jax.jit(jax.value_and_grad(sharded))(logits, sizes)
    expected, of_expected = jax.value_and_grad(losses)(logits, jnp.array(whole, jnp.int32))
    asserts.within(found, bounds.Bounded(np.float64(expected), np.float64(4 * bounds.FUNCTIONS), "float32"))
    bound = bounds.FUNCTIONS * np.abs(np.asarray(of_expected)).max()
    asserts.within(of_found, bounds.Bounded(np.asarray(of_expected, np.float64), bound + 0 * of_expected, "float32"))


@pytest.mark.rule("LYR-3", "ERR-1")
def test_shards_have_room_for_so_many_sequences() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(z: Any) -> Any:
        return route.topk_router(z, K, sequence_sizes=jnp.zeros(8192, jnp.int32), axis_name="data")[2].aux_loss

    words = ("`sequence_sizes` of topk_router", "8192 sequences on each of 8 ranks", "1 to 8191, of 65535 on all ranks")
    with asserts.refused(ValueError, (*words, "pass their sizes")):
        jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P())(jnp.zeros((64, E)))


@pytest.mark.rule("LYR-4", "LYR-14")
@pytest.mark.parametrize("check_vma", [True, False])
def test_biases_over_mesh_axes(check_vma: bool) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    logits, bias = jnp.asarray(draw(64, E)), jnp.asarray(0.1 * draw(E, seed="bias"))

    def both(z: Any, b: Any, axis: str | None) -> Any:
        load = route.topk_router(z, K, score="sigmoid", bias=b)[2].load
        return route.update_bias(b, load, 0.01, axis_name=axis), route.balance_quantile(z, b, K, axis_name=axis)

    sharded = jax.shard_map(
        lambda z, b: both(z, b, "data"), mesh=mesh, in_specs=(P("data"), P()), out_specs=P(), check_vma=check_vma
    )
    for found, expected in zip(jax.jit(sharded)(logits, bias), both(logits, bias, None), strict=True):
        asserts.bitwise(found, expected)


@pytest.mark.rule("LYR-5", "LYR-6", "ACC-8")
@pytest.mark.parametrize("check_vma", [True, False])
def test_rows_under_shard_map(check_vma: bool) -> None:
    """Tokens over one axis and replicated over another: gradients are those of each shard alone."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x, experts = jnp.asarray(draw(16, 5)), jnp.asarray(np.argsort(draw(16, E), axis=1)[:, :K].astype(np.int32))
    probs, d = jnp.asarray(draw(16, K, seed="p")), jnp.asarray(draw(16, 5, seed="d"))

    def local(x: Any, experts: Any, probs: Any) -> Any:
        rows, _, permutation = route.permute(x, experts, E, probs=probs)
        assert permutation.probs is not None
        return route.unpermute(permutation.probs[:, None] * rows, permutation, probs)

    sharded = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check_vma)
    y, pull = jax.vjp(jax.jit(lambda x, p: sharded(x, experts, p)), x, probs)
    for half in (slice(8), slice(8, 16)):
        one, of_one = jax.vjp(jax.jit(lambda x, p, half=half: local(x, experts[half], p)), x[half], probs[half])
        asserts.bitwise(y[half], one)
        for found, expected in zip(pull(d), of_one(d[half]), strict=True):
            asserts.bitwise(found[half], expected)


# ---- looking from outside


@pytest.mark.rule("ERR-2", "ERR-3")
def test_explain_of_routing_and_of_a_whole_layer():
    def told(op: Any, *given: Any, **options: Any) -> list[str]:
        assert jax_grouped.why_unsupported(op, *given, **options, arch="cpu") is None
        return [line.split()[0] for line in jax_grouped.explain(op, *given, **options, arch="cpu").splitlines()]

    def of(*shape: int, dtype: str = "float32") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    logits, slots, x = of(T, E), of(T, K, dtype="int64"), of(T, 8)
    assert told(route.topk_router, logits, K) == ["router", "router_sums", "router_losses", "router_grad"]
    assert "drop_slots" in told(route.topk_router, logits, K, capacity_factor=1.0)
    assert told(route.permute, x, slots, E) == ["sort_slots", "gather_rows", "combine_rows"]
    chosen = np.arange(T * K).reshape(T, K) % E
    rows, sizes, permutation = route.permute(jnp.ones((T, 8)), chosen, E)
    assert told(route.unpermute, rows, permutation, of(T, K)) == ["combine_rows", "gather_rows", "combine_dot"]
    assert told(route.pad_groups, rows, sizes, 16) == ["pad_groups", "gather_rows", "gather_rows"]
    padded, _, places = route.pad_groups(rows, sizes, 16)
    assert told(route.unpad_groups, padded, places) == ["gather_rows", "gather_rows"]
    assert told(route.hash_experts, of(T, dtype="int64"), K, E) == ["hash_experts"]
    assert told(route.update_bias, of(E), of(E, dtype="int32"), 0.1) == ["bias_update"]
    assert told(route.balance_quantile, logits, of(E), K) == ["margin_histogram", "quantile_bias"]
    layer = (x, of(8, E), of(E, 8, 8), of(E, 4, 8), K)
    names = told(jax_grouped.moe, *layer, aux_coeff=0.1)
    assert names == told(jax_grouped.nnx.MoE, *layer) == told(jax_grouped.linen.MoE, *layer)
    assert {"router", "sort_slots", "grouped_matmul_act", "combine_rows", "router_grad"} <= {*names}
    assert names.count("grouped_matmul") == 7, "logits, `wo`, and gradients of x, router, wi and wo"
    lora = ((of(E, 8, 2), of(E, 2, 8)), (of(E, 4, 2), of(E, 2, 8)))
    assert told(jax_grouped.moe, *layer, lora=lora).count("low_rank_grads") == 2, "the weights are frozen"
    with asserts.refused(TypeError, ["`logits` of topk_router", "float64", "cast it"]) as message:
        route.topk_router(np.ones((T, E)), K)
    for given in (np.ones((T, E)), of(T, E, dtype="float64")):
        assert jax_grouped.why_unsupported(route.topk_router, given, K) == message[0]
    masked = np.ma.array(np.ones((T, E), np.float32), mask=True)
    for given in (masked, np.ones((T, E), object), np.ones((T, E), ">f4"), [[1.0]]):
        assert (jax_grouped.why_unsupported(route.topk_router, given, K) or "").startswith("`logits`")
    pinned = jax_grouped.why_unsupported(jax_grouped.moe, *layer, implementation="no_such_kernel", arch="cpu")
    assert pinned is not None
    assert "no_such_kernel" in pinned
