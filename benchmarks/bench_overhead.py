"""What does one call cost on the host, compared with other libraries? Measures the time until the call returns.

    python benchmarks/bench_overhead.py --device cuda
    python benchmarks/bench_overhead.py --no-launch      # PyTorch without kernels, which run inside the call on the CPU
    python benchmarks/bench_overhead.py --no-launch --processor      # the same on a machine that others use too

The problems are so small that the device never falls behind the host; calls are enqueued back to back. Kernels of other
libraries cannot be left out on the CPU, so with `--processor` the problems are smaller still.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jax_grouped
import torch_bridge
import torch_bridge.nn
from benchmarks import harness
from grouped_core import recipes
from torch_bridge import _record

GROUPS, ROWS, WIDTH = 8, 64, 128  # narrower blocks of 128 would be cut, which takes other kernels
RECIPES = (recipes.FP8Delayed, recipes.FP8Current, recipes.FP8Block, recipes.MXFP8)


def host_us(
    calls: dict[str, Callable[[], Any]],
    finish: Callable[[Any], None],
    batch: int = 50,
    rounds: int = 24,
    *,
    processor: bool = False,
) -> dict[str, float]:
    """Median microseconds per call, over batches that are enqueued back to back; the calls alternate in each round.

    Args:
        processor: the processor time of the quickest batch instead, which other processes disturb less.
    """
    clock = time.process_time_ns if processor else time.perf_counter_ns
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for at in range(rounds + 1):
        for name, call in calls.items():
            start = clock()
            for _ in range(batch):
                result = call()
            if at:  # the first round warms up
                samples[name].append((clock() - start) / 1e3 / batch)
            finish(result)
    pick = min if processor else np.median
    return {name: float(pick(each)) for name, each in samples.items()}


def launch_nothing() -> None:
    """Removes the kernel launch from every later call and keeps everything else."""
    _record.observer = _nothing


def _nothing(*_: Any) -> None:
    pass


class LeastFunction(torch.autograd.Function):
    """`F.grouped_mm` as an autograd function in Python that does nothing else: what any of them costs at least."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, offsets)
        return torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=offsets)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, offsets = ctx.saved_tensors
        grouped_mm = torch.nn.functional.grouped_mm
        return grouped_mm(grads[0], weight, offs=offsets), grouped_mm(grads[0].t(), x, offs=offsets), None


def torch_calls(device: str) -> dict[str, Callable[[], Any]]:
    """Eager PyTorch calls by name."""
    x = torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16)
    weight = torch.randn(GROUPS, WIDTH, WIDTH, device=device, dtype=torch.bfloat16)
    members = list(weight.unbind(0))
    sizes = torch.full((GROUPS,), ROWS // GROUPS, device=device, dtype=torch.int32)
    offsets = torch.cumsum(sizes, 0).to(torch.int32)
    leaf, parameter = x.clone().requires_grad_(), weight.clone().requires_grad_()
    parameters = [each.clone().requires_grad_() for each in members]
    result = torch_bridge.grouped_linear(leaf, parameter, sizes)
    dy = torch.randn_like(result)
    grouped_mm = torch.nn.functional.grouped_mm
    peer = grouped_mm(leaf, parameter.transpose(1, 2), offs=offsets)

    def both(y: torch.Tensor) -> Any:
        return torch.autograd.grad(y, (leaf, parameter), dy)

    calls = {
        "grouped_linear": lambda: torch_bridge.grouped_linear(x, weight, sizes),
        "grouped_linear, with grad": lambda: torch_bridge.grouped_linear(leaf, parameter, sizes),
        "grouped_linear, list of weights": lambda: torch_bridge.grouped_linear(x, members, sizes),
        "grouped_linear, backward": lambda: torch.autograd.grad(result, (leaf, parameter), dy, retain_graph=True),
        "grouped_linear, forward and backward": lambda: both(torch_bridge.grouped_linear(leaf, parameter, sizes)),
        "grouped_linear, list of weights, forward and backward": lambda: torch.autograd.grad(
            torch_bridge.grouped_linear(leaf, parameters, sizes), (leaf, *parameters), dy
        ),
        "F.grouped_mm": lambda: grouped_mm(x, weight.transpose(1, 2), offs=offsets),
        "F.grouped_mm, with grad": lambda: grouped_mm(leaf, parameter.transpose(1, 2), offs=offsets),
        "F.grouped_mm, backward": lambda: torch.autograd.grad(peer, (leaf, parameter), dy, retain_graph=True),
        "F.grouped_mm, forward and backward": lambda: both(grouped_mm(leaf, parameter.transpose(1, 2), offs=offsets)),
        "F.grouped_mm in a Python function, with grad": lambda: LeastFunction.apply(leaf, parameter, offsets),
        "F.grouped_mm in a Python function, forward and backward": lambda: both(
            LeastFunction.apply(leaf, parameter, offsets)
        ),
    }
    for recipe in RECIPES:
        bound = recipe.bind(torch_bridge.scaling_state(recipe, GROUPS, device=device) if recipe.delayed else None)
        y = torch_bridge.grouped_linear(leaf, parameter, sizes, recipe=bound)

        def forward(x: Any, weight: Any, bound: Any = bound) -> Any:
            return torch_bridge.grouped_linear(x, weight, sizes, recipe=bound)

        name = f"grouped_linear, {recipe.name}"
        calls[name] = partial(forward, x, weight)
        calls[f"{name}, with grad"] = partial(forward, leaf, parameter)
        calls[f"{name}, backward"] = partial(torch.autograd.grad, y, (leaf, parameter), dy, retain_graph=True)
        calls[f"{name}, forward and backward"] = lambda forward=forward: both(forward(leaf, parameter))
    return calls | module_calls(device)


class PeerMLP(torch.nn.Module):
    """What `GroupedMLP` computes, written with `F.grouped_mm`."""

    def __init__(self, wi: torch.Tensor, wo: torch.Tensor) -> None:
        super().__init__()
        self.wi, self.wo = torch.nn.Parameter(wi), torch.nn.Parameter(wo)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        grouped_mm = torch.nn.functional.grouped_mm
        gate, linear = grouped_mm(x, self.wi.transpose(1, 2), offs=offsets).chunk(2, 1)
        z = (torch.nn.functional.silu(gate) * linear * probs[:, None]).to(x.dtype)
        return grouped_mm(z, self.wo.transpose(1, 2), offs=offsets)


class PeerLinear(torch.nn.Module):
    """What `GroupedLinear` computes, written with `F.grouped_mm`."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.grouped_mm(x, self.weight.transpose(1, 2), offs=offsets)


def module_calls(device: str) -> dict[str, Callable[[], Any]]:
    """Forward (with gradients required) and backward, of our modules and of the same layers with `F.grouped_mm`."""
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "bias": False}
    x = torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    sizes = torch.full((GROUPS,), ROWS // GROUPS, device=device, dtype=torch.int32)
    offsets, probs = torch.cumsum(sizes, 0).to(torch.int32), torch.rand(ROWS, device=device)
    nn = torch_bridge.nn
    linear = nn.GroupedLinear(GROUPS, WIDTH, WIDTH, single_grouped_weight=True, **options)
    mlp = nn.GroupedMLP(GROUPS, WIDTH, WIDTH, single_grouped_weight=True, **options)
    layers = (linear_of(2 * WIDTH, options), nn.ScaledSwiGLU(), linear_of(WIDTH, options))
    found = {
        "nn.GroupedLinear": (linear, (x, sizes)),
        "nn.GroupedLinear, weight per group": (nn.GroupedLinear(GROUPS, WIDTH, WIDTH, **options), (x, sizes)),
        "F.grouped_mm in a module": (PeerLinear(linear.weight.detach().clone()), (x, offsets)),
        "nn.GroupedMLP": (mlp, (x, sizes, probs)),
        "nn.GroupedMLP, weight per group": (nn.GroupedMLP(GROUPS, WIDTH, WIDTH, **options), (x, sizes, probs)),
        "nn.Sequential, fused": (nn.Sequential(*layers), (x, sizes, probs, sizes)),
        "MLP of F.grouped_mm": (
            PeerMLP(mlp.linear_fc1.weight.detach().clone(), mlp.linear_fc2.weight.detach().clone()),
            (x, offsets, probs),
        ),
    }
    for recipe in RECIPES:
        own = options | {"recipe": recipe, "single_grouped_weight": True}
        found[f"nn.GroupedLinear, {recipe.name}"] = (nn.GroupedLinear(GROUPS, WIDTH, WIDTH, **own), (x, sizes))
        found[f"nn.GroupedMLP, {recipe.name}"] = (nn.GroupedMLP(GROUPS, WIDTH, WIDTH, **own), (x, sizes, probs))
    calls: dict[str, Callable[[], Any]] = {}
    for name, (module, given) in found.items():
        y = module(*given)
        wanted, dy = (x, *module.parameters()), torch.randn_like(y)
        calls[name] = lambda module=module, given=given: module(*given)
        calls[f"{name}, backward"] = lambda y=y, wanted=wanted, dy=dy: torch.autograd.grad(
            y, wanted, dy, retain_graph=True
        )
        calls[f"{name}, forward and backward"] = lambda module=module, given=given, wanted=wanted, dy=dy: (
            torch.autograd.grad(module(*given), wanted, dy)
        )
    return calls


def linear_of(out: int, options: dict[str, Any]) -> torch.nn.Module:
    return torch_bridge.nn.GroupedLinear(GROUPS, WIDTH, out, single_grouped_weight=True, **options)


def jax_calls(device: str) -> dict[str, Callable[[], Any]]:
    """Jitted JAX dispatches by name."""
    place = jax.devices("cpu" if device == "cpu" else "cuda")[0]
    with jax.default_device(place):
        x = jax.device_put(jnp.ones((ROWS, WIDTH), jnp.bfloat16), place)
        weight = jax.device_put(jnp.ones((GROUPS, WIDTH, WIDTH), jnp.bfloat16), place)
        sizes = jax.device_put(jnp.full((GROUPS,), ROWS // GROUPS, jnp.int32), place)
    ours, peer = jax.jit(jax_grouped.ragged_dot), jax.jit(jax.lax.ragged_dot)
    plus_one = jax.jit(lambda a: a + jnp.ones((), a.dtype))
    of_three = jax.jit(lambda a, b, c: a + jnp.ones((), a.dtype), keep_unused=True)
    return {
        "jit(ragged_dot)": lambda: ours(x, weight, sizes),
        "jit(lax.ragged_dot)": lambda: peer(x, weight, sizes),
        "jit(x + 1)": lambda: plus_one(x),
        "jit(x + 1), three operands": lambda: of_three(x, weight, sizes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--no-launch", action="store_true", help="without our kernels and without JAX")
    parser.add_argument("--processor", action="store_true", help="processor time of the quickest round, tiny operands")
    options = parser.parse_args()
    if options.no_launch:
        launch_nothing()
    if options.processor:
        global GROUPS, ROWS, WIDTH
        GROUPS, ROWS, WIDTH = 2, 4, 32
        torch.set_num_threads(1)

    def torch_finish(_: Any) -> None:
        if options.device == "cuda":
            torch.cuda.synchronize()

    calls = torch_calls(options.device)
    for name, us in host_us(calls, torch_finish, processor=options.processor).items():
        print(f"torch  {name:<42}{us:8.1f} us", flush=True)
    jax_rows = {} if options.no_launch else jax_calls(options.device)
    for name, us in host_us(jax_rows, jax.block_until_ready).items():
        print(f"jax    {name:<42}{us:8.1f} us", flush=True)
    print(harness.machine())


if __name__ == "__main__":
    main()
