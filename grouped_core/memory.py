"""Where arrays lie, as far as correctness hangs on it: what is written stays apart from everything else of a call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple


class Span(NamedTuple):
    """The bytes of one operand: the address of its first and the one behind its last, equal where it has none."""

    name: str
    start: int
    end: int


def overlap(buffer: str, operand: str) -> ValueError:
    """What refuses a buffer that lies in the memory of another operand."""
    return ValueError(f"`{buffer}`: overlaps `{operand}` in memory, expected a buffer of its own; allocate one.")


def check_apart(written: Iterable[Span], read: Iterable[Span]) -> None:
    """Refuses memory that is written and is at the same time another operand's (BUF-2).

    One sweep over the starts: a list of many weights costs no comparison of all pairs.

    Raises:
        ValueError: two of them overlap, of which at least one is written.
    """
    spans = [(span.start, span.end, 0, span.name) for span in read if span.start < span.end]  # 0: is only read
    spans += [(span.start, span.end, at, span.name) for at, span in enumerate(written, 1) if span.start < span.end]
    furthest = {False: (0, 0, ""), True: (0, 0, "")}  # of what is read, and written: the span that ends last so far
    for start, end, at, name in sorted(spans):
        for other_end, other_at, other in furthest.values():
            if start < other_end and (at or other_at):
                (_, operand), (_, buffer) = sorted([(at, name), (other_at, other)])
                raise overlap(buffer, operand)
        furthest[at > 0] = max(furthest[at > 0], (end, at, name))


def are_apart(places: Sequence[tuple[int, int]]) -> bool:
    """Whether no two of these (address, number of bytes) overlap; the quick question in front of the words."""
    ordered = sorted(places)
    return all(start + length <= following for (start, length), (following, _) in pairwise(ordered))


def listed_twice(name: str, other: str, accum: str) -> ValueError:
    """What refuses a weight that stands twice where its gradient is added to what the caller keeps.

    Tiles of one launch would add to one destination at the same time, and updates would be lost.
    """
    return ValueError(
        f"`{name}`: the same memory as `{other}` beside {accum}, expected each weight once, for two groups cannot add "
        "to one destination at a time; pass weights of their own, or no accumulator, and autograd sums the gradients."
    )
