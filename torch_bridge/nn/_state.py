"""Loads checkpoints with one tensor for all groups into a layer with one tensor per group, and vice versa.

A layer adapts the entries under its own prefix, so names match by whole path segments. Values are never changed.
State dicts also say in their metadata in what order gate and linear columns are, so that another order is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from grouped_core.activations import Activation
from grouped_core.layouts import join
from torch_bridge._checks import is_distributed

_COLUMNS = "interleave"
"""The entry of a module in the metadata of a state dict: the blocks of `columns`."""
CONVERTED = "converted_from_interleave"
"""The end of an entry by which a hook tells an MLP that it permuted the columns, and from which order. It exists only
while a state dict is loaded: hooks do not see the metadata of the modules inside."""


def adapt(
    state: dict[str, Any],
    prefix: str,
    kind: str,
    groups: int,
    shape: Sequence[int],
    *,
    grouped: bool,
    suffix: str = "",
) -> None:
    """Converts `{prefix}{kind}`, or `{prefix}{kind}0` to `{prefix}{kind}{G-1}`, to the layer's form, in place.

    Args:
        state: the state dict to load. kind: "weight" or "bias". groups: G. shape: the shape of one group's tensor.
        grouped: whether the layer has one tensor for all groups.
        suffix: the end of these names, for a part of a quantised weight; the first axis of such a part numbers the
            groups.

    Raises:
        ValueError: both layouts of parameters are present, the indexed one is incomplete, the grouped one cannot be
            split, or the form changes and tensors are sharded.
    """
    whole = f"{prefix}{kind}{suffix}"
    indexed = [f"{prefix}{kind}{group}{suffix}" for group in range(groups)]
    found = [key for key in indexed if key in state]
    if whole in state and found:
        raise ValueError(
            f"checkpoint: both `{whole}` and `{found[0]}` ({len(found)} indexed entries), expected one of the two "
            "forms; remove the other."
        )
    changed = [key for key in (indexed if grouped else [whole]) if key in state]
    if is_distributed(*(state[key] for key in changed)):
        raise ValueError(
            f"checkpoint: `{changed[0]}`: a DTensor, expected a plain tensor where packed and indexed parameters "
            "become each other; take the state dict with `full_state_dict=True`, or load into the same form."
        )
    if grouped and found:
        missing = [str(group) for group, key in enumerate(indexed) if key not in state]
        if missing:
            raise ValueError(
                f"checkpoint: `{whole}` has entries for {len(found)} of {groups} groups, missing {', '.join(missing)}; "
                "expected all of them; load a complete checkpoint."
            )
        first = state[indexed[0]]
        for key in indexed:
            if not isinstance(state[key], Tensor) or _shown(state[key]) != _shown(first):
                raise ValueError(
                    f"checkpoint: `{key}`: {_shown(state[key])}, expected {_shown(first)} as in the first group; load "
                    "a checkpoint whose tensors fit together."
                )
        state[whole] = torch.stack([state.pop(key) for key in indexed])
    elif not grouped and whole in state:
        if not isinstance(state[whole], Tensor):
            raise ValueError(
                f"checkpoint: `{whole}`: {_shown(state[whole])}, expected a tensor; load a complete checkpoint."
            )
        split = _members if suffix else _split
        members = split(whole, state[whole], groups, tuple(shape))
        del state[whole]
        state.update(zip(indexed, members, strict=True))


def columns(module: Module) -> dict[str, int | None]:
    """The blocks in which the columns alternate that gated activations inside of a module read, by relative path."""
    acts = {name: getattr(each, "activation", None) for name, each in module.named_modules(remove_duplicate=False)}
    return {name: act.interleave for name, act in acts.items() if isinstance(act, Activation) and act.gated}


class OrderedColumns(Module):
    """A module whose state dicts say in their metadata the order of its columns, and are refused if it differs."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if (metadata := getattr(destination, "_metadata", None)) is not None:
            metadata.setdefault(prefix[:-1], {})[_COLUMNS] = columns(self)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        _check_columns(self, state_dict, prefix, local_metadata)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)


def _check_columns(module: Module, state: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any]) -> None:
    """Refuses a state dict whose columns have another order than those of the module; without metadata it passes.

    It has no effect if a module has hooks that may still change the entries.

    Raises:
        ValueError: the order differs.
    """
    for path, block in {} if hooked(module) else columns(module).items():
        mark = join(f"{prefix}{path}".removesuffix("."), CONVERTED)
        if mark in state:
            check_hooked(path, block, state[mark], prefix, local_metadata)
            continue
        found = local_metadata.get(_COLUMNS, {}).get(path, block)
        if found != block:
            order = f"interleave=({found}, {block})"
            raise ValueError(
                f"checkpoint: columns of {_named(prefix, path)} with interleave {found}, expected {block} of the "
                f"module; load it into a module of that order and pass that module to checkpoint.convert(..., {order}),"
                " or pass `dict(state)` if its columns were permuted already."
            )
    state.pop(prefix + CONVERTED, None)


def check_hooked(
    path: str, block: int | None, taken: int | None, prefix: str, local_metadata: Mapping[str, Any]
) -> None:
    """Refuses a state dict whose columns a hook took for those of another order than they have.

    Args:
        path: relative to the module of the metadata. block: the order of the module. taken: that which the hook took.
    """
    found = local_metadata.get(_COLUMNS, {}).get(path, taken)
    if found != taken:
        raise ValueError(
            f"checkpoint: columns of {_named(prefix, path)} with interleave {found}, expected {taken} of the hook; "
            f"pass interleave=({found}, {block}) to checkpoint.load_hook."
        )


def _named(prefix: str, path: str) -> str:
    place = f"{prefix}{path}".removesuffix(".")
    return f"`{place}`" if place else "a state dict"


def hooked(module: Module) -> bool:
    """Whether a module, or one inside, has hooks that may still change the entries of a state dict."""
    return any(each._load_state_dict_pre_hooks for each in module.modules())


def _shown(entry: object) -> str:
    return f"shape {tuple(entry.shape)}" if isinstance(entry, Tensor) else f"a {type(entry).__name__}"


def _members(key: str, tensor: Tensor, groups: int, shape: tuple[int, ...]) -> Sequence[Tensor]:
    del shape  # checked once all parts are loaded
    found = len(tensor) if tensor.dim() else 0
    if found != groups:
        raise ValueError(f"`{key}` has {found} groups, expected {groups}; load a checkpoint of as many experts.")
    return tensor.unbind()


def _split(key: str, tensor: Tensor, groups: int, shape: tuple[int, ...]) -> Sequence[Tensor]:
    if tuple(tensor.shape) == (groups, *shape):
        return tensor.unbind()
    if tuple(tensor.shape) == (groups * shape[0], *shape[1:]):
        return tensor.chunk(groups)
    a = ", ".join(map(str, shape))
    flat = ", ".join(map(str, (groups * shape[0], *shape[1:])))
    raise ValueError(
        f"cannot split checkpoint tensor `{key}`: shape {tuple(tensor.shape)}, expected ({groups}, {a}) or ({flat}); "
        "check the number of groups and the sizes of the layer."
    )
