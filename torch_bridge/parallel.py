"""Experts spread over devices: which DTensors the layers take, what is local of them, how their gradients come back.

Each rank computes with its own experts on its own rows, so the products themselves never communicate.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import Module, Parameter

from torch_bridge.params import local
from torch_bridge.primary import QuantizedWeight


def shard_experts(module: Module, mesh: DeviceMesh) -> Module:
    """Gives each rank of `mesh` its part of the experts of all grouped layers in `module`, in place; returns it.

    Rank r of n then holds the experts [r G/n, (r + 1) G/n) of every packed weight and bias, as DTensors with Shard(0);
    forward takes the sizes of these alone. Values are those of the first rank.

    Args:
        module: with `GroupedLinear` layers whose weights and biases are single grouped parameters.
        mesh: of one axis, over which experts are spread.

    Raises:
        ValueError: a layer has one parameter a group, or a number of groups that the ranks do not divide; no layer was
            changed then.
    """
    from torch_bridge.nn._recipes import take_groups
    from torch_bridge.nn.linear import GroupedLinear

    layers = [(path, each) for path, each in module.named_modules() if isinstance(each, GroupedLinear)]
    ranks = mesh.size()
    for path, layer in layers:
        what = f"layer `{path or type(layer).__name__}`"
        if layer.weight_names != ("weight",) or layer.bias_names not in ((), ("bias",)):
            raise ValueError(
                f"{what}: one parameter a group, expected single ones to shard; build it with `single_grouped_weight` "
                "and `single_grouped_bias`."
            )
        if isinstance(layer.weight, QuantizedWeight):
            raise ValueError(
                f"{what}: quantised weights, expected plain ones to shard; build each rank's layer with its own "
                "experts."
            )
        if layer.num_groups % ranks:
            raise ValueError(
                f"{what}: {layer.num_groups} groups over {ranks} ranks, expected a number that the ranks divide; "
                "choose another mesh."
            )
    for _, layer in layers:
        for name in (*layer.weight_names, *layer.bias_names):
            old: Any = getattr(layer, name)
            new = Parameter(distribute_tensor(old.detach(), mesh, [Shard(0)] * mesh.ndim), old.requires_grad)
            setattr(layer, name, new)
        layer.mark_weights()
    for each in module.modules():
        take_groups(each, mesh.get_local_rank(), ranks)
    return module


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
            "before the layer runs (wrap the module that is called), or use `single_grouped_weight` and shard experts."
        )
    if any(placement != Shard(0) for placement in parameter.placements):
        raise ValueError(
            f"`{name}`: placed {_words(parameter)}, expected Shard(0) along every axis of the mesh, experts over "
            "ranks; redistribute it, or unshard it before the layer runs."
        )
    return parameter.to_local()


def beside_experts(parameter: Any, part: Tensor) -> Tensor:
    """`part` [..., G / ranks], of this rank's experts, as a DTensor [..., G]; as it stands where it is of all.

    Args:
        parameter: of the experts, spread over the last axis of its mesh. FSDP2 may shard it over axes in front.
    """
    mesh = parameter.device_mesh
    if not _spread(parameter, part.shape[-1]):
        return part
    places = [Replicate()] * (mesh.ndim - 1) + [Shard(part.dim() - 1)]
    return DTensor.from_local(part, mesh, places, run_check=False)


def own_experts(parameter: Any, given: Tensor, groups: int) -> Tensor:
    """What lies here of `beside_experts`, or of a plain tensor [..., G] of all experts; [..., `groups`]."""
    part, mesh = local(given), parameter.device_mesh
    if part.shape[-1] == groups or not _spread(parameter, groups):
        return part
    return part.tensor_split(mesh.size(mesh.ndim - 1), dim=-1)[mesh.get_local_rank(mesh.ndim - 1)]


def _spread(parameter: Any, groups: int) -> bool:
    """Whether `groups` of the experts in a packed parameter belong to each rank along the last axis of its mesh."""
    ranks = parameter.device_mesh.size(parameter.device_mesh.ndim - 1)
    return parameter.dim() == 3 and ranks > 1 and groups * ranks == parameter.shape[0]


def averaged_like(parameter: Any, whole: Tensor) -> DTensor:
    """The mean over ranks of their gradients for a whole weight, each rank's own part: what FSDP2 does after backward.

    Args:
        parameter: the sharded weight. whole: this rank's gradient of all of it, in its dtype.
    """
    mesh = parameter.device_mesh
    mine = DTensor.from_local(whole / mesh.size(), mesh, [Partial("sum")] * mesh.ndim, run_check=False)
    return mine.redistribute(mesh, parameter.placements)


def _words(parameter: Any) -> str:
    return "(" + ", ".join(str(each) for each in parameter.placements) + ")"
