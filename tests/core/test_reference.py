"""The oracle against plain loops over rows: it defines what a call means, so it is checked by the simplest code."""

from __future__ import annotations

import numpy as np
import pytest

from grouped_core import calls, reference
from grouped_core.calls import ArraySpec
from grouped_core.recipes import FP32
from grouped_core.reference import Oracle
from tests import asserts, bounds, cases

EDGES = [case for case in cases.select("small") if case.rows <= 70 and case.k <= 40]
SIZES = ArraySpec((0,), "int32")


def owner(case: cases.Case, row: int) -> int | None:
    """Group of a row, in the most literal way."""
    start = 0
    for g, size in enumerate(case.sizes):
        for _ in range(max(size, 0)):
            if start == row:
                return g
            start += 1
            if start > case.rows:
                return None
    return None


def near(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal up to the order of fp64 sums."""
    slack = np.full(expected.shape, bounds.FINITE_DIFFERENCES**2 * (1 + np.max(np.abs(expected), initial=0)))
    asserts.within(actual, bounds.Bounded(expected, slack, "float64"))


def matmul(p: cases.Problem, axes: tuple[int, int], rhs: np.ndarray, *, lhs=None, **options) -> np.ndarray:
    lhs = p.x if lhs is None else lhs
    run = Oracle(exact=True)
    arrays = {"lhs": lhs, "rhs": rhs, "group_sizes": p.group_sizes}
    arrays.update((k, v) for k, v in options.items() if isinstance(v, np.ndarray))
    specs = {k: run.spec(v) for k, v in arrays.items() if k not in ("lhs", "rhs", "group_sizes")}
    flags = {k: v for k, v in options.items() if not isinstance(v, np.ndarray)}
    call = calls.grouped_matmul(
        run.spec(lhs), run.spec(rhs), axes, run.spec(p.group_sizes), "float32", recipe=FP32, **specs, **flags
    )
    return run(call, [arrays.get(slot) for slot in calls.SLOTS["grouped_matmul"]])[0]


@pytest.mark.rule("GRP-4", "GRP-5", "GRP-6")
@pytest.mark.parametrize("case", EDGES, ids=str)
@pytest.mark.parametrize("scale_bias", [False, True])
def test_ragged_rows(case, scale_bias):
    if max(case.sizes, default=0) > 1000:
        pytest.skip("the literal loop would count two thousand million rows")
    p = cases.problem(case, "float32")
    expected = np.zeros((case.rows, case.n))
    for r in range(case.rows):
        g = owner(case, r)
        if g is None:
            continue
        product, bias = p.x[r].astype(float) @ p.w[g].astype(float), p.bias[g].astype(float)
        expected[r] = product + p.row_scale[r] * bias if scale_bias else p.row_scale[r] * (product + bias)
    near(matmul(p, (1, 1), p.w, bias=p.bias, row_scale=p.row_scale, scale_bias=scale_bias), expected)


@pytest.mark.rule("GRP-9")
@pytest.mark.parametrize("case", EDGES, ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_ragged_contraction(case, accumulate):
    if max(case.sizes, default=0) > 1000:
        pytest.skip("the literal loop would count two thousand million rows")
    p = cases.problem(case, "float32")
    into = cases.normal(p.w.shape, "float32", "into")
    expected = into.astype(float) if accumulate else np.zeros(p.w.shape)
    for r in range(case.rows):
        g = owner(case, r)
        if g is not None:
            expected[g] += np.outer(p.x[r].astype(float), p.dy[r].astype(float))
    options = {"into": into, "accumulate": True} if accumulate else {}
    near(matmul(p, (0, 0), p.dy, **options), expected)


@pytest.mark.rule("LOR-4", "GRP-5", "GRP-9")
@pytest.mark.parametrize("case", EDGES, ids=str)
@pytest.mark.parametrize("axis", [1, 2])
def test_both_gradients_of_a_low_rank_product(case, axis):
    if max(case.sizes, default=0) > 1000:
        pytest.skip("the literal loop would count two thousand million rows")
    run, p, rank = Oracle(exact=True), cases.problem(case, "float32"), 3
    low, factor = cases.normal((case.rows, rank), "float32", "u"), cases.normal((case.groups, rank, case.n), "float32")
    of_rows, of_factor = np.zeros(low.shape), np.zeros(factor.shape)
    for r in range(case.rows):
        g = owner(case, r)
        if g is not None:
            of_rows[r] = factor[g].astype(float) @ p.dy[r].astype(float)
            of_factor[g] += np.outer(low[r].astype(float), p.dy[r].astype(float))
    if axis == 1:
        factor, of_factor = np.ascontiguousarray(factor.swapaxes(1, 2)), of_factor.swapaxes(1, 2)
    specs = (run.spec(p.dy), run.spec(factor), axis, run.spec(low), run.spec(p.group_sizes))
    call = calls.low_rank_grads(*specs, ("float32", "float32"), recipe=FP32)
    found = run(call, call.arrange(rows=p.dy, factor=factor, low_rows=low, group_sizes=p.group_sizes))
    near(found[0], of_rows)
    near(found[1], of_factor)


@pytest.mark.rule("GRP-4")
@pytest.mark.parametrize("case", cases.select("clamp"), ids=str)
def test_ends_in_python_integers(case):
    ends = reference.group_ends(np.array(case.sizes, np.int32), case.rows)
    assert tuple(int(e) for e in ends) == case.ends


@pytest.mark.rule("GRP-4")
@pytest.mark.parametrize("case", cases.select("clamp"), ids=str)
def test_sizes_that_do_not_fit_are_the_clamped_sizes(case):
    p = cases.problem(case, "float32")
    fitting = np.diff(np.array(case.ends), prepend=0).astype(np.int32)
    asserts.bitwise(
        matmul(p, (1, 1), p.w, bias=p.bias, row_scale=p.row_scale),
        matmul(p._replace(group_sizes=fitting), (1, 1), p.w, bias=p.bias, row_scale=p.row_scale),
    )


@pytest.mark.rule("GRP-7")
def test_a_callers_buffer_keeps_its_tail():
    p = cases.problem(cases.named("tail"), "float32")
    into = np.full((p.case.rows, p.case.n), cases.SENTINEL, np.float32)
    found = matmul(p, (1, 1), p.w, into=into)
    asserts.filled(found[p.case.valid :], cases.SENTINEL)
    asserts.bitwise(found[: p.case.valid], matmul(p, (1, 1), p.w)[: p.case.valid])


@pytest.mark.parametrize("name", ["tail", "clamped_idle", "negative"])
def test_sums_dots_and_scaled_rows(name):
    case = cases.named(name)
    p = cases.problem(case, "float32")
    run = Oracle(exact=True)
    sizes = run.spec(p.group_sizes)
    total, dots, scaled = np.zeros((case.groups, case.n)), np.zeros(case.rows), np.zeros((case.rows, case.n))
    for r in range(case.rows):
        g = owner(case, r)
        if g is None:
            continue
        dy, c = p.dy[r].astype(float), float(p.row_scale[r])
        total[g] += c * dy
        dots[r] = p.x[r].astype(float) @ p.x[r].astype(float) + dy @ p.bias[g].astype(float)
        scaled[r] = c * dy
    x, dy, bias, scale = (run.spec(a) for a in (p.x, p.dy, p.bias, p.row_scale))
    near(run(calls.group_sum(dy, sizes, "float32", scale), (p.dy, p.group_sizes, p.row_scale))[0], total)
    call = calls.row_dot(sizes, case.rows, (x, x), (dy, bias))
    near(run(call, (p.group_sizes, p.x, p.x, p.dy, p.bias, None))[0], dots)
    call = calls.scale_rows(dy, scale, sizes, "float32")
    near(run(call, (p.dy, p.row_scale, p.group_sizes, None))[0], scaled)


def test_results_are_rounded_once_to_their_dtype():
    p = cases.problem(cases.named("uniform"), "bfloat16")
    run = Oracle()
    call = calls.grouped_matmul(run.spec(p.x), run.spec(p.w), (1, 1), run.spec(p.group_sizes), "bfloat16", recipe=FP32)
    arrays = [p.x, p.w, p.group_sizes, *[None] * (len(call.inputs) - 3)]
    exact = Oracle(exact=True)(call, arrays)[0]
    asserts.bitwise(run(call, arrays)[0], exact.astype(cases.numpy_dtype("bfloat16")))
