"""Layers over several devices against the same layer on one: bits where they are promised, else bounds."""

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
from numpy.typing import NDArray

import jax_grouped
from grouped_core import recipes, reference_exchange
from grouped_core.exchange import exchange_option
from jax_grouped import MXFP8, Activation, FP8Block, FP8Current, FP8Delayed, SharedExpert, linen, nnx, parallel, route
from jax_grouped.parallel import MeshAxes
from tests import asserts, bounds
from tests.jax_frontend.parallel_tools import (
    EXPERT,
    KINDS,
    LOSSES,
    TRANSPORTS,
    E,
    F,
    H,
    K,
    Problem,
    R,
    S,
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
    same_layer,
    spread,
    wide_problem,
)


def gradients_of_adapters(run: Any, lora: Any) -> Any:
    """((loss, y), gradients of adapters, of the shared expert's, and of tokens)."""
    p, x, dy = frozen(parameters()), draw(T, H, seed="x"), draw(T, H, seed="dy")
    shared = SharedExpert(p["wi"][:1], p["wo"][:1])

    def total(lora: Any, of_shared: Any, x: Any) -> Any:
        options = {"lora": lora, "lora_scaling": 0.5, "shared": shared._replace(lora=of_shared)}
        y = run(frozen(p), x, **options)[0]
        return (y * dy).sum(), y

    return jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(lora, adapters(1, "shared"), x)


@cache
def adapters_of_one_device() -> Any:
    return gradients_of_adapters(one_device, adapters(E))


@pytest.mark.rule("LYR-9", "LOR-4")
@pytest.mark.matrix(ranks=(1, 2, 4), check_vma=(True, False), few=[(1, True), (1, False), (2, True), (4, False)])
def test_adapters_are_split_as_their_experts_are(ranks: int, check_vma: bool) -> None:
    """y and the gradients of tokens and adapters have the bits of one device; a shared expert's adapters add up."""
    (_, y), (d_lora, d_shared, dx) = adapters_of_one_device()
    mesh = mesh_of(expert=ranks)
    split = jax.tree.map(lambda each: jax.device_put(each, NamedSharding(mesh, P("expert"))), adapters(E))
    (_, y2), found = gradients_of_adapters(partial(spread, mesh=mesh, check_vma=check_vma), split)
    asserts.bitwise(y2, y, "y")
    asserts.bitwise(found[2], dx, "dx")
    for mine, theirs in zip(jax.tree.leaves(found[0]), jax.tree.leaves(d_lora), strict=True):
        asserts.bitwise(mine, theirs, "adapters")
    for mine, theirs in zip(jax.tree.leaves(found[1]), jax.tree.leaves(d_shared), strict=True):
        close(mine, theirs, "adapters of the shared expert")


@pytest.mark.rule("LYR-9", "LOR-1")
def test_dropout_of_adapters_differs_between_ranks() -> None:
    """A layer of one axis has the masks of its key; others have their own, and the same ones again in the next call."""
    p, x, key = frozen(parameters()), draw(T, H, seed="x"), jnp.array([1, 2], jnp.uint32)
    options = {"lora": adapters(E), "lora_dropout": 0.5, "lora_key": key}
    one, spread_1, spread_2, again = (
        np.asarray(run(p, x, **options)[0])
        for run in (one_device, *(partial(spread, mesh=mesh_of(expert=ranks)) for ranks in (1, 2, 2)))
    )
    asserts.bitwise(spread_1, one)
    asserts.bitwise(spread_2, again)
    assert np.any(spread_2[: T // 2] != one[: T // 2])


@pytest.mark.rule("LYR-9", "LOR-1")
def test_dropout_beside_a_shared_expert_differs_between_ranks() -> None:
    """Here every rank has the same tokens. One rank alone has the masks of one device."""
    p, x = frozen(parameters()), jnp.tile(draw(T // 2, H, seed="x"), (2, 1))
    shared = SharedExpert(p["wi"][:1], p["wo"][:1], lora=adapters(1, "shared"))
    options = {"shared": shared, "lora_dropout": 0.5, "lora_key": jnp.array([1, 2], jnp.uint32)}
    one, spread_1, spread_2 = (
        np.asarray(run(p, x, **options)[0])
        for run in (one_device, *(partial(spread, mesh=mesh_of(expert=ranks)) for ranks in (1, 2)))
    )
    asserts.bitwise(spread_1, one)
    assert np.any(spread_2[: T // 2] != spread_2[T // 2 :])


@pytest.mark.rule("LYR-9", "LOR-1")
def test_tokens_beside_adapters_are_sent_as_they_are() -> None:
    """Whatever the recipe, because A reads them unquantised."""
    p, x, options = frozen(parameters()), draw(T, H, seed="x"), {"lora": adapters(E), "recipe": MXFP8}
    asserts.bitwise(spread(p, x, mesh=mesh_of(expert=2), **options)[0], one_device(p, x, **options)[0])


@pytest.mark.rule("LOR-1", "ERR-1")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transport": "ring"}, ["`lora`", "transport 'ring'"]),
        ({"send": "codes", "recipe": MXFP8}, ["`send`", "'codes' beside `lora`", "None or 'tokens'"]),
        ({"fsdp": True, "axes": MeshAxes(data="data", expert="expert")}, ["`lora`", "fsdp=True"]),
        ({"lora_dropout": 0.5}, ["`lora_key`", "if and only if"]),
        ({"lora_wgrad_accum": ()}, ["`lora_wgrad_accum`", "given", "None"]),
        ({"lora": None, "lora_scaling": 2.0}, ["`lora_scaling`"]),
    ],
)
def test_options_that_adapters_do_not_meet_are_refused(options: Any, words: list[str]) -> None:
    p, x, mesh = parameters(), draw(T, H, seed="x"), mesh_of(data=2, expert=2)
    with asserts.refused(ValueError, words):
        spread(p, x, **{"mesh": mesh, "lora": adapters(E), **options})


@pytest.mark.rule("LYR-9", "LYR-3", "LYR-13")
@pytest.mark.matrix(
    ranks=(1, 2, 4), transport=TRANSPORTS, kind=KINDS, check_vma=(True, False), dtype=("float32", "bfloat16")
)
def test_experts_over_ranks(ranks: int, transport: str, kind: AxisType, check_vma: bool, dtype: str) -> None:
    """Eight ranks are a row of `test_weights_are_not_gathered`."""
    p, x, dy, expected = problem(dtype)
    mesh = mesh_of(kind, expert=ranks)
    options = {"transport": transport, "check_vma": check_vma, "mesh": mesh}
    found = gradients(lambda p, x: spread(p, x, **options), dy)
    rate = bounds.LAYER if dtype == "float32" else bounds.RING
    same_layer(found(*placed(mesh, p, x, EXPERT)), expected, exact=transport != "ring", rate=rate)


MESHES = {
    "data_expert": (MeshAxes("data", "expert"), {"data": 2, "expert": 4}),
    "expert_tensor": (MeshAxes(expert="expert", tensor="tensor"), {"expert": 2, "tensor": 2}),
    "all": (MeshAxes("data", "expert", "tensor"), {"data": 2, "expert": 2, "tensor": 2}),
    "tensor": (MeshAxes(tensor="tensor"), {"tensor": 4}),
    "data": (MeshAxes("data"), {"data": 4}),
    "two_expert_axes": (MeshAxes(expert=("outer", "inner")), {"outer": 2, "inner": 2}),
}


@pytest.mark.rule("LYR-9", "LYR-3")
@pytest.mark.matrix(
    name=tuple(MESHES),
    transport=TRANSPORTS,
    kind=KINDS,
    check_vma=(True, False),
    fsdp=(True, False),
    valid=lambda name, transport, fsdp, **_: (
        (name in ("all", "two_expert_axes") or transport == TRANSPORTS[0])
        and (MESHES[name][0].data is not None or not fsdp)
    ),
)
def test_meshes_of_several_axes(name: str, transport: str, kind: AxisType, check_vma: bool, fsdp: bool) -> None:
    """Every transport meets all kinds of axes at once, and two of one kind."""
    axes, sizes = MESHES[name]
    p, x, dy, expected = problem(pair=True)
    mesh = mesh_of(kind, **sizes)
    options = {"transport": transport, "check_vma": check_vma, "mesh": mesh, "fsdp": fsdp, "axes": axes}
    found = gradients(lambda p, x: spread(p, x, **options), dy)
    same_layer(found(*placed(mesh, p, x, axes, fsdp=fsdp)), expected, exact=False)


@pytest.mark.rule("LYR-9", "ACC-10")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_are_not_gathered(transport: str) -> None:
    """The compiled program gathers nothing of the size of weights, forward or backward; its results are right."""
    p, x, dy, expected = problem()
    mesh = mesh_of(expert=8)
    where = placed(mesh, p, x, EXPERT)
    program = gradients(lambda p, x: spread(p, x, transport=transport, mesh=mesh), dy).lower(*where).compile()
    same_layer(program(*where), expected, exact=transport != "ring")
    text = program.as_text()
    assert text, "this backend shows no program"
    gathered = [line for line in text.splitlines() if "all-gather" in line]
    assert not [line for line in gathered if f"{H},{2 * F}]" in line or f"{F},{H}]" in line]
    assert bool(gathered) == (transport == "ragged_all_to_all"), "its emulation gathers rows"


def layer_inside(mesh: Any, axes: MeshAxes, check_vma: bool, **options: Any) -> Any:
    """`parallel.moe` inside the caller's own `shard_map`."""
    weights = {"router": P(), "wi": P(axes.expert), "wo": P(axes.expert)}
    return jax.shard_map(
        lambda p, x: spread(p, x, axes, **options),
        mesh=mesh,
        in_specs=(weights, P(axes.tokens)),
        out_specs=(P(axes.tokens), P()),
        check_vma=check_vma,
    )


@pytest.mark.rule("LYR-9", "OFF-7")
@pytest.mark.matrix(
    transport=TRANSPORTS,
    check_vma=(True, False),
    kind=KINDS,
    few=[
        ("all_to_all", True, AxisType.Auto),
        ("ragged_all_to_all", True, AxisType.Explicit),
        ("ring", False, AxisType.Auto),
    ],
)
def test_inside_of_shard_map_in_a_scan_with_remat(transport: str, check_vma: bool, kind: AxisType) -> None:
    """Pairs of these values without the scan are rows of `test_experts_over_ranks`."""
    p, x, _, _ = problem()
    mesh = mesh_of(kind, expert=4)
    found = scanned(layer_inside(mesh, EXPERT, check_vma, transport=transport))(*placed(mesh, p, x, EXPERT))
    same_layer(found, scanned_on_one_device(), exact=False)


def scanned(layer: Any) -> Any:
    """The gradients of two layers in a scan, with remat."""

    def run(p: Any, x: Any) -> Any:
        def body(x: Any, _: Any) -> Any:
            y, aux = jax.checkpoint(layer)(p, x)
            return x + y, aux

        y, aux = jax.lax.scan(body, x, length=2)
        return y, jax.tree.map(lambda each: each[0], aux)

    return gradients(run, problem().dy)


@cache
def scanned_on_one_device() -> Any:
    p, x, _, _ = problem()
    return scanned(one_device)(p, x)


@pytest.mark.rule("LYR-9")
@pytest.mark.parametrize("kind", KINDS)
def test_the_mesh_may_be_that_of_the_context_or_of_the_tokens(kind: AxisType) -> None:
    p, x = parameters(), draw(T, H, seed="x")
    mesh = mesh_of(kind, expert=4)
    y, _ = one_device(p, x)
    where = placed(mesh, p, x, EXPERT)
    asserts.bitwise(spread(*where)[0], y, "of the tokens")
    with jax.set_mesh(mesh):
        asserts.bitwise(jax.jit(spread)(*where)[0], y, "of the context")
    with asserts.refused(ValueError, ("`mesh` of parallel.moe", "None", "expected a mesh", "jax.set_mesh")):
        spread(p, x)
    replicated = jax.device_put((p, x), NamedSharding(mesh, P()))
    asserts.bitwise(jax.jit(lambda p, x: spread(p, x, mesh=mesh))(*replicated)[0], y, "replicated arguments")


@pytest.mark.rule("LYR-9")
@pytest.mark.parametrize("put", [False, True])
def test_a_mesh_may_have_axes_of_both_kinds(put: bool) -> None:
    """Data axes left to XLA beside an Explicit axis of the experts."""
    p, x, _, expected = problem()
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=KINDS, devices=jax.devices()[:4])
    axes = MeshAxes(expert="expert", data="data")
    with jax.set_mesh(mesh):
        if put:
            x = jax.device_put(x, NamedSharding(mesh, P("expert", None)))
            p = p | {name: jax.device_put(p[name], NamedSharding(mesh, P("expert"))) for name in ("wi", "wo")}
        asserts.bitwise(jax.jit(lambda p, x: spread(p, x, axes)[0])(p, x), expected[0][0], "y")


@pytest.mark.rule("ACC-4")
@pytest.mark.parametrize("kind", KINDS)
def test_one_half_of_a_pair_may_have_an_accumulator(kind: AxisType) -> None:
    p, x, mesh = parameters(pair=True), draw(T, H, seed="x"), mesh_of(kind, expert=4)
    accum = draw(E, H, F, seed="accum")

    def total(layer: Any) -> Any:
        return jax.grad(lambda a, p, x: layer(p, x, wgrad_accum=((a, None), None))[0].sum())

    with jax.set_mesh(mesh):
        found = jax.jit(total(spread))(accum, *placed(mesh, p, x, EXPERT))
    asserts.bitwise(np.asarray(found), np.asarray(jax.jit(total(one_device))(accum, p, x)))


@cache
def with_budget(factor: float) -> tuple[Problem, int]:
    """A problem of four ranks whose slots are dropped by definition, and how many are."""
    ranks, tokens = 4, 4 * T
    p, x, dy = parameters(), draw(tokens, H, seed="x"), draw(tokens, H, seed="dy")
    p["router"] = p["router"] + jnp.arange(E, dtype=jnp.float32).reshape(1, -1)
    _, experts, _ = route.topk_router(x @ p["router"], K)
    op = exchange_option("test", ranks=ranks, experts=E, tokens=T, slots=K, budget_factor=factor)
    received, dropped = reference_exchange.exchange(op, np.split(np.asarray(experts), ranks))
    chosen = jnp.where(reference_exchange.travelled(op, received).reshape(tokens, K), experts, -1)
    assert sum(dropped) > 0

    def expected(p: Any, x: Any) -> Any:  # the router still sees every slot
        logits = jax_grouped.moe(x, p["router"], p["wi"], p["wo"], K, mlp=lambda x, *_, **__: x, **LOSSES)[1]
        weights, _, _ = route.topk_router(x @ p["router"], K, experts=experts)
        return jax_grouped.routed_mlp(x, chosen, weights, p["wi"], p["wo"]), logits

    return Problem(p, x, dy, gradients(expected, dy)(p, x)), sum(dropped)


@pytest.mark.rule("LYR-10", "LYR-8")
@pytest.mark.matrix(transport=TRANSPORTS[:2], factor=(0.3, 0.8), check_vma=(True, False))
def test_budgets_drop_what_the_definition_drops(transport: str, factor: float, check_vma: bool) -> None:
    """Dropped slots add nothing and have no gradient; their number is that of all ranks, on every rank."""
    (p, x, dy, expected), dropped = with_budget(factor)
    mesh = mesh_of(expert=4)
    options = {"transport": transport, "check_vma": check_vma, "mesh": mesh, "budget_factor": factor}
    found = gradients(lambda p, x: spread(p, x, **options), dy)(*placed(mesh, p, x, EXPERT))
    same_layer(found, expected, exact=False)
    aux = found[0][1]
    assert int(aux.dropped) == dropped
    assert bool(aux.overflow)
    assert all(int(shard.data) == dropped for shard in aux.dropped.addressable_shards)


@pytest.mark.rule("LYR-8", "LYR-3")
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_capacity_is_that_of_the_tokens_of_a_rank(check_vma: bool) -> None:
    """Losses are those of all tokens, drops are those of all ranks, and both are the same on every rank."""
    ranks, mesh = 4, mesh_of(expert=4)
    p, x, dy, _ = problem()
    options = {"capacity_factor": 0.75}
    found = gradients(lambda p, x: spread(p, x, mesh=mesh, check_vma=check_vma, **options), dy)

    def expected(p: Any, x: Any) -> Any:
        parts = [one_device(p, each, **options) for each in jnp.split(x, ranks)]
        dropped = sum(aux.dropped for _, aux in parts)
        return jnp.concatenate([y for y, _ in parts]), one_device(p, x)[1]._replace(dropped=dropped)

    found, wanted = found(*placed(mesh, p, x, EXPERT)), gradients(expected, dy)(p, x)
    same_layer(found, wanted, exact=False)
    aux, dropped = found[0][1], int(wanted[0][1].dropped)
    assert dropped > 0
    assert all(int(shard.data) == dropped for shard in aux.dropped.addressable_shards)
    assert bool(aux.overflow)


def moved_rows(text: str, width: int, dtype: str = "bf16|f32|u16") -> int:
    """All-to-alls of rows [..., width] in a compiled program. XLA:CPU moves bfloat16 as float32."""
    moved = [line for line in text.splitlines() if re.search(r" all-to-all(-start)?\(", line)]
    return len([line for line in moved if re.search(rf"({dtype})\[[\d,]+,{width}\]", line)])


@pytest.mark.rule("LYR-9", "OFF-7")
@pytest.mark.parametrize("saved", [True, False])
def test_a_policy_spares_the_second_exchange(saved: bool) -> None:
    """Rows go there and back, and their gradients; with remat they go again, unless a policy saves them."""
    (p, x, dy, expected), mesh = problem(), mesh_of(expert=4)
    names = ("grouped_x", "grouped_fc1", "grouped_act") if saved else ()
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    layer = jax.checkpoint(lambda p, x: spread(p, x, mesh=mesh), policy=policy)
    program, where = gradients(layer, dy), placed(mesh, p, x, EXPERT)
    text = program.lower(*where).as_text()  # before XLA, which sees on a CPU that both exchanges are the same
    rows = re.findall(rf"stablehlo.all_to_all.*-> tensor<\d+x{H}xf32>", text)
    assert len(rows) == (4 if saved else 5)
    same_layer(program(*where), expected)


@pytest.mark.rule("LYR-9", "ACC-8")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_taken_inside_of_shard_map(kind: AxisType) -> None:
    p, x, dy, mesh = parameters(), draw(T, H, seed="x"), draw(T, H, seed="dy"), mesh_of(kind, expert=4)

    def total(p: Any, x: Any, dy: Any, layer: Any) -> Any:
        y, aux = layer(p, x)
        of_y = (y * dy).sum()
        return (jax.lax.psum(of_y, "expert") if layer is spread else of_y) + aux.aux_loss + aux.z_loss

    weights = {"router": P(), "wi": P("expert"), "wo": P("expert")}
    inside = jax.shard_map(
        lambda p, x, dy: jax.grad(total, (0, 1))(p, x, dy, spread),
        mesh=mesh,
        in_specs=(weights, P("expert"), P("expert")),
        out_specs=(weights, P("expert")),
    )
    p_of, tokens = placed(mesh, p, x, EXPERT)
    found, dx = jax.jit(inside)(p_of, tokens, jax.device_put(dy, NamedSharding(mesh, P("expert"))))
    expected, ex = jax.jit(jax.grad(lambda p, x: total(p, x, dy, one_device), (0, 1)))(p, x)
    for name in ("wi", "wo"):
        asserts.bitwise(found[name], expected[name], name)
    asserts.bitwise(dx, ex)
    close(found["router"], expected["router"], "router")


@pytest.mark.rule("LYR-9")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("nested", [False, True])
def test_axes_of_the_mesh_that_are_not_named(kind: AxisType, size: int, nested: bool) -> None:
    """Nothing is split over them, whether the caller is inside `shard_map` over such an axis or not, and sums of
    bfloat16, for which XLA once ended the process, are those of the mesh without it."""
    p, x = jax.tree.map(lambda each: each.astype(jnp.bfloat16), (parameters(), draw(T, H, seed="x")))
    dy = draw(T, H, seed="dy")
    axes = MeshAxes("data", "expert")

    def found(mesh: Any) -> Any:
        layer = partial(spread, axes=axes) if nested else partial(spread, axes=axes, mesh=mesh)
        program = gradients(layer, dy)
        if nested:
            outer = {"other"} & set(mesh.axis_names)
            replicated = partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), axis_names=outer)
            program = replicated(program) if outer else program
        with jax.set_mesh(mesh):
            return jax.jit(program)(p, x)

    expected = found(mesh_of(kind, data=2, expert=2))
    jax.tree.map(asserts.bitwise, found(mesh_of(kind, data=2, expert=2, other=size)), expected)


@pytest.mark.rule("LYR-9", "GRD-1")
def test_accumulators_beside_an_axis_that_is_not_named() -> None:
    """Without `check_vma` JAX adds up what is not split: an accumulator must not be counted once per device."""
    p, x, dy = parameters(), draw(T, H, seed="x"), draw(T, H, seed="dy")
    wi, wo = (jnp.ones(p[name].shape, jnp.float32) for name in ("wi", "wo"))

    def total(accum: Any, mesh: Any) -> Any:
        options = {"wgrad_accum": accum, "check_vma": False, "mesh": mesh, "axes": MeshAxes(expert="expert")}
        y, _ = parallel.moe(x, p["router"], p["wi"], p["wo"], K, **options)
        return (y * dy).sum()

    found, expected = (
        jax.jit(jax.grad(partial(total, mesh=mesh)))((wi, wo))
        for mesh in (mesh_of(expert=2, other=2), mesh_of(expert=2))
    )
    jax.tree.map(asserts.bitwise, found, expected)


def masked_gradients(layer: Any, dy: Any) -> Any:
    """`gradients` with the mask as an argument, so that one program runs with several."""
    return jax.jit(lambda p, x, mask: gradients(partial(layer, mask=mask), dy)(p, x))


@cache
def without_a_quarter() -> Any:
    """What one device computes where the first quarter of the tokens is padding."""
    p, x, dy, _ = problem()
    return masked_gradients(one_device, dy)(p, x, np.arange(T) >= T // 4)


@pytest.mark.rule("LYR-11", "TE #3019", "torchtitan #1166")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_without_tokens(transport: str) -> None:
    """Padding alone on one rank, and on all of them: everything runs, and gradients are those of the other tokens."""
    (p, x, dy, _), mesh = problem(), mesh_of(expert=4)
    masked = masked_gradients(partial(spread, transport=transport, mesh=mesh), dy)
    mask = jnp.arange(T) >= T // 4
    found = masked(*placed(mesh, p, x, EXPERT), mask)
    same_layer(found, without_a_quarter(), exact=transport != "ring")
    asserts.zero(found[0][0][: T // 4])
    found = masked(*placed(mesh, p, x, EXPERT), np.zeros(T, bool))
    for each in jax.tree.leaves((found[0][0], found[1]["wi"], found[1]["wo"], found[2])):
        assert not np.any(np.asarray(each))


@pytest.mark.rule("LYR-9")
@pytest.mark.matrix(
    recipe=(FP8Current, FP8Block, MXFP8),
    transport=TRANSPORTS,
    few=[
        *((recipe, "ring") for recipe in (FP8Current, FP8Block, MXFP8)),
        *((FP8Current, "ragged_all_to_all"), (FP8Block, "all_to_all"), (MXFP8, "all_to_all")),
    ],
)
def test_recipes(recipe: Any, transport: str) -> None:
    """Codes of rows do not depend on where they are made, so the results of forward have the bits of one device.

    Both all-to-alls bring the same tokens, of which codes are made afterwards; a ring meets them in parts.
    """
    (p, x, dy, expected), mesh = wide_problem(recipe), mesh_of(expert=4)
    send = None if transport == "ring" else "tokens"
    found = gradients(lambda p, x: spread(p, x, mesh=mesh, transport=transport, recipe=recipe, send=send), dy)
    found = found(*placed(mesh, p, x, EXPERT))
    if transport != "ring":
        return same_layer(found, expected, rate=bounds.RING)
    for a, e in zip(*(jax.tree.leaves((each[0][0], *each[1:])) for each in (found, expected)), strict=True):
        wide = np.asarray(e, np.float64)
        assert np.linalg.norm(np.asarray(a, np.float64) - wide) <= bounds.RING_CODES * np.linalg.norm(wide)
    return None


@pytest.mark.rule("LYR-17", "LYR-9")
@pytest.mark.matrix(
    recipe=(FP8Block, MXFP8),
    transport=TRANSPORTS[:2],
    check_vma=(True, False),
    residuals=("save_fc1", "save_input"),
    few=[
        (FP8Block, "all_to_all", True, "save_fc1"),
        (FP8Block, "ragged_all_to_all", False, "save_input"),
        (MXFP8, "all_to_all", False, "save_input"),
        (MXFP8, "ragged_all_to_all", True, "save_fc1"),
    ],
)
def test_codes_travel(recipe: Any, transport: str, check_vma: bool, residuals: str) -> None:
    """The same bits as one device, and no row of tokens travels to the experts. The gradient of wi reads the values of
    the codes: it differs where elements are so small beside others of their row (`far`) that their codes lose bits.
    """
    (p, x, dy, _), mesh = wide_problem(recipe), mesh_of(expert=4)
    wide = x.shape[1]
    p = p | {"router": p["router"].at[::32].set(0)}
    how = {"mesh": mesh, "transport": transport, "check_vma": check_vma, "recipe": recipe, "residuals": residuals}
    layer = gradients(lambda p, x: spread(p, x, **how), dy)
    program = layer.lower(*placed(mesh, p, x, EXPERT)).compile()
    for far in (False, True):
        rows = x.at[:, ::32].multiply(2**12) if far else x
        found, expected = program(*placed(mesh, p, rows, EXPERT)), wide_layer(recipe, residuals)(p, rows)
        for name in ("y", "load"):
            a, e = (each[0][0] if name == "y" else each[0][1].load for each in (found, expected))
            asserts.bitwise(a, e, name)
        asserts.bitwise(found[2], expected[2], "dx")
        asserts.bitwise(found[1]["wo"], expected[1]["wo"], "wo")
        a, e = (np.asarray(each[1]["wi"], np.float64) for each in (found, expected))
        assert np.any(a != e) == far
        for columns in (slice(0, wide, 32), np.arange(wide) % 32 > 0):  # of the large and of the small features
            assert np.linalg.norm((a - e)[:, columns]) <= bounds.RING_CODES * np.linalg.norm(e[:, columns])
    if transport == "all_to_all":  # back, and of backward: dy and dx
        text = program.as_text()
        assert text, "this backend shows no program"
        assert (moved_rows(text, wide), moved_rows(text, wide, "u8")) == (3, 1)


@cache
def wide_layer(recipe: Any, residuals: str) -> Any:
    """The gradients of `wide_problem` on one device, as a program."""
    options = {"recipe": recipe, "residuals": residuals}
    return gradients(lambda p, x: one_device(p, x, **options), wide_problem(recipe).dy)


@pytest.mark.rule("LYR-9", "QNT-8")
@pytest.mark.parametrize("mastered", [True, False])
def test_quantised_weights(mastered: bool) -> None:
    """Codes and scales are split by experts; with masters, gradients go to these."""
    wide = 64
    x, router = draw(T, wide, dtype="bfloat16", seed="x"), draw(wide, E, seed="router")
    p = {"router": router, "wi": draw(E, wide, 2 * 32, dtype="bfloat16"), "wo": draw(E, 32, wide, dtype="bfloat16")}
    dy, mesh = draw(T, wide, seed="dy"), mesh_of(expert=4)
    codes = {name: jax_grouped.quantize(p[name], "mxfp4", axis=(1, 2)) for name in ("wi", "wo")}

    def results(layer: Any, p: Any, x: Any) -> Any:
        def total(p: Any, x: Any) -> Any:
            weights = {n: jax_grouped.straight_through(p[n], q) if mastered else q for n, q in codes.items()}
            y, _ = layer({"router": p["router"], **weights}, x)
            return (y.astype(jnp.float32) * dy).sum(), y

        return jax.jit(jax.grad(total, (0, 1), has_aux=True))(p, x)

    expected = results(one_device, p, x)
    codes = jax.device_put(codes, NamedSharding(mesh, P("expert")))
    found = results(lambda p, x: spread(p, x, mesh=mesh), *placed(mesh, p, x, EXPERT))
    asserts.bitwise(found[1], expected[1], "y")
    asserts.bitwise(found[0][1], expected[0][1], "dx")
    for name in ("wi", "wo"):
        asserts.bitwise(found[0][0][name], expected[0][0][name], name)
        assert np.any(np.asarray(found[0][0][name])) == mastered


@pytest.mark.rule("LYR-9", "DLY-1")
def test_state_of_delayed_scaling() -> None:
    """It is split by experts; its cotangent is its next value."""
    p, x, mesh = parameters("bfloat16"), draw(T, H, dtype="bfloat16", seed="x"), mesh_of(expert=4)
    dy = draw(T, H, seed="dy")
    state = jax_grouped.scaling_state(FP8Delayed, E, products=2)

    def total(layer: Any) -> Any:
        return jax.jit(
            jax.grad(lambda s, p, x: (layer(p, x, recipe=FP8Delayed.bind(s))[0].astype(jnp.float32) * dy).sum(), (0, 1))
        )

    expected = total(one_device)(state, p, x)
    found = total(lambda p, x, **o: spread(p, x, mesh=mesh, **o))(state, *placed(mesh, p, x, EXPERT))
    for a, e in zip(jax.tree.leaves(found[0]), jax.tree.leaves(expected[0]), strict=True):
        asserts.bitwise(a, e, "state")
    for name in ("wi", "wo"):
        asserts.bitwise(found[1][name], expected[1][name], name)


@pytest.mark.rule("LYR-9", "DLY-1")
@pytest.mark.matrix(data=[1, 2], kind=KINDS, jitted=[True, False])
def test_layers_are_trained_with_delayed_scaling(data: int, kind: AxisType, jitted: bool) -> None:
    """Two of the steps of docs/recipes.md: states have the bits of one device, and stay where their experts are.

    With a data axis the first step scales rows by the amaxes of a rank, so only what no product made has these bits.
    """
    x, dy, mesh = draw(T, H, dtype="bfloat16", seed="x"), draw(T, H, seed="dy"), mesh_of(kind, data=data, expert=4)
    axes, roles = MeshAxes(data="data", expert="expert"), slice(None) if data == 1 else jnp.array([0, 1, 4])

    def made(axes: MeshAxes | None) -> nnx.MoE:
        options: dict[str, Any] = {"recipe": FP8Delayed, "param_dtype": jnp.bfloat16, "rngs": flax_nnx.Rngs(0)}
        return nnx.MoE(H, F, E, K, mesh_axes=axes, **options)

    def train(x: Any, layer: nnx.MoE, place: Any) -> Any:
        structure, params, scaling = flax_nnx.split(layer, flax_nnx.Param, nnx.Scaling)

        def loss(params: Any, scaling: Any, x: Any) -> Any:
            return (flax_nnx.merge(structure, params, scaling)(x)[0].astype(jnp.float32) * dy).sum()

        def step(params: Any, scaling: Any, x: Any) -> Any:
            _, found = jax.grad(loss, argnums=(0, 1))(params, scaling, x)
            return nnx.update_scalings(found, previous=scaling)

        state = flax_nnx.to_pure_dict(scaling)["scaling"]
        flax_nnx.replace_by_pure_dict(scaling, {"scaling": place(state)})
        run = jax.jit(step) if jitted else step
        for scale in (1, 3):
            scaling = run(params, scaling, x * scale)
        return flax_nnx.to_pure_dict(scaling)["scaling"]

    def split(state: Any) -> Any:
        specs = (P(None, "expert"), P(None, None, "expert"), P())
        leaves, tree = jax.tree.flatten(state)
        placed = [jax.device_put(leaf, NamedSharding(mesh, spec)) for leaf, spec in zip(leaves, specs, strict=True)]
        return jax.tree.unflatten(tree, placed)

    expected, layer = train(x, made(None), lambda state: state), made(axes)
    with jax.set_mesh(mesh):
        found = train(jax.device_put(x, NamedSharding(mesh, P(("data", "expert")))), layer, split)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        asserts.bitwise(np.asarray(mine)[roles], np.asarray(theirs)[roles], "state")
    assert [each.sharding.spec[-1] for each in (found.scale, found.history)] == ["expert"] * 2


@pytest.mark.rule("LYR-12")
@pytest.mark.parametrize("name", ["data_expert", "expert_tensor"])
def test_a_shared_expert(name: str) -> None:
    axes, sizes = MESHES[name]
    p, x, dy = parameters(pair=True), draw(T, H, seed="x"), draw(T, H, seed="dy")
    shared = {"wi": tuple(draw(1, H, S, seed=half) for half in ("gate", "up")), "wo": draw(1, S, H, seed="shared")}
    shared["gate"], mesh = draw(H, 1, seed="sigmoid"), mesh_of(**sizes)

    def given(layer: Any, **options: Any) -> Any:
        return gradients(
            lambda p, x: layer(
                {name: p[name] for name in ("router", "wi", "wo")}, x, shared=SharedExpert(**p["shared"]), **options
            ),
            dy,
        )

    where, tokens = placed(mesh, p, x, axes)
    found = given(spread, mesh=mesh, axes=axes)(where | {"shared": shared}, tokens)
    expected = given(one_device)(p | {"shared": shared}, x)
    same_layer(found, expected, exact=False)
    for what in shared:
        for a, e in zip(*(jax.tree.leaves(each[1]["shared"][what]) for each in (found, expected)), strict=True):
            close(a, e, what)


@pytest.mark.rule("LYR-12", "ERR-1")
@pytest.mark.parametrize("which", ["wi", "wo"])
@pytest.mark.parametrize("fsdp", [False, True])
def test_codes_of_a_shared_expert_are_not_split(which: str, fsdp: bool) -> None:
    """Each rank of the tensor axis would add the whole of it."""
    axes, sizes = MESHES["data_expert" if fsdp else "expert_tensor"]
    p, x = parameters(pair=True), draw(T, H, seed="x")
    own: dict[str, Any] = {"wi": tuple(draw(1, H, S, seed=half) for half in ("gate", "up")), "wo": draw(1, S, H)}
    quantized = [jax_grouped.quantize(half, "fp8_tensor", axis=1) for half in jax.tree.leaves(own[which])]
    own[which] = tuple(quantized) if which == "wi" else quantized[0]
    with asserts.refused(
        ValueError, (f"`shared.{which}` of parallel.moe", "quantised, with", "a plain array", "recipe")
    ):
        spread(p, x, mesh=mesh_of(**sizes), axes=axes, fsdp=fsdp, shared=SharedExpert(**own))


@pytest.mark.rule("LYR-12")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_adapters_of_a_shared_expert(kind: AxisType) -> None:
    p, x, dy, mesh = parameters(), draw(T, H, seed="x"), draw(T, H, seed="dy"), mesh_of(kind, expert=4)
    pairs = ((draw(1, H, 2), draw(1, 2, 2 * S, seed="b")), (draw(1, S, 2), draw(1, 2, H, seed="b")))

    def given(layer: Any, **options: Any) -> Any:
        def run(p: Any, x: Any) -> Any:
            shared = SharedExpert(draw(1, H, 2 * S), draw(1, S, H), lora=p["pairs"])
            return layer({name: p[name] for name in ("router", "wi", "wo")}, x, shared=shared, **options)

        return gradients(run, dy)

    where, tokens = placed(mesh, p, x, EXPERT)
    with jax.set_mesh(mesh):
        found = given(spread, mesh=mesh)(where | {"pairs": pairs}, tokens)
    expected = given(one_device)(p | {"pairs": pairs}, x)
    same_layer(found, expected, exact=False)
    for a, e in zip(*(jax.tree.leaves(each[1]["pairs"]) for each in (found, expected)), strict=True):
        close(a, e, "adapters")


@pytest.mark.rule("LYR-12", "ERR-1")
def test_the_width_of_a_shared_expert_is_that_of_its_ranks() -> None:
    p, mesh = parameters(pair=True), mesh_of(expert=2, tensor=2)
    shared = SharedExpert((draw(1, H, 3), draw(1, H, 3)), draw(1, 3, H))
    with asserts.refused(ValueError, ("`shared.wo` of parallel.moe", "F = 3 over 2 ranks", "a multiple of 2")):
        spread(p, draw(T, H), mesh=mesh, axes=MeshAxes(expert="expert", tensor="tensor"), shared=shared)


@pytest.mark.rule("LYR-12")
def test_a_ring_rounds_sums_of_gradients_once() -> None:
    """Those of masters and of biases too: bits of one device, but where float32 sums in another order round apart."""
    x, dy, mesh = draw(T, H, seed="x", dtype="bfloat16"), draw(T, H, seed="dy"), mesh_of(expert=E)
    p = parameters("bfloat16")
    q = {name: jax_grouped.quantize(p[name], "fp8_128x128", axis=(1, 2)) for name in ("wi", "wo")}
    biases = {"wi_bias": draw(E, 2 * F, dtype="bfloat16"), "wo_bias": draw(E, H, dtype="bfloat16")}

    def total(p: Any, layer: Any) -> Any:
        weights = {name: jax_grouped.straight_through(p[name], q[name]) for name in q}
        own = {name: p[name] for name in biases}
        y = layer({"router": p["router"], **weights}, x, recipe=FP8Block, **own)[0]
        return (y.astype(jnp.float32) * dy).sum()

    found, expected = (
        jax.jit(jax.grad(partial(total, layer=layer)))(p | biases)
        for layer in (partial(spread, mesh=mesh, transport="ring"), one_device)
    )
    for name in ("wi", "wo", *biases):
        apart = np.asarray(found[name]) != np.asarray(expected[name])
        assert apart.mean() < bounds.ROUNDED_APART, f"{name}: {apart.sum()} of {apart.size} differ"


@pytest.mark.rule("LYR-12")
def test_a_data_axis_of_one_rank_has_accumulators() -> None:
    p, x, dy, mesh = parameters(), draw(T, H, seed="x"), draw(T, H, seed="dy"), mesh_of(data=1, expert=4)
    accum = (draw(E, H, 2 * F), draw(E, F, H))

    def run(axes: MeshAxes) -> Any:
        def total(accum: Any) -> Any:
            return (spread(p, x, mesh=mesh, axes=axes, wgrad_accum=accum)[0] * dy).sum()

        return jax.jit(jax.grad(total))(accum)

    for a, e in zip(run(MeshAxes(data="data", expert="expert")), run(EXPERT), strict=True):
        asserts.bitwise(a, e)


@pytest.mark.rule("LYR-12")
def test_a_layer_takes_shards_inside_of_shard_map() -> None:
    axes, mesh = MeshAxes(data="data", expert="expert"), mesh_of(data=2, expert=2)
    layer = nnx.MoE(H, F, E, K, shared_dim=S, mesh_axes=axes, fsdp=True, rngs=flax_nnx.Rngs(0))
    structure, state = flax_nnx.split(layer)

    def spec(path: Any, leaf: Any) -> P:
        name, own = jax.tree_util.keystr(path), "shared" not in jax.tree_util.keystr(path)
        first = "expert" if own else None
        return P(first, "data", None) if "wi" in name else P(first, None, "data") if "wo" in name else P()

    specs, tokens = jax.tree_util.tree_map_with_path(spec, state), P(("data", "expert"))
    x = draw(T, H, seed="x")
    inside = jax.shard_map(
        lambda state, x: flax_nnx.merge(structure, state)(x)[0], mesh=mesh, in_specs=(specs, tokens), out_specs=tokens
    )
    with jax.set_mesh(mesh):
        outside = jax.jit(lambda state, x: flax_nnx.merge(structure, state)(x)[0])(state, x)
    asserts.bitwise(jax.jit(inside)(state, x), outside)


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize("kind", [nnx, linen])
def test_tokens_that_an_explicit_mesh_cannot_split_are_refused(kind: Any) -> None:
    mesh, x = mesh_of(AxisType.Explicit, expert=4), draw(2, 16, H)
    fields = {"hidden": H, "mlp_dim": F, "num_experts": E, "num_experts_per_tok": K, "mesh_axes": EXPERT}
    with jax.set_mesh(mesh), asserts.refused(ValueError, ("`x` of MoE: shape (2, 16, 16)", "[T, H]", "reshape it")):
        if kind is nnx:
            nnx.MoE(**fields, rngs=flax_nnx.Rngs(0))(x)
        else:
            linen.MoE(**fields).init_with_output(jax.random.key(0), x)


@pytest.mark.rule("LYR-3")
@pytest.mark.parametrize("last", [4, 2**31 - 1])
def test_sequences_are_those_of_all_tokens(last: int) -> None:
    p, x, dy, mesh = parameters(), draw(T, H, seed="x"), draw(T, H, seed="dy"), mesh_of(expert=4)
    sizes = jnp.array([5, 0, 20, last], jnp.int32)
    found = gradients(lambda p, x: spread(p, x, mesh=mesh, sequence_sizes=sizes), dy)(*placed(mesh, p, x, EXPERT))
    same_layer(found, gradients(lambda p, x: one_device(p, x, sequence_sizes=sizes), dy)(p, x))


@pytest.mark.rule("LYR-3")
@pytest.mark.parametrize("split", [False, True])
def test_sequences_inside_of_shard_map_are_those_of_the_rank(split: bool) -> None:
    p, x, dy, mesh, own = parameters(), draw(T, H, seed="x"), draw(T, H, seed="dy"), mesh_of(expert=4), T // 4
    sizes = parts = [1, own - 1] * 4
    if split:  # the first sequence has the tokens of three ranks, the second those of the last
        sizes, parts = [3 * own, own], [own, 0, own, 0, own, 0, 0, own]

    def local(p: Any, x: Any, sizes: Any) -> Any:
        return spread(p, x, sequence_sizes=sizes, split_sequences=split)

    inside = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=({name: P() if name == "router" else P("expert") for name in p}, P("expert"), P("expert")),
        out_specs=(P("expert"), P()),
    )
    found = gradients(lambda p, x: inside(p, x, jnp.array(parts, jnp.int32)), dy)(*placed(mesh, p, x, EXPERT))
    one = gradients(lambda p, x: one_device(p, x, sequence_sizes=jnp.array(sizes, jnp.int32)), dy)(p, x)
    same_layer(found, one)


@pytest.mark.rule("ACC-4", "GRD-3")
def test_accumulators_and_wide_gradients() -> None:
    p, x, mesh = parameters("bfloat16"), draw(T, H, dtype="bfloat16", seed="x"), mesh_of(expert=4)
    accum = (draw(E, H, 2 * F, seed="accum"), draw(E, F, H, seed="accum"))

    def total(layer: Any) -> Any:
        return jax.jit(jax.grad(lambda a, p, x: layer(p, x, wgrad_accum=a)[0].astype(jnp.float32).sum()))

    found = total(lambda p, x, **o: spread(p, x, mesh=mesh, **o))(accum, *placed(mesh, p, x, EXPERT))
    for a, e in zip(found, total(one_device)(accum, p, x), strict=True):
        asserts.bitwise(a, e)
    for transport in TRANSPORTS:
        wide = gradients(
            lambda p, x, t=transport: spread(p, x, mesh=mesh, transport=t, wgrad_dtype=jnp.float32), jnp.ones((T, H))
        )
        run = wide if transport == "ring" else partial(jax.eval_shape, wide)
        assert run(*placed(mesh, p, x, EXPERT))[1]["wi"].dtype == jnp.float32


@pytest.mark.rule("LYR-1")
def test_jitter_differs_among_ranks() -> None:
    p, mesh = parameters(), mesh_of(expert=4)
    x = jnp.tile(draw(T // 4, H, seed="x"), (4, 1))
    key = jnp.array([1, 2], jnp.uint32)
    y, _ = spread(p, x, mesh=mesh, jitter=0.5, key=key)
    first, *others = np.split(np.asarray(y), 4)
    assert all(np.any(first != other) for other in others)
    asserts.bitwise(spread(p, x, mesh=mesh, jitter=0.5, key=key)[0], y)


@pytest.mark.rule("LYR-9")
@pytest.mark.parametrize("name", ["tensor", "expert_tensor"])
def test_parts_of_a_tensor_axis_are_summed_in_float32(name: str) -> None:
    axes, sizes = MESHES[name]
    p, x = parameters("bfloat16", pair=True), draw(T, H, dtype="bfloat16")
    program = str(jax.make_jaxpr(partial(spread, mesh=mesh_of(**sizes), axes=axes))(p, x))
    assert re.findall(rf":(\w+)\[\d+,{H}\]\S* = psum\w*\[\s*axes=\('tensor',\)", program) == ["f32"]


@pytest.mark.rule("LYR-9")
@pytest.mark.parametrize("of", ["experts", "shared"])
def test_random_rounding_differs_among_ranks(of: str) -> None:
    """Both ranks have the same tokens, experts and gradients, so that without it they have the same results."""
    p, mesh, key = parameters(), mesh_of(data=2), jnp.array([1, 2], jnp.uint32)
    x, dy = (jnp.tile(draw(T // 2, H, seed=each), (2, 1)) for each in ("x", "dy"))

    def halves(recipe: Any) -> list[Any]:
        experts = SharedExpert(p["wi"][:1], p["wo"][:1], recipe=recipe)
        options = {"recipe": recipe} if of == "experts" else {"shared": experts}

        def total(x: Any) -> Any:
            return (spread(p, x, mesh=mesh, axes=MeshAxes(data="data"), **options)[0] * dy).sum()

        return np.split(np.asarray(jax.grad(total)(x)), 2)

    asserts.bitwise(*halves(MXFP8))
    first, second = halves(recipes.NVFP4.bind(key=key))
    assert np.any(first != second)


# ---- the two exchanges alone


@pytest.mark.rule("LYR-9", "LYR-10")
@pytest.mark.matrix(transport=TRANSPORTS[:2], check_vma=(True, False), remat=(True, False))
def test_dispatch_and_combine(transport: str, check_vma: bool, remat: bool) -> None:
    """A layer of one's own: the bits of `routed_mlp` on one device, also where backward makes the exchange again."""
    p, x, dy = parameters(), draw(T, H, seed="x"), draw(T, H, seed="dy")
    weights, experts, _ = route.topk_router(x @ p["router"], K)
    mesh = mesh_of(expert=4)

    def local(x: Any, weights: Any, experts: Any, wi: Any, wo: Any) -> Any:
        rows, sizes, handle = parallel.dispatch(x, experts, weights, E, axis_name="expert", transport=transport)
        assert rows.shape == (4 * (T // 4) * 2, H)
        y = jax_grouped.grouped_mlp(rows, wi, wo, sizes, probs=handle.probs)
        return parallel.combine(y, handle), sizes

    split = P("expert")
    over = jax.shard_map(
        jax.checkpoint(local) if remat else local,
        mesh=mesh,
        in_specs=(split,) * 5,
        out_specs=(split, split),
        check_vma=check_vma,
    )
    operands = (x, weights, experts, p["wi"], p["wo"])

    def pulled(function: Any) -> Any:
        def run(x: Any, w: Any, experts: Any, wi: Any, wo: Any) -> Any:
            y, pull, aux = jax.vjp(lambda x, w, *wiwo: function(x, w, experts, *wiwo), x, w, wi, wo, has_aux=True)
            return (y, *pull(dy)), aux

        return jax.jit(run)

    found, sizes = pulled(over)(*operands)
    asserts.bitwise(sizes, np.bincount(np.asarray(experts).reshape(-1), minlength=E).astype(np.int32))
    expected, _ = pulled(lambda x, w, experts, wi, wo: (jax_grouped.routed_mlp(x, experts, w, wi, wo), None))(*operands)
    for a, e, what in zip(found, expected, ("y", "dx", "dw", "wi", "wo"), strict=True):
        asserts.bitwise(a, e, what)


@pytest.mark.rule("LYR-11")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("wide", [False, True])
def test_ragged_all_to_all_on_a_cpu(wide: bool, check_vma: bool) -> None:
    """The example of JAX's documentation, on whole rows, beside what its text says of any updates. `wide`: where 64-bit
    types are enabled, without implicit promotion.
    """
    ranks, updates, rows = 4, 2, 12
    random = np.random.default_rng(3)
    sizes = random.integers(0, 4, (ranks, ranks, updates)).astype(np.int32)  # [source, peer, update]
    starts = (np.cumsum(sizes.reshape(ranks, -1), axis=1) - sizes.reshape(ranks, -1)).astype(np.int32)
    arriving = sizes.transpose(1, 0, 2)  # [peer, source, update]
    to = (np.cumsum(arriving.reshape(ranks, -1), axis=1) - arriving.reshape(ranks, -1)).reshape(arriving.shape)
    total = int(max(sizes.reshape(ranks, -1).sum(1).max(), arriving.reshape(ranks, -1).sum(1).max())) + 2
    data = np.arange(ranks * total * 3, dtype=np.float32).reshape(ranks, total, 3)
    output = -np.ones((ranks, total, 3), np.float32)
    expected = output.copy()
    for source in range(ranks):
        for peer in range(ranks):
            for u in range(updates):
                size, first = sizes[source, peer, u], starts.reshape(sizes.shape)[source, peer, u]
                place = to[peer, source, u]
                expected[peer, place : place + size] = data[source, first : first + size]
    del rows

    def local(*arrays: Any) -> Any:
        return parallel.ragged_all_to_all(*(each[0] for each in arrays), axis_name="expert")[None]

    split = P("expert")
    over = jax.shard_map(local, mesh=mesh_of(expert=ranks), in_specs=(split,) * 6, out_specs=split, check_vma=check_vma)
    offsets = to.transpose(1, 0, 2).reshape(ranks, -1).astype(np.int32)
    arrays = (data, output, starts, sizes.reshape(ranks, -1), offsets, arriving.reshape(ranks, -1))
    with jax.enable_x64(wide):
        asserts.bitwise(jax.jit(over)(*map(jnp.asarray, arrays)), expected)
    short = [jnp.asarray(each[:, :3]) if each.ndim == 2 else jnp.asarray(each) for each in arrays]
    with asserts.refused(ValueError, ("`input_offsets` of ragged_all_to_all", "3 updates", "multiple of 4", "size 0")):
        jax.jit(over)(*short)


@pytest.mark.rule("LYR-11")
@pytest.mark.parametrize("check_vma", [True, False])
def test_elsewhere_it_is_that_of_xla(check_vma: bool) -> None:
    """Forward and backward, with one update for each piece of a local expert's rows, and a buffer made beside it."""
    from jax_grouped import _ragged

    def local(rows: Any, sends: Any, recvs: Any) -> Any:
        y, pull = jax.vjp(lambda rows: _ragged.swap("expert", rows, sends, recvs), rows)
        return pull(y)[0]

    split = P("expert")
    over = jax.shard_map(local, mesh=mesh_of(expert=4), in_specs=split, out_specs=split, check_vma=check_vma)
    rows, sizes = jnp.ones((4 * 32, H)), jnp.ones((16, 2), jnp.int32)
    text = jax.jit(over).trace(rows, sizes, sizes).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @ragged_all_to_all", text)) == 2
    assert "all_gather" not in text
    assert f"tensor<{4 * _ragged.UPDATES_PER_PEER}xi32>" in text
    assert "optimization_barrier" in text


def test_flags_of_xla_that_make_it_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax_grouped import _ragged

    monkeypatch.setenv("XLA_FLAGS", _ragged.FLAGS[0])
    with pytest.warns(RuntimeWarning, match=r"lacks --xla_enable_nccl.* expected both.*all_to_all"):
        _ragged.warn_about_flags("gpu")
    _ragged.warn_about_flags("cpu")
    monkeypatch.setenv("XLA_FLAGS", " ".join(_ragged.FLAGS))
    _ragged.warn_about_flags("gpu")


# ---- refusals

NO: NDArray[Any] = np.zeros((E, H), np.float32)
REFUSALS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "transport": (
        {"transport": "pigeon"},
        ("`transport`", "'pigeon'", "all_to_all, ragged_all_to_all, ring", "default"),
    ),
    "factor": ({"budget_factor": 0.0}, ("`budget_factor`", "0.0", "above 0", "2.0")),
    "ring_factor": ({"budget_factor": 2.0, "transport": "ring"}, ("`budget_factor`", "2.0", "None", "no budget")),
    "send": ({"send": "letters"}, ("`send`", "'letters'", "None, 'tokens' or 'codes'", "where the recipe allows")),
    "codes": ({"send": "codes", "recipe": FP8Current}, ("`send`", "FP8Current", "FP8Block or MXFP8", "send=None")),
    "state": (
        {"recipe": FP8Delayed.bind(jax_grouped.scaling_state(FP8Delayed, E, products=2)), "check_vma": False},
        ("`recipe`", "with check_vma=False", "without a state", "leave check_vma on"),
    ),
    "ring_state": (
        {"recipe": FP8Delayed.bind(jax_grouped.scaling_state(FP8Delayed, E, products=2)), "transport": "ring"},
        ("`recipe`", "with transport 'ring'", "without a state", "another transport"),
    ),
    "accumulators": (
        {
            "axes": MeshAxes(expert="expert", data="tensor"),
            "wgrad_accum": (jnp.zeros((E, H, 2 * F)), jnp.zeros((E, F, H))),
        },
        ("`wgrad_accum`", "2 ranks of a data axis", "None", "split experts over this axis too"),
    ),
    "axis_name": ({"axis_name": "expert"}, ("`axis_name`", "'expert'", "None", "`axes` split")),
    "split_sequences": (
        {"split_sequences": True, "sequence_sizes": jnp.array([T])},
        ("`split_sequences`", "True outside of shard_map", "False", "those of all tokens there", "leave it out"),
    ),
    "fsdp": ({"fsdp": True}, ("`fsdp`", "without a data axis", "False", "MeshAxes.data")),
    "axes": ({"axes": MeshAxes(expert="model")}, ("`axes`", "'model'", "('expert', 'tensor')", "name those")),
    "mask": ({"mask": jnp.ones(3, bool)}, ("`mask`", "(3,)", "32 tokens", "one entry for each token")),
    "bias": (
        {"axes": MeshAxes(expert="expert", tensor="tensor"), "wo_bias": jnp.asarray(NO)},
        ("`wo_bias`", "given with a tensor axis", "None", "add it once"),
    ),
    "columns": (
        {"axes": MeshAxes(expert="expert", tensor="tensor")},
        ("`wi`", "in one array, with a tensor axis", "a pair", "belong together"),
    ),
    "interleaved": (
        {"axes": MeshAxes(expert="expert", tensor="tensor"), "activation": Activation("swiglu", interleave=8)},
        ("`wo`", "F = 8 over 2 ranks", "a multiple of 16", "another tensor axis"),
    ),
}


@pytest.mark.rule("ERR-1", "LYR-12")
@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    options, fragments = REFUSALS[name]
    with asserts.refused(ValueError, (fragments[0] + " of parallel.moe", *fragments[1:])):
        spread(parameters(), draw(T, H), **{"mesh": mesh_of(expert=4, tensor=2), **options})


WRONG: dict[str, tuple[type[Exception], dict[str, Any], tuple[str, ...]]] = {
    "axes": (TypeError, {"axes": "expert"}, ("`axes` of parallel.moe", "str", "a MeshAxes", "with the names")),
    "mesh": (TypeError, {"mesh": "cpu"}, ("`mesh` of parallel.moe", "str", "a jax.sharding.Mesh", "make_mesh")),
    "check_vma": (TypeError, {"check_vma": 0}, ("`check_vma`: 0", "True or False", "pass one of them")),
    "scale": (TypeError, {"scale": jnp.float32(2)}, ("`scale` of parallel.moe", "ArrayImpl", "Python value", "float")),
    "factor": (TypeError, {"budget_factor": "2"}, ("`budget_factor` of parallel.moe", "'2'", "a number", "pass")),
    "mask": (TypeError, {"mask": [True] * T}, ("`mask`", "list", "array [T]", "jnp.asarray")),
    "bias": (TypeError, {"wi_bias": [0.0]}, ("`wi_bias`", "list", "array [E, W]", "jnp.asarray")),
    "key": (
        ValueError,
        {"jitter": 0.1, "key": jax.random.key(0)},
        ("`key` of parallel.moe", "key<fry>", "uint32[2]", "low word first"),
    ),
    "rounding": (
        ValueError,
        {"recipe": recipes.NVFP4.bind(key=jnp.uint32(3))},
        ("`key` of recipe.bind", "shape ()", "one axis [2]", "low word first"),
    ),
    "words": (
        ValueError,
        {"recipe": recipes.NVFP4.bind(key=jnp.ones((3,), jnp.uint32))},
        ("`key` of recipe.bind", "uint32[3]", "uint32[2]", "low word first"),
    ),
    "sequences": (
        TypeError,
        {"sequence_sizes": jnp.array([8.0, 8.0])},
        ("`sequence_sizes` of parallel.moe", "dtype float32", "expected integers", "cast it"),
    ),
    "sequence": (
        ValueError,
        {"sequence_sizes": jnp.int32(T)},
        ("`sequence_sizes` of parallel.moe", "shape ()", "one axis [S]", "pass one size"),
    ),
    "residuals": (ValueError, {"residuals": ["save_all"]}, ("`residuals`", "['save_all']", "save_fc1", "choose one")),
    "biases": (
        ValueError,
        {"wi_bias": np.zeros((2, 2 * F), np.float32)},
        ("`wi_bias` of parallel.moe", "2 experts", f"expected {E} as in `router`", "all ranks"),
    ),
    "adapters": (
        ValueError,
        {"lora": (None, (np.zeros((2, F, R), np.float32), np.zeros((2, R, H), np.float32)))},
        ("`lora[1][0]` of parallel.moe", "2 experts", f"expected {E} as in `router`", "all ranks"),
    ),
    "accumulators": (
        TypeError,
        {"wgrad_accum": np.zeros((E, F, H), np.float32)},
        ("`wgrad_accum`", "ndarray", "None or a pair", "put None"),
    ),
    "wide": (
        TypeError,
        {"wi_bias": np.zeros((E, 2 * F))},
        ("`wi_bias` of parallel.moe", "float64", "at most 32 bits", "cast it"),
    ),
}


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    kind, options, fragments = WRONG[name]
    with asserts.refused(kind, fragments):
        spread(parameters(), draw(T, H), **{"mesh": mesh_of(expert=4), **options})


@pytest.mark.rule("ERR-1")
def test_wrong_arguments_of_the_exchanges_are_named() -> None:
    x, ids, weights = draw(T, H), jnp.zeros((T, K), jnp.int32), draw(T, K)
    with asserts.refused(ValueError, ("`axis_name` of parallel.dispatch", "'expert'", "manual here", "shard_map")):
        parallel.dispatch(x, ids, weights, E, axis_name="expert")
    with asserts.refused(ValueError, ("`axis_name` of parallel.dispatch", "None", "expected a mesh axis", "name")):
        parallel.dispatch(x, ids, weights, E, axis_name=None)
    with asserts.refused(TypeError, ("`num_experts` of parallel.dispatch", "8.0", "an integer", "pass an int")):
        parallel.dispatch(x, ids, weights, 8.0, axis_name=())
    with asserts.refused(TypeError, ("`handle` of parallel.combine", "NoneType", "the Handle that `dispatch`", "pass")):
        parallel.combine(x, None)
    for axis in (3, ["expert"]):
        with asserts.refused(TypeError, ("`expert` of MeshAxes", repr(axis), "a name or a tuple", "name axes")):
            MeshAxes(expert=axis)


@pytest.mark.rule("LYR-9", "GRP-1")
def test_arguments_are_those_of_one_device_whatever_holds_them() -> None:
    """Halves in a list, experts of 64 bits on the host, a factor of NumPy; and k of another type is in no cache."""
    mesh, p, x = mesh_of(expert=4), parameters(pair=True), draw(T, H, seed="x")
    experts = np.random.default_rng(0).integers(0, E, (T, K)) + 2**32 * (np.arange(T)[:, None] % 3 == 0)
    options = {"experts": experts, "mesh": mesh, "budget_factor": np.float32(8)}
    y, aux = spread(p | {"wi": list(p["wi"])}, x, **options)
    expected, of_one = one_device(p, x, experts=experts)
    asserts.bitwise(y, expected)
    asserts.bitwise(aux.load, of_one.load)
    parallel.moe(x, p["router"], p["wi"], p["wo"], 2, axes=EXPERT, mesh=mesh)
    with asserts.refused(TypeError, ("`k` of parallel.moe", "2.0", "an integer", "pass an int")):
        parallel.moe(x, p["router"], p["wi"], p["wo"], 2.0, axes=EXPERT, mesh=mesh)


@pytest.mark.rule("ERR-1")
def test_refused_arrays() -> None:
    mesh = mesh_of(expert=8)
    with asserts.refused(ValueError, ("`x` of parallel.moe", "30 tokens over 8 ranks", "a multiple of 8", "pad")):
        spread(parameters(), draw(30, H), mesh=mesh)
    p = parameters()
    refs = (jax.new_ref(jnp.zeros((E, H, 2 * F))), None)
    with asserts.refused(ValueError, ("`wgrad_accum` of parallel.moe", "jax.Ref", "arrays", "own jax.shard_map")):
        spread(p, draw(T, H), mesh=mesh, wgrad_accum=refs)
    with asserts.refused(ValueError, ("`wo` of parallel.moe", "8 experts", "expected 16 as in `router`", "all ranks")):
        spread(p | {"router": draw(H, 16)}, draw(T, H), mesh=mesh)
    with asserts.refused(ValueError, ("`wo` of parallel.moe", "8 experts on a rank", "expected 2 of the 8", "order")):
        inside = layer_inside(mesh_of(expert=4), EXPERT, True)
        jax.jit(lambda p, x: inside(p, x))(
            {name: jnp.tile(each, (4, 1, 1)) if each.ndim == 3 else each for name, each in p.items()}, draw(T, H)
        )
    with asserts.refused(ValueError, ("experts of parallel.moe", "9 over 8 ranks", "a multiple of 8", "every rank")):
        spread({"router": draw(H, 9), "wi": draw(9, H, 2 * F), "wo": draw(9, F, H)}, draw(T, H), mesh=mesh)
    narrow = {"router": draw(9, E), "wi": draw(E, 9, 2 * F), "wo": draw(E, F, 9)}
    axes, sizes = MESHES["data_expert"]
    with asserts.refused(ValueError, ("`fsdp` of parallel.moe", "H = 9 over 2 ranks", "a multiple of 2", "leave")):
        spread(narrow, draw(T, 9), axes, fsdp=True, mesh=mesh_of(**sizes))
    for bad in ({}, {"data": "x", "expert": "x"}):
        with pytest.raises(ValueError, match="MeshAxes"):
            MeshAxes(**bad)
    explicit = mesh_of(AxisType.Explicit, expert=8)
    wrong = jax.device_put(p["wi"], NamedSharding(explicit, P(None, "expert")))
    with asserts.refused(ValueError, ("`wi` of parallel.moe", "sharded as", "expected P", "jax.sharding.reshard")):
        spread(p | {"wi": wrong}, draw(T, H), mesh=explicit)
    both = mesh_of(expert=4, tensor=2)
    inside = jax.shard_map(
        lambda p, x: spread(p, x, MeshAxes(expert="expert", tensor="tensor")),
        mesh=both,
        in_specs=P(),
        out_specs=P(),
        axis_names={"expert"},
    )
    with asserts.refused(
        ValueError, ("`axes` of parallel.moe", "only ('expert',) are manual", "all or none", "outside")
    ):
        jax.jit(inside)(parameters(pair=True), draw(T, H))


# ---- layers


@pytest.mark.rule("LYR-9", "LYR-13")
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_flax(kind: AxisType) -> None:
    """Both kinds, spread by their own options, against the same layer on one device."""
    mesh, x = mesh_of(kind, data=2, expert=4), draw(8, T // 8, H, seed="x")
    options = {"mesh_axes": MeshAxes("data", "expert"), "budget_factor": 4.0, "shared_dim": S}
    alone = nnx.MoE(H, F, E, K, shared_dim=S, rngs=flax_nnx.Rngs(0))
    layer, other = nnx.MoE(H, F, E, K, rngs=flax_nnx.Rngs(0), **options), linen.MoE(H, F, E, K, **options)
    y, aux = alone(x)
    params = {"params": flax_nnx.to_pure_dict(flax_nnx.state(layer, flax_nnx.Param))}
    tokens = jax.device_put(x, NamedSharding(mesh, P(("data", "expert"))))
    with jax.set_mesh(mesh):
        found = [jax.jit(lambda x: layer(x))(tokens), jax.jit(lambda x: other.apply(params, x))(tokens)]
    for results, metrics in found:
        asserts.bitwise(results, y)
        asserts.bitwise(metrics.load, aux.load)


@pytest.mark.rule("ERR-1")
def test_refusals_of_layers() -> None:
    def made(**options: Any) -> None:
        nnx.MoE(H, F, E, K, rngs=flax_nnx.Rngs(0), **options)

    with asserts.refused(ValueError, ("`budget_factor` of MoE", "2.0 without `mesh_axes`", "None", "axes of the mesh")):
        made(budget_factor=2.0)
    with asserts.refused(ValueError, ("`transport` of MoE", "'pigeon'", "all_to_all", "default")):
        made(transport="pigeon", mesh_axes=EXPERT)
    with asserts.refused(ValueError, ("`axis_name` of MoE", "'expert' beside `mesh_axes`", "None", "leave it out")):
        made(axis_name="expert", mesh_axes=EXPERT)
    with asserts.refused(TypeError, ("`mesh_axes` of MoE", "str", "a MeshAxes", "parallel.MeshAxes")):
        made(mesh_axes="expert")

    class Own(nnx.MoE):
        mlp = staticmethod(lambda x, *_, **__: x)  # pyrefly: ignore[bad-override]

    with asserts.refused(ValueError, ("`mesh_axes` of MoE", "another `mlp`", "None", "parallel.dispatch")):
        Own(H, F, E, K, rngs=flax_nnx.Rngs(0), mesh_axes=EXPERT)(draw(T, H))
