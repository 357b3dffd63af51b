"""The linear operation on quantised operands, and recipes that quantise: what `grouped_linear` does with them.

Forms are made by the operator `store`, each tensor in one pass, and the products read them: forward keeps for backward
what backward reads, quantised where the recipe says so.

Letters: G groups, M rows, K in, N out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from grouped_core import gradients, linear_spec, scaling
from grouped_core.calls import ArraySpec, OperandSpec
from grouped_core.formats import QTensor
from grouped_core.gradients import NO_NEEDS, Needs
from grouped_core.linear_spec import Linear
from grouped_core.products import stored_spec
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.scaling import ScalingState
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
from torch_bridge._decided import Decided
from torch_bridge._library import NAMES
from torch_bridge._memory import EXCHANGE
from torch_bridge._products import Launcher, Owner, ProductFacts, facts_of, once, owners_of, product_gradients
from torch_bridge._run import TORCH_DTYPES, fixed_spec, rows_spec, settle_rows
from torch_bridge._stored import NOTHING, Stored, Wanted, arrays_of
from torch_bridge.params import check_operand, members_of
from torch_bridge.quantize import DY, WEIGHT, StraightThrough, Use, X
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


class Checked(NamedTuple):
    """What follows from the facts of operands and options, decided once for them."""

    text: str  # of the operation, with the recipe in force
    recipe: Recipe
    specs: tuple[OperandSpec, OperandSpec, ArraySpec | None, ArraySpec | None]  # of x, weight, bias, row_scale
    dtypes: tuple[torch.dtype | None, ...]  # of these


class Arguments(NamedTuple):
    """What a user passed, checked."""

    x: Tensor | QTensor[Tensor]
    weight: list[Tensor] | QTensor[Tensor]
    sizes: Tensor
    biases: list[Tensor]
    row_scale: Tensor | None
    checked: Checked
    use: Use
    leaf: Tensor | None  # what the gradient of x belongs to
    leaves: list[Tensor]  # what those of the weights belong to
    to_main_grad: bool
    accumulators: Sequence[Tensor | None]
    cache: Cache | None = None  # of a layer's weight

    def differentiates(self) -> bool:
        """Whether anybody needs a gradient."""
        if not torch.is_grad_enabled():
            return False
        targets = (self.leaf, self.row_scale, *self.leaves, *self.biases)
        if True in [each is not None and each.requires_grad for each in targets]:
            return True
        return True in [each is not None for each in self.accumulators]


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
    cache: Cache | None = None,
) -> Arguments:
    """The arguments of `grouped_linear`; raises what it raises."""
    compiling = torch.compiler.is_compiling()
    refuse_transforms("grouped_linear", x, weight, bias, row_scale)
    bound = linear_spec.recipe_option(recipe)
    sizes, rows_hint = unwrap(group_sizes)
    names = implementation_text(implementation)
    leaf, rows = taken(x)
    leaves, weights = taken(weight)
    options = (bool(rhs_transposed), bound.recipe, bool(scale_bias), rows_hint, names)
    # As with plain operands: what is checked depends on facts alone, those of the state's arrays among them.
    facts = key = found = None
    if not compiling:
        facts = EXCHANGE.describe((*arrays(rows), *arrays(weights), sizes, bias, row_scale, *arrays(bound.state)))
    if facts is not None:
        key = (facts, options, form_facts(rows), form_facts(weights))
        found = _checked.get(key)
    if found is None:
        given_sizes = sizes
        sizes, found = _check_operands(rows, weights, sizes, bias, row_scale, bound, options)
        if key is not None and sizes is given_sizes:
            _checked.keep(key, found)
    owners = [] if leaves is None else listed(leaves)
    members = weights if isinstance(weights, QTensor) else owners
    accumulators: Sequence[Tensor | None] = ()
    if wgrad_accum is not None and wgrad_accum != "main_grad":
        first = home(rows)
        if owners:
            accumulators = accumulators_of(wgrad_accum, owners)
        elif isinstance(wgrad_accum, Tensor):  # of a quantised weight without a master
            wanted = ArraySpec(found.specs[1].shape, found.specs[1].dtype)
            check_operand(NAMES.accum, wgrad_accum, first)
            linear_spec.check_accumulator(NAMES.accum, fixed_spec(wgrad_accum), wanted)
            check_writable(NAMES.accum, wgrad_accum)
            accumulators = [wgrad_accum]
        if not compiling:
            written = [(NAMES.accum, each) for each in accumulators]
            check_apart(written, [(NAMES.x, first), (NAMES.sizes, sizes), (NAMES.row_scale, row_scale)])
    to_main_grad = isinstance(wgrad_accum, str) and wgrad_accum == "main_grad"
    biases = [] if bias is None else listed(bias)
    operands = (rows, members, sizes, biases, row_scale)
    use = Use(bound.state, bound.key)
    return Arguments(*operands, found, use, leaf, owners, to_main_grad, accumulators, cache)


_checked: Decided[Any, Checked] = Decided()  # by facts of arrays, options, and how quantised operands lie


def _check_operands(
    rows: Any, weights: Any, sizes: Any, bias: Any, row_scale: Any, bound: BoundRecipe, options: tuple[Any, ...]
) -> tuple[Tensor, Checked]:
    """(sizes as kernels read them, what was decided); raises for what does not fit, in words.

    Args:
        options: of `text_of`.
    """
    first = home(rows)
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
    specs = (
        packed_spec(rows, 0),
        packed_spec(weights if isinstance(weights, QTensor) else listed(weights)),
        None if bias is None else packed_spec(listed(bias), 2),
        packed_spec(row_scale, 0),
    )
    text = text_of(*options)
    op = _library.decode(text)
    linear_spec.check_linear(op, specs[0], specs[1], fixed_spec(sizes), *specs[2:])
    scaling.check_bound(bound, specs[1].shape[0])
    recipe = op.resolve(*specs[:2])
    if op.recipe is None:  # operators are told what the operands, which they see in parts, stand for
        text = text_of(op.transposed, recipe, op.scale_bias, op.rows_hint, op.implementation)
        op = _library.decode(text)
    dtypes = tuple([None if spec is None else TORCH_DTYPES[spec.dtype] for spec in specs])
    return sizes, Checked(text, recipe, specs, dtypes)


def arrays(operand: Any) -> Sequence[Any]:
    """The arrays of an operand or of a state, as facts are asked of them: parts of what is quantised."""
    if isinstance(operand, QTensor):
        return parts_of(operand)
    if isinstance(operand, ScalingState):
        return operand.scale, operand.history
    return (operand,)


def form_facts(operand: Any) -> tuple[Any, ...] | None:
    """What parts of a quantised operand do not tell of it."""
    if not isinstance(operand, QTensor):
        return None
    there = (operand.scales is not None, operand.group_scales is not None)
    return operand.format, operand.axis, tuple(operand.shape), operand.dtype, there, form_facts(operand.other)


def home(rows: Any) -> Any:
    """The tensor that says where rows are, quantised or not."""
    rows = rows.q if isinstance(rows, StraightThrough) else rows
    return rows.values if isinstance(rows, QTensor) else rows


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
        return _forward(given, NO_NEEDS, out)[0]
    return _attach(given, out, grad_input, owner, replaced)


def check_results(given: Arguments, out: Tensor | None, grad_input: Tensor | None) -> None:
    """BUF-2."""
    operands = (given.x, given.weight, given.sizes, given.biases, given.row_scale)
    check_buffers(out, grad_input, given.sizes, given.leaf, given.checked.specs[0], operands)


class _Plan(NamedTuple):
    """What forward does with x and weight, as far as it does not depend on arrays."""

    x: Wanted
    weight: Wanted
    keeps: tuple[bool, bool]  # whether backward reads x and weight in the last of these forms
    saved: Needs
    training: bool


@lru_cache(maxsize=1024)
def _plan(text: str, needs: Needs, has_bias: bool, has_scale: bool) -> _Plan:
    op, recipe = with_recipe(text)
    keeps = gradients.keeps_forms(op, recipe, needs, has_scale)
    saved = gradients.linear_saved(op, needs, has_bias, has_scale)
    return _Plan(*forms_read(op, recipe, keeps), keeps, saved, any(needs))


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
        if recipe.requantize is None:
            raise ValueError(
                f"a quantised operand: {source.format.name} along axis {source.axis}, expected "
                f"{', '.join(f'{cell.name} along axis {axis}' for axis, cell in wanted)}, which a product reads; hand "
                "in that form too (`quantize` with both axes), pass the plain tensor, or a recipe with "
                "requantize='from_dequantized'."
            )
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
    made = map(arrays_of, cache(weight, stored, encode, live) if stored else ())
    return [arrays_of(weight) if cell.plain else next(made) for _, cell in wanted]


def encode_of(use: Use, x: Stored, weight: Stored) -> tuple[Tensor | None, Tensor | None]:
    """Multipliers for operands that a product's operator stores on the way."""
    return None if x.text else use.delayed(X)[0], None if weight.text else use.delayed(WEIGHT)[0]


def _forward(given: Arguments, needs: Needs, out: Tensor | None) -> tuple[Tensor, Stored, Stored]:
    """(y, x and weight as backward reads them, without arrays where it does not)."""
    text, recipe, use = given.checked.text, given.checked.recipe, given.use
    plan = _plan(text, needs, bool(given.biases), given.row_scale is not None)
    rows = row_forms(given.x, plan.x, given.sizes, use, recipe, training=plan.training)
    weights = weight_forms(given.cache, given.weight, plan.weight, use, recipe, training=plan.training)
    x, w = rows[0], weights[0]
    operands = (x.tensors, w.tensors, given.sizes, given.biases, given.row_scale, *encode_of(use, x, w))
    operands = (*operands, text, x.text, w.text)
    if out is None:
        y = _stored.linear(*operands)
    else:
        _stored.linear_into(*operands, out)
        y = out.detach()
    keep_x, keep_w = plan.keeps
    return (
        y,
        (rows[-1] if keep_x else arrays_of(given.x)) if plan.saved.x else NOTHING,
        (weights[-1] if keep_w else arrays_of(given.weight)) if plan.saved.w else NOTHING,
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
    static = (given.checked.text, counts, packed, given.to_main_grad, replaced)
    quiet = weights or [None]
    return _StoredLinear.apply(
        *(static, owner, given, out, grad_input),
        *(given.leaf, given.row_scale, *quiet, *given.biases, *given.accumulators),
    )


_PLAIN_ARGUMENTS = 5  # of `_StoredLinear` that have no gradient and stand first
_PLAIN, _PARTS = (_saved.ROWS,), (f"{_saved.ROWS}_q", f"{_saved.ROWS}_scale", f"{_saved.ROWS}_scale")  # names of x


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
        y, x, weight = _forward(given, needs, out)
        key = given.use.key
        biases = given.biases if kept.bias else []
        saved = (*x.tensors, given.sizes, row_scale if kept.row_scale else None, *weight.tensors, *biases, key)
        _saved.tell(saved, (_PARTS if x.text else _PLAIN)[: len(x.tensors)])
        ctx.save_for_backward(*saved)
        ctx.counts = (len(x.tensors), len(weight.tensors))
        ctx.texts = (x.text, weight.text)
        ctx.use = given.use
        ctx.grad_input = grad_input
        ctx.accumulators = accumulators
        weights = given.leaves or [each for each in accumulators if each is not None]
        ctx.owners, ctx.delayed = owners_of(weights, bool(to_main_grad or accumulators), owner)
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
    forms = _dy_forms(facts.text, dy, sizes, row_scale, facts.needs, ctx.use._replace(key=key))
    encode, _ = ctx.use.delayed(X)
    work = launcher(x, weight, sizes, biases, row_scale, dy, forms, key, encode, facts)
    found = product_gradients(facts, work, ctx.owners, ctx.accumulators, ctx.grad_input, ctx.delayed)
    results = (found.x, found.row_scale, *found.weights, *found.biases)
    return (*[None] * _PLAIN_ARGUMENTS, *results, *[None] * len(ctx.accumulators))


@lru_cache(maxsize=1024)
def _cotangent(text: str, needs: Needs, has_scale: bool) -> tuple[Wanted, Wanted]:
    """Forms of dy that backward reads, and of c dy where a row scale c multiplies rows."""
    op, recipe = with_recipe(text)
    scaled = has_scale and not op.scale_bias
    through_weight = needs.x or (needs.row_scale and scaled)
    dgrad = quantised(((1, recipe.dgrad[0]),)) if through_weight else ()
    wgrad = quantised(((0, recipe.wgrad[1]),)) if needs.w else ()
    return (dgrad, wgrad) if scaled else ((*dgrad, *wgrad), ())


def _dy_forms(text: str, dy: Tensor, sizes: Tensor, row_scale: Tensor | None, needs: Needs, use: Use) -> list[Stored]:
    """dy in the forms that the products of backward read, each source in one pass; magnitudes are merged."""
    encode, live = use.delayed(DY, training=True)
    own, scaled = _cotangent(text, needs, row_scale is not None)
    made: list[Stored] = []
    if own:
        made += _stored.store([dy], own, sizes, encode=encode, amax=live, key=use.key)
    if scaled and row_scale is not None:  # rounded once from fp32, as `scale_rows` does
        rows = (dy.float() * row_scale.float()[:, None]).to(dy.dtype)
        made += _stored.store([rows], scaled, sizes, encode=encode, amax=live, key=use.key)
    return made
