"""Which share of the memory bandwidth do small batches reach, where reading the experts' weights dominates?

    python benchmarks/bench_decode.py [--formats mxfp8 nvfp4] [--cases decode_qwen3_64]

Each call is replayed from a captured CUDA graph; PyTorch's `grouped_mm` is measured too, and DeepGEMM's masked product
where it is installed. The share is the bytes that must move (weights of the experts that have rows, x and y) over the
time, divided by the rate of a large device copy in the same run. Several sets of weights are rotated so that they do
not stay in the L2. With --formats the rows are bf16, the weights are quantised in these formats, and the bytes are
those of codes and scales.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks import baselines, coded, harness
from tests import cases

ROTATED_BYTES = 256 << 20  # several times the L2
CANDIDATES = ("ours, torch, [G,N,K]", "ours, torch, [G,K,N]", "torch grouped_mm", "DeepGEMM masked")


@dataclass
class Captured:
    """A call that was captured as a graph for each input set. The graphs read memory that belongs to the call."""

    call: harness.Thunk
    graphs: list[torch.cuda.CUDAGraph]

    def __call__(self, i: int) -> None:
        self.graphs[i].replay()


def captured(thunk: harness.Thunk, sets: int) -> Captured:
    """Captures the call on each input set as a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(sets):
            thunk(i)
    torch.cuda.current_stream().wait_stream(stream)
    graphs = []
    for i in range(sets):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            thunk(i)
        graphs.append(graph)
    return Captured(thunk, graphs)


def measure_weights(case: cases.Case, formats: list[str], rate: float, budget: float) -> None:
    """Weights quantised in each of `formats`; prints the time in microseconds and the share."""
    active = sum(size > 0 for size in case.sizes)
    for name in formats:
        _, weight = coded.specs(case, "forward", ("bf16", name))
        stored = coded.bytes_of(weight)
        sets = max(1, min(8, -(-ROTATED_BYTES // stored)))
        thunk, kernel = coded.thunk(case, "forward", ("bf16", name), sets)
        replay = captured(thunk, sets)
        timing = harness.measure({name: replay}, clock=harness.cuda_clock, sets=sets, rounds=20, budget_s=budget)[name]
        moved = stored * active / case.groups + 2 * case.rows * (case.k + case.n)
        share = moved / timing.median_us * 1e6 / rate
        print(f"{case.name:<22}{name:<14}{kernel:<34}{timing.median_us:>10.1f}{share:>10.3f}", flush=True)


def measure_plain(case: cases.Case, rate: float, budget: float) -> None:
    """Weights in bf16; prints the share of each candidate."""
    weight_bytes = 2 * case.groups * case.k * case.n
    sets = max(1, min(8, -(-ROTATED_BYTES // weight_bytes)))
    work = baselines.make_work("forward", "bfloat16", list(case.sizes), case.rows, case.k, case.n, "cuda", sets)
    active = sum(size > 0 for size in case.sizes)
    moved = 2 * (active * case.k * case.n + case.rows * (case.k + case.n))
    thunks, skipped = baselines.usable(CANDIDATES, lambda name: captured(baselines.CANDIDATES[name](work), sets))
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}", file=sys.stderr)
    timings = harness.measure(thunks, clock=harness.cuda_clock, sets=sets, rounds=30, budget_s=budget)
    shares = {name: f"{moved / each.median_us * 1e6 / rate:.3f}" for name, each in timings.items()}
    print(f"{case.name:<22}" + "".join(f"{shares.get(name, '-'):>24}" for name in CANDIDATES), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=[], help="of quantised weights")
    parser.add_argument("--cases", nargs="+", default=[case.name for case in cases.select("decode")])
    parser.add_argument("--budget", type=float, default=1.0, help="seconds per case, or case and format")
    arguments = parser.parse_args()
    rate = harness.copy_rate("cuda")
    print(f"copy {rate / 1e12:.2f} TB/s")
    if not arguments.formats:
        print(f"{'case':<22}" + "".join(f"{name:>24}" for name in CANDIDATES))
    for case in map(cases.named, arguments.cases):
        if arguments.formats:
            measure_weights(case, arguments.formats, rate, arguments.budget)
        else:
            measure_plain(case, rate, arguments.budget)
    print(harness.machine())


if __name__ == "__main__":
    main()
