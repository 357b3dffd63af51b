"""What happens to a native call in a program for several devices: it stays local, or compiling the program fails.

XLA does not know how to split our calls. Outside of `jax.shard_map` it would silently gather each sharded operand,
weights too, and run the whole call on every device. A call is therefore lowered with a custom partitioner, to which XLA
reports how the operands are sharded: it accepts replicated operands and refuses all others (docs/contracts.md, ACC-10).
In a program for one device, and inside of `shard_map`, calls are lowered without it.

The calls in `SPLIT` compute each index of one axis independently of the other indices. Their operands may be sharded
along that axis: each device then runs the call on its own part, the results are sharded along the same axis, and
nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from grouped_core.calls import SLOTS, ArraySpec, Call
from grouped_core.schema import Slot, schema

try:  # not a public name; without it JAX does not tell a lowering its devices, and calls are lowered as they are
    from jax._src.dispatch import prim_requires_devices_during_lowering as _told_their_devices
except ImportError:
    _told_their_devices = set()


SPLIT = {"scale_update": "G"}
"""Calls that compute each index of one axis independently, and the letter of that axis in their schema."""


def not_local(call: Call, slot: str, sharding: Any) -> str:
    """The message for an operand that is sharded where calls act on one shard."""
    return (
        f"`{slot}` of {call.name}: sharded as {sharding} outside of jax.shard_map, expected the local arrays of one "
        "shard, because XLA would gather it on every device; call it inside of jax.shard_map, e.g.\n"
        "    local = jax.shard_map(function, mesh=mesh, in_specs=..., out_specs=...)\n"
        "    result = jax.jit(local)(*operands)\n"
        "or reshard the operand first, to replicate it. MoE layers open shard_map themselves if they have `mesh_axes=`."
    )


def _slots(call: Call) -> list[str]:
    """The operands that `call` has, in their order."""
    return [slot for slot, spec in zip(SLOTS[call.name], call.inputs, strict=True) if spec is not None]


_Axes = tuple[int | None, ...]


@lru_cache(maxsize=1024)
def _split_axes(call: Call) -> tuple[_Axes, _Axes]:
    """The axis of each operand and of each result that `call` may be split along; None where there is none."""
    letter, known = SPLIT.get(call.name), schema(call.name)

    def axes(slots: Mapping[str, Slot], specs: Sequence[ArraySpec | None]) -> _Axes:
        present = [slot for slot, spec in zip(slots.values(), specs, strict=True) if spec is not None]
        return tuple([next((dims.index(letter) for dims in slot.shapes if letter in dims), None) for slot in present])

    return axes(known.inputs, call.inputs), axes(known.outputs, call.outputs)


def split_over(call: Call, specs: Sequence[Any]) -> Any:
    """The entry of the PartitionSpecs of the operands that `call` is split over; None where all operands are whole.

    Args:
        specs: the spec of each operand; a sharding that has no PartitionSpec is refused.

    Raises:
        ValueError: an operand is sharded along an axis that the call is not split along, or over other axes of the mesh
            than an operand before it.
    """
    found = None
    for slot, own, spec in zip(_slots(call), _split_axes(call)[0], specs, strict=True):
        if not isinstance(spec, PartitionSpec):
            raise ValueError(not_local(call, slot, spec))
        for axis, entry in enumerate(spec):
            if entry is not None and (axis != own or found not in (None, entry)):
                raise ValueError(not_local(call, slot, spec))
            found = found if entry is None else entry
    return found


def split_specs(call: Call, over: Any) -> tuple[list[PartitionSpec], list[PartitionSpec]]:
    """How the operands and the results of `call` are sharded where it is split over the entry `over`."""

    def of(axes: _Axes, specs: Sequence[ArraySpec | None]) -> list[PartitionSpec]:
        ranks = [len(spec.shape) for spec in specs if spec is not None]
        return [
            PartitionSpec(*(over if at == axis else None for at in range(rank)))
            for axis, rank in zip(axes, ranks, strict=True)
        ]

    inputs, outputs = _split_axes(call)
    return of(inputs, call.inputs), of(outputs, call.outputs)


def _on_one_shard(call: Call, operands: Sequence[Any]) -> Call:
    """`call` for operands of one shard, which are shorter along the axis that it is split along."""
    inputs, outputs = _split_axes(call)
    own = {operand.shape[axis] for operand, axis in zip(operands, inputs, strict=True) if axis is not None}
    if not own:
        return call
    (length,) = own

    def cut(axes: _Axes, specs: Sequence[ArraySpec | None]) -> tuple[ArraySpec | None, ...]:
        axis = iter(axes)
        return tuple([None if spec is None else _with_length(spec, next(axis), length) for spec in specs])

    return replace(call, inputs=cut(inputs, call.inputs), outputs=cut(outputs, call.outputs))


def _with_length(spec: ArraySpec, axis: int | None, length: int) -> ArraySpec:
    if axis is None:
        return spec
    return spec._replace(shape=(*spec.shape[:axis], length, *spec.shape[axis + 1 :]))


def _spec_of(sharding: Any) -> Any:
    """The PartitionSpec of `sharding`, empty where the array is whole or nothing is known; the sharding itself where it
    has none.
    """
    whole = sharding is None or sharding.is_fully_replicated
    return PartitionSpec() if whole else getattr(sharding, "spec", sharding)


def check_whole(call: Call, operands: Sequence[Any]) -> None:
    """Refuses sharded operands of a call that runs at once; constants without a sharding are whole.

    Raises:
        ValueError: an operand is sharded, and not along the axis that the call may be split along.
    """
    split_over(call, [_spec_of(getattr(operand, "sharding", None)) for operand in operands])


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
    """Lowers `run(*operands, call=call)` with a partitioner that refuses sharded operands, if `call` is not split as
    they are.
    """

    def on_one_shard(*local: Any) -> Sequence[Any]:
        return run(*local, call=_on_one_shard(call, local))

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        kept = tuple(argument.sharding for argument in arguments)
        over = split_over(call, [_spec_of(sharding) for sharding in kept])
        if not isinstance(kept[0], NamedSharding):
            return mesh, on_one_shard, jax.tree.map(lambda _: kept[0], results), kept
        taken, made = ([NamedSharding(kept[0].mesh, spec) for spec in each] for each in split_specs(call, over))
        return mesh, on_one_shard, made, tuple(taken)

    def inferred(mesh: Any, arguments: Any, results: Any) -> Any:
        # XLA ends the process where this raises, so refusing is left to `partition`.
        try:
            over = split_over(call, [_spec_of(argument.sharding) for argument in arguments])
        except ValueError:
            over = None
        made = [NamedSharding(mesh, spec) for spec in split_specs(call, over)[1]]
        return jax.tree.unflatten(jax.tree.structure(results), made)

    guarded = custom_partitioning(on_one_shard)
    # GSPMD asks `inferred` and Shardy has the rule, beside which it does not accept such a function.
    shardy = getattr(jax.config, "jax_use_shardy_partitioner", True)
    guarded.def_partition(
        partition=partition,
        infer_sharding_from_operands=None if shardy else inferred,
        sharding_rule=_sharding_rule(call),
    )
    return mlir.lower_fun(guarded, multiple_results=True)(ctx, *operands)


def _sharding_rule(call: Call) -> str | None:
    """Which shardings XLA may propagate through `call`: along the axis that it may be split along, and no other."""
    if call.name not in SPLIT:
        return None
    others = count()

    def letters(spec: PartitionSpec) -> str:
        return " ".join(entry or f"d{next(others)}" for entry in spec)

    inputs, outputs = (", ".join(map(letters, specs)) for specs in split_specs(call, "split"))
    return f"{inputs} -> {outputs}"
