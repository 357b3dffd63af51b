"""Tells whether a graph of torch.compile is being traced."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._guards import TracingContext


def _is_compiling() -> bool:
    """Whether a graph is traced, also where a node runs on fake tensors, for which PyTorch 2.11 returns False."""
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


is_compiling: Callable[[], bool] = (
    torch.compiler.is_compiling if hasattr(torch.compiler, "_compile_session_context") else _is_compiling
)
