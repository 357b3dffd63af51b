"""cc/math against grouped_core.rounding, bit by bit: all codes, all 16-bit inputs, every decision point."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import pytest

from grouped_core import rounding
from grouped_core.activations import Activation
from grouped_core.rounding import TYPES
from tests import asserts, cases
from tests.native import compiler

SHORT = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float4_e2m1fn": "e2m1"}
BUILDS = {
    "checked": compiler.CHECKS,
    "vectors": ("-O3", "-march=native", "-fno-trapping-math"),  # what a compiler may make of the loops
}
SCALES = np.array([1, 0.3, 448 / 3.1, 2.0**-7, 2.0**-120, 2.0**118, 57344 / 1e-3, 1.0000001], np.float32)
PHILOX = (  # published with Random123: kat_vectors, "philox4x32 10"
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.fixture(scope="module", params=BUILDS)
def lib(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    output = tmp_path_factory.mktemp("math") / f"{request.param}.so"
    flags = (*BUILDS[request.param], "-shared", "-fPIC")
    return ctypes.CDLL(str(compiler.build(output, ["tests/native/math_check.cc"], flags)))


def call(lib: ctypes.CDLL, name: str, *arguments: Any) -> None:
    """Arrays by address, floats as float, integers in 64 bits."""

    def passed(argument: Any) -> Any:
        if isinstance(argument, np.ndarray):
            assert argument.flags.c_contiguous
            return ctypes.c_void_p(argument.ctypes.data)
        return ctypes.c_float(argument) if isinstance(argument, float | np.floating) else ctypes.c_int64(argument)

    getattr(lib, name).restype = None
    getattr(lib, name)(*map(passed, arguments))


@cache
def every_16_bit_input() -> np.ndarray:
    codes = np.arange(1 << 16, dtype=np.uint16)
    return np.concatenate([codes.view(cases.numpy_dtype(name)).astype(np.float32) for name in ("bfloat16", "float16")])


def neighbours(x: np.ndarray) -> np.ndarray:
    """x and what is one and two ulp away, of both signs, with the special values."""
    with np.errstate(all="ignore"):
        x = x.astype(np.float32)
        up, down = np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(0))
        near = np.concatenate([x, up, down, np.nextafter(up, np.float32(np.inf)), np.nextafter(down, np.float32(0))])
    special = np.array([0, np.inf, np.nan, 2.0**-149, 2.0**-126, 2.0**-127, rounding.FLOAT_MAX], np.float32)
    odd_nan = np.array([0x7F800001, 0x7FFFFFFF], np.uint32).view(np.float32)
    every = np.concatenate([near, special, odd_nan])
    return np.concatenate([every, -every])


def decision_points(dtype: str) -> np.ndarray:
    values = TYPES[dtype].magnitudes[: TYPES[dtype].max_code + 1]
    return neighbours(np.concatenate([values, (values[1:] + values[:-1]) / 2]))


@cache
def amaxes() -> np.ndarray:
    """Largest values * 2^k and their neighbours for all k, every exponent, and random bits."""
    with np.errstate(all="ignore"):
        powers = [np.ldexp(float(kind.max), np.arange(-160, 128)) for kind in TYPES.values()]
        edges = neighbours(np.concatenate([*powers, np.ldexp(1.0, np.arange(-149, 128))]).astype(np.float32))
    random = np.random.default_rng(0).integers(0, 0x7F800000, 20000, dtype=np.uint32).view(np.float32)
    return np.abs(np.concatenate([edges, random, np.array([0x7F7F0000], np.uint32).view(np.float32)]))


def random_floats(shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(1).standard_normal(shape) * scale).astype(np.float32)


@cache
def scaled_inputs() -> np.ndarray:
    with np.errstate(all="ignore"):
        return (every_16_bit_input()[:, None] * SCALES).reshape(-1)


@cache
def encodings(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """(numbers, their codes), for every build."""
    x = np.concatenate([scaled_inputs(), decision_points(dtype)])
    x = np.concatenate([x, np.zeros(x.size % 2, np.float32)])
    return x, rounding.encode(x, dtype)


@cache
def stochastic_codes() -> np.ndarray:
    return rounding.encode_stochastic(*draws())


@pytest.mark.parametrize("dtype", TYPES)
def test_every_encoding(lib, dtype):
    x, wanted = encodings(dtype)
    codes = np.zeros(x.size, np.uint8)
    call(lib, f"encode_{SHORT[dtype]}", x.size, x, codes)
    asserts.bitwise(codes, wanted)
    if dtype != "float4_e2m1fn":
        pairs = {name: np.zeros(x.size, np.uint8) for name in ("float8_e4m3fn", "float8_e5m2")}
        call(lib, "encode_pairs", x.size, x, *pairs.values())
        asserts.bitwise(pairs[dtype], codes, "pairs")


def test_every_code(lib):
    found = [np.zeros(256, np.float32) for _ in range(4)]
    call(lib, "decode_codes", *found)
    codes = np.arange(256, dtype=np.uint8)
    for values, dtype in zip(found, TYPES, strict=False):
        asserts.bitwise(values, rounding.decode(codes, dtype), dtype)
    asserts.bitwise(found[3], rounding.decode_e8m0(codes), "e8m0")


@pytest.mark.rule("QNT-1")
@pytest.mark.parametrize(
    ("name", "values", "scales"),
    [
        ("mxfp4", "float4_e2m1fn", "e8m0"),
        ("nvfp4", "float4_e2m1fn", "float8_e4m3fn"),
        ("mxfp8", "float8_e4m3fn", "e8m0"),
        ("e4m3", "float8_e4m3fn", ""),
    ],
)
def test_codes_as_pairs(lib, name, values, scales):
    """Every byte at every place of a word, under all scales: code times scale, rounded once to bfloat16."""
    every = np.arange(256, dtype=np.uint8)
    words = np.stack([np.roll(every * step, shift) for step, shift in ((1, 0), (3, 17), (5, 101), (255, 9))], axis=1)
    codes = rounding.unpack(words, 8) if values == "float4_e2m1fn" else words
    factors = rounding.decode_e8m0(every) if scales == "e8m0" else rounding.decode(every, scales) if scales else [1.0]
    found = np.zeros((len(factors), *codes.shape), np.uint16)
    call(lib, f"widen_{name}", len(words), words, found)
    decoded = rounding.decode(codes, values)
    for each, factor in zip(found.view(cases.numpy_dtype("bfloat16")), factors, strict=True):
        with np.errstate(all="ignore"):
            expected = (decoded * np.float32(factor)).astype(each.dtype)
        assert (np.isnan(each) == np.isnan(expected)).all()
        numbers = ~np.isnan(expected)
        asserts.bitwise(each[numbers], expected[numbers], f"scale {factor}")


@pytest.mark.parametrize("n", [1, 2, 15, 16])
def test_packed_codes(lib, n):
    codes = np.random.default_rng(n).integers(0, 16, n, dtype=np.uint8)
    packed, back = np.zeros((n + 1) // 2, np.uint8), np.zeros(n, np.uint8)
    call(lib, "pack", n, codes, packed, back)
    asserts.bitwise(packed, rounding.pack(codes))
    asserts.bitwise(back, codes)
    asserts.bitwise(rounding.unpack(packed, n), codes)


@cache
def draws() -> tuple[np.ndarray, np.ndarray]:
    """(numbers around decision points and between, random words), some exactly at the threshold and one step beside."""
    points = np.concatenate([decision_points("float4_e2m1fn"), random_floats((5000,), 3)])
    x = np.repeat(points, 16)
    random = np.random.default_rng(2).integers(0, 1 << 32, x.size, dtype=np.uint32)
    random[::16], random[1::16] = 0, 0xFFFFFFFF
    with np.errstate(all="ignore"):  # exactly at the threshold, and one step to each side
        values = TYPES["float4_e2m1fn"].magnitudes
        number = np.minimum(np.abs(np.nan_to_num(points.astype(np.float64))), 6)
        low = np.maximum(np.searchsorted(values, number, side="right") - 1, 0)
        gap = np.append(np.diff(values), 1)[low]
        threshold = np.floor((number - values[low]) / gap * 2.0**24).astype(np.int64)
    for place, step in ((2, -1), (3, 0), (4, 1)):
        random[place::16] = (np.clip(threshold + step, 0, 2**24 - 1) << 8).astype(np.uint32)
    return x, random


def test_stochastic_rounding(lib):
    x, random = draws()
    codes = np.zeros(x.size, np.uint8)
    call(lib, "encode_stochastic", x.size, x, random, codes)
    asserts.bitwise(codes, stochastic_codes())


@pytest.mark.parametrize("stochastic", [False, True])
def test_codes_by_the_adder(lib, stochastic):
    """The cast of kernels that have no time for comparisons: magnitudes, eight codes per word."""
    x, random = draws()
    if not stochastic:
        x = np.concatenate([scaled_inputs(), x])
    kept = np.flatnonzero(~np.isnan(x))
    kept = kept[: kept.size // 8 * 8]
    x = np.ascontiguousarray(np.abs(x[kept]))
    words = np.zeros(x.size // 8, np.uint32)
    if stochastic:
        random = np.ascontiguousarray(random[kept])
        call(lib, "encode_by_adder", x.size, x, random, words)
        wanted = rounding.encode_stochastic(x, random)
    else:
        call(lib, "encode_by_adder", x.size, x, 0, words)
        wanted = rounding.encode(x, "float4_e2m1fn")
    asserts.bitwise(words.view(np.uint8), rounding.pack(wanted))


def test_the_adder_gives_the_codes_of_the_cast(lib):
    count = np.ones(1, np.int64)
    call(lib, "codes_that_differ", count)
    assert count[0] == 0


def test_amax(lib):
    x = np.concatenate([every_16_bit_input(), neighbours(random_floats((1000,)))])
    x = np.random.default_rng(3).permutation(x)[: x.size // 7 * 7].reshape(-1, 7)
    found = np.zeros(len(x), np.float32)
    call(lib, "amax", len(x), 7, x, found)
    asserts.bitwise(found, rounding.amax(x, axis=1))
    assert np.isnan(found).any()
    assert np.isinf(found).any()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("eps", [0.0, 1e-12, 2.0**-140])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("overflow", [rounding.FLOAT_MAX, rounding.BF16_MAX])
def test_fp32_scales(lib, dtype, eps, power_of_two, overflow):
    a = amaxes()
    e, d = np.zeros_like(a), np.zeros_like(a)
    call(lib, "scales_fp32", a.size, a, TYPES[dtype].max, eps, overflow, int(power_of_two), e, d)
    wanted = rounding.fp32_scale(a, dtype, eps=eps, power_of_two=power_of_two, overflow=overflow)
    asserts.bitwise(e, wanted)
    asserts.bitwise(d, rounding.scale_inv(wanted))


@pytest.mark.parametrize("lib", ["vectors"], indirect=True)  # 200 million values; test_fp32_scales has both builds
@pytest.mark.parametrize("dtype", TYPES)
def test_powers_of_two_are_those_of_a_division(lib, dtype):
    count = np.ones(1, np.int64)
    call(lib, "powers_of_two_that_differ", TYPES[dtype].max, count)
    assert count[0] == 0


def test_e8m0_scales(lib):
    a = amaxes()
    found = [np.zeros(a.size, np.uint8) for _ in TYPES]
    call(lib, "scales_e8m0", a.size, a, *found)
    for codes, dtype in zip(found, TYPES, strict=True):
        asserts.bitwise(codes, rounding.e8m0_code(a, dtype), dtype)
    e = np.zeros(256, np.float32)
    call(lib, "encode_scales_e8m0", e)
    asserts.bitwise(e, rounding.e8m0_scale(np.arange(256)))


@pytest.mark.parametrize("value_range", [rounding.NVFP4_RANGE, rounding.FOUR_OVER_SIX_RANGE])
@pytest.mark.parametrize("stretch", [1.0, 1.5])
def test_nvfp4_scales(lib, value_range, stretch):
    group = np.repeat(amaxes(), 4)
    with np.errstate(all="ignore"):
        block = group * np.tile(np.array([1, 0.37, 1e-3, 0], np.float32), group.size // 4)
    block[4::97] = np.inf
    e_group, d_group, e_block = (np.zeros_like(group) for _ in range(3))
    s_block = np.zeros(group.size, np.uint8)
    scales = (e_group, d_group, s_block, e_block)
    call(lib, "scales_nvfp4", group.size, group, block, value_range, stretch, *scales)
    wanted_e = rounding.nvfp4_group_scale(group, value_range)
    wanted_d = rounding.scale_inv(wanted_e)
    wanted_s = rounding.nvfp4_block_scale_inv(block, wanted_e, stretch)
    asserts.bitwise(e_group, wanted_e)
    asserts.bitwise(d_group, wanted_d)
    asserts.bitwise(s_block, wanted_s)
    with np.errstate(invalid="ignore"):
        fine = ~np.isnan(e_block)
    asserts.bitwise(e_block[fine], rounding.nvfp4_block_scale(wanted_s, wanted_d)[fine])
    asserts.bitwise(fine, wanted_s != 0x7F)


def test_nvfp4_values(lib):
    d = np.concatenate([amaxes()[::50], np.array([1, 2.0**-128, 1e-3], np.float32)])
    found = np.zeros((d.size, 256, 16), np.float32)
    call(lib, "values_nvfp4", d, d.size, found)
    wanted = rounding.nvfp4_values(np.arange(16), np.arange(256)[:, None], d[:, None, None])
    asserts.bitwise(np.nan_to_num(found, nan=7.0), np.nan_to_num(wanted, nan=7.0))


@pytest.mark.parametrize("squares", [False, True])
def test_four_over_six(lib, squares):
    x = random_floats((300, 16, 16))
    x[7, 3, 5], x[8, 2, 1], x[9] = np.nan, np.inf, 0
    d = rounding.scale_inv(rounding.nvfp4_group_scale(rounding.amax(x, axis=(1, 2)), 1536.0))
    s = rounding.nvfp4_block_scale_inv(rounding.amax(x, axis=(1, 2)), rounding.scale_inv(d), 1.0)
    rows, blocks = np.zeros((300, 16), np.float32), np.zeros(300, np.float32)
    call(lib, "four_over_six", 300, x, s, d, int(squares), rows, blocks)
    wanted = rounding.nvfp4_row_errors(x, s[:, None], d[:, None], squares)
    asserts.bitwise(np.nan_to_num(rows, nan=-1), np.nan_to_num(wanted, nan=-1))
    asserts.bitwise(np.nan_to_num(blocks, nan=-1), np.nan_to_num(rounding.nvfp4_block_errors(wanted), nan=-1))


@pytest.mark.parametrize("length", [1, 2, 3, 17])
@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize("margin", [0, 3])
def test_delayed_scaling(lib, length, most_recent, margin):
    rng = np.random.default_rng(length)
    history = np.abs(rng.standard_normal((length, 40))).astype(np.float32)
    history[0, :6] = [0, np.inf, np.nan, 2.0**-149, 2.0**-126, rounding.FLOAT_MAX]
    scale = np.full(40, 3, np.float32)
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        for _ in range(2 * length):
            largest = np.float32(float(TYPES[dtype].max) * 2.0**-margin)
            wanted = rounding.delayed_update(history, scale, largest, most_recent=most_recent)
            call(lib, "update_delayed", length, 40, history, scale, largest, int(most_recent))
            asserts.bitwise(history, wanted[0], "history")
            asserts.bitwise(scale, wanted[1], "scale")
            history[0] = np.abs(rng.standard_normal(40)) * (rng.random(40) < 0.7)


def test_rotation(lib):
    x = np.concatenate([random_floats((4000, 16)), np.ldexp(random_floats((500, 16)), -135), np.eye(16)])
    x = np.ascontiguousarray(x, np.float32)
    x[5, 3:5], x[6, :] = np.inf, 0.0
    found = x.copy()
    call(lib, "rotate_all", len(x), found)
    wanted = rounding.rotate(x)
    asserts.bitwise(np.nan_to_num(found, nan=7.0), np.nan_to_num(wanted, nan=7.0))
    assert np.isnan(wanted[5]).any()


def test_random_streams(lib):
    counters = np.array([row[0] for row in PHILOX], np.uint32)
    keys = np.array([row[1] for row in PHILOX], np.uint64)
    found = np.zeros_like(counters)
    call(lib, "philox_all", len(keys), counters, keys, found)
    asserts.bitwise(found, np.array([row[2] for row in PHILOX], np.uint32))
    for counter, key, words in PHILOX:
        asserts.bitwise(rounding.philox(counter, key), np.array(words, np.uint32))
    key = 0xFEDCBA9876543210
    words = np.zeros((9, 13), np.uint32)
    call(lib, "random_all", key, 9, 13, 5, 3, words)
    asserts.bitwise(words, rounding.random_words(key, 9, 13, 5, 3))
    assert not np.array_equal(words, rounding.random_words(key, 9, 13, 5, 2))


def reciprocals_that_differ(lib: ctypes.CDLL, first: int, last: int, step: int) -> np.ndarray:
    """How many of the floats between two encodings have another E8M0 code by the reciprocal of each type's maximum."""
    counts = np.full(3, -1, np.int64)
    call(lib, "reciprocals", first, last, step, counts)
    return counts


BOUNDED = {  # a kind, and the least share of its bounds that is wanted of value, dt/da and dt/du
    "relu": (Activation("relu"), 0.99),
    "silu": (Activation("silu"), 0.99),
    "gelu_tanh": (Activation("gelu_tanh"), 0.99),
    "gelu_erf": (Activation("gelu_erf"), 0.99),
    "swiglu": (Activation("swiglu"), 0.99),
    "geglu_tanh": (Activation("geglu_tanh"), 0.99),
    "quick_gelu": (Activation("quick_gelu"), 0.99),
    "quick_geglu": (Activation("quick_geglu", alpha=0.3), 0.99),
    "flat": (Activation("quick_gelu", alpha=1e-30), 0.0),
    "steep": (Activation("quick_geglu", alpha=3e30), 0.5),
    "clamped_qgeglu": (Activation("clamped_qgeglu"), 0.7),
    "below": (Activation("clamped_qgeglu", offset=-3.0, limit=None), 0.7),
    "silu_clamped_glu": (Activation("silu_clamped_glu"), 0.7),
    "situ_glu": (Activation("situ_glu"), 0.7),
    "narrow": (Activation("situ_glu", beta1=1e-3, beta2=0.5), 0.0),
}


@pytest.mark.parametrize(("activation", "least"), BOUNDED.values(), ids=BOUNDED)
def test_bounds_of_activations(lib, activation, least):
    """Magnitudes of a kind's values and derivatives, of all gates there are, are below its bounds, and not far."""
    lib.activation_name.restype = ctypes.c_char_p
    params = activation.params()
    kind = next(i for i in range(100) if lib.activation_name(ctypes.c_int64(i)) == params["kind"].encode())
    u = np.array([0, 1e-30, -0.4, 1, -3, 8, 3e38], np.float32)
    shares = np.zeros(3, np.float32)
    numbers = [np.float32(params[name]) for name in ("alpha", "limit", "offset", "beta1", "beta2")]
    call(lib, "shares_of_bounds", kind, u.size, u, *numbers, shares)
    assert (shares[:2] >= least).all()
    assert (shares <= 1 + 2.0**-16).all()


INFINITY = 0x7F800000


@pytest.mark.parametrize("lib", ["vectors"], indirect=True)
def test_reciprocals(lib):
    """E8M0 codes: a multiplication by fl(1 / max) is as good as a division by max (numerics 2.3).

    All floats about those where the code changes, which are max times a power of two, and every 257th of the others.
    """
    asserts.zero(reciprocals_that_differ(lib, 0, INFINITY + 1, 257))
    for largest in (448, 57344, 6):
        for exponent in range(-160, 120):
            with np.errstate(over="ignore"):
                bits = int(np.float32(largest * 2.0**exponent).view(np.uint32))
            first, last = max(bits - 1024, 0), min(bits + 1024, INFINITY + 1)
            asserts.zero(reciprocals_that_differ(lib, first, last, 1), f"about {largest} * 2^{exponent}")


@pytest.mark.slow
@pytest.mark.parametrize("lib", ["vectors"], indirect=True)  # 2^31 values
def test_reciprocals_of_every_float(lib):
    asserts.zero(reciprocals_that_differ(lib, 0, INFINITY + 1, 1))
