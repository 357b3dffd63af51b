"""docs/all.md lists every public name of the packages, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from grouped_core import recipes
from tests.core.sources import ROOT

MODULES = (
    *("grouped_core", "grouped_core.arrays"),
    *("jax_grouped", "jax_grouped.accumulate", "jax_grouped.checkpoint", "jax_grouped.checkpoint_policies"),
    "jax_grouped.linen",
    *("jax_grouped.nnx", "jax_grouped.parallel", "jax_grouped.route"),
    *(
        "torch_bridge",
        "torch_bridge.checkpoint",
        "torch_bridge.nn",
        "torch_bridge.offload",
        "torch_bridge.parallel",
        "torch_bridge.params",
    ),
    *("torch_bridge.route", "torch_bridge.shards"),
    *(
        f"{package}.integrations.{path.stem}"
        for package in ("jax_grouped", "torch_bridge")
        for path in sorted((ROOT / package / "integrations").glob("[a-z]*.py"))
    ),
)
"""Modules whose names users import. Others of the packages serve these."""
HEADING = re.compile(r"^## (.*)$", re.MULTILINE)
ROW = re.compile(r"^\| `(\w+)` \| (.+) \|$", re.MULTILINE)
WORD = re.compile(r"`([\w.]+)`")


def source(module: str) -> ast.Module:
    path = ROOT / Path(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def public_names(module: str) -> set[str]:
    """`__all__` of a module; without it: functions and classes, names imported as themselves, and lazy modules."""
    found: set[str] = set()
    for node in source(module).body:
        if isinstance(node, ast.Assign) and [ast.unparse(each) for each in node.targets] == ["__all__"]:
            return set(ast.literal_eval(node.value))
        if isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
            lazy = next(each for each in ast.walk(node) if isinstance(each, ast.Tuple))
            found |= set(ast.literal_eval(lazy))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {each.name for each in node.names if each.asname == each.name}
            if [each.name for each in node.names] == ["*"]:
                assert node.module == "grouped_core.recipes"
                found |= set(recipes.__all__)
    return found


def listed() -> dict[str, list[str]]:
    """The names of each module, by docs/all.md."""
    _, *parts = HEADING.split((ROOT / "docs" / "all.md").read_text())
    found: dict[str, list[str]] = {}
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        for module in WORD.findall(heading):
            found.setdefault(module, []).extend(name for name, _ in ROW.findall(text))
    return found


def test_every_module_is_listed() -> None:
    assert set(listed()) == set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_every_name_is_listed(module: str) -> None:
    names = listed()[module]
    assert len(names) == len(set(names)), f"{module}: a name has two lines"
    assert set(names) == public_names(module)


def test_every_row_of_the_page_is_recognised() -> None:
    """The page has no line that the patterns above overlook."""
    lines = (ROOT / "docs" / "all.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("|") and line not in ("| name | what it is |", "| --- | --- |")]
    assert rows
    assert all(ROW.match(row) for row in rows)
