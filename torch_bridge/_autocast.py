"""`torch.autocast` for functions and layers alike: what is cast, to what, and whose gradients go where.

As in `torch.nn.functional.linear`: rows, weights and biases of 16 or 32 bits take the dtype of autocast, float64 is
left. Codes, quantised operands and their masters, probabilities, row scales and buffers are left, too. A cast costs one
pass for each tensor and call; the cache of casts that torch keeps inside of one region is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grouped_core.formats import QTensor
from torch_bridge._compiling import is_compiling
from torch_bridge._gradients import Owner
from torch_bridge._tensors import StraightThrough
from torch_bridge.quantized_weight import QuantizedWeight

_CAST = (torch.float32, torch.bfloat16, torch.float16)


def dtype_of(x: Any) -> torch.dtype | None:
    """The dtype that autocast asks for beside rows `x`, quantised or not; None where it is off on their device."""
    if not is_compiling() and not torch._C._is_any_autocast_enabled():  # quick where it is off
        return None
    x = x.q if isinstance(x, StraightThrough) else x
    x = x.values if isinstance(x, QTensor) else x
    if not isinstance(x, Tensor):
        return None
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # which knows no meta device
        return None
    return torch.get_autocast_dtype(device)


def cast(operand: Any, dtype: torch.dtype | None) -> Any:
    """An operand, or each of a list, in `dtype` where autocast casts it; differentiable."""
    if dtype is None:
        return operand
    if isinstance(operand, (list, tuple)):
        return [cast(each, dtype) for each in operand]
    if not isinstance(operand, Tensor) or isinstance(operand, QuantizedWeight):
        return operand
    return operand.to(dtype) if operand.dtype in _CAST and operand.dtype != dtype else operand


_NOBODY = ((), (None,), (None, None))

Operands = tuple[Any, Sequence[Any], Sequence[Any], Sequence[Owner | None]]
"""x, weights, biases, and of each weight what has its `main_grad` and flags, where that is not the weight itself."""


def operands(x: Any, weights: Sequence[Any], biases: Sequence[Any]) -> Operands:
    """The operands of a public function as kernels read them: cast where autocast is on for the device of `x`."""
    dtype = dtype_of(x)
    if dtype is None:
        return x, weights, biases, _NOBODY[len(weights)]
    return cast(x, dtype), cast(weights, dtype), cast(biases, dtype), [_owner(each) for each in weights]


def _owner(weight: Any) -> Owner | None:
    if isinstance(weight, Tensor):
        return Owner((weight,), None)
    return Owner(tuple(weight), None) if isinstance(weight, (list, tuple)) else None
