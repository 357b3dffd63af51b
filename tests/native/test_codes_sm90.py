"""Kernels that widen codes on the chip: the bits of the same products of weights that were widened before."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from grouped_core import _native, rounding
from grouped_core.activations import Activation
from grouped_core.formats import QTensor
from tests import asserts, cases
from tests.native.low_rank_tools import Low, fused_of, low_of, product
from tests.native.quantized_operands import Operand, operand, sizes_of
from tests.native.runner import Native

CALLS = ("grouped_matmul", "grouped_matmul_act", "grouped_matmul_dact")
CODES = {call: f"{call}_codes_sm90" for call in CALLS}
PLAIN = {call: f"{call}_bf16_sm90" for call in CALLS}
pytestmark = pytest.mark.gpu
built = pytest.mark.skipif(CODES[CALLS[0]] not in _native.kernels()[CALLS[0]], reason="this build has no CUDA kernels")

FORMATS = ("mxfp4", "nvfp4", "nvfp4_2d", "mxfp8", "mxfp8_2d", "fp8_tensor")
# Tiles that are full and that are not in each direction, with each number of rows that a tile may multiply; rings of
# stages that turn over several times; groups with odd numbers of row tiles, whose last pair of tiles shares its rows;
# more rows per group than the kernel for few rows takes.
LONG = cases.Case("long", (340, 0, 515, 1000), 1860, 1056, 416, frozenset())
SHORT = cases.Case("short", (1, 460, 0, 700), 1165, 96, 64, frozenset())
WIDE = cases.Case("wide", (1290, 40), 1330, 192, 2080, frozenset())
CASES = (LONG, SHORT, WIDE)


def without_factors(q: Operand) -> QTensor[NDArray[Any]]:
    """The same codes with group scales of 1."""
    assert isinstance(q, QTensor)
    factors = q.slots[2]
    return q if factors is None else with_factors(q, np.ones_like(factors))


def with_factors(q: QTensor[NDArray[Any]], factors: NDArray[Any]) -> QTensor[NDArray[Any]]:
    """The same codes with other group scales, which are the scales of a format without blocks."""
    return dataclasses.replace(q, **{"group_scales" if q.format.scales else "scales": factors})


def widened(q: QTensor[NDArray[Any]]) -> NDArray[Any]:
    """[G, lines, line] of bfloat16, in the order of the codes: code times scale of the block, rounded once."""
    nibbles = q.format.values == "uint8"
    raw = np.asarray(q.values).view(np.uint8)
    line = raw.shape[2] * (2 if nibbles else 1)
    codes = rounding.unpack(raw, line) if nibbles else raw
    found = rounding.decode(codes, "float4_e2m1fn" if nibbles else q.format.values)
    if q.format.scales:
        stored = np.asarray(q.scales).view(np.uint8)
        scales = rounding.decode(stored, q.format.scales) if "e4m3" in q.format.scales else rounding.decode_e8m0(stored)
        block, outer = q.format.block, q.format.block_outer
        with np.errstate(all="ignore"):
            found = found * scales.repeat(outer, 1)[:, : raw.shape[1]].repeat(block, 2)[:, :, :line]
    return found.astype(cases.numpy_dtype("bfloat16"))


def weights(name: str, case: cases.Case, axis: int, width: int) -> QTensor[NDArray[Any]]:
    """Codes [G, K, width], contracted along axis 1, or [G, width, K], along axis 2; along lines in either case."""
    shape = (case.groups, case.k, width) if axis == 1 else (case.groups, width, case.k)
    return without_factors(operand(name, shape, 2, sizes_of(case), "w"))


def rows(case: cases.Case) -> NDArray[Any]:
    found = operand("bf16", (case.rows, case.k), 1, sizes_of(case), "x")
    assert isinstance(found, np.ndarray)
    return found


def same(found: Any, expected: Any, name: str) -> None:
    """The same bits, in the tail too; a NaN is a NaN."""
    assert (np.isnan(found) == np.isnan(expected)).all(), name
    asserts.bitwise(np.where(np.isnan(found), 0, found), np.where(np.isnan(expected), 0, expected), name)


def pair(call: str) -> tuple[Native, Native]:
    return Native(CODES[call], check=False), Native(PLAIN[call], check=False)


def low_beside(format: str, case: cases.Case, width: int, rank: int, axis: int) -> Low | None:
    return low_of(case, width, rank, axis, "bfloat16") if rank and format in ("mxfp4", "mxfp8") else None


@built
@pytest.mark.rule("LOR-2", "LOR-3", "QNT-1")
@pytest.mark.matrix(
    format=FORMATS, case=CASES, axis=(1, 2), result=("bfloat16", "float32"), rank=(0, 16, 72), epilogue=(False, True)
)
def test_products(format, case, axis, result, rank, epilogue):
    if rank and format in ("nvfp4", "nvfp4_2d", "fp8_tensor"):
        pytest.skip("scales of groups and a low-rank product are two calls")
    x, w = rows(case), weights(format, case, axis, case.n)
    low = low_of(case, case.n, rank, axis, "bfloat16") if rank else None
    options: dict[str, Any] = {}
    if epilogue:
        options = {
            "bias": cases.normal((case.groups, case.n), "bfloat16", "bias"),
            "row_scale": cases.normal((case.rows,), "float32", "row_scale"),
        }
    coded, plain = pair("grouped_matmul")
    found = product(coded, case, x, w, axis, result, low, **options)
    same(found, product(plain, case, x, widened(w), axis, result, low, **options), "result")
    asserts.zero(found[case.valid :], "tail")


@built
@pytest.mark.rule("QNT-1", "ALL-6")
@pytest.mark.matrix(
    format=FORMATS[:-1],
    axis=(1, 2),
    rank=(0, 72),
    valid=lambda format, rank, **_: not rank or format in ("mxfp4", "mxfp8"),
)
def test_any_code_and_scale(format, axis, rank):
    """Scales that are subnormal, large, infinite products or NaN, and codes that are NaN, in a few lines."""
    case = LONG
    w = weights(format, case, axis, case.n)
    rng = np.random.default_rng(7)
    values, scales = np.asarray(w.values).view(np.uint8), np.asarray(w.scales).view(np.uint8)
    values[:, ::37] = rng.integers(0, 256, values[:, ::37].shape)
    scales[:, ::5, ::3] = rng.integers(0, 256, scales[:, ::5, ::3].shape)
    low = low_beside(format, case, case.n, rank, axis)
    coded, plain = pair("grouped_matmul")
    with np.errstate(all="ignore"):
        expected = product(plain, case, rows(case), widened(w), axis, "float32", low)
        same(product(coded, case, rows(case), w, axis, "float32", low), expected, "result")


@built
@pytest.mark.rule("GRP-9", "QNT-1")
@pytest.mark.matrix(format=("nvfp4", "fp8_tensor"), axis=(1, 2))
def test_scales_of_groups(format, axis):
    """Powers of two, which commute with every rounding."""
    case = LONG
    w = weights(format, case, axis, case.n)
    factors = np.exp2(np.arange(case.groups) - 2).astype(np.float32)
    scaled = with_factors(w, factors)
    run = Native(CODES["grouped_matmul"], check=False)
    expected = product(run, case, rows(case), w, axis, "float32", None)
    expected[: case.valid] *= factors.repeat(np.array(case.sizes))[:, None]
    same(product(run, case, rows(case), scaled, axis, "float32", None), expected, "result")


def same_activations(case: cases.Case, activation: Activation, w: QTensor[NDArray[Any]], low: Low | None) -> None:
    """Results and hidden rows of an up projection are those of the weights that were widened before."""
    found, expected = (
        fused_of(case, activation.kind, rows(case), weight, 2, "bfloat16", grad=False)
        ._replace(activation=activation)
        .run(run, "bfloat16", low)
        for run, weight in zip(pair("grouped_matmul_act"), (w, widened(w)), strict=True)
    )
    for name, a, b in zip(("result", "hidden"), found, expected, strict=False):
        same(a, b, name)


@built
@pytest.mark.rule("LOR-3", "MLP-1", "QNT-1")
@pytest.mark.matrix(
    format=("mxfp4", "nvfp4", "mxfp8"),
    case=(LONG, SHORT, dataclasses.replace(WIDE, n=1048)),
    activation=(
        Activation("swiglu"),
        Activation("swiglu", interleave=1),
        Activation("swiglu", interleave=32),
        Activation("relu"),
    ),
    rank=(0, 16),
    valid=lambda case, activation, **_: activation.interleave != 32 or case.n % 32 == 0,
)
def test_activations(format, case, activation, rank):
    width = activation.fc1_width(case.n)
    same_activations(case, activation, weights(format, case, 2, width), low_beside(format, case, width, rank, 2))


@built
@pytest.mark.rule("LOR-3", "MLP-1", "QNT-1")
@pytest.mark.matrix(
    activation=(Activation("swiglu"), Activation("swiglu", interleave=32), Activation("relu")),
    large=("gates", "linear", "first columns"),
    rank=(0, 16),
    valid=lambda activation, large, **_: activation.kind != "relu" or large == "first columns",  # no linear half
)
def test_large_scales_beside_small_ones(activation, large, rank):
    """MXFP4 scales that take two factors, in some columns of a tile and not in others."""
    case = LONG
    width = activation.fc1_width(case.n)
    w = weights("mxfp4", case, 2, width)
    column = np.arange(width)
    linear = column >= case.n if activation.interleave == 0 else column // 32 % 2 == 1
    chosen = {"gates": ~linear, "linear": linear, "first columns": column % 128 < 64}[large]
    scales = np.asarray(w.scales).view(np.uint8)
    scales[:, chosen] = 130  # 2^3
    same_activations(case, activation, w, low_beside("mxfp4", case, width, rank, 2))


@built
@pytest.mark.rule("LOR-2", "LOR-3", "MLP-2", "QNT-1")
@pytest.mark.matrix(format=("mxfp4", "nvfp4", "mxfp8"), case=CASES, axis=(1, 2), kind=("swiglu", "relu"), rank=(0, 16))
def test_gradients_at_hidden_rows(format, case, axis, kind, rank):
    x, w = rows(case), weights(format, case, axis, case.n)
    low = low_beside(format, case, case.n, rank, axis)
    found, expected = (
        fused_of(case, kind, x, weight, axis, "bfloat16", grad=True).run(run, "bfloat16", low)
        for run, weight in zip(pair("grouped_matmul_dact"), (w, widened(w)), strict=True)
    )
    for name, a, b in zip(("result", "activated", "row_sum"), found, expected, strict=False):
        same(a, b, name)
