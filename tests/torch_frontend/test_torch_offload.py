"""`offload.cpu_offload` without a GPU: what would be moved and when, over a transfer that stays on the CPU.

With recipes that quantise: test_torch_offload_recipes.py. The transfer itself, its streams, memory and captured graphs:
test_gpu_offload.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from grouped_core.mlp_spec import POLICIES
from tests import asserts
from tests.torch_frontend.nn_tools import FORMS, setup
from tests.torch_frontend.offload_tools import Sent, recorded
from tests.torch_frontend.torch_tools import leaf
from torch_bridge import nn, offload
from torch_bridge.offload import cpu_offload


@pytest.fixture
def sent() -> Iterator[list[Sent]]:
    """The tensors that were moved."""
    with recorded() as moved:
        yield moved


def _results(s: Any, **options: Any) -> list[Any]:
    """y and every gradient, forward in a context if there are options."""
    for weight in s.weights:
        weight.grad = None
    x = leaf(s.x)
    if options:
        with cpu_offload(**options):
            y = s.run(x)
    else:
        y = s.run(x)
    y.backward(s.dy)
    return [y, x.grad, *(weight.grad for weight in s.weights)]


def _same(got: list[Any], expected: list[Any]) -> None:
    for at, (a, b) in enumerate(zip(got, expected, strict=True)):
        asserts.bitwise(a, b, f"result {at}")


@pytest.mark.rule("OFF-1")
def test_without_a_gpu_it_does_nothing_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.setattr(offload, "_said", [])
    s = setup("GroupedMLP", False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with cpu_offload(enabled=False):
            pass
    assert not offload._said, "a context that moves nothing has nothing to say"
    expected = _results(s)
    with pytest.warns(UserWarning, match="no GPU here.*nothing is moved.*same"):
        _same(_results(s, min_numel=0), expected)
    _same(_results(s, min_numel=0), expected)  # warnings are errors here


@pytest.mark.rule("TE #1959")
@pytest.mark.rule("OFF-2", "OFF-6")
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_same_bits_and_rows_alone_are_moved(form: str, listed: bool, sent: list[Sent]) -> None:
    s = setup(form, listed)
    expected = _results(s)
    assert not sent
    _same(_results(s, min_numel=0), expected)
    rows = s.x.shape[0]
    assert sent
    assert all(each.copy.shape[0] == rows and each.copy.dim() == 2 for each in sent)
    assert all(each.taken == each.saved for each in sent), "what was saved was not read"
    kept = {weight.data_ptr() for weight in s.weights} | {s.sizes.data_ptr(), s.probs.data_ptr()}
    assert not kept & {each.source.data_ptr() for each in sent}
    before = len(sent)
    _same(_results(s, min_numel=s.x.numel() * 100), expected)
    assert len(sent) == before, "small ones stay"


@pytest.mark.rule("MLM #5082")
@pytest.mark.rule("OFF-5", "MLP-9")
@pytest.mark.parametrize("policy", POLICIES)
def test_names_choose_what_is_moved(policy: str, sent: list[Sent]) -> None:
    s = setup("GroupedMLP", False)
    mlp: Any = nn.GroupedMLP(5, 16, 24, residuals=policy, single_grouped_weight=True)
    widths = {"grouped_x": 16, "grouped_fc1": 48, "grouped_act": 24}
    saved = {"save_all": set(widths), "save_fc1": {"grouped_x", "grouped_fc1"}, "save_input": {"grouped_x"}}[policy]
    for chosen in ({"grouped_x"}, {"grouped_fc1"}, {"grouped_act"}, {"grouped_x", "grouped_fc1"}, set(), None):
        sent.clear()
        with cpu_offload(names=chosen, min_numel=0):
            y = mlp(leaf(s.x), s.sizes, s.probs)
        y.backward(s.dy)
        expected = {widths[name] for name in (saved if chosen is None else saved & chosen)}
        assert {each.copy.shape[1] for each in sent} == expected, chosen


@pytest.mark.rule("OFF-5")
def test_a_storage_saved_twice_is_moved_once(sent: list[Sent]) -> None:
    s = setup("GroupedLinear", False)
    x = leaf(s.x)
    with cpu_offload(min_numel=0):
        y = s.run(x) + s.run(x)
        (z,) = (s.run(x.view(x.shape)),)  # another tensor of the same storage
    (y + z).backward(s.dy)
    (moved,) = sent
    assert (moved.saved, moved.taken) == (3, 3)
    plain = leaf(s.x)
    (s.run(plain) + s.run(plain) + s.run(plain)).backward(s.dy)
    asserts.bitwise(x.grad, plain.grad)
    with torch.no_grad():
        x += 1  # another version of it
    with cpu_offload(min_numel=0):
        s.run(x)
    assert len(sent) == 2


class _Keeps(torch.autograd.Function):
    """Keeps two tensors, and says what came back."""

    back: tuple[torch.Tensor, ...]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *kept: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*kept)
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _Keeps.back = ctx.saved_tensors
        return grads[0], None, None


@pytest.mark.rule("OFF-4")
def test_tensors_of_a_unit_come_back_in_the_order_of_backward(sent: list[Sent]) -> None:
    square: Any = nn.GroupedLinear(5, 16, 16, bias=False)
    s = setup("GroupedLinear", False)
    with cpu_offload(min_numel=0):
        y = square(square(leaf(s.x) * 1, s.sizes) * 1, s.sizes)
    y.sum().backward()
    assert len(sent) == 2
    assert Sent.started == [sent[1], sent[0]]


@pytest.mark.rule("OFF-3")
def test_views_of_parameters_stay(sent: list[Sent]) -> None:
    weight = torch.nn.Parameter(torch.randn(4, 8))
    with cpu_offload(min_numel=1):
        _Keeps.apply(torch.ones(2, requires_grad=True), weight.view(8, 4), weight[1:3])
    assert not sent


@pytest.mark.rule("OFF-5")
@pytest.mark.parametrize("other", [torch.bfloat16, torch.int16, torch.uint8])
def test_views_of_one_storage_keep_their_dtypes(other: torch.dtype, sent: list[Sent]) -> None:
    x = torch.randn(4, 8).half()
    kept = (x, x.view(other))
    with cpu_offload(min_numel=1):
        y = _Keeps.apply(torch.ones(4, 8, requires_grad=True), *kept)
    y.sum().backward()
    for back, given in zip(_Keeps.back, kept, strict=True):
        asserts.bitwise(back, given)


@pytest.mark.rule("OFF-1")
def test_contexts_nest_and_the_innermost_decides(sent: list[Sent]) -> None:
    s = setup("GroupedLinear", False)
    xs = [leaf(s.x) for _ in range(4)]
    with cpu_offload(min_numel=0):
        ys = [s.run(xs[0])]
        with cpu_offload(enabled=False):
            ys.append(s.run(xs[1]))
            with cpu_offload(min_numel=0):
                ys.append(s.run(xs[2]))
        ys.append(s.run(xs[3]))
    assert [each.source.data_ptr() for each in sent] == [xs[at].data_ptr() for at in (0, 2, 3)]
    torch.stack(ys).sum(0).backward(s.dy)
    for x in xs[1:]:
        asserts.bitwise(x.grad, xs[0].grad)


@pytest.mark.rule("OFF-4")
@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_units_are_brought_back_ahead(prefetch: int, sent: list[Sent]) -> None:
    square: Any = nn.GroupedLinear(5, 16, 16, bias=False)
    s = setup("GroupedLinear", False)
    y, order = leaf(s.x), []
    for at in range(4):
        with cpu_offload(min_numel=0, prefetch=prefetch):
            y = square(y * 1, s.sizes)
        y.register_hook(lambda grad, at=at: order.append((at, len(Sent.started))) or grad)
    y.backward(torch.ones_like(y))
    # When the gradient arrives at unit `at`, this unit and `prefetch` before it are not yet on their way; one further
    # unit has been, of those behind it.
    expected = [(at, min(4, 3 - at + prefetch) if at < 3 else 0) for at in (3, 2, 1, 0)]
    assert order == expected
    assert len(sent) == 4
    by_unit = list(reversed(sent))
    assert Sent.started == by_unit


@pytest.mark.rule("OFF-2")
def test_hooks_of_others_work_inside_and_outside(sent: list[Sent]) -> None:
    s = setup("GroupedMLP", True)
    expected = _results(s)
    for at, (outer, inner) in enumerate(
        [
            (torch.autograd.graph.save_on_cpu(), cpu_offload(min_numel=0)),
            (cpu_offload(min_numel=0), torch.autograd.graph.save_on_cpu()),
        ]
    ):
        sent.clear()
        for weight in s.weights:
            weight.grad = None
        x = leaf(s.x)
        with outer, inner:
            y = s.run(x)
        y.backward(s.dy)
        _same([y, x.grad, *(weight.grad for weight in s.weights)], expected)
        assert bool(sent) == (at == 0), "the innermost decides"


@pytest.mark.rule("OFF-3")
def test_foreign_tensors_are_moved_but_no_parameters_integers_or_vectors(sent: list[Sent]) -> None:
    linear, vector = torch.nn.Linear(16, 16), leaf(torch.ones(16))
    x = leaf(torch.randn(8, 16))
    index = torch.arange(8).view(2, 4)
    with cpu_offload(min_numel=0):
        y = linear(x)  # saves x and a view of the weight
        y = y * vector  # saves both
        y = y[index]  # saves the index
        y = y.exp()  # saves its result
    shapes = [tuple(each.copy.shape) for each in sent]
    assert shapes == [(8, 16), (8, 16), (2, 4, 16)]
    assert not {linear.weight.data_ptr(), index.data_ptr()} & {each.source.data_ptr() for each in sent}
    y.sum().backward()
    expected = leaf(x)
    (linear(expected) * vector)[index].exp().sum().backward()
    asserts.bitwise(x.grad, expected.grad)


@pytest.mark.rule("OFF-3")
def test_casts_of_weights_stay(sent: list[Sent]) -> None:
    s = setup("GroupedLinear", False)
    with torch.autocast("cpu", torch.bfloat16), cpu_offload(min_numel=0):
        s.run(leaf(s.x))
    assert [tuple(each.copy.shape) for each in sent] == [tuple(s.x.shape)]


@pytest.mark.rule("OFF-2")
def test_a_retained_graph_reads_again(sent: list[Sent]) -> None:
    s = setup("GroupedMLP", False)
    x = leaf(s.x)
    with cpu_offload(min_numel=0):
        y = s.run(x)
    y.backward(s.dy, retain_graph=True)
    first, x.grad = x.grad, None
    y.backward(s.dy)
    asserts.bitwise(x.grad, first)
    assert all(each.taken == 2 * each.saved for each in sent)


@pytest.mark.rule("DLY-4")
def test_delayed_gradients_keep_what_came_back(sent: list[Sent]) -> None:
    expected = _results(setup("GroupedMLP", False))
    s = setup("GroupedMLP", False, delay=True)
    got = _results(s, min_numel=0)
    assert sent
    s.module.backward_dw()
    _same([*got[:2], *(weight.grad for weight in s.weights)], expected)


def test_the_graph_of_results_is_freed(sent: list[Sent]) -> None:
    """This includes operations that save their own result: no cycle is left for the garbage collector."""
    import gc
    import weakref

    x = leaf(torch.randn(4, 4))
    gc.disable()
    try:
        with cpu_offload(enabled=False):
            y = x.exp()
        ref = weakref.ref(y)
        del y
        assert ref() is None
    finally:
        gc.enable()


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize(
    ("options", "kind", "fragments"),
    [
        ({"names": 3}, TypeError, ["`names` of cpu_offload", "3", "expected names", "pass a list"]),
        ({"names": ["x"]}, ValueError, ["`names` of cpu_offload", "'x'", "grouped_x", "None"]),
        ({"min_numel": 1.5}, TypeError, ["`min_numel`", "1.5", "integer"]),
        ({"prefetch": -1}, ValueError, ["`prefetch`", "-1", "0 or more"]),
        ({"enabled": "no"}, TypeError, ["`enabled` of cpu_offload", "'no'", "True or False"]),
        ({"retain_pinned": "no"}, TypeError, ["`retain_pinned` of cpu_offload", "'no'", "True or False"]),
    ],
)
def test_mistakes(options: dict[str, Any], kind: type[Exception], fragments: list[str]) -> None:
    with asserts.refused(kind, fragments), cpu_offload(**options):
        pass
