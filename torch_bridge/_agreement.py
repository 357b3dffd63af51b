"""What GROUPED_DEBUG=ranks compares between the ranks of a process group, before their collectives would block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from grouped_core.debug import debug_flags
from torch_bridge._compiling import is_compiling


class Fact(NamedTuple):
    """What has to be the same on every rank.

    Attributes:
        value: what this rank has. what: its words in the message, behind the values of all ranks.
        expected: what is expected, and what to do.
    """

    value: Any
    what: str
    expected: str


def check_agreement(function: str, process_group: Any, facts_of: Callable[[], tuple[Fact, ...]]) -> None:
    """Checks for GROUPED_DEBUG=ranks that facts are the same on all ranks; every rank waits for the others.

    Without the flag, and while a graph is traced, nothing is compared, and `facts_of` is not called.

    Raises:
        ValueError: on all ranks, because they have different values.
    """
    if is_compiling() or "ranks" not in debug_flags():
        return
    facts = facts_of()
    found: list[Any] = [None] * process_group.size()
    dist.all_gather_object(found, tuple([each.value for each in facts]), process_group)
    for fact, values in zip(facts, zip(*found, strict=True), strict=True):
        if len(set(values)) > 1:
            raise ValueError(
                f"{function}: {', '.join(map(str, values))} {fact.what} on the ranks of `process_group`, expected "
                f"{fact.expected}."
            )
