"""Casts to narrow types, scale rules, rotation and random bits in NumPy: the arithmetic whose bits are guaranteed.

It is written from the text of docs/numerics.md, not from cc/math. A cast to codes searches the table of decoded values,
in float64, where both are exact; scale rules are single float32 operations in the order of the text. Arrays may have
any shape; element types have their ml_dtypes names; float4_e2m1fn has one code per byte until `pack`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]

FLOAT_MAX = np.finfo(np.float32).max
BF16_MAX = np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
_INFINITY = 0x7F800000


@dataclass(frozen=True)
class Narrow:
    """One narrow element type (numerics 2.1)."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    nan_code: int  # the code of NaN
    infinity_code: int | None = None
    first_nan: int | None = None  # codes from here on, the sign aside, are NaN

    @property
    def sign_bit(self) -> int:
        """The value of the sign bit, which is also the number of codes without it."""
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @cached_property
    def magnitudes(self) -> NDArray[np.float64]:
        """Value of every code without its sign, exact."""
        code = np.arange(self.sign_bit)
        exponent, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        fraction = mantissa / (1 << self.mantissa_bits) + (exponent > 0)
        values = np.ldexp(fraction, np.maximum(exponent, 1) - self.bias)
        if self.infinity_code is not None:
            values[self.infinity_code] = np.inf
        if self.first_nan is not None:
            values[self.first_nan :] = np.nan
        return values

    @cached_property
    def middles(self) -> NDArray[np.float64]:
        """Between each finite magnitude and the next, exact."""
        values = self.magnitudes[: self.max_code + 1]
        return (values[1:] + values[:-1]) / 2

    @cached_property
    def values(self) -> Floats:
        """Value of every code of eight bits, those above the sign wrapped around; NaN is the positive quiet NaN."""
        code = np.arange(256)
        magnitude = self.magnitudes[code & (self.sign_bit - 1)]
        value = np.where(code & self.sign_bit, -magnitude, magnitude)
        return np.where(np.isnan(value), np.nan, value).astype(np.float32)

    @property
    def max(self) -> np.float32:
        """The largest finite value."""
        return np.float32(self.magnitudes[self.max_code])


TYPES = {
    "float8_e4m3fn": Narrow(4, 3, 7, max_code=0x7E, nan_code=0x7F, first_nan=0x7F),
    "float8_e5m2": Narrow(5, 2, 15, max_code=0x7B, nan_code=0x7F, infinity_code=0x7C, first_nan=0x7D),
    "float4_e2m1fn": Narrow(2, 1, 1, max_code=0x7, nan_code=0x7),
}


def _floats(x: ArrayLike) -> Floats:
    return np.asarray(x, np.float32)


def _bits(x: Floats) -> NDArray[np.uint32]:
    return np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)


def _from_bits(bits: NDArray[Any]) -> Floats:
    return np.ascontiguousarray(bits, np.uint32).view(np.float32).reshape(bits.shape)


def _widened(x: Floats) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # of signalling NaN
        return x.astype(np.float64)


# --- casts ---


def encode(x: ArrayLike, dtype: str) -> Codes:
    """Codes of the nearest values, ties to even; out-of-range values saturate, NaN becomes the type's NaN code."""
    y, kind = _floats(x), TYPES[dtype]
    magnitude = np.abs(_widened(y))
    code = np.searchsorted(kind.middles, magnitude)  # a tie gives the lower neighbour
    tie = kind.middles[np.minimum(code, kind.middles.size - 1)] == magnitude
    code = code + (tie & (code % 2 == 1))
    code = np.where(np.signbit(y), code + kind.sign_bit, code)
    return np.where(np.isnan(y), kind.nan_code, code).astype(np.uint8)


def decode(codes: ArrayLike, dtype: str) -> Floats:
    """Exact values of codes; NaN is the positive quiet NaN."""
    return TYPES[dtype].values[np.asarray(codes, np.uint8)]


def encode_stochastic(x: ArrayLike, random: ArrayLike) -> Codes:
    """Codes of float4_e2m1fn, rounded stochastically; `random` holds 32 random bits per element.

    The neighbour away from zero is taken if the upper 24 bits, as a fraction, are below the relative distance from the
    other neighbour.
    """
    y, kind = _floats(x), TYPES["float4_e2m1fn"]
    omega = (np.asarray(random, np.uint32) >> np.uint32(8)) / 2.0**24
    magnitude = np.minimum(np.abs(_widened(y)), np.float64(kind.max))
    number = np.where(np.isnan(y), 0.0, magnitude)
    low = np.searchsorted(kind.magnitudes, number, side="right") - 1
    high = np.minimum(low + 1, kind.max_code)
    distance = np.where(high > low, kind.magnitudes[high] - kind.magnitudes[low], 1.0)
    code = np.where(omega < (number - kind.magnitudes[low]) / distance, high, low)
    code = np.where(np.signbit(y), code + kind.sign_bit, code)
    return np.where(np.isnan(y), kind.nan_code, code).astype(np.uint8)


def pack(codes: Codes) -> Codes:
    """[..., C] codes -> [..., ceil(C / 2)] bytes: an even index in the low nibble, an odd end filled with 0."""
    even, odd = codes[..., ::2], codes[..., 1::2]
    high = np.zeros_like(even)
    high[..., : odd.shape[-1]] = odd
    return ((even & 0xF) | (high << 4)).astype(np.uint8)


def unpack(packed: Codes, columns: int) -> Codes:
    """[..., ceil(columns / 2)] bytes -> [..., columns] codes."""
    both = np.stack([packed & 0xF, packed >> 4], axis=-1).astype(np.uint8)
    return both.reshape(*packed.shape[:-1], 2 * packed.shape[-1])[..., :columns]


# --- scales ---


def amax(x: ArrayLike, axis: int | tuple[int, ...] | None = None) -> Floats:
    """Integer maximum of the bits of |x|: Inf exceeds all numbers, NaN exceeds Inf, an empty set gives 0."""
    magnitude = _bits(_floats(x)) & np.uint32(0x7FFFFFFF)
    return _from_bits(np.asarray(np.max(magnitude, axis=axis, initial=np.uint32(0))))


def fp32_scale(
    amax: ArrayLike, dtype: str, *, eps: float = 0.0, power_of_two: bool = False, overflow: np.float32 = FLOAT_MAX
) -> Floats:
    """Rule 2.2: the scale that multiplies before the cast; it is `overflow` where max / amax is infinite."""
    a = _floats(amax)
    with np.errstate(all="ignore"):
        a = np.where(a < np.float32(eps), np.float32(eps), a)
        e = TYPES[dtype].max / a
    e = np.where(np.isinf(e), overflow, e)
    if power_of_two:
        e = _from_bits(_bits(e) & np.uint32(0xFF800000))
    return np.where((a == 0) | ~np.isfinite(a), np.float32(1), e)


def scale_inv(e: ArrayLike) -> Floats:
    """The scale_inv of a quantisation scale, which is stored: one division."""
    with np.errstate(all="ignore"):
        return np.float32(1) / _floats(e)


def e8m0_code(amax: ArrayLike, dtype: str) -> Codes:
    """Rule 2.3: the code of the scale_inv of a block, rounded up."""
    with np.errstate(all="ignore"):
        v = _floats(amax) * (np.float32(1) / TYPES[dtype].max)
    exponent, mantissa = _bits(v) >> np.uint32(23), _bits(v) & np.uint32(0x7FFFFF)
    code = exponent + (mantissa != 0)
    code = np.where((exponent == 254) | ((exponent == 0) & (mantissa <= 0x400000)), exponent, code)
    return np.where(np.isnan(v), 255, np.where(np.isinf(v), 254, code)).astype(np.uint8)


def decode_e8m0(code: ArrayLike) -> Floats:
    """2^(code - 127), exact; 255 is NaN."""
    c = np.asarray(code, np.int64)
    return np.where(c == 255, np.nan, np.ldexp(1.0, c - 127)).astype(np.float32)


def e8m0_scale(code: ArrayLike) -> Floats:
    """2^(127 - code), exact; 255 is NaN."""
    c = np.asarray(code, np.int64)
    return np.where(c == 255, np.nan, np.ldexp(1.0, 127 - c)).astype(np.float32)


NVFP4_RANGE = 2688.0
"""448 * 6: the value that the amax of a group is scaled to."""
FOUR_OVER_SIX_RANGE = 1536.0
"""256 * 6: the same with 4over6, so that block scales may be 1.5 times as large."""


def nvfp4_group_scale(amax: ArrayLike, value_range: float = NVFP4_RANGE) -> Floats:
    """e_g, the quantisation scale of a group; the quantised array holds its `scale_inv`."""
    a = _floats(amax)
    with np.errstate(all="ignore"):
        e = np.minimum(np.float32(value_range) / a, FLOAT_MAX)
    return np.where((a == 0) | ~np.isfinite(a), np.float32(1), e)


def nvfp4_block_scale_inv(amax: ArrayLike, group_scale: ArrayLike, stretch: float = 1.0) -> Codes:
    """s_b as codes of float8_e4m3fn; `stretch` 1.5 is the second candidate of 4over6."""
    with np.errstate(all="ignore"):
        b = _floats(amax) * (_floats(group_scale) * (np.float32(1) / np.float32(6)))
        return encode(np.float32(stretch) * b, "float8_e4m3fn")


def nvfp4_block_scale(block_scale_inv: ArrayLike, group_scale_inv: ArrayLike) -> Floats:
    """e_b of the code s_b under the scale_inv d_g of the group; NaN stays NaN."""
    with np.errstate(all="ignore"):
        e = np.float32(1) / (decode(block_scale_inv, "float8_e4m3fn") * _floats(group_scale_inv))
    return np.minimum(e, FLOAT_MAX)  # numpy's minimum keeps NaN


def nvfp4_values(codes: ArrayLike, block_scale_inv: ArrayLike, group_scale_inv: ArrayLike) -> Floats:
    """(q s_b) d_g; the first product is exact."""
    with np.errstate(all="ignore"):
        return decode(codes, "float4_e2m1fn") * decode(block_scale_inv, "float8_e4m3fn") * _floats(group_scale_inv)


def nvfp4_row_errors(
    x: Floats, block_scale_inv: ArrayLike, group_scale_inv: ArrayLike, squares: bool = False
) -> Floats:
    """4over6: [..., C] values of one row of a block -> [...], the cost of a scale, summed left to right."""
    s, d = np.asarray(block_scale_inv)[..., None], _floats(group_scale_inv)[..., None]
    with np.errstate(all="ignore"):
        codes = encode(x * nvfp4_block_scale(s, d), "float4_e2m1fn")
        error = nvfp4_values(codes, s, d) - x
        cost = error * error if squares else np.abs(error)
        total = np.zeros(x.shape[:-1], np.float32)
        for column in range(x.shape[-1]):
            total = _floats(total + cost[..., column])
    return total


def nvfp4_block_errors(rows: Floats) -> Floats:
    """[..., 16] costs of rows -> [...], the cost of the 2-D block: pairs at distance 8, 4, 2, 1."""
    with np.errstate(all="ignore"):
        for distance in (8, 4, 2, 1):
            rows = _floats(rows[..., :distance] + rows[..., distance : 2 * distance])
    return rows[..., 0]


def delayed_update(
    history: Floats, scale: Floats, fp8_max: ArrayLike, *, most_recent: bool = False
) -> tuple[Floats, Floats]:
    """(history, scale) after a step of delayed scaling: history [L, ...], slot 0 is the current step; scale [...].

    Args:
        fp8_max: the value that the amax is scaled to: the largest value of the type * 2^-margin.
    """
    newest = history[0]
    keep = (newest == 0) | ~np.isfinite(newest)
    peak = newest if most_recent else amax(history, axis=0)
    with np.errstate(all="ignore"):
        fresh = np.minimum(_floats(fp8_max) / peak, FLOAT_MAX)
    still, rolled = history.copy(), np.roll(history, -1, axis=0)
    rolled[-1] = newest
    still[0] = rolled[0] = 0
    return np.where(keep, still, rolled), np.where(keep, scale, fresh)


# --- rotation and random bits ---

SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)


def rotate(v: ArrayLike) -> Floats:
    """[..., 16]: the 16-point Hadamard transform of SIGNS * v, a quarter of it, in the fixed order of numerics 2.5."""
    with np.errstate(all="ignore"):
        x = _floats(v) * SIGNS
        for stride in (1, 2, 4, 8):
            pairs = x.reshape(*x.shape[:-1], 8 // stride, 2, stride)
            a, b = pairs[..., 0, :], pairs[..., 1, :]
            x = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
        return _floats(x * np.float32(0.25))


def philox(counter: ArrayLike, key: int) -> NDArray[np.uint32]:
    """Philox4x32-10: [..., 4] words of a counter -> [..., 4] random words; `key` has 64 bits."""
    low = np.uint64(0xFFFFFFFF)
    c = [np.asarray(counter, np.uint64)[..., i] for i in range(4)]
    keys = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (second >> np.uint64(32)) ^ c[1] ^ np.uint64(keys[0]),
            second & low,
            (first >> np.uint64(32)) ^ c[3] ^ np.uint64(keys[1]),
            first & low,
        ]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(c, axis=-1).astype(np.uint32)


def random_words(key: int, rows: int, columns: int, group: int, stream: int) -> NDArray[np.uint32]:
    """[rows, columns]: the random bits of every element of a group; rows are counted from the start of the group.

    Args:
        stream: 0 for the form contracted along columns, 1 for the form along rows, plus twice the number of the call.
    """
    quads = -(-columns // 4)
    counter = np.zeros((rows, quads, 4), np.uint64)
    counter[..., 0] = np.arange(quads)
    counter[..., 1] = np.arange(rows)[:, None]
    counter[..., 2], counter[..., 3] = group, stream
    return philox(counter, key).reshape(rows, 4 * quads)[:, :columns]
