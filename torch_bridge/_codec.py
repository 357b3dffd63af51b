"""Converts user arguments to tuples of tensors, numbers and text, and static facts to text.

Dynamo can trace neither the caches nor the classes of `grouped_core`. Therefore it sees one call, whose arguments
`to_tuples` prepares in steps that every release of Dynamo can trace; inside that call, `from_tuples` reverses them.
Operators carry static facts as text, because torch's compile caches keep them beyond the process.
"""

from __future__ import annotations

import ast
import json
from functools import lru_cache
from typing import Any

from torch import Tensor

from grouped_core.activations import Activation
from grouped_core.calls import ArraySpec, QuantizedSpec
from grouped_core.formats import Format, QTensor
from grouped_core.gradients import Needs
from grouped_core.linear_spec import Linear, Names
from grouped_core.literals import fields_of
from grouped_core.mlp_spec import Mlp, MlpNames, MlpNeeds, MlpSpecs, Residuals
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.scaling import ScalingState
from grouped_core.sizes import GroupSizes
from torch_bridge._compiling import is_compiling
from torch_bridge._tensors import CachedLayout, ExtrasLayout, Form, PairLayout, ProductExtras, StraightThrough

_FIELDS: dict[type[Any], tuple[str, ...]] = {Residuals: ("policy",)}  # its other fields belong to JAX
_KINDS: dict[str, Any] = {"Residuals": Residuals}
_TEXTS = (Activation, Format, Recipe)
"""Classes whose objects become one text with all fields, so that a graph has one constant and one guard per object."""


def register(*kinds: type[Any]) -> None:
    """Adds dataclasses and named tuples to those that are converted, field by field."""
    for kind in kinds:
        fields: Any = getattr(kind, "_fields", None)  # of a named tuple
        _FIELDS[kind] = fields_of(kind) if fields is None else fields
        _KINDS[kind.__name__] = kind


register(
    *(Activation, ArraySpec, BoundRecipe, CachedLayout, ExtrasLayout, Form, Format, GroupSizes, Linear, Mlp, MlpNames),
    *(MlpNeeds, MlpSpecs, Names, Needs, PairLayout, ProductExtras, QTensor, QuantizedSpec, Recipe, ScalingState),
    StraightThrough,
)


def to_tuples(value: Any) -> Any:
    """Converts `value` to nested tuples, each of which starts with the name of its class."""
    if value is None or isinstance(value, Tensor):  # most arguments, and Dynamo interprets every step of this
        return value
    kind = type(value)
    if kind in _TEXTS:
        return ("text", value.text)
    if kind in _FIELDS:
        return (kind.__name__, *[to_tuples(getattr(value, name)) for name in _FIELDS[kind]])
    if isinstance(value, tuple):
        return ("tuple", *[to_tuples(each) for each in value])
    if isinstance(value, list):
        return ("list", *[to_tuples(each) for each in value])
    return constant(value) if kind in (int, float) else value


def constant(number: Any) -> Any:
    """Returns a number, or None, as a constant of a graph of torch.compile; Dynamo may have made it an input."""
    if number is None or not is_compiling():
        return number
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # slow to import, and Dynamo has imported it

    return guard_scalar(number)


def from_tuples(value: Any) -> Any:
    """Returns the value that `to_tuples` converted."""
    if not isinstance(value, (tuple, list)):  # JSON has only lists
        return value
    name, *parts = value
    if name == "text":
        return _from_literal(parts[0])
    parts = [from_tuples(each) for each in parts]
    if name == "list":
        return parts
    return tuple(parts) if name == "tuple" else _KINDS[name](*parts)


@lru_cache(maxsize=4096)
def _from_literal(text: str) -> Any:
    """Returns the object of a class in `_TEXTS` that has this text."""
    return from_tuples(ast.literal_eval(text))


@lru_cache(maxsize=4096)
def to_text(value: Any) -> str:
    """Returns a hashable value as text."""
    return json.dumps(to_tuples(value))


@lru_cache(maxsize=4096)
def from_text(text: str) -> Any:
    """Returns the value that `to_text` encoded."""
    return from_tuples(json.loads(text))
