"""How fast is the MoE MLP, and how much memory does it need, compared with dense GEMMs and other libraries?

    python benchmarks/bench_mlp.py                      # the models' shapes, SwiGLU, bf16, on a GPU
    python benchmarks/bench_mlp.py --cases parts        # first GEMM + activation, and gradients at the hidden rows
    python benchmarks/bench_mlp.py --lists --cases C D  # recipes with one Parameter per expert and with packed weights
    python benchmarks/bench_mlp.py --device cpu

The bound of a row is the time of dense GEMMs with the same operations in the same run: two for forward, six with
backward. Memory is PyTorch's peak during forward and backward, minus the memory in use before and the gradients.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import torch_bridge
from benchmarks import harness
from benchmarks.baselines import TORCH_DTYPES, MissingError, compiled_swiglu, usable
from grouped_core import mlp as rules
from grouped_core.activations import Activation
from grouped_core.mlp_spec import Mlp, MlpNames
from grouped_core.recipes import Recipe
from tests import cases
from torch_bridge._operators import call, define

PRODUCTS = ("forward", "forward+backward")
PARTS = cases.Case("parts", cases.jagged(128, 24576 * 8), 24576 * 8, 1536, 512, frozenset())
"""24576 tokens, top-8 of 128 experts, hidden size 1536, expert width 256."""


@dataclasses.dataclass
class Work:
    """One MLP of a case: K = case.k, W = case.n columns (gate and linear half), F = W / 2."""

    x: torch.Tensor  # [M, K]
    dy: torch.Tensor  # [M, K]
    wi: torch.Tensor  # [G, W, K]
    wo: torch.Tensor  # [G, K, F]
    sizes: torch.Tensor
    rows: int  # rows that belong to groups

    @property
    def flops(self) -> float:
        """Useful operations of the forward."""
        _, wide, k = self.wi.shape
        return 2.0 * self.rows * k * (wide + wide // 2)

    def leaves(self, transposed: bool, halves: bool = False) -> list[torch.Tensor]:
        """x, wi and wo as leaves that need gradients, in the chosen layout; `halves` splits wi into its two halves."""
        weights = [*(self.wi.chunk(2, dim=1) if halves else [self.wi]), self.wo]
        weights = [(w if transposed else w.transpose(1, 2)).contiguous() for w in weights]
        return [each.detach().requires_grad_() for each in (self.x, *weights)]


def make_work(case: cases.Case, dtype: str, device: str) -> Work:
    """Random normal operands with a fixed seed; weights are scaled so that rows keep their variance."""
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(TORCH_DTYPES[dtype])

    wide, k, groups = case.n, case.k, case.groups
    return Work(
        normal(case.rows, k),
        normal(case.rows, k),
        normal(groups, wide, k, scale=k**-0.5),
        normal(groups, k, wide // 2, scale=(wide // 2) ** -0.5),
        torch.tensor(case.sizes, dtype=torch.int32, device=device),
        case.valid,
    )


Function = Callable[..., torch.Tensor]
"""Takes x, wi (one tensor or its halves) and wo; or x and the listed tensors of both, expert by expert."""


def both(function: Function, leaves: list[torch.Tensor], dy: torch.Tensor) -> dict[str, harness.Thunk]:
    """Forward alone without gradients, and forward with backward."""

    def forward(_: int) -> Any:
        with torch.no_grad():
            return function(*leaves)

    def backward(_: int) -> Any:
        return torch.autograd.grad(function(*leaves), leaves, dy)

    return {"forward": forward, "forward+backward": backward}


def ours(transposed: bool, halves: bool = False, **options: Any) -> Callable[[Work], dict[str, harness.Thunk]]:
    def build(work: Work) -> dict[str, harness.Thunk]:
        def function(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            *wi, wo = weights
            first = wi if halves else wi[0]
            return torch_bridge.grouped_mlp(x, first, wo, work.sizes, rhs_transposed=transposed, **options)

        return both(function, work.leaves(transposed, halves), work.dy)

    return build


def by_recipe(
    recipe: Recipe, *, quantised: bool = False, listed: bool = False
) -> Callable[[Work], dict[str, harness.Thunk]]:
    """Operands in bf16, quantised inside; with delayed scaling a step also updates the state.

    Args:
        quantised: the weights are quantised once before timing, as for all microbatches of a step but the first.
        listed: the weights are one tensor per expert.
    """

    def build(work: Work) -> dict[str, harness.Thunk]:
        groups, device = len(work.sizes), work.x.device
        state = torch_bridge.scaling_state(recipe, groups, device=device, products=2) if recipe.delayed else None
        bound = recipe.bind(state)
        leaves = work.leaves(True)
        fmt = recipe.forward[1].replace(delayed=False)
        axes = 2 if recipe.saved_weights == "forward" else (2, 1)
        codes = [torch_bridge.quantize(w, fmt, axis=axes) for w in leaves[1:]] if quantised else []
        if listed:
            members = [member.clone() for weight in leaves[1:] for member in weight.detach()]
            leaves = [leaves[0], *(member.requires_grad_() for member in members)]

        def function(x: torch.Tensor, *masters: torch.Tensor) -> torch.Tensor:
            wi: Any
            wo: Any
            if listed:
                wi, wo = list(masters[:groups]), list(masters[groups:])
            elif quantised:
                wi, wo = (torch_bridge.straight_through(*each) for each in zip(masters, codes, strict=True))
            else:
                wi, wo = masters
            return torch_bridge.grouped_mlp(x, wi, wo, work.sizes, rhs_transposed=True, recipe=bound)

        thunks = both(function, leaves, work.dy)
        if state is None:
            return thunks
        thunks["forward+backward"](0)
        torch_bridge.update_scaling(state)  # so that forward alone is timed with an initialised state too

        def updating(i: int) -> Any:
            grads = thunks["forward+backward"](i)
            torch_bridge.update_scaling(state)
            return grads

        return {**thunks, "forward+backward": updating}

    return build


RECIPES = (
    *(torch_bridge.FP8Delayed, torch_bridge.FP8Current, torch_bridge.FP8Block),
    *(torch_bridge.MXFP8, torch_bridge.NVFP4),
)
FAST = tuple(
    recipe.replace(name=f"{recipe.name}, fast", accumulate="fast")
    for recipe in (torch_bridge.FP8Delayed, torch_bridge.FP8Current)
)
"""Forward sums in the tensor cores alone, as recipes of TransformerEngine have them by default."""
FORMS = tuple(
    recipe.replace(name=f"{recipe.name}, {how}", saved_weights=saved)
    for recipe in (torch_bridge.FP8Delayed, torch_bridge.FP8Current)
    for how, saved in (("one form", "forward"), ("two forms", "quantized"))
)
"""Weights are quantised in the form of forward alone, which dgrad reads as well, or in both."""


def torch_grouped_mm(work: Work) -> dict[str, harness.Thunk]:
    """`torch.nn.functional.grouped_mm` twice with a compiled activation between them and K-major weights."""
    grouped_mm = getattr(torch.nn.functional, "grouped_mm", None)
    if grouped_mm is None or work.x.device.type == "cpu":
        raise MissingError("torch.nn.functional.grouped_mm is not for this device")
    offsets = torch.cumsum(work.sizes, 0).to(torch.int32)
    activation = compiled_swiglu()

    def function(x: torch.Tensor, wi: torch.Tensor, wo: torch.Tensor) -> torch.Tensor:
        h = grouped_mm(x, wi.transpose(1, 2), offs=offsets)
        return grouped_mm(activation(h), wo.transpose(1, 2), offs=offsets)

    return both(function, work.leaves(True), work.dy)


def sonic_moe(work: Work) -> dict[str, harness.Thunk]:
    """SonicMoE's layer also gathers rows and routes, so it cannot be compared."""
    import sonicmoe

    raise MissingError(f"sonicmoe {sonicmoe.__file__}: has no entry for rows that are sorted already")


def dense(work: Work) -> dict[str, harness.Thunk]:
    """Dense GEMMs with the same operations: two for forward, six with backward."""
    rows, wi, wo = work.rows, work.wi[0], work.wo[0]
    x, dy = work.x[:rows], work.dy[:rows]
    h, z = x @ wi.T, (x @ wi.T)[:, : wo.shape[1]].contiguous()

    def forward(_: int) -> Any:
        return x @ wi.T, z @ wo.T

    def all_six(_: int) -> Any:
        return x @ wi.T, z @ wo.T, dy @ wo, h @ wi, dy.T @ z, h.T @ x

    return {"forward": forward, "forward+backward": all_six}


LISTS = [f"ours, {recipe.name}{how}" for recipe in RECIPES for how in ("", ", listed")]
"""Recipes on packed weights, and on one tensor per expert."""

CANDIDATES: dict[str, Callable[[Work], dict[str, harness.Thunk]]] = {
    "dense": dense,
    "ours, [G,N,K]": ours(True),
    "ours, [G,K,N]": ours(False),
    "ours, [G,N,K], halves": ours(True, halves=True),
    "ours, [G,K,N], halves": ours(False, halves=True),
    "ours, [G,N,K], save_all": ours(True, residuals="save_all"),
    "ours, [G,N,K], save_input": ours(True, residuals="save_input"),
    "ours, composed": ours(True, implementation="composed"),
    **{f"ours, {recipe.name}": by_recipe(recipe) for recipe in (*RECIPES, *FAST, *FORMS)},
    **{f"ours, {recipe.name}, stored weights": by_recipe(recipe, quantised=True) for recipe in (*RECIPES, *FORMS)},
    **{f"ours, {recipe.name}, listed": by_recipe(recipe, listed=True) for recipe in RECIPES},
    "torch grouped_mm": torch_grouped_mm,
    "SonicMoE": sonic_moe,
}


def peak_mib(thunk: harness.Thunk) -> float:
    """Peak memory of a warm call, minus the memory in use before and its results."""
    thunk(0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = thunk(0)
    torch.cuda.synchronize()
    given = sum(each.nbytes for each in results) if isinstance(results, tuple) else results.nbytes
    return (torch.cuda.max_memory_allocated() - before - given) / 2**20


def profile(case: cases.Case, name: str, thunk: harness.Thunk, steady_s: float | None) -> None:
    """Prints how long each kernel of a step takes, as PyTorch's profiler sees it.

    It profiles three steps on a cool GPU, or a run of `steady_s` seconds after a warm-up of the same length. The
    profiler starts between the two, and the clocks recover slightly in that pause.
    """
    steps = 3 if steady_s is None else max(3, int(steady_s * 1e6 / harness.cuda_clock(thunk, 0, 1)))
    for _ in range(max(5, steps)):
        thunk(0)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            thunk(0)
        torch.cuda.synchronize()
    kernels = sorted(seen.key_averages(), key=lambda event: -event.device_time_total)
    print(f"{case.name:<16}{name}: kernels of a step {sum(k.device_time_total for k in kernels) / steps:.0f} us")
    for kernel in kernels:
        if kernel.device_time_total:
            print(f"  {kernel.device_time_total / steps:>10.1f}{kernel.count / steps:>6.1f}  {kernel.key[:150]}")


def prepare(case: cases.Case, dtype: str, device: str, names: Sequence[str]) -> dict[str, harness.Block]:
    """All candidates on one case, by product."""
    work = make_work(case, dtype, device)

    def made(name: str) -> dict[str, harness.Thunk]:
        thunks = CANDIDATES[name](work)
        for thunk in thunks.values():
            thunk(0)
        return thunks

    built, skipped = usable(names, made)
    return {
        product: harness.Block(
            case.name,
            product,
            dtype,
            names,
            {name: thunks[product] for name, thunks in built.items()},
            skipped,
            flops=work.flops * (1 if product == "forward" else 3),
            bound="dense products of the same operations",
        )
        for product in PRODUCTS
    }


def print_memory(case: cases.Case, steps: harness.Block) -> None:
    """Prints the peak of each candidate's step, and the bytes of rows that are kept for backward by default."""
    for name, thunk in steps.thunks.items():
        if name != "dense":
            print(f"{case.name:<16}peak MiB  {name:<30}{peak_mib(thunk):>10.0f}", flush=True)
    kept = 2 * case.rows * (case.k + case.n) / 2**20
    print(f"{case.name:<16}rows that save_fc1 keeps, x among them: {kept:.0f} MiB")


def bench(
    case: cases.Case, names: list[str], protocol: dict[str, Any], options: argparse.Namespace
) -> list[harness.Row]:
    """Times one case; `protocol`: options of `harness.measure`. On a GPU it prints memory, and kernels if asked."""
    blocks = prepare(case, options.dtype, options.device, names)
    rows = [row for block in blocks.values() for row in block.rows(**protocol)]
    if options.device == "cuda":
        steps = blocks["forward+backward"]
        for name, thunk in steps.thunks.items() if options.profile else ():
            profile(case, name, thunk, options.steady)
        print_memory(case, steps)
    return rows


def with_rows(case: cases.Case, rows: int) -> cases.Case:
    """The case with so many rows."""
    sizes = cases.jagged(case.groups, rows)
    return dataclasses.replace(case, name=f"{case.name}, {rows} rows", sizes=sizes, rows=rows)


def beside_packed(rows: list[harness.Row]) -> list[str]:
    """Ratio of the times with listed and packed weights, for each recipe that has both."""
    times = {(row.candidate, row.product): row.timing.median_us for row in rows if row.timing is not None}
    return [
        f"{product:<18}{name} over packed: {time / times[packed, product]:.3f}"
        for (name, product), time in times.items()
        if name.endswith(", listed") and ((packed := name.removesuffix(", listed")), product) in times
    ]


class _Parts(NamedTuple):
    x: Any
    wi: Any
    wo: Any
    sizes: Any
    probs: Any
    h: Any
    dy: Any


def _up(run: Any, op: Mlp, o: _Parts) -> Any:
    return rules.hidden_rows(run, op, o.x, o.wi, o.sizes, o.probs, None, keep=True)[:2]


def _d_hidden(run: Any, op: Mlp, o: _Parts) -> Any:
    wanted = (True, True, True)
    return rules.hidden_grads(run, op, o.h, o.wo, o.sizes, o.probs, None, o.dy, wanted, quantized_dy=o.dy)[:3]


def bench_parts(case: cases.Case, dtype: str, budget_s: float) -> list[harness.Row]:
    """The two fused kernels alone, with both results written, compared with one dense GEMM each."""
    up = define("bench_up", _up, _Parts, rows=("x", "probs"))
    d_hidden = define("bench_d_hidden", _d_hidden, _Parts, rows=("h", "probs", "dy"))
    work = make_work(case, dtype, "cuda")
    op = Mlp(MlpNames(), Activation("swiglu"), transposed=True)
    parts = _Parts(work.x, work.wi, work.wo, work.sizes, torch.rand(case.rows, device="cuda"), None, None)
    _, h = call(up, op, parts, case.rows)
    grads = parts._replace(h=h, dy=work.dy)
    x, dy = work.x[: work.rows], work.dy[: work.rows]
    thunks: dict[str, dict[str, harness.Thunk]] = {
        "up + act": {
            "dense": lambda _: x @ work.wi[0].T,
            "ours": lambda _: call(up, op, parts, case.rows),
        },
        "d hidden": {
            "dense": lambda _: dy @ work.wo[0],
            "ours": lambda _: call(d_hidden, op, grads, case.rows),
        },
    }
    rows = []
    for part, candidates in thunks.items():
        timings = harness.measure(candidates, clock=harness.cuda_clock, budget_s=budget_s / 2)
        bound = timings["dense"].median_us
        flops = work.flops * (2 / 3 if part == "up + act" else 1 / 3)
        rows += [
            harness.Row(case.name, part, dtype, name, t, flops / t.median_us / 1e6, bound / t.median_us, "dense", None)
            for name, t in timings.items()
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--cases", nargs="+", help="names of problems in tests/cases.py, and parts; default: all")
    parser.add_argument("--rows", type=int, nargs="+", help="numbers of rows for each case, in groups drawn anew")
    parser.add_argument("--dtype", choices=list(TORCH_DTYPES), default="bfloat16")
    parser.add_argument("--candidates", nargs="+", choices=list(CANDIDATES), default=list(CANDIDATES))
    parser.add_argument(
        "--lists", action="store_true", help="recipes on packed weights, and on lists in turn with them"
    )
    parser.add_argument("--budget", type=float, default=10.0, help="seconds per case")
    parser.add_argument(
        "--steady", type=float, metavar="SECONDS", help="time each candidate in runs of so many seconds"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="the kernels of a step with backward, on a GPU; with --steady of a long run",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.steady is not None and options.device == "cpu":
        parser.error("--steady is for GPUs")
    names = list(dict.fromkeys(["dense", *(LISTS if options.lists else options.candidates)]))
    protocol: dict[str, Any] = {
        "clock": harness.cpu_clock if options.device == "cpu" else harness.cuda_clock,
        "budget_s": options.budget / 2,
    }
    if options.steady is not None:
        protocol = harness.steady(options.steady)
    rows = []
    tags = ("cpu_bench",) if options.device == "cpu" else ("bench", "few_rows")
    wanted = [case for tag in tags for case in cases.select(tag) if not options.cases or case.name in options.cases]
    if options.rows:
        wanted = [with_rows(case, rows) for case in wanted for rows in options.rows]
    for case in [*wanted, *([PARTS] if not options.cases or PARTS.name in options.cases else [])]:
        if case is not PARTS:
            block = bench(case, names, protocol, options)
        elif options.device == "cuda":
            block = bench_parts(case, options.dtype, options.budget)
        else:
            continue
        print(harness.table(block), flush=True)
        for text in beside_packed(block):
            print(f"{case.name:<16}{text}", flush=True)
        rows += block
        if options.device == "cuda":
            torch.cuda.empty_cache()
    print(harness.machine())
    if options.json:
        harness.save(rows, options.json)


if __name__ == "__main__":
    main()
