"""Expected weight gradients, computed in ways that other tests check."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tests.torch_frontend.nn_tools import FUNCTIONS, LINEAR, setup
from tests.torch_frontend.torch_tools import leaf
from torch_bridge import grouped_linear, grouped_mlp

# ---------------------------------------------------------------------------------------------------------------------
# Modules


def gradients(form: str, listed: bool) -> list[Tensor]:
    """dW as autograd receives it."""
    return _gradients_on(form, listed, str(torch.get_default_device()))


@lru_cache(maxsize=64)
def _gradients_on(form: str, listed: bool, _device: str) -> list[Tensor]:
    plain = setup(form, listed)
    plain.backward()
    return [each.grad for each in plain.weights]


def accumulated(form: str, listed: bool) -> list[Tensor]:
    """0.5 + dW as the functions add it to a tensor, which other tests compare with the oracle."""
    return _sums_on(form, listed, str(torch.get_default_device()))


@lru_cache(maxsize=64)
def _sums_on(form: str, listed: bool, _device: str) -> list[Tensor]:
    function = FUNCTIONS[0] if form in LINEAR else FUNCTIONS[1]
    s = setup(function, listed)
    sums = [torch.full_like(each, 0.5) for each in s.weights]

    def parts(members: list[Any]) -> Any:
        """For each product its tensor or list."""
        if not listed:
            return members
        return [members] if form in LINEAR else [members[: len(members) // 2], members[len(members) // 2 :]]

    into = parts(sums)
    if form in LINEAR:
        y = grouped_linear(leaf(s.x), parts(s.weights)[0], s.sizes, wgrad_accum=into[0])
    else:
        wi, wo = parts(s.weights)
        y = grouped_mlp(leaf(s.x), wi, wo, s.sizes, probs=s.probs, wgrad_accum=tuple(into))
    y.backward(s.dy)
    return sums


# ---------------------------------------------------------------------------------------------------------------------
# One weight of the function


def members_of(packed: Tensor, listed: bool) -> list[Any]:
    """The weight as one Parameter, or one for each group."""
    return [Parameter(each.clone()) for each in (packed if listed else [packed])]


def as_argument(parameters: list[Any], listed: bool) -> Any:
    """The weight in the form that the function takes."""
    return parameters if listed else parameters[0]


def plain_gradient(t: Any) -> Tensor:
    """dW as it is added to `.grad`."""
    w = leaf(t.w)
    grouped_linear(t.x, w, t.sizes).backward(t.dy)
    return w.grad


def stacked(members: list[Tensor], listed: bool) -> Tensor:
    """All groups as one tensor."""
    return torch.stack(members) if listed else members[0]
