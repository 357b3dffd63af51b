"""Trains one MoE layer with its experts over several devices and on one, and compares them bit by bit.

    python examples/expert_parallel.py --ranks 4 --transport all_to_all

Without GPUs it makes as many devices of the CPU as there are ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

TOKENS, EXPERTS, HIDDEN, WIDTH, CHOSEN = 256, 16, 64, 32, 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="devices, a divisor of 16")
    parser.add_argument("--transport", default="all_to_all", choices=["all_to_all", "ragged_all_to_all", "ring"])
    parser.add_argument("--budget-factor", type=float, help="rows from rank to rank, in units of the mean")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if options.ranks < 1 or EXPERTS % options.ranks:
        parser.exit(2, f"expert_parallel: --ranks {options.ranks} does not divide the {EXPERTS} experts\n")
    if options.steps < 1:
        parser.exit(2, f"expert_parallel: --steps {options.steps} is less than 1\n")
    return options


OPTIONS = arguments()
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={OPTIONS.ranks}")

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped
from jax_grouped.parallel import MeshAxes
from jax_grouped.parallel import moe as parallel_moe

AXES = MeshAxes(expert="expert")


def training(layer: Any, params: dict[str, jax.Array], x: jax.Array, target: jax.Array) -> tuple[Any, Any]:
    """Parameters and losses of a few steps of gradient descent."""

    def loss(params: dict[str, jax.Array]) -> Any:
        y, aux = layer(x, params["router"], params["wi"], params["wo"], CHOSEN, aux_coeff=0.01)
        return ((y - target) ** 2).mean() + aux.aux_loss, aux.dropped

    @jax.jit
    def step(params: dict[str, jax.Array]) -> Any:
        (value, dropped), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients), (value, dropped)

    history = []
    for _ in range(OPTIONS.steps):
        params, seen = step(params)
        history.append([float(each) for each in seen])
    return params, history


def main() -> int:
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {"router": (HIDDEN, EXPERTS), "wi": (EXPERTS, HIDDEN, 2 * WIDTH), "wo": (EXPERTS, WIDTH, HIDDEN)}
    params = {
        name: jax.random.normal(key, shape) / shape[-2] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    x, target = (jax.random.normal(key, (TOKENS, HIDDEN)) for key in keys[3:])

    mesh = jax.make_mesh((OPTIONS.ranks,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("expert")), NamedSharding(mesh, P())
    places = {"router": whole, "wi": split, "wo": split}

    def spread(*operands: Any, **options: Any) -> Any:
        how = {"transport": OPTIONS.transport, "budget_factor": OPTIONS.budget_factor}
        return parallel_moe(*operands, axes=AXES, mesh=mesh, **how, **options)

    _, alone = training(jax_grouped.moe, params, x, target)
    on_ranks = (jax.device_put(params, places), jax.device_put(x, split), jax.device_put(target, split))
    found, over = training(spread, *on_ranks)
    held = ", ".join(str(shard.data.shape[0]) for shard in found["wi"].addressable_shards)
    print(f"experts per device: {held}")
    for at, ((one, _), (several, dropped)) in enumerate(zip(alone, over, strict=True)):
        print(f"step {at}: loss on one device {one:.6f}, on {OPTIONS.ranks} {several:.6f}, dropped slots {dropped:.0f}")
    y, _ = jax_grouped.moe(x, *params.values(), CHOSEN)
    of_ranks, _ = spread(on_ranks[1], *on_ranks[0].values(), CHOSEN)
    same = np.array_equal(np.asarray(y), np.asarray(of_ranks))
    print(f"the layer's results have {'the same' if same else 'other'} bits as on one device")
    return 0


if __name__ == "__main__":
    sys.exit(main())
