"""Layers whose experts are spread over four processes on the CPU; what they check is in expert_parallel_checks.py."""

from __future__ import annotations

import pytest

from tests.torch_frontend.expert_parallel_checks import CHECKS
from tests.torch_frontend.rank_tools import program


@pytest.fixture(scope="module")
def outcome() -> str:
    return program("expert_parallel_checks", timeout=600)[1]


@pytest.mark.rule("LYR-9", "LYR-10", "LYR-11")
@pytest.mark.parametrize("name", CHECKS)
def test_four_ranks(name: str, outcome: str) -> None:
    assert f"passed  {name}\n" in outcome, outcome
