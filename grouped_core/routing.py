"""Routing: which experts a token goes to, the losses that balance them, and how rows are sorted, gathered and summed.

The arithmetic is in docs/numerics.md, "Routing". Every sum has a fixed order: backward gathers, it never adds into
shared rows. Letters: T tokens, E experts, k experts per token, S sequences, M rows, H columns, G groups. A slot is one
of a token's k places.
"""

from __future__ import annotations

from typing import NamedTuple

from grouped_core import routing_calls
from grouped_core.calls import ArraySpec
from grouped_core.products import Array, Runner
from grouped_core.routing_spec import Router


class Sums(NamedTuple):
    """Sums over the tokens of each sequence, which losses are made of; frontends add them over mesh axes or ranks."""

    probs: Array  # [S, E] float32: normalised scores
    counts: Array  # [S, E] int32: slots per expert
    stats: Array  # [S, 3] float32: squared logsumexp, entropy, tokens


class Chosen(NamedTuple):
    """Weights and experts [T, k] with -1 and 0 for dropped slots, and what losses and backward need.

    Attributes:
        load: int32 [1, E], slots that chose each expert, dropped ones too. dropped: int32 [1], None without a capacity.
        first: the choice before slots were dropped. read: float32, what the gradient of the logits reads besides it:
            the logits [T, E] as scores were made from, or the weights [T, k] of `first` (`Router.reads_logits`).
    """

    weights: Array
    experts: Array
    load: Array
    dropped: Array | None
    sums: Sums
    first: Array
    read: Array


class Losses(NamedTuple):
    """Losses [3] float32 (auxiliary loss and z-loss, times their coefficients, and the mean entropy), their slopes, and
    how many slots were dropped.
    """

    values: Array
    slopes: Array  # [S, E]
    z_slope: Array  # [1]
    lost: Array  # int32 [1]: slots beyond the capacity of their expert
    overflow: Array  # uint8 [1]: whether there are any


def choose(
    run: Runner,
    op: Router,
    logits: Array,
    tokens: Array,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    experts: Array | None = None,
    key: Array | None = None,
    sequence_sizes: Array | None = None,
) -> Chosen:
    """The experts of each token and their weights.

    Args:
        logits: [T, E]. tokens: int32 [1], T. bias: [E] float32. mask: [T] uint8, 0 for padding.
        experts: int32 [T, k], chosen elsewhere. key: uint32 [2], for jitter. sequence_sizes: int32 [S]; None: one.
    """
    logits = run.cast(logits, "float32")
    count = run.spec(logits).shape[1]
    if op.jitter:
        logits = _jitter(run, op, logits, key)
    spec, mask_spec = run.spec(logits), _spec(run, mask)
    ranking = None
    if op.sinkhorn and experts is None:
        call = routing_calls.sinkhorn(spec, op.sinkhorn, mask_spec)
        (ranking,) = run(call, call.arrange(logits=logits, mask=mask))
    given = {"bias": bias, "mask": mask, "given": experts, "ranking": ranking}
    specs = {name: _spec(run, array) for name, array in given.items()}
    call = routing_calls.router(spec, op.k, op.scores, op.limit, **specs)
    weights, first = run(call, call.arrange(logits=logits, **given))
    sizes = tokens if sequence_sizes is None else sequence_sizes
    call = routing_calls.router_sums(spec, run.spec(first), run.spec(sizes), op.scores.score, mask_spec)
    sums = Sums(*run(call, call.arrange(logits=logits, experts=first, mask=mask, sequence_sizes=sizes)))
    load = sums.counts if sequence_sizes is None else _count(run, first, tokens, count)
    read = logits if op.reads_logits else weights
    capacity, dropped, kept = op.capacity(spec.shape[0], count), None, first
    if capacity is not None:
        call = routing_calls.drop_slots(run.spec(first), count, capacity, by_weight=op.drop == "probs")
        kept, weights, dropped = run(call, call.arrange(experts=first, weights=weights))
    return Chosen(weights, kept, load, dropped, sums, first, read)


def _spec(run: Runner, array: Array | None) -> ArraySpec | None:
    return None if array is None else run.spec(array)


def _jitter(run: Runner, op: Router, logits: Array, key: Array | None) -> Array:
    call = routing_calls.jitter(run.spec(logits), op.jitter)
    return run(call, call.arrange(logits=logits, key=key))[0]


def _count(run: Runner, experts: Array, sizes: Array, count: int) -> Array:
    call = routing_calls.count_experts(run.spec(experts), run.spec(sizes), count)
    return run(call, call.arrange(experts=experts, sequence_sizes=sizes))[0]


def losses(run: Runner, op: Router, sums: Sums, dropped: Array | None = None) -> Losses:
    """The losses of a choice, from the sums of `choose`, perhaps added over shards, and the number of dropped slots."""
    call = routing_calls.router_losses(
        run.spec(sums.probs), op.k, op.aux_coeff, op.z_coeff, dropped=dropped is not None
    )
    given = {"prob_sums": sums.probs, "counts": sums.counts, "stat_sums": sums.stats, "dropped": dropped}
    return Losses(*run(call, call.arrange(**given)))


def router_grad(
    run: Runner,
    op: Router,
    read: Array,
    first: Array,
    kept: Array,
    found: Losses | None,
    tokens: Array,
    d_weights: Array | None,
    d_losses: Array | None,
    logits: ArraySpec,
    *,
    mask: Array | None = None,
    key: Array | None = None,
    sequence_sizes: Array | None = None,
) -> Array:
    """The gradient of the logits, as `logits` says.

    Args:
        read, first: the fields of `Chosen`; kept: its experts. found: None where the losses have no gradient.
        d_weights: [T, k] float32. d_losses: float32 [2], those of the auxiliary loss and the z-loss.
    """
    if not op.reads_logits:
        given = {"weights": read, "experts": first, "d_weights": d_weights}
        if op.capacity_factor is not None:
            given["kept"] = kept
        of_kept = _spec(run, given.get("kept"))
        call = routing_calls.chosen_softmax_grad(run.spec(read), logits.shape[1], op.scores.scale, of_kept)
        return _of_logits(run, op, run(call, call.arrange(**given))[0], logits, key)
    given = {"logits": read, "experts": first, "mask": mask, "d_weights": d_weights}
    sequences = None
    if op.capacity_factor is not None:
        given["kept"] = kept
    if op.has_losses and found is not None and d_losses is not None:
        sequences = tokens if sequence_sizes is None else sequence_sizes
        given |= {"sequence_sizes": sequences, "slopes": found.slopes, "z_slope": found.z_slope, "d_losses": d_losses}
    call = routing_calls.router_grad(
        run.spec(read),
        op.k,
        op.scores,
        mask=_spec(run, mask),
        kept=_spec(run, given.get("kept")),
        weights=d_weights is not None,
        sequence_sizes=_spec(run, sequences),
    )
    return _of_logits(run, op, run(call, call.arrange(**given))[0], logits, key)


def _of_logits(run: Runner, op: Router, gradient: Array, logits: ArraySpec, key: Array | None) -> Array:
    """The gradient of the logits, given that of the jittered ones."""
    return run.cast(_jitter(run, op, gradient, key) if op.jitter else gradient, logits.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Rows


class Order(NamedTuple):
    """Where the rows of slots are, sorted by expert, then token, then place.

    Attributes:
        sizes: int32 [G], with padding. source: int32 [M], slot in each row, -1 for none.
        inverse: int32 [T, k], row of each slot, -1 for none. dropped: int32 [1], slots with an expert and no row.
        probs: float32 [M], weight of the slot in each row, 0 for none; None without weights.
    """

    sizes: Array
    source: Array
    inverse: Array
    dropped: Array
    probs: Array | None


def order(
    run: Runner, experts: Array, num_groups: int, rows: int, *, align: int = 1, weights: Array | None = None
) -> Order:
    """The order of the slots of `experts` [T, k]; groups are padded to multiples of `align` rows."""
    call = routing_calls.sort_slots(run.spec(experts), num_groups, rows, align, weights=weights is not None)
    wide = None if weights is None else run.cast(weights, "float32")
    return Order(*run(call, call.arrange(experts=experts, weights=wide)))


def gather(
    run: Runner, x: Array, source: Array, slots: int, weights: Array | None = None, inverse: Array | None = None
) -> Array:
    """[M, H]: the row of x [T, H] that each slot of `source` belongs to, times the slot's weight if given.

    Args:
        inverse: int32 [T, k], row of each slot, of an `Order`; kernels for large rows may read it instead of `source`.
    """
    call = routing_calls.gather_rows(run.spec(x), run.spec(source), slots, _spec(run, weights), _spec(run, inverse))
    return run(call, call.arrange(rows=x, source=source, weights=weights, places=inverse))[0]


def combine(
    run: Runner,
    rows: Array,
    inverse: Array,
    dtype: str,
    weights: Array | None = None,
    out: Array | None = None,
) -> Array:
    """[T, H] in `dtype`: the sum of each token's rows, times its weights [T, k] if given; the gradient of `gather`."""
    wide = None if weights is None else run.cast(weights, "float32")
    call = routing_calls.combine_rows(run.spec(rows), run.spec(inverse), dtype, _spec(run, wide), _spec(run, out))
    return run(call, call.arrange(rows=rows, inverse=inverse, weights=wide, into=out))[0]


def combine_grads(
    run: Runner,
    rows: Array | None,
    source: Array,
    inverse: Array,
    weights: Array | None,
    grad: Array,
    dtype: str,
    needs: tuple[bool, bool],
) -> tuple[Array | None, Array | None]:
    """Gradients of the rows [M, H] and of the weights [T, k] of `combine`, each if `needs` asks for it.

    Args:
        rows: read for the gradient of the weights. grad: [T, H]. dtype: that of the rows.
    """
    wide = None if weights is None else run.cast(weights, "float32")
    slots = run.spec(inverse).shape[1]
    d_rows = run.cast(gather(run, grad, source, slots, wide), dtype) if needs[0] else None
    d_weights = None
    if needs[1] and weights is not None:
        call = routing_calls.combine_dot(run.spec(rows), run.spec(grad), run.spec(inverse))
        (dots,) = run(call, call.arrange(rows=rows, grad=grad, inverse=inverse))
        d_weights = run.cast(dots, run.spec(weights).dtype)
    return d_rows, d_weights


def of_slots(run: Runner, values: Array, inverse: Array, dtype: str) -> Array:
    """[T, k] in `dtype`: the value [M] at each slot's place, 0 where it has none; the gradient of row weights."""
    call = routing_calls.gather_rows(run.spec(values), run.spec(inverse))
    return run.cast(run(call, call.arrange(rows=values, source=inverse))[0], dtype)


class Padding(NamedTuple):
    """How `pad_groups` placed rows: padded sizes [G], row in each place [P] and place of each row [M], -1 for none."""

    sizes: Array
    source: Array
    inverse: Array


def padding(run: Runner, sizes: Array, rows: int, align: int) -> Padding:
    """Groups padded to multiples of `align` rows; empty ones stay empty."""
    call = routing_calls.pad_groups(run.spec(sizes), rows, align)
    return Padding(*run(call, call.arrange(group_sizes=sizes)))


# ---------------------------------------------------------------------------------------------------------------------
# Experts without a router, and biases


def hash_experts(run: Runner, token_ids: Array, k: int, num_experts: int, table: Array | None = None) -> Array:
    """int32 [T, k]: k distinct experts per token id, or those of its row of `table` [V, k]."""
    call = routing_calls.hash_experts(run.spec(token_ids), k, num_experts, _spec(run, table))
    return run(call, call.arrange(token_ids=token_ids, table=table))[0]


def update_bias(run: Runner, bias: Array, load: Array, rate: float) -> Array:
    """float32 [E] = bias + rate * sign(mean load - load): up for experts below the mean load."""
    bias = run.cast(bias, "float32")
    call = routing_calls.bias_update(run.spec(bias), rate)
    return run(call, call.arrange(bias=bias, load=load))[0]


def margins(
    run: Runner,
    logits: Array,
    bias: Array,
    k: int,
    score: str,
    bins: int,
    low: float,
    high: float,
    mask: Array | None = None,
) -> Array:
    """int32 [E, bins]: histogram of the margins of each expert; frontends add it over mesh axes or ranks."""
    logits, bias = run.cast(logits, "float32"), run.cast(bias, "float32")
    call = routing_calls.margin_histogram(run.spec(logits), k, score, bins, low, high, _spec(run, mask))
    return run(call, call.arrange(logits=logits, bias=bias, mask=mask))[0]


def quantile_bias(run: Runner, counts: Array, k: int, low: float, high: float) -> Array:
    """float32 [E]: the bias with which each expert is chosen by k / E of the tokens, minus the mean of these."""
    call = routing_calls.quantile_bias(run.spec(counts), k, low, high)
    return run(call, call.arrange(counts=counts))[0]
