"""What is alive while backward runs: nothing that no later launch reads, and little more with codes than without."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from grouped_core import _native, recipes
from tests import asserts, bounds, cases
from tests.torch_frontend.torch_tools import Buffer, leaf, watched
from torch_bridge import _record, grouped_linear, grouped_mlp, routed_mlp, scaling_state

G, K, F, R, T, SLOTS = 3, 96, 160, 4, 33, 2
SIZES = [21, 0, 30]
ROWS = 53  # two more than belong to groups
RECIPES = (None, recipes.FP8Delayed, recipes.FP8Current, recipes.FP8Block, recipes.MXFP8)


SMALL = _record.SMALL_TEMPORARY


@pytest.fixture(autouse=True)
def tensors_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of this file are planned as at the sizes of models, where codes are too large to share a tensor."""
    monkeypatch.setattr(_record, "SMALL_TEMPORARY", 0)


by_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r and r.name)
quantised = pytest.mark.parametrize("recipe", RECIPES[1:], ids=lambda r: r.name)


def _normal(*shape: int, seed: int = 0) -> Any:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    return leaf(values)


class Form(NamedTuple):
    """An operation: (its leaves, leaves -> y)."""

    leaves: list[Any]
    run: Callable[..., Tensor]


def _bound(recipe: Any, products: int, groups: int = G) -> Any:
    delayed = recipe is not None and recipe.delayed
    return recipe.bind(scaling_state(recipe, groups, products=products)) if delayed else recipe


def _linear(recipe: Any) -> Form:
    bound = _bound(recipe, 1)
    return Form([_normal(ROWS, K), _normal(G, F, K)], lambda x, w: grouped_linear(x, w, SIZES, recipe=bound))


def _mlp(recipe: Any) -> Form:
    bound, leaves = _bound(recipe, 2), [_normal(ROWS, K), _normal(G, 2 * F, K), _normal(G, K, F)]
    return Form(leaves, lambda x, wi, wo: grouped_mlp(x, wi, wo, SIZES, recipe=bound))


def _routed(recipe: Any) -> Form:
    bound, leaves = _bound(recipe, 2), [_normal(T, K), _normal(G, 2 * F, K), _normal(G, K, F)]
    experts = torch.arange(T * SLOTS).view(T, SLOTS) % G
    weights = torch.full((T, SLOTS), 0.5)
    return Form(leaves, lambda x, wi, wo: routed_mlp(x, experts, weights, wi, wo, recipe=bound))


def _adapted_linear(recipe: Any) -> Form:
    bound, weight = _bound(recipe, 1), _normal(G, F, K).detach()
    leaves = [_normal(ROWS, K), _normal(G, R, K), _normal(G, F, R)]
    return Form(leaves, lambda x, a, b: grouped_linear(x, weight, SIZES, recipe=bound, lora=(a, b)))


def _adapted_mlp(recipe: Any) -> Form:
    bound, wi, wo = _bound(recipe, 2), _normal(G, 2 * F, K).detach(), _normal(G, K, F).detach()
    leaves = [_normal(ROWS, K), _normal(G, R, K), _normal(G, 2 * F, R), _normal(G, R, F), _normal(G, K, R)]

    def run(x: Tensor, a_wi: Tensor, b_wi: Tensor, a_wo: Tensor, b_wo: Tensor) -> Tensor:
        return grouped_mlp(x, wi, wo, SIZES, recipe=bound, lora=((a_wi, b_wi), (a_wo, b_wo)))

    return Form(leaves, run)


FORMS = {
    "grouped_linear": _linear,
    "grouped_mlp": _mlp,
    "routed_mlp": _routed,
    "grouped_linear, adapter": _adapted_linear,
    "grouped_mlp, adapters": _adapted_mlp,
}


class Launch(NamedTuple):
    """A launch: its call, the buffers of earlier launches that are alive, those that are not its program's, its own."""

    call: str
    alive: list[Buffer]
    others: list[Buffer]
    made: list[tuple[int, ...]]


@contextmanager
def _launches() -> Iterator[list[Launch]]:
    """Every launch inside."""
    seen: list[Launch] = []
    earlier: list[Buffer] = []

    def note(name: str, launcher: Any, values: list[Any], made: tuple[int, ...]) -> None:
        held = {StorageWeakRef(each.untyped_storage()).cdata for each in values if each is not None}
        alive = [each for each in earlier if not each.storage.expired()]
        others = [each for each in alive if each.storage.cdata not in held]
        new = [values[at] for at in made]
        seen.append(Launch(name, alive, others, [tuple(each.shape) for each in new]))
        earlier.extend(Buffer(name, tuple(each.shape), StorageWeakRef(each.untyped_storage())) for each in new)

    with watched(note):
        yield seen


@pytest.mark.rule("MLM #3221")
@by_recipe
@pytest.mark.parametrize("form", FORMS)
def test_the_last_weight_gradient_is_alone_with_its_operands(form: str, recipe: Any) -> None:
    """Quantised weights, too, are freed before it, and the narrow rows of an adapter's A: only results of the operation
    and of backward are still there, and the order of rows of tokens.
    """
    leaves, run = FORMS[form](recipe)
    with _launches() as launches:
        y = run(*leaves)
        found = torch.autograd.grad(y, leaves, torch.ones_like(y))
    kept = {StorageWeakRef(each.untyped_storage()).cdata for each in (y, *found)}
    others = [each for each in launches[-1].others if each.call != "sort_slots"]
    left = [each[:2] for each in others if each.storage.cdata not in kept]
    assert not left, f"{left} beside the last launch, {launches[-1].call}"


@quantised
def test_what_the_product_reads_is_freed_before_codes_are_made(recipe: Any) -> None:
    """Of a fused call with quantised results: codes of dy and of wo in backward, those of x and of wi in forward.

    Weights have two forms here; one that forward and dgrad share is kept.
    """
    leaves, run = _mlp(recipe.replace(saved_weights="quantized"))
    with _launches() as launches:
        y = run(*leaves)
        torch.autograd.grad(y, leaves, torch.ones_like(y))
    stages = (("grouped_matmul_act", (G, 2 * F, K), (ROWS, F)), ("grouped_matmul_dact", (G, F, K), (ROWS, 2 * F)))
    for call, weight, codes in stages:
        first, second = (each for each in launches if each.call == call)
        hidden = [(ROWS, 2 * F)] if call == "grouped_matmul_act" else []
        assert first.made == hidden, "the product gives rows alone"
        assert codes in second.made
        read = [{each.shape for each in at.alive if each.call == "quantize"} for at in (first, second)]
        assert {(ROWS, K), weight} <= read[0], "the product reads them"
        assert not {(ROWS, K), weight} & read[1], "they are alive beside codes of the result"


@by_recipe
@pytest.mark.parametrize("form", ["grouped_mlp", "routed_mlp"])
def test_parts_have_the_workspace_to_themselves(form: str, recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`GROUPED_DEBUG=poison` fills it before each launch, but not between two parts of one."""

    def step() -> list[Tensor]:
        leaves, run = FORMS[form](recipe)
        y = run(*leaves)
        return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y))]

    plain = step()
    monkeypatch.setenv("GROUPED_DEBUG", "poison")
    for got, expected in zip(step(), plain, strict=True):
        asserts.bitwise(got, expected)


# ---------------------------------------------------------------------------------------------------------------------
# How much memory a step takes on a GPU, by its plans: nothing runs, so no memory is touched.


class _Memory:
    """Bytes of the tensors that are alive, and their peak; each tensor is made by `empty`."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape) * dtype.itemsize
        memory = np.empty(count, np.uint8)
        self.now += count
        self.peak = max(self.peak, self.now)
        weakref.finalize(memory, self._free, count)
        return torch.from_numpy(memory).view(dtype).view(shape)

    def _free(self, count: int) -> None:
        self.now -= count


def _planned_peak(case: cases.Case, recipe: Any, memory: _Memory, *, accumulated: bool = False) -> int:
    """Bytes at the peak of forward and backward, without operands, accumulators and gradients."""
    groups, wide, hidden, rows = case.groups, case.n, case.k, case.rows

    def empty(*shape: int) -> Any:
        return memory.empty(shape, (), torch.bfloat16).requires_grad_()

    x, wi, wo = empty(rows, hidden), empty(groups, wide, hidden), empty(groups, hidden, wide // 2)
    dy = empty(rows, hidden)
    into = tuple(memory.empty(tuple(each.shape), (), torch.float32) for each in (wi, wo)) if accumulated else None
    bound, sizes = _bound(recipe, 2, groups), torch.tensor(case.sizes, dtype=torch.int32)
    before = memory.peak = memory.now
    y = grouped_mlp(x, wi, wo, sizes, recipe=bound, wgrad_accum=into)
    found = torch.autograd.grad(y, [x] if accumulated else [x, wi, wo], dy)
    return memory.peak - before - sum(each.nbytes for each in found)


@pytest.mark.skipif(not _native.cuda_compiled, reason="this build has no CUDA kernels")
@pytest.mark.parametrize("name", ["A", "B", "C", "D", "E"])
def test_codes_take_little_more_memory_than_bf16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside accumulators, if rows and weights are saved as they came. Programs keep what makes memory: it is one."""
    memory = _Memory()
    monkeypatch.setattr(_record, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(_record, "empty_on_cpu", memory.empty)
    monkeypatch.setattr(_record, "observer", lambda *launch: None)
    case = cases.named(name)
    plain = _planned_peak(case, None, memory)
    assert plain >> 20 == 2 * case.rows * (case.k + case.n) >> 20, "y, and the gradient of the hidden rows"
    for recipe in (recipes.FP8Delayed, recipes.FP8Current, recipes.FP8Block):
        peak = _planned_peak(case, recipe, memory)
        assert peak <= bounds.PEAK_OVER_BF16 * plain, f"{recipe.name}: {peak / plain:.2f}"
    plain = _planned_peak(case, None, memory, accumulated=True)
    for recipe in (recipes.FP8Delayed, recipes.FP8Current, recipes.FP8Block):
        options = ({}, {"saved_weights": "input"}, {"saved_weights": "input", "saved": "input"})
        each = [_planned_peak(case, recipe.replace(**given), memory, accumulated=True) for given in options]
        assert each[0] > each[1] > each[2]
        assert each[2] <= bounds.PEAK_OVER_BF16_ACCUMULATED[name] * plain, f"{recipe.name}: {each[2] / plain:.2f}"


@pytest.mark.parametrize("rows", [40, 1 + SMALL // 128], ids=["small", "large"])
def test_small_temporaries_share_one_tensor(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of x that only forward reads are beside the scales, unless they are too large; poison leaves them alone."""
    width, hidden = 128, 64
    x, wi, wo = leaves = _normal(rows, width), _normal(G, 2 * hidden, width), _normal(G, width, hidden)
    monkeypatch.setattr(_record, "SMALL_TEMPORARY", SMALL)

    def step() -> list[Tensor]:
        y = grouped_mlp(x, wi, wo, [rows, 0, 0], recipe=recipes.FP8Block)
        return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y))]

    with _launches() as launches:
        plain = step()
    made = [shape for launch in launches if launch.call == "quantize" for shape in launch.made]
    assert ((rows, width) in made) == (rows * width > SMALL)
    assert len([shape for shape in made if len(shape) == 1]) == 2, "one tensor in forward and one in backward"
    monkeypatch.setenv("GROUPED_DEBUG", "poison")
    for got, expected in zip(step(), plain, strict=True):
        asserts.bitwise(got, expected)
