"""`ragged_dot` in JAX: values and gradients, every transformation, what is launched, what is refused."""

from __future__ import annotations

import collections
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from grouped_core import _native, debug, gradients, plans
from grouped_core.calls import ArraySpec, Call, spec_of
from grouped_core.gradients import Needs
from grouped_core.linear_spec import Linear
from jax_grouped import _run
from jax_grouped.accumulate import StackedRef
from jax_grouped.ops import NAMES
from tests import asserts, cases
from tests.bounds import expect_linear, expect_linear_grads
from tests.jax_frontend.jax_tools import copies, optimised
from tests.messages import BAD, GOOD, Bad

SMALL = cases.select("small")
X = jax.ShapeDtypeStruct((6, 8), jnp.float32)
W = jax.ShapeDtypeStruct((3, 8, 4), jnp.float32)
SIZES = jax.ShapeDtypeStruct((3,), jnp.int32)


def native_calls(program: Any) -> collections.Counter[str]:
    """How often each native call appears in a jaxpr, including nested ones."""
    found: collections.Counter[str] = collections.Counter()
    for eqn in program.eqns:
        if eqn.primitive is _run.call_p:
            found[eqn.params["call"].name] += 1
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            if hasattr(inner, "eqns"):
                found += native_calls(inner)
    return found


def traced(f: Any, *args: Any) -> collections.Counter[str]:
    return native_calls(jax.make_jaxpr(f)(*args))


def squares(y: jax.Array) -> jax.Array:
    return jnp.sum(y.astype(jnp.float32) ** 2)


def small(name: str = "tail", dtype: str = "float32", **options: Any) -> cases.Problem:
    return cases.problem(cases.named(name), dtype, **options)


# ---------------------------------------------------------------------------------------------------------------------
# Values and gradients. Rows past the groups hold NaN in every problem.


@pytest.mark.rule("ALL-1", "GRP-4", "GRP-5", "GRP-6", "GRP-9", "GRP-10", "MAT-1", "MAT-6", "MAT-8", "MAT-9")
@pytest.mark.matrix(
    case=SMALL,
    dtype=cases.DTYPES,
    transposed=(False, True),
    bias=(False, True),
    scaled=(False, True),
    scale_bias=(False, True),
    valid=lambda case, dtype, bias, scaled, scale_bias, **_: (
        dtype == cases.DTYPES[SMALL.index(case) % len(cases.DTYPES)] and ((bias and scaled) or not scale_bias)
    ),
)
def test_result_and_gradients(case, dtype, transposed, bias, scaled, scale_bias):
    """Each case has one dtype: the kernels alone know of both, and their tests have every pair."""
    p = cases.problem(case, dtype, transposed=transposed)
    op = Linear(NAMES, transposed=transposed, scale_bias=scale_bias)
    given = {"bias": p.bias if bias else None, "row_scale": p.row_scale if scaled else None}

    def f(x, w, extra):
        return jg.ragged_dot(x, w, p.group_sizes, rhs_transposed=transposed, scale_bias=op.scale_bias, **extra)

    @jax.jit
    def both(x, w, extra, dy):
        y, pullback = jax.vjp(f, x, w, extra)
        return y, pullback(dy)

    y, (dx, dw, extra) = both(p.x, p.w, given, p.dy)
    asserts.within(y, expect_linear(op, p.x, p.w, p.group_sizes, **given), "y")
    expected = expect_linear_grads(op, p.x, p.w, p.group_sizes, given["bias"], given["row_scale"], p.dy)
    asserts.within(dx, expected.x, "dx")
    asserts.within(dw, expected.w, "dw")
    if bias:
        asserts.within(extra["bias"], expected.bias, "db")
    if scaled:
        asserts.within(extra["row_scale"], expected.row_scale, "dc")
    for name, rows in (("y", y), ("dx", dx), ("dc", extra["row_scale"])):
        if rows is not None:
            asserts.zero(np.asarray(rows)[case.valid :], f"tail of {name}")


@pytest.mark.parametrize("name", ["uniform", "tail", "idle_ends", "groups_1_tail"])
def test_drop_in_for_lax(name):
    p = small(name)
    op = Linear(NAMES)
    expected = expect_linear(op, p.x, p.w, p.group_sizes)
    gradients_expected = expect_linear_grads(op, p.x, p.w, p.group_sizes, None, None, p.dy)
    for function in (jg.ragged_dot, partial(jax.lax.ragged_dot, precision=jax.lax.Precision.HIGHEST)):
        y, pullback = jax.vjp(lambda x, w, f=function: f(x, w, jnp.asarray(p.group_sizes)), p.x, p.w)
        asserts.within(y, expected, f"y of {function}")
        for what, got, wanted in zip(("dx", "dw"), pullback(jnp.asarray(p.dy)), gradients_expected, strict=False):
            asserts.within(got, wanted, f"{what} of {function}")


@pytest.mark.rule("MAT-6")
def test_dtype_of_the_result():
    p = small(dtype="bfloat16")
    for wanted in (None, jnp.float32, "float16"):
        y = jg.ragged_dot(p.x, p.w, p.group_sizes, preferred_element_type=wanted)
        lax = jax.eval_shape(partial(jax.lax.ragged_dot, preferred_element_type=wanted), p.x, p.w, p.group_sizes)
        assert y.dtype == lax.dtype
        op = Linear(NAMES, result_dtype=y.dtype.name)
        asserts.within(y, expect_linear(op, p.x, p.w, p.group_sizes))


@pytest.mark.rule("MAT-6")
@pytest.mark.parametrize("dtype", cases.FP8)
def test_plain_fp8(dtype):
    p = small("groups_2", dtype)
    op = Linear(NAMES)
    if why := jg.why_unsupported(jg.ragged_dot, p.x, p.w, p.group_sizes):
        assert jax.default_backend() != "cpu", f"the CPU kernels take these: {why}"
        pytest.skip(why)
    y, pullback = jax.vjp(lambda x, w: jg.ragged_dot(x, w, p.group_sizes), p.x, p.w)
    asserts.within(y, expect_linear(op, p.x, p.w, p.group_sizes))
    assert [g.dtype for g in pullback(jnp.asarray(p.dy))] == [jnp.bfloat16] * 2


@pytest.mark.rule("MAT-6")
def test_wgrad_dtype_is_wider_than_the_weight():
    p = small("jagged", "bfloat16")

    def loss(w):
        y = jg.ragged_dot(p.x, w * jnp.bfloat16(1), p.group_sizes)
        return squares(y)

    assert jax.grad(loss)(jnp.asarray(p.w)).dtype == jnp.bfloat16
    _, pullback = jax.vjp(lambda w: jg.ragged_dot(p.x, w, p.group_sizes, wgrad_dtype=jnp.float32), p.w)
    (dw,) = pullback(jnp.asarray(p.dy))
    op = Linear(NAMES, wgrad_dtype="float32")
    asserts.within(dw, expect_linear_grads(op, p.x, p.w, p.group_sizes, None, None, p.dy).w)


@pytest.mark.rule("ALL-6")
def test_a_nan_row_stays_in_its_group():
    p = small("jagged")
    clean = jax.vjp(lambda x, w: jg.ragged_dot(x, w, p.group_sizes), p.x, p.w)
    at = next(span for span in list(p.case.spans())[1:] if span.stop > span.start)
    group = list(p.case.spans()).index(at)
    bad = p.x.copy()
    bad[at.start] = np.nan
    y, pullback = jax.vjp(lambda x, w: jg.ragged_dot(x, w, p.group_sizes), bad, p.w)
    rows = np.delete(np.arange(p.case.rows), at.start)
    groups = np.delete(np.arange(p.case.groups), group)
    asserts.bitwise(y[rows], clean[0][rows], "other rows of y")
    dw, clean_dw = pullback(p.dy)[1], clean[1](p.dy)[1]
    asserts.bitwise(dw[groups], clean_dw[groups], "other groups of dw")
    assert np.isnan(y[at.start]).all()
    assert np.isnan(dw[group]).all()


@pytest.mark.rule("ALL-2")
def test_bits_repeat_and_do_not_depend_on_jit():
    p = small("jagged", "bfloat16")

    def f(x, w, dy):
        y, pullback = jax.vjp(lambda x, w: jg.ragged_dot(x, w, p.group_sizes), x, w)
        return y, *pullback(dy)

    first, again, eager = jax.jit(f)(p.x, p.w, p.dy), jax.jit(f)(p.x, p.w, p.dy), f(*map(jnp.asarray, (p.x, p.w, p.dy)))
    with jax.disable_jit():
        disabled = f(*map(jnp.asarray, (p.x, p.w, p.dy)))
    for a, *others in zip(first, again, eager, disabled, strict=True):
        for what, other in zip(("second run", "without jit", "with jit disabled"), others, strict=True):
            asserts.bitwise(other, a, what)


# ---------------------------------------------------------------------------------------------------------------------
# Group sizes.


@pytest.mark.rule("GRP-1")
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_sizes_of_any_integer_dtype(dtype, kind):
    p = small("groups_2")
    sizes = p.group_sizes.astype(dtype)
    y = jg.ragged_dot(p.x, p.w, sizes if kind == "numpy" else jnp.asarray(sizes))
    asserts.bitwise(y, jg.ragged_dot(p.x, p.w, p.group_sizes))


@pytest.mark.rule("GRP-1", "GRP-4")
@pytest.mark.parametrize(
    "sizes",
    [
        np.array([5, 2**40], np.int64),
        np.array([5, 2**32 + 1], np.uint64),
        np.array([5, 2**32 - 1], np.uint32),
        np.array([-(2**40), 2**40], np.int64),
    ],
    ids=["int64", "uint64", "uint32", "negative"],
)
def test_large_sizes_saturate(sizes):
    p = small("groups_2")
    clamped = np.clip(sizes.astype(np.float64), 0, p.case.rows).astype(np.int32)
    wanted = jg.ragged_dot(p.x, p.w, clamped)
    asserts.bitwise(jg.ragged_dot(p.x, p.w, sizes), wanted, "of NumPy")
    with jax.enable_x64(True):
        asserts.bitwise(jg.ragged_dot(p.x, p.w, jnp.asarray(sizes)), wanted, "of JAX")


def test_a_hint_changes_nothing_but_the_plan():
    p = small("groups_2")
    f = jax.jit(partial(jg.ragged_dot, p.x, p.w))
    hinted = jg.GroupSizes(jnp.asarray(p.group_sizes), representative=18)
    asserts.bitwise(f(hinted), f(p.group_sizes))
    jaxpr = jax.make_jaxpr(f)(hinted)
    assert "('rows_hint', 18)" in str(jaxpr)


@pytest.mark.rule("TE #2213")
@pytest.mark.rule("GRP-3")
def test_no_value_of_the_sizes_is_read():
    p = small("tail")
    arrays = jax.device_put((p.x, p.w, p.group_sizes))
    step = jax.jit(jax.grad(lambda x, w, sizes: squares(jg.ragged_dot(x, w, sizes)), (0, 1)))
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(step(*arrays))


@pytest.mark.rule("GRP-13")
@pytest.mark.parametrize(
    ("sizes", "word"),
    [
        ([3, 3], 0),
        ([0, 0], 0),
        ([7, 3], 0),
        ([8, 3], debug.SIZE_OVERFLOW),
        ([-1, 3], debug.SIZE_NEGATIVE),
        ([-1, 30], debug.SIZE_NEGATIVE | debug.SIZE_OVERFLOW),
        ([2**31 - 1, 2**31 - 1], debug.SIZE_OVERFLOW),
        ([2**40, 0], debug.SIZE_OVERFLOW),
    ],
)
def test_size_status(sizes, word):
    sizes = np.array(sizes, np.int64)
    found = jg.size_status(sizes, 10)
    assert (found.dtype, found.shape, int(found)) == (jnp.int32, (), word)
    if np.abs(sizes).max() < 2**31:
        assert int(jax.jit(jg.size_status, static_argnums=1)(sizes.astype(np.int32), 10)) == word
    with asserts.refused(TypeError, ["`M`", "str", "expected an integer", "number of rows"]):
        jg.size_status(sizes, "10")
    with asserts.refused(ValueError, ["`M`: -1", "expected 0 or more", "pass the number of rows"]):
        jg.size_status(sizes, np.int64(-1))


@pytest.mark.rule("GRP-13", "ERR-4")
def test_debug_checks_report_sizes_and_change_no_bits(monkeypatch, logged):
    p = small("clamped")
    quiet = jax.jit(lambda x: jg.ragged_dot(x, p.w, p.group_sizes))(p.x)
    jax.effects_barrier()
    assert not logged
    monkeypatch.setenv("GROUPED_DEBUG", "sizes")
    checked = jax.jit(lambda x: jg.ragged_dot(x, p.w, p.group_sizes))(p.x)
    jax.effects_barrier()
    asserts.bitwise(checked, quiet)
    assert any("were clamped" in message for message in logged)
    monkeypatch.setenv("GROUPED_DEBUG", "sices")
    with asserts.refused(ValueError, ["GROUPED_DEBUG", "sices", "expected a comma list", "correct or unset"]):
        jg.ragged_dot(p.x, p.w, p.group_sizes)


# ---------------------------------------------------------------------------------------------------------------------
# Transformations.


def chain(x, ws, sizes, wrap):
    """Layers of equal width in a scan; between them an exact factor, so that fusing changes no bits."""
    body = wrap(lambda h, w: (jg.ragged_dot(h, w, sizes) * jnp.float32(0.25), None))
    return squares(jax.lax.scan(body, x, ws)[0])


@pytest.mark.rule("ACC-11")
def test_scan_and_remat_have_the_bits_of_a_loop():
    sizes = np.array([5, 0, 8], np.int32)
    x, ws = cases.normal((16, 12), "float32", "x"), cases.normal((3, 3, 12, 12), "float32", "w")

    def loop(x, ws):
        for w in ws:
            x = jg.ragged_dot(x, w, sizes) * jnp.float32(0.25)
        return squares(x)

    expected = jax.jit(jax.grad(loop, (0, 1)))(x, ws)
    for wrap in (lambda body: body, jax.checkpoint):
        got = jax.jit(jax.grad(partial(chain, sizes=sizes, wrap=wrap), (0, 1)))(x, ws)
        for a, b in zip(got, expected, strict=True):
            asserts.bitwise(a, b)


@pytest.mark.rule("OFF-7")
def test_a_policy_saves_the_rows_by_name():
    p = small("groups_2")

    def sines(policy):
        body = jax.checkpoint(lambda w: squares(jg.ragged_dot(jnp.sin(p.x), w, p.group_sizes)), policy=policy)
        return str(jax.make_jaxpr(jax.grad(body))(jnp.asarray(p.w))).count("= sin ")

    policies = jax.checkpoint_policies
    assert sines(policies.nothing_saveable) == 2
    assert sines(policies.save_only_these_names("grouped_x")) == 1


@pytest.mark.rule("ACC-10")
@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (0, 0, 0), (None, None, 0)])
def test_vmap_is_refused_with_the_remedy(axes):
    p = small("groups_2")
    args = [a if axis is None else a[None] for a, axis in zip((p.x, p.w, p.group_sizes), axes, strict=True)]
    parts = [
        "jax.vmap of grouped_matmul",
        "over axis 0",
        "expected operands without a mapped axis",
        "fold the axis into",
    ]
    with asserts.refused(NotImplementedError, parts):
        jax.vmap(jg.ragged_dot, axes)(*args)
    if axes[0] == 0:
        step = jax.grad(lambda x, w, s: squares(jg.ragged_dot(x, w, s)))
        with asserts.refused(NotImplementedError, parts):
            jax.vmap(step, axes)(*args)


def test_vmap_around_unmapped_operands_is_fine():
    p = small("groups_2")
    got = jax.vmap(lambda t: t * jg.ragged_dot(p.x, p.w, p.group_sizes))(jnp.ones(2))
    asserts.bitwise(got[1], jg.ragged_dot(p.x, p.w, p.group_sizes))


def test_second_derivatives_are_refused():
    p = small("groups_2")

    def slope(x):
        return squares(jax.grad(lambda x: squares(jg.ragged_dot(x, p.w, p.group_sizes)))(x))

    parts = ["derivative of grouped_matmul", "second derivative", "expected one jax.grad", "use jax.lax.ragged_dot"]
    with asserts.refused(NotImplementedError, parts):
        jax.grad(slope)(jnp.asarray(p.x))


@pytest.mark.rule("ACC-10")
def test_vmap_of_a_state_is_refused_with_its_own_remedy():
    state = jax.tree.map(lambda part: jnp.stack([part] * 3), jg.scaling_state(jg.FP8Delayed, 2))
    with asserts.refused(NotImplementedError, ["jax.vmap of scale_update", "leave `jax.vmap` out", "leading axes"]):
        jax.vmap(jg.update_scaling)(state)
    assert jg.update_scaling(state).scale.shape == state.scale.shape


def test_derivatives_of_parts_and_transposes_are_refused():
    p = small("groups_2")
    parts = ["derivative of grouped_matmul", "a part of an operation", "jax_grouped.accumulate", "the whole operation"]
    with asserts.refused(NotImplementedError, parts):
        wi = jnp.concatenate([p.w, p.w], axis=2)
        wo = jnp.swapaxes(jnp.asarray(p.w), 1, 2)
        jax.grad(lambda x: jg.accumulate.grouped_mlp_fwd(x, wi, wo, p.group_sizes)[0].sum())(jnp.asarray(p.x))
    parts = ["transpose of grouped_matmul", "jax.linear_transpose", "take `jax.vjp`"]
    with asserts.refused(NotImplementedError, parts):
        jax.linear_transpose(lambda x: jg.ragged_dot(x, p.w, p.group_sizes), p.x)(p.x @ p.w[0])


@pytest.mark.rule("ACC-10")
def test_forward_mode_is_refused():
    p = small("groups_2")
    with asserts.refused(TypeError, ["forward-mode autodiff", "custom_vjp"]):
        jax.jvp(lambda x: jg.ragged_dot(x, p.w, p.group_sizes), (jnp.asarray(p.x),), (jnp.asarray(p.x),))


# ---------------------------------------------------------------------------------------------------------------------
# shard_map: eight shards of rows, one replicated weight.


def integers(shape: tuple[int, ...], *seed: object) -> np.ndarray:
    """Small integers as float32: their sums are exact, hence equal in any order over shards."""
    return np.rint(cases.normal(shape, "float32", *seed))


@pytest.fixture(scope="module")
def shards() -> SimpleNamespace:
    """Eight problems with one weight, and their results one by one."""
    x, w, dy = integers((8, 13, 12), "x"), integers((3, 12, 20), "w"), integers((8, 13, 20), "dy")
    rows = [[5, 0, 8], [0, 0, 0], [13, 0, 0], [1, 2, 3], [0, 13, 0], [4, 4, 4], [20, 1, 1], [0, 0, 2]]
    sizes = np.array(rows, np.int32)

    @jax.jit
    def one(x, w, sizes, dy):
        y, pullback = jax.vjp(lambda x, w: jg.ragged_dot(x, w, sizes), x, w)
        return y, *pullback(dy)

    y, dx, dw = zip(*(one(x[i], w, sizes[i], dy[i]) for i in range(8)), strict=True)
    return SimpleNamespace(x=x, w=w, dy=dy, sizes=sizes, y=np.stack(y), dx=np.stack(dx), dw=np.sum(dw, axis=0))


@pytest.mark.rule("ACC-8", "ACC-10")
@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_shard_map(shards, shape, kind, check_vma):
    names = ("data", "model")[: len(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))
    split = P(names)

    def local(x, w, sizes):
        return jg.ragged_dot(x[0], w, sizes[0])[None]

    f = jax.shard_map(local, mesh=mesh, in_specs=(split, P(), split), out_specs=split, check_vma=check_vma)

    def both(x, w, sizes, dy):
        y, pullback = jax.vjp(lambda x, w: f(x, w, sizes), x, w)
        return y, *pullback(dy)

    place = [NamedSharding(mesh, s) for s in (split, P(), split, split)]
    args = jax.device_put((shards.x, shards.w, shards.sizes, shards.dy), tuple(place))
    program = jax.jit(both)
    assert "all-gather" not in optimised(program.lower(*args))
    for what, got in zip(("y", "dx", "dw"), program(*args), strict=True):
        asserts.bitwise(got, getattr(shards, what), what)


@pytest.mark.rule("jax #33403")
@pytest.mark.rule("ACC-8")
def test_operands_that_vary_over_different_axes():
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    x, w = integers((2, 9, 12), "x"), integers((4, 3, 12, 8), "w")
    sizes = np.array([4, 0, 3], np.int32)

    def local(x, w):
        return jg.ragged_dot(x[0], w[0], sizes)[None, None]

    def plain(x, w):
        return jnp.stack([jnp.stack([jg.ragged_dot(x[i], w[j], sizes) for j in range(4)]) for i in range(2)])

    f = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P("expert")), out_specs=P("data", "expert"))
    for function in (lambda f: f, lambda f: jax.grad(lambda x, w: squares(f(x, w)), (0, 1))):
        expected = jax.tree.leaves(jax.jit(function(plain))(x, w))
        for a, b in zip(jax.tree.leaves(jax.jit(function(f))(x, w)), expected, strict=True):
            asserts.bitwise(a, b)


@pytest.mark.rule("jax #33403")
@pytest.mark.rule("ACC-10")
def test_an_explicitly_sharded_operand_outside_shard_map_is_refused():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(cases.normal((16, 8), "float32", "x"), NamedSharding(mesh, P("data")))
    parts = [
        "`lhs` of grouped_matmul",
        "sharded as",
        "expected the local arrays of one shard",
        "inside of jax.shard_map",
    ]
    with asserts.refused(ValueError, parts), jax.set_mesh(mesh):
        jax.jit(jg.ragged_dot)(x, cases.normal((1, 8, 4), "float32", "w"), np.array([3], np.int32))


# ---------------------------------------------------------------------------------------------------------------------
# What is launched and kept.


def masked(p: cases.Problem, mask: tuple[bool, ...], scale_bias: bool, wrap: Any):
    """(loss of the operands that `mask` differentiates, these operands)."""
    names = ("lhs", "rhs", "bias", "row_scale")
    arrays = dict(zip(names, map(jnp.asarray, (p.x, p.w, p.bias, p.row_scale)), strict=True))
    asked = {name: arrays[name] for name, ask in zip(names, mask, strict=True) if ask}

    def loss(asked):
        given = {**arrays, **asked}
        x, w = given.pop("lhs"), given.pop("rhs")
        run = wrap(lambda x, w, given: jg.ragged_dot(x, w, p.group_sizes, scale_bias=scale_bias, **given))
        return squares(run(x, w, given))

    return loss, asked


@pytest.mark.rule("ALL-4", "ACC-7", "MLP-12")
@pytest.mark.parametrize("scale_bias", [False, True])
@pytest.mark.parametrize("mask", cases.product(dict.fromkeys("xwbs", (False, True))), ids=str)
def test_only_needed_gradients_are_launched(mask, scale_bias):
    p = small("groups_2")
    needs = Needs(*mask)
    loss, asked = masked(p, mask, scale_bias, lambda f: f)
    run = plans.Planner()
    specs = tuple(spec_of(a) for a in (p.x, p.w, p.bias, p.row_scale))
    op = Linear(NAMES, scale_bias=scale_bias)
    x, w, bias, row_scale = specs
    y = gradients.linear(run, op, x, w, spec_of(p.group_sizes), bias, row_scale)
    if any(mask):
        gradients.linear_grads(run, op, specs, x, w, spec_of(p.group_sizes), bias, row_scale, y, needs)
    wanted = collections.Counter(call.name for call in run.calls)
    assert traced(jax.grad(loss) if asked else loss, asked) == wanted
    if asked:  # a rematerialised body may run the forward once more, and nothing else
        loss, asked = masked(p, mask, scale_bias, jax.checkpoint)
        once_more = wanted + collections.Counter(grouped_matmul=1)
        assert traced(jax.grad(loss), asked) in (wanted, once_more)


@pytest.mark.rule("ACC-7", "ALL-4")
def test_a_frozen_weight_saves_no_rows():
    p = small("groups_2")

    def kept(f, *args):
        return {leaf.shape for leaf in jax.tree.leaves(jax.vjp(f, *args)[1]) if hasattr(leaf, "shape")}

    run = partial(jg.ragged_dot, group_sizes=p.group_sizes)
    assert p.x.shape not in kept(lambda x: run(x, jnp.asarray(p.w)), jnp.asarray(p.x))
    assert p.w.shape not in kept(lambda w: run(jnp.asarray(p.x), w), jnp.asarray(p.w))
    assert {p.x.shape, p.w.shape} <= kept(run, jnp.asarray(p.x), jnp.asarray(p.w))


@pytest.mark.rule("ACC-7")
def test_a_frozen_weight_in_a_scan_launches_no_wgrad():
    sizes = np.array([5, 0, 8], np.int32)
    x, ws = cases.normal((16, 12), "float32", "x"), cases.normal((3, 3, 12, 12), "float32", "w")
    loss = partial(chain, sizes=sizes, wrap=lambda body: body)
    assert traced(jax.grad(loss, 0), x, ws) == {"grouped_matmul": 2}
    assert traced(jax.grad(loss, (0, 1)), x, ws) == {"grouped_matmul": 3}


@pytest.mark.rule("BUF-3", "BUF-7", "GRP-7", "ALL-5")
def test_out_is_written_in_place():
    p = small("tail")
    out = jnp.full((p.case.rows, p.case.n), cases.SENTINEL)

    def f(x, w, out):
        return jg.ragged_dot(x, w, p.group_sizes, out=out)

    assert copies(optimised(jax.jit(f).lower(p.x, p.w, out))) == 1
    hlo = optimised(jax.jit(f, donate_argnums=2).lower(p.x, p.w, out))
    assert copies(hlo) == 0
    assert "output_to_operand_aliasing" in hlo
    y = jax.jit(f, donate_argnums=2)(p.x, p.w, out + 0)
    asserts.bitwise(y[: p.case.valid], jg.ragged_dot(p.x, p.w, p.group_sizes)[: p.case.valid])
    asserts.filled(y[p.case.valid :], cases.SENTINEL, "tail of out")
    asserts.zero(jax.grad(lambda out: jnp.sum(f(p.x, p.w, out)))(out), "gradient of out")


# ---------------------------------------------------------------------------------------------------------------------
# Planning, lowering, export.


def cuda_text(f: Any, *args: Any) -> str:
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def with_cuda_kernels(monkeypatch):
    """Every call has a kernel on every GPU, as far as planning sees."""
    asked = []

    def attempt(call: Call, arch: str) -> Any:
        asked.append(arch)
        return SimpleNamespace(kernel="some_cuda", refusals=[], workspace_bytes=2048, aligned_workspace_bytes=1024)

    monkeypatch.setattr(plans, "attempt", attempt)
    plans.plan.cache_clear()
    yield asked
    plans.plan.cache_clear()


@pytest.mark.rule("TE #2048")
@pytest.mark.rule("ACC-11", "CAP-5")
def test_lowers_for_cuda_without_a_gpu(with_cuda_kernels):
    text = cuda_text(jax.grad(lambda x, w, s: squares(jg.ragged_dot(x, w, s)), (0, 1)), X, W, SIZES)
    assert text.count("jg_grouped_matmul_v1") == 3
    assert f'arch = "{_run.cuda_arch()}"' in text
    assert "tensor<1024xui8>" in text, "the workspace is a result, for addresses as XLA has them"
    assert "tensor<2048xui8>" not in text
    assert "has_side_effect = true" not in text


@pytest.mark.rule("TE #2660")
@pytest.mark.rule("ERR-1")
def test_a_launch_refuses_a_workspace_that_is_too_small(monkeypatch):
    """As it would be, should XLA ever place an operand where planning did not expect it."""
    whole, p = plans.attempt, small()
    activated = partial(jg.grouped_mlp, p.x, p.w, p.w.swapaxes(1, 2), p.group_sizes, activation="relu")

    def attempt(call: Call, arch: str) -> Any:
        found = whole(call, arch)
        less = max(0, found.aligned_workspace_bytes - 300)
        return SimpleNamespace(kernel=found.kernel, refusals=[], aligned_workspace_bytes=less)

    monkeypatch.setattr(plans, "attempt", attempt)
    jax.clear_caches()
    plans.plan.cache_clear()
    with pytest.raises(Exception, match=r"the workspace has \d+ bytes, expected \d+ in grouped_matmul_act\(.*allocate"):
        jax.block_until_ready(activated())
    monkeypatch.undo()
    jax.clear_caches()
    plans.plan.cache_clear()
    assert jnp.isfinite(activated()[: p.case.valid]).all()


@pytest.mark.rule("ACC-11")
@pytest.mark.parametrize("reason", ["the operands are too odd"])
def test_a_refusal_of_one_platform_is_raised_when_lowered_for_it(monkeypatch, reason):
    cpu = plans.attempt

    def attempt(call: Call, arch: str) -> Any:
        return cpu(call, arch) if arch == "cpu" else SimpleNamespace(kernel="", refusals=[("a_kernel", reason)])

    monkeypatch.setattr(plans, "attempt", attempt)
    plans.plan.cache_clear()
    assert jax.eval_shape(jg.ragged_dot, X, W, SIZES).shape == (6, 4)
    parts = ["grouped_matmul on sm_", "lhs float32[6, 8]", f"a_kernel: {reason}", "Change what the reasons name"]
    with asserts.refused(NotImplementedError, parts):
        cuda_text(jg.ragged_dot, X, W, SIZES)
    plans.plan.cache_clear()


@pytest.mark.rule("ACC-11")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_cuda_kernels_take_plain_products(dtype):
    x, w = X.update(dtype=jnp.dtype(dtype)), W.update(dtype=jnp.dtype(dtype))
    if why := jg.why_unsupported(jg.ragged_dot, x, w, SIZES, arch=_run.cuda_arch()):
        pytest.skip(why)
    assert "jg_grouped_matmul_v1" in cuda_text(jg.ragged_dot, x, w, SIZES)


@pytest.mark.rule("CAP-5")
def test_export_keeps_the_target():
    p = small("groups_2")
    check = jax.export.DisabledSafetyCheck.custom_call("jg_grouped_matmul_v1")
    exported = jax.export.export(jax.jit(jg.ragged_dot), disabled_checks=[check])(p.x, p.w, p.group_sizes)
    assert "jg_grouped_matmul_v1" in exported.mlir_module()
    asserts.bitwise(exported.call(p.x, p.w, p.group_sizes), jg.ragged_dot(p.x, p.w, p.group_sizes))


@pytest.mark.rule("ERR-1", "ACC-11")
@pytest.mark.parametrize("call", ["ragged_dot", "grouped_mlp", "topk_router", "quantize"])
def test_symbolic_dimensions_are_refused(call: str):
    w, sizes = jnp.zeros((3, 8, 8)), jnp.array([1, 1, 1], jnp.int32)
    name, run = {
        "ragged_dot": ("lhs", lambda x: jg.ragged_dot(x, w, sizes)),
        "grouped_mlp": ("x", lambda x: jg.grouped_mlp(x, w, w[:, :4], sizes)),
        "topk_router": ("logits", lambda x: jg.route.topk_router(x, 2)[0]),
        "quantize": ("x", lambda x: jg.quantize(x, "mxfp8").values),
    }[call]
    (rows,) = jax.export.symbolic_shape("rows")
    with asserts.refused(NotImplementedError, [f"`{name}`", "(rows, 8)", "expected integers", "for each shape"]):
        jax.export.export(jax.jit(run))(jax.ShapeDtypeStruct((rows, 8), jnp.float32))


@pytest.mark.rule("ERR-2", "ERR-3")
def test_explain_names_the_kernel_of_every_call():
    text = jg.explain(jg.ragged_dot, X, W, SIZES, bias=jax.ShapeDtypeStruct((3, 4), jnp.float32), arch="cpu")
    assert sorted(line.split()[0] for line in text.splitlines()) == ["group_sum"] + ["grouped_matmul"] * 3
    assert text.count("grouped_matmul_any_cpu on cpu") == 3
    assert jg.why_unsupported(jg.ragged_dot, X, W, SIZES, arch="cpu") is None
    for ask in (jg.why_unsupported, jg.explain):
        with asserts.refused(TypeError, ["`arch`: 90", "expected None or a name", "sm_90a"]):
            ask(jg.ragged_dot, X, W, SIZES, arch=90)


@pytest.mark.rule("ERR-2", "ERR-3")
def test_explain_of_quantisers():
    x = jnp.ones(X.shape, X.dtype)
    q = jg.quantize(x, "mxfp8", axis=(1, 0), group_sizes=np.asarray([1, 2, 3]))
    for sizes in (SIZES, None):
        text = jg.explain(jg.quantize, X, "mxfp8", axis=(1, 0), group_sizes=sizes, arch="cpu")
        assert text.startswith("quantize ->")
        assert text.count("quantize_any_cpu on cpu") == 1, "both forms come from one call"
    assert "dequantize_any_cpu on cpu" in jg.explain(jg.dequantize, q, arch="cpu")
    assert jg.why_unsupported(jg.quantize, X, "mxfp8", arch="cpu") is None
    for op, given, kind, words in (
        (jg.quantize, (x, "mxfp4"), ValueError, "`format`: mxfp4 for rows"),
        (jg.dequantize, (x,), TypeError, "`q`"),
    ):
        with asserts.refused(kind, [words]) as message:
            op(*given)
        assert jg.why_unsupported(op, *given, arch="cpu") == message[0]


@pytest.mark.rule("ERR-2", "ERR-3")
def test_why_unsupported_says_what_the_call_says():
    p = small("groups_2")
    pinned = {"implementation": "no_such_kernel"}
    why = jg.why_unsupported(jg.ragged_dot, p.x, p.w, p.group_sizes, arch="cpu", **pinned)
    with asserts.refused(NotImplementedError, ["grouped_matmul on cpu", "no_such_kernel"]) as message:
        jax.eval_shape(partial(jg.ragged_dot, **pinned), p.x, p.w, p.group_sizes)
    assert message[0] == why
    spec = ArraySpec((3, 9, 4), "float32")
    why = jg.why_unsupported(jg.ragged_dot, X, jax.ShapeDtypeStruct(spec.shape, spec.dtype), SIZES)
    assert why is not None
    assert "`lhs`: shape (6, 8)" in why
    for op in (print, []):
        with asserts.refused(TypeError, ["`op`", "expected one of ragged_dot", "pass the public function"]):
            jg.explain(op, X, W, SIZES)
    words = ["`op`: an instance of GroupedLinear", "its class or ragged_dot", "pass that", "lhs, rhs, group_sizes"]
    with asserts.refused(TypeError, words):
        jg.explain(jg.nnx.GroupedLinear(3, 8, 4, rngs=flax_nnx.Rngs(0)), X)
    words = ["`op`: jax_grouped.parallel.moe", "expected routed_mlp", "pass that", "x, experts, weights, wi, wo"]
    with asserts.refused(TypeError, words):
        jg.explain(jg.parallel.moe, X)
    words = ["`op`: an instance of MoE", "its class or moe", "pass that", "x, router, wi, wo, k."]
    with asserts.refused(TypeError, words):
        jg.explain(jg.nnx.MoE(3, 8, 4, 2, rngs=flax_nnx.Rngs(0)), X)
    assert jg.explain(jg.nnx.GroupedLinear, X, W, SIZES) == jg.explain(jg.ragged_dot, X, W, SIZES)
    mlp = (X, jnp.zeros((3, 8, 8)), jnp.zeros((3, 4, 8)), SIZES)
    assert jg.explain(jg.nnx.GroupedMLP, *mlp) == jg.explain(jg.grouped_mlp, *mlp)


@pytest.mark.rule("ERR-2", "ACC-1")
@pytest.mark.parametrize("form", ["array", "ref", "stacked"])
def test_why_unsupported_takes_every_accumulator(form):
    zeros = jnp.zeros(W.shape, W.dtype)
    accum = {"array": zeros, "ref": jax.new_ref(zeros), "stacked": StackedRef(jax.new_ref(zeros[None]), 0)}[form]
    assert jg.why_unsupported(jg.ragged_dot, X, W, SIZES, wgrad_accum=accum, arch="cpu") is None


@pytest.mark.rule("GRP-1")
@pytest.mark.parametrize("hint", [1.5, "many"])
def test_a_hint_is_an_integer(hint):
    with asserts.refused(TypeError, ["`representative` of GroupSizes", repr(hint), "an integer", "pass"]):
        jg.GroupSizes(SIZES, hint)
    far = np.int64(2**40)
    jax.eval_shape(lambda x, w, sizes: jg.ragged_dot(x, w, jg.GroupSizes(sizes, far)), X, W, SIZES)


def test_a_pinned_kernel_runs():
    p = small("groups_2")
    for name in ("reference", ["grouped_matmul_any_cpu"]):
        y = jg.ragged_dot(p.x, p.w, p.group_sizes, implementation=name)
        asserts.within(y, expect_linear(Linear(NAMES), p.x, p.w, p.group_sizes))


@pytest.mark.parametrize(("built", "runtime"), [((0, 4), (0, 3)), ((1, 0), (0, 3))])
def test_a_newer_native_module_is_refused_before_registration(built, runtime):
    parts = [
        "grouped_core._native",
        f"{built[0]}.{built[1]}",
        f"has {runtime[0]}.{runtime[1]}",
        "install a newer jaxlib",
    ]
    with asserts.refused(ImportError, parts):
        _run.check_ffi_version(built, runtime)


def test_an_older_native_module_is_taken():
    _run.check_ffi_version((0, 2), (0, 3))
    _run.check_ffi_version(_native.ffi_api_version, _run.runtime_ffi_version())


# ---------------------------------------------------------------------------------------------------------------------
# Refusals.


@pytest.mark.rule("ERR-1", "GRP-1", "MAT-6", "MAT-7", "MAT-9", "ACC-11")
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_bad_calls(bad: Bad):
    given = dict(bad.arguments())
    arrays = ("x", "w", "group_sizes", "bias", "row_scale", "out")
    struct = {k: None if given[k] is None else jax.ShapeDtypeStruct(given[k][1], given[k][0]) for k in arrays}
    options = {k: given[k] for k in ("scale_bias", "recipe", "implementation")}

    def f(s):
        return jg.ragged_dot(
            s["x"],
            s["w"],
            s["group_sizes"],
            bias=s["bias"],
            row_scale=s["row_scale"],
            out=s["out"],
            rhs_transposed=given["transposed"],
            preferred_element_type=given["result_dtype"],
            **options,
        )

    with asserts.refused(bad.kind, bad.fragments(NAMES)):
        jax.eval_shape(f, struct)


def test_the_good_call_is_taken():
    (x, w, sizes) = (jax.ShapeDtypeStruct(GOOD[k][1], GOOD[k][0]) for k in ("x", "w", "group_sizes"))
    assert jax.eval_shape(jg.ragged_dot, x, w, sizes).shape == (6, 4)


def test_handlers_tell_calls_of_the_same_shapes_apart() -> None:
    """A handler keeps what it has decoded: one number, text or dtype that differs makes another call."""
    x, w = (jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float16) for shape in ((6, 8), (3, 8, 8)))
    sizes, wi = jnp.asarray([1, 2, 3], jnp.int32), jnp.concatenate([w, -w], 2)
    product, mlp = (
        jax.jit(jg.ragged_dot, static_argnames="rhs_transposed"),
        jax.jit(jg.grouped_mlp, static_argnames="activation"),
    )

    def results() -> list[jax.Array]:
        limits = [jg.Activation("clamped_swiglu", limit=limit) for limit in (7.0, 0.25)]
        return [
            product(x, w, sizes),
            product(x, w, sizes, rhs_transposed=True),
            product(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), sizes),
            *[mlp(x, wi, w, sizes, activation=each) for each in limits],
            *[mlp(x, w, w, sizes, activation=each) for each in ("relu", "silu")],
        ]

    first = results()
    for again, one in zip(results(), first, strict=True):
        asserts.bitwise(again, one, "the same call")
    asserts.bitwise(first[1], product(x, jnp.swapaxes(w, 1, 2), sizes), "the weight stored along the other axis")
    longer = product(jnp.pad(x.astype(jnp.bfloat16), ((0, 1), (0, 0))), w.astype(jnp.bfloat16), sizes)
    asserts.bitwise(first[2], longer[:6], "bfloat16 beside float16")
    values = [np.asarray(each, np.float32) for each in first]
    for at, one in enumerate(values):
        assert not any(np.array_equal(one, other) for other in values[:at]), f"result {at} is that of another call"


@pytest.mark.rule("jax #34168")
@pytest.mark.rule("ERR-1", "GRP-14")
@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"lhs": [[1.0]]}, ["`lhs`: list", "expected a JAX or NumPy array [M, K]", "jnp.asarray"]),
        ({"rhs": 1.0}, ["`rhs`: float", "array [G, K, N]", "jnp.asarray"]),
        ({"group_sizes": [3, 3]}, ["`group_sizes`: list", "array [G]", "jnp.asarray"]),
        ({"bias": "b"}, ["`bias`: str", "array [G, N]", "jnp.asarray"]),
        ({"group_offset": np.zeros(1)}, ["`group_offset`: ndarray", "expected None", "slice `group_sizes`"]),
        ({"recipe": "bf16"}, ["`recipe`: str", "expected None or a Recipe", "pass one"]),
        ({"lhs": np.ones((2, 2))}, ["`lhs`: dtype float64", "expected one of float32", "cast it"]),
        ({"lhs": np.ones((2, 2), object)}, ["`lhs`: dtype object", "expected one of float32", "cast it"]),
        ({"lhs": np.ones((2, 2), ">f4")}, ["`lhs`: dtype >f4", "expected one of float32", "cast it"]),
        ({"wgrad_dtype": "half a float"}, ["`wgrad_dtype`: half a float", "expected None or one of", "choose"]),
        (
            {"wgrad_accum": StackedRef(jax.new_ref(jnp.ones((2, 3, 4, 5))), 0.5)},
            ["`wgrad_accum`", "float32[]", "integer"],
        ),
    ],
    ids=[
        *("lhs", "rhs", "sizes", "bias", "group_offset", "recipe"),
        *("numpy_double", "numpy_objects", "byte_order", "no_dtype", "layer"),
    ],
)
def test_arguments_of_the_wrong_kind(change, parts):
    p = small("groups_2")
    with asserts.refused(TypeError, parts):
        jg.ragged_dot(**{"lhs": p.x, "rhs": p.w, "group_sizes": p.group_sizes, **change})


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize("name", ["rhs_transposed", "scale_bias"])
def test_options_that_are_true_or_false_take_nothing_else(name):
    """Text would count as True, and turn the layout of square weights around."""
    x, w, sizes = jnp.ones((6, 4)), jnp.ones((2, 4, 4)), jnp.array([3, 3])
    with asserts.refused(TypeError, [f"`{name}`: 'False'", "expected True or False", "pass one of them"]):
        jg.ragged_dot(x, w, sizes, **{name: "False"})
    with asserts.refused(TypeError, [f"`{name}`: ", "Tracer", "expected True or False", "pass one of them"]):
        jax.jit(lambda flag: jg.ragged_dot(x, w, sizes, **{name: flag}))(False)


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize("name", ["scaling", "dropout"])
def test_options_of_an_adapter_are_known_when_the_function_is_called(name):
    x, w, sizes = jnp.ones((6, 4)), jnp.ones((2, 4, 4)), jnp.array([3, 3])
    with asserts.refused(ValueError, [f"`lora_{name}`: ", "Tracer", "known when the function is called", "pass a"]):
        jax.jit(lambda value: jg.ragged_dot(x, w, sizes, lora=(w[..., :2], w[:, :2]), **{f"lora_{name}": value}))(0.5)
