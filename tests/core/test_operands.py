"""Tuples of operands in `torch_bridge`: their elements have the names of the class in whose order they are."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.core.sources import name_of, python_files

ORDER = re.compile(r"[Ii]n the order of (\w+Operands)(?:, from (\w+) on)?\b")
FILES = [path for path in python_files("torch_bridge") if "call_prepared(" in path.read_text()]


def classes_of(tree: ast.Module) -> dict[str, list[str]]:
    """The fields of each class of operands that a file defines."""
    found = {}
    for node in tree.body:
        match node:
            case ast.Assign(value=ast.Call(func=ast.Name(id="namedtuple"), args=[name, fields])):
                found[ast.literal_eval(name)] = ast.literal_eval(fields).split()
    return found


def tuples_of(text: str, tree: ast.Module) -> list[tuple[int, str, str | None, list[ast.expr]]]:
    """(line, class, first field or None, elements) for each tuple with a comment that names its class."""
    assigned = {node.lineno: node for node in ast.walk(tree) if isinstance(node, ast.Assign)}
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or not (match := ORDER.search(token.string)):
            continue
        line = token.start[0] + (not token.line[: token.start[1]].strip())  # a comment by itself is above its tuple
        value = assigned[line].value
        value = value.elts[0] if isinstance(value, ast.List) else value
        assert isinstance(value, ast.Tuple)
        found.append((line, match[1], match[2], value.elts))
    return found


def field_of(element: ast.expr) -> str | None:
    """The field that an element is for, by its name; None for a starred one, which is several."""
    match element:
        case ast.Starred():
            return None
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    raise AssertionError(f"an operand without a name: {ast.unparse(element)}")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_operands_have_the_names_of_their_class(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    classes = classes_of(tree)
    for line, name, first, elements in tuples_of(text, tree):
        fields = classes[name][classes[name].index(first) if first else 0 :]
        names = [field_of(each) for each in elements]
        if None not in names:
            assert names == fields, f"line {line}, {name}"
            continue
        before, after = names[: names.index(None)], names[len(names) - names[::-1].index(None) :]
        assert fields[: len(before)] == before, f"line {line}, {name}"
        assert not after or fields[-len(after) :] == after, f"line {line}, {name}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_tuple_names_its_class(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    named = {line for line, *_ in tuples_of(text, tree)}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id="operands" | "at_hidden" | "first")], value=ast.Tuple() | ast.List()):
                assert node.lineno in named, f"line {node.lineno}: no comment names the class of these operands"
            case ast.Call(func=ast.Name(id="call_prepared"), args=[_, operands, _]):
                assert isinstance(operands, ast.Name), f"line {node.lineno}: operands without a comment of their own"
                assert operands.id in ("operands", "at_hidden"), operands.id
