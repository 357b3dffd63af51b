"""Routing: choosing the experts of each token, sorting rows by expert for the grouped products, and combining them.

Letters: T tokens, E experts, k experts per token, M rows of the sorted buffer, H columns. Every sum has a fixed order:
backward passes gather; they never add into shared rows (docs/contracts.md, LYR-5, LYR-6).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grouped_core.ranks import check_rank

SCORES = ("softmax", "sigmoid", "sqrt_softplus")

_TINY = 1e-20
"""Keeps the sum that divides sigmoid and square-root-softplus scores away from zero."""


class MoEAux(NamedTuple):
    """What a MoE layer returns besides its result; only the two losses have a gradient.

    Attributes:
        load: slots each expert received, int32 [E].
        aux_loss: load-balancing loss, already times its coefficient; fp32 scalar.
        z_loss: mean squared logsumexp of the logits, already times its coefficient; fp32 scalar.
        dropped: slots without a row, int32 scalar.
        overflow: whether any slot was dropped, bool scalar.
        entropy: mean entropy of the normalised scores, in nats; fp32 scalar.
    """

    load: Int[Array, " E"]
    aux_loss: Float[Array, ""]
    z_loss: Float[Array, ""]
    dropped: Int[Array, ""]
    overflow: Bool[Array, ""]
    entropy: Float[Array, ""]


class Permutation(NamedTuple):
    """How `permute` placed the slots, for `unpermute`.

    Attributes:
        source: slot (token * k + slot number) in each row, -1 for padding; int32 [M].
        inverse: row of each slot, -1 where dropped; int32 [T, k].
        probs: router probability of each row, 0 for padding; fp32 [M], or None when none were given.
        dropped: slots that had an expert but got no row, int32 scalar.
    """

    source: Int[Array, " M"]
    inverse: Int[Array, "T k"]
    probs: Float[Array, " M"] | None
    dropped: Int[Array, ""]


# ---- choosing experts ------------------------------------------------------------------------------------------------


def check_router(E: int, k: int, score: str, after_topk: bool) -> None:
    """Refuses options of `topk_router` that contradict each other, with a ValueError."""
    if score not in SCORES:
        raise ValueError(f"`score` of topk_router: {score!r}, expected one of {SCORES}; choose one of them.")
    if not 1 <= k <= E:
        raise ValueError(f"`k` of topk_router: {k}, expected 1 to {E}, the experts in `logits`; choose a smaller k.")
    if after_topk and score != "softmax":
        raise ValueError(
            f"`after_topk` of topk_router: True with score {score!r}, expected score 'softmax'; "
            "the others are always normalised over the chosen experts, leave it out."
        )
    if after_topk and k == 1:
        raise ValueError(
            "`after_topk` of topk_router: True with k = 1, expected k of 2 or more; "
            "a softmax over one expert is always 1 and the router would not learn, use after_topk=False."
        )


def _check_ranks(function: str, **arrays: Array | None) -> None:
    """Refuses arrays that do not have the axes listed in `grouped_core.ranks`."""
    for name, array in arrays.items():
        if array is not None:
            check_rank(function, name, name, array.shape, of=function)


def _check_extras(T: int, E: int, bias: Array | None, mask: Array | None) -> None:
    for name, array, shape in (("bias", bias, (E,)), ("mask", mask, (T,))):
        if array is not None and array.shape != shape:
            raise ValueError(f"`{name}` of topk_router: shape {array.shape}, expected {shape}; reshape it.")


def topk_router(
    logits: Float[Array, "T E"],
    k: int,
    *,
    score: str = "softmax",
    bias: Float[Array, " E"] | None = None,
    after_topk: bool = False,
    scale: float = 1.0,
    aux_coeff: float = 0.0,
    z_coeff: float = 0.0,
    mask: Bool[Array, " T"] | None = None,
) -> tuple[Float[Array, "T k"], Int[Array, "T k"], MoEAux]:
    """The k experts of each token, their weights, and the load-balancing and z losses.

    Args:
        logits: [T, E], any float dtype; all arithmetic is fp32.
        k: experts per token.
        score: "softmax", or "sigmoid" or "sqrt_softplus"; with k > 1 the latter two are divided by their sum over the
            chosen experts.
        bias: [E], added only to choose the experts, never to the weights (see `update_bias`).
        after_topk: the softmax runs over the k chosen logits instead of all E.
        scale: factor of the weights.
        aux_coeff, z_coeff: coefficients of the two losses.
        mask: [T], False for padding: such tokens get experts -1 and weights 0, and do not affect losses or counts.

    Returns:
        weights fp32 [T, k] (differentiable), experts int32 [T, k] (best first, ties to the lower index), `MoEAux`.

    Raises:
        ValueError: an option or a shape does not fit.
    """
    _check_ranks("topk_router", logits=logits, bias=bias, mask=mask)
    T, E = logits.shape
    check_router(E, k, score, after_topk)
    _check_extras(T, E, bias, mask)
    logits = logits.astype(jnp.float32)
    if score == "softmax":
        scores = normalised = jax.nn.softmax(logits)
    else:
        scores = jax.nn.sigmoid(logits) if score == "sigmoid" else jnp.sqrt(jax.nn.softplus(logits))
        normalised = scores / (scores.sum(axis=1, keepdims=True) + _TINY)

    ranked = logits if after_topk else scores
    chosen = jax.lax.stop_gradient(ranked if bias is None else ranked + bias.astype(jnp.float32)[None])
    _, experts = jax.lax.top_k(chosen, k)
    hit = experts[:, :, None] == jnp.arange(E, dtype=jnp.int32)[None, None]  # [T, k, E]
    # NOTE: a masked sum, because the gradient of a gather would be a scatter-add.
    weights = jnp.where(hit, ranked[:, None, :], 0.0).sum(axis=2)
    if after_topk:
        weights = jax.nn.softmax(weights)
    elif score != "softmax" and k > 1:
        weights = weights / (weights.sum(axis=1, keepdims=True) + _TINY)
    weights = weights * scale

    valid = jnp.ones(T, bool) if mask is None else mask
    experts = jnp.where(valid[:, None], experts, -1).astype(jnp.int32)
    weights = jnp.where(valid[:, None], weights, 0.0)
    hit = hit & valid[:, None, None]
    return weights, experts, _aux(logits, normalised, hit, valid, aux_coeff, z_coeff)


def _aux(logits: Array, normalised: Array, hit: Array, valid: Array, aux_coeff: float, z_coeff: float) -> MoEAux:
    """Losses and metrics over the valid tokens. hit: [T, k, E]."""
    _, k, E = hit.shape
    load = hit.sum(axis=(0, 1), dtype=jnp.int32)
    tokens = jnp.maximum(valid.sum(dtype=jnp.int32), 1).astype(jnp.float32)
    normalised = jnp.where(valid[:, None], normalised, 0.0)
    z = jnp.where(valid, jax.nn.logsumexp(logits, axis=1), 0.0)
    used = jax.lax.stop_gradient(normalised)
    return MoEAux(
        load=load,
        aux_loss=aux_coeff * E / (k * tokens * tokens) * (normalised.sum(axis=0) * load.astype(jnp.float32)).sum(),
        z_loss=z_coeff / tokens * (z * z).sum(),
        dropped=jnp.zeros((), jnp.int32),
        overflow=jnp.zeros((), bool),
        entropy=jax.scipy.special.entr(used).sum() / tokens,
    )


def update_bias(bias: Float[Array, " E"], load: Int[Array, " E"], rate: float) -> Float[Array, " E"]:
    """The selection bias after a step: up for experts below the mean load, down for those above it; fp32 [E]."""
    _check_ranks("update_bias", bias=bias, load=load)
    if bias.shape != load.shape:
        raise ValueError(
            f"`load` of update_bias: shape {load.shape}, expected {bias.shape} as `bias`; pass one count per expert."
        )
    load = load.astype(jnp.float32)
    return bias.astype(jnp.float32) + rate * jnp.sign(load.mean() - load)


# ---- moving rows -----------------------------------------------------------------------------------------------------


def _row_count(slots: int, num_groups: int, align: int, max_rows: int | None) -> int:
    if align < 1:
        raise ValueError(f"`align` of permute: {align}, expected 1 or more; 1 pads nothing.")
    if max_rows is not None:
        if max_rows < 1 or max_rows % align:
            raise ValueError(f"`max_rows` of permute: {max_rows}, expected a positive multiple of `align` {align}.")
        return max_rows
    worst = slots + num_groups * (align - 1)
    return -(-worst // align) * align


def permute(
    x: Float[Array, "T H"],
    experts: Int[Array, "T k"],
    num_groups: int,
    *,
    probs: Float[Array, "T k"] | None = None,
    align: int = 1,
    max_rows: int | None = None,
) -> tuple[Float[Array, "M H"], Int[Array, " G"], Permutation]:
    """Copies each token once for each of its experts; rows are sorted by expert, then token, then slot.

    Args:
        x: [T, H].
        experts: [T, k]; -1 (or anything outside 0 to num_groups - 1) drops the slot.
        num_groups: G.
        probs: [T, k] router weights that travel with the rows, as `permutation.probs`; differentiable.
        align: every group is padded to a multiple of this many rows; an empty group stays empty.
        max_rows: M. By default T * k rows, plus the most that padding can need. In a smaller buffer, the last
            slots get no row; they are dropped and counted in `permutation.dropped`.

    Returns:
        rows [M, H] in the dtype of x (padding is zero), group sizes int32 [G] with padding, `Permutation`.

    Raises:
        ValueError: shapes do not fit, or `num_groups`, `align` or `max_rows` is out of range.
        TypeError: `experts` are not integers.
    """
    _check_ranks("permute", x=x, experts=experts, probs=probs)
    T, k = experts.shape
    if not jnp.issubdtype(experts.dtype, jnp.integer):
        raise TypeError(f"`experts` of permute: dtype {experts.dtype}, expected integers; give the experts' numbers.")
    if num_groups < 1:
        raise ValueError(f"`num_groups` of permute: {num_groups}, expected 1 or more; give the number of experts.")
    if x.shape[0] != T:
        raise ValueError(f"`x` of permute: {x.shape[0]} tokens, expected {T} as in `experts`; route these tokens.")
    if probs is not None and probs.shape != (T, k):
        raise ValueError(f"`probs` of permute: shape {probs.shape}, expected {(T, k)} as `experts`; reshape it.")
    M = _row_count(T * k, num_groups, align, max_rows)
    group = experts.reshape(-1)
    if group.dtype.itemsize < 4:  # `num_groups` may not fit; 64-bit numbers could wrap if narrowed
        group = group.astype(jnp.int32)
    in_range = (group >= 0) & (group < num_groups)
    group = jnp.where(in_range, group, num_groups).astype(jnp.int32)  # the last "group" is dropped

    # Stable, so equal experts keep the order of tokens and slots.
    order = jnp.argsort(group, stable=True).astype(jnp.int32)
    sizes = (group[:, None] == jnp.arange(num_groups, dtype=jnp.int32)[None]).sum(axis=0, dtype=jnp.int32)
    padded = (sizes + (align - 1)) // align * align
    shift = jnp.append(_starts(padded) - _starts(sizes), 0)  # rows of padding before each group
    in_order = group[order]
    row = jnp.arange(T * k, dtype=jnp.int32) + shift[in_order]
    kept = (in_order < num_groups) & (row < M)
    # Rows are distinct, so the order of these writes does not matter; out-of-range ones (dropped slots) are ignored.
    source = jnp.full((M,), -1, jnp.int32).at[jnp.where(kept, row, M)].set(order, mode="drop")
    inverse = jnp.zeros((T * k,), jnp.int32).at[order].set(jnp.where(kept, row, -1), unique_indices=True)

    ends = jnp.minimum(jnp.cumsum(padded, dtype=jnp.int32), M)
    group_sizes = jnp.diff(ends, prepend=0).astype(jnp.int32)
    inverse = inverse.reshape(T, k)
    permutation = Permutation(
        source=source,
        inverse=inverse,
        probs=None if probs is None else _spread(probs.astype(jnp.float32), source, inverse),
        dropped=(in_order < num_groups).sum(dtype=jnp.int32) - kept.sum(dtype=jnp.int32),
    )
    return _copy_rows(x, source, inverse), group_sizes, permutation


def unpermute(
    y: Float[Array, "M H"], permutation: Permutation, weights: Float[Array, "T k"] | None = None
) -> Float[Array, "T H"]:
    """The sum of each token's rows in the order of its slots, in fp32, rounded once to the dtype of y.

    Args:
        y: [M, H], rows as `permute` placed them; padding is not read.
        permutation: from `permute`.
        weights: [T, k], multiplied onto the rows; differentiable. None: 1 for each slot.

    Returns:
        [T, H]; dropped slots add 0.

    Raises:
        ValueError: shapes do not fit the permutation.
    """
    _check_ranks("unpermute", y=y, weights=weights)
    if y.shape[0] != permutation.source.shape[0]:
        raise ValueError(
            f"`y` of unpermute: {y.shape[0]} rows, expected {permutation.source.shape[0]}; give all rows of `permute`."
        )
    if weights is not None and weights.shape != permutation.inverse.shape:
        raise ValueError(
            f"`weights` of unpermute: shape {weights.shape}, expected {permutation.inverse.shape}; reshape them."
        )
    return _combine(y, weights, permutation.source, permutation.inverse)


def _starts(sizes: Array) -> Array:
    """First row of each group."""
    return jnp.cumsum(sizes, dtype=jnp.int32) - sizes


def _take(rows: Array, index: Array) -> Array:
    """rows[index], or exact zeros where the index is negative."""
    return rows.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _sum_slots(rows: Array, weights: Array | None, inverse: Array, dtype: jnp.dtype) -> Array:
    """[T, H]: the rows of a token's slots, times their weights, added slot after slot in fp32."""
    total = jnp.zeros((inverse.shape[0], rows.shape[1]), jnp.float32)
    for slot in range(inverse.shape[1]):
        term = _take(rows, inverse[:, slot]).astype(jnp.float32)
        total = total + (term if weights is None else weights[:, slot, None] * term)
    return total.astype(dtype)


@jax.custom_vjp
def _copy_rows(x: Array, source: Array, inverse: Array) -> Array:
    """x[token of each row], zero for padding."""
    return _take(x, _token(source, inverse))


def _token(source: Array, inverse: Array) -> Array:
    """Token in each row; padding stays negative."""
    return source // inverse.shape[1]


def _copy_rows_fwd(x: Array, source: Array, inverse: Array) -> tuple[Array, Array]:
    return _copy_rows(x, source, inverse), inverse


def _copy_rows_bwd(inverse: Array, d_rows: Array) -> tuple[Array, None, None]:
    return _sum_slots(d_rows, None, inverse, d_rows.dtype), None, None


_copy_rows.defvjp(_copy_rows_fwd, _copy_rows_bwd)


@jax.custom_vjp
def _spread(probs: Array, source: Array, inverse: Array) -> Array:
    """[M]: the probability of the slot in each row, 0 for padding."""
    return _take(probs.reshape(-1), source)


def _spread_fwd(probs: Array, source: Array, inverse: Array) -> tuple[Array, Array]:
    return _spread(probs, source, inverse), inverse


def _spread_bwd(inverse: Array, d_rows: Array) -> tuple[Array, None, None]:
    return _take(d_rows, inverse), None, None


_spread.defvjp(_spread_fwd, _spread_bwd)


@jax.custom_vjp
def _combine(y: Array, weights: Array | None, source: Array, inverse: Array) -> Array:
    wide = None if weights is None else weights.astype(jnp.float32)
    return _sum_slots(y, wide, inverse, y.dtype)


def _combine_fwd(y: Array, weights: Array | None, source: Array, inverse: Array) -> tuple[Array, tuple]:
    # y is kept only for the gradient of the weights.
    saved = (None if weights is None else y, weights, source, inverse)
    return _combine(y, weights, source, inverse), saved


def _combine_bwd(saved: tuple, d_out: Array) -> tuple[Array, Array | None, None, None]:
    y, weights, source, inverse = saved
    d_y = _take(d_out, _token(source, inverse))
    if weights is None:
        return d_y, None, None, None
    wide = d_out.astype(jnp.float32)
    p = _take(weights.astype(jnp.float32).reshape(-1), source)
    # NOTE: the gather makes padding zero; p = 0 would not be enough, because a NaN of d_out times 0 is NaN.
    d_y = (p[:, None] * d_y.astype(jnp.float32)).astype(d_out.dtype)
    slots = [(_take(y, inverse[:, s]).astype(jnp.float32) * wide).sum(axis=1) for s in range(inverse.shape[1])]
    return d_y, jnp.stack(slots, axis=1).astype(weights.dtype), None, None


_combine.defvjp(_combine_fwd, _combine_bwd)
