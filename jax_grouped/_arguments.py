"""Arguments of the operations, from whatever a user may hand in to JAX arrays and specs."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from grouped_core import calls, debug
from grouped_core.calls import ArraySpec
from grouped_core.formats import PLAIN
from grouped_core.sizes import GroupSizes

AnyArray = Array | np.ndarray
"""What an operand may be; NumPy arrays become constants of the program."""

jax.tree_util.register_dataclass(GroupSizes, data_fields=["value"], meta_fields=["representative"])

_logger = logging.getLogger("grouped_core")
_INT32 = np.iinfo(np.int32)


def as_array(name: str, value: Any, shape: str) -> Any:
    """`value` as a JAX array; NumPy's become constants."""
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, np.ndarray):
        # JAX would wrap 64-bit sizes, which must saturate, and cast float64, which is refused.
        return jnp.asarray(value) if calls.spec_of(value).dtype in PLAIN else value
    raise TypeError(
        f"`{name}`: {type(value).__name__}, expected a JAX or NumPy array {shape}; convert it with jnp.asarray."
    )


def as_spec(name: str, value: Any, shape: str) -> ArraySpec:
    """Shape and dtype of an array or `jax.ShapeDtypeStruct`."""
    return calls.spec_of(value if isinstance(value, jax.ShapeDtypeStruct) else as_array(name, value, shape))


def to_int32(sizes: Any) -> jax.Array:
    """Sizes as int32 on the device; larger ones saturate (GRP-1)."""
    info = jnp.iinfo(sizes.dtype)
    if info.min < _INT32.min or info.max > _INT32.max:
        xp = np if isinstance(sizes, np.ndarray) else jnp
        sizes = xp.clip(sizes, max(int(info.min), _INT32.min), min(int(info.max), _INT32.max))
    return jnp.asarray(sizes.astype(np.int32))


def report_sizes(word: Any) -> None:
    """Logs sizes that do not fit."""
    if int(word):
        _logger.warning("group_sizes: %s", debug.describe_status(int(word)))
