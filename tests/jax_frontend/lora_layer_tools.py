"""Layers with adapters of Flax NNX and of Linen, with one interface for the tests of both."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx

import jax_grouped
from jax_grouped import linen, nnx
from tests import cases

G, H, F, R, ROWS = 3, 16, 8, 4, 20
SIZES = jnp.array([7, 0, 9], jnp.int32)
ALPHA = 2.0
SCALING = ALPHA / R
KINDS = ("nnx", "linen")
LAYERS = ("GroupedLinear", "GroupedMLP", "MoE")
ARGUMENTS = {"GroupedLinear": (G, H, F), "GroupedMLP": (G, H, F), "MoE": (H, F, G, 2)}
PARTS = {"GroupedLinear": ("lora",), "GroupedMLP": ("wi_lora", "wo_lora"), "MoE": ("wi_lora", "wo_lora")}


def made(*shape: int, seed: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Standard normal values."""
    return jnp.asarray(cases.normal(shape, jnp.dtype(dtype).name, "lora", seed))


X, PROBS = made(ROWS, H, seed=1), jnp.abs(made(ROWS, seed=2, dtype=jnp.float32))


class Layer(NamedTuple):
    """One layer.

    Attributes:
        form: of `LAYERS`. params: its weights by name, with those of parts in dicts. factors: the adapters likewise.
        apply: (params, factors, x, keys of streams) -> y.
        module: of NNX, None in Linen. definition: of Linen, None in NNX.
    """

    form: str
    params: dict[str, Any]
    factors: dict[str, Any]
    apply: Callable[..., Any]
    module: Any
    definition: Any

    def __call__(self, factors: Any = None, x: Any = X, **options: Any) -> Any:
        return self.apply(self.params, self.factors if factors is None else factors, x, **options)


def _extra(form: str) -> tuple[Any, ...]:
    return {"GroupedLinear": (SIZES,), "GroupedMLP": (SIZES, PROBS), "MoE": ()}[form]


def _first(form: str, found: Any) -> Any:
    return found[0] if form == "MoE" else found


def build(kind: str, form: str, *, zero: bool = False, **options: Any) -> Layer:
    """A layer whose parameters are bfloat16 and whose B is random unless `zero`."""
    given = {"lora_rank": R, "lora_alpha": ALPHA, "param_dtype": jnp.bfloat16, **options}
    return (_nnx if kind == "nnx" else _linen)(form, zero, given)


built = cache(build)
"""The same, made once: for tests that do not change a module."""


def _filled(factors: Any) -> Any:
    """Random values in place of each B."""

    def of(path: Any, value: Any) -> Any:
        name = str(getattr(path[-1], "key", path[-1]))
        return made(*value.shape, seed=len(name), dtype=value.dtype) / 2 if name.endswith("_b") else value

    return jax.tree_util.tree_map_with_path(of, factors)


def _nnx(form: str, zero: bool, options: dict[str, Any]) -> Layer:
    module = getattr(nnx, form)(*ARGUMENTS[form], **options, rngs=flax_nnx.Rngs(0, dropout=5))
    # LoRAParam is a Param, so the first filter would take it.
    graph, factors, weights, rest = flax_nnx.split(module, flax_nnx.LoRAParam, flax_nnx.Param, ...)
    held = factors if zero else _restored(factors, _filled(flax_nnx.to_pure_dict(factors)))
    flax_nnx.update(module, held)

    def apply(params: Any, factors: Any, x: Any, *, key: Any = None, training: bool = True) -> Any:
        state = [_restored(weights, params), _restored(held, factors), rest]
        layer = flax_nnx.merge(graph, *state)
        layer.train() if training else layer.eval()
        given = {} if key is None else {"rngs": flax_nnx.Rngs(dropout=key)}
        return _first(form, layer(x, *_extra(form), **given))

    return Layer(form, flax_nnx.to_pure_dict(weights), flax_nnx.to_pure_dict(held), apply, module, None)


def _restored(state: Any, values: Any) -> Any:
    """A copy of an NNX state with other values."""
    made = jax.tree.map(lambda each: each, state)
    flax_nnx.replace_by_pure_dict(made, values)
    return made


def _linen(form: str, zero: bool, options: dict[str, Any]) -> Layer:
    definition = getattr(linen, form)(*ARGUMENTS[form], **options)
    variables = definition.init({"params": jax.random.key(0), "dropout": jax.random.key(5)}, X, *_extra(form))
    factors = variables.get("lora", {})
    factors = factors if zero else _filled(factors)

    def apply(params: Any, factors: Any, x: Any, *, key: Any = None, training: bool = True) -> Any:
        layer = definition if training else definition.clone(deterministic=True)
        rngs = None if key is None else {"dropout": key}
        return _first(form, layer.apply({"params": params, "lora": factors}, x, *_extra(form), rngs=rngs))

    return Layer(form, variables["params"], factors, apply, None, definition)


def function(layer: Layer, factors: Any = None, **options: Any) -> Any:
    """The function that the layer is documented to call."""
    factors, params = layer.factors if factors is None else factors, layer.params
    pairs = tuple((factors[f"{name}_a"], factors[f"{name}_b"]) for name in PARTS[layer.form])
    options = {"lora_scaling": SCALING, **options}
    if layer.form == "GroupedLinear":
        return jax_grouped.ragged_dot(X, params["kernel"], SIZES, bias=params.get("bias"), lora=pairs[0], **options)
    if layer.form == "GroupedMLP":
        return jax_grouped.grouped_mlp(X, params["wi"], params["wo"], SIZES, probs=PROBS, lora=pairs, **options)
    return jax_grouped.moe(X, params["router"]["kernel"], params["wi"], params["wo"], 2, lora=pairs, **options)[0]


def loss(y: Any) -> Any:
    """A number whose gradient is not the same in all elements."""
    return jnp.sum(jnp.square(y.astype(jnp.float32)))
