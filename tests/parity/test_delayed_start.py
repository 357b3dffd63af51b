"""Delayed scaling before its first update: a new state loses no gradient, however small (numerics 2.5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import torch_bridge
from grouped_core import arrays, recipes
from grouped_core.activations import Activation
from grouped_core.gradients import Needs
from grouped_core.mlp_spec import POLICIES
from tests import asserts, cases
from tests.parity.adapters import FRONTENDS
from tests.parity.mlp_adapters import ARRAYS, JAX, LEAVES, TORCH, present, problem

CASES = [cases.named(name) for name in ("tail", "jagged", "all_empty", "no_rows")]
OF_A_MEAN = 2.0**-22  # gradients of a loss that is a mean over so many elements; below all that E5M2 has


def fresh(recipe: Any, groups: int, products: int = 1) -> Any:
    """The recipe, bound to a new state if it has delayed scaling."""
    return recipe.bind(arrays.scaling_state(recipe, groups, products=products) if recipe.delayed else None)


def started(recipe: Any, groups: int, products: int = 1, scale: Any = 1.0) -> Any:
    bound = fresh(recipe, groups, products)
    bound.state.scale[...] = scale
    return bound


def gradients_of(frontend: Any, p: Any, dy: Any, recipe: Any) -> tuple[Any, ...]:
    operands = {"x": p.x, "w": p.w, "group_sizes": p.group_sizes, "bias": None, "row_scale": None}
    y = frontend.forward(operands, transposed=False, recipe=recipe)
    needs = Needs(True, True, False, False)
    return (y, *frontend.gradients(operands, dy, needs, transposed=False, recipe=recipe)[:2])


@pytest.mark.rule("ALL-1")
@pytest.mark.parametrize("frontend", FRONTENDS, ids=str)
@pytest.mark.parametrize("history", [1, 1024])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_first_step_has_the_bits_of_current_scaling(frontend, case, history):
    p = cases.problem(case, "bfloat16")
    dy = (p.dy.astype(np.float32) * OF_A_MEAN).astype(p.dy.dtype)
    found = gradients_of(frontend, p, dy, fresh(recipes.FP8Delayed.replace(history=history), case.groups))
    wanted = gradients_of(frontend, p, dy, fresh(recipes.FP8Current, case.groups))
    for name, a, b in zip(("y", "dx", "dw"), found, wanted, strict=True):
        asserts.bitwise(a, b, f"{name} of {frontend}")
    if case.valid:
        assert np.abs(np.nan_to_num(found[1].astype(np.float32))).max() > 0, "gradients were lost"


@pytest.mark.rule("ALL-1", "MLP-10")
@pytest.mark.parametrize("frontend", [ARRAYS, JAX, TORCH], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["swiglu", "srelu"])
def test_a_first_step_of_an_mlp_has_the_bits_of_current_scaling(frontend, kind, policy):
    """Also for hidden rows and their gradients, which fused calls quantise, and rows that backward computes again."""
    case = cases.named("tail")
    given, dy = problem(case, "bfloat16", Activation(kind))
    dy = (dy.astype(np.float32) * OF_A_MEAN).astype(dy.dtype)
    needs, options = present(given), {"activation": kind}
    found, wanted = (
        (
            frontend.forward(given, recipe=fresh(recipe, case.groups, 2), **options),
            *frontend.gradients(given, dy, needs, recipe=fresh(recipe, case.groups, 2), residuals=policy, **options),
        )
        for recipe in (recipes.FP8Delayed, recipes.FP8Current)
    )
    for name, a, b in zip(("y", *LEAVES), found, wanted, strict=True):
        if a is not None:
            asserts.bitwise(a, b, f"{name} of {frontend} with {policy}")


@pytest.mark.rule("ALL-7")
@pytest.mark.parametrize("frontend", FRONTENDS, ids=str)
def test_batch_invariant_recipes_start_at_one(frontend):
    """A scale that is found in the rows would make each row depend on the others."""
    recipe, case = recipes.FP8Delayed.replace(batch_invariant=True), cases.named("tail")
    p = cases.problem(case, "bfloat16")
    found = gradients_of(frontend, p, p.dy, fresh(recipe, case.groups))
    wanted = gradients_of(frontend, p, p.dy, started(recipe, case.groups))
    for name, a, b in zip(("y", "dx", "dw"), found, wanted, strict=True):
        asserts.bitwise(a, b, f"{name} of {frontend}")
    assert recipe.replace(batch_invariant=False).forward == recipes.FP8Delayed.forward


@pytest.mark.parametrize("frontend", FRONTENDS, ids=str)
def test_a_group_that_has_started_keeps_its_scale(frontend):
    """It keeps its scale whether or not other groups have started; an update starts those that have rows."""
    recipe, case = recipes.FP8Delayed.replace(history=2), cases.named("tail")
    p = cases.problem(case, "bfloat16")
    some = np.where(np.arange(case.groups) % 2, np.float32(3), np.float32(0))
    mixed = gradients_of(frontend, p, p.dy, started(recipe, case.groups, scale=some))[0].astype(np.float32)
    given = gradients_of(frontend, p, p.dy, started(recipe, case.groups, scale=3.0))[0].astype(np.float32)
    own = gradients_of(frontend, p, p.dy, fresh(recipe, case.groups))[0].astype(np.float32)
    for g, span in enumerate(case.spans()):
        asserts.bitwise(mixed[span], (given if g % 2 else own)[span], f"group {g} of {frontend}")


def test_backward_starts_as_forward_did_whatever_became_of_the_state():
    """An update between them starts the state; backward of this pass still uses the scales that forward found."""
    recipe = recipes.FP8Delayed.replace(saved="input")
    found = []
    for early in (False, True):
        torch.manual_seed(0)
        x = torch.randn(40, 64, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(3, 96, 64, dtype=torch.bfloat16, requires_grad=True)
        state = torch_bridge.scaling_state(recipe, 3)
        y = torch_bridge.grouped_linear(x, weight, torch.tensor([10, 0, 25]), recipe=recipe.bind(state))
        if early:
            state.history.data[:, 0].clamp_(min=100)
            torch_bridge.update_scaling(state)
            assert (state.scale > 0).all()
        (y.float() * torch.randn(96) * 1e-6).sum().backward()
        found.append((x.grad, weight.grad))
    for a, b in zip(*found, strict=True):
        asserts.bitwise(a, b)


def test_an_update_starts_the_groups_that_have_rows():
    recipe, case = recipes.FP8Delayed.replace(history=2), cases.named("tail")
    p = cases.problem(case, "bfloat16")
    state = arrays.scaling_state(recipe, case.groups)
    assert (state.scale == 0).all()
    arrays.grouped_linear(p.x, p.w, p.group_sizes, recipe=recipe.bind(state))
    after = arrays.update_scaling(state).scale
    has_rows = np.array([span.stop > span.start for span in case.spans()])
    assert has_rows.any()
    assert not has_rows.all()
    assert ((after[0] > 0) == has_rows).all()
    assert (after[1] > 0).all(), "every group has a weight"
    assert (after[2] == 0).all(), "no gradient was seen"


def test_states_of_older_checkpoints_keep_their_scales():
    """Such states started with scales of 1 and an empty history."""
    module = torch_bridge.nn.GroupedLinear(3, 64, 96, dtype=torch.bfloat16, recipe=recipes.FP8Delayed, bias=False)
    own = module.state_dict()
    scales = {name: torch.ones_like(value) for name, value in own.items() if name.endswith("scale")}
    assert len(scales) == 1
    assert all((own[name] == 0).all() for name in scales), "a fresh state holds 0"
    module.load_state_dict({**own, **scales})
    x, sizes = torch.randn(10, 64, dtype=torch.bfloat16), torch.tensor([4, 0, 6], dtype=torch.int32)
    state = torch_bridge.scaling_state(recipes.FP8Delayed, 3)
    state.scale.fill_(1)
    weight = torch.stack(list(module.parameters()))
    wanted = torch_bridge.grouped_linear(x, weight, sizes, recipe=recipes.FP8Delayed.bind(state))
    asserts.bitwise(module(x, sizes).detach(), wanted.detach())


def test_explain_says_what_multiplies_by_one():
    recipe = recipes.FP8Delayed.replace(batch_invariant=True)
    x, w, sizes = torch.ones(4, 32), torch.ones(2, 16, 32), torch.tensor([2, 2])
    for each, said in ((recipe, True), (recipes.FP8Delayed, False)):
        text = torch_bridge.explain(
            torch_bridge.grouped_linear, x, w, sizes, recipe=each.bind(torch_bridge.scaling_state(each, 2))
        )
        assert ("have not started are multiplied by 1" in text) == said


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["swiglu", "srelu"])
@pytest.mark.parametrize("waiting", ["all", "some"])
def test_the_passes_of_a_gpu_start_groups(waiting, kind, policy):
    """Then the passes that make activations and their gradients also quantise them, and measure their amax first."""
    torch.manual_seed(0)
    groups, sizes = 4, torch.tensor([300, 0, 130, 82], device="cuda", dtype=torch.int32)
    wide = 512 if kind == "swiglu" else 256
    options = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(520, 384, **options)
    wi, wo = torch.randn(groups, wide, 384, **options) / 20, torch.randn(groups, 384, 256, **options) / 16
    dy = torch.randn(520, 384, **options) * OF_A_MEAN
    x[512:] = dy[512:] = float("nan")

    def step(recipe):
        first, second, third = leaves = [each.clone().requires_grad_() for each in (x, wi, wo)]
        y = torch_bridge.grouped_mlp(first, second, third, sizes, activation=kind, recipe=recipe, residuals=policy)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    state = torch_bridge.scaling_state(recipes.FP8Delayed, groups, products=2, device="cuda")
    if waiting == "some":  # group 2 has scales, which are those of its own values
        step(recipes.FP8Delayed.bind(state))
        torch_bridge.update_scaling(state)
        state.scale[:, [0, 1, 3]] = 0
    found, wanted = step(recipes.FP8Delayed.bind(state)), step(recipes.FP8Current)
    for name, a, b in zip(("y", "dx", "dwi", "dwo"), found, wanted, strict=True):
        asserts.bitwise(a.detach().cpu(), b.detach().cpu(), name)
    assert all((each[:512] if len(each) == 520 else each).abs().max() > 0 for each in found)
