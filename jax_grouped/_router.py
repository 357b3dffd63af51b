"""The router as one operation with gradients of its own (`_run.with_gradients`), around the rules of
`grouped_core.routing`; `route.topk_router` checks its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import custom_vjp_primal_tree_values
from jaxtyping import Array

from grouped_core import routing as rules
from grouped_core.calls import ArraySpec, spec_of
from grouped_core.routing_spec import Router
from jax_grouped._arguments import one_group
from jax_grouped._run import RUN, nonzero, reduce_to, varying_axes, with_gradients

AxisName = str | tuple[str, ...] | None
"""Axes of the mesh, by name, inside `jax.shard_map`."""


class Options(NamedTuple):
    router: Router
    axis_name: tuple[str, ...] | None


class Given(NamedTuple):
    """Operands without gradient."""

    bias: Any
    mask: Any
    experts: Any
    key: Any
    sequence_sizes: Any


class Routed(NamedTuple):
    weights: Any
    experts: Any
    load: Any
    aux_loss: Any
    z_loss: Any
    entropy: Any
    dropped: Any
    overflow: Any


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["read", "first", "kept", "losses", "mask", "key", "sequence_sizes"],
    meta_fields=["logits", "varying"],
)
@dataclass(frozen=True)
class _Saved:
    """What the router saves for its backward (`routing.Chosen`); `losses` is None where they are constants."""

    read: Any
    first: Any
    kept: Any
    losses: Any
    mask: Any
    key: Any
    sequence_sizes: Any
    logits: ArraySpec
    varying: frozenset[str]


def _run_router(options: Options, logits: Any, given: Given) -> tuple[Routed, rules.Chosen, rules.Losses]:
    op, axes = options
    chosen = rules.choose(RUN, op, logits, one_group(logits.shape[0]), **given._asdict())
    sums = chosen.sums
    if axes is not None:
        sums = rules.Sums(*(jax.lax.psum(each, axes) for each in sums))
    # With axes, losses are those of all shards, but dropped slots are those of this one. These are then no operand of
    # the call, because all results of a call vary over every mesh axis that one of its operands varies over.
    losses = rules.losses(RUN, op, sums, chosen.dropped if axes is None else None)
    aux_loss, z_loss, entropy = losses.values
    lost = losses.lost[0] if axes is None or chosen.dropped is None else chosen.dropped[0]
    metrics = (aux_loss, z_loss, entropy, lost, losses.overflow[0] != 0 if axes is None else lost > 0)
    found = Routed(chosen.weights, chosen.experts, chosen.load, *metrics)
    return found, chosen, losses


def _route_value(options: Options, logits: Any, given: Given) -> Routed:
    return _run_router(options, logits, given)[0]


def _route_fwd(options: Options, logits: Any, given: Given) -> tuple[Routed, _Saved | None]:
    needed = logits.perturbed
    logits, given = custom_vjp_primal_tree_values((logits, given))
    found, chosen, losses = _run_router(options, logits, given)
    if not needed:
        return found, None
    op = options.router
    return found, _Saved(
        read=chosen.read,
        first=chosen.first,
        kept=chosen.experts if op.capacity_factor is not None else None,
        losses=losses._replace(lost=None, overflow=None) if op.has_losses else None,
        mask=given.mask,
        key=given.key,
        sequence_sizes=given.sequence_sizes,
        logits=spec_of(logits),
        varying=varying_axes(logits),
    )


def _route_bwd(options: Options, saved: _Saved | None, cotangents: Routed) -> tuple[Any, None]:
    if saved is None:
        return None, None
    d_weights, d_losses = nonzero(cotangents.weights), None
    of_losses = [nonzero(each) for each in (cotangents.aux_loss, cotangents.z_loss)]
    if saved.losses is not None and any(each is not None for each in of_losses):
        d_losses = jnp.stack([jnp.zeros((), jnp.float32) if each is None else each for each in of_losses])
        d_losses = _before_sum(d_losses, options.axis_name)
    if d_weights is None and d_losses is None:
        return None, None
    d_logits = rules.router_grad(
        RUN,
        options.router,
        saved.read,
        saved.first,
        saved.kept,
        saved.losses,
        one_group(saved.read.shape[0]),
        d_weights,
        d_losses,
        saved.logits,
        mask=saved.mask,
        key=saved.key,
        sequence_sizes=saved.sequence_sizes,
    )
    return reduce_to(d_logits, saved.varying), None


def _before_sum(cotangent: Array, axes: tuple[str, ...] | None) -> Array:
    """The cotangent of what was summed over `axes`, given that of the sum.

    JAX defines the transpose of its sum differently with and without `check_vma`: with it, the sum is one value that
    all shards share, and its cotangent is theirs; without it, each shard has a sum of its own, and the cotangents are
    added.
    """
    if axes is None:
        return cotangent
    missing = tuple(name for name in axes if name not in varying_axes(cotangent))
    local = jax.lax.pcast(jnp.zeros_like(cotangent), missing, to="varying") if missing else cotangent
    return jax.vjp(lambda value: jax.lax.psum(value, axes), local)[1](cotangent)[0]


route = with_gradients(_route_value, _route_fwd, _route_bwd)
