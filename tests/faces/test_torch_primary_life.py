"""Layers with quantised primary weights: copies, casts, the meta device, checkpoints."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from grouped_core import recipes
from grouped_core.recipes import Recipe
from tests import asserts
from tests.faces.primary_tools import (
    SIZES,
    addresses,
    by_holding,
    by_recipe,
    copies,
    layer,
    raw,
    same_codes,
)
from tests.faces.test_torch_recipes import same
from torch_bridge import nn
from torch_bridge.primary import QuantizedWeight, parts_of


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
def test_plain_checkpoints_are_quantised_with_the_multipliers_that_they_hold() -> None:
    module, plain = layer(recipes.FP8Delayed), layer(recipes.FP8Delayed, quantized_weights=False)
    with torch.no_grad():
        plain.scaling_state.scale.fill_(4096)
    for _ in range(2):  # whatever was there before
        module.load_state_dict(plain.state_dict())
        weight: Any = next(iter(module.parameters()))
        asserts.bitwise(weight.q.scales, torch.full((3,), 1 / 4096))
        asserts.bitwise(module.scaling_state.history, plain.scaling_state.history)


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
