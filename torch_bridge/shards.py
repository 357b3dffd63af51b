"""Quantises from optimiser shards of master weights, with the bits of a cast from the whole.

Letters: G groups, A and B axes of a member, S amax slots per member.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core import calls, quantizing
from grouped_core import shards as rules
from grouped_core.calls import ArraySpec
from grouped_core.formats import Format, QTensor
from torch_bridge._checks import check_operand
from torch_bridge._memory import number_table
from torch_bridge._operators import call, define
from torch_bridge._tensors import dtype_name, forms_of
from torch_bridge.params import expand_shard, is_quantized_weight
from torch_bridge.quantize import largest_of_ranks
from torch_bridge.quantized_weight import SOURCES, QuantizedWeight


@dataclass
class _Batch:
    """The members of one packed weight, and this rank's shards of them: cast by the same launches."""

    q: QTensor[Tensor]
    scaling: tuple[Tensor, Tensor] | None
    here: dict[int, tuple[Tensor, int]] = field(default_factory=dict)  # member: (local shard, its first element)
    named: set[int] = field(default_factory=set)  # members to cast; the others do not change

    def passes(self) -> dict[Format, list[QTensor[Tensor]]]:
        """Its forms, grouped by format."""
        found: dict[Format, list[QTensor[Tensor]]] = {}
        for form in forms_of(self.q):
            found.setdefault(form.format, []).append(form)
        return found

    def table(self, device: torch.device) -> Tensor:
        """int64 [3, G], as `grouped_core.shards` reads it."""
        groups = self.q.shape[0]
        rows = [[0] * groups, [0 if at in self.named else -1 for at in range(groups)], [0] * groups]
        for at, (part, first) in self.here.items():
            rows[0][at], rows[1][at], rows[2][at] = part.data_ptr(), first, part.numel()
        return number_table([number for row in rows for number in row], device).view(3, groups)


class _Pass(NamedTuple):
    """One cast of a batch: forms of one format, and their amax."""

    batch: _Batch
    forms: list[QTensor[Tensor]]
    source: ArraySpec
    table: Tensor
    amax: Tensor  # int32 [G, S]


def cast_shards(
    weights: Sequence[Any],
    shards: Sequence[Tensor | None],
    starts: Sequence[int | None],
    *,
    process_group: Any = None,
    skip: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Quantises this rank's shards of the master weights into quantised primary weights, in place and on the device.

    It writes only the quantised values of this rank's elements, in all forms (`gather_codes` brings the rest), but all
    scales, on every rank. Both have the bits of a cast from the whole master weight. Members that share storage use the
    same launches, all amax take one reduction, and the host does not wait for the device. Members that are not among
    `weights` do not change.

    Args:
        weights: Parameters of layers with quantised weights, or `QTensor`s [G, A, B]; the same on every rank.
        shards: for each weight a flat slice of its master, 1-D, or None if this rank has none of it.
        starts: for each weight the index of the element with which its slice begins.
        process_group: the group over which the maximum of amax is taken; None: this rank has all elements.
        skip: int32 [1]; if it is not zero on the device, nothing is written.
        dtype: the dtype of the masters, the same on every rank.

    Raises:
        TypeError: a weight that is not quantised, a slice in another dtype. ValueError: slices that do not fit, or are
            on another device. NotImplementedError: a format whose scales do not follow from amax.
    """
    batches = _batches(weights, shards, starts, dtype)
    passes = _passes(batches, dtype)
    if not passes:
        return
    device = passes[0].amax.device
    if skip is not None:
        check_operand("skip", skip, passes[0].amax)
        if skip.dtype != torch.int32 or tuple(skip.shape) != (1,):
            raise ValueError(f"`skip`: {skip.dtype}{list(skip.shape)}, expected int32[1]; pass such a tensor.")
    with torch.no_grad():
        everything = torch.empty(sum(each.amax.numel() for each in passes), dtype=torch.int32, device=device)
        slices = everything.split([each.amax.numel() for each in passes])
        passes = [each._replace(amax=own.view(each.amax.shape)) for each, own in zip(passes, slices, strict=True)]
        for each in passes:
            call(_AMAX, _Amax(each.source, each.forms[0].format), _AmaxOperands(each.table, each.amax), 0)
        if process_group is not None:
            largest_of_ranks(everything, process_group)
        for each in passes:
            _cast(each, skip)


def gather_codes(
    weights: Sequence[Any],
    shards: Sequence[Tensor | None],
    starts: Sequence[int | None],
    *,
    process_group: Any,
    skip: Tensor | None = None,
) -> None:
    """Brings the values of the other ranks after `cast_shards` with the same arguments, so that all weights are whole.

    Every value has one owner, so the sum of bytes, with zeros from the other ranks, is the whole: it takes one
    reduction, whatever the layout of a form, even if two ranks own the halves of a byte.

    Args:
        shards, starts: each element of a weight is on exactly one rank.
    """
    batches = _batches(weights, shards, starts, None)
    places = [form for batch in batches for form in forms_of(batch.q)]
    if not places:
        return
    with torch.no_grad():
        owned = [form.values.view(torch.uint8) & _mask(batch, form) for batch in batches for form in forms_of(batch.q)]
        everything = torch.cat([each.view(-1) for each in owned])
        torch.distributed.all_reduce(everything, torch.distributed.ReduceOp.SUM, group=process_group)
        named = [batch.named for batch in batches for _ in forms_of(batch.q)]
        parts = everything.split([each.numel() for each in owned])
        for form, found, members in zip(places, parts, named, strict=True):
            values = form.values.view(torch.uint8)
            found = found.view(values.shape)
            if skip is not None:
                found = torch.where(skip != 0, values, found)
            for at in [...] if len(members) == len(values) else sorted(members):
                values[at].copy_(found[at])


def _mask(batch: _Batch, form: QTensor[Tensor]) -> Tensor:
    """Mask of the bits of a form's values that this rank owns, uint8 in the shape of the values."""
    groups, a, b = batch.q.shape
    own = torch.zeros((groups, a * b), dtype=torch.uint8, device=form.values.device)
    for at, (part, first) in batch.here.items():
        own[at, first : first + part.numel()] = 0xFF
    own = own.view(groups, a, b)
    own = own if form.axis == 2 else own.mT
    if form.format.values != "uint8":
        return own
    pairs = torch.nn.functional.pad(own, (0, own.shape[2] % 2)).unflatten(2, (-1, 2))
    return pairs[..., 0] & 0x0F | pairs[..., 1] & 0xF0


def _batches(
    weights: Sequence[Any], shards: Sequence[Tensor | None], starts: Sequence[int | None], dtype: torch.dtype | None
) -> list[_Batch]:
    """One batch per packed weight, in the order of their first member, which is the same on every rank."""
    if dtype is not None and dtype not in SOURCES:
        raise TypeError(f"`dtype`: {dtype}, expected one of {', '.join(map(str, SOURCES))}; choose one of them.")
    if not len(weights) == len(shards) == len(starts):
        raise ValueError(
            f"`shards`, `starts`: {len(shards)} and {len(starts)} for {len(weights)} weights, expected one each; pass "
            "None where this rank has nothing of a weight."
        )
    found: dict[int, _Batch] = {}
    for at, (weight, shard, start) in enumerate(zip(weights, shards, starts, strict=True)):
        if not is_quantized_weight(weight) or not isinstance(weight, (QuantizedWeight, QTensor)):
            raise TypeError(
                f"`weights[{at}]`: {type(weight).__name__}, expected a quantised weight; write plain ones with copy_."
            )
        q, first = weight.home if isinstance(weight, QuantizedWeight) else (weight, 0)
        batch = found.get(q.values.data_ptr())
        if batch is None:
            batch = found[q.values.data_ptr()] = _Batch(q, None)
        if isinstance(weight, QuantizedWeight):
            batch.scaling = weight.scaling
        one = isinstance(weight, QuantizedWeight) and weight.dim() == 2
        batch.named.update([first] if one else range(q.shape[0]))
        if shard is None:
            continue
        check_operand(f"shards[{at}]", shard, q.values)
        if dtype is not None and shard.dtype != dtype:
            raise TypeError(
                f"`shards[{at}]`: {shard.dtype}, expected {dtype} = `dtype`; pass the dtype of all masters."
            )
        members = [weight] if one else _members(q)
        for place, (_, part, offset) in enumerate(expand_shard(members, shard, start), first):
            if part is not None and offset is not None:
                batch.here[place] = (part, offset)
    return list(found.values())


class _Member(NamedTuple):
    shape: tuple[int, ...]


def _members(q: QTensor[Tensor]) -> list[_Member]:
    return [_Member(q.shape[1:])] * q.shape[0]


def _passes(batches: Sequence[_Batch], dtype: torch.dtype) -> list[_Pass]:
    passes: list[_Pass] = []
    for batch in batches:
        source = ArraySpec(tuple(batch.q.shape), dtype_name(dtype))
        table = batch.table(batch.q.values.device)
        for fmt, forms in batch.passes().items():
            rules.check_format(fmt)
            if fmt.delayed and batch.scaling is None:
                raise ValueError(
                    f"`weights`: a QTensor of {fmt.name} with delayed scaling, expected a layer's Parameters, which "
                    "have scales; pass these."
                )
            shape = (batch.q.shape[0], calls.shard_slots(source.shape, fmt))
            amax = batch.q.values.new_empty((), dtype=torch.int32).expand(shape)  # memory is assigned later
            passes.append(_Pass(batch, forms, source, table, amax))
    return passes


def _cast(each: _Pass, skip: Tensor | None) -> None:
    scale = None
    if each.forms[0].format.delayed and each.batch.scaling is not None:
        scale, current = each.batch.scaling
        found = each.amax[:, 0].view(torch.float32)
        if skip is not None:
            found = torch.where(skip != 0, current, found)
        torch.maximum(current, found, out=current)
    operands = _CastOperands(each.table, each.amax, scale, skip, quantizing.joined(each.forms))
    call(_CAST, _Cast(each.source), operands, 0)
    # A pending backward must not silently read changed values; the host does not know whether `skip` prevented the
    # change.
    torch.autograd.graph.increment_version([part for form in each.forms for part in form.slots if part is not None])


class _Amax(NamedTuple):
    source: ArraySpec
    format: Format


class _AmaxOperands(NamedTuple):
    table: Any
    amax: Any


def _amax_rule(run: Any, static: _Amax, o: _AmaxOperands) -> tuple[()]:
    rules.amax(run, static.source, static.format, o.table, o.amax)
    return ()


_AMAX = define("shard_amax", _amax_rule, _AmaxOperands, _Amax, written=("amax",))


class _Cast(NamedTuple):
    source: ArraySpec


class _CastOperands(NamedTuple):
    table: Any
    amax: Any
    scale: Any
    skip: Any
    forms: Any


def _cast_rule(run: Any, static: _Cast, o: _CastOperands) -> tuple[()]:
    rules.cast(run, static.source, forms_of(o.forms), o.table, o.amax, o.scale, o.skip)
    return ()


_CAST = define("shard_cast", _cast_rule, _CastOperands, _Cast, written=("forms",))
