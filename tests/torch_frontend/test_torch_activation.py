"""The separate activation: values and gradients against the oracle, its operators, its messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from grouped_core import scaled_activation
from grouped_core.activations import GATED_KINDS, PLAIN_KINDS, Activation
from tests import asserts, bounds, cases
from tests.torch_frontend.torch_tools import counted_launches, leaf, opcheck, saved_tensors, tensor
from torch_bridge import nn
from torch_bridge.activation import scaled_activation_rows

KINDS = (*PLAIN_KINDS, *GATED_KINDS)
ROWS, WIDTH = 11, 8


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _spec(kind: str, interleave: int | None) -> Activation:
    return Activation(kind, interleave=interleave if kind in GATED_KINDS else None)


def _operands(spec: Activation, dtype: str, probs: str | None) -> tuple[Any, Any, Any]:
    """(h, probs, dz) in NumPy."""
    h = cases.normal((ROWS, spec.fc1_width(WIDTH)), dtype, "h")
    p = None if probs is None else np.abs(cases.normal((ROWS,), "float32", "p")).astype(cases.numpy_dtype(probs))
    if p is not None:
        p[::4] = 0  # probability 0 is legal (MLP-7)
    return h, p, cases.normal((ROWS, WIDTH), dtype, "dz")


@pytest.mark.rule("ALL-3", "MLP-1", "MLP-3", "MLP-5", "MLP-7")
@pytest.mark.matrix(
    kind=KINDS, interleave=(None, 2), dtype=cases.DTYPES, probs=(None, "float32", "bfloat16"), tail=(False, True)
)
def test_values_and_gradients_are_within_the_bounds(kind, interleave, dtype, probs, tail):
    spec = _spec(kind, interleave)
    h, p, dz = _operands(spec, dtype, probs)
    sizes = np.array([5, 0, 3] if tail else [ROWS], np.int32)
    th, tp = leaf(tensor(h)), None if p is None else leaf(tensor(p))
    z = scaled_activation_rows(th, tp, spec, tensor(sizes) if tail else None)
    z.backward(tensor(dz))
    run = bounds.Expected()
    bh, bp = bounds.Bounded.of(h), None if p is None else bounds.Bounded.of(p)
    asserts.within(z, scaled_activation.activate(run, spec, bh, sizes, bp), "z")
    wanted = (True, p is not None)
    dh, dp = scaled_activation.activate_grads(run, spec, bh, sizes, bp, bounds.Bounded.of(dz), wanted)
    asserts.within(th.grad, dh, "dh")
    if tp is not None:
        asserts.within(tp.grad, run.cast(dp, probs), "dp")
    if tail:
        for rows in (z, th.grad, tp.grad if tp is not None else None):
            if rows is not None:
                asserts.zero(rows[8:], "tail")


@pytest.mark.rule("MLP-3", "prime-rl #2365", "TE #2938")
@pytest.mark.parametrize("offset", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("limit", [7.0, None])
def test_the_gate_is_clamped_above_alone_and_the_offset_is_the_callers(limit: float | None, offset: float) -> None:
    """With alpha 0 the logistic function is 1/2, and everything is exact. At a limit the gradient passes (numerics 5),
    which that of `torch.clamp` does in some releases only.
    """
    gate, linear = torch.meshgrid(*[torch.tensor([-16.0, -7.0, 2.0, 7.0, 16.0])] * 2, indexing="ij")
    gate, linear = leaf(gate.flatten()), leaf(linear.flatten())
    a, u = gate, linear
    if limit is not None:
        a = torch.where(gate > limit, limit, gate)
        u = torch.where(linear.abs() > limit, limit * linear.sign(), linear)
    expected = a * 0.5 * (u + offset)
    expected.sum().backward()
    h = leaf(torch.stack([gate, linear], 1))
    z = nn.ScaledClampedQGeGLU(limit=limit, alpha=0.0, glu_linear_offset=offset)(h)
    z.sum().backward()
    asserts.bitwise(z[:, 0], expected)
    asserts.bitwise(h.grad, torch.stack([gate.grad, linear.grad], 1))


@pytest.mark.rule("GRP-5")
def test_tail_rows_are_not_read() -> None:
    h, p, dz = (tensor(each) for each in _operands(Activation("swiglu"), "float32", "float32"))
    for rows in (h, p, dz):
        rows[8:] = cases.TAIL
    h, p = leaf(h), leaf(p)
    z = scaled_activation_rows(h, p, Activation("swiglu"), torch.tensor([5, 3], dtype=torch.int32))
    z.backward(dz)
    for rows in (z, h.grad, p.grad):
        asserts.zero(rows[8:])


@pytest.mark.rule("ALL-4")
def test_only_what_is_needed_is_kept_and_launched() -> None:
    h, p, dz = (tensor(each) for each in _operands(Activation("swiglu"), "float32", "float32"))
    for needs_h in (False, True):
        for needs_p in (False, True):
            th, tp = leaf(h, needs_h), leaf(p, needs_p)
            with saved_tensors() as saved:
                z = scaled_activation_rows(th, tp, Activation("swiglu"))
            expected = (needs_h or needs_p) * h.nbytes + needs_h * p.nbytes
            assert sum(each.nbytes for each in saved) == expected
            with counted_launches() as calls:
                if needs_h or needs_p:
                    z.backward(dz)
            assert (th.grad is not None, tp.grad is not None) == (needs_h, needs_p)
            assert calls.count("activation_grad") == (needs_h or needs_p)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda: nn.ScaledSwiGLU(), Activation("swiglu")),
        (lambda: nn.ScaledSwiGLU(glu_interleave_size=4), Activation("swiglu", interleave=4)),
        (lambda: nn.ScaledSReLU(), Activation("srelu")),
        (lambda: nn.ScaledSiTUGLU(glu_interleave_size=2), Activation("situ_glu", interleave=2)),
        (lambda: nn.ScaledClampedQGeGLU(), Activation("clamped_qgeglu", limit=7.0, alpha=1.702, offset=1.0)),
        (
            lambda: nn.ScaledClampedQGeGLU(limit=None, alpha=1.0, glu_linear_offset=0.0, glu_interleave_size=1),
            Activation("clamped_qgeglu", limit=None, alpha=1.0, offset=0.0, interleave=1),
        ),
        (lambda: nn.ScaledActivation("geglu_tanh"), Activation("geglu_tanh")),
    ],
)
def test_modules_say_which_activation_they_are(made: Any, expected: Activation) -> None:
    module = made()
    assert module.activation == expected
    assert expected.kind in repr(module)
    assert "_text" not in repr(module)
    h, p, _ = (tensor(each) for each in _operands(expected, "bfloat16", "float32"))
    asserts.bitwise(module(h, p), scaled_activation_rows(h, p, expected))
    asserts.bitwise(module(h), scaled_activation_rows(h, torch.ones(ROWS), expected))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_operators_pass_opcheck() -> None:
    h, p, dz = (tensor(each) for each in _operands(Activation("swiglu"), "float32", "float32"))
    some = torch.tensor([5, 6], dtype=torch.int32)
    for of_rows, of_probs, sizes in ((True, False, some), (False, True, None), (True, True, some)):
        given = (leaf(h, of_rows), leaf(p, of_probs), Activation("swiglu"), sizes)
        names = opcheck(lambda given=given: scaled_activation_rows(*given).backward(dz))
        assert names == {"activation", "activation_grads"}


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_whole_graphs_have_the_bits_of_eager(backend: str) -> None:
    h, p, dz = (tensor(each) for each in _operands(Activation("swiglu"), "bfloat16", "float32"))
    module = nn.ScaledSwiGLU()
    found = []
    for f in (module, torch.compile(module, fullgraph=True, backend=backend)):
        th, tp = leaf(h), leaf(p)
        z = f(th, tp)
        z.backward(dz)
        found.append((z, th.grad, tp.grad))
    for got, expected in zip(found[1], found[0], strict=True):
        asserts.bitwise(got, expected)


@pytest.mark.rule("GRD-13", "ERR-1")
@pytest.mark.parametrize(
    ("call", "kind", "fragments"),
    [
        (lambda: nn.ScaledSwiGLU()(torch.zeros(3, 5)), ValueError, ["`h`", "(3, 5)", "even", "swiglu"]),
        (lambda: nn.ScaledSwiGLU()(torch.zeros(2, 3, 4)), ValueError, ["`h`", "(2, 3, 4)", "two axes [M, W]", "fold"]),
        (lambda: nn.ScaledSwiGLU(4)(torch.zeros(3, 12)), ValueError, ["4", "6"]),
        (lambda: nn.ScaledSwiGLU()(torch.zeros(3, 4).double()), TypeError, ["`h`", "float64", "float32", "cast"]),
        (lambda: nn.ScaledSwiGLU()(torch.zeros(3, 4), torch.ones(4)), ValueError, ["`probs`", "(4,)", "(3,)"]),
        (lambda: nn.ScaledSwiGLU()(torch.zeros(4, 3).mT), ValueError, ["`h`", "strides", "contiguous"]),
        (
            lambda: (
                torch.autograd.grad(
                    nn.ScaledSReLU()(h := torch.ones(1, 2, requires_grad=True)).sum(), h, create_graph=True
                )[0]
                .sum()
                .backward()
            ),
            RuntimeError,
            ["scaled_activation", "differentiated twice"],
        ),
    ],
)
def test_mistakes(call: Any, kind: type[Exception], fragments: list[str]) -> None:
    with asserts.refused(kind, fragments):
        call()
