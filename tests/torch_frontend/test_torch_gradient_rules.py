"""Weight gradients of the modules beyond the table: whose flags count, where main_grad comes from, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import asserts
from tests.torch_frontend.gradient_tools import accumulated, gradients
from tests.torch_frontend.nn_tools import MODULES, main_grads, setup
from tests.torch_frontend.torch_tools import leaf
from torch_bridge import main_grad


@pytest.mark.rule("GRD-5", "DEF-4")
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
        expected = gradients(form, True)[at] if g == 3 else accumulated(form, True)[at]
        if g == 1:
            asserts.filled(buffer, 0.5)
        else:
            asserts.bitwise(buffer.view(weight.shape), expected, f"main_grad {at}")
        assert getattr(weight, "grad_added_to_main_grad", None) is (True if g == 0 else None)
        assert (weight.grad is not None) == (g == 0)


@pytest.mark.rule("GRD-6", "GRD-7", "GRD-8", "DEF-6", "DEF-8", "DEF-9", "TE #2923")
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
    """The message is that of this package, and pending entries stay pending."""
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
        for weight, expected in zip(s.weights, accumulated(form, False), strict=True):
            asserts.bitwise(weight.main_grad.view(weight.shape), expected)


@pytest.mark.rule("GRD-6")
@pytest.mark.parametrize("form", MODULES)
def test_main_grads_may_come_after_forward(form: str) -> None:
    s = setup(form, False, accumulate=True)
    y = s.run(leaf(s.x))
    buffers = main_grads(s.weights, 0.5)
    y.backward(s.dy)
    for buffer, expected in zip(buffers, accumulated(form, False), strict=True):
        asserts.bitwise(buffer.view(expected.shape), expected)


@pytest.mark.rule("GRD-6", "MLM #5209", "MLM #6357")
@pytest.mark.parametrize("delay", [False, True], ids=["now", "delay"])
@pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
@pytest.mark.parametrize("form", MODULES)
def test_main_grad_is_where_fsdp_has_it_now(form: str, listed: bool, delay: bool) -> None:
    """The buffer changes each time: each is written, and no earlier one is read."""
    s = setup(form, listed, accumulate=True, delay=delay)
    given: list[list[Tensor]] = [[] for _ in s.weights]
    for weight, buffers in zip(s.weights, given, strict=True):

        def get_main_grad(weight: Any = weight, buffers: Any = buffers) -> Tensor:
            buffers.append(torch.full((weight.numel(),), 0.5))
            return buffers[-1]

        weight.__fsdp_param__, weight.get_main_grad = object(), get_main_grad
        weight.main_grad = torch.full((3,), float("nan"))  # a view of storage that is gone
    for microbatch in range(1, 4):
        s.backward()
        if delay:
            assert len(given[0]) == microbatch - 1, "it was looked up before it was written"
            s.module.backward_dw()
    for weight, buffers, expected in zip(s.weights, given, accumulated(form, listed), strict=True):
        assert len(buffers) == 3
        for buffer in buffers:
            asserts.bitwise(buffer.view(weight.shape), expected)
        assert weight.main_grad is buffers[-1]


@pytest.mark.rule("GRD-4", "DEF-3")
@pytest.mark.parametrize("delay", [False, True], ids=["now", "delay"])
@pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
@pytest.mark.parametrize("form", MODULES)
def test_the_flag_follows_the_write(form: str, listed: bool, delay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    s = setup(form, listed, accumulate=True, delay=delay, case="uniform")
    main_grads(s.weights, 0.0)
    for weight in s.weights:
        weight.grad_added_to_main_grad = False
    raised, original = [], main_grad.returned

    def returned(weight: Any) -> Tensor | None:
        raised.append((weight.grad_added_to_main_grad, bool(weight.main_grad.any())))
        return original(weight)

    monkeypatch.setattr(main_grad, "returned", returned)
    s.backward()
    if delay:
        assert not raised
        s.module.backward_dw()
    assert raised == [(False, True)] * len(s.weights)
    assert all(each.grad_added_to_main_grad is True for each in s.weights)


@pytest.mark.rule("GRD-3", "DEF-5")
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
    for buffer, expected in zip(buffers, accumulated(form, False), strict=True):
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
