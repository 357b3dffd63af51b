"""Rules of the experts' MLP: forward, backward, and what is kept in between (contracts.md, section 3).

    h = x W1 + b1, rounded;  z = p act(h), rounded;  y = z W2 + p b2

Letters: G groups, M rows, K hidden size of the model, F expert width, W columns of h: 2F for gated activations, else F.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from grouped_core import calls, gradients
from grouped_core.calls import ArraySpec
from grouped_core.gradients import Gradients, Needs
from grouped_core.linear_spec import Linear
from grouped_core.mlp_spec import Mlp, MlpNeeds, MlpSpecs, check, kept, needs_dh, needs_dz, restrict
from grouped_core.products import (
    Array,
    Listed,
    Operand,
    Paired,
    Runner,
    all_aligned,
    arranged,
    operand_spec,
    rounded,
    weight_specs,
    wide,
)


class Forward(NamedTuple):
    """y [M, K]; h [M, W] and z [M, F] where they are kept."""

    y: Array
    h: Array | None
    z: Array | None


class MlpGradients(NamedTuple):
    """Every gradient, in the order of `MlpNeeds`; None where not needed."""

    x: Array | None
    wi: Array | None
    wo: Array | None
    probs: Array | None
    wi_bias: Array | None
    wo_bias: Array | None


class MainGrads(NamedTuple):
    """Gradients of everything but the weights, None where not needed, and the rows that those of the weights read."""

    x: Array | None
    probs: Array | None
    wi_bias: Array | None
    wo_bias: Array | None
    dh: Array | None  # [M, W], with x gives dW1
    z: Array | None  # [M, F], with dy gives dW2


def hidden_rows(
    run: Runner,
    op: Mlp,
    x: Array,
    wi: Operand,
    group_sizes: Array,
    probs: Array | None,
    wi_bias: Operand | None,
    *,
    keep: bool,
) -> tuple[Array, Array | None]:
    """(z [M, F], h [M, W] if it is to be kept): the first product and the activation in one call."""
    linear = op.fc1()
    recipe = linear.resolve(run.spec(x), operand_spec(run, wi))
    rows = run.cast(x, recipe.forward[0].values)
    right = rounded(run, wi, recipe.forward[1].values)
    right_spec, up_spec = weight_specs(run, right)
    p = None if probs is None else run.cast(probs, "float32")
    call = calls.grouped_matmul_act(
        run.spec(rows),
        right_spec,
        linear.weight_axes()[0],
        run.spec(group_sizes),
        wide(run.spec(x).dtype),
        activation=op.activation,
        recipe=recipe,
        bias=operand_spec(run, wi_bias),
        row_scale=operand_spec(run, p),
        tables=(isinstance(right, Listed), isinstance(wi_bias, Listed)),
        rhs_up=up_spec,
        aligned_tables=all_aligned(right),
        hidden=keep,
        zero_tail=op.clear_residuals,
        rows_hint=op.rows_hint,
        implementation=op.implementation,
    )
    named = {"lhs": rows, "rhs": right, "bias": wi_bias, "group_sizes": group_sizes, "row_scale": p}
    z, h = run(call, arranged(call, **named))
    return z, h


def mlp(
    run: Runner,
    op: Mlp,
    x: Array,
    wi: Operand,
    wo: Operand,
    group_sizes: Array,
    probs: Array | None = None,
    wi_bias: Operand | None = None,
    wo_bias: Operand | None = None,
    out: Array | None = None,
    *,
    keep_h: bool = False,
    keep_z: bool = False,
) -> Forward:
    """y[r] = (p[r] act(x[r] W1[g] + b1[g])) W2[g] + p[r] b2[g], p = probs or 1, and the rows that are kept.

    Args:
        x: [M, K]. wi: [G, K, W], wo: [G, F, K], or both with the last two axes swapped when transposed; one array or
            `Listed` each, wi perhaps `Paired`. group_sizes: int32 [G]. probs: [M]. wi_bias: [G, W]. wo_bias: [G, K].
        out: the caller's [M, K] buffer; its tail rows are left alone.
    """
    check(op, *(operand_spec(run, each) for each in (x, wi, wo, group_sizes, probs, wi_bias, wo_bias, out)))
    z, h = hidden_rows(run, op, x, wi, group_sizes, probs, wi_bias, keep=keep_h)
    linear = op.fc2(wo_bias is not None and probs is not None)
    y = gradients.linear(run, linear, z, wo, group_sizes, wo_bias, probs if linear.scale_bias else None, out)
    return Forward(y, h, z if keep_z else None)


def hidden_grads(
    run: Runner,
    op: Mlp,
    h: Array,
    wo: Operand,
    group_sizes: Array,
    probs: Array | None,
    wo_bias: Operand | None,
    dy: Array,
    wanted: tuple[bool, bool, bool],
) -> tuple[Array | None, Array | None, Array | None]:
    """(dh [M, W], z [M, F], dp [M] float32), each if wanted: two products' worth of gradients in one call.

        dz = dy W2^T;  dh = p dz act'(h);  z = p act(h);  dp = <dz, act(h)> + <dy, b2>

    Args:
        h: [M, W]. probs: [M], read for dh and z. wo_bias: read for dp. dy: [M, K].
    """
    linear = op.fc2()
    recipe = linear.resolve(run.spec(h), operand_spec(run, wo))
    rows = run.cast(dy, recipe.dgrad[0].values)
    right = rounded(run, wo, recipe.dgrad[1].values)
    p = None if probs is None else run.cast(probs, "float32")
    base = _bias_dots(run, dy, wo_bias, group_sizes) if wanted[2] and wo_bias is not None else None
    call = calls.grouped_matmul_dact(
        run.spec(rows),
        operand_spec(run, right),
        linear.weight_axes()[1],
        run.spec(group_sizes),
        run.spec(h),
        run.spec(h).dtype,
        activation=op.activation,
        recipe=recipe,
        wanted=wanted,
        row_scale=operand_spec(run, p),
        row_base=operand_spec(run, base),
        table=isinstance(right, Listed),
        aligned_tables=all_aligned(right),
        zero_tail=op.clear_residuals,
        rows_hint=op.rows_hint,
        implementation=op.implementation,
    )
    named = {"lhs": rows, "rhs": right, "group_sizes": group_sizes, "hidden": h, "row_scale": p, "row_base": base}
    dh, z, dp = run(call, arranged(call, **named))
    return dh, z, dp


def _bias_dots(run: Runner, dy: Array, bias: Operand, group_sizes: Array) -> Array:
    """[M] float32 = <dy[r], bias[g(r)]>."""
    spec = run.spec(dy)
    pair = (spec, operand_spec(run, bias))
    call = calls.row_dot(run.spec(group_sizes), spec.shape[0], None, pair, isinstance(bias, Listed))
    return run(call, arranged(call, group_sizes=group_sizes, group_lhs=dy, group_rhs=bias))[0]


def main_grads(
    run: Runner,
    op: Mlp,
    specs: MlpSpecs,
    x: Array | None,
    h: Array | None,
    z: Array | None,
    wi: Operand | None,
    wo: Operand | None,
    group_sizes: Array,
    probs: Array | None,
    wi_bias: Operand | None,
    wo_bias: Operand | None,
    dy: Array,
    needs: MlpNeeds,
    *,
    grad_input: Array | None = None,
) -> MainGrads:
    """Gradients that `needs` asks for but those of the weights; operands that `kept` does not name are None.

    The products' own gradients are those of the linear operation: dx and db1 of the first for dh, db2 of the second
    for dy.

    Args:
        dy: [M, K]. grad_input: the caller's [M, K] buffer for dx; its tail rows are left alone.
    """
    needs = restrict(needs, specs)
    dp = dh = None
    if needs_dz(needs):
        if h is None:  # forward's own call once more, so a weight in two arrays needs no other; z comes with it
            z, h = hidden_rows(run, op, x, wi, group_sizes, probs, wi_bias, keep=True)
        wanted = (needs_dh(needs), needs.wo and z is None, needs.probs)
        dh, rebuilt, dp = hidden_grads(run, op, h, wo, group_sizes, probs, wo_bias, dy, wanted)
        z = rebuilt if z is None else z
        dp = dp if dp is None or specs.probs is None else run.cast(dp, specs.probs.dtype)
    elif needs.wo and z is None:
        z, _ = hidden_rows(run, op, x, wi, group_sizes, probs, wi_bias, keep=False)
    first = second = Gradients(None, None, None, None)
    if needs.x or needs.wi_bias:
        asked = Needs(needs.x, False, needs.wi_bias, False)
        first = _linear_grads(
            run, op.fc1(), specs.x, specs.wi, specs.wi_bias, wi, group_sizes, None, dh, asked, grad_input
        )
    if needs.wo_bias:
        rows = ArraySpec((specs.x.shape[0], specs.wo.shape[op.fc2().weight_axes()[0]]), wide(specs.x.dtype))
        linear = op.fc2(specs.probs is not None)
        asked = Needs(False, False, True, False)
        second = _linear_grads(run, linear, rows, specs.wo, specs.wo_bias, None, group_sizes, probs, dy, asked)
    return MainGrads(first.x, dp, first.bias, second.bias, dh if needs.wi else None, z if needs.wo else None)


def _linear_grads(
    run: Runner,
    linear: Linear,
    x: ArraySpec,
    w: ArraySpec,
    bias: ArraySpec | None,
    weight: Operand | None,
    group_sizes: Array,
    row_scale: Array | None,
    dy: Array,
    needs: Needs,
    grad_input: Array | None = None,
) -> Gradients:
    scale = operand_spec(run, row_scale)
    return gradients.linear_grads(
        run,
        linear,
        (x, w, bias, scale),
        None,
        weight,
        group_sizes,
        None,
        row_scale,
        dy,
        needs,
        grad_input=grad_input,
    )


def weight_grad(
    run: Runner,
    linear: Linear,
    weight: ArraySpec,
    rows: Array,
    dy: Array,
    group_sizes: Array,
    *,
    into: Operand | None = None,
    accumulate: bool = False,
    half: int = 0,
) -> Array:
    """dW_g = sum rows^T dy in the weight's layout: of W1 with `op.fc1()`, x and dh; of W2 with `op.fc2()`, z and dy.

    Args:
        weight: spec of the packed weight. into: destination; with `accumulate` the gradient is added to it.
        half: 1, 2: of the gates', the linear halves' columns alone, where these are arrays of their own; 0: of all.
    """
    return gradients.weight_grad(
        *(run, linear, run.spec(rows), weight, rows, dy, group_sizes), into=into, accumulate=accumulate, half=half
    )


def plan(
    op: Mlp,
    operands: Sequence[Any],
    sizes: ArraySpec,
    run: Any,
    *,
    needs: MlpNeeds | None = None,
    accumulators: tuple[Any, Any] = (None, None),
    halves: Sequence[int] = (1, 2),
    out: ArraySpec | None = None,
    grad_input: ArraySpec | None = None,
) -> None:
    """Runs forward and backward on specs, for a runner that notes calls (`grouped_core.plans.Planner`).

    Args:
        operands: specs of x, wi, wo, probs, wi_bias, wo_bias, `Listed` ones with the spec of their table; None where
            absent. accumulators: likewise, of the two weight gradients; a tuple for a wi in two arrays.
        halves: of a wi in two arrays, those that need gradients: 1, 2.
    """
    x, wi, wo, probs, wi_bias, wo_bias = operands
    given: Any = [operand_spec(run, each) for each in operands]
    specs = MlpSpecs(*given)
    needs = restrict(needs or MlpNeeds(), specs)
    keep = kept(op, needs, probs is not None, wi_bias is not None, wo_bias is not None)
    y, h, z = mlp(run, op, x, wi, wo, sizes, probs, wi_bias, wo_bias, out, keep_h=keep.h, keep_z=keep.z)
    main = main_grads(run, op, specs, x, h, z, wi, wo, sizes, probs, wi_bias, wo_bias, y, needs, grad_input=grad_input)
    into = accumulators[0]
    targets = [(into and into[half - 1], half) for half in halves] if isinstance(wi, Paired) else [(into, 0)]
    work = [(op.fc1(), specs.wi, x, main.dh, *target) for target in targets if needs.wi]
    work += [(op.fc2(), specs.wo, main.z, y, accumulators[1], 0)] if needs.wo else []
    for linear, weight, rows, dy, to, half in work:
        weight_grad(run, linear, weight, rows, dy, sizes, into=to, accumulate=to is not None, half=half)
