"""The text of recipes, formats and activations, which graphs hold in place of them."""

from __future__ import annotations

import ast
import copy
import dataclasses
import pickle
from typing import Any

import pytest

from grouped_core.activations import KINDS, Activation
from grouped_core.formats import FORMATS
from grouped_core.recipes import RECIPES, weight_only

CHANGED = (
    RECIPES["NVFP4"].replace(name='a "b" \\ it\'s\n', history=3, margin=-2, requantize="from_dequantized"),
    weight_only("mxfp4").replace(batch_invariant=True, fp32="ieee", saved="input"),
    FORMATS["fp8_tensor"].replace(name="own", eps=1e-12, delayed=False),
    Activation("clamped_qgeglu", limit=3, interleave=2),
    Activation("clamped_qgeglu", limit=None),
)
OBJECTS = (*RECIPES.values(), *FORMATS.values(), *map(Activation, KINDS), *CHANGED)


def fields(value: Any) -> Any:
    """A value as nested tuples of the names of classes and of their fields."""
    if dataclasses.is_dataclass(value):
        return (type(value).__name__, *[fields(getattr(value, each.name)) for each in dataclasses.fields(value)])
    return ("tuple", *map(fields, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize("value", OBJECTS, ids=lambda value: f"{type(value).__name__}-{OBJECTS.index(value)}")
def test_the_text_is_a_literal_of_all_fields(value: Any) -> None:
    assert ast.literal_eval(value.text) == fields(value)
    for same in (copy.deepcopy(value), pickle.loads(pickle.dumps(value)), dataclasses.replace(value)):
        assert same.text == value.text


def test_different_objects_have_different_texts() -> None:
    assert len({each.text for each in OBJECTS}) == len(set(OBJECTS))
