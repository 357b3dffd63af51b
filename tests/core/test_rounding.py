"""Casts and scale rules against their meaning; what docs/numerics.md says of all codes, by looking at all codes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from grouped_core import rounding
from grouped_core.rounding import TYPES
from tests import asserts, cases

FP8 = ("float8_e4m3fn", "float8_e5m2")
CODES = np.arange(256, dtype=np.uint8)
BF16_TRICKS = {  # bits of the bf16 that represents a code, and the factor that makes it the code's value
    "float8_e4m3fn": ((CODES & 0x80).astype(np.uint16) << 8 | (CODES & 0x7F).astype(np.uint16) << 4, 2.0**120),
    "float8_e5m2": ((CODES & 0x80).astype(np.uint16) << 8 | (CODES & 0x7F).astype(np.uint16) << 5, 2.0**112),
    "float4_e2m1fn": ((CODES & 8).astype(np.uint16) << 12 | (CODES & 7).astype(np.uint16) << 6, 2.0**126),
}


def finite(dtype: str) -> np.ndarray:
    """Every finite value of a narrow type."""
    codes = CODES[: 2 * TYPES[dtype].sign_bit]
    values = rounding.decode(codes, dtype).astype(np.float64)
    return values[np.isfinite(values)]


def is_exact(values: np.ndarray, dtype: str) -> bool:
    """Whether `dtype` has all of these float64 values."""
    with np.errstate(over="ignore"):
        return bool((values.astype(cases.numpy_dtype(dtype)).astype(np.float64) == values).all())


def is_normal(values: np.ndarray, dtype: str) -> bool:
    smallest = float(ml_dtypes.finfo(cases.numpy_dtype(dtype)).smallest_normal)
    return bool((np.abs(values[values != 0]) >= smallest).all())


def inputs() -> np.ndarray:
    codes = np.arange(1 << 16, dtype=np.uint16)
    return np.concatenate([codes.view(cases.numpy_dtype(n)).astype(np.float32) for n in ("bfloat16", "float16")])


def normal_amaxes() -> np.ndarray:
    """Every positive normal bf16."""
    return np.arange(0x0080, 0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)


# --- casts (numerics 2.1) ---


@pytest.mark.parametrize(
    ("dtype", "largest", "least_normal", "least"),
    [("float8_e4m3fn", 448, 2**-6, 2**-9), ("float8_e5m2", 57344, 2**-14, 2**-16), ("float4_e2m1fn", 6, 1, 0.5)],
)
def test_the_table_of_types(dtype, largest, least_normal, least):
    kind, values = TYPES[dtype], finite(dtype)
    assert float(kind.max) == largest == values.max()
    assert values[values > 0].min() == least
    assert kind.magnitudes[1 << kind.mantissa_bits] == least_normal


@pytest.mark.parametrize("dtype", TYPES)
def test_values_are_those_of_ml_dtypes(dtype):
    codes = CODES[: 2 * TYPES[dtype].sign_bit]
    theirs = codes.view(cases.numpy_dtype(dtype)).astype(np.float32)
    asserts.bitwise(np.nan_to_num(rounding.decode(codes, dtype)), np.nan_to_num(theirs))
    asserts.bitwise(np.isnan(rounding.decode(codes, dtype)), np.isnan(theirs))


@pytest.mark.parametrize("dtype", TYPES)
def test_casts_are_those_of_ml_dtypes_where_it_saturates_and_has_a_nan(dtype):
    kind, x = TYPES[dtype], inputs()
    with np.errstate(invalid="ignore"):
        clipped = np.clip(x, -kind.max, kind.max)
        theirs = clipped.astype(cases.numpy_dtype(dtype)).view(np.uint8)
        theirs = np.where(np.isnan(x), kind.nan_code, theirs).astype(np.uint8)
    asserts.bitwise(rounding.encode(x, dtype), theirs)


def test_decision_points_of_e2m1():
    points = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    asserts.bitwise(rounding.encode(points, "float4_e2m1fn"), rounding.encode([0, 1, 1, 2, 2, 4, 4], "float4_e2m1fn"))
    above = np.nextafter(points, np.float32(np.inf))
    asserts.bitwise(rounding.encode(above, "float4_e2m1fn"), np.arange(1, 8, dtype=np.uint8))


@pytest.mark.parametrize("dtype", TYPES)
def test_special_values(dtype):
    kind = TYPES[dtype]
    sign = kind.sign_bit
    x = np.array([np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0, 2.0**-149, -(2.0**-149)], np.float32)
    wanted = [kind.max_code, kind.max_code | sign, kind.nan_code, kind.nan_code, 0, sign, 0, sign]
    asserts.bitwise(rounding.encode(x, dtype), np.array(wanted, np.uint8))


def test_stochastic_rounding_is_unbiased_and_keeps_the_grid():
    grid = rounding.decode(CODES[:16], "float4_e2m1fn")
    for random in (0, 0xFFFFFFFF):
        asserts.bitwise(rounding.encode_stochastic(grid, np.full(16, random, np.uint32)), CODES[:16])
    rng = np.random.default_rng(0)
    x = np.round(rng.uniform(-6, 6, 300) * 64 + 0.5).astype(np.float32) / 64 + np.float32(2**-7)  # none on the grid
    random = rng.integers(0, 1 << 32, (4000, 300), dtype=np.uint32)
    values = rounding.decode(rounding.encode_stochastic(np.broadcast_to(x, random.shape), random), "float4_e2m1fn")
    error = values.mean(0, dtype=np.float64) - x
    below, above = np.min(values, axis=0), np.max(values, axis=0)
    standard = np.sqrt((above - x.astype(np.float64)) * (x - below) / len(values))
    assert (standard > 0).all()
    assert (np.abs(error) <= 5 * standard).all()  # numerics 7: within 5 standard errors
    nearest = rounding.decode(rounding.encode(x, "float4_e2m1fn"), "float4_e2m1fn")
    mean_of_50 = values[:50].mean(0, dtype=np.float64)
    assert np.sqrt(np.mean((mean_of_50 - x) ** 2)) < np.sqrt(np.mean((nearest - x) ** 2))


# --- scales (numerics 2.2, 2.3, 2.5) ---


@pytest.mark.parametrize("dtype", FP8)
def test_powers_of_two_never_overflow(dtype):
    a = np.concatenate([normal_amaxes(), np.nextafter(normal_amaxes(), np.float32(0))])
    e = rounding.fp32_scale(a, dtype, power_of_two=True, overflow=rounding.BF16_MAX)
    assert (a.astype(np.float64) * e <= float(TYPES[dtype].max)).all()
    assert (np.frexp(e)[0] == 0.5).all()


@pytest.mark.parametrize("dtype", FP8)
def test_powers_of_two_and_e8m0_agree_for_normal_bf16(dtype):
    a = normal_amaxes()
    fp32 = rounding.scale_inv(rounding.fp32_scale(a, dtype, power_of_two=True, overflow=rounding.BF16_MAX))
    asserts.bitwise(fp32, rounding.decode_e8m0(rounding.e8m0_code(a, dtype)))


@pytest.mark.parametrize("dtype", TYPES)
def test_e8m0_is_the_logarithm_rounded_up(dtype):
    largest = float(TYPES[dtype].max)
    a = np.concatenate([normal_amaxes(), np.ldexp(largest, np.arange(-127, 112)).astype(np.float32)])
    a = np.concatenate([a, np.nextafter(a, np.float32(np.inf)), np.nextafter(a, np.float32(0))])
    a = a[np.isfinite(a)]
    ratio = a.astype(np.float64) / largest
    mantissa, exponent = np.frexp(ratio)
    wanted = np.clip(exponent - (mantissa == 0.5) + 127, 0, 254)
    code = rounding.e8m0_code(a, dtype)
    differs = a[code != wanted]
    assert (differs == np.nextafter(np.float32(largest * 2.0**-127), np.float32(np.inf))).all()
    scaled = a.astype(np.float64) * rounding.e8m0_scale(code).astype(np.float64)
    assert (scaled[~np.isin(a, differs)] <= largest).all()


def test_edges_of_e8m0():
    a = np.array([0, np.inf, np.nan, 2.0**-149, rounding.FLOAT_MAX], np.float32)
    asserts.bitwise(rounding.e8m0_code(a, "float8_e4m3fn"), np.array([0, 254, 255, 0, 247], np.uint8)[: a.size])
    code = np.arange(1, 255)
    with np.errstate(over="ignore"):
        assert (rounding.decode_e8m0(code) * rounding.e8m0_scale(code) == 1).all()


def test_scales_without_an_amax():
    nothing = np.array([0, np.nan, np.inf], np.float32)
    for dtype in FP8:
        asserts.filled(rounding.fp32_scale(nothing, dtype), 1)
    asserts.filled(rounding.nvfp4_group_scale(nothing), 1)
    floor = rounding.fp32_scale(np.zeros(1, np.float32), "float8_e4m3fn", eps=1e-3)
    asserts.bitwise(floor, np.float32(448) / np.array([1e-3], np.float32))
    asserts.bitwise(
        rounding.nvfp4_block_scale_inv(nothing, np.ones(3, np.float32)), np.array([0, 0x7F, 0x7E], np.uint8)
    )
    asserts.filled(rounding.fp32_scale([2.0**-149], "float8_e4m3fn"), float(rounding.FLOAT_MAX))


def test_a_block_of_nan_has_no_other_values():
    d = np.ones(1, np.float32)
    e = rounding.nvfp4_block_scale(np.array([0x7F], np.uint8), d)
    codes = rounding.encode(np.ones(16, np.float32) * e, "float4_e2m1fn")
    asserts.bitwise(codes, np.full(16, 7, np.uint8))
    assert np.isnan(rounding.nvfp4_values(codes, 0x7F, d)).all()


@pytest.mark.parametrize("most_recent", [False, True])
def test_an_amax_counts_in_as_many_updates_as_history_has_slots(most_recent):
    length = 4
    history, scale = np.zeros((length, 1), np.float32), np.ones(1, np.float32)
    seen = []
    for step in range(length + 2):
        history[0] = 100 if step == 0 else 1
        history, scale = rounding.delayed_update(history, scale, 448, most_recent=most_recent)
        seen.append(float(scale[0]))
    large, small = 448 / 100, 448.0
    counts = 1 if most_recent else length
    np.testing.assert_array_equal(np.float32(seen), np.float32([large] * counts + [small] * (len(seen) - counts)))


@pytest.mark.parametrize("newest", [0.0, np.inf, np.nan])
def test_a_step_without_an_amax_rolls_nothing(newest):
    history = np.array([[newest], [3], [2]], np.float32)
    after, scale = rounding.delayed_update(history, np.array([5], np.float32), 57344)
    asserts.bitwise(after, np.array([[0], [3], [2]], np.float32))
    asserts.filled(scale, 5)


def test_rotation_is_orthogonal_and_its_own_inverse_but_for_signs():
    rotated = rounding.rotate(np.eye(16, dtype=np.float32)).astype(np.float64)
    asserts.bitwise(rotated @ rotated.T, np.eye(16))
    hadamard = np.array([[1.0]])
    for _ in range(4):
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    asserts.bitwise(rotated, rounding.SIGNS[:, None] * hadamard / 4)


# --- exact expansion (numerics 4) ---


@pytest.mark.parametrize("dtype", TYPES)
def test_every_value_is_a_bf16_and_an_fp16(dtype):
    assert is_exact(finite(dtype), "bfloat16")
    assert is_exact(finite(dtype), "float16")


@pytest.mark.parametrize(
    ("dtype", "exact", "normal"),
    [
        ("float8_e4m3fn", (-124, 119), (-117, 119)),
        ("float8_e5m2", (-117, 112), (-110, 112)),
        ("float4_e2m1fn", (-127, 125), (-125, 125)),
    ],
)
def test_scaled_by_which_powers_a_code_is_a_bf16(dtype, exact, normal):
    fits = [e for e in range(-127, 128) if is_exact(np.ldexp(finite(dtype), e), "bfloat16")]  # what E8M0 has
    assert fits == list(range(exact[0], exact[1] + 1))
    without = [e for e in fits if is_normal(np.ldexp(finite(dtype), e), "bfloat16")]
    assert without == list(range(normal[0], normal[1] + 1))


@pytest.mark.parametrize(("dtype", "powers"), [("float8_e4m3fn", (-15, 7)), ("float8_e5m2", (-8, 0))])
def test_scaled_by_which_powers_a_code_is_an_fp16(dtype, powers):
    fits = [e for e in range(-40, 41) if is_exact(np.ldexp(finite(dtype), e), "float16")]
    assert fits == list(range(powers[0], powers[1] + 1))


def test_nvfp4_values_fit_16_bits():
    scales = finite("float8_e4m3fn")
    products = np.outer(finite("float4_e2m1fn"), scales[~np.signbit(scales)])
    assert products.shape == (16, 127)
    assert products.max() == rounding.NVFP4_RANGE
    assert is_exact(products, "bfloat16")
    assert is_exact(products, "float16")
    mantissa, _ = np.frexp(products)
    assert (mantissa * 2.0**6 == np.round(mantissa * 2.0**6)).all()  # six significant bits


@pytest.mark.parametrize("dtype", TYPES)
def test_codes_as_bf16_bits(dtype):
    bits, factor = BF16_TRICKS[dtype]
    codes = CODES[: 2 * TYPES[dtype].sign_bit]
    found = bits[: codes.size].view(ml_dtypes.bfloat16).astype(np.float64) * factor
    wanted = rounding.decode(codes, dtype).astype(np.float64)
    number = np.isfinite(wanted)
    asserts.bitwise(found[number], wanted[number])
    lost = {"float8_e4m3fn": [480], "float8_e5m2": [65536, 81920, 98304, 114688], "float4_e2m1fn": []}[dtype]
    np.testing.assert_array_equal(found[~number], [*lost, *(-value for value in lost)])


def test_nvfp4_factor_of_the_bit_form_fits_bf16():
    scales = finite("float8_e4m3fn")
    assert is_exact(np.ldexp(scales, 118), "bfloat16")
    assert not is_exact(np.ldexp(scales, 126), "bfloat16")


def test_one_factor_folds_scale_and_bit_form():
    folds = [e for e in range(-160, 161) if is_exact(np.ldexp(np.ones(1), 120 + e), "bfloat16")]
    assert [e for e in folds if -124 <= e <= 119] == list(range(-124, 8))


def test_e5m2_is_the_upper_byte_of_fp16():
    halves = (CODES.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    ours = rounding.decode(CODES, "float8_e5m2")
    asserts.bitwise(np.isnan(halves), np.isnan(ours))
    asserts.bitwise(np.nan_to_num(halves, nan=0, posinf=1e9), np.nan_to_num(ours, nan=0, posinf=1e9))


def test_e2m1_rebased_on_e4m3():
    values = finite("float4_e2m1fn")
    assert [r for r in range(-20, 21) if is_exact(np.ldexp(values, r), "float8_e4m3fn")] == list(range(-8, 7))
