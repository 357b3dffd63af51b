"""Every kernel of grouped_matmul on quantised operands, against the fp64 product of their dequantised values."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from grouped_core import calls, plans, rounding
from grouped_core.activations import Activation
from grouped_core.calls import Call, spec_of
from grouped_core.formats import FORMATS, Format, QTensor
from grouped_core.products import arranged
from grouped_core.recipes import BF16
from tests import asserts, cases
from tests.native.quantized_operands import Operand, operand, sizes_of, spec
from tests.native.runner import Native, kernels

each_kernel = pytest.mark.parametrize("kernel", kernels("grouped_matmul"))

# (lhs, rhs) of products whose rows are ragged, and of contractions over rows.
ROWS = (
    ("fp8_tensor", "fp8_tensor"),
    ("fp8_tensor_e5m2", "fp8_tensor"),
    ("fp8_1x128", "fp8_128x128"),
    ("fp8_1x128_e5m2", "fp8_128x128"),
    ("mxfp8", "mxfp8"),
    ("mxfp8_e5m2", "mxfp8_2d"),
    ("mxfp8", "mxfp4"),
    ("nvfp4", "nvfp4"),
    ("nvfp4", "nvfp4_2d"),
    ("fp8_tensor", "bf16"),
    ("fp8_1x128", "fp16"),
    ("mxfp8", "bf16"),
    ("nvfp4", "fp32"),
)
WEIGHTS = ("fp8_tensor", "fp8_1x128", "fp8_128x128", "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4", "nvfp4_2d")
WEIGHT_ONLY = (
    *(("bf16", weight) for weight in WEIGHTS),
    *(("fp16", weight) for weight in ("fp8_tensor", "mxfp8", "nvfp4")),
    *(("fp32", weight) for weight in ("fp8_128x128", "mxfp4")),
)
CONTRACTED = (
    ("fp8_tensor", "fp8_tensor_e5m2"),
    ("fp8_1x128", "fp8_1x128"),
    ("fp8_1x128", "fp8_1x128_e5m2"),
    ("mxfp8", "mxfp8"),
    ("mxfp8", "mxfp8_e5m2"),
    ("nvfp4", "nvfp4"),
)
# Several blocks of every length along each axis, several tiles, nothing aligned; then with rows of whole 16 bytes.
LONG = cases.Case("long", (150, 0, 61, 301), 530, 300, 277, frozenset())
ALIGNED = cases.Case("long_16", (150, 0, 61, 301), 530, 320, 288, frozenset())
# Few rows per group, every height of a tile of the kernel for few rows, and some with more than one takes; columns no
# whole tiles, depth neither, lines of scales that start anywhere, then at whole words; then as few rows as take the
# longest stages: an odd number of halves of these, lines at multiples of 4 and of 8 bytes, more tiles than blocks.
FEW = tuple(
    cases.Case(f"few_{i}", sizes, sum(sizes) + 3, k, n, frozenset())
    for i, (sizes, k, n) in enumerate(
        (
            *(((3, 0, 45, 9, 26), 416, 296), ((70, 0, 30, 20), 416, 296), ((150, 1, 0, 60), 416, 296)),
            *(((12, 40, 90), 512, 296), ((12, 3, 20), 1152, 296), ((5, 17, 0, 11), 1280, 296), ((1,) * 150, 288, 296)),
            # 256 columns per tile, because 120 of them are done at once and 180 of 192 are not.
            *(((5, 17, 0, 11) * 15, 288, 400), ((5, 17, 0, 11) * 15, 512, 400)),
            # Whole lines of scales, which stages share.
            *(((9, 4, 21), 1536, 296), ((30, 25), 1024, 296)),
        )
    )
)
CASES = (LONG, ALIGNED, *(cases.named(name) for name in ("tail", "idle_ends", "clamped", "k_n_odd")))


def call_of(
    lhs: Operand, rhs: Operand, sizes: NDArray[Any], axes: tuple[int, int], result: str, **options: Any
) -> Call:
    specs = {name: spec_of(a) for name, a in options.items() if isinstance(a, np.ndarray)}
    flags = {name: value for name, value in options.items() if name not in specs and value is not None}
    return calls.grouped_matmul(spec(lhs), spec(rhs), axes, spec_of(sizes), result, recipe=BF16, **specs, **flags)


def product(
    run: Native, lhs: Operand, rhs: Operand, sizes: NDArray[Any], axes: tuple[int, int], result: str, **options: Any
) -> NDArray[Any]:
    call = call_of(lhs, rhs, sizes, axes, result, **options)
    arrays = {name: a for name, a in options.items() if isinstance(a, np.ndarray)}
    return run(call, arranged(call, lhs=lhs, rhs=rhs, group_sizes=sizes, **arrays))[0]


def rows_operands(formats: tuple[str, str], case: cases.Case) -> tuple[Operand, Operand]:
    sizes = sizes_of(case)
    lhs = operand(formats[0], (case.rows, case.k), 1, sizes, "x")
    rhs = operand(formats[1], (case.groups, case.n, case.k), 2, sizes, "w")
    return lhs, rhs


def contracted_operands(formats: tuple[str, str], case: cases.Case) -> tuple[Operand, Operand]:
    sizes = sizes_of(case)
    lhs = operand(formats[0], (case.rows, case.k), 0, sizes, "x")
    return lhs, operand(formats[1], (case.rows, case.n), 0, sizes, "dy")


def has_row_scale(bias: str | None, row_scale: bool, scale_bias: bool, **_: Any) -> bool:
    return not scale_bias or (bias is not None and row_scale)


EPILOGUES: dict[str, Any] = {
    "bias": (None, *cases.DTYPES),
    "row_scale": (False, True),
    "scale_bias": (False, True),
    "result": cases.DTYPES,
    "valid": has_row_scale,
}


def rows_product(
    kernel: str,
    formats: tuple[str, str],
    case: cases.Case,
    bias: str | None,
    row_scale: bool,
    scale_bias: bool,
    result: str,
) -> None:
    lhs, rhs = rows_operands(formats, case)
    scale = cases.normal((case.rows,), "float32", "row_scale")
    scale[case.valid :] = cases.TAIL
    options: dict[str, Any] = {
        "bias": None if bias is None else cases.normal((case.groups, case.n), bias, "bias"),
        "row_scale": scale if row_scale else None,
        "scale_bias": scale_bias,
    }
    found = product(Native(kernel), lhs, rhs, sizes_of(case), (1, 2), result, **options)
    asserts.zero(found[case.valid :], "tail")


@pytest.mark.rule("QNT-1", "GRP-4", "GRP-5", "GRP-6", "MAT-8", "MAT-9")
@pytest.mark.matrix(kernel=kernels("grouped_matmul"), formats=(*ROWS, *WEIGHT_ONLY), case=CASES, **EPILOGUES)
def test_rows(kernel, formats, case, bias, row_scale, scale_bias, result):
    rows_product(kernel, formats, case, bias, row_scale, scale_bias, result)


@pytest.mark.rule("QNT-1", "GRP-4", "GRP-5", "GRP-6", "MAT-8", "MAT-9")
@pytest.mark.matrix(
    kernel=kernels("grouped_matmul"), formats=tuple(("bf16", weight) for weight in WEIGHTS), case=FEW, **EPILOGUES
)
def test_few_rows(kernel, formats, case, bias, row_scale, scale_bias, result):
    rows_product(kernel, formats, case, bias, row_scale, scale_bias, result)


@pytest.mark.rule("QNT-1", "GRP-4", "GRP-5", "MAT-11")
@pytest.mark.matrix(
    kernel=kernels("grouped_matmul"),
    formats=CONTRACTED,
    case=CASES,
    result=cases.DTYPES,
    accumulate=(False, True),
)
def test_contractions(kernel, formats, case, result, accumulate):
    lhs, rhs = contracted_operands(formats, case)
    into = cases.normal((case.groups, case.k, case.n), result, "into") if accumulate else None
    options: dict[str, Any] = {"into": into, "accumulate": accumulate}
    found = product(Native(kernel), lhs, rhs, sizes_of(case), (0, 0), result, **options)
    for g, span in enumerate(case.spans()):
        if span.start == span.stop and into is not None:
            asserts.bitwise(found[g], into[g], f"accumulator of empty group {g}")
        elif span.start == span.stop:
            asserts.zero(found[g], f"gradient of empty group {g}")


DEPTH = 160
"""Of products of single codes: more than one stage of any kernel, whole blocks of all lengths that the test has."""
ONE = {"uint8": 2, "float8_e4m3fn": 0x38, "float8_e5m2": 0x3C, "float8_e8m0fnu": 127}
"""The code of 1."""


def first_column(format: Format, codes: NDArray[np.uint8]) -> QTensor[NDArray[Any]]:
    """[codes, C] rows, or [1, 8, C] weights, with the codes in the first column, zeros beside it and all scales 1."""
    depth = DEPTH
    wide = np.zeros((*codes.shape, depth), np.uint8)
    wide[..., 0] = codes
    values = rounding.pack(wide) if format.values == "uint8" else wide.view(cases.numpy_dtype(format.values))
    scales = None
    if format.scales:
        scales = np.full((*codes.shape, DEPTH // format.block), ONE[format.scales], np.uint8).view(
            cases.numpy_dtype(format.scales)
        )
    factors = np.ones(1, np.float32) if format.rule == "nvfp4" or not format.block else None
    return QTensor(values, scales, factors, format, codes.ndim, (*codes.shape, depth), "bfloat16")


@pytest.mark.rule("QNT-1", "ALL-6")
@each_kernel
@pytest.mark.parametrize(
    ("name", "side"),
    [(name, "rhs") for name in ("fp8_tensor", "fp8_tensor_e5m2", "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4")]
    + [(name, "lhs") for name in ("fp8_tensor", "fp8_tensor_e5m2", "mxfp8", "mxfp8_e5m2", "nvfp4")],
)
def test_every_code_alone(kernel, name, side):
    """Against a one: the result is the value of the code, NaN and infinity included."""
    format = FORMATS[name]
    codes = np.arange(16 if format.values == "uint8" else 256, dtype=np.uint8)
    expected = rounding.decode(codes, "float4_e2m1fn" if format.values == "uint8" else format.values)
    run = Native(kernel, check=False)
    if side == "rhs":
        ones = np.zeros((8, DEPTH), cases.numpy_dtype("bfloat16"))
        ones[:, 0] = 1
        found = product(run, ones, first_column(format, codes[None]), sizes_of_one(8), (1, 2), "float32")[0]
    else:
        weight = first_column(format, np.full((1, 8), ONE[format.values], np.uint8))
        lhs = first_column(format, codes)
        found = product(run, lhs, weight, sizes_of_one(len(codes)), (1, 2), "float32")[:, 0]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.rule("QNT-1", "ALL-6")
@each_kernel
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4"])
def test_every_scale_alone(kernel, name):
    """Of a one, against a one: the result is the value of the scale, however large or small."""
    format = FORMATS[name]
    codes = np.arange(8, 120, dtype=np.uint8) if name == "nvfp4" else np.arange(4, 252, dtype=np.uint8)
    weight = first_column(format, np.full((1, len(codes)), ONE[format.values], np.uint8))
    assert weight.scales is not None
    weight.scales.view(np.uint8)[0] = codes[:, None]
    ones = np.zeros((8, DEPTH), cases.numpy_dtype("bfloat16"))
    ones[:, 0] = 1
    found = product(Native(kernel, check=False), ones, weight, sizes_of_one(8), (1, 2), "float32")[0]
    expected = rounding.decode(codes, format.scales) if name == "nvfp4" else np.exp2(codes.astype(np.float32) - 127)
    np.testing.assert_array_equal(found, expected)


def sizes_of_one(rows: int) -> NDArray[np.int32]:
    return np.array([rows], np.int32)


@pytest.mark.rule("QNT-1", "ALL-6")
@each_kernel
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_a_scale_of_nan_is_a_block_of_nan(kernel, name):
    case = FEW[0]
    lhs, rhs = rows_operands(("bf16", name), case)
    assert isinstance(rhs, QTensor)
    assert rhs.scales is not None
    run = Native(kernel, check=False)
    good = product(run, lhs, rhs, sizes_of(case), (1, 2), "bfloat16")
    rhs.scales.view(np.uint8)[2, 5] = 0xFF if name != "nvfp4" else 0x7F
    found = product(run, lhs, rhs, sizes_of(case), (1, 2), "bfloat16")
    span = list(case.spans())[2]
    assert np.isnan(found[span, 5].astype(np.float32)).all()
    found[span, 5] = good[span, 5]
    asserts.bitwise(found, good)


@pytest.mark.rule("QNT-1", "ALL-6")
@pytest.mark.matrix(kernel=kernels("grouped_matmul"), name=("mxfp8", "mxfp4"))
def test_large_scales_leave_other_columns_alone(kernel, name):
    """Among stages of small ones, whose bits must not depend on how the others are multiplied."""
    case = FEW[4]
    lhs, rhs = rows_operands(("bf16", name), case)
    assert isinstance(rhs, QTensor)
    assert rhs.scales is not None
    good = product(Native(kernel), lhs, rhs, sizes_of(case), (1, 2), "float32")
    scales = rhs.scales.view(np.uint8)[2, 5]
    scales[[9, 25, 26]] = 131  # 16, in the second and the fourth 256 of 1152 k
    found = product(Native(kernel), lhs, rhs, sizes_of(case), (1, 2), "float32")
    span = list(case.spans())[2]
    assert (found[span, 5] != good[span, 5]).all()
    found[span, 5] = good[span, 5]
    asserts.bitwise(found, good)


@pytest.mark.rule("ALL-2", "MAT-7")
@pytest.mark.matrix(
    kernel=kernels("grouped_matmul"),
    formats=(("fp8_1x128", "fp8_128x128"), ("mxfp8", "mxfp8"), ("bf16", "nvfp4")),
)
def test_the_same_bits_twice_and_at_any_address(kernel, formats):
    case = FEW[1] if "_weight_only_" in kernel else LONG
    lhs, rhs = rows_operands(formats, case)
    first = product(Native(kernel), lhs, rhs, sizes_of(case), (1, 2), "bfloat16")
    others = [Native(kernel), Native(kernel, check=False, dlpack=True)]
    if "_sm90" not in kernel:  # pinned, these want aligned addresses
        others.append(Native(kernel, unaligned=True))
    for run in others:
        asserts.bitwise(product(run, lhs, rhs, sizes_of(case), (1, 2), "bfloat16"), first)


@pytest.mark.rule("GRP-7")
@each_kernel
@pytest.mark.parametrize("formats", [("fp8_tensor", "fp8_tensor"), ("mxfp8", "mxfp8"), ("bf16", "nvfp4")])
def test_tails_of_a_callers_buffer_are_left_alone(kernel, formats):
    case = FEW[0]
    lhs, rhs = rows_operands(formats, case)
    buffer = np.full((case.rows, case.n), cases.SENTINEL, cases.numpy_dtype("bfloat16"))
    found = product(Native(kernel), lhs, rhs, sizes_of(case), (1, 2), "bfloat16", into=buffer)
    asserts.filled(found[case.valid :], cases.SENTINEL, "tail")


@pytest.mark.rule("MAT-3", "ERR-1")
@pytest.mark.parametrize("formats", [("fp8_tensor", "fp8_tensor"), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4")])
def test_two_arrays_and_halves_of_columns_are_refused(formats):
    case = cases.named("jagged")
    lhs, rhs = rows_operands(formats, case)
    sizes, act = spec_of(sizes_of(case)), {"activation": Activation("swiglu"), "recipe": BF16}
    for whole in (
        call_of(lhs, rhs, sizes_of(case), (1, 2), "bfloat16"),
        calls.grouped_matmul_act(spec(lhs), spec(rhs), 2, sizes, "bfloat16", **act),
    ):
        inputs = list(whole.inputs)
        inputs[whole.slot("rhs_up")] = inputs[whole.slot("rhs")]
        with asserts.refused(ValueError, ["`rhs_up`", "none beside quantised operands", "pass one array"]):
            plans.attempt(dataclasses.replace(whole, inputs=tuple(inputs)), "cpu")
    half_made = calls.grouped_matmul(spec(lhs), spec(rhs), (1, 2), sizes, "bfloat16", recipe=BF16, result_half=1)
    with asserts.refused(ValueError, ["result_half", "0 beside quantised operands", "pass one array"]):
        plans.attempt(half_made, "cpu")
    lhs, rhs = contracted_operands(formats, case)
    whole = call_of(lhs, rhs, sizes_of(case), (0, 0), "bfloat16")
    for half in ("lhs_half", "rhs_half"):
        params = tuple({**dict(whole.params), half: 1}.items())
        with asserts.refused(ValueError, ["lhs_half, rhs_half", "0 beside quantised operands", "pass one array"]):
            plans.attempt(dataclasses.replace(whole, params=params), "cpu")


@pytest.mark.rule("QNT-1", "MLP-1", "MLP-2")
@pytest.mark.parametrize("kernel", [*kernels("grouped_matmul_act"), *kernels("grouped_matmul_dact")])
@pytest.mark.parametrize(
    "formats", [("fp8_1x128", "fp8_128x128"), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4_2d"), ("bf16", "mxfp4")]
)
@pytest.mark.parametrize("case", [cases.named("jagged"), ALIGNED, FEW[0]], ids=str)
def test_activations(kernel, formats, case):
    """After a product of quantised operands, and their gradients; the rows between are bfloat16."""
    activation = Activation("swiglu")
    sizes = sizes_of(case)
    lhs = operand(formats[0], (case.rows, case.k), 1, sizes, "x")
    grad = "_dact_" in kernel
    width = case.n if grad else 2 * case.n
    rhs = operand(formats[1], (case.groups, width, case.k), 2, sizes, "w")
    scale = cases.normal((case.rows,), "float32", "row_scale")
    options: dict[str, Any] = {"activation": activation, "recipe": BF16, "row_scale": spec_of(scale)}
    arrays: dict[str, Any] = {"lhs": lhs, "rhs": rhs, "group_sizes": sizes, "row_scale": scale}
    if grad:
        hidden = cases.normal((case.rows, 2 * case.n), "bfloat16", "hidden")
        arrays["hidden"] = hidden
        call = calls.grouped_matmul_dact(
            *(spec(lhs), spec(rhs), 2, spec_of(sizes), spec_of(hidden), "bfloat16"),
            wanted=(True, True, True),
            **options,
        )
    else:
        call = calls.grouped_matmul_act(spec(lhs), spec(rhs), 2, spec_of(sizes), "bfloat16", **options)
    for result, wanted in zip(Native(kernel)(call, arranged(call, **arrays)), call.outputs, strict=True):
        if wanted is not None:
            asserts.zero(result[case.valid :], "tail")
