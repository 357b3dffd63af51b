"""Experts as DTensors: supported placements, their local parts, and the return of their gradients.

NOTE: importing this module takes 0.6 s, so other modules import it only when they meet a DTensor.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torch_bridge._checks import local


def local_experts(parameter: DTensor, name: str, packed: bool) -> Tensor:
    """Returns this rank's experts [G / ranks, ...], with a history that makes their gradient a DTensor like them.

    Args:
        parameter: all experts, sharded along the first axis over every axis of its mesh.
        name: the parameter's name in messages. packed: whether its first axis numbers the experts.

    Raises:
        ValueError: it has another placement, or is the weight of one expert.
    """
    if not packed:
        raise ValueError(
            f"`{name}`: a DTensor of one expert, placed {_words(parameter)}, expected a plain tensor; unshard it "
            "before the layer runs (wrap the module that is called), or use `single_grouped_weight` and shard experts."
        )
    if any(placement != Shard(0) for placement in parameter.placements):
        raise ValueError(
            f"`{name}`: placed {_words(parameter)}, expected Shard(0) along every axis of the mesh, experts over "
            "ranks; redistribute it, or unshard it before the layer runs."
        )
    return parameter.to_local()


def beside_experts(parameter: Any, part: Tensor) -> Tensor:
    """Returns `part` [..., G / ranks] of this rank's experts as a DTensor [..., G]; unchanged if it has all experts.

    Args:
        parameter: the experts' weight, whose experts are spread over the last axis of its mesh. FSDP2 may shard it over
            the other axes.
    """
    mesh = parameter.device_mesh
    if not _spread(parameter, part.shape[-1]):
        return part
    places = [Replicate()] * (mesh.ndim - 1) + [Shard(part.dim() - 1)]
    return DTensor.from_local(part, mesh, places, run_check=False)


def own_experts(parameter: Any, given: Tensor, groups: int) -> Tensor:
    """Returns this rank's part [..., `groups`] of `given`: from `beside_experts`, or a plain tensor of all experts."""
    part, mesh = local(given), parameter.device_mesh
    if part.shape[-1] == groups or not _spread(parameter, groups):
        return part
    return part.tensor_split(mesh.size(mesh.ndim - 1), dim=-1)[mesh.get_local_rank(mesh.ndim - 1)]


def _spread(parameter: Any, groups: int) -> bool:
    """Whether each rank along the last axis of the mesh has `groups` of the experts in a packed parameter."""
    ranks = parameter.device_mesh.size(parameter.device_mesh.ndim - 1)
    return parameter.dim() == 3 and ranks > 1 and groups * ranks == parameter.shape[0]


def averaged_like(parameter: Any, whole: Tensor) -> DTensor:
    """Averages gradients of a whole weight over the ranks, and returns this rank's shard, as FSDP2 does after backward.

    Args:
        parameter: the sharded weight. whole: this rank's gradient of the whole weight, in its dtype.
    """
    mesh = parameter.device_mesh
    mine = DTensor.from_local(whole / mesh.size(), mesh, [Partial("sum")] * mesh.ndim, run_check=False)
    return mine.redistribute(mesh, parameter.placements)


def _words(parameter: Any) -> str:
    return "(" + ", ".join(str(each) for each in parameter.placements) + ")"
