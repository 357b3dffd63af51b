"""Quantised operands as torch operators take them, and the operators that make and read such.

As in `_library`, operators see lists of tensors and text. A quantised operand is the list of its arrays, and the text
says how they lie; so residuals are plain tensors, which hooks of saved tensors see singly.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core import scaling, storing
from grouped_core.calls import stored_spec
from grouped_core.formats import Format, QTensor
from grouped_core.scaling import ScalingState
from torch_bridge import _run
from torch_bridge._library import Execute, define, define_merging, grouped


class Stored(NamedTuple):
    """An operand as operators take it: `text` is "" for plain tensors, one or one a group."""

    tensors: list[Tensor]
    text: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class StraightThrough:
    """A quantised operand whose gradient goes to another tensor; see `quantize.straight_through`."""

    master: Tensor
    q: QTensor[Tensor]


NOTHING = Stored([])
"""An operand that nobody reads."""


def arrays_of(operand: Any) -> Stored:
    """A tensor, a list of one a group, or a `QTensor` (without its other form) as operators take it."""
    if isinstance(operand, QTensor):
        q, tensors = operand, _parts(operand)
        initials = "v" + "s" * bool(q.format.scales) + "g" * q.format.per_group
        return Stored(tensors, _describe(q.format, q.axis, _fixed(q.shape), q.dtype, initials))
    return Stored([operand] if isinstance(operand, Tensor) else list(operand))


def _parts(q: QTensor[Tensor]) -> list[Tensor]:
    """The arrays of one form as operators take them: E8M0 as bytes (`_run.MADE_DTYPES`)."""
    parts = [each for each in q.slots if each is not None]
    if q.scales is not None and q.scales.dtype is _run.E8M0:
        parts[1] = parts[1].view(torch.uint8)
    return parts


def _typed(scales: Any, cell: Format) -> Any:
    """Block scales as rules read them, of what operators take."""
    if isinstance(scales, _run.Register) and scales.spec.dtype == "uint8":
        return scales._replace(spec=scales.spec._replace(dtype=cell.scales))
    return scales


def _fixed(shape: Sequence[Any]) -> tuple[int, ...]:
    """A logical shape as text has it: M may change, and is -1."""
    return tuple(map(int, shape)) if len(shape) == 3 else (-1, int(shape[1]))


@lru_cache(maxsize=1024)
def _describe(format: Format, axis: int, shape: tuple[int, ...], dtype: str, initials: str) -> str:
    return json.dumps([dataclasses.asdict(format), axis, shape, dtype, initials])


@lru_cache(maxsize=1024)
def described(text: str) -> tuple[Format, int, tuple[int, ...], str, str]:
    """Format, axis, shape (-1 for rows), dtype and initials of the arrays that text of a form says."""
    format, axis, shape, dtype, parts = json.loads(text)
    return Format(**format), axis, tuple(shape), dtype, parts


def restored(stored: Stored, rows: int) -> QTensor[Any]:
    """The `QTensor` that `arrays_of` took apart, for operators alone: E8M0 stays bytes. `rows` is its M."""
    return operand_of(slots_of(*stored, 0), stored.text, rows)


def slots_of(tensors: Sequence[Tensor], text: str, rank: int) -> tuple[Any, Any, Any]:
    """An operand's three places among the operands of a rule; empty ones where there are no arrays."""
    if not text or not tensors:
        return grouped(tensors, rank), None, None
    initials = described(text)[4]
    if initials == "vsg":
        values, scales, group_scales = tensors
        return values, scales, group_scales
    values, scale = tensors
    return (values, scale, None) if initials == "vs" else (values, None, scale)


@lru_cache(maxsize=1024)
def reads(text: str, axis: int, cell: Format) -> bool:
    """Whether text is that of one form, and a product that contracts `axis` of operands stored so reads it."""
    if not text or "\n" in text:
        return False
    format, along, *_ = described(text)
    return (along, format.layout) == (axis, cell.layout)


def operand_of(slots: Sequence[Any], text: str, rows: int) -> Any:
    """What a rule reads in the three places."""
    if not text or slots[0] is None:
        return slots[0]
    format, axis, shape, dtype, _ = described(text)
    values, scales, group_scales = slots
    shape = (rows, shape[1]) if len(shape) == 2 else shape
    return QTensor(values, _typed(scales, format), group_scales, format, axis, shape, dtype)


def present(*forms: Any) -> list[Any]:
    """The arrays of forms, in order."""
    return [
        array
        for form in forms
        if form is not None
        for array in ([form] if not isinstance(form, QTensor) else [form.values, form.scales, form.group_scales])
        if array is not None
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Storing

Wanted = tuple[tuple[int, Format], ...]
"""(contracted axis, format) of each form."""


@lru_cache(maxsize=1024)
def store_text(wanted: Wanted, stream: int = 0) -> str:
    """Static facts of one `store`."""
    return json.dumps([[[axis, dataclasses.asdict(cell)] for axis, cell in wanted], stream])


@lru_cache(maxsize=1024)
def store_facts(text: str) -> tuple[Wanted, int]:
    """What `store_text` put down."""
    wanted, stream = json.loads(text)
    return tuple((axis, Format(**cell)) for axis, cell in wanted), stream


def _store_rule(run: Any, text: str, operands: Sequence[Any]) -> tuple[Any, ...]:
    source, sizes, encode, key, skip, amax, *buffers = operands
    wanted, stream = store_facts(text)
    into = None
    if buffers:
        spec = run.spec(source) if not hasattr(source, "spec") else source.spec
        left = iter(buffers)
        into = [
            QTensor(
                next(left),
                _typed(next(left), cell) if cell.scales else None,
                next(left) if cell.per_group else None,
                cell,
                axis,
                spec.shape,
                spec.dtype,
            )
            for axis, cell in wanted
        ]
    delayed = {"encode": encode, "amax": amax, "measure": amax is not None}
    found = storing.store(run, source, wanted, sizes, key=key, stream=stream, into=into, skip=skip, **delayed)
    return tuple(present(*found.forms))


def _store(
    execute: Execute,
    source: list[Tensor],
    group_sizes: Tensor | None,
    encode: Tensor | None,
    key: Tensor | None,
    how: str,
    amax: Tensor | None = None,
) -> list[Tensor]:
    operands = (_source(source, group_sizes), group_sizes, encode, key, None, amax)
    if group_sizes is None:
        return execute(_store_rule, how, operands)
    lengths = partial(lengths_of, store_facts(how)[0], group_sizes.shape[0])
    return execute(_store_rule, how, operands, (0,), (), lengths)


def lengths_of(wanted: Wanted, groups: int, rows: Any) -> list[Any]:
    """Lengths of all axes of forms of rows that follow from M, others among them."""
    specs = [stored_spec(cell, (rows, 1), axis, "float32", int(groups)) for axis, cell in wanted]
    parts = [part for spec in specs for part in (spec.values, spec.scales) if part is not None]
    return [length for part in parts for length in part.shape]


def _source(source: Sequence[Tensor], group_sizes: Tensor | None) -> Any:
    return grouped(source, 2 if group_sizes is not None else 3)


def _store_into(
    execute: Execute,
    source: list[Tensor],
    group_sizes: Tensor | None,
    encode: Tensor | None,
    key: Tensor | None,
    skip: Tensor | None,
    how: str,
    buffers: list[Tensor],
    amax: Tensor | None,
) -> None:
    operands = (_source(source, group_sizes), group_sizes, encode, key, skip, amax, *buffers)
    execute(_store_rule, how, operands)


_SOURCE = "Tensor[] source, Tensor? group_sizes, Tensor? encode, Tensor? key"
define("store", f"({_SOURCE}, str how) -> Tensor[]", _store)
# A form with delayed scaling is two arrays; the other form has up to three.
_store_merging = define_merging("store", f"{_SOURCE}, str how", _store, 5)
define(
    "store_into",
    f"({_SOURCE}, Tensor? skip, str how, Tensor(a!)[] buffers, Tensor(b!)? amax) -> ()",
    _store_into,
)
_store_op = torch.ops.torch_bridge.store.default
_store_into_op = torch.ops.torch_bridge.store_into.default


class Made(NamedTuple):
    """What an operator makes that stores, as far as that does not depend on arrays.

    Attributes:
        how: for the operator. forms: number of arrays and text of each form, in their order. merges: whether magnitudes
            go to a state. arrays: how many there are.
    """

    how: str
    forms: tuple[tuple[int, str], ...]
    merges: bool
    arrays: int

    def take(self, arrays: Sequence[Tensor], at: int = 0) -> list[Stored]:
        """The forms, whose arrays stand from `at` on."""
        found = []
        for count, text in self.forms:
            found.append(Stored(list(arrays[at : at + count]), text))
            at += count
        return found


def made_of(wanted: Wanted, shape: Sequence[Any], dtype: torch.dtype, stream: int = 0) -> Made:
    """What is made of an array of that logical shape; nothing where nothing is wanted."""
    return _made(wanted, _fixed(shape), dtype, stream)


@lru_cache(maxsize=1024)
def _made(wanted: Wanted, shape: tuple[int, ...], dtype: torch.dtype, stream: int) -> Made:
    forms = []
    for axis, cell in wanted:
        initials = "v" + "s" * bool(cell.scales) + "g" * cell.per_group
        forms.append((len(initials), _describe(cell, axis, shape, _run.dtype_name(dtype), initials)))
    merges = any(cell.delayed for _, cell in wanted)
    return Made(store_text(wanted, stream) if wanted else "", tuple(forms), merges, sum(count for count, _ in forms))


def store(
    source: Sequence[Tensor],
    wanted: Wanted,
    group_sizes: Tensor | None,
    *,
    encode: Tensor | None = None,
    amax: Tensor | None = None,
    key: Tensor | None = None,
    stream: int = 0,
) -> list[Stored]:
    """Rows (with group sizes) or weights in the quantised formats wanted; forms of one format come from one pass.

    Args:
        encode: [G], multipliers of delayed scaling. amax: [G], which magnitudes of such forms are merged into; None:
            nobody wants them.
    """
    first = source[0]
    shape = first.shape if group_sizes is not None or first.dim() == 3 else (len(source), *first.shape)
    made = made_of(wanted, shape, first.dtype, stream)
    operands = (list(source), group_sizes, encode, key, made.how)
    if amax is None or not made.merges:
        return made.take(_store_op(*operands))
    return made.take(_store_merging[made.arrays](*operands, amax))


def store_into(
    source: Sequence[Tensor],
    forms: Sequence[QTensor[Tensor]],
    *,
    encode: Tensor | None = None,
    amax: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """Weights anew in forms that exist, in place.

    Args:
        encode: [G], multipliers of delayed scaling. amax: [G], which magnitudes of such forms are merged into.
        skip: [1] int32, which on the device leaves everything as it is where it is not zero.
    """
    wanted = tuple((form.axis, form.format) for form in forms)
    buffers = [part for form in forms for part in _parts(form)]
    _store_into_op(list(source), None, encode, None, skip, store_text(wanted), buffers, amax)


# ---------------------------------------------------------------------------------------------------------------------
# Dequantising


def _dequantize_rule(run: Any, static: tuple[str, int, str], operands: Sequence[Any]) -> tuple[Any]:
    text, rows, dtype = static
    *slots, sizes = operands
    return (storing.dequantize(run, operand_of(slots, text, rows), sizes, dtype),)


def _dequantize(
    execute: Execute, parts: list[Tensor], group_sizes: Tensor | None, form: str, rows: int, dtype: str
) -> Tensor:
    operands = (*slots_of(parts, form, 3), group_sizes)
    return execute(_dequantize_rule, (form, int(rows), dtype), operands)[0]


define("dequantize", "(Tensor[] parts, Tensor? group_sizes, str form, SymInt rows, str dtype) -> Tensor", _dequantize)
_dequantize_op = torch.ops.torch_bridge.dequantize.default


def dequantize(q: QTensor[Tensor], group_sizes: Tensor | None, dtype: str) -> Tensor:
    """The values of q in its logical shape, of a form that is not rotated if there is one."""
    stored = arrays_of(storing.unrotated(q))
    return _dequantize_op(stored.tensors, group_sizes, stored.text, q.shape[0], dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Delayed scaling: multipliers for backward, and the step


def _copied(execute: Execute, arrays: list[Tensor]) -> Tensor:
    del execute  # no rule of ours
    return torch.cat(arrays)


# Compilers see through torch's own copies: backward would read the state, as it is by then.
define("copied", "(Tensor[] arrays) -> Tensor", _copied)
copied = torch.ops.torch_bridge.copied.default


def _update_rule(run: Any, algorithm: str, operands: Sequence[Any]) -> tuple[Any, ...]:
    scale, history, top = operands
    scaling.update(run, ScalingState(scale, history, top, algorithm), reuse=True)
    return ()


def _update(execute: Execute, scale: Tensor, history: Tensor, top: Tensor, algorithm: str) -> None:
    execute(_update_rule, algorithm, (scale, history, top))


define("update_scaling", "(Tensor(a!) scale, Tensor(b!) history, Tensor top, str algorithm) -> ()", _update)
update_scaling = torch.ops.torch_bridge.update_scaling.default
