"""Operands of native products, plain or quantised, by the name of their format."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from grouped_core.calls import OperandSpec, QuantizedSpec, spec_of
from grouped_core.formats import FORMATS, QTensor
from tests import cases
from tests.quantized import drawn

Operand = NDArray[Any] | QTensor[NDArray[Any]]


def operand(name: str, shape: tuple[int, ...], axis: int, sizes: NDArray[Any], *seed: object) -> Operand:
    """An array quantised in the format `name`; plain rows hold NaN past the groups."""
    format = FORMATS[name]
    if not format.plain:
        return drawn(format, shape, axis, sizes, "bfloat16", *seed)
    array = cases.normal(shape, format.values, *seed)
    if len(shape) == 2:
        array[int(np.clip(np.cumsum(np.maximum(sizes.astype(np.int64), 0)), 0, shape[0])[-1]) :] = cases.TAIL
    return array


def spec(held: Operand) -> OperandSpec:
    if not isinstance(held, QTensor):
        return spec_of(held)
    arrays = [None if a is None else spec_of(a) for a in held.slots]
    values, scales, factors = arrays
    assert values is not None
    return QuantizedSpec(values, scales, factors, held.format, held.axis, held.shape, held.dtype)


def sizes_of(case: cases.Case) -> NDArray[np.int32]:
    return np.array(case.sizes, np.int32)
