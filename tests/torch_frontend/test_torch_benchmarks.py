"""Benchmarks of layers run on small problems on the CPU, so that their mistakes are found before a run on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import bounds
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


@pytest.mark.filterwarnings("ignore")
def test_every_candidate_of_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU each candidate is measured or says why not; ours, of both frameworks, always take part."""
    results = tmp_path / "products.json"
    command = ["benchmarks/bench_grouped_matmul.py", "--device", "cpu", "--cases", "jagged", "--dtypes", "bfloat16"]
    run_program([*command, "--budget", "0.02", "--json", str(results)], monkeypatch)
    rows = json.loads(results.read_text())["rows"]
    assert {each["product"] for each in rows} == {"forward", "dgrad", "wgrad"}
    assert all(each["skipped"] if each["timing"] is None else each["timing"]["median_us"] > 0 for each in rows)
    timed = {each["candidate"] for each in rows if each["timing"] is not None}
    assert timed >= {"dense", "ours, torch, [G,N,K]", "ours, torch, fp32 +=", "ours, jax, [G,N,K]"}
    assert all(each["error"] < bounds.ROUNDED_ONCE for each in rows if each["error"] is not None)


@pytest.mark.filterwarnings("ignore")
def test_every_form_of_quantisers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, weights, lists of weights and gathered rows are quantised and dequantised."""
    results = tmp_path / "quantize.json"
    command = ["benchmarks/bench_quantize.py", "--device", "cpu", "--cases", "jagged", "--rounds", "1"]
    command += ["--formats", "fp8_1x128", "mxfp8", "--weights", "--lists", "3", "--gathered", "2"]
    run_program([*command, "--budget", "0.02", "--json", str(results)], monkeypatch)
    rows = json.loads(results.read_text())["rows"]
    labels = [each["candidate"] for each in rows]
    for wanted in ("mxfp8, rows", "mxfp8, cross, back", "W mxfp8", "listed mxfp8", "gathered"):
        assert any(wanted in label for label in labels), (wanted, labels)
    assert all(each["timing"]["median_us"] > 0 for each in rows)


@pytest.mark.filterwarnings("ignore")
def test_pairs_with_other_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pairs that run on the CPU have a line for each product; candidates that do not are named with the reason."""
    results = tmp_path / "peers.json"
    command = ["benchmarks/bench_peers.py", "--device", "cpu", "--parts", "bf16", "mlp", "--cases", "jagged"]
    run_program([*command, "--budget", "0.02", "--json", str(results)], monkeypatch)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    of_recipes = [words for words in lines if words[:1] == ["jagged"] and "FP8Block" in words]
    assert [words[1] for words in of_recipes] == ["forward", "forward+backward"]
    left_out = [" ".join(words) for words in lines if words[:2] == ["left", "out"]]
    assert any(text.startswith("left out torch grouped_mm, forward+backward of jagged: ") for text in left_out)
    saved = json.loads(results.read_text())
    assert saved["protocols"] == ["in turns"] * len(saved["rows"])
