"""Quantised primary weights on a GPU: casts from masters, and the passes that follow, in captured graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from grouped_core.recipes import Recipe
from tests import asserts
from tests.torch_frontend.gpu_layers import Step
from tests.torch_frontend.gpu_tools import REPLAYED, captured, launches_only
from tests.torch_frontend.primary_tools import by_form, by_holding, by_recipe, same_codes
from tests.torch_frontend.recipe_tools import same, states
from torch_bridge import shards, update_scaling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield


class Trained(Step):
    """A step on weights that are cast from masters first; `skip` keeps the cast from writing."""

    def __init__(self, form: str, listed: bool, recipe: Recipe) -> None:
        super().__init__(form, listed, recipe=recipe, quantized_weights=True)
        self.masters = [torch.randn(each.shape) for each in self.weights]
        self.skip = torch.zeros(1, dtype=torch.int32)

    def cast(self) -> None:
        """Masters into weights, of all layers at once."""
        flat = [master.view(-1) for master in self.masters]
        shards.cast_shards(self.weights, flat, [0] * len(flat), skip=self.skip)

    def run(self) -> list[Any]:
        """A cast, then the results of a step."""
        self.cast()
        return super().run()


@pytest.mark.rule("QNT-1", "QNT-6", "CAP-1", "CAP-3")
@by_recipe
@by_holding
@by_form
def test_a_graph_casts_masters_unless_the_flag_says_no(form: str, listed: bool, recipe: Recipe) -> None:
    step, other = Trained(form, listed, recipe), Step(form, listed, recipe=recipe, quantized_weights=True)
    graph, results = captured(step.run)
    for at, sizes in enumerate(REPLAYED):
        skipped = at % 3 == 1
        step.skip.fill_(int(skipped))
        with torch.no_grad():
            for weight, master in zip(other.weights, step.masters, strict=True):
                if at:  # the warm-up has merged magnitudes of the first ones
                    master.normal_().mul_(at)
                if not skipped:
                    weight.copy_(master)
        for one in (step, other):
            one.load(sizes)
        for tensor in results:
            tensor.fill_(float("nan"))
        torch.manual_seed(at)
        graph.replay()
        torch.manual_seed(at)
        same(results, other.run(), f"with sizes {sizes}")
        same_codes(step.module, other.module)
        for state in (*states(step.module), *states(other.module)):
            update_scaling(state)
    for a, b in zip(states(step.module), states(other.module), strict=True):
        asserts.bitwise(a.scale, b.scale)


@pytest.mark.rule("CAP-1", "GRP-3")
@by_recipe
@by_holding
def test_casts_neither_synchronise_nor_copy_nor_allocate(recipe: Recipe, listed: bool) -> None:
    step = Trained("GroupedMLP", listed, recipe)
    launches_only(step.cast)
