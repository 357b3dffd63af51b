"""Checkpoints of JAX trees and Flax modules: saving, loading, and converting between the layouts of the field.

What the layouts are and how arrays move between them is in `grouped_core.layouts`; here the moves are executed. Files
in the safetensors format are the same for `torch_bridge.checkpoint`; folders are those of Orbax.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

from grouped_core import checkpoint_files, checkpoint_tensors, lora_layout, safetensors_file
from grouped_core.checkpoint_files import SUFFIX, Files, Model, loading, part_file, unused_message
from grouped_core.checkpoint_fp8 import dequantized
from grouped_core.checkpoint_metadata import NAME, Spec, beside
from grouped_core.checkpoint_plan import Plan, shard_option
from grouped_core.checkpoint_tensors import executed, formats_of
from grouped_core.layouts import LAYOUTS
from grouped_core.scaling import ARRAYS
from jax_grouped._checkpoint_trees import (
    JAX,
    Tree,
    check_described,
    check_holds,
    checked,
    facts_of,
    is_flat,
    nested,
    placed,
    sharding_of,
    to_numpy,
)

_Tree = TypeVar("_Tree")
Interleave = int | tuple[int | None, int | None] | None
"""The block in which gate and linear columns alternate, None for halves, or that of the source and of the target."""

_LAYOUT = "jax_grouped"
_STATE = re.compile(rf"(.+\.)?{re.escape(LAYOUTS[_LAYOUT].state)}({'|'.join(ARRAYS)})", re.DOTALL)
"""The state of delayed scaling, which a checkpoint may lack."""


def save(path: str | os.PathLike[str], tree: Any, spec: Spec = None, *, shard: tuple[int, int] | None = None) -> None:
    """Writes a tree to a safetensors file, array by array, or to an Orbax folder.

    The checkpoint is complete or not there. It records the order of axes and columns, so `load` can check them.

    Args:
        path: a name that ends in `.safetensors` is a file, any other a folder of Orbax; with `shard` a folder in which
            each rank writes its own safetensors file. A checkpoint that is there is replaced.
        tree: any pytree of arrays and `QTensor`s, such as parameters beside the state of an optimiser, and Flax NNX
            modules and optimisers, alone or as leaves. Keys of random numbers in modules are not saved.
        spec: the activation of experts that are plain arrays: an `Activation`, the name of a kind, or a mapping of
            paths of layers to these. NNX modules know theirs.
        shard: (rank, ranks): the experts are those of one rank, in order, and are named by their numbers among all.
            Other arrays are the same on all ranks, and rank 0 writes them.

    Raises:
        ValueError: experts with a gate have no known activation, arrays cannot be saved, or a folder at `path` is no
        checkpoint. TypeError: a leaf is no array. OSError: the file cannot be written.
    """
    whole, ranks = checked(tree), shard_option(shard)
    if empty := [key for key, value in whole.flat.items() if isinstance(value, jax.ShapeDtypeStruct)]:
        raise ValueError(f"`{empty[0]}` of save: a ShapeDtypeStruct, expected values; load or initialise it first.")
    acts = whole.activations
    given = beside(spec, acts)
    made = checkpoint_tensors.saving(whole.flat, _LAYOUT, given, facts_of, {}, ranks)
    if ranks.ranks == 1 and Path(path).suffix != SUFFIX:
        from jax_grouped import _orbax

        arrays = {each.key: each.value for each in executed(made.plan, made.flat.__getitem__, JAX)}
        _orbax.write(path, arrays, made.metadata)
        return
    entries = {key: facts for move in made.plan.moves for key, facts in zip(move.targets, move.facts, strict=True)}
    moved = executed(made.plan, made.flat.__getitem__, JAX)
    values = ((each.key, to_numpy(each.key, each.value)) for each in moved)
    safetensors_file.write(part_file(path, ranks), entries, {NAME: made.metadata}, values)


def load(
    path: str | os.PathLike[str],
    like: _Tree,
    *,
    layout: str | None = None,
    interleave: Interleave = None,
    convert: bool = False,
    prefix: str = "",
    shard: tuple[int, int] | None = None,
) -> _Tree:
    """Loads a checkpoint as a tree like `like`, with its shardings; NNX modules and optimisers are updated in place.

    Everything is checked before an array is read. A warning lists arrays that have no place in the tree.
    A checkpoint without adapters leaves those of the tree as they are.

    Args:
        path: a safetensors file, a folder of such files, or a folder of Orbax.
        like: a tree of arrays, `jax.ShapeDtypeStruct`s and `QTensor`s, NNX modules and optimisers, or one of them.
        layout: for a checkpoint that another library wrote, a name of `grouped_core.layouts.LAYOUTS`; checkpoints of
            this library record their layout.
        interleave: for a checkpoint that another library wrote, the block in which gate and linear columns alternate. A
            tree of arrays does not record its block either: a pair has that of the checkpoint and that of the tree.
        convert: whether a checkpoint of this library may be converted to the order of axes and of columns in the tree,
            and FP8 weights with `weight_scale_inv`, as DeepSeek and Qwen publish them, may be read as bfloat16.
        prefix: the path below which the tree is in the checkpoint, with or without a dot at its end.
        shard: (rank, ranks): the tree has the experts of one rank, and takes them from those of all ranks.

    Returns:
        The tree; an NNX module or optimiser is `like` itself.

    Raises:
        ValueError: the checkpoint is damaged, ambiguous, or does not fit. KeyError: it lacks arrays of the tree.
    """
    whole, ranks = checked(like), shard_option(shard)
    target, quantised = checkpoint_tensors.flatten(whole.flat)
    for key, value in target.items():
        check_holds(key, value)
    entries = {key: facts_of(value) for key, value in target.items()}
    formats = {key: formats_of(q) for key, q in quantised.items()}
    optional = frozenset(key for key in entries if _STATE.fullmatch(key))
    model = Model(LAYOUTS[_LAYOUT], entries, whole.activations, optional, formats)
    if _is_orbax(path):
        from jax_grouped import _orbax

        reader = _orbax.opened(path, prefix)
    else:
        reader = dequantized(checkpoint_files.opened(path, prefix), convert=convert)
    made = loading(reader, model, layout, interleave, convert, ranks)
    check_described(made.missing, target, reader.where)
    if isinstance(reader, Files):
        read: Any = reader.read
    else:
        read = reader.read_all(_shardings(made, target)).__getitem__
    found = {key: target[key] for key in made.missing}
    for each in executed(made, read, JAX):
        found[each.key] = placed(each.value, target[each.key])
    result = whole.rebuilt(checkpoint_tensors.unflatten(found, quantised))
    if message := unused_message(made, reader.where):
        warnings.warn(message, stacklevel=2)
    return result


def convert(tree: Any, source: str, target: str, *, interleave: Interleave = None) -> dict[str, Any]:
    """A tree in another layout: names, shapes and the order of columns change, values never do.

    FP8 weights with `weight_scale_inv`, as DeepSeek and Qwen publish them, become bfloat16 as in `load`, in experts and
    outside: the same values where scales are powers of two, else rounded once.

    Args:
        tree: dicts of arrays, nested or with paths as keys; or an NNX module, whose state is taken.
        source, target: names of `grouped_core.layouts.LAYOUTS`. Experts are found by their names, in the states of
            optimisers too; all other entries stay as they are.
        interleave: the block in which gate and linear columns alternate, of each side whose layout leaves it open; None
            for halves; or a pair, of the source and of the target. The MLPs of a module have that of their activation.

    Returns:
        Nested dicts, or one with paths as keys if `tree` is one. NumPy arrays stay NumPy arrays. MXFP4 blocks and
        scales of gpt-oss become a `QTensor` with the same bits.

    Raises:
        ValueError: an array is ambiguous, incomplete or does not fit, or the experts have another layout than `source`.
        TypeError: an argument has another type.
    """
    whole: Tree = checked(tree)
    own = {place: activation.interleave for place, activation in whole.activations.items()}
    made = checkpoint_tensors.converted(whole.flat, source, target, interleave, facts_of, JAX, own)
    return made if is_flat(tree) else nested(made)


def from_peft(a: Any, b: Any, num_experts: int) -> tuple[Any, Any]:
    """An adapter (A, B) for `lora=` from the two matrices of PEFT's `target_parameters`.

    Args:
        a: `lora_A.weight`, [G r, K]. b: `lora_B.weight`, [N, r G]; both of JAX or NumPy. num_experts: G.

    Returns:
        A [G, K, r] and B [G, r, N], of JAX or NumPy as they came. PEFT's scaling is not part of them.

    Raises:
        TypeError: `num_experts` is not an integer. ValueError: shapes do not fit each other or G experts.
    """
    return lora_layout.from_peft(a, b, num_experts, transposed=False)


def to_peft(a: Any, b: Any) -> tuple[Any, Any]:
    """The inverse of `from_peft`: PEFT's two matrices from A [G, K, r] and B [G, r, N].

    Raises:
        ValueError: the shapes are not those of one adapter.
    """
    return lora_layout.to_peft(a, b, transposed=False)


def _is_orbax(path: str | os.PathLike[str]) -> bool:
    where = Path(path)
    return where.is_dir() and not any(where.glob(f"*{SUFFIX}"))


def _shardings(made: Plan, target: Mapping[str, Any]) -> Any:
    """The sharding of each entry that is loaded as it is; others are converted on one device."""
    found = {move.sources[0]: sharding_of(target[move.targets[0]]) for move in made.moves if not move.steps}
    return found.get
