"""Layers with quantised primary weights, and their codes as bytes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from grouped_core import recipes
from grouped_core.formats import FORMATS
from grouped_core.recipes import Recipe
from tests import asserts
from tests.torch_frontend.nn_tools import MODULES
from tests.torch_frontend.recipe_tools import ALL
from torch_bridge import nn
from torch_bridge.quantized_weight import QuantizedWeight
from torch_bridge.quantized_weight import named_parts as parts_of

FOUR_BITS = Recipe(
    name="weights in 4 bits",
    forward=(FORMATS["bf16"], FORMATS["mxfp4"]),
    dgrad=(FORMATS["bf16"], FORMATS["mxfp4"]),
    wgrad=recipes.BF16.wgrad,
)
ONE_FORM = recipes.FP8Current.replace(name="one form", saved_weights="forward")
HELD = (*(each for each in ALL if not each.dgrad[1].plain), FOUR_BITS, ONE_FORM)
SIZES = torch.tensor([5, 0, 6], dtype=torch.int32)

by_recipe = pytest.mark.parametrize("recipe", HELD, ids=lambda r: r.name)
by_form = pytest.mark.parametrize("form", MODULES)
by_holding = pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])


def layer(recipe: Recipe, listed: bool = False, **options: Any) -> nn.GroupedLinear:
    """Three experts [70, 48]: no block, and no byte of two codes, divides the axes of the flat weight evenly."""
    options = {"bias": False, "quantized_weights": True, "dtype": torch.bfloat16, **options}
    return nn.GroupedLinear(3, 48, 70, recipe=recipe, single_grouped_weight=not listed, **options)


def raw(module: Any) -> dict[str, Tensor]:
    """Every code and scale of a module, as bytes."""
    return {
        f"{name}.{part}": tensor.clone().view(torch.uint8)
        for name, weight in module.named_parameters()
        if isinstance(weight, QuantizedWeight)
        for part, tensor in parts_of(weight.q).items()
    }


def same_codes(a: Any, b: Any) -> None:
    found, wanted = raw(a), raw(b)
    assert found.keys() == wanted.keys()
    assert found
    for name in wanted:
        asserts.bitwise(found[name], wanted[name], name)


def copies(module: Any) -> list[Any]:
    return [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]


def addresses(module: Any) -> list[int]:
    return [part.data_ptr() for weight in module.parameters() for part in parts_of(weight.q).values()]
