"""Quantised weights that layers keep between forward passes (`nn/_cache.py`), as operands of the operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from grouped_core import quantizing
from grouped_core.formats import Format, QTensor
from grouped_core.products import Cached
from grouped_core.recipes import Recipe
from torch_bridge._scaling import WEIGHT, Scaling
from torch_bridge._tensors import TORCH_DTYPES


class WeightForms(Protocol):
    """The cache of a layer, which keeps the quantised weight between forward passes."""

    def __call__(
        self,
        weight: Tensor | list[Tensor],
        wanted: tuple[tuple[int, Format], ...],
        scale: Tensor | None,
        amax: Tensor | None,
        scale_mark: tuple[Any, ...],
    ) -> Sequence[QTensor[Tensor]]:
        """Returns the weight quantised for each axis and format; delayed scaling merges its amax into `amax`.

        Args:
            scale: [G], scales of delayed scaling. scale_mark: identifies the scales; it differs after each update.
        """
        ...


def with_forms(
    cache: WeightForms | None,
    weight: Any,
    wanted: tuple[tuple[int, Format], ...],
    scaling: Scaling,
    product: int,
    *,
    training: bool,
) -> Any:
    """Returns a weight together with the requested quantised forms that its layer keeps, if it keeps any.

    A pass that reads no form updates those that others will read, where it is one that updates.
    """
    if cache is None or isinstance(weight, QTensor):
        return weight
    amax, mark = None, ()
    if scaling.states:
        state, first = scaling.state(product)
        amax = state.history[first + WEIGHT, 0] if training else None
        mark = () if state.scale.is_inference() else (state.scale.data_ptr(), state.scale._version)
    forms = cache(weight, wanted, scaling.scale(product, WEIGHT), amax, mark)
    return Cached(weight, quantizing.joined(list(forms))) if forms else weight


def read_by_dgrad(weight: Any, recipe: Recipe | None) -> Any:
    """Returns a weight as forward saved it; a list in the dtype of a plain format that dgrad reads.

    Rules round other weights themselves. A list they reach through a table of addresses, and cannot cast.
    """
    if type(weight) is not list or recipe is None or not recipe.dgrad[1].plain:
        return weight
    dtype = TORCH_DTYPES[recipe.dgrad[1].values]
    return weight if weight[0].dtype == dtype else [each.to(dtype) for each in weight]
