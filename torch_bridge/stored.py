"""The linear operation on quantised operands, and recipes that quantise: what `grouped_linear` does with them.

Forms are made by the operator `store`, each tensor in one pass, and the products read them: forward keeps for backward
what backward reads, quantised where the recipe says so.

Letters: G groups, M rows, K in, N out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from grouped_core import gradients, linear_spec, scaling
from grouped_core.calls import ArraySpec, OperandSpec
from grouped_core.formats import Format, QTensor
from grouped_core.gradients import Needs
from grouped_core.linear_spec import Linear
from grouped_core.products import stored_spec
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.sizes import GroupSizes, unwrap
from grouped_core.storing import given_forms
from torch_bridge import _graph, _library, _products, _saved, _stored
from torch_bridge._arguments import (
    Members,
    accumulators_of,
    check_apart,
    check_writable,
    refuse_transforms,
    text_of,
)
from torch_bridge._library import NAMES
from torch_bridge._products import Launcher, Owner, ProductFacts, facts_of, once, owners_of, product_gradients
from torch_bridge._run import TORCH_DTYPES, fixed_spec, rows_spec, settle_rows
from torch_bridge._stored import Stored, Wanted, arrays_of
from torch_bridge.params import check_operand, members_of
from torch_bridge.quantize import StraightThrough, merge_amax
from torch_bridge.sizes import prepare_sizes


def is_stored(x: Any, weight: Any, recipe: Any) -> bool:
    """Whether an operand is quantised, or the recipe quantises one."""
    kinds = (QTensor, StraightThrough)
    if isinstance(x, kinds) or isinstance(weight, kinds):
        return True
    recipe = recipe.recipe if isinstance(recipe, BoundRecipe) else recipe
    return isinstance(recipe, Recipe) and recipe.quantized


class Cache(Protocol):
    """What keeps the forms of a layer's weight between forward passes."""

    def __call__(
        self, members: list[Tensor], wanted: Wanted, encode: Tensor | None, live: Tensor | None
    ) -> Sequence[QTensor[Tensor]]:
        """The forms wanted, all quantised; magnitudes of delayed scaling are merged into `live`."""
        ...


class Arguments(NamedTuple):
    """What a user passed, checked."""

    x: Tensor | QTensor[Tensor]
    weight: list[Tensor] | QTensor[Tensor]
    sizes: Tensor
    biases: list[Tensor]
    row_scale: Tensor | None
    op: Linear
    text: str
    bound: BoundRecipe
    leaf: Tensor | None  # what the gradient of x belongs to
    leaves: list[Tensor]  # what those of the weights belong to
    specs: tuple[OperandSpec, OperandSpec, ArraySpec | None, ArraySpec | None]
    to_main_grad: bool
    accumulators: Sequence[Tensor | None]
    cache: Cache | None = None  # of a layer's weight

    def differentiates(self) -> bool:
        """Whether anybody needs a gradient."""
        targets = (self.leaf, *self.leaves, *self.biases, self.row_scale)
        needed = any(each is not None and each.requires_grad for each in targets)
        return torch.is_grad_enabled() and (needed or any(each is not None for each in self.accumulators))

    @property
    def recipe(self) -> Recipe:
        """The recipe in force."""
        return self.op.resolve(*self.specs[:2])


def check_arguments(
    x: Tensor | QTensor[Tensor] | StraightThrough,
    weight: Members | QTensor[Tensor] | StraightThrough,
    group_sizes: Tensor | Sequence[int] | GroupSizes,
    rhs_transposed: bool,
    bias: Members | None,
    row_scale: Tensor | None,
    scale_bias: bool,
    recipe: Recipe | BoundRecipe | None,
    wgrad_accum: str | Tensor | Sequence[Tensor | None] | None,
    implementation: str | Sequence[str] | None,
) -> Arguments:
    """The arguments of `grouped_linear`; raises what it raises."""
    refuse_transforms("grouped_linear", x, weight, bias, row_scale)
    bound = linear_spec.recipe_option(recipe)
    sizes, rows_hint = unwrap(group_sizes)
    names = implementation_text(implementation)
    text = text_of(bool(rhs_transposed), bound.recipe, bool(scale_bias), rows_hint, names)
    leaf, rows = taken(x)
    leaves, weights = taken(weight)
    first = rows.values if isinstance(rows, QTensor) else rows
    for name, operand in ((NAMES.x, rows), (NAMES.w, weights)):
        if isinstance(operand, QTensor):
            for part in parts_of(operand):
                check_operand(name, part, first)
    if not isinstance(rows, QTensor):
        check_operand(NAMES.x, rows, first)
    sizes, _ = prepare_sizes(sizes, first, NAMES)
    if not isinstance(weights, QTensor):
        members_of(NAMES.w, weights, 3, first)
    if bias is not None:
        members_of(NAMES.bias, bias, 2, first)
    if row_scale is not None:
        check_operand(NAMES.row_scale, row_scale, first)
    members = weights if isinstance(weights, QTensor) else listed(weights)
    biases = [] if bias is None else listed(bias)
    specs = (
        packed_spec(rows, 0),
        packed_spec(members),
        None if bias is None else packed_spec(biases, 2),
        packed_spec(row_scale, 0),
    )
    op = _library.decode(text)
    linear_spec.check_linear(op, specs[0], specs[1], fixed_spec(sizes), *specs[2:])
    scaling.check_bound(bound, specs[1].shape[0])
    if op.recipe is None:  # operators are told what the operands, which they see in parts, stand for
        text = text_of(op.transposed, op.resolve(*specs[:2]), op.scale_bias, op.rows_hint, op.implementation)
        op = _library.decode(text)
    owners = [] if leaves is None else listed(leaves)
    accumulators: Sequence[Tensor | None] = ()
    if wgrad_accum is not None and wgrad_accum != "main_grad":
        if owners:
            accumulators = accumulators_of(wgrad_accum, owners)
        elif isinstance(wgrad_accum, Tensor):  # of a quantised weight without a master
            check_operand(NAMES.accum, wgrad_accum, first)
            linear_spec.check_accumulator(
                NAMES.accum, fixed_spec(wgrad_accum), ArraySpec(specs[1].shape, specs[1].dtype)
            )
            check_writable(NAMES.accum, wgrad_accum)
            accumulators = [wgrad_accum]
        if not torch.compiler.is_compiling():
            written = [(NAMES.accum, each) for each in accumulators]
            check_apart(written, [(NAMES.x, first), (NAMES.sizes, sizes), (NAMES.row_scale, row_scale)])
    to_main_grad = wgrad_accum == "main_grad" if isinstance(wgrad_accum, str) else False
    return Arguments(
        rows, members, sizes, biases, row_scale, op, text, bound, leaf, owners, specs, to_main_grad, accumulators
    )


def taken(operand: Any) -> tuple[Any, Any]:
    """(what the gradient belongs to, the operand itself)."""
    if isinstance(operand, StraightThrough):
        return operand.master, operand.q
    return (None if isinstance(operand, QTensor) else operand), operand


@torch.compiler.assume_constant_result
def implementation_text(implementation: Any) -> str:
    """`implementation=` as operators carry it."""
    return linear_spec.implementation_names(implementation)


def parts_of(q: QTensor[Any]) -> list[Tensor]:
    """The tensors of both forms."""
    own = [each for each in (q.values, q.scales, q.group_scales) if each is not None]
    return own if q.other is None else [*own, *parts_of(q.other)]


def listed(operand: Members) -> list[Tensor]:
    """One packed tensor, or one a group, as a list."""
    return [operand] if isinstance(operand, Tensor) else list(operand)


def packed_spec(operand: Any, packed_rank: int = 3) -> Any:
    """Spec of an operand, packed where it is a list; None for None.

    Args:
        packed_rank: axes of what is packed; 0: these are rows.
    """
    if operand is None:
        return None
    if isinstance(operand, QTensor):
        return stored_spec(operand, fixed_spec)
    if isinstance(operand, Tensor):
        return fixed_spec(operand) if packed_rank else rows_spec(operand)
    one = fixed_spec(operand[0])
    return one if len(one.shape) == packed_rank else ArraySpec((len(operand), *one.shape), one.dtype)


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
    if not torch.compiler.is_compiling():
        given = check_arguments(*arguments, wgrad_accum, implementation)
        return grouped_linear(given._replace(cache=cache), out, grad_input, owner)
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


def check_buffers(
    out: Tensor | None, grad_input: Tensor | None, sizes: Tensor, leaf: Tensor | None, x: OperandSpec, operands: Any
) -> None:
    """BUF-2; the shape and dtype of `out` are the operators'. `operands`: what is read, in any form."""
    buffers = ((NAMES.out, out), (NAMES.grad_input, grad_input))
    for name, buffer in buffers:
        if buffer is not None:
            check_operand(name, buffer, sizes)
            check_writable(name, buffer)
    if not torch.compiler.is_compiling():  # where there are no addresses yet
        read: list[Tensor] = []
        for each in operands:
            read += parts_of(each) if isinstance(each, QTensor) else [] if each is None else listed(each)
        check_apart(buffers, [("an operand", each) for each in read])
    if grad_input is None:
        return
    dtype = "bfloat16" if x.dtype.startswith("float8") else x.dtype
    linear_spec.check_buffer(NAMES.grad_input, rows_spec(grad_input), ArraySpec(x.shape, dtype))
    if leaf is None or not leaf.requires_grad:
        raise ValueError(
            f"`{NAMES.grad_input}`: given, but `x` needs no gradient; expected None, or an x with requires_grad; "
            "leave it out."
        )


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
        return _forward(given, Needs(False, False, False, False), out)[0]
    return _attach(given, out, grad_input, owner, replaced)


def check_results(given: Arguments, out: Tensor | None, grad_input: Tensor | None) -> None:
    """BUF-2."""
    operands = (given.x, given.weight, given.sizes, given.biases, given.row_scale)
    check_buffers(out, grad_input, given.sizes, given.leaf, given.specs[0], operands)


class _Kept(NamedTuple):
    """What forward leaves for backward."""

    x: Stored | None
    weight: Stored | None


def forms_of(source: Any, wanted: list[tuple[int, Format]], sizes: Tensor | None, encode: Tensor | None,
           recipe: Recipe) -> tuple[list[Any], Tensor | None]:  # fmt: skip
    """An operand in the formats wanted; plain formats give the operand itself."""
    if isinstance(source, QTensor):
        if (ready := given_forms(source, wanted)) is not None:
            return ready, None
        if recipe.requantize is None:
            raise ValueError(
                f"a quantised operand: {source.format.name} along axis {source.axis}, expected "
                f"{', '.join(f'{cell.name} along axis {axis}' for axis, cell in wanted)}, which a product reads; hand "
                "in that form too (`quantize` with both axes), pass the plain tensor, or a recipe with "
                "requantize='from_dequantized'."
            )
        source = _stored.dequantize(source, sizes, source.dtype)
    forms: list[Any] = [source] * len(wanted)
    stored: Wanted = tuple((axis, cell) for axis, cell in wanted if not cell.plain)
    if not stored:
        return forms, None
    members = [source] if isinstance(source, Tensor) else source
    found = _stored.store(members, stored, sizes, encode=encode)
    made = iter(found.forms)
    return [source if cell.plain else next(made) for _, cell in wanted], found.amax


def weight_forms(
    cache: Cache | None, weight: Any, wanted: list[tuple[int, Format]], bound: BoundRecipe, recipe: Recipe, *,
    training: bool,
) -> list[Any]:  # fmt: skip
    """A weight in the formats wanted, from the cache where there is one; in training magnitudes are merged."""
    encode = scaling.extras(bound).w
    if cache is None or isinstance(weight, QTensor):
        forms, amax = forms_of(weight, wanted, None, encode, recipe)
        if training:
            merge_amax(bound, (None, amax, None))
        return forms
    live = bound.state.history[scaling.ROLES.index("w"), 0] if training and bound.state is not None else None
    stored: Wanted = tuple((axis, cell) for axis, cell in wanted if not cell.plain)
    made = iter(cache(weight, stored, encode, live) if stored else ())
    return [weight if cell.plain else next(made) for _, cell in wanted]


def _forward(given: Arguments, needs: Needs, out: Tensor | None) -> tuple[Tensor, _Kept]:
    """(y, what backward reads)."""
    op, recipe, extras = given.op, given.recipe, scaling.extras(given.bound)
    k_axis, n_axis = op.weight_axes()
    has_bias, has_scale = bool(given.biases), given.row_scale is not None
    saved = gradients.linear_saved(op, needs, has_bias, has_scale)
    keep_x, keep_w = gradients.keeps_forms(op, recipe, needs, has_scale)
    x_wanted = gradients.row_forms(recipe, keep_x)
    w_wanted = [(k_axis, recipe.forward[1]), *([(n_axis, recipe.dgrad[1])] if keep_w else [])]
    rows, amax_x = forms_of(given.x, x_wanted, given.sizes, extras.x, recipe)
    weights = weight_forms(given.cache, given.weight, w_wanted, given.bound, recipe, training=any(needs))
    x, w = arrays_of(rows[0]), arrays_of(weights[0])
    operands = (x.tensors, w.tensors, given.sizes, given.biases, given.row_scale, given.text, x.text, w.text)
    if out is None:
        y = _stored.linear(*operands)
    else:
        _stored.linear_into(*operands, out)
        y = out.detach()
    if any(needs):
        merge_amax(given.bound, (amax_x, None, None))
    return y, _Kept(
        arrays_of(rows[-1] if keep_x else given.x) if saved.x else None,
        arrays_of(weights[-1] if keep_w else given.weight) if saved.w else None,
    )


def _attach(
    given: Arguments,
    out: Tensor | None,
    grad_input: Tensor | None,
    owner: Owner | None,
    replaced: tuple[bool, ...] | None,
) -> Tensor:
    weights = given.leaves
    packed = (not weights or weights[0].dim() == 3, bool(given.biases) and given.biases[0].dim() == 2)
    counts = (max(1, len(weights)), len(given.biases))
    static = (given.text, counts, packed, given.to_main_grad, replaced)
    quiet = weights or [None]
    return _StoredLinear.apply(
        *(static, owner, given, out, grad_input),
        *(given.leaf, given.row_scale, *quiet, *given.biases, *given.accumulators),
    )


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
    return Launcher((_stored.linear_grads, _stored.linear_grads_into), (*operands, *texts))


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
        names = [None if spec is None else spec.dtype for spec in given.specs]
        if given.leaf is not None and isinstance(given.x, QTensor):
            names[0] = fixed_spec(given.leaf).dtype
        if given.leaves and isinstance(given.weight, QTensor):
            names[1] = fixed_spec(given.leaves[0]).dtype
        dtypes = tuple([None if name is None else TORCH_DTYPES[name] for name in names])
        needed = list(ctx.needs_input_grad)
        for at, accumulator in enumerate(accumulators):  # of a quantised weight without a master
            needed[_PLAIN_ARGUMENTS + 2 + at] |= accumulator is not None and members[at] is None
        kept, needs, facts = facts_of(static, dtypes, tuple(needed), _PLAIN_ARGUMENTS)
        ctx.facts = ProductFacts(*facts, needs=Needs(*needs), k=given.specs[0].shape[1])
        y, forms = _forward(given, Needs(*needs), out)
        x, weight = forms.x or Stored([]), forms.weight or Stored([])
        key = given.bound.key
        biases = given.biases if kept.bias else []
        saved = (*x.tensors, given.sizes, row_scale if kept.row_scale else None, *weight.tensors, *biases, key)
        parts = ("", "_scale", "_scale") if not x.text else ("_q", "_scale", "_scale")
        _saved.tell(saved, tuple(_saved.ROWS + part for part in parts[: len(x.tensors)]))
        ctx.save_for_backward(*saved)
        ctx.counts = (len(x.tensors), len(weight.tensors))
        ctx.texts = (x.text, weight.text)
        ctx.bound, ctx.op, ctx.recipe = given.bound, given.op, given.recipe
        ctx.grad_input = grad_input
        ctx.accumulators = accumulators
        elsewhere = bool(to_main_grad or accumulators)
        ctx.owners, ctx.delayed = owners_of(
            given.leaves or [each for each in accumulators if each is not None], elsewhere, owner
        )
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of forward's arguments; the one of the result is dy [M, N]."""
        (dy,) = grad_outputs
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
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
    forms = dy_forms(ctx.op, ctx.recipe, dy, sizes, row_scale, facts.needs, ctx.bound, key)
    work = launcher(x, weight, sizes, biases, row_scale, dy, forms, key, scaling.extras(ctx.bound).x, facts)
    found = product_gradients(facts, work, ctx.owners, ctx.accumulators, ctx.grad_input, ctx.delayed)
    results = (found.x, found.row_scale, *found.weights, *found.biases)
    return (*[None] * _PLAIN_ARGUMENTS, *results, *[None] * len(ctx.accumulators))


def dy_forms(
    op: Linear,
    recipe: Recipe,
    dy: Tensor,
    sizes: Tensor,
    row_scale: Tensor | None,
    needs: Needs,
    bound: BoundRecipe,
    key: Tensor | None,
    *,
    stream: int = 0,
) -> list[Stored]:
    """dy in the forms that the products of backward read, each source in one pass; magnitudes are merged."""
    encode = scaling.extras(bound).dy
    factor = None if op.scale_bias else row_scale
    through_weight = needs.x or (needs.row_scale and row_scale is not None and not op.scale_bias)
    dgrad = [(1, recipe.dgrad[0])] if through_weight and not recipe.dgrad[0].plain else []
    wgrad = [(0, recipe.wgrad[1])] if needs.w and not recipe.wgrad[1].plain else []
    passes = [(dy, [*dgrad, *wgrad])]
    if factor is not None and wgrad:  # rounded once from fp32, as `scale_rows` does
        passes = [(dy, dgrad), ((dy.float() * factor.float()[:, None]).to(dy.dtype), wgrad)]
    made: list[Stored] = []
    for source, wanted in passes:
        if wanted:
            found = _stored.store([source], tuple(wanted), sizes, encode=encode, key=key, stream=stream)
            made += [arrays_of(form) for form in found.forms]
            merge_amax(bound, (None, None, found.amax))
    return made
