"""The experts' MLP of tokens: rows are gathered, run through the MLP, and summed per token.

Forward keeps the tokens [T, K] for backward, not their rows [M, K]; backward gathers them again, with the same bits.
Letters: T tokens, k experts per token, M rows, T k or fewer (`Mlp.max_rows`), G groups (experts), K hidden size of the
model, F expert width, W columns of the hidden rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from grouped_core import mlp, routing, routing_calls
from grouped_core.calls import ArraySpec, OperandSpec
from grouped_core.formats import Format, QTensor, wide
from grouped_core.gradients import Amaxes, MainGrads, measures_late, plain_rows, rows_for_wgrad
from grouped_core.linear_spec import Linear
from grouped_core.mlp import NOTHING, AtHidden, Beside
from grouped_core.mlp_spec import NO_NEEDS, Mlp, MlpNeeds, MlpSpecs, kept, restrict
from grouped_core.products import Array, Gathered, Operand, Runner, operand_spec
from grouped_core.quantizing import Extras, in_formats
from grouped_core.routing import Order


class Forward(NamedTuple):
    """y [T, K], the order of the rows, and what backward reads; None for what it does not read."""

    y: Array
    order: Order
    h: Array | None  # [M, W]
    z: Operand | None  # [M, F]
    wi: Operand | None
    wo: Operand | None
    amax: tuple[Amaxes, Amaxes]


def row_specs(op: Mlp, x: OperandSpec, slots: int, specs: MlpSpecs) -> MlpSpecs:
    """Returns `specs` for the rows of tokens `x` [T, K] and their weights; gradients take these rows as unquantised."""
    rows = row_count(op.max_rows, x.shape[0] * slots)
    return specs._replace(x=ArraySpec((rows, x.shape[1]), x.dtype), probs=ArraySpec((rows,), "float32"))


def row_count(max_rows: int | None, slots: int) -> int:
    """Returns M, the number of rows that there is room for, given the number of slots of all tokens."""
    return slots if max_rows is None else min(max_rows, slots)


def keeps_tokens(op: Mlp) -> Mlp:
    """Returns `op` without saved rows: backward gathers them again."""
    return dataclasses.replace(op, keeps_rows=False)


def forward(
    run: Runner,
    op: Mlp,
    x: Operand,
    experts: Array,
    weights: Array,
    wi: Operand,
    wo: Operand,
    tokens: Array,
    wi_bias: Operand | None = None,
    wo_bias: Operand | None = None,
    out: Array | None = None,
    *,
    needs: MlpNeeds = NO_NEEDS,
    extras: tuple[Extras, Extras] = mlp.NO_EXTRAS,
    beside: Beside = NOTHING,
) -> Forward:
    """y[t] = sum over the slots j of t of the MLP of expert experts[t, j] at x[t], with weights[t, j] as probability.
    If there is not room for all slots (`Mlp.max_rows`), the last ones in the order of rows add nothing.

    Args:
        x: [T, K]; it may be quantised in a format with scales per row, in the form that contracts K.
        experts: int32 [T, k]; a slot with a number other than 0 to G - 1 has no row and adds nothing. weights: [T, k].
        tokens: int32 [1], T. The other arguments are those of `mlp.mlp`; out: [T, K].
    """
    op = keeps_tokens(op)
    spec = run.spec(experts)
    count = row_count(op.max_rows, spec.shape[0] * spec.shape[1])
    found = routing.order(run, experts, operand_spec(run, wo).shape[0], count, weights=weights)
    if beside.reads_x:
        rows = rows_of(run, x, found.source, found.inverse)
    else:
        rows = _gathered(run, op, x, found, tokens, operand_spec(run, wi))
    operands = (rows, wi, wo, found.sizes, found.probs, wi_bias, wo_bias)
    done = mlp.mlp(run, op, *operands, needs=needs, extras=extras, beside=beside)
    y = routing.combine(run, done.y, found.inverse, operand_spec(run, x).dtype, out=out)
    return Forward(y, found, done.h, done.z, done.wi, done.wo, done.amax)


def _gathered(run: Runner, op: Mlp, x: Operand, found: Order, tokens: Array, wi: OperandSpec) -> Operand:
    """Returns the rows of x [T, K] for the first product; tokens are quantised first if scales are per row."""
    fmt = op.fc1().resolve(operand_spec(run, x), wi).forward[0]
    if fmt.by_row and not isinstance(x, QTensor):
        x = codes_of(run, x, fmt, tokens)
    return _rows_to_quantize(run, x, found.source, found.inverse)


def _rows_to_quantize(run: Runner, x: Operand, source: Array, inverse: Array) -> Operand:
    """Does what `rows_of` does, but if rows are not quantised yet, the pass that quantises them gathers them."""
    return rows_of(run, x, source, inverse) if isinstance(x, QTensor) else Gathered(x, source, inverse)


def codes_of(run: Runner, x: Array, fmt: Format, tokens: Array) -> QTensor[Any]:
    """Quantises x [T, K] in a format with scales per row. tokens: int32 [1], T."""
    codes: Any = in_formats(run, x, [(1, fmt)], tokens).forms[0]
    return codes


def scale_axis(run: Runner, q: QTensor[Any]) -> int:
    """Returns the axis of the scales of q [T, K] along T: float32 scales are stored block by block, [K / b, T]."""
    return int(run.spec(q.scales).dtype == "float32")


def rows_of(run: Runner, x: Operand, source: Array, inverse: Array) -> Any:
    """Gathers, for each slot in `source` [M], the row of x that it belongs to; the result is quantised if x is.

    Args:
        inverse: int32 [T, k], the row of each slot.
    """
    slots = run.spec(inverse).shape[1]
    if not isinstance(x, QTensor):
        return routing.gather(run, x, source, slots, inverse=inverse)
    call = routing_calls.gather_rows(run.spec(x.scales), run.spec(source), slots, axis=scale_axis(run, x))
    (scales,) = run(call, call.arrange(rows=x.scales, source=source))
    values = routing.gather(run, x.values, source, slots, inverse=inverse)
    return QTensor(values, scales, None, x.format, 1, (run.spec(source).shape[0], x.shape[1]), x.dtype)


def _wide_rows(run: Runner, x: Operand, source: Array, inverse: Array, sizes: Array) -> Operand:
    """Returns the rows of x [T, K] for a pass that quantises them along another axis: dequantised if x is quantised."""
    if isinstance(x, QTensor):
        return plain_rows(run, rows_of(run, x, source, inverse), sizes)
    return Gathered(x, source, inverse)


def at_hidden(
    run: Runner,
    op: Mlp,
    specs: MlpSpecs,
    x: Operand | None,
    h: Array | None,
    z: Operand | None,
    wi: Operand | None,
    wo: Operand | None,
    order: Order,
    wi_bias: Operand | None,
    wo_bias: Operand | None,
    dy: Array,
    needs: MlpNeeds,
    *,
    weights_dtype: str,
    extras: tuple[Extras, Extras] = mlp.NO_EXTRAS,
    beside: Beside = NOTHING,
) -> AtHidden:
    """Runs `mlp.at_hidden` for tokens; its `probs` are the gradient of the weights [T, k].

    Args:
        specs: the specs for the rows (`row_specs`). x: [T, K], read where h is computed again. dy: [T, K].
    """
    op = keeps_tokens(op)
    gather = rows_of if beside.reads_x else _rows_to_quantize
    rows = None if x is None else gather(run, x, order.source, order.inverse)
    # If only products read the rows, the pass that quantises them gathers them too.
    gather = _rows_to_quantize if beside is NOTHING and specs.wo_bias is None else rows_of
    d_rows = gather(run, dy, order.source, order.inverse)
    operands = (rows, h, z, wi, wo, order.sizes, order.probs, wi_bias, wo_bias, d_rows)
    found = mlp.at_hidden(run, op, specs, *operands, needs, extras=extras, beside=beside)
    if found.probs is None:
        return found
    return found._replace(probs=routing.of_slots(run, found.probs, order.inverse, weights_dtype))


def first_product(
    run: Runner,
    op: Mlp,
    specs: MlpSpecs,
    x: Operand | None,
    wi: Operand | None,
    order: Order,
    dh: Array | None,
    of_dh: QTensor[Any] | None,
    needs: MlpNeeds,
    *,
    grad_input: Array | None = None,
    extras: Extras | None = None,
    beside: Beside = NOTHING,
) -> MainGrads:
    """Runs `mlp.first_product` for tokens; its `x` is the gradient of the tokens [T, K].

    Args:
        x: [T, K]; None if the caller makes rows of it later (`first_rows`). If tokens are quantised, the gradient of wi
            reads the dequantised values.
        grad_input: the caller's [T, K] buffer for dx.
    """
    op = keeps_tokens(op)
    rows = None
    if needs.wi and x is not None:
        rows = _wide_rows(run, x, order.source, order.inverse, order.sizes)
    operands = (rows, wi, order.sizes, dh, of_dh, needs)
    found = mlp.first_product(run, op, specs, *operands, extras=extras or Extras(), beside=beside)
    if found.x is None:
        return found
    dx = routing.combine(run, found.x, order.inverse, wide(specs.x.dtype), out=grad_input)
    return found._replace(x=dx)


def first_rows(
    run: Runner,
    op: Linear,
    wi: OperandSpec,
    x: Operand,
    source: Array,
    inverse: Array,
    sizes: Array,
    scale: Array | None,
) -> Operand:
    """Returns the rows of x [T, K] in the form that the gradient of wi reads, for any later call of `weight_grad`.

    They have to be made earlier, by `first_product`, only if it measures their magnitudes (`measures_rows`).

    Args:
        op: the first product. wi: the spec of its weight. scale: quantisation scales [G] of delayed scaling.
    """
    rows = _wide_rows(run, x, source, inverse, sizes)
    recipe = op.resolve(operand_spec(run, rows), wi)
    return rows_for_wgrad(run, recipe, rows, sizes, Extras(x=scale, measure=False)).forms[0]


def measures_rows(op: Mlp) -> bool:
    """Whether backward measures the magnitudes of x, for delayed scaling of the weight gradient alone."""
    return op.recipe is not None and op.recipe.wgrad[0].delayed and measures_late(op.recipe, 0)


def main_grads(
    run: Runner,
    op: Mlp,
    specs: MlpSpecs,
    x: Operand | None,
    h: Array | None,
    z: Operand | None,
    wi: Operand | None,
    wo: Operand | None,
    order: Order,
    wi_bias: Operand | None,
    wo_bias: Operand | None,
    dy: Array,
    needs: MlpNeeds,
    *,
    weights_dtype: str,
    grad_input: Array | None = None,
    extras: tuple[Extras, Extras] = mlp.NO_EXTRAS,
) -> mlp.MainGrads:
    """Runs `mlp.main_grads` for tokens: `at_hidden`, then `first_product`.

    Args:
        x: [T, K], or None if `kept_tokens` says that backward does not read it.
    """
    again, _ = kept_tokens(op, needs, wi_bias is not None, wo_bias is not None)
    operands = (x if again else None, h, z, wi, wo, order, wi_bias, wo_bias, dy)
    hidden = at_hidden(run, op, specs, *operands, needs, weights_dtype=weights_dtype, extras=extras)
    operands = (x, wi, order, hidden.dh, hidden.of_dh, needs)
    return mlp.both_stages(hidden, first_product(run, op, specs, *operands, grad_input=grad_input, extras=extras[0]))


def plan(
    op: Mlp,
    operands: Sequence[Any],
    experts: ArraySpec,
    run: Any,
    *,
    needs: MlpNeeds,
    accumulators: tuple[Any, Any] = (None, None),
    out: ArraySpec | None = None,
    extras: tuple[Extras, Extras] = mlp.NO_EXTRAS,
) -> None:
    """Does for tokens what `mlp.plan` does.

    Args:
        operands: those of `mlp.plan`; x and weights are those of tokens. experts: the spec of the experts [T, k].
    """
    x, wi, wo, weights, wi_bias, wo_bias = operands
    given: Any = [operand_spec(run, each) for each in (x, wi, wo, weights, wi_bias, wo_bias)]
    specs = row_specs(op, x, experts.shape[1], MlpSpecs(*given))
    needs = restrict(needs, specs)
    tokens = ArraySpec((1,), "int32")
    arrays = (x, experts, weights, wi, wo, tokens, wi_bias, wo_bias, out)
    found = forward(run, op, *arrays, needs=needs, extras=extras)
    arrays = (x, found.h, found.z, found.wi, found.wo, found.order, wi_bias, wo_bias, found.y)
    main = main_grads(run, op, specs, *arrays, needs, weights_dtype=weights.dtype, extras=extras)
    mlp.plan_weight_grads(run, op, specs, main, found.order.sizes, needs, accumulators)


@lru_cache(maxsize=1024)
def kept_tokens(op: Mlp, needs: MlpNeeds, has_wi_bias: bool, has_wo_bias: bool) -> tuple[bool, bool]:
    """Returns whether backward reads x to compute the hidden rows again, and whether the gradient of wi reads it."""
    keep = kept(op, needs, True, has_wi_bias, has_wo_bias)
    again = keep.x and op.residuals.policy == "save_input"
    return again, needs.wi
