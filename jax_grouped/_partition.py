"""What happens to a native call in a program for several devices: it stays local, or compiling the program fails.

XLA does not know how to split our calls. Outside of `jax.shard_map` it would silently gather each sharded operand,
weights too, and run the whole call on every device. A call is therefore lowered with a custom partitioner, to which XLA
reports how the operands are sharded: it accepts replicated operands and refuses all others (docs/contracts.md, ACC-10).
In a program for one device, and inside of `shard_map`, calls are lowered without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from grouped_core.calls import SLOTS, Call

try:  # not a public name; without it JAX does not tell a lowering its devices, and calls are lowered as they are
    from jax._src.dispatch import prim_requires_devices_during_lowering as _told_their_devices
except ImportError:
    _told_their_devices = set()


def not_local(call: Call, slot: str, sharding: Any) -> str:
    """The message for an operand that is sharded where calls act on one shard."""
    return (
        f"`{slot}` of {call.name}: sharded as {sharding} outside of jax.shard_map, expected the local arrays of one "
        "shard, because XLA would gather it on every device; call it inside of jax.shard_map, e.g.\n"
        "    local = jax.shard_map(function, mesh=mesh, in_specs=..., out_specs=...)\n"
        "    result = jax.jit(local)(*operands)\n"
        "or reshard the operand first, to replicate it."
    )


def _slots(call: Call) -> list[str]:
    """The operands that `call` has, in their order."""
    return [slot for slot, spec in zip(SLOTS[call.name], call.inputs, strict=True) if spec is not None]


def check_whole(call: Call, operands: Sequence[Any]) -> None:
    """Refuses sharded operands of a call that runs at once; constants without a sharding are whole.

    Raises:
        ValueError: an operand is sharded.
    """
    for slot, operand in zip(_slots(call), operands, strict=True):
        if not getattr(operand, "is_fully_replicated", True):
            raise ValueError(not_local(call, slot, getattr(operand.sharding, "spec", operand.sharding)))


def told_its_devices(primitive: Primitive) -> None:
    """Makes JAX tell the lowering of `primitive` which devices the program is for."""
    _told_their_devices.add(primitive)


def may_be_partitioned(ctx: Any) -> bool:
    """Whether XLA may partition what is lowered: a program for several devices, and a mesh axis of more than one that
    is not manual.
    """
    context = ctx.module_context.axis_context
    manual, mesh = getattr(context, "manual_axes", None), getattr(context, "mesh", None)
    if manual is not None and mesh is not None:
        return any(size > 1 for name, size in mesh.shape.items() if name not in manual)
    devices = getattr(context, "device_assignment", None)
    return devices is not None and len(devices) > 1


def lower_local(ctx: Any, run: Callable[..., Sequence[Any]], call: Call, operands: Sequence[Any]) -> Sequence[Any]:
    """Lowers `run(*operands)`, which runs `call`, with a partitioner that refuses sharded operands."""

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        for slot, argument in zip(_slots(call), arguments, strict=True):
            if not argument.sharding.is_fully_replicated:
                raise ValueError(not_local(call, slot, getattr(argument.sharding, "spec", argument.sharding)))
        kept = tuple(argument.sharding for argument in arguments)
        whole = NamedSharding(kept[0].mesh, PartitionSpec()) if isinstance(kept[0], NamedSharding) else kept[0]
        return mesh, run, jax.tree.map(lambda _: whole, results), kept

    guarded = custom_partitioning(run)
    guarded.def_partition(partition=partition)
    return mlir.lower_fun(guarded, multiple_results=True)(ctx, *operands)
