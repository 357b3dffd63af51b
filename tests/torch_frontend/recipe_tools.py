"""Helpers for tests of recipes in PyTorch: the recipes, one pass of a layer, and the states of a module."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from grouped_core import recipes
from grouped_core.scaling import ScalingState
from tests import asserts
from tests.quantized import QUANTIZING as RECIPES
from tests.torch_frontend.torch_tools import leaf, manual_seed

WEIGHTS_ALONE = recipes.MXFP8.replace(
    name="weights alone",
    forward=(recipes.BF16.forward[0], recipes.MXFP8.forward[1]),
    dgrad=recipes.BF16.dgrad,
    wgrad=recipes.BF16.wgrad,
)
DELAYED = recipes.FP8Delayed.replace(history=3)
ALL = (*(DELAYED if each.delayed else each for each in RECIPES), WEIGHTS_ALONE)
BF16 = {"dtype": "bfloat16", "case": "jagged"}


def seeded(one: Any, seed: int, **keywords: Any) -> list[Any]:
    """y, dx and, if it goes to autograd, dW of one pass with the random numbers of `seed`."""
    manual_seed(seed)
    x = leaf(one.x)
    y = one.run(x, **keywords)
    for weight in one.weights:
        weight.grad = None
    y.backward(one.dy)
    return [y.detach(), x.grad, *(weight.grad for weight in one.weights)]


def same(found: list[Any], wanted: list[Any], what: str = "") -> None:
    for at, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert (a is None) == (b is None), f"result {at} {what}"
        if b is not None:
            asserts.bitwise(a, b, f"result {at} {what}")


def state_of(layer: Any) -> ScalingState[Tensor]:
    """The state of a layer with delayed scaling."""
    state = layer.scaling_state
    assert state is not None
    return state


def states(module: Any) -> list[Any]:
    """The states of delayed scaling in a module, first layer first."""
    found = [getattr(each, "scaling_state", None) for each in module.modules()]
    return [each for each in found if each is not None]
