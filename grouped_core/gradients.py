"""Rules of the grouped operations: forward, backward, and what is kept in between.

They are written against one injected `Runner`, so JAX, PyTorch, NumPy and planning without arrays share them to the
letter. Formulas: contracts.md, sections 2 and 3; every sum is fp32, every stored value is rounded once.

Letters: G groups, M rows, K in, N out. The number beside an operand is its contracted axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, overload

from grouped_core import calls
from grouped_core.calls import ArraySpec, Call, Linear
from grouped_core.formats import Format
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


class Needs(NamedTuple):
    """Which gradients somebody asked for; the others are neither computed nor prepared for."""

    x: bool = True
    w: bool = True
    bias: bool = True
    row_scale: bool = True


class Gradients(NamedTuple):
    """Gradients of the linear operation, None where not needed (or written to a table of destinations)."""

    x: Array | None
    w: Array | None
    bias: Array | None
    row_scale: Array | None


@overload
def _spec(run: Runner, operand: None) -> None: ...
@overload
def _spec(run: Runner, operand: Array) -> Any: ...
def _spec(run: Runner, operand: Array | Listed | None) -> ArraySpec | None:
    if operand is None:
        return None
    return operand.spec if isinstance(operand, Listed) else run.spec(operand)


def _aligned(*operands: Array | Listed | None) -> bool:
    return all(operand.aligned for operand in operands if isinstance(operand, Listed))


def _split(operand: Array | Listed | None) -> tuple[Array | None, Array | None]:
    """(array, table) of an operand."""
    return (None, operand.table) if isinstance(operand, Listed) else (operand, None)


def _product(
    run: Runner,
    op: Linear,
    recipe: Recipe,
    cells: tuple[Format, Format],
    lhs: tuple[Array, int],
    rhs: tuple[Array | Listed, int],
    group_sizes: Array,
    result_dtype: str,
    *,
    bias: Array | Listed | None = None,
    row_scale: Array | None = None,
    into: Array | Listed | None = None,
    accumulate: bool = False,
) -> Array:
    """One grouped product, each operand stored as its cell of the recipe says, everything fused into one call."""
    left = run.cast(lhs[0], cells[0].values)
    right = rhs[0] if isinstance(rhs[0], Listed) else run.cast(rhs[0], cells[1].values)
    (w, w_table), (b, b_table), (c, c_table) = _split(right), _split(bias), _split(into)
    call = calls.grouped_matmul(
        run.spec(left),
        _spec(run, right),
        (lhs[1], rhs[1]),
        run.spec(group_sizes),
        result_dtype,
        recipe=recipe,
        bias=_spec(run, bias),
        row_scale=_spec(run, row_scale),
        into=_spec(run, into),
        tables=(w_table is not None, b_table is not None, c_table is not None),
        aligned_tables=_aligned(right, into),
        scale_bias=op.scale_bias and bias is not None,
        accumulate=accumulate,
        rows_hint=op.rows_hint,
        implementation=op.implementation,
    )
    (result,) = run(call, (left, w, group_sizes, b, row_scale, c, w_table, b_table, c_table))
    return result


def linear(
    run: Runner,
    op: Linear,
    x: Array,
    w: Array | Listed,
    group_sizes: Array,
    bias: Array | Listed | None = None,
    row_scale: Array | None = None,
    out: Array | None = None,
) -> Array:
    """y [M, N]: y[r] = c[r] (x[r] W[g] + b[g]), or x[r] W[g] + c[r] b[g] with `scale_bias`; c = row_scale or 1.

    Args:
        x: [M, K]. w: [G, K, N], or [G, N, K] when transposed; one array or `Listed`. group_sizes: int32 [G].
        bias: [G, N]. row_scale: [M]. out: the caller's [M, N] buffer; its tail rows are left alone.
    """
    x_spec, w_spec = run.spec(x), _spec(run, w)
    result = calls.check_linear(
        op, x_spec, w_spec, run.spec(group_sizes), _spec(run, bias), _spec(run, row_scale), _spec(run, out)
    )
    recipe = op.resolve(x_spec, w_spec)
    scale = None if row_scale is None else run.cast(row_scale, "float32")
    return _product(
        run,
        op,
        recipe,
        recipe.forward,
        (x, 1),
        (w, op.weight_axes()[0]),
        group_sizes,
        result.dtype,
        bias=bias,
        row_scale=scale,
        into=out,
    )


def linear_saved(op: Linear, needs: Needs, has_bias: bool, has_scale: bool) -> Needs:
    """Which of x, w, bias, row_scale the backward will read, given the gradients that are needed."""
    scales_rows = has_scale and not op.scale_bias
    scale_grad = needs.row_scale and has_scale
    through_product = scale_grad and scales_rows  # its gradient needs dy W^T and x
    return Needs(
        x=needs.w or through_product,
        w=needs.x or through_product,
        bias=scale_grad and has_bias,
        row_scale=has_scale and (needs.bias or (scales_rows and (needs.x or needs.w))),
    )


def linear_grads(
    run: Runner,
    op: Linear,
    specs: tuple[ArraySpec, ArraySpec, ArraySpec | None, ArraySpec | None],
    x: Array | None,
    w: Array | Listed | None,
    group_sizes: Array,
    bias: Array | Listed | None,
    row_scale: Array | None,
    dy: Array,
    needs: Needs,
    *,
    into_w: Array | Listed | None = None,
    accumulate: bool = False,
    grad_input: Array | None = None,
) -> Gradients:
    """Gradients that `needs` asks for; arrays that `linear_saved` did not keep are None.

    Args:
        specs: of x, w, bias, row_scale, the latter two None where the operation had none.
        dy: [M, N]. into_w: destination of dW, in the weight's layout; with `accumulate` dW is added to it.
        grad_input: the caller's [M, K] buffer for dx; its tail rows are left alone.

    With c the row scale: dx = c (dy W^T), dW_g = sum x^T (c dy), db_g = sum c dy, dc = <x, dy W^T> + <dy, b>.
    With `scale_bias`, c stands beside the bias alone: dx = dy W^T, dW_g = sum x^T dy, db_g = sum c dy, dc = <dy, b>.
    """
    x_spec, w_spec, bias_spec, scale_spec = specs
    recipe = op.resolve(x_spec, w_spec)
    sizes_spec = run.spec(group_sizes)
    scale = None if row_scale is None else run.cast(row_scale, "float32")
    row_factor = None if op.scale_bias else scale  # what multiplies whole rows of y
    # A scale that multiplies the bias alone reaches no product.
    scale_through_product = needs.row_scale and scale_spec is not None and not op.scale_bias

    dx = dw = db = dc = None
    product_grad = None
    if needs.x or scale_through_product:
        # The scale's gradient reads dy W^T unscaled and unrounded, so dx is then scaled in a pass of its own: one
        # fp32 product and one rounding either way, hence the same bits.
        fused = not scale_through_product
        product_grad = _product(
            run,
            op,
            recipe,
            recipe.dgrad,
            (dy, 1),
            (w, op.weight_axes()[1]),
            group_sizes,
            _wide(x_spec.dtype) if fused else "float32",
            row_scale=row_factor if fused else None,
            into=grad_input if fused else None,
        )
        if fused:
            dx = product_grad
        elif needs.x:
            dx = _scale_rows(run, product_grad, row_factor, group_sizes, _wide(x_spec.dtype), grad_input)
    if needs.w:
        dy_scaled = dy
        if row_factor is not None:
            dy_scaled = _scale_rows(run, dy, row_factor, group_sizes, recipe.wgrad[1].values)
        into_spec = _spec(run, into_w)
        lhs, rhs, cells = (x, 0), (dy_scaled, 0), recipe.wgrad
        if op.transposed:
            lhs, rhs, cells = rhs, lhs, (cells[1], cells[0])
        dw = _product(
            run,
            op,
            recipe,
            cells,
            lhs,
            rhs,
            group_sizes,
            into_spec.dtype if into_spec else op.wgrad_dtype or _wide(w_spec.dtype),
            into=into_w,
            accumulate=accumulate,
        )
    if needs.bias and bias_spec is not None:
        call = calls.group_sum(run.spec(dy), sizes_spec, bias_spec.dtype, _spec(run, scale))
        (db,) = run(call, (dy, group_sizes, scale))
    if needs.row_scale and scale_spec is not None:
        pair = (x, product_grad) if scale_through_product else None
        group_pair = (dy, bias) if bias is not None else None
        b, table = _split(bias)
        call = calls.row_dot(
            sizes_spec,
            run.spec(dy).shape[0],
            pair and (run.spec(pair[0]), run.spec(pair[1])),
            group_pair and (run.spec(dy), _spec(run, bias)),
            table is not None,
        )
        arrays = (group_sizes, *(pair or (None, None)), dy if group_pair else None, b, table)
        dc = run.cast(run(call, arrays)[0], scale_spec.dtype)
    return Gradients(dx, dw, db, dc)


def _wide(dtype: str) -> str:
    """Dtype of the gradient of an operand stored as `dtype`: its own, or bfloat16 for 8-bit values."""
    return "bfloat16" if dtype.startswith("float8") else dtype


def _scale_rows(
    run: Runner, rows: Array, scale: Array | None, group_sizes: Array, dtype: str, into: Array | None = None
) -> Array:
    call = calls.scale_rows(run.spec(rows), _spec(run, scale), run.spec(group_sizes), dtype, _spec(run, into))
    return run(call, (rows, scale, group_sizes, into))[0]
