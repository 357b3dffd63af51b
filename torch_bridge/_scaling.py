"""The states and the key that are bound to a recipe, as the rules of one operation read them.

Letters: R roles (x, weight and dy of each product, in this order), G groups, L steps of history.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from grouped_core import scaling
from grouped_core.scaling import ScalingState
from torch_bridge._compiling import is_compiling
from torch_bridge._quantizing import copied
from torch_bridge._tensors import ExtrasLayout, Flat, ProductExtras

X, WEIGHT, _ = range(len(scaling.ROLES))
"""Roles of a product's operands."""


class Scaling(NamedTuple):
    """What is bound to one operation.

    Attributes:
        key: the key of stochastic rounding, or None.
        states: the states of delayed scaling: none, one for all products, or one per product.
        scales: [R, G], the scales that forward and backward share; None: the current ones of the states.
    """

    key: Tensor | None = None
    states: tuple[ScalingState[Tensor], ...] = ()
    scales: Tensor | None = None

    def scale(self, product: int, role: int) -> Tensor | None:
        """Returns the scales [G] of an operand; None without a state."""
        if not self.states:
            return None
        if self.scales is not None:
            return self.scales[row(product, role)]
        state, first = self.state(product)
        return state.scale[first + role]

    def state(self, product: int) -> tuple[ScalingState[Tensor], int]:
        """Returns (the state of a product, the index of the product's first role in that state)."""
        return (self.states[0], row(product, X)) if len(self.states) == 1 else (self.states[product], 0)

    def extras(self, products: int, key: Tensor | None, *, training: bool) -> Flat | None:
        """Returns what rules of the first `products` need to quantise their operands; None if nothing is bound.

        The rules read rows of the states by their offset, because a view of each row would cost a microsecond.

        Args:
            key: the key for backward, which gets it among the saved tensors; None for forward, which rounds to nearest.
            training: whether amax is updated.
        """
        if key is None and not self.states:
            return None
        states = self.states[:products]
        layout = _layout(products, len(states), self.scales is not None, training)
        scales = [self.scales] if self.scales is not None else [state.scale for state in states]
        histories = [state.history for state in states] if training else ()
        return Flat(layout, (key, *scales, *histories))


def row(product: int, role: int) -> int:
    """The row of a role where all products share one array."""
    return product * len(scaling.ROLES) + role


@lru_cache(maxsize=256)
def _layout(products: int, states: int, copied: bool, training: bool) -> ExtrasLayout:
    """Describes which rows of the bound arrays each product reads. `copied`: one array has the scales of all states."""
    scales = 0 if states == 0 else 1 if copied else states
    found, roles = [], range(len(scaling.ROLES))
    for product in range(products):
        state, first = (product, 0) if states > 1 else (0, row(product, X))
        rows = [(0, row(product, role)) if copied else (state, first + role) if states else None for role in roles]
        steps = [(scales + state, first + role) if states and training else None for role in roles]
        found.append(ProductExtras(tuple(rows), tuple(steps)))
    return ExtrasLayout(tuple(found), training or not states, scales, states if training else 0)


def with_copied_scales(bound: Scaling) -> Scaling:
    """Returns `bound` with a copy of the scales of its states, because these may be updated before backward.

    The copy takes one launch, whether products share a state or have one each.
    """
    scales = [state.scale for state in bound.states]
    if is_compiling():
        copy = copied(scales)
    elif len(scales) > 1:
        copy = torch.cat(scales)
    else:  # abs is the fastest kernel that copies, as no scale is negative; a clone would be a memcpy
        copy = scales[0].abs()
    return Scaling(bound.key, bound.states, copy)
