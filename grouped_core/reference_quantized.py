"""The reference of quantisation: `quantize`, `dequantize` and `scale_update`, whose bits are guaranteed.

Each call processes one group at a time, in the fp32 operations of `rounding`. Both forms are computed in the layout of
the source; they differ in the axis that blocks run along.

Letters: G groups, M rows, X features, P rows padded to segments; a weight is [A, B].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from grouped_core import rounding
from grouped_core.calls import Call
from grouped_core.rounding import Codes, Floats

Arrays = dict[str, Any]
"""Operands or results by slot; None where one is absent."""

_CODES = {"float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2", "uint8": "float4_e2m1fn"}
"""The type of the codes in each element type of quantised values."""


class _Form(NamedTuple):
    """One form of a group, in the layout of the source: [rows, columns], with rows padded to their segment."""

    codes: Codes
    scales: NDArray[Any]  # one per block; float32 or codes
    group_scale: np.float32


def _spread(blocks: NDArray[Any], shape: tuple[int, ...], block: tuple[int, int]) -> NDArray[Any]:
    """[R, C] of `shape`: one value per block, repeated over the elements of the block."""
    return blocks.repeat(block[0], axis=0).repeat(block[1], axis=1)[: shape[0], : shape[1]]


def _blocks(x: Floats, block: tuple[int, int]) -> Floats:
    """[R, C] -> [R / b0, C / b1, b0, b1], short blocks filled with zeros."""
    rows, columns = (-(-n // b) for n, b in zip(x.shape, block, strict=True))
    full = np.zeros((rows * block[0], columns * block[1]), np.float32)
    full[: x.shape[0], : x.shape[1]] = x
    return full.reshape(rows, block[0], columns, block[1]).swapaxes(1, 2)


def _rotated(x: Floats, source: str) -> Floats:
    """x with every 16 rows of a column rotated; the number of rows is a multiple of 16."""
    rotated = rounding.rotate(x.T.reshape(x.shape[1], -1, 16)).reshape(x.shape[1], -1).T
    return rotated.astype(ml_dtypes.bfloat16).astype(np.float32) if source == "bfloat16" else rotated


def _nvfp4_scales(p: Mapping[str, Any], blocks: Floats, scale: np.float32, axis: int) -> Codes:
    """s_b of [R, C, b0, b1] values; with 4over6 the better of two candidates."""
    amax = rounding.amax(blocks, axis=(2, 3))
    first = rounding.nvfp4_block_scale_inv(amax, scale)
    if not p["four_over_six"]:
        return first
    # Costs are summed along the block for one-dimensional blocks, and along rows of the source for square ones.
    lines = blocks.swapaxes(2, 3) if axis == 0 and p["block_outer"] == 1 else blocks
    candidates = first, rounding.nvfp4_block_scale_inv(amax, scale, 1.5)
    costs = []
    for candidate in candidates:
        scales, scale_inv = candidate[..., None], rounding.scale_inv(scale)
        cost = rounding.nvfp4_row_errors(lines, scales, scale_inv, p["four_over_six"] == "square")
        costs.append(rounding.nvfp4_block_errors(cost) if p["block_outer"] > 1 else cost[..., 0])
    return np.where(costs[1] < costs[0], candidates[1], candidates[0])


def _form(p: Mapping[str, Any], x: Floats, source: str, kind: str, axis: int, scale: Any, words: Any) -> _Form:
    """Values [R, C] of one group, quantised with blocks along `axis`.

    Args:
        source: the element type of the values. kind: that of the codes. scale: the given quantisation scale, or None.
        words: () -> [R, C] random bits.
    """
    block, outer = p["block"] or 1, p["block_outer"]
    shape = (outer, block) if axis == 1 else (block, outer)
    blocks = _blocks(x, shape)
    amax = rounding.amax(blocks, axis=(2, 3))
    scales: NDArray[Any] = np.zeros((0, 0))
    group_scale = np.float32(1)
    with np.errstate(all="ignore"):
        if p["rule"] == "e8m0":
            scales = rounding.e8m0_code(amax, kind)
            factors = _spread(rounding.e8m0_scale(scales), x.shape, shape)
        elif p["rule"] == "nvfp4":
            narrow = p["four_over_six"] and not p["full_range"]
            value_range = rounding.FOUR_OVER_SIX_RANGE if narrow else rounding.NVFP4_RANGE
            group = rounding.nvfp4_group_scale(rounding.amax(x), value_range)
            group_scale = np.float32(rounding.scale_inv(group))
            scales = _nvfp4_scales(p, blocks, np.float32(group), axis)
            factors = _spread(rounding.nvfp4_block_scale(scales, group_scale), x.shape, shape)
        elif p["block"]:
            of_blocks = _fp32_scale(p, amax, kind, source)
            scales = rounding.scale_inv(of_blocks)
            factors = _spread(of_blocks, x.shape, shape)
        else:
            if scale is not None and scale == 0 and p["starts_at_one"]:
                scale = 1.0  # of delayed scaling that has not started
            found = scale is None or scale == 0
            factors = _fp32_scale(p, rounding.amax(x), kind, source) if found else np.float32(scale)
            group_scale = np.float32(rounding.scale_inv(factors))
        y = x * factors
    codes = rounding.encode_stochastic(y, words()) if p["stochastic"] else rounding.encode(y, kind)
    return _Form(codes, scales, group_scale)


def _fp32_scale(p: Mapping[str, Any], amax: Floats, kind: str, source: str) -> Floats:
    overflow = rounding.BF16_MAX if p["block"] and source == "bfloat16" else rounding.FLOAT_MAX
    return rounding.fp32_scale(amax, kind, eps=p["eps"], power_of_two=bool(p["pow2"]), overflow=overflow)


def _no_rows(p: Mapping[str, Any], kind: str, source: str) -> Any:
    """The scale of a block of zeros."""
    empty = _form(
        {**p, "stochastic": 0}, np.zeros((p["block"], p["block_outer"]), np.float32), source, kind, 0, 1, None
    )
    return empty.scales[0, 0]


def _scale_without_rows(
    p: Mapping[str, Any], columns: int, source: str, kind: str, axis: int
) -> Callable[[Any], np.float32]:
    """scale -> the scale_inv of a group without rows, which follows from its given scale alone."""
    none = np.zeros((0, columns), np.float32)
    return cache(lambda scale: _form({**p, "stochastic": 0}, none, source, kind, axis, scale, None).group_scale)


def _starts(ends: NDArray[np.int64], segment: int) -> NDArray[np.int64]:
    """[G + 1]: the first row of each group's segments."""
    sizes = np.diff(ends, prepend=0)
    return np.concatenate([[0], np.cumsum(-(-sizes // segment) * segment)])


def _packed(codes: Codes, kind: str) -> Codes:
    return rounding.pack(codes) if kind == "float4_e2m1fn" else codes


def _quantize(call: Call, o: Arrays, p: Mapping[str, Any], results: Arrays, ends: NDArray[np.int64] | None) -> None:
    from_bits = o["source"]
    source = from_bits.dtype.name
    x = from_bits.astype(np.float32)
    if o["places"] is not None:
        exist = (o["places"] >= 0) & (o["places"] < p["slots"] * x.shape[0])
        x = np.where(exist[:, None], x[np.where(exist, o["places"] // p["slots"], 0)], np.float32(0))
    key = 0 if o["key"] is None else int(o["key"][0]) | int(o["key"][1]) << 32
    if results.get("amax") is not None:
        members = x if ends is None else [x[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        for g, member in enumerate(members):
            before = 0.0 if o["into_amax"] is None else o["into_amax"][g]
            found = rounding.amax(np.append(member.reshape(-1), np.float32(before)))
            results["amax"][g] = np.nan if np.isnan(found) else found
    for cross in (0, 1):
        prefix = "cross_" if cross else ""
        values, scales, group_scales = (results.get(prefix + n) for n in ("values", "scales", "group_scales"))
        if values is None:
            continue
        kind = _CODES[values.dtype.name]

        def form(g: int, member: Floats, cross: int = cross, kind: str = kind) -> _Form:
            scale = None if o["scale"] is None else o["scale"][g]
            rows, columns = member.shape

            def words() -> NDArray[np.uint32]:
                return rounding.random_words(key, rows, columns, g, p["stream"] + cross)

            return _form(p, member, source, kind, 1 - cross, scale, words)

        if ends is None:
            for g in range(x.shape[0]):
                made = form(g, x[g])
                values[g] = _bits(_packed(made.codes.T if cross else made.codes, kind), values)
                if scales is not None:
                    scales[g] = _bits(made.scales.T if cross else made.scales, scales)
                if group_scales is not None:
                    group_scales[g] = made.group_scale
            continue
        narrow = scales is not None and scales.dtype != np.float32
        if scales is not None:
            scales[...] = _bits(np.asarray(_no_rows(p, kind, source)), scales)
        starts = _starts(ends, p["segment"] or 1)
        scale_without_rows = _scale_without_rows(p, x.shape[1], source, kind, 1 - cross)
        for g, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if begin == end:
                if group_scales is not None:
                    group_scales[g] = scale_without_rows(None if o["scale"] is None else o["scale"][g])
                continue
            if not cross:
                made = form(g, x[begin:end])
                values[begin:end] = _bits(_packed(made.codes, kind), values)
                if scales is not None:
                    scales_at = scales[begin:end] if narrow else scales[:, begin:end].T
                    scales_at[...] = _bits(made.scales, scales)
            else:
                member = np.zeros((starts[g + 1] - starts[g], x.shape[1]), np.float32)
                member[: end - begin] = x[begin:end]
                made = form(g, _rotated(member, source) if p["rotate"] else member)
                at = slice(starts[g], starts[g + 1])
                if p["transposed"]:
                    values[:, at] = _bits(made.codes.T, values)
                else:
                    values[at] = _bits(_packed(made.codes, kind), values)
                if scales is not None:
                    scales[at.start // p["block"] : at.stop // p["block"]] = _bits(made.scales, scales)
            if group_scales is not None:
                group_scales[g] = made.group_scale


def _bits(array: NDArray[Any], like: NDArray[Any]) -> NDArray[Any]:
    """Codes viewed as the element type of the result; fp32 unchanged."""
    return np.ascontiguousarray(array).view(like.dtype) if array.dtype == np.uint8 else array


def _decoded(array: NDArray[Any]) -> Floats:
    """Block scales as float32 values."""
    if array.dtype == np.float32:
        return array
    codes = np.ascontiguousarray(array).view(np.uint8)
    is_e8m0 = array.dtype.name == "float8_e8m0fnu"
    return rounding.decode_e8m0(codes) if is_e8m0 else rounding.decode(codes, array.dtype.name)


def _dequantize(call: Call, o: Arrays, p: Mapping[str, Any], results: Arrays, ends: NDArray[np.int64] | None) -> None:
    result = results["result"]
    kind = _CODES[o["values"].dtype.name]
    block, outer, cross = p["block"] or 1, p["block_outer"], p["cross"]
    shape = (block, outer) if cross else (outer, block)

    def values(codes: Codes, scales: Any, g: int) -> Floats:
        """[R, C] values of a group, in the layout of the source; `scales` have one entry per block."""
        with np.errstate(all="ignore"):
            found = rounding.decode(codes, kind)
            if scales is not None:
                found = found * _spread(_decoded(scales), found.shape, shape)
            if o["group_scales"] is not None:
                found = found * o["group_scales"][g]
            return np.where(np.isnan(found), np.float32(np.nan), found)

    def unpacked(packed: NDArray[Any], columns: int) -> Codes:
        codes = np.ascontiguousarray(packed).view(np.uint8)
        return rounding.unpack(codes, columns) if kind == "float4_e2m1fn" else codes

    with np.errstate(all="ignore"):
        if ends is None:
            for g in range(result.shape[0]):
                codes = unpacked(o["values"][g], result.shape[1 if cross else 2])
                scales = None if o["scales"] is None else o["scales"][g]
                if cross:
                    codes, scales = codes.T, None if scales is None else scales.T
                result[g] = values(codes, scales, g).astype(result.dtype)
            return
        starts = _starts(ends, p["segment"] or 1)
        fp32 = o["scales"] is not None and o["scales"].dtype == np.float32
        for g, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            count, scales = end - begin, o["scales"]
            if not cross:
                packed = o["values"][begin:end]
                scales = None if scales is None else scales[:, begin:end].T if fp32 else scales[begin:end]
            else:
                at = slice(starts[g], starts[g] + count)
                packed = o["values"][:, at].T if p["transposed"] else o["values"][at]
                scales = None if scales is None else scales[starts[g] // block :][: -(-count // block)]
            result[begin:end] = values(unpacked(packed, result.shape[1]), scales, g).astype(result.dtype)


def _scale_update(call: Call, o: Arrays, p: Mapping[str, Any], results: Arrays, ends: Any) -> None:
    most_recent = p["algorithm"] == "most_recent"
    for role, fp8_max in enumerate(o["top"]):
        history, scale = rounding.delayed_update(o["history"][role], o["scale"][role], fp8_max, most_recent=most_recent)
        results["new_history"][role], results["new_scale"][role] = history, scale


_MEANING: dict[str, Callable[..., None]] = {
    "quantize": _quantize,
    "dequantize": _dequantize,
    "scale_update": _scale_update,
}
CALLS = tuple(_MEANING)
"""The calls that this module computes."""


def run(call: Call, operands: Arrays, results: Arrays, ends: NDArray[np.int64] | None) -> None:
    """Fills `results`, arrays by slot in the call's element types, which start as zeros.

    Args:
        operands: arrays by slot, in the call's element types. ends: end row of each group; None for weights.
    """
    params = dict(call.params)
    if operands.get("skip") is not None and operands["skip"][0]:
        for name, result in results.items():
            result[...] = operands[f"into_{name}"]
        return
    _MEANING[call.name](call, operands, params, results, ends)
