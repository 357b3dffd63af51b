"""Public grouped operations: arguments checked and put in order, gradients attached. The mathematics is grouped_core's.

Letters: G groups, M rows, K in, N out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grouped_core.formats import QTensor
from grouped_core.gradients import Needs
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.sizes import GroupSizes
from torch_bridge import _autocast, _library, _saved, main_grad, stored
from torch_bridge._arguments import Arguments, Members, check_arguments, check_buffers, check_gradient, destinations
from torch_bridge._compiling import is_compiling
from torch_bridge._library import NAMES
from torch_bridge._products import (
    Owner,
    ProductFacts,
    Static,
    check_listed_once,
    facts_of,
    once,
    owners_of,
    plain_launcher,
    product_gradients,
)
from torch_bridge._stored_arguments import is_stored
from torch_bridge.quantize import StraightThrough


def grouped_linear(
    x: Tensor | QTensor[Tensor] | StraightThrough,
    weight: Members | QTensor[Tensor] | StraightThrough,
    group_sizes: Tensor | Sequence[int] | GroupSizes,
    *,
    rhs_transposed: bool = True,
    bias: Members | None = None,
    row_scale: Tensor | None = None,
    scale_bias: bool = False,
    recipe: Recipe | BoundRecipe | None = None,
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
        x: [M, K] fp32, bf16, fp16, e4m3fn or e5m2; or quantised. Under `torch.autocast` it, the weight and
            the bias are cast to its dtype, as in `F.linear`; else nothing is.
        weight: [G, N, K], or [G, K, N] with `rhs_transposed=False`; or a list of G such matrices; or quantised. The
            gradient of a quantised operand goes to the master of `straight_through`, else nowhere.
        group_sizes: G integers on the device of x; a list or CPU tensor is copied there without a synchronisation.
            A sum above M is clamped, a negative size counts as 0.
        bias: [G, N] or a list of G vectors, added before the one rounding.
        row_scale: [M]; with `scale_bias` it multiplies the bias alone.
        recipe: formats of the three products; None takes the operands as they stand. Bound to a state of delayed
            scaling (`Recipe.bind`), magnitudes are merged into it in place.
        wgrad_accum: None returns the weight's gradient. A tensor of the weight's shape (a list of them for a list, None
            for frozen members) is added to in backward instead, "main_grad" means the attribute of that name: see
            `torch_bridge.main_grad`. The weight's gradient is then None (with "main_grad" perhaps a zero dummy), also
            from `torch.autograd.grad`.
        out, grad_input: the caller's buffers for y [M, N] and the gradient of x [M, K], in the dtype of autocast where
            that is on. The results share their storage (under torch.compile they may be copies, and the `.grad` of a
            leaf x always is one), and rows past the groups keep what they hold.
        implementation: a kernel's name, or several; see `explain`.

    Raises:
        TypeError: dtypes, or an argument that is no tensor. ValueError: shapes, devices, layouts, buffers, options.
        NotImplementedError: no kernel takes it. RuntimeError: in backward, `main_grad` cannot be written, or it is
            differentiated again.
    """
    x, (weight,), (bias,), (owner,) = _autocast.operands(x, (weight,), (bias,))
    arguments: list[Any] = [x, weight, group_sizes, rhs_transposed, bias, row_scale, scale_bias, recipe, wgrad_accum]
    arguments.append(implementation)
    if is_stored(x, weight, recipe):
        return stored.linear(*arguments, out=out, grad_input=grad_input, owner=owner)
    return differentiable(check_arguments(*arguments), out, grad_input, owner)


def differentiable(given: Arguments, out: Tensor | None, grad_input: Tensor | None, owner: Owner | None) -> Tensor:
    """The result of checked arguments, with gradients where somebody needs them."""
    if out is not None or grad_input is not None:
        check_buffers(out, grad_input, given)
    if not given.differentiates():
        return _forward(given, out)
    check_listed_once((NAMES.w, given.weights, owner, given.to_main_grad or len(given.accumulators) > 0))
    if not is_compiling():
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
    packed = (given.weights[0].dim() == 3, len(given.biases) > 0 and given.biases[0].dim() == 2)
    counts = (len(given.weights), len(given.biases))
    static = (given.text, counts, packed, given.to_main_grad, overwrite)
    return _Linear.apply(
        *(static, owner, given.sizes, out, grad_input),
        *(given.x, given.row_scale, *given.weights, *given.biases, *given.accumulators),
    )


_attach_uncompiled: Any = torch.compiler.disable(_attach)

_PLAIN_ARGUMENTS = 5  # of `_Linear` that have no gradient and stand first


@torch.compiler.assume_constant_result
def _facts(
    static: Static, dtypes: tuple[torch.dtype | None, ...], needed: tuple[bool, ...]
) -> tuple[Needs, tuple[bool, ...], tuple[Any, ...]]:
    """Which of x, weight, bias, row_scale to keep, which need a gradient, and other fields of `ProductFacts`.

    Args:
        dtypes: of x, weight, bias, row_scale. needed: which arguments of `_Linear` need a gradient.
    """
    return facts_of(static, dtypes, needed, _PLAIN_ARGUMENTS)


class _Linear(torch.autograd.Function):
    """Gradients around the operators. What backward reads is saved, results never."""

    @staticmethod
    def forward(
        ctx: Any,
        static: Static,
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
        ctx.grad_input, ctx.for_leaf = grad_input, x.is_leaf
        ctx.accumulators = accumulators
        ctx.owners, ctx.delayed = owners_of(weights, to_main_grad or len(accumulators) > 0, owner)
        return _forward(Arguments(x, weights, sizes, biases, row_scale, text, to_main_grad, accumulators), out)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of forward's arguments; the one of the result is dy [M, N]."""
        (dy,) = grad_outputs
        if is_compiling() or not torch.is_grad_enabled():
            return _backward(ctx, dy)
        sources = (dy, *ctx.saved_tensors)
        with torch.no_grad():
            gradients = _backward(ctx, dy)
        return once("grouped_linear", gradients, sources)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    facts: ProductFacts = ctx.facts
    x, sizes, row_scale, *members = ctx.saved_tensors
    dy, count = dy.contiguous(), facts.kept_weights
    check_gradient(dy, ctx.grad_input, ctx.accumulators)
    launcher = plain_launcher(
        x, members[:count], sizes, members[count:], row_scale, dy, facts.k, facts.text, facts.dtypes
    )
    found = product_gradients(
        facts, launcher, ctx.owners, ctx.accumulators, ctx.grad_input, ctx.delayed, for_leaf=ctx.for_leaf
    )
    gradients = (found.x, found.row_scale, *found.weights, *found.biases)
    return (*[None] * _PLAIN_ARGUMENTS, *gradients, *[None] * len(ctx.accumulators))
