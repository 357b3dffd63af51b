"""Helpers for tests of both frontends on a GPU."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

ROWS = 1024
REPLAYED = (
    (256, 256, 256, 256),
    (1024, 0, 0, 0),
    (0, 0, 0, 1024),
    (1, 15, 127, 800),
    (0, 300, 0, 5),
    (0, 0, 0, 0),
    (129, 128, 127, 640),
    (1000, 1000, 1000, 1000),
    (-7, 500, 3, 90),
)
"""Size vectors with which one captured graph is replayed."""

TEMPORARY_BYTES = 8 << 20
"""Bytes that a product may take besides operands and results, whatever its size."""

FORBIDDEN = ("Synchronize", "Memcpy", "Malloc", "cudaFree", "EventQuery", "StreamQuery")
"""Parts of the names of runtime calls that wait, copy or allocate."""


@contextlib.contextmanager
def _without_garbage() -> Iterator[None]:
    """Around a capture: cyclic garbage is collected before, and none inside.

    A graph that a caught exception's traceback holds is such garbage, and so is each pair of graphs that
    `make_graphed_callables` made. CUDA does not let it be destroyed while another one is captured: were it collected
    then, the capture would be invalid, and with it PyTorch's random generator.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def capture(graph: torch.cuda.CUDAGraph | None = None, **options: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """`torch.cuda.graph`, with cyclic garbage out of the way.

    Threads of XLA, which the tests of both frameworks have in one process, may allocate or wait meanwhile: only what
    this thread does can make the capture invalid.
    """
    graph = torch.cuda.CUDAGraph() if graph is None else graph
    with _without_garbage(), torch.cuda.graph(graph, **{"capture_error_mode": "thread_local", **options}):
        yield graph


def graphed(function: Callable[..., Any], sample: tuple[torch.Tensor, ...]) -> Any:
    """`torch.cuda.make_graphed_callables`, with cyclic garbage out of the way."""
    with _without_garbage():
        return torch.cuda.make_graphed_callables(function, sample)


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of `run`, warmed up on another stream, and the tensors that its replays fill."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    with capture() as graph:
        results = run()
    return graph, results


def temporary_bytes(call: Callable[[], Sequence[torch.Tensor]]) -> int:
    """The most memory that a warm `call` takes beyond its results."""
    kept = call()
    del kept
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    return torch.cuda.max_memory_allocated() - before - sum(result.nbytes for result in results)


def launches_only(run: Callable[[], Any]) -> list[str]:
    """The runtime calls of a warm `run`, seen by the profiler: only launches and memsets."""
    # The allocator gets room, small and large: in which pieces it gives memory differs from run to run, and what it
    # then asks the driver for is not a call of `run`.
    room = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in [1 << 19] * 64 + [1 << 24] * 8]
    del room
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    torch.empty(
        1, device="cuda"
    )  # the allocator asks here for events of blocks that earlier tests used on several streams
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        ) as seen:
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    runtime = [e.name for e in seen.events() or [] if e.name.startswith("cu") and "::" not in e.name]
    assert any("Launch" in name for name in runtime), f"the profiler saw no launch: {runtime}"
    last = max(i for i, name in enumerate(runtime) if "Launch" in name)  # the profiler ends with a sync
    found = runtime[: last + 1]
    assert not [name for name in found if any(word in name for word in FORBIDDEN)], found
    return found
