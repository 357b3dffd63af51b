"""What users pass, and static facts, as tuples of tensors, numbers and text; and static facts as text.

Dynamo follows neither the caches nor the classes of `grouped_core`. So it is shown one call, whose arguments
`to_tuples` makes of what users pass, in steps that every release of Dynamo follows; `from_tuples` is its inverse,
behind that call. Operators carry static facts as text, which outlives a process in the compile caches of torch.
"""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache
from typing import Any

from grouped_core.activations import Activation
from grouped_core.calls import ArraySpec, QuantizedSpec
from grouped_core.formats import Format, QTensor
from grouped_core.gradients import Needs
from grouped_core.linear_spec import Linear, Names
from grouped_core.mlp_spec import Mlp, MlpNames, MlpNeeds, MlpSpecs, Residuals
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.scaling import ScalingState
from grouped_core.sizes import GroupSizes
from torch_bridge._tensors import CachedLayout, ExtrasLayout, Form, PairLayout, StraightThrough

_DATACLASSES = (
    *(Activation, BoundRecipe, Format, GroupSizes, Linear, Mlp, QTensor, Recipe, ScalingState, StraightThrough),
)
_TUPLES = (
    ArraySpec,
    CachedLayout,
    ExtrasLayout,
    Form,
    MlpNames,
    MlpNeeds,
    MlpSpecs,
    Names,
    Needs,
    PairLayout,
    QuantizedSpec,
)
_FIELDS: dict[type[Any], tuple[str, ...]] = (
    {kind: tuple(field.name for field in dataclasses.fields(kind)) for kind in _DATACLASSES}
    | {kind: kind._fields for kind in _TUPLES}
    | {Residuals: ("policy",)}  # the rest of it is JAX's
)
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in _FIELDS}


def register(*kinds: type[Any]) -> None:
    """Adds classes of named tuples to those that can be encoded."""
    for kind in kinds:
        _FIELDS[kind] = kind._fields
        _KINDS[kind.__name__] = kind


def to_tuples(value: Any) -> Any:
    """`value` as nested tuples, of which each starts with the name of the class that it stands for."""
    kind = type(value)
    if kind in _FIELDS:
        return (kind.__name__, *[to_tuples(getattr(value, name)) for name in _FIELDS[kind]])
    if isinstance(value, tuple):
        return ("tuple", *[to_tuples(each) for each in value])
    if isinstance(value, list):
        return ("list", *[to_tuples(each) for each in value])
    return _fixed(value) if kind in (int, float) else value


def _fixed(value: float) -> float:
    """A number as part of the graph, where Dynamo may have made an input of it."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # which takes long to import; Dynamo already did

    return guard_scalar(value)


def from_tuples(value: Any) -> Any:
    """What `to_tuples` made tuples of."""
    if not isinstance(value, (tuple, list)):  # JSON has lists alone
        return value
    name, *parts = value
    parts = [from_tuples(each) for each in parts]
    if name == "list":
        return parts
    return tuple(parts) if name == "tuple" else _KINDS[name](*parts)


@lru_cache(maxsize=4096)
def to_text(value: Any) -> str:
    """A hashable value as text."""
    return json.dumps(_static(value))


def _static(value: Any) -> Any:
    kind = type(value)
    if kind in _FIELDS:
        return (kind.__name__, *[_static(getattr(value, name)) for name in _FIELDS[kind]])
    return ("tuple", *[_static(each) for each in value]) if isinstance(value, tuple) else value


@lru_cache(maxsize=4096)
def from_text(text: str) -> Any:
    """The value that `to_text` encoded."""
    return from_tuples(json.loads(text))
