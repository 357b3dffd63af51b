"""Tensors on their way to pinned memory and back, on streams beside the one that computes.

    compute   produce t ──┬─────────── ... ── wait sent, free t ── ... ── empty t' ─┬── ... ── wait loaded, read t'
    down                  └ wait, copy t to the host ── sent                       │
    up                                                                              └ wait, copy to t' ── loaded

The device's copy belongs to the compute stream throughout: it is given back only after that stream has waited for the
copy, so no memory is reused early, in a captured graph neither.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

IN_FLIGHT = 4
"""Copies to the host that the compute stream may be ahead of; their tensors stay on the device."""


@lru_cache(maxsize=64)
def _streams(device: torch.device) -> tuple[Any, Any]:
    """(to the host, from the host)."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _event(stream: Any) -> Any:
    event = torch.cuda.Event()
    event.record(stream)
    return event


class Pinned:
    """Pinned memory that is retained is used again for the same number of bytes.

    What a graph took is never anybody else's. It is used again in that graph alone: by what is sent, and has come back,
    inside of one outermost context, for a context cannot outlast a capture.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._of_graphs: list[Tensor] = []
        self.scope: dict[int, list[Tensor]] | None = None
        """Free memory of the graph that is captured, inside of an outermost context."""

    def take(self, like: Tensor, retain: bool, captured: bool) -> Tensor:
        """Memory for a copy of `like`, flat."""
        if captured and self.scope is not None and self.scope[like.nbytes]:
            return self.scope[like.nbytes].pop().view(like.dtype)
        free = self._free[like.nbytes] if retain else None
        if free:
            found = free.pop()
        elif captured:
            raise RuntimeError(
                f"cpu_offload: no pinned buffer of {like.nbytes} bytes while a CUDA graph is captured, expected one "
                "that an eager step left; run the step eagerly with `retain_pinned=True` before it is captured."
            )
        else:
            found = torch.empty(like.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        if captured:
            self._of_graphs.append(found)
        return found.view(like.dtype)

    def give_back(self, memory: Tensor, captured: bool, scope: Any) -> None:
        """Retained memory that nothing reads any more; `scope`: that in which it was taken."""
        memory = memory.view(torch.uint8)
        if not captured:
            self._free[memory.nbytes].append(memory)
        elif scope is not None and scope is self.scope:
            scope[memory.nbytes].append(memory)


PINNED = Pinned()
_in_flight: deque[Moved] = deque()


class Moved:
    """A tensor that is sent to the host when it is made, and may be read as often as it was saved.

    Args:
        tensor: contiguous, on a CUDA device, complete on the current stream. retain: whether the host's memory is kept
            for the next one.

    Raises:
        RuntimeError: a graph is captured, and host memory is not retained or there is none left.
    """

    def __init__(self, tensor: Tensor, retain: bool) -> None:
        self.captured = torch.cuda.is_current_stream_capturing()
        if self.captured and not retain:
            raise RuntimeError(
                "cpu_offload: `retain_pinned` False while a CUDA graph is captured, expected True, because the graph "
                "holds the buffers' addresses; pass retain_pinned=True, in the eager steps before it too."
            )
        self.saved = 0  # how often it was saved
        self._taken = 0  # how often it was read in this pass
        self._retain = retain
        self._stream = torch.cuda.current_stream(tensor.device)
        down, _ = _streams(tensor.device)
        self._scope = PINNED.scope
        self._host = PINNED.take(tensor, retain, self.captured)
        self._device: Tensor | None = tensor.detach().view(-1)
        down.wait_event(_event(self._stream))
        with torch.cuda.stream(down):
            self._host.copy_(self._device, non_blocking=True)
        self._copied = _event(down)  # after which the device's copy may be given back, or read
        self._loading = False
        _in_flight.append(self)
        while len(_in_flight) > IN_FLIGHT:
            _in_flight.popleft().release()

    def start(self) -> None:
        """Begins to bring it back, if it is not here."""
        if self._device is not None:
            return
        self._stream = torch.cuda.current_stream(self._stream.device)
        _, up = _streams(self._stream.device)
        self._device = torch.empty(self._host.numel(), dtype=self._host.dtype, device=self._stream.device)
        up.wait_event(_event(self._stream))  # behind what used that memory before, and behind the copy to the host
        with torch.cuda.stream(up):
            self._device.copy_(self._host, non_blocking=True)
        self._copied = _event(up)
        self._loading = True

    def take(self, shape: torch.Size) -> Tensor:
        """It, on the device, for one of those who saved it."""
        self.start()
        device = self._device
        assert device is not None, "start brings it"
        if self._loading:
            self._wait()
        self._taken += 1
        if self._taken == self.saved:  # a retained graph may ask again
            self._taken = 0
            self.release()
        return device.view(shape)

    def release(self) -> None:
        """Gives the device's copy back, once the copy is done."""
        if self._device is not None:
            self._wait()
            self._device = None

    def _wait(self) -> None:
        # An event of a capture means nothing outside of it; and a capture begins with a synchronisation.
        if torch.cuda.is_current_stream_capturing() == self.captured:
            self._stream.wait_event(self._copied)

    def __del__(self) -> None:
        if sys.is_finalizing() or not hasattr(self, "_copied"):
            return
        self.release()
        if self._retain:
            PINNED.give_back(self._host, self.captured, self._scope)


def settle() -> None:
    """Lets the compute stream wait for every copy that is still under way."""
    while _in_flight:
        _in_flight.popleft().release()


@contextmanager
def outermost() -> Iterator[None]:
    """Around an outermost context: a capture must not end with copies under way, and has memory of its own."""
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        yield
        return
    PINNED.scope = defaultdict(list)
    try:
        yield
    finally:
        settle()
        PINNED.scope = None
