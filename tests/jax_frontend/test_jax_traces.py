"""One trace of an operation, differentiated for several sets of operands: each set has residuals of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_grouped
from tests import asserts, cases

M, H, G = 24, 16, 3
SIZES = jnp.array([8, 10, 6])
EXPERTS = jnp.array([[0, 1], [2, 0], [1, 2]] * 8)
Layer = Callable[[Any, dict[str, Any]], Any]


def draw(name: str, *shape: int) -> Any:
    return jnp.asarray(cases.normal(shape, "float32", name, shape) / 4)


def _linear(x: Any, p: dict[str, Any]) -> Any:
    return jax_grouped.ragged_dot(x, p["w"], SIZES, bias=p["bias"], row_scale=p["scale"])


def _mlp(x: Any, p: dict[str, Any]) -> Any:
    return jax_grouped.grouped_mlp(
        x, p["wi"], p["wo"], SIZES, probs=p["probs"], wi_bias=p["wi_bias"], residuals="save_input"
    )


def _routed(x: Any, p: dict[str, Any]) -> Any:
    return jax_grouped.routed_mlp(x, EXPERTS, p["weights"], p["wi"], p["wo"])


def _moe(x: Any, p: dict[str, Any]) -> Any:
    return jax_grouped.moe(x, p["router"], p["wi"], p["wo"], 2)[0]


def _adapted(x: Any, p: dict[str, Any]) -> Any:
    return jax_grouped.ragged_dot(x, jnp.ones((G, H, H)), SIZES, lora=(p["a"], p["b"]), bias=p["bias"])


def _adapted_mlp(x: Any, p: dict[str, Any]) -> Any:
    lora = ((p["a"], p["b"]), None)
    return jax_grouped.grouped_mlp(x, jnp.ones((G, H, 2 * H)), jnp.ones((G, H, H)), SIZES, lora=lora, probs=p["probs"])


_WEIGHTS = {"wi": (G, H, 2 * H), "wo": (G, H, H)}
LAYERS: dict[str, tuple[Layer, dict[str, tuple[int, ...]]]] = {
    "ragged_dot": (_linear, {"w": (G, H, H), "bias": (G, H), "scale": (M,)}),
    "grouped_mlp": (_mlp, {**_WEIGHTS, "probs": (M,), "wi_bias": (G, 2 * H)}),
    "routed_mlp": (_routed, {**_WEIGHTS, "weights": (M, 2)}),
    "moe": (_moe, {**_WEIGHTS, "router": (H, G)}),
    "lora": (_adapted, {"a": (G, H, 2), "b": (G, 2, H), "bias": (G, H)}),
    "lora_mlp": (_adapted_mlp, {"a": (G, H, 2), "b": (G, 2, 2 * H), "probs": (M,)}),
}


@pytest.mark.rule("ALL-1")
@pytest.mark.matrix(name=list(LAYERS), wrap=[jax.checkpoint, jax.jit], of_x=[False, True])
def test_layers_of_one_trace_may_train_different_operands(name: str, wrap: Any, of_x: bool) -> None:
    """Two layers share a trace. The first sees x without a gradient, or parts of the layers are frozen."""
    layer, shapes = LAYERS[name]
    parameters = [{key: draw(f"{at}{key}", *shape) for key, shape in shapes.items()} for at in range(2)]
    first, *_ = every = tuple(shapes)
    for sets in itertools.permutations([(), (first,), every], 2):

        def loss(trained: Any, run: Layer) -> Any:
            x = trained[2] if of_x else draw("x", M, H)
            for own, part in zip(parameters, trained, strict=False):
                x = x + run(x, own | part)
            return (x**2).sum()

        parts = [{key: own[key] for key in keys} for own, keys in zip(parameters, sets, strict=True)]
        trained = (*parts, draw("x", M, H)) if of_x else tuple(parts)
        traced = wrap(lambda x, p: layer(x, p))  # a new one, as JAX keeps what it made of another
        expected, found = (jax.grad(loss)(trained, run) for run in (layer, traced))
        for want, got in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            asserts.bitwise(got, want, f"{sets}")


@pytest.mark.rule("ALL-1")
def test_open_pullbacks_of_one_trace_keep_their_residuals() -> None:
    w, bias, x = draw("w", G, H, H), draw("bias", G, H), draw("x", M, H)
    traced = jax.jit(lambda w, bias: jax_grouped.ragged_dot(x, w, SIZES, bias=bias))
    y, of_both = jax.vjp(traced, w, bias)
    jax.vjp(lambda w: traced(w, bias), w)
    dw, d_bias = of_both(jnp.ones_like(y))
    assert float(jnp.abs(dw).max()) > 0
    asserts.bitwise(d_bias, jnp.broadcast_to(SIZES[:, None].astype(jnp.float32), (G, H)), "gradient of the bias")
