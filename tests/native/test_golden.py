"""Which kernel each tagged case gets: no fast path is lost in silence. Plans need no device."""

from __future__ import annotations

from typing import Any

import pytest

from grouped_core import _native, calls, debug, plans
from grouped_core.activations import Activation
from grouped_core.calls import ArraySpec
from grouped_core.formats import FORMATS, Format
from grouped_core.recipes import FP32_MODES, MXFP8, plain
from tests import asserts, cases
from tests.native.runner import JOINED, LOW

DEFAULT = {
    "cpu": "cpu",
    "sm_80": "cuda",
    "sm_89": "cuda",
    "sm_90a": "cuda",
}
"""By arch, the last word of the `<call>_any_*` kernel that takes whatever no row below does."""

FAST: dict[tuple[str, str, str], str] = {
    **{
        ("sm_90a", which, dtype): f"grouped_matmul_bf16{'_wgrad' if which == 'wgrad' else ''}_sm90"
        for which in ("forward", "dgrad", "wgrad")
        for dtype in ("bfloat16", "float16")
    },
    **{("sm_90a", which, "float32"): "grouped_matmul_fp32_sm90" for which in ("forward", "dgrad", "wgrad")},
}
"""Kernels of fast paths, by (arch, product, dtype): of cases whose rows are multiples of 16 bytes."""

TF32 = "grouped_matmul_tf32_cuda"
"""The kernel of float32 operands, whatever their width: on every GPU in the mode `tf32`, on some in `tf32x3`."""

NARROW, MOST_NARROW = "grouped_matmul_narrow_cuda", 32
"""The kernel of 16-bit products with so few columns, and of gradients with so few rows or columns."""

IN_PLACE = {"cpu": 2, "sm_80": 32, "sm_89": 32, "sm_90a": 64}
"""By arch: a contraction over two arrays, each as deep as a multiple of this, reads them in place, by the kernel
that takes them as one array. Others are joined. Where tensor cores multiply float32 it is half of that."""

OF_CODES = frozenset(
    f"grouped_matmul_{name}"
    for name in (
        *("fp8_fast_sm90", "fp8_sm90", "fp8_mn_sm90", "fp8_wgrad_sm90", "weight_only_sm90", "codes_sm90"),
        *("fp8_cuda", "widened_cuda"),
    )
)
"""Kernels of quantised operands: test_fp8_sm90.py and test_quantized_products.py say what they take."""

FAST_WIDTH = {"float32": 4, "bfloat16": 8, "float16": 8}
"""Elements in 16 bytes."""

PRODUCTS = ("forward", "dgrad", "wgrad")
CASES = (*cases.select(), *(case for tag in ("bench", "router", "cpu_bench", "decode") for case in cases.select(tag)))


def aligned(dtype: str, case: cases.Case) -> bool:
    """Whether rows are multiples of 16 bytes."""
    return case.k % FAST_WIDTH[dtype] == 0 and case.n % FAST_WIDTH[dtype] == 0


def golden(arch: str, which: str, dtype: str, case: cases.Case) -> str:
    """The kernel that a product must get."""
    side = {"forward": case.n, "dgrad": case.k, "wgrad": min(case.k, case.n)}[which]
    if arch != "cpu" and dtype != "float32" and aligned(dtype, case) and side <= MOST_NARROW:
        return NARROW
    return golden_of_any_width(arch, which, dtype, case)


def golden_of_any_width(arch: str, which: str, dtype: str, case: cases.Case) -> str:
    """The same where the kernel of narrow ones does not take it."""
    slow = golden_without_fast_paths(arch, which, dtype)
    return FAST.get((arch, which, dtype), slow) if aligned(dtype, case) else slow


def golden_without_fast_paths(arch: str, which: str, dtype: str) -> str:
    """The same where no kernel of fast paths takes it."""
    tf32 = dtype == "float32" and (arch == "sm_90a" or (arch == "sm_80" and which != "wgrad"))
    return TF32 if tf32 else f"grouped_matmul_any_{DEFAULT[arch]}"


def compiled(arch: str) -> None:
    if arch != "cpu" and not _native.cuda_compiled:
        pytest.skip("this build has no CUDA kernels")


def specs(case: cases.Case, dtype: str) -> tuple[ArraySpec, ArraySpec, ArraySpec, ArraySpec]:
    """x, w, dy, group_sizes."""
    x, dy = ArraySpec((case.rows, case.k), dtype), ArraySpec((case.rows, case.n), dtype)
    return x, ArraySpec((case.groups, case.k, case.n), dtype), dy, ArraySpec((case.groups,), "int32")


def product(case: cases.Case, dtype: str, which: str, into: str | None = None) -> calls.Call:
    x, w, dy, sizes = specs(case, dtype)
    lhs, rhs, axes = {"forward": (x, w, (1, 1)), "dgrad": (dy, w, (1, 2)), "wgrad": (x, dy, (0, 0))}[which]
    buffer = None if into is None else ArraySpec(w.shape, into)
    return calls.grouped_matmul(
        lhs, rhs, axes, sizes, into or dtype, recipe=plain(dtype), into=buffer, accumulate=into is not None
    )


@pytest.mark.rule("ERR-3")
@pytest.mark.parametrize("arch", DEFAULT)
@pytest.mark.parametrize("which", PRODUCTS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_products(arch, which, dtype):
    compiled(arch)
    for case in CASES:
        plan = plans.attempt(product(case, dtype, which), arch)
        assert plan.kernel == golden(arch, which, dtype, case), f"{case}: {plan.refusals}"


@pytest.mark.rule("ERR-3")
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_103", "sm_120"])
@pytest.mark.parametrize("mode", FP32_MODES)
@pytest.mark.parametrize("which", PRODUCTS)
def test_modes_of_float32_at_odd_widths(arch, mode, which):
    """Three products in tf32 pay on some chips; on sm_80 the layouts of a weight gradient might get other bits."""
    compiled(arch)
    x, w, dy, sizes = specs(cases.named("k_n_odd"), "float32")
    lhs, rhs, axes = {"forward": (x, w, (1, 1)), "dgrad": (dy, w, (1, 2)), "wgrad": (x, dy, (0, 0))}[which]
    call = calls.grouped_matmul(lhs, rhs, axes, sizes, "float32", recipe=plain("float32").replace(fp32=mode))
    pays = arch in ("sm_90", "sm_90a", "sm_100", "sm_103") or (arch == "sm_80" and which != "wgrad")
    plan, tf32 = plans.attempt(call, arch), mode == "tf32" or (mode == "tf32x3" and pays)
    assert plan.kernel == (TF32 if tf32 else "grouped_matmul_any_cuda"), plan.refusals


@pytest.mark.rule("ERR-3")
def test_calls_of_float32_that_hopper_leaves():
    """Results of 16 bits, and rows that are added to a buffer."""
    compiled("sm_90a")
    x, w, _, sizes = specs(cases.named("A"), "float32")
    buffer = ArraySpec((x.shape[0], w.shape[2]), "float32")
    for dtype, options in (("bfloat16", {}), ("float32", {"into": buffer, "accumulate": True})):
        call = calls.grouped_matmul(x, w, (1, 1), sizes, dtype, recipe=plain("float32"), **options)
        assert plans.attempt(call, "sm_90a").kernel == TF32


@pytest.mark.rule("ERR-3")
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize("dtypes", [("float8_e4m3fn", "float8_e4m3fn"), ("float8_e5m2", "float8_e4m3fn")])
def test_codes_without_hopper(arch, dtypes):
    """From sm_89 on operands of 8 bits whose lines are multiples of 16 bytes are multiplied as they are."""
    compiled(arch)
    built = any(89 <= int(name.rstrip("a")) <= int(arch[3:]) for name in _native.cuda_archs)
    for k, n, axis, whole in ((48, 24, 2, 1), (40, 24, 2, 0), (48, 32, 1, 1), (48, 24, 1, 0), (40, 32, 1, 0)):
        shape = (3, n, k) if axis == 2 else (3, k, n)
        x, w, sizes = ArraySpec((64, k), dtypes[0]), ArraySpec(shape, dtypes[1]), ArraySpec((3,), "int32")
        call = calls.grouped_matmul(x, w, (1, axis), sizes, "bfloat16", recipe=plain(dtypes[0]))
        plan = plans.attempt(call, arch)
        wanted = "fp8_cuda" if built and whole else "widened_cuda"
        assert plan.kernel == f"grouped_matmul_{wanted}", plan.refusals


@pytest.mark.rule("ERR-3")
@pytest.mark.parametrize(("k", "takes"), [(2**27 - 2**20, True), (2**27, False)])
def test_lines_of_scales_have_offsets_of_32_bits(k, takes):
    """Of the 256 columns that a block of few rows takes: behind 2^31 bytes another kernel has to read them."""
    compiled("sm_90a")
    x, sizes = ArraySpec((4, k), "bfloat16"), ArraySpec((1,), "int32")
    weight = calls.spec_in_format(FORMATS["nvfp4"], (1, 256, k), 2, "bfloat16", 1)
    call = calls.grouped_matmul(x, weight, (1, 2), sizes, "bfloat16", recipe=plain("bfloat16"))
    plan = plans.attempt(call, "sm_90a")
    assert (plan.kernel == "grouped_matmul_weight_only_sm90") == takes, plan.refusals
    assert any("lines of scales" in reason for _, reason in plan.refusals) != takes


@pytest.mark.rule("ERR-3", "MAT-3")
@pytest.mark.parametrize("arch", DEFAULT)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_halves_of_a_weight(arch, dtype):
    compiled(arch)
    on_tensor_cores = dtype == "float32" and arch in ("sm_80", "sm_90a")
    multiple = IN_PLACE[arch] // (2 if on_tensor_cores else 1)
    for half in (1, 2, 48, 61, 96, 128, 136, 192, 256):
        part, whole = (cases.Case("halves", (150, 301), 540, 136, n, frozenset()) for n in (half, 2 * half))
        (x, w, _, sizes), dy, recipe = specs(part, dtype), specs(whole, dtype)[2], plain(dtype)
        columns = plans.attempt(calls.grouped_matmul(x, w, (1, 1), sizes, dtype, recipe=recipe, result_half=2), arch)
        assert columns.kernel == golden(arch, "forward", dtype, part), f"{half}: {columns.refusals}"
        depths = plans.attempt(calls.grouped_matmul(dy, w, (1, 2), sizes, dtype, recipe=recipe, rhs_up=w), arch)
        joined = f"grouped_matmul_joined_{'cpu' if arch == 'cpu' else 'cuda'}"
        wanted = golden(arch, "dgrad", dtype, whole) if half % multiple == 0 else joined
        assert depths.kernel == wanted, f"{half}: {depths.refusals}"


@pytest.mark.rule("ERR-3", "LOR-1")
@pytest.mark.parametrize("arch", DEFAULT)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("rank", [4, 16])
def test_products_of_low_rank_beside_others(arch, dtype, rank):
    """In the loop of a fast kernel where its copies can read the rank's rows; else three calls of what dispatch has."""
    compiled(arch)
    composed = f"grouped_matmul_low_composed_{DEFAULT[arch]}"
    for case in CASES:
        x, w, _, sizes = specs(case, dtype)
        factors = ArraySpec((case.rows, rank), dtype), ArraySpec((case.groups, rank, case.n), dtype)
        options: dict[str, Any] = {"recipe": plain(dtype), "low": calls.LowRank(*factors, 1)}
        plan = plans.attempt(calls.grouped_matmul(x, w, (1, 1), sizes, dtype, **options), arch)
        fast = golden_of_any_width(arch, "forward", dtype, case)
        inside = fast == "grouped_matmul_bf16_sm90" and rank % FAST_WIDTH[dtype] == 0
        assert plan.kernel == (fast if inside else composed), f"{case}: {plan.refusals}"


MEMORY = 2**20
"""Bytes that a call on fast paths may ask for."""


@pytest.mark.rule("MAT-3")
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", ["A", "C"])
@pytest.mark.parametrize("transposed", [False, True])
def test_halves_take_no_memory(dtype, shape, transposed):
    """Nothing is joined on fast paths, and no room is kept for it, in case that addresses are not aligned."""
    compiled("sm_90a")
    case = cases.named(shape)
    x, _, dh, sizes = specs(case, dtype)
    half = case.n // 2
    w = ArraySpec((case.groups, half, case.k) if transposed else (case.groups, case.k, half), dtype)
    forward, dgrad = (2, 1) if transposed else (1, 2)
    rows, columns = ((dh, x), (2, 0)) if transposed else ((x, dh), (0, 2))
    options: dict[str, Any] = {"recipe": plain(dtype)}
    for call in (
        calls.grouped_matmul_act(x, w, forward, sizes, dtype, activation=Activation("swiglu"), rhs_up=w, **options),
        calls.grouped_matmul(dh, w, (1, dgrad), sizes, dtype, rhs_up=w, **options),
        calls.grouped_matmul(*rows, (0, 0), sizes, dtype, halves=columns, **options),
    ):
        plan = plans.attempt(call, "sm_90a")
        assert plan.kernel, plan.refusals
        assert plan.workspace_bytes < MEMORY, f"{plan.kernel} takes {plan.workspace_bytes} bytes"


@pytest.mark.parametrize(("mode", "parts"), [("tf32x3", 6), ("tf32", 16), ("ieee", 0)])
def test_few_tiles_of_a_weight_gradient_are_summed_in_parts(mode, parts):
    """Their room shows how many: as many in either layout, of a half as of the whole; none where batch-invariant."""
    compiled("sm_90a")
    case = cases.named("router")
    x, _, dy, sizes = specs(case, "float32")
    size = 4 * case.k * case.n

    def room(recipe: Any, *rows: ArraySpec, halves: tuple[int, int] = (0, 0)) -> int:
        plan = plans.attempt(
            calls.grouped_matmul(*rows, (0, 0), sizes, "float32", recipe=recipe, halves=halves), "sm_90a"
        )
        assert (plan.kernel == "grouped_matmul_fp32_sm90") == (mode != "ieee"), plan.refusals
        return plan.aligned_workspace_bytes

    recipe = plain("float32").replace(fp32=mode)
    for rows, columns in (((x, dy), (0, 1)), ((dy, x), (2, 0))):
        assert parts * size <= room(recipe, *rows) < parts * size + MEMORY
        assert parts * size // 2 <= room(recipe, *rows, halves=columns) < parts * size // 2 + MEMORY
        assert room(recipe.replace(batch_invariant=True), *rows) < MEMORY


def fused(case: cases.Case, dtype: str, *, quantized: str | None = None, implementation: str = "") -> list[calls.Call]:
    """The fused calls of an MLP's first product, without kept hidden rows, and of the gradients at them.

    `quantized`: the format of rows and weights, contracted along their last axis; None: plain.
    """
    swiglu, width = Activation("swiglu"), case.n // 2
    options: dict[str, Any] = {"activation": swiglu, "implementation": implementation}
    options["recipe"] = MXFP8 if quantized else plain(dtype)

    def operand(*shape: int) -> Any:
        whole = ArraySpec(shape, dtype)
        return calls.spec_in_format(FORMATS[quantized], shape, len(shape) - 1, dtype) if quantized else whole

    x, hidden, sizes = operand(case.rows, case.k), ArraySpec((case.rows, case.n), dtype), specs(case, dtype)[3]
    wi, wo = operand(case.groups, case.n, case.k), operand(case.groups, width, case.k)
    return [
        calls.grouped_matmul_act(x, wi, 2, sizes, dtype, hidden=False, **options),
        calls.grouped_matmul_dact(x, wo, 2, sizes, hidden, dtype, wanted=(True, True, True), **options),
    ]


def between(call: calls.Call, dtype: str) -> int:
    """Bytes of the rows that a composed call puts into the workspace."""
    depth = 1 if call.name == "grouped_matmul_dact" else 2
    result = call.outputs[1 if depth == 1 else 0]
    assert result is not None
    return depth * result.shape[0] * result.shape[1] * cases.numpy_dtype(dtype).itemsize


PARTIAL = 2**23
"""Bytes that the sums of a call's column tiles may take."""


@pytest.mark.rule("GRP-3")
@pytest.mark.parametrize(("dtype", "quantized"), [("bfloat16", None), ("float16", None), ("bfloat16", "mxfp8")])
@pytest.mark.parametrize("shape", ["A", "C"])
def test_aligned_operands_need_no_room_for_the_spare(dtype, quantized, shape):
    """Rows between product and activation are kept for odd addresses alone, also behind a pass that widens codes."""
    compiled("sm_90a")
    for call in fused(cases.named(shape), dtype, quantized=quantized):
        plan, kernel = plans.attempt(call, "sm_90a"), f"{call.name}_{'widened_cuda' if quantized else 'bf16_sm90'}"
        assert plan.kernel == kernel, plan.refusals
        assert (plan.spare == f"{call.name}_composed_cuda") == (quantized is None)
        more = plan.workspace_bytes - plan.aligned_workspace_bytes
        assert between(call, dtype) - PARTIAL < more < between(call, dtype) + MEMORY
        if quantized is None:
            assert plan.aligned_workspace_bytes < PARTIAL, f"{kernel} takes {plan.aligned_workspace_bytes} bytes"
        text = debug.explain_calls([call], "sm_90a")
        assert f"{kernel} on sm_90a, workspace {plan.aligned_workspace_bytes} bytes\n" in text
        odd = f"where an address is not a multiple of 16 bytes, workspace {plan.workspace_bytes} bytes"
        assert f"\n    {plan.spare or kernel} {odd}" in text


@pytest.mark.rule("LOR-3")
@pytest.mark.parametrize(
    ("format", "rank"), [("mxfp4", 0), ("mxfp4", 16), ("mxfp8", 0), ("mxfp8", 16), ("nvfp4", 0), ("fp8_tensor", 0)]
)
@pytest.mark.parametrize("shape", ["A", "B", "C", "D", "E"])
def test_frozen_codes_are_not_widened_in_memory(format, rank, shape):
    """Forward and the gradient of x read one stored form, and nothing of its size is written; with adapters, too."""
    compiled("sm_90a")
    case, swiglu = cases.named(shape), Activation("swiglu")
    x, _, dy, sizes = specs(case, "bfloat16")
    half = case.n // 2

    def weight(*dims: int) -> calls.QuantizedSpec:
        return calls.spec_in_format(FORMATS[format], dims, 2, "bfloat16")

    def options(width: int, axis: int) -> dict[str, Any]:
        factor = (case.groups, width, rank) if axis == 2 else (case.groups, rank, width)
        low = calls.LowRank(ArraySpec((case.rows, rank), "bfloat16"), ArraySpec(factor, "bfloat16"), axis)
        return {"recipe": plain("bfloat16"), "low": low if rank else None}

    wi, wo = weight(case.groups, case.n, case.k), weight(case.groups, case.k, half)
    hidden = ArraySpec((case.rows, case.n), "bfloat16")
    for call in (
        calls.grouped_matmul(x, wi, (1, 2), sizes, "bfloat16", **options(case.n, 2)),
        calls.grouped_matmul(dy, wi, (1, 1), sizes, "bfloat16", **options(case.k, 1)),
        calls.grouped_matmul_act(x, wi, 2, sizes, "bfloat16", activation=swiglu, **options(case.n, 2)),
        calls.grouped_matmul_dact(
            x, wo, 1, sizes, hidden, "bfloat16", activation=swiglu, wanted=(True, True, True), **options(half, 1)
        ),
    ):
        plan = plans.attempt(call, "sm_90a")
        assert plan.kernel == f"{call.name}_codes_sm90", plan.refusals
        assert plan.aligned_workspace_bytes < PARTIAL, f"{plan.kernel} takes {plan.aligned_workspace_bytes} bytes"


@pytest.mark.parametrize("arch", DEFAULT)
@pytest.mark.parametrize("name", ["", "composed", "reference"])
def test_workspaces_of_addresses(arch, name):
    """Only addresses that a kernel wants aligned make a workspace larger; where all take any, there is one size."""
    compiled(arch)
    wanted = {"lhs", "rhs", "rhs_up", "hidden", "result", "activated"}
    for call in fused(cases.named("A"), "bfloat16", implementation=name):
        plan = plans.attempt(call, arch)
        slots = [*calls.SLOTS[call.name], *calls.RESULTS[call.name], "workspace"]
        given = [spec is not None for spec in (*call.inputs, *call.outputs)]
        even = [16 * at for at in range(len(slots))]
        assert plan.workspace_for(even) == plan.aligned_workspace_bytes <= plan.workspace_bytes
        assert (plan.aligned_workspace_bytes < plan.workspace_bytes) == ((arch, name) == ("sm_90a", ""))
        for at, slot in enumerate(slots[:-1]):
            if not given[at]:
                continue
            for odd in (1, 2, 4, 8):
                needed = plan.workspace_bytes if slot in wanted else plan.aligned_workspace_bytes
                assert plan.workspace_for([*even[:at], even[at] + odd, *even[at + 1 :]]) == needed, slot
        with asserts.refused(ValueError, [f"got {len(slots) - 1} addresses", f"expected {len(slots)}"]):
            plan.workspace_for(even[:-1])


@pytest.mark.rule("GRP-3")
@pytest.mark.parametrize(("format", "scales"), [("nvfp4", True), ("mxfp8", False)])
def test_workspaces_of_stored_results(format, scales):
    """A fused call asks for what its quantiser asks for: scales of four-bit codes are written several at once."""
    compiled("sm_90a")
    case = cases.named("A")
    x, _, _, sizes = specs(case, "bfloat16")
    hidden = ArraySpec((case.rows, 2 * case.n), "bfloat16")
    wi = ArraySpec((case.groups, case.k, 2 * case.n), "bfloat16")
    wo = ArraySpec((case.groups, case.k, case.n), "bfloat16")
    form = FORMATS[format]
    options: dict[str, Any] = {"activation": Activation("swiglu"), "recipe": plain("bfloat16")}
    options["quantized"] = calls.QuantizedResult(form, (True, True))
    wanted: dict[str, Any] = {
        "wanted": (False, False, True),
        "quantized_activated": calls.QuantizedResult(form, (False, True)),
    }
    looked_at = 0
    for call in (
        calls.grouped_matmul_act(x, wi, 1, sizes, "bfloat16", hidden=False, **options),
        calls.grouped_matmul_dact(x, wo, 1, sizes, hidden, "bfloat16", **options, **wanted),
    ):
        plan = plans.attempt(call, "sm_90a")
        assert plan.aligned_workspace_bytes < plan.workspace_bytes, plan.kernel
        slots = [*calls.SLOTS[call.name], *calls.RESULTS[call.name], "workspace"]
        given = [spec is not None for spec in (*call.inputs, *call.outputs)]
        even = [16 * at for at in range(len(slots))]
        for at, slot in enumerate(slots[:-1]):
            if not given[at] or not slot.endswith(("values", "scales")) or "group" in slot:
                continue
            full = slot.endswith("values") or scales
            needed = plan.workspace_bytes if full else plan.aligned_workspace_bytes
            assert plan.workspace_for([*even[:at], even[at] + 1, *even[at + 1 :]]) == needed, slot
            looked_at += 1
    assert looked_at == 4 + 6


@pytest.mark.rule("ERR-3")
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_120"])
@pytest.mark.parametrize("format", ["fp8_tensor", "fp8_1x128"])
@pytest.mark.parametrize("kind", ["swiglu", "gelu_tanh"])
def test_one_pass_from_activation_to_codes(arch, format, kind):
    """Other chips have 99 KiB of shared memory per block, which gradients in gated halves fill up to so many groups."""
    compiled(arch)
    options: dict[str, Any] = {"activation": Activation(kind), "recipe": plain("bfloat16")}
    both, columns = (calls.QuantizedResult(FORMATS[format], forms) for forms in ((True, True), (False, True)))
    gated = kind == "swiglu"
    for groups in (8, 190, 191, 1024):
        case = cases.Case("stored", (64,) * groups, 64 * groups, 256, 512, frozenset())
        x, _, _, sizes = specs(case, "bfloat16")
        hidden = ArraySpec((case.rows, (2 if gated else 1) * case.n), "bfloat16")
        wi, wo = (ArraySpec((groups, case.k, width), "bfloat16") for width in (hidden.shape[1], case.n))
        forward = calls.grouped_matmul_act(x, wi, 1, sizes, "bfloat16", hidden=True, quantized=both, **options)
        for activated in (None, columns):
            wanted: dict[str, Any] = {"wanted": (False, False, True), "quantized_activated": activated}
            backward = calls.grouped_matmul_dact(
                x, wo, 1, sizes, hidden, "bfloat16", quantized=both, **options, **wanted
            )
            large = gated and (format == "fp8_1x128" or activated is not None)
            for call in (forward, backward):
                plan, name = plans.attempt(call, arch), f"{call.name}_quantized_fp8_cuda"
                fits = arch == "sm_80" or call is forward or groups <= 190 or not large
                assert (plan.kernel == name) == fits, plan.refusals
                if not fits:
                    reason = f"bytes of shared memory per block, which has 101376 on {arch}"
                    assert reason in dict(plan.refusals)[name]


@pytest.mark.rule("ERR-3")
@pytest.mark.parametrize("arch", DEFAULT)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("into", ["float32", "bfloat16"])
def test_accumulating_weight_gradients(arch, dtype, into):
    compiled(arch)
    for case in CASES:
        plan = plans.attempt(product(case, dtype, "wgrad", into), arch)
        wanted = golden(arch, "wgrad", dtype, case)
        if into not in (dtype, "float32") and wanted != NARROW:  # Hopper's take no accumulator of the other 16-bit type
            wanted = golden_without_fast_paths(arch, "wgrad", dtype)
        assert plan.kernel == wanted, f"{case}: {plan.refusals}"


@pytest.mark.parametrize("arch", DEFAULT)
def test_the_other_calls(arch):
    compiled(arch)
    for case in CASES:
        x, _, dy, sizes = specs(case, "bfloat16")
        scale = ArraySpec((case.rows,), "float32")
        for call in (
            calls.group_sum(dy, sizes, "bfloat16", scale),
            calls.row_dot(sizes, case.rows, (x, x), (dy, ArraySpec((case.groups, case.n), "bfloat16"))),
            calls.scale_rows(dy, scale, sizes, "bfloat16"),
            calls.add_rows(dy, sizes, "bfloat16", rate=0.5),
        ):
            plan = plans.attempt(call, arch)
            assert plan.kernel == f"{call.name}_any_{DEFAULT[arch]}", f"{case}: {plan.refusals}"


STORES = {
    "fp8_tensor": ("fp8", "fp8"),
    "fp8_tensor_e5m2": ("fp8", "fp8"),
    "fp8_1x128": ("fp8_rows", "fp8"),
    "fp8_1x128_e5m2": ("fp8_rows", "fp8"),
    "fp8_128x128": ("fp8", "fp8"),
    "mxfp8": ("fp8_rows", "fp8"),
    "mxfp8_e5m2": ("fp8_rows", "fp8"),
    "mxfp8_2d": ("any", "any"),
    "mxfp4": ("fp4", "any"),
    "nvfp4": ("fp4", "fp4"),
    "nvfp4_2d": ("fp4", "fp4"),
}
"""Quantisers on CUDA, by format: of rows only, and with the cross form, for any source and address."""


def quantiser(kind: str, format: Format, source: ArraySpec, groups: int | None, arch: str) -> str:
    """Its name. Current scaling has one of its own, which reads 16-bit values once, where it can hold a group's."""
    found = not (format.block or format.delayed) and source.dtype != "float32" and arch != "sm_89"
    holds = 2 * source.shape[-2] * source.shape[-1] <= 2**24 if groups is None else groups <= 1024
    return f"quantize_{'fp8_current' if kind == 'fp8' and found and holds else kind}_{DEFAULT[arch]}"


@pytest.mark.rule("MAT-2")
@pytest.mark.parametrize("arch", DEFAULT)
@pytest.mark.parametrize("name", STORES)
def test_quantisers(arch, name):
    compiled(arch)
    format, end = FORMATS[name], DEFAULT[arch]
    for case in cases.select("bench"):
        for dtype in cases.DTYPES:
            rows, _, _, sizes = specs(case, dtype)
            weights = ArraySpec((case.groups, case.k, case.n), dtype)
            sources = [(weights, None, False), (weights, None, True)]
            if not format.square:
                sources.append((rows, sizes, False))
            for source, group_sizes, listed in sources:
                for kind, forms in zip(STORES[name], ((True, False), (True, True)), strict=True):
                    plan = plans.attempt(calls.quantize(source, format, forms, group_sizes, table=listed), arch)
                    groups = None if group_sizes is None else case.groups
                    wanted = quantiser("any" if end == "cpu" else kind, format, source, groups, arch)
                    assert plan.kernel == wanted, f"{case}, {forms}, {listed=}: {plan.refusals}"


OPTIONS = {
    "fp8_tensor_delayed": ("fp8_tensor", {"delayed": True}, "fp8"),
    "nvfp4_stochastic": ("nvfp4", {"stochastic": True}, "fp4"),
    "nvfp4_rotate": ("nvfp4", {"rotate": True}, "fp4"),
    "nvfp4_rotate_stochastic": ("nvfp4", {"rotate": True, "stochastic": True}, "fp4"),
    "nvfp4_four_over_six": ("nvfp4", {"four_over_six": "square"}, "any"),
}
"""Quantisers of rows on CUDA in both forms, by what is asked beside the format."""


@pytest.mark.rule("MAT-2")
@pytest.mark.parametrize("arch", DEFAULT)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_quantisers_with_options(arch, name, dtype):
    compiled(arch)
    format_name, changes, kind = OPTIONS[name]
    format = FORMATS[format_name].replace(**changes)
    if format.rotate and dtype == "float16":
        kind = "any"  # rotated values have more bits than it
    sizes, rows = ArraySpec((128,), "int32"), ArraySpec((4096, 1024), dtype)
    options = {"scale": format.delayed, "amax": format.delayed, "key": format.stochastic}
    plan = plans.attempt(calls.quantize(rows, format, (True, True), sizes, **options), arch)
    assert plan.kernel == f"quantize_{'any' if arch == 'cpu' else kind}_{DEFAULT[arch]}", plan.refusals


@pytest.mark.parametrize("arch", DEFAULT)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", [name for name, kinds in STORES.items() if kinds[0] != "any"])
def test_quantisers_of_many_groups(arch, name, dtype):
    """Rows: as many groups as a table in shared memory holds. Weights have no table."""
    compiled(arch)
    format, end, kind = FORMATS[name], DEFAULT[arch], STORES[name][0]
    most = 1024 if arch == "sm_89" else 4096
    for groups in (1024, 1025, 4096, 4097):
        for listed in (False, True):
            weights = ArraySpec((groups, 16, 128), dtype)
            call = calls.quantize(weights, format, (True, False), None, table=listed)
            wanted = quantiser("any" if end == "cpu" else kind, format, weights, None, arch)
            assert plans.attempt(call, arch).kernel == wanted
        if not format.square:
            sizes, rows = ArraySpec((groups,), "int32"), ArraySpec((8192, 128), dtype)
            call = calls.quantize(rows, format, (True, False), sizes)
            fast = end != "cpu" and groups <= most
            wanted = quantiser(kind if fast else "any", format, rows, groups, arch)
            assert plans.attempt(call, arch).kernel == wanted


@pytest.mark.parametrize("arch", DEFAULT)
@pytest.mark.parametrize("name", [name for name, kinds in STORES.items() if kinds[0] == "fp8_rows"])
def test_rows_that_the_portable_quantiser_takes(arch, name):
    """A width that no vector divides, more sizes than a table holds, amaxes of groups in blocks."""
    compiled(arch)
    rows, sizes, many = ArraySpec((64, 256), "bfloat16"), ArraySpec((4,), "int32"), ArraySpec((4097,), "int32")
    format, forms = FORMATS[name], (True, False)
    for call in (
        calls.quantize(ArraySpec((64, 260), "bfloat16"), format, forms, sizes),
        calls.quantize(ArraySpec((64, 260), "float32"), format, forms, sizes),
        calls.quantize(rows, format, forms, many),
        calls.quantize(rows, format, forms, sizes, amax=True),
    ):
        plan = plans.attempt(call, arch)
        assert plan.kernel == f"quantize_any_{DEFAULT[arch]}", plan.refusals
        if arch != "cpu":
            assert dict(plan.refusals)["quantize_fp8_rows_cuda"], "refuses in words"


def test_every_fast_kernel_is_golden_somewhere():
    """A kernel that is listed and that no row names may have lost all its cases."""
    listed = set(_native.kernels()["grouped_matmul"])
    fast = {name for name in listed if "_any_" not in name and JOINED not in name and LOW not in name}
    fast -= OF_CODES | {NARROW}
    golden_somewhere = {*FAST.values(), TF32}
    assert fast <= golden_somewhere, f"say in FAST which cases get {sorted(fast - golden_somewhere)}"
    assert golden_somewhere <= listed or not _native.cuda_compiled
