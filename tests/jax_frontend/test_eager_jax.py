"""Arrays that tests make without programs of their own (tests/eager_jax.py) are those that JAX makes with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jax_frontend.jax_tools import same

SHAPE = (5, 7)
MAKERS: dict[str, Callable[..., Any]] = {
    "asarray": lambda *_: jnp.asarray(np.arange(35, dtype=np.int64).reshape(SHAPE)),
    "zeros": lambda *_: jnp.zeros(SHAPE, jnp.bfloat16),
    "full": lambda *_: jnp.full(SHAPE, 1.5),
    "normal": lambda key, *_: jax.random.normal(key, SHAPE),
    "uniform": lambda key, low, high: jax.random.uniform(key, SHAPE, minval=low, maxval=high),
    "truncated_normal": lambda key, low, high: jax.random.truncated_normal(key, low, high, SHAPE),
}


@pytest.mark.parametrize("name", MAKERS)
def test_eager_arrays_are_those_of_jit(name: str) -> None:
    """Inside of jit nothing is replaced."""
    given = (jax.random.key(3), -2.0, 1.5)
    eager, traced = MAKERS[name](*given), jax.jit(MAKERS[name])(*given)
    same(eager, traced)
    assert (eager.aval, eager.sharding, eager.committed) == (traced.aval, traced.sharding, traced.committed)
