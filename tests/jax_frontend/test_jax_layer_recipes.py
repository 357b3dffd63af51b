"""Recipes that quantise in the Flax NNX layers: what they compute, the state that they hold, and their keys."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx as flax_nnx
from flax import serialization

import jax_grouped
from grouped_core import recipes
from grouped_core.recipes import Recipe
from jax_grouped import linen, moe, nnx
from tests import asserts
from tests.jax_frontend.jax_tools import same
from tests.quantized import QUANTIZING as RECIPES

DELAYED = recipes.FP8Delayed.replace(history=3)
SIZES = np.asarray([5, 0, 9, 2], np.int32)
G, S, H, F = len(SIZES), int(SIZES.sum()), 64, 32
LAYERS = ("linear", "mlp", "moe")
PARTS = (flax_nnx.Param, nnx.Scaling, flax_nnx.RngState)


def layer_of(kind: str, recipe: Recipe | None, seed: int = 0) -> Any:
    rngs = flax_nnx.Rngs(seed, rounding=seed + 1)
    options: dict[str, Any] = {"dtype": jnp.bfloat16, "recipe": recipe, "rngs": rngs}
    if kind == "linear":
        return nnx.GroupedLinear(G, H, H, **options)
    return nnx.GroupedMLP(G, H, F, **options) if kind == "mlp" else nnx.MoE(H, F, G, 2, **options)


def rows(seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((S, H)), jnp.bfloat16)


def apply(layer: Any, x: jax.Array, **options: Any) -> jax.Array:
    if isinstance(layer, nnx.MoE):
        return layer(x, **options)[0]
    return layer(x, SIZES, **options)


def cotangents(layer: Any, x: jax.Array, **options: Any) -> tuple[Any, Any, Any]:
    """Gradients of the parameters, what comes back for the state, and the gradient of x."""
    structure, params, scaling, keys = flax_nnx.split(layer, *PARTS)
    return _cotangents(structure, params, scaling, keys, x, options)


@partial(jax.jit, static_argnums=0)
def _cotangents(structure: Any, params: Any, scaling: Any, keys: Any, x: jax.Array, options: Any) -> Any:
    """One program for layers of one structure."""

    def loss(params: Any, scaling: Any, x: jax.Array) -> jax.Array:
        y = apply(flax_nnx.merge(structure, params, scaling, keys, copy=True), x, **options)
        return jnp.vdot(y.astype(jnp.float32), jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape))

    return jax.grad(loss, argnums=(0, 1, 2))(params, scaling, x)


@pytest.mark.matrix(recipe=(recipes.BF16, *RECIPES, DELAYED), kind=LAYERS)
def test_layers_compute_what_the_operations_do(recipe: Recipe, kind: str) -> None:
    layer, x, key = layer_of(kind, recipe), rows(), jax.random.key(7)
    state = layer.scaling.get_value() if recipe.delayed else None
    bound = recipe.bind(state, jax.random.bits(key, (2,), "uint32") if recipe.stochastic else None)

    def function(p: Any, x: jax.Array) -> jax.Array:
        p = jax.tree.map(lambda a: a.astype(jnp.bfloat16), p)
        if kind == "linear":
            return jax_grouped.ragged_dot(x, p["kernel"], SIZES, bias=p["bias"], recipe=bound)
        if kind == "mlp":
            return jax_grouped.grouped_mlp(x, p["wi"], p["wo"], SIZES, recipe=bound)
        return moe(x, layer.router.kernel[...], p["wi"], p["wo"], 2, recipe=bound)[0]

    names = ("kernel", "bias") if kind == "linear" else ("wi", "wo")
    params = {name: getattr(layer, name)[...] for name in names}
    y, pull = jax.vjp(function, params, x)
    dy = rows(1).reshape(y.shape)
    gradients, dx = pull(dy)
    structure, held, scaling, keys = flax_nnx.split(layer, *PARTS)
    found, pull = jax.vjp(
        lambda p, x: apply(flax_nnx.merge(structure, p, scaling, keys, copy=True), x, rngs=key), held, x
    )
    asserts.bitwise(found, y)
    d_held, d_x = pull(dy)
    asserts.bitwise(d_x, dx)
    for name, gradient in gradients.items():
        asserts.bitwise(d_held[name][...], gradient, name)


@pytest.mark.parametrize("kind", LAYERS)
def test_only_recipes_that_need_it_hold_more_than_parameters(kind: str) -> None:
    plain = flax_nnx.state(layer_of(kind, None))
    for recipe in (recipes.BF16, *RECIPES):
        _, params, scaling, keys = flax_nnx.split(layer_of(kind, recipe), *PARTS)
        same(params, plain)
        assert bool(jax.tree.leaves(scaling)) == recipe.delayed, recipe.name
        assert bool(jax.tree.leaves(keys)) == recipe.stochastic, recipe.name


# ---- delayed scaling -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LAYERS)
def test_the_state_comes_back_as_its_next_value(kind: str) -> None:
    layer, x = layer_of(kind, DELAYED), rows()
    before = layer.scaling.get_value()
    _, scaling, _ = cotangents(layer, x)
    after = scaling["scaling"].get_value()
    same((after.scale, after.top), (before.scale, before.top))
    used = np.ones(G, bool) if kind == "moe" else SIZES > 0
    assert (np.asarray(after.history)[:, 0][:, used] > 0).all(), "each role of each group in use has its magnitude"
    asserts.zero(after.history[:, 1:], "earlier steps")
    same(nnx.update_scalings(scaling), jax_grouped.update_scaling(after))


def test_update_scalings_finds_every_state_and_leaves_the_rest() -> None:
    layer = layer_of("mlp", DELAYED)
    used = cotangents(layer, rows())[1]["scaling"].get_value()
    number = jnp.arange(3)
    tree: dict[str, Any] = {"a": [used, number], "b": flax_nnx.state(layer, flax_nnx.Param)}
    found = nnx.update_scalings(tree)
    same(found["a"][0], jax_grouped.update_scaling(used))
    assert (np.asarray(found["a"][0].scale)[:, SIZES > 0] > 0).all()
    same((found["a"][1], found["b"]), (number, tree["b"]))
    unreached = jax.tree.map(jnp.zeros_like, used)
    same(nnx.update_scalings([unreached], previous=[used])[0], jax_grouped.update_scaling(unreached, previous=used))
    with asserts.refused(ValueError, ("`axis_name` of update_scaling", "'data'", "jax.shard_map")):
        nnx.update_scalings(tree, axis_name="data")


@pytest.mark.parametrize("flavour", ["nnx", "linen"])
def test_flax_serializes_a_layer_with_its_state(flavour: str) -> None:
    if flavour == "linen":
        layer = linen.GroupedLinear(G, 3, 4, recipe=DELAYED)
        fresh: Any = layer.init(jax.random.key(0), jnp.ones((2, 3)), jnp.asarray([2] + [0] * (G - 1)))
    else:
        fresh = flax_nnx.to_pure_dict(flax_nnx.state(layer_of("mlp", DELAYED)))
    used = jax.tree.map(lambda array: array + 1, fresh)
    same(serialization.from_bytes(fresh, serialization.to_bytes(used)), used)


def test_flax_refuses_a_state_of_other_names() -> None:
    state = jax_grouped.scaling_state(DELAYED, G)
    written = serialization.to_state_dict(state)
    del written["top"]
    with pytest.raises(ValueError, match=r"state of delayed scaling.*names .*expected .*'top'"):
        serialization.from_state_dict(state, written)


def test_microbatches_hand_the_state_on_and_merge_their_magnitudes() -> None:
    layer = layer_of("mlp", DELAYED)
    alone = [cotangents(layer, rows(seed))[1]["scaling"].get_value() for seed in (0, 1)]
    flax_nnx.update(layer, cotangents(layer, rows(0))[1])
    both = cotangents(layer, rows(1))[1]["scaling"].get_value()
    asserts.bitwise(both.history, jnp.maximum(alone[0].history, alone[1].history))
    assert (np.asarray(alone[0].history) != np.asarray(alone[1].history)).any()


def test_a_training_step_in_both_styles() -> None:
    """Pure functions over a split model, and the model itself with `nnx.Optimizer`: the same bits."""
    steps, x = 3, rows()
    rate = optax.sgd(1e-2, momentum=0.9)  # whose arithmetic is float32 alone

    def loss(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(apply(model, x).astype(jnp.float32) - 1))

    structure, params, scaling = flax_nnx.split(layer_of("moe", DELAYED), flax_nnx.Param, nnx.Scaling)

    @jax.jit
    def pure(params: Any, scaling: Any, moments: Any) -> Any:
        gradients, scaling = jax.grad(lambda p, s: loss(flax_nnx.merge(structure, p, s), x), argnums=(0, 1))(
            params, scaling
        )
        updates, moments = rate.update(gradients, moments, params)
        return optax.apply_updates(params, updates), nnx.update_scalings(scaling), moments

    moments = rate.init(params)
    for _ in range(steps):
        params, scaling, moments = pure(params, scaling, moments)

    model = layer_of("moe", DELAYED)
    optimizer = flax_nnx.Optimizer(model, rate, wrt=flax_nnx.Param)

    @flax_nnx.jit
    def step(model: Any, optimizer: Any) -> None:
        both = flax_nnx.DiffState(0, (flax_nnx.Param, nnx.Scaling))
        found = flax_nnx.grad(loss, argnums=both)(model, x)
        next_scaling, gradients = flax_nnx.split_state(found, nnx.Scaling, ...)
        optimizer.update(model, gradients)
        flax_nnx.update(model, nnx.update_scalings(next_scaling))

    for _ in range(steps):
        step(model, optimizer)
    same(flax_nnx.state(model, nnx.Scaling), scaling)
    same(flax_nnx.state(model, flax_nnx.Param), params)
    history = np.asarray(model.scaling.get_value().history)
    assert (history[:, 1] > 0).any(axis=1).all(), "an update rolls the history"
    assert (history[:, 0] == 0).all()


# ---- stochastic rounding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LAYERS)
def test_calls_round_differently_and_a_seed_repeats_them(kind: str) -> None:
    def twice() -> list[Any]:
        layer, x = layer_of(kind, recipes.NVFP4), rows()
        found = []
        for _ in range(2):
            found.append(cotangents(layer, x))
            apply(layer, x)  # a call moves the stream on
        return found

    first, again = twice(), twice()
    same(first, again)
    assert (np.asarray(first[0][2]) != np.asarray(first[1][2])).any(), "two calls round in the same way"


def test_layers_made_of_one_stream_have_streams_of_their_own() -> None:
    """A call moves neither that of the caller, which dropout may draw from, nor that of another layer."""
    rngs = flax_nnx.Rngs(0)
    options: dict[str, Any] = {"dtype": jnp.bfloat16, "recipe": recipes.NVFP4, "rngs": rngs}
    layers: list[Any] = [nnx.GroupedLinear(G, H, H, **options) for _ in range(2)]
    before = int(rngs.rounding.count[...])
    apply(layers[0], rows())
    assert int(rngs.rounding.count[...]) == before
    assert [int(each.rounding.count[...]) for each in layers] == [1, 0]
    streams: list[Any] = [*(layer.rounding for layer in layers), rngs.rounding]
    drawn = [np.asarray(jax.random.key_data(each())) for each in streams]
    assert len({each.tobytes() for each in drawn}) == 3


def test_keys_of_a_call_take_the_place_of_the_layers() -> None:
    layer, x, key = layer_of("mlp", recipes.NVFP4), rows(), jax.random.key(3)
    wanted = cotangents(layer, x, rngs=key)
    same(cotangents(layer, x, rngs=key), wanted)
    assert int(layer.rounding.count[...]) == 0, "the layer's stream stays where it is"
    dx = [cotangents(layer, x, rngs=each)[2] for each in (None, key, jax.random.key(4))]
    assert len({np.asarray(each).tobytes() for each in dx}) == 3

    @flax_nnx.grad(argnums=1)
    def gradient(layer: Any, x: jax.Array, rngs: Any) -> jax.Array:
        return apply(layer, x, rngs=rngs).astype(jnp.float32).sum()

    streams = flax_nnx.Rngs(0, rounding=5), flax_nnx.Rngs(rounding=5).rounding
    asserts.bitwise(*(gradient(layer, x, each) for each in streams))


@pytest.mark.rule("ERR-1")
def test_refusals() -> None:
    with asserts.refused(TypeError, ("`recipe` of GroupedMLP", "BoundRecipe", "expected a Recipe", "pass the recipe")):
        layer_of("mlp", recipes.NVFP4.bind())
    with asserts.refused(TypeError, ("`rngs` of GroupedLinear", "int", "a key of jax.random", "pass one of them")):
        apply(layer_of("linear", recipes.NVFP4), rows(), rngs=3)
    for recipe in (DELAYED, recipes.NVFP4):
        layer = layer_of("moe", None)
        layer.recipe = recipe
        with asserts.refused(ValueError, ("`recipe` of MoE", recipe.name, "that it was made with", "the constructor")):
            apply(layer, rows())
    layer = layer_of("linear", None)
    layer.kernel.set_value(jax_grouped.quantize(layer.kernel[...], "mxfp8", axis=1))
    with asserts.refused(TypeError, ("a parameter of a layer", "a QTensor", "plain weights", "ragged_dot")):
        apply(layer, rows())


@pytest.mark.rule("ERR-1")
def test_keys_of_a_call_have_the_stream_that_it_draws_from() -> None:
    """With the words of a layer that is made without the stream."""
    only = flax_nnx.Rngs(params=0)
    with asserts.refused(ValueError, ("`rngs` of GroupedLinear", "no stream `rounding`", "NVFP4", "rounding=...")):
        apply(layer_of("linear", recipes.NVFP4), rows(), rngs=only)
    for name, options in (("jitter", {"jitter": 0.1}), ("dropout", {"lora_rank": 2, "lora_dropout": 0.5})):
        layer = nnx.MoE(8, 4, 4, 2, **options, rngs=flax_nnx.Rngs(0))
        with asserts.refused(ValueError, ("`rngs` of MoE", f"no stream `{name}`", "expected one", f"{name}=...")):
            layer(jnp.ones((3, 8)), rngs=only)
