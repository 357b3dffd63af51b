"""Gradients of the experts' MLP, in parts: `grouped_mlp_bwd_dx`, and later the weight gradients.

Letters: G groups, M rows, K hidden size of the model, F expert width, W columns of the hidden rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float

from grouped_core import mlp as rules
from grouped_core import routed
from grouped_core.calls import ArraySpec, OperandSpec
from grouped_core.formats import QTensor
from grouped_core.linear_spec import Linear, check_made_by
from grouped_core.mlp_spec import ROW_NAMES, Mlp, MlpNames, MlpNeeds, MlpSpecs, Residuals, check_cotangent
from grouped_core.products import in_form
from grouped_core.quantizing import Extras
from grouped_core.recipes import BoundRecipe
from jax_grouped import _accumulators as accumulate
from jax_grouped._accumulators import Accumulator
from jax_grouped._arguments import as_operand
from jax_grouped._nodes import extras_of, merged_state, named, target_of
from jax_grouped._run import RUN, reduce_to, varying_axes

NAMES = MlpNames()

Accumulators = tuple[Accumulator | Sequence[Accumulator | None] | None, Accumulator | None]
"""Types of `wgrad_accum`: the accumulator of `wi`, a pair where `wi` is a pair, and that of `wo`."""


def members(operand: Any) -> tuple[Any, ...]:
    """The arrays of a first weight, or the entries that belong to them, as a tuple."""
    return operand if type(operand) is tuple else (operand,)


def like(form: Any, entries: Sequence[Any]) -> Any:
    """`entries`, one per array of a first weight: a tuple where `form` is one, else the only entry."""
    return tuple(entries) if type(form) is tuple else entries[0]


def accumulators_of(name: str, accum: Any, paired: bool) -> tuple[Any, Any]:
    """(accumulator of wi, of wo); for a `wi` in two arrays the first is a tuple of two. Each may be None."""
    of_wi, of_wo = (None, None) if accum is None else _two(name, accum, f"of `{NAMES.wi}` and of `{NAMES.wo}`")
    if paired:
        of_wi = (None, None) if of_wi is None else _two(f"{name}[0]", of_wi, f"as `{NAMES.wi}` is one")
    accumulate.all_refs(name, (*members(of_wi), of_wo))
    return of_wi, of_wo


def _two(name: str, accum: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(accum, (tuple, list)) or len(accum) != 2:
        raise TypeError(
            f"`{name}`: {type(accum).__name__}, expected None or a pair, {what}; put None where a weight has no "
            "accumulator."
        )
    return accum[0], accum[1]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "h", "z", "wi", "wo", "sizes", "probs", "wi_bias", "wo_bias", "bound", "amax", "order"],
    meta_fields=["op", "needs", "parts", "specs", "masters", "probs_dtype", "varying"],
)
@dataclass(frozen=True)
class MlpResiduals:
    """What `grouped_mlp` or `routed_mlp` saves for its backward; arrays that no needed gradient reads are None."""

    x: Any
    h: Any
    z: Any
    wi: Any
    wo: Any
    sizes: Any
    probs: Any
    wi_bias: Any
    wo_bias: Any
    bound: BoundRecipe
    amax: Any
    """Amaxes that forward found, for delayed scaling."""
    order: Any
    """The order of the rows of tokens, with their probabilities; None where x are sorted rows."""
    op: Mlp
    needs: MlpNeeds
    parts: tuple[int, ...]
    """The entries of `op.parts()` whose gradient is needed."""
    specs: MlpSpecs
    masters: tuple[str | None, ...]
    """`master_dtype` of x, wi and wo."""
    probs_dtype: str
    """Dtype of the probabilities, or of the weights of tokens; "" where absent."""
    varying: tuple[Any, ...]
    """Manual mesh axes over which x, wi (a tuple: each array of it), wo, probs, wi_bias and wo_bias vary."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "dh", "z", "dy", "sizes", "state"],
    meta_fields=["op", "needs", "parts", "specs", "varying"],
)
@dataclass(frozen=True)
class Deferred:
    """Operands of wgrad: dW1 is computed from x [M, K] and dh [M, W], dW2 from z [M, F] and dy [M, K].

    Attributes:
        state: the state of delayed scaling, with the amaxes of this microbatch merged in; None where there is none.
    """

    x: Any
    dh: Any
    z: Any
    dy: Any
    sizes: Any
    state: Any
    op: Mlp
    needs: MlpNeeds
    parts: tuple[int, ...]
    specs: MlpSpecs
    varying: tuple[Any, ...]


def grouped_mlp_bwd_dx(
    res: MlpResiduals, dy: Float[Array, "M K"] | QTensor[Any]
) -> tuple[Array | None, Array | None, Array | None, Array | None, Deferred]:
    """(dx, dp, db1, db2, deferred): every gradient except those of the weights, and the operands of wgrad.

    Args:
        res: from `grouped_mlp_fwd`.
        dy: [M, K], the cotangent of y; it may be quantised as the products of the recipe read it.

    Returns:
        dx [M, K], dp [M], db1 [G, W], db2 [G, K], None for operands that were absent, and a pytree of arrays.

    Raises:
        TypeError: `res` is not from there, or dy is no array or of another dtype. ValueError: the shape of dy.
    """
    check_made_by("grouped_mlp_bwd_dx", "res", res, MlpResiduals, "grouped_mlp_fwd")
    dy = as_operand("dy", dy, "[M, K]")
    if isinstance(dy, QTensor):
        recipe = res.op.fc2().resolve(res.specs.x, res.specs.wo)
        check_cotangent(res.specs.x, ArraySpec(dy.shape, dy.dtype), dy.format, recipe)
    else:
        check_cotangent(res.specs.x, RUN.spec(dy))
    return backward(res, dy)


def to_wait(residuals: Residuals, name: str, rows: Any, *, is_named: bool = False) -> Any:
    """Rows that wait for backward: named for `jax.checkpoint`, and in host memory where `residuals` says so (OFF-9)."""
    rows = rows if is_named else named(rows, residuals.name(name))
    return jax.device_put(rows, jax.memory.Space.Host) if name in residuals.offload else rows


def came_back(residuals: Residuals, name: str, rows: Any) -> Any:
    """Rows of `to_wait` where backward reads them."""
    return jax.device_put(rows, jax.memory.Space.Device) if name in residuals.offload else rows


def backward(res: MlpResiduals, dy: Any) -> tuple[Any, Any, Any, Any, Deferred]:
    """Does what `grouped_mlp_bwd_dx` does, for rows or tokens."""
    x, h, z = (came_back(res.op.residuals, *each) for each in zip(ROW_NAMES, (res.x, res.h, res.z), strict=True))
    wi = in_form(res.op.fc1(), res.wi)
    extras = both_extras(res.bound)
    if res.order is None:
        operands = (x, h, z, wi, res.wo, res.sizes, res.probs, res.wi_bias, res.wo_bias, dy)
        main = rules.main_grads(RUN, res.op, res.specs, *operands, res.needs, extras=extras)
    else:
        operands = (x, h, z, wi, res.wo, res.order, res.wi_bias, res.wo_bias, dy)
        how = {"weights_dtype": res.probs_dtype, "extras": extras}
        main = routed.main_grads(RUN, res.op, res.specs, *operands, res.needs, **how)
    of = dict(zip(MlpSpecs._fields, res.varying, strict=True))
    dx, dp, db1, db2 = (
        None if cotangent is None else reduce_to(cotangent, of[name])
        for name, cotangent in zip(("x", "probs", "wi_bias", "wo_bias"), main[:4], strict=True)
    )
    needs = res.needs
    deferred = Deferred(
        x=main.rows,
        dh=main.dh,
        z=main.z,
        dy=main.dy,
        sizes=res.sizes,
        state=merged_state(
            res.bound, [found.and_later(later) for found, later in zip(res.amax, main.amax, strict=True)]
        ),
        op=res.op,
        needs=needs,
        parts=res.parts,
        specs=res.specs,
        varying=res.varying,
    )
    return dx, dp, db1, db2, deferred


def grouped_mlp_bwd_dw(deferred: Deferred, wgrad_accum: Accumulators | None = None) -> tuple[Any, Any]:
    """(dW1, dW2), in form and layout of `wi` and `wo`, computed at any time after `grouped_mlp_bwd_dx`.

    Args:
        deferred: from `grouped_mlp_bwd_dx`.
        wgrad_accum: accumulators of the two. The new value of an array is returned (donate the array, or XLA copies
            it); a Ref is updated, and None is returned for it. k deferred microbatches give the bits of k undeferred
            ones.

    Raises:
        TypeError: `deferred` is not from there, or accumulators are no pair. ValueError: one does not fit its weight.
    """
    check_made_by("grouped_mlp_bwd_dw", "deferred", deferred, Deferred, "grouped_mlp_bwd_dx")
    d = deferred
    into_wi, into_wo = accumulators_of(NAMES.accum, wgrad_accum, d.op.paired)
    gate_and_up = []
    if into_wo is not None and not d.needs.wo:
        raise _without_gradient(NAMES.wo)
    for half, accum, axes in zip(d.op.parts(), members(into_wi), members(d.varying[1]), strict=True):
        needed = d.needs.wi and half in d.parts
        if accum is not None and not needed:
            raise _without_gradient(NAMES.wi)
        gate_and_up.append(_weight_grad(d, d.op.fc1(), d.specs.wi, d.x, d.dh, half, accum, axes) if needed else None)
    dwo = _weight_grad(d, d.op.fc2(), d.specs.wo, d.z, d.dy, 0, into_wo, d.varying[2]) if d.needs.wo else None
    return like(into_wi, gate_and_up), dwo


def _without_gradient(name: str) -> ValueError:
    return ValueError(
        f"`{NAMES.accum}` of grouped_mlp_bwd_dw: given for `{name}`, which is quantised and has no gradient, expected "
        "None; pass grouped_mlp_fwd the straight_through of a master and its quantised weight."
    )


def _weight_grad(
    d: Deferred,
    linear: Linear,
    whole: OperandSpec,
    rows: Array,
    dy: Array,
    half: int,
    accum: Accumulator | None,
    axes: frozenset[str],
) -> Array | None:
    """The gradient of one array of a weight, or the accumulator's new value; None where a Ref holds it."""
    if accum is None:
        return reduce_to(rules.weight_grad(RUN, linear, whole, rows, dy, d.sizes, half=half), axes)
    accumulate.check(linear, accum, _part_spec(linear, whole, half))
    accumulate.check_varying(linear, accum, varying_axes(target_of(rows)) | varying_axes(target_of(dy)))
    into = accumulate.read(accum)
    return accumulate.write(
        accum, rules.weight_grad(RUN, linear, whole, rows, dy, d.sizes, into=into, accumulate=True, half=half)
    )


def _part_spec(linear: Linear, whole: OperandSpec, half: int) -> ArraySpec:
    """Spec of one array of a weight."""
    columns = linear.weight_axes()[1]
    parts = 2 if half else 1
    return ArraySpec(tuple(d // parts if axis == columns else d for axis, d in enumerate(whole.shape)), whole.dtype)


def both_extras(bound: BoundRecipe) -> tuple[Extras, Extras]:
    """The bound key and scales of the operands of each product."""
    return extras_of(bound, 0), extras_of(bound, 1)
