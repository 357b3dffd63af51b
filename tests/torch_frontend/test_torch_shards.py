"""Casts into quantised primary weights from the masters of sharded optimisers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from grouped_core import recipes
from grouped_core.formats import FORMATS
from grouped_core.recipes import Recipe
from tests import asserts
from tests.torch_frontend.primary_tools import (
    addresses,
    by_holding,
    by_recipe,
    layer,
    raw,
    same_codes,
)
from tests.torch_frontend.recipe_tools import same, state_of
from torch_bridge import nn, parallel, params, quantize, shards, update_scaling
from torch_bridge.quantized_weight import named_parts as parts_of


def shard_lists(module: Any, masters: list[Tensor], cuts: list[int]) -> list[tuple[Any, ...]]:
    """What each rank casts: masters follow one another, last first as in Megatron's buffers, and are cut."""
    weights = list(module.parameters())[::-1]
    flat = torch.cat([each.reshape(-1) for each in masters[::-1]])
    ranks = []
    for begin, end in zip([0, *cuts], [*cuts, len(flat)], strict=True):
        entries = params.expand_shard(weights, flat[begin:end], begin)
        ranks.append(tuple(zip(*entries, strict=True)))
    return ranks


@pytest.mark.rule("QNT-3", "QNT-1")
@by_recipe
@by_holding
def test_a_whole_shard_is_a_whole_cast(recipe: Recipe, listed: bool) -> None:
    """Of several layers at once; with delayed scaling the state takes part as it does in a plain write."""
    options: Any = {"single_grouped_weight": not listed, "quantized_weights": True, "dtype": torch.bfloat16}
    module = nn.GroupedMLP(3, 48, 32, recipe=recipe, **options)
    written = copy.deepcopy(module)
    for step in range(3):
        masters = [torch.randn(each.shape) * (step + 1) for each in module.parameters()]
        with torch.no_grad():
            for weight, master in zip(written.parameters(), masters, strict=True):
                weight.copy_(master)
        kept = addresses(module)
        shards.cast_shards(*shard_lists(module, masters, [])[0])
        assert addresses(module) == kept
        same_codes(module, written)
        for one in (module, written):
            if one.scaling_state is not None:
                update_scaling(one.scaling_state)
        if recipe.delayed:
            asserts.bitwise(state_of(module).scale, state_of(written).scale)
            asserts.bitwise(state_of(module).history, state_of(written).history)
            assert (state_of(module).scale[1] > 0).all()


@pytest.mark.rule("QNT-6", "QNT-3")
@by_recipe
def test_a_flag_keeps_the_cast_from_writing(recipe: Recipe) -> None:
    module = layer(recipe, listed=True)
    masters = [torch.randn(each.shape) for each in module.parameters()]
    arguments = shard_lists(module, masters, [])[0]
    skip = torch.ones(1, dtype=torch.int32)
    before = raw(module)
    state = None if module.scaling_state is None else module.scaling_state.history.clone()
    shards.cast_shards(*arguments, skip=skip)
    same([*raw(module).values()], [*before.values()])
    if state is not None:
        asserts.bitwise(state_of(module).history, state)
    wanted = copy.deepcopy(module)
    shards.cast_shards(*shard_lists(wanted, masters, [])[0])
    skip.zero_()
    shards.cast_shards(*arguments, skip=skip)
    same_codes(module, wanted)


@pytest.mark.rule("QNT-3")
@by_recipe
@pytest.mark.parametrize("flagged", [False, True], ids=["", "flag"])
def test_members_that_are_not_named_stay_as_they_are(recipe: Recipe, flagged: bool) -> None:
    """Frozen experts, or buckets of an optimiser that cut a layer."""
    module = layer(recipe, listed=True)
    written, weights = copy.deepcopy(module), list(module.parameters())
    master = 3 * torch.randn(weights[1].shape)
    with torch.no_grad():
        list(written.parameters())[1].copy_(master)
    skip = torch.zeros(1, dtype=torch.int32) if flagged else None
    shards.cast_shards([weights[1]], [master.view(-1)], [0], skip=skip)
    same_codes(module, written)
    if module.scaling_state is not None:
        asserts.bitwise(state_of(module).history, state_of(written).history)


@pytest.mark.rule("QNT-3")
def test_shards_of_quantised_tensors_and_other_dtypes() -> None:
    w = torch.randn(3, 70, 48).bfloat16()
    for name in ("fp8_tensor", "fp8_128x128", "mxfp8", "mxfp4", "nvfp4", "nvfp4_2d"):
        wanted, q = quantize(w, name, axis=(2, 1)), quantize(torch.zeros_like(w), name, axis=(2, 1))
        shards.cast_shards([q], [w.view(-1)], [0], dtype=torch.bfloat16)
        for part, tensor in parts_of(wanted).items():
            asserts.bitwise(parts_of(q)[part].view(torch.uint8), tensor.view(torch.uint8), f"{part} of {name}")


@pytest.mark.rule("QNT-3")
def test_what_the_cast_of_shards_refuses() -> None:
    weight = next(iter(layer(recipes.MXFP8).parameters()))
    delayed: Any = next(iter(layer(recipes.FP8Delayed).parameters()))
    with asserts.refused(ValueError, ["QTensor of", "delayed scaling", "Parameters", "pass these"]):
        shards.cast_shards([delayed.q], [torch.zeros(10)], [0])
    chosen = quantize(torch.randn(3, 70, 48), FORMATS["nvfp4"].replace(four_over_six="square"))
    flat, skip = torch.zeros(10), torch.zeros(1)
    cases: list[tuple[Any, Any, list[str]]] = [
        (TypeError, ([flat], [flat], [0]), ["`weights[0]`", "quantised weight", "copy_"]),
        (TypeError, ([weight], [flat.bfloat16()], [0]), ["`shards[0]`", "bfloat16", "`dtype`"]),
        (ValueError, ([weight], [flat], [3 * 70 * 48]), ["`shard`", "elements", "flat slice"]),
        (ValueError, ([weight], [flat], [None]), ["`shard`", "None", "flat slice"]),
        (NotImplementedError, ([chosen], [flat], [0]), ["four_over_six", "gather"]),
    ]
    for kind, arguments, words in cases:
        with asserts.refused(kind, words):
            shards.cast_shards(*arguments)
    with asserts.refused(ValueError, ["`shards`, `starts`", "0 and 1 for 1 weights", "one each", "pass None"]):
        shards.cast_shards([weight], [], [None])
    with asserts.refused(ValueError, ["`skip`", "int32[1]"]):
        shards.cast_shards([weight], [flat], [0], skip=skip)
    with asserts.refused(TypeError, ["`dtype`", "float64"]):
        shards.cast_shards([weight], [flat], [0], dtype=torch.float64)
    shards.cast_shards([], [], [])


@pytest.mark.rule("LYR-9")
def test_experts_over_ranks_want_plain_weights() -> None:
    class Mesh(DeviceMesh):
        ndim: Any = 1

        def __init__(self) -> None:
            pass

        def size(self, mesh_dim: int | None = None) -> int:
            return 3

    mesh = Mesh()
    with asserts.refused(ValueError, ["quantised weights", "own experts"]):
        parallel.shard_experts(layer(recipes.MXFP8), mesh)
