"""Layers with recipes that quantise on a GPU: captured graphs with other sizes, weights, scales and random numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from grouped_core.recipes import MXFP8, SAVED_WEIGHTS, FP8Current, Recipe
from tests import asserts
from tests.torch_frontend.gpu_layers import Step
from tests.torch_frontend.gpu_tools import REPLAYED, capture, captured, launches_only
from tests.torch_frontend.nn_tools import MODULES
from tests.torch_frontend.recipe_tools import ALL, DELAYED, same, states
from torch_bridge import nn, update_scaling
from torch_bridge._memory import capture_on

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
by_recipe = pytest.mark.parametrize("recipe", ALL, ids=lambda r: r.name)
by_holding = pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
by_form = pytest.mark.parametrize("form", MODULES)


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield


@pytest.mark.rule("CAP-1", "CAP-3", "CAP-4", "GRP-5")
@by_recipe
@by_holding
@by_form
def test_a_captured_layer_replays_with_other_sizes_weights_and_scales(form: str, listed: bool, recipe: Recipe) -> None:
    step = Step(form, listed, recipe=recipe)
    graph, results = captured(step.run)
    for at, sizes in enumerate(REPLAYED):
        step.load(sizes)
        with torch.no_grad():
            for weight in step.weights:
                weight.mul_(1.0 + 0.25 * at)
        torch.manual_seed(at)
        eager = [each.clone() for each in step.run()]
        for _ in range(2):
            for tensor in results:
                tensor.fill_(float("nan"))
            torch.manual_seed(at)  # replays draw from the generator of the device
            graph.replay()
            same(results, eager, f"with sizes {sizes}")
        for state in states(step.module):
            update_scaling(state)
    if recipe.stochastic:
        step.load(REPLAYED[0])
        graph.replay()
        first = [each.clone() for each in results]
        graph.replay()
        assert not torch.equal(first[1], results[1]), "each replay has random numbers of its own"


@pytest.mark.rule("ALL-4")
@by_recipe
@by_form
def test_later_passes_find_their_counters_cleared(form: str, recipe: Recipe) -> None:
    """Launches of the first pass clear their own counters; later passes clear those of an operator at once."""
    step = Step(form, False, recipe=recipe)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [each.clone() for each in step.run()]

    first = run()
    for _ in range(3):
        same(run(), first, "as the first pass")
    if form == "GroupedMLP":
        operators = 3  # forward, the gradients at the hidden rows, those of rows
        assert sum("Memset" in name for name in launches_only(step.run)) <= operators


@pytest.mark.rule("QNT-6", "CAP-3")
@pytest.mark.parametrize("recipe", [each for each in ALL if not each.dgrad[1].plain], ids=lambda r: r.name)
@by_holding
@by_form
def test_one_graph_serves_all_microbatches(form: str, listed: bool, recipe: Recipe) -> None:
    """Without an update the weights, here NaN, are not read; with an update the cache is overwritten."""
    step, other = Step(form, listed, recipe=recipe), Step(form, listed, recipe=recipe)
    step.module.set_weight_update(True)
    graph, results = captured(step.run)
    for at, sizes in enumerate(REPLAYED):
        with torch.no_grad():
            for a, b in zip(step.weights, other.weights, strict=True):
                b.mul_(1.25)
                a.copy_(b)
        for microbatch in range(3):
            for one in (step, other):
                one.load(sizes)
            step.module.set_weight_update(microbatch == 0)
            torch.manual_seed(10 * at + microbatch)
            graph.replay()
            torch.manual_seed(10 * at + microbatch)
            same(results, other.run(), f"of microbatch {microbatch} with sizes {sizes}")
            with torch.no_grad():
                for weight in step.weights:
                    weight.fill_(float("nan"))
        for state in (*states(step.module), *states(other.module)):
            update_scaling(state)


@pytest.mark.rule("QNT-6", "CAP-3")
@pytest.mark.parametrize("by_flag", [False, True])
@pytest.mark.parametrize("evaluates_first", [False, True])
@pytest.mark.parametrize("recipe", [DELAYED, MXFP8], ids=lambda r: r.name)
def test_a_graph_that_evaluates_updates_what_a_graph_that_trains_reads(
    recipe: Recipe, evaluates_first: bool, by_flag: bool
) -> None:
    """An evaluation makes fewer forms and finds no amax; the graphs are captured in either order."""
    step, other = (Step("GroupedLinear", False, recipe=recipe) for _ in range(2))
    first, later = (None, None) if by_flag else (True, False)
    if by_flag:
        step.module.set_weight_update(True)

    def trains(first: bool | None) -> list[torch.Tensor]:
        y = step.module(step.x, step.sizes, is_first_microbatch=first)
        return [y, *torch.autograd.grad(y, [step.x, *step.weights], step.dy)]

    def evaluates() -> list[torch.Tensor]:
        with torch.no_grad():
            return [step.module(step.x, step.sizes, is_first_microbatch=first)]

    trains(first)
    other.run()
    runs = [evaluates, partial(trains, later)]
    graphs = {run: captured(run) for run in (runs if evaluates_first else runs[::-1])}
    for at in range(3):
        with torch.no_grad():
            for weight in (*step.weights, *other.weights):
                weight.mul_(-1.5)
        expected = other.run()
        for run in runs:
            if by_flag:
                step.module.set_weight_update(run is evaluates)
            graph, results = graphs[run]
            graph.replay()
            same(results, expected[: len(results)], f"of step {at}")
        knows = evaluates_first and not by_flag
        if knows:  # else the captured training does not know that an evaluation found no amax
            histories = [[each.history for each in states(one.module)] for one in (step, other)]
            same(histories[0], histories[1], "amaxes")
        for one in (step, other):
            for state in states(one.module):
                if knows:
                    update_scaling(state)


@pytest.mark.rule("CAP-1")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_captures_have_numbers_of_their_own() -> None:
    numbers = []
    for _ in range(2):
        with capture():
            numbers += [capture_on(torch.device("cuda")) for _ in range(2)]
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3]
    assert all(numbers)
    assert capture_on(torch.device("cuda")) == 0


@pytest.mark.rule("QNT-5", "MLP-10")
@pytest.mark.parametrize("residuals", ["save_all", "save_fc1", "save_input"])
@pytest.mark.parametrize("saved", SAVED_WEIGHTS)
@pytest.mark.parametrize("width", [136, 144])
def test_weights_of_any_width_have_the_bits_of_a_cache(width: int, saved: str, residuals: str) -> None:
    """Where K is no multiple of 16, dgrad widens codes of forward, and adds in another order than with its own form."""
    torch.manual_seed(0)
    recipe = FP8Current.replace(saved_weights=saved)
    layer = nn.GroupedMLP(2, width, 264, dtype=torch.bfloat16, recipe=recipe, residuals=residuals)
    other = copy.deepcopy(layer)
    rows, sizes = torch.randn(64, width).bfloat16(), torch.tensor([40, 24])

    def passed(layer: nn.GroupedMLP, first: bool | None) -> list[torch.Tensor]:
        x = rows.clone().requires_grad_()
        y = layer(x, sizes, is_first_microbatch=first)
        return [y, *torch.autograd.grad(y, [x, *layer.parameters()], rows)]

    expected = passed(other, None)
    for first in (True, False):
        same(passed(layer, first), expected)


@pytest.mark.rule("QNT-6", "CAP-1")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_what_a_capture_of_the_cache_refuses() -> None:
    step = Step("GroupedLinear", False, recipe=DELAYED)
    step.module.set_weight_update(True)
    for words, run in (
        (["weight cache", "captured", "warm-up"], step.run),
        (["set_weight_update", "captured", "before the replay"], lambda: step.module.set_weight_update(False)),
    ):
        with asserts.refused(RuntimeError, words), capture():
            run()


@pytest.mark.rule("CAP-1", "GRP-3")
@by_recipe
@by_form
def test_layers_neither_synchronise_nor_copy_nor_allocate(form: str, recipe: Recipe) -> None:
    step = Step(form, True, recipe=recipe)
    step.module.set_weight_update(True)
    launches_only(step.run)


@pytest.mark.rule("GRD-12")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@by_recipe
@pytest.mark.parametrize("form", ["GroupedLinear", "GroupedMLP"])
def test_compiled_layers_have_the_bits_of_eager(form: str, recipe: Recipe) -> None:
    """Whole graphs, over steps with other sizes and scales."""
    torch.compiler.reset()
    step, other = (Step(form, True, recipe=recipe) for _ in range(2))
    step.module.compile(fullgraph=True, backend="aot_eager")
    for at, sizes in enumerate(REPLAYED):
        found = []
        for one in (step, other):
            one.load(sizes)
            torch.manual_seed(at)
            found.append([*one.run(), *(state.history.clone() for state in states(one.module))])
            for state in states(one.module):
                update_scaling(state)
        same(found[0], found[1], f"with sizes {sizes}")
