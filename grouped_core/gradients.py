"""Rules of the linear operation: forward, backward, and what is kept in between (contracts.md, section 2).

Letters: G groups, M rows, K in, N out. The number beside an operand is its contracted axis.
"""

from __future__ import annotations

from typing import NamedTuple

from grouped_core import calls, linear_spec
from grouped_core.calls import ArraySpec
from grouped_core.linear_spec import Linear
from grouped_core.products import Array, Listed, Paired, Runner, operand_spec, product, scale_rows, split, wide


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


def linear(
    run: Runner,
    op: Linear,
    x: Array,
    w: Array | Listed | Paired,
    group_sizes: Array,
    bias: Array | Listed | None = None,
    row_scale: Array | None = None,
    out: Array | None = None,
) -> Array:
    """y [M, N]: y[r] = c[r] (x[r] W[g] + b[g]), or x[r] W[g] + c[r] b[g] with `scale_bias`; c = row_scale or 1.

    Args:
        x: [M, K]. w: [G, K, N], or [G, N, K] when transposed; one array, `Listed` or `Paired`.
        group_sizes: int32 [G]. bias: [G, N]. row_scale: [M].
        out: the caller's [M, N] buffer; its tail rows are left alone.
    """
    x_spec, w_spec = run.spec(x), operand_spec(run, w)
    result = linear_spec.check_linear(
        op,
        x_spec,
        w_spec,
        run.spec(group_sizes),
        operand_spec(run, bias),
        operand_spec(run, row_scale),
        operand_spec(run, out),
    )
    recipe = op.resolve(x_spec, w_spec)
    scale = None if row_scale is None else run.cast(row_scale, "float32")
    return product(
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
    w: Array | Listed | Paired | None,
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
        product_grad = product(
            run,
            op,
            recipe,
            recipe.dgrad,
            (dy, 1),
            (w, op.weight_axes()[1]),
            group_sizes,
            wide(x_spec.dtype) if fused else "float32",
            row_scale=row_factor if fused else None,
            into=grad_input if fused else None,
        )
        if fused:
            dx = product_grad
        elif needs.x:
            dx = scale_rows(run, product_grad, row_factor, group_sizes, wide(x_spec.dtype), grad_input)
    if needs.w:
        dy_scaled = dy
        if row_factor is not None:
            dy_scaled = scale_rows(run, dy, row_factor, group_sizes, recipe.wgrad[1].values)
        dw = weight_grad(run, op, x_spec, w_spec, x, dy_scaled, group_sizes, into=into_w, accumulate=accumulate)
    if needs.bias and bias_spec is not None:
        call = calls.group_sum(run.spec(dy), sizes_spec, bias_spec.dtype, operand_spec(run, scale))
        (db,) = run(call, (dy, group_sizes, scale))
    if needs.row_scale and scale_spec is not None:
        pair = (x, product_grad) if scale_through_product else None
        group_pair = (dy, bias) if bias is not None else None
        b, table = split(bias)
        call = calls.row_dot(
            sizes_spec,
            run.spec(dy).shape[0],
            pair and (run.spec(pair[0]), run.spec(pair[1])),
            group_pair and (run.spec(dy), operand_spec(run, bias)),
            table is not None,
        )
        arrays = (group_sizes, *(pair or (None, None)), dy if group_pair else None, b, table)
        dc = run.cast(run(call, arrays)[0], scale_spec.dtype)
    return Gradients(dx, dw, db, dc)


def weight_grad(
    run: Runner,
    op: Linear,
    x_spec: ArraySpec,
    w_spec: ArraySpec,
    x: Array,
    dy: Array,
    group_sizes: Array,
    *,
    into: Array | Listed | None = None,
    accumulate: bool = False,
    half: int = 0,
) -> Array:
    """dW_g = sum x^T dy over the rows of group g, in the weight's layout.

    Args:
        x: [M, K]. dy: [M, N]. w_spec: of the packed weight. into: destination; with `accumulate` dW is added to it.
        half: 1, 2: of the first, second half of the N columns alone, [G, K, N / 2]; 0: of all.
    """
    recipe = op.resolve(x_spec, w_spec)
    lhs, rhs, cells, halves = (x, 0), (dy, 0), recipe.wgrad, (0, half)
    if op.transposed:
        lhs, rhs, cells, halves = rhs, lhs, (cells[1], cells[0]), (half, 0)
    into_spec = operand_spec(run, into)
    return product(
        run,
        op,
        recipe,
        cells,
        lhs,
        rhs,
        group_sizes,
        into_spec.dtype if into_spec else op.wgrad_dtype or wide(w_spec.dtype),
        into=into,
        halves=halves,
        accumulate=accumulate,
    )
