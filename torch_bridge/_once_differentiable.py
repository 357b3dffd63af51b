"""Gives gradients a history that refuses to be differentiated, for operations without a second derivative."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def once_differentiable(
    name: str, found: Sequence[Tensor | None], sources: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Returns gradients with a history that refuses to be differentiated.

    Args:
        name: the operation's name in the message. sources: the tensors from which the gradients were computed.
    """
    apart = (None if each is None else each.detach().requires_grad_() for each in found)  # always a history
    return _OnceDifferentiable.apply(name, len(found), *apart, *sources)


class _OnceDifferentiable(torch.autograd.Function):
    """Passes gradients through and refuses to differentiate them."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """`tensors`: `count` gradients, then the tensors from which they were computed."""
        ctx.name = name
        return tuple(None if each is None else each.view_as(each) for each in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            f"{ctx.name}: differentiated twice, expected once; its gradients have no derivative of their own, "
            "compose it of differentiable torch operations where second derivatives are needed."
        )
