"""AXLearn: the grouped products of `TransformerFeedForwardDropFreeMoE` run `ragged_dot`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from grouped_core.hosts import check_installed
from grouped_core.recipes import Recipe
from jax_grouped._lax import ragged_dot_as_lax
from jax_grouped._replacing import Place, Replacement, check_parameters, choice_of, chosen, replacing, unknown

__all__ = ["register"]

PARAMETERS = ("self", "lhs", "rhs", "tokens_per_expert")
BACKENDS = ("PALLAS", "RAGGED_DOT", "TOKAMAX")
"""The names of `GMMBackend` that are known to compute this product."""


def register(*, recipe: Recipe | None = None) -> Replacement:
    """Makes AXLearn's dropless experts run `jax_grouped.ragged_dot`, in all threads, until `undo`.

    It replaces every `gmm_backend`. The layer's `preferred_element_type` is honoured (default bfloat16); `tiling`,
    `interpret` and `tokamax_implementation` concern the kernels that are replaced.

    Args:
        recipe: formats of the products, one that needs no state.

    Returns:
        A context manager with `undo()` and `replaced`, the names of what is replaced.

    Raises:
        ImportError: AXLearn is not installed.
        NotImplementedError: the layer's function has other parameters; later, its `gmm_backend` is a new one.
        TypeError, ValueError: as `jax_grouped.patch` says of the recipe.
    """
    choice = choice_of(recipe)
    check_installed("axlearn", "docs/hosts_jax.md")
    layer = importlib.import_module("axlearn.common.mixture_of_experts").TransformerFeedForwardDropFreeMoE
    label = "axlearn.common.mixture_of_experts.TransformerFeedForwardDropFreeMoE._padded_gmm"
    # NOTE: this is where the layer chooses its backend; AXLearn has no public name for it.
    check_parameters(label, layer._padded_gmm, PARAMETERS)
    return Replacement("axlearn", choice, [Place(layer, "_padded_gmm", replacing(_padded_gmm), label)])


def _padded_gmm(original: Callable[..., Any]) -> Callable[..., Any]:
    def padded_gmm(
        self: Any, lhs: Float[Array, "M K"], rhs: Float[Array, "G K N"], tokens_per_expert: Int[Array, " G"]
    ) -> jax.Array:
        choice = chosen("axlearn")
        if choice is None:
            return original(self, lhs, rhs, tokens_per_expert)
        backend = self.config.gmm_backend
        if backend is not None and backend.name not in BACKENDS:
            raise unknown(
                "`gmm_backend` of TransformerFeedForwardDropFreeMoE",
                str(backend),
                f"None or one of {', '.join(BACKENDS)}",
                "choose one of them",
            )
        dtype = self.config.preferred_element_type or jnp.bfloat16
        return ragged_dot_as_lax(lhs, rhs, tokens_per_expert, preferred_element_type=dtype, recipe=choice.recipe)

    return padded_gmm
