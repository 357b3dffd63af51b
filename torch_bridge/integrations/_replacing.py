"""Functions of a host that an adapter replaces, and how they come back. One registration per host is in force."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple


class Replacement(NamedTuple):
    """One function to replace.

    Attributes:
        owner: the class or the module that defines the function. name: the name of the function there.
        parameters: the names of its parameters in the releases for which the adapter was written.
        make: the host's own function -> the one in its place.
    """

    owner: Any
    name: str
    parameters: tuple[str, ...]
    make: Callable[[Any], Any]

    @property
    def path(self) -> str:
        """The full name of the function."""
        return f"{_path(self.owner)}.{self.name}"


class _Installed(NamedTuple):
    owner: Any
    name: str
    own: Any
    ours: Any


class Registration:
    """The replaced functions of one host; a context manager that is undone at the end of the block.

    Attributes:
        replaced: the full names of the replaced functions.
    """

    def __init__(self, host: str, replacements: Sequence[Replacement]) -> None:
        self.replaced = tuple(each.path for each in replacements)
        self._others = _ACTIVE.setdefault(host, [])
        if self._others:
            self._others[-1]._restore()
        self._installed: list[_Installed] = []
        try:
            for each in replacements:
                own = vars(each.owner)[each.name]
                self._installed.append(_Installed(each.owner, each.name, own, each.make(own)))
            self._install()
        except BaseException:
            for at in self._installed:
                setattr(at.owner, at.name, at.own)
            if self._others:
                self._others[-1]._install()
            raise
        self._others.append(self)

    def undo(self) -> None:
        """Undoes this registration; the latest remaining one is then in force, or else the host's own functions.

        Further calls have no effect.

        Raises:
            RuntimeError: a function was replaced by other code in the meantime; then nothing changes.
        """
        if self not in self._others:
            return
        if self._others[-1] is self:
            self._restore()
            if len(self._others) > 1:
                self._others[-2]._install()
        self._others.remove(self)

    def _install(self) -> None:
        for at in self._installed:
            setattr(at.owner, at.name, at.ours)

    def _restore(self) -> None:
        for at in self._installed:
            if vars(at.owner)[at.name] is not at.ours:
                raise RuntimeError(
                    f"`{_path(at.owner)}.{at.name}`: {vars(at.owner)[at.name]!r}, expected the function that "
                    "`register` put there; undo what was applied to it later first."
                )
        for at in self._installed:
            setattr(at.owner, at.name, at.own)

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


_ACTIVE: dict[str, list[Registration]] = {}
"""By host, the registrations that are not undone; the last one is in force."""


def register(host: str, replacements: Sequence[Replacement]) -> Registration:
    """Replaces functions of a host; the last registration is in force until it is undone.

    Raises:
        NotImplementedError: a function does not exist, or has other parameters than the adapter knows. RuntimeError: a
            function was replaced by other code since an earlier registration. In both cases nothing is replaced.
    """
    if not _ACTIVE.get(host):
        for each in replacements:
            _check(each)
    return Registration(host, replacements)


def _check(replacement: Replacement) -> None:
    found = vars(replacement.owner).get(replacement.name)
    names = None if found is None else tuple(inspect.signature(found).parameters)
    if names != replacement.parameters:
        came = "missing" if names is None else f"parameters ({', '.join(names)})"
        raise NotImplementedError(
            f"`{replacement.path}`: {came}, expected parameters ({', '.join(replacement.parameters)}); "
            "install a release of the host that docs/hosts_training.md lists."
        )


def _path(owner: Any) -> str:
    name = getattr(owner, "__qualname__", None)
    return owner.__name__ if name is None else f"{owner.__module__}.{name}"
