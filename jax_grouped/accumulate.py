"""Weight gradients that are added to an accumulator inside the kernel, without a second buffer.

Two forms. A *sink* is an array: its cotangent is `accumulator + dW`, so `jax.grad` with respect to it returns the new
accumulator. A *Ref* (`jax.Ref`, or one layer of a stack of them) is updated in place while backward runs. Either way
the weight's own cotangent is zero.

Use a sink exactly once a step: used twice it comes back as the sum of two accumulators, unused as zero (but see
`value_and_accumulate_grad`). Tied weights and scans over layers want Refs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jaxtyping import Array, Float, Int

from grouped_core import calls
from grouped_core.calls import ArraySpec, Linear
from jax_grouped._run import varying_axes


@partial(jax.tree_util.register_dataclass, data_fields=["ref", "index"], meta_fields=[])
@dataclass(frozen=True)
class StackedRef:
    """One layer of a `jax.Ref` that holds the accumulators of all layers, for scans over layers.

    Attributes:
        ref: [L, ...], L accumulators of the weight's shape. index: the layer, an integer scalar.
    """

    ref: Any
    index: Int[Array, ""] | int


Accumulator = Float[Array, "G A B"] | jax.Ref | StackedRef
"""What `wgrad_accum` takes: an array of the weight's shape, a Ref of one, or a layer of stacked ones."""


def take(take_array: Callable[[str, Any, str], Any], name: str, accum: Any) -> Any:
    """The argument as an accumulator; `take_array` makes an operand of an array."""
    if _is_ref(accum):
        return accum
    if isinstance(accum, StackedRef):
        if _is_ref(accum.ref) and len(accum.ref.shape) > 1:
            _check_index(name, accum.index)
            return accum
        raise TypeError(
            f"`{name}`: StackedRef of {_describe(accum.ref)}, expected of a jax.Ref [L, ...] of all layers; "
            "make it with jax.new_ref(jnp.zeros((L, *weight.shape)))."
        )
    return take_array(name, accum, "of the weight's shape, a jax.Ref or a StackedRef")


def _check_index(name: str, index: Any) -> None:
    dtype = jnp.result_type(index)
    if jnp.shape(index) or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"`{name}`: StackedRef with the index {dtype}{list(jnp.shape(index))}, expected an integer scalar; "
            "pass the number of the layer."
        )


def spec(accum: Any) -> ArraySpec:
    """Shape and dtype of the accumulator itself, one layer of a stacked one."""
    if not isinstance(accum, StackedRef):
        return calls.spec_of(accum)
    whole = calls.spec_of(accum.ref)
    return ArraySpec(whole.shape[1:], whole.dtype)


def check(op: Linear, accum: Any, weight: ArraySpec) -> None:
    """Shape and dtype of an accumulator of `weight`.

    Raises:
        TypeError: dtype. ValueError: shape; a `wgrad_dtype` that the accumulator does not have.
    """
    got = spec(accum)
    calls.check_accumulator(op.names.accum, got, weight)
    calls.check_wgrad_dtype(op, got)


def check_varying(op: Linear, accum: Any, axes: frozenset[str]) -> None:
    """Under shard_map an accumulator holds local partial sums: it varies wherever the gradient does (ACC-9).

    Raises:
        ValueError: it is replicated over an axis over which the gradient varies.
    """
    if missing := axes - varying_axes(accum.ref if isinstance(accum, StackedRef) else accum):
        raise ValueError(
            f"`{op.names.accum}`: replicated over the mesh axes {sorted(missing)}, expected one that varies over "
            f"{sorted(axes)} as the weight gradient does; give each shard an accumulator of its own and sum them after "
            "the last microbatch."
        )


def check_asked(op: Linear, weight: bool, accum: bool) -> None:
    """Whether somebody differentiates with respect to the weight, and to its sink.

    Raises:
        ValueError: to the weight alone; its gradient would be lost.
    """
    if weight and not accum:
        raise ValueError(
            f"`{op.names.accum}`: an array that is not differentiated, while `{op.names.w}` is; expected both, for the "
            "gradient is the array's cotangent; differentiate with respect to it too (value_and_accumulate_grad does), "
            "or pass a jax.Ref."
        )


def is_sink(accum: Any) -> bool:
    """Whether the new accumulator is handed back as a cotangent."""
    return isinstance(accum, jax.Array) and not _is_ref(accum)


def read(accum: Any) -> jax.Array:
    """What the accumulator holds."""
    if isinstance(accum, StackedRef):
        return accum.ref[accum.index]
    return accum[...] if _is_ref(accum) else accum


def write(accum: Any, new: Any) -> Any:
    """Puts the new value into a Ref, or returns it as the cotangent of a sink."""
    if isinstance(accum, StackedRef):
        accum.ref[accum.index] = new
    elif _is_ref(accum):
        accum[...] = new
    else:
        return new
    return None


def value_and_accumulate_grad(loss: Callable[..., Array]) -> Callable[..., tuple[Array, Any, Any]]:
    """Value, gradients and accumulators of a loss whose grouped weights have accumulators.

    Args:
        loss: `loss(params, accum, *args)` -> scalar; it hands each leaf of `accum` to one operation as `wgrad_accum`.

    Returns:
        A function of (params, accum, *args) with the results (value, grads, accum). `accum` has the structure of
        `params`; a leaf is an array, a `jax.Ref`, a `StackedRef`, or None where a parameter has none. `grads` has the
        same structure, with None beside accumulators: their weights have no other gradient, so other uses of such a
        weight in the loss do not count. An array that no operation reached comes back as it was. In a scan over
        microbatches the new accumulators are the carry.

    Raises:
        ValueError: `accum` holds the same array twice, or has another structure than `params`.
    """

    def run(params: Any, accum: Any, *args: Any) -> tuple[Array, Any, Any]:
        leaves, structure = jax.tree.flatten(accum, is_leaf=_is_accum)
        weights, params_structure = jax.tree.flatten(params)
        if structure != params_structure:
            raise ValueError(
                f"`accum`: structure {structure}, expected {params_structure} = that of `params`; "
                "put None where a parameter has no accumulator."
            )
        sinks = [leaf if is_sink(leaf) else None for leaf in leaves]
        if len({id(sink) for sink in sinks if sink is not None}) != sum(sink is not None for sink in sinks):
            raise ValueError(
                "`accum`: the same array stands twice, expected each once; tied weights want one jax.Ref, "
                "which may be used any number of times."
            )

        def total(weights: list[Any], sinks: list[Any]) -> Array:
            sinks, zero = _kept(sinks)
            mixed = [leaf if sink is None else sink for leaf, sink in zip(leaves, sinks, strict=True)]
            value = loss(params_structure.unflatten(weights), structure.unflatten(mixed), *args)
            return value + zero.astype(value.dtype)

        value, (grads, sinks) = jax.value_and_grad(total, argnums=(0, 1))(weights, sinks)
        rest = [grad if leaf is None else None for grad, leaf in zip(grads, leaves, strict=True)]
        new = [leaf if sink is None else sink for leaf, sink in zip(leaves, sinks, strict=True)]
        return value, params_structure.unflatten(rest), structure.unflatten(new)

    return run


@jax.custom_vjp
def _kept(sinks: list[Any]) -> tuple[list[Any], Array]:
    """The sinks and a zero. Added to the loss, the zero makes backward come by here.

    A sink that no operation reached then gets itself as cotangent, instead of the zero that JAX would give it.
    """
    return sinks, jnp.zeros((), jnp.float32)


def _kept_fwd(sinks: list[Any]) -> tuple[tuple[list[Any], Array], list[Any]]:
    values = custom_vjp_primal_tree_values(sinks)
    return _kept(values), values


def _kept_bwd(values: list[Any], cotangents: tuple[list[Any], Array]) -> tuple[list[Any]]:
    reached, _ = cotangents
    pairs = zip(values, reached, strict=True)
    return ([old if isinstance(new, SymbolicZero) else new for old, new in pairs],)


_kept.defvjp(_kept_fwd, _kept_bwd, symbolic_zeros=True)


def _is_ref(accum: Any) -> bool:
    return isinstance(accum, jax.Ref)


def _is_accum(node: Any) -> bool:
    return node is None or isinstance(node, StackedRef)


def _describe(value: Any) -> str:
    return str(calls.spec_of(value)) if hasattr(value, "dtype") else type(value).__name__
