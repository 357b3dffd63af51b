"""Keywords for the modules of a Sequential, which are addressed by module or index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn import Module


def addressed(
    layers: Sequence[Module],
    taken: Sequence[Sequence[str] | None],
    op_kwargs: Mapping[Module | int, Mapping[str, Any]],
) -> dict[int, Mapping[str, Any]]:
    """Returns the keywords for each module that has some, by the position of the module (BUF-5).

    Args:
        taken: the keywords that each layer takes; None: it is not a module of this package. op_kwargs: the keywords by
            module or index.

    Raises:
        ValueError: a key is not a module of this package, or one is addressed twice. TypeError: unknown keywords, or
            not a mapping.
    """
    found: dict[int, Mapping[str, Any]] = {}
    _check_mapping("`op_kwargs` of Sequential", op_kwargs)
    for key, keywords in op_kwargs.items():
        _check_mapping(f"`op_kwargs` of Sequential for {key!r}", keywords)
        at = _place(layers, key)
        takes, name = taken[at], type(layers[at]).__name__
        if takes is None:
            raise ValueError(
                f"`op_kwargs` of Sequential: module {at} is a {name}, expected one of this package's modules; "
                "others take no keywords, leave it out."
            )
        if at in found:
            raise ValueError(
                f"`op_kwargs` of Sequential: module {at} ({name}) is addressed twice, expected once; "
                "merge its keywords."
            )
        unknown = [each for each in keywords if each not in takes]
        if unknown:
            valid = ", ".join(takes) or "none"
            raise TypeError(
                f"`op_kwargs` of Sequential: keyword {unknown[0]!r} for module {at} ({name}), expected one "
                f"of the valid ones: {valid}; leave it out."
            )
        found[at] = keywords
    return found


def _check_mapping(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{name}: {type(value).__name__}, expected a mapping of modules or indices to keywords, each a mapping of "
            "names to tensors; pass such a dict."
        )


def _place(layers: Sequence[Module], key: Module | int) -> int:
    if isinstance(key, int):
        if not -len(layers) <= key < len(layers):
            raise ValueError(
                f"`op_kwargs` of Sequential: index {key}, expected one of {len(layers)} modules; count them from 0."
            )
        return key % len(layers)
    places = [at for at, layer in enumerate(layers) if layer is key]
    if not places:
        raise ValueError(
            f"`op_kwargs` of Sequential: a {type(key).__name__} that is not in this Sequential, expected one of its "
            "modules; pass that one, or its index."
        )
    if len(places) > 1:
        raise ValueError(
            f"`op_kwargs` of Sequential: a {type(key).__name__} that is held at {places}, expected a module held once; "
            "use the index."
        )
    return places[0]
