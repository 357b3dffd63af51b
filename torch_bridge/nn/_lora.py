"""The adapters of layers: their parameters, their use as operands, merging into the weights, and the layout of PEFT.

Letters: G groups (experts), K in, N out, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from grouped_core import lora, lora_layout
from grouped_core.layouts import dotted
from torch_bridge._adapter import merged
from torch_bridge._checks import is_distributed
from torch_bridge._gradients import Owner
from torch_bridge._tensors import draw_key

FACTORS = ("lora_A", "lora_B")
"""The names of the parameters A [G, r, K] and B [G, N, r]."""


def hold(layer: Any, device: Any, dtype: torch.dtype) -> None:
    """Registers A and B of a `GroupedLinear`, and freezes its weights and biases."""
    for name in (*layer.weight_names, *layer.bias_names):
        getattr(layer, name).requires_grad_(False)
    groups, rank = layer.num_groups, layer.lora.rank
    shapes = ((groups, rank, layer.in_features), (groups, layer.out_features, rank))
    for name, shape in zip(FACTORS, shapes, strict=True):
        layer.register_parameter(name, Parameter(torch.empty(shape, device=device, dtype=dtype)))


def reset(layer: Any) -> None:
    """Initialises A uniformly within 1/sqrt(K) and B with zeros, so that the layer computes what its weights do."""
    with torch.no_grad():
        layer.lora_A.uniform_(-1 / math.sqrt(layer.in_features), 1 / math.sqrt(layer.in_features))
        layer.lora_B.zero_()


def operands(layer: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns A and B in the dtype of the computation; if the experts are sharded, this rank's part of them."""
    a, b = layer.local_factors()
    return a.to(dtype), b.to(dtype)


def key(dropout: float, training: bool, device: torch.device) -> tuple[float, Tensor | None]:
    """Draws a key from the device's generator and returns (dropout, key) of one pass; (0.0, None) in evaluation."""
    if not dropout or not training:
        return 0.0, None
    return dropout, draw_key(device)


def owners(layer: Any, path: str = "") -> tuple[Owner | None, Owner | None]:
    """Returns the owners of A and of B; None if gradients simply go to autograd. `path`: the layer, for messages."""
    a, b = layer.lora_A, layer.lora_B
    return layer.owner((a,), ("lora_A",), path), layer.owner((b,), ("lora_B",), path)


def merge(layer: Any) -> None:
    """Adds the adapter to the weights, rounded once to their dtype, and removes it; quantised weights become plain."""
    with torch.no_grad():
        a, b = layer.local_factors()
        members = layer.plain_members()
        whole = members[0] if members[0].dim() == 3 else torch.stack(members)
        made = merged(whole, a, b, layer.lora.scaling)
        layer.take_plain(list(made.unbind()) if len(members) > 1 or members[0].dim() == 2 else [made])
    for name in FACTORS:
        delattr(layer, name)
    layer.lora = lora.LayerOptions()


# PEFT wraps the two parameters of an experts module one after the other.
_PEFT = ("base_layer.", "")


def _check_has_adapters(layers: tuple[Any, Any]) -> None:
    if not all(layer.lora.rank for layer in layers):
        raise ValueError(
            "adapters of PEFT: a layer of GroupedMLP has none, expected one in both; make the layer with `lora_rank`, "
            "and use them before `merge`."
        )


def to_peft(layers: tuple[Any, Any], prefix: str) -> dict[str, Tensor]:
    """Returns the adapters of both layers of an MLP, named and laid out as those of PEFT's `target_parameters`.

    Raises:
        ValueError: a layer has no adapter.
    """
    _check_has_adapters(layers)
    start = dotted(prefix)
    found: dict[str, Tensor] = {}
    for layer, place in zip(layers, _PEFT, strict=True):
        a, b = lora_layout.to_peft(layer.lora_A.detach(), layer.lora_B.detach(), transposed=True)
        found |= {f"{start}{place}lora_A.weight": a.contiguous(), f"{start}{place}lora_B.weight": b.contiguous()}
    return found


def from_peft(layers: tuple[Any, Any], state: Mapping[str, Tensor], prefix: str) -> None:
    """Loads adapters that `to_peft` or PEFT made, rounded to the dtype of the parameters like any state dict.

    Raises:
        TypeError: not a mapping of tensors. ValueError: an entry is missing, or its shape is not that of the layer, or
            a layer has no adapter, or FSDP2 has gathered its Parameters. In all cases nothing is loaded.
    """
    _check_has_adapters(layers)
    if not isinstance(state, Mapping):
        raise TypeError(
            f"adapters of PEFT: {type(state).__name__}, expected a mapping of names to tensors; pass a state dict."
        )
    made: list[tuple[Parameter, Tensor]] = []
    for layer, place in zip(layers, _PEFT, strict=True):
        names = [f"{dotted(prefix)}{place}{name}.weight" for name in FACTORS]
        missing = [name for name in names if name not in state]
        if missing:
            raise ValueError(
                f"adapters of PEFT: `{missing[0]}` is missing, expected the entries of `target_parameters` for both "
                f"weights under `{prefix}`; check the prefix."
            )
        given = lora_layout.from_peft(state[names[0]], state[names[1]], layer.num_groups, names, transposed=True)
        for name, parameter, value in zip(names, (layer.lora_A, layer.lora_B), given, strict=True):
            if value.shape != parameter.shape:
                raise ValueError(
                    f"adapters of PEFT: `{name}` gives {tuple(value.shape)}, expected {tuple(parameter.shape)}; load "
                    "adapters of the same rank and model."
                )
            if is_distributed(parameter):
                raise ValueError(
                    f"adapters of PEFT: `{name}` for a DTensor, expected a plain parameter; load before it is sharded."
                )
            made.append((parameter, value))
        layer.check_kept("adapters of PEFT")
    with torch.no_grad():
        for parameter, value in made:
            parameter.copy_(value)
