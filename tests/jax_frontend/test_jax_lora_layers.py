"""Adapters of the MLP and of layers in JAX: accumulators, gradients of adapters alone, NNX and Linen, merging."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

import jax_grouped
from jax_grouped import linen, nnx
from tests import asserts, bounds
from tests.bounds import Bounded

G, H, F, M, R = 3, 16, 24, 20, 4
SIZES = jnp.array([5, 0, 11], jnp.int32)
VALID = 16
KINDS = ("GroupedLinear", "GroupedMLP", "MoE")


def made(*shape: int, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


X, DY = made(M, H, seed=0), made(M, H, seed=1)
WI, WO = made(G, H, 2 * F, seed=2) / 4, made(G, F, H, seed=3) / 4
LORA = (
    (made(G, H, R, seed=4) / 4, made(G, R, 2 * F, seed=5) / 2),
    (made(G, F, R, seed=6) / 4, made(G, R, H, seed=7) / 2),
)


def loss(lora: Any, x: Any = X, **options: Any) -> Any:
    y = jax_grouped.grouped_mlp(x, WI, WO, SIZES, lora=lora, lora_scaling=0.5, **options)
    return jnp.sum(y.astype(jnp.float32) * DY.astype(jnp.float32))


PLAIN = jax.grad(loss)(LORA)


def check_added(found: Any, exact: Any) -> None:
    """A float32 sum that began at 0.5."""
    relative, absolute = bounds.ADDED
    added = np.asarray(found, np.float64) - 0.5
    asserts.filled(np.asarray(found)[1], 0.5, "an empty group")
    limit = relative * np.abs(added) + absolute * (1 + np.abs(added))
    asserts.within(np.asarray(exact), Bounded(added, limit, "bfloat16"))


@pytest.mark.rule("LOR-4", "ACC-1")
def test_sinks_get_the_sum_as_their_cotangent():
    sinks = jax.tree.map(lambda each: jnp.full(each.shape, 0.5, jnp.float32), LORA)
    grads, sums = jax.jit(jax.grad(lambda lora, into: loss(lora, lora_wgrad_accum=into), (0, 1)))(LORA, sinks)
    for zero in jax.tree.leaves(grads):
        asserts.zero(np.asarray(zero))
    for found, exact in zip(jax.tree.leaves(sums), jax.tree.leaves(PLAIN), strict=True):
        check_added(found, exact)


@pytest.mark.rule("LOR-4", "ACC-2")
def test_refs_are_updated_in_place():
    refs = [jax.new_ref(jnp.full(each.shape, 0.5, jnp.float32)) for each in jax.tree.leaves(LORA)]
    into = ((refs[0], refs[1]), (refs[2], refs[3]))
    dx = jax.grad(lambda x: loss(LORA, x, lora_wgrad_accum=into))(X)
    asserts.bitwise(np.asarray(dx), np.asarray(jax.grad(lambda x: loss(LORA, x))(X)))
    for found, exact in zip(refs, jax.tree.leaves(PLAIN), strict=True):
        check_added(found[...], exact)


@pytest.mark.rule("LOR-4", "ACC-4")
def test_accumulators_of_one_adapter_alone():
    of_b = jnp.full(LORA[0][1].shape, 0.5, jnp.float32)
    grads, sums = jax.grad(lambda lora, b: loss(lora, lora_wgrad_accum=((None, b), None)), (0, 1))(LORA, of_b)
    check_added(sums, PLAIN[0][1])
    asserts.zero(np.asarray(grads[0][1]))
    asserts.bitwise(np.asarray(grads[0][0]), np.asarray(PLAIN[0][0]))
    for found, exact in zip(grads[1], PLAIN[1], strict=True):
        asserts.bitwise(np.asarray(found), np.asarray(exact))
    with asserts.refused(ValueError, ["`lora_wgrad_accum`", "`lora[0][0]`", "absent"]):
        loss((None, LORA[1]), lora_wgrad_accum=((of_b, of_b), None))


@pytest.mark.rule("LOR-1")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_programs_give_the_same_bits(dropout):
    options: dict[str, Any] = {"lora_dropout": dropout} if dropout else {}
    if dropout:
        options["lora_key"] = jnp.array([1, 2], jnp.uint32)

    def of_lora(lora: Any) -> Any:
        return loss(lora, **options)

    expected = jax.grad(of_lora)(LORA)
    for found in (jax.jit(jax.grad(of_lora))(LORA), jax.grad(jax.checkpoint(of_lora))(LORA)):
        for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            asserts.bitwise(np.asarray(one), np.asarray(two))


# ---------------------------------------------------------------------------------------------------------------------
# Layers.


def arguments(kind: str) -> tuple[int, ...]:
    return {"GroupedLinear": (G, H, F), "GroupedMLP": (G, H, F), "MoE": (H, F, G, 2)}[kind]


def nnx_layer(kind: str, **options: Any) -> Any:
    """A layer of NNX with adapters whose B is not zero."""
    options = {"lora_rank": R, "lora_alpha": 2.0, "param_dtype": jnp.bfloat16, **options}
    layer = getattr(nnx, kind)(*arguments(kind), rngs=flax_nnx.Rngs(0), **options)
    for seed, (path, leaf) in enumerate(flax_nnx.to_flat_state(flax_nnx.state(layer, flax_nnx.LoRAParam))):
        if str(path[-1]).endswith("_b"):
            owner = layer
            for name in path[:-1]:
                owner = getattr(owner, str(name))
            getattr(owner, str(path[-1]))[...] = made(*leaf.shape, seed=seed) / 2
    return layer


def called(layer: Any, x: Any = X) -> Any:
    return layer(x)[0] if isinstance(layer, nnx.MoE) else layer(x, SIZES)


@pytest.mark.rule("LOR-1", "LOR-2")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_nnx_adapters_alone(kind):
    layer = nnx_layer(kind)
    structure, adapters, others = flax_nnx.split(layer, flax_nnx.LoRAParam, ...)

    def loss_of(adapters: Any, others: Any) -> Any:
        return jnp.sum(called(flax_nnx.merge(structure, adapters, others)).astype(jnp.float32) ** 2)

    found = jax.tree.leaves(jax.jit(jax.grad(loss_of))(adapters, others))
    assert len(found) == (2 if kind == "GroupedLinear" else 4)
    assert all(np.any(np.asarray(each, np.float32)) for each in found)
    of_others = flax_nnx.to_flat_state(jax.grad(loss_of, 1, allow_int=True)(adapters, others))
    for path, each in of_others:
        if "router" not in path and each[...].dtype != jax.dtypes.float0:
            asserts.zero(np.asarray(each[...], np.float32), str(path))


@pytest.mark.rule("LOR-1")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [False, True])
def test_step_0_of_nnx_is_the_base(kind, shared):
    """Adapters are drawn behind all other parameters, which are those of a layer without them."""
    if shared and kind != "MoE":
        pytest.skip("has no shared expert")
    options: dict[str, Any] = {"shared_dim": 8, "shared_gate": True} if shared else {}
    options |= {"param_dtype": jnp.bfloat16}
    layer = getattr(nnx, kind)(*arguments(kind), lora_rank=R, rngs=flax_nnx.Rngs(0), **options)
    base = getattr(nnx, kind)(*arguments(kind), rngs=flax_nnx.Rngs(0), **options)
    asserts.bitwise(np.asarray(called(layer)), np.asarray(called(base)))


@pytest.mark.rule("LOR-1")
@pytest.mark.parametrize("kind", KINDS)
def test_elements_are_dropped_unless_deterministic(kind):
    layer = nnx_layer(kind, lora_dropout=0.5)
    first, second = np.asarray(called(layer)), np.asarray(called(layer))
    assert np.any(first != second), "each pass draws its masks"
    layer.eval()
    asserts.bitwise(np.asarray(called(layer)), np.asarray(called(nnx_layer(kind))))
    layer.train()
    assert np.any(np.asarray(called(layer)) != np.asarray(called(nnx_layer(kind))))
    with_jit = flax_nnx.jit(lambda layer, x: called(layer, x))
    assert np.any(np.asarray(with_jit(layer, X)) != np.asarray(with_jit(layer, X)))


def check_merged(merged: Any, weight: Any, a: Any, b: Any) -> None:
    weight, a, b = (np.asarray(each, np.float64) for each in (weight, a, b))
    exact = weight + 2.0 / R * a @ b
    asserts.within(np.asarray(merged), Bounded(exact, bounds.merged(np.abs(exact), "bfloat16"), "bfloat16"))


def check_moved(after: Any, before: Any, products: int) -> None:
    after, before = (np.asarray(each, np.float64) for each in (after, before))
    assert np.linalg.norm(after - before) <= products * bounds.MERGED * np.linalg.norm(before)


def pairs_of(kind: str) -> dict[str, str]:
    """Weights of a layer and their adapters."""
    return {"kernel": "lora"} if kind == "GroupedLinear" else {"wi": "wi_lora", "wo": "wo_lora"}


@pytest.mark.rule("LOR-5")
@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_of_nnx(kind):
    layer = nnx_layer(kind)
    before = called(layer)
    held = {
        weight: tuple(np.asarray(getattr(layer, name)[...]) for name in (weight, f"{pair}_a", f"{pair}_b"))
        for weight, pair in pairs_of(kind).items()
    }
    layer.merge()
    assert not jax.tree.leaves(flax_nnx.state(layer, flax_nnx.LoRAParam))
    for weight, parts in held.items():
        check_merged(getattr(layer, weight)[...], *parts)
    check_moved(called(layer), before, len(held))
    with asserts.refused(ValueError, ["`merge` of", "no adapter", "expected one", "`lora_rank`"]):
        layer.merge()


def linen_layer(kind: str, **options: Any) -> tuple[Any, Any]:
    """A layer of Linen, and variables whose B is not zero."""
    options = {"lora_rank": R, "lora_alpha": 2.0, "param_dtype": jnp.bfloat16, **options}
    layer = getattr(linen, kind)(*arguments(kind), **options)
    operands = (X,) if kind == "MoE" else (X, SIZES)
    variables = dict(layer.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, *operands))
    of_b = {name: made(*each.shape, seed=3) / 2 for name, each in variables["lora"].items() if name.endswith("_b")}
    for name in of_b:
        asserts.zero(np.asarray(variables["lora"][name], np.float32), name)
    return layer, {**variables, "lora": {**variables["lora"], **of_b}}


def applied(layer: Any, variables: Any, **options: Any) -> Any:
    kind = type(layer).__name__
    y = layer.apply(variables, X, **options) if kind == "MoE" else layer.apply(variables, X, SIZES, **options)
    return y[0] if kind == "MoE" else y


@pytest.mark.rule("LOR-1", "LOR-2")
@pytest.mark.parametrize("kind", KINDS)
def test_the_collection_of_linen(kind):
    layer, variables = linen_layer(kind)
    assert set(variables["lora"]) == {f"{pair}_{part}" for pair in pairs_of(kind).values() for part in "ab"}

    def loss_of(lora: Any, params: Any) -> Any:
        return jnp.sum(applied(layer, {**variables, "lora": lora, "params": params}).astype(jnp.float32) ** 2)

    found, of_params = jax.jit(jax.grad(loss_of, (0, 1)))(variables["lora"], variables["params"])
    assert all(np.any(np.asarray(each, np.float32)) for each in jax.tree.leaves(found))
    for name in pairs_of(kind):
        asserts.zero(np.asarray(of_params[name], np.float32), name)


@pytest.mark.rule("LOR-1")
@pytest.mark.parametrize("kind", ["GroupedLinear", "GroupedMLP"])
def test_linen_and_nnx_have_the_same_bits(kind):
    layer, variables = linen_layer(kind)
    other = nnx_layer(kind)
    for weight, pair in pairs_of(kind).items():
        getattr(other, weight)[...] = variables["params"][weight]
        for part in "ab":
            getattr(other, f"{pair}_{part}")[...] = variables["lora"][f"{pair}_{part}"]
    asserts.bitwise(np.asarray(applied(layer, variables)), np.asarray(called(other)))


@pytest.mark.rule("LOR-1")
@pytest.mark.parametrize("kind", ["GroupedLinear", "GroupedMLP"])
def test_dropout_of_linen(kind):
    layer, variables = linen_layer(kind, lora_dropout=0.5)
    found = [np.asarray(applied(layer, variables, rngs={"dropout": jax.random.key(seed)})) for seed in (0, 0, 1)]
    asserts.bitwise(found[1], found[0])
    assert np.any(found[2] != found[0])
    without = np.asarray(applied(layer.clone(deterministic=True), variables))
    asserts.bitwise(without, np.asarray(applied(layer.clone(lora_dropout=0.0), variables)))


@pytest.mark.rule("LOR-5")
@pytest.mark.parametrize("kind", KINDS)
def test_merged_variables_of_linen(kind):
    layer, variables = linen_layer(kind)
    merged = linen.merge(layer, variables)
    assert "lora" not in merged
    for weight, pair in pairs_of(kind).items():
        factors = (variables["lora"][f"{pair}_{part}"] for part in "ab")
        check_merged(merged["params"][weight], variables["params"][weight], *factors)
    plain = layer.clone(lora_rank=None, lora_alpha=None)
    check_moved(applied(plain, merged), applied(layer, variables), len(pairs_of(kind)))
    with asserts.refused(ValueError, ["`variables` of merge", "no collection `lora`", "`lora_rank`"]):
        linen.merge(layer, merged)


@pytest.mark.rule("LOR-5")
def test_the_shared_expert_is_merged_too():
    layer = nnx_layer("MoE", shared_dim=8)
    before = called(layer)
    layer.merge()
    assert not jax.tree.leaves(flax_nnx.state(layer, flax_nnx.LoRAParam))
    check_moved(called(layer), before, 4)
    of_linen, variables = linen_layer_with_shared()
    merged = linen.merge(of_linen, variables)
    plain = of_linen.clone(lora_rank=None, lora_alpha=None)
    check_moved(applied(plain, merged), applied(of_linen, variables), 4)


def linen_layer_with_shared() -> tuple[Any, Any]:
    layer = linen.MoE(*arguments("MoE"), shared_dim=8, lora_rank=R, lora_alpha=2.0, param_dtype=jnp.bfloat16)
    variables = dict(layer.init(jax.random.key(0), X))
    of_lora = jax.tree.map(lambda each: made(*each.shape, seed=each.size) / 2, variables["lora"])
    return layer, {**variables, "lora": of_lora}


@pytest.mark.rule("ERR-1", "LOR-1")
@pytest.mark.parametrize(
    ("options", "error", "fragments"),
    [
        ({"lora_rank": 257}, ValueError, ["`lora_rank`", "257", "1 to 256"]),
        ({"lora_rank": 2.5}, TypeError, ["`lora_rank`", "2.5", "an integer or None"]),
        ({"lora_rank": None, "lora_dropout": 0.1}, ValueError, ["`lora_dropout`", "without `lora_rank`"]),
        ({"lora_dropout": 1.0}, ValueError, ["`lora_dropout`", "1.0", "without 1"]),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_options_that_do_not_fit_are_refused(kind, options, error, fragments):
    options = {"lora_rank": R, **options}
    with asserts.refused(error, fragments):
        getattr(nnx, kind)(*arguments(kind), rngs=flax_nnx.Rngs(0), **options)
    layer = getattr(linen, kind)(*arguments(kind), **options)
    operands = (X,) if kind == "MoE" else (X, SIZES)
    with asserts.refused(error, fragments):
        layer.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, *operands)
