"""The recipe of a Flax NNX layer, its state of delayed scaling, and its stream of keys for stochastic rounding."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from flax import nnx

from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.scaling import ScalingState
from jax_grouped.quantize import scaling_state, update_scaling

Keys = nnx.Rngs | nnx.RngStream | jax.Array | None
"""Sources of a key of stochastic rounding."""

_Tree = TypeVar("_Tree")


class Scaling(nnx.Variable[Any]):
    """The state of delayed scaling of one layer, a `ScalingState`; as a filter it separates states from parameters.

    Its cotangent is its new value, not a gradient: differentiate with respect to it, keep the cotangent, and call
    `update_scalings` once per step.
    """


def update_scalings(
    tree: _Tree, *, axis_name: str | tuple[str, ...] | None = None, previous: _Tree | None = None
) -> _Tree:
    """`tree` with every scaling state in it advanced to the next step; other leaves do not change.

    Args:
        tree: any pytree, such as the `nnx.State` from `nnx.split(model, Scaling, ...)`, or its cotangent.
        axis_name: mesh axes over which the amaxes are reduced to their maximum first, inside `shard_map`.
        previous: the tree that `tree` is the cotangent of, for layers that backward may not reach (`update_scaling`).
    """

    def is_state(node: Any) -> bool:
        return isinstance(node, ScalingState)

    def next_step(node: Any, before: Any = None) -> Any:
        return update_scaling(node, axis_name=axis_name, previous=before) if is_state(node) else node

    return jax.tree.map(next_step, tree, *([] if previous is None else [previous]), is_leaf=is_state)


class RecipeLayer(nnx.Module):
    """A layer that computes with a recipe.

    Attributes:
        recipe: the formats; None uses the operands as given.
        scaling: the state, where the recipe has delayed scaling, else None.
        rounding: the layer's own stream of keys, where the recipe rounds stochastically, else None.
    """

    def _hold_recipe(self, recipe: Recipe | None, num_groups: int, products: int, rngs: nnx.Rngs) -> None:
        """Sets up the recipe, after the parameters are made, so that they are the same for every recipe."""
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(
                f"`recipe` of {type(self).__name__}: {type(recipe).__name__}, expected a Recipe or None; the layer "
                "binds it to its own state and keys, so pass the recipe itself."
            )
        self.recipe = recipe
        self.scaling: Scaling | None = nnx.data(None)
        self.rounding: nnx.RngStream | None = nnx.data(None)
        if recipe is not None and recipe.delayed:
            self.scaling = Scaling(scaling_state(recipe, num_groups, products=products))
        if recipe is not None and recipe.stochastic:
            self.rounding = stream_of(rngs, "rounding", type(self).__name__, _rounding_of(recipe)).fork()

    def _bound_recipe(self, rngs: Keys, index: int = 0) -> Recipe | BoundRecipe | None:
        """The recipe for one call; `rngs` replaces the layer's stream, `index` as in `key_words`."""
        recipe = self.recipe
        if recipe is None or not recipe.takes_arrays:
            return recipe
        has_keys = self.rounding is not None or rngs is not None
        if (recipe.delayed and self.scaling is None) or (recipe.stochastic and not has_keys):
            raise ValueError(
                f"`recipe` of {type(self).__name__}: {recipe.name}, for which the layer has no state or no stream of "
                "keys, expected the recipe that it was made with; pass this one to the constructor."
            )
        state = None if self.scaling is None else self.scaling.get_value()
        return recipe.bind(state, self._key(recipe, rngs, index) if recipe.stochastic else None)

    def _key(self, recipe: Recipe, rngs: Keys, index: int) -> jax.Array:
        what = _rounding_of(recipe)
        return key_words(type(self).__name__, self.rounding, "rounding", what, rngs, index=index)


def _rounding_of(recipe: Recipe) -> str:
    return f"the recipe {recipe.name}, which rounds stochastically"


def key_words(layer: str, own: nnx.RngStream | None, name: str, what: str, rngs: Keys, *, index: int = 0) -> jax.Array:
    """Two words of a new key: of the layer's `own` stream, or of the stream `name` of `rngs`, which replaces it.

    Args:
        what: what needs it, for the message. index: the number of this use, where one key of jax.random serves several.
    """
    source: Any = own if rngs is None else rngs
    if isinstance(rngs, nnx.Rngs):
        source = stream_of(rngs, name, layer, what)
    key = source() if isinstance(source, nnx.RngStream) else source
    if not isinstance(key, jax.Array):
        raise TypeError(
            f"`rngs` of {layer}: {type(key).__name__}, expected nnx.Rngs, a stream of it, a key of jax.random, or "
            "None; pass one of them."
        )
    if index and source is rngs:
        key = jax.random.fold_in(key, index)
    return jax.random.bits(key, (2,), "uint32")


def stream_of(rngs: nnx.Rngs, name: str, layer: str, what: str) -> nnx.RngStream:
    """The stream `name` of `rngs`, or its default stream.

    Args:
        what: what needs it, for the message.
    """
    try:
        return getattr(rngs, name)
    except AttributeError as error:
        seeds = ", ".join(f"{each}=..." for each in dict.fromkeys(("params", name)))
        raise ValueError(
            f"`rngs` of {layer}: no stream `{name}` and no default, expected one for {what}; pass nnx.Rngs(seed), or "
            f"nnx.Rngs({seeds})."
        ) from error


def check_rngs(layer: str, rngs: Any) -> None:
    """Refuses what a layer cannot be made with.

    Raises:
        TypeError: `rngs` is no `nnx.Rngs`. ValueError: it has no stream for the parameters.
    """
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(
            f"`rngs` of {layer}: {type(rngs).__name__}, expected nnx.Rngs; pass nnx.Rngs(seed), or nnx.Rngs(key)."
        )
    stream_of(rngs, "params", layer, "its parameters")
