"""Steps that turn tensors of one layout into those of another: exact moves of values, described without data.

A step makes a list of arrays from a list of arrays. Two neighbouring steps that undo each other are left out
(`cancelled`). `Arrays` lists the operations that a frontend has to supply.
"""

from __future__ import annotations

# ruff: noqa: D102 (the methods are documented once, in `Arrays` and `Step`)
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from grouped_core import activations
from grouped_core.safetensors_file import Facts, numpy_dtype


class Arrays(Protocol):
    """Operations that frameworks spell differently."""

    def stack(self, arrays: Sequence[Any]) -> Any:
        """Arrays of one shape along a new first axis."""
        ...

    def concatenate(self, arrays: Sequence[Any], axis: int) -> Any:
        """Arrays along an axis that exists."""
        ...

    def view(self, array: Any, dtype: str) -> Any:
        """The same bytes as another dtype of as many."""
        ...

    def cast(self, array: Any, dtype: str) -> Any:
        """The values in another floating dtype, rounded to nearest even."""
        ...


class _NumPy:
    def stack(self, arrays: Sequence[Any]) -> Any:
        return np.stack(arrays)

    def concatenate(self, arrays: Sequence[Any], axis: int) -> Any:
        return np.concatenate(arrays, axis)

    def view(self, array: Any, dtype: str) -> Any:
        return array.view(numpy_dtype(dtype))

    def cast(self, array: Any, dtype: str) -> Any:
        return array.astype(numpy_dtype(dtype))


NUMPY: Arrays = _NumPy()


class Step:
    """One exact move."""

    @property
    def inverse(self) -> Step:
        """The step that undoes it."""
        raise NotImplementedError

    def facts(self, given: list[Facts]) -> list[Facts]:
        """The facts of its results.

        Raises:
            ValueError: it does not apply to such arrays. The message does not name the tensor; callers add its name.
        """
        raise NotImplementedError

    def run(self, given: list[Any], arrays: Arrays) -> list[Any]:
        """Its results."""
        raise NotImplementedError


class MisfitError(ValueError):
    """A step does not take what it was given.

    Attributes:
        at: the array, among `count`, that does not fit.
    """

    def __init__(self, message: str, at: int, count: int) -> None:
        super().__init__(message)
        self.at, self.count = at, count


def _need(condition: bool, found: object, wanted: str, at: int = 0, count: int = 0) -> None:
    if not condition:
        raise MisfitError(f"{found}, expected {wanted}", at, count)


@dataclass(frozen=True)
class Stack(Step):
    """Members, `groups` for each array: joined along a new first axis."""

    groups: int

    @property
    def inverse(self) -> Step:
        return Unbind(self.groups)

    def facts(self, given: list[Facts]) -> list[Facts]:
        made = []
        for at in range(0, len(given), self.groups):
            first = given[at]
            for n, each in enumerate(given[at : at + self.groups], at):
                _need(each == first, each, f"{first} as in the first expert", n, len(given))
            made.append(Facts((self.groups, *first.shape), first.dtype))
        return made

    def run(self, given: list[Any], arrays: Arrays) -> list[Any]:
        return [arrays.stack(given[at : at + self.groups]) for at in range(0, len(given), self.groups)]


@dataclass(frozen=True)
class Unbind(Step):
    """The members of each array."""

    groups: int

    @property
    def inverse(self) -> Step:
        return Stack(self.groups)

    def facts(self, given: list[Facts]) -> list[Facts]:
        for each in given:
            _need(each.shape[:1] == (self.groups,), each, f"{self.groups} groups")
        return [Facts(each.shape[1:], each.dtype) for each in given for _ in range(self.groups)]

    def run(self, given: list[Any], arrays: Arrays) -> list[Any]:
        del arrays
        return [each[at] for each in given for at in range(self.groups)]


@dataclass(frozen=True)
class Join(Step):
    """Gate and linear half, one after the other along `axis` (negative)."""

    axis: int

    @property
    def inverse(self) -> Step:
        return Halve(self.axis)

    def facts(self, given: list[Facts]) -> list[Facts]:
        gate, linear = given
        _need(linear == gate, linear, f"{gate} as the gate half")
        _need(len(gate.shape) >= -self.axis, gate, "more axes")
        shape = list(gate.shape)
        shape[self.axis] *= 2
        return [Facts(tuple(shape), gate.dtype)]

    def run(self, given: list[Any], arrays: Arrays) -> list[Any]:
        return [arrays.concatenate(given, self.axis % len(given[0].shape))]


@dataclass(frozen=True)
class Halve(Step):
    """The first and the second half of an axis (negative)."""

    axis: int

    @property
    def inverse(self) -> Step:
        return Join(self.axis)

    def facts(self, given: list[Facts]) -> list[Facts]:
        (whole,) = given
        _need(len(whole.shape) >= -self.axis and not whole.shape[self.axis] % 2, whole, "an axis of two equal halves")
        shape = list(whole.shape)
        shape[self.axis] //= 2
        return [Facts(tuple(shape), whole.dtype)] * 2

    def run(self, given: list[Any], arrays: Arrays) -> list[Any]:
        del arrays
        half, behind = given[0].shape[self.axis] // 2, (slice(None),) * (-self.axis - 1)
        return [given[0][(..., part, *behind)] for part in (slice(None, half), slice(half, None))]


@dataclass(frozen=True)
class Transpose(Step):
    """The last two axes exchanged."""

    @property
    def inverse(self) -> Step:
        return self

    def facts(self, given: list[Facts]) -> list[Facts]:
        for each in given:
            _need(len(each.shape) >= 2, each, "a matrix")
        return [Facts((*each.shape[:-2], each.shape[-1], each.shape[-2]), each.dtype) for each in given]

    def run(self, given: list[Any], arrays: Arrays) -> list[Any]:
        del arrays
        return [each.swapaxes(-1, -2) for each in given]


@dataclass(frozen=True)
class Contiguous(Step):
    """Blocks of `block` gate and linear columns along `axis` (negative) become two halves."""

    block: int
    axis: int

    @property
    def inverse(self) -> Step:
        return Interleaved(self.block, self.axis)

    def facts(self, given: list[Facts]) -> list[Facts]:
        for each in given:
            fits = len(each.shape) >= -self.axis and not each.shape[self.axis] % (2 * self.block)
            _need(fits, each, f"halves of columns in blocks of {self.block}")
        return given

    def run(self, given: list[Any], arrays: Arrays) -> list[Any]:
        del arrays
        return [activations.deinterleave(each, self.block, axis=self.axis) for each in given]


@dataclass(frozen=True)
class Interleaved(Contiguous):
    """Two halves along `axis` become alternating blocks."""

    @property
    def inverse(self) -> Step:
        return Contiguous(self.block, self.axis)

    def run(self, given: list[Any], arrays: Arrays) -> list[Any]:
        del arrays
        return [activations.interleave(each, self.block, axis=self.axis) for each in given]


@dataclass(frozen=True)
class Grow(Step):
    """A matrix becomes the one member of a new first axis."""

    @property
    def inverse(self) -> Step:
        return Only()

    def facts(self, given: list[Facts]) -> list[Facts]:
        return [Facts((1, *each.shape), each.dtype) for each in given]

    def run(self, given: list[Any], arrays: Arrays) -> list[Any]:
        del arrays
        return [each[None] for each in given]


@dataclass(frozen=True)
class Only(Step):
    """The one member of the first axis."""

    @property
    def inverse(self) -> Step:
        return Grow()

    def facts(self, given: list[Facts]) -> list[Facts]:
        for each in given:
            _need(each.shape[:1] == (1,), each, "one group")
        return [Facts(each.shape[1:], each.dtype) for each in given]

    def run(self, given: list[Any], arrays: Arrays) -> list[Any]:
        del arrays
        return [each[0] for each in given]


@dataclass(frozen=True)
class Chunk(Step):
    """Splits the first axis, in which the members follow each other: (G a, b) becomes (G, a, b)."""

    groups: int

    @property
    def inverse(self) -> Step:
        raise NotImplementedError("files with folded axes are read, but never written")

    def facts(self, given: list[Facts]) -> list[Facts]:
        return [Facts((self.groups, each.shape[0] // self.groups, *each.shape[1:]), each.dtype) for each in given]

    def run(self, given: list[Any], arrays: Arrays) -> list[Any]:
        del arrays
        return [each.reshape(self.groups, each.shape[0] // self.groups, *each.shape[1:]) for each in given]


@dataclass(frozen=True)
class Members(Step):
    """`count` members from `start` on."""

    start: int
    count: int

    @property
    def inverse(self) -> Step:
        raise NotImplementedError("members that are left out are lost")

    def facts(self, given: list[Facts]) -> list[Facts]:
        return [Facts((self.count, *each.shape[1:]), each.dtype) for each in given]

    def run(self, given: list[Any], arrays: Arrays) -> list[Any]:
        del arrays
        return [each[self.start : self.start + self.count] for each in given]


@dataclass(frozen=True)
class Merge(Step):
    """Codes in blocks, [..., C / 32, 16], become rows of codes [..., C / 2]."""

    @property
    def inverse(self) -> Step:
        return Blocks()

    def facts(self, given: list[Facts]) -> list[Facts]:
        for each in given:
            _need(len(each.shape) >= 2 and each.shape[-1] == 16, each, "blocks of 16 bytes")
        return [Facts((*each.shape[:-2], each.shape[-2] * 16), each.dtype) for each in given]

    def run(self, given: list[Any], arrays: Arrays) -> list[Any]:
        del arrays
        return [each.reshape(*each.shape[:-2], each.shape[-2] * 16) for each in given]


@dataclass(frozen=True)
class Blocks(Step):
    """The inverse of `Merge`."""

    @property
    def inverse(self) -> Step:
        return Merge()

    def facts(self, given: list[Facts]) -> list[Facts]:
        for each in given:
            _need(bool(each.shape) and not each.shape[-1] % 16, each, "rows of whole blocks of 16 bytes")
        return [Facts((*each.shape[:-1], each.shape[-1] // 16, 16), each.dtype) for each in given]

    def run(self, given: list[Any], arrays: Arrays) -> list[Any]:
        del arrays
        return [each.reshape(*each.shape[:-1], each.shape[-1] // 16, 16) for each in given]


@dataclass(frozen=True)
class View(Step):
    """The same bytes as another dtype."""

    source: str
    target: str

    @property
    def inverse(self) -> Step:
        return View(self.target, self.source)

    def facts(self, given: list[Facts]) -> list[Facts]:
        for each in given:
            _need(each.dtype == self.source, each, f"dtype {self.source}")
        return [Facts(each.shape, self.target) for each in given]

    def run(self, given: list[Any], arrays: Arrays) -> list[Any]:
        return [arrays.view(each, self.target) for each in given]


@dataclass(frozen=True)
class Impossible(Step):
    """A step that would have to quantise values again: it is refused, unless an equal neighbouring step cancels it."""

    reason: str
    detail: int | str | None = None

    @property
    def inverse(self) -> Step:
        return self

    def facts(self, given: list[Facts]) -> list[Facts]:
        raise ValueError(f"{given[0]}, {self.reason}")


def cancelled(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps without neighbours that undo each other."""
    left: list[Step] = []
    for step in steps:
        if left and not isinstance(step, (Chunk, Members)) and step.inverse == left[-1]:
            left.pop()
        else:
            left.append(step)
    return tuple(left)


def undone(steps: Sequence[Step]) -> list[Step]:
    """The steps that undo `steps`."""
    return [step.inverse for step in reversed(steps)]


def facts_after(steps: Sequence[Step], given: Sequence[Facts]) -> list[Facts]:
    """The facts of the results of all steps.

    Raises:
        ValueError: a step does not apply; the message has no subject.
    """
    facts = list(given)
    for step in steps:
        facts = step.facts(facts)
    return facts


def run_steps(steps: Sequence[Step], given: Sequence[Any], arrays: Arrays) -> list[Any]:
    """The results of all steps."""
    found = list(given)
    for step in steps:
        found = step.run(found, arrays)
    return found
