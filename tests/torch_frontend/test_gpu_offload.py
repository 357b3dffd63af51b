"""Activations in host memory on a GPU: the same bits, fewer bytes on the device, captured graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from grouped_core.mlp_spec import POLICIES
from tests import asserts
from tests.torch_frontend.gpu_tools import capture, captured, graphed
from torch_bridge import _transfer, nn
from torch_bridge.offload import cpu_offload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]
ROWS, H, F, G, LAYERS = 8192, 512, 512, 8, 8


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield
    _transfer.settle()


class Stack:
    """Layers of experts; each is a unit."""

    def __init__(self, policy: str = "save_fc1", layers: int = LAYERS) -> None:
        torch.manual_seed(0)
        options: Any = {"residuals": policy, "dtype": torch.bfloat16, "single_grouped_weight": True}
        self.layers: list[Any] = [nn.GroupedMLP(G, H, F, **options) for _ in range(layers)]
        self.x = torch.randn(ROWS, H).to(torch.bfloat16).requires_grad_()
        self.dy = torch.randn(ROWS, H).to(torch.bfloat16)
        self.probs = torch.rand(ROWS)
        self.sizes = torch.tensor([2000, 0, 1500, 1, 999, 1000, 692, 2000], dtype=torch.int32)
        self.weights = [each for layer in self.layers for each in layer.parameters()]

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """All layers, in contexts if there are options."""
        y = x
        for layer in self.layers:
            with cpu_offload(enabled=bool(options), **options):
                y = layer(y, self.sizes, self.probs)
        return y

    def run(self, **options: Any) -> list[Tensor]:
        """y, dx, and the gradients of all weights."""
        y = self.forward(self.x, **options)
        return [y, *torch.autograd.grad(y, [self.x, *self.weights], self.dy)]


def _same(got: list[Tensor], expected: list[Tensor]) -> None:
    for at, (a, b) in enumerate(zip(got, expected, strict=True)):
        asserts.bitwise(a, b, f"result {at}")


@pytest.mark.rule("OFF-2", "OFF-4", "OFF-6")
@pytest.mark.parametrize("retain", [False, True], ids=["pinned_each_time", "retained"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_same_bits(policy: str, prefetch: int, retain: bool) -> None:
    stack = Stack(policy)
    expected = stack.run()
    for names in (None, {"grouped_fc1"}, {"grouped_x"}):
        for _ in range(2):
            _same(stack.run(names=names, prefetch=prefetch, retain_pinned=retain), expected)


@pytest.mark.rule("MLM #3221")
@pytest.mark.rule("OFF-4")
@pytest.mark.parametrize("policy", POLICIES)
def test_saved_bytes_leave_the_device(policy: str) -> None:
    """After forward only the newest tensors are still on the device, and never more than those of a few layers."""
    stack = Stack(policy)
    row_bytes = {"save_all": 2 * (H + 2 * F + F), "save_fc1": 2 * (H + 2 * F), "save_input": 2 * H}[policy]
    tensors = {"save_all": 3, "save_fc1": 2, "save_input": 1}[policy]
    largest = 2 * max(H, 2 * F if policy != "save_input" else 0)
    held = []
    # Autograd's own thread may free what the first step saved while the next forward pass is already measured.
    with torch.autograd.set_multithreading_enabled(False):
        for options in ({}, {"min_numel": 0}):
            stack.run(**options)
            gc.collect()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            y = stack.forward(stack.x, **options)
            held.append(torch.cuda.memory_allocated() - before)
            y.backward(stack.dy)
            for weight in stack.weights:
                weight.grad = None
            stack.x.grad = None
            del y
            _transfer.settle()
    saved = ROWS * row_bytes * LAYERS - ROWS * 2 * H  # x of the first layer is the caller's
    assert held[0] >= saved, "there is nothing to move"
    newest = min(_transfer.IN_FLIGHT, tensors * LAYERS) * ROWS * largest + ROWS * 2 * H  # and y
    assert held[1] <= newest, f"{held[1]} bytes after forward, {held[0]} without, expected at most {newest}"


@pytest.mark.rule("OFF-6", "CAP-4")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_captured_step(policy: str) -> None:
    stack = Stack(policy)
    graph, results = captured(lambda: stack.run(retain_pinned=True))
    for sizes in ([1000] * 8, [0, 8192, 0, 0, 0, 0, 0, 0], [0] * 8, [1, 2, 3, 4, 5, 6, 7, 8]):
        stack.sizes.copy_(torch.tensor(sizes, dtype=torch.int32))
        expected = [each.clone() for each in stack.run()]
        for each in results:
            each.fill_(float("nan"))
        graph.replay()
        stack.run(retain_pinned=True)  # takes no buffer that the graph has
        _same(results, expected)
        graph.replay()
        _same(results, expected)


@pytest.mark.rule("OFF-6")
def test_microbatches_of_a_captured_step_share_their_buffers() -> None:
    """Inside an outermost context, the memory that one eager microbatch left is enough for three."""
    _transfer.PINNED._free.clear()
    stack = Stack(layers=3)

    def steps() -> list[Tensor]:
        with cpu_offload(enabled=False):
            return [each for _ in range(3) for each in stack.run(retain_pinned=True)]

    expected = [each.detach() for each in stack.run()]  # a history would tie leaves to the stream of this run
    graph, results = captured(steps)
    for each in results:
        each.fill_(float("nan"))
    graph.replay()
    _same(results, expected * 3)
    assert _transfer.PINNED.scope is None


@pytest.mark.rule("OFF-6")
def test_forward_and_backward_in_graphs_of_their_own() -> None:
    """The outermost context waits for its copies, so a graph may end with it."""
    stack = Stack(layers=3)

    def forward(x: Tensor) -> Tensor:
        with cpu_offload(retain_pinned=True):
            return stack.forward(x, retain_pinned=True)

    expected = stack.run()[:2]
    run = graphed(forward, (stack.x.detach().clone().requires_grad_(),))
    for _ in range(2):
        x = stack.x.detach().clone().requires_grad_()
        y = run(x)
        y.backward(stack.dy)
        _same([y, x.grad], expected)


@pytest.mark.rule("OFF-6", "ERR-1")
def test_a_capture_wants_retained_memory() -> None:
    stack = Stack(layers=2)
    stack.run()
    words = ["`retain_pinned` False", "captured", "retain_pinned=True"]
    with asserts.refused(RuntimeError, words), capture():
        stack.run(min_numel=0)
    odd = torch.ones(777, 1025).requires_grad_()  # of a size of which no memory was retained
    words = ["no pinned buffer of 3185700 bytes", "eager step", "retain_pinned=True"]
    with (
        asserts.refused(RuntimeError, words),
        capture(),
        cpu_offload(retain_pinned=True),
    ):
        odd.exp()


def test_copies_run_beside_the_computation() -> None:
    """Work that follows on the compute stream is done although the copy to the host has not begun."""
    stack = Stack(layers=1)
    down, _ = _transfer._streams(stack.x.device)
    stack.run(min_numel=0)
    torch.cuda.synchronize()
    with torch.cuda.stream(down):
        torch.cuda._sleep(2_000_000_000)
    y = stack.forward(stack.x, min_numel=0)
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    assert not down.query(), "the compute stream waited for the copies"
    assert y.isfinite().all()
