"""A cache for results that depend only on static facts: checks, recordings, programs."""

from __future__ import annotations

from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

MOST = 1024
"""Maximum number of entries: a training run has a few dozen, but M may change in each step, without a bound, and what
is kept for one M takes tens of KiB of host memory in forward and backward."""


class Cache(dict[_Key, _Value]):
    """A dictionary that is emptied when it is full."""

    def keep(self, key: _Key, value: _Value) -> _Value:
        """Adds a value and returns it."""
        if len(self) >= MOST:
            self.clear()
        self[key] = value
        return value
