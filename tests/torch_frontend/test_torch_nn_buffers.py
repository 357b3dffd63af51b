"""Buffers of the caller in the modules, and how Sequential hands them on (BUF-1 to BUF-4)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grouped_core import recipes
from grouped_core.recipes import FP8Current, Recipe
from tests import asserts, cases
from tests.torch_frontend.nn_tools import FUNCTIONS, Setup, main_grads, setup
from tests.torch_frontend.torch_tools import leaf, saved_tensors
from torch_bridge import nn

CASE = "tail"
LAYERS = ("GroupedLinear", "GroupedMLP")
FORMS = (*LAYERS, "Sequential_fused", "Sequential_composed")


def _keywords(form: str, out: Tensor | None, grad_input: Tensor | None) -> dict[str, Any]:
    """How a form takes its buffers."""
    if form in LAYERS:
        return {"out": out, "grad_input": grad_input}
    return {"op_kwargs": {2: {"out": out}, 0: {"grad_input": grad_input}}}


def _buffers(s: Setup) -> tuple[Tensor, Tensor]:
    return torch.full_like(s.dy, cases.SENTINEL), torch.full_like(s.x, cases.SENTINEL)


@pytest.mark.rule("TE #3161")
@pytest.mark.rule("BUF-1", "BUF-3", "BUF-4", "GRP-7")
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_valid_rows_are_written_in_place_and_tails_untouched(form: str, listed: bool) -> None:
    case, s = cases.named(CASE), setup(form, listed, case=CASE)
    plain, x = leaf(s.x), leaf(s.x)
    expected = s.run(plain)
    expected.backward(s.dy)
    out, grad_input = _buffers(s)
    with saved_tensors() as saved:
        y = s.run(x, **_keywords(form, out, grad_input))
    assert not {out.data_ptr(), grad_input.data_ptr()} & {each.data_ptr() for each in saved}
    y.backward(s.dy, retain_graph=True)
    for _ in range(2):
        assert y.data_ptr() == out.data_ptr()
        for got, wanted in ((out, expected), (grad_input, plain.grad)):
            asserts.bitwise(got[: case.valid], wanted[: case.valid])
            asserts.filled(got[case.valid :], cases.SENTINEL)
        grad_input.fill_(cases.SENTINEL)
        y.backward(s.dy, retain_graph=True)  # a second backward writes the same buffer again


def _with_buffer(form: str, buffer: Tensor) -> dict[str, Any]:
    return {"grad_input": buffer} if form in FUNCTIONS else _keywords(form, None, buffer)


@pytest.mark.rule("BUF-4")
@pytest.mark.parametrize("recipe", [None, FP8Current], ids=["plain", "FP8Current"])
@pytest.mark.parametrize("form", [*FUNCTIONS, *FORMS])
def test_the_gradient_of_a_leaf_is_its_own(form: str, recipe: Recipe | None) -> None:
    """Autograd adds to `.grad` in place; the buffer then still holds the gradient of the last backward."""
    s = setup(form, False, recipe=recipe)
    plain, x, buffer = leaf(s.x), leaf(s.x), torch.zeros_like(s.x)
    s.run(plain).backward(s.dy)
    y = s.run(x, **_with_buffer(form, buffer))
    for count in (1, 2, 3):
        y.backward(s.dy, retain_graph=True)
        asserts.bitwise(buffer, plain.grad, f"buffer after backward {count}")
    asserts.bitwise(x.grad, plain.grad + plain.grad + plain.grad, "`.grad` after three")


@pytest.mark.rule("BUF-4")
@pytest.mark.parametrize("recipe", [None, FP8Current], ids=["plain", "FP8Current"])
@pytest.mark.parametrize("form", [*FUNCTIONS, *FORMS])
def test_the_preceding_operation_gets_the_buffer_itself(form: str, recipe: Recipe | None) -> None:
    s = setup(form, False, recipe=recipe)
    x, buffer = leaf(s.x), torch.zeros_like(s.x)
    rows, seen = x * 2, []
    rows.register_hook(seen.append)
    s.run(rows, **_with_buffer(form, buffer)).backward(s.dy)
    assert [each.data_ptr() for each in seen] == [buffer.data_ptr()]
    asserts.bitwise(x.grad, buffer * 2, "gradient in front")


@pytest.mark.rule("BUF-4")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own: Dynamo makes an instance of autograd.Function
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("recipe", [None, FP8Current], ids=["plain", "FP8Current"])
@pytest.mark.parametrize("form", FUNCTIONS)
def test_the_gradient_of_a_leaf_is_its_own_in_a_graph(form: str, recipe: Recipe | None, backend: str) -> None:
    torch.compiler.reset()
    s = setup(form, False, recipe=recipe)
    plain, x, buffer = leaf(s.x), leaf(s.x), torch.zeros_like(s.x)
    s.run(plain).backward(s.dy)
    run = torch.compile(s.run, fullgraph=True, backend=backend)
    # NOTE: AOTAutograd saves the buffer, which a backward changes, so torch refuses the second one of a retained graph.
    retains = backend == "eager"
    y = run(x, grad_input=buffer)
    for _ in range(2):
        y = y if retains else run(x, grad_input=buffer)
        y.backward(s.dy, retain_graph=retains)
        asserts.bitwise(buffer, plain.grad, "buffer")
    asserts.bitwise(x.grad, plain.grad + plain.grad, "`.grad` after two")


@pytest.mark.rule("BUF-2", "ERR-1")
@pytest.mark.parametrize("form", LAYERS)
@pytest.mark.parametrize(
    ("name", "made", "kind", "fragments"),
    [
        ("out", lambda s: [1.0], TypeError, ["`out`", "list", "torch.Tensor"]),
        ("out", lambda s: s.dy.to("meta"), ValueError, ["`out`", "meta", "expected cpu"]),
        ("out", lambda s: s.dy.bfloat16(), ValueError, ["`out`", "bfloat16", "float32"]),
        ("out", lambda s: s.dy[:-1].clone(), ValueError, ["`out`", "(49,", "(50,"]),
        ("out", lambda s: s.dy.mT.contiguous().mT, ValueError, ["`out`", "strides", "contiguous"]),
        ("out", lambda s: s.dy.clone().requires_grad_(), ValueError, ["`out`", "requires_grad", "detach"]),
        ("grad_input", lambda s: s.x.bfloat16(), ValueError, ["`grad_input`", "bfloat16", "float32"]),
        ("grad_input", lambda s: s.x[:-1].clone(), ValueError, ["`grad_input`", "(49,", "(50,"]),
        ("grad_input", lambda s: s.x, ValueError, ["`grad_input`", "overlaps", "`x`", "allocate"]),
    ],
)
def test_mistakes(form: str, name: str, made: Any, kind: type[Exception], fragments: list[str]) -> None:
    s = setup(form, False, case=CASE)
    x = s.x.requires_grad_()
    with asserts.refused(kind, fragments):
        s.run(x, **{name: made(s).detach() if name == "grad_input" else made(s)})


@pytest.mark.rule("BUF-2")
@pytest.mark.parametrize("form", LAYERS)
def test_buffers_are_of_the_dtype_of_the_computation_and_apart(form: str) -> None:
    s = setup(form, False, case=CASE)
    out, grad_input = _buffers(s)
    with asserts.refused(ValueError, ["`grad_input`", "`x` needs no gradient"]):
        s.run(s.x, grad_input=grad_input)
    memory = torch.zeros(out.numel() + grad_input.numel())
    out2, in2 = memory[: out.numel()].view(out.shape), memory[1 : 1 + grad_input.numel()].view(grad_input.shape)
    with asserts.refused(ValueError, ["`grad_input`", "overlaps", "`out`"]):
        s.run(leaf(s.x), out=out2, grad_input=in2)
    with torch.autocast("cpu", torch.bfloat16):
        with asserts.refused(ValueError, ["`out`", "float32", "bfloat16"]):
            s.run(s.x, out=out)
        x, narrow = leaf(s.x), s.x.bfloat16()
        y = s.run(x, out=out.bfloat16(), grad_input=narrow)
    y.backward(s.dy.bfloat16())
    asserts.bitwise(x.grad, narrow.float())


@pytest.mark.rule("BUF-2")
@pytest.mark.parametrize("recipe", [None, recipes.MXFP8], ids=["plain", "quantised"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("form", LAYERS)
def test_the_incoming_gradient_is_apart_from_the_buffer(form: str, accumulate: bool, recipe: Recipe | None) -> None:
    s = setup(form, False, accumulate=accumulate, case=CASE, recipe=recipe, dtype="bfloat16")
    main_grads(s.weights, 0.0) if accumulate else None
    memory = torch.zeros(s.dy.numel() + s.x.numel(), dtype=s.x.dtype)
    dy = memory[: s.dy.numel()].view(s.dy.shape).copy_(s.dy)
    y = s.run(leaf(s.x), grad_input=memory[1 : 1 + s.x.numel()].view(s.x.shape))
    with asserts.refused(ValueError, ["`grad_input`", "overlaps", "`dy`", "allocate"]):
        y.backward(dy, retain_graph=True)
    asserts.bitwise(dy, s.dy)
    y.backward(s.dy)


# ---------------------------------------------------------------------------------------------------------------------
# Sequential


def _sequential() -> tuple[Any, list[Any], Any]:
    s = setup("Sequential_fused", False, case=CASE)
    return s.module, list(s.module), s


@pytest.mark.rule("BUF-5")
@pytest.mark.parametrize("by", ["index", "negative", "module"])
def test_modules_are_addressed_by_index_or_by_themselves(by: str) -> None:
    module, layers, s = _sequential()
    out, _ = _buffers(s)
    key = {"index": 2, "negative": -1, "module": layers[2]}[by]
    y = module(s.x, s.sizes, s.probs, s.sizes, op_kwargs={key: {"out": out}})
    assert y.data_ptr() == out.data_ptr()


@pytest.mark.rule("TE #3161")
@pytest.mark.rule("BUF-5", "BUF-6")
@pytest.mark.parametrize(
    ("op_kwargs", "kind", "fragments"),
    [
        (lambda a, b: {nn.GroupedLinear(2, 3, 4): {}}, ValueError, ["GroupedLinear that is not in this", "its index"]),
        (lambda a, b: {7: {}}, ValueError, ["index 7", "3 modules", "from 0"]),
        (lambda a, b: {-4: {}}, ValueError, ["index -4", "3 modules"]),
        (lambda a, b: {2: {}, a[2]: {}}, ValueError, ["module 2 (GroupedLinear)", "addressed twice", "merge"]),
        (lambda a, b: {2: {"output": b}}, TypeError, ["keyword 'output'", "module 2", "valid ones: out, grad_input"]),
        (lambda a, b: 3, TypeError, ["`op_kwargs` of Sequential: int", "expected a mapping", "such a dict"]),
        (lambda a, b: {2: b}, TypeError, ["`op_kwargs` of Sequential for 2: Tensor", "expected a mapping"]),
        (lambda a, b: {1: {"out": b}}, TypeError, ["keyword 'out'", "ScaledSwiGLU", "valid ones: none"]),
        (lambda a, b: {0: {"out": b}}, ValueError, ["`out` of module 0", "not materialised", "fuse='never'"]),
        (lambda a, b: {2: {"grad_input": b}}, ValueError, ["`grad_input` of module 2", "not materialised"]),
    ],
    ids=[
        "foreign",
        "too_high",
        "too_low",
        "twice",
        "unknown",
        "number",
        "tensor",
        "activation",
        "fc1_out",
        "fc2_grad_input",
    ],
)
def test_mistakes_of_op_kwargs(op_kwargs: Any, kind: type[Exception], fragments: list[str]) -> None:
    module, layers, s = _sequential()
    with asserts.refused(kind, [*fragments]):
        module(leaf(s.x), s.sizes, s.probs, s.sizes, op_kwargs=op_kwargs(layers, torch.zeros_like(s.x)))


@pytest.mark.rule("BUF-5")
def test_modules_held_twice_and_modules_of_others() -> None:
    s = setup("GroupedLinear", True, case=CASE)
    square = nn.GroupedLinear(3, 24, 24)
    twice = nn.Sequential(square, torch.nn.Identity(), square)
    out = torch.full_like(s.x, cases.SENTINEL)
    with asserts.refused(ValueError, ["GroupedLinear that is held at [0, 2]", "once", "use the index"]):
        twice(s.x, s.sizes, s.sizes, op_kwargs={square: {"out": out}})
    with asserts.refused(ValueError, ["module 1 is a Identity", "this package's modules", "leave it out"]):
        twice(s.x, s.sizes, s.sizes, op_kwargs={1: {}})
    nested = nn.Sequential(twice)
    with asserts.refused(TypeError, ["keyword 'out'", "module 0 (Sequential)", "valid ones: none", "leave it out"]):
        nested(s.x, s.sizes, s.sizes, op_kwargs={0: {"out": out}})
    assert twice(s.x, s.sizes, s.sizes, op_kwargs={2: {"out": out}}).data_ptr() == out.data_ptr()


@pytest.mark.rule("BUF-5", "BUF-6")
def test_a_composed_window_takes_every_buffer() -> None:
    s = setup("Sequential_composed", False, case=CASE)
    case = cases.named(CASE)
    hidden = torch.full((case.rows, 2 * case.n), cases.SENTINEL)
    out, grad_input = _buffers(s)
    dz = torch.full((case.rows, case.n), cases.SENTINEL)
    y = s.run(leaf(s.x), op_kwargs={0: {"out": hidden, "grad_input": grad_input}, 2: {"out": out, "grad_input": dz}})
    y.backward(s.dy)
    asserts.bitwise(out[: case.valid], s.run(s.x)[: case.valid])
    for buffer in (hidden, out, grad_input, dz):
        assert (buffer[: case.valid] != cases.SENTINEL).any()
        asserts.filled(buffer[case.valid :], cases.SENTINEL)
