"""Numeric formats, a row each: how the values of one operand of a product are stored.

Kernels are never told a format's name, only the element types, blocks and rule numbers that a row holds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """One storage format of an operand (numerics 2.5).

    A plain format holds the values themselves. Scaled formats, with blocks and scale rules, are further rows.
    """

    name: str  # the public name, e.g. "bf16"
    values: str  # element type, as NumPy and ml_dtypes spell it


PLAIN = {
    row.values: row
    for row in (
        Format("fp32", "float32"),
        Format("bf16", "bfloat16"),
        Format("fp16", "float16"),
        Format("e4m3fn", "float8_e4m3fn"),
        Format("e5m2", "float8_e5m2"),
    )
}
"""Plain formats by element type."""

WIDE = ("float32", "bfloat16", "float16")
"""Element types that results, biases and accumulators may have."""
