"""Converts the arguments of the operations to JAX arrays and specs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from grouped_core import calls, debug
from grouped_core.calls import ArraySpec
from grouped_core.formats import PLAIN, QTensor
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.scaling import ARRAYS, ScalingState
from grouped_core.sizes import GroupSizes

AnyArray = Array | np.ndarray
"""Types of an array operand; NumPy arrays become constants of the program."""

jax.tree_util.register_static(Recipe)  # as a bound one may be an argument of `jit`, or part of a tree
jax.tree_util.register_dataclass(GroupSizes, data_fields=["value"], meta_fields=["representative"])
_QTENSOR_ARRAYS = ("values", "scales", "group_scales", "other", "group_sizes")
_QTENSOR_FACTS = ("format", "axis", "shape", "dtype")
_BOUND_ARRAYS = ("state", "key")


def _flatten(q: QTensor[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    arrays = tuple(getattr(q, name) for name in _QTENSOR_ARRAYS)
    return arrays, tuple(getattr(q, name) for name in _QTENSOR_FACTS)


def _flatten_with_keys(q: QTensor[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    arrays, facts = _flatten(q)
    return tuple(zip(map(jax.tree_util.GetAttrKey, _QTENSOR_ARRAYS), arrays, strict=True)), facts


def _unflatten(facts: tuple[Any, ...], arrays: Iterable[Any]) -> QTensor[Any]:
    """The `QTensor` of these parts. Where they are one shard of groups or rows, its shape is that of the shard."""
    (format, axis, shape, dtype), (values, scales, group_scales, other, sizes) = facts, arrays
    held: tuple[int, ...] = getattr(values, "shape", ())
    if len(held) == len(shape) and (len(shape) == 3 or axis == 1):
        shape = (*held[:1], *shape[1:])
    return QTensor(values, scales, group_scales, format, axis, shape, dtype, other, sizes)


jax.tree_util.register_pytree_with_keys(QTensor, _flatten_with_keys, _unflatten, _flatten)


def _unflatten_bound(recipe: Any, arrays: Iterable[Any]) -> BoundRecipe:
    """The `BoundRecipe` of these parts, which may be any objects: so it is not checked, as `Recipe.bind` checks it."""
    bound = object.__new__(BoundRecipe)
    for name, value in zip(_BOUND_ARRAYS, arrays, strict=True):
        object.__setattr__(bound, name, value)
    object.__setattr__(bound, "recipe", recipe)
    return bound


def _flatten_bound(bound: BoundRecipe) -> tuple[tuple[Any, ...], Any]:
    return tuple(getattr(bound, name) for name in _BOUND_ARRAYS), bound.recipe


def _flatten_bound_with_keys(bound: BoundRecipe) -> tuple[tuple[Any, ...], Any]:
    arrays, recipe = _flatten_bound(bound)
    return tuple(zip(map(jax.tree_util.GetAttrKey, _BOUND_ARRAYS), arrays, strict=True)), recipe


jax.tree_util.register_pytree_with_keys(BoundRecipe, _flatten_bound_with_keys, _unflatten_bound, _flatten_bound)
jax.tree_util.register_dataclass(ScalingState, data_fields=[*ARRAYS], meta_fields=["algorithm"])

_logger = logging.getLogger("grouped_core")
_INT32 = np.iinfo(np.int32)


def as_array(name: str, value: Any, shape: str) -> Any:
    """`value` as a JAX array; NumPy arrays become constants.

    Raises:
        TypeError: it is none, or masked. NotImplementedError: its shape has a symbolic dimension of `jax.export`.
    """
    if isinstance(value, jax.Array):
        if not all(isinstance(length, int) for length in value.shape):
            raise NotImplementedError(
                f"`{name}`: shape {value.shape}, expected integers without symbolic dimensions, because a kernel is "
                "chosen for the shape; export a program for each shape, or pad to one."
            )
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"`{name}`: a masked array, expected one without a mask {shape}, which would be lost; pass "
            f"{name}.filled(value)."
        )
    if isinstance(value, np.ndarray):
        # jnp.asarray would wrap 64-bit sizes, which must saturate, and cast float64, which must be refused.
        return jnp.asarray(value) if calls.spec_of(value).dtype in PLAIN else value
    raise TypeError(
        f"`{name}`: {type(value).__name__}, expected a JAX or NumPy array {shape}; convert it with jnp.asarray."
    )


def as_spec(name: str, value: Any, shape: str) -> ArraySpec:
    """Shape and dtype of an array or `jax.ShapeDtypeStruct`."""
    return calls.spec_of(value if isinstance(value, jax.ShapeDtypeStruct) else as_array(name, value, shape))


def as_operand(name: str, value: Any, shape: str) -> Any:
    """Does what `as_array` does, for an operand that may be quantised."""
    if isinstance(value, QTensor):
        return _each_array(value, lambda field, array: as_array(f"{name}.{field}", array, "of a QTensor"))
    return as_array(name, value, shape)


def as_operand_spec(name: str, value: Any, shape: str) -> Any:
    """Does what `as_spec` does; for a quantised operand it returns a `QTensor` of specs."""
    if isinstance(value, QTensor):
        return _each_array(value, lambda field, array: as_spec(f"{name}.{field}", array, "of a QTensor"))
    return as_spec(name, value, shape)


def _each_array(q: QTensor[Any], take: Callable[[str, Any], Any]) -> QTensor[Any]:
    def taken(field: str) -> Any:
        array = getattr(q, field)
        return None if array is None else take(field, array)

    other = None if q.other is None else _each_array(q.other, take)
    values, scales, group_scales, sizes = map(taken, ("values", "scales", "group_scales", "group_sizes"))
    return QTensor(values, scales, group_scales, q.format, q.axis, q.shape, q.dtype, other, sizes)


def as_bound(bound: BoundRecipe) -> BoundRecipe:
    """The bound recipe with NumPy arrays, e.g. from a checkpoint, converted to JAX arrays."""

    def taken(leaf: Any) -> Any:
        return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf

    return jax.tree.map(taken, bound)


def to_int32(sizes: Any) -> jax.Array:
    """Sizes, or numbers of experts, as int32 on the device; larger ones saturate (GRP-1), so none wraps into range."""
    info = jnp.iinfo(sizes.dtype)
    if info.min < _INT32.min or info.max > _INT32.max:
        xp = np if isinstance(sizes, np.ndarray) else jnp
        sizes = xp.clip(sizes, max(int(info.min), _INT32.min), min(int(info.max), _INT32.max))
    return jnp.asarray(sizes.astype(np.int32))


def axis_names(function: str, axis_name: Any) -> tuple[str, ...] | None:
    """`axis_name=` of a function as names of axes of the mesh.

    Raises:
        TypeError: it is neither None, a name nor several. ValueError: the caller is not inside `shard_map` over them.
    """
    names = axis_name_option(function, axis_name)
    for name in names or ():
        try:
            jax.lax.axis_size(name)
        except NameError as error:
            raise ValueError(
                f"`axis_name` of {function}: {name!r}, expected axes that are manual here; call it inside "
                "jax.shard_map over them, or leave it out."
            ) from error
    return names


def axis_name_option(function: str, axis_name: Any) -> tuple[str, ...] | None:
    """The names in `axis_name=` of a function or a layer, wherever that is called. Raises TypeError: they are none."""
    if axis_name is None:
        return None
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple | list) or not all(isinstance(each, str) for each in names):
        raise TypeError(
            f"`axis_name` of {function}: {axis_name!r}, expected None, a name or a tuple of names; name axes of the "
            "mesh."
        )
    return tuple(names)


def report_sizes(word: Any) -> None:
    """Logs sizes that do not fit."""
    if int(word):
        _logger.warning("group_sizes: %s", debug.describe_status(int(word)))


@partial(jax.jit, static_argnums=0, inline=True)
def one_group(rows: int) -> jax.Array:
    """int32 [1]: the sizes of one group of all rows."""
    return jnp.full((1,), rows, jnp.int32)
