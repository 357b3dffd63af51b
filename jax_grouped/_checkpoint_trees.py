"""Trees of JAX as flat mappings of paths, and back; Flax NNX modules are parts of trees."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from grouped_core.activations import Activation
from grouped_core.checkpoint_files import some_names
from grouped_core.formats import QTensor
from grouped_core.layouts import join
from grouped_core.safetensors_file import DTYPES, Facts


class _Jax:
    """Implements `grouped_core.layout_steps.Arrays` for JAX; NumPy arrays stay on the host."""

    def stack(self, arrays: Sequence[Any]) -> Any:
        return _module_of(arrays).stack(arrays)

    def concatenate(self, arrays: Sequence[Any], axis: int) -> Any:
        return _module_of(arrays).concatenate(arrays, axis)

    def view(self, array: Any, dtype: str) -> Any:
        if isinstance(array, np.ndarray):
            return array.view(jnp.dtype(dtype))
        return jax.lax.bitcast_convert_type(array, jnp.dtype(dtype))

    def cast(self, array: Any, dtype: str) -> Any:
        return array.astype(jnp.dtype(dtype))


JAX = _Jax()


def _module_of(arrays: Sequence[Any]) -> Any:
    return np if all(isinstance(each, np.ndarray) for each in arrays) else jnp


def facts_of(value: Any) -> Facts:
    """The facts of an array of a checked tree."""
    return Facts(tuple(value.shape), str(value.dtype))


def is_module(value: Any) -> bool:
    """Whether it is a module or an optimiser of Flax NNX, which are updated in place; Flax is not imported for that."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Module | nnx.Optimizer)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, QTensor) or is_module(value)


@dataclass
class Tree:
    """A flattened tree.

    Attributes:
        flat: arrays and `QTensor`s by their paths. activations: those of the MLPs in its modules, by place.
        rebuilt: makes the tree of a mapping like `flat`; modules are updated in place.
    """

    flat: dict[str, Any]
    activations: dict[str, Activation]
    rebuilt: Callable[[Mapping[str, Any]], Any]


def taken(tree: Any, path: str = "") -> Tree:
    """Takes a tree apart.

    Raises:
        ValueError: two leaves have one path. TypeError: a leaf is no array.
    """
    if is_module(tree):
        return _of_module(tree, path)
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_leaf)
    flat: dict[str, Any] = {}
    activations: dict[str, Activation] = {}
    parts: list[Tree | str] = []
    for keys, leaf in leaves:
        name = join(path, *_names(keys))
        if is_module(leaf):
            inner = _of_module(leaf, name)
            parts.append(inner)
            activations |= inner.activations
            entries = inner.flat
        elif isinstance(leaf, QTensor) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            parts.append(name)
            entries = {name: leaf}
        else:
            raise TypeError(
                f"`{name or 'tree'}` of a checkpoint: {type(leaf).__name__}, expected an array, a QTensor, or a Flax "
                "NNX module; leave it out, or convert it."
            )
        if double := flat.keys() & entries.keys():
            raise ValueError(
                f"`{min(double)}` of a checkpoint: two arrays of that path, expected one; rename a part of the tree."
            )
        flat |= entries

    def rebuilt(made: Mapping[str, Any]) -> Any:
        values = [made[part] if isinstance(part, str) else part.rebuilt(made) for part in parts]
        return jax.tree_util.tree_unflatten(structure, values)

    return Tree(flat, activations, rebuilt)


def checked(tree: Any) -> Tree:
    """Takes a tree of a caller apart, all of whose arrays a checkpoint can have.

    Raises:
        ValueError: two leaves have one path, or a dtype that files do not have. TypeError: a leaf is no array, or a
            masked one.
    """
    whole = taken(tree)
    for name, leaf in whole.flat.items():
        if isinstance(leaf, np.ma.MaskedArray):
            raise TypeError(
                f"`{name or 'tree'}` of a checkpoint: a masked array, expected one without a mask, which would be "
                "lost; pass leaf.filled(value)."
            )
        if not isinstance(leaf, QTensor) and str(leaf.dtype) not in DTYPES:
            raise ValueError(
                f"`{name or 'tree'}` of a checkpoint: dtype {leaf.dtype}, expected one of {', '.join(DTYPES)}; convert "
                "it, such as a key with jax.random.key_data."
            )
    return whole


def _names(keys: Sequence[Any]) -> list[str]:
    """The segments of a path; boxes of metadata and variables add none."""
    return [
        str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))
        for key in keys
        if not (isinstance(key, jax.tree_util.GetAttrKey) and key.name == "value")
    ]


def _of_module(module: Any, path: str) -> Tree:
    from flax import nnx

    state = nnx.state(module, nnx.Not(nnx.RngState))
    inner = taken(nnx.to_pure_dict(state), path)
    activations: dict[str, Activation] = {}
    for keys, each in nnx.iter_modules(module):
        act = getattr(each, "activation", None)
        if isinstance(act, Activation) and hasattr(each, "wi"):
            experts = "experts" if hasattr(each, "router") else ""
            activations[join(path, *map(str, keys), experts)] = act

    def rebuilt(made: Mapping[str, Any]) -> Any:
        nnx.replace_by_pure_dict(state, inner.rebuilt(made))
        nnx.update(module, state)
        return module

    return Tree(inner.flat, activations, rebuilt)


def is_flat(tree: Any) -> bool:
    """Whether it is a mapping of paths to arrays already."""
    return isinstance(tree, Mapping) and all(
        isinstance(key, str) and (isinstance(value, QTensor) or hasattr(value, "dtype")) for key, value in tree.items()
    )


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dicts by the segments of paths.

    Raises:
        ValueError: a path is the start of another.
    """
    made: dict[str, Any] = {}
    for key, value in flat.items():
        *above, last = key.split(".")
        at = made
        for segment in above:
            at = at.setdefault(segment, {})
            if not isinstance(at, dict):
                at = {last: None}
                break
        if last in at:
            raise ValueError(
                f"`{key}` of a checkpoint: also a part of another path, expected paths that do not contain each other; "
                "rename one."
            )
        at[last] = value
    return made


def to_numpy(name: str, value: Any) -> NDArray[Any]:
    """The values on the host.

    Raises:
        ValueError: this process has not all of them.
    """
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        raise ValueError(
            f"`{name}` of a checkpoint: shape {value.shape}, of which this process has a part, expected whole arrays "
            "for a safetensors file; save to a folder, which uses Orbax, or pass `shard=`."
        )
    return np.asarray(value)


def check_holds(name: str, like: Any) -> None:
    """Refuses a description of an array whose dtype JAX would narrow, because x64 is off. Raises ValueError."""
    if not isinstance(like, jax.ShapeDtypeStruct) or not isinstance(like.dtype, np.dtype):
        return
    if (held := jax.dtypes.canonicalize_dtype(like.dtype)) != like.dtype:
        raise ValueError(
            f"`{name}` of `like`: {like.dtype}, which JAX holds as {held} while jax_enable_x64 is off, expected a "
            f"dtype that keeps the values; pass `np.zeros({like.shape}, np.{like.dtype})`, or turn jax_enable_x64 on."
        )


def check_described(missing: Iterable[str], target: Mapping[str, Any], where: str) -> None:
    """Refuses a checkpoint without arrays that the tree only describes, and so has no values that could stay.

    Raises:
        KeyError: it lacks such arrays.
    """
    if lost := [key for key in missing if isinstance(target[key], jax.ShapeDtypeStruct)]:
        raise KeyError(
            f"checkpoint `{where}` lacks {some_names(lost)}, of which the tree has a jax.ShapeDtypeStruct, expected "
            "arrays, which would stay as they are; initialise these first."
        )


def sharding_of(like: Any) -> Any:
    """The sharding of an array that was put there, None of one that may be moved to other arrays' devices."""
    return getattr(like, "sharding", None) if getattr(like, "committed", True) else None


def placed(value: Any, like: Any) -> Any:
    """An array where `like` is: its sharding, its device, or the host."""
    if isinstance(like, np.ndarray):
        return np.array(value)
    sharding = sharding_of(like)
    if sharding is not None:
        return jax.device_put(value, sharding)
    return jnp.asarray(np.asarray(value) if getattr(value, "committed", False) else value)
