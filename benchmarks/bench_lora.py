"""What do adapters of frozen experts cost, and a frozen base of four bits?

    python benchmarks/bench_lora.py                    # the models' shapes, forward and backward, on a GPU
    python benchmarks/bench_lora.py --kernels          # what runs on the GPU in a step, by PyTorch's profiler
    python benchmarks/bench_lora.py --products         # the products with adapters alone, beside the rate of a copy
    python benchmarks/bench_lora.py --steady 0.4       # long runs: each candidate at the clock of its own work
    python benchmarks/bench_lora.py --device cpu

The experts' MLP of sorted rows whose x needs a gradient: with frozen weights alone, and with adapters of both weights.
"adapters" is the time over that of the same base without them, "base" that of a frozen base over the bf16 one.
`--products` shows a row per product of a step that has `--rank` columns or rows: u = x A, v = dy B^T, and the gradients
of A and B, of wi and wo, and "v, dB", the call that makes both from one pass over dy; "share" is the rate of the bytes
of operands and results over that of a copy.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import torch_bridge
from benchmarks import coded, harness
from benchmarks.bench_moe import LAYERS, SMALL, Layer
from grouped_core import calls
from grouped_core.calls import ArraySpec
from grouped_core.recipes import BF16

BASES = ("bf16", "mxfp4")


class Work:
    """The operands of one shape."""

    def __init__(self, layer: Layer, rank: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def drawn(*shape: int) -> torch.Tensor:
            made = torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=generator)
            return made.mul_(shape[-1] ** -0.5)

        rows, experts = layer.tokens * layer.k, layer.experts
        chosen = torch.randint(experts, (rows,), device=device, generator=generator)
        self.sizes = torch.bincount(chosen, minlength=experts).int()
        self.x = drawn(rows, layer.hidden).requires_grad_()
        self.dy = drawn(rows, layer.hidden)
        wi = drawn(experts, 2 * layer.width, layer.hidden)
        wo = drawn(experts, layer.hidden, layer.width)
        self.weights: dict[str, Any] = {"bf16": (wi, wo)}
        self.weights["mxfp4"] = tuple(torch_bridge.quantize(each, "mxfp4", axis=2) for each in (wi, wo))
        self.lora = (
            (drawn(experts, rank, layer.hidden), drawn(experts, 2 * layer.width, rank)),
            (drawn(experts, rank, layer.width), drawn(experts, layer.hidden, rank)),
        )
        self.factors = [each.requires_grad_() for pair in self.lora for each in pair]

    def step(self, base: str, adapted: bool, index: int = 0) -> None:
        """Forward and backward."""
        del index
        options: dict[str, Any] = {"lora": self.lora, "lora_scaling": 1.0} if adapted else {}
        y = torch_bridge.grouped_mlp(self.x, *self.weights[base], self.sizes, **options)
        torch.autograd.grad(y, [self.x, *self.factors] if adapted else [self.x], self.dy)


def thunks_of(work: Work, bases: list[str]) -> dict[str, harness.Thunk]:
    """The candidates: each base, without and with adapters."""
    return {
        f"{base}{', adapters' if adapted else ''}": partial(work.step, base, adapted)
        for base in bases
        for adapted in (False, True)
    }


PRODUCTS = {"u": (1, 2), "v": (1, 1), "dA": (0, 0), "dB": (0, 0)}
"""The contracted axes of both operands."""
BOTH = "v, dB"


def product_thunk(name: str, work: Work, width: tuple[int, int], rank: int, kernel: str) -> tuple[harness.Thunk, float]:
    """A product with A [G, r, K] or B [G, N, r], (K, N) = `width`, and the bytes of its operands and its result."""
    rows, groups, (k, n) = len(work.x), len(work.sizes), width
    sizes = ArraySpec((groups,), "int32")
    given: dict[str, Any] = {"recipe": BF16, "implementation": kernel}
    if name == BOTH:
        shapes = {"rows": (rows, n), "factor": (groups, n, rank), "low_rows": (rows, rank)}
        specs = {each: ArraySpec(shape, "bfloat16") for each, shape in shapes.items()}
        of_both = (specs["rows"], specs["factor"], 1, specs["low_rows"], sizes, ("bfloat16", "bfloat16"))
        return launched(calls.low_rank_grads(*of_both, **given), specs, work)
    lhs, rhs = {
        "u": ((rows, k), (groups, rank, k)),
        "v": ((rows, n), (groups, n, rank)),
        "dA": ((rows, rank), (rows, k)),
        "dB": ((rows, n), (rows, rank)),
    }[name]
    specs = {"lhs": ArraySpec(lhs, "bfloat16"), "rhs": ArraySpec(rhs, "bfloat16")}
    call = calls.grouped_matmul(specs["lhs"], specs["rhs"], PRODUCTS[name], sizes, "bfloat16", **given)
    return launched(call, specs, work)


def launched(call: calls.Call, specs: dict[str, ArraySpec], work: Work) -> tuple[harness.Thunk, float]:
    """A call on random operands of these specs, and the bytes of operands and results."""
    device = work.x.device
    drawn = {name: torch.randn(*each.shape, device=device, dtype=torch.bfloat16) for name, each in specs.items()}
    run, _ = coded.launched(call, [{**drawn, "group_sizes": work.sizes}])
    return run, float(sum(coded.bytes_of(each) for each in (*specs.values(), *call.outputs) if each is not None))


def show_products(work: Work, layer: Layer, rank: int, kernels: list[str], budget: float) -> None:
    """Prints the time of each product with A and B, by each kernel, and its rate over that of a copy."""
    device = work.x.device.type
    copied, clock = harness.copy_rate(device), harness.cuda_clock if device == "cuda" else harness.cpu_clock
    for of, width in (("wi", (layer.hidden, 2 * layer.width)), ("wo", (layer.width, layer.hidden))):
        for name in (*PRODUCTS, BOTH):
            made = {kernel: product_thunk(name, work, width, rank, kernel) for kernel in kernels}
            thunks = {kernel: thunk for kernel, (thunk, _) in made.items()}
            found = harness.measure(thunks, clock=clock, budget_s=budget / 8)
            for kernel, (_, moved) in made.items():
                took = found[kernel].median_us
                share = moved / took * 1e6 / copied
                print(
                    f"{layer.name:<16}{name} of {of:<6}{kernel or 'chosen':<34}{took:>10.1f} us{share:>8.2f}",
                    flush=True,
                )


def show_kernels(work: Work, bases: list[str]) -> None:
    """Prints the time of each kernel in a step with adapters."""
    for base in bases:
        for _ in range(2):
            work.step(base, True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work.step(base, True)
            torch.cuda.synchronize()
        print(f"{base}, adapters")
        for event in sorted(profile.events() or (), key=lambda each: each.time_range.start):
            print(f"  {event.device_time:>9.1f} us  {event.name[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--layers", nargs="+", help="names; default: all")
    parser.add_argument("--bases", nargs="+", choices=BASES, default=list(BASES))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--budget", type=float, default=4.0, help="seconds per shape")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--products", nargs="*", help="names of kernels; default: the one that is chosen")
    parser.add_argument(
        "--steady", type=float, help="seconds of each of three long runs, instead of short ones in turns"
    )
    options = parser.parse_args()
    layers = SMALL if options.device == "cpu" else LAYERS
    clock = harness.cpu_clock if options.device == "cpu" else harness.cuda_clock
    print(f"{'shape':<16}{'candidate':<18}{'us':>10}{'adapters':>10}{'base':>8}{'peak MiB':>10}")
    for layer in layers:
        if options.layers and layer.name not in options.layers:
            continue
        work = Work(layer, options.rank, options.device)
        if options.kernels:
            show_kernels(work, options.bases)
            continue
        if options.products is not None:
            show_products(work, layer, options.rank, options.products or [""], options.budget)
            continue
        thunks = thunks_of(work, options.bases)
        peaks: dict[str, float] = {}
        for name, thunk in thunks.items():
            if options.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
                thunk(0)
                peaks[name] = (torch.cuda.max_memory_allocated() - held) / 2**20
        how = harness.steady(options.steady) if options.steady else {"clock": clock, "rounds": 20}
        found = harness.measure(thunks, budget_s=options.budget, **how)
        first = found[next(iter(found))].median_us
        for base in options.bases:
            alone = found[base].median_us
            for name in (base, f"{base}, adapters"):
                took = found[name].median_us
                ratio = f"{took / alone:.2f}" if name != base else ""
                over = f"{took / first:.2f}" if name == base else ""
                row = f"{layer.name:<16}{name:<18}{took:>10.1f}{ratio:>10}{over:>8}{peaks.get(name, 0):>10.0f}"
                print(row, flush=True)
        del work, thunks
    print(harness.machine())


if __name__ == "__main__":
    main()
