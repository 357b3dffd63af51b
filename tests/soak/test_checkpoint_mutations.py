"""Randomly damaged checkpoint files: a clear error with the model as it was, or whole tensors; never a half load."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from flax import nnx

from jax_grouped import checkpoint as jax_checkpoint
from jax_grouped.nnx import MoE
from tests.checkpoint_tools import mutated
from torch_bridge import checkpoint, nn

SHORT, LONG = 1000, 50_000
SHORT_JAX, LONG_JAX = 150, 5_000


def _clear(error: Exception, seed: int) -> str:
    """The message, which has the parts of a message of ours."""
    text = str(error)
    assert ", expected " in text, f"seed {seed}: {text}"
    assert "; " in text, f"seed {seed}: {text}"
    return text


@pytest.mark.parametrize("single", [True, False])
def test_damaged_files_leave_modules_as_they_are(tmp_path: Path, single: bool, soak: bool) -> None:
    path = tmp_path / "f.safetensors"
    options: dict[str, Any] = {"bias": True, "selection_bias": True, "shared_dim": 2}
    torch.manual_seed(0)
    checkpoint.save(path, nn.MoE(4, 2, 3, 1, single_grouped_weight=single, **options))
    data = path.read_bytes()
    model = nn.MoE(4, 2, 3, 1, **options)
    before = copy.deepcopy(model.state_dict())
    refused, loaded = set(), 0
    for seed in range(LONG if soak else SHORT):
        changed, only_data = mutated(data, random.Random(f"{single} {seed}"))
        path.write_bytes(changed)
        try:  # warnings are errors here
            checkpoint.load(path, model)
            loaded += 1
            model.load_state_dict(before)
        except (ValueError, KeyError) as error:
            text = _clear(error, seed)
            assert not only_data or changed == data, f"seed {seed}: {text}"
            refused.add(text[:60])
            for name, value in model.state_dict().items():
                assert torch.equal(value, before[name]), f"seed {seed}: {name} changed beside {text}"
        except UserWarning:  # an unused tensor, after everything was loaded
            loaded += 1
            model.load_state_dict(before)
    assert len(refused) > 5
    assert loaded > 0


def test_damaged_files_leave_nnx_modules_as_they_are(tmp_path: Path, soak: bool) -> None:
    path = tmp_path / "f.safetensors"
    options: dict[str, Any] = {"selection_bias": True, "shared_dim": 2, "rngs": nnx.Rngs(0)}
    jax_checkpoint.save(path, MoE(4, 2, 3, 1, **options))
    data = path.read_bytes()
    model = MoE(4, 2, 3, 1, **options)
    refused = 0
    for seed in range(LONG_JAX if soak else SHORT_JAX):
        changed, only_data = mutated(data, random.Random(f"jax {seed}"))
        path.write_bytes(changed)
        before = jax.tree.leaves(nnx.state(model))
        try:
            jax_checkpoint.load(path, model)
        except (ValueError, KeyError) as error:
            text = _clear(error, seed)
            assert not only_data or changed == data, f"seed {seed}: {text}"
            now = jax.tree.leaves(nnx.state(model))
            assert all(a is b for a, b in zip(now, before, strict=True)), f"seed {seed}: {text}"
            refused += 1
        except UserWarning:
            pass
    assert refused > 20
