"""Replaces functions of other modules until that is undone.

The replacing function checks at each call whether a replacement is in effect, and calls the original if none is. So if
a name still holds it afterwards, in a module that was imported meanwhile, calls by that name run the original again.

What is in effect is a context of JAX, which is part of the keys of JAX's caches of traces and compiled programs. So a
jitted function has one program for each state, and never runs one that was traced in another.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import jax

from grouped_core.recipes import BoundRecipe, Recipe


class Choice(NamedTuple):
    """The choice to run the functions of this library, with a recipe (None: the operands as given)."""

    recipe: Recipe | None


class _Reach(NamedTuple):
    """A choice and the places where it applies. JAX keeps separate traces for each value of it."""

    choice: Choice
    places: frozenset[Any]


_IN_THREAD = jax.make_user_context(None)
"""The `_Reach` in this thread for the functions of `jax.lax`, or None."""
_EVERYWHERE = jax.make_user_context(())
"""Pairs of a host and its `_Reach`, in the order of names, for all threads."""

_lock = threading.RLock()
_registered: list[Replacement] = []
"""In the order of registration."""


def choice_of(recipe: Any) -> Choice:
    """The recipe of a replacement, checked.

    Raises:
        TypeError: it is neither None nor a `Recipe` that is not bound to arrays. ValueError: it needs a state.
    """
    if isinstance(recipe, BoundRecipe) or not (recipe is None or isinstance(recipe, Recipe)):
        raise TypeError(
            f"`recipe`: {type(recipe).__name__}, expected None or a Recipe without state and key, which serves every "
            "call; pass one, e.g. BF16, and call jax_grouped.ragged_dot yourself where you bind arrays."
        )
    if recipe is not None and recipe.delayed:
        raise ValueError(
            f"`recipe`: {recipe.name} has a state of its own for each use, expected a recipe without one; pass e.g. "
            "FP8Block, or call jax_grouped.ragged_dot(recipe=recipe.bind(state)) yourself."
        )
    return Choice(recipe)


def in_this_thread(choice: Choice, places: Iterable[Place]) -> Any:
    """A context in which `choice` is in effect at these places, and at those of contexts around it."""
    around = _IN_THREAD.value
    reached = frozenset(place.key for place in places)
    return _IN_THREAD(_Reach(choice, reached if around is None else reached | around.places))


def chosen_in_this_thread(key: Any) -> Choice | None:
    """What is in effect in this thread at the place of that key; None: the original function."""
    reach = _IN_THREAD.value
    return reach.choice if reach is not None and key in reach.places else None


def chosen(host: str) -> Choice | None:
    """What is in effect for a host; None: the original function."""
    reach = dict(_EVERYWHERE.value).get(host)
    return None if reach is None else reach.choice


# ---------------------------------------------------------------------------------------------------------------------
# Places.


class Place(NamedTuple):
    """An attribute that is replaced.

    Attributes:
        owner: a module or class. name: the name of its attribute.
        make: makes the new value from the old one. label: what users read.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]
    label: str

    @property
    def key(self) -> tuple[str, int, str]:
        """The key of this attribute."""
        return (self.label, id(self.owner), self.name)


@dataclass
class _Held:
    place: Place
    original: Any
    new: Any
    users: int = 0


_held: dict[tuple[int, str], _Held] = {}


def hold(place: Place) -> None:
    """Replaces the attribute, unless it is replaced already."""
    key = (id(place.owner), place.name)
    with _lock:
        if key not in _held:
            original = vars(place.owner)[place.name]
            _held[key] = _Held(place, original, place.make(original))
            setattr(place.owner, place.name, _held[key].new)
        _held[key].users += 1


def release(place: Place) -> None:
    """Undoes one `hold`; the last one restores the attribute, unless other code has replaced it since."""
    key = (id(place.owner), place.name)
    with _lock:
        held = _held[key]
        held.users -= 1
        if not held.users:
            del _held[key]
            if vars(place.owner)[place.name] is held.new:
                setattr(place.owner, place.name, held.original)


Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes the replacing function from the original one."""


def replacing(make: Make) -> Make:
    """`make`, whose functions have name, text and signature of the original, which `original_of` finds from them."""

    def made(original: Callable[..., Any]) -> Callable[..., Any]:
        new = functools.wraps(original)(make(original))
        setattr(new, _ORIGINAL, original)
        return new

    return made


_ORIGINAL = "_jax_grouped_original"


def original_of(function: Any) -> Any:
    """The function that `function` replaces, or itself."""
    return getattr(function, _ORIGINAL, function)


def references(function: Any, modules: Iterable[ModuleType]) -> list[tuple[ModuleType, str]]:
    """Every name in these modules that is bound to `function`, or to what replaces it."""
    return [
        (module, name)
        for module in modules
        for name, value in list(vars(module).items())
        if callable(value) and original_of(value) is original_of(function)
    ]


def loaded(package: str) -> list[ModuleType]:
    """The modules of a package that were imported so far."""
    found = [(name, module) for name, module in list(sys.modules.items()) if isinstance(module, ModuleType)]
    return [module for name, module in found if name == package or name.startswith(f"{package}.")]


class View(ModuleType):
    """A module as another one sees it: some attributes are replaced, all others are read from the module."""

    def __init__(self, module: ModuleType, **replaced: Any) -> None:
        super().__init__(module.__name__, module.__doc__)
        self.__dict__.update(replaced, _seen=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_seen"], name)


# ---------------------------------------------------------------------------------------------------------------------
# Replacements for all threads.


class Replacement:
    """Functions of a host that are replaced in all threads, from now on until `undo` or the end of a `with` block.

    If there are several for one host, the one that was made last is in effect.

    Attributes:
        replaced: the names of what is replaced.
    """

    def __init__(self, host: str, choice: Choice, places: Sequence[Place]) -> None:
        self.replaced = tuple(place.label for place in places)
        self.host, self.reach = host, _Reach(choice, frozenset(place.key for place in places))
        self._places = places
        with ExitStack() as undo:  # if one place cannot be replaced, the others are restored
            for place in places:
                hold(place)
                undo.callback(release, place)
            undo.pop_all()
        with _lock:
            _registered.append(self)
            _publish()

    def undo(self) -> None:
        """Restores what was replaced. Calling it again does nothing."""
        with _lock:
            places, self._places = self._places, ()
            _registered[:] = [each for each in _registered if each is not self]
            _publish()
        for place in places:
            release(place)

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, *raised: object) -> None:
        self.undo()


def _publish() -> None:
    """Puts the last registration for each host in effect, at all places that are replaced for that host."""
    reaches: dict[str, _Reach] = {}
    for each in _registered:
        before = reaches.get(each.host)
        reaches[each.host] = (
            each.reach if before is None else each.reach._replace(places=each.reach.places | before.places)
        )
    _EVERYWHERE.set_global(tuple(sorted(reaches.items(), key=lambda entry: entry[0])))


# ---------------------------------------------------------------------------------------------------------------------
# Arguments of replaced functions.


def taken(
    what: str,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    honoured: Sequence[str],
    unused: Sequence[str] = (),
) -> dict[str, Any]:
    """The `honoured` arguments of a call, by name. `unused` ones may have any value, all others only their default.

    Raises:
        TypeError: they do not fit the original's signature.
        NotImplementedError: another argument is given.
    """
    signature = inspect.signature(original)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    for name, value in bound.arguments.items():
        default = signature.parameters[name].default
        if name not in honoured and name not in unused and not (value is default or is_nothing(value)):
            raise unknown(f"`{name}` of {what}", f"{value!r:.100}", f"{default!r}, its default", "leave it out")
    return {name: bound.arguments[name] for name in honoured if name in bound.arguments}


def is_nothing(value: Any) -> bool:
    """Whether an argument asks for nothing: None, False, or an empty sequence."""
    return value is None or value is False or (isinstance(value, (tuple, list)) and not value)


def unknown(thing: str, came: str, expected: str, remedy: str) -> NotImplementedError:
    """What an adapter raises for something that it does not recognise."""
    return NotImplementedError(
        f"{thing}: {came}, expected {expected}; {remedy}, or undo the replacement where it is used."
    )


def check_parameters(what: str, function: Any, names: Sequence[str]) -> None:
    """Refuses a host whose function does not begin with these parameters.

    Raises:
        NotImplementedError: it does not.
    """
    found = [*inspect.signature(function).parameters]
    if found[: len(names)] != list(names):
        raise NotImplementedError(
            f"{what}: parameters {', '.join(found)}, expected {', '.join(names)} first; install a release of the host "
            "that docs/hosts_jax.md lists."
        )
