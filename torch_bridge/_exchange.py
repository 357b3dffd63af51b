"""What an exchange of an expert-parallel layer does on a rank, and the collective that moves rows.

`grouped_core.exchange` defines which row goes where. An exchange is begun and finished separately, in forward and in
backward, so that other work runs in between. Letters: P ranks, T tokens of a rank, k experts per token, E experts, B
rows that one rank may send to one rank (the budget), j experts per row at most, H columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core import exchange, routed, routing
from grouped_core.exchange import Exchange
from grouped_core.formats import Format
from torch_bridge import _codec, _routing, _symmetric
from torch_bridge._agreement import Fact, check_agreement
from torch_bridge._compiling import allow_in_graph, is_compiling
from torch_bridge._operators import call, define
from torch_bridge._routing import Gradients, differentiate_once, permute_backward, save
from torch_bridge._symbols import MOST_SYMBOLS, settle_rows
from torch_bridge.sizes import every_row


def check_sent(function: str, x: Tensor, weights: Tensor, process_group: Any) -> None:
    """Checks for GROUPED_DEBUG=ranks that all ranks send as many tokens, and agree on which gradients come back.

    Raises:
        ValueError: on all ranks, because they do not.
    """
    every = "the same on every rank, because all of them exchange the gradient or none does"

    def facts() -> tuple[Fact, ...]:
        return (
            Fact(x.shape[0], "tokens", "the same number on every rank; pad with tokens that `mask` leaves out"),
            Fact(_needs(x), "(whether `x` needs a gradient)", f"{every}; call `x.requires_grad_()` on the others too"),
            Fact(
                _needs(weights),
                "(whether the router's weights need a gradient)",
                f"{every}; freeze the router on all ranks, or on none",
            ),
        )

    check_agreement(function, process_group, facts)


def check_results(function: str, results: Tensor, process_group: Any) -> None:
    """Checks for GROUPED_DEBUG=ranks that the results of the experts need a gradient on all ranks or on none.

    Raises:
        ValueError: on all ranks, because some need one.
    """
    expected = (
        "the same on every rank, because all of them exchange the gradient or none does; where only some ranks train "
        "their experts, call `x.requires_grad_()` on the tokens of every rank"
    )
    what = "(whether results of the experts need a gradient)"
    check_agreement(function, process_group, lambda: (Fact(_needs(results), what, expected),))


def _needs(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


class SendFacts(NamedTuple):
    """Static facts of what is sent: those of `Exchange` except T, for which torch.compile may have a symbol.

    Attributes:
        budget: B; None for as many rows as there can be, a multiple of T.
        codes: the format in which tokens are quantised, or None.
    """

    ranks: int
    experts: int
    slots: int
    once_per_rank: bool
    budget: int | None
    codes: Format | None = None

    def exchange(self, tokens: int) -> Exchange:
        """Returns the facts of the exchange for that number of tokens."""
        most = exchange.exchange_option(
            "send",
            ranks=self.ranks,
            experts=self.experts,
            tokens=tokens,
            slots=self.slots,
            once_per_rank=self.once_per_rank,
        )
        return most if self.budget is None else replace(most, budget=self.budget)


class SendOperands(NamedTuple):
    """Operands of the rule that orders the slots and gathers the rows to send; `count`: int32 [1], T."""

    x: Any
    experts: Any
    probs: Any
    count: Any


def _send_rule(run: Any, static: SendFacts, o: SendOperands) -> tuple[Any, ...]:
    sent = exchange.send_order(run, static.exchange(run.spec(o.experts).shape[0]), o.experts, o.probs)
    facts = (sent.source, sent.experts, sent.inverse, sent.dropped, sent.probs, sent.entries)
    if static.codes is None:
        return (*facts, routing.gather(run, o.x, sent.source, static.slots, inverse=sent.inverse), None)
    codes = routed.codes_of(run, o.x, static.codes, o.count)
    q = routed.rows_of(run, codes, sent.source, sent.inverse)
    return (*facts, q.values, q.scales)


_SEND = define("send", _send_rule, SendOperands, SendFacts, rows=("x", "experts", "probs"))


class Sent(NamedTuple):
    """What a rank sends: the fields of `exchange.Sent`, and the rows themselves.

    Attributes:
        rows: [P B, H]. If codes are sent, it has no memory of its own and only carries the gradient.
        source: int32 [P B]. experts: int32 [P B, j]. inverse: int32 [T, k]. dropped: int32 [1]. probs: fp32 [P B, j].
        entries: int32 [T, k], or None.
        values, scales: the codes of the rows and their scales, or None.
    """

    rows: Tensor
    source: Tensor
    experts: Tensor
    inverse: Tensor
    dropped: Tensor
    probs: Tensor
    entries: Tensor | None
    values: Tensor | None
    scales: Tensor | None


def send(op: Exchange, x: Tensor, experts: Tensor, probs: Tensor, codes: Format | None = None) -> Sent:
    """Orders the slots of tokens x [T, H] and returns what this rank sends; differentiable in x and probs [T, k].

    Args:
        codes: a format with scales per row, in which tokens are quantised before they are sent.
    """
    facts = SendFacts(op.ranks, op.experts, op.slots, op.once_per_rank, None, codes)
    if op.budget != facts.exchange(op.tokens).budget:
        facts = SendFacts(op.ranks, op.experts, op.slots, op.once_per_rank, op.budget, codes)
    if is_compiling():
        return Sent(*_send_node(_codec.to_tuples(facts), x, experts, probs))
    return Sent(*_send(facts, x, experts, probs))


@allow_in_graph
def _send_node(facts: Any, x: Tensor, experts: Tensor, probs: Tensor) -> tuple[Any, ...]:
    """`_send` as one node of a graph of torch.compile; `facts` come from `_codec.to_tuples`."""
    static = _codec.from_tuples(facts)
    # A budget that is a number was made of the number of tokens; otherwise the rows are a multiple of the tokens.
    most = MOST_SYMBOLS // static.exchange(1).rows if static.budget is None else 0
    settle_rows(x, experts, probs, most=most)
    return tuple(_send(static, x, experts, probs))


def _send(static: SendFacts, x: Tensor, experts: Tensor, probs: Tensor) -> tuple[Any, ...]:
    if torch.is_grad_enabled() and (x.requires_grad or probs.requires_grad):
        return _Send.apply(static, x, experts, probs)
    return _sent(static, x, experts, probs)


def _sent(static: SendFacts, x: Tensor, experts: Tensor, probs: Tensor) -> Sent:
    count = None if static.codes is None else every_row(x)
    source, found, inverse, dropped, weights, entries, values, scales = call(
        _SEND, static, SendOperands(x, experts, probs, count), x.shape[0]
    )
    rows = source.shape[0]
    facts = (source, found.view(rows, -1), inverse, dropped, weights.view(rows, -1), entries)
    if static.codes is None:
        return Sent(values, *facts, None, None)
    return Sent(_stand_in(x, (values.shape[0], x.shape[1])), *facts, values, scales)


def _stand_in(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns a tensor that only carries a gradient: nothing reads its values, and its elements have no memory."""
    return like.new_zeros(()).expand(shape)


class _Send(torch.autograd.Function):
    """The autograd function of `send`. It saves the maps of slots, [T, k] each."""

    @staticmethod
    def forward(ctx: Any, static: SendFacts, x: Tensor, experts: Tensor, probs: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the fields of `Sent`."""
        found = _sent(static, x, experts, probs)
        ctx.dtypes = (x.dtype, probs.dtype)
        save(ctx, found.inverse, found.entries)
        ctx.set_materialize_grads(False)
        fixed = [found.source, found.experts, found.inverse, found.dropped, found.entries, found.values, found.scales]
        if not ctx.needs_input_grad[1]:
            fixed.append(found.rows)
        if not ctx.needs_input_grad[3]:
            fixed.append(found.probs)
        ctx.mark_non_differentiable(*[each for each in fixed if each is not None])
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Gradients:
        """Returns the gradients of forward's arguments."""
        upstream = Sent(*grad_outputs)  # pyrefly: ignore[bad-argument-type]
        d_probs = None if upstream.probs is None else upstream.probs.reshape(-1)
        return differentiate_once("dispatch", ctx, (upstream.rows, d_probs), permute_backward)


# ---------------------------------------------------------------------------------------------------------------------
# The collective


def operators() -> tuple[Any, Any]:
    """Returns the operators of torch that begin and finish an exchange."""
    from torch.distributed import _functional_collectives  # absent in builds without distributed; it defines them

    del _functional_collectives
    return torch.ops._c10d_functional.all_to_all_single.default, torch.ops._c10d_functional.wait_tensor.default


def _begin(array: Tensor, group: Group, counts: Tensor | None = None) -> Tensor:
    """Begins an all-to-all and returns its result [P B, ...], not to be read before `_wait`; part s comes from rank s.

    Every rank calls it. The array travels as whole bytes; with `counts`, int64 [P], only that many rows of each part
    do.
    """
    if counts is not None:
        return _symmetric.begin(array, counts, group.name)
    start, _ = operators()
    flat = array.contiguous().view(array.shape[0], -1).view(torch.uint8)
    parts = [array.shape[0] // group.ranks] * group.ranks
    return start(flat, parts, parts, group.name).view(array.dtype).view(array.shape)


def _wait(pending: Tensor, counts: Tensor | None = None) -> Tensor:
    if counts is not None:
        return _symmetric.finish(pending)
    _, finish = operators()
    return finish(pending)


class Group(NamedTuple):
    """A process group, as a graph of torch.compile can hold it: its name, and P.

    `counted`: whether only the rows in use travel, through symmetric memory.
    """

    name: str
    ranks: int
    counted: bool = False


def counts_of(experts: Tensor, group: Group) -> Tensor | None:
    """Returns int64 [P]: how many rows of each part have an expert [P B, j]; None if parts travel whole."""
    return (experts[:, 0].view(group.ranks, -1) >= 0).sum(1) if group.counted else None


class _Begin(torch.autograd.Function):
    """Begins an exchange; its backward finishes the exchange of the gradient.

    `carries`: whether rows travel in forward; otherwise only their gradient does, in backward. `counts`: how many rows
    of each part travel, or None.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group, carries: bool, counts: Tensor | None) -> Tensor:
        """Returns the result [P B, ...] of the exchange, which is still pending."""
        ctx.set_materialize_grads(False)
        save(ctx, counts)
        return _begin(rows, group, counts) if carries else rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        """Finishes the exchange of the gradient and returns it."""
        (pending,) = grad_outputs
        return None if pending is None else _wait(pending, ctx.saved_tensors[0]), None, None, None


class _Finish(torch.autograd.Function):
    """Finishes an exchange; its backward begins the exchange of the gradient, which all ranks have or none.

    `counts`: how many rows of each part have arrived, or None.
    """

    @staticmethod
    def forward(ctx: Any, pending: Tensor, group: Group, carries: bool, counts: Tensor | None) -> Tensor:
        """Returns the rows [P B, ...] that have arrived."""
        ctx.group = group
        ctx.set_materialize_grads(False)
        save(ctx, counts)
        return _wait(pending, counts) if carries else pending.view_as(pending)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        """Begins the exchange of the gradient and returns its pending result."""
        (grad,) = grad_outputs
        return None if grad is None else _begin(grad, ctx.group, ctx.saved_tensors[0]), None, None, None


def begin(
    rows: Tensor, group: Group, counts: Tensor | None = None, *, carries: bool = True
) -> Callable[[Tensor | None], Tensor]:
    """Begins the exchange of rows [P B, ...]. Differentiable.

    Args:
        counts: int64 [P], the number of rows in use in each part, if only these travel; None: all rows travel.
        carries: whether the rows travel in forward; False: only their gradient travels, in backward.

    Returns:
        A function that finishes the exchange and returns the rows that have arrived. Its argument is int64 [P], how
        many of them are in use in each part, or None if all rows travel.
    """
    pending = _Begin.apply(rows, group, carries, counts)

    def finish(came: Tensor | None) -> Tensor:
        return _Finish.apply(pending, group, carries, came)

    return finish


class Brought(NamedTuple):
    """What the other ranks have sent to this one, with fields as in `Sent`: rows or codes, local experts, weights."""

    rows: Tensor
    experts: Tensor
    probs: Tensor
    values: Tensor | None
    scales: Tensor | None


def begin_dispatch(sent: Sent, group: Group, scales_along: int = 0) -> Callable[[], Brought]:
    """Begins the exchange of what is sent, in two messages: one of rows or codes, one of experts, weights and scales.

    Args:
        scales_along: the axis of the scales that runs along rows.
    """
    small = [sent.experts.view(torch.uint8), sent.probs.detach().view(torch.uint8)]
    width = small[0].shape[1]
    if sent.scales is not None:
        of_rows = sent.scales.movedim(scales_along, 0).reshape(-1)  # lengths of 1 hide strides that a view refuses
        small.append(of_rows.view(torch.uint8).view(sent.source.shape[0], -1))
    counts = counts_of(sent.experts, group)
    values = None if sent.values is None else _begin(sent.values, group, counts)
    facts = _begin(torch.cat(small, dim=1), group)
    rows = begin(sent.rows, group, counts, carries=values is None)
    weight = begin(sent.probs, group, carries=False)

    def finish() -> Brought:
        words = _wait(facts)
        experts = _elements(words[:, :width], torch.int32)
        probs = _elements(words[:, width : 2 * width], torch.float32)
        probs = _Valued.apply(weight(None), probs)
        came = counts_of(experts, group)
        if values is None or sent.scales is None:
            return Brought(rows(came), experts, probs, None, None)
        scales = _elements(words[:, 2 * width :], sent.scales.dtype).movedim(0, scales_along).contiguous()
        return Brought(rows(came), experts, probs, _wait(values, counts), scales)

    return finish


def _elements(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Reads columns of bytes as elements of `dtype`.

    An array with at most one row counts as contiguous whatever its stride, but `view` refuses the stride. So the bytes
    are viewed along one axis.
    """
    return words.reshape(-1).view(dtype).view(words.shape[0], words.shape[1] // dtype.itemsize)


class _Valued(torch.autograd.Function):
    """Returns `values`, which arrived in a separate message; their gradient goes to the tensor `carrier`."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, values: Tensor) -> Tensor:
        """Returns `values`."""
        del ctx, carrier
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        """Passes the gradient on to `carrier`."""
        del ctx
        return grad_outputs[0], None


def beyond(experts: Tensor, max_rows: int) -> Tensor:
    """Returns an int32 scalar: how many of the experts [M, j] of received rows exceed the room for `max_rows` rows."""
    return ((experts >= 0).sum(dtype=torch.int32) - max_rows).clamp(min=0)


# ---------------------------------------------------------------------------------------------------------------------
# What came back


def sums(rows: Tensor, source: Tensor, inverse: Tensor) -> Tensor:
    """Returns [T, H], for each token the sum of its rows, which `send` placed in the rows [P B, H]; differentiable."""
    return (_sums_node if is_compiling() else _sums)(rows, source, inverse)


@allow_in_graph
def _sums_node(rows: Tensor, source: Tensor, inverse: Tensor) -> Tensor:
    """`sums` as one node of a graph of torch.compile."""
    settle_rows(inverse)
    return _sums(rows, source, inverse)


def _sums(rows: Tensor, source: Tensor, inverse: Tensor) -> Tensor:
    return _routing.unpermute(rows, source, inverse, None)
