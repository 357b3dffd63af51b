"""Recipes that quantise in the experts' MLP: the frontends' bits, the policies' bits, errors, and the state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_grouped
import torch_bridge
from grouped_core import arrays, recipes
from grouped_core.activations import Activation
from grouped_core.mlp_spec import POLICIES, MlpNeeds
from grouped_core.recipes import Recipe
from jax_grouped import accumulate
from tests import asserts, bounds, cases
from tests.parity.adapters import to_torch
from tests.parity.mlp_adapters import ARRAYS, JAX, LEAVES, TORCH, in_halves, present, problem
from tests.parity.recipe_rows import MIXED, PARTLY_DELAYED, RECIPES

CASES = [cases.named(name) for name in ("tail", "jagged", "clamped", "all_empty", "no_rows")]
SOME_NEEDS = (
    MlpNeeds(),
    MlpNeeds(True, False, False, False, False, False),
    MlpNeeds(False, True, False, False, False, False),
    MlpNeeds(False, False, True, False, False, False),
    MlpNeeds(False, False, True, True, True, True),
    MlpNeeds(True, False, True, False, True, False),
)


def bind(recipe: Recipe, groups: int, key: tuple[int, int] = (3, 5)) -> Any:
    state = None
    if recipe.delayed:
        state = arrays.scaling_state(recipe, groups, products=2)
        state.scale[...] = (state.top / 6)[:, None]
    return recipe.bind(state, np.array(key, np.uint32))


def fits(recipe: Recipe, kind: str, dtype: str, halves: bool, **_: Any) -> bool:
    if halves and not Activation(kind).gated:
        return False
    return dtype == "bfloat16" or all(fmt.values != "bfloat16" for fmt in recipe.forward)


@pytest.mark.rule("ALL-1", "ALL-4", "MAT-3", "MLP-8", "MLP-10", "MLP-11")
@pytest.mark.matrix(
    recipe=(*RECIPES, *MIXED),
    case=CASES,
    kind=("swiglu", "clamped_qgeglu", "srelu"),
    dtype=("bfloat16", "float32"),
    transposed=(False, True),
    probs=(None, "float32"),
    bias=(None, "float32"),
    policy=POLICIES,
    needs=SOME_NEEDS,
    halves=(False, True),
    valid=fits,
    apart=[("recipe", "case")],  # they meet in the linear operation, test_recipes.py
)
def test_frontends_and_policies_have_the_same_bits(
    recipe, case, kind, dtype, transposed, probs, bias, policy, needs, halves
):
    given, dy = problem(case, dtype, Activation(kind), transposed=transposed, probs=probs, bias=bias)
    needs = present(given, needs)
    options: dict[str, Any] = {"activation": kind, "transposed": transposed, "recipe": bind(recipe, case.groups)}
    y = ARRAYS.forward(given, **options)
    wanted = ARRAYS.gradients(given, dy, needs, **options)
    form = in_halves(given, transposed) if halves else given
    for frontend in (ARRAYS, JAX, TORCH):
        y_found, found = frontend.passes(form, dy, needs, policy == POLICIES[0], residuals=policy, **options)
        asserts.bitwise(y_found, y, f"y of {frontend}")
        for name, need, a, b in zip(LEAVES, needs, found, wanted, strict=True):
            assert (a is not None) == need, f"gradient of {name} from {frontend}"
            if need:
                asserts.bitwise(a, b, f"gradient of {name} from {frontend} with {policy}")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_errors_are_those_of_the_formats(recipe):
    case = cases.Case("wide", (300, 0, 130, 82), 520, 256, 192, frozenset())
    given, dy = problem(case, "float32", Activation("swiglu"))
    needs = present(given)
    exact = (ARRAYS.forward(given), *ARRAYS.gradients(given, dy, needs)[:4])
    bound = recipe.bind(key=np.array((3, 5), np.uint32))
    if recipe.delayed:  # scales as a first step leaves them
        state = arrays.scaling_state(recipe, case.groups, products=2)
        ARRAYS.forward(given, recipe=recipe.bind(state))
        ARRAYS.gradients(given, dy, needs, recipe=recipe.bind(state))
        bound = recipe.bind(arrays.update_scaling(state))
    found = (ARRAYS.forward(given, recipe=bound), *ARRAYS.gradients(given, dy, needs, recipe=bound)[:4])
    # Each result follows from two or three products, whose errors are independent.
    limit = 2 * max(bounds.RELATIVE_ERRORS[recipe.name])
    for name, a, b in zip(("y", *LEAVES[:4]), found, exact, strict=True):
        assert a is not None
        assert b is not None
        a, b = (np.nan_to_num(each.astype(np.float64)) for each in (a, b))
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert limit / 8 < error <= limit, f"{name}: relative error {error}, expected at most {limit} and not far less"


@pytest.mark.rule("MLP-10")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("recipe", [recipes.FP8Delayed, *PARTLY_DELAYED], ids=lambda r: r.name)
def test_states_of_all_frontends_and_policies_agree_step_by_step(recipe, policy):
    recipe = recipe.replace(history=2)
    case = cases.named("tail")
    given, dy = problem(case, "bfloat16", Activation("swiglu"), transposed=True)
    groups, sizes = case.groups, given["group_sizes"]
    held = arrays.scaling_state(recipe, groups, products=2)
    of_torch = torch_bridge.scaling_state(recipe, groups, products=2)
    of_jax = jax_grouped.scaling_state(recipe, groups, products=2)

    def product(x: Any, wi: Any, wo: Any, state: Any) -> Any:
        return jax_grouped.grouped_mlp(
            x, wi, wo, sizes, rhs_transposed=True, recipe=recipe.bind(state), residuals=policy
        )

    for step in range(3):
        operands = {name: given[name] for name in ("x", "wi", "wo")}
        arrays.grouped_mlp(**operands, group_sizes=sizes, transposed=True, recipe=recipe.bind(held))
        arrays.grouped_mlp_grads(**operands, group_sizes=sizes, dy=dy, transposed=True, recipe=recipe.bind(held))
        x, wi, wo = (to_torch(each).requires_grad_() for each in operands.values())
        options: dict[str, Any] = {"recipe": recipe.bind(of_torch), "residuals": policy}
        torch_bridge.grouped_mlp(x, wi, wo, to_torch(sizes), **options).backward(to_torch(dy))
        _, pull = jax.vjp(product, *map(jnp.asarray, operands.values()), of_jax)
        of_jax = pull(jnp.asarray(dy))[3]
        for name, state in (("torch", of_torch), ("jax", of_jax)):
            asserts.bitwise(state.history, held.history, f"history of {name} in step {step}")
        held, of_torch, of_jax = (
            arrays.update_scaling(held),
            torch_bridge.update_scaling(of_torch),
            jax_grouped.update_scaling(of_jax),
        )
        for name, state in (("torch", of_torch), ("jax", of_jax)):
            asserts.bitwise(state.scale, held.scale, f"scale of {name} after step {step}")
    assert (np.asarray(of_jax.scale)[:, sizes > 0] > 0).all(), "every role was measured"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_deferred_gradients_of_jax_have_the_undeferred_bits(recipe):
    given, dy = problem(cases.named("tail"), "bfloat16", Activation("swiglu"), bias="float32")
    bound = bind(recipe, len(given["group_sizes"]))
    wanted = ARRAYS.gradients(given, dy, present(given), recipe=bound)
    state = None if bound.state is None else jax.tree.map(jnp.asarray, bound.state)
    of_jax = recipe.bind(state, jnp.asarray(bound.key))
    _, res = accumulate.grouped_mlp_fwd(**given, recipe=of_jax)
    dx, dp, db1, db2, deferred = accumulate.grouped_mlp_bwd_dx(res, jnp.asarray(dy))
    dwi, dwo = accumulate.grouped_mlp_bwd_dw(deferred)
    for name, a, b in zip(LEAVES, (dx, dwi, dwo, dp, db1, db2), wanted, strict=True):
        asserts.bitwise(a, b, name)
    assert (deferred.state is not None) == recipe.delayed


@pytest.mark.rule("DLY-3", "ACC-6")
@pytest.mark.matrix(recipe=(*RECIPES, *MIXED), policy=POLICIES, listed=(False, True), bias=(None, "float32"))
def test_deferred_gradients_of_torch_have_the_bits_of_autograd(recipe, policy, listed, bias):
    """Two microbatches, whose weight gradients are added afterwards; states get the same amaxes."""
    case = cases.named("tail")
    given, dy = problem(case, "bfloat16", Activation("swiglu"), transposed=True, bias=bias)
    sizes, dy = to_torch(given["group_sizes"]), to_torch(dy)
    names = [name for name in LEAVES if given[name] is not None]
    packed = {name: to_torch(given[name]) for name in names}
    states: list[Any] = [
        torch_bridge.scaling_state(recipe, case.groups, products=2) if recipe.delayed else None for _ in range(2)
    ]
    now, later = ([torch.ones(packed[name].shape) for name in ("wi", "wo")] for _ in range(2))

    def members(name: str, value: Any) -> Any:
        return list(value) if listed and name in ("wi", "wo", "wi_bias", "wo_bias") else value

    def options(state: Any, seed: int) -> dict[str, Any]:
        bound = recipe.bind(state, torch.tensor([seed, 5], dtype=torch.uint32))
        return {"group_sizes": sizes, "recipe": bound, "residuals": policy}

    queue, leafy = [], {}
    for seed in range(2):
        held = {name: packed[name].clone() for name in names}
        leafy = {name: value.clone().requires_grad_() for name, value in held.items()}
        into = tuple(members(name, value) for name, value in zip(("wi", "wo"), now, strict=True))
        y = torch_bridge.grouped_mlp(
            **{name: members(name, value) for name, value in leafy.items()},
            **options(states[0], seed),
            wgrad_accum=into,
        )
        y.backward(dy)
        given_parts = {name: members(name, value) for name, value in held.items()}
        z, res = torch_bridge.grouped_mlp_fwd(**given_parts, **options(states[1], seed))
        asserts.bitwise(z, y, "y")
        dx, dp, db1, db2, deferred = torch_bridge.grouped_mlp_bwd_dx(res, dy)
        for name, got in (("x", dx), ("probs", dp), ("wi_bias", db1), ("wo_bias", db2)):
            wanted = leafy[name].grad if name in leafy else None
            assert (got is None) == (wanted is None), name
            if got is not None:
                asserts.bitwise(torch.stack(got) if isinstance(got, list) else got, wanted, name)
        queue.append(deferred)
    if states[0] is not None:
        asserts.bitwise(states[1].history, states[0].history, "history")
    for deferred in queue:
        into = tuple(members(name, value) for name, value in zip(("wi", "wo"), later, strict=True))
        assert torch_bridge.grouped_mlp_bwd_dw(deferred, into) == (None, None)
    for name, a, b in zip(("wi", "wo"), later, now, strict=True):
        asserts.bitwise(a, b, name)
    fresh = torch_bridge.grouped_mlp_bwd_dw(queue[1])
    wanted = torch.autograd.grad(
        torch_bridge.grouped_mlp(**leafy, **options(states[0], 1)), (leafy["wi"], leafy["wo"]), dy
    )
    for a, b in zip(fresh, wanted, strict=True):
        asserts.bitwise(torch.stack(a) if isinstance(a, list) else a, b)


@pytest.mark.rule("ACC-6", "BUF-2", "QNT-4")
def test_torch_parts_with_masters_buffers_and_what_has_no_gradient():
    given, dy = problem(cases.named("tail"), "bfloat16", Activation("swiglu"), transposed=True)
    x, wi, wo, probs, sizes = (to_torch(given[name]) for name in ("x", "wi", "wo", "probs", "group_sizes"))
    quantized = torch_bridge.quantize(wi, "mxfp8", axis=(2, 1))
    out, buffer, dy = torch.full_like(x, 7.0), torch.full_like(x, 7.0), to_torch(dy)
    master = wi.float().requires_grad_()
    leafy: list[Any] = [each.clone().requires_grad_() for each in (x, wo)]
    options: dict[str, Any] = {"probs": probs, "recipe": recipes.MXFP8}
    first = torch_bridge.straight_through(master, quantized)
    y = torch_bridge.grouped_mlp(leafy[0], first, leafy[1], sizes, **options)
    y.backward(dy)
    z, res = torch_bridge.grouped_mlp_fwd(x, first, wo, sizes, out=out, **options)
    with asserts.refused(ValueError, ("`grad_input`", "overlaps `dy`", "allocate")):
        torch_bridge.grouped_mlp_bwd_dx(res, dy, grad_input=dy)
    with asserts.refused(TypeError, ("`dy`", "float32", "bfloat16", "cast")):
        torch_bridge.grouped_mlp_bwd_dx(res, dy.float())
    with asserts.refused(TypeError, ("`dy`", "NoneType", "expected a torch.Tensor", "convert")):
        torch_bridge.grouped_mlp_bwd_dx(res, None)
    with asserts.refused(TypeError, ("`res` of grouped_mlp_bwd_dx", "NoneType", "MlpResiduals", "grouped_mlp_fwd")):
        torch_bridge.grouped_mlp_bwd_dx(None, dy)
    with asserts.refused(TypeError, ("`deferred` of grouped_mlp_bwd_dw", "MlpResiduals", "Deferred", "_bwd_dx")):
        torch_bridge.grouped_mlp_bwd_dw(res)
    with asserts.refused(TypeError, ("`needs`", "tuple", "expected MlpNeeds or None", "pass one")):
        torch_bridge.grouped_mlp_fwd(x, first, wo, sizes, needs=(True, False), **options)
    dx, *_, deferred = torch_bridge.grouped_mlp_bwd_dx(res, dy, grad_input=buffer)
    assert dx is not None
    assert (z.data_ptr(), dx.data_ptr()) == (out.data_ptr(), buffer.data_ptr())
    valid = int(sizes.sum())
    asserts.bitwise(out[:valid], y[:valid])
    asserts.bitwise(buffer[:valid], leafy[0].grad[:valid])
    asserts.filled(out[valid:], 7.0)
    dwi, dwo = torch_bridge.grouped_mlp_bwd_dw(deferred)
    asserts.bitwise(dwi, master.grad)
    asserts.bitwise(dwo, leafy[1].grad)
    _, res = torch_bridge.grouped_mlp_fwd(x, quantized, wo, sizes, needs=MlpNeeds(wo=False), **options)
    *_, deferred = torch_bridge.grouped_mlp_bwd_dx(res, dy)
    assert deferred.work == (None, None), "a quantised weight without a master has no gradient"
    assert torch_bridge.grouped_mlp_bwd_dw(deferred) == (None, None)
    with asserts.refused(ValueError, ["state", "scaling_state"]):
        torch_bridge.grouped_mlp_fwd(x, wi, wo, sizes, recipe=recipes.FP8Delayed)


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "fp8_128x128"])
def test_quantised_weights_beside_plain_rows(format):
    given, dy = problem(cases.named("tail"), "bfloat16", Activation("swiglu"), transposed=True)
    quantized = {**given, "wi": arrays.quantize(given["wi"], format), "wo": arrays.quantize(given["wo"], format)}
    y = arrays.grouped_mlp(**quantized, transposed=True)
    masters = [to_torch(given[name].astype(np.float32)).requires_grad_() for name in ("wi", "wo")]
    x, p, sizes = (to_torch(given[name]) for name in ("x", "probs", "group_sizes"))
    x.requires_grad_()
    wi, wo = (
        torch_bridge.straight_through(m, torch_bridge.quantize(m.detach().bfloat16(), format, axis=(2, 1)))
        for m in masters
    )
    found = torch_bridge.grouped_mlp(x, wi, wo, sizes, probs=p)
    asserts.bitwise(found, y)
    gradients = torch.autograd.grad(found, (x, *masters), to_torch(dy))

    def function(x: Any, wi: Any, wo: Any) -> Any:
        first, second = (
            jax_grouped.straight_through(m, jax_grouped.quantize(m.astype(jnp.bfloat16), format, axis=(2, 1)))
            for m in (wi, wo)
        )
        sizes = given["group_sizes"]
        return jax_grouped.grouped_mlp(x, first, second, sizes, rhs_transposed=True, probs=given["probs"])

    of_jax = [jnp.asarray(given["x"]), *(jnp.asarray(given[name].astype(np.float32)) for name in ("wi", "wo"))]
    y_jax, pull = jax.vjp(function, *of_jax)
    asserts.bitwise(y_jax, y)
    for a, b in zip(gradients, pull(jnp.asarray(dy)), strict=True):
        asserts.bitwise(a, b)


@pytest.mark.rule("MLP-10", "MLP-13")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("axis", [(1, 0), (0, 1)], ids=str)
def test_quantised_rows_serve_every_policy(policy, axis):
    """Both of their forms are saved if backward computes the operands of forward again."""
    given, dy = problem(cases.named("tail"), "bfloat16", Activation("swiglu"), transposed=True)
    x, wi, wo, sizes = (to_torch(given[name]) for name in ("x", "wi", "wo", "group_sizes"))
    for each in (wi, wo):
        each.requires_grad_()
    found = []
    for rows in (x, torch_bridge.quantize(x, "fp8_1x128", axis=axis, group_sizes=sizes)):
        y = torch_bridge.grouped_mlp(rows, wi, wo, sizes, recipe=recipes.FP8Block, residuals=policy)
        found.append((y, *torch.autograd.grad(y, (wi, wo), to_torch(dy))))
    for a, b in zip(*found, strict=True):
        asserts.bitwise(a, b)


def test_a_pair_beside_a_recipe_that_quantises_has_no_accumulators():
    given, dy = problem(cases.named("tail"), "bfloat16", Activation("swiglu"))
    pair = in_halves({name: given[name] for name in ("x", "wi", "wo", "group_sizes")})
    words = ["`wgrad_accum` of `wi`", "two arrays beside recipe MXFP8", "expected None", "pass one array"]
    accums = ([np.zeros(half.shape, np.float32) for half in pair["wi"]], None)
    with asserts.refused(NotImplementedError, words):
        arrays.grouped_mlp_grads(**pair, dy=dy, recipe=recipes.MXFP8, wgrad_accum=accums)
    with asserts.refused(NotImplementedError, words):
        jax_grouped.grouped_mlp(**pair, recipe=recipes.MXFP8, wgrad_accum=accums)
    x, *halves, wo, sizes = map(to_torch, (pair["x"], *pair["wi"], pair["wo"], pair["group_sizes"]))
    with asserts.refused(NotImplementedError, ["`wi`", "two arrays beside recipe MXFP8", "expected one", "one array"]):
        torch_bridge.grouped_mlp_fwd(x, halves, wo, sizes, rhs_transposed=False, recipe=recipes.MXFP8)
    options: dict[str, Any] = {"rhs_transposed": False, "recipe": recipes.MXFP8}
    with asserts.refused(NotImplementedError, words):
        torch_bridge.grouped_mlp(x, halves, wo, sizes, **options, wgrad_accum=([to_torch(a) for a in accums[0]], None))
    held: Any = torch.nn.Parameter(wo)
    held.main_grad = torch.zeros(wo.shape)
    torch_bridge.grouped_mlp(x, halves, held, sizes, **options, wgrad_accum="main_grad").sum().backward()
    assert bool(held.main_grad.any()), "`main_grad` of frozen halves is not looked up"
    halves = [half.requires_grad_() for half in halves]
    with asserts.refused(NotImplementedError, words):
        torch_bridge.grouped_mlp(x, halves, wo, sizes, **options, wgrad_accum="main_grad")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_deferred_weight_gradients_of_jax_take_accumulators(recipe):
    given, dy = problem(cases.named("tail"), "bfloat16", Activation("swiglu"), transposed=True)
    operands = {name: jnp.asarray(given[name]) for name in ("x", "wi", "wo", "group_sizes")}
    bound = recipe.bind(jax_grouped.scaling_state(recipe, 3, products=2) if recipe.delayed else None)
    _, kept = accumulate.grouped_mlp_fwd(**operands, rhs_transposed=True, recipe=bound)
    *_, deferred = accumulate.grouped_mlp_bwd_dx(kept, jnp.asarray(dy))
    plain = accumulate.grouped_mlp_bwd_dw(deferred)
    zeros = tuple(jnp.zeros(operands[name].shape, jnp.float32) for name in ("wi", "wo"))
    refs = tuple(map(jax.new_ref, zeros))
    assert accumulate.grouped_mlp_bwd_dw(deferred, refs) == (None, None)
    for ref, into, own in zip(refs, accumulate.grouped_mlp_bwd_dw(deferred, zeros), plain, strict=True):
        asserts.bitwise(ref[...], into)
        asserts.bitwise(into.astype(own.dtype), own)


@pytest.mark.rule("MLP-13")
@pytest.mark.parametrize("recipe", [recipes.FP8Current, recipes.FP8Block, recipes.MXFP8], ids=lambda r: r.name)
def test_a_quantised_cotangent_has_the_bits_of_one_that_is_quantised_inside(recipe):
    """In every frontend that accepts one; the gradients of biases and probabilities read its values."""
    case = cases.named("tail")
    given, dy = problem(case, "bfloat16", Activation("swiglu"), transposed=True, bias="float32")
    operands = {name: given[name] for name in ("x", "wi", "wo", "group_sizes")}
    q = arrays.quantize(dy, recipe.dgrad[0], axis=(1, 0), group_sizes=given["group_sizes"])
    plain, found = (arrays.grouped_mlp_grads(**operands, dy=each, transposed=True, recipe=recipe) for each in (dy, q))
    for name in ("x", "wi", "wo"):
        asserts.bitwise(getattr(found, name), getattr(plain, name), name)
    values = arrays.dequantize(q)
    biased = {"wo_bias": given["wo_bias"], "probs": given["probs"]}
    of_values, of_codes = (
        arrays.grouped_mlp_grads(**operands, **biased, dy=each, transposed=True, recipe=recipe) for each in (values, q)
    )
    asserts.bitwise(of_codes.wo_bias, of_values.wo_bias)

    x, wi, wo, sizes = (to_torch(operands[name]) for name in operands)
    for each in (x, wi, wo):
        each.requires_grad_()
    _, kept = torch_bridge.grouped_mlp_fwd(x, wi, wo, sizes, recipe=recipe)
    of_torch = torch_bridge.quantize(to_torch(dy), recipe.dgrad[0], axis=(1, 0), group_sizes=sizes)
    dx, _, _, _, deferred = torch_bridge.grouped_mlp_bwd_dx(kept, of_torch)
    asserts.bitwise(dx, plain.x)
    for a, b in zip(torch_bridge.grouped_mlp_bwd_dw(deferred), (plain.wi, plain.wo), strict=True):
        asserts.bitwise(a, b)

    arrays_of_jax = {name: jnp.asarray(array) for name, array in operands.items()}
    _, saved = accumulate.grouped_mlp_fwd(
        *(arrays_of_jax[name] for name in operands), rhs_transposed=True, recipe=recipe
    )
    of_jax = jax_grouped.quantize(
        jnp.asarray(dy), recipe.dgrad[0], axis=(1, 0), group_sizes=arrays_of_jax["group_sizes"]
    )
    asserts.bitwise(accumulate.grouped_mlp_bwd_dx(saved, of_jax)[0], plain.x)


@pytest.mark.rule("MLP-13")
@pytest.mark.parametrize("plain", ["dgrad", "wgrad"])
@pytest.mark.parametrize("recipe", [recipes.FP8Current, recipes.FP8Block, recipes.MXFP8], ids=lambda r: r.name)
def test_plain_formats_read_the_values_of_a_quantised_cotangent(recipe, plain):
    given, dy = problem(cases.named("tail"), "bfloat16", Activation("swiglu"), transposed=True)
    x, wi, wo, sizes = (given[name] for name in ("x", "wi", "wo", "group_sizes"))
    fmt = recipe.dgrad[0]
    recipe = recipe.replace(requantize="from_dequantized", **{plain: getattr(recipes.BF16, plain)})
    q = arrays.quantize(dy, fmt, axis=(1, 0), group_sizes=sizes)
    wanted = arrays.grouped_mlp_grads(x, wi, wo, sizes, q, transposed=True, recipe=recipe)
    _, kept = torch_bridge.grouped_mlp_fwd(*map(to_torch, (x, wi, wo, sizes)), recipe=recipe)
    of_torch = torch_bridge.quantize(to_torch(dy), fmt, axis=(1, 0), group_sizes=to_torch(sizes))
    dx, *_, deferred = torch_bridge.grouped_mlp_bwd_dx(kept, of_torch)
    for a, b in zip((dx, *torch_bridge.grouped_mlp_bwd_dw(deferred)), (wanted.x, wanted.wi, wanted.wo), strict=True):
        asserts.bitwise(a, b)


@pytest.mark.rule("MLP-13", "ERR-1")
def test_a_quantised_cotangent_in_another_format_is_refused():
    given, dy = problem(cases.named("tail"), "bfloat16", Activation("swiglu"), transposed=True)
    operands = {name: given[name] for name in ("x", "wi", "wo", "group_sizes")}
    q = arrays.quantize(dy, "fp8_1x128", axis=1, group_sizes=given["group_sizes"])
    for recipe in (recipes.MXFP8, recipes.FP8Block):  # another format; the form along rows is missing
        with asserts.refused(ValueError, ["quantised rows", "fp8_1x128 along axis 1", "expected"]):
            arrays.grouped_mlp_grads(**operands, dy=q, transposed=True, recipe=recipe)
    tensors = [to_torch(each) for each in operands.values()]
    tensors[0].requires_grad_()
    _, kept = torch_bridge.grouped_mlp_fwd(*tensors)
    with asserts.refused(ValueError, ["`dy`", "fp8_1x128", "quantises nothing", "dequantise it"]):
        torch_bridge.grouped_mlp_bwd_dx(kept, torch_bridge.quantize(to_torch(dy), "fp8_1x128", group_sizes=tensors[3]))
