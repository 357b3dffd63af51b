"""Every kernel that takes a low-rank product beside its own, against the fp64 oracle, against itself, and refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from grouped_core import _native, calls, plans
from grouped_core.activations import Activation
from grouped_core.calls import ArraySpec, LowRank, QuantizedResult, spec_of
from grouped_core.formats import FORMATS, QTensor
from grouped_core.products import arranged
from grouped_core.recipes import BF16, FP32_MODES, plain
from tests import asserts, cases
from tests.native.low_rank_tools import Low, fused_of, low_of, product
from tests.native.quantized_operands import Operand, operand, sizes_of
from tests.native.runner import LOW, Native, kernels, plain_kernels, takes_low

each_kernel = pytest.mark.parametrize("kernel", kernels("grouped_matmul", low=True))
FUSED_CALLS = ("grouped_matmul_act", "grouped_matmul_dact")
each_fused_kernel = pytest.mark.parametrize("kernel", [k for call in FUSED_CALLS for k in kernels(call, low=True)])
each_storing_kernel = pytest.mark.parametrize(
    "kernel", [k for call in FUSED_CALLS for k in kernels(call, quantized=True)]
)
RANKS = (1, 4, 8, 16, 24, 64, 256)
SMALL = [case for case in cases.select("small") if case.k <= 40]
# Several tiles in each direction, with rows of whole 16 bytes and without.
TILES = cases.Case("tiles", (150, 0, 301, 61), 540, 131, 277, frozenset())
ALIGNED = cases.Case("tiles_16", (150, 0, 301, 61), 540, 136, 280, frozenset())
# In a buffer with so many rows per group that Hopper's tiles have 128 rows.
ROOMY = cases.Case("tiles_16_roomy", (150, 0, 301, 61), 1000, 136, 280, frozenset())
# Products of few columns, which fast kernels have a tile for.
NARROW = tuple(cases.Case(f"n_{n}", (150, 0, 33, 61), 270, 136, n, frozenset()) for n in (8, 16, 40, 64))


def operands(case: cases.Case, dtype: str, axis: int) -> tuple[Any, Any]:
    p = cases.problem(case, dtype, transposed=axis == 2)
    return p.x, p.w


def scale_of(case: cases.Case) -> np.ndarray:
    scale = cases.normal((case.rows,), "float32", "row_scale")
    scale[case.valid :] = cases.TAIL
    return scale


@pytest.mark.rule("LOR-1", "GRP-4", "GRP-5", "GRP-6", "GRP-9", "MAT-7", "MAT-8", "MAT-9")
@pytest.mark.matrix(
    kernel=kernels("grouped_matmul", low=True),
    case=(*SMALL, TILES, ALIGNED, ROOMY, *NARROW),
    dtype=cases.DTYPES,
    axis=(1, 2),
    low_axis=(1, 2),
    rank=RANKS,
    bias=(None, *cases.DTYPES),
    row_scale=(False, True),
    scale_bias=(False, True),
    result=cases.DTYPES,
    into=(False, True),
    valid=lambda bias, row_scale, scale_bias, **_: not scale_bias or (bias is not None and row_scale),
)
def test_products(kernel, case, dtype, axis, low_axis, rank, bias, row_scale, scale_bias, result, into):
    lhs, rhs = operands(case, dtype, axis)
    low = low_of(case, case.n, rank, low_axis, dtype)
    buffer = np.full((case.rows, case.n), cases.SENTINEL, cases.numpy_dtype(result))
    options: dict[str, Any] = {
        "bias": None if bias is None else cases.normal((case.groups, case.n), bias, "bias"),
        "row_scale": scale_of(case) if row_scale else None,
        "scale_bias": scale_bias,
        "into": buffer if into else None,
    }
    found = product(Native(kernel), case, lhs, rhs, axis, result, low, **options)
    if into:
        asserts.filled(found[case.valid :], cases.SENTINEL, "tail")
    else:
        asserts.zero(found[case.valid :], "tail")


@pytest.mark.rule("LOR-1")
@pytest.mark.matrix(
    kernel=kernels("grouped_matmul", low=True),
    mode=FP32_MODES,
    case=(ALIGNED, NARROW[1]),
    rank=(4, 16),
    invariant=(False, True),
)
def test_modes_of_fp32(kernel, mode, case, rank, invariant):
    lhs, rhs = operands(case, "float32", 1)
    recipe = plain("float32").replace(fp32=mode, batch_invariant=invariant)
    product(Native(kernel), case, lhs, rhs, 1, "float32", low_of(case, case.n, rank, 1, "float32"), recipe=recipe)


CODES = ("fp8_tensor", "fp8_128x128", "mxfp8", "mxfp4", "nvfp4", "nvfp4_2d")
BESIDE_CODES = (
    *(("bf16", name) for name in CODES),
    *(("fp32", name) for name in ("fp8_128x128", "mxfp4")),
    *(("fp8_1x128", "fp8_128x128"), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("fp8_tensor", "fp8_tensor")),
)


def of_formats(formats: tuple[str, str], case: cases.Case, axis: int, width: int) -> tuple[Operand, Operand]:
    """Rows and a weight that is stored along its last axis, contracted along `axis`."""
    sizes = sizes_of(case)
    shape = (case.groups, case.k, width) if axis == 1 else (case.groups, width, case.k)
    return operand(formats[0], (case.rows, case.k), 1, sizes, "x"), operand(formats[1], shape, 2, sizes, "w")


@pytest.mark.rule("LOR-1", "LOR-2", "QNT-1", "GRP-6")
@pytest.mark.matrix(
    kernel=kernels("grouped_matmul", low=True),
    formats=BESIDE_CODES,
    case=(ALIGNED, TILES, NARROW[2], *(cases.named(name) for name in ("tail", "idle_ends", "clamped", "k_n_odd"))),
    low_axis=(1, 2),
    rank=(1, 8, 16, 64),
    row_scale=(False, True),
    result=cases.DTYPES,
)
def test_products_of_codes(kernel, formats, case, low_axis, rank, row_scale, result):
    lhs, rhs = of_formats(formats, case, 2, case.n)
    low = low_of(case, case.n, rank, low_axis, "float32" if formats[0] == "fp32" else "bfloat16")
    scale = scale_of(case) if row_scale else None
    found = product(Native(kernel), case, lhs, rhs, 2, result, low, row_scale=scale)
    asserts.zero(found[case.valid :], "tail")


EITHER_AXIS = ("mxfp8", "mxfp4", "nvfp4", "nvfp4_2d", "fp8_128x128", "fp8_1x128")
ODD = cases.Case("odd", (9, 0, 14), 30, 37, 53, frozenset())
BLOCKS = cases.Case("blocks", (40, 0, 75), 120, 72, 160, frozenset())


@pytest.mark.rule("LOR-2", "QNT-1")
@pytest.mark.matrix(
    kernel=kernels("grouped_matmul", low=None),
    format=EITHER_AXIS,
    rows=("bf16", "fp16", "fp32"),
    case=(ODD, BLOCKS, ALIGNED),
    result=cases.DTYPES,
    rank=(0, 4, 16),
)
def test_codes_contracted_along_the_axis_that_they_were_not_made_for(kernel, format, rows, case, result, rank):
    """The values of the one stored form; two codes per byte follow the columns, whose number may be odd."""
    if "_low_" in kernel:
        rank = rank or 1
    elif not takes_low(kernel):
        rank = 0
    lhs, rhs = of_formats((rows, format), case, 1, case.n)
    low = low_of(case, case.n, rank, 1, FORMATS[rows].values) if rank else None
    found = product(Native(kernel), case, lhs, rhs, 1, result, low)
    asserts.zero(found[case.valid :], "tail")


KINDS = ("swiglu", "relu", "gelu_tanh", "clamped_qgeglu")


@pytest.mark.rule("LOR-1", "MLP-1", "MLP-2", "GRP-6")
@each_fused_kernel
@pytest.mark.matrix(
    case=(*SMALL[::2], ALIGNED, NARROW[0], NARROW[3]),
    kind=KINDS,
    dtype=cases.DTYPES,
    axis=(1, 2),
    low_axis=(1, 2),
    rank=RANKS,
    result=cases.DTYPES,
)
def test_activations(kernel, case, kind, dtype, axis, low_axis, rank, result):
    grad = "_dact_" in kernel
    width = case.n if grad else Activation(kind).fc1_width(case.n)
    lhs, rhs = operands(dataclasses.replace(case, n=width), dtype, axis)
    low = low_of(case, width, rank, low_axis, dtype)
    for found in fused_of(case, kind, lhs, rhs, axis, dtype, grad=grad).run(Native(kernel), result, low):
        if found is not None:
            asserts.zero(found[case.valid :], "tail")


@pytest.mark.rule("LOR-1", "LOR-2", "QNT-1")
@each_fused_kernel
@pytest.mark.matrix(
    formats=(("bf16", "mxfp4"), ("bf16", "nvfp4"), ("mxfp8", "mxfp8"), ("fp8_1x128", "fp8_128x128")),
    case=(cases.named("jagged"), ALIGNED, NARROW[1]),
    kind=("swiglu", "relu"),
    rank=(4, 16),
    low_axis=(1, 2),
)
def test_activations_of_codes(kernel, formats, case, kind, rank, low_axis):
    grad = "_dact_" in kernel
    width = case.n if grad else Activation(kind).fc1_width(case.n)
    lhs, rhs = of_formats(formats, case, 2, width)
    low = low_of(case, width, rank, low_axis, "bfloat16")
    fused_of(case, kind, lhs, rhs, 2, "bfloat16", grad=grad).run(Native(kernel), "bfloat16", low)


@pytest.mark.rule("LOR-2", "QNT-1", "MLP-2")
@pytest.mark.matrix(
    kernel=kernels("grouped_matmul_dact"),
    format=("mxfp8", "mxfp4", "nvfp4", "nvfp4_2d", "fp8_128x128"),
    case=(ODD, BLOCKS, ALIGNED),
    kind=("swiglu", "relu"),
    dtype=("bfloat16", "float32"),
    rank=(0, 4, 16),
)
def test_gradients_through_codes_along_either_axis(kernel, format, case, kind, dtype, rank):
    """dz reads the form of W that forward contracts along F, and that which it contracts along K, with any F."""
    low = low_of(case, case.n, rank, 1, dtype) if rank else None
    for axis in (1, 2):
        lhs, rhs = of_formats(("bf16" if dtype == "bfloat16" else "fp32", format), case, axis, case.n)
        found = fused_of(case, kind, lhs, rhs, axis, dtype, grad=True).run(Native(kernel), dtype, low)
        for each in found[:3]:
            asserts.zero(each[case.valid :], "tail")


@pytest.mark.rule("LOR-1", "QNT-1")
@each_storing_kernel
@pytest.mark.matrix(
    format=("fp8_tensor", "mxfp8", "nvfp4"), base=("bf16", "mxfp8"), rank=(4, 16), case=(BLOCKS, cases.named("uniform"))
)
def test_quantised_results(kernel, format, base, rank, case):
    """The bits of the plain call with the same low-rank product, and of the quantiser."""
    grad = "_dact_" in kernel
    width = case.n if grad else 2 * case.n
    lhs, rhs = of_formats((base, base), case, 2, width)
    low = low_of(case, width, rank, 2, "bfloat16")
    fused = fused_of(case, "swiglu", lhs, rhs, 2, "bfloat16", grad=grad)
    wanted = QuantizedResult(FORMATS[format], (True, bool(FORMATS[format].segment)))
    more: dict[str, Any] = {"wanted": (False, False, False)} if grad else {"hidden": False}
    call = fused.call("bfloat16", low, quantized=wanted, **more)
    named = {**fused.arrays(), "low_lhs": low.rows, "low_rhs": low.weight}
    stored = dict(
        zip(calls.RESULTS[call.name], Native(kernel, check=False)(call, arranged(call, **named)), strict=True)
    )
    rows = fused.run(Native(plain_kernels(call.name, kernel)), "bfloat16", low)[0]
    quantise = calls.quantize(spec_of(rows), wanted.format, wanted.forms, spec_of(sizes_of(case)))
    device = "cpu" if "_cpu" in kernel else "cuda"
    forms = Native(f"quantize_any_{device}", check=False)(
        quantise, quantise.arrange(source=rows, group_sizes=sizes_of(case))
    )
    for name, form in zip(calls.RESULTS["quantize"], forms, strict=True):
        if form is not None:
            asserts.bitwise(stored[name], form, name)


@pytest.mark.rule("LOR-1", "LOR-4", "MAT-3", "ALL-2")
@pytest.mark.matrix(
    kernel=kernels("grouped_matmul", low=True),
    case=(ALIGNED, ROOMY, cases.named("tail")),
    dtype=cases.DTYPES,
    axis=(1, 2),
    rank=(4, 16),
)
def test_tables_any_address_and_both_entries_give_the_same_bits(kernel, case, dtype, axis, rank):
    lhs, rhs = operands(case, dtype, axis)
    low, run = low_of(case, case.n, rank, axis, dtype), Native(kernel)
    first = product(run, case, lhs, rhs, axis, dtype, low)
    asserts.bitwise(product(run, case, lhs, rhs, axis, dtype, low), first, "twice")
    by_dlpack = Native(kernel, check=False, dlpack=True)
    asserts.bitwise(product(by_dlpack, case, lhs, rhs, axis, dtype, low), first, "by way of DLPack")
    aligned_alone = kernel.endswith("_sm90")
    if not aligned_alone:
        anywhere = product(Native(kernel, unaligned=True), case, lhs, rhs, axis, dtype, low)
        # Of the products in a composed call, those of float32 may run on a kernel that wants aligned addresses, whose
        # sums are split into other parts; `Native` holds them against the oracle.
        if dtype != "float32" or not kernel.endswith("_composed_cuda"):
            asserts.bitwise(anywhere, first, "any address")
    members, table = run.hold(list(low.weight), unaligned=() if aligned_alone else (1,))
    listed = product(run, case, lhs, rhs, axis, dtype, low, table=table, aligned_tables=aligned_alone)
    if dtype != "float32" or not kernel.endswith("_composed_cuda"):
        asserts.bitwise(listed, first, "listed low-rank weights")
    assert len(members) == case.groups  # alive until here


@pytest.mark.rule("LOR-1", "ALL-2")
@each_fused_kernel
@pytest.mark.parametrize("rank", [4, 16])
def test_listed_factors_behind_activations(kernel, rank):
    case, grad = ALIGNED, "_dact_" in kernel
    width = case.n if grad else 2 * case.n
    lhs, rhs = operands(dataclasses.replace(case, n=width), "bfloat16", 1)
    if kernel.endswith("_widened_cuda"):
        lhs, rhs = of_formats(("mxfp8", "mxfp8"), case, 2, width)
    axis = 2 if isinstance(rhs, QTensor) else 1
    low, run = low_of(case, width, rank, 1, "bfloat16"), Native(kernel)
    fused = fused_of(case, "swiglu", lhs, rhs, axis, "bfloat16", grad=grad)
    members, table = run.hold(list(low.weight))
    first = fused.run(run, "bfloat16", low)
    for a, b in zip(fused.run(run, "bfloat16", low, table=table), first, strict=True):
        if b is not None:
            asserts.bitwise(a, b)
    assert len(members) == case.groups  # alive until here


@pytest.mark.rule("LOR-1")
@each_kernel
@pytest.mark.parametrize("axis", [1, 2])
def test_a_rank_may_exceed_the_depth_of_the_other_product(kernel, axis):
    lhs, rhs = operands(ALIGNED, "bfloat16", axis)
    low = low_of(ALIGNED, ALIGNED.n, 256, axis, "bfloat16")
    assert low.rows.shape[1] > ALIGNED.k
    product(Native(kernel), ALIGNED, lhs, rhs, axis, "bfloat16", low)


@pytest.mark.rule("LOR-1", "LOR-2", "QNT-1")
@each_kernel
@pytest.mark.parametrize("result", cases.DTYPES)
@pytest.mark.parametrize("formats", [("bf16", "nvfp4"), ("bf16", "fp8_tensor"), ("nvfp4", "nvfp4")])
def test_scales_of_groups_do_not_reach_the_low_rank_product(kernel, formats, result):
    """Weights and factors are stored the same way, so that kernels which add both in one sum may take them."""
    lhs, rhs = of_formats(formats, ALIGNED, 2, ALIGNED.n)
    product(Native(kernel), ALIGNED, lhs, rhs, 2, result, low_of(ALIGNED, ALIGNED.n, 16, 2, "bfloat16"))


@pytest.mark.rule("LOR-1")
@each_kernel
@pytest.mark.parametrize("rank", [4, 16])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_factors_of_zero_change_no_bit(kernel, rank, dtype):
    """B is zero in step 0; and rows of zero, which an expert without an adapter has."""
    lhs, rhs = operands(ALIGNED, dtype, 1)
    low = low_of(ALIGNED, ALIGNED.n, rank, 1, dtype)
    bias, scale = cases.normal((ALIGNED.groups, ALIGNED.n), dtype, "bias"), scale_of(ALIGNED)
    options: dict[str, Any] = {"bias": bias, "row_scale": scale}
    base = Native(kernel.replace(LOW, "_dispatched_"))  # a name of none: dispatch chooses
    expected = product(base, ALIGNED, lhs, rhs, 1, dtype, None, **options)
    for zero in (low._replace(weight=np.zeros_like(low.weight)), low._replace(rows=np.zeros_like(low.rows))):
        found = product(Native(kernel), ALIGNED, lhs, rhs, 1, dtype, zero, **options)
        asserts.bitwise(found[: ALIGNED.valid], expected[: ALIGNED.valid])


@pytest.mark.rule("ALL-6", "GRP-5")
@each_kernel
@pytest.mark.parametrize("rank", [4, 16])
def test_bad_rows_and_factors_stay_where_they_are(kernel, rank):
    lhs, rhs = operands(ALIGNED, "bfloat16", 1)
    low, run = low_of(ALIGNED, ALIGNED.n, rank, 1, "bfloat16"), Native(kernel, check=False)
    good = product(run, ALIGNED, lhs, rhs, 1, "bfloat16", low)
    row = ALIGNED.ends[0]  # the first of group 2, since group 1 is empty
    rows, weight = low.rows.copy(), low.weight.copy()
    rows[row] = np.nan
    found = product(run, ALIGNED, lhs, rhs, 1, "bfloat16", low._replace(rows=rows))
    others = np.arange(ALIGNED.rows) != row
    asserts.bitwise(found[others], good[others], "rows")
    assert np.isnan(found[row].astype(np.float32)).all()
    weight[2] = np.nan
    found = product(run, ALIGNED, lhs, rhs, 1, "bfloat16", low._replace(weight=weight))
    span = list(ALIGNED.spans())[2]
    others = ~np.isin(np.arange(ALIGNED.rows), np.arange(span.start, span.stop))
    asserts.bitwise(found[others], good[others], "groups")
    assert np.isnan(found[span].astype(np.float32)).all()


@pytest.mark.rule("ALL-7")
@each_kernel
@pytest.mark.parametrize("rank", [4, 16])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_a_row_depends_on_itself_alone(kernel, rank, dtype):
    case = cases.Case("invariant", (36, 20), 56, 136, 72, frozenset())
    lhs, rhs = operands(case, dtype, 1)
    low, run = low_of(case, case.n, rank, 1, dtype), Native(kernel)
    recipe = plain(dtype).replace(batch_invariant=True)
    whole = product(run, case, lhs, rhs, 1, dtype, low, recipe=recipe)
    few, part = dataclasses.replace(case, sizes=(5, 9), rows=14), np.r_[7:12, 40:49]
    alone = Low(low.rows[part], low.weight, 1)
    asserts.bitwise(product(run, few, lhs[part], rhs, 1, dtype, alone, recipe=recipe), whole[part])


@pytest.mark.rule("ERR-3", "LOR-1")
@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
@pytest.mark.parametrize("call", ["grouped_matmul", *FUSED_CALLS])
def test_all_other_kernels_refuse(call, arch):
    """Each kernel that takes no low-rank product says so, and the kernel that is for nothing else says that."""
    x, w, sizes = ArraySpec((8, 16), "bfloat16"), ArraySpec((2, 16, 32), "bfloat16"), ArraySpec((2,), "int32")
    options: dict[str, Any] = {"recipe": BF16}
    make: Any = calls.grouped_matmul
    given: tuple[Any, ...] = (x, w, (1, 1), sizes, "bfloat16")
    if call != "grouped_matmul":
        grad = call == "grouped_matmul_dact"
        make = getattr(calls, call)
        given = (x, w, 1, sizes, *((ArraySpec((8, 64), "bfloat16"),) if grad else ()), "bfloat16")
        options |= {"activation": Activation("swiglu"), **({"wanted": (True, True, True)} if grad else {})}
    low = LowRank(ArraySpec((8, 8), "bfloat16"), ArraySpec((2, 8, 32), "bfloat16"), 1)
    for kernel in _native.kernels()[call]:
        if ("_cpu" in kernel) != (arch == "cpu"):
            continue
        plan = plans.attempt(make(*given, **options, low=low, implementation=kernel), arch)
        if takes_low(kernel):
            assert plan.kernel or plan.refusals[0][1] != "takes no low-rank product"
        else:
            assert plan.refusals == [(kernel, "takes no low-rank product")]
        if "_low_" in kernel:
            plan = plans.attempt(make(*given, **options, implementation=kernel), arch)
            assert plan.refusals == [(kernel, "is for a product with a low-rank one beside it")]


@pytest.mark.rule("ERR-1", "LOR-1")
def test_halves_accumulation_and_contractions_over_rows_are_refused():
    low = LowRank(ArraySpec((8, 8), "bfloat16"), ArraySpec((2, 8, 32), "bfloat16"), 1)
    x, w, sizes = ArraySpec((8, 16), "bfloat16"), ArraySpec((2, 16, 32), "bfloat16"), ArraySpec((2,), "int32")
    wide, dy, options = ArraySpec((8, 32), "bfloat16"), ArraySpec((8, 32), "bfloat16"), {"recipe": BF16, "low": low}
    deep = ArraySpec((2, 32, 16), "bfloat16")
    act: dict[str, Any] = {**options, "activation": Activation("swiglu")}
    added: dict[str, Any] = {**options, "into": dy, "accumulate": True}
    for call, words in (
        (calls.grouped_matmul(x, dy, (0, 0), sizes, "bfloat16", **options), ["`low_lhs`"]),
        (calls.grouped_matmul(wide, deep, (1, 1), sizes, "bfloat16", **options), ["low_rhs"]),
        (calls.grouped_matmul(x, w, (1, 1), sizes, "bfloat16", result_half=1, **options), ["low_lhs", "one array"]),
        (calls.grouped_matmul(x, w, (1, 1), sizes, "bfloat16", **added), ["accumulate: expected 0", "`low_lhs`"]),
        (calls.grouped_matmul_act(x, w, 1, sizes, "bfloat16", rhs_up=w, **act), ["low_lhs", "one array"]),
    ):
        with asserts.refused(ValueError, words):
            plans.attempt(call, "cpu")
