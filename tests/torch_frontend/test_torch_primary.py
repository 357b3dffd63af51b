"""Quantised primary weights in the layers of `torch_bridge.nn`: bits, gradients, writing, how they start."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grouped_core import recipes
from grouped_core.recipes import Recipe
from tests import asserts
from tests.torch_frontend.nn_tools import main_grads, setup
from tests.torch_frontend.primary_tools import (
    ONE_FORM,
    SIZES,
    addresses,
    by_form,
    by_holding,
    by_recipe,
    copies,
    layer,
    same_codes,
)
from tests.torch_frontend.recipe_tools import ALL, BF16, same, seeded
from tests.torch_frontend.torch_tools import leaf, manual_seed
from torch_bridge import dequantize, nn, params, quantize, shards, update_scaling
from torch_bridge._tensors import forms_of
from torch_bridge.quantized_weight import named_parts as parts_of

# ---------------------------------------------------------------------------------------------------------------------
# Products


@pytest.mark.rule("QNT-1")
@pytest.mark.parametrize("single", [False, True])
def test_what_is_assigned_to_data_is_written(single: bool) -> None:
    """As `vector_to_parameters` does; PyTorch's own assignment replaces memory that is not there, in silence."""
    layer = nn.GroupedLinear(2, 128, 128, recipe=recipes.MXFP8, quantized_weights=True, single_grouped_weight=single)
    weight = layer.weight_parameters()[0]
    held = layer(torch.ones(3, 128, requires_grad=True), [1, 2])
    vector = torch.nn.utils.parameters_to_vector(layer.parameters())
    torch.nn.utils.vector_to_parameters(torch.full_like(vector, 0.5), layer.parameters())
    asserts.bitwise(weight.dequantize(), torch.full(weight.shape, 0.5))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        held.sum().backward()
    with asserts.refused(ValueError, ["`data` of a quantised weight", "meta", "expected cpu", "`.to`"]):
        weight.data = torch.empty(weight.shape, device="meta")
    with asserts.refused(ValueError, ["a quantised weight", "(3,)", "its own", "pass a tensor"]):
        weight.data = torch.empty(3)


@pytest.mark.rule("ERR-1")
def test_listed_weights_are_those_of_the_layer() -> None:
    """A product reads the memory that the layer's groups share: a weight that is elsewhere would not be read."""

    def made() -> Any:
        return nn.GroupedLinear(3, 64, 64, bias=False, recipe=recipes.MXFP8, quantized_weights=True)

    x, sizes = torch.ones(9, 64), [3, 3, 3]
    plain = torch.nn.Parameter(torch.ones(64, 64))
    ours, quantised = made(), ["a quantised Parameter that", "expected the quantised one of the layer", "in place"]
    ours.weight1 = plain
    with asserts.refused(ValueError, ["`weight1` of GroupedLinear", "a plain Parameter", "replace all"]):
        ours(x, sizes)
    with asserts.refused(ValueError, ["`weight1` of GroupedLinear", "a plain Parameter"]):
        torch.func.functional_call(made(), {"weight1": plain}, (x, sizes))
    for at, other in ((1, 0), (0, 0)):
        layer, second = made(), made()
        setattr(layer, f"weight{at}", getattr(second if at == other else layer, f"weight{other}"))
        with asserts.refused(ValueError, [f"`weight{1}` of GroupedLinear", *quantised]):
            layer(x, sizes)
    all_plain = {f"weight{at}": plain for at in range(3)}
    y = torch.func.functional_call(made(), all_plain, (x, sizes))
    asserts.bitwise(y, torch.full_like(y, 64))


@pytest.mark.rule("ERR-2")
@pytest.mark.parametrize("name", ["quantized_weights", "preserve_high_precision_init"])
def test_flags_are_bools(name: str) -> None:
    with asserts.refused(TypeError, [f"`{name}` of GroupedLinear", "'no'", "True or False"]):
        nn.GroupedLinear(2, 64, 64, recipe=recipes.MXFP8, **{name: "no"})
    given = {"enabled" if name == "quantized_weights" else name: "no"}
    with (
        asserts.refused(TypeError, ["of quantized_model_init", "'no'", "True or False"]),
        nn.quantized_model_init(**given),
    ):
        pass


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize("form", ["GroupedLinear", "GroupedMLP"])
def test_export_is_refused(form: str) -> None:
    layer = getattr(nn, form)(2, 128, 128, recipe=recipes.MXFP8, quantized_weights=True)
    with asserts.refused(NotImplementedError, ["`quantized_weights`", "torch.export", "expected plain", "export a"]):
        torch.export.export(layer, (torch.ones(3, 128), torch.tensor([1, 2])), strict=False)


@pytest.mark.rule("QNT-1", "ALL-1")
@by_recipe
@by_holding
@by_form
def test_weights_that_are_held_have_the_bits_of_those_quantised_in_each_pass(
    form: str, listed: bool, recipe: Recipe
) -> None:
    """Gradients have the nominal dtype, and are those of the dequantised values."""
    held, plain = (setup(form, listed, recipe=recipe, quantized=quantized, **BF16) for quantized in (True, False))
    assert all(params.is_quantized_weight(each) for each in held.weights)
    same(seeded(held, 1), seeded(plain, 1))
    assert all(weight.grad.dtype == weight.dtype == torch.bfloat16 for weight in held.weights)


@pytest.mark.rule("QNT-1", "GRD-1", "DLY-3")
@by_recipe
@by_holding
@by_form
def test_gradients_reach_main_grad_at_once_and_later(form: str, listed: bool, recipe: Recipe) -> None:
    found = []
    for quantized, delay in ((True, False), (True, True), (False, False)):
        s = setup(form, listed, accumulate=True, delay=delay, recipe=recipe, quantized=quantized, **BF16)
        main_grads(s.weights, 0.5)
        for weight in s.weights:
            weight.grad_added_to_main_grad = False
        for seed in (1, 2):
            manual_seed(seed)
            s.run(leaf(s.x)).backward(s.dy)
        if delay:
            assert all((weight.main_grad == 0.5).all() for weight in s.weights)
            s.module.backward_dw(all=True)
        assert all(weight.grad_added_to_main_grad for weight in s.weights)
        found.append([weight.main_grad.clone() for weight in s.weights])
        if not delay:
            assert not any(weight.grad.any() for weight in s.weights), "placeholders"
    same(found[0], found[2])
    same(found[1], found[2])


@pytest.mark.rule("QNT-1", "DLY-3", "GRD-1")
@by_holding
def test_delayed_gradients_without_main_grad(listed: bool) -> None:
    held, plain = (
        setup("GroupedMLP", listed, delay=delay, recipe=recipes.MXFP8, quantized=delay, **BF16)
        for delay in (True, False)
    )
    for one in (held, plain):
        for _ in range(2):
            one.backward()
    assert all(weight.grad is None for weight in held.weights)
    held.module.backward_dw(all=True)
    same([weight.grad for weight in held.weights], [weight.grad for weight in plain.weights])


@pytest.mark.rule("QNT-7")
@by_recipe
@by_form
def test_frozen_weights(form: str, recipe: Recipe) -> None:
    held, plain = (setup(form, True, recipe=recipe, quantized=quantized, **BF16) for quantized in (True, False))
    for one in (held, plain):
        for weight in (one.weights[0], one.weights[-1]):
            weight.requires_grad_(False)
    same(seeded(held, 1), seeded(plain, 1))
    assert held.weights[0].grad is None
    assert held.weights[1].grad is not None
    with torch.inference_mode():
        manual_seed(1)
        asserts.bitwise(held.run(held.x), plain.run(plain.x))


@pytest.mark.rule("QNT-1", "QNT-5")
@by_form
def test_microbatches_have_nothing_to_quantise(form: str) -> None:
    s = setup(form, False, recipe=recipes.MXFP8, quantized=True, **BF16)
    wanted = seeded(s, 1)
    for first in (False, True, None):
        same(seeded(s, 1, is_first_microbatch=first), wanted)


@pytest.mark.rule("MLP-2")
def test_residual_policies_agree() -> None:
    found = []
    for residuals in ("save_fc1", "save_input", "save_all"):
        manual_seed(0)
        options: Any = {"recipe": recipes.FP8Block, "quantized_weights": True, "dtype": torch.bfloat16}
        module = nn.GroupedMLP(3, 48, 32, residuals=residuals, **options)
        x = leaf(torch.randn(11, 48).bfloat16())
        y = module(x, SIZES)
        y.backward(torch.ones_like(y))
        found.append([y.detach(), x.grad, *(weight.grad for weight in module.parameters())])
    same(found[1], found[0])
    same(found[2], found[0])


@pytest.mark.rule("MAT-6")
def test_autocast_reads_the_same_codes() -> None:
    wide, narrow = (
        setup("GroupedMLP", True, dtype=d, recipe=recipes.MXFP8, quantized=True) for d in ("float32", "bfloat16")
    )
    for weight, other in zip(wide.weights, narrow.weights, strict=True):
        for name, part in parts_of(other.q).items():
            parts_of(weight.q)[name].copy_(part)
    with torch.autocast("cpu", torch.bfloat16):
        y = wide.run(leaf(wide.x))
    asserts.bitwise(y, narrow.run(leaf(wide.x.bfloat16())))
    y.backward(torch.ones_like(y))
    assert all(weight.grad.dtype == torch.float32 for weight in wide.weights)


@pytest.mark.rule("GRD-12")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo makes an instance of autograd.Function
@by_form
def test_compiled_layers_have_the_same_results(form: str) -> None:
    torch.compiler.reset()
    s, compiled = (setup(form, True, recipe=recipes.MXFP8, quantized=True, **BF16) for _ in range(2))
    compiled.module.compile(backend="aot_eager")
    same(seeded(compiled, 4), seeded(s, 4))


def _scaled_in_place(weight: Any) -> Tensor:
    with torch.no_grad():
        return weight.mul_(2).sum()


def _assigned(weight: Any) -> Tensor:
    weight.data = weight.data * 1.5
    return weight.sum()


def _stored(weight: Any) -> Tensor:
    weight.store(torch.ones(weight.shape))
    return weight.sum()


USES: dict[str, Callable[[Any], Tensor]] = {
    "values": lambda weight: weight.dequantize().sum(),
    "method": lambda weight: weight.float().sum(),
    "operator": lambda weight: (weight * 2).sum(),
    "function": lambda weight: torch.linalg.vector_norm(weight),
    "part": lambda weight: weight[0].sum(),
    "in place": _scaled_in_place,
    "data": _assigned,
    "store": _stored,
}


@pytest.mark.rule("QNT-1", "GRD-12")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("use", list(USES))
def test_compiled_code_uses_weights_beside_its_graphs(use: str) -> None:
    torch.compiler.reset()
    weight: Any = next(layer(recipes.MXFP8).parameters())
    other = copy.deepcopy(weight)
    expected = USES[use](weight)
    asserts.bitwise(torch.compile(USES[use], backend="aot_eager")(other)[None], expected[None])
    asserts.bitwise(other.dequantize(), weight.dequantize())


@pytest.mark.rule("QNT-1", "GRD-12")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo imports torch.jit
def test_a_compiled_step_of_an_optimizer_writes_weights() -> None:
    torch.compiler.reset()
    module = layer(recipes.MXFP8)
    modules = [module, copy.deepcopy(module)]
    for module, compiles in zip(modules, (False, True), strict=True):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for weight in module.parameters():
            weight.grad = torch.ones_like(weight)
        (torch.compile(optimizer.step, backend="aot_eager") if compiles else optimizer.step)()
    for found, expected in zip(*(module.parameters() for module in modules), strict=True):
        asserts.bitwise(found.dequantize(), expected.dequantize())


# ---------------------------------------------------------------------------------------------------------------------
# Writing


@pytest.mark.rule("QNT-1")
@by_recipe
@by_holding
def test_writing_quantises_in_place_into_all_forms(recipe: Recipe, listed: bool) -> None:
    """Members are views of the packed weight that products read; every way to write does the same."""
    module = layer(recipe, listed)
    kept = addresses(module)
    value = torch.randn(3, 70, 48)
    wanted_forms = ((recipe.forward[1], 2), (recipe.dgrad[1], 1))[: 1 if recipe is ONE_FORM else 2]
    # A state that has not started scales a weight by the weight's own amax.
    wanted = [quantize(value, fmt.replace(delayed=False), axis=axis) for fmt, axis in wanted_forms]

    def write(weight: Any, value: Tensor) -> None:
        weight.copy_(value)

    def assign(weight: Any, value: Tensor) -> None:
        weight[...] = value

    def through_data(weight: Any, value: Tensor) -> None:
        weight.data.copy_(value)

    ways: list[Callable[[Any, Tensor], None]] = [write, assign, through_data]
    for way in ways:
        with torch.no_grad():
            for at, weight in enumerate(module.parameters()):
                weight.zero_()
                way(weight, value[at] if listed else value)
        assert addresses(module) == kept
        first: Any = next(iter(module.parameters()))
        store = first.home[0]
        for q, form in zip(wanted, forms_of(store), strict=True):
            for name, part in parts_of(q).items():
                asserts.bitwise(
                    getattr(form, name).view(torch.uint8), part.view(torch.uint8), f"{name} by {way.__name__}"
                )


@pytest.mark.rule("QNT-1")
def test_what_reads_sees_values_and_what_is_made_like_it_is_plain() -> None:
    weight = next(iter(layer(recipes.MXFP8).parameters()))
    values = weight.dequantize()
    for found in (weight + 0, weight.float(), weight.sum(), torch.stack([weight, weight])[0], weight.mT, weight[:, 1]):
        assert type(found) is Tensor
    asserts.bitwise((weight * 1).detach(), values)
    for made in (torch.zeros_like(weight), torch.empty_like(weight), weight.new_zeros(3), torch.randn_like(weight)):
        assert type(made) is Tensor
        assert made.dtype == torch.bfloat16
    other = weight.detach().clone()
    assert params.is_quantized_weight(other)
    with torch.no_grad():
        weight.mul_(2)
    asserts.bitwise(other.dequantize(), values)
    asserts.bitwise(weight.dequantize(), values * 2)
    assert "mxfp8" in repr(weight)
    with pytest.raises(ValueError, match="shape"), torch.no_grad():
        weight.copy_(values[:1])


@pytest.mark.rule("QNT-1")
@by_recipe
def test_members_of_a_packed_weight_are_views(recipe: Recipe) -> None:
    with pytest.raises(IndexError, match="expected one of its 3"):
        torch.select(next(iter(layer(recipe).parameters())), 0, 3)
    module = layer(recipe)
    weight: Any = next(iter(module.parameters()))
    value = torch.randn(70, 48)
    with torch.no_grad():
        weight.zero_()
        weight[1] = value
        weight[-1].copy_(value)
        first, second, third = weight.unbind()
        asserts.bitwise(second.dequantize(), third.dequantize())
        second.zero_()
        assert not weight[:2].any()
        asserts.bitwise(weight.dequantize()[2], third.dequantize())
    assert third.any()
    assert params.is_quantized_weight(first)
    shards.cast_shards([third, weight[0]], [None, value.view(-1)], [None, 0])
    asserts.bitwise(weight.dequantize()[0], layer_value(recipe, value))


def layer_value(recipe: Recipe, value: Tensor) -> Tensor:
    """What a weight holds once `value` is written to all its experts, of the first."""
    module = layer(recipe)
    weight: Any = next(iter(module.parameters()))
    with torch.no_grad():
        weight.copy_(value.expand(weight.shape))
    return weight.dequantize()[0]


@pytest.mark.rule("QNT-1")
@pytest.mark.parametrize("writer", ["copy_", "codes", "load_state_dict", "cast_shards"])
def test_a_pass_that_waits_for_backward_notices_that_codes_were_written(writer: str) -> None:
    for listed in (False, True):
        original = layer(recipes.MXFP8, listed)
        for module in (original, *copies(original)):
            y = module(leaf(torch.randn(11, 48).bfloat16()), SIZES)
            weight = next(iter(module.parameters()))
            with torch.no_grad():
                value, other = torch.zeros(weight.shape), layer(recipes.MXFP8, listed)
                if writer == "copy_":
                    weight.copy_(value)
                elif writer == "codes":
                    weight.copy_(next(iter(other.parameters())))
                elif writer == "load_state_dict":
                    module.load_state_dict(other.state_dict())
                else:
                    shards.cast_shards([weight], [value.view(-1)], [0])
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


@pytest.mark.rule("QNT-1")
@pytest.mark.parametrize("writer", ["unbind", "setitem", "select"])
def test_a_pass_that_waits_for_backward_notices_that_an_expert_was_written(writer: str) -> None:
    original = layer(recipes.MXFP8)
    for module in (original, *copies(original)):
        y = module(leaf(torch.randn(11, 48).bfloat16()), SIZES)
        weight: Any = next(iter(module.parameters()))
        with torch.no_grad():
            if writer == "unbind":
                weight.unbind()[0].zero_()
            elif writer == "setitem":
                weight[2] = 0.0
            else:
                weight.detach().select(0, 1).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.rule("QNT-1")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW], ids=lambda o: o.__name__)
def test_an_optimiser_without_masters_updates_them(optimizer: Any) -> None:
    """As one that updates the values, then quantises them."""
    module = layer(recipes.MXFP8, listed=True)
    weights: list[Any] = list(module.parameters())
    values = [torch.nn.Parameter(each.dequantize()) for each in weights]
    held, plain = optimizer(weights, lr=0.1), optimizer(values, lr=0.1)
    for _ in range(2):
        for weight, value in zip(weights, values, strict=True):
            weight.grad = torch.randn_like(value)
            value.grad = weight.grad.clone()
        held.step()
        plain.step()
        with torch.no_grad():
            for weight, value in zip(weights, values, strict=True):
                value.copy_(dequantize(quantize(value[None], "mxfp8"))[0])
                asserts.bitwise(weight.dequantize(), value.detach())
    for state in held.state.values():
        assert all(type(each) is Tensor for each in state.values() if isinstance(each, Tensor))


@pytest.mark.rule("QNT-1", "QNT-2")
@by_recipe
def test_fifty_steps_with_masters_stay_near_bf16(recipe: Recipe) -> None:
    """A teacher's outputs are learnt about as well as with bf16 weights, from the same unrounded start."""
    manual_seed(0)
    teacher = nn.GroupedMLP(3, 32, 32, dtype=torch.float32)
    x = torch.randn(96, 32)
    sizes = torch.tensor([40, 20, 36], dtype=torch.int32)
    with torch.no_grad():
        target = teacher(x, sizes)
    losses = []
    for options in ({}, {"recipe": recipe, "quantized_weights": True, "preserve_high_precision_init": True}):
        manual_seed(1)
        student = nn.GroupedMLP(3, 32, 32, dtype=torch.bfloat16, **options)
        weights: list[Any] = list(student.parameters())
        starts = [each.high_precision_init_val() if options else each.detach() for each in weights]
        masters = [torch.nn.Parameter(start.float()) for start in starts]
        optimizer = torch.optim.Adam(masters, lr=0.01)
        loss = torch.zeros(())
        for _ in range(50):
            y = student(x.bfloat16(), sizes)
            loss = (y.float() - target).square().mean()
            loss.backward()
            for weight, master in zip(weights, masters, strict=True):
                master.grad, weight.grad = weight.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                for weight, master in zip(weights, masters, strict=True):
                    weight.copy_(master)
            if student.scaling_state is not None:
                update_scaling(student.scaling_state)
        losses.append(float(loss.detach()))
    untrained = float(target.square().mean())
    four = any(fmt.values == "uint8" for fmt in recipe.formats())
    assert losses[0] < 0.03 * untrained
    assert losses[1] < (12 if four else 3) * losses[0], losses


# ---------------------------------------------------------------------------------------------------------------------
# How they start


@pytest.mark.rule("QNT-2")
@by_recipe
@by_holding
def test_the_initial_value_is_that_of_plain_weights_and_may_be_preserved(recipe: Recipe, listed: bool) -> None:
    for preserve in (True, False):
        manual_seed(3)
        plain = layer(recipe, listed, quantized_weights=False)
        manual_seed(3)
        held = layer(recipe, listed, preserve_high_precision_init=preserve)
        written = copy.deepcopy(held)
        with torch.no_grad():
            for weight, value in zip(written.parameters(), plain.parameters(), strict=True):
                weight.copy_(value)
        same_codes(held, written)
        for a, b in zip(held.parameters(), plain.parameters(), strict=True):
            weight: Any = a
            if not preserve:
                assert weight.high_precision_init_val() is None
                continue
            asserts.bitwise(weight.high_precision_init_val(), b.detach())
            assert weight.get_high_precision_init_val().device.type == "cpu"
            with torch.no_grad():
                weight.zero_()
            asserts.bitwise(weight.high_precision_init_val(), b.detach())
            weight.clear_high_precision_init_val()
            assert weight.high_precision_init_val() is None
    held = layer(recipe, listed, preserve_high_precision_init=True)
    for module in (*copies(held), held):
        found: list[Any] = [*module.parameters()]
        wanted: list[Any] = [*held.parameters()]
        for weight, other in zip(found, wanted, strict=True):
            asserts.bitwise(weight.high_precision_init_val(), other.high_precision_init_val())


@pytest.mark.rule("QNT-2")
def test_layers_made_inside_quantized_model_init() -> None:
    with nn.quantized_model_init(recipe=recipes.FP8Block, preserve_high_precision_init=True):
        mlp = nn.GroupedMLP(3, 32, 32)
        own: Any = layer(recipes.MXFP8, quantized_weights=None)
        plain = layer(recipes.MXFP8, quantized_weights=False)
        with nn.quantized_model_init(enabled=False):
            inner = nn.GroupedLinear(3, 32, 32)
        after = nn.GroupedLinear(3, 32, 32)
    outer = nn.GroupedLinear(3, 32, 32)
    assert all(params.is_quantized_weight(each) for each in (*mlp.parameters(), *own.parameters()))
    assert after.quantized_weights
    assert mlp.linear_fc1.recipe == recipes.FP8Block
    assert own.recipe == recipes.MXFP8
    assert all(each.high_precision_init_val() is not None for each in own.parameters())
    for module in (plain, inner, outer):
        assert not any(params.is_quantized_weight(each) for each in module.parameters())
    assert inner.recipe is None
    for recipe in (None, recipes.BF16, next(each for each in ALL if each.dgrad[1].plain)):
        with asserts.refused(ValueError, ["`recipe` of GroupedLinear", "quantises", "FP8Block"]):
            nn.GroupedLinear(3, 32, 32, recipe=recipe, quantized_weights=True)
