"""Products of 8-bit operands with scales on Hopper: which kernels accept them, and the errors of results.

Operands are made in their layout in memory (numerics 2.4), with poisoned tails and ends of the padded axis; the oracle
multiplies their exact values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from grouped_core import _native, calls, plans
from grouped_core.calls import SLOTS, ArraySpec, Call, QuantizedSpec, spec_of
from grouped_core.formats import FORMATS, Format, padded_rows
from grouped_core.recipes import FP32, FP8Block, FP8Current, Recipe
from grouped_core.reference import Oracle, group_ends
from tests import asserts, bounds, cases
from tests.bounds import Bounded
from tests.native.runner import Native

ARCH = "sm_90a"
FAST, PROMOTED, ACROSS, WGRAD = (f"grouped_matmul_fp8_{part}sm90" for part in ("fast_", "", "mn_", "wgrad_"))
PORTABLE = "grouped_matmul_fp8_cuda"  # takes codes along lines and across them
TENSOR, TENSOR_E5M2 = FORMATS["fp8_tensor"], FORMATS["fp8_tensor_e5m2"]
BLOCK, BLOCK_E5M2, SQUARE = FORMATS["fp8_1x128"], FORMATS["fp8_1x128_e5m2"], FORMATS["fp8_128x128"]
PAIRS = ((TENSOR, TENSOR), (TENSOR_E5M2, TENSOR), (TENSOR, TENSOR_E5M2), (BLOCK, SQUARE), (BLOCK_E5M2, SQUARE))
"""Formats of rows and weights."""
TRANSPOSED = ((TENSOR, TENSOR), (TENSOR, TENSOR_E5M2), (TENSOR_E5M2, TENSOR), (BLOCK, BLOCK), (BLOCK, BLOCK_E5M2))
"""Formats of the operands of a weight gradient."""
FAST_TENSOR = FP8Current.replace(accumulate="fast")
RECIPES = {"promoted": FP8Current, "fast": FAST_TENSOR, "block": FP8Block}
# Rows of whole 16 bytes, several tiles and blocks in each direction, nothing else aligned.
TILES = cases.Case("tiles_16", (150, 0, 301, 61), 540, 400, 456, frozenset())
NARROW = cases.Case("narrow_16", (9, 0, 140), 150, 16, 8, frozenset())
LONG = cases.Case("long_16", (130, 300), 430, 4096, 200, frozenset())
CASES = [TILES, NARROW, LONG]
# Each pair of multiprocessors gets several tiles, short sums of weight gradients and narrow last columns among them: a
# tile is stored while the next one starts to multiply, if that is whole.
MANY = cases.Case("many_16", (900, 20, 0, 97, 1300, 96, 1, 640, 300), 3500, 1040, 2000, frozenset())
SHORT = cases.Case("short_16", MANY.sizes, MANY.rows, 80, MANY.n, frozenset())


@dataclass(frozen=True)
class Operand:
    """A quantised operand and its exact values."""

    spec: QuantizedSpec
    arrays: dict[str, NDArray[Any] | None]  # values, scales, group_scales
    exact: NDArray[np.float64]  # of the logical shape


def _codes(shape: tuple[int, ...], format: Format, *seed: object, positive: bool = False) -> NDArray[Any]:
    values = cases.normal(shape, "float32", "codes", format.values, *seed)
    return (np.abs(values) if positive else values).astype(cases.numpy_dtype(format.values))


def _scales(shape: tuple[int, ...], *seed: object) -> NDArray[Any]:
    """Positive, no powers of two, over some binades."""
    return np.exp2(cases.normal(shape, "float32", "scales", *seed)).astype(np.float32)


def _spread(scales: NDArray[Any], axis: int, length: int) -> NDArray[np.float64]:
    """Each scale for its 128 elements of `axis`."""
    wide = scales.astype(np.float64).repeat(128, axis=axis)
    return np.take(wide, np.arange(length), axis=axis)


def _quantized(format: Format, axis: int, shape: tuple[int, ...], exact: NDArray[np.float64], **arrays: Any) -> Operand:
    specs = [
        None if arrays.get(name) is None else spec_of(arrays[name]) for name in ("values", "scales", "group_scales")
    ]
    assert specs[0] is not None
    return Operand(QuantizedSpec(specs[0], specs[1], specs[2], format, axis, shape, "bfloat16"), arrays, exact)


def _group_of_row(case: cases.Case) -> NDArray[np.int64]:
    """The group of each row; rows past the last group count to it."""
    ends = group_ends(np.array(case.sizes), case.rows)
    return np.minimum(np.searchsorted(ends, np.arange(case.rows), side="right"), case.groups - 1)


def rows_operand(case: cases.Case, width: int, format: Format, name: str, positive: bool = False) -> Operand:
    """[M, X], contracted along X; codes and scales of the tail are NaN."""
    codes = _codes((case.rows, width), format, name, positive=positive)
    codes.view(np.uint8)[case.valid :] = 0x7F
    exact = codes.astype(np.float64)
    scales = group_scales = None
    if format.block:
        scales = _scales((-(-width // 128), case.rows), name)
        scales[:, case.valid :] = np.nan
        exact = exact * _spread(scales, 0, width).T
    else:
        group_scales = _scales((case.groups,), name)
        exact = exact * group_scales.astype(np.float64)[_group_of_row(case)][:, None]
    return _quantized(format, 1, (case.rows, width), exact, values=codes, scales=scales, group_scales=group_scales)


def weight_operand(case: cases.Case, format: Format, positive: bool = False) -> Operand:
    """[G, K, N], contracted along K, so its layout is [G, N, K]."""
    codes = _codes((case.groups, case.n, case.k), format, "w", positive=positive)
    exact = codes.astype(np.float64)
    scales = group_scales = None
    if format.block:
        scales = _scales((case.groups, -(-case.n // 128), -(-case.k // 128)), "w")
        exact = exact * _spread(_spread(scales, 1, case.n), 2, case.k)
    else:
        group_scales = _scales((case.groups,), "w")
        exact = exact * group_scales.astype(np.float64)[:, None, None]
    shape = (case.groups, case.k, case.n)
    return _quantized(format, 1, shape, exact.swapaxes(1, 2), values=codes, scales=scales, group_scales=group_scales)


def across(weight: Operand) -> Operand:
    """The same weight with its codes transposed, as quantising along N makes them: its layout is [G, K, N]."""
    codes = weight.arrays["values"]
    assert codes is not None
    arrays = {**weight.arrays, "values": np.ascontiguousarray(codes.swapaxes(1, 2))}
    return _quantized(weight.spec.format, 2, weight.spec.shape, weight.exact, **arrays)


def transposed_operand(case: cases.Case, width: int, format: Format, name: str) -> Operand:
    """[M, X], contracted along rows: [X, P]. Segments end with zeros, the axis with NaN."""
    padded = padded_rows(case.rows, case.groups, format.segment)
    codes = _codes((width, padded), format, name)
    bits = codes.view(np.uint8)
    scales = _scales((padded // 128, width), name) if format.block else None
    group_scales = None if format.block else _scales((case.groups,), name)
    exact = np.zeros((case.rows, width))
    at = 0
    for g, span in enumerate(case.spans()):
        count = span.stop - span.start
        end = at + -(-count // format.segment) * format.segment
        bits[:, at + count : end] = 0
        values = codes[:, at : at + count].T.astype(np.float64)
        if scales is not None:
            values = values * _spread(scales[at // 128 : end // 128], 0, count)
        if group_scales is not None:
            values = values * float(group_scales[g])
        exact[span] = values
        at = end
    bits[:, at:] = 0x7F
    if scales is not None:
        scales[at // 128 :] = np.nan
    return _quantized(format, 0, (case.rows, width), exact, values=codes, scales=scales, group_scales=group_scales)


def _by_slot(lhs: Operand, rhs: Operand, others: dict[str, Any]) -> list[Any]:
    arrays = dict(others)
    for side, operand in (("lhs", lhs), ("rhs", rhs)):
        arrays[side] = operand.arrays["values"]
        for name in ("scales", "group_scales"):
            arrays[f"{side}_{name}"] = operand.arrays.get(name)
    return [arrays.get(slot) for slot in SLOTS["grouped_matmul"]]


def _exact(call: Call, arrays: dict[str, Any], magnitudes: bool) -> NDArray[np.float64]:
    given = {name: np.abs(a) if magnitudes and name != "group_sizes" else a for name, a in arrays.items()}
    (value,) = Oracle(exact=True)(call, [given.get(slot) for slot in SLOTS["grouped_matmul"]])
    return value


def run(
    kernel: str,
    case: cases.Case,
    lhs: Operand,
    rhs: Operand,
    recipe: Recipe,
    result_dtype: str,
    *,
    contract_rows: bool = False,
    runner: Native | None = None,
    **options: Any,
) -> NDArray[Any]:
    """One product, pinned to `kernel` and held against its bound. `options`: arrays by slot, and flags."""
    sizes = np.array(case.sizes, np.int32)
    others = {name: a for name, a in options.items() if isinstance(a, np.ndarray)}
    flags = {name: value for name, value in options.items() if name not in others}
    specs = {name: spec_of(a) for name, a in others.items()}
    axes = (0, 0) if contract_rows else (1, 1)
    call = calls.grouped_matmul(
        lhs.spec, rhs.spec, axes, spec_of(sizes), result_dtype, recipe=recipe, implementation=kernel, **specs, **flags
    )
    runner = runner or Native(kernel, check=False)
    found = runner(call, _by_slot(lhs, rhs, {**others, "group_sizes": sizes}))[0]
    plain = calls.grouped_matmul(
        ArraySpec(lhs.exact.shape, "float32"),
        ArraySpec(rhs.exact.shape, "float32"),
        axes,
        spec_of(sizes),
        result_dtype,
        recipe=FP32,
        **specs,
        **flags,
    )
    arrays = {"lhs": lhs.exact, "rhs": rhs.exact, "group_sizes": sizes, **others}
    value, largest = _exact(plain, arrays, False), _exact(plain, arrays, True)
    terms = case.rows if contract_rows else case.k
    error = bounds.gamma(terms, lhs.spec.values.dtype, kernel) * largest
    error = error + bounds.half_ulp(np.abs(value) + error, result_dtype)
    asserts.within(found, Bounded(value, error, result_dtype), f"result of {kernel}")
    return found


def forward(kernel: str, case: cases.Case, pair: tuple[Format, Format], result: str, **options: Any) -> NDArray[Any]:
    recipe = RECIPES["block" if pair[0].block else "fast" if kernel == FAST else "promoted"]
    positive, turned = options.pop("positive", False), options.pop("turned", kernel == ACROSS)
    lhs, rhs = rows_operand(case, case.k, pair[0], "x", positive), weight_operand(case, pair[1], positive)
    return run(kernel, case, lhs, across(rhs) if turned else rhs, recipe, result, **options)


def wgrad(case: cases.Case, pair: tuple[Format, Format], result: str, **options: Any) -> NDArray[Any]:
    recipe = FP8Block if pair[0].block else FP8Current
    lhs, rhs = transposed_operand(case, case.k, pair[0], "x"), transposed_operand(case, case.n, pair[1], "dy")
    return run(WGRAD, case, lhs, rhs, recipe, result, contract_rows=True, **options)


ROWS = [(kernel, pair) for kernel in (FAST, PROMOTED) for pair in PAIRS if kernel == PROMOTED or not pair[0].block]
each_rows_kernel = pytest.mark.parametrize(
    ("kernel", "pair"), ROWS, ids=[f"{kernel}-{x.name}-{w.name}" for kernel, (x, w) in ROWS]
)
each_transposed_pair = pytest.mark.parametrize("pair", TRANSPOSED, ids=[f"{x.name}-{dy.name}" for x, dy in TRANSPOSED])
SIZES = [c for c in cases.select() if c.tags & {"edge", "tail", "clamp"} or c.name in ("jagged", "groups_65")]


def _whole_rows(case: cases.Case) -> cases.Case:
    """The case's groups with features that fill 16 bytes."""
    return cases.Case(case.name, case.sizes, case.rows, 272, 200, case.tags)


def _whole_lines(case: cases.Case) -> cases.Case:
    """The same whose lines along N fill 16 bytes in 8 bits, too."""
    return replace(case, n=-(-case.n // 16) * 16)


@pytest.mark.gpu
@pytest.mark.rule("MAT-6")
@each_rows_kernel
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("result", cases.DTYPES)
def test_forward(kernel, pair, case, result):
    forward(kernel, case, pair, result)


@pytest.mark.gpu
@pytest.mark.rule("MAT-6")
@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[3]], ids=["tensor", "block"])
@pytest.mark.parametrize("result", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [MANY, SHORT], ids=str)
def test_forward_in_many_tiles(pair, result, case):
    found = forward(PROMOTED, case, pair, result)
    asserts.zero(found[case.valid :], "tail")


@pytest.mark.gpu
@pytest.mark.rule("GRP-4", "GRP-5", "GRP-6", "GRP-9")
@pytest.mark.parametrize("case", SIZES, ids=str)
@pytest.mark.parametrize(("kernel", "pair"), [(FAST, PAIRS[0]), (PROMOTED, PAIRS[0]), (PROMOTED, PAIRS[3])])
@pytest.mark.parametrize("into", [False, True])
def test_forward_of_any_sizes(kernel, pair, case, into):
    case = _whole_rows(case)
    given = {"into": np.full((case.rows, case.n), cases.SENTINEL, np.float32)} if into else {}
    forward(kernel, case, pair, "float32", **given)


@pytest.mark.gpu
@pytest.mark.rule("MAT-8", "MAT-9")
@pytest.mark.matrix(
    kernel=(FAST, PROMOTED),
    bias=(None, "bfloat16", "float32"),
    row_scale=(False, True),
    scale_bias=(False, True),
    valid=lambda bias, row_scale, scale_bias, **_: not scale_bias or (bias and row_scale),
)
@pytest.mark.parametrize("case", [TILES, MANY], ids=str)
def test_epilogues(kernel, bias, row_scale, scale_bias, case):
    given = {} if bias is None else {"bias": cases.normal((case.groups, case.n), bias, "bias")}
    if row_scale:
        given["row_scale"] = cases.normal((case.rows,), "float32", "row_scale")
        given["row_scale"][case.valid :] = np.nan
    forward(kernel, case, PAIRS[0], "bfloat16", scale_bias=scale_bias, **given)


@pytest.mark.gpu
@pytest.mark.rule("MAT-4")
@pytest.mark.parametrize(("kernel", "pair"), [(FAST, PAIRS[0]), (PROMOTED, PAIRS[3])])
@pytest.mark.parametrize("case", [TILES, MANY], ids=str)
def test_weights_in_a_table(kernel, pair, case):
    """The same bits as from one packed weight, whatever is between the members in memory."""
    runner = Native(kernel, check=False)
    packed = forward(kernel, case, pair, "bfloat16", runner=runner)
    lhs, rhs = rows_operand(case, case.k, pair[0], "x"), weight_operand(case, pair[1])
    held, table = runner.hold(list(rhs.arrays["values"]))
    sizes = np.array(case.sizes, np.int32)
    recipe = RECIPES["block" if pair[0].block else "fast"]
    call = calls.grouped_matmul(
        lhs.spec, rhs.spec, (1, 1), spec_of(sizes), "bfloat16", recipe=recipe, tables=(True, False, False)
    )
    given = _by_slot(lhs, rhs, {"group_sizes": sizes, "rhs_table": table})
    given[SLOTS["grouped_matmul"].index("rhs")] = None
    asserts.bitwise(runner(call, given)[0], packed, "result of listed weights")
    assert held


@pytest.mark.gpu
@pytest.mark.rule("MAT-6")
@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[3]], ids=["tensor", "block"])
def test_sums_of_one_sign_are_promoted(pair):
    """The tensor cores' own sums lose more with every step; those of 128 terms are added in fp32."""
    forward(PROMOTED, LONG, pair, "float32", positive=True)


@pytest.mark.gpu
@pytest.mark.rule("ALL-7")
@each_rows_kernel
def test_rows_depend_on_their_group_alone(kernel, pair):
    """A row's bits are the same in a batch of its own, and from run to run."""
    lhs, rhs = rows_operand(TILES, TILES.k, pair[0], "x"), weight_operand(TILES, pair[1])
    values: Any = lhs.arrays["values"]
    recipe = RECIPES["block" if pair[0].block else "fast" if kernel == FAST else "promoted"]
    whole = run(kernel, TILES, lhs, rhs, recipe, "float32")
    asserts.bitwise(run(kernel, TILES, lhs, rhs, recipe, "float32"), whole, "second run")
    start = TILES.ends[1]
    alone = cases.Case("alone", (0, 0, 301, 0), 301, TILES.k, TILES.n, frozenset())
    part = slice(start, start + 301)
    scales = lhs.arrays.get("scales")
    moved = _quantized(
        pair[0],
        1,
        (301, TILES.k),
        lhs.exact[part],
        values=values[part],
        scales=None if scales is None else np.ascontiguousarray(scales[:, part]),
        group_scales=lhs.arrays.get("group_scales"),
    )
    asserts.bitwise(run(kernel, alone, moved, rhs, recipe, "float32"), whole[part], "rows of one group alone")


@pytest.mark.gpu
@pytest.mark.rule("ALL-7")
@pytest.mark.parametrize("pair", PAIRS[:3], ids=[f"{x.name}-{w.name}" for x, w in PAIRS[:3]])
@pytest.mark.parametrize("result", ["bfloat16", "float16"])
def test_tiles_of_even_height_change_no_bit(pair, result):
    """Rows per group choose them: the same groups in a longer buffer have tiles of 128 rows (schedule_check.cc)."""
    case = cases.Case("even", cases.HEIGHTS, cases.EVEN_ROWS, 304, 200, frozenset())
    longer = cases.Case("other", cases.HEIGHTS, cases.OTHER_ROWS, case.k, case.n, frozenset())
    rows, weights = rows_operand(case, case.k, pair[0], "x"), weight_operand(case, pair[1])
    codes = rows.arrays["values"]
    assert codes is not None
    given = {"bias": cases.normal((case.groups, case.n), "float32", "bias"), "scale_bias": True}
    found = []
    for each in (case, longer):
        more = each.rows - case.rows
        lhs = _quantized(
            pair[0],
            1,
            (each.rows, case.k),
            np.concatenate([rows.exact, np.zeros((more, case.k))]),
            values=np.concatenate([codes, codes[-1:].repeat(more, axis=0)]),
            group_scales=rows.arrays["group_scales"],
        )
        scale = np.concatenate([cases.normal((case.rows,), "float32", "row_scale"), np.zeros(more, np.float32)])
        found.append(run(PROMOTED, each, lhs, weights, FP8Current, result, row_scale=scale, **given)[: case.valid])
    asserts.bitwise(found[0], found[1], "rows of groups")


# Codes contracted across their lines: the bits of the same codes contracted along theirs.


@pytest.mark.gpu
@pytest.mark.rule("MAT-2")
@pytest.mark.matrix(
    kernels=((ACROSS, PROMOTED), (PORTABLE, PORTABLE)),
    pair=PAIRS[:3],
    case=(*CASES, MANY, SHORT, cases.Case("even", cases.HEIGHTS, cases.EVEN_ROWS, 304, 208, frozenset())),
    result=cases.DTYPES,
    bias=(None, "bfloat16", "float32"),
    row_scale=(False, True),
    scale_bias=(False, True),
    valid=lambda result, bias, row_scale, scale_bias, **_: (
        (not scale_bias or (bias and row_scale)) and (result != "float16" or bias != "bfloat16")
    ),
)
def test_products_across_lines(kernels, pair, case, result, bias, row_scale, scale_bias):
    case = _whole_lines(case)
    given = {} if bias is None else {"bias": cases.normal((case.groups, case.n), bias, "bias")}
    if row_scale:
        given["row_scale"] = cases.normal((case.rows,), "float32", "row_scale")
        given["row_scale"][case.valid :] = np.nan
    found, wanted = (
        forward(kernel, case, pair, result, scale_bias=scale_bias, turned=turned, **given)
        for kernel, turned in zip(kernels, (True, False), strict=True)
    )
    asserts.bitwise(found, wanted, "result")
    asserts.zero(found[case.valid :], "tail")


@pytest.mark.gpu
@pytest.mark.rule("MAT-2", "GRP-4", "GRP-5", "GRP-6", "GRP-9")
@pytest.mark.parametrize("case", SIZES, ids=str)
@pytest.mark.parametrize("result", ["bfloat16", "float32"])
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("kernels", [(ACROSS, PROMOTED), (PORTABLE, PORTABLE)], ids=["hopper", "portable"])
def test_products_across_lines_of_any_sizes(case, result, into, kernels):
    case = _whole_lines(_whole_rows(case))
    given = {"into": cases.normal((case.rows, case.n), result, "into")} if into else {}
    found, wanted = (
        forward(kernel, case, PAIRS[1], result, turned=turned, **given)
        for kernel, turned in zip(kernels, (True, False), strict=True)
    )
    asserts.bitwise(found, wanted, "result")


@pytest.mark.gpu
@pytest.mark.rule("MAT-2", "MAT-4")
@pytest.mark.parametrize("case", [_whole_lines(TILES), MANY], ids=str)
def test_weights_across_lines_in_a_table(case):
    runner = Native(ACROSS, check=False)
    packed = forward(ACROSS, case, PAIRS[0], "bfloat16", runner=runner)
    lhs, rhs = rows_operand(case, case.k, TENSOR, "x"), across(weight_operand(case, TENSOR))
    held, table = runner.hold(list(rhs.arrays["values"]))
    sizes = np.array(case.sizes, np.int32)
    call = calls.grouped_matmul(
        lhs.spec, rhs.spec, (1, 1), spec_of(sizes), "bfloat16", recipe=FP8Current, tables=(True, False, False)
    )
    given = _by_slot(lhs, rhs, {"group_sizes": sizes, "rhs_table": table})
    given[SLOTS["grouped_matmul"].index("rhs")] = None
    asserts.bitwise(runner(call, given)[0], packed, "result of listed weights")
    assert held


@pytest.mark.gpu
@pytest.mark.rule("MAT-11")
@each_transposed_pair
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("result", cases.DTYPES)
@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradients(pair, case, result, accumulate):
    before = cases.normal((case.groups, case.k, case.n), result, "into")
    found = wgrad(case, pair, result, into=before, accumulate=accumulate)
    for g, span in enumerate(case.spans()):
        if span.start == span.stop:
            asserts.bitwise(found[g], before[g] if accumulate else np.zeros_like(before[g]), f"empty group {g}")


@pytest.mark.gpu
@pytest.mark.rule("MAT-11")
@pytest.mark.parametrize("pair", [TRANSPOSED[0], TRANSPOSED[3]], ids=["tensor", "block"])
@pytest.mark.parametrize("result", ["bfloat16", "float32"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradients_in_many_tiles(pair, result, accumulate):
    wgrad(MANY, pair, result, into=cases.normal((MANY.groups, MANY.k, MANY.n), result, "into"), accumulate=accumulate)


@pytest.mark.gpu
@pytest.mark.rule("MAT-11")
@pytest.mark.parametrize("pair", [TRANSPOSED[0], TRANSPOSED[3]], ids=["tensor", "block"])
def test_additions_to_float32_are_rounded_once(pair):
    """Of long sums L2 adds all, of others some or none."""
    case = cases.ADDED
    before = cases.normal((case.groups, case.k, case.n), "float32", "into")
    sums = wgrad(case, pair, "float32")
    asserts.bitwise(wgrad(case, pair, "float32", into=before, accumulate=True), sums + before)


@pytest.mark.gpu
@pytest.mark.rule("GRP-4", "GRP-5", "GRP-6", "GRP-9")
@pytest.mark.parametrize("case", SIZES, ids=str)
@pytest.mark.parametrize("pair", [TRANSPOSED[0], TRANSPOSED[3]], ids=["tensor", "block"])
def test_weight_gradients_of_any_sizes(case, pair):
    wgrad(_whole_rows(case), pair, "float32")


@pytest.mark.gpu
@pytest.mark.rule("MAT-11", "GRD-10")
@pytest.mark.parametrize("pair", [TRANSPOSED[0], TRANSPOSED[3]], ids=["tensor", "block"])
@pytest.mark.parametrize(("case", "result"), [(TILES, "float32"), (MANY, "bfloat16")], ids=str)
def test_weight_gradients_in_a_table(pair, case, result):
    """The same bits as in one packed accumulator; a group without an address is left out."""
    before = cases.normal((case.groups, case.k, case.n), result, "into")
    packed = wgrad(case, pair, result, into=before, accumulate=True)
    runner = Native(WGRAD, check=False)
    held, table = runner.hold([member if g != 2 else None for g, member in enumerate(before)])
    lhs, rhs = transposed_operand(case, case.k, pair[0], "x"), transposed_operand(case, case.n, pair[1], "dy")
    sizes = np.array(case.sizes, np.int32)
    call = calls.grouped_matmul(
        lhs.spec,
        rhs.spec,
        (0, 0),
        spec_of(sizes),
        result,
        recipe=FP8Block if pair[0].block else FP8Current,
        into=spec_of(before),
        tables=(False, False, True),
        accumulate=True,
    )
    runner(call, _by_slot(lhs, rhs, {"group_sizes": sizes, "into_table": table}))
    for g, member in enumerate(held):
        if member is not None:
            asserts.bitwise(runner.release(member, before.dtype).reshape(before[g].shape), packed[g], f"member {g}")


with_cuda = pytest.mark.skipif(not _native.cuda_compiled, reason="this build has no CUDA kernels")


def _plan(lhs: Operand, rhs: Operand, recipe: Recipe, axes: tuple[int, int] = (1, 1), **options: Any) -> Any:
    sizes = ArraySpec((TILES.groups,), "int32")
    return plans.attempt(
        calls.grouped_matmul(lhs.spec, rhs.spec, axes, sizes, "bfloat16", recipe=recipe, **options), ARCH
    )


@with_cuda
@pytest.mark.rule("MAT-6")
@pytest.mark.parametrize(
    ("pair", "recipe", "kernel"),
    [
        (PAIRS[0], FAST_TENSOR, FAST),
        *((pair, FP8Current, PROMOTED) for pair in PAIRS[:3]),
        (PAIRS[3], FP8Block, PROMOTED),
    ],
)
def test_the_kernel_that_is_planned_for_rows(pair, recipe, kernel):
    plan = _plan(rows_operand(TILES, TILES.k, pair[0], "x"), weight_operand(TILES, pair[1]), recipe)
    assert plan.kernel == kernel, plan.refusals


@with_cuda
@pytest.mark.rule("MAT-2")
@pytest.mark.parametrize("pair", PAIRS[:3], ids=[f"{x.name}-{w.name}" for x, w in PAIRS[:3]])
def test_the_kernel_that_is_planned_across_lines(pair):
    case = _whole_lines(TILES)
    lhs = rows_operand(case, case.k, pair[0], "x")
    plan = _plan(lhs, across(weight_operand(case, pair[1])), FP8Current)
    assert plan.kernel == ACROSS, plan.refusals
    assert plan.aligned_workspace_bytes < 1024
    odd = _plan(rows_operand(TILES, TILES.k, pair[0], "x"), across(weight_operand(TILES, pair[1])), FP8Current)
    assert "N = 456 is no multiple of 16" in dict(odd.refusals)[ACROSS]


@with_cuda
@pytest.mark.rule("MAT-6")
@each_transposed_pair
def test_the_kernel_that_is_planned_for_weight_gradients(pair):
    lhs, rhs = transposed_operand(TILES, TILES.k, pair[0], "x"), transposed_operand(TILES, TILES.n, pair[1], "dy")
    plan = _plan(lhs, rhs, FP8Block if pair[0].block else FP8Current, (0, 0))
    assert plan.kernel == WGRAD, plan.refusals


@with_cuda
@pytest.mark.rule("MAT-6")
def test_rows_that_are_no_whole_16_bytes_are_refused_in_words():
    case = cases.Case("odd", (5, 6), 11, 24, 12, frozenset())
    lhs, rhs = rows_operand(case, case.k, TENSOR, "x"), weight_operand(case, TENSOR)
    sizes = ArraySpec((2,), "int32")
    call = calls.grouped_matmul(lhs.spec, rhs.spec, (1, 1), sizes, "bfloat16", recipe=FP8Current)
    refusals = dict(plans.attempt(call, ARCH).refusals)
    assert "K = 24 is no multiple of 16" in refusals[PROMOTED]
    assert (
        "never promotes"
        in dict(_plan(rows_operand(TILES, TILES.k, TENSOR, "x"), weight_operand(TILES, TENSOR), FP8Current).refusals)[
            FAST
        ]
    )
