"""The rules of routing on the oracle: finite differences, a dense model of the layer, options that are refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from grouped_core import mlp, routed, routing
from grouped_core.activations import Activation
from grouped_core.calls import ArraySpec, spec_of
from grouped_core.mlp_spec import POLICIES, Mlp, MlpNames, MlpNeeds, MlpSpecs, Residuals
from grouped_core.recipes import BF16, MXFP8, NVFP4, FP8Block, FP8Current, FP8Delayed
from grouped_core.reference import Oracle, activation_of
from grouped_core.routing_spec import (
    alignment_for,
    check_balance_quantile,
    check_permute,
    check_topk_router,
    router_option,
    row_count,
)
from tests import asserts, bounds, cases
from tests.native.runner import Native

T, E, K = 6, 8, 3
STEP = 1e-4
OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax_normalized": {"normalize": True},
    "after_topk": {"after_topk": True, "scale": 2.0},
    "sigmoid": {"score": "sigmoid"},
    "sigmoid_whole": {"score": "sigmoid", "normalize": False},
    "sqrt_softplus": {"score": "sqrt_softplus", "scale": 1.5},
    "groups": {"score": "sigmoid", "num_groups": 4, "topk_groups": 2},
    "jitter": {"jitter": 0.25},
    "sinkhorn": {"sinkhorn": 4},
    "capacity": {"capacity_factor": 0.8},
    "position": {"score": "sigmoid", "capacity_factor": 0.8, "drop": "position"},
}


def normal(*shape: int, seed: str) -> NDArray[np.float64]:
    return cases.normal(shape, "float32", seed).astype(np.float64)


def total(
    run: Any, op: Any, logits: NDArray[Any], d_weights: NDArray[Any], d_losses: NDArray[Any], **given: Any
) -> float:
    chosen = routing.choose(run, op, logits, np.array([len(logits)], np.int32), **given)
    found = routing.losses(run, op, chosen.sums)
    return float((d_weights * chosen.weights).sum() + (d_losses * found.values[:2]).sum())


@pytest.mark.rule("LYR-1", "LYR-3", "LYR-8")
@pytest.mark.matrix(name=tuple(OPTIONS), extras=("plain", "mask", "sequences", "replay"), losses=(True, False))
def test_gradients_of_logits_are_finite_differences(name, extras, losses):
    coefficients = {"aux_coeff": 0.3, "z_coeff": 0.2} if losses else {}
    run, op = Oracle(exact=True), router_option(E, K, **coefficients, **OPTIONS[name])
    logits, d_weights, d_losses = normal(T, E, seed="logits"), normal(T, K, seed="dw"), np.array([1.3, -0.7])
    given: dict[str, Any] = {}
    if op.jitter:
        given["key"] = np.array([5, 6], np.uint32)
    if extras == "mask":
        given["mask"] = np.array([1, 1, 0, 1, 1, 0], np.uint8)
    if extras == "sequences":
        given["sequence_sizes"] = np.array([2, 0, 3], np.int32)  # the last token belongs to none
    if extras == "replay":
        given["experts"] = np.array([[0, 1, 2], [7, -1, 3], [4, 5, 6], [1, 1, 0], [8, 2, 2], [-1, -1, -1]], np.int32)
    tokens = np.array([T], np.int32)
    chosen = routing.choose(run, op, logits, tokens, **given)
    found = routing.losses(run, op, chosen.sums)
    keys = {name: given[name] for name in ("mask", "key", "sequence_sizes") if name in given}
    gradient = routing.router_grad(
        *(run, op, chosen.read, chosen.first, chosen.experts, found, tokens, d_weights, d_losses, run.spec(logits)),
        **keys,
    )
    for at in itertools.product(range(T), range(E)):
        moved = []
        for sign in (1, -1):
            other = logits.copy()
            other[at] += sign * STEP
            moved.append(total(run, op, other, d_weights, d_losses, **given))
        expected = (moved[0] - moved[1]) / (2 * STEP)
        assert abs(gradient[at] - expected) <= bounds.FINITE_DIFFERENCES * max(1, abs(expected)), (name, at)


@pytest.mark.rule("LYR-3")
def test_the_auxiliary_loss_is_its_coefficient_where_experts_have_equal_shares():
    run, op = Oracle(exact=True), router_option(E, 2, aux_coeff=0.25)
    logits = np.zeros((E, E))
    experts = (np.arange(E)[:, None] + np.arange(2)) % E
    chosen = routing.choose(run, op, logits, np.array([E], np.int32), experts=experts.astype(np.int32))
    found = routing.losses(run, op, chosen.sums)
    np.testing.assert_allclose(found.values, [0.25, 0, np.log(E)], rtol=bounds.FINITE_DIFFERENCES)
    asserts.bitwise(chosen.load, np.full((1, E), 2, np.int32))


@pytest.mark.rule("LYR-3")
def test_masked_tokens_change_nothing():
    run, op = Oracle(), router_option(E, K, aux_coeff=0.3, z_coeff=0.2)
    logits = normal(T, E, seed="logits").astype(np.float32)
    mask = np.array([1, 0, 1, 1, 0, 1], np.uint8)
    bad = np.where(mask[:, None] == 0, np.nan, logits).astype(np.float32)
    one = routing.choose(run, op, bad, np.array([T], np.int32), mask=mask)
    two = routing.choose(run, op, logits[mask != 0], np.array([4], np.int32))
    asserts.bitwise(one.weights[mask != 0], two.weights)
    asserts.bitwise(one.load, two.load)
    for a, b in zip(routing.losses(run, op, one.sums), routing.losses(run, op, two.sums), strict=True):
        asserts.bitwise(a, b)


@pytest.mark.rule("LYR-8")
@pytest.mark.parametrize("drop", ["probs", "position"])
def test_what_is_dropped_has_no_weight(drop):
    run, op = Oracle(), router_option(4, 2, capacity_factor=0.5, drop=drop)
    logits = np.tile(np.arange(4, 0, -1, dtype=np.float32), (8, 1)) * np.arange(1, 9, dtype=np.float32)[:, None]
    found: Any = routing.choose(run, op, logits, np.array([8], np.int32))
    assert op.capacity(8, 4) == 2
    kept = np.arange(8) < 2 if drop == "position" else np.arange(8) >= 6  # the later ones are surer of their first
    asserts.bitwise(found.experts[:, 0], np.where(kept, 0, -1).astype(np.int32))
    assert (found.weights[found.experts < 0] == 0).all()
    assert found.dropped[0] == 16 - (found.experts >= 0).sum()
    asserts.bitwise(found.load, np.array([[8, 8, 0, 0]], np.int32))


# ---- rows


@pytest.mark.rule("LYR-5", "LYR-6")
@pytest.mark.parametrize("align", [1, 4])
def test_rows_come_back(align):
    run = Native("gather_rows_any_cpu")
    x = cases.normal((T, 5), "float32", "x")
    experts = np.array([[1, 2], [3, -1], [1, 0], [0, 3], [9, 1], [2, 2]], np.int32)
    weights = np.abs(cases.normal((T, 2), "float32", "w"))
    found = routing.order(run, experts, 4, row_count(12, 4, align, None), align=align, weights=weights)
    rows = routing.gather(run, x, found.source, 2)
    inside = ((experts >= 0) & (experts < 4)).sum(axis=1)
    back = routing.combine(run, rows, found.inverse, "float32")
    asserts.bitwise(back, (x * inside[:, None]).astype(np.float32))
    asserts.bitwise(routing.of_slots(run, found.probs, found.inverse, "float32") != 0, found.inverse >= 0)


@pytest.mark.rule("LYR-5", "LYR-6")
def test_gradients_of_combining_are_finite_differences():
    run = Oracle(exact=True)
    rows, weights, grad = normal(7, 3, seed="rows"), normal(4, 2, seed="w"), normal(4, 3, seed="grad")
    inverse = np.array([[0, 3], [6, -1], [2, 5], [-1, -1]], np.int32)
    source = np.full(7, -1, np.int32)
    source[inverse[inverse >= 0]] = np.flatnonzero(inverse.reshape(-1) >= 0)
    found = routing.combine_grads(run, rows, source, inverse, weights, grad, "float64", (True, True))
    for array, gradient in zip((rows, weights), found, strict=True):
        assert gradient is not None
        for at in np.ndindex(array.shape):
            moved = []
            for sign in (1, -1):
                array[at] += sign * STEP
                moved.append((grad * routing.combine(run, rows, inverse, "float64", weights)).sum())
                array[at] -= sign * STEP
            assert abs(gradient[at] - (moved[0] - moved[1]) / (2 * STEP)) < bounds.FINITE_DIFFERENCES


# ---- the experts' MLP of tokens

H, F = 8, 4
NEEDS = MlpNeeds()


def operands(dtype: str = "float64", experts: int = 4, hidden: int = H, width: int = F) -> dict[str, NDArray[Any]]:
    shapes = {
        "x": (T, hidden),
        "wi": (experts, hidden, 2 * width),
        "wo": (experts, width, hidden),
        "wi_bias": (experts, 2 * width),
        "wo_bias": (experts, hidden),
    }
    held = {
        name: cases.normal(shape, "float32", name).astype(cases.numpy_dtype(dtype)) for name, shape in shapes.items()
    }
    return held | {"weights": np.abs(normal(T, 2, seed="weights")).astype(np.float32 if dtype != "float64" else dtype)}


EXPERTS = np.array([[1, 2], [3, -1], [1, 3], [3, 1], [9, 1], [-1, -1]], np.int32)  # expert 0 has no token


def run_forward(run: Any, op: Mlp, a: dict[str, Any], needs: MlpNeeds) -> routed.Forward:
    given = (a["x"], EXPERTS, a["weights"], a["wi"], a["wo"], np.array([T], np.int32))
    return routed.forward(run, op, *given, a["wi_bias"], a["wo_bias"], needs=needs)


def run_backward(run: Any, op: Mlp, a: dict[str, Any], dy: NDArray[Any], needs: MlpNeeds) -> list[Any]:
    """Every gradient, in the order of `MlpNeeds`, from what forward keeps."""
    found = run_forward(run, op, a, needs)
    spec = run.spec(a["x"])
    dtype = run.spec(a["weights"]).dtype
    given = [run.spec(a[name]) for name in ("x", "wi", "wo", "weights", "wi_bias", "wo_bias")]
    specs = routed.row_specs(op, spec, 2, MlpSpecs(*given))
    again, first = routed.kept_tokens(op, needs, True, True)
    hidden = routed.at_hidden(
        *(run, op, specs, a["x"] if again else None, found.h, found.z, found.wi, found.wo, found.order),
        *(a["wi_bias"], a["wo_bias"], dy, needs),
        weights_dtype=dtype,
    )
    main = routed.first_product(
        run, op, specs, a["x"] if first else None, found.wi, found.order, hidden.dh, hidden.of_dh, needs
    )
    sizes = found.order.sizes
    dwi = mlp.weight_grad(run, op.fc1(), specs.wi, main.rows, main.dy, sizes) if needs.wi else None
    dwo = mlp.weight_grad(run, op.fc2(), specs.wo, hidden.z, hidden.dy, sizes) if needs.wo else None
    return [main.x, dwi, dwo, hidden.probs, main.bias, hidden.wo_bias]


def dense(a: dict[str, Any], op: Mlp) -> NDArray[np.float64]:
    """Each expert on every token, times what the token gives it."""
    y = np.zeros((T, H))
    for e in range(len(a["wi"])):
        h = a["x"] @ a["wi"][e] + a["wi_bias"][e]
        z = activation_of(op.activation.params(), h).t
        share = np.where(e == EXPERTS, a["weights"], 0.0).sum(axis=1, keepdims=True)
        y += share * (z @ a["wo"][e] + a["wo_bias"][e])
    return y


@pytest.mark.rule("LYR-16", "MLP-1")
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_through_the_mlp_are_a_dense_one_hot_sum(policy):
    run, a = Oracle(exact=True), operands()
    op = Mlp(MlpNames(), Activation("swiglu"), residuals=Residuals(policy))
    np.testing.assert_allclose(run_forward(run, op, a, NEEDS).y, dense(a, op), atol=bounds.ORACLES)
    dy = normal(T, H, seed="dy")
    names = ("x", "wi", "wo", "weights", "wi_bias", "wo_bias")
    for name, gradient in zip(names, run_backward(run, op, a, dy, NEEDS), strict=True):
        for at in itertools.islice(np.ndindex(a[name].shape), 0, None, 3):
            moved = []
            for sign in (1, -1):
                other = a[name].copy()
                other[at] += sign * STEP
                moved.append((dy * dense({**a, name: other}, op)).sum())
            expected = (moved[0] - moved[1]) / (2 * STEP)
            assert abs(gradient[at] - expected) <= bounds.FINITE_DIFFERENCES * max(1, abs(expected)), (name, at)


@pytest.mark.rule("LYR-16")
@pytest.mark.parametrize("recipe", [BF16, FP8Block, MXFP8, FP8Current, NVFP4], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_have_the_bits_of_rows(recipe, policy):
    """Tokens kept once, and quantised once where scales are those of rows, give the bits of rows that are kept."""
    run = Native(check=False)
    a = operands("bfloat16", hidden=256, width=128)
    op = Mlp(MlpNames(), Activation("swiglu"), recipe=recipe, residuals=Residuals(policy))
    dy = cases.normal((T, 256), "bfloat16", "dy")
    order = routing.order(run, EXPERTS, 4, 2 * T, weights=a["weights"])
    rows, d_rows = (routing.gather(run, each, order.source, 2) for each in (a["x"], dy))
    given = (a["wi"], a["wo"], order.sizes, order.probs, a["wi_bias"], a["wo_bias"])
    one = mlp.mlp(run, op, rows, *given, needs=NEEDS)
    asserts.bitwise(run_forward(run, op, a, NEEDS).y, routing.combine(run, one.y, order.inverse, "bfloat16"))
    specs = routed.row_specs(
        op, spec_of(a["x"]), 2, MlpSpecs(*(spec_of(a[n]) for n in ("x", "wi", "wo", "weights", "wi_bias", "wo_bias")))
    )
    main = mlp.main_grads(
        *(run, op, specs, one.x, one.h, one.z, one.wi, one.wo, order.sizes, order.probs),
        *(a["wi_bias"], a["wo_bias"], d_rows, NEEDS),
    )
    expected = [
        routing.combine(run, main.x, order.inverse, "bfloat16"),
        mlp.weight_grad(run, op.fc1(), specs.wi, main.rows, main.dh, order.sizes),
        mlp.weight_grad(run, op.fc2(), specs.wo, main.z, main.dy, order.sizes),
        routing.of_slots(run, main.probs, order.inverse, "float32"),
        main.wi_bias,
        main.wo_bias,
    ]
    for name, ours, wanted in zip(MlpNeeds._fields, run_backward(run, op, a, dy, NEEDS), expected, strict=True):
        asserts.bitwise(ours, wanted, name)


# ---- options


@pytest.mark.rule("ERR-1", "LYR-2")
@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"score": "tanh"}, ["`score` of topk_router", "'tanh'", "softmax, sigmoid"]),
        ({"k": 9}, ["`k` of topk_router: 9", "1 to 8"]),
        ({"k": 0}, ["`k` of topk_router: 0", "1 to 8"]),
        ({"after_topk": True, "score": "sigmoid"}, ["`after_topk`", "only a softmax", "leave it out"]),
        ({"after_topk": True, "k": 1}, ["`after_topk`", "would not learn", "after_topk=False"]),
        ({"scale": float("nan")}, ["`scale` of topk_router", "nan", "finite", "pass another"]),
        ({"aux_coeff": float("inf")}, ["`aux_coeff` of topk_router", "inf", "finite", "pass another"]),
        ({"z_coeff": -float("inf")}, ["`z_coeff` of topk_router", "-inf", "finite", "pass another"]),
        ({"jitter": 1.0}, ["`jitter`", "1.0", "0 to 1"]),
        ({"sinkhorn": -1}, ["`sinkhorn`", "-1", "iterations"]),
        ({"capacity_factor": 0.0}, ["`capacity_factor`", "0.0", "above 0"]),
        ({"drop": "random"}, ["`drop`", "'random'", "probs, position"]),
        ({"num_groups": 4}, ["`num_groups`", "given alone", "pass both"]),
        ({"num_groups": 3, "topk_groups": 1}, ["`num_groups` of topk_router: 3", "a divisor of 8"]),
        ({"num_groups": 4, "topk_groups": 1}, ["`topk_groups`", "at least k = 3"]),
        ({"num_groups": 4, "topk_groups": 2, "group_topk": 3}, ["`group_topk`", "1 to 2"]),
        ({"group_topk": 2}, ["`group_topk`", "None without num_groups"]),
    ],
)
def test_options_that_are_refused(options, fragments):
    options = {"k": K, **options}
    with asserts.refused(ValueError, fragments):
        router_option(E, options.pop("k"), **options)


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize("name", ["k", "sinkhorn", "num_groups", "topk_groups", "group_topk"])
@pytest.mark.parametrize("value", [2.0, 2.5, True, "2"])
def test_numbers_that_are_no_integers(name, value):
    options = {"k": K, "num_groups": 4, "topk_groups": 2, name: value}
    with asserts.refused(TypeError, [f"`{name}` of topk_router: {value!r}", "expected an integer", "pass an int"]):
        router_option(E, options.pop("k"), **options)


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("scale", "aux_coeff", "z_coeff", "jitter") for value in (None, "1", [1.0])),
        *(("capacity_factor", value) for value in ("1", [1.0])),
    ],
)
def test_factors_that_are_no_numbers(name, value):
    with asserts.refused(TypeError, [f"`{name}` of topk_router: {value!r}", "expected a number", "pass a float"]):
        router_option(E, K, **{name: value})


@pytest.mark.rule("LYR-1")
def test_defaults_of_options():
    assert router_option(E, 4, num_groups=4, topk_groups=2).limit.group_topk == 2
    assert router_option(E, 1).scores.normalize is False
    assert router_option(E, 2, score="sigmoid").scores.normalize is True
    assert router_option(E, 1, score="sigmoid").scores.normalize is False
    assert router_option(E, 2, normalize=True).scores.normalize is True


@pytest.mark.rule("ERR-1")
def test_arrays_that_are_refused():
    logits = ArraySpec((T, E), "float32")
    wrong: list[tuple[type[Exception], dict[str, Any], list[str]]] = [
        (ValueError, {"bias": ArraySpec((E + 1,), "float32")}, ["`bias` of topk_router", "(9,)", "(8,)"]),
        (ValueError, {"mask": ArraySpec((E,), "bool")}, ["`mask` of topk_router", "(8,)", "(6,)"]),
        (TypeError, {"mask": ArraySpec((T,), "float32")}, ["`mask` of topk_router", "float32", "bool"]),
        (TypeError, {"experts": ArraySpec((T, K), "float32")}, ["`experts` of topk_router", "float32", "integers"]),
        (ValueError, {"experts": ArraySpec((T, 2), "int32")}, ["`experts` of topk_router", "(6, 2)", "(6, 3)"]),
        (ValueError, {"jitter": 0.1}, ["`key` of topk_router", "None with jitter"]),
        (ValueError, {"key": ArraySpec((2,), "uint32")}, ["`key` of topk_router", "given without jitter"]),
        (ValueError, {"key": ArraySpec((2,), "int32"), "jitter": 0.1}, ["`key` of topk_router", "uint32[2]"]),
    ]
    for kind, given, fragments in wrong:
        with asserts.refused(kind, fragments):
            check_topk_router(K, logits, **given)
    x, experts = ArraySpec((T, H), "float32"), ArraySpec((T, K), "int32")
    with asserts.refused(ValueError, ["`num_groups` of permute", "0", "1 to"]):
        check_permute(x, experts, 0, None)
    with asserts.refused(ValueError, ["`align` of permute: 0"]):
        row_count(6, 2, 0, None)
    with asserts.refused(ValueError, ["`max_rows` of permute: 6", "multiple of `align` 4"]):
        row_count(6, 2, 4, 6)


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"experts": 1025}, ["`logits` of balance_quantile: 1025 experts", "2 to 1024", "route to fewer experts"]),
        ({"experts": 1}, ["`logits` of balance_quantile: 1 experts", "2 to 1024", "nothing to balance"]),
        ({"k": 32}, ["`k` of balance_quantile: 32", "1 to 31", "(k + 1)-th largest score", "choose another k"]),
        (
            {"k": 8, "experts": 8},
            ["`k` of balance_quantile: 8", "1 to 7", "fewer than all experts", "choose another k"],
        ),
        ({"bins": 10**6}, ["`bins` of balance_quantile: 1000000", "1 to 65536", "1000 is the default"]),
        ({"bins": 0}, ["`bins` of balance_quantile: 0", "1 to 65536", "1000 is the default"]),
        ({"low": 1.0}, ["`low`, `high` of balance_quantile: 1.0, 1.0", "low < high", "from -1 to 1"]),
        ({"low": 0.0, "high": 1e-50}, ["`low`, `high` of balance_quantile: 0.0, 1e-50", "as float32 too", "margins"]),
        ({"low": -3e38, "high": 3e38}, ["`low`, `high` of balance_quantile: -3e+38", "finite distance", "margins"]),
    ],
)
def test_limits_of_a_quantile_are_said(options, fragments):
    given = {"experts": 64, "k": 31, "bins": 65536, "low": -1.0, "high": 1.0}
    for at, each in enumerate((given, given | options)):
        bias, logits = (ArraySpec((*lead, each["experts"]), "float32") for lead in ((), (2,)))
        call = (logits, bias, each["k"], "sigmoid", each["bins"], each["low"], each["high"], None)
        if at:
            with asserts.refused(ValueError, fragments):
                check_balance_quantile(*call)
        else:
            check_balance_quantile(*call)


@pytest.mark.rule("LYR-7")
def test_alignment_of_recipes():
    found = {recipe.name: alignment_for(recipe) for recipe in (BF16, FP8Delayed, FP8Block, MXFP8, NVFP4)}
    assert found == {"BF16": 1, "FP8Delayed": 128, "FP8Block": 128, "MXFP8": 32, "NVFP4": 16}
    assert alignment_for(None) == 1


@pytest.mark.rule("ALL-2")
def test_a_negative_zero_is_zero():
    """The two have the same key in caches, so results would depend on which one a process has seen first."""
    assert np.copysign(1, router_option(4, 2, scale=-0.0).scores.scale) == 1
