"""Benchmarks of layers run on small problems on the CPU, so that their mistakes are found before a run on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
