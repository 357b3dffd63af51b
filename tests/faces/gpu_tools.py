"""What the tests of both faces on a GPU share."""

from __future__ import annotations

from collections.abc import Callable
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
"""Size vectors that one captured graph is replayed with."""

FORBIDDEN = ("Synchronize", "Memcpy", "Malloc", "cudaFree", "EventQuery", "StreamQuery")
"""Parts of the names of runtime calls that wait, copy or allocate."""


def launches_only(run: Callable[[], Any]) -> None:
    """The runtime calls of a warm `run`, counted by the profiler: launches and memsets alone."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
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
    assert not [name for name in runtime[: last + 1] if any(word in name for word in FORBIDDEN)], runtime[: last + 1]
