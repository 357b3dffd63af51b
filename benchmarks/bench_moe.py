"""How fast is a whole MoE layer, from unsorted tokens to combined output, and which share has its routing?

    python benchmarks/bench_moe.py                     # the models' shapes, forward and backward, on a GPU
    python benchmarks/bench_moe.py --parts             # routing, gathering and combining alone
    python benchmarks/bench_moe.py --kernels           # what runs on the GPU in a step, by PyTorch's profiler
    python benchmarks/bench_moe.py --device cpu

The layers have a router, gated experts and no losses. The bound of a layer is the time of the six dense GEMMs that its
experts need, in the same run; that of a part is its bytes over the copy rate, but for scores, top-k and order, which
have a time to reach. Parts are captured in a graph, because the host takes longer to enqueue one than the GPU takes; a
graph holds several calls, because its own launch takes microseconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import torch_bridge
from benchmarks import harness
from benchmarks.baselines import MissingError, compiled_swiglu
from grouped_core.recipes import Recipe


@dataclass(frozen=True)
class Layer:
    """A layer of a model: T tokens, hidden size H, expert width F, k of E experts per token."""

    name: str
    tokens: int
    hidden: int
    width: int
    experts: int
    k: int

    @property
    def flops(self) -> float:
        """Operations of the experts' forward."""
        return 2.0 * self.tokens * self.k * self.hidden * 3 * self.width


LAYERS = (
    Layer("mixtral_8x7b", 8192, 4096, 14336, 8, 2),
    Layer("deepseek_v3", 4096, 7168, 2048, 32, 8),  # the experts of one of eight ranks
    Layer("qwen3_30b_a3b", 8192, 2048, 768, 128, 8),
    Layer("olmoe", 8192, 2048, 1024, 64, 8),
    Layer("gpt_oss", 8192, 2880, 2880, 32, 4),
)
SMALL = (Layer("small", 512, 256, 512, 8, 2),)
"""On a CPU."""


@dataclass
class Work:
    """Operands of a layer: x, dy [T, H], router [E, H] in fp32, wi [E, 2F, H], wo [E, H, F]."""

    layer: Layer
    x: torch.Tensor
    dy: torch.Tensor
    router: torch.Tensor
    wi: torch.Tensor
    wo: torch.Tensor

    def leaves(self) -> list[torch.Tensor]:
        return [each.detach().clone().requires_grad_() for each in (self.x, self.router, self.wi, self.wo)]


def make_work(layer: Layer, device: str) -> Work:
    """Random normal operands with a fixed seed; weights are scaled so that rows keep their variance."""
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    e, h, f = layer.experts, layer.hidden, layer.width
    return Work(
        layer,
        normal(layer.tokens, h),
        normal(layer.tokens, h),
        normal(e, h, scale=h**-0.5, dtype=torch.float32),
        normal(e, 2 * f, h, scale=h**-0.5),
        normal(e, h, f, scale=f**-0.5),
    )


def steps(function: Callable[..., torch.Tensor], work: Work) -> dict[str, harness.Thunk]:
    """Forward alone without gradients, and forward with backward, of a function of the leaves of `work`."""
    leaves = work.leaves()

    def forward(_: int) -> Any:
        with torch.no_grad():
            return function(*leaves)

    def backward(_: int) -> Any:
        return torch.autograd.grad(function(*leaves), leaves, work.dy)

    return {"forward": forward, "forward+backward": backward}


def ours(recipe: Recipe | None) -> Callable[[Work], dict[str, harness.Thunk]]:
    """`torch_bridge.moe`; with delayed scaling a step also updates the state."""

    def build(work: Work) -> dict[str, harness.Thunk]:
        layer, bound, state = work.layer, recipe, None
        if recipe is not None and recipe.delayed:
            state = torch_bridge.scaling_state(recipe, layer.experts, device=work.x.device, products=2)
            bound = recipe.bind(state)

        def function(x: torch.Tensor, router: torch.Tensor, wi: torch.Tensor, wo: torch.Tensor) -> torch.Tensor:
            return torch_bridge.moe(x, router, wi, wo, layer.k, normalize=True, recipe=bound)[0]

        thunks = steps(function, work)
        if state is None:
            return thunks
        thunks["forward+backward"](0)
        torch_bridge.update_scaling(state)

        def updating(i: int) -> Any:
            grads = thunks["forward+backward"](i)
            torch_bridge.update_scaling(state)
            return grads

        return {**thunks, "forward+backward": updating}

    return build


def torch_grouped_mm(work: Work) -> dict[str, harness.Thunk]:
    """What models of the `transformers` package do around `torch.nn.functional.grouped_mm`: sort, gather, two products
    with an activation between them, scale, scatter, sum. The activation is compiled.
    """
    grouped_mm = getattr(torch.nn.functional, "grouped_mm", None)
    if grouped_mm is None or work.x.device.type == "cpu":
        raise MissingError("torch.nn.functional.grouped_mm is not for this device")
    layer = work.layer
    activation = compiled_swiglu()

    def function(x: torch.Tensor, router: torch.Tensor, wi: torch.Tensor, wo: torch.Tensor) -> torch.Tensor:
        weights, experts = torch.topk(torch.softmax(x.float() @ router.T, dim=-1), layer.k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        order = torch.argsort(experts.flatten(), stable=True)
        ends = torch.bincount(experts.flatten(), minlength=layer.experts).cumsum(0).to(torch.int32)
        rows = x[order // layer.k]
        h = activation(grouped_mm(rows, wi.transpose(1, 2), offs=ends))
        y = grouped_mm(h, wo.transpose(1, 2), offs=ends) * weights.flatten()[order, None].to(x.dtype)
        back = torch.empty_like(y).index_copy(0, order, y)
        return back.view(layer.tokens, layer.k, layer.hidden).sum(dim=1)

    return steps(function, work)


SONIC_TILES = {  # rows, columns, ping-pong, cluster: those that are near the front at any of the shapes
    "gated": (
        *((128, 192, True, 2, 1), (128, 160, True, 2, 1), (128, 224, False, 2, 1)),
        *((256, 192, False, 2, 1), (128, 256, False, 2, 1)),
    ),
    "rows": (
        *((256, 128, False, 1, 2), (192, 128, True, 1, 2), (128, 160, True, 1, 2)),
        *((128, 192, True, 1, 2), (128, 128, True, 1, 2), (128, 208, True, 1, 2)),
    ),
    "dgated": ((128, 256, False, 2, 1), (128, 192, True, 2, 1), (128, 128, True, 2, 1), (256, 128, False, 2, 1)),
    "sums": (
        *((128, 192, True, 2, 1), (128, 160, True, 2, 1), (128, 128, True, 2, 1)),
        *((256, 128, False, 2, 1), (128, 256, False, 2, 1)),
    ),
}


@cache
def tune_sonic() -> None:
    """QuACK's tuners, which SonicMoE uses, time each of `SONIC_TILES` for longer. By themselves they compile all tiles,
    a minute each, and time one for 25 ms alone, which misses the best by up to a tenth.
    """
    from quack import gemm_interface
    from triton.testing import do_bench

    def restrict(tuner: Any, kind_of: Callable[[dict[str, Any]], str]) -> None:
        valid = tuner.early_config_prune

        def prune(configs: Any, named: dict[str, Any], **kwargs: Any) -> list[Any]:
            found = {}
            for each in valid(configs, named, **kwargs):
                c = each.kwargs["config"]
                if not c.swap_ab:
                    found[c.tile_m, c.tile_n, c.pingpong, c.cluster_m, c.cluster_n] = each
            return [found[tile] for tile in SONIC_TILES[kind_of({**named, **kwargs})]]

        tuner.early_config_prune = prune
        tuner.do_bench = partial(do_bench, warmup=30, rep=120)

    restrict(gemm_interface.gemm_gated_tuned, lambda _: "gated")
    restrict(gemm_interface.gemm_dgated_tuned, lambda _: "dgated")
    restrict(gemm_interface.gemm_tuned, lambda args: "rows" if args.get("cu_seqlens_k") is None else "sums")


def sonic_moe(work: Work) -> dict[str, harness.Thunk]:
    """SonicMoE's layer, with its tiles scanned; parameters are its own."""
    if work.x.device.type == "cpu":
        raise MissingError("sonicmoe needs a GPU")
    from sonicmoe import KernelBackendMoE, MoE
    from sonicmoe.enums import ActivationType

    tune_sonic()
    layer = work.layer
    module = MoE(
        num_experts=layer.experts,
        num_experts_per_tok=layer.k,
        hidden_size=layer.hidden,
        intermediate_size=layer.width,
        activation_function=ActivationType.SWIGLU,
        add_bias=False,
        std=0.02,
    ).to(device="cuda", dtype=torch.bfloat16)
    x = work.x.detach().clone().requires_grad_()
    leaves = [x, *module.parameters()]

    def function() -> torch.Tensor:
        return module(x, kernel_backend_moe=KernelBackendMoE.sonicmoe)[0]

    def forward(_: int) -> Any:
        with torch.no_grad():
            return function()

    return {"forward": forward, "forward+backward": lambda _: torch.autograd.grad(function(), leaves, work.dy)}


def dense(work: Work) -> dict[str, harness.Thunk]:
    """Dense GEMMs with the operations of the experts: two for forward, six with backward."""
    layer = work.layer
    x = work.x.repeat_interleave(layer.k, dim=0)
    dy, wi, wo = work.dy.repeat_interleave(layer.k, dim=0), work.wi[0], work.wo[0]
    h = x @ wi.T
    z = h[:, : layer.width].contiguous()

    def forward(_: int) -> Any:
        return x @ wi.T, z @ wo.T

    def all_six(_: int) -> Any:
        return x @ wi.T, z @ wo.T, dy @ wo, h @ wi, dy.T @ z, h.T @ x

    return {"forward": forward, "forward+backward": all_six}


RECIPES = (torch_bridge.FP8Delayed, torch_bridge.FP8Block, torch_bridge.MXFP8)
OURS = {"ours": ours(None), **{f"ours, {recipe.name}": ours(recipe) for recipe in RECIPES}}
CANDIDATES: dict[str, Callable[[Work], dict[str, harness.Thunk]]] = {
    "dense": dense,
    **OURS,
    "torch grouped_mm": torch_grouped_mm,
    "SonicMoE": sonic_moe,
}


def bench(layer: Layer, device: str, names: list[str], protocol: dict[str, Any]) -> list[harness.Row]:
    """All candidates on one layer. `protocol`: options of `harness.measure`."""
    work = make_work(layer, device)
    built: dict[str, dict[str, harness.Thunk]] = {}
    skipped: dict[str, str] = {}
    for name in names:
        try:
            built[name] = CANDIDATES[name](work)
            for thunk in built[name].values():
                thunk(0)
        except Exception as reason:  # whatever another library raises
            if name in OURS:
                raise
            skipped[name] = f"{type(reason).__name__}: {reason}"[:200]
            built.pop(name, None)
    rows = []
    for product, factor in (("forward", 1), ("forward+backward", 3)):
        thunks = {name: each[product] for name, each in built.items()}
        facts = (layer.name, product, "bfloat16", names, thunks, skipped, factor * layer.flops)
        rows += harness.Block(*facts, bound="dense products of the experts").rows(**protocol)
    return rows


def bench_parts(layer: Layer, device: str, budget_s: float) -> None:
    """Prints the time of each part of routing, and its share of the copy rate where bytes bound it."""
    work, route = make_work(layer, device), torch_bridge.route
    x, rate = work.x, harness.copy_rate(device)
    logits = x.float() @ work.router.T
    weights, experts, _ = route.topk_router(logits, layer.k)
    rows, _, order = route.permute(x, experts, layer.experts)
    moved = (rows.nbytes, x.nbytes)
    narrow = x[:, :1].contiguous()  # its rows cost nothing, so that the order alone is timed

    def choose_and_sort() -> Any:
        found = route.topk_router(logits, layer.k)
        return route.permute(narrow, found[1], layer.experts)

    def choose() -> Any:
        return route.topk_router(logits, layer.k)

    parts: dict[str, tuple[Callable[[], Any], float]] = {
        "scores, losses, top-k": (choose, 0.0),
        "scores, losses, top-k, order": (choose_and_sort, 0.0),
        "order and gather": (lambda: route.permute(x, experts, layer.experts), 2.0 * moved[0]),
        "combine": (lambda: route.unpermute(rows, order), moved[0] + moved[1]),
        "combine, weighted": (lambda: route.unpermute(rows, order, weights), moved[0] + moved[1]),
    }
    clock = harness.cpu_clock if device == "cpu" else harness.cuda_clock
    with torch.no_grad():
        thunks = {name: harness.captured(call, device) for name, (call, _) in parts.items()}
        timings = harness.measure(thunks, clock=clock, budget_s=budget_s)
    for name, timing in timings.items():
        took_us = timing.median_us / harness.REPEATS
        share = parts[name][1] / rate / (took_us * 1e-6)
        of_copy = f"{share:>8.2f} of the copy rate" if share else ""
        print(f"{layer.name:<16}{name:<32}{took_us:>10.1f} us{of_copy}", flush=True)


def list_kernels(layer: Layer, steps_seen: int = 6) -> None:
    """Prints how often each kernel runs in forward and backward of our bf16 layer, and the mean of its times."""
    step = ours(None)(make_work(layer, "cuda"))["forward+backward"]
    for i in range(3):
        step(i)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for i in range(steps_seen):
            step(i)
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in seen.events() or []:
        if event.device_type.name == "CUDA":
            times.setdefault(event.name, []).append(event.device_time_total)
    for name, each in times.items():
        count, mean = len(each) / steps_seen, sum(each) / len(each)
        print(f"{layer.name:<16}{count:>5.1f} x {mean:>8.1f} us  {name[:110]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--layers", nargs="+", choices=[each.name for each in (*LAYERS, *SMALL)])
    parser.add_argument("--candidates", nargs="+", choices=list(CANDIDATES), default=list(CANDIDATES))
    parser.add_argument("--parts", action="store_true", help="routing, gathering and combining alone")
    parser.add_argument("--kernels", action="store_true", help="times of kernels in a step, on a GPU")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds per layer")
    parser.add_argument(
        "--steady", type=float, metavar="SECONDS", help="time each candidate in runs of so many seconds, on a GPU"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.steady is not None and options.device == "cpu":
        parser.error("--steady is for GPUs")
    protocol = {
        "clock": harness.cpu_clock if options.device == "cpu" else harness.cuda_clock,
        "budget_s": options.budget / 2,
    }
    if options.steady is not None:
        protocol = harness.steady(options.steady)
    layers = [each for each in (*LAYERS, *SMALL) if options.layers and each.name in options.layers]
    rows = []
    for layer in layers or (SMALL if options.device == "cpu" else LAYERS):
        if options.kernels:
            list_kernels(layer)
            continue
        if options.parts:
            bench_parts(layer, options.device, options.budget)
            continue
        block = bench(layer, options.device, list(dict.fromkeys(["dense", *options.candidates])), protocol)
        print(harness.table(block), flush=True)
        rows += block
        if options.device == "cuda":
            torch.cuda.empty_cache()
    print(harness.machine())
    if options.json and rows:
        harness.save(rows, options.json)


if __name__ == "__main__":
    main()
