"""Weight gradients that the kernel adds to an accumulator, without a second buffer, in backward or deferred.

There are two kinds of accumulators. A *sink* is an array: its cotangent is `accumulator + dW`, so `jax.grad` with
respect to it returns the new accumulator. A *Ref* (`jax.Ref`, or one layer of a stack of them) is updated in place
while backward runs. With both kinds the weight's own cotangent is zero.

Use a sink exactly once per step: if it is used twice, its cotangent is the sum of two accumulators; if it is not used,
zero (but see `value_and_accumulate_grad`). Use Refs for tied weights and scans over layers.

Schedules that compute weight gradients later call `grouped_mlp_fwd`, `grouped_mlp_bwd_dx` and `grouped_mlp_bwd_dw`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jaxtyping import Array

from grouped_core.formats import WIDE
from jax_grouped._accumulators import Accumulator as Accumulator
from jax_grouped._accumulators import StackedRef as StackedRef
from jax_grouped._accumulators import is_accum, is_sink
from jax_grouped._arguments import as_array
from jax_grouped._mlp_gradients import Deferred as Deferred
from jax_grouped._mlp_gradients import MlpResiduals as MlpResiduals
from jax_grouped._mlp_gradients import grouped_mlp_bwd_dw as grouped_mlp_bwd_dw
from jax_grouped._mlp_gradients import grouped_mlp_bwd_dx as grouped_mlp_bwd_dx
from jax_grouped.mlp import grouped_mlp_fwd as grouped_mlp_fwd


def value_and_accumulate_grad(loss: Callable[..., Array]) -> Callable[..., tuple[Array, Any, Any]]:
    """Value, gradients and accumulators of a loss whose grouped weights have accumulators.

    Args:
        loss: `loss(params, accum, *args)` -> scalar; it passes each leaf of `accum` to one operation as `wgrad_accum`.

    Returns:
        A function of (params, accum, *args) with the results (value, grads, accum). `accum` has the structure of
        `params`; a leaf is an array, a `jax.Ref`, a `StackedRef`, or None where a parameter has no accumulator. `grads`
        has the same structure, with None for parameters that have an accumulator: gradients of such a weight from its
        other uses in the loss are discarded. An array that backward did not reach is returned unchanged, as far as
        tracing tells: where `jax.lax.cond` skips a layer at run time, JAX gives its accumulator a cotangent of zeros,
        which would be its new value. There select between the new and the old array by the same predicate. In a scan
        over microbatches the new accumulators are the carry.

    Raises:
        ValueError: `accum` holds the same array twice, or its structure is not that of `params`. TypeError: a dtype, or
            the result of the loss is no array.
    """

    def run(params: Any, accum: Any, *args: Any) -> tuple[Array, Any, Any]:
        leaves, structure = jax.tree.flatten(accum, is_leaf=is_accum)
        leaves = [_array(leaf) if is_sink(leaf) or isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
        weights, params_structure = jax.tree.flatten(params, is_leaf=lambda each: each is None)
        if structure != params_structure:
            raise ValueError(
                f"`accum`: structure {structure}, expected {params_structure} = that of `params`; "
                "put None where a parameter has no accumulator."
            )
        sinks = [leaf if is_sink(leaf) else None for leaf in leaves]
        if len({id(sink) for sink in sinks if sink is not None}) != sum(sink is not None for sink in sinks):
            raise ValueError(
                "`accum`: the same array is given twice, expected each once; use one jax.Ref for tied weights, "
                "which may be used any number of times."
            )

        def total(weights: list[Any], sinks: list[Any]) -> Array:
            sinks, zero = _kept(sinks)
            mixed = [leaf if sink is None else sink for leaf, sink in zip(leaves, sinks, strict=True)]
            value = loss(params_structure.unflatten(weights), structure.unflatten(mixed), *args)
            if not hasattr(value, "dtype"):
                raise TypeError(
                    f"`loss` of value_and_accumulate_grad: its result is a {type(value).__name__}, expected a scalar "
                    "array; return the loss alone."
                )
            return value + zero.astype(value.dtype)

        value, (grads, sinks) = jax.value_and_grad(total, argnums=(0, 1))(weights, sinks)
        rest = [grad if leaf is None else None for grad, leaf in zip(grads, leaves, strict=True)]
        new = [leaf if sink is None else sink for leaf, sink in zip(leaves, sinks, strict=True)]
        return value, params_structure.unflatten(rest), structure.unflatten(new)

    return run


def _array(accum: Any) -> Array:
    """An accumulator of JAX or NumPy as a JAX array. Raises TypeError: its dtype is none of an accumulator."""
    if str(accum.dtype) not in WIDE:
        raise TypeError(
            f"`accum`: dtype {accum.dtype}, expected one of {', '.join(WIDE)}; allocate arrays of one of these."
        )
    return as_array("accum", accum, "of the shape of its weight")


@jax.custom_vjp
def _kept(sinks: list[Any]) -> tuple[list[Any], Array]:
    """The sinks and a zero. The zero is added to the loss, so that backward always runs `_kept_bwd`.

    There, a sink that backward did not reach gets itself as its cotangent, instead of the zero that JAX would give it.
    """
    return _beside_zero(sinks)


def _beside_zero(sinks: list[Any]) -> tuple[list[Any], Array]:
    return sinks, jnp.zeros((), jnp.float32)


def _kept_fwd(sinks: list[Any]) -> tuple[tuple[list[Any], Array], list[Any]]:
    values = custom_vjp_primal_tree_values(sinks)
    return _beside_zero(values), values


def _kept_bwd(values: list[Any], cotangents: tuple[list[Any], Array]) -> tuple[list[Any]]:
    reached, _ = cotangents
    pairs = zip(values, reached, strict=True)
    return ([old if isinstance(new, SymbolicZero) else new for old, new in pairs],)


_kept.defvjp(_kept_fwd, _kept_bwd, symbolic_zeros=True)
