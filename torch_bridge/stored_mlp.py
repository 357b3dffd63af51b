"""The experts' MLP on quantised operands, and recipes that quantise: what `grouped_mlp` does with them.

As with the linear operation (`stored`), forms are made by the operator `store`, each tensor in one pass, and what is
kept for backward is what backward reads.

Letters: G groups, M rows, K hidden size of the model, F expert width, W columns of the hidden rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core import gradients
from grouped_core import mlp as rules
from grouped_core.formats import QTensor
from grouped_core.gradients import Needs
from grouped_core.mlp_spec import NO_NEEDS, Kept, MlpNeeds, kept, needs_dz
from torch_bridge import _graph, _mlp_library, _products, _saved, _stored_linear, _stored_mlp
from torch_bridge._arguments import check_gradient
from torch_bridge._compiling import is_compiling
from torch_bridge._mlp_library import NAMES
from torch_bridge._products import Owner, ProductFacts, check_listed_once, mlp_gradients, once, owners_of, product_facts
from torch_bridge._run import settle_rows
from torch_bridge._stored import NOTHING, Stored, Wanted, arrays_of
from torch_bridge._stored_arguments import Cache, listed, taken
from torch_bridge._stored_mlp_arguments import Arguments, check_arguments, check_results, in_one_array
from torch_bridge._stored_mlp_gradients import Facts, in_one_pass, launchers
from torch_bridge.quantize import X, with_multipliers
from torch_bridge.stored import (
    encode_of,
    forms_read,
    lines_of,
    names_of,
    row_forms,
    stand_in,
    weight_forms,
    with_recipe,
)

Owners = tuple[Owner | None, Owner | None]
"""A module's side of both products."""


Replaced = tuple[tuple[bool, ...] | None, tuple[bool, ...] | None]
"""Of the weights of both products, whether each gradient replaces what is there; None: ask the Parameters."""


def grouped_mlp(
    x: Any,
    wi: Any,
    wo: Any,
    group_sizes: Any,
    rhs_transposed: bool,
    activation: Any,
    probs: Tensor | None,
    wi_bias: Any,
    wo_bias: Any,
    recipe: Any,
    residuals: Any,
    wgrad_accum: Any,
    implementation: Any,
    out: Tensor | None,
    grad_input: Tensor | None,
    owners: Owners = (None, None),
    caches: tuple[Cache | None, Cache | None] = (None, None),
) -> Tensor:
    """`mlp.grouped_mlp` where something is quantised; arguments and errors are its.

    Args:
        recipe: or a pair of bound ones, of layers that have a state each. owners, caches: of layers.
    """
    wi = in_one_array(wi, wgrad_accum, rhs_transposed, activation, recipe, residuals)
    arguments = (x, wi, wo, group_sizes, rhs_transposed, activation, probs, wi_bias, wo_bias, recipe, residuals)
    if not is_compiling():
        return mlp(check_arguments(*arguments, wgrad_accum, implementation, caches), out, grad_input, owners)
    masters = [taken(wi)[0], taken(wo)[0]]
    parameters = [
        owner.parameters if owner is not None else [] if master is None else listed(master)
        for owner, master in zip(owners, masters, strict=True)
    ]
    to_main_grad = isinstance(wgrad_accum, str)
    outside = [_products.stays_outside(*each, to_main_grad) for each in zip(owners, parameters, strict=True)]
    if any(outside) or any(each is not None for each in caches):
        return _uncompiled(*arguments, wgrad_accum, implementation, out, grad_input, owners, caches)
    replaced: Any = (None, None)
    if to_main_grad or (isinstance(wgrad_accum, (tuple, list)) and len(wgrad_accum) == 2):
        found = [
            _products.accumulators(
                wgrad_accum if to_main_grad else wgrad_accum[at], own, isinstance(master, Tensor), name
            )
            for at, (own, master, name) in enumerate(zip(parameters, masters, (NAMES.wi, NAMES.wo), strict=True))
        ]
        wgrad_accum, replaced = (tuple([each[part] for each in found]) for part in (0, 1))
    return _node(*_graph.taken_apart([*arguments, wgrad_accum, implementation]), out, grad_input, replaced)


_uncompiled: Any = torch.compiler.disable(grouped_mlp, reason=_products.OUTSIDE)


@torch.compiler.allow_in_graph
def _node(*arguments: Any) -> Tensor:
    """`grouped_mlp` as one node of a graph; `arguments` as `_graph` takes them apart, up to `implementation`."""
    *given, out, grad_input, replaced = arguments
    settle_rows(given[0], given[6], out, grad_input)
    return mlp(check_arguments(*_graph.together(given)), out, grad_input, (None, None), replaced)


def mlp(
    given: Arguments, out: Tensor | None, grad_input: Tensor | None, owners: Owners, replaced: Replaced = (None, None)
) -> Tensor:
    """The result, with gradients where somebody needs them.

    Args:
        replaced: of each weight of wi and wo, as in `stored.grouped_linear`.
    """
    if out is not None or grad_input is not None:
        check_results(given, out, grad_input)
    if not given.differentiates():
        return _forward(given, NO_NEEDS, out).y
    check_listed_once(
        (NAMES.wi, given.wi_leaves, owners[0], given.to_main_grad or len(given.accum_wi) > 0),
        (NAMES.wo, given.wo_leaves, owners[1], given.to_main_grad or len(given.accum_wo) > 0),
    )
    wi = given.wi_leaves or [stand_in(given, given.accum_wi)]
    wo = given.wo_leaves or [stand_in(given, given.accum_wo)]
    members = (wi, wo, given.wi_bias, given.wo_bias)
    counts = tuple(len(each) for each in (*members, given.accum_wi, given.accum_wo))
    flat = [each for one in (*members, given.accum_wi, given.accum_wo) for each in one]
    return _StoredMlp.apply(given, counts, owners, replaced, out, grad_input, given.leaf, given.probs, *flat)


_PLAIN_ARGUMENTS = 6  # of `_StoredMlp` that have no gradient and stand first


class _Forward(NamedTuple):
    y: Tensor
    x: Stored
    h: Tensor | None
    z: Stored
    wi: Stored
    wi_read: Stored  # `_stored_mlp_gradients` says what it is for
    wo: Stored
    keep: Kept


class _Plan(NamedTuple):
    """What forward does, as far as it does not depend on arrays."""

    keep: Kept
    forms: tuple[tuple[Wanted, Wanted], tuple[Wanted, Wanted]]  # of rows and weight of both products
    keeps: tuple[tuple[bool, bool], tuple[bool, bool]]  # whether backward reads these in the last of their forms
    within: Wanted  # forms of the activated rows that the activation's own pass stores
    rereads: bool  # whether backward makes the hidden rows again of a cached weight
    training: bool


@lru_cache(maxsize=1024)
def _plan(text: str, texts: tuple[str, str], needs: MlpNeeds, has: tuple[bool, bool, bool], cached: bool) -> _Plan:
    """`has`: whether there are probabilities and biases; `cached`: whether the first weight comes from a cache."""
    op = _mlp_library.decode(text)
    keep = kept(op, needs, *has)
    again = op.residuals.policy == "save_input"
    # A cache may be older than the multipliers, or the weights: backward reads the forms that forward read.
    asked = (
        Needs(needs.x and (cached or not again), needs.wi and not again, False, False),
        Needs(needs_dz(needs), keep.z, False, False),
    )
    products = [with_recipe(each) for each in texts]
    first, second = (gradients.keeps_forms(*product, one, False) for product, one in zip(products, asked, strict=True))
    forms = (forms_read(*products[0], first), forms_read(*products[1], second))
    within = in_one_pass(op, rules.activated_row_forms(op, products[1][1], keep.z))
    rereads = again and cached and keep.wi
    keep = keep._replace(wi=needs.x) if rereads else keep
    return _Plan(keep, forms, (first, second), within, rereads, any(needs))


def _forward(given: Arguments, needs: MlpNeeds, out: Tensor | None) -> _Forward:
    """y and what backward reads, as `grouped_core.mlp.mlp` has it."""
    checked, probs, (one, two) = given.checked, given.probs, given.uses
    first, second = checked.products
    has = (probs is not None, len(given.wi_bias) > 0, len(given.wo_bias) > 0)
    plan = _plan(checked.text, (first.text, second.text), needs, has, given.caches[0] is not None)
    keep, training, ((x_wanted, wi_wanted), (z_wanted, wo_wanted)) = plan.keep, plan.training, plan.forms
    (keeps_x, keeps_wi), (keeps_z, keeps_wo) = plan.keeps
    x = row_forms(given.x, x_wanted, given.sizes, one, first.recipe, training=training)
    wi = weight_forms(given.caches[0], given.wi, wi_wanted, one, first.recipe, training=training)
    recipe, (encode, live) = second.recipe, two.delayed(X, training=training)
    activated = _stored_mlp.hidden(
        *(x[0], wi[0], given.sizes, probs, given.wi_bias, encode_of(one, x[0], wi[0]), checked.text),
        keep=keep.h,
        spec=checked.hidden,
        wanted=plan.within,
        encode=encode,
        amax=live,
    )
    z = activated.z
    whole = z[0]  # as backward reads the rows where it does not read them stored
    if not plan.within:
        z = row_forms(whole.tensors[0], z_wanted, given.sizes, two, recipe, training=training)
    wo = weight_forms(given.caches[1], given.wo, wo_wanted, two, recipe, training=training)
    scale = probs if given.wo_bias and probs is not None else None
    operands = (z[0].tensors, wo[0].tensors, given.sizes, given.wo_bias, scale, *encode_of(two, z[0], wo[0]))
    operands = (*operands, second.text, z[0].text, wo[0].text)
    if out is None:
        y = _stored_linear.linear(*operands)
    else:
        _stored_linear.linear_into(*operands, out)
        y = out.detach()
    return _Forward(
        y,
        (x[-1] if keeps_x else _with_other(given.x)) if keep.x else NOTHING,
        activated.h,
        (z[-1] if keeps_z else whole) if keep.z else NOTHING,
        (wi[-1] if keeps_wi else _with_other(given.wi)) if keep.wi else NOTHING,
        wi[0] if plan.rereads else NOTHING,
        (wo[-1] if keeps_wo else _with_other(given.wo)) if keep.wo else NOTHING,
        keep,
    )


def forward_and_saved(
    given: Arguments, live: Sequence[Sequence[int]], needs: MlpNeeds, out: Tensor | None, replaced: Replaced
) -> tuple[Tensor, list[Tensor | None], list[str], Facts]:
    """(y, the tensors that backward reads, names of the first of them, what it has to know).

    Args:
        live: members that need gradients, of wi, wo and their biases. replaced: as of `mlp`.
    """
    if given.uses[0].state is not None and any(needs):
        one, two = with_multipliers(given.uses)
        given = given._replace(uses=(one, two))
    found = _forward(given, needs, out)
    keep, probs = found.keep, given.probs
    biases = (given.wi_bias if keep.wi_bias else [], given.wo_bias if keep.wo_bias else [])
    forms = (found.x, found.z, found.wi, found.wi_read, found.wo)
    names = [*names_of(_saved.ROWS, found.x), _saved.HIDDEN, *names_of(_saved.ACTIVATED, found.z)]
    saved = [*found.x.tensors, found.h, *found.z.tensors]
    saved += [given.sizes, probs if keep.probs else None, given.uses[0].key]
    saved += [*found.wi.tensors, *found.wi_read.tensors, *found.wo.tensors, *biases[0], *biases[1]]
    facts = Facts(
        given.checked,
        given.uses,
        needs,
        _product_facts(given, needs, live, replaced),
        tuple([form.text for form in forms]),
        tuple([len(each.tensors) for each in forms] + [len(each) for each in biases]),
        None if probs is None else probs.dtype,
    )
    return found.y, saved, names, facts


class _StoredMlp(torch.autograd.Function):
    """Gradients around the operators. What backward reads is saved, results never."""

    @staticmethod
    def forward(
        ctx: Any,
        given: Arguments,
        counts: tuple[int, ...],
        owners: Owners,
        replaced: Replaced,
        out: Tensor | None,
        grad_input: Tensor | None,
        leaf: Tensor | None,
        probs: Tensor | None,
        *members: Any,
    ) -> Tensor:
        """`members`: what gradients of wi, wo and their biases belong to, then accumulators, as `counts` says."""
        needs_x, needs_probs, *needed = ctx.needs_input_grad[_PLAIN_ARGUMENTS:]
        live, start = [], 0
        for count in counts[:4]:
            live.append([at for at in range(count) if needed[start + at]])
            start += count
        for at, accums in enumerate((given.accum_wi, given.accum_wo)):
            if not (given.wi_leaves, given.wo_leaves)[at] and any(each is not None for each in accums):
                live[at] = [0]
        needs = MlpNeeds(needs_x, len(live[0]) > 0, len(live[1]) > 0, needs_probs, len(live[2]) > 0, len(live[3]) > 0)
        y, saved, names, ctx.facts = forward_and_saved(given, live, needs, out, replaced)
        _saved.tell(saved, names)
        ctx.save_for_backward(*saved)
        ctx.grad_input, ctx.for_leaf = grad_input, leaf is not None and leaf.is_leaf
        ctx.accumulators = (given.accum_wi, given.accum_wo)
        first, second = owners
        elsewhere = [bool(given.to_main_grad or accum) for accum in ctx.accumulators]
        wi_owners, wi_delayed = owners_of(given.wi_leaves or destinations_of(given.accum_wi), elsewhere[0], first)
        wo_owners, wo_delayed = owners_of(given.wo_leaves or destinations_of(given.accum_wo), elsewhere[1], second)
        ctx.owners, ctx.delayed = (wi_owners, wo_owners), (wi_delayed, wo_delayed)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of forward's arguments; the one of the result is dy [M, K]."""
        (dy,) = grad_outputs
        if is_compiling() or not torch.is_grad_enabled():
            return _backward(ctx, dy)
        sources = (dy, *ctx.saved_tensors)
        with torch.no_grad():
            found = _backward(ctx, dy)
        return once("grouped_mlp", found, sources)


def destinations_of(accumulators: Sequence[Tensor | None]) -> list[Tensor]:
    """Stands for the weights where these are quantised and have no master."""
    return [each for each in accumulators if each is not None]


def _product_facts(
    given: Arguments, needs: MlpNeeds, live: Sequence[Sequence[int]], replaced: Replaced
) -> tuple[ProductFacts, ProductFacts]:
    checked, (x, wi, wo, probs, wi_bias, wo_bias) = given.checked, given.checked.dtypes

    def product(at: int, leaves: list[Tensor], biases: list[Tensor], own: tuple[torch.dtype | None, ...]) -> Any:
        rows, weight, bias, scale = own
        return product_facts(
            checked.products[at].text,
            (rows, leaves[0].dtype if leaves else weight, bias, scale),
            (checked.specs.x, checked.hidden)[at].shape[1],
            (max(1, len(leaves)), len(biases), 0),
            (not leaves or leaves[0].dim() == 3, len(biases) > 0 and biases[0].dim() == 2),
            (tuple(live[at]), tuple(live[2 + at])),
            needs.x and at == 0,
            given.to_main_grad,
            replaced[at],
            (NAMES.wi, NAMES.wo)[at],
        )

    scale = None if wo_bias is None else probs
    return (
        product(0, given.wi_leaves, given.wi_bias, (x, wi, wi_bias, None)),
        product(1, given.wo_leaves, given.wo_bias, (x, wo, wo_bias, scale)),
    )


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dy = dy.contiguous()
    check_gradient(dy, ctx.grad_input, *ctx.accumulators)
    facts: Facts = ctx.facts
    tensors = list(ctx.saved_tensors)
    if not is_compiling():
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained: rows go as soon as nothing reads them
    dp, work = launchers(facts, tensors, dy)
    first, second = mlp_gradients(
        facts.products, work, ctx.owners, ctx.accumulators, ctx.grad_input, ctx.delayed, for_leaf=ctx.for_leaf
    )
    return (
        *[None] * _PLAIN_ARGUMENTS,
        first.x,
        dp,
        *first.weights,
        *second.weights,
        *first.biases,
        *second.biases,
        *[None] * (len(ctx.accumulators[0]) + len(ctx.accumulators[1])),
    )


def _with_other(operand: Any) -> Stored:
    """As `arrays_of`, with both forms of a quantised operand."""
    if not isinstance(operand, QTensor) or operand.other is None:
        return arrays_of(operand)
    return lines_of([operand, operand.other])
