"""Which random bits round which element, in every frontend: stochastic rounding as docs/numerics.md defines it.

Expected codes are computed here, from the text of the document. Codes of gradients are seen in the gradients of x and
of the weight, which are products of them: where one code is its neighbour, these differ by far more than their error.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from grouped_core import arrays, rounding
from grouped_core.activations import Activation
from grouped_core.formats import Format, QTensor
from grouped_core.gradients import Needs
from grouped_core.mlp_spec import MlpNeeds
from grouped_core.recipes import NVFP4
from tests import cases
from tests.parity import adapters, mlp_adapters

Array = NDArray[Any]

KEY = (0x9E0A51C3, 0x2B7D40F6)
SIZES = np.array([19, 0, 5, 16], np.int32)
ROWS = 42  # the last two are of no group
WIDTH = 32
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)
DGRAD, WGRAD = NVFP4.dgrad, NVFP4.wgrad


def _randoms(rows: int, group: int, stream: int) -> Array:
    """omega of each element of a group, by its row within the group and its column."""
    row, column = np.indices((rows, WIDTH))
    counters = np.stack([column // 4, row, np.full_like(row, group), np.full_like(row, stream)], axis=-1)
    words = rounding.philox(counters, KEY[0] | KEY[1] << 32)  # checked against Random123 in tests/native/test_math.py
    word = np.take_along_axis(words, (column % 4)[..., None], axis=-1)[..., 0]
    return (word >> 8).astype(np.float32) * np.float32(2.0**-24)


def _rounded(y: Array, omega: Array) -> Array:
    """The neighbour of y on the grid, the upper one iff omega < (|y| - lo) / (hi - lo)."""
    size = np.minimum(np.abs(y), np.float32(6))
    at = np.minimum(np.searchsorted(GRID, size, side="right") - 1, len(GRID) - 2)
    lower, upper = GRID[at], GRID[at + 1]
    return np.copysign(np.where(omega < (size - lower) / (upper - lower), upper, lower), y)


def _rotated(rows: Array) -> Array:
    """H (signs v) / 4 of the 16 rows of each block of each column, in float32."""
    blocks, width = len(rows) // 16, rows.shape[1]
    v = rows.reshape(blocks, 16, width) * SIGNS[:, None]
    for stride in (1, 2, 4, 8):
        pairs = v.reshape(blocks, 8 // stride, 2, stride, width)
        v = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        v = v.reshape(blocks, 16, width)
    return (v * np.float32(0.25)).reshape(rows.shape)


class _Quantized(NamedTuple):
    """Values of a gradient [M, N] along its features, and of each group along its rows, rotated."""

    along_features: Array
    along_rows: list[Array]
    products: Array  # of codes and block scales, along features: the values but for the scale of the group
    group_scales: Array


def _quantized(rows: Array, call: int) -> _Quantized:
    """A gradient in both of its forms, `call` being its number: 0, of the hidden rows 1."""
    plain = replace(DGRAD[0], stochastic=False)
    scaled = arrays.quantize(rows, plain, axis=1, group_sizes=SIZES)
    columnwise = arrays.quantize(rows, replace(WGRAD[1], stochastic=False), axis=0, group_sizes=SIZES)
    blocks, factors = _scales(scaled)
    columns, other_factors = _scales(columnwise)
    products = np.zeros((ROWS, WIDTH), np.float32)
    found: list[Array] = []
    start = segment = 0
    for group, size in enumerate(SIZES):
        own = slice(start, start + size)
        scale = np.repeat(blocks[own], 16, axis=1)
        codes = _rounded(rows[own] * _encode(scale, factors[group]), _randoms(size, group, 2 * call))
        products[own] = codes * scale
        padded = np.zeros((-(-size // 16) * 16, WIDTH), np.float32)
        padded[:size] = rows[own]
        scale = np.repeat(columns[segment // 16 : (segment + len(padded)) // 16], 16, axis=0)
        encode = _encode(scale, other_factors[group])
        codes = _rounded(_rotated(padded) * encode, _randoms(len(padded), group, 2 * call + 1))
        found.append(codes * scale * other_factors[group])
        start, segment = start + size, segment + len(padded)
    of_rows = np.repeat(factors, SIZES)[:, None]
    values = products.copy()
    values[: len(of_rows)] *= of_rows
    return _Quantized(values, found, products, factors)


def _scales(q: QTensor[Array]) -> tuple[Array, Array]:
    return np.asarray(q.scales).astype(np.float32), np.asarray(q.group_scales)


def _encode(scale: Array, factor: Any) -> Array:
    with np.errstate(divide="ignore"):
        return np.minimum(np.float32(1) / (scale * factor), np.finfo(np.float32).max)


def _values(array: Array, format: Format, axis: int) -> Array:
    """The dequantised values of an operand that is not rounded randomly, in its logical shape."""
    if array.ndim == 3:
        return arrays.dequantize(arrays.quantize(array, format, axis=axis), "float32")
    return arrays.dequantize(arrays.quantize(array, format, axis=axis, group_sizes=SIZES), "float32")


def _rows_along_rows(x: Array) -> list[Array]:
    """x [M, K] as the weight gradient reads it, by group: rotated."""
    q = arrays.quantize(x, WGRAD[0], axis=0, group_sizes=SIZES)
    scales, factors = _scales(q)
    codes = rounding.decode(rounding.unpack(q.values, WIDTH), "float4_e2m1fn")
    values, found, segment = codes * np.repeat(scales, 16, axis=0), [], 0
    for size, factor in zip(SIZES, factors, strict=True):
        end = segment + -(-int(size) // 16) * 16
        found.append(values[segment:end] * factor)
        segment = end
    return found


def _near(found: Any, lhs: list[Array], rhs: list[Array], what: str) -> None:
    """Each member of `found` is the product of those of lhs and rhs, except for the roundings of float32."""
    for group, (got, a, b) in enumerate(zip(found, lhs, rhs, strict=True)):
        wide, size = a.astype(np.float64) @ b, np.abs(a).astype(np.float64) @ np.abs(b)
        assert (np.abs(got - wide) <= 1e-5 * size).all(), f"{what} of group {group}"


def _split(rows: Array) -> list[Array]:
    return np.split(rows[: SIZES.sum()], np.cumsum(SIZES)[:-1])


@pytest.mark.rule("MLP-10", "ALL-1")
@pytest.mark.parametrize("frontend", adapters.FRONTENDS, ids=str)
def test_a_gradient_is_rounded_with_the_bits_of_its_form(frontend: adapters.Frontend) -> None:
    x, dy = (cases.normal((ROWS, WIDTH), "float32", name) for name in ("x", "dy"))
    w = cases.normal((len(SIZES), WIDTH, WIDTH), "float32", "w")
    given = {"x": x, "w": w, "group_sizes": SIZES, "bias": None, "row_scale": None}
    recipe = NVFP4.bind(key=np.array(KEY, np.uint32))
    found: Any = frontend.gradients(given, dy, Needs(True, True, False, False), transposed=False, recipe=recipe)
    wanted = _quantized(dy, 0)
    weight = _values(w, DGRAD[1], 2)
    _near(_split(found.x), _split(wanted.along_features), list(weight.swapaxes(1, 2)), "dx")
    _near(found.w, [rows.T for rows in _rows_along_rows(x)], wanted.along_rows, "dW")


@pytest.mark.rule("MLP-10", "ALL-1")
@pytest.mark.parametrize("implementation", [None, "composed"])
@pytest.mark.parametrize("frontend", [mlp_adapters.ARRAYS, mlp_adapters.JAX, mlp_adapters.TORCH], ids=str)
def test_gradients_of_an_mlp_are_rounded_with_bits_of_their_own(
    frontend: mlp_adapters.MlpFrontend, implementation: str | None
) -> None:
    """The second weight is the unit matrix and all hidden rows are positive, so that dh is the dequantised dy."""
    x, dy = (cases.normal((ROWS, WIDTH), "float32", name) for name in ("x", "dy"))
    x, wi = np.abs(x) + np.float32(0.25), np.abs(cases.normal((len(SIZES), WIDTH, WIDTH), "float32", "wi"))
    wo = np.tile(np.eye(WIDTH, dtype=np.float32), (len(SIZES), 1, 1))
    given = {"x": x, "wi": wi, "wo": wo, "group_sizes": SIZES, "probs": None, "wi_bias": None, "wo_bias": None}
    options = {"recipe": NVFP4.bind(key=np.array(KEY, np.uint32)), "implementation": implementation}
    needs = MlpNeeds(True, True, True, False, False, False)
    found: Any = frontend.gradients(given, dy, needs, activation=Activation("relu"), **options)

    of_dy, unit = _quantized(dy, 0), arrays.quantize(wo, DGRAD[1], axis=2)
    scales = of_dy.group_scales * np.asarray(unit.group_scales)
    dh = np.zeros_like(dy)
    dh[: SIZES.sum()] = of_dy.products[: SIZES.sum()] * (2688 * np.repeat(scales, SIZES)[:, None])
    of_dh = _quantized(dh, 1)
    weight = _values(wi, DGRAD[1], 2)
    _near(_split(found.x), _split(of_dh.along_features), list(weight.swapaxes(1, 2)), "dx")
    _near(found.wi, [rows.T for rows in _rows_along_rows(x)], of_dh.along_rows, "dW1")
    z = arrays.grouped_linear(x, wi, SIZES, recipe=NVFP4)
    _near(found.wo, [rows.T for rows in _rows_along_rows(z)], of_dy.along_rows, "dW2")
