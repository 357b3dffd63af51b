"""How fast are the three grouped GEMMs, compared with a dense GEMM of the same operations and other libraries?

python benchmarks/bench_grouped_matmul.py --device cpu --dtypes float32 bfloat16 float16
python benchmarks/bench_grouped_matmul.py --device cuda --cases A B C --json out.json --plot out.png
python benchmarks/bench_grouped_matmul.py --device cuda --cases router --dtypes float32
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # both frameworks share one GPU here
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks import baselines, harness, plots
from tests import cases

L2_BYTES = 60 << 20  # of an H200; the rotated inputs exceed twice this size


def prepare(problem: cases.Case, product: str, dtype: str, device: str, names: Sequence[str]) -> harness.Block:
    """All candidates on one GEMM of one problem."""
    operand_bytes = 2 * (problem.rows * (problem.k + problem.n) + problem.groups * problem.k * problem.n)
    sets = 1 if device == "cpu" else max(1, min(4, 1 + 2 * L2_BYTES // operand_bytes))
    work = baselines.make_work(product, dtype, list(problem.sizes), problem.rows, problem.k, problem.n, device, sets)
    wanted = baselines.reference(work)
    errors: dict[str, float | None] = {}

    def made(name: str) -> harness.Thunk:
        thunk = baselines.CANDIDATES[name](work)
        dense = name.startswith("dense")  # one GEMM over all groups: there is no grouped result to compare
        errors[name] = None if dense else _error(baselines.result_of(thunk, thunk(0)), wanted, name)
        return thunk

    thunks, skipped = baselines.usable(names, made)
    facts = {"errors": errors, "intensity": work.flops / work.bytes, "sets": sets}
    return harness.Block(problem.name, product, dtype, names, thunks, skipped, work.flops, **facts)


def timed_by_events(block: harness.Block) -> harness.Block:
    """The block without the candidates that long runs cannot time, because their framework has no events."""
    queued = {name for name, thunk in block.thunks.items() if isinstance(thunk, baselines.Queued)}
    thunks = {name: thunk for name, thunk in block.thunks.items() if name not in queued}
    reasons = dict.fromkeys(queued, "long runs are timed by events, which JAX does not have")
    return replace(block, thunks=thunks, skipped={**block.skipped, **reasons})


def gpu_clock(thunk: harness.Thunk, index: int, sets: int) -> float:
    """Events for PyTorch's candidates, ends of queued calls for JAX's."""
    clock = harness.queue_clock if isinstance(thunk, baselines.Queued) else harness.cuda_clock
    return clock(thunk, index, sets)


def _error(result: object, wanted: torch.Tensor, name: str) -> float:
    """Relative Frobenius distance from the float64 result; weight gradients [G, N, K] are compared as [G, K, N]."""
    got = result if isinstance(result, torch.Tensor) else torch.from_dlpack(result)
    got = got.double().to(wanted.device)
    if got.dim() == 3 and name in baselines.TRANSPOSED:
        got = got.transpose(1, 2)
    return float(torch.linalg.vector_norm(got - wanted) / torch.linalg.vector_norm(wanted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cases", nargs="+", help="names of problems in tests/cases.py; default: all for the device")
    parser.add_argument("--products", nargs="+", choices=baselines.PRODUCTS, default=list(baselines.PRODUCTS))
    parser.add_argument(
        "--dtypes", nargs="+", choices=list(baselines.TORCH_DTYPES), default=["float32", "bfloat16", "float16"]
    )
    parser.add_argument(
        "--candidates", nargs="+", choices=list(baselines.CANDIDATES), default=list(baselines.CANDIDATES)
    )
    parser.add_argument("--budget", type=float, default=20.0, help="seconds per block of the table")
    parser.add_argument(
        "--steady", type=float, metavar="SECONDS", help="time each candidate in runs of so many seconds, on a GPU"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.plot and (missing := plots.missing()):
        parser.error(missing)
    protocol = {"clock": harness.cpu_clock if options.device == "cpu" else gpu_clock, "budget_s": options.budget}
    if options.steady is not None:
        if options.device == "cpu":
            parser.error("--steady is for GPUs")
        protocol = harness.steady(options.steady)
    names = list(dict.fromkeys(["dense", *options.candidates]))
    rows = []
    tags = ("cpu_bench",) if options.device == "cpu" else ("bench", "few_rows", "router")
    chosen = [cases.named(name) for name in options.cases or ()]
    for problem in chosen or [case for tag in tags for case in cases.select(tag)]:
        for dtype in options.dtypes:
            for product in options.products:
                block = prepare(problem, product, dtype, options.device, names)
                found = (block if options.steady is None else timed_by_events(block)).rows(**protocol)
                print(harness.table(found), flush=True)
                rows += found
                del block  # its tensors, before those of the next are made
    print(harness.machine())
    if not (options.json or options.plot):
        return
    copy = harness.copy_rate(options.device)
    if options.json:
        harness.save(rows, options.json, copy_bytes_per_s=copy)
    if options.plot:
        plots.grouped_matmul(rows, copy, options.plot)


if __name__ == "__main__":
    main()
