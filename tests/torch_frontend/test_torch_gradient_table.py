"""What backward returns and writes: the table in docs/contracts.md, for functions and modules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests import asserts
from tests.torch_frontend.gradient_tools import accumulated, gradients
from tests.torch_frontend.nn_tools import EMPTY, FORMS, FUNCTIONS, MODULES, Setup, main_grads, setup
from tests.torch_frontend.torch_tools import leaf


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


@pytest.mark.rule("GRD-1", "GRD-2", "GRD-3", "GRD-4", "GRD-6", "GRP-9", "DEF-1", "DEF-7", "DEF-10", "DEF-11")
@pytest.mark.rule("TE #2499", "TE #2765", "pytorch #172439", "TE #2871", "TE #3234", "TE #3225")
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
            asserts.bitwise(weight.grad, gradients(form, listed)[at], what)
        elif row.has_flag:
            asserts.zero(weight.grad, f"{what}: dummy")
            assert weight.grad.shape == weight.shape
        else:
            assert weight.grad is None, what
        if not written:
            asserts.filled(buffer, start, f"{what}: main_grad")
            continue
        expected = (gradients if row.overwrite else accumulated)(form, listed)[at]
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
    """Rows 5 and 6 add a zero to it, rows 8 and 9 leave it; a dummy that was written to is zero again in 6 and 9."""
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
