"""`ragged_dot` with an adapter in JAX: accumulators, what is saved, and programs under jit, scan and checkpoint."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped
from jax_grouped import grouped_mlp, ragged_dot
from jax_grouped.accumulate import StackedRef
from tests import asserts, bounds, cases

G, M, K, N, R = 3, 20, 16, 24, 4
SIZES = jnp.array([5, 0, 11], jnp.int32)


def made(*shape: int, seed: int) -> jax.Array:
    return jnp.asarray(cases.normal(shape, "bfloat16", "lora", seed))


X, W, DY = made(M, K, seed=0), made(G, K, N, seed=1), made(M, N, seed=2)
A, B = made(G, K, R, seed=3), made(G, R, N, seed=4)


def loss(x: Any, a: Any, b: Any, **options: Any) -> Any:
    y = ragged_dot(x, W, SIZES, lora=(a, b), lora_scaling=0.5, **options)
    return jnp.sum(y.astype(jnp.float32) * DY.astype(jnp.float32))


@functools.cache
def plain() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of x, A and B, computed once."""
    return jax.grad(loss, (0, 1, 2))(X, A, B)


@pytest.mark.rule("LOR-4", "ACC-1")
def test_sinks_get_the_sum_as_their_cotangent():
    sinks = jnp.full(A.shape, 0.5, jnp.float32), jnp.zeros(B.shape, jnp.float32)

    def with_sinks(a: Any, b: Any, sinks: Any) -> Any:
        return loss(X, a, b, lora_wgrad_accum=sinks)

    da, db, (sum_a, sum_b) = jax.jit(jax.grad(with_sinks, (0, 1, 2)))(A, B, sinks)
    asserts.zero(np.asarray(da))
    asserts.zero(np.asarray(db))
    asserts.filled(np.asarray(sum_a)[1], 0.5, "an empty group")
    asserts.bitwise(np.asarray(sum_b.astype(jnp.bfloat16)), np.asarray(plain()[2]))
    np.testing.assert_allclose(
        np.asarray(sum_a) - 0.5, np.asarray(plain()[1], np.float32), rtol=bounds.ADDED[0], atol=bounds.ADDED[1]
    )


@pytest.mark.rule("LOR-4", "ACC-2")
def test_refs_are_updated_in_place():
    stacked = jax.new_ref(jnp.zeros((2, *A.shape), jnp.float32))
    of_b = jax.new_ref(jnp.zeros(B.shape, jnp.float32))
    dx = jax.grad(lambda x: loss(x, A, B, lora_wgrad_accum=(StackedRef(stacked, 1), of_b)))(X)
    asserts.bitwise(np.asarray(dx), np.asarray(plain()[0]))
    asserts.zero(np.asarray(stacked[0]))
    for found, exact in ((stacked[1], plain()[1]), (of_b[...], plain()[2])):
        asserts.bitwise(np.asarray(found.astype(jnp.bfloat16)), np.asarray(exact))


@pytest.mark.rule("LOR-4", "ACC-4")
def test_a_sink_that_is_not_differentiated_is_refused():
    sink = jnp.zeros(A.shape, jnp.float32)
    with asserts.refused(ValueError, ["`lora_wgrad_accum`", "not differentiated", "expected both", "jax.Ref"]):
        jax.grad(lambda a: loss(X, a, B, lora_wgrad_accum=(sink, None)))(A)
    with asserts.refused(ValueError, ["`lora_wgrad_accum`", "(3, 4, 24)", "(3, 16, 4)", "allocate"]):
        loss(X, A, B, lora_wgrad_accum=(jnp.zeros(B.shape), None))


@pytest.mark.rule("LOR-4", "ERR-1")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_differentiated_weight_is_refused_beside_refs(wrap: Any):
    """Its gradient would be zero: with Refs the rule of the operation does not know what is differentiated."""
    refs = tuple(jax.new_ref(jnp.zeros(each.shape, jnp.float32)) for each in (A, B))
    fragments = ["differentiated beside `lora`", "expected a frozen weight", "stop_gradient"]
    with asserts.refused(ValueError, ["`rhs`", *fragments]):
        wrap(jax.grad(lambda w: ragged_dot(X, w, SIZES, lora=(A, B), lora_wgrad_accum=refs).sum()))(W)

    def mlp(wi: Any, wo: Any) -> Any:
        pair = (refs, (None, None))
        return grouped_mlp(X, wi, wo, SIZES, activation="relu", lora=((A, B), None), lora_wgrad_accum=pair).sum()

    wo = made(G, N, K, seed=5)
    for at, name in enumerate(("`wi`", "`wo`")):
        with asserts.refused(ValueError, [name, *fragments]):
            wrap(jax.grad(mlp, at))(W, wo)


@pytest.mark.rule("LOR-4", "ACC-2", "ERR-1")
def test_accumulators_of_two_kinds_and_one_for_both_are_refused():
    sink, ref = jnp.zeros(B.shape, jnp.float32), jax.new_ref(jnp.zeros(A.shape, jnp.float32))
    with asserts.refused(ValueError, ["`lora_wgrad_accum`", "an array beside a jax.Ref", "pass two arrays"]):
        loss(X, A, B, lora_wgrad_accum=(ref, sink))
    square, both = made(G, K, K, seed=6), jnp.zeros((G, K, K), jnp.float32)
    fragments = ["`lora_wgrad_accum`", "one array for both weights", "expected one each"]
    with asserts.refused(ValueError, fragments):
        ragged_dot(X, square, SIZES, lora=(square, square), lora_wgrad_accum=(both, both))
    with asserts.refused(ValueError, fragments):
        pairs = ((square, square), None)
        grouped_mlp(
            *(X, square, square, SIZES), activation="relu", lora=pairs, lora_wgrad_accum=((both, both), (None, None))
        )


@pytest.mark.rule("LOR-2", "LOR-4", "ACC-7", "ALL-4")
@pytest.mark.parametrize(
    ("live", "shapes"),
    [
        ((0, 1, 2), [(M, K), (G, K, N), (M, R), (G, K, R), (G, R, N)]),
        ((1,), [(M, K), (G, R, N)]),
        ((2,), [(M, R)]),
        ((0,), [(G, K, N), (G, K, R), (G, R, N)]),
    ],
)
def test_nothing_is_saved_for_frozen_parts(live: tuple[int, ...], shapes: list[tuple[int, ...]]):
    given = [X, A, B]

    def run(*some: Any) -> Any:
        now = list(given)
        for at, each in zip(live, some, strict=True):
            now[at] = each
        return ragged_dot(now[0], W, SIZES, lora=(now[1], now[2]), lora_scaling=0.5)

    _, pull = jax.vjp(run, *(given[at] for at in live))
    saved = {each.shape for each in jax.tree.leaves(pull) if getattr(each, "ndim", 0) > 1}
    assert saved == set(shapes)
    launched = str(jax.make_jaxpr(pull)(DY))
    at_once = 2 in live and len(live) > 1
    assert launched.count("name='low_rank_grads'") == at_once, "of B, along with the rows of A"
    assert launched.count("('contract_rows', 1)") == sum(at > 0 for at in live) - at_once, "of A, and of B alone"


@pytest.mark.rule("LOR-1")
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))])
def test_programs_give_the_same_bits(wrap: Any):
    for one, two in zip(jax.grad(wrap(loss), (0, 1, 2))(X, A, B), plain(), strict=True):
        asserts.bitwise(np.asarray(one), np.asarray(two))


@pytest.mark.rule("LOR-1")
def test_a_scan_over_layers_draws_a_mask_per_key():
    keys = jnp.arange(4, dtype=jnp.uint32).reshape(2, 2)

    def layer(total: Any, key: Any) -> tuple[Any, None]:
        return total + loss(X, A, B, lora_dropout=0.5, lora_key=key), None

    scanned = jax.jit(lambda keys: jax.lax.scan(layer, 0.0, keys)[0])(keys)
    single = [loss(X, A, B, lora_dropout=0.5, lora_key=key) for key in keys]
    assert single[0] != single[1]
    np.testing.assert_allclose(scanned, sum(single), rtol=bounds.REPEATED)


@pytest.mark.rule("LOR-2", "QNT-8")
def test_a_quantised_base_needs_one_form():
    q = jax_grouped.quantize(W, "mxfp4", axis=1)
    values = jax_grouped.dequantize(q, jnp.bfloat16)

    def run(w: Any) -> Any:
        return jax.vjp(lambda x, a, b: ragged_dot(x, w, SIZES, lora=(a, b)), X, A, B)

    (y, pull), (plain, plain_pull) = run(q), run(values)
    asserts.bitwise(np.asarray(y), np.asarray(plain))
    for one, two in zip(pull(DY), plain_pull(DY), strict=True):
        asserts.bitwise(np.asarray(one), np.asarray(two))
