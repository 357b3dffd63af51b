"""`nn.Sequential`: what runs as one operation and why not, what it hands to whom (contracts.md, MLP-6 and BUF-5, 6)."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from grouped_core.activations import Activation
from tests import asserts, cases
from tests.torch_frontend.nn_tools import setup
from tests.torch_frontend.torch_tools import counted_launches, leaf, manual_seed
from torch_bridge import FP32, FP8Block, nn

G, H, F = 5, 16, 24


def _linear(k: int, n: int, **options: Any) -> nn.GroupedLinear:
    return nn.GroupedLinear(options.pop("groups", G), k, n, bias=options.pop("bias", False), **options)


def _layers(**changed: Any) -> list[Any]:
    made = {"fc1": lambda: _linear(H, 2 * F), "act": nn.ScaledSwiGLU, "fc2": lambda: _linear(F, H)} | changed
    return [make() for make in made.values()]


REASONS: dict[str, tuple[Any, list[str]]] = {
    "nothing": (lambda: [_linear(H, H), _linear(H, H)], ["no GroupedLinear, ScaledActivation, GroupedLinear"]),
    "groups": (lambda: _layers(fc2=lambda: _linear(F, H, groups=4)), ["5 and 4 groups"]),
    "width": (lambda: _layers(fc1=lambda: _linear(H, F)), ["gives 24 columns, expected 48", "swiglu"]),
    "ends": (lambda: _layers(fc2=lambda: _linear(F, H + 1)), ["16 columns in and 17 out"]),
    "first_bias": (lambda: _layers(fc1=lambda: _linear(H, 2 * F, bias=True, scale_bias=True)), ["`scale_bias`"]),
    "second_bias": (lambda: _layers(fc2=lambda: _linear(F, H, bias=True)), ["not weighted", "`scale_bias=True`"]),
    "recipe": (lambda: _layers(fc2=lambda: _linear(F, H, recipe=FP32)), ["`recipe` differs"]),
    "main_grad": (
        lambda: _layers(fc2=lambda: _linear(F, H, accumulate_into_main_grad=True)),
        ["`accumulate_into_main_grad` differs"],
    ),
    "dtype": (
        lambda: _layers(fc2=lambda: _linear(F, H, dtype=torch.bfloat16)),
        ["torch.float32 and torch.bfloat16"],
    ),
    "adapter": (lambda: _layers(fc1=lambda: _linear(H, 2 * F, lora_rank=2)), ["a gradient beside an adapter"]),
    "hooks": (lambda: _layers(act=lambda: _hooked(nn.ScaledSwiGLU())), ["ScaledSwiGLU has hooks"]),
    "forward": (lambda: _layers(act=_Doubled), ["_Doubled has a `forward` of its own"]),
    "forward_of_one": (lambda: _layers(fc2=lambda: _replaced(_linear(F, H))), ["has a `forward` of its own"]),
}


class _Doubled(nn.ScaledSwiGLU):
    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return 2 * super().forward(*arguments, **keywords)


def _replaced(module: torch.nn.Module) -> torch.nn.Module:
    inner = module.forward
    module.forward = lambda *arguments, **keywords: 2 * inner(*arguments, **keywords)
    return module


def _hooked(module: torch.nn.Module) -> torch.nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.rule("ERR-2", "MLP-6")
@pytest.mark.parametrize("name", REASONS)
def test_why_unsupported_and_always_agree(name: str) -> None:
    make, fragments = REASONS[name]
    reason = nn.Sequential(*make()).why_unsupported()
    assert reason is not None
    for fragment in fragments:
        assert fragment in reason, reason
    with asserts.refused(NotImplementedError, ["`fuse` of Sequential", "'always'", *fragments, "fuse='auto'"]):
        nn.Sequential(*make(), fuse="always")


@pytest.mark.rule("ERR-2")
def test_none_where_all_is_fused() -> None:
    fused = nn.Sequential(*_layers(), fuse="always")
    assert fused.why_unsupported() is None
    twice = nn.Sequential(*_layers(), torch.nn.Identity(), *_layers(), fuse="always")
    assert twice.why_unsupported() is None
    meta = [each.to("meta") for each in _layers()]
    assert nn.Sequential(*meta).why_unsupported() is None, "it needs no weights"


def _calls(module: Any, x: Tensor, *extra: Any) -> list[str]:
    with counted_launches() as calls, torch.no_grad():
        module(x, *extra)
    return calls


@pytest.mark.rule("MLP-6", "MLP-8", "ERR-3")
@pytest.mark.parametrize("bias", [False, True])
def test_fused_and_composed_give_the_same(bias: bool) -> None:
    """On the CPU bit by bit, y and every gradient."""
    found = []
    for fuse in ("always", "never"):
        manual_seed(1)
        layers = _layers(
            fc1=lambda: _linear(H, 2 * F, bias=bias), fc2=lambda: _linear(F, H, bias=bias, scale_bias=bias)
        )
        module = nn.Sequential(*layers, fuse=fuse)
        s = setup("GroupedMLP", True)
        x, probs = leaf(s.x[:, :H]), leaf(s.probs)
        extra = (s.sizes, probs, s.sizes, probs) if bias else (s.sizes, probs, s.sizes)
        calls = _calls(module, x, *extra)
        assert ("grouped_matmul_act" in calls) == (fuse == "always"), calls
        y = module(x, *extra)
        y.backward(s.dy)
        found.append([y, x.grad, probs.grad, *(each.grad for each in module.parameters())])
    for at, (got, expected) in enumerate(zip(*found, strict=True)):
        asserts.bitwise(got, expected, f"result {at}")


@pytest.mark.rule("GRP-5")
def test_the_composed_activation_reads_no_tail() -> None:
    case = cases.named("tail")
    s = setup("Sequential_composed", True, case="tail")
    seen: list[Tensor] = []
    second = s.module[2]
    original = second.forward
    second.forward = lambda z, *rest, **keywords: seen.append(z) or original(z, *rest, **keywords)
    s.run(s.x)
    asserts.zero(seen[0][case.valid :])


@pytest.mark.rule("MLP-6")
def test_a_plain_bias_of_the_second_layer_keeps_its_meaning() -> None:
    layers = _layers(fc2=lambda: _linear(F, H, bias=True))
    module = nn.Sequential(*layers)
    s = setup("GroupedMLP", True)
    y = module(s.x, s.sizes, s.probs, s.sizes)
    z = layers[1](layers[0](s.x, s.sizes), s.probs)
    asserts.bitwise(y, layers[2](z, s.sizes))


@pytest.mark.rule("MLP-6")
@pytest.mark.parametrize("fuse", ["auto", "never"])
def test_sizes_and_probabilities_of_an_mlp_are_the_same_objects(fuse: str) -> None:
    s = setup("GroupedMLP", True)
    module = nn.Sequential(*_layers(fc2=lambda: _linear(F, H, bias=True, scale_bias=True)), fuse=fuse)
    with asserts.refused(ValueError, ["`group_sizes` of modules 0 and 2", "different objects", "one tensor"]):
        module(s.x, s.sizes, s.probs, s.sizes.clone(), s.probs)
    with asserts.refused(ValueError, ["`probs` of modules 0 and 2", "different objects"]):
        module(s.x, s.sizes, s.probs, s.sizes, s.probs.clone())
    with asserts.refused(ValueError, ["module 2 has `scale_bias`", "None", "probabilities"]):
        module(s.x, s.sizes, None, s.sizes, None)
    sizes = s.sizes.tolist()  # host integers are compared
    asserts.bitwise(module(s.x, sizes, s.probs, list(sizes), s.probs), module(s.x, s.sizes, s.probs, s.sizes, s.probs))
    with asserts.refused(ValueError, ["`group_sizes`", "different"]):
        module(s.x, sizes, s.probs, sizes[::-1], s.probs)


@pytest.mark.rule("MLP-6")
@pytest.mark.parametrize("fuse", ["auto", "never"])
def test_layers_that_cannot_be_an_mlp_take_sizes_of_their_own(fuse: str) -> None:
    """Eight rows of two groups, then the same rows of four groups."""
    layers = _layers(fc1=lambda: _linear(H, 2 * F, groups=2), fc2=lambda: _linear(F, H, groups=4))
    x, two, four = torch.randn(8, H), torch.tensor([5, 3]), torch.tensor([1, 3, 0, 4])
    y = nn.Sequential(*layers, fuse=fuse)(x, two, torch.ones(8), four)
    asserts.bitwise(y, layers[2](layers[1](layers[0](x, two), torch.ones(8)), four))


def test_extras_are_counted() -> None:
    s = setup("GroupedMLP", True)
    module = nn.Sequential(torch.nn.Identity(), *_layers(), nn.GroupedMLP(G, H, F))
    with asserts.refused(TypeError, ["`extra` of Sequential: 2", "expected 5", "GroupedLinear takes 1", "order"]):
        module(s.x, s.sizes, s.probs)
    assert module(s.x, s.sizes, s.probs, s.sizes, s.sizes, s.probs).shape == s.x.shape
    nested = nn.Sequential(nn.Sequential(*_layers()), torch.nn.Identity())
    asserts.bitwise(nested(s.x, s.sizes, s.probs, s.sizes), nested[0](s.x, s.sizes, s.probs, s.sizes))


@pytest.mark.rule("MLP-8", "ERR-3")
def test_a_forward_of_its_own_is_called() -> None:
    s = setup("GroupedMLP", True)
    for layers in (_layers(act=_Doubled), _layers(fc2=lambda: _replaced(_linear(F, H)))):
        found, apart = (nn.Sequential(*layers, fuse=fuse)(s.x, s.sizes, s.probs, s.sizes) for fuse in ("auto", "never"))
        asserts.bitwise(found, apart)


@pytest.mark.rule("MLP-8", "ERR-3")
@pytest.mark.parametrize("fuse", ["auto", "never"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_forward_of_one_activation_is_called(fuse: str, dtype: torch.dtype) -> None:
    """Whatever the dtype of sizes, which kernels read directly if it is int32."""
    s = setup("GroupedMLP", True)
    layers = _layers(act=lambda: _replaced(nn.ScaledSwiGLU()))
    sizes = s.sizes.to(dtype)
    h = 2 * nn.ScaledSwiGLU()(layers[0](s.x, sizes), s.probs)
    asserts.bitwise(nn.Sequential(*layers, fuse=fuse)(s.x, sizes, s.probs, sizes), layers[2](h, sizes))


HOOKS = ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook")


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("at", range(3))
def test_hooks_that_come_later_are_called(at: int, kind: str) -> None:
    """The layers run by themselves from then on, and `always` says so instead."""
    s = setup("GroupedMLP", True)
    layers = _layers()
    auto, always = nn.Sequential(*layers), nn.Sequential(*layers, fuse="always")
    asserts.bitwise(auto(s.x, s.sizes, s.probs, s.sizes), always(s.x, s.sizes, s.probs, s.sizes))
    seen: list[int] = []
    getattr(layers[at], f"register_{kind}")(lambda *_: seen.append(1))
    auto(leaf(s.x), s.sizes, s.probs, s.sizes).sum().backward()
    assert len(seen) == 1
    with asserts.refused(NotImplementedError, ["has hooks"]):
        always(s.x, s.sizes, s.probs, s.sizes)


@pytest.mark.rule("DLY-2", "DLY-3", "DLY-6")
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_a_module_held_twice_is_drained_once_per_call(nested: bool) -> None:
    """Each of its passes has left an entry: a call takes the oldest alone and calls its hooks once."""
    twice, other = (_linear(H, H, delay_wgrad_compute=True) for _ in range(2))
    module = nn.Sequential(twice, other, nn.Sequential(twice, torch.nn.Tanh()) if nested else twice)
    s = setup("GroupedMLP", True)
    fired: list[int] = []
    twice.register_wgrad_accumulation_and_reduce_hooks(lambda: fired.append(1))
    module(leaf(s.x[:, :H]), s.sizes, s.sizes, s.sizes).sum().backward()
    assert (module.pending_wgrads(), twice.pending_wgrads(), other.pending_wgrads()) == (2, 2, 1)
    module.backward_dw()
    assert (module.pending_wgrads(), other.pending_wgrads(), len(fired)) == (1, 0, 1)
    first = [weight.grad.clone() for weight in twice.weight_parameters()]
    module.backward_dw()
    assert (module.pending_wgrads(), len(fired)) == (0, 2)
    assert any((weight.grad != part).any() for weight, part in zip(twice.weight_parameters(), first, strict=True))
    module.fire_wgrad_hooks()
    assert len(fired) == 3


@pytest.mark.rule("DLY-2", "DLY-5", "DLY-6")
@pytest.mark.parametrize("shared", [None, F])
def test_the_experts_of_a_moe_layer_are_drained(shared: int | None) -> None:
    moe = nn.MoE(H, F, G, 2, shared_dim=shared, delay_wgrad_compute=True)
    module, layers = nn.Sequential(torch.nn.Identity(), moe), moe.grouped_layers()
    fired: list[int] = []
    for at, layer in enumerate(layers):
        layer.register_wgrad_accumulation_and_reduce_hooks(lambda at=at: fired.append(at))
    module(torch.randn(6, H))[0].sum().backward()
    assert (module.pending_wgrads(), moe.pending_wgrads()) == (1, 1)
    module.backward_dw()
    assert (module.pending_wgrads(), moe.pending_wgrads()) == (0, 0)
    assert all(each.grad is not None for each in moe.parameters())
    assert fired == [*range(len(layers))]
    module.fire_wgrad_hooks()
    assert fired == [*range(len(layers))] * 2


def test_the_caches_of_a_moe_layer_are_told() -> None:
    moe = nn.MoE(128, 128, 2, 1, recipe=FP8Block)
    module = nn.Sequential(moe)
    x = torch.randn(4, 128)
    with asserts.refused(RuntimeError, ["is_first_microbatch"]):
        module(x, is_first_microbatch=False)
    module(x, is_first_microbatch=True)
    y, _ = module(x, is_first_microbatch=False)
    module.set_weight_update(False)
    with torch.no_grad():
        for each in moe.experts.parameters():
            each.zero_()
    asserts.bitwise(module(x)[0], y, "the weights are not quantised again")


@pytest.mark.parametrize(
    ("call", "kind", "fragments"),
    [
        (lambda: nn.Sequential(fuse="yes"), ValueError, ["`fuse` of Sequential", "'yes'", "auto, always, never"]),
        (lambda: nn.Sequential(torch.relu), TypeError, ["module 0 of Sequential", "builtin", "torch.nn.Module"]),
    ],
)
def test_mistakes(call: Any, kind: type[Exception], fragments: list[str]) -> None:
    with asserts.refused(kind, fragments):
        call()


def test_an_interleaved_activation_is_fused_too() -> None:
    s = setup("GroupedMLP", True)
    layers = _layers(act=lambda: nn.ScaledActivation(Activation("swiglu", interleave=4)))
    fused, composed = nn.Sequential(*layers, fuse="always"), nn.Sequential(*layers, fuse="never")
    asserts.bitwise(fused(s.x, s.sizes, s.probs, s.sizes), composed(s.x, s.sizes, s.probs, s.sizes))


def _changes(module: Any) -> list[Any]:
    """Ways to change what a Sequential of three layers holds, one after the other."""
    return [
        lambda: module.add_module("3", torch.nn.Tanh()),
        lambda: setattr(module, "1", nn.ScaledSReLU()),
        lambda: delattr(module, "3"),
        lambda: module._modules.update({"1": torch.nn.Sigmoid()}),
        lambda: module.add_module("3", nn.GroupedLinear(G, H, H)),
    ]


@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_changes_of_its_modules_are_seen(nested: bool, copied: Any) -> None:
    """At the first pass, at later ones, and by what holds it."""
    s = setup("GroupedMLP", True)
    inner = nn.Sequential(_linear(H, 2 * F), nn.ScaledSwiGLU(), _linear(2 * F, H))
    outer = copied(nn.Sequential(torch.nn.Identity(), inner, torch.nn.Identity()) if nested else inner)
    inner = outer[1] if nested else outer
    inner.add_module("1", torch.nn.Tanh())
    assert not any("_plan" in name for name in outer.state_dict())
    for change in (lambda: None, *_changes(inner)):
        change()
        extra: list[Any] = [s.sizes if isinstance(each, nn.GroupedLinear) else s.probs for each in inner if _ours(each)]
        wanted, rest = s.x, iter(extra)
        for each in inner:
            wanted = each(wanted, *([next(rest)] if _ours(each) else []))
        asserts.bitwise(outer(s.x, *extra), wanted)


def _ours(module: Any) -> bool:
    return isinstance(module, (nn.GroupedLinear, nn.ScaledActivation))
