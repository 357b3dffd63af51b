"""Sums of arrays with one rounding each, inside of jit as outside of it.

XLA drops the rounding of a value to bfloat16 if the value is widened afterwards (`xla_allow_excess_precision`): that of
an operand which the caller has just narrowed, and that of the sum if the caller widens it. So it would give other bits
inside of jit. A value that is rounded already loses nothing that way.

Letters: T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from jax_grouped._run import differentiable


def rounded_sum(a: Float[Array, "T H"], b: Float[Array, "T H"]) -> Float[Array, "T H"]:
    """Returns a + b in their common dtype, rounded once."""
    dtype = jnp.result_type(a, b)
    if dtype == jnp.bfloat16:
        return _to_bfloat16(_to_bfloat16(a.astype(jnp.float32)) + _to_bfloat16(b.astype(jnp.float32))).astype(dtype)
    return a + b  # float16 keeps its rounding (on a CPU, measured); reduce_precision would flush its subnormals


def _to_bfloat16(x: Float[Array, "T H"]) -> Float[Array, "T H"]:
    """Returns float32 values that bfloat16 can hold."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def copies(x: Float[Array, "T H"], count: int) -> tuple[Float[Array, "T H"], ...]:
    """Returns x `count` times; the gradient of x is the sum of theirs, from the last to the first, each sum rounded."""
    return differentiable(_copies, count, x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _copies(count: int, x: Any) -> tuple[Any, ...]:
    return (x,) * count


def _forward(count: int, x: Any) -> tuple[tuple[Any, ...], None]:
    return (x.value,) * count, None


def _backward(count: int, residuals: None, gradients: Sequence[Any]) -> tuple[Any]:
    del count, residuals
    total = None
    for each in reversed(gradients):
        if not isinstance(each, SymbolicZero):
            total = each if total is None else rounded_sum(total, each)
    return (total,)


_copies.defvjp(_forward, _backward, symbolic_zeros=True)
