"""Benchmarks of layers run on small problems on the CPU, so that their mistakes are found before a run on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT


def test_a_step_in_several_microbatches(tmp_path: Path) -> None:
    results = tmp_path / "step.json"
    command = [sys.executable, "benchmarks/bench_step.py", "--device", "cpu", "--cases", "jagged", "tail"]
    command += ["--microbatches", "2", "--budget", "0.02", "--json", str(results)]
    candidates = ["FP8Delayed", "FP8Delayed, each", "FP8Block, primary"]
    done = subprocess.run(
        [*command, "--candidates", *candidates], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(results.read_text())["rows"]
    wanted = [
        (case, destination, candidate)
        for case in ("jagged", "tail")
        for destination in ("main_grad", ".grad")
        for candidate in ("bf16", *candidates)
    ]
    assert sorted((each["case"], each["product"], each["candidate"]) for each in rows) == sorted(wanted)
    assert all(each["timing"]["median_us"] > 0 and each["share"] > 0 for each in rows)
