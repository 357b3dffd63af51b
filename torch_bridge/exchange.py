"""Exchanges arrays by DLPack without copies: with JAX, NumPy, CuPy and other libraries that support it.

A dtype that one side does not know is passed as raw bytes, together with its name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_bridge._tensors import TORCH_DTYPES, dtype_name

_BITS = {1: torch.uint8, 2: torch.uint16}


def from_array(array: Any) -> Tensor:
    """A tensor on the memory of `array`, which must not be written, because JAX for example assumes constant arrays.

    Element types that DLPack refuses (bfloat16 and fp8 of ml_dtypes in NumPy) are viewed as bytes for the exchange.

    Raises:
        TypeError: not a DLPack array. ValueError: an element type that torch does not have.
    """
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"`array`: {type(array).__name__}, expected an array that speaks DLPack; convert it first.")
    name = str(getattr(array.dtype, "name", array.dtype))
    if type(array).__module__.partition(".")[0] == "numpy":
        tensor = _from_numpy(array, name)
    else:
        tensor = torch.from_dlpack(array)
    tensor._from_exchange = True  # pyrefly: ignore[missing-attribute]
    return tensor


def _from_numpy(array: Any, name: str) -> Tensor:
    if name not in TORCH_DTYPES:
        raise ValueError(
            f"`array`: dtype {name}, expected one of {', '.join(TORCH_DTYPES)}; cast it, or view it as uint8."
        )
    if array.dtype.isbuiltin == 1:
        return torch.from_dlpack(array)
    # NumPy does not export element types of ml_dtypes.
    return torch.from_dlpack(array.view(f"u{array.itemsize}")).view(TORCH_DTYPES[name])


def to_bytes(tensor: Tensor) -> tuple[Tensor, str]:
    """(the memory of `tensor` as unsigned integers of its element's size, the name of its element type).

    It is meant for libraries that do not know the type; for common types pass `tensor.detach()` itself.

    Raises:
        ValueError: elements wider than two bytes, which every library knows.
    """
    if tensor.element_size() not in _BITS:
        raise ValueError(f"`tensor`: dtype {tensor.dtype}, expected one of at most 2 bytes; pass the tensor itself.")
    return tensor.detach().view(_BITS[tensor.element_size()]), dtype_name(tensor.dtype)


def is_foreign(tensor: Tensor) -> bool:
    """Whether `from_array` made this tensor: other libraries may use its memory, so operations do not write to it."""
    return getattr(tensor, "_from_exchange", False)
