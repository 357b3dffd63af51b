"""The reference: every native call in NumPy, float64 inside. It defines what a call computes; it is simple and slow.

Letters: G groups, M rows, K in, N out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from grouped_core import reference_quantized, reference_routing, rounding
from grouped_core.activations import KINDS, Slopes, half_columns
from grouped_core.calls import ACTIVATED, RESULTS, SLOTS, ArraySpec, Call, QuantizedParts, quantized_parts, spec_of
from grouped_core.products import Array

Operands = dict[str, Any]
Results = dict[str, NDArray[np.float64]]
"""Requested results by slot. They start as zeros."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of an element type; ml_dtypes supplies the narrow ones."""
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def group_ends(group_sizes: NDArray[Any], rows: int) -> NDArray[np.int64]:
    """end[g] = min(M, sum of max(size, 0) up to g), in 64 bits: sizes clamp, nothing is out of bounds (GRP-4)."""
    return np.minimum(np.cumsum(np.maximum(group_sizes.astype(np.int64), 0)), rows)


def groups(group_sizes: NDArray[Any], rows: int) -> Iterator[tuple[int, slice]]:
    """(g, slice of its rows) for every group, including empty ones."""
    start = 0
    for g, end in enumerate(group_ends(group_sizes, rows)):
        yield g, slice(start, int(end))
        start = int(end)


# ---------------------------------------------------------------------------------------------------------------------
# Quantised operands of products: their dequantised values.


def segment_sizes(group_sizes: NDArray[Any], rows: int, segment: int) -> NDArray[np.int32]:
    """[G]: rows of each group when padded to whole segments."""
    sizes = np.diff(group_ends(group_sizes, rows), prepend=0)
    return (-(-sizes // segment) * segment).astype(np.int32)


def _decoded(array: Any) -> NDArray[np.float64]:
    """Values of codes or scales; uint8 holds two E2M1 codes per byte, so its last axis becomes twice as long."""
    array = np.asarray(array)
    if array.dtype == np.uint8:
        return rounding.decode(rounding.unpack(array, 2 * array.shape[-1]), "float4_e2m1fn").astype(np.float64)
    if array.dtype.name in rounding.TYPES:
        return rounding.decode(array.view(np.uint8), array.dtype.name).astype(np.float64)
    return array.astype(np.float64)


def _spread(scales: Any, blocks: Sequence[int], shape: Sequence[int]) -> NDArray[np.float64]:
    """The scale of each element of an array of `shape`; `blocks` are elements that share one, by axis."""
    spread = _decoded(scales)
    for axis, (block, length) in enumerate(zip(blocks, shape, strict=True)):
        spread = np.repeat(spread, block, axis)[(slice(None),) * axis + (slice(length),)]
    return spread


def _row_values(o: Operands, slot: str, block: int) -> NDArray[np.float64]:
    """[M, C] of rows whose contracted axis is the last one."""
    values, scales = _decoded(o[slot]), o[f"{slot}_scales"]
    if scales is not None:
        scales = scales.T if scales.dtype == np.float32 else scales
        values = values * _spread(scales, (1, block), values.shape)
    if (factors := o[f"{slot}_group_scales"]) is not None:
        for g, at in groups(o["group_sizes"], values.shape[0]):
            values[at] *= float(factors[g])
    return values


def _weight_values(o: Operands, p: Mapping[str, Any]) -> NDArray[np.float64]:
    """[G, N, C]: values of weights, the contracted axis last."""
    values = _decoded(o["rhs"])
    if o["rhs_scales"] is not None:
        values = values * _spread(o["rhs_scales"], (1, p["rhs_block_outer"], p["rhs_block"]), values.shape)
    factors = o["rhs_group_scales"]
    return values if factors is None else values * factors.astype(np.float64)[:, None, None]


def _segment_values(o: Operands, slot: str, p: Mapping[str, Any], width: int) -> NDArray[np.float64]:
    """[P, width] of rows that are contracted, padded to segments."""
    values, scales = _decoded(o[slot]), o[f"{slot}_scales"]
    values = values.T if p["transposed"] else values[:, :width]
    if scales is not None:
        values = values * _spread(scales, (p[f"{slot}_block"], 1), values.shape)
    values = np.array(values)
    if (factors := o[f"{slot}_group_scales"]) is not None:
        for g, at in groups(segment_sizes(o["group_sizes"], p["rows"], p["segment"]), values.shape[0]):
            values[at] *= float(factors[g])
    return values


def is_quantized(call: Call) -> bool:
    """Whether an operand of a product has scales or two codes per byte."""
    if "rhs_scales" not in SLOTS[call.name]:
        return False
    slots = dict(zip(SLOTS[call.name], call.inputs, strict=True))
    packed = any((spec := slots[name]) is not None and spec.dtype == "uint8" for name in ("lhs", "rhs"))
    scaled = any(spec is not None for name, spec in slots.items() if name.endswith("_scales"))
    return packed or scaled or bool(dict(call.params).get("segment", 0))


def with_values(call: Call, arrays: Sequence[Any]) -> tuple[Call, tuple[Any, ...]]:
    """The same product with quantised operands replaced by their values, float64; other calls are returned unchanged.

    Segments are contracted as a whole: rows after a group's last row are zero, or belong to a rotated block. The specs
    of such operands have the dtype that they are multiplied in: float32 with float32 block scales, else bfloat16.
    """
    if not is_quantized(call):
        return call, tuple(arrays)
    o: Operands = dict(zip(SLOTS[call.name], arrays, strict=True))
    p: dict[str, Any] = dict(call.params)
    specs = dict(zip(SLOTS[call.name], call.inputs, strict=True))
    scales = [specs[name] for name in ("lhs_scales", "rhs_scales")]
    nominal = "float32" if any(s is not None and s.dtype == "float32" for s in scales) else "bfloat16"
    plain = {slot: o[f"{slot}_scales"] is None and o[f"{slot}_group_scales"] is None for slot in ("lhs", "rhs")}
    plain = {slot: is_plain and o[slot].dtype != np.uint8 for slot, is_plain in plain.items()}
    if p.get("segment", 0):
        (result,) = call.outputs
        assert result is not None, "a product has a result"
        for slot, width in zip(("lhs", "rhs"), result.shape[1:], strict=True):
            o[slot] = _segment_values(o, slot, p, width)
        o["group_sizes"] = segment_sizes(o["group_sizes"], p["rows"], p["segment"])
        p |= {"segment": 0, "transposed": 0, "rows": 0}
    else:
        if not plain["lhs"]:
            o["lhs"] = _row_values(o, "lhs", p["lhs_block"])
        if not plain["rhs"]:
            o["rhs"] = _weight_values(o, p)
        depth = min(o["lhs"].shape[1], o["rhs"].shape[p["rhs_axis"]])  # the last byte may hold one code of padding
        for slot, axis in (("lhs", 1), ("rhs", p["rhs_axis"])):
            if not plain[slot]:
                o[slot] = o[slot].take(range(depth), axis)
        result = call.outputs[0]
        columns = None if result is None else result.shape[1]
        if call.name == "grouped_matmul_dact":
            columns = o["hidden"].shape[1] // (2 if KINDS[p["kind"]].gated else 1)
        if p["rhs_axis"] == 1 and columns is not None and not plain["rhs"]:
            o["rhs"] = o["rhs"].take(range(columns), 2)  # nor need columns be whole bytes
    for slot, is_plain in plain.items():
        given = specs[slot]
        assert given is not None, f"{slot} is always given"
        specs[slot] = ArraySpec(tuple(o[slot].shape), given.dtype if is_plain else nominal)
        for name in (f"{slot}_scales", f"{slot}_group_scales"):
            specs[name] = o[name] = None
    p |= {"lhs_block": 0, "rhs_block": 0, "rhs_block_outer": 1}
    return dataclasses.replace(call, inputs=tuple(specs.values()), params=tuple(p.items())), tuple(o.values())


# ---------------------------------------------------------------------------------------------------------------------


def _whole_rhs(o: Operands, axis: int) -> NDArray[np.float64]:
    """The weight; its two arrays are concatenated along `axis` where it has two."""
    rhs, up = o["rhs"], o.get("rhs_up")
    return rhs if up is None else np.concatenate((rhs, up), axis=axis)


def _half(rows: NDArray[np.float64], half: int) -> NDArray[np.float64]:
    """The selected columns: all (0), the first half (1) or the second half (2)."""
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
        if o.get("low_lhs") is not None:
            low = o["low_rhs"][g] if p["low_rhs_axis"] == 1 else o["low_rhs"][g].T
            product = product + o["low_lhs"][at] @ low
        bias = 0 if o["bias"] is None else o["bias"][g]
        if o["row_scale"] is None:
            result[at] = product + bias
        elif p["scale_bias"]:
            result[at] = product + o["row_scale"][at, None] * bias
        else:
            result[at] = o["row_scale"][at, None] * (product + bias)


def _low_rank_grads(o: Operands, p: dict[str, Any], results: Results) -> None:
    rows, low = o["rows"], o["low_rows"]
    for g, at in groups(o["group_sizes"], rows.shape[0]):
        factor = o["factor"][g]
        results["rows_grad"][at] = rows[at] @ (factor if p["factor_axis"] == 1 else factor.T)
        results["factor_grad"][g] = rows[at].T @ low[at] if p["factor_axis"] == 1 else low[at].T @ rows[at]


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


def _add_rows(o: Operands, p: dict[str, Any], results: Results) -> None:
    rows, columns = o["rows"].shape
    for g, at in groups(o["group_sizes"], rows):
        terms = float(np.float32(p["factor"])) * o["rows"][at]
        if o["key"] is not None:
            key = int(o["key"][0]) | int(o["key"][1]) << 32
            words = rounding.random_words(key, at.stop - at.start, columns, g, p["stream"])
            terms = np.where((words >> 8) * 2.0**-24 < float(np.float32(p["rate"])), 0.0, terms)
        base = np.zeros_like(terms) if o["base"] is None else o["base"][at]
        results["result"][at] = np.where(terms == 0, base, base + terms)


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


def between_dtype(call: Call) -> str:
    """The dtype of the hidden rows between the product and the activation of a fused call."""
    if call.name == "grouped_matmul_act" and (compute := dict(call.params).get("compute")):
        return str(compute)
    given = call.inputs[call.slot("hidden" if call.name == "grouped_matmul_dact" else "lhs")]
    assert given is not None, "lhs and hidden rows are always given"
    return given.dtype


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
    "low_rank_grads": _low_rank_grads,
    "group_sum": _group_sum,
    "row_dot": _row_dot,
    "scale_rows": _scale_rows,
    "add_rows": _add_rows,
    "grouped_matmul_act": _grouped_matmul_act,
    "grouped_matmul_dact": _grouped_matmul_dact,
    "activation": _activation,
    "activation_grad": _activation_grad,
}


class Oracle:
    """A runner over NumPy arrays, without support for operands given by tables of addresses.

    Args:
        exact: results stay float64, unrounded, and float64 operands are accepted for any dtype, for error bounds and
            finite differences. Otherwise each result is rounded once to its dtype, and so are the hidden rows inside a
            fused call before the activation reads them.
    """

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact

    def __call__(self, call: Call, arrays: Sequence[Array | None]) -> tuple[Any, ...]:
        """The results of `call`, one per slot; None where a result is not requested."""
        if parts := quantized_parts(call):
            return self._then_quantized(call, parts, dict(zip(SLOTS[call.name], arrays, strict=True)))
        call, arrays = with_values(call, arrays)
        operands: Operands = dict(zip(SLOTS[call.name], arrays, strict=True))
        if call.name in reference_quantized.CALLS:
            return self._quantizing(call, operands)
        if call.name in reference_routing.CALLS:
            specs = dict(zip(SLOTS[call.name], call.inputs, strict=True))
            found = reference_routing.run(call, operands, specs, numpy_dtype, exact=self.exact)
            return tuple(found.get(name) for name in RESULTS[call.name])
        for name, array in operands.items():
            if array is not None and name != "group_sizes":
                operands[name] = np.asarray(array).astype(np.float64)
        params = {**dict(call.params), "round": self._rounding(call)}
        slots = dict(zip(RESULTS[call.name], call.outputs, strict=True))
        results = {name: np.zeros(spec.shape) for name, spec in slots.items() if spec is not None}
        into = operands.get("into")
        if into is not None and not params.get("contract_rows", 0):
            results["result"][...] = into  # its tail rows are left unchanged
        _MEANING[call.name](operands, params, results)
        return tuple(None if spec is None else self.cast(results[name], spec.dtype) for name, spec in slots.items())

    def _then_quantized(self, call: Call, parts: QuantizedParts, operands: Operands) -> tuple[Any, ...]:
        """Results of a fused call that rounds some of its results to their dtypes and quantises them."""
        plain, quantize, activated = parts
        results = dict(zip(RESULTS[plain.name], self(plain, plain.arrange(**operands)), strict=True))
        sizes = {"group_sizes": operands["group_sizes"]}
        given = {name: operands.get(name) for name in ("scale", "key", "into_amax")}
        made = self(quantize, quantize.arrange(source=results["result"], **sizes, **given))
        results |= dict(zip(RESULTS["quantize"], made, strict=True))
        if activated is not None:
            scale = operands.get("activated_scale")
            again = self(activated, activated.arrange(source=results["activated"], **sizes, scale=scale))
            made = dict(zip(RESULTS["quantize"], again, strict=True))
            results |= {name: made[own] for name, own in ACTIVATED.items()}
        wanted = zip(RESULTS[call.name], call.outputs, strict=True)
        return tuple(None if spec is None else results[name] for name, spec in wanted)

    def _quantizing(self, call: Call, operands: Operands) -> tuple[Any, ...]:
        """Results of calls with guaranteed bits; they do not depend on `exact`."""
        taken = {
            name: None if array is None or spec is None else np.asarray(array).astype(numpy_dtype(spec.dtype))
            for (name, array), spec in zip(operands.items(), call.inputs, strict=True)
        }
        slots = dict(zip(RESULTS[call.name], call.outputs, strict=True))
        results = {name: np.zeros(s.shape, numpy_dtype(s.dtype)) for name, s in slots.items() if s is not None}
        sizes, rows = taken.get("group_sizes"), call.outputs[0]
        if call.name == "quantize":
            specs = dict(zip(SLOTS[call.name], call.inputs, strict=True))
            rows = specs["places"] or specs["source"]
        ends = None if sizes is None or rows is None else group_ends(sizes, rows.shape[0])
        reference_quantized.run(call, taken, results, ends)
        return tuple(results.get(name) for name in slots)

    def _rounding(self, call: Call) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
        """The rounding of the hidden rows of a fused call, before the activation reads them."""
        if self.exact or call.name != "grouped_matmul_act":
            return lambda array: array
        dtype = numpy_dtype(between_dtype(call))
        return lambda array: array.astype(dtype).astype(np.float64)

    def spec(self, array: Array) -> ArraySpec:
        """Spec of a NumPy array; float64 counts as float32 where results are exact."""
        spec = spec_of(array)
        return ArraySpec(spec.shape, "float32") if self.exact and spec.dtype == "float64" else spec

    def cast(self, array: Array, dtype: str) -> Array:
        """The array rounded to `dtype`, or the same array where results are exact."""
        return array if self.exact else np.asarray(array).astype(numpy_dtype(dtype))
