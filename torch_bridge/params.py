"""Quantised weights of layers, and the flat optimiser shards that update them (QNT-1 to QNT-3)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from grouped_core.formats import QTensor
from torch_bridge.quantized_weight import QuantizedWeight
from torch_bridge.quantized_weight import quantized_members as quantized_members

QUANTIZED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
"""Element types of the values of quantised weights."""


def is_quantized_weight(weight: Any) -> bool:
    """Whether it is a quantised primary weight: a layer's, a `QTensor`, or a tensor of quantised values."""
    weight = weight.q if isinstance(weight, QuantizedWeight) else weight
    values = weight.values if isinstance(weight, QTensor) else weight
    return isinstance(values, Tensor) and values.dtype in QUANTIZED_DTYPES


ShardEntry = tuple[Any, Tensor | None, int | None]
"""(member, the overlapping part of the shard, the start of that part in the member)."""


def expand_shard(members: Any, shard: Tensor | None, start: int | None) -> list[ShardEntry]:
    """Splits a flat optimiser shard among the members of a weight; returns one entry per member, in order (QNT-3).

    Every rank gets the same members, so that casts which reduce amax over ranks match.

    Args:
        members: the consecutive weights in the flat buffer; a packed quantised weight represents all its members, and a
            plain tensor is one member, whose entry has the arguments unchanged.
        shard: 1-D, elements [start, start + len(shard)) of that buffer; None: this rank has none.

    Returns:
        (member, overlapping slice of the shard, its offset inside the member); (member, None, None) without an overlap.

    Raises:
        ValueError: a shard that is not 1-D, exceeds the buffer at either end, or has no start.
        TypeError: a member or the shard that is not a tensor, a start that is not an integer.
    """
    if isinstance(members, QuantizedWeight):
        members = members.q if members.dim() == 3 else [members]
    if isinstance(members, Tensor):
        return [(members, shard, None if shard is None else start)]
    if not isinstance(members, (QTensor, Iterable)):
        raise TypeError(f"`members`: {type(members).__name__}, expected a weight or a list of weights; pass these.")
    if not (shard is None or isinstance(shard, Tensor)) or not (start is None or hasattr(start, "__index__")):
        raise TypeError(
            f"`shard`, `start`: {type(shard).__name__} and {start!r}, expected a tensor and an integer; pass the flat "
            "slice and where it starts."
        )
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
    """Keeps the value from which a quantised weight was made, as a copy on the host (QNT-2).

    `weight.high_precision_init_val()` returns it until `weight.clear_high_precision_init_val()`. The master weight can
    then start unrounded.

    Args:
        value: has the shape of the weight.
    """
    weight._initial = value.detach().to("cpu", copy=True)
