"""Each rule of docs/contracts.md, and each failure that it lists, has a test that bears its name.

Marks are read from the text of the tests, so that nothing is imported and every test counts wherever it runs.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.core.sources import ROOT, name_of, python_files

CONTRACTS = ROOT / "docs" / "contracts.md"

LATER = {
    "TE #3143": "a matter of speed, which benchmarks measure",
}
"""Rules and failures of parts that are built later, and why they have no row in the document yet."""

RULE = re.compile(r"\b([A-Z]{3})-(\d+)(?: to (?:\1-)?(\d+))?")
FAILURE = re.compile(r"(?:([A-Za-z][\w-]*) )?#(\d+)")
MARK = re.compile(r"\bmark\.rule\(([^)]*)\)")


def rules_in(text: str) -> list[str]:
    """Ids of rules, ranges written out."""
    return [
        f"{family}-{number}"
        for family, first, last in RULE.findall(text)
        for number in range(int(first), int(last or first) + 1)
    ]


def failures_in(text: str) -> list[str]:
    """Numbers with their project, which precedes the first of several."""
    found, project = [], ""
    for named, number in FAILURE.findall(text):
        project = named or project
        found.append(f"{project} #{number}")
    return found


def rows() -> dict[str, list[str]]:
    """Of each rule and each failure of the document, the marks of which one is enough."""
    found: dict[str, list[str]] = {}
    for line in CONTRACTS.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < 4 or cells[0]:
            continue
        names = failures_in(cells[1]) or rules_in(cells[1])
        instead = rules_in(" ".join(re.findall(r"\(([A-Z, 0-9-]+)\)", cells[2]))) if "#" in cells[1] else []
        for name in names:
            found[name] = [name, *instead]
    return found


def marks() -> dict[str, list[Path]]:
    """What the tests are marked with, and the files where."""
    found: dict[str, list[Path]] = {}
    for path in python_files("tests"):
        for arguments in MARK.findall(path.read_text()):
            for name in re.findall(r'"([^"]+)"', arguments):
                found.setdefault(name, []).append(path)
    return found


ROWS, MARKS = rows(), marks()


def test_the_search_reads_ranges_and_lists():
    assert rules_in("MLP-3 to MLP-5") == ["MLP-3", "MLP-4", "MLP-5"]
    assert rules_in("ACC-6, DLY-3") == ["ACC-6", "DLY-3"]
    assert failures_in("TE #3019, #1345, pytorch #172439") == ["TE #3019", "TE #1345", "pytorch #172439"]
    assert ROWS["MLM #4621"] == ["MLM #4621", "QNT-3"]
    assert len(ROWS) > 130
    assert len(MARKS) > 130


@pytest.mark.parametrize("name", ROWS)
def test_it_has_a_test(name):
    assert any(each in MARKS for each in ROWS[name]), (
        f"{name} of {name_of(CONTRACTS)} is held by no test; mark one with one of {ROWS[name]}, or write it"
    )


@pytest.mark.parametrize("name", MARKS)
def test_what_a_test_is_marked_with_exists(name):
    assert name in ROWS.keys() | LATER.keys(), (
        f"{name_of(MARKS[name][0])} names {name}, expected a row of {name_of(CONTRACTS)}; correct the mark, or add it"
    )


def test_parts_that_are_not_built_have_no_row():
    assert not LATER.keys() & ROWS.keys(), "a part was built: take its rows out of LATER"


def test_no_rule_is_left_out():
    """The numbers of a family are those from 1 on."""
    known = [each.split("-") for each in (*ROWS, *LATER) if "#" not in each]
    for family in {family for family, _ in known}:
        numbers = sorted(int(number) for one, number in known if one == family)
        assert numbers == list(range(1, len(numbers) + 1)), f"{family}: {numbers}"
