"""Checks of memory overlap: a buffer that a call writes must not overlap the other operands of the call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple


class Span(NamedTuple):
    """The memory of one operand: the address of its first byte and of the byte after its last, equal if it is empty."""

    name: str
    start: int
    end: int


def overlap(buffer: str, operand: str) -> ValueError:
    """The error for a buffer that overlaps another operand."""
    return ValueError(f"`{buffer}`: overlaps `{operand}` in memory, expected a buffer of its own; allocate one.")


def check_apart(written: Iterable[Span], read: Iterable[Span]) -> None:
    """Refuses a written buffer that overlaps another operand (BUF-2).

    It sweeps once over the sorted starts, so a list of many weights needs no comparison of all pairs.

    Raises:
        ValueError: two spans overlap, and at least one of them is written.
    """
    spans = [(span.start, span.end, 0, span.name) for span in read if span.start < span.end]  # 0: only read
    spans += [(span.start, span.end, at, span.name) for at, span in enumerate(written, 1) if span.start < span.end]
    furthest = {False: (0, 0, ""), True: (0, 0, "")}  # for read and for written spans: the one that ends last so far
    for start, end, at, name in sorted(spans):
        for other_end, other_at, other in furthest.values():
            if start < other_end and (at or other_at):
                (_, operand), (_, buffer) = sorted([(at, name), (other_at, other)])
                raise overlap(buffer, operand)
        furthest[at > 0] = max(furthest[at > 0], (end, at, name))


def are_apart(places: Sequence[tuple[int, int]]) -> bool:
    """Whether no two of these (address, number of bytes) overlap; a quick test before `check_apart`."""
    ordered = sorted(places)
    return all(start + length <= following for (start, length), (following, _) in pairwise(ordered))


def listed_twice(name: str, other: str, beside: str) -> ValueError:
    """The error for a weight that is listed twice while its gradient is added to a destination: that of `beside`.

    Tiles of one launch would add to one destination at the same time, and updates would be lost.
    """
    return ValueError(
        f"`{name}`: the same memory as `{other}` beside {beside}, expected each weight once, for two groups cannot add "
        f"to one destination at a time; pass separate weights, or leave out {beside}, and autograd sums the gradients."
    )
