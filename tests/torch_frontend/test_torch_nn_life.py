"""The life of the modules: copies, pickles, checkpoints of either form, the meta device (docs/contracts.md)."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

from tests import asserts
from tests.torch_frontend.nn_tools import MODULES, parameters_of, setup
from torch_bridge import MXFP8, FP8Delayed, nn

G, K, N = 3, 5, 4


def _layer(weight: bool, bias: bool | None, **options: Any) -> Any:
    """weight, bias: whether one parameter holds all groups; bias None: there is no bias."""
    return nn.GroupedLinear(
        G, K, N, bias=bias is not None, single_grouped_weight=weight, single_grouped_bias=bool(bias), **options
    )


def _packed(layer: nn.GroupedLinear, kind: str) -> torch.Tensor:
    members: Any = layer.weights(layer.weight_parameters(), torch.float32) if kind == "weight" else layer.biases()
    return (members if isinstance(members, torch.Tensor) else torch.stack(members)).detach()


def _pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


def _saved(module: Any) -> Any:
    memory = io.BytesIO()
    torch.save(module, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, _pickled, _saved], ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("form", MODULES)
def test_copies_compute_the_same_and_have_a_queue_of_their_own(form: str, copied: Any, listed: bool) -> None:
    s = setup(form, listed, delay=True)
    s.backward()
    fired: list[int] = []
    for linear in s.linears:
        linear.register_wgrad_accumulation_and_reduce_hooks(lambda: fired.append(1))
    if copied in (_pickled, _saved):  # hooks and pending gradients stay behind, whatever they hold
        for linear in s.linears:
            linear.register_wgrad_accumulation_and_reduce_hooks(lambda: None)
    made = copied(s.module)
    extra = {"GroupedLinear": (s.sizes,), "GroupedMLP": (s.sizes, s.probs)}.get(form, (s.sizes, s.probs, s.sizes))
    asserts.bitwise(made(s.x, *extra), s.run(s.x))
    if copied is copy.copy:  # shares everything
        assert made.pending_wgrads() == 1
        return
    assert made.pending_wgrads() == 0
    made.fire_wgrad_hooks()
    assert not fired
    assert s.module.pending_wgrads() == 1


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("form", MODULES)
def test_the_meta_device_gives_shapes_and_then_a_module(form: str, listed: bool) -> None:
    s = setup(form, listed)
    made = copy.deepcopy(s.module).to("meta")
    sizes, probs = s.sizes.to("meta"), s.probs.to("meta")
    extra = {"GroupedLinear": (sizes,), "GroupedMLP": (sizes, probs)}.get(form, (sizes, probs, sizes))
    y = made(s.x.to("meta"), *extra)
    assert y.device.type == "meta"
    assert y.shape == s.dy.shape
    made.to_empty(device="cpu").load_state_dict(s.module.state_dict())
    assert all(each.grad is None for each in made.parameters())
    for a, b in zip(made.parameters(), s.module.parameters(), strict=True):
        asserts.bitwise(a, b)


def test_meta_parameters_cost_nothing() -> None:
    layer = nn.GroupedMLP(256, 7168, 2048, device="meta", dtype=torch.bfloat16)
    assert all(each.is_meta for each in layer.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints: the rows of the table


@pytest.mark.rule("CKP-1")
@pytest.mark.parametrize(
    ("row", "model", "file"),
    [
        (1, (True, None), (False, None)),
        (2, (True, True), (False, False)),
        (3, (False, None), (True, None)),
        (4, (False, False), (True, True)),
        (6, (True, True), (True, True)),
        (6, (False, False), (False, False)),
        (2, (True, False), (False, True)),  # weight and bias are independent
    ],
    ids=["row1", "row2", "row3", "row4", "row6_grouped", "row6_indexed", "row2_weight_alone"],
)
@pytest.mark.parametrize("assign", [False, True])
def test_rows_1_to_6_load(row: int, model: Any, file: Any, assign: bool) -> None:
    source, target = _layer(*file), _layer(*model)
    state = {f"part.{name}": value.clone() for name, value in source.state_dict().items()}
    before = dict(state)
    holder = torch.nn.Module()
    holder.part = target
    holder.load_state_dict(state, assign=assign)
    assert state.keys() == before.keys(), "the caller's dict was changed"
    for kind in ("weight", "bias") if model[1] is not None else ("weight",):
        asserts.bitwise(_packed(target, kind), _packed(source, kind), f"row {row}: {kind}")


@pytest.mark.rule("CKP-1")
def test_row_5_without_a_bias_leaves_bias_keys_alone() -> None:
    state = _layer(True, True).state_dict()
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"bias"'):
        _layer(False, None).load_state_dict(state)
    found = _layer(False, None).load_state_dict(state, strict=False)
    assert found.unexpected_keys == ["bias"]
    found = _layer(True, None).load_state_dict(_layer(False, False).state_dict(), strict=False)
    assert found.unexpected_keys == [f"bias{g}" for g in range(G)]


@pytest.mark.rule("CKP-3")
@pytest.mark.parametrize("grouped", [False, True])
def test_row_6_both_forms_are_refused(grouped: bool) -> None:
    state = {**_layer(True, None).state_dict(), **_layer(False, None).state_dict()}
    with asserts.refused(ValueError, ["both `weight` and `weight0`", "expected one", "remove"]):
        _layer(grouped, None).load_state_dict(state)


@pytest.mark.rule("CKP-1", "CKP-3")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_row_7_an_incomplete_set_is_refused(kind: str, strict: bool) -> None:
    state = _layer(False, False).state_dict()
    del state[f"{kind}1"]
    with asserts.refused(ValueError, [f"`{kind}`", "2 of 3 groups", "missing 1", "complete"]):
        _layer(True, True).load_state_dict(state, strict=strict)


def _several(form: str, grouped: bool, **options: Any) -> Any:
    """A module of several grouped layers, and the path of the last one."""
    options["single_grouped_weight"] = grouped
    if form == "MoE":
        return nn.MoE(K, 2 * N, G, 1, shared_dim=N, **options), "shared.linear_fc2."
    if form == "GroupedMLP":
        return nn.GroupedMLP(G, K, N, **options), "linear_fc2."
    return nn.Sequential(*(nn.GroupedLinear(G, K, K, **options) for _ in range(2))), "1."


@pytest.mark.rule("CKP-1", "CKP-3")
@pytest.mark.parametrize("recipe", [None, FP8Delayed], ids=["plain", "state"])
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("form", ["GroupedMLP", "MoE", "Sequential"])
def test_what_the_last_layer_refuses_leaves_the_others_as_they_are(
    form: str, strict: bool, assign: bool, recipe: Any
) -> None:
    for grouped in (False, True):
        model, last = _several(form, grouped, recipe=recipe)
        other, _ = _several(form, not grouped, recipe=recipe)
        state = {f"part.{name}": torch.full_like(value, 2) for name, value in other.state_dict().items()}
        holder = torch.nn.ModuleDict({"part": model})
        before = {name: value.clone() for name, value in holder.state_dict().items()}
        own, first = f"part.{last}weight", next(name for name in state if name.startswith(f"part.{last}weight"))
        faults = [({**state, own: torch.zeros(2), f"{own}0": torch.zeros(2)}, f"both `{own}` and `{own}0`")]
        if not grouped:
            faults.append(({**state, first: torch.zeros(7)}, f"cannot split checkpoint tensor `{own}`"))
        elif f"{own}1" in state:  # a shared expert has no second group
            faults.append(({name: each for name, each in state.items() if name != f"{own}1"}, "2 of 3 groups"))
        for given, words in faults:
            with asserts.refused(ValueError, [words, "expected"]):
                holder.load_state_dict(given, strict=strict, assign=assign)
            for name, value in holder.state_dict().items():
                asserts.bitwise(value, before[name], name)
        holder.load_state_dict(state, assign=assign)
        assert all((value == 2).all() for value in holder.state_dict().values())


@pytest.mark.rule("CKP-1")
@pytest.mark.parametrize("grouped", [False, True])
def test_quantised_weights_of_the_last_layer_are_checked_before_the_first_is_loaded(grouped: bool) -> None:
    options: dict[str, Any] = {"recipe": MXFP8, "quantized_weights": True, "dtype": torch.bfloat16}
    model, other = (nn.GroupedMLP(G, 32, 32, single_grouped_weight=each, **options) for each in (grouped, not grouped))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = other.state_dict()
    lost = next(name for name in state if name.startswith("linear_fc2.") and name.endswith(".other.scales"))
    for given in (
        {name: each for name, each in state.items() if not name.endswith("other.scales") or "fc1" in name},
        {**state, lost: state[lost].view(torch.uint8)[..., :-1]},
    ):
        with asserts.refused(ValueError, ["`linear_fc2.weight", "expected"]):
            model.load_state_dict(given)
        for name, value in model.state_dict().items():
            asserts.bitwise(value, before[name], name)
    model.load_state_dict(state)


@pytest.mark.rule("CKP-1")
def test_hooks_may_still_mend_what_a_layer_would_refuse() -> None:
    model, other = nn.GroupedMLP(G, K, N, single_grouped_weight=True), nn.GroupedMLP(G, K, N)
    state = other.state_dict()
    lost = state.pop("linear_fc2.weight1")

    def add(module: Any, entries: dict[str, Any], prefix: str, *_: Any) -> None:
        entries[f"{prefix}linear_fc2.weight1"] = lost

    model.register_load_state_dict_pre_hook(add)
    model.load_state_dict(state)
    asserts.bitwise(model.state_dict()["linear_fc2.weight"][1], lost)


@pytest.mark.rule("CKP-1")
def test_row_8_there_and_back_is_bit_identical() -> None:
    first = _layer(False, False)
    first.weight1.data[0, 0] = float("nan")
    grouped, back = _layer(True, True), _layer(False, False)
    grouped.load_state_dict(first.state_dict())
    back.load_state_dict(grouped.state_dict())
    for name, value in first.state_dict().items():
        asserts.bitwise(back.state_dict()[name], value, name)


@pytest.mark.rule("CKP-1")
def test_a_flat_tensor_is_cut_and_others_are_refused() -> None:
    source = _layer(True, True)
    state = {"weight": source.weight.detach().reshape(G * N, K), "bias": source.bias.detach().reshape(G * N)}
    target = _layer(False, False)
    target.load_state_dict(state)
    for kind in ("weight", "bias"):
        asserts.bitwise(_packed(target, kind), _packed(source, kind), kind)
    for shape in ((G * N * K,), (), (G + 1, N, K), (G * N + 1, K), (G, K, N)):
        wrong = {"weight": torch.zeros(shape), "bias": state["bias"]}
        with asserts.refused(
            ValueError,
            ["cannot split checkpoint tensor `weight`", str(tuple(shape)), f"({G}, {N}, {K})", f"({G * N}, {K})"],
        ):
            _layer(False, False).load_state_dict(wrong)


@pytest.mark.rule("CKP-1", "ERR-1")
def test_members_that_differ_are_named() -> None:
    state = _layer(False, False).state_dict()
    for wrong, shown in ((torch.zeros(N, K + 1), f"({N}, {K + 1})"), (None, "a NoneType")):
        bad = {**state, "weight1": wrong}
        with asserts.refused(ValueError, ["`weight1`", shown, f"expected shape ({N}, {K})", "load a checkpoint"]):
            _layer(True, True).load_state_dict(bad)


@pytest.mark.rule("CKP-2")
def test_near_miss_names_are_other_names() -> None:
    """`weight10` is not `weight1`, and a neighbour whose path has the same start keeps its own."""
    big: Any = nn.GroupedLinear(12, 2, 2, bias=False)
    packed: Any = nn.GroupedLinear(12, 2, 2, bias=False, single_grouped_weight=True)
    packed.load_state_dict(big.state_dict())
    asserts.bitwise(packed.weight[10], big.weight10)
    holder: Any = torch.nn.ModuleDict({"experts": _layer(True, None), "experts_b": _layer(False, None)})
    state = holder.state_dict()
    assert {"experts.weight", "experts_b.weight0"} <= state.keys()
    again: Any = torch.nn.ModuleDict({"experts": _layer(False, None), "experts_b": _layer(True, None)})
    again.load_state_dict(state)
    for name in holder:
        asserts.bitwise(_packed(again[name], "weight"), _packed(holder[name], "weight"), name)


@pytest.mark.rule("MLM #5487", "MLM #5464")
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("form", MODULES)
def test_evaluation_and_saving_in_between_change_nothing(form: str, listed: bool) -> None:
    """Packed weights do not drift from indexed ones, before these are loaded and after."""

    def compare(what: str) -> None:
        for a, b in zip(s.linears, other.linears, strict=True):
            asserts.bitwise(_packed(a, "weight"), _packed(b, "weight"), what)

    s, other = setup(form, listed), setup(form, not listed)
    for at in range(3):
        for one in (s, other):
            one.backward()
            with torch.no_grad():
                one.module.eval()
                one.run(one.x)
                one.module.train()
                for weight in one.weights:
                    weight -= 0.1 * weight.grad
                    weight.grad = None
        compare(f"step {at}")
        other.module.load_state_dict(s.module.state_dict())
        compare(f"step {at}, loaded")
        for linear in other.linears:
            assert all(each.requires_grad for each in parameters_of(linear))
