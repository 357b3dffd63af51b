"""torchtitan's grouped experts, computed by it and by us."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import torch_bridge
from tests.asserts import refused
from tests.hosts import torch_host_tools as host_tools
from tests.hosts.torch_host_tools import SIZES, F, G, H, draw, fill, gradients, near, no_farther, same
from tests.torch_frontend.torch_tools import counted_launches, saved_tensors
from torch_bridge.integrations import torchtitan

pytestmark = pytest.mark.filterwarnings("ignore")  # the host's own

moe = host_tools.host("torchtitan.models.common.moe")
gpt_oss = host_tools.host("torchtitan.models.gpt_oss.moe")
checkpointing = host_tools.host("torchtitan.distributed.activation_checkpoint")
config = host_tools.host("torchtitan.config")

KINDS = ("GroupedExperts", "GptOssGroupedExperts")


@pytest.fixture(autouse=True)
def _own_functions() -> Iterator[None]:
    """Every test starts and ends with torchtitan's own functions."""
    before = (moe.GroupedExperts.forward, gpt_oss.GptOssGroupedExperts.forward, checkpointing._get_default_save_ops)
    assert "torch_bridge" not in before[0].__module__
    yield
    after = (moe.GroupedExperts.forward, gpt_oss.GptOssGroupedExperts.forward, checkpointing._get_default_save_ops)
    assert after == before


def _experts(kind: str = "GroupedExperts", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    owner = getattr(moe, kind, None) or getattr(gpt_oss, kind)
    module = owner.Config(dim=H, hidden_dim=F, num_experts=G, **options).build().to(dtype)
    fill(module)
    return module


class _Exactly:
    """torchtitan's own forward in float64: its casts to bfloat16 do nothing, and its product is a loop."""

    def __init__(self, kind: str, **options: Any) -> None:
        self.module = _experts(kind, torch.float64, **options)
        owner = type(self.module)
        self.module.__class__ = type("Exact", (owner,), {"_grouped_mm": _loop, "forward": owner.forward})

    def __call__(self, *arguments: Any) -> Tensor:
        with patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor):
            return self.module(*arguments)


def _loop(self: Any, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    ends = [0, *offs.tolist()]
    rows = [A[a:b] @ B for a, b, B in zip(ends, ends[1:], B_t, strict=False)]
    return torch.cat([*rows, A.new_zeros(len(A) - ends[-1], B_t.shape[-1])])


def _problem(sizes: tuple[int, ...], tail: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    rows = sum(sizes) + tail
    dy = draw(rows, H, seed=1).bfloat16()
    dy[rows - tail :] = 0
    return {"x": draw(rows, H).bfloat16().to(dtype), "dy": dy.to(dtype)}


def _run(module: Any, counts: Tensor, x: Tensor) -> Tensor:
    return module(x, counts)


@pytest.mark.rule("HST-1", "HST-2")
@pytest.mark.parametrize(
    ("kind", "options"), [*((kind, {}) for kind in KINDS), ("GptOssGroupedExperts", {"swiglu_limit": 0.5})], ids=str
)
@pytest.mark.parametrize("case", SIZES)
def test_float32_results_and_gradients_are_those_of_the_host(kind: str, options: Any, case: str) -> None:
    counts = torch.tensor(SIZES[case])
    exact = _Exactly(kind, **options)
    wanted = gradients(exact.module, partial(_run, exact, counts), **_problem(SIZES[case]))
    module = _experts(kind, **options)
    with torchtitan.register(dtype=None):
        found = gradients(module, partial(_run, module, counts), **_problem(SIZES[case], dtype=torch.float32))
    near(found, wanted, exact=True)
    assert all(each is not None for each in found.values())


@pytest.mark.rule("HST-1")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bfloat16_is_no_farther_from_the_exact_result_than_the_host(kind: str, dtype: torch.dtype) -> None:
    sizes = (200, 0, 333, 1, 90)
    counts = torch.tensor(sizes)
    exact = _Exactly(kind)
    wanted = gradients(exact.module, partial(_run, exact, counts), **_problem(sizes))
    module, problem = _experts(kind, dtype), _problem(sizes, dtype=dtype)
    own = gradients(module, partial(_run, module, counts), **problem)
    with torchtitan.register():
        found = gradients(module, partial(_run, module, counts), **problem)
    assert found["y"].dtype == dtype
    no_farther(found, own, wanted)


@pytest.mark.rule("GRP-6")
@pytest.mark.parametrize("kind", KINDS)
def test_rows_past_the_counts_are_not_read_and_give_zero(kind: str) -> None:
    """Dispatchers pad their buffers; torchtitan leaves what its product writes there."""
    sizes = SIZES["jagged"]
    module, problem = _experts(kind, torch.bfloat16), _problem(sizes, tail=8, dtype=torch.bfloat16)
    problem["x"][-8:] = torch.nan
    with torchtitan.register():
        found = gradients(module, partial(_run, module, torch.tensor(sizes)), **problem)
    assert not found["y"][-8:].any()
    assert not found["x"][-8:].any()
    assert all(each is not None and each.isfinite().all() for each in found.values())


@pytest.mark.rule("HST-2")
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_read_in_place(kind: str) -> None:
    module, problem = _experts(kind, torch.bfloat16), _problem(SIZES["jagged"], dtype=torch.bfloat16)
    with torchtitan.register(), saved_tensors() as saved:
        module(problem["x"].requires_grad_(), torch.tensor(SIZES["jagged"]))
    kept = {each.data_ptr() for each in saved}
    weights = [each for each in module.parameters() if each.dim() == 3]
    assert len(weights) >= 2
    assert {each.data_ptr() for each in weights} <= kept


def _layer() -> Any:
    """A whole MoE layer of torchtitan, with its router, its dispatcher and its sum by scores."""
    linear = host_tools.host("torchtitan.models.common.linear").Linear
    dispatcher = host_tools.host("torchtitan.models.common.token_dispatcher").LocalTokenDispatcher
    made = moe.MoE.Config(
        num_experts=G,
        routed_experts=moe.RoutedExperts.Config(
            inner_experts=moe.GroupedExperts.Config(dim=H, hidden_dim=F, num_experts=G),
            token_dispatcher=dispatcher.Config(num_experts=G, top_k=2),
        ),
        router=moe.TokenChoiceTopKRouter.Config(
            num_experts=G, gate=linear.Config(in_features=H, out_features=G, bias=False), top_k=2
        ),
    )
    layer = made.build()
    fill(layer)
    return layer


@pytest.mark.rule("HST-4")
def test_a_whole_layer_with_its_router_and_dispatcher() -> None:
    x, dy = (draw(2, 30, H, seed=seed).bfloat16().float() for seed in (0, 1))
    layer = _layer()
    own = gradients(layer, layer, dy, x_BLD=x)
    with torchtitan.register():
        found = gradients(layer, layer, dy, x_BLD=x)
    with torchtitan.register(dtype=None):  # the same choice of experts, whose products are in float32
        wanted = gradients(layer, layer, dy, x_BLD=x)
    assert {"router.gate.weight", "routed_experts.inner_experts.w3_EFD"} < found.keys()
    no_farther(found, own, wanted)


@pytest.mark.rule("HST-4")
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_experts_have_the_same_bits(kind: str) -> None:
    module, problem = _experts(kind, torch.bfloat16), _problem(SIZES["jagged"], dtype=torch.bfloat16)
    counts = torch.tensor(SIZES["jagged"])
    with torchtitan.register():
        wanted = gradients(module, partial(_run, module, counts), **problem)
        torch._dynamo.reset()
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        same(gradients(module, partial(_run, compiled, counts), **problem), wanted)


# ---- activation checkpointing


def _recomputed(policy: Any, module: Any, problem: dict[str, Tensor]) -> tuple[dict[str, Any], list[str]]:
    """Results through a policy of torchtitan, and what backward launches."""
    wrapped = policy._wrap_block(module)
    x = problem["x"].clone().requires_grad_()
    module.zero_grad()
    with counted_launches() as launched:
        y = wrapped(x, torch.tensor(SIZES["jagged"]))
        before = len(launched)
        y.backward(problem["dy"])
    found = {"y": y.detach(), "x": x.grad, **{name: each.grad for name, each in module.named_parameters()}}
    return found, launched[before:]


@pytest.mark.rule("HST-4")
@pytest.mark.parametrize("kind", KINDS)
def test_selective_checkpointing_keeps_the_results_of_the_products(kind: str) -> None:
    module, problem = _experts(kind, torch.bfloat16), _problem(SIZES["jagged"], dtype=torch.bfloat16)
    policy = checkpointing.SelectiveAC(checkpointing.SelectiveAC.Config())
    with torchtitan.register():
        wanted = gradients(module, partial(_run, module, torch.tensor(SIZES["jagged"])), **problem)
        found, again = _recomputed(policy, module, problem)
        same(found, wanted)
        assert again
        assert "grouped_matmul_act" not in again, "the first product ran twice"
        with patch.object(torchtitan, "save_list", set):
            found, again = _recomputed(policy, module, problem)
        same(found, wanted)
        assert "grouped_matmul_act" in again, "without the save list it is computed again"


@pytest.mark.rule("HST-4")
def test_full_checkpointing_has_the_same_bits() -> None:
    module, problem = _experts(dtype=torch.bfloat16), _problem(SIZES["jagged"], dtype=torch.bfloat16)
    with torchtitan.register():
        wanted = gradients(module, partial(_run, module, torch.tensor(SIZES["jagged"])), **problem)
        found, again = _recomputed(checkpointing.FullAC(checkpointing.FullAC.Config()), module, problem)
    same(found, wanted)
    assert "grouped_matmul_act" in again


# ---- distributed Parameters


@pytest.fixture
def ranks() -> Iterator[None]:
    """Two ranks that do not exist, of which this process is the first."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


def _shards(kind: str, whole: Any, axis: str, rank: int) -> Any:
    """A module with the part of a rank, as DTensors on a mesh of two."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    cuts = {"w1_EFD": 1, "w3_EFD": 1, "w2_EDF": 2, "mlp1_weight_EGD": 1, "mlp1_bias_EG": 1, "mlp2_weight_EDF": 2}
    module = _experts(kind)
    for name, each in list(whole.named_parameters()):
        cut = cuts.get(name)
        part = each.detach() if cut is None else each.detach().chunk(2, cut)[rank].contiguous()
        placed = DTensor.from_local(part, mesh, [Replicate() if cut is None else Shard(cut)], run_check=False)
        setattr(module, name, torch.nn.Parameter(placed))
    return module


@pytest.mark.rule("HST-4")
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("kind", KINDS)
def test_tensor_parallel_shards_add_up_to_the_whole(kind: str) -> None:
    """Features of experts are cut; each rank's result is a part of a sum, in which second biases count once."""
    counts, problem = torch.tensor(SIZES["jagged"]), _problem(SIZES["jagged"], dtype=torch.float32)
    whole = _experts(kind)
    with torchtitan.register(dtype=None):
        wanted = gradients(whole, partial(_run, whole, counts), **problem)
        parts = [_shards(kind, whole, "tp", rank) for rank in range(2)]
        found = [gradients(part, partial(_run, part, counts), **problem) for part in parts]
    for name in ("y", "x"):
        near({name: found[0][name] + found[1][name]}, {name: wanted[name]})
    for name, cut in {"w3_EFD": 1, "w2_EDF": 2, "mlp1_weight_EGD": 1, "mlp1_bias_EG": 1}.items():
        if name in wanted:
            joined = torch.cat([each[name].to_local() for each in found], cut)
            near({name: joined}, {name: wanted[name]})
    if "mlp2_bias_ED" in wanted:
        near({"bias": found[0]["mlp2_bias_ED"].to_local()}, {"bias": wanted["mlp2_bias_ED"]})


# ---- overrides for the command line


@pytest.fixture(scope="module")
def override() -> Any:
    return host_tools.host("torch_bridge.integrations.torchtitan_override")


def _overridden(root: Any, *imports: Any) -> list[str]:
    return config.apply_overrides(config.OverrideConfig(imports=list(imports)), root)


@pytest.mark.rule("HST-3")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"recipe": "FP8Block"}], ids=str)
def test_an_override_builds_experts_with_the_same_state_and_bits(
    override: Any, kind: str, options: dict[str, str]
) -> None:
    dispatcher = host_tools.host("torchtitan.models.common.token_dispatcher").LocalTokenDispatcher
    owner = getattr(moe, kind, None) or getattr(gpt_oss, kind)
    root = moe.RoutedExperts.Config(
        inner_experts=owner.Config(dim=H, hidden_dim=F, num_experts=G),
        token_dispatcher=dispatcher.Config(num_experts=G, top_k=2),
    )
    lines = _overridden(root, ("torch_bridge.integrations.torchtitan_override.grouped_experts", options))
    assert len(lines) == 1
    module = root.inner_experts.build().to(torch.bfloat16)
    own = _experts(kind, torch.bfloat16)
    module.load_state_dict(own.state_dict())
    assert isinstance(module, owner)
    counts, problem = torch.tensor(SIZES["jagged"]), _problem(SIZES["jagged"], dtype=torch.bfloat16)
    recipe = None if not options else torch_bridge.FP8Block
    with torchtitan.register(recipe=recipe):
        wanted = gradients(own, partial(_run, own, counts), **problem)
    same(gradients(module, partial(_run, module, counts), **problem), wanted)


def test_an_override_refuses_experts_that_it_does_not_know(override: Any) -> None:
    class Other(moe.GroupedExperts):
        @override.dataclass(kw_only=True, slots=True)
        class Config(moe.GroupedExperts.Config):
            pass

    with refused(NotImplementedError, ["Other.Config", "expected GroupedExperts.Config or", "select other modules"]):
        override.grouped_experts(Other.Config(dim=H, hidden_dim=F, num_experts=G))


def test_an_override_extends_the_save_list(override: Any) -> None:
    made = override.selective_checkpointing(checkpointing.SelectiveAC.Config(preserve_rng_state=False))
    policy = made.build()
    assert policy.config.preserve_rng_state is False
    own = checkpointing.SelectiveAC(checkpointing.SelectiveAC.Config()).get_save_ops()
    assert policy.get_save_ops() - own == torchtitan.save_list()
    assert own <= policy.get_save_ops()


# ---- registration and refusals


@pytest.mark.rule("HST-3")
def test_importing_replaces_nothing_and_undo_restores(python: Any) -> None:
    python("""
import warnings
warnings.simplefilter("ignore")
import torchtitan.models.common.moe as moe
before = moe.GroupedExperts.forward
from torch_bridge.integrations import torchtitan
assert moe.GroupedExperts.forward is before
made = torchtitan.register()
assert moe.GroupedExperts.forward is not before
made.undo()
assert moe.GroupedExperts.forward is before
""")


@pytest.mark.rule("HST-3")
def test_the_last_registration_wins() -> None:
    own = moe.GroupedExperts.forward
    first = torchtitan.register()
    second = torchtitan.register(dtype=None)
    assert first.replaced == second.replaced
    assert {"torchtitan.models.common.moe.GroupedExperts.forward"} < set(second.replaced)
    ours = moe.GroupedExperts.forward
    first.undo()
    assert moe.GroupedExperts.forward is ours
    with torchtitan.register():
        assert moe.GroupedExperts.forward not in (own, ours)
    assert moe.GroupedExperts.forward is ours
    second.undo()
    second.undo()
    assert moe.GroupedExperts.forward is own


def test_undo_refuses_to_drop_what_others_put_on_top() -> None:
    made = torchtitan.register()
    ours = moe.GroupedExperts.forward
    moe.GroupedExperts.forward = lambda self: None
    for act in (made.undo, torchtitan.register):
        with refused(RuntimeError, ["GroupedExperts.forward", "expected the function that `register` put", "undo"]):
            act()
    moe.GroupedExperts.forward = ours
    made.undo()


@pytest.mark.rule("HST-1", "ERR-1")
def test_experts_that_compute_something_else_are_refused() -> None:
    class Narrow(moe.GroupedExperts):
        def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
            raise AssertionError

    class Biased(moe.GroupedExperts):
        def __init__(self, made: Any) -> None:
            super().__init__(made)
            self.b1 = torch.nn.Parameter(torch.zeros(G, F))

    made = moe.GroupedExperts.Config(dim=H, hidden_dim=F, num_experts=G)
    arguments = (torch.zeros(3, H), torch.tensor([3, 0, 0, 0, 0]))
    with torchtitan.register():
        with refused(NotImplementedError, ["`_grouped_mm` of Narrow", "replaced", "expected the one", "pass `recipe`"]):
            Narrow(made)(*arguments)
        with refused(NotImplementedError, ["Parameters of Biased", "b1, w1_EFD", "expected w1_EFD", "give the class"]):
            Biased(made)(*arguments)
        with (
            patch.object(sys.modules["spmd_types"], "is_type_checking", lambda: True),
            refused(NotImplementedError, ["types of distribution", "expected no such check", "spmd_typechecking"]),
        ):
            _experts()(*arguments)
        with pytest.raises(TypeError, match="group_sizes"):  # the router counts in integers
            _experts()(arguments[0], arguments[1].float())


@pytest.mark.rule("HST-5", "ERR-1")
@pytest.mark.parametrize("recipe", ["FP8Delayed", "NVFP4"])
def test_recipes_that_need_a_state_or_keys_are_refused(recipe: str) -> None:
    with refused(NotImplementedError, [f"{recipe}, which needs", "expected a recipe without", "choose FP8Current"]):
        torchtitan.register(recipe=getattr(torch_bridge, recipe))
