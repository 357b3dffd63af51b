"""What the adapters of the layers of Flax NNX and of Linen have in common: shapes, initial values, merged weights.

Letters: G groups (experts), K in, N out, r rank.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from grouped_core import lora
from grouped_core.lora import Adapter, LayerOptions
from jax_grouped._layer_options import Initializer
from jax_grouped._run import RUN

default_a_init: Initializer = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", batch_axis=(0,))
"""Uniform within 1/sqrt(K), as in the layers of torch_bridge."""


def shapes(weight: tuple[int, int, int], rank: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Shapes of A [G, K, r] and B [G, r, N] beside a weight [G, K, N]."""
    groups, depth, columns = weight
    return (groups, depth, rank), (groups, rank, columns)


def initial(key: Any, weight: tuple[int, int, int], rank: int, dtype: Any) -> tuple[Array, Array]:
    """A drawn with `key`, and B of zeros, so that the layer computes what its weights do."""
    of_a, of_b = shapes(weight, rank)
    return default_a_init(key, of_a, dtype), jnp.zeros(of_b, dtype)


def arguments(options: LayerOptions, adapter: Any, key: Any) -> dict[str, Any]:
    """The keywords of an operation for `adapter`, (A, B) or two such pairs.

    Args:
        key: () -> uint32 [2], called if elements are dropped.
    """
    if not options.rank:
        return {}
    dropped = {"lora_dropout": options.dropout, "lora_key": key()} if options.dropout else {}
    return {"lora": adapter, "lora_scaling": options.scaling, **dropped}


def frozen(options: LayerOptions, *arrays: Any) -> tuple[Any, ...]:
    """The weights of a layer; beside adapters without gradients."""
    if not options.rank:
        return arrays
    return tuple([None if each is None else jax.lax.stop_gradient(each) for each in arrays])


def merged(
    weight: Float[Array, "*G K N"], a: Float[Array, "*G K r"], b: Float[Array, "*G r N"], scaling: float
) -> Float[Array, "*G K N"]:
    """weight + scaling A B, rounded once to the dtype of weight. All have further axes where a scan stacked layers."""
    *groups, depth, columns = weight.shape
    a, b = a.astype(weight.dtype), b.astype(weight.dtype)
    sizes = jnp.full((math.prod(groups),), depth, jnp.int32)
    rows = (weight.reshape(-1, columns), a.reshape(-1, a.shape[-1]), b.reshape(-1, *b.shape[-2:]), sizes)
    return lora.merged(RUN, Adapter(scaling=scaling), *rows).reshape(weight.shape)
