"""Runs a rule on tensors without memory: the fake tensors of torch.compile, and meta tensors.

NOTE: specs must be hashable, and torch's symbols are not. Only M may stay symbolic; other lengths become numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core.calls import ArraySpec, Call, spec_in_format
from torch_bridge._cache import Cache
from torch_bridge._record import Recording, Rule, given_of, record
from torch_bridge._symbols import SYMBOLIC_ROWS, is_symbol, multiple
from torch_bridge._tensors import RESULT_DTYPES, Form, Layout, Leaf, leaf_count, tensors_of

planned: list[list[Call]] = []
"""Lists to which rules on meta tensors append the calls that they would launch; the innermost list is last."""


class Fake(NamedTuple):
    """A recording on specs, and M. If M is a multiple of a symbol, `SYMBOLIC_ROWS` represents that symbol in specs."""

    recording: Recording
    rows: Any
    symbol: Any  # None for a number


_recordings: Cache[Hashable, Recording] = Cache()


def fake(rule: Rule, static: Hashable, layouts: tuple[Layout, ...], leaves: Sequence[Leaf], rows: Any) -> Fake:
    """Returns the recording of `rule`; arguments are those of `record`, except that `rows` may be a symbol."""
    given = [given_of(each, has_memory=False) for each in leaves]
    plain_rows, of_forms = _places(rule, layouts)
    for at, each in enumerate(given):  # first turn other lengths into numbers, because M may be the same symbol
        if each is not None and at not in of_forms:
            for length in each.spec.shape[at in plain_rows :]:
                int(length)
    found = [each.spec.shape[0] for at in sorted(plain_rows) if (each := given[at]) is not None]
    symbol = _symbol_of(rows, found)
    if symbol is not None:
        for length in found:
            torch._check(length == rows)
    count = _number(rows, symbol)
    specs = tuple([each and each._replace(spec=_in_numbers(each.spec, symbol)) for each in given])
    key = (rule.name, static, layouts, specs, count)
    recording = _recordings.get(key)
    if recording is None:
        recording = _recordings.keep(key, record(rule, static, layouts, specs, count))
    return Fake(recording, count if symbol is None else rows, symbol)


def _symbol_of(rows: Any, lengths: Sequence[Any]) -> Any:
    """Returns the symbol in M; None if M, or one of `lengths`, which must equal M, is not symbolic."""
    times = multiple(rows)
    if not times or not all(is_symbol(n) or (multiple(n) and n.node.expr == rows.node.expr) for n in lengths):
        return None
    return rows // times


def _places(rule: Rule, layouts: Sequence[Layout]) -> tuple[set[int], set[int]]:
    """Returns the positions of plain rows [M, ...], and of leaves in which any axis may depend on M."""
    named = zip(rule.operands._fields, layouts, strict=True)
    fields = [(name, layout) for name, layout in named for _ in range(leaf_count(layout))]
    plain = {at for at, (name, layout) in enumerate(fields) if layout is None and name in rule.rows}
    return plain, {at for at, (name, _) in enumerate(fields) if name in rule.rows | rule.derived} - plain


def _number(length: Any, symbol: Any) -> int:
    """Returns a length as a number; if it depends on `symbol`, its value for M = `SYMBOLIC_ROWS`."""
    if symbol is None or not isinstance(length, torch.SymInt) or length.node.expr.free_symbols != {symbol.node.expr}:
        return int(length)
    return int(length.node.expr.subs(symbol.node.expr, SYMBOLIC_ROWS))


def _in_numbers(spec: ArraySpec, symbol: Any) -> ArraySpec:
    return spec._replace(shape=tuple([_number(length, symbol) for length in spec.shape]))


def new_tensors(found: Fake, leaves: Sequence[Leaf], groups: Any) -> dict[int, Tensor]:
    """Makes tensors with the shapes of the new results of a rule, and returns them by register.

    Args:
        leaves: the leaves of its operands; the first one that is present determines the device. groups: G.
    """
    recording, symbol = found.recording, found.symbol
    shapes: dict[int, Sequence[Any]] = {at: recording.specs[at].shape for at in recording.made()}
    if symbol is not None:
        shapes = {at: [_length(n, symbol) for n in shape] for at, shape in shapes.items()}
        for output in recording.outputs:
            if isinstance(output.layout, Form) and len(output.layout.shape) == 2:
                shapes |= _lengths(output.layout, output.leaves, found.rows, int(groups))
    first = tensors_of(*leaves)[0]
    specs = recording.specs
    return {at: first.new_empty(shape, dtype=RESULT_DTYPES[specs[at].dtype]) for at, shape in shapes.items()}


def _length(number: int, symbol: Any) -> Any:
    """Returns the length that a number represents: M, a multiple of M (rows of slots), or the number itself."""
    return number if not number or number % SYMBOLIC_ROWS else symbol * (number // SYMBOLIC_ROWS)


def _lengths(form: Form, leaves: Sequence[Any], rows: Any, groups: int) -> dict[int, Sequence[Any]]:
    """Returns, by register, the shapes of the arrays of quantised rows; their lengths are functions of M."""
    spec = spec_in_format(form.format, (rows, form.shape[1]), form.axis, form.dtype, groups)
    parts = [part for part in (spec.values, spec.scales, spec.group_scales) if part is not None]
    pairs = zip(leaves, parts, strict=False)
    found: dict[int, Sequence[Any]] = {at: part.shape for at, part in pairs if at >= 0}
    return found if form.other is None else found | _lengths(form.other, leaves[len(parts) :], rows, groups)
