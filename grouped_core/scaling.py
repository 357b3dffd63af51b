"""Delayed scaling: the state that a recipe carries from step to step, and its update (numerics 2.5).

Letters: G groups, R roles (x, weight and dy of each product, in this order), L steps of history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from grouped_core import calls
from grouped_core.calls import ArraySpec
from grouped_core.formats import Format
from grouped_core.products import Runner
from grouped_core.quantizing import Extras
from grouped_core.ranks import check_rank
from grouped_core.recipes import BoundRecipe, Recipe

ROLES = ("x", "w", "dy")
"""Operands of one linear operation that delayed scaling keeps a state for."""

_OPERAND_FORMATS = ((("forward", 0), ("wgrad", 0)), (("forward", 1), ("dgrad", 1)), (("dgrad", 0), ("wgrad", 1)))
"""For each role, the (product, operand) entries of a recipe that hold its formats."""

LARGEST_E4M3 = 448.0
"""Of which all values that amaxes are scaled to are multiples by powers of two, E5M2's and those of any margin too."""

_LARGEST = {"float8_e4m3fn": LARGEST_E4M3, "float8_e5m2": 57344.0}

_Array = TypeVar("_Array")


@dataclass(frozen=True, eq=False)
class ScalingState(Generic[_Array]):
    """The state of delayed scaling for one use of a recipe; `scaling_state` makes it, `update_scaling` the next one.

    Attributes:
        scale: float32 [R, G], the quantisation scales in use. 0 means that a role and group has not started: until an
            update has seen its amax, each call scales it by its current values (numerics 2.5, Start).
        history: float32 [R, L, G], amax history; slot 0 is the current step, which every use merges into.
        top: float32 [R], the value that the amax is scaled to.
        algorithm: "max" of the history, or its "most_recent" entry.
    """

    scale: _Array
    history: _Array
    top: _Array
    algorithm: str


ARRAYS = ("scale", "history", "top")
"""The names of a state's arrays."""


def check_groups(count: int) -> None:
    """Refuses a state without groups.

    Raises:
        TypeError: `count` is not an integer. ValueError: it is less than 1.
    """
    if not hasattr(count, "__index__"):
        raise TypeError(
            f"`num_groups`: {type(count).__name__}, expected an integer; pass the number of groups that the weight has."
        )
    if count < 1:
        raise ValueError(f"`num_groups`: {count}, expected at least 1; pass the number of groups that the weight has.")


def fp8_maxes(recipe: Recipe, products: int = 1) -> list[float]:
    """Returns the value that the amax of each role is scaled to; 1 for roles without delayed scaling.

    A role has one scale. Where its two formats have different element types, the smaller maximum holds for both.

    Raises:
        TypeError: `recipe` is not a `Recipe`. ValueError: it has no delayed scaling; `products` is neither 1 nor 2.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"`recipe`: {type(recipe).__name__}, expected a Recipe; pass one without bound arrays.")
    if products not in (1, 2):
        raise ValueError(f"`products`: {products}, expected 1 (linear operation) or 2 (MLP); pass one of them.")
    if not recipe.delayed:
        raise ValueError(
            f"`recipe`: {recipe.name}, expected one with delayed scaling, e.g. FP8Delayed; others have no state."
        )
    return [_fp8_max(recipe, role) for role in _OPERAND_FORMATS] * products


def _fp8_max(recipe: Recipe, role: Sequence[tuple[str, int]]) -> float:
    formats: list[Format] = [getattr(recipe, product)[at] for product, at in role]
    largest = [_LARGEST[fmt.values] * 2.0**-recipe.margin for fmt in formats if fmt.delayed]
    return min(largest, default=1.0)


def check_state(state: Any, *, stacked: bool = False) -> None:
    """Refuses anything but a state of delayed scaling; `stacked` allows leading axes, e.g. one of layers.

    Raises:
        TypeError: `state` is not a `ScalingState`. ValueError: the rank of one of its arrays is wrong.
    """
    if not isinstance(state, ScalingState):
        raise TypeError(
            f"`state`: {type(state).__name__}, expected a ScalingState; pass the result of scaling_state, or a "
            "gradient with respect to it."
        )
    leading = max(0, len(state.scale.shape) - 2) if stacked else 0
    for name in ARRAYS:
        check_rank("state", name, name, getattr(state, name).shape[leading:], of="state")


def update(run: Runner, state: ScalingState[Any], *, reuse: bool = False) -> ScalingState[Any]:
    """Returns the state of the next step, from one launch; scales whose role and group has no finite amax stay.

    Args:
        reuse: whether the new state is written over the old one.
    """
    scale, history, top = run.spec(state.scale), run.spec(state.history), run.spec(state.top)
    for name, spec in (("scale", scale), ("history", history), ("top", top)):
        if spec.dtype != "float32":
            raise ValueError(
                f"`{name}` of a state of delayed scaling: {spec}, expected float32; leave the state out where "
                "parameters are cast."
            )
    if top.shape != scale.shape[:1]:
        raise ValueError(
            f"`top` of a state of delayed scaling: {top}, expected one value for each of the {scale.shape[0]} roles of "
            "`scale`; pass what scaling_state made."
        )
    call = calls.scale_update(scale, history, state.algorithm, reuse=reuse)
    named = {"scale": state.scale, "history": state.history, "top": state.top}
    if reuse:
        named |= {"into_new_scale": state.scale, "into_new_history": state.history}
    arrays = call.arrange(**named)
    new_scale, new_history = run(call, arrays)
    return ScalingState(new_scale, new_history, state.top, state.algorithm)


def extras(bound: BoundRecipe, product: int = 0, scale: Sequence[Any] | None = None) -> Extras:
    """Returns the bound key, and the scales for the operands of product number `product` of an operation.

    Args:
        product: 0, or 1 for the second product of an MLP.
        scale: scales [G] of each role; None: those of the state.
    """
    if bound.state is None:
        return Extras(bound.key)
    rows, first = bound.state.scale if scale is None else scale, len(ROLES) * product
    return Extras(bound.key, *(rows[first + role] for role in range(len(ROLES))))


def planned(bound: BoundRecipe, groups: int) -> Extras:
    """Returns the result of `extras` as specs."""
    scales = ArraySpec((groups,), "float32") if bound.recipe is not None and bound.recipe.delayed else None
    return Extras(None if bound.key is None else ArraySpec((2,), "uint32"), scales, scales, scales)


def check_bound(
    bound: BoundRecipe, groups: int, products: int = 1, spec: Callable[[Any], ArraySpec] = calls.spec_of
) -> None:
    """Refuses a key or a state that does not fit the operation that the recipe is used for.

    Args:
        spec: gives shape and dtype of a framework's array.

    Raises:
        TypeError: the key is not an array, the state not a `ScalingState`.
        ValueError: the key has another shape or dtype; the recipe needs a state and has none, or the state's shapes
            and dtypes do not fit this operation.
    """
    if bound.key is not None:
        check_key(bound.key, spec)
    if bound.recipe is None or not bound.recipe.delayed:
        return
    name, roles = bound.recipe.name, len(ROLES) * products
    if bound.state is None:
        raise ValueError(
            f"`recipe`: {name} without a state, expected one for each use; pass recipe.bind(scaling_state(recipe, "
            f"{groups}{', products=2' if products == 2 else ''}))."
        )
    if not isinstance(bound.state, ScalingState):
        raise TypeError(
            f"`state` of recipe {name}: {type(bound.state).__name__}, expected a ScalingState; make it with "
            f"scaling_state(recipe, {groups}{', products=2' if products == 2 else ''})."
        )
    if bound.state.algorithm != bound.recipe.amax_algorithm:
        raise ValueError(
            f"`state` of recipe {name}: made for amax_algorithm={bound.state.algorithm!r}, expected "
            f"{bound.recipe.amax_algorithm!r} as the recipe has it; make it with scaling_state of this recipe."
        )
    got = (spec(bound.state.scale), spec(bound.state.history))
    wanted = (ArraySpec((roles, groups), "float32"), ArraySpec((roles, bound.recipe.history, groups), "float32"))
    if got != wanted:
        raise ValueError(
            f"`state` of recipe {name}: scale and history {got[0]} and {got[1]}, expected {wanted[0]} and {wanted[1]} "
            f"= (R, G) and (R, L, G); make it with scaling_state(recipe, {groups}"
            f"{', products=2' if products == 2 else ''})."
        )


def check_key(key: Any, spec: Callable[[Any], ArraySpec] = calls.spec_of) -> None:
    """Refuses what is no key of stochastic rounding. Raises TypeError: it is no array. ValueError: another one."""
    if not hasattr(key, "dtype"):
        raise TypeError(f"`key` of recipe.bind: {type(key).__name__}, expected an array uint32[2]; pass one.")
    got, wanted = spec(key), ArraySpec((2,), "uint32")
    check_rank("recipe", "key", "key", got.shape, of="recipe.bind")
    if got != wanted:
        raise ValueError(f"`key` of recipe.bind: {got}, expected {wanted}, low word first; pass such an array.")
