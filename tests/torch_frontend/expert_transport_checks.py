"""What ranks check of the transport through symmetric memory; `expert_parallel_checks` runs it.

On the CPU a stand-in of the operator carries the rows; on GPUs it is PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import SkipTest

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests import asserts
from tests.torch_frontend.expert_parallel_tools import (
    E,
    F,
    H,
    K,
    T,
    check,
    check_of_graphs,
    compiled,
    drawn,
    own_part,
    weights_of,
)
from tests.torch_frontend.routing_tools import experts_of
from tests.torch_frontend.symmetric_stand_in import StandIn, stand_in
from tests.torch_frontend.torch_tools import leaf
from torch_bridge import MXFP8, _symmetric, nn, parallel


@contextmanager
def symmetric_memory(mesh: DeviceMesh) -> Iterator[StandIn | None]:
    """Symmetric memory for the ranks: the stand-in on the CPU; skips on GPUs that have none."""
    if mesh.device_type == "cpu":
        with stand_in(mesh.get_group()) as made:
            yield made
        _symmetric._BUFFERS.clear()
        return
    reason = _symmetric.why_unavailable()
    if reason:
        raise SkipTest(reason)
    yield None


def _problem(mesh: DeviceMesh) -> list[Tensor]:
    """x, wi, wo of this rank, and experts of its tokens."""
    _, wi, wo = weights_of(mesh, torch.bfloat16)
    x = drawn(mesh, T, H, seed=mesh.get_rank(), dtype=torch.bfloat16)
    experts = torch.from_numpy(experts_of(mesh.size() * T, K, E)).to(mesh.device_type)
    return [x, own_part(wi, mesh), own_part(wo, mesh), own_part(experts, mesh)]


@check
def symmetric_memory_has_the_bits_of_all_to_all(mesh: DeviceMesh) -> None:
    """y and every gradient, with tokens and codes, chunks and a budget that drops; only rows that there are travel."""
    group, problem = mesh.get_group(), _problem(mesh)
    router = drawn(mesh, E, H, seed="router")
    with symmetric_memory(mesh) as made:
        every: tuple[dict[str, Any], ...] = (
            {},
            {"recipe": MXFP8},
            {"chunks": 2},
            {"budget_factor": 0.5},
            {"recipe": MXFP8, "chunks": 2},
        )
        for options in every:
            found = []
            for transport in ("all_to_all", "symmetric_memory"):
                x, wi, wo, of_router = (leaf(each) for each in (*problem[:3], router))
                given: dict[str, Any] = {"process_group": group, "transport": transport, "experts": problem[3]}
                before = (made.exchanges, made.rows) if made else (0, 0)
                y, aux = parallel.moe(x, of_router, wi, wo, K, **given, **options)
                (y * drawn(mesh, T, H, seed="dy", dtype=y.dtype)).sum().backward()
                found.append([y.detach(), aux.dropped, *(each.grad for each in (x, wi, wo, of_router))])
                if made and transport == "symmetric_memory":
                    ways, chunks = 4, options.get("chunks", 1)
                    sent = torch.tensor([made.rows - before[1], -ways * int((problem[3] >= 0).sum())])
                    dist.all_reduce(sent)
                    assert made.exchanges - before[0] == ways * chunks, options
                    assert int(sent.sum()) == -ways * int(aux.dropped), options
            for mine, theirs in zip(*found, strict=True):
                asserts.bitwise(mine, theirs, str(options))


@check_of_graphs
def layers_share_symmetric_buffers(mesh: DeviceMesh) -> None:
    """Modules, `dispatch` and `combine`, one graph of torch.compile, and selective checkpointing.

    The bits are those of the other transport without a graph.
    """
    group = mesh.get_group()
    with symmetric_memory(mesh) as made:
        found = []
        for transport in ("all_to_all", "symmetric_memory"):
            torch.manual_seed(3)
            layers: list[Any] = [
                nn.MoE(H, F, E, K, shared_dim=16, process_group=group, transport=transport).to(mesh.device_type)
                for _ in range(2)
            ]
            x = leaf(drawn(mesh, T, H, seed=mesh.get_rank()))
            context = partial(create_selective_checkpoint_contexts, list(parallel.save_list()))
            second = layers[1] if transport == "all_to_all" else compiled(layers[1], mesh)
            middle: Any = checkpoint(lambda x, layer=layers[0]: layer(x)[0], x, use_reentrant=False, context_fn=context)
            y = second(middle)[0]
            y.sum().backward()
            grads = [each.grad for layer in layers for each in layer.parameters()]
            found.append([y.detach(), x.grad, *grads])
            if made:
                assert len(made.allocated) == (4 if transport == "symmetric_memory" else 0)
                assert made.exchanges == (8 if transport == "symmetric_memory" else 0)
        for mine, theirs in zip(*found, strict=True):
            asserts.bitwise(mine, theirs)
        experts, weights = _problem(mesh)[3], torch.ones(T, K, device=mesh.device_type)
        options: dict[str, Any] = {"process_group": group, "transport": "symmetric_memory"}
        rows, sizes, handle = parallel.dispatch(x.detach(), experts, weights, E, **options)
        assert int(sizes.sum()) <= rows.shape[0]
        y = parallel.combine(rows, handle)
        asserts.bitwise(y, x.detach() * (experts >= 0).sum(1, keepdim=True), "tokens that came back")


@check
def symmetric_memory_that_is_missing_is_an_error(mesh: DeviceMesh) -> None:
    """Where the layer is made, in words; and rows that the operator cannot divide."""
    group = mesh.get_group()
    if mesh.device_type == "cpu":
        words = ["`transport` of ", "'symmetric_memory'", "no kernel for", "use transport='all_to_all'"]
        with asserts.refused(RuntimeError, words):
            nn.MoE(H, F, E, K, process_group=group, transport="symmetric_memory")
        with asserts.refused(RuntimeError, words):
            parallel.SymmetricMemory(group)
    with symmetric_memory(mesh):
        layer = nn.MoE(9, F, E, K, process_group=group, transport="symmetric_memory").to(mesh.device_type)
        with asserts.refused(ValueError, ["'symmetric_memory'", "rows of 36 bytes", "a multiple of 64 bytes"]):
            layer(drawn(mesh, T, 9))
