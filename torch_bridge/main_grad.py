"""Where weight gradients are written when they do not go to `.grad`, and what backward then returns.

The contract is that of Megatron and TransformerEngine, per weight, with these attributes of the Parameter:

==========================  ==========================================================================================
`main_grad`                 the destination; looked up when it is written, viewed in the weight's shape
`overwrite_main_grad`       true: the gradient replaces what is there; else it is added
`grad_added_to_main_grad`   if it exists it becomes True once the write is queued, and backward returns a zero dummy
`zero_out_wgrad`            true: the dummy is filled with zero again before it is returned
`__fsdp_param__`            if it exists, `main_grad` comes from `get_main_grad()` whenever it is written
==========================  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from grouped_core.formats import WIDE
from torch_bridge._run import dtype_name

Write = Callable[[list[Tensor], list[int], bool], None]
"""(destinations, their groups, whether to add) -> None; launches the weight gradients of these groups."""


def destination(weight: Any, name: str) -> Tensor:
    """`main_grad` of `weight`, in its shape and without a copy.

    Raises:
        RuntimeError: it is missing, or does not view as a contiguous tensor of the weight's shape, or has another
            device, or a dtype that kernels do not add in.
    """
    if hasattr(weight, "__fsdp_param__"):
        weight.main_grad = weight.get_main_grad()
    found = getattr(weight, "main_grad", None)
    shape = tuple(weight.shape)
    if found is None:
        raise RuntimeError(
            f"`main_grad` of `{name}`: missing, expected a tensor that views as {shape}; create it before backward, "
            "and pass the Parameter that has it, not a cast or a view of it."
        )
    facts = f"shape {tuple(found.shape)}, strides {tuple(found.stride())}, {found.dtype} on {found.device}"
    if found.device != weight.device:
        raise RuntimeError(
            f"`main_grad` of `{name}`: {facts}, expected it on {weight.device} with its weight; allocate it there."
        )
    if dtype_name(found.dtype) not in WIDE:
        raise RuntimeError(
            f"`main_grad` of `{name}`: {facts}, expected one of {', '.join(WIDE)}; allocate it in one of them."
        )
    if found.numel() != weight.numel() or not found.is_contiguous():
        raise RuntimeError(
            f"`main_grad` of `{name}`: {facts}, expected a contiguous tensor that views as {shape} without a copy; "
            "allocate it so."
        )
    return found.detach().view(shape)


def write(
    names: Sequence[str],
    weights: Sequence[Tensor],
    given: Sequence[Tensor | None] | None,
    overwrite: Sequence[bool] | None,
    live: Sequence[int],
    launch: Write,
) -> None:
    """Writes the gradients of the weights at `live`, with one launch for each dtype and way of writing.

    Args:
        given: destinations instead of `main_grad`. overwrite: instead of the attribute, for graphs that read it when
            they were traced.
    """
    batches: dict[tuple[torch.dtype, bool], tuple[list[Tensor], list[int]]] = {}
    for at in live:
        to = given[at] if given is not None else None
        if to is None:
            to = destination(weights[at], names[at])
        replaces = overwrites(weights[at]) if overwrite is None else overwrite[at]
        tensors, groups = batches.setdefault((to.dtype, not replaces), ([], []))
        tensors.append(to)
        groups.append(at)
    for (_, accumulate), (tensors, groups) in batches.items():
        launch(tensors, groups, accumulate)


def overwrites(weight: Tensor) -> bool:
    """Whether the next gradient replaces what the destination holds."""
    return bool(getattr(weight, "overwrite_main_grad", False))


def returned(weight: Any) -> Tensor | None:
    """What backward returns for a weight whose write into `main_grad` is queued; raises the flag where there is one."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return dummy(weight, refill=bool(getattr(weight, "zero_out_wgrad", False)))


_dummies: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}


def dummy(weight: Tensor, *, refill: bool = False) -> Tensor:
    """A zero gradient of the weight's shape, dtype and device: a fresh alias of the one kept for these three."""
    key = (weight.shape, weight.dtype, weight.device)
    kept = _dummies.get(key)
    if kept is None:
        kept = _dummies[key] = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    elif refill:
        kept.zero_()
    return kept.detach()


def needs_python(weights: Sequence[Tensor]) -> bool:
    """Whether writing depends on state that a compiled graph cannot hold: flags, FSDP, or a `main_grad` yet to come."""
    return any(
        weight.requires_grad
        and (
            hasattr(weight, "grad_added_to_main_grad")
            or hasattr(weight, "__fsdp_param__")
            or getattr(weight, "main_grad", None) is None
        )
        for weight in weights
    )
