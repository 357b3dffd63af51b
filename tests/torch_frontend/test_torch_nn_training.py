"""The modules in a training step: buffers larger than their rows, neighbours, memory that is used again.

The ids of other projects are defects that were published there (docs/contracts.md); each must not happen here.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from grouped_core import recipes
from grouped_core.recipes import Recipe
from tests import asserts
from tests.torch_frontend.nn_tools import MODULES, main_grads, setup
from tests.torch_frontend.torch_tools import allocations, leaf, manual_seed
from tests.torch_frontend.training_checks import (
    by_form,
    by_holding,
    check_replaced_storage,
    check_stale_rows,
    check_uninitialised_memory,
    same,
    trained,
)
from torch_bridge import nn


@pytest.mark.rule("GRP-5", "GRP-6", "transformers #48205", "TE #3494", "maxtext #4971", "TE #3484", "TE #3485")
@pytest.mark.parametrize(
    "recipe", [None, recipes.FP8Current, recipes.FP8Delayed, recipes.NVFP4], ids=lambda r: r.name if r else "plain"
)
@pytest.mark.parametrize("case", ["groups_1_tail", "tail", "all_empty"])
@by_form
def test_stale_rows_of_a_padded_buffer_reach_nothing(form: str, case: str, recipe: Recipe | None) -> None:
    check_stale_rows(form, case, recipe)


@pytest.mark.rule("GRP-8", "transformers #48205", "TE #3494")
@by_holding
@by_form
def test_uninitialised_memory_reaches_nothing(form: str, listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check_uninitialised_memory(form, listed, monkeypatch)


# ---------------------------------------------------------------------------------------------------------------------
# Which gradients


@pytest.mark.rule("MLP-12", "TE #2923")
@pytest.mark.parametrize("mode", ["grad", "main_grad", "delayed", "delayed_main_grad"])
@by_holding
@by_form
def test_weights_have_gradients_although_rows_need_none(form: str, listed: bool, mode: str) -> None:
    found = []
    for needed in (False, True):
        s = setup(form, listed, accumulate="main_grad" in mode, delay="delayed" in mode)
        main_grads(s.weights, 0.5)
        s.run(leaf(s.x, needed)).backward(s.dy)
        s.module.backward_dw()
        found.append([weight.main_grad if "main_grad" in mode else weight.grad for weight in s.weights])
    same(*found)
    untouched = 0.5 if "main_grad" in mode else 0.0
    assert any((each != untouched).any() for each in found[0])


# ---------------------------------------------------------------------------------------------------------------------
# Memory


@pytest.mark.rule("MAT-4", "MLM #6228")
@pytest.mark.parametrize("when", ["before_forward", "before_backward"])
@by_holding
@by_form
def test_storage_that_was_replaced_is_not_read(form: str, listed: bool, when: str) -> None:
    check_replaced_storage(form, listed, when)


@pytest.mark.rule("MLM #3221")
@pytest.mark.parametrize("delay", [False, True], ids=["now", "delay"])
@by_form
def test_activations_are_freed_in_their_own_iteration(form: str, delay: bool) -> None:
    """Backward frees them, `backward_dw` those that delayed gradients read, while the loss is alive and without gc."""
    s = setup(form, True, delay=delay)
    s.backward()
    if delay:
        s.module.backward_dw()
    for weight in s.weights:
        weight.grad = None
    gc.disable()
    try:
        with allocations() as made:
            x = leaf(s.x)
            y = s.run(x)
            during = sum(not each.expired() for each in made)
            loss = (y * s.dy).sum()
            loss.backward()
            if delay:
                s.module.backward_dw()
        results = [y, x.grad, *(weight.grad for weight in s.weights)]
        kept = {StorageWeakRef(each.untyped_storage()).cdata for each in results}
        left = [each for each in made if not each.expired() and each.cdata not in kept]
        assert not left, f"{len(left)} of {len(made)} buffers are still held"
        if form != "GroupedLinear":
            assert during > 1, "forward keeps nothing, so nothing is tested"
    finally:
        gc.enable()


# ---------------------------------------------------------------------------------------------------------------------
# Neighbours


@pytest.mark.rule("MLM #4786")
@pytest.mark.parametrize("recipe", [recipes.FP8Current, recipes.MXFP8, recipes.NVFP4], ids=lambda r: r.name)
@by_form
def test_a_recipe_does_not_reach_its_neighbours(form: str, recipe: Recipe) -> None:
    """Normalisations beside a layer, and another layer without a recipe, give the same results as without it."""
    options: dict[str, Any] = {"dtype": "bfloat16", "case": "jagged"}
    bare = setup(form, False, **options)
    plain = nn.GroupedLinear(5, bare.dy.shape[1], 24, dtype=torch.bfloat16)
    before, after = (torch.nn.LayerNorm(each.shape[1], dtype=torch.bfloat16) for each in (bare.x, bare.dy))
    neighbours: list[Any] = [before, after, lambda rows: plain(rows, bare.sizes)]
    parameters = [*before.parameters(), *after.parameters(), *plain.parameters()]

    def alone(given: list[Tensor], cotangents: list[Tensor]) -> list[Any]:
        """Results of the neighbours and all their gradients, each by itself."""
        rows = [leaf(each) for each in given]
        results = [run(each) for run, each in zip(neighbours, rows, strict=True)]
        for result, cotangent in zip(results, cotangents, strict=True):
            result.backward(cotangent)
        found = [*results, *(each.grad for each in (*rows, *parameters))]
        for each in parameters:
            each.grad = None
        return found

    cotangents = [bare.x, bare.dy, torch.ones(len(bare.x), 24, dtype=torch.bfloat16)]
    earlier = alone([bare.x, bare.dy, bare.dy], cotangents)

    s = setup(form, False, recipe=recipe, **options)
    manual_seed(0)
    x = leaf(s.x)
    a = before(x)
    b = s.run(a)
    c = after(b)
    y = neighbours[2](c)
    for each in (a, b, c, y):
        each.retain_grad()
    y.backward(torch.ones_like(y))
    together = [a, c, y, *(each.grad for each in (x, b, c, *parameters))]
    for each in parameters:
        each.grad = None
    same(alone([x, b, c], [a.grad, c.grad, y.grad]), together, "beside the layer")
    same(alone([bare.x, bare.dy, bare.dy], cotangents), earlier, "after the layer")


# ---------------------------------------------------------------------------------------------------------------------
# The same again


@contextmanager
def _deterministic() -> Iterator[None]:
    """In this mode torch refuses nondeterministic operations, and fills new memory with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.rule("ALL-2", "MLM #7441", "unsloth-zoo #1258", "TE #3407", "TE #2921")
@by_form
def test_the_same_run_has_the_same_losses(form: str) -> None:
    """This includes gradients of biases and probabilities."""
    first = trained(form)
    assert len(first[0].unique()) > 1
    same(trained(form), first)


@pytest.mark.rule("ALL-2", "MAT-10", "TE #2885")
@by_form
def test_deterministic_mode_refuses_nothing_and_changes_nothing(form: str) -> None:
    """This includes bias gradients."""
    plain = trained(form)
    with _deterministic():
        same(trained(form), plain)


# ---------------------------------------------------------------------------------------------------------------------
# Passes that run again


@pytest.mark.rule("CAP-3")
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "by_hooks"])
@pytest.mark.parametrize(
    ("form", "evaluated"),
    [*((form, None) for form in MODULES), *itertools.product(("GroupedMLP", "Sequential_fused"), (0, 1))],
)
def test_a_pass_that_is_recomputed_draws_as_it_did(form: str, evaluated: int | None, reentrant: bool) -> None:
    """Reentrant checkpointing runs without gradients first; later random operations are equal in both passes.

    Also where one of the layers that run as one operation is in evaluation mode, for the other is in training.
    """
    s = setup(form, False, recipe=recipes.NVFP4, dtype="bfloat16", case="jagged")
    if evaluated is not None:
        s.linears[evaluated].eval()
    masks: list[Tensor] = []

    def block(x: Tensor) -> Tensor:
        y = torch.nn.functional.dropout(s.run(x), 0.5)
        masks.append(y.detach() != 0)
        return y

    found = []
    for again in (False, True):
        for weight in s.weights:
            weight.grad = None
        manual_seed(1)
        x = leaf(s.x)
        with set_checkpoint_early_stop(False):
            y: Any = checkpoint(block, x, use_reentrant=reentrant) if again else block(x)
            y.backward(s.dy)
        found.append([y.detach(), x.grad, *(weight.grad for weight in s.weights)])
    assert len(masks) == 3
    asserts.bitwise(masks[2], masks[1])
    same(found[1], found[0])


@pytest.mark.rule("CAP-3")
@by_form
def test_evaluation_draws_nothing(form: str) -> None:
    s = setup(form, False, recipe=recipes.NVFP4, dtype="bfloat16", case="jagged")
    s.module.eval()
    before = torch.get_rng_state()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            s.run(s.x)
        asserts.bitwise(torch.get_rng_state(), before)
    s.run(leaf(s.x)).backward(s.dy)
    assert not torch.equal(torch.get_rng_state(), before), "a backward pass reads a key, whatever the mode"
