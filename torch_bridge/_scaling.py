"""The state and the key that are bound to a recipe, divided among the products of one operation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core import scaling
from grouped_core.quantizing import Extras
from grouped_core.scaling import ScalingState
from torch_bridge._compiling import is_compiling
from torch_bridge._quantizing import copied

X, WEIGHT, DY = range(len(scaling.ROLES))
"""Roles of a product's operands."""


class Scaling(NamedTuple):
    """One product's part of the state and key that are bound to an operation.

    Attributes:
        state: of delayed scaling, or None. first: the role of x in it; those of the weight and dy follow.
        key: of stochastic rounding, or None.
        multipliers: the scales of x, the weight and dy [3, G] that forward and backward share; None: the current ones
            of the state.
    """

    state: ScalingState[Tensor] | None
    key: Tensor | None
    first: int = 0
    multipliers: Tensor | None = None

    def scale(self, role: int) -> Tensor | None:
        """The scales [G] of an operand, None without a state."""
        if self.state is None:
            return None
        return self.state.scale[self.first + role] if self.multipliers is None else self.multipliers[role]

    def amax(self, role: int) -> Tensor | None:
        """The amax [G] of an operand in this step, which quantisers update in place; None without a state."""
        return None if self.state is None else self.state.history[self.first + role, 0]

    def with_key(self, key: Tensor | None) -> Scaling:
        """The same with the key as backward gets it, among the saved tensors."""
        return self if key is self.key else self._replace(key=key)

    def extras(self, *roles: int, training: bool) -> Extras | None:
        """What rules need for the operands `roles`; None if nothing is bound.

        Args:
            training: whether amax is updated.
        """
        if self.state is None:
            return None if self.key is None or DY not in roles else Extras(self.key)
        x, w, dy = (self.scale(role) if role in roles else None for role in (X, WEIGHT, DY))
        amaxes = (self.amax(role) if training and role in roles else None for role in (X, WEIGHT, DY))
        return Extras(self.key if DY in roles else None, x, w, dy, training, *amaxes)

    def mark(self) -> tuple[Any, ...]:
        """Identifies the scales of the state; it differs after each update."""
        scale = None if self.state is None else self.state.scale
        return () if scale is None or scale.is_inference() else (scale.data_ptr(), scale._version)


def with_multipliers(uses: tuple[Scaling, ...]) -> tuple[Scaling, ...]:
    """The products of one operation with a copy of their scales, if they have states, because a state may be updated
    before backward. The copy takes one launch, whether products share a state or have one each.
    """
    if uses[0].state is None:
        return uses
    scales = [use.state.scale for use in uses if use.state is not None and use.first == 0]
    if is_compiling():
        copy = copied(scales)
    elif len(scales) > 1:
        copy = torch.cat(scales)
    else:  # abs is the fastest kernel that copies, as no scale is negative; a clone would be a memcpy
        copy = scales[0].abs()
    parts = [copy] if len(uses) == 1 else copy.split(len(scaling.ROLES))
    return tuple([use._replace(multipliers=part) for use, part in zip(uses, parts, strict=True)])
