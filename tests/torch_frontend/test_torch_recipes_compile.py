"""Recipes that quantise under torch.compile: whole graphs with the bits, states and destinations of eager."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from grouped_core import recipes
from grouped_core.activations import Activation
from grouped_core.formats import FORMATS
from grouped_core.recipes import Recipe
from tests import asserts
from tests.torch_frontend.compile_tools import compiled, eager, form_of, function_or_module, module_of
from tests.torch_frontend.nn_tools import Setup, main_grads, setup
from tests.torch_frontend.recipe_tools import ALL, BF16, DELAYED, same, seeded, states
from tests.torch_frontend.torch_tools import counted_launches, leaf, small
from torch_bridge import (
    GroupSizes,
    dequantize,
    grouped_linear,
    grouped_mlp,
    nn,
    quantize,
    scaling_state,
    straight_through,
    update_scaling,
)
from torch_bridge._tensors import parts_of

# torch's own: Dynamo makes an instance of autograd.Function and looks at `.grad`, inductor imports torch.jit.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _nothing_of_other_modules() -> None:
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch.compiler.reset()  # for the next test, too


def steps(one: Setup, count: int = 2) -> list[Any]:
    """Results, destinations and states of a few steps."""
    found = []
    held = [one.state] if one.state is not None else states(one.module) if one.module is not None else []
    for seed in range(count):
        with counted_launches() as calls:
            found += seeded(one, seed)
        assert "quantize" in calls, "nothing of ours ran"
        found += [getattr(weight, "main_grad", None) for weight in one.weights]
        for state in held:
            found.append(state.history.clone())
            update_scaling(state)
            found.append(state.scale.clone())
    return [each.clone() if each is not None else None for each in found]


@pytest.mark.rule("GRD-12", "ALL-1")
@pytest.mark.matrix(
    sequential=("no", "fused", "composed"),
    mlp=(False, True),
    module=(False, True),
    recipe=ALL,
    listed=(False, True),
    accumulate=(False, True),
    overwrite=(False, True),
    valid=lambda sequential, mlp, module, recipe, accumulate, overwrite: (
        (sequential == "no" or (mlp and module))
        and (accumulate or not overwrite)
        # Keys are read in backward alone, so a compiler may draw those of several layers in another order.
        and (sequential != "composed" or not recipe.stochastic)
    ),
)
def test_every_operation_is_a_whole_graph_with_every_recipe(
    sequential: str, mlp: bool, module: bool, recipe: Recipe, listed: bool, accumulate: bool, overwrite: bool
) -> None:
    """Rows 1, 2 and 4, with a frozen member in lists."""
    form, found = form_of(sequential, mlp, module), []
    for wrap in (eager, compiled):
        one = wrap(setup(form, listed, accumulate=accumulate, recipe=recipe, **BF16))
        if accumulate:
            main_grads(one.weights, 0.5)
        for weight in one.weights:
            weight.overwrite_main_grad = overwrite
        one.weights[0].requires_grad_(not listed)
        found.append(steps(one))
    same(found[1], found[0])


@pytest.mark.matrix(mlp=(False, True), module=(False, True), recipe=(DELAYED, recipes.FP8Block))
def test_inductor(mlp: bool, module: bool, recipe: Recipe) -> None:
    form = function_or_module(mlp, module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = steps(eager(setup(form, True, recipe=recipe, **BF16)))
        same(steps(compiled(setup(form, True, recipe=recipe, **BF16), backend="inductor")), wanted)


@pytest.mark.rule("GRD-12")
@pytest.mark.matrix(
    sequential=(False, True),
    mlp=(False, True),
    recipe=(None, recipes.FP8Block, recipes.NVFP4),
    changed=(False, True),
    valid=lambda sequential, changed, **_: sequential or not changed,
)
def test_a_module_inside_of_activation_checkpointing_is_a_whole_graph(
    sequential: bool, mlp: bool, recipe: Recipe | None, changed: bool
) -> None:
    """Also one that has never run, or whose modules changed since; its keys are those of eager execution."""
    form = module_of(sequential, mlp)
    if form == "Sequential_composed" and recipe == recipes.NVFP4:
        recipe = recipes.MXFP8  # a compiler may draw keys of several layers in another order
    found = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")):
        one = setup(form, False, recipe=recipe, **BF16)
        if changed:
            one.module.add_module("1", nn.ScaledSwiGLU())
        one.run = wrap(lambda x, run=one.run: checkpoint(run, x, use_reentrant=False))
        found.append(seeded(one, 5))
    same(found[1], found[0])


MXFP4_WEIGHTS = recipes.MXFP8.replace(
    name="mxfp4 weights",
    forward=(recipes.BF16.forward[0], FORMATS["mxfp4"]),
    dgrad=(recipes.BF16.dgrad[0], FORMATS["mxfp4"]),
    wgrad=recipes.BF16.wgrad,
)


@pytest.mark.rule("GRD-12", "BUF-1")
@pytest.mark.matrix(mlp=(False, True), module=(False, True), recipe=(recipes.MXFP8, MXFP4_WEIGHTS))
def test_inductor_writes_into_destinations(mlp: bool, module: bool, recipe: Recipe) -> None:
    """Beside scales of an element type that it lowers no writing operator with."""
    form, found = function_or_module(mlp, module), []
    for wrap in (eager, lambda one: compiled(one, backend="inductor")):
        one = wrap(setup(form, False, accumulate=True, recipe=recipe, **BF16))
        main_grads(one.weights, 0.5)
        out = torch.zeros_like(one.dy)
        grad = {} if module else {"grad_input": torch.zeros_like(one.x)}
        found.append([*seeded(one, 3, out=out, **grad), out, *(weight.main_grad for weight in one.weights)])
    same(found[1], found[0])


@pytest.mark.rule("BUF-1", "MLP-13")
def test_inductor_reads_scales_that_it_is_given_and_makes() -> None:
    """Weights quantised before, rows inside, an accumulator of a master; the scales are results too."""
    one = setup("grouped_linear", False, recipe=recipes.MXFP8, **BF16)
    weights = quantize(one.weights[0].detach(), "mxfp8", axis=(2, 1))

    def run(x: Any, master: Any, accum: Any) -> Any:
        rows = quantize(x.detach() * 2, "mxfp8", axis=(1, 0), group_sizes=one.sizes)
        operands = (straight_through(x, rows), straight_through(master, weights), one.sizes)
        return grouped_linear(*operands, recipe=recipes.MXFP8, wgrad_accum=accum), dequantize(rows), rows.scales

    found = []
    for f in (run, torch.compile(run, fullgraph=True, backend="inductor")):
        x, accum = leaf(one.x), torch.ones(one.weights[0].shape)
        y, values, scales = f(x, leaf(one.weights[0].float()), accum)
        y.backward(one.dy)
        assert scales.dtype == torch.float8_e8m0fnu
        found.append([y, x.grad, accum, values, scales])
    same(found[1], found[0])


@pytest.mark.rule("BUF-1", "BUF-3")
@pytest.mark.parametrize("form", ["grouped_linear", "grouped_mlp", "GroupedLinear", "GroupedMLP"])
def test_buffers_of_the_caller(form: str) -> None:
    one, other = (setup(form, False, recipe=DELAYED, **{**BF16, "case": "tail"}) for _ in range(2))
    valid = int(one.sizes.clamp(min=0).sum())
    out, grad = torch.full_like(one.dy, 7.0), torch.full_like(one.x, 7.0)
    one.run = torch.compile(one.run, fullgraph=True, backend="aot_eager")
    seeded(one, 3, out=out, grad_input=grad)
    wanted = seeded(other, 3)
    for a, b in ((out, wanted[0]), (grad, wanted[1])):
        asserts.bitwise(a[:valid], b[:valid])
        asserts.filled(a[valid:], 7.0)


@pytest.mark.rule("GRD-12")
def test_accumulators_of_the_caller() -> None:
    one = setup("grouped_mlp", False, recipe=recipes.MXFP8, **BF16)
    found = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")):
        run = wrap(lambda x, wi, wo, to: grouped_mlp(x, wi, wo, one.sizes, recipe=recipes.MXFP8, wgrad_accum=to))
        to = tuple(torch.ones(weight.shape) for weight in one.weights)
        for _ in range(2):
            run(leaf(one.x), *one.weights, to).backward(one.dy)
        assert all(weight.grad is None for weight in one.weights)
        found.append(to)
    same(found[1], found[0])


@pytest.mark.rule("MAT-3")
def test_gate_and_linear_half_are_joined_inside() -> None:
    one = setup("grouped_mlp", False, recipe=recipes.MXFP8, **BF16)
    wi, wo = (weight.detach() for weight in one.weights)
    found = []

    def run(x: Any, *halves: Any, **options: Any) -> Any:
        return grouped_mlp(x * 2, halves, wo, one.sizes, recipe=recipes.MXFP8, **options)

    def whole(*arguments: Any, **options: Any) -> Any:
        return torch.compile(run, fullgraph=True, backend="aot_eager")(*arguments, **options)

    for f in (run, whole):
        halves = [leaf(half.contiguous()) for half in wi.chunk(2, 1)]
        y = f(one.x, *halves)
        y.backward(one.dy)
        found.append([y, *(half.grad for half in halves)])
    same(found[1], found[0])
    # What eager execution refuses is not computed in a graph.
    halves = [half.contiguous() for half in wi.chunk(2, 1)]
    with pytest.raises(Exception, match="beside `wi` in two arrays"):
        whole(one.x, *halves, activation=Activation("swiglu", interleave=2))
    refused = "given for two arrays beside recipe MXFP8"
    with pytest.raises(Exception, match=refused):
        whole(one.x, *map(leaf, halves), wgrad_accum=([torch.zeros(half.shape) for half in halves], None))
    with pytest.raises(NotImplementedError, match=refused):  # beside the graph, where `main_grad` is looked up
        torch.compile(run, backend="aot_eager")(one.x, *map(leaf, halves), wgrad_accum="main_grad")


@pytest.mark.rule("MLP-13")
@pytest.mark.parametrize("whole", ["grouped_linear", "grouped_mlp"])
def test_quantised_operands_and_masters(whole: str) -> None:
    """Rows and weights that come quantised, with a hint of rows and an activation of its own."""
    one = setup(whole, False, recipe=recipes.MXFP8, **BF16)
    forms = [quantize(weight.detach(), "mxfp8", axis=(2, 1)) for weight in one.weights]
    activation = Activation("clamped_qgeglu", limit=3.5, interleave=2)

    def run(x: Any, *masters: Any) -> Any:
        first, *second = [straight_through(master, q) for master, q in zip(masters, forms, strict=True)]
        sizes = GroupSizes(one.sizes, 8)
        if whole == "grouped_linear":
            return grouped_linear(x, first, sizes, recipe=recipes.MXFP8)
        return grouped_mlp(x, first, second[0], sizes, probs=one.probs, recipe=recipes.MXFP8, activation=activation)

    rows = quantize(one.x, recipes.MXFP8.forward[0], axis=(1, 0), group_sizes=one.sizes)
    found = []
    for f in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        masters = [leaf(weight.float()) for weight in one.weights]
        x = leaf(one.x)
        y = f(x, *masters)
        y.backward(one.dy)
        with torch.no_grad():
            found.append([y, f(rows, *masters), x.grad, *(master.grad for master in masters)])
    same(found[1], found[0])


@pytest.mark.matrix(
    name=("fp8_tensor", "fp8_1x128", "mxfp8", "nvfp4"),
    dynamic=(False, True),
    # Lengths that are symbols differ from format to format; numbers do not.
    valid=lambda name, dynamic: dynamic or name == "nvfp4",
)
def test_codes_are_made_and_read_inside(name: str, dynamic: bool) -> None:
    """Rows in both forms with a key, and weights; of a QTensor a graph may give back all parts."""
    one = setup("grouped_linear", False, recipe=recipes.MXFP8, **BF16)
    rows_of = FORMATS[name].replace(stochastic=name == "nvfp4")
    key = torch.tensor([3, 2**31], dtype=torch.uint32)

    def run(x: Any, weight: Any) -> Any:
        rows = quantize(x * 2, rows_of, axis=(1, 0), group_sizes=one.sizes, key=key)
        weights = quantize(weight, name, axis=-2)
        read = [dequantize(rows), dequantize(rows.other, torch.float32), dequantize(weights) + 1]
        return rows, weights, read, dequantize(quantize(x, name))

    f = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (40, 33) if dynamic else (33,):  # a graph of 40 rows alone is compiled as that of 33 is
        found = [each(one.x[:rows].detach(), one.weights[0].detach()) for each in (f, run)]
        for a, b in zip(*(each[:2] for each in found), strict=True):
            assert (a.format, a.axis, tuple(a.shape), a.dtype) == (b.format, b.axis, tuple(b.shape), b.dtype)
        same(*([*parts_of(q), *parts_of(w), *read, last] for q, w, read, last in found))


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_the_step_of_states(algorithm: str) -> None:
    recipe = DELAYED.replace(history=3, amax_algorithm=algorithm)
    held = [scaling_state(recipe, 2) for _ in range(2)]
    steps = [update_scaling, torch.compile(update_scaling, fullgraph=True, backend="aot_eager")]
    for live in (3.0, 0.0, 5.0, 2.0):
        for state, step in zip(held, steps, strict=True):
            state.history[:, 0] = live
            step(state)
        same(*([state.scale, state.history] for state in held))


@pytest.mark.parametrize(("form", "dynamic"), [("grouped_linear", None), ("grouped_mlp", True)])
def test_rows_and_options_may_change(form: str, dynamic: bool | None) -> None:
    one = setup(form, False, recipe=recipes.MXFP8, **BF16)
    variants = [recipes.FP8Current, recipes.FP8Current.replace(dgrad=recipes.BF16.dgrad), recipes.MXFP8]
    held = {"recipe": recipes.MXFP8}
    operation: Any = grouped_linear if form == "grouped_linear" else grouped_mlp

    def run(x: Any) -> Any:
        return operation(x, *one.weights, one.sizes, recipe=held["recipe"])

    f = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows, held["recipe"] in zip((40, 39, 38), variants, strict=True):
        found = []
        for each in (run, f):
            x = leaf(one.x[:rows])
            each(x).backward(one.dy[:rows])
            found.append([x.grad])
        same(found[1], found[0], f"for {rows} rows")


@pytest.mark.parametrize("recipe", [DELAYED, recipes.NVFP4], ids=lambda r: r.name)
def test_a_recipe_is_one_constant_of_a_graph(recipe: Recipe) -> None:
    """Its fields one by one would take most of the time that a compilation has, and a guard each in every call."""
    one, graphs = setup("grouped_mlp", False, recipe=recipe, **BF16), []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compile(one.run, fullgraph=True, backend=backend)(one.x)
    (node,) = [each for each in graphs[0].graph.nodes if each.op == "call_function" and "_node" in each.name]
    assert sum(str(each).count(recipe.text) for each in node.args) == 1
    assert recipe.forward[0].name not in str(node.args).replace(recipe.text, "")


@pytest.mark.matrix(form=("grouped_linear", "grouped_mlp"), recipe=ALL, saved=("quantized", "input"))
def test_changing_rows_do_not_recompile(form: str, recipe: Recipe, saved: str) -> None:
    """Lengths of every form, padded ones too, follow from the symbol."""
    one = setup(form, False, recipe=recipe, **BF16)
    recipe = recipe.replace(saved=saved)
    options = {"num_groups": len(one.sizes), "products": len(one.weights)}
    held = [scaling_state(recipe, **options) if recipe.delayed else None for _ in range(2)]
    operation: Any = grouped_linear if form == "grouped_linear" else grouped_mlp
    weights = [leaf(weight) for weight in one.weights]

    def run(x: Any, factor: Any, state: Any) -> Any:
        named = {"row_scale" if form == "grouped_linear" else "probs": factor}
        return operation(x, *weights, one.sizes, recipe=recipe.bind(state), **named)

    graphs = CompileCounterWithBackend("aot_eager")
    for rows in (61, 60, 47, 33):
        found = []
        for each, state in zip((run, torch.compile(run, fullgraph=True, backend=graphs)), held, strict=True):
            x, factor = leaf(one.x[:rows]), leaf(one.probs[:rows])
            for tensor in (x, factor):
                torch._dynamo.mark_dynamic(tensor, 0)
            y = each(x, factor, state)
            found.append([y, *torch.autograd.grad(y, (x, factor, *weights), one.dy[:rows])])
        same(found[1], found[0], f"for {rows} rows")
    assert graphs.frame_count == 1


def test_rows_of_some_operands_alone_may_be_a_symbol() -> None:
    one = setup("grouped_linear", False, recipe=recipes.MXFP8, **BF16)

    def run(x: Any, out: Any) -> Any:
        return grouped_linear(x, one.weights[0], one.sizes, recipe=recipes.MXFP8, out=out)

    f = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for rows in (61, 60, 47):
            x = one.x[:rows]
            torch._dynamo.maybe_mark_dynamic(x, 0)
            out = torch.zeros_like(one.dy[:rows])
            asserts.bitwise(f(x, out), grouped_linear(x, one.weights[0], one.sizes, recipe=recipes.MXFP8))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
            return grouped_linear(x, weight, sizes, recipe=recipes.MXFP8)

    t = small("tail", "bfloat16")
    shapes = ({0: torch.export.Dim("rows", min=2, max=4096)}, None, None)
    exported = torch.export.export(Model(), (t.x, t.w, t.sizes), dynamic_shapes=shapes, strict=strict).module()
    for rows in (50, 40):
        x = t.x[:rows].contiguous()
        asserts.bitwise(exported(x, t.w, t.sizes), Model()(x, t.w, t.sizes))


# ---------------------------------------------------------------------------------------------------------------------
# What is state of Python


def _delayed(one: Setup) -> dict[str, Any]:
    return {}


def _cached(one: Setup) -> dict[str, Any]:
    return {"is_first_microbatch": True}


def _by_flag(one: Setup) -> dict[str, Any]:
    one.module.set_weight_update(True)
    return {}


def _flagged(one: Setup) -> dict[str, Any]:
    main_grads(one.weights, 0.5)
    for weight in one.weights:
        weight.grad_added_to_main_grad = False
    return {}


_BREAKING: dict[str, tuple[Any, dict[str, Any]]] = {
    "delayed gradients": (_delayed, {"delay": True}),
    "flags": (_flagged, {"accumulate": True}),
    "cache": (_cached, {}),
    "cache by flag": (_by_flag, {}),
}


BESIDE = "they run beside a graph"
"""In the reason for a break of the graph that Dynamo tells."""


@pytest.mark.rule("GRD-12", "QNT-5", "QNT-6")
@pytest.mark.matrix(
    sequential=(False, True),
    mlp=(False, True),
    recipe=(DELAYED, recipes.MXFP8),
    what=tuple(_BREAKING),
    valid=lambda sequential, what, **_: what != "cache" or not sequential,  # which takes no keyword
)
def test_state_of_python_breaks_the_graph_and_nothing_else(
    sequential: bool, mlp: bool, recipe: Recipe, what: str
) -> None:
    (prepare, options), form = _BREAKING[what], module_of(sequential, mlp)
    found = []
    counters.clear()
    # Where Dynamo cuts the graph is the subject here, not what a backend makes of the parts.
    for wrap in (eager, lambda one: compiled(one, whole=False, backend="eager")):
        one = wrap(setup(form, False, recipe=recipe, **options, **BF16))
        keywords = prepare(one)
        results = seeded(one, 4, **keywords)
        if options.get("delay"):
            assert one.module.pending_wgrads() == 1
            one.module.backward_dw()
            results += [weight.grad for weight in one.weights]
        results += [getattr(weight, "main_grad", None) for weight in one.weights]
        assert all(getattr(weight, "grad_added_to_main_grad", True) for weight in one.weights)
        found.append([*results, *(state.history for state in states(one.module))])
    same(found[1], found[0])
    breaks = counters["graph_break"]
    assert breaks
    assert all(BESIDE in reason for reason in breaks), breaks
    if sequential:
        return  # where the graph of the same frame would end with the same reason
    torch.compiler.reset()
    whole = compiled(setup(form, False, recipe=recipe, **options, **BF16), backend="eager")
    keywords = prepare(whole)
    with pytest.raises(Unsupported, match=BESIDE):
        seeded(whole, 4, **keywords)


@pytest.mark.rule("QNT-5")
@pytest.mark.parametrize(("form", "listed"), [("GroupedLinear", True), ("GroupedMLP", False)])
def test_a_cache_beside_a_graph_notices_what_is_old(form: str, listed: bool) -> None:
    one, plain = (eager(setup(form, listed, recipe=recipes.MXFP8, **BF16)) for _ in range(2))
    same(seeded(one, 0, is_first_microbatch=True), seeded(plain, 0))
    one.run = torch.compile(one.run, backend="eager")  # it reads what a pass without a graph has cached
    same(seeded(one, 1, is_first_microbatch=False), seeded(plain, 1))
    with torch.no_grad():
        one.weights[-1].mul_(2)
    with asserts.refused(RuntimeError, ["weight cache", "written since", "FSDP2", "is_first_microbatch=True"]):
        one.run(one.x, is_first_microbatch=False)


@pytest.mark.rule("GRD-12", "BUF-2")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "recipe",
    [
        recipes.NVFP4,
        recipes.NVFP4.replace(name="delayed wgrad", wgrad=recipes.FP8Delayed.wgrad),
    ],
    ids=lambda r: r.name,
)
def test_the_largest_number_of_results_beside_buffers(recipe: Any) -> None:
    """Every operator that writes into a buffer and keeps both operands of both products in three tensors each."""
    one = setup("grouped_mlp", False, recipe=recipes.MXFP8, **BF16)
    wi, wo = (weight.detach() for weight in one.weights)
    found = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")):
        state = scaling_state(recipe, len(one.sizes), products=2) if recipe.delayed else None
        bound = recipe.bind(state)
        x, out, buffer = leaf(one.x), torch.zeros_like(one.x), torch.zeros_like(one.x)
        accumulators = (torch.zeros(wi.shape), torch.zeros(wo.shape))

        step = wrap(partial(grouped_mlp, recipe=bound, residuals="save_all"))
        y = step(x, leaf(wi), leaf(wo), one.sizes, out=out, grad_input=buffer, wgrad_accum=accumulators)
        y.backward(one.dy)
        found.append([y, x.grad, *accumulators])
    same(found[1], found[0])
