"""The experts' MLP: forward, backward, and what forward saves for backward (docs/contracts.md, "The experts' MLP").

    h = x W1 + b1, rounded;  z = p act(h), rounded;  y = z W2 + p b2

Letters: G groups, M rows, K hidden size of the model, F expert width, W columns of h: 2F for gated activations, else F.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from grouped_core import calls, gradients
from grouped_core.calls import ArraySpec, OperandSpec
from grouped_core.formats import Format, QTensor, wide
from grouped_core.gradients import Amaxes, FormattedOperands, Needs, Term, weight_grad
from grouped_core.mlp_spec import NO_NEEDS, Mlp, MlpNeeds, MlpSpecs, check, kept, needs_dh, needs_dz, restrict
from grouped_core.products import (
    Array,
    Cached,
    Listed,
    Low,
    Operand,
    Runner,
    all_aligned,
    arranged,
    operand_spec,
    product,
    weight_specs,
)
from grouped_core.quantizing import Extras, Quantized, Within, joined, within
from grouped_core.recipes import Recipe


class Beside:
    """Terms that adapters add to the four products with the weights of an MLP; none in this base class, see `lora_mlp`.

    Attributes:
        reads_x, reads_z: whether the terms read the unquantised rows x of the first product and z of the second one.
    """

    reads_x = False
    reads_z = False

    def first(self, x: Array, group_sizes: Array) -> Low | None:
        """Returns the term that is added to x W1, or None."""

    def second(self, z: Array, group_sizes: Array) -> Low | None:
        """Returns the term that is added to z W2, or None."""

    def hidden(self, dy: Array, group_sizes: Array) -> Low | Term | None:
        """Returns the term that is added to dy W2^T, or None."""

    def input(self, dh: Array, group_sizes: Array) -> Low | Term | None:
        """Returns the term that is added to dh W1^T, or None."""


NOTHING = Beside()


class Forward(NamedTuple):
    """y [M, K], and rows and weights in the form that backward reads; None where backward does not read them."""

    y: Array
    x: Operand | None
    h: Array | None  # [M, W]
    z: Operand | None  # [M, F]
    wi: Operand | None
    wo: Operand | None
    amax: tuple[Amaxes, Amaxes]  # of x and wi, of z and wo


class MlpGradients(NamedTuple):
    """Every gradient, in the order of `MlpNeeds`; None where not needed."""

    x: Array | None
    wi: Array | None
    wo: Array | None
    probs: Array | None
    wi_bias: Array | None
    wo_bias: Array | None


class HiddenGrads(NamedTuple):
    """dh [M, W], z [M, F] (perhaps quantised), dp [M] float32, None where not requested; quantised forms of dh."""

    dh: Array | None
    z: Operand | None
    dp: Array | None
    quantized: Quantized


class AtHidden(NamedTuple):
    """Results of the first stage of backward: gradients at the hidden rows, and the operands of dgrad and wgrad.

    `dh` and `of_dh` are None where x, wi and its bias need no gradient; `z` and `dy` where wo needs none.
    """

    probs: Array | None
    wo_bias: Array | None
    dh: Array | None  # [M, W], where its unquantised values are read
    of_dh: QTensor[Any] | None  # its quantised forms, where the pass at the hidden rows makes them
    z: Operand | None  # [M, F], with dy gives dW2
    dy: Operand | None  # [M, K]
    amax: tuple[Amaxes, Amaxes]


class MainGrads(NamedTuple):
    """Gradients of everything except the weights, None where not needed, and the operands of wgrad."""

    x: Array | None
    probs: Array | None
    wi_bias: Array | None
    wo_bias: Array | None
    rows: Operand | None  # [M, K]: x, with dh gives dW1
    dh: Operand | None  # [M, W]
    z: Operand | None  # [M, F], with dy gives dW2
    dy: Operand | None
    amax: tuple[Amaxes, Amaxes]  # that backward found, of both products


NO_EXTRAS = (Extras(), Extras())
"""The extras of both products for a recipe without bound arrays."""


def hidden_rows(
    run: Runner,
    op: Mlp,
    x: Operand,
    wi: Operand,
    group_sizes: Array,
    probs: Array | None,
    wi_bias: Operand | None,
    *,
    keep: bool,
    quantized: Within | None = None,
    low: Low | None = None,
) -> tuple[Operand, Array | None, Array | None]:
    """Runs the first product and the activation in one call. Returns (z [M, F], h [M, W] with `keep`, amax of z).

    Args:
        x, wi: in the form that forward reads. quantized: how z is quantised; None leaves it unquantised.
        low: a product of low rank that is added to x W1.
    """
    linear = op.fc1()
    x_spec = operand_spec(run, x)
    right_spec, up_spec = weight_specs(run, wi)
    p = None if probs is None else run.cast(probs, "float32")
    call = calls.grouped_matmul_act(
        x_spec,
        right_spec,
        linear.weight_axes()[0],
        run.spec(group_sizes),
        wide(x_spec.dtype),
        activation=op.activation,
        recipe=linear.resolve(x_spec, operand_spec(run, wi)),
        bias=operand_spec(run, wi_bias),
        row_scale=operand_spec(run, p),
        tables=(isinstance(wi, Listed), isinstance(wi_bias, Listed)),
        rhs_up=up_spec,
        aligned_tables=all_aligned(wi, low and low.weight),
        hidden=keep,
        low=low and low.spec(run),
        quantized=quantized and quantized.call,
        zero_tail=op.clear_residuals,
        rows_hint=op.rows_hint,
        implementation=op.implementation,
    )
    named = {"lhs": x, "rhs": wi, "bias": wi_bias, "group_sizes": group_sizes, "row_scale": p}
    named |= low.operands() if low else {}
    z, h, *results = run(call, arranged(call, **named, **(quantized.arrays if quantized else {})))
    if quantized is None:
        return z, h, None
    width = operand_spec(run, wi).shape[linear.weight_axes()[1]] // (2 if op.activation.gated else 1)
    made = quantized.forms(call, (z, h, *results), ArraySpec((x_spec.shape[0], width), x_spec.dtype))
    return joined(made.forms), h, made.amax


def mlp(
    run: Runner,
    op: Mlp,
    x: Operand,
    wi: Operand,
    wo: Operand,
    group_sizes: Array,
    probs: Array | None = None,
    wi_bias: Operand | None = None,
    wo_bias: Operand | None = None,
    out: Array | None = None,
    *,
    needs: MlpNeeds = NO_NEEDS,
    extras: tuple[Extras, Extras] = NO_EXTRAS,
    beside: Beside = NOTHING,
) -> Forward:
    """y[r] = (p[r] act(x[r] W1[g] + b1[g])) W2[g] + p[r] b2[g], p = probs or 1, and what backward reads.

    Args:
        x: [M, K]. wi: [G, K, W], wo: [G, F, K], or both with the last two axes swapped when transposed; one array or
            `Listed` each, and wi may be `Paired`; x and weights may be quantised. group_sizes: int32 [G]. probs: [M].
            wi_bias: [G, W]. wo_bias: [G, K].
        out: the caller's [M, K] buffer; its tail rows are left unchanged.
        needs: gradients that backward will compute. extras: those of the two products. beside: terms that are added to
            these.
    """
    check(op, *(operand_spec(run, each) for each in (x, wi, wo, group_sizes, probs, wi_bias, wo_bias, out)))
    keep = kept(op, needs, probs is not None, wi_bias is not None, wo_bias is not None)
    first = formatted_first(run, op, x, wi, group_sizes, extras[0], needs)
    linear = op.fc2(wo_bias is not None and probs is not None)
    quantized = None if beside.reads_z else activated_forms(run, op, operand_spec(run, x), wo, extras[1], keep.z)
    how: dict[str, Any] = {"keep": keep.h, "quantized": quantized, "low": beside.first(x, group_sizes)}
    z, h, amax = hidden_rows(run, op, first.x, first.w, group_sizes, probs, wi_bias, **how)
    second = gradients.linear_forward(
        run,
        linear,
        z,
        wo,
        group_sizes,
        wo_bias,
        probs if linear.scale_bias else None,
        out,
        extras=extras[1],
        needs=Needs(needs_dz(needs), keep.z, False, False),
        low=beside.second(z, group_sizes),
    )
    return Forward(
        y=second.y,
        x=first.kept_x if keep.x else None,
        h=h,
        z=second.x if keep.z else None,
        wi=first.kept_w if keep.wi else None,
        wo=second.w if keep.wo else None,
        amax=(first.amax, second.amax._replace(x=second.amax.x if amax is None else amax)),
    )


def activated_forms(run: Runner, op: Mlp, x: OperandSpec, wo: Operand, extras: Extras, keep: bool) -> Within | None:
    """Returns how the pass that makes the activated rows quantises them; None if it does not, or one pass cannot.

    Args:
        x: the spec of the MLP's rows. extras: those of the second product. keep: whether backward reads the activated
            rows too.
    """
    recipe = op.fc2().resolve(x, operand_spec(run, wo))
    delayed = {"scale": extras.x, "amax": extras.x_amax, "measure": extras.measure}
    return fused_within(op, activated_row_forms(op, recipe, keep), **delayed)


def activated_row_forms(op: Mlp, recipe: Recipe, keep: bool) -> list[tuple[int, Format]]:
    """Returns (contracted axis, format) of z for the second product and, with `keep`, for its wgrad. The list is empty
    if wgrad reads the unquantised z.
    """
    asked = Needs(False, keep, False, False)
    kept = gradients.keeps_forms(op.fc2(), recipe, asked, False)[0]
    return gradients.row_forms(recipe, kept) if kept == keep else []


def fused_within(op: Mlp, wanted: Sequence[tuple[int, Format]], **options: Any) -> Within | None:
    """Returns the result of `within`, or None where `implementation` asks for unfused kernels."""
    if {"composed", "reference"} & set(op.implementation.split(",")):
        return None
    return within(wanted, **options)


def formatted_first(
    run: Runner, op: Mlp, x: Operand, wi: Operand, group_sizes: Array, extras: Extras, needs: MlpNeeds
) -> FormattedOperands:
    """Returns x and wi in the formats of the first product; the policy `save_input` saves the inputs themselves.

    For a weight with forms cached by its layer, `save_input` saves those forms: the layer may replace them before
    backward. It saves the weight too where a product of backward reads that.
    """
    again, cached = op.residuals.policy == "save_input", isinstance(wi, Cached)
    first, w_spec = op.fc1(), operand_spec(run, wi)
    recipe = first.resolve(operand_spec(run, x), w_spec)
    asked = Needs(needs.x, needs.wi and op.keeps_rows, False, False)
    gradients.check_given_forms(first, recipe, x, wi, w_spec, asked)
    rows = needs.wi and not again and op.keeps_rows
    asked = Needs(needs.x and (cached or not again), rows, False, False)
    read = gradients.formatted_operands(run, first, x, wi, group_sizes, extras, asked)
    if again and isinstance(wi, Cached):
        dgrad_reads = recipe.dgrad[1].plain or recipe.saved_weights == "input"
        reads_source = recipe.forward[1].plain or (needs.x and dgrad_reads)
        return read._replace(kept_w=wi if reads_source else wi.forms)
    return read


@lru_cache(maxsize=1024)
def cached_forms(op: Mlp, needs: MlpNeeds, keep_z: bool) -> tuple[tuple[tuple[int, Format], ...], ...]:
    """Returns (contracted axis, format) of the quantised forms of wi and wo that their layers must cache for a pass.

    Args:
        keep_z: whether backward reads the activated rows of forward (`kept`).
    """
    assert op.recipe is not None, "layers with caches have recipes"
    first, second, recipe = op.fc1(), op.fc2(), op.recipe
    of_wi = gradients.keeps_forms(first, recipe, Needs(needs.x, False, False, False), False)[1]
    of_wo = gradients.keeps_forms(second, recipe, Needs(needs_dz(needs), keep_z, False, False), False)[1]
    both = gradients.weight_forms(first, recipe, of_wi), gradients.weight_forms(second, recipe, of_wo)
    return tuple([gradients.quantized_only(each) for each in both])


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
    *,
    quantized_dy: Operand,
    quantized: Within | None = None,
    quantized_z: Within | None = None,
    beside: Low | Term | None = None,
) -> HiddenGrads:
    """Computes dh, z and dp, each if `wanted` asks for it: dgrad of the second product, then the activation's.

        dz = dy W2^T;  dh = p dz act'(h);  z = p act(h);  dp = <dz, act(h)> + <dy, b2>

    Args:
        h: [M, W]. probs: [M], read for dh and z. wo_bias: read for dp. dy: [M, K].
        wo, quantized_dy: in the form that the product reads.
        quantized: how dh is quantised, whether or not `wanted` also asks for the unquantised dh.
        quantized_z: how z is quantised, instead of the unquantised z; only with `quantized`.
        beside: a term that is added to dy W2^T; with a `Term` nothing is quantised here.
    """
    linear = op.fc2()
    p = None if probs is None else run.cast(probs, "float32")
    base = _bias_dots(run, dy, wo_bias, group_sizes) if wanted[2] and wo_bias is not None else None
    if isinstance(beside, Term):
        recipe = linear.resolve(run.spec(h), operand_spec(run, wo)).of_gradients
        axis, dtype = linear.weight_axes()[1], run.spec(h).dtype
        product_grad = product(run, linear, recipe, (quantized_dy, 1), (wo, axis), group_sizes, "float32")
        dz = beside.added(run, product_grad, group_sizes, dtype)
        dh, z, dp = _activation_grads(run, op, dz, h, group_sizes, p, base, wanted)
        return HiddenGrads(dh, z, dp, Quantized([], None))
    call = calls.grouped_matmul_dact(
        operand_spec(run, quantized_dy),
        operand_spec(run, wo),
        linear.weight_axes()[1],
        run.spec(group_sizes),
        run.spec(h),
        run.spec(h).dtype,
        activation=op.activation,
        recipe=linear.resolve(run.spec(h), operand_spec(run, wo)).of_gradients,
        wanted=wanted,
        row_scale=operand_spec(run, p),
        row_base=operand_spec(run, base),
        table=isinstance(wo, Listed),
        aligned_tables=all_aligned(wo, beside and beside.weight),
        low=beside and beside.spec(run),
        quantized=quantized and quantized.call,
        quantized_activated=quantized_z and quantized_z.call,
        zero_tail=op.clear_residuals,
        rows_hint=op.rows_hint,
        implementation=op.implementation,
    )
    named = {"lhs": quantized_dy, "rhs": wo, "group_sizes": group_sizes, "hidden": h, "row_scale": p, "row_base": base}
    named |= beside.operands() if beside else {}
    if quantized_z is not None:
        named["activated_scale"] = quantized_z.arrays["scale"]
    results = run(call, arranged(call, **named, **(quantized.arrays if quantized else {})))
    dh, z, dp, *_ = results
    if quantized_z is not None:
        spec = run.spec(h)
        width = spec.shape[1] // (2 if op.activation.gated else 1)
        z = quantized_z.activated_form(call, results, ArraySpec((spec.shape[0], width), spec.dtype))
    return HiddenGrads(dh, z, dp, quantized.forms(call, results, run.spec(h)) if quantized else Quantized([], None))


def _activation_grads(
    run: Runner,
    op: Mlp,
    dz: Array,
    h: Array,
    group_sizes: Array,
    probs: Array | None,
    base: Array | None,
    wanted: tuple[bool, bool, bool],
) -> tuple[Array | None, ...]:
    """Computes dh, z and dp from dz [M, F], each if `wanted` asks for it; probs and base are float32 [M]."""
    call = calls.activation_grad(
        *(run.spec(dz), run.spec(h), run.spec(group_sizes), run.spec(h).dtype),
        activation=op.activation,
        wanted=wanted,
        row_scale=operand_spec(run, probs),
        row_base=operand_spec(run, base),
        zero_tail=op.clear_residuals,
    )
    return run(call, call.arrange(grad=dz, rows=h, group_sizes=group_sizes, row_scale=probs, row_base=base))


def hidden_forms(op: Mlp, recipe: Recipe, extras: Extras, needs: MlpNeeds) -> Within | None:
    """Returns how the pass that makes the gradients at the hidden rows quantises them; None where it does not.

    Args:
        recipe, extras: those of the first product.
    """
    wanted = grad_row_forms(recipe, needs)
    delayed = {"scale": extras.dy, "amax": extras.dy_amax, "measure": extras.measure}
    return fused_within(op, wanted, key=extras.key, stream=1, **delayed)


def rebuilt_rows(op: Mlp, recipe: Recipe, scale: Array | None) -> Within | None:
    """Returns how the pass at the hidden rows quantises the activated rows that it makes again for the gradient of wo.

    It returns None where that pass does not quantise them, or where their amax is needed too: the pass finds only that
    of dh.

    Args:
        recipe: the recipe of the second product. scale: the quantisation scales [G] of the activated rows.
    """
    if recipe.wgrad[0].delayed and gradients.measures_late(recipe, 0):
        return None
    return fused_within(op, [(0, recipe.wgrad[0])], scale=scale, measure=False)


def grad_row_forms(recipe: Recipe, needs: MlpNeeds) -> list[tuple[int, Format]]:
    """Returns (contracted axis, format) of dh for dgrad and for wgrad of the first product, each if needed."""
    return [*([(1, recipe.dgrad[0])] if needs.x else []), *([(0, recipe.wgrad[1])] if needs.wi else [])]


def _bias_dots(run: Runner, dy: Array, bias: Operand, group_sizes: Array) -> Array:
    """Returns [M] float32 = <dy[r], bias[g(r)]>."""
    spec = run.spec(dy)
    pair = (spec, operand_spec(run, bias))
    call = calls.row_dot(run.spec(group_sizes), spec.shape[0], None, pair, isinstance(bias, Listed))
    return run(call, arranged(call, group_sizes=group_sizes, group_lhs=dy, group_rhs=bias))[0]


def main_grads(
    run: Runner,
    op: Mlp,
    specs: MlpSpecs,
    x: Operand | None,
    h: Array | None,
    z: Operand | None,
    wi: Operand | None,
    wo: Operand | None,
    group_sizes: Array,
    probs: Array | None,
    wi_bias: Operand | None,
    wo_bias: Operand | None,
    dy: Operand,
    needs: MlpNeeds,
    *,
    grad_input: Array | None = None,
    extras: tuple[Extras, Extras] = NO_EXTRAS,
) -> MainGrads:
    """Computes the gradients in `needs` except those of the weights: `at_hidden`, then `first_product`.

    Args:
        grad_input: the caller's [M, K] buffer for dx; its tail rows are left unchanged.
        The others: those of `at_hidden`.
    """
    operands = (x, h, z, wi, wo, group_sizes, probs, wi_bias, wo_bias, dy)
    hidden = at_hidden(run, op, specs, *operands, needs, extras=extras)
    found = first_product(
        *(run, op, specs, x, wi, group_sizes, hidden.dh, hidden.of_dh, needs),
        grad_input=grad_input,
        extras=extras[0],
    )
    return both_stages(hidden, found)


def both_stages(hidden: AtHidden, found: gradients.MainGrads) -> MainGrads:
    """Combines the results of the two stages of backward to those of `main_grads`."""
    first, second = hidden.amax
    return MainGrads(
        x=found.x,
        probs=hidden.probs,
        wi_bias=found.bias,
        wo_bias=hidden.wo_bias,
        rows=found.rows,
        dh=found.dy,
        z=hidden.z,
        dy=hidden.dy,
        amax=(found.amax._replace(dy=first.dy if found.amax.dy is None else found.amax.dy), second),
    )


def at_hidden(
    run: Runner,
    op: Mlp,
    specs: MlpSpecs,
    x: Operand | None,
    h: Array | None,
    z: Operand | None,
    wi: Operand | None,
    wo: Operand | None,
    group_sizes: Array,
    probs: Array | None,
    wi_bias: Operand | None,
    wo_bias: Operand | None,
    dy: Operand,
    needs: MlpNeeds,
    *,
    extras: tuple[Extras, Extras] = NO_EXTRAS,
    beside: Beside = NOTHING,
) -> AtHidden:
    """Runs the first stage of backward; operands that `kept` does not name are None. No later stage reads h.

    Args:
        x, z, wi, wo: as `mlp` saved them.
        dy: [M, K]. It may be quantised for the products; other readers get its dequantised values.
        extras: those of the two products. beside: terms that are added to these.
    """
    needs = restrict(needs, specs)
    first, second = op.fc1(), op.fc2(specs.probs is not None and specs.wo_bias is not None)
    z_spec = ArraySpec((specs.x.shape[0], specs.wo.shape[second.weight_axes()[0]]), wide(specs.x.dtype))
    recipe = second.resolve(z_spec, specs.wo)
    dp = dh = z_amax = wo_amax = None
    if (needs_dz(needs) and h is None) or (not needs_dz(needs) and needs.wo and z is None):
        # The fused call of forward runs again: it takes a weight in two arrays as well, and makes z along with h.
        again = extras[0]._replace(measure=False)  # forward found the amaxes
        read = formatted_first(run, op, x, wi, group_sizes, again, NO_NEEDS)
        how: dict[str, Any] = {"keep": needs_dz(needs), "low": beside.first(x, group_sizes)}
        z, h, _ = hidden_rows(run, op, read.x, read.w, group_sizes, probs, wi_bias, **how)
    # Where x is quantised again for wgrad, dy is as well: its form for wgrad is not alive yet when dh becomes codes.
    later = recipe.saved == "input" and needs_dz(needs) and needs.wo
    wgrad_form = [(0, recipe.wgrad[1])]
    dy_forms = [(1, recipe.dgrad[0])] if needs_dz(needs) else []
    dy_forms += wgrad_form if needs.wo and not later else []
    given, added = dy, beside.hidden(dy, group_sizes)
    if isinstance(dy, QTensor):  # only the gradients of wo_bias and probs read its values
        read = needs.wo_bias or (needs.probs and wo_bias is not None)
        dy = gradients.plain_rows(run, dy, group_sizes) if read else None
    grads = gradients.grad_in_formats(run, recipe, given, dy_forms, group_sizes, extras[1], 0)
    dy_amax = grads.amax
    hidden = Quantized([], None)
    own = first.resolve(specs.x, specs.wi)
    if needs_dz(needs):
        in_pass = needs_dh(needs) and not isinstance(added, Term)
        quantized = hidden_forms(op, own, extras[0], needs) if in_pass else None
        plain = needs_dh(needs) and (quantized is None or needs.wi_bias)
        rebuilds = needs.wo and z is None
        quantized_z = rebuilt_rows(op, recipe, extras[1].x) if rebuilds and quantized is not None else None
        wanted = (plain, rebuilds and quantized_z is None, needs.probs)
        (weight,), wo_amax = gradients.weight_for_dgrad(run, recipe, specs.wo, wo, second.weight_axes()[1], extras[1])
        given_rows = (h, weight, group_sizes, probs, wo_bias, dy)
        how = {"quantized_dy": grads.forms[0], "quantized": quantized, "quantized_z": quantized_z, "beside": added}
        dh, rebuilt, dp, hidden = hidden_grads(run, op, *given_rows, wanted, **how)
        z = rebuilt if z is None else z
        dp = dp if dp is None or specs.probs is None else run.cast(dp, specs.probs.dtype)
    rows_dy = grads.forms[-1] if needs.wo else None
    if later:
        # The form for dgrad was measured if it has delayed scaling; otherwise this one is the first to be.
        again = extras[1]._replace(measure=extras[1].measure and not recipe.dgrad[0].delayed)
        (rows_dy,), dy_amax = gradients.grad_in_formats(run, recipe, given, wgrad_form, group_sizes, again, 0, dy_amax)
    if needs.wo:
        (z,), z_amax = gradients.rows_for_wgrad(run, recipe, z, group_sizes, extras[1])
    db2 = None
    if needs.wo_bias:
        scale = operand_spec(run, probs) if second.scale_bias else None
        row_scale = probs if second.scale_bias else None
        asked = Needs(False, False, True, False)
        of_bias = (z_spec, specs.wo, specs.wo_bias, scale)
        db2 = gradients.linear_grads(run, second, of_bias, None, None, group_sizes, None, row_scale, dy, asked).bias
    return AtHidden(
        probs=dp,
        wo_bias=db2,
        dh=dh,
        of_dh=joined(hidden.forms) if hidden.forms else None,
        z=z if needs.wo else None,
        dy=rows_dy,
        amax=(Amaxes(dy=hidden.amax), Amaxes(z_amax, wo_amax, dy_amax)),
    )


def first_product(
    run: Runner,
    op: Mlp,
    specs: MlpSpecs,
    x: Operand | None,
    wi: Operand | None,
    group_sizes: Array,
    dh: Array | None,
    of_dh: QTensor[Any] | None,
    needs: MlpNeeds,
    *,
    grad_input: Array | None = None,
    extras: Extras = gradients.NO_EXTRAS,
    beside: Beside = NOTHING,
) -> gradients.MainGrads:
    """Runs the second stage of backward: gradients of x and of the first bias, and the operands of wgrad of wi.

    Args:
        x, wi: as `mlp` saved them. dh, of_dh: as `at_hidden` returned them.
        grad_input: the caller's [M, K] buffer for dx; its tail rows are left unchanged. extras: those of the first
            product.
        beside: has the term that is added to dh W1^T.
    """
    needs = restrict(needs, specs)
    if not needs_dh(needs):
        return gradients.NO_MAIN_GRADS
    return gradients.main_grads(
        run,
        op.fc1(),
        (specs.x, specs.wi, specs.wi_bias, None),
        x if needs.wi else None,  # x saved only to recompute the hidden rows is not read here
        wi if needs.x else None,
        group_sizes,
        None,
        None,
        of_dh if dh is None else dh,
        Needs(needs.x, needs.wi, needs.wi_bias, False),
        grad_input=grad_input,
        extras=extras,
        stream=1,
        quantized_dy=of_dh,
        beside=beside.input(of_dh if dh is None else dh, group_sizes),
    )


def plan(
    op: Mlp,
    operands: Sequence[Any],
    sizes: ArraySpec,
    run: Any,
    *,
    needs: MlpNeeds | None = None,
    accumulators: tuple[Any, Any] = (None, None),
    out: ArraySpec | None = None,
    extras: tuple[Extras, Extras] = NO_EXTRAS,
) -> None:
    """Runs forward and backward on specs, for a runner that records calls (`grouped_core.plans.Planner`).

    Args:
        operands: specs of x, wi, wo, probs, wi_bias, wo_bias; `Listed` ones hold the spec of their table; None where
            absent. accumulators: likewise, for the two weight gradients; a tuple for a wi in two arrays.
    """
    x, wi, wo, probs, wi_bias, wo_bias = operands
    given: Any = [operand_spec(run, each) for each in operands]
    specs = MlpSpecs(*given)
    needs = restrict(needs or MlpNeeds(), specs)
    found = mlp(run, op, x, wi, wo, sizes, probs, wi_bias, wo_bias, out, needs=needs, extras=extras)
    main = main_grads(
        run,
        op,
        specs,
        found.x,
        found.h,
        found.z,
        found.wi,
        found.wo,
        sizes,
        probs,
        wi_bias,
        wo_bias,
        found.y,
        needs,
        extras=extras,
    )
    plan_weight_grads(run, op, specs, main, sizes, needs, accumulators)


def plan_weight_grads(
    run: Any,
    op: Mlp,
    specs: MlpSpecs,
    main: MainGrads,
    sizes: Array,
    needs: MlpNeeds,
    accumulators: tuple[Any, Any],
) -> None:
    """Plans the weight gradients, which `plan` does after `main_grads`."""
    into = accumulators[0]
    targets = [(into and into[half - 1], half) for half in (1, 2)] if op.paired else [(into, 0)]
    work = [(op.fc1(), specs.wi, main.rows, main.dh, *target) for target in targets if needs.wi]
    work += [(op.fc2(), specs.wo, main.z, main.dy, accumulators[1], 0)] if needs.wo else []
    for linear, weight, rows, dy, to, half in work:
        weight_grad(run, linear, weight, rows, dy, sizes, into=to, accumulate=to is not None, half=half)
