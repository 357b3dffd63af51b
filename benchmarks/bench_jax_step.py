"""What runs on the GPU in a jitted training step of the MoE MLP in JAX, and which runtime calls does the host make?

    XLA_FLAGS=--xla_gpu_enable_command_buffer= python benchmarks/bench_jax_step.py      # the ungraphed program
    python benchmarks/bench_jax_step.py                                                 # its CUDA graphs

PyTorch's profiler sees the kernels of the whole process, including JAX's, and does not disable XLA's graphs.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import torch

import jax_grouped
from benchmarks import harness
from tests import cases

CASE, STEPS = "C", 3


def loss(weights: tuple[jax.Array, jax.Array], x: jax.Array, probs: jax.Array, sizes: jax.Array) -> jax.Array:
    """The mean square of y."""
    y = jax_grouped.grouped_mlp(x, *weights, sizes, rhs_transposed=True, probs=probs)
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


@jax.jit
def step(weights: tuple[jax.Array, jax.Array], x: jax.Array, probs: jax.Array, sizes: jax.Array) -> Any:
    """One step of gradient descent on both weights; the gradient of the probabilities is a result."""
    value, (grads, dp) = jax.value_and_grad(loss, argnums=(0, 2))(weights, x, probs, sizes)
    return jax.tree.map(lambda w, g: w - 0.1 * g.astype(w.dtype), weights, grads), value, dp


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.zeros(1, device="cuda")  # the profiler needs PyTorch's context
    case = cases.named(CASE)
    width, keys = case.n, jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (case.rows, case.k), jnp.bfloat16)
    wi = jax.random.normal(keys[1], (case.groups, width, case.k), jnp.bfloat16) * case.k**-0.5
    wo = jax.random.normal(keys[2], (case.groups, case.k, width // 2), jnp.bfloat16) * (width // 2) ** -0.5
    probs = jax.random.uniform(keys[3], (case.rows,), jnp.float32)
    sizes = jnp.asarray(case.sizes, jnp.int32)
    weights = (wi, wo)
    for _ in range(STEPS + 1):
        weights, *_ = step(weights, x, probs, sizes)
    jax.block_until_ready(weights)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as seen:
        for _ in range(STEPS):
            weights, *_ = step(weights, x, probs, sizes)
        jax.block_until_ready(weights)
    runs, times, host = collections.Counter[str](), collections.Counter[str](), collections.Counter[str]()
    for event in seen.events() or []:
        if event.device_type.name == "CUDA":
            runs[event.name] += 1
            times[event.name] += event.device_time_total
        elif event.name.startswith("cu"):
            host[event.name] += 1
    print(f"case {CASE}, per step:")
    for name, count in runs.most_common():
        print(f"  x{count / STEPS:g} {times[name] / STEPS:9.1f} us  {name[:110]}")
    print(f"runtime and driver calls of {STEPS} steps: {dict(host)}")
    print(harness.machine())


if __name__ == "__main__":
    main()
