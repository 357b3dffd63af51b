"""Fused calls whose result is quantised in the pass that makes it: the bits of the plain call and the quantiser."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from grouped_core import calls, plans
from grouped_core.activations import KINDS, Activation
from grouped_core.calls import ArraySpec, QuantizedResult, quantized_parts, spec_of
from grouped_core.formats import FORMATS
from grouped_core.products import arranged
from grouped_core.recipes import BF16
from tests import asserts, cases
from tests.native.quantized_operands import operand, sizes_of, spec
from tests.native.runner import Native, kernels, plain_kernels

CASES = [cases.named(name) for name in ("jagged", "tail", "idle_ends", "n_2880", "clamped_idle", "all_empty")]
FORMAT_NAMES = ("fp8_tensor", "fp8_tensor_e5m2", "fp8_1x128", "mxfp8", "nvfp4")
FORMS = ((True, True), (True, False), (False, True))
GATED = frozenset(name for name, kind in KINDS.items() if kind.gated)
QUANTIZING = ("scale", "key", "into_amax", "activated_scale")
"""Operands that are read to quantise results."""

OPERANDS = (("bf16", "bf16"), ("fp8_tensor", "fp8_tensor"), ("fp8_1x128", "fp8_128x128"), ("mxfp8", "mxfp8"))


def fits(
    case: cases.Case, activation: str, interleave: int | None, format: str, activated: str | None = None, **_: Any
) -> bool:
    if interleave is not None and (activation not in GATED or case.n % interleave):
        return False
    return "nvfp4" not in (format, activated) or case.n % 16 == 0


def storing_of(format: str, forms: tuple[bool, bool], given: bool) -> tuple[QuantizedResult, dict[str, Any]]:
    """How results are quantised, and the operands that are read for it except those per group."""
    fmt = FORMATS[format]
    if given and fmt.rule == "fp32" and not fmt.block:
        return QuantizedResult(fmt.replace(delayed=True), forms, scale=True, amax=True, merge=True), {}
    rotated = fmt.replace(rotate=True, stochastic=True) if format == "nvfp4" and given else fmt
    return QuantizedResult(rotated, forms, key=rotated.stochastic, stream=2), {"key": np.array([7, 9], np.uint32)}


def storing_activated(format: str, given: bool) -> QuantizedResult:
    """How activated rows are quantised beside gradients."""
    fmt = FORMATS[format]
    delayed = given and fmt.rule == "fp32" and not fmt.block
    return QuantizedResult(
        fmt.replace(delayed=delayed, rotate=given and format == "nvfp4"), (False, True), scale=delayed
    )


def problem(
    grad: bool, case: cases.Case, activation: Activation, operands: tuple[str, str], dtype: str, rhs_axis: int
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """Specs, options and arrays of a fused call."""
    sizes, wide = sizes_of(case), activation.fc1_width(case.n)
    width = case.n if grad else wide
    if operands[0] == "bf16":
        lhs = cases.normal((case.rows, case.k), dtype, "x")
        lhs[case.valid :] = cases.TAIL
        shape = (case.groups, width, case.k) if rhs_axis == 2 else (case.groups, case.k, width)
        rhs: Any = cases.normal(shape, dtype, "w")
    else:
        lhs = operand(operands[0], (case.rows, case.k), 1, sizes, "x")
        rhs = operand(operands[1], (case.groups, width, case.k), 2, sizes, "w")
        rhs_axis = 2
    scale = cases.normal((case.rows,), "float32", "row_scale")
    arrays: dict[str, Any] = {"lhs": lhs, "rhs": rhs, "group_sizes": sizes, "row_scale": scale}
    specs = (spec(lhs), spec(rhs), rhs_axis, spec_of(sizes))
    if grad:
        hidden, base = cases.normal((case.rows, wide), dtype, "hidden"), cases.normal((case.rows,), "float32", "base")
        for array in (hidden, base):
            array[case.valid :] = cases.TAIL
        arrays |= {"hidden": hidden, "row_base": base}
        specs += (spec_of(hidden),)
    return (*specs, dtype), {"activation": activation, "recipe": BF16, "row_scale": spec_of(scale)}, arrays


def plain_quantiser(kernel: str) -> Native:
    return Native("quantize_any_cpu" if "_cpu" in kernel else "quantize_any_cuda", check=False)


def composed_kernel(call: str, kernel: str) -> str:
    """Its bound holds for sums in another order: the rows between its parts are rounded too."""
    return f"{call}_composed_{'cpu' if '_cpu' in kernel else 'cuda'}"


def check(kernel: str, call: calls.Call, arrays: dict[str, Any], wanted: QuantizedResult, groups: int) -> None:
    """Every result has the bits of the plain call and of the plain quantiser; sums of rows have another order."""
    if wanted.scale:
        arrays["scale"] = np.exp2(np.arange(groups) % 9 - 4).astype(np.float32)
        arrays["scale"][1::3] = 0  # these groups have not started
        arrays["into_amax"] = cases.normal((groups,), "float32", "amax") ** 2
    if "activated_scale" in calls.SLOTS[call.name] and call.inputs[call.slot("activated_scale")] is not None:
        arrays["activated_scale"] = np.exp2(np.arange(groups) % 7 - 2).astype(np.float32)
        arrays["activated_scale"][2::3] = 0
    results = dict(
        zip(calls.RESULTS[call.name], Native(kernel, check=False)(call, arranged(call, **arrays)), strict=True)
    )
    parts = quantized_parts(call)
    assert parts is not None, "the call stores"
    inner = Native(plain_kernels(call.name, kernel), check=False)
    given = {name: array for name, array in arrays.items() if name not in QUANTIZING}
    expected = dict(zip(calls.RESULTS[call.name], inner(parts.plain, arranged(parts.plain, **given)), strict=True))
    named = {name: arrays.get(name) for name in ("group_sizes", "scale", "key", "into_amax")}
    forms = plain_quantiser(kernel)(parts.quantize, parts.quantize.arrange(source=expected["result"], **named))
    expected |= dict(zip(calls.RESULTS["quantize"], forms, strict=True))
    if parts.activated is not None:
        named = {"group_sizes": arrays["group_sizes"], "scale": arrays.get("activated_scale")}
        rows = expected["activated"]
        forms = plain_quantiser(kernel)(parts.activated, parts.activated.arrange(source=rows, **named))
        made = dict(zip(calls.RESULTS["quantize"], forms, strict=True))
        expected |= {name: made[own] for name, own in calls.ACTIVATED.items()}
    for name, want in zip(calls.RESULTS[call.name], call.outputs, strict=True):
        if name == "row_sum" and want is not None:
            alone = [results[name] if each == name else None for each in calls.RESULTS[call.name]]
            inner.compare(parts.plain, arranged(parts.plain, **given), alone, composed_kernel(call.name, kernel))
        elif want is not None:
            asserts.bitwise(results[name], expected[name], name)


@pytest.mark.rule("QNT-1", "MLP-1", "MLP-2", "GRP-5")
@pytest.mark.matrix(
    kernel=kernels("grouped_matmul_act", quantized=True),
    case=CASES,
    activation=("swiglu", "relu", "geglu_erf", "clamped_qgeglu"),
    interleave=(None, 1, 8, 32),
    operands=OPERANDS,
    dtype=("bfloat16", "float16"),
    format=FORMAT_NAMES,
    forms=FORMS,
    given=(False, True),
    hidden=(False, True),
    valid=fits,
)
def test_activated_rows(kernel, case, activation, interleave, operands, dtype, format, forms, given, hidden):
    wanted, arrays = storing_of(format, forms, given)
    specs, options, more = problem(
        False,
        case,
        Activation(activation, interleave=interleave),
        operands,
        dtype if operands[0] == "bf16" else "bfloat16",
        1,
    )
    call = calls.grouped_matmul_act(*specs, hidden=hidden, quantized=wanted, **options)
    check(kernel, call, {**arrays, **more} if wanted.key else more, wanted, case.groups)


@pytest.mark.rule("QNT-1", "MLP-1", "MLP-2", "GRP-5")
@pytest.mark.matrix(
    kernel=kernels("grouped_matmul_dact", quantized=True),
    case=CASES,
    activation=("swiglu", "silu", "geglu_tanh", "situ_glu"),
    interleave=(None, 1, 8, 128),
    operands=OPERANDS,
    dtype=("bfloat16", "float16"),
    format=FORMAT_NAMES,
    forms=FORMS,
    given=(False, True),
    beside=((False, False, False), (False, True, True), (True, False, True)),
    activated=(None, *FORMAT_NAMES),
    valid=fits,
)
def test_gradients(kernel, case, activation, interleave, operands, dtype, format, forms, given, beside, activated):
    wanted, arrays = storing_of(format, forms, given)
    specs, options, more = problem(
        True,
        case,
        Activation(activation, interleave=interleave),
        operands,
        dtype if operands[0] == "bf16" else "bfloat16",
        2,
    )
    based = {"row_base": spec_of(more["row_base"])} if beside[2] else {}
    more = more if beside[2] else {name: array for name, array in more.items() if name != "row_base"}
    how = None if activated is None else storing_activated(activated, given)
    call = calls.grouped_matmul_dact(
        *specs, wanted=beside, quantized=wanted, quantized_activated=how, **options, **based
    )
    check(kernel, call, {**arrays, **more} if wanted.key else more, wanted, case.groups)


@pytest.mark.rule("QNT-1", "MLP-1")
@pytest.mark.parametrize(
    ("format", "given", "case"),
    [
        ("fp8_tensor", False, cases.named("many_tiles")),
        ("fp8_tensor", False, cases.Case("one_large", (0, 13000, 5, 120), 13200, 16, 256, frozenset())),
        ("fp8_tensor", True, cases.named("many_tiles")),
        ("fp8_1x128", False, cases.named("many_tiles")),
    ],
    ids=lambda value: getattr(value, "name", None),
)
@pytest.mark.parametrize(
    "kernel", kernels("grouped_matmul_act", quantized=True) + kernels("grouped_matmul_dact", quantized=True)
)
def test_more_tiles_than_blocks(kernel, format, given, case):
    """Blocks take several tiles, of several groups; where amaxes are found, or wanted, each group's is raised.

    One group of `one_large` has more tiles than an H200 holds at once, though groups have few on average.
    """
    grad = "dact" in kernel
    wanted, _ = storing_of(format, (True, True), given)
    operands = OPERANDS["_fp8_" in kernel]  # of others the product's kernel has the activation in its epilogue
    specs, options, more = problem(grad, case, Activation("swiglu"), operands, "bfloat16", 2 if grad else 1)
    if grad:
        del more["row_base"]
        activated = storing_activated(format, given)
        call = calls.grouped_matmul_dact(
            *specs, wanted=(False, False, False), quantized=wanted, quantized_activated=activated, **options
        )
    else:
        call = calls.grouped_matmul_act(*specs, hidden=True, quantized=wanted, **options)
    pinned = dataclasses.replace(call, implementation=kernel)
    assert plans.attempt(pinned, "cpu" if "_cpu" in kernel else "sm_90a").kernel == kernel, "nothing is skipped"
    check(kernel, call, more, wanted, case.groups)


EXTREMES = cases.Case("extremes", (300, 0, 700, 130, 257, 140, 513), 2100, 16, 136, frozenset())


def named(call: str) -> list[tuple[str, Any]]:
    """The kernels that quantise the results of `call`, and their marks."""
    every = kernels(call, quantized=True)
    return [(each, ()) if isinstance(each, str) else (each.values[0], each.marks) for each in every]


def extreme(array: np.ndarray) -> None:
    """Groups of EXTREMES: magnitudes far apart; nothing; small ones; large ones; infinities; NaN; ordinary numbers."""
    random, wide = np.random.default_rng(array.size), array.astype(np.float32)
    groups = np.split(wide, np.cumsum(EXTREMES.sizes))
    with np.errstate(over="ignore"):
        for rows, powers in ((groups[0], (-20, 20)), (groups[2], (-133, -120)), (groups[3], (110, 127))):
            rows[:] = np.ldexp(rows, random.integers(*powers, rows.shape))
    for rows, value in ((groups[4], np.inf), (groups[5], np.nan)):
        rows.reshape(-1)[random.integers(0, rows.size, 6)] = [value, -value] * 3
    array[:] = wide.astype(array.dtype)


@pytest.mark.rule("QNT-1", "MLP-1")
@pytest.mark.parametrize("extremes", ["rows", "scales"])
@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize(
    ("kernel", "beside"),
    [
        *(pytest.param(name, False, marks=marks) for name, marks in named("grouped_matmul_act")),
        *(
            pytest.param(name, beside, marks=marks)
            for name, marks in named("grouped_matmul_dact")
            for beside in (False, True)
        ),
    ],
)
def test_amaxes_of_extremes(kernel, beside, activation, extremes):
    """The largest magnitude of a group is found, though few values are made to look for it (activation_bounds.cuh).

    `beside`: act(h) is quantised beside gradients, so a row that may have its largest one is made too.
    """
    grad = "dact" in kernel
    wanted, _ = storing_of("fp8_tensor", (True, True), False)
    operands = OPERANDS["_fp8_" in kernel]  # as in the test above
    specs, options, more = problem(grad, EXTREMES, Activation(activation), operands, "bfloat16", 2 if grad else 1)
    with np.errstate(invalid="ignore"):
        if extremes == "scales":
            extreme(more["row_scale"])
        elif grad:
            extreme(more["hidden"])
        elif operands[0] == "bf16":
            extreme(more["lhs"])
        else:
            more["lhs"].slots[2][2:] *= np.array([2.0**-40, 2.0**-130, 2.0**115, np.inf, np.nan], np.float32)
    call: calls.Call
    if grad:
        del more["row_base"]
        how = storing_activated("fp8_tensor", False) if beside else None
        plain = (False, False, False)
        call = calls.grouped_matmul_dact(*specs, wanted=plain, quantized=wanted, quantized_activated=how, **options)
    else:
        call = calls.grouped_matmul_act(*specs, hidden=True, quantized=wanted, **options)
    check(kernel, call, more, wanted, EXTREMES.groups)


@pytest.mark.rule("QNT-1", "MLP-1", "MLP-2", "GRP-5")
@pytest.mark.parametrize(
    ("name", "width", "activation", "forms"),
    [
        ("even_tiles", 40, "swiglu", (True, True)),
        ("even_tiles", 96, "clamped_qgeglu", (True, False)),
        ("tail_long", 200, "clamped_qgeglu", (True, True)),
        ("even_tiles", 328, "swiglu", (True, False)),
        pytest.param("many_tiles", 1000, "swiglu", (True, True), marks=pytest.mark.gpu),  # blocks take several tiles
        ("groups_1024", 200, "swiglu", (True, True)),  # so many that blocks on a GPU share memory (exchanges_over_slot)
    ],
)
@pytest.mark.parametrize("kernel", kernels("grouped_matmul_dact", quantized=True))
def test_blocks_that_straddle_halves(kernel, name, width, activation, forms):
    """A width that is no multiple of 128: one block of scales has the last gates and the first linear columns."""
    case = dataclasses.replace(cases.named(name), k=16, n=width)
    wanted, _ = storing_of("fp8_1x128", forms, False)
    operands = OPERANDS["_fp8_" in kernel]  # as in the test above
    specs, options, more = problem(True, case, Activation(activation), operands, "bfloat16", 2)
    call = calls.grouped_matmul_dact(
        *specs,
        wanted=(True, True, True),
        quantized=wanted,
        quantized_activated=storing_activated("fp8_1x128", False),
        row_base=spec_of(more["row_base"]),
        **options,
    )
    pinned = dataclasses.replace(call, implementation=kernel)
    assert plans.attempt(pinned, "cpu" if "_cpu" in kernel else "sm_90a").kernel == kernel, "nothing is skipped"
    check(kernel, call, more, wanted, case.groups)


def test_activated_codes_are_of_rows_rounded_as_hidden_ones():
    case = cases.named("jagged")
    wanted, _ = storing_of("fp8_tensor", (True, True), False)
    specs, options, _ = problem(True, case, Activation("swiglu"), OPERANDS[1], "bfloat16", 2)
    how = storing_activated("fp8_tensor", False)
    beside = (False, True, False)
    call = calls.grouped_matmul_dact(*specs, wanted=beside, quantized=wanted, quantized_activated=how, **options)
    at = calls.RESULTS[call.name].index("activated")
    outputs = (*call.outputs[:at], ArraySpec((case.rows, case.n), "float32"), *call.outputs[at + 1 :])
    with asserts.refused(ValueError, ["activated", "float32", "bfloat16"]):
        plans.attempt(dataclasses.replace(call, outputs=outputs), "cpu")
    codes = calls.RESULTS[call.name].index("activated_values")
    outputs = tuple(None if place == codes else spec for place, spec in enumerate(call.outputs))
    with asserts.refused(ValueError, ["`activated_group_scales`", "expected none without codes"]):
        plans.attempt(dataclasses.replace(call, outputs=outputs), "cpu")


def test_nothing_is_returned_twice():
    """Only gradients need a plain result beside quantised forms, because their bias sums read it."""
    case = cases.named("jagged")
    wanted, _ = storing_of("fp8_tensor", (True, False), False)
    specs, options, _ = problem(False, case, Activation("swiglu"), OPERANDS[1], "bfloat16", 2)
    call = calls.grouped_matmul_act(*specs, quantized=wanted, **options)
    outputs = (ArraySpec((case.rows, case.n), "bfloat16"), *call.outputs[1:])
    with asserts.refused(ValueError, ["result", "values in its place"]):
        plans.attempt(dataclasses.replace(call, outputs=outputs), "cpu")
