"""A whole mixture-of-experts layer, as a function of its parameters.

The layers of `jax_grouped.nnx` hold the parameters and call `moe`. Letters: T tokens, H hidden size, E experts,
F expert width, M rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from grouped_core.activations import Activation
from grouped_core.ranks import check_rank
from grouped_core.recipes import BoundRecipe, Recipe
from jax_grouped import route
from jax_grouped.mlp import grouped_mlp
from jax_grouped.ops import ragged_dot
from jax_grouped.route import MoEAux


def moe(
    x: Float[Array, "T H"],
    router: Float[Array, "H E"],
    wi: Float[Array, "E H N"],
    wo: Float[Array, "E F H"],
    k: int,
    *,
    activation: str | Activation = "swiglu",
    wi_bias: Float[Array, "E N"] | None = None,
    wo_bias: Float[Array, "E H"] | None = None,
    recipe: Recipe | BoundRecipe | None = None,
    mlp: Callable[..., Array] = grouped_mlp,
    **routing: Any,
) -> tuple[Float[Array, "T H"], MoEAux]:
    """A mixture-of-experts layer: each token goes to k experts; their results are summed with the router's weights.

    Args:
        x: [T, H]. router: [H, E], used in fp32. The others as in `grouped_mlp`.
        k: experts per token.
        mlp: the function of the experts, with the arguments of `grouped_mlp`; for comparisons.
        routing: options of `route.topk_router`.

    Returns:
        y [T, H] in the dtype of x, and `MoEAux`.

    Raises:
        ValueError, TypeError: a shape, dtype or option does not fit.
    """
    check_rank("moe", "x", "x", x.shape, of="moe")
    check_rank("moe", "router", "router", router.shape, of="moe")
    check_rank("mlp", "wi", "wi", wi.shape)
    tokens = jnp.array([x.shape[0]], jnp.int32)
    # The library's own product in fp32 with one group, so that every framework routes with the same bits.
    logits = ragged_dot(x.astype(jnp.float32), router.astype(jnp.float32)[None], tokens)
    weights, experts, aux = route.topk_router(logits, k, **routing)
    rows, group_sizes, permutation = route.permute(x, experts, wi.shape[0], probs=weights)
    y = mlp(
        rows,
        wi,
        wo,
        group_sizes,
        activation=activation,
        probs=permutation.probs,
        wi_bias=wi_bias,
        wo_bias=wo_bias,
        recipe=recipe,
    )
    return route.unpermute(y, permutation), aux
