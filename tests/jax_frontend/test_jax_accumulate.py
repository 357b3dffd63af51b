"""Weight gradients that are added in place: sinks, Refs, stacked Refs, in every loop they are made for."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from grouped_core.linear_spec import Linear
from jax_grouped.accumulate import StackedRef, value_and_accumulate_grad
from jax_grouped.ops import NAMES
from tests import asserts, cases
from tests.bounds import expect_linear_grads
from tests.jax_frontend.jax_tools import copies, optimised

SIZES = np.array([5, 0, 8], np.int32)  # an empty group, and a tail of three rows
FORMS = ("sink", "ref", "stacked")


def data(dtype: str = "bfloat16", layers: int = 1, batches: int = 1) -> tuple[jax.Array, jax.Array]:
    """Rows of each microbatch and weights of each layer: small integers, so that sums are exact in any order."""
    x = np.rint(cases.normal((batches, 16, 12), "float32", "x"))
    w = np.rint(cases.normal((layers, 3, 12, 12), "float32", "w"))
    return jnp.asarray(x.astype(dtype)), jnp.asarray(w.astype(dtype))


def loss(x: Any, w: Any, accum: Any = None, **options: Any) -> jax.Array:
    """A loss whose gradient with respect to y is integer."""
    y = jg.ragged_dot(x, w, SIZES, wgrad_accum=accum, preferred_element_type=jnp.float32, **options)
    return jnp.sum(y * jnp.round(jnp.cos(jnp.arange(y.size, dtype=jnp.float32)) * 3).reshape(y.shape))


def plain_gradient(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.jit(jax.grad(partial(loss, wgrad_dtype=jnp.float32), 1))(x, w)


def accumulated(form: str, x: Any, w: Any, before: Any, wrap: Any = lambda f: f) -> tuple[Any, Any]:
    """(gradient of x, new accumulator) after one backward; traceable."""
    run = wrap(loss)
    if form == "sink":
        return jax.grad(run, (0, 2))(x, w, before)
    ref = jax.new_ref(before if form == "ref" else before[None])
    accum = ref if form == "ref" else StackedRef(ref, 0)
    # A Ref counts as asked for once the weight is differentiated; its own gradient is zero.
    dx, dw = jax.grad(lambda x, w: run(x, w, accum), (0, 1))(x, w)
    after = jax.freeze(ref)
    return (dx + dw.sum().astype(dx.dtype), after if form == "ref" else after[0])


@pytest.mark.rule("ACC-1", "ACC-2", "ACC-3", "ACC-4", "GRP-9", "MAT-11")
@pytest.mark.matrix(
    form=FORMS,
    dtype=("bfloat16", "float32"),
    wrap=(lambda f: f, jax.checkpoint),
    jit=(True, False),
)
def test_accumulators_hold_the_sum(form, dtype, wrap, jit):
    (x,), (w,) = data(dtype)
    before = jnp.full(w.shape, 3, jnp.float32)
    step = partial(accumulated, form, wrap=wrap)
    dx, after = (jax.jit(step) if jit else step)(x, w, before)
    asserts.bitwise(after, plain_gradient(x, w) + 3, "accumulator")
    asserts.bitwise(dx, jax.grad(loss)(x, w), "dx")
    asserts.filled(after[1], 3.0, "the empty group's accumulator")


@pytest.mark.rule("ACC-4", "MAT-11", "ALL-3")
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("accum_dtype", cases.DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_accumulators_of_every_dtype(dtype, accum_dtype, transposed):
    p = cases.problem(cases.named("tail"), dtype, transposed=transposed)
    before = cases.normal(p.w.shape, accum_dtype, "accum")

    def f(w, accum):
        return jg.ragged_dot(p.x, w, p.group_sizes, rhs_transposed=transposed, wgrad_accum=accum)

    _, pullback = jax.vjp(f, p.w, before)
    dw, after = pullback(jnp.asarray(p.dy))
    op = Linear(NAMES, transposed=transposed)
    expected = expect_linear_grads(
        op, p.x, p.w, p.group_sizes, None, None, p.dy, into_w=before, accumulate=True
    )  # fmt: skip
    asserts.within(after, expected.w, "accumulator")
    asserts.zero(dw, "the weight's own gradient")


@pytest.mark.rule("ACC-4")
@pytest.mark.parametrize("form", ["sink", "ref"])  # stacked Refs have a test of their own below
def test_a_donated_accumulator_is_not_copied(form):
    (x,), (w,) = data()
    before = jax.jit(partial(jnp.zeros, w.shape, jnp.float32))()  # memory of JAX's own, not of NumPy (eager_jax.py)

    def step(x, w, before):
        return accumulated(form, x, w, before)[1]

    def hlo(**options):
        return optimised(jax.jit(step, **options).lower(x, w, before))

    donated = hlo(donate_argnums=2)
    assert copies(donated) == 0
    assert "output_to_operand_aliasing" in donated
    assert copies(hlo()) == 1
    pointer = before.unsafe_buffer_pointer()
    assert jax.jit(step, donate_argnums=2)(x, w, before).unsafe_buffer_pointer() == pointer


@pytest.mark.rule("ACC-3")
def test_a_ref_may_be_used_twice():
    (x,), (w,) = data("float32")

    @jax.jit
    def step(x, w):
        ref = jax.new_ref(jnp.full(w.shape, 3, jnp.float32))
        jax.grad(lambda w: loss(x, w, ref) + loss(x * 2, w, ref))(w)
        return jax.freeze(ref)

    asserts.bitwise(step(x, w), plain_gradient(x, w) * 3 + 3)


@pytest.mark.rule("ACC-3", "ACC-5")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "remat"])
def test_stacked_refs_in_a_scan_over_layers_and_microbatches(wrap):
    x, w = data("float32", layers=3, batches=2)

    def model(w, x, stack):
        def layer(h, at):
            index, w = at
            accum = None if stack is None else StackedRef(stack, index)
            y = jg.ragged_dot(h, w, SIZES, wgrad_accum=accum)
            return jnp.clip(y, -2, 2), None  # values stay small integers

        h, _ = jax.lax.scan(wrap(layer), x, (jnp.arange(3), w))
        return jnp.sum(h)

    def step(w, x, before):
        stack = jax.new_ref(before)
        jax.lax.scan(lambda _, x: (None, jax.grad(model)(w, x, stack).sum()), None, x)
        return jax.freeze(stack)

    program = jax.jit(step, donate_argnums=2)
    before = jnp.full(w.shape, 3, jnp.float32)
    assert copies(optimised(program.lower(w, x, before)), r"f32\[3,3,12,12\]") == 0, "the stack is copied"
    plain = jax.jit(jax.grad(partial(model, stack=None)))
    asserts.bitwise(program(w, x, before), plain(w, x[0]) + plain(w, x[1]) + 3)


@pytest.mark.rule("ACC-5")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "remat"])
def test_value_and_accumulate_grad_over_microbatches(wrap):
    x, w = data("float32", layers=2, batches=3)
    params = {"first": w[0], "second": w[1], "scale": jnp.float32(2)}

    def model(params, accum, x):
        h = jg.ragged_dot(x, params["first"], SIZES, wgrad_accum=accum["first"])
        return params["scale"] * loss(jnp.clip(h, -2, 2), params["second"], accum["second"])

    none = {"first": None, "second": None, "scale": None}
    accum = {"first": jnp.full(w[0].shape, 3, jnp.float32), "second": jnp.zeros(w[1].shape), "scale": None}

    @partial(jax.jit, donate_argnums=1)
    def step(params, accum, x):
        def microbatch(accum, x):
            value, grads, accum = value_and_accumulate_grad(wrap(model))(params, accum, x)
            return accum, (value, grads)

        return jax.lax.scan(microbatch, accum, x)

    assert copies(optimised(step.lower(params, accum, x)), r"f32\[3,12,12\]") == 0, "an accumulator is copied"
    new, (values, grads) = step(params, jax.tree.map(lambda a: a + 0, accum), x)
    plain = jax.jit(jax.value_and_grad(lambda params, x: model(params, none, x)))
    each = [plain(params, x[i]) for i in range(3)]
    for i, (value, grad) in enumerate(each):
        asserts.bitwise(values[i], value, "value")
        asserts.bitwise(grads["scale"][i], grad["scale"], "gradient of the rest")
    assert grads["first"] is None
    assert new["scale"] is None
    for name in ("first", "second"):
        asserts.bitwise(new[name], accum[name] + sum(grad[name] for _, grad in each), name)


@pytest.mark.rule("ACC-5")
def test_a_sink_that_no_operation_reached_comes_back():
    (x,), (w,) = data("float32")
    accum = [jnp.full(w.shape, 3, jnp.float32), jnp.full(w.shape, 4, jnp.float32)]

    def model(params, accum, x):
        return loss(x, params[0], accum[0]) + 0 * jax.lax.stop_gradient(loss(x, params[1], accum[1]))

    for f in (model, lambda *_: jnp.float32(1)):
        _, grads, new = jax.jit(value_and_accumulate_grad(f))([w, w], accum, x)
        assert grads == [None, None]
        asserts.filled(new[1], 4.0)
    asserts.filled(new[0], 3.0)


@pytest.mark.rule("ACC-5")
def test_value_and_accumulate_grad_takes_refs():
    (x,), (w,) = data("float32")
    ref = jax.new_ref(jnp.full(w.shape, 3, jnp.float32))
    _, grads, new = value_and_accumulate_grad(lambda w, a, x: loss(x, w, a))(w, ref, x)
    assert grads is None
    assert new is ref
    asserts.bitwise(ref[...], plain_gradient(x, w) + 3)


@pytest.mark.rule("ACC-2", "ACC-7")
def test_an_accumulator_of_a_frozen_weight_adds_no_call():
    (x,), (w,) = data()
    accum = jnp.zeros(w.shape, jnp.float32)
    frozen = jax.make_jaxpr(jax.grad(lambda x: loss(x, w, accum)))(x)
    plain = jax.make_jaxpr(jax.grad(lambda x: loss(x, w)))(x)
    assert str(frozen).count("grouped_call") == str(plain).count("grouped_call")


@pytest.mark.rule("ACC-2", "ERR-1")
def test_a_gradient_that_would_be_lost_is_refused():
    (x,), (w,) = data()
    accum = jnp.zeros(w.shape, jnp.float32)
    parts = ["`wgrad_accum`: an array that is not differentiated", "`rhs` is", "expected both", "or pass a jax.Ref"]
    with asserts.refused(ValueError, parts):
        jax.grad(loss, 1)(x, w, accum)


# ---------------------------------------------------------------------------------------------------------------------
# shard_map.


@pytest.mark.rule("ACC-3", "ACC-8", "ACC-9")
@pytest.mark.matrix(
    form=("sink", "ref"), check_vma=(True, False), kind=(AxisType.Auto, AxisType.Explicit), shape=((8,), (2, 4))
)
def test_accumulators_in_shard_map(form, check_vma, kind, shape):
    mesh = jax.make_mesh(shape, ("data", "model")[: len(shape)], axis_types=(kind,) * len(shape))
    split = P(mesh.axis_names)
    x, (w,) = data("float32", batches=8)
    before = np.full((8, *w.shape), 3, np.float32)

    def local(x, w, before):
        dx, after = accumulated(form, x[0], w, before[0])
        return dx[None], after[None]

    f = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(split, P(), split), out_specs=split, check_vma=check_vma)
    )  # fmt: skip
    where = [jax.NamedSharding(mesh, spec) for spec in (split, P(), split)]
    args = jax.device_put((x, w, before), tuple(where))
    text = optimised(f.lower(*args))
    assert "all-gather" not in text
    assert form == "ref" or "all-reduce" not in text, "a partial sum was reduced"
    _, after = f(*args)
    for i in range(8):
        asserts.bitwise(np.asarray(after)[i], plain_gradient(x[i], w) + 3, f"shard {i}")


@pytest.mark.rule("ACC-5", "ACC-8")
def test_value_and_accumulate_grad_in_shard_map_without_jit():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x, (w,) = data("float32", batches=8)
    before = np.full((8, *w.shape), 3, np.float32)

    def local(x, w, before):
        run = value_and_accumulate_grad(lambda w, accum: loss(x[0], w, accum))
        return run(w, before[0])[2][None]

    f = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P("data"))
    asserts.bitwise(f(x, w, before), jax.jit(f)(x, w, before))


@pytest.mark.rule("ACC-9", "ERR-1")
def test_a_replicated_accumulator_is_refused():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x, (w,) = data("float32", batches=8)
    f = jax.shard_map(
        lambda x, w, accum: jax.grad(loss, 2)(x[0], w, accum), mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P()
    )
    parts = ["`wgrad_accum`", "replicated over the mesh axes ['data']", "expected one that varies", "give each shard"]
    with asserts.refused(ValueError, parts):
        jax.eval_shape(f, x, w, jnp.zeros(w.shape))


# ---------------------------------------------------------------------------------------------------------------------
# Refusals.


@pytest.mark.rule("ACC-11", "ERR-1", "MAT-11")
@pytest.mark.parametrize(
    ("accum", "kind", "parts"),
    [
        (np.zeros((3, 12)), ValueError, ["`wgrad_accum`: shape (3, 12)", "expected (3, 12, 12)", "matches its weight"]),
        (
            np.zeros((3, 12, 12), np.int32),
            TypeError,
            ["`wgrad_accum`: dtype int32", "expected one of float32", "cast it"],
        ),
        (0.0, TypeError, ["`wgrad_accum`: float", "a jax.Ref or a StackedRef", "jnp.asarray"]),
        (
            StackedRef(np.zeros((2, 3, 12, 12), np.float32), 0),
            TypeError,
            ["`wgrad_accum`: StackedRef of float32[2, 3, 12, 12]", "expected one of a jax.Ref [L, ...]", "jax.new_ref"],
        ),
    ],
    ids=["shape", "dtype", "kind", "stacked"],
)
def test_bad_accumulators(accum, kind, parts):
    (x,), (w,) = data()
    with asserts.refused(kind, parts):
        loss(x, w, accum)


@pytest.mark.rule("ACC-11")
def test_a_stacked_ref_is_checked_by_layer():
    (x,), (w,) = data()
    stack = jax.new_ref(jnp.zeros((2, 3, 12, 8)))
    with asserts.refused(ValueError, ["`wgrad_accum`: shape (3, 12, 8)", "expected (3, 12, 12)"]):
        loss(x, w, StackedRef(stack, 1))


@pytest.mark.rule("MAT-6", "ERR-1")
def test_two_dtypes_for_one_gradient_are_refused():
    (x,), (w,) = data()
    parts = ["`wgrad_dtype`: bfloat16", "expected None or float32 = dtype of `wgrad_accum`", "leave `wgrad_dtype` None"]
    with asserts.refused(ValueError, parts):
        loss(x, w, jnp.zeros(w.shape, jnp.float32), wgrad_dtype=jnp.bfloat16)


@pytest.mark.rule("ACC-2", "ERR-1")
def test_a_tree_that_names_an_accumulator_twice_is_refused():
    (x,), (w,) = data()
    accum = jnp.zeros(w.shape)
    step = value_and_accumulate_grad(lambda params, accum, x: loss(x, params[0], accum[0]))
    with asserts.refused(ValueError, ["`accum`: the same array is given twice", "expected each once", "one jax.Ref"]):
        step([w, w], [accum, accum], x)
    with asserts.refused(ValueError, ["`accum`: structure", "expected", "put None where a parameter has no"]):
        step([w, w], [accum], x)


@pytest.mark.rule("ACC-5", "ERR-1")
def test_accumulators_of_numpy_and_of_other_dtypes():
    (x,), (w,) = data()
    step = value_and_accumulate_grad(lambda params, accum, x: loss(x, params[0], accum[0]))
    found = step([w], [np.ones(w.shape, np.float32)], x)[2][0]
    asserts.bitwise(found, step([w], [jnp.ones(w.shape, jnp.float32)], x)[2][0])
    for dtype in (np.int32, np.float64):
        with asserts.refused(TypeError, ["`accum`", np.dtype(dtype).name, "expected one of float32", "allocate"]):
            step([w], [np.ones(w.shape, dtype)], x)
    several = value_and_accumulate_grad(lambda params, accum, x: (loss(x, params[0], accum[0]), x))
    with asserts.refused(TypeError, ["`loss` of value_and_accumulate_grad", "tuple", "expected a scalar", "alone"]):
        several([w], [jnp.ones(w.shape, jnp.float32)], x)


@pytest.mark.rule("ALL-4", "QNT-8")
def test_quantised_operands_without_a_master_have_no_gradient_in_parts():
    x, sizes = jnp.ones((6, 32), jnp.bfloat16), jnp.asarray([2, 4])
    wi, wo = jnp.ones((2, 32, 64), jnp.bfloat16), jnp.ones((2, 32, 32), jnp.bfloat16)
    of_wi, of_wo = (jg.quantize(each, "mxfp4", axis=1) for each in (wi, wo))
    y, res = jg.accumulate.grouped_mlp_fwd(x, of_wi, of_wo, sizes)
    assert (res.x, res.z) == (None, None), "only weight gradients read them"
    *_, deferred = jg.accumulate.grouped_mlp_bwd_dx(res, y)
    assert jg.accumulate.grouped_mlp_bwd_dw(deferred) == (None, None)
    for at, name in enumerate(("`wi`", "`wo`")):
        accums = tuple(jnp.zeros(each.shape) if at == each_at else None for each_at, each in enumerate((wi, wo)))
        with asserts.refused(ValueError, ["`wgrad_accum` of grouped_mlp_bwd_dw", name, "no gradient", "straight_thr"]):
            jg.accumulate.grouped_mlp_bwd_dw(deferred, accums)
    rows = jg.quantize(x, "mxfp8", axis=1, group_sizes=sizes)
    y, res = jg.accumulate.grouped_mlp_fwd(rows, of_wi, of_wo, sizes)
    assert jg.accumulate.grouped_mlp_bwd_dx(res, y)[0] is None


@pytest.mark.rule("ACC-2", "QNT-8")
def test_a_ref_beside_quantised_rows_asks_for_no_form_of_dx():
    x, w, sizes = jnp.ones((6, 128), jnp.bfloat16), jnp.ones((2, 128, 128)), jnp.asarray([2, 4])
    rows = jg.quantize(x, "fp8_1x128", axis=(1, 0), group_sizes=sizes)
    code = jg.quantize(w, "fp8_128x128", axis=1)

    def sums(run: Any) -> np.ndarray:
        ref = jax.new_ref(jnp.zeros(w.shape))
        jax.grad(lambda w: run(jg.straight_through(w, code), ref).astype(jnp.float32).sum())(w)
        return np.asarray(ref[...])

    product = sums(lambda w, ref: jg.ragged_dot(rows, w, sizes, recipe=jg.FP8Block, wgrad_accum=ref))
    asserts.filled(product[0], 2.0)
    asserts.filled(product[1], 4.0)
    options: Any = {"recipe": jg.FP8Block, "activation": "relu"}
    second = jg.quantize(w, "fp8_128x128", axis=(1, 2))
    of_mlp = sums(lambda w, ref: jg.grouped_mlp(rows, w, second, sizes, wgrad_accum=(ref, None), **options))
    asserts.filled(of_mlp[1] / of_mlp[0], 2.0)


@pytest.mark.rule("ACC-6", "ERR-1")
def test_options_of_adapters_are_refused_in_parts():
    x, wi, wo, sizes = jnp.ones((4, 8)), jnp.ones((2, 8, 8)), jnp.ones((2, 4, 8)), jnp.asarray([1, 3])
    with asserts.refused(ValueError, ["`lora_scaling`", "without `lora`", "expected 1.0"]):
        jg.accumulate.grouped_mlp_fwd(x, wi, wo, sizes, lora_scaling=3.0)


@pytest.mark.rule("ACC-3")
def test_a_tree_may_have_places_without_a_parameter():
    x, w, sizes = jnp.ones((6, 8)), jnp.ones((2, 8, 4)), jnp.asarray([2, 3])

    def total(params: Any, accum: Any) -> Any:
        return jg.ragged_dot(x, params["w"], sizes, wgrad_accum=accum["w"]).sum()

    trees: Any = {"w": w, "bias": None}, {"w": jnp.ones_like(w), "bias": None}
    _, grads, accum = value_and_accumulate_grad(total)(*trees)
    assert (grads, accum["bias"]) == ({"w": None, "bias": None}, None)
    asserts.filled(np.asarray(accum["w"])[1], 4.0)


@pytest.mark.rule("ACC-6", "ERR-1")
def test_parts_of_another_operation_are_refused():
    x, wi, wo, sizes = jnp.ones((4, 8)), jnp.ones((2, 8, 8)), jnp.ones((2, 4, 8)), jnp.asarray([1, 3])
    y, res = jg.accumulate.grouped_mlp_fwd(x, wi, wo, sizes)
    for given in (None, (y, res)):
        with asserts.refused(TypeError, ["`res` of grouped_mlp_bwd_dx", "MlpResiduals that `grouped_mlp_fwd`", "pass"]):
            jg.accumulate.grouped_mlp_bwd_dx(given, y)
    with asserts.refused(TypeError, ["`dy`: NoneType", "a JAX or NumPy array [M, K]", "convert"]):
        jg.accumulate.grouped_mlp_bwd_dx(res, None)
    with asserts.refused(TypeError, ["`deferred` of grouped_mlp_bwd_dw", "MlpResiduals", "the Deferred that", "pass"]):
        jg.accumulate.grouped_mlp_bwd_dw(res)
