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
    """What one rank receives: of each of its P B rows the source rank, its slot there, the local expert; -1: none."""

    ranks: NDArray[np.int64]
    slots: NDArray[np.int64]
    experts: NDArray[np.int64]


def exchange(op: Exchange, experts: Sequence[NDArray[Any]]) -> tuple[list[Received], list[int]]:
    """What every rank receives, and how many slots every rank drops.

    Args:
        experts: of each rank, [T, k] among all experts; others than 0 to E - 1 are none.
    """
    received = [Received(*(np.full(op.rows, -1) for _ in range(3))) for _ in range(op.ranks)]
    dropped = [0] * op.ranks
    for source, chosen in enumerate(experts):
        flat = np.asarray(chosen, np.int64).reshape(-1)
        for to in range(op.ranks):
            (slots,) = np.nonzero(flat // op.own == to)
            slots = slots[np.argsort(flat[slots], kind="stable")]
            kept = slots[: op.budget]
            dropped[source] += len(slots) - len(kept)
            rows = source * op.budget + np.arange(len(kept))
            received[to].ranks[rows], received[to].slots[rows] = source, kept
            received[to].experts[rows] = flat[kept] % op.own
    return received, dropped


def all_to_all(sent: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """[P B, ...] of each rank, received by each rank: part s of rank d is what s had as part d."""
    ranks = len(sent)
    parts = [np.split(np.asarray(each), ranks) for each in sent]
    return [np.concatenate([parts[source][to] for source in range(ranks)]) for to in range(ranks)]
