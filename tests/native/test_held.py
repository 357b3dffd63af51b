"""The order in which the quantiser of current scaling works on the tiles that it holds, for blocks that are threads."""

from __future__ import annotations

import subprocess

import pytest

from tests.native import compiler

RUNS = 100


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_every_tile_is_measured_and_stored_whoever_runs(tmp_path, seed):
    program = compiler.build(tmp_path / "held_check", ["tests/native/held_check.cc"], (*compiler.CHECKS, "-pthread"))
    ran = subprocess.run([str(program), str(seed), str(RUNS)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout == f"{RUNS} runs\n"
