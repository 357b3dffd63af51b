"""Layers whose experts are spread over processes on the CPU; what they check is in expert_parallel_checks.py."""

from __future__ import annotations

import pytest

from tests.torch_frontend.conftest import Program
from tests.torch_frontend.expert_parallel_checks import CHECKS
from tests.torch_frontend.expert_parallel_tools import OF_GRAPHS
from tests.torch_frontend.rank_tools import SKIPPED

ON_FOUR = [name for name in CHECKS if name not in OF_GRAPHS]


@pytest.fixture(scope="module")
def outcome(program: Program) -> str:
    return program("expert_parallel_checks", "--checks", *ON_FOUR, timeout=600)[1]


@pytest.fixture(scope="module")
def outcome_of_graphs(program: Program) -> str:
    # One rank waits in its first collective for the other one to compile, which takes seconds.
    options = ("--ranks", "2", "--timeout", "60", "--checks", *OF_GRAPHS)
    return program("expert_parallel_checks", *options, timeout=600)[1]


def passed(name: str, outcome: str) -> None:
    if f"skipped  {name}\n{SKIPPED}" in outcome:
        pytest.skip(outcome.split(f"skipped  {name}\n{SKIPPED}")[1].splitlines()[0])
    assert f"passed  {name}\n" in outcome, outcome


@pytest.mark.rule("LYR-9", "LYR-10", "LYR-11", "LYR-18", "LOR-1", "LOR-4")
@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks(name: str, outcome: str) -> None:
    passed(name, outcome)


@pytest.mark.rule("LYR-9", "LYR-11", "LYR-18", "LOR-4")
@pytest.mark.parametrize("name", OF_GRAPHS)
def test_graphs_of_two_ranks(name: str, outcome_of_graphs: str) -> None:
    passed(name, outcome_of_graphs)


@pytest.mark.rule("LYR-9")
def test_one_two_and_eight_ranks(program: Program) -> None:
    name = "one_two_and_eight_ranks_have_the_bits_of_one"
    status, printed = program("expert_parallel_checks", "--ranks", "8", "--checks", name, timeout=300)
    assert status == 0, printed


@pytest.mark.rule("LYR-11")
def test_one_rank_without_tokens(program: Program) -> None:
    name = "passes_without_tokens_run_at_every_width"
    status, printed = program("expert_parallel_checks", "--ranks", "1", "--checks", name, timeout=120)
    assert status == 0, printed


@pytest.mark.rule("LYR-11")
def test_a_rank_that_stays_away_is_an_error_soon(program: Program) -> None:
    name = "one_rank_stays_away"
    status, printed = program("expert_parallel_checks", "--ranks", "2", "--checks", name, "--timeout", "4", timeout=300)
    assert status == 1, printed
    for words in (f"FAILED  {name}\nrank 0: Traceback", "in summed", "rank 1 was ended after another one had failed"):
        assert words in printed, f"{words!r} is missing:\n{printed}"
