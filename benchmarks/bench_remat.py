"""How much memory does a stack of MoE layers in JAX take for each policy of `jax.checkpoint`, and how long is a step?

    python benchmarks/bench_remat.py                   # on a GPU: as compiled and as measured
    python benchmarks/bench_remat.py --device cpu      # as compiled, small

The layers are one `jax.lax.scan` whose body is a residual MoE layer under `jax.checkpoint`. "as compiled" are the
temporaries that XLA plans for forward and backward, without parameters and their gradients; "as measured" is the peak
of the allocator beyond what was there before the step. The CPU has no host memory of its own, so there offloading is
left out.
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

import jax_grouped
from benchmarks import harness
from jax_grouped import FP8Block, checkpoint_policies

MIB = 1 << 20
SIZES = {  # layers, tokens, hidden size, expert width, experts, experts per token
    "cuda": (8, 8192, 2048, 768, 128, 8),
    "cpu": (4, 1024, 256, 128, 16, 4),
}


def policies(device: str) -> dict[str, tuple[Any, Callable[..., bool] | None]]:
    """By name a recipe and a policy; without a policy the body is not under `jax.checkpoint`."""
    found: dict[str, tuple[Any, Callable[..., bool] | None]] = {
        "everything that the rules keep": (None, None),
        "nothing but the input of a layer": (None, jax.checkpoint_policies.nothing_saveable),
        "save_gemms()": (None, checkpoint_policies.save_gemms()),
        "FP8Block, everything": (FP8Block, None),
        "FP8Block, save_quantized()": (FP8Block, checkpoint_policies.save_quantized()),
    }
    if device != "cpu":
        found["offload_activations('grouped_fc1')"] = (None, checkpoint_policies.offload_activations("grouped_fc1"))
    return found


def step(recipe: Any, policy: Callable[..., bool] | None, k: int) -> Callable[..., Any]:
    """Gradients of all parameters of the stack."""

    def body(x: jax.Array, layer: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        y, _ = jax_grouped.moe(x, layer["router"], layer["wi"], layer["wo"], k, normalize=True, recipe=recipe)
        return x + y, None

    inner = body if policy is None else jax.checkpoint(body, policy=policy)

    def loss(parameters: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(inner, x, parameters)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    return jax.grad(loss)


def measured(call: Callable[[], Any], rounds: int = 5) -> tuple[float, float | None]:
    """(milliseconds of the quickest of some steps, MiB at the peak beyond what was there before)."""
    device = jax.devices()[0]
    before = (device.memory_stats() or {}).get("bytes_in_use")
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append((time.perf_counter() - start) * 1e3)
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return min(times), None if before is None or peak is None else (peak - before) / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--policy", help="one policy alone, so that the peak is its own")
    options = parser.parse_args()
    layers, tokens, hidden, width, experts, k = SIZES[options.device]
    keys = jax.random.split(jax.random.key(0), 4)

    def normal(key: jax.Array, *shape: int) -> jax.Array:
        return (jax.random.normal(key, shape) * shape[-2] ** -0.5).astype(jnp.bfloat16)

    parameters = {
        "router": normal(keys[0], layers, hidden, experts),
        "wi": normal(keys[1], layers, experts, hidden, 2 * width),
        "wo": normal(keys[2], layers, experts, width, hidden),
    }
    x = jax.random.normal(keys[3], (tokens, hidden)).astype(jnp.bfloat16)
    gradients = sum(each.nbytes for each in parameters.values())
    print(f"{layers} layers of {tokens} tokens, H {hidden}, F {width}, {experts} experts, {k} per token, bfloat16")
    for name, (recipe, policy) in policies(options.device).items():
        if options.policy and options.policy != name:
            continue
        compiled = jax.jit(step(recipe, policy, k)).lower(parameters, x).compile()
        planned: Any = compiled.memory_analysis()
        ms, peak = measured(lambda compiled=compiled: compiled(parameters, x))
        beyond = "" if peak is None else f"{peak - gradients / MIB:>12.0f} MiB measured"
        print(f"{name:<36}{planned.temp_size_in_bytes / MIB:>10.0f} MiB compiled{beyond}{ms:>10.1f} ms", flush=True)
    print(harness.machine())


if __name__ == "__main__":
    main()
