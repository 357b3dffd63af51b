"""An activation that stands alone, weighted by row, with its gradients. The mathematics is grouped_core's.

Letters: M rows, F columns of the result, W columns of h: 2F for gated activations, else F.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from grouped_core import calls, scaled_activation
from grouped_core.activations import Activation, resolve
from torch_bridge import _graph, _library, _run, _saved
from torch_bridge._arguments import refuse_transforms
from torch_bridge._compiling import is_compiling
from torch_bridge._library import Execute
from torch_bridge._memory import raw_stream
from torch_bridge._products import once
from torch_bridge._run import spec_of
from torch_bridge.params import check_operand, device_integers


def scaled_activation_rows(
    h: Tensor, probs: Tensor | None, activation: str | Activation, group_sizes: Tensor | None = None
) -> Tensor:
    """z [M, F]: z[r] = probs[r] act(h[r]), computed in fp32 and rounded once to the dtype of h.

    Args:
        h: [M, W] fp32, bf16 or fp16, contiguous. probs: [M], None: 1. Its gradient comes in its dtype.
        group_sizes: int32 [G] on the device of h; rows past their sum are not read and give zero. None: all rows count.

    Raises:
        TypeError: dtypes. ValueError: shapes, devices, layouts.
    """
    text = _encode(activation)
    if not is_compiling():
        refuse_transforms("scaled_activation", h, probs)
        check_operand("h", h, h)
        if probs is not None:
            check_operand("probs", probs, h)
        scaled_activation.check(_decode(text), spec_of(h), None if probs is None else spec_of(probs))
    needs = torch.is_grad_enabled() and (h.requires_grad or (probs is not None and probs.requires_grad))
    if not needs:
        return _activation(h, group_sizes, probs, text)
    return _Scaled.apply(text, group_sizes, h, probs)


def _encode(activation: str | Activation) -> str:
    return _constant(_graph.taken_apart(activation)) if is_compiling() else _encoded(activation)


@torch.compiler.assume_constant_result
def _constant(activation: Any) -> str:
    return _encoded(_graph.together(activation))


@lru_cache(maxsize=256)
def _encoded(activation: str | Activation) -> str:
    return json.dumps(dataclasses.asdict(resolve(activation)), sort_keys=True)


@lru_cache(maxsize=256)
def _decode(text: str) -> Activation:
    return Activation(**json.loads(text))


class _Scaled(torch.autograd.Function):
    """Keeps h and, where they are read, the probabilities."""

    @staticmethod
    def forward(ctx: Any, text: str, sizes: Tensor | None, h: Tensor, probs: Tensor | None) -> Tensor:
        """z [M, F]."""
        needs_h, needs_p = ctx.needs_input_grad[2:]
        ctx.text = text
        ctx.wanted = "h" * needs_h + "p" * needs_p
        ctx.probs_dtype = None if probs is None else probs.dtype
        saved = (h, sizes, probs if needs_h else None)
        _saved.tell(saved, (_saved.HIDDEN,))
        ctx.save_for_backward(*saved)
        return _activation(h, sizes, probs, text)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of forward's arguments; the one of the result is dz [M, F]."""
        (dz,) = grad_outputs
        if is_compiling() or not torch.is_grad_enabled():
            return _backward(ctx, dz)
        sources = (dz, *ctx.saved_tensors)
        with torch.no_grad():
            gradients = _backward(ctx, dz)
        return once("scaled_activation", gradients, sources)


def _backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
    h, sizes, probs = ctx.saved_tensors
    found = iter(_activation_grads(dz.contiguous(), h, sizes, probs, ctx.text, ctx.wanted))
    dh = next(found) if "h" in ctx.wanted else None
    dp = next(found).to(ctx.probs_dtype) if "p" in ctx.wanted else None
    return None, None, dh, dp


# ---------------------------------------------------------------------------------------------------------------------
# Operators


def _forward_rule(run: Any, text: str, operands: Sequence[Any]) -> tuple[Any, ...]:
    h, sizes, probs = operands
    return (scaled_activation.activate(run, _decode(text), h, sizes, probs),)


def _grads_rule(run: Any, static: tuple[str, str], operands: Sequence[Any]) -> tuple[Any, ...]:
    text, wanted = static
    h, sizes, probs, dz = operands
    return scaled_activation.activate_grads(run, _decode(text), h, sizes, probs, dz, ("h" in wanted, "p" in wanted))


_every_row: dict[tuple[torch.device, int], Tensor] = {}  # by device and stream, on which it was filled


def _sizes(execute: Execute, group_sizes: Tensor | None, h: Tensor) -> Tensor:
    """The sizes, or those of one group of all rows: what is above M is clamped, so one tensor serves every M."""
    if group_sizes is not None:
        return group_sizes
    if execute is not _run.execute:
        return h.new_empty((1,), dtype=torch.int32)
    on_gpu = h.device.type == "cuda"
    key = (h.device, raw_stream(h.device.index) if on_gpu else 0)
    kept = _every_row.get(key)
    if kept is None:
        kept = device_integers([calls.MAX_ROWS], torch.int32, h.device)
        if not (on_gpu and torch.cuda.is_current_stream_capturing()):  # else it belongs to the graph
            _every_row[key] = kept
    return kept


def _run_activation(
    execute: Execute, rows: Tensor, group_sizes: Tensor | None, probs: Tensor | None, activation: str
) -> Tensor:
    return execute(_forward_rule, activation, (rows, _sizes(execute, group_sizes, rows), probs), (0, 2))[0]


def _run_grads(
    execute: Execute,
    dz: Tensor,
    rows: Tensor,
    group_sizes: Tensor | None,
    probs: Tensor | None,
    activation: str,
    wanted: str,
) -> list[Tensor]:
    found = execute(_grads_rule, (activation, wanted), (rows, _sizes(execute, group_sizes, rows), probs, dz), (0, 2, 3))
    return [each for each in found if each is not None]


_OPERANDS = "Tensor rows, Tensor? group_sizes, Tensor? probs, str activation"
_library.define("activation", f"({_OPERANDS}) -> Tensor", _run_activation)
# `wanted`: "h" the gradient of the rows, "p" that of the probabilities, in float32.
_library.define("activation_grads", f"(Tensor dz, {_OPERANDS}, str wanted) -> Tensor[]", _run_grads)

_activation = torch.ops.torch_bridge.activation.default
_activation_grads = torch.ops.torch_bridge.activation_grads.default
