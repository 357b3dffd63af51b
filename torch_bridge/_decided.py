"""What follows from static facts, decided once for them: checks, texts, programs."""

from __future__ import annotations

from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

MOST = 8192
"""How much is remembered: a training run meets a few dozen, but M may change each step, without a bound."""


class Decided(dict[_Key, _Value]):
    """A dictionary of decisions by their facts, which starts anew when it is full."""

    def keep(self, key: _Key, value: _Value) -> _Value:
        """Remembers a decision and gives it back."""
        if len(self) >= MOST:
            self.clear()
        self[key] = value
        return value
