"""Both gradients of a low-rank product in one call: against the oracle's bound, and the bits of two products."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from grouped_core import calls
from grouped_core.calls import spec_of
from grouped_core.products import arranged
from grouped_core.recipes import FP32_MODES, Recipe, plain
from tests import asserts, cases
from tests.native.quantized_operands import sizes_of
from tests.native.runner import Native, kernels

KERNELS = kernels("low_rank_grads")
RANKS = (1, 4, 8, 16, 24, 32, 33, 64)
WIDTHS = (2048, 2880, 4096, 4100)
# Several tiles of rows, with rows of whole 16 bytes, of whole elements alone, and of several tiles of columns.
ALIGNED = cases.Case("tiles_8", (150, 0, 301, 61), 540, 8, 280, frozenset())
ODD = cases.Case("tiles_odd", (150, 0, 301, 61), 540, 8, 277, frozenset())
WHOLE = cases.Case("tiles_128", (128, 64, 0, 256, 1), 460, 8, 384, frozenset())
GROUPS = cases.Case("groups_300", cases.jagged(300, 900), 910, 8, 136, frozenset())
# Groups of many rows, whose sums a kernel may cut into parts, and of few beside them.
LONG = cases.Case("long", (3001, 2, 0, 777), 3800, 8, 264, frozenset())
TILES = (ALIGNED, ODD, WHOLE, LONG)


def many(name: str, sizes: tuple[int, ...], n: int, *, beyond: int) -> cases.Case:
    """A case of many groups, with so many rows beyond them; less than 0: the last groups do not fit."""
    return cases.Case(f"many_{name}_{n}", sizes, sum(max(size, 0) for size in sizes) + beyond, 8, n, frozenset())


# Groups enough for kernels that give some to each part of a chip, one after the other. One is long, one has no rows,
# and one a negative size.
_UNEQUAL = tuple({1: 0, 5: -4, 40: 700}.get(at, size) for at, size in enumerate(cases.jagged(130, 1700)))
MANY = (
    *(many("tail", _UNEQUAL, n, beyond=37) for n in (8, 104, 136, 520, 1000, 2048)),
    *(many("beyond", _UNEQUAL, n, beyond=-300) for n in (264, 1536)),
    many("exact", cases.jagged(1023, 3000), 264, beyond=0),
    *(many("wide", cases.third_empty(17, 900), n, beyond=5) for n in (4104, 6000, 8192)),
)


class Grads(NamedTuple):
    """Operands: dy [M, N], the factor with N along `axis`, the rows that it multiplied [M, r], and sizes."""

    case: cases.Case
    dy: NDArray[Any]
    factor: NDArray[Any]
    axis: int
    low: NDArray[Any]

    def call(
        self,
        run: Native,
        results: tuple[str, str],
        *,
        table: Any = None,
        recipe: Recipe | None = None,
        **options: Any,
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """(rows_grad, factor_grad) of one call; `table`: of the addresses of the factors."""
        sizes = sizes_of(self.case)
        call = calls.low_rank_grads(
            *(spec_of(self.dy), spec_of(self.factor), self.axis, spec_of(self.low), spec_of(sizes), results),
            recipe=recipe or plain(self.dy.dtype.name),
            table=table is not None,
            **options,
        )
        named = {"rows": self.dy, "low_rows": self.low, "group_sizes": sizes}
        named |= {"factor": self.factor} if table is None else {"factor_table": table}
        rows_grad, factor_grad = run(call, arranged(call, **named))
        return rows_grad, factor_grad

    def products(
        self, run: Native, results: tuple[str, str], *, recipe: Recipe | None = None, **options: Any
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """The same by two products, on the kernels that dispatch chooses for them."""
        sizes, recipe = sizes_of(self.case), recipe or plain(self.dy.dtype.name)
        of_factor = (self.dy, self.low) if self.axis == 1 else (self.low, self.dy)
        found = []
        pairs = (((self.dy, self.factor), (1, self.axis)), (of_factor, (0, 0)))
        for ((lhs, rhs), axes), result in zip(pairs, results, strict=True):
            call = calls.grouped_matmul(
                *(spec_of(lhs), spec_of(rhs), axes, spec_of(sizes), result), recipe=recipe, **options
            )
            found += run(call, arranged(call, lhs=lhs, rhs=rhs, group_sizes=sizes))
        return found[0], found[1]


def grads_of(case: cases.Case, dtype: str, rank: int, axis: int) -> Grads:
    """Random operands; rows past the groups hold NaN."""
    dy, low = cases.normal((case.rows, case.n), dtype, "dy"), cases.normal((case.rows, rank), dtype, "low")
    for rows in (dy, low):
        rows[case.valid :] = cases.TAIL
    factor = cases.normal((case.groups, rank, case.n), dtype, "factor")
    return Grads(case, dy, np.ascontiguousarray(factor.swapaxes(1, 2)) if axis == 1 else factor, axis, low)


def check(kernel: str, g: Grads, results: tuple[str, str], **options: Any) -> None:
    """Results within the bound, tails and empty groups of zeros, and the bits of two products."""
    found = g.call(Native(kernel), results, **options)
    asserts.zero(found[0][g.case.valid :], "tail")
    for at, span in enumerate(g.case.spans()):
        if span.stop <= span.start:
            asserts.zero(found[1][at], "an empty group")
    expected = g.products(Native(kernel, check=False), results, **options)
    for name, one, two in zip(calls.RESULTS["low_rank_grads"], found, expected, strict=True):
        asserts.bitwise(one, two, f"{name} of {kernel}")


def takes_turns(kernel: str, case: cases.Case, rank: int, ranks: tuple[int, ...], of: tuple[cases.Case, ...]) -> bool:
    """Whether a kernel meets a rank with a case: those for the CPU loop over groups outside, so a case has one rank."""
    return "_cpu" not in kernel or ranks[of.index(case) % len(ranks)] == rank


SELECTED = (*cases.select(), GROUPS)


@pytest.mark.rule("LOR-4", "GRP-4", "GRP-5", "GRP-6", "GRP-9", "GRP-12", "MAT-7")
@pytest.mark.matrix(
    kernel=KERNELS,
    case=(*SELECTED, *TILES),
    rank=RANKS,
    dtype=cases.DTYPES,
    axis=(1, 2),
    wide=(False, True),
    valid=lambda kernel, case, rank, **_: case in TILES or takes_turns(kernel, case, rank, RANKS, SELECTED),
)
def test_both_gradients(kernel, case, rank, dtype, axis, wide):
    """`wide`: dy B^T in float32, as rules ask for it where it is scaled before it is rounded."""
    check(kernel, grads_of(case, dtype, rank, axis), ("float32" if wide else dtype, dtype))


@pytest.mark.rule("LOR-4", "GRP-4", "GRP-5", "GRP-6", "GRP-9")
@pytest.mark.matrix(
    kernel=KERNELS,
    case=MANY,
    rank=(8, 16, 32),
    dtype=("bfloat16", "float16"),
    axis=(1, 2),
    wide=(False, True),
    valid=lambda kernel, case, rank, **_: (
        "_cpu" not in kernel or (case.n <= 520 and takes_turns(kernel, case, rank, (8, 16, 32), MANY))
    ),
)
def test_many_groups(kernel, case, rank, dtype, axis, wide):
    """Clusters take several groups; wide results are shared by more CTAs, of which there are none on a CPU."""
    g, results = grads_of(case, dtype, rank, axis), ("float32" if wide else dtype, dtype)
    check(kernel, g, results)
    run = Native(kernel, check=False)
    first = g.call(run, results)
    for _ in range(0 if "_cpu" in kernel else 3):  # whichever part of a chip runs first
        for one, two in zip(g.call(run, results), first, strict=True):
            asserts.bitwise(one, two, "again")


@pytest.mark.rule("LOR-4", "MAT-7")
@pytest.mark.matrix(
    kernel=KERNELS,
    width=WIDTHS,
    sizes=((33, 0, 70), (1, 2, 0), (257, 129)),
    rank=RANKS,
    dtype=cases.DTYPES,
    axis=(1, 2),
    wide=(False, True),
)
def test_widths_of_models(kernel, width, sizes, rank, dtype, axis, wide):
    case = cases.Case(f"n_{width}", sizes, sum(sizes) + 5, 8, width, frozenset())
    check(kernel, grads_of(case, dtype, rank, axis), ("float32" if wide else dtype, dtype))


@pytest.mark.rule("LOR-4", "MAT-7")
@pytest.mark.matrix(
    kernel=KERNELS, results=tuple(np.ndindex(3, 3)), dtype=cases.DTYPES, rank=(8, 16), axis=(1, 2), case=TILES
)
def test_every_dtype_of_both_results(kernel, results, dtype, rank, axis, case):
    check(kernel, grads_of(case, dtype, rank, axis), tuple(cases.DTYPES[at] for at in results))


@pytest.mark.rule("LOR-4", "ALL-7")
@pytest.mark.matrix(
    kernel=KERNELS,
    mode=FP32_MODES,
    invariant=(False, True),
    rows_hint=(0, 4, 4096),
    dtype=cases.DTYPES,
    case=TILES,
    rank=(4, 16, 64),
    axis=(1, 2),
)
def test_parameters_reach_both_products(kernel, mode, invariant, rows_hint, dtype, case, rank, axis):
    recipe = plain(dtype).replace(fp32=mode, batch_invariant=invariant)
    check(kernel, grads_of(case, dtype, rank, axis), ("float32", dtype), recipe=recipe, rows_hint=rows_hint)


@pytest.mark.rule("LOR-4", "MAT-3", "ALL-2")
@pytest.mark.matrix(
    kernel=KERNELS, case=(*TILES, cases.named("tail"), MANY[4]), dtype=cases.DTYPES, axis=(1, 2), rank=(4, 16)
)
def test_tables_any_address_and_both_entries_give_the_same_bits(kernel, case, dtype, axis, rank):
    g, results = grads_of(case, dtype, rank, axis), ("float32", dtype)
    # The products in a composed call may run on kernels that want aligned addresses, and whose sums are split into
    # other parts than those of the kernels that do not.
    others_differ = kernel.endswith("_composed_cuda")
    run = Native(kernel, check=others_differ)  # else by the bits of the first, which is held against the oracle

    def same(found: tuple[NDArray[Any], NDArray[Any]], what: str) -> None:
        for one, two in zip(found, first, strict=True):
            asserts.bitwise(one, two, what)

    first = g.call(Native(kernel), results)
    same(g.call(run, results), "twice")
    same(g.call(Native(kernel, check=False, dlpack=True), results), "by way of DLPack")
    aligned_alone = kernel.endswith("_sm90")
    if not aligned_alone:
        anywhere = g.call(Native(kernel, check=others_differ, unaligned=True), results)
        if not others_differ:
            same(anywhere, "any address")
    members, table = run.hold(list(g.factor), unaligned=() if aligned_alone else (1,))
    listed = g.call(run, results, table=table, aligned_tables=aligned_alone)
    if not others_differ:
        same(listed, "listed factors")
    assert len(members) == case.groups  # alive until here
    members, table = run.hold(list(g.factor))
    same(g.call(run, results, table=table), "listed factors at aligned addresses")
    assert len(members) == case.groups


@pytest.mark.rule("ALL-6", "GRP-5")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("case", [ALIGNED, ODD, MANY[2]], ids=str)
def test_bad_rows_and_factors_stay_where_they_are(kernel, axis, case):
    g, run, results = grads_of(case, "bfloat16", 16, axis), Native(kernel, check=False), ("bfloat16", "bfloat16")
    good = g.call(run, results)
    row, group = case.ends[0], 2  # the first row of group 2, since group 1 is empty
    other_rows, other_groups = np.arange(case.rows) != row, np.arange(case.groups) != group
    inside = np.zeros(case.rows, bool)
    inside[list(case.spans())[group]] = True

    dy = g.dy.copy()
    dy[row] = np.nan
    of_rows, of_factor = g._replace(dy=dy).call(run, results)
    asserts.bitwise(of_rows[other_rows], good[0][other_rows], "rows beside one of dy")
    asserts.bitwise(of_factor[other_groups], good[1][other_groups], "groups beside that of the row")
    assert np.isnan(of_rows[row].astype(np.float32)).all()
    assert np.isnan(of_factor[group].astype(np.float32)).all()

    low = g.low.copy()
    low[row] = np.nan
    of_rows, of_factor = g._replace(low=low).call(run, results)
    asserts.bitwise(of_rows, good[0], "rows do not depend on the low rows")
    asserts.bitwise(of_factor[other_groups], good[1][other_groups], "groups beside that of the row")
    assert np.isnan(of_factor[group].astype(np.float32)).all()

    factor = g.factor.copy()
    factor[group] = np.nan
    of_rows, of_factor = g._replace(factor=factor).call(run, results)
    asserts.bitwise(of_rows[~inside], good[0][~inside], "rows of other groups")
    asserts.bitwise(of_factor, good[1], "the factor's gradient does not depend on the factor")
    assert np.isnan(of_rows[inside].astype(np.float32)).all()


@pytest.mark.rule("ALL-7")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("rank", [4, 16])
def test_a_row_depends_on_itself_alone(kernel, dtype, rank):
    case = cases.Case("invariant", (36, 20), 56, 8, 136, frozenset())
    g, run = grads_of(case, dtype, rank, 2), Native(kernel)
    recipe, results = plain(dtype).replace(batch_invariant=True), (dtype, dtype)
    whole, part = g.call(run, results, recipe=recipe)[0], np.r_[7:12, 40:49]
    few = dataclasses.replace(case, sizes=(5, 9), rows=14)
    some = g._replace(case=few, dy=g.dy[part], low=g.low[part])
    asserts.bitwise(some.call(run, results, recipe=recipe)[0], whole[part])
