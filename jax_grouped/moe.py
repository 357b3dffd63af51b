"""The experts' MLP and a whole mixture-of-experts layer, as functions of their parameters.

The layers of `jax_grouped.nnx` hold the parameters and call these. Letters: T tokens, H hidden size, E experts,
F expert width, M rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from grouped_core.activations import Activation, Parameter, resolve
from grouped_core.recipes import Recipe
from jax_grouped import route
from jax_grouped.ops import ragged_dot
from jax_grouped.route import MoEAux


def _clamp(v: Array, low: float | None, high: float | None) -> Array:
    """v within its bounds; written so that NaN passes and a value on the bound keeps its gradient."""
    v = v if high is None else jnp.where(v > high, high, v)
    return v if low is None else jnp.where(v < low, low, v)


def _gate(kind: str, a: Array, alpha: Parameter) -> Array:
    """The nonlinearity alone, for the kinds without clamp or tanh ranges."""
    match kind:
        case "relu":
            return jnp.where(a <= 0, 0.0, a)
        case "srelu":
            return jnp.square(jnp.where(a <= 0, 0.0, a))
        case "silu" | "swiglu":
            return jax.nn.silu(a)
        case "gelu_tanh" | "geglu_tanh":
            return jax.nn.gelu(a, approximate=True)
        case "gelu_erf" | "geglu_erf":
            return jax.nn.gelu(a, approximate=False)
        case _:  # quick_gelu, quick_geglu
            return a * jax.nn.sigmoid(alpha * a)


def halves(h: Array, interleave: int | None) -> tuple[Array, Array]:
    """(gate, linear) columns of h [M, 2F]."""
    M, width = h.shape
    block = width // 2 if interleave is None else interleave
    blocks = h.reshape(M, width // (2 * block), 2, block)  # no -1, which says nothing where M is 0
    return blocks[:, :, 0].reshape(M, width // 2), blocks[:, :, 1].reshape(M, width // 2)


def activate(h: Float[Array, "M N"], activation: str | Activation) -> Float[Array, "M F"]:
    """act(h) in fp32, whatever the dtype of h; gated kinds read [M, 2F] and give [M, F]."""
    spec = resolve(activation)
    wide = h.astype(jnp.float32)
    if not spec.gated:
        return _gate(spec.kind, wide, spec.alpha)
    a, u = halves(wide, spec.interleave)
    if spec.kind == "clamped_qgeglu":
        a = _clamp(a, None, spec.limit)
        u = _clamp(u, None if spec.limit is None else -spec.limit, spec.limit)
        return a * jax.nn.sigmoid(spec.alpha * a) * (u + spec.offset)
    if spec.kind == "situ_glu":
        gate = spec.beta1 * jnp.tanh(a / spec.beta1) * jax.nn.sigmoid(a)
        return gate * (spec.beta2 * jnp.tanh(u / spec.beta2))
    return _gate(spec.kind, a, spec.alpha) * u


def grouped_mlp(
    x: Float[Array, "M H"],
    wi: Float[Array, "E H N"],
    wo: Float[Array, "E F H"],
    group_sizes: Any,
    *,
    activation: str | Activation = "swiglu",
    probs: Float[Array, " M"] | None = None,
    wi_bias: Float[Array, "E N"] | None = None,
    wo_bias: Float[Array, "E H"] | None = None,
    recipe: Recipe | None = None,
) -> Float[Array, "M H"]:
    """y[r] = (p[r] act(x[r] wi[g] + wi_bias[g])) wo[g] + p[r] wo_bias[g], with p = probs or 1.

    Args:
        x: [M, H] rows sorted by group. wi: [E, H, 2F], gate columns first (F for kinds that are not gated).
        wo: [E, F, H]. group_sizes: integers [E]. probs: [M], fp32 inside. wi_bias: [E, 2F]. wo_bias: [E, H].
        activation: a kind, or an `Activation`. recipe: of both products.

    Returns:
        [M, H] in the dtype of x; rows past the groups are zero.

    Raises:
        ValueError, TypeError: a shape, dtype or option does not fit.
    """
    spec = resolve(activation)
    if wi.shape[-1] != spec.fc1_width(wo.shape[1]):
        raise ValueError(
            f"`wi` of grouped_mlp: {wi.shape[-1]} columns, wanted {spec.fc1_width(wo.shape[1])} for {spec.kind} "
            f"in front of `wo` with F = {wo.shape[1]}; give gate and linear columns side by side."
        )
    if probs is not None:
        probs = jnp.asarray(probs, jnp.float32)
    if probs is not None and probs.shape != x.shape[:1]:
        raise ValueError(
            f"`probs` of grouped_mlp: shape {probs.shape}, wanted {x.shape[:1]} = all rows of `x`; give one a row."
        )
    h = ragged_dot(x, wi, group_sizes, bias=wi_bias, recipe=recipe)
    t = activate(h, spec)
    z = (t if probs is None else probs[:, None] * t).astype(x.dtype)
    if wo_bias is None or probs is None:
        return ragged_dot(z, wo, group_sizes, bias=wo_bias, recipe=recipe)
    return ragged_dot(z, wo, group_sizes, bias=wo_bias, row_scale=probs, scale_bias=True, recipe=recipe)


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
    recipe: Recipe | None = None,
    mlp: Callable[..., Array] = grouped_mlp,
    **routing: Any,
) -> tuple[Float[Array, "T H"], MoEAux]:
    """A mixture-of-experts layer: each token goes to k experts, their results are added with the router's weights.

    Args:
        x: [T, H]. router: [H, E], used in fp32. The others as in `grouped_mlp`.
        k: experts a token.
        mlp: the experts, called as `grouped_mlp` is; for comparisons.
        routing: options of `route.topk_router`.

    Returns:
        y [T, H] in the dtype of x, and `MoEAux`.

    Raises:
        ValueError, TypeError: a shape, dtype or option does not fit.
    """
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
