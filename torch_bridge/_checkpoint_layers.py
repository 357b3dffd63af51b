"""What the layers of modules say of their tensors in checkpoints: which columns an activation reads, in what order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from torch.nn import Module

from grouped_core.activations import Activation
from grouped_core.layouts import join
from torch_bridge.nn.mlp import GroupedMLP
from torch_bridge.nn.sequential import Activated, Sequential

_Layer = TypeVar("_Layer", bound=Module)


def placed(modules: Mapping[str, Module], kind: type[_Layer]) -> Iterator[tuple[str, _Layer]]:
    """The layers of a kind with their paths. A layer with several paths comes with each, as in a state dict."""
    for path, module in modules.items():
        for name, each in module.named_modules(remove_duplicate=False):
            if isinstance(each, kind):
                yield join(path, name), each


def of_mlps(modules: Mapping[str, Module]) -> dict[str, Activation]:
    """The activation of each MLP, by its path."""
    return {path: mlp.activation for path, mlp in placed(modules, GroupedMLP)}


def activated(modules: Mapping[str, Module]) -> dict[str, Activated]:
    """The grouped linear layers of each `Sequential` that an activation follows, by path; `reader` is a path too."""
    return {
        join(path, each.name): each._replace(reader=join(path, each.reader))
        for path, layers in placed(modules, Sequential)
        for each in layers.activated()
    }


def of_linears(modules: Mapping[str, Module]) -> dict[str, Activation]:
    """The activation behind each of `activated`, by path."""
    return {path: each.activation for path, each in activated(modules).items()}


def blocks_of(activations: Mapping[str, Activation]) -> dict[str, int | None]:
    """The blocks in which gate and linear columns alternate."""
    return {path: each.interleave for path, each in activations.items()}
