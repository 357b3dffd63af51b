"""What ranks check of layers that send a token to a rank once; `expert_parallel_checks` runs it.

Bits where they are promised, else bounds that follow from the parts of the sums.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from grouped_core import exchange, reference_exchange
from tests import asserts, bounds
from tests.torch_frontend.expert_adapter_checks import SHAPES
from tests.torch_frontend.expert_parallel_tools import (
    E,
    Exchanges,
    F,
    H,
    K,
    T,
    all_parts,
    check,
    check_of_graphs,
    compiled,
    drawn,
    in_jax,
    own_part,
    weights_of,
)
from tests.torch_frontend.expert_transport_checks import symmetric_memory
from tests.torch_frontend.routing_tools import experts_of, near
from tests.torch_frontend.torch_tools import leaf
from torch_bridge import MXFP8, FP8Block, grouped_mlp, nn, parallel, route, routed_mlp
from torch_bridge._router import router_logits


def _problem(mesh: DeviceMesh, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, dy, experts and weights of the tokens of all ranks; some slots have no expert."""
    tokens = mesh.size() * T
    x, dy = (drawn(mesh, tokens, H, seed=each, dtype=dtype) for each in ("x", "dy"))
    experts = experts_of(tokens, K, E)
    experts[::7, 1] = -1
    return x, dy, torch.from_numpy(experts).to(x.device), drawn(mesh, tokens, K, seed="weights").abs()


def _within(actual: Tensor, expected: Tensor, parts: list[Tensor], what: str) -> None:
    """Sums of the parts, with other partial sums that are rounded to the dtype."""
    dtype = str(expected.dtype).removeprefix("torch.")
    error = bounds.of_partial_sums(np.stack([each.detach().double().cpu().numpy() for each in parts]), dtype)
    asserts.within(actual, bounds.Bounded(expected.detach().double().cpu().numpy(), error, dtype), what)


@check
def tokens_sent_once_have_the_sums_of_one_rank(mesh: DeviceMesh) -> None:
    """y and dx within their roundings; gradients of weights and experts have the bits of one rank."""
    group = mesh.get_group()
    for dtype, send, recipe in (
        (torch.float32, None, None),
        (torch.bfloat16, None, None),
        (torch.bfloat16, "tokens", FP8Block),
        (torch.bfloat16, "codes", MXFP8),
    ):
        x, dy, experts, probs = _problem(mesh, dtype)
        _, wi, wo = weights_of(mesh, dtype)
        of_y, of_dx = [], []
        for j in range(K):
            held = leaf(x)
            chosen, weights = (each[:, j : j + 1].contiguous() for each in (experts, probs))
            y = routed_mlp(held, chosen, weights, wi, wo, recipe=recipe)
            y.backward(dy)
            of_y.append(y)
            of_dx.append(held.grad)
        one = [leaf(each) for each in (x, probs, wi, wo)]
        y = routed_mlp(one[0], experts, *one[1:], recipe=recipe)
        y.backward(dy)
        ours = [leaf(own_part(each, mesh)) for each in (x, probs, wi, wo)]
        by = parallel.AllToAll(group, codes=exchange.format_sent("test", send, recipe), once_per_rank=True)
        arrived = by.dispatch(ours[0], own_part(experts, mesh).int(), ours[1], E)
        assert arrived.experts.shape == (mesh.size() * T, min(K, E // mesh.size()))
        y2 = by.combine(
            routed_mlp(arrived.rows, arrived.experts, arrived.weights, ours[2], ours[3], recipe=recipe), arrived.handle
        )
        y2.backward(own_part(dy, mesh))
        what = f"{dtype}, {recipe and recipe.name}"
        assert int(arrived.dropped) == 0
        for name, mine, theirs in zip(("weights", "wi", "wo"), ours[1:], one[1:], strict=True):
            asserts.bitwise(all_parts(mine.grad, group), theirs.grad, f"{name}, {what}")
        _within(all_parts(y2.detach(), group), y, of_y, f"y, {what}")
        _within(all_parts(ours[0].grad, group), one[0].grad, of_dx, f"dx, {what}")


@check
def tokens_with_one_expert_per_rank_keep_their_bits(mesh: DeviceMesh) -> None:
    """Those that are sent once per expert; so do all tokens of a group of one rank."""
    own, ranks = E // mesh.size(), mesh.size()
    random = np.random.default_rng(mesh.get_rank())
    spread = np.stack([random.permutation(ranks)[:K] for _ in range(T)]) * own
    spread += random.integers(0, own, spread.shape)
    alone = init_device_mesh(mesh.device_type, (ranks, 1), mesh_dim_names=("data", "expert"))["expert"]
    for part, experts in ((mesh, spread), (alone, experts_of(T, K, E))):
        router, wi, wo = weights_of(mesh, torch.bfloat16)
        found = []
        for once in (False, True):
            x = leaf(drawn(mesh, T, H, seed=mesh.get_rank(), dtype=torch.bfloat16))
            given = (x, leaf(router), leaf(own_part(wi, part)), leaf(own_part(wo, part)))
            options: dict[str, Any] = {"experts": torch.from_numpy(experts).to(x.device), "once_per_rank": once}
            y, _ = parallel.moe(*given, experts.shape[1], process_group=part.get_group(), **options)
            y.backward(drawn(mesh, T, H, seed="dy", dtype=y.dtype))
            found.append([y.detach(), *(each.grad for each in given)])
        for mine, theirs in zip(*found, strict=True):
            asserts.bitwise(mine, theirs)


@check
def transports_send_a_token_once(mesh: DeviceMesh) -> None:
    """The same bits with symmetric memory, in which only rows that there are travel; twice; and in chunks."""
    group = mesh.get_group()
    _, _, experts, _ = _problem(mesh, torch.bfloat16)
    chosen, (router, wi, wo) = own_part(experts, mesh), weights_of(mesh, torch.bfloat16)
    pairs = torch.zeros(T, mesh.size() + 1, dtype=torch.bool, device=chosen.device)
    pairs.scatter_(1, torch.where(chosen < 0, mesh.size(), chosen // (E // mesh.size())), value=True)
    with symmetric_memory(mesh) as made:
        for options in ({}, {"recipe": MXFP8, "budget_factor": 0.5}):
            found = []
            for transport, chunks in (
                ("all_to_all", 1),
                ("all_to_all", 1),
                ("symmetric_memory", 1),
                ("all_to_all", 2),
            ):
                x = leaf(drawn(mesh, T, H, seed=mesh.get_rank(), dtype=torch.bfloat16))
                given = (x, leaf(router), leaf(own_part(wi, mesh)), leaf(own_part(wo, mesh)))
                how: dict[str, Any] = {"process_group": group, "transport": transport, "chunks": chunks}
                before = made.rows if made else 0
                y, aux = parallel.moe(*given, K, experts=chosen, once_per_rank=True, **how, **options)
                y.backward(drawn(mesh, T, H, seed="dy", dtype=y.dtype))
                found.append([y.detach(), x.grad, *(each.grad for each in given[1:])])
                if made and transport == "symmetric_memory" and not options:
                    sent = torch.tensor([made.rows - before, 4 * int(pairs[:, :-1].sum())])
                    dist.all_reduce(sent)
                    assert sent[0] == sent[1], "rows, forward and backward, of pairs of a token and a rank"
                    assert int(aux.dropped) == 0
            for other in found[1:3]:
                for mine, theirs in zip(other, found[0], strict=True):
                    asserts.bitwise(mine, theirs, str(options))
            if not options:  # a budget is that of the tokens of a chunk
                for mine, theirs in zip(found[3][:2], found[0][:2], strict=True):
                    asserts.bitwise(mine, theirs, "in chunks")


@check
def budgets_of_tokens_drop_what_the_oracle_drops(mesh: DeviceMesh) -> None:
    """The result is that of the layer without these slots, and dispatch and combine say the same."""
    group, ranks, tokens, factor = mesh.get_group(), mesh.size(), 48, 0.6
    every = experts_of(ranks * tokens, K, E)
    op = exchange.exchange_option(
        "moe", ranks=ranks, experts=E, tokens=tokens, slots=K, budget_factor=factor, once_per_rank=True
    )
    received, dropped = reference_exchange.exchange(op, every.reshape(ranks, tokens, K))
    received, beyond = reference_exchange.with_room(op, received)
    lost = sum(dropped) + beyond
    kept = np.where(reference_exchange.travelled(op, received).reshape(every.shape), every, -1)
    assert 0 < lost < every.size
    router, wi, wo = weights_of(mesh, torch.float32)
    x = drawn(mesh, ranks * tokens, H, seed="x")
    mine, lasting = (own_part(torch.from_numpy(each).to(x.device), mesh) for each in (every, kept))
    weights, _, _ = route.topk_router(router_logits(own_part(x, mesh), router), K, experts=mine)
    given = (own_part(x, mesh), router, own_part(wi, mesh), own_part(wo, mesh), K)
    options: dict[str, Any] = {"process_group": group, "once_per_rank": True}
    y, aux = parallel.moe(*given, budget_factor=factor, experts=mine, **options)
    found = []
    for chosen, budget in ((mine, factor), (lasting, None)):
        rows, sizes, handle = parallel.dispatch(given[0], chosen, weights, E, budget_factor=budget, **options)
        assert rows.shape[0] == ((op.max_rows if budget else None) or ranks * tokens * min(K, E // ranks))
        found.append(parallel.combine(grouped_mlp(rows, *given[2:4], sizes, probs=handle.probs), handle))
        assert int(handle.dropped) == (lost if budget else 0)
    asserts.bitwise(y, found[0], "y")
    asserts.bitwise(y, found[1], "y without the slots that are dropped")
    assert int(aux.dropped) == lost


@check
def ranks_without_tokens_take_part(mesh: DeviceMesh) -> None:
    """Tokens of one rank are all padding, and then none has tokens."""
    group, idle = mesh.get_group(), mesh.get_rank() == 1
    router, wi, wo = weights_of(mesh, torch.float32)
    options: dict[str, Any] = {"process_group": group, "once_per_rank": True}
    for tokens in (T, 0):
        x, wi_own, wo_own = (leaf(each) for each in (drawn(mesh, tokens, H), own_part(wi, mesh), own_part(wo, mesh)))
        mask = torch.full((tokens,), not idle, device=mesh.device_type)
        y, _ = parallel.moe(x, router, wi_own, wo_own, K, mask=mask, **options)
        y.sum().backward()
        assert y.any() == x.grad.any() == (bool(tokens) and not idle)
        assert wi_own.grad is not None


@check
def the_module_and_adapters_send_tokens_once(mesh: DeviceMesh) -> None:
    """`nn.MoE` and `shard_experts` as one rank, with the bits of one rank in the adapters' gradients; refusals."""
    torch.manual_seed(5)
    one = nn.MoE(H, F, E, K, lora_rank=SHAPES[0][0], dtype=torch.float32).to(mesh.device_type)
    how: dict[str, Any] = {"process_group": mesh.get_group(), "once_per_rank": True}
    ours = nn.MoE(H, F, E, K, lora_rank=SHAPES[0][0], dtype=torch.float32, **how).to(mesh.device_type)
    with torch.no_grad():
        for (name, mine), theirs in zip(ours.named_parameters(), one.parameters(), strict=True):
            if name.endswith("lora_B"):
                theirs.normal_()
            mine.copy_(own_part(theirs, mesh) if mine.shape != theirs.shape else theirs)
    x = drawn(mesh, mesh.size() * T, H, seed="x")
    y, y2 = one(x)[0], ours(own_part(x, mesh))[0]
    near(all_parts(y2.detach()), y.detach().double(), "y")
    y.sum().backward()
    y2.sum().backward()
    for (name, mine), theirs in zip(ours.named_parameters(), one.parameters(), strict=True):
        if "lora" in name:
            assert mine.grad is not None
            asserts.bitwise(all_parts(mine.grad), theirs.grad, name)
    torch.manual_seed(5)
    whole = nn.MoE(H, F, E, K).to(mesh.device_type)
    expected = whole(x)[0]
    spread = parallel.shard_experts(whole, mesh, once_per_rank=True)
    with Exchanges() as counted:
        found = spread(own_part(x, mesh))[0]
    assert max(counted.sent) == mesh.size() * T * H * x.element_size(), "a row for each token and rank"
    near(all_parts(found.detach()), expected.detach().double(), "y of shard_experts")
    with asserts.refused(ValueError, ["`once_per_rank`", "of MoE", "True", "without `process_group`", "False"]):
        nn.MoE(H, F, E, K, once_per_rank=True)
    router, wi, wo = weights_of(mesh, torch.float32)
    own = parallel.AllToAll(mesh.get_group())
    with asserts.refused(ValueError, ["`once_per_rank` of parallel.moe", "True", "own `transport`", "False"]):
        parallel.moe(x, router, own_part(wi, mesh), own_part(wo, mesh), K, transport=own, **how)


@check_of_graphs
def graphs_and_checkpoints_send_tokens_once(mesh: DeviceMesh) -> None:
    """One graph of torch.compile, and selective checkpointing, which sends nothing twice: the bits of eager passes."""
    router, wi, wo = weights_of(mesh, torch.float32)

    def run(x: Tensor, router: Tensor, wi: Tensor, wo: Tensor) -> Tensor:
        options: dict[str, Any] = {"process_group": mesh.get_group(), "recipe": FP8Block, "once_per_rank": True}
        return parallel.moe(x, router, wi, wo, K, budget_factor=1.5, **options)[0]

    context = partial(create_selective_checkpoint_contexts, list(parallel.save_list()))
    kept: Any = partial(checkpoint, run, use_reentrant=False, context_fn=context)
    graph = compiled(run, mesh)
    found, sent = [], []
    for at, each in enumerate((run, kept, graph)):
        args = [leaf(part) for part in (drawn(mesh, T, H), router, own_part(wi, mesh), own_part(wo, mesh))]
        with nullcontext() if at == 2 else Exchanges() as counted:  # Dynamo traces under no mode
            y = each(*args)
            y.sum().backward()
        found.append([y.detach(), *(arg.grad for arg in args)])
        sent += [counted.sent] if counted else []
    assert sent[1] == sent[0]
    for other in found[1:]:
        for mine, theirs in zip(other, found[0], strict=True):
            asserts.bitwise(mine, theirs)


@check
def jax_sends_a_token_once_with_the_same_bits(mesh: DeviceMesh) -> None:
    """y and all gradients of tokens and experts."""
    if mesh.device_type != "cpu":
        return
    router, wi, wo = weights_of(mesh, torch.float32)
    x, dy = (drawn(mesh, mesh.size() * T, H, seed=each) for each in ("x", "dy"))
    for recipe, factor in ((None, None), (MXFP8, 0.5)):
        options: dict[str, Any] = {"recipe": recipe, "once_per_rank": True, "budget_factor": factor}
        ours = [leaf(own_part(each, mesh)) for each in (x, wi, wo)]
        y, _ = parallel.moe(ours[0], router, ours[1], ours[2], K, process_group=mesh.get_group(), **options)
        y.backward(own_part(dy, mesh))
        found = [all_parts(each) for each in (y.detach(), *(each.grad for each in ours))]
        if mesh.get_rank() == 0:
            given = {"x": x, "router": router, "wi": wi, "wo": wo}
            theirs = in_jax(mesh.size(), given, dy, ("x", "wi", "wo"), **options)
            for name, mine, other in zip(("y", "dx", "wi", "wo"), found, theirs, strict=True):
                asserts.bitwise(mine, torch.from_numpy(other), f"{name}, {recipe and recipe.name}")
    dist.barrier()
