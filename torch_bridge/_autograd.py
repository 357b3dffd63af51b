"""The autograd function of all operations: what forward saves, what backward computes, and where gradients go.

Letters: G groups, M rows, K in, N out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_bridge import _saved
from torch_bridge._args import Arguments, Checked, check_buffers, check_gradient
from torch_bridge._asked import Places, is_asked, places_of
from torch_bridge._checks import NAMES
from torch_bridge._compiling import is_compiling
from torch_bridge._gradients import Owner, Route, WeightGradient, check_listed_once, check_reduced
from torch_bridge._once_differentiable import once_differentiable
from torch_bridge._record import Prepared, Rule
from torch_bridge._scaling import Scaling, with_copied_scales
from torch_bridge._tensors import Layouts, as_read, note_written, pack, unpack
from torch_bridge.main_grad import Earlier

Owners = tuple[Owner | None, ...]
"""For each product, the `Owner` of its weight, or None if the gradient simply goes to autograd."""

Deliver = Callable[[int, WeightGradient], None]
"""A function (number of the product, gradient of its weight) -> None."""


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """What follows from checked arguments and from the gradients that are needed.

    Attributes:
        op, specs, needs, keep: the operation, the specs of its operands, the gradients to compute, and what backward
            reads. They have the classes that the rules of the operation take. training: whether any gradient is needed.
        products: the product with each weight, as a linear operation, or None for an absent weight.
        forward, backward: the operator of forward, and those of the stages of backward that are needed.
    """

    op: Any
    specs: Any
    needs: Any
    training: bool
    keep: Any
    products: tuple[Any, ...]
    forward: Prepared
    backward: tuple[Prepared, ...]


class Saved(NamedTuple):
    """What forward hands to backward besides tensors. `layouts` describes the saved operands, and `rows` is M."""

    facts: Facts
    scaling: Scaling
    layouts: Layouts
    rows: Any


Forwarded = tuple[Tensor, tuple[Any, ...]]
"""The result [M, N], and the operands that backward reads."""

MainGradients = tuple[Tensor | None, Tensor | None, tuple[Tensor | None, ...]]
"""All gradients except those of weights: of x, of the row scale or probabilities, and of each bias [G, N]."""


@dataclass(frozen=True, eq=False)
class Operation:
    """What the autograd function has to know about an operation; linear operations and MLPs differ only in these facts.

    Attributes:
        name: the name in messages. product: the rule of forward. weights: the names of the weight arguments.
        rows: the names (`_saved`) of the rows that forward saves; these come before all other saved operands.
        places: the positions of the weights among the arguments. scale_place: the position of the row scale.
        check: (all arguments, caches of layers) -> checked arguments.
        needs: (whether x, each weight, the row scale, each bias need a gradient) -> `Facts.needs`.
        facts: (operation, specs, needs, whole) -> `Facts`. `whole` says for each weight whether autograd gets its whole
            gradient; one operator may then compute that gradient along with others.
        forward: (arguments, facts, scaling, M, out) -> `Forwarded`.
        backward: (saved facts, kept operands, dy, buffer for dx, deliver) -> `MainGradients`. It empties the list of
            operands, so that rows are freed as soon as no launch reads them.
        count: (arguments) -> M, the number of rows of the products.
    """

    name: str
    product: Rule
    weights: tuple[str, ...]
    rows: tuple[str, ...]
    places: tuple[int, ...]
    scale_place: int
    check: Callable[..., Arguments]
    needs: Callable[..., Any]
    facts: Callable[..., Facts]
    forward: Callable[[Arguments, Facts, Scaling, Any, Tensor | None], Forwarded]
    backward: Callable[[Saved, list[Any], Any, Tensor | None, Deliver], MainGradients]
    count: Callable[[Arguments], Any] = lambda given: given.x.shape[0]


def differentiable(
    operation: Operation,
    given: Arguments,
    out: Tensor | None,
    grad_input: Tensor | None,
    owners: Owners | None = None,
    overwrite: tuple[tuple[bool, ...] | None, ...] | None = None,
) -> Tensor:
    """Runs an operation and returns its result, which has an autograd history if a gradient is needed.

    Args:
        overwrite: for each weight, whether each tensor's gradient replaces the content of its accumulator; None: the
            attributes of the tensors say so. Only a node of a graph of torch.compile passes it.
    """
    if out is not None or grad_input is not None:
        check_buffers(given, out, grad_input)
    elsewhere = given.to_main_grad or any(given.accumulators) or (owners is not None and _delay(owners))
    receivers: list[Tensor | None] = []
    needed: tuple[bool, ...] = ()
    if torch.is_grad_enabled():
        receivers = given.receivers()
        needed = tuple([each is not None and each.requires_grad for each in receivers])
        if elsewhere:
            receivers, needed = _with_stand_ins(given, receivers, needed)
    facts, rest = given.checked.asked[elsewhere].get(needed) or _ask(operation, given.checked, needed, elsewhere)
    if not facts.training:
        y, _ = operation.forward(given, facts, given.scaling, operation.count(given), out)
        return y if out is None else written(out, y)
    if elsewhere:
        none = (None,) * len(rest.routes)
        of_each: Any = (given.leaves, given.accumulators, owners or none, overwrite or none)
        products = zip(rest.routes, *of_each, strict=True)
        routes = [route.elsewhere(*own, to_main_grad=given.to_main_grad) for route, *own in products]
        delayed = routes[0].queue is not None and not given.to_main_grad
        beside = "`delay_wgrad_compute`" if delayed else "an accumulator"
        check_listed_once(*[(route.name, route.owners) for route in routes], beside=beside)
        check_reduced(routes)
        rest = rest._replace(routes=routes, accumulators=given.accumulators, places=places_of(receivers, routes))
    if grad_input is not None:
        rest = rest._replace(grad_input=grad_input, for_leaf=given.leaf is not None and given.leaf.is_leaf)
    apply = _apply if overwrite is None else _Differentiable.apply
    return apply((given, facts, rest, out), *receivers)


def _delay(owners: Owners) -> bool:
    """Whether some weight gradients go to a queue. Most calls have no owner, and for them the answer is fast."""
    return any(owners) and any(each is not None and each.queue is not None for each in owners)


def _with_stand_ins(
    given: Arguments, receivers: list[Tensor | None], needed: tuple[bool, ...]
) -> tuple[list[Tensor | None], tuple[bool, ...]]:
    """Returns (receivers, needed) where quantised weights without a master need a gradient if they have an accumulator.

    If no other operand needs one, an empty tensor replaces such a weight as an input, so that autograd runs backward.

    Raises:
        NotImplementedError: such a tensor under torch.compile, whose backward serves only inputs of the graph.
    """
    by_inputs, at, wanted = True in needed, 2, list(needed)
    for leaves, accumulators in zip(given.leaves, given.accumulators, strict=True):
        if not leaves and any(each is not None for each in accumulators):
            if not by_inputs and is_compiling():
                raise NotImplementedError(
                    f"`{NAMES.accum}` of a quantised weight without a master, under torch.compile, and nothing else "
                    "needs a gradient: expected an operand with requires_grad; pass the weight as "
                    "straight_through(master, weight), or keep the call out of the graph."
                )
            wanted[at] = True
            if not by_inputs:
                receivers[at] = torch.empty(0, device=given.sizes.device, requires_grad=True)
        at += len(leaves) or 1
    return receivers, tuple(wanted)


class _Rest(NamedTuple):
    """What backward takes besides what forward saves.

    Attributes:
        biases: for each bias, the number of its tensors, whether it is packed, and which need a gradient; or ().
        routes: for each weight, where its gradient goes. accumulators: for each weight, those of its tensors.
        places: `places_of` the weights. grad_input: the buffer for dx. for_leaf: whether a leaf receives dx.
    """

    operation: Operation
    biases: tuple[tuple[int, bool, tuple[int, ...]], ...]
    routes: Sequence[Route]
    accumulators: Sequence[Sequence[Tensor | None]] = ()
    places: Places = ()
    grad_input: Tensor | None = None
    for_leaf: bool = False


def _ask(operation: Operation, checked: Checked, needed: tuple[bool, ...], elsewhere: bool) -> tuple[Facts, _Rest]:
    """Makes the entry of `checked.asked` for the needed gradients, (facts, what backward takes), and returns it.

    Args:
        needed: for each of `Arguments.receivers`, whether it needs a gradient; () if none does.
        elsewhere: whether weight gradients go to accumulators or a queue; `differentiable` sets the routes for that.
    """
    weights = len(operation.weights)
    needs_x, needs_scale, *of_members = needed or [False] * (2 + sum(count for count, _ in checked.lists))
    flags = iter(of_members)
    lists = [(count, packed, tuple([at for at in range(count) if next(flags)])) for count, packed in checked.lists]
    several = [len(trained) > 0 for *_, trained in lists]
    needs = operation.needs(needs_x, *several[:weights], needs_scale, *several[weights:])
    biases = lists[weights:] if any(count for count, *_ in lists[weights:]) else ()
    routes = [Route(name, *own) for name, own in zip(operation.weights, lists, strict=False)]
    whole = [not elsewhere and len(route.trained) == route.parts for route in routes]
    facts = operation.facts(checked.op, checked.specs, needs, whole)
    asked = checked.asked[elsewhere][needed] = facts, _Rest(operation, tuple(biases), routes)
    return asked


def forward_and_saved(
    operation: Operation, given: Arguments, facts: Facts, out: Tensor | None
) -> tuple[Tensor, Sequence[Tensor | None], Saved]:
    """Runs forward. Returns (the result, the tensors that backward reads, other facts for backward)."""
    scaling = with_copied_scales(given.scaling) if given.scaling.states else given.scaling
    rows = operation.count(given)
    y, kept = operation.forward(given, facts, scaling, rows, out)
    tensors, layouts = pack(kept)
    return y if out is None else written(out, y), tensors, Saved(facts, scaling, layouts, rows)


def written(buffer: Tensor, result: Tensor) -> Tensor:
    """Returns the result that kernels wrote to `buffer`: it shares the buffer's storage, but not its history."""
    note_written([buffer])
    return result.detach()


class _Differentiable(torch.autograd.Function):
    """The autograd function of all operations. It saves the tensors that backward reads, never the result."""

    @staticmethod
    def forward(ctx: Any, static: tuple[Arguments, Facts, _Rest, Tensor | None], *receivers: Tensor | None) -> Tensor:
        """Runs forward. `static` is one argument, because each costs time. `receivers`: `Arguments.receivers`."""
        del receivers
        given, facts, rest, out = static
        y, tensors, saved = forward_and_saved(rest.operation, given, facts, out)
        if _saved.listeners:
            _saved.tell(tensors, _saved.names_of(rest.operation.rows, saved.layouts))
        ctx.save_for_backward(*tensors)
        # NOTE: routes are not saved tensors: destinations may change until backward, which needs Parameters themselves.
        ctx.facts = saved, rest
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of forward's arguments, given dy [M, N], the gradient of the result."""
        (dy,) = grad_outputs
        if torch.compiler.is_dynamo_compiling():  # compiled autograd around a call that was not compiled
            return _beside_graph(ctx, dy)
        if not torch.is_grad_enabled() or is_compiling():
            return _backward(ctx, dy)
        sources = (dy, *ctx.saved_tensors)
        with torch.no_grad():
            found = _backward(ctx, dy)
        return once_differentiable(ctx.facts[1].operation.name, found, sources)


# The public `apply` searches each argument for transforms of functorch; the checks have refused such arguments already.
_parent: Any = super(torch.autograd.Function, _Differentiable)
_apply: Callable[..., Any] = _parent.apply


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dy = as_read(dy)
    saved, rest = ctx.facts
    operation, biases, routes, accumulators, places, buffer, for_leaf = rest
    if buffer is not None or any(accumulators):
        check_gradient(dy, buffer, accumulators)
    kept = unpack(saved.layouts, ctx.saved_tensors)
    if not is_compiling():
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained: rows are freed once they are no longer read
    weights: list[list[Tensor | None] | None] = [None] * len(routes)
    earlier: Earlier = []

    def deliver(product: int, gradient: WeightGradient) -> None:
        if not places or routes[product].accumulators or is_asked(ctx, places[product]):
            weights[product] = routes[product].deliver(gradient, earlier)

    dx, of_scale, of_biases = operation.backward(saved, kept, dy, buffer, deliver)
    if buffer is not None and dx is not None:
        dx = written(buffer, buffer)
        dx = dx.clone() if for_leaf else dx
    found = [None, dx, of_scale]  # None: of the argument before `receivers`
    for at, route in enumerate(routes):
        found += weights[at] or [None] * route.parts
    for at, facts in enumerate(biases):
        found += _of_members(of_biases[at], *facts)
    return tuple(found)


_beside_graph: Any = torch.compiler.disable(_backward, reason="compiled autograd runs it beside its graph")


def _of_members(gradient: Tensor | None, count: int, packed: bool, trained: Sequence[int]) -> list[Tensor | None]:
    """Splits the gradient of a bias into its tensors; None for those without a gradient."""
    results: list[Tensor | None] = [None] * count
    if gradient is not None:
        parts = [gradient] if packed else gradient.unbind()
        for at in trained:
            results[at] = parts[at]
    return results
