"""Sums of arrays with one rounding each, inside of jit as outside of it.

XLA drops the rounding of a sum to bfloat16 if the caller widens the result afterwards (`xla_allow_excess_precision`),
so the caller would get other bits inside of jit. A value that is rounded already loses nothing that way.

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


def rounded_sum(a: Float[Array, "T H"], b: Float[Array, "T H"]) -> Float[Array, "T H"]:
    """Returns a + b in their common dtype, rounded once."""
    dtype = jnp.result_type(a, b)
    if dtype == jnp.bfloat16:
        wide = lax.reduce_precision(a.astype(jnp.float32) + b.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
        return wide.astype(dtype)
    return a + b  # float16 keeps its rounding (on a CPU, measured); reduce_precision would flush its subnormals


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def copies(x: Float[Array, "T H"], count: int) -> tuple[Float[Array, "T H"], ...]:
    """Returns x `count` times; the gradient of x is the sum of theirs, from the last to the first, each sum rounded."""
    return (x,) * count


def _forward(x: Any, count: int) -> tuple[tuple[Any, ...], None]:
    return (x.value,) * count, None


def _backward(count: int, residuals: None, gradients: Sequence[Any]) -> tuple[Any]:
    del count, residuals
    total = None
    for each in reversed(gradients):
        if not isinstance(each, SymbolicZero):
            total = each if total is None else rounded_sum(total, each)
    return (total,)


copies.defvjp(_forward, _backward, symbolic_zeros=True)
