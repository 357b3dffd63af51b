"""Gives the named tuples of public functions names in files, so that torch.export can save programs that use them."""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import _register_namedtuple


def name_in_files(*kinds: type[Any]) -> None:
    """Gives named tuples the names under which torch.export writes them to files, and by which it finds them again.

    The names do not contain the module of a class, so that it can move and older files still load. Without a name
    torch.export.save refuses a program that takes or returns one.
    """
    for kind in kinds:
        _register_namedtuple(kind, serialized_type_name=f"torch_bridge.{kind.__name__}")
