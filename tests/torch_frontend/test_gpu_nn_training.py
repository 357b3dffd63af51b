"""The modules in a training step on a GPU, where other kernels run: stale rows, replaced storage, runs that repeat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from grouped_core import recipes
from tests import asserts
from tests.torch_frontend import training_checks as training
from tests.torch_frontend.nn_tools import MODULES

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield


@pytest.mark.rule("GRP-5", "GRP-6", "transformers #48205", "TE #3494", "maxtext #4971", "TE #3484", "TE #3485")
@pytest.mark.matrix(
    form=MODULES,
    case=("groups_1_tail", "tail", "all_empty"),
    recipe=(None, recipes.FP8Current, recipes.FP8Delayed, recipes.FP8Block, recipes.MXFP8, recipes.NVFP4),
)
def test_stale_rows_of_a_padded_buffer_reach_nothing(form: str, case: str, recipe: Any) -> None:
    training.check_stale_rows(form, case, recipe)


@pytest.mark.rule("GRP-8", "transformers #48205", "TE #3494")
@pytest.mark.parametrize("listed", [False, True], ids=["packed", "list"])
@pytest.mark.parametrize("form", MODULES)
def test_uninitialised_memory_reaches_nothing(form: str, listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    training.check_uninitialised_memory(form, listed, monkeypatch)


@pytest.mark.rule("MAT-4", "MLM #6228")
@pytest.mark.matrix(form=MODULES, listed=(False, True), when=("before_forward", "before_backward"))
def test_storage_that_was_replaced_is_not_read(form: str, listed: bool, when: str) -> None:
    training.check_replaced_storage(form, listed, when)


@pytest.mark.rule("ALL-2", "MLM #7441", "unsloth-zoo #1258", "TE #3407", "TE #2921")
@pytest.mark.parametrize("form", MODULES)
def test_the_same_run_has_the_same_losses(form: str) -> None:
    """With so many rows that several blocks share them."""
    first = training.trained(form, "rows_1027")
    for _ in range(3):
        for at, (a, b) in enumerate(zip(training.trained(form, "rows_1027"), first, strict=True)):
            asserts.bitwise(a, b, f"result {at}")
