"""The experts' MLP as one operation with gradients of its own (`_run.with_gradients`), around the rules of
`grouped_core.mlp` for rows and of `routed` for tokens.

Its backward is in `_mlp_gradients`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import custom_vjp_primal_tree_values

from grouped_core import lora, routed, scaling
from grouped_core import mlp as rules
from grouped_core.calls import Call
from grouped_core.linear_spec import Linear
from grouped_core.mlp_spec import NO_NEEDS, Mlp, MlpNeeds, kept, restrict
from grouped_core.plans import Planner
from grouped_core.products import Paired, in_form
from grouped_core.recipes import BoundRecipe
from jax_grouped import _accumulators as accumulate
from jax_grouped import _adapted_mlp
from jax_grouped._mlp_arguments import Operands, into_refs, on_device, prepare, specs_of
from jax_grouped._mlp_gradients import MlpResiduals, backward, both_extras, grouped_mlp_bwd_dw, like, members, to_wait
from jax_grouped._nodes import NamingRunner, cotangent_of, has_gradient, master_dtype, named, target_of, value_of
from jax_grouped._run import RUN, JaxRunner, differentiable, varying_axes, with_gradients
from jax_grouped.ops import Take


def run_prepared(take_operand: Take, take: Take, arguments: dict[str, Any]) -> Any:
    """y of the public function with these arguments, differentiable; the others are those of `prepare`."""
    op, o, adapted = _prepared(take_operand, take, arguments)
    if adapted is not None:
        return _adapted_mlp.run(*adapted)
    return differentiable(_mlp_into_ref if into_refs(o) else _mlp, op, *on_device(o))


def _prepared(
    take_operand: Take, take: Take, arguments: dict[str, Any]
) -> tuple[Mlp, Operands, tuple[_adapted_mlp.Adapted, _adapted_mlp.Primals] | None]:
    own = {name: each for name, each in arguments.items() if name not in lora.OPTIONS}
    options = {name: arguments[name] for name in lora.OPTIONS}
    op, o = prepare(take_operand, take, **own)
    of_weights = {name: own[name] for name in ("wgrad_accum", "wgrad_dtype")}
    return op, o, _adapted_mlp.prepare(take, op, o, of_weights, lora_options=options)


def all_needs(op: Mlp, o: Operands) -> tuple[MlpNeeds, tuple[int, ...]]:
    """Gradients of all operands that have one, and the parts of wi: a quantised weight has one with a master, or for
    its accumulator.
    """
    given = zip(op.parts(), members(o.accum_wi), strict=True)
    parts = tuple([part for part, accum in given if has_gradient(o.wi) or accum is not None])
    wo = has_gradient(o.wo) or o.accum_wo is not None
    return MlpNeeds(x=has_gradient(o.x), wi=bool(parts), wo=wo), parts


class _Forward(NamedTuple):
    """What the rules found; x is what backward reads of it, and `order` is that of the rows of tokens."""

    y: Any
    x: Any
    h: Any
    z: Any
    wi: Any
    wo: Any
    amax: Any
    order: Any = None


def _run_rules(run: JaxRunner, op: Mlp, o: Operands, needs: MlpNeeds, x: Any) -> _Forward:
    wi, wo, how = in_form(op.fc1(), value_of(o.wi)), value_of(o.wo), {"needs": needs, "extras": both_extras(o.bound)}
    if op.keeps_rows:
        return _Forward(*rules.mlp(run, op, x, wi, wo, o.sizes, o.probs, o.wi_bias, o.wo_bias, o.out, **how))
    operands = (x, o.sizes, o.probs, wi, wo, o.tokens, o.wi_bias, o.wo_bias, o.out)
    found = routed.forward(run, op, *operands, **how)
    return _Forward(found.y, x, found.h, found.z, found.wi, found.wo, found.amax, found.order)


def _value(op: Mlp, *operands: Any) -> Any:
    o = Operands(*operands)
    return _run_rules(RUN, op, o, NO_NEEDS, value_of(o.x)).y


def save(op: Mlp, needs: MlpNeeds, parts: tuple[int, ...], o: Operands) -> tuple[Any, MlpResiduals]:
    """y, and what the gradients in `needs` read."""
    specs = specs_of(op, o)
    needs = restrict(needs, specs)
    keep = kept(op, needs, o.probs is not None, o.wi_bias is not None, o.wo_bias is not None)
    # Named before it is used: a policy that saves it then avoids recomputing it.
    name = op.residuals.name("grouped_x")
    x = named(value_of(o.x), name) if keep.x else value_of(o.x)
    found = _run_rules(NamingRunner(x, name), op, o, needs, x)
    sizes, probs, order = o.sizes, o.probs if keep.probs else None, found.order
    if order is not None:
        sizes, probs = order.sizes, None
        order = order._replace(dropped=None, probs=order.probs if keep.probs else None)
    arrays = (target_of(o.x), target_of(o.wi), target_of(o.wo), o.probs, o.wi_bias, o.wo_bias)
    saved = MlpResiduals(
        x=to_wait(op.residuals, "grouped_x", found.x, is_named=found.x is x) if keep.x else None,
        h=to_wait(op.residuals, "grouped_fc1", found.h),
        z=to_wait(op.residuals, "grouped_act", found.z),
        wi=_out_of_form(found.wi),
        wo=found.wo,
        sizes=sizes,
        probs=probs,
        wi_bias=o.wi_bias if keep.wi_bias else None,
        wo_bias=o.wo_bias if keep.wo_bias else None,
        bound=o.bound,
        amax=found.amax,
        order=order,
        op=op,
        needs=needs,
        parts=parts,
        specs=specs,
        masters=tuple(map(master_dtype, (o.x, o.wi, o.wo))),
        probs_dtype="" if o.probs is None else RUN.spec(o.probs).dtype,
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
    perturbed = Operands(*map(_perturbed, primals))
    o = Operands(*custom_vjp_primal_tree_values(primals))

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


def _keep(op: Mlp, needs: MlpNeeds, parts: tuple[int, ...], o: Operands) -> tuple[Any, _Kept]:
    y, saved = save(op, needs, parts, o)
    of_wi = zip(op.parts(), members(o.accum_wi), strict=True)
    accum_wi = [accum if saved.needs.wi and part in parts else None for part, accum in of_wi]
    accum_wo = o.accum_wo if saved.needs.wo else None
    for linear, accum in (*((op.fc1(), each) for each in accum_wi), (op.fc2(), accum_wo)):
        if accum is not None:
            accumulate.check_varying(linear, accum, varying_axes(y))
    return y, (saved, (like(o.accum_wi, accum_wi), accum_wo))


def _bwd(op: Mlp, residuals: _Kept, dy: Any) -> tuple[Any, ...]:
    saved, accums = residuals
    dx, dp, db1, db2, deferred = backward(saved, dy)
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
    return (of_x, of_wi, of_wo, None, dp, db1, db2, None, *where(True), bound, None)


_mlp = with_gradients(_value, _fwd, _bwd)

# NOTE: as with the linear operation, a forward rule with symbolic zeros may not save a Ref.
_mlp_into_ref = jax.custom_vjp(_value, nondiff_argnums=(0,))
_mlp_into_ref.defvjp(lambda op, *operands: _keep(op, *all_needs(op, o := Operands(*operands)), o), _bwd)


# ---------------------------------------------------------------------------------------------------------------------
# Planning.


def planned_calls(take_operand: Take, take: Take, arguments: dict[str, Any]) -> list[Call]:
    """Every native call of the public function with these arguments and of all its gradients; operands are specs."""
    op, o, adapted = _prepared(take_operand, take, arguments)
    if adapted is not None:
        return _adapted_mlp.plan(*adapted)
    run = Planner()
    groups = value_of(o.wo).shape[0]
    into_wi: Any = [None if accum is None else accumulate.spec(accum) for accum in members(o.accum_wi)]
    into_wo = None if o.accum_wo is None else accumulate.spec(o.accum_wo)
    operands = (value_of(o.x), in_form(op.fc1(), value_of(o.wi)), value_of(o.wo), o.probs, o.wi_bias, o.wo_bias)
    needs = MlpNeeds(
        x=master_dtype(o.x) is not None,
        wi=master_dtype(o.wi) is not None or any(each is not None for each in into_wi),
        wo=master_dtype(o.wo) is not None or into_wo is not None,
    )
    (rules if op.keeps_rows else routed).plan(
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
