"""The measuring protocol, in one place.

- Candidates of one table run in one process, interleaved round by round, so that drift in clocks and temperature
  affects all of them; only ratios within one run are compared.
- Inputs are random normal with a fixed seed (zeros draw less power, so they would look faster). On a GPU several input
  sets are rotated that together exceed twice the L2.
- Warm-up rounds are discarded; the median is reported, with the 10th and 90th percentile as spread.
- On a GPU a candidate is timed by events around its launches, a JAX candidate by the wall clock between the ends of
  queued calls; on a CPU by the wall clock around the finished call.
- Long runs (`steady`) also report the power that the GPU draws and the clock of its multiprocessors.
"""

from __future__ import annotations

import json
import platform
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Thunk = Callable[[int], Any]
"""Runs one call on input set `i`."""


@dataclass(frozen=True)
class Timing:
    """Time of one call in microseconds; in long runs the mean power in watts and clock in MHz, where they are known."""

    median_us: float
    p10_us: float
    p90_us: float
    rounds: int
    watts: float | None = None
    mhz: float | None = None

    @property
    def spread(self) -> float:
        """Half the distance between the percentiles, as a share of the median."""
        return (self.p90_us - self.p10_us) / (2 * self.median_us)


def cpu_clock(thunk: Thunk, index: int, sets: int) -> float:
    """Wall time of one finished call in microseconds. The thunk blocks until its result is ready."""
    start = time.perf_counter_ns()
    thunk(index % sets)
    return (time.perf_counter_ns() - start) / 1e3


CUDA_LEAD = 2
CUDA_CALLS = 4


def cuda_clock(thunk: Thunk, index: int, sets: int) -> float:
    """Mean time in microseconds of `CUDA_CALLS` calls between two events on PyTorch's current stream.

    `CUDA_LEAD` calls before the first event keep the GPU busy while the host enqueues the others, so host time is not
    included, and the GPU runs at the clocks and power of steady work.
    """
    for i in range(CUDA_LEAD):
        thunk((index + i) % sets)
    return _timed(thunk, index, sets, CUDA_CALLS)


def _timed(thunk: Thunk, index: int, sets: int, calls: int) -> float:
    """Mean time in microseconds of calls between two events."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for i in range(calls):
        thunk((index + i) % sets)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / calls


Clock = Callable[[Thunk, int, int], float]


class Sensors:
    """Power and multiprocessor clock of the current GPU, reported by `nvidia-smi` every 20 ms until its block ends."""

    def __init__(self) -> None:
        query = ["--query-gpu=power.draw.instant,clocks.sm", "--format=csv,noheader,nounits", "-lms", "20"]
        command = ["nvidia-smi", *_current_gpu(), *query]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._readings: list[tuple[float, float, float]] = []  # time, watts, MHz
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                try:
                    watts, mhz = map(float, line.split(","))
                except ValueError:  # "[N/A]"
                    continue
                self._readings.append((time.perf_counter(), watts, mhz))

    def between(self, start: float, end: float) -> list[tuple[float, float]]:
        """The readings (watts, MHz) between two times of `time.perf_counter`."""
        return [(watts, mhz) for at, watts, mhz in self._readings if start <= at <= end]

    def __enter__(self) -> Sensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._reader.join()


def _current_gpu() -> list[str]:
    """The option of `nvidia-smi` that names PyTorch's current GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return ["-i", f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"]


def steady(seconds: float) -> dict[str, Any]:
    """Options of `measure` for long runs: three of `seconds`, each after a warm-up of half as many calls.

    A GPU at its power limit takes some tenths of a second to reach the clock of its work; in short interleaved runs
    each candidate is affected by the heat and clocks of the others. Power and clock are read in the second half of
    each warm-up and run together.
    """

    def clock(thunk: Thunk, index: int, sets: int) -> float:
        calls = max(CUDA_CALLS, int(seconds * 1e6 / cuda_clock(thunk, index, sets)))
        _timed(thunk, index, sets, calls // 2)
        return _timed(thunk, index, sets, calls)

    return {"clock": clock, "rounds": 3, "warmup": 1, "sensors": True}


def queue_clock(thunk: Thunk, index: int, sets: int) -> float:
    """The same for thunks that return JAX arrays, because JAX has no events. It measures from the end of the leading
    calls to the end of the others, all of which are queued before the first has ended.
    """
    for i in range(CUDA_LEAD):
        before = thunk((index + i) % sets)
    for i in range(CUDA_CALLS):
        last = thunk((index + i) % sets)
    before.block_until_ready()
    start = time.perf_counter_ns()
    last.block_until_ready()
    return (time.perf_counter_ns() - start) / 1e3 / CUDA_CALLS


COPY_BYTES = 2 << 30


REPEATS = 10
"""Calls that a thunk of `captured` usually makes."""


def captured(call: Callable[[], Any], device: str, repeats: int = REPEATS) -> Thunk:
    """`call` as a thunk that repeats it; on a GPU replayed from a graph, so that launches cost no time on the host."""

    def repeat() -> None:
        for _ in range(repeats):
            call()

    if device == "cpu":
        return lambda _: repeat()
    import torch

    beside = torch.cuda.Stream()  # where autograd warms up for a capture
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        repeat()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as that which watches over collectives, may call CUDA during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        repeat()
    return lambda _: graph.replay()


def copy_rate(device: str) -> float:
    """Bytes read and written per second by a large copy: the upper bound for memory-bound work."""
    import torch

    size = COPY_BYTES if device == "cuda" else COPY_BYTES >> 3
    source, target = (torch.empty(size, dtype=torch.uint8, device=device).random_(0, 255) for _ in range(2))
    clock = cuda_clock if device == "cuda" else cpu_clock
    timing = measure({"copy": lambda i: target.copy_(source)}, clock=clock, rounds=20)["copy"]
    return 2 * size / timing.median_us * 1e6


def measure(
    thunks: Mapping[str, Thunk],
    *,
    clock: Clock = cpu_clock,
    sets: int = 1,
    warmup: int = 3,
    rounds: int = 30,
    budget_s: float = 60.0,
    sensors: bool = False,
) -> dict[str, Timing]:
    """Times every thunk `rounds` times, interleaved, or fewer times once `budget_s` is spent.

    Each thunk gets at most an equal share of the budget, but at least five rounds. If its first call takes longer than
    its share, that call is the only sample.

    Args:
        sensors: whether power and clock of the GPU are read, during the second half of each call of `clock`.
    """
    readings: dict[str, list[tuple[float, float]]] = {name: [] for name in thunks}
    samples: dict[str, list[float]] = {name: [] for name in thunks}
    share = budget_s / max(1, len(thunks)) * 1e6
    quick = {}
    for name, thunk in thunks.items():
        first = clock(thunk, 0, sets)
        if first > share:  # one call uses its whole share and is its only sample
            samples[name].append(first)
        else:
            quick[name] = thunk
    for i in range(1, warmup):
        for thunk in quick.values():
            clock(thunk, i, sets)
    order = list(quick.items())
    shuffled = random.Random(0)
    with Sensors() if sensors and shutil.which("nvidia-smi") else nullcontext() as watch:
        for i in range(rounds):
            shuffled.shuffle(order)  # no candidate always follows the same predecessor: that leaves the GPU hot or cool
            for name, thunk in order:
                if i < 5 or sum(samples[name]) < share:
                    start = time.perf_counter()
                    samples[name].append(clock(thunk, i, sets))
                    end = time.perf_counter()
                    if watch is not None:
                        readings[name] += watch.between((start + end) / 2, end)
    return {name: _timing(values, readings[name]) for name, values in samples.items()}


def _timing(values: Sequence[float], readings: Sequence[tuple[float, float]]) -> Timing:
    p10, median, p90 = np.percentile(values, [10, 50, 90])
    watts, mhz = np.mean(readings, axis=0).tolist() if readings else (None, None)
    return Timing(float(median), float(p10), float(p90), len(values), watts, mhz)


def machine() -> dict[str, Any]:
    """The machine and the versions that the numbers were measured with."""
    facts: dict[str, Any] = {
        "platform": platform.platform(),
        "processor": _cpu_name(),
        "cores": _cores(),
        "python": sys.version.split()[0],
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain") else ""),
    }
    for module in ("jax", "torch", "numpy"):
        if module in sys.modules:
            facts[module] = sys.modules[module].__version__
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        facts["gpu"] = sys.modules["torch"].cuda.get_device_name()
        facts["gpu_state"] = _run(
            "nvidia-smi", "--query-gpu=clocks.sm,temperature.gpu,power.draw", "--format=csv,noheader"
        )
    return facts


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _git(*arguments: str) -> str:
    return _run("git", "-C", str(Path(__file__).parent), *arguments)


@dataclass(frozen=True)
class Row:
    """One row of a table: a candidate on a problem."""

    case: str
    product: str
    dtype: str
    candidate: str
    timing: Timing | None
    tflops: float | None  # useful floating-point operations (only rows that belong to groups) over the median
    share: float | None  # share of the row's upper bound, measured in the same run
    bound: str  # what the upper bound is
    error: float | None  # relative Frobenius distance from the float64 result
    intensity: float | None = None  # useful operations per byte of operands and result
    skipped: str = ""  # the reason if there is no number


@dataclass(frozen=True)
class Block:
    """The candidates of one problem, ready to be timed by one protocol or several.

    "dense" is among them: it does as many operations as the others and is their upper bound.
    """

    case: str
    product: str
    dtype: str
    names: Sequence[str]  # in the order of the table, those that cannot take part among them
    thunks: Mapping[str, Thunk]
    skipped: Mapping[str, str]  # why the others cannot take part
    flops: float
    bound: str = "dense product of the same operations"
    errors: Mapping[str, float | None] = field(default_factory=dict)
    intensity: float | None = None
    sets: int = 1

    def rows(self, **protocol: Any) -> list[Row]:
        """Times all candidates; `protocol`: options of `measure`."""
        timings = measure(self.thunks, sets=self.sets, **protocol)
        bound_us = timings["dense"].median_us
        facts = (self.case, self.product, self.dtype)
        rows = []
        for name in self.names:
            timing = timings.get(name)
            rate = share = None
            if timing is not None:
                rate, share = self.flops / timing.median_us / 1e6, bound_us / timing.median_us
            found = (timing, rate, share, self.bound, self.errors.get(name), self.intensity)
            rows.append(Row(*facts, name, *found, skipped=self.skipped.get(name, "")))
        return rows


def table(rows: Sequence[Row]) -> str:
    """Formats the rows as fixed-width text."""
    head = f"{'case':<16}{'product':<10}{'dtype':<10}{'candidate':<30}"
    head += f"{'us':>11}{'+-':>6}{'TFLOP/s':>10}{'share':>8}{'error':>10}"
    if any(r.timing is not None and r.timing.watts is not None for r in rows):
        head += f"{'W':>6}{'MHz':>6}"
    lines = [head, "-" * len(head)]
    for r in rows:
        left = f"{r.case:<16}{r.product:<10}{r.dtype:<10}{r.candidate:<30}"
        if r.timing is None:
            lines.append(f"{left}  skipped: {r.skipped}")
            continue
        share = "" if r.share is None else f"{r.share:.3f}"
        error = "" if r.error is None else f"{r.error:.1e}"
        tflops = "" if r.tflops is None else f"{r.tflops:.3f}"
        chip = "" if r.timing.watts is None else f"{r.timing.watts:>6.0f}{r.timing.mhz:>6.0f}"
        lines.append(f"{left}{r.timing.median_us:>11.1f}{r.timing.spread:>6.0%}{tflops:>10}{share:>8}{error:>10}{chip}")
    return "\n".join(lines)


def save(rows: Sequence[Row], path: Path, **extra: Any) -> None:
    """Writes the rows and the description of the machine as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), "rows": [asdict(r) for r in rows], **extra}, indent=1))
