"""One grouped product as the rules ask for it: operands as the recipe stores them, everything fused into one call.

Rules are written against one injected `Runner`, so JAX, PyTorch, NumPy and planning without arrays share them to the
letter. The number beside an operand is its contracted axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, overload

from grouped_core import calls
from grouped_core.calls import ArraySpec, Call
from grouped_core.formats import Format
from grouped_core.linear_spec import Linear
from grouped_core.recipes import Recipe

Array = Any
"""An array of whatever framework the runner belongs to."""


class Runner(Protocol):
    """How a face runs one native call."""

    def __call__(self, call: Call, arrays: Sequence[Array | None]) -> tuple[Array, ...]:
        """Runs `call` on `arrays`, one a slot (None where absent or given by a table of addresses).

        Its results stand one a slot too, None where the call has none.
        """
        ...

    def spec(self, array: Array) -> ArraySpec:
        """Shape and dtype of an array."""
        ...

    def cast(self, array: Array, dtype: str) -> Array:
        """The array rounded to `dtype`; itself where it has that dtype."""
        ...


@dataclass(frozen=True)
class Listed:
    """An operand whose groups are separate arrays, reached through a table of G int64 addresses on the device.

    Attributes:
        spec: of the packed form, [G, ...].
        table: the addresses; in a destination 0 skips the group.
        aligned: every address is a multiple of 16 bytes.
    """

    spec: ArraySpec
    table: Array
    aligned: bool = True


@dataclass(frozen=True)
class Paired:
    """A weight in two arrays of equal shape, read as if one lay behind the other (contracts.md, MAT-3).

    Attributes:
        gate, up: [G, ...], the first and the second half. axis: along which they stand side by side.
    """

    gate: Array
    up: Array
    axis: int


def in_form(op: Linear, weight: Any) -> Any:
    """`weight` as rules take it: a tuple of two arrays as the halves of its columns, anything else as it stands."""
    if not isinstance(weight, tuple):
        return weight
    gate, up = weight
    return Paired(gate, up, op.weight_axes()[1])


@overload
def operand_spec(run: Runner, operand: None) -> None: ...
@overload
def operand_spec(run: Runner, operand: Array) -> Any: ...
def operand_spec(run: Runner, operand: Array | Listed | Paired | None) -> ArraySpec | None:
    """Spec of an operand, of the packed form where it is listed or in two arrays."""
    if operand is None:
        return None
    if isinstance(operand, Paired):
        half = run.spec(operand.gate)
        return half._replace(shape=tuple(d * (1 + (at == operand.axis)) for at, d in enumerate(half.shape)))
    return operand.spec if isinstance(operand, Listed) else run.spec(operand)


class Weight(NamedTuple):
    """A weight as calls take it: spec of `rhs`, which is packed where a table gives it, and arrays."""

    spec: ArraySpec
    rhs: Array | None
    table: Array | None
    up_spec: ArraySpec | None
    up: Array | None


def stored(run: Runner, weight: Array | Listed | Paired, dtype: str) -> Weight:
    """The weight rounded to `dtype`, but for a listed one, which stays as it stands."""
    if isinstance(weight, Listed):
        return Weight(weight.spec, None, weight.table, None, None)
    if isinstance(weight, Paired):
        gate, up = run.cast(weight.gate, dtype), run.cast(weight.up, dtype)
        return Weight(run.spec(gate), gate, None, run.spec(up), up)
    whole = run.cast(weight, dtype)
    return Weight(run.spec(whole), whole, None, None, None)


def all_aligned(*operands: Array | Listed | Paired | None) -> bool:
    """Whether every address of the listed ones is a multiple of 16 bytes."""
    return all(operand.aligned for operand in operands if isinstance(operand, Listed))


def split(operand: Array | Listed | None) -> tuple[Array | None, Array | None]:
    """(array, table) of an operand."""
    return (None, operand.table) if isinstance(operand, Listed) else (operand, None)


def product(
    run: Runner,
    op: Linear,
    recipe: Recipe,
    cells: tuple[Format, Format],
    lhs: tuple[Array, int],
    rhs: tuple[Array | Listed | Paired, int],
    group_sizes: Array,
    result_dtype: str,
    *,
    bias: Array | Listed | None = None,
    row_scale: Array | None = None,
    into: Array | Listed | None = None,
    halves: tuple[int, int] = (0, 0),
    accumulate: bool = False,
) -> Array:
    """One grouped product, each operand stored as its cell of the recipe says, everything fused into one call.

    `halves`: of the columns of lhs and rhs, as in `calls.grouped_matmul`.
    """
    left = run.cast(lhs[0], cells[0].values)
    right = stored(run, rhs[0], cells[1].values)
    (b, b_table), (c, c_table) = split(bias), split(into)
    call = calls.grouped_matmul(
        run.spec(left),
        right.spec,
        (lhs[1], rhs[1]),
        run.spec(group_sizes),
        result_dtype,
        recipe=recipe,
        bias=operand_spec(run, bias),
        row_scale=operand_spec(run, row_scale),
        into=operand_spec(run, into),
        tables=(right.table is not None, b_table is not None, c_table is not None),
        rhs_up=right.up_spec,
        halves=halves,
        aligned_tables=all_aligned(rhs[0], into),
        scale_bias=op.scale_bias and bias is not None,
        accumulate=accumulate,
        rows_hint=op.rows_hint,
        implementation=op.implementation,
    )
    (result,) = run(call, (left, right.rhs, group_sizes, b, row_scale, c, right.table, b_table, c_table, right.up))
    return result


def wide(dtype: str) -> str:
    """Dtype of the gradient of an operand stored as `dtype`: its own, or bfloat16 for 8-bit values."""
    return "bfloat16" if dtype.startswith("float8") else dtype


def scale_rows(
    run: Runner, rows: Array, scale: Array | None, group_sizes: Array, dtype: str, into: Array | None = None
) -> Array:
    """[M, N] = scale[r] * rows[r]."""
    call = calls.scale_rows(
        run.spec(rows), operand_spec(run, scale), run.spec(group_sizes), dtype, operand_spec(run, into)
    )
    return run(call, (rows, scale, group_sizes, into))[0]
