"""Layers with adapters in PyTorch: frozen weights, gradients, dropout, states, merged weights, PEFT, compiling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_bridge
from grouped_core.formats import FORMATS, PLAIN
from grouped_core.recipes import Recipe
from tests import asserts, bounds
from tests.bounds import Bounded
from tests.torch_frontend.torch_tools import saved_tensors
from torch_bridge import nn

G, H, F, T, R = 3, 32, 48, 20, 4
SIZES = torch.tensor([5, 0, 11], dtype=torch.int32)
VALID = 16
HELD = Recipe((PLAIN["bfloat16"], FORMATS["mxfp4"]), (PLAIN["bfloat16"], FORMATS["mxfp4"]), (PLAIN["bfloat16"],) * 2,
              "MXFP4 weights")  # fmt: skip
"""Of weights alone: rows and gradients stay plain."""
KINDS = ("GroupedLinear", "GroupedMLP", "MoE")
FACTORS = {"lora_A", "lora_B"}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def made(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer_of(
    kind: str, *, dtype: torch.dtype = torch.bfloat16, seed: int = 1, filled: bool = True, **options: Any
) -> Any:
    """A layer with adapters; `filled`: B is not zero."""
    torch.manual_seed(seed)
    options = {"lora_rank": R, "lora_alpha": 2.0, "dtype": dtype, **options}
    if kind == "GroupedLinear":
        layer: Any = nn.GroupedLinear(G, H, F, **options)
    elif kind == "GroupedMLP":
        layer = nn.GroupedMLP(G, H, F, **options)
    else:
        layer = nn.MoE(H, F, G, 2, **options)
    for name, parameter in layer.named_parameters():
        if filled and name.endswith("lora_B"):
            with torch.no_grad():
                parameter.copy_(made(*parameter.shape, seed=len(name)) / R)
    return layer


def rows(dtype: torch.dtype = torch.bfloat16, seed: int = 2) -> Tensor:
    return made(T, H, dtype=dtype, seed=seed)


def call(layer: Any, x: Tensor) -> Tensor:
    if isinstance(layer, nn.MoE):
        return layer(x)[0]
    return layer(x, SIZES)


def linears(layer: Any) -> list[Any]:
    return [each for each in layer.modules() if isinstance(each, nn.GroupedLinear)]


def factors(layer: Any) -> dict[str, Any]:
    return {name: each for name, each in layer.named_parameters() if name.split(".")[-1] in FACTORS}


def grads(layer: Any, x: Tensor) -> dict[str, Tensor]:
    """Gradients of the adapters after one pass over x."""
    layer.zero_grad()
    y = call(layer, x)
    y.backward(made(*y.shape, dtype=y.dtype, seed=9))
    return {name: each.grad for name, each in factors(layer).items()}


@pytest.mark.rule("LOR-1", "LOR-2")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_weights_and_biases_are_frozen_and_step_0_is_the_base(kind, single, bias):
    layer = layer_of(kind, single_grouped_weight=single, bias=bias, filled=False)
    live = {name for name, each in layer.named_parameters() if each.requires_grad}
    assert live == set(factors(layer)) | ({"router.weight"} if kind == "MoE" else set())
    assert len(factors(layer)) == 2 * len(linears(layer))
    x = rows().requires_grad_()
    base = layer_of(kind, single_grouped_weight=single, bias=bias, lora_rank=None, lora_alpha=None)
    missing = base.load_state_dict({k: v for k, v in layer.state_dict().items() if "lora_" not in k})
    assert not missing.missing_keys
    asserts.bitwise(call(layer, x), call(base, x))
    call(layer, x).sum().backward()
    assert all(each.grad is None for name, each in layer.named_parameters() if name not in live)
    assert x.grad is not None
    for each in linears(layer):
        assert each.lora_A.grad is not None
        assert not each.lora_A.grad.any(), "behind a B of zeros"
        assert each.lora_B.grad is not None


@pytest.mark.rule("LOR-4", "MAT-3")
@pytest.mark.parametrize("kind", KINDS)
def test_lists_and_single_weights_have_the_same_bits(kind):
    one, other = (layer_of(kind, single_grouped_weight=single, bias=False) for single in (True, False))
    for a, b in zip(linears(one), linears(other), strict=True):
        with torch.no_grad():
            for g, name in enumerate(b.weight_names):
                getattr(b, name).copy_(a.weight[g])
            b.lora_A.copy_(a.lora_A)
            b.lora_B.copy_(a.lora_B)
    if kind == "MoE":
        other.router.load_state_dict(one.router.state_dict())
    x = rows()
    asserts.bitwise(call(other, x), call(one, x))
    first = grads(one, x)
    for name, each in grads(other, x).items():
        asserts.bitwise(each, first[name], name)


@pytest.mark.rule("LOR-1", "LOR-4")
@pytest.mark.parametrize("kind", ["GroupedLinear", "GroupedMLP"])
def test_layers_have_the_bits_of_the_functions(kind):
    layer, x = layer_of(kind, single_grouped_weight=True, bias=False), rows()
    pairs = [(each.lora_A, each.lora_B) for each in linears(layer)]
    weights = [each.weight for each in linears(layer)]
    options: dict[str, Any] = {"lora_scaling": 2.0 / R}
    if kind == "GroupedLinear":
        expected = torch_bridge.grouped_linear(x, weights[0], SIZES, lora=pairs[0], **options)
    else:
        expected = torch_bridge.grouped_mlp(x, weights[0], weights[1], SIZES, lora=pairs, **options)
    asserts.bitwise(call(layer, x), expected)


@pytest.mark.rule("LOR-1")
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_casts_adapters(kind):
    layer = layer_of(kind, dtype=torch.float32, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        found = grads(layer, rows(torch.float32))
        y = call(layer, rows(torch.float32))
    assert all(each.dtype == torch.float32 for each in found.values())
    if kind == "MoE":
        return  # its router computes in float32 either way
    narrow = layer_of(kind, bias=False)
    narrow.load_state_dict(layer.state_dict())
    asserts.bitwise(y, call(narrow, rows(torch.float32).bfloat16()))


@pytest.mark.rule("LOR-4", "GRD-1")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_go_to_main_grad(kind):
    layer = layer_of(kind, bias=False, accumulate_into_main_grad=True)
    expected = grads(layer_of(kind, bias=False), rows())
    for each in factors(layer).values():
        each.main_grad = torch.zeros(each.shape)
        each.grad_added_to_main_grad = False
    call_grads = call(layer, rows())
    call_grads.backward(made(*call_grads.shape, seed=9))
    for name, each in factors(layer).items():
        assert each.grad_added_to_main_grad
        assert torch.equal(each.main_grad.bfloat16(), expected[name]), name


@pytest.mark.rule("LOR-4", "DLY-1", "DLY-3")
@pytest.mark.parametrize("kind", KINDS)
def test_delayed_gradients_of_two_microbatches(kind):
    """One pass is pending per microbatch; afterwards the sums are those of gradients at once."""
    layer, plain = (layer_of(kind, bias=False, delay_wgrad_compute=delay) for delay in (True, False))
    for seed in (3, 4):
        for each in (layer, plain):
            y = call(each, rows(seed=seed))
            y.backward(made(*y.shape, seed=seed))
    assert layer.pending_wgrads() == 2
    assert all(each.grad is None for each in factors(layer).values())
    layer.backward_dw()
    assert layer.pending_wgrads() == 1
    layer.backward_dw()
    assert layer.pending_wgrads() == 0
    for name, each in factors(plain).items():
        asserts.bitwise(factors(layer)[name].grad, each.grad, name)


@pytest.mark.rule("LOR-1")
@pytest.mark.parametrize("kind", KINDS)
def test_elements_are_dropped_in_training_alone(kind):
    layer = layer_of(kind, bias=False, lora_dropout=0.5)
    without = layer_of(kind, bias=False)
    x = rows()
    torch.manual_seed(0)
    first, second = call(layer, x), call(layer, x)
    assert not torch.equal(first, second), "each pass draws its masks"
    torch.manual_seed(0)
    asserts.bitwise(call(layer, x), first)
    layer.eval()
    asserts.bitwise(call(layer, x), call(without, x))


@pytest.mark.rule("LOR-4")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantized", [False, True])
def test_states_load_and_save(kind, quantized):
    options: dict[str, Any] = {"recipe": HELD, "quantized_weights": True} if quantized else {}
    one, other = (layer_of(kind, bias=False, seed=seed, **options) for seed in (1, 2))
    x = rows()
    assert not torch.equal(call(one, x), call(other, x))
    other.load_state_dict(one.state_dict())
    asserts.bitwise(call(other, x), call(one, x))


@pytest.mark.rule("LOR-5")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
def test_merged_weights_equal_the_adapter_within_a_rounding(kind, single, quantized):
    options: dict[str, Any] = {"recipe": HELD, "quantized_weights": True} if quantized else {}
    layer, x = layer_of(kind, bias=False, single_grouped_weight=single, **options), rows()
    before, scaling = call(layer, x), 2.0 / R
    wanted = []
    for each in linears(layer):
        members = each.plain_members()
        whole = members[0] if members[0].dim() == 3 else torch.stack(members)
        wanted.append(whole.double() + scaling * each.lora_B.double() @ each.lora_A.double())
    layer.merge()
    for each, exact in zip(linears(layer), wanted, strict=True):
        assert not FACTORS & set(dict(each.named_parameters()))
        members = [getattr(each, name).detach() for name in each.weight_names]
        merged = members[0] if single else torch.stack(members)
        assert merged.dtype == torch.bfloat16
        assert type(merged) is Tensor
        size = exact.detach().abs().numpy()
        asserts.within(merged, Bounded(exact.detach().numpy(), bounds.merged(size, "bfloat16"), "bfloat16"), "weights")
    moved = (call(layer, x)[:VALID].float() - before[:VALID].float()).norm()
    assert moved <= bounds.MERGED * len(linears(layer)) * before[:VALID].float().norm()
    with asserts.refused(ValueError, ["`merge` of", "no adapter", "expected one", "`lora_rank`"]):
        layer.merge()


@pytest.mark.rule("LOR-2", "LOR-3")
@pytest.mark.parametrize("single", [False, True])
def test_one_form_of_quantised_weights_is_held(single):
    """4.25 bits an element of MXFP4; a second form for dgrad would double that."""
    layer = layer_of("GroupedLinear", bias=False, recipe=HELD, quantized_weights=True, single_grouped_weight=single)
    stores = [getattr(layer, name) for name in layer.weight_names]
    assert all(each.q.other is None for each in stores)
    held = sum(part.numel() * part.element_size() for each in stores for part in each.q.slots if part is not None)
    assert held == G * F * H // 2 + G * F * H // 32
    x = rows().requires_grad_()
    found = grads(layer, x)
    assert all(each.abs().sum() > 0 for each in found.values())
    assert x.grad is not None


@pytest.mark.rule("LOR-2", "LOR-4")
@pytest.mark.parametrize(
    ("frozen", "shapes"),
    [
        ((), {(T, H): 1, (T, R): 2, (T, 2 * F): 1}),
        (("linear_fc1.lora_A", "linear_fc1.lora_B"), {(T, R): 1, (T, F): 1}),
        (("linear_fc2.lora_A", "linear_fc2.lora_B"), {(T, H): 1, (T, R): 1, (T, 2 * F): 1}),
        (("linear_fc1.lora_B", "linear_fc1.lora_A", "linear_fc2.lora_A"), {(T, R): 1}),
    ],
)
def test_rows_that_are_saved(frozen, shapes):
    layer = layer_of("GroupedMLP", bias=False)
    for name in frozen:
        layer.get_parameter(name).requires_grad_(False)
    with saved_tensors() as saved:
        call(layer, rows())
    found: dict[tuple[int, ...], int] = {}
    for each in saved:
        if each.dim() == 2 and each.shape[0] == T:
            found[tuple(each.shape)] = found.get(tuple(each.shape), 0) + 1
    assert found == shapes


def peft_delta(state: dict[str, Tensor], place: str) -> Tensor:
    """[G, out, in], as PEFT computes what it adds to a parameter, without its scaling."""
    a, b = (state[f"{place}{name}.weight"] for name in ("lora_A", "lora_B"))
    a, b = a.reshape(G, R, -1), b.reshape(b.shape[0], R, G)
    return torch.einsum("o r e, e r i -> e o i", b, a)


@pytest.mark.rule("LOR-5")
def test_adapters_of_peft():
    layer = layer_of("GroupedMLP", bias=False, dtype=torch.float32)
    prefix = "model.experts."
    state = layer.peft_state_dict(prefix)
    assert {name: tuple(each.shape) for name, each in state.items()} == {
        f"{prefix}base_layer.lora_A.weight": (G * R, H),
        f"{prefix}base_layer.lora_B.weight": (2 * F, R * G),
        f"{prefix}lora_A.weight": (G * R, F),
        f"{prefix}lora_B.weight": (H, R * G),
    }
    for each, place in zip(linears(layer), (f"{prefix}base_layer.", prefix), strict=True):
        expected = each.lora_B @ each.lora_A
        assert torch.allclose(peft_delta(state, place), expected, rtol=bounds.REPEATED, atol=bounds.REPEATED)
    other = layer_of("GroupedMLP", bias=False, dtype=torch.float32, seed=5)
    other.load_peft_state_dict({**state, "another": torch.zeros(1)}, prefix)
    for one, two in zip(factors(layer).values(), factors(other).values(), strict=True):
        asserts.bitwise(two, one)
    kept = {name: each.detach().clone() for name, each in factors(other).items()}
    for bad, fragments in (
        ({}, ["is missing", "check the prefix"]),
        ({**state, f"{prefix}lora_A.weight": torch.zeros(G * R, F + 1)}, ["lora_A.weight", "expected", "same rank"]),
        ({**state, f"{prefix}lora_B.weight": torch.zeros(H, R * G + 1)}, ["lora_B.weight", "number of experts"]),
    ):
        with asserts.refused(ValueError, fragments):
            other.load_peft_state_dict(bad, prefix)
    for name, each in factors(other).items():
        asserts.bitwise(each, kept[name], "nothing is loaded")


@pytest.mark.rule("LOR-1", "GRD-12")
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers_give_the_same_bits(kind):
    layer, x = layer_of(kind, bias=False), rows()
    expected = grads(layer, x)
    y = call(layer, x)
    compiled = torch.compile(lambda x: call(layer, x), fullgraph=True, backend="aot_eager")
    layer.zero_grad()
    found = compiled(x)
    asserts.bitwise(found, y)
    found.backward(made(*found.shape, dtype=found.dtype, seed=9))
    for name, each in factors(layer).items():
        asserts.bitwise(each.grad, expected[name], name)


@pytest.mark.rule("ERR-1", "LOR-1")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "error", "fragments"),
    [
        ({"lora_rank": 0}, ValueError, ["`lora_rank`", "0", "1 to 256"]),
        ({"lora_rank": 257}, ValueError, ["`lora_rank`", "257", "1 to 256"]),
        ({"lora_rank": 2.0}, TypeError, ["`lora_rank`", "2.0", "an integer or None"]),
        ({"lora_rank": None, "lora_alpha": 2.0}, ValueError, ["`lora_alpha`", "without `lora_rank`", "pass a rank"]),
        ({"lora_dropout": 1.0}, ValueError, ["`lora_dropout`", "1.0", "0 to 1, without 1"]),
    ],
)
def test_options_that_do_not_fit_are_refused(kind, options, error, fragments):
    with asserts.refused(error, fragments):
        layer_of(kind, **options)
