"""Tiny random models of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
TINY: dict[str, dict[str, Any]] = {
    "Olmoe": {"num_experts": 8},
    "GptOss": {"num_local_experts": 8, "head_dim": 16, "sliding_window": 8},
    "Mixtral": {"num_local_experts": 8, "sliding_window": None},
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 16, "decoder_sparse_step": 1},
    "DeepseekV3": {
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
}
"""Sizes of whole models, by the first part of their names."""


def model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """A model with random weights, large enough that experts matter, which runs its eager experts."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**{**COMMON, **TINY[name], **sizes})
    torch.manual_seed(seed)
    made = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in made.parameters():  # buffers stay float32, as when the host loads a model
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            parameter.data = parameter.data.to(dtype)
    made.set_experts_implementation("eager")
    return made


def tokens(rows: int = 2, length: int = 17, seed: int = 0) -> Tensor:
    """Ids [rows, length] of tokens other than padding."""
    return torch.randint(2, COMMON["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


def gradients(made: Module, ids: Tensor) -> dict[str, Tensor]:
    """The loss and logits of a causal language model, and the gradient of every parameter that needs one."""
    made.zero_grad()
    out = made(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    found = {name: each.grad.clone() for name, each in made.named_parameters() if each.grad is not None}
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), **found}


def experts_of(made: Module) -> list[Any]:
    """The experts modules of a model."""
    return [each for each in made.modules() if hasattr(each, "is_transposed") and hasattr(each, "down_proj")]


@contextmanager
def counted(made: Module) -> Iterator[list[int]]:
    """Counts the calls of its experts modules: a test that compares paths must run them."""
    count = [0]

    def note(*_: Any) -> None:
        count[0] += 1

    handles = [each.register_forward_pre_hook(note) for each in experts_of(made)]
    yield count
    for each in handles:
        each.remove()
