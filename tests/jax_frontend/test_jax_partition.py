"""Programs for several devices: sharded operands outside of shard_map are refused, and never gathered in silence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped
from grouped_core.scaling import ScalingState
from tests import asserts, cases
from tests.jax_frontend.jax_tools import copies, optimised, same

G, M, K, N = 8, 64, 16, 8
X, W = (jnp.asarray(cases.normal(shape, "float32", "partition", shape)) for shape in ((M, K), (G, K, N)))
SIZES = jnp.full((G,), M // G, jnp.int32)
FRAGMENTS = (
    "sharded as",
    "outside of jax.shard_map",
    "expected the local arrays of one shard",
    "in_specs=",
    "jax.jit(local)",
    "`mesh_axes=`",
)


def product(x: Any, w: Any, sizes: Any) -> Any:
    return jax_grouped.ragged_dot(x, w, sizes)


def gradients(x: Any, w: Any, sizes: Any) -> Any:
    return jax.grad(lambda x, w: product(x, w, sizes).sum(), (0, 1))(x, w)


def scanned(x: Any, w: Any, sizes: Any) -> Any:
    step = jax.checkpoint(lambda x: x + product(x, w, sizes)[:, :1])
    return jax.lax.scan(lambda x, _: (step(x), None), x, length=3)[0]


PROGRAMS = {"product": product, "gradients": gradients, "scanned": scanned}


def mesh_of(kind: AxisType, *shape: int) -> Any:
    return jax.make_mesh(shape, ("data", "model")[: len(shape)], axis_types=(kind,) * len(shape))


def placed(mesh: Any, x: P, w: P) -> tuple[Any, ...]:
    return tuple(jax.device_put(each, NamedSharding(mesh, spec)) for each, spec in ((X, x), (W, w), (SIZES, P())))


@pytest.mark.rule("ACC-10")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("x", "w", "slot"),
    [(P(), P("data"), "rhs"), (P(), P(None, None, "data"), "rhs"), (P("data"), P(), "lhs")],
)
def test_sharded_operands_are_refused(kind: AxisType, program: str, x: P, w: P, slot: str) -> None:
    """At trace time on an Explicit mesh, else when XLA partitions the program, with the same words."""
    error = jax.errors.JaxRuntimeError if kind == AxisType.Auto else ValueError
    with asserts.refused(error, (f"`{slot}` of grouped_matmul", *FRAGMENTS)):
        jax.jit(PROGRAMS[program]).lower(*placed(mesh_of(kind, 8), x, w)).compile()


@pytest.mark.rule("ACC-10")
def test_sharded_operands_are_refused_outside_of_jit_too() -> None:
    with asserts.refused(ValueError, ("`rhs` of grouped_matmul", *FRAGMENTS)):
        product(*placed(mesh_of(AxisType.Auto, 8), P(), P("data")))


@pytest.mark.rule("ACC-10")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("program", PROGRAMS)
def test_replicated_operands_are_fine(kind: AxisType, program: str) -> None:
    """The same bits and the same calls as in a program for one device."""
    run = jax.jit(PROGRAMS[program])
    operands = placed(mesh_of(kind, 8), P(), P())
    text, alone = optimised(run.lower(*operands)), optimised(run.lower(X, W, SIZES))
    assert "all-gather" not in text
    assert text.count("jg_grouped_matmul_v1") == alone.count("jg_grouped_matmul_v1")
    for found, expected in zip(jax.tree.leaves(run(*operands)), jax.tree.leaves(run(X, W, SIZES)), strict=True):
        asserts.bitwise(np.asarray(found), expected)


@pytest.mark.rule("ACC-10", "ACC-8")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_axes_that_are_not_manual(kind: AxisType, check_vma: bool) -> None:
    """shard_map over one axis of two: what it leaves to XLA may not be sharded either."""
    mesh = mesh_of(kind, 2, 4)
    local = jax.jit(
        jax.shard_map(
            lambda x, w, sizes: product(x, w, sizes // 2),
            mesh=mesh,
            in_specs=(P("data"), P(), P()),
            out_specs=P("data"),
            axis_names={"data"},
            check_vma=check_vma,
        )
    )
    operands = placed(mesh, P("data"), P())
    assert "all-gather" not in optimised(local.lower(*operands))
    half = SIZES // 2
    expected = jnp.concatenate([product(rows, W, half) for rows in jnp.split(X, 2)])
    asserts.bitwise(np.asarray(local(*operands)), expected)
    error = jax.errors.JaxRuntimeError if kind == AxisType.Auto else ValueError
    with asserts.refused(error, ("`rhs` of grouped_matmul", *FRAGMENTS)):
        local.lower(*placed(mesh, P("data"), P("model"))).compile()


@pytest.mark.rule("ACC-10", "ACC-8")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_axes_of_one_device_need_not_be_manual(kind: AxisType) -> None:
    """XLA has nothing to partition over them; gradients too have the bits of all axes being manual."""
    mesh = mesh_of(kind, 8, 1)

    def step(axes: set[str]) -> Any:
        def loss(x: Any, w: Any, sizes: Any) -> Any:
            return jnp.sin(product(x, w, sizes // 8)).sum()[None]

        local = jax.shard_map(loss, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"), axis_names=axes)
        return jax.jit(jax.value_and_grad(lambda *operands: local(*operands).sum(), (0, 1)))

    operands = placed(mesh, P("data"), P())
    found, expected = (jax.tree.leaves(step(axes)(*operands)) for axes in ({"data"}, {"data", "model"}))
    for one, other in zip(found, expected, strict=True):
        asserts.bitwise(np.asarray(one), np.asarray(other))


@pytest.mark.rule("ACC-4", "ACC-10")
def test_accumulators_are_still_updated_in_place() -> None:
    """The partitioner's call keeps the alias of operand and result."""
    accum = jax.device_put(jnp.zeros(W.shape), NamedSharding(mesh_of(AxisType.Auto, 8), P()))
    x, w, sizes = placed(mesh_of(AxisType.Auto, 8), P(), P())

    def both(accum: Any, x: Any, w: Any, sizes: Any) -> Any:
        def loss(w: Any, a: Any) -> Any:
            return jax_grouped.ragged_dot(x, w, sizes, wgrad_accum=a).sum()

        return jax.grad(loss, (0, 1))(w, accum)[1]

    text = optimised(jax.jit(both, donate_argnums=0).lower(accum, x, w, sizes))
    assert copies(text, rf"f32\[{G},{K},{N}\]") == 0


@pytest.mark.rule("ACC-10")
def test_one_device_and_shard_map_have_no_partitioner() -> None:
    mesh = mesh_of(AxisType.Auto, 8)
    local = jax.shard_map(
        lambda x, w, sizes: product(x, w, sizes // 8), mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data")
    )
    assert "CustomSPMDPartitioning" not in jax.jit(product).lower(X, W, SIZES).as_text()
    assert "CustomSPMDPartitioning" not in jax.jit(local).lower(*placed(mesh, P("data"), P())).as_text()
    assert "CustomSPMDPartitioning" in jax.jit(product).lower(*placed(mesh, P(), P())).as_text()


# ---- a call that is split as its operands are ------------------------------------------------------------------------

DELAYED = jax_grouped.FP8Delayed.replace(history=3)
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


def cotangent(*lead: int, seed: int = 0) -> Any:
    """A state with amaxes and scales of all kinds, and one role that backward did not reach."""
    top = np.array(jax_grouped.scaling_state(DELAYED, G, products=2).top)
    history = np.abs(cases.normal((*lead, top.size, 3, G), "float32", "history", seed))
    scale = np.abs(cases.normal((*lead, top.size, G), "float32", "scale", seed))
    history[..., 0, :, 1], history[..., 1, 0, 2], history[..., 2, 0, 3] = 0, np.inf, 1e-40
    scale[..., 4], top = 0, np.broadcast_to(top, scale.shape[:-1]).copy()
    top[..., 5] = 0
    return ScalingState(scale, history, top, DELAYED.amax_algorithm)


def along_groups(state: Any, over: Any) -> Any:
    """The specs of a state whose groups are split; all its leading axes are whole."""
    scale, history = (P(*(None,) * (each.ndim - 1), over) for each in (state.scale, state.history))
    return ScalingState(scale, history, P(), state.algorithm)


def put(mesh: Any, state: Any, specs: Any) -> Any:
    return jax.tree.map(lambda each, spec: jax.device_put(each, NamedSharding(mesh, spec)), state, specs)


@pytest.mark.rule("ACC-10", "DLY-1")
@pytest.mark.matrix(
    kind=(AxisType.Auto, AxisType.Explicit),
    over=("model", ("data", "model")),
    lead=((), (2,)),
    kept=(True, False),
    known=(True, False),
)
def test_states_of_delayed_scaling_are_updated_on_each_shard(
    kind: AxisType, over: Any, lead: tuple[int, ...], kept: bool, known: bool
) -> None:
    """With the bits of one device, in the layout of the state, eagerly and in a program that moves nothing.

    `kept`: with `previous`. `known`: the mesh is set.
    """
    states = (cotangent(*lead), cotangent(*lead, seed=1))

    def update(state: Any, previous: Any) -> Any:
        return jax_grouped.update_scaling(state, previous=previous if kept else None)

    expected = update(*(jax.tree.map(jnp.asarray, state) for state in states))
    mesh = mesh_of(kind, 2, 4)
    operands = [put(mesh, state, along_groups(state, over)) for state in states]
    with jax.set_mesh(mesh) if known else nullcontext():
        run = jax.jit(update)
        assert not any(word in optimised(run.lower(*operands)) for word in COLLECTIVES)
        for found in (update(*operands), run(*operands)):
            same(found, expected)
            for mine, given in zip(jax.tree.leaves(found), jax.tree.leaves(operands[0]), strict=True):
                assert mine.sharding.is_equivalent_to(given.sharding, mine.ndim), mine.sharding


@pytest.mark.rule("ACC-10", "DLY-1")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_states_are_updated_inside_of_shard_map(kind: AxisType, check_vma: bool) -> None:
    state, mesh = cotangent(), mesh_of(kind, 2, 4)
    specs = along_groups(state, "model")
    local = jax.shard_map(
        lambda state: jax_grouped.update_scaling(state, axis_name="data"),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=specs,
        check_vma=check_vma,
    )
    expected = jax_grouped.update_scaling(jax.tree.map(jnp.asarray, state))
    same(local(put(mesh, state, specs)), expected)
    same(jax.jit(local)(put(mesh, state, specs)), expected)


@pytest.mark.rule("ACC-10", "DLY-1")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_whole_parts_of_a_state_are_cut_as_the_others_are(kind: AxisType) -> None:
    state, mesh = cotangent(), mesh_of(kind, 2, 4)
    specs = replace(along_groups(state, "model"), history=P())
    found = jax.jit(jax_grouped.update_scaling)(put(mesh, state, specs))
    same(found, jax_grouped.update_scaling(jax.tree.map(jnp.asarray, state)))
    assert [each.sharding.spec[-1] for each in (found.scale, found.history)] == ["model"] * 2


@pytest.mark.rule("ACC-10")
def test_layouts_of_results_do_not_reach_the_operands() -> None:
    """Roles of a result may be asked to be split; those of the state are not, and the call still sees all of them."""
    state, mesh = jax.tree.map(jnp.asarray, cotangent()), mesh_of(AxisType.Auto, 2)
    by_roles = NamedSharding(mesh, P("data"))
    run = jax.jit(lambda state: jax.tree.leaves(jax_grouped.update_scaling(state))[:2], out_shardings=by_roles)
    same(run(state), jax.tree.leaves(jax_grouped.update_scaling(state))[:2])


@pytest.mark.rule("ACC-10")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("part", "spec"),
    [
        ("scale", P("data", "model")),
        ("history", P("data")),
        ("history", P(None, None, "data")),
        ("top", P("data")),
    ],
)
def test_other_layouts_of_a_state_are_refused(kind: AxisType, part: str, spec: P) -> None:
    state, mesh = cotangent(), mesh_of(kind, 2, 4)
    operands = put(mesh, state, replace(along_groups(state, "model"), **{part: spec}))
    words = (f"`{part}` of scale_update", *FRAGMENTS)
    with asserts.refused(ValueError, words):
        jax_grouped.update_scaling(operands)
    error = jax.errors.JaxRuntimeError if kind == AxisType.Auto else ValueError
    with asserts.refused(error, words):
        jax.jit(jax_grouped.update_scaling)(operands)


# ---- GSPMD, which JAX still has beside Shardy: an exception in one of its questions ends the process -----------------


@pytest.fixture
def gspmd() -> Iterator[None]:
    if not hasattr(jax.config, "jax_use_shardy_partitioner"):
        pytest.skip("this JAX has Shardy alone")
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


@pytest.mark.rule("ACC-10")
@pytest.mark.parametrize("program", PROGRAMS)
def test_gspmd_runs_replicated_operands_and_refuses_sharded_ones(gspmd: None, program: str) -> None:
    del gspmd
    run, mesh = jax.jit(PROGRAMS[program]), mesh_of(AxisType.Auto, 8)
    operands = placed(mesh, P(), P())
    assert "all-gather" not in optimised(run.lower(*operands))
    same(run(*operands), run(X, W, SIZES))
    with asserts.refused(jax.errors.JaxRuntimeError, ("`rhs` of grouped_matmul", *FRAGMENTS)):
        run.lower(*placed(mesh, P(), P("data"))).compile()


@pytest.mark.rule("ACC-10", "DLY-1")
def test_gspmd_updates_states_on_each_shard(gspmd: None) -> None:
    del gspmd
    state, mesh = cotangent(), mesh_of(AxisType.Auto, 2, 4)
    operands = put(mesh, state, along_groups(state, "model"))
    run = jax.jit(jax_grouped.update_scaling)
    assert not any(word in optimised(run.lower(operands)) for word in COLLECTIVES)
    found = run(operands)
    same(found, jax_grouped.update_scaling(jax.tree.map(jnp.asarray, state)))
    for mine, given in zip(jax.tree.leaves(found), jax.tree.leaves(operands), strict=True):
        assert mine.sharding.is_equivalent_to(given.sharding, mine.ndim), mine.sharding
