"""The table in docs/contracts.md of what backward returns and writes, and the check of one row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from tests import asserts
from tests.torch_frontend.gradient_tools import accumulated, gradients
from tests.torch_frontend.nn_tools import EMPTY, Setup, main_grads, setup
from tests.torch_frontend.torch_tools import leaf


class Inputs(NamedTuple):
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


def _rows() -> Iterator[Inputs]:
    for number, columns in _TABLE.items():
        for row in itertools.product(*columns, ANY, ANY):
            yield Inputs(number, *row)


ROWS = list(_rows())


def _prepare(s: Setup, row: Inputs) -> tuple[list[Tensor], list[Tensor], float]:
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


def _untouched(s: Setup, row: Inputs, buffers: list[Tensor], start: float) -> None:
    for at, (weight, buffer) in enumerate(zip(s.weights, buffers, strict=True)):
        assert weight.grad is None, f"weight {at}"
        assert getattr(weight, "grad_added_to_main_grad", None) is (False if row.has_flag else None), f"weight {at}"
        asserts.filled(buffer, start, f"main_grad {at}")


def check_row(row: Inputs, form: str, listed: bool) -> None:
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
