"""The oracle of quantised layouts against docs/numerics.md (2.4 and 7), element by element: its position, the block
whose scale it has, and how far its dequantised value may be from the original."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from grouped_core import calls, rounding
from grouped_core.calls import QUANTIZED, RESULTS, spec_of
from grouped_core.formats import FORMATS, Format
from grouped_core.reference import Oracle
from tests import asserts, cases

FORMATS_WITH_SCALES = [row for row in FORMATS.values() if not row.plain]
FORMATS_WITH_SCALES += [FORMATS["nvfp4"].replace(stochastic=True), FORMATS["nvfp4"].replace(four_over_six="absolute")]
SIZES = (5, 0, 130, 33)
ROWS, X = 175, 150  # seven rows are past the groups
EPSILON = {"float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3, "uint8": 2.0**-2}
LEAST = {"float8_e4m3fn": 2.0**-9, "float8_e5m2": 2.0**-16, "uint8": 0.5}


class Quantized(NamedTuple):
    values: NDArray[Any]
    scales: NDArray[Any] | None
    group_scales: NDArray[Any] | None


def stored(source: NDArray[Any], format: Format, cross: bool, sizes: NDArray[Any] | None) -> Quantized:
    forms = (not cross, cross)
    call = calls.quantize(spec_of(source), format, forms, None if sizes is None else spec_of(sizes))
    results = dict(
        zip(RESULTS["quantize"], Oracle()(call, call.arrange(source=source, group_sizes=sizes)), strict=True)
    )
    found = Quantized(*(results[name] for name in (QUANTIZED[3:] if cross else QUANTIZED[:3])))
    spec = calls.spec_in_format(
        format, source.shape, source.ndim - 2 if cross else source.ndim - 1, "float32", len(SIZES)
    )
    for array, wanted in zip(found, (spec.values, spec.scales, spec.group_scales), strict=True):
        assert (array is None) == (wanted is None)
        if array is not None:
            assert spec_of(array) == wanted
    return found


def code_at(values: NDArray[Any], *index: int) -> float:
    """The number of one code, two of them a byte in uint8."""
    if values.dtype != np.uint8:
        return float(values[index].astype(np.float32))
    byte = int(values[(*index[:-1], index[-1] // 2)])
    return float(np.array(byte >> 4 if index[-1] % 2 else byte & 15, np.uint8).view(ml_dtypes.float4_e2m1fn))


def owners(format: Format):
    """(row, its group, row inside the group, first row of the group's segment)."""
    first = segment = 0
    for g, size in enumerate(SIZES):
        for r in range(size):
            yield first + r, g, r, segment
        first += size
        segment += -(-size // format.segment) * format.segment


def near(x: float, code: float, scale: float, group: float, format: Format) -> None:
    bound = EPSILON[format.values] * abs(x) + 0.5 * LEAST[format.values] * scale * group
    if format.rule == "nvfp4":
        bound += 6 * 2.0**-10 * group
    bound *= 2 if format.stochastic else 1
    assert abs(code * scale * group - x) <= bound * (1 + 2.0**-20), (x, code, scale, group)


def scale_of(array: NDArray[Any] | None, *index: int) -> float:
    return 1.0 if array is None else float(array[index].astype(np.float32))


@pytest.mark.rule("GRP-12")
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("format", [f for f in FORMATS_WITH_SCALES if not f.square], ids=lambda f: f.name)
def test_rows(format, cross):
    x = cases.normal((ROWS, X), "float32", "stored")
    found = stored(x, format, cross, np.array(SIZES, np.int32))
    block, transposed_scales = format.block or 1, format.scales == "float32"
    for (row, g, r, segment), column in itertools.product(owners(format), range(X)):
        group = scale_of(found.group_scales, g)
        if not cross:
            code = code_at(found.values, row, column)
            at = (column // block, row) if transposed_scales else (row, column // block)
        else:
            padded = segment + r
            code = code_at(found.values, *((column, padded) if format.transposed else (padded, column)))
            at = (padded // block, column)
        near(float(x[row, column]), code, scale_of(found.scales, *at), group, format)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("format", FORMATS_WITH_SCALES, ids=lambda f: f.name)
def test_weights(format, cross):
    w = cases.normal((2, 37, 150), "float32", "stored")
    found = stored(w, format, cross, None)
    block, outer = format.block or 1, format.block_outer
    for g, a, b in itertools.product(*map(range, w.shape)):
        o, c = (b, a) if cross else (a, b)
        scale = scale_of(found.scales, g, o // outer, c // block)
        near(float(w[g, a, b]), code_at(found.values, g, o, c), scale, scale_of(found.group_scales, g), format)


@pytest.mark.rule("GRP-6")
@pytest.mark.parametrize("format", [f for f in FORMATS_WITH_SCALES if not f.square], ids=lambda f: f.name)
def test_what_no_group_owns_is_zeros_quantised(format):
    x = cases.normal((ROWS, X), "float32", "stored")
    x[sum(SIZES) :] = np.nan
    sizes = np.array(SIZES, np.int32)
    zeros = stored(np.zeros_like(x), format, False, sizes), stored(np.zeros_like(x), format, True, sizes)
    rows = stored(x, format, False, sizes)
    tail = slice(sum(SIZES), None)
    asserts.zero(rows.values[tail], "codes")
    if rows.scales is not None and zeros[0].scales is not None:
        at = (slice(None), tail) if format.scales == "float32" else tail
        asserts.bitwise(rows.scales[at], zeros[0].scales[at])
        asserts.bitwise(np.unique(zeros[0].scales).size, 1)
    transposed = stored(x, format, True, sizes)
    axis = 1 if format.transposed else 0
    owned = np.zeros(transposed.values.shape[axis], bool)
    for _, _, r, segment in owners(format):
        owned[segment + r] = True
    asserts.zero(np.compress(~owned, transposed.values, axis), "padding")
    if transposed.scales is not None and zeros[1].scales is not None:
        blocks = owned.reshape(-1, format.block).any(axis=1)
        asserts.bitwise(transposed.scales[~blocks], zeros[1].scales[~blocks])


def test_a_rotated_form_holds_rotated_blocks():
    x = cases.normal((ROWS, X), "float32", "stored")
    format = FORMATS["nvfp4"].replace(rotate=True)
    found = stored(x, format, True, np.array(SIZES, np.int32))
    short = np.zeros((16, X), np.float32)  # the second block of the last group and one row of its third
    short[:1] = x[167:168]
    wanted = rounding.rotate(short.T).T
    first = 16 + 144 + 32
    for r, column in itertools.product(range(16), range(X)):
        group, scale = scale_of(found.group_scales, 3), scale_of(found.scales, first // 16, column)
        near(float(wanted[r, column]), code_at(found.values, first + r, column), scale, group, format)
