"""Routing, `routed_mlp` and the whole layer: the frontends give the bits of the rules, run on NumPy arrays.

`FRONTENDS` lists the frontends. Letters: T tokens, E experts, k experts per token, H, F as in `nn.MoE`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import jax_grouped
import torch_bridge
from grouped_core import gradients, routed, router_product, routing
from grouped_core.activations import resolve
from grouped_core.arrays import ArrayRunner
from grouped_core.calls import spec_of
from grouped_core.linear_spec import Linear, Names
from grouped_core.mlp_spec import Mlp, MlpNames, MlpNeeds, MlpSpecs
from grouped_core.products import operand_spec
from grouped_core.routing_spec import row_count
from jax_grouped import route as jax_route
from tests import asserts, cases
from tests.asserts import as_numpy
from tests.parity.adapters import to_torch
from tests.torch_frontend.routing_tools import ROUTERS, TOKENS, Rules, experts_of, mask_of
from torch_bridge import MXFP8, FP8Block, FP8Current, route

Arrays = dict[str, Any]
"""Named NumPy arrays, and None where there is none."""

T, E, K, H, F = 37, 8, 2, 128, 128
LOSSES = {"aux_coeff": 0.5, "z_coeff": 0.25}
UPSTREAM = (2.0, 3.0)
"""Gradients of both losses."""


def draw(*shape: int, seed: object = 0, dtype: str = "float32", scale: float = 1.0) -> NDArray[Any]:
    """Normal values."""
    return (cases.normal(shape, "float32", "moe", seed) * np.float32(scale)).astype(cases.numpy_dtype(dtype))


@dataclass(frozen=True)
class Frontend:
    """One way to the functions of routing, over NumPy arrays.

    Attributes:
        router: (logits, k, d_weights, options, **arrays) -> weights, experts, load, losses [2], dropped, entropy, and
            the gradient of the logits; d_weights [T, k], and `UPSTREAM` for the losses.
        rows: (x, experts, E, probs, d_y, align, max_rows) -> rows, sizes, source, inverse, probabilities of rows, y,
            and the gradients of x and of the probabilities; y weights the rows by the probabilities [T, k].
        functions: (logits, bias, load, ids, rows, sizes) -> experts by hash, both updated biases, padded rows and
            sizes.
        mlp: (operands, experts, weights, dy, **options) -> y, and the gradients of `MlpNeeds`, in that order.
        moe: (operands, router, dy, k, **options) -> y, losses [2], and the gradients of x, router, wi, wo.
    """

    name: str
    router: Callable[..., list[Any]]
    rows: Callable[..., list[Any]]
    functions: Callable[..., list[Any]]
    mlp: Callable[..., list[Any]]
    moe: Callable[..., list[Any]]

    def __str__(self) -> str:
        return self.name


# ---------------------------------------------------------------------------------------------------------------------
# The rules on NumPy arrays


def _rules_router(logits: Any, k: int, d_weights: Any, options: Arrays, **given: Any) -> list[Any]:
    rules = Rules.of(logits, k, options, **_native(given))
    chosen = rules.choose()
    losses = rules.losses(chosen.sums)
    grad = rules.grad(chosen, losses, d_weights, UPSTREAM)
    dropped = np.zeros(1, np.int32) if chosen.dropped is None else chosen.dropped
    return [chosen.weights, chosen.experts, chosen.load[0], losses.values[:2], dropped[0], losses.values[2], grad]


def _native(given: Arrays) -> Arrays:
    """Masks as bytes, integers as int32, as kernels read them."""
    kinds = {"b": np.uint8, "i": np.int32}
    return {name: each.astype(kinds.get(each.dtype.kind, each.dtype)) for name, each in given.items()}


def _rules_rows(x: Any, experts: Any, count: int, probs: Any, dy: Any, align: int, max_rows: int | None) -> list[Any]:
    run, experts = ArrayRunner(x), experts.astype(np.int32)
    k = experts.shape[1]
    order = routing.order(
        run, experts, count, row_count(experts.size, count, align, max_rows), align=align, weights=probs
    )
    rows = routing.gather(run, x, order.source, k)
    y = routing.combine(run, rows, order.inverse, x.dtype.name, probs)
    both = (True, True)
    d_rows, d_probs = routing.combine_grads(run, rows, order.source, order.inverse, probs, dy, x.dtype.name, both)
    dx = routing.combine(run, d_rows, order.inverse, x.dtype.name)
    return [rows, order.sizes, order.source, order.inverse, order.probs, y, dx, d_probs]


def _rules_functions(logits: Any, bias: Any, load: Any, ids: Any, rows: Any, sizes: Any) -> list[Any]:
    run = ArrayRunner(logits)
    counts = routing.margins(run, logits, bias, K, "sigmoid", 1000, -1.0, 1.0)
    padding = routing.padding(run, sizes, len(rows), 16)
    return [
        routing.hash_experts(run, ids, K, E),
        routing.update_bias(run, bias, load, 0.125),
        routing.quantile_bias(run, counts, K, -1.0, 1.0),
        routing.gather(run, rows, padding.source, 1),
        padding.sizes,
    ]


def _rules_mlp(operands: Arrays, experts: Any, weights: Any, dy: Any, **options: Any) -> list[Any]:
    x, wi, wo = operands["x"], operands["wi"], operands["wo"]
    run, experts = ArrayRunner(x), experts.astype(np.int32)
    biases = (operands["wi_bias"], operands["wo_bias"])
    op = Mlp(MlpNames(), resolve("swiglu"), transposed=True, recipe=options.get("recipe"))
    needs = MlpNeeds(wi_bias=biases[0] is not None, wo_bias=biases[1] is not None)
    found = routed.forward(run, op, x, experts, weights, wi, wo, TOKENS, *biases, needs=needs)
    given = [None if each is None else operand_spec(run, each) for each in (x, wi, wo, weights, *biases)]
    specs = routed.row_specs(op, given[0], experts.shape[1], MlpSpecs(*given))
    # x is read again where the policy asks, which the default one does not.
    operands_of = (None, found.h, found.z, found.wi, found.wo, found.order, *biases, dy)
    hidden = routed.at_hidden(run, op, specs, *operands_of, needs, weights_dtype=weights.dtype.name)
    first = routed.first_product(run, op, specs, x, found.wi, found.order, hidden.dh, hidden.of_dh, needs)
    sizes = found.order.sizes
    dwi = gradients.weight_grad(run, op.fc1(), specs.wi, first.rows, first.dy, sizes)
    dwo = gradients.weight_grad(run, op.fc2(), specs.wo, hidden.z, hidden.dy, sizes)
    return [found.y, first.x, dwi, dwo, hidden.probs, first.bias, hidden.wo_bias]


def _rules_moe(operands: Arrays, router: Any, dy: Any, k: int, **options: Any) -> list[Any]:
    x, run = operands["x"], ArrayRunner(operands["x"])
    op, weight = Linear(Names("x", "router"), transposed=True), router[None]
    rules = Rules.of(router_product.router_logits(run, op, x, weight, TOKENS), k, {**LOSSES, **options})
    chosen = rules.choose()
    losses = rules.losses(chosen.sums)
    y, dx, dwi, dwo, d_weights, *_ = _rules_mlp(operands, chosen.experts, chosen.weights, dy)
    d_logits = rules.grad(chosen, losses, d_weights, UPSTREAM)
    specs = (spec_of(x), spec_of(weight))
    grads: Any = router_product.router_grads(run, op, specs, x, weight, TOKENS, d_logits, (True, True))
    # The sum of both gradients of x is rounded once more, as autograd of every frontend does.
    total = (grads.x.astype(np.float32) + dx.astype(np.float32)).astype(x.dtype)
    return [y, losses.values[:2], total, grads.router[0], dwi, dwo]


RULES = Frontend("rules", _rules_router, _rules_rows, _rules_functions, _rules_mlp, _rules_moe)


# ---------------------------------------------------------------------------------------------------------------------
# PyTorch


def _leaf(array: Any) -> Any:
    return None if array is None else to_torch(array).requires_grad_()


def _numpy(found: list[Any]) -> list[Any]:
    return [None if each is None else as_numpy(each) for each in found]


def _torch_router(logits: Any, k: int, d_weights: Any, options: Arrays, **given: Any) -> list[Any]:
    held = _leaf(logits)
    arrays = {name: torch.from_numpy(each) for name, each in given.items()}
    weights, experts, aux = route.topk_router(held, k, **options, **arrays)
    upstream = [to_torch(d_weights), *map(torch.tensor, UPSTREAM)]
    torch.autograd.backward([weights, aux.aux_loss, aux.z_loss], upstream)
    losses = torch.stack([aux.aux_loss, aux.z_loss])
    return _numpy([weights, experts, aux.load, losses, aux.dropped, aux.entropy, held.grad])


def _torch_rows(x: Any, experts: Any, count: int, probs: Any, dy: Any, align: int, max_rows: int | None) -> list[Any]:
    held, p = _leaf(x), _leaf(probs)
    rows, sizes, permutation = route.permute(
        held, torch.from_numpy(experts), count, probs=p.detach(), align=align, max_rows=max_rows
    )
    y = route.unpermute(rows, permutation, p)
    y.backward(to_torch(dy))
    found = [rows, sizes, permutation.source, permutation.inverse, permutation.probs, y, held.grad, p.grad]
    return _numpy(found)


def _torch_functions(logits: Any, bias: Any, load: Any, ids: Any, rows: Any, sizes: Any) -> list[Any]:
    given = [to_torch(each) for each in (logits, bias, load, ids, rows, sizes)]
    padded, found, _ = route.pad_groups(given[4], given[5], 16)
    return _numpy(
        [
            route.hash_experts(given[3], K, E),
            route.update_bias(given[1], given[2], 0.125),
            route.balance_quantile(given[0], given[1], K),
            padded,
            found,
        ]
    )


def _torch_mlp(operands: Arrays, experts: Any, weights: Any, dy: Any, **options: Any) -> list[Any]:
    held = {name: _leaf(each) for name, each in operands.items()}
    p = _leaf(weights)
    given = {name: held[name] for name in ("wi", "wo", "wi_bias", "wo_bias")}
    y = torch_bridge.routed_mlp(held["x"], torch.from_numpy(experts), p, **given, **options)
    y.backward(to_torch(dy))
    leaves = [held["x"], held["wi"], held["wo"], p, held["wi_bias"], held["wo_bias"]]
    return _numpy([y, *(None if each is None else each.grad for each in leaves)])


def _torch_moe(operands: Arrays, router: Any, dy: Any, k: int, **options: Any) -> list[Any]:
    held = {name: _leaf(each) for name, each in operands.items()}
    weight = _leaf(router)
    y, aux = torch_bridge.moe(held["x"], weight, held["wi"], held["wo"], k, **LOSSES, **options)
    upstream = [to_torch(dy), *map(torch.tensor, UPSTREAM)]
    torch.autograd.backward([y, aux.aux_loss, aux.z_loss], upstream)
    grads = [held["x"].grad, weight.grad, held["wi"].grad, held["wo"].grad]
    return _numpy([y, torch.stack([aux.aux_loss, aux.z_loss]), *grads])


# ---------------------------------------------------------------------------------------------------------------------
# JAX


def _jax(arrays: Arrays) -> Arrays:
    return {name: None if each is None else jnp.asarray(each) for name, each in arrays.items()}


def _jax_router(logits: Any, k: int, d_weights: Any, options: Arrays, **given: Any) -> list[Any]:
    arrays = _jax(given)

    @jax.jit
    def step(logits: Any) -> Any:
        (weights, experts, aux), back = jax.vjp(lambda x: jax_route.topk_router(x, k, **options, **arrays), logits)
        zero = jax.tree.map(_no_cotangent, (weights, experts, aux))
        of_aux = zero[2]._replace(aux_loss=jnp.float32(UPSTREAM[0]), z_loss=jnp.float32(UPSTREAM[1]))
        return weights, experts, aux, back((jnp.asarray(d_weights), zero[1], of_aux))[0]

    weights, experts, aux, grad = step(jnp.asarray(logits))
    losses = jnp.stack([aux.aux_loss, aux.z_loss])
    return _numpy([weights, experts, aux.load, losses, aux.dropped, aux.entropy, grad])


def _no_cotangent(array: Any) -> Any:
    kind = array.dtype if jnp.issubdtype(array.dtype, jnp.floating) else jax.dtypes.float0
    return np.zeros(array.shape, kind)


def _jax_rows(x: Any, experts: Any, count: int, probs: Any, dy: Any, align: int, max_rows: int | None) -> list[Any]:
    options: Arrays = {"align": align, "max_rows": max_rows}

    @jax.jit
    def step(x: Any, p: Any) -> Any:
        def function(x: Any, p: Any) -> Any:
            rows, sizes, order = jax_route.permute(x, experts, count, probs=jax.lax.stop_gradient(p), **options)
            return jax_route.unpermute(rows, order, p), (rows, sizes, order)

        y, back, (rows, sizes, order) = jax.vjp(function, x, p, has_aux=True)
        return rows, sizes, order.source, order.inverse, order.probs, y, *back(jnp.asarray(dy))

    return _numpy(list(step(jnp.asarray(x), jnp.asarray(probs))))


def _jax_functions(logits: Any, bias: Any, load: Any, ids: Any, rows: Any, sizes: Any) -> list[Any]:
    padded, found, _ = jax_route.pad_groups(jnp.asarray(rows), jnp.asarray(sizes), 16)
    return _numpy(
        [
            jax_route.hash_experts(jnp.asarray(ids), K, E),
            jax_route.update_bias(jnp.asarray(bias), jnp.asarray(load), 0.125),
            jax_route.balance_quantile(jnp.asarray(logits), jnp.asarray(bias), K),
            padded,
            found,
        ]
    )


def _jax_mlp(operands: Arrays, experts: Any, weights: Any, dy: Any, **options: Any) -> list[Any]:
    names = [name for name, each in operands.items() if each is not None]
    held = _jax(operands)

    @jax.jit
    def step(given: Arrays, weights: Any) -> Any:
        def function(given: Arrays, weights: Any) -> Any:
            rest = {name: given[name] for name in names if name != "x"}
            return jax_grouped.routed_mlp(
                given["x"], jnp.asarray(experts), weights, **rest, rhs_transposed=True, **options
            )

        y, back = jax.vjp(function, given, weights)
        return y, *back(jnp.asarray(dy))

    y, grads, d_weights = step({name: held[name] for name in names}, jnp.asarray(weights))
    order = ("x", "wi", "wo", "weights", "wi_bias", "wo_bias")
    return _numpy([y, *((grads | {"weights": d_weights}).get(name) for name in order)])


def _jax_moe(operands: Arrays, router: Any, dy: Any, k: int, **options: Any) -> list[Any]:
    held = {name: each for name, each in _jax(operands).items() if each is not None}

    @jax.jit
    def step(given: Arrays, router: Any) -> Any:
        def function(given: Arrays, router: Any) -> Any:
            x, wi, wo = (given[name] for name in ("x", "wi", "wo"))
            return jax_grouped.moe(x, router, wi, wo, k, rhs_transposed=True, **LOSSES, **options)

        (y, aux), back = jax.vjp(function, given, router)
        zero = jax.tree.map(_no_cotangent, aux)
        of_aux = zero._replace(aux_loss=jnp.float32(UPSTREAM[0]), z_loss=jnp.float32(UPSTREAM[1]))
        return y, jnp.stack([aux.aux_loss, aux.z_loss]), *back((jnp.asarray(dy), of_aux))

    y, losses, grads, d_router = step(held, jnp.asarray(router.T))
    return _numpy([y, losses, grads["x"], np.ascontiguousarray(np.asarray(d_router).T), grads["wi"], grads["wo"]])


FRONTENDS = (
    Frontend("torch", _torch_router, _torch_rows, _torch_functions, _torch_mlp, _torch_moe),
    Frontend("jax", _jax_router, _jax_rows, _jax_functions, _jax_mlp, _jax_moe),
)
"""The frontends, each held against the rules."""


# ---------------------------------------------------------------------------------------------------------------------


def _same(frontend: Frontend, part: str, names: str, *operands: Any, **options: Any) -> None:
    """A frontend and the rules give the same bits; `part`: of `Frontend`, `names`: of its results."""
    ours, wanted = (getattr(each, part)(*operands, **options) for each in (frontend, RULES))
    for name, one, two in zip(names.split(), ours, wanted, strict=True):
        assert (one is None) == (two is None), name
        if two is not None:
            asserts.bitwise(one, two, name)


@pytest.mark.rule("LYR-1", "LYR-2", "LYR-3", "LYR-8", "ALL-1")
@pytest.mark.parametrize("frontend", FRONTENDS, ids=str)
@pytest.mark.matrix(
    router=tuple(ROUTERS), masked=(False, True), replay=(False, True), dtype=("float32", "bfloat16", "float16")
)
def test_the_router(frontend: Frontend, router: str, masked: bool, replay: bool, dtype: str) -> None:
    given: Arrays = {"bias": draw(E, seed="bias", scale=0.1)}
    given |= {"mask": mask_of(T)} if masked else {}
    given |= {"experts": experts_of(T, K, E)} if replay else {}
    operands = (draw(T, E, dtype=dtype), K, draw(T, K, seed="dw"), {**ROUTERS[router], **LOSSES})
    _same(frontend, "router", "weights experts load losses dropped entropy dx", *operands, **given)


@pytest.mark.rule("LYR-3", "ALL-1", "ALL-4")
@pytest.mark.parametrize("frontend", FRONTENDS, ids=str)
@pytest.mark.parametrize("losses", [{}, {"aux_coeff": 0.5}, {"z_coeff": 0.25}], ids=["none", "aux", "z"])
def test_losses_without_coefficients_take_no_part(frontend: Frontend, losses: dict[str, float]) -> None:
    """An infinite logit has an infinite logsumexp, of which 0 times would be NaN; the weights have finite gradients."""
    logits = draw(T, E)
    logits[3, 0] = np.inf
    operands = (logits, K, draw(T, K, seed="dw"), {"score": "sigmoid", **losses})
    _same(frontend, "router", "weights experts load losses dropped entropy dx", *operands)
    assert np.isfinite(as_numpy(frontend.router(*operands)[-1])).all() == ("z_coeff" not in losses)
    logits[3, 0] = np.nan
    of_nan = as_numpy(frontend.router(*operands)[3])
    asserts.bitwise(np.isnan(of_nan), np.array(["aux_coeff" in losses, "z_coeff" in losses]))
    asserts.zero(of_nan[~np.isnan(of_nan)], "losses without coefficients")


@pytest.mark.rule("LYR-5", "LYR-6", "ALL-1")
@pytest.mark.parametrize("frontend", FRONTENDS, ids=str)
@pytest.mark.matrix(align=(1, 16), max_rows=(None, 64), dtype=("float32", "bfloat16", "float16"))
def test_rows_and_sums(frontend: Frontend, align: int, max_rows: int | None, dtype: str) -> None:
    experts = experts_of(T, K, E)
    experts[2, 0], experts[9, 1] = -1, E
    probs = np.abs(draw(T, K, seed="p"))
    operands = (draw(T, H, dtype=dtype), experts, E, probs, draw(T, H, seed="dy", dtype=dtype), align, max_rows)
    _same(frontend, "rows", "rows sizes source inverse probs y dx dprobs", *operands)


@pytest.mark.rule("LYR-4", "LYR-7", "LYR-14", "LYR-15", "ALL-1")
@pytest.mark.parametrize("frontend", FRONTENDS, ids=str)
def test_the_other_functions(frontend: Frontend) -> None:
    load, ids = np.arange(E, dtype=np.int32), np.arange(T, dtype=np.int32) * 7919
    sizes = np.array([3, 0, 17, 5, 0, 0, 8, 2], np.int32)
    operands = (draw(T, E), draw(E, seed="bias"), load, ids, draw(T, H, seed="rows"), sizes)
    _same(frontend, "functions", "hash sign quantile padded sizes", *operands)


def _operands(dtype: str, *, bias: bool) -> Arrays:
    return {
        "x": draw(T, H, seed="x", dtype=dtype),
        "wi": draw(E, 2 * F, H, seed="wi", dtype=dtype, scale=H**-0.5),
        "wo": draw(E, H, F, seed="wo", dtype=dtype, scale=F**-0.5),
        "wi_bias": draw(E, 2 * F, seed="b1", dtype=dtype) if bias else None,
        "wo_bias": draw(E, H, seed="b2", dtype=dtype) if bias else None,
    }


@pytest.mark.rule("LYR-16", "ALL-1")
@pytest.mark.parametrize("frontend", FRONTENDS, ids=str)
@pytest.mark.matrix(recipe=(None, FP8Current, FP8Block, MXFP8), bias=(False, True), dtype=("float32", "bfloat16"))
def test_the_mlp_of_tokens(frontend: Frontend, recipe: Any, bias: bool, dtype: str) -> None:
    experts = experts_of(T, K, E)
    experts[2, 0], experts[9, 1] = -1, E
    operands = (_operands(dtype, bias=bias), experts, np.abs(draw(T, K, seed="w")), draw(T, H, seed="dy", dtype=dtype))
    _same(frontend, "mlp", "y x wi wo weights wi_bias wo_bias", *operands, recipe=recipe)


@pytest.mark.rule("LYR-1", "LYR-16", "ALL-1")
@pytest.mark.parametrize("frontend", FRONTENDS, ids=str)
@pytest.mark.parametrize("router", ["softmax", "gpt_oss", "deepseek_v3", "capacity_probs"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_whole_layer(frontend: Frontend, router: str, dtype: str) -> None:
    operands = _operands(dtype, bias=False)
    given = (operands, draw(E, H, seed="router", dtype=dtype, scale=H**-0.5), draw(T, H, seed="dy", dtype=dtype), K)
    _same(frontend, "moe", "y losses x router wi wo", *given, **ROUTERS[router])


# ---- what does not fit


BAD_TOKENS: dict[str, tuple[type[Exception], Arrays, tuple[str, ...]]] = {
    "experts_dtype": (
        TypeError,
        {"experts": np.zeros((6, 2), np.float32)},
        ("`experts` of routed_mlp", "dtype float32", "expected integers", "numbers of experts"),
    ),
    "experts_axes": (
        ValueError,
        {"experts": np.zeros(6, np.int32)},
        ("`experts` of routed_mlp", "(6,)", "two axes [T, k]", "reshape"),
    ),
    "no_slots": (
        ValueError,
        {"experts": np.zeros((6, 0), np.int32), "weights": np.zeros((6, 0), np.float32)},
        ("`experts` of routed_mlp", "(6, 0)", "k of 1 or more", "pass -1"),
    ),
    "tokens": (
        ValueError,
        {"experts": np.zeros((7, 2), np.int32)},
        ("`x` of routed_mlp", "6 tokens", "expected 7 as in `experts`", "route these tokens"),
    ),
    "weights_shape": (
        ValueError,
        {"weights": np.zeros((6, 3), np.float32)},
        ("`weights` of routed_mlp", "(6, 3)", "expected (6, 2) as `experts`", "reshape"),
    ),
    "weights_dtype": (
        TypeError,
        {"weights": np.zeros((6, 2), np.int32)},
        ("`weights` of routed_mlp", "dtype int32", "expected one of float32", "cast it"),
    ),
    "x_integers": (
        TypeError,
        {"x": np.zeros((6, 8), np.int32)},
        ("`x`: dtype int32", "expected one of float32, bfloat16, float16;", "cast it"),
    ),
    "x_fp8": (
        TypeError,
        {
            name: np.zeros(shape, cases.numpy_dtype("float8_e4m3fn"))
            for name, shape in (("x", (6, 8)), ("wi", (3, 8, 8)))
        },
        ("`x`: dtype float8_e4m3fn", "expected one of float32, bfloat16, float16;", "cast it"),
    ),
}
LIBRARIES = {"jax": (jax_grouped, jnp.asarray), "torch": (torch_bridge, to_torch)}


def _tokens(frontend: str, **changed: Any) -> Any:
    """`routed_mlp` of six tokens; `changed`: arguments in place of good ones."""
    library, array = LIBRARIES[frontend]
    given = {
        "x": draw(6, 8),
        "experts": np.zeros((6, 2), np.int32),
        "weights": draw(6, 2, seed=1),
        "wi": draw(3, 8, 8, seed=2),
        "wo": draw(3, 4, 8, seed=3),
    } | changed
    call: Any = library.routed_mlp
    return call(**{name: array(value) for name, value in given.items()}, rhs_transposed=False)


@pytest.mark.rule("ERR-1", "ALL-1")
@pytest.mark.parametrize("frontend", LIBRARIES)
@pytest.mark.parametrize("name", BAD_TOKENS)
def test_tokens_that_do_not_fit_are_refused(name: str, frontend: str) -> None:
    kind, changed, fragments = BAD_TOKENS[name]
    with asserts.refused(kind, fragments):
        _tokens(frontend, **changed)


@pytest.mark.rule("ALL-1", "LYR-16")
def test_tokens_may_have_more_slots_than_a_router_gives() -> None:
    slots = np.random.default_rng(0).integers(-1, 3, (6, 40)).astype(np.int32)
    both = [_tokens(each, experts=slots, weights=draw(6, 40, seed=1)) for each in LIBRARIES]
    asserts.bitwise(as_numpy(both[1]), as_numpy(both[0]))


@pytest.mark.rule("ERR-1", "ALL-1")
@pytest.mark.parametrize("frontend", LIBRARIES)
def test_numbers_that_are_arrays_and_large_capacities(frontend: str) -> None:
    library, array = LIBRARIES[frontend]
    bias, load, logits = array(draw(4)), array(np.arange(4, dtype=np.int32)), array(draw(6, 4))
    with asserts.refused(TypeError, ("`rate` of update_bias", "expected a number that is known", "pass a float")):
        library.route.update_bias(bias, load, array(draw(2)))
    weights, _, aux = library.route.topk_router(logits, 2, capacity_factor=1e38)
    asserts.bitwise(as_numpy(weights), as_numpy(library.route.topk_router(logits, 2)[0]))
    assert int(aux.dropped) == 0
