"""Public grouped operations: arguments checked and put in order, gradients attached. The mathematics is grouped_core's.

Letters: G groups, M rows, K in, N out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core.gradients import Needs
from grouped_core.products import wide
from grouped_core.recipes import Recipe
from grouped_core.sizes import GroupSizes
from torch_bridge import _library, _saved, main_grad
from torch_bridge._arguments import Arguments, Members, check_arguments, check_buffers, destinations, weight_names
from torch_bridge._run import TORCH_DTYPES


def grouped_linear(
    x: Tensor,
    weight: Members,
    group_sizes: Tensor | Sequence[int] | GroupSizes,
    *,
    rhs_transposed: bool = True,
    bias: Members | None = None,
    row_scale: Tensor | None = None,
    scale_bias: bool = False,
    recipe: Recipe | None = None,
    wgrad_accum: str | Tensor | Sequence[Tensor | None] | None = None,
    out: Tensor | None = None,
    grad_input: Tensor | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Tensor:
    """The product [M, N] of grouped rows: `row_scale[r] * (x[r] @ weight[g].T + bias[g])` for row r of group g.

    Rows past the groups are zero. Differentiable in x, weight, bias and row_scale; what needs no gradient is neither
    computed nor saved. A weight given as a list has the same bits as a packed one, nothing is stacked, and frozen
    members get no gradient.

    Args:
        x: [M, K] fp32, bf16, fp16, e4m3fn or e5m2. Nothing is cast, autocast included.
        weight: [G, N, K], or [G, K, N] with `rhs_transposed=False`; or a list of G such matrices.
        group_sizes: G integers on the device of x; a list or CPU tensor is copied there without a synchronisation.
            A sum above M is clamped, a negative size counts as 0.
        bias: [G, N] or a list of G vectors, added before the one rounding.
        row_scale: [M]; with `scale_bias` it multiplies the bias alone.
        recipe: formats of the three products; None takes the operands as they stand.
        wgrad_accum: None returns the weight's gradient. A tensor of the weight's shape (a list of them for a list, None
            for frozen members) is added to in backward instead, "main_grad" means the attribute of that name: see
            `torch_bridge.main_grad`. The weight's gradient is then None (with "main_grad" perhaps a zero dummy), also
            from `torch.autograd.grad`.
        out, grad_input: the caller's buffers for y [M, N] and the gradient of x [M, K]; the results share their
            storage (under torch.compile y may be a copy), and rows past the groups keep what they hold.
        implementation: a kernel's name, or several; see `explain`.

    Raises:
        TypeError: dtypes, or an argument that is no tensor. ValueError: shapes, devices, layouts, buffers, options.
        NotImplementedError: no kernel takes it. RuntimeError: in backward, `main_grad` cannot be written, or it is
            differentiated again.
    """
    given = check_arguments(
        x, weight, group_sizes, rhs_transposed, bias, row_scale, scale_bias, recipe, wgrad_accum, implementation
    )
    return differentiable(given, out, grad_input, None)


class Owner(NamedTuple):
    """A module's side of one product: its Parameters, of which the weights may be casts, and what it delays."""

    parameters: tuple[Any, ...]
    delayed: main_grad.Delayed | None


def differentiable(given: Arguments, out: Tensor | None, grad_input: Tensor | None, owner: Owner | None) -> Tensor:
    """The result of checked arguments, with gradients where somebody needs them."""
    if out is not None or grad_input is not None:
        check_buffers(out, grad_input, given)
    if not given.differentiates():
        return _forward(given, out)
    if not torch.compiler.is_compiling():
        return _attach(given, out, grad_input, None, owner)
    if owner is not None and owner.delayed is not None:
        return _attach_uncompiled(given, out, grad_input, None, owner)
    if not given.to_main_grad and not given.accumulators:
        return _attach(given, out, grad_input, None, None)
    # A graph holds tensors, not the state of Parameters: both are looked up while it is traced.
    parameters = given.weights if owner is None else owner.parameters
    if given.to_main_grad and main_grad.needs_python(parameters):
        return _attach_uncompiled(given, out, grad_input, None, owner)
    overwrite = tuple(main_grad.overwrites(each) for each in parameters)
    if given.to_main_grad:
        given = given._replace(accumulators=destinations(parameters))
    return _attach(given, out, grad_input, overwrite, None)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


def _forward(given: Arguments, out: Tensor | None) -> Tensor:
    x, weights, sizes, biases, row_scale, text, *_ = given
    if out is None:
        return _library.linear(x, weights, sizes, biases, row_scale, text)
    _library.linear_into(x, weights, sizes, biases, row_scale, text, out)
    return out.detach()  # of the same storage, but with a history of its own: the caller's tensor stays without


def _attach(
    given: Arguments,
    out: Tensor | None,
    grad_input: Tensor | None,
    overwrite: tuple[bool, ...] | None,
    owner: Owner | None,
) -> Tensor:
    """The result with its gradients; `overwrite` stands for the attributes of that name if they were read already."""
    packed = (given.weights[0].dim() == 3, bool(given.biases) and given.biases[0].dim() == 2)
    counts = (len(given.weights), len(given.biases))
    static = (given.text, counts, packed, given.to_main_grad, overwrite)
    return _Linear.apply(
        *(static, owner, given.sizes, out, grad_input),
        *(given.x, given.row_scale, *given.weights, *given.biases, *given.accumulators),
    )


_attach_uncompiled: Any = torch.compiler.disable(_attach)

_PLAIN_ARGUMENTS = 5  # of `_Linear` that have no gradient and stand first

_Static = tuple[str, tuple[int, int], tuple[bool, bool], bool, tuple[bool, ...] | None]
"""The operation; how many weights and biases; whether each is one tensor; whether gradients of weights go to
`main_grad`; whether they replace what is there (None: ask the Parameters)."""


class ProductFacts(NamedTuple):
    """What forward tells the backward of one product beside tensors."""

    text: str  # the operation
    dtypes: str  # of x, weight, bias, row_scale
    counts: tuple[int, int]  # weights, biases
    packed: tuple[bool, bool]  # whether weights, biases are one tensor, or weights two that have all groups each
    live: Sequence[int]  # weights that need a gradient
    live_biases: Sequence[int]
    kept_weights: int  # of the saved tensors
    flags: bool  # whether Parameters have flags to raise
    overwrite: tuple[bool, ...] | None  # None: ask the Parameters
    needs: Needs
    k: int
    weight_name: str = _library.NAMES.w  # the argument, for messages


@torch.compiler.assume_constant_result
def _facts(
    static: _Static, dtypes: tuple[torch.dtype | None, ...], needed: tuple[bool, ...]
) -> tuple[Needs, tuple[bool, ...], tuple[Any, ...]]:
    """Which of x, weight, bias, row_scale to keep, which need a gradient, and other fields of `ProductFacts`.

    Args:
        dtypes: of x, weight, bias, row_scale. needed: which arguments of `_Linear` need a gradient.
    """
    return _facts_of(static, dtypes, needed)


@lru_cache(maxsize=1024)
def _facts_of(
    static: _Static, dtypes: tuple[torch.dtype | None, ...], needed: tuple[bool, ...]
) -> tuple[Needs, tuple[bool, ...], tuple[Any, ...]]:
    text, counts, packed, to_main_grad, overwrite = static
    needs_x, needs_scale, *needs_members = needed[_PLAIN_ARGUMENTS:]
    live = tuple(at for at in range(counts[0]) if needs_members[at])
    live_biases = tuple(at for at in range(counts[1]) if needs_members[counts[0] + at])
    needs = Needs(needs_x, bool(live), bool(live_biases), needs_scale)
    kept = _library.saved(text, needs, dtypes[2] is not None, dtypes[3] is not None)
    kept_weights = counts[0] if kept.w else 0
    flags = to_main_grad and overwrite is None
    names = _library.dtype_names(*dtypes)
    return kept, tuple(needs), (text, names, counts, packed, live, live_biases, kept_weights, flags, overwrite)


class _Linear(torch.autograd.Function):
    """Gradients around the operators. What backward reads is saved, results never."""

    @staticmethod
    def forward(
        ctx: Any,
        static: _Static,
        owner: Owner | None,
        sizes: Tensor,
        out: Tensor | None,
        grad_input: Tensor | None,
        x: Tensor,
        row_scale: Tensor | None,
        *members: Any,
    ) -> Tensor:
        """`members`: weights and biases, as many as `static` says, then destinations of weight gradients, if any."""
        text, (first_bias, bias_count), _, to_main_grad, _ = static
        first_accumulator = first_bias + bias_count
        weights, biases = list(members[:first_bias]), list(members[first_bias:first_accumulator])
        accumulators = members[first_accumulator:]
        firsts = (x, weights[0], biases[0] if biases else None, row_scale)
        dtypes = tuple([None if each is None else each.dtype for each in firsts])
        kept, needs, facts = _facts(static, dtypes, ctx.needs_input_grad)
        ctx.facts = ProductFacts(*facts, needs=Needs(*needs), k=x.shape[1])
        saved = (
            x if kept.x else None,
            sizes,
            row_scale if kept.row_scale else None,
            *(weights if kept.w else ()),
            *(biases if kept.bias else ()),
        )
        _saved.tell(saved, (_saved.ROWS,))
        ctx.save_for_backward(*saved)
        # NOTE: no saved tensors: destinations change between forward and backward, Parameters are asked for attributes.
        ctx.grad_input = grad_input
        ctx.accumulators = accumulators
        ctx.owners, ctx.delayed = owners_of(weights, bool(to_main_grad or accumulators), owner)
        return _forward(Arguments(x, weights, sizes, biases, row_scale, text, to_main_grad, accumulators), out)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of forward's arguments; the one of the result is dy [M, N]."""
        (dy,) = grad_outputs
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return _backward(ctx, dy)
        sources = (dy, *ctx.saved_tensors)
        with torch.no_grad():
            gradients = _backward(ctx, dy)
        return once("grouped_linear", gradients, sources)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    facts: ProductFacts = ctx.facts
    x, sizes, row_scale, *members = ctx.saved_tensors
    found = product_gradients(
        facts,
        (x, members[: facts.kept_weights], sizes, members[facts.kept_weights :], row_scale, dy.contiguous()),
        ctx.owners,
        ctx.accumulators,
        ctx.grad_input,
        ctx.delayed,
    )
    gradients = (found.x, found.row_scale, *found.weights, *found.biases)
    return (*[None] * _PLAIN_ARGUMENTS, *gradients, *[None] * len(ctx.accumulators))


def owners_of(
    weights: Sequence[Tensor], elsewhere: bool, owner: Owner | None
) -> tuple[Sequence[Any], main_grad.Delayed | None]:
    """(the Parameters of weights whose gradients do not go to autograd, what delays them); () if they do."""
    if owner is None:
        return (weights if elsewhere else ()), None
    return (owner.parameters if elsewhere or owner.delayed is not None else ()), owner.delayed


class ProductGradients(NamedTuple):
    """Gradients of one product, None where not needed or written elsewhere; one entry a weight and a bias."""

    x: Tensor | None
    row_scale: Tensor | None
    weights: list[Tensor | None]
    biases: list[Tensor | None]


def product_gradients(
    facts: ProductFacts,
    tensors: tuple[Tensor | None, list[Tensor], Tensor, list[Tensor], Tensor | None, Tensor],
    owners: Sequence[Tensor],
    accumulators: Sequence[Tensor | None],
    grad_input: Tensor | None,
    delayed: main_grad.Delayed | None = None,
) -> ProductGradients:
    """What `facts.needs` asks for, each gradient where it belongs.

    Args:
        tensors: x, weights, group sizes, biases, row scale and dy; those that no needed gradient reads are None or [].
        owners: the weights, if their gradients do not go to autograd but to `accumulators` or to `main_grad`.
        grad_input: the caller's buffer for the gradient of x.
        delayed: where the weight gradients wait, if they do.
    """
    needs, (weight_count, bias_count) = facts.needs, facts.counts
    dy = tensors[-1]
    operands = (*tensors, facts.k, facts.text, facts.dtypes)
    elsewhere = bool(owners) and needs.w
    buffer = grad_input if needs.x else None

    new = needs._replace(w=needs.w and not elsewhere)
    if buffer is not None:  # the gradient of the row scale is a by-product of that of x
        new = new._replace(x=False, row_scale=False)
    dx = db = dc = None
    dw: list[Tensor] = []  # one for each weight that needs one, or for a list [live, N, K]
    if letters := _library.needs_text(new):
        results = iter(_library.linear_grads(*operands, letters, _library.subset(facts.live, weight_count)))
        dx = next(results) if new.x else None
        dw = [next(results) for _ in (facts.live if facts.packed[0] else facts.live[:1])] if new.w else []
        db, dc = (next(results) if needed else None for needed in new[2:])
    if buffer is not None:
        if needs.row_scale:
            dc = dy.new_empty(dy.shape[:1], dtype=TORCH_DTYPES[facts.dtypes.split(",")[3]])
        letters = _library.needs_text(Needs(True, False, False, needs.row_scale))
        _library.linear_grads_into(*operands, letters, [], False, buffer, [], dc)
        dx = buffer.detach()

    weight_gradients: list[Tensor | None] = [None] * weight_count
    bias_gradients: list[Tensor | None] = [None] * bias_count
    if elsewhere:
        # Nothing but what weight gradients read, for a delayed launch keeps it alive.
        operands = (tensors[0], [], tensors[2], [], tensors[4], dy, facts.k, facts.text, facts.dtypes)

        def launch(destinations: list[Tensor], groups: list[int], accumulate: bool) -> None:
            some = _library.subset(groups, weight_count)
            _library.linear_grads_into(*operands, "w", some, accumulate, None, destinations, None)

        weight_gradients = main_grad.deliver(
            weight_names(owners, facts.weight_name),
            owners,
            accumulators or None,
            facts.overwrite,
            facts.live,
            launch,
            flags=facts.flags,
            delayed=delayed,
            operands=(tensors[0], tensors[2], tensors[4], dy),
            dtype=TORCH_DTYPES[wide(facts.dtypes.split(",")[1])],
        )
    if dw:
        for at, gradient in zip(facts.live, dw if facts.packed[0] else dw[0].unbind(), strict=True):
            weight_gradients[at] = gradient
    if db is not None:
        gradients = [db] if facts.packed[1] else db.unbind()
        for at in facts.live_biases:
            bias_gradients[at] = gradients[at]
    return ProductGradients(dx, dc, weight_gradients, bias_gradients)


def once(name: str, gradients: Sequence[Tensor | None], sources: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients, with a history that refuses to be differentiated.

    Args:
        name: of the operation, for the words. sources: what the gradients were made of, whose derivatives are refused.
    """
    apart = (None if each is None else each.detach().requires_grad_() for each in gradients)  # always a history
    return _Once.apply(name, len(gradients), *apart, *sources)


class _Once(torch.autograd.Function):
    """Lets gradients through and refuses to differentiate them again."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """`tensors`: gradients, as many as `count` says, then what they were made of."""
        ctx.name = name
        return tuple(None if each is None else each.view_as(each) for each in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            f"{ctx.name}: differentiated twice, expected once; its gradients have no derivative of their own, "
            "compose it of differentiable torch operations where second derivatives are needed."
        )
