"""A separate activation, weighted by row, with its gradients. `grouped_core` defines the mathematics.

Letters: M rows, F columns of the result, W columns of h: 2F for gated activations, else F.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core import scaled_activation
from grouped_core.activations import Activation, resolve
from torch_bridge import _codec, _saved
from torch_bridge._checks import check_readable, refuse_transforms
from torch_bridge._compiling import allow_in_graph, is_compiling
from torch_bridge._once_differentiable import once_differentiable
from torch_bridge._operators import call, define
from torch_bridge._symbols import settle_rows
from torch_bridge._tensors import as_read, rows_spec
from torch_bridge.sizes import every_row


def scaled_activation_rows(
    h: Tensor, probs: Tensor | None, activation: str | Activation, group_sizes: Tensor | None = None
) -> Tensor:
    """z [M, F]: z[r] = probs[r] act(h[r]), computed in fp32 and rounded once to the dtype of h.

    Args:
        h: [M, W] fp32, bf16 or fp16, contiguous. probs: [M], None: 1. Its gradient has the dtype of probs.
        group_sizes: int32 [G] on the device of h; rows past their sum are not read and give zero. None: all rows count.

    Raises:
        TypeError: wrong dtypes. ValueError: shapes, devices, layouts.
    """
    if is_compiling():
        return _node(*[_codec.to_tuples(each) for each in (h, probs, activation, group_sizes)])
    return _rows(h, probs, activation, group_sizes)


@allow_in_graph
def _node(*arguments: Any) -> Tensor:
    """`_rows` as one node of a graph; `arguments` come from `_codec.to_tuples`."""
    settle_rows(*arguments[:2])
    return _rows(*[_codec.from_tuples(each) for each in arguments])


def _rows(h: Tensor, probs: Tensor | None, activation: str | Activation, sizes: Tensor | None) -> Tensor:
    refuse_transforms("scaled_activation", h, probs)
    check_readable("h", h, h)
    if probs is not None:
        check_readable("probs", probs, h)
    resolved = resolve(activation)
    scaled_activation.check(resolved, rows_spec(h), None if probs is None else rows_spec(probs))
    if not (torch.is_grad_enabled() and (h.requires_grad or (probs is not None and probs.requires_grad))):
        return _activated(resolved, h, sizes, probs)
    return _Scaled.apply(resolved, sizes, h, probs)


def _activated(activation: Activation, h: Tensor, sizes: Tensor | None, probs: Tensor | None) -> Tensor:
    sizes = every_row(h) if sizes is None else sizes
    return call(_FORWARD, _Activation(activation), _Operands(h, sizes, probs), h.shape[0])[0]


class _Scaled(torch.autograd.Function):
    """Saves h and, if backward reads them, the probabilities."""

    @staticmethod
    def forward(ctx: Any, activation: Activation, sizes: Tensor | None, h: Tensor, probs: Tensor | None) -> Tensor:
        """z [M, F]."""
        needs_h, needs_p = ctx.needs_input_grad[2:]
        ctx.static = _Grads(activation, needs_h, needs_p)
        ctx.probs_dtype = None if probs is None else probs.dtype
        saved = (h, sizes, probs if needs_h else None)
        _saved.tell(saved, (_saved.HIDDEN,))
        ctx.save_for_backward(*saved)
        return _activated(activation, h, sizes, probs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of forward's arguments, from that of the result: dz [M, F]."""
        (dz,) = grad_outputs
        if is_compiling() or not torch.is_grad_enabled():
            return _backward(ctx, dz)
        sources = (dz, *ctx.saved_tensors)
        with torch.no_grad():
            gradients = _backward(ctx, dz)
        return once_differentiable("scaled_activation", gradients, sources)


def _backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
    h, sizes, probs = ctx.saved_tensors
    sizes = every_row(h) if sizes is None else sizes
    dh, dp = call(_GRADS, ctx.static, _GradOperands(h, sizes, probs, as_read(dz)), h.shape[0])
    return None, None, dh, None if dp is None else dp.to(ctx.probs_dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Operators


class _Activation(NamedTuple):
    activation: Activation


class _Operands(NamedTuple):
    rows: Any
    sizes: Any
    probs: Any


def _forward_rule(run: Any, static: _Activation, o: _Operands) -> tuple[Any]:
    return (scaled_activation.activate(run, static.activation, o.rows, o.sizes, o.probs),)


_FORWARD = define("activation", _forward_rule, _Operands, _Activation, rows=("rows", "probs"))


class _Grads(NamedTuple):
    activation: Activation
    of_rows: bool
    of_probs: bool


class _GradOperands(NamedTuple):
    rows: Any
    sizes: Any
    probs: Any
    dz: Any


def _grads_rule(run: Any, static: _Grads, o: _GradOperands) -> tuple[Any, ...]:
    wanted = (static.of_rows, static.of_probs)
    return scaled_activation.activate_grads(run, static.activation, o.rows, o.sizes, o.probs, o.dz, wanted)


_GRADS = define("activation_grads", _grads_rule, _GradOperands, _Grads, rows=("rows", "probs", "dz"))
