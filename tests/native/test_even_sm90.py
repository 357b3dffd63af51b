"""Tiles of even height, which the number of rows per group chooses on Hopper, change no bit.

The same groups are multiplied in a buffer whose rows per group ask for such tiles, and in a longer one that has tiles
of 128 rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from grouped_core import calls
from grouped_core.activations import Activation
from grouped_core.calls import SLOTS, spec_of
from grouped_core.recipes import plain
from tests import asserts, cases
from tests.native.runner import Native, product

pytestmark = pytest.mark.gpu

each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
each_layout = pytest.mark.parametrize("transposed", [False, True])


def problems(dtype: str, transposed: bool, k: int, n: int) -> list[cases.Problem]:
    """The same groups in either buffer."""
    case = cases.Case("even", cases.HEIGHTS, cases.EVEN_ROWS, k, n, frozenset())
    p = cases.problem(case, dtype, transposed=transposed)

    def longer(rows: NDArray[Any]) -> NDArray[Any]:
        tail = np.full((cases.OTHER_ROWS - cases.EVEN_ROWS, *rows.shape[1:]), cases.TAIL, rows.dtype)
        return np.concatenate([rows, tail])

    other = p._replace(
        case=cases.Case("other", cases.HEIGHTS, cases.OTHER_ROWS, k, n, frozenset()),
        x=longer(p.x),
        dy=longer(p.dy),
        row_scale=longer(p.row_scale),
    )
    return [p, other]


def agree(found: list[NDArray[Any]], what: str) -> None:
    end = sum(cases.HEIGHTS)
    asserts.bitwise(found[0][:end], found[1][:end], what)
    for rows in found:
        asserts.zero(rows[end:], f"tail of {what}")


@each_dtype
@each_layout
@pytest.mark.parametrize(
    ("which", "k", "n"),
    [
        ("forward", 8, 128),
        *((w, *widths) for w in ("forward", "dgrad") for widths in [(72, 72), (1032, 200), (200, 264)]),
    ],
)
def test_products(dtype, transposed, which, k, n):
    run = Native("grouped_matmul_bf16_sm90", check=False)
    agree([product(run, which, p) for p in problems(dtype, transposed, k, n)], which)


@each_dtype
@each_layout
@pytest.mark.parametrize(("bias", "scale_bias"), [(None, False), ("float32", True), ("own", False), ("own", True)])
def test_bias_and_row_scale(dtype, transposed, bias, scale_bias):
    run, pair = Native("grouped_matmul_bf16_sm90", check=False), problems(dtype, transposed, 72, 200)
    given: dict[str, Any] = {}
    if bias is not None:
        of_columns = cases.normal((len(cases.HEIGHTS), 200), dtype if bias == "own" else bias, "bias")
        given = {"bias": of_columns, "scale_bias": scale_bias}
    agree([product(run, "forward", p, row_scale=p.row_scale, **given) for p in pair], "result")


@each_dtype
@each_layout
@pytest.mark.parametrize(
    ("interleave", "width"), [(None, 128), (None, 144), (None, 400), (1, 144), (32, 192), (1, 400)]
)
@pytest.mark.parametrize("hidden", [True, False])
def test_activations(dtype, transposed, interleave, width, hidden):
    found = []
    for p in problems(dtype, transposed, 136, width):
        bias = cases.normal((len(cases.HEIGHTS), width), "float32", "bias")
        call = calls.grouped_matmul_act(
            *(spec_of(p.x), spec_of(p.w), 2 if transposed else 1, spec_of(p.group_sizes), dtype),
            activation=Activation("clamped_qgeglu", interleave=interleave),
            recipe=plain(dtype, dtype),
            bias=spec_of(bias),
            row_scale=spec_of(p.row_scale),
            hidden=hidden,
        )
        given = {"lhs": p.x, "rhs": p.w, "group_sizes": p.group_sizes, "bias": bias, "row_scale": p.row_scale}
        arrays = [given.get(slot) for slot in SLOTS["grouped_matmul_act"]]
        found.append(Native("grouped_matmul_act_bf16_sm90", check=False)(call, arrays))
    agree([results[0] for results in found], "result")
    if hidden:
        agree([results[1] for results in found], "hidden")
