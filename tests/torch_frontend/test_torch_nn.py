"""The layers of `torch_bridge.nn`: what they compute, which parameters they have, what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_bridge
from grouped_core.activations import Activation
from grouped_core.mlp_spec import POLICIES, Mlp, MlpNames
from tests import asserts, bounds, cases
from tests.parity.adapters import to_torch
from tests.parity.mlp_adapters import problem
from tests.torch_frontend.nn_tools import MODULES, fill, setup
from tests.torch_frontend.torch_tools import counted_launches, leaf, manual_seed, small
from torch_bridge import GroupSizes, grouped_linear, grouped_mlp, nn, scaling_state

FORMS = [(weight, bias) for weight in (False, True) for bias in (False, True)]


def _linear(t: Any, single_weight: bool = True, single_bias: bool = True, **options: Any) -> nn.GroupedLinear:
    """The layer of a problem, holding its values."""
    groups, n, k = t.w.shape
    options = {"bias": True, "dtype": t.w.dtype, **options}
    layer = nn.GroupedLinear(
        groups, k, n, single_grouped_weight=single_weight, single_grouped_bias=single_bias, **options
    )
    fill(layer, t.w, t.bias if options["bias"] else None)
    return layer


def _bound(recipe: Any) -> Any:
    """Bound to a state or a key: layers have their own."""
    state = scaling_state(recipe, 2) if recipe.delayed else None
    return recipe.bind(state, torch.zeros(2, dtype=torch.uint32) if recipe.stochastic else None)


def _gradients(layer: nn.GroupedLinear, kind: str) -> Tensor:
    """The gradient of a layer's weight or bias, packed."""
    names: Any = layer.weight_names if kind == "weight" else layer.bias_names
    found: list[Any] = [getattr(layer, name).grad for name in names]
    return found[0] if names[0] == kind else torch.stack(found)


@pytest.mark.rule("MAT-3", "MAT-8", "MAT-9", "GRD-10")
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("scaled", ["no_scale", "row_scale", "scale_bias"])
@pytest.mark.parametrize(("single_weight", "single_bias"), FORMS)
def test_linear_has_the_bits_of_the_function(single_weight: bool, single_bias: bool, scaled: str, dtype: str) -> None:
    t = small("tail", dtype)
    layer = _linear(t, single_weight, single_bias, scale_bias=scaled == "scale_bias")
    scale = None if scaled == "no_scale" else t.row_scale
    x, w, b, c = leaf(t.x), leaf(t.w), leaf(t.bias), None if scale is None else leaf(scale)
    y = grouped_linear(x, w, t.sizes, bias=b, row_scale=c, scale_bias=scaled == "scale_bias")
    y.backward(t.dy)
    x2, c2 = leaf(t.x), None if scale is None else leaf(scale)
    y2 = layer(x2, t.sizes, c2)
    y2.backward(t.dy)
    asserts.bitwise(y2, y)
    asserts.bitwise(x2.grad, x.grad)
    asserts.bitwise(_gradients(layer, "weight"), w.grad)
    asserts.bitwise(_gradients(layer, "bias"), b.grad)
    if c is not None and c2 is not None:
        asserts.bitwise(c2.grad, c.grad)


@pytest.mark.rule("MLP-1", "MLP-8", "ALL-1")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("kind", ["swiglu", "srelu"])
def test_mlp_is_within_the_bounds_of_the_oracle(kind: str, listed: bool, policy: str) -> None:
    case, spec = cases.named("tail"), Activation(kind)
    given, dy = problem(case, "bfloat16", spec, transposed=True, bias="bfloat16")
    options = {"single_grouped_weight": not listed, "single_grouped_bias": not listed}
    mlp = nn.GroupedMLP(
        case.groups,
        case.k,
        case.n,
        activation=kind,
        bias=True,
        residuals=policy,
        dtype=torch.bfloat16,
        **options,
    )
    for linear, w, b in ((mlp.linear_fc1, "wi", "wi_bias"), (mlp.linear_fc2, "wo", "wo_bias")):
        fill(linear, to_torch(given[w]), to_torch(given[b]))
    x, probs = leaf(to_torch(given["x"])), leaf(to_torch(given["probs"]))
    y = mlp(x, to_torch(given["group_sizes"]), probs)
    y.backward(to_torch(dy))
    op = Mlp(MlpNames(), spec, transposed=True)
    asserts.within(y, bounds.expect_mlp(op, **given), "y")
    expected = bounds.expect_mlp_grads(op, **given, dy=dy)
    found = {
        "x": x.grad,
        "probs": probs.grad,
        "wi": _gradients(mlp.linear_fc1, "weight"),
        "wo": _gradients(mlp.linear_fc2, "weight"),
        "wi_bias": _gradients(mlp.linear_fc1, "bias"),
        "wo_bias": _gradients(mlp.linear_fc2, "bias"),
    }
    for name, gradient in found.items():
        asserts.within(gradient, getattr(expected, name), f"gradient of {name}")


@pytest.mark.rule("GRP-1", "GRP-2")
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(
    "made",
    [
        *(lambda s, d=d: s.to(getattr(torch, d)) for d in ("int8", "int16", "int32", "int64", "uint8")),
        lambda s: s.tolist(),
        lambda s: GroupSizes(s, 16),
    ],
    ids=["int8", "int16", "int32", "int64", "uint8", "list", "hint"],
)
@pytest.mark.parametrize("form", MODULES)
def test_any_form_of_sizes(form: str, made: Any, listed: bool) -> None:
    s = setup(form, listed)
    sizes = made(s.sizes)
    extra = {"GroupedLinear": (sizes,), "GroupedMLP": (sizes, s.probs)}.get(form, (sizes, s.probs, sizes))
    asserts.bitwise(s.module(s.x, *extra), s.run(s.x))


@pytest.mark.rule("MAT-5", "ALL-4", "MLP-11")
@pytest.mark.parametrize("form", MODULES)
def test_frozen_parameters_of_every_mixture(form: str) -> None:
    """Each subset of the first product's five experts; the gradients of the others do not change."""
    whole = setup(form, True)
    whole.backward()
    for frozen in range(32):
        s = setup(form, True)
        for g in range(5):
            s.weights[g].requires_grad_(not frozen >> g & 1)
        x = s.backward()
        asserts.bitwise(x.grad, whole.backward().grad)
        for at, weight in enumerate(s.weights):
            if at < 5 and frozen >> at & 1:
                assert weight.grad is None
            else:
                asserts.bitwise(weight.grad, setup_grads(form)[at], f"weight {at}, frozen {frozen:05b}")


_grads: dict[str, list[Tensor]] = {}


def setup_grads(form: str) -> list[Tensor]:
    """dW of the listed form."""
    if form not in _grads:
        s = setup(form, True)
        s.backward()
        _grads[form] = [each.grad for each in s.weights]
    return _grads[form]


@pytest.mark.rule("ALL-4")
@pytest.mark.parametrize("form", MODULES)
def test_all_frozen_launches_no_weight_gradient(form: str) -> None:
    s = setup(form, False)
    for weight in s.weights:
        weight.requires_grad_(False)
    with counted_launches() as calls:
        s.backward()
    products = {"GroupedLinear": 2, "Sequential_composed": 4}.get(form, 2)
    assert calls.count("grouped_matmul") == products, calls


@pytest.mark.rule("GRD-10")
@pytest.mark.parametrize(
    ("single_weight", "single_bias", "names"),
    [
        (False, False, ["weight0", "weight1", "bias0", "bias1"]),
        (True, True, ["weight", "bias"]),
        (False, True, ["weight0", "weight1", "bias"]),
        (True, False, ["bias0", "bias1", "weight"]),
    ],
)
def test_parameters_are_in_the_order_of_registration(single_weight: bool, single_bias: bool, names: Any) -> None:
    layer = nn.GroupedLinear(2, 3, 4, single_grouped_weight=single_weight, single_grouped_bias=single_bias)
    assert [name for name, _ in layer.named_parameters()] == names


def test_both_forms_start_with_the_same_values() -> None:
    values = []
    mlp: Any = None
    for single in (False, True):
        manual_seed(3)
        mlp = nn.GroupedMLP(3, 8, 4, bias=True, single_grouped_weight=single, single_grouped_bias=single)
        for layer in (mlp.linear_fc1, mlp.linear_fc2):
            w, b = layer.weights(layer.weight_parameters(), torch.float32), layer.biases()
            values.append([each if isinstance(each, Tensor) else torch.stack(each) for each in (w, b)])
            assert values[-1][0].detach().abs().max() <= layer.in_features**-0.5
    for got, expected in zip(values[2:], values[:2], strict=True):
        for a, b in zip(got, expected, strict=True):
            asserts.bitwise(a, b)
    weight: Any = mlp.linear_fc1.weight
    before = weight.detach().clone()
    mlp.reset_parameters()
    assert not torch.equal(before, mlp.linear_fc1.weight)


@pytest.mark.rule("MAT-6")
@pytest.mark.parametrize("form", MODULES)
@pytest.mark.parametrize("listed", [False, True])
def test_autocast_computes_in_its_dtype(form: str, listed: bool) -> None:
    """The bits of explicit casts: results in bfloat16, gradients of the weights in the weights' dtype."""
    s, narrow = setup(form, listed), setup(form, listed, dtype="bfloat16")
    with torch.no_grad():
        for weight, cast in zip(s.weights, narrow.weights, strict=True):
            cast.copy_(weight)
    with torch.autocast("cpu", torch.bfloat16):
        x = leaf(s.x)
        y = s.run(x)
    x2 = leaf(s.x.bfloat16())
    y2 = narrow.run(x2)
    asserts.bitwise(y, y2)
    dy = s.dy.bfloat16()
    y.backward(dy)
    y2.backward(dy)
    asserts.bitwise(x.grad, x2.grad.float())
    for weight, cast in zip(s.weights, narrow.weights, strict=True):
        asserts.bitwise(weight.grad, cast.grad.float())


@pytest.mark.rule("MAT-6", "GRD-6")
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("form", MODULES)
def test_autocast_adds_unrounded_gradients_to_main_grad(form: str, delay: bool) -> None:
    """`main_grad` is that of the Parameters, although the kernels read casts of them."""
    from tests.torch_frontend.nn_tools import main_grads

    s, narrow = (setup(form, True, accumulate=True, delay=delay, dtype=d) for d in ("float32", "bfloat16"))
    with torch.no_grad():
        for weight, cast in zip(s.weights, narrow.weights, strict=True):
            cast.copy_(weight)
    for one in (s, narrow):
        main_grads(one.weights, 0.5)
        for weight in one.weights:
            weight.grad_added_to_main_grad = False
        with torch.autocast("cpu", torch.bfloat16):
            y = one.run(leaf(one.x))
        y.backward(one.dy.bfloat16())
        if delay:
            one.module.backward_dw()
    for weight, cast in zip(s.weights, narrow.weights, strict=True):
        asserts.bitwise(weight.main_grad, cast.main_grad)
        assert weight.grad_added_to_main_grad is True
        asserts.zero(weight.grad)
        assert weight.grad.dtype == torch.float32


@pytest.mark.rule("ERR-1", "MAT-6")
@pytest.mark.parametrize(
    ("call", "kind", "fragments"),
    [
        (lambda: nn.GroupedLinear(0, 4, 4), ValueError, ["`num_groups` of GroupedLinear", "0", "1 or more"]),
        (lambda: nn.GroupedLinear(2, 4.5, 4), TypeError, ["`in_features`", "4.5", "integer"]),
        (lambda: nn.GroupedMLP(2, 4, 0), ValueError, ["`mlp_dim` of GroupedMLP", "0", "1 or more"]),
        (lambda: nn.GroupedLinear(2, 4, 4, dtype=torch.int8), TypeError, ["`dtype`", "torch.int8", "torch.float32"]),
        (lambda: nn.GroupedLinear(2, 4, 4, bias=False, scale_bias=True), ValueError, ["`scale_bias`", "drop"]),
        (lambda: nn.GroupedLinear(2, 4, 4, recipe="fp8"), TypeError, ["`recipe`", "str", "Recipe"]),
        (
            lambda: nn.GroupedLinear(2, 4, 4, recipe=_bound(torch_bridge.FP8Delayed)),
            TypeError,
            ["`recipe` of GroupedLinear", "BoundRecipe", "a Recipe or None", "its own state and keys", "recipe itself"],
        ),
        (
            lambda: nn.GroupedMLP(2, 4, 4, recipe=_bound(torch_bridge.NVFP4)),
            TypeError,
            ["`recipe` of GroupedMLP", "BoundRecipe", "a Recipe or None", "its own state and keys", "recipe itself"],
        ),
        (
            lambda: nn.quantized_model_init(recipe=_bound(torch_bridge.FP8Delayed)).__enter__(),
            TypeError,
            ["`recipe` of quantized_model_init", "BoundRecipe", "a Recipe or None", "recipe itself"],
        ),
        (lambda: nn.GroupedMLP(2, 4, 4, scale_bias=True), TypeError, ["`scale_bias` of GroupedMLP", "Sequential"]),
        (
            lambda: nn.GroupedMLP(2, 4, 4, foo=1),
            TypeError,
            ["`foo` of GroupedMLP", "no such keyword", "leave it out", "activation", "lora_rank"],
        ),
        (lambda: nn.GroupedMLP(2, 4, 4, activation="swish"), ValueError, ["swish", "swiglu"]),
        (lambda: nn.GroupedMLP(2, 4, 4, residuals="none"), ValueError, ["none", "save_fc1"]),
        (
            lambda: nn.GroupedLinear(2, 4, 4)(torch.ones(3, 4), [1, 2], is_first_microbatch=1),
            TypeError,
            ["`is_first_microbatch`", "1", "None, True or False"],
        ),
        (lambda: nn.GroupedLinear(2, 4, 4).set_weight_update(None), TypeError, ["`flag`", "None", "True or False"]),
        (lambda: nn.GroupedLinear(2, 4, 4)(torch.ones(3, 5), [1, 2]), ValueError, ["(3, 5)"]),
        (lambda: nn.GroupedLinear(2, 4, 4)(torch.ones(3, 4), [1, 2, 0]), ValueError, ["`group_sizes`", "3"]),
    ],
)
def test_mistakes(call: Any, kind: type[Exception], fragments: list[str]) -> None:
    with asserts.refused(kind, fragments):
        call()


def test_recipes_reach_the_operation() -> None:
    t = small("tail", "float32")
    for recipe in (None, torch_bridge.FP32, torch_bridge.FP32.replace(fp32="ieee")):
        layer = _linear(t, recipe=recipe)
        asserts.bitwise(layer(t.x, t.sizes), grouped_linear(t.x, t.w, t.sizes, bias=t.bias, recipe=recipe))
        assert ("recipe=" in repr(layer)) == (recipe is not None)
    mlp = nn.GroupedMLP(3, 24, 8, recipe=torch_bridge.FP32, single_grouped_weight=True)
    y = grouped_mlp(t.x, mlp.linear_fc1.weight, mlp.linear_fc2.weight, t.sizes, recipe=torch_bridge.FP32)
    asserts.bitwise(mlp(t.x, t.sizes), y)


def test_layers_of_an_mlp_that_disagree_are_refused() -> None:
    s = setup("GroupedMLP", False)
    s.linears[1].accumulate_into_main_grad = True  # after construction
    with asserts.refused(ValueError, ["`accumulate_into_main_grad`", "False", "True", "the same in both"]):
        s.run(s.x)
