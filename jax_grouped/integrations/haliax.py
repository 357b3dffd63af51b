"""Haliax: `haliax.nn.ragged_dot(implementation="auto" or "jax_grouped")` and `MoELinear` run `ragged_dot`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from grouped_core.hosts import check_installed
from grouped_core.recipes import Recipe
from jax_grouped._lax import ragged_dot_as_lax, replacing_ragged_dot_general
from jax_grouped._replacing import (
    Place,
    Replacement,
    View,
    check_parameters,
    choice_of,
    chosen,
    loaded,
    original_of,
    references,
    replacing,
    taken,
)

__all__ = ["register"]

PARAMETERS = ("lhs_", "rhs_", "group_sizes_", "ar", "implementation")
OURS = ("auto", "jax_grouped")
"""Values of `implementation` that run ours; Haliax runs all others."""


def register(*, recipe: Recipe | None = None) -> Replacement:
    """Makes the grouped products of Haliax run `jax_grouped.ragged_dot`, in all threads, until `undo`.

    `haliax.nn.ragged_dot` is replaced wherever modules of Haliax hold it, and `jax.lax.ragged_dot_general` as
    `MoELinear` sees it. If it is registered several times, the last call counts.

    Args:
        recipe: formats of the products, one that needs no state.

    Returns:
        A context manager with `undo()` and `replaced`, the names of what is replaced.

    Raises:
        ImportError: Haliax is not installed, or not a release that has `ragged_dot`.
        NotImplementedError: its `ragged_dot` has other parameters.
        TypeError, ValueError: as `jax_grouped.patch` says of the recipe.
    """
    return registered("haliax", recipe=recipe)


def registered(*packages: str, recipe: Recipe | None) -> Replacement:
    """`register` for the modules of several packages that hold Haliax's function."""
    choice = choice_of(recipe)
    check_installed("haliax", "docs/hosts_jax.md")
    function = _host().ragged_dot
    check_parameters("haliax.nn.ragged_dot", original_of(function), PARAMETERS)
    linear = importlib.import_module("haliax.nn.linear")
    modules = [module for package in packages for module in loaded(package)]
    places = [
        Place(module, name, replacing(_replacing), f"{module.__name__}.{name}")
        for module, name in references(function, modules)
    ]
    places.append(Place(linear, "jax", _view, f"jax.lax.ragged_dot_general in {linear.__name__}"))
    return Replacement("haliax", choice, places)


def _host() -> Any:
    try:
        return importlib.import_module("haliax.nn.ragged_dot")
    except ModuleNotFoundError as error:
        if error.name != "haliax.nn.ragged_dot":
            raise
        version = getattr(importlib.import_module("haliax"), "__version__", "")
        raise ImportError(
            f"haliax.nn.ragged_dot: not in haliax {version}, expected a release that has it; "
            "install marin-haliax, which docs/hosts_jax.md lists."
        ) from error


def _replacing(original: Callable[..., Any]) -> Callable[..., Any]:
    model_axis = importlib.import_module("haliax.partitioning").ResourceAxis.MODEL

    def replacement(*args: Any, **kwargs: Any) -> jax.Array:
        choice = chosen("haliax")
        if choice is None:
            return original(*args, **kwargs)
        given = taken("haliax.nn.ragged_dot", original, args, kwargs, honoured=PARAMETERS)
        if given["implementation"] not in OURS:
            return original(*args, **kwargs)
        y = ragged_dot_as_lax(given["lhs_"], given["rhs_"], given["group_sizes_"], recipe=choice.recipe)
        return jax.lax.psum(y, model_axis) if given["ar"] else y

    return replacement


def _view(module: Any) -> Any:
    general = replacing(partial(replacing_ragged_dot_general, chosen=partial(chosen, "haliax")))
    return View(module, lax=View(module.lax, ragged_dot_general=general(module.lax.ragged_dot_general)))
