"""Levanter: the experts of its models run `ragged_dot`, through Haliax."""

from __future__ import annotations

import importlib

from grouped_core.hosts import check_installed
from grouped_core.recipes import Recipe
from jax_grouped._replacing import Replacement
from jax_grouped.integrations.haliax import registered

__all__ = ["register"]


def register(*, recipe: Recipe | None = None) -> Replacement:
    """Makes the grouped products of Levanter and Haliax run `jax_grouped.ragged_dot`, in all threads, until `undo`.

    As `integrations.haliax.register`, and in the modules of Levanter that hold Haliax's function: the expert-parallel
    and local paths of `levanter.grug`, Mixtral and Qwen3-MoE. Its paths on other kernels (`sonic_cute`) stay.

    Args:
        recipe: formats of the products, one that needs no state.

    Returns:
        A context manager with `undo()` and `replaced`, the names of what is replaced.

    Raises:
        ImportError: Levanter is not installed, or its Haliax has no `ragged_dot`.
        NotImplementedError: the `ragged_dot` of Haliax has other parameters.
        TypeError, ValueError: as `jax_grouped.patch` says of the recipe.
    """
    check_installed("levanter", "docs/hosts_jax.md")
    importlib.import_module("levanter")
    return registered("haliax", "levanter", recipe=recipe)
