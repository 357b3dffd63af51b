"""How much memory do the grouped GEMMs need in addition to their operands and results?

    python benchmarks/bench_memory.py                 # on a GPU: both frameworks
    python benchmarks/bench_memory.py --device cpu    # JAX alone: its compiler reports what it will allocate

PyTorch: the allocator's peak during a warm call, minus the memory in use before and the results of the call. JAX: the
temporaries of the compiled program, which is not run. This memory must not grow with the problem: the bound is
`REQUIRED_MIB`, and the exit status is 1 if one of ours exceeds it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks import baselines, harness
from tests import cases

REQUIRED_MIB, GOAL_MIB = 8.0, 1.0
TORCH = ("ours, torch, [G,N,K]", "ours, torch, [G,K,N]", "ours, torch, fp32 +=", "torch grouped_mm", "torch loop")
NO_TUNING = {"xla_gpu_autotune_level": 0}  # nothing runs, not even to tune tiles, because some programs would not fit


def torch_mib(name: str, work: baselines.Work) -> float:
    """Memory of the second call in MiB; the first may allocate memory that is kept."""
    thunk = baselines.CANDIDATES[name](work)
    held = thunk(0)
    address = held.data_ptr()
    result_bytes = 0 if name.endswith("+=") else held.nbytes  # the accumulator existed before
    del held
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = thunk(0)
    peak = torch.cuda.max_memory_allocated()
    assert result_bytes or result.data_ptr() == address, "an accumulator must stay where it is"
    return (peak - before - result_bytes) / 2**20


def jax_mib(name: str, work: baselines.Work) -> float:
    """Memory in MiB as the compiler reports it; nothing runs."""
    import jax

    product = baselines.JAX_PRODUCTS[name](work)
    place = jax.devices("cuda" if work.device.type == "cuda" else "cpu")[0]
    with jax.default_device(place):
        lowered = jax.jit(product.function).lower(*product.specs(work))
        compiled = lowered.compile(compiler_options=NO_TUNING if work.device.type == "cuda" else None)
    return compiled.memory_analysis().temp_size_in_bytes / 2**20


def measure(name: str, work: baselines.Work) -> float | str:
    """The memory in MiB, or the reason why it cannot be measured."""
    found, skipped = baselines.usable([name], lambda name: (torch_mib if name in TORCH else jax_mib)(name, work))
    return {**found, **skipped}[name]


def table(case: str, found: dict[str, dict[str, float | str]]) -> str:
    """One line per candidate, one column per GEMM."""
    lines = [f"{case:<10}{'MiB beyond operands and results':<34}" + "".join(f"{p:>12}" for p in baselines.PRODUCTS)]
    for name in next(iter(found.values())):
        values = [found[product][name] for product in baselines.PRODUCTS]
        texts = [f"{v:.3f}" if isinstance(v, float) else "-" for v in values]
        reasons = sorted({v for v in values if isinstance(v, str)})
        lines.append(f"{'':<10}{name:<34}" + "".join(f"{t:>12}" for t in texts) + "".join(f"  {r}" for r in reasons))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--cases", nargs="+", help="names of problems in tests/cases.py; default: all for the device")
    parser.add_argument("--dtype", choices=list(baselines.TORCH_DTYPES), default="bfloat16")
    options = parser.parse_args(arguments)
    names = [*(TORCH if options.device == "cuda" else ()), *baselines.JAX_PRODUCTS]
    worst = 0.0
    for case in cases.select("bench" if options.device == "cuda" else "cpu_bench"):
        if options.cases and case.name not in options.cases:
            continue
        found: dict[str, dict[str, float | str]] = {}
        for product in baselines.PRODUCTS:
            shape = (list(case.sizes), case.rows, case.k, case.n)
            work = baselines.make_work(product, options.dtype, *shape, options.device, 1)
            found[product] = {name: measure(name, work) for name in names}
            ours = [v for name, v in found[product].items() if name.startswith("ours") and isinstance(v, float)]
            worst = max([worst, *ours])
        print(table(case.name, found), flush=True)
    print(f"ours at most {worst:.3f} MiB; required: below {REQUIRED_MIB:.0f}, wanted: below {GOAL_MIB:.0f}")
    print(harness.machine())
    return int(worst >= REQUIRED_MIB)


if __name__ == "__main__":
    sys.exit(main())
