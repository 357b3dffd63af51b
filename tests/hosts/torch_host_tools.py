"""What tests of hosts written in PyTorch share: a problem, its gradients, and comparisons of norms."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bounds import AGAINST_HOST, LAYER, NO_FARTHER

SIZES = {"jagged": (5, 0, 11, 1, 7), "one_takes_all": (0, 0, 24, 0, 0), "no_rows": (0, 0, 0, 0, 0)}
"""Rows of each of five experts."""
G, H, F = 5, 24, 40


def group_of_one() -> None:
    """Starts the process group of this process alone."""
    store = vars(torch.distributed)["HashStore"]()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def host(name: str) -> Any:
    """A module of a host; the test is skipped where the host is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(name.split(".")[0], reason=f"{name.split('.')[0]} is not installed (make test-hosts)")
        return importlib.import_module(name)


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal values in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def fill(module: torch.nn.Module, scale: float = 0.3) -> None:
    """Gives every Parameter values that depend on its name, and are exact in bfloat16."""
    with torch.no_grad():
        for at, (_, each) in enumerate(sorted(module.named_parameters())):
            each.copy_(draw(*each.shape, seed=100 + at, scale=scale).bfloat16())


def gradients(module: torch.nn.Module, run: Callable[..., Tensor], dy: Tensor, **leaves: Tensor) -> dict[str, Any]:
    """The result of `run(**leaves)`, and the gradients of its leaves and of the Parameters of the module."""
    held = {name: each.detach().clone().requires_grad_() for name, each in leaves.items()}
    module.zero_grad()
    y = run(**held)
    y.backward(dy.to(y.dtype))
    found = {"y": y.detach(), **{name: each.grad for name, each in held.items()}}
    return found | {name: each.grad for name, each in module.named_parameters()}


def _norms(found: Mapping[str, Tensor | None], exact: Mapping[str, Tensor | None]) -> dict[str, tuple[float, float]]:
    """By name the norm of the error, and of the exact value. A missing gradient must be a zero one."""
    assert found.keys() == exact.keys()
    norms = {}
    for name, wanted in exact.items():
        size = 0.0 if wanted is None else float(wanted.double().norm())
        value = found[name]
        if value is None or wanted is None:
            assert not size, f"the gradient of {name} is missing"
            assert value is None or not float(value.double().norm()), f"the gradient of {name} should be zero"
            continue
        assert value.shape == wanted.shape, name
        norms[name] = (float((value.double() - wanted.double()).norm()), size)
    return norms


def near(found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None], *, exact: bool = False) -> None:
    """Float32 results are as near to those of the host as both are to the exact ones (`exact`: wanted is exact)."""
    bound = LAYER if exact else AGAINST_HOST
    for name, (error, size) in _norms(found, wanted).items():
        assert error <= bound * size, f"{name}: off by {error:.3g}, norm {size:.3g}, bound {bound:.3g} of it"


def no_farther(
    ours: Mapping[str, Tensor | None], own: Mapping[str, Tensor | None], exact: Mapping[str, Tensor | None]
) -> None:
    """Results in bfloat16 are no farther from the exact ones than those of the host."""
    theirs = _norms(own, exact)
    for name, (error, size) in _norms(ours, exact).items():
        allowed = NO_FARTHER * theirs[name][0]
        assert error <= allowed, f"{name}: off by {error:.4g}, the host by {theirs[name][0]:.4g}, norm {size:.3g}"


def same(found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None]) -> None:
    """Bitwise equal."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        other = found[name]
        assert (value is None) == (other is None), name
        if value is not None and other is not None:
            assert torch.equal(value, other), name


@contextlib.contextmanager
def undone(registration: Any) -> Iterator[Any]:
    """A registration that is undone at the end, if it is still active."""
    try:
        yield registration
    finally:
        registration.undo()
