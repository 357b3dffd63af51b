"""Trains one MoE layer with its experts over several devices and on one, and compares them.

    python examples/expert_parallel.py --ranks 4 --transport all_to_all

Without enough GPUs it makes as many devices of the CPU as there are ranks.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped
from jax_grouped import parallel

TOKENS, EXPERTS, HIDDEN, WIDTH, CHOSEN = 256, 16, 64, 32, 2
AXES = parallel.MeshAxes(expert="expert")


def training(layer: Any, steps: int, params: dict[str, jax.Array], x: jax.Array, target: jax.Array) -> tuple[Any, Any]:
    """Parameters after some steps of gradient descent, and the loss and the dropped slots of each step."""

    def loss(params: dict[str, jax.Array]) -> Any:
        y, aux = layer(x, params["router"], params["wi"], params["wo"], CHOSEN, aux_coeff=0.01)
        return ((y - target) ** 2).mean() + aux.aux_loss, aux.dropped

    @jax.jit
    def step(params: dict[str, jax.Array]) -> Any:
        seen, gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients), seen

    history = []
    for _ in range(steps):
        params, (value, dropped) = step(params)
        history.append((float(value), int(dropped)))
    return params, history


def compare(options: argparse.Namespace, devices: list[Any]) -> None:
    """Prints the losses of both runs side by side, and whether the layer's results have the same bits."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {"router": (HIDDEN, EXPERTS), "wi": (EXPERTS, HIDDEN, 2 * WIDTH), "wo": (EXPERTS, WIDTH, HIDDEN)}
    params = {
        name: jax.random.normal(key, shape) / shape[-2] ** 0.5
        for key, (name, shape) in zip(keys[:3], shapes.items(), strict=True)
    }
    x, target = (jax.random.normal(key, (TOKENS, HIDDEN)) for key in keys[3:])

    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((options.ranks,), ("expert",), axis_types=kinds, devices=devices)
    split, whole = NamedSharding(mesh, P("expert")), NamedSharding(mesh, P())
    on_ranks = jax.device_put(params, {"router": whole, "wi": split, "wo": split})
    tokens, wanted = jax.device_put((x, target), split)

    def spread(*operands: Any, **rest: Any) -> Any:
        how = {"transport": options.transport, "budget_factor": options.budget_factor}
        return parallel.moe(*operands, axes=AXES, mesh=mesh, **how, **rest)

    _, alone = training(jax_grouped.moe, options.steps, params, x, target)
    found, over = training(spread, options.steps, on_ranks, tokens, wanted)
    print("experts per device:", *(shard.data.shape[0] for shard in found["wi"].addressable_shards))
    for at, ((one, _), (several, dropped)) in enumerate(zip(alone, over, strict=True)):
        print(f"step {at}: loss on one device {one:.6f}, on {options.ranks} {several:.6f}, dropped slots {dropped}")
    y, _ = jax_grouped.moe(x, *params.values(), CHOSEN)
    of_ranks, _ = spread(tokens, *on_ranks.values(), CHOSEN)
    same = np.array_equal(np.asarray(y), np.asarray(of_ranks))
    print(f"the layer's results have {'the same' if same else 'other'} bits as on one device")


def main(argv: list[str] | None = None) -> int:
    """Runs the example; 2 for options that do not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help=f"devices, a divisor of {EXPERTS}")
    parser.add_argument("--transport", default="all_to_all", choices=["all_to_all", "ragged_all_to_all", "ring"])
    parser.add_argument("--budget-factor", type=float, help="rows from rank to rank, in units of the mean")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args(argv)
    if options.ranks < 1 or EXPERTS % options.ranks:
        print(f"expert_parallel: --ranks {options.ranks} does not divide the {EXPERTS} experts", file=sys.stderr)
        return 2
    if options.steps < 1:
        print(f"expert_parallel: --steps {options.steps} is less than 1", file=sys.stderr)
        return 2
    jax.config.update("jax_num_cpu_devices", options.ranks)
    devices = jax.devices()
    if len(devices) < options.ranks:
        devices = jax.devices("cpu")
    with jax.default_device(devices[0]):
        compare(options, devices[: options.ranks])
    return 0


if __name__ == "__main__":
    sys.exit(main())
