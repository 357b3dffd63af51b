"""`grouped_mlp` and `routed_mlp` with adapters in PyTorch: lists, destinations, buffers, launches, compiling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import torch_bridge
from tests import asserts, bounds
from tests.torch_frontend.lora_layer_tools import ROWS, SCALING, SIZES, F, G, H, R, made
from tests.torch_frontend.torch_tools import counted_launches, opcheck, saved_tensors

VALID = sum(SIZES)
SHAPES = {"a_wi": (G, R, H), "b_wi": (G, 2 * F, R), "a_wo": (G, R, F), "b_wo": (G, H, R)}
rows_or_tokens = pytest.mark.parametrize("tokens", [False, True], ids=["rows", "tokens"])
packed_or_listed = pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])


class Problem:
    """Rows or tokens, frozen weights, and factors that need gradients; group 1 is empty."""

    def __init__(self, tokens: bool, *, listed: bool = False, dtype: torch.dtype = torch.bfloat16) -> None:
        self.tokens = tokens
        self.x = made(ROWS, H, dtype=dtype, seed=1).requires_grad_()
        self.dy = made(ROWS, H, dtype=dtype, seed=2)
        self.sizes = torch.tensor(SIZES, dtype=torch.int32)
        self.experts = torch.tensor([[0, 2], [2, -1]], dtype=torch.int32).repeat(ROWS // 2, 1)
        probs = made(*((ROWS, 2) if tokens else (ROWS,)), dtype=torch.float32, seed=3)
        self.probs = probs.abs().requires_grad_()
        self.wi: Any = made(G, 2 * F, H, dtype=dtype, seed=4)
        self.wo: Any = made(G, H, F, dtype=dtype, seed=5)
        packed = [
            (made(*each, dtype=torch.float32, seed=6 + at) / 4).to(dtype) for at, each in enumerate(SHAPES.values())
        ]
        self.factors: list[Any] = [
            [Parameter(each.clone()) for each in whole] if listed else Parameter(whole) for whole in packed
        ]

    def __call__(self, **options: Any) -> Tensor:
        a_wi, b_wi, a_wo, b_wo = self.factors
        options = {"lora": ((a_wi, b_wi), (a_wo, b_wo)), "lora_scaling": SCALING, **options}
        if self.tokens:
            return torch_bridge.routed_mlp(self.x, self.experts, self.probs, self.wi, self.wo, **options)
        return torch_bridge.grouped_mlp(self.x, self.wi, self.wo, self.sizes, probs=self.probs, **options)

    def leaves(self) -> list[Any]:
        """Every parameter: the factors, or their members."""
        return [each for some in self.factors for each in (some if isinstance(some, list) else [some])]

    def grads(self, **options: Any) -> list[Tensor]:
        """Gradients of x, the probabilities and the four packed factors."""
        found = list(torch.autograd.grad(self(**options), (self.x, self.probs, *self.leaves()), self.dy))
        of_factors = found[2:]
        if len(of_factors) > len(SHAPES):
            of_factors = [torch.stack(of_factors[at : at + G]) for at in range(0, len(of_factors), G)]
        return [*found[:2], *of_factors]


@pytest.mark.rule("LOR-4", "MAT-3", "MAT-5")
@rows_or_tokens
def test_lists_have_the_bits_of_packed_factors_and_frozen_members_no_gradient(tokens: bool):
    p, q = Problem(tokens), Problem(tokens, listed=True)
    asserts.bitwise(q(), p())
    for one, two in zip(q.grads(), p.grads(), strict=True):
        asserts.bitwise(one, two)
    q.wi, q.wo = list(q.wi), list(q.wo)
    asserts.bitwise(q(), p())
    frozen = [q.factors[0][2], q.factors[3][0]]
    for each in frozen:
        each.requires_grad_(False)
    q().backward(q.dy)
    assert all(each.grad is None for each in frozen)
    for whole, some in zip(p.grads()[2:], q.factors, strict=True):
        for wanted, each in zip(whole, some, strict=True):
            if each.requires_grad:
                asserts.bitwise(each.grad, wanted)


def _into(shape: tuple[int, ...], listed: bool) -> Any:
    buffer = torch.full(shape, 0.5)
    return list(buffer) if listed else buffer


@pytest.mark.rule("LOR-4", "MAT-11", "GRD-2")
@packed_or_listed
@rows_or_tokens
def test_gradients_go_to_accumulators(tokens: bool, listed: bool):
    p = Problem(tokens, listed=listed)
    exact = Problem(tokens).grads()[2:]
    into = [_into(SHAPES[name], listed) for name in ("a_wi", "b_wi", "a_wo")]
    p(lora_wgrad_accum=((into[0], into[1]), (into[2], None))).backward(p.dy)
    for buffer, wanted in zip(into, exact, strict=False):
        found = torch.stack(buffer) if listed else buffer
        asserts.filled(found[1], 0.5, "an empty group")
        assert torch.allclose(found - 0.5, wanted.float(), rtol=bounds.ADDED[0], atol=bounds.ADDED[1])
    assert all(each.grad is None for each in p.leaves()[: len(p.leaves()) * 3 // 4])
    last = torch.stack([each.grad for each in p.factors[3]]) if listed else p.factors[3].grad
    asserts.bitwise(last, exact[3])


@pytest.mark.rule("LOR-4", "GRD-1")
@packed_or_listed
@rows_or_tokens
def test_gradients_go_to_main_grad(tokens: bool, listed: bool):
    p = Problem(tokens, listed=listed)
    for each in p.leaves():
        each.main_grad, each.grad_added_to_main_grad = torch.zeros(each.shape), False
    p(lora_wgrad_accum="main_grad").backward(p.dy)
    assert all(each.grad_added_to_main_grad for each in p.leaves())
    for some, wanted in zip(p.factors, Problem(tokens).grads()[2:], strict=True):
        found = torch.stack([each.main_grad for each in some]) if listed else some.main_grad
        assert torch.equal(found.to(wanted.dtype), wanted)


@pytest.mark.rule("LOR-1", "BUF-1")
@rows_or_tokens
def test_buffers_of_the_caller_are_written(tokens: bool):
    p = Problem(tokens)
    y, grads = p(), p.grads()
    valid = slice(0, ROWS if tokens else VALID)
    out, grad_input = torch.full((ROWS, H), 7.0).bfloat16(), torch.full((ROWS, H), 7.0).bfloat16()
    found = p(out=out, grad_input=grad_input)
    assert found.data_ptr() == out.data_ptr()
    asserts.bitwise(out[valid], y[valid])
    asserts.filled(out[valid.stop :], 7.0, "tail of out")
    again = torch.autograd.grad(found, (p.x, p.probs, *p.leaves()), p.dy)
    for one, two in zip(again[1:], grads[1:], strict=True):
        asserts.bitwise(one, two)
    asserts.bitwise(grad_input[valid], grads[0][valid])
    asserts.filled(grad_input[valid.stop :], 7.0, "tail of grad_input")


FORWARD = ("grouped_matmul", "grouped_matmul_act", "grouped_matmul", "grouped_matmul")
"""x A1; the first product; z A2; the second product."""
OF_X = ("grouped_matmul", "grouped_matmul_dact", "grouped_matmul", "grouped_matmul")
"""dy B2^T; dy W2^T; dh B1^T; dh W1^T."""
OF_FACTORS = ("grouped_matmul",) * 4
"""Each on its own, as where they are accumulated."""
AT_ONCE = ("low_rank_grads", "grouped_matmul_dact", "low_rank_grads", "grouped_matmul")
"""`OF_X`, with the gradients of B1 and B2."""


@pytest.mark.rule("LOR-3", "LOR-4")
@rows_or_tokens
def test_the_gradient_of_x_does_not_depend_on_those_of_the_factors(tokens: bool):
    """With a recipe that quantises the gradients at the hidden rows, which the factors of wi read unquantised."""
    p = Problem(tokens)
    wanted = p.grads(recipe=torch_bridge.MXFP8)[0]
    for each in p.leaves():
        each.requires_grad_(False)
    (found,) = torch.autograd.grad(p(recipe=torch_bridge.MXFP8), p.x, p.dy)
    asserts.bitwise(found, wanted)


@pytest.mark.rule("LOR-3", "ALL-4")
@pytest.mark.parametrize("of_wi", [False, True])
def test_tokens_are_kept_for_the_factor_that_reads_them(of_wi: bool):
    """Without an adapter of wi no gradient reads them; those of x and of the probabilities read hidden rows."""
    p = Problem(True)
    a_wi, b_wi, a_wo, b_wo = p.factors
    with saved_tensors() as kept:
        p(lora=((a_wi, b_wi) if of_wi else None, (a_wo, b_wo)))
    assert (p.x.data_ptr() in {each.data_ptr() for each in kept}) == of_wi


@pytest.mark.rule("LOR-2", "LOR-4")
def test_each_factor_has_one_launch_and_what_goes_through_the_other_none():
    """u B in forward and v A^T in backward are operands of the products of the base."""
    p = Problem(False)
    with counted_launches() as forward:
        y = p(lora_scaling=1.0)
    assert tuple(forward) == FORWARD
    with counted_launches() as backward:
        y.backward(p.dy)
    assert sorted(backward) == sorted([*AT_ONCE, *OF_FACTORS[:2]])
    with counted_launches() as scaled:
        p()
    assert sorted(scaled) == sorted([*FORWARD, "add_rows", "add_rows"]), "u is scaled and rounded in one pass"
    for each in p.leaves():
        each.requires_grad_(False)
    y = p(lora_scaling=1.0)
    with counted_launches() as of_x:
        y.backward(p.dy)
    assert tuple(of_x) == OF_X


@pytest.mark.rule("LOR-4", "MAT-11", "GRD-1")
@packed_or_listed
def test_accumulated_gradients_and_those_of_some_members_have_a_launch_each(listed: bool):
    p = Problem(False, listed=listed)
    for each in p.leaves():
        each.main_grad, each.grad_added_to_main_grad = torch.zeros(each.shape), False
    y = p(lora_scaling=1.0, lora_wgrad_accum="main_grad")
    with counted_launches() as backward:
        y.backward(p.dy)
    assert sorted(backward) == sorted([*OF_X, *OF_FACTORS])
    if listed:
        p.factors[1][0].requires_grad_(False)
        y = p(lora_scaling=1.0)
        with counted_launches() as of_some:
            y.backward(p.dy)
        assert sorted(of_some) == sorted([*AT_ONCE[:2], *OF_X[2:], *OF_FACTORS[:3]])


@pytest.mark.rule("LOR-1")
@rows_or_tokens
def test_autocast_casts_weights_and_factors(tokens: bool):
    p, q = Problem(tokens, dtype=torch.float32), Problem(tokens, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = p()
    q.x, q.wi, q.wo = (each.detach().bfloat16() for each in (q.x, q.wi, q.wo))
    q.factors = [each.detach().bfloat16() for each in q.factors]
    asserts.bitwise(y, q())
    with counted_launches() as backward:
        y.backward(p.dy.bfloat16())
    assert backward.count("low_rank_grads") == len(AT_ONCE[::2])
    assert all(each.grad.dtype == torch.float32 for each in p.leaves())


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.rule("LOR-1", "GRD-12")
@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.matrix(tokens=(False, True), listed=(False, True), dropout=(0.0, 0.25))
def test_compiled_regions_give_the_same_bits(tokens: bool, listed: bool, dropout: float):
    p = Problem(tokens, listed=listed)
    key = torch.tensor([3, 4], dtype=torch.uint32) if dropout else None
    options: dict[str, Any] = {"lora_dropout": dropout, "lora_key": key}
    compiled = torch.compile(lambda: p(**options), fullgraph=True, backend="aot_eager")
    inputs, y = (p.x, p.probs, *p.leaves()), p(**options)
    found = compiled()
    asserts.bitwise(found, y)
    pairs = (torch.autograd.grad(each, inputs, p.dy) for each in (found, y))
    for one, two in zip(*pairs, strict=True):
        asserts.bitwise(one, two)


@pytest.mark.rule("LOR-1")
@rows_or_tokens
def test_operators_pass_the_checks_of_torch(tokens: bool):
    p = Problem(tokens)
    key = torch.tensor([3, 4], dtype=torch.uint32)
    names = opcheck(lambda: p(lora_dropout=0.25, lora_key=key).backward(p.dy))
    name = f"{'routed' if tokens else 'grouped'}_mlp_lora"
    assert names == {name, f"{name}_at_hidden", f"{name}_first_product", "weight_grad"}
