"""What users pass, as a graph of torch.compile can hold it.

Dynamo follows neither the caches nor the text that operations go through. So it is shown one call, whose arguments are
tensors, numbers and text in lists and tuples: `taken_apart` makes them of what users pass, in steps that every release
of Dynamo follows, and `together` is its inverse, behind that call.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from grouped_core.activations import Activation
from grouped_core.formats import Format, QTensor
from grouped_core.mlp_spec import Residuals
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.scaling import ScalingState
from grouped_core.sizes import GroupSizes
from torch_bridge._stored import StraightThrough

_FIELDS: dict[type[Any], tuple[str, ...]] = {
    kind: tuple(field.name for field in dataclasses.fields(kind))
    for kind in (Activation, BoundRecipe, Format, GroupSizes, QTensor, Recipe, ScalingState, StraightThrough)
} | {Residuals: ("policy",)}  # the rest of it is the JAX face's
_KINDS = {kind.__name__: kind for kind in (*_FIELDS, tuple)}


def taken_apart(value: Any) -> Any:
    """`value` as a graph can hold it: a tuple starts with the name of what it was."""
    if isinstance(value, tuple):
        return ("tuple", *[taken_apart(each) for each in value])
    if isinstance(value, list):
        return [taken_apart(each) for each in value]
    kind = type(value)
    if kind in _FIELDS:
        return (kind.__name__, *[taken_apart(getattr(value, name)) for name in _FIELDS[kind]])
    return _fixed(value) if kind in (int, float) else value


def _fixed(value: float) -> float:
    """A number as part of the graph, where Dynamo may have made an input of it."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # which takes long to import; Dynamo already did

    return guard_scalar(value)


def together(value: Any) -> Any:
    """What `taken_apart` took apart."""
    if isinstance(value, tuple):
        name, *parts = value
        parts = [together(each) for each in parts]
        return tuple(parts) if name == "tuple" else _KINDS[name](*parts)
    return [together(each) for each in value] if isinstance(value, list) else value
