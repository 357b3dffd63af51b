"""Benchmarks of layers run on small problems on the CPU, so that their mistakes are found before a run on a GPU."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from benchmarks import harness
from tests.program_tools import run_program


@pytest.mark.filterwarnings("ignore")  # as where the program runs by itself
def test_a_step_in_several_microbatches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "step.json"
    command = ["benchmarks/bench_step.py", "--device", "cpu", "--cases", "jagged", "tail"]
    command += ["--microbatches", "2", "--budget", "0.02", "--json", str(results)]
    candidates = ["FP8Delayed", "FP8Delayed, each", "FP8Block, primary"]
    run_program([*command, "--candidates", *candidates], monkeypatch)
    rows = json.loads(results.read_text())["rows"]
    wanted = [
        (case, destination, candidate)
        for case in ("jagged", "tail")
        for destination in ("main_grad", ".grad")
        for candidate in ("bf16", *candidates)
    ]
    assert sorted((each["case"], each["product"], each["candidate"]) for each in rows) == sorted(wanted)
    assert all(each["timing"]["median_us"] > 0 and each["share"] > 0 for each in rows)


def test_long_runs_report_power_and_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of each candidate's own runs; lines without numbers are passed by."""
    program = tmp_path / "nvidia-smi"
    state = tmp_path / "state"
    state.write_text("0, 0")
    program.write_text(f"#!/bin/sh\nwhile sleep 0.01; do cat {state}; echo; echo '[N/A], 1400'; done\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def candidate(reading: str) -> harness.Thunk:
        return lambda _: state.write_text(reading)

    def clock(thunk: harness.Thunk, index: int, sets: int) -> float:
        thunk(index % sets)
        time.sleep(0.3)
        return 5.0

    thunks = {"slow": candidate("500.5, 1400"), "fast": candidate("700.0, 1300")}
    found = harness.measure(thunks, clock=clock, rounds=2, warmup=1, sensors=True)
    assert {name: (timing.watts, timing.mhz) for name, timing in found.items()} == {
        "slow": (500.5, 1400.0),
        "fast": (700.0, 1300.0),
    }
    row = harness.Row("A", "forward", "bfloat16", "ours", found["slow"], 1.0, 1.0, "dense", None)
    assert "W   MHz" in harness.table([row])
    assert harness.table([row]).endswith("500  1400")
