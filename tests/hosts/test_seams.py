"""The seams of hosts, without the hosts: our functions have the signatures that the hosts published and call."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

import torch_bridge
from tests.asserts import refused
from tests.hosts.torch_host_tools import SIZES, F, G, H, draw, gradients, near, undone
from torch_bridge.integrations import megatron, nemo, prime_rl, torchtitan
from torch_bridge.integrations._options import options_of
from torch_bridge.integrations._replacing import Replacement, register

OPTIONS = options_of("a host", None, "save_fc1")
PUBLISHED = [
    # torchtitan 0.3.0, torchtitan.models.common.moe.GroupedExperts.forward and models.gpt_oss.moe
    (torchtitan.forward_of(None, OPTIONS, None), "self, x_RD, num_tokens_per_expert_E"),
    (torchtitan.gpt_oss_forward_of(None, OPTIONS, None), "self, x_RD, num_tokens_per_expert_E"),
    # megatron-core 0.16.1, megatron.core.transformer.moe.experts.TEGroupedMLP
    (megatron.GroupedMLP.__init__, "self, num_local_experts, config, submodules, pg_collection"),
    (megatron.GroupedMLP.forward, "self, permuted_local_hidden_states, tokens_per_expert, permuted_probs"),
    (megatron.GroupedMLP.sharded_state_dict, "self, prefix, sharded_offsets, metadata"),
    (megatron.GroupedMLP.backward_dw, "self"),
    # nemo-automodel 0.7.0, nemo_automodel.components.moe.experts
    (
        nemo.grouped_mm_of(OPTIONS),
        "self, x, token_mask, weights, indices, gate_and_up_projs, down_projs, gate_up_proj_bias, down_proj_bias, "
        "n_local_experts, experts_start_idx",
    ),
    (nemo.dispatched_of(OPTIONS, lambda *_: torch.empty(0)), "self, x, token_mask, weights, indices"),
    # prime-rl at 1654689, prime_rl.trainer.models.layers.moe.kernels
    (prime_rl.run_experts(OPTIONS), "w1, w2, w3, x, num_tokens_per_expert"),
    (prime_rl.run_nongated_experts(OPTIONS), "w1, w2, _w3, x, num_tokens_per_expert"),
    (
        prime_rl.run_gpt_oss_experts(OPTIONS),
        "gate_up_proj, gate_up_proj_bias, down_proj, down_proj_bias, x, num_tokens_per_expert",
    ),
]


@pytest.mark.rule("HST-1")
@pytest.mark.parametrize(("function", "names"), PUBLISHED, ids=[each[0].__qualname__ for each in PUBLISHED])
def test_signatures_are_those_that_were_published(function: Any, names: str) -> None:
    assert ", ".join(inspect.signature(function).parameters) == names


@pytest.mark.rule("HST-3", "ERR-1")
def test_a_function_with_other_parameters_is_not_replaced() -> None:
    class Host:
        def forward(self, x: Tensor, sizes: Tensor, scores: Tensor) -> Tensor:
            raise AssertionError

        def other(self) -> None:
            raise AssertionError

    own = Host.forward
    good = Replacement(Host, "other", ("self",), lambda own: None)
    for name, came in (("forward", "parameters (self, x, sizes, scores)"), ("missing", "missing")):
        wrong = Replacement(Host, name, ("self", "x"), lambda own: None)
        with refused(NotImplementedError, [f"Host.{name}`: {came}", "expected parameters (self, x)", "install a rele"]):
            register("seams", [good, wrong])
    assert Host.forward is own
    assert callable(Host.other)


@pytest.mark.rule("HST-3")
def test_a_registration_that_fails_halfway_changes_nothing() -> None:
    class Host:
        def forward(self) -> str:
            return "own"

        def other(self) -> str:
            return "own"

    def fails(own: Any) -> Any:
        raise KeyError("no such option")

    own = Host.forward, Host.other
    first = Replacement(Host, "forward", ("self",), lambda own: lambda self: "first")
    second = Replacement(Host, "other", ("self",), fails)
    for _ in range(2):
        with pytest.raises(KeyError, match="no such option"):
            register("seams", [first, second])
        assert (Host.forward, Host.other) == own
    with register("seams", [first]):
        with pytest.raises(KeyError, match="no such option"):
            register("seams", [first, second])
        assert Host().forward() == "first"
    assert (Host.forward, Host.other) == own


@pytest.mark.rule("HST-1")
def test_registrations_are_undone_in_any_order() -> None:
    class Host:
        def forward(self) -> str:
            return "own"

    def made(name: str) -> Any:
        return register("seams", [Replacement(Host, "forward", ("self",), lambda own: lambda self: name)])

    first, second, third = map(made, ("first", "second", "third"))
    for each, left in ((second, "third"), (third, "first"), (third, "first"), (first, "own")):
        each.undo()
        assert Host().forward() == left


@pytest.mark.rule("HST-1", "ERR-1")
def test_what_others_have_replaced_since_is_not_undone() -> None:
    class Host:
        def forward(self) -> str:
            return "own"

    own = Host.forward
    made = register("seams", [Replacement(Host, "forward", ("self",), lambda own: lambda self: "ours")])
    ours, theirs = Host.forward, lambda self: "theirs"
    Host.forward = theirs
    for run in (made.undo, lambda: register("seams", [Replacement(Host, "forward", ("self",), lambda own: own)])):
        with pytest.raises(RuntimeError, match="expected the function that `register` put there"):
            run()
        assert Host.forward is theirs
    Host.forward = ours
    made.undo()
    assert Host.forward is own


@pytest.mark.rule("HST-1", "ERR-1")
@pytest.mark.parametrize("recipe", [torch_bridge.FP8Delayed, torch_bridge.NVFP4], ids=lambda each: each.name)
def test_recipes_that_need_a_state_or_keys_are_refused(kernels: ModuleType, recipe: Any) -> None:
    with pytest.raises(NotImplementedError, match="expected a recipe without one"):
        prime_rl.register(recipe=recipe)


@pytest.mark.rule("HST-3")
def test_a_block_restores_the_function_even_if_it_raises() -> None:
    class Host:
        def forward(self) -> str:
            return "own"

    row = Replacement(Host, "forward", ("self",), lambda own: lambda self: f"ours of {own(self)}")
    with pytest.raises(KeyError), register("seams", [row]) as made:  # noqa: PT012  two statements are the point
        assert Host().forward() == "ours of own"
        raise KeyError
    assert Host().forward() == "own"
    assert made.replaced == (f"{__name__}.{Host.__qualname__}.forward",)
    with undone(register("seams", [row])), undone(register("seams", [row])):
        assert Host().forward() == "ours of own"
    assert Host().forward() == "own"


# ---- prime-rl, which no package index has: stand-ins with its names and signatures


def _own_experts(w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
    def one(rows: Tensor, at: int) -> Tensor:
        return (functional.silu(rows @ w1[at].T) * (rows @ w3[at].T)) @ w2[at].T

    return _each(one, x, num_tokens_per_expert)


def _own_nongated(w1: Tensor, w2: Tensor, _w3: Tensor, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
    return _each(lambda rows, at: functional.relu(rows @ w1[at].T).square() @ w2[at].T, x, num_tokens_per_expert)


def _own_gpt_oss(
    gate_up_proj: Tensor,
    gate_up_proj_bias: Tensor,
    down_proj: Tensor,
    down_proj_bias: Tensor,
    x: Tensor,
    num_tokens_per_expert: Tensor,
) -> Tensor:
    def one(rows: Tensor, at: int) -> Tensor:
        h = rows @ gate_up_proj[at] + gate_up_proj_bias[at]
        gate, linear = h[:, ::2].clamp(max=7.0), h[:, 1::2].clamp(-7.0, 7.0)
        return (gate * torch.sigmoid(1.702 * gate) * (linear + 1)) @ down_proj[at] + down_proj_bias[at]

    return _each(one, x, num_tokens_per_expert)


def _each(one: Any, x: Tensor, counts: Tensor) -> Tensor:
    parts = x.split([int(each) for each in counts])
    return torch.cat([one(rows, at) for at, rows in enumerate(parts)])


_OWN = {
    "_run_experts_grouped_mm_impl": _own_experts,
    "_run_nongated_experts_grouped_mm_impl": _own_nongated,
    "_run_gpt_oss_experts_grouped_mm_impl": _own_gpt_oss,
}
_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "_run_experts_grouped_mm_impl": {"w1": (G, F, H), "w2": (G, H, F), "w3": (G, F, H)},
    "_run_nongated_experts_grouped_mm_impl": {"w1": (G, F, H), "w2": (G, H, F), "_w3": (0,)},
    "_run_gpt_oss_experts_grouped_mm_impl": {
        "gate_up_proj": (G, H, 2 * F),
        "gate_up_proj_bias": (G, 2 * F),
        "down_proj": (G, F, H),
        "down_proj_bias": (G, H),
    },
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    path = "prime_rl.trainer.models.layers.moe"
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    made = [ModuleType(f"{path}.{name}") for name in ("kernels", "experts")]
    for module in made:
        vars(module).update(_OWN)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield made[0]
    for module in made:
        assert all(vars(module)[name] is own for name, own in _OWN.items())


@pytest.mark.rule("HST-1")
@pytest.mark.parametrize("name", _OWN)
def test_kernels_of_prime_rl(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In float32, by leaving out its casts to bfloat16."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor)
    counts = torch.tensor(SIZES["jagged"], dtype=torch.float32)  # as its router counts
    leaves = {key: draw(*shape, seed=at, scale=0.3) for at, (key, shape) in enumerate(_SHAPES[name].items())}
    leaves["x"] = draw(sum(SIZES["jagged"]), H, seed=9)
    dy, nothing = draw(*leaves["x"].shape, seed=10), torch.nn.Module()

    def run(**held: Tensor) -> Tensor:
        return getattr(kernels, name)(**held, num_tokens_per_expert=counts)

    wanted = gradients(nothing, run, dy, **leaves)
    with prime_rl.register() as made:
        assert len(made.replaced) == 6
        found = gradients(nothing, run, dy, **{key: each.float() for key, each in leaves.items()})
    near(found, wanted, exact=True)


@pytest.mark.rule("HST-1")
@pytest.mark.parametrize("name", _OWN)
def test_options_reach_the_kernels_of_prime_rl(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    leaves = [draw(*shape, seed=at).float() for at, shape in enumerate(_SHAPES[name].values())]
    given: dict[str, Any] = {}
    monkeypatch.setattr(prime_rl, "grouped_mlp", lambda x, *_, **options: given.update(options) or x)
    with prime_rl.register(recipe=torch_bridge.FP8Block, residuals="save_input"):
        getattr(kernels, name)(*leaves, draw(sum(SIZES["jagged"]), H).float(), torch.tensor(SIZES["jagged"]))
    assert given["recipe"] is torch_bridge.FP8Block
    assert given["residuals"].policy == "save_input"


def test_kernels_of_prime_rl_multiply_in_bfloat16(kernels: ModuleType) -> None:
    name = "_run_experts_grouped_mm_impl"
    leaves = [draw(*shape, seed=at, scale=0.3).float() for at, shape in enumerate(_SHAPES[name].values())]
    x, counts = draw(sum(SIZES["jagged"]), H).float(), torch.tensor(SIZES["jagged"])
    with prime_rl.register(recipe=torch_bridge.FP8Block):
        y = getattr(kernels, name)(*leaves, x, counts)
    w1, w2, w3 = (each.bfloat16() for each in leaves)
    wanted = torch_bridge.grouped_mlp(x.bfloat16(), (w1, w3), w2, counts, recipe=torch_bridge.FP8Block)
    assert y.dtype == torch.float32
    assert torch.equal(y, wanted.float())


@pytest.mark.rule("MLP-1")
def test_the_one_call_on_permuted_rows_with_probabilities() -> None:
    """What docs/hosts_training.md names for other hosts: Automodel's layout, rows by expert, probabilities in fp32."""
    sizes = torch.tensor(SIZES["jagged"])
    leaves = {"x": draw(24, H), "probs": draw(24, seed=1).abs()}
    wi, wo = draw(G, H, 2 * F, seed=2, scale=0.3), draw(G, F, H, seed=3, scale=0.3)

    def exact(x: Tensor, probs: Tensor, wi: Tensor, wo: Tensor) -> Tensor:
        def one(rows: Tensor, at: int) -> Tensor:
            gate, linear = (rows[:, :-1] @ wi[at]).chunk(2, -1)
            return (functional.silu(gate) * linear * rows[:, -1:]) @ wo[at]

        return _each(one, torch.cat([x, probs.unsqueeze(-1)], 1), sizes)

    def ours(x: Tensor, probs: Tensor, wi: Tensor, wo: Tensor) -> Tensor:
        return torch_bridge.grouped_mlp(x, wi, wo, sizes, probs=probs, rhs_transposed=False)

    run, dy, leaves = partial(gradients, torch.nn.Module()), draw(24, H, seed=4), leaves | {"wi": wi, "wo": wo}
    near(run(ours, dy, **{key: each.float() for key, each in leaves.items()}), run(exact, dy, **leaves), exact=True)
