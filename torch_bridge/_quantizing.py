"""Operators that quantise, dequantise, and update the state of delayed scaling.

Letters: G groups, M rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core import quantizing, scaling
from grouped_core.formats import Format, QTensor
from grouped_core.scaling import ScalingState
from torch_bridge._compiling import allow_in_graph, is_compiling
from torch_bridge._operators import call, define
from torch_bridge._tensors import forms_of

Wanted = tuple[tuple[int, Format], ...]
"""(contracted axis, format) of each form."""


class _Quantize(NamedTuple):
    wanted: Wanted
    stream: int


class _Source(NamedTuple):
    source: Any
    sizes: Any
    scale: Any
    key: Any
    skip: Any
    amax: Any
    into: Any


def _quantize(run: Any, static: _Quantize, o: _Source) -> list[Any]:
    into = None if o.into is None else forms_of(o.into)
    delayed = {"scale": o.scale, "amax": o.amax, "measure": o.amax is not None}
    options = {"key": o.key, "stream": static.stream, "into": into, "skip": o.skip}
    return quantizing.in_formats(run, o.source, static.wanted, o.sizes, **options, **delayed).forms


_QUANTIZE = define(
    "quantize", _quantize, _Source, _Quantize, rows=("source",), written=("amax", "into"), most_results=6
)


def quantized(
    source: Tensor | Sequence[Tensor],
    wanted: Wanted,
    sizes: Tensor | None,
    *,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    key: Tensor | None = None,
    stream: int = 0,
) -> list[QTensor[Tensor]]:
    """Quantises rows (with group sizes) or weights in the requested forms; one pass makes all forms of one format.

    Args:
        scale: [G], scales of delayed scaling. amax: [G], updated with the amax of forms with delayed scaling; None: it
            is not measured. key: uint32 [2], the key of stochastic rounding.
        stream: the number of the random stream; operands that share a key have different numbers.
    """
    rows = source.shape[0] if sizes is not None and isinstance(source, Tensor) else 0
    return call(_QUANTIZE, _Quantize(wanted, stream), _Source(source, sizes, scale, key, None, amax, None), rows)


def quantize_into(
    source: Tensor | Sequence[Tensor],
    forms: Sequence[QTensor[Tensor]],
    *,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """Quantises weights again, into existing forms.

    Args:
        scale, amax: those of `quantized`.
        skip: int32 [1]; if it is not zero on the device, nothing is written.
    """
    wanted = tuple((form.axis, form.format) for form in forms)
    operands = _Source(source, None, scale, None, skip, amax, quantizing.joined(list(forms)))
    call(_QUANTIZE, _Quantize(wanted, 0), operands, 0)


class _Codes(NamedTuple):
    q: Any
    sizes: Any


class _Dequantize(NamedTuple):
    dtype: str


def _dequantize(run: Any, static: _Dequantize, o: _Codes) -> tuple[Any]:
    return (quantizing.dequantize(run, o.q, o.sizes, static.dtype),)


_DEQUANTIZE = define("dequantize", _dequantize, _Codes, _Dequantize, rows=("q",))


def dequantized(q: QTensor[Tensor], sizes: Tensor | None, dtype: str) -> Tensor:
    """Returns the values of q in its logical shape, from a form that is not rotated if q has one."""
    return call(_DEQUANTIZE, _Dequantize(dtype), _Codes(quantizing.unrotated(q), sizes), q.shape[0])[0]


# ---------------------------------------------------------------------------------------------------------------------
# Delayed scaling


class _State(NamedTuple):
    scale: Any
    history: Any
    fp8_max: Any


class _Update(NamedTuple):
    algorithm: str


def _update(run: Any, static: _Update, o: _State) -> tuple[()]:
    scaling.update(run, ScalingState(o.scale, o.history, o.fp8_max, static.algorithm), reuse=True)
    return ()


_UPDATE = define("update_scaling", _update, _State, _Update, written=("scale", "history"))


def update_scaling(state: ScalingState[Tensor]) -> None:
    """Advances the state to the next step, in place."""
    (_update_node if is_compiling() else _updated)(state.scale, state.history, state.top, state.algorithm)


def _updated(scale: Tensor, history: Tensor, fp8_max: Tensor, algorithm: str) -> Tensor:
    call(_UPDATE, _Update(algorithm), _State(scale, history, fp8_max), 0)
    return scale


@allow_in_graph
def _update_node(*arguments: Any) -> Tensor:
    """Runs `_updated` as one node of a graph; a node must have a result."""
    return _updated(*arguments)


def _copied(arrays: list[Tensor]) -> Tensor:
    return torch.cat(arrays)


# Compilers optimise torch's own copies away: backward would then read the state as it is at that time.
_COPIES = torch.library.Library("torch_bridge", "FRAGMENT")
_COPIES.define("copied(Tensor[] arrays) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
for _device in ("CPU", "CUDA"):
    _COPIES.impl("copied", _copied, _device)
torch.library.register_fake("torch_bridge::copied", _copied, lib=_COPIES)
copied = torch.ops.torch_bridge.copied.default
