"""Applies `torch.autocast` to functions and layers: it casts operands, and finds the owner of a cast weight's gradient.

As in `torch.nn.functional.linear`, rows, weights and biases of 16 or 32 bits are cast to the dtype of autocast, and
float64 is not. 8-bit rows, quantised operands and their masters, probabilities, row scales and buffers are not cast
either. A cast costs one pass per tensor and call; torch's cache of casts within one region is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grouped_core.formats import QTensor
from grouped_core.lora import LORA
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
    """Returns an operand, or each of a list, in `dtype` if autocast casts it; differentiable."""
    if dtype is None:
        return operand
    if isinstance(operand, (list, tuple)):
        return [cast(each, dtype) for each in operand]
    if not isinstance(operand, Tensor) or isinstance(operand, QuantizedWeight):
        return operand
    return operand.to(dtype) if operand.dtype in _CAST and operand.dtype != dtype else operand


_OPERANDS = ("x", "weight", "bias", "wi", "wo", "wi_bias", "wo_bias", LORA)


def cast_named(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a public function by name, with those cast that autocast casts."""
    dtype = dtype_of(arguments["x"])
    return {name: cast(each, dtype) if name in _OPERANDS else each for name, each in arguments.items()}


def owner(weight: Any) -> Owner | None:
    """Returns the owner for a weight that autocast casts: the weight itself has `main_grad` and flags, not its cast."""
    if isinstance(weight, Tensor):
        return Owner((weight,), None)
    return Owner(tuple(weight), None) if isinstance(weight, (list, tuple)) else None
