"""FSDP2 and DTensors over two processes on the CPU; what they check is in parallel_checks.py.

Its tests run before all others (conftest.py), so that other workers run theirs while one waits for the two ranks.
"""

from __future__ import annotations

import pytest

from tests.torch_frontend.conftest import Program
from tests.torch_frontend.parallel_checks import CHECKS

MODULE = "parallel_checks"


@pytest.fixture(scope="module")
def outcome(program: Program) -> str:
    return program(MODULE, timeout=600)[1]


@pytest.mark.rule("DLY-3", "GRP-10", "GRD-6", "LYR-9", "QNT-3")
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.rule("TE #3019", "torchtitan #1166", "MLM #5209", "MLM #6228")
def test_two_ranks(name: str, outcome: str) -> None:
    assert f"passed  {name}\n" in outcome, outcome


def test_a_collective_without_one_rank_fails_soon(program: Program) -> None:
    """Far below the hour for which the other rank sleeps, which is ended with the first; both show where they were."""
    name = "one_rank_stays_away_from_a_collective"
    status, printed = program(MODULE, "--checks", name, "--timeout", "4", timeout=300)
    assert status == 1, printed
    said = (
        *(f"FAILED  {name}\nrank 0: Traceback", "in _mean_over_ranks", "rank 1 did not finish it"),
        *("rank 1 was ended after another one had failed", "rank 1 has had enough", f"in {name}\n  File"),
    )
    for words in said:
        assert words in printed, f"{words!r} is missing:\n{printed}"


def test_checks_that_take_too_long_are_ended_with_their_output(program: Program) -> None:
    name = "both_ranks_wait_for_ever"
    status, printed = program(MODULE, "--checks", name, "--limit", "1", timeout=300)
    assert status == 1, printed
    for words in (f"FAILED  {name}\n", *(f"rank {rank} was ended after 1 seconds; it printed:" for rank in (0, 1))):
        assert words in printed, f"{words!r} is missing:\n{printed}"
