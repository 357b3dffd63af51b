"""grouped_linear under torch.compile: whole graphs, with the bits of eager execution."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch.autograd import forward_ad
from torch.nn import Parameter

import torch_bridge
from grouped_core import recipes
from tests import asserts, cases
from tests.torch_frontend.torch_tools import counted_launches, leaf, leaves, small
from torch_bridge import GroupSizes, grouped_linear, nn, route

# torch's own: Dynamo makes an instance of autograd.Function and looks at `.grad`, inductor imports torch.jit.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

BACKENDS = ("eager", "aot_eager")


@pytest.fixture(scope="module", autouse=True)
def _nothing_of_other_modules() -> None:
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch.compiler.reset()  # for the next test, too


def _model(x: Tensor, weight: Any, sizes: Tensor, bias: Any = None, row_scale: Any = None, **options: Any) -> Tensor:
    """The operation between others, so that it is part of a graph."""
    return torch.relu(grouped_linear(x * 2, weight, sizes, bias=bias, row_scale=row_scale, **options))


def _gradients(f: Callable[..., Tensor], t: Any, *, listed: bool, extras: bool, **options: Any) -> list[Tensor | None]:
    x, row_scale = leaf(t.x), leaf(t.row_scale)
    weight: Any = [leaf(w, g != 1) for g, w in enumerate(t.w)] if listed else leaf(t.w)
    bias = leaves(t.bias) if listed else leaf(t.bias)
    with counted_launches() as calls:
        y = f(x, weight, t.sizes, bias if extras else None, row_scale if extras else None, **options)
        y.backward(t.dy)
    assert calls, "nothing of ours ran"
    members = [*weight, *bias] if listed else [weight, bias]
    return [y, x.grad, row_scale.grad, *(each.grad for each in members)]


def _same(got: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert (a is None) == (b is None), f"result {index}"
        if a is not None:
            asserts.bitwise(a, b, f"result {index}")


@pytest.mark.matrix(backend=BACKENDS, listed=(False, True), extras=(False, True))
def test_whole_graphs_have_the_bits_of_eager(backend: str, listed: bool, extras: bool) -> None:
    t = small("tail", "bfloat16")
    compiled = torch.compile(_model, fullgraph=True, backend=backend)
    expected = _gradients(_model, t, listed=listed, extras=extras)
    _same(_gradients(compiled, t, listed=listed, extras=extras), expected)


def test_inductor() -> None:
    t = small("tail", "bfloat16")
    compiled = torch.compile(_model, fullgraph=True, backend="inductor")
    expected = _gradients(_model, t, listed=False, extras=True)
    _same(_gradients(compiled, t, listed=False, extras=True), expected)


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_options_are_part_of_the_graph(backend: str) -> None:
    t = small("tail")
    compiled = torch.compile(_model, fullgraph=True, backend=backend)
    for options in (
        {},
        {"scale_bias": True},
        {"recipe": torch_bridge.FP32},
        {"recipe": torch_bridge.FP32.replace(fp32="ieee")},
        {"implementation": "reference"},
    ):
        expected = _gradients(_model, t, listed=False, extras=True, **options)
        _same(_gradients(compiled, t, listed=False, extras=True, **options), expected)
    with torch.no_grad(), pytest.raises(Exception, match="no kernel takes it"):
        compiled(t.x, t.w, t.sizes, implementation="fastest")


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_rows_may_be_a_symbol(backend: str) -> None:
    compiled = torch.compile(_model, fullgraph=True, backend=backend, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=False):
        for name in ("tail", "tail_long", "clamped"):
            t = small(name)
            torch._dynamo.mark_dynamic(t.x, 0)
            expected = _gradients(_model, t, listed=False, extras=True)
            _same(_gradients(compiled, t, listed=False, extras=True), expected)


def test_changing_rows_do_not_recompile() -> None:
    t = small("tail")
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x, sizes: grouped_linear(x, t.w, sizes), fullgraph=True, backend=backend)
    for rows in (50, 49, 48, 47, 46):
        x = t.x[:rows].contiguous()
        torch._dynamo.mark_dynamic(x, 0)
        asserts.bitwise(compiled(x, t.sizes), grouped_linear(x, t.w, t.sizes))
    assert len(graphs) == 1


@pytest.mark.matrix(backend=BACKENDS, dtype=("int64", "int32"), few=[("eager", "int64"), ("aot_eager", "int32")])
def test_sizes_are_converted_in_the_graph(backend: str, dtype: str) -> None:
    t = small()
    compiled = torch.compile(_model, fullgraph=True, backend=backend)
    sizes = t.sizes.to(getattr(torch, dtype))
    asserts.bitwise(compiled(t.x, t.w, sizes), _model(t.x, t.w, t.sizes))


@pytest.mark.rule("GRP-2")
@pytest.mark.parametrize("wrap", [list, GroupSizes, lambda sizes: GroupSizes(sizes, 16)], ids=["list", "plain", "hint"])
def test_other_forms_of_sizes(wrap: Callable[[Any], Any]) -> None:
    t = small()
    given = [20, 0, 13] if wrap is list else t.sizes
    compiled = torch.compile(lambda x: grouped_linear(x, t.w, wrap(given)), fullgraph=True, backend="aot_eager")
    asserts.bitwise(compiled(t.x), grouped_linear(t.x, t.w, t.sizes))


def test_export_with_symbolic_rows() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
            return grouped_linear(x, weight, sizes)

    t = small()
    rows = torch.export.Dim("rows", min=2, max=4096)
    exported = torch.export.export(Model(), (t.x, t.w, t.sizes), dynamic_shapes=({0: rows}, None, None)).module()
    for case in ("tail", "clamped"):
        t = small("tail")._replace(x=small(case).x[:40].contiguous())
        asserts.bitwise(exported(t.x, t.w, t.sizes), grouped_linear(t.x, t.w, t.sizes))


FORMS = {
    "grouped_linear": lambda x, wi, wo, sizes, **o: grouped_linear(x, wi, sizes, rhs_transposed=True, **o),
    "grouped_mlp": lambda x, wi, wo, sizes, **o: torch_bridge.grouped_mlp(x, wi, wo, sizes, rhs_transposed=True, **o),
}


@pytest.mark.rule("MAT-2")
@pytest.mark.matrix(
    form=tuple(FORMS),
    saved=recipes.SAVED_WEIGHTS,
    width=(32, 64),
    few=[("grouped_linear", "auto", 32), ("grouped_mlp", "auto", 64)],
)
def test_forms_of_weights_are_those_of_any_number_of_rows(form: str, saved: str, width: int) -> None:
    """A graph for every number of rows saves what its backward reads, though rows decide how many forms there are."""
    recipe = recipes.FP8Current.replace(saved_weights=saved)
    wi, wo = leaf(torch.randn(2, width, 32).bfloat16()), leaf(torch.randn(2, 32, width // 2).bfloat16())
    compiled = torch.compile(FORMS[form], fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=False):
        for rows in (10, 12, 14, 5000):
            x, sizes = leaf(torch.randn(rows, 32).bfloat16()), torch.tensor([rows - 3, 2], dtype=torch.int32)
            found = []
            for f in (FORMS[form], compiled):
                y = f(x, wi, wo, sizes, recipe=recipe)
                found.append([y, *torch.autograd.grad(y, [x, wi], torch.ones_like(y))])
            _same(found[1], found[0])


def test_gradients_of_exported_programs_are_refused() -> None:
    """They hold operators alone: torch would lose the gradients with a warning."""
    x, sizes = torch.randn(20, 32), torch.tensor([8, 12], dtype=torch.int32)
    delayed = nn.GroupedLinear(2, 32, 16, recipe=recipes.FP8Delayed)  # by operators that write, too
    for layer, operands in ((nn.MoE(32, 64, 4, 2), (x,)), (delayed, (x, sizes))):
        module = torch.export.export(layer, operands).module()
        found, wanted = (each[0] if isinstance(each, tuple) else each for each in (module(*operands), layer(*operands)))
        asserts.bitwise(found, wanted)
        y = module(leaf(x), *operands[1:])
        with asserts.refused(NotImplementedError, ["backward", "torch_bridge::", "torch.export", "torch.compile"]):
            (y[0] if isinstance(y, tuple) else y).sum().backward()


def test_the_parts_of_an_mlp_run_beside_graphs() -> None:
    x, wi, wo = torch.randn(20, 32), torch.randn(2, 64, 32), torch.randn(2, 32, 32)
    sizes = torch.tensor([8, 12], dtype=torch.int32)

    def forward(x: Tensor) -> Tensor:
        return torch_bridge.grouped_mlp_fwd(x * 2, wi, wo, sizes, rhs_transposed=True)[0]

    with pytest.raises(Unsupported, match="grouped_mlp_fwd"):
        torch.compile(forward, backend="aot_eager", fullgraph=True)(x)
    asserts.bitwise(torch.compile(forward, backend="aot_eager")(x), forward(x))


def test_weights_of_any_number_of_groups_are_quantised() -> None:
    def function(w: Tensor) -> Tensor:
        return torch_bridge.dequantize(torch_bridge.quantize(w, "mxfp8", axis=(2, 1)))

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=False):
        for groups in (2, 3, 5):
            w = torch.randn(groups, 32, 64)
            asserts.bitwise(compiled(w), function(w))


@pytest.mark.rule("BUF-1")
@pytest.mark.rule("BUF-3")
@pytest.mark.parametrize("backend", BACKENDS)
def test_buffers(backend: str) -> None:
    case = cases.named("tail")
    t = small("tail")
    expected_x = leaf(t.x)
    expected = grouped_linear(expected_x, t.w, t.sizes)
    expected.backward(t.dy)
    out, grad_input = torch.full_like(t.dy, cases.SENTINEL), torch.full_like(t.x, cases.SENTINEL)
    x = leaf(t.x)
    compiled = torch.compile(grouped_linear, fullgraph=True, backend=backend)
    y = compiled(x, t.w, t.sizes, out=out, grad_input=grad_input)
    y.backward(t.dy)
    for got, wanted in ((out, expected), (y, expected), (grad_input, expected_x.grad), (x.grad, expected_x.grad)):
        asserts.bitwise(got[: case.valid], wanted[: case.valid])
        asserts.filled(got[case.valid :], cases.SENTINEL)


# ---------------------------------------------------------------------------------------------------------------------
# Destinations of weight gradients


def _with_main_grad(t: Any, listed: bool, **attributes: Any) -> tuple[Any, list[Any]]:
    parameters: list[Any] = [Parameter(w.clone()) for w in (t.w if listed else [t.w])]
    for parameter in parameters:
        parameter.main_grad = torch.full((parameter.numel(),), 0.5)
        for name, value in attributes.items():
            setattr(parameter, name, value)
    if listed:
        parameters[1].requires_grad_(False)
    return (parameters if listed else parameters[0]), parameters


def _backward(f: Callable[..., Tensor], t: Any, listed: bool, **attributes: Any) -> list[Tensor | None]:
    weight, parameters = _with_main_grad(t, listed, **attributes)
    x = leaf(t.x)
    y = f(x, weight, t.sizes, wgrad_accum="main_grad")
    y.backward(t.dy)
    return [y, x.grad, *(each.grad for each in parameters), *(each.main_grad for each in parameters)]


@pytest.mark.rule("GRD-12")
@pytest.mark.matrix(
    backend=(*BACKENDS, "inductor"),
    listed=(False, True),
    overwrite=(False, True),
    valid=lambda backend, listed, overwrite: backend != "inductor" or (listed and not overwrite),
)
def test_main_grad_without_flags_keeps_the_graph_whole(backend: str, listed: bool, overwrite: bool) -> None:
    t = small("idle_ends")
    compiled = torch.compile(_model, fullgraph=True, backend=backend)
    expected = _backward(_model, t, listed, overwrite_main_grad=overwrite)
    _same(_backward(compiled, t, listed, overwrite_main_grad=overwrite), expected)


@pytest.mark.rule("GRD-12")
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script:DeprecationWarning", "ignore:.*torch.jit.script:FutureWarning"
)  # torch's own
@pytest.mark.parametrize("name", ["linear", "mlp", "router", "activation"])
def test_forward_mode_is_refused_beside_a_graph(name: str) -> None:
    """In the graph the tangent of the result would be lost, and that of the sum below be too small, silently."""
    t = small()
    sizes, wo, probs = t.sizes, torch.ones(t.w.shape[0], t.w.shape[1] // 2, t.w.shape[2]), torch.ones(t.x.shape[0])
    operations: dict[str, Callable[[Tensor], Tensor]] = {
        "linear": lambda x: grouped_linear(x, t.w, sizes),
        "mlp": lambda x: torch_bridge.grouped_mlp(x, t.w, wo.transpose(1, 2).contiguous(), sizes),
        "router": lambda x: route.topk_router(x, 2)[0],
        "activation": lambda x: nn.ScaledActivation("swiglu")(x, probs),
    }

    def tangent(x: Tensor) -> Tensor | None:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            return forward_ad.unpack_dual(dual.sum() + operations[name](dual).sum()).tangent

    with pytest.raises(Unsupported, match="forward mode"):
        torch.compile(tangent, backend="aot_eager", fullgraph=True)(t.x)
    torch.compiler.reset()
    with asserts.refused(NotImplementedError, ["forward mode", "a dual tensor"]):
        torch.compile(tangent, backend="aot_eager")(t.x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_accumulator_over_microbatches(backend: str) -> None:
    t = small("idle_ends")
    results = []
    for f in (_model, torch.compile(_model, fullgraph=True, backend=backend)):
        weight, accumulator = leaf(t.w), torch.zeros(t.w.shape)
        for _ in range(3):
            f(leaf(t.x), weight, t.sizes, wgrad_accum=accumulator).backward(t.dy)
        assert weight.grad is None
        results.append(accumulator)
    asserts.bitwise(results[1], results[0])


@pytest.mark.rule("GRD-12")
@pytest.mark.matrix(
    backend=BACKENDS,
    attribute=("", "zero_out_wgrad", "overwrite_main_grad"),
    # Where Dynamo cuts the graph does not depend on what makes programs of the parts.
    few=[("aot_eager", ""), ("eager", "zero_out_wgrad"), ("eager", "overwrite_main_grad")],
)
def test_flags_break_the_graph_and_nothing_else(backend: str, attribute: str) -> None:
    attributes = {attribute: True} if attribute else {}
    t = small("idle_ends")
    expected = _backward(_model, t, False, grad_added_to_main_grad=False, **attributes)
    compiled = torch.compile(_model, backend=backend)
    _same(_backward(compiled, t, False, grad_added_to_main_grad=False, **attributes), expected)
    torch.compiler.reset()
    whole = torch.compile(_model, fullgraph=True, backend=backend)
    with pytest.raises(Unsupported):
        _backward(whole, t, False, grad_added_to_main_grad=False, **attributes)


@pytest.mark.rule("GRD-12")
@pytest.mark.rule("GRD-6")
def test_a_main_grad_yet_to_come() -> None:
    t = small()
    parameter: Any = Parameter(t.w.clone())
    y = torch.compile(_model, backend="aot_eager")(t.x, parameter, t.sizes, wgrad_accum="main_grad")
    parameter.main_grad = torch.zeros(parameter.shape)
    y.backward(t.dy)
    assert parameter.main_grad.any()
    assert parameter.grad is None
