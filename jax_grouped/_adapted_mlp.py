"""The experts' MLP of frozen weights with low-rank adapters, of rows and of tokens: an operation with gradients of its
own (`_run.with_gradients`) around `grouped_core.lora_mlp`.

Letters: G groups, M rows, T tokens, k experts per token, K hidden size of the model, F expert width, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import custom_vjp_primal_tree_values

from grouped_core import lora, lora_mlp, scaling
from grouped_core.calls import ArraySpec, Call, spec_of
from grouped_core.gradients import Amaxes
from grouped_core.lora_mlp import Adapters, Factors, LoraMlpNeeds, PairGrads
from grouped_core.mlp_spec import ROW_NAMES, Mlp, MlpSpecs, Residuals, needs_dh
from grouped_core.plans import Planner
from grouped_core.recipes import BoundRecipe
from jax_grouped import _accumulators as accumulate
from jax_grouped._arguments import as_operand_spec
from jax_grouped._mlp_arguments import Operands, on_device, specs_of
from jax_grouped._mlp_gradients import both_extras, came_back, to_wait
from jax_grouped._nodes import (
    NamingRunner,
    cotangent_of,
    frozen,
    has_gradient,
    master_dtype,
    merged_state,
    named,
    target_of,
    value_of,
    weight_differentiated,
)
from jax_grouped._run import RUN, differentiable, reduce_to, varying_axes, with_gradients


class Adapted(NamedTuple):
    """The operation of the base, and its adapters."""

    op: Mlp
    adapters: Adapters


class Primals(NamedTuple):
    """Operands of the base; the factors, their accumulators or None, and the key of the dropout."""

    base: Operands
    factors: Factors
    accums: Factors
    key: Any


_SHAPES = (("[G, K, r]", "[G, r, W]", "[G, F, r]", "[G, r, K]"), ("[G, r, K]", "[G, W, r]", "[G, r, F]", "[G, K, r]"))


def prepare(
    take: Any,
    op: Mlp,
    o: Operands,
    given: dict[str, Any],
    *,
    lora_options: dict[str, Any],
) -> tuple[Adapted, Primals] | None:
    """The operation with adapters and its operands, checked, from those of the base; None without adapters.

    Args:
        take: converts an argument to an operand. given: `wgrad_accum` and `wgrad_dtype` of the public function.
        lora_options: its arguments in `lora.OPTIONS`.
    """
    pairs, rate, key, accum = (lora_options[name] for name in ("lora", "lora_dropout", "lora_key", "lora_wgrad_accum"))
    factor = lora_options["lora_scaling"]
    if pairs is None:
        lora.check_absent(factor, rate, key, accum)
        return None
    lora.check_no_weight_gradient(**given)
    adapters, factors = lora_mlp.option(pairs, factor, rate, key)
    names = [f"{place}[{at}]" for place in lora_mlp.PLACES for at in (0, 1)]
    arrays = Factors(
        *[
            None if each is None else take(name, each, shape)
            for name, each, shape in zip(names, factors, _SHAPES[op.transposed], strict=True)
        ]
    )
    accums = lora_mlp.accumulators_option(accum)
    if isinstance(accums, str):
        raise TypeError(f"`lora_wgrad_accum`: {accums!r}, expected None, or two pairs as `lora` has them.")
    accumulate.all_refs("lora_wgrad_accum", accums or ())
    key = None if key is None else take("lora_key", key, "[2]")
    specs = Factors(*[None if each is None else spec_of(each) for each in arrays])
    run: Any = Planner() if take is as_operand_spec else RUN
    lora_mlp.check(op, adapters, specs_of(op, o, run), specs, None if key is None else spec_of(key))
    taken: list[Any] = []
    for product, name, each, spec in zip(
        lora_mlp.products(op, adapters), names, accums or Factors(), specs, strict=True
    ):
        taken.append(None)
        if each is None:
            continue
        if product is None:
            raise ValueError(f"`lora_wgrad_accum`: given for `{name}`, which is absent, expected None; leave it out.")
        taken[-1] = accumulate.take(take, product.names.accum, each)
        accumulate.check(product, taken[-1], spec)
    return Adapted(op, adapters), Primals(o, arrays, Factors(*taken), key)


def run(static: Adapted, primals: Primals) -> jax.Array:
    """y of checked operands, differentiable in all but the weights."""
    o = on_device(primals.base)
    if not accumulate.all_refs("lora_wgrad_accum", primals.accums):
        return differentiable(_adapted, static, *primals._replace(base=o))
    wi, wo = (
        frozen(name, lora.LORA, each) if has_gradient(each) else each
        for name, each in zip((static.op.names.wi, static.op.names.wo), (o.wi, o.wo), strict=True)
    )
    return differentiable(_into_refs, static, *primals._replace(base=o._replace(wi=wi, wo=wo)))


def plan(static: Adapted, primals: Primals) -> list[Call]:
    """Every native call of the operation and of its gradients, for operands that are specs."""
    (op, adapters), (o, factors, accums, key) = static, primals
    run, groups = Planner(), value_of(o.wo).shape[0]
    extras = (scaling.planned(o.bound, groups), scaling.planned(o.bound, groups))
    o = o._replace(sizes=o.sizes._replace(dtype="int32"), tokens=None if op.keeps_rows else ArraySpec((1,), "int32"))
    specs, needs = specs_of(op, o, run), _needs(op, adapters, o, LoraMlpNeeds(x=master_dtype(o.x) is not None))
    found = lora_mlp.forward(run, op, adapters, factors, key, _rule_operands(op, o), needs=needs, extras=extras)
    base = found.base
    order = o.sizes if op.keeps_rows else base.order
    x = base.x if op.keeps_rows else value_of(o.x)
    probs_dtype = "" if o.probs is None else o.probs.dtype
    saved = (found.u_wi, found.u_wo, factors, key)
    kept = (x, base.h, base.z, base.wi, base.wo, order, o.probs, o.wi_bias, o.wo_bias)
    into = Factors(*[None if each is None else accumulate.spec(each) for each in accums])
    grads = _backward_rules(run, static, specs, needs, kept, saved, base.y, extras, probs_dtype, into)[-1]
    sizes = order if op.keeps_rows else order.sizes
    lora_mlp.grads_of_factors(run, op, adapters, factors, grads, sizes, into)
    return run.calls


def _needs(op: Mlp, adapters: Adapters, o: Operands, asked: LoraMlpNeeds) -> LoraMlpNeeds:
    """`asked` without what is absent."""
    of_wi, of_wo = adapters.wi is not None, adapters.wo is not None
    return LoraMlpNeeds(
        *(asked.x, asked.a_wi and of_wi, asked.b_wi and of_wi, asked.a_wo and of_wo, asked.b_wo and of_wo),
        probs=asked.probs and o.probs is not None,
        wi_bias=asked.wi_bias and o.wi_bias is not None,
        wo_bias=asked.wo_bias and o.wo_bias is not None,
    )


def _rule_operands(op: Mlp, o: Operands, x: Any = None) -> tuple[Any, ...]:
    """The operands of `mlp.mlp` or `routed.forward`."""
    x, wi, wo = value_of(o.x) if x is None else x, value_of(o.wi), value_of(o.wo)
    if op.keeps_rows:
        return x, wi, wo, o.sizes, o.probs, o.wi_bias, o.wo_bias, o.out
    return x, o.sizes, o.probs, wi, wo, o.tokens, o.wi_bias, o.wo_bias, o.out


def _backward_rules(
    run: Any,
    static: Adapted,
    specs: MlpSpecs,
    needs: LoraMlpNeeds,
    kept: Any,
    saved: Any,
    dy: Any,
    extras: Any,
    probs_dtype: str,
    into: Factors,
) -> tuple[Any, Any, Any, Any, Any, tuple[PairGrads, PairGrads]]:
    """(dx, dp, gradients of both biases, amaxes of both products, operands of the gradients of the factors).

    Args:
        kept: x, h, z, wi, wo, sizes or order, probs, both biases. saved: u of both adapters, the factors, the key.
        probs_dtype: the dtype of the weights of tokens. into: the accumulators of the factors.
    """
    (op, adapters), (u_wi, u_wo, factors, key) = static, saved
    x, h, z, wi, wo, order, probs, wi_bias, wo_bias = kept
    again = x if op.residuals.policy == "save_input" else None
    options: dict[str, Any] = {"extras": extras}
    if op.keeps_rows:
        operands = (again, h, z, wi, wo, order, probs, wi_bias, wo_bias, dy)
    else:
        operands = (again, h, z, wi, wo, order, wi_bias, wo_bias, dy)
        options["weights_dtype"] = probs_dtype
    given: Any = (run, op, adapters, specs, factors, key, (u_wi, u_wo), operands, needs)
    hidden, of_wo = lora_mlp.at_hidden(*given, new_b=into.b_wo is None, **options)
    dx = db1 = None
    of_wi, amax = PairGrads(), Amaxes()
    if needs_dh(lora_mlp.base_needs(adapters, needs)):
        operands = (x, wi, order, hidden.dh, hidden.of_dh)
        given = (run, op, adapters, specs, factors, key, u_wi, operands, needs)
        found, of_wi = lora_mlp.first_product(*given, new_b=into.b_wi is None, extras=extras[0])
        dx, db1, amax = found.x, found.bias, found.amax
    first, second = hidden.amax
    amax = amax._replace(dy=first.dy if amax.dy is None else amax.dy)
    return dx, hidden.probs, db1, hidden.wo_bias, (amax, second), (of_wi, of_wo)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["kept", "u_wi", "u_wo", "factors", "key", "accums", "bound", "amax"],
    meta_fields=["needs", "specs", "of_factors", "probs_dtype", "masters", "varying"],
)
@dataclass(frozen=True)
class _Saved:
    """What the operation saves for its backward; arrays that no needed gradient reads are None."""

    kept: tuple[Any, ...]
    """x, h, z, wi, wo, sizes or order, probs, both biases."""
    u_wi: Any
    u_wo: Any
    factors: Factors
    key: Any
    accums: Factors
    bound: Any
    amax: Any
    needs: LoraMlpNeeds
    specs: MlpSpecs
    of_factors: Factors
    """Specs of the factors."""
    probs_dtype: str
    """Dtype of the probabilities, or of the weights of tokens; "" where absent."""
    masters: tuple[str | None, ...]
    """`master_dtype` of x and both weights."""
    varying: tuple[frozenset[str], ...]
    """Manual mesh axes over which the gradients of x, probs, both biases and the factors vary."""


def _value(static: Adapted, *primals: Any) -> Any:
    (op, adapters), (o, factors, _, key) = static, Primals(*primals)
    extras = both_extras(o.bound)
    return lora_mlp.forward(RUN, op, adapters, factors, key, _rule_operands(op, o), extras=extras).base.y


def _save(static: Adapted, asked: LoraMlpNeeds, *primals: Any) -> tuple[Any, _Saved]:
    (op, adapters), (o, factors, accums, key) = static, Primals(*primals)
    needs = _needs(op, adapters, o, asked)
    has = [each is not None for each in (o.probs, o.wi_bias, o.wo_bias)]
    keep = lora_mlp.kept(op, adapters, needs, *has)
    x, name = value_of(o.x), op.residuals.name("grouped_x")
    if keep.base.x:
        x = named(x, name)
    run, operands, extras = NamingRunner(x, name), _rule_operands(op, o, x), both_extras(o.bound)
    found = lora_mlp.forward(run, op, adapters, factors, key, operands, needs=needs, extras=extras)
    base = found.base
    for product, accum in zip(lora_mlp.products(op, adapters), accums, strict=True):
        if accum is not None and product is not None:
            accumulate.check_varying(product, accum, varying_axes(base.y))
    order, probs = o.sizes, o.probs if keep.base.probs else None
    if not op.keeps_rows:
        order, probs = base.order._replace(dropped=None, probs=base.order.probs if keep.base.probs else None), None
    rows = (
        to_wait(op.residuals, "grouped_x", x, is_named=True) if keep.base.x else None,
        to_wait(op.residuals, "grouped_fc1", base.h),
        to_wait(op.residuals, "grouped_act", base.z),
    )
    biases = (o.wi_bias if keep.base.wi_bias else None, o.wo_bias if keep.base.wo_bias else None)
    targets = (target_of(o.x), o.probs, o.wi_bias, o.wo_bias, *factors)
    wanted = needs[1:5]
    return base.y, _Saved(
        kept=(*rows, base.wi, base.wo, order, probs, *biases),
        u_wi=found.u_wi,
        u_wo=found.u_wo,
        factors=lora_mlp.kept_operands(keep, factors),
        key=key,
        accums=Factors(*[each if want else None for each, want in zip(accums, wanted, strict=True)]),
        bound=o.bound,
        amax=base.amax,
        needs=needs,
        specs=specs_of(op, o),
        of_factors=Factors(*[None if each is None else RUN.spec(each) for each in factors]),
        probs_dtype="" if o.probs is None else RUN.spec(o.probs).dtype,
        masters=tuple(map(master_dtype, (o.x, o.wi, o.wo))),
        varying=tuple([frozenset() if each is None else varying_axes(each) for each in targets]),
    )


def _forward(static: Adapted, *primals: Any) -> tuple[Any, _Saved]:
    marks = Primals(*primals)
    o = Primals(*custom_vjp_primal_tree_values(primals))

    def perturbed(node: Any) -> bool:
        return any(leaf.perturbed for leaf in jax.tree.leaves(node))

    names = static.op.names
    for name, node, mark in ((names.wi, o.base.wi, marks.base.wi), (names.wo, o.base.wo, marks.base.wo)):
        if perturbed(mark) and has_gradient(node):
            raise weight_differentiated(name, lora.LORA)
    wanted = []
    rows = zip(lora_mlp.products(*static), marks.factors, marks.accums, o.accums, strict=True)
    for product, factor, accum_mark, accum in rows:
        asked = perturbed(factor)
        if accum is not None and product is not None:
            sink = perturbed(accum_mark)
            accumulate.check_asked(product, weight=asked, accum=sink)
            asked = sink
        wanted.append(asked)
    base = marks.base
    others = [perturbed(each) for each in (base.probs, base.wi_bias, base.wo_bias)]
    needs = LoraMlpNeeds(perturbed(base.x) and has_gradient(o.base.x), *wanted, *others)
    return _save(static, needs, *o)


def _backward(static: Adapted, saved: _Saved, dy: Any) -> tuple[Any, ...]:
    op, adapters = static
    residuals: Residuals = op.residuals
    x, h, z, *others = saved.kept
    rows = [came_back(residuals, *each) for each in zip(ROW_NAMES, (x, h, z), strict=True)]
    of_saved = (saved.u_wi, saved.u_wo, saved.factors, saved.key)
    into = Factors(*[None if each is None else accumulate.read(each) for each in saved.accums])
    dx, dp, db1, db2, amax, grads = _backward_rules(
        RUN,
        static,
        saved.specs,
        saved.needs,
        (*rows, *others),
        of_saved,
        dy,
        both_extras(saved.bound),
        saved.probs_dtype,
        into,
    )
    order = others[2]
    sizes = order if op.keeps_rows else order.sizes
    found = lora_mlp.grads_of_factors(RUN, op, adapters, saved.of_factors, grads, sizes, into)
    results: list[Any] = list(found)
    accums: list[Any] = [None] * len(results)
    for at, accum in enumerate(saved.accums):
        if accum is not None:
            accums[at], results[at] = accumulate.write(accum, results[at]), None
    dx, dp, db1, db2, *results = (
        None if each is None else reduce_to(each, axes)
        for each, axes in zip((dx, dp, db1, db2, *results), saved.varying, strict=True)
    )
    state = merged_state(saved.bound, [early.and_later(late) for early, late in zip(saved.amax, amax, strict=True)])
    bound = None if state is None else BoundRecipe(saved.bound.recipe, state, None)
    base = Operands(cotangent_of(saved.masters[0], dx), None, None, None, dp, db1, db2, None, None, None, bound)
    return base, Factors(*results), Factors(*accums), None


_adapted = with_gradients(_value, _forward, _backward)

# NOTE: as in `ops`: with Refs all gradients are computed, and compilation drops the calls of those that are not used.
_into_refs = jax.custom_vjp(_value, nondiff_argnums=(0,))
_into_refs.defvjp(
    lambda static, *primals: _save(static, LoraMlpNeeds(x=has_gradient(primals[0].x)), *primals), _backward
)
