"""Helpers for tests of compiled layers and functions."""

from __future__ import annotations

import torch

from tests.torch_frontend.nn_tools import Setup


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
