"""Checkpoints between the frameworks, and those that transformers writes, against its own models."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.torch import save_file
from torch import Tensor

import jax_grouped
from jax_grouped import checkpoint as jax_checkpoint
from jax_grouped.nnx import MoE
from tests.asserts import bitwise, refused
from torch_bridge import Activation, FP8Delayed, checkpoint, nn, route, routed_mlp, update_scaling, weight_only

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the host's
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
E, F, H = 8, 32, 64
FULL: dict[str, Any] = {"shared_dim": 16, "shared_gate": True, "selection_bias": True}


def _as_jax(x: Tensor) -> Any:
    return jnp.asarray(x.float().numpy()).astype(str(x.dtype).removeprefix("torch."))


# ---- one file, two frameworks


@pytest.mark.rule("CKP-8")
@pytest.mark.matrix(dtype=("float32", "bfloat16"), block=(None, 8), single=(True, False))
def test_a_file_of_one_framework_gives_the_same_bits_in_the_other(
    tmp_path: Path, dtype: str, block: int | None, single: bool
) -> None:
    act, kind = Activation("swiglu", interleave=block), getattr(torch, dtype)
    torch.manual_seed(0)
    ours = nn.MoE(H, F, E, 2, bias=True, activation=act, single_grouped_weight=single, dtype=kind, **FULL)
    theirs = MoE(H, F, E, 2, use_bias=True, rngs=nnx.Rngs(1), activation=act, param_dtype=dtype, **FULL)
    path, x = tmp_path / "f.safetensors", torch.randn(9, H).to(kind)
    checkpoint.save(path, ours)
    with refused(ValueError, [f"`{path}`", "layout gnk", "expected gkn of the model", "convert=True"]):
        jax_checkpoint.load(path, theirs)
    jax_checkpoint.load(path, theirs, convert=True)
    y = theirs(_as_jax(x))[0]
    bitwise(ours(x)[0], y, "y of the file of PyTorch")
    jax_checkpoint.save(path, theirs)
    back = nn.MoE(H, F, E, 2, bias=True, activation=act, dtype=kind, **FULL)
    with refused(ValueError, ["layout gkn", "expected gnk of the model", "convert=True"]):
        checkpoint.load(path, back)
    checkpoint.load(path, back, convert=True)
    bitwise(back(x)[0], y, "y of the file of JAX")
    assert float(jnp.abs(y.astype("float32")).sum()) > 0


@pytest.mark.rule("CKP-8")
@pytest.mark.parametrize("inside", [False, True], ids=["layer", "tree"])
def test_states_of_delayed_scaling_go_with_their_weights(tmp_path: Path, inside: bool) -> None:
    recipe = FP8Delayed.replace(history=4)
    torch.manual_seed(0)
    ours, back = (nn.MoE(H, F, E, 2, recipe=recipe, dtype=torch.bfloat16, **FULL) for _ in range(2))
    theirs = MoE(H, F, E, 2, recipe=recipe, rngs=nnx.Rngs(1), param_dtype="bfloat16", **FULL)
    path, x = tmp_path / "f.safetensors", torch.randn(40, H).to(torch.bfloat16)
    for microbatch in (x, 3 * x):
        ours(microbatch)[0].float().square().sum().backward()
        for each in ours.modules():
            if (state := getattr(each, "scaling_state", None)) is not None:
                update_scaling(state)
    kept = {name: value.clone() for name, value in ours.state_dict().items()}
    assert all(kept[f"experts.scaling_{part}"].count_nonzero() for part in ("scale", "history"))
    checkpoint.save(path, torch.nn.ModuleDict({"block": ours}) if inside else ours)
    jax_checkpoint.load(path, {"block": theirs} if inside else theirs, convert=True)
    bitwise(ours(x)[0], theirs(_as_jax(x))[0], "y with the state of PyTorch")
    jax_checkpoint.load(path, {"block": theirs} if inside else theirs, convert=True)  # forward recorded amaxes
    jax_checkpoint.save(path, {"block": theirs} if inside else theirs)
    checkpoint.load(path, torch.nn.ModuleDict({"block": back}) if inside else back, convert=True)
    for name, value in back.state_dict().items():
        bitwise(value, kept[name], name)


@pytest.mark.rule("CKP-3", "MLM #5844", "ERR-1")
def test_convert_refuses_experts_of_another_layout() -> None:
    words = ["`source` of convert", "'gpt_oss'", "pass the layout"]
    with refused(ValueError, [*words, "'torch_bridge'", "`experts.linear_fc1.weight"]):
        checkpoint.convert(nn.MoE(H, F, E, 2), "gpt_oss", "torch_bridge")
    with refused(ValueError, [*words, "'jax_grouped'", "`wi`"]):
        jax_checkpoint.convert(MoE(H, F, E, 2, rngs=nnx.Rngs(0)), "gpt_oss", "jax_grouped")


@pytest.mark.rule("CKP-1", "ERR-1")
@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_the_tensor_that_differs_is_named(tmp_path: Path, name: str) -> None:
    shapes = {"gate_proj": (F, H), "up_proj": (F, H), "down_proj": (H, F)}
    state = {f"experts.{e}.{key}.weight": torch.zeros(shape) for e in range(E) for key, shape in shapes.items()}
    state["gate.weight"] = torch.zeros(E, H)
    state[f"experts.2.{name}.weight"] = torch.zeros(7, 9)
    path = tmp_path / "f.safetensors"
    save_file(state, path)
    with refused(ValueError, [f"`experts.2.{name}.weight`", "[7, 9]", "as in the first expert", "fit together"]):
        checkpoint.load(path, nn.MoE(H, F, E, 2), layout="hugging_face")


@pytest.mark.rule("CKP-3", "CKP-8", "LOR-5")
def test_adapters_of_the_other_framework_are_refused(tmp_path: Path) -> None:
    """The layer would keep its initial ones. A file without adapters leaves them as they are."""
    ours, theirs = nn.MoE(H, F, E, 2, lora_rank=2), MoE(H, F, E, 2, rngs=nnx.Rngs(1), lora_rank=2)
    path = tmp_path / "f.safetensors"
    checkpoint.save(path, ours)
    with refused(KeyError, [f"`{path}`", "lora_A", "wi_lora_a", "not converted between frameworks", "`to_peft`"]):
        jax_checkpoint.load(path, theirs, convert=True)
    jax_checkpoint.save(path, theirs)
    with refused(KeyError, [f"`{path}`", "wi_lora_a", "lora_A", "not converted between frameworks", "`to_peft`"]):
        checkpoint.load(path, ours, convert=True)
    jax_checkpoint.save(path, MoE(H, F, E, 2, rngs=nnx.Rngs(2)))
    checkpoint.load(path, ours, convert=True)


@pytest.mark.rule("CKP-8")
def test_quantised_weights_go_from_one_framework_to_the_other(tmp_path: Path) -> None:
    wi, wo = torch.randn(E, 2 * F, H), torch.randn(E, H, F)
    import torch_bridge

    tree = {
        "linear_fc1.weight": torch_bridge.quantize(wi, "mxfp4"),
        "linear_fc2.weight": torch_bridge.quantize(wo, "mxfp4"),
    }
    path = tmp_path / "f.safetensors"
    checkpoint.save(path, tree, "swiglu")
    like = {
        "wi": jax_grouped.quantize(jnp.zeros((E, H, 2 * F)), "mxfp4", axis=1),
        "wo": jax_grouped.quantize(jnp.zeros((E, F, H)), "mxfp4", axis=1),
    }
    found = jax_checkpoint.load(path, like, convert=True)
    for name, key in (("wi", "linear_fc1.weight"), ("wo", "linear_fc2.weight")):
        bitwise(found[name].values, tree[key].values, "codes")
        bitwise(found[name].scales, tree[key].scales, "scales")
        bitwise(jax_grouped.dequantize(found[name]).swapaxes(1, 2), torch_bridge.dequantize(tree[key]), "values")
    other = {key: jax_grouped.quantize(jnp.zeros(each.shape), "mxfp8", axis=1) for key, each in like.items()}
    with refused(ValueError, ["expected"]):
        jax_checkpoint.load(path, other, convert=True)


# ---- transformers

ROUTING: dict[str, dict[str, Any]] = {
    "Olmoe": {"normalize": False},
    "Mixtral": {"after_topk": True},
    "Qwen3Moe": {"normalize": True},
    "DeepseekV3": {
        "score": "sigmoid",
        "num_groups": 2,
        "topk_groups": 1,
        "group_topk": 2,
        "scale": 2.5,
        "normalize": True,
        "selection_bias": True,
        "shared_dim": F,
    },
}
BLOCK = {"Mixtral": "block_sparse_moe"}


def _close(ours: Any, theirs: Any) -> None:
    """Both sum products of float32 in another order."""
    a, b = (
        np.asarray(each.detach().numpy() if isinstance(each, Tensor) else each, np.float64) for each in (ours, theirs)
    )
    error = np.abs(a - b).max() / np.abs(b).max()
    assert error < 1e-5, f"{error} of the largest value"


@pytest.mark.rule("MLM #5844", "MLM #5845")
@pytest.mark.parametrize("name", ROUTING)
def test_files_of_transformers_give_its_results(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers", reason="it comes with requirements/dev.txt")
    from tests.hosts.models import model

    host = model(name, intermediate_size=F, **({"norm_topk_prob": True} if name == "Qwen3Moe" else {}))
    with torch.no_grad():
        for key, each in host.named_buffers():
            if key.endswith("e_score_correction_bias"):
                each.uniform_(-0.1, 0.1)
    host.save_pretrained(tmp_path)
    where = {"layout": "hugging_face", "prefix": f"model.layers.1.{BLOCK.get(name, 'mlp')}"}
    block = host.model.layers[1].mlp
    x = torch.randn(1, 17, H)
    y = block(x)
    y = y[0] if isinstance(y, tuple) else y
    ours = nn.MoE(H, F, E, 2, **ROUTING[name])
    checkpoint.load(tmp_path / "model.safetensors", ours, **where)
    _close(ours(x)[0], y)
    theirs = MoE(H, F, E, 2, rngs=nnx.Rngs(0), **ROUTING[name])
    jax_checkpoint.load(tmp_path / "model.safetensors", theirs, **where)
    bitwise(theirs(jnp.asarray(x.numpy()))[0], ours(x)[0], "y of JAX")
    # In memory, and back into what was written.
    found = checkpoint.convert(block, "hugging_face", "torch_bridge")
    for key, each in ours.state_dict().items():
        bitwise(found[key], each, key)
    back = checkpoint.convert(ours, "torch_bridge", "hugging_face_grouped")
    block.load_state_dict(back)
    from safetensors.torch import load_file

    kind = "hugging_face_mixtral" if name == "Mixtral" else "hugging_face"
    stored, start = load_file(tmp_path / "model.safetensors"), where["prefix"] + "."
    written = checkpoint.convert(ours, "torch_bridge", kind)
    assert written.keys() == {key.removeprefix(start) for key in stored if key.startswith(start)}
    for key, each in written.items():
        bitwise(each, stored[start + key], key)


@pytest.mark.rule("Megatron-Bridge #1819", "NeMo-RL #4194")
@pytest.mark.parametrize("block", [None, 1])
def test_gpt_oss_gives_its_results(tmp_path: Path, block: int | None) -> None:
    pytest.importorskip("transformers", reason="it comes with requirements/dev.txt")
    from tests.hosts.models import model

    host = model("GptOss")
    experts = host.model.layers[1].mlp.experts
    with torch.no_grad():
        for each in experts.parameters():
            each.normal_(std=0.3)
    host.save_pretrained(tmp_path)
    act = Activation("clamped_qgeglu", interleave=block)
    ours = nn.GroupedMLP(E, H, F, activation=act, bias=True, single_grouped_weight=True)
    where = {"layout": "gpt_oss", "prefix": "model.layers.1.mlp.experts"}
    checkpoint.load(tmp_path / "model.safetensors", ours, **where)
    x, logits = torch.randn(17, H), torch.randn(17, E)
    weights, ids, _ = route.topk_router(logits, 2, after_topk=True)
    (wi, wo), (bi, bo) = (
        (ours.linear_fc1.weight, ours.linear_fc2.weight),
        (torch.stack([getattr(layer, f"bias{at}") for at in range(E)]) for layer in (ours.linear_fc1, ours.linear_fc2)),
    )
    y = routed_mlp(x, ids, weights, wi, wo, activation=act, wi_bias=bi, wo_bias=bo)
    _close(y, experts(x, ids.long(), weights))
    theirs = jax_grouped.nnx.GroupedMLP(E, H, F, activation=act, use_bias=True, rngs=nnx.Rngs(0))
    jax_checkpoint.load(tmp_path / "model.safetensors", theirs, **where)
    bitwise(theirs.wi[...].swapaxes(1, 2), wi, "wi")
    back = checkpoint.convert(ours, "torch_bridge", "gpt_oss", interleave=block)
    assert back.keys() == experts.state_dict().keys()
    for key, each in experts.state_dict().items():
        bitwise(back[key], each, key)


BLOCKS, SCALES = "experts.down_proj_blocks", "experts.down_proj_scales"


@pytest.mark.rule("CKP-1", "ERR-1")
@pytest.mark.parametrize(
    ("key", "shape", "words"),
    [
        (SCALES, None, [f"`{BLOCKS}` without `{SCALES}`", "expected both", "pass the whole weight"]),
        (BLOCKS, None, [f"`{SCALES}` without `{BLOCKS}`", "expected both", "pass the whole weight"]),
        (BLOCKS, (E - 1, H, 1, 16), ["checkpoint: `experts.", "expected [", "fit together"]),
        (BLOCKS, (E, H, 16), [f"`{BLOCKS}` uint8[{E}, {H}, 16]", "expected [", "fit together"]),
        (SCALES, (E - 1, H, 1), [f"`{SCALES}` uint8[{E - 1}, {H}, 1]", f"expected [{E}, {H}, 1]", "each block"]),
        (SCALES, (E, H, 7), [f"`{SCALES}` uint8[{E}, {H}, 7]", f"expected [{E}, {H}, 1]", "each block"]),
        (SCALES, (), [f"`{SCALES}` uint8[]", f"expected [{E}, {H}, 1]", "each block"]),
    ],
)
def test_converted_codes_of_gpt_oss_must_fit_together(
    key: str, shape: tuple[int, ...] | None, words: list[str]
) -> None:
    shapes: dict[str, tuple[int, ...] | None] = {
        "experts.gate_up_proj_blocks": (E, 2 * F, H // 32, 16),
        "experts.gate_up_proj_scales": (E, 2 * F, H // 32),
        BLOCKS: (E, H, F // 32, 16),
        SCALES: (E, H, F // 32),
    }
    given = {name: np.full(of, 120, np.uint8) for name, of in (shapes | {key: shape}).items() if of is not None}
    with refused(ValueError, words):
        checkpoint.convert({name: torch.from_numpy(each) for name, each in given.items()}, "gpt_oss", "torch_bridge")
    with refused(ValueError, words):
        jax_checkpoint.convert({name: jnp.asarray(each) for name, each in given.items()}, "gpt_oss", "jax_grouped")


def _codes(format: str, *shape: int) -> Any:
    return jax_grouped.quantize(jnp.asarray(np.random.default_rng(0).normal(size=shape), "bfloat16"), format, axis=1)


@pytest.mark.rule("CKP-1")
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "fp8_1x128"])
def test_halves_of_codes_are_joined_and_split(tmp_path: Path, format: str) -> None:
    """Scales of single columns go with them, and no value changes."""
    pair = {"wi_0": _codes(format, E, H, F), "wi_1": _codes(format, E, H, F), "wo": _codes(format, E, F, H)}
    values = {name: np.asarray(jax_grouped.dequantize(q), np.float32) for name, q in pair.items()}
    whole = np.concatenate([values["wi_0"], values["wi_1"]], -1)
    joined = jax_checkpoint.convert(pair, "jax_grouped", "torch_bridge")
    found = joined["linear_fc1.weight"]
    assert (found.shape, found.axis) == ((E, 2 * F, H), 2)
    bitwise(np.asarray(jax_grouped.dequantize(found), np.float32).swapaxes(1, 2), whole)
    for source, tree in (("torch_bridge", joined), ("jax_grouped", pair)):
        back = jax_checkpoint.convert(tree, source, "flax")
        assert back.keys() == pair.keys()
        for name, q in back.items():
            assert (q.shape, q.axis, q.format) == (pair[name].shape, 1, pair[name].format)
            bitwise(np.asarray(jax_grouped.dequantize(q), np.float32), values[name], name)
    path = tmp_path / "f.safetensors"
    jax_checkpoint.save(path, pair, "swiglu")
    loaded = jax_checkpoint.load(path, {"wi": _codes(format, E, H, 2 * F), "wo": _codes(format, E, F, H)})
    bitwise(np.asarray(jax_grouped.dequantize(loaded["wi"]), np.float32), whole)


@pytest.mark.rule("CKP-1", "ERR-1")
def test_halves_with_a_scale_each_are_not_joined() -> None:
    pair = {"wi_0": _codes("fp8_tensor", E, H, F), "wi_1": _codes("fp8_tensor", E, H, F)}
    with refused(ValueError, ["`wi_0.scales`", "several output columns together", "dequantise the weight"]):
        jax_checkpoint.convert(pair | {"wo": _codes("fp8_tensor", E, F, H)}, "jax_grouped", "torch_bridge")


@pytest.mark.rule("CKP-1", "LOR-5")
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "nvfp4"])
def test_a_quantised_base_loads_beside_adapters(tmp_path: Path, format: str) -> None:
    """The base holds a form for the gradient of x too, the layer with adapters none."""
    options: dict[str, Any] = {"recipe": weight_only(format), "quantized_weights": True, "dtype": torch.bfloat16}
    base, adapted = nn.GroupedMLP(2, H, F, **options), nn.GroupedMLP(2, H, F, lora_rank=4, **options)
    path, x, sizes = tmp_path / "f.safetensors", torch.randn(9, H).bfloat16(), torch.tensor([4, 5], dtype=torch.int32)
    checkpoint.save(path, base)
    checkpoint.load(path, adapted)
    bitwise(adapted(x, sizes), base(x, sizes))
    checkpoint.save(path, adapted)
    with refused(ValueError, ["is quantised with", "expected", "other.scales", "in that form"]):
        checkpoint.load(path, base)


@pytest.mark.rule("CKP-1", "ERR-2")
def test_options_of_load_have_their_types(tmp_path: Path) -> None:
    path, layer = tmp_path / "f.safetensors", nn.MoE(H, F, E, 2)
    checkpoint.save(path, layer)
    theirs = MoE(H, F, E, 2, rngs=nnx.Rngs(0))
    for load in (partial(checkpoint.load, path, layer), partial(jax_checkpoint.load, path, theirs)):
        with refused(TypeError, ["`prefix`: 3", "expected text", "pass the path"]):
            load(prefix=3)
        with refused(TypeError, ["`convert` of load: 'no'", "expected True or False"]):
            load(convert="no")


GATES = {
    "swiglu": torch.nn.functional.silu,
    "geglu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "geglu_erf": torch.nn.functional.gelu,
}


def _scanned() -> list[Any]:
    """Experts of two families of transformers by lot, whose models have no name in this project's layouts or tests."""
    from tests.hosts.families import families

    known = ("Olmoe", "Mixtral", "Qwen3Moe", "Deepseek", "GptOss", "Qwen2Moe", "Glm4Moe")
    plain = [each for each in families() if each.decorator == "use_experts_implementation" and not each.own_gate]
    others = [each for each in plain if not each.name.startswith(known)]
    return random.Random(23).sample(others, min(2, len(others)))


@pytest.mark.parametrize("family", _scanned(), ids=str)
def test_families_that_no_list_names(family: Any) -> None:
    from tests.hosts.families import experts_module, problem

    module = experts_module(family)
    p = problem(module)
    experts, wide, hidden = module.gate_up_proj.shape
    probe = torch.linspace(-3, 3, 64)
    (kind,) = [
        each for each, function in GATES.items() if torch.allclose(function(probe), module.act_fn(probe), atol=1e-6)
    ]
    ours = nn.GroupedMLP(experts, hidden, wide // 2, activation=kind, single_grouped_weight=True)
    ours.load_state_dict(checkpoint.convert(module, "hugging_face", "torch_bridge"))
    module.config._experts_implementation = "eager"
    y = routed_mlp(p.x, p.ids, p.weights, ours.linear_fc1.weight, ours.linear_fc2.weight, activation=kind)
    _close(y, module(p.x, p.ids, p.weights))
    back = checkpoint.convert(ours, "torch_bridge", "hugging_face_grouped")
    for key, each in module.state_dict().items():
        bitwise(back[key], each, key)
