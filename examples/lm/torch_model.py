"""The language model in PyTorch: a small transformer over bytes whose MLPs are mixtures of experts.

The mixtures are `nn.MoE` layers. The host reads no values from the device, and all sums have a fixed order, so a step
can be captured as a CUDA graph and has the same bits each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_bridge import nn

BYTES = 256
HEAD_WIDTH = 64


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding: [..., L, d], pairs of columns are rotated by an angle that grows with position."""
    length, half = x.shape[-2], x.shape[-1] // 2
    steps = torch.arange(half, device=x.device)
    angle = torch.arange(length, device=x.device)[:, None] * 10000.0 ** (-steps / half)
    sin, cos = angle.sin().to(x.dtype), angle.cos().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Attention(torch.nn.Module):
    """Causal self-attention from plain matmuls and a softmax, whose sums have a fixed order."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, width] -> [B, L, width]."""
        B, L, width = x.shape
        q, k, v = self.qkv(x).view(B, L, 3, -1, HEAD_WIDTH).permute(2, 0, 3, 1, 4)  # each [B, heads, L, d]
        scores = rotate(q) @ rotate(k).mT / math.sqrt(HEAD_WIDTH)
        hidden = torch.ones(L, L, dtype=torch.bool, device=x.device).triu(1)
        seen = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return self.out((seen @ v).transpose(1, 2).reshape(B, L, width))


class Block(torch.nn.Module):
    """Attention, then experts; each reads the normalised residual stream and adds to it."""

    def __init__(self, width: int, experts: int, top_k: int, mlp_dim: int | None = None, **options: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
        self.attention = Attention(width)
        # With top-1, a softmax over the chosen expert is always 1, so the softmax then runs over all experts.
        self.moe = nn.MoE(width, mlp_dim or 2 * width, experts, top_k, after_topk=top_k > 1, aux_coeff=0.01, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, L, width] -> the same, and the load-balancing loss."""
        x = x + self.attention(self.norm1(x))
        y, aux = self.moe(self.norm2(x))
        return x + y, aux.aux_loss


class LanguageModel(torch.nn.Module):
    """Predicts the next byte at each position. `options` are passed to the expert layers."""

    def __init__(self, width: int, layers: int, experts: int, top_k: int, **options: Any) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(BYTES, width)
        self.blocks = torch.nn.ModuleList(Block(width, experts, top_k, **options) for _ in range(layers))
        self.norm = torch.nn.RMSNorm(width)
        self.head = torch.nn.Linear(width, BYTES, bias=False)

    def forward(
        self, text: Tensor, around: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> tuple[Tensor, Tensor]:
        """text: bytes [B, L + 1]. Returns nats per byte, and the sum of the load-balancing losses.

        Args:
            around: creates the context for each block.
        """
        x, balance = self.embed(text[:, :-1].int()), torch.zeros((), device=text.device)
        for block in self.blocks:
            with around():
                x, more = block(x)
            balance = balance + more
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].long().flatten()), balance
