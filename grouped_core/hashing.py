"""Frozen dataclasses that are keys of caches compute their hash once."""

from __future__ import annotations

from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type[Any])


def hashed_once(cls: _Class) -> _Class:
    """Makes a frozen dataclass cache its hash, as strings do.

    Copies and pickles do not contain it, because hashes of strings differ between processes.
    """
    compute: Any = cls.__hash__

    def hash_of(self: Any) -> int:
        held = self.__dict__
        found = held.get("_hash")
        if found is None:
            found = held["_hash"] = compute(self)
        return found

    def state_of(self: Any) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    cls.__hash__ = hash_of  # pyrefly: ignore[bad-assignment]
    cls.__getstate__ = state_of  # pyrefly: ignore[bad-assignment]
    return cls
