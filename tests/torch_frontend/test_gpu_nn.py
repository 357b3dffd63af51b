"""The modules on a GPU: the table of gradients, delayed gradients beside a stream and as graphs, captured modules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import asserts
from tests.torch_frontend import gradient_table as table
from tests.torch_frontend.gpu_layers import Step
from tests.torch_frontend.gpu_tools import REPLAYED, capture, captured, graphed, launches_only
from tests.torch_frontend.nn_tools import FORMS, FUNCTIONS, MODULES, main_grads, setup
from tests.torch_frontend.torch_tools import leaf, opcheck
from torch_bridge import activation, nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield


@pytest.mark.rule("GRD-1", "GRD-2", "GRD-3", "GRD-4", "GRD-6", "GRP-9")
@pytest.mark.matrix(
    valid=lambda row, form, listed: not (row.delay and form in FUNCTIONS),
    row=table.ROWS,
    form=FORMS,
    listed=(False, True),
)
def test_row(row: Any, form: str, listed: bool) -> None:
    table.check_row(row, form, listed)


@pytest.mark.rule("TE #3171", "DeepGEMM #444")
@pytest.mark.rule("CAP-1", "CAP-2", "GRP-3", "GRP-5")
@pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
@pytest.mark.parametrize("form", MODULES)
def test_a_captured_module_replays_with_other_sizes_and_weights(form: str, listed: bool) -> None:
    step = Step(form, listed)
    graph, results = captured(step.run)
    for at, sizes in enumerate(REPLAYED):
        step.load(sizes)
        with torch.no_grad():
            for weight in step.weights:  # in place, as an optimizer does
                weight.mul_(1.0 + 0.25 * at)
        eager = [each.clone() for each in step.run()]
        for _ in range(2):
            for tensor in results:
                tensor.fill_(float("nan"))
            graph.replay()
            for at_result, (a, b) in enumerate(zip(results, eager, strict=True)):
                asserts.bitwise(a, b, f"result {at_result} with sizes {sizes}")


@pytest.mark.rule("MLM #6228")
@pytest.mark.rule("MAT-4")
@pytest.mark.parametrize("form", MODULES)
def test_a_graph_follows_weights_that_move(form: str) -> None:
    """Only `refresh_weight_table` is called; the old memory holds NaN."""
    step = Step(form, True)
    graph, results = captured(step.run)
    old = [weight.data for weight in step.weights]
    for weight in step.weights:
        weight.data = weight.data.clone()
    for each in old:
        each.fill_(float("nan"))
    step.module.refresh_weight_table()
    graph.replay()
    for at, (a, b) in enumerate(zip(results, step.run(), strict=True)):
        asserts.bitwise(a, b, f"result {at}")


@pytest.mark.rule("TE #3210", "TE #1345")
@pytest.mark.rule("CAP-1")
@pytest.mark.parametrize("form", MODULES)
def test_make_graphed_callables(form: str) -> None:
    """Compared with a separate module, because a graphed one replaces its original."""
    step, other = Step(form, True), Step(form, True)

    def forward(x: Tensor, probs: Tensor, sizes: Tensor) -> Tensor:
        return step.forward(x, probs, sizes)

    sample = (step.x.detach().clone().requires_grad_(), step.probs.detach().clone(), step.sizes.clone())
    run = graphed(forward, sample)
    for sizes in REPLAYED[:4]:
        for one in (step, other):
            one.load(sizes)
        x, x2 = leaf(step.x), leaf(other.x)
        y, y2 = run(x, step.probs.detach(), step.sizes), other.forward(x2, other.probs.detach(), other.sizes)
        asserts.bitwise(y, y2, f"y with sizes {sizes}")
        y.backward(step.dy)
        y2.backward(other.dy)
        asserts.bitwise(x.grad, x2.grad, f"dx with sizes {sizes}")


@pytest.mark.rule("CAP-1", "GRP-3")
@pytest.mark.parametrize("form", MODULES)
def test_modules_neither_synchronise_nor_copy_nor_allocate(form: str) -> None:
    launches_only(Step(form, True).run)


# ---------------------------------------------------------------------------------------------------------------------
# Delayed weight gradients


@pytest.mark.rule("DLY-3", "DLY-4")
@pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
@pytest.mark.parametrize("form", MODULES)
def test_backward_dw_on_a_side_stream(form: str, listed: bool) -> None:
    """It waits for the backward that queued it, and keeps its operands alive while the compute stream continues."""
    found = []
    for delay in (False, True):
        s = setup(form, listed, accumulate=True, delay=delay, case="jagged")
        main_grads(s.weights, 0.0)
        side = torch.cuda.Stream()
        for at in range(4):
            s.run(leaf(s.x * (at + 1))).backward(s.dy)
            if delay:
                with torch.cuda.stream(side):
                    s.module.backward_dw()
            del at
            _ = [torch.full_like(s.x, float("nan")) for _ in range(8)]  # takes memory that was given back early
        torch.cuda.current_stream().wait_stream(side)
        found.append([weight.main_grad.clone() for weight in s.weights])
    for a, b in zip(*found, strict=True):
        asserts.bitwise(b, a)


@pytest.mark.rule("DLY-8", "DLY-3", "CAP-1")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
@pytest.mark.parametrize("form", MODULES)
def test_backward_dw_is_a_graph_of_its_own(form: str, listed: bool) -> None:
    """Replayed after the graph of backward, with other sizes; the caller calls the hooks after a replay."""
    step = Step(form, listed, accumulate_into_main_grad=True, delay_wgrad_compute=True)
    other = Step(form, listed, accumulate_into_main_grad=True)
    for one in (step, other):
        for weight in one.weights:
            weight.main_grad = torch.zeros(weight.shape)
    fired: list[int] = []
    for each in step.module.modules():
        if isinstance(each, nn.GroupedLinear):
            each.register_wgrad_accumulation_and_reduce_hooks(lambda: fired.append(1))

    first, kept = captured(step.run)  # behind two eager ones
    pending = torch.cuda.CUDAGraph()
    words = ["a CUDA graph is captured", "eager backward", "drain the eager ones"]
    with asserts.refused(RuntimeError, words), capture():
        step.module.backward_dw()
    assert step.module.pending_wgrads() == 3
    step.module.backward_dw()
    step.module.backward_dw()
    fired.clear()
    with capture(pending, pool=first.pool()):
        step.module.backward_dw()
    assert not fired
    for one in (step, other):
        for weight in one.weights:
            weight.main_grad.zero_()
    for sizes in REPLAYED:
        for one in (step, other):
            one.load(sizes)
        first.replay()
        pending.replay()
        y = other.forward(other.x, other.probs, other.sizes)
        y.backward(other.dy)
        asserts.bitwise(kept[0], y, f"y with sizes {sizes}")
        for at, (a, b) in enumerate(zip(step.weights, other.weights, strict=True)):
            asserts.bitwise(a.main_grad, b.main_grad, f"weight {at} after sizes {sizes}")
    step.module.fire_wgrad_hooks()
    assert len(fired) == len([each for each in step.module.modules() if isinstance(each, nn.GroupedLinear)])


# ---------------------------------------------------------------------------------------------------------------------
# As on the CPU


@pytest.mark.rule("MAT-6")
@pytest.mark.parametrize("form", MODULES)
def test_autocast_has_the_bits_of_casts_by_hand(form: str) -> None:
    wide, narrow = Step(form, True, dtype=torch.float32), Step(form, True)
    with torch.no_grad():
        for a, b in zip(wide.weights, narrow.weights, strict=True):
            b.copy_(a)
    with torch.autocast("cuda", torch.bfloat16):
        y, dx, *rest = wide.run()
    y2, dx2, *rest2 = narrow.run()
    for a, b in itertools.chain([(y, y2), (dx, dx2)], zip(rest, rest2, strict=True)):
        asserts.bitwise(a.to(b.dtype), b)


@pytest.mark.rule("GRD-12")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("form", ["GroupedLinear", "GroupedMLP"])
def test_whole_compiled_graphs_have_the_bits_of_eager(form: str) -> None:
    torch.compiler.reset()
    step = Step(form, True)
    expected = step.run()
    step.module.compile(fullgraph=True, backend="aot_eager")
    for a, b in zip(step.run(), expected, strict=True):
        asserts.bitwise(a, b)


def test_operators_of_the_activation_pass_opcheck() -> None:
    h, p, dz = torch.randn(11, 16, requires_grad=True), torch.rand(11, requires_grad=True), torch.randn(11, 8)
    sizes = torch.tensor([5, 6], dtype=torch.int32)
    names = opcheck(lambda: activation.scaled_activation_rows(h, p, "swiglu", sizes).backward(dz))
    assert names == {"activation", "activation_grads"}
