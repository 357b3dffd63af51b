"""What backward returns and writes: the table in docs/contracts.md, for functions and modules."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from tests import asserts
from tests.torch_frontend.gradient_table import ROWS, Inputs, check_row
from tests.torch_frontend.nn_tools import FORMS, FUNCTIONS, MODULES, main_grads, setup
from torch_bridge import main_grad


@pytest.mark.rule("GRD-1", "GRD-2", "GRD-3", "GRD-4", "GRD-6", "GRP-9", "DEF-1", "DEF-7", "DEF-10", "DEF-11")
@pytest.mark.rule("TE #2499", "TE #2765", "pytorch #172439", "TE #2871", "TE #3234", "TE #3225")
@pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
@pytest.mark.parametrize(
    ("row", "form"),
    [(row, form) for row in ROWS for form in FORMS if not (row.delay and form in FUNCTIONS)],  # D does not exist there
    ids=str,
)
def test_row(row: Inputs, form: str, listed: bool) -> None:
    check_row(row, form, listed)


@pytest.mark.rule("GRD-3")
@pytest.mark.parametrize("delay", [False, True], ids=["now", "delay"])
@pytest.mark.parametrize("zero_out", [False, True], ids=["keep", "zero_out"])
@pytest.mark.parametrize("form", MODULES)
def test_rows_5_6_8_9_leave_what_grad_holds(form: str, zero_out: bool, delay: bool) -> None:
    """Rows 5 and 6 add a zero to it, rows 8 and 9 leave it; a dummy is zero whatever was written to earlier ones."""
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
    for weight in s.weights:
        weight.grad = None
    step()
    for weight, dummy in zip(s.weights, dummies, strict=True):
        assert weight.grad.data_ptr() == dummy.data_ptr(), "one buffer for each shape, dtype and device"
        assert weight.grad is not dummy
        weight.grad.fill_(5.0)  # what clipping, unscaling or another source of a gradient does
        weight.grad = None
    step()
    for weight, dummy in zip(s.weights, dummies, strict=True):
        asserts.zero(weight.grad)
        asserts.filled(dummy, 0.0 if zero_out else 5.0)  # row 6 and 9 fill the old one, others leave it


@pytest.mark.rule("GRD-3")
def test_a_dummy_may_come_first_in_inference_mode() -> None:
    s = setup("GroupedLinear", False, accumulate=True, delay=True)
    main_grads(s.weights, 0.0)
    for weight in s.weights:
        weight.grad_added_to_main_grad = False
    main_grad._dummies.clear()
    for mode in (torch.inference_mode(), nullcontext()):
        s.backward()
        with mode:
            s.module.backward_dw()
        for weight in s.weights:
            asserts.zero(weight.grad)
            assert not weight.grad.is_inference()
            weight.grad = None
