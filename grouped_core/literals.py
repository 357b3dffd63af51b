"""Frozen dataclasses as text, which a traced graph holds as one constant instead of one per field.

The text is a Python literal of nested tuples, each of which starts with the name of its class. It is made with the
object, in steps that Dynamo can trace, and is no field: copies by field make their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


class Literal:
    """A dataclass that keeps the literal of its fields in `_text`."""

    @property
    def text(self) -> str:
        """The fields as a literal, which a traced graph holds in place of the object."""
        return self.__dict__["_text"]


def fields_of(kind: type[Any]) -> tuple[str, ...]:
    """The names of the fields of a dataclass, in order."""
    return tuple([each.name for each in dataclasses.fields(kind)])


def with_fields(instance: Any, changes: dict[str, Any]) -> Any:
    """A dataclass with some of its fields changed.

    Raises:
        TypeError: it has no such field.
    """
    fields, kind = fields_of(type(instance)), type(instance).__name__
    for name in changes:
        if name not in fields:
            raise TypeError(
                f"`{name}` of {kind}.replace: no such field, expected one of {', '.join(fields)}; choose one."
            )
    return dataclasses.replace(instance, **changes)


def literal(kind: str, values: Sequence[Any]) -> str:
    """The literal of an object.

    Args:
        kind: the name of its class. values: the values of its fields; each is a constant, a `Literal`, or a tuple of
            these.
    """
    return f"({kind!r}, {', '.join([_literal(each) for each in values])})"


def _literal(value: Any) -> str:
    if isinstance(value, tuple):
        return literal("tuple", value)
    return value.text if isinstance(value, Literal) else repr(value)
