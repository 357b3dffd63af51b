"""The linear operation on quantised operands, and recipes that quantise: what `grouped_linear` does with them.

Forms are made by the operator `store`, each tensor in one pass, and the products read them: forward keeps for backward
what backward reads, quantised where the recipe says so.

Letters: G groups, M rows, K in, N out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core import gradients
from grouped_core.formats import QTensor
from grouped_core.gradients import NO_NEEDS, Needs
from grouped_core.linear_spec import Linear
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.storing import check_requantize, given_form, given_forms, unrotated
from torch_bridge import _graph, _library, _products, _saved, _stored, _stored_linear
from torch_bridge._arguments import Members, check_gradient
from torch_bridge._compiling import is_compiling
from torch_bridge._library import NAMES
from torch_bridge._products import (
    Launcher,
    Owner,
    ProductFacts,
    check_listed_once,
    facts_of,
    once,
    owners_of,
    product_gradients,
)
from torch_bridge._run import settle_rows
from torch_bridge._stored import NOTHING, Stored, Wanted, arrays_of
from torch_bridge._stored_arguments import Arguments, Cache, check_arguments, check_results, listed, taken
from torch_bridge.quantize import DY, WEIGHT, Use, X, with_multipliers


def linear(
    x: Any,
    weight: Any,
    group_sizes: Any,
    rhs_transposed: bool,
    bias: Members | None,
    row_scale: Tensor | None,
    scale_bias: bool,
    recipe: Recipe | BoundRecipe | None,
    wgrad_accum: Any,
    implementation: Any,
    out: Tensor | None,
    grad_input: Tensor | None,
    owner: Owner | None = None,
    cache: Cache | None = None,
) -> Tensor:
    """`ops.grouped_linear` where something is quantised; arguments and errors are its.

    Args:
        owner, cache: of a layer.
    """
    arguments = (x, weight, group_sizes, rhs_transposed, bias, row_scale, scale_bias, recipe)
    if not is_compiling():
        given = check_arguments(*arguments, wgrad_accum, implementation, cache)
        return grouped_linear(given, out, grad_input, owner)
    master = taken(weight)[0]
    parameters = owner.parameters if owner is not None else [] if master is None else listed(master)
    if cache is not None or _products.stays_outside(owner, parameters, isinstance(wgrad_accum, str)):
        return _uncompiled(*arguments, wgrad_accum, implementation, out, grad_input, owner, cache)
    accum, replaced = _products.accumulators(wgrad_accum, parameters, isinstance(master, Tensor), NAMES.w)
    return _node(*_graph.taken_apart([*arguments, accum, implementation]), out, grad_input, replaced)


_uncompiled: Any = torch.compiler.disable(linear, reason=_products.OUTSIDE)


@torch.compiler.allow_in_graph
def _node(*arguments: Any) -> Tensor:
    """`linear` as one node of a graph; `arguments` as `_graph` takes them apart, up to `implementation`."""
    *given, out, grad_input, replaced = arguments
    settle_rows(given[0], given[5], out, grad_input)
    return grouped_linear(check_arguments(*_graph.together(given)), out, grad_input, None, replaced)


def grouped_linear(
    given: Arguments,
    out: Tensor | None,
    grad_input: Tensor | None,
    owner: Owner | None,
    replaced: tuple[bool, ...] | None = None,
) -> Tensor:
    """The result, with gradients where somebody needs them.

    Args:
        replaced: of each weight, whether its gradient replaces what the accumulator holds; None: ask the Parameters.
    """
    if out is not None or grad_input is not None:
        check_results(given, out, grad_input)
    if not given.differentiates():
        return _forward(given, NO_NEEDS, out)[0]
    check_listed_once((NAMES.w, given.leaves, owner, given.to_main_grad or len(given.accumulators) > 0))
    return _attach(given, out, grad_input, owner, replaced)


class _Plan(NamedTuple):
    """What forward does with x and weight, as far as it does not depend on arrays."""

    x: Wanted
    weight: Wanted
    keeps: tuple[bool, bool]  # whether backward reads x and weight in the last of these forms
    saved: Needs
    reads_values: bool  # of x, for the gradient of a row scale
    training: bool


@lru_cache(maxsize=1024)
def _plan(text: str, needs: Needs, has_bias: bool, has_scale: bool) -> _Plan:
    op, recipe = with_recipe(text)
    keeps = gradients.keeps_forms(op, recipe, needs, has_scale)
    saved = gradients.linear_saved(op, needs, has_bias, has_scale)
    values = gradients.reads_values(op, needs, has_scale)
    return _Plan(*forms_read(op, recipe, keeps), keeps, saved, values, any(needs))


def with_recipe(text: str) -> tuple[Linear, Recipe]:
    """The operation of a text that has a recipe, and that recipe."""
    op = _library.decode(text)
    assert op.recipe is not None, "texts of stored operands have one"
    return op, op.recipe


def forms_read(op: Linear, recipe: Recipe, keeps: tuple[bool, bool]) -> tuple[Wanted, Wanted]:
    """Forms of x and of the weight that forward reads, and where `keeps` says so those of backward."""
    k_axis, n_axis = op.weight_axes()
    weight: Wanted = ((k_axis, recipe.forward[1]), *([(n_axis, recipe.dgrad[1])] if keeps[1] else []))
    return tuple(gradients.row_forms(recipe, keeps[0])), weight


def forms_of(
    source: Any, wanted: Wanted, sizes: Tensor | None, encode: Tensor | None, recipe: Recipe, amax: Tensor | None = None
) -> list[Stored]:
    """An operand in the formats wanted, of which plain ones give the operand itself.

    Args:
        encode, amax: as of `_stored.store`.
    """
    if isinstance(source, QTensor):
        if (ready := given_forms(source, wanted)) is not None:
            return list(map(arrays_of, ready))
        check_requantize(source, wanted, recipe.requantize)
        source = _stored.dequantize(source, sizes, source.dtype)
    plain = arrays_of(source)
    stored = quantised(wanted)
    made = iter(_stored.store(plain.tensors, stored, sizes, encode=encode, amax=amax) if stored else ())
    return [plain if cell.plain else next(made) for _, cell in wanted]


@lru_cache(maxsize=1024)
def quantised(wanted: Wanted) -> Wanted:
    """The forms that are no plain ones."""
    return tuple((axis, cell) for axis, cell in wanted if not cell.plain)


def row_forms(x: Any, wanted: Wanted, sizes: Tensor, use: Use, recipe: Recipe, *, training: bool) -> list[Stored]:
    """Rows as forward reads them: in training in the formats wanted, and magnitudes are merged; else, where nobody
    wants more than the product, plain rows stay plain, and its operator stores them on the way.
    """
    if not training and not isinstance(x, QTensor):
        return [arrays_of(x)]
    encode, live = use.delayed(X, training=training)
    return forms_of(x, wanted, sizes, encode, recipe, live)


def weight_forms(
    cache: Cache | None, weight: Any, wanted: Wanted, use: Use, recipe: Recipe, *, training: bool
) -> list[Stored]:
    """As `row_forms`, of a weight; from the cache where there is one."""
    stored_outside = isinstance(weight, QTensor) or cache is not None
    if not training and not stored_outside:
        return [arrays_of(weight)]
    encode, live = use.delayed(WEIGHT, training=training)
    if cache is None or isinstance(weight, QTensor):
        return forms_of(weight, wanted, None, encode, recipe, live)
    stored = quantised(wanted)
    made = map(arrays_of, cache(weight, stored, encode, live, use.mark()) if stored else ())
    return [arrays_of(weight) if cell.plain else next(made) for _, cell in wanted]


def encode_of(use: Use, x: Stored, weight: Stored) -> tuple[Tensor | None, Tensor | None]:
    """Multipliers for operands that a product's operator stores on the way."""
    return None if x.text else use.delayed(X)[0], None if weight.text else use.delayed(WEIGHT)[0]


def names_of(name: str, form: Stored) -> list[str]:
    """Names of the arrays of an operand that is kept."""
    return _names_of(name, form.text) if form.text else [name] * len(form.tensors)


@lru_cache(maxsize=1024)
def _names_of(name: str, text: str) -> list[str]:
    parts = "".join(_stored.described(line)[4] for line in text.split("\n"))
    return [name + ("_q" if part == "v" else "_scale") for part in parts]


def _forward(given: Arguments, needs: Needs, out: Tensor | None) -> tuple[Tensor, Stored, Stored]:
    """(y, x and weight as backward reads them, without arrays where it does not)."""
    text, recipe, use = given.checked.text, given.checked.recipe, given.use
    plan = _plan(text, needs, len(given.biases) > 0, given.row_scale is not None)
    rows = row_forms(given.x, plan.x, given.sizes, use, recipe, training=plan.training)
    weights = weight_forms(given.cache, given.weight, plan.weight, use, recipe, training=plan.training)
    x, w = rows[0], weights[0]
    operands = (x.tensors, w.tensors, given.sizes, given.biases, given.row_scale, *encode_of(use, x, w))
    operands = (*operands, text, x.text, w.text)
    if out is None:
        y = _stored_linear.linear(*operands)
    else:
        _stored_linear.linear_into(*operands, out)
        y = out.detach()
    keep_x, keep_w = plan.keeps
    return (
        y,
        (rows[-1] if keep_x else _kept_rows(given.x, recipe, needs, plan.reads_values)) if plan.saved.x else NOTHING,
        (weights[-1] if keep_w else arrays_of(given.weight)) if plan.saved.w else NOTHING,
    )


def _kept_rows(x: Any, recipe: Recipe, needs: Needs, reads_values: bool) -> Stored:
    """x as it came, of which the gradient of a row scale reads the values, or backward stores it; of a quantised one
    the forms that backward reads.
    """
    if not isinstance(x, QTensor):
        return arrays_of(x)
    of_weight = given_form(x, 0, recipe.wgrad[0]) if needs.w else None
    forms = [unrotated(x)] if of_weight is None or reads_values else []
    return lines_of([*forms, *([] if of_weight is None else [of_weight])])


def lines_of(forms: Sequence[QTensor[Tensor]]) -> Stored:
    """Forms of one operand: a line of text for each."""
    parts = list(map(arrays_of, forms))
    return Stored([tensor for part in parts for tensor in part.tensors], "\n".join(part.text for part in parts))


def _attach(
    given: Arguments,
    out: Tensor | None,
    grad_input: Tensor | None,
    owner: Owner | None,
    replaced: tuple[bool, ...] | None,
) -> Tensor:
    weights = given.leaves
    packed = (not weights or weights[0].dim() == 3, len(given.biases) > 0 and given.biases[0].dim() == 2)
    counts = (max(1, len(weights)), len(given.biases))
    static = (given.checked.text, counts, packed, given.to_main_grad, replaced)
    quiet = weights or [stand_in(given, given.accumulators)]
    return _StoredLinear.apply(
        *(static, owner, given, out, grad_input),
        *(given.leaf, given.row_scale, *quiet, *given.biases, *given.accumulators),
    )


def stand_in(given: Any, accumulators: Sequence[Tensor | None]) -> Tensor | None:
    """Of a quantised weight without a master: what autograd sees of it where its accumulator alone wants a gradient.

    Args:
        given: arguments of a linear operation or of an MLP.

    Raises:
        NotImplementedError: in a graph of torch.compile, which has a backward for its own inputs alone.
    """
    if not accumulators or given.needed_by_inputs():
        return None
    if is_compiling():
        raise NotImplementedError(
            f"`{NAMES.accum}` of a quantised weight without a master, under torch.compile, and nothing else needs a "
            "gradient: expected an operand with requires_grad; pass the weight as "
            "straight_through(master, weight), or keep the call out of the graph."
        )
    return torch.empty(0, device=given.sizes.device, requires_grad=True)


_PLAIN_ARGUMENTS = 5  # of `_StoredLinear` that have no gradient and stand first


def launcher(
    x: Stored,
    weight: Stored,
    sizes: Tensor,
    biases: list[Tensor],
    row_scale: Tensor | None,
    dy: Tensor,
    forms: list[Stored],
    key: Tensor | None,
    encode: Tensor | None,
    facts: ProductFacts,
) -> Launcher:
    """Of stored operands.

    Args:
        forms: of dy, those that are quantised. encode: multipliers of x, where it is quantised once more.
    """
    cotangent = [dy, *(part for form in forms for part in form.tensors)]
    operands = (x.tensors, weight.tensors, sizes, biases, row_scale, cotangent, key, encode, facts.k, facts.text)
    texts = (x.text, weight.text, [form.text for form in forms], facts.dtypes)
    return Launcher((_stored_linear.linear_grads, _stored_linear.linear_grads_into), (*operands, *texts))


class _StoredLinear(torch.autograd.Function):
    """Gradients around the operators. What backward reads is saved, results never."""

    @staticmethod
    def forward(
        ctx: Any,
        static: Any,
        owner: Owner | None,
        given: Arguments,
        out: Tensor | None,
        grad_input: Tensor | None,
        leaf: Tensor | None,
        row_scale: Tensor | None,
        *members: Any,
    ) -> Tensor:
        """`members`: weights (or their masters, None where there is none), biases, destinations of weight gradients."""
        _, (first_bias, bias_count), _, to_main_grad, _ = static
        accumulators = members[first_bias + bias_count :]
        dtypes = given.checked.dtypes
        if isinstance(given.x, QTensor) or isinstance(given.weight, QTensor):  # which have masters, or none
            masters = (given.leaf, given.leaves[0] if given.leaves else None)
            own = [one if each is None else each.dtype for one, each in zip(dtypes, masters, strict=False)]
            dtypes = (*own, *dtypes[2:])
        needed = ctx.needs_input_grad
        if accumulators and members[0] is None:  # of a quantised weight without a master
            at = _PLAIN_ARGUMENTS + 2
            needed = (*needed[:at], accumulators[0] is not None, *needed[at + 1 :])
        kept, needs, facts = facts_of(static, dtypes, needed, _PLAIN_ARGUMENTS)
        needs = Needs(*needs)
        ctx.facts = ProductFacts(*facts, needs=needs, k=given.checked.specs[0].shape[1])
        if given.use.state is not None:
            given = given._replace(use=with_multipliers((given.use,))[0])
        y, x, weight = _forward(given, needs, out)
        key = given.use.key
        biases = given.biases if kept.bias else []
        saved = (*x.tensors, given.sizes, row_scale if kept.row_scale else None, *weight.tensors, *biases, key)
        _saved.tell(saved, names_of(_saved.ROWS, x))
        ctx.save_for_backward(*saved)
        ctx.counts = (len(x.tensors), len(weight.tensors))
        ctx.texts = (x.text, weight.text)
        ctx.use = given.use
        ctx.grad_input, ctx.for_leaf = grad_input, leaf is not None and leaf.is_leaf
        ctx.accumulators = accumulators
        weights = given.leaves or [each for each in accumulators if each is not None]
        ctx.owners, ctx.delayed = owners_of(weights, to_main_grad or len(accumulators) > 0, owner)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of forward's arguments; the one of the result is dy [M, N]."""
        (dy,) = grad_outputs
        if is_compiling() or not torch.is_grad_enabled():
            return _backward(ctx, dy)
        sources = (dy, *ctx.saved_tensors)
        with torch.no_grad():
            found = _backward(ctx, dy)
        return once("grouped_linear", found, sources)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    facts: ProductFacts = ctx.facts
    x_count, w_count = ctx.counts
    tensors = list(ctx.saved_tensors)
    x, weight = Stored(tensors[:x_count], ctx.texts[0]), None
    sizes, row_scale, *rest = tensors[x_count:]
    weight, biases, key = Stored(rest[:w_count], ctx.texts[1]), rest[w_count:-1], rest[-1]
    dy = dy.contiguous()
    check_gradient(dy, ctx.grad_input, ctx.accumulators)
    forms = _dy_forms(facts.text, dy, sizes, row_scale, facts.needs, ctx.use._replace(key=key))
    encode, live = ctx.use.delayed(X, training=True)
    x = _measured_rows(facts, x, sizes, encode, live)
    work = launcher(x, weight, sizes, biases, row_scale, dy, forms, key, encode, facts)
    found = product_gradients(
        facts, work, ctx.owners, ctx.accumulators, ctx.grad_input, ctx.delayed, for_leaf=ctx.for_leaf
    )
    results = (found.x, found.row_scale, *found.weights, *found.biases)
    return (*[None] * _PLAIN_ARGUMENTS, *results, *[None] * len(ctx.accumulators))


def _measured_rows(facts: ProductFacts, x: Stored, sizes: Tensor, encode: Tensor | None, live: Tensor | None) -> Stored:
    """Rows of which backward has to find the magnitudes, with the form that it found them with."""
    _, recipe = with_recipe(facts.text)
    if x.text or not (facts.needs.w and recipe.wgrad[0].delayed and gradients.measures_late(recipe, 0)):
        return x
    (form,) = _stored.store(x.tensors, ((0, recipe.wgrad[0]),), sizes, encode=encode, amax=live)
    return Stored([*x.tensors, *form.tensors], f"{x.text}\n{form.text}")


@lru_cache(maxsize=1024)
def _cotangent(text: str, needs: Needs, has_scale: bool) -> tuple[Wanted, Wanted]:
    """Forms of dy that backward reads, and of c dy where a row scale c multiplies rows."""
    op, recipe = with_recipe(text)
    scaled = has_scale and not op.scale_bias
    through_weight = needs.x or gradients.reads_values(op, needs, has_scale)
    dgrad = quantised(((1, recipe.dgrad[0]),)) if through_weight else ()
    wgrad = quantised(((0, recipe.wgrad[1]),)) if needs.w else ()
    return (dgrad, wgrad) if scaled else ((*dgrad, *wgrad), ())


def _dy_forms(text: str, dy: Tensor, sizes: Tensor, row_scale: Tensor | None, needs: Needs, use: Use) -> list[Stored]:
    """dy in the forms that the products of backward read, each source in one pass; magnitudes are merged."""
    encode, live = use.delayed(DY, training=True)
    own, scaled = _cotangent(text, needs, row_scale is not None or needs.row_scale)  # not kept for its own gradient
    made: list[Stored] = []
    if own:
        made += _stored.store([dy], own, sizes, encode=encode, amax=live, key=use.key)
    if scaled and row_scale is not None:  # rounded once from fp32, as `scale_rows` does
        rows = (dy.float() * row_scale.float()[:, None]).to(dy.dtype)
        made += _stored.store([rows], scaled, sizes, encode=encode, amax=live, key=use.key)
    return made
