"""The modules under torch.compile: whole graphs with the bits of eager where the contract says so (GRD-12)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._dynamo.compiled_autograd import _enable
from torch._dynamo.exc import Unsupported

from tests import asserts
from tests.torch_frontend.compile_tools import module_of
from tests.torch_frontend.nn_tools import MODULES, main_grads, setup
from tests.torch_frontend.torch_tools import counted_launches, leaf
from torch_bridge.offload import cpu_offload

# torch's own: Dynamo makes an instance of autograd.Function and looks at `.grad`, inductor imports torch.jit.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _nothing_of_other_modules() -> None:
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch.compiler.reset()  # for the next test, too


def _others(s: Any) -> tuple[Any, ...]:
    """The arguments of the module after x."""
    return {"GroupedLinear": (s.sizes,), "GroupedMLP": (s.sizes, s.probs)}.get(s.form, (s.sizes, s.probs, s.sizes))


def _results(s: Any, *, backend: str | None, whole: bool = True, autocast: bool = False) -> list[Any]:
    """y and all gradients, from the module between other operations, compiled unless `backend` is None."""
    extra = _others(s)

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(s.module(x * 2, *extra))

    f = model if backend is None else torch.compile(model, fullgraph=whole, backend=backend)
    x = leaf(s.x)
    with counted_launches() as calls, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = f(x)
        y.backward(s.dy.to(y.dtype))
    if s.module.pending_wgrads():
        s.module.backward_dw()
    assert calls, "nothing of ours ran"
    found = [y, x.grad, *(weight.grad for weight in s.weights)]
    return found + [getattr(weight, "main_grad", None) for weight in s.weights]


def _same(got: list[Any], expected: list[Any]) -> None:
    for at, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert (a is None) == (b is None), f"result {at}"
        if a is not None:
            asserts.bitwise(a, b, f"result {at}")


def _prepared(form: str, listed: bool, *, accumulate: bool = False, delay: bool = False, **attributes: Any) -> Any:
    s = setup(form, listed, accumulate=accumulate, delay=delay)
    if accumulate:
        main_grads(s.weights, 0.5)
    for weight in s.weights:
        for name, value in attributes.items():
            setattr(weight, name, value)
    if listed:
        s.weights[1].requires_grad_(False)  # row 1
    return s


@pytest.mark.rule("GRD-12")
@pytest.mark.matrix(sequential=(False, True), mlp=(False, True), listed=(False, True), autocast=(False, True))
def test_rows_1_and_2_are_whole_graphs(sequential: bool, mlp: bool, listed: bool, autocast: bool) -> None:
    form = module_of(sequential, mlp)
    expected = _results(_prepared(form, listed), backend=None, autocast=autocast)
    _same(_results(_prepared(form, listed), backend="aot_eager", autocast=autocast), expected)


@pytest.mark.rule("GRD-12")
@pytest.mark.matrix(sequential=(False, True), mlp=(False, True), listed=(False, True), overwrite=(False, True))
def test_row_4_is_a_whole_graph(sequential: bool, mlp: bool, listed: bool, overwrite: bool) -> None:
    form = module_of(sequential, mlp)
    options = {"accumulate": True, "overwrite_main_grad": overwrite}
    expected = _results(_prepared(form, listed, **options), backend=None)
    _same(_results(_prepared(form, listed, **options), backend="aot_eager"), expected)


@pytest.mark.parametrize("form", ["GroupedMLP", "Sequential_composed"])
def test_inductor(form: str) -> None:
    expected = _results(_prepared(form, True), backend=None)
    _same(_results(_prepared(form, True), backend="inductor"), expected)


_BREAKING: dict[str, dict[str, Any]] = {
    "row3": {"delay": True},
    "row5": {"accumulate": True, "grad_added_to_main_grad": False},
    "row6": {"accumulate": True, "grad_added_to_main_grad": False, "zero_out_wgrad": True},
    "row7": {"accumulate": True, "delay": True},
    "row8": {"accumulate": True, "delay": True, "grad_added_to_main_grad": False},
    "row9": {"accumulate": True, "delay": True, "grad_added_to_main_grad": False, "zero_out_wgrad": True},
}


_FORMS_OF_ROWS = {
    "row3": ("GroupedLinear",),
    "row5": ("GroupedMLP",),
    "row6": ("Sequential_composed",),
    "row7": ("GroupedMLP",),
    "row8": ("Sequential_fused",),
    "row9": ("GroupedLinear",),
}
"""What a row is asked of, without --full: one function of all forms decides that a graph ends."""


@pytest.mark.rule("GRD-12")
@pytest.mark.parametrize(
    ("row", "form"),
    [
        pytest.param(row, form, marks=() if form in shown else pytest.mark.slow)
        for row, shown in _FORMS_OF_ROWS.items()
        for form in MODULES
    ],
)
def test_rows_with_host_state_break_the_graph_and_nothing_else(form: str, row: str) -> None:
    options = _BREAKING[row]
    eager, compiled = _prepared(form, False, **options), _prepared(form, False, **options)
    # Where Dynamo cuts the graph is the subject here, not what a backend makes of the parts.
    _same(_results(compiled, backend="eager", whole=False), _results(eager, backend=None))
    for a, b in zip(compiled.weights, eager.weights, strict=True):
        assert getattr(a, "grad_added_to_main_grad", None) == getattr(b, "grad_added_to_main_grad", None)
    torch.compiler.reset()
    with pytest.raises(Unsupported):
        _results(_prepared(form, False, **options), backend="eager")


@pytest.mark.rule("OFF-6")
@pytest.mark.filterwarnings("ignore:cpu_offload:UserWarning")
@pytest.mark.parametrize("form", ["GroupedLinear", "GroupedMLP"])
def test_compiled_inside_an_offloading_context(form: str) -> None:
    expected = _results(_prepared(form, False), backend=None)
    with cpu_offload(min_numel=0):
        _same(_results(_prepared(form, False), backend="aot_eager"), expected)


@pytest.mark.matrix(mlp=(False, True), listed=(False, True), accumulate=(False, True), whole_step=(False, True))
def test_compiled_autograd(mlp: bool, listed: bool, accumulate: bool, whole_step: bool) -> None:
    """Of a call that is not compiled, and of a step that is: the launches run beside its graph, with the same bits."""
    found = []
    for compiled in (False, True):
        s = _prepared(module_of(sequential=False, mlp=mlp), listed, accumulate=accumulate)
        x = leaf(s.x)

        def forward(s: Any = s, x: Any = x) -> torch.Tensor:
            y = s.module(x, *_others(s))
            return (y * s.dy.to(y.dtype)).sum()

        with torch._dynamo.config.patch(compiled_autograd=compiled):
            if whole_step:

                def step(forward: Any = forward) -> None:
                    forward().backward()

                (torch.compile(step, backend="eager") if compiled else step)()
            else:
                loss = forward()
                enabled = _enable(lambda graph: torch.compile(graph, backend="eager")) if compiled else nullcontext()
                with enabled:
                    loss.backward()
        weights = [each for weight in s.weights for each in (weight.grad, getattr(weight, "main_grad", None))]
        found.append([x.grad, *weights])
    _same(found[1], found[0])
