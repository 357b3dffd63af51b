"""`precision=`, as in the products of `jax.lax`, converted to a mode of float32 operands."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from jax.lax import DotAlgorithm, DotAlgorithmPreset, Precision

from grouped_core.recipes import FP32_MODES

_MODES: Mapping[Precision | str, str] = MappingProxyType(
    {
        Precision.HIGHEST: "ieee",
        DotAlgorithmPreset.F32_F32_F32.name: "ieee",
        DotAlgorithmPreset.TF32_TF32_F32_X3.name: "tf32x3",
        DotAlgorithmPreset.BF16_BF16_F32_X3.name: "tf32x3",
        DotAlgorithmPreset.BF16_BF16_F32_X6.name: "tf32x3",
        DotAlgorithmPreset.BF16_BF16_F32_X9.name: "tf32x3",
    }
)
"""The least accurate mode that meets a precision or an algorithm, by its name; "tf32" meets those not listed."""


def fp32_mode(precision: Any) -> str | None:
    """The least accurate of `FP32_MODES` that meets `precision`; None for None, which requires nothing.

    Raises:
        ValueError: `precision` is not a precision, or is above float32.
    """
    if precision is None:
        return None
    if isinstance(precision, DotAlgorithm):
        return _mode_of_types(precision)
    preset = DotAlgorithmPreset.__members__.get(precision) if isinstance(precision, str) else precision
    if isinstance(preset, DotAlgorithmPreset):
        if preset is DotAlgorithmPreset.F64_F64_F64:
            raise _above_float32(precision)
        return _MODES.get(preset.name, "tf32")
    pair = precision if isinstance(precision, (tuple, list)) and len(precision) == 2 else (precision, precision)
    return max((_MODES.get(_precision(each, precision), "tf32") for each in pair), key=FP32_MODES.index)


def _mode_of_types(algorithm: DotAlgorithm) -> str:
    try:
        *operands, sums = (np.dtype(each).name for each in algorithm[:3])
    except TypeError:
        raise _no_precision(algorithm) from None
    if "float64" in (*operands, sums):
        raise _above_float32(algorithm)
    if "float32" in operands:
        return "ieee"
    return "tf32x3" if algorithm.num_primitive_operations > 1 else "tf32"


def _precision(value: Any, whole: Any) -> Precision:
    if isinstance(value, Precision):
        return value
    if isinstance(value, str):
        try:
            return Precision(value)  # accepts aliases too, as jax.lax does
        except ValueError:
            pass
    raise _no_precision(whole)


def _no_precision(precision: Any) -> ValueError:
    return ValueError(
        f"`precision`: {precision!r}, expected None, a jax.lax.Precision, a DotAlgorithm or DotAlgorithmPreset, the "
        "name of one, or a pair of precisions; pass one of these, e.g. 'highest'."
    )


def _above_float32(precision: Any) -> ValueError:
    return ValueError(
        f"`precision`: {precision!r}, expected at most float32, the dtype of all sums; pass 'highest', or use "
        "jax.lax.ragged_dot for float64."
    )
