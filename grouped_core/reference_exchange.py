"""The reference of an exchange among ranks, in NumPy: which slots go where, by definition, and all-to-alls of lists.

Letters as in `grouped_core.exchange`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from grouped_core.exchange import Exchange


class Received(NamedTuple):
    """What one rank receives: of each of its P B rows the source rank, the row's slots there and their local experts,
    [P B, j] in the order of slots; -1: none.
    """

    ranks: NDArray[np.int64]
    slots: NDArray[np.int64]
    experts: NDArray[np.int64]


def exchange(op: Exchange, experts: Sequence[NDArray[Any]]) -> tuple[list[Received], list[int]]:
    """What every rank receives, and how many slots every rank drops.

    Args:
        experts: for each rank [T, k], numbers among all experts; a number outside 0 to E - 1 means no expert.
    """
    several = (op.rows, op.slots_of_row)
    received = [Received(*(np.full(shape, -1) for shape in (op.rows, several, several))) for _ in range(op.ranks)]
    dropped = [0] * op.ranks
    for source, chosen in enumerate(experts):
        flat = np.asarray(chosen, np.int64).reshape(-1)
        for to in range(op.ranks):
            (slots,) = np.nonzero(flat // op.own == to)
            dropped[source] += len(slots)
            for at, row in enumerate(_rows(op, flat, slots)[: op.budget]):
                place, kept = source * op.budget + at, row[: op.slots_of_row]
                received[to].ranks[place] = source
                received[to].slots[place, : len(kept)] = kept
                received[to].experts[place, : len(kept)] = flat[kept] % op.own
                dropped[source] -= len(kept)
    return received, dropped


def _rows(op: Exchange, experts: NDArray[Any], slots: NDArray[Any]) -> list[NDArray[Any]]:
    """The slots of each row that goes to a rank, of those `slots` whose experts are there."""
    if op.once_per_rank:
        return [slots[slots // op.slots == token] for token in np.unique(slots // op.slots)]
    return list(slots[np.argsort(experts[slots], kind="stable")].reshape(-1, 1))


def with_room(op: Exchange, received: Sequence[Received]) -> tuple[list[Received], int]:
    """What ranks keep of what they receive if their experts have room for `Exchange.max_rows` rows only, and how many
    slots are lost: the last ones in the order of local experts, then rows.
    """
    left, lost = [], 0
    for ranks, slots, experts in received:
        order = np.argsort(experts, axis=None, kind="stable")
        beyond = order[np.sort(experts, axis=None) >= 0][op.max_rows :] if op.max_rows is not None else order[:0]
        slots, experts = slots.copy(), experts.copy()
        slots.reshape(-1)[beyond] = experts.reshape(-1)[beyond] = -1
        left.append(Received(ranks, slots, experts))
        lost += len(beyond)
    return left, lost


def travelled(op: Exchange, received: Sequence[Received]) -> NDArray[np.bool_]:
    """[P, T, k]: which slots of each rank are among what all ranks received."""
    found = np.zeros((op.ranks, op.tokens * op.slots), bool)
    for each in received:
        for rank, slots in zip(each.ranks, each.slots, strict=True):
            found[rank, slots[slots >= 0]] = True
    return found.reshape(op.ranks, op.tokens, op.slots)


def all_to_all(sent: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """[P B, ...] of each rank, received by each rank: part s of rank d is what s had as part d."""
    ranks = len(sent)
    parts = [np.split(np.asarray(each), ranks) for each in sent]
    return [np.concatenate([parts[source][to] for source in range(ranks)]) for to in range(ranks)]
