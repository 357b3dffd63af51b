"""The language model in PyTorch: a small transformer over bytes whose MLPs are mixtures of experts.

The router is plain PyTorch, and the experts are a `GroupedMLP`. The host reads no values from the device, and all sums
have a fixed order, so a step can be captured as a CUDA graph and has the same bits each time.
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


class Permute(torch.autograd.Function):
    """Sorts rows of tokens [T, H] by expert, [T k, H]; the gradients of a token's k rows are added in order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        """order: slot at each position. places: position of each slot [T, k]."""
        ctx.save_for_backward(places)
        return x[order // places.shape[1]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grads[0][places].sum(1), None, None


class Combine(torch.autograd.Function):
    """Sums the rows of each token: [T k, H] sorted by expert -> [T, H]."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, places: Tensor) -> Tensor:
        """The arguments are those of `Permute`; this is its transpose."""
        ctx.save_for_backward(order)
        ctx.top_k = places.shape[1]
        return y[places].sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grads[0][order // ctx.top_k], None, None


class Weigh(torch.autograd.Function):
    """Sorts the weights of the slots by expert, [T k]."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return weights[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grads[0][places.flatten()], None, None


class MoE(torch.nn.Module):
    """Routes each token to `top_k` experts, weighted by a softmax over these; an auxiliary loss balances the load."""

    def __init__(self, width: int, experts: int, top_k: int, **options: Any) -> None:
        super().__init__()
        self.router = torch.nn.Linear(width, experts, bias=False)
        self.experts = nn.GroupedMLP(experts, width, 2 * width, single_grouped_weight=True, **options)
        self.top_k = top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (y [T, H], load-balancing loss)."""
        logits = F.linear(x.float(), self.router.weight.float())
        chosen, experts = logits.topk(self.top_k, dim=1)
        # With top-1, a softmax over the chosen expert is always 1, so the softmax then runs over all experts.
        scores = logits.softmax(1)
        weights = chosen.softmax(1) if self.top_k > 1 else chosen.exp() / logits.exp().sum(1, keepdim=True)
        slots = experts.flatten()
        order = torch.sort(slots, stable=True).indices
        places = torch.sort(order).indices.view_as(experts)
        counts = (slots[:, None] == torch.arange(logits.shape[1], device=x.device)).sum(0)
        rows = Permute.apply(x, order, places)
        probs = Weigh.apply(weights.flatten(), order, places)
        y = Combine.apply(self.experts(rows, counts.to(torch.int32), probs), order, places)
        balance = 0.01 * logits.shape[1] * (scores.mean(0) * counts / counts.sum()).sum()
        return y, balance


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

    def __init__(self, width: int, experts: int, top_k: int, **options: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
        self.attention = Attention(width)
        self.moe = MoE(width, experts, top_k, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, L, width] -> the same, and the load-balancing loss."""
        x = x + self.attention(self.norm1(x))
        y, balance = self.moe(self.norm2(x).flatten(0, 1))
        return x + y.view_as(x), balance


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
