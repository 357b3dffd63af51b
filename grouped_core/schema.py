"""What the native calls take and give: slots with their shapes and element types, and parameters with defaults.

The words are those of cc/api/calls.h and cc/api/routing.h, read from the native module into `_schema.py` by
`make stub`; cc/api/schema.h has their grammar. Nothing here needs the module itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from grouped_core._schema import CALLS, TYPES

Param = int | float | str
"""A static parameter of a call."""

_LENGTH = re.compile(r"\d+")


class Slot(NamedTuple):
    """An operand or a result.

    Attributes:
        optional: whether it may be absent.
        shapes: one for each rank that it may have, of letters, numbers, "?" (any length) and "+" (any but 0); empty: it
            may have any.
        dtypes: element types that it may have; empty: that of the slot `type_of`.
        like: the slot whose shape and dtype it has, or "".
        beside: the slot that is present if and only if this one is, or "".
    """

    name: str
    optional: bool
    shapes: tuple[tuple[str, ...], ...]
    dtypes: tuple[str, ...]
    type_of: str = ""
    like: str = ""
    beside: str = ""

    def shape(self, lengths: Mapping[str, int]) -> tuple[int, ...]:
        """Its shape with `lengths` for its letters.

        Raises:
            KeyError: it has several shapes, or lengths that follow from none of `lengths`.
        """
        if len(self.shapes) != 1:
            raise KeyError(f"`{self.name}` has no single shape; pass its spec")
        return tuple(int(dim) if _LENGTH.fullmatch(dim) else lengths[dim] for dim in self.shapes[0])

    def dtype(self) -> str:
        """Its only element type.

        Raises:
            KeyError: it has several.
        """
        if len(self.dtypes) != 1:
            raise KeyError(f"`{self.name}` has several dtypes; pass one")
        return self.dtypes[0]

    def lengths(self, shape: tuple[int, ...]) -> Iterable[tuple[str, int]]:
        """Letters and their lengths where it has `shape`."""
        for dims in self.shapes:
            if len(dims) == len(shape):
                return [(dim, length) for dim, length in zip(dims, shape, strict=True) if dim.isalpha()]
        return ()


class Schema(NamedTuple):
    """A call: its operands, results, and parameters with their defaults, all by name and in order."""

    inputs: dict[str, Slot]
    outputs: dict[str, Slot]
    params: dict[str, Param]


def _slot(name: str, words: str) -> Slot:
    words, _, beside = words.partition(", with ")
    optional = words.startswith("optional ")
    words = words.removeprefix("optional ")
    if words.startswith("as "):
        return Slot(name, optional, (), (), like=words[3:], beside=beside)
    shapes, _, types = words.rpartition("] ")
    dims = () if shapes == "[..." else tuple(tuple(part.strip(" []").split(", ")) for part in shapes.split("|"))
    if types.startswith("as "):
        return Slot(name, optional, dims, (), type_of=types[3:], beside=beside)
    return Slot(name, optional, dims, TYPES.get(types, (types,)), beside=beside)


@cache
def schema(call: str) -> Schema:
    """The schema of the native call of that name."""
    inputs, outputs, params = CALLS[call]
    operands, results = ({name: _slot(name, words) for name, words in each.items()} for each in (inputs, outputs))
    return Schema(operands, results, params)


SLOTS = {name: tuple(inputs) for name, (inputs, _, _) in CALLS.items()}
"""Operand slots of every native call, in order."""

RESULTS = {name: tuple(outputs) for name, (_, outputs, _) in CALLS.items()}
"""Result slots of every native call, in order."""
