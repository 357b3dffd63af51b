"""Options that all adapters take, and the arguments that they give to `torch_bridge.grouped_mlp`."""

from __future__ import annotations

from typing import Any, NamedTuple

from grouped_core.mlp_spec import Residuals, residuals_option
from grouped_core.recipes import Recipe
from torch_bridge._checks import is_distributed
from torch_bridge.nn._checks import check_recipe


class Options(NamedTuple):
    """Formats of the products, and what is kept for backward; as in `grouped_mlp`."""

    recipe: Recipe | None
    residuals: Residuals

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of `grouped_mlp` and `routed_mlp`."""
        return self._asdict()


def options_of(host: str, recipe: Recipe | None, residuals: str | Residuals) -> Options:
    """Checked options of an adapter that calls functions, which have no buffers for a state.

    Raises:
        TypeError, ValueError: an option has an invalid value.
        NotImplementedError: the recipe needs a state, or a key for each pass.
    """
    check_recipe(f"the adapter for {host}", recipe)
    if recipe is not None and recipe.takes_arrays:
        needs = "a state of delayed scaling" if recipe.delayed else "a random key in each pass"
        raise NotImplementedError(
            f"`recipe` of the adapter for {host}: {recipe.name}, which needs {needs}, expected a recipe without one, "
            "because the modules of this host have no place for it; choose FP8Current, FP8Block or MXFP8."
        )
    return Options(recipe, residuals_option(residuals))


def local(tensor: Any) -> Any:
    """The part of a DTensor that this rank holds, differentiable; any other tensor unchanged."""
    return tensor.to_local() if is_distributed(tensor) else tensor


def refuse(what: str, came: str, wanted: str, remedy: str) -> NotImplementedError:
    """The error for what an adapter does not support: the thing, what came, what is expected, what to do."""
    return NotImplementedError(f"{what}: {came}, expected {wanted}; {remedy}.")
