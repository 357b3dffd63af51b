"""Offloading with recipes that quantise: codes and scales of quantised rows, in both forms, and no weights."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from grouped_core import recipes
from grouped_core.recipes import Recipe
from tests import asserts
from tests.torch_frontend.nn_tools import MODULES, setup
from tests.torch_frontend.offload_tools import recorded
from tests.torch_frontend.torch_tools import leaf, manual_seed
from torch_bridge import _saved
from torch_bridge.offload import cpu_offload

RECIPES = (recipes.FP8Current, recipes.FP8Block, recipes.MXFP8, recipes.NVFP4)


def _step(s: Any, **options: Any) -> tuple[list[Tensor], dict[int, tuple[str, int]]]:
    """(y and gradients; name and axes of each tensor that operations of this package saved, by address)."""
    for weight in s.weights:
        weight.grad = None
    told: dict[int, tuple[str, int]] = {}
    held: list[Any] = []  # so that no address is given twice
    original = _saved.tell

    def tell(tensors: Any, names: Any) -> None:
        held.extend(tensors)
        for each, name in zip(tensors, [*names, *[""] * (len(tensors) - len(names))], strict=True):
            if each is not None:
                told[each.data_ptr()] = (name, each.dim())
        original(tensors, names)

    manual_seed(0)
    x = leaf(s.x)
    with pytest.MonkeyPatch.context() as patch, cpu_offload(enabled=bool(options), **options):
        patch.setattr(_saved, "tell", tell)
        y = s.run(x)
    y.backward(s.dy)
    return [y.detach(), x.grad, *(weight.grad for weight in s.weights)], told


@pytest.mark.rule("OFF-2", "OFF-3", "OFF-5", "OFF-6", "TE #3047", "TE #1959", "TE #3128", "MLM #5082")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
@pytest.mark.parametrize("form", MODULES)
def test_all_parts_of_quantised_rows_are_moved(form: str, recipe: Recipe) -> None:
    """Codes and block scales of the form that the weight gradient reads; scales of whole groups stay."""
    s = setup(form, False, dtype="bfloat16", case="jagged", recipe=recipe)
    expected, _ = _step(s)
    with recorded() as sent:
        found, told = _step(s, min_numel=0)
        for at, (a, b) in enumerate(zip(found, expected, strict=True)):
            asserts.bitwise(a, b, f"result {at}")
        assert all(each.taken == each.saved for each in sent), "what was saved was not read"
        moved = {each.source.data_ptr() for each in sent} & told.keys()
        assert moved == {address for address, (name, axes) in told.items() if name and axes > 1}
        found_names = {told[each][0] for each in moved}
        assert found_names >= {"grouped_x_q"} | ({"grouped_x_scale"} if recipe.forward[0].block else set())
        for chosen in ({"grouped_x_q"}, {"grouped_x_q", "grouped_x_scale"}, {"grouped_fc1"}):
            sent.clear()
            _, told = _step(s, min_numel=0, names=chosen)
            assert {told[each.source.data_ptr()][0] for each in sent} == chosen & found_names
