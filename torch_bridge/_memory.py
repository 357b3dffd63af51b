"""Fast access to memory: facts and addresses of tensors, allocation, tables of addresses; captures that hold them."""

from __future__ import annotations

import weakref
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._C import _dynamo

from grouped_core import _native, memory
from torch_bridge._checks import device_integers

EXCHANGE = _native.Exchange(Tensor, torch.nn.Parameter, torch.get_num_threads)
"""Reads tensors without asking Python for their attributes."""

FactsCache = _native.FactsCache
"""A cache of results whose keys are the facts of operands that `EXCHANGE.describe` returns."""

# NOTE: the public functions build a Stream object, check for initialisation, or go through the dispatcher once more,
# which takes one to several microseconds per call. A tensor on the device proves that CUDA is initialised, and compiled
# graphs allocate with the same functions. A CPU-only PyTorch lacks the first two.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_guards: Any = _dynamo.guards  # its stubs lack these functions
empty_on_cpu: Callable[..., Tensor] = _guards._empty_strided_cpu  # (shape, strides, dtype) -> new tensor
empty_on_cuda: Callable[..., Tensor] = _guards._empty_strided_cuda  # on the current device
part_of: Callable[..., Tensor] = _guards._reinterpret_tensor  # (tensor, shape, strides, offset) -> no view, same memory


def capture_on(device: torch.device) -> int:
    """Returns the number of the CUDA graph's capture that the current stream of `device` is part of, or 0."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return 0
    return _native.capture_of(torch.cuda.current_stream(device).cuda_stream)


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Addresses of tensors of one length. Equal addresses give one object, so that facts about it can be cached."""

    starts: list[int]  # in order
    length: int


def places_apart(written: Sequence[Tensor], weights: Sequence[Tensor], rows: Sequence[object]) -> Places | None:
    """Returns the addresses of the plain tensors `written`; None if one overlaps another, a weight or one in `rows`.

    All tensors of `written` have one shape, and so have those of `weights`. The result is cached by the addresses of
    both, which usually do not change.
    """
    lengths = (written[0].nbytes, weights[0].nbytes)
    try:
        addresses = EXCHANGE.addresses((*written, *weights))
    except ValueError:  # FSDP has freed a weight
        return None
    places = _places(addresses, len(written), *lengths)
    if places is None:
        return None
    starts = places.starts
    for each in rows:
        if type(each) is Tensor:
            start = each.data_ptr()
            at = bisect_left(starts, start + each.nbytes)
            if at and starts[at - 1] + lengths[0] > start:
                return None
    return places


@lru_cache(maxsize=1024)
def _places(addresses: bytes, written: int, length: int, other: int) -> Places | None:
    """Returns the places of the first `written` addresses; None if two of the memory ranges overlap."""
    found = memoryview(addresses).cast("q").tolist()
    lengths = [length] * written + [other] * (len(found) - written)
    is_apart = memory.are_apart([*zip(found, lengths, strict=True)])
    return Places(sorted(found[:written]), length) if is_apart else None


@lru_cache(maxsize=1024)
def are_apart(some: Places, others: Places) -> bool:
    """Whether no tensor at `some` overlaps one at `others`."""
    return memory.are_apart([(start, each.length) for each in (some, others) for start in each.starts])


ALIGNMENT = 16
"""Fast kernels need addresses that are multiples of this many bytes."""


def address_table(addresses: bytes, device: int) -> Tensor:
    """Returns int64 [G] on the CUDA device with that index (-1: the CPU): the addresses from `EXCHANGE.addresses`.

    A table depends only on the addresses, so it is cached by them, and parameters that move get another one.
    """
    if device < 0:
        return _table(addresses, device, 0)
    if torch.cuda.is_current_stream_capturing():  # a module's table, or a new one in the graph's memory
        owned = _owned.get((addresses, device))
        return _new_table(addresses, device) if owned is None else owned
    # A table is filled on the stream that first requests it; another stream gets its own.
    return _table(addresses, device, raw_stream(device))


def number_table(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Returns host integers as int64 on a device; cached in the same way as address tables."""
    packed, index = array("q", numbers).tobytes(), -1 if device.type == "cpu" else device.index
    if index >= 0 and torch.cuda.is_current_stream_capturing():
        return _new_table(packed, index)
    return _table(packed, index, 0 if index < 0 else raw_stream(index))


_owned: weakref.WeakValueDictionary[tuple[bytes, int], Tensor] = weakref.WeakValueDictionary()


class OwnedTable:
    """A table of addresses at a fixed address: captured graphs read it, and a refresh rewrites it.

    Graphs that were captured while the table held the addresses of their weights follow its changes.
    """

    def __init__(self) -> None:
        self._addresses = b""
        self._table: Tensor | None = None

    def __reduce__(self) -> tuple[type[OwnedTable], tuple[()]]:
        return OwnedTable, ()  # a copy has its own weights

    def point_to(self, members: Sequence[Tensor], device: int) -> None:
        """Writes the addresses of `members` to the table, on the current stream, unless it has them already."""
        addresses = EXCHANGE.addresses(members)
        if self._table is not None and addresses == self._addresses and (addresses, device) in _owned:
            return
        new = _new_table(addresses, device)
        if self._table is None or self._table.device != new.device or len(self._table) != len(members):
            self._table = new
        else:
            _owned.pop((self._addresses, device), None)
            self._table.copy_(new)
        self._addresses = addresses
        _owned[addresses, device] = self._table


def _new_table(addresses: bytes, device: int) -> Tensor:
    place = torch.device("cpu") if device < 0 else torch.device("cuda", device)
    with torch.inference_mode(mode=False):  # a refresh outside of it may write the table
        return device_integers(memoryview(addresses).cast("q").tolist(), torch.int64, place)


_table = lru_cache(maxsize=1024)(lambda addresses, device, stream: _new_table(addresses, device))
