"""Products with a low-rank one beside them, plain and fused with activations, through one kernel or the oracle."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from grouped_core import calls
from grouped_core.activations import Activation
from grouped_core.calls import Call, LowRank, spec_of
from grouped_core.products import arranged
from grouped_core.recipes import BF16, Recipe
from tests import cases
from tests.native.quantized_operands import Operand, sizes_of, spec
from tests.native.runner import Native


class Low(NamedTuple):
    """A low-rank product: rows [M, r], NaN past the groups; weights [G, r, N] with axis 1, [G, N, r] with axis 2."""

    rows: NDArray[Any]
    weight: NDArray[Any]
    axis: int

    def spec(self, *, table: bool = False) -> LowRank:
        """What a call knows of it; `table`: its weights are given by a table of addresses."""
        return LowRank(spec_of(self.rows), spec_of(self.weight), self.axis, table)


def low_of(case: cases.Case, width: int, rank: int, axis: int, dtype: str) -> Low:
    """A low-rank product beside one of `width` columns."""
    rows = cases.normal((case.rows, rank), dtype, "low rows")
    rows[case.valid :] = cases.TAIL
    weight = cases.normal((case.groups, rank, width), dtype, "low weights")
    return Low(rows, np.ascontiguousarray(weight.swapaxes(1, 2)) if axis == 2 else weight, axis)


def run_with(run: Native, call: Call, arrays: dict[str, Any], low: Low | None, table: Any = None) -> tuple[Any, ...]:
    """The results of a call with the operands of `low`; `table`: of the addresses of its weights."""
    if low is not None:
        arrays = {**arrays, "low_lhs": low.rows}
        arrays |= {"low_rhs": low.weight} if table is None else {"low_rhs_table": table}
    return run(call, arranged(call, **arrays))


def product(
    run: Native,
    case: cases.Case,
    lhs: Operand,
    rhs: Operand,
    axis: int,
    result: str,
    low: Low | None,
    *,
    table: Any = None,
    recipe: Recipe = BF16,
    **options: Any,
) -> NDArray[Any]:
    """lhs times the weight `rhs`, contracted along `axis`, with the low-rank product in its sums.

    Args:
        options: arrays by slot (bias, row_scale, into) and flags.
    """
    sizes = sizes_of(case)
    arrays = {name: array for name, array in options.items() if isinstance(array, np.ndarray)}
    flags = {name: value for name, value in options.items() if name not in arrays and value is not None}
    specs = {name: spec_of(array) for name, array in arrays.items()}
    call = calls.grouped_matmul(
        *(spec(lhs), spec(rhs), (1, axis), spec_of(sizes), result),
        recipe=recipe,
        low=None if low is None else low.spec(table=table is not None),
        **specs,
        **flags,
    )
    return run_with(run, call, {"lhs": lhs, "rhs": rhs, "group_sizes": sizes, **arrays}, low, table)[0]


class Fused(NamedTuple):
    """Operands of a product with an activation behind it, or with its gradients."""

    case: cases.Case
    activation: Activation
    lhs: Operand  # [M, K]
    rhs: Operand  # [G, K, W] with axis 1, [G, W, K] with axis 2; of gradients with F columns
    axis: int
    row_scale: NDArray[Any]
    hidden: NDArray[Any] | None  # [M, W], of gradients

    def call(self, result: str, low: Low | None, *, table: bool = False, **options: Any) -> Call:
        """grouped_matmul_act, or grouped_matmul_dact where hidden rows are given."""
        given: tuple[Any, ...] = (spec(self.lhs), spec(self.rhs), self.axis, spec_of(sizes_of(self.case)))
        options = {"recipe": BF16, "row_scale": spec_of(self.row_scale), **options}
        options |= {"activation": self.activation, "low": None if low is None else low.spec(table=table)}
        if self.hidden is None:
            return calls.grouped_matmul_act(*given, result, **options)
        options = {"wanted": (True, True, True), **options}
        return calls.grouped_matmul_dact(*given, spec_of(self.hidden), result, **options)

    def arrays(self) -> dict[str, Any]:
        """Its operands by slot."""
        named = {"lhs": self.lhs, "rhs": self.rhs, "group_sizes": sizes_of(self.case), "row_scale": self.row_scale}
        return named if self.hidden is None else {**named, "hidden": self.hidden}

    def run(self, run: Native, result: str, low: Low | None, *, table: Any = None, **options: Any) -> tuple[Any, ...]:
        """The results of the call."""
        call = self.call(result, low, table=table is not None, **options)
        return run_with(run, call, self.arrays(), low, table)


def fused_of(case: cases.Case, kind: str, lhs: Operand, rhs: Operand, axis: int, dtype: str, *, grad: bool) -> Fused:
    """`lhs` times `rhs` and what a layer does with it; `grad`: its gradients, at hidden rows of `dtype`."""
    activation = Activation(kind)
    scale = cases.normal((case.rows,), "float32", "row_scale")
    hidden = cases.normal((case.rows, activation.fc1_width(case.n)), dtype, "hidden") if grad else None
    for array in (scale, hidden):
        if array is not None:
            array[case.valid :] = cases.TAIL
    return Fused(case, activation, lhs, rhs, axis, scale, hidden)
