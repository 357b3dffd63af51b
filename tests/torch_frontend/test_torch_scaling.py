"""Delayed scaling in PyTorch: which scales a pass reads if its state is updated meanwhile, ranks, transforms."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from grouped_core import recipes
from tests import asserts
from tests.torch_frontend.compile_tools import compiled, eager
from tests.torch_frontend.nn_tools import setup
from tests.torch_frontend.recipe_tools import BF16, same, state_of, states
from tests.torch_frontend.torch_tools import leaf, manual_seed
from torch_bridge import (
    dequantize,
    grouped_mlp_bwd_dw,
    grouped_mlp_bwd_dx,
    grouped_mlp_fwd,
    nn,
    quantize,
    scaling_state,
    update_scaling,
)

DELAYED = recipes.FP8Delayed.replace(history=3)
POLICIES = ("save_all", "save_fc1", "save_input")
# Of the modules one has a state for both products, one a state for each.
OPERATIONS = (
    ("grouped_linear", {}),
    *(("grouped_mlp", {"residuals": policy}) for policy in POLICIES),
    ("GroupedMLP", {}),
    ("Sequential_fused", {}),
)

by_saved = pytest.mark.parametrize("saved", ["quantized", "input"])
by_operation = pytest.mark.parametrize(("form", "options"), OPERATIONS, ids=lambda v: str(v))


def held(one: Any) -> list[Any]:
    return [one.state] if one.state is not None else states(one.module)


def updated(one: Any) -> None:
    """The next step, as if another microbatch had been through backward."""
    for state in held(one):
        before = state.scale.clone()
        state.history.data[:, 0] = 2 * state.history.amax(1) + 0.1  # without autograd's notice, as launches of ours
        update_scaling(state)
        assert (state.scale != before).all(), "the step has to change something"


def stepped(form: str, recipe: Any, options: Any) -> Any:
    """An operation with the scales of a step."""
    one = setup(form, False, recipe=recipe, **BF16)
    one.run(leaf(one.x), **options).backward(one.dy)
    updated(one)
    for weight in one.weights:
        weight.grad = None
    return one


@pytest.mark.rule("MLP-10")
@by_saved
@by_operation
def test_backward_reads_the_scales_of_forward(form: str, options: Any, saved: str) -> None:
    """Magnitudes go to the state as it is then."""
    found = []
    for early in (False, True):
        one = stepped(form, DELAYED.replace(saved=saved), options)
        x = leaf(one.x * 3)
        y = one.run(x, **options)
        if early:
            updated(one)
        y.backward(one.dy * 5)
        found.append([y, x.grad, *(weight.grad for weight in one.weights)])
    same(found[1], found[0])
    for state in held(one):
        assert (state.history[2::3, 0] > 0).any()
        for role in (0, 1):
            asserts.zero(state.history[role::3, 0], "magnitudes of what forward measured, before the update")


@pytest.mark.rule("MLP-10")
@by_saved
@pytest.mark.parametrize("policy", POLICIES)
def test_parts_of_backward_read_the_scales_of_forward(policy: str, saved: str) -> None:
    """Weight gradients too, however late they are computed."""
    found = []
    for early in ("", "dx", "dw"):
        one = setup("grouped_mlp", False, recipe=recipes.MXFP8, **BF16)  # for its operands
        recipe = DELAYED.replace(saved=saved)
        state = scaling_state(recipe, len(one.sizes), products=2)
        wi, wo = (weight.detach() for weight in one.weights)
        options: Any = {"recipe": recipe.bind(state), "residuals": policy}
        grouped_mlp_bwd_dx(grouped_mlp_fwd(one.x, wi, wo, one.sizes, **options)[1], one.dy)
        update_scaling(state)
        _, kept = grouped_mlp_fwd(one.x * 3, wi, wo, one.sizes, **options)
        state.history[:, 0].clamp_(min=5)
        if early == "dx":
            update_scaling(state)
        dx, *_, deferred = grouped_mlp_bwd_dx(kept, one.dy * 5)
        if early == "dw":
            update_scaling(state)
        found.append([dx, *grouped_mlp_bwd_dw(deferred)])
        if early == "dx":
            assert (state.history[2::3, 0] > 0).any()
            for role in (0, 1):
                asserts.zero(state.history[role::3, 0], "magnitudes of what forward measured, before the update")
    assert (state.scale > 0).any()
    same(found[1], found[0], "for an update before dx")
    same(found[2], found[0], "for an update before dW")


@pytest.mark.rule("MLP-10", "QNT-5")
@pytest.mark.parametrize("dgrad", [DELAYED.dgrad, recipes.BF16.dgrad], ids=["fp8", "plain"])
@pytest.mark.parametrize("needs_x", [False, True], ids=["", "dx"])
def test_hidden_rows_are_made_again_of_the_cached_codes(needs_x: bool, dgrad: Any) -> None:
    """The codes of a frozen weight in the cache are older than the scales of a pass that reads them."""
    found = []
    for policy in ("save_all", "save_input"):
        manual_seed(1)
        recipe = DELAYED.replace(dgrad=dgrad)
        module = nn.GroupedMLP(3, 64, 96, dtype=torch.bfloat16, recipe=recipe, residuals=policy)
        module.linear_fc1.requires_grad_(False)
        x, sizes = torch.randn(40, 64, dtype=torch.bfloat16), torch.tensor([10, 0, 25])
        module(leaf(x), sizes, is_first_microbatch=True).sum().backward()
        update_scaling(module.scaling_state)
        x = leaf(x * 3, needs_x)
        y = module(x, sizes, is_first_microbatch=False)
        y.square().sum().backward()
        found.append([y, x.grad, *(weight.grad for weight in module.linear_fc2.parameters())])
    assert (state_of(module).scale > 0).any()
    same(found[1], found[0])


@pytest.mark.rule("MLP-10", "GRD-12")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    ("form", "options", "saved"),
    # A module of layers in turn is one MLP when it is fused, beside states that it owns.
    [
        *((*OPERATIONS[at], saved) for at, saved in ((0, "quantized"), (0, "input"), (1, "input"), (-1, "quantized"))),
        *(
            pytest.param(*OPERATIONS[at], saved, marks=pytest.mark.slow)
            for at, saved in ((1, "quantized"), (-1, "input"))
        ),
    ],
    ids=str,
)
def test_compiled_passes_read_the_scales_of_forward(form: str, options: Any, saved: str) -> None:
    """Its compiler moves copies of what is at hand to backward, where the state may be another."""
    found = []
    for wrap in (eager, lambda one: compiled(one, backend="inductor")):
        one = wrap(stepped(form, DELAYED.replace(saved=saved), options))
        x = leaf(one.x * 3)
        y = one.run(x, **options)
        updated(one)
        y.backward(one.dy * 5)
        found.append([y, x.grad, *(weight.grad for weight in one.weights)])
    same(found[1], found[0])


def test_a_process_group_of_another_kind_is_refused() -> None:
    with asserts.refused(TypeError, ["`process_group`", "int", "ProcessGroup", "pass one"]):
        update_scaling(scaling_state(DELAYED, 2), process_group=1)


# ---------------------------------------------------------------------------------------------------------------------
# Transforms


CODES = quantize(torch.ones(8, 32), "mxfp8")


def _values(codes: Any) -> Any:
    return dequantize(dataclasses.replace(CODES, values=codes))


def _updated(history: Any) -> Any:
    return update_scaling(dataclasses.replace(scaling_state(DELAYED, 2), history=history)).scale


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize("inner", [False, True], ids=["", "grad"])
@pytest.mark.parametrize(
    ("name", "function", "mapped"),
    [
        ("quantize", lambda x: quantize(x, "mxfp8").values.float(), torch.ones(2, 8, 32)),
        ("dequantize", _values, torch.stack([CODES.values] * 2)),
        ("update_scaling", _updated, torch.ones(2, 3, 3, 2)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_vmap_is_refused_in_words(name: str, function: Any, mapped: Any, inner: bool) -> None:
    if inner:
        plain, function = function, lambda value: torch.func.grad(lambda t: t * plain(value).sum())(torch.ones(()))
    with asserts.refused(NotImplementedError, [f"{name} under torch.func.vmap", "expected plain tensors", "fold"]):
        torch.func.vmap(function)(mapped)
