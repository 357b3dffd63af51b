"""What ranks check together of layers whose experts are spread over them, against the same layer on one rank.

    python -m tests.torch_frontend.expert_parallel_checks --device cuda --ranks 2    # on GPUs; the tests: 4 on the CPU

Every rank draws the whole problem, so it has what one rank computes. Letters: P ranks, T tokens of a rank, E experts, H
hidden size, F expert width, k experts per token.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from grouped_core import exchange, reference_exchange
from tests import asserts, bounds
from tests.torch_frontend import expert_adapter_checks as expert_adapter_checks  # these modules add their checks
from tests.torch_frontend import expert_graph_checks as expert_graph_checks
from tests.torch_frontend import expert_once_checks as expert_once_checks
from tests.torch_frontend import expert_transport_checks as expert_transport_checks
from tests.torch_frontend.expert_parallel_tools import (
    CHECKS,
    LOSSES,
    RANKS,
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
from tests.torch_frontend.nn_tools import main_grads
from tests.torch_frontend.rank_tools import Checks, main
from tests.torch_frontend.routing_tools import experts_of, near
from tests.torch_frontend.torch_tools import leaf, saved_tensors
from torch_bridge import (
    MXFP8,
    FP8Block,
    FP8Current,
    FP8Delayed,
    SharedExpert,
    grouped_mlp,
    moe,
    nn,
    parallel,
    route,
    routed_mlp,
    update_scaling,
)
from torch_bridge import checkpoint as checkpoint_files
from torch_bridge._router import router_logits
from torch_bridge.parallel import AllToAll, Arrived, Transport


def _layer_as_one_rank(mesh: DeviceMesh, dtypes: Sequence[torch.dtype]) -> None:
    """y and the gradients of tokens and experts; losses, load and the router's gradient within bounds."""
    group = mesh.get_group()
    for dtype in dtypes:
        for recipe in (None, FP8Block, MXFP8, FP8Current):
            x, dy = (drawn(mesh, mesh.size() * T, H, seed=each, dtype=dtype) for each in ("x", "dy"))
            one = [leaf(each) for each in (x, *weights_of(mesh, dtype))]
            y, aux = moe(*one, k=K, recipe=recipe, **LOSSES)
            ((y * dy).sum() + aux.aux_loss + aux.z_loss).backward()

            router, wi, wo = weights_of(mesh, dtype)
            ours = [leaf(each) for each in (own_part(x, mesh), router, own_part(wi, mesh), own_part(wo, mesh))]
            y2, aux2 = parallel.moe(*ours, k=K, process_group=group, recipe=recipe, send="tokens", **LOSSES)
            ((y2 * own_part(dy, mesh)).sum() + aux2.aux_loss + aux2.z_loss).backward()

            what = f"{dtype}, {recipe and recipe.name}"
            asserts.bitwise(all_parts(y2.detach(), group), y.detach(), f"y, {what}")
            for each, mine, theirs in zip(("wi", "wo"), ours[2:], one[2:], strict=True):
                asserts.bitwise(all_parts(mine.grad, group), theirs.grad, f"{each}, {what}")
            asserts.bitwise(aux2.load, aux.load, "load")
            near(aux2.aux_loss, aux.aux_loss.double(), "aux_loss")
            near(aux2.z_loss, aux.z_loss.double(), "z_loss")
            assert not aux2.overflow
            if dtype == torch.float32:
                total = ours[1].grad.clone()
                dist.all_reduce(total, group=group)
                near(total, one[1].grad.double(), f"router, {what}")


@check
def the_layer_has_the_bits_of_one_rank(mesh: DeviceMesh) -> None:
    _layer_as_one_rank(mesh, (torch.float32, torch.bfloat16))


@check
def a_shared_expert_runs_on_every_rank(mesh: DeviceMesh) -> None:
    """That of `parallel.moe`: y, dx and the experts' gradients as on one rank; its own gradients add up."""
    group = mesh.get_group()
    x, dy = (drawn(mesh, mesh.size() * T, H, seed=each) for each in ("x", "dy"))
    router, wi, wo = weights_of(mesh, torch.float32)
    shared = [drawn(mesh, 1, 2 * F, H, seed="a"), drawn(mesh, 1, H, F, seed="b"), drawn(mesh, 1, H, seed="gate")]
    one, of_one = [leaf(each) for each in (x, wi, wo)], [leaf(each) for each in shared]
    y, _ = moe(one[0], router, one[1], one[2], K, shared=SharedExpert(*of_one))
    y.backward(dy)
    for chunks in (1, 2):
        ours, of_ours = [leaf(own_part(each, mesh)) for each in (x, wi, wo)], [leaf(each) for each in shared]
        options: dict[str, Any] = {"process_group": group, "shared": SharedExpert(*of_ours), "chunks": chunks}
        y2, _ = parallel.moe(ours[0], router, ours[1], ours[2], K, **options)
        y2.backward(own_part(dy, mesh))
        asserts.bitwise(all_parts(y2.detach()), y.detach(), "y")
        asserts.bitwise(all_parts(ours[0].grad), one[0].grad, "dx")
        for mine, theirs in zip(ours[1:], one[1:], strict=True):
            if chunks == 1:
                asserts.bitwise(all_parts(mine.grad), theirs.grad)
        for mine, theirs in zip(of_ours, of_one, strict=True):
            total = mine.grad.clone()
            dist.all_reduce(total)
            near(total, theirs.grad.double(), "the shared expert")


@check
def tokens_have_the_gradients_of_one_rank(mesh: DeviceMesh) -> None:
    """With given experts and weights, so that no sum over ranks is in them."""
    group, dtype = mesh.get_group(), torch.bfloat16
    experts = torch.from_numpy(experts_of(mesh.size() * T, K, E)).to(mesh.device_type)
    x, dy = (drawn(mesh, mesh.size() * T, H, seed=each, dtype=dtype) for each in ("x", "dy"))
    weights = drawn(mesh, mesh.size() * T, K, seed="weights").abs()
    _, wi, wo = weights_of(mesh, dtype)
    one = [leaf(each) for each in (x, weights, wi, wo)]
    y = routed_mlp(one[0], experts, one[1], one[2], one[3])
    y.backward(dy)
    ours = [leaf(own_part(each, mesh)) for each in (x, weights, wi, wo)]
    rows, sizes, handle = parallel.dispatch(ours[0], own_part(experts, mesh), ours[1], E, process_group=group)
    assert sizes.shape == (E // mesh.size(),)
    assert int(sizes.sum()) <= rows.shape[0]
    results = grouped_mlp(rows, ours[2], ours[3], sizes, probs=handle.probs)
    y2 = parallel.combine(results, handle)
    y2.backward(own_part(dy, mesh))
    assert int(handle.dropped) == 0
    asserts.bitwise(all_parts(y2.detach(), group), y.detach(), "y")
    for name, mine, theirs in zip(("x", "weights", "wi", "wo"), ours, one, strict=True):
        asserts.bitwise(all_parts(mine.grad, group), theirs.grad, name)


@check
def rows_beyond_a_budget_are_dropped_and_counted(mesh: DeviceMesh) -> None:
    """All tokens choose the experts of the first rank, which takes what the budget has: the first ones."""
    group = mesh.get_group()
    tokens = 64
    experts = torch.zeros(tokens, 1, dtype=torch.int64, device=mesh.device_type)
    x = leaf(drawn(mesh, tokens, H, seed=mesh.get_rank()))
    weights = leaf(torch.ones(tokens, 1, device=mesh.device_type))
    rows, sizes, handle = parallel.dispatch(x, experts, weights, E, process_group=group, budget_factor=1.0)
    ranks = mesh.size()
    budget = tokens // ranks
    assert rows.shape == (ranks * budget, H)
    assert sizes.tolist() == [0 if mesh.get_rank() else ranks * budget] + [0] * (E // ranks - 1)
    assert bool(handle.overflow)
    assert int(handle.dropped) == ranks * (tokens - budget)
    y = parallel.combine(rows, handle)
    asserts.bitwise(y[:budget].detach(), x[:budget].detach(), "rows that came back")
    assert not y[budget:].any()
    y.sum().backward()
    assert x.grad[:budget].eq(1).all()
    assert not x.grad[budget:].any()
    _, wi, wo = weights_of(mesh, torch.float32)
    router = torch.zeros(E, H, device=mesh.device_type)
    _, aux = parallel.moe(x, router, own_part(wi, mesh), own_part(wo, mesh), 1, process_group=group, budget_factor=1.0)
    assert int(aux.dropped) == ranks * (tokens - budget)
    assert bool(aux.overflow)


@check
def a_rank_without_tokens_runs_every_collective(mesh: DeviceMesh) -> None:
    """Its tokens are all padding: nothing of it arrives anywhere, and its gradients are zero."""
    group, idle = mesh.get_group(), mesh.get_rank() == 1
    router, wi, wo = weights_of(mesh, torch.float32)
    x = leaf(drawn(mesh, T, H, seed=mesh.get_rank()))
    wi, wo = leaf(own_part(wi, mesh)), leaf(own_part(wo, mesh))
    mask = torch.full((T,), not idle, device=mesh.device_type)
    y, aux = parallel.moe(x, router, wi, wo, K, process_group=group, mask=mask)
    y.sum().backward()
    assert int(aux.load.sum()) == (mesh.size() - 1) * T * K
    assert y.any() == (not idle)
    assert x.grad.any() == (not idle)
    assert wi.grad is not None, "an idle rank computes with the rows of the others"


@check
def the_module_trains_as_one_rank_does(mesh: DeviceMesh) -> None:
    """Two steps of `nn.MoE`; every rank holds its experts, the rest is replicated.

    With delayed scaling there is no shared expert, whose scales would be those of a rank's tokens.
    """
    group = mesh.get_group()
    for recipe in (None, MXFP8, FP8Delayed):
        torch.manual_seed(3)
        shared = None if recipe is FP8Delayed else 16
        options: dict[str, Any] = {"shared_dim": shared, "recipe": recipe, "dtype": torch.bfloat16}
        one = nn.MoE(H, F, E, K, **options).to(mesh.device_type)
        ours = nn.MoE(H, F, E, K, process_group=group, **options).to(mesh.device_type)
        with torch.no_grad():
            for (name, mine), theirs in zip(ours.named_parameters(), one.parameters(), strict=True):
                mine.copy_(own_part(theirs, mesh) if mine.shape != theirs.shape else theirs)
                assert (mine.shape != theirs.shape) == name.startswith("experts"), name
        for step in range(2):
            x, dy = (drawn(mesh, mesh.size() * T, H, seed=(each, step), dtype=torch.bfloat16) for each in ("x", "dy"))
            y, _ = one(x)
            y.backward(dy)
            y2, _ = ours(own_part(x, mesh))
            y2.backward(own_part(dy, mesh))
            asserts.bitwise(all_parts(y2.detach()), y.detach(), f"y, {recipe and recipe.name}")
            for (name, mine), theirs in zip(ours.named_parameters(), one.parameters(), strict=True):
                assert mine.grad is not None, name
                if name.startswith("experts"):
                    asserts.bitwise(all_parts(mine.grad), theirs.grad, f"{name}, {recipe and recipe.name}")
            with torch.no_grad():
                for (name, mine), theirs in zip(ours.named_parameters(), one.parameters(), strict=True):
                    assert theirs.grad is not None, name
                    theirs -= 0.01 * theirs.grad
                    mine.copy_(own_part(theirs, mesh) if name.startswith("experts") else theirs)
                    mine.grad = theirs.grad = None
            if recipe is FP8Delayed:
                for module in (one, ours):
                    update_scaling(module.experts.scaling_state)


class _Counted:
    """A transport of one's own: the library's, and how often it was called."""

    def __init__(self, group: Any) -> None:
        self.inner, self.calls = AllToAll(group), []

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor, num_experts: int) -> Arrived:
        self.calls.append("dispatch")
        return self.inner.dispatch(x, experts, weights, num_experts)

    def combine(self, y: Tensor, handle: Any) -> Tensor:
        self.calls.append("combine")
        return self.inner.combine(y, handle)


@check
def an_own_transport_carries_the_rows(mesh: DeviceMesh) -> None:
    group = mesh.get_group()
    counted = _Counted(group)
    assert isinstance(counted, Transport)
    router, wi, wo = weights_of(mesh, torch.float32)
    x = drawn(mesh, T, H, seed=mesh.get_rank())
    found = [
        parallel.moe(x, router, own_part(wi, mesh), own_part(wo, mesh), K, process_group=group, transport=each)[0]
        for each in ("all_to_all", counted)
    ]
    asserts.bitwise(*found)
    assert counted.calls == ["dispatch", "combine"]
    with asserts.refused(ValueError, ["`budget_factor` of parallel.moe", "own transport"]):
        parallel.moe(x, router, wi, wo, K, process_group=group, transport=counted, budget_factor=1.0)
    with asserts.refused(ValueError, ["`transport` of parallel.moe", "'pigeon'", "all_to_all"]):
        parallel.moe(x, router, wi, wo, K, process_group=group, transport="pigeon")


@check
def a_checkpointed_layer_has_the_same_gradients(mesh: DeviceMesh) -> None:
    """`torch.utils.checkpoint` sends rows again in backward, on all ranks in the same order."""
    group = mesh.get_group()
    router, wi, wo = weights_of(mesh, torch.float32)
    first = [leaf(each) for each in (drawn(mesh, T, H), router, own_part(wi, mesh), own_part(wo, mesh))]
    second = copy.deepcopy(first)

    def run(x: Tensor, router: Tensor, wi: Tensor, wo: Tensor) -> Tensor:
        return parallel.moe(x, router, wi, wo, K, process_group=group)[0]

    run(*first).sum().backward()
    again: Any = checkpoint(run, *second, use_reentrant=False)
    again.sum().backward()
    for one, other in zip(first, second, strict=True):
        asserts.bitwise(one.grad, other.grad)


@check_of_graphs
def a_compiled_layer_is_one_graph_with_the_same_bits(mesh: DeviceMesh) -> None:
    group = mesh.get_group()
    router, wi, wo = weights_of(mesh, torch.float32)
    shared = SharedExpert(drawn(mesh, 1, 2 * F, H, seed="shared"), drawn(mesh, 1, H, F, seed="shared_wo"))

    def run(x: Tensor, router: Tensor, wi: Tensor, wo: Tensor) -> Tensor:
        # No recipe, and those whose codes travel, are those of other checks that compile.
        options: dict[str, Any] = {"process_group": group, "recipe": FP8Current, "shared": shared}
        return parallel.moe(x, router, wi, wo, K, budget_factor=2.0, **options)[0]

    found = []
    for each in (run, compiled(run, mesh)):
        args = [leaf(part) for part in (drawn(mesh, T, H), router, own_part(wi, mesh), own_part(wo, mesh))]
        y = each(*args)
        y.sum().backward()
        found.append([y.detach(), *(arg.grad for arg in args)])
    for mine, theirs in zip(*found, strict=True):
        asserts.bitwise(mine, theirs)


@check_of_graphs
def compiled_layers_take_any_number_of_tokens(mesh: DeviceMesh) -> None:
    """The bits of eager passes, with automatic and with requested symbols, of the module and of the function.

    Without a budget factor one graph serves all numbers of tokens, and Dynamo makes the first one twice. A budget is a
    number, and so are more rows than specs have multiples of a symbol for; then each number of tokens has its graph.
    """
    group = mesh.get_group()
    torch.manual_seed(5)
    module = nn.MoE(H, F, E, K, process_group=group).to(mesh.device_type)
    router, wi, wo = (leaf(each) for each in weights_of(mesh, torch.float32))
    wi, wo = (leaf(own_part(each, mesh)) for each in (wi, wo))
    wide = nn.MoE(H, F, 48, 20, process_group=group).to(mesh.device_type)  # 2 * 20 rows for each token

    def function(x: Tensor) -> Tensor:
        return parallel.moe(x, router, wi, wo, K, process_group=group, once_per_rank=True, budget_factor=1.25)[0]

    numbers = (T, 6, 8)
    # What AOTAutograd makes of symbols is that of the first case; the others are about Dynamo's graphs.
    cases = (
        (module, [*module.parameters()], None, "aot_eager", numbers, 2),
        (module, [*module.parameters()], True, "eager", numbers, 2),
        (function, [router, wi, wo], True, "eager", numbers[:2], 3),
        (wide, [*wide.parameters()], True, "eager", numbers[:2], 3),
    )
    for run, parameters, dynamic, backend, every, most in cases:
        torch._dynamo.reset()
        graphs = CompileCounterWithBackend(backend)
        other = compiled(run, mesh, dynamic=dynamic, backend=graphs)
        for tokens in every:
            found = []
            for each in (run, other):
                x = leaf(drawn(mesh, tokens, H, seed=(tokens, mesh.get_rank())))
                y = each(x)
                y = y if isinstance(y, Tensor) else y[0]
                found.append([y.detach(), *torch.autograd.grad((y * y).sum(), [x, *parameters])])
            for mine, theirs in zip(*found, strict=True):
                asserts.bitwise(mine, theirs, f"{tokens} tokens")
        assert graphs.frame_count <= most, graphs.frame_count


@check
def fsdp2_shards_what_is_replicated(mesh: DeviceMesh) -> None:
    """FSDP2 around a layer, its experts left out: router and shared expert have the mean of the ranks' gradients."""
    torch.manual_seed(9)
    plain = nn.MoE(H, F, E, K, process_group=mesh.get_group(), shared_dim=16).to(mesh.device_type)
    module = copy.deepcopy(plain)
    fully_shard(module, mesh=mesh, ignored_params=set(module.experts.parameters()))
    x = drawn(mesh, T, H, seed=mesh.get_rank())
    for each in (plain, module):
        each(x)[0].sum().backward()
    for (name, a), (_, b) in zip(module.named_parameters(), plain.named_parameters(), strict=True):
        assert a.grad is not None, name
        assert b.grad is not None, name
        if name.startswith("experts"):
            asserts.bitwise(a.grad, b.grad, name)
        else:
            assert isinstance(a.grad, DTensor), name
            mean = b.grad.clone()
            dist.all_reduce(mean)
            near(a.grad.full_tensor(), (mean / mesh.size()).double(), name)


# ---------------------------------------------------------------------------------------------------------------------
# Ways to run the layer


@check
def tokens_in_chunks_have_the_same_bits(mesh: DeviceMesh) -> None:
    """y and the gradient of tokens; those of the experts are sums over the chunks, more of them than tokens as well."""
    group = mesh.get_group()
    experts = torch.from_numpy(experts_of(mesh.size() * T, K, E)).to(mesh.device_type)
    router, wi, wo = weights_of(mesh, torch.float32)
    for recipe in (None, FP8Block):
        found = []
        for chunks in (1, 2, T + 1):
            x = leaf(drawn(mesh, T, H, seed=mesh.get_rank()))
            own_wi, own_wo = leaf(own_part(wi, mesh)), leaf(own_part(wo, mesh))
            options: dict[str, Any] = {"experts": own_part(experts, mesh), "recipe": recipe, "chunks": chunks}
            y, aux = parallel.moe(x, router, own_wi, own_wo, K, process_group=group, **options)
            y.sum().backward()
            assert int(aux.load.sum()) == mesh.size() * T * K
            found.append((y.detach(), *(each.grad for each in (x, own_wi, own_wo))))
        for other in found[1:]:
            asserts.bitwise(other[0], found[0][0], "y")
            asserts.bitwise(other[1], found[0][1], "dx")
            # Tensor cores of 8-bit operands do not add up in float32.
            bound = bounds.FP8_PROMOTED if recipe is not None and x.is_cuda else bounds.LAYER
            for mine, theirs in zip(other[2:], found[0][2:], strict=True):
                near(mine, theirs.double(), "a gradient of experts", bound)
    with asserts.refused(ValueError, ["`chunks` of parallel.moe", "0", "from 1 on"]):
        parallel.moe(x, router, own_wi, own_wo, K, process_group=group, chunks=0)


@check
def codes_and_tokens_give_the_same_bits(mesh: DeviceMesh) -> None:
    """`send` says what travels; y and every gradient have the same bits, because scales are powers of two."""
    group = mesh.get_group()
    router, wi, wo = weights_of(mesh, torch.bfloat16)
    given = (
        drawn(mesh, T, H, seed=mesh.get_rank(), dtype=torch.bfloat16),
        router,
        own_part(wi, mesh),
        own_part(wo, mesh),
    )

    def run(given: list[Tensor], **options: Any) -> Tensor:
        x, router, wi, wo = given
        return parallel.moe(x, router, wi, wo, K, process_group=group, **options)[0]

    for recipe in (FP8Block, MXFP8):
        found = []
        for send in ("tokens", "codes", None):
            ours: Any = [leaf(each) for each in given]
            with Exchanges() as exchanges:
                y = run(ours, recipe=recipe, send=send)
            y.sum().backward()
            found.append((sum(exchanges.sent), y.detach(), *(each.grad for each in ours)))
        assert found[1][0] < found[0][0], "codes are fewer bytes"
        assert found[2][0] == found[1][0]
        for other in found[1:]:
            for mine, theirs in zip(other[1:], found[0][1:], strict=True):
                asserts.bitwise(mine, theirs, recipe.name)
    for send, fragments in (("codes", ["'codes'", "FP8Current", "single rows"]), ("text", ["'text'", "'tokens'"])):
        with asserts.refused(ValueError, ["`send` of parallel.moe", *fragments]):
            run(ours, recipe=FP8Current, send=send)
    with asserts.refused(ValueError, ["`send` of parallel.moe", "own transport"]):
        run(ours, recipe=MXFP8, send="codes", transport=_Counted(group))


@check
def the_recipe_of_the_context_says_what_travels(mesh: DeviceMesh) -> None:
    given = (128, 128, mesh.size(), 1)
    options: dict[str, Any] = {"process_group": mesh.get_group(), "device": mesh.device_type}
    for recipe in (FP8Block, MXFP8):
        wanted: Any = nn.MoE(*given, recipe=recipe, **options).transport
        for send in (None, "codes"):
            with nn.quantized_model_init(recipe=recipe):
                found: Any = nn.MoE(*given, send=send, **options).transport
            assert found.codes == wanted.codes
            assert found.codes is not None
    with asserts.refused(TypeError, ["`recipe` of MoE", "str", "expected a Recipe or None"]):
        nn.MoE(*given, recipe="FP8Block", **options)


@check
def gradients_of_tokens_travel_only_if_they_are_needed(mesh: DeviceMesh) -> None:
    """What goes back beside them: the gradient of y, and of the weights."""
    group, sent = mesh.get_group(), []
    weights = weights_of(mesh, torch.float32)
    for needed in (True, False):
        router, wi, wo = leaf(weights[0]), own_part(weights[1], mesh), own_part(weights[2], mesh)
        x = drawn(mesh, T, H, seed=mesh.get_rank()).requires_grad_(needed)
        y, _ = parallel.moe(x, router, wi, wo, K, process_group=group)
        with Exchanges() as exchanges:
            y.sum().backward()
        sent.append(len(exchanges.sent))
        assert (x.grad is not None, router.grad is not None) == (needed, True)
    assert sent == [3, 2]


@check
def tokens_of_another_dtype_are_cast_before_they_are_sent(mesh: DeviceMesh) -> None:
    """As on one rank, where they are quantised after the cast: to the dtype of the weights, or that of autocast."""
    x = drawn(mesh, mesh.size() * T, H, seed="x")
    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True)):
        torch.manual_seed(3)
        one = nn.MoE(H, F, E, K, recipe=MXFP8, dtype=dtype).to(mesh.device_type)
        ours = parallel.shard_experts(copy.deepcopy(one), mesh)
        with torch.autocast(mesh.device_type, dtype=torch.bfloat16, enabled=autocast):
            y, y2 = one(x)[0], ours(own_part(x, mesh))[0]
            weights: Any = (one.router.weight, one.experts.linear_fc1.weight, one.experts.linear_fc2.weight)
            own = [own_part(each.detach(), mesh) for each in weights[1:]]
            options: dict[str, Any] = {"process_group": mesh.get_group(), "recipe": MXFP8}
            if autocast:
                y3 = parallel.moe(own_part(x, mesh), weights[0], own[0], own[1], K, **options)[0]
                asserts.bitwise(all_parts(y3.detach()), y.detach(), "y of the function")
        asserts.bitwise(all_parts(y2.detach()), y.detach(), f"y, {dtype}")


@check
def a_shared_expert_reads_tokens_as_they_came(mesh: DeviceMesh) -> None:
    """Experts of other ranks get them cast; what runs here, and the sum of both gradients, is as on one rank."""
    x = drawn(mesh, mesh.size() * T, H, seed="x")
    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True)):
        torch.manual_seed(3)
        one = nn.MoE(H, F, E, K, shared_dim=16, shared_gate=True, dtype=dtype).to(mesh.device_type)
        ours = parallel.shard_experts(copy.deepcopy(one), mesh)
        whole, part = leaf(x), leaf(own_part(x, mesh))
        with torch.autocast(mesh.device_type, dtype=torch.bfloat16, enabled=autocast):
            y, y2 = one(whole)[0], ours(part)[0]
        y.float().square().sum().backward()
        y2.float().square().sum().backward()
        asserts.bitwise(all_parts(y2.detach()), y.detach(), f"y, {dtype}")
        asserts.bitwise(all_parts(part.grad), whole.grad, f"dx, {dtype}")


@check
def selective_checkpointing_sends_nothing_twice(mesh: DeviceMesh) -> None:
    group = mesh.get_group()
    router, wi, wo = weights_of(mesh, torch.float32)
    for recipe in (None, MXFP8):
        given = [leaf(each) for each in (drawn(mesh, T, H), router, own_part(wi, mesh), own_part(wo, mesh))]

        def run(*given: Any, recipe: Any = recipe) -> Tensor:
            return parallel.moe(given[0], given[1], given[2], given[3], K, process_group=group, recipe=recipe)[0]

        found, counts = [], []
        context = partial(create_selective_checkpoint_contexts, list(parallel.save_list()))
        for options in (None, {}, {"context_fn": context}):
            with Exchanges() as exchanges:
                y: Any = run(*given) if options is None else checkpoint(run, *given, use_reentrant=False, **options)
                found.append(torch.autograd.grad(y.sum(), given))
            counts.append(len(exchanges.sent))
        for other in found[1:]:
            for mine, theirs in zip(other, found[0], strict=True):
                asserts.bitwise(mine, theirs)
        assert counts[0] == counts[2] < counts[1], counts


@check_of_graphs
def the_compiled_layer_has_the_same_bits(mesh: DeviceMesh) -> None:
    """One graph, forward and backward, of codes in chunks, on every rank; the layer has a shared expert."""
    options: dict[str, Any] = {"chunks": 2, "recipe": MXFP8, "budget_factor": 2.0}
    torch.manual_seed(3)
    layer = nn.MoE(H, F, E, K, shared_dim=16, process_group=mesh.get_group(), aux_coeff=0.5, **options)
    layer = layer.to(mesh.device_type)
    x, found = drawn(mesh, T, H, seed=mesh.get_rank()), []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        held = leaf(x)
        y, aux = run(held)
        (y.sum() + aux.aux_loss).backward()
        found.append([y.detach(), aux.dropped, held.grad, *(each.grad for each in layer.parameters())])
        layer.zero_grad(set_to_none=True)
    for mine, theirs in zip(*found, strict=True):
        asserts.bitwise(mine, theirs)


@check
def gradients_go_to_main_grad_and_may_wait(mesh: DeviceMesh) -> None:
    group = mesh.get_group()
    x, found = drawn(mesh, T, H, seed=mesh.get_rank()), []
    for accumulate, delay in ((False, False), (True, False), (True, True)):
        torch.manual_seed(3)
        options: dict[str, Any] = {"accumulate_into_main_grad": accumulate, "delay_wgrad_compute": delay}
        layer = nn.MoE(H, F, E, K, process_group=group, **options).to(mesh.device_type)
        if accumulate:
            main_grads(list(layer.experts.parameters()), 0.0)
        layer(x)[0].sum().backward()
        if delay:
            assert layer.pending_wgrads() == 1
            layer.backward_dw()
        every: list[Any] = list(layer.experts.parameters())
        found.append([each.main_grad if accumulate else each.grad.reshape(-1) for each in every])
    for other in found[1:]:
        for mine, theirs in zip(other, found[0], strict=True):
            asserts.bitwise(mine, theirs)


def _main_grads_of_chunks(
    mesh: DeviceMesh, run: Any, *, overwrite: bool, passes: int = 1, delay: bool = False
) -> list[Tensor]:
    """`main_grad` of the experts of a layer with chunks: 0 before, or what each of `passes` overwrites."""
    torch.manual_seed(3)
    options: dict[str, Any] = {"accumulate_into_main_grad": True, "delay_wgrad_compute": delay, "chunks": 2}
    layer = nn.MoE(H, F, E, K, process_group=mesh.get_group(), **options).to(mesh.device_type)
    every: list[Any] = list(layer.experts.parameters())
    found = main_grads(every, 7.0 if overwrite else 0.0)
    for each in every:
        each.overwrite_main_grad = overwrite
    total = run(layer, drawn(mesh, T, H, seed=mesh.get_rank())).sum()
    for at in range(passes):
        total.backward(retain_graph=at + 1 < passes)
    for left in range(passes if delay else 0, 0, -1):
        assert layer.pending_wgrads() == left
        layer.backward_dw()
    assert layer.pending_wgrads() == 0
    return found


def _plainly(layer: Any, x: Tensor) -> Tensor:
    return layer(x)[0]


@check
def the_first_chunk_replaces_and_the_others_add(mesh: DeviceMesh) -> None:
    """Also in a second backward through the same graph, of delayed gradients, and of a recomputed layer."""
    expected = _main_grads_of_chunks(mesh, _plainly, overwrite=False)
    recomputed = partial(checkpoint, use_reentrant=False)
    ways = [(_plainly, False), (_plainly, True), (lambda layer, x: recomputed(_plainly, layer, x), True)]
    for run, delay in ways:
        found = _main_grads_of_chunks(mesh, run, overwrite=True, passes=2, delay=delay)
        for mine, theirs in zip(found, expected, strict=True):
            asserts.bitwise(mine, theirs)
    router, wi, wo = weights_of(mesh, torch.float32)
    x, found = drawn(mesh, T, H, seed=mesh.get_rank()), []
    for overwrite in (False, True):
        own: list[Any] = [leaf(own_part(each, mesh)) for each in (wi, wo)]
        found.append(main_grads(own, 7.0 if overwrite else 0.0))
        for each in own:
            each.overwrite_main_grad = overwrite
        options: dict[str, Any] = {"process_group": mesh.get_group(), "wgrad_accum": "main_grad", "chunks": 2}
        parallel.moe(x, router, own[0], own[1], K, **options)[0].sum().backward()
    for mine, theirs in zip(*found, strict=True):
        asserts.bitwise(mine, theirs)


@check_of_graphs
def the_first_chunk_replaces_beside_a_graph(mesh: DeviceMesh) -> None:
    """Which chunk comes first is state of Python, so that the layer, and its experts alone, are no whole graph."""
    expected = _main_grads_of_chunks(mesh, _plainly, overwrite=False)

    def experts_compiled(layer: Any, x: Tensor) -> Tensor:
        layer.experts.forward = torch.compile(layer.experts.forward, backend="aot_eager")
        return layer(x)[0]

    for run in (lambda layer, x: torch.compile(layer, backend="aot_eager")(x)[0], experts_compiled):
        for mine, theirs in zip(_main_grads_of_chunks(mesh, run, overwrite=True), expected, strict=True):
            asserts.bitwise(mine, theirs)


@check
def chunks_of_two_passes_wait_as_two(mesh: DeviceMesh) -> None:
    """The first `backward_dw` gives the gradients of all chunks of the pass whose backward ran first; the second adds
    the sum of the others, as autograd does.
    """
    options: dict[str, Any] = {"process_group": mesh.get_group(), "chunks": 2}
    x, other = (drawn(mesh, T, H, seed=(name, mesh.get_rank())) for name in ("x", "other"))
    found = []
    for delay in (False, True):
        torch.manual_seed(3)
        layer = nn.MoE(H, F, E, K, delay_wgrad_compute=delay, **options).to(mesh.device_type)
        before = layer(other)[0].sum() if delay else 0.0
        (before + layer(x)[0].sum()).backward()
        if delay:  # autograd runs the nodes of the later forward pass first
            assert layer.pending_wgrads() == 2
            layer.backward_dw()
            assert layer.pending_wgrads() == 1
        grads: list[Any] = [each.grad for each in layer.experts.parameters()]
        first = [each.clone() for each in grads]
        if delay:
            layer.backward_dw()
        else:
            layer(other)[0].sum().backward()
        found.append([*first, *grads])
    for mine, theirs in zip(*found, strict=True):
        asserts.bitwise(mine, theirs)


@check
def what_a_budget_drops_is_what_the_oracle_drops(mesh: DeviceMesh) -> None:
    """The result is that of one rank without these slots, bit for bit."""
    group, ranks, factor = mesh.get_group(), mesh.size(), 0.4
    tokens = 48
    every = experts_of(ranks * tokens, K, E)
    op = exchange.exchange_option("moe", ranks=ranks, experts=E, tokens=tokens, slots=K, budget_factor=factor)
    received, dropped = reference_exchange.exchange(op, every.reshape(ranks, tokens, K))
    kept = np.where(reference_exchange.travelled(op, received).reshape(every.shape), every, -1)
    assert sum(dropped) > 0
    router, wi, wo = weights_of(mesh, torch.float32)
    x = drawn(mesh, ranks * tokens, H, seed="x")
    weights, _, _ = route.topk_router(router_logits(x, router), K, experts=torch.from_numpy(every).to(x.device))
    expected = routed_mlp(x, torch.from_numpy(kept).to(x.device), weights, wi, wo)
    y, aux = parallel.moe(
        *(own_part(x, mesh), router, own_part(wi, mesh), own_part(wo, mesh), K),
        process_group=group,
        budget_factor=factor,
        experts=own_part(torch.from_numpy(every).to(x.device), mesh),
    )
    asserts.bitwise(all_parts(y), expected, "y")
    assert int(aux.dropped) == sum(dropped)


@check
def no_rank_may_have_tokens(mesh: DeviceMesh) -> None:
    router, wi, wo = weights_of(mesh, torch.float32)
    x, wi, wo = leaf(drawn(mesh, 0, H)), leaf(own_part(wi, mesh)), leaf(own_part(wo, mesh))
    y, aux = parallel.moe(x, router, wi, wo, K, process_group=mesh.get_group(), chunks=2)
    y.sum().backward()
    assert y.shape == (0, H)
    assert int(aux.load.sum()) == 0
    assert not wi.grad.any()


# ---------------------------------------------------------------------------------------------------------------------
# Modules and checkpoints


@check
def experts_as_dtensors_are_spread_as_well(mesh: DeviceMesh) -> None:
    """`shard_experts` of a whole layer: the bits of the layer, DTensors in its state, and no second time."""
    torch.manual_seed(3)
    one = nn.MoE(H, F, E, K, shared_dim=16).to(mesh.device_type)
    ours: Any = parallel.shard_experts(copy.deepcopy(one), mesh, chunks=2)
    x = drawn(mesh, mesh.size() * T, H, seed="x")
    mine = leaf(own_part(x, mesh))
    with Exchanges() as in_chunks:
        y2, _ = ours(mine)
    with Exchanges() as at_once:
        parallel.shard_experts(copy.deepcopy(one), mesh)(mine)
    assert len(in_chunks.sent) == 2 * len(at_once.sent) > 0
    y, _ = one(x)
    asserts.bitwise(all_parts(y2.detach()), y.detach(), "y")
    y2.sum().backward()
    state = ours.state_dict()
    for name, whole in one.state_dict().items():
        held = state[name]
        assert isinstance(held, DTensor) == name.startswith("experts."), name
        asserts.bitwise(held.full_tensor() if isinstance(held, DTensor) else held, whole, name)
    with asserts.refused(ValueError, ["layer `experts.linear_fc1`", "DTensors already"]):
        parallel.shard_experts(ours, mesh)


@check
def residuals_of_the_function_are_those_of_all_its_experts(mesh: DeviceMesh) -> None:
    """`save_input` keeps no hidden rows, neither of the experts nor of the shared one."""
    own = E // mesh.size()
    weights = [drawn(mesh, each, *shape) for each, f in ((own, 24), (1, 40)) for shape in ((2 * f, H), (H, f))]
    given = (leaf(drawn(mesh, T, H)), drawn(mesh, E, H), *weights[:2], K)
    for residuals, widths in (("save_fc1", {48, 80}), ("save_input", set())):
        with saved_tensors() as kept:
            options: Any = {"shared": SharedExpert(*weights[2:]), "residuals": residuals}
            parallel.moe(*given, process_group=mesh.get_group(), **options)
        assert {each.shape[1] for each in kept if each.dim() == 2} & {48, 80} == widths, residuals


@check
def the_flag_of_the_cache_reaches_experts_of_every_rank(mesh: DeviceMesh) -> None:
    module = nn.MoE(H, F, E, K, shared_dim=16, recipe=MXFP8, process_group=mesh.get_group()).to(mesh.device_type)
    x = drawn(mesh, T, H)
    y, _ = module(x, is_first_microbatch=True)
    assert all(each.cache._forms for each in module.grouped_layers())
    asserts.bitwise(module(x, is_first_microbatch=False)[0], y)


@check
def a_checkpoint_of_all_ranks_loads_on_half_of_them(mesh: DeviceMesh) -> None:
    ranks, rank, half = mesh.size(), mesh.get_rank(), mesh.size() // 2
    folder: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    torch.manual_seed(3)
    one = nn.MoE(H, F, E, K, shared_dim=16)
    ours = nn.MoE(H, F, E, K, shared_dim=16, process_group=mesh.get_group())
    with torch.no_grad():
        for mine, theirs in zip(ours.parameters(), one.parameters(), strict=True):
            mine.copy_(own_part(theirs, mesh) if mine.shape != theirs.shape else theirs)
    checkpoint_files.save(folder[0], ours, shard=(rank, ranks))
    dist.barrier()
    groups = [dist.new_group(list(range(at, at + half))) for at in (0, half)]
    fewer = nn.MoE(H, F, E, K, shared_dim=16, process_group=groups[rank // half])
    checkpoint_files.load(folder[0], fewer, shard=(rank % half, half))
    for mine, theirs in zip(fewer.parameters(), one.parameters(), strict=True):
        part = theirs.chunk(half)[rank % half] if mine.shape != theirs.shape else theirs
        asserts.bitwise(mine.detach(), part.detach())
    x = drawn(mesh, half * T, H, seed="x")
    fewer, one = fewer.to(x.device), one.to(x.device)
    y = fewer(x.chunk(half)[rank % half].clone())[0]
    asserts.bitwise(y.detach(), one(x)[0].detach().chunk(half)[rank % half].clone(), "y")


@check
def a_checkpoint_of_dtensors_numbers_them_among_all(mesh: DeviceMesh) -> None:
    """`checkpoint.save` of a layer with spread experts, whole again on one rank, and spread over the ranks again."""
    folder: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    torch.manual_seed(3)
    one = nn.MoE(H, F, E, K, shared_dim=16, bias=True, single_grouped_bias=True)
    ours = parallel.shard_experts(copy.deepcopy(one).to(mesh.device_type), mesh)
    checkpoint_files.save(folder[0], ours)
    dist.barrier()
    torch.manual_seed(4)
    whole, again = (nn.MoE(H, F, E, K, shared_dim=16, bias=True, single_grouped_bias=True) for _ in range(2))
    again = parallel.shard_experts(again.to(mesh.device_type), mesh)
    for each in (whole, again):
        checkpoint_files.load(folder[0], each)
    expected = one.state_dict()
    for name, value in whole.state_dict().items():
        asserts.bitwise(value, expected[name], name)
    for name, value in again.state_dict().items():
        asserts.bitwise((value.full_tensor() if isinstance(value, DTensor) else value).cpu(), expected[name], name)
    with asserts.refused(ValueError, ["`shard` of a checkpoint", "beside `experts.", "leave it out"]):
        checkpoint_files.save(folder[0], ours, shard=(0, mesh.size() + 1))
    fsdp = fully_shard(nn.MoE(H, F, E, K).to(mesh.device_type), mesh=mesh)
    with asserts.refused(ValueError, ["a DTensor of shape"]):
        checkpoint_files.save(folder[0], fsdp)


@check
def jax_gives_the_same_bits(mesh: DeviceMesh) -> None:
    """`jax_grouped.parallel.moe` over as many devices, which the first rank runs: y, dx and the experts' gradients."""
    if mesh.device_type != "cpu":
        return
    router, wi, wo = weights_of(mesh, torch.float32)
    x, dy = (drawn(mesh, mesh.size() * T, H, seed=each) for each in ("x", "dy"))
    for recipe in (None, FP8Block, MXFP8):
        options: dict[str, Any] = {"process_group": mesh.get_group(), "recipe": recipe}
        ours = [leaf(own_part(each, mesh)) for each in (x, wi, wo)]
        y, _ = parallel.moe(ours[0], router, ours[1], ours[2], K, **options)
        y.backward(own_part(dy, mesh))
        found = [all_parts(each) for each in (y.detach(), *(each.grad for each in ours))]
        if mesh.get_rank() == 0:
            given = {"x": x, "router": router, "wi": wi, "wo": wo}
            theirs = in_jax(mesh.size(), given, dy, ("x", "wi", "wo"), recipe=recipe)
            for name, mine, other in zip(("y", "dx", "wi", "wo"), found, theirs, strict=True):
                asserts.bitwise(mine, torch.from_numpy(other), f"{name}, {recipe and recipe.name}")


# ---------------------------------------------------------------------------------------------------------------------
# Checks that are run by name alone


def one_two_and_eight_ranks_have_the_bits_of_one(mesh: DeviceMesh) -> None:
    """On eight ranks, which share the experts of eight, four or one layer."""
    for ranks in (1, 2, mesh.size()):
        part = init_device_mesh(mesh.device_type, (mesh.size() // ranks, ranks), mesh_dim_names=("layer", "expert"))
        # The sum of the routers' gradients over ranks is looked at in float32; tokens are bfloat16 below.
        _layer_as_one_rank(part["expert"], (torch.float32,))
        tokens_have_the_gradients_of_one_rank(part["expert"])


def passes_without_tokens_run_at_every_width(mesh: DeviceMesh) -> None:
    """Codes, scales and choices travel as bytes: with no row, or one in all, their strides divide nothing."""
    for width in (32, 96, 2880):
        for recipe in (FP8Block, MXFP8):
            options: dict[str, Any] = {"process_group": mesh.get_group(), "recipe": recipe, "dtype": torch.bfloat16}
            module = nn.MoE(width, 32, E, 1, **options).to(mesh.device_type)
            for tokens in (0, int(mesh.get_local_rank() == 0)):  # on all ranks together
                x = torch.ones(tokens, width, device=mesh.device_type, dtype=torch.bfloat16, requires_grad=True)
                y, _ = module(x)
                y.sum().backward()
                assert y.shape == x.shape, (width, recipe.name, tokens)
                assert y.isfinite().all(), (width, recipe.name, tokens)


@check
def different_numbers_of_tokens_are_refused(mesh: DeviceMesh) -> None:
    """Under GROUPED_DEBUG=ranks, on every rank and with all numbers; equal numbers keep their bits."""
    router, wi, wo = weights_of(mesh, torch.float32)
    experts = (router, own_part(wi, mesh), own_part(wo, mesh), K)

    def run(tokens: int) -> Tensor:
        return parallel.moe(drawn(mesh, tokens, H), *experts, process_group=mesh.get_group())[0]

    expected = run(T)
    os.environ["GROUPED_DEBUG"] = "ranks"
    try:
        asserts.bitwise(run(T), expected)
        numbers = ", ".join(str(T + rank) for rank in range(mesh.size()))
        words = ["moe", f"{numbers} tokens", "expected the same number on every rank", "pad with tokens"]
        with asserts.refused(ValueError, words):
            run(T + mesh.get_rank())
    finally:
        del os.environ["GROUPED_DEBUG"]


@check
def different_needs_of_gradients_are_refused(mesh: DeviceMesh) -> None:
    """Under GROUPED_DEBUG=ranks, on every rank: the ranks that need none would not exchange any in backward."""
    group, first = mesh.get_group(), mesh.get_rank() == 0
    router, wi, wo = weights_of(mesh, torch.float32)
    given = {"x": drawn(mesh, T, H), "router": router, "wi": own_part(wi, mesh), "wo": own_part(wo, mesh)}
    whole = ", ".join(["True", *["False"] * (mesh.size() - 1)])
    cases = {
        "x": ("`x` needs a gradient", "x.requires_grad_()"),
        "router": ("the router's weights need a gradient", "freeze the router on all ranks, or on none"),
        "wo": ("results of the experts need a gradient", "x.requires_grad_()"),
    }
    os.environ["GROUPED_DEBUG"] = "ranks"
    try:
        for trained, words in cases.items():
            ours = {name: each.clone().requires_grad_(first and name == trained) for name, each in given.items()}
            with asserts.refused(ValueError, ["parallel.moe", f"{whole} (whether", "the same on every rank", *words]):
                parallel.moe(**ours, k=K, process_group=group)
            with torch.no_grad():
                parallel.moe(**ours, k=K, process_group=group)
    finally:
        del os.environ["GROUPED_DEBUG"]


@check
def some_ranks_alone_train_experts_of_tokens_with_gradients(mesh: DeviceMesh) -> None:
    """One expert of the last rank: refused, unless tokens need gradients everywhere, and then its gradient is that of
    one rank.
    """
    last = mesh.get_rank() == mesh.size() - 1
    torch.manual_seed(3)
    options: dict[str, Any] = {"single_grouped_weight": False, "device": mesh.device_type}
    one, own = nn.MoE(H, F, E, K, **options).requires_grad_(False), E // mesh.size()
    ours = nn.MoE(H, F, E, K, process_group=mesh.get_group(), **options).requires_grad_(False)
    ours.router.load_state_dict(one.router.state_dict())
    layers = [(getattr(one.experts, name), getattr(ours.experts, name)) for name in ("linear_fc1", "linear_fc2")]
    for whole, part in layers:
        for at in range(own):
            getattr(part, f"weight{at}").copy_(getattr(whole, f"weight{mesh.get_rank() * own + at}"))
        getattr(whole, f"weight{E - 1}").requires_grad_(True)
        getattr(part, f"weight{own - 1}").requires_grad_(last)
    x, dy = (drawn(mesh, mesh.size() * T, H, seed=each) for each in ("x", "dy"))
    one(x)[0].backward(dy)
    os.environ["GROUPED_DEBUG"] = "ranks"
    try:
        with asserts.refused(ValueError, ["MoE: ", "results of the experts need a gradient"]):
            ours(own_part(x, mesh))
        ours(own_part(x, mesh).requires_grad_())[0].backward(own_part(dy, mesh))
    finally:
        del os.environ["GROUPED_DEBUG"]
    for whole, part in layers:
        found = getattr(part, f"weight{own - 1}").grad
        assert (found is not None) == last
        if last:
            asserts.bitwise(found, getattr(whole, f"weight{E - 1}").grad)


@check
def sequences_of_a_layer_are_those_of_each_rank(mesh: DeviceMesh) -> None:
    """The auxiliary loss of the layer is the mean over the sequences of all ranks, as on one rank."""
    group, own = mesh.get_group(), [1 + mesh.get_rank(), 0, T - 1 - mesh.get_rank()]
    every = torch.tensor([[1 + rank, 0, T - 1 - rank] for rank in range(mesh.size())]).flatten()
    torch.manual_seed(3)
    one = nn.MoE(H, F, E, K, aux_coeff=0.5).to(mesh.device_type)
    ours = nn.MoE(H, F, E, K, aux_coeff=0.5, process_group=group).to(mesh.device_type)
    ours.router.load_state_dict(one.router.state_dict())
    x = drawn(mesh, mesh.size() * T, H)
    expected = one(x, sequence_sizes=every.to(mesh.device_type))[1].aux_loss
    found = ours(own_part(x, mesh), sequence_sizes=torch.tensor(own, device=mesh.device_type))[1].aux_loss
    near(found, expected.double(), "aux_loss")
    for each in (found, expected):
        each.backward()
    total, wanted = ours.router.weight.grad, one.router.weight.grad
    assert total is not None
    assert wanted is not None
    dist.all_reduce(total, group=group)
    near(total, wanted.double(), "router")


def one_rank_stays_away(mesh: DeviceMesh) -> None:
    """A check that fails."""
    if mesh.get_rank() == 1:
        time.sleep(3600)
    router, wi, wo = weights_of(mesh, torch.float32)
    parallel.moe(
        *(drawn(mesh, T, H), router, own_part(wi, mesh), own_part(wo, mesh), K),
        process_group=mesh.get_group(),
        z_coeff=0.5,
    )


BY_NAME: Checks = {
    each.__name__: each
    for each in (
        one_two_and_eight_ranks_have_the_bits_of_one,
        passes_without_tokens_run_at_every_width,
        one_rank_stays_away,
    )
}
PROGRAM = partial(main, __doc__, CHECKS, RANKS, BY_NAME)

if __name__ == "__main__":
    sys.exit(PROGRAM())
