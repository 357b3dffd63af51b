"""`patch`: `ragged_dot` in place of `jax.lax.ragged_dot` in code that is not the user's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import jax

from grouped_core.recipes import Recipe
from jax_grouped._lax import replacing_ragged_dot, replacing_ragged_dot_general
from jax_grouped._replacing import (
    Place,
    choice_of,
    chosen_in_this_thread,
    hold,
    in_this_thread,
    references,
    release,
    replacing,
)

FUNCTIONS = {"ragged_dot": replacing_ragged_dot, "ragged_dot_general": replacing_ragged_dot_general}


@contextmanager
def patch(*, recipe: Recipe | None = None, modules: Sequence[ModuleType] = ()) -> Iterator[tuple[str, ...]]:
    """Within this context, `jax.lax.ragged_dot` and `ragged_dot_general` are `jax_grouped.ragged_dot`.

        with jax_grouped.patch() as replaced:       # ("jax.lax.ragged_dot", "jax.lax.ragged_dot_general")
            loss, grads = train_step(params, batch)

    What counts is where a function is traced: traces made in this thread inside the context use our kernels, forward
    and gradients, all others do not. JAX keeps the programs of both apart, so a jitted function that was called outside
    is traced again inside, and the other way round. Contexts nest, the innermost recipe counts, and an exception ends
    one as usual; call `patch` again for another one. Other threads are not affected. Do not suspend a coroutine or
    generator inside.

    Operands, dtypes of results and of gradients, and `precision` are those of `jax.lax.ragged_dot`: the narrower one of
    two dtypes is converted; but results and gradients of two 8-bit operands are bfloat16. `ragged_dot_general` takes
    the dimension numbers of [M, K] times [G, K, N] or [G, N, K].

    Args:
        recipe: formats of the products, as in `ragged_dot`; one that needs no state. Stochastic rounding draws the same
            numbers in every step.
        modules: modules that bound these functions to names of their own, by `from jax.lax import ragged_dot`. These
            names are replaced too. Names that a closure, an argument's default or `functools.partial` has captured are
            not reached.

    Yields:
        The names that are replaced.

    Raises:
        TypeError: `recipe` is not a `Recipe`, or is bound to arrays; `modules` is not a sequence of modules; inside,
            `group_offset` or `out_sharding` is passed, or in forward mode (JAX raises it for every `custom_vjp`).
        ValueError: `recipe` needs a state; a module has no name of these functions.
        NotImplementedError: inside, for other dimension numbers, `jax.vmap` and second derivatives.
    """
    choice = choice_of(recipe)
    places = [_place(jax.lax, name, name) for name in FUNCTIONS]
    if not isinstance(modules, Sequence) or not all(isinstance(each, ModuleType) for each in modules):
        raise TypeError(
            f"`modules` of patch: {modules!r}, expected a sequence of imported modules; pass e.g. (my_package.moe,)."
        )
    for module in modules:
        found = [
            _place(owner, bound, name)
            for name in FUNCTIONS
            for owner, bound in references(getattr(jax.lax, name), [module])
        ]
        if not found:
            raise ValueError(
                f"`modules`: {getattr(module, '__name__', module)} has no name bound to jax.lax.ragged_dot or "
                "ragged_dot_general, expected modules that import them by name; leave it out, as calls of "
                "`jax.lax.ragged_dot` are replaced anyway."
            )
        places += found
    with ExitStack() as undo:
        for place in places:
            hold(place)
            undo.callback(release, place)
        undo.enter_context(in_this_thread(choice, places))
        yield tuple(place.label for place in places)


def _place(module: ModuleType, bound: str, name: str) -> Place:
    """The name `bound` in a module, which holds the function `name` of `jax.lax`."""

    def make(original: Any) -> Any:
        return replacing(partial(FUNCTIONS[name], chosen=partial(chosen_in_this_thread, place.key)))(original)

    place = Place(module, bound, make, f"{module.__name__}.{bound}")
    return place
