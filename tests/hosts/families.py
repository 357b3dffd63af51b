"""The experts modules of the installed transformers, found in its sources, and small ones of random weights.

Letters: T tokens, E experts, k experts per token, H hidden size, F expert width.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import random
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

DECORATOR = "use_experts_implementation"
T, E, K, H, F = 37, 6, 3, 64, 32
SIZES = ((r"experts$", E), (r"(hidden_size|hidden_dim|latent_size)$", H), (r"intermediate_(size|dim)$", F))
"""Sizes that configurations have by default are replaced by small ones, by the ends of their names."""
DRAWN = 8


class Family(NamedTuple):
    """One experts class: the folder of its model, its name, and the decorator as it is written."""

    model: str
    name: str
    decorator: str
    own_gate: bool

    @property
    def module(self) -> str:
        return f"transformers.models.{self.model}.modeling_{self.model}"

    def __str__(self) -> str:
        return self.name


@lru_cache(maxsize=1)
def families() -> tuple[Family, ...]:
    """Every class with the decorator, by name of its model; nothing is imported. Empty: not installed."""
    spec = importlib.util.find_spec("transformers")
    return () if spec is None or spec.origin is None else tuple(_scanned(Path(spec.origin).parent / "models"))


def _scanned(root: Path) -> Iterator[Family]:
    for path in sorted(root.glob("*/modeling_*.py")):
        text = path.read_text()
        if f"@{DECORATOR}" not in text:
            continue
        for node in ast.parse(text).body:
            found = [ast.unparse(each) for each in getattr(node, "decorator_list", ())]
            found = [each for each in found if each.split("(")[0] == DECORATOR]
            if isinstance(node, ast.ClassDef) and found:
                methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                yield Family(path.parent.name, node.name, found[0], "_apply_gate" in methods)


def drawn() -> tuple[Family, ...]:
    """One family of each kind of decorator and gate, and others by lot, always the same, until there are `DRAWN`."""
    kinds: dict[tuple[str, bool], Family] = {}
    for each in families():
        kinds.setdefault((each.decorator, each.own_gate), each)
    chosen = list(kinds.values())
    others = [each for each in families() if each not in chosen]
    more = max(0, min(len(others), DRAWN - len(chosen)))
    return (*chosen, *random.Random(0).sample(others, more))


# ---------------------------------------------------------------------------------------------------------------------
# Small modules


class _Small:
    """A configuration whose sizes are small; everything else is that of the configuration behind it."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of a copy that is being made
            raise AttributeError(name)
        return small(name, getattr(self._real, name))


def small(name: str, value: Any) -> Any:
    """The value, or a small one if it is a size."""
    if isinstance(value, (list, tuple)):
        return [small(name, each) for each in value]
    if type(value) is int or value is None:
        return next((size for end, size in SIZES if re.search(end, name)), value)
    return value


def experts_module(family: Family, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """An experts module with a small configuration and random weights, such that clamps of gates are reached.

    Raises:
        LookupError: no configuration of the model fits, with the reasons.
    """
    host = importlib.import_module(family.module)
    kind = getattr(host, family.name)
    reasons = []
    for config in _configs(host):
        try:
            module = kind(_Small(config()), **_others(kind))
        except Exception as error:  # the next one may fit
            reasons.append(f"{config.__name__}: {type(error).__name__}: {error}")
            continue
        return filled(module, seed).to(dtype)
    raise LookupError(f"{family.name}: no configuration fits: {'; '.join(reasons)}")


def _configs(host: Any) -> list[Any]:
    """Classes of configurations that a modelling file mentions, those of texts first."""
    base = importlib.import_module("transformers").PreTrainedConfig
    found = [each for each in vars(host).values() if inspect.isclass(each) and issubclass(each, base)]
    return sorted(
        {each for each in found if each is not base}, key=lambda each: ("Text" not in each.__name__, each.__name__)
    )


def _others(kind: Any) -> dict[str, Any]:
    """Small sizes for the parameters of a class besides `self` and the configuration."""
    found = list(inspect.signature(kind.__init__).parameters)[2:]
    return {name: small(name, None) for name in found if small(name, None) is not None}


def filled(module: Module, seed: int) -> Module:
    """Random weights: products keep the size of rows, but the first makes them some times larger."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, each in module.named_parameters():
            scale = 1.0 if each.dim() < 3 else (3.0 if "up_proj" in name else 1.0) / H**0.5
            each.copy_(torch.randn(each.shape, generator=generator) * scale)
    return module


class Problem(NamedTuple):
    """Operands of one call: x [T, H], ids and weights [T, k], and dy [T, H]."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    dy: Tensor

    def to(self, dtype: torch.dtype) -> Problem:
        """With other floating-point operands; weights as well."""
        return Problem(self.x.to(dtype), self.ids, self.weights.to(dtype), self.dy.to(dtype))


def problem(module: Any, *, tokens: int = T, k: int = K, seed: int = 0) -> Problem:
    """Random operands of an experts module; each token goes to k different experts, and the last expert gets none."""
    experts, hidden = module.down_proj.shape[0], module.down_proj.shape[2 if module.is_transposed else 1]
    generator = torch.Generator().manual_seed(seed + 1)
    ids = torch.stack([torch.randperm(max(experts - 1, k), generator=generator)[:k] for _ in range(tokens)])
    weights = torch.rand(tokens, k, generator=generator) + 0.1
    x, dy = (torch.randn(tokens, hidden, generator=generator) for _ in range(2))
    return Problem(x, ids, weights / weights.sum(1, keepdim=True), dy)


class InFloat64(TorchFunctionMode):
    """Makes float64 of what a model does in float32, whatever its own dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float:
            return args[0].double()
        if func is Tensor.to or func is torch.zeros_like:
            args = tuple([torch.float64 if each is torch.float32 else each for each in args])
            kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in kwargs.items()}
        return func(*args, **kwargs)


def results(module: Any, p: Problem, implementation: str) -> dict[str, Tensor]:
    """y and the gradients of x, the weights of tokens and every parameter, by name."""
    module.config._experts_implementation = implementation
    leaves = {"x": p.x.detach().clone().requires_grad_(), "weights": p.weights.detach().clone().requires_grad_()}
    leaves |= dict(module.named_parameters())
    y = module(leaves["x"], p.ids, leaves["weights"])
    found = torch.autograd.grad(y, list(leaves.values()), p.dy, allow_unused=True)
    zero = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves.values(), found, strict=True)]
    return {"y": y.detach(), **dict(zip(leaves, zero, strict=True))}
