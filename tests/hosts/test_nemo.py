"""NeMo Automodel's grouped experts, computed by it (one expert after the other) and by us."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_bridge
from tests.asserts import refused
from tests.hosts import torch_host_tools as host_tools
from tests.hosts.torch_host_tools import F, G, H, draw, fill, gradients, near, no_farther, same
from tests.torch_frontend.torch_tools import saved_tensors
from torch_bridge import route
from torch_bridge.integrations import nemo

pytestmark = pytest.mark.filterwarnings("ignore")  # the host's own

experts = host_tools.host("nemo_automodel.components.moe.experts")
configs = host_tools.host("nemo_automodel.components.moe.config")

T, K = 40, 2
KINDS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "swiglu_clamped": {"swiglu_limit": 0.5},
    "swigluoai": {"expert_activation": "swigluoai", "activation_limit": 0.5},
    "swigluoai_unlimited": {"expert_activation": "swigluoai", "activation_limit": 0.0},
    "quick_geglu": {"expert_activation": "quick_geglu", "activation_limit": 0.5, "activation_alpha": 1.5},
    "geglu": {"expert_activation": "geglu"},
    "relu2": {"expert_activation": "relu2"},
}


@pytest.fixture(autouse=True)
def _own_functions() -> Iterator[None]:
    """Every test starts and ends with Automodel's own functions, and without compiling its activations."""
    before = (experts.GroupedExperts._forward_grouped_mm, experts.GroupedExpertsDeepEP.forward)
    assert "torch_bridge" not in before[0].__module__
    with torch.compiler.set_stance("force_eager"):
        yield
    assert (experts.GroupedExperts._forward_grouped_mm, experts.GroupedExpertsDeepEP.forward) == before


def _config(**options: Any) -> Any:
    given = {
        "n_routed_experts": G,
        "n_shared_experts": 0,
        "n_activated_experts": K,
        "n_expert_groups": 1,
        "n_limited_groups": 1,
        "train_gate": True,
        "gate_bias_update_factor": 0.0,
        "aux_loss_coeff": 0.0,
        "score_func": "softmax",
        "route_scale": 1.0,
        "dim": H,
        "inter_dim": F,
        "moe_inter_dim": F,
        "norm_topk_prob": False,
        "dtype": torch.float32,
    }
    return configs.MoEConfig(**given | options)


def _experts(owner: str = "GroupedExperts", **options: Any) -> Any:
    module = getattr(experts, owner)(_config(**options))
    fill(module)
    return module


class _Routing:
    """Tokens, their experts (the last one has none), their weights, and a mask of padding."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x, self.dy = (draw(T, H, seed=seed).bfloat16().to(dtype) for seed in (0, 1))
        self.weights = draw(T, K, seed=2).abs().float()
        self.indices = torch.stack([torch.randperm(G - 1, generator=generator)[:K] for _ in range(T)])
        self.mask = torch.rand(T, generator=generator) > 0.2

    def gradients(self, module: Any) -> dict[str, Any]:
        return gradients(module, partial(self.run, module), self.dy, x=self.x, weights=self.weights)

    def run(self, module: Any, x: Tensor, weights: Tensor) -> Tensor:
        return module(x, self.mask, weights, self.indices)


@pytest.mark.rule("HST-1")
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_results_and_gradients_are_those_of_the_host(kind: str, bias: bool, after: bool) -> None:
    module, routing = _experts(expert_bias=bias, apply_router_weight_after_down=after, **KINDS[kind]), _Routing()
    own = routing.gradients(module)
    module.use_torch_mm = True
    with nemo.register():
        near(routing.gradients(module), own)


@pytest.mark.rule("HST-1")
@pytest.mark.parametrize("kind", ["swiglu", "quick_geglu", "relu2"])
def test_bfloat16_is_no_farther_from_the_exact_result_than_the_host(kind: str) -> None:
    """The reference is Automodel's loop in float32. No value is near a clamp, which rounding would let it pass."""
    options = {"expert_bias": True, **KINDS[kind], "activation_limit": 7.0}
    exact = _Routing().gradients(_experts(**options))
    module, routing = _experts(dtype=torch.bfloat16, **options), _Routing(torch.bfloat16)
    module.use_torch_mm = True
    own = routing.gradients(module)
    with nemo.register():
        found = routing.gradients(module)
    no_farther(found, own, exact)


@pytest.mark.rule("HST-2")
def test_weights_are_read_in_place() -> None:
    module, routing = _experts(), _Routing()
    module.use_torch_mm = True
    with nemo.register(), saved_tensors() as saved:
        routing.run(module, routing.x.requires_grad_(), routing.weights)
    assert {each.data_ptr() for each in module.parameters() if each is not None} <= {each.data_ptr() for each in saved}


@pytest.mark.rule("HST-4")
@pytest.mark.parametrize("after", [False, True])
def test_local_experts_of_several_ranks_add_up(after: bool) -> None:
    """Each rank sees all tokens and adds its own experts; ids of others give zero rows."""
    module, routing = _experts(expert_bias=True, apply_router_weight_after_down=after), _Routing()
    module.use_torch_mm = True
    with nemo.register():
        whole = routing.run(module, routing.x, routing.weights)
        parts = []
        for start, stop in ((0, 2), (2, G)):
            weights = [each[start:stop] for each in (module.gate_and_up_projs, module.down_projs)]
            biases = [each[start:stop] for each in (module.gate_up_proj_bias, module.down_proj_bias)]
            operands = (routing.x, routing.mask, routing.weights, routing.indices, *weights, *biases)
            part = module._forward_grouped_mm(*operands, stop - start, start)
            narrow = [each.bfloat16() if each.dtype == torch.float32 else each for each in operands]
            assert module._forward_grouped_mm(*narrow, stop - start, start).dtype == torch.float32, "ranks are summed"
            parts.append(part.sum(1) if after else part)
    near({"y": parts[0] + parts[1]}, {"y": whole})


class _Dispatcher:
    """Automodel's dispatcher for one rank: rows by expert, their probabilities, and back."""

    def token_permutation2(self, hidden_states: Tensor, num_local_tokens: int, token_probs: Tensor, token_indices: Any):
        del num_local_tokens
        rows, sizes, self.permutation = route.permute(hidden_states, token_indices, G, probs=token_probs)
        return rows, sizes, self.permutation.probs

    def token_unpermutation(self, rows: Tensor) -> Tensor:
        return route.unpermute(rows, self.permutation)


@pytest.mark.rule("HST-1", "HST-4")
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_experts_behind_a_dispatcher(bias: bool, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`GroupedExpertsDeepEP` with DTensor Parameters of one rank, against the loop."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    options = {"expert_bias": bias, "apply_router_weight_after_down": after}
    routing, own = _Routing(), _experts(**options)
    wanted = routing.gradients(own)
    host_tools.group_of_one()
    try:
        module = _experts("GroupedExpertsDeepEP", **options)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        for name, each in list(module.named_parameters()):
            placed = DTensor.from_local(each.detach(), mesh, [Shard(0)], run_check=False)
            module.register_parameter(name, torch.nn.Parameter(placed))
        module.ep_size, module.n_routed_experts, module.token_dispatcher = 1, G, _Dispatcher()
        with nemo.register():
            found = routing.gradients(module)
        given: dict[str, Any] = {}
        monkeypatch.setattr(nemo, "grouped_mlp", lambda rows, *_, **options: given.update(options) or rows)
        with nemo.register(recipe=torch_bridge.FP8Block, residuals="save_input"):
            routing.run(module, routing.x, routing.weights)
        assert (given["recipe"], given["residuals"].policy) == (torch_bridge.FP8Block, "save_input")
        local = {name: each.to_local() if hasattr(each, "to_local") else each for name, each in found.items()}
    finally:
        torch.distributed.destroy_process_group()
    near(local, wanted)


@pytest.mark.rule("HST-4", "GRP-3")
@pytest.mark.parametrize("after", [False, True])
def test_compiled_experts_have_the_same_bits(after: bool) -> None:
    """Whole graphs: nothing depends on counts that the host would have to read."""
    module, routing = _experts(expert_bias=True, apply_router_weight_after_down=after), _Routing()
    module.use_torch_mm = True
    with nemo.register(), torch.compiler.set_stance("default"):
        wanted = routing.gradients(module)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        found = gradients(module, partial(routing.run, compiled), routing.dy, x=routing.x, weights=routing.weights)
    same(found, wanted)


@pytest.mark.rule("HST-5")
def test_a_recipe_goes_to_the_products() -> None:
    module, routing = _experts(dtype=torch.bfloat16), _Routing(torch.bfloat16)
    module.use_torch_mm = True
    with nemo.register(recipe=torch_bridge.FP8Block):
        y = routing.run(module, routing.x, routing.weights)
    ids = routing.indices.masked_fill(~routing.mask.unsqueeze(-1), -1)
    wanted = torch_bridge.routed_mlp(
        *(routing.x, ids, routing.weights, module.gate_and_up_projs, module.down_projs),
        rhs_transposed=False,
        recipe=torch_bridge.FP8Block,
    )
    same({"y": y}, {"y": wanted})


@pytest.mark.rule("HST-3")
def test_registration_says_what_it_replaced_and_undoes_it() -> None:
    path = "nemo_automodel.components.moe.experts"
    first = nemo.register()
    assert first.replaced == (f"{path}.GroupedExperts._forward_grouped_mm", f"{path}.GroupedExpertsDeepEP.forward")
    second = nemo.register(residuals="save_input")
    first.undo()
    assert "torch_bridge" in experts.GroupedExpertsDeepEP.forward.__module__
    second.undo()


@pytest.mark.rule("HST-1", "ERR-1")
def test_what_is_not_known_is_refused() -> None:
    module, routing = _experts(), _Routing()
    module.use_torch_mm = module.use_mxfp8 = True
    with nemo.register(), refused(NotImplementedError, ["'torch_mm_mxfp8'", "expected 'torch_mm'", "recipe=torch_br"]):
        routing.run(module, routing.x, routing.weights)
    config = SimpleNamespace(expert_activation="situ", activation_limit=7.0, activation_alpha=1.0, swiglu_limit=0.0)
    with refused(NotImplementedError, ["`expert_activation` of the config: 'situ'", "expected swiglu,", "choose one"]):
        nemo.activation_of(config)
    with refused(NotImplementedError, ["NVFP4, which needs a random key", "NeMo Automodel", "choose FP8Current"]):
        nemo.register(recipe=torch_bridge.NVFP4)
