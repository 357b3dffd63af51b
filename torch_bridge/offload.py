"""Keeps activations in host memory between forward and backward.

Each `with cpu_offload():` is one unit, for instance a layer: tensors saved for backward inside are copied to pinned
memory in parallel with the computation, and come back one unit before backward needs them. Bits, kernels and graphs do
not change.
"""

from __future__ import annotations

import operator
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from grouped_core.formats import check_flags
from torch_bridge import _saved, _transfer
from torch_bridge._saved import NAMES, UNNAMED


@contextmanager
def cpu_offload(
    enabled: bool = True,
    names: Iterable[str] | None = None,
    min_numel: int = 262144,
    prefetch: int = 1,
    retain_pinned: bool = False,
) -> Iterator[None]:
    """Moves rows that are saved for backward inside it to pinned host memory, and back in time.

    Contexts nest, and the innermost decides. Never moved: parameters and casts of them, group sizes and other integers,
    vectors (probabilities, group scales), and tensors that are not contiguous or not on a GPU. On a machine without a
    GPU nothing is moved, and one warning says so.

    Args:
        enabled: False keeps tensors saved inside on the device.
        names: moves only tensors that this package's operations save under these names: "grouped_x" (rows that a
            product reads), "grouped_fc1" (pre-activations), "grouped_act" (activated rows); of quantised rows
            "grouped_x_q" and "grouped_x_scale", and so on. None: all tensors, including those of other operations.
        min_numel: smaller tensors stay on the device.
        prefetch: how many units are brought back ahead of the one that backward has reached.
        retain_pinned: keeps the pinned memory for the next step. Required while a CUDA graph is captured and in the
            eager steps before it; the graph then owns its buffers, and the outermost context waits for its copies.
            Microbatches inside one outermost context share buffers.

    Raises:
        TypeError, ValueError: an option has an invalid value. RuntimeError: while a CUDA graph is captured, pinned
            memory is not retained, or no eager step has left any.
    """
    chosen = None if names is None else frozenset(_checked_names(names))
    check_flags("cpu_offload", enabled=enabled, retain_pinned=retain_pinned)
    unit = _Unit(enabled, chosen, _count("min_numel", min_numel), _count("prefetch", prefetch), retain_pinned)
    if enabled and not torch.cuda.is_available():
        _say_once()
    around = nullcontext() if _saved.listeners else _transfer.outermost()
    _saved.listeners.append(unit.hear)
    try:
        with around, torch.autograd.graph.saved_tensors_hooks(unit.pack, unit.unpack):
            yield
    finally:
        _saved.listeners.remove(unit.hear)


_said: list[bool] = []
_MOVABLE = ("cuda",)  # types of devices whose tensors are moved


def _say_once() -> None:
    if not _said:
        _said.append(True)
        warnings.warn("cpu_offload: there is no GPU here, so nothing is moved; results are the same.", stacklevel=4)


def _checked_names(names: Iterable[str]) -> list[str]:
    if not isinstance(names, Iterable):
        raise TypeError(f"`names` of cpu_offload: {names!r}, expected names of tensors or None; pass a list of them.")
    found = [names] if isinstance(names, str) else list(names)
    for name in found:
        if name not in NAMES:
            raise ValueError(
                f"`names` of cpu_offload: {name!r}, expected some of {', '.join(NAMES)}; choose among them, or pass "
                "None for everything."
            )
    return found


def _count(name: str, value: Any) -> int:
    try:
        found = operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` of cpu_offload: {value!r}, expected an integer; pass one.") from None
    if found < 0:
        raise ValueError(f"`{name}` of cpu_offload: {found}, expected 0 or more; pass such a number.")
    return found


class _Packed:
    """Replaces a moved tensor among those that autograd saves."""

    def __init__(self, moved: _transfer.Moved, unit: _Unit, shape: torch.Size) -> None:
        self.moved, self.unit, self.shape = moved, unit, shape


_last: list[weakref.ref[_Unit]] = []  # the last unit that moved a tensor
_moved: dict[tuple[int, int, int, int, torch.dtype], tuple[StorageWeakRef, weakref.ref[_transfer.Moved]]] = {}
"""By storage, version, address, bytes and dtype: tensors that were moved and have not changed since."""
_MAX_MOVED = 1024


class _Unit:
    """The tensors that one context moves."""

    def __init__(
        self, enabled: bool, names: frozenset[str] | None, min_numel: int, prefetch: int, retain: bool
    ) -> None:
        self._enabled, self._names, self._min_numel = enabled, names, min_numel
        self._prefetch, self._retain = prefetch, retain
        self._heard: dict[int, str] = {}
        self._members: list[weakref.ref[_transfer.Moved]] = []
        self._before: weakref.ref[_Unit] | None = None
        self._started = False

    def hear(self, names: dict[int, str]) -> None:
        """Receives the names of the tensors that are saved next, by address."""
        self._heard = names

    def pack(self, tensor: Tensor) -> Any:
        """What autograd saves for `tensor`."""
        if not self._moves(tensor, self._heard.pop(tensor.data_ptr(), None) if self._heard else None):
            return tensor if tensor.is_leaf else tensor.detach()  # a result that holds its own history is never freed
        return _Packed(self._send(tensor), self, tensor.shape)

    def _moves(self, tensor: Tensor, name: str | None) -> bool:
        if not self._enabled or name == UNNAMED or (self._names is not None and name not in self._names):
            return False
        if tensor.device.type not in _MOVABLE or tensor.numel() < self._min_numel or not tensor.is_contiguous():
            return False
        if tensor.dim() < 2:  # with or without a name: group scales are too small to be worth it
            return False
        if name is not None:
            return True
        owned = isinstance(tensor, Parameter) or isinstance(tensor._base, Parameter)
        return tensor.is_floating_point() and not owned

    def _send(self, tensor: Tensor) -> _transfer.Moved:
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version, tensor.data_ptr(), tensor.nbytes, tensor.dtype)
        known = _moved.get(key)
        moved = None if known is None or known[0].expired() else known[1]()
        if moved is None:
            moved = _transfer.Moved(tensor, self._retain)
            if len(_moved) >= _MAX_MOVED:
                _moved.clear()
            _moved[key] = (StorageWeakRef(storage), weakref.ref(moved))
            if not self._members:
                self._before = _last[0] if _last else None
                _last[:] = [weakref.ref(self)]
            self._members.append(weakref.ref(moved))
        moved.saved += 1
        return moved

    def unpack(self, packed: Any) -> Tensor:
        """Restores the tensor."""
        if not isinstance(packed, _Packed):
            return packed
        packed.unit.start()
        return packed.moved.take(packed.shape)

    def start(self) -> None:
        """Starts to bring back this unit and those before it, once."""
        unit: _Unit | None = self
        for _ in range(1 + self._prefetch):
            if unit is None:
                return
            if not unit._started:
                unit._started = True
                for member in reversed(unit._members):  # in the order in which backward reads them
                    moved = member()
                    if moved is not None:
                        moved.start()
            unit = None if unit._before is None else unit._before()
