"""Checks and casts that the layers apply before they compute."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from grouped_core.formats import WIDE
from grouped_core.linear_spec import wrong_width
from grouped_core.recipes import Recipe
from torch_bridge import _autocast
from torch_bridge._tensors import DTYPES, TORCH_DTYPES


def positive(layer: str, **sizes: Any) -> tuple[int, ...]:
    """Returns the sizes as integers. Raises TypeError for other types, ValueError below 1."""
    found = []
    for name, size in sizes.items():
        try:
            found.append(operator.index(size))
        except TypeError:
            raise TypeError(
                f"`{name}` of {layer}: {size!r}, expected an integer; give the size of that axis."
            ) from None
        if found[-1] < 1:
            raise ValueError(f"`{name}` of {layer}: {size}, expected 1 or more; give the size of that axis.")
    return tuple(found)


def parameter_dtype(layer: str, dtype: Any) -> torch.dtype:
    """Returns the dtype of a layer's parameters; None: the default. Raises TypeError for one without kernels."""
    found = torch.get_default_dtype() if dtype is None else dtype
    if DTYPES.get(found) not in WIDE:
        raise TypeError(
            f"`dtype` of {layer}: {found}, expected one of {', '.join(str(TORCH_DTYPES[w]) for w in WIDE)}; choose "
            "one of them."
        )
    return found


def check_recipe(name: str, recipe: Any) -> None:
    """Refuses anything but an unbound recipe or None. Raises TypeError. `name`: the layer or function, for messages."""
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(
            f"`recipe` of {name}: {type(recipe).__name__}, expected a Recipe or None; the layer binds it to its own "
            "state and keys, so pass the recipe itself."
        )


def check_width(layer: str, x: Any, linear: Any, option: str, weight: str) -> None:
    """Refuses rows of another width than that of a layer.

    Args:
        linear: the `GroupedLinear` that multiplies them. option: the layer's option for their width. weight: the name
            of its weight in the layer.

    Raises:
        ValueError: they have another width.
    """
    shape, width = getattr(x, "shape", ()), linear.in_features
    if len(shape) == 2 and shape[1] != width:
        raise wrong_width(layer, shape, width, option, weight, (linear.num_groups, linear.out_features, width))


def compute_dtype(x: Any, parameters: torch.dtype) -> torch.dtype:
    """Returns the dtype in which a layer computes: autocast's if it is on, otherwise that of its parameters."""
    return _autocast.dtype_of(x) or parameters


def cast_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts rows to the dtype of the computation; 8-bit rows are unchanged, and other types are refused later."""
    if not isinstance(x, Tensor) or x.dtype == dtype:
        return x
    if _autocast.dtype_of(x) is not None:
        return _autocast.cast(x, dtype)
    return x.to(dtype) if DTYPES.get(x.dtype) in (*WIDE, "float64") else x


def check_microbatch(value: Any) -> None:
    """Refuses anything but a bool or None."""
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"`is_first_microbatch`: {value!r}, expected None, True or False; pass one of them.")
