"""Recipes that quantise, and quantised operands drawn at random.

Operands have every finite code, scales as for normal values, and NaN where nothing is read. No quantiser made them, so
a product is tested on codes that quantising normal values would hardly give.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from grouped_core.calls import spec_in_format
from grouped_core.formats import Format, QTensor
from grouped_core.recipes import RECIPES, Recipe
from grouped_core.reference import group_ends, segment_sizes
from tests import cases

QUANTIZING = tuple(recipe for recipe in RECIPES.values() if recipe.quantized)
"""The recipes with which every operation and layer is tested: each has a row in `bounds.RELATIVE_ERRORS`."""


def with_e4m3_gradients(delayed: Recipe) -> Recipe:
    """Delayed scaling with other formats and another margin, so that its amaxes are scaled to other values."""
    return delayed.replace(
        name=f"{delayed.name}, E4M3 gradients",
        margin=2,
        dgrad=(delayed.forward[0], delayed.dgrad[1]),
        wgrad=(delayed.wgrad[0], delayed.forward[0]),
    )


_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "uint8": 6.0}
_MAGNITUDES = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C}  # finite ones come first
_NAN = 0xFF  # as a code of any 8-bit type, and as bytes of float32


def _codes(rng: np.random.Generator, format: Format, shape: tuple[int, ...]) -> NDArray[Any]:
    """Bytes of a whole array: any two codes where the type has four bits, else any finite one."""
    codes = rng.integers(0, 256, shape, np.uint8)
    if format.values == "uint8":
        return codes
    codes[(codes & 0x7F) >= _MAGNITUDES[format.values]] ^= 0x40
    return codes.view(cases.numpy_dtype(format.values))


def _scales(rng: np.random.Generator, dtype: str, largest: float, shape: tuple[int, ...]) -> NDArray[Any]:
    """Such that the largest value is 1 to 8."""
    wanted = np.exp2(rng.uniform(0, 3, shape)) / largest
    if dtype == "float8_e4m3fn":  # beside a group scale, which undoes the factor
        wanted = wanted * 448.0
    if dtype == "float8_e8m0fnu":
        return (np.round(np.log2(wanted)) + 127).astype(np.uint8).view(cases.numpy_dtype(dtype))
    return wanted.astype(cases.numpy_dtype(dtype))


def _poison(array: NDArray[Any], at: Any) -> None:
    array.view(f"u{array.itemsize}")[at] = np.iinfo(f"u{array.itemsize}").max


def drawn(
    format: Format, shape: tuple[int, ...], axis: int, group_sizes: NDArray[Any], dtype: str, *seed: object
) -> QTensor[NDArray[Any]]:
    """An array of `shape`, rows [M, X] or weights [G, A, B], stored for a product that contracts `axis`.

    Codes and scales of rows past the groups, and of padded rows past the last segment, are NaN where the type has one.
    Rows that fill up a segment are zero codes, or any where a format may have rotated them.
    """
    rng = cases.generator("stored", format.name, shape, axis, *seed)
    spec = spec_in_format(format, shape, axis, dtype, len(group_sizes))
    largest = _LARGEST[format.values]
    values = _codes(rng, format, spec.values.shape)
    depth = shape[axis]
    if format.values == "uint8" and axis != 0 and depth % 2:
        values[..., -1] &= 0xF  # the code behind the last is 0
    scales = None if spec.scales is None else _scales(rng, spec.scales.dtype, largest, spec.scales.shape)
    factors = None
    if spec.group_scales is not None:
        top = 448.0 if format.rule == "nvfp4" else largest
        factors = (rng.uniform(0.5, 2, spec.group_scales.shape) / top).astype(np.float32)
    if len(shape) == 2 and axis == 1:
        end = int(group_ends(group_sizes, shape[0])[-1])
        _poison(values, slice(end, None))
        if scales is not None:
            _poison(scales, (slice(None), slice(end, None)) if scales.dtype == np.float32 else slice(end, None))
    elif len(shape) == 2:
        sizes = segment_sizes(group_sizes, shape[0], format.segment)
        end = int(sizes.sum())
        rows = values.T if format.transposed else values
        _poison(rows, slice(end, None)) if not format.transposed else _poison(values, (slice(None), slice(end, None)))
        if scales is not None:
            _poison(scales, slice(end // format.block, None))
        if format.rule != "nvfp4":
            _fill(values, format, group_sizes, shape[0])
    return QTensor(values, scales, factors, format, axis, shape, dtype)


def _fill(values: NDArray[Any], format: Format, group_sizes: NDArray[Any], rows: int) -> None:
    """Zeros between a group's last row and the end of its segment."""
    padded = values.T if format.transposed else values
    sizes = np.diff(group_ends(group_sizes, rows), prepend=0)
    start = 0
    for size, taken in zip(sizes, segment_sizes(group_sizes, rows, format.segment), strict=True):
        padded[start + size : start + taken] = 0
        start += int(taken)
