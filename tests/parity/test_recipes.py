"""Recipes that quantise, in every frontend: the same bits, and errors within the bounds of their formats."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_grouped
import torch_bridge
from grouped_core import arrays, gradients, recipes, scaling
from grouped_core.formats import FORMATS, QTensor
from grouped_core.gradients import Needs
from grouped_core.linear_spec import Linear
from grouped_core.recipes import Recipe
from jax_grouped import accumulate
from tests import asserts, bounds, cases
from tests.bounds import ALL_NEEDS
from tests.native.runner import Native
from tests.parity.adapters import ARRAYS, FRONTENDS, JAX, TORCH, to_torch
from tests.parity.recipe_rows import MIXED, PARTLY_DELAYED, RECIPES
from tests.torch_frontend.torch_tools import opcheck

CASES = [cases.named(name) for name in ("tail", "jagged", "clamped", "k_n_odd", "all_empty", "no_rows", "idle_ends")]


def bind(recipe: Recipe, groups: int, key: tuple[int, int] | None = None) -> Any:
    """The recipe, bound to NumPy arrays if it needs any; scales are those of data with an amax of 6."""
    state = None
    if recipe.delayed:
        state = arrays.scaling_state(recipe, groups)
        state.scale[...] = (state.top / 6)[:, None]
    return recipe.bind(state, None if key is None else np.array(key, np.uint32))


def operands(p: cases.Problem, bias: bool, row_scale: bool) -> dict[str, Any]:
    return {
        "x": p.x,
        "w": p.w,
        "group_sizes": p.group_sizes,
        "bias": p.bias if bias else None,
        "row_scale": p.row_scale if row_scale else None,
    }


@pytest.mark.rule("ALL-1", "ALL-4", "MAT-2")
@pytest.mark.matrix(
    recipe=(*RECIPES, *MIXED),
    case=CASES,
    dtype=("float32", "bfloat16", "float16"),
    transposed=(False, True),
    bias=(False, True),
    row_scale=(False, True),
    scale_bias=(False, True),
    needs=ALL_NEEDS,
    valid=lambda recipe, dtype, bias, row_scale, scale_bias, needs, **_: (
        (not scale_bias or (bias and row_scale))
        and (bias or not needs.bias)
        and (row_scale or not needs.row_scale)
        and (dtype == "bfloat16" or all(fmt.values != "bfloat16" for fmt in recipe.forward))
    ),
)
def test_frontends_have_the_same_bits(recipe, case, dtype, transposed, bias, row_scale, scale_bias, needs):
    p = cases.problem(case, dtype, transposed=transposed)
    given = operands(p, bias, row_scale)
    options = {"transposed": transposed, "scale_bias": scale_bias, "recipe": bind(recipe, case.groups, (7, 11))}
    y = ARRAYS.forward(given, **options)
    wanted = ARRAYS.gradients(given, p.dy, needs, **options)
    for frontend in (JAX, TORCH):
        y_found, found = frontend.passes(given, p.dy, needs, False, **options)
        asserts.bitwise(y_found, y, f"y of {frontend}")
        for name, need, a, b in zip(needs._fields, needs, found, wanted, strict=True):
            assert (a is not None) == need, f"gradient of {name} from {frontend}"
            if need:
                asserts.bitwise(a, b, f"gradient of {name} from {frontend}")


@pytest.mark.rule("ALL-4")
@pytest.mark.parametrize("needs", [each for each in ALL_NEEDS if each.row_scale and not each.bias], ids=str)
@pytest.mark.parametrize("recipe", [*RECIPES, *PARTLY_DELAYED], ids=lambda r: r.name)
def test_gradients_of_row_scales_have_the_same_bits(recipe, needs):
    """They read the same dy as dgrad, whatever other gradients are needed."""
    p = cases.problem(cases.named("tail"), "bfloat16")
    given, bound = operands(p, False, True), bind(recipe, p.case.groups, (7, 11))
    wanted = ARRAYS.gradients(given, p.dy, needs, recipe=bound, transposed=False)
    for frontend in (JAX, TORCH):
        found = frontend.gradients(given, p.dy, needs, recipe=bound, transposed=False)
        for name, need, a, b in zip(needs._fields, needs, found, wanted, strict=True):
            if need:
                asserts.bitwise(a, b, f"gradient of {name} from {frontend}")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("recipe", [*RECIPES, *MIXED], ids=lambda r: r.name)
def test_each_call_is_within_its_bound(recipe, transposed):
    """Quantisers have the oracle's bits, and products its values for the same codes and scales."""
    p = cases.problem(cases.named("jagged"), "bfloat16", transposed=transposed)
    op = Linear(ARRAYS.names, transposed=transposed, recipe=recipe)
    run = Native()
    extras = scaling.extras(bind(recipe, p.case.groups))
    found = gradients.linear_forward(run, op, p.x, p.w, p.group_sizes, extras=extras, needs=Needs())
    specs = (run.spec(p.x), run.spec(p.w), None, None)
    gradients.linear_backward(
        run,
        op,
        specs,
        found.x,
        found.w,
        p.group_sizes,
        None,
        None,
        p.dy,
        Needs(True, True, False, False),
        extras=extras,
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_errors_are_those_of_the_formats(recipe):
    case = cases.Case("wide", (300, 0, 130, 82), 520, 384, 264, frozenset())
    p = cases.problem(case, "float32")
    given = operands(p, False, False)
    needs = Needs(True, True, False, False)
    exact = (ARRAYS.forward(given), *ARRAYS.gradients(given, p.dy, needs)[:2])
    bound = bind(recipe, case.groups)
    found = (ARRAYS.forward(given, recipe=bound), *ARRAYS.gradients(given, p.dy, needs, recipe=bound)[:2])
    for name, a, b, limit in zip(("y", "dx", "dw"), found, exact, bounds.RELATIVE_ERRORS[recipe.name], strict=True):
        assert a is not None
        assert b is not None
        error = np.linalg.norm(a.astype(np.float64) - b.astype(np.float64)) / np.linalg.norm(b)
        assert limit / 4 < error <= limit, f"{name}: relative error {error}, expected at most {limit} and not far less"


@pytest.mark.rule("MLP-10")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
@pytest.mark.parametrize("frontend", FRONTENDS, ids=str)
def test_what_is_kept_changes_no_bits(frontend, recipe):
    p = cases.problem(cases.named("tail"), "bfloat16")
    given, needs = operands(p, False, False), Needs(True, True, False, False)
    kept, again = (
        frontend.gradients(
            given, p.dy, needs, recipe=bind(recipe.replace(saved=saved), p.case.groups), transposed=False
        )
        for saved in ("quantized", "input")
    )
    for a, b in zip(kept, again, strict=True):
        if a is not None:
            asserts.bitwise(a, b)


# ---------------------------------------------------------------------------------------------------------------------
# Delayed scaling


def test_fp8_maxes_are_those_of_the_formats_that_are_scaled_with_delay():
    e4m3, e5m2 = 448.0, 57344.0
    for recipe in (recipes.FP8Delayed, *PARTLY_DELAYED):
        assert scaling.fp8_maxes(recipe) == [e4m3, e4m3, e5m2], recipe.name
    fine = recipes.FP8Delayed.forward[0]
    assert scaling.fp8_maxes(recipes.FP8Delayed.replace(wgrad=(fine, fine), margin=1)) == [e4m3 / 2] * 3
    of_gradients = recipes.FP8Delayed.replace(forward=recipes.FP8Current.forward, wgrad=recipes.FP8Current.wgrad)
    assert scaling.fp8_maxes(of_gradients.replace(dgrad=(of_gradients.dgrad[0], FORMATS["fp8_tensor"]))) == [1, 1, e5m2]


@pytest.mark.rule("GRP-9")
@pytest.mark.parametrize("recipe", [recipes.FP8Delayed, *PARTLY_DELAYED], ids=lambda r: r.name)
def test_states_of_all_frontends_agree_step_by_step(recipe):
    recipe = recipe.replace(history=3)
    p = cases.problem(cases.named("tail"), "bfloat16")
    groups = p.case.groups
    held = arrays.scaling_state(recipe, groups)
    of_torch = torch_bridge.scaling_state(recipe, groups)
    of_jax = jax_grouped.scaling_state(recipe, groups)
    sizes = to_torch(p.group_sizes)

    def jax_product(x: Any, w: Any, state: Any) -> Any:
        return jax_grouped.ragged_dot(x, w, p.group_sizes, recipe=recipe.bind(state))

    for step in range(5):
        x, dy = (array * np.array(2.0**step, array.dtype) for array in (p.x, p.dy))
        arrays.grouped_linear(x, p.w, p.group_sizes, recipe=recipe.bind(held))
        arrays.grouped_linear_grads(x, p.w, p.group_sizes, dy, recipe=recipe.bind(held))
        xt, wt = to_torch(x).requires_grad_(), to_torch(p.w).requires_grad_()
        y = torch_bridge.grouped_linear(xt, wt, sizes, rhs_transposed=False, recipe=recipe.bind(of_torch))
        y.backward(to_torch(dy))
        _, pull = jax.vjp(jax_product, jnp.asarray(x), jnp.asarray(p.w), of_jax)
        of_jax = pull(jnp.asarray(dy))[2]
        for name, state in (("torch", of_torch), ("jax", of_jax)):
            asserts.bitwise(state.history, held.history, f"history of {name} in step {step}")
        held, of_torch, of_jax = (
            arrays.update_scaling(held),
            torch_bridge.update_scaling(of_torch),
            jax_grouped.update_scaling(of_jax),
        )
        for name, state in (("torch", of_torch), ("jax", of_jax)):
            asserts.bitwise(state.scale, held.scale, f"scale of {name} after step {step}")
    empty = p.group_sizes[: p.case.groups] <= 0
    assert (held.scale[:, ~empty] > 0).all(), "every role was measured"
    assert (held.scale[0][empty] == 0).all(), "a group without rows has not started"


@pytest.mark.rule("GRP-9")
@pytest.mark.parametrize("frozen", [False, True], ids=["", "x_frozen"])
@pytest.mark.parametrize("frontend", ["arrays", "torch", "jax"])
def test_the_state_gets_the_amax_of_scaled_gradients(frontend: str, frozen: bool):
    """With a row scale c the gradient of x reads dy, that of the weight c dy: the amax covers what is read."""
    recipe = recipes.FP8Delayed.replace(history=2)
    sizes = np.array([3, 2], np.int32)
    x, w, dy = (
        cases.normal(shape, "float32", name) for shape, name in (((6, 8), "x"), ((2, 8, 8), "w"), ((6, 8), "dy"))
    )
    c = np.array([4.0, 4.0, 4.0, 0.25, 0.25, 1e4], np.float32)  # the last row is of no group
    own, scaled = (np.array([np.abs(rows[:3]).max(), np.abs(rows[3:5]).max()]) for rows in (dy, dy * c[:, None]))
    assert (own < scaled).tolist() == [True, False]
    if frontend == "arrays":
        held = arrays.scaling_state(recipe, 2)
        needs = Needs(not frozen, True, False, False)
        options = {"row_scale": c, "needs": needs, "recipe": recipe.bind(held)}
        arrays.grouped_linear_grads(x, w, sizes, dy, **options)
    elif frontend == "torch":
        held = torch_bridge.scaling_state(recipe, 2)
        xt, wt = to_torch(x).requires_grad_(not frozen), to_torch(w).requires_grad_()
        options = {"rhs_transposed": False, "row_scale": to_torch(c), "recipe": recipe.bind(held)}
        torch_bridge.grouped_linear(xt, wt, to_torch(sizes), **options).backward(to_torch(dy))
    else:

        def product(state: Any, w: Any, x: Any = x) -> Any:
            return jax_grouped.ragged_dot(x, w, sizes, row_scale=c, recipe=recipe.bind(state))

        operands = map(jnp.asarray, (w,) if frozen else (w, x))
        held = jax.vjp(product, jax_grouped.scaling_state(recipe, 2), *operands)[1](jnp.asarray(dy))[0]
    asserts.bitwise(held.history[2, 0], scaled if frozen else np.maximum(own, scaled))


def test_subnormal_magnitudes_reach_the_states_of_all_frontends():
    recipe = recipes.FP8Delayed.replace(history=2)
    tiny = np.float32(1e-40)  # of which XLA's own arithmetic on a CPU makes a zero
    x, w, dy = (np.full(shape, tiny) for shape in ((4, 8), (1, 8, 8), (4, 8)))
    sizes = np.array([4], np.int32)
    held, of_torch = arrays.scaling_state(recipe, 1), torch_bridge.scaling_state(recipe, 1)
    arrays.grouped_linear(x, w, sizes, recipe=recipe.bind(held))
    arrays.grouped_linear_grads(x, w, sizes, dy, recipe=recipe.bind(held))
    xt, wt = to_torch(x).requires_grad_(), to_torch(w).requires_grad_()
    torch_bridge.grouped_linear(xt, wt, to_torch(sizes), rhs_transposed=False, recipe=recipe.bind(of_torch)).backward(
        to_torch(dy)
    )

    def product(x: Any, w: Any, state: Any) -> Any:
        return jax_grouped.ragged_dot(x, w, sizes, recipe=recipe.bind(state))

    of_jax = jax.vjp(product, x, w, jax_grouped.scaling_state(recipe, 1))[1](jnp.asarray(dy))[2]
    for state in (held, of_torch, of_jax):
        asserts.bitwise(state.history[:, 0], np.full((3, 1), tiny))
    asserts.bitwise(jax_grouped.update_scaling(of_jax).scale, np.full((3, 1), np.finfo(np.float32).max))


@pytest.mark.rule("ACC-8")
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("products", [1, 2], ids=["linear", "mlp"])
def test_one_state_of_all_shards_gets_their_largest_magnitudes(products: int, inside: bool):
    recipe = recipes.FP8Delayed.replace(history=2)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    x, w, dy = (
        cases.normal(shape, "float32", name) for shape, name in (((64, 8), "x"), ((2, 8, 8), "w"), ((64, 8), "dy"))
    )
    sizes = np.array([16, 0, 3, 5, 0, 0, 1, 30], np.int32)
    wo = np.ascontiguousarray(w[:, :4])
    held = jax_grouped.scaling_state(recipe, 2, products=products)

    def product(x: Any, w: Any, sizes: Any, state: Any) -> Any:
        if products == 1:
            return jax_grouped.ragged_dot(x, w, sizes, recipe=recipe.bind(state))
        return jax_grouped.grouped_mlp(x, w, jnp.asarray(wo), sizes, recipe=recipe.bind(state))

    def after(product: Any, *operands: Any) -> Any:
        x, w, sizes, dy, state = operands
        return jax.vjp(lambda x, w, state: product(x, w, sizes, state), x, w, state)[1](dy)[2]

    specs = (split, whole, split, split, whole)
    if inside:
        program = jax.shard_map(partial(after, product), mesh=mesh, in_specs=specs, out_specs=whole)
    else:
        program = partial(after, jax.shard_map(product, mesh=mesh, in_specs=(*specs[:3], whole), out_specs=split))
    got = jax.jit(program)(x, w, sizes, dy, held)
    each = [
        after(product, *map(jnp.asarray, (x[at : at + 16], w, sizes[at // 8 :][:2], dy[at : at + 16])), held)
        for at in range(0, 64, 16)
    ]
    asserts.bitwise(got.history, np.max([state.history for state in each], axis=0))
    asserts.bitwise(got.scale, held.scale)
    assert (np.asarray(got.history[:, 0]) > 0).all()


def test_the_state_survives_jit_scan_and_checkpoint():
    recipe = recipes.FP8Delayed.replace(history=2)
    p = cases.problem(cases.named("tail"), "bfloat16")
    state = jax_grouped.scaling_state(recipe, p.case.groups)

    def loss(w: Any, state: Any) -> Any:
        product = jax.checkpoint(lambda w, s: jax_grouped.ragged_dot(p.x, w, p.group_sizes, recipe=recipe.bind(s)))
        return product(w, state).astype(jnp.float32).sum()

    def step(carry: Any, _: Any) -> Any:
        w, state = carry
        dw, state = jax.grad(loss, argnums=(0, 1))(w, state)
        return (w - dw * np.array(0.01, dw.dtype), jax_grouped.update_scaling(state)), None

    carry = (jnp.asarray(p.w), state)
    scanned, _ = jax.jit(lambda carry: jax.lax.scan(step, carry, length=3))(carry)
    for _ in range(3):
        carry, _ = step(carry, None)
    asserts.bitwise(scanned[1].scale, carry[1].scale)
    asserts.bitwise(scanned[0], carry[0])


def test_a_recipe_with_a_state_wants_one_of_its_shape():
    p = cases.problem(cases.named("tail"), "bfloat16")
    for frontend in FRONTENDS:
        given = {"x": p.x, "w": p.w, "group_sizes": p.group_sizes, "bias": None, "row_scale": None}
        with asserts.refused(ValueError, ["without a state"]):
            frontend.forward(given, recipe=recipes.FP8Delayed, transposed=False)
        with asserts.refused(ValueError, ["= (R, G) and (R, L, G)"]):
            frontend.forward(given, recipe=bind(recipes.FP8Delayed, p.case.groups + 1), transposed=False)
        halved = bind(recipes.FP8Delayed, p.case.groups)
        halved = halved.recipe.bind(replace(halved.state, scale=halved.state.scale.astype(np.float16)))
        with asserts.refused(ValueError, ["`state`", "float16", "expected float32", "scaling_state("]):
            frontend.forward(given, recipe=halved, transposed=False)
    with asserts.refused(TypeError, ["`state`", "int", "expected a ScalingState", "scaling_state("]):
        jax_grouped.ragged_dot(p.x, p.w, p.group_sizes, recipe=recipes.FP8Delayed.bind(1))
    with asserts.refused(TypeError, ["`state`", "NoneType", "expected a ScalingState", "scaling_state"]):
        arrays.update_scaling(None)
    with asserts.refused(ValueError, ["it has no delayed scaling"]):
        recipes.MXFP8.bind(arrays.scaling_state(recipes.FP8Delayed, 2))


@pytest.mark.rule("ACC-11", "ERR-1")
@pytest.mark.parametrize("key", [np.zeros(3, np.uint32), np.zeros(2, np.int32)], ids=["three", "int32"])
def test_a_key_is_checked_before_anything_runs(key: np.ndarray):
    p = cases.problem(cases.named("tail"), "bfloat16")
    given = {"x": p.x, "w": p.w, "group_sizes": p.group_sizes, "bias": None, "row_scale": None}
    for frontend in FRONTENDS:
        with asserts.refused(ValueError, ["`key`", f"{key.dtype}[{key.size}]", "expected uint32[2]", "pass such"]):
            frontend.forward(given, recipe=recipes.NVFP4.bind(key=key), transposed=False)
    with asserts.refused(TypeError, ["`key`", "list", "expected an array uint32[2]", "pass one"]):
        jax_grouped.ragged_dot(p.x, p.w, p.group_sizes, recipe=recipes.NVFP4.bind(key=[0, 0]))


# ---------------------------------------------------------------------------------------------------------------------
# Quantised operands


@pytest.mark.rule("ALL-4")
def test_explain_plans_no_gradient_that_goes_nowhere():
    p = cases.problem(cases.named("tail"), "bfloat16")
    x, q = jnp.asarray(p.x), jax_grouped.quantize(p.w, "mxfp8", axis=(1, 2))
    rows = jax_grouped.quantize(x, "mxfp8", group_sizes=p.group_sizes)

    def products(op: Any, *operands: Any, **options: Any) -> int:
        if op is jax_grouped.grouped_mlp:
            options["activation"] = "relu"  # which has no linear half
        told = jax_grouped.explain(op, *operands, p.group_sizes, **options)
        return sum(line.startswith("grouped_matmul") and " -> " in line for line in told.splitlines())

    op = jax_grouped.ragged_dot
    assert products(op, x, jnp.asarray(p.w)) == 3
    assert products(op, x, jax_grouped.straight_through(p.w, q)) == 3
    assert products(op, x, q) == 2, "no weight gradient"
    assert products(op, rows, q, recipe=recipes.MXFP8) == 1, "neither gradient"
    op, wo = jax_grouped.grouped_mlp, np.ascontiguousarray(p.w.swapaxes(1, 2))
    second = jax_grouped.quantize(wo, "mxfp8", axis=(1, 2))
    assert products(op, x, jnp.asarray(p.w), jnp.asarray(wo)) == 6
    assert products(op, x, jax_grouped.straight_through(p.w, q), jax_grouped.straight_through(wo, second)) == 6
    assert products(op, x, q, jnp.asarray(wo)) == 5, "none of the first weight"
    assert products(op, x, q, second) == 4, "of no weight"
    assert products(op, rows, q, second, recipe=recipes.MXFP8) == 2, "none at all"


def test_only_what_is_quantised_is_dequantised():
    x = np.zeros((2, 4), np.float32)
    for frontend, q in ((arrays, x), (jax_grouped, jnp.asarray(x)), (torch_bridge, to_torch(x))):
        with asserts.refused(TypeError, ["`q`", "expected a QTensor", "make one with quantize"]):
            frontend.dequantize(q)


QUANTISED_FRONTENDS = (
    (jax_grouped, jnp.asarray, jax_grouped.ragged_dot),
    (torch_bridge, to_torch, partial(torch_bridge.grouped_linear, rhs_transposed=False)),
)


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize(("frontend", "array", "product"), QUANTISED_FRONTENDS, ids=["jax", "torch"])
def test_a_quantised_operand_holds_what_its_format_makes(frontend: Any, array: Any, product: Any):
    p = cases.problem(cases.named("tail"), "bfloat16")
    x, w, sizes = map(array, (p.x, p.w, p.group_sizes))
    groups = p.case.groups
    quantized = frontend.quantize(w, "fp8_tensor", axis=1)
    both = frontend.quantize(x, "mxfp8", axis=(1, 0), group_sizes=sizes)
    short = frontend.quantize(x[1:], "mxfp8", axis=0, group_sizes=sizes)
    given = (
        (
            (frontend.quantize(x, "fp8_tensor"), w),
            ["scales of groups float32[1]", f"expected float32[{groups}]", "sizes of"],
        ),
        (
            (frontend.quantize(x, "mxfp8", axis=(1, 0)), w),
            ["codes float8_e4m3fn", "along axis 0", "sizes of this call"],
        ),
        ((replace(both, other=short), w), [f"shape {short.shape}", f"expected {both.shape}", "along both axes"]),
        ((x, replace(quantized, scales=None)), ["scales of groups None", f"expected float32[{groups}]", "again"]),
        (
            (x, replace(quantized, values=quantized.values[:-1])),
            ["codes float8_e4m3fn", "expected float8_e4m3fn", "again"],
        ),
    )
    for operands, words in given:
        with asserts.refused(ValueError, words):
            product(*operands, sizes)


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize(("frontend", "array", "product"), QUANTISED_FRONTENDS, ids=["jax", "torch"])
def test_rows_are_dequantised_with_as_many_groups(frontend: Any, array: Any, product: Any):
    x, sizes, others = array(np.ones((6, 64), np.float32)), array(np.array([3, 3])), array(np.array([1, 2, 3]))
    wanted = {
        ("fp8_tensor", 1): ["scales of groups float32[2]", "expected float32[3]"],
        ("nvfp4", 1): ["scales of groups float32[2]", "expected float32[3]"],
        ("mxfp8", 0): ["codes float8_e4m3fn[64, 64]", "expected float8_e4m3fn[96, 64]"],
    }
    for (format, axis), words in wanted.items():
        q = frontend.quantize(x, format, axis=axis, group_sizes=sizes)
        with asserts.refused(ValueError, ["`q`", *words, "in 3 groups", "pass the sizes that it was quantised with"]):
            frontend.dequantize(q, group_sizes=others)
    rowwise = frontend.quantize(x, "mxfp8", group_sizes=sizes)
    asserts.bitwise(frontend.dequantize(rowwise, group_sizes=others), frontend.dequantize(rowwise))
    weights = array(np.ones((2, 8, 32), np.float32))
    for call in (
        lambda: frontend.quantize(weights, "mxfp8", group_sizes=sizes),
        lambda: frontend.dequantize(frontend.quantize(weights, "mxfp8"), group_sizes=sizes),
    ):
        with asserts.refused(ValueError, ["`group_sizes`: (2,) beside weights (2, 8, 32)", "expected None", "leave"]):
            call()
    many = array(np.zeros(65536, np.int32))
    for call in (
        lambda: frontend.quantize(x, "mxfp8", group_sizes=many),
        lambda: frontend.dequantize(rowwise, group_sizes=many),
        lambda: frontend.quantize(array(np.zeros((65536, 1, 1), np.float32)), "mxfp8"),
    ):
        with asserts.refused(ValueError, ["shape (65536", "at most 65535 groups", "split the groups"]):
            call()


@pytest.mark.rule("MAT-6")
@pytest.mark.parametrize("format", ["mxfp8", "fp8_tensor", "fp8_128x128", "mxfp4", "nvfp4_2d"])
@pytest.mark.parametrize("plain", ["float8_e4m3fn", "float8_e5m2"])
def test_plain_operands_of_8_bits_go_beside_quantised_ones(format: str, plain: str):
    """As rows and as weights: nothing quantises them, so they need not be wide."""
    p = cases.problem(cases.named("tail"), "float32")
    narrow = cases.numpy_dtype(plain)
    of_rows = {"mxfp4": "fp8_1x128", "nvfp4_2d": "nvfp4", "fp8_128x128": "fp8_1x128"}.get(format, format)
    found = []
    for frontend, array, product in ((arrays, np.asarray, arrays.grouped_linear), *QUANTISED_FRONTENDS):
        x, w, sizes = array(p.x), array(p.w), array(p.group_sizes)
        q = frontend.quantize(w, format, axis=1), frontend.quantize(x, of_rows, axis=1, group_sizes=sizes)
        x8, w8 = array(p.x.astype(narrow)), array(p.w.astype(narrow))
        found.append((product(x8, q[0], sizes), product(q[1], w8, sizes)))
    values = arrays.dequantize(arrays.quantize(p.w, format, axis=1), "float32")
    wide = arrays.grouped_linear(p.x.astype(narrow).astype(np.float32), values, p.group_sizes)
    for name, each in zip(("jax", "torch"), found[1:], strict=True):
        for ours, wanted in zip(each, found[0], strict=True):
            asserts.bitwise(ours, wanted, name)
    first = asserts.as_numpy(found[0][0]).astype(np.float64)
    assert np.abs(first - wide).max() <= 2.0**-7 * np.abs(wide).max(), "one rounding to bf16"


@pytest.mark.rule("MAT-7", "ERR-1")
@pytest.mark.parametrize(("frontend", "array", "product"), QUANTISED_FRONTENDS, ids=["jax", "torch"])
def test_only_rows_may_be_none_where_something_is_quantised(frontend: Any, array: Any, product: Any):
    none = array(np.zeros((0,), np.int32))
    for shape in ((4, 0), (0, 4, 4), (2, 0, 4), (2, 4, 0)):
        with asserts.refused(ValueError, ["`x`", f"shape {shape}", "every axis at least 1", "may be 0"]):
            frontend.quantize(array(np.zeros(shape, np.float32)), "mxfp8")
    with asserts.refused(ValueError, ["`group_sizes`", "shape (0,)", "at least one group", "pass one size"]):
        frontend.quantize(array(np.zeros((4, 4), np.float32)), "mxfp8", group_sizes=none)
    assert frontend.quantize(array(np.zeros((0, 4), np.float32)), "mxfp8").shape == (0, 4)


@pytest.mark.rule("MLP-13")
@pytest.mark.parametrize(("frontend", "array", "product"), QUANTISED_FRONTENDS, ids=["jax", "torch"])
def test_rows_are_rotated_along_rows_alone(frontend: Any, array: Any, product: Any):
    p = cases.problem(cases.named("tail"), "float32")
    x, sizes = array(p.x), array(p.group_sizes)
    rotated, plain = recipes.NVFP4.wgrad[0], recipes.NVFP4.forward[0]
    q = frontend.quantize(x, rotated, axis=(0, 1), group_sizes=sizes)
    assert (q.format.rotate, q.other.format.rotate) == (True, False)
    straight = frontend.quantize(x, plain, axis=1, group_sizes=sizes)
    for part, wanted in zip(bits(replace(q.other, other=None)), bits(straight), strict=True):
        asserts.bitwise(part, wanted)
    asserts.bitwise(frontend.dequantize(q), frontend.dequantize(straight))
    alone, values = (asserts.as_numpy(frontend.dequantize(each)) for each in (replace(q, other=None), straight))
    assert (alone != values).any(), "codes times scales are the rotated rows"


def _weight_gradient(frontend: Any, x: Any, p: cases.Problem, recipe: Recipe) -> Any:
    """dW of rows that may be quantised, and of transposed weights."""
    if frontend is arrays:
        options: dict[str, Any] = {"transposed": True, "recipe": recipe, "needs": Needs(False, True, False, False)}
        return arrays.grouped_linear_grads(x, p.w, p.group_sizes, p.dy, **options).w
    if frontend is torch_bridge:
        w = to_torch(p.w).requires_grad_()
        torch_bridge.grouped_linear(x, w, to_torch(p.group_sizes), recipe=recipe).backward(to_torch(p.dy))
        return w.grad

    def product(w: Any) -> Any:
        return jax_grouped.ragged_dot(x, w, p.group_sizes, rhs_transposed=True, recipe=recipe)

    return jax.vjp(product, jnp.asarray(p.w))[1](jnp.asarray(p.dy))[0]


@pytest.mark.rule("MLP-13")
@pytest.mark.parametrize(
    ("frontend", "array"),
    [(arrays, np.asarray), *(pair[:2] for pair in QUANTISED_FRONTENDS)],
    ids=["arrays", "jax", "torch"],
)
def test_weight_gradients_that_are_rotated_take_rows_that_are(frontend: Any, array: Any):
    """A rotation cancels only between rows and gradients: rows that are not rotated are refused, or quantised again."""
    p = cases.problem(cases.named("tail"), "bfloat16", transposed=True)
    sizes, again = array(p.group_sizes), recipes.NVFP4.replace(requantize="from_dequantized")
    straight = frontend.quantize(array(p.x), recipes.NVFP4.forward[0], axis=(1, 0), group_sizes=sizes)
    words = ["nvfp4 along axis 1 and nvfp4 along axis 0", "expected rotated nvfp4 along axis 0", "`recipe.wgrad[0]`"]
    with asserts.refused(ValueError, words):
        _weight_gradient(frontend, straight, p, recipes.NVFP4)
    rotated = frontend.quantize(array(p.x), recipes.NVFP4.wgrad[0], axis=(1, 0), group_sizes=sizes)
    _weight_gradient(frontend, rotated, p, recipes.NVFP4)
    found = _weight_gradient(frontend, straight, p, again)
    asserts.bitwise(found, _weight_gradient(frontend, frontend.dequantize(straight), p, again))


@pytest.mark.rule("MLP-13", "ERR-1")
@pytest.mark.parametrize("frontend", ["linear", "mlp", "torch", "jax"])
def test_nothing_is_made_of_rotated_values(frontend: str):
    """Although the recipe allows quantising rows again: rotated rows would need the inverse rotation."""
    recipe = recipes.NVFP4.replace(requantize="from_dequantized")
    given = (cases.normal(shape, "bfloat16", shape) for shape in ((6, 32), (2, 32, 32), (6, 32)))
    of = {"jax": jax_grouped, "torch": torch_bridge}.get(frontend, arrays)
    array = {"jax": jnp.asarray, "torch": to_torch}.get(frontend, np.asarray)
    (x, w, dy), sizes = map(array, given), array(np.array([4, 2], np.int32))
    both = of.quantize(dy, recipe.wgrad[1], axis=(0, 1), group_sizes=sizes)
    options = {} if frontend == "torch" else {"rhs_transposed": True}

    def dx(dy: Any) -> Any:
        if frontend == "linear":
            needs = Needs(True, False, False, False)
            return arrays.grouped_linear_grads(x, w, sizes, dy, transposed=True, recipe=recipe, needs=needs).x
        if frontend == "mlp":
            return arrays.grouped_mlp_grads(x, w, w, sizes, dy=dy, transposed=True, recipe=recipe, activation="relu").x
        parts = torch_bridge if frontend == "torch" else accumulate
        _, kept = parts.grouped_mlp_fwd(x, w, w, sizes, recipe=recipe, activation="relu", **options)
        return parts.grouped_mlp_bwd_dx(kept, dy)[0]

    assert dx(both).shape == x.shape, "the values themselves are there, too"
    with asserts.refused(
        ValueError, ["only a rotated nvfp4 form", "expected one that is not rotated", "along features"]
    ):
        dx(replace(both, other=None))


def bits(q: QTensor[Any]) -> list[np.ndarray]:
    """Codes and scales of both forms, as bytes."""
    forms = [q] if q.other is None else [q, q.other]
    parts = [part for form in forms for part in (form.values, form.scales, form.group_scales) if part is not None]
    return [_bytes(part) for part in parts]


def _bytes(part: Any) -> np.ndarray:
    if isinstance(part, torch.Tensor):
        return part.contiguous().view(torch.uint8).numpy()
    return np.ascontiguousarray(np.asarray(part)).view(np.uint8)


QUANTISED = [name for name, row in FORMATS.items() if not row.plain]
OF_ROWS = [name for name in QUANTISED if not FORMATS[name].square and name != "mxfp4"]


@pytest.mark.matrix(format=QUANTISED, dtype=("float32", "bfloat16", "float16"), axis=(-1, 1, (2, 1)))
def test_frontends_quantise_weights_identically(format, dtype, axis):
    w = cases.problem(cases.named("k_n_odd"), dtype).w
    made = arrays.quantize(w, format, axis=axis)
    for found in (jax_grouped.quantize(w, format, axis=axis), torch_bridge.quantize(to_torch(w), format, axis=axis)):
        assert (found.format, found.axis, found.shape, found.dtype) == (made.format, made.axis, made.shape, made.dtype)
        for a, b in zip(bits(found), bits(made), strict=True):
            asserts.bitwise(a, b)
    values = arrays.dequantize(made)
    asserts.bitwise(jax_grouped.dequantize(jax_grouped.quantize(w, format, axis=axis)), values)
    asserts.bitwise(torch_bridge.dequantize(torch_bridge.quantize(to_torch(w), format, axis=axis)), values)
    asserts.bitwise(arrays.dequantize(made, "float32").astype(values.dtype), values)


@pytest.mark.matrix(format=OF_ROWS, dtype=("float32", "bfloat16"), axis=(1, 0, (1, 0)), sized=(False, True))
def test_frontends_quantise_rows_identically(format, dtype, axis, sized):
    p = cases.problem(cases.named("tail"), dtype)
    x, sizes = (p.x, p.group_sizes) if sized else (np.nan_to_num(p.x), None)
    made = arrays.quantize(x, format, axis=axis, group_sizes=sizes)
    of_torch = torch_bridge.quantize(
        to_torch(x), format, axis=axis, group_sizes=None if sizes is None else to_torch(sizes)
    )
    for found in (jax_grouped.quantize(x, format, axis=axis, group_sizes=sizes), of_torch):
        for a, b in zip(bits(found), bits(made), strict=True):
            asserts.bitwise(a, b)
    asserts.bitwise(torch_bridge.dequantize(of_torch), arrays.dequantize(made))


def as_quantized(frontend: Any, p: cases.Problem, recipe: Recipe, array: Any = np.asarray) -> tuple[Any, Any]:
    """x and w, quantised as the recipe does it, in both forms."""
    (x_r, w_k), (x_t, _) = recipe.forward, recipe.wgrad
    w = frontend.quantize(array(p.w), w_k, axis=(2, 1))
    x = frontend.quantize(array(p.x), x_t if x_t.rotate else x_r, axis=(1, 0), group_sizes=array(p.group_sizes))
    return QTensor(x.values, x.scales, x.group_scales, x_r, 1, x.shape, x.dtype, x.other, x.group_sizes), w


@pytest.mark.rule("MLP-13")
@pytest.mark.parametrize("row_scale", [False, True])
@pytest.mark.parametrize("requantize", [None, "from_dequantized"])
@pytest.mark.parametrize("saved", ["quantized", "input"])
@pytest.mark.parametrize("recipe", RECIPES[1:], ids=lambda r: r.name)
def test_both_forms_of_quantised_rows_reach_backward(recipe, saved, requantize, row_scale):
    """The bits do not depend on what is saved: no form is made from another."""
    recipe = recipe.replace(saved=saved, requantize=requantize)
    p = cases.problem(cases.named("tail"), "bfloat16", transposed=True)
    needs = Needs(False, True, False, row_scale)
    scale = {"row_scale": p.row_scale} if row_scale else {}
    options: dict[str, Any] = {"transposed": True, "recipe": recipe, "needs": needs}
    wanted = arrays.grouped_linear_grads(*as_quantized(arrays, p, recipe), p.group_sizes, p.dy, **scale, **options)
    plain = arrays.grouped_linear_grads(p.x, p.w, p.group_sizes, p.dy, **scale, **options)
    asserts.bitwise(wanted.w, plain.w)
    x, w = as_quantized(torch_bridge, p, recipe, to_torch)
    leaves = [to_torch(p.w).requires_grad_()]
    leaves += [to_torch(p.row_scale).requires_grad_()] if row_scale else []
    y = torch_bridge.grouped_linear(
        x,
        torch_bridge.straight_through(leaves[0], w),
        to_torch(p.group_sizes),
        row_scale=leaves[1] if row_scale else None,
        recipe=recipe,
    )
    for a, b in zip(torch.autograd.grad(y, leaves, to_torch(p.dy)), (wanted.w, wanted.row_scale), strict=False):
        asserts.bitwise(a, b)


@pytest.mark.rule("MLP-13")
def test_fp16_rows_that_are_quantised_go_with_mxfp4_that_comes_quantised():
    """Their codes have the range for its scales; rows that a product reads in fp16 are refused."""
    rows, weight = FORMATS["mxfp8"], FORMATS["mxfp4"]
    recipe = Recipe((rows, weight), (rows, weight), (rows, rows), "four-bit weights")
    p = cases.problem(cases.named("tail"), "float16")
    w = arrays.quantize(p.w, weight, axis=(1, 2))
    asserts.bitwise(
        arrays.grouped_linear(p.x, w, p.group_sizes, recipe=recipe),
        arrays.grouped_linear(p.x, p.w, p.group_sizes, recipe=recipe),
    )
    for other in (None, recipe.replace(dgrad=recipes.FP16.dgrad)):
        with asserts.refused(TypeError, ("float16 beside mxfp4", "expected bfloat16 or float32", "cast it")):
            arrays.grouped_linear(p.x, w, p.group_sizes, recipe=other)


@pytest.mark.rule("MLP-13")
@pytest.mark.parametrize("recipe", RECIPES[1:], ids=lambda r: r.name)
def test_operands_that_come_quantised_give_the_same_bits(recipe):
    """x and w are quantised as the recipe does it, in both forms; then only dy is quantised."""
    p = cases.problem(cases.named("tail"), "bfloat16", transposed=True)
    sizes = p.group_sizes
    x, w = as_quantized(arrays, p, recipe)
    needs = Needs(True, True, False, False)
    y = arrays.grouped_linear(p.x, p.w, sizes, transposed=True, recipe=recipe)
    asserts.bitwise(arrays.grouped_linear(x, w, sizes, transposed=True, recipe=recipe), y)
    plain = arrays.grouped_linear_grads(p.x, p.w, sizes, p.dy, transposed=True, recipe=recipe, needs=needs)
    quantized = arrays.grouped_linear_grads(x, w, sizes, p.dy, transposed=True, recipe=recipe, needs=needs)
    for a, b in zip(quantized[:2], plain[:2], strict=True):
        asserts.bitwise(a, b)


def test_rows_that_were_rounded_randomly_are_an_operand():
    p = cases.problem(cases.named("tail"), "bfloat16")
    fmt, key = FORMATS["nvfp4"], np.array([3, 5], np.uint32)
    q = arrays.quantize(p.x, fmt.replace(stochastic=True), group_sizes=p.group_sizes, key=key)
    y = arrays.grouped_linear(q, p.w, p.group_sizes)
    asserts.bitwise(y, arrays.grouped_linear(replace(q, format=fmt), p.w, p.group_sizes))


@pytest.mark.rule("QNT-8")
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "mxfp8", "fp8_128x128", "fp8_tensor"])
def test_quantised_weights_beside_plain_rows(format):
    """Weight-only: the product of the dequantised weight; the gradient goes to the master, in its dtype."""
    p = cases.problem(cases.named("tail"), "bfloat16", transposed=True)
    master = p.w.astype(np.float32)
    q = arrays.quantize(master, format, axis=(2, 1))
    y = arrays.grouped_linear(p.x, q, p.group_sizes, transposed=True, result_dtype="float32")
    wide = arrays.dequantize(q, "float32").astype(p.x.dtype)
    if format in ("mxfp4", "nvfp4", "mxfp8"):  # whose values are bfloat16 numbers, but for the group's scale
        exact = arrays.grouped_linear(
            p.x.astype(np.float32), arrays.dequantize(q, "float32"), p.group_sizes, transposed=True
        )
        np.testing.assert_allclose(y, exact, rtol=0, atol=np.abs(exact).max() * 2.0**-16)
    assert wide.shape == p.w.shape

    def jax_loss(master: Any, x: Any) -> Any:
        w = jax_grouped.straight_through(master, jax_grouped.quantize(master, format, axis=(2, 1)))
        y = jax_grouped.ragged_dot(x, w, p.group_sizes, rhs_transposed=True)
        return jnp.vdot(y.astype(jnp.float32), p.dy.astype(jnp.float32))

    dm, dx = jax.grad(jax_loss, (0, 1))(jnp.asarray(master), jnp.asarray(p.x))
    leaf, x = to_torch(master).requires_grad_(), to_torch(p.x).requires_grad_()
    w = torch_bridge.straight_through(leaf, torch_bridge.quantize(leaf.detach(), format, axis=(2, 1)))
    torch_bridge.grouped_linear(x, w, to_torch(p.group_sizes)).backward(to_torch(p.dy))
    asserts.bitwise(leaf.grad, dm)
    asserts.bitwise(x.grad, dx)
    plain = arrays.grouped_linear_grads(
        p.x, p.w, p.group_sizes, p.dy, transposed=True, wgrad_dtype="float32", needs=Needs(False, True, False, False)
    )
    asserts.bitwise(dm, plain.w, "the master's gradient is that of a plain weight")


@pytest.mark.rule("ERR-5")
def test_what_a_quantised_operand_lacks_is_said():
    p = cases.problem(cases.named("tail"), "bfloat16", transposed=True)
    sizes, kind = p.group_sizes, {"transposed": True}
    with asserts.refused(ValueError, ["along axis 1, expected along axis 2"]):
        arrays.grouped_linear(p.x, arrays.quantize(p.w, "mxfp8", axis=1), sizes, **kind)
    q = arrays.quantize(p.w, "mxfp8", axis=2)
    dx = Needs(True, False, False, False)  # needs no other form: codes are contracted along either axis
    found = arrays.grouped_linear_grads(p.x, q, sizes, p.dy, needs=dx, **kind)
    wanted = arrays.grouped_linear_grads(p.x, arrays.dequantize(q), sizes, p.dy, needs=dx, **kind)
    asserts.bitwise(found.x, wanted.x)
    rows = arrays.quantize(p.x, "mxfp8", axis=(1, 0), group_sizes=sizes)
    with asserts.refused(ValueError, ["expected bf16 along axis 0", "pass a recipe that reads its format"]):
        arrays.grouped_linear_grads(rows, p.w, sizes, p.dy, needs=Needs(False, True, False, False), **kind)
    with asserts.refused(ValueError, ["quantised as mxfp8, expected fp8_128x128"]):
        arrays.grouped_linear(p.x, q, sizes, recipe=recipes.FP8Block, **kind)
    with asserts.refused(TypeError, ["float16 beside mxfp4"]):
        arrays.grouped_linear(p.x.astype(np.float16), arrays.quantize(p.w, "mxfp4"), sizes, **kind)
    with asserts.refused(ValueError, ["expected one that is not only for weights"]):
        arrays.quantize(p.x, "mxfp4")
    with asserts.refused(ValueError, ["expected one that finds its scales"]):
        arrays.quantize(p.x, "bf16")
    for frontend, x in ((arrays, p.x), (jax_grouped, jnp.asarray(p.x)), (torch_bridge, to_torch(p.x))):
        with asserts.refused(ValueError, ["`axis`: (2,)", "expected 1, 0 or both", "pass one of them"]):
            frontend.quantize(x, "mxfp8", axis=2, group_sizes=to_torch(sizes) if frontend is torch_bridge else sizes)
        with asserts.refused(TypeError, ["`axis`: 1.0", "expected an integer", "pass the axes"]):
            frontend.quantize(x, "mxfp8", axis=1.0, group_sizes=to_torch(sizes) if frontend is torch_bridge else sizes)
        with asserts.refused(ValueError, ["`num_groups`: 0", "expected at least 1", "pass the number of groups"]):
            frontend.scaling_state(recipes.FP8Delayed, 0)
    again = recipes.MXFP8.replace(requantize="from_dequantized")
    found = arrays.grouped_linear_grads(p.x, q, sizes, p.dy, recipe=again, **kind)
    wanted = arrays.grouped_linear_grads(p.x, arrays.dequantize(q), sizes, p.dy, recipe=again, **kind)
    asserts.bitwise(found.x, wanted.x)


# ---------------------------------------------------------------------------------------------------------------------
# Graphs of torch


@pytest.mark.parametrize("recipe", RECIPES[1:], ids=lambda r: r.name)
def test_compiled_whole_and_bitwise_like_eager(recipe):
    p = cases.problem(cases.named("tail"), "bfloat16", transposed=True)
    sizes, dy = to_torch(p.group_sizes), to_torch(p.dy)

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch_bridge.grouped_linear(x, w, sizes, recipe=recipe)

    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        x, w = to_torch(p.x).requires_grad_(), to_torch(p.w).requires_grad_()
        y = function(x, w)
        y.backward(dy)
        results.append((y, x.grad, w.grad))
    for a, b in zip(*results, strict=True):
        asserts.bitwise(a, b)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("recipe", [recipes.FP8Block, recipes.FP8Delayed], ids=lambda r: r.name)
def test_operators_of_quantised_operands_are_sound(recipe):
    p = cases.problem(cases.named("tail"), "bfloat16", transposed=True)
    x, w, sizes, dy = map(to_torch, (p.x, p.w, p.group_sizes, p.dy))

    def step() -> None:
        bound = recipe.bind(torch_bridge.scaling_state(recipe, len(sizes))) if recipe.delayed else recipe
        rows = x.clone().requires_grad_()
        for accumulator in (None, torch.zeros_like(w)):  # the gradient of the weight along with others, and by itself
            weight, options = w.clone().requires_grad_(), {"recipe": bound, "wgrad_accum": accumulator}
            torch_bridge.grouped_linear(rows, weight, sizes, **options).backward(dy)
        q = torch_bridge.quantize(x, "mxfp8", axis=(1, 0), group_sizes=sizes)
        torch_bridge.dequantize(q)
        if recipe.delayed:
            torch_bridge.update_scaling(bound.state)

    names = opcheck(step, multiplies=False)
    assert {"weight_grad_into0", "quantize", "dequantize"} <= names
    assert any(name.startswith("update_scaling") for name in names) == recipe.delayed


@pytest.mark.rule("ALL-5")
def test_quantised_rows_keep_their_sizes() -> None:
    """The caller may write the sizes of the next step into the array that it gave."""
    x = np.random.default_rng(0).standard_normal((64, 32), np.float32)
    for quantise, dequantise, given, rows in (
        (arrays.quantize, arrays.dequantize, np.array([20, 44], np.int32), x),
        (
            torch_bridge.quantize,
            torch_bridge.dequantize,
            torch.tensor([20, 44], dtype=torch.int32),
            torch.from_numpy(x),
        ),
    ):
        q = quantise(rows, "mxfp8", axis=0, group_sizes=given)
        before = dequantise(q)
        given[:] = 32
        asserts.bitwise(np.asarray(dequantise(q)), np.asarray(before))
