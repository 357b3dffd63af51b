"""The lines that the README gives for each host run, each where its host is installed; its plot and command too."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.hosts import models
from tests.program_tools import run_program

pytestmark = pytest.mark.filterwarnings("ignore")  # the hosts' own

TITLE = "## Where your model lives\n"
HOSTS = {
    "Hugging Face transformers": "transformers",
    "torchtitan": "torchtitan",
    "Megatron-core": "megatron.core",
    "NeMo Automodel": "nemo_automodel",
    "Haliax": "haliax.nn.ragged_dot",
    "Levanter": "levanter.grug.grug_moe",
}
"""Packages that a row needs."""


def rows() -> dict[str, list[str]]:
    """The code that each row of the table says to write."""
    _, text = (ROOT / "README.md").read_text().split(TITLE)
    lines = [line for line in text.split("\n## ")[0].splitlines() if line.startswith("| [")]
    cells = [line.split(" | ") for line in lines]
    return {re.sub(r"[\[`]|\]\(.*?\)", "", cell[0].strip("| ")): re.findall(r"`(.+?)`", cell[1]) for cell in cells}


ROWS = rows()


def run(code: str, names: dict[str, Any]) -> Any:
    """Runs the statements; returns the value of the last one, if it is an expression."""
    *body, last = ast.parse(code).body
    if not isinstance(last, ast.Expr):
        body, last = [*body, last], None
    exec(compile(ast.Module(body, []), "README.md", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "README.md", "eval"), names)


def test_every_host_has_a_row() -> None:
    assert len(ROWS) == 9
    assert set(HOSTS) < set(ROWS)
    assert all(ROWS.values())


@pytest.mark.parametrize("row", ROWS)
def test_its_line_runs(row: str, request: pytest.FixtureRequest) -> None:
    if row in HOSTS:
        pytest.importorskip(HOSTS[row].split(".")[0], reason=f"{row} is not installed (make test-hosts)")
        pytest.importorskip(HOSTS[row], reason=f"this {row} has no {HOSTS[row]}")
    names: dict[str, Any] = {"jax_grouped": __import__("jax_grouped")}
    if row == "Hugging Face transformers":
        request.getfixturevalue("transformers")
        names["model"] = models.model("Olmoe")
    first, *others = ROWS[row]
    held = run(first, names)
    try:
        assert "register" not in first or held.replaced
        for code in others:
            run(code, names)
        if row == "Hugging Face transformers":
            assert names["model"].config._experts_implementation == "jax_grouped"
    finally:
        if held is not None:
            held.undo()


def test_the_commands_of_the_plot_run(tmp_path: Path, transformers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small sizes on the CPU: the options exist, and the picture is made of what the benchmark writes."""
    from torch_bridge.integrations import transformers as adapter

    commands = re.findall(
        r"^python ((?:benchmarks/bench|-m benchmarks)(?:.*\\\n)*.*)$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert len(commands) == 2
    small = ("--device", "cpu", "--tiny", "--budget", "0.02")
    try:
        for command, options in zip(commands, (small, ()), strict=True):
            words = shlex.split(command.replace("\\\n", " "))
            words = [str(tmp_path / each) if each in ("olmoe.json", "olmoe_step.png") else each for each in words]
            run_program([*words, *options], monkeypatch)
    finally:
        for each in list(adapter._ACTIVE):  # a program ends with what it has registered
            each.undo()
    written = json.loads((tmp_path / "olmoe.json").read_text())["lines"]
    assert [each["candidate"] for each in written if each["timing"] is None] == []
    drawn = json.loads((ROOT / "benchmarks" / "olmoe_step.json").read_text())["lines"]
    assert [(each["candidate"], each.keys()) for each in written] == [
        (each["candidate"], each.keys()) for each in drawn
    ]
    assert (tmp_path / "olmoe_step.png").read_bytes().startswith(b"\x89PNG")


def test_the_plot_is_that_of_its_numbers() -> None:
    """The README and the results say what the file of the picture says."""
    lines = json.loads((ROOT / "benchmarks" / "olmoe_step.json").read_text())["lines"]
    first, *others = (each["timing"]["median_us"] / 1e3 for each in lines)
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    for each, ms in zip(lines, (first, *others), strict=True):
        assert f"| {ms:.1f} | " in results
        assert f" | {each['peak_gib']:.1f} | " in results
    readme = (ROOT / "README.md").read_text()
    assert all(f"{first / ms:.2f} times" in readme for ms in (others[0], min(others)))
