"""Memory that compiled products take beyond operands and results, as XLA plans it."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import jax_grouped as jg

M, G, K, N = 512, 64, 64, 48


def _temporary_bytes(f: Any, *shapes: Any) -> int:
    found: Any = jax.jit(f).lower(*shapes).compile().memory_analysis()
    return found.temp_size_in_bytes


@pytest.mark.rule("MAT-1", "marin #5394", "marin #6979")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_ragged_product_is_not_expanded_to_a_dense_one(dtype: str, transposed: bool) -> None:
    """No rows per group [G, M, K] and no copy of a weight: all temporaries are far smaller than one operand."""
    x, dy = (jax.ShapeDtypeStruct((M, width), dtype) for width in (K, N))
    w = jax.ShapeDtypeStruct((G, N, K) if transposed else (G, K, N), dtype)
    sizes = jax.ShapeDtypeStruct((G,), "int32")

    def product(x: Any, w: Any, sizes: Any) -> jax.Array:
        return jg.ragged_dot(x, w, sizes, rhs_transposed=transposed)

    def gradients(x: Any, w: Any, sizes: Any, dy: Any) -> tuple[jax.Array, ...]:
        return jax.vjp(lambda x, w: product(x, w, sizes), x, w)[1](dy)

    least = min(each.size * each.dtype.itemsize for each in (x, w, dy))
    for taken in (_temporary_bytes(product, x, w, sizes), _temporary_bytes(gradients, x, w, sizes, dy)):
        assert taken < least / 16, f"{taken} bytes beside operands of {least}"
