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

E, K, H, F, BLOCK = 4, 2, 192, 136, 128
"""Neither size is a multiple of a block."""


def _coded(rows: int, columns: int, seed: object, *, powers: bool) -> tuple[Any, Any, Any]:
    """Codes, scales, and the values float32 that they stand for, computed element by element."""
    codes = (cases.normal((rows, columns), "float32", "fp8", seed) * 60).astype(ml_dtypes.float8_e4m3fn)
    shape = (-(-rows // BLOCK), -(-columns // BLOCK))
    scales = np.abs(cases.normal(shape, "float32", "scales", seed)) / 64 + np.float32(1e-3)
    scales = np.exp2(np.round(np.log2(scales))).astype(np.float32) if powers else scales.astype(np.float32)
    at = np.ix_(np.arange(rows) // BLOCK, np.arange(columns) // BLOCK)
    return codes, scales, codes.astype(np.float32) * scales[at]


def _written(path: Path, *, powers: bool, spoiled: str = "") -> dict[str, Any]:
    """A checkpoint with codes, and the values of its experts by name."""
    router = cases.normal((E, H), "float32", "router").astype(ml_dtypes.bfloat16)
    arrays: dict[str, Any] = {"mlp.gate.weight": router}
    values: dict[str, Any] = {"gate.weight": router}
    for expert in range(E):
        for name, shape in (("gate_proj", (F, H)), ("up_proj", (F, H)), ("down_proj", (H, F))):
            key = f"experts.{expert}.{name}.weight"
            codes, scales, values[key] = _coded(*shape, key, powers=powers)
            arrays |= {f"mlp.{key}": codes, f"mlp.{key}_scale_inv": scales}
    if spoiled:
        arrays[spoiled] = arrays[spoiled][:1, :1]
    order = dict(sorted(arrays.items(), key=lambda each: -each[1].dtype.itemsize))
    facts = {name: Facts(each.shape, each.dtype.name) for name, each in order.items()}
    safetensors_file.write(path, facts, {}, order.items())
    return values


def _stacked(values: dict[str, Any], name: str) -> Any:
    return np.stack([values[f"experts.{at}.{name}.weight"] for at in range(E)])


@pytest.mark.rule("CKP-8")
@pytest.mark.parametrize("powers", [True, False])
def test_both_frameworks_read_the_values_of_the_codes(tmp_path: Path, powers: bool) -> None:
    path = tmp_path / "model.safetensors"
    values = _written(path, powers=powers)
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
    with refused(ValueError, ["experts.1.up_proj.weight", "float32[1, 1]", "float32[2, 2]", "block of 128 by 128"]):
        checkpoint.load(path, ours, layout="hugging_face", prefix="mlp", convert=True)
    for name, each in ours.state_dict().items():
        bitwise(each, before[name], name)
