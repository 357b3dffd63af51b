"""Mesh axes that a layer is spread over: where arrays are, and whether the caller is inside of `shard_map`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from grouped_core.formats import QTensor
from grouped_core.recipes import BoundRecipe
from grouped_core.scaling import ScalingState
from jax_grouped._run import varying_axes
from jax_grouped.quantize import StraightThrough

Axis = str | tuple[str, ...] | None
"""One axis of the mesh, several that count as one, or none."""


@dataclass(frozen=True)
class MeshAxes:
    """Over which axes of the mesh a MoE layer is spread, by name; None: over none.

    Tokens are split over `data` and `expert`, experts over `expert`, and the width F of each expert over `tensor`.

    Attributes:
        data: tokens alone are split; weights are replicated, or sharded with `fsdp=True`.
        expert: experts and tokens are split, and rows travel along it.
        tensor: tokens are replicated; each rank has a part of every expert's width.
    """

    data: Axis = None
    expert: Axis = None
    tensor: Axis = None

    def __post_init__(self) -> None:
        for name, axis in (("data", self.data), ("expert", self.expert), ("tensor", self.tensor)):
            names = () if axis is None else (axis,) if isinstance(axis, str) else axis
            if not isinstance(names, tuple) or not all(isinstance(each, str) for each in names):
                raise TypeError(
                    f"`{name}` of MeshAxes: {axis!r}, expected None, a name or a tuple of names; name axes of the mesh."
                )
        names = self.names
        if not names:
            raise ValueError(
                "MeshAxes: no axis, expected at least one of `data`, `expert`, `tensor`; name one, or use the "
                "functions for one device, such as jax_grouped.moe."
            )
        if len(set(names)) < len(names):
            raise ValueError(f"MeshAxes: axes {names}, expected each of them once; name different axes of the mesh.")

    @property
    def names(self) -> tuple[str, ...]:
        """All axes."""
        return (*self.tokens, *members(self.tensor))

    @property
    def tokens(self) -> tuple[str, ...]:
        """The axes that tokens are split over."""
        return (*members(self.data), *members(self.expert))


def members(axis: Axis) -> tuple[str, ...]:
    """The axes of the mesh that `axis` names."""
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def size_of(axis: Axis) -> int:
    """Ranks along `axis`, inside `shard_map`; 1 for none."""
    return math.prod(jax.lax.axis_size(name) for name in members(axis))


def rank_of(axis: Axis) -> Any:
    """Number of this rank along `axis`, inside `shard_map`: int32 scalar, the last axis running fastest."""
    names = members(axis)
    return jax.lax.axis_index(names) if names else jnp.zeros((), jnp.int32)


def vary_over(array: Any, axis: Axis) -> Any:
    """`array`, varying over `axis` too: what `check_vma` asks of operands of collectives. No data moves."""
    missing = tuple(name for name in members(axis) if name not in varying_axes(array))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def sum_over(array: Any, axis: Axis) -> Any:
    """The sum of `array` over `axis`."""
    return jax.lax.psum(vary_over(array, axis), members(axis)) if members(axis) else array


# ---------------------------------------------------------------------------------------------------------------------
# The mesh, from outside.


def is_inside(function: str, axes: MeshAxes) -> bool:
    """Whether the caller is inside `shard_map` over all axes.

    Raises:
        ValueError: over some of them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = set() if mesh.empty else set(mesh.manual_axes)
    inside = [name for name in axes.names if name in manual]
    if inside and len(inside) < len(axes.names):
        raise ValueError(
            f"`axes` of {function}: {axes.names}, of which only {tuple(inside)} are manual here, expected all or none; "
            "call it inside jax.shard_map over all of them, or outside of it."
        )
    return bool(inside)


def mesh_for(function: str, axes: MeshAxes, mesh: Any, x: Any) -> Any:
    """The mesh to open `shard_map` on: the one given, that of the context, or that of `x`.

    Raises:
        TypeError: `mesh` is no mesh. ValueError: there is none, or it lacks an axis.
    """
    if mesh is not None and not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        raise TypeError(
            f"`mesh` of {function}: {type(mesh).__name__}, expected None or a jax.sharding.Mesh; pass one, e.g. of "
            "jax.make_mesh."
        )
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            mesh = jax.typeof(x).sharding.mesh  # of Explicit axes; an Auto mesh shows in arrays alone, not in tracers
            if mesh.empty and not isinstance(x, Tracer):
                mesh = getattr(getattr(x, "sharding", None), "mesh", None)
    if mesh is None or mesh.empty:
        raise ValueError(
            f"`mesh` of {function}: None, expected a mesh, because none is set and `x` has none; pass one, or use "
            "jax.set_mesh."
        )
    missing = [name for name in axes.names if name not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"`axes` of {function}: {missing[0]!r}, expected axes of the mesh, {mesh.axis_names}; name those."
        )
    return mesh


def manual_axes(mesh: Any, axes: MeshAxes, check_vma: bool) -> set[str]:
    """The axes to open `shard_map` over: those of `axes`, and those of one device, which split nothing.

    On CPUs all of them: XLA ends the process where it promotes a sum of 16 bits (`AllReducePromotion`) while another
    axis is Auto. Along such an axis arrays are then replicated, and every device computes the same. Not without
    `check_vma`, where JAX would add up gradients and accumulators over it.
    """
    context = jax.sharding.get_abstract_mesh()
    taken = set() if context.empty else set(context.manual_axes)
    every = check_vma and _platform(mesh) == "cpu"
    others = {name for name in mesh.axis_names if name not in taken and (every or mesh.shape[name] == 1)}
    return set(axes.names) | others


def _platform(mesh: Any) -> str:
    """Of the devices of a mesh; an abstract one that does not know them has those of the default backend."""
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh.devices.flat[0].platform
    device = getattr(mesh, "abstract_device", None)
    return getattr(device, "platform", None) or jax.default_backend()


def ranks_along(mesh: Any, axis: Axis) -> int:
    """Ranks along `axis` of `mesh`."""
    return math.prod(mesh.shape[name] for name in members(axis))


def lay_out(function: str, mesh: Any, arrays: dict[str, Any], specs: dict[str, Any]) -> dict[str, Any]:
    """`arrays`, sharded over the Explicit axes of the mesh as `specs` say: a replicated array is cut, which moves no
    data. How arrays lie over Auto axes is XLA's choice.

    Raises:
        ValueError: an array is sharded differently, so that its data would have to be sent to other devices.
    """
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    if not explicit:
        return arrays

    def taken(path: Any, array: Any, spec: P) -> Any:
        own = jax.typeof(array).sharding
        entries = (*spec, *(None,) * (array.ndim - len(spec)))
        wanted = P(*(_entry(tuple([name for name in members(each) if name in explicit])) for each in entries))
        if own.mesh.empty or all(entry is None for entry in own.spec):
            return jax.sharding.reshard(array, NamedSharding(_abstract(mesh), wanted))
        if tuple(_entry(each) for each in own.spec) != tuple(wanted):
            raise ValueError(
                f"`{jax.tree_util.keystr(path, simple=True, separator='.')}` of {function}: sharded as {own.spec}, "
                f"expected {wanted}; reshard it first, with jax.sharding.reshard."
            )
        return array

    full = {name: broadcast(specs[name], arrays[name]) for name in arrays}
    return jax.tree_util.tree_map_with_path(taken, arrays, full)


def _abstract(mesh: Any) -> Any:
    return getattr(mesh, "abstract_mesh", mesh)


def _entry(entry: Any) -> Any:
    """An entry of a PartitionSpec in its only form: a name, a tuple of several, or None."""
    names = members(entry)
    return None if not names else names[0] if len(names) == 1 else names


def broadcast(spec: Any, tree: Any) -> Any:
    """`spec`, or a tree of specs that may end above the arrays of `tree`, as a tree with the structure of `tree`."""

    def below(one: P, part: Any) -> Any:
        return jax.tree.map(lambda _: one, part)

    return jax.tree.map(below, spec, tree, is_leaf=lambda node: isinstance(node, P))


# ---------------------------------------------------------------------------------------------------------------------
# Specs.


def weight_specs(node: Any, spec: P) -> Any:
    """Specs of a weight [E, ...], plain, a pair, or quantised: codes and scales are split by experts alone.

    Args:
        node: None where there is none. spec: that of the plain weight.
    """
    if node is None:
        return None
    if isinstance(node, tuple | list):
        return tuple(weight_specs(each, spec) for each in node)
    if isinstance(node, StraightThrough):
        return StraightThrough(spec, weight_specs(node.q, spec))
    if isinstance(node, QTensor):
        return jax.tree.map(lambda _: P(*spec[:1]), node)
    return spec


def recipe_specs(bound: BoundRecipe, experts: Axis) -> BoundRecipe:
    """Specs of what a recipe is bound to: the state of delayed scaling is split by experts."""
    state = bound.state
    if state is not None:
        state = ScalingState(P(None, experts), P(None, None, experts), P(), state.algorithm)
    return BoundRecipe(bound.recipe, state, None if bound.key is None else P())


def spec_over(names: Sequence[str], rank: int) -> P:
    """An array of `rank` axes whose first one is split over all of `names`."""
    return P(tuple(names) or None, *(None,) * (rank - 1))
