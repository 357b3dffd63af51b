"""Runs one grouped product, with everything that can be fused into it, as one native call; defines kinds of operands.

The operations take a `Runner`, so that JAX, PyTorch, NumPy and planning without arrays share their code. In a pair
(operand, number), the number is the contracted axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

from grouped_core import calls
from grouped_core.calls import ArraySpec, Call, OperandSpec, QuantizedSpec
from grouped_core.formats import QTensor
from grouped_core.linear_spec import Linear
from grouped_core.recipes import Recipe

Array = Any
"""An array of the runner's framework."""


class Runner(Protocol):
    """How a frontend runs one native call."""

    def __call__(self, call: Call, arrays: Sequence[Array | None]) -> tuple[Array, ...]:
        """Runs `call` on `arrays`, one per operand slot (None where absent or given by a table of addresses).

        It returns one result per result slot, None where the call has none.
        """
        ...

    def spec(self, array: Array) -> ArraySpec:
        """Shape and dtype of an array."""
        ...

    def cast(self, array: Array, dtype: str) -> Array:
        """The array rounded to `dtype`; the same array where it has that dtype."""
        ...


@dataclass(frozen=True)
class Listed:
    """An operand whose groups are separate arrays, reached through a table of G int64 addresses on the device.

    Attributes:
        spec: the spec of the packed form, [G, ...].
        table: the addresses; address 0 in the table of a destination skips the group.
        aligned: whether every address is a multiple of 16 bytes.
    """

    spec: ArraySpec
    table: Array
    aligned: bool = True


@dataclass(frozen=True)
class Paired:
    """A weight in two arrays of equal shape, read as their concatenation (contracts.md, MAT-3).

    Attributes:
        gate, up: [G, ...], the first and the second half. axis: the axis of the concatenation.
    """

    gate: Array
    up: Array
    axis: int


@dataclass(frozen=True)
class Low:
    """A product of low rank that is added to the sums of another product before these are rounded once.

    Attributes:
        rows: [M, r]. weight: [G, r, N], or [G, N, r], contracted along `axis`.
    """

    rows: Array
    weight: Array | Listed
    axis: int

    def spec(self, run: Runner) -> calls.LowRank:
        """Returns what a call has to know about this product."""
        listed = isinstance(self.weight, Listed)
        return calls.LowRank(run.spec(self.rows), operand_spec(run, self.weight), self.axis, listed)

    def operands(self) -> dict[str, Any]:
        """Returns the operands of this product by slot."""
        return {"low_lhs": self.rows, "low_rhs": self.weight}


@dataclass(frozen=True)
class Cached:
    """A weight with the quantised forms that its layer caches between passes.

    Attributes:
        source: the weight, one array or `Listed`, which plain formats read. forms: its quantised forms.
    """

    source: Array | Listed
    forms: QTensor[Any]


@dataclass(frozen=True)
class Gathered:
    """Rows [M, X] that are not in memory yet: the pass that quantises them gathers them, where its format allows it.

    Attributes:
        tokens: [T, X]. source: int32 [M], the slot of each row. inverse: int32 [T, k], the row of each slot.
    """

    tokens: Array
    source: Array
    inverse: Array


Operand = Array | Listed | Paired | QTensor[Any] | Cached | Gathered
"""One array, one per group, two halves, a quantised array, an array with its quantised forms, or rows of tokens."""


def in_form(op: Linear, weight: Any) -> Any:
    """`weight` as an `Operand`: a tuple of two arrays becomes `Paired`, anything else is returned unchanged."""
    if type(weight) is not tuple:  # specs are named tuples
        return weight
    gate, up = weight
    return Paired(gate, up, op.weight_axes()[1])


@overload
def operand_spec(run: Runner, operand: None) -> None: ...
@overload
def operand_spec(run: Runner, operand: Array) -> Any: ...
def operand_spec(run: Runner, operand: Operand | None) -> OperandSpec | None:
    """Returns the spec of an operand; for `Listed` and `Paired` ones, that of the packed form."""
    if operand is None:
        return None
    if isinstance(operand, Paired):
        half = run.spec(operand.gate)
        return half._replace(shape=tuple(d * (1 + (at == operand.axis)) for at, d in enumerate(half.shape)))
    if isinstance(operand, QTensor):
        return quantized_spec(operand, run.spec)
    if isinstance(operand, Cached):
        return operand_spec(run, operand.source)
    if isinstance(operand, Gathered):
        tokens = run.spec(operand.tokens)
        return tokens._replace(shape=(run.spec(operand.source).shape[0], tokens.shape[1]))
    return operand.spec if isinstance(operand, Listed) else run.spec(operand)


def quantized_spec(q: QTensor[Any], spec: Callable[[Array], ArraySpec]) -> QuantizedSpec:
    """Returns the spec of `q`; `spec` gives the spec of an array."""
    _, *scales = q.slots
    block, group = (None if each is None else spec(each) for each in scales)
    other = None if q.other is None else quantized_spec(q.other, spec)
    return QuantizedSpec(spec(q.values), block, group, q.format, q.axis, q.shape, q.dtype, other)


def weight_specs(run: Runner, weight: Operand) -> tuple[Any, ArraySpec | None]:
    """Returns the specs of a weight's slots `rhs` and `rhs_up`; for a `Listed` weight, that of the packed form."""
    if isinstance(weight, Paired):
        return run.spec(weight.gate), run.spec(weight.up)
    return operand_spec(run, weight), None


def rounded(run: Runner, operand: Operand, dtype: str) -> Operand:
    """Returns the arrays of an operand rounded to `dtype`; a `Listed` one, which frontends round, stays as it is."""
    if isinstance(operand, Listed):
        return operand
    if isinstance(operand, Paired):
        return Paired(run.cast(operand.gate, dtype), run.cast(operand.up, dtype), operand.axis)
    return run.cast(operand, dtype)


def operand_arrays(name: str, operand: Operand | None) -> dict[str, Array]:
    """Returns the arrays of an operand by slot: an address table, two halves, codes and scales, or the array itself."""
    if operand is None:
        return {}
    if isinstance(operand, Listed):
        return {f"{name}_table": operand.table}
    if isinstance(operand, Paired):
        return {name: operand.gate, f"{name}_up": operand.up}
    if isinstance(operand, QTensor):
        slots = zip((name, f"{name}_scales", f"{name}_group_scales"), operand.slots, strict=True)
        return {slot: array for slot, array in slots if array is not None}
    return {name: operand}


def arranged(call: Call, **operands: Operand | None) -> tuple[Any, ...]:
    """Returns the arrays of named operands, one per slot of `call`."""
    arrays: dict[str, Array] = {}
    for name, operand in operands.items():
        arrays |= operand_arrays(name, operand)
    return call.arrange(**arrays)


def all_aligned(*operands: Operand | None) -> bool:
    """Whether every address in the tables of `Listed` operands is a multiple of 16 bytes."""
    return all(operand.aligned for operand in operands if isinstance(operand, Listed))


def product(
    run: Runner,
    op: Linear,
    recipe: Recipe,
    lhs: tuple[Operand, int],
    rhs: tuple[Operand, int],
    group_sizes: Array,
    result_dtype: str,
    *,
    bias: Array | Listed | None = None,
    row_scale: Array | None = None,
    into: Array | Listed | None = None,
    halves: tuple[int, int] = (0, 0),
    accumulate: bool = False,
    low: Low | None = None,
) -> Array:
    """Computes one grouped product of two operands in the forms that it reads; bias and row scale are fused into it.

    `halves`: the halves of the columns of lhs and of rhs, as in `calls.grouped_matmul`. `low`: a product of low rank
    that is added to the sums.
    """
    (left, left_axis), (right, right_axis) = lhs, rhs
    right_spec, up_spec = weight_specs(run, right)
    call = calls.grouped_matmul(
        operand_spec(run, left),
        right_spec,
        (left_axis, right_axis),
        run.spec(group_sizes),
        result_dtype,
        recipe=recipe,
        bias=operand_spec(run, bias),
        row_scale=operand_spec(run, row_scale),
        into=operand_spec(run, into),
        tables=(isinstance(right, Listed), isinstance(bias, Listed), isinstance(into, Listed)),
        rhs_up=up_spec,
        halves=halves,
        aligned_tables=all_aligned(right, into, low and low.weight),
        scale_bias=op.scale_bias and bias is not None,
        accumulate=accumulate,
        low=low and low.spec(run),
        rows_hint=op.rows_hint,
        implementation=op.implementation,
    )
    named = {"lhs": left, "rhs": right, "bias": bias, "into": into, "group_sizes": group_sizes, "row_scale": row_scale}
    (result,) = run(call, arranged(call, **named, **(low.operands() if low else {})))
    return result


def low_rank_grads(
    run: Runner,
    op: Linear,
    recipe: Recipe,
    rows: Array,
    factor: tuple[Array | Listed, int],
    low_rows: Array,
    group_sizes: Array,
    dtypes: tuple[str, str],
) -> tuple[Array, Array]:
    """Computes rows factor^T [M, r] and low_rows^T rows, shaped as the factor; one call reads `rows` once for both.

    Args:
        rows: [M, N]. factor: [G, r, N], or [G, N, r]. low_rows: [M, r]; all three of one dtype.
        dtypes: the dtypes of both results.
    """
    weight, axis = factor
    call = calls.low_rank_grads(
        *(run.spec(rows), operand_spec(run, weight), axis, run.spec(low_rows), run.spec(group_sizes), dtypes),
        recipe=recipe,
        table=isinstance(weight, Listed),
        aligned_tables=all_aligned(weight),
        rows_hint=op.rows_hint,
        implementation=op.implementation,
    )
    named = {"rows": rows, "factor": weight, "low_rows": low_rows, "group_sizes": group_sizes}
    rows_grad, factor_grad = run(call, arranged(call, **named))
    return rows_grad, factor_grad


def scale_rows(
    run: Runner, rows: Array, scale: Array | None, group_sizes: Array, dtype: str, into: Array | None = None
) -> Array:
    """[M, N] = scale[r] * rows[r]."""
    call = calls.scale_rows(
        run.spec(rows), operand_spec(run, scale), run.spec(group_sizes), dtype, operand_spec(run, into)
    )
    return run(call, call.arrange(rows=rows, row_scale=scale, group_sizes=group_sizes, into=into))[0]


def add_rows(
    run: Runner,
    rows: Array,
    group_sizes: Array,
    dtype: str,
    *,
    base: Array | None = None,
    into: Array | None = None,
    factor: float = 1.0,
    rate: float = 0.0,
    key: Array | None = None,
    stream: int = 0,
) -> Array:
    """[M, N] = base[r] + factor * rows[r]; each element of `rows` is dropped with probability `rate`, if that is not 0.

    Args:
        base: float32 [M, N]. key: uint32 [2], read only to drop elements. stream: the number of this mask among those
            of one key.
    """
    call = calls.add_rows(
        *(run.spec(rows), run.spec(group_sizes), dtype),
        base=operand_spec(run, base),
        into=operand_spec(run, into),
        factor=factor,
        rate=rate,
        stream=stream,
    )
    key = key if rate else None
    return run(call, call.arrange(rows=rows, group_sizes=group_sizes, base=base, key=key, into=into))[0]
