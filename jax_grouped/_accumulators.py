"""Checks, reads and writes the accumulators given as `wgrad_accum`, of both kinds (`jax_grouped.accumulate`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from grouped_core import calls, linear_spec
from grouped_core.calls import ArraySpec
from grouped_core.linear_spec import Linear
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
"""Types of `wgrad_accum`: an array of the weight's shape, a Ref of one, or one layer of stacked accumulators."""


def take(take_array: Callable[[str, Any, str], Any], name: str, accum: Any) -> Any:
    """The argument as an accumulator; `take_array` makes an operand of an array."""
    if is_ref(accum):
        return accum
    if isinstance(accum, StackedRef):
        if is_ref(accum.ref) and len(accum.ref.shape) > 1:
            _check_index(name, accum.index)
            return accum
        raise TypeError(
            f"`{name}`: StackedRef of {_describe(accum.ref)}, expected one of a jax.Ref [L, ...] of all layers; "
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
    """Shape and dtype of the accumulator; of one layer, where it is stacked."""
    if not isinstance(accum, StackedRef):
        return calls.spec_of(accum)
    whole = calls.spec_of(accum.ref)
    return ArraySpec(whole.shape[1:], whole.dtype)


def check(op: Linear, accum: Any, weight: ArraySpec) -> None:
    """Refuses an accumulator that does not fit `weight`.

    Raises:
        TypeError: dtype. ValueError: shape; a `wgrad_dtype` other than the accumulator's dtype.
    """
    got = spec(accum)
    linear_spec.check_accumulator(op.names.accum, got, weight)
    linear_spec.check_wgrad_dtype(op, got)


def all_refs(name: str, accums: Sequence[Any]) -> bool:
    """Whether the accumulators of a call are Refs; entries may be None.

    Raises:
        ValueError: one is a Ref and another an array, or an array is given twice.
    """
    given = [each for each in accums if each is not None]
    kinds = {is_ref(each) or isinstance(each, StackedRef) for each in given}
    if len(kinds) == 2:
        raise ValueError(
            f"`{name}`: an array beside a jax.Ref, expected two of one kind; with a Ref it is unknown whether the "
            "array is differentiated, so pass two arrays, or two Refs."
        )
    sinks = [id(each) for each in given if is_sink(each)]
    if len(set(sinks)) < len(sinks):
        raise ValueError(f"`{name}`: one array for both weights, expected one each; the cotangent would hold it twice.")
    return kinds == {True}


def check_varying(op: Linear, accum: Any, axes: frozenset[str]) -> None:
    """Under shard_map an accumulator holds local partial sums: it must vary over every axis of the gradient (ACC-9).

    Raises:
        ValueError: it is replicated over an axis that the gradient varies over.
    """
    if missing := axes - varying_axes(accum.ref if isinstance(accum, StackedRef) else accum):
        raise ValueError(
            f"`{op.names.accum}`: replicated over the mesh axes {sorted(missing)}, expected one that varies over "
            f"{sorted(axes)} as the weight gradient does; give each shard an accumulator of its own and sum them after "
            "the last microbatch."
        )


def check_asked(op: Linear, weight: bool, accum: bool) -> None:
    """Refuses a differentiated weight whose sink is not differentiated.

    Args:
        weight, accum: whether the caller differentiates with respect to the weight, and to its sink.

    Raises:
        ValueError: the weight only is differentiated; its gradient would be lost.
    """
    if weight and not accum:
        raise ValueError(
            f"`{op.names.accum}`: an array that is not differentiated, while `{op.names.w}` is; expected both, as the "
            "gradient is the array's cotangent; differentiate with respect to it too (value_and_accumulate_grad does), "
            "or pass a jax.Ref."
        )


def is_sink(accum: Any) -> bool:
    """Whether the new accumulator is returned as a cotangent."""
    return isinstance(accum, jax.Array) and not is_ref(accum)


def read(accum: Any) -> jax.Array:
    """The value of the accumulator."""
    if isinstance(accum, StackedRef):
        return accum.ref[accum.index]
    return accum[...] if is_ref(accum) else accum


def write(accum: Any, new: Any) -> Any:
    """Writes the new value into a Ref and returns None, or returns it as the cotangent of a sink."""
    if isinstance(accum, StackedRef):
        accum.ref[accum.index] = new
    elif is_ref(accum):
        accum[...] = new
    else:
        return new
    return None


def is_ref(accum: Any) -> bool:
    """Whether `accum` is a `jax.Ref`."""
    return isinstance(accum, jax.Ref)


def is_accum(node: Any) -> bool:
    """Whether a node in a tree of accumulators is a leaf."""
    return node is None or isinstance(node, StackedRef)


def _describe(value: Any) -> str:
    return str(calls.spec_of(value)) if hasattr(value, "dtype") else type(value).__name__
