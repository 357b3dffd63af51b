"""What the adapter to transformers recognises and refuses, and how it is registered and taken back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grouped_core.activations import KINDS, Activation
from grouped_core.mlp_spec import POLICIES
from tests.asserts import bitwise, refused
from tests.hosts.families import E, F, H, K, T, experts_module, families, filled, problem, results
from tests.hosts.models import model
from tests.torch_frontend.torch_tools import saved_tensors
from torch_bridge.integrations._activations import facts_of, recognised
from torch_bridge.integrations.transformers import register

ACT2FN = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu_erf",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "srelu",
}
"""Names of the host's activations that have a kind, without a gate."""
OTHERS = ("mish", "relu6", "sigmoid", "tanh", "linear", "leaky_relu", "gelu_10", "laplace", "xielu")
GATED = {"silu": "swiglu", "gelu_erf": "geglu_erf", "gelu_tanh": "geglu_tanh", "quick_gelu": "quick_geglu"}


def _class(gate: Callable[..., Tensor] | None = None, act_fn: Any = None, **flags: Any) -> Any:
    """A decorated experts class with a gate of its own, and attributes `limit`, `alpha`, `beta`, `sizes`."""
    from transformers.integrations.moe import use_experts_implementation

    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = E
            width = 2 * F if flags.get("has_gate", True) else F
            first = "gate_up_proj" if flags.get("has_gate", True) else "up_proj"
            setattr(self, first, nn.Parameter(torch.empty(E, width, H)))
            self.down_proj = nn.Parameter(torch.empty(E, H, F))
            self.act_fn, self.limit, self.alpha, self.beta, self.sizes = act_fn, 5.5, 1.25, 0.5, [2.0]

        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            raise AssertionError("eager")

    if gate is not None:
        setattr(Experts, "_apply_gate", gate)  # noqa: B010
    return use_experts_implementation(**flags)(Experts)


def _module(gate: Callable[..., Tensor] | None = None, act_fn: Any = None, **flags: Any) -> Any:
    return filled(_class(gate, act_fn, **flags)(SimpleNamespace(_experts_implementation="jax_grouped")), 0)


def _found(gate: Callable[..., Tensor] | None = None, act_fn: Any = None, *, gated: bool = True) -> Activation:
    return recognised("Experts", gated, facts_of(_module(gate, act_fn, has_gate=gated), gated=gated))


# ---- activations of the host


@pytest.mark.parametrize("name", ACT2FN)
def test_activations_of_the_host(transformers: Any, name: str) -> None:
    act_fn = transformers.activations.ACT2FN[name]
    kind = ACT2FN[name]
    assert _found(act_fn=act_fn, gated=False) == Activation(kind)
    if kind in GATED:
        assert _found(act_fn=act_fn) == Activation(GATED[kind])
    else:
        with refused(NotImplementedError, ["`_apply_gate` of Experts", "values are those of none", "swiglu"]):
            _found(act_fn=act_fn)


@pytest.mark.parametrize("name", OTHERS)
def test_other_activations_are_refused(transformers: Any, name: str) -> None:
    act_fn = transformers.activations.ACT2FN[name]
    for gated in (False, True):
        with refused(NotImplementedError, ["of Experts", "expected one of", "set_experts_implementation"]):
            _found(act_fn=act_fn, gated=gated)


def test_functions_as_activations(transformers: Any) -> None:
    assert _found(act_fn=torch.nn.functional.silu) == Activation("swiglu")
    assert _found(act_fn=torch.relu, gated=False) == Activation("relu")
    with refused(NotImplementedError, ["`act_fn` of Experts", "no function or module"]):
        _found(act_fn=SimpleNamespace(), gated=False)


# ---- gates of a model's own


def _clamped(self: Any, rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
    return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


def _interleaved(self: Any, rows: Tensor) -> Tensor:
    return torch.nn.functional.silu(rows[..., ::2]) * rows[..., 1::2]


def _in_float32(self: Any, rows: Tensor) -> Tensor:
    gate, up = rows.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up.to(torch.float32)).to(rows.dtype)


def test_gates_of_a_model(transformers: Any) -> None:
    assert _found(_clamped) == Activation("clamped_qgeglu", limit=5.5, alpha=1.25, offset=1.0)
    assert _found(_interleaved) == Activation("swiglu", interleave=1)
    assert _found(_in_float32) == Activation("swiglu")


def test_a_changed_number_is_seen(transformers: Any) -> None:
    module = _module(_clamped)
    for limit in (5.5, 7, 0.75):
        module.limit = limit
        assert recognised("Experts", True, facts_of(module, gated=True)).limit == limit


def _clamped_above(self: Any, rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    gate, up = gate.clamp(max=self.limit), up.clamp(max=self.limit)
    return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


def test_gates_are_compared_beyond_their_clamps(transformers: Any) -> None:
    for gate in (_clamped, _clamped_above):
        module = _module(gate)
        module.limit = 400.0
        facts = facts_of(module, gated=True)
        if gate is _clamped:
            assert recognised("Experts", True, facts).limit == 400.0
        else:
            with refused(NotImplementedError, ["`_apply_gate` of Experts", "with the numbers [1.25, 400.0]"]):
                recognised("Experts", True, facts)


def test_what_the_code_does_not_say_is_not_guessed(transformers: Any) -> None:
    hooked = torch.nn.SiLU()
    hooked.register_forward_hook(lambda module, given, found: 2 * found)
    doubled = functools.partial(lambda a, x=None: torch.nn.functional.silu(a if x is None else a * x), 2.0)
    for act_fn in (hooked, doubled):
        with refused(NotImplementedError, ["`act_fn` of Experts"]):
            _found(None, act_fn, gated=False)


def test_constants_of_a_class_are_read(transformers: Any) -> None:
    module = _module(_clamped)
    del module.limit
    type(module).limit = 3.0
    assert recognised("Experts", True, facts_of(module, gated=True)).limit == 3.0
    type(module).limit = property(lambda self: 3.0)
    with refused(NotImplementedError, ["it reads `limit`"]):
        recognised("Experts", True, facts_of(module, gated=True))


def _swapped(self: Any, rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return gate * torch.nn.functional.silu(up)


def _clamped_below(self: Any, rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    gate, up = gate.clamp(min=-self.limit, max=self.limit), up.clamp(min=-self.limit, max=self.limit)
    return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


def _nearly(self: Any, rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up * (1 + 1e-9)


def _of_the_configuration(self: Any, rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.clamp(max=self.config.limit)) * up


def _of_a_weight(self: Any, rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up * (self.down_proj.sum() * 0 + 1)


def _of_a_list(self: Any, rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up * self.sizes[0] / 2


def _narrow(self: Any, rows: Tensor) -> Tensor:
    return torch.nn.functional.silu(rows)


def _in_bfloat16(self: Any, rows: Tensor) -> Tensor:
    gate, up = rows.bfloat16().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize(
    ("gate", "reason"),
    [
        (_swapped, "values are those of none"),
        (_clamped_below, "with the numbers [1.25, 5.5]"),
        (_nearly, "values are those of none"),
        (_of_the_configuration, "it reads `config`"),
        (_of_a_weight, "it reads `down_proj`"),
        (_of_a_list, "it reads `sizes`"),
        (_narrow, "it gives shape"),
        (_in_bfloat16, "torch.bfloat16"),
    ],
)
def test_other_gates_are_refused(registered: Any, gate: Any, reason: str) -> None:
    module = _module(gate)
    p = problem(module)
    with refused(NotImplementedError, ["`_apply_gate` of Experts", reason, "expected one of", "choose another"]):
        module(p.x, p.ids, p.weights)


def test_a_gate_or_an_activation_replaced_on_the_instance_is_refused(registered: Any) -> None:
    module = _module(None, nn.SiLU())
    module._apply_gate = lambda rows: rows
    p = problem(module)
    with refused(NotImplementedError, ["`_apply_gate` of Experts", "no function or module of its class alone"]):
        module(p.x, p.ids, p.weights)
    module = _module(None, nn.SiLU())
    module.act_fn.forward = torch.tanh
    with refused(NotImplementedError, ["`_apply_gate` of Experts", "it reads `act_fn`"]):
        module(p.x, p.ids, p.weights)


def test_kinds_differ_on_the_probe() -> None:
    """Recognition takes the first kind that matches, so no two may match with their default parameters."""
    from torch_bridge.integrations import _activations

    for gated in (False, True):
        rows = _activations._probe(gated, [])
        for name, kind in KINDS.items():
            if kind.gated is not gated:
                continue
            columns = rows.shape[1] // 2 if gated else rows.shape[1]
            a, u = rows[:, :columns], rows[:, columns:] if gated else rows
            t = kind.formula({**kind.defaults, **kind.fixed}, a, u).t
            matching = [
                each.kind for each in _activations._candidates(gated, []) if _activations._matches(each, rows, t)
            ]
            assert matching == [name]


# ---- flags and layouts


def test_a_layout_that_contradicts_the_gate_is_refused(registered: Any) -> None:
    for gate, concatenated in ((_interleaved, True), (_in_float32, False)):
        module = _module(gate, is_concatenated=concatenated)
        p = problem(module)
        with refused(
            NotImplementedError, ["`is_concatenated` of Experts", f"{concatenated}, but", "expected one order"]
        ):
            module(p.x, p.ids, p.weights)


def test_parameters_of_a_later_release_are_refused(registered: Any) -> None:
    module = _module(None, nn.SiLU())
    module.gate_up_proj_scale = nn.Parameter(torch.ones(E))
    p = problem(module)
    with refused(NotImplementedError, ["parameters of Experts", "`gate_up_proj_scale`", "expected only", "choose"]):
        module(p.x, p.ids, p.weights)


def test_flags_of_a_later_release_are_refused(transformers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import moe

    def later(
        experts_class: Any = None, *, experts_interface: Any = None, has_bias: bool = False, squared: bool = False
    ) -> Any:
        return experts_class

    module = _module(None, nn.SiLU())
    monkeypatch.setattr(moe, "use_experts_implementation", later)
    p = problem(module)
    with register():
        y = module(p.x, p.ids, p.weights)
        module.squared = False
        bitwise(module(p.x, p.ids, p.weights), y)
        module.squared = True
        with refused(NotImplementedError, ["`squared` of Experts", "True", "expected False", "choose another"]):
            module(p.x, p.ids, p.weights)


# ---- registration


@pytest.mark.rule("HST-3")
def test_the_last_call_wins_and_undo_gives_back(transformers: Any) -> None:
    table = transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS

    assert "jax_grouped" not in table
    first = register()
    assert first.replaced == ('transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS["jax_grouped"]: nothing',)
    one = table["jax_grouped"]
    second = register(residuals="save_input")
    assert "register(residuals=" in second.replaced[0]
    assert table["jax_grouped"] is not one
    second.undo()
    second.undo()
    assert table["jax_grouped"] is one
    third = register()
    first.undo()
    assert "jax_grouped" in table, "the latest call is in force, whatever became of earlier ones"
    third.undo()
    assert "jax_grouped" not in table
    with register() as held:
        assert "jax_grouped" in table
        assert len(held.replaced) == 1
    assert "jax_grouped" not in table


@pytest.mark.rule("HST-3")
def test_undo_gives_back_a_function_of_others(transformers: Any) -> None:
    table = transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS

    def theirs(*_: Any) -> None: ...

    table["jax_grouped"] = theirs
    with register() as held:
        assert f"{__name__}.theirs" in held.replaced[0]
        assert table["jax_grouped"] is not theirs
    assert table["jax_grouped"] is theirs
    del table["jax_grouped"]


@pytest.mark.rule("HST-3")
def test_an_older_release_with_fixed_names_lets_ours_pass(transformers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases before 5.7 compare the name with a list of their own; it is replaced as well, and given back."""
    base = transformers.PreTrainedModel

    def fixed(self: Any, requested_experts: str | None) -> str:
        if requested_experts not in (None, "eager", "grouped_mm", "batched_mm"):
            raise ValueError(f"{requested_experts} is not supported")
        return requested_experts or "eager"

    monkeypatch.setattr(base, "get_correct_experts_implementation", fixed)
    made = model("Olmoe")
    with register() as outer:
        assert (
            outer.replaced[1] == "transformers.PreTrainedModel.get_correct_experts_implementation: its check of names"
        )
        with register() as inner:
            assert inner.replaced[1] == outer.replaced[1]
            made.set_experts_implementation("jax_grouped")
        made.set_experts_implementation("eager")
        made.set_experts_implementation("jax_grouped")
        with pytest.raises(ValueError, match="others is not supported"):
            made.set_experts_implementation("others")
    assert base.get_correct_experts_implementation is fixed
    made.set_experts_implementation("eager")
    with pytest.raises(ValueError, match="jax_grouped is not supported"):
        made.set_experts_implementation("jax_grouped")


def test_options_are_checked(transformers: Any) -> None:
    with refused(TypeError, ["`recipe` of register", "str", "expected a Recipe"]):
        register(recipe="FP8Block")
    with refused(ValueError, ["`residuals`", "'none'", "save_fc1", "choose"]):
        register(residuals="none")
    with refused(ValueError, ["`implementation`", "3", "a kernel's name", "`explain`"]):
        register(implementation=3)


def test_options_reach_the_operation(transformers: Any) -> None:
    module = experts_module(families()[0])
    p = problem(module)
    with register(implementation="no_such_kernel"):
        module.config._experts_implementation = "jax_grouped"
        with pytest.raises((ValueError, NotImplementedError), match="no_such_kernel"):
            module(p.x, p.ids, p.weights)
    with register():
        ours = results(module, p, "jax_grouped")
    rows = {}
    for residuals in POLICIES:
        with register(residuals=residuals), saved_tensors() as kept:
            for name, each in results(module, p, "jax_grouped").items():
                bitwise(each, ours[name], name)
        rows[residuals] = sum(each.dim() == 2 and each.shape[0] == T * K and each.is_floating_point() for each in kept)
    assert rows == {"save_all": 2, "save_fc1": 1, "save_input": 0}


def test_without_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "transformers.integrations", None)
    with refused(ImportError, ["transformers.integrations.moe", "expected transformers 5 or later", "install"]):
        register()
