"""MaxText: the three grouped products that its `RoutedMoE` chooses from run `ragged_dot`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from grouped_core.hosts import check_installed
from grouped_core.recipes import Recipe
from jax_grouped._lax import ragged_dot_as_lax, replacing_ragged_dot
from jax_grouped._replacing import (
    Choice,
    Place,
    Replacement,
    View,
    check_parameters,
    choice_of,
    chosen,
    original_of,
    replacing,
    taken,
    unknown,
)

__all__ = ["register"]

HONOURED = ("lhs", "rhs", "group_sizes", "preferred_element_type", "group_offset", "transpose_rhs")
KERNELS = ("tiling", "interpret", "use_tokamax_backend", "use_gmm_v2", "lhs_vma_axes", "rhs_vma_axes")
"""Arguments that concern the kernels that are replaced, and nothing that they compute."""
TOKAMAX = ("lhs", "rhs", "group_sizes", "precision", "preferred_element_type", "group_offset")


def register(*, recipe: Recipe | None = None) -> Replacement:
    """Makes the grouped products of MaxText's `RoutedMoE` run `jax_grouped.ragged_dot`, in all threads, until `undo`.

    `sparse_matmul: true` then runs ours whatever `megablox` and `use_tokamax_gmm` say. Quantisation by MaxText itself,
    gathering of weights inside the product, partial sums and a group offset other than 0 are refused.

    Args:
        recipe: formats of the products, one that needs no state.

    Returns:
        A context manager with `undo()` and `replaced`, the names of what is replaced.

    Raises:
        ImportError: MaxText is not installed.
        NotImplementedError: its functions have other parameters; later, a call has an argument that is refused.
        TypeError, ValueError: as `jax_grouped.patch` says of the recipe.
    """
    choice = choice_of(recipe)
    check_installed("maxtext", "docs/hosts_jax.md")
    moe, megablox = map(importlib.import_module, ("maxtext.layers.moe", "maxtext.kernels.megablox"))
    check_parameters("maxtext.kernels.megablox.gmm", megablox.gmm, HONOURED[:4])
    check_parameters("tokamax.ragged_dot", moe.tokamax.ragged_dot, TOKAMAX)
    places = [
        Place(megablox, "gmm", replacing(_gmm), "maxtext.kernels.megablox.gmm"),
        Place(moe, "jax", _view_of_jax, "jax.lax.ragged_dot in maxtext.layers.moe"),
        Place(moe, "tokamax", _view_of_tokamax, "tokamax.ragged_dot in maxtext.layers.moe"),
    ]
    return Replacement("maxtext", choice, places)


def _gmm(original: Callable[..., Any]) -> Callable[..., Any]:
    def gmm(*args: Any, **kwargs: Any) -> jax.Array:
        choice = chosen("maxtext")
        if choice is None:
            return original(*args, **kwargs)
        what = "maxtext.kernels.megablox.gmm"
        return _product(choice, what, taken(what, original, args, kwargs, honoured=HONOURED, unused=KERNELS))

    return gmm


def _tokamax_ragged_dot(original: Callable[..., Any]) -> Callable[..., Any]:
    def ragged_dot(*args: Any, **kwargs: Any) -> jax.Array:
        choice = chosen("maxtext")
        if choice is None:
            return original(*args, **kwargs)
        given = taken("tokamax.ragged_dot", original, args, kwargs, honoured=TOKAMAX, unused=("implementation",))
        given["group_sizes"] = getattr(given["group_sizes"], "value", given["group_sizes"])
        return _product(choice, "tokamax.ragged_dot", given)

    return ragged_dot


def _product(choice: Choice, what: str, given: dict[str, Any]) -> jax.Array:
    offset = given.pop("group_offset", None)
    if offset is not None and not (isinstance(offset, int) and offset == 0):
        raise unknown(
            f"`group_offset` of {what}",
            type(offset).__name__,
            "None or the number 0",
            "switch the ring of experts off (use_ring_of_experts: false)",
        )
    transposed = given.pop("transpose_rhs", False)
    return ragged_dot_as_lax(**given, rhs_transposed=bool(transposed), recipe=choice.recipe)


def _view_of_jax(module: Any) -> Any:
    return View(module, lax=View(module.lax, ragged_dot=replacing(_lax_ragged_dot)(module.lax.ragged_dot)))


def _lax_ragged_dot(original: Callable[..., Any]) -> Callable[..., Any]:
    ours = replacing_ragged_dot(original, partial(chosen, "maxtext"))

    def ragged_dot(*args: Any, **kwargs: Any) -> jax.Array:
        if chosen("maxtext") is not None and original_of(jax.lax.ragged_dot) is not original_of(original):
            raise unknown(
                "jax.lax.ragged_dot in maxtext.layers.moe",
                f"replaced by {jax.lax.ragged_dot!r} (quantization: ..., use_qwix_quantization: true?)",
                "the function that it was when this was registered",
                "leave quantisation to `recipe`",
            )
        return ours(*args, **kwargs)

    return ragged_dot


def _view_of_tokamax(module: Any) -> Any:
    return View(module, ragged_dot=replacing(_tokamax_ragged_dot)(module.ragged_dot))
