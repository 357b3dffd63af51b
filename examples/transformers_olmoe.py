"""A model of Hugging Face transformers, trained with its own experts and with those of this library.

    python examples/transformers_olmoe.py                       # on the CPU, about half a minute
    python examples/transformers_olmoe.py --recipe FP8Block

A small OLMoE with random weights learns to continue counting; nothing is downloaded. Both runs start from the same
weights and read the same tokens, and one line switches the experts. The script prints both losses side by side.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from typing import Any

import torch

import torch_bridge
from grouped_core import recipes

RECIPES = tuple(name for name, each in recipes.RECIPES.items() if each.quantized and not each.takes_arrays)
"""Recipes that need neither a state nor random numbers."""
VOCABULARY = 128


def build() -> Any:
    """An OLMoE of two layers with 8 experts each, always with the same weights."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    torch.manual_seed(0)
    return OlmoeForCausalLM(
        OlmoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_experts=8,
            num_experts_per_tok=2,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def train(model: Any, options: argparse.Namespace) -> tuple[list[float], float]:
    """(loss of each step, seconds of the quickest step)."""
    model = model.to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    losses, seconds = [], []
    for _ in range(options.steps):
        starts = torch.randint(VOCABULARY, (8, 1), generator=generator)
        ids = ((starts + torch.arange(32)) % VOCABULARY).to(options.device)
        begin = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    return losses, min(seconds)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--recipe", choices=RECIPES, help="low-precision formats of the experts' products")
    options = parser.parse_args(argv)
    if importlib.util.find_spec("transformers") is None:
        print("transformers_olmoe: transformers is not installed; pip install 'transformers>=5'", file=sys.stderr)
        return 2
    if options.steps < 1:
        print(f"transformers_olmoe: --steps {options.steps} is less than 1", file=sys.stderr)
        return 2
    if options.device == "cuda" and not torch.cuda.is_available():
        print("transformers_olmoe: --device cuda: there is no GPU here", file=sys.stderr)
        return 2

    from torch_bridge.integrations.transformers import register

    model = build()
    model.set_experts_implementation("grouped_mm")  # transformers' own
    theirs, their_time = train(model, options)

    model = build()
    with register(recipe=getattr(torch_bridge, options.recipe) if options.recipe else None):
        model.set_experts_implementation("jax_grouped")  # the line that switches
        ours, our_time = train(model, options)

    names = ("grouped_mm", "jax_grouped" + (f", {options.recipe}" if options.recipe else ""))
    print(f"{'step':>6}{names[0]:>24}{names[1]:>24}")
    for step in range(options.steps):
        if step % max(1, options.steps // 8) == 0 or step == options.steps - 1:
            print(f"{step + 1:>6}{theirs[step]:>24.6f}{ours[step]:>24.6f}")
    print(f"{'ms':>6}{1e3 * their_time:>24.1f}{1e3 * our_time:>24.1f}")
    print(f"largest difference of the losses: {max(abs(a - b) for a, b in zip(theirs, ours, strict=True)):.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
