"""Products with activations, and their gradients, through one kernel or the oracle."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from grouped_core import calls
from grouped_core.activations import Activation
from grouped_core.calls import ArraySpec, spec_of
from grouped_core.recipes import plain
from tests import cases
from tests.native.runner import Native


class Rows(NamedTuple):
    """Operands of the calls without a product; rows past the groups hold NaN."""

    case: cases.Case
    activation: Activation
    hidden: NDArray[Any]  # [M, W]
    grad: NDArray[Any]  # [M, F]
    group_sizes: NDArray[Any]
    row_scale: NDArray[Any]  # float32 [M]
    row_base: NDArray[Any]  # float32 [M]


def rows_of(case: cases.Case, activation: Activation, dtype: str) -> Rows:
    """Hidden rows reach into the tails of every function."""
    hidden = 4 * cases.normal((case.rows, activation.fc1_width(case.n)), "float32", "hidden")
    hidden = hidden.astype(cases.numpy_dtype(dtype))
    grad = cases.normal((case.rows, case.n), dtype, "grad")
    scale, base = (cases.normal((case.rows,), "float32", name) for name in ("row_scale", "row_base"))
    for array in (hidden, grad, scale, base):
        array[case.valid :] = cases.TAIL
    return Rows(case, activation, hidden, grad, np.array(case.sizes, np.int32), scale, base)


def maybe(array: NDArray[Any] | None) -> ArraySpec | None:
    return None if array is None else spec_of(array)


def values(run: Native, r: Rows, result: str, *, scaled: bool, zero_tail: bool = True) -> NDArray[Any]:
    scale = r.row_scale if scaled else None
    call = calls.activation(
        spec_of(r.hidden),
        spec_of(r.group_sizes),
        result,
        activation=r.activation,
        row_scale=maybe(scale),
        zero_tail=zero_tail,
    )
    return run(call, (r.hidden, r.group_sizes, scale))[0]


class Product(NamedTuple):
    """Operands of the fused calls, forward and backward, over the same hidden rows."""

    rows: Rows
    x: NDArray[Any]  # [M, K]
    w: NDArray[Any]  # [G, K, W] or [G, W, K]
    bias: NDArray[Any]  # [G, W]
    dy: NDArray[Any]  # [M, K]
    wo: NDArray[Any]  # [G, K, F] or [G, F, K]
    rhs_axis: int


def product_of(case: cases.Case, activation: Activation, dtype: str, rhs_axis: int = 1) -> Product:
    rows = rows_of(case, activation, dtype)
    x, dy = (cases.normal((case.rows, case.k), dtype, name) for name in ("x", "dy"))
    for array in (x, dy):
        array[case.valid :] = cases.TAIL
    weights = []
    for width, name in ((activation.fc1_width(case.n), "wi"), (case.n, "wo")):
        w = cases.normal((case.groups, case.k, width), dtype, name)
        weights.append(np.ascontiguousarray(w.swapaxes(1, 2)) if rhs_axis == 2 else w)
    bias = cases.normal((case.groups, activation.fc1_width(case.n)), dtype, "bias")
    return Product(rows, x, weights[0], bias, dy, weights[1], rhs_axis)


def product_gradients(
    run: Native,
    p: Product,
    result: str,
    *,
    scaled: bool,
    based: bool,
    wanted: tuple[bool, bool, bool] = (True, True, True),
    table: Any = None,
) -> tuple[Any, ...]:
    r = p.rows
    scale, base = r.row_scale if scaled else None, r.row_base if based else None
    call = calls.grouped_matmul_dact(
        spec_of(p.dy),
        spec_of(p.wo),
        p.rhs_axis,
        spec_of(r.group_sizes),
        spec_of(r.hidden),
        result,
        activation=r.activation,
        recipe=plain(p.dy.dtype.name),
        wanted=wanted,
        row_scale=maybe(scale),
        row_base=maybe(base),
        table=table is not None,
    )
    named = {"lhs": p.dy, "rhs": p.wo if table is None else None, "group_sizes": r.group_sizes, "hidden": r.hidden}
    return run(call, call.arrange(**named, row_scale=scale, row_base=base, rhs_table=table))[:3]
