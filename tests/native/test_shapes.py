"""Calls whose shapes disagree are refused by the native module itself, whoever made them."""

from __future__ import annotations

import dataclasses

import pytest

from grouped_core import calls, plans
from grouped_core.calls import SLOTS, ArraySpec, Call
from grouped_core.formats import FORMATS
from grouped_core.recipes import BF16
from tests import asserts

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
    "group_sum": calls.group_sum(rows(N), SIZES, "float32", SCALE),
    "row_dot": calls.row_dot(SIZES, M, (rows(K), rows(K)), (rows(N), weight(G, N)), True),
    "scale_rows": calls.scale_rows(rows(N), SCALE, SIZES, "bfloat16", rows(N)),
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
            if call.name == "scale_rows" and len(other.shape) == 1 and spec == SIZES:
                continue
            refused(dataclasses.replace(call, inputs=(*call.inputs[:slot], other, *call.inputs[slot + 1 :])))
    for other in changed(call.outputs[0]):
        refused(dataclasses.replace(call, outputs=(other,)))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "fixed", ["group_sizes", "row_scale", "rhs_table", "bias_table", "into_table", "source_table", "skip"]
)
def test_fixed_dtypes_count(name, fixed):
    """Operands whose dtype calls.h fixes are refused in another."""
    call = CALLS[name]
    slots = SLOTS[call.name]
    if fixed not in slots or call.inputs[slots.index(fixed)] is None:
        return
    slot = slots.index(fixed)
    other = ArraySpec(call.inputs[slot].shape, "float16")
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
    ):
        refused(dataclasses.replace(call, params=tuple({**dict(call.params), param: value}.items())))
