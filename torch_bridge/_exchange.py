"""What an exchange of an expert-parallel layer does on a rank, and the collective that moves rows.

Which row goes where is a rule of `grouped_core.exchange`. Letters: P ranks, T tokens of a rank, k experts per token, E
experts, B rows of the budget, H columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core import exchange, routing
from grouped_core.exchange import Exchange
from torch_bridge import _routing
from torch_bridge._compiling import is_compiling
from torch_bridge._operators import call, define
from torch_bridge._routing import Gradients, once, permute_backward, save
from torch_bridge._tensors import settle_rows


class SendFacts(NamedTuple):
    """Static facts of what is sent: those of `Exchange`."""

    ranks: int
    experts: int
    tokens: int
    slots: int
    budget: int


class SendOperands(NamedTuple):
    """Operands of the order in which slots are sent."""

    x: Any
    experts: Any
    probs: Any


def _send_rule(run: Any, static: SendFacts, o: SendOperands) -> tuple[Any, ...]:
    sent = exchange.send_order(run, Exchange(*static), o.experts, o.probs)
    rows = routing.gather(run, o.x, sent.source, static.slots)
    return rows, sent.source, sent.experts, sent.inverse, sent.dropped, sent.probs


_SEND = define("send", _send_rule, SendOperands, SendFacts, rows=("x", "experts", "probs"))


class Sent(NamedTuple):
    """Rows [P B, H] that a rank sends, and as in `exchange.Sent`: source, experts, inverse, dropped [1], probs."""

    rows: Tensor
    source: Tensor
    experts: Tensor
    inverse: Tensor
    dropped: Tensor
    probs: Tensor


def send(op: Exchange, x: Tensor, experts: Tensor, probs: Tensor) -> Sent:
    """What this rank sends of tokens x [T, H]; differentiable in x and in the probabilities [T, k]."""
    static = SendFacts(op.ranks, op.experts, op.tokens, op.slots, op.budget)
    return Sent(*(_send_node if is_compiling() else _send)(static, x, experts, probs))


@torch.compiler.allow_in_graph
def _send_node(static: tuple[int, ...], x: Tensor, experts: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
    """`_send` as one node of a graph of torch.compile."""
    settle_rows(x, experts, probs)
    return tuple(_send(SendFacts(*static), x, experts, probs))


def _send(static: SendFacts, x: Tensor, experts: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled() and (x.requires_grad or probs.requires_grad):
        return _Send.apply(static, x, experts, probs)
    return _sent(static, x, experts, probs)


def _sent(static: SendFacts, x: Tensor, experts: Tensor, probs: Tensor) -> Sent:
    return Sent(*call(_SEND, static, SendOperands(x, experts, probs), static.tokens))


class _Send(torch.autograd.Function):
    """Saves the inverse map [T, k]."""

    @staticmethod
    def forward(ctx: Any, static: SendFacts, x: Tensor, experts: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
        """The fields of `Sent`."""
        found = _sent(static, x, experts, probs)
        ctx.dtypes = (x.dtype, probs.dtype)
        save(ctx, found.inverse)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(found.source, found.experts, found.inverse, found.dropped)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Gradients:
        """Gradients of forward's arguments."""
        return once("dispatch", ctx, (grad_outputs[0], grad_outputs[-1]), permute_backward)


def swap(array: Tensor, group: str) -> Tensor:
    """[P B, ...]: part s is what rank s had as the part of this rank; every rank calls it.

    Args:
        array: [P B, ...], contiguous; it travels as whole bytes. group: the name of the process group.
    """
    from torch.distributed import _functional_collectives as collectives  # absent in builds without distributed

    name: Any = group  # a name is taken, though the type does not say so
    flat = array.contiguous().view(array.shape[0], -1).view(torch.uint8)
    moved = collectives.wait_tensor(collectives.all_to_all_single(flat, None, None, name))
    return moved.view(array.dtype).view(array.shape)


class _Move(torch.autograd.Function):
    """The exchange is its own gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: str) -> Tensor:
        """`swap`."""
        ctx.group = group
        return swap(rows, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        """The gradient travels back."""
        return swap(grad_outputs[0], ctx.group), None


class _Beside(torch.autograd.Function):
    """Local experts and weights of rows, in one exchange of both."""

    @staticmethod
    def forward(ctx: Any, experts: Tensor, probs: Tensor, group: str) -> tuple[Tensor, Tensor]:
        """int32 [P B] and float32 [P B] of the rows that arrive."""
        ctx.group = group
        moved = swap(torch.stack([experts, probs.view(torch.int32)], dim=1), group)
        found = moved[:, 0].contiguous()
        ctx.mark_non_differentiable(found)
        ctx.set_materialize_grads(False)
        return found, moved[:, 1].contiguous().view(torch.float32)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[None, Tensor | None, None]:
        """The gradient of the weights travels back."""
        d_probs = grad_outputs[1]
        # Ranks agree on whether there is one: the layer is the same on all of them.
        return None, None if d_probs is None else swap(d_probs, ctx.group), None


def move(rows: Tensor, group: str) -> Tensor:
    """`swap`, differentiable."""
    return _Move.apply(rows, group)


def beside(experts: Tensor, probs: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """(local experts [P B], weights [P B]) of the rows that arrive; differentiable in the weights."""
    return _Beside.apply(experts, probs, group)


def sums(rows: Tensor, source: Tensor, inverse: Tensor) -> Tensor:
    """[T, H]: the sums of the rows [P B, H] of each token, which `send` put there; differentiable."""
    return (_sums_node if is_compiling() else _sums)(rows, source, inverse)


@torch.compiler.allow_in_graph
def _sums_node(rows: Tensor, source: Tensor, inverse: Tensor) -> Tensor:
    """`sums` as one node of a graph of torch.compile."""
    settle_rows(inverse)
    return _sums(rows, source, inverse)


def _sums(rows: Tensor, source: Tensor, inverse: Tensor) -> Tensor:
    return _routing.unpermute(rows, source, inverse, None)
