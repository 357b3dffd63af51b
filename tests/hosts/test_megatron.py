"""Megatron-core's local experts, computed by it (one after the other) and by us."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

import torch_bridge
from grouped_core.activations import Activation
from tests.asserts import refused
from tests.hosts import torch_host_tools as host_tools
from tests.hosts.torch_host_tools import SIZES, F, G, H, draw, gradients, near, no_farther, same
from torch_bridge.integrations import megatron

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_process")]  # the host's own warnings

experts = host_tools.host("megatron.core.transformer.moe.experts")
backends = host_tools.host("megatron.core.models.backends")
te_provider = host_tools.host("megatron.core.extensions.transformer_engine_spec_provider")
specs = host_tools.host("megatron.core.models.gpt.moe_module_specs")
spec_utils = host_tools.host("megatron.core.transformer.spec_utils")
activations = host_tools.host("megatron.core.activations")
fused = host_tools.host("megatron.core.fusions.fused_bias_geglu")
parallel_state = host_tools.host("megatron.core.parallel_state")
moe_utils = host_tools.host("megatron.core.transformer.moe.moe_utils")
checkpoints = host_tools.host("megatron.core.dist_checkpointing")
transformer_config = host_tools.host("megatron.core.transformer.transformer_config")

SILU, GELU, QUICK = functional.silu, functional.gelu, fused.quick_gelu
KINDS: dict[str, dict[str, Any]] = {
    "swiglu": {"activation_func": SILU},
    "swiglu_fused": {"activation_func": SILU, "bias_activation_fusion": True},
    "swiglu_clamped": {"activation_func": SILU, "activation_func_clamp_value": 0.5},
    "swiglu_offset": {"activation_func": SILU, "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
    "quick_geglu": {"activation_func": QUICK},
    "quick_geglu_clamped": {
        "activation_func": QUICK,
        "activation_func_clamp_value": 0.5,
        "glu_linear_offset": 1.0,
    },
    "geglu": {"activation_func": GELU},
    "geglu_tanh": {"activation_func": activations.fast_gelu},
    "silu": {"activation_func": SILU, "gated_linear_unit": False},
    "gelu": {"activation_func": GELU, "gated_linear_unit": False},
    "relu": {"activation_func": functional.relu, "gated_linear_unit": False},
    "squared_relu": {"activation_func": activations.squared_relu, "gated_linear_unit": False},
    "quick_gelu": {"activation_func": activations.quick_gelu, "gated_linear_unit": False},
}


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    host_tools.group_of_one()
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def _no_gpu() -> Any:
    """Megatron puts some tensors on the current GPU, and waits for it."""
    return patch.multiple(torch.cuda, synchronize=lambda: None, current_device=lambda: "cpu")


def _config(**options: Any) -> Any:
    given = {
        "num_layers": 1,
        "hidden_size": H,
        "num_attention_heads": 2,
        "num_moe_experts": G,
        "ffn_hidden_size": F,
        "moe_ffn_hidden_size": F,
        "moe_router_topk": 2,
        "moe_grouped_gemm": True,
        "use_cpu_initialization": True,
        "gated_linear_unit": True,
        "activation_func": SILU,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
    }
    later = {name: options.pop(name) for name in ("delay_wgrad_compute", "fp8") if name in options}
    made = transformer_config.TransformerConfig(**given | options)
    for name, value in later.items():  # without the devices that Megatron's own checks of them ask for
        setattr(made, name, value)
    return made


def _own(config: Any) -> Any:
    cls, submodules = backends.LocalSpecProvider().grouped_mlp_modules(False, False)
    return cls(G, config, submodules, moe_utils.get_default_pg_collection())


class _Linears(torch.nn.Module):
    """The grouped linear layer that Megatron's grouped experts ask for, as a loop."""

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any, skip_bias_add: bool, **_: Any
    ) -> None:
        super().__init__()
        self.adds = not skip_bias_add
        for at in range(num_gemms):
            self.register_parameter(f"weight{at}", torch.nn.Parameter(torch.empty(output_size, input_size)))
        for at in range(num_gemms):
            self.register_parameter(f"bias{at}", torch.nn.Parameter(torch.empty(output_size)))
        self.to(config.params_dtype)

    def forward(self, x: Tensor, sizes: list[int]) -> Any:
        biases = [getattr(self, f"bias{at}") for at in range(len(sizes))]
        given = biases if self.adds else [None] * len(sizes)
        parts = zip(x.split(sizes), given, strict=True)
        y = [functional.linear(rows, getattr(self, f"weight{at}"), bias) for at, (rows, bias) in enumerate(parts)]
        return torch.cat(y), None if self.adds else biases


def _own_with_biases(config: Any) -> Any:
    """Megatron's grouped experts, whose linear layers are a loop; its other experts cannot add biases on a CPU."""
    submodules = host_tools.host("megatron.core.transformer.mlp").MLPSubmodules(
        linear_fc1=_Linears, linear_fc2=_Linears
    )
    return experts.TEGroupedMLP(G, config, submodules, moe_utils.get_default_pg_collection())


def _ours(config: Any, **options: Any) -> Any:
    return megatron.experts(**options)(G, config, pg_collection=moe_utils.get_default_pg_collection())


def _names(ours: Any) -> dict[str, str]:
    """Megatron's names of our Parameters."""
    found = {}
    for name, _ in ours.named_parameters():
        layer, kind = name.split(".")
        at = kind.removeprefix("weight").removeprefix("bias")
        found[name] = f"local_experts.{at}.{layer}.{kind[: -len(at)]}"
    return found


def _filled(module: Any, names: dict[str, str] | None = None) -> Any:
    with torch.no_grad():
        for name, each in module.named_parameters():
            name = name if names is None else names[name]
            seed = sum(ord(letter) * 31**at for at, letter in enumerate(name)) % 2**31
            each.copy_(draw(*each.shape, seed=seed, scale=0.3).bfloat16())
    return module


def _pair(config: Any) -> tuple[Any, Any, dict[str, str]]:
    """Experts of Megatron and of ours with the same Parameters, and Megatron's names of ours."""
    ours = _ours(config)
    if config.add_bias_linear:
        names = {name: name for name, _ in ours.named_parameters()}
        return _filled(_own_with_biases(config)), _filled(ours), names
    names = _names(ours)
    return _filled(_own(config)), _filled(ours, names), names


def _problem(sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    rows = sum(sizes)
    x, dy = (draw(rows, H, seed=seed).bfloat16().to(dtype) for seed in (0, 1))
    return {"x": x, "probs": draw(rows, seed=2).abs().float(), "dy": dy}


def _run(module: Any, sizes: Any, x: Tensor, probs: Tensor) -> Tensor:
    y, bias = module(x, sizes, probs)
    assert bias is None
    return y


def _gradients(module: Any, sizes: Any, problem: dict[str, Tensor], names: dict[str, str] | None = None) -> Any:
    found = gradients(module, partial(_run, module, sizes), **problem)
    return found if names is None else {names.get(name, name): each for name, each in found.items()}


@pytest.mark.rule("HST-1", "MLM #5850")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_results_and_gradients_are_those_of_the_host(kind: str, bias: bool) -> None:
    own, ours, names = _pair(_config(add_bias_linear=bias, **KINDS[kind]))
    sizes = torch.tensor(SIZES["jagged"])
    near(
        _gradients(ours, sizes, _problem(SIZES["jagged"]), names),
        _gradients(own, sizes, _problem(SIZES["jagged"])),
    )


@pytest.mark.rule("HST-1", "GRP-10")
@pytest.mark.parametrize("case", SIZES)
def test_any_counts_of_tokens(case: str) -> None:
    own, ours, names = _pair(_config(add_bias_linear=True))
    sizes, problem = torch.tensor(SIZES[case]), _problem(SIZES[case])
    found = _gradients(ours, sizes, problem, names)
    assert all(each is not None for each in found.values())
    near(found, _gradients(own, sizes, problem))
    for other in (sizes.int(), list(SIZES[case])):
        same(_gradients(ours, other, problem, names), found)


_ONE = {"moe_router_topk": 1, "moe_router_pre_softmax": True}


@pytest.mark.parametrize("bias", [False, True])
def test_probabilities_applied_to_the_input(bias: bool) -> None:
    own, ours, names = _pair(_config(add_bias_linear=bias, moe_apply_probs_on_input=True, **_ONE))
    sizes = torch.tensor(SIZES["jagged"])
    near(
        _gradients(ours, sizes, _problem(SIZES["jagged"]), names),
        _gradients(own, sizes, _problem(SIZES["jagged"])),
    )


def test_experts_on_latent_features() -> None:
    own, ours, names = _pair(_config(hidden_size=2 * H, moe_latent_size=H))
    sizes = torch.tensor(SIZES["jagged"])
    near(
        _gradients(ours, sizes, _problem(SIZES["jagged"]), names),
        _gradients(own, sizes, _problem(SIZES["jagged"])),
    )


@pytest.mark.rule("HST-1")
@pytest.mark.parametrize("kind", ["swiglu", "swiglu_fused", "quick_geglu_clamped", "squared_relu"])
def test_bfloat16_is_no_farther_from_the_exact_result_than_the_host(kind: str) -> None:
    sizes = (200, 0, 333, 1, 90)
    counts = torch.tensor(sizes)
    own, ours, names = _pair(_config(params_dtype=torch.bfloat16, bf16=True, **KINDS[kind]))
    exact = _filled(_own(_config(params_dtype=torch.float64, **KINDS[kind] | {"bias_activation_fusion": False})))
    problem = _problem(sizes, torch.bfloat16)
    no_farther(
        _gradients(ours, counts, problem, names),
        _gradients(own, counts, problem),
        _gradients(exact, counts, _problem(sizes, torch.float64)),
    )


# ---- a whole layer, by its spec


@pytest.mark.rule("HST-3")
@pytest.mark.parametrize("way", ["provider", "register"])
def test_a_spec_builds_a_layer_with_our_experts(way: str) -> None:
    def built(backend: Any, grouped: bool) -> Any:
        spec = specs.get_moe_module_spec_for_backend(backend, num_experts=G, moe_grouped_gemm=grouped)
        return spec_utils.build_module(spec, config=_config(moe_token_dispatcher_type="allgather"))

    if way == "provider":
        layer = built(megatron.provider(backends.LocalSpecProvider()), True)
    else:
        with megatron.register() as made:
            layer = built(backends.LocalSpecProvider(), True)
        assert made.replaced == (
            "megatron.core.extensions.transformer_engine_spec_provider.TESpecProvider.grouped_mlp_modules",
            "megatron.core.models.backends.LocalSpecProvider.grouped_mlp_modules",
        )
    assert isinstance(layer.experts, megatron.GroupedMLP)
    own = built(backends.LocalSpecProvider(), False)
    assert isinstance(own.experts, experts.SequentialMLP)
    _filled(own)
    names = {f"experts.{name}": f"experts.{theirs}" for name, theirs in _names(layer.experts).items()}
    names |= {name: name for name, _ in layer.named_parameters() if name not in names}
    _filled(layer, names)
    hidden, dy = draw(12, 2, H).float(), draw(12, 2, H, seed=1).float()

    def run(module: Any, hidden_states: Tensor) -> Tensor:
        with _no_gpu():
            return module(hidden_states)[0]

    with patch.object(moe_utils, "te_general_gemm", None, create=True):  # its name without TransformerEngine
        found = gradients(layer, partial(run, layer), dy, hidden_states=hidden)
        wanted = gradients(own, partial(run, own), dy, hidden_states=hidden)
    near({names.get(name, name): each for name, each in found.items()}, wanted)


# ---- main_grad and delayed weight gradients, as Megatron drives them


def _main_grads(module: Any) -> dict[str, Tensor]:
    """What Megatron's DDP gives to each Parameter: a part of a flat float32 buffer, and a flag."""
    held = list(module.named_parameters())
    flat, start, found = torch.full([sum(each.numel() for _, each in held)], 0.5), 0, {}
    for name, each in held:
        each.main_grad = found[name] = flat[start : start + each.numel()].view(each.shape)
        each.grad_added_to_main_grad = False
        start += each.numel()
    return found


@pytest.mark.rule("GRD-1", "DLY-3")
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_weight_gradients_go_to_main_grad(delay: bool, microbatches: int) -> None:
    sizes = torch.tensor(SIZES["jagged"])
    plain = _filled(_ours(_config()))
    fusing = _filled(_ours(_config(gradient_accumulation_fusion=True, delay_wgrad_compute=delay)))
    totals = _main_grads(fusing)
    wanted = {name: torch.full(each.shape, 0.5) for name, each in totals.items()}
    for at in range(microbatches):
        problem = _problem(SIZES["jagged"]) | {"dy": draw(sum(SIZES["jagged"]), H, seed=10 + at).float()}
        other = _gradients(plain, sizes, problem)
        found = _gradients(fusing, sizes, problem)
        same({name: found[name] for name in ("y", "x", "probs")}, {name: other[name] for name in ("y", "x", "probs")})
        for name, each in fusing.named_parameters():
            assert each.grad_added_to_main_grad is not delay
            assert each.grad is None if delay else not each.grad.any()
            if delay:
                assert torch.equal(totals[name], wanted[name]), "nothing is written before backward_dw"
        if delay:
            assert fusing.linear_fc1.pending_wgrads() == 1
            fusing.backward_dw()
            assert all(each.grad_added_to_main_grad for each in fusing.parameters())
        for name in wanted:
            wanted[name] += other[name]
        near(totals, wanted)
        for each in fusing.parameters():
            each.grad_added_to_main_grad = False


@pytest.mark.rule("GRD-4", "DLY-6")
@pytest.mark.parametrize("delay", [False, True])
def test_under_data_parallelism_of_megatron(delay: bool) -> None:
    """Two microbatches, of which the second reduces gradients in the hooks that DDP registered."""
    ddp, sizes = host_tools.host("megatron.core.distributed"), torch.tensor(SIZES["jagged"])
    config = _config(gradient_accumulation_fusion=True, delay_wgrad_compute=delay)
    module, plain, wanted = _filled(_ours(config)), _filled(_ours(_config())), {}
    options = ddp.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=True, delay_wgrad_compute=delay
    )
    with _no_gpu():
        wrapped = ddp.DistributedDataParallel(config, options, module)
    wrapped.zero_grad_buffer()
    for at in range(2):
        problem = _problem(SIZES["jagged"]) | {"dy": draw(sum(SIZES["jagged"]), H, seed=10 + at).float()}
        with wrapped.no_sync() if at == 0 else contextlib.nullcontext():
            y, _ = wrapped(problem["x"].requires_grad_(), sizes, problem["probs"])
            y.backward(problem["dy"])
            if delay:
                module.backward_dw()
        other = _gradients(plain, sizes, problem)
        wanted = {name: wanted.get(name, 0) + other[name] for name, _ in plain.named_parameters()}
    wrapped.finish_grad_sync()
    same({name: each.main_grad for name, each in module.named_parameters()}, wanted)
    assert all(each.grad is None for each in module.parameters())


@pytest.mark.rule("DLY-6", "DLY-7", "MLM #4311")
def test_delayed_gradients_call_the_hooks_that_ddp_registers() -> None:
    """As `DistributedDataParallel` does: it looks for the module that holds a marked Parameter."""
    sizes, called = torch.tensor(SIZES["jagged"]), []
    module = _filled(_ours(_config(gradient_accumulation_fusion=True, delay_wgrad_compute=True, add_bias_linear=True)))
    totals = _main_grads(module)
    held = {id(each): name for name, each in module.named_parameters()}
    for weight in module.parameters():
        if not getattr(weight, "skip_backward_post_hook", False):
            assert "bias" in held[id(weight)]
            continue
        for owner in module.modules():
            register = getattr(owner, "register_wgrad_accumulation_and_reduce_hooks", None)
            if register is not None and any(each is weight for each in owner.parameters()):
                name = held[id(weight)]
                register(lambda name=name: called.append((name, bool((totals[name] != 0.5).any()))))
    _gradients(module, sizes, _problem(SIZES["jagged"]))
    assert not called
    module.backward_dw()
    order = [f"linear_fc{layer}.weight{at}" for layer in (2, 1) for at in range(G)]
    assert called == [(name, SIZES["jagged"][int(name[-1])] > 0) for name in order]


@pytest.mark.rule("DLY-1")
def test_delayed_gradients_without_main_grad() -> None:
    sizes, problem = torch.tensor(SIZES["jagged"]), _problem(SIZES["jagged"])
    module, plain = _filled(_ours(_config(delay_wgrad_compute=True))), _filled(_ours(_config()))
    wanted = _gradients(plain, sizes, problem)
    found = _gradients(module, sizes, problem)
    assert all(found[name] is None for name, _ in module.named_parameters())
    module.backward_dw()
    same({name: each.grad for name, each in module.named_parameters()}, {n: wanted[n] for n in found if "weight" in n})


# ---- groups of several ranks


def _groups(**ranks: tuple[int, int]) -> Any:
    made = {
        name: SimpleNamespace(rank=lambda at=at: at, size=lambda count=count: count)
        for name, (at, count) in ranks.items()
    }
    return SimpleNamespace(**{name: made.get(name, _One()) for name in ("ep", "expt_tp", "expt_dp")})


class _One:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@pytest.mark.rule("HST-4")
def test_tensor_parallel_parts_of_experts_add_up_to_the_whole() -> None:
    """Each rank has a part of the gate and the same part of the linear half; Megatron sums the results."""
    config, sizes, problem = _config(), torch.tensor(SIZES["jagged"]), _problem(SIZES["jagged"])
    whole = _filled(_ours(config))
    wanted, parts = _gradients(whole, sizes, problem), []
    for rank in range(2):
        part = megatron.GroupedMLP(G, config, pg_collection=_groups(expt_tp=(rank, 2)))
        assert part.linear_fc1.weight0.shape == (F, H)
        with torch.no_grad():
            for at in range(G):
                gate, linear = getattr(whole.linear_fc1, f"weight{at}").chunk(2)
                halves = [each.chunk(2)[rank] for each in (gate, linear)]
                getattr(part.linear_fc1, f"weight{at}").copy_(torch.cat(halves))
                getattr(part.linear_fc2, f"weight{at}").copy_(
                    getattr(whole.linear_fc2, f"weight{at}").chunk(2, 1)[rank]
                )
        parts.append(_gradients(part, sizes, problem))
    names = ("y", "x", "probs")
    near({name: parts[0][name] + parts[1][name] for name in names}, {name: wanted[name] for name in names})
    with refused(NotImplementedError, ["`add_bias_linear`", "each of 2 tensor-parallel ranks would add"]):
        megatron.GroupedMLP(G, _config(add_bias_linear=True), pg_collection=_groups(expt_tp=(0, 2)))
    with refused(ValueError, ["`moe_ffn_hidden_size`", "expected a multiple of the 3 ranks"]):
        megatron.GroupedMLP(G, config, pg_collection=_groups(expt_tp=(0, 3)))


def test_initialisation_is_that_of_megatron() -> None:
    def drawn(make: Any, config: Any) -> Any:
        torch.manual_seed(5)
        return make(config)

    config = _config(add_bias_linear=True)
    own, ours = drawn(_own, config), drawn(_ours, config)
    names = _names(ours)
    deviations = {"linear_fc1": config.init_method_std, "linear_fc2": config.init_method_std / 2**0.5}
    theirs = dict(own.named_parameters())
    for name, each in ours.named_parameters():
        other = theirs[names[name]]
        assert each.shape == other.shape
        assert each.dtype == other.dtype
        assert each.allreduce == other.allreduce
        if "bias" in name:
            assert not each.any()
            continue
        assert getattr(each, "partition_dim", None) == getattr(other, "partition_dim", None)
        assert abs(each.std() / deviations[name.split(".")[0]] - 1) < 0.2


# ---- checkpoints


def _entries(state: dict[str, Any]) -> set[tuple[Any, ...]]:
    found = set()
    for each in state.values():
        for part in each.build() if hasattr(each, "build") else [each]:
            data = getattr(part, "data", None)
            kind = tuple(data.shape) if isinstance(data, Tensor) else type(data).__name__
            found.add((part.key, tuple(part.global_offset), tuple(part.global_shape), part.replica_id, kind))
    return found


def _metadata(**options: Any) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {"dp_cp_group": group, **options}


@pytest.mark.rule("CKP-7")
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("kind", ["swiglu", "squared_relu"])
def test_sharded_state_dicts_have_the_entries_of_the_host(kind: str, apart: bool) -> None:
    config = _config(add_bias_linear=True, **KINDS[kind])
    own, ours = _own(config), _ours(config)
    metadata = _metadata(singleton_local_shards=apart)
    state = ours.sharded_state_dict("layer.", ((0, 3, 8),), dict(metadata))
    assert _entries(state) == _entries(own.sharded_state_dict("layer.", ((0, 3, 8),), dict(metadata)))
    parameters = {f"layer.{name}" for name, _ in ours.named_parameters()}
    assert {key for key in state if "_extra_state" not in key} == parameters


@pytest.mark.rule("CKP-7")
def test_experts_of_the_second_rank_have_global_indices() -> None:
    part = megatron.GroupedMLP(2, _config(), pg_collection=_groups(ep=(1, 2), expt_dp=(3, 4)))
    state = part.sharded_state_dict("", (), _metadata())
    offsets = {each[1][0] for each in _entries(state) if "weight" in each[0]}
    assert offsets == {2, 3}
    assert {each[3] for each in _entries(state)} == {(0, 0, 3)}


@pytest.mark.rule("CKP-7")
@pytest.mark.parametrize("direction", ["to_ours", "to_theirs"])
def test_distributed_checkpoints_load_in_both_directions(tmp_path: Any, direction: str) -> None:
    config = _config(add_bias_linear=True)
    own, ours = _filled(_own(config)), _filled(_ours(config))
    names = _names(ours)
    source, target = (own, ours) if direction == "to_ours" else (ours, own)
    with _no_gpu():
        checkpoints.save(source.sharded_state_dict("", (), _metadata()), str(tmp_path))
    with torch.no_grad():
        for each in target.parameters():
            each.zero_()
    with _no_gpu():
        target.load_state_dict(checkpoints.load(target.sharded_state_dict("", (), _metadata()), str(tmp_path)))
    theirs = dict(own.named_parameters())
    for name, each in ours.named_parameters():
        assert each.any()
        assert torch.equal(each, theirs[names[name]]), name


# ---- options and refusals


@pytest.mark.rule("HST-4")
def test_compiled_experts_have_the_same_bits() -> None:
    module, sizes, problem = _filled(_ours(_config())), torch.tensor(SIZES["jagged"]), _problem(SIZES["jagged"])
    wanted = _gradients(module, sizes, problem)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    same(gradients(module, partial(_run, compiled, sizes), **problem), wanted)


@pytest.mark.rule("HST-5")
def test_a_recipe_takes_the_place_of_the_formats_of_the_config() -> None:
    config, sizes = _config(fp8="hybrid", params_dtype=torch.bfloat16, bf16=True), torch.tensor(SIZES["jagged"])
    with refused(NotImplementedError, ["formats of the config: fp8='hybrid'", "expected a recipe of ours", "pass one"]):
        _ours(config)
    module = _filled(_ours(config, recipe=torch_bridge.FP8Block))
    problem = _problem(SIZES["jagged"], torch.bfloat16)
    y = _run(module, sizes, problem["x"], problem["probs"])
    wi, wo = module.linear_fc1.weight_parameters(), module.linear_fc2.weight_parameters()
    wanted = torch_bridge.grouped_mlp(
        problem["x"], list(wi), list(wo), sizes, probs=problem["probs"], recipe=torch_bridge.FP8Block
    )
    assert torch.equal(y, wanted)
    delayed = _filled(_ours(config, recipe=torch_bridge.FP8Delayed))
    assert any("scaling_scale" in name for name in delayed.state_dict())
    _gradients(delayed, sizes, problem)
    for layer in (delayed.linear_fc1, delayed.linear_fc2):
        before = layer.scaling_scale.clone()
        torch_bridge.update_scaling(layer.scaling_state)
        assert not torch.equal(layer.scaling_scale, before)
    with refused(
        NotImplementedError, ["`sharded_state_dict`", "delayed scaling", "expected a recipe without", "plain"]
    ):
        delayed.sharded_state_dict("", (), _metadata())


def test_recomputing_the_activation_is_what_we_do_anyway() -> None:
    recomputing = _ours(_config(recompute_granularity="selective", recompute_modules=["moe_act"]))
    assert recomputing.residuals.policy == "save_fc1"


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "reglu": ({"activation_func": functional.relu}, "activation of the config: relu", "Megatron's own experts"),
    "unknown": ({"activation_func": functional.mish}, "activation of the config: mish", "choose one of these"),
    "geglu_clamped": ({"activation_func": GELU, "activation_func_clamp_value": 2.0}, "clamp 2.0", "choose one"),
    "geglu_fused": ({"activation_func": GELU, "bias_activation_fusion": True}, "fusion True", "choose one"),
    "relu_clamped": (
        {"activation_func": functional.relu, "gated_linear_unit": False, "activation_func_clamp_value": 2.0},
        *("gated_linear_unit False, clamp 2.0", "choose one"),
    ),
    "swiglu_clamp_lost": (
        {"bias_activation_fusion": True, "activation_func_clamp_value": 2.0},
        *("which Megatron's fused SwiGLU leaves out", "turn the fusion off"),
    ),
    "stored_fp8": ({"activation_func_fp8_input_store": True}, "`activation_func_fp8_input_store`", "save_input"),
    "te_activation": ({"use_te_activation_func": True}, "`use_te_activation_func`", "no module of its own"),
    "offloading": (
        {"fine_grained_activation_offloading": True, "offload_modules": ["moe_act"]},
        *("['moe_act']", "cpu_offload"),
    ),
    "legacy": ({"moe_use_legacy_grouped_gemm": True}, "`moe_use_legacy_grouped_gemm`", "another layout"),
}


@pytest.mark.rule("HST-1", "ERR-1")
@pytest.mark.parametrize("name", REFUSED)
def test_what_the_config_asks_and_we_cannot_do_is_refused(name: str) -> None:
    options, came, remedy = REFUSED[name]
    config = _config()
    for key, value in options.items():  # some of them need devices in Megatron's own checks
        setattr(config, key, value)
    with refused(NotImplementedError, [came, "expected", remedy]):
        _ours(config)


@pytest.mark.rule("HST-3", "ERR-1")
def test_specs_are_refused_where_they_do_not_ask_for_grouped_experts() -> None:
    made = megatron.provider(backends.LocalSpecProvider())
    assert made.column_parallel_linear() is backends.LocalSpecProvider().column_parallel_linear()
    for arguments in ((False, False), (True, True)):
        with refused(NotImplementedError, ["grouped experts of the spec", "expected True and False", "set them so"]):
            made.grouped_mlp_modules(*arguments)
    with refused(NotImplementedError, ["`submodules` of GroupedMLP", "expected None", "take the spec from"]):
        megatron.GroupedMLP(G, _config(), SimpleNamespace(), _groups())


@pytest.mark.rule("HST-3")
def test_registration_is_undone_and_the_last_one_wins() -> None:
    own = backends.LocalSpecProvider.grouped_mlp_modules
    first = megatron.register()
    second = megatron.register(residuals="save_all")
    first.undo()
    cls, submodules = te_provider.TESpecProvider().grouped_mlp_modules(True, False)
    assert submodules is None
    assert cls.residuals.policy == "save_all"
    second.undo()
    assert backends.LocalSpecProvider.grouped_mlp_modules is own


@pytest.mark.rule("MLP-3")
def test_clamps_and_offsets_of_the_config() -> None:
    wanted = Activation("clamped_qgeglu", alpha=1.0, limit=7.0, offset=1.0)
    config = _config(activation_func_clamp_value=7.0, glu_linear_offset=1.0)
    assert megatron.activation_of(config) == wanted
