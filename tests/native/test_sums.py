"""group_sum, row_dot and scale_rows: bias and row-scale gradients; add_rows, the end of a product with an adapter."""

from __future__ import annotations

import numpy as np
import pytest

from grouped_core import calls, rounding
from grouped_core.calls import ArraySpec, spec_of
from tests import asserts, cases
from tests.native.runner import Native, kernels

CASES = [case for case in cases.select() if case.name not in ("k_2880", "n_2880")]
LONG = cases.Case("long", (4097, 0, 311), 4500, 24, 33, frozenset())


def group_sum(run: Native, p: cases.Problem, *, scaled: bool, dtype: str) -> np.ndarray:
    scale = p.row_scale if scaled else None
    spec = spec_of(p.row_scale) if scaled else None
    call = calls.group_sum(spec_of(p.dy), spec_of(p.group_sizes), dtype, spec)
    return run(call, (p.dy, p.group_sizes, scale))[0]


def row_dot(
    run: Native, p: cases.Problem, *, pair: bool, group_pair: bool, other: np.ndarray | None = None
) -> np.ndarray:
    other = p.x if other is None else other
    call = calls.row_dot(
        spec_of(p.group_sizes),
        p.case.rows,
        (spec_of(p.x), spec_of(other)) if pair else None,
        (spec_of(p.dy), spec_of(p.bias)) if group_pair else None,
    )
    first = (p.x, other) if pair else (None, None)
    second = (p.dy, p.bias) if group_pair else (None, None)
    return run(call, (p.group_sizes, *first, *second, None))[0]


def scale_rows(run: Native, p: cases.Problem, *, dtype: str, into: np.ndarray | None = None) -> np.ndarray:
    specs = (spec_of(p.dy), spec_of(p.row_scale), spec_of(p.group_sizes))
    call = calls.scale_rows(*specs, dtype, None if into is None else spec_of(into))
    return run(call, (p.dy, p.row_scale, p.group_sizes, into))[0]


@pytest.mark.rule("MAT-10", "GRP-5", "GRP-9")
@pytest.mark.matrix(
    kernel=kernels("group_sum"), case=[*CASES, LONG], dtype=cases.DTYPES, result=cases.DTYPES, scaled=(False, True)
)
def test_group_sums(kernel, case, dtype, result, scaled):
    p = cases.problem(case, dtype)
    found = group_sum(Native(kernel), p, scaled=scaled, dtype=result)
    for g, span in enumerate(case.spans()):
        if span.start == span.stop:
            asserts.zero(found[g], f"sum of empty group {g}")


@pytest.mark.rule("MAT-9", "GRP-6")
@pytest.mark.matrix(
    kernel=kernels("row_dot"),
    case=[*CASES, LONG],
    dtype=cases.DTYPES,
    second=(None, "float32"),
    pair=(False, True),
    group_pair=(False, True),
    valid=lambda pair, group_pair, second, **_: (pair or group_pair) and (pair or second is None),
)
def test_row_dots(kernel, case, dtype, second, pair, group_pair):
    """The gradient of a row scale reads x beside the fp32 product dy W^T, so the pair's dtypes may differ."""
    p = cases.problem(case, dtype)
    other = None if second is None else cases.normal(p.x.shape, second, "other")
    found = row_dot(Native(kernel), p, pair=pair, group_pair=group_pair, other=other)
    asserts.zero(found[case.valid :], "tail")


@pytest.mark.parametrize("kernel", kernels("row_dot"))
def test_row_dots_with_listed_vectors(kernel):
    p = cases.problem(cases.named("tail"), "bfloat16")
    run = Native(kernel)
    packed = row_dot(run, p, pair=True, group_pair=True)
    members, table = run.hold(list(p.bias))
    specs = ((spec_of(p.x), spec_of(p.x)), (spec_of(p.dy), spec_of(p.bias)))
    call = calls.row_dot(spec_of(p.group_sizes), p.case.rows, *specs, table=True)
    (found,) = run(call, (p.group_sizes, p.x, p.x, p.dy, None, table))
    asserts.bitwise(found, packed)
    assert len(members) == p.case.groups  # alive until here


@pytest.mark.rule("GRP-6", "GRP-7")
@pytest.mark.matrix(
    kernel=kernels("scale_rows"), case=[*CASES, LONG], dtype=cases.DTYPES, result=cases.DTYPES, buffer=(False, True)
)
def test_scaled_rows(kernel, case, dtype, result, buffer):
    p = cases.problem(case, dtype)
    into = np.full(p.dy.shape, cases.SENTINEL, cases.numpy_dtype(result)) if buffer else None
    found = scale_rows(Native(kernel), p, dtype=result, into=into)
    tail = found[case.valid :]
    if buffer:
        asserts.filled(tail, cases.SENTINEL, "tail")
    else:
        asserts.zero(tail, "tail")
    exact = p.dy[: case.valid].astype(np.float32) * p.row_scale[: case.valid, None]
    asserts.bitwise(found[: case.valid], exact.astype(found.dtype))


KEY = np.array([0x243F6A88, 0x85A308D3], np.uint32)


@pytest.mark.rule("GRP-6", "GRP-7", "LOR-1")
@pytest.mark.matrix(
    kernel=kernels("add_rows"),
    case=[*CASES, LONG],
    dtype=cases.DTYPES,
    result=cases.DTYPES,
    buffer=(False, True),
    based=(False, True),
    rate=(0.0, 0.3),
)
def test_added_rows(kernel, case, dtype, result, buffer, based, rate):
    """Bits of a float32 formula whose masks are those of the oracle."""
    p = cases.problem(case, dtype)
    base = cases.normal(p.dy.shape, "float32", "base") if based else None
    into = np.full(p.dy.shape, cases.SENTINEL, cases.numpy_dtype(result)) if buffer else None
    call = calls.add_rows(
        *(spec_of(p.dy), spec_of(p.group_sizes), result),
        base=None if base is None else spec_of(base),
        into=None if into is None else spec_of(into),
        factor=1.7,
        rate=rate,
        stream=1,
    )
    (found,) = Native(kernel)(call, (p.dy, p.group_sizes, base, KEY if rate else None, into))
    if buffer:
        asserts.filled(found[case.valid :], cases.SENTINEL, "tail")
    else:
        asserts.zero(found[case.valid :], "tail")
    for g, span in enumerate(case.spans()):
        if span.start == span.stop:
            continue
        rows = p.dy[span].astype(np.float32) * np.float32(1.7)
        terms = rows
        if rate:
            words = rounding.random_words(int(KEY[0]) | int(KEY[1]) << 32, rows.shape[0], rows.shape[1], g, 1)
            terms = np.where((words >> 8) * 2.0**-24 < np.float32(rate), np.float32(0), rows)
        exact = terms if base is None else base[span] + terms
        asserts.bitwise(found[span], exact.astype(found.dtype), f"group {g}")


@pytest.mark.rule("LOR-1")
@pytest.mark.parametrize("kernel", kernels("add_rows"))
def test_a_term_of_zero_keeps_the_sign_of_a_zero_below_it(kernel):
    base = np.array([[-0.0, 0.0, -0.0]], np.float32)
    rows = np.array([[0.0, -0.0, -0.0]], np.float32)
    call = calls.add_rows(spec_of(rows), ArraySpec((1,), "int32"), "float32", base=spec_of(base))
    (found,) = Native(kernel, check=False)(call, (rows, np.array([1], np.int32), base, None, None))
    asserts.bitwise(found, base)


@pytest.mark.rule("LOR-1", "ALL-6")
@pytest.mark.parametrize("kernel", kernels("add_rows"))
def test_dropped_infinities_are_zero(kernel):
    rows = np.full((64, 64), np.inf, np.float32)
    call = calls.add_rows(spec_of(rows), ArraySpec((1,), "int32"), "float32", rate=0.5)
    (found,) = Native(kernel, check=False)(call, (rows, np.array([64], np.int32), None, KEY, None))
    assert set(np.unique(found)) == {0.0, np.inf}
    assert abs(float(np.mean(found == 0)) - 0.5) < 0.05


@pytest.mark.rule("ALL-6")
@pytest.mark.parametrize("kernel", kernels("group_sum"))
def test_bad_rows_stay_in_the_sum_of_their_group(kernel):
    run, p, bad = Native(kernel, check=False), *one_bad_row()
    good, found = (group_sum(run, q, scaled=True, dtype="float32") for q in (p, bad))
    asserts.bitwise(found[[0, 2]], good[[0, 2]])
    assert np.isnan(found[1]).all()


@pytest.mark.rule("ALL-6")
@pytest.mark.parametrize("kernel", kernels("row_dot"))
def test_bad_rows_stay_in_their_dot(kernel):
    run, p, bad = Native(kernel, check=False), *one_bad_row()
    good, found = (row_dot(run, q, pair=True, group_pair=True) for q in (p, bad))
    others = np.arange(p.case.rows) != p.case.ends[0]
    asserts.bitwise(found[others], good[others])
    assert np.isnan(found[p.case.ends[0]])


@pytest.mark.rule("ALL-6")
@pytest.mark.parametrize("kernel", kernels("scale_rows"))
def test_bad_rows_stay_scaled_rows_of_their_own(kernel):
    run, p, bad = Native(kernel, check=False), *one_bad_row()
    good, found = (scale_rows(run, q, dtype="float32") for q in (p, bad))
    others = np.arange(p.case.rows) != p.case.ends[0]
    asserts.bitwise(found[others], good[others])
    assert np.isnan(found[p.case.ends[0]]).all()


def one_bad_row() -> tuple[cases.Problem, cases.Problem]:
    """A problem, and the same with a NaN row where the second group begins."""
    p = cases.problem(cases.named("around_64_and_128"), "bfloat16")
    bad = p._replace(dy=p.dy.copy())
    bad.dy[p.case.ends[0]] = np.nan
    return p, bad


@pytest.mark.rule("TE #3407", "TE #2921", "MLM #7441")
@pytest.mark.rule("ALL-2")
@pytest.mark.parametrize("kernel", kernels("group_sum"))
def test_sums_are_the_same_twice_and_through_both_entries(kernel):
    p = cases.problem(LONG, "bfloat16")
    first = group_sum(Native(kernel), p, scaled=True, dtype="float32")
    asserts.bitwise(group_sum(Native(kernel), p, scaled=True, dtype="float32"), first)
    by_dlpack = Native(kernel, check=False, dlpack=True)
    asserts.bitwise(group_sum(by_dlpack, p, scaled=True, dtype="float32"), first)
