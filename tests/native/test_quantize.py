"""Quantise, dequantise and the step of delayed scaling: every bit against the oracle, in every format and form."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from grouped_core import _native, calls, plans
from grouped_core.calls import QUANTIZED, RESULTS, ArraySpec, spec_of
from grouped_core.formats import FORMATS, Format
from tests import asserts, cases
from tests.native.quantize_tools import FOR_WEIGHTS, LISTED, MEMBERS, VARIANTS, numbers
from tests.native.quantize_tools import nothing_is_exceptional as nothing_is_exceptional
from tests.native.runner import Native, kernels

FOR_ROWS = [row for row in VARIANTS if not row.square and row.segment]
FORMS = ((True, False), (False, True), (True, True))
WITH_ROWS = ((True, True), (True, False))
IN_BLOCKS = [row for row in VARIANTS if row.block and not row.square and row.values != "uint8"]
"""FP8 in blocks along rows: where rows alone are wanted, groups do not matter."""
CASES = [
    cases.named(name)
    for name in (
        *("tail", "idle_ends", "rows_1_15_127", "rows_1027", "one_takes_all", "all_empty", "no_rows", "overflow_32"),
        *("negative", "clamped_idle", "groups_65", "groups_1_tail", "k_n_odd", "k_1", "k_2880"),
    )
]
NARROW = ("bfloat16", "float16")
WIDTHS = (8, 120, 128, 136, 256, 264, 776)
"""On both sides of blocks of 32 and of 128, and of the 256 columns of a warp."""
WIDE = (16, 120, 144, 1008, 1040)
"""On both sides of the 128 and the 1024 columns of a tile."""
KEY = np.array([0x243F6A88, 0x85A308D3], np.uint32)


def rows_of(case: cases.Case, dtype: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """(rows [M, K] with NaN past the groups, group sizes)."""
    x = numbers((case.rows, case.k), dtype, case.name)
    x[case.valid :] = cases.TAIL
    return x, np.array(case.sizes, np.int32)


def quantize(
    run: Native,
    source: NDArray[Any],
    format: Format,
    forms: tuple[bool, bool] = (True, True),
    group_sizes: NDArray[Any] | None = None,
    *,
    table: NDArray[Any] | None = None,
    into: dict[str, NDArray[Any]] | None = None,
    stream: int = 0,
    places: NDArray[Any] | None = None,
    slots: int = 1,
    **operands: NDArray[Any],
) -> dict[str, NDArray[Any]]:
    """Results by name; `operands` are scale, key, skip, into_amax; `into` holds buffers by result."""
    call = calls.quantize(
        spec_of(source),
        format,
        forms,
        None if group_sizes is None else spec_of(group_sizes),
        table=table is not None,
        amax="into_amax" in operands,
        merge="into_amax" in operands,
        reuse=into is not None,
        stream=stream,
        gather=None if places is None else (places.shape[0], slots),
        **{name: name in operands for name in ("scale", "key", "skip")},
    )
    buffers = {f"into_{name}": buffer for name, buffer in (into or {}).items() if name in QUANTIZED}
    given = {"source": source, "group_sizes": group_sizes, "places": places, **operands, **buffers}
    if table is not None:
        given |= {"source": None, "source_table": table}
    results = run(call, call.arrange(**given))
    return {n: r for n, r in zip(RESULTS["quantize"], results, strict=True) if r is not None}


def same(found: dict[str, NDArray[Any]], wanted: dict[str, NDArray[Any]]) -> None:
    assert found.keys() == wanted.keys()
    for name in found:
        asserts.bitwise(found[name], wanted[name], name)


def dequantize(
    run: Native,
    quantized: dict[str, NDArray[Any]],
    format: Format,
    axis: int,
    like: NDArray[Any],
    group_sizes: NDArray[Any] | None,
    dtype: str,
) -> NDArray[Any]:
    groups = like.shape[0] if group_sizes is None else group_sizes.shape[0]
    spec = calls.spec_in_format(format, like.shape, axis, like.dtype.name, groups)
    call = calls.dequantize(spec, None if group_sizes is None else spec_of(group_sizes), dtype)
    prefix = "cross_" if axis == like.ndim - 2 else ""
    named = {name: quantized.get(prefix + name) for name in ("values", "scales", "group_scales")}
    return run(call, call.arrange(group_sizes=group_sizes, **named))[0]


@pytest.mark.skipif(not _native.cuda_compiled, reason="this build has no CUDA kernels")
@pytest.mark.rule("ERR-3")
@pytest.mark.parametrize("forms", [(True, False), (False, True)])
@pytest.mark.parametrize("name", ["fp8_tensor", "mxfp8", "nvfp4"])
def test_rows_of_more_columns_than_32_bits_count_have_the_plain_kernel(name, forms):
    for width, fits in ((2**31 - 4096, True), (2**31 - 2048, False), (2**31, False), (2**32 + 128, False)):
        call = calls.quantize(ArraySpec((1, width), "bfloat16"), FORMATS[name], forms, ArraySpec((1,), "int32"))
        plan = plans.attempt(call, "sm_90a")
        said = [kernel for kernel, reason in plan.refusals if "up to 2^31 - 4096 columns" in reason]
        if fits:
            assert plan.kernel != "quantize_any_cuda", plan.refusals
            assert not said
        else:
            assert plan.kernel == "quantize_any_cuda"
            assert said == [
                *("quantize_fp8_rows_cuda", "quantize_fp8_current_cuda", "quantize_fp8_cuda", "quantize_fp4_cuda")
            ]


@pytest.mark.skipif(not _native.cuda_compiled, reason="this build has no CUDA kernels")
@pytest.mark.parametrize(
    ("shape", "groups", "dtype", "arch", "takes"),
    [
        ((65536, 2048), 64, "bfloat16", "sm_90a", True),
        ((65536, 2048), 64, "float16", "sm_80", True),
        ((65536, 2048), 64, "float32", "sm_90a", False),
        ((65536, 2048), 1025, "bfloat16", "sm_90a", False),
        ((65536, 2048), 64, "bfloat16", "sm_89", False),
        ((64, 2048, 4096), 0, "bfloat16", "sm_90a", True),
        ((64, 2048, 4104), 0, "bfloat16", "sm_90a", False),
    ],
)
def test_which_calls_under_current_scaling_are_one_launch(shape, groups, dtype, arch, takes):
    """Rows of up to 1024 groups, and weights of up to 16 MiB, of 16 bits, where there is memory to hold them."""
    sizes = ArraySpec((groups,), "int32") if groups else None
    call = calls.quantize(ArraySpec(shape, dtype), FORMATS["fp8_tensor"], (True, True), sizes)
    plan = plans.attempt(call, arch)
    assert plan.kernel == ("quantize_fp8_current_cuda" if takes else "quantize_fp8_cuda"), plan.refusals


@pytest.mark.rule("maxtext #4971")
@pytest.mark.rule("GRP-4", "GRP-5", "GRP-6", "GRP-12", "MAT-2")
@pytest.mark.matrix(kernel=kernels("quantize"), format=FOR_ROWS, case=CASES, dtype=cases.DTYPES, forms=FORMS)
def test_rows(kernel, format, case, dtype, forms):
    x, sizes = rows_of(case, dtype)
    quantize(Native(kernel), x, format, forms, sizes, key=KEY)


@pytest.mark.rule("MAT-2", "GRP-12")
@pytest.mark.matrix(kernel=kernels("quantize"), format=FOR_WEIGHTS, shape=MEMBERS, dtype=cases.DTYPES, forms=FORMS)
def test_weights(kernel, format, shape, dtype, forms):
    quantize(Native(kernel), numbers(shape, dtype), format, forms, key=KEY)


@pytest.mark.rule("GRP-4", "GRP-5", "GRP-6", "GRP-12", "MAT-2")
@pytest.mark.matrix(
    kernel=kernels("quantize"), format=FOR_ROWS, case=CASES[:14:2], width=WIDE, dtype=cases.DTYPES, forms=FORMS
)
def test_rows_of_whole_vectors(kernel, format, case, width, dtype, forms):
    """Tiles as wide as the kernels of bandwidth have them, and their ends."""
    x, sizes = rows_of(dataclasses.replace(case, k=width), dtype)
    quantize(Native(kernel), x, format, forms, sizes, key=KEY)


@pytest.mark.rule("GRP-4", "GRP-12")
@pytest.mark.matrix(
    kernel=kernels("quantize"),
    format=FOR_ROWS,
    groups=("groups_1025", "groups_4096"),
    dtype=cases.DTYPES,
    forms=FORMS,
    valid=lambda kernel, groups, **_: groups == "groups_1025" or "_cpu_" not in kernel,
)
def test_rows_of_many_groups(kernel, format, groups, dtype, forms):
    """Sizes are scanned 1024 at a time; tables of all groups are in shared memory, beside the tiles.

    Kernels for the CPU scan nothing: one of them has the larger number, and every eighth group alone has rows, because
    the oracle takes these one by one.
    """
    case = dataclasses.replace(cases.named(groups), k=16)
    if "_cpu" in kernel:
        sizes = tuple(size if g % 8 == 0 else 0 for g, size in enumerate(case.sizes))
        case = dataclasses.replace(case, sizes=sizes)
    x, sizes = rows_of(case, dtype)
    quantize(Native(kernel), x, format, forms, sizes, key=KEY)


@pytest.mark.rule("GRP-4", "GRP-5", "GRP-6", "GRP-12", "MAT-2")
@pytest.mark.matrix(
    kernel=kernels("quantize"),
    format=IN_BLOCKS,
    case=[*CASES, cases.named("groups_1024"), cases.named("clamped")],
    width=WIDTHS,
    dtype=cases.DTYPES,
)
def test_rows_alone(kernel, format, case, width, dtype):
    """In blocks along them: ends of rows, of groups, of sizes that are read 32 at a time."""
    x, sizes = rows_of(dataclasses.replace(case, k=width), dtype)
    quantize(Native(kernel), x, format, (True, False), sizes)


@pytest.mark.rule("LYR-16", "GRP-4", "GRP-12")
@pytest.mark.matrix(
    kernel=kernels("quantize"),
    format=FOR_ROWS,
    case=CASES[::2],
    width=(37, *WIDTHS[2:]),
    dtype=cases.DTYPES,
    forms=FORMS,
    slots=(1, 3),
    valid=lambda kernel, format, forms, **_: "fp8_rows" not in kernel or (format in IN_BLOCKS and not forms[1]),
)
def test_gathered_rows(kernel, format, case, width, dtype, forms, slots):
    """Rows of any places, several of one row, some of none; places of rows behind the groups are not read."""
    tokens = case.rows // 2 + 1
    x, rng = numbers((tokens, width), dtype, case.name), np.random.default_rng(7)
    places = rng.integers(-2, tokens * slots + 2, case.rows).astype(np.int32)
    places[3::11] = 2**31 - 1
    options: dict[str, Any] = {"key": KEY, "into_amax": np.full(case.groups, 1e-3, np.float32)}
    if format in IN_BLOCKS:
        del options["into_amax"]
    quantize(Native(kernel), x, format, forms, np.array(case.sizes, np.int32), places=places, slots=slots, **options)


@pytest.mark.rule("LYR-16")
@pytest.mark.matrix(
    kernel=kernels("quantize"), dtype=NARROW, forms=FORMS, started=((), (1,), range(5)), starts_at_one=(False, True)
)
def test_gathered_rows_with_given_scales(kernel, dtype, forms, started, starts_at_one):
    """Delayed scaling: groups without a scale take that of the rows that are gathered for them."""
    sizes, scale = np.array((7, 0, 130, 1, 340), np.int32), np.zeros(5, np.float32)
    scale[list(started)] = 0.5
    x, places = numbers((90, 1040), dtype), np.random.default_rng(8).permutation(720)[:500].astype(np.int32)
    format = FORMATS["fp8_tensor"].replace(delayed=True, starts_at_one=starts_at_one)
    options = {"scale": scale, "into_amax": np.full(5, 1e-3, np.float32)}
    found = quantize(Native(kernel), x, format, forms, sizes, places=places, slots=8, **options)
    same(quantize(Native(kernel), x[places // 8], format, forms, sizes, **options), found)


@pytest.mark.rule("MAT-2", "GRP-12")
@pytest.mark.matrix(
    kernel=kernels("quantize"), format=IN_BLOCKS, tall=(1, 8, 37, 128), width=WIDTHS, dtype=cases.DTYPES
)
def test_rows_alone_of_weights(kernel, format, tall, width, dtype):
    """The same with weights, whose rows follow one another."""
    quantize(Native(kernel), numbers((3, tall, width), dtype), format, (True, False))


@pytest.mark.rule("MAT-4")
@pytest.mark.matrix(
    kernel=kernels("quantize"),
    format=FOR_WEIGHTS,
    shape=(MEMBERS[0], *LISTED),
    dtype=cases.DTYPES,
    forms=FORMS,
    odd=(None, 0, 1),
)
def test_listed_weights(kernel, format, shape, dtype, forms, odd):
    """Members anywhere: all aligned, or from member `odd` on every other one an element past an aligned address."""
    w, run = numbers(shape, dtype), Native(kernel)
    odd_ones = () if odd is None else range(odd, shape[0], 2)
    _held, table = run.hold(list(w), unaligned=odd_ones)
    assert [address % 16 != 0 for address in table] == [g in odd_ones for g in range(shape[0])]
    same(quantize(run, w, format, forms, table=table, key=KEY), quantize(run, w, format, forms, key=KEY))


@pytest.mark.rule("MAT-4")
@pytest.mark.matrix(
    kernel=kernels("quantize"), name=("fp8_tensor", "fp8_1x128", "mxfp8", "nvfp4"), dtype=("float32", "bfloat16")
)
def test_long_lists(kernel, name, dtype):
    """A prime number of different members, again and again, so that the oracle quantises each of them once."""
    distinct, place = numbers((127, 16, 8), dtype), np.arange(4096) % 127
    w, run = distinct[place], Native(kernel, check=False)
    _held, table = run.hold(list(w), unaligned=(0, 4095))
    forms = (True, "fp8_rows" not in kernel)
    found = quantize(run, w, FORMATS[name], forms)
    same(quantize(run, w, FORMATS[name], forms, table=table), found)
    once = quantize(Native(kernel), distinct, FORMATS[name], forms)
    same(found, {name: array[place] for name, array in once.items()})


@pytest.mark.rule("MAT-4")
@pytest.mark.matrix(
    kernel=kernels("quantize"),
    name=("fp8_tensor", "fp8_tensor_e5m2"),
    dtype=cases.DTYPES,
    forms=FORMS,
    odd=(False, True),
    zeros=((), (1, 3)),
)
def test_listed_weights_with_given_scales(kernel, name, dtype, forms, odd, zeros):
    """Delayed scaling of a list, of which some members may not have started: amaxes are merged on the way."""
    w, run, format = numbers((5, 48, 264), dtype), Native(kernel), FORMATS[name].replace(delayed=True)
    _held, table = run.hold(list(w), unaligned=range(5) if odd else ())
    scale = np.exp2(np.arange(-2, 3, dtype=np.float32))
    scale[list(zeros)] = 0
    options = {"scale": scale, "into_amax": np.full(5, 1e-3, np.float32)}
    same(quantize(run, w, format, forms, table=table, **options), quantize(run, w, format, forms, **options))


@pytest.mark.matrix(kernel=kernels("quantize"), format=FOR_ROWS, case=CASES[:4], dtype=cases.DTYPES)
def test_amaxes_are_merged(kernel, format, case, dtype):
    """Of the values as they come, whatever their form; what was there already counts."""
    x, sizes = rows_of(case, dtype)
    before = np.zeros(case.groups, np.float32)
    before[::2] = 100
    found = quantize(Native(kernel), x, format, (True, True), sizes, into_amax=before)["amax"]
    alone = quantize(Native(kernel), x, format, (False, False), sizes, into_amax=before)["amax"]
    asserts.bitwise(alone, found)
    for g, span in enumerate(case.spans()):
        largest = np.max(np.abs(x[span].astype(np.float32)), initial=before[g])
        asserts.bitwise(found[g : g + 1], np.array([largest if largest == largest else np.nan], np.float32))


@pytest.mark.matrix(
    kernel=kernels("quantize"),
    name=("fp8_tensor", "fp8_tensor_e5m2"),
    dtype=cases.DTYPES,
    rows=(False, True),
    forms=FORMS,
)
def test_given_scales(kernel, name, dtype, rows, forms):
    """Delayed scaling: nothing is found; amaxes are merged on the way."""
    scale = np.array([0.5, 1.0, 3.0, 2.0**-100, 2.0**127], np.float32)
    case = cases.Case("five", (7, 0, 130, 1, 40), 190, 37, 1, frozenset())
    source, sizes = rows_of(case, dtype) if rows else (numbers((5, 24, 37), dtype), None)
    options = {"scale": scale, "into_amax": np.full(5, 1e-3, np.float32)}
    quantize(Native(kernel), source, FORMATS[name].replace(delayed=True), forms, sizes, **options)


@pytest.mark.matrix(
    kernel=kernels("quantize"),
    name=("fp8_tensor", "fp8_tensor_e5m2"),
    dtype=cases.DTYPES,
    rows=(False, True),
    forms=FORMS,
    width=(37, 48),
    zeros=((0,), (1,), (0, 2, 4), (0, 1, 2, 3, 4)),
    starts_at_one=(False, True),
)
def test_scales_that_have_not_started(kernel, name, dtype, rows, forms, width, zeros, starts_at_one):
    """A scale of 0 is that of the group's own values, or 1; the others stay, and magnitudes are what they are."""
    scale = np.array([0.5, 1.0, 3.0, 2.0**-100, 2.0**127], np.float32)
    scale[list(zeros)] = 0
    case = cases.Case("five", (7, 0, 130, 1, 40), 190, width, 1, frozenset())
    source, sizes = rows_of(case, dtype) if rows else (numbers((5, 24, width), dtype), None)
    format = FORMATS[name].replace(delayed=True, starts_at_one=starts_at_one)
    options = {"scale": scale, "into_amax": np.full(5, 1e-3, np.float32)}
    found = quantize(Native(kernel), source, format, forms, sizes, **options)
    alone = quantize(Native(kernel), source, FORMATS[name], forms, sizes)
    for form in ("group_scales", "cross_group_scales"):
        if form in found:
            wanted = np.float32(1) / np.where(scale == 0, np.float32(1), scale)
            own = np.zeros(5, bool) if starts_at_one else scale == 0
            asserts.bitwise(found[form], np.where(own, alone[form], wanted), form)


@pytest.mark.gpu
@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_that_start_groups_wait_for_one_another(dtype, rows, forms):
    """There are more tiles than blocks, and the largest value of each group is in one of the last."""
    case = cases.Case("many", (2500, 0, 1300, 2200), 6100, 4096, 1, frozenset())
    source, sizes = rows_of(case, dtype) if rows else (numbers((4, 1500, 4096), dtype), None)
    for span in case.spans() if rows else ():
        source[span][-1:, -1:] = 300
    if not rows:
        source[:, -1, -1] = 300
    options = {"scale": np.array([0, 1, 0.5, 0], np.float32), "into_amax": np.zeros(4, np.float32)}
    format = FORMATS["fp8_tensor"].replace(delayed=True)
    found = quantize(Native("quantize_fp8_cuda"), source, format, forms, sizes, **options)
    alone = quantize(Native("quantize_fp8_cuda"), source, FORMATS["fp8_tensor"], forms, sizes)
    for name in ("group_scales", "cross_group_scales"):
        if name in found:
            asserts.bitwise(found[name][[0, 3]], alone[name][[0, 3]], name)


@pytest.mark.gpu
@pytest.mark.parametrize("forms", FORMS)
def test_groups_under_current_scaling_that_the_gpu_cannot_hold(forms):
    """Some of their tiles are read twice: to be measured, and to be stored."""
    source, sizes = rows_of(cases.Case("large", (0, 5300, 3, 700), 6100, 2048, 1, frozenset()), "bfloat16")
    found, wanted = (
        quantize(Native(kernel, check=False), source, FORMATS["fp8_tensor"], forms, sizes)
        for kernel in ("quantize_fp8_current_cuda", "quantize_fp8_cuda")
    )
    for name, each in wanted.items():
        asserts.bitwise(found[name], each, name)


OCCUPY = """
extern "C" __global__ void occupy(volatile int* over) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (*over == 0 && now - start < 20000000000ull);
}
"""
"""A block that stays until it is told, or for 20 seconds."""


@pytest.mark.gpu
@pytest.mark.parametrize("forms", FORMS)
def test_current_scaling_needs_no_block_beside_another(forms):
    """Most multiprocessors belong to another kernel, so that blocks have to forget values, and read them again."""
    import torch

    if not hasattr(torch.cuda, "_compile_kernel"):
        pytest.skip("this PyTorch compiles no kernels at run time")
    source, sizes = rows_of(cases.Case("occupied", (0, 900, 3, 700), 1700, 512, 1, frozenset()), "bfloat16")
    wanted = quantize(Native("quantize_fp8_cuda", check=False), source, FORMATS["fp8_tensor"], forms, sizes)
    native = Native("quantize_fp8_current_cuda", check=False)
    quantize(native, source, FORMATS["fp8_tensor"], forms, sizes)  # loads the kernel
    gpu: Any = torch.cuda.get_device_properties(0)  # stubs lack some of its attributes
    side, over = torch.cuda.Stream(), torch.zeros(1, dtype=torch.int32).pin_memory()
    native.memory.wait = torch.cuda.current_stream().synchronize
    occupy, memory = torch.cuda._compile_kernel(OCCUPY, "occupy"), gpu.shared_memory_per_block_optin
    occupy.set_shared_memory_config(memory)
    occupy(grid=(gpu.multi_processor_count - 2, 1, 1), block=(32, 1, 1), args=[over], shared_mem=memory, stream=side)
    try:
        found = quantize(native, source, FORMATS["fp8_tensor"], forms, sizes)
        assert not side.query(), "it has waited for the other kernel"
    finally:
        over[0] = 1
        side.synchronize()
    for name, each in wanted.items():
        asserts.bitwise(found[name], each, name)


def is_for(format: Format, rows: bool, **_: Any) -> bool:
    return format in (FOR_ROWS if rows else FOR_WEIGHTS)


def buffers(found: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """As large as the results, full of something else."""
    return {n: np.full(r.nbytes, 0x5A, np.uint8).view(r.dtype).reshape(r.shape) for n, r in found.items()}


@pytest.mark.rule("QNT-6")
@pytest.mark.matrix(
    kernel=kernels("quantize"),
    format=VARIANTS,
    rows=(False, True),
    wanted=((True, True, False), (True, True, True), (True, False, False)),
    valid=is_for,
)
def test_a_device_flag_turns_it_into_nothing(kernel, format, rows, wanted):
    """`wanted`: both forms, and amaxes."""
    forms, amax = wanted[:2], wanted[2]
    source, sizes = rows_of(CASES[0], "bfloat16") if rows else (numbers((3, 48, 56), "bfloat16"), None)
    groups = source.shape[0] if sizes is None else sizes.shape[0]
    options = {"into_amax": np.full(groups, 2, np.float32)} if amax else {}
    a_flag_decides(kernel, source, format, forms, sizes, options)


@pytest.mark.rule("QNT-6")
@pytest.mark.matrix(kernel=kernels("quantize"), rows=(False, True), forms=FORMS)
def test_a_device_flag_starts_no_groups(kernel, rows, forms):
    source, sizes = rows_of(CASES[0], "bfloat16") if rows else (numbers((3, 48, 64), "bfloat16"), None)
    groups = source.shape[0] if sizes is None else sizes.shape[0]
    options = {"scale": np.arange(groups, dtype=np.float32) % 2, "into_amax": np.full(groups, 2, np.float32)}
    a_flag_decides(kernel, source, FORMATS["fp8_tensor"].replace(delayed=True), forms, sizes, options)


def a_flag_decides(
    kernel: str,
    source: NDArray[Any],
    format: Format,
    forms: tuple[bool, bool],
    sizes: NDArray[Any] | None,
    options: dict[str, NDArray[Any]],
) -> None:
    """Quantises into buffers, which a flag other than 0 leaves as they were."""
    amax = "into_amax" in options
    fresh = quantize(Native(kernel), source, format, forms, sizes, **options)
    into = buffers(fresh)
    taken = quantize(Native(kernel), source, format, forms, sizes, into=into, **options)
    same(taken, fresh)
    for flag in (0, 1, -1):
        skip = np.array([flag], np.int32)
        found = quantize(Native(kernel), source, format, forms, sizes, into=into, skip=skip, **options)
        same(found, (into | {"amax": options["into_amax"]} if amax else into) if flag else fresh)


def every_value(dtype: str) -> NDArray[Any]:
    """All numbers of a 16-bit type, [512, 128], in an order that mixes magnitudes."""
    bits = (np.arange(2**16, dtype=np.uint32) * 40503 % 2**16).astype(np.uint16)
    return bits.view(cases.numpy_dtype(dtype)).reshape(512, 128)


@pytest.mark.rule("GRP-12")
@pytest.mark.matrix(kernel=kernels("quantize"), format=FOR_ROWS, dtype=NARROW, ordered=(False, True), forms=WITH_ROWS)
def test_every_value_of_16_bits(kernel, format, dtype, ordered, forms):
    """Ordered, blocks hold neighbours, so that each of them is near its block's largest."""
    x = every_value(dtype)
    if ordered:
        x = np.arange(2**16, dtype=np.uint16).view(x.dtype).reshape(x.shape)
    quantize(Native(kernel), x, format, forms, np.array([100, 412], np.int32), key=KEY)


def around(values: NDArray[Any]) -> NDArray[np.float32]:
    """fp32 numbers and both neighbours of each."""
    x = values.astype(np.float32)
    return np.stack([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))], axis=-1).reshape(-1)


@pytest.mark.parametrize("kernel", kernels("quantize"))
@pytest.mark.parametrize("format", FOR_ROWS, ids=lambda f: f.name)
def test_decision_points(kernel, format):
    """Where a cast of fp32 turns from one code to the next, at scales that map to the type's largest times 2^k."""
    kind = "float8_e4m3fn" if format.values == "uint8" else format.values
    codes = np.arange(256, dtype=np.uint8).view(cases.numpy_dtype(kind)).astype(np.float32)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]) if format.values == "uint8" else np.unique(codes[np.isfinite(codes)])
    points = around(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]))
    top = np.float32(grid.max())
    block = format.block or 128
    lines = points[: points.size // (block - 1) * (block - 1)].reshape(-1, block - 1)
    lines = np.pad(lines, ((0, 0), (1, 0)), constant_values=top)
    scales = np.exp2([-140.0, -120, -8, 0, 1, 100, 118]).astype(np.float32)
    largest = around(np.array([top]))
    x = (lines[None, None] * scales[:, None, None, None]).repeat(3, axis=1)
    x[..., 0] = (largest[None, :, None] * scales[:, None, None]).astype(np.float32)
    x = np.ascontiguousarray(x.reshape(-1, block), np.float32)
    sizes = np.array([x.shape[0] // 2, x.shape[0] - x.shape[0] // 2], np.int32)
    quantize(Native(kernel), x, format, (True, False), sizes, key=KEY)
    transposed = np.ascontiguousarray(x.T)
    quantize(Native(kernel), transposed, format, (False, True), np.array([transposed.shape[0]], np.int32), key=KEY)


@pytest.mark.parametrize("kernel", kernels("quantize"))
@pytest.mark.parametrize("format", [f for f in FOR_WEIGHTS if f.square or not f.block], ids=lambda f: f.name)
def test_both_forms_hold_the_same_codes(kernel, format):
    """Where a scale covers as much of one axis as of the other, the forms are transposes (numerics 2.4)."""
    found = quantize(Native(kernel), cases.normal((2, 64, 48), "bfloat16"), format)
    one, other = found["values"].view(np.uint8), found["cross_values"].view(np.uint8)
    if format.values == "uint8":
        one, other = (np.stack([a & 15, a >> 4], axis=-1).reshape(*a.shape[:2], -1) for a in (one, other))
    asserts.bitwise(one, np.ascontiguousarray(other.swapaxes(1, 2)))
    if format.block:
        asserts.bitwise(found["scales"], np.ascontiguousarray(found["cross_scales"].swapaxes(1, 2)))


@pytest.mark.parametrize("kernel", kernels("quantize"))
@pytest.mark.parametrize("rotate", [False, True])
def test_random_bits_follow_key_and_stream(kernel, rotate):
    """The forms of one call have neighbouring streams; a key or stream gives its own numbers, each time the same."""
    x, sizes = cases.normal((64, 48), "bfloat16"), np.array([30, 34], np.int32)
    format = FORMATS["nvfp4"].replace(stochastic=True, rotate=rotate)
    run = Native(kernel)
    found = [
        quantize(run, x, format, (True, True), sizes, key=key, stream=stream)["values"].tobytes()
        for key, stream in ((KEY, 0), (KEY, 0), (KEY, 2), (KEY[::-1].copy(), 0), (np.zeros(2, np.uint32), 0))
    ]
    assert found[0] == found[1]
    assert len(set(found)) == 4
    asserts.bitwise(
        quantize(run, x, format, (True, True), sizes)["values"].reshape(-1),
        np.frombuffer(found[4], np.uint8),
    )


@pytest.mark.rule("ALL-2")
@pytest.mark.matrix(kernel=kernels("quantize"), format=FOR_ROWS, case=CASES[:4], dtype=cases.DTYPES, forms=WITH_ROWS)
def test_the_same_at_any_address_and_through_both_entries(kernel, format, case, dtype, forms):
    x, sizes = rows_of(case, dtype)
    first = quantize(Native(kernel), x, format, forms, sizes, key=KEY)
    anywhere = kernel if "_any_" in kernel else f"{kernel},quantize_any_cuda"
    for run in (Native(anywhere, unaligned=True), Native(kernel, check=False, dlpack=True)):
        same(quantize(run, x, format, forms, sizes, key=KEY), first)


@pytest.mark.rule("ALL-2", "GRP-12")
@pytest.mark.matrix(kernel=kernels("quantize"), format=FOR_ROWS, forms=WITH_ROWS)
def test_groups_do_not_see_each_other(kernel, format, forms):
    """A group quantised alone has the codes that it has between others; its random bits are those of its place."""
    x, sizes = cases.normal((180, 40), "bfloat16"), np.array([0, 50, 130], np.int32)
    found = quantize(Native(kernel), x, format, forms, sizes)
    spoiled = x.copy()
    spoiled[50:] = np.nan
    other = quantize(Native(kernel), spoiled, format, forms, sizes)
    asserts.bitwise(other["values"][:50], found["values"][:50])
    if not forms[1]:
        return
    segment = -(-50 // format.segment) * format.segment
    columns = (slice(None), slice(segment)) if format.transposed else slice(segment)
    asserts.bitwise(other["cross_values"][columns], found["cross_values"][columns])


@pytest.mark.rule("GRP-5", "GRP-6")
@pytest.mark.matrix(
    kernel=kernels("dequantize"),
    format=FOR_ROWS,
    case=CASES,
    dtype=cases.DTYPES,
    cross=(False, True),
    codes=("found", "any"),
)
def test_values_of_rows(kernel, format, case, dtype, cross, codes):
    x, sizes = rows_of(case, "float32")
    if format.rotate:
        format = format.replace(rotate=False)  # values of the codes; the rotation is not undone
    forms = (not cross, cross)
    quantized = quantize(Native("quantize_any_cpu", check=False), x, format, forms, sizes)
    if codes == "any":
        quantized = {name: shuffled(array, name) for name, array in quantized.items()}
    found = dequantize(Native(kernel), quantized, format, 0 if cross else 1, x, sizes, dtype)
    asserts.zero(found[case.valid :], "tail")


def shuffled(array: NDArray[Any], name: str) -> NDArray[Any]:
    """Any codes, NaN among them, and any scales."""
    rng = np.random.default_rng(len(name) + array.size)
    if array.dtype != np.float32:
        return rng.integers(0, 256, array.shape, np.uint8).view(array.dtype)
    scales = np.exp2(rng.integers(-149, 128, array.shape).astype(np.float64)).astype(np.float32)
    scales[rng.random(array.shape) < 0.1] = np.nan
    return scales


@pytest.mark.matrix(
    kernel=kernels("dequantize"),
    format=[f for f in FOR_WEIGHTS if not (f.stochastic or f.four_over_six)],
    shape=MEMBERS,
    dtype=cases.DTYPES,
    cross=(False, True),
    codes=("found", "any"),
)
def test_values_of_weights(kernel, format, shape, dtype, cross, codes):
    w = numbers(shape, "float32")
    quantized = quantize(Native("quantize_any_cpu", check=False), w, format, (not cross, cross))
    if codes == "any":
        quantized = {name: shuffled(array, name) for name, array in quantized.items()}
    dequantize(Native(kernel), quantized, format, 1 if cross else 2, w, None, dtype)


@pytest.mark.matrix(
    kernel=kernels("scale_update"),
    length=(1, 2, 5, 300, 2500),
    roles=(1, 3),
    groups=(1, 7, 300),
    most_recent=(False, True),
    reuse=(False, True),
)
def test_steps_of_delayed_scaling(kernel, length, roles, groups, most_recent, reuse):
    rng = np.random.default_rng(length + groups)
    history = np.abs(rng.standard_normal((roles, length, groups))).astype(np.float32)
    special = np.array([0, np.inf, np.nan, 2.0**-149, 2.0**-126, 3.4e38], np.float32)
    history[:, 0, : special.size] = special[:groups]
    history[:, -1, -1] = np.inf  # one that entered no window, in a window
    scale = np.full((roles, groups), 3, np.float32)
    fp8_max = np.array([448, 57344, 56], np.float32)[:roles]
    call = calls.scale_update(spec_of(scale), spec_of(history), "most_recent" if most_recent else "max", reuse=reuse)
    run = Native(kernel)
    for _ in range(3):
        if reuse:  # in the same memory: operands and results are one
            call = dataclasses.replace(call, aliases=((0, 0), (1, 1), (3, 0), (4, 1)))
        into = {"into_new_scale": scale, "into_new_history": history} if reuse else {}
        scale, history = run(call, call.arrange(scale=scale, history=history, top=fp8_max, **into))
        history[:, 0] = np.abs(rng.standard_normal((roles, groups))) * (rng.random((roles, groups)) < 0.7)


@pytest.mark.skipif(not _native.cuda_compiled, reason="this build has no CUDA kernels")
def test_a_grid_has_room_for_so_many_roles():
    for roles in (65535, 65536):
        call = calls.scale_update(ArraySpec((roles, 1), "float32"), ArraySpec((roles, 2, 1), "float32"), "max")
        found = plans.attempt(call, "sm_90a")
        assert found.kernel == ("scale_update_any_cuda" if roles == 65535 else "")
    assert ("scale_update_any_cuda", "takes up to 65535 roles") in found.refusals


class TestRefusals:
    """Formats that contradict themselves are refused by the native module itself."""

    ROWS, WEIGHTS = ArraySpec((12, 64), "bfloat16"), ArraySpec((3, 32, 64), "bfloat16")
    SIZES = ArraySpec((3,), "int32")

    @pytest.mark.parametrize(
        ("name", "rows", "params", "words"),
        [
            ("mxfp8", True, {"block": 24}, "block"),
            ("mxfp8", True, {"block": 256}, "block"),
            ("mxfp8", True, {"segment": 96}, "segment"),
            ("mxfp8", True, {"segment": 16}, "segment"),
            ("mxfp8", True, {"block_outer": 32}, "block_outer"),
            ("mxfp8", True, {"rule": "fp32"}, "scales"),
            ("mxfp8", True, {"rule": "nvfp4"}, "expected"),
            ("mxfp8", True, {"rule": "none"}, '`rule`: "none"'),
            ("mxfp8", True, {"stochastic": 1}, "stochastic"),
            ("mxfp8", True, {"rotate": 1}, "rotate"),
            ("mxfp8", False, {"block_outer": 16}, "block_outer"),
            ("nvfp4", True, {"transposed": 1}, "transposed"),
            ("nvfp4", True, {"block": 32}, "block"),
            ("nvfp4", True, {"four_over_six": "cubes"}, "four_over_six"),
            ("nvfp4", True, {"four_over_six": "square", "stochastic": 1}, "four_over_six"),
            ("nvfp4", True, {"full_range": 1}, "full_range"),
            ("nvfp4", False, {"rotate": 1}, "rotate"),
            ("fp8_1x128", True, {"block": 0}, "scales"),
        ],
    )
    def test_parameters(self, name, rows, params, words):
        source, sizes = (self.ROWS, self.SIZES) if rows else (self.WEIGHTS, None)
        call = calls.quantize(source, FORMATS[name], (True, True), sizes)
        call = dataclasses.replace(call, params=tuple({**dict(call.params), **params}.items()))

        with asserts.refused(ValueError, ["quantize", words]):
            plans.attempt(call, "cpu")

    def test_operands(self):

        for call, words in (
            (calls.quantize(self.ROWS, FORMATS["mxfp8"], (True, True), self.SIZES, scale=True), "scale"),
            (calls.quantize(self.ROWS, FORMATS["mxfp8"], (True, True), self.SIZES, skip=True), "skip"),
            (calls.quantize(self.ROWS, FORMATS["mxfp8"], (True, True), self.SIZES, table=True), "source_table"),
            (calls.quantize(self.ROWS, FORMATS["mxfp8"], (False, False), self.SIZES), "at least one"),
        ):
            with asserts.refused(ValueError, ["quantize", words]):
                plans.attempt(call, "cpu")
