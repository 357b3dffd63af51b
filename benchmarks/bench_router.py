"""How fast is the weight gradient of a router, one group with a long sum and a small result, in float32?

python benchmarks/bench_router.py

Calls are captured in a graph, because the host takes longer to enqueue one than the GPU takes to run it. They are
compared with PyTorch's dense GEMMs, which take the one group as it is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import torch_bridge
from benchmarks import harness
from grouped_core.recipes import FP32
from tests import cases

CALLS, REPLAYS = 20, 15
RECIPES = {
    "tf32x3": FP32,
    "tf32x3, sums whole": FP32.replace(batch_invariant=True),
    "tf32": FP32.replace(fp32="tf32"),
    "tf32, sums whole": FP32.replace(fp32="tf32", batch_invariant=True),
}


def graphed_us(call: Callable[[], object]) -> float:
    """Median time in microseconds of one of `CALLS` calls in a graph."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CALLS)
    return median(times)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.manual_seed(0)
    torch.cuda.set_stream(torch.cuda.Stream())
    case = cases.named("router")
    x, dy = torch.randn(case.rows, case.k, device="cuda"), torch.randn(case.rows, case.n, device="cuda")
    sizes = torch.tensor(case.sizes, dtype=torch.int32, device="cuda")

    def row(name: str, call: Callable[[], object]) -> None:
        time_us = graphed_us(call)
        print(
            f"{name:<32}{time_us:>9.1f} us{2 * case.valid * case.k * case.n / time_us / 1e6:>9.1f} TFLOP/s", flush=True
        )

    for transposed, layout in ((True, "[G,N,K]"), (False, "[G,K,N]")):
        shape = (1, case.n, case.k) if transposed else (1, case.k, case.n)
        w = torch.randn(shape, device="cuda", requires_grad=True)
        for name, recipe in RECIPES.items():
            y = torch_bridge.grouped_linear(x, w, sizes, rhs_transposed=transposed, recipe=recipe)
            row(f"ours, {layout}, {name}", lambda y=y, w=w: torch.autograd.grad(y, w, dy, retain_graph=True))
    for allowed in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        row(f"torch.mm, {'TF32' if allowed else 'IEEE'}", lambda: torch.mm(dy.T, x))
    print(harness.machine())


if __name__ == "__main__":
    main()
