"""Captured modules beside each other: graphs that share a pool, a stream of their own, sizes from the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import asserts
from tests.torch_frontend.gpu_layers import Step
from tests.torch_frontend.gpu_tools import REPLAYED, capture, captured
from tests.torch_frontend.nn_tools import MODULES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield


def _same(found: list[Tensor], wanted: list[Tensor], what: str) -> None:
    for at, (a, b) in enumerate(zip(found, wanted, strict=True)):
        asserts.bitwise(a, b, f"result {at} {what}")


@pytest.mark.rule("CAP-1", "CAP-2", "TE #3210", "TE #1345", "TE #3171")
@pytest.mark.parametrize("form", MODULES)
def test_forward_and_backward_graphs_of_two_modules_share_a_pool(form: str) -> None:
    """Both forwards, then both backwards, as a pipeline does, on a stream that is not the default one.

    The tensors that one graph saved must outlive the other; eager modules give the expected results.
    """
    steps, others = ([Step(form, True) for _ in range(2)] for _ in range(2))
    for pair in (steps, others):
        with torch.no_grad():
            for weight in pair[1].weights:
                weight.mul_(0.5)
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in steps:
            step.run()
    torch.cuda.current_stream().wait_stream(stream)
    graphs, results = [], []
    for step in steps:
        with capture(pool=pool) as graph:
            results.append([step.forward(step.x, step.probs, step.sizes)])
        graphs.append(graph)
    for step, found in zip(steps, results, strict=True):
        wanted = [step.x, *([] if form == "GroupedLinear" else [step.probs]), *step.weights]
        with capture(pool=pool) as graph:
            found += torch.autograd.grad(found[0], wanted, step.dy)
        graphs.append(graph)
    for at in range(len(REPLAYED)):
        for number, pair in enumerate(zip(steps, others, strict=True)):
            for one in pair:
                one.load(REPLAYED[at - number])  # the two modules differ in their rows too
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for graph in graphs:
                graph.replay()
        torch.cuda.synchronize()
        for found, other in zip(results, others, strict=True):
            _same(found, other.run(), f"with sizes {REPLAYED[at]}")


@pytest.mark.rule("GRP-2", "TE #3038", "TE #3224")
@pytest.mark.parametrize("made", [list, torch.tensor], ids=["integers", "cpu_tensor"])
@pytest.mark.parametrize("form", MODULES)
def test_sizes_from_the_host_are_captured_with_a_warning(form: str, made: Any) -> None:
    """The graph keeps their values; rows and weights may change."""
    step = Step(form, True)
    frozen = REPLAYED[3]
    with torch.device("cpu"):
        sizes = made(frozen)
    step.load(frozen)

    def run(given: Any) -> list[Tensor]:
        y = step.forward(step.x, step.probs, given)
        return [y, *torch.autograd.grad(y, [step.x, *step.weights], step.dy)]

    with pytest.warns(UserWarning, match="group_sizes came from the host: the captured graph keeps these values"):
        graph, results = captured(lambda: run(sizes))
    for _ in range(2):
        with torch.no_grad():
            step.x[: sum(frozen)].mul_(0.5)
            for weight in step.weights:
                weight.mul_(1.25)
        expected = [each.clone() for each in run(step.sizes)]
        for each in results:
            each.fill_(float("nan"))
        graph.replay()
        _same(results, expected, "after a replay")
