"""The problems of checks of layers whose experts are spread over ranks, and the list of these checks.

Letters: P ranks, T tokens of a rank, E experts, H hidden size, F expert width, k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from tests.torch_frontend.rank_tools import Check, Checks, check_in
from tests.torch_frontend.routing_tools import draw
from torch_bridge._exchange import operators

RANKS = 4
"""Unless --ranks says another number."""
T, E, K, H, F = 10, 8, 3, 32, 16
LOSSES = {"aux_coeff": 0.5, "z_coeff": 0.25}
CHECKS: Checks = {}
check = check_in(CHECKS)
OF_GRAPHS: Checks = {}
"""Those that compile: two ranks exchange what four do, and in most checks one of them compiles."""


def check_of_graphs(run: Check) -> Check:
    """A decorator for one of `OF_GRAPHS`."""
    return check(check_in(OF_GRAPHS)(run))


def compiled(run: Any, mesh: DeviceMesh, *, dynamic: bool | None = None, backend: Any = "aot_eager") -> Any:
    """One graph of `run` on the last rank, which is not where experts begin; eager passes on the others.

    So a graph is made once, and its exchanges must be those of eager passes, in their order.
    """
    last = mesh.get_rank() == mesh.size() - 1
    return torch.compile(run, fullgraph=True, dynamic=dynamic, backend=backend) if last else run


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


def in_jax(ranks: int, given: dict[str, Any], dy: Tensor, wanted: Sequence[str], **options: Any) -> list[Any]:
    """What `jax_grouped.parallel.moe` gives with experts over so many devices of this process, in NumPy.

    Args:
        given: x, router, wi, wo and perhaps trees of tensors, by the names of arguments, those of all ranks.
        wanted: arguments whose gradients are returned behind y, leaf by leaf; others are frozen.
    """
    import jax
    from jax.sharding import AxisType

    from jax_grouped import parallel as in_parallel

    jax.config.update("jax_num_cpu_devices", ranks)
    mesh = jax.make_mesh((ranks,), ("expert",), axis_types=(AxisType.Auto,))
    transposed = {**given, "router": given["router"].T.contiguous()}
    arrays = jax.tree.map(lambda each: jax.numpy.asarray(each.numpy()), {**transposed, "dy": dy})
    axes = in_parallel.MeshAxes(expert="expert")
    options = {"axes": axes, "mesh": mesh, "rhs_transposed": True, **options}

    def run(arrays: dict[str, Any], dy: Any) -> Any:
        def layer(some: dict[str, Any]) -> Any:
            every = {**jax.lax.stop_gradient(arrays), **some}
            x, router, wi, wo = (every.pop(name) for name in ("x", "router", "wi", "wo"))
            return in_parallel.moe(x, router, wi, wo, K, **every, **options)[0]

        y, pull = jax.vjp(layer, {name: arrays[name] for name in wanted})
        (found,) = pull(dy)
        return y, [found[name] for name in wanted]

    dy = arrays.pop("dy")
    return [np.array(each) for each in jax.tree.leaves(jax.jit(run)(arrays, dy))]
