"""The experts' MLP on quantised operands, and recipes that quantise: what `grouped_mlp` does with them.

As with the linear operation (`stored`), forms are made by the operator `store`, each tensor in one pass, and what is
kept for backward is what backward reads.

Letters: G groups, M rows, K hidden size of the model, F expert width, W columns of the hidden rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core import gradients, linear_spec, scaling
from grouped_core import mlp as rules
from grouped_core.formats import Format, QTensor
from grouped_core.gradients import Needs
from grouped_core.linear_spec import Linear
from grouped_core.mlp_spec import NO_NEEDS, Kept, Mlp, MlpNeeds, MlpSpecs, check, kept, needs_dh, needs_dz
from grouped_core.plans import Planner
from grouped_core.products import in_form, operand_spec
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.sizes import unwrap
from torch_bridge import _graph, _library, _mlp_arguments, _mlp_library, _products, _saved, _stored, _stored_mlp
from torch_bridge._arguments import accumulators_of, check_apart, refuse_transforms
from torch_bridge._mlp_library import NAMES
from torch_bridge._products import Launcher, Owner, ProductFacts, mlp_gradients, once, owners_of
from torch_bridge._run import TORCH_DTYPES, fixed_spec, rows_spec, settle_rows
from torch_bridge._stored import Stored, arrays_of
from torch_bridge.params import check_operand, members_of
from torch_bridge.quantize import merge_amax
from torch_bridge.sizes import prepare_sizes
from torch_bridge.stored import (
    Cache,
    check_buffers,
    forms_of,
    is_stored,
    launcher,
    listed,
    packed_spec,
    parts_of,
    taken,
    weight_forms,
)


def is_stored_mlp(x: Any, wi: Any, wo: Any, recipe: Any) -> bool:
    """Whether an operand is quantised, or the recipe quantises one."""
    return is_stored(x, wi, recipe) or is_stored(None, wo, None)


Owners = tuple[Owner | None, Owner | None]
"""A module's side of both products."""

Replaced = tuple[tuple[bool, ...] | None, tuple[bool, ...] | None]
"""Of the weights of both products, whether each gradient replaces what is there; None: ask the Parameters."""


class Arguments(NamedTuple):
    """What a user passed, checked."""

    x: Any  # tensors, lists of one a group, or QTensors
    wi: Any
    wo: Any
    sizes: Tensor
    probs: Tensor | None
    wi_bias: list[Tensor]
    wo_bias: list[Tensor]
    op: Mlp
    text: str
    bounds: tuple[BoundRecipe, BoundRecipe]  # of the products: the state of each has the roles x, w and dy
    specs: MlpSpecs
    leaf: Tensor | None  # what the gradient of x belongs to
    wi_leaves: list[Tensor]
    wo_leaves: list[Tensor]
    to_main_grad: bool
    accum_wi: Sequence[Tensor | None]
    accum_wo: Sequence[Tensor | None]
    caches: tuple[Cache | None, Cache | None] = (None, None)  # of a layer's weights

    def differentiates(self) -> bool:
        """Whether anybody needs a gradient."""
        leaves = (self.leaf, self.probs, *self.wi_leaves, *self.wo_leaves, *self.wi_bias, *self.wo_bias)
        needed = any(each is not None and each.requires_grad for each in leaves)
        return torch.is_grad_enabled() and (needed or bool(self.accum_wi) or bool(self.accum_wo))


def check_arguments(
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
) -> Arguments:
    """The arguments of `grouped_mlp`; raises what it raises."""
    refuse_transforms("grouped_mlp", x, wi, wo, probs, wi_bias, wo_bias)
    pair = recipe if isinstance(recipe, tuple) else None  # layers that have a state each
    bound = pair[0] if pair else linear_spec.recipe_option(recipe)
    sizes, rows_hint = unwrap(group_sizes)
    paired = _mlp_arguments.is_pair(wi)
    text = _mlp_arguments.text_of(
        rhs_transposed, activation, bound.recipe, residuals, rows_hint, implementation, paired
    )
    op = _mlp_library.decode(text)
    leaf, rows = taken(x)
    (wi_leaves, first), (wo_leaves, second) = taken(wi), taken(wo)
    home = rows.values if isinstance(rows, QTensor) else rows
    check_operand(NAMES.x, home, home)
    sizes, _ = prepare_sizes(sizes, home, linear_spec.Names(NAMES.x, NAMES.wi))
    for name, operand in ((NAMES.x, rows), (NAMES.wi, first), (NAMES.wo, second)):
        if isinstance(operand, QTensor):
            for part in parts_of(operand):
                check_operand(name, part, home)
        elif name != NAMES.x and not paired:
            members_of(name, operand, 3, home)
    if probs is not None:
        check_operand(NAMES.probs, probs, home)
    for name, operand in ((NAMES.wi_bias, wi_bias), (NAMES.wo_bias, wo_bias)):
        if operand is not None:
            members_of(name, operand, 2, home)
    wi_members = first if isinstance(first, QTensor) else listed(first)
    wo_members = second if isinstance(second, QTensor) else listed(second)
    biases = [[] if each is None else listed(each) for each in (wi_bias, wo_bias)]
    bias_specs = [packed_spec(each, 2) if each else None for each in biases]
    wi_spec: Any = packed_spec(wi_members)
    if paired:  # which the check refuses
        wi_spec = operand_spec(Planner(), in_form(op.fc1(), tuple(map(fixed_spec, listed(wi)))))
    specs = MlpSpecs(packed_spec(rows, 0), wi_spec, packed_spec(wo_members), packed_spec(probs, 0), *bias_specs)
    check(op, *specs[:3], fixed_spec(sizes), *specs[3:])
    bounds = pair or _of_products(bound, specs.wo.shape[0])
    for each in bounds:
        scaling.check_bound(each, specs.wo.shape[0])
    leaves = [[] if each is None else listed(each) for each in (wi_leaves, wo_leaves)]
    accums: list[Sequence[Tensor | None]] = [(), ()]
    if wgrad_accum is not None and wgrad_accum != "main_grad":
        if not isinstance(wgrad_accum, (tuple, list)) or len(wgrad_accum) != 2:
            raise ValueError(
                f"`{NAMES.accum}`: {wgrad_accum!r}, expected None, 'main_grad' or a pair, of `{NAMES.wi}` and of "
                f"`{NAMES.wo}`; put None where a weight has no accumulator."
            )
        for at, (each, members, name) in enumerate(zip(wgrad_accum, leaves, (NAMES.wi, NAMES.wo), strict=True)):
            if each is not None:
                accums[at] = accumulators_of(each, members, f"{NAMES.accum}[{at}]", name)
        if not torch.compiler.is_compiling():
            written = [(f"{NAMES.accum}[{at}]", each) for at, some in enumerate(accums) for each in some]
            check_apart(written, [(NAMES.x, home), (NAMES.sizes, sizes), (NAMES.probs, probs)])
    to_main_grad = isinstance(wgrad_accum, str)
    operands = (rows, wi_members, wo_members, sizes, probs, biases[0], biases[1])
    own = (op, text, bounds, specs, leaf, leaves[0], leaves[1])
    return Arguments(*operands, *own, to_main_grad, accums[0], accums[1])


def _of_products(bound: BoundRecipe, groups: int) -> tuple[BoundRecipe, BoundRecipe]:
    """What each product has of what is bound to both; states are views."""
    scaling.check_bound(bound, groups, products=2)
    state, roles = bound.state, len(scaling.ROLES)
    if state is None:
        return bound, bound
    first, second = (
        dataclasses.replace(state, scale=state.scale[part], history=state.history[part], top=state.top[part])
        for part in (slice(roles), slice(roles, None))
    )
    return dataclasses.replace(bound, state=first), dataclasses.replace(bound, state=second)


def linear_of(given: Arguments, at: int) -> tuple[Linear, Recipe, str]:
    """The first or second product: the operation, its recipe in force, and its text with that recipe."""
    weighted = given.specs.wo_bias is not None and given.specs.probs is not None
    op = given.op.fc1() if at == 0 else given.op.fc2(weighted)
    rows = given.specs.x if at == 0 else hidden_spec(given)
    recipe = op.resolve(rows, given.specs.wi if at == 0 else given.specs.wo)
    text = _library.encode(op.transposed, recipe, op.scale_bias, op.rows_hint, op.implementation)
    return op, recipe, text


def hidden_spec(given: Arguments) -> Any:
    """Spec of the activated rows."""
    width = given.specs.wo.shape[given.op.fc2().weight_axes()[0]]
    return linear_spec.ArraySpec((given.specs.x.shape[0], width), given.specs.x.dtype)


class Facts(NamedTuple):
    """What forward tells backward beside tensors."""

    given: Arguments  # without operands
    needs: MlpNeeds
    products: tuple[ProductFacts, ProductFacts]
    texts: tuple[str, ...]  # of the forms of x, z, wi and wo
    counts: tuple[int, ...]  # saved tensors of x, z, wi, wo, wi_bias, wo_bias
    probs_dtype: torch.dtype | None


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
    arguments = (x, wi, wo, group_sizes, rhs_transposed, activation, probs, wi_bias, wo_bias, recipe, residuals)
    if not torch.compiler.is_compiling():
        given = check_arguments(*arguments, wgrad_accum, implementation)
        return mlp(given._replace(caches=caches), out, grad_input, owners)
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
    members = (given.wi_leaves or [None], given.wo_leaves or [None], given.wi_bias, given.wo_bias)
    counts = tuple(len(each) for each in (*members, given.accum_wi, given.accum_wo))
    flat = [each for one in (*members, given.accum_wi, given.accum_wo) for each in one]
    return _StoredMlp.apply(given, counts, owners, replaced, out, grad_input, given.leaf, given.probs, *flat)


def check_results(given: Arguments, out: Tensor | None, grad_input: Tensor | None = None) -> None:
    """BUF-2."""
    operands = (given.x, given.wi, given.wo, given.sizes, given.probs, given.wi_bias, given.wo_bias)
    check_buffers(out, grad_input, given.sizes, given.leaf, given.specs.x, operands)
    if out is not None:
        wanted = linear_spec.ArraySpec(given.specs.x.shape, given.specs.x.dtype)
        linear_spec.check_buffer(NAMES.out, rows_spec(out), wanted)


_PLAIN_ARGUMENTS = 6  # of `_StoredMlp` that have no gradient and stand first


class _Forward(NamedTuple):
    y: Tensor
    x: Stored
    h: Tensor | None
    z: Stored
    wi: Stored
    wo: Stored
    keep: Kept


def _none() -> Stored:
    return Stored([])


def _forward(given: Arguments, needs: MlpNeeds, out: Tensor | None) -> _Forward:
    """y and what backward reads, as `grouped_core.mlp.mlp` has it."""
    op, probs = given.op, given.probs
    keep = kept(op, needs, probs is not None, bool(given.wi_bias), bool(given.wo_bias))
    again = op.residuals.policy == "save_input"
    asked = Needs(needs.x and not again, needs.wi and not again, False, False)
    training = any(needs)
    x, wi = _operands(given, 0, given.x, given.wi, asked, training)
    asked = Needs(needs_dz(needs), keep.z, False, False)
    recipe = linear_of(given, 1)[1]
    activated = _stored_mlp.hidden(
        *(x[0], wi[0], given.sizes, probs, given.wi_bias, given.text),
        keep=keep.h,
        spec=hidden_spec(given),
        wanted=_in_one_pass(op, rules.activated_row_forms(op, recipe, keep.z)),
        encode=scaling.extras(given.bounds[1]).x,
    )
    rows, wo = _operands(given, 1, activated.z, given.wo, asked, training)
    if training:
        merge_amax(given.bounds[1], (activated.amax, None, None))
    scale = probs if given.wo_bias and probs is not None else None
    text = linear_of(given, 1)[2]
    operands = (rows[0].tensors, wo[0].tensors, given.sizes, given.wo_bias, scale, text, rows[0].text, wo[0].text)
    if out is None:
        y = _stored.linear(*operands)
    else:
        _stored.linear_into(*operands, out)
        y = out.detach()
    return _Forward(
        y,
        x[1] if keep.x else _none(),
        activated.h,
        rows[1] if keep.z else _none(),
        wi[1] if keep.wi else _none(),
        wo[1] if keep.wo else _none(),
        keep,
    )


def _in_one_pass(op: Mlp, wanted: Sequence[tuple[int, Format]]) -> tuple[tuple[int, Format], ...]:
    """`wanted`, where the activation's own pass stores it; else nothing."""
    return tuple(wanted) if rules.stored_within(op, wanted) else ()


def _operands(
    given: Arguments, at: int, rows: Any, weight: Any, needs: Needs, training: bool
) -> tuple[tuple[Stored, Stored], tuple[Stored, Stored]]:
    """Rows and weight of a product: (as forward reads them, as backward does); in training magnitudes are merged."""
    op, recipe, _ = linear_of(given, at)
    bound = given.bounds[at]
    k_axis, n_axis = op.weight_axes()
    keep_x, keep_w = gradients.keeps_forms(op, recipe, needs, False)
    x_wanted = gradients.row_forms(recipe, keep_x)
    w_wanted = [(k_axis, recipe.forward[1]), *([(n_axis, recipe.dgrad[1])] if keep_w else [])]
    x_forms, amax_x = forms_of(rows, x_wanted, given.sizes, scaling.extras(bound).x, recipe)
    w_forms = weight_forms(given.caches[at], weight, w_wanted, bound, recipe, training=training)
    if training:
        merge_amax(bound, (amax_x, None, None))
    return (
        (arrays_of(x_forms[0]), arrays_of(x_forms[-1]) if keep_x else _with_other(rows)),
        (arrays_of(w_forms[0]), arrays_of(w_forms[-1]) if keep_w else _with_other(weight)),
    )


def forward_and_saved(
    given: Arguments, live: Sequence[Sequence[int]], needs: MlpNeeds, out: Tensor | None, replaced: Replaced
) -> tuple[Tensor, list[Tensor | None], list[str], Facts]:
    """(y, the tensors that backward reads, names of the first of them, what it has to know).

    Args:
        live: members that need gradients, of wi, wo and their biases. replaced: as of `mlp`.
    """
    found = _forward(given, needs, out)
    keep, probs = found.keep, given.probs
    biases = (given.wi_bias if keep.wi_bias else [], given.wo_bias if keep.wo_bias else [])
    rows = (found.x, found.z)
    names = [*_names(_saved.ROWS, found.x), _saved.HIDDEN, *_names(_saved.ACTIVATED, found.z)]
    saved = [*found.x.tensors, found.h, *found.z.tensors]
    saved += [given.sizes, probs if keep.probs else None, given.bounds[0].key]
    saved += [*found.wi.tensors, *found.wo.tensors, *biases[0], *biases[1]]
    quiet: dict[str, Any] = dict.fromkeys(("x", "wi", "wo", "probs", "leaf"))
    quiet |= {"wi_leaves": [], "wo_leaves": [], "wi_bias": [], "wo_bias": [], "accum_wi": (), "accum_wo": ()}
    facts = Facts(
        given._replace(**quiet, caches=(None, None)),
        needs,
        _product_facts(given, needs, live, replaced),
        tuple(form.text for form in (*rows, found.wi, found.wo)),
        tuple(len(each.tensors) for each in (*rows, found.wi, found.wo)) + tuple(map(len, biases)),
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
        needs = MlpNeeds(needs_x, bool(live[0]), bool(live[1]), needs_probs, bool(live[2]), bool(live[3]))
        y, saved, names, ctx.facts = forward_and_saved(given, live, needs, out, replaced)
        _saved.tell(saved, names)
        ctx.save_for_backward(*saved)
        ctx.grad_input, ctx.accumulators = grad_input, (given.accum_wi, given.accum_wo)
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
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return _backward(ctx, dy)
        sources = (dy, *ctx.saved_tensors)
        with torch.no_grad():
            found = _backward(ctx, dy)
        return once("grouped_mlp", found, sources)


def destinations_of(accumulators: Sequence[Tensor | None]) -> list[Tensor]:
    """Stands for the weights where these are quantised and have no master."""
    return [each for each in accumulators if each is not None]


def _names(name: str, form: Stored) -> list[str]:
    if not form.text:
        return [name] * len(form.tensors)
    parts = "".join(_stored.described(line)[4] for line in form.text.split("\n"))
    return [name + ("_q" if part == "v" else "_scale") for part in parts]


def _product_facts(
    given: Arguments, needs: MlpNeeds, live: Sequence[Sequence[int]], replaced: Replaced
) -> tuple[ProductFacts, ProductFacts]:
    weighted = bool(given.wo_bias) and given.probs is not None

    def product(at: int) -> ProductFacts:
        leaves, biases = (given.wi_leaves, given.wi_bias) if at == 0 else (given.wo_leaves, given.wo_bias)
        spec = (given.specs.x, given.specs.wi) if at == 0 else (hidden_spec(given), given.specs.wo)
        weight = fixed_spec(leaves[0]).dtype if leaves else spec[1].dtype
        dtypes = [spec[0].dtype, weight, biases and fixed_spec(biases[0]).dtype]
        dtypes.append(fixed_spec(given.probs).dtype if at == 1 and weighted and given.probs is not None else None)
        return ProductFacts(
            linear_of(given, at)[2],
            dtypes=",".join(each or "-" for each in dtypes),
            k=spec[0].shape[1],
            counts=(max(1, len(leaves)), len(biases)),
            packed=(not leaves or leaves[0].dim() == 3, bool(biases) and biases[0].dim() == 2),
            needs=Needs(needs.x and at == 0, bool(live[at]), bool(live[2 + at]), False),
            live=tuple(live[at]),
            live_biases=tuple(live[2 + at]),
            kept_weights=0,
            flags=given.to_main_grad,
            weight_name=(NAMES.wi, NAMES.wo)[at],
            overwrite=replaced[at],
        )

    return product(0), product(1)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    facts: Facts = ctx.facts
    tensors = list(ctx.saved_tensors)
    if not torch.compiler.is_compiling():
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained: rows go as soon as nothing reads them
    dp, work = launchers(facts, tensors, dy.contiguous())
    first, second = mlp_gradients(facts.products, work, ctx.owners, ctx.accumulators, ctx.grad_input, ctx.delayed)
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


def launchers(
    facts: Facts, tensors: list[Any], dy: Tensor | QTensor[Tensor]
) -> tuple[Tensor | None, list[Launcher | None]]:
    """The gradient of the probabilities, and what is left of each product once that at the hidden rows is there.

    Args:
        tensors: as `forward_and_saved` gave them; they are taken out of the list.
    """
    needs, given = facts.needs, facts.given
    counts = list(facts.counts)

    def take(count: int) -> list[Tensor]:
        part = tensors[:count]
        del tensors[:count]
        return part

    x = Stored(take(counts[0]), facts.texts[0])
    (h,) = take(1)
    z = Stored(take(counts[1]), facts.texts[1])
    sizes, probs, key = take(3)
    wi, wo = (Stored(take(counts[2 + at]), facts.texts[2 + at]) for at in (0, 1))
    wi_bias, wo_bias = take(counts[4]), take(counts[5])
    rows = dy.shape[0]
    one, two = (dataclasses.replace(each, key=key) for each in given.bounds)
    given = given._replace(sizes=sizes, bounds=(one, two))
    extras = (scaling.extras(one), scaling.extras(two))
    (first, own, _), (second, recipe, _) = linear_of(given, 0), linear_of(given, 1)
    dgrad = (first.weight_axes()[1], own.dgrad[1])
    plain_z: Any = None
    if (needs_dz(needs) and h is None) or (not needs_dz(needs) and needs.wo and not z.tensors):
        (x_read, _), (wi_read, _) = _again(given, x, wi, rows)
        plain_z, h, _ = _stored_mlp.hidden(
            *(x_read, wi_read, sizes, probs, wi_bias, given.text), keep=needs_dz(needs), spec=hidden_spec(given)
        )
    grads = _grad_forms(given, 1, dy, needs_dz(needs), needs.wo, recipe, 0)
    if isinstance(dy, QTensor):  # whose values the biases alone read
        read = needs.wo_bias or (needs.probs and wo_bias)
        dy = (
            _stored.dequantize(dy, sizes, dy.dtype)
            if read
            else dy.values.new_empty((rows, 0), dtype=TORCH_DTYPES[dy.dtype])
        )
    dp = dh = None
    hidden: tuple[Stored, Stored] | None = None
    if h is not None:
        wanted = _in_one_pass(given.op, rules.grad_row_forms(own, needs)) if needs_dh(needs) else ()
        plain = needs_dh(needs) and (not wanted or needs.wi_bias)
        letters = _mlp_library.wanted(plain, needs.wo and plain_z is None and not z.tensors, needs.probs)
        found = _stored_mlp.hidden_grads(
            *(h, wo, sizes, probs, wo_bias, dy, grads[0], given.text, letters),
            wanted=wanted,
            encode=extras[0].dy,
            key=key,
        )
        dh, dp = found.dh, found.dp
        plain_z = found.z if plain_z is None else plain_z
        if wanted:
            merge_amax(one, (None, None, found.forms.amax))
            hidden = _by_axis(wanted, found.forms)
            if dh is None:  # nobody reads it as it is
                dh = h.new_empty((h.shape[0], 0))
        dp = dp if dp is None or facts.probs_dtype is None else dp.to(facts.probs_dtype)
    h = None
    if needs.wo and not z.tensors:
        forms, _ = forms_of(plain_z, [(0, recipe.wgrad[0])], sizes, extras[1].x, recipe)
        z, plain_z = arrays_of(forms[0]), None
    one_facts, two_facts = facts.products
    work: list[Launcher | None] = [None, None]
    if any(one_facts.needs):
        made = hidden or _grad_forms(given, 0, dh, needs.x, needs.wi, own, 1)
        forms = [form for form in made if form.text]
        left, turned = x, wi
        if needs.wi and x.tensors and not own.wgrad[0].plain and not _is_cross(x):
            cross, _ = forms_of(_whole(x, rows), [(0, own.wgrad[0])], sizes, extras[0].x, own)
            left = arrays_of(cross[0])
        if needs.x:
            across, _ = forms_of(_whole(wi, rows), [dgrad], None, extras[0].w, own)
            turned = arrays_of(across[0])
        assert dh is not None, "gradients of the first product are needed"
        work[0] = launcher(left, turned, sizes, wi_bias, None, dh, forms, key, extras[0].x, one_facts)
    if any(two_facts.needs):
        forms = [grads[1]] if grads[1].text else []
        scale = probs if second.scale_bias else None
        work[1] = launcher(z, _none(), sizes, wo_bias, scale, dy, forms, key, extras[1].x, two_facts)
    return dp, work


def _is_cross(form: Stored) -> bool:
    return bool(form.text) and "\n" not in form.text and _stored.described(form.text)[1] == 0


def _with_other(operand: Any) -> Stored:
    """As `arrays_of`, with both forms of a quantised operand: a line of text for each."""
    first = arrays_of(operand)
    if not isinstance(operand, QTensor) or operand.other is None:
        return first
    second = arrays_of(operand.other)
    return Stored([*first.tensors, *second.tensors], f"{first.text}\n{second.text}")


def _whole(stored: Stored, rows: int) -> Any:
    """The operand that `arrays_of` or `_with_other` took apart."""
    first, _, second = stored.text.partition("\n")
    if second:
        count = len(_stored.described(first)[4])
        other = _stored.restored(Stored(stored.tensors[count:], second), rows)
        return dataclasses.replace(_stored.restored(Stored(stored.tensors[:count], first), rows), other=other)
    if first:
        return _stored.restored(stored, rows)
    return stored.tensors[0] if len(stored.tensors) == 1 else stored.tensors


def _again(given: Arguments, x: Stored, wi: Stored, rows: int) -> Any:
    """x and wi once more in the forms of forward; no magnitudes are merged, for forward did."""
    op, recipe, _ = linear_of(given, 0)
    extras = scaling.extras(given.bounds[0])
    x_forms, _ = forms_of(_whole(x, rows), [(1, recipe.forward[0])], given.sizes, extras.x, recipe)
    w_forms, _ = forms_of(_whole(wi, rows), [(op.weight_axes()[0], recipe.forward[1])], None, extras.w, recipe)
    return (arrays_of(x_forms[0]), x), (arrays_of(w_forms[0]), wi)


def _grad_forms(
    given: Arguments, at: int, dy: Any, through: bool, weights: bool, recipe: Recipe, stream: int
) -> tuple[Stored, Stored]:
    """dy along its features and along its rows, each if wanted and quantised, from one pass; magnitudes are merged."""
    if isinstance(dy, QTensor):
        cells = [*([(1, recipe.dgrad[0])] if through else []), *([(0, recipe.wgrad[1])] if weights else [])]
        forms, _ = forms_of(dy, cells, given.sizes, None, recipe)
        return _by_axis(cells, _stored.Forms(forms, None))
    wanted: list[tuple[int, Format]] = []
    if through and not recipe.dgrad[0].plain:
        wanted.append((1, recipe.dgrad[0]))
    if weights and not recipe.wgrad[1].plain:
        wanted.append((0, recipe.wgrad[1]))
    if not wanted:
        return Stored([]), Stored([])
    bound = given.bounds[at]
    encode = scaling.extras(bound).dy
    found = _stored.store([dy], tuple(wanted), given.sizes, encode=encode, key=bound.key, stream=stream)
    merge_amax(bound, (None, None, found.amax))
    return _by_axis(wanted, found)


def _by_axis(wanted: Sequence[tuple[int, Format]], found: _stored.Forms) -> tuple[Stored, Stored]:
    """The forms along features and along rows; without arrays where there is none."""
    forms = {axis: arrays_of(form) for (axis, _), form in zip(wanted, found.forms, strict=True)}
    return forms.get(1, Stored([])), forms.get(0, Stored([]))
