"""Transfers of tensors to pinned memory and back, on streams beside the compute stream.

    compute   produce t ──┬─────────── ... ── wait sent, free t ── ... ── empty t' ─┬── ... ── wait loaded, read t'
    down                  └ wait, copy t to the host ── sent                       │
    up                                                                              └ wait, copy to t' ── loaded

The compute stream owns the device's copy throughout: it is freed only after that stream has waited for the copy, so no
memory is reused too early, not even in a captured graph.
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
"""Number of pending copies to the host whose tensors stay on the device; the compute stream waits for older ones."""


@lru_cache(maxsize=64)
def _streams(device: torch.device) -> tuple[Any, Any]:
    """Returns (stream to the host, stream from the host)."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _event(stream: Any) -> Any:
    event = torch.cuda.Event()
    event.record(stream)
    return event


class Pinned:
    """Pinned memory; retained memory is reused for tensors of the same number of bytes.

    Memory that was taken while a graph was captured is reused only in that graph and inside the same outermost context,
    by tensors that are sent after its content was copied back. A context cannot outlast a capture.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._of_graphs: list[Tensor] = []
        self.scope: dict[int, list[Tensor]] | None = None
        """Free memory of the graph that is being captured, inside an outermost context."""

    def take(self, like: Tensor, retain: bool, captured: bool) -> Tensor:
        """Returns flat pinned memory for a copy of `like`."""
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
        """Takes retained memory back that nothing reads any more; `scope`: the one in which it was taken."""
        memory = memory.view(torch.uint8)
        if not captured:
            self._free[memory.nbytes].append(memory)
        elif self.scope is not None and scope is self.scope:
            scope[memory.nbytes].append(memory)


PINNED = Pinned()
_in_flight: deque[Moved] = deque()


class Moved:
    """A tensor that is sent to the host when it is made, and may be read as often as it was saved.

    Args:
        tensor: contiguous, on a CUDA device, complete on the current stream. retain: whether the host memory is kept
            for reuse.

    Raises:
        RuntimeError: a graph is captured, and host memory is not retained or none is left.
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
        self._copied = _event(down)  # after it the device's copy may be freed, or read
        self._loading = False
        _in_flight.append(self)
        while len(_in_flight) > IN_FLIGHT:
            _in_flight.popleft().release()

    def start(self) -> None:
        """Starts the copy back to the device, unless the tensor is there."""
        if self._device is not None:
            return
        self._stream = torch.cuda.current_stream(self._stream.device)
        _, up = _streams(self._stream.device)
        self._device = torch.empty(self._host.numel(), dtype=self._host.dtype, device=self._stream.device)
        up.wait_event(_event(self._stream))  # after previous uses of that memory, and after the copy to the host
        with torch.cuda.stream(up):
            self._device.copy_(self._host, non_blocking=True)
        self._copied = _event(up)
        self._loading = True

    def take(self, shape: torch.Size) -> Tensor:
        """Returns the tensor on the device, for one of the places that saved it."""
        self.start()
        device = self._device
        assert device is not None, "start brings it"
        if self._loading:
            self._wait()
        self._taken += 1
        if self._taken == self.saved:  # a retained graph may read it again
            self._taken = 0
            self.release()
        return device.view(shape)

    def release(self) -> None:
        """Frees the device's copy once the transfer is done."""
        if self._device is not None:
            self._wait()
            self._device = None

    def _wait(self) -> None:
        # An event of a capture is not valid outside it; and a capture begins with a synchronisation.
        if torch.cuda.is_current_stream_capturing() == self.captured:
            self._stream.wait_event(self._copied)

    def __del__(self) -> None:
        if sys.is_finalizing() or not hasattr(self, "_copied"):
            return
        self.release()
        if self._retain:
            PINNED.give_back(self._host, self.captured, self._scope)


def settle() -> None:
    """Makes the compute stream wait for every pending copy."""
    while _in_flight:
        _in_flight.popleft().release()


@contextmanager
def outermost() -> Iterator[None]:
    """Encloses an outermost context: copies must be done when a capture ends, and it has its own pinned memory."""
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        yield
        return
    PINNED.scope = defaultdict(list)
    try:
        yield
    finally:
        settle()
        PINNED.scope = None
