"""The problems of checks of layers whose experts are spread over ranks, and the list of these checks.

Letters: P ranks, T tokens of a rank, E experts, H hidden size, F expert width, k experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from tests.torch_frontend.rank_tools import Checks, check_in
from tests.torch_frontend.routing_tools import draw
from torch_bridge._exchange import operators

RANKS = 4
"""Unless --ranks says another number."""
T, E, K, H, F = 10, 8, 3, 32, 16
LOSSES = {"aux_coeff": 0.5, "z_coeff": 0.25}
CHECKS: Checks = {}
check = check_in(CHECKS)


def drawn(mesh: DeviceMesh, *shape: int, seed: object = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(draw(*shape, seed=seed)).to(mesh.device_type, dtype)


def own_part(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's part of the first axis."""
    return whole.chunk(mesh.size())[mesh.get_local_rank()].clone()


def all_parts(part: Tensor, group: Any = None) -> Tensor:
    """The parts of all ranks, or of those of a group."""
    found = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, part.contiguous(), group=group)
    return torch.cat(found)


class Exchanges(TorchDispatchMode):
    """Counts exchanges that begin, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is operators()[0]:
            self.sent.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def weights_of(mesh: DeviceMesh, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    router = drawn(mesh, E, H, seed="router")
    wi, wo = drawn(mesh, E, 2 * F, H, seed="wi", dtype=dtype), drawn(mesh, E, H, F, seed="wo", dtype=dtype)
    return router, wi, wo
