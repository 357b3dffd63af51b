"""What backward returns and writes: the table of contracts.md section 4, for functions and modules alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests import asserts
from tests.faces.nn_tools import EMPTY, FORMS, FUNCTIONS, LINEAR, MODULES, Setup, main_grads, setup
from tests.faces.torch_tools import leaf
from torch_bridge import grouped_linear, grouped_mlp


class _Inputs(NamedTuple):
    """A row of the table with its `any` written out, and the two further inputs of the same parameter."""

    number: int
    requires_grad: bool
    accumulate: bool
    has_flag: bool
    zero_out: bool
    delay: bool
    overwrite: bool
    fsdp: bool

    def __str__(self) -> str:
        on = [name for name in ("has_flag", "zero_out", "delay", "overwrite", "fsdp") if getattr(self, name)]
        return "-".join([f"row{self.number}", *on])


NO, YES, ANY = (False,), (True,), (False, True)
_TABLE = {  # R, A, P, Z, D
    1: (NO, ANY, ANY, ANY, ANY),
    2: (YES, NO, ANY, ANY, NO),
    3: (YES, NO, ANY, ANY, YES),
    4: (YES, YES, NO, ANY, NO),
    5: (YES, YES, YES, NO, NO),
    6: (YES, YES, YES, YES, NO),
    7: (YES, YES, NO, ANY, YES),
    8: (YES, YES, YES, NO, YES),
    9: (YES, YES, YES, YES, YES),
}


def _rows() -> Iterator[_Inputs]:
    for number, columns in _TABLE.items():
        for row in itertools.product(*columns, ANY, ANY):
            yield _Inputs(number, *row)


ROWS = list(_rows())


def _gradients(form: str, listed: bool) -> list[Tensor]:
    """dW as autograd gets it."""
    return _gradients_on(form, listed, str(torch.get_default_device()))


@lru_cache(maxsize=64)
def _gradients_on(form: str, listed: bool, _device: str) -> list[Tensor]:
    plain = setup(form, listed)
    plain.backward()
    return [each.grad for each in plain.weights]


def _sums(form: str, listed: bool) -> list[Tensor]:
    """0.5 + dW as the functions add it to a tensor, which their own tests hold against the oracle."""
    return _sums_on(form, listed, str(torch.get_default_device()))


@lru_cache(maxsize=64)
def _sums_on(form: str, listed: bool, _device: str) -> list[Tensor]:
    function = FUNCTIONS[0] if form in LINEAR else FUNCTIONS[1]
    s = setup(function, listed)
    sums = [torch.full_like(each, 0.5) for each in s.weights]

    def parts(members: list[Any]) -> Any:
        """For each product its tensor or list."""
        if not listed:
            return members
        return [members] if form in LINEAR else [members[: len(members) // 2], members[len(members) // 2 :]]

    into = parts(sums)
    if form in LINEAR:
        y = grouped_linear(leaf(s.x), parts(s.weights)[0], s.sizes, wgrad_accum=into[0])
    else:
        wi, wo = parts(s.weights)
        y = grouped_mlp(leaf(s.x), wi, wo, s.sizes, probs=s.probs, wgrad_accum=tuple(into))
    y.backward(s.dy)
    return sums


def _prepare(s: Setup, row: _Inputs) -> tuple[list[Tensor], list[Tensor], float]:
    """(main_grads, those that were looked up through FSDP, what they hold)."""
    start = float("nan") if row.overwrite else 0.5
    buffers, looked_up = main_grads(s.weights, start), []
    for weight, buffer in zip(s.weights, buffers, strict=True):
        weight.requires_grad_(row.requires_grad)
        if row.has_flag:
            weight.grad_added_to_main_grad = False
        if row.zero_out:
            weight.zero_out_wgrad = True
        if row.overwrite:
            weight.overwrite_main_grad = True
        if row.fsdp:
            del weight.main_grad
            weight.__fsdp_param__ = object()
            weight.get_main_grad = lambda buffer=buffer: looked_up.append(buffer) or buffer
    return buffers, looked_up, start


def _untouched(s: Setup, row: _Inputs, buffers: list[Tensor], start: float) -> None:
    for at, (weight, buffer) in enumerate(zip(s.weights, buffers, strict=True)):
        assert weight.grad is None, f"weight {at}"
        assert getattr(weight, "grad_added_to_main_grad", None) is (False if row.has_flag else None), f"weight {at}"
        asserts.filled(buffer, start, f"main_grad {at}")


@pytest.mark.rule("GRD-1", "GRD-2", "GRD-3", "GRD-4", "GRD-6", "GRP-9")
@pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
@pytest.mark.parametrize(
    ("row", "form"),
    [(row, form) for row in ROWS for form in FORMS if not (row.delay and form in FUNCTIONS)],  # D does not exist there
    ids=str,
)
def test_row(row: _Inputs, form: str, listed: bool) -> None:
    s = setup(form, listed, accumulate=row.accumulate, delay=row.delay)
    buffers, looked_up, start = _prepare(s, row)
    y = s.run(leaf(s.x))
    _untouched(s, row, buffers, start)
    y.backward(s.dy)
    if row.delay:
        _untouched(s, row, buffers, start)
        assert not looked_up, "main_grad was looked up before it was written"
        assert s.module.pending_wgrads() == row.requires_grad
        s.module.backward_dw()
    written = row.requires_grad and row.accumulate
    assert len(looked_up) == (len(s.weights) if written and row.fsdp else 0)
    if not row.requires_grad:
        _untouched(s, row, buffers, start)
        return
    for at, (weight, buffer) in enumerate(zip(s.weights, buffers, strict=True)):
        what = f"weight {at}"
        assert getattr(weight, "grad_added_to_main_grad", None) is (written if row.has_flag else None), what
        if not row.accumulate:
            asserts.bitwise(weight.grad, _gradients(form, listed)[at], what)
        elif row.has_flag:
            asserts.zero(weight.grad, f"{what}: dummy")
            assert weight.grad.shape == weight.shape
        else:
            assert weight.grad is None, what
        if not written:
            asserts.filled(buffer, start, f"{what}: main_grad")
            continue
        expected = (_gradients if row.overwrite else _sums)(form, listed)[at]
        asserts.bitwise(buffer.view(weight.shape), expected, f"{what}: main_grad")
        assert weight.main_grad is buffer
        for g in EMPTY:
            if g in s.groups[at]:
                asserts.filled(expected if listed else expected[g], 0.0 if row.overwrite else 0.5, f"empty group {g}")


@pytest.mark.rule("GRD-3")
@pytest.mark.parametrize("delay", [False, True], ids=["now", "delay"])
@pytest.mark.parametrize("zero_out", [False, True], ids=["keep", "zero_out"])
@pytest.mark.parametrize("form", MODULES)
def test_rows_5_6_8_9_leave_what_grad_holds(form: str, zero_out: bool, delay: bool) -> None:
    """Rows 5 and 6 add a zero to it, rows 8 and 9 leave it; a dummy that somebody wrote to is zero again in 6 and 9."""
    s = setup(form, False, accumulate=True, delay=delay)
    main_grads(s.weights, 0.0)
    for weight in s.weights:
        weight.grad_added_to_main_grad = False
        weight.zero_out_wgrad = zero_out

    def step() -> None:
        s.backward()
        if delay:
            s.module.backward_dw()

    for weight in s.weights:
        weight.grad = torch.full_like(weight, 3.0)
    step()
    for weight in s.weights:
        asserts.filled(weight.grad, 3.0)
        weight.grad = None
    step()
    dummies = [weight.grad for weight in s.weights]
    try:
        for weight in s.weights:
            weight.grad.fill_(5.0)
            weight.grad = None
        step()
        for weight, dummy in zip(s.weights, dummies, strict=True):
            assert weight.grad.data_ptr() == dummy.data_ptr(), "one buffer for each shape, dtype and device"
            assert weight.grad is not dummy
            asserts.filled(weight.grad, 0.0 if zero_out else 5.0)
    finally:
        for dummy in dummies:  # it is kept for all tests
            dummy.zero_()


@pytest.mark.rule("GRD-5")
@pytest.mark.parametrize("delay", [False, True], ids=["now", "delay"])
@pytest.mark.parametrize("form", MODULES)
def test_flags_of_each_expert_count(form: str, delay: bool) -> None:
    """Expert 3 differs from expert 0 in every flag, expert 1 is frozen."""
    s = setup(form, True, accumulate=True, delay=delay)
    buffers = main_grads(s.weights, 0.5)
    count = len(s.weights) // len(s.linears)
    for at in range(0, len(s.weights), count):
        s.weights[at].grad_added_to_main_grad = False
        s.weights[at + 1].requires_grad_(False)
        s.weights[at + 3].overwrite_main_grad = True
        buffers[at + 3].fill_(float("nan"))
    s.backward()
    if delay:
        s.module.backward_dw()
    for at, (weight, buffer) in enumerate(zip(s.weights, buffers, strict=True)):
        g = at % count
        expected = _gradients(form, True)[at] if g == 3 else _sums(form, True)[at]
        if g == 1:
            asserts.filled(buffer, 0.5)
        else:
            asserts.bitwise(buffer.view(weight.shape), expected, f"main_grad {at}")
        assert getattr(weight, "grad_added_to_main_grad", None) is (True if g == 0 else None)
        assert (weight.grad is not None) == (g == 0)


@pytest.mark.rule("GRD-6", "GRD-7", "GRD-8")
@pytest.mark.parametrize("delay", [False, True], ids=["now", "delay"])
@pytest.mark.parametrize("form", MODULES)
@pytest.mark.parametrize(
    ("made", "fragments"),
    [
        (lambda w: None, ["missing", "views as", "create it"]),
        (lambda w: torch.zeros(w.mT.shape).mT, ["shape", "strides", "without a copy", "allocate"]),
        (lambda w: torch.zeros((*w.shape, 2))[..., 0], ["strides", "without a copy"]),
        (lambda w: torch.zeros(w.shape, dtype=torch.float64), ["torch.float64", "float32"]),
    ],
    ids=["missing", "transposed", "strided", "float64"],
)
def test_main_grads_that_cannot_be_written(form: str, made: Any, fragments: list[str], delay: bool) -> None:
    """In our words, and what is pending stays pending."""
    s = setup(form, False, accumulate=True, delay=delay)
    for weight in s.weights:
        weight.main_grad = made(weight)
    with torch.no_grad():
        s.run(s.x)
    y = s.run(leaf(s.x))
    with asserts.refused(RuntimeError, ["`main_grad` of", *fragments]):
        y.backward(s.dy)
        s.module.backward_dw()
    if delay:
        assert s.module.pending_wgrads() == 1
        main_grads(s.weights, 0.5)
        s.module.backward_dw()
        for weight, expected in zip(s.weights, _sums(form, False), strict=True):
            asserts.bitwise(weight.main_grad.view(weight.shape), expected)


@pytest.mark.rule("GRD-6")
@pytest.mark.parametrize("form", MODULES)
def test_main_grads_may_come_after_forward(form: str) -> None:
    s = setup(form, False, accumulate=True)
    y = s.run(leaf(s.x))
    buffers = main_grads(s.weights, 0.5)
    y.backward(s.dy)
    for buffer, expected in zip(buffers, _sums(form, False), strict=True):
        asserts.bitwise(buffer.view(expected.shape), expected)


@pytest.mark.rule("GRD-3")
@pytest.mark.parametrize("form", MODULES)
def test_clipping_after_row_5_sees_zeros(form: str) -> None:
    s = setup(form, False, accumulate=True)
    main_grads(s.weights, 0.0)
    for weight in s.weights:
        weight.grad_added_to_main_grad = False
    s.backward()
    assert float(torch.nn.utils.clip_grad_norm_(s.weights, 1.0)) == 0.0


@pytest.mark.rule("GRD-11")
@pytest.mark.parametrize("form", ["GroupedLinear", "GroupedMLP"])
@pytest.mark.parametrize("first", [None, False, True])
def test_is_first_microbatch_never_decides(form: str, first: bool | None) -> None:
    s = setup(form, False, accumulate=True)
    buffers = main_grads(s.weights, 0.5)
    s.backward(is_first_microbatch=first)
    for buffer, expected in zip(buffers, _sums(form, False), strict=True):
        asserts.bitwise(buffer.view(expected.shape), expected)


@pytest.mark.rule("GRD-13")
@pytest.mark.parametrize("delay", [False, True], ids=["now", "delay"])
@pytest.mark.parametrize("form", MODULES)
def test_autograd_grad_gives_none(form: str, delay: bool) -> None:
    s = setup(form, True, accumulate=not delay, delay=delay)
    if not delay:
        main_grads(s.weights, 0.0)
    found = torch.autograd.grad(s.run(leaf(s.x)), s.weights, s.dy, allow_unused=True)
    assert found == (None,) * len(s.weights)


@pytest.mark.rule("GRD-13")
@pytest.mark.parametrize("form", MODULES)
def test_a_second_derivative_is_refused(form: str) -> None:
    s = setup(form, False)
    x = leaf(s.x)
    (dx,) = torch.autograd.grad(s.run(x), x, s.dy, create_graph=True)
    with asserts.refused(RuntimeError, ["differentiated twice", "expected once"]):
        dx.sum().backward()
