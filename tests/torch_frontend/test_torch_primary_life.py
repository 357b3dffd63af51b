"""Layers with quantised primary weights: copies, casts, the meta device, checkpoints."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from grouped_core import recipes
from grouped_core.recipes import Recipe
from tests import asserts
from tests.torch_frontend.primary_tools import (
    ONE_FORM,
    SIZES,
    addresses,
    by_holding,
    by_recipe,
    copies,
    layer,
    raw,
    same_codes,
)
from tests.torch_frontend.recipe_tools import same, state_of
from torch_bridge import nn, shards
from torch_bridge.params import preserve_high_precision_init
from torch_bridge.quantized_weight import QuantizedWeight
from torch_bridge.quantized_weight import named_parts as parts_of


@pytest.mark.rule("QNT-1")
@by_recipe
def test_what_writes_a_weight_may_read_it_too_and_parts_are_written(recipe: Recipe) -> None:
    options: Any = {"recipe": recipe, "quantized_weights": True, "bias": False, "dtype": torch.float32}
    packed: Any = nn.GroupedLinear(2, 32, 64, single_grouped_weight=True, **options).weight
    listed: Any = nn.GroupedLinear(2, 32, 64, **options).weight0
    with torch.no_grad():
        for weight in (packed, listed):
            weight.fill_(1)
            torch.mul(weight, 2, out=weight)
            asserts.bitwise(weight.dequantize(), torch.full(weight.shape, 2.0), "out=")
            torch.add(weight, weight, out=weight)
            asserts.bitwise(weight.dequantize(), torch.full(weight.shape, 4.0), "given three times")
            weight[..., :16] = 0
            assert not weight[..., :16].any()
            assert (weight[..., 16:] == 4).all()
        listed[0] = 1
        assert (listed[0] == 1).all()
        assert (listed[1:, 16:] == 4).all()
        packed[1] = 1
        assert (packed[1] == 1).all()
        assert (packed[0, :, 16:] == 4).all()
        packed[False] = 0
        assert packed.all(dim=2).any(), "False selects nothing"
        packed[True] = 0
        assert not packed.any(), "True selects everything"


@pytest.mark.rule("QNT-1")
@by_recipe
@by_holding
def test_copies_and_casts_keep_codes(recipe: Recipe, listed: bool) -> None:
    module = nn.GroupedMLP(
        3, 48, 32, recipe=recipe, single_grouped_weight=not listed, quantized_weights=True, dtype=torch.bfloat16
    )
    x = torch.randn(11, 48).bfloat16()
    y = module(x, SIZES)
    before = raw(module)
    for copied in copies(module):
        same_codes(copied, module)
        asserts.bitwise(copied(x, SIZES), y)
        kinds = [(type(each), each.requires_grad, isinstance(each, torch.nn.Parameter)) for each in copied.parameters()]
        assert set(kinds) == {(QuantizedWeight, True, True)}
        with torch.no_grad():
            for weight in copied.parameters():
                weight.zero_()
        assert not copied(x, SIZES).any(), "products read what was written"
    same([*raw(module).values()], [*before.values()])
    kept = list(module.parameters())
    module.float()
    assert {each.dtype for each in module.parameters()} == {torch.float32}
    assert all(a is b for a, b in zip(module.parameters(), kept, strict=True))
    same([*raw(module).values()], [*before.values()])
    module.bfloat16()
    asserts.bitwise(module(x, SIZES), y)
    with asserts.refused(TypeError, ["quantised weights as torch.float64", "expected one of"]):
        module.double()


@pytest.mark.rule("QNT-1")
@by_holding
def test_a_cast_casts_gradients_too(listed: bool) -> None:
    module = layer(recipes.FP8Block, listed)
    module(torch.randn(11, 48).bfloat16(), SIZES).sum().backward()
    weights: list[Any] = list(module.parameters())
    before = [each.grad.float() for each in weights]
    same([each.grad for each in module.float().parameters()], before)


@pytest.mark.rule("QNT-1")
@by_holding
def test_a_cast_that_is_refused_changes_nothing(listed: bool) -> None:
    module = layer(recipes.FP8Block, listed, bias=True)
    before = raw(module)
    with asserts.refused(TypeError, ["quantised weights as torch.float64", "expected one of"]):
        module.double()
    assert {each.dtype for each in module.parameters()} == {torch.bfloat16}, "of biases too"
    same([*raw(module).values()], [*before.values()])


@pytest.mark.rule("QNT-2")
def test_a_new_value_releases_the_one_that_was_preserved() -> None:
    module = layer(recipes.FP8Block)
    weight: Any = next(iter(module.parameters()))
    preserve_high_precision_init(weight, weight.dequantize())
    module.reset_parameters()
    assert weight.high_precision_init_val() is None


@pytest.mark.rule("QNT-1")
@by_holding
def test_a_move_that_fails_changes_nothing(listed: bool) -> None:
    module = layer(recipes.FP8Block, listed, bias=True)
    held = list(module.parameters())

    def fails(part: Tensor) -> Tensor:
        if part.numel():
            raise MemoryError("no room")
        return part

    with pytest.raises(MemoryError, match="no room"):
        module._apply(fails)
    assert all(a is b for a, b in zip(module.parameters(), held, strict=True))


@pytest.mark.rule("QNT-1")
@by_recipe
@by_holding
def test_a_module_moves_them_to_shared_memory(recipe: Recipe, listed: bool) -> None:
    module = layer(recipe, listed, bias=True)
    x = torch.randn(11, 48).bfloat16()
    y = module(x, SIZES)
    y.sum().backward()
    before, at = raw(module), [id(each) for each in module.parameters()]
    assert module.share_memory() is module
    for each in module.parameters():
        assert each.is_shared()
        assert each.grad is not None
        assert each.grad.is_shared()
    assert [id(each) for each in module.parameters()] == at
    same([*raw(module).values()], [*before.values()])
    asserts.bitwise(module(x, SIZES), y)
    with torch.no_grad():
        for each in module.parameters():
            each.zero_()
    assert not module(x, SIZES).any(), "products read what was written"


@pytest.mark.rule("QNT-1")
@by_recipe
@by_holding
def test_methods_that_read_memory_see_values(recipe: Recipe, listed: bool) -> None:
    """PyTorch does not dispatch these, and went to memory that such a weight does not have."""
    module = layer(recipe, listed)
    weight: Any = next(iter(module.parameters()))
    before = weight.dequantize()
    asserts.bitwise(torch.from_dlpack(weight.detach()), before)
    assert not weight.is_shared()
    assert weight.share_memory_() is weight
    assert weight.is_shared()
    asserts.bitwise(weight.dequantize(), before)
    written = copy.deepcopy(module)
    with torch.no_grad():
        assert weight.apply_(lambda value: -value) is weight
        next(iter(written.parameters())).copy_(-before)
        same_codes(module, written)
        one, two = torch.rand(2, *before.shape, dtype=before.dtype)
        assert weight.map_(one, lambda value, other: other) is weight
        next(iter(written.parameters())).copy_(one)
        same_codes(module, written)
        assert weight.map2_(one, two, lambda value, first, second: second) is weight
        next(iter(written.parameters())).copy_(two)
    same_codes(module, written)


@pytest.mark.rule("QNT-2")
@by_recipe
@by_holding
def test_the_meta_device(recipe: Recipe, listed: bool) -> None:
    torch.manual_seed(0)
    wanted = layer(recipe, listed, preserve_high_precision_init=True)
    module = layer(recipe, listed, preserve_high_precision_init=True, device="meta")
    first: Any = next(iter(module.parameters()))
    assert first.device.type == "meta"
    assert first.high_precision_init_val() is None
    module.to_empty(device="cpu")
    torch.manual_seed(0)
    module.reset_parameters()
    same_codes(module, wanted)
    other: Any = next(iter(wanted.parameters()))
    asserts.bitwise(first.high_precision_init_val(), other.high_precision_init_val())
    x = torch.randn(11, 48).bfloat16()
    torch.manual_seed(1)
    asserts.bitwise(module(x, SIZES), wanted(x, SIZES))


@pytest.mark.rule("CKP-1", "QNT-1")
def test_plain_checkpoints_are_quantised_with_the_scales_that_they_hold() -> None:
    module, plain = layer(recipes.FP8Delayed), layer(recipes.FP8Delayed, quantized_weights=False)
    with torch.no_grad():
        state_of(plain).scale.fill_(4096)
    for _ in range(2):  # whatever was there before
        module.load_state_dict(plain.state_dict())
        weight: Any = next(iter(module.parameters()))
        asserts.bitwise(weight.q.scales, torch.full((3,), 1 / 4096))
        asserts.bitwise(state_of(module).history, state_of(plain).history)


def _mlp(recipe: Recipe | None, listed: bool, **options: Any) -> nn.GroupedMLP:
    options = {"quantized_weights": True, "dtype": torch.bfloat16, **options}
    return nn.GroupedMLP(3, 48, 32, recipe=recipe, single_grouped_weight=not listed, **options)


by_kind = pytest.mark.parametrize("make", [layer, _mlp], ids=["linear", "mlp"])
by_device = pytest.mark.parametrize("device", ["cpu", "meta"])


@pytest.mark.rule("QNT-1")
@by_kind
def test_first_values_are_measured(make: Any) -> None:
    """The values from which a new layer made its codes count for the next scales."""
    module = make(recipes.FP8Delayed, False, preserve_high_precision_init=True)
    live = state_of(module).history[1::3, 0]
    for found, weight in zip(live, module.parameters(), strict=True):
        asserts.bitwise(found, weight.high_precision_init_val().float().abs().amax(dim=(1, 2)))


@pytest.mark.rule("QNT-1", "MLP-10")
@by_holding
def test_each_weight_of_an_mlp_is_written_in_its_own_role(listed: bool) -> None:
    """With its own scales and its own amax: of the six operands it is the second of its product."""
    module = _mlp(recipes.FP8Delayed, listed)
    state = state_of(module)
    state.scale.copy_(torch.arange(1, 19).view(6, 3))
    state.history.zero_()
    with torch.no_grad():
        for linear, value in ((module.linear_fc1, 0.5), (module.linear_fc2, 2.0)):
            for weight in linear.weight_parameters():
                weight.copy_(torch.full(weight.shape, value))
    for linear, role in ((module.linear_fc1, 1), (module.linear_fc2, 4)):
        scales = torch.cat([weight.q.scales for weight in linear.weight_parameters()])
        asserts.bitwise(scales, state.scale[role].reciprocal())
    asserts.bitwise(state.history[:, 0], torch.tensor([0, 0.5, 0, 0, 2, 0])[:, None].expand(6, 3))


@pytest.mark.rule("QNT-1", "CKP-1")
@by_kind
@by_holding
@by_device
def test_weights_that_a_checkpoint_replaces_follow_the_state(device: str, listed: bool, make: Any) -> None:
    """Writes read the scales of the layer and update its current amax, as do casts of shards."""
    recipe = recipes.FP8Delayed.replace(history=2)
    source = make(recipe, listed)
    module = make(recipe, listed, device=device)
    module.load_state_dict(copy.deepcopy(source.state_dict()), assign=True)
    same_codes(module, source)
    for write in ("copy_", "cast_shards"):
        for one in (module, source):
            state_of(one).scale.copy_(torch.arange(1, state_of(one).scale.numel() + 1).view(-1, 3))
            state_of(one).history.zero_()
            weights: list[Any] = list(one.parameters())
            with torch.no_grad():
                if write == "copy_":
                    for weight in weights:
                        weight.copy_(torch.full(weight.shape, 0.5))
                else:
                    masters = [torch.full((weight.numel(),), 0.5) for weight in weights]
                    shards.cast_shards(weights, masters, [0] * len(weights))
        same_codes(module, source)
        asserts.bitwise(state_of(module).history, state_of(source).history)
        assert (state_of(module).history[1, 0] == 0.5).all(), "of weights"


@pytest.mark.rule("QNT-1")
@by_kind
@by_holding
def test_weights_of_copies_and_of_a_moved_layer_follow_its_own_state(listed: bool, make: Any) -> None:
    """Of the copy, and the one that the layer has on its new device."""
    module = make(recipes.FP8Delayed, listed)
    moved = make(recipes.FP8Delayed, listed, device="meta").to_empty(device="cpu")
    moved.reset_parameters()
    before = state_of(module).history.clone()
    for made in (*copies(module), moved):
        state_of(made).scale.fill_(4)
        with torch.no_grad():
            for weight in made.parameters():
                weight.fill_(8)
                asserts.bitwise(weight.q.scales, torch.full_like(weight.q.scales, 0.25))
        assert (state_of(made).history[1::3, 0] == 8).all(), "of weights"
    asserts.bitwise(state_of(module).history, before)


@pytest.mark.rule("CKP-1")
def test_a_layer_that_is_loaded_alone_goes_on_with_the_state_of_its_mlp() -> None:
    module = _mlp(recipes.FP8Delayed, listed=True)
    module.linear_fc2.load_state_dict(copy.deepcopy(module.linear_fc2.state_dict()), assign=True)
    state_of(module).scale.fill_(4)
    with torch.no_grad():
        for weight in module.linear_fc2.weight_parameters():
            weight.copy_(torch.ones(48, 32))
            asserts.bitwise(weight.q.scales, torch.full((1,), 0.25))


@pytest.mark.rule("CKP-1", "QNT-1")
@by_recipe
@by_kind
@by_holding
@by_device
def test_plain_checkpoints_that_are_assigned_are_quantised(
    device: str, listed: bool, make: Any, recipe: Recipe
) -> None:
    """With the codes of those that are copied, whether or not the checkpoint has a state; one in parts too."""
    plain = make(recipe, listed=True, quantized_weights=False)
    if recipe.delayed:
        state_of(plain).scale.fill_(64)
    x = torch.randn(11, 48).bfloat16()
    for stateless in (True, False):
        state = {name: each for name, each in plain.state_dict().items() if not (stateless and "scaling" in name)}
        copied = make(recipe, listed)
        copied.load_state_dict(copy.deepcopy(state))
        later = {name for name in state if name.endswith("weight0") and listed}
        for parts in ([state.keys()], [state.keys() - later, later]):
            module = make(recipe, listed, device=device)
            for names in parts:
                part = {name: state[name].clone() for name in state if name in names}
                module.load_state_dict(part, assign=True, strict=names == state.keys())
            assert {type(each) for each in module.parameters()} == {QuantizedWeight}
            assert {each.dtype for each in module.parameters()} == {torch.bfloat16}
            same_codes(module, copied)
            asserts.bitwise(module(x, SIZES), copied(x, SIZES))
        assert all(type(each) is Tensor for each in state.values()), "the checkpoint is as it was"


@pytest.mark.rule("CKP-1")
def test_a_plain_checkpoint_of_other_sizes_is_refused() -> None:
    state = {"weight": torch.zeros(3, 70, 47)}
    for assign in (False, True):
        with pytest.raises(RuntimeError, match="size mismatch for weight"):
            layer(recipes.MXFP8).load_state_dict(dict(state), assign=assign)


@pytest.mark.rule("CKP-1", "CKP-8")
@by_recipe
def test_checkpoints_have_plain_tensors_that_load_into_either_form(recipe: Recipe) -> None:
    """Grouped, indexed, grouped again: the same bytes; and plain weights are quantised as they are loaded."""
    first = layer(recipe)
    state = first.state_dict()
    assert all(type(each) is Tensor for each in state.values())
    weight: Any = next(iter(first.parameters()))
    parts = {f"weight.{name}" for name in parts_of(weight.q)}
    assert parts <= state.keys()
    assert get_model_state_dict(first).keys() == state.keys(), "tools look names up as attributes"
    assert "weight" not in state
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    indexed = layer(recipe, listed=True)
    kept = addresses(indexed)
    indexed.load_state_dict(state)
    assert addresses(indexed) == kept
    assert {f"weight2.{name.partition('.')[2]}" for name in parts} <= indexed.state_dict().keys()
    again = layer(recipe)
    again.load_state_dict(indexed.state_dict())
    same_codes(again, first)
    for listed in (False, True):
        assigned = layer(recipe, listed)
        assigned.load_state_dict(state, assign=True)
        same_codes(assigned, layer_of(first, recipe, listed))
        x = torch.randn(11, 48).bfloat16()
        asserts.bitwise(assigned(x, SIZES), first(x, SIZES))
    plain = layer(recipe, listed=True, quantized_weights=False)
    for listed in (False, True):
        loaded, written = layer(recipe, listed), layer(recipe, listed)
        loaded.load_state_dict(plain.state_dict())
        with torch.no_grad():
            packed = torch.stack(list(plain.parameters()))
            for at, weight in enumerate(written.parameters()):
                weight.copy_(packed[at] if listed else packed)
        same_codes(loaded, written)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*weight\d?\.values"):
        plain.load_state_dict(again.state_dict())


@pytest.mark.rule("CKP-1")
@pytest.mark.parametrize("saved_listed", [False, True], ids=["saved_packed", "saved_list"])
@by_holding
def test_checkpoints_with_one_form_and_with_two_load_into_each_other(listed: bool, saved_listed: bool) -> None:
    """With scales of groups the second form has the same codes, so it is left out or made."""
    for source, target in ((recipes.FP8Current, ONE_FORM), (ONE_FORM, recipes.FP8Current)):
        saved, loaded = layer(source, saved_listed), layer(target, listed)
        loaded.load_state_dict(saved.state_dict())
        given: list[Any] = list(saved.parameters())
        values = torch.cat([each.q.values for each in given])
        made: list[Any] = list(loaded.parameters())
        for at, weight in enumerate(made):
            q = parts_of(weight.q)
            own = values if not listed else values[at : at + 1]
            asserts.bitwise(q["values"].view(torch.uint8), own.view(torch.uint8))
            assert ("other.values" in q) == (target is recipes.FP8Current)
            if "other.values" in q:
                asserts.bitwise(q["other.values"].view(torch.uint8), own.view(torch.uint8).mT)
    blocks = layer(recipes.FP8Block).state_dict()
    some = {name: each for name, each in blocks.items() if ".other." not in name}
    with asserts.refused(ValueError, ["quantised without other.values"]):
        layer(recipes.FP8Block).load_state_dict(some)
    some = layer(ONE_FORM, listed=True).state_dict()
    del some["weight1.scales"]
    with asserts.refused(ValueError, ["`weight1` is quantised without scales, other.values, other.scales"]):
        layer(recipes.FP8Current, listed=True).load_state_dict(some)


def layer_of(other: Any, recipe: Recipe, listed: bool) -> Any:
    """A layer with the codes of another."""
    made = layer(recipe, listed)
    made.load_state_dict(other.state_dict())
    return made


@pytest.mark.rule("CKP-1")
def test_what_checkpoints_of_quantised_weights_refuse() -> None:
    state = layer(recipes.MXFP8).state_dict()
    for listed in (False, True):
        module = layer(recipes.MXFP8, listed)
        before = raw(module)
        some = {name: each for name, each in state.items() if name != "weight.other.scales"}
        more = {name: torch.cat([each, each[:1]]) for name, each in state.items()}
        other = layer(recipes.FP8Block).state_dict()
        for given, words in (
            (some, ["quantised without other.scales", "mxfp8"]),
            (more, ["weight.values", "4", "3"]),
            (other, ["weight", "scales", "mxfp8"]),
        ):
            with asserts.refused(ValueError, words):
                module.load_state_dict(dict(given))
        same([*raw(module).values()], [*before.values()])
    indexed = layer(recipes.MXFP8, listed=True).state_dict()
    both = {**state, **indexed}
    with asserts.refused(ValueError, ["both `weight.values` and `weight0.values`"]):
        layer(recipes.MXFP8).load_state_dict(both)
    del indexed["weight1.values"]
    with asserts.refused(ValueError, ["`weight.values` has entries for 2 of 3 groups, missing 1"]):
        layer(recipes.MXFP8).load_state_dict(indexed)


@pytest.mark.rule("CKP-3", "ERR-1")
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("listed", [True, False])
def test_a_weight_in_both_forms_is_refused(listed: bool, held: bool) -> None:
    """Else one of them would be ignored, whichever parameters the layer and the state dict have."""
    module, given = layer(recipes.FP8Block, listed), layer(recipes.FP8Block, not held)
    before, state = raw(module), given.state_dict()
    whole = given.weight_parameters()[0].shape[-2:]
    for key, shape in (("weight", (given.num_groups, *whole)), ("weight1", whole)):
        other = "weight" if held else "weight0" if key == "weight" else key
        plain = torch.zeros(shape, dtype=torch.bfloat16)
        with asserts.refused(
            ValueError, [f"both `{key}` and `{other}.values`", "the plain and the quantised", "remove"]
        ):
            module.load_state_dict({**state, key: plain})
        same([*raw(module).values()], [*before.values()])
    if listed and not held:  # each expert may be in another form
        mixed = {key: each for key, each in state.items() if not key.startswith("weight1.")}
        module.load_state_dict({**mixed, "weight1": plain})
        asserts.bitwise(module.weight_parameters()[1].dequantize(), plain, "weight1")
