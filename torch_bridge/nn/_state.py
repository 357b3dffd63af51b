"""Loads checkpoints with one tensor for all groups into a layer with one tensor per group, and vice versa.

A layer adapts the entries under its own prefix, so names match by whole path segments. Values are never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


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
        ValueError: both layouts of parameters are present, the indexed one is incomplete, or the grouped one cannot be
            split.
    """
    whole = f"{prefix}{kind}{suffix}"
    indexed = [f"{prefix}{kind}{group}{suffix}" for group in range(groups)]
    found = [key for key in indexed if key in state]
    if whole in state and found:
        raise ValueError(
            f"checkpoint: both `{whole}` and `{found[0]}` ({len(found)} indexed entries), expected one of the two "
            "forms; remove the other."
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
        split = _members if suffix else _split
        members = split(whole, state[whole], groups, tuple(shape))
        del state[whole]
        state.update(zip(indexed, members, strict=True))


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
