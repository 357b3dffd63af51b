"""The oracle: every native call in NumPy, float64 inside. It defines what a call means; it is slow on purpose.

Letters: G groups, M rows, K in, N out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from grouped_core.calls import SLOTS, ArraySpec, Call, spec_of
from grouped_core.products import Array

Operands = dict[str, Any]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of an element type; ml_dtypes supplies the narrow ones."""
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def group_ends(group_sizes: NDArray[Any], rows: int) -> NDArray[np.int64]:
    """end[g] = min(M, sum of max(size, 0) up to g), in 64 bits: sizes clamp, nothing is out of bounds (GRP-4)."""
    return np.minimum(np.cumsum(np.maximum(group_sizes.astype(np.int64), 0)), rows)


def groups(group_sizes: NDArray[Any], rows: int) -> Iterator[tuple[int, slice]]:
    """(g, its rows) for every group, empty ones too."""
    start = 0
    for g, end in enumerate(group_ends(group_sizes, rows)):
        yield g, slice(start, int(end))
        start = int(end)


def _grouped_matmul(o: Operands, p: dict[str, Any], result: NDArray[np.float64]) -> None:
    rows = o["lhs"].shape[0]
    for g, at in groups(o["group_sizes"], rows):
        if p["contract_rows"]:
            if at.start == at.stop:  # an empty group: zero, or what the accumulator held
                result[g] = o["into"][g] if p["accumulate"] else 0
                continue
            product = o["lhs"][at].T @ o["rhs"][at]
            result[g] = product + (o["into"][g] if p["accumulate"] else 0)
            continue
        weight = o["rhs"][g] if p["rhs_axis"] == 1 else o["rhs"][g].T
        product = o["lhs"][at] @ weight
        bias = 0 if o["bias"] is None else o["bias"][g]
        if o["row_scale"] is None:
            result[at] = product + bias
        elif p["scale_bias"]:
            result[at] = product + o["row_scale"][at, None] * bias
        else:
            result[at] = o["row_scale"][at, None] * (product + bias)


def _group_sum(o: Operands, p: dict[str, Any], result: NDArray[np.float64]) -> None:
    for g, at in groups(o["group_sizes"], o["rows"].shape[0]):
        scale = 1 if o["row_scale"] is None else o["row_scale"][at, None]
        result[g] = np.sum(scale * o["rows"][at], axis=0)


def _row_dot(o: Operands, p: dict[str, Any], result: NDArray[np.float64]) -> None:
    for g, at in groups(o["group_sizes"], result.shape[0]):
        if o["lhs"] is not None:
            result[at] += np.sum(o["lhs"][at] * o["rhs"][at], axis=1)
        if o["group_lhs"] is not None:
            result[at] += o["group_lhs"][at] @ o["group_rhs"][g]


def _scale_rows(o: Operands, p: dict[str, Any], result: NDArray[np.float64]) -> None:
    for _, at in groups(o["group_sizes"], o["rows"].shape[0]):
        result[at] = o["row_scale"][at, None] * o["rows"][at]


_MEANING: dict[str, Callable[[Operands, dict[str, Any], NDArray[np.float64]], None]] = {
    "grouped_matmul": _grouped_matmul,
    "group_sum": _group_sum,
    "row_dot": _row_dot,
    "scale_rows": _scale_rows,
}


class Oracle:
    """A runner over NumPy arrays. Operands given by tables of addresses are not for it.

    Args:
        exact: results stay float64, unrounded, and float64 operands are taken for whatever dtype a rule asks: for
            error bounds and finite differences. Otherwise each result is rounded once to its dtype.
    """

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact

    def __call__(self, call: Call, arrays: Sequence[Array | None]) -> tuple[Array, ...]:
        """The results of `call`."""
        operands: Operands = dict(zip(SLOTS[call.name], arrays, strict=True))
        for name, array in operands.items():
            if array is not None and name != "group_sizes":
                operands[name] = np.asarray(array).astype(np.float64)
        (spec,) = call.outputs
        params = dict(call.params)
        into = operands.get("into")
        result = np.zeros(spec.shape)
        if into is not None and not params.get("contract_rows", 0):
            result[...] = into  # whose tail stays
        _MEANING[call.name](operands, params, result)
        return (result if self.exact else result.astype(numpy_dtype(spec.dtype)),)

    def spec(self, array: Array) -> ArraySpec:
        """Spec of a NumPy array; float64 counts as float32 where results are exact."""
        spec = spec_of(array)
        return ArraySpec(spec.shape, "float32") if self.exact and spec.dtype == "float64" else spec

    def cast(self, array: Array, dtype: str) -> Array:
        """The array rounded to `dtype`, or itself where results are exact."""
        return array if self.exact else np.asarray(array).astype(numpy_dtype(dtype))
