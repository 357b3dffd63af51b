"""One weight that is passed twice in a call: refused with accumulators, summed by autograd without (GRD-14)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch.nn import Parameter

from grouped_core.recipes import FP8Current, Recipe
from tests import asserts
from torch_bridge import grouped_linear, grouped_mlp, nn

pytestmark = [
    pytest.mark.rule("GRD-14"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Dynamo makes an instance of autograd.Function
]

K, ROWS = 32, 12
RECIPES = (None, FP8Current)
PARTS = ["expected each weight once", "one destination at a time", "autograd sums"]


def _rows(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(ROWS, K, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def _weight(seed: int, shape: tuple[int, ...] = (K, K)) -> Any:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    weight: Any = Parameter(made)
    weight.main_grad = torch.zeros(shape)
    return weight


def _linear(weights: Any, accum: Any, recipe: Recipe | None) -> Tensor:
    sizes = torch.full((len(weights),), ROWS // len(weights), dtype=torch.int32)
    return grouped_linear(_rows(), weights, sizes, wgrad_accum=accum, recipe=recipe)


def _mlp(wi: Any, wo: Any, accum: Any, recipe: Recipe | None) -> Tensor:
    sizes = torch.full((len(wi),), ROWS // len(wi), dtype=torch.int32)
    return grouped_mlp(_rows(), wi, wo, sizes, activation="gelu_tanh", wgrad_accum=accum, recipe=recipe)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name if recipe else "plain")
def test_a_parameter_twice_beside_main_grad_is_refused(recipe: Recipe | None) -> None:
    w, v = _weight(1), _weight(2)
    with asserts.refused(ValueError, ["`weight[2]`", "the same memory as `weight[0]`", *PARTS]):
        _linear([w, v, w], "main_grad", recipe)
    with asserts.refused(ValueError, ["`wi[1]`", "the same memory as `wi[0]`", *PARTS]):
        _mlp([w, w], [v, _weight(3)], "main_grad", recipe)
    with asserts.refused(ValueError, ["`wo[1]`", "the same memory as `wo[0]`", *PARTS]):
        _mlp([w, v], [_weight(3)] * 2, "main_grad", recipe)
    with asserts.refused(ValueError, ["`wo[0]`", "the same memory as `wi[1]`", *PARTS]):
        _mlp([w, v], [v, _weight(3)], "main_grad", recipe)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name if recipe else "plain")
def test_a_whole_graph_refuses_it_too(recipe: Recipe | None) -> None:
    """The message is torch's, which quotes that of this package."""
    w, v = _weight(1), _weight(2)
    x, sizes = _rows(), torch.tensor([3, 4, 5], dtype=torch.int32)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(weights: list[Any]) -> Tensor:
        return grouped_linear(x, weights, sizes, wgrad_accum="main_grad", recipe=recipe)

    run([w, v, _weight(3)])
    with pytest.raises(Unsupported, match=r"`weight\[2\]`: the same memory as `weight\[0\]`"):
        run([w, v, w])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name if recipe else "plain")
def test_a_parameter_twice_beside_tensors_is_refused(recipe: Recipe | None) -> None:
    w, v = _weight(1), _weight(2)
    new = [torch.zeros(K, K) for _ in range(4)]
    with asserts.refused(ValueError, ["`weight[1]`", "the same memory as `weight[0]`", *PARTS]):
        _linear([w, w], new[:2], recipe)
    with asserts.refused(ValueError, ["`wo[1]`", "the same memory as `wi[0]`", *PARTS]):
        _mlp([w, v], [_weight(3), w], (new[:2], new[2:]), recipe)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name if recipe else "plain")
def test_views_of_one_region_are_refused(recipe: Recipe | None) -> None:
    packed = _weight(1, (3, K, K))
    views = [packed[0], packed[1], packed[0]]
    with asserts.refused(ValueError, ["`weight[2]`", "the same memory as `weight[0]`", *PARTS]):
        _linear(views, [torch.zeros(K, K) for _ in views], recipe)
    flat = torch.zeros(2 * K * K + K, dtype=torch.bfloat16)
    overlapping = [Parameter(flat[: K * K].view(K, K)), Parameter(flat[K : K + K * K].view(K, K))]
    with asserts.refused(ValueError, ["`weight[1]`", "the same memory as `weight[0]`", *PARTS]):
        _linear(overlapping, [torch.zeros(K, K) for _ in overlapping], recipe)
    apart = [packed[0], packed[1], packed[2]]
    _linear(apart, [torch.zeros(K, K) for _ in apart], recipe).sum().backward()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name if recipe else "plain")
def test_main_grads_of_one_region_are_refused_in_backward(recipe: Recipe | None) -> None:
    w, v = _weight(1), _weight(2)
    flat = torch.zeros(2 * K * K)
    w.main_grad, v.main_grad = flat[: K * K], flat[8 : K * K + 8]
    y = _linear([w, v], "main_grad", recipe)
    with asserts.refused(
        ValueError, ["`main_grad of weight[1]`", "overlaps `main_grad of weight[0]`", "of its own", "allocate"]
    ):
        y.sum().backward()
    asserts.bitwise(flat, torch.zeros_like(flat), "what nothing was added to")


@pytest.mark.rule("BUF-2")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name if recipe else "plain")
def test_main_grads_of_both_weights_of_an_mlp_must_be_apart(recipe: Recipe | None, packed: bool) -> None:
    options: Any = {"dtype": torch.bfloat16, "bias": False, "recipe": recipe, "accumulate_into_main_grad": True}
    layer: Any = nn.GroupedMLP(2, K, K, activation="gelu_tanh", single_grouped_weight=packed, **options)
    wi, wo = layer.linear_fc1.weight_parameters(), layer.linear_fc2.weight_parameters()
    sizes, size = torch.tensor([5, 7], dtype=torch.int32), wi[0].numel()
    names = ("linear_fc1.weight", "linear_fc2.weight") if packed else ("linear_fc1.weight0", "linear_fc2.weight1")
    region = torch.zeros(4 * K * K)

    def backward(shift: int, dtype: torch.dtype = torch.float32) -> None:
        parts = region[shift : shift + len(wi) * size].view(dtype)[: len(wi) * size].split(size)
        for weight, to in zip((*wo, *wi), (*region[: len(wo) * size].split(size), *parts), strict=True):
            weight.main_grad = to
        layer(_rows(), sizes).sum().backward()

    parts = [f"`main_grad of {names[0]}`", f"overlaps `main_grad of {names[1]}`", "of its own", "allocate"]
    for _ in range(2):  # the second time with known addresses
        backward(2 * K * K)  # neighbours are fine
        region[2 * K * K :] = 7
        for shift, dtype in ((2 * K * K - 8, torch.float32), (2 * K * K - 8, torch.bfloat16)):
            with asserts.refused(ValueError, parts):
                backward(shift, dtype)
            asserts.filled(region[2 * K * K :], 7, "what nothing was added to")
    for weight in wi:
        weight.main_grad = torch.zeros(size)
    y = layer(_rows(), sizes).sum()
    y.backward(retain_graph=True)
    y.backward()  # writes the same destinations again


@pytest.mark.rule("BUF-2")
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_main_grad_in_the_memory_of_an_operand_is_refused_in_backward(packed: bool, delay: bool) -> None:
    options: Any = {"bias": False, "accumulate_into_main_grad": True, "delay_wgrad_compute": delay}
    layer: Any = nn.GroupedLinear(2, K, K, dtype=torch.bfloat16, single_grouped_weight=packed, **options)
    weights, sizes = layer.weight_parameters(), torch.tensor([5, 7], dtype=torch.int32)
    region = torch.zeros(5 * K * K, dtype=torch.bfloat16)
    x, dy, grads = region[: ROWS * K].view(ROWS, K), torch.ones(ROWS, K, dtype=torch.bfloat16), region[ROWS * K :]
    name = "weight" if packed else "weight1"

    def run(*destinations: Tensor) -> None:
        for weight, to in zip(weights, destinations, strict=True):
            weight.main_grad = to
        layer(x, sizes).backward(dy)
        layer.backward_dw()

    size = weights[0].numel()
    first = () if packed else (grads[:size],)
    run(*first, grads[size : 2 * size])  # neighbours are fine
    for to, other in ((region[8 : 8 + size], "x or dy"), (weights[-1].detach(), name)):
        with asserts.refused(ValueError, [f"`main_grad of {name}`", f"overlaps `{other}`", "of its own", "allocate"]):
            run(*first, to)
        layer.queue._entries.clear()


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name if recipe else "plain")
def test_layers_refuse_a_parameter_twice(recipe: Recipe | None, delay: bool) -> None:
    sizes = torch.tensor([5, 7], dtype=torch.int32)
    options: Any = {"dtype": torch.bfloat16, "bias": False, "recipe": recipe}
    options |= {"delay_wgrad_compute": delay, "accumulate_into_main_grad": not delay}
    layer: Any = nn.GroupedLinear(2, K, K, **options)
    layer.weight1 = layer.weight0
    beside = "`delay_wgrad_compute`" if delay else "an accumulator"
    with asserts.refused(ValueError, ["`weight[1]`", f"the same memory as `weight[0]` beside {beside}", *PARTS]):
        layer(_rows(), sizes)
    for first, second, text in ((0, 0, "`wi[1]`"), (1, 1, "`wo[1]`"), (0, 1, "`wo[1]`")):
        mlp: Any = nn.GroupedMLP(2, K, K, activation="gelu_tanh", **options)
        layers = (mlp.linear_fc1, mlp.linear_fc2)
        layers[second].weight1 = layers[first].weight0
        with asserts.refused(ValueError, [text, "the same memory as", *PARTS]):
            mlp(_rows(), sizes)


@pytest.mark.parametrize("delay", [False, True])
def test_layers_in_a_row_that_share_a_weight_run_by_themselves(delay: bool) -> None:
    """Then each is a separate call, and the second adds after the first."""
    sizes = torch.tensor([5, 7], dtype=torch.int32)
    options: Any = {"dtype": torch.bfloat16, "bias": False, "single_grouped_weight": True}
    options |= {"delay_wgrad_compute": delay, "accumulate_into_main_grad": not delay}
    layer: Any = nn.GroupedLinear(2, K, K, **options)
    rows = nn.Sequential(layer, nn.ScaledActivation("gelu_tanh"), layer)
    assert "both layers hold one weight" in str(rows.why_unsupported())
    layer.weight.main_grad = torch.zeros(2, K, K)
    rows(_rows(), sizes, None, sizes).sum().backward()
    plain: Any = nn.GroupedLinear(2, K, K, dtype=torch.bfloat16, bias=False, single_grouped_weight=True)
    plain.load_state_dict(layer.state_dict())
    expected = nn.Sequential(plain, nn.ScaledActivation("gelu_tanh"), plain, fuse="never")
    expected(_rows(), sizes, None, sizes).sum().backward()
    if delay:
        rows.backward_dw(all=True)
    got = layer.weight.grad if delay else layer.weight.main_grad.to(torch.bfloat16)
    assert torch.allclose(got.float(), plain.weight.grad.float(), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name if recipe else "plain")
def test_without_accumulators_autograd_sums(recipe: Recipe | None) -> None:
    w, v = _weight(1), _weight(2)
    twins: list[Any] = [Parameter(w.detach().clone()), Parameter(v.detach().clone()), Parameter(w.detach().clone())]
    _linear([w, v, w], None, recipe).sum().backward()
    _linear(twins, None, recipe).sum().backward()
    asserts.bitwise(w.grad, twins[0].grad + twins[2].grad, "gradient of the weight that is passed twice")
    asserts.bitwise(v.grad, twins[1].grad, "gradient of the other")


def test_a_frozen_weight_may_be_listed_twice() -> None:
    w, v = _weight(1), _weight(2)
    w.requires_grad_(False)
    _linear([w, v, w], "main_grad", None).sum().backward()
    assert v.main_grad.abs().sum() > 0
    asserts.bitwise(w.main_grad, torch.zeros(K, K), "main_grad of the frozen weight")
