"""Problems of layers over several devices: parameters, meshes, gradients, and comparisons with one device."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped
from jax_grouped import parallel
from jax_grouped.parallel import MeshAxes
from tests import asserts, bounds, cases

T, E, K, H, F, S = 32, 8, 3, 16, 8, 4
"""T tokens of all ranks; S is the width of the shared expert."""
EXPERT = MeshAxes(expert="expert")
LOSSES = {"aux_coeff": 0.5, "z_coeff": 0.1}
TRANSPORTS = ("all_to_all", "ragged_all_to_all", "ring")
KINDS = (AxisType.Auto, AxisType.Explicit)


def draw(*shape: int, dtype: str = "float32", seed: object = 0) -> Any:
    return jnp.asarray(cases.normal(shape, dtype, "parallel", seed))


def parameters(dtype: str = "float32", *, pair: bool = False) -> dict[str, Any]:
    """Router and experts; with `pair`, gate and linear half are two arrays."""
    found = {
        "router": draw(H, E, seed="router"),
        "wi": draw(E, H, 2 * F, dtype=dtype),
        "wo": draw(E, F, H, dtype=dtype),
    }
    return found | ({"wi": tuple(jnp.split(found["wi"], 2, axis=2))} if pair else {})


def mesh_of(kind: AxisType = AxisType.Auto, **sizes: int) -> Any:
    count = int(np.prod(list(sizes.values())))
    kinds = (kind,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=jax.devices()[:count])


def placed(mesh: Any, p: dict[str, Any], x: Any, axes: MeshAxes, *, fsdp: bool = False) -> Any:
    """Parameters and tokens, split as `axes` say."""
    hidden = axes.data if fsdp else None
    specs = {"router": P(), "wi": P(axes.expert, hidden, axes.tensor), "wo": P(axes.expert, axes.tensor, hidden)}

    def put(array: Any, spec: P) -> Any:
        # From the host: an array on one device would be split by a program that is compiled for it.
        return jax.device_put(np.asarray(array), NamedSharding(mesh, spec))

    return {name: jax.tree.map(lambda a, s=specs[name]: put(a, s), p[name]) for name in p}, put(x, P(axes.tokens))


def gradients(layer: Any, dy: Any) -> Any:
    """y, `MoEAux` and the gradients of parameters and tokens."""

    def total(p: dict[str, Any], x: Any) -> Any:
        y, aux = layer(p, x)
        return (y.astype(jnp.float32) * dy).sum() + aux.aux_loss + aux.z_loss, (y, aux)

    def run(p: dict[str, Any], x: Any) -> Any:
        found, (dp, dx) = jax.value_and_grad(total, (0, 1), has_aux=True)(p, x)
        return found[1], dp, dx

    return jax.jit(run)


def one_device(p: dict[str, Any], x: Any, **options: Any) -> Any:
    return jax_grouped.moe(x, p["router"], p["wi"], p["wo"], K, **LOSSES, **options)


class Problem(NamedTuple):
    """Parameters, tokens, the gradient of y, and what one device makes of them."""

    p: dict[str, Any]
    x: Any
    dy: Any
    expected: Any


@cache
def problem(dtype: str = "float32", *, pair: bool = False) -> Problem:
    """That of most tests."""
    p, x, dy = parameters(dtype, pair=pair), draw(T, H, dtype=dtype, seed="x"), draw(T, H, seed="dy")
    return Problem(p, x, dy, gradients(one_device, dy)(p, x))


def spread(p: dict[str, Any], x: Any, axes: MeshAxes = EXPERT, **options: Any) -> Any:
    return parallel.moe(x, p["router"], p["wi"], p["wo"], K, axes=axes, **LOSSES, **options)


def close(actual: Any, expected: Any, what: str, rate: float = bounds.LAYER) -> None:
    wide = np.asarray(expected, np.float64)
    size = rate * np.abs(wide).max(initial=0)
    asserts.within(np.asarray(actual), bounds.Bounded(wide, size + 0 * wide, str(expected.dtype)), what)


def same_layer(found: Any, expected: Any, *, exact: bool = True, rate: float = bounds.LAYER) -> None:
    """Counts have the same bits; so have y and the gradients of tokens and experts if `exact`, else bounds."""
    ((y, aux), dp, dx), ((ey, eaux), ep, ex) = found, expected
    asserts.bitwise(aux.load, eaux.load, "load")
    for name in ("aux_loss", "z_loss", "entropy"):
        close(getattr(aux, name), getattr(eaux, name), name)
    close(dp["router"], ep["router"], "router", rate)
    pairs = {"y": (y, ey), "dx": (dx, ex), "wo": (dp["wo"], ep["wo"])}
    halves = zip(jax.tree.leaves(dp["wi"]), jax.tree.leaves(ep["wi"]), strict=True)
    pairs |= {f"wi {at}": each for at, each in enumerate(halves)}
    for what, (a, e) in pairs.items():
        if exact:
            asserts.bitwise(a, e, what)
        else:
            close(a, e, what, rate)


R = 4
"""Rank of adapters."""


def adapters(count: int, part: str = "") -> Any:
    """Those of so many experts: ((A, B) of wi, (A, B) of wo)."""
    shapes = (((H, R), (R, 2 * F)), ((F, R), (R, H)))
    return tuple(tuple(draw(count, *shape, seed=(part, shape)) * 0.2 for shape in pair) for pair in shapes)


def frozen(p: dict[str, Any]) -> dict[str, Any]:
    return {name: each if name == "router" else jax.lax.stop_gradient(each) for name, each in p.items()}


@cache
def wide_problem(recipe: Any) -> Problem:
    """One with whole blocks of a recipe."""
    wide = 64
    x, router, dy = draw(T, wide, dtype="bfloat16", seed="x"), draw(wide, E, seed="router"), draw(T, wide, seed="dy")
    p = {"router": router, "wi": draw(E, wide, 2 * 32, dtype="bfloat16"), "wo": draw(E, 32, wide, dtype="bfloat16")}
    return Problem(p, x, dy, gradients(lambda p, x: one_device(p, x, recipe=recipe), dy)(p, x))
