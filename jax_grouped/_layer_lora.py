"""What the adapters of the layers of Flax NNX and of Linen have in common: shapes, initial values, merged weights.

Letters: G groups (experts), K in, N out, r rank.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from grouped_core import lora
from grouped_core.formats import QTensor
from grouped_core.lora import Adapter, LayerOptions
from jax_grouped import _mesh
from jax_grouped._layer_options import Initializer
from jax_grouped._mesh import MeshAxes
from jax_grouped._run import RUN

default_a_init: Initializer = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", batch_axis=(0,))
"""Uniform within 1/sqrt(K), as in the layers of torch_bridge."""


def shapes(weight: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of A [*G, K, r] and B [*G, r, N] beside a weight [*G, K, N]."""
    *groups, depth, columns = weight
    return (*groups, depth, rank), (*groups, rank, columns)


def initial(key: Any, weight: tuple[int, int, int], rank: int, dtype: Any) -> tuple[Array, Array]:
    """A drawn with `key`, and B of zeros, so that the layer computes what its weights do."""
    of_a, of_b = shapes(weight, rank)
    return default_a_init(key, of_a, dtype), jnp.zeros(of_b, dtype)


def arguments(options: LayerOptions, adapter: Any, key: Any) -> dict[str, Any]:
    """The keywords of an operation for `adapter`, (A, B) or two such pairs.

    Args:
        key: () -> uint32 [2], called if elements are dropped.
    """
    if not options.rank:
        return {}
    dropped = {"lora_dropout": options.dropout, "lora_key": key()} if options.dropout else {}
    return {"lora": adapter, "lora_scaling": options.scaling, **dropped}


def frozen(options: LayerOptions, *arrays: Any) -> tuple[Any, ...]:
    """The weights of a layer; beside adapters without gradients."""
    if not options.rank:
        return arrays
    return tuple([None if each is None else jax.lax.stop_gradient(each) for each in arrays])


def merged(
    name: str,
    axes: MeshAxes | None,
    weight: Float[Array, "*G K N"],
    a: Float[Array, "*G K r"],
    b: Float[Array, "*G r N"],
    scaling: float,
) -> Float[Array, "*G K N"]:
    """weight + scaling A B, rounded once to the dtype of weight, each shard of a mesh by itself.

    A and B are not rounded, also if their dtype is wider than that of weight; the sums of A B are float32.

    Args:
        name: the weight's name in messages. axes: the mesh axes that its layer is spread over.
        weight, a, b: all have further axes where a scan stacked layers.

    Raises:
        TypeError: the weight is quantised. ValueError: A or B does not fit it; the weight is sharded along other axes
            than its groups, or its layer has a tensor axis.
    """
    _check_fit(name, weight, a, b)
    layout = _layout(name, axes, weight, a, b)
    return _merged_here(scaling, weight, a, b) if layout is None else _merged_over(layout, scaling, weight, a, b)


def _check_fit(name: str, weight: Any, a: Any, b: Any) -> None:
    if isinstance(weight, QTensor):
        raise TypeError(
            f"{name}: quantised values, expected an array, because a sum of both is no code; merge into the "
            "dequantised weight, and quantise that."
        )
    shape, of_a, of_b = (tuple(each.shape) for each in (weight, a, b))
    if len(shape) < 3:
        raise ValueError(
            f"{name}: shape {shape}, expected [G, K, N]; pass the weight that the adapter was trained with."
        )
    if (of_a, of_b) != shapes(shape, of_a[-1] if of_a else 0):
        raise ValueError(
            f"{name}: A of shape {of_a} and B of shape {of_b} beside a weight of shape {shape}, expected [G, K, r] and "
            "[G, r, N] beside [G, K, N]; pass adapters that were trained beside this weight. Layers may be stacked "
            "along axis 0 or 1, in front of K."
        )


def _merged_here(scaling: float, weight: Array, a: Array, b: Array) -> Array:
    *groups, depth, columns = weight.shape
    sizes = jnp.full((math.prod(groups),), depth, jnp.int32)
    rows = (weight.reshape(-1, columns), a.reshape(-1, a.shape[-1]), b.reshape(-1, *b.shape[-2:]), sizes)
    return lora.merged(RUN, Adapter(scaling=scaling), *rows).reshape(weight.shape)


class _Layout(NamedTuple):
    """How the groups of a weight and of its adapter are sharded.

    Attributes:
        spec: the spec of the axes in front of K. manual: the axes of `mesh` that shards are made along.
    """

    mesh: Any
    spec: P
    manual: frozenset[str]


@partial(jax.jit, static_argnums=(0, 1))
def _merged_over(layout: _Layout, scaling: float, weight: Array, a: Array, b: Array) -> Array:
    arrays = (weight, a, b)
    if AxisType.Explicit in layout.mesh.axis_types:  # elsewhere XLA lays them out
        where = NamedSharding(getattr(layout.mesh, "abstract_mesh", layout.mesh), layout.spec)
        arrays = tuple([jax.sharding.reshard(each, where) for each in arrays])
    run = jax.shard_map(
        partial(_merged_here, scaling),
        mesh=layout.mesh,
        in_specs=(layout.spec,) * 3,
        out_specs=layout.spec,
        axis_names=set(layout.manual),
    )
    return run(*arrays)


def _layout(name: str, axes: MeshAxes | None, *arrays: Array) -> _Layout | None:
    """The layout of the first of `arrays`, a weight and its adapter, that shows one; None: all are whole or local.

    In a program over Auto axes no array shows how it is sharded. There the weight is split as its layer is documented
    to be, and XLA refuses it if its other axes are sharded.
    """
    for array in arrays:
        mesh, spec = _shown(array)
        if mesh is None:
            continue
        if any(entry is not None for entry in spec[array.ndim - 2 :]):
            raise ValueError(
                f"{name}: sharded as {spec}, expected an array whose groups alone are split, because each shard merges "
                "its own; reshard it first, with jax.device_put or jax.sharding.reshard, so that other axes are whole."
            )
        return _Layout(mesh, P(*spec[: array.ndim - 2]), frozenset(mesh.axis_names))
    weight, mesh = arrays[0], jax.sharding.get_abstract_mesh()
    if not isinstance(weight, Tracer) or axes is None or axes.expert is None or mesh.empty:
        return None
    if axes.tensor is not None:
        raise ValueError(
            f"{name}: of a layer with the tensor axis {axes.tensor!r}, expected one whose experts alone are split, "
            "because each shard merges its own; make the layer without that axis, and reshard its weights."
        )
    mesh = _mesh.mesh_for(name, axes, mesh, weight)
    if _mesh.is_inside(name, axes) or weight.shape[-3] % _mesh.ranks_along(mesh, axes.expert):
        return None  # local already, or a shared expert, which every rank has
    return _Layout(mesh, P(*(None,) * (weight.ndim - 3), axes.expert), frozenset(_mesh.members(axes.expert)))


def _shown(array: Array) -> tuple[Any, P]:
    """Returns the mesh over which `array` is sharded, and its spec there.

    They are None and P() if the array is on one device, or is a tracer that does not show its sharding.
    """
    sharding = jax.typeof(array).sharding if isinstance(array, Tracer) else getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty or sharding.mesh.size == 1:
        return None, P()
    known = not isinstance(array, Tracer) or all(kind == AxisType.Explicit for kind in sharding.mesh.axis_types)
    return (sharding.mesh, sharding.spec) if known else (None, P())
