"""The linear operation of a frozen weight with a low-rank adapter, with gradients of its own (`_run.with_gradients`),
around `grouped_core.lora`.

Letters: G groups, M rows, K in, N out, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import custom_vjp_primal_tree_values

from grouped_core import lora, scaling
from grouped_core.calls import Call
from grouped_core.linear_spec import Linear
from grouped_core.lora import Adapter, LoraNeeds
from grouped_core.plans import Planner
from grouped_core.products import operand_spec
from grouped_core.recipes import BoundRecipe
from jax_grouped import _accumulators as accumulate
from jax_grouped._nodes import (
    cotangent_of,
    extras_of,
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
    """The base product and its adapter."""

    op: Linear
    adapter: Adapter


class Operands(NamedTuple):
    """Operands, in the order of the primals; accums: those of A and B, or None."""

    x: Any
    w: Any
    a: Any
    b: Any
    sizes: Any
    bias: Any
    row_scale: Any
    out: Any
    key: Any
    accums: tuple[Any, Any]
    bound: Any


def run(static: Adapted, o: Operands) -> jax.Array:
    """y [M, N] of checked operands, differentiable in all but the weight."""
    if not accumulate.all_refs(f"{static.adapter.name}_wgrad_accum", o.accums):
        return differentiable(_adapted, static, *o)
    w = frozen(static.op.names.w, static.adapter.name, o.w) if has_gradient(o.w) else o.w
    return differentiable(_into_refs, static, *o._replace(w=w))


def plan(static: Adapted, o: Operands) -> list[Call]:
    """Every native call of the operation and of its gradients, for operands that are specs."""
    run, x, w = Planner(), value_of(o.x), value_of(o.w)
    extras = scaling.planned(o.bound, w.shape[0])
    needs = _all_needs(o)
    rows = (x, w, o.a, o.b, o.sizes, o.bias, o.row_scale)
    found = lora.forward(run, *static, *rows, o.out, o.key, extras=extras, needs=needs)
    specs: Any = tuple([operand_spec(run, each) for each in (x, w, o.bias, o.row_scale)])
    into: Any = tuple([None if each is None else accumulate.spec(each) for each in o.accums])
    operands = (found.x, found.w, found.u, o.a, o.b, o.sizes, o.bias, o.row_scale, found.y, o.key)
    lora.backward(run, *static, specs, (o.a, o.b), *operands, needs=needs, into=into, extras=extras)
    return run.calls


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "w", "u", "a", "b", "sizes", "bias", "row_scale", "key", "accums", "bound", "amax"],
    meta_fields=["needs", "specs", "factors", "masters", "varying"],
)
@dataclass(frozen=True)
class _Saved:
    """What the operation saves for its backward; arrays that no needed gradient reads are None."""

    x: Any
    w: Any
    u: Any
    a: Any
    b: Any
    sizes: Any
    bias: Any
    row_scale: Any
    key: Any
    accums: Any
    bound: Any
    amax: Any
    needs: LoraNeeds
    specs: Any
    """Specs of x, w, bias, row_scale; the last two are None where absent."""
    factors: Any
    """Specs of A and B."""
    masters: tuple[str | None, ...]
    """`master_dtype` of x and of w."""
    varying: tuple[frozenset[str], ...]
    """Manual mesh axes over which the gradients of x, a, b, bias and row_scale vary."""


def _value(static: Adapted, *operands: Any) -> Any:
    o = Operands(*operands)
    rows = (value_of(o.x), value_of(o.w), o.a, o.b, o.sizes, o.bias, o.row_scale, o.out, o.key)
    return lora.forward(RUN, *static, *rows, extras=extras_of(o.bound)).y


def _save(static: Adapted, needs: LoraNeeds, *operands: Any) -> tuple[Any, _Saved]:
    o = Operands(*operands)
    x, w = value_of(o.x), value_of(o.w)
    keep = lora.kept(static.op, needs, o.bias is not None, o.row_scale is not None)
    if keep.x:
        x = named(x, "grouped_x")
    rows = (x, w, o.a, o.b, o.sizes, o.bias, o.row_scale, o.out, o.key)
    found = lora.forward(RUN, *static, *rows, extras=extras_of(o.bound), needs=needs)
    for product, accum in zip((static.adapter.down(static.op), static.adapter.up(static.op)), o.accums, strict=True):
        if accum is not None:
            accumulate.check_varying(product, accum, varying_axes(found.y))
    targets = (target_of(o.x), o.a, o.b, o.bias, o.row_scale)
    wanted = (needs.a, needs.b)
    return found.y, _Saved(
        x=found.x,
        w=found.w,
        u=found.u,
        a=o.a if keep.a else None,
        b=o.b if keep.b else None,
        sizes=o.sizes,
        bias=o.bias if keep.bias else None,
        row_scale=o.row_scale if keep.row_scale else None,
        key=o.key if keep.x or keep.a else None,
        accums=tuple([each if want else None for each, want in zip(o.accums, wanted, strict=True)]),
        bound=o.bound,
        amax=found.amax,
        needs=needs,
        specs=tuple([operand_spec(RUN, each) for each in (x, w, o.bias, o.row_scale)]),
        factors=(RUN.spec(o.a), RUN.spec(o.b)),
        masters=tuple(map(master_dtype, (o.x, o.w))),
        varying=tuple([frozenset() if each is None else varying_axes(each) for each in targets]),
    )


def _all_needs(o: Operands) -> LoraNeeds:
    """Gradients of all operands that have one."""
    return LoraNeeds(has_gradient(o.x), True, True, o.bias is not None, o.row_scale is not None)


def _forward(static: Adapted, *primals: Any) -> tuple[Any, _Saved]:
    marks = Operands(*primals)
    moved: list[Any] = [any(leaf.perturbed for leaf in jax.tree.leaves(each)) for each in primals]
    perturbed, o = Operands(*moved), Operands(*custom_vjp_primal_tree_values(primals))
    if perturbed.w and has_gradient(o.w):
        raise weight_differentiated(static.op.names.w, static.adapter.name)
    wanted = []
    for at, (accum, given) in enumerate(zip(o.accums, marks.accums, strict=True)):
        factor = (perturbed.a, perturbed.b)[at]
        if accum is not None:
            product = (static.adapter.down, static.adapter.up)[at](static.op)
            sink = any(leaf.perturbed for leaf in jax.tree.leaves(given))
            accumulate.check_asked(product, weight=factor, accum=sink)
            factor = sink
        wanted.append(factor)
    a, b = wanted
    needs = LoraNeeds(perturbed.x and has_gradient(o.x), a, b, perturbed.bias, perturbed.row_scale)
    return _save(static, needs, *o)


def _backward(static: Adapted, saved: _Saved, dy: Any) -> tuple[Any, ...]:
    into: Any = tuple([None if each is None else accumulate.read(each) for each in saved.accums])
    operands = (saved.x, saved.w, saved.u, saved.a, saved.b, saved.sizes, saved.bias, saved.row_scale, dy, saved.key)
    found, amax = lora.backward(
        RUN,
        *static,
        saved.specs,
        saved.factors,
        *operands,
        needs=saved.needs,
        into=into,
        extras=extras_of(saved.bound),
    )
    state = merged_state(saved.bound, [saved.amax.and_later(amax)])
    accums = [None, None]
    for at, name in enumerate(("a", "b")):
        if into[at] is not None:
            accums[at] = accumulate.write(saved.accums[at], getattr(found, name))
            found = found._replace(**{name: None})
    dx, da, db, d_bias, dc = (
        None if cotangent is None else reduce_to(cotangent, axes)
        for cotangent, axes in zip(found, saved.varying, strict=True)
    )
    return (
        cotangent_of(saved.masters[0], dx),
        *(None, da, db, None, d_bias, dc, None, None, tuple(accums)),
        None if state is None else BoundRecipe(saved.bound.recipe, state, None),
    )


_adapted = with_gradients(_value, _forward, _backward)

# NOTE: as in `ops`: with Refs all gradients are computed, and compilation drops the calls of those that are not used.
_into_refs = jax.custom_vjp(_value, nondiff_argnums=(0,))
_into_refs.defvjp(lambda static, *operands: _save(static, _all_needs(Operands(*operands)), *operands), _backward)
