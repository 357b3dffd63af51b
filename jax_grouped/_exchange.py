"""An expert-parallel layer's rows on their way to the ranks of their experts, and back.

Inside `jax.shard_map`. Which row goes where is a rule of `grouped_core.exchange`; a transport moves them.

Letters: P ranks, T tokens of a rank, k experts per token, E experts, L = E / P experts of a rank, B rows of the budget,
j experts of a row at most, H columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from grouped_core import routed
from grouped_core.exchange import Exchange, exchange_option
from grouped_core.formats import Format, QTensor
from jax_grouped import _ragged, _rows
from jax_grouped._mesh import Axis, members, size_of, vary_over
from jax_grouped._run import RUN, differentiable
from jax_grouped.quantize import StraightThrough

TRANSPORTS = ("all_to_all", "ragged_all_to_all", "ring")
"""How rows travel: padded to a static budget; only the rows in use; or, in a ring, as tokens from rank to rank."""


def transport_option(function: str, transport: str, among: tuple[str, ...] = TRANSPORTS) -> str:
    """Checks the name of a transport.

    Raises:
        ValueError: there is none of this name.
    """
    if transport not in among:
        raise ValueError(
            f"`transport` of {function}: {transport!r}, expected one of {', '.join(among)}; all_to_all is the default."
        )
    return transport


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["source", "inverse", "sends", "recvs", "dropped"],
    meta_fields=["option", "axis", "transport"],
)
@dataclass(frozen=True)
class Way:
    """How rows went, for `back`.

    Attributes:
        source: int32 [P B], slot of each row. inverse: int32 [T, k], row of each slot. Both of the rows sent.
        sends, recvs: int32 [P, L], rows sent and received per rank and local expert, or [P, 1] per rank; None where
            parts are static.
        dropped: int32 scalar, the number of slots of this rank that are not sent, plus received slots without room.
    """

    source: Any
    inverse: Any
    sends: Any
    recvs: Any
    dropped: Any
    option: Exchange
    axis: Axis
    transport: str


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Arrived:
    """What a rank received, as if rows were tokens with j slots: rows [P B, H], their local experts, int32 [P B, j], -1
    for none, and the weights of these experts, float32 [P B, j].
    """

    rows: Any
    experts: Any
    probs: Any


def there(
    function: str,
    x: Any,
    experts: Any,
    weights: Any,
    count: int,
    axis: Axis,
    transport: str,
    factor: float | None,
    once_per_rank: bool = False,
    codes: Format | None = None,
) -> tuple[Arrived, Way]:
    """Sends each token of x [T, H] to the ranks of its experts [T, k], of `count`, with its weights [T, k].

    Args:
        once_per_rank: whether a token is sent to a rank once, for all its experts there.
        codes: a format with scales per row that tokens are quantised in before they are sent; rows are then a
            `StraightThrough`. Its master is never read, so XLA does not send it; its gradient travels back.
    """
    (tokens, slots), ranks = experts.shape, size_of(axis)
    sizes = {"ranks": ranks, "experts": count, "tokens": tokens, "slots": slots}
    op = exchange_option(function, **sizes, budget_factor=factor, once_per_rank=once_per_rank)
    rows, sent = differentiable(_rows.permute, op, x, weights, experts)
    sends = recvs = None
    if transport == "ragged_all_to_all":
        sends = sent.sizes.reshape(ranks, -1)
        recvs = _static(sends, axis)
    way = Way(sent.source, sent.inverse, sends, recvs, sent.dropped[0], op, axis, transport)
    several = (vary_over(each.reshape(op.rows, op.slots_of_row), axis) for each in (sent.experts, sent.probs))
    facts: Any = _beside(axis, *several)
    ids, probs = facts
    if op.max_rows is not None:
        beyond = jnp.maximum(jnp.sum(ids >= 0, dtype=jnp.int32) - op.max_rows, 0)
        way = replace(way, dropped=way.dropped + beyond)
    moved = _move(rows, way, sends, recvs)
    if codes is not None:
        moved = StraightThrough(moved, _codes_there(jax.lax.stop_gradient(x), codes, way))
    return Arrived(moved, ids, probs), way


def _codes_there(x: Any, fmt: Format, way: Way) -> QTensor[Any]:
    """The rows sent of x [T, H], quantised before they are sent; both arrays travel as whole bytes."""
    rows = jax.lax.stop_gradient(_rows.codes(fmt, x, way.source, way.inverse))
    at = routed.scale_axis(RUN, rows)

    def bytes_there(array: Any, move: Any) -> Any:
        if array.dtype.itemsize > 1:
            return move(array)
        moved = move(jax.lax.bitcast_convert_type(array, jnp.uint8))
        return jax.lax.bitcast_convert_type(moved, array.dtype)

    values = bytes_there(rows.values, lambda each: _move(each, way, way.sends, way.recvs))
    scales = bytes_there(rows.scales, lambda each: _static(each, way.axis, at))
    return QTensor(values, scales, None, rows.format, 1, rows.shape, rows.dtype)


def back(results: Any, way: Way, dtype: str | None = None) -> Any:
    """[T, H]: the results [P B, H] of received rows, sent back and summed per token, in `dtype` or their own."""
    rows = _move(results, way, way.recvs, way.sends)
    return differentiable(_rows.unpermute, dtype, rows, None, way.source, way.inverse)


def _move(rows: Any, way: Way, sends: Any, recvs: Any) -> Any:
    if sends is None:
        return _static(rows, way.axis)
    return _ragged.swap(way.axis, vary_over(rows, way.axis), sends, recvs)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _beside(axis: Axis, experts: Any, probs: Any) -> tuple[Any, Any]:
    """Local experts and weights [P B, j] of the rows that arrive, in one exchange of both."""
    words = jnp.concatenate([experts, jax.lax.bitcast_convert_type(probs, jnp.int32)], axis=1)
    ids, weights = jnp.split(_static(words, axis), 2, axis=1)
    return ids, jax.lax.bitcast_convert_type(weights, jnp.float32)


def _beside_fwd(axis: Axis, experts: Any, probs: Any) -> tuple[Any, None]:
    return _beside(axis, experts, probs), None


def _beside_bwd(axis: Axis, _: None, cotangents: tuple[Any, Any]) -> tuple[None, Any]:
    return None, _static(cotangents[1], axis)


_beside.defvjp(_beside_fwd, _beside_bwd)


def _static(rows: Any, axis: Axis, at: int = 0) -> Any:
    """[P B, ...], or of that shape with P B as axis `at`: part s is what rank s had as the part of this rank."""
    return jax.lax.all_to_all(vary_over(rows, axis), members(axis), at, at, tiled=True)


# ---------------------------------------------------------------------------------------------------------------------
# In a ring


def in_a_ring(experts_mlp: Any, x: Any, experts: Any, weights: Any, own: int, axis: Axis) -> Any:
    """float32 [T, H]: sums of each token's experts, with tokens that travel from rank to rank.

    Every rank adds the results of its experts for the tokens that have reached it. The sums travel with the tokens; the
    last step returns them to the ranks of the tokens. A rank can send tokens on before its experts have read them.

    Args:
        experts_mlp: a function of x [T, H], local experts and weights [T, k]. own: the number of experts per rank.
    """
    ranks, first = size_of(axis), jax.lax.axis_index(members(axis)) * own
    step = partial(_next, members(axis), ranks)
    visiting = tuple(vary_over(each, axis) for each in (x, experts, weights))
    sums = None
    for at in range(ranks):
        tokens, chosen, probs = visiting
        if at + 1 < ranks:
            visiting = jax.tree.map(step, visiting)
        found = experts_mlp(tokens, chosen - first, probs).astype(jnp.float32)
        sums = step(found if sums is None else sums + found) if ranks > 1 else found
    return sums


def _next(names: tuple[str, ...], ranks: int, array: Any) -> Any:
    return jax.lax.ppermute(array, names, [(rank, (rank + 1) % ranks) for rank in range(ranks)])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def rounded_once(dtype: str | None, weight: Any) -> Any:
    """`weight`; the gradients of all its uses are added before their sum is rounded, to `dtype` or its own dtype."""
    return weight


def _rounded_fwd(dtype: str | None, weight: Any) -> tuple[Any, Any]:
    return weight, jnp.zeros((), weight.dtype)


def _rounded_bwd(dtype: str | None, like: Any, cotangent: Any) -> tuple[Any]:
    return (cotangent.astype(dtype or like.dtype),)


rounded_once.defvjp(_rounded_fwd, _rounded_bwd)
