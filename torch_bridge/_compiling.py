"""Tells whether a graph of torch.compile is being traced, and marks the functions that are its nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch._guards import TracingContext
from torch.autograd import forward_ad

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _is_compiling() -> bool:
    """Whether a graph is traced, also where a node runs on fake tensors, for which PyTorch 2.11 returns False."""
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


is_compiling: Callable[[], bool] = (
    torch.compiler.is_compiling if hasattr(torch.compiler, "_compile_session_context") else _is_compiling
)


def beside_graphs(function: _Function) -> _Function:
    """Makes a function run beside a graph, which breaks there, or with `fullgraph=True` is refused."""
    found: Any = torch.compiler.disable(function, reason=f"{function.__name__} is not traced; call it beside a graph")
    return found


def allow_in_graph(function: _Function) -> _Function:
    """Makes a function one node of a graph, except in forward mode, where it runs beside the graph, which refuses it.

    A node is traced on tensors without tangents: in the graph the tangent of its result would be lost silently.
    """
    allowed: Any = torch.compiler.allow_in_graph(function)
    beside: Any = torch.compiler.disable(function, reason="forward mode, which has no rule, is refused beside a graph")

    @wraps(function)
    def node(*arguments: Any) -> Any:
        return (allowed if forward_ad._current_level < 0 else beside)(*arguments)

    found: Any = node
    return found
