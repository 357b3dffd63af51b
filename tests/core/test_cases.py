"""The test foundation itself: cases, pairwise drawing, bounds and assertions that can fail."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from grouped_core import gradients
from grouped_core.linear_spec import Linear, Names
from grouped_core.reference import Oracle
from tests import asserts, bounds, cases, conftest

OPTIONS = {"a": (1, 2, 3), "b": (False, True), "c": ("x", "y", "z"), "d": (None, 5)}
OP = Linear(Names("x", "w"))


def test_names_are_unique():
    names = [case.name for case in cases.CASES]
    assert len(names) == len(set(names))


def test_pairwise_holds_every_pair_and_less_than_the_product():
    def valid(a, b, c, d):
        return not (b and d)

    rows = cases.pairwise(OPTIONS, valid)
    assert all(valid(*row) for row in rows)
    assert len(rows) < len(cases.product(OPTIONS, valid))
    for i, j in itertools.combinations(range(len(OPTIONS)), 2):
        wanted = {(row[i], row[j]) for row in cases.product(OPTIONS, valid)}
        assert {(row[i], row[j]) for row in rows} == wanted


def test_a_tuple_of_bools_counts_as_one_option_per_bool():
    options = {"needs": bounds.ALL_NEEDS, "a": range(5), "b": (False, True)}

    def valid(needs, b, **_):
        return b or not needs.bias

    rows = cases.pairwise(options, valid)
    assert len(rows) < len(cases.pairwise(options | {"needs": range(len(bounds.ALL_NEEDS))}))
    assert {needs for needs, *_ in rows} == set(bounds.ALL_NEEDS)

    def pairs(rows):
        return {(i, j, row[i], row[j]) for row in rows for i, j in itertools.combinations(range(len(row)), 2)}

    assert pairs([*needs, a, b] for needs, a, b in rows) == pairs(
        [*needs, a, b] for needs, a, b in cases.product(options, valid)
    )


def test_options_that_have_nothing_to_do_with_each_other_need_not_meet():
    options = {"a": range(6), "b": range(7), "c": (False, True)}
    rows = cases.pairwise(options, apart=[("b", "a")])
    assert len(rows) <= 14 < len(cases.pairwise(options))
    for i, values in enumerate(options.values()):
        assert {row[i] for row in rows} == set(values)
    assert {(b, c) for _, b, c in rows} == set(itertools.product(range(7), (False, True)))
    assert {a for a, _ in cases.pairwise({"a": range(3), "b": range(2)}, apart=[("a", "b")])} == {0, 1, 2}


@pytest.mark.parametrize("draw", [cases.product, cases.pairwise])
def test_a_condition_may_name_some_of_the_options(draw):
    asked = []

    def of_two(d, b, **_):
        asked.append((b, d))
        return not (b and d)

    assert draw(OPTIONS, of_two) == draw(OPTIONS, lambda a, b, c, d: not (b and d))
    assert sorted(asked, key=str) == sorted(itertools.product(OPTIONS["b"], OPTIONS["d"]), key=str)
    assert draw(OPTIONS, lambda **_: False) == []


def test_pairwise_is_the_same_each_time():
    assert cases.pairwise(OPTIONS) == cases.pairwise(dict(OPTIONS))


@pytest.mark.parametrize("name", ["clamped", "negative", "overflow_32", "tail", "all_empty"])
def test_spans_cover_the_valid_rows_in_order(name):
    case = cases.named(name)
    covered = [r for span in case.spans() for r in range(span.start, span.stop)]
    assert covered == list(range(case.valid))
    assert case.valid <= case.rows


def test_a_problem_is_the_same_in_both_layouts_and_poisoned_past_its_groups():
    case = cases.named("tail")
    one, other = (cases.problem(case, "bfloat16", transposed=transposed) for transposed in (False, True))
    asserts.bitwise(one.w, np.ascontiguousarray(other.w.swapaxes(1, 2)))
    assert np.isnan(one.x[case.valid :].astype(np.float32)).all()
    assert np.isfinite(one.x[: case.valid].astype(np.float32)).all()


def test_unaligned_copies_are_unaligned():
    array = cases.normal((3, 5), "bfloat16", "unaligned")
    copy = cases.unaligned(array)
    assert copy.ctypes.data % 16 == 2
    asserts.bitwise(copy, array)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_half_ulp_is_half_the_gap_to_the_next_number(dtype):
    for value in (1.0, 1.5, 3.0, 2.0**-20, 0.0, -6.25):
        at = cases.numpy_dtype(dtype).type(value)
        bits = np.array(abs(at)).view(f"u{at.itemsize}")
        gap = float((bits + 1).astype(bits.dtype).view(at.dtype)) - float(abs(at))
        assert bounds.half_ulp(np.array(value), dtype) == gap / 2


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("scale_bias", [False, True])
def test_the_oracle_is_within_its_own_bounds_and_one_changed_number_is_not(dtype, scale_bias):
    p = cases.problem(cases.named("jagged"), dtype)
    op = Linear(Names("x", "w"), scale_bias=scale_bias)
    run = Oracle()
    y = gradients.linear(run, op, p.x, p.w, p.group_sizes, p.bias, p.row_scale)
    expected = bounds.expect_linear(op, p.x, p.w, p.group_sizes, p.bias, p.row_scale)
    asserts.within(y, expected)
    y[3, 4] += y.dtype.type(0.25)
    with pytest.raises(AssertionError, match=r"result\[3, 4\]"):
        asserts.within(y, expected)
    specs = tuple(run.spec(array) for array in (p.x, p.w, p.bias, p.row_scale))
    needs = gradients.Needs()
    found = gradients.linear_grads(run, op, specs, p.x, p.w, p.group_sizes, p.bias, p.row_scale, p.dy, needs)
    wanted = bounds.expect_linear_grads(op, p.x, p.w, p.group_sizes, p.bias, p.row_scale, p.dy)
    for name, a, b in zip(found._fields, found, wanted, strict=True):
        asserts.within(a, b, name)


def test_bounds_are_zero_where_nothing_may_be_written():
    p = cases.problem(cases.named("tail"), "bfloat16")
    y = bounds.expect_linear(OP, p.x, p.w, p.group_sizes)
    assert not y.error[p.case.valid :].any()
    dw: Any = bounds.expect_linear_grads(OP, p.x, p.w, p.group_sizes, None, None, p.dy).w
    assert not dw.error[1].any()  # its group is empty
    assert dw.error[0].all()


def test_bounds_are_tight():
    """A bound that any bug would pass proves nothing: fp32's lets through rounding errors of the C terms, no more."""
    p = cases.problem(cases.named("uniform"), "float32")
    y = bounds.expect_linear(OP, p.x, p.w, p.group_sizes)
    worst = bounds.gamma(p.case.k, "float32", "grouped_matmul_any_cpu") * p.case.k  # C terms of the result's size
    assert np.median(y.error) < worst * np.median(np.abs(y.value))


def test_gamma_by_kernel():
    c = 64.0
    assert bounds.gamma(c, "bfloat16", "grouped_matmul_any_cpu") == 65 * 2.0**-24
    assert bounds.gamma(c, "bfloat16", "grouped_matmul_bf16_sm90") == 68 * 2.0**-23
    assert bounds.gamma(c, "float32", "grouped_matmul_any_cuda", "tf32") == 65 * 2.0**-24
    assert bounds.gamma(c, "float32", "grouped_matmul_tf32_cuda", "tf32") == 2.0**-9 + 72 * 2.0**-23
    assert bounds.gamma(c, "float32", "grouped_matmul_fp32_sm90", "tf32") == 2.0**-9 + 72 * 2.0**-23
    assert bounds.gamma(c, "float32", "grouped_matmul_fp32_sm90", "tf32x3") == 2.0**-20 + 3 * 72 * 2.0**-23


class TestAssertions:
    def test_bitwise_tells_zeros_and_nans_apart(self):
        zero = np.zeros(2, np.float32)
        asserts.bitwise(np.array([np.nan]), np.array([np.nan]))
        with pytest.raises(AssertionError, match=r"result\[0\].*2 of 2"):
            asserts.bitwise(-zero, zero)
        with pytest.raises(AssertionError, match="shape"):
            asserts.bitwise(zero, zero[:1])
        with pytest.raises(AssertionError, match="dtype"):
            asserts.bitwise(zero, zero.astype(np.float64))

    def test_zero_wants_positive_zeros(self):
        asserts.zero(np.zeros(3, np.float32))
        with pytest.raises(AssertionError, match=r"result\[1\]"):
            asserts.zero(np.array([0.0, -0.0, 0.0]))

    def test_within_refuses_nan_and_counts_ulps(self):
        one = np.ones(2, np.float32)
        next_up = np.nextafter(one, np.float32(2))
        asserts.within_ulps(next_up, one, 1)
        with pytest.raises(AssertionError, match="off by"):
            asserts.within_ulps(np.nextafter(next_up, np.float32(2)), one, 1)
        with pytest.raises(AssertionError, match="off by"):
            asserts.within(np.array([1.0, np.nan], np.float32), bounds.Bounded.of(one))

    def test_refused_wants_kind_and_fragments(self):
        with asserts.refused(ValueError, ["`x`"]):
            raise ValueError("`x`: wrong")
        with pytest.raises(AssertionError, match="lacks"), asserts.refused(ValueError, ["`y`"]):
            raise ValueError("`x`: wrong")
        with pytest.raises(AssertionError, match="UnicodeError"), asserts.refused(ValueError, []):
            raise UnicodeError("a ValueError, but not the one that was meant")


@pytest.mark.matrix(a=(1, 2, 3), b=(False, True), c=("x", "y"), valid=lambda a, b, c: a < 3 or not b)
def test_matrix_mark_draws_valid_rows(a, b, c):
    assert a < 3 or not b


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("missing", ["no driver", None])
def test_nothing_is_drawn_for_a_gpu_that_is_not_there(monkeypatch, missing, marked):
    monkeypatch.setattr(conftest, "_gpu_missing", lambda: missing)
    on_gpu, asked = pytest.param("one_cuda", marks=pytest.mark.gpu), []

    def drawn(*kernels):
        mark = pytest.mark.matrix(kernel=kernels, a=(1, 2), valid=lambda a, **_: not asked.append(a)).mark
        found = []
        test = SimpleNamespace(
            definition=SimpleNamespace(iter_markers=lambda _: [mark], get_closest_marker=lambda _: marked or None),
            config=SimpleNamespace(getoption=lambda name: None),
            function=drawn,
            parametrize=lambda names, rows: found.append((names, rows)),
        )
        conftest.pytest_generate_tests(test)
        ((names, rows),) = found
        assert names == "a,kernel"
        return [(row.values, [each.name for each in row.marks]) for row in rows]

    on_cpu = [((a, "one_cpu"), []) for a in (1, 2)]
    every = [*on_cpu, *(((a, "one_cuda"), ["gpu"]) for a in (1, 2))]
    deselected = [((None, None), ["gpu"])]
    assert drawn("one_cpu", on_gpu) == (every if missing is None else deselected if marked else on_cpu)
    asked.clear()
    assert drawn(on_gpu) == (every[2:] if missing is None else deselected)
    assert bool(asked) == (missing is None)


def test_kernels_are_an_option_and_each_kernel_for_a_gpu_meets_every_pair():
    options = {"a": (1, 2, 3), "b": (False, True), "c": ("x", "y")}
    names = ("one_cpu", "two_cpu", "three_cuda", "four_cuda")
    kernels = [pytest.param(name, marks=pytest.mark.gpu) if "_cuda" in name else name for name in names]
    rows = conftest.matrix_rows(cases.pairwise, {"kernel": kernels, **options}, None)
    found = [row.values for row in rows]
    assert [("gpu" in {mark.name for mark in row.marks}) for row in rows] == ["_cuda" in each[3] for each in found]
    on_cpu = [each for each in found if "_cpu" in each[3]]
    for left, right in itertools.combinations(range(4), 2):
        wanted = itertools.product(*[[*options.values(), names[:2]][at] for at in (left, right)])
        assert {(each[left], each[right]) for each in on_cpu} == set(wanted)
    for kernel in names[2:]:
        assert [each[:3] for each in found if each[3] == kernel] == cases.pairwise(options)
    told = conftest.matrix_rows(
        cases.product, {"kernel": kernels, **options}, lambda kernel, a, **_: "t" in kernel or a < 2
    )
    assert {(row.values[3], row.values[0]) for row in told} == {
        (name, a) for name in names for a in options["a"] if "t" in name or a < 2
    }
