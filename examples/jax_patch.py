"""Code of a user's own on `jax.lax.ragged_dot`, trained without changes and inside `jax_grouped.patch()`.

    python examples/jax_patch.py                        # on the CPU, about half a minute
    python examples/jax_patch.py --recipe FP8Block

The layer below knows nothing of this library. Both runs start from the same weights and read the same tokens, and one
line switches the grouped products, in forward and in the gradients. The script prints both losses side by side.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

import jax_grouped
from grouped_core import recipes

RECIPES = tuple(name for name, each in recipes.RECIPES.items() if each.quantized and not each.takes_arrays)
"""Recipes that need neither a state nor random numbers."""
TOKENS, HIDDEN, WIDTH, EXPERTS, PER_TOKEN = 512, 128, 256, 8, 2


def parameters() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"router": (HIDDEN, EXPERTS), "wi": (EXPERTS, HIDDEN, 2 * WIDTH), "wo": (EXPERTS, WIDTH, HIDDEN)}
    return {
        name: jax.random.normal(key, shape) * shape[-2] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def layer(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A mixture of experts with SwiGLU: rows sorted by expert, two grouped products, the weighted sum per token."""
    weights, experts = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), PER_TOKEN)
    flat = experts.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=EXPERTS)
    gate, linear = jnp.split(jax.lax.ragged_dot(x[order // PER_TOKEN], params["wi"], sizes), 2, axis=1)
    rows = jax.lax.ragged_dot(jax.nn.silu(gate) * linear, params["wo"], sizes)
    rows = rows[jnp.argsort(order)].reshape(*weights.shape, HIDDEN)
    return (rows * weights[:, :, None]).sum(axis=1)


def train(steps: int) -> tuple[list[float], float]:
    """(loss of each step, seconds of the quickest step); the target is a rotation of the columns."""

    @jax.jit
    def step(params: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        def loss_of(params: dict[str, jax.Array]) -> jax.Array:
            return jnp.mean((layer(params, x) - jnp.roll(x, 1, axis=1)) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 30.0 * g, params, grads), loss

    params: dict[str, Any] = parameters()
    losses, seconds = [], []
    for at in range(steps):
        x = jax.random.normal(jax.random.key(1 + at % 4), (TOKENS, HIDDEN))
        begin = time.perf_counter()
        params, loss = step(params, x)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - begin)
    return losses, min(seconds)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--recipe", choices=RECIPES, help="low-precision formats of the grouped products")
    options = parser.parse_args(argv)
    if options.steps < 1:
        print(f"jax_patch: --steps {options.steps} is less than 1", file=sys.stderr)
        return 2
    runs = {}
    for name, context in {
        "jax.lax": contextlib.nullcontext(()),
        "patched": jax_grouped.patch(recipe=getattr(jax_grouped, options.recipe) if options.recipe else None),
    }.items():
        with context as replaced:  # the line that switches
            if replaced:
                print("replaced:", ", ".join(replaced))
            runs[name] = train(options.steps)
    (theirs, their_time), (ours, our_time) = runs.values()
    print(f"{'step':>6}{'jax.lax':>16}{'patched':>16}")
    for step in range(options.steps):
        if step % max(1, options.steps // 8) == 0 or step == options.steps - 1:
            print(f"{step + 1:>6}{theirs[step]:>16.6f}{ours[step]:>16.6f}")
    print(f"{'ms':>6}{1e3 * their_time:>16.1f}{1e3 * our_time:>16.1f}")
    print(f"largest difference of the losses: {max(abs(a - b) for a, b in zip(theirs, ours, strict=True)):.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
