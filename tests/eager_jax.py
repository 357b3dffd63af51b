"""Eager operations of JAX with fewer programs: most arrays of tests are small, and each shape is used a few times.

JAX compiles a program for each shape even for `jnp.asarray(array)` and `jnp.zeros(shape)`, which takes 18 ms, and for
`jax.random.normal(key, shape)`, which takes 120 ms. Here the first ones need no program, and draws of all shapes share
one. The results are bitwise the same (tests/jax_frontend/test_eager_jax.py). Inside of jit, `jax.grad`, `shard_map` and
of meshes nothing changes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

DRAWS = ("_normal", "_uniform", "_truncated_normal")
"""Compiled functions behind those of `jax.random`; their last parameters are `shape` and `dtype`."""
LENGTHS = (2**12, 2**16)
"""Elements of the draws of which shorter ones are parts. The second takes 30 ms; longer ones are left to JAX."""


def share_programs() -> None:
    """Makes JAX do so from now on, as far as this release of JAX has the functions that are replaced."""
    import jax
    import jax._src.core
    from jax.extend.core import Primitive

    clean = getattr(jax._src.core, "trace_state_clean", None)
    if clean is None:
        return

    def alone() -> bool:
        """Whether a result is made at once, on the default device."""
        return clean() and jax.sharding.get_abstract_mesh().empty

    if isinstance(stage := getattr(jax._src.core, "stage_p", None), Primitive):
        stage.def_impl(_staged(stage.impl, alone))
    broadcast = getattr(jax.lax, "broadcast_in_dim_p", None)
    if isinstance(broadcast, Primitive):
        broadcast.def_impl(_filled(broadcast.impl, alone))
    random = sys.modules[jax.random.normal.__module__]
    for name in DRAWS:
        if hasattr(random, name):
            setattr(random, name, _drawn(getattr(random, name), alone))


def _held(array: np.ndarray[Any, Any]) -> Any:
    """A copy on the default device: JAX may keep the memory that it is given, and a test may write into its own."""
    import jax

    return jax.device_put(np.array(array))


def _staged(impl: Callable[..., Any], alone: Callable[[], bool]) -> Callable[..., Any]:
    """`jnp.asarray` of an array of NumPy."""

    def stage(x: Any) -> Any:
        if isinstance(x, np.ndarray) and not getattr(x, "weak_type", False) and alone():
            return _held(x)
        return impl(x)

    return stage


def _filled(impl: Callable[..., Any], alone: Callable[[], bool]) -> Callable[..., Any]:
    """`jnp.zeros`, `jnp.ones` and `jnp.full`, which repeat a number."""
    import jax

    def broadcast(operand: Any, *lengths: Any, **options: Any) -> Any:
        number = isinstance(operand, jax.Array) and operand.shape == () and isinstance(operand.dtype, np.dtype)
        if number and alone() and not (lengths or operand.weak_type or operand.committed or options.get("sharding")):
            return _held(np.full(options["shape"], np.asarray(operand)))
        return impl(operand, *lengths, **options)

    return broadcast


def _drawn(draw: Callable[..., Any], alone: Callable[[], bool]) -> Callable[..., Any]:
    """Numbers drawn with a key, which are the first ones of a longer draw: each comes from the key and its index."""
    import jax

    def drawn(key: Any, *bounds: Any, shape: Any, dtype: Any, **named: Any) -> Any:
        if (
            shape is None
            or not alone()
            or key.shape
            or any(map(np.ndim, (*bounds, *named.values())))
            or str(jax.random.key_impl(key)) != "threefry2x32"
            or not jax.config.jax_threefry_partitionable  # pyrefly: ignore[missing-attribute]
            or not jax.numpy.issubdtype(dtype, np.floating)
            or len(key.devices()) > 1
            or math.prod(shape) > LENGTHS[-1]
        ):
            return draw(key, *bounds, shape=shape, dtype=dtype, **named)
        elements = math.prod(shape)
        longer = next(length for length in LENGTHS if length >= elements)
        found = np.asarray(draw(key, *bounds, shape=(longer,), dtype=dtype, **named))
        return _held(found[:elements].reshape(shape))

    return drawn
