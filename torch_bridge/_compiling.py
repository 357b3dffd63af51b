"""Tells whether a graph of torch.compile is being traced, and marks the functions that are its nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._guards import TracingContext

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _is_compiling() -> bool:
    """Whether a graph is traced, also where a node runs on fake tensors, for which PyTorch 2.11 returns False."""
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


is_compiling: Callable[[], bool] = (
    torch.compiler.is_compiling if hasattr(torch.compiler, "_compile_session_context") else _is_compiling
)


def allow_in_graph(function: _Function) -> _Function:
    """Makes a function one node of a graph; PyTorch's decorator of this name has no annotations, and keeps no type."""
    allowed: Any = torch.compiler.allow_in_graph(function)
    return allowed
