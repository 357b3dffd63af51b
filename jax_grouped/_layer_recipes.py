"""What a Flax NNX layer holds of its recipe: the state of delayed scaling, and the stream of stochastic rounding."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from flax import nnx

from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.scaling import ScalingState
from jax_grouped.quantize import scaling_state, update_scaling

Keys = nnx.Rngs | nnx.RngStream | jax.Array | None
"""Where a key of stochastic rounding comes from."""

_Tree = TypeVar("_Tree")


class Scaling(nnx.Variable[Any]):
    """The state of delayed scaling of one layer, a `ScalingState`; as a filter it tells these from parameters.

    Its cotangent is not a gradient but its next value: differentiate with respect to it, keep what comes back, and call
    `update_scalings` once a step.
    """


def update_scalings(
    tree: _Tree, *, axis_name: str | tuple[str, ...] | None = None, previous: _Tree | None = None
) -> _Tree:
    """`tree` with the next step's value of every scaling state in it; other leaves stay as they are.

    Args:
        tree: any pytree, such as the `nnx.State` that `nnx.split(model, Scaling, ...)` gives, or its cotangent.
        axis_name: mesh axes over which magnitudes take their maximum first, inside `shard_map`.
        previous: what `tree` is the cotangent of, for layers that backward may not reach (`update_scaling`).
    """

    def is_state(node: Any) -> bool:
        return isinstance(node, ScalingState)

    def next_step(node: Any, before: Any = None) -> Any:
        return update_scaling(node, axis_name=axis_name, previous=before) if is_state(node) else node

    return jax.tree.map(next_step, tree, *([] if previous is None else [previous]), is_leaf=is_state)


class RecipeLayer(nnx.Module):
    """A layer that computes with a recipe.

    Attributes:
        recipe: the formats; None: as the operands stand.
        scaling: the state, where the recipe scales with delay, else None.
        rounding: the layer's own stream of keys, where the recipe rounds stochastically, else None.
    """

    def _hold_recipe(self, recipe: Recipe | None, num_groups: int, products: int, rngs: nnx.Rngs) -> None:
        """Called after the parameters are made, which so are the same with every recipe."""
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
            self.rounding = _rounding(rngs, type(self).__name__, recipe).fork()

    def _bound_recipe(self, rngs: Keys) -> Recipe | BoundRecipe | None:
        """The recipe for one call; `rngs` takes the place of the layer's stream."""
        recipe = self.recipe
        if recipe is None or not (recipe.delayed or recipe.stochastic):
            return recipe
        state = None if self.scaling is None else self.scaling.get_value()
        return recipe.bind(state, self._key(rngs) if recipe.stochastic else None)

    def _key(self, rngs: Keys) -> jax.Array:
        source = self.rounding if rngs is None else rngs.rounding if isinstance(rngs, nnx.Rngs) else rngs
        key = source() if isinstance(source, nnx.RngStream) else source
        if not isinstance(key, jax.Array):
            raise TypeError(
                f"`rngs` of {type(self).__name__}: {type(key).__name__}, expected nnx.Rngs, a stream of it, a key of "
                "jax.random, or None; pass one of them."
            )
        return jax.random.bits(key, (2,), "uint32")


def _rounding(rngs: nnx.Rngs, layer: str, recipe: Recipe) -> nnx.RngStream:
    """The stream of keys for stochastic rounding; `rngs` has it, or a default one."""
    try:
        return rngs.rounding
    except AttributeError as error:
        raise ValueError(
            f"`rngs` of {layer}: no stream `rounding` and no default, expected one for the recipe {recipe.name}, which "
            "rounds stochastically; pass nnx.Rngs(seed), or nnx.Rngs(params=..., rounding=...)."
        ) from error
