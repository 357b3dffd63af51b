"""How well does an expert-parallel layer scale, and what do its exchange and the local parts of it cost? In JAX.

    python benchmarks/bench_parallel.py                       # on all GPUs of the machine
    python benchmarks/bench_parallel.py --local               # on one GPU: orders, packing and unpacking at EP 8
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python benchmarks/bench_parallel.py --device cpu

Weak scaling: every rank has the tokens and the experts of the shape, so the layer of P ranks has P times as many of
both; the time of one rank without an exchange over that of P ranks is the efficiency. "once_per_rank" sends a token to
a rank once. "rows" is a `dispatch` and a `combine` alone, "raw" an all-to-all of as many bytes as the rows of both.
Each time is that of one jitted call of several steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jax_grouped
from grouped_core import exchange, routing
from jax_grouped import parallel
from jax_grouped._run import RUN

SHAPES = {  # tokens of a rank, hidden size, expert width, experts of a rank, experts per token
    "mixtral_8x7b": (8192, 4096, 14336, 4, 2),
    "deepseek_v3": (4096, 7168, 2048, 16, 8),
    "qwen3_30b_a3b": (8192, 2048, 768, 64, 8),
    "olmoe_1b_7b": (8192, 2048, 1024, 32, 8),
}
SMALL = {"small": (256, 128, 128, 4, 2)}
"""On a CPU."""
LOCAL_RANKS = 8
LOCAL_OWN = {"olmoe_1b_7b": 8}
"""Experts of a rank of `LOCAL_RANKS`, where the shape has more of them than the model."""


def milliseconds(call: Callable[[], Any], rounds: int) -> float:
    """The median time of a call."""
    jax.block_until_ready(call())
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(call())
        taken.append((time.perf_counter() - start) * 1e3)
    return float(np.median(taken))


def operands(shape: tuple[int, ...], mesh: Any, ranks: int) -> dict[str, Any]:
    """x, router, wi and wo of all ranks, on the mesh."""
    tokens, hidden, width, own, _ = shape
    split, whole = NamedSharding(mesh, PartitionSpec("expert")), NamedSharding(mesh, PartitionSpec())

    @partial(jax.jit, out_shardings=(split, whole, split, split))
    def made() -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = ((ranks * tokens, hidden), (hidden, ranks * own), (ranks * own, hidden, 2 * width))
        shapes = (*shapes, (ranks * own, width, hidden))
        return tuple(
            [jax.random.normal(key, each, jnp.bfloat16) * 0.02 for key, each in zip(keys, shapes, strict=True)]
        )

    return dict(zip(("x", "router", "wi", "wo"), made(), strict=True))


def step_of(layer: Callable[..., Any], steps: int) -> Callable[..., Any]:
    """`steps` times forward and backward of y = layer(p), one after the other, in one program."""

    def loss(p: dict[str, Any]) -> Any:
        return jnp.sum(layer(p)[0].astype(jnp.float32) ** 2)

    def once(p: dict[str, Any], _: Any) -> tuple[dict[str, Any], None]:
        gradients = jax.grad(loss)(p)
        return jax.tree.map(lambda a, b: a - (1e-6 * b).astype(a.dtype), p, gradients), None

    return jax.jit(lambda p: jax.lax.scan(once, p, None, length=steps)[0])


def spread(name: str, shape: tuple[int, ...], options: argparse.Namespace) -> dict[str, Any]:
    """Times of one shape on all devices."""
    tokens, hidden, _, own, k = shape
    devices = jax.devices(options.device)
    found: dict[str, Any] = {"shape": name, "ranks": len(devices)}
    one = operands(shape, jax.sharding.Mesh(np.array(devices[:1]), ("expert",)), 1)
    alone = step_of(lambda p: jax_grouped.moe(p["x"], p["router"], p["wi"], p["wo"], k), options.steps)
    found["one"] = milliseconds(lambda: alone(one), options.rounds) / options.steps
    mesh = jax.make_mesh((len(devices),), ("expert",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    p, axes = operands(shape, mesh, len(devices)), parallel.MeshAxes(expert="expert")
    ways: list[tuple[str, bool]] = [(transport, False) for transport in options.transports]
    ways += [(transport, True) for transport in options.transports if transport != "ring"]
    for transport, once in ways:
        given: dict[str, Any] = {"axes": axes, "mesh": mesh, "transport": transport, "once_per_rank": once}
        given |= {} if transport == "ring" else {"budget_factor": options.budget_factor}

        def layer(p: dict[str, Any], given: dict[str, Any] = given) -> Any:
            return parallel.moe(p["x"], p["router"], p["wi"], p["wo"], k, **given)

        together = step_of(layer, options.steps)
        label = f"{transport}, once_per_rank" if once else transport
        found[label] = milliseconds(lambda call=together: call(p), options.rounds) / options.steps
    # The exchange alone.
    experts = jax.random.randint(jax.random.key(1), (len(devices) * tokens, k), 0, len(devices) * own)
    split = PartitionSpec("expert")

    def there_and_back(x: Any, experts: Any) -> Any:
        count, budget = len(devices) * own, options.budget_factor
        weights = jnp.ones(experts.shape, jnp.float32)
        rows, _, handle = parallel.dispatch(x, experts, weights, count, axis_name="expert", budget_factor=budget)
        return parallel.combine(rows, handle)

    moved = jax.jit(jax.shard_map(there_and_back, mesh=mesh, in_specs=(split, split), out_specs=split))
    found["rows"] = milliseconds(lambda: moved(p["x"], experts), options.rounds)
    budget = exchange.exchange_option(
        "bench",
        ranks=len(devices),
        experts=len(devices) * own,
        tokens=tokens,
        slots=k,
        budget_factor=options.budget_factor,
    ).budget

    def twice(rows: Any) -> Any:
        for _ in range(2):
            rows = jax.lax.all_to_all(rows, "expert", 0, 0, tiled=True)
        return rows

    raw = jax.jit(jax.shard_map(twice, mesh=mesh, in_specs=split, out_specs=split))
    rows = jax.device_put(jnp.ones((len(devices) ** 2 * budget, hidden), jnp.bfloat16), NamedSharding(mesh, split))
    found["raw"] = milliseconds(lambda: raw(rows), options.rounds)
    found["MB a way"] = budget * (len(devices) - 1) * hidden * 2 / 1e6
    return found


def local(name: str, shape: tuple[int, ...], options: argparse.Namespace) -> dict[str, Any]:
    """Times of the parts of an exchange that run on a rank, of LOCAL_RANKS ranks, and of the layer of that rank."""
    own = LOCAL_OWN.get(name, shape[3])
    shape = (*shape[:3], own, shape[4])
    tokens, k = shape[0], shape[4]
    mesh = jax.sharding.Mesh(np.array(jax.devices(options.device)[:1]), ("expert",))
    p = operands(shape, mesh, 1)
    count = LOCAL_RANKS * own
    experts = jax.random.randint(jax.random.key(1), (tokens, k), 0, count, jnp.int32)
    weights = jnp.ones((tokens, k), jnp.float32)

    def pack(op: exchange.Exchange, x: Any, weights: Any, experts: Any) -> Any:
        sent = exchange.send_order(RUN, op, experts, weights)
        return routing.gather(RUN, x, sent.source, k), sent.experts, sent.probs, sent.inverse

    def unpack(rows: Any, inverse: Any) -> Any:
        return routing.combine(RUN, rows, inverse, "bfloat16")

    many = options.steps

    def repeated(function: Callable[..., Any]) -> Callable[..., Any]:
        # A call depends on the one before through its last operand, integers, which are copied; rows are not.
        def body(carry: Any, _: Any) -> tuple[Any, Any]:
            results = jax.lax.optimization_barrier(function(*carry))
            first = jax.tree.leaves(results)[0].reshape(-1)[:1]
            return (*carry[:-1], carry[-1] + jnp.isnan(first).astype(jnp.int32)), None

        return jax.jit(lambda *given: jax.lax.scan(body, given, None, length=many)[0][-1])

    nothing = repeated(lambda x, *_: x[:1, :1])
    base = milliseconds(lambda: nothing(p["x"], weights, experts), options.rounds) / many
    found: dict[str, Any] = {"shape": name, "ranks": LOCAL_RANKS}
    layer = step_of(lambda p: jax_grouped.moe(p["x"], p["router"], p["wi"], p["wo"], k), many)
    found["layer, forward + backward"] = milliseconds(lambda: layer(p), options.rounds) / many
    sizes = {"ranks": LOCAL_RANKS, "experts": count, "tokens": tokens, "slots": k}
    for once in (False, True):
        op = exchange.exchange_option("bench", **sizes, budget_factor=options.budget_factor, once_per_rank=once)
        packs, beside = partial(pack, op), ", once_per_rank" if once else ""
        rows, _, _, inverse = jax.jit(packs)(p["x"], weights, experts)
        packing, unpacking = repeated(packs), repeated(unpack)
        times = (
            milliseconds(lambda packing=packing: packing(p["x"], weights, experts), options.rounds) / many - base,
            milliseconds(lambda of=(unpacking, rows, inverse): of[0](*of[1:]), options.rounds) / many - base,
        )
        found |= {f"pack{beside}": times[0], f"unpack{beside}": times[1]}
        found[f"share{beside}"] = 2 * sum(times) / found["layer, forward + backward"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shapes", nargs="+", help="names; default: all")
    parser.add_argument("--transports", nargs="+", choices=("all_to_all", "ragged_all_to_all", "ring"))
    parser.add_argument("--budget-factor", type=float, default=1.25)
    parser.add_argument("--steps", type=int, default=4, help="per call")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--local", action="store_true", help="what an exchange costs a rank, on one device")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.transports = options.transports or ["all_to_all", "ring"]
    shapes = SHAPES if options.device == "cuda" else SMALL
    results = []
    for name, shape in shapes.items():
        if options.shapes and name not in options.shapes:
            continue
        found = (local if options.local else spread)(name, shape, options)
        print(
            "  ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{value}" for key, value in found.items())
        )
        sys.stdout.flush()
        results.append(found)
    print(jax.devices()[0].device_kind, jax.__version__)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
