"""Every kernel of grouped_matmul on every case, against the fp64 oracle and against itself."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from grouped_core import calls, plans
from grouped_core.calls import SLOTS, ArraySpec, spec_of
from grouped_core.recipes import FP32, FP32_MODES, plain
from grouped_core.reference import Oracle
from tests import asserts, bounds, cases
from tests.native.runner import JOINED, PRODUCTS, Native, kernels, product

KERNELS = kernels("grouped_matmul")
each_kernel = pytest.mark.parametrize("kernel", KERNELS)
each_product = pytest.mark.parametrize("which", PRODUCTS)
each_dtype = pytest.mark.parametrize("dtype", cases.DTYPES)
# Enough rows, columns and depth for several tiles in each direction, nothing aligned.
TILES = cases.Case("tiles", (150, 0, 301, 61), 540, 131, 277, frozenset())
# The same with rows of whole 16 bytes, which the tensor-core kernels ask for; and sums whose errors show.
ALIGNED_TILES = cases.Case("tiles_16", (150, 0, 301, 61), 540, 136, 280, frozenset())
LONG_SUMS = cases.Case("long_sums", (300, 40), 350, 2048, 32, frozenset())
LONG_GROUP = cases.named("groups_1_long")
# More tiles of 64 rows than two or three blocks of each multiprocessor of any GPU.
TALL = cases.Case("tall", (20000, 0, 13000), 33100, 264, 264, frozenset())


def test_refusals_of_cpu_kernels_are_no_skips(monkeypatch):
    """Where a kernel starts to decline what it took, tests of it fail; what halves lack was never taken."""
    p = cases.problem(cases.named("k_n_odd"), "bfloat16")
    declined = "declines"
    for kernel, kind in (("any_cpu", AssertionError), ("joined_cpu", pytest.skip.Exception)):
        name = f"grouped_matmul_{kernel}"
        plan = SimpleNamespace(kernel="", refusals=[(name, declined)])
        monkeypatch.setattr(plans, "attempt", lambda *_, plan=plan: plan)
        with pytest.raises(kind, match=f"{name}: {declined}"):
            product(Native(name), "forward", p)


@pytest.mark.rule("TE #2765", "pytorch #172439", "TE #2966", "TE #3176")
@pytest.mark.rule("GRP-4", "GRP-5", "GRP-6", "GRP-9", "GRP-10", "GRP-11", "GRP-12", "MAT-7")
@pytest.mark.matrix(kernel=KERNELS, case=cases.select(), dtype=cases.DTYPES, which=PRODUCTS, transposed=(False, True))
def test_every_case_within_its_bound(kernel, case, dtype, which, transposed):
    """Tails hold NaN and results start as NaN, so reading the one or leaving the other shows here."""
    product(Native(kernel), which, cases.problem(case, dtype, transposed=transposed))


@pytest.mark.rule("MAT-6")
@each_kernel
@pytest.mark.parametrize("dtype", cases.FP8)
@pytest.mark.parametrize("which", ["forward", "dgrad", "wgrad", "wgrad of fp8 rows"])
def test_fp8_operands_without_scales(kernel, dtype, which):
    """Gradients of the result are bfloat16 beside them."""
    p = cases.problem(cases.named("jagged"), dtype)
    if which.endswith("rows"):
        p = p._replace(dy=cases.normal(p.dy.shape, dtype, "dy"))
    product(Native(kernel), which.split()[0], p)


@pytest.mark.rule("MAT-8", "MAT-9", "MAT-6")
@pytest.mark.matrix(
    kernel=KERNELS,
    case=[cases.named(name) for name in ("jagged", "tail", "clamped", "k_n_odd", "groups_8", "no_rows")],
    dtype=cases.DTYPES,
    which=("forward", "dgrad"),
    bias=(None, *cases.DTYPES),
    row_scale=(False, True),
    scale_bias=(False, True),
    result_dtype=(None, *cases.DTYPES),
    transposed=(False, True),
    valid=lambda bias, row_scale, scale_bias, **_: not scale_bias or (bias and row_scale),
)
def test_epilogues(kernel, case, dtype, which, bias, row_scale, scale_bias, result_dtype, transposed):
    p = cases.problem(case, dtype, transposed=transposed)
    width = case.n if which == "forward" else case.k
    given = None if bias is None else cases.normal((case.groups, width), bias, "bias")
    options = {"bias": given, "row_scale": p.row_scale if row_scale else None, "scale_bias": scale_bias}
    product(Native(kernel), which, p, result_dtype=result_dtype, **options)


@pytest.mark.rule("MAT-7", "MAT-8", "GRP-6", "GRP-7")
@pytest.mark.matrix(
    kernel=KERNELS,
    width=(8, 16, 40, 64),
    sizes=((150, 0, 301, 61), (3, 0, 70, 1), (0, 0, 0, 9)),
    dtype=cases.DTYPES,
    which=PRODUCTS,
    transposed=(False, True),
    result=(None, "float32"),
    bias=(False, True),
    row_scale=(False, True),
    into=(False, True),
    valid=lambda which, bias, row_scale, **_: which != "wgrad" or not (bias or row_scale),
)
def test_few_columns(kernel, width, sizes, dtype, which, transposed, result, bias, row_scale, into):
    """Results of at most 64 columns, as those of adapters have, for which fast kernels have a tile of their own."""
    k, n = (width, 136) if which == "dgrad" else (136, width)
    p = cases.problem(cases.Case("narrow", sizes, sum(sizes) + 5, k, n, frozenset()), dtype, transposed=transposed)
    given, options = result or dtype, {}
    shape = p.w.shape if which == "wgrad" else (p.case.rows, width)
    if into:
        options["into"] = np.full(shape, cases.SENTINEL, cases.numpy_dtype(given))
    if bias:
        options["bias"] = cases.normal((p.case.groups, width), dtype, "bias")
    if row_scale:
        options["row_scale"] = p.row_scale
    found = product(Native(kernel), which, p, result_dtype=given, **options)
    if into and which != "wgrad":
        asserts.filled(found[p.case.valid :], cases.SENTINEL, "tail")


def narrow(case: cases.Case, which: str, dtype: str, width: int, *, transposed: bool) -> cases.Problem:
    """A problem whose product `which` has a side of `width` columns or rows; the other one is of `case`."""
    k, n = (width, case.n) if which == "dgrad" else (case.k, width)
    return cases.problem(dataclasses.replace(case, k=k, n=n), dtype, transposed=transposed)


# More blocks of depth than a ring of copies holds, in either direction, and several tiles of the long side.
DEEP = cases.Case("deep", (150, 0, 301, 61, 7), 540, 840, 520, frozenset())


@pytest.mark.rule("MAT-7", "MAT-8", "GRP-6", "GRP-7")
@pytest.mark.matrix(
    kernel=KERNELS,
    width=(8, 16, 24, 32, 64),
    dtype=cases.DTYPES,
    which=PRODUCTS,
    transposed=(False, True),
    result=(None, "float32"),
)
def test_long_sums_of_few_columns(kernel, width, dtype, which, transposed, result):
    product(Native(kernel), which, narrow(DEEP, which, dtype, width, transposed=transposed), result_dtype=result)


@pytest.mark.gpu
@pytest.mark.rule("MAT-3", "LOR-1")
@pytest.mark.matrix(
    width=(8, 16, 24, 32), dtype=("bfloat16", "float16"), which=PRODUCTS, transposed=(False, True), case=(DEEP, TALL)
)
def test_few_columns_have_the_bits_of_any_number(width, dtype, which, transposed, case):
    """Which kernel takes a call may depend on its form: one array or two, with or without a low-rank product beside."""
    p = narrow(case, which, dtype, width, transposed=transposed)
    found = product(Native("grouped_matmul_narrow_cuda", check=False), which, p)
    for other in ("grouped_matmul_any_cuda", f"grouped_matmul_bf16{'_wgrad' if which == 'wgrad' else ''}_sm90"):
        asserts.bitwise(product(Native(other, check=False), which, p), found, other)


# Rows so long that Hopper's clusters keep pace, and that a tile is shared by both warpgroups; of 520 columns the last
# tile has 8. MANY_LONG_ROWS are several tiles for each cluster.
LONG_ROWS = cases.Case("long_rows", (300, 0, 129, 513), 960, 6208, 520, frozenset())
MANY_LONG_ROWS = cases.Case("many_long_rows", (9000, 61, 4000), 13100, 6208, 768, frozenset())


@pytest.mark.gpu
@pytest.mark.rule("MAT-8", "MAT-9", "GRP-5", "GRP-6")
@pytest.mark.matrix(
    which=("forward", "dgrad"),
    dtype=("bfloat16", "float16"),
    transposed=(False, True),
    result=(None, "float32"),
    epilogue=(False, True),
)
def test_long_rows(which, dtype, transposed, result, epilogue):
    p = long_rows(LONG_ROWS, which, dtype, transposed=transposed)
    options = {}
    if epilogue:
        options = {"bias": cases.normal((p.case.groups, 520), dtype, "bias"), "row_scale": p.row_scale}
    product(Native("grouped_matmul_bf16_sm90"), which, p, result_dtype=result, **options)


@pytest.mark.gpu
@pytest.mark.rule("ALL-2", "MAT-3")
@pytest.mark.parametrize("case", [LONG_ROWS, MANY_LONG_ROWS], ids=str)
@pytest.mark.parametrize("which", ["forward", "dgrad"])
def test_long_rows_have_the_same_bits_in_every_tile(which, case):
    """Of 192 columns alone each warpgroup has a tile of its own."""
    p = long_rows(case, which, "bfloat16", transposed=True)
    run = Native("grouped_matmul_bf16_sm90", check=False)
    found = product(run, which, p)
    asserts.bitwise(product(run, which, p), found, "again")
    axis = 2 if which == "dgrad" else 1
    few = p._replace(w=np.ascontiguousarray(np.take(p.w, range(192), axis)))
    few = few._replace(case=dataclasses.replace(case, **{"k" if which == "dgrad" else "n": 192}))
    asserts.bitwise(product(run, which, few), found[:, :192], "192 columns")


def long_rows(case: cases.Case, which: str, dtype: str, *, transposed: bool) -> cases.Problem:
    """A problem whose product `which` contracts the longer axis of `case`."""
    k, n = (case.n, case.k) if which == "dgrad" else (case.k, case.n)
    return cases.problem(dataclasses.replace(case, k=k, n=n), dtype, transposed=transposed)


@pytest.mark.rule("TE #2499")
@pytest.mark.rule("MAT-11", "GRP-9")
@pytest.mark.matrix(
    kernel=KERNELS,
    case=[
        cases.named(name) for name in ("jagged", "tail", "clamped", "idle_ends", "k_n_odd", "no_rows", "one_row_each")
    ],
    dtype=cases.DTYPES,
    into=cases.DTYPES,
    transposed=(False, True),
    accumulate=(False, True),
)
def test_weight_gradients_into_a_buffer(kernel, case, dtype, into, transposed, accumulate):
    p = cases.problem(case, dtype, transposed=transposed)
    before = cases.normal(p.w.shape, into, "into")
    found = product(Native(kernel), "wgrad", p, result_dtype=into, into=before, accumulate=accumulate)
    for g, span in enumerate(case.spans()):
        if span.start == span.stop and accumulate:
            asserts.bitwise(found[g], before[g], f"accumulator of empty group {g}")
        elif span.start == span.stop:
            asserts.zero(found[g], f"gradient of empty group {g}")


@pytest.mark.gpu
@pytest.mark.rule("MAT-11")
@pytest.mark.parametrize("tiny", [False, True])
def test_additions_to_float32_are_rounded_once(tiny):
    """Of long sums L2 adds all, of others some or none; with `tiny`, results and what is added may be subnormal."""
    case = cases.ADDED
    p, before = cases.problem(case, "bfloat16"), cases.normal((case.groups, case.k, case.n), "float32", "into")
    if tiny:
        p = p._replace(x=p.x * p.x.dtype.type(2.0**-65), dy=p.dy * p.dy.dtype.type(2.0**-65))
        before *= np.float32(2.0**-127)
    run = Native("grouped_matmul_bf16_wgrad_sm90", check=False)
    sums = product(run, "wgrad", p, result_dtype="float32")
    found = product(run, "wgrad", p, result_dtype="float32", into=before, accumulate=True)
    asserts.bitwise(found, sums + before)
    assert np.any((found != 0) & (np.abs(found) < np.finfo(np.float32).tiny)) == tiny, "what is subnormal"


@pytest.mark.gpu
@pytest.mark.rule("MAT-11")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_sums_that_are_only_stored_are_rounded_once(dtype, transposed):
    """They have stages instead of slots there, and the bits of float32 sums, which have slots, after one rounding."""
    p, run = cases.problem(cases.STAGED, dtype, transposed=transposed), Native("grouped_matmul_bf16_wgrad_sm90")
    sums = product(run, "wgrad", p, result_dtype="float32")
    asserts.bitwise(product(run, "wgrad", p), sums.astype(p.x.dtype))


@pytest.mark.rule("MAT-11")
@each_kernel
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_accumulator_of_a_group_without_rows_keeps_its_nan_bits(kernel, dtype):
    """Not written means not read either: a NaN with a payload comes back with its payload."""
    p = cases.problem(cases.named("idle_ends"), dtype)
    before = np.full(p.w.shape, np.array(0x7FABCDEF, np.uint32).view(np.float32))
    found = product(Native(kernel, check=False), "wgrad", p, result_dtype="float32", into=before, accumulate=True)
    for g in (0, 2, 4):
        asserts.bitwise(found[g], before[g])


def takes_halves(kernel: str, half: int, which: str) -> bool:
    """On the CPU a kernel of its own joins two arrays that no other kernel contracts in place, and takes no others."""
    return "_cpu" not in kernel or (JOINED in kernel) == (which == "dgrad" and half % 2 != 0)


@pytest.mark.rule("MAT-3")
@pytest.mark.matrix(
    kernel=kernels("grouped_matmul", joined=True),
    half=(61, 136, 192, 256),  # of the weight's columns, of which kernels contract multiples of 2, 32, 64 in place
    sizes=((150, 0, 301, 61), (0, 0), (513, 700)),
    dtype=cases.DTYPES,
    which=PRODUCTS,
    transposed=(False, True),
    bias=(False, True),
    valid=lambda kernel, half, which, bias, **_: takes_halves(kernel, half, which) and (not bias or which == "forward"),
)
def test_halves_give_the_bits_of_the_whole(kernel, half, sizes, dtype, which, transposed, bias):
    p = cases.problem(cases.Case("halves", sizes, 540, 136, 2 * half, frozenset()), dtype, transposed=transposed)
    options = {
        "bias": cases.normal((len(sizes), 2 * half), dtype, "bias") if bias else None,
        "into": cases.normal((540, 2 * half), dtype, "into") if which == "forward" else None,
    }
    found = product(Native(kernel), which, p, halves=True, **options)
    whole = Native(kernel.replace(JOINED, "_dispatched_"))  # a name of none: what joins leaves the rest to dispatch
    asserts.bitwise(found, product(whole, which, p, **options))


@pytest.mark.rule("GRP-7")
@each_kernel
@pytest.mark.parametrize("which", ["forward", "dgrad"])
@pytest.mark.parametrize("name", ["tail", "tail_long", "all_empty", "groups_1_tail"])
def test_tails_of_a_callers_buffer_are_left_alone(kernel, which, name):
    case = cases.named(name)
    p = cases.problem(case, "bfloat16")
    width = case.n if which == "forward" else case.k
    buffer = np.full((case.rows, width), cases.SENTINEL, p.x.dtype)
    found = product(Native(kernel), which, p, into=buffer)
    asserts.filled(found[case.valid :], cases.SENTINEL, "tail")
    asserts.bitwise(found[: case.valid], product(Native(kernel), which, p)[: case.valid])


@pytest.mark.rule("GRP-5")
@each_kernel
@each_product
@pytest.mark.parametrize("name", ["tail", "groups_1_tail", "all_empty"])
def test_what_the_tail_holds_changes_nothing(kernel, which, name):
    results = [
        product(Native(kernel), which, cases.problem(cases.named(name), "bfloat16", tail=tail))
        for tail in (0.0, cases.TAIL, 1e4)
    ]
    asserts.bitwise(results[1], results[0])
    asserts.bitwise(results[2], results[0])


@pytest.mark.rule("GRP-4")
@pytest.mark.matrix(kernel=KERNELS, which=PRODUCTS, case=cases.select("clamp"))
def test_sizes_that_do_not_fit_equal_the_clamped_sizes(kernel, which, case):
    p = cases.problem(case, "bfloat16")
    fitting = np.diff(np.array(case.ends), prepend=0).astype(np.int32)
    run = Native(kernel)
    asserts.bitwise(product(run, which, p), product(run, which, p._replace(group_sizes=fitting)))


@pytest.mark.rule("MAT-1")
@pytest.mark.matrix(
    kernel=KERNELS,
    which=PRODUCTS,
    dtype=cases.DTYPES,
    case=[TILES, ALIGNED_TILES, LONG_GROUP, cases.named("k_n_odd"), cases.named("groups_65")],
)
def test_layouts_agree_bitwise(kernel, which, dtype, case):
    """For wgrad the other layout swaps the operands' roles, so the transposed result has the same bits."""
    run = Native(kernel, check=case is not TILES)
    one, other = (product(run, which, cases.problem(case, dtype, transposed=t)) for t in (False, True))
    asserts.bitwise(one, np.ascontiguousarray(other.swapaxes(1, 2)) if which == "wgrad" else other)


@pytest.mark.rule("ALL-2")
@pytest.mark.matrix(kernel=KERNELS, which=PRODUCTS, dtype=cases.DTYPES, tiles=(TILES, ALIGNED_TILES))
def test_twice_the_same_bits(kernel, which, dtype, tiles):
    run = Native(kernel)
    p = cases.problem(tiles, dtype)
    first = product(run, which, p, rows_hint=0)
    asserts.bitwise(product(run, which, p), first)
    asserts.bitwise(product(Native(kernel, check=False, dlpack=True), which, p), first, "by way of DLPack")


@pytest.mark.rule("ALL-7")
@each_kernel
@each_dtype
@pytest.mark.parametrize(("which", "width"), [("forward", 72), ("dgrad", 72), ("forward", 24)])
def test_a_row_depends_on_itself_alone(kernel, which, width, dtype):
    """Permuted rows; 8 rows alone against the same inside 36; other groups in front."""
    case = cases.Case("invariant", (36, 20), 56, 136, width, frozenset())
    p = cases.problem(case, dtype)
    options = {"recipe": {"batch_invariant": True}}
    run = Native(kernel)
    whole = product(run, which, p, **options)

    order = np.concatenate([np.random.default_rng(0).permutation(36), 36 + np.random.default_rng(1).permutation(20)])
    shuffled = p._replace(x=p.x[order], dy=p.dy[order])
    asserts.bitwise(product(run, which, shuffled, **options), whole[order], "permuted rows")

    few = np.array([5, 9], np.int32)
    part = np.r_[7:12, 40:49]
    alone = p._replace(x=p.x[part], dy=p.dy[part], group_sizes=few)
    asserts.bitwise(product(run, which, alone, **options), whole[part], "14 rows alone")

    last = p._replace(x=p.x[36:], dy=p.dy[36:], w=p.w[1:], group_sizes=p.group_sizes[1:])
    asserts.bitwise(product(run, which, last, **options), whole[36:], "the last group alone")


@each_kernel
@pytest.mark.rule("ALL-7")
@pytest.mark.parametrize("tiles", [TILES, ALIGNED_TILES], ids=str)
def test_a_weight_gradient_depends_on_its_group_alone(kernel, tiles):
    p = cases.problem(tiles, "bfloat16")
    run = Native(kernel, check=False)
    whole = product(run, "wgrad", p)
    start, end = tiles.ends[1], tiles.ends[2]
    alone = p._replace(x=p.x[start:end], dy=p.dy[start:end], group_sizes=p.group_sizes[2:3])
    asserts.bitwise(product(run, "wgrad", alone)[0], whole[2])


each_mode = pytest.mark.parametrize("mode", FP32_MODES)
# Its groups' sums are cut into parts on Hopper, and those of `INVARIANT` calls, or of many groups, are not.
LONG_GROUPS = cases.Case("long_groups", (1500, 0, 33, 700), 2300, 136, 280, frozenset())
INVARIANT = {"batch_invariant": True}


@pytest.mark.rule("ALL-7")
@pytest.mark.matrix(kernel=KERNELS, mode=FP32_MODES, transposed=(False, True))
def test_a_weight_gradient_of_float32_sees_neither_other_groups_nor_m(kernel, mode, transposed):
    """Among the same number of groups, at any position; the order of addition may depend on G, a static fact."""
    p = cases.problem(LONG_GROUPS, "float32", transposed=transposed)
    run, options = Native(kernel, check=False), {"recipe": {"fp32": mode}}
    whole = product(run, "wgrad", p, **options)
    for g in (0, 2, 3):
        rows = list(LONG_GROUPS.spans())[g]
        x, dy = (np.concatenate([part[rows], part[rows][:7]]) for part in (p.x, p.dy))  # another M, and a tail
        for place in (0, 1, 3):
            sizes = np.zeros(4, np.int32)
            sizes[place] = LONG_GROUPS.sizes[g]
            alone = product(run, "wgrad", p._replace(x=x, dy=dy, group_sizes=sizes), **options)
            asserts.bitwise(alone[place], whole[g], f"group {g} as group {place}")


@pytest.mark.rule("ALL-7")
@pytest.mark.matrix(kernel=KERNELS, mode=FP32_MODES, transposed=(False, True))
def test_a_batch_invariant_weight_gradient_does_not_see_the_number_of_groups(kernel, mode, transposed):
    """Nor are sums cut in calls of so many groups that their tiles fill any chip: these have the same bits."""
    case = cases.Case("among_many", (700, *[0, 3] * 60), 880, 136, 72, frozenset())
    p = cases.problem(case, "float32", transposed=transposed)
    run = Native(kernel, check=False)
    among = product(run, "wgrad", p, recipe={"fp32": mode, **INVARIANT})
    asserts.bitwise(product(run, "wgrad", p, recipe={"fp32": mode}), among, "whole sums")
    alone = p._replace(x=p.x[:700], dy=p.dy[:700], group_sizes=p.group_sizes[:1])
    asserts.bitwise(product(run, "wgrad", alone, recipe={"fp32": mode, **INVARIANT})[0], among[0])


@pytest.mark.rule("MAT-7")
@each_kernel
@each_product
@each_dtype
def test_base_addresses_need_no_alignment(kernel, which, dtype):
    for case in (cases.named("k_n_odd"), cases.named("uniform")):
        p = cases.problem(case, dtype)
        asserts.bitwise(product(Native(kernel, unaligned=True), which, p), product(Native(kernel), which, p))


@each_kernel
@each_product
@pytest.mark.parametrize("hint", [1, 16, 4096])
def test_a_hint_of_rows_changes_no_meaning(kernel, which, hint):
    product(Native(kernel), which, cases.problem(cases.named("jagged"), "bfloat16"), rows_hint=hint)


@pytest.mark.matrix(
    kernel=KERNELS,
    mode=FP32_MODES,
    which=PRODUCTS,
    transposed=(False, True),
    case=(ALIGNED_TILES, LONG_GROUP, LONG_GROUPS, cases.named("jagged")),
    invariant=(False, True),
    accumulate=(False, True),
    valid=lambda which, accumulate, **_: not accumulate or which == "wgrad",
)
def test_modes_of_fp32(kernel, which, mode, case, transposed, invariant, accumulate):
    p = cases.problem(case, "float32", transposed=transposed)
    options = {"into": cases.normal(p.w.shape, "float32", "into"), "accumulate": True} if accumulate else {}
    product(Native(kernel), which, p, recipe={"fp32": mode, "batch_invariant": invariant}, **options)


@pytest.mark.matrix(kernel=KERNELS, mode=FP32_MODES, which=PRODUCTS, case=(ALIGNED_TILES, LONG_SUMS, LONG_GROUP))
def test_errors_of_fp32_are_those_of_its_mode(kernel, mode, which, case):
    """As a whole, on data of random signs: the bounds above grow with length and would let the coarser mode pass."""
    p = cases.problem(case, "float32", tail=0.0)
    exact = product(Oracle(exact=True), which, p)
    found = product(Native(kernel), which, p, recipe={"fp32": mode})
    assert np.linalg.norm(found - exact) <= bounds.RELATIVE[mode] * np.linalg.norm(exact)


# ---------------------------------------------------------------------------------------------------------------------
# Tables of addresses.


@pytest.mark.rule("MAT-3", "MAT-4")
@pytest.mark.matrix(
    kernel=KERNELS,
    dtype=cases.DTYPES,
    transposed=(False, True),
    name=("jagged", "tail", "groups_65", "even_tiles"),
)
def test_listed_weights_and_biases_have_the_bits_of_packed_ones(kernel, dtype, transposed, name):
    p = cases.problem(cases.named(name), dtype, transposed=transposed)
    run = Native(kernel)
    packed = product(run, "forward", p, bias=p.bias)
    weights, weight_table = run.hold(list(p.w))
    biases, bias_table = run.hold(list(p.bias))
    call = calls.grouped_matmul(
        spec_of(p.x),
        spec_of(p.w),
        (1, 2 if transposed else 1),
        spec_of(p.group_sizes),
        dtype,
        recipe=plain(dtype),
        bias=spec_of(p.bias),
        tables=(True, True, False),
    )
    arrays = {"lhs": p.x, "group_sizes": p.group_sizes}
    arrays.update(rhs_table=weight_table, bias_table=bias_table)
    (found,) = run(call, [arrays.get(slot) for slot in SLOTS["grouped_matmul"]])
    asserts.bitwise(found, packed)
    assert len(weights) == len(biases) == p.case.groups  # alive until here


@pytest.mark.rule("MAT-4", "MAT-5")
@pytest.mark.matrix(
    kernel=KERNELS,
    case=(LONG_GROUPS, cases.STAGED, *(cases.named(name) for name in ("jagged", "idle_ends", "groups_65"))),
    types=(("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")),
    transposed=(False, True),
    accumulate=(False, True),
)
def test_listed_destinations_and_frozen_ones(kernel, case, types, transposed, accumulate):
    dtype, into = types
    p = cases.problem(case, dtype, transposed=transposed)
    before = cases.normal(p.w.shape, into, "into")
    lhs, rhs = (p.dy, p.x) if transposed else (p.x, p.dy)
    run = Native(kernel)
    options = {"into": before, "accumulate": accumulate}
    packed = product(run, "wgrad", p, result_dtype=into, **options)
    frozen = {1, p.case.groups - 1}
    members, table = run.hold([None if g in frozen else before[g] for g in range(p.case.groups)])
    call = calls.grouped_matmul(
        spec_of(lhs),
        spec_of(rhs),
        (0, 0),
        spec_of(p.group_sizes),
        into,
        recipe=plain(dtype),
        into=ArraySpec(p.w.shape, into),
        tables=(False, False, True),
        accumulate=accumulate,
    )
    arrays = {"lhs": lhs, "rhs": rhs, "group_sizes": p.group_sizes, "into_table": table}
    run(call, [arrays.get(slot) for slot in SLOTS["grouped_matmul"]])
    for g, member in enumerate(members):
        if member is not None:
            asserts.bitwise(run.release(member, before.dtype), packed[g], f"destination {g}")


# ---------------------------------------------------------------------------------------------------------------------
# Special values (numerics 8).


@pytest.mark.rule("ALL-6")
@each_kernel
@each_dtype
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["nan", "inf"])
def test_bad_rows_stay_in_their_row_and_group(kernel, dtype, value):
    case = cases.named("around_64_and_128")
    p = cases.problem(case, dtype)
    row = case.ends[0]  # the first of group 1: a tile of group 0 may load it too
    bad = p._replace(x=p.x.copy(), dy=p.dy.copy())
    bad.x[row], bad.dy[row] = value, value
    run = Native(kernel, check=False)
    for which in ("forward", "dgrad"):
        good, found = product(run, which, p), product(run, which, bad)
        others = np.arange(case.rows) != row
        asserts.bitwise(found[others], good[others], which)
        assert not np.isfinite(found[row].astype(np.float32)).any(), f"{which} hides a bad row"
    good, found = product(run, "wgrad", p), product(run, "wgrad", bad)
    asserts.bitwise(found[[0, 2]], good[[0, 2]], "other groups")
    assert not np.isfinite(found[1].astype(np.float32)).any(), "wgrad hides a bad row"


@pytest.mark.rule("ALL-6")
@each_kernel
@each_dtype
def test_bad_weights_stay_in_their_group(kernel, dtype):
    case = cases.named("around_64_and_128")
    p = cases.problem(case, dtype)
    bad = p._replace(w=p.w.copy(), bias=p.bias.copy())
    bad.w[1], bad.bias[1] = np.nan, np.inf
    run = Native(kernel, check=False)
    spans = list(case.spans())
    for which in ("forward", "dgrad"):
        options = [{"bias": q.bias} if which == "forward" else {} for q in (p, bad)]
        good, found = (product(run, which, q, **o) for q, o in zip((p, bad), options, strict=True))
        for g in (0, 2):
            asserts.bitwise(found[spans[g]], good[spans[g]], f"{which}, group {g}")
        assert np.isnan(found[spans[1]].astype(np.float32)).all()


@each_kernel
def test_fp32_subnormals_are_kept(kernel):
    """K = 1 and a weight of 1: the result is the operand itself, down to the least subnormal."""
    tiny = np.array([2.0**-149, -(2.0**-149), 3 * 2.0**-140, 2.0**-127, 2.0**-126, 0.0], np.float32)[:, None]
    case = cases.Case("subnormals", (4, 2), 6, 1, 8, frozenset())
    p = cases.problem(case, "float32")._replace(x=tiny, w=np.ones((2, 1, 8), np.float32))
    found = product(Native(kernel), "forward", p, recipe={"fp32": "ieee"})
    asserts.bitwise(found, np.repeat(tiny, 8, axis=1))
    huge = np.full(6, 2.0**20, np.float32)
    scaled = product(Native(kernel), "forward", p, row_scale=huge, recipe={"fp32": "ieee"})
    asserts.bitwise(scaled, np.repeat(tiny * huge[:, None], 8, axis=1), "scaled")


@each_kernel
@each_mode
def test_tf32_subnormals_are_kept(kernel, mode):
    """Those that tf32 holds, times 1; and the smallest normal numbers."""
    tiny = np.array([2.0**-136, -3 * 2.0**-136, 2.0**-127, 2.0**-126, 1.5 * 2.0**-126, 0.0], np.float32)[:, None]
    tiny = np.repeat(tiny, 4, axis=1) * np.float32([1, 0, 0, 0])
    case = cases.Case("subnormals", (4, 2), 6, 4, 8, frozenset())
    p = cases.problem(case, "float32")._replace(x=tiny, w=np.ones((2, 4, 8), np.float32))
    found = product(Native(kernel), "forward", p, recipe={"fp32": mode})
    asserts.bitwise(found, np.repeat(tiny[:, :1] + np.float32(0), 8, axis=1))


@pytest.mark.rule("ALL-6")
@pytest.mark.matrix(kernel=KERNELS, mode=FP32_MODES, which=PRODUCTS)
def test_infinite_and_nan_numbers_of_fp32_count_as_in_ieee(kernel, mode, which):
    """Among numbers with and without a remainder beyond tf32: where results are NaN, Inf or finite is as in IEEE."""
    rng = np.random.default_rng(5)
    special = np.array([np.inf, -np.inf, np.nan], np.float32)
    numbers = np.array([0, 1, -1, 3, 1 + 2.0**-20, 1 - 2.0**-20, -4097.3, 2.0**-30], np.float32)

    def draw(shape: tuple[int, ...]) -> NDArray[np.float32]:
        drawn = rng.choice(numbers, shape)
        at = rng.integers(0, drawn.size, drawn.size // 4000)
        drawn.reshape(-1)[at] = rng.choice(special, at.size)
        return drawn

    p = cases.problem(ALIGNED_TILES, "float32")
    p = p._replace(x=draw(p.x.shape), w=draw(p.w.shape), dy=draw(p.dy.shape))
    p.x[0, :2], p.w[0, :2, :2], p.dy[0, :2] = np.inf, -np.inf, np.inf  # infinities meet
    p.x[1, 1] = np.array(0x7F800001, np.uint32).view(np.float32)  # a NaN of low bits
    with np.errstate(invalid="ignore"):
        expected = product(Oracle(), which, p)
        found = product(Native(kernel, check=False), which, p, recipe={"fp32": mode})
    for name, kind in (("NaN", np.isnan), ("Inf", np.isposinf), ("-Inf", np.isneginf)):
        asserts.bitwise(kind(found), kind(expected), name)


@each_kernel
@each_mode
def test_the_largest_fp32_numbers_stay_finite(kernel, mode):
    """They round to infinity in tf32, and a mask of -FLT_MAX times 0 would be NaN; they keep 11 bits there instead."""
    largest = np.finfo(np.float32).max
    case = cases.Case("largest", (4,), 4, 4, 4, frozenset())
    x = np.zeros((4, 4), np.float32)
    np.fill_diagonal(x, [largest, -largest, 1, 0])
    w = np.array([[[1, 0, -0.5, largest], [1, 0, -0.5, largest], [largest, 0, -largest, 1], [1, 0, 2, 3]]], np.float32)
    p = cases.problem(case, "float32")._replace(x=x, w=w)
    with np.errstate(over="ignore"):
        expected = product(Oracle(), "forward", p)
    found = product(Native(kernel, check=False), "forward", p, recipe={"fp32": mode})
    finite = np.isfinite(expected)
    asserts.bitwise(found[~finite], expected[~finite])
    rounding = bounds.gamma(4, "float32", kernel, "ieee" if mode == "ieee" else "tf32")
    assert (np.abs(found[finite] - expected[finite]) <= rounding * np.abs(expected[finite])).all()


@each_kernel
def test_stores_do_not_saturate(kernel):
    case = cases.Case("overflow", (2,), 2, 8, 8, frozenset())
    p = cases.problem(case, "float16")
    p = p._replace(x=np.full((2, 8), 240.0, np.float16), w=np.full((1, 8, 8), 240.0, np.float16))
    found = product(Native(kernel, check=False), "forward", p)
    assert np.isposinf(found.astype(np.float32)).all(), found


@each_kernel
@each_dtype
def test_exact_sums_are_exact(kernel, dtype):
    """Small integers, whose sums every format holds: no rounding, so every bit is known."""
    case = cases.named("around_64_and_128")
    rng = np.random.default_rng(3)
    whole = cases.numpy_dtype(dtype)
    p = cases.problem(case, dtype)
    p = p._replace(
        x=rng.integers(-2, 3, p.x.shape).astype(whole),
        w=rng.integers(-2, 3, p.w.shape).astype(whole),
        dy=rng.integers(-1, 2, p.dy.shape).astype(whole),
    )
    y = product(Native(kernel), "forward", p, result_dtype="float32")
    for g, span in enumerate(case.spans()):
        asserts.bitwise(y[span], p.x[span].astype(np.float32) @ p.w[g].astype(np.float32), f"group {g}")
    dw = product(Native(kernel), "wgrad", p, result_dtype="float32")
    for g, span in enumerate(case.spans()):
        asserts.bitwise(dw[g], p.x[span].astype(np.float32).T @ p.dy[span].astype(np.float32), f"group {g}")


@pytest.mark.rule("GRP-11")
@each_kernel
@pytest.mark.parametrize(("dtype", "width"), [("float32", 2), ("float32", 4), ("bfloat16", 8)])
def test_the_largest_number_of_groups(kernel, dtype, width):
    """Small integers again, so that a vectorised expression knows every bit."""
    groups = calls.MAX_GROUPS
    rng = np.random.default_rng(4)
    case = cases.Case("most_groups", (1,) * groups, groups, width, width, frozenset())
    x, dy = (rng.integers(-2, 3, (groups, width)).astype(np.float32) for _ in range(2))
    w = rng.integers(-2, 3, (groups, width, width)).astype(np.float32)
    sizes = np.ones(groups, np.int32)
    p = cases.Problem(case, False, x, w, sizes, w[:, 0], x[:, 0], dy)
    run = Native(kernel, check=False)
    exact = cases.numpy_dtype(dtype)
    stored = p._replace(x=x.astype(exact), w=w.astype(exact), dy=dy.astype(exact))
    for which, sums in (("forward", "gk,gkn->gn"), ("dgrad", "gn,gkn->gk"), ("wgrad", "gk,gn->gkn")):
        operands = (x, dy) if which == "wgrad" else (x if which == "forward" else dy, w)
        # Adding zero turns -0 into 0, as a sum that starts at 0 does.
        wanted = (np.einsum(sums, *operands) + np.float32(0)).astype(exact)
        asserts.bitwise(product(run, which, stored), wanted, which)


@pytest.mark.rule("ERR-3")
def test_a_kernel_that_refuses_is_named_with_its_reason():
    call = calls.grouped_matmul(
        ArraySpec((4, 8), "float32"),
        ArraySpec((1, 8, 4), "float32"),
        (1, 1),
        ArraySpec((1,), "int32"),
        "float32",
        recipe=FP32,
    )
    for name in plans.attempt(call, "sm_90a").refusals:
        assert name[1], f"{name[0]} refuses without a reason"
    for kernel in KERNELS:
        name = kernel if isinstance(kernel, str) else kernel.values[0]
        arch = "sm_90a" if "_cpu" in name else "cpu"
        pinned = calls.grouped_matmul(
            ArraySpec((4, 8), "float32"),
            ArraySpec((1, 8, 4), "float32"),
            (1, 1),
            ArraySpec((1,), "int32"),
            "float32",
            recipe=FP32,
            implementation=name,
        )
        found = plans.attempt(pinned, arch)
        assert not found.kernel
        assert [kernel for kernel, _ in found.refusals] == [name]
        with asserts.refused(NotImplementedError, [f"grouped_matmul on {arch}", name, "no kernel takes it", "Change"]):
            plans.plan(pinned, arch)
