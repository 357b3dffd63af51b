"""What two ranks check together, each in a process of its own: FSDP2 around the modules, experts spread as DTensors,
masters of quantised weights in shards.

    python -m tests.torch_frontend.parallel_checks --device cuda    # by hand, on two GPUs; the tests run it on the CPU

Rank r has the rows of the problem times r + 1, so that ranks differ.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from grouped_core.routing import Sums
from tests import asserts
from tests.torch_frontend.expert_parallel_tools import compiled
from tests.torch_frontend.nn_tools import MODULES, Setup, main_grads, setup
from tests.torch_frontend.rank_tools import Checks, check_in, main
from tests.torch_frontend.recipe_tools import state_of
from tests.torch_frontend.routing_tools import ROUTERS, Rules, draw, near
from tests.torch_frontend.torch_tools import leaf
from torch_bridge import (
    MXFP8,
    NVFP4,
    FP8Block,
    FP8Current,
    FP8Delayed,
    checkpoint,
    grouped_linear,
    nn,
    parallel,
    params,
    route,
    scaling_state,
    shards,
    update_scaling,
)
from torch_bridge.quantized_weight import named_parts as parts_of

RANKS = 2
CHECKS: Checks = {}
check = check_in(CHECKS)


def _setup(form: str, listed: bool, mesh: DeviceMesh, **options: Any) -> Setup:
    """The problem of `nn_tools` on this rank's device, with its own rows."""
    s = setup(form, listed, **options)
    device = torch.device("cuda", mesh.get_rank()) if mesh.device_type == "cuda" else torch.device("cpu")
    s.module.to(device)
    s.x, s.dy = s.x.to(device) * (mesh.get_rank() + 1), s.dy.to(device)
    s.sizes, s.probs = s.sizes.to(device), s.probs.to(device)
    return s


def _run(s: Setup, module: Any, x: Tensor) -> Tensor:
    extra = {"GroupedLinear": (s.sizes,), "GroupedMLP": (s.sizes, s.probs)}.get(s.form, (s.sizes, s.probs, s.sizes))
    return module(x, *extra)


def _mean_over_ranks(tensor: Tensor) -> Tensor:
    found = [torch.empty_like(tensor) for _ in range(RANKS)]
    dist.all_gather(found, tensor.contiguous())
    return (found[0] + found[1]) / RANKS


def _same_gradients(sharded: Any, plain: Any) -> None:
    """Gradients of sharded weights are the mean over ranks of those of plain weights."""
    for (name, a), (_, b) in zip(sharded.named_parameters(), plain.named_parameters(), strict=True):
        if b.grad is None:
            assert a.grad is None, name
        else:
            assert a.grad.placements == a.placements, name
            asserts.bitwise(a.grad.full_tensor(), _mean_over_ranks(b.grad), name)


@check
def fsdp2_gives_the_mean_of_the_gradients(mesh: DeviceMesh) -> None:
    """Every module, both forms of parameters; one expert is frozen if it has a separate parameter."""
    for form in MODULES:
        for listed in (False, True):
            s = _setup(form, listed, mesh)
            if listed:
                s.weights[1].requires_grad_(False)
            plain = copy.deepcopy(s.module)
            fully_shard(s.module, mesh=mesh)
            x, x2 = leaf(s.x), leaf(s.x)
            y, y2 = _run(s, s.module, x), _run(s, plain, x2)
            asserts.bitwise(y, y2, "y")
            y.backward(s.dy)
            y2.backward(s.dy)
            asserts.bitwise(x.grad, x2.grad, "dx")
            _same_gradients(s.module, plain)


class _Model(torch.nn.Module):
    """Experts after another weight."""

    def __init__(self, experts: nn.GroupedMLP) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(2, device=next(experts.parameters()).device))
        self.experts = experts

    def forward(self, x: Tensor, sizes: Tensor, probs: Tensor) -> Tensor:
        return self.scale[0] * self.experts(x, sizes, probs)


@check
def fsdp2_trains_as_copies_that_average_do(mesh: DeviceMesh) -> None:
    """Four steps with nested layers: the experts are a separate FSDP unit inside a model."""
    s = _setup("GroupedMLP", True, mesh)
    plain = _Model(s.module)
    model = copy.deepcopy(plain)
    fully_shard(model.experts, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for _ in range(4):
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            one(leaf(s.x), s.sizes, s.probs).backward(s.dy)
            if one is plain:
                for parameter in plain.parameters():
                    parameter.grad = _mean_over_ranks(parameter.grad)
            optimizer.step()
    for (name, a), (_, b) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert isinstance(a, DTensor)
        asserts.bitwise(a.full_tensor(), b, name)


@check
def delayed_gradients_are_averaged_when_they_run(mesh: DeviceMesh) -> None:
    """Two microbatches, drained after FSDP2 has sharded the weights again, equal to the undelayed ones."""
    for form in MODULES:
        for listed in (False, True):
            found = []
            for delay in (False, True):
                s = _setup(form, listed, mesh, delay=delay)
                fully_shard(s.module, mesh=mesh)
                for at in range(2):
                    _run(s, s.module, leaf(s.x * (at + 1))).backward(s.dy)
                if delay:
                    assert all(each.grad is None for each in s.module.parameters())
                    s.module.backward_dw(all=True)
                found.append(s.module)
            for (name, a), (_, b) in zip(*(each.named_parameters() for each in found), strict=True):
                assert a.grad.placements == a.placements, name
                asserts.bitwise(a.grad.full_tensor(), b.grad.full_tensor(), name)


@check
def an_idle_rank_runs_every_collective(mesh: DeviceMesh) -> None:
    s = _setup("GroupedMLP", True, mesh)
    if mesh.get_rank() == 1:
        s.sizes = torch.zeros_like(s.sizes)
    plain = copy.deepcopy(s.module)
    fully_shard(s.module, mesh=mesh)
    for module in (s.module, plain):
        _run(s, module, leaf(s.x)).backward(s.dy)
    if mesh.get_rank() == 1:
        assert not any(each.grad.any() for each in plain.parameters())
    _same_gradients(s.module, plain)


@check
def main_grad_is_looked_for_on_the_unsharded_parameter(mesh: DeviceMesh) -> None:
    """FSDP2 has no `main_grad`, and writing it raises an error; a wrapper with FSDP attributes is asked for one."""
    s = _setup("GroupedLinear", False, mesh, accumulate=True)
    fully_shard(s.module, mesh=mesh)
    y = _run(s, s.module, leaf(s.x))
    with asserts.refused(RuntimeError, ["`main_grad` of `weight`", "missing", "create it"]):
        y.backward(s.dy)


@check
def a_sharded_state_dict_loads_into_either_form(mesh: DeviceMesh) -> None:
    for listed in (False, True):
        s = _setup("GroupedMLP", listed, mesh)
        plain = copy.deepcopy(s.module)
        fully_shard(s.module, mesh=mesh)
        twin = _setup("GroupedMLP", not listed, mesh).module
        with asserts.refused(ValueError, ["checkpoint: `linear_fc1.weight", "a DTensor", "`full_state_dict=True`"]):
            fully_shard(twin, mesh=mesh).load_state_dict(s.module.state_dict())
        state = get_model_state_dict(s.module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if mesh.get_rank():
            continue  # rank 0 has it
        other = _setup("GroupedMLP", not listed, mesh).module
        other.load_state_dict(state)
        asserts.bitwise(_run(s, other, s.x), _run(s, plain, s.x))


@check
def forms_of_weights_gathered_in_earlier_passes_are_not_reused(mesh: DeviceMesh) -> None:
    """Gathered weights often have the same address, and always the same version."""
    for listed in (False, True):
        for _ in range(8):
            s = _setup("GroupedLinear", listed, mesh, recipe=MXFP8)
            fully_shard(s.module, mesh=mesh)
            optimizer = torch.optim.SGD(s.module.parameters(), lr=1.0)
            s.module(s.x, s.sizes, is_first_microbatch=True).backward(s.dy)
            optimizer.step()
            with asserts.refused(RuntimeError, ["weight cache", "gathered again", "is_first_microbatch=True"]):
                s.module(s.x, s.sizes, is_first_microbatch=False)
            s.module.reshard()


@check
def layers_inside_an_mlp_are_not_wrapped_alone(mesh: DeviceMesh) -> None:
    """Their forward is not called, so their weights would not be gathered."""
    s = _setup("GroupedMLP", True, mesh)
    fully_shard(s.module.linear_fc1, mesh=mesh)
    with asserts.refused(ValueError, ["`weight0`", "DTensor", "wrap the module that is called"]):
        _run(s, s.module, s.x)


# ---------------------------------------------------------------------------------------------------------------------
# Experts as DTensors


def _experts(mesh: DeviceMesh, **options: Any) -> tuple[Setup, Any, Any]:
    """(the whole problem, all experts in one module, those of this rank): four groups, two per rank."""
    s = _setup("GroupedMLP", False, mesh, case="uniform", **options)
    s.x = s.x / (mesh.get_rank() + 1)  # here both have the same rows
    spread = parallel.shard_experts(copy.deepcopy(s.module), mesh)
    return s, s.module, spread


def _part(s: Setup, mesh: DeviceMesh) -> tuple[slice, Tensor]:
    """(the rows of this rank's experts, their sizes)."""
    groups, rows = len(s.sizes) // RANKS, len(s.x) // RANKS
    rank = mesh.get_rank()
    return slice(rank * rows, (rank + 1) * rows), s.sizes[rank * groups : (rank + 1) * groups]


def _local(parameter: Any) -> Any:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


@check
def each_rank_computes_its_own_experts(mesh: DeviceMesh) -> None:
    """y, dx and gradients are parts of those of the whole problem; gradients are placed like the weights."""
    for mode in ("grad", "main_grad", "delayed", "delayed_main_grad"):
        options = {"accumulate": "main_grad" in mode, "delay": "delayed" in mode}
        s, whole, spread = _experts(mesh, **options)
        rows, sizes = _part(s, mesh)
        for module in (whole, spread):
            if options["accumulate"]:
                main_grads([_local(each) for each in module.parameters()], 0.5)
                for parameter in module.parameters():
                    parameter.main_grad = _local(parameter).main_grad
                    parameter.grad_added_to_main_grad = False
        x, mine = leaf(s.x), leaf(s.x[rows])
        y, y2 = whole(x, s.sizes, s.probs), spread(mine, sizes, s.probs[rows].contiguous())
        asserts.bitwise(y2, y[rows], "y")
        y.backward(s.dy)
        y2.backward(s.dy[rows].contiguous())
        asserts.bitwise(mine.grad, x.grad[rows], "dx")
        if options["delay"]:
            assert all(each.skip_backward_post_hook for each in spread.parameters())
            whole.backward_dw()
            spread.backward_dw()
        for (name, a), (_, b) in zip(spread.named_parameters(), whole.named_parameters(), strict=True):
            assert a.grad.placements == (Shard(0),), name
            asserts.bitwise(a.grad.full_tensor(), b.grad, f"{mode}: {name}")
            if options["accumulate"]:
                assert a.grad_added_to_main_grad is True
                parts = b.main_grad.view(RANKS, -1)
                asserts.bitwise(a.main_grad, parts[mesh.get_rank()], f"{mode}: main_grad of {name}")
    layer = nn.GroupedLinear(4, 3, 3, single_grouped_weight=True, single_grouped_bias=True)
    layer.weight.requires_grad_(False)
    spread = parallel.shard_experts(layer, mesh)
    assert {name: each.requires_grad for name, each in spread.named_parameters()} == {"weight": False, "bias": True}


@check
def other_placements_and_uses_are_refused(mesh: DeviceMesh) -> None:
    s, _, spread = _experts(mesh)
    _, sizes = _part(s, mesh)
    layer: Any = spread.linear_fc1
    whole: Any = layer.weight.detach().full_tensor()
    for placement in (Replicate(), Shard(1)):
        layer.weight = torch.nn.Parameter(distribute_tensor(whole, mesh, [placement]))
        with asserts.refused(ValueError, ["`weight`", "placed", "Shard(0) along every axis", "redistribute"]):
            layer(s.x, sizes)
    with asserts.refused(ValueError, ["`weight`", "a DTensor", "to_local()"]):
        grouped_linear(s.x[:, :8].contiguous(), spread.linear_fc2.weight, s.sizes)
    weight = torch.zeros(4, 3, s.x.shape[1], device=s.x.device)
    with asserts.refused(ValueError, ["`x`", "a DTensor", "to_local()"]):
        grouped_linear(distribute_tensor(s.x, mesh, [Shard(0)]), weight, s.sizes)
    with asserts.refused(ValueError, ["one parameter per group", "`single_grouped_weight`"]):
        parallel.shard_experts(nn.GroupedLinear(4, 3, 3), mesh)
    with asserts.refused(ValueError, ["layer `linear_fc1`", "5 groups over 2 ranks", "divide"]):
        parallel.shard_experts(nn.GroupedMLP(5, 3, 3, single_grouped_weight=True), mesh)
    with asserts.refused(ValueError, ["layer `linear_fc1`", "DTensors already", "expected plain", "before FSDP2"]):
        parallel.shard_experts(spread, mesh)
    with asserts.refused(ValueError, ["layer `linear_fc1`", "an adapter", "expected plain", "build each rank's"]):
        parallel.shard_experts(nn.GroupedMLP(4, 3, 3, single_grouped_weight=True, lora_rank=2), mesh)
    sharded = fully_shard(nn.GroupedMLP(4, 4, 4), mesh=mesh)
    with asserts.refused(ValueError, ["`linear_fc1.weight0`", "a DTensor placed", "expected experts", "distributed"]):
        checkpoint.save("/nowhere", sharded)
    trained = nn.GroupedMLP(4, 4, 4, lora_rank=2).to(mesh.device_type)
    adapters = trained.peft_state_dict("experts")
    fully_shard(trained, mesh=mesh).unshard()
    for call in (trained.merge, lambda: trained.load_peft_state_dict(adapters, "experts")):
        with asserts.refused(ValueError, ["FSDP2 has gathered", "expected ones that keep", "full state dict"]):
            call()
    for given in ((None, mesh), (spread, None)):
        with asserts.refused(TypeError, ["of shard_experts", "NoneType", "expected a", "pass one"]):
            parallel.shard_experts(*given)
    with asserts.refused(ValueError, ["`mesh`", "2 axes", "expected one", "that part"]):
        parallel.shard_experts(spread, init_device_mesh(mesh.device_type, (1, mesh.size())))
    with asserts.refused(ValueError, ["`group_sizes`", "a DTensor", "to_local()"]):
        grouped_linear(s.x, weight, distribute_tensor(s.sizes, mesh, [Shard(0)]))
    x = s.x.clone().requires_grad_()
    y = grouped_linear(x, weight, s.sizes)
    with asserts.refused(ValueError, ["a DTensor", "expected the local part", "to_local()"]):
        y.backward(distribute_tensor(torch.ones_like(y), mesh, [Shard(0)]))


@check
def options_that_do_not_fit_one_layer_change_none(mesh: DeviceMesh) -> None:
    """Codes are sent only by the recipe of the first."""
    layers: list[Any] = [nn.MoE(128, 128, 2, 1, recipe=each) for each in (FP8Block, FP8Delayed)]
    module = torch.nn.ModuleList(layers).to(mesh.device_type)
    with asserts.refused(ValueError, ["`send` of MoE", "'codes' with recipe FP8Delayed", "send=None"]):
        parallel.shard_experts(module, mesh, send="codes")
    assert all(each.process_group is None and each.transport is None for each in layers)
    parallel.shard_experts(module, mesh, chunks=2)
    assert [(each.chunks, each.transport.codes is not None) for each in layers] == [(2, True), (2, False)]


@check
def each_rank_has_the_scaling_state_of_its_own_experts(mesh: DeviceMesh) -> None:
    """Bits, scales and amaxes are the parts of those of the whole."""
    s, whole, spread = _experts(mesh, recipe=FP8Delayed.replace(history=2))
    rows, sizes = _part(s, mesh)
    groups = slice(mesh.get_rank() * len(sizes), (mesh.get_rank() + 1) * len(sizes))
    for _ in range(2):
        x, mine = leaf(s.x), leaf(s.x[rows])
        y, y2 = whole(x, s.sizes, s.probs), spread(mine, sizes, s.probs[rows].contiguous())
        asserts.bitwise(y2, y[rows], "y")
        y.backward(s.dy)
        y2.backward(s.dy[rows].contiguous())
        asserts.bitwise(mine.grad, x.grad[rows], "dx")
        for module in (whole, spread):
            update_scaling(module.scaling_state)
        asserts.bitwise(state_of(spread).scale, state_of(whole).scale[:, groups].contiguous())


@check
def checkpoints_hold_the_scaling_state_of_every_rank(mesh: DeviceMesh) -> None:
    """The same number of ranks load their own parts, one rank loads all experts, and a whole checkpoint is divided, as
    is the state of a layer that is sharded later.
    """
    recipe = FP8Delayed.replace(history=2)
    for make in (nn.GroupedLinear, nn.GroupedMLP):

        def module(make: Any = make) -> Any:
            return make(4, 32, 32, bias=False, single_grouped_weight=True, recipe=recipe).to(mesh.device_type)

        held, other, whole = (
            parallel.shard_experts(module(), mesh),
            parallel.shard_experts(module(), mesh),
            module(),
        )
        for number, name in enumerate(("scaling_scale", "scaling_history")):
            tensor: Tensor = getattr(held, name)
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 100 * mesh.get_rank() + 1000 * number)
        folder: list[Any] = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        save(get_model_state_dict(held), checkpoint_id=folder[0])
        for each in (other, whole):
            state = get_model_state_dict(each)
            load(state, checkpoint_id=folder[0])
            set_model_state_dict(each, state)
        again = parallel.shard_experts(module(), mesh)
        set_model_state_dict(again, whole.state_dict(), options=StateDictOptions(full_state_dict=True))
        divided = parallel.shard_experts(copy.deepcopy(whole), mesh)
        for name in ("scaling_scale", "scaling_history", "scaling_top"):
            mine = getattr(held, name)
            asserts.bitwise(getattr(other, name), mine, name)
            asserts.bitwise(getattr(again, name), mine, name)
            asserts.bitwise(getattr(divided, name), mine, name)
            if name != "scaling_top":
                mine = DTensor.from_local(mine, mesh, [Shard(mine.dim() - 1)]).full_tensor()
            asserts.bitwise(getattr(whole, name), mine, name)


# ---------------------------------------------------------------------------------------------------------------------
# Routing


def _close(found: Tensor, wanted: Any, what: str) -> None:
    near(found, torch.from_numpy(wanted).to(found), what)


@check
def routers_of_all_ranks_share_their_losses(mesh: DeviceMesh) -> None:
    """Losses follow from the sums of both ranks, and each rank gets their gradient in its own logits; also compiled."""
    rank, k, coefficients = mesh.get_rank(), 2, {"aux_coeff": 0.5, "z_coeff": 0.25}
    for router in ("softmax", "deepseek_v3", "capacity_probs"):
        options = {**ROUTERS[router], **coefficients}
        logits = [draw(17 + each, 8, seed=each) for each in range(RANKS)]
        every = [Rules.of(each, k, options) for each in logits]
        chosen = [each.choose() for each in every]
        losses = every[0].losses(Sums(*(a + b for a, b in zip(*(each.sums for each in chosen), strict=True))))
        d_weights = draw(len(logits[rank]), k, seed="dw")
        wanted = every[rank].grad(chosen[rank], losses, d_weights, (2.0, 3.0))
        for run in (route.topk_router, compiled(route.topk_router, mesh)):
            held = leaf(torch.from_numpy(logits[rank]).to(mesh.device_type))
            weights, experts, aux = run(held, k, process_group=mesh.get_group(), **options)
            upstream = [torch.from_numpy(d_weights), torch.tensor(2.0), torch.tensor(3.0)]
            torch.autograd.backward(
                [weights, aux.aux_loss, aux.z_loss], [each.to(mesh.device_type) for each in upstream]
            )
            same = asserts.bitwise if mesh.device_type == "cpu" else _close  # a GPU's exp and log are others
            asserts.bitwise(experts, chosen[rank].experts, "experts")
            same(torch.stack([aux.aux_loss, aux.z_loss, aux.entropy]), losses.values, "losses")
            asserts.bitwise(aux.load, chosen[rank].load[0], "load of this rank")
            dropped = chosen[rank].dropped
            assert int(aux.dropped) == (0 if dropped is None else int(dropped[0]))
            same(held.grad, wanted, "gradient")


@check
def sequences_of_every_rank_are_its_own(mesh: DeviceMesh) -> None:
    """As many on each rank; with `split_sequences` a rank has a part of each. Also compiled; an empty one is none."""
    rank, group, options = mesh.get_rank(), mesh.get_group(), {"score": "sigmoid", "aux_coeff": 0.5, "z_coeff": 0.25}
    logits = torch.from_numpy(draw(32, 8)).to(mesh.device_type)
    cases = (
        (False, ((6, 10, 0), (1, 2, 13)), (6, 10, 1, 2, 13)),
        (True, ((12, 4, 0), (0, 10, 6)), (12, 14, 6)),
    )
    for split, parts, every in cases:
        one = leaf(logits)
        aux = route.topk_router(one, 2, sequence_sizes=torch.tensor(every, device=logits.device), **options)[2]
        (2 * aux.aux_loss + 3 * aux.z_loss).backward()
        for run in (route.topk_router, compiled(route.topk_router, mesh)):
            held = leaf(logits[rank * 16 : rank * 16 + 16])
            how: dict[str, Any] = {"process_group": group, "split_sequences": split, **options}
            found = run(held, 2, sequence_sizes=torch.tensor(parts[rank], device=logits.device), **how)[2]
            (2 * found.aux_loss + 3 * found.z_loss).backward()
            near(found.aux_loss, aux.aux_loss.double(), "aux_loss")
            near(held.grad, one.grad[rank * 16 : rank * 16 + 16].double(), "gradient")
    many = torch.zeros(32768, dtype=torch.int32, device=logits.device)
    words = ["`sequence_sizes` of topk_router", "32768 sequences on each of 2 ranks", "1 to 32767, of 65535 on all"]
    with asserts.refused(ValueError, words):
        route.topk_router(logits, 2, sequence_sizes=many, process_group=group)


@check
def different_numbers_of_sequences_are_refused(mesh: DeviceMesh) -> None:
    """Under GROUPED_DEBUG=ranks, on every rank and with all numbers, also none."""
    rank, group = mesh.get_rank(), mesh.get_group()
    logits = torch.from_numpy(draw(16, 8)).to(mesh.device_type)
    sizes = torch.tensor([6, 10, 0], device=logits.device)
    os.environ["GROUPED_DEBUG"] = "ranks"
    try:
        for given, numbers in ((sizes[: 2 + rank], "2, 3"), (sizes if rank else None, "None, 3")):
            words = ["topk_router", f"{numbers} sequences", "the same number on every rank", "pad with sequences"]
            with asserts.refused(ValueError, words):
                route.topk_router(logits, 2, sequence_sizes=given, process_group=group)
        route.topk_router(logits, 2, sequence_sizes=sizes, process_group=group)
    finally:
        del os.environ["GROUPED_DEBUG"]


_ELSEWHERE = {
    "delay_wgrad_compute": "is delayed until `backward_dw`",
    "accumulate_into_main_grad": "goes to `main_grad`",
}


@check
def ddp_refuses_gradients_that_it_would_not_reduce(mesh: DeviceMesh) -> None:
    """Delayed ones and those of `main_grad`, of every module, also compiled and of adapters. Those that nobody needs,
    that DDP leaves out, or that a pass under `no_sync` gives, are the caller's.
    """
    for form in ("GroupedLinear", "GroupedMLP"):
        name = "weight" if form == "GroupedLinear" else "linear_fc1.weight"
        for option, words in _ELSEWHERE.items():
            how = {"delay": option.startswith("delay"), "accumulate": option.startswith("accumulate")}
            s = _setup(form, False, mesh, **how)
            main_grads(list(s.module.parameters()), 0.0)
            refused = [f"`{name}` in DistributedDataParallel", words, "`.grad`", f"leave out `{option}`"]
            wrapped = DistributedDataParallel(s.module)
            for run in (wrapped, torch.compile(wrapped, backend="eager")):
                with asserts.refused(ValueError, refused):
                    _run(s, run, s.x)
            with torch.no_grad():
                _run(s, wrapped, s.x)
            with wrapped.no_sync():
                _run(s, wrapped, s.x)
            _run(s, s.module, s.x)
            names = [name for name, _ in s.module.named_parameters() if "weight" in name]
            model = torch.nn.Sequential(s.module, torch.nn.Linear(4, 4, device=s.x.device))
            ignored = [f"0.{each}" for each in names]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
            outer = DistributedDataParallel(model)
            with outer._inside_ddp_forward():
                _run(s, s.module, s.x).backward(s.dy)
    module = nn.GroupedMLP(2, 8, 8, lora_rank=2, delay_wgrad_compute=True, device=mesh.device_type)
    wrapped = DistributedDataParallel(module)
    with asserts.refused(ValueError, ["`linear_fc1.lora_A` in DistributedDataParallel", "is delayed"]):
        wrapped(torch.ones(4, 8, device=mesh.device_type), torch.tensor([2, 2], device=mesh.device_type))


@check
def biases_follow_from_the_tokens_of_all_ranks(mesh: DeviceMesh) -> None:
    rank, group = mesh.get_rank(), mesh.get_group()
    logits = torch.from_numpy(draw(64, 8)).to(mesh.device_type)
    bias, part = torch.zeros(8, device=mesh.device_type), logits[rank * 32 : rank * 32 + 32].contiguous()
    found = route.balance_quantile(part, bias, 2, process_group=group)
    asserts.bitwise(found, route.balance_quantile(logits, bias, 2), "quantile")
    loads = [route.topk_router(each, 2)[2].load for each in (part, logits)]
    found = route.update_bias(bias, loads[0], 0.5, process_group=group)
    asserts.bitwise(found, route.update_bias(bias, loads[1], 0.5), "sign")


@check
def fsdp2_gives_the_mean_of_the_gradients_of_a_whole_layer(mesh: DeviceMesh) -> None:
    """The layer as one unit, and with its experts as a unit of their own."""
    for apart in (False, True):
        torch.manual_seed(3)
        module = nn.MoE(32, 16, 4, 2, aux_coeff=0.5, shared_dim=24, shared_gate=True, selection_bias=True)
        module = module.to(mesh.device_type)
        plain = copy.deepcopy(module)
        if apart:
            fully_shard(module.experts, mesh=mesh)
        fully_shard(module, mesh=mesh)
        x = torch.from_numpy(draw(12, 32, seed=mesh.get_rank())).to(mesh.device_type)
        for each in (module, plain):
            y, aux = each(x)
            (y.square().sum() + aux.aux_loss).backward()
        _same_gradients(module, plain)


class _Residual(torch.nn.Module):
    """A layer whose result its caller changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = nn.MoE(32, 16, 4, 2, aux_coeff=0.5)

    def forward(self, x: Tensor) -> Tensor:
        y, aux = self.moe(x)
        y += x
        loss = aux.aux_loss
        loss += y.square().sum()
        return loss


@check
def results_of_a_sharded_layer_may_change_in_place(mesh: DeviceMesh) -> None:
    for shape in ((12, 32), (3, 4, 32)):
        torch.manual_seed(3)
        module = _Residual().to(mesh.device_type)
        plain = copy.deepcopy(module)
        fully_shard(module.moe, mesh=mesh)
        fully_shard(module, mesh=mesh)
        x = torch.from_numpy(draw(12, 32, seed=mesh.get_rank())).reshape(shape).to(mesh.device_type)
        for each in (module, plain):
            each(x).backward()
        _same_gradients(module, plain)


@check
def sharded_weights_without_memory_are_drawn(mesh: DeviceMesh) -> None:
    """What FSDP2 calls deferred initialisation, and experts of several ranks."""
    for spread, single in ((fully_shard, True), (fully_shard, False), (parallel.shard_experts, True)):
        with torch.device("meta"):
            layer = nn.MoE(32, 16, 4, 2, shared_dim=24, single_grouped_weight=single)
        spread(layer, mesh=mesh)
        layer.to_empty(device=mesh.device_type)
        with torch.no_grad():
            for each in layer.parameters():
                each.fill_(9.0)
        layer.reset_parameters()
        for name, each in layer.named_parameters():
            whole = each.full_tensor() if isinstance(each, DTensor) else each
            assert 0 < whole.abs().max() <= whole.shape[-1] ** -0.5, name
            assert whole.std() > 0, name


@check
def conversions_of_sharded_modules_are_refused(mesh: DeviceMesh) -> None:
    module = nn.MoE(32, 16, 4, 2, shared_dim=24).to(mesh.device_type)
    module.register_load_state_dict_pre_hook(checkpoint.load_hook("hugging_face"))
    whole = checkpoint.convert(module.state_dict(), "torch_bridge", "hugging_face")
    fully_shard(module, mesh=mesh)
    with asserts.refused(ValueError, ["beside `load_hook`", "a DTensor", "before the module is sharded"]):
        module.load_state_dict(whole)
    listed = nn.MoE(32, 16, 4, 2, single_grouped_weight=False).to(mesh.device_type)
    packed = nn.MoE(32, 16, 4, 2).to(mesh.device_type)
    fully_shard(listed, mesh=mesh)
    fully_shard(packed, mesh=mesh)
    optimizer = torch.optim.AdamW(listed.parameters())
    listed(torch.ones(8, 32, device=mesh.device_type))[0].sum().backward()
    optimizer.step()
    with asserts.refused(ValueError, ["`exp_avg` of `experts.", "a DTensor that would become", "full_state_dict"]):
        checkpoint.convert_optimizer(optimizer.state_dict(), listed, packed)
    same = checkpoint.convert_optimizer(optimizer.state_dict(), listed, listed)
    optimizer.load_state_dict(same)
    optimizer.step()


# ---------------------------------------------------------------------------------------------------------------------
# Masters of quantised weights


_HELD = (FP8Delayed.replace(history=2), FP8Current, FP8Block, MXFP8, NVFP4)


def _codes(module: Any) -> dict[str, Tensor]:
    return {
        f"{name}.{part}": tensor.clone().view(torch.uint8)
        for name, weight in module.named_parameters()
        for part, tensor in parts_of(weight.q).items()
    }


@check
def shards_of_masters_give_the_codes_of_whole_ones(mesh: DeviceMesh) -> None:
    """Cut in the middle of a row, of a block and of a byte, at the end of a weight, and where one rank has nothing.

    No rank has all of the magnitudes: either may have the largest ones, and the first has a NaN.
    """
    rank, group = mesh.get_rank(), mesh.get_group()
    for recipe in _HELD:
        for listed in (False, True):
            torch.manual_seed(7)
            options: Any = {"recipe": recipe, "quantized_weights": True, "single_grouped_weight": not listed}
            module = nn.GroupedMLP(3, 50, 36, **options).to(mesh.device_type)
            weights: list[Any] = list(module.parameters())[::-1]
            flat = torch.cat([torch.randn(each.numel()) for each in weights]).to(mesh.device_type)
            flat[5], flat[-5], flat[100] = 30.0, -40.0, float("nan")
            whole = copy.deepcopy(module)
            with torch.no_grad():
                for weight, (_, master, _) in zip(
                    reversed(list(whole.parameters())), params.expand_shard(weights, flat, 0), strict=True
                ):
                    assert master is not None
                    weight.copy_(master.view(weight.shape))
            for cut in (1, 2053, weights[0].numel(), len(flat) - 2053, len(flat)):
                begin, end = ((0, cut), (cut, len(flat)))[rank]
                entries = params.expand_shard(weights, flat[begin:end], begin)
                arguments: Any = [list(each) for each in zip(*entries, strict=True)]
                for weight in weights:
                    weight.detach().zero_()
                before = _codes(module)
                for skip in (torch.ones(1, dtype=torch.int32), None):
                    skip = None if skip is None else skip.to(mesh.device_type)
                    shards.cast_shards(*arguments, process_group=group, skip=skip)
                    found, wanted = _codes(module), _codes(whole) if skip is None else before
                    for name, scales in found.items():
                        if not name.endswith("values") or skip is not None:
                            asserts.bitwise(scales, wanted[name], name)
                    shards.gather_codes(*arguments, process_group=group, skip=skip)
                    for name, part in _codes(module).items():
                        asserts.bitwise(part, wanted[name], name)
            if recipe.delayed:
                for one in (module, whole):
                    update_scaling(one.scaling_state)
                asserts.bitwise(state_of(module).scale, state_of(whole).scale)
                assert (state_of(module).scale[1] > 0).any()


LIVE = (  # by rank, one magnitude a group
    (float("nan"), 2.0, 0.0, float("inf"), 3.0),
    (3.0, float("nan"), 0.0, 1.0, 5.0),
)


@check
def ranks_agree_on_scales_whoever_holds_what_is_not_finite(mesh: DeviceMesh) -> None:
    """And have what one device would have of all magnitudes."""
    live = torch.tensor(LIVE, device=mesh.device_type)

    def state_of(magnitudes: Tensor) -> Any:
        with torch.device(mesh.device_type):
            state = scaling_state(FP8Delayed.replace(history=3), len(magnitudes))
        state.history[:, 0] = magnitudes
        return state

    one, whole = state_of(live[mesh.get_rank()]), state_of(torch.maximum(*live))
    update_scaling(one, process_group=mesh.get_group())
    update_scaling(whole)
    asserts.bitwise(one.scale, whole.scale)
    asserts.bitwise(one.history, whole.history)


# ---------------------------------------------------------------------------------------------------------------------
# Checks that fail, which are run by name alone


def one_rank_stays_away_from_a_collective(mesh: DeviceMesh) -> None:
    if mesh.get_rank() == 1:
        print("rank 1 has had enough", flush=True)
        time.sleep(3600)
    _mean_over_ranks(torch.zeros(3, device=mesh.device_type))


def both_ranks_wait_for_ever(mesh: DeviceMesh) -> None:
    time.sleep(3600)


FAILING: Checks = {run.__name__: run for run in (one_rank_stays_away_from_a_collective, both_ranks_wait_for_ever)}
PROGRAM = partial(main, __doc__, CHECKS, RANKS, FAILING)

if __name__ == "__main__":
    sys.exit(PROGRAM())
