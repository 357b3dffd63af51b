"""The fused up projection on Hopper has the bits of the plain product and the activation, one after the other."""

from __future__ import annotations

import numpy as np
import pytest

from grouped_core import calls
from grouped_core.activations import GATED_KINDS, PLAIN_KINDS, Activation
from grouped_core.calls import SLOTS, spec_of
from grouped_core.recipes import plain
from tests import asserts, cases
from tests.native.runner import Native, kernels, product

KERNELS = [kernel for kernel in kernels("grouped_matmul_act") if "_sm90" in str(kernel)]
each_kernel = pytest.mark.parametrize("kernel", KERNELS)
each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
each_layout = pytest.mark.parametrize("transposed", [False, True])

# Several row tiles per group, odd and even; a tail.
SIZES = (0, 1, 64, 65, 128, 129, 300, 0, 40)
# Rows of a buffer in which groups have tiles of even height.
EVEN = 160 * len(SIZES)
# Columns of hidden: a full tile of columns, edge tiles of each width, less than a box.
WIDTHS = (16, 128, 192, 272, 320, 448, 576)


def problem(width: int, dtype: str, transposed: bool, k: int = 72, rows: int = sum(SIZES) + 11) -> cases.Problem:
    case = cases.Case(f"up_{width}", SIZES, rows, k, width, frozenset())
    return cases.problem(case, dtype, transposed=transposed)


def bits_agree(
    kernel: str,
    p: cases.Problem,
    activation: Activation,
    *,
    bias: np.ndarray | None = None,
    scaled: bool = False,
    hidden: bool = True,
    zero_tail: bool = True,
) -> None:
    dtype = p.x.dtype.name
    scale = p.row_scale if scaled else None
    call = calls.grouped_matmul_act(
        spec_of(p.x),
        spec_of(p.w),
        2 if p.transposed else 1,
        spec_of(p.group_sizes),
        dtype,
        activation=activation,
        recipe=plain(dtype, dtype),
        bias=None if bias is None else spec_of(bias),
        row_scale=None if scale is None else spec_of(scale),
        hidden=hidden,
        zero_tail=zero_tail,
    )
    operands = {"lhs": p.x, "rhs": p.w, "group_sizes": p.group_sizes, "bias": bias, "row_scale": scale}
    arrays = [operands.get(slot) for slot in SLOTS["grouped_matmul_act"]]
    result, stored = Native(kernel, check=False)(call, arrays)[:2]

    rows = product(Native("grouped_matmul_bf16_sm90", check=False), "forward", p, bias=bias)
    specs = (spec_of(rows), spec_of(p.group_sizes), dtype)
    after = calls.activation(*specs, activation=activation, row_scale=None if scale is None else spec_of(scale))
    (expected,) = Native("activation_any_cuda", check=False)(after, (rows, p.group_sizes, scale))

    end = p.case.valid
    asserts.bitwise(result[:end], expected[:end], "result")
    if hidden:
        asserts.bitwise(stored[:end], rows[:end], "hidden")
    if zero_tail:
        asserts.zero(result[end:], "tail of result")
        if hidden:
            asserts.zero(stored[end:], "tail of hidden")


@each_kernel
@each_dtype
@each_layout
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("k", [8, 72, 200])
def test_widths(kernel, dtype, transposed, width, k):
    bits_agree(kernel, problem(width, dtype, transposed, k), Activation("swiglu"))


@each_kernel
@each_layout
@pytest.mark.parametrize("width", WIDTHS)
def test_widths_without_a_linear_half(kernel, transposed, width):
    bits_agree(kernel, problem(width, "bfloat16", transposed), Activation("gelu_tanh"))


@each_kernel
@each_dtype
@each_layout
@pytest.mark.parametrize(
    ("kind", "rows"),
    [(kind, sum(SIZES) + 11) for kind in (*PLAIN_KINDS, *GATED_KINDS)] + [(kind, EVEN) for kind in GATED_KINDS],
)
def test_kinds(kernel, dtype, transposed, kind, rows):
    p = problem(320, dtype, transposed, rows=rows)
    bits_agree(kernel, p, Activation(kind), bias=cases.normal((p.case.groups, 320), dtype, "bias"), scaled=True)


@each_kernel
@each_dtype
@each_layout
@pytest.mark.parametrize("interleave", [1, 32])
@pytest.mark.parametrize("width", [64, 128, 192, 320, 448])
@pytest.mark.parametrize("bias", [None, "float32"])
def test_interleaves(kernel, dtype, transposed, interleave, width, bias):
    p = problem(width, dtype, transposed)
    given = None if bias is None else cases.normal((p.case.groups, width), bias, "bias")
    bits_agree(kernel, p, Activation("clamped_qgeglu", interleave=interleave), bias=given, scaled=True)


@each_kernel
@each_layout
@pytest.mark.parametrize("width", [16, 48, 80, 272])
def test_columns_by_turns_clip_at_any_width(kernel, transposed, width):
    bits_agree(kernel, problem(width, "bfloat16", transposed), Activation("swiglu", interleave=1))


@each_kernel
@each_layout
@pytest.mark.parametrize(("hidden", "zero_tail"), [(False, True), (True, False), (False, False)])
def test_what_is_not_asked_for(kernel, transposed, hidden, zero_tail):
    bits_agree(kernel, problem(320, "bfloat16", transposed), Activation("swiglu"), hidden=hidden, zero_tail=zero_tail)
