"""Adapters of the layers of `torch_bridge.nn`: what is trained, delivered and kept, merging, PEFT, compiling."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torch_bridge
from grouped_core.formats import FORMATS
from tests import asserts, bounds
from tests.bounds import Bounded
from tests.torch_frontend.lora_layer_tools import (
    LAYERS,
    OPTIONS,
    ROWS,
    SCALING,
    SIZES,
    WEIGHT_ONLY,
    F,
    G,
    H,
    Problem,
    R,
    build,
    fill,
    made,
    tokens_of,
)
from tests.torch_frontend.nn_tools import drawn_key, main_grads
from tests.torch_frontend.torch_tools import counted_launches, manual_seed, saved_tensors
from torch_bridge import nn

VALID = sum(SIZES)
listed_or_not = pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
every_layer = pytest.mark.parametrize("form", LAYERS)


def grads(p: Problem) -> list[Any]:
    """The gradients that the parameters hold, and none afterwards."""
    found = [each.grad for each in p.factors()]
    p.module.zero_grad()
    return found


# ---- what is computed and trained ------------------------------------------------------------------------------------


@pytest.mark.rule("LOR-1", "LOR-2", "LOR-4")
@pytest.mark.parametrize("bias", [False, True])
@listed_or_not
@every_layer
def test_layers_call_the_functions_and_train_the_factors_alone(form: str, listed: bool, bias: bool):
    p = build(form, listed=listed, bias=bias)
    trained = {name for name, each in p.module.named_parameters() if each.requires_grad}
    assert trained == {name for name, _ in p.module.named_parameters() if name.rpartition(".")[2].startswith("lora_")}
    assert len(trained) == 2 * len(p.linears)
    y = p.backward()
    exact = p.function()
    asserts.bitwise(y, exact)
    expected = torch.autograd.grad(exact, p.factors(), p.dy)
    for found, wanted in zip(grads(p), expected, strict=True):
        asserts.bitwise(found, wanted)
        asserts.zero(found[1])
    assert all(each.grad is None for layer in p.linears for each in layer.weight_parameters())


@pytest.mark.rule("LOR-1")
@pytest.mark.parametrize("quantized", [False, True])
@listed_or_not
@every_layer
def test_a_new_layer_computes_what_its_weights_do(form: str, listed: bool, quantized: bool):
    options: dict[str, Any] = {"recipe": WEIGHT_ONLY, "quantized_weights": True} if quantized else {}
    p = build(form, listed=listed, **options)
    p.module.apply(lambda each: each.reset_parameters() if isinstance(each, nn.GroupedLinear) else None)
    for layer in p.linears:
        asserts.zero(layer.lora_B)
        bound = layer.in_features**-0.5
        assert 0.8 * bound < layer.lora_A.abs().max() <= bound
    plain = copy.deepcopy(p)
    if not quantized:
        for layer in plain.linears:
            layer.merge()
        asserts.bitwise(p(), plain())
    values = [layer.plain_members() for layer in p.linears]
    whole: Any = [(each[0] if each[0].dim() == 3 else torch.stack(each)).to(p.x.dtype) for each in values]
    sizes = p.extra[0]
    if form == "GroupedLinear":
        asserts.bitwise(p(), torch_bridge.grouped_linear(p.x, whole[0], sizes))
    else:
        asserts.bitwise(p(), torch_bridge.grouped_mlp(p.x, whole[0], whole[1], sizes, probs=p.extra[1]))


@pytest.mark.rule("LOR-1", "LOR-4")
@listed_or_not
@every_layer
def test_autocast_computes_in_its_dtype_and_trains_in_that_of_the_factors(form: str, listed: bool):
    p = build(form, listed=listed, dtype=torch.float32, bias=form == "GroupedLinear")
    narrow = copy.deepcopy(p.module).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = p()
    assert y.dtype == torch.bfloat16
    asserts.bitwise(y, narrow(p.x.bfloat16(), *p.extra))
    y.backward(p.dy.bfloat16())
    narrow(p.x.bfloat16(), *p.extra).backward(p.dy.bfloat16())
    for name, each in p.module.named_parameters():
        if "lora" in name:
            assert each.grad is not None
            assert each.grad.dtype == torch.float32
            asserts.bitwise(each.grad.bfloat16(), narrow.get_parameter(name).grad)


@pytest.mark.rule("LOR-1", "LOR-4")
@every_layer
def test_a_frozen_factor_has_no_gradient_and_changes_no_other(form: str):
    p = build(form)
    y = p.backward()
    every = grads(p)
    for frozen in range(len(every)):
        q = build(form)
        q.factors()[frozen].requires_grad_(False)
        asserts.bitwise(q.backward(), y)
        for at, (found, wanted) in enumerate(zip(grads(q), every, strict=True)):
            assert (found is None) == (at == frozen)
            if found is not None:
                asserts.bitwise(found, wanted)


@pytest.mark.rule("LOR-1")
@pytest.mark.parametrize("form", LAYERS[1:])
def test_one_product_may_be_without_an_adapter(form: str):
    p = build(form)
    with torch.no_grad():
        p.linears[1].lora_B.zero_()
    y = p()
    p.linears[1].merge()
    asserts.bitwise(p(), y)
    p.linears[0].merge()
    assert not p().requires_grad


# ---- delivery of gradients -------------------------------------------------------------------------------------------


@pytest.mark.rule("LOR-4", "GRD-1", "GRD-3")
@pytest.mark.parametrize("delay", [False, True])
@listed_or_not
@every_layer
def test_gradients_are_added_to_main_grad(form: str, listed: bool, delay: bool):
    plain = build(form, listed=listed)
    plain.backward()
    p = build(form, listed=listed, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
    main_grads(p.factors(), 0.5)
    for each in p.factors():
        each.grad_added_to_main_grad = False
    with counted_launches() as launched:
        p.backward()
    assert "low_rank_grads" not in launched, "these gradients have products of their own"
    if delay:
        assert all((each.main_grad == 0.5).all() for each in p.factors())
        assert not any(each.grad_added_to_main_grad for each in p.factors())
        p.module.backward_dw()
    assert all(each.grad_added_to_main_grad for each in p.factors())
    for each, wanted in zip(p.factors(), grads(plain), strict=True):
        added = each.main_grad.view(wanted.shape) - 0.5
        assert torch.allclose(added, wanted.float(), rtol=bounds.ADDED[0], atol=bounds.ADDED[1])
        asserts.filled(each.main_grad.view(wanted.shape)[1], 0.5, "an empty group")
    assert not any(hasattr(each, "main_grad") for layer in p.linears for each in layer.weight_parameters())


@pytest.mark.rule("LOR-4", "ERR-1")
@pytest.mark.parametrize("form", ["GroupedLinear", "GroupedMLP"])
def test_a_factor_without_main_grad_is_named(form: str):
    p = build(form, accumulate_into_main_grad=True)
    for name, factor in p.module.named_parameters():
        if factor.requires_grad:
            main_grads(p.factors(), 0.0)
            factor.main_grad = None
            with asserts.refused(RuntimeError, [f"`main_grad` of `{name}`: missing", "create it"]):
                p.backward()


@pytest.mark.rule("LOR-4", "DLY-1", "DLY-2", "DLY-3")
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("accumulate", [False, True], ids=["grad", "main_grad"])
@every_layer
def test_drained_microbatches_equal_the_undelayed_run(form: str, accumulate: bool, microbatches: int):
    """One entry a pass, whose gradients are those of A and B of all layers."""

    def run(delay: bool) -> list[Any]:
        p = build(form, accumulate_into_main_grad=accumulate, delay_wgrad_compute=delay)
        if accumulate:
            main_grads(p.factors(), 0.25)
        for at in range(microbatches):
            p((p.x * (at + 1)).requires_grad_()).backward(p.dy)
        for left in range(microbatches if delay else 0, 0, -1):
            assert p.module.pending_wgrads() == left
            assert all(layer.pending_wgrads() == left for layer in p.linears)
            p.module.backward_dw()
        assert not delay or p.module.pending_wgrads() == 0
        return [each.main_grad if accumulate else each.grad for each in p.factors()]

    for later, now in zip(run(True), run(False), strict=True):
        asserts.bitwise(later, now)


@pytest.mark.rule("LOR-4", "DLY-2", "DLY-7")
@every_layer
def test_hooks_run_after_the_gradients_of_the_factors(form: str):
    p = build(form, delay_wgrad_compute=True)
    assert all(each.skip_backward_post_hook for each in p.factors())
    seen: list[int] = []
    for at, layer in enumerate(p.linears):

        def hook(layer: Any = layer, at: int = at) -> None:
            assert layer.lora_A.grad is not None
            assert layer.lora_B.grad is not None
            seen.append(at)

        layer.register_wgrad_accumulation_and_reduce_hooks(hook)
    p.backward()
    assert not seen
    p.module.backward_dw()
    assert sorted(seen) == list(range(len(p.linears)))


@pytest.mark.rule("LOR-2", "LOR-4", "DLY-2")
@every_layer
def test_frozen_factors_leave_nothing_pending(form: str):
    p = build(form, delay_wgrad_compute=True)
    for each in p.factors():
        each.requires_grad_(False)
    p.backward()
    assert p.module.pending_wgrads() == 0


# ---- what is kept ----------------------------------------------------------------------------------------------------

ROWS_OF_MLP = {"x": (ROWS, H), "h": (ROWS, 2 * F), "z": (ROWS, F), "u1": (ROWS, R), "u2": (ROWS, R)}
FACTORS_OF_MLP = {"a1": (G, R, H), "b1": (G, 2 * F, R), "a2": (G, R, F), "b2": (G, H, R)}
WEIGHTS_OF_MLP = {"w1": (G, 2 * F, H), "w2": (G, H, F)}
SHAPES = ROWS_OF_MLP | FACTORS_OF_MLP | WEIGHTS_OF_MLP
FROZEN: dict[str, tuple[tuple[int, ...], bool, str]] = {
    "nothing": ((), True, "x h u1 u2 w1 w2 a1 b1 a2 b2"),
    "x": ((), False, "x h u1 u2 w2 b1 a2 b2"),
    "first": ((0, 1), False, "z u2 b2"),
    "second": ((2, 3), False, "x h u1 w2 b1 a2 b2"),
    "A": ((0, 2), False, "h u1 u2 w2 a2 b2"),
    "B": ((1, 3), False, "x h w2 b1 a2 b2"),
    "all_but_the_last": ((0, 1, 2), False, "u2"),
    "factors": ((0, 1, 2, 3), True, "h w1 w2 a1 b1 a2 b2"),
    "everything": ((0, 1, 2, 3), False, ""),
}


@pytest.mark.rule("LOR-2", "LOR-4", "ALL-4")
@pytest.mark.parametrize("name", FROZEN)
def test_nothing_is_saved_for_frozen_parts(name: str):
    """The activated rows are made again from h, unless nothing else reads h."""
    frozen, of_x, wanted = FROZEN[name]
    p = build("GroupedMLP")
    for at in frozen:
        p.factors()[at].requires_grad_(False)
    with saved_tensors() as saved:
        p.module(p.x.clone().requires_grad_(of_x), p.extra[0])
    found = sorted(tuple(each.shape) for each in saved if each.dim() > 1)
    assert found == sorted(SHAPES[each] for each in wanted.split())


@pytest.mark.rule("LOR-2", "LOR-3")
@listed_or_not
@every_layer
def test_quantised_weights_hold_one_form_and_nothing_of_their_size_is_saved(form: str, listed: bool):
    p = build(form, listed=listed, recipe=WEIGHT_ONLY, quantized_weights=True)
    two = build(form, listed=listed, recipe=WEIGHT_ONLY, quantized_weights=True, lora_rank=None, lora_alpha=None)
    block = FORMATS["mxfp4"].block
    for layer, other in zip(p.linears, two.linears, strict=True):
        codes, shape = 0, (layer.out_features, layer.in_features)
        for weight, doubled in zip(layer.weight_parameters(), other.weight_parameters(), strict=True):
            assert weight.q.other is None
            assert not weight.requires_grad
            held = weight.values.nbytes + weight.scales.nbytes
            assert doubled.values.nbytes + doubled.scales.nbytes == held
            assert doubled.q.other is not None
            codes += held
        assert codes == G * shape[0] * (shape[1] // 2 + shape[1] // block)
    with saved_tensors() as saved:
        y = p(p.x.clone().requires_grad_())
    stores = [layer.weight_parameters()[0].home[0] for layer in p.linears]
    of_weights = {each.data_ptr() for q in stores for each in (q.values, q.scales)}
    for each in saved:
        small = each.dim() < 3 or R in each.shape
        assert small or each.untyped_storage().data_ptr() in of_weights
    members = [layer.plain_members() for layer in p.linears]
    values = [(each[0] if each[0].dim() == 3 else torch.stack(each)).to(p.x.dtype) for each in members]
    x = p.x.clone().requires_grad_()
    options: dict[str, Any] = {"lora": p.lora(), "lora_scaling": SCALING}
    if form == "GroupedLinear":
        plain = torch_bridge.grouped_linear(x, values[0], p.extra[0], **options)
    else:
        plain = torch_bridge.grouped_mlp(x, values[0], values[1], p.extra[0], probs=p.extra[1], **options)
    asserts.bitwise(y, plain)
    expected = torch.autograd.grad(plain, p.factors(), p.dy)
    for one, two in zip(torch.autograd.grad(y, p.factors(), p.dy), expected, strict=True):
        asserts.bitwise(one, two)


@pytest.mark.rule("LOR-2")
@every_layer
def test_quantised_weights_hold_the_form_of_dgrad_where_backward_would_make_it(form: str):
    """The recipe makes missing forms from dequantised values; dgrad would do so in each pass."""
    p = build(form, recipe=WEIGHT_ONLY.replace(requantize="from_dequantized"), quantized_weights=True)
    for layer in p.linears:
        for weight in layer.weight_parameters():
            assert weight.q.other is not None


# ---- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.rule("LOR-1")
@every_layer
def test_elements_are_dropped_in_training_alone_with_a_key_of_each_pass(form: str):
    p, plain = build(form, lora_dropout=0.25), build(form)
    p.module.eval()
    state = torch.get_rng_state()
    asserts.bitwise(p(), plain())
    assert torch.equal(torch.get_rng_state(), state), "a key that nothing reads"
    p.module.train()
    manual_seed(7)
    first, second = p(), p()
    manual_seed(7)
    keys = drawn_key(), drawn_key()
    for y, key in zip((first, second), keys, strict=True):
        asserts.bitwise(y, p.function(lora_dropout=0.25, lora_key=key))
    assert not torch.equal(first, second)
    assert not torch.equal(first, plain())


@pytest.mark.rule("LOR-1")
def test_recomputed_passes_drop_the_same_elements():
    p = build("GroupedMLP", lora_dropout=0.25)
    manual_seed(7)
    p.backward()
    expected = grads(p)
    manual_seed(7)
    x = p.x.clone().requires_grad_()
    checkpoint(p, x, use_reentrant=False).backward(p.dy)
    for one, two in zip(grads(p), expected, strict=True):
        asserts.bitwise(one, two)


# ---- state and copies ------------------------------------------------------------------------------------------------


@pytest.mark.rule("LOR-4", "CKP-2")
@pytest.mark.parametrize("quantized", [False, True])
@listed_or_not
@every_layer
def test_state_dicts_round_trip_between_both_forms_of_weights(form: str, listed: bool, quantized: bool):
    options: dict[str, Any] = {"recipe": WEIGHT_ONLY, "quantized_weights": True} if quantized else {}
    p = build(form, listed=listed, **options)
    buffer = io.BytesIO()
    torch.save(p.module.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=not quantized)
    assert [name for name in state if "lora" in name] == [name for name in p.module.state_dict() if "lora" in name]
    for other_form in (listed, not listed):
        q = build(form, listed=other_form, **options)
        with torch.no_grad():
            for each in (*q.factors(), *(each for layer in q.linears for each in layer.weight_parameters())):
                each.zero_()
        q.module.load_state_dict(state)
        asserts.bitwise(q(), p())
        q.backward()
        assert all(each.grad is not None for each in q.factors())
    asserts.bitwise(copy.deepcopy(p)(), p())


@pytest.mark.rule("LOR-4")
def test_adapters_load_beside_weights_of_a_base_without_them():
    p = build("GroupedMLP")
    base = build("GroupedMLP", lora_rank=None, lora_alpha=None)
    missing = p.module.load_state_dict(base.module.state_dict(), strict=False)
    assert sorted(missing.missing_keys) == sorted(n for n, _ in p.module.named_parameters() if "lora" in n)
    assert not missing.unexpected_keys


# ---- merging ---------------------------------------------------------------------------------------------------------


def _exact(layer: Any) -> tuple[Any, Any]:
    """W + s B A in float64 of the values of a layer, and the sum of the magnitudes of its terms."""
    members = layer.plain_members()
    w = (members[0] if members[0].dim() == 3 else torch.stack(members)).double()
    a, b = layer.lora_A.detach().double(), layer.lora_B.detach().double()
    return (w + layer.lora.scaling * b @ a).numpy(), (w.abs() + layer.lora.scaling * b.abs() @ a.abs()).numpy()


@pytest.mark.rule("LOR-5")
@pytest.mark.parametrize("base", ["float32", "bfloat16", "mxfp4", "nvfp4", "fp8_tensor", "mxfp8"])
@listed_or_not
@every_layer
def test_merged_weights_are_rounded_once(form: str, listed: bool, base: str):
    """The sum of r products is float32; the unmerged result moves by the sum of |x| times half a step of the weight."""
    dtype = "float32" if base == "float32" else "bfloat16"
    options: dict[str, Any] = {}
    if base in FORMATS and not FORMATS[base].plain:
        options = {"recipe": torch_bridge.weight_only(base), "quantized_weights": True}
    p = build(form, listed=listed, dtype=getattr(torch, dtype), **options)
    before = p().detach().double().numpy()
    exact = [_exact(layer) for layer in p.linears]
    for module in p.linears if form == "Sequential" else [p.module]:
        module.merge()
    for layer, (value, size) in zip(p.linears, exact, strict=True):
        members = layer.plain_members()
        held = members[0] if members[0].dim() == 3 else torch.stack(members)
        assert type(layer.weight_parameters()[0]) is torch.nn.Parameter
        rate = bounds.half_ulp(abs(value), dtype) + 2.0**-20 * size
        asserts.within(held, Bounded(value, rate, dtype), "a merged weight")
        assert not any(each.requires_grad for each in layer.parameters())
        assert not hasattr(layer, "lora_A")
        assert layer.recipe is None
        assert "lora" not in repr(layer)
    y = p().detach().double().numpy()
    # Norms: each of the two results has the error of one rounding of weights or rows per product.
    far = ((y - before)[:VALID] ** 2).sum() ** 0.5 / (before[:VALID] ** 2).sum() ** 0.5
    assert far < bounds.MERGED[dtype]


@pytest.mark.rule("LOR-5")
def test_adapters_that_are_wider_than_the_weight_are_not_rounded_first():
    """A bfloat16 weight and float32 adapters, as some trainers keep them; sums have few terms, so that float32 decides
    every rounding here."""
    layer: Any = nn.GroupedLinear(2, 8, 12, single_grouped_weight=True, lora_rank=2, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for name in ("lora_A", "lora_B"):
        wide = torch.randn(getattr(layer, name).shape, generator=generator)
        setattr(layer, name, torch.nn.Parameter(wide))
    exact = layer.weight.double() + layer.lora_B.double() @ layer.lora_A.double()
    layer.merge()
    asserts.bitwise(layer.weight, exact.float().bfloat16())


@pytest.mark.rule("LOR-5")
@every_layer
def test_merging_keeps_a_recipe_that_quantises_rows_too(form: str):
    p = build(form, recipe=torch_bridge.MXFP8, quantized_weights=True)
    before = p().detach().double()
    for layer in p.linears:
        assert layer.weight_parameters()[0].q.other is not None, "dy is quantised, so dgrad reads a form of its own"
        layer.merge()
        assert layer.recipe == torch_bridge.MXFP8
        assert not layer.quantized_weights
    assert ((p().detach().double() - before).norm() / before.norm()) < bounds.RING_CODES


@pytest.mark.rule("LOR-5", "ERR-1")
@pytest.mark.parametrize("form", LAYERS[:2])
def test_layers_without_adapters_are_not_merged(form: str):
    p = build(form)
    p.module.merge()
    with asserts.refused(ValueError, ["`merge` of", "no adapter", "expected one", "`lora_rank`"]):
        p.module.merge()


@pytest.mark.rule("LOR-5", "ERR-1", "DLY-2")
def test_layers_with_pending_gradients_are_not_merged():
    p = build("GroupedLinear", delay_wgrad_compute=True)
    p().sum().backward()
    with asserts.refused(ValueError, ["`merge` of", "of 1 passes", "expected none", "backward_dw"]):
        p.module.merge()
    p.module.backward_dw()
    p.module.merge()


@pytest.mark.rule("LOR-5", "ERR-1", "DLY-2")
@pytest.mark.parametrize("form", ["GroupedMLP", "MoE"])
def test_layers_are_merged_together_or_not_at_all(form: str):
    """The layer that is merged last has pending gradients."""
    if form == "MoE":
        manual_seed(0)
        module: Any = nn.MoE(H, F, G, 2, shared_dim=F, delay_wgrad_compute=True, **OPTIONS)
        linears = [each for each in module.modules() if isinstance(each, nn.GroupedLinear)]
        call: Any = lambda: module(made(5, H, dtype=torch.float32))[0]  # noqa: E731
    else:
        module, *_, linears = call = build(form, delay_wgrad_compute=True)
    for layer in linears[:-1]:
        layer.lora_A.requires_grad_(False)
        layer.lora_B.requires_grad_(False)
    call().sum().backward()
    assert [each.pending_wgrads() for each in linears] == [*[0] * (len(linears) - 1), 1]
    before = {key: each.clone() for key, each in module.state_dict().items()}
    with asserts.refused(ValueError, ["`merge` of", "of 1 passes", "expected none", "backward_dw"]):
        module.merge()
    assert module.state_dict().keys() == before.keys()
    for key, each in module.state_dict().items():
        asserts.bitwise(each, before[key], key)


@pytest.mark.rule("LOR-5", "DLY-7")
@pytest.mark.parametrize("quantized", [False, True])
@listed_or_not
@every_layer
def test_merged_weights_skip_the_post_hook_of_wrappers(form: str, listed: bool, quantized: bool):
    """They may be trained afterwards, and their gradients then wait."""
    options: dict[str, Any] = {"recipe": WEIGHT_ONLY, "quantized_weights": True} if quantized else {}
    for layer in build(form, listed=listed, delay_wgrad_compute=True, **options).linears:
        layer.merge()
        assert all(each.skip_backward_post_hook for each in layer.weight_parameters())


class Negative(torch.nn.Module):
    """A parametrisation."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return -value


@pytest.mark.rule("LOR-5", "ERR-1")
@pytest.mark.parametrize("name", ["weight", "lora_A"])
def test_parametrised_layers_are_not_merged(name: str):
    """What a parametrisation computes cannot be written: the adapter would be removed, and the weight stay."""
    layer = build("GroupedLinear", listed=False).module
    torch.nn.utils.parametrize.register_parametrization(layer, name, Negative())
    before = {key: each.clone() for key, each in layer.state_dict().items()}
    with asserts.refused(ValueError, ["`merge` of", f"`{name}`", "parametrisation", "expected a Parameter", "remove"]):
        layer.merge()
    for key, each in layer.state_dict().items():
        asserts.bitwise(each, before[key], key)


# ---- PEFT ------------------------------------------------------------------------------------------------------------

PREFIX = "base_model.model.model.layers.0.mlp.experts."


@pytest.mark.rule("LOR-5")
def test_adapters_go_to_peft_and_back():
    p, q = build("GroupedMLP"), build("GroupedMLP", listed=True)
    state = p.module.peft_state_dict(PREFIX)
    assert {name.removeprefix(PREFIX): tuple(each.shape) for name, each in state.items()} == {
        "base_layer.lora_A.weight": (G * R, H),
        "base_layer.lora_B.weight": (2 * F, R * G),
        "lora_A.weight": (G * R, F),
        "lora_B.weight": (H, R * G),
    }
    assert all(each.is_contiguous() and not each.requires_grad for each in state.values())
    assert p.module.peft_state_dict(PREFIX.removesuffix(".")).keys() == state.keys()  # a dot makes no difference
    with torch.no_grad():
        for each in q.factors():
            each.zero_()
    addresses = [each.data_ptr() for each in q.factors()]
    q.module.load_peft_state_dict(state, PREFIX.removesuffix("."))
    q.module.load_peft_state_dict(state | {"other": made(2)}, PREFIX)
    assert [each.data_ptr() for each in q.factors()] == addresses
    for one, two in zip(q.factors(), p.factors(), strict=True):
        asserts.bitwise(one, two)
    pair = torch_bridge.checkpoint.from_peft(state[f"{PREFIX}lora_A.weight"], state[f"{PREFIX}lora_B.weight"], G)
    for one, two in zip(pair, p.factors()[2:], strict=True):
        asserts.bitwise(one, two)


@pytest.mark.rule("LOR-5")
def test_merged_weights_have_the_delta_of_peft():
    """`ParamWrapper.get_delta_weight` of PEFT 0.21 for a parameter [E, out, in]."""
    p = build("GroupedMLP", dtype=torch.float32)
    state = {name: each.double() for name, each in p.module.peft_state_dict().items()}
    before = [layer.plain_members()[0].double() for layer in p.linears]
    sizes = [_exact(layer)[1] for layer in p.linears]
    p.module.merge()
    for place, layer, weight, size in zip(("base_layer.", ""), p.linears, before, sizes, strict=True):
        a, b = state[f"{place}lora_A.weight"], state[f"{place}lora_B.weight"]
        of_a, of_b = a.reshape(G, -1, a.shape[-1]), b.reshape(b.shape[0], -1, G)
        exact = (weight + SCALING * torch.einsum("o r e, e r i -> e o i", of_b, of_a)).numpy()
        limit = bounds.half_ulp(abs(exact), "float32") + 2.0**-20 * size
        asserts.within(layer.plain_members()[0], Bounded(exact, limit, "float32"), "a merged weight")


@pytest.mark.rule("LOR-5", "ERR-1", "CKP-4")
def test_adapters_of_peft_that_do_not_fit_change_nothing():
    p = build("GroupedMLP")
    held = [each.detach().clone() for each in p.factors()]
    state = p.module.peft_state_dict(PREFIX)
    last = f"{PREFIX}lora_B.weight"
    bad = {
        "missing": ({n: e for n, e in state.items() if n != last}, ["`lora_B.weight`", "is missing", "the prefix"]),
        "shape": (state | {last: state[last][1:]}, ["`lora_B.weight`", "(3, 31, 4)", "(3, 32, 4)", "the same rank"]),
        "rank": (state | {last: state[last][:, 1:]}, ["`lora_B.weight` (32, 11)", "G = 3", "check the number"]),
        "axes": (state | {last: state[last][None]}, ["`lora_B.weight`", "a matrix", "that PEFT saves"]),
    }
    for given, fragments in bad.values():
        with asserts.refused(ValueError, [each.replace("`lora_B.weight`", f"`{last}`") for each in fragments]):
            p.module.load_peft_state_dict(given, PREFIX)
        for each, wanted in zip(p.factors(), held, strict=True):
            asserts.bitwise(each, wanted)
    for none in (None, state | {last: state[last].tolist()}):
        with asserts.refused(
            TypeError,
            [
                "PEFT" if none is None else f"`{last}`",
                type(none).__name__ if none is None else "list",
                "expected a",
                "pass",
            ],
        ):
            p.module.load_peft_state_dict(none, PREFIX)
    p.module.merge()
    for use in (p.module.peft_state_dict, lambda: p.module.load_peft_state_dict(state, PREFIX)):
        with asserts.refused(ValueError, ["adapters of PEFT", "has none", "one in both", "`lora_rank`"]):
            use()


# ---- compiling -------------------------------------------------------------------------------------------------------


@pytest.mark.rule("LOR-1", "GRD-12")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.matrix(form=LAYERS, accumulate=(False, True), dropout=(0.0, 0.25))
def test_compiled_layers_give_the_same_bits(form: str, accumulate: bool, dropout: float):
    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        p = build(form, lora_dropout=dropout, accumulate_into_main_grad=accumulate)
        if accumulate:
            main_grads(p.factors(), 0.5)
        function, x = wrap(lambda x: torch.relu(p(x * 2))), p.x.clone().requires_grad_()
        manual_seed(11)
        y = function(x)
        y.backward(torch.ones_like(y))
        return [y.detach(), x.grad, *(each.main_grad if accumulate else each.grad for each in p.factors())]

    torch.compiler.reset()
    compiled = run(lambda f: torch.compile(f, fullgraph=True, backend="aot_eager"))
    for one, two in zip(compiled, run(lambda f: f), strict=True):
        asserts.bitwise(one, two)


@pytest.mark.rule("LOR-1")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@every_layer
def test_layers_with_quantised_weights_stay_outside_of_graphs(form: str):
    p = build(form, recipe=WEIGHT_ONLY, quantized_weights=True)
    y = p.backward()
    expected = grads(p)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: p(x), backend="eager")  # what stays outside has no backend
    found = compiled(p.x.clone().requires_grad_())
    found.backward(p.dy)
    asserts.bitwise(found, y)
    for one, two in zip(grads(p), expected, strict=True):
        asserts.bitwise(one, two)


# ---- the mixture-of-experts layer ------------------------------------------------------------------------------------


@pytest.mark.rule("LOR-1", "LOR-4", "LYR-16")
@pytest.mark.parametrize("shared", [False, True])
def test_a_moe_layer_trains_router_and_adapters(shared: bool):
    manual_seed(0)
    options: dict[str, Any] = {**OPTIONS, "shared_dim": F if shared else None, "dtype": torch.bfloat16}
    moe = nn.MoE(H, F, G, 2, **options)
    fill([each for each in moe.modules() if isinstance(each, nn.GroupedLinear)])
    trained = sorted(name for name, each in moe.named_parameters() if each.requires_grad)
    layers = ["experts.linear_fc1", "experts.linear_fc2", *(["shared.linear_fc1", "shared.linear_fc2"] * shared)]
    assert trained == sorted(["router.weight", *(f"{layer}.lora_{part}" for layer in layers for part in "AB")])
    x = made(5, H, seed=3).requires_grad_()
    y, _ = moe(x)
    y.float().square().sum().backward()
    assert all(moe.get_parameter(name).grad is not None for name in trained)
    if not shared:
        weights, experts, _ = torch_bridge.route.topk_router(moe.router(x), 2)
        asserts.bitwise(y, tokens_of(moe, x, experts, weights))
    before = y.detach().double()
    moe.merge()
    assert [name for name, each in moe.named_parameters() if each.requires_grad] == ["router.weight"]
    far = (moe(x)[0].detach().double() - before).norm() / before.norm()
    assert far < bounds.MERGED["bfloat16"]


@pytest.mark.rule("LOR-4", "DLY-2", "LOR-1")
def test_a_moe_layer_delays_the_gradients_of_its_adapters():
    def run(delay: bool) -> list[Any]:
        manual_seed(0)
        moe = nn.MoE(H, F, G, 2, **OPTIONS, dtype=torch.bfloat16, delay_wgrad_compute=delay)
        fill([moe.experts.linear_fc1, moe.experts.linear_fc2])
        for at in range(2):
            moe(made(5, H, seed=at).requires_grad_())[0].backward(made(5, H, seed=8))
        if delay:
            assert moe.pending_wgrads() == 2
            moe.backward_dw(all=True)
        return [each.grad for _, each in sorted(moe.named_parameters()) if each.requires_grad]

    for one, two in zip(run(True), run(False), strict=True):
        asserts.bitwise(one, two)


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.rule("LOR-1", "ERR-1")
@pytest.mark.parametrize(
    ("options", "kind", "fragments"),
    [
        ({"lora_rank": 0}, ValueError, ["`lora_rank` of GroupedLinear", "0", "1 to 256", "choose"]),
        ({"lora_rank": 257}, ValueError, ["`lora_rank` of GroupedLinear", "257", "1 to 256", "choose"]),
        ({"lora_rank": 2.0}, TypeError, ["`lora_rank` of GroupedLinear", "2.0", "an integer or None", "pass a rank"]),
        ({"lora_rank": None}, ValueError, ["`lora_alpha`", "without `lora_rank`", "pass a rank"]),
        ({"lora_dropout": 1.0}, ValueError, ["`lora_dropout`", "1.0", "0 to 1", "pass a rate"]),
        ({"lora_dropout": 1 - 1e-9}, ValueError, ["`lora_dropout`", "0.999999999", "float32 rounds", "pass a rate"]),
        (
            {"lora_alpha": float("nan")},
            ValueError,
            ["`lora_alpha` of GroupedLinear", "nan", "a finite number", "the rank"],
        ),
        ({"lora_alpha": "16"}, ValueError, ["`lora_alpha`", "'16'", "a finite number", "the rank"]),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], kind: type[Exception], fragments: list[str]):
    with asserts.refused(kind, fragments):
        nn.GroupedLinear(G, H, F, **OPTIONS | options)


@pytest.mark.rule("LOR-1", "ERR-1")
def test_layers_of_one_mlp_have_one_scaling_and_dropout():
    first = nn.GroupedLinear(G, H, 2 * F, bias=False, lora_rank=R, lora_alpha=3.0)
    second = nn.GroupedLinear(G, F, H, bias=False, **OPTIONS)
    module = nn.Sequential(first, nn.ScaledSwiGLU(), second)
    reason = module.why_unsupported()
    assert reason is not None
    assert "scale or dropout of the adapters differ" in reason
    with pytest.raises(NotImplementedError, match="scale or dropout"):
        nn.Sequential(first, nn.ScaledSwiGLU(), second, fuse="always")
    sizes, probs = torch.tensor(SIZES, dtype=torch.int32), torch.ones(ROWS)
    module(made(ROWS, H, dtype=torch.float32), sizes, probs, sizes).sum().backward()
    assert second.lora_A.grad is not None
    mlp = nn.GroupedMLP(G, H, F, **OPTIONS)
    mlp.linear_fc1 = first
    with asserts.refused(ValueError, ["`lora_alpha`", "0.75", "0.5", "the same in both"]):
        mlp(made(ROWS, H, dtype=torch.float32), sizes, probs)
