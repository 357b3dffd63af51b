"""The linear operation: forward, backward, and what forward saves for backward (docs/contracts.md, "Products").

Letters: G groups, M rows, K in, N out. In a pair (operand, number), the number is the contracted axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from grouped_core import calls, linear_spec
from grouped_core.calls import ArraySpec, OperandSpec, QuantizedSpec
from grouped_core.formats import Format, QTensor, wide
from grouped_core.linear_spec import Linear
from grouped_core.products import (
    Array,
    Cached,
    Listed,
    Low,
    Operand,
    Runner,
    add_rows,
    arranged,
    operand_spec,
    product,
    scale_rows,
)
from grouped_core.quantizing import (
    NO_EXTRAS,
    Extras,
    Quantized,
    check_requantize,
    dequantize,
    given_form,
    given_forms,
    in_formats,
)
from grouped_core.recipes import Recipe


class Needs(NamedTuple):
    """Which gradients the caller asked for; nothing is computed or saved for the others."""

    x: bool = True
    w: bool = True
    bias: bool = True
    row_scale: bool = True


NO_NEEDS = Needs(False, False, False, False)


class Amaxes(NamedTuple):
    """Amax [G] of each operand with delayed scaling, merged into the history; None for other operands."""

    x: Array | None = None
    w: Array | None = None
    dy: Array | None = None

    def and_later(self, found: Amaxes) -> Amaxes:
        """Completes these amaxes by those that backward found: the first pass to quantise an operand measures it."""
        return Amaxes(*(mine if later is None else later for mine, later in zip(self, found, strict=True)))


class Gradients(NamedTuple):
    """Gradients of the linear operation; None where not needed or where written to a table of destinations."""

    x: Array | None
    w: Array | None
    bias: Array | None
    row_scale: Array | None


LinearSpecs = tuple[OperandSpec, OperandSpec, ArraySpec | None, ArraySpec | None]
"""Specs of x, weight, bias and row scale; the last two are None where the operation had none."""


class Backward(NamedTuple):
    """Gradients, the amax of dy, and the amaxes of x and w where forward did not find them."""

    grads: Gradients
    amax: Amaxes


class Forward(NamedTuple):
    """y [M, N], and x and w in the form that backward reads; None where backward does not read them."""

    y: Array
    x: Operand | None
    w: Operand | None
    amax: Amaxes


def linear(
    run: Runner,
    op: Linear,
    x: Operand,
    w: Operand,
    group_sizes: Array,
    bias: Array | Listed | None = None,
    row_scale: Array | None = None,
    out: Array | None = None,
    scales: tuple[Array | None, Array | None] = (None, None),
) -> Array:
    """Returns y of `linear_forward` for a call without gradients; `scales`: quantisation scales [G] of x and of w."""
    extras = Extras(None, *scales, measure=False)
    return linear_forward(run, op, x, w, group_sizes, bias, row_scale, out, extras=extras).y


def linear_forward(
    run: Runner,
    op: Linear,
    x: Operand,
    w: Operand,
    group_sizes: Array,
    bias: Array | Listed | None = None,
    row_scale: Array | None = None,
    out: Array | None = None,
    *,
    extras: Extras = NO_EXTRAS,
    needs: Needs = NO_NEEDS,
    low: Low | None = None,
) -> Forward:
    """y[r] = c[r] (x[r] W[g] + b[g]), or x[r] W[g] + c[r] b[g] with `scale_bias`; c = row_scale or 1.

    Args:
        x: [M, K]. w: [G, K, N], or [G, N, K] when transposed; one array, `Listed` or `Paired`. Both may be quantised,
            except a `Paired` w.
        group_sizes: int32 [G]. bias: [G, N]. row_scale: [M].
        out: the caller's [M, N] buffer; its tail rows are left unchanged.
        needs: gradients that backward will compute. Their operands are saved; where this call quantises x or w, one
            pass makes both the rowwise and the columnwise form.
        low: a product of low rank that is added to x W.
    """
    x_spec, w_spec = operand_spec(run, x), operand_spec(run, w)
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
    check_given_forms(op, recipe, x, w, w_spec, needs, has_scale=row_scale is not None)
    read = formatted_operands(run, op, x, w, group_sizes, extras, needs, has_scale=row_scale is not None)
    saved = linear_saved(op, needs, bias is not None, row_scale is not None)
    y = product(
        run,
        op,
        recipe,
        (read.x, 1),
        (read.w, op.weight_axes()[0]),
        group_sizes,
        result.dtype,
        bias=bias,
        row_scale=None if row_scale is None else run.cast(row_scale, "float32"),
        into=out,
        low=low,
    )
    return Forward(y, read.kept_x if saved.x else None, read.kept_w if saved.w else None, read.amax)


class FormattedOperands(NamedTuple):
    """x and w in the formats that the forward product reads, and in those that backward reads, if it reads them."""

    x: Operand
    w: Operand
    kept_x: Operand
    kept_w: Operand
    amax: Amaxes


def formatted_operands(
    run: Runner,
    op: Linear,
    x: Operand,
    w: Operand,
    group_sizes: Array,
    extras: Extras,
    needs: Needs,
    *,
    has_scale: bool = False,
) -> FormattedOperands:
    """Returns x and w in the formats that forward and the gradients in `needs` read, from one pass per operand."""
    x_spec, w_spec = operand_spec(run, x), operand_spec(run, w)
    recipe = op.resolve(x_spec, w_spec)
    keep_x, keep_w = keeps_forms(op, recipe, needs, has_scale)
    keep_w = keep_w and not is_read_as_is(recipe, w_spec, w)
    one = keep_w and saves_one_form(op, recipe, w_spec, w)
    x_forms, w_forms = row_forms(recipe, keep_x), weight_forms(op, recipe, keep_w, one)
    again = recipe.requantize
    of_x = {"scale": extras.x, "amax": extras.x_amax, "measure": extras.measure}
    of_w = {"scale": extras.w, "amax": extras.w_amax, "measure": extras.measure}
    rows = in_formats(run, x, x_forms, group_sizes, requantize=again, **of_x)
    weights = in_formats(run, w, w_forms, None, requantize=again, **of_w)
    kept = (rows.forms[-1] if keep_x else x, weights.forms[-1] if keep_w else uncached(w))
    return FormattedOperands(rows.forms[0], weights.forms[0], *kept, Amaxes(rows.amax, weights.amax))


def check_given_forms(
    op: Linear, recipe: Recipe, x: Operand, w: Operand, weight: OperandSpec, needs: Needs, *, has_scale: bool = False
) -> None:
    """Refuses operands that are quantised already but lack a form that forward or backward reads, before anything runs.

    Args:
        weight: the spec of w. needs: gradients that backward will compute, whatever forward saves for them.

    Raises:
        ValueError: such a form is missing, and the recipe does not allow to make it.
    """
    through_weight = needs.x or reads_values(op, needs, has_scale)
    of_w = weight_forms(op, recipe, through_weight and not is_read_as_is(recipe, weight, w))
    for name, operand, forms in ((op.names.x, x, row_forms(recipe, needs.w)), (op.names.w, w, of_w)):
        if isinstance(operand, QTensor) and given_forms(operand, forms) is None:
            check_requantize(operand, forms, recipe.requantize, name)


def uncached(w: Operand) -> Operand:
    """Returns the weight itself, without the quantised forms that its layer caches."""
    return w.source if isinstance(w, Cached) else w


def row_forms(recipe: Recipe, keep: bool) -> list[tuple[int, Format]]:
    """Returns (contracted axis, format) of x for forward and, with `keep`, for wgrad."""
    return [(1, recipe.forward[0]), *([(0, recipe.wgrad[0])] if keep else [])]


def weight_forms(op: Linear, recipe: Recipe, keep: bool, one: bool = False) -> list[tuple[int, Format]]:
    """Returns (contracted axis, format) of the weight for forward and, with `keep`, for dgrad, if that is another.

    Args:
        one: whether dgrad reads the form of forward (`saves_one_form`).
    """
    k_axis, n_axis = op.weight_axes()
    two = keep and not one and recipe.saved_weights != "forward"
    return [(k_axis, recipe.forward[1]), *([(n_axis, recipe.dgrad[1])] if two else [])]


CODES_ALIGNMENT = 16
"""Bytes that rows of codes are multiples of where no GPU that multiplies codes widens them."""


def saves_one_form(op: Linear, recipe: Recipe, weight: OperandSpec, w: Operand) -> bool:
    """Whether forward quantises w in one form, whose codes dgrad contracts along their other axis, where the recipe
    leaves that open: not for forms that a layer caches, and not for weights that are quantised already.

    Args:
        weight: the spec of w.
    """
    if recipe.saved_weights != "auto" or not (op.few_rows and recipe.one_form) or isinstance(w, (Cached, QTensor)):
        return False
    return multiplies_codes_either_way(weight)


def multiplies_codes_either_way(weight: OperandSpec) -> bool:
    """Whether GPUs multiply codes of this weight, contracted along either axis."""
    return all(dim % CODES_ALIGNMENT == 0 for dim in weight.shape[1:])


def keeps_forms(op: Linear, recipe: Recipe, needs: Needs, has_scale: bool) -> tuple[bool, bool]:
    """Returns for x and for w whether backward reads a form that forward makes; otherwise it reads forward's input."""
    values = reads_values(op, needs, has_scale)
    x = recipe.saved == "quantized" and needs.w and not recipe.wgrad[0].plain and not values
    w = recipe.saved_weights != "input" and (needs.x or values) and not recipe.dgrad[1].plain
    return x, w


@lru_cache(maxsize=1024)
def cached_forms(op: Linear, needs: Needs, has_scale: bool) -> tuple[tuple[int, Format], ...]:
    """Returns (contracted axis, format) of the weight's quantised forms that a layer has to cache for its passes."""
    assert op.recipe is not None, "layers with caches have recipes"
    return quantized_only(weight_forms(op, op.recipe, keeps_forms(op, op.recipe, needs, has_scale)[1]))


def quantized_only(wanted: Sequence[tuple[int, Format]]) -> tuple[tuple[int, Format], ...]:
    """Returns `wanted` without those in plain formats, which are the array itself."""
    return tuple([each for each in wanted if not each[1].plain])


def reads_values(op: Linear, needs: Needs, has_scale: bool) -> bool:
    """Whether the gradient of the row scale reads x and dy W^T; with `scale_bias` it reads neither."""
    return needs.row_scale and has_scale and not op.scale_bias


@lru_cache(maxsize=1024)
def linear_saved(op: Linear, needs: Needs, has_bias: bool, has_scale: bool) -> Needs:
    """Returns which of x, w, bias, row_scale backward reads for the gradients in `needs`."""
    scales_rows = has_scale and not op.scale_bias
    values = reads_values(op, needs, has_scale)
    return Needs(
        x=needs.w or values,
        w=needs.x or values,
        bias=needs.row_scale and has_scale and has_bias,
        row_scale=has_scale and (needs.bias or (scales_rows and (needs.x or needs.w))),
    )


class MainGrads(NamedTuple):
    """Gradients of everything except the weight, None where not needed, and the operands of wgrad."""

    x: Array | None
    bias: Array | None
    row_scale: Array | None
    rows: Operand | None  # [M, K]: x, with dy gives dW
    dy: Operand | None  # [M, N]
    amax: Amaxes  # that backward found


class Term(NamedTuple):
    """A term `factor * rows`, with dropped elements, that is added to a product in float32 before the only rounding.

    Attributes:
        rows: float32 [M, N]. The others are those of `products.add_rows`.
    """

    rows: Array
    factor: float = 1.0
    rate: float = 0.0
    key: Array | None = None
    stream: int = 0

    def added(self, run: Runner, base: Array, group_sizes: Array, dtype: str, into: Array | None = None) -> Array:
        """Returns base + the term, [M, N] of `dtype`; base: float32 [M, N]."""
        rows, factor, rate, key, stream = self
        options: dict[str, Any] = {"factor": factor, "rate": rate, "key": key, "stream": stream}
        return add_rows(run, rows, group_sizes, dtype, base=base, into=into, **options)


NO_MAIN_GRADS = MainGrads(None, None, None, None, None, Amaxes())


def linear_grads(*arguments: Any, **options: Any) -> Gradients:
    """Returns the gradients of `linear_backward`, for the same arguments."""
    return linear_backward(*arguments, **options).grads


def linear_backward(
    run: Runner,
    op: Linear,
    specs: LinearSpecs,
    x: Operand | None,
    w: Operand | None,
    group_sizes: Array,
    bias: Array | Listed | None,
    row_scale: Array | None,
    dy: Operand,
    needs: Needs,
    *,
    into_w: Array | Listed | None = None,
    accumulate: bool = False,
    grad_input: Array | None = None,
    extras: Extras = NO_EXTRAS,
) -> Backward:
    """Computes the gradients in `needs`: `main_grads`, then `weight_grad`. Other arguments are those of `main_grads`.

    Args:
        into_w: the destination of dW, in the weight's layout; with `accumulate` dW is added to it.
    """
    operands = (x, w, group_sizes, bias, row_scale, dy)
    main = main_grads(run, op, specs, *operands, needs, grad_input=grad_input, extras=extras)
    dw = None
    if needs.w:
        dw = weight_grad(run, op, specs[1], main.rows, main.dy, group_sizes, into=into_w, accumulate=accumulate)
    return Backward(Gradients(main.x, dw, main.bias, main.row_scale), main.amax)


def main_grads(
    run: Runner,
    op: Linear,
    specs: LinearSpecs,
    x: Operand | None,
    w: Operand | None,
    group_sizes: Array,
    bias: Array | Listed | None,
    row_scale: Array | None,
    dy: Operand,
    needs: Needs,
    *,
    grad_input: Array | None = None,
    extras: Extras = NO_EXTRAS,
    stream: int = 0,
    quantized_dy: QTensor[Any] | None = None,
    beside: Low | Term | None = None,
) -> MainGrads:
    """Computes the gradients in `needs` except that of the weight.

    Args:
        specs: those of x, w, bias, row_scale; the last two are None where the operation had none.
        x, w: as `linear_forward` saved them; None where it did not. Without x, `rows` of the result are None.
        dy: [M, N]. It may be quantised for the products; other readers get its dequantised values.
        grad_input: the caller's [M, K] buffer for dx; its tail rows are left unchanged.
        stream: the number of this dy among those that share one key of stochastic rounding.
        quantized_dy: forms of dy that exist already; the one contracted along rows holds c dy.
        beside: a term that is added to dy W^T. If `reads_values` is false, dx is made in one pass, so the caller has to
            multiply a `Term` by c beforehand.

    With c the row scale: dx = c (dy W^T), dW_g = sum x^T (c dy), db_g = sum c dy, dc = <x, dy W^T> + <dy, b>.
    With `scale_bias`, c multiplies only the bias: dx = dy W^T, dW_g = sum x^T dy, db_g = sum c dy, dc = <dy, b>.
    """
    x_spec, w_spec, bias_spec, scale_spec = specs
    recipe = op.resolve(x_spec, w_spec)
    sizes_spec = run.spec(group_sizes)
    scale = None if row_scale is None else run.cast(row_scale, "float32")
    row_factor = None if op.scale_bias else scale  # what multiplies whole rows of y
    scale_through_product = reads_values(op, needs, scale_spec is not None)

    given = dy
    if isinstance(dy, QTensor):  # products read its codes; they need its values only to scale them
        read = needs.bias or needs.row_scale or (needs.w and row_factor is not None)
        dy = plain_rows(run, dy, group_sizes) if read else None
    dx = db = dc = rows = rows_dy = None
    product_grad = x_amax = w_amax = None
    through_weight = needs.x or scale_through_product
    wgrad_form = [(0, recipe.wgrad[1])]
    dy_forms = [(1, recipe.dgrad[0])] if through_weight else []
    dy_forms += wgrad_form if needs.w and row_factor is None else []
    of_dy = grad_in_formats(run, recipe, given, dy_forms, group_sizes, extras, stream, given=quantized_dy)
    if through_weight:
        # The gradient of the scale reads dy W^T unscaled and unrounded, so dx is then scaled in a separate pass. Both
        # ways do one fp32 product and one rounding, so they give the same bits.
        fused = not scale_through_product
        n_axis = op.weight_axes()[1]
        (columnwise,), w_amax = weight_for_dgrad(run, recipe, w_spec, w, n_axis, extras)
        term = beside if isinstance(beside, Term) else None
        dtype, buffer = (wide(x_spec.dtype), grad_input) if fused else ("float32", None)
        product_grad = product(
            run,
            op,
            recipe.of_gradients,
            (of_dy.forms[0], 1),
            (columnwise, n_axis),
            group_sizes,
            dtype if term is None else "float32",
            row_scale=row_factor if fused else None,
            into=buffer if term is None else None,
            low=beside if isinstance(beside, Low) else None,
        )
        if term is not None:
            product_grad = term.added(run, product_grad, group_sizes, dtype, buffer)
        if fused:
            dx = product_grad
        elif needs.x:
            dx = scale_rows(run, product_grad, row_factor, group_sizes, wide(x_spec.dtype), grad_input)
    amax = of_dy.amax
    if needs.w:
        (rows_dy,) = of_dy.forms[-1:] if row_factor is None else [None]
        if row_factor is not None:
            ready = None if quantized_dy is None else given_forms(quantized_dy, wgrad_form)
            if ready is None:
                scaled = scale_rows(run, dy, row_factor, group_sizes, run.spec(dy).dtype)
                ready, amax = grad_in_formats(run, recipe, scaled, wgrad_form, group_sizes, extras, stream, amax)
            (rows_dy,) = ready
        if x is not None:
            (rows,), x_amax = rows_for_wgrad(run, recipe, x, group_sizes, extras)
    if needs.bias and bias_spec is not None:
        call = calls.group_sum(run.spec(dy), sizes_spec, bias_spec.dtype, operand_spec(run, scale))
        (db,) = run(call, call.arrange(rows=dy, group_sizes=group_sizes, row_scale=scale))
    if needs.row_scale and scale_spec is not None:
        pair = (plain_rows(run, x, group_sizes), product_grad) if scale_through_product else None
        group_pair = (dy, bias) if bias is not None else None
        call = calls.row_dot(
            sizes_spec,
            run.spec(dy).shape[0],
            pair and (run.spec(pair[0]), run.spec(pair[1])),
            group_pair and (run.spec(dy), operand_spec(run, bias)),
            isinstance(bias, Listed),
        )
        lhs, rhs = pair or (None, None)
        named = {"lhs": lhs, "rhs": rhs, "group_lhs": dy if group_pair else None, "group_rhs": bias}
        dc = run.cast(run(call, arranged(call, group_sizes=group_sizes, **named))[0], scale_spec.dtype)
    return MainGrads(dx, db, dc, rows, rows_dy, Amaxes(x_amax, w_amax, amax))


def grad_in_formats(
    run: Runner,
    recipe: Recipe,
    dy: Operand,
    wanted: Sequence[tuple[int, Format]],
    group_sizes: Array,
    extras: Extras,
    stream: int,
    amax: Array | None = None,
    given: QTensor[Any] | None = None,
) -> Quantized:
    """Returns dy in the formats `wanted`; the amax of delayed scaling is merged into `amax`.

    Args:
        given: forms of dy that exist already; only the others are made.
    """
    ready = [None if given is None else given_form(given, *each) for each in wanted]
    missing = [each for each, form in zip(wanted, ready, strict=True) if form is None]
    amax = extras.dy_amax if amax is None else amax
    delayed = {"scale": extras.dy, "amax": amax, "measure": extras.measure}
    again = recipe.requantize
    made = in_formats(run, dy, missing, group_sizes, key=extras.key, stream=stream, requantize=again, **delayed)
    rest = iter(made.forms)
    return Quantized([next(rest) if form is None else form for form in ready], made.amax)


def weight_for_dgrad(
    run: Runner, recipe: Recipe, weight: OperandSpec, w: Operand, axis: int, extras: Extras
) -> Quantized:
    """Returns w in the form that dgrad reads, contracted along `axis`; measures its amax if forward did not.

    Args:
        weight: the spec of the operation's weight. w: the weight as forward saved it.
    """
    if isinstance(w, QTensor) and is_read_as_is(recipe, weight, w):
        forms = [given_form(w, each, recipe.dgrad[1]) for each in (axis, 3 - axis)]
        return Quantized([next((form for form in forms if form is not None), w)], None)
    if recipe.saved_weights == "forward" and not multiplies_codes_either_way(weight):
        axis = 3 - axis  # the form that is saved elsewhere, which dgrad widens: its sums have another order
    measure = extras.measure and measures_late(recipe, 1)
    wanted, again = [(axis, recipe.dgrad[1])], recipe.requantize
    delayed = {"scale": extras.w, "amax": extras.w_amax if measure else None, "measure": measure}
    return in_formats(run, w, wanted, None, requantize=again, **delayed)


def is_read_as_is(recipe: Recipe, weight: OperandSpec, w: Operand) -> bool:
    """Whether dgrad reads w, a quantised weight, in a form that it already has. With `saved_weights="forward"`, and
    with "auto" where forward made the forms that it saved, that is either form, whether or not dy is quantised.

    Args:
        weight: the spec of the operation's weight.
    """
    if not isinstance(w, QTensor):
        return False
    chosen = recipe.saved_weights == "auto" and recipe.one_form and not isinstance(weight, QuantizedSpec)
    if chosen or recipe.saved_weights == "forward":  # another format, which may be requantised, is not read
        return any(given_form(w, axis, recipe.dgrad[1]) is not None for axis in (1, 2))
    return reads_weights_as_given(recipe)


def reads_weights_as_given(recipe: Recipe) -> bool:
    """Whether dgrad reads a quantised weight in a form that the weight has. This is the form along the axis that dgrad
    contracts or, if there is none, the form that forward reads, widened; both are exact. If dy is quantised, dgrad
    needs the first one.
    """
    return recipe.dgrad[0].plain and recipe.requantize is None


def rows_for_wgrad(run: Runner, recipe: Recipe, x: Operand, group_sizes: Array, extras: Extras) -> Quantized:
    """Returns x in the form that wgrad reads: the one that forward saved, or one made from what forward saved."""
    measure = extras.measure and measures_late(recipe, 0)
    wanted, again = [(0, recipe.wgrad[0])], recipe.requantize
    delayed = {"scale": extras.x, "amax": extras.x_amax if measure else None, "measure": measure}
    return in_formats(run, x, wanted, group_sizes, requantize=again, **delayed)


def measures_late(recipe: Recipe, operand: int) -> bool:
    """Whether the amax of x (0) or w (1) is found in backward: it is if forward reads it without delayed scaling."""
    return not recipe.forward[operand].delayed


def plain_rows(run: Runner, x: Operand, group_sizes: Array) -> Array:
    """Returns x as an array of 16-bit or 32-bit elements, dequantised where it was quantised."""
    if isinstance(x, QTensor):
        return dequantize(run, x, group_sizes, x.dtype)
    return run.cast(x, wide(run.spec(x).dtype))


def weight_grad(
    run: Runner,
    op: Linear,
    w_spec: OperandSpec,
    rows: Operand,
    dy: Operand,
    group_sizes: Array,
    *,
    into: Array | Listed | None = None,
    accumulate: bool = False,
    half: int = 0,
) -> Array:
    """dW_g = sum rows^T dy over the rows of group g, in the weight's layout.

    Args:
        w_spec: the spec of the packed weight. rows: [M, K], dy: [M, N], as `main_grads` returned them.
        into: the destination; with `accumulate` dW is added to it.
        half: for a weight in two arrays, 1 or 2: dW of the first or second half of the N columns, [G, K, N / 2]. 0: dW
            of all columns.
    """
    recipe = op.resolve(operand_spec(run, rows), w_spec)
    into_spec = operand_spec(run, into)
    lhs, rhs, halves = (rows, 0), (dy, 0), (0, half)
    if op.transposed:
        lhs, rhs, halves = rhs, lhs, (half, 0)
    return product(
        run,
        op,
        recipe.of_gradients,
        lhs,
        rhs,
        group_sizes,
        into_spec.dtype if into_spec else op.gradient_dtype(w_spec),
        into=into,
        halves=halves,
        accumulate=accumulate,
    )


def half_grads(
    run: Runner,
    op: Linear,
    w_spec: OperandSpec,
    halves: Sequence[int],
    rows: Operand,
    dy: Operand,
    group_sizes: Array,
    *,
    into: Sequence[Array | Listed | None] = (None, None),
    accumulate: bool = False,
) -> list[Array]:
    """Computes `weight_grad` for each of `halves`, with a destination for each; (0,) is a weight in one array."""
    return [
        weight_grad(run, op, w_spec, rows, dy, group_sizes, into=to, accumulate=accumulate, half=half)
        for half, to in zip(halves, into, strict=False)
    ]


def with_weight_grad(
    run: Runner, op: Linear, w_spec: OperandSpec, rows: Operand, dy: Operand, group_sizes: Array, *, wanted: bool
) -> tuple[Any, Any, Any, Any]:
    """Returns (rows, dy, dW or its first half, its second half), for a rule that computes other gradients as well.

    If dW is `wanted`, the first two are None; otherwise the last two are, and rows and dy are returned for a later
    `weight_grad`. A weight in one array has no second half.
    """
    if not wanted:
        return rows, dy, None, None
    whole, up = (*half_grads(run, op, w_spec, (1, 2) if op.paired else (0,), rows, dy, group_sizes), None)[:2]
    return None, None, whole, up
