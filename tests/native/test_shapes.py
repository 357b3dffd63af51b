"""Calls whose shapes disagree are refused by the native module itself, whoever made them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from grouped_core import calls, plans
from grouped_core.activations import Activation
from grouped_core.calls import RESULTS, SLOTS, ArraySpec, Call, LowRank
from grouped_core.formats import FORMATS
from grouped_core.recipes import BF16
from tests import asserts
from tests.native.every_call import every_call

M, G, K, N = 12, 3, 8, 16
SIZES = ArraySpec((G,), "int32")
SCALE = ArraySpec((M,), "float32")


def rows(width: int) -> ArraySpec:
    return ArraySpec((M, width), "bfloat16")


def weight(*shape: int) -> ArraySpec:
    return ArraySpec(shape, "bfloat16")


CALLS = {
    "forward": calls.grouped_matmul(
        rows(K), weight(G, K, N), (1, 1), SIZES, "bfloat16", recipe=BF16, bias=weight(G, N), row_scale=SCALE
    ),
    "forward_listed": calls.grouped_matmul(
        *(rows(K), weight(G, N, K), (1, 2), SIZES, "bfloat16"),
        recipe=BF16,
        bias=weight(G, N),
        into=rows(N),
        tables=(True, True, False),
    ),
    "wgrad": calls.grouped_matmul(
        rows(K), rows(N), (0, 0), SIZES, "bfloat16", recipe=BF16, into=weight(G, K, N), accumulate=True
    ),
    "wgrad_listed": calls.grouped_matmul(
        *(rows(K), rows(N), (0, 0), SIZES, "bfloat16"),
        recipe=BF16,
        into=weight(G, K, N),
        tables=(False, False, True),
    ),
    "two_arrays": calls.grouped_matmul(
        rows(2 * N), weight(G, K, N), (1, 2), SIZES, "bfloat16", recipe=BF16, rhs_up=weight(G, K, N)
    ),
    "half_of_the_result": calls.grouped_matmul(
        rows(K), weight(G, K, N), (1, 1), SIZES, "bfloat16", recipe=BF16, bias=weight(G, 2 * N), result_half=2
    ),
    "half_of_the_columns": calls.grouped_matmul(
        rows(K), rows(2 * N), (0, 0), SIZES, "bfloat16", recipe=BF16, into=weight(G, K, N), halves=(0, 2)
    ),
    "low_rank": calls.grouped_matmul(
        *(rows(K), weight(G, K, N), (1, 1), SIZES, "bfloat16"),
        recipe=BF16,
        low=LowRank(rows(4), weight(G, 4, N), 1),
    ),
    "low_rank_listed": calls.grouped_matmul(
        *(rows(K), weight(G, N, K), (1, 2), SIZES, "bfloat16"),
        recipe=BF16,
        low=LowRank(rows(4), weight(G, N, 4), 2, table=True),
    ),
    "low_rank_act": calls.grouped_matmul_act(
        *(rows(K), weight(G, K, 2 * N), 1, SIZES, "bfloat16"),
        activation=Activation("swiglu"),
        recipe=BF16,
        low=LowRank(rows(4), weight(G, 4, 2 * N), 1),
    ),
    "low_rank_dact": calls.grouped_matmul_dact(
        *(rows(K), weight(G, N, K), 2, SIZES, rows(2 * N), "bfloat16"),
        activation=Activation("swiglu"),
        recipe=BF16,
        wanted=(True, False, False),
        low=LowRank(rows(4), weight(G, N, 4), 2),
    ),
    "low_rank_grads": calls.low_rank_grads(
        rows(N), weight(G, 4, N), 2, rows(4), SIZES, ("float32", "bfloat16"), recipe=BF16
    ),
    "low_rank_grads_listed": calls.low_rank_grads(
        rows(N), weight(G, N, 4), 1, rows(4), SIZES, ("bfloat16", "bfloat16"), recipe=BF16, table=True
    ),
    "group_sum": calls.group_sum(rows(N), SIZES, "float32", SCALE),
    "row_dot": calls.row_dot(SIZES, M, (rows(K), rows(K)), (rows(N), weight(G, N)), True),
    "scale_rows": calls.scale_rows(rows(N), SCALE, SIZES, "bfloat16", rows(N)),
    "add_rows": calls.add_rows(rows(N), SIZES, "bfloat16", base=ArraySpec((M, N), "float32"), into=rows(N), rate=0.5),
    "shard_amax": calls.shard_amax(weight(G, 32, 64), FORMATS["mxfp8"]),
    "shard_cast": calls.shard_cast(weight(G, 32, 64), FORMATS["nvfp4"], (True, True), skip=True),
}


def changed(spec: ArraySpec) -> list[ArraySpec]:
    """The spec with each axis one longer, one axis more, one axis less."""
    shape = spec.shape
    longer = [(*shape[:i], shape[i] + 1, *shape[i + 1 :]) for i in range(len(shape))]
    return [ArraySpec(other, spec.dtype) for other in (*longer, (*shape, 1), shape[1:])]


def refused(call: Call) -> None:
    with asserts.refused(ValueError, [call.name]):
        plans.attempt(call, "cpu")


@pytest.mark.parametrize("name", CALLS)
def test_every_shape_counts(name):
    """No operand's or result's shape can change alone, but for G where nothing else has it."""
    call = CALLS[name]
    assert plans.attempt(call, "cpu").kernel
    for slot, spec in enumerate(call.inputs):
        for other in changed(spec) if spec is not None else ():
            if call.name in ("scale_rows", "add_rows") and len(other.shape) == 1 and spec == SIZES:
                continue
            refused(dataclasses.replace(call, inputs=(*call.inputs[:slot], other, *call.inputs[slot + 1 :])))
    for at, spec in enumerate(call.outputs):
        for other in changed(spec) if spec is not None else ():
            refused(dataclasses.replace(call, outputs=(*call.outputs[:at], other, *call.outputs[at + 1 :])))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "fixed",
    [
        *("group_sizes", "row_scale", "rhs_table", "bias_table", "into_table", "source_table", "skip", "base", "key"),
        *("low_lhs", "low_rhs", "low_rhs_table", "factor", "low_rows", "factor_table"),
    ],
)
def test_fixed_dtypes_count(name, fixed):
    """Operands whose dtype calls.h fixes are refused in another."""
    call = CALLS[name]
    slots = SLOTS[call.name]
    if fixed not in slots or (spec := call.inputs[slots.index(fixed)]) is None:
        return
    slot = slots.index(fixed)
    other = ArraySpec(spec.shape, "float16")
    refused(dataclasses.replace(call, inputs=(*call.inputs[:slot], other, *call.inputs[slot + 1 :])))


def test_params_count():
    """Parameters that contradict the operands are refused."""
    forward, wgrad = CALLS["forward"], CALLS["wgrad"]
    for call, param, value in (
        (forward, "contract_rows", 1),
        (forward, "rhs_axis", 0),
        (forward, "rhs_axis", 3),
        (forward, "accumulate", 1),
        (wgrad, "contract_rows", 0),
        (wgrad, "rhs_axis", 1),
        (forward, "lhs_half", 1),
        (forward, "rhs_half", 1),
        (forward, "result_half", 1),
        (CALLS["half_of_the_result"], "result_half", 3),
        (CALLS["half_of_the_result"], "result_half", -1),
        (wgrad, "result_half", 1),
        (wgrad, "lhs_half", 1),
        (CALLS["half_of_the_columns"], "rhs_half", 3),
        (CALLS["half_of_the_columns"], "lhs_half", -1),
        (CALLS["low_rank"], "low_rhs_axis", 0),
        (CALLS["low_rank"], "low_rhs_axis", 2),
        (CALLS["low_rank_dact"], "low_rhs_axis", 1),
        (CALLS["low_rank"], "result_half", 1),
        (CALLS["low_rank_grads"], "factor_axis", 1),
        (CALLS["low_rank_grads"], "factor_axis", 0),
        (CALLS["low_rank_grads_listed"], "factor_axis", 2),
        (CALLS["add_rows"], "rate", 0.0),
        (CALLS["add_rows"], "rate", 1.0),
        (CALLS["add_rows"], "rate", float("nan")),
        (CALLS["add_rows"], "stream", -1),
    ):
        refused(dataclasses.replace(call, params=tuple({**dict(call.params), param: value}.items())))


G0, M0, K0, N0 = 3, 20, 24, 40
EVERY = every_call(G0, M0, K0, N0)


@pytest.mark.rule("MAT-7", "GRP-11", "ERR-6")
@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
@pytest.mark.parametrize(("axis", "count"), [("G", 0), ("G", 65536), ("K", 0), ("N", 0)])
def test_no_axis_but_that_of_rows_is_empty(arch, axis, count):
    """For all calls and any target, whoever asks: a kernel divides by what it finds."""
    found = every_call(*(count if name == axis else dim for name, dim in zip("GMKN", (G0, M0, K0, N0), strict=True)))
    checked = 0
    for call, usual in zip(found, EVERY, strict=True):
        if call != usual:
            with asserts.refused(ValueError, [call.name]):
                plans.attempt(call, arch)
            checked += 1
    assert checked > len(EVERY) // 2


@pytest.mark.rule("GRP-10")
def test_there_may_be_no_rows():
    for call in every_call(G0, 0, K0, N0):
        assert plans.attempt(call, "cpu").kernel, call


def with_params(call: Call, **params: object) -> Call:
    return dataclasses.replace(call, params=tuple({**dict(call.params), **params}.items()))


@pytest.mark.rule("ERR-6")
@pytest.mark.parametrize("name", SLOTS)
def test_every_parameter_has_a_range(name):
    """A value outside the range is refused with the parameter's name, before anything is computed from it."""
    examples = [call for call in EVERY if call.name == name]
    for param, usual in examples[0].params:
        wrong = ("x", "X" * 99) if isinstance(usual, str) else (-1, -(2**63), 2**63 - 1)
        if isinstance(usual, float):
            wrong = (float("nan"),)
        elif "block" in param or param in ("segment", "activated_segment"):
            wrong = (*wrong, 3, 24, 256, 2**31, 2**32, 2**32 + 128)
        for value in wrong:
            with asserts.refused(ValueError, [f"`{param}`: ", "expected"]):
                plans.attempt(with_params(examples[0], **{param: value}), "cpu")


@pytest.mark.rule("ERR-6")
def test_square_blocks_of_weights_are_not_empty():
    call = next(call for call in EVERY if call.name == "dequantize" and call.inputs[1] is None)
    with asserts.refused(ValueError, ["`block_outer`: 0", "expected 1, 16"]):
        plans.attempt(with_params(call, block=0, block_outer=0), "cpu")


@pytest.mark.rule("ERR-6")
def test_magnitudes_alone_have_a_format_too():
    """Without codes the segment still says how long a tile is."""
    call = next(call for call in EVERY if call.name == "quantize" and call.outputs[0] is None)
    assert plans.attempt(call, "cpu").kernel
    for segment in (96, 256, 2**31):
        with asserts.refused(ValueError, [f"`segment`: {segment}", "a divisor of 128"]):
            plans.attempt(with_params(call, segment=segment), "cpu")


@pytest.mark.rule("ERR-6")
def test_segments_hold_whole_blocks():
    """Else the last rows of a group would read the scales of the next."""
    call = next(c for c in EVERY if dict(c.params).get("contract_rows") and dict(c.params)["lhs_block"] == 32)
    params = dict(call.params)
    at = [SLOTS[call.name].index(name) for name in ("lhs", "rhs", "lhs_scales", "rhs_scales")]
    padded = int(params["rows"]) + 15 * G0
    padded -= padded % 16
    shapes = [(padded, K0), (padded, N0), (padded // 32, K0), (padded // 32, N0)]
    inputs: list[Any] = list(call.inputs)
    for slot, shape in zip(at, shapes, strict=True):
        inputs[slot] = ArraySpec(shape, inputs[slot].dtype)
    changed = with_params(dataclasses.replace(call, inputs=tuple(inputs)), segment=16, transposed=0)
    with asserts.refused(ValueError, ["segment: 16", "a multiple of the block 32"]):
        plans.attempt(changed, "cpu")


@pytest.mark.rule("ERR-6")
def test_an_amax_without_codes_is_refused():
    """An amax that the quantiser is not asked for would stay unchanged."""
    call = next(call for call in EVERY if call.name == "grouped_matmul_act")
    outputs = list(call.outputs)
    outputs[RESULTS[call.name].index("amax")] = ArraySpec((G0,), "float32")
    with asserts.refused(ValueError, ["`amax`", "expected none without codes"]):
        plans.attempt(dataclasses.replace(call, outputs=tuple(outputs)), "cpu")


@pytest.mark.rule("ERR-6")
def test_shares_of_experts_are_not_above_one():
    """Else counts times slots would leave 64 bits."""
    call = next(call for call in EVERY if call.name == "quantile_bias")
    for slots in (G0 + 1, 2**31 - 1):
        with asserts.refused(ValueError, [f"slots: {slots}", "at most one per expert"]):
            plans.attempt(with_params(call, slots=slots), "cpu")
