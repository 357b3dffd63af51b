"""Operations of PyTorch that moves of checkpoints need, and tensors to and from NumPy arrays of the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grouped_core.safetensors_file import numpy_dtype


class _Torch:
    """Implements `grouped_core.layout_steps.Arrays` for tensors."""

    def stack(self, arrays: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(arrays))

    def concatenate(self, arrays: Sequence[Tensor], axis: int) -> Tensor:
        return torch.cat(list(arrays), axis)

    def view(self, array: Tensor, dtype: str) -> Tensor:
        return array.view(getattr(torch, dtype))

    def cast(self, array: Tensor, dtype: str) -> Tensor:
        return array.to(getattr(torch, dtype))


TORCH = _Torch()


def name_of(dtype: torch.dtype) -> str:
    """Returns the name of a dtype as NumPy and ml_dtypes spell it."""
    return str(dtype).removeprefix("torch.")


def to_numpy(value: Tensor) -> NDArray[Any]:
    """Returns the values on the host, as an array of the same bits."""
    host = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    dtype = numpy_dtype(name_of(value.dtype))
    if not host.numel():
        return np.empty(host.shape, dtype)
    return host.reshape(-1).view(torch.uint8).numpy().view(dtype).reshape(host.shape)


def from_numpy(array: NDArray[Any]) -> Tensor:
    """The inverse of `to_numpy`; shares memory."""
    dtype = getattr(torch, array.dtype.name)
    if not array.size:
        return torch.empty(array.shape, dtype=dtype, device="cpu")
    return torch.from_numpy(array.reshape(-1).view(np.uint8)).view(dtype).reshape(array.shape)
