"""What does one call cost on the host, beside the peers: the time until the call returns, not until it is done.

    python benchmarks/bench_overhead.py --device cuda

Problems are so small that the device never lags behind the host; calls are enqueued back to back.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
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
from benchmarks import harness

GROUPS, ROWS, WIDTH = 8, 64, 64


def host_us(call: Callable[[], Any], finish: Callable[[Any], None], batch: int = 50, rounds: int = 40) -> float:
    """Median microseconds of one call, over `rounds` batches of calls that are enqueued back to back."""
    for _ in range(batch):
        result = call()
    finish(result)
    samples = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        for _ in range(batch):
            result = call()
        samples.append((time.perf_counter_ns() - start) / 1e3 / batch)
        finish(result)
    return float(np.median(samples))


def torch_calls(device: str) -> dict[str, Callable[[], Any]]:
    """Eager PyTorch calls by name."""
    x = torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16)
    weight = torch.randn(GROUPS, WIDTH, WIDTH, device=device, dtype=torch.bfloat16)
    members = list(weight.unbind(0))
    sizes = torch.full((GROUPS,), ROWS // GROUPS, device=device, dtype=torch.int32)
    offsets = torch.cumsum(sizes, 0).to(torch.int32)
    leaf, parameter = x.clone().requires_grad_(), weight.clone().requires_grad_()
    result = torch_bridge.grouped_linear(leaf, parameter, sizes)
    dy = torch.randn_like(result)
    grouped_mm = torch.nn.functional.grouped_mm
    peer = grouped_mm(leaf, parameter.transpose(1, 2), offs=offsets)
    return {
        "grouped_linear": lambda: torch_bridge.grouped_linear(x, weight, sizes),
        "grouped_linear, with grad": lambda: torch_bridge.grouped_linear(leaf, parameter, sizes),
        "grouped_linear, list of weights": lambda: torch_bridge.grouped_linear(x, members, sizes),
        "grouped_linear, backward": lambda: torch.autograd.grad(result, (leaf, parameter), dy, retain_graph=True),
        "F.grouped_mm": lambda: grouped_mm(x, weight.transpose(1, 2), offs=offsets),
        "F.grouped_mm, with grad": lambda: grouped_mm(leaf, parameter.transpose(1, 2), offs=offsets),
        "F.grouped_mm, backward": lambda: torch.autograd.grad(peer, (leaf, parameter), dy, retain_graph=True),
    }


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
    options = parser.parse_args()

    def torch_finish(_: Any) -> None:
        if options.device == "cuda":
            torch.cuda.synchronize()

    for name, call in torch_calls(options.device).items():
        print(f"torch  {name:<34}{host_us(call, torch_finish):8.1f} us", flush=True)
    for name, call in jax_calls(options.device).items():
        print(f"jax    {name:<34}{host_us(call, jax.block_until_ready):8.1f} us", flush=True)
    print(harness.machine())


if __name__ == "__main__":
    main()
