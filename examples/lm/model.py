"""The language model: a small transformer over bytes whose MLPs are mixtures of experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jax_grouped.nnx import MoE
from jax_grouped.route import MoEAux

BYTES = 256
HEAD_WIDTH = 32
CONTEXT = 3  # bytes that are embedded together


class XlaMoE(MoE):
    """The same layer, its products computed by `jax.lax.ragged_dot`: what the library is timed against."""

    @staticmethod
    def mlp(x, wi, wo, group_sizes, *, probs, **_unused):
        """SwiGLU experts as one would write them in plain JAX."""
        gate, linear = jnp.split(jax.lax.ragged_dot(x, wi, group_sizes), 2, axis=1)
        return jax.lax.ragged_dot(probs[:, None] * jax.nn.silu(gate) * linear, wo, group_sizes)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding: [B, L, heads, d], pairs of columns turned by an angle that grows with position."""
    length, half = x.shape[1], x.shape[3] // 2
    angle = jnp.arange(length)[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angle)[:, None, :], jnp.cos(angle)[:, None, :]
    a, b = jnp.split(x, 2, axis=3)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=3)


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, L, width] -> [B, L, width]."""
        B, L, width = x.shape
        q, k, v = (part.reshape(B, L, -1, HEAD_WIDTH) for part in jnp.split(self.qkv(x), 3, axis=2))
        return self.out(jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True).reshape(B, L, width))


class Block(nnx.Module):
    """Attention, then experts; each reads a normalised copy of the stream and adds to it."""

    def __init__(self, width: int, experts: int, top_k: int, moe: type[MoE], rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.RMSNorm(width, rngs=rngs)
        self.attention = Attention(width, rngs)
        self.norm2 = nnx.RMSNorm(width, rngs=rngs)
        # One expert alone cannot be weighted by a softmax over the chosen, so the softmax then runs over all.
        self.experts = moe(width, 2 * width, experts, top_k, after_topk=top_k > 1, aux_coeff=0.01, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, MoEAux]:
        """[B, L, width] -> the same, and what the experts report."""
        x = x + self.attention(self.norm1(x))
        y, aux = self.experts(self.norm2(x))
        return x + y, aux


class LanguageModel(nnx.Module):
    """Predicts the next byte at each position."""

    def __init__(
        self, width: int, layers: int, experts: int, top_k: int, *, moe: type[MoE] = MoE, rngs: nnx.Rngs
    ) -> None:
        self.embed = nnx.List([nnx.Embed(BYTES, width, rngs=rngs) for _ in range(CONTEXT)])
        self.blocks = nnx.List([Block(width, experts, top_k, moe, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, BYTES, use_bias=False, rngs=rngs)

    def __call__(self, text: jax.Array) -> tuple[jax.Array, list[MoEAux]]:
        """text: bytes [B, L]. Returns logits [B, L, 256], and a report of each layer's experts."""
        # Each position starts from its byte and the few before it, which saves attention from finding them first.
        shifted = [jnp.pad(text, ((0, 0), (back, 0)))[:, : text.shape[1]] for back in range(CONTEXT)]
        x = sum(embed(bytes_.astype(jnp.int32)) for embed, bytes_ in zip(self.embed, shifted, strict=True))
        reports = []
        for block in self.blocks:
            x, aux = block(x)
            reports.append(aux)
        return self.head(self.norm(x)), reports
