"""Layouts of checkpoints and files in the safetensors format, in NumPy alone."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grouped_core import layout_steps as steps
from grouped_core.checkpoint_metadata import VERSION, recorded
from grouped_core.checkpoint_plan import Shard, plan
from grouped_core.checkpoint_tensors import converted
from grouped_core.layouts import LAYOUTS, units_of
from grouped_core.safetensors_file import DTYPES, Facts, File, numpy_dtype, write
from tests.asserts import bitwise, refused
from tests.checkpoint_tools import FREE, WRITTEN, E, F, H, expert_parts, written


def facts(value: Any) -> Facts:
    return Facts(tuple(value.shape), value.dtype.name)


def convert(tree: Any, source: str, target: str, interleave: Any = None) -> Any:
    return converted(tree, source, target, interleave, facts, steps.NUMPY, {})


def same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        bitwise(found[key], value, key)


def facts_of(tree: Any) -> dict[str, Facts]:
    return {key: facts(value) for key, value in tree.items()}


# ---- conversion


@pytest.mark.rule("CKP-1", "MLM #5844", "MLM #5845", "Megatron-Bridge #1819")
@pytest.mark.parametrize("target", WRITTEN)
@pytest.mark.parametrize("source", WRITTEN)
@pytest.mark.parametrize("path", ["", "model.layers.3.mlp"])
def test_every_layout_becomes_every_other_bit_for_bit(source: str, target: str, path: str) -> None:
    parts = expert_parts()
    other = {"model.embed": np.arange(6.0), "mlp.gate_proj.weight": np.ones((2, 3))}
    given = {**written(source, parts, path=path), **other}
    same(convert(given, source, target), {**written(target, parts, path=path), **other})


@pytest.mark.rule("CKP-6", "NeMo-RL #4194")
@pytest.mark.parametrize("blocks", [(None, 8), (8, None), (1, 16), (16, 1), (8, 8)])
@pytest.mark.parametrize("source", FREE)
@pytest.mark.parametrize("target", FREE)
def test_columns_are_permuted_exactly(source: str, target: str, blocks: tuple[Any, Any]) -> None:
    parts = expert_parts()
    given = written(source, parts, block=blocks[0])
    same(convert(given, source, target, blocks), written(target, parts, block=blocks[1]))


def adapters(block: int | None, first: str = "linear_fc1.lora_B", second: str = "linear_fc2.lora_A") -> Any:
    """Factor B of the first weight, whose columns are numbered, and A of the second, as a framework names them."""
    columns = np.arange(2 * F)
    gate, up = columns[:F].reshape(-1, block or F), columns[F:].reshape(-1, block or F)
    numbers = np.stack([gate, up], 1).reshape(-1) if block else columns
    b = np.broadcast_to(numbers[:, None], (E, 2 * F, 3)).astype(np.float32)
    a = np.ones((E, 3, F), np.float32)
    turned = first == "wi_lora_b"
    return {first: b.swapaxes(1, 2) if turned else b, second: a.swapaxes(1, 2) if turned else a}


NAMES = {"torch": {}, "jax": {"first": "wi_lora_b", "second": "wo_lora_a"}}
"""The names of `adapters` in each framework."""


@pytest.mark.rule("CKP-6", "LOR-5")
@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("blocks", [(None, 8), (8, None), (1, 16), (8, 8)])
@pytest.mark.parametrize("path", ["", "a.b"])
@pytest.mark.parametrize("target", FREE)
@pytest.mark.parametrize("source", FREE)
def test_columns_of_adapters_are_permuted_with_those_of_their_weights(
    source: str, target: str, path: str, blocks: tuple[Any, Any], names: str
) -> None:
    """They keep their names and the order of their axes, beside a router, alone, and in a shared expert."""
    at = f"{path}." if path else ""
    inside = "" if names == "jax" else "experts."

    def tree(layout: str, block: int | None) -> Any:
        made = written(layout, expert_parts(), path=path, block=block)
        made |= {f"{at}{inside}{key}": each for key, each in adapters(block, **NAMES[names]).items()}
        return made

    same(convert(tree(source, blocks[0]), source, target, blocks), tree(target, blocks[1]))


@pytest.mark.rule("CKP-4", "LOR-5")
@pytest.mark.parametrize("names", NAMES)
def test_adapters_without_weights_are_permuted_as_the_caller_says(names: str) -> None:
    """Such as the moments of an optimiser of adapters alone. Without a gate, columns have one order."""
    given, wanted = (
        {f"opt.mu.{key}": each for key, each in adapters(block, **NAMES[names]).items()} for block in (8, None)
    )
    same(convert(given, "torch_bridge", "torch_bridge", (8, None)), wanted)
    same(convert(given, "torch_bridge", "torch_bridge", 8), given)
    first, second = given
    axis = 1 if names == "jax" else 2
    plain = {first: given[first], second: np.repeat(given[second], 2, axis)}
    same(convert(plain, "torch_bridge", "torch_bridge", (8, None)), plain)
    with refused(ValueError, [f"`{first}` without its weights", f"`{second}`", "have a gate", "merge the adapters"]):
        convert({first: given[first]}, "torch_bridge", "torch_bridge", (8, None))
    stacked = {key: np.stack([each, each]) for key, each in given.items()}
    with refused(ValueError, [f"`{first}`", "interleave 8 to None", "three axes", "merge the adapters first"]):
        convert(stacked, "torch_bridge", "torch_bridge", (8, None))


def test_a_single_block_is_that_of_sides_that_leave_it_open() -> None:
    parts = expert_parts()
    oss = written("gpt_oss", parts)
    same(convert(oss, "gpt_oss", "torch_bridge", 1), written("torch_bridge", parts, block=1))
    same(convert(oss, "gpt_oss", "torch_bridge"), written("torch_bridge", parts))
    same(
        convert(written("torch_bridge", parts, block=4), "torch_bridge", "hugging_face", 4),
        written("hugging_face", parts),
    )


@pytest.mark.rule("CKP-3", "MLM #5844", "ERR-1")
@pytest.mark.parametrize("target", WRITTEN)
@pytest.mark.parametrize(
    ("source", "named"), [("gpt_oss", "torch_bridge"), ("torch_bridge", "flax"), ("jax_grouped", "megatron_indexed")]
)
def test_experts_of_another_layout_are_refused(source: str, named: str, target: str) -> None:
    given = written(named, expert_parts(), path="a") | {"b": np.ones(2)}
    words = [
        "`source` of convert",
        f"'{source}'",
        "expected",
        f"'{named}'",
        f"`{next(iter(given))}`",
        "pass the layout",
    ]
    with refused(ValueError, words):
        convert(given, source, target)


@pytest.mark.parametrize("source", WRITTEN)
def test_a_tree_without_experts_is_returned_as_it_came(source: str) -> None:
    """A part of a checkpoint, say: layers that are dense, or embeddings."""
    dense = {
        "mlp.linear_fc1.weight": np.ones((4, 2)),
        "mlp.linear_fc2.weight": np.ones((2, 4)),
        "embedding": np.ones(3),
    }
    same(convert(dense, source, "flax"), dense)
    assert convert({}, source, "flax") == {}


def test_experts_alone_and_moments_beside_them_are_found() -> None:
    parts = expert_parts()
    whole = {"linear_fc1.weight": parts["gate"], "linear_fc2.weight": parts["down"]}  # no gate: relu
    found = convert({f"opt.mu.mlp.{key}": value for key, value in whole.items()}, "torch_bridge", "jax_grouped")
    same(found, {"opt.mu.mlp.wi": parts["gate"].swapaxes(1, 2), "opt.mu.mlp.wo": parts["down"].swapaxes(1, 2)})
    with refused(ValueError, ["linear_fc1.weight", "no gate", "gate_proj", "choose a layout"]):
        convert(whole, "torch_bridge", "hugging_face")


def test_shared_experts_have_the_names_of_their_layout() -> None:
    parts = expert_parts()
    one = {"shared.linear_fc1.weight": parts["gate"][:1], "shared.linear_fc2.weight": parts["down"][:1, :, : F // 2]}
    given = written("torch_bridge", parts) | one
    plain = convert(given, "torch_bridge", "hugging_face")
    bitwise(plain["shared_experts.up_proj.weight"], parts["gate"][0, F // 2 :], "up")
    gate = {"shared_gate.weight": parts["router"][:1]}
    gated = convert(given | gate, "torch_bridge", "hugging_face")
    bitwise(gated["shared_expert_gate.weight"], parts["router"][:1], "gate")
    assert gated["shared_expert.down_proj.weight"].shape == (H, F // 2)
    same(convert(gated, "hugging_face", "torch_bridge"), given | gate)
    same(
        convert(convert(given | gate, "torch_bridge", "megatron_indexed"), "megatron_indexed", "torch_bridge"),
        given | gate,
    )


# ---- which keys belong together


@pytest.mark.rule("CKP-2")
@pytest.mark.parametrize(
    "key",
    [
        "experts.linear_fc1.weights0",
        "experts.linear_fc1.weight01",
        "experts.linear_fc1.weight-1",
        "experts.linear_fc1.weight0.scale",
        "my_experts.linear_fc1.weight0x",
        "experts.xlinear_fc1.weight",
        "experts.linear_fc1.weight.",
        "experts.linear_fc1.weight٣",
    ],
)
def test_near_misses_are_other_tensors(key: str) -> None:
    given = written("torch_bridge", expert_parts()) | {key: np.zeros((F, H), np.float32)}
    assert key in convert(given, "torch_bridge", "jax_grouped")


@pytest.mark.rule("CKP-2")
def test_ten_experts_are_not_one_and_shared_experts_no_experts() -> None:
    made = {
        f"experts.{i}.{name}.weight": np.full((2, 2), i, np.float32)
        for i in range(11)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    shared = {
        f"shared_experts.{name}.weight": np.full((2, 2), 77, np.float32)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    found = convert(made | shared | {"gate.weight": np.zeros((11, 2), np.float32)}, "hugging_face", "torch_bridge")
    assert found["experts.linear_fc1.weight"][:, 0, 0].tolist() == list(range(11))
    assert found["shared.linear_fc1.weight"].shape == (1, 4, 2)
    without = {key: value for key, value in made.items() if "up_proj" not in key}
    with refused(
        ValueError, ["`experts.0.gate_proj.weight` without its other half `0.up_proj.weight`", "expected both"]
    ):
        convert(without, "hugging_face", "torch_bridge")
    del made["experts.1.up_proj.weight"]
    with refused(ValueError, ["`experts.0.up_proj.weight`", "10 of 11 experts", "missing 1,", "load a complete"]):
        convert(made, "hugging_face", "torch_bridge")


@pytest.mark.rule("CKP-2")
def test_only_leading_module_segments_are_left_out() -> None:
    parts = expert_parts()
    target = facts_of(written("torch_bridge", parts, path="a"))
    here, there = LAYOUTS["torch_bridge"], LAYOUTS["torch_bridge"]

    def missing(path: str) -> list[str]:
        given = facts_of(written("torch_bridge", parts, path=path))
        return plan(given, here, there, lambda _: (None, None), targets=target).missing

    assert not missing("module.module.a")
    assert not missing("a")
    for path in ("b.a", "a.module", "xmodule.a", "module.b.a", ""):
        assert len(missing(path)) == len(target), path


@pytest.mark.rule("CKP-3", "MLM #5844")
def test_two_sources_of_one_target_are_refused() -> None:
    parts = expert_parts()
    both = written("torch_bridge", parts) | written("megatron_indexed", parts)
    with refused(ValueError, ["both `experts.linear_fc1.", "two forms", "remove the other"]):
        convert(both, "torch_bridge", "jax_grouped")
    mixed = written("hugging_face", parts) | written("hugging_face_mixtral", parts)
    with refused(ValueError, ["gate_proj", "w1", "remove the other"]):
        convert(mixed, "hugging_face", "jax_grouped")
    wrapped = written("torch_bridge", parts)
    wrapped |= {f"module.{key}": value for key, value in wrapped.items()}
    target = facts_of(written("jax_grouped", parts))
    with refused(ValueError, ["`experts.linear_fc1.weight`", "`module.experts.linear_fc1.weight`", "without `module`"]):
        plan(facts_of(wrapped), LAYOUTS["torch_bridge"], LAYOUTS["jax_grouped"], lambda _: (None, None), targets=target)
    clash = written("torch_bridge", parts) | {"wi": parts["up"]}
    with refused(ValueError, ["both make `wi`", "remove the other"]):
        convert(clash, "torch_bridge", "jax_grouped")


@pytest.mark.rule("CKP-1")
def test_members_under_each_other_are_split_by_their_exact_shape() -> None:
    parts = expert_parts()
    target = facts_of(written("megatron_indexed", parts))
    given = written("megatron_grouped", parts)
    flat = {key: value.reshape(-1, *value.shape[2:]) if "experts" in key else value for key, value in given.items()}
    layouts = LAYOUTS["megatron_grouped"], LAYOUTS["megatron_indexed"]
    made = plan(facts_of(flat), *layouts, lambda _: (None, None), targets=target)
    found = {}
    for move in made.moves:
        values = steps.run_steps(move.steps, [flat[key] for key in move.sources], steps.NUMPY)
        found |= dict(zip(move.targets, values, strict=True))
    same(found, written("megatron_indexed", parts))
    for shape in ((E, F, H), (2 * E, F, H), (2 * F * E * H,), (), (E * 2 * F + 1, H)):
        wrong = facts_of(given) | {"experts.linear_fc1.weight": Facts(shape, "float32")}
        words = [
            "cannot split checkpoint tensor `experts.linear_fc1.weight`",
            f"({E}, {2 * F}, {H})",
            f"({E * 2 * F}, {H})",
        ]
        with refused(ValueError, words):
            plan(wrong, *layouts, lambda _: (None, None), targets=target)


def test_steps_undo_each_other() -> None:
    pair = list(np.random.default_rng(0).standard_normal((2, 3, 8, 16)))
    cases: list[tuple[steps.Step, list[Any]]] = [
        (steps.Stack(2), pair),
        (steps.Join(-2), pair),
        (steps.Join(-1), pair),
        (steps.Transpose(), pair),
        (steps.Contiguous(2, -2), pair),
        (steps.Grow(), pair),
        (steps.Merge(), [np.zeros((3, 2, 16), np.uint8)]),
        (steps.View("uint8", "float8_e8m0fnu"), [np.arange(4, dtype=np.uint8)]),
    ]
    for step, given in cases:
        there = step.run(given, steps.NUMPY)
        assert [facts(each) for each in there] == step.facts([facts(each) for each in given]), step
        for found, expected in zip(step.inverse.run(there, steps.NUMPY), given, strict=True):
            bitwise(found, expected, str(step))
        assert steps.cancelled([step, step.inverse]) == ()
        assert step.inverse.inverse == step


@pytest.mark.rule("CKP-7")
def test_ranks_take_their_experts_of_all() -> None:
    parts = expert_parts()
    for layout in ("megatron_indexed", "jax_grouped"):
        given = written(layout, parts)
        half = {key: value[: E // 2] for key, value in written("torch_bridge", parts).items() if "experts" in key}
        target = facts_of(half) | {"router.weight": Facts((E, H), "float32")}
        for rank in range(2):
            made = plan(
                facts_of(given),
                LAYOUTS[layout],
                LAYOUTS["torch_bridge"],
                lambda _: (None, None),
                targets=target,
                shard=Shard(rank, 2),
            )
            assert not made.missing
            move = next(each for each in made.moves if each.role == "wo")
            (value,) = steps.run_steps(move.steps, [given[key] for key in move.sources], steps.NUMPY)
            bitwise(value, parts["down"][rank * 2 : rank * 2 + 2], "wo")


def test_patterns_find_units_with_hostile_keys_quickly() -> None:
    keys = {f"{'experts.' * 50}{i}.gate_proj.weight{'.' * 20}": Facts((1,), "float32") for i in range(2000)}
    keys["experts.9999999.gate_proj.weight"] = Facts((1, 1), "float32")
    assert units_of(keys, LAYOUTS["hugging_face"], strip=True).units == {}


# ---- metadata


@pytest.mark.rule("CKP-5")
def test_metadata_of_newer_versions_and_damaged_ones_are_refused() -> None:
    good = {"version": VERSION, "layout": "gkn", "ranks": 1, "layers": {}, "formats": {}}
    assert recorded(json.dumps(good), "f").order == "gkn"
    with refused(ValueError, ["`f`", f"version {VERSION + 1}", f"at most {VERSION}", "install a newer"]):
        recorded(json.dumps(good | {"version": VERSION + 1}), "f")
    layer = {
        "kind": "mlp",
        "groups": 1,
        "form": "grouped",
        "activation": {"kind": "swiglu", "limit": 3},
        "gate": "first",
    }
    bad = [
        {**good, "layers": {"a": layer}},
        {**good, "layout": "x"},
        {**good, "ranks": 0},
        {},
        [],
        {**good, "layers": 3},
    ]
    for each in [*map(json.dumps, bad), "", "[" * 100_000, '{"version":1,"version":1}']:
        with refused(ValueError, ["`f`", "damaged metadata", "load an intact"]):
            recorded(each, "f")


# ---- files


@pytest.mark.parametrize("dtype", DTYPES)
def test_files_are_those_of_the_safetensors_library(tmp_path: Path, dtype: str) -> None:
    library = pytest.importorskip("safetensors", reason="it comes with transformers, of requirements/dev.txt")
    itemsize = numpy_dtype(dtype).itemsize
    raw = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, 6 * itemsize, np.uint8)
    value = raw.view(numpy_dtype(dtype)).reshape(2, 3)
    entries = {"a.é": facts(value), "none": Facts((0, 4), "float32"), "scalar": Facts((), "int64")}
    data = [("a.é", value), ("none", np.zeros((0, 4), np.float32)), ("scalar", np.array(7))]
    path = tmp_path / "new" / "f.safetensors"
    write(path, entries, {"k": "v"}, data)
    found = {name: (tuple(each["shape"]), bytes(each["data"])) for name, each in library.deserialize(path.read_bytes())}
    assert found == {name: (each.shape, each.tobytes()) for name, each in data}
    ours = File(path)
    assert ours.metadata == {"k": "v"}
    for name, each in data:
        bitwise(ours.read(name), each, name)
    assert [each.name for each in path.parent.iterdir()] == ["f.safetensors"]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    entries = {"a": Facts((2,), "float32"), "b": Facts((2,), "float32")}
    path.write_bytes(b"old")

    def failing(error: Any) -> Any:
        yield "a", np.zeros(2, np.float32)
        if error is not None:
            raise error

    for error, kind in ((OSError("full"), OSError), (KeyboardInterrupt(), KeyboardInterrupt), (None, ValueError)):
        with pytest.raises(kind):
            write(path, entries, {}, failing(error))
        assert path.read_bytes() == b"old"
        assert [each.name for each in tmp_path.iterdir()] == ["f.safetensors"]
    for wrong in ([("b", np.zeros(2, np.float32))], [("a", np.zeros(3, np.float32))], [("a", np.zeros(2, np.int32))]):
        with refused(ValueError, ["expected a float32[2]"]):
            write(path, entries, {}, wrong)


def _raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


_U8 = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        _raw({"a": _U8}, bytes(3)),
        _raw({"a": _U8}, bytes(5)),
        _raw({"a": _U8, "b": _U8}, bytes(4)),
        _raw({"a": {**_U8, "data_offsets": [1, 5]}}, bytes(5)),
        _raw({"a": {**_U8, "data_offsets": [4, 0]}}, bytes(4)),
        _raw({"a": {**_U8, "data_offsets": [-4, 0]}}, bytes(4)),
        _raw({"a": {**_U8, "shape": [5]}}, bytes(4)),
        _raw({"a": {**_U8, "shape": [-4]}}, bytes(4)),
        _raw({"a": {**_U8, "shape": [True] * 4}}, bytes(4)),
        _raw({"a": {**_U8, "shape": [4.0]}}, bytes(4)),
        _raw({"a": {**_U8, "shape": [0, 1 << 62], "data_offsets": [0, 0]}}),
        _raw({"a": {**_U8, "shape": [1] * 40 + [4]}}, bytes(4)),
        _raw({"a": {**_U8, "dtype": "F33"}}, bytes(4)),
        _raw({"a": {**_U8, "dtype": ["U8"]}}, bytes(4)),
        _raw({"a": {**_U8, "more": 1}}, bytes(4)),
        _raw({"a": [1]}, bytes(4)),
        _raw({"__metadata__": {"x": 3}}),
        _raw({"__metadata__": []}),
        _raw([1]),
        _raw(b"[" * 100_000),
        _raw(b'{"a":1,"a":1}'),
        _raw(b'{"\xff":1}'),
        _raw(b'{"a":' + b"9" * 5000 + b"}"),
        _raw({}, b"", 1 << 62),
        _raw({}, b"", 1 << 63),
    ],
    ids=range(27),
)
def test_hostile_files_are_refused_in_our_words(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(data)
    with refused(ValueError, [f"checkpoint file `{path}`", "expected", "load a complete, intact file"]):
        File(path)


def test_a_file_that_is_cut_off_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    path.write_bytes(_raw({"a": _U8}, bytes(4)))
    file = File(path)
    path.write_bytes(path.read_bytes()[:-1])
    with refused(ValueError, ["`a` cut off after 3 bytes", "expected 4"]):
        file.read("a")
