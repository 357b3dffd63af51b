"""`grouped_linear` with an adapter in PyTorch: lists, frozen parts, what is saved, accumulators, buffers, compiling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_bridge
from tests import asserts, bounds
from tests.torch_frontend.torch_tools import counted_launches, saved_tensors
from torch_bridge import grouped_linear

G, M, K, N, R = 3, 20, 16, 24, 4
SIZES = [5, 0, 11]
VALID = sum(SIZES)


def made(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


class Problem:
    """x, the frozen weight and the factors, which need gradients."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.x = made(M, K, dtype=dtype, seed=1).requires_grad_()
        self.w = made(G, N, K, dtype=dtype, seed=2)
        self.a = made(G, R, K, dtype=dtype, seed=3).requires_grad_()
        self.b = made(G, N, R, dtype=dtype, seed=4).requires_grad_()
        self.dy = made(M, N, dtype=dtype, seed=5)
        self.sizes = torch.tensor(SIZES, dtype=torch.int32)

    def __call__(self, **options: Any) -> Tensor:
        options = {"lora": (self.a, self.b), "lora_scaling": 0.5} | options
        return grouped_linear(self.x, self.w, self.sizes, **options)

    def grads(self, **options: Any) -> list[Tensor]:
        """Gradients of x, A and B."""
        return list(torch.autograd.grad(self(**options), (self.x, self.a, self.b), self.dy))


@pytest.mark.rule("LOR-4", "MAT-3", "MAT-5")
def test_lists_have_the_bits_of_packed_factors_and_frozen_members_no_gradient():
    p = Problem()
    a, b = ([each.detach().clone().requires_grad_() for each in packed] for packed in (p.a, p.b))
    a[2].requires_grad_(False)
    weights = list(p.w)
    y = grouped_linear(p.x, weights, p.sizes, lora=(a, b), lora_scaling=0.5)
    asserts.bitwise(y, p())
    dx, da, db = p.grads()
    found = torch.autograd.grad(y, (p.x, a[0], a[1], *b), p.dy)
    asserts.bitwise(found[0], dx)
    asserts.bitwise(torch.stack(found[1:3]), da[:2])
    asserts.bitwise(torch.stack(found[3:]), db)
    asserts.zero(da[1])
    asserts.zero(db[1])


SAVED = {
    "all": (lambda p: None, {"x": 1, "w": 1, "u": 1, "a": 1, "b": 1}),
    "frozen_a": (lambda p: p.a.requires_grad_(False), {"w": 1, "u": 1, "a": 1, "b": 1}),
    "frozen_b": (lambda p: p.b.requires_grad_(False), {"x": 1, "w": 1, "a": 1, "b": 1}),
    "frozen_x": (lambda p: p.x.requires_grad_(False), {"x": 1, "u": 1, "b": 1}),
    "b_alone": (lambda p: (p.x.requires_grad_(False), p.a.requires_grad_(False)), {"u": 1}),
    "nothing": (lambda p: [each.requires_grad_(False) for each in (p.x, p.a, p.b)], {}),
}


@pytest.mark.rule("LOR-2", "LOR-4", "ALL-4")
@pytest.mark.parametrize("name", SAVED)
def test_nothing_is_saved_for_frozen_parts(name: str):
    freeze: Callable[[Problem], Any]
    freeze, wanted = SAVED[name]
    p = Problem()
    freeze(p)
    shapes = {"x": (M, K), "w": (G, N, K), "u": (M, R), "a": (G, R, K), "b": (G, N, R)}
    with saved_tensors() as saved:
        p()
    found = sorted(tuple(each.shape) for each in saved if each.dim() > 1)
    assert found == sorted(shapes[each] for each, count in wanted.items() for _ in range(count))


@pytest.mark.rule("LOR-2", "LOR-3")
def test_a_quantised_base_is_saved_as_codes():
    p = Problem()
    q = torch_bridge.quantize(p.w, "mxfp4", axis=2)
    with saved_tensors() as saved:
        y = grouped_linear(p.x, q, p.sizes, lora=(p.a, p.b))
    weights = [each for each in saved if each.dim() == 3 and each.shape[:2] == (G, N) and each.shape[2] != R]
    assert q.scales is not None
    assert {each.data_ptr() for each in weights} == {q.values.data_ptr(), q.scales.data_ptr()}
    values = torch_bridge.dequantize(q, torch.bfloat16)
    plain = grouped_linear(p.x, values, p.sizes, lora=(p.a, p.b))
    for one, two in zip(
        torch.autograd.grad(y, (p.x, p.a, p.b), p.dy), torch.autograd.grad(plain, (p.x, p.a, p.b), p.dy), strict=True
    ):
        asserts.bitwise(one, two)
    asserts.bitwise(y, plain)


@pytest.mark.rule("LOR-4", "MAT-11", "GRD-2")
def test_gradients_go_to_accumulators():
    p = Problem()
    _, da, db = p.grads()
    into = [torch.full((G, R, K), 0.5), torch.full((G, N, R), 0.5)]
    y = p(lora_wgrad_accum=tuple(into))
    y.backward(p.dy)
    assert p.a.grad is None
    assert p.b.grad is None
    for found, exact in zip(into, (da, db), strict=True):
        asserts.filled(found[1], 0.5, "an empty group")
        assert torch.allclose(found - 0.5, exact.float(), rtol=bounds.ADDED[0], atol=bounds.ADDED[1])
    only_b = torch.zeros(G, N, R)
    p(lora_wgrad_accum=(None, only_b)).backward(p.dy)
    asserts.bitwise(p.a.grad, da)
    assert torch.allclose(only_b, db.float(), rtol=bounds.ADDED[0], atol=bounds.ADDED[1])
    with asserts.refused(ValueError, ["`lora_wgrad_accum[0]`", "1 tensors", "in the same form", "pass None"]):
        p(lora_wgrad_accum=([None], only_b))


@pytest.mark.rule("LOR-4", "GRD-1")
@pytest.mark.parametrize("listed", [False, True])
def test_gradients_go_to_main_grad(listed: bool):
    p = Problem()
    _, da, db = p.grads()
    factors: Any = [torch.nn.Parameter(each.detach().clone()) for each in (p.a, p.b)]
    if listed:
        factors = [[torch.nn.Parameter(each.detach().clone()) for each in packed] for packed in factors]
    owners = [each for some in factors for each in some] if listed else factors
    for each in owners:
        each.main_grad = torch.zeros(each.shape)
        each.grad_added_to_main_grad = False
    p(lora=tuple(factors), lora_wgrad_accum="main_grad").backward(p.dy)
    assert all(each.grad_added_to_main_grad for each in owners)
    found = [torch.stack([each.main_grad for each in some]) for some in factors] if listed else None
    for one, exact in zip(found or [each.main_grad for each in factors], (da, db), strict=True):
        assert torch.equal(one.to(exact.dtype), exact)


@pytest.mark.rule("LOR-1", "BUF-1")
@pytest.mark.parametrize("scaled", [False, True])
def test_buffers_of_the_caller_are_written_in_valid_rows(scaled: bool):
    p = Problem()
    options: dict[str, Any] = {"row_scale": made(M, dtype=torch.float32, seed=7).requires_grad_()} if scaled else {}
    y, grads = p(**options), p.grads(**options)
    out, grad_input = torch.full((M, N), 7.0).bfloat16(), torch.full((M, K), 7.0).bfloat16()
    found = p(out=out, grad_input=grad_input, **options)
    assert found.data_ptr() == out.data_ptr()
    asserts.bitwise(out[:VALID], y[:VALID])
    asserts.filled(out[VALID:], 7.0, "tail of out")
    torch.autograd.grad(found, (p.x, p.a, p.b), p.dy)
    asserts.bitwise(grad_input[:VALID], grads[0][:VALID])
    asserts.filled(grad_input[VALID:], 7.0, "tail of grad_input")


@pytest.mark.rule("LOR-1", "GRD-12")
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("listed", [False, True])
def test_compiled_regions_give_the_same_bits(dropout: float, listed: bool):
    p = Problem()
    key = torch.tensor([3, 4], dtype=torch.uint32) if dropout else None
    options: dict[str, Any] = {"lora_dropout": dropout, "lora_key": key}
    b = [each.detach().clone().requires_grad_() for each in p.b] if listed else [p.b]
    options["lora"] = p.a, b if listed else p.b
    compiled = torch.compile(lambda: p(**options), fullgraph=True, backend="aot_eager")
    asserts.bitwise(compiled(), p(**options))
    pairs = (torch.autograd.grad(y, (p.x, p.a, *b), p.dy) for y in (compiled(), p(**options)))
    for one, two in zip(*pairs, strict=True):
        asserts.bitwise(one, two)
    other = p(**options | {"lora_key": torch.tensor([4, 3], dtype=torch.uint32)}) if dropout else None
    assert other is None or not torch.equal(other, p(**options))


@pytest.mark.rule("LOR-4", "MAT-5")
@pytest.mark.parametrize("listed", [False, True])
def test_a_gradient_of_b_is_made_along_with_others_if_all_of_it_goes_to_autograd(listed: bool):
    p = Problem()
    b = [each.detach().clone().requires_grad_() for each in p.b] if listed else p.b
    wanted = p.grads(lora_scaling=1.0)[2]

    def launches(**options: Any) -> list[str]:
        y = p(lora=(p.a, b), lora_scaling=1.0, **options)
        with counted_launches() as launched:
            y.backward(p.dy)
        return launched

    products = ["grouped_matmul", "grouped_matmul"]
    assert sorted(launches()) == sorted([*products, "low_rank_grads"]), "dx, dA"
    asserts.bitwise(torch.stack([each.grad for each in b]) if listed else p.b.grad, wanted)
    into = [torch.zeros(N, R) for _ in range(G)] if listed else torch.zeros(G, N, R)
    assert launches(lora_wgrad_accum=(None, into)) == [*products, *products], "v, dx, dA, dB"
    if listed:
        b[2].requires_grad_(False)
        assert launches() == [*products, *products], "one member is frozen"
    p.x.requires_grad_(False)
    p.a.requires_grad_(False)
    assert launches() == products[:1], "dB alone"


@pytest.mark.rule("LOR-1")
def test_autocast_casts_the_adapter():
    p = Problem(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = p()
    q = Problem(torch.float32)
    for name in ("x", "w", "a", "b"):
        setattr(q, name, getattr(p, name).detach().bfloat16())
    asserts.bitwise(y, q())
    y.sum().backward()
    assert p.a.grad is not None
    assert p.a.grad.dtype == torch.float32


@pytest.mark.rule("LOR-1")
def test_what_a_scaled_adapter_reads_is_rounded_once():
    """One column and a rank of 1, so the products are exact in float32: scaling them after a rounding shows."""
    drawn = torch.Generator().manual_seed(0)
    x, a = torch.zeros(256, 8), torch.zeros(1, 1, 8)
    x[:, 0], a[0, 0, 0] = torch.randn(256, generator=drawn), 1.3
    x, a, b, w = (each.bfloat16() for each in (x, a, torch.ones(1, 8, 1), torch.zeros(1, 8, 8)))
    y = grouped_linear(x, w, [256], lora=(a, b), lora_scaling=0.37)
    product = x[:, :1].float() * a[0, 0, 0].float()
    asserts.bitwise(y, (product * 0.37).bfloat16().expand(256, 8).contiguous())
    assert not torch.equal(y[:, :1], (product.bfloat16().float() * 0.37).bfloat16())


@pytest.mark.rule("ERR-1", "LOR-1")
def test_members_and_keys_that_do_not_fit_are_refused():
    p = Problem()
    with asserts.refused(ValueError, ["`lora[1]`", "(2, 24, 4)", "(3, 24, 4)", "make A and B"]):
        p(lora=(p.a, p.b[:2]))
    with asserts.refused(ValueError, ["`lora[0][0]`", "(3, 4, 16)", "two axes [r, K] in a list", "pass one tensor"]):
        p(lora=([p.a, p.a, p.a], p.b))
    with asserts.refused(ValueError, ["`lora_key`", "int64[2]", "uint32[2]", "pass such"]):
        p(lora_dropout=0.5, lora_key=torch.tensor([1, 2]))
    with asserts.refused(TypeError, ["`lora[0]`", "float32", "bfloat16", "cast"]):
        p(lora=(p.a.float(), p.b))
    with asserts.refused(TypeError, ["`x`", "beside `lora`", "bfloat16", "pass the array before"]):
        x = torch_bridge.quantize(p.x.detach(), "mxfp8", group_sizes=p.sizes)
        grouped_linear(x, p.w, p.sizes, lora=(p.a, p.b))
    with asserts.refused(ValueError, ["`lora` of grouped_mlp_fwd", "not deferred", "call grouped_mlp"]):
        torch_bridge.grouped_mlp_fwd(p.x, p.w, p.w, p.sizes, lora=None)
