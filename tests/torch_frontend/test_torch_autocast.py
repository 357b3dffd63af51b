"""`torch.autocast` with functions and layers: the bits of casts by hand, gradients in the dtype of Parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torch_bridge
from grouped_core.recipes import FP8Current, FP8Delayed, Recipe
from tests import asserts
from tests.torch_frontend.compile_tools import form_of
from tests.torch_frontend.nn_tools import FORMS, FUNCTIONS, MODULES, main_grads, setup
from tests.torch_frontend.torch_tools import leaf, small
from torch_bridge import grouped_linear, grouped_mlp, nn, straight_through

pytestmark = [
    pytest.mark.rule("MAT-6", "ERR-5"),
    # torch's own: Dynamo makes an instance of autograd.Function and looks at `.grad`.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

RECIPES = [None, FP8Current]
RECIPE_IDS = ["plain", "FP8Current"]
NARROW = torch.bfloat16


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _on(dtype: torch.dtype = NARROW) -> Any:
    return torch.autocast("cpu", dtype)


def _pair(form: str, listed: bool, **options: Any) -> tuple[Any, Any]:
    """A form with float32 Parameters, and one whose Parameters are their casts."""
    wide, narrow = setup(form, listed, **options), setup(form, listed, dtype="bfloat16", **options)
    with torch.no_grad():
        for weight, cast in zip(wide.weights, narrow.weights, strict=True):
            cast.copy_(weight)
    return wide, narrow


@pytest.mark.parametrize("recipe", [*RECIPES, FP8Delayed], ids=[*RECIPE_IDS, "FP8Delayed"])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_bits_of_casts_by_hand(form: str, listed: bool, recipe: Recipe | None) -> None:
    wide, narrow = _pair(form, listed, recipe=recipe)
    x, x2, dy = leaf(wide.x), leaf(wide.x.to(NARROW)), wide.dy.to(NARROW)
    with _on():
        y = wide.run(x)
    y2 = narrow.run(x2)
    asserts.bitwise(y, y2)
    y.backward(dy)
    y2.backward(dy)
    asserts.bitwise(x.grad, x2.grad.float(), "gradient of x")
    for weight, cast in zip(wide.weights, narrow.weights, strict=True):
        asserts.bitwise(weight.grad, cast.grad.float(), "gradient of a weight")


@pytest.mark.rule("MAT-6", "DLY-2")
@pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
@pytest.mark.parametrize("form", MODULES)
def test_delayed_gradients_have_the_dtype_of_the_parameters(form: str, listed: bool) -> None:
    now, later = (setup(form, listed, delay=delay) for delay in (False, True))
    for _ in range(2):
        for one in (now, later):
            with _on():
                y = one.run(one.x)
            y.backward(one.dy.to(NARROW))
        later.module.backward_dw()
    for weight, expected in zip(later.weights, now.weights, strict=True):
        asserts.bitwise(weight.grad, expected.grad)


@pytest.mark.rule("MAT-6")
@pytest.mark.parametrize("at", [0, 1])
def test_each_of_several_parameters_is_cast(at: int) -> None:
    """Whichever of them has the dtype of autocast already."""
    layer = nn.GroupedLinear(2, 8, 16, single_grouped_weight=False)
    x, sizes = torch.randn(6, 8), torch.tensor([2, 4])
    with torch.no_grad():
        one = layer.get_parameter(f"weight{at}")
        one.copy_(one.to(NARROW))
    with _on():
        expected = layer(x, sizes)
        one.data = one.data.to(NARROW)
        asserts.bitwise(layer(x, sizes), expected)


@pytest.mark.rule("MAT-6", "QNT-4")
def test_quantised_parameters_are_not_cast() -> None:
    """A cast would make plain values of them, which the recipe would quantise a second time."""
    layer: Any = nn.GroupedLinear(2, 32, 32, recipe=FP8Current, quantized_weights=True, single_grouped_weight=True)
    with _on(), asserts.refused(TypeError, ["`weight`", "float32", "bfloat16", "cast one of them"]):
        grouped_linear(torch.randn(6, 32), layer.weight, torch.tensor([2, 4]), recipe=FP8Current)


def _everything(seed: int = 0) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made)

    return {
        "x": draw(11, 8),
        "gate": draw(2, 16, 8),
        "up": draw(2, 16, 8),
        "wo": draw(2, 8, 16),
        "wi_bias": draw(2, 32),
        "wo_bias": draw(2, 8),
        "probs": draw(11).abs(),
        "bias": draw(2, 16),
        "row_scale": draw(11),
    }


SIZES = torch.tensor([4, 5], dtype=torch.int32)
LEFT = ("probs", "row_scale")


def _linear(o: dict[str, Any], recipe: Recipe | None) -> Tensor:
    return grouped_linear(o["x"], o["gate"], SIZES, bias=o["bias"], row_scale=o["row_scale"], recipe=recipe)


def _mlp_with_pair(o: dict[str, Any], recipe: Recipe | None) -> Tensor:
    return grouped_mlp(o["x"], (o["gate"], o["up"]), o["wo"], SIZES, probs=o["probs"], recipe=recipe)


def _mlp_with_lists(o: dict[str, Any], recipe: Recipe | None) -> Tensor:
    wi, biases = torch.cat((o["gate"], o["up"]), 1), {name: list(o[name].unbind()) for name in ("wi_bias", "wo_bias")}
    return grouped_mlp(
        o["x"], list(wi.unbind()), list(o["wo"].unbind()), SIZES, probs=o["probs"], recipe=recipe, **biases
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=RECIPE_IDS)
@pytest.mark.parametrize("run", [_linear, _mlp_with_pair, _mlp_with_lists])
def test_biases_are_cast_and_what_multiplies_rows_is_not(run: Callable[..., Tensor], recipe: Recipe | None) -> None:
    wide = {name: leaf(each) for name, each in _everything().items()}
    narrow = {name: leaf(each if name in LEFT else each.to(NARROW)) for name, each in _everything().items()}
    with _on():
        y = run(wide, recipe)
    y2 = run(narrow, recipe)
    asserts.bitwise(y, y2)
    y.float().square().sum().backward()
    y2.float().square().sum().backward()
    for name, each in wide.items():
        other = narrow[name].grad
        if other is None:
            assert each.grad is None
        else:
            asserts.bitwise(each.grad, other.float(), name)


@pytest.mark.parametrize("form", ["GroupedLinear", "GroupedMLP", "Sequential"])
@pytest.mark.parametrize("recipe", RECIPES, ids=RECIPE_IDS)
def test_layers_cast_their_biases(form: str, recipe: Recipe | None) -> None:
    made = {
        "GroupedLinear": lambda: nn.GroupedLinear(2, 8, 16, recipe=recipe),
        "GroupedMLP": lambda: nn.GroupedMLP(2, 8, 16, bias=True, recipe=recipe),
        "Sequential": lambda: nn.Sequential(nn.GroupedLinear(2, 8, 16, recipe=recipe), nn.ScaledSReLU()),
    }
    wide, narrow = made[form](), made[form]()
    narrow.load_state_dict(wide.state_dict())
    narrow.to(NARROW)
    o = _everything()
    extra = (SIZES,) if form == "GroupedLinear" else (SIZES, o["probs"])
    with _on():
        y = wide(o["x"], *extra)
    y2 = narrow(o["x"].to(NARROW), *extra)
    asserts.bitwise(y, y2)
    y.float().sum().backward()
    y2.float().sum().backward()
    for each, other in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert other.grad is not None
        asserts.bitwise(each.grad, other.grad.float())


@pytest.mark.rule("GRD-4", "GRD-6")
@pytest.mark.parametrize("recipe", RECIPES, ids=RECIPE_IDS)
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("form", FUNCTIONS)
@pytest.mark.parametrize("flag", [None, "grad_added_to_main_grad", "overwrite_main_grad"])
def test_main_grad_is_that_of_the_callers_parameter(
    form: str, listed: bool, recipe: Recipe | None, flag: str | None
) -> None:
    """The gradient is unrounded, unlike that of the cast."""
    wide, narrow = _pair(form, listed, accumulate=True, recipe=recipe)
    held = [main_grads(each.weights, 0.5) for each in (wide, narrow)]
    for weight in (*wide.weights, *narrow.weights):
        if flag:
            setattr(weight, flag, flag == "overwrite_main_grad")
    with _on():
        y = wide.run(leaf(wide.x))
    y.backward(wide.dy.to(NARROW))
    narrow.run(leaf(narrow.x)).backward(wide.dy.to(NARROW))
    for one, other in zip(*held, strict=True):
        asserts.bitwise(one, other, "main_grad")
    for weight in wide.weights:
        if flag == "grad_added_to_main_grad":
            assert weight.grad_added_to_main_grad
            assert not weight.grad.any()
            assert weight.grad.dtype == torch.float32
        else:
            assert weight.grad is None


@pytest.mark.parametrize("recipe", RECIPES, ids=RECIPE_IDS)
def test_tensors_take_unrounded_gradients(recipe: Recipe | None) -> None:
    o = {name: leaf(each) for name, each in _everything().items()}
    narrow = {name: leaf(each.detach().to(NARROW)) for name, each in o.items()}
    found = []
    for given in (o, narrow):
        into = torch.ones(2, 16, 8)
        with _on():
            grouped_linear(given["x"], given["gate"], SIZES, wgrad_accum=into, recipe=recipe).sum().backward()
        assert given["gate"].grad is None
        found.append(into)
    asserts.bitwise(*found)


@pytest.mark.rule("BUF-1", "BUF-4")
@pytest.mark.parametrize("recipe", RECIPES, ids=RECIPE_IDS)
@pytest.mark.parametrize("form", FUNCTIONS)
def test_buffers_have_the_dtype_of_autocast(form: str, recipe: Recipe | None) -> None:
    s = setup(form, False, recipe=recipe)
    x, out, dx = leaf(s.x), torch.zeros_like(s.dy, dtype=NARROW), torch.zeros_like(s.x, dtype=NARROW)
    with _on():
        y = s.run(x, out=out, grad_input=dx)
        with asserts.refused(ValueError, ["`grad_input`", "float32", "expected bfloat16", "allocate"]):
            s.run(x, grad_input=dx.float())
    assert y.data_ptr() == out.data_ptr()
    y.backward(s.dy.to(NARROW))
    asserts.bitwise(x.grad, dx.float())


def test_quantised_operands_and_masters_are_left() -> None:
    o = _everything()
    q = torch_bridge.quantize(o["gate"], "fp8_tensor", axis=(2, 1))
    x_q = torch_bridge.quantize(o["x"].to(NARROW), "fp8_tensor", axis=(1, 0), group_sizes=SIZES)
    master, x = leaf(o["gate"]), leaf(o["x"])
    with _on():
        y = grouped_linear(x, straight_through(master, q), SIZES)
        z = grouped_linear(x_q, q, SIZES)
    assert y.dtype == z.dtype == NARROW
    asserts.bitwise(y, grouped_linear(o["x"].to(NARROW), q, SIZES))
    asserts.bitwise(z, grouped_linear(x_q, q, SIZES))
    y.sum().backward()
    assert master.grad.dtype == x.grad.dtype == torch.float32


def test_float64_is_left_and_refused() -> None:
    t = small()
    with _on(), asserts.refused(TypeError, ["`x`", "dtype float64", "expected one of", "cast it first"]):
        grouped_linear(t.x.double(), t.w, t.sizes)
    with _on(), asserts.refused(TypeError, ["`x`", "dtype float64", "expected one of", "cast it first"]):
        nn.GroupedLinear(len(t.sizes), t.x.shape[1], 8)(t.x.double(), t.sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_regions_nest(dtype: torch.dtype) -> None:
    t = small()
    with _on(dtype):
        assert grouped_linear(t.x, t.w.to(NARROW), t.sizes).dtype == dtype
        with torch.autocast("cpu", enabled=False):
            asserts.bitwise(grouped_linear(t.x, t.w, t.sizes), _outside(t))
            with asserts.refused(TypeError, ["`weight`", "bfloat16", "expected float32", "cast one of them"]):
                grouped_linear(t.x, t.w.to(NARROW), t.sizes)
    with torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()):  # of another device
        assert grouped_linear(t.x, t.w, t.sizes).dtype == torch.float32
    with asserts.refused(TypeError, ["`weight`", "bfloat16", "expected float32", "cast one of them"]):
        grouped_linear(t.x, t.w.to(NARROW), t.sizes)


def _outside(t: Any) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return grouped_linear(t.x, t.w, t.sizes)


@pytest.mark.matrix(
    sequential=("no", "fused", "composed"),
    mlp=(False, True),
    module=(False, True),
    accumulate=(False, True),
    recipe=RECIPES,
    valid=lambda sequential, mlp, module, **_: sequential == "no" or (mlp and module),
)
def test_whole_graphs(sequential: str, mlp: bool, module: bool, recipe: Recipe | None, accumulate: bool) -> None:
    form, found = form_of(sequential, mlp, module), []
    for compiled in (False, True):
        s = setup(form, False, accumulate=accumulate, recipe=recipe)
        held = main_grads(s.weights, 0.5) if accumulate else []
        run = torch.compile(s.run, fullgraph=True, backend="aot_eager") if compiled else s.run
        x = leaf(s.x)
        with _on():
            y = run(x)
        y.backward(s.dy.to(NARROW))
        found.append([y, x.grad, *(held or [each.grad for each in s.weights])])
    for one, other in zip(*found, strict=True):
        asserts.bitwise(other, one)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_compute_again_in_the_same_dtype(form: str, reentrant: bool) -> None:
    found = []
    for again in (False, True):
        s = setup(form, True, accumulate=True)
        held, x = main_grads(s.weights, 0.5), leaf(s.x)
        with _on():
            y = checkpoint(s.run, x, use_reentrant=reentrant) if again else s.run(x)
        y.backward(s.dy.to(NARROW))
        found.append([y, x.grad, *held])
    for one, other in zip(*found, strict=True):
        asserts.bitwise(other, one)


class _Casts(TorchDispatchMode):
    """Counts casts."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_each_tensor_is_cast_once_per_call() -> None:
    o = {name: leaf(each) for name, each in _everything().items()}
    with _on(), _Casts() as casts:
        y = grouped_linear(o["x"], o["gate"], SIZES, bias=o["bias"])
    assert casts.count == 3  # x, weight, bias
    with _Casts() as casts:
        y.sum().backward()
    assert casts.count == 3  # their gradients
    with _on(), _Casts() as casts:
        grouped_mlp(o["x"], (o["gate"], o["up"]), o["wo"], SIZES, probs=o["probs"], wo_bias=o["wo_bias"])
    assert casts.count == 5
    layer = nn.GroupedLinear(2, 8, 16)
    with _on(), _Casts() as casts:
        layer(o["x"], SIZES)
    assert casts.count == 5  # x, two weights, two biases
    with _Casts() as casts:
        grouped_linear(o["x"], o["gate"], SIZES, bias=o["bias"])
    assert not casts.count


def test_what_explain_tells_is_what_runs() -> None:
    t = small()
    with _on():
        told = torch_bridge.explain(grouped_linear, t.x, Parameter(t.w), t.sizes)
    assert told == torch_bridge.explain(grouped_linear, t.x.to(NARROW), Parameter(t.w.to(NARROW)), t.sizes)


def test_the_parts_of_an_mlp_cast_too() -> None:
    o = _everything()
    narrow = {name: each if name in LEFT else each.to(NARROW) for name, each in o.items()}
    found = []
    for given, on in ((o, True), (narrow, False)):
        with torch.autocast("cpu", NARROW, enabled=on):
            pair, options = (given["gate"], given["up"]), {"probs": given["probs"], "wo_bias": given["wo_bias"]}
            y, res = torch_bridge.grouped_mlp_fwd(given["x"], pair, given["wo"], SIZES, **options)
            dx, dp, _, db2, deferred = torch_bridge.grouped_mlp_bwd_dx(res, torch.ones_like(y))
            dwi, dwo = torch_bridge.grouped_mlp_bwd_dw(deferred)
        assert dwi is not None
        found.append([y, dx, dp, db2, *dwi, dwo])
    for one, other in zip(*found, strict=True):
        asserts.bitwise(one, other)
