"""Moves rows: a `custom_vjp` around each rule of `grouped_core.routing`. The callers check the arguments.

The first argument of each function is its static options, None where it has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import custom_vjp_primal_tree_values

from grouped_core import exchange, routed, routing_spec
from grouped_core import routing as rules
from grouped_core.calls import spec_of
from grouped_core.exchange import Exchange, Sent
from grouped_core.formats import Format, QTensor
from jax_grouped._arguments import one_group
from jax_grouped._run import RUN, nonzero, reduce_to, varying_axes, with_gradients


class Places(NamedTuple):
    """Static options of `permute`: G, M, the alignment of groups, and k."""

    groups: int
    rows: int
    align: int
    slots: int


Order = rules.Order | Sent


def _order(options: Places | Exchange, experts: Any, probs: Any) -> Order:
    if isinstance(options, Exchange):
        return exchange.send_order(RUN, options, experts, probs)
    return rules.order(RUN, experts, options.groups, options.rows, align=options.align, weights=probs)


def _permute_value(options: Places | Exchange, x: Any, probs: Any, experts: Any) -> tuple[Any, Order]:
    found = _order(options, experts, probs)
    return rules.gather(RUN, x, found.source, options.slots, inverse=found.inverse), found


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "weights", "source", "inverse", "entries"],
    meta_fields=["dtypes", "needs", "varying"],
)
@dataclass(frozen=True)
class _Moved:
    """What moving rows saves for its backward.

    Attributes:
        rows, weights: operands, where a gradient reads them. source, inverse, entries: maps, likewise.
        dtypes, needs, varying: those of the two operands that may have a gradient; a dtype is "" where one is absent.
    """

    rows: Any
    weights: Any
    source: Any
    inverse: Any
    entries: Any
    dtypes: tuple[str, str]
    needs: tuple[bool, bool]
    varying: tuple[frozenset[str], frozenset[str]]


def _moved(
    operands: tuple[Any, Any],
    needs: tuple[bool, bool],
    source: Any,
    inverse: Any,
    rows: Any = None,
    weights: Any = None,
    entries: Any = None,
) -> _Moved:
    first, second = operands
    dtypes = (spec_of(first).dtype, "" if second is None else spec_of(second).dtype)
    axes = (varying_axes(first), frozenset[str]() if second is None else varying_axes(second))
    return _Moved(rows, weights, source, inverse, entries, dtypes, needs, axes)


def _asked(primal: Any) -> bool:
    return any(leaf.perturbed for leaf in jax.tree.leaves(primal))


def _permute_fwd(options: Places | Exchange, *primals: Any) -> tuple[Any, _Moved]:
    x, probs, experts = custom_vjp_primal_tree_values(primals)
    needs = (_asked(primals[0]), _asked(primals[1]))
    if needs[0]:
        routing_spec.check_added("permute", "x", spec_of(x).dtype)
    rows, found = _permute_value(options, x, probs, experts)
    entries = found.entries if isinstance(found, Sent) else None
    return (rows, found), _moved((x, probs), needs, None, found.inverse, entries=entries)


def _permute_bwd(options: Places | Exchange, saved: _Moved, cotangents: tuple[Any, Order]) -> tuple[Any, Any, None]:
    d_rows, d_probs = nonzero(cotangents[0]), nonzero(cotangents[1].probs)
    dx = dp = None
    if saved.needs[0] and d_rows is not None:
        dx = reduce_to(rules.combine(RUN, d_rows, saved.inverse, saved.dtypes[0]), saved.varying[0])
    if saved.needs[1] and d_probs is not None:
        places = saved.inverse if saved.entries is None else saved.entries
        dp = reduce_to(rules.of_slots(RUN, d_probs.reshape(-1), places, saved.dtypes[1]), saved.varying[1])
    return dx, dp, None


permute = with_gradients(_permute_value, _permute_fwd, _permute_bwd)
"""Rows [M, H] and their order, of x [T, H], weights [T, k] or None, and experts [T, k]; sorted by expert (`Places`), or
as a rank of an exchange sends them (`Exchange`).
"""


def _unpermute_value(dtype: str | None, y: Any, weights: Any, source: Any, inverse: Any) -> Any:
    return rules.combine(RUN, y, inverse, dtype or RUN.spec(y).dtype, weights)


def _unpermute_fwd(dtype: str | None, *primals: Any) -> tuple[Any, _Moved]:
    y, weights, source, inverse = custom_vjp_primal_tree_values(primals)
    needs = (_asked(primals[0]), _asked(primals[1]))
    saved = _moved((y, weights), needs, source, inverse, y if needs[1] else None, weights)
    return _unpermute_value(dtype, y, weights, source, inverse), saved


def _unpermute_bwd(_: str | None, saved: _Moved, d_out: Any) -> tuple[Any, Any, None, None]:
    arrays = (saved.rows, saved.source, saved.inverse, saved.weights, d_out)
    found = rules.combine_grads(RUN, *arrays, saved.dtypes[0], saved.needs)
    dy, dw = (None if each is None else reduce_to(each, at) for each, at in zip(found, saved.varying, strict=True))
    return dy, dw, None, None


unpermute = with_gradients(_unpermute_value, _unpermute_fwd, _unpermute_bwd)
"""[T, H] in the dtype of its options, by default that of the rows: the sum of each token's rows, times its weights."""


def _codes_value(fmt: Format, x: Any, source: Any, inverse: Any) -> QTensor[Any]:
    return routed.rows_of(RUN, routed.codes_of(RUN, x, fmt, one_group(x.shape[0])), source, inverse)


codes = jax.custom_vjp(_codes_value, nondiff_argnums=(0,))
"""[M, H], without gradient: for each slot in `source` [M] the row of x [T, H] that it belongs to, after x is quantised;
`inverse` [T, k] has the row of each slot."""
codes.defvjp(lambda *given: (_codes_value(*given), None), lambda *_: (None, None, None))


def _take_value(_: None, rows: Any, source: Any, inverse: Any) -> Any:
    return rules.gather(RUN, rows, source, 1)


def _take_fwd(_: None, rows: Any, source: Any, inverse: Any) -> tuple[Any, _Moved]:
    values = custom_vjp_primal_tree_values((rows, source, inverse))
    needed = rows.perturbed
    return _take_value(None, *values), _moved((values[0], None), (needed, False), None, values[2])


def _take_bwd(_: None, saved: Any, d_rows: Any) -> tuple[Any, None, None]:
    dx = rules.gather(RUN, d_rows, saved.inverse, 1) if saved.needs[0] else None
    return (None if dx is None else reduce_to(dx, saved.varying[0])), None, None


take = with_gradients(_take_value, _take_fwd, _take_bwd)
