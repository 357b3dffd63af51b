"""What does `jax_grouped.patch()` gain in a training step of MoE code on `jax.lax.ragged_dot`, in time and in memory?

    python benchmarks/bench_jax_hosts.py                      # a GPU
    python benchmarks/bench_jax_hosts.py --device cpu         # small shapes, to see that it runs

The model is a stack of Flax layers as users write them: a router, rows sorted by expert, three grouped products, the
sum per token, trained with AdamW in bfloat16. It knows nothing of this library. Candidates run in turns. `dense` is the
upper bound: one matrix for all rows, with the same operations. Temporaries are those that XLA reports for the compiled
step, without parameters and moments; they include what is saved for backward. The error is the distance of all
gradients from those of float32 parameters on lax.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).parents[1]))

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jax_grouped
from benchmarks import harness
from jax_grouped import Recipe


@dataclass(frozen=True)
class Shape:
    """A model: tokens of a step, their columns, width of an expert, experts, experts per token, layers."""

    tokens: int
    hidden: int
    width: int
    experts: int
    per_token: int
    layers: int


SHAPES = {
    "cuda": Shape(tokens=1024, hidden=2048, width=1024, experts=64, per_token=8, layers=4),
    "cpu": Shape(tokens=64, hidden=64, width=32, experts=8, per_token=2, layers=2),
}
CANDIDATES: dict[str, Recipe | None] = {
    "patched": None,
    "patched, FP8Block": jax_grouped.FP8Block,
    "patched, FP8Current": jax_grouped.FP8Current,
}


# ---------------------------------------------------------------------------------------------------------------------
# A user's code.


class Experts(nn.Module):
    """[T, H] -> [T, H], with a residual connection."""

    shape: Shape
    dense: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        s = self.shape
        init = nn.initializers.lecun_normal(batch_axis=(0,))
        gate = self.param("gate", init, (s.experts, s.hidden, s.width), x.dtype)
        up = self.param("up", init, (s.experts, s.hidden, s.width), x.dtype)
        down = self.param("down", init, (s.experts, s.width, s.hidden), x.dtype)
        h = nn.RMSNorm(dtype=x.dtype, param_dtype=x.dtype)(x)
        logits = nn.Dense(s.experts, use_bias=False, dtype=jnp.float32, param_dtype=x.dtype)(h)
        weights, experts = jax.lax.top_k(jax.nn.softmax(logits), s.per_token)
        flat = experts.reshape(-1)
        order = jnp.argsort(flat)
        sizes = jnp.bincount(flat, length=s.experts).astype(jnp.int32)
        rows = h[order // s.per_token]

        def product(rows: jax.Array, kernel: jax.Array) -> jax.Array:
            return rows @ kernel[0] if self.dense else jax.lax.ragged_dot(rows, kernel, sizes)

        y = product(nn.silu(product(rows, gate)) * product(rows, up), down)
        y = y[jnp.argsort(order)].reshape(s.tokens, s.per_token, s.hidden)
        return x + jnp.einsum("tkh,tk->th", y, weights.astype(y.dtype))


class Model(nn.Module):
    """Layers of experts."""

    shape: Shape
    dense: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in range(self.shape.layers):
            x = Experts(self.shape, self.dense, name=f"layer_{layer}")(x)
        return x


OPTIMIZER = optax.adamw(1e-4)


def loss(params: Any, model: Model, batch: jax.Array) -> jax.Array:
    """The mean square of what the model adds."""
    return jnp.mean(jnp.square((model.apply(params, batch) - batch).astype(jnp.float32)))


def train_step(params: Any, moments: Any, batch: jax.Array, *, model: Model) -> Any:
    """New parameters and moments, and the loss."""
    value, grads = jax.value_and_grad(loss)(params, model, batch)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments, value


# ---------------------------------------------------------------------------------------------------------------------
# Measurement.


@dataclass(frozen=True)
class Result:
    """One candidate: its time per step, temporaries of the compiled step, share of the dense step, error."""

    candidate: str
    timing: harness.Timing | None
    temporaries_mib: float
    error: float | None
    share: float | None = None


def compiled(model: Model, args: tuple[Any, ...], context: Any) -> tuple[Any, Any]:
    """The training step and the gradients alone, both compiled within the context."""
    with context:
        step = jax.jit(lambda *args: train_step(*args, model=model)).lower(*args).compile()
        return step, jax.jit(lambda params, batch: jax.grad(loss)(params, model, batch)).lower(
            args[0], args[2]
        ).compile()


def distance(found: Any, wanted: Any) -> float:
    """Of all leaves, relative to the norm of the wanted ones."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))
    squares = sum(float(jnp.sum((a.astype(jnp.float32) - b) ** 2)) for a, b in pairs)
    return (squares / sum(float(jnp.sum(b**2)) for _, b in pairs)) ** 0.5


def run(shape: Shape, clock: harness.Clock, rounds: int) -> list[Result]:
    """All candidates, in turns."""
    model = Model(shape)
    batch = jax.random.normal(jax.random.key(0), (shape.tokens, shape.hidden), jnp.bfloat16)
    params = jax.jit(model.init)(jax.random.key(1), batch)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), params)
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(jax.grad(loss), static_argnums=1)(wide, model, batch.astype(jnp.float32))
    args = (params, OPTIMIZER.init(params), batch)
    plain = contextlib.nullcontext()
    built = {
        "lax": compiled(model, args, plain),
        **{name: compiled(model, args, jax_grouped.patch(recipe=recipe)) for name, recipe in CANDIDATES.items()},
        "dense": compiled(Model(shape, dense=True), args, plain),
    }
    thunks = {name: (lambda i, step=step: jax.block_until_ready(step(*args)[2])) for name, (step, _) in built.items()}
    if clock is harness.queue_clock:
        thunks = {name: (lambda i, step=step: step(*args)[2]) for name, (step, _) in built.items()}
    timings = harness.measure(thunks, clock=clock, rounds=rounds)
    return [
        Result(
            name,
            timings[name],
            step.memory_analysis().temp_size_in_bytes / 2**20,
            None if name == "dense" else distance(grads(params, batch), wanted),
            timings["dense"].median_us / timings[name].median_us,
        )
        for name, (step, grads) in built.items()
    ]


def table(results: list[Result]) -> str:
    """The results as text."""
    lines = [f"{'candidate':<22}{'ms per step':>11}{'+-':>6}{'of dense':>10}{'temporaries MiB':>17}{'error':>10}"]
    for r in results:
        assert r.timing is not None
        error = "" if r.error is None else f"{r.error:.1e}"
        time = f"{r.timing.median_us / 1e3:>11.2f}{r.timing.spread:>6.0%}"
        lines.append(f"{r.candidate:<22}{time}{r.share:>10.3f}{r.temporaries_mib:>17.1f}{error:>10}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, help="another number of layers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = SHAPES[options.device]
    if options.layers:
        shape = Shape(**{**asdict(shape), "layers": options.layers})
    if options.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    clock = harness.queue_clock if options.device == "cuda" else harness.cpu_clock
    results = run(shape, clock, options.rounds)
    print(shape)
    print(table(results))
    facts = {**harness.machine(), "device": jax.devices()[0].device_kind}
    print(facts)
    if options.json:
        found = {"machine": facts, "shape": asdict(shape), "results": [asdict(r) for r in results]}
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
