"""Which kernel each tagged case gets: no fast path is lost in silence. Plans need no device."""

from __future__ import annotations

import pytest

from grouped_core import _native, calls, plans
from grouped_core.calls import ArraySpec
from grouped_core.recipes import plain
from tests import cases

CPU = {
    "grouped_matmul": "grouped_matmul_any_cpu",
    "group_sum": "group_sum_any_cpu",
    "row_dot": "row_dot_any_cpu",
    "scale_rows": "scale_rows_any_cpu",
}


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
@pytest.mark.parametrize("which", ["forward", "dgrad", "wgrad"])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_products_on_the_cpu(which, dtype):
    for case in (*cases.select(), *cases.select("bench"), *cases.select("cpu_bench"), *cases.select("decode")):
        plan = plans.attempt(product(case, dtype, which), "cpu")
        assert plan.kernel == CPU["grouped_matmul"], case.name
        assert plan.refusals == [], case.name


def test_the_other_calls_on_the_cpu():
    for case in cases.select():
        x, _, dy, sizes = specs(case, "bfloat16")
        scale = ArraySpec((case.rows,), "float32")
        for call in (
            calls.group_sum(dy, sizes, "bfloat16", scale),
            calls.row_dot(sizes, case.rows, (x, x), (dy, ArraySpec((case.groups, case.n), "bfloat16"))),
            calls.scale_rows(dy, scale, sizes, "bfloat16"),
        ):
            assert plans.attempt(call, "cpu").kernel == CPU[call.name], case.name


def test_every_kernel_is_reached_by_name():
    for call, names in _native.kernels().items():
        assert len(set(names)) == len(names), call
