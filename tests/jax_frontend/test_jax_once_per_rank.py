"""Layers over several devices that send a token to a rank once: bits where they are promised, else derived bounds."""

from __future__ import annotations

import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped
from grouped_core import reference_exchange
from grouped_core.exchange import exchange_option
from jax_grouped import MXFP8, FP8Block, linen, nnx, parallel, route
from jax_grouped.parallel import MeshAxes
from tests import asserts, bounds
from tests.jax_frontend.jax_tools import same
from tests.jax_frontend.parallel_tools import (
    EXPERT,
    KINDS,
    LOSSES,
    TRANSPORTS,
    E,
    F,
    H,
    K,
    T,
    adapters,
    close,
    draw,
    frozen,
    gradients,
    mesh_of,
    one_device,
    parameters,
    placed,
    problem,
    spread,
    wide_problem,
)

once = partial(spread, once_per_rank=True)


def parts(p: dict[str, Any], x: Any, dy: Any, **options: Any) -> tuple[Any, Any]:
    """What y and dx are sums of: one part for each slot, [k, T, H], and of dx that of the router as well."""
    _, experts, _ = route.topk_router(x.astype(jnp.float32) @ p["router"], K)

    def weights_of(x: Any) -> Any:
        weights, _, aux = route.topk_router(x.astype(jnp.float32) @ p["router"], K, experts=experts, **LOSSES)
        return weights, aux.aux_loss + aux.z_loss

    def slots(x: Any, weights: Any) -> list[Any]:
        each = [(experts[:, j : j + 1], weights[:, j : j + 1]) for j in range(K)]
        return [jax_grouped.routed_mlp(x, *slot, p["wi"], p["wo"], **options) for slot in each]

    def run(x: Any) -> Any:
        (weights, _), of_router = jax.vjp(weights_of, x)
        ys, of_slots = jax.vjp(slots, x, weights)
        grad = dy.astype(x.dtype)
        none = [jnp.zeros_like(grad)] * K
        pulled = [of_slots([*none[:j], grad, *none[j + 1 :]]) for j in range(K)]
        (of_x,) = of_router((sum(each[1] for each in pulled), jnp.ones(())))
        return jnp.stack(ys), jnp.stack([*(each[0] for each in pulled), of_x])

    return jax.jit(run)(x)


@cache
def parts_of_problem(dtype: str) -> tuple[Any, Any]:
    p, x, dy, _ = problem(dtype)
    return parts(p, x, dy)


def summed(actual: Any, expected: Any, of: Any, what: str) -> None:
    """Sums of the parts `of`, with other partial sums that are rounded to the dtype."""
    dtype = str(expected.dtype)
    error = bounds.of_partial_sums(np.asarray(of, np.float64), dtype)
    asserts.within(np.asarray(actual), bounds.Bounded(np.asarray(expected, np.float64), error, dtype), what)


@pytest.mark.rule("LYR-18", "LYR-13")
@pytest.mark.matrix(
    ranks=(1, 4, 8),
    transport=TRANSPORTS[:2],
    kind=KINDS,
    check_vma=(True, False),
    dtype=("float32", "bfloat16"),
)
def test_experts_over_ranks(ranks: int, transport: str, kind: AxisType, check_vma: bool, dtype: str) -> None:
    """Gradients of experts have the bits of one device; so have y and dx where no token has two experts on a rank."""
    p, x, dy, ((y, aux), dp, dx) = problem(dtype)
    mesh = mesh_of(kind, expert=ranks)
    options = {"transport": transport, "check_vma": check_vma, "mesh": mesh}
    (y2, aux2), dp2, dx2 = gradients(lambda p, x: once(p, x, **options), dy)(*placed(mesh, p, x, EXPERT))
    asserts.bitwise(aux2.load, aux.load, "load")
    assert not aux2.overflow
    for name in ("wi", "wo"):
        asserts.bitwise(dp2[name], dp[name], name)
    close(dp2["router"], dp["router"], "router", bounds.LAYER if dtype == "float32" else bounds.RING)
    if ranks in (1, E):
        asserts.bitwise(y2, y, "y")
        asserts.bitwise(dx2, dx, "dx")
    of_y, of_dx = parts_of_problem(dtype)
    summed(y2, y, of_y, "y")
    summed(dx2, dx, of_dx, "dx")


@pytest.mark.rule("LYR-18", "LYR-17")
@pytest.mark.parametrize("recipe", [FP8Block, MXFP8], ids=lambda recipe: recipe.name)
def test_codes_travel_once_too(recipe: Any) -> None:
    """In all transports with the same bits, in two runs as well."""
    (p, x, dy, ((y, _), dp, dx)), mesh = wide_problem(recipe), mesh_of(expert=4)
    where = placed(mesh, p, x, EXPERT)
    layers = [
        gradients(partial(once, mesh=mesh, recipe=recipe, send="codes", transport=each), dy) for each in TRANSPORTS[:2]
    ]
    found, *others = [layer(*where) for layer in (*layers, layers[0])]
    for each in others:
        same(each, found)
    (y2, _), dp2, dx2 = found
    asserts.bitwise(dp2["wo"], dp["wo"], "wo")
    of_y, of_dx = parts(p, x, dy, recipe=recipe)
    summed(y2, y, of_y, "y")
    summed(dx2, dx, of_dx, "dx")


@pytest.mark.rule("LYR-18", "LYR-10")
def test_budgets_drop_what_the_definition_drops() -> None:
    """In all transports, with the same bits."""
    ranks, tokens, factor = 4, 4 * T, 0.5
    p, x, dy = parameters(), draw(tokens, H, seed="x"), draw(tokens, H, seed="dy")
    p["router"] = p["router"] + jnp.arange(E, dtype=jnp.float32).reshape(1, -1)
    mesh = mesh_of(expert=ranks)
    weights, experts, _ = route.topk_router(x @ p["router"], K)
    op = exchange_option("test", ranks=ranks, experts=E, tokens=T, slots=K, budget_factor=factor, once_per_rank=True)
    received, dropped = reference_exchange.exchange(op, np.split(np.asarray(experts), ranks))
    received, beyond = reference_exchange.with_room(op, received)
    chosen = jnp.where(reference_exchange.travelled(op, received).reshape(tokens, K), experts, -1)
    assert sum(dropped) > 0
    assert 0 < beyond < tokens * K
    where, options = placed(mesh, p, x, EXPERT), {"mesh": mesh, "budget_factor": factor}
    found = [gradients(partial(once, transport=each, **options), dy)(*where) for each in TRANSPORTS[:2]]
    same(found[1], found[0])
    (y, aux), dp, _ = found[0]
    assert int(aux.dropped) == sum(dropped) + beyond
    assert bool(aux.overflow)

    def expected(p: dict[str, Any]) -> Any:
        return jax_grouped.routed_mlp(x, chosen, weights, p["wi"], p["wo"])

    ey, pull = jax.jit(partial(jax.vjp, expected))(p)
    close(y, ey, "y")
    (ep,) = pull(dy)
    for name in ("wi", "wo"):
        close(dp[name], ep[name], name)


@pytest.mark.rule("LYR-18", "LYR-11")
def test_a_rank_without_tokens() -> None:
    p, x, dy, _ = problem()
    mesh, mask = mesh_of(expert=4), jnp.arange(T) >= T // 4
    found = gradients(lambda p, x: once(p, x, mesh=mesh, mask=mask), dy)(*placed(mesh, p, x, EXPERT))
    (y, _), dp, dx = gradients(lambda p, x: one_device(p, x, mask=mask), dy)(p, x)
    for name in ("wi", "wo"):
        asserts.bitwise(found[1][name], dp[name], name)
    of_y, of_dx = parts_of_problem("float32")
    summed(found[0][0], y, of_y, "y")
    summed(found[2], dx, of_dx, "dx")
    asserts.zero(found[0][0][: T // 4])


@pytest.mark.rule("LYR-18", "LOR-4")
def test_adapters_beside_it() -> None:
    """Those of the experts have the gradients of one device, bit for bit."""
    (p, x, dy, _), mesh, lora = problem(), mesh_of(expert=4), adapters(E)

    def run(layer: Any, lora: Any) -> Any:
        def total(lora: Any) -> Any:
            y = layer(frozen(p), x, lora=lora, lora_scaling=0.5)[0]
            return (y * dy).sum(), y

        (_, y), found = jax.jit(jax.value_and_grad(total, has_aux=True))(lora)
        return y, found

    y, expected = run(one_device, lora)
    split = jax.tree.map(lambda each: jax.device_put(each, NamedSharding(mesh, P("expert"))), lora)
    y2, found = run(partial(once, mesh=mesh), split)
    same(found, expected)
    close(y2, y, "y")


@pytest.mark.rule("LYR-18", "LYR-10")
def test_dispatch_and_combine() -> None:
    """A layer of one's own: rows of a token's experts on a rank are made there, and their results are summed there.
    Backward makes the exchange again.
    """
    p, x, dy = parameters(), draw(T, H, seed="x"), draw(T, H, seed="dy")
    weights, experts, _ = route.topk_router(x @ p["router"], K)
    mesh, split = mesh_of(expert=4), P("expert")

    def local(x: Any, weights: Any, experts: Any, wi: Any, wo: Any) -> Any:
        rows, sizes, handle = parallel.dispatch(x, experts, weights, E, axis_name="expert", once_per_rank=True)
        assert rows.shape == (T * 2, H)
        y = jax_grouped.grouped_mlp(rows, wi, wo, sizes, probs=handle.probs)
        return parallel.combine(y, handle), sizes

    over = jax.shard_map(jax.checkpoint(local), mesh=mesh, in_specs=(split,) * 5, out_specs=(split, split))

    def pulled(function: Any) -> Any:
        def run(x: Any, w: Any, experts: Any, wi: Any, wo: Any) -> Any:
            y, pull, aux = jax.vjp(lambda x, w, *wiwo: function(x, w, experts, *wiwo), x, w, wi, wo, has_aux=True)
            return (y, *pull(dy)), aux

        return jax.jit(run)

    operands = (x, weights, experts, p["wi"], p["wo"])
    program = pulled(over)
    found, sizes = program(*operands)
    asserts.bitwise(sizes, np.bincount(np.asarray(experts).reshape(-1), minlength=E).astype(np.int32))
    expected, _ = pulled(lambda x, w, experts, wi, wo: (jax_grouped.routed_mlp(x, experts, w, wi, wo), None))(*operands)
    for what, a, e in list(zip(("y", "dx", "weights", "wi", "wo"), found, expected, strict=True))[2:]:
        asserts.bitwise(a, e, what)
    of_y, of_dx = parts_of_problem("float32")
    summed(found[0], expected[0], of_y, "y")
    summed(found[1], expected[1], of_dx, "dx")
    text = program.lower(*operands).as_text()
    assert len(re.findall(rf"stablehlo.all_to_all.*-> tensor<{T}x{H}xf32>", text)) == 5, "a row for each token"


@pytest.mark.rule("LYR-18")
def test_layers_of_flax() -> None:
    """Both kinds have the same bits, with data and tensor axes too; they are those of one device within bounds."""
    axes, mesh = MeshAxes("data", "expert"), mesh_of(data=2, expert=4)
    x = draw(8, T // 8, H, seed="x")
    options = {"mesh_axes": axes, "once_per_rank": True, "budget_factor": 4.0}
    alone = nnx.MoE(H, F, E, K, rngs=flax_nnx.Rngs(0))
    layer, other = nnx.MoE(H, F, E, K, rngs=flax_nnx.Rngs(0), **options), linen.MoE(H, F, E, K, **options)
    params = {"params": flax_nnx.to_pure_dict(flax_nnx.state(layer, flax_nnx.Param))}
    tokens = jax.device_put(x, NamedSharding(mesh, P(("data", "expert"))))
    with jax.set_mesh(mesh):
        found = [jax.jit(lambda x: layer(x))(tokens), jax.jit(lambda x: other.apply(params, x))(tokens)]
    same(*found)
    close(found[0][0], alone(x)[0], "y")
    with asserts.refused(
        ValueError, ("`once_per_rank` of MoE", "True without `mesh_axes`", "False", "axes of the mesh")
    ):
        nnx.MoE(H, F, E, K, rngs=flax_nnx.Rngs(0), once_per_rank=True)


@pytest.mark.rule("LYR-18")
def test_a_tensor_axis_adds_sums_of_ranks_in_float32() -> None:
    axes, mesh = MeshAxes(expert="expert", tensor="tensor"), mesh_of(expert=4, tensor=2)
    p, x, _, ((y, _), *_) = problem(pair=True)
    found, _ = jax.jit(partial(once, axes=axes, mesh=mesh))(*placed(mesh, p, x, axes))
    close(found, y, "y")


@pytest.mark.rule("ERR-1", "LYR-18")
def test_a_ring_refuses_it() -> None:
    words = ("`once_per_rank` of parallel.moe", "True with transport 'ring'", "expected False", "every rank once")
    with asserts.refused(ValueError, words):
        once(parameters(), draw(T, H), mesh=mesh_of(expert=4), transport="ring")
