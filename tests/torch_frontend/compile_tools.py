"""Helpers for tests of compiled layers and functions."""

from __future__ import annotations

import torch

from tests.torch_frontend.nn_tools import Setup


def function_or_module(mlp: bool, module: bool) -> str:
    """A form of one operation, from options that a matrix pairs with others: fewer rows than there are forms."""
    return ("GroupedMLP" if mlp else "GroupedLinear") if module else "grouped_mlp" if mlp else "grouped_linear"


def form_of(sequential: str, mlp: bool, module: bool) -> str:
    """Any form; `sequential`: "no", or how layers in turn run, which are modules that make up an MLP."""
    return function_or_module(mlp, module) if sequential == "no" else f"Sequential_{sequential}"


def module_of(sequential: bool, mlp: bool) -> str:
    """A form of `MODULES`; `mlp`: an MLP that is one operation, as none of a linear layer and of layers in turn is."""
    if sequential:
        return "Sequential_fused" if mlp else "Sequential_composed"
    return function_or_module(mlp, module=True)


def compiled(one: Setup, *, whole: bool = True, backend: str = "aot_eager") -> Setup:
    """The same problem with its operation between others in one compiled function, which also draws the keys."""
    run = one.run
    one.run = torch.compile(lambda x, **keywords: torch.relu(run(x * 2, **keywords)), fullgraph=whole, backend=backend)
    return one


def eager(one: Setup) -> Setup:
    """The function that `compiled` compiles."""
    run = one.run
    one.run = lambda x, **keywords: torch.relu(run(x * 2, **keywords))
    return one
