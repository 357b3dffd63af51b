"""Routing and the Flax NNX layers. Most inputs are small integers, so that results are exact and compared bitwise."""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from numpy.typing import NDArray

import jax_grouped
from jax_grouped import linen, nnx, ragged_dot, route
from tests import asserts
from tests.bounds import FUNCTIONS, Bounded

T, E, H, F = 12, 6, 5, 4


def whole(shape: tuple[int, ...], seed: int, low: int = -3, high: int = 3) -> NDArray[np.float32]:
    """Small integers as fp32."""
    return np.random.default_rng(seed).integers(low, high, shape, endpoint=True).astype(np.float32)


def near(value: Any, error: Any) -> Bounded:
    value = np.asarray(value, np.float64)
    return Bounded(value, np.broadcast_to(np.asarray(error, np.float64), value.shape), "float32")


# ---- router ----------------------------------------------------------------------------------------------------------


def scores_of(logits: NDArray[np.float64], score: str) -> NDArray[np.float64]:
    if score == "softmax":
        e = np.exp(logits - logits.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)
    return 1 / (1 + np.exp(-logits)) if score == "sigmoid" else np.sqrt(np.log1p(np.exp(logits)))


@pytest.mark.rule("LYR-1", "LYR-3", "LYR-13")
@pytest.mark.matrix(
    score=route.SCORES,
    after_topk=(False, True),
    k=(1, 2, 3),
    bias=(False, True),
    mask=(False, True),
    valid=lambda score, after_topk, k, **_: not after_topk or (score == "softmax" and k > 1),
)
def test_router_against_the_formulas(score: str, after_topk: bool, k: int, bias: bool, mask: bool) -> None:
    logits = np.random.default_rng(k).standard_normal((T, E)).astype(np.float32)
    b = whole((E,), 1) if bias else None
    kept = np.arange(T) % 3 != 0 if mask else np.ones(T, bool)
    weights, experts, aux = jax.jit(
        lambda z: route.topk_router(
            z, k, score=score, after_topk=after_topk, bias=b, mask=jnp.asarray(kept) if mask else None,
            scale=2.0, aux_coeff=0.5, z_coeff=0.25,
        )
    )(logits)  # fmt: skip
    wide = logits.astype(np.float64)
    full = scores_of(wide, score)
    ranked = wide if after_topk else full
    order = np.argsort(-(ranked if b is None else ranked + b), axis=1, kind="stable")[:, :k]
    picked = np.take_along_axis(ranked, order, axis=1)
    if after_topk:
        picked = scores_of(picked, "softmax")
    elif score != "softmax" and k > 1:
        picked = picked / picked.sum(axis=1, keepdims=True)
    expected = np.where(kept[:, None], 2.0 * picked, 0.0)
    asserts.bitwise(experts, np.where(kept[:, None], order, -1).astype(np.int32), "experts")
    asserts.within(weights, near(expected, FUNCTIONS * expected), "weights")

    load = np.bincount(order[kept].ravel(), minlength=E)
    asserts.bitwise(aux.load, load.astype(np.int32), "load")
    normalised = full / full.sum(axis=1, keepdims=True)
    balance = 0.5 * E / (k * kept.sum() ** 2) * (normalised[kept].sum(axis=0) * load).sum()
    z_loss = 0.25 * np.mean(np.log(np.exp(wide[kept]).sum(axis=1)) ** 2)
    entropy = -(normalised[kept] * np.log(normalised[kept])).sum(axis=1).mean()
    asserts.within(aux.aux_loss, near(balance, FUNCTIONS * balance), "aux_loss")
    # A logarithm may be small though its argument's parts are not, hence errors against 1 as well.
    asserts.within(aux.z_loss, near(z_loss, FUNCTIONS * (1 + z_loss)), "z_loss")
    asserts.within(aux.entropy, near(entropy, FUNCTIONS * (1 + entropy)), "entropy")
    asserts.zero(aux.dropped, "dropped")
    assert not aux.overflow


@pytest.mark.rule("LYR-2")
def test_ties_go_to_the_lower_index() -> None:
    _, experts, _ = route.topk_router(jnp.zeros((T, E)), 3)
    asserts.bitwise(experts, np.tile(np.arange(3, dtype=np.int32), (T, 1)))


@pytest.mark.rule("LYR-1")
def test_bias_has_no_gradient_and_does_not_change_weights() -> None:
    logits = jnp.asarray(whole((T, E), 0))
    push = jnp.where(jnp.arange(E) == E - 1, 100.0, 0.0)
    weights, experts, _ = route.topk_router(logits, 1, bias=push)
    asserts.bitwise(experts, np.full((T, 1), E - 1, np.int32))
    unbiased = scores_of(np.asarray(logits, np.float64), "softmax")[:, E - 1]
    asserts.within(weights[:, 0], near(unbiased, FUNCTIONS * unbiased))
    asserts.zero(jax.grad(lambda b: route.topk_router(logits, 2, bias=b)[0].sum())(push))


@pytest.mark.rule("LYR-3")
@pytest.mark.parametrize("score", route.SCORES)
def test_balanced_routing_costs_its_coefficient(score: str) -> None:
    logits = 4.0 * jnp.eye(E, dtype=jnp.float32)
    aux = route.topk_router(logits, 1, score=score, aux_coeff=0.5)[2]
    asserts.within(aux.aux_loss, near(0.5, FUNCTIONS))


@pytest.mark.rule("LYR-13")
def test_only_losses_have_a_gradient() -> None:
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((T, E)), jnp.float32)

    def part(name: str) -> NDArray[np.float32]:
        gradient = jax.grad(lambda z: getattr(route.topk_router(z, 2, aux_coeff=1.0, z_coeff=1.0)[2], name))
        return np.asarray(gradient(logits))

    asserts.zero(part("entropy"), "entropy")
    assert np.any(part("aux_loss")), "no gradient of aux_loss"
    assert np.any(part("z_loss")), "no gradient of z_loss"


@pytest.mark.rule("LYR-1", "LYR-2", "ERR-1")
@pytest.mark.parametrize(
    ("k", "options", "fragments"),
    [
        (0, {}, ("`k` of topk_router", "0", "1 to 6", "smaller")),
        (7, {}, ("`k` of topk_router", "7", "1 to 6", "smaller")),
        (2, {"score": "tanh"}, ("`score` of topk_router", "'tanh'", "softmax", "choose")),
        (1, {"after_topk": True}, ("`after_topk` of topk_router", "k = 1", "2 or more", "after_topk=False")),
        (2, {"after_topk": True, "score": "sigmoid"}, ("`after_topk`", "'sigmoid'", "its default", "leave it out")),
        (2, {"bias": jnp.zeros(5)}, ("`bias` of topk_router", "(5,)", "(6,)", "reshape")),
        (2, {"mask": jnp.ones(5, bool)}, ("`mask` of topk_router", "(5,)", "(12,)", "reshape")),
    ],
)
def test_router_refusals(k: int, options: dict[str, Any], fragments: tuple[str, ...]) -> None:
    with asserts.refused(ValueError, fragments):
        route.topk_router(jnp.zeros((T, E)), k, **options)


@pytest.mark.rule("LYR-4")
def test_update_bias_moves_towards_balance() -> None:
    moved = route.update_bias(jnp.zeros(4), jnp.asarray([0, 4, 8, 4], jnp.int32), 0.5)
    asserts.bitwise(moved, np.asarray([0.5, 0, -0.5, 0], np.float32))


# ---- rows ------------------------------------------------------------------------------------------------------------


def placed(experts: NDArray[np.int32], align: int, rows: int) -> tuple[NDArray[np.int32], list[int]]:
    """Slot in each row (-1: padding) and the group sizes, by the plain loop."""
    source: list[int] = []
    ends = []
    for group in range(E):
        source += [slot for slot, expert in enumerate(experts.ravel()) if expert == group]
        source += [-1] * (-len(source) % align)
        ends.append(min(len(source), rows))
    source = (source + [-1] * rows)[:rows]
    return np.asarray(source, np.int32), np.diff(ends, prepend=0).tolist()


@pytest.mark.rule("LYR-5", "LYR-6", "GRP-6")
@pytest.mark.matrix(
    k=(1, 2, 3), align=(1, 4), max_rows=(None, 16), dropped=(False, True), weighted=(False, True),
    dtype=("float32", "bfloat16"),
)  # fmt: skip
def test_rows_there_and_back(
    k: int, align: int, max_rows: int | None, dropped: bool, weighted: bool, dtype: str
) -> None:
    draw = np.random.default_rng(k)
    experts = np.stack([draw.permutation(E)[:k] for _ in range(T)]).astype(np.int32)
    experts[experts == 2] = 4 if k == 1 else 2  # an empty group
    if dropped:
        experts[::3, 0] = -1
    M = max_rows or -(-(T * k + E * (align - 1)) // align) * align
    source, sizes = placed(experts, align, M)
    x, y, probs = whole((T, H), 0), whole((M, H), 1), 2.0 ** whole((T, k), 2)
    d_rows, d_out = whole((M, H), 3), whole((T, H), 4)
    y[source < 0] = np.nan  # padding is not read

    @jax.jit
    def there(x: jax.Array, p: jax.Array) -> Any:
        rows, group_sizes, permutation = route.permute(x, experts, E, probs=p, align=align, max_rows=max_rows)
        return (rows, permutation.probs), (group_sizes, permutation)

    (rows, row_probs), pull, (group_sizes, permutation) = jax.vjp(
        there, jnp.asarray(x, dtype), jnp.asarray(probs), has_aux=True
    )
    d_x, d_probs = pull((jnp.asarray(d_rows, dtype), jnp.asarray(d_rows[:, 0])))
    token, live = source // k, source >= 0
    flat = np.where(live, probs.ravel()[source], 0)
    asserts.bitwise(group_sizes, np.asarray(sizes, np.int32), "group_sizes")
    asserts.bitwise(rows, np.asarray(jnp.asarray(np.where(live[:, None], x[token], 0), dtype)), "rows")
    asserts.bitwise(row_probs, flat, "probs")
    assert int(permutation.dropped) == (experts >= 0).sum() - live.sum()
    expected_x, expected_p = np.zeros_like(x), np.zeros(T * k, np.float32)
    np.add.at(expected_x, token[live], d_rows[live])
    expected_p[source[live]] = d_rows[live, 0]
    asserts.bitwise(d_x, np.asarray(jnp.asarray(expected_x, dtype)), "d_x")
    asserts.bitwise(d_probs, expected_p.reshape(T, k), "d_probs")

    weights = jnp.asarray(probs) if weighted else None
    out, pull = jax.vjp(jax.jit(lambda y, w: route.unpermute(y, permutation, w)), jnp.asarray(y, dtype), weights)
    d_y, d_weights = pull(jnp.asarray(d_out, dtype))
    scale = flat if weighted else live.astype(np.float32)
    expected = np.zeros_like(x)
    np.add.at(expected, token[live], scale[live, None] * y[live])
    asserts.bitwise(out, np.asarray(jnp.asarray(expected, dtype)), "out")
    asserts.bitwise(d_y, np.asarray(jnp.asarray(np.where(live[:, None], scale[:, None] * d_out[token], 0), dtype)))
    if weighted:
        expected_p[:] = 0
        expected_p[source[live]] = (d_out[token] * y)[live].sum(axis=1)
        asserts.bitwise(d_weights, expected_p.reshape(T, k), "d_weights")


@pytest.mark.rule("LYR-5")
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
def test_slots_outside_the_experts_are_dropped(dtype: str) -> None:
    """Also numbers that would be experts again if 4 bytes, or the number of experts 1, held them."""
    limits = np.iinfo(dtype)
    outside = [each for each in (-1, 300, 2**31, 2**32, 2**32 + 1, -(2**32)) if limits.min <= each <= limits.max]
    with jax.enable_x64(True):
        experts = jnp.asarray([[*outside, 1]], dtype)
        _, sizes, permutation = route.permute(jnp.ones((1, H), jnp.float32), experts, 300)
    asserts.bitwise(sizes, np.eye(1, 300, 1, dtype=np.int32)[0])
    assert permutation.dropped == 0


@pytest.mark.rule("LYR-6", "ALL-3")
def test_unpermute_rounds_once() -> None:
    """1 + 2^-8 + 2^-8 is 1 in bfloat16 if each sum is rounded, and 1 + 2^-7 if only the last one is."""
    experts = jnp.asarray([[0, 1, 2]], jnp.int32)
    _, _, permutation = route.permute(jnp.zeros((1, 1)), experts, 3)
    out = route.unpermute(jnp.asarray([[1.0], [2**-8], [2**-8]], jnp.bfloat16), permutation)
    asserts.bitwise(out, np.asarray(jnp.asarray([[1 + 2**-7]], jnp.bfloat16)))


@pytest.mark.rule("LYR-5", "ERR-1")
@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"align": 0}, ("`align` of permute", "0", "1 or more", "pads nothing")),
        ({"align": 4, "max_rows": 6}, ("`max_rows` of permute", "6", "multiple of `align` 4", "positive")),
        ({"probs": jnp.ones((T, 3))}, ("`probs` of permute", "(12, 3)", "(12, 2)", "reshape")),
    ],
)
def test_permute_refusals(options: dict[str, Any], fragments: tuple[str, ...]) -> None:
    with asserts.refused(ValueError, fragments):
        route.permute(jnp.zeros((T, H)), jnp.zeros((T, 2), jnp.int32), E, **options)


@pytest.mark.rule("GRP-10")
def test_a_layer_without_tokens() -> None:
    layer = nnx.MoE(4, 8, 3, 2, use_bias=True, rngs=flax_nnx.Rngs(0))
    y, aux = layer(jnp.zeros((0, 4)))
    assert y.shape == (0, 4)
    assert int(aux.load.sum()) == 0


def test_shapes_that_do_not_belong_together() -> None:
    experts = jnp.zeros((T, 2), jnp.int32)
    with asserts.refused(ValueError, ("`experts` of permute", "(12,)", "two axes [T, k]", "reshape")):
        route.permute(jnp.zeros((T, H)), experts[:, 0], E)
    with asserts.refused(TypeError, ("`experts` of permute", "float32", "integers", "numbers")):
        route.permute(jnp.zeros((T, H)), experts.astype(jnp.float32), E)
    with asserts.refused(ValueError, ("`num_groups` of permute", "0", "1 to 65535", "give")):
        route.permute(jnp.zeros((T, H)), experts, 0)
    with asserts.refused(ValueError, ("`logits` of topk_router", "(4,)", "two axes [T, E]", "reshape")):
        route.topk_router(jnp.zeros(4), 2)
    with asserts.refused(ValueError, ("`x` of permute", "3 tokens", "12", "route")):
        route.permute(jnp.zeros((3, H)), experts, E)
    _, _, permutation = route.permute(jnp.zeros((T, H)), experts, E)
    with asserts.refused(ValueError, ("`y` of unpermute", "3 rows", "24", "all rows")):
        route.unpermute(jnp.zeros((3, H)), permutation)
    with asserts.refused(ValueError, ("`weights` of unpermute", "(12, 3)", "(12, 2)", "reshape")):
        route.unpermute(jnp.zeros((24, H)), permutation, jnp.ones((T, 3)))


# ---- layers ----------------------------------------------------------------------------------------------------------

SIZES = np.asarray([3, 0, 4, 1, 2, 0], np.int32)  # two rows of tail
GROUP = np.repeat(np.arange(E), SIZES)
S = int(SIZES.sum())


def fill(layer: Any) -> Any:
    """Integers in every parameter."""
    state = flax_nnx.state(layer)
    leaves, tree = jax.tree.flatten(state)
    filled = [jnp.asarray(whole(leaf.shape, seed, -2, 2)) for seed, leaf in enumerate(leaves)]
    flax_nnx.update(layer, jax.tree.unflatten(tree, filled))
    return layer


def parameters(layer: flax_nnx.Module) -> dict[str, NDArray[np.float64]]:
    return {
        ".".join(map(str, path)): np.asarray(leaf, np.float64) for path, leaf in flax_nnx.to_flat_state(
            flax_nnx.state(layer)
        )
    }  # fmt: skip


def gradients(layer: flax_nnx.Module, dy: NDArray[np.float32], *args: jax.Array, **fixed: Any) -> Any:
    """y, {parameter: gradient}, gradients of args; the layer's result is y or (y, aux)."""
    structure, state = flax_nnx.split(layer)

    def value(state: Any, *args: jax.Array) -> jax.Array:
        result = flax_nnx.merge(structure, state)(*args, **fixed)
        return result[0] if isinstance(result, tuple) else result

    y, pull = jax.vjp(jax.jit(value), state, *args)
    d_state, *d_args = pull(jnp.asarray(dy))
    flat = {".".join(map(str, path)): leaf[...] for path, leaf in flax_nnx.to_flat_state(d_state)}
    return y, flat, d_args


def exact(actual: Any, expected: NDArray[np.float64], what: str) -> None:
    """fp32, and equal to a value that fp32 holds; +0 and -0 are the same here."""
    a = np.asarray(actual)
    assert a.dtype == np.float32, what
    assert (expected == expected.astype(np.float32)).all(), f"{what}: not exact, the test is wrong"
    asserts.bitwise(a + np.float32(0), expected.astype(np.float32) + np.float32(0), what)


@pytest.mark.parametrize("use_bias", [False, True])
def test_grouped_linear(use_bias: bool) -> None:
    layer = fill(nnx.GroupedLinear(E, H, F, use_bias=use_bias, rngs=flax_nnx.Rngs(0)))
    x, dy = whole((S + 2, H), 0), whole((S + 2, F), 1)
    x[S:] = np.nan
    y, d, (dx,) = gradients(layer, dy, jnp.asarray(x), group_sizes=SIZES)
    p = parameters(layer)
    assert set(p) == ({"kernel", "bias"} if use_bias else {"kernel"})
    rows = [x[r] @ p["kernel"][g] + (p["bias"][g] if use_bias else 0) for r, g in enumerate(GROUP)]
    exact(y, np.concatenate([rows, np.zeros((2, F))]), "y")
    exact(dx, np.concatenate([[dy[r] @ p["kernel"][g].T for r, g in enumerate(GROUP)], np.zeros((2, H))]), "dx")
    exact(d["kernel"], np.stack([x[:S][g == GROUP].T @ dy[:S][g == GROUP] for g in range(E)]), "d_kernel")
    if use_bias:
        exact(d["bias"], np.stack([dy[:S][g == GROUP].sum(axis=0) for g in range(E)]), "d_bias")
    asserts.bitwise(y, ragged_dot(x, layer.kernel[...], SIZES, bias=layer.bias[...] if use_bias else None))


def dense_mlp(p: dict[str, NDArray[np.float64]], x: NDArray[np.float64], g: int) -> tuple[NDArray[np.float64], ...]:
    """h, relu(h), and the unweighted result for one row."""
    h = x @ p["wi"][g] + (p["wi_bias"][g] if "wi_bias" in p else 0)
    t = np.maximum(h, 0)
    return h, t, t @ p["wo"][g] + (p["wo_bias"][g] if "wo_bias" in p else 0)


def dense_gradients(
    p: dict[str, NDArray[np.float64]], rows: list[tuple[int, int, float]], x: NDArray[Any], dy: NDArray[Any]
) -> tuple[NDArray[np.float64], NDArray[np.float64], list[float], dict[str, NDArray[np.float64]]]:
    """y, dx, dp of each row, and parameter gradients, by the formulas; a row is (token, expert, probability)."""
    y, dx, dp = np.zeros_like(dy, np.float64), np.zeros_like(x, np.float64), []
    d = {name: np.zeros_like(value) for name, value in p.items()}
    for token, g, prob in rows:
        h, t, result = dense_mlp(p, x[token].astype(np.float64), g)
        y[token] += prob * result
        dp.append(float(dy[token] @ result))
        dz = dy[token] @ p["wo"][g].T
        dh = prob * dz * (h > 0)
        dx[token] += dh @ p["wi"][g].T
        d["wi"][g] += np.outer(x[token], dh)
        d["wo"][g] += np.outer(prob * t, dy[token])
        if "wo_bias" in p:
            d["wi_bias"][g] += dh
            d["wo_bias"][g] += prob * dy[token]
    return y, dx, dp, d


@pytest.mark.rule("MLP-1", "MLP-7")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("use_bias", [False, True])
def test_grouped_mlp(use_bias: bool, weighted: bool) -> None:
    layer = fill(nnx.GroupedMLP(E, H, F, activation="relu", use_bias=use_bias, rngs=flax_nnx.Rngs(0)))
    x, dy = whole((S, H), 0), whole((S, H), 1)
    probs = np.where(np.arange(S) == 1, 0.0, 2.0 ** whole((S,), 2))  # one row with probability 0
    args = (jnp.asarray(x), jnp.asarray(probs, jnp.float32)) if weighted else (jnp.asarray(x),)
    structure, state = flax_nnx.split(layer)
    y, pull = jax.vjp(
        jax.jit(lambda state, x, *p: flax_nnx.merge(structure, state)(x, SIZES, *p)), state, *args
    )  # fmt: skip
    d_state, dx, *dp = pull(jnp.asarray(dy))
    p = parameters(layer)
    rows = [(r, int(g), float(probs[r]) if weighted else 1.0) for r, g in enumerate(GROUP)]
    expected_y, expected_dx, expected_dp, expected = dense_gradients(p, rows, x, dy)
    exact(y, expected_y, "y")
    exact(dx, expected_dx, "dx")
    if weighted:
        exact(dp[0], np.asarray(expected_dp), "dp")
    for path, leaf in flax_nnx.to_flat_state(d_state):
        exact(leaf[...], expected[".".join(map(str, path))], ".".join(map(str, path)))


@pytest.mark.rule("MLM #5850")
@pytest.mark.rule("MLP-1")
def test_second_bias_is_weighted_too() -> None:
    wi, wo, wo_bias = jnp.zeros((2, H, 2 * F)), jnp.zeros((2, F, H)), jnp.asarray([[2.0] * H, [4.0] * H])
    probs, sizes = jnp.asarray([0.25, 0.5, 0.125]), jnp.asarray([2, 1], jnp.int32)

    def mlp(probs: jax.Array, wo_bias: jax.Array) -> jax.Array:
        return jax_grouped.grouped_mlp(jnp.ones((3, H)), wi, wo, sizes, probs=probs, wo_bias=wo_bias)

    y, pull = jax.vjp(mlp, probs, wo_bias)
    dp, db = pull(jnp.ones((3, H)))
    exact(y, np.repeat([[0.5], [1.0], [0.5]], H, axis=1), "y")
    exact(dp, np.asarray([2.0, 2, 4]) * H, "dp")
    exact(db, np.repeat([[0.75], [0.125]], H, axis=1), "db2")


def moe_layer(**options: Any) -> nnx.MoE:
    return nnx.MoE(H, F, E, 2, activation="relu", after_topk=True, rngs=flax_nnx.Rngs(0), **options)


@pytest.mark.rule("LYR-1", "LYR-5", "LYR-6")
@pytest.mark.parametrize("use_bias", [False, True])
def test_moe_against_a_dense_loop(use_bias: bool) -> None:
    layer = fill(moe_layer(use_bias=use_bias))
    # Columns in equal pairs: both chosen logits are equal and each weight is exactly one half.
    layer.router.kernel[...] = jnp.repeat(layer.router.kernel[...][:, ::2], 2, axis=1)
    p = parameters(layer)
    router = p.pop("router.kernel")
    x, dy = whole((T, H), 0), whole((T, H), 1)
    y, d, (dx,) = gradients(layer, dy.reshape(3, 4, H), jnp.asarray(x.reshape(3, 4, H)))
    chosen = np.argsort(-(x @ router), axis=1, kind="stable")[:, :2]
    rows = [(t, int(g), 0.5) for t in range(T) for g in chosen[t]]
    expected_y, expected_dx, dp, expected = dense_gradients(p, rows, x, dy)
    d_logits = np.zeros((T, E))
    for t, pair in enumerate(np.asarray(dp).reshape(T, 2)):
        d_logits[t, chosen[t]] = 0.5 * (pair - 0.5 * pair.sum())
    exact(y, expected_y.reshape(3, 4, H), "y")
    exact(dx, (expected_dx + d_logits @ router.T).reshape(3, 4, H), "dx")
    exact(d.pop("router.kernel"), x.T @ d_logits, "d_router")
    for name, gradient in d.items():
        exact(gradient, expected[name], name)


@pytest.mark.rule("LYR-13")
def test_moe_reports_its_load_and_losses() -> None:
    layer = moe_layer(aux_coeff=0.5, z_coeff=0.25)
    x = jnp.asarray(whole((2, 3, H), 0))
    y, aux = jax.jit(lambda layer, x: layer(x))(layer, x)
    logits = ragged_dot(x.reshape(6, H), layer.router.kernel[...][None], jnp.asarray([6]))
    _, _, expected = route.topk_router(logits, 2, after_topk=True, aux_coeff=0.5, z_coeff=0.25)
    assert y.shape == x.shape
    assert int(aux.load.sum()) == 12
    asserts.bitwise(aux.load, expected.load)
    asserts.within(aux.aux_loss, near(expected.aux_loss, FUNCTIONS * abs(float(expected.aux_loss))))
    asserts.within(aux.z_loss, near(expected.z_loss, FUNCTIONS * abs(float(expected.z_loss))))


@pytest.mark.rule("MLM #7441", "unsloth-zoo #1258")
@pytest.mark.rule("ALL-2")
def test_same_run_twice_has_the_same_bits() -> None:
    draw = np.random.default_rng(0)
    x, dy = (draw.standard_normal((64, H)).astype(np.float32) for _ in range(2))
    first, second = (gradients(moe_layer(use_bias=True), dy, jnp.asarray(x)) for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        asserts.bitwise(a, b)


def test_dtype_is_that_of_the_computation() -> None:
    layer = moe_layer(dtype=jnp.bfloat16, use_bias=True)
    y, aux = layer(jnp.ones((T, H)))
    assert y.dtype == jnp.bfloat16
    assert aux.aux_loss.dtype == jnp.float32
    assert {leaf.dtype.name for leaf in jax.tree.leaves(flax_nnx.state(layer))} == {"float32"}
    stored = nnx.GroupedLinear(E, H, F, param_dtype=jnp.bfloat16, rngs=flax_nnx.Rngs(0))
    assert stored.kernel[...].dtype == jnp.bfloat16


@pytest.mark.rule("LYR-13")
def test_experts_do_not_count_in_the_fan_in() -> None:
    G, K = 64, 64
    for kernel in (
        nnx.GroupedLinear(G, K, 32, rngs=flax_nnx.Rngs(0)).kernel,
        nnx.MoE(K, 32, G, 2, rngs=flax_nnx.Rngs(0)).wi,
    ):
        ratio = float(kernel[...].std()) * math.sqrt(K)  # 1, or 1 / 8 with the experts counted in
        assert abs(math.log2(ratio)) < 1, ratio


@pytest.mark.rule("LYR-13")
def test_metadata_is_the_users_alone() -> None:
    layer = nnx.GroupedLinear(E, H, F, kernel_metadata={"note": "rows"}, rngs=flax_nnx.Rngs(0))
    assert layer.kernel.get_metadata()["note"] == "rows"
    assert layer.bias is not None
    assert "note" not in layer.bias.get_metadata()
    assert "sharding" not in layer.bias.get_metadata()
    mlp = nnx.MoE(H, F, E, 2, wi_metadata={"note": "wi"}, router_metadata={"note": "router"}, rngs=flax_nnx.Rngs(0))
    assert mlp.wi.get_metadata()["note"] == "wi"
    assert mlp.router.kernel.get_metadata()["note"] == "router"
    assert "note" not in mlp.wo.get_metadata()


def test_tables_of_flax_leave_layers_as_they_are() -> None:
    """`nnx.tabulate` runs every public function that a layer's class has as if it were a method."""

    class Own(nnx.MoE):
        pass

    layer, x = Own(4, 4, 2, 1, shared_dim=3, rngs=flax_nnx.Rngs(0)), jnp.ones((3, 4))
    y = layer(x)[0]
    with contextlib.suppress(TypeError):  # this Flax cannot print results with a NamedTuple in them
        flax_nnx.tabulate(layer, x)
    asserts.bitwise(layer(x)[0], y)
    mlp = nnx.GroupedMLP(2, 4, 4, rngs=flax_nnx.Rngs(0))
    assert "GroupedMLP" in flax_nnx.tabulate(mlp, x, jnp.asarray([2, 1]))


_FLAGS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "GroupedLinear": ((2, 4, 3), ("use_bias", "deterministic")),
    "GroupedMLP": ((2, 4, 3), ("use_bias", "deterministic")),
    "MoE": (
        (4, 3, 2, 1),
        ("use_bias", "deterministic", "selection_bias", "shared_gate", "once_per_rank", "fsdp"),
    ),
}


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize("kind", ["nnx", "linen"])
@pytest.mark.parametrize(("layer", "flag"), [(layer, flag) for layer, (_, flags) in _FLAGS.items() for flag in flags])
def test_flags_of_layers_take_nothing_but_bools(kind: str, layer: str, flag: str) -> None:
    """Text counts as True, and 0 as False where it is compared with a default; NumPy's bools are bools."""
    sizes = _FLAGS[layer][0]
    arrays = (jnp.ones((5, 4)),) if layer == "MoE" else (jnp.ones((5, 4)), jnp.array([2, 3]))

    def made(value: Any) -> None:
        if kind == "nnx":
            getattr(nnx, layer)(*sizes, rngs=flax_nnx.Rngs(0), **{flag: value})
        else:
            getattr(linen, layer)(*sizes, **{flag: value}).init(jax.random.key(0), *arrays)

    for value in ("no", 0, 1, None):
        with asserts.refused(TypeError, [f"`{flag}` of {layer}: {value!r}", "expected True or False", "pass one"]):
            made(value)
    made(np.False_)


@pytest.mark.rule("ERR-1")
def test_layer_refusals() -> None:
    rngs = flax_nnx.Rngs(0)
    with asserts.refused(ValueError, ("`in_features` of GroupedLinear", "0", "1 or more", "size")):
        nnx.GroupedLinear(2, 0, 3, rngs=rngs)
    with asserts.refused(ValueError, ("`mlp_dim` of MoE", "0", "1 or more", "size")):
        nnx.MoE(4, 0, 2, 1, rngs=rngs)
    with asserts.refused(ValueError, ("`num_experts_per_tok` of MoE", "3", "1 to 2", "fewer")):
        nnx.MoE(4, 4, 2, 3, rngs=rngs)
    arguments: dict[str, Any] = {"GroupedLinear": (2, 4, 3), "GroupedMLP": (2, 4, 3), "MoE": (4, 3, 2, 1)}
    for name, given in arguments.items():
        with asserts.refused(TypeError, (f"`rngs` of {name}", "PRNGKeyArray", "expected nnx.Rngs", "pass nnx.Rngs")):
            getattr(nnx, name)(*given, rngs=jax.random.key(0))
        with asserts.refused(ValueError, (f"`rngs` of {name}", "no stream `params`", "pass nnx.Rngs(seed)")):
            getattr(nnx, name)(*given, rngs=flax_nnx.Rngs(jitter=0))
    with asserts.refused(TypeError, ("`in_features` of GroupedLinear", "8.0", "an integer", "size")):
        nnx.GroupedLinear(2, 8.0, 3, rngs=rngs)
    with asserts.refused(ValueError, ("`score` of topk_router", "'best'", "expected one of", "choose")):
        nnx.MoE(4, 4, 2, 1, score="best", rngs=rngs)
    for layer in (nnx.MoE(3, 4, 2, 1, rngs=rngs), linen.MoE(3, 4, 2, 1)):
        call = layer if isinstance(layer, nnx.MoE) else partial(layer.init, jax.random.key(0))
        for given, name in (({"x": [[1.0] * 3]}, "x"), ({"mask": [True]}, "mask"), ({"experts": [[0]]}, "experts")):
            with asserts.refused(TypeError, (f"`{name}`", "list", "expected a JAX or NumPy array [...", "convert it")):
                call(**({"x": jnp.ones((1, 3))} | given))
    for name, axes in (("GroupedLinear", "[M, K]"), ("GroupedMLP", "[M, H]")):
        sizes = (2, 3, 4)
        own, other = getattr(nnx, name)(*sizes, rngs=rngs), getattr(linen, name)(*sizes)
        for layer in (own, partial(other.init, jax.random.key(0))):
            with asserts.refused(TypeError, ("`x`", "list", f"expected a JAX or NumPy array {axes}", "convert it")):
                layer([[1.0] * 3], jnp.asarray([1, 0]))
    of_width = {"GroupedLinear": ("in_features", "kernel"), "GroupedMLP": ("hidden", "wi"), "MoE": ("hidden", "wi")}
    for kind, (option, weight) in of_width.items():
        sizes, rest = ((3, 4, 2, 1), ()) if kind == "MoE" else ((2, 3, 4), (jnp.asarray([1, 0]),))
        words = (f"`x` of {kind}", "(2, 9)", f"expected 3 columns = `{option}`", f"`{weight}` (2, 3,", f"{option}=9")
        for layer in (
            getattr(nnx, kind)(*sizes, rngs=rngs),
            partial(getattr(linen, kind)(*sizes).init, jax.random.key(0)),
        ):
            with asserts.refused(ValueError, words):
                layer(jnp.ones((2, 9)), *rest)
    for name, given in (("dtype", "half-ish"), ("dtype", jnp.int32), ("param_dtype", jnp.int32), ("param_dtype", 3)):
        for kind, sizes in (("GroupedLinear", (2, 3, 4)), ("GroupedMLP", (2, 3, 4)), ("MoE", (3, 4, 2, 1))):
            x = (jnp.ones((2, 3)), *([] if kind == "MoE" else [jnp.asarray([1, 0])]))
            words = (f"`{name}` of {kind}", repr(given), "dtype of floating point numbers", "jnp.bfloat16")
            with asserts.refused(TypeError, words):
                getattr(nnx, kind)(*sizes, **{name: given}, rngs=rngs)
            with asserts.refused(TypeError, words):
                getattr(linen, kind)(*sizes, **{name: given}).init(jax.random.key(0), *x)
    with asserts.refused(TypeError, ("`shared_dim` of MoE", "True", "an integer", "size")):
        nnx.MoE(4, 4, 2, 1, shared_dim=True, rngs=rngs)
    with asserts.refused(TypeError, ("`probs`", "float", "expected a JAX or NumPy array [M]", "convert")):
        nnx.GroupedMLP(1, 3, 4, rngs=rngs)(jnp.ones((2, 3)), jnp.asarray([2]), 0.5)
    for probs, wanted in ((jnp.ones(1), "(2,) = all rows of `x`"), (jnp.ones((2, 1)), "one axis [M]")):
        with asserts.refused(ValueError, ("`probs`", f"expected {wanted}", "one probability per row")):
            nnx.GroupedMLP(1, 3, 4, rngs=rngs)(jnp.ones((2, 3)), jnp.asarray([2]), probs)
    with asserts.refused(ValueError, ("`wi`", "6 columns", "expected 8", "side by side")):
        jax_grouped.grouped_mlp(jnp.ones((2, 3)), jnp.ones((1, 3, 6)), jnp.ones((1, 4, 3)), jnp.asarray([2]))
