"""How fast is a training step of `nn.GroupedMLP` in several microbatches, and how much memory does it need, by recipe?

    python benchmarks/bench_step.py                                # the models' shapes, 4 microbatches, on a GPU
    python benchmarks/bench_step.py --cases D --microbatches 8
    python benchmarks/bench_step.py --device cpu --cases jagged

A step is forward and backward of every microbatch, and with delayed scaling the update of its state; the optimizer is
not part of it. The first microbatch quantises the weights into the cache of the layer, which the others read; "each"
quantises them in every microbatch and keeps nothing, with "primary" the Parameters themselves are quantised, and with
"one form" the cache has the codes of forward alone, which dgrad reads as well. With "input weights" a pass saves
weights as they came, with "input" rows too. Weight gradients are added to `main_grad` in float32 by our kernels, or to
`.grad` by autograd. Times are those of a microbatch, shares are over bf16 in the same run.

Memory is PyTorch's peak in a step without the parameters, the gradients of weights and the rows that the caller holds.
The quantised weights in the cache count, though they stay from step to step; the gradient of x counts too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import torch_bridge
from benchmarks import harness
from benchmarks.bench_mlp import Work, make_work
from grouped_core.recipes import RECIPES
from tests import cases
from torch_bridge import nn

BF16, EACH, PRIMARY = "bf16", ", each", ", primary"
SAVED: dict[str, dict[str, str]] = {
    ", one form": {"saved_weights": "forward"},
    ", input weights": {"saved_weights": "input"},
    ", input": {"saved_weights": "input", "saved": "input"},
}
"""What a recipe saves for backward, by the end of a candidate's name."""
DESTINATIONS = ("main_grad", ".grad")
DEFAULT = (BF16, "FP8Delayed", "FP8Current", "FP8Block")
CANDIDATES = (
    BF16,
    *(name + how for name, each in RECIPES.items() if each.quantized for how in ("", EACH, PRIMARY)),
    *(name + ", one form" + how for name in ("FP8Delayed", "FP8Current") for how in ("", EACH, PRIMARY)),
    *(
        name + saved + EACH
        for name in ("FP8Delayed", "FP8Current", "FP8Block")
        for saved in (", input weights", ", input")
    ),
)


class Memory(NamedTuple):
    """Bytes in a step: the peak, of which the quantised weights that stay in the layer are a part."""

    case: str
    destination: str
    candidate: str
    peak: int
    codes: int


class Step:
    """A layer, and one step of it.

    Args:
        candidate: one of `CANDIDATES`. main_grads: where weight gradients are added, None for `.grad`.
    """

    def __init__(
        self, work: Work, candidate: str, microbatches: int, main_grads: Sequence[torch.Tensor] | None
    ) -> None:
        recipe = RECIPES.get(candidate.split(",")[0])
        saved = SAVED.get(candidate.removesuffix(EACH).removesuffix(PRIMARY).removeprefix(candidate.split(",")[0]))
        if recipe is not None and saved is not None:
            recipe = recipe.replace(**saved)
        groups, wide, hidden = work.wi.shape
        options: dict[str, Any] = {"dtype": work.wi.dtype, "device": work.wi.device, "recipe": recipe}
        options |= {"single_grouped_weight": True, "quantized_weights": candidate.endswith(PRIMARY)}
        options |= {"accumulate_into_main_grad": main_grads is not None}
        self.layer = nn.GroupedMLP(groups, hidden, wide // 2, **options)
        self.parameters: list[Any] = [layer.weight for layer in (self.layer.linear_fc1, self.layer.linear_fc2)]
        with torch.no_grad():
            for parameter, values in zip(self.parameters, (work.wi, work.wo), strict=True):
                parameter.copy_(values)
        for parameter, main_grad in zip(self.parameters, main_grads or (), strict=main_grads is not None):
            parameter.main_grad = main_grad
        self.x, self.dy, self.sizes = work.x.detach().requires_grad_(), work.dy, work.sizes
        self.first = [None if candidate.endswith(EACH) else at == 0 for at in range(microbatches)]

    def __call__(self, _: int) -> None:
        for first in self.first:
            self.layer(self.x, self.sizes, is_first_microbatch=first).backward(self.dy)
            self.x.grad = None
        if self.layer.scaling_state is not None:
            torch_bridge.update_scaling(self.layer.scaling_state)
        for parameter in self.parameters:
            parameter.grad = None


def allocated() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def peak_of(step: Step) -> int:
    """Bytes at the peak of a step, without those in use before it and without gradients of weights."""
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    step(0)
    torch.cuda.synchronize()
    own = 0 if step.layer.linear_fc1.accumulate_into_main_grad else sum(each.nbytes for each in step.parameters)
    return torch.cuda.max_memory_allocated() - before - own


def bench(
    case: cases.Case, device: str, names: Sequence[str], microbatches: int, budget_s: float
) -> tuple[list[harness.Row], list[Memory]]:
    """All candidates on one case, with both destinations of weight gradients."""
    work = make_work(case, "bfloat16", device)
    of_step = harness.cpu_clock if device == "cpu" else harness.cuda_clock

    def clock(thunk: harness.Thunk, index: int, sets: int) -> float:
        return of_step(thunk, index, sets) / microbatches

    main_grads = [torch.zeros(each.shape, device=device) for each in (work.wi, work.wo)]  # shared by the candidates
    rows: list[harness.Row] = []
    memory: list[Memory] = []
    for destination in DESTINATIONS:
        steps: dict[str, Step] = {}
        for name in names:
            steps[name] = Step(work, name, microbatches, main_grads if destination == "main_grad" else None)
            before = allocated() if device == "cuda" else 0
            steps[name](0)
            if device == "cuda":
                codes = allocated() - before
                memory.append(Memory(case.name, destination, name, peak_of(steps[name]) + codes, codes))
        times = harness.measure(steps, clock=clock, budget_s=budget_s / len(DESTINATIONS) / microbatches)
        for name, timing in times.items():
            rate, share = 3 * work.flops / timing.median_us / 1e6, times[BF16].median_us / timing.median_us
            facts = (case.name, destination, "bfloat16", name, timing, rate, share)
            rows.append(harness.Row(*facts, "bf16 in the same step", None))
    return rows, memory


def memory_table(memory: Sequence[Memory]) -> str:
    """One line per candidate."""
    peaks = {(each.destination, each.candidate): each.peak for each in memory}
    return "\n".join(
        f"{each.case:<16}{each.destination:<10}{each.candidate:<32}peak MiB {each.peak / 2**20:>8.0f}, of which cached "
        f"weights {each.codes / 2**20:>6.0f}; over bf16 {each.peak / peaks[each.destination, BF16]:.2f}"
        for each in memory
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--cases", nargs="+", help="names of problems in tests/cases.py; default: all for the device")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=DEFAULT)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds per case")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = list(dict.fromkeys([BF16, *options.candidates]))
    chosen = [cases.named(name) for name in options.cases or ()]
    rows: list[harness.Row] = []
    memory: list[Memory] = []
    for case in chosen or cases.select("cpu_bench" if options.device == "cpu" else "bench"):
        block, peaks = bench(case, options.device, names, options.microbatches, options.budget)
        print(harness.table(block), *([memory_table(peaks)] if peaks else ()), harness.machine(), sep="\n", flush=True)
        rows, memory = rows + block, memory + peaks
        if options.device == "cuda":
            torch.cuda.empty_cache()
    if options.json:
        harness.save(rows, options.json, memory=[each._asdict() for each in memory])


if __name__ == "__main__":
    main()
