"""Checkpoints of PyTorch modules: both forms, layouts of the field, optimisers, and ranks."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from grouped_core.layouts import LAYOUTS
from grouped_core.recipes import Recipe
from grouped_core.safetensors_file import File
from tests.asserts import bitwise, refused
from tests.checkpoint_tools import WRITTEN, E, F, H, expert_parts, written
from torch_bridge import (
    MXFP8,
    Activation,
    FP8Block,
    FP8Current,
    FP8Delayed,
    QTensor,
    checkpoint,
    dequantize,
    nn,
    quantize,
    weight_only,
)


def moe(seed: int = 0, **options: Any) -> nn.MoE:
    torch.manual_seed(seed)
    made = nn.MoE(H, F, E, 2, **options)
    for each in made.buffers():
        each.normal_()
    return made


def rows(seed: int = 5) -> Tensor:
    return torch.randn(9, H, generator=torch.Generator().manual_seed(seed))


def same(ours: Any, theirs: Any) -> None:
    ours, theirs = (each if isinstance(each, dict) else each.state_dict() for each in (ours, theirs))
    assert ours.keys() == theirs.keys()
    for name, each in theirs.items():
        bitwise(ours[name], each, name)


def as_torch(tree: Any) -> dict[str, Tensor]:
    return {key: torch.from_numpy(np.array(value)) for key, value in tree.items()}


FULL: dict[str, Any] = {"bias": True, "shared_dim": 16, "shared_gate": True, "selection_bias": True}


# ---- saving and loading


@pytest.mark.rule("CKP-5")
def test_files_have_the_mode_of_the_umask_which_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It belongs to the whole process: files that other threads make meanwhile would have another mode."""
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", None)
            checkpoint.save(tmp_path / "f.safetensors", moe())
    finally:
        os.umask(before)
    assert (tmp_path / "f.safetensors").stat().st_mode & 0o777 == 0o640
    assert [each.name for each in tmp_path.iterdir()] == ["f.safetensors"]


@pytest.mark.rule("CKP-1", "CKP-5", "MLM #5487")
@pytest.mark.matrix(
    saved_weight=(False, True), saved_bias=(False, True), single_weight=(False, True), single_bias=(False, True)
)
def test_both_forms_load_into_both(
    tmp_path: Path, saved_weight: bool, saved_bias: bool, single_weight: bool, single_bias: bool
) -> None:
    given = moe(single_grouped_weight=saved_weight, single_grouped_bias=saved_bias, **FULL)
    model = moe(1, single_grouped_weight=single_weight, single_grouped_bias=single_bias, **FULL)
    path = tmp_path / "f.safetensors"
    checkpoint.save(path, {"moe": given})
    file = File(path)
    assert ("moe.wi" in file.entries) == saved_weight
    assert ("moe.wo_bias.3" in file.entries) == (not saved_bias)
    notes = json.loads(file.metadata["jax_grouped"])
    assert (notes["version"], notes["layout"]) == (1, "gnk")
    layer = notes["layers"]["moe.experts"]
    assert (layer["groups"], layer["gate"], layer["form"]) == (E, "first", "grouped" if saved_weight else "indexed")
    assert checkpoint.load(path, {"moe": model})["moe"] is model
    bitwise(model(rows())[0], given(rows())[0], "y")
    checkpoint.save(tmp_path / "g.safetensors", {"moe": model})
    back = moe(2, single_grouped_weight=saved_weight, single_grouped_bias=saved_bias, **FULL)
    checkpoint.load(tmp_path / "g.safetensors", {"moe": back})
    same(back, given)


@pytest.mark.rule("CKP-5", "QNT-1")
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("recipe", [FP8Block, MXFP8], ids=lambda each: each.name)
def test_quantised_weights_keep_codes_and_scales(tmp_path: Path, recipe: Any, single: bool) -> None:
    options: dict[str, Any] = {"recipe": recipe, "quantized_weights": True, "dtype": torch.bfloat16}
    given = nn.GroupedMLP(2, 128, 128, single_grouped_weight=True, **options)
    path = tmp_path / "f.safetensors"
    checkpoint.save(path, given)
    assert recipe.forward[1].name in File(path).metadata["jax_grouped"]
    model = nn.GroupedMLP(2, 128, 128, single_grouped_weight=single, **options)
    checkpoint.load(path, model)
    if single:
        same(model, given)
    x, sizes = torch.randn(6, 128, dtype=torch.bfloat16), torch.tensor([2, 4])
    bitwise(model(x, sizes), given(x, sizes), "y")
    plain = nn.GroupedMLP(2, 128, 128, single_grouped_weight=True, dtype=torch.bfloat16)
    with refused(ValueError, ["is quantised with", "expected plain values"]):
        checkpoint.load(path, plain)
    checkpoint.save(path, plain)
    checkpoint.load(path, model)
    expected = nn.GroupedMLP(2, 128, 128, single_grouped_weight=single, **options)
    expected.load_state_dict(plain.state_dict())
    same(model, expected)


@pytest.mark.rule("CKP-5", "CKP-6")
def test_another_activation_is_refused(tmp_path: Path) -> None:
    """Also with `convert`, which turns axes and columns alone; the tensors of a model know no activation."""
    path = tmp_path / "f.safetensors"
    checkpoint.save(path, moe(activation=Activation("clamped_swiglu", limit=7.0)))
    for other in ("swiglu", Activation("clamped_swiglu", limit=3.0)):
        model = moe(1, activation=other)
        before = copy.deepcopy(model)
        for convert in (False, True):
            with refused(ValueError, [f"`{path}`", "`experts`", "limit=7.0", "expected Activation", "of the model"]):
                checkpoint.load(path, model, convert=convert)
        same(model, before)
        checkpoint.load(path, model.state_dict())


@pytest.mark.rule("CKP-1", "CKP-5")
def test_a_layer_may_be_in_a_model_twice(tmp_path: Path) -> None:
    """Its tensors are in the file under both, and each time their columns are those of its activation."""
    from safetensors.torch import save_file

    def twice(seed: int) -> torch.nn.Module:
        layer = moe(seed, activation=Activation("swiglu", interleave=8))
        return torch.nn.ModuleList([layer, layer])

    path, given, model = tmp_path / "f.safetensors", twice(0), twice(1)
    checkpoint.save(path, given)
    checkpoint.load(path, model)
    same(model, given)
    foreign = checkpoint.convert(given, "torch_bridge", "hugging_face")  # a module says how its columns alternate
    same(foreign, checkpoint.convert(given.state_dict(), "torch_bridge", "hugging_face", interleave=(8, None)))
    save_file({key: value.clone() for key, value in foreign.items()}, path)
    model = twice(1)
    checkpoint.load(path, model, layout="hugging_face")
    same(model, given)


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize(
    ("tree", "kind", "words"),
    [
        ({"w": torch.empty(2, device="meta")}, ValueError, ["`w` of save", "meta device", "expected values"]),
        (
            {"w": torch.eye(2).to_sparse()},
            ValueError,
            ["`w` of a", "torch.sparse_coo", "expected a dense one", "`.to_dense()`"],
        ),
        (None, TypeError, ["`tree` of a checkpoint", "NoneType", "expected a tensor", "leave it out"]),
    ],
)
def test_what_has_no_plain_values_is_not_saved(
    tmp_path: Path, tree: Any, kind: type[Exception], words: list[str]
) -> None:
    with refused(kind, words):
        checkpoint.save(tmp_path / "f.safetensors", tree)
    assert not list(tmp_path.iterdir())


@pytest.mark.rule("CKP-6")
def test_another_order_of_columns_is_refused_and_converted(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    given = moe(activation=Activation("swiglu", interleave=8), bias=True)
    checkpoint.save(path, given)
    model = moe(1, bias=True)
    before = copy.deepcopy(model)
    words = [
        f"`{path}`",
        "`experts` with interleave 8",
        "expected None",
        "checkpoint.convert(..., interleave=(8, None))",
    ]
    with refused(ValueError, words):
        checkpoint.load(path, model)
    same(model, before)
    checkpoint.load(path, model, convert=True)
    bitwise(model(rows())[0], given(rows())[0], "y")
    by_hand = checkpoint.convert(given, "torch_bridge", "torch_bridge", interleave=(8, None))
    before.load_state_dict(by_hand)
    same(before, model)


def adapted(kind: str, block: int | None, seed: int = 0, **options: Any) -> Any:
    """A layer whose adapters are not those of the start, which add nothing."""
    torch.manual_seed(seed)
    options |= {"activation": Activation("swiglu", interleave=block), "lora_rank": 4}
    options |= {"single_grouped_weight": True}
    made = nn.GroupedMLP(E, H, F, **options) if kind == "GroupedMLP" else moe(seed, shared_dim=16, **options)
    with torch.no_grad():
        for name, each in made.named_parameters():
            if name.endswith("lora_B"):
                each.normal_()
    return made


def result(layer: Any) -> Tensor:
    return layer(rows(), torch.tensor([4, 0, 3, 2])) if isinstance(layer, nn.GroupedMLP) else layer(rows())[0]


@pytest.mark.rule("CKP-1", "ERR-1")
@pytest.mark.parametrize("quantized", [False, True])
def test_entries_that_are_no_tensors_are_named(quantized: bool) -> None:
    options: dict[str, Any] = {"recipe": weight_only("mxfp4"), "quantized_weights": True} if quantized else {}
    for single in (True, False):
        state = nn.GroupedMLP(2, 64, 32, single_grouped_weight=single, **options).state_dict()
        key = f"linear_fc2.weight{'' if single else '1'}{'.scales' if quantized else ''}"
        layer = nn.GroupedMLP(2, 64, 32, single_grouped_weight=single if quantized else not single, **options)
        with refused(ValueError, ["checkpoint: `", "linear_fc2.weight", "a NoneType", "expected", "load a"]):
            layer.load_state_dict(state | {key: None})


@pytest.mark.rule("CKP-6", "LOR-5")
@pytest.mark.parametrize("blocks", [(8, None), (None, 8), (8, 4)])
@pytest.mark.parametrize("kind", ["GroupedMLP", "MoE"])
def test_columns_of_adapters_change_order_with_those_of_their_weights(
    tmp_path: Path, kind: str, blocks: tuple[Any, Any]
) -> None:
    """Those of the experts and of a shared expert, however they are converted."""
    path, given, model = tmp_path / "f.safetensors", adapted(kind, blocks[0]), adapted(kind, blocks[1], 1)
    checkpoint.save(path, given)
    checkpoint.load(path, model, convert=True)
    bitwise(result(model), result(given), "loaded")
    found = checkpoint.convert(given, "torch_bridge", "torch_bridge", interleave=blocks)
    same(found, model)
    there = checkpoint.convert(given, "torch_bridge", "jax_grouped")
    same(checkpoint.convert(there, "jax_grouped", "torch_bridge", interleave=(None, blocks[1])), model)
    hooked = adapted(kind, blocks[1], 2)
    hooked.register_load_state_dict_pre_hook(checkpoint.load_hook("torch_bridge", interleave=(blocks[0], None)))
    hooked.load_state_dict(given.state_dict())
    same(hooked, model)


class _Wrapped(torch.nn.Module):
    """As wrappers of data parallelism hold a model."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module


@pytest.mark.rule("CKP-2", "CKP-5")
@pytest.mark.parametrize("prefix", ["module.a.b", "module.a.b.", "a.b", "a.b."])
def test_a_prefix_may_end_in_a_dot_and_name_wrappers(tmp_path: Path, prefix: str) -> None:
    path, given, model = tmp_path / "f.safetensors", adapted("MoE", 8), adapted("MoE", 8, 1)
    checkpoint.save(path, {"module": {"a": {"b": given}}})
    same(checkpoint.load(path, model, prefix=prefix), given)
    with refused(ValueError, ["`experts` with interleave 8", "expected None"]):
        checkpoint.load(path, adapted("MoE", None, 1), prefix=prefix)


@pytest.mark.rule("CKP-2", "CKP-6")
@pytest.mark.parametrize("wrapped", ["source", "target", "both"])
@pytest.mark.parametrize("kind", ["GroupedMLP", "MoE"])
def test_a_wrapped_module_knows_the_order_of_its_columns(tmp_path: Path, kind: str, wrapped: str) -> None:
    path, given, model = tmp_path / "f.safetensors", adapted(kind, 8), adapted(kind, None, 1)
    source, target = (
        _Wrapped(each) if wrapped in (side, "both") else each for side, each in (("source", given), ("target", model))
    )
    checkpoint.save(path, source)
    with refused(ValueError, ["with interleave 8", "expected None of the model", "convert=True"]):
        checkpoint.load(path, target)
    checkpoint.load(path, target, convert=True)
    bitwise(result(model), result(given), "y")
    optimizer = torch.optim.AdamW(source.parameters())
    result(given).sum().backward()
    optimizer.step()
    moved = checkpoint.convert_optimizer(optimizer.state_dict(), source, target)
    same(
        _moments(moved, model), checkpoint.convert(_moments(optimizer.state_dict(), given), *OURS, interleave=(8, None))
    )


OURS = ("torch_bridge", "torch_bridge")


def _moments(state: Any, model: Any) -> dict[str, Tensor]:
    names = [name for name, _ in model.named_parameters()]
    return {names[at]: entries["exp_avg"] for at, entries in state["state"].items()}


@pytest.mark.rule("CKP-6")
def test_a_foreign_file_needs_its_layout(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path, model = tmp_path / "f.safetensors", moe(bias=True)
    fc1: Any = model.experts.linear_fc1
    parts = expert_parts()
    for layout in WRITTEN:
        save_file(as_torch(written(layout, parts, path="model.mlp")), path)
        with refused(ValueError, [f"`{path}`", "no metadata", "`layout=`", "interleave"]):
            checkpoint.load(path, model)
        for prefix in ("model.mlp.", "model.mlp"):
            checkpoint.load(path, model, layout=layout, prefix=prefix)
        bitwise(fc1.weight[1, F + 3], parts["up"][1, 3], layout)
        bitwise(model.router.weight, parts["router"], layout)
    save_file(as_torch(written("megatron_indexed", parts, block=16)), path)
    checkpoint.load(path, model, layout="megatron_indexed", interleave=16)
    bitwise(fc1.weight[:, :F], parts["gate"], "gate")
    checkpoint.save(path, model)
    with refused(ValueError, ["`layout`: 'flax'", "records its own layout", "leave it out"]):
        checkpoint.load(path, model, layout="flax")
    with refused(ValueError, ["`layout`: 'x'", "expected one of torch_bridge", "choose"]):
        save_file({"a": torch.zeros(1)}, path)
        checkpoint.load(path, model, layout="x")


def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    model = moe(1)
    before = copy.deepcopy(model)
    for given, kind, words in (
        (moe(dtype=torch.bfloat16), ValueError, ["dtype bfloat16", "expected float32 of the model", "cast it"]),
        (nn.MoE(H, 2 * F, E, 2), ValueError, [f"({E}, {4 * F}, {H})", f"({E}, {2 * F}, {H})"]),
        (nn.MoE(H, F, E + 1, 2), ValueError, [f"({E + 1}, ", f"expected ({E}, "]),
        (nn.MoE(H, 2 * F, E, 2, single_grouped_weight=False), ValueError, [f"({E}, {4 * F}, {H})", "of the model"]),
        (moe(single_grouped_weight=False).experts, KeyError, ["nothing for", "`router.weight`", "prefix"]),
    ):
        checkpoint.save(path, given)
        with refused(kind, words):
            checkpoint.load(path, model)
        same(model, before)
    checkpoint.save(path, {"a": torch.ones(1)})
    other = {"a": torch.zeros(4)}
    with refused(ValueError, ["`a` gives shape (1,)", "expected (4,) of the model"]):
        checkpoint.load(path, other)
    assert not other["a"].any()
    checkpoint.save(path, nn.MoE(H, F, E + 1, 2, single_grouped_weight=False))
    with refused(ValueError, [f"groups, expected {E}", "as many experts"]):
        checkpoint.load(path, model)
    checkpoint.save(path, moe(shared_dim=16))
    with pytest.warns(UserWarning, match="`shared.wi`.*not used"):
        checkpoint.load(path, model)
    with torch.device("meta"):
        meta = moe()
    with refused(ValueError, ["meta device", "to_empty"]):
        checkpoint.load(path, meta)
    checkpoint.save(path, {"a": torch.ones(2), "b": torch.ones(2, 3)})
    with torch.inference_mode():
        of_inference = torch.zeros(2, 3)
    (freed := torch.zeros(2, 3)).untyped_storage().resize_(0)
    for value, words in (
        (of_inference, ["inference mode"]),
        (torch.zeros(1, 3).expand(2, 3), ["strides (0, 1)", "clone"]),
        (freed, ["storage is empty", "restore"]),
    ):
        other = {"a": torch.zeros(2), "b": value}
        with refused(ValueError, ["`b` of `like` of load", *words, "expected a tensor that can be written"]):
            checkpoint.load(path, other)
        assert not other["a"].any()


@pytest.mark.rule("CKP-3")
@pytest.mark.parametrize("single", [True, False])
def test_a_tensor_that_is_missing_in_any_layer_leaves_all_layers_as_they_are(tmp_path: Path, single: bool) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "f.safetensors"
    given, model = (
        torch.nn.ModuleList(nn.GroupedMLP(E, H, F, bias=True, single_grouped_weight=single) for _ in range(2))
        for _ in range(2)
    )
    before, state = copy.deepcopy(model), given.state_dict()
    for key in state:
        save_file({name: each for name, each in state.items() if name != key}, path)
        with pytest.raises((KeyError, ValueError), match="expected"):
            checkpoint.load(path, model, layout="torch_bridge")
        same(model, before)
    save_file(state, path)
    same(checkpoint.load(path, model, layout="torch_bridge"), given)


@pytest.mark.rule("CKP-3", "LOR-5")
def test_a_base_loads_beside_adapters(tmp_path: Path) -> None:
    """All of them or none: a checkpoint with some of the factors is incomplete."""
    path, base, model = tmp_path / "f.safetensors", moe(1), moe(2, lora_rank=2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    checkpoint.save(path, base)
    checkpoint.load(path, model)
    after, plain = model.state_dict(), base.state_dict()
    assert sum("lora_" in key for key in after) == 4
    for key, value in after.items():
        bitwise(value, before[key] if "lora_" in key else plain[key], key)
    checkpoint.save(
        path, {**plain, "experts.linear_fc1.lora_A": after["experts.linear_fc1.lora_A"]}, {"experts": "swiglu"}
    )
    with refused(KeyError, ["nothing for", "lora_"]):
        checkpoint.load(path, model)
    with refused(KeyError, ["nothing for", "lora_A"]):
        checkpoint.load(path, {"lora_A": torch.zeros(1)})


def test_trees_of_tensors_need_a_spec(tmp_path: Path) -> None:
    path, tree = tmp_path / "f.safetensors", as_torch(written("torch_bridge", expert_parts(), path="a"))
    with refused(ValueError, ["`spec` of save", "`a.experts`", "expected an Activation", "pass it"]):
        checkpoint.save(path, tree)
    assert not path.exists()
    for spec in ("swiglu", {"a": "swiglu"}, {"a.experts": Activation("swiglu")}):
        checkpoint.save(path, tree, spec)
        same(checkpoint.load(path, {key: torch.zeros_like(value) for key, value in tree.items()}), tree)
    with refused(TypeError, ["`x` of a checkpoint: int", "expected a tensor"]):
        checkpoint.save(path, {"x": 3}, "swiglu")


def test_what_would_make_a_file_that_does_not_load_is_not_saved(tmp_path: Path) -> None:
    path, layer = tmp_path / "m.safetensors", moe()
    for spec in ("geglu_tanh", {"experts": "geglu_tanh"}):
        parts = ["`spec` of save", "geglu_tanh", "for `experts`", "swiglu", "of its module", "leave it"]
        with refused(ValueError, parts):
            checkpoint.save(path, layer, spec)
    with refused(ValueError, ["named `__metadata__`", "expected another name", "rename"]):
        checkpoint.save(path, {"__metadata__": torch.zeros(2)})
    with refused(ValueError, ["named '\\ud800'", "UTF-8", "rename"]):
        checkpoint.save(path, {"\ud800": torch.zeros(2)})
    assert not list(tmp_path.iterdir())
    conjugate = torch.tensor([1 + 2j], dtype=torch.complex64).conj()
    checkpoint.save(path, {"z": conjugate})
    bitwise(checkpoint.load(path, {"z": torch.zeros(1, dtype=torch.complex64)})["z"], conjugate.resolve_conj())
    checkpoint.save(path, {"a": layer, "b": torch._neg_view(torch.ones(2))}, "swiglu")
    read = checkpoint.load(path, {"a": moe(1), "b": torch.zeros(2)})
    same(read["a"], layer)
    bitwise(read["b"], -torch.ones(2))


def test_linear_layers_of_both_forms(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    for single in (False, True):
        given = nn.GroupedLinear(3, 8, 16, single_grouped_weight=single, single_grouped_bias=single)
        checkpoint.save(path, {"a": given})
        model = nn.GroupedLinear(3, 8, 16, single_grouped_weight=not single, single_grouped_bias=not single)
        checkpoint.load(path, {"a": model})
        x, sizes = torch.randn(5, 8), torch.tensor([2, 0, 3])
        bitwise(model(x, sizes), given(x, sizes), "y")


def test_tensors_are_streamed_one_by_one(tmp_path: Path) -> None:
    path, megabyte = tmp_path / "f.safetensors", 1 << 20
    tree = {f"t{at}": torch.full((megabyte // 4,), float(at)) for at in range(16)}
    like = {key: torch.zeros_like(value) for key, value in tree.items()}
    tracemalloc.start()
    try:
        checkpoint.save(path, tree)
        checkpoint.load(path, like)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert megabyte < peak < 4 * megabyte, peak  # arrays that are read are traced, so that one of them is seen
    same(like, tree)


# ---- conversion


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "torch_bridge"])
def test_layouts_there_and_back(layout: str) -> None:
    given = moe(single_grouped_bias=True, **FULL).state_dict()
    there = checkpoint.convert(given, "torch_bridge", layout)
    assert there.keys() != given.keys() or layout.startswith("megatron")
    same(checkpoint.convert(there, layout, "torch_bridge"), given)


@pytest.mark.rule("CKP-8")
def test_mxfp4_of_gpt_oss_is_read_as_it_is(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    given = {
        "experts.gate_up_proj_blocks": draw(E, 2 * F, H // 32, 16),
        "experts.down_proj_blocks": draw(E, H, F // 32, 16),
    }
    given |= {"experts.gate_up_proj_scales": draw(E, 2 * F, H // 32) % 8 + 120}
    given |= {"experts.down_proj_scales": draw(E, H, F // 32) % 8 + 120, "router.weight": torch.randn(E, H)}
    found = checkpoint.convert(given, "gpt_oss", "torch_bridge", interleave=1)
    wi = found["experts.linear_fc1.weight"]
    assert isinstance(wi, QTensor)
    assert wi.scales is not None
    assert (wi.format.name, wi.axis, wi.shape, wi.dtype) == ("mxfp4", 2, (E, 2 * F, H), "bfloat16")
    bitwise(wi.values, given["experts.gate_up_proj_blocks"].reshape(E, 2 * F, H // 2), "codes")
    bitwise(wi.scales.view(torch.uint8), given["experts.gate_up_proj_scales"], "scales")
    back = checkpoint.convert(found, "torch_bridge", "gpt_oss", interleave=1)
    same(back, given)
    halves = checkpoint.convert(given, "gpt_oss", "torch_bridge")["experts.linear_fc1.weight"]
    whole = dequantize(wi)
    bitwise(dequantize(halves), torch.cat([whole[:, ::2], whole[:, 1::2]], 1), "halves")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    theirs = convert_moe_packed_tensors(given["experts.gate_up_proj_blocks"], given["experts.gate_up_proj_scales"])
    bitwise(
        whole,
        theirs.reshape(E, H, 2 * F).swapaxes(1, 2) if theirs.shape[1] == H else theirs.reshape(E, 2 * F, H),
        "values",
    )
    path = tmp_path / "f.safetensors"
    checkpoint.save(path, found, Activation("clamped_qgeglu", interleave=1))
    same(
        checkpoint.convert(checkpoint.load(path, copy.deepcopy(found)), "torch_bridge", "gpt_oss", interleave=1), given
    )
    save_file(given, path)
    loaded = checkpoint.load(path, copy.deepcopy(found), layout="gpt_oss", interleave=(1, 1))
    same(checkpoint.convert(loaded, "torch_bridge", "gpt_oss", interleave=1), given)


def test_scales_of_several_columns_are_not_permuted() -> None:
    q = quantize(torch.randn(2, 256, 128), "fp8_128x128", axis=2)
    tree = {"linear_fc1.weight": q, "linear_fc2.weight": torch.randn(2, 128, 128)}
    same_order = checkpoint.convert(tree, "torch_bridge", "jax_grouped", interleave=16)
    assert (same_order["wi"].axis, same_order["wi"].shape) == (1, (2, 128, 256))
    with refused(ValueError, ["linear_fc1.weight.scales", "several output columns", "dequantise"]):
        checkpoint.convert(tree, "torch_bridge", "jax_grouped", interleave=(None, 16))
    with refused(ValueError, ["is quantised", "hugging_face", "dequantise it first"]):
        checkpoint.convert(tree, "torch_bridge", "hugging_face")


@pytest.mark.rule("CKP-5")
def test_codes_of_another_format_are_refused_even_where_shapes_agree(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    tree = {"linear_fc1.weight": quantize(torch.randn(2, 64, 64), "nvfp4"), "linear_fc2.weight": torch.randn(2, 64, 32)}
    checkpoint.save(path, tree, "swiglu")
    q = tree["linear_fc1.weight"]
    assert isinstance(q, QTensor)
    rotated = dataclasses.replace(q, format=q.format.replace(rotate=True, name="rotated"))
    checkpoint.load(path, copy.deepcopy(tree))
    with refused(ValueError, ["`wi.values` in nvfp4", "expected rotated of the model", "in that format"]):
        checkpoint.load(path, {**tree, "linear_fc1.weight": rotated})
    checkpoint.save(path, {"below": tree}, "swiglu")
    with refused(ValueError, ["`wi.values` in nvfp4", "expected rotated of the model", "in that format"]):
        checkpoint.load(path, {**tree, "linear_fc1.weight": rotated}, prefix="below")


@pytest.mark.rule("CKP-5", "QNT-1")
@pytest.mark.parametrize("base", [FP8Current, FP8Delayed], ids=lambda r: r.name)
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
def test_one_form_of_codes_makes_both(tmp_path: Path, base: Recipe, single: bool, hooked: bool) -> None:
    """With one scale per group they have the same codes. A list of weights becomes a packed one and the reverse."""

    def layer(recipe: Recipe, single: bool) -> nn.GroupedMLP:
        options: dict[str, Any] = {"recipe": recipe, "quantized_weights": True, "single_grouped_weight": single}
        return nn.GroupedMLP(E, H, F, bias=False, **options)

    def weights(layer: nn.GroupedMLP) -> list[QTensor[Tensor]]:
        of_layers = (layer.linear_fc1.weight_parameters(), layer.linear_fc2.weight_parameters())
        return [stacked([each.q for each in parameters]) for parameters in of_layers]

    def stacked(members: list[QTensor[Tensor]]) -> QTensor[Tensor]:
        parts = [part for part in ("values", "scales", "group_scales") if getattr(members[0], part) is not None]
        whole: dict[str, Any] = {part: torch.cat([getattr(each, part) for each in members]) for part in parts}
        if members[0].other is not None:
            whole["other"] = stacked([each.other for each in members if each.other is not None])
        return dataclasses.replace(members[0], **whole)

    first, both = layer(base.replace(saved_weights="forward"), single), layer(base, not single)
    if hooked:
        both.register_load_state_dict_pre_hook(checkpoint.load_hook("torch_bridge"))
        both.load_state_dict(first.state_dict())
    else:
        checkpoint.save(tmp_path / "f.safetensors", first)
        checkpoint.load(tmp_path / "f.safetensors", both)
    for found, given in zip(weights(both), weights(first), strict=True):
        assert found.other is not None
        for form, values in ((found, given.values), (found.other, given.values.transpose(1, 2))):
            bitwise(form.values, values)
            for part in ("scales", "group_scales"):
                if getattr(given, part) is not None:
                    bitwise(getattr(form, part), getattr(given, part), part)


@pytest.mark.rule("CKP-5")
@pytest.mark.parametrize("part", ["values", "scales"])
def test_a_part_of_a_second_form_is_not_completed(part: str) -> None:
    """A damaged checkpoint is refused, also where the first form has the codes."""
    options: dict[str, Any] = {"recipe": FP8Current, "quantized_weights": True, "single_grouped_weight": True}
    model = nn.GroupedMLP(E, H, F, bias=False, **options)
    state = model.state_dict()
    lost = next(key for key in state if key.endswith(f".other.{part}"))
    del state[lost]
    model.register_load_state_dict_pre_hook(checkpoint.load_hook("torch_bridge"))
    with refused(ValueError, [f"is quantised without other.{part}"]):
        model.load_state_dict(state)


@pytest.mark.rule("CKP-5")
def test_codes_of_one_form_with_other_codes_make_no_other(tmp_path: Path) -> None:
    path, w = tmp_path / "f.safetensors", torch.randn(2, 64, 64)
    other = {"linear_fc2.weight": torch.randn(2, 64, 64)}
    checkpoint.save(path, {"linear_fc1.weight": quantize(w, "mxfp8", axis=2), **other}, "srelu")
    with refused(ValueError, ["is quantised with scales, values", "other.scales, other.values", "in that form"]):
        checkpoint.load(path, {"linear_fc1.weight": quantize(w, "mxfp8", axis=(2, 1)), **other})


@pytest.mark.parametrize("layout", WRITTEN)
def test_state_dicts_load_through_a_hook(layout: str) -> None:
    parts, inner = expert_parts(), moe(1, bias=True)
    model = torch.nn.ModuleDict({"block": inner})
    handle = inner.register_load_state_dict_pre_hook(checkpoint.load_hook(layout))
    model.load_state_dict(as_torch(written(layout, parts, path="block")))
    handle.remove()
    expected = torch.nn.ModuleDict({"block": moe(2, bias=True)})
    expected.load_state_dict(as_torch(written("torch_bridge", parts, path="block")))
    same(model, expected)
    with refused(ValueError, ["`layout`: 'mixtral'", "expected one of"]):
        checkpoint.load_hook("mixtral")


@pytest.mark.rule("CKP-5", "QNT-1")
@pytest.mark.parametrize("single", [False, True])
def test_plain_weights_are_quantised_behind_a_hook(single: bool) -> None:
    torch.manual_seed(0)
    plain = nn.MoE(128, 128, 2, 1)
    given = checkpoint.convert(plain, "torch_bridge", "hugging_face")
    options: dict[str, Any] = {"recipe": FP8Block, "quantized_weights": True, "single_grouped_weight": single}
    model, expected = nn.MoE(128, 128, 2, 1, **options), nn.MoE(128, 128, 2, 1, **options)
    model.register_load_state_dict_pre_hook(checkpoint.load_hook("hugging_face"))
    model.load_state_dict(given)
    expected.load_state_dict(plain.state_dict())
    same(model, expected)


def test_modules_of_others_are_not_settled(tmp_path: Path) -> None:
    class Foreign(torch.nn.Linear):
        def _settle(self) -> None:
            raise AssertionError("called")

    path, model = tmp_path / "f.safetensors", Foreign(3, 2)
    checkpoint.save(path, model)
    checkpoint.load(path, model)


# ---- optimisers


def _train(model: Any, optimizer: Any, start: int, steps: int) -> None:
    for step in range(start, start + steps):
        optimizer.zero_grad()
        model(rows(step))[0].square().mean().backward()
        optimizer.step()


@pytest.mark.rule("CKP-4", "MLM #5487")
@pytest.mark.parametrize("block", [None, 8])
def test_resuming_in_another_layout_is_the_uninterrupted_run(tmp_path: Path, block: int | None) -> None:
    act = Activation("swiglu", interleave=block)
    options: dict[str, Any] = {"bias": True, "shared_dim": 16}
    first = moe(single_grouped_weight=True, single_grouped_bias=True, **options)
    optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2)
    _train(first, optimizer, 0, 3)
    with torch.no_grad():
        first(rows(99))  # evaluation in between
    path = tmp_path / "f.safetensors"
    checkpoint.save(path, first)
    state = copy.deepcopy(optimizer.state_dict())

    second = moe(7, single_grouped_weight=False, activation=act, **options)
    checkpoint.load(path, second, convert=True)
    moments = checkpoint.convert_optimizer(state, first, second, interleave=(None, block))
    resumed = torch.optim.AdamW(second.parameters(), lr=1e-2)
    resumed.load_state_dict(moments)
    assert len(moments["state"]) == len(list(second.parameters()))
    _train(second, resumed, 3, 3)
    _train(first, optimizer, 3, 3)
    found = checkpoint.convert(second, "torch_bridge", "torch_bridge", interleave=(block, None))
    same(found, first)
    back = checkpoint.convert_optimizer(resumed.state_dict(), second, first, interleave=(block, None))
    for at, entries in optimizer.state_dict()["state"].items():
        for kind, value in entries.items():
            bitwise(back["state"][at][kind], value, f"{kind} of {at}")


@pytest.mark.rule("CKP-4")
def test_optimisers_of_what_is_trained() -> None:
    """A frozen router: modules give the parameters that the optimiser has."""
    listed, single = moe(single_grouped_weight=False), moe()
    for each in (listed, single):
        each.router.requires_grad_(False)
    trained = {name: each for name, each in listed.named_parameters() if each.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    _train(listed, optimizer, 0, 1)
    found = checkpoint.convert_optimizer(optimizer.state_dict(), listed, single)
    wanted = {name: each for name, each in single.named_parameters() if each.requires_grad}
    expected = checkpoint.convert_optimizer(optimizer.state_dict(), trained, wanted, interleave=(None, None))
    assert found["param_groups"] == expected["param_groups"]
    assert len(found["state"]) == len(wanted) == 2
    for at, state in found["state"].items():
        for kind, value in state.items():
            bitwise(value, expected["state"][at][kind], kind)
    torch.optim.AdamW(wanted.values(), lr=1e-2).load_state_dict(found)
    fewer = torch.optim.AdamW(list(trained.values())[1:], lr=1e-2)
    count = len(trained)
    with refused(
        ValueError, ["`names`", f"{count} names that require gradients for {count - 1} parameters", "one each"]
    ):
        checkpoint.convert_optimizer(fewer.state_dict(), listed, single)


@pytest.mark.rule("CKP-4")
def test_groups_and_scalars_of_optimisers() -> None:
    listed, single = moe(single_grouped_weight=False), moe()
    names = [name for name, _ in listed.named_parameters()]
    optimizer = torch.optim.AdamW(listed.named_parameters(), lr=1e-2)
    _train(listed, optimizer, 0, 1)
    state = optimizer.state_dict()
    found = checkpoint.convert_optimizer(state, names, dict(single.named_parameters()))
    assert found["param_groups"][0]["params"] == [0, 1, 2]
    assert found["param_groups"][0]["param_names"] == [name for name, _ in single.named_parameters()]
    assert found["state"][1]["exp_avg"].shape == (E, 2 * F, H)
    apart = checkpoint.convert_optimizer(found, single, listed)
    for converted, given, kept in ((found, state, 2), (apart, found, 1)):
        before = given["state"][kept]["exp_avg"].clone()
        for each in converted["state"].values():
            each["exp_avg"].add_(1)
        if kept == 1:
            bitwise(given["state"][kept]["exp_avg"], before, "moments of the state that was converted")
    fresh = torch.optim.SGD(listed.parameters(), lr=1e-2).state_dict()
    assert checkpoint.convert_optimizer(fresh, listed, single)["param_groups"][0]["params"] == [0, 1, 2]
    with refused(ValueError, ["no tensors of parameters", "pass the parameters themselves"]):
        checkpoint.convert_optimizer(fresh, names, single)
    broken = copy.deepcopy(state)
    broken["state"][2]["step"] += 1
    with refused(ValueError, ["`step` of", "experts.linear_fc1.weight", "expected", "merge states of the same step"]):
        checkpoint.convert_optimizer(broken, names, single)
    broken = copy.deepcopy(state)
    del broken["state"][2]
    with refused(ValueError, ["experts.linear_fc1.weight", "missing 1"]):
        checkpoint.convert_optimizer(broken, names, single)
    with refused(ValueError, ["`names`", "`experts.linear", "in place", "as the state records", "one group after"]):
        checkpoint.convert_optimizer(state, names[::-1], single)
    factored = copy.deepcopy(state)
    factored["state"][2]["exp_avg"] = torch.zeros(2 * F, 1)
    with refused(
        ValueError, ["`exp_avg` of `experts.linear_fc1.weight", f"({2 * F}, 1)", "of the parameter", "factored"]
    ):
        checkpoint.convert_optimizer(factored, listed, single)
    for bad in ((optimizer, names, single), (state, None, single), (state, names, names)):
        with refused(TypeError, ["of convert_optimizer", "expected a", "pass"]):
            checkpoint.convert_optimizer(*bad)
    with refused(ValueError, ["`names`", "names for", "in its order"]):
        checkpoint.convert_optimizer(state, names[1:], single)
    two = copy.deepcopy(state)
    group = two["param_groups"][0]
    two["param_groups"] = [{**group, "params": group["params"][:3]}, {**group, "params": group["params"][3:]}]
    with refused(ValueError, ["`param_groups`", "[0, 1]", "one group"]):
        checkpoint.convert_optimizer(two, names, single)
    two["param_groups"] = [
        {**group, "params": group["params"][:5]},
        {**group, "params": group["params"][5:], "lr": 3.0},
    ]
    fewer = {name: each for name, each in single.named_parameters() if "router" not in name}
    grown = {**fewer, "new": torch.zeros(3), "router.weight": single.router.weight}
    made = checkpoint.convert_optimizer(two, dict(listed.named_parameters()), grown)["param_groups"]
    assert [each["params"] for each in made] == [[0, 2, 3], [1]], "a new parameter is in the first group"
    split = checkpoint.convert_optimizer(two, names, single)["param_groups"]
    assert [(each["params"], each["lr"]) for each in split] == [([0, 1], 1e-2), ([2], 3.0)]


@pytest.mark.rule("CKP-4", "CKP-6")
@pytest.mark.parametrize("form", [True, False])
def test_moments_follow_the_columns_of_modules(form: bool) -> None:
    """As their weights do; `interleave` says only what modules do not."""
    options: dict[str, Any] = {"bias": True, "shared_dim": 16}
    blocked = moe(activation=Activation("swiglu", interleave=8), single_grouped_weight=form, **options)
    halves = moe(1, single_grouped_bias=True, **options)
    optimizer = torch.optim.AdamW(blocked.parameters(), lr=1e-2)
    _train(blocked, optimizer, 0, 2)
    state = optimizer.state_dict()
    given = _moments(state, blocked)
    named = dict(blocked.named_parameters()), dict(halves.named_parameters())
    wanted = checkpoint.convert(given, *OURS, interleave=(8, None))
    for names, target, more in (
        (blocked, halves, {}),
        (blocked, halves, {"interleave": (8, None)}),
        (blocked, named[1], {}),
        (named[0], halves, {"interleave": (8, None)}),
        (list(named[0]), named[1], {"interleave": (8, None)}),
    ):
        same(_moments(checkpoint.convert_optimizer(state, names, target, **more), halves), wanted)
    back = checkpoint.convert_optimizer(checkpoint.convert_optimizer(state, blocked, halves), halves, blocked)
    same(_moments(back, blocked), given)
    for bad in (8, (None, None), (8, 8), (4, None)):
        with refused(ValueError, ["`interleave` of convert_optimizer", "expected", "experts` of that module", "leave"]):
            checkpoint.convert_optimizer(state, blocked, halves, interleave=bad)
    with refused(
        ValueError, ["`interleave` of", "None for the columns of `", "interleave 8 of `target`", "as `names`"]
    ):
        checkpoint.convert_optimizer(state, named[0], blocked)
    same(_moments(checkpoint.convert_optimizer(state, named[0], blocked, interleave=8), blocked), given)


@pytest.mark.rule("CKP-4", "CKP-6")
@pytest.mark.parametrize("layout", [name for name in WRITTEN if name != "gpt_oss"])
def test_moments_of_a_module_follow_its_weights_to_every_layout(layout: str) -> None:
    model = moe(activation=Activation("swiglu", interleave=8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _train(model, optimizer, 0, 1)
    target = checkpoint.convert(model, "torch_bridge", layout)
    state = checkpoint.convert_optimizer(optimizer.state_dict(), model, target, target_layout=layout)
    found = {name: state["state"][at]["exp_avg"] for at, name in enumerate(target)}
    same(
        found, checkpoint.convert(_moments(optimizer.state_dict(), model), "torch_bridge", layout, interleave=(8, None))
    )


@pytest.mark.rule("CKP-4", "LOR-5")
@pytest.mark.parametrize("only", [False, True])
def test_moments_of_adapters_follow_their_columns(only: bool) -> None:
    """Also of an optimiser that has the adapters alone."""
    blocked, halves = adapted("MoE", 8), adapted("MoE", None, 1)
    trained: Any = [{n: p for n, p in each.named_parameters() if "lora_" in n} for each in (blocked, halves)]
    optimizer = torch.optim.AdamW(trained[0].values() if only else blocked.parameters(), lr=1e-2)
    _train(blocked, optimizer, 0, 1)
    names, target = trained if only else (blocked, halves)
    state = checkpoint.convert_optimizer(optimizer.state_dict(), names, target, interleave=(8, None))
    listed = list(trained[0]) if only else [name for name, _ in blocked.named_parameters()]
    found, wanted = (
        {listed[at]: entries["exp_avg"] for at, entries in each["state"].items()}
        for each in (state, optimizer.state_dict())
    )
    for width, place in ((F, "experts"), (16, "shared")):
        column = torch.arange(2 * width)
        order = column % width // 8 * 16 + column // width * 8 + column % 8  # where each one is among blocks of 8
        wanted[f"{place}.linear_fc1.lora_B"] = wanted[f"{place}.linear_fc1.lora_B"][:, order]
        assert wanted[f"{place}.linear_fc1.lora_B"].any()
    same(found, wanted)


@pytest.mark.rule("CKP-5", "ERR-1")
def test_convert_does_not_turn_a_module_beside_what_it_does_not_know() -> None:
    model = moe(activation=Activation("swiglu", interleave=8))
    tree = {"model": model, "moments": model.state_dict()}
    with refused(ValueError, ["`interleave` of convert: None for `moments.experts`", "`model.experts`", "(8, None)"]):
        checkpoint.convert(tree, *OURS)
    found = checkpoint.convert(tree, *OURS, interleave=(8, None))
    bitwise(found["moments.experts.linear_fc1.weight"], found["model.experts.linear_fc1.weight"], "moments")


# ---- layers in a Sequential


def sequence(block: int | None, seed: int = 0, kind: Any = nn.ScaledSwiGLU, **options: Any) -> Any:
    torch.manual_seed(seed)
    first, second = nn.GroupedLinear(E, H, 2 * F, **options), nn.GroupedLinear(E, F, H, **options)
    made = torch.nn.ModuleDict({"s": nn.Sequential(first, kind(glu_interleave_size=block), second)})
    with torch.no_grad():
        for name, each in made.named_parameters():
            if name.endswith("lora_B"):
                each.normal_()
    return made


def of_sequence(model: Any) -> Tensor:
    sizes = torch.tensor([4, 0, 3, 2])
    return model["s"](rows(), sizes, torch.linspace(0, 1, 9), sizes)


@pytest.mark.rule("CKP-5", "CKP-6")
@pytest.mark.parametrize("forms", [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize("blocks", [(8, None), (None, 8)])
def test_columns_of_a_sequential_are_recorded_and_converted(
    tmp_path: Path, blocks: tuple[Any, Any], forms: tuple[bool, bool]
) -> None:
    path = tmp_path / "f.safetensors"
    given, model = (
        sequence(block, seed, single_grouped_weight=form, lora_rank=2)
        for seed, (block, form) in enumerate(zip(blocks, forms, strict=True))
    )
    checkpoint.save(path, given)
    layer = json.loads(File(path).metadata["jax_grouped"])["layers"]["s.0"]
    assert (layer["kind"], layer["groups"]) == ("linear", E)
    assert layer["form"] == ("grouped" if forms[0] else "indexed")
    assert layer["activation"]["interleave"] == blocks[0]
    before = copy.deepcopy(model)
    words = [f"`s.0` with interleave {blocks[0]}", f"expected {blocks[1]} of the model", "convert=True"]
    with refused(ValueError, words):
        checkpoint.load(path, model)
    same(model, before)
    checkpoint.load(path, model, convert=True)
    bitwise(of_sequence(model), of_sequence(given), "y")
    before.load_state_dict(checkpoint.convert(given, *OURS, interleave=blocks))
    same(before, model)
    tree = {key: torch.zeros_like(each) for key, each in model.state_dict().items()}
    same(checkpoint.load(path, tree, interleave=blocks, convert=True), model)
    with refused(ValueError, ["activation of `s.0`", "swiglu", "situ_glu"]):
        checkpoint.load(path, sequence(blocks[0], kind=nn.ScaledSiTUGLU, lora_rank=2))
    optimizer = torch.optim.AdamW(given.parameters())
    of_sequence(given).square().sum().backward()
    optimizer.step()
    moved = _moments(checkpoint.convert_optimizer(optimizer.state_dict(), given, model), model)
    checkpoint.save(path, {"s": _with_values(given, _moments(optimizer.state_dict(), given))["s"]})
    checkpoint.load(path, before, convert=True)
    same(moved, {name: each.detach() for name, each in before.named_parameters() if name in moved})


def _with_values(model: Any, values: dict[str, Tensor]) -> Any:
    made = copy.deepcopy(model)
    with torch.no_grad():
        for name, each in values.items():
            made.get_parameter(name).copy_(each)
    return made


@pytest.mark.rule("CKP-5")
def test_files_that_do_not_record_a_sequential_are_taken_as_they_are(tmp_path: Path) -> None:
    """Those of earlier releases, and of others, unless `interleave` says their order."""
    from safetensors.torch import save_file

    path, given = tmp_path / "f.safetensors", sequence(8)
    checkpoint.save(path, given.state_dict())  # a tree, which records no more than earlier releases did of modules
    model = sequence(8, 1)
    same(checkpoint.load(path, model), given)
    halves = sequence(None, 1)
    checkpoint.load(path, halves, interleave=(8, None), convert=True)
    bitwise(of_sequence(halves), of_sequence(given), "y")
    save_file(given.state_dict(), path)
    same(checkpoint.load(path, sequence(8, 2), layout="torch_bridge"), given)
    same(checkpoint.load(path, sequence(None, 2), layout="torch_bridge", interleave=8), halves)


# ---- state dicts


@pytest.mark.rule("CKP-5", "CKP-6")
@pytest.mark.parametrize("kind", ["GroupedMLP", "MoE", "Sequential", "loose"])
def test_state_dicts_say_the_order_of_columns(tmp_path: Path, kind: str) -> None:
    """They hold it in their metadata; those without it load as they did."""

    def build(block: int | None, seed: int) -> Any:
        if kind == "Sequential":
            return sequence(block, seed)
        if kind == "loose":
            return torch.nn.ModuleList([nn.GroupedLinear(E, H, 2 * F), nn.ScaledSwiGLU(glu_interleave_size=block)])
        return torch.nn.ModuleDict({"a": adapted(kind, block, seed)})

    given, model = build(8, 0), build(None, 1)
    torch.save(given.state_dict(), tmp_path / "s.pt")
    for state in (given.state_dict(), torch.load(tmp_path / "s.pt", weights_only=True)):
        before = copy.deepcopy(model.state_dict())
        with refused(ValueError, ["with interleave 8, expected None of the module", "(8, None)", "`dict(state)`"]):
            model.load_state_dict(state)
        if kind != "loose":  # whose linear layer does not know of the activation
            same(model, before)
    same_order = build(8, 2)
    same_order.load_state_dict(given.state_dict())
    same(same_order, given)
    model.load_state_dict(dict(given.state_dict()))
    same(model, given)
    set_model_state_dict(same_order, get_model_state_dict(build(8, 4)))  # of distributed checkpoints: without metadata
    model.load_state_dict(build(None, 3).state_dict())


@pytest.mark.rule("CKP-6")
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("kind", ["GroupedMLP", "MoE", "Sequential"])
def test_a_hook_tells_layers_the_order_that_it_made(kind: str, outer: bool) -> None:
    def build(block: int | None, seed: int) -> Any:
        made = sequence(block, seed) if kind == "Sequential" else torch.nn.ModuleDict({"s": adapted(kind, block, seed)})
        return made if outer else made["s"]

    given, model = build(8, 0), build(None, 1)
    handle = model.register_load_state_dict_pre_hook(checkpoint.load_hook("torch_bridge", interleave=(8, None)))
    model.load_state_dict(given.state_dict())
    same(model, checkpoint.convert(given, *OURS, interleave=(8, None)))
    with refused(ValueError, ["interleave None, expected 8 of the hook", "checkpoint.load_hook"]):
        model.load_state_dict(build(None, 2).state_dict())
    handle.remove()
    model.load_state_dict(build(None, 3).state_dict())
    if kind == "Sequential":  # whose columns a hook takes as they are, unless it is told their order
        again = build(8, 4)
        again.register_load_state_dict_pre_hook(checkpoint.load_hook("torch_bridge"))
        again.load_state_dict(given.state_dict())
        same(again, given)


class _Partly(torch.nn.Module):
    """A model with layers in two groups of an optimiser; `unused` gets no gradient."""

    def __init__(self, single: bool) -> None:
        super().__init__()
        self.first, self.moe = torch.nn.Linear(H, H), moe(single_grouped_weight=single)
        self.unused = torch.nn.Linear(H, 2)

    def groups(self) -> list[dict[str, Any]]:
        rest = [*self.moe.parameters(), *self.unused.parameters()]
        return [{"params": [*self.first.parameters()]}, {"params": rest, "lr": 0.25}]


@pytest.mark.rule("CKP-4")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("by", ["module", "names"])
def test_parameters_without_state_stay_in_their_groups(by: str, single: bool, frozen: bool) -> None:
    """Those without gradients; `frozen`: the first weights of experts too, whose facts are those of the module."""
    old, new = _Partly(single), _Partly(not single)
    if frozen:
        for each in old.moe.experts.linear_fc1.parameters():
            each.requires_grad_(False)
    optimizer = torch.optim.Adam(old.groups())
    old.moe(old.first(rows()))[0].sum().backward()
    optimizer.step()
    names: Any = old if by == "module" or frozen else [name for name, _ in old.named_parameters()]
    found = checkpoint.convert_optimizer(optimizer.state_dict(), names, new)
    resumed = torch.optim.Adam(new.groups())
    resumed.load_state_dict(found)
    held = [each for group in resumed.param_groups for each in group["params"]]
    assert [group["lr"] for group in resumed.param_groups] == [1e-3, 0.25]
    assert all(mine is theirs for mine, theirs in zip(held, new.parameters(), strict=True))
    idle = {*new.unused.parameters()} | ({*new.moe.experts.linear_fc1.parameters()} if frozen else set())
    assert {each for each in held if each not in resumed.state} == idle


@pytest.mark.rule("CKP-4", "ERR-1")
def test_states_of_some_experts_are_refused() -> None:
    listed, single = moe(single_grouped_weight=False), moe()
    listed.get_parameter("experts.linear_fc1.weight1").requires_grad_(False)
    optimizer = torch.optim.AdamW(listed.parameters(), lr=1e-2)
    _train(listed, optimizer, 0, 1)
    said = ["`exp_avg` of `experts.linear_fc1.weight1`: missing", "`experts.linear_fc1.weight`", "all experts"]
    with refused(ValueError, said):
        checkpoint.convert_optimizer(optimizer.state_dict(), listed, single)


@pytest.mark.rule("CKP-3", "ERR-1")
def test_a_state_of_delayed_scaling_is_loaded_whole_or_not_at_all(tmp_path: Path) -> None:
    layer = nn.GroupedLinear(E, H, F, recipe=FP8Delayed)
    state = layer.state_dict()
    for lost in ("scaling_scale", "scaling_history", "scaling_top"):
        checkpoint.save(tmp_path / "c", {"a": {key: value for key, value in state.items() if key != lost}})
        with refused(KeyError, [f"nothing for `a.{lost}`", "expected a tensor for each"]):
            checkpoint.load(tmp_path / "c", {"a": layer})
    checkpoint.save(tmp_path / "c", {"a": {key: value for key, value in state.items() if "scaling" not in key}})
    checkpoint.load(tmp_path / "c", {"a": layer})


# ---- ranks


@pytest.mark.rule("CKP-7", "ERR-1")
def test_what_only_the_first_rank_would_write_is_not_saved(tmp_path: Path) -> None:
    """Its place among the experts of all ranks is not known, and the parts of other ranks were lost in silence."""
    layers: dict[str, Any] = {"lora_A": {"lora_rank": 2}, "scaling_scale": {"recipe": FP8Delayed}}
    for rank in (0, 1):
        for name, options in layers.items():
            with refused(
                ValueError, [f"{name}` of a checkpoint of several", "of one rank", "expected weights", "apart"]
            ):
                checkpoint.save(tmp_path / "c", {"a": nn.GroupedMLP(2, H, F, **options)}, shard=(rank, 2))
        for single in (False, True):
            layer = nn.GroupedLinear(2, H, F, single_grouped_weight=single)
            with refused(ValueError, ["`a` of save", "outside of an MLP", "expected GroupedMLP", "each rank apart"]):
                checkpoint.save(tmp_path / "c", {"a": layer}, shard=(rank, 2))
    assert not list(tmp_path.iterdir())
    shared = {"a": nn.MoE(H, F, 2, 1, shared_dim=8), "b": torch.nn.Linear(2, 2)}  # the same on all ranks
    checkpoint.save(tmp_path / "c", shared, shard=(0, 2))


@pytest.mark.rule("CKP-5")
def test_files_of_later_versions_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path, model = tmp_path / "f.safetensors", moe()
    checkpoint.save(path, model)
    notes = json.loads(File(path).metadata["jax_grouped"]) | {"version": 2}
    save_file(dict(model.state_dict()), path, {"jax_grouped": json.dumps(notes)})
    with refused(ValueError, [f"`{path}`", "metadata of version 2", "expected at most 1", "install a newer one"]):
        checkpoint.load(path, model)


@pytest.mark.rule("CKP-5", "CKP-6")
def test_files_without_the_activation_of_gated_experts_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path, model = tmp_path / "f.safetensors", moe()
    checkpoint.save(path, model)
    notes = json.loads(File(path).metadata["jax_grouped"])
    notes["layers"]["experts"]["activation"] = None
    save_file(load_file(path), path, {"jax_grouped": json.dumps(notes)})
    with refused(ValueError, [f"`{path}`", "no activation of `experts`", "save it again with `spec`"]):
        checkpoint.load(path, {name: torch.zeros_like(each) for name, each in model.state_dict().items()})


@pytest.mark.rule("CKP-5", "CKP-6")
def test_files_of_several_checkpoints_in_one_folder_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for name, block in (("a", 8), ("b", None)):
        checkpoint.save(tmp_path / f"{name}.safetensors", {name: adapted("MoE", block)})
    model = {"a": adapted("MoE", 8, 1)}
    with refused(ValueError, ["`b.safetensors` has other metadata than `a.safetensors`", "remove those of others"]):
        checkpoint.load(tmp_path, model)
    for name in ("a", "b"):
        save_file(moe().state_dict(), tmp_path / f"{name}.safetensors")
    with refused(
        ValueError, ["`experts.linear_fc1.weight` in `a.safetensors` and in `b.safetensors`", "each tensor once"]
    ):
        checkpoint.load(tmp_path, moe(1), layout="torch_bridge")


@pytest.mark.rule("CKP-7")
@pytest.mark.parametrize("single", [False, True])
def test_four_ranks_save_and_two_load(tmp_path: Path, single: bool) -> None:
    whole = moe(bias=True, single_grouped_bias=True, shared_dim=16)

    def part(rank: int, ranks: int) -> dict[str, Any]:
        made = nn.GroupedMLP(E // ranks, H, F, bias=True, single_grouped_weight=single, single_grouped_bias=single)
        count = E // ranks
        own = {
            key.removeprefix("experts."): value[rank * count : (rank + 1) * count]
            for key, value in whole.state_dict().items()
            if key.startswith("experts.")
        }
        made.load_state_dict(own)
        return {"experts": made, "router": copy.deepcopy(whole.router), "shared": copy.deepcopy(whole.shared)}

    for rank in range(4):
        checkpoint.save(tmp_path / "c", part(rank, 4), shard=(rank, 4))
    names = sorted(name for each in (tmp_path / "c").iterdir() for name in File(each).entries)
    assert len(set(names)) == len(names)
    assert {"wi.0", "wi.3", "wo_bias.2", "router.kernel"} <= set(names)
    for each in (tmp_path / "c").iterdir():
        notes = json.loads(File(each).metadata["jax_grouped"])
        layers = {name: (layer["groups"], layer["form"]) for name, layer in notes["layers"].items()}
        assert layers == {"experts": (E, "indexed"), "shared": (1, "grouped")}
    for rank in range(2):
        found, expected = part(1 - rank, 2), part(rank, 2)
        for each in found["router"].parameters():
            each.data.zero_()
        checkpoint.load(tmp_path / "c", found, shard=(rank, 2))
        for name, module in expected.items():
            same(found[name], module)
    model = moe(3, bias=True, shared_dim=16)
    checkpoint.load(tmp_path / "c", model)
    bitwise(model(rows())[0], whole(rows())[0], "y")
    (tmp_path / "c" / "part-00002-of-00004.safetensors").unlink()
    with refused(ValueError, ["3 files", "expected 4", "complete checkpoint"]):
        checkpoint.load(tmp_path / "c", model)
    with refused(TypeError, ["`shard`: 3", "(rank, ranks)"]):
        checkpoint.load(tmp_path / "c", model, shard=3)
    with refused(ValueError, ["`shard`: (2, 2)", "0 <= rank < ranks"]):
        checkpoint.load(tmp_path / "c", model, shard=(2, 2))
