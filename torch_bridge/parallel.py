"""Experts spread over devices: which DTensors the layers take, and what is local of them.

Each rank computes with its own experts on its own rows, so no operation here communicates.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def local_experts(parameter: DTensor, name: str, packed: bool) -> Tensor:
    """The experts of this rank [G / ranks, ...], with a history that makes their gradient a DTensor of the same places.

    Args:
        parameter: all experts, sharded along the first axis over every axis of its mesh.
        name: of the parameter, for messages. packed: whether its first axis numbers the experts.

    Raises:
        ValueError: it is placed in another way, or is one expert's own.
    """
    if not packed:
        raise ValueError(
            f"`{name}`: a DTensor of one expert, placed {_words(parameter)}, expected a plain tensor; unshard it "
            "before the layer runs, or use `single_grouped_weight` and shard experts."
        )
    if any(placement != Shard(0) for placement in parameter.placements):
        raise ValueError(
            f"`{name}`: placed {_words(parameter)}, expected Shard(0) along every axis of the mesh, experts over "
            "ranks; redistribute it, or unshard it before the layer runs."
        )
    return parameter.to_local()


def _words(parameter: Any) -> str:
    return "(" + ", ".join(str(each) for each in parameter.placements) + ")"
