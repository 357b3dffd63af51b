"""Weight gradients that go elsewhere than `.grad`, for functions: the table in docs/contracts.md."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests import asserts, bounds
from tests.torch_frontend.gradient_tools import as_argument, members_of, plain_gradient, stacked
from tests.torch_frontend.nn_tools import CASE, EMPTY
from tests.torch_frontend.torch_tools import counted_launches, leaf, operation, saved_tensors, small
from torch_bridge import grouped_linear, main_grad, nn


class _Row(NamedTuple):
    """Inputs of the table: requires_grad, accumulate, has the flag, zero_out, overwrite, FSDP."""

    R: bool
    A: bool
    P: bool
    Z: bool
    overwrite: bool
    fsdp: bool


ROWS = [_Row(*row) for row in itertools.product((False, True), repeat=6)]


@pytest.mark.rule("DEF-7", "DEF-11", "TE #2765")
@pytest.mark.rule("GRD-1")
@pytest.mark.rule("GRD-2")
@pytest.mark.rule("GRD-3")
@pytest.mark.rule("GRD-4")
@pytest.mark.rule("GRD-6")
@pytest.mark.rule("GRD-7")
@pytest.mark.rule("GRP-9")
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "".join(n for n, on in zip(row._fields, row, strict=True) if on))
def test_the_table(row: _Row, listed: bool) -> None:
    t = small(CASE)
    plain = plain_gradient(t)
    parameters = members_of(t.w, listed)
    start = float("nan") if row.overwrite else 0.5
    buffers = [torch.full((each.numel(),), start) for each in parameters]  # flat, as Megatron's are
    looked_up = []
    for parameter, buffer in zip(parameters, buffers, strict=True):
        parameter.requires_grad_(row.R)
        if row.P:
            parameter.grad_added_to_main_grad = False
        if row.Z:
            parameter.zero_out_wgrad = True
        if row.overwrite:
            parameter.overwrite_main_grad = True
        if row.fsdp:
            parameter.__fsdp_param__ = object()
            parameter.get_main_grad = lambda buffer=buffer: looked_up.append(buffer) or buffer
        else:
            parameter.main_grad = buffer
    x = leaf(t.x)
    y = grouped_linear(x, as_argument(parameters, listed), t.sizes, wgrad_accum="main_grad" if row.A else None)
    assert not looked_up, "main_grad was looked up before it was written"
    y.backward(t.dy)

    written = row.R and row.A
    assert len(looked_up) == (len(parameters) if written and row.fsdp else 0)
    for g, (parameter, buffer) in enumerate(zip(parameters, buffers, strict=True)):
        what = f"weight {g}"
        wgrad = plain[g] if listed else plain
        if not row.R:
            assert parameter.grad is None
        elif not row.A:
            asserts.bitwise(parameter.grad, wgrad, what)
        elif row.P:
            asserts.zero(parameter.grad, f"{what}: dummy")
            assert parameter.grad.shape == parameter.shape
        else:
            assert parameter.grad is None
        if not written:
            asserts.filled(buffer, start, f"{what}: main_grad")
        elif row.overwrite:
            asserts.bitwise(buffer.view(parameter.shape), wgrad, f"{what}: main_grad")
        if row.P:
            assert parameter.grad_added_to_main_grad is written, what
        else:
            assert not hasattr(parameter, "grad_added_to_main_grad"), what
        if written and row.fsdp:
            assert parameter.main_grad is buffer
    if written and not row.overwrite:
        op = operation()
        x_array, w_array, sizes_array = (asserts.as_numpy(each) for each in (t.x, t.w, t.sizes))
        held = torch.full(t.w.shape, 0.5)
        expected = bounds.expect_linear_grads(
            op,
            x_array,
            w_array,
            sizes_array,
            None,
            None,
            asserts.as_numpy(t.dy),
            into_w=asserts.as_numpy(held),
            accumulate=True,
        )
        got = stacked([each.view(p.shape) for each, p in zip(buffers, parameters, strict=True)], listed)
        asserts.within(got, expected.w, "main_grad")
        for g in EMPTY:
            asserts.filled(got[g], 0.5, f"empty group {g}")
    if written and row.overwrite:
        for g in EMPTY:
            asserts.zero(buffers[g] if listed else buffers[0].view(t.w.shape)[g], f"empty group {g}")


@pytest.mark.rule("GRD-5")
def test_flags_of_each_member_count() -> None:
    t = small("jagged")
    plain = plain_gradient(t)
    parameters = members_of(t.w, listed=True)
    for parameter in parameters:
        parameter.main_grad = torch.full(parameter.shape, 0.5)
    parameters[0].grad_added_to_main_grad = False
    parameters[1].requires_grad_(False)
    parameters[2].overwrite_main_grad = True
    parameters[2].main_grad.fill_(float("nan"))
    parameters[3].grad_added_to_main_grad = False
    parameters[3].zero_out_wgrad = True
    parameters[3].overwrite_main_grad = True
    parameters[4].main_grad = parameters[4].main_grad.bfloat16()
    with counted_launches() as calls:
        grouped_linear(t.x, parameters, t.sizes, wgrad_accum="main_grad").backward(t.dy)
    # The forward, and one launch each for: added fp32, replaced fp32, added bf16.
    assert calls == ["grouped_matmul"] * 4
    accumulated = torch.full_like(t.w, 0.5)
    grouped_linear(t.x, leaf(t.w), t.sizes, wgrad_accum=accumulated).backward(t.dy)
    asserts.bitwise(parameters[0].main_grad, accumulated[0])
    asserts.filled(parameters[1].main_grad, 0.5)
    asserts.bitwise(parameters[2].main_grad, plain[2])
    asserts.bitwise(parameters[3].main_grad, plain[3])
    asserts.within_ulps(parameters[4].main_grad, accumulated[4].bfloat16(), 1)
    flags = [getattr(each, "grad_added_to_main_grad", None) for each in parameters]
    assert flags == [True, None, None, True, None]
    assert [each.grad is None for each in parameters] == [False, True, True, False, True]


@pytest.mark.rule("GRD-4")
@pytest.mark.parametrize("listed", [False, True])
def test_the_flag_follows_the_write(listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    t = small()
    parameters = members_of(t.w, listed)
    for parameter in parameters:
        parameter.main_grad = torch.zeros(parameter.shape)
        parameter.grad_added_to_main_grad = False
    seen = []
    original = main_grad.returned

    def returned(weight: Any) -> Tensor | None:
        seen.append((weight.grad_added_to_main_grad, bool(weight.main_grad.any())))
        return original(weight)

    monkeypatch.setattr(main_grad, "returned", returned)
    y = grouped_linear(t.x, as_argument(parameters, listed), t.sizes, wgrad_accum="main_grad")
    assert not any(each.grad_added_to_main_grad for each in parameters)
    y.backward(t.dy)
    assert [flag for flag, _ in seen] == [False] * len(parameters)
    assert any(written for _, written in seen), "nothing was written before the flags went up"
    assert all(each.grad_added_to_main_grad is True for each in parameters)


@pytest.mark.rule("GRD-3")
def test_dummies_are_kept_and_refilled() -> None:
    t = small()
    parameter: Any = Parameter(t.w.clone())
    parameter.grad_added_to_main_grad = False
    parameter.main_grad = torch.zeros(parameter.shape)

    def backward() -> Any:
        parameter.grad = None
        grouped_linear(t.x, parameter, t.sizes, wgrad_accum="main_grad").backward(t.dy)
        return parameter.grad

    first, second = backward(), backward()
    assert first is not second
    assert first.data_ptr() == second.data_ptr(), "one buffer for each shape, dtype and device"
    asserts.zero(second)
    second.fill_(3.0)  # as if a caller wrote to `.grad`
    third = backward()
    asserts.zero(third)
    asserts.filled(second, 3.0, "what the caller wrote is the caller's")
    parameter.zero_out_wgrad = True
    third.data.fill_(3.0)  # which no version counts
    asserts.zero(backward())
    wide = main_grad.dummy(Parameter(t.w.bfloat16()))
    assert wide.dtype == torch.bfloat16
    asserts.zero(wide)


@pytest.mark.rule("GRD-9")
@pytest.mark.rule("ALL-4")
def test_other_gradients_stay_ordinary() -> None:
    t = small()
    base = [leaf(each) for each in (t.x, t.w, t.bias, t.row_scale)]
    grouped_linear(base[0], base[1], t.sizes, bias=base[2], row_scale=base[3]).backward(t.dy)
    x, w, bias, row_scale = (leaf(each) for each in (t.x, t.w, t.bias, t.row_scale))
    accumulator, grad_input = torch.zeros(w.shape), torch.zeros(x.shape)
    with saved_tensors() as saved:
        y = grouped_linear(
            x, w, t.sizes, bias=bias, row_scale=row_scale, wgrad_accum=accumulator, grad_input=grad_input
        )
    assert accumulator.data_ptr() not in {each.data_ptr() for each in saved}
    with counted_launches() as calls:
        y.backward(t.dy)
    assert sorted(calls) == ["group_sum", "grouped_matmul", "grouped_matmul", "row_dot", "scale_rows", "scale_rows"]
    for got, expected in ((x.grad, base[0]), (accumulator, base[1]), (bias.grad, base[2]), (row_scale.grad, base[3])):
        asserts.bitwise(got, expected.grad)


@pytest.mark.rule("GRD-13")
def test_autograd_grad_gives_none() -> None:
    t = small()
    weight = leaf(t.w)
    y = grouped_linear(t.x, weight, t.sizes, wgrad_accum=torch.zeros(t.w.shape))
    (gradient,) = torch.autograd.grad(y, weight, t.dy, allow_unused=True)
    assert gradient is None


@pytest.mark.rule("GRD-13", "ALL-4")
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
def test_a_split_backward_accumulates_once(listed: bool, delayed: bool) -> None:
    """Schedules of pipelines compute gradients of inputs first, those of weights later, by `torch.autograd.grad`."""
    t = small()
    options: dict[str, Any] = {"bias": False, "single_grouped_weight": not listed}
    groups, columns, depth = t.w.shape
    plain = nn.GroupedLinear(groups, depth, columns, **options)
    layer: Any = nn.GroupedLinear(
        *(groups, depth, columns), accumulate_into_main_grad=True, delay_wgrad_compute=delayed, **options
    )
    layer.load_state_dict(plain.state_dict())
    parameters = list(layer.parameters())
    for each in parameters:
        each.main_grad = torch.zeros_like(each)
    plain(t.x, t.sizes).backward(t.dy)
    x = leaf(t.x)
    y = layer(x, t.sizes)
    torch.autograd.grad(y, x, t.dy, retain_graph=True)
    assert not delayed or layer.pending_wgrads() == 0
    assert not any(each.main_grad.any() for each in parameters)
    torch.autograd.grad(y, parameters, t.dy, allow_unused=True)
    if delayed:
        layer.backward_dw()
    for each, expected in zip(parameters, plain.parameters(), strict=True):
        asserts.bitwise(each.main_grad, expected.grad)


@pytest.mark.rule("GRD-13")
def test_a_given_accumulator_is_written_by_every_backward() -> None:
    t = small()
    x, weight, accumulator = leaf(t.x), leaf(t.w), torch.zeros(t.w.shape)
    torch.autograd.grad(grouped_linear(x, weight, t.sizes, wgrad_accum=accumulator), x, t.dy)
    grouped_linear(t.x, weight, t.sizes).backward(t.dy)
    asserts.bitwise(accumulator, weight.grad)


@pytest.mark.rule("GRD-3")
def test_clipping_sees_zeros() -> None:
    t = small()
    parameter: Any = Parameter(t.w.clone())
    parameter.grad_added_to_main_grad = False
    parameter.main_grad = torch.zeros(parameter.numel())
    grouped_linear(t.x, parameter, t.sizes, wgrad_accum="main_grad").backward(t.dy)
    assert float(torch.nn.utils.clip_grad_norm_([parameter], 1.0)) == 0.0
    assert not parameter.grad.isnan().any()
