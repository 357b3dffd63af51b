"""Recipes that quantise in the layers of `torch_bridge.nn`: bits, weight cache, state, quantised primary weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import torch_bridge
from grouped_core import recipes
from grouped_core.activations import Activation
from grouped_core.formats import FORMATS
from grouped_core.recipes import Recipe
from tests import asserts
from tests.quantized import with_e4m3_gradients
from tests.torch_frontend.nn_tools import FUNCTIONS, MODULES, Setup, drawn_key, main_grads, setup
from tests.torch_frontend.recipe_tools import ALL, BF16, DELAYED, RECIPES, same, seeded, state_of, states
from tests.torch_frontend.torch_tools import counted_launches, leaf, manual_seed
from torch_bridge import (
    dequantize,
    grouped_linear,
    grouped_mlp,
    nn,
    params,
    quantize,
    scaling_state,
    straight_through,
    update_scaling,
)
from torch_bridge._tensors import forms_of
from torch_bridge.activation import scaled_activation_rows
from torch_bridge.nn import _cache

FUNCTION = {"GroupedLinear": "grouped_linear", "GroupedMLP": "grouped_mlp", "Sequential_fused": "grouped_mlp"}

by_recipe = pytest.mark.parametrize("recipe", ALL, ids=lambda r: r.name)
by_form = pytest.mark.parametrize("form", MODULES)


# ---------------------------------------------------------------------------------------------------------------------
# Bits


@pytest.mark.rule("ALL-1", "MAT-3", "MLP-1")
@by_recipe
@pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
@pytest.mark.parametrize("form", list(FUNCTION))
def test_layers_have_the_bits_of_the_functions(form: str, listed: bool, recipe: Recipe) -> None:
    """Step by step, with the states of delayed scaling and the keys of random rounding."""
    module = setup(form, listed, recipe=recipe, **BF16)
    function = setup(FUNCTION[form], listed, recipe=recipe, **BF16)
    for step in range(3):
        same(seeded(module, step), seeded(function, step), f"in step {step}")
        if function.state is not None:
            held = states(module.module)
            for name in ("scale", "history"):
                asserts.bitwise(torch.cat([getattr(each, name) for each in held]), getattr(function.state, name), name)
            for state in (*held, function.state):
                update_scaling(state)
    if recipe.delayed:
        assert (function.state.scale > 0).any(), "nothing was scaled"


def _one_pass(name: str, recipe: Recipe, *, listed: bool, adapted: bool) -> list[Any]:
    """y and the gradients of x and of the weights, packed, of one pass in float32; adapted weights are frozen."""
    manual_seed(0)
    shapes = [(3, 24, 16)] if name == "grouped_linear" else [(3, 48, 16), (3, 16, 24)]
    x, weights = leaf(torch.randn(12, 16)), [torch.randn(shape) for shape in shapes]
    factors = [(torch.randn(3, 4, w.shape[2]), torch.randn(3, w.shape[1], 4)) for w in weights]
    experts, probs = torch.arange(24).reshape(12, 2) % 3, torch.rand(12, 2)
    members = [[each.clone().requires_grad_(not adapted) for each in w] for w in weights]
    packed = [w.requires_grad_(not adapted) for w in weights]
    given: Any = members if listed else packed
    options: dict[str, Any] = {"recipe": recipe}
    if adapted:
        options["lora"] = factors if len(factors) > 1 else factors[0]
    if name == "routed_mlp":
        y = torch_bridge.routed_mlp(x, experts, probs, *given, **options)
    else:
        y = getattr(torch_bridge, name)(x, *given, [5, 0, 6], **options)
    y.backward(torch.randn(y.shape))
    if adapted:
        return [y.detach(), x.grad]
    found = [torch.stack([each.grad for each in w]) for w in members] if listed else [w.grad for w in packed]
    return [y.detach(), x.grad, *found]


@pytest.mark.rule("MAT-3")
@pytest.mark.parametrize("adapted", [False, True], ids=["trained", "adapted"])
@pytest.mark.parametrize("format", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["grouped_linear", "grouped_mlp", "routed_mlp"])
def test_a_list_is_rounded_to_a_plain_format_that_dgrad_reads(name: str, format: str, adapted: bool) -> None:
    recipe = recipes.MXFP8.replace(name="plain dgrad", dgrad=(FORMATS[format], FORMATS[format]))
    found, wanted = (_one_pass(name, recipe, listed=listed, adapted=adapted) for listed in (True, False))
    same(found, wanted, name)


@pytest.mark.rule("ALL-1")
@by_recipe
def test_a_composed_sequential_has_the_bits_of_its_parts(recipe: Recipe) -> None:
    s = setup("Sequential_composed", False, recipe=recipe, **BF16)
    own = [scaling_state(recipe, len(s.sizes)) if recipe.delayed else None for _ in range(2)]
    x, (wi, wo) = leaf(s.x), [leaf(each) for each in s.weights]
    manual_seed(5)
    bound = [recipe.bind(own[0], drawn_key() if recipe.stochastic else None)]
    h = grouped_linear(x, wi, s.sizes, recipe=bound[0])
    z = scaled_activation_rows(h, s.probs, Activation("swiglu"), s.sizes)
    bound.append(recipe.bind(own[1], drawn_key() if recipe.stochastic else None))
    y = grouped_linear(z, wo, s.sizes, recipe=bound[1])
    y.backward(s.dy)
    same(seeded(s, 5), [y, x.grad, wi.grad, wo.grad])


@pytest.mark.rule("ALL-1")
@by_recipe
@pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
@by_form
def test_passes_without_gradients_have_the_bits_of_others(form: str, listed: bool, recipe: Recipe) -> None:
    """Then products quantise their operands; with a cache only the weights are quantised before."""
    s = setup(form, listed, recipe=recipe, **BF16)
    for state in states(s.module):
        state.scale.mul_(torch.linspace(0.5, 4, state.scale.numel()).view_as(state.scale))
    wanted = s.run(leaf(s.x)).detach()
    with torch.no_grad(), counted_launches() as calls:
        asserts.bitwise(s.run(s.x), wanted)
    assert "quantize" in calls
    with torch.no_grad():
        for first in (True, False):
            asserts.bitwise(s.run(s.x, is_first_microbatch=first), wanted)


class _Torch(TorchDispatchMode):
    """Notes the operators of torch's own that run, views apart."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@by_form
def test_magnitudes_are_raised_by_the_launches_that_store(form: str) -> None:
    """Of torch's own kernels only a copy of the scales runs, one per operation; without gradients the state stays."""
    s = setup(form, False, recipe=DELAYED, **BF16)
    names = {}
    for recipe in (recipes.FP8Current, DELAYED):
        one = s if recipe.delayed else setup(form, False, recipe=recipe, **BF16)
        with torch.no_grad(), _Torch() as seen:
            one.run(one.x)
        assert not {"aten.abs.default", "aten.cat.default"} & set(seen.names)
        assert not any(state.history.any() for state in states(one.module))
        x = leaf(one.x)
        with _Torch() as seen:
            one.run(x).backward(one.dy)
        names[recipe.name] = seen.names
        for state in states(one.module):
            roles = state.history[:, 0].amax(-1)
            assert (roles > 0).all(), roles
            assert not state.history[:, 1:].any()
    copies = ["aten.cat.default" if form == "Sequential_fused" else "aten.abs.default"]
    copies *= 2 if form == "Sequential_composed" else 1
    assert sorted(names[DELAYED.name]) == sorted(names["FP8Current"] + copies)


@pytest.mark.rule("CAP-3")
def test_each_pass_draws_a_key_of_its_own() -> None:
    s = setup("GroupedLinear", False, recipe=recipes.NVFP4, **BF16)
    manual_seed(1)
    x = [leaf(s.x) for _ in range(2)]
    for each in x:
        s.run(each).backward(s.dy)
    assert not torch.equal(x[0].grad, x[1].grad)
    s.module.eval()
    state = torch.get_rng_state()
    with torch.no_grad():
        s.run(s.x)
    assert torch.equal(torch.get_rng_state(), state), "nothing is rounded at random in forward"


@pytest.mark.rule("GRD-1", "DLY-3", "MAT-11")
@by_recipe
@pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
@by_form
def test_main_grad_and_delayed_gradients(form: str, listed: bool, recipe: Recipe) -> None:
    """Two microbatches: into `main_grad` at once, and later, are the same bits; overwriting leaves the last one."""
    found = []
    for delay in (False, True):
        s = setup(form, listed, accumulate=True, delay=delay, recipe=recipe, **BF16)
        main_grads(s.weights, 0.5)
        for weight in s.weights:
            weight.grad_added_to_main_grad = False
        for seed in (1, 2):
            manual_seed(seed)
            s.run(leaf(s.x)).backward(s.dy)
        if delay:
            assert all((weight.main_grad == 0.5).all() for weight in s.weights)
            assert s.module.pending_wgrads() == 2
            s.module.backward_dw(all=True)
        assert all(weight.grad_added_to_main_grad for weight in s.weights)
        found.append([weight.main_grad.clone() for weight in s.weights])
    same(found[1], found[0])
    s = setup(form, listed, accumulate=True, recipe=recipe, **BF16)
    main_grads(s.weights, float("nan"))
    for weight in s.weights:
        weight.overwrite_main_grad = True
    manual_seed(2)
    s.run(leaf(s.x)).backward(s.dy)
    plain = setup(form, listed, recipe=recipe, **BF16)
    for weight, wanted in zip(s.weights, seeded(plain, 2)[2:], strict=True):
        asserts.bitwise(weight.main_grad.view(weight.shape).bfloat16(), wanted)


@pytest.mark.rule("BUF-1", "BUF-3")
@by_recipe
@by_form
def test_buffers_of_the_caller(form: str, recipe: Recipe) -> None:
    case = {**BF16, "case": "tail"}
    s, other = (setup(form, False, recipe=recipe, **case) for _ in range(2))
    valid = int(s.sizes.clamp(min=0).sum())
    out = torch.full_like(s.dy, 7.0)
    grad = torch.full_like(s.x, 7.0)
    buffers: Any = {"out": out, "grad_input": grad}
    if form.startswith("Sequential"):
        buffers = {"op_kwargs": {0: {"grad_input": grad}, 2: {"out": out}}}
    y, dx, *_ = seeded(s, 3, **buffers)
    assert y.data_ptr() == out.data_ptr()
    asserts.bitwise(dx, grad)  # of a leaf: a copy
    wanted = seeded(other, 3)
    for a, b in ((out, wanted[0]), (grad, wanted[1])):
        asserts.bitwise(a[:valid], b[:valid])
        asserts.filled(a[valid:], 7.0)


@pytest.mark.rule("BUF-2")
@pytest.mark.parametrize("form", ["GroupedLinear", "GroupedMLP"])
def test_buffers_that_do_not_fit_are_refused(form: str) -> None:
    s = setup(form, False, recipe=recipes.MXFP8, **BF16)
    x, y, grad = leaf(s.x), torch.empty_like(s.dy), torch.empty_like(s.x)
    for rows, keywords, words in (
        (s.x, {"grad_input": grad}, ["`grad_input`", "needs no gradient", "leave it out"]),
        (x, {"grad_input": grad[:-1]}, ["`grad_input`", str(len(grad) - 1)]),
        (x, {"grad_input": grad.float()}, ["`grad_input`", "float32"]),
        (x, {"grad_input": x.detach()}, ["`grad_input`", "overlaps", "allocate one"]),
        (x, {"out": y[1:]}, ["`out`", str(len(y) - 1)]),
        (x, {"out": y.float()}, ["`out`", "float32"]),
        (x, {"out": leaf(y)}, ["`out`", "requires_grad", "detach()"]),
    ):
        with asserts.refused(ValueError, words):
            s.run(rows, **keywords)


@pytest.mark.rule("MLP-13")
@pytest.mark.parametrize("recipe", [recipes.MXFP8, recipes.FP8Current], ids=lambda r: r.name)
def test_rows_that_come_quantised(recipe: Recipe) -> None:
    s = setup("GroupedLinear", False, recipe=recipe, **BF16)
    x = quantize(s.x, recipe.forward[0], axis=(1, 0), group_sizes=s.sizes)
    asserts.bitwise(s.module(x, s.sizes), s.module(s.x, s.sizes))


@pytest.mark.rule("MAT-6")
@pytest.mark.parametrize("form", MODULES)
def test_autocast_computes_in_its_dtype(form: str) -> None:
    s, narrow = (setup(form, True, dtype=dtype, recipe=recipes.MXFP8) for dtype in ("float32", "bfloat16"))
    with torch.no_grad():
        for weight, cast in zip(s.weights, narrow.weights, strict=True):
            cast.copy_(weight)
    with torch.autocast("cpu", torch.bfloat16):
        y = s.run(leaf(s.x))
    asserts.bitwise(y, narrow.run(leaf(s.x.bfloat16())))


# ---------------------------------------------------------------------------------------------------------------------
# Planning


@pytest.mark.rule("ERR-3")
@pytest.mark.matrix(
    form=FUNCTIONS,
    recipe=(None, *ALL),
    listed=(False, True),
    accumulate=(False, True),
    buffers=(False, True),
    frozen=(False, True),
    scaled=(False, True),
    valid=lambda form, accumulate, frozen, scaled: (
        not (accumulate and frozen) and not (scaled and form != "grouped_linear")
    ),
)
def test_explain_names_every_launch(
    form: str, recipe: Recipe | None, listed: bool, accumulate: bool, buffers: bool, frozen: bool, scaled: bool
) -> None:
    """Quantisers included, in their order; nothing runs, and no state or Parameter changes."""
    s = setup(form, listed, recipe=recipe, **BF16)
    half = len(s.weights) if form == "grouped_linear" else len(s.weights) // 2
    parts = [s.weights[:half], s.weights[half:]][: len(s.weights) // half]
    weights = [part if listed else part[0] for part in parts]
    x = leaf(s.x)
    options: dict[str, Any] = {"recipe": recipe and recipe.bind(s.state, drawn_key() if recipe.stochastic else None)}
    if accumulate:
        main_grads(s.weights, 0.5)
        options["wgrad_accum"] = "main_grad"
    if buffers:
        options |= {"out": torch.empty_like(s.dy), "grad_input": torch.empty_like(s.x)}
    for weight in s.weights:
        weight.requires_grad_(not frozen)
    if form == "grouped_mlp":
        options["probs"] = leaf(s.probs)
    elif scaled:
        options["row_scale"] = leaf(s.probs)
    operation = getattr(torch_bridge, form)
    held = None if s.state is None else s.state.history.clone()
    text = torch_bridge.explain(operation, x, *weights, s.sizes, **options)
    assert torch_bridge.why_unsupported(operation, x, *weights, s.sizes, **options) is None
    if held is not None:
        assert s.state is not None
        asserts.bitwise(s.state.history, held)
    with counted_launches() as calls:
        operation(x, *weights, s.sizes, **options).backward(s.dy)
    lines = [line.split(" ->")[0] for line in text.splitlines() if " -> " in line]
    assert lines == calls, text
    assert (recipe is None) == ("quantize ->" not in text)
    assert text.count(", listed: quantize_") == (lines.count("quantize") and listed and len(parts)), text


@pytest.mark.rule("ERR-2", "ERR-3")
def test_explain_of_recipes_needs_neither_device_nor_weights() -> None:
    x = torch.empty(1000, 256, dtype=torch.bfloat16, device="meta", requires_grad=True)
    w = torch.empty(8, 128, 256, dtype=torch.bfloat16, device="meta", requires_grad=True)
    sizes = torch.empty(8, dtype=torch.int32, device="meta")
    state = scaling_state(DELAYED, 8, device="meta")
    for recipe in (*RECIPES[1:], DELAYED.bind(state)):
        text = torch_bridge.explain(grouped_linear, x, w, sizes, recipe=recipe, arch="cpu")
        assert "quantize_any_cpu on cpu" in text
        assert text.count("grouped_matmul ->") == 3
    refused = torch_bridge.why_unsupported(grouped_linear, x, w, sizes, recipe=DELAYED, arch="cpu")
    assert refused is not None
    assert "scaling_state" in refused
    text = torch_bridge.explain(quantize, x, "mxfp8", axis=(1, 0), group_sizes=sizes, arch="cpu")
    assert text.count("quantize_any_cpu on cpu") == 1, "both forms come from one call"
    assert "mxfp4 for rows" in (torch_bridge.why_unsupported(quantize, x, "mxfp4", group_sizes=sizes) or "")
    q: Any = quantize(torch.randn(2, 32, 64), "mxfp4")
    assert "dequantize_any_cpu on cpu" in torch_bridge.explain(torch_bridge.dequantize, q)
    assert torch_bridge.why_unsupported(torch_bridge.dequantize, q) is None
    assert "expected a QTensor" in (torch_bridge.why_unsupported(torch_bridge.dequantize, x) or "")
    text = torch_bridge.explain(grouped_linear, torch.randn(5, 64), q, [2, 3])
    assert text.startswith("grouped_matmul ->"), "quantised already"


@pytest.mark.rule("ERR-3")
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("recipe", RECIPES[1:], ids=lambda r: r.name)
def test_explain_names_the_quantiser_of_each_operand(recipe: Recipe, listed: bool) -> None:
    """By what it reads: shape and dtype, and whether a list's addresses give it."""
    x = torch.empty(1000, 256, device="meta", requires_grad=True)
    weights = [torch.empty(128, 256, device="meta", requires_grad=True) for _ in range(8)]
    w: Any = weights if listed else torch.empty(8, 128, 256, device="meta", requires_grad=True)
    sizes = torch.empty(8, dtype=torch.int32, device="meta")
    text = torch_bridge.explain(grouped_linear, x, w, sizes, recipe=recipe, arch="cpu")
    for source in ("float32[1000, 256]", "float32[1000, 128]", f"float32[8, 128, 256]{', listed' if listed else ''}"):
        assert f" of {source}: quantize_any_cpu on cpu" in text, text


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize("name", ["scale", "history"])
@pytest.mark.parametrize("function", [grouped_linear, grouped_mlp])
def test_a_state_that_no_kernel_can_read_is_refused(function: Any, name: str) -> None:
    """An operator that is given one meta tensor makes tensors of nothing."""
    weights = [torch.ones(2, 8, 8), torch.ones(2, 8, 4)][: 1 if function is grouped_linear else 2]
    state = scaling_state(DELAYED, 2, products=len(weights))
    held = getattr(state, name)
    for wrong, kind, words in (
        (held.to("meta"), ValueError, ["on meta", "expected cpu", "move it"]),
        (held.mT.contiguous().mT, ValueError, ["strides", "expected a contiguous tensor", "call"]),
        (held.numpy(), TypeError, ["ndarray", "expected a torch.Tensor", "convert it"]),
    ):
        bound = DELAYED.bind(replace(state, **{name: wrong}))
        with asserts.refused(kind, [f"`state.{name}`", *words]):
            function(torch.ones(4, 8), *weights, torch.tensor([3, 1]), recipe=bound)


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize("function", [dequantize, lambda q: straight_through(torch.ones(2, 3), q)])
def test_what_is_not_quantised_is_refused(function: Any) -> None:
    with asserts.refused(TypeError, ["`q`", "Tensor", "expected a QTensor", "make one with quantize"]):
        function(torch.ones(2, 3))


@pytest.mark.rule("ERR-1", "QNT-8")
def test_a_master_has_floats() -> None:
    with asserts.refused(TypeError, ["`master`", "int32", "floats, which have a gradient", "cast it"]):
        straight_through(torch.ones((1, 32, 32), dtype=torch.int32), quantize(torch.ones(1, 32, 32), "mxfp8", axis=1))
    with asserts.refused(TypeError, ["`master`", "float64", "at most 32 bits, as gradients have", "cast it"]):
        straight_through(torch.ones(1, 32, 32).double(), quantize(torch.ones(1, 32, 32), "mxfp8", axis=1))


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script:DeprecationWarning", "ignore:.*torch.jit.script:FutureWarning"
)  # torch's own
@pytest.mark.rule("ERR-1", "QNT-8")
def test_a_dual_master_is_refused() -> None:
    """A tangent would be dropped in silence."""
    x, weight, sizes = torch.randn(4, 32), torch.randn(2, 32, 32), torch.tensor([3, 1])
    rows, held = quantize(x, "mxfp8"), quantize(weight, "mxfp8", axis=(2, 1))
    with torch.autograd.forward_ad.dual_level():
        dual_x, dual = (torch.autograd.forward_ad.make_dual(each, torch.ones_like(each)) for each in (x, weight))
        calls: tuple[tuple[Any, tuple[Any, ...]], ...] = (
            (grouped_linear, (x, straight_through(dual, held))),
            (grouped_linear, (straight_through(dual_x, rows), held)),
            (grouped_mlp, (x, held, straight_through(dual, held))),
        )
        for function, operands in calls:
            with asserts.refused(NotImplementedError, [function.__name__, "a dual tensor", "plain tensors"]):
                function(*operands, sizes, recipe=recipes.MXFP8)
        grouped_linear(x, straight_through(weight, held), sizes, recipe=recipes.MXFP8)
        layer = nn.GroupedLinear(2, 32, 32, quantized_weights=True, recipe=recipes.MXFP8)
        layer(x, sizes)


@pytest.mark.rule("ERR-1")
def test_parts_on_different_devices_are_not_dequantised() -> None:
    q = quantize(torch.ones(2, 3, 4), "mxfp8")
    scales: Any = q.scales
    with asserts.refused(ValueError, ["`q`", "on meta", "expected cpu", "move it"]):
        dequantize(replace(q, scales=scales.to("meta")))


# ---------------------------------------------------------------------------------------------------------------------
# The weight cache


@pytest.mark.rule("QNT-5", "MLP-10")
@pytest.mark.parametrize("recipe", [DELAYED, recipes.FP8Block], ids=lambda r: r.name)
@pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
@pytest.mark.parametrize("form", ["GroupedLinear", "GroupedMLP"])
def test_weights_saved_as_they_came_have_the_same_bits_beside_a_cache(form: str, listed: bool, recipe: Recipe) -> None:
    """The layer then caches what forward reads alone, and backward quantises the Parameter."""
    found = []
    for saved in recipes.SAVED:
        one = setup(form, listed, recipe=recipe.replace(saved_weights=saved), **BF16)
        found.append(
            [each for at, first in enumerate((True, False)) for each in seeded(one, at, is_first_microbatch=first)]
        )
        with counted_launches() as calls:
            seeded(one, 2, is_first_microbatch=False)
        found[-1].append(calls.count("quantize"))
    weights = 2 if form == "GroupedMLP" else 1
    assert found[1].pop() == found[0].pop() + weights
    same(found[1], found[0])


@pytest.mark.rule("QNT-5", "MLP-10")
@pytest.mark.parametrize("recipe", [DELAYED, recipes.FP8Current], ids=lambda r: r.name)
@pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
@pytest.mark.parametrize("form", ["GroupedLinear", "GroupedMLP"])
@pytest.mark.parametrize("held", [False, True], ids=["cached", "quantized_weights"])
def test_one_form_of_weights_serves_both_products(form: str, listed: bool, recipe: Recipe, held: bool) -> None:
    """With `saved_weights="forward"` caches and quantised Parameters have a byte per weight, and bits do not change."""
    found, codes = [], []
    for saved in ("quantized", "forward", "auto"):
        one = setup(form, listed, recipe=recipe.replace(saved_weights=saved), quantized=held, **BF16)
        found.append(
            [each for at, first in enumerate((True, False)) for each in seeded(one, at, is_first_microbatch=first)]
        )
        of_layers = [weight.q for weight in one.weights] if held else []
        of_layers += [q for linear in one.linears or [one.module] for q in linear.cache._forms.values()]
        codes.append(sum(form.values.numel() for q in of_layers for form in forms_of(q)))
    same(found[1], found[0])
    same(found[2], found[0])
    assert 0 < codes[1] == codes[0] // 2
    assert codes[2] == codes[0], "what is kept for further passes has both forms"


@pytest.mark.rule("QNT-5")
@pytest.mark.parametrize("by_flag", [False, True], ids=["first microbatch", "flag"])
@pytest.mark.parametrize("form", ["GroupedLinear", "GroupedMLP"])
def test_amaxes_of_weights_are_found_where_an_evaluation_fills_the_cache(form: str, by_flag: bool) -> None:
    """The first pass that trains merges them, so that the state is that of a layer without a cache."""
    states = []
    for cached in (False, True):
        one = setup(form, False, recipe=DELAYED, **BF16)
        for step in range(3):
            with torch.no_grad():
                for weight in one.weights:
                    weight.mul_(1.5)
            first, later = (True, False) if cached and not by_flag else (None, None)
            for at, (flag, train) in enumerate(((first, False), (later, True), (later, True))):
                if cached and by_flag:
                    one.module.set_weight_update(step == 0 or at == 0)  # the first step makes all forms
                with nullcontext() if train else torch.no_grad():
                    y = one.module(one.x, one.sizes, is_first_microbatch=flag)
                if train:
                    y.backward(one.dy)
            state = one.module.scaling_state
            states.append((cached, step, state.history.clone(), state.scale.clone()))
            update_scaling(state)
    for (_, step, *plain), (_, _, *held) in zip(states[:3], states[3:], strict=True):
        for got, wanted in zip(held, plain, strict=True):
            asserts.bitwise(got, wanted, f"step {step}")


def _linear_of(recipe: Recipe) -> tuple[Any, Callable[..., Tensor]]:
    """A layer, and a pass of it, which gives the gradient of x, or y where it does not train."""
    manual_seed(0)
    layer = nn.GroupedLinear(2, 32, 32, bias=False, dtype=torch.bfloat16, recipe=recipe, single_grouped_weight=True)
    rows, sizes = torch.randn(8, 32).bfloat16(), torch.tensor([4, 4], dtype=torch.int32)

    def run(first: bool | None = None, *, trains: bool = True, of_x: bool = True) -> Any:
        x = rows.clone().requires_grad_(of_x)
        with nullcontext() if trains else torch.no_grad():
            y = layer(x, sizes, is_first_microbatch=first)
        if trains:
            y.float().sum().backward()
        return x.grad if trains else y

    return layer, run


@pytest.mark.rule("QNT-6")
@pytest.mark.parametrize("recipe", [DELAYED, recipes.FP8Current], ids=lambda r: r.name)
def test_a_flag_that_is_false_keeps_codes_of_older_weights(recipe: Recipe) -> None:
    """A pass that looks for their amax does not write them, as a replay would not."""
    layer, run = _linear_of(recipe)
    layer.set_weight_update(True)
    run()
    with torch.no_grad():
        layer.weight.mul_(1.5)
    kept = run(trains=False)
    with torch.no_grad():
        layer.weight.mul_(-3)
    layer.set_weight_update(False)
    asserts.bitwise(run(trains=False), kept)
    run()
    asserts.bitwise(run(trains=False), kept)


@pytest.mark.rule("QNT-5", "QNT-6")
@pytest.mark.parametrize("base", [DELAYED, recipes.FP8Current, recipes.FP8Block], ids=lambda r: r.name)
def test_passes_that_read_no_form_update_those_of_others(base: Recipe) -> None:
    """Forward reads the weight itself, so that a pass without dx wants none of its forms."""
    layer, run = _linear_of(base.replace(name="plain forward", forward=recipes.BF16.forward))
    layer.set_weight_update(True)
    run()
    with torch.no_grad():
        layer.weight.mul_(-3)
    run(trains=False)
    layer.set_weight_update(False)
    found = run()
    layer.set_weight_update(True)
    asserts.bitwise(run(), found)


@pytest.mark.rule("QNT-5", "CAP-3")
@pytest.mark.parametrize("recipe", [DELAYED, recipes.MXFP8], ids=lambda r: r.name)
def test_a_captured_pass_makes_what_a_captured_update_does_not(monkeypatch: pytest.MonkeyPatch, recipe: Recipe) -> None:
    """An evaluation neither makes the form that dgrad reads nor merges the amax of weights, and when its graph has been
    replayed no Python notices that. What stands for a capture runs here, as a replay would."""
    layer, run = _linear_of(recipe)
    run(True, trains=False)
    with monkeypatch.context() as patched:
        patched.setattr(_cache, "capture_on", lambda device: 1)
        run(True, trains=False)
    expected = run(True)
    for form in layer.cache._forms.values():
        if form.axis != 2:
            form.values.view(torch.uint8).zero_()
    if recipe.delayed:
        layer.scaling_state.history.zero_()
    with monkeypatch.context() as patched:
        patched.setattr(_cache, "capture_on", lambda device: 2)
        asserts.bitwise(run(False), expected)
    if recipe.delayed:
        assert bool((layer.scaling_state.history[1, 0] > 0).all()), "amaxes of the weights"


@pytest.mark.rule("QNT-5", "CAP-3")
def test_an_update_writes_what_a_captured_pass_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that reads less: the graph may be replayed after it."""
    layer, run = _linear_of(recipes.MXFP8)
    expected = run(True)
    with monkeypatch.context() as patched:
        patched.setattr(_cache, "capture_on", lambda device: 1)
        run(False)
    for form in layer.cache._forms.values():
        form.values.view(torch.uint8).zero_()
    run(True, trains=False)
    asserts.bitwise(run(False), expected)


@pytest.mark.rule("QNT-6", "CAP-3", "ERR-1")
def test_under_a_flag_all_forms_are_made_before_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that evaluates, captured first, would leave the form of dgrad as it is at each update."""
    layer, run = _linear_of(recipes.MXFP8)
    layer.set_weight_update(True)
    run(trains=False)
    with monkeypatch.context() as patched:
        patched.setattr(_cache, "capture_on", lambda device: 1)
        run(trains=False)
    with asserts.refused(
        RuntimeError, ["weight cache of", "another form", "before the first capture", "a copy of the layer"]
    ):
        run()
    run(trains=False)


@pytest.mark.rule("QNT-6", "CAP-3")
@pytest.mark.parametrize("trains", [False, True])
def test_a_capture_under_a_flag_is_no_update(monkeypatch: pytest.MonkeyPatch, trains: bool) -> None:
    """Neither do later passes take codes for those of the weights that it saw, nor does a pending backward."""
    layer, run = _linear_of(recipes.MXFP8)
    layer.set_weight_update(True)
    expected = run()
    y = layer(torch.ones(8, 32, dtype=torch.bfloat16).requires_grad_(), torch.tensor([4, 4], dtype=torch.int32))
    with torch.no_grad():
        layer.weight.mul_(-3)
    layer.set_weight_update(False)
    with monkeypatch.context() as patched:
        patched.setattr(_cache, "capture_on", lambda device: 1)
        run(trains=trains)
    asserts.bitwise(run(), expected)
    layer.set_weight_update(True)
    run(trains=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.float().sum().backward()


@pytest.mark.rule("QNT-5")
def test_an_update_is_one_whatever_the_versions_say() -> None:
    """Writes through `.data` do not count; the form that an evaluation does not make is older than the weights then."""
    layer, run = _linear_of(recipes.MXFP8)
    run(True)
    layer.weight.data.mul_(-3)
    run(True, trains=False)
    found = run(False)
    asserts.bitwise(found, run(True))


@pytest.mark.rule("QNT-5")
def test_forms_of_an_older_scale_are_made_again() -> None:
    """Scales change without the weights where an optimizer skips a step, and an evaluation makes one form alone."""
    (plain, run_plain), (held, run_held) = _linear_of(DELAYED), _linear_of(DELAYED)

    def both(first: bool, **options: bool) -> tuple[Tensor, Tensor]:
        return run_plain(None, **options), run_held(first, **options)

    def change(factor: float) -> None:
        both(True)
        with torch.no_grad():
            for layer in (plain, held):
                layer.weight.mul_(factor)
        both(True)
        for layer in (plain, held):
            update_scaling(layer.scaling_state)

    change(1.0)
    change(1.7)
    both(True, trains=False)
    both(False, of_x=False)
    wanted, found = both(False)
    asserts.bitwise(found, wanted)


@pytest.mark.rule("QNT-5")
@pytest.mark.parametrize("recipe", [DELAYED, recipes.FP8Current, recipes.FP8Block, recipes.NVFP4], ids=lambda r: r.name)
def test_selective_checkpointing_fills_an_empty_cache(recipe: Recipe) -> None:
    context = partial(create_selective_checkpoint_contexts, list(nn.save_list()))
    found = []
    for selective in (False, True):
        manual_seed(0)
        layer = nn.GroupedMLP(2, 32, 32, dtype=torch.bfloat16, recipe=recipe)
        x, sizes = leaf(torch.randn(8, 32).bfloat16()), torch.tensor([3, 5], dtype=torch.int32)
        for first in (True, False):
            forward = partial(layer, group_sizes=sizes, is_first_microbatch=first)
            y = checkpoint(forward, x, use_reentrant=False, context_fn=context) if selective else forward(x)
            y.sum().backward()
        found.append([x.grad, *(each.grad for each in layer.parameters())])
    same(found[1], found[0])


@pytest.mark.rule("MLP-10")
@by_recipe
@pytest.mark.parametrize("layer", [nn.GroupedMLP, nn.MoE])
def test_what_a_recipe_keeps_changes_no_bits(layer: type, recipe: Recipe) -> None:
    """With `saved="input"` backward makes the forms of x and dy for wgrad in passes of their own."""
    found = []
    for saved in ("quantized", "input"):
        manual_seed(0)
        sizes = (3, 32, 48) if layer is nn.GroupedMLP else (32, 48, 3, 2)
        module = layer(*sizes, recipe=recipe.replace(saved=saved), dtype=torch.bfloat16)
        found.append([])
        for _ in range(2):
            x = leaf(torch.randn(11, 32).bfloat16())
            y = module(x, torch.tensor([4, 0, 5])) if layer is nn.GroupedMLP else module(x)[0]
            y.backward(torch.randn(11, 32).bfloat16())
            found[-1] += [y.detach(), x.grad]
            for state in states(module):
                update_scaling(state)
                found[-1] += [state.scale.clone(), state.history.clone()]
        found[-1] += [weight.grad for weight in module.parameters()]
    same(found[1], found[0])


@pytest.mark.rule("QNT-5")
def test_a_cache_follows_the_number_of_experts() -> None:
    """As `parallel.shard_experts` changes it: forms of other weights are not written into."""
    x = torch.randn(12, 32).bfloat16()
    found: list[Any] = []
    for groups in ((2,), (4, 2), (1, 2)):
        manual_seed(0)
        weights = {count: torch.randn(count, 48, 32).bfloat16() for count in (2, 4, 1)}
        options: dict[str, Any] = {"bias": False, "dtype": torch.bfloat16, "single_grouped_weight": True}
        layer = nn.GroupedLinear(groups[0], 32, 48, recipe=recipes.FP8Block, **options)
        found.append(None)
        for count in groups:
            layer.weight, layer.num_groups = torch.nn.Parameter(weights[count]), count
            found[-1] = layer(x, torch.tensor([12 // count] * count), is_first_microbatch=True).detach()
    same(found[1:], [found[0]] * 2)


@pytest.mark.rule("MAT-2", "ERR-1")
def test_a_weight_without_the_form_of_dgrad_is_told_of_the_recipe_that_needs_none() -> None:
    x, w = leaf(torch.randn(4, 48).bfloat16()), torch.randn(2, 32, 48).bfloat16()
    sizes = torch.tensor([3, 1], dtype=torch.int32)
    one = quantize(w, "fp8_tensor", axis=2)
    for saved in ("auto", "quantized", "input"):  # the last one would read it in backward alone
        recipe = recipes.FP8Current.replace(saved_weights=saved)
        words = ["fp8_tensor along axis 2", "saved_weights='forward'", "requantize"]
        with asserts.refused(ValueError, ["`weight`: ", *words]):
            grouped_linear(x, one, sizes, rhs_transposed=True, recipe=recipe)
        for policy in ("save_fc1", "save_input"):
            wo = torch.randn(2, 48, 16).bfloat16()
            with asserts.refused(ValueError, ["`wi`: ", *words]):
                grouped_mlp(x, one, wo, sizes, rhs_transposed=True, recipe=recipe, residuals=policy)
    with asserts.refused(ValueError, ["mxfp8 along axis 2"]) as message:
        grouped_linear(x, quantize(w, "mxfp8", axis=2), sizes, rhs_transposed=True, recipe=recipes.MXFP8)
    assert "saved_weights" not in message[0]
    rows = quantize(x.detach(), recipes.FP8Current.forward[0], axis=(1, 0), group_sizes=sizes)
    for recipe in (None, recipes.FP8Current.replace(name="plain wgrad", wgrad=recipes.BF16.wgrad)):
        with asserts.refused(ValueError, ["`x`: ", "expected bf16 along axis 0", "a recipe that reads its format"]):
            grouped_linear(rows, leaf(torch.randn(2, 32, 48).bfloat16()), sizes, rhs_transposed=True, recipe=recipe)
    forward = recipes.FP8Current.replace(saved_weights="forward")
    grouped_linear(x, one, sizes, rhs_transposed=True, recipe=forward).sum().backward()
    assert x.grad is not None


@pytest.mark.rule("QNT-5", "MLP-2", "MLP-10")
@pytest.mark.parametrize("recipe", [DELAYED, recipes.FP8Block, recipes.MXFP8], ids=lambda r: r.name)
@pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
def test_first_weights_are_quantised_again_in_backward_beside_a_cache(listed: bool, recipe: Recipe) -> None:
    """`save_input` then needs the cached form to make the hidden rows again, and the Parameter for dx."""
    found: list[list[Any]] = []
    sizes = torch.tensor([4, 0, 5], dtype=torch.int32)
    for policy in ("save_fc1", "save_input"):
        manual_seed(0)
        options: dict[str, Any] = {"recipe": recipe.replace(saved_weights="input"), "dtype": torch.bfloat16}
        module = nn.GroupedMLP(3, 48, 32, residuals=policy, single_grouped_weight=not listed, **options)
        found.append([])
        for first in (True, False):
            x = leaf(torch.randn(11, 48).bfloat16())
            y = module(x, sizes, is_first_microbatch=first)
            y.backward(torch.ones_like(y))
            found[-1] += [y.detach(), x.grad]
        found[-1] += [weight.grad for weight in module.parameters()]
    same(found[1], found[0])


@pytest.mark.rule("QNT-5", "GRD-11")
@by_recipe
@pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
@by_form
def test_microbatches_reuse_the_forms_of_the_first(form: str, listed: bool, recipe: Recipe) -> None:
    s, plain = (setup(form, listed, recipe=recipe, **BF16) for _ in range(2))
    for step in range(2):
        for at, first in enumerate((True, False, False)):
            with counted_launches() as calls:
                found = seeded(s, at, is_first_microbatch=first)
            with counted_launches() as all_calls:
                wanted = seeded(plain, at)
            same(found, wanted, f"of microbatch {at} in step {step}")
            saved = all_calls.count("quantize") - calls.count("quantize")
            assert saved == (0 if first else len(s.linears)), (calls, all_calls)
        for one in (s, plain):
            with torch.no_grad():
                for weight in one.weights:
                    weight.mul_(1.25)
            for state in states(one.module):
                update_scaling(state)
    if recipe.delayed:
        for a, b in zip(states(s.module), states(plain.module), strict=True):
            asserts.bitwise(a.scale, b.scale)
            asserts.bitwise(a.history, b.history)


@pytest.mark.rule("QNT-5", "MAT-6")
@by_form
def test_autocast_does_not_read_forms_of_another_dtype(form: str) -> None:
    """The weights have not changed, and yet what a pass in another dtype would store of them is something else."""
    s, plain = (setup(form, True, recipe=recipes.MXFP8) for _ in range(2))

    def passed(one: Setup, narrow: bool, **keywords: Any) -> list[Tensor]:
        x = leaf(one.x)
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            y = one.run(x, **keywords)
        return [y, *torch.autograd.grad(y, (x, *one.weights), one.dy.to(y.dtype))]

    for at, narrow in enumerate((False, True, False, True)):
        same(passed(s, narrow, is_first_microbatch=at == 0), passed(plain, narrow), f"of microbatch {at}")


@pytest.mark.rule("QNT-5")
@by_form
def test_a_cache_that_is_empty_or_old_is_refused(form: str) -> None:
    s = setup(form, True, recipe=recipes.MXFP8, **BF16)
    empty, old = ["weight cache", "empty", "is_first_microbatch=True"], ["weight cache", "written since"]
    with asserts.refused(RuntimeError, empty):
        s.run(s.x, is_first_microbatch=False)
    s.run(s.x)
    with asserts.refused(RuntimeError, empty):
        s.run(s.x, is_first_microbatch=False)
    s.run(s.x, is_first_microbatch=True)
    s.run(s.x, is_first_microbatch=False)
    with torch.no_grad():
        s.weights[-1].mul_(2)
    with asserts.refused(RuntimeError, old):
        s.run(s.x, is_first_microbatch=False)
    for weight in s.weights:
        weight.__fsdp_param__ = True  # gathered again: versions do not show changes
    s.run(s.x, is_first_microbatch=True)
    with torch.no_grad():
        s.weights[-1].mul_(2)
    s.run(s.x, is_first_microbatch=False)
    extra = (s.sizes, s.probs, s.sizes)[: {"GroupedLinear": 1, "GroupedMLP": 2}.get(form, 3)]
    for copied in (copy.deepcopy(s.module), pickle.loads(pickle.dumps(s.module))):
        with asserts.refused(RuntimeError, empty):
            copied(s.x, *extra, is_first_microbatch=False)


@pytest.mark.rule("QNT-5")
@by_recipe
@pytest.mark.parametrize("form", ["GroupedLinear", "GroupedMLP"])
def test_a_layer_may_quantise_twice_before_backward(form: str, recipe: Recipe) -> None:
    """While weights and scales stay the same; otherwise autograd reports that a saved tensor was written."""
    s, plain = (setup(form, False, recipe=recipe, **BF16) for _ in range(2))

    def twice(s: Setup, between: Callable[[], Any] = list, **options: Any) -> list[Tensor]:
        manual_seed(1)
        first = s.run(leaf(s.x), **options)
        between()
        y = first + s.run(leaf(s.x), **options)
        return list(torch.autograd.grad(y, [each for each in s.module.parameters() if each.requires_grad], s.dy))

    for _ in range(2):
        for a, b in zip(twice(s, is_first_microbatch=True), twice(plain), strict=True):
            asserts.bitwise(a, b)
        for each in (*states(s.module), *states(plain.module)):
            update_scaling(each)

    def written() -> None:
        with torch.no_grad():
            s.weights[0].mul_(2)

    changes: list[Callable[[], Any]] = [written]
    if recipe.delayed:
        changes.append(lambda: [update_scaling(each) for each in states(s.module)])
    for change in changes:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            twice(s, change, is_first_microbatch=True)


@pytest.mark.rule("QNT-5")
def test_forms_of_a_parameter_that_was_exchanged_are_not_reused() -> None:
    """FSDP2 exchanges it when it gathers weights: the address and the version may be those of the last pass."""
    layer: Any = nn.GroupedLinear(2, 32, 32, recipe=recipes.MXFP8, single_grouped_weight=True)
    x, sizes = torch.randn(5, 32), torch.tensor([2, 3], dtype=torch.int32)

    def exchange() -> tuple[int, int]:
        layer.weight = torch.nn.Parameter(layer.weight.data)
        return layer.weight.data_ptr(), layer.weight._version

    before = exchange()
    layer(x, sizes, is_first_microbatch=True)
    layer.weight.data.mul_(2)
    assert exchange() == before
    with asserts.refused(RuntimeError, ["weight cache", "gathered again", "is_first_microbatch=True"]):
        layer(x, sizes, is_first_microbatch=False)


@pytest.mark.rule("QNT-5")
def test_a_pending_backward_does_not_read_forms_of_weights_that_were_gathered_again() -> None:
    """Megatron's FSDP gathers them into the same memory: whether their content has changed is not known."""
    layer: Any = nn.GroupedLinear(2, 32, 32, recipe=recipes.MXFP8, single_grouped_weight=True)
    layer.weight.__fsdp_param__ = True
    x, sizes = leaf(torch.randn(5, 32)), torch.tensor([2, 3], dtype=torch.int32)
    pending = layer(x, sizes, is_first_microbatch=True)
    layer.weight.data.mul_(2)
    layer(x, sizes, is_first_microbatch=True).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pending.sum().backward()


@pytest.mark.rule("QNT-5", "QNT-7")
def test_weights_of_inference_mode_have_a_cache() -> None:
    with torch.inference_mode():
        layer = nn.GroupedLinear(2, 32, 32, recipe=recipes.MXFP8)
        x, sizes = torch.randn(5, 32), torch.tensor([2, 3], dtype=torch.int32)
        y = layer(x, sizes)
        for first in (True, False):
            asserts.bitwise(layer(x, sizes, is_first_microbatch=first), y)


@pytest.mark.rule("QNT-5")
def test_a_sequential_hands_the_flag_to_the_modules_inside() -> None:
    """To nested ones, and to none of another kind."""
    inner = nn.Sequential(nn.GroupedLinear(3, 8, 16, recipe=recipes.MXFP8))
    outer = nn.Sequential(torch.nn.Identity(), inner, nn.GroupedMLP(3, 16, 8, recipe=recipes.MXFP8), nn.ScaledSReLU())
    sizes, probs = torch.tensor([5, 0, 6], dtype=torch.int32), torch.rand(11)
    layers = [each for each in outer.modules() if isinstance(each, nn.GroupedLinear)]
    x, extra = torch.randn(11, 8), (sizes, sizes, probs, probs)
    with asserts.refused(RuntimeError, ["weight cache", "empty"]):
        outer(x, *extra, is_first_microbatch=False)
    y = outer(x, *extra, is_first_microbatch=True)
    assert all(each.cache._forms for each in layers)
    asserts.bitwise(outer(x, *extra, is_first_microbatch=False), y)
    asserts.bitwise(outer(x, *extra), y)
    with asserts.refused(TypeError, ["`is_first_microbatch`", "1", "True or False"]):
        outer(x, *extra, is_first_microbatch=1)


@pytest.mark.rule("QNT-5", "QNT-6")
@by_recipe
def test_the_buffers_of_the_cache_stay_where_they_are(recipe: Recipe) -> None:
    s = setup("GroupedLinear", False, recipe=recipe, **BF16)

    def addresses() -> list[int]:
        return [form.values.data_ptr() for form in s.module.cache._forms.values()]

    seeded(s, 0, is_first_microbatch=True)
    kept = addresses()
    assert len(kept) == 2 - recipe.dgrad[1].plain
    with torch.no_grad():
        s.weights[0].mul_(2)
    seeded(s, 0, is_first_microbatch=True)
    s.module.set_weight_update(True)
    seeded(s, 0)
    assert addresses() == kept


@pytest.mark.rule("QNT-6")
@by_recipe
@pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
@by_form
def test_the_flag_decides_what_a_pass_reads(form: str, listed: bool, recipe: Recipe) -> None:
    """The quantiser is launched each time; without an update it leaves what is there, here forms of older weights."""
    s, old = (setup(form, listed, recipe=recipe, **BF16) for _ in range(2))
    with asserts.refused(RuntimeError, ["weight cache", "empty", "set_weight_update(True)"]):
        s.module.set_weight_update(False)
        s.run(leaf(s.x))
    s.module.set_weight_update(True)
    with counted_launches() as writing:
        found = seeded(s, 0)
    same(found, seeded(old, 0))
    with torch.no_grad():
        for weight in s.weights:
            weight.mul_(1.25)
    s.module.set_weight_update(False)
    held = [each.history.clone() for each in states(s.module)]
    with counted_launches() as reading:
        found = seeded(s, 1)
    assert reading == writing
    count = 1 if recipe.dgrad[1].plain else len(found)  # dgrad then reads the weights themselves
    same(found[:count], seeded(old, 1)[:count])
    same([each[1::3] for each in held], [each.history[1::3] for each in states(s.module)], "magnitudes of weights")
    s.module.set_weight_update(True)
    with torch.no_grad():
        for weight in old.weights:
            weight.mul_(1.25)
    same(seeded(s, 2), seeded(old, 2))


@pytest.mark.rule("QNT-6")
def test_several_passes_wait_for_backward_under_a_flag() -> None:
    s, plain = (setup("GroupedLinear", False, recipe=recipes.MXFP8, **BF16) for _ in range(2))
    for one in (s, plain):
        if one is s:
            one.module.set_weight_update(True)
        first = one.run(leaf(one.x))
        if one is s:
            one.module.set_weight_update(False)
        second = one.run(leaf(one.x * 2))
        first.backward(one.dy)
        second.backward(one.dy)
    asserts.bitwise(s.weights[0].grad, plain.weights[0].grad)


@pytest.mark.rule("QNT-6")
def test_a_pass_that_waits_under_a_flag_notices_that_the_weights_were_written() -> None:
    s = setup("GroupedLinear", False, recipe=recipes.MXFP8, **BF16)
    s.module.set_weight_update(True)
    waits = s.run(leaf(s.x)), s.run(leaf(s.x))  # the same weights twice
    waits[0].backward(s.dy)
    with torch.no_grad():
        s.weights[0].mul_(2)
    s.run(leaf(s.x))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        waits[1].backward(s.dy)


@pytest.mark.rule("QNT-6")
@pytest.mark.parametrize("recipe", [recipes.FP8Block, recipes.MXFP8], ids=lambda r: r.name)
def test_forms_under_a_flag_are_of_the_same_weights(recipe: Recipe) -> None:
    """A pass that reads one form alone, as in inference, writes the other ones, too."""
    s, plain = (setup("GroupedLinear", False, recipe=recipe, **BF16) for _ in range(2))
    s.module.set_weight_update(True)
    seeded(s, 0)
    with torch.no_grad():
        for one in (s, plain):
            one.weights[0].mul_(2)
        s.run(s.x)
    s.module.set_weight_update(False)
    same(seeded(s, 1), seeded(plain, 1))


@pytest.mark.rule("QNT-6")
def test_the_flag_follows_a_layer_that_moves() -> None:
    s = setup("GroupedLinear", False, recipe=recipes.MXFP8, **BF16)
    s.module.set_weight_update(False)
    s.module.set_weight_update(True)
    s.run(s.x)
    s.module.to("meta")
    s.module(s.x.to("meta"), s.sizes.to("meta"))
    assert s.module.cache._skip.device.type == "meta"


@pytest.mark.rule("QNT-7")
@pytest.mark.parametrize("recipe", [each for each in ALL if not each.dgrad[1].plain], ids=lambda r: r.name)
def test_frozen_weights_have_a_form_for_dgrad_only_if_x_needs_a_gradient(recipe: Recipe) -> None:
    s, plain = (setup("GroupedLinear", False, recipe=recipe, **BF16) for _ in range(2))
    for one in (s, plain):
        one.weights[0].requires_grad_(False)
    s.run(s.x, is_first_microbatch=True)
    assert len(s.module.cache._forms) == 1
    same(seeded(s, 0, is_first_microbatch=False), seeded(plain, 0))  # made of the same weights
    assert len(s.module.cache._forms) == 2
    with torch.inference_mode():
        asserts.bitwise(s.run(s.x, is_first_microbatch=False), plain.run(s.x))


@pytest.mark.rule("QNT-5")
def test_a_cache_filled_in_inference_serves_training() -> None:
    s, plain = (setup("GroupedLinear", False, recipe=recipes.MXFP8, **BF16) for _ in range(2))
    with torch.inference_mode():
        s.run(s.x, is_first_microbatch=True)
    same(seeded(s, 0, is_first_microbatch=False), seeded(plain, 0))


# ---------------------------------------------------------------------------------------------------------------------
# State


@pytest.mark.rule("CAP-3")
def test_the_state_is_part_of_the_layer() -> None:
    layer = nn.GroupedLinear(3, 8, 4, recipe=DELAYED)
    mlp = nn.GroupedMLP(3, 8, 4, recipe=DELAYED)
    names = {"scaling_scale", "scaling_history", "scaling_top"}
    assert {name for name, _ in layer.named_buffers()} == names
    assert {name for name, _ in mlp.named_buffers()} == names, "one state for both products"
    assert state_of(layer).scale.shape == (3, 3)
    assert state_of(mlp).scale.shape == (6, 3)
    assert nn.GroupedLinear(3, 8, 4, recipe=recipes.MXFP8).scaling_state is None
    assert nn.GroupedMLP(3, 8, 4).scaling_state is None
    sizes = torch.tensor([5, 0, 6], dtype=torch.int32)
    for module in (layer, mlp):
        module(torch.randn(11, 8), sizes).sum().backward()
        update_scaling(module.scaling_state)
        for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            asserts.bitwise(state_of(copied).history, state_of(module).history)
        module.bfloat16()
        assert state_of(module).scale.dtype == torch.float32
        other = type(module)(3, 8, 4, recipe=DELAYED)
        other.load_state_dict(module.state_dict())
        asserts.bitwise(state_of(other).scale, state_of(module).scale)
        plain = type(module)(3, 8, 4)
        other.load_state_dict(plain.state_dict())  # of another recipe: the state stays
        asserts.bitwise(state_of(other).scale, state_of(module).scale)
        other.reset_parameters()
        fresh = scaling_state(DELAYED, 3, products=2 if module is mlp else 1)
        for name in ("scale", "history", "top"):
            asserts.bitwise(getattr(other.scaling_state, name), getattr(fresh, name))


NARROW = with_e4m3_gradients(DELAYED)


@pytest.mark.rule("CAP-3")
@pytest.mark.parametrize("rounded", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("way", ["copied", "assigned", "file"])
@pytest.mark.parametrize("layer", [nn.GroupedLinear, nn.GroupedMLP])
def test_a_state_of_other_formats_becomes_one_of_the_layers(layer: Any, way: str, rounded: bool, tmp_path: Any) -> None:
    """The values that amaxes are scaled to belong to the recipe; the history serves all."""
    module, other = layer(3, 8, 4, recipe=DELAYED), layer(3, 8, 4, recipe=NARROW)
    module(torch.randn(11, 8), torch.tensor([5, 0, 6])).sum().backward()
    update_scaling(module.scaling_state)
    if rounded:
        for name in ("scale", "history"):
            held = getattr(state_of(module), name)
            held.copy_(held.bfloat16())
    if way == "file":
        torch_bridge.checkpoint.save(tmp_path / "layer.safetensors", module)
        torch_bridge.checkpoint.load(tmp_path / "layer.safetensors", other)
    else:
        entries = module.state_dict()
        if rounded:
            entries = {name: each.bfloat16() if "scaling" in name else each for name, each in entries.items()}
        other.load_state_dict(entries, assign=way == "assigned")
    old, new = state_of(module), state_of(other)
    fresh = scaling_state(NARROW, 3, products=len(old.top) // 3)
    assert old.top.max() == 57344, "a state dict is not written to"
    assert old.scale.any()
    asserts.bitwise(new.top, fresh.top)
    asserts.bitwise(new.history, old.history)
    asserts.bitwise(new.scale, old.scale * (fresh.top / old.top)[:, None])


@pytest.mark.rule("CAP-3")
def test_a_role_that_was_not_delayed_starts_with_the_value_of_the_recipe() -> None:
    current = recipes.FP8Current
    partly = DELAYED.replace(dgrad=(current.dgrad[0], DELAYED.dgrad[1]), wgrad=(DELAYED.wgrad[0], current.wgrad[1]))
    saved, layer = (nn.GroupedLinear(3, 8, 4, recipe=recipe) for recipe in (partly, DELAYED))
    wanted = state_of(layer).top.clone()
    assert (state_of(saved).top == wanted).tolist() == [True, True, False]
    layer.load_state_dict(saved.state_dict())
    asserts.bitwise(state_of(layer).top, wanted)


def test_a_state_on_the_meta_device_is_set_with_the_parameters() -> None:
    module = nn.GroupedMLP(3, 8, 4, recipe=DELAYED, device="meta").to_empty(device="cpu")
    module.reset_parameters()
    fresh = scaling_state(DELAYED, 3, products=2)
    for name in ("scale", "history", "top"):
        asserts.bitwise(getattr(module.scaling_state, name), getattr(fresh, name))


# ---------------------------------------------------------------------------------------------------------------------
# Quantised primary weights


@pytest.mark.rule("QNT-3")
def test_expand_shard_for_every_start_and_length() -> None:
    members = [torch.zeros(3), torch.zeros(5, 1), torch.zeros(2)]
    buffer = torch.arange(10.0)
    for start in range(11):
        for length in range(11 - start):
            shard = buffer[start : start + length]
            entries = params.expand_shard(members, shard, start)
            assert [entry[0] for entry in entries] == members
            owners = [(m, at) for m, member in enumerate(members) for at in range(member.numel())]
            wanted = owners[start : start + length]
            found = []
            for m, (_, part, offset) in enumerate(entries):
                assert (part is None) == (offset is None)
                if part is not None and offset is not None:
                    assert len(part), "an overlap of no elements is none"
                    assert part.data_ptr() == buffer[start:].data_ptr() + 4 * len(found)
                    found += [(m, offset + at) for at in range(len(part))]
            assert found == wanted
    entries = params.expand_shard(members, buffer[2:8], 2)
    assert [(None if p is None else p.tolist(), o) for _, p, o in entries] == [
        ([2.0], 2),
        ([3.0, 4.0, 5.0, 6.0, 7.0], 0),
        (None, None),
    ]


@pytest.mark.rule("QNT-1", "QNT-3")
def test_expand_shard_of_other_kinds() -> None:
    members = [torch.zeros(3), torch.zeros(5)]
    assert params.expand_shard(members, None, None) == [(members[0], None, None), (members[1], None, None)]
    plain, shard = torch.zeros(2, 3), torch.zeros(4)
    assert params.expand_shard(plain, shard, 1) == [(plain, shard, 1)]
    assert params.expand_shard(plain, None, 1) == [(plain, None, None)]
    for bad in ((torch.zeros(4), 5), (torch.zeros(2, 2), 0), (torch.zeros(2), -1), (torch.zeros(2), None)):
        with asserts.refused(ValueError, ["`shard`", "8 elements", "flat slice"]):
            params.expand_shard(members, *bad)
    for wrong in ((members, [0.0], 0), (members, torch.zeros(2), 2.5)):
        with asserts.refused(TypeError, ["`shard`, `start`", "expected a tensor and an integer", "flat slice"]):
            params.expand_shard(*wrong)
    with asserts.refused(TypeError, ["`members`", "NoneType", "expected a weight", "pass these"]):
        params.expand_shard(None, torch.zeros(2), 0)
    with asserts.refused(TypeError, ["`members[1]`", "int", "expected a weight"]):
        params.expand_shard([members[0], 1], torch.zeros(2), 0)
    w = torch.randn(2, 32, 64)
    q: Any = quantize(w, "mxfp8", axis=(2, 1))
    entries = params.expand_shard(q, torch.zeros(2048), 1024)
    assert [(len(part), offset) for _, part, offset in entries] == [(1024, 1024), (1024, 0)]
    for group, (member, _, _) in enumerate(entries):
        asserts.bitwise(torch_bridge.dequantize(member), torch_bridge.dequantize(q)[group : group + 1])
        assert member.values.data_ptr() == q.values[group].data_ptr()
        assert member.other.scales.data_ptr() == q.other.scales[group].data_ptr()


@pytest.mark.rule("QNT-4")
def test_one_predicate_says_what_a_quantised_weight_is() -> None:
    w = torch.randn(2, 32, 64)
    for name in ("fp8_tensor", "fp8_128x128", "mxfp8", "mxfp4", "nvfp4"):
        q: Any = quantize(w, name)
        assert params.is_quantized_weight(q)
        assert params.is_quantized_weight(q.values)
        assert params.is_quantized_weight(torch.nn.Parameter(nn.QuantizedWeight(q, packed=True)))
    tagged: Any = torch.nn.Parameter(w)
    tagged.quantizer = object()
    for other in (w, w.bfloat16(), w.int(), tagged, None, quantize):
        assert not params.is_quantized_weight(other)
