"""The autograd function of all operations: what forward saves, what backward computes, and where gradients go.

Letters: G groups, M rows, K in, N out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_bridge import _saved
from torch_bridge._args import Arguments, check_buffers, check_gradient, is_packed
from torch_bridge._checks import NAMES
from torch_bridge._compiling import is_compiling
from torch_bridge._gradients import (
    Owner,
    Route,
    WeightGradient,
    check_listed_once,
    once_differentiable,
    route_of,
)
from torch_bridge._scaling import Scaling, with_scales
from torch_bridge._tensors import Form, Layout, members, pack, unpack

Owners = tuple[Owner | None, ...]
"""For each product, the parameters and queue of the module that owns its weight, or None."""

Overwrites = tuple[tuple[bool, ...] | None, ...]
"""For each weight, whether each tensor's gradient replaces the content of its accumulator; None: ask the tensors."""

Lists = tuple[tuple[int, bool], ...]
"""For each weight, then each bias: the number of its tensors, and whether it is one packed tensor."""

Deliver = Callable[[int, WeightGradient], None]
"""(product, gradient of its weight) -> None."""


class Saved(NamedTuple):
    """What forward hands to backward besides tensors.

    Attributes:
        op: the operation. specs: the specs of its operands. needs: the gradients to compute.
        scaling: for each product. layouts: of the saved operands. rows: M.
    """

    op: Any
    specs: Any
    needs: Any
    scaling: tuple[Scaling, ...]
    layouts: tuple[Any, ...]
    rows: Any


class Kept(NamedTuple):
    """What forward keeps for backward: operands, those of rows first, and the names of the latter for offloading."""

    operands: tuple[Any, ...]
    names: tuple[str, ...]


NOTHING = Kept((), ())
"""What is kept if no gradient is needed."""


class MainGradients(NamedTuple):
    """All gradients except those of weights: of x [M, K], row scale or probabilities [M], and each bias [G, N]."""

    x: Tensor | None
    row_scale: Tensor | None
    biases: tuple[Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class Operation:
    """The differences between the linear operation and the MLP.

    Attributes:
        name: for messages. weights: names of the weight arguments.
        places: positions of the weights among the arguments. scale_place: position of the row scale.
        check: (all arguments, caches of layers) -> checked arguments.
        needs_names: names of the weights in `needs`. no_needs: the value of `needs` without gradients.
        needs: (x, each weight, row scale, each bias) -> the gradients to compute, as the rules take them.
        weight_dtypes: (operation, specs of its operands) -> dtypes of the weight gradients, as specs name them.
        forward: (arguments, needs, out) -> (the result [M, N], what is kept for backward).
        backward: (saved facts, kept operands, dy, buffer for dx, deliver) -> the other gradients. It removes operands
            from the list, so that rows are freed as soon as they are no longer read.
    """

    name: str
    weights: tuple[str, ...]
    places: tuple[int, ...]
    scale_place: int
    check: Callable[..., Arguments]
    needs_names: tuple[str, ...]
    no_needs: Any
    needs: Callable[[bool, Sequence[bool], bool, Sequence[bool]], Any]
    weight_dtypes: Callable[[Any, Any], tuple[str, ...]]
    forward: Callable[[Arguments, Any, Tensor | None], tuple[Tensor, Kept]]
    backward: Callable[[Saved, list[Any], Any, Tensor | None, Deliver], MainGradients]


def differentiable(
    operation: Operation,
    given: Arguments,
    out: Tensor | None,
    grad_input: Tensor | None,
    owners: Owners | None = None,
    overwrite: Overwrites | None = None,
) -> Tensor:
    """The result for checked arguments, with an autograd history if a gradient is needed."""
    nothing = _NOTHING[len(given.weights)]
    owners = nothing if owners is None else owners
    if out is not None or grad_input is not None:
        check_buffers(given, out, grad_input)
    if not given.differentiates():
        return _detached(operation.forward(given, operation.no_needs, out)[0], out)
    if given.to_main_grad or owners != nothing or any(given.accumulators):
        products = zip(operation.weights, given.leaves, owners, given.accumulators, strict=True)
        check_listed_once(
            *((name, leaves, owner, given.to_main_grad or len(accum) > 0) for name, leaves, owner, accum in products)
        )
    tensors: list[Any] = []
    lists: list[tuple[int, bool]] = []
    for leaves, accumulators in zip(given.leaves, given.accumulators, strict=True):
        tensors += leaves or [_stand_in(given, accumulators)]
        lists.append((len(leaves) or 1, not leaves or is_packed(leaves)))
    for bias in given.biases:
        several = members(bias)
        tensors += several
        lists.append((len(several), isinstance(bias, Tensor)))
    static = (operation, given, owners, overwrite or nothing, tuple(lists), out, grad_input)
    apply = _Differentiable.apply if is_compiling() else _apply
    return apply(*static, given.leaf, given.row_scale, *tensors)


_NOTHING = ((), (None,), (None, None))
"""The default of owners and overwrites, by the number of weights."""


def _detached(y: Tensor, out: Tensor | None) -> Tensor:
    """`y`; if it is the caller's buffer, a tensor that shares its storage but not its history."""
    return y if out is None else y.detach()


def _stand_in(given: Arguments, accumulators: Sequence[Tensor | None]) -> Tensor | None:
    """An input that makes autograd run backward for a quantised weight that has an accumulator but no master weight.

    Raises:
        NotImplementedError: under torch.compile, whose backward serves only inputs of the graph.
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


def forward_and_saved(
    operation: Operation, given: Arguments, needs: Any, out: Tensor | None
) -> tuple[Tensor, list[Tensor | None], list[str], Saved]:
    """(the result, the tensors that backward reads, names of the first of them, other facts for backward)."""
    scaling = with_scales(given.scaling)
    if scaling is not given.scaling:
        given = given._replace(scaling=scaling)
    y, kept = operation.forward(given, needs, out)
    packed = pack(kept.operands)
    names: list[str] = []
    for base, (layout, _) in zip(kept.names, packed.layouts, strict=False):
        names += _names(base, layout) if layout else (base,)
    saved = Saved(given.op, given.specs, needs, scaling, packed.layouts, given.x.shape[0])
    return _detached(y, out), packed.tensors, names, saved


def _names(base: str, layout: Layout) -> list[str]:
    """Names of the saved tensors of rows."""
    names = []
    while isinstance(layout, Form):
        names += [f"{base}_q", *[f"{base}_scale"] * sum(layout.scaled)]
        layout = layout.other
    return names


class _Differentiable(torch.autograd.Function):
    """Gradients around the operators. It saves what backward reads, never results."""

    PLAIN = 7
    """Number of leading arguments that have no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        operation: Operation,
        given: Arguments,
        owners: Owners,
        overwrite: Overwrites,
        lists: Lists,
        out: Tensor | None,
        grad_input: Tensor | None,
        leaf: Tensor | None,
        row_scale: Tensor | None,
        *tensors: Any,
    ) -> Tensor:
        """`tensors`: the tensors that receive the gradients of weights (None without any), then those of biases."""
        del tensors
        elsewhere = given.to_main_grad or owners != _NOTHING[len(owners)] or any(given.accumulators)
        live, needs, biases, routes = _asked(operation, ctx.needs_input_grad, lists)
        if elsewhere:
            live, needs = _asked_by_accumulators(operation, given, live, needs)
            dtypes = operation.weight_dtypes(given.op, given.specs)
            routes = [
                route_of(
                    *(name, given.leaves[at], given.accumulators[at], live[at], dtypes[at]),
                    to_main_grad=given.to_main_grad,
                    owner=owners[at],
                    overwrite=overwrite[at],
                )
                for at, name in enumerate(operation.weights)
            ]
        y, saved, names, ctx.saved = forward_and_saved(operation, given, needs, out)
        _saved.tell(saved, names)
        ctx.save_for_backward(*saved)
        # NOTE: routes are not saved tensors: destinations may change until backward, which needs Parameters themselves.
        ctx.operation, ctx.grad_input, ctx.biases, ctx.routes = operation, grad_input, biases, routes
        ctx.for_leaf = leaf is not None and leaf.is_leaf
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of forward's arguments, from that of the result: dy [M, N]."""
        (dy,) = grad_outputs
        if is_compiling() or not torch.is_grad_enabled():
            return _backward(ctx, dy)
        sources = (dy, *ctx.saved_tensors)
        with torch.no_grad():
            found = _backward(ctx, dy)
        return once_differentiable(ctx.operation.name, found, sources)


# The public `apply` looks for transforms of functorch, which arguments were refused for, in each argument.
_parent: Any = super(torch.autograd.Function, _Differentiable)
_apply: Callable[..., Any] = _parent.apply


class _Asked(NamedTuple):
    """The gradients that one backward computes.

    Attributes:
        live: for each weight and bias, the tensors that need a gradient. needs: the same, as the rules take it.
        biases: for each, the number of its tensors, whether it is packed, and those that need a gradient.
        routes: of the weights if their gradients go to autograd.
    """

    live: list[tuple[int, ...]]
    needs: Any
    biases: list[tuple[int, bool, tuple[int, ...]]]
    routes: list[Route]


@lru_cache(maxsize=1024)
def _asked(operation: Operation, needed: tuple[bool, ...], lists: Lists) -> _Asked:
    """`needed`: for each argument of `_Differentiable`, whether it needs a gradient."""
    needs_x, needs_scale, *of_members = needed[_Differentiable.PLAIN :]
    live, start, weights = [], 0, len(operation.weights)
    for count, _ in lists:
        live.append(tuple([at for at in range(count) if of_members[start + at]]))
        start += count
    several = [len(each) > 0 for each in live]
    needs = operation.needs(needs_x, several[:weights], needs_scale, several[weights:])
    biases = [(*own, some) for own, some in zip(lists[weights:], live[weights:], strict=True)]
    facts = zip(operation.weights, lists, live, strict=False)
    routes = [Route(name, count, packed, own) for name, (count, packed), own in facts]
    return _Asked(live, needs, biases, routes)


def _asked_by_accumulators(
    operation: Operation, given: Arguments, live: list[Any], needs: Any
) -> tuple[list[Any], Any]:
    """(live, needs), including quantised weights that have an accumulator but no master weight."""
    alone = [
        not leaves and any(each is not None for each in accumulators)
        for leaves, accumulators in zip(given.leaves, given.accumulators, strict=True)
    ]
    if True not in alone:
        return live, needs
    live = [(0,) if one else own for one, own in zip([*alone, *[False] * len(given.biases)], live, strict=True)]
    return live, needs._replace(**{name: True for name, one in zip(operation.needs_names, alone, strict=True) if one})


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dy = dy.contiguous()
    routes: list[Route] = ctx.routes
    check_gradient(dy, ctx.grad_input, *(route.accumulators for route in routes))
    saved: Saved = ctx.saved
    kept = unpack(saved.layouts, ctx.saved_tensors, saved.rows)
    if not is_compiling():
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained: rows are freed once they are no longer read
    weights: list[list[Tensor | None]] = [[None] * route.parts for route in routes]

    def deliver(product: int, gradient: WeightGradient) -> None:
        weights[product] = routes[product].deliver(gradient)

    buffer = ctx.grad_input
    main = ctx.operation.backward(saved, kept, dy, buffer, deliver)
    dx = main.x
    if buffer is not None and dx is not None:
        dx = buffer.detach().clone() if ctx.for_leaf else buffer.detach()
    biases = [_of_members(found, *facts) for found, facts in zip(main.biases, ctx.biases, strict=True)]
    members = [each for some in (*weights, *biases) for each in some]
    return (*[None] * _Differentiable.PLAIN, dx, main.row_scale, *members)


def _of_members(gradient: Tensor | None, count: int, packed: bool, live: Sequence[int]) -> list[Tensor | None]:
    """The gradient of a bias, split into its tensors."""
    results: list[Tensor | None] = [None] * count
    if gradient is not None:
        parts = [gradient] if packed else gradient.unbind()
        for at in live:
            results[at] = parts[at]
    return results
