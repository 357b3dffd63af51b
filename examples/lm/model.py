"""The language model: a small transformer over bytes whose MLPs are mixtures of experts."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jax_grouped import Recipe, route
from jax_grouped.nnx import MoE
from jax_grouped.route import MoEAux

BYTES = 256
HEAD_WIDTH = 64
LONGEST_GRAM = 5
"""Strings of 2 to this many bytes have their own embeddings."""
GRAM_ROWS, GRAM_WIDTH = 1 << 14, 32
"""Number of rows of the table per string length (a power of two), and the width of a row."""


class XlaMoE(MoE):
    """The same MoE layer with GEMMs by `jax.lax.ragged_dot`, as a baseline for timing."""

    @staticmethod
    def mlp(x, experts, weights, wi, wo, **_unused):
        """SwiGLU experts as one would write them in plain JAX."""
        rows, group_sizes, permutation = route.permute(x, experts, wi.shape[0], probs=weights)
        gate, linear = jnp.split(jax.lax.ragged_dot(rows, wi, group_sizes), 2, axis=1)
        activated = permutation.probs[:, None] * jax.nn.silu(gate) * linear
        return route.unpermute(jax.lax.ragged_dot(activated.astype(x.dtype), wo, group_sizes), permutation)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding: [..., L, d], pairs of columns are rotated by an angle that grows with position."""
    length, half = x.shape[-2], x.shape[-1] // 2
    angle = jnp.arange(length)[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, L, width] -> [B, L, width]."""
        B, L, width = x.shape
        q, k, v = self.qkv(x).reshape(B, L, 3, -1, HEAD_WIDTH).transpose(2, 0, 3, 1, 4)  # each [B, heads, L, d]
        scores = rotate(q) @ rotate(k).mT / math.sqrt(HEAD_WIDTH)
        seen = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((L, L), bool)), scores, -jnp.inf))
        return self.out((seen @ v).transpose(0, 2, 1, 3).reshape(B, L, width))


class Grams(nnx.Module):
    """Embeddings of the strings that end at each byte, looked up by their hash."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        lengths = range(2, LONGEST_GRAM + 1)
        self.tables = nnx.List([nnx.Embed(GRAM_ROWS, GRAM_WIDTH, rngs=rngs) for _ in lengths])
        self.out = nnx.Linear(GRAM_WIDTH * len(lengths), width, use_bias=False, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        """text: bytes [B, L]. Returns [B, L, width]; a position sees itself and earlier bytes."""
        text = text.astype(jnp.uint32)
        hashed, found = text, []
        for back, table in enumerate(self.tables, start=1):
            earlier = jnp.pad(text, ((0, 0), (back, 0)))[:, : text.shape[1]]
            hashed = hashed * jnp.uint32(0x9E3779B1) + earlier + 1
            mixed = (hashed ^ (hashed >> 15)) * jnp.uint32(0x85EBCA6B)  # the multiplication mixes the upper bits
            found.append(table((mixed >> (33 - GRAM_ROWS.bit_length())).astype(jnp.int32)))
        return self.out(jnp.concatenate(found, axis=-1))


class Block(nnx.Module):
    """Attention, then experts; each reads the normalised residual stream and adds to it.

    With a recipe the experts compute in bfloat16 and in the recipe's formats; their parameters stay float32.
    """

    def __init__(
        self, width: int, experts: int, top_k: int, moe: type[MoE], recipe: Recipe | None, rngs: nnx.Rngs
    ) -> None:
        self.norm1 = nnx.RMSNorm(width, rngs=rngs)
        self.attention = Attention(width, rngs)
        self.norm2 = nnx.RMSNorm(width, rngs=rngs)
        # With top-1, a softmax over the chosen expert is always 1, so the softmax then runs over all experts.
        dtype = None if recipe is None else jnp.bfloat16
        self.experts = moe(
            *(width, 2 * width, experts, top_k),
            after_topk=top_k > 1,
            aux_coeff=0.01,
            dtype=dtype,
            recipe=recipe,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, MoEAux]:
        """[B, L, width] -> the same, and the report of the experts."""
        x = x + self.attention(self.norm1(x))
        y, aux = self.experts(self.norm2(x))
        return x + y, aux


class LanguageModel(nnx.Module):
    """Predicts the next byte at each position."""

    def __init__(
        self,
        width: int,
        layers: int,
        experts: int,
        top_k: int,
        *,
        moe: type[MoE] = MoE,
        recipe: Recipe | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        self.embed = nnx.Embed(BYTES, width, rngs=rngs)
        self.grams = Grams(width, rngs)
        self.blocks = nnx.List([Block(width, experts, top_k, moe, recipe, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, BYTES, use_bias=False, rngs=rngs)

    def __call__(self, text: jax.Array) -> tuple[jax.Array, list[MoEAux]]:
        """text: bytes [B, L]. Returns logits [B, L, 256], and a report of each layer's experts."""
        x = self.embed(text.astype(jnp.int32)) + self.grams(text)
        reports = []
        for block in self.blocks:
            x, aux = block(x)
            reports.append(aux)
        return self.head(self.norm(x)), reports
