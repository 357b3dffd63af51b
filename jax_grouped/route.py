"""Routing: which experts a token goes to, the losses that balance them, and rows sorted by expert.

Each function wraps a rule of `grouped_core.routing`, which defines it; the arithmetic is in docs/numerics.md. Every sum
has a fixed order: backward gathers rows, it never adds into shared ones (docs/contracts.md, LYR-5, LYR-6).

Letters: T tokens, E experts, k experts per token, S sequences, M rows, P padded rows, H columns, G groups, V token ids.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from grouped_core import routing as rules
from grouped_core import routing_spec
from grouped_core.calls import spec_of
from grouped_core.formats import as_flag
from grouped_core.linear_spec import check_made_by
from grouped_core.routing_calls import SCORES as SCORES
from grouped_core.routing_spec import alignment_for as alignment_for
from grouped_core.routing_spec import router_option
from jax_grouped import _mesh, _router, _rows
from jax_grouped._arguments import AnyArray, as_array, axis_names, to_int32
from jax_grouped._router import AxisName as AxisName
from jax_grouped._router import Given, Options, Routed
from jax_grouped._rows import Places
from jax_grouped._run import RUN, differentiable


class MoEAux(NamedTuple):
    """What a MoE layer returns besides its result; only the two losses have a gradient.

    Attributes:
        load: slots that chose each expert, dropped ones too, int32 [E]. Under `shard_map`, those of this shard.
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


class GroupPadding(NamedTuple):
    """How `pad_groups` placed rows, for `unpad_groups`.

    Attributes:
        source: row in each padded row, -1 for padding; int32 [P].
        inverse: padded row of each row, -1 for rows past the groups; int32 [M].
    """

    source: Int[Array, " P"]
    inverse: Int[Array, " M"]


# ---------------------------------------------------------------------------------------------------------------------
# Choosing experts.


def topk_router(
    logits: Float[AnyArray, "T E"],
    k: int,
    *,
    score: str = "softmax",
    bias: Float[AnyArray, " E"] | None = None,
    after_topk: bool = False,
    normalize: bool | None = None,
    scale: float = 1.0,
    num_groups: int | None = None,
    topk_groups: int | None = None,
    group_topk: int | None = None,
    experts: Int[AnyArray, "T k"] | None = None,
    mask: Bool[AnyArray, " T"] | None = None,
    jitter: float = 0.0,
    key: UInt32[AnyArray, " 2"] | None = None,
    sinkhorn: int = 0,
    capacity_factor: float | None = None,
    drop: str = "probs",
    aux_coeff: float = 0.0,
    z_coeff: float = 0.0,
    axis_name: AxisName = None,
    sequence_sizes: Int[AnyArray, " S"] | None = None,
    split_sequences: bool = False,
) -> tuple[Float[Array, "T k"], Int[Array, "T k"], MoEAux]:
    """The k experts of each token, their weights, and the load-balancing and z losses.

    Args:
        logits: [T, E], float32, bfloat16 or float16; all arithmetic is fp32.
        k: experts per token, at most 32 and at most E, which is at most 1024.
        score: "softmax", "sigmoid" or "sqrt_softplus" of the logits.
        bias: [E], added only to choose the experts, never to the weights (see `update_bias`); without gradient.
        after_topk: weights are the softmax of the k chosen logits, instead of scores over all E.
        normalize: whether weights are divided by their sum over the chosen experts; None: with k > 1 and a score other
            than softmax.
        scale: factor of the weights.
        num_groups, topk_groups: the experts form `num_groups` groups of equal size, and only experts of the
            `topk_groups` best groups can be chosen. group_topk: a group's score is the sum of its `group_topk` best
            scores; None: k // topk_groups, at least 1 and at most the size of a group.
        experts: [T, k], the choice made elsewhere; numbers other than 0 to E - 1 are no expert. Weights follow from
            these logits.
        mask: [T], False for padding: such tokens get experts -1 and weights 0, and do not affect losses or counts.
            Their values must be finite: the gradient of the router is a product with all tokens, those times 0.
        jitter: logits are multiplied by random factors of 1 - jitter to 1 + jitter. key: [2], low word first, of these.
        sinkhorn: with this many iterations experts are ranked by balanced values instead of scores.
        capacity_factor: each expert takes at most ceil(T k capacity_factor / E) slots. A dropped slot gets expert -1
            and weight 0. drop: those dropped have the smallest weights ("probs"), or come last ("position").
        aux_coeff, z_coeff: coefficients of the two losses.
        axis_name: mesh axes over which the sums of the losses are added, inside `shard_map`; the losses and the entropy
            are then those of all shards. Choice, capacity and load stay those of the shard.
        sequence_sizes: [S], tokens of consecutive sequences: the auxiliary loss is the mean of those of each sequence.
            None: all tokens are one. With `axis_name`, the sequences of every shard are its own, and the mean is over
            those of all shards; None: the tokens of all shards are one sequence.
        split_sequences: sequence s of all shards is one sequence instead, of which each shard has a part.

    Returns:
        weights fp32 [T, k] (differentiable), experts int32 [T, k] (best first, ties to the lower index), `MoEAux`.

    Raises:
        ValueError: an option or a shape does not fit. TypeError: a dtype does not fit.
    """
    given = Given(
        *(
            None if each is None else as_array(name, each, shape)
            for name, each, shape in (
                ("bias", bias, "[E]"),
                ("mask", mask, "[T]"),
                ("experts", experts, "[T, k]"),
                ("key", key, "[2]"),
                ("sequence_sizes", sequence_sizes, "[S]"),
            )
        )
    )
    logits = as_array("logits", logits, "[T, E]")
    axes, split = axis_names("topk_router", axis_name), as_flag("split_sequences", split_sequences, "topk_router")
    of_shards = None if split or given.sequence_sizes is None else axes
    specs = {name: None if each is None else spec_of(each) for name, each in given._asdict().items()}
    routing_spec.check_topk_router(k, spec_of(logits), jitter=jitter, ranks=_mesh.size_of(of_shards), **specs)
    op = router_option(
        logits.shape[1],
        k,
        score=score,
        after_topk=after_topk,
        normalize=normalize,
        scale=scale,
        num_groups=num_groups,
        topk_groups=topk_groups,
        group_topk=group_topk,
        jitter=jitter,
        sinkhorn=sinkhorn,
        capacity_factor=capacity_factor,
        drop=drop,
        aux_coeff=aux_coeff,
        z_coeff=z_coeff,
    )
    given = given._replace(
        bias=None if given.bias is None else given.bias.astype(jnp.float32),
        mask=None if given.mask is None else given.mask.astype(jnp.uint8),
        experts=None if given.experts is None else to_int32(given.experts),
        sequence_sizes=None if given.sequence_sizes is None else _among_all(to_int32(given.sequence_sizes), of_shards),
    )
    found: Routed = differentiable(_router.route, Options(op, axes), logits, given)
    aux = MoEAux(found.load[0], found.aux_loss, found.z_loss, found.dropped, found.overflow, found.entropy)
    return found.weights, found.experts, aux


def _among_all(sizes: Array, axes: tuple[str, ...] | None) -> Array:
    """The sizes [P S] of the sequences of all P shards, of which only the own ones, given by `sizes` [S], have tokens.

    The sums over shards then are those of different sequences, and sequences without tokens do not count.
    """
    if axes is None:
        return sizes
    count = sizes.shape[0]
    whole = _mesh.vary_over(jnp.zeros((_mesh.size_of(axes) * count,), sizes.dtype), axes)
    return jax.lax.dynamic_update_slice(whole, _mesh.vary_over(sizes, axes), (_mesh.rank_of(axes) * count,))


def hash_experts(
    token_ids: Int[AnyArray, " T"], k: int, E: int, *, table: Int[AnyArray, "V k"] | None = None
) -> Int[Array, "T k"]:
    """k distinct experts that depend on the id of the token alone, for `experts=` of `topk_router`.

    Args:
        token_ids: [T], integers; those outside int32 count as the nearest one. E: number of experts.
        table: [V, k], the experts of each id; ids outside 0 to V - 1 get -1.

    Returns:
        int32 [T, k].

    Raises:
        ValueError: a shape does not fit, or k or the number of experts is out of range. TypeError: a dtype.
    """
    k, E = routing_spec.integers("hash_experts", k=k, E=E)
    ids = as_array("token_ids", token_ids, "[T]")
    rows = None if table is None else as_array("table", table, "[V, k]")
    routing_spec.check_hash_experts(spec_of(ids), k, E, None if rows is None else spec_of(rows))
    return rules.hash_experts(RUN, to_int32(ids), k, E, None if rows is None else to_int32(rows))


def update_bias(
    bias: Float[AnyArray, " E"], load: Int[AnyArray, " E"], rate: float, *, axis_name: AxisName = None
) -> Float[Array, " E"]:
    """The selection bias after a step: bias + rate * sign(mean load - load), so up for experts below the mean load.

    Call it once per step, outside of the loss: a pass that is computed again must not count again.

    Args:
        bias: [E]. load: [E], `MoEAux.load` of the step. rate: a Python number.
        axis_name: mesh axes over which the loads are added first, inside `shard_map`.

    Returns:
        fp32 [E], without gradient.

    Raises:
        ValueError: shapes that do not fit. TypeError: dtypes.
    """
    (rate,) = routing_spec.numbers("update_bias", rate=rate)
    old, counts = as_array("bias", bias, "[E]"), as_array("load", load, "[E]")
    routing_spec.check_update_bias(spec_of(old), spec_of(counts))
    counts = to_int32(counts)
    if (axes := axis_names("update_bias", axis_name)) is not None:
        counts = jax.lax.psum(counts, axes)
    return rules.update_bias(RUN, jax.lax.stop_gradient(old), counts, rate)


def balance_quantile(
    logits: Float[AnyArray, "T E"],
    bias: Float[AnyArray, " E"],
    k: int,
    *,
    score: str = "sigmoid",
    bins: int = 1000,
    low: float = -1.0,
    high: float = 1.0,
    mask: Bool[AnyArray, " T"] | None = None,
    axis_name: AxisName = None,
) -> Float[Array, " E"]:
    """The selection bias with which each expert is chosen by about k / E of these tokens: an alternative to
    `update_bias`, to be called outside of the loss too.

    The margin of a token to an expert is its (k + 1)-th largest score plus bias, minus the score. The new bias is the
    (k / E)-quantile of the margins of each expert, from a histogram, minus the mean over the experts.

    Args:
        logits: [T, E]. bias: [E], that of the router. score: that of the router. mask: [T], False for padding.
        k: experts per token, at most 31, one fewer than a router may have, and fewer than E.
        bins, low, high: the number of bins, at most 65536, and the ends of the histogram; margins outside count in the
            first or the last bin.
        axis_name: mesh axes over which the histograms are added, inside `shard_map`.

    Returns:
        fp32 [E], without gradient.

    Raises:
        ValueError: a shape or an option does not fit. TypeError: a dtype.
    """
    k, bins = routing_spec.integers("balance_quantile", k=k, bins=bins)
    low, high = routing_spec.numbers("balance_quantile", low=low, high=high)
    rows, old = as_array("logits", logits, "[T, E]"), as_array("bias", bias, "[E]")
    counted = None if mask is None else as_array("mask", mask, "[T]")
    specs = (spec_of(rows), spec_of(old), k, score, bins, low, high, None if counted is None else spec_of(counted))
    routing_spec.check_balance_quantile(*specs)
    rows, old = jax.lax.stop_gradient((rows, old))
    words = None if counted is None else counted.astype(jnp.uint8)
    counts = rules.margins(RUN, rows, old, k, score, bins, low, high, words)
    if (axes := axis_names("balance_quantile", axis_name)) is not None:
        counts = jax.lax.psum(counts, axes)
    return rules.quantile_bias(RUN, counts, k, low, high)


# ---------------------------------------------------------------------------------------------------------------------
# Moving rows.


def permute(
    x: Float[AnyArray, "T H"],
    experts: Int[AnyArray, "T k"],
    num_groups: int,
    *,
    probs: Float[AnyArray, "T k"] | None = None,
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
        ValueError: shapes do not fit, `num_groups`, `align` or `max_rows` is out of range, or x has 8 bits and needs a
            gradient.
        TypeError: a dtype does not fit.
    """
    num_groups, align, max_rows = routing_spec.integers(
        "permute", num_groups=num_groups, align=align, max_rows=max_rows
    )
    x, experts = as_array("x", x, "[T, H]"), as_array("experts", experts, "[T, k]")
    weights = None if probs is None else as_array("probs", probs, "[T, k]")
    routing_spec.check_permute(spec_of(x), spec_of(experts), num_groups, None if weights is None else spec_of(weights))
    rows = routing_spec.row_count(experts.size, num_groups, align, max_rows)
    options = Places(num_groups, rows, align, experts.shape[1])
    placed, found = differentiable(_rows.permute, options, x, weights, to_int32(experts))
    return placed, found.sizes, Permutation(found.source, found.inverse, found.probs, found.dropped[0])


def unpermute(
    y: Float[AnyArray, "M H"], permutation: Permutation, weights: Float[AnyArray, "T k"] | None = None
) -> Float[Array, "T H"]:
    """The sum of each token's rows in the order of its slots, in fp32, rounded once to the dtype of y.

    Args:
        y: [M, H], rows as `permute` placed them; padding is not read.
        permutation: from `permute`.
        weights: [T, k], multiplied onto the rows; differentiable. None: 1 for each slot.

    Returns:
        [T, H]; dropped slots add 0.

    Raises:
        ValueError: shapes do not fit the permutation. TypeError: a dtype does not fit, or it is no permutation.
    """
    y = as_array("y", y, "[M, H]")
    factors = None if weights is None else as_array("weights", weights, "[T, k]")
    check_made_by("unpermute", "permutation", permutation, Permutation, "permute")
    source, inverse = permutation.source, permutation.inverse
    of_factors = None if factors is None else spec_of(factors)
    routing_spec.check_unpermute(spec_of(y), source.shape[0], spec_of(inverse), of_factors)
    return differentiable(_rows.unpermute, None, y, factors, source, inverse)


def pad_groups(
    rows: Float[AnyArray, "M H"], sizes: Int[AnyArray, " G"], align: int
) -> tuple[Float[Array, "P H"], Int[Array, " G"], GroupPadding]:
    """Rows with every group padded to a multiple of `align` rows, for wire formats and foreign kernels.

    The kernels of this library take groups of any size. `alignment_for` tells what a recipe's formats need.

    Args:
        rows: [M, H], sorted by group; differentiable. sizes: [G], any integer dtype. align: 1 pads nothing.

    Returns:
        rows [P, H], P = M + G (align - 1) rounded up to a multiple of `align`, with zeros as padding; sizes int32 [G],
        an empty group stays empty; and how rows were placed, for `unpad_groups`.

    Raises:
        ValueError: a shape or `align` does not fit. TypeError: a dtype.
    """
    (align,) = routing_spec.integers("pad_groups", align=align)
    rows, counts = as_array("rows", rows, "[M, H]"), as_array("sizes", sizes, "[G]")
    routing_spec.check_pad_groups(spec_of(rows), spec_of(counts), align)
    found = rules.padding(RUN, to_int32(counts), rows.shape[0], align)
    padded = differentiable(_rows.take, None, rows, found.source, found.inverse)
    return padded, found.sizes, GroupPadding(found.source, found.inverse)


def unpad_groups(rows: Float[AnyArray, "P H"], map: GroupPadding) -> Float[Array, "M H"]:
    """The rows [M, H] as they were before `pad_groups`; those past the groups are zero.

    Args:
        rows: [P, H]; differentiable. map: from `pad_groups`.

    Raises:
        ValueError: the shape of rows is not the one that `pad_groups` returned. TypeError: the dtype, or the map is
        not what it returned.
    """
    rows = as_array("rows", rows, "[P, H]")
    check_made_by("unpad_groups", "map", map, GroupPadding, "pad_groups")
    routing_spec.check_unpad_groups(spec_of(rows), spec_of(map.source))
    return differentiable(_rows.take, None, rows, map.inverse, map.source)
