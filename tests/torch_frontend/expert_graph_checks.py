"""What ranks check of captured CUDA graphs of layers whose experts are spread; `expert_parallel_checks` runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests import asserts
from tests.torch_frontend.expert_parallel_tools import LOSSES, E, F, H, K, T, check, drawn, own_part, weights_of
from tests.torch_frontend.torch_tools import leaf
from torch_bridge import MXFP8, FP8Block, _symmetric, nn, parallel

REPLAYS = 3
Pass = Callable[[], list[Tensor]]


@contextmanager
def _no_synchronisation() -> Iterator[None]:
    """What would wait on the host for the device is an error."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _captured(run: Pass) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of `run`, and the tensors that its replays write."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(beside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as that which watches over collectives, may call CUDA during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = run()
    return graph, results


def _passes(mesh: DeviceMesh, x: Tensor, dy: Tensor, transport: str) -> dict[str, Pass]:
    """Forward and backward of several layers on the tokens in the buffer `x`: y, metrics and all gradients."""
    group = mesh.get_group()
    dtype = x.dtype
    router, wi, wo = weights_of(mesh, dtype)
    given = (x, leaf(router), leaf(own_part(wi, mesh)), leaf(own_part(wo, mesh)))

    def of_function(**options: Any) -> list[Tensor]:
        y, aux = parallel.moe(*given, K, process_group=group, transport=transport, **options, **LOSSES)
        loss = (y * dy).sum() + aux.aux_loss + aux.z_loss
        return [y.detach(), aux.load, aux.dropped, *torch.autograd.grad(loss, given)]

    torch.manual_seed(3)
    how: dict[str, Any] = {"process_group": group, "transport": transport, "shared_dim": 16, "dtype": dtype}
    layer: Any = nn.MoE(H, F, E, K, budget_factor=1.0, **how).to(mesh.device_type)

    def of_module() -> list[Tensor]:
        y, aux = layer(x)
        every = [x, *layer.parameters()]
        return [y.detach(), aux.load, aux.dropped, *torch.autograd.grad((y * dy).sum(), every)]

    return {
        "parallel.moe": of_function,
        "parallel.moe in chunks": lambda: of_function(chunks=2),
        "parallel.moe once per rank": lambda: of_function(once_per_rank=True),
        "parallel.moe, FP8Block": lambda: of_function(recipe=FP8Block),
        "parallel.moe, MXFP8": lambda: of_function(recipe=MXFP8),
        "nn.MoE": of_module,
    }


def _replays(mesh: DeviceMesh, transport: str) -> None:
    dtype = torch.bfloat16
    x, dy = leaf(drawn(mesh, T, H, dtype=dtype)), drawn(mesh, T, H, seed="dy", dtype=dtype)
    for name, run in _passes(mesh, x, dy, transport).items():
        run()  # memory that is made once
        with _no_synchronisation():
            run()
        graph, results = _captured(run)
        chosen = []
        for at in range(REPLAYS):
            with torch.no_grad():
                x.copy_(drawn(mesh, T, H, seed=(at, mesh.get_rank()), dtype=dtype))
            with _no_synchronisation():
                graph.replay()
            found = [each.clone() for each in results]
            for mine, theirs in zip(found, run(), strict=True):
                asserts.bitwise(mine, theirs, f"{name}, replay {at}")
            chosen.append(found[1])
        assert not torch.equal(chosen[0], chosen[1]), "the replays route differently"


@check
def a_captured_graph_replays_with_other_tokens(mesh: DeviceMesh) -> None:
    """Forward and backward, with other routing each time, against eager; nothing waits on the host."""
    if mesh.device_type == "cpu":
        raise SkipTest("CUDA graphs need a GPU")
    _replays(mesh, "all_to_all")


@check
def a_captured_graph_exchanges_through_symmetric_memory(mesh: DeviceMesh) -> None:
    reason = "CUDA graphs need a GPU" if mesh.device_type == "cpu" else _symmetric.why_unavailable()
    if reason:
        raise SkipTest(reason)
    _replays(mesh, "symmetric_memory")
