"""The experts' MLP as one operation: a `custom_vjp` around `grouped_core.mlp`; its backward is in `_mlp_gradients`.

Letters: G groups, M rows, K hidden size of the model, F expert width, W columns of the hidden rows: 2F for gated
activations, else F.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import custom_vjp_primal_tree_values
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from grouped_core import activations, calls, debug, linear_spec, scaling
from grouped_core import mlp as rules
from grouped_core.activations import Activation
from grouped_core.calls import ArraySpec, Call
from grouped_core.formats import QTensor
from grouped_core.linear_spec import Linear
from grouped_core.mlp_spec import (
    NO_NEEDS,
    ROW_NAMES,
    Mlp,
    MlpNeeds,
    MlpSpecs,
    Residuals,
    check,
    check_join,
    check_pair,
    check_ranks,
    joins,
    kept,
    residuals_option,
    restrict,
)
from grouped_core.plans import Planner
from grouped_core.products import Paired, in_form, operand_spec
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.sizes import GroupSizes, unwrap
from jax_grouped import _accumulators as accumulate
from jax_grouped._arguments import AnyArray, as_array, as_bound, as_operand, as_operand_spec, report_sizes, to_int32
from jax_grouped._mlp_gradients import (
    NAMES,
    Accumulators,
    MlpResiduals,
    accumulators_of,
    both_extras,
    grouped_mlp_bwd_dw,
    grouped_mlp_bwd_dx,
    like,
    members,
)
from jax_grouped._run import RUN, differentiable, varying_axes
from jax_grouped.ops import (
    Take,
    cotangent_of,
    has_gradient,
    master_dtype,
    named,
    operand_node,
    size_status,
    target_of,
    value_of,
)
from jax_grouped.quantize import StraightThrough


def grouped_mlp(
    x: Float[AnyArray, "M K"] | QTensor[Array] | StraightThrough,
    wi: Float[AnyArray, "G K W"] | Float[AnyArray, "G W K"] | Sequence[Any] | QTensor[Array] | StraightThrough,
    wo: Float[AnyArray, "G F K"] | Float[AnyArray, "G K F"] | QTensor[Array] | StraightThrough,
    group_sizes: Int[AnyArray, " G"] | GroupSizes,
    *,
    rhs_transposed: bool = False,
    activation: str | Activation = "swiglu",
    probs: Float[AnyArray, " M"] | None = None,
    wi_bias: Float[AnyArray, "G W"] | None = None,
    wo_bias: Float[AnyArray, "G K"] | None = None,
    recipe: Recipe | BoundRecipe | None = None,
    residuals: str | Residuals = "save_fc1",
    wgrad_accum: Accumulators | None = None,
    wgrad_dtype: DTypeLike | None = None,
    out: Float[Array, "M K"] | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "M K"]:
    """y[r] = (p[r] act(x[r] wi[g] + wi_bias[g])) wo[g] + p[r] wo_bias[g], g being the group of row r, p = probs or 1.

    One differentiable operation: the kernel of the first product applies the activation and the probability, and in
    backward the kernel of the product with `wo` applies their gradients. The hidden rows are rounded to the dtype of x
    before the activation reads them. Rows past the groups are never read; they are zero in y and in every gradient.

    Args:
        x: [M, K]; float32, bfloat16 or float16.
        wi: [G, K, W], gate columns first or interleaved as the `Activation` says; [G, W, K] with `rhs_transposed`. Or
            a pair of gate and linear half, [G, K, F] each ([G, F, K] with `rhs_transposed`). A pair gives the same bits
            and a pair of gradients; it is concatenated only to be quantised.
        wo: [G, F, K], with `rhs_transposed` [G, K, F].
        group_sizes: [G], any integer dtype, as in `ragged_dot`.
        activation: a kind with its defaults, or an `Activation`.
        probs: [M], the router's probability of each row, fp32 inside.
        wi_bias: [G, W]. wo_bias: [G, K].
        recipe: formats of both products; default: the operands as given. Bind it to a state of delayed scaling from
            `scaling_state(..., products=2)`; the state and quantised operands are as in `ragged_dot`.
        residuals: what forward saves for backward: "save_all" the rows x [M, K], hidden [M, W] and activated [M, F],
            "save_fc1" x and hidden, "save_input" x; or `Residuals`. All give the same bits.
        wgrad_accum: accumulators of `wi` and `wo`, each as in `ragged_dot`, or None; both arrays or both Refs. For a
            `wi` that is a pair, the first is a pair too. With a Ref, every gradient is computed.
        wgrad_dtype: dtype of the weight gradients; default that of the weights.
        out: [M, K], the buffer of the result, as in `ragged_dot`.
        implementation: names of the kernels allowed, each for its own call; "composed" for the unfused ones.

    Returns:
        y [M, K], in the dtype of x.

    Raises:
        TypeError: an argument is not an array, or its dtype is not supported.
        ValueError: shapes that do not fit, options that contradict each other.
        NotImplementedError: no kernel supports the operands (`why_unsupported` tells beforehand); `jax.vmap`.
    """
    op, o = _prepare(as_operand, as_array, **locals())  # the arguments, by name
    kinds = {accumulate.is_sink(accum) for accum in (*members(o.accum_wi), o.accum_wo) if accum is not None}
    if len(kinds) == 2:
        raise ValueError(
            f"`{NAMES.accum}`: an array beside a jax.Ref, expected two of one kind; with a Ref it is unknown whether "
            "the array is differentiated, so pass two arrays, or two Refs."
        )
    return differentiable(_mlp_into_ref if kinds == {False} else _mlp, op, *_on_device(o))


def plan_grouped_mlp(**arguments: Any) -> list[Call]:
    """Every native call of `grouped_mlp` and of all its gradients; arrays may be `jax.ShapeDtypeStruct`."""
    op, o = _prepare(as_operand_spec, as_operand_spec, **arguments)
    run = Planner()
    groups = o.sizes.shape[0]
    into_wi: Any = [None if accum is None else accumulate.spec(accum) for accum in members(o.accum_wi)]
    into_wo = None if o.accum_wo is None else accumulate.spec(o.accum_wo)
    operands = (value_of(o.x), in_form(op.fc1(), value_of(o.wi)), value_of(o.wo), o.probs, o.wi_bias, o.wo_bias)
    needs = MlpNeeds(
        x=master_dtype(o.x) is not None,
        wi=master_dtype(o.wi) is not None or any(each is not None for each in into_wi),
        wo=master_dtype(o.wo) is not None or into_wo is not None,
    )
    rules.plan(
        op,
        operands,
        o.sizes._replace(dtype="int32"),
        run,
        needs=needs,
        accumulators=(into_wi if op.paired else into_wi[0], into_wo),
        out=o.out,
        extras=(scaling.planned(o.bound, groups), scaling.planned(o.bound, groups)),
    )
    return run.calls


_SIGNATURE = signature(grouped_mlp)


# ---------------------------------------------------------------------------------------------------------------------
# Arguments.


class _Operands(NamedTuple):
    x: Any
    wi: Any
    wo: Any
    sizes: Any
    probs: Any
    wi_bias: Any
    wo_bias: Any
    out: Any
    accum_wi: Any
    accum_wo: Any
    bound: Any


def _specs(op: Mlp, o: Any, run: Any = RUN) -> MlpSpecs:
    """Specs of the operands that have gradients, in packed form; None where absent."""
    arrays = (value_of(o.x), in_form(op.fc1(), value_of(o.wi)), value_of(o.wo), o.probs, o.wi_bias, o.wo_bias)
    specs: Any = [operand_spec(run, each) for each in arrays]
    return MlpSpecs(*specs)


def _prepare(
    take_operand: Take,
    take: Take,
    *,
    x: Any,
    wi: Any,
    wo: Any,
    group_sizes: Any,
    rhs_transposed: bool,
    activation: str | Activation,
    probs: Any,
    wi_bias: Any,
    wo_bias: Any,
    recipe: Recipe | BoundRecipe | None,
    residuals: str | Residuals,
    wgrad_accum: Any,
    wgrad_dtype: DTypeLike | None,
    out: Any,
    implementation: str | Sequence[str] | None,
    join: bool = True,
) -> tuple[Mlp, _Operands]:
    """The static parameters and the operands of `grouped_mlp`, checked; `take` converts an argument to an operand.

    Args:
        join: whether a `wi` in two arrays is concatenated where it is quantised.
    """
    n = NAMES

    def optional(name: str, value: Any, shape: str) -> Any:
        return None if value is None else take(name, value, shape)

    sizes, rows_hint = unwrap(group_sizes)
    paired = isinstance(wi, (tuple, list))
    accum_wi, accum_wo = accumulators_of(n.accum, wgrad_accum, paired)
    bound = as_bound(linear_spec.recipe_option(recipe))
    o = _Operands(
        operand_node(take_operand, n.x, x, "[M, K]"),
        tuple(take(f"{n.wi}[{at}]", each, "[G, F, K]" if rhs_transposed else "[G, K, F]") for at, each in enumerate(wi))
        if paired
        else operand_node(take_operand, n.wi, wi, "[G, W, K]" if rhs_transposed else "[G, K, W]"),
        operand_node(take_operand, n.wo, wo, "[G, K, F]" if rhs_transposed else "[G, F, K]"),
        take(n.sizes, sizes, "[G]"),
        optional(n.probs, probs, "[M]"),
        optional(n.wi_bias, wi_bias, "[G, W]"),
        optional(n.wo_bias, wo_bias, "[G, K]"),
        optional(n.out, out, "[M, K]"),
        like(accum_wi, [None if each is None else accumulate.take(take, n.accum, each) for each in members(accum_wi)]),
        None if accum_wo is None else accumulate.take(take, n.accum, accum_wo),
        bound,
    )
    masters = [
        master_dtype(weight) if isinstance(weight, StraightThrough) and accum is None else None
        for weight, accum in ((o.wi, o.accum_wi), (o.wo, o.accum_wo))
    ]
    op = Mlp(
        n,
        activations.resolve(activation),
        transposed=bool(rhs_transposed),
        recipe=bound.recipe,
        residuals=residuals_option(residuals),
        wgrad_dtype=linear_spec.dtype_option(wgrad_dtype),
        master_dtypes=(masters[0], masters[1]),
        rows_hint=rows_hint,
        implementation=linear_spec.implementation_names(implementation),
        clear_residuals=bool(jax.config.jax_debug_nans),  # pyright: ignore[reportAttributeAccessIssue]
        paired=paired,
    )
    shapes = {"wi": None if paired else o.wi, "wo": o.wo, "x": o.x}
    check_ranks(op, **{name: None if each is None else tuple(value_of(each).shape) for name, each in shapes.items()})
    if paired:
        check_pair(op, *(calls.spec_of(each) for each in o.wi))
    if join and joins(op, value_of(o.x)):
        check_join(op, any(each is not None for each in o.accum_wi))
        op, o = replace(op, paired=False), o._replace(wi=_joined(op, o.wi), accum_wi=None)
    run: Any = Planner() if take is as_operand_spec else RUN
    specs = _specs(op, o, run)
    check(op, *specs[:3], run.spec(o.sizes), *specs[3:], operand_spec(run, o.out))
    scaling.check_bound(bound, o.sizes.shape[0], products=2)
    weights = [*((op.fc1(), weight) for weight in members(value_of(o.wi))), (op.fc2(), value_of(o.wo))]
    for (linear, weight), accum in zip(weights, (*members(o.accum_wi), o.accum_wo), strict=True):
        if accum is not None:
            spec: Any = operand_spec(run, weight)
            accumulate.check(linear, accum, ArraySpec(tuple(spec.shape), spec.dtype))
    return op, o


def _joined(op: Mlp, halves: tuple[Any, ...]) -> Any:
    """Gate and linear half as one weight, or its spec."""
    axis = op.fc1().weight_axes()[1]
    if not isinstance(halves[0], ArraySpec):
        return jnp.concatenate(halves, axis)
    shape = halves[0].shape
    return ArraySpec((*shape[:axis], 2 * shape[axis], *shape[axis + 1 :]), halves[0].dtype)


def _on_device(o: _Operands) -> _Operands:
    if "sizes" in debug.debug_flags():
        jax.debug.callback(report_sizes, size_status(o.sizes, value_of(o.x).shape[0]))
    return o._replace(sizes=to_int32(o.sizes))


# ---------------------------------------------------------------------------------------------------------------------
# The operation, and its forward as a part for schedules that call backward themselves.


def grouped_mlp_fwd(*args: Any, **kwargs: Any) -> tuple[Array, MlpResiduals]:
    """y [M, K] of `grouped_mlp`, and what its gradients read. Takes the arguments of `grouped_mlp` but `wgrad_accum`.

    Not differentiable itself: `grouped_mlp_bwd_dx` and `grouped_mlp_bwd_dw` are its gradients. Raises what
    `grouped_mlp` raises.
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.arguments["wgrad_accum"] is not None:
        raise ValueError(
            f"`{NAMES.accum}` of grouped_mlp_fwd: given, expected None; hand the accumulators to grouped_mlp_bwd_dw."
        )
    op, o = _prepare(as_operand, as_array, **bound.arguments, join=False)
    return _save(op, MlpNeeds(), op.parts(), _on_device(o))


def _run_rules(op: Mlp, o: _Operands, needs: MlpNeeds, x: Any) -> rules.Forward:
    wi = in_form(op.fc1(), value_of(o.wi))
    operands = (x, wi, value_of(o.wo), o.sizes, o.probs, o.wi_bias, o.wo_bias, o.out)
    return rules.mlp(RUN, op, *operands, needs=needs, extras=both_extras(o.bound))


def _value(op: Mlp, *operands: Any) -> Any:
    o = _Operands(*operands)
    return _run_rules(op, o, NO_NEEDS, value_of(o.x)).y


def _save(op: Mlp, needs: MlpNeeds, parts: tuple[int, ...], o: _Operands) -> tuple[Any, MlpResiduals]:
    specs = _specs(op, o)
    needs = restrict(needs, specs)
    keep = kept(op, needs, o.probs is not None, o.wi_bias is not None, o.wo_bias is not None)
    x_name, h_name, z_name = (op.residuals.name(name) for name in ROW_NAMES)
    # Named before it is used, so that a policy which saves it spares what made it.
    x = named(value_of(o.x), x_name) if keep.x else value_of(o.x)
    found = _run_rules(op, o, needs, x)
    arrays = (target_of(o.x), target_of(o.wi), target_of(o.wo), o.probs, o.wi_bias, o.wo_bias)
    saved = MlpResiduals(
        x=found.x if found.x is x else named(found.x, x_name),
        h=named(found.h, h_name),
        z=named(found.z, z_name),
        wi=_out_of_form(found.wi),
        wo=found.wo,
        sizes=o.sizes,
        probs=o.probs if keep.probs else None,
        wi_bias=o.wi_bias if keep.wi_bias else None,
        wo_bias=o.wo_bias if keep.wo_bias else None,
        bound=o.bound,
        amax=found.amax,
        op=op,
        needs=needs,
        parts=parts,
        specs=specs,
        masters=tuple(map(master_dtype, (o.x, o.wi, o.wo))),
        varying=tuple(like(each, [_axes(member) for member in members(each)]) for each in arrays),
    )
    return found.y, saved


def _out_of_form(wi: Any) -> Any:
    """A first weight as in the residuals: a `Paired` one becomes a tuple of two arrays."""
    return (wi.gate, wi.up) if isinstance(wi, Paired) else wi


def _axes(array: Any) -> frozenset[str]:
    return frozenset() if array is None else varying_axes(array)


_Kept = tuple[MlpResiduals, tuple[Any, Any]]  # and the accumulators


def _fwd(op: Mlp, *primals: Any) -> tuple[Any, _Kept]:
    perturbed = _Operands(*map(_perturbed, primals))
    o = _Operands(*custom_vjp_primal_tree_values(primals))

    def asked(linear: Linear, node: Any, weight: bool, accum: bool | None) -> bool:
        if accum is not None:
            accumulate.check_asked(linear, weight=weight, accum=accum)
        return weight and has_gradient(node) if accum is None else accum

    of_wi = zip(op.parts(), members(perturbed.wi), members(perturbed.accum_wi), strict=True)
    parts = tuple(part for part, weight, accum in of_wi if asked(op.fc1(), o.wi, bool(weight), accum))
    wo = asked(op.fc2(), o.wo, bool(perturbed.wo), perturbed.accum_wo)
    others = (bool(each) for each in (perturbed.probs, perturbed.wi_bias, perturbed.wo_bias))
    x = bool(perturbed.x) and has_gradient(o.x)
    return _keep(op, MlpNeeds(x, bool(parts), bool(wo), *others), parts, o)


def _perturbed(primal: Any) -> Any:
    """Whether an operand is differentiated, or each one of a pair; None where it is absent."""
    if type(primal) is tuple:
        return tuple(map(_perturbed, primal))
    leaves = jax.tree.leaves(primal)
    return any(leaf.perturbed for leaf in leaves) if leaves else None


def _keep(op: Mlp, needs: MlpNeeds, parts: tuple[int, ...], o: _Operands) -> tuple[Any, _Kept]:
    y, saved = _save(op, needs, parts, o)
    of_wi = zip(op.parts(), members(o.accum_wi), strict=True)
    accum_wi = [accum if saved.needs.wi and part in parts else None for part, accum in of_wi]
    accum_wo = o.accum_wo if saved.needs.wo else None
    for linear, accum in (*((op.fc1(), each) for each in accum_wi), (op.fc2(), accum_wo)):
        if accum is not None:
            accumulate.check_varying(linear, accum, varying_axes(y))
    return y, (saved, (like(o.accum_wi, accum_wi), accum_wo))


def _bwd(op: Mlp, residuals: _Kept, dy: Any) -> tuple[Any, ...]:
    saved, accums = residuals
    dx, dp, db1, db2, deferred = grouped_mlp_bwd_dx(saved, dy)
    found = grouped_mlp_bwd_dw(deferred, accums)

    def where(given: bool) -> list[Any]:
        """Results of the weights with an accumulator (`given`), or of those without; None for the others."""
        return [
            like(accum, [result if (one is not None) == given else None for result, one in pairs])
            for accum, pairs in (
                (accum, list(zip(members(result), members(accum), strict=True)))
                for result, accum in zip(found, accums, strict=True)
            )
        ]

    of_wi, of_wo = where(False)
    of_x, of_wi, of_wo = map(cotangent_of, saved.masters, (dx, of_wi, of_wo))
    bound = None if deferred.state is None else BoundRecipe(saved.bound.recipe, deferred.state, None)
    return (of_x, of_wi, of_wo, None, dp, db1, db2, None, *where(True), bound)


_mlp = jax.custom_vjp(_value, nondiff_argnums=(0,))
_mlp.defvjp(_fwd, _bwd, symbolic_zeros=True)

# NOTE: as with the linear operation, a forward rule with symbolic zeros may not save a Ref.
_mlp_into_ref = jax.custom_vjp(_value, nondiff_argnums=(0,))
_mlp_into_ref.defvjp(lambda op, *operands: _keep(op, MlpNeeds(), op.parts(), _Operands(*operands)), _bwd)
