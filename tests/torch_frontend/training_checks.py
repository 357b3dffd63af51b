"""Checks of modules in a training step, for the CPU and for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grouped_core.recipes import Recipe
from tests import asserts, cases
from tests.torch_frontend.nn_tools import MODULES, build, main_grads, setup
from tests.torch_frontend.torch_tools import leaf, manual_seed
from torch_bridge import nn

by_form = pytest.mark.parametrize("form", MODULES)


by_holding = pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])


def same(found: list[Any], wanted: list[Any], what: str = "") -> None:
    for at, (a, b) in enumerate(zip(found, wanted, strict=True)):
        asserts.bitwise(a, b, f"result {at} {what}")


def _step_with_tail(form: str, case: str, tail: float, recipe: Recipe | None) -> list[Tensor]:
    """y, dx, dW and the gradient of the probabilities, of all rows, where those past the groups hold `tail`."""
    s = setup(form, False, case=case, recipe=recipe, dtype="bfloat16" if recipe else "float32")
    probs = s.probs.requires_grad_()
    for rows in (s.x, s.dy, probs.data):
        rows[cases.named(case).valid :] = tail
    manual_seed(0)
    x = s.backward()
    found = [s.run(s.x).detach(), x.grad, *(weight.grad for weight in s.weights)]
    return found if probs.grad is None else [*found, probs.grad]


def check_stale_rows(form: str, case: str, recipe: Recipe | None) -> None:
    """Not the loss, not an amax, not a weight gradient, with one group either."""
    clean = _step_with_tail(form, case, 0.0, recipe)
    for stale in (float("nan"), 1e4):
        same(_step_with_tail(form, case, stale, recipe), clean, f"with {stale} past the groups")
    valid = cases.named(case).valid
    for rows in (clean[0], clean[1], *([] if form == "GroupedLinear" else clean[-1:])):
        asserts.zero(rows[valid:], "rows past the groups")


def check_uninitialised_memory(form: str, listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN, and the loss is a sum over all rows of the buffer."""

    def step() -> list[Tensor]:
        s = setup(form, listed, case="tail", accumulate=True)
        main_grads(s.weights, 0.5)
        x = leaf(s.x)
        y = s.run(x)
        loss = y.square().sum()
        loss.backward()
        return [loss.detach(), y.detach(), x.grad, *(weight.main_grad for weight in s.weights)]

    plain = step()
    monkeypatch.setenv("GROUPED_DEBUG", "poison")
    same(step(), plain)
    assert all(each.isfinite().all() for each in plain)


def check_replaced_storage(form: str, listed: bool, when: str) -> None:
    """Wrappers that gather weights again do this; their previous storage contains NaN by then."""
    s = setup(form, listed)
    wanted = [s.run(s.x).detach(), s.backward().grad, *(weight.grad for weight in s.weights)]

    def replace() -> None:
        for weight in s.weights:
            old, weight.data = weight.data, weight.data.clone()
            old.fill_(float("nan"))

    for weight in s.weights:
        weight.grad = None
    for _ in range(2):
        x = leaf(s.x)
        if when == "before_forward":
            replace()
        y = s.run(x)
        if when == "before_backward":
            replace()
        y.backward(s.dy)
        same([y.detach(), x.grad, *(weight.grad for weight in s.weights)], wanted)
        for weight in s.weights:
            weight.grad = None


def _sequential(form: str, of: cases.Case) -> nn.Sequential:
    """With biases, the second one weighted, so that it may run as one operation."""
    first = nn.GroupedLinear(of.groups, of.k, 2 * of.n)
    second = nn.GroupedLinear(of.groups, of.n, of.k, scale_bias=True)
    return nn.Sequential(first, nn.ScaledSwiGLU(), second, fuse="always" if "fused" in form else "never")


def trained(form: str, case: str = "jagged") -> list[Tensor]:
    """The loss of each step and the parameters at the end, of a router, the experts with biases, and Adam."""
    of = cases.named(case)
    manual_seed(7)
    experts = build(form, of, "float32", True, bias=True) if "Sequential" not in form else _sequential(form, of)
    router = torch.nn.Linear(of.k, of.groups)
    sizes = torch.tensor(of.sizes, dtype=torch.int32)
    x = torch.randn(of.rows, of.k)
    parameters = [*router.parameters(), *experts.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-2, foreach=False)
    losses = []
    for _ in range(4):
        probs = router(x).softmax(-1).amax(-1)
        if form == "GroupedLinear":
            y = experts(x * probs[:, None], sizes)
        else:
            y = experts(x, sizes, probs, *((sizes, probs) if "Sequential" in form else ()))
        loss = y.square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(each.grad is not None for each in parameters)
        optimizer.step()
        losses.append(loss.detach())
    return [torch.stack(losses), *(each.detach() for each in parameters)]
