"""A mixture of experts as users write it, on `jax.lax.ragged_dot`; it knows nothing of this library."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

T, E, K, H, F = 24, 4, 2, 16, 8
"""Tokens, experts, experts per token, columns, width of an expert."""


def parameters(dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    """router [H, E], gate and up [E, H, F], down [E, F, H]."""
    keys = jax.random.split(jax.random.key(7), 4)
    shapes = {"router": (H, E), "gate": (E, H, F), "up": (E, H, F), "down": (E, F, H)}
    return {
        name: (jax.random.normal(key, shape) * shape[-2] ** -0.5).astype(dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def tokens(dtype: Any = jnp.float32) -> jax.Array:
    """[T, H]."""
    return jax.random.normal(jax.random.key(8), (T, H)).astype(dtype)


def moe(p: dict[str, jax.Array], x: jax.Array, precision: Any = None) -> jax.Array:
    """[T, H] -> [T, H]."""
    weights, experts = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), K)
    flat = experts.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=E)
    rows = x[order // K]
    gate = jax.lax.ragged_dot(rows, p["gate"], sizes, precision=precision)
    up = jax.lax.ragged_dot(rows, p["up"], sizes, precision)
    out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"], group_sizes=sizes, precision=precision)
    out = out[jnp.argsort(order)].reshape(x.shape[0], K, -1)
    return (out * weights[:, :, None].astype(out.dtype)).sum(axis=1)
