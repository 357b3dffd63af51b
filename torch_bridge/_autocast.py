"""`torch.autocast` for functions and layers: which operands are cast, to which dtype, and who owns their gradients.

As in `torch.nn.functional.linear`, rows, weights and biases of 16 or 32 bits are cast to the dtype of autocast, and
float64 is not. 8-bit rows, quantised operands and their masters, probabilities, row scales and buffers are not cast
either. A cast costs one pass per tensor and call; torch's cache of casts within one region is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from grouped_core.formats import QTensor
from torch_bridge._gradients import Owner
from torch_bridge._tensors import StraightThrough
from torch_bridge.quantized_weight import QuantizedWeight

_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled  # faster than asking for one device
_CAST = (torch.float32, torch.bfloat16, torch.float16)


def dtype_of(x: Any) -> torch.dtype | None:
    """The dtype of autocast for rows `x`, quantised or not; None if autocast is off on their device."""
    if not _any_autocast():
        return None
    x = x.q if isinstance(x, StraightThrough) else x
    x = x.values if isinstance(x, QTensor) else x
    if not isinstance(x, Tensor):
        return None
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # autocast does not support meta
        return None
    return torch.get_autocast_dtype(device)


def cast(operand: Any, dtype: torch.dtype | None) -> Any:
    """An operand, or each of a list, in `dtype` if autocast casts it; differentiable."""
    if dtype is None:
        return operand
    if isinstance(operand, (list, tuple)):
        return [cast(each, dtype) for each in operand]
    if not isinstance(operand, Tensor) or isinstance(operand, QuantizedWeight):
        return operand
    return operand.to(dtype) if operand.dtype in _CAST and operand.dtype != dtype else operand


Operands = tuple[Any, Sequence[Any], Sequence[Any], tuple[Owner | None, ...]]
"""x, weights, biases, and for each weight the owner of its `main_grad` and flags if that is not the weight itself."""


def operands(x: Any, weights: Sequence[Any], biases: Sequence[Any]) -> Operands:
    """The operands of a public function as kernels read them: cast if autocast is on for the device of `x`."""
    dtype = dtype_of(x)
    if dtype is None:
        return x, weights, biases, (None,) * len(weights)
    return cast(x, dtype), cast(weights, dtype), cast(biases, dtype), tuple([_owner(each) for each in weights])


def _owner(weight: Any) -> Owner | None:
    if isinstance(weight, Tensor):
        return Owner((weight,), None)
    return Owner(tuple(weight), None) if isinstance(weight, (list, tuple)) else None
