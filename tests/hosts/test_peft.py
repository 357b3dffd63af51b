"""Adapters that PEFT trains on the experts of a model with our implementation, in our layers, and ours in PEFT."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import bounds
from tests.asserts import bitwise
from tests.hosts.families import Problem, problem
from tests.hosts.models import experts_of, model, tokens
from torch_bridge import Activation, checkpoint, nn, route

pytestmark = [
    pytest.mark.rule("LOR-5", "HST-4"),
    pytest.mark.skipif(
        importlib.util.find_spec("peft") is None, reason="peft is not installed; `make test-hosts` installs it"
    ),
    # torch's and the host's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

E, H, F, R, ALPHA = 8, 64, 48, 4, 8.0
LAYERS = 2
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
HOSTS: dict[str, dict[str, Any]] = {
    "Olmoe": {"activation": "swiglu", "layout": "hugging_face"},
    "GptOss": {"activation": Activation("clamped_qgeglu", interleave=1), "bias": True, "layout": "gpt_oss"},
}
"""What our layers need: experts [E, out, in], and experts [E, in, out] with biases and columns in turn."""


def _prefix(layer: int) -> str:
    """Of an adapter's entries in PEFT's files."""
    return f"base_model.model.model.layers.{layer}.mlp.experts."


def _model(name: str) -> Any:
    made = model(name, intermediate_size=F)
    made.set_experts_implementation("jax_grouped")
    return made


def _config() -> Any:
    import peft

    return peft.LoraConfig(r=R, lora_alpha=ALPHA, target_modules=[], target_parameters=TARGETS)


def _layers(name: str, folder: Path) -> list[nn.GroupedMLP]:
    """Our layers of the experts of a model that was saved to the folder, with adapters that are zero."""
    options = dict(HOSTS[name])
    layout = options.pop("layout")
    found = []
    for layer in range(LAYERS):
        plain = nn.GroupedMLP(E, H, F, single_grouped_weight=True, **options)
        checkpoint.load(folder, plain, layout=layout, prefix=f"model.layers.{layer}.mlp.experts")
        made = nn.GroupedMLP(E, H, F, single_grouped_weight=True, lora_rank=R, lora_alpha=ALPHA, **options)
        left = made.load_state_dict(plain.state_dict(), strict=False)
        assert not left.unexpected_keys
        assert all("lora_" in each for each in left.missing_keys)
        found.append(made)
    return found


def _factors(layer: nn.GroupedMLP) -> list[Any]:
    return [each for linear in (layer.linear_fc1, layer.linear_fc2) for each in (linear.lora_A, linear.lora_B)]


def _ours(layer: nn.GroupedMLP, p: Problem) -> Tensor:
    rows, sizes, permutation = route.permute(p.x, p.ids, E, probs=p.weights)
    return route.unpermute(layer(rows, sizes, permutation.probs), permutation)


def _same(layer: nn.GroupedMLP, wrapped: Any, base: Any, p: Problem) -> None:
    """A layer and the experts that PEFT wraps: the result, and the gradients of A and B in PEFT's layout."""
    y, theirs = _ours(layer, p), wrapped(p.x, p.ids, p.weights)
    y.backward(p.dy)
    theirs.backward(p.dy)
    found = {"y": (y, theirs)}
    own = iter(_factors(layer))
    for at in (wrapped.base_layer, wrapped):
        grads = checkpoint.to_peft(next(own).grad, next(own).grad)
        for each, factor in zip(grads, (at.lora_A, at.lora_B), strict=True):
            found[f"{at.parameter_name}, {tuple(each.shape)}"] = (each, factor["default"].weight.grad)
    for what, (mine, other) in found.items():
        # PEFT adds the product of A and B to the weight, and we add its rows to the result.
        error, norm = (mine - other).detach().norm(), other.detach().norm()
        assert norm > 0, what
        assert error <= bounds.MERGED["float32"] * norm, f"{what}: {error / norm:.3g}"
    with torch.no_grad():
        assert (theirs - base(p.x, p.ids, p.weights)).norm() > 0.05 * theirs.norm(), "the adapters do something"


@pytest.mark.parametrize("name", HOSTS)
def test_adapters_that_peft_trained_load_into_our_layers(registered: Any, name: str, tmp_path: Path) -> None:
    import peft
    from safetensors.torch import load_file

    host, ids = _model(name), tokens()
    host.save_pretrained(tmp_path / "base")
    plain = _model(name)
    torch.manual_seed(1)
    made = peft.get_peft_model(host, _config())
    optimizer = torch.optim.AdamW([each for each in made.parameters() if each.requires_grad], lr=0.05)
    losses = []
    for _ in range(3):
        loss = made(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    made.save_pretrained(tmp_path / "adapter")
    state = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(state) == 4 * LAYERS

    wrapped = [each.mlp.experts for each in made.base_model.model.model.layers]
    for at, (layer, base) in enumerate(zip(_layers(name, tmp_path / "base"), experts_of(plain), strict=True)):
        layer.load_peft_state_dict(state, _prefix(at))
        for key, each in layer.peft_state_dict(_prefix(at)).items():
            bitwise(each, state[key], key)
        _same(layer, wrapped[at], base, problem(base))


@pytest.mark.parametrize("name", HOSTS)
def test_adapters_that_our_layers_trained_load_into_peft(registered: Any, name: str, tmp_path: Path) -> None:
    import peft
    from safetensors.torch import load_file, save_file

    host, plain = _model(name), _model(name)
    host.save_pretrained(tmp_path / "base")
    layers, state = _layers(name, tmp_path / "base"), {}
    for at, (layer, base) in enumerate(zip(layers, experts_of(plain), strict=True)):
        optimizer, p = torch.optim.AdamW(_factors(layer), lr=0.05), problem(base, seed=at)
        for _ in range(2):
            _ours(layer, p).backward(p.dy)
            optimizer.step()
            optimizer.zero_grad()
        state |= layer.peft_state_dict(_prefix(at))
    folder = tmp_path / "adapter"
    _config().save_pretrained(folder)
    save_file(state, folder / "adapter_model.safetensors")

    made = peft.PeftModel.from_pretrained(host, folder, is_trainable=True)
    made.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert again.keys() == state.keys()
    for key, each in state.items():
        bitwise(again[key], each, key)
    wrapped = [each.mlp.experts for each in made.base_model.model.model.layers]
    for layer, theirs, base in zip(layers, wrapped, experts_of(plain), strict=True):
        _same(layer, theirs, base, problem(base))
