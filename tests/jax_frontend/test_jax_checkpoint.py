"""Checkpoints of JAX trees and Flax modules: files and Orbax folders, layouts of the field, optimisers, meshes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from grouped_core.safetensors_file import File
from jax_grouped import Activation, FP8Delayed, QTensor, checkpoint, dequantize, interleave, linen, quantize
from jax_grouped.nnx import GroupedLinear, GroupedMLP, MoE
from tests.asserts import bitwise, refused
from tests.checkpoint_tools import WRITTEN, E, F, H, expert_parts, written

FULL: dict[str, Any] = {"use_bias": True, "shared_dim": 16, "shared_gate": True, "selection_bias": True}


def moe(seed: int = 0, **options: Any) -> MoE:
    made = MoE(H, F, E, 2, rngs=nnx.Rngs(seed), **options)
    if made.selection_bias is not None:
        made.selection_bias[...] = jnp.arange(E, dtype=jnp.float32) / 8
    return made


def rows() -> Any:
    return jax.random.normal(jax.random.key(5), (9, H))


def same(ours: Any, theirs: Any) -> None:
    ours, theirs = (jax.tree_util.tree_flatten_with_path(each) for each in (ours, theirs))
    assert ours[1] == theirs[1]
    for (path, found), (_, expected) in zip(ours[0], theirs[0], strict=True):
        bitwise(found, expected, jax.tree_util.keystr(path))


def params(module: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.RngState)))


@pytest.mark.rule("CKP-8")
def test_quantised_rows_keep_their_sizes(tmp_path: Path) -> None:
    x = np.arange(40 * 64, dtype=np.float32).reshape(40, 64) % 37 - 18
    q = quantize(x, "mxfp8", axis=(1, 0), group_sizes=np.array([5, 35]))
    checkpoint.save(tmp_path / "f.safetensors", {"x": q})
    others = quantize(0 * x, "mxfp8", axis=(1, 0), group_sizes=np.array([20, 20]))
    for like in ({"x": others}, jax.eval_shape(lambda: {"x": others})):
        same(checkpoint.load(tmp_path / "f.safetensors", like)["x"], q)


@pytest.mark.rule("CKP-3", "ERR-1")
def test_nothing_stays_a_description(tmp_path: Path) -> None:
    """What a checkpoint may lack stays as it is in the tree, which wants a value there."""
    x, sizes = jnp.ones((8, H)), jnp.full((E,), 8 // E)
    base, adapted = (linen.GroupedMLP(E, H, F, activation="relu", lora_rank=rank) for rank in (None, 2))
    checkpoint.save(tmp_path / "f.safetensors", base.init(jax.random.key(0), x, sizes), spec=Activation("relu"))
    like = jax.eval_shape(lambda: adapted.init(jax.random.key(0), x, sizes))
    with refused(KeyError, ["lacks", "wi_lora_a", "jax.ShapeDtypeStruct", "initialise"]):
        checkpoint.load(tmp_path / "f.safetensors", like)


@pytest.mark.parametrize("name", ["f.safetensors", "folder"])
def test_arrays_that_may_move_still_may(tmp_path: Path, name: str) -> None:
    """An array that no device was chosen for can meet arrays that are spread over several."""
    checkpoint.save(tmp_path / name, {"a": jnp.ones(8)})
    assert not checkpoint.load(tmp_path / name, {"a": jnp.zeros(8)})["a"].committed
    device = jax.devices()[1]
    assert checkpoint.load(tmp_path / name, {"a": jax.device_put(jnp.zeros(8), device)})["a"].devices() == {device}


@pytest.mark.parametrize("name", ["f.safetensors", "folder"])
def test_a_prefix_may_name_the_wrapper_of_a_module(tmp_path: Path, name: str) -> None:
    checkpoint.save(tmp_path / name, {"module": {"moe": {"a": jnp.ones(3)}}})
    for prefix in ("module.moe", "moe", "module.moe.", "moe."):
        bitwise(checkpoint.load(tmp_path / name, {"a": jnp.zeros(3)}, prefix=prefix)["a"], np.ones(3, np.float32))


@pytest.mark.rule("CKP-5", "CKP-8")
@pytest.mark.parametrize("name", ["f.safetensors", "folder"])
def test_modules_in_files_and_folders(tmp_path: Path, name: str) -> None:
    given, model = moe(recipe=FP8Delayed, jitter=0.1, **FULL), moe(1, recipe=FP8Delayed, jitter=0.1, **FULL)
    for _ in range(2):  # the second one replaces the first
        checkpoint.save(tmp_path / name, {"a": given})
    assert checkpoint.load(tmp_path / name, {"a": model})["a"] is model
    same(params(model), params(given))
    state = jax.tree.map(jnp.zeros_like, params(given))
    same(checkpoint.load(tmp_path / name, state, prefix="a"), params(given))
    plain = moe(2, **FULL)
    with pytest.warns(UserWarning, match=r"scaling.*not used"):
        checkpoint.load(tmp_path / name, plain, prefix="a")
    checkpoint.save(tmp_path / name, plain)
    checkpoint.load(tmp_path / name, model)  # the state of delayed scaling keeps its values
    bitwise(model.wi[...], plain.wi[...], "wi")
    bitwise(params(model)["scaling"].scale, params(given)["scaling"].scale, "scale")


@pytest.mark.rule("CKP-3", "ERR-1")
def test_a_state_of_delayed_scaling_is_loaded_whole_or_not_at_all(tmp_path: Path) -> None:
    model = GroupedLinear(E, H, F, recipe=FP8Delayed, rngs=nnx.Rngs(0))
    tree = params(model)
    whole = {name: getattr(tree["scaling"], name) for name in ("scale", "history", "top")}
    for lost in whole:
        held = {name: value for name, value in whole.items() if name != lost}
        checkpoint.save(tmp_path / "c", {"a": {**tree, "scaling": held}})
        with refused(KeyError, [f"nothing for `a.scaling.{lost}`", "expected a tensor for each"]):
            checkpoint.load(tmp_path / "c", {"a": model})


@pytest.mark.rule("CKP-8")
@pytest.mark.parametrize("name", ["f.safetensors", "folder"])
def test_narrow_types_keep_their_bits(tmp_path: Path, name: str) -> None:
    raw = np.random.default_rng(0).integers(0, 256, 64, np.uint8)
    types = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float16", "float32", "int8")
    tree: dict[str, Any] = {each: jnp.asarray(raw.view(getattr(ml_dtypes, each, each))) for each in types}
    tree["q"] = {"a": quantize(jnp.asarray(np.float32(raw)).reshape(1, 1, 64), "mxfp4", axis=2)}
    checkpoint.save(tmp_path / name, tree)
    same(checkpoint.load(tmp_path / name, jax.tree.map(jnp.zeros_like, tree)), tree)


@pytest.mark.rule("CKP-8")
def test_folders_load_on_another_mesh(tmp_path: Path) -> None:
    def on(devices: int, axis: int) -> NamedSharding:
        mesh = jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices])
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, "x"))

    parts = {key: jnp.asarray(value) for key, value in written("jax_grouped", expert_parts()).items()}
    given = {key: jax.device_put(value, on(4, 0)) for key, value in parts.items()}
    for name in ("folder", "f.safetensors"):
        checkpoint.save(tmp_path / name, given, "swiglu")
        for block in (None, 8):
            sharding = on(2, 1)
            like = {key: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding) for key, each in parts.items()}
            more: dict[str, Any] = {} if block is None else {"interleave": (None, block), "convert": True}
            found = checkpoint.load(tmp_path / name, like, **more)
            assert all(each.sharding == sharding for each in found.values())
            same(
                found,
                {key: jnp.asarray(each) for key, each in written("jax_grouped", expert_parts(), block=block).items()},
            )


@pytest.mark.rule("CKP-5", "CKP-6")
def test_another_activation_is_refused(tmp_path: Path) -> None:
    """Also with `convert`, which turns axes and columns alone; the tensors of a model know no activation."""
    path = tmp_path / "f.safetensors"
    checkpoint.save(path, moe(activation=Activation("clamped_swiglu", limit=7.0)))
    for other in ("swiglu", Activation("clamped_swiglu", limit=3.0)):
        model = moe(1, activation=other)
        before = params(model)
        for convert in (False, True):
            with refused(ValueError, [f"`{path}`", "`experts`", "limit=7.0", "expected Activation", "of the model"]):
                checkpoint.load(path, model, convert=convert)
        same(params(model), before)
        checkpoint.load(path, before)


@pytest.mark.rule("ERR-1")
def test_arrays_without_values_are_not_saved(tmp_path: Path) -> None:
    abstract = jax.eval_shape(lambda: {"w": jnp.zeros((2, 3))})
    with refused(ValueError, ["`w` of save", "ShapeDtypeStruct", "expected values", "load or initialise"]):
        checkpoint.save(tmp_path / "f.safetensors", abstract)
    with refused(TypeError, ["`tree` of a checkpoint", "int", "expected an array", "leave it out"]):
        checkpoint.save(tmp_path / "f.safetensors", 3)
    assert not list(tmp_path.iterdir())


def test_nothing_but_a_checkpoint_is_replaced_by_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orbax removes what is at the path first: also the current folder for an empty path."""
    given = {"w": jnp.ones(3)}
    (tmp_path / "own").mkdir()
    files = [tmp_path / "own" / "notes.txt", tmp_path / "file"]
    for each in files:
        each.write_text("kept")
    monkeypatch.chdir(tmp_path / "own")
    for path, came in (("", "a folder of other files"), (tmp_path / "own", "a folder"), (tmp_path / "file", "a file")):
        with refused(ValueError, ["`path` of save", came, "expected a new or empty folder", "pass another path"]):
            checkpoint.save(path, given)
    assert [each.read_text() for each in files] == ["kept", "kept"]
    (tmp_path / "empty").mkdir()
    checkpoint.save(tmp_path / "empty", given)
    same(checkpoint.load(tmp_path / "empty", given), given)


def test_a_save_that_fails_leaves_the_checkpoint_of_before(tmp_path: Path) -> None:
    given = {"w": jnp.ones(3)}
    checkpoint.save(tmp_path / "folder", given)
    for bad, name in (({}, "tree"), ({"w": jnp.ones(3), "x": jnp.ones((0, 2))}, "x")):
        with refused(ValueError, [f"`{name}` of save", "expected some", "`.safetensors` file"]):
            checkpoint.save(tmp_path / "folder", bad)
        checkpoint.save(tmp_path / "f.safetensors", bad)
        same(checkpoint.load(tmp_path / "f.safetensors", bad), bad)
    same(checkpoint.load(tmp_path / "folder", given), given)


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    path, given = tmp_path / "folder", {"w": jax.random.normal(jax.random.key(0), (64, 64))}
    checkpoint.save(path, given)
    for each in (path / "state").glob("ocdbt.process_*"):
        shutil.rmtree(each)
    with refused(ValueError, [f"`{path}`", "damaged arrays", "expected those", "intact"]):
        checkpoint.load(path, given)


@pytest.mark.rule("CKP-8")
@pytest.mark.parametrize("name", ["f.safetensors", "folder"])
def test_numpy_arrays_of_64_bits_keep_them(tmp_path: Path, name: str) -> None:
    given = {"a": np.array([1 / 3]), "b": np.array([2**40]), "c": jnp.ones(2)}
    checkpoint.save(tmp_path / name, given)
    found = checkpoint.load(tmp_path / name, given)
    assert isinstance(found["a"], np.ndarray)
    same(found, given)
    for key, held in (("a", "float32"), ("b", "int32")):
        like = {**given, key: jax.ShapeDtypeStruct((1,), given[key].dtype)}
        with refused(ValueError, [f"`{key}` of `like`: {given[key].dtype}", f"holds as {held}", "np.zeros((1,)"]):
            checkpoint.load(tmp_path / name, like)


@pytest.mark.rule("CKP-5")
def test_modules_know_their_activation(tmp_path: Path) -> None:
    path, module = tmp_path / "f.safetensors", moe()
    for spec in ("geglu_tanh", Activation("swiglu", interleave=8), {"a": "geglu_tanh"}, {"a.experts": "geglu_tanh"}):
        with refused(
            ValueError, ["`spec` of save", "for `a.experts`", "expected Activation(kind='swiglu'", "leave it"]
        ):
            checkpoint.save(path, {"a": module}, spec)
    checkpoint.save(path, {"a": module, "b": params(module)}, {"b": "swiglu"})
    checkpoint.save(path, {"a": module, "b": params(module)}, "swiglu")


@pytest.mark.rule("CKP-4", "CKP-6")
@jax.numpy_dtype_promotion("standard")  # optax needs it
@pytest.mark.parametrize("name", ["f.safetensors", "folder"])
def test_an_optimizer_is_loaded_in_place_in_the_order_of_its_module(tmp_path: Path, name: str) -> None:
    def pair(seed: int, **options: Any) -> Any:
        model = moe(seed, **options)
        return {"model": model, "opt": nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)}

    given, path = pair(0), tmp_path / name
    given["opt"].update(given["model"], nnx.grad(lambda model: jnp.square(model(rows())[0]).mean())(given["model"]))
    checkpoint.save(path, given, "swiglu")
    like = pair(1)
    assert checkpoint.load(path, like)["opt"] is like["opt"]
    same(params(like["opt"]), params(given["opt"]))
    blocked = pair(2, activation=Activation("swiglu", interleave=8))
    with refused(ValueError, ["`opt.opt_state.0.", "beside `model.experts`", "None to 8", "interleave=(None, 8)"]):
        checkpoint.load(path, blocked, convert=True)
    checkpoint.load(path, blocked, convert=True, interleave=(None, 8))
    moments, expected = (params(each["opt"])["opt_state"][0]["mu"]["wi"] for each in (blocked, given))
    bitwise(moments, interleave(expected, 8), "moments")
    assert float(jnp.abs(moments).sum()) > 0


def adapted(kind: str, block: int | None, seed: int = 0) -> Any:
    """A layer whose adapters are not those of the start, which add nothing."""
    options: dict[str, Any] = {"activation": Activation("swiglu", interleave=block), "lora_rank": 4}
    made: Any = moe(seed, shared_dim=16, **options)
    if kind == "GroupedMLP":
        made = GroupedMLP(E, H, F, rngs=nnx.Rngs(seed), **options)
    for layer in (made, getattr(made, "shared", None)):
        if layer is not None:
            layer.wi_lora_b[...] = jax.random.normal(jax.random.key(seed), layer.wi_lora_b.shape)
    return made


def result(layer: Any) -> Any:
    return layer(rows(), jnp.array([4, 0, 3, 2])) if type(layer) is GroupedMLP else layer(rows())[0]


@pytest.mark.rule("CKP-6", "LOR-5")
@pytest.mark.matrix(kind=["GroupedMLP", "MoE"], blocks=[(8, None), (None, 8), (8, 4)], name=["f.safetensors", "folder"])
def test_columns_of_adapters_change_order_with_those_of_their_weights(
    tmp_path: Path, kind: str, blocks: tuple[Any, Any], name: str
) -> None:
    """Those of the experts and of a shared expert, however they are converted."""
    given, model = adapted(kind, blocks[0]), adapted(kind, blocks[1], 1)
    checkpoint.save(tmp_path / name, {"module": {"a": given}})
    like = {"module": {"a": model}}  # as wrappers of data parallelism name it
    with refused(ValueError, [f"with interleave {blocks[0]}", f"expected {blocks[1]} of the model", "convert=True"]):
        checkpoint.load(tmp_path / name, like)
    checkpoint.load(tmp_path / name, like, convert=True)
    bitwise(result(model), result(given), "loaded")
    same(checkpoint.convert(given, "jax_grouped", "jax_grouped", interleave=(blocks[0], blocks[1])), params(model))
    there = checkpoint.convert(given, "jax_grouped", "torch_bridge")
    same(checkpoint.convert(there, "torch_bridge", "jax_grouped", interleave=(None, blocks[1])), params(model))


@pytest.mark.rule("CKP-4", "CKP-6", "LOR-5")
@jax.numpy_dtype_promotion("standard")  # optax needs it
@pytest.mark.parametrize("name", ["f.safetensors", "folder"])
def test_moments_of_adapters_alone_need_their_order(tmp_path: Path, name: str) -> None:
    """Nothing records it. Linen has all adapters apart from their weights, in a collection of their own."""

    def pair(kind: Any, block: int | None, seed: int) -> Any:
        model = adapted(kind, block, seed)
        return {"model": model, "opt": nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.LoRAParam)}

    given, path = pair("MoE", 8, 0), tmp_path / name
    wanted = nnx.DiffState(0, nnx.LoRAParam)
    given["opt"].update(
        given["model"], nnx.grad(lambda m: jnp.square(result(m)).mean(), argnums=wanted)(given["model"])
    )
    checkpoint.save(path, given)
    like = pair("MoE", None, 1)
    with refused(ValueError, ["`opt.opt_state.0.", "beside `model.", "8 to None", "interleave=(8, None)"]):
        checkpoint.load(path, like, convert=True)
    with refused(ValueError, ["`interleave` of load: 4", "`opt.opt_state.0.", "expected 8", "for `model."]):
        checkpoint.load(path, like, convert=True, interleave=(4, None))
    checkpoint.load(path, like, convert=True, interleave=(8, None))
    found, before = (params(each["opt"])["opt_state"][0]["mu"] for each in (like, given))
    for at in ((), ("shared",)):
        for key in at:
            found, before = found[key], before[key]
        bitwise(interleave(found["wi_lora_b"], 8), before["wi_lora_b"], "moments")
        assert float(jnp.abs(before["wi_lora_b"]).sum()) > 0
    with refused(ValueError, ["`interleave` of convert: None for `opt.", "beside `model.", "interleave=(8, None)"]):
        checkpoint.convert(given, "jax_grouped", "jax_grouped")


@pytest.mark.rule("CKP-6", "LOR-5")
@pytest.mark.parametrize("name", ["f.safetensors", "folder"])
def test_adapters_of_linen_are_permuted_as_the_caller_says(tmp_path: Path, name: str) -> None:
    def layer(block: int | None) -> Any:
        return linen.MoE(H, F, E, 2, activation=Activation("swiglu", interleave=block), lora_rank=4)

    variables = layer(8).init(jax.random.key(0), rows())
    variables["lora"]["wi_lora_b"] = jax.random.normal(jax.random.key(1), variables["lora"]["wi_lora_b"].shape)
    checkpoint.save(tmp_path / name, variables, Activation("swiglu", interleave=8))
    found = checkpoint.load(tmp_path / name, variables, interleave=(8, None), convert=True)
    bitwise(layer(None).apply(found, rows())[0], layer(8).apply(variables, rows())[0], "loaded")
    same(checkpoint.convert(variables, "jax_grouped", "jax_grouped", interleave=(8, None)), found)


def stacked_layers(form: str, seed: int, activation: Any = "swiglu") -> Any:
    """Two layers as a scan over them has them."""

    @nnx.split_rngs(splits=2)
    @nnx.vmap(axis_size=2)
    def made(rngs: nnx.Rngs) -> Any:
        if form == "GroupedMLP":
            return GroupedMLP(E, H, F, activation=activation, rngs=rngs)
        return MoE(H, F, E, 2, shared_dim=16, activation=activation, rngs=rngs)

    return made(nnx.Rngs(seed))


@pytest.mark.rule("CKP-5", "CKP-6")
@pytest.mark.parametrize("form", ["GroupedMLP", "MoE"])
def test_stacked_layers_keep_their_order_of_columns(tmp_path: Path, form: str) -> None:
    """No conversion turns them, so another order is refused, and never taken for the model's."""
    path, blocked = tmp_path / "f.safetensors", Activation("swiglu", interleave=8)
    given, same_order = stacked_layers(form, 0, blocked), stacked_layers(form, 1, blocked)
    checkpoint.save(path, {"a": given})
    checkpoint.load(path, {"a": same_order})
    same(params(same_order), params(given))
    model = stacked_layers(form, 2)
    before = params(model)
    for convert in (False, True):
        with refused(ValueError, [f"`{path}`", "a.", "a scan stacked", "interleave 8, expected None", "each layer"]):
            checkpoint.load(path, {"a": model}, convert=convert)
    with refused(ValueError, ["activation of `a", "swiglu", "geglu_tanh"]):
        checkpoint.load(path, {"a": stacked_layers(form, 2, "geglu_tanh")})
    same(params(model), before)
    for target, block in (("hugging_face", None), ("jax_grouped", (None, 8))):
        with refused(ValueError, ["wi` of shape (2,", "expected the experts of one layer", "one by one"]):
            checkpoint.convert(model, "jax_grouped", target, interleave=block)
    same(checkpoint.convert(model, "jax_grouped", "jax_grouped"), before)


@pytest.mark.rule("CKP-6")
def test_another_order_of_columns_is_refused_and_converted(tmp_path: Path) -> None:
    path, given = tmp_path / "f.safetensors", moe(activation=Activation("swiglu", interleave=8), use_bias=True)
    checkpoint.save(path, given)
    model = moe(1, use_bias=True)
    before = params(model)
    with refused(ValueError, [f"`{path}`", "`experts` with interleave 8", "expected None", "interleave=(8, None)"]):
        checkpoint.load(path, model)
    same(params(model), before)
    checkpoint.load(path, model, convert=True)
    bitwise(model(rows())[0], given(rows())[0], "y")
    same(checkpoint.convert(given, "jax_grouped", "jax_grouped", interleave=(None, None)), params(model))
    tree = params(given)
    same(checkpoint.load(path, tree), tree)  # a tree does not know its activation
    with refused(ValueError, ["interleave 8", "expected 4"]):
        checkpoint.load(path, tree, interleave=4)
    same(checkpoint.load(path, tree, interleave=(8, None), convert=True), params(model))


@pytest.mark.parametrize("layout", WRITTEN)
@pytest.mark.parametrize("arrays", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_layouts_there_and_back(layout: str, arrays: Any) -> None:
    parts = expert_parts()
    given = {key: arrays(value) for key, value in written("jax_grouped", parts, path="a.b").items()}
    there = checkpoint.convert(given, "jax_grouped", layout)
    same(there, {key: arrays(value) for key, value in written(layout, parts, path="a.b").items()})
    back = checkpoint.convert(there, layout, "jax_grouped")
    same(back, given)
    assert all(type(each) is type(given[key]) for key, each in back.items())


def test_nested_trees_stay_nested() -> None:
    given = {"params": params(moe(**FULL))}
    there = checkpoint.convert(given, "jax_grouped", "hugging_face")
    assert there["params"]["experts"]["2"]["up_proj"]["weight"].shape == (F, H)
    same(checkpoint.convert(there, "hugging_face", "jax_grouped"), given)


@pytest.mark.rule("CKP-5", "QNT-1")
@pytest.mark.parametrize("folder", [False, True])
def test_one_form_of_codes_makes_both(tmp_path: Path, folder: bool) -> None:
    """With one scale per group they have the same codes."""
    path, w = (
        tmp_path / ("f" if folder else "f.safetensors"),
        jax.random.normal(jax.random.key(0), (3, 16, 32), "bfloat16"),
    )
    one, both = quantize(w, "fp8_tensor", axis=1), quantize(w, "fp8_tensor", axis=(1, 2))
    checkpoint.save(path, {"wo": one})
    found = checkpoint.load(path, {"wo": jax.tree.map(jnp.zeros_like, both)})["wo"]
    jax.tree.map(bitwise, found, both)


def test_mxfp4_of_gpt_oss_is_read_as_it_is(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    given = {"experts.gate_up_proj_blocks": rng.integers(0, 256, (E, 2 * F, H // 32, 16), np.uint8)}
    given |= {"experts.gate_up_proj_scales": rng.integers(120, 128, (E, 2 * F, H // 32), np.uint8)}
    given |= {"experts.down_proj_blocks": rng.integers(0, 256, (E, H, F // 32, 16), np.uint8)}
    given |= {"experts.down_proj_scales": rng.integers(120, 128, (E, H, F // 32), np.uint8)}
    given = {
        key: jnp.asarray(value) for key, value in (given | {"router.weight": np.zeros((E, H), np.float32)}).items()
    }
    found = checkpoint.convert(given, "gpt_oss", "jax_grouped", interleave=1)
    wi = found["wi"]
    assert isinstance(wi, QTensor)
    assert (wi.format.name, wi.axis, wi.shape) == ("mxfp4", 1, (E, H, 2 * F))
    bitwise(wi.values, given["experts.gate_up_proj_blocks"].reshape(E, 2 * F, H // 2), "codes")
    same(checkpoint.convert(found, "jax_grouped", "gpt_oss", interleave=1), given)
    halves = checkpoint.convert(given, "gpt_oss", "jax_grouped")["wi"]
    whole = dequantize(wi)
    bitwise(dequantize(halves), jnp.concatenate([whole[..., ::2], whole[..., 1::2]], 2), "halves")
    path = tmp_path / "f.safetensors"
    checkpoint.save(path, found, Activation("clamped_qgeglu", interleave=1))
    same(checkpoint.load(path, jax.tree.map(jnp.zeros_like, found)), found)


@pytest.mark.rule("CKP-4")
@jax.numpy_dtype_promotion("standard")  # optax needs it
@pytest.mark.parametrize("name", ["f.safetensors", "folder"])
def test_resuming_in_another_layout_is_the_uninterrupted_run(tmp_path: Path, name: str) -> None:
    def parts(act: Activation) -> tuple[Any, Any, Any]:
        module = linen.MoE(H, F, E, 2, activation=act, use_bias=True, shared_dim=16)
        optimizer = optax.adamw(1e-2)

        @jax.jit
        def step(state: Any, x: Any) -> Any:
            gradient = jax.grad(lambda weights: jnp.square(module.apply(weights, x)[0]).mean())(state["params"])
            change, moments = optimizer.update(gradient, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], change), "opt": moments}

        weights = module.init(jax.random.key(0), rows())
        return {"params": weights, "opt": optimizer.init(weights)}, step, act

    plain, blocked = Activation("swiglu"), Activation("swiglu", interleave=8)
    state, step, _ = parts(plain)
    batches = [jax.random.normal(jax.random.key(at), (9, H)) for at in range(6)]
    for x in batches[:3]:
        state = step(state, x)
    checkpoint.save(tmp_path / name, state, plain)
    like, other_step, _ = parts(blocked)
    resumed = checkpoint.load(tmp_path / name, like, interleave=(None, 8), convert=True)
    for x in batches[3:]:
        state, resumed = step(state, x), other_step(resumed, x)
    checkpoint.save(tmp_path / f"2{name}", resumed, blocked)
    same(checkpoint.load(tmp_path / f"2{name}", like, interleave=(8, None), convert=True), state)
    assert float(jnp.abs(state["opt"][0].mu["params"]["wi"]).sum()) > 0


@pytest.mark.rule("CKP-7")
def test_four_ranks_save_and_two_load(tmp_path: Path) -> None:
    whole = params(moe(**FULL))

    def part(rank: int, ranks: int) -> Any:
        own = slice(rank * E // ranks, (rank + 1) * E // ranks)
        return whole | {key: whole[key][own] for key in ("wi", "wo", "wi_bias", "wo_bias")}

    for rank in range(4):
        checkpoint.save(tmp_path / "c", part(rank, 4), "swiglu", shard=(rank, 4))
    names = sorted(name for each in (tmp_path / "c").iterdir() for name in File(each).entries)
    assert len(set(names)) == len(names)
    assert {"wi.0", "wi.3", "router.kernel", "shared.wi"} <= set(names)
    for rank in range(2):
        like = jax.tree.map(jnp.zeros_like, part(rank, 2))
        same(checkpoint.load(tmp_path / "c", like, shard=(rank, 2)), part(rank, 2))
    same(checkpoint.load(tmp_path / "c", jax.tree.map(jnp.zeros_like, whole)), whole)


@pytest.mark.rule("CKP-3", "LOR-5")
def test_a_base_loads_beside_adapters(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    base, model = (GroupedMLP(E, H, 2 * F, rngs=nnx.Rngs(seed), lora_rank=rank) for seed, rank in ((1, None), (2, 2)))
    before, plain = params(model), params(base)
    checkpoint.save(path, base)
    after = params(checkpoint.load(path, model))
    assert sum("lora_" in key for key in after) == 4
    same(after, {key: plain.get(key, value) for key, value in before.items()})


def test_arrays_of_other_processes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"a": {"b": jnp.ones(3)}}
    monkeypatch.setattr(type(given["a"]["b"]), "is_fully_addressable", False)
    with refused(ValueError, ["`a.b` of a checkpoint", "shape (3,)", "expected whole arrays", "`shard=`"]):
        checkpoint.save(tmp_path / "f.safetensors", given)


def test_bad_arguments_and_trees(tmp_path: Path) -> None:
    path, tree = tmp_path / "f.safetensors", params(moe())
    with refused(ValueError, ["`spec` of save", "`experts`", "expected an Activation"]):
        checkpoint.save(path, tree)
    assert not path.exists()
    with refused(TypeError, ["`a` of a checkpoint: str", "expected an array"]):
        checkpoint.save(path, {"a": "x"})
    with refused(ValueError, ["`a.b` of a checkpoint", "two arrays of that path"]):
        checkpoint.save(path, {"a": {"b": jnp.zeros(1)}, "a.b": jnp.zeros(1)})
    with refused(ValueError, ["`a` of a checkpoint", "dtype key<fry>", "expected one of float64", "key_data"]):
        checkpoint.save(path, {"a": jax.random.key(0)})
    with refused(TypeError, ["`a` of a checkpoint", "masked", "without a mask", "filled"]):
        checkpoint.save(path, {"a": np.ma.masked_array(np.ones(3), mask=True)})
    with refused(ValueError, [f"`{path}`", "`__metadata__`", "another name", "rename"]):
        checkpoint.save(path, {"__metadata__": jnp.zeros(1)})
    checkpoint.save(path, tree, {"": "swiglu"})
    for like, kind, words in (
        (
            jax.tree.map(lambda each: each.astype(jnp.bfloat16), tree),
            ValueError,
            ["dtype float32", "expected bfloat16"],
        ),
        ({"b": tree}, KeyError, ["nothing for", "`b.", "prefix"]),
        (params(GroupedMLP(E, H, 2 * F, rngs=nnx.Rngs(0))), KeyError, ["nothing for", "wi"]),
    ):
        with refused(kind, words):
            checkpoint.load(path, like)
    (tmp_path / "empty").mkdir()
    with refused(ValueError, ["no readable Orbax folder", "expected one that `save` wrote"]):
        checkpoint.load(tmp_path / "empty", tree)
    for name in ("source", "target"):
        with refused(ValueError, [f"`{name}`: 'x'", "expected one of"]):
            checkpoint.convert(tree, **({"source": "flax", "target": "flax"} | {name: "x"}))
    with refused(ValueError, ["`interleave`: 0", "1 or more"]):
        checkpoint.convert(tree, "flax", "flax", interleave=0)
    for call, given in ((checkpoint.from_peft, ([1.0], [1.0], 2)), (checkpoint.to_peft, (None, None))):
        with refused(TypeError, ["`a`", "expected an array", "pass the weights"]):
            call(*given)
