"""Expert parallelism: experts spread over the ranks of a process group (docs/parallel.md).

`moe`, `dispatch` and `combine` send tokens to the ranks of their experts. `shard_experts` spreads the experts of
grouped layers, each of which computes on its own rows, so the products never communicate.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Module, Parameter

from torch_bridge._checks import is_distributed
from torch_bridge._expert_parallel import AllToAll as AllToAll
from torch_bridge._expert_parallel import Arrived as Arrived
from torch_bridge._expert_parallel import Handle as Handle
from torch_bridge._expert_parallel import SymmetricMemory as SymmetricMemory
from torch_bridge._expert_parallel import Transport as Transport
from torch_bridge._expert_parallel import combine as combine
from torch_bridge._expert_parallel import dispatch as dispatch
from torch_bridge._expert_parallel import moe as moe
from torch_bridge._expert_parallel import save_list as save_list
from torch_bridge.nn._scaling_state import ScaledModule
from torch_bridge.nn.linear import GroupedLinear
from torch_bridge.nn.moe import MoE
from torch_bridge.quantized_weight import QuantizedWeight


def shard_experts(module: Module, mesh: DeviceMesh, **how: Any) -> Module:
    """Gives each rank of `mesh` its part of the experts of all grouped layers in `module`, in place; returns it.

    Rank r of n then holds the experts [r G/n, (r + 1) G/n) of every packed weight and bias, as DTensors with Shard(0);
    forward takes only the sizes of these experts. Values are those of the first rank. An `nn.MoE` sends its tokens to
    these ranks from then on; its shared expert stays whole.

    Args:
        module: a module with `GroupedLinear` layers whose weights and biases are single grouped parameters.
        mesh: a mesh of one axis, over which experts are spread.
        how: the options `transport`, `budget_factor`, `once_per_rank`, `send` and `chunks` of every `nn.MoE`.

    Raises:
        TypeError: not a module, or not a mesh. ValueError: the mesh has several axes; a layer has one parameter per
            group, an adapter, quantised weights or DTensors, or a number of groups that the ranks do not divide; an
            `nn.MoE` is spread already, or an option is invalid for it. Then no layer was changed.
    """
    for name, given, kind in (("module", module, Module), ("mesh", mesh, DeviceMesh)):
        if not isinstance(given, kind):
            raise TypeError(f"`{name}` of shard_experts: {type(given).__name__}, expected a {kind.__name__}; pass one.")
    if mesh.ndim != 1:
        raise ValueError(
            f"`mesh` of shard_experts: {mesh.ndim} axes, expected one, over which experts are spread; pass that part "
            "of it, e.g. `mesh['expert']`."
        )
    moes = [each for each in module.modules() if isinstance(each, MoE)]
    whole = {id(layer) for each in moes if each.shared is not None for layer in each.shared.modules()}
    named = [(path, each) for path, each in module.named_modules() if id(each) not in whole]
    layers = [(path, each) for path, each in named if isinstance(each, GroupedLinear)]
    ranks = mesh.size()
    for path, layer in layers:
        what = f"layer `{path or type(layer).__name__}`"
        if layer.weight_names != ("weight",) or layer.bias_names not in ((), ("bias",)):
            raise ValueError(
                f"{what}: one parameter per group, expected single ones to shard; build it with "
                "`single_grouped_weight` and `single_grouped_bias`."
            )
        if layer.lora.rank or is_distributed(layer.weight):
            came = "an adapter" if layer.lora.rank else "DTensors already"
            raise ValueError(
                f"{what}: {came}, expected plain weights alone to shard; shard before FSDP2, and with adapters build "
                "each rank's layer with its own experts."
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
    group, chunks = mesh.get_group(), how.get("chunks", 1)
    transports = [each.transport_over(group, **how) for each in moes]
    for each, transport in zip(moes, transports, strict=True):
        each.spread_experts(group, transport=transport, chunks=chunks)
    for _, layer in layers:
        for name in (*layer.weight_names, *layer.bias_names):
            old: Any = getattr(layer, name)
            new = Parameter(distribute_tensor(old.detach(), mesh, [Shard(0)] * mesh.ndim), old.requires_grad)
            setattr(layer, name, new)
        layer.mark_weights()
    for _, each in named:
        if isinstance(each, ScaledModule):
            each.keep_groups(mesh.get_local_rank(), ranks)
    return module
