"""FSDP2 and DTensors over two processes on the CPU; what they check is in parallel_checks.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.faces.parallel_checks import CHECKS


@pytest.fixture(scope="module")
def outcome() -> str:
    """What two ranks print: a line for each check, and a failure's traceback behind it."""
    program = [sys.executable, "-W", "ignore", "-m", "tests.faces.parallel_checks"]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=600).stdout


@pytest.mark.rule("DLY-3", "GRP-10", "GRD-6", "LYR-9", "QNT-3")
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.rule("TE #3019", "torchtitan #1166", "MLM #5209", "MLM #6228")
def test_two_ranks(name: str, outcome: str) -> None:
    assert f"passed  {name}\n" in outcome, outcome
