"""`moe` and `nn.MoE`: the dense oracle, the parts that the layer is made of, training options, graphs, checkpoints."""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from grouped_core.routing_spec import router_option
from tests import asserts
from tests.torch_frontend.offload_tools import recorded
from tests.torch_frontend.routing_tools import (
    ROUTERS,
    dense_mlp,
    dense_router,
    draw,
    experts_of,
    layer,
    mask_of,
    near,
)
from tests.torch_frontend.torch_tools import counted_launches, leaf, manual_seed, saved_tensors, tensor
from torch_bridge import (
    MXFP8,
    NVFP4,
    FP8Block,
    FP8Current,
    FP8Delayed,
    SharedExpert,
    explain,
    grouped_linear,
    grouped_mlp,
    moe,
    nn,
    offload,
    route,
    routed_mlp,
    update_scaling,
    why_unsupported,
)
from torch_bridge._router import router_logits
from torch_bridge.route import MoEAux

T, E, K, H, F = 24, 8, 3, 32, 16
LOSSES = {"aux_coeff": 0.5, "z_coeff": 0.25}
SHAPE = (4, 6, H)  # of the tokens of layers
_WEIGHTS = (torch.zeros(E, 2 * F, H), torch.zeros(E, H, F))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _layer(**options: Any) -> Any:
    manual_seed(0)
    return nn.MoE(H, F, E, K, **{**LOSSES, **options})


def _x(dtype: str = "float32", hidden: int = H) -> Any:
    return leaf(tensor(draw(*SHAPE[:2], hidden, seed="x", dtype=dtype)))


def _step(run: Callable[..., Any], module: Any, x: Any, **given: Any) -> dict[str, Any]:
    """Results, and the gradients of x and of all parameters, of one step."""
    module.zero_grad()
    x.grad = None
    y, aux = run(x, **given)
    (y.float().square().sum() + aux.aux_loss + aux.z_loss).backward()
    found = {"y": y.detach(), "x": x.grad, **aux._asdict()}
    return found | {name: each.grad for name, each in module.named_parameters()}


def _same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, each in theirs.items():
        if each is None:
            assert ours[name] is None, name
        else:
            asserts.bitwise(ours[name], each, name)


# ---- the function


@pytest.mark.rule("LYR-1", "LYR-3", "LYR-16")
@pytest.mark.parametrize("router", ["softmax", "gpt_oss", "deepseek_v3", "sqrt_softplus"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_function_is_near_the_dense_oracle(router: str, bias: bool) -> None:
    p = layer(T, E, H, F, bias=bias)
    options = {**ROUTERS[router], **LOSSES}
    y, aux = moe(p.x, p.router, p.wi, p.wo, K, wi_bias=p.wi_bias, wo_bias=p.wo_bias, **options)
    _, chosen, _ = route.topk_router(router_logits(p.x, p.router), K, **options)
    wide = p.to(lambda each: each.double())
    weights, aux_loss, z_loss = dense_router(wide.x @ wide.router.mT, chosen, router_option(E, K, **options))
    exact = dense_mlp(wide, weights, chosen)
    dy = tensor(draw(T, H, seed="dy"))
    found = torch.autograd.grad((y * dy).sum() + aux.aux_loss + aux.z_loss, list(p.leaves().values()))
    wanted = torch.autograd.grad((exact * dy).sum() + aux_loss + z_loss, list(wide.leaves().values()))
    near(y, exact, "y")
    for name, one, two in zip(p.leaves(), found, wanted, strict=True):
        near(one, two, f"gradient of {name}")


@pytest.mark.rule("LYR-3", "LYR-16")
def test_a_shared_expert_has_its_recipe_and_the_residuals_of_the_function() -> None:
    hidden, width = 128, 192
    p = layer(T, E, hidden, width, bias=False)
    wi, wo = (tensor(draw(1, *shape, seed="shared")) for shape in ((96, hidden), (hidden, 48)))
    routed = (p.x, p.router, p.wi, p.wo, K)
    y, _ = moe(*routed, shared=SharedExpert(wi, wo, recipe=MXFP8))
    beside = grouped_mlp(p.x, wi, wo, [T], recipe=MXFP8)
    asserts.bitwise(y, moe(*routed)[0] + beside)
    assert not torch.equal(beside, grouped_mlp(p.x, wi, wo, [T]))
    for residuals, found in (("save_fc1", {96, 2 * width}), ("save_input", set())):
        with saved_tensors() as kept:
            moe(*routed, shared=SharedExpert(wi, wo), residuals=residuals)
        assert {each.shape[1] for each in kept if each.dim() == 2} & {96, 2 * width} == found, residuals


@pytest.mark.rule("LYR-16")
@pytest.mark.parametrize("recipe", [None, FP8Block])
def test_the_layer_keeps_tokens_hidden_rows_maps_and_scores(recipe: Any) -> None:
    """At most x, h, indices and probabilities, and the scores of the router; no fp32 copy and no rows of x."""
    tokens, experts, hidden, width = T, E, 128, 192
    p = layer(tokens, experts, hidden, width, dtype="bfloat16", bias=False)
    with saved_tensors() as kept:
        moe(p.x, p.router, p.wi, p.wo, K, recipe=recipe, **LOSSES)
    weights = {each.data_ptr() for each in (p.router, p.wi, p.wo)}
    storages = {each.untyped_storage().data_ptr(): each for each in kept if each.data_ptr() not in weights}
    assert p.x.untyped_storage().data_ptr() in storages
    of_weights = experts * 3 * width * hidden * 2 if recipe is not None else 0  # their 8-bit forms, with scales
    found = sum(each.untyped_storage().nbytes() for each in storages.values())
    rows = tokens * K
    x, h = tokens * hidden * 2, rows * 2 * width * 2
    maps = 4 * (3 * rows + experts + rows)  # source, inverse, probabilities, sizes, and the experts of the router
    router = 4 * (tokens * experts + experts + 8)
    assert found <= x + h + maps + router + of_weights
    assert not [each for each in storages.values() if each.dtype is torch.float32 and each.shape[-1] == hidden]
    assert not [each for each in storages.values() if tuple(each.shape) == (rows, hidden)]


# ---- the layer


def test_its_parameters_have_stable_names() -> None:
    options: dict[str, Any] = {"selection_bias": True, "shared_dim": F, "shared_gate": True, "bias": True}
    names = list(_layer(**options, recipe=FP8Delayed).state_dict())
    layers = [
        f"{part}.{fc}.{kind}"
        for part in ("experts", "shared")
        for fc in ("linear_fc1", "linear_fc2")
        for kind in ("weight", "bias")
    ]
    assert {name for name in names if "scaling" not in name and "_extra" not in name} >= {
        *("router.weight", "router.selection_bias", "shared_gate.weight"),
        *(name for name in layers if name.endswith("weight")),
    }
    listed = _layer(single_grouped_weight=False)
    assert "experts.linear_fc1.weight0" in listed.state_dict()
    assert [tuple(p.shape) for p in _layer().parameters()] == [(E, H), (E, 2 * F, H), (E, H, F)]


@pytest.mark.rule("LYR-12", "LYR-16", "LYR-15")
@pytest.mark.parametrize("given", ["", "mask", "experts", "sequences"])
@pytest.mark.parametrize("shared", [None, "plain", "gated"])
def test_it_is_what_its_parts_are(given: str, shared: str | None) -> None:
    options: dict[str, Any] = {} if shared is None else {"shared_dim": 24, "shared_gate": shared == "gated"}
    module, x = _layer(**options, selection_bias=True), _x()
    module.router.selection_bias.copy_(tensor(draw(E, seed="bias")))
    arguments: dict[str, Any] = {
        "": {},
        "mask": {"mask": torch.from_numpy(mask_of(T)).reshape(SHAPE[:2])},
        "experts": {"experts": torch.from_numpy(experts_of(T, K, E)).reshape(*SHAPE[:2], K)},
        "sequences": {"sequence_sizes": torch.tensor([9, 0, T - 9])},
    }[given]

    def parts(x: Tensor, mask: Any = None, experts: Any = None, sequence_sizes: Any = None) -> tuple[Tensor, Any]:
        rows = x.reshape(-1, H)
        weights, chosen, aux = route.topk_router(
            router_logits(rows, module.router.weight),
            K,
            bias=module.router.selection_bias,
            mask=None if mask is None else mask.reshape(-1),
            experts=None if experts is None else experts.reshape(-1, K),
            sequence_sizes=sequence_sizes,
            **LOSSES,
        )
        fc1, fc2 = module.experts.linear_fc1, module.experts.linear_fc2
        y = routed_mlp(rows, chosen, weights, fc1.weight, fc2.weight)
        if shared is not None:
            probs = None
            if shared == "gated":
                gate = router_logits(rows, module.shared_gate.weight)
                probs = route.topk_router(gate, 1, score="sigmoid")[0].reshape(-1)
            y = y + module.shared(rows, torch.tensor([T]), probs)
        return y.reshape(x.shape), aux

    ours, theirs = (_step(run, module, x, **arguments) for run in (module, parts))
    _same(ours, theirs)
    if given == "mask" and shared is None:
        assert not ours["y"][~arguments["mask"]].any()


@pytest.mark.rule("LYR-12")
def test_the_gate_is_a_sigmoid_and_dropped_tokens_get_the_shared_expert() -> None:
    module, x = _layer(shared_dim=24, shared_gate=True), _x()
    none = torch.full((*SHAPE[:2], K), -1)
    y, _ = module(x, experts=none)
    rows = x.detach().reshape(-1, H).double()
    fc1, fc2 = (each.weight.detach()[0].double() for each in (module.shared.linear_fc1, module.shared.linear_fc2))
    h = rows @ fc1.mT
    alone = (torch.nn.functional.silu(h[:, :24]) * h[:, 24:]) @ fc2.mT
    exact = (rows @ module.shared_gate.weight.detach().double().mT).sigmoid() * alone
    near(y.reshape(-1, H), exact, "y")


@pytest.mark.rule("LYR-1")
def test_jitter_is_drawn_in_training_alone() -> None:
    module, x = _layer(jitter=0.3), _x()
    manual_seed(3)
    one, two = module(x)[0], module(x)[0]
    manual_seed(3)
    again = module(x)[0]
    asserts.bitwise(one, again, "the same seed")
    assert not torch.equal(one, two)
    module.eval()
    plain = _layer()
    asserts.bitwise(module(x)[0], plain(x)[0], "evaluation")


@pytest.mark.rule("LYR-8")
@pytest.mark.parametrize("router", ["capacity_probs", "deepseek_v3", "sinkhorn"])
def test_options_reach_the_router(router: str) -> None:
    module, x = _layer(**ROUTERS[router]), _x()
    _, aux = module(x)
    logits = router_logits(x.reshape(-1, H), module.router.weight)
    _, _, wanted = route.topk_router(logits, K, **LOSSES, **ROUTERS[router])
    for name, each in aux._asdict().items():
        asserts.bitwise(each, getattr(wanted, name), name)
    assert (int(aux.dropped) > 0) == (router == "capacity_probs")


def test_the_bias_of_the_choice_stays_float32_and_is_updated_outside() -> None:
    module = _layer(selection_bias=True)
    assert module.to(torch.bfloat16).router.selection_bias.dtype is torch.float32
    assert module.router.weight.dtype is torch.bfloat16
    with torch.no_grad():
        _, aux = module(_x("bfloat16"))
        module.router.selection_bias.copy_(route.update_bias(module.router.selection_bias, aux.load, 0.5))
    assert set(module.router.selection_bias.tolist()) <= {-0.5, 0.0, 0.5}
    other = _layer(selection_bias=True)
    other.load_state_dict(module.state_dict())
    asserts.bitwise(other.router.selection_bias, module.router.selection_bias, "loaded bias")
    narrow = {name: each.bfloat16() for name, each in other.state_dict().items()}
    other.load_state_dict(narrow, assign=True)
    assert other.router.selection_bias.dtype is torch.float32
    assert other.router.weight.dtype is torch.bfloat16


@pytest.mark.rule("LYR-16")
def test_new_values_are_drawn_for_every_parameter_and_the_bias_is_zero() -> None:
    module = _layer(selection_bias=True, shared_dim=24, shared_gate=True)
    with torch.no_grad():
        for each in (*module.parameters(), *module.buffers()):
            each.fill_(float("nan"))
    module.reset_parameters()
    for name, each in module.named_parameters():
        assert each.isfinite().all(), name
        assert each.unique().numel() > 1, name
    assert not module.router.selection_bias.any()


# ---- what the experts offer


def _as_grouped(module: Any) -> nn.GroupedMLP:
    """A `GroupedMLP` with the parameters of the experts."""
    twin = copy.deepcopy(module.experts)
    twin.__class__ = nn.GroupedMLP
    return twin


def _both(module: Any, twin: Any, x: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
    """(the experts' result, what a `GroupedMLP` gives for the rows) for one choice."""
    rows = x.reshape(-1, x.shape[-1])
    experts = torch.from_numpy(experts_of(len(rows), K, E))
    weights = tensor(draw(len(rows), K, seed="weights")).abs()
    ours = module.experts(rows, experts, weights, **keywords)
    taken, sizes, permutation = route.permute(rows, experts, E, probs=weights)
    return ours, route.unpermute(twin(taken, sizes, permutation.probs, **keywords), permutation)


@pytest.mark.rule("LYR-16", "GRD-1", "DLY-3")
@pytest.mark.matrix(
    listed=(False, True), accumulate=(False, True), delayed=(False, True), recipe=(None, FP8Current, MXFP8, NVFP4)
)
def test_experts_deliver_gradients_as_a_grouped_mlp_does(
    listed: bool, accumulate: bool, delayed: bool, recipe: Any
) -> None:
    manual_seed(0)
    options = {"accumulate_into_main_grad": accumulate, "delay_wgrad_compute": delayed, "recipe": recipe}
    module = nn.MoE(128, 64, E, K, single_grouped_weight=not listed, bias=True, **options)
    twin = _as_grouped(module)
    if accumulate:
        every: list[Any] = [*module.experts.parameters(), *twin.parameters()]
        for each in every:
            each.main_grad = torch.full(each.shape, 0.5)
    for _ in range(2):
        x = _x(hidden=128)
        ours, theirs = _both(module, twin, x)
        for y in (ours, theirs):
            y.square().sum().backward()
        asserts.bitwise(ours, theirs, "y")
    assert module.pending_wgrads() == twin.pending_wgrads() == (2 if delayed else 0)
    module.backward_dw(all=True)
    twin.backward_dw(all=True)
    if recipe is NVFP4:  # two passes draw two keys, so gradients are rounded differently
        return
    for (name, one), two in zip(module.experts.named_parameters(), twin.parameters(), strict=True):
        for kind in ("grad", "main_grad"):
            a, b = getattr(one, kind, None), getattr(two, kind, None)
            assert (a is None) == (b is None), f"{kind} of {name}"
            if a is not None:
                asserts.bitwise(a, b, f"{kind} of {name}")


def _seeded(run: Callable[[], Any]) -> Any:
    manual_seed(1)
    return run()


@pytest.mark.rule("LYR-16", "DLY-1")
@pytest.mark.parametrize("recipe", [None, FP8Current, MXFP8])
def test_delayed_gradients_of_the_first_weight_wait_with_tokens_and_maps(recipe: Any) -> None:
    manual_seed(0)
    module = nn.MoE(128, 192, E, K, recipe=recipe, delay_wgrad_compute=True)
    x = _x(hidden=128)
    module(x)[0].sum().backward()
    (entry,) = module.experts.linear_fc1.queue._entries
    assert any(each.data_ptr() == x.data_ptr() for each in entry.operands)
    others = [each for each in entry.operands if each.data_ptr() != x.data_ptr() and each.dim() == 2]
    assert not [each for each in others if 128 in each.shape and each.numel() >= T * K * 128]  # rows of x, in any form
    module.backward_dw()
    assert module.experts.linear_fc1.weight.grad is not None


@pytest.mark.rule("LYR-16", "DLY-3")
def test_delayed_gradients_of_a_shared_expert_come_first_and_count() -> None:
    module, fired = _layer(shared_dim=24, delay_wgrad_compute=True), []
    order = [f"{part}.linear_fc{at}" for part in ("shared", "experts") for at in (2, 1)]
    for name in reversed(order):
        module.get_submodule(name).register_wgrad_accumulation_and_reduce_hooks(partial(fired.append, name))
    for _ in range(2):
        module(_x())[0].sum().backward()
    module.experts.backward_dw(all=True)
    assert module.pending_wgrads() == 2, "of the shared expert"
    module.shared.backward_dw(all=True)
    assert module.pending_wgrads() == 0
    module(_x())[0].sum().backward()
    for run in (module.backward_dw, module.fire_wgrad_hooks):
        fired.clear()
        run()
        assert fired == order


@pytest.mark.rule("OFF-1", "LYR-16")
def test_tokens_and_hidden_rows_can_be_offloaded() -> None:
    module, x = _layer(), _x()
    plain = _step(module, module, x)
    with recorded() as sent:

        def moved(x: Tensor) -> Any:
            with offload.cpu_offload(min_numel=0, prefetch=0):
                return module(x * 1)

        found = _step(moved, module, x)
    _same(found, plain)
    assert {tuple(each.source.shape) for each in sent} == {(T, H), (T * K, 2 * F)}


@pytest.mark.rule("QNT-1", "LYR-16")
@pytest.mark.parametrize("quantized", [False, True])
def test_experts_with_delayed_scaling_and_a_cache(quantized: bool) -> None:
    manual_seed(0)
    module = nn.MoE(128, 64, E, K, recipe=FP8Delayed, quantized_weights=quantized)
    twin = _as_grouped(module)
    for step in range(2):
        for first in (True, False):
            x = _x(hidden=128)
            keywords = {} if quantized else {"is_first_microbatch": first}
            ours, theirs = _both(module, twin, x, **keywords)
            asserts.bitwise(ours, theirs, f"y of step {step}")
            (ours.square().sum() + 0 * theirs.sum()).backward()
            theirs2 = _both(module, twin, x, **keywords)[1]
            theirs2.square().sum().backward()
        for each in (module.experts, twin):
            update_scaling(each.scaling_state)


@pytest.mark.rule("QNT-5", "LYR-16")
def test_the_layer_hands_the_flag_to_the_caches_of_all_its_experts() -> None:
    module, x = _layer(recipe=MXFP8, shared_dim=32), _x()
    with asserts.refused(RuntimeError, ["weight cache", "empty"]):
        module(x, is_first_microbatch=False)
    y, _ = module(x, is_first_microbatch=True)
    assert all(each.cache._forms for each in module.grouped_layers())
    asserts.bitwise(module(x, is_first_microbatch=False)[0], y)


@pytest.mark.rule("LYR-16")
def test_autocast() -> None:
    module, x = _layer(shared_dim=24, shared_gate=True), _x()
    with torch.autocast("cpu", torch.bfloat16):
        y, aux = module(x)
    assert y.dtype is torch.bfloat16
    (y.float().sum() + aux.aux_loss).backward()
    assert all(each.grad is not None and each.grad.dtype is torch.float32 for each in module.parameters())
    logits = router_logits(x.reshape(-1, H), module.router.weight)
    asserts.bitwise(aux.load, route.topk_router(logits, K)[2].load, "the router computes in float32")


# ---- graphs and recomputation


@pytest.mark.rule("GRD-12", "GRD-1")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.matrix(
    backend=("aot_eager", "inductor"),
    recipe=(None, FP8Current),
    listed=(None, False, True),
    few=[("inductor", None, None), ("aot_eager", FP8Current, False), ("aot_eager", None, True)],
)
def test_a_compiled_layer_has_the_bits_of_the_eager_one(backend: str, recipe: Any, listed: bool | None) -> None:
    """Its gradients go to autograd, or with `listed` to `main_grad`, of weights that are lists or not."""
    manual_seed(0)
    options: dict[str, Any] = {"shared_dim": 64, "shared_gate": True, "selection_bias": True, "recipe": recipe}
    if listed is not None:
        options |= {"accumulate_into_main_grad": True, "single_grouped_weight": not listed}
    module, x = nn.MoE(128, 64, E, K, **LOSSES, **options), _x(hidden=128)
    mask = torch.from_numpy(mask_of(T)).reshape(SHAPE[:2])
    assert module.shared is not None
    every: list[Any] = [] if listed is None else [*module.experts.parameters(), *module.shared.parameters()]
    found = []
    for run in (module, torch.compile(module, fullgraph=True, backend=backend)):
        for each in every:
            each.main_grad = torch.full(each.shape, 0.5)
        found.append(_step(run, module, x, mask=mask) | {str(at): each.main_grad for at, each in enumerate(every)})
    _same(found[1], found[0])


@pytest.mark.rule("GRD-12", "LYR-1")
def test_a_compiled_layer_draws_its_keys_in_the_graph() -> None:
    module, x = _layer(jitter=0.3), _x()
    run = torch.compile(module, fullgraph=True, backend="aot_eager")
    _same(*(_seeded(partial(_step, each, module, x)) for each in (run, module)))


@pytest.mark.rule("LYR-15")
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_gives_the_same_bits(reentrant: bool) -> None:
    module, x = _layer(jitter=0.2, shared_dim=24), _x()

    def flat(x: Tensor) -> tuple[Tensor, ...]:  # reentrant checkpoints see no tensors inside of tuples
        y, aux = module(x)
        return y, *aux

    def recomputed(x: Tensor) -> Any:
        y, *aux = checkpoint(flat, x, use_reentrant=reentrant)
        return y, MoEAux(*aux)

    _same(*(_seeded(partial(_step, run, module, x)) for run in (recomputed, module)))


@pytest.mark.rule("LYR-15")
@pytest.mark.parametrize(
    "names", [("routed_mlp",), ("routed_mlp", "router", "router_product"), ("router",)], ids=lambda names: names[-1]
)
def test_selective_recomputation_keeps_results_of_our_operators(names: tuple[str, ...]) -> None:
    module, x = _layer(shared_dim=24), _x()
    operators = [getattr(torch.ops.torch_bridge, name).default for name in names]

    def recomputed(x: Tensor) -> Any:
        context = partial(create_selective_checkpoint_contexts, operators)
        return checkpoint(module, x, use_reentrant=False, context_fn=context)

    _same(*(_step(run, module, x) for run in (recomputed, module)))
    with counted_launches() as launched:
        y, aux = recomputed(x)
        before = len(launched)
        (y.sum() + aux.aux_loss).backward()
    again = launched[before:]
    assert ("sort_slots" in again) == ("routed_mlp" not in names)
    assert ("router" in again) == ("router" not in names)


class _Products(TorchDispatchMode):
    """Counts the products of experts and of routers."""

    def __init__(self) -> None:
        super().__init__()
        self.run: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("torch_bridge::").partition("_into")[0]
        if name in ("routed_mlp", "routed_mlp_lora", "mlp", "grouped_mlp_lora", "router", "router_product"):
            self.run[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("options", [{}, {"recipe": FP8Delayed}, {"lora_rank": 2}], ids=["plain", "delayed", "lora"])
def test_backward_multiplies_again_without_the_save_list(options: dict[str, Any], kept: bool) -> None:
    module, x = _layer(shared_dim=16, **options), _x()
    context = partial(create_selective_checkpoint_contexts, list(nn.save_list()) if kept else [])
    recomputed = partial(checkpoint, module, use_reentrant=False, context_fn=context)
    _same(*(_step(run, module, x) for run in (recomputed, module)))
    counts = []
    with _Products() as products:
        y, aux = recomputed(x)
        counts.append(dict(products.run))
        products.run.clear()
        (y.sum() + aux.aux_loss).backward()
        counts.append(dict(products.run))
    assert len(counts[0]) == 4, counts[0]
    assert set(counts[0].values()) == {1}
    assert counts[1] == ({} if kept else counts[0])


# ---- programs of torch.export


class _Moved(torch.nn.Module):
    """Sorted and padded rows, and what says where they are."""

    def forward(self, x: Tensor, experts: Tensor) -> Any:
        rows, sizes, permutation = route.permute(x, experts, E, probs=torch.ones(experts.shape))
        return permutation, *route.pad_groups(rows, sizes, 8)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # PyTorch 2.11, about its own files
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("of", ["MoE", "rows"])
def test_exported_programs_are_saved_and_loaded(of: str, strict: bool) -> None:
    if of == "MoE":
        module, given = _layer().eval(), (_x().detach(),)
    else:
        module, given = _Moved(), (_x().detach().reshape(-1, H), torch.from_numpy(experts_of(T, K, E)))
    file = io.BytesIO()
    torch.export.save(torch.export.export(module, given, strict=strict), file)
    file.seek(0)
    ours, theirs = torch.export.load(file).module()(*given), module(*given)
    assert list(map(type, ours)) == list(map(type, theirs))
    for mine, other in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        asserts.bitwise(mine, other)


# ---- reports and refusals


def test_reports_take_the_functions_and_the_layers() -> None:
    p, experts = layer(T, E, H, F, bias=False), torch.from_numpy(experts_of(T, K, E))
    weights = leaf(torch.ones(T, K))
    for op in (routed_mlp, type(_layer().experts)):
        said = explain(op, p.x, experts, weights, p.wi, p.wo)
        for name in ("sort_slots", "gather_rows", "grouped_matmul_act", "combine_rows", "grouped_matmul_dact"):
            assert name in said, name
    for op in (moe, nn.MoE):
        said = explain(op, p.x, p.router, p.wi, p.wo, K, aux_coeff=0.1)
        for name in ("router ", "router_grad", "sort_slots", "combine_rows"):
            assert name in said, name
    assert "router_grad" in explain(route.topk_router, leaf(torch.zeros(T, E)), K)
    assert "gather_rows" in explain(route.permute, p.x, experts, E)
    assert "combine_dot" in explain(route.unpermute, *_permuted(p.x, experts), weights)
    assert "hash_experts" in explain(route.hash_experts, torch.arange(T), K, E)
    assert "pad_groups" in explain(route.pad_groups, p.x, torch.tensor([T]), 8)
    assert "bias_update" in explain(route.update_bias, torch.zeros(E), torch.zeros(E, dtype=torch.int32), 0.1)
    assert "quantile_bias" in explain(route.balance_quantile, torch.zeros(T, E), torch.zeros(E), K)
    assert why_unsupported(moe, p.x, p.router, p.wi, p.wo, K) is None
    assert why_unsupported(moe, p.x, p.router, p.wi, p.wo, K, shared=SharedExpert(p.wi[:1], p.wo[:1])) is None
    assert "`k`" in str(why_unsupported(moe, p.x, p.router, p.wi, p.wo, E + 1))


def _permuted(x: Tensor, experts: Tensor) -> tuple[Tensor, Any]:
    rows, _, permutation = route.permute(x, experts, E)
    return rows, permutation


@pytest.mark.rule("ERR-1", "ERR-5")
@pytest.mark.parametrize(
    ("gate", "kind", "said"),
    [
        (torch.zeros(1, H + 1), ValueError, [f"(1, {H + 1})", f"[1, H] with H = {H}"]),
        (torch.zeros(2, H), ValueError, [f"(2, {H})", "one vector"]),
        (torch.zeros(1, H, dtype=torch.int32), TypeError, ["int32", "float32, bfloat16, float16", "cast"]),
        (torch.zeros(1, H).to(torch.float8_e4m3fn), TypeError, ["float8_e4m3fn", "float32, bfloat16, float16", "cast"]),
    ],
)
def test_gates_of_a_shared_expert_are_checked(gate: Tensor, kind: type[Exception], said: list[str]) -> None:
    of_expert = nn.GroupedMLP(1, H, F, single_grouped_weight=True)
    shared = SharedExpert(of_expert.linear_fc1.weight, of_expert.linear_fc2.weight, gate)
    given = (torch.zeros(T, H), torch.zeros(E, H), torch.zeros(E, 2 * F, H), torch.zeros(E, H, F))
    with asserts.refused(kind, ["`shared.gate`", *said]):
        moe(*given, K, shared=shared)


@pytest.mark.rule("MLP-3", "ERR-1")
def test_activation_and_residuals_of_a_layer_are_fixed() -> None:
    module = nn.GroupedMLP(2, H, F)
    for name in ("activation", "residuals"):
        with pytest.raises(AttributeError, match=name):
            setattr(module, name, getattr(module, name))


@pytest.mark.rule("ERR-1", "ERR-2")
@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda: nn.MoE(H, F, E, E + 1), ValueError, ["`k`", str(E + 1), f"1 to {E}", "smaller"]),
        (lambda: nn.MoE(H, F, E, K, score="tanh"), ValueError, ["`score`", "tanh", "softmax", "choose"]),
        (lambda: nn.MoE(H, F, E, K, dtype="bf16"), TypeError, ["`dtype` of MoE", "bf16", "torch.bfloat16", "choose"]),
        (lambda: nn.MoE(H, F, E, K, dtype=torch.int32), TypeError, ["`dtype` of MoE", "torch.int32", "choose"]),
        (
            lambda: nn.MoE(H, F, E, K, foo=1),
            TypeError,
            ["`foo` of MoE", "no such keyword", "leave it out", "score", "activation", "lora_rank"],
        ),
        (lambda: nn.MoE(H, F, E, K, shared_dim=0), ValueError, ["`shared_dim` of MoE", "0", "1 or more", "size"]),
        (lambda: nn.MoE(H, F, 0, K), ValueError, ["`num_experts` of MoE", "0", "1 or more", "size of that axis"]),
        (
            lambda: nn.MoE(H, F, E, K, shared_gate=True),
            ValueError,
            ["`shared_gate` of MoE", "True", "expected a shared expert", "give its width"],
        ),
        (lambda: _layer()([1.0]), TypeError, ["`x` of MoE", "list", "torch.Tensor", "convert"]),
        (
            lambda: nn.MoE(H, F, E, K, process_group=3),
            TypeError,
            ["`process_group` of MoE", "int", "a torch.distributed.ProcessGroup", "pass"],
        ),
        (lambda: _layer()(torch.zeros(())), ValueError, ["`x` of MoE", "()", "at least one axis", "pass tokens"]),
        (
            lambda: _layer()(torch.zeros(2, 3, H), mask=torch.ones(3, 2, dtype=torch.bool)),
            ValueError,
            ["`mask` of MoE", "(3, 2)", "(2, 3)", "one value per token"],
        ),
        (
            lambda: _layer()(torch.zeros(2, 3, H), experts=torch.zeros(6, K, dtype=torch.int32)),
            ValueError,
            ["`experts` of MoE", f"(6, {K})", "(2, 3) and k", "k experts per token"],
        ),
        (lambda: _layer()(torch.zeros(2, H), mask=[True]), TypeError, ["`mask`", "list", "torch.Tensor", "convert"]),
        (
            lambda: _layer()(torch.zeros(2, H + 1)),
            ValueError,
            ["`x` of MoE", f"(2, {H + 1})", f"H = {H}", "`router.weight`", f"({E}, {H})", "pass tokens"],
        ),
        (
            lambda: moe(torch.zeros(2, H), torch.zeros(E, H), torch.zeros(0), torch.zeros(0), K, foo=1),
            TypeError,
            ["`foo` of moe", "no such keyword", "leave it out", "score", "activation"],
        ),
        (
            lambda: nn.GroupedMLP(E, H, F)(torch.zeros(2, H + 1), [2] * E),
            ValueError,
            ["`x` of GroupedMLP", f"(2, {H + 1})", f"{H} columns", "`hidden`", f"hidden={H + 1}"],
        ),
        (
            lambda: nn.GroupedLinear(E, H, F)(torch.zeros(2, H + 1), [2] * E),
            ValueError,
            ["`x` of GroupedLinear", f"(2, {H + 1})", f"{H} columns", "`in_features`", f"in_features={H + 1}"],
        ),
        (
            lambda: moe(torch.zeros(2, H), torch.zeros(H, E, 1), torch.zeros(1), torch.zeros(1), K),
            ValueError,
            ["`router` of moe", "two axes [E, H]", "reshape"],
        ),
        (
            lambda: moe(torch.zeros(2, H), torch.zeros(E, H), *_WEIGHTS, K, shared=SharedExpert(*_WEIGHTS)),
            ValueError,
            ["`shared.wo` of moe", f"{E} experts", "expected 1", "pass several"],
        ),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, kind: type[Exception], said: list[str]) -> None:
    with asserts.refused(kind, said):
        make()


@pytest.mark.rule("GRD-13")
def test_gradients_are_not_differentiable() -> None:
    module, x = _layer(), _x()
    logits = module.router(x.reshape(-1, H))
    (dx,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
    with asserts.refused(RuntimeError, ["moe", "differentiated twice", "expected once"]):
        dx.sum().backward()


@pytest.mark.rule("ERR-1")
def test_options_that_are_true_or_false_take_nothing_else() -> None:
    """Text would count as True, and turn the layout of square weights around."""
    x, w, sizes, logits = torch.ones(6, 4), torch.ones(2, 4, 4), torch.tensor([3, 3]), torch.ones(6, 8)
    words = ["'False'", "expected True or False", "pass one of them"]
    for name, call in {
        "rhs_transposed": lambda **no: grouped_linear(x, w, sizes, **no),
        "scale_bias": lambda **no: grouped_linear(x, w, sizes, **no),
        "after_topk": lambda **no: route.topk_router(logits, 2, **no),
        "normalize": lambda **no: route.topk_router(logits, 2, **no),
        "split_sequences": lambda **no: route.topk_router(logits, 2, **no),
        "delay_wgrad_compute": lambda **no: nn.GroupedLinear(2, 4, 4, **no),
    }.items():
        with asserts.refused(TypeError, [f"`{name}`", *words]):
            call(**{name: "False"})
    with asserts.refused(TypeError, ["`rhs_transposed`", *words]):
        grouped_mlp(x, torch.ones(2, 4, 8), w, sizes, rhs_transposed="False")


_FLAGS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "GroupedLinear": (
        lambda **no: nn.GroupedLinear(2, 4, 4, **no),
        ("bias", "scale_bias", "single_grouped_weight", "single_grouped_bias", "accumulate_into_main_grad"),
    ),
    "GroupedMLP": (lambda **no: nn.GroupedMLP(2, 4, 4, **no), ("bias",)),
    "Router": (lambda **no: nn.moe.Router(4, 4, **no), ("selection_bias",)),
    "MoE": (
        lambda **no: nn.MoE(4, 4, 4, 2, **no),
        ("bias", "single_grouped_weight", "selection_bias", "shared_gate", "once_per_rank"),
    ),
}


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize(("layer", "flag"), [(layer, flag) for layer, (_, flags) in _FLAGS.items() for flag in flags])
def test_flags_of_layers_take_nothing_but_bools(layer: str, flag: str) -> None:
    """Text counts as True, and 0 as False where it is compared with a default; NumPy's bools are bools."""
    made = _FLAGS[layer][0]
    for value in ("no", 0, 1, None):
        with asserts.refused(TypeError, [f"`{flag}` of {layer}: {value!r}", "expected True or False", "pass one"]):
            made(**{flag: value})
    made(**{flag: np.False_})


@pytest.mark.rule("ERR-1")
def test_weights_of_other_experts_are_named() -> None:
    with asserts.refused(ValueError, ["`wo`: 1 groups", "expected 2 = groups of `wi`", "same experts"]):
        grouped_mlp(torch.ones(6, 4), torch.ones(2, 4, 8), torch.ones(1, 4, 4), torch.tensor([3, 3]))


@pytest.mark.rule("HST-4")
@pytest.mark.parametrize("shared_dim", [None, 16])
def test_rows_of_tokens_come_back_as_no_view(shared_dim: int | None) -> None:
    """FSDP2 loses the gradients of a layer whose result is a view that is changed in place."""
    layer = nn.MoE(32, 16, 4, 2, shared_dim=shared_dim)
    for shape in ((6, 32), (2, 3, 32), (32,)):
        y = layer(torch.ones(shape))[0]
        assert not y._is_view()
        assert y.shape == shape


def test_losses_may_be_added_in_place():
    """As training loops add them up over layers: results of one function that are views together refuse that."""
    layer, x, found = nn.MoE(32, 16, 4, 2, aux_coeff=0.5, z_coeff=0.1), torch.randn(6, 32), []
    for in_place in (False, True):
        layer.zero_grad()
        y, aux = layer(x)
        kept, loss = [each.item() for each in (aux.z_loss, aux.entropy)], aux.aux_loss
        if in_place:
            loss += aux.z_loss
            loss += y.square().mean()
        else:
            loss = loss + aux.z_loss + y.square().mean()
        assert [each.item() for each in (aux.z_loss, aux.entropy)] == kept
        loss.backward()
        found.append([loss.detach(), *(each.grad for each in layer.parameters())])
    for mine, theirs in zip(*found, strict=True):
        asserts.bitwise(mine, theirs)
