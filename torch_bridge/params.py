"""Weights and biases, packed or one tensor a group; quantised primary weights and their optimiser's shards."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grouped_core import ranks
from grouped_core.formats import QTensor
from torch_bridge.primary import QuantizedWeight


def members_of(
    kind: tuple[str, str], name: str, value: Tensor | Sequence[Tensor], x: Tensor, *, transposed: bool = False
) -> list[Tensor]:
    """A weight or bias as a list: of its one packed tensor, or of G tensors with one axis less.

    Args:
        kind: operation and argument in `grouped_core.ranks.AXES`. name: of the argument, for messages. x: whose device
            counts. transposed: layout of weights.

    Raises:
        TypeError: no tensor, or a list of unequal dtypes. ValueError: an empty list, members of unequal shape, another
            number of axes, another device, or not contiguous.
    """
    if isinstance(value, Tensor):
        check_operand(name, value, x)
        ranks.check_rank(*kind, name, value.shape, transposed=transposed)
        return [value]
    members = list(value) if isinstance(value, (list, tuple)) else None
    if members is None:
        raise TypeError(
            f"`{name}`: {type(value).__name__}, expected a torch.Tensor {ranks.letters(*kind, transposed=transposed)} "
            "or a list of tensors, one a group; pass one of them."
        )
    if not members:
        raise ValueError(f"`{name}`: an empty list, expected one tensor a group; pass at least one.")
    for index, member in enumerate(members):
        check_operand(f"{name}[{index}]", member, x)
        ranks.check_member(*kind, f"{name}[{index}]", member.shape, transposed=transposed)
        if member.shape != members[0].shape:
            raise ValueError(
                f"`{name}[{index}]`: shape {tuple(member.shape)}, expected {tuple(members[0].shape)} = shape of "
                f"`{name}[0]`; pass tensors of one shape."
            )
        if member.dtype != members[0].dtype:
            raise TypeError(
                f"`{name}[{index}]`: dtype {member.dtype}, expected {members[0].dtype} = dtype of `{name}[0]`; "
                "pass tensors of one dtype."
            )
    return members


def check_operand(name: str, value: Tensor, x: Tensor) -> None:
    """A tensor on the device of `x`, contiguous. Raises TypeError or ValueError otherwise."""
    if not isinstance(value, Tensor):
        raise TypeError(f"`{name}`: {type(value).__name__}, expected a torch.Tensor; convert it first.")
    if is_distributed(value):
        raise ValueError(
            f"`{name}`: a DTensor, expected the part that lies here, because each rank computes by itself; call "
            "`.to_local()`."
        )
    if value.device != x.device:
        raise ValueError(f"`{name}`: on {value.device}, expected {x.device} = device of `x`; move it with `.to`.")
    check_layout(name, value)
    if not value.is_contiguous():
        raise ValueError(
            f"`{name}`: strides {tuple(value.stride())} of shape {tuple(value.shape)}, expected a contiguous tensor; "
            "call `.contiguous()`, or for a transposed weight change `rhs_transposed`."
        )


def check_layout(name: str, value: Tensor) -> None:
    """Refuses what has no plain memory: sparse, nested, quantised and foreign layouts."""
    if value.layout is torch.strided and not value.is_nested and not value.is_quantized:
        return
    came = "nested" if value.is_nested else "quantised" if value.is_quantized else f"layout {value.layout}"
    raise ValueError(f"`{name}`: {came}, expected a plain dense tensor; convert it, e.g. with `.to_dense()`.")


def device_integers(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host integers as a tensor of `device`, without a synchronisation or a copy from pageable memory."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    # NOTE: a foreach operation carries its scalars as kernel arguments, in chunks; a copy would read host memory.
    result = torch.zeros(len(values), dtype=dtype, device=device)
    if values:
        torch._foreach_add_(  # pyright: ignore[reportPrivateImportUsage]
            list(result.unbind()), list(values)
        )
    return result


def is_distributed(*tensors: Any) -> bool:
    """Whether any of them is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # not imported for those who have none: it takes 0.6 s
    return module is not None and True in [isinstance(each, module.DTensor) for each in tensors]


def local(tensor: Any) -> Tensor:
    """The part of a DTensor that lies here, without a history; another tensor as it stands."""
    return tensor._local_tensor if is_distributed(tensor) else tensor


def distributed_like(parameter: Any, part: Tensor) -> Tensor:
    """`part` as the local part of a DTensor placed as `parameter`, if that is one; else as it stands."""
    if not is_distributed(parameter):
        return part
    dtensor: Any = type(parameter.data)
    shape, stride = parameter.shape, parameter.stride()
    return dtensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


# ---------------------------------------------------------------------------------------------------------------------
# Quantised primary weights: values and scales at stable addresses, whose master belongs to the optimiser (QNT-1)

QUANTIZED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
"""Element types of the values of quantised weights."""


def is_quantized_weight(weight: Any) -> bool:
    """Whether it is a quantised primary weight: a layer's, a `QTensor`, or a tensor that holds codes."""
    weight = weight.q if isinstance(weight, QuantizedWeight) else weight
    values = weight.values if isinstance(weight, QTensor) else weight
    return isinstance(values, Tensor) and values.dtype in QUANTIZED_DTYPES


def quantized_members(q: QTensor[Tensor]) -> list[QTensor[Tensor]]:
    """The G members [1, A, B] of a packed quantised weight [G, A, B], views of it in both forms.

    Raises:
        ValueError: it is no weight.
    """
    if len(q.shape) != 3:
        raise ValueError(f"`q`: shape {q.shape}, expected a weight [G, A, B]; rows have no members.")
    groups, *member = q.shape

    def part(group: int, form: QTensor[Tensor]) -> QTensor[Tensor]:
        own = slice(group, group + 1)
        return dataclasses.replace(
            form,
            values=form.values[own],
            scales=None if form.scales is None else form.scales[own],
            group_scales=None if form.group_scales is None else form.group_scales[own],
            shape=(1, *member),
            other=None if form.other is None else part(group, form.other),
        )

    return [part(group, q) for group in range(groups)]


ShardEntry = tuple[Any, Tensor | None, int | None]
"""(member, the part of the shard that lies in it, where that part starts in the member)."""


def expand_shard(members: Any, shard: Tensor | None, start: int | None) -> list[ShardEntry]:
    """What a flat shard of an optimiser holds of each member of a weight, one entry a member, in order (QNT-3).

    Every rank gets the same members, so casts that reduce magnitudes over ranks meet.

    Args:
        members: the weights one after the other in the flat buffer; a packed quantised weight stands for its members,
            a plain tensor for itself, whose entry is what was given.
        shard: 1-D, elements [start, start + len(shard)) of that buffer; None: this rank holds nothing.

    Returns:
        (member, overlapping slice of the shard, its offset inside the member); None twice where they do not overlap.

    Raises:
        ValueError: a shard that is not 1-D, starts before the buffer or ends behind it, or has no start.
        TypeError: a member that is no tensor.
    """
    if isinstance(members, QuantizedWeight):
        members = members.q if members.dim() == 3 else [members]
    if isinstance(members, Tensor):
        return [(members, shard, None if shard is None else start)]
    members = quantized_members(members) if isinstance(members, QTensor) else list(members)
    for at, each in enumerate(members):
        if not hasattr(each, "shape"):
            raise TypeError(
                f"`members[{at}]`: {type(each).__name__}, expected a weight; pass those of the flat buffer, in order."
            )
    sizes = [math.prod(each.shape) for each in members]
    if shard is None:
        return [(member, None, None) for member in members]
    length, total = shard.numel(), sum(sizes)
    if shard.dim() != 1 or start is None or not 0 <= start <= total - length:
        raise ValueError(
            f"`shard`: shape {tuple(shard.shape)} at {start}, expected 1-D inside the {total} elements of the members; "
            "pass the flat slice and where it starts."
        )
    entries: list[ShardEntry] = []
    first = 0
    for member, size in zip(members, sizes, strict=True):
        low, high = max(first, start), min(first + size, start + length)
        entries.append((member, shard[low - start : high - start], low - first) if low < high else (member, None, None))
        first += size
    return entries


def preserve_high_precision_init(weight: QuantizedWeight, value: Tensor) -> None:
    """Keeps the value that a quantised weight was made of, as a copy on the host (QNT-2).

    `weight.high_precision_init_val()` gives it until `weight.clear_high_precision_init_val()`. Its master can then
    start unrounded.

    Args:
        value: of its shape.
    """
    weight._initial = value.detach().to("cpu", copy=True)
