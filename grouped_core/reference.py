"""The oracle: every native call in NumPy, float64 inside. It defines what a call means; it is slow on purpose.

Letters: G groups, M rows, K in, N out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from grouped_core.activations import KINDS, Slopes, half_columns
from grouped_core.calls import RESULTS, SLOTS, ArraySpec, Call, spec_of
from grouped_core.products import Array

Operands = dict[str, Any]
Results = dict[str, NDArray[np.float64]]
"""By slot; only those that are asked for. They start as zeros."""


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


def _whole_rhs(o: Operands, axis: int) -> NDArray[np.float64]:
    """The weight, of two arrays joined along `axis` if it lies in two."""
    rhs, up = o["rhs"], o.get("rhs_up")
    return rhs if up is None else np.concatenate((rhs, up), axis=axis)


def _half(rows: NDArray[np.float64], half: int) -> NDArray[np.float64]:
    """The columns that count: all (0), the first or the second half."""
    width = rows.shape[1] // 2
    return rows if half == 0 else rows[:, width * (half - 1) : width * half]


def _grouped_matmul(o: Operands, p: dict[str, Any], results: Results) -> None:
    result = results["result"]
    rows = o["lhs"].shape[0]
    if p["contract_rows"]:
        o = {**o, "lhs": _half(o["lhs"], p["lhs_half"]), "rhs": _half(o["rhs"], p["rhs_half"])}
    else:
        o = {**o, "rhs": _whole_rhs(o, p["rhs_axis"])}
        o["bias"] = o["bias"] if o["bias"] is None else _half(o["bias"], p["result_half"])
        result = _half(result, p["result_half"])
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


def _group_sum(o: Operands, p: dict[str, Any], results: Results) -> None:
    for g, at in groups(o["group_sizes"], o["rows"].shape[0]):
        scale = 1 if o["row_scale"] is None else o["row_scale"][at, None]
        results["result"][g] = np.sum(scale * o["rows"][at], axis=0)


def _row_dot(o: Operands, p: dict[str, Any], results: Results) -> None:
    result = results["result"]
    for g, at in groups(o["group_sizes"], result.shape[0]):
        if o["lhs"] is not None:
            result[at] += np.sum(o["lhs"][at] * o["rhs"][at], axis=1)
        if o["group_lhs"] is not None:
            result[at] += o["group_lhs"][at] @ o["group_rhs"][g]


def _scale_rows(o: Operands, p: dict[str, Any], results: Results) -> None:
    for _, at in groups(o["group_sizes"], o["rows"].shape[0]):
        results["result"][at] = o["row_scale"][at, None] * o["rows"][at]


def activation_of(p: Mapping[str, Any], hidden: NDArray[np.float64]) -> Slopes:
    """Value and derivatives, [..., F] each, at hidden rows [..., W]; `p` as `Activation.params` gives it."""
    kind = KINDS[p["kind"]]
    # Parameters travel as float32. NaN and infinities are as welcome as elsewhere.
    numbers = {name: float(np.float32(p[name])) for name in kind.defaults}
    with np.errstate(all="ignore"):
        if not kind.gated:
            return kind.formula(numbers, hidden, np.zeros_like(hidden))
        gate, linear = half_columns(hidden.shape[-1] // 2, p["interleave"])
        return kind.formula(numbers, hidden[..., gate], hidden[..., linear])


def hidden_row_of(p: Mapping[str, Any], gate: NDArray[np.float64], linear: NDArray[np.float64]) -> NDArray[np.float64]:
    """[..., W], the columns of both halves where hidden rows have them."""
    if not KINDS[p["kind"]].gated:
        return gate
    width = gate.shape[-1]
    row = np.empty((*gate.shape[:-1], 2 * width))
    columns = half_columns(width, p["interleave"])
    row[..., columns[0]], row[..., columns[1]] = gate, linear
    return row


def _product(o: Operands, p: dict[str, Any], width: int) -> NDArray[np.float64]:
    """[M, width], the product inside of a fused call."""
    result = np.zeros((o["lhs"].shape[0], width))
    _grouped_matmul(
        {"bias": None, **o, "row_scale": None},
        {**p, "contract_rows": 0, "scale_bias": 0, "result_half": 0},
        {"result": result},
    )
    return result


def _scale(o: Operands, at: slice) -> Any:
    return 1.0 if o["row_scale"] is None else o["row_scale"][at, None]


def _activation(o: Operands, p: dict[str, Any], results: Results) -> None:
    for _, at in groups(o["group_sizes"], o["rows"].shape[0]):
        results["result"][at] = _scale(o, at) * activation_of(p, o["rows"][at]).t


def _activation_grad(o: Operands, p: dict[str, Any], results: Results) -> None:
    for _, at in groups(o["group_sizes"], o["rows"].shape[0]):
        dz, act = o["grad"][at], activation_of(p, o["rows"][at])
        scale = _scale(o, at)
        if "result" in results:
            results["result"][at] = scale * hidden_row_of(p, dz * act.da, dz * act.du)
        if "activated" in results:
            results["activated"][at] = scale * act.t
        if "row_sum" in results:
            base = 0.0 if o["row_base"] is None else o["row_base"][at]
            results["row_sum"][at] = base + np.sum(dz * act.t, axis=1)


def _grouped_matmul_act(o: Operands, p: dict[str, Any], results: Results) -> None:
    columns = 3 - p["rhs_axis"]
    o = {**o, "rhs": _whole_rhs(o, columns), "rhs_up": None}
    hidden = p["round"](_product(o, p, o["rhs"].shape[columns]))
    if "hidden" in results:
        results["hidden"][...] = hidden
    _activation({**o, "rows": hidden}, p, results)


def _grouped_matmul_dact(o: Operands, p: dict[str, Any], results: Results) -> None:
    grad = _product(o, p, o["rhs"].shape[3 - p["rhs_axis"]])
    _activation_grad({**o, "grad": grad, "rows": o["hidden"]}, p, results)


_MEANING: dict[str, Callable[[Operands, dict[str, Any], Results], None]] = {
    "grouped_matmul": _grouped_matmul,
    "group_sum": _group_sum,
    "row_dot": _row_dot,
    "scale_rows": _scale_rows,
    "grouped_matmul_act": _grouped_matmul_act,
    "grouped_matmul_dact": _grouped_matmul_dact,
    "activation": _activation,
    "activation_grad": _activation_grad,
}


class Oracle:
    """A runner over NumPy arrays. Operands given by tables of addresses are not for it.

    Args:
        exact: results stay float64, unrounded, and float64 operands are taken for whatever dtype a rule asks: for
            error bounds and finite differences. Otherwise each result is rounded once to its dtype, and so are the
            hidden rows inside of a fused call, which an activation reads as they would be stored.
    """

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact

    def __call__(self, call: Call, arrays: Sequence[Array | None]) -> tuple[Any, ...]:
        """The results of `call`, one a slot; None where a result is not asked for."""
        operands: Operands = dict(zip(SLOTS[call.name], arrays, strict=True))
        for name, array in operands.items():
            if array is not None and name != "group_sizes":
                operands[name] = np.asarray(array).astype(np.float64)
        params = {**dict(call.params), "round": self._rounding(call)}
        slots = dict(zip(RESULTS[call.name], call.outputs, strict=True))
        results = {name: np.zeros(spec.shape) for name, spec in slots.items() if spec is not None}
        into = operands.get("into")
        if into is not None and not params.get("contract_rows", 0):
            results["result"][...] = into  # whose tail stays
        _MEANING[call.name](operands, params, results)
        return tuple(None if spec is None else self.cast(results[name], spec.dtype) for name, spec in slots.items())

    def _rounding(self, call: Call) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
        """What the hidden rows of a fused call go through before the activation reads them, stored or not."""
        lhs = call.inputs[0]
        if self.exact or call.name != "grouped_matmul_act" or lhs is None:
            return lambda array: array
        return lambda array: array.astype(numpy_dtype(lhs.dtype)).astype(np.float64)

    def spec(self, array: Array) -> ArraySpec:
        """Spec of a NumPy array; float64 counts as float32 where results are exact."""
        spec = spec_of(array)
        return ArraySpec(spec.shape, "float32") if self.exact and spec.dtype == "float64" else spec

    def cast(self, array: Array, dtype: str) -> Array:
        """The array rounded to `dtype`, or itself where results are exact."""
        return array if self.exact else np.asarray(array).astype(numpy_dtype(dtype))
