"""Checkpoints with FP8 weights in blocks and `weight_scale_inv`, as DeepSeek publishes them, in both frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx as flax_nnx

from grouped_core import safetensors_file
from grouped_core.safetensors_file import Facts
from jax_grouped import checkpoint as jax_checkpoint
from jax_grouped.nnx import MoE
from tests import cases
from tests.asserts import bitwise, refused
from torch_bridge import FP8Block, checkpoint, nn
from torch_bridge._layout_arrays import from_numpy

E, K, H, F, BLOCK = 4, 2, 192, 136, 128
"""Neither size is a multiple of a block."""


def _coded(rows: int, columns: int, seed: object, *, powers: bool, dtype: str = "float32") -> tuple[Any, Any, Any]:
    """Codes, scales, and the values float32 that they represent, computed element by element."""
    codes = (cases.normal((rows, columns), "float32", "fp8", seed) * 60).astype(ml_dtypes.float8_e4m3fn)
    shape = (-(-rows // BLOCK), -(-columns // BLOCK))
    scales = np.abs(cases.normal(shape, "float32", "scales", seed)) / 64 + np.float32(1e-3)
    scales = (np.exp2(np.round(np.log2(scales))) if powers else scales).astype(cases.numpy_dtype(dtype))
    at = np.ix_(np.arange(rows) // BLOCK, np.arange(columns) // BLOCK)
    return codes, scales, codes.astype(np.float32) * scales[at].astype(np.float32)


def _arrays(*, powers: bool, spoiled: str = "", dtype: str = "float32") -> tuple[dict[str, Any], dict[str, Any]]:
    """A checkpoint with codes and scales of `dtype`, and the values of its experts by name."""
    router = cases.normal((E, H), "float32", "router").astype(ml_dtypes.bfloat16)
    arrays: dict[str, Any] = {"mlp.gate.weight": router}
    values: dict[str, Any] = {"gate.weight": router}
    for expert in range(E):
        for name, shape in (("gate_proj", (F, H)), ("up_proj", (F, H)), ("down_proj", (H, F))):
            key = f"experts.{expert}.{name}.weight"
            codes, scales, values[key] = _coded(*shape, key, powers=powers, dtype=dtype)
            arrays |= {f"mlp.{key}": codes, f"mlp.{key}_scale_inv": scales}
    if spoiled:
        arrays[spoiled] = arrays[spoiled][:1, :1]
    return arrays, values


def _written(path: Path, *, powers: bool, spoiled: str = "", dtype: str = "float32") -> dict[str, Any]:
    """That checkpoint as a file; gives the values."""
    arrays, values = _arrays(powers=powers, spoiled=spoiled, dtype=dtype)
    order = dict(sorted(arrays.items(), key=lambda each: -each[1].dtype.itemsize))
    facts = {name: Facts(each.shape, each.dtype.name) for name, each in order.items()}
    safetensors_file.write(path, facts, {}, order.items())
    return values


def _stacked(values: dict[str, Any], name: str) -> Any:
    return np.stack([values[f"experts.{at}.{name}.weight"] for at in range(E)])


@pytest.mark.rule("CKP-8")
@pytest.mark.parametrize(
    ("powers", "scales"), [(True, "float32"), (False, "float32"), (False, "bfloat16"), (False, "float16")]
)
def test_both_frameworks_read_the_values_of_the_codes(tmp_path: Path, powers: bool, scales: str) -> None:
    path = tmp_path / "model.safetensors"
    values = _written(path, powers=powers, dtype=scales)
    where: dict[str, Any] = {"layout": "hugging_face", "prefix": "mlp"}
    ours: Any = nn.MoE(H, F, E, K, dtype=torch.bfloat16)
    before = {name: each.clone() for name, each in ours.state_dict().items()}
    models: tuple[Any, ...] = (ours, None)
    for load, model in zip((checkpoint.load, jax_checkpoint.load), models, strict=True):
        model = model or MoE(H, F, E, K, param_dtype="bfloat16", rngs=flax_nnx.Rngs(0))
        with refused(ValueError, ["gate_proj.weight_scale_inv", "expected plain weights", "convert=True"]):
            load(path, model, **where)
        load(path, model, convert=True, **where)
        if model is ours:
            continue
        wi, wo = (np.asarray(each[...]).swapaxes(1, 2) for each in (model.wi, model.wo))
        bitwise(ours.experts.linear_fc1.weight.detach(), wi, "wi")
        bitwise(ours.experts.linear_fc2.weight.detach(), wo, "wo")
    wi = np.concatenate([_stacked(values, "gate_proj"), _stacked(values, "up_proj")], 1)
    bitwise(ours.experts.linear_fc1.weight.detach(), wi.astype(ml_dtypes.bfloat16), "wi")
    bitwise(ours.experts.linear_fc2.weight.detach(), _stacked(values, "down_proj").astype(ml_dtypes.bfloat16), "wo")
    assert not torch.equal(before["experts.linear_fc1.weight"], ours.experts.linear_fc1.weight)
    if powers:
        bitwise(ours.experts.linear_fc1.weight.detach().float(), wi, "no rounding")
        bitwise(jnp.asarray(ours.router.weight.detach().float().numpy()), values["gate.weight"].astype(np.float32))


@pytest.mark.rule("CKP-8")
def test_a_model_with_quantised_weights_holds_the_same_values(tmp_path: Path) -> None:
    """Scales that are powers of two: quantising the values again changes none of them."""
    path = tmp_path / "model.safetensors"
    values = _written(path, powers=True)
    ours: Any = nn.MoE(H, F, E, K, dtype=torch.bfloat16, recipe=FP8Block, quantized_weights=True)
    checkpoint.load(path, ours, layout="hugging_face", prefix="mlp", convert=True)
    held = ours.experts.linear_fc2.weight
    found = held.dequantize() if hasattr(held, "dequantize") else held
    bitwise(found.detach().float(), _stacked(values, "down_proj"), "wo")


@pytest.mark.rule("CKP-1", "ERR-1")
def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    _written(path, powers=True, spoiled="mlp.experts.1.up_proj.weight_scale_inv")
    ours: Any = nn.MoE(H, F, E, K, dtype=torch.bfloat16)
    before = {name: each.clone() for name, each in ours.state_dict().items()}
    with refused(ValueError, ["experts.1.up_proj.weight", "float32[1, 1]", "[2, 2] of float32", "block of 128 by 128"]):
        checkpoint.load(path, ours, layout="hugging_face", prefix="mlp", convert=True)
    for name, each in ours.state_dict().items():
        bitwise(each, before[name], name)


def _as_torch(array: Any) -> torch.Tensor:
    return from_numpy(np.ascontiguousarray(array))


@pytest.mark.rule("CKP-8")
@pytest.mark.parametrize("powers", [True, False])
@pytest.mark.parametrize("framework", ["torch", "jax", "numpy"])
def test_trees_in_memory_become_what_a_file_loads_as(tmp_path: Path, framework: str, powers: bool) -> None:
    arrays, _ = _arrays(powers=powers)
    codes, scales, wanted = _coded(2 * BLOCK, 40, "attention", powers=powers)
    arrays |= {"attention.weight": codes, "attention.weight_scale_inv": scales}
    ours: Any = nn.MoE(H, F, E, K, dtype=torch.bfloat16)
    _written(path := tmp_path / "model.safetensors", powers=powers)
    checkpoint.load(path, ours, layout="hugging_face", prefix="mlp", convert=True)
    if framework == "torch":
        tree = {key: _as_torch(each) for key, each in arrays.items()}
        made = checkpoint.convert(tree, "hugging_face", "torch_bridge")
        assert made.keys() == {"attention.weight", *(f"mlp.{key}" for key in ours.state_dict())}
        for key, each in ours.state_dict().items():
            bitwise(made[f"mlp.{key}"], each, key)
    else:
        tree = arrays if framework == "numpy" else {key: jnp.asarray(each) for key, each in arrays.items()}
        made = jax_checkpoint.convert(tree, "hugging_face", "jax_grouped")
        assert made.keys() == {"attention.weight", "mlp.router.kernel", "mlp.wi", "mlp.wo"}
        assert all(isinstance(each, np.ndarray) == (framework == "numpy") for each in made.values())
        for name, weight in (("wi", ours.experts.linear_fc1.weight), ("wo", ours.experts.linear_fc2.weight)):
            bitwise(np.asarray(made[f"mlp.{name}"]).swapaxes(1, 2), weight.detach(), name)
    bitwise(made["attention.weight"], wanted.astype(ml_dtypes.bfloat16), "a weight of no layer of experts")


@pytest.mark.rule("CKP-8")
def test_names_may_stay_those_of_the_checkpoint() -> None:
    arrays, values = _arrays(powers=True)
    made = jax_checkpoint.convert(arrays, "hugging_face", "hugging_face")
    assert made.keys() == {f"mlp.{key}" for key in values}
    for key, each in values.items():
        bitwise(made[f"mlp.{key}"].astype(np.float32), each.astype(np.float32), key)


@pytest.mark.rule("CKP-1", "ERR-1")
@pytest.mark.parametrize("fault", ["scales", "dtype", "axes"])
def test_trees_in_memory_are_refused_as_files_are(fault: str) -> None:
    key = "mlp.experts.1.up_proj.weight"
    arrays, _ = _arrays(powers=True, spoiled=f"{key}_scale_inv" if fault == "scales" else "")
    if fault == "dtype":
        arrays[key] = arrays[key].astype(ml_dtypes.float8_e5m2)
    if fault == "axes":
        arrays[key] = arrays[key][None]
    words = ["checkpoint: `mlp.experts.1.up_proj.weight`", "expected a matrix of float8_e4m3fn", "dequantise it before"]
    with refused(ValueError, words):
        jax_checkpoint.convert(arrays, "hugging_face", "jax_grouped")
    with refused(ValueError, words):
        tree = {name: _as_torch(each) for name, each in arrays.items()}
        checkpoint.convert(tree, "hugging_face", "torch_bridge")
