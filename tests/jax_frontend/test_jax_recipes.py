"""Recipes under JAX's machinery: states that backward does not reach, meshes, masters, parts of quantised arrays."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_grouped
from grouped_core import recipes
from grouped_core.scaling import ScalingState
from jax_grouped import accumulate, linen, nnx
from tests import asserts
from tests.jax_frontend.jax_tools import same
from tests.quantized import with_e4m3_gradients

SIZES = np.asarray([30, 0, 35], np.int32)
G, M, K, N = len(SIZES), 70, 64, 96
KEY = jnp.asarray([3, 5], jnp.uint32)
DELAYED = recipes.FP8Delayed.replace(history=3)


def normal(*shape: int, seed: int = 0, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def step(state: ScalingState[Any], x: jax.Array, reached: Any) -> ScalingState[Any]:
    """The cotangent of a state whose operation is skipped where not `reached`."""
    w = normal(G, K, N, seed=1)

    def loss(state: ScalingState[Any]) -> jax.Array:
        def product(x: jax.Array) -> jax.Array:
            return jax_grouped.ragged_dot(x, w, SIZES, recipe=DELAYED.bind(state))

        y = jax.lax.cond(reached, product, lambda x: jnp.zeros((M, N), x.dtype), x)
        return (y.astype(jnp.float32) ** 2).sum()

    return jax.grad(loss)(state)


@pytest.mark.rule("ALL-1")
def test_a_state_that_backward_does_not_reach_goes_on_as_it_is():
    x, first = normal(M, K), jax_grouped.scaling_state(DELAYED, G)
    state = jax_grouped.update_scaling(jax.jit(step)(first, x, True), previous=first)
    assert (np.asarray(state.scale) > 0).any()
    skipped = jax_grouped.update_scaling(jax.jit(step)(state, x, False), previous=state)
    same(skipped, state)
    same(
        jax_grouped.update_scaling(step(state, x, True), previous=state),
        jax_grouped.update_scaling(step(state, x, True)),
    )


def test_states_stay_float32_with_64_bit_numbers():
    x, state = normal(M, K), jax_grouped.scaling_state(DELAYED, G)
    wanted = jax_grouped.update_scaling(step(state, x, True))
    with jax.enable_x64(True):
        found, _ = jax.lax.scan(
            lambda state, x: (jax_grouped.update_scaling(step(state, x, True)), None), state, x[None]
        )
    same(found, wanted)


def test_a_state_of_zeros_is_a_fresh_one():
    x, w, fresh = normal(M, K), normal(G, K, N, seed=1), jax_grouped.scaling_state(DELAYED, G)
    lost = jax_grouped.update_scaling(step(fresh, x, False))
    assert not np.asarray(lost.scale).any()

    def run(state: Any) -> Any:
        y, back = jax.vjp(lambda x, state: jax_grouped.ragged_dot(x, w, SIZES, recipe=DELAYED.bind(state)), x, state)
        return y, back(jnp.ones_like(y))

    same(run(lost), run(fresh))
    mlp = partial(jax_grouped.grouped_mlp, x, normal(G, K, 2 * N, seed=2), normal(G, N, K, seed=3), SIZES)
    lost, fresh = (jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), state) for state in (lost, fresh))
    same(mlp(recipe=DELAYED.bind(lost)), mlp(recipe=DELAYED.bind(fresh)))


def test_states_of_layers_that_are_skipped_go_on_as_they_are():
    state = jax_grouped.scaling_state(DELAYED, G)
    tree = {
        "reached": step(state, normal(M, K), True),
        "skipped": jax.tree.map(jnp.zeros_like, state),
        "step": jnp.ones(()),
    }
    new = nnx.update_scalings(tree, previous={"reached": state, "skipped": state, "step": jnp.zeros(())})
    same(new["skipped"], state)
    same(new["reached"], jax_grouped.update_scaling(tree["reached"]))
    asserts.bitwise(new["step"], tree["step"])


def test_states_that_are_stacked_are_updated_as_each_is():
    each = [
        step(jax_grouped.scaling_state(DELAYED, G), normal(M, K, seed=seed) * (seed + 1), True) for seed in range(3)
    ]
    stacked: Any = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    expected: Any = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(jax_grouped.update_scaling, each))
    same(jax_grouped.update_scaling(stacked), expected)
    same(jax.jit(jax_grouped.update_scaling)(stacked), expected)


def test_a_state_that_a_checkpoint_gives_back_is_as_good():
    x, w, state = normal(M, K), normal(G, K, N, seed=1), jax_grouped.scaling_state(DELAYED, G)
    held: Any = jax.tree.map(np.asarray, state)

    def loss(x: Any, state: Any) -> jax.Array:
        return jax_grouped.ragged_dot(x, w, SIZES, recipe=DELAYED.bind(state)).astype(jnp.float32).sum()

    expected = jax.grad(loss, argnums=(0, 1))(x, state)
    same(jax.grad(loss, argnums=(0, 1))(x, held), expected)
    same(jax.jit(jax.grad(lambda x: loss(x, held)))(x), expected[0])


def test_a_state_of_other_formats_becomes_one_of_the_recipe():
    """The values that amaxes are scaled to belong to the recipe; the history serves all."""
    narrow = with_e4m3_gradients(DELAYED)
    x, w = normal(M, K), normal(G, K, N, seed=1)

    def run(state: Any, recipe: Any = narrow) -> Any:
        y, back = jax.vjp(lambda x, state: jax_grouped.ragged_dot(x, w, SIZES, recipe=recipe.bind(state)), x, state)
        return y, back(jnp.ones_like(y))

    _, (_, reached) = run(jax_grouped.scaling_state(DELAYED, G), DELAYED)
    state, fresh = jax_grouped.update_scaling(reached), jax_grouped.scaling_state(narrow, G)
    assert np.asarray(state.scale).any(1).all(), "all roles have started"
    own = ScalingState(state.scale * (fresh.top / state.top)[:, None], state.history, fresh.top, state.algorithm)
    same(run(state), run(own))
    same(jax.jit(run)(state), run(own))


def test_a_bound_recipe_is_rebuilt_with_any_leaves():
    """Flax makes tables of arguments in this way, with an object in place of each None too."""
    for bound in (recipes.NVFP4.bind(key=KEY), DELAYED.bind(jax_grouped.scaling_state(DELAYED, G))):
        ones: Any = jax.tree.map(lambda leaf: 1, bound, is_leaf=lambda leaf: leaf is None)
        assert ones.recipe is bound.recipe
        assert ones.key == 1
    same(jax.tree.map(lambda leaf: leaf, bound), bound)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(recipes.NVFP4.bind(key=KEY))]
    assert paths == [".key"]
    layer = linen.MoE(K, 32, G, 2, shared_dim=32, recipe=recipes.NVFP4)
    keys = {name: jax.random.key(at) for at, name in enumerate(("params", "rounding"))}
    assert "router" in layer.tabulate(keys, normal(M, K, dtype=jnp.float32))


def test_a_recipe_is_a_static_argument():
    """As one that is bound may be an argument, or be part of a tree of parameters."""
    x, w = normal(M, K), normal(G, K, N)
    wanted = jax_grouped.ragged_dot(x, w, SIZES, recipe=recipes.FP8Block)
    same(jax.checkpoint(jax_grouped.ragged_dot)(x, w, SIZES, recipe=recipes.FP8Block), wanted)
    expert = jax_grouped.SharedExpert(w[:1, :, :64], w[:1, :32, :64], None, recipes.FP8Block)
    assert len(jax.tree.leaves(expert)) == 2
    assert jax.jit(lambda given: given)(expert).recipe is recipes.FP8Block


def test_what_is_no_state_is_refused():
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), jax_grouped.scaling_state(DELAYED, G))
    with asserts.refused(ValueError, ["`scale` of a state", "bfloat16", "expected float32", "cast"]):
        jax_grouped.update_scaling(rounded)
    bound = DELAYED.bind(jax_grouped.scaling_state(DELAYED, G))
    for top, words in ((jnp.ones(3, jnp.bfloat16), "bfloat16[3]"), (jnp.ones(6), "the 3 roles")):
        other = ScalingState(bound.state.scale, bound.state.history, top, bound.state.algorithm)
        with asserts.refused(ValueError, ["`top` of a state", words, "expected"]):
            jax_grouped.update_scaling(other)
    with asserts.refused(TypeError, ["`state`:", "BoundRecipe", "a ScalingState", "scaling_state"]):
        jax_grouped.update_scaling(bound)
    with asserts.refused(TypeError, ["`recipe`:", "str", "a Recipe", "pass one"]):
        jax_grouped.scaling_state("FP8Delayed", G)
    with asserts.refused(TypeError, ["`num_groups`:", "float", "an integer", "pass"]):
        jax_grouped.scaling_state(DELAYED, 3.0)
    with asserts.refused(ValueError, ["`products`:", "0", "1", "pass"]):
        jax_grouped.scaling_state(DELAYED, G, products=0)
    others = {
        "scale (3, 1)": jax_grouped.scaling_state(DELAYED, 1),
        "history (3, 8, ": jax_grouped.scaling_state(DELAYED.replace(history=8), G),
        "'most_recent'": jax_grouped.scaling_state(DELAYED.replace(amax_algorithm="most_recent"), G),
        "scale (2, 3, ": jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), bound.state),
    }
    for came, previous in others.items():
        with asserts.refused(ValueError, ["`previous` of update_scaling", came, "expected", "is the gradient of"]):
            jax_grouped.update_scaling(bound.state, previous=previous)
    recent = DELAYED.replace(amax_algorithm="most_recent")
    with asserts.refused(ValueError, ["`state` of recipe", "'max'", "'most_recent'", "scaling_state"]):
        jax_grouped.ragged_dot(normal(M, K), normal(G, K, N), SIZES, recipe=recent.bind(bound.state))


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        *(("linear", None), ("linear", "FP8Delayed"), ("mlp", "MXFP8")),
        # Eagerly, each primitive of these is a program of its own; those above have all operations and recipes.
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("linear", "MXFP8"), ("mlp", None), ("mlp", "FP8Delayed"))
        ),
    ],
)
def test_shard_map_needs_no_jit_around_it(operation: str, name: str | None):
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    recipe: Any = None if name is None else getattr(recipes, name)
    if name == "FP8Delayed":
        recipe = recipe.bind(jax_grouped.scaling_state(recipe, G, products=1 + (operation == "mlp")))
    x, wi, wo = normal(2 * M, K), normal(G, K, 2 * N, seed=1), normal(G, N, K, seed=2)

    def product(x: jax.Array) -> jax.Array:
        if operation == "linear":
            return jax_grouped.ragged_dot(x, wi, SIZES, recipe=recipe)
        return jax_grouped.grouped_mlp(x, wi, wo, SIZES, recipe=recipe)

    mapped = jax.shard_map(product, mesh=mesh, in_specs=P("data"), out_specs=P("data"))

    def loss(x: jax.Array) -> jax.Array:
        return (mapped(x).astype(jnp.float32) ** 2).sum()

    same((mapped(x), jax.grad(loss)(x)), (jax.jit(mapped)(x), jax.jit(jax.grad(loss))(x)))


@pytest.mark.rule("QNT-8")
def test_a_quantised_weight_goes_into_shard_map_and_out_of_it():
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("expert",))
    split = partial(jax.shard_map, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    w, x, sizes = normal(4, K, N), normal(4, 16, K, seed=1), jnp.asarray([[5], [16], [0], [7]], jnp.int32)
    q = jax_grouped.quantize(w, "fp8_128x128", axis=(1, 2))

    def product(x: jax.Array, sizes: jax.Array, w: Any) -> jax.Array:
        return jax_grouped.ragged_dot(x[0], w, sizes[0], recipe=recipes.FP8Block)[None]

    expected = jnp.stack([product(x[at : at + 1], sizes[at : at + 1], w[at : at + 1])[0] for at in range(4)])
    asserts.bitwise(jax.jit(split(product))(x, sizes, q), expected)
    inside = jax.jit(split(partial(jax_grouped.quantize, format="fp8_128x128", axis=(1, 2))))(w)
    assert inside.shape == inside.other.shape == w.shape
    same(inside, q)
    whole = jax.device_put(inside, jax.devices()[0])  # gathered by the caller: sharded operands are refused
    asserts.bitwise(jax_grouped.dequantize(whole), jax_grouped.dequantize(q))
    part: Any = jax.tree.map(lambda array: array[:2], q)
    assert (part.shape, part.other.shape) == ((2, K, N), (2, K, N))
    rows = jax_grouped.quantize(normal(M, K), "mxfp8", group_sizes=SIZES)
    assert jax.tree.map(lambda array: array[:10], rows).shape == (10, K)


@pytest.mark.rule("QNT-8", "MAT-6")
@pytest.mark.parametrize("accumulates", [False, True])
def test_each_master_gets_a_gradient_of_its_own_dtype(accumulates: bool):
    x, wi, wo = normal(M, K), normal(G, K, 2 * N, seed=1), normal(G, N, K, seed=2)
    first, second = (jax_grouped.quantize(w, "fp8_128x128", axis=(1, 2)) for w in (wi, wo))

    def loss(wi: Any, wo: Any, **options: Any) -> jax.Array:
        y = jax_grouped.grouped_mlp(x, wi, wo, SIZES, recipe=recipes.FP8Block, **options)
        return (y.astype(jnp.float32) ** 2).sum()

    def masters(wi: jax.Array, wo: jax.Array, **options: Any) -> jax.Array:
        return loss(jax_grouped.straight_through(wi, first), jax_grouped.straight_through(wo, second), **options)

    wide_wi, wide_wo = wi.astype(jnp.float32), wo.astype(jnp.float32)
    expected = jax.grad(masters, argnums=(0, 1))(wide_wi, wide_wo)
    if accumulates:
        into = jnp.zeros(wi.shape, jnp.float32)
        found = jax.grad(lambda into, wo: masters(wi, wo, wgrad_accum=(into, None)), argnums=(0, 1))(into, wide_wo)
        same(found, expected)
        return
    dwi, dwo = jax.grad(masters, argnums=(0, 1))(wi, wide_wo)
    same((dwi, dwo), (expected[0].astype(jnp.bfloat16), expected[1]))
    plain, master = jax.grad(lambda wi, wo: loss(wi, jax_grouped.straight_through(wo, second)), argnums=(0, 1))(
        wi, wide_wo
    )
    assert (plain.dtype, master.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.rule("ALL-4", "ERR-2")
def test_a_quantised_weight_without_a_master_has_no_gradient():
    x, bias = normal(M, K), normal(G, N, dtype=jnp.float32)
    q = jax_grouped.quantize(normal(G, K, N), "mxfp8", axis=1)
    rows = jax_grouped.quantize(x, "mxfp8", group_sizes=SIZES)

    def loss(params: Any, x: Any) -> jax.Array:
        y = jax_grouped.ragged_dot(x, params["q"], SIZES, bias=params["bias"], recipe=recipes.MXFP8)
        return (y.astype(jnp.float32) ** 2).sum()

    def calls(program: Any, *arguments: Any) -> list[str]:
        return sorted(re.findall(r"Call\(name='(\w+)'", str(jax.make_jaxpr(program)(*arguments))))

    params = {"q": q, "bias": bias}
    alone = calls(jax.grad(lambda bias: loss({"q": q, "bias": bias}, x)), bias)
    assert calls(jax.grad(partial(loss, x=x), allow_int=True), params) == alone
    assert jax.grad(partial(loss, x=rows), allow_int=True)(params)["bias"].shape == bias.shape
    wi, wo = (
        jax_grouped.quantize(normal(G, K, 2 * N), "mxfp8", axis=1),
        jax_grouped.quantize(normal(G, N, K), "mxfp8", axis=1),
    )

    def mlp(params: Any) -> jax.Array:
        wi, wo = params["w"]
        y = jax_grouped.grouped_mlp(rows, wi, wo, SIZES, wo_bias=params["bias"], recipe=recipes.MXFP8)
        return y.astype(jnp.float32).sum()

    wide_bias = normal(G, K, dtype=jnp.float32)
    assert calls(jax.grad(mlp, allow_int=True), {"w": (wi, wo), "bias": wide_bias}) == calls(
        jax.grad(lambda bias: mlp({"w": (wi, wo), "bias": bias})), wide_bias
    )


@pytest.mark.rule("MLP-13")
def test_both_forms_of_rows_come_from_one_pass_with_a_rotation_along_rows():
    recipe = recipes.NVFP4.bind(key=KEY)
    x, w, dy = (
        normal(M, K, dtype=jnp.float32),
        normal(G, K, N, dtype=jnp.float32),
        normal(M, N, dtype=jnp.float32, seed=4),
    )
    q = jax_grouped.quantize(x, recipes.NVFP4.wgrad[0], axis=(1, 0), group_sizes=SIZES)
    assert not q.format.rotate
    assert q.other is not None
    assert q.other.format.rotate

    def dw(x: Any) -> jax.Array:
        return jax.vjp(lambda w: jax_grouped.ragged_dot(x, w, SIZES, recipe=recipe), w)[1](dy)[0]

    asserts.bitwise(dw(q), dw(x))
    with_both = jax_grouped.quantize(x, recipes.NVFP4.wgrad[0], axis=(0, 1), group_sizes=SIZES)
    asserts.bitwise(jax_grouped.dequantize(with_both), jax_grouped.dequantize(q))
    lenient = recipes.NVFP4.replace(requantize="from_dequantized").bind(key=KEY)
    wi, wo = normal(G, K, 2 * N, dtype=jnp.float32), normal(G, N, K, dtype=jnp.float32)
    _, res = accumulate.grouped_mlp_fwd(x, wi, wo, SIZES, recipe=lenient)
    alone = jax_grouped.quantize(
        normal(M, K, dtype=jnp.float32), recipes.NVFP4.wgrad[1], axis=0, group_sizes=SIZES, key=KEY
    )
    with asserts.refused(ValueError, ["quantised rows", "rotated nvfp4", "not rotated", "pass the form"]):
        accumulate.grouped_mlp_bwd_dx(res, alone)


@pytest.mark.rule("MLP-13")
def test_a_gradient_that_comes_quantised_is_read_unrotated_in_either_order():
    recipe, fmt = recipes.NVFP4.bind(key=KEY), recipes.NVFP4.wgrad[1]
    x, wi, wo, dy = (normal(*shape, seed=3, dtype=jnp.float32) for shape in ((M, K), (G, K, 2 * N), (G, N, K), (M, K)))
    bias = jnp.ones((G, K), jnp.float32)
    _, res = accumulate.grouped_mlp_fwd(x, wi, wo, SIZES, wo_bias=bias, recipe=recipe)
    first, second = (
        accumulate.grouped_mlp_bwd_dx(res, jax_grouped.quantize(dy, fmt, axis=axis, group_sizes=SIZES, key=KEY))
        for axis in ((1, 0), (0, 1))
    )
    same(first[:4], second[:4])
    straight = jax_grouped.quantize(dy, recipes.NVFP4.dgrad[0], group_sizes=SIZES, key=KEY)
    values = jax_grouped.dequantize(straight)
    asserts.bitwise(first[3], accumulate.grouped_mlp_bwd_dx(res, values)[3], "what the bias reads")


@pytest.mark.parametrize(
    "recipe", [getattr(recipes, name) for name in ("FP8Delayed", "FP8Block", "NVFP4")], ids=lambda r: r.name
)
def test_an_eager_step_moves_nothing_from_the_host(recipe: Any):
    state = jax_grouped.scaling_state(recipe, G) if recipe.delayed else None
    bound = recipe.bind(state, KEY if recipe.stochastic else None)
    x, w, sizes, dy = normal(M, K), normal(G, K, N, seed=1), jnp.asarray(SIZES), normal(M, N, seed=2)
    with jax.transfer_guard("disallow"):
        _, back = jax.vjp(lambda x, w: jax_grouped.ragged_dot(x, w, sizes, recipe=bound), x, w)
        back(dy)
        jax_grouped.quantize(x, "mxfp8")


@pytest.mark.rule("ERR-1", "QNT-8")
def test_a_master_has_floats() -> None:
    q = jax_grouped.quantize(jnp.ones((1, 32, 32)), "mxfp8", axis=1)
    with asserts.refused(TypeError, ["`master`", "int32", "floats, which have a gradient", "cast it"]):
        jax_grouped.straight_through(jnp.ones((1, 32, 32), jnp.int32), q)
    with jax.enable_x64(True), asserts.refused(TypeError, ["`master`", "float64", "at most 32 bits", "cast it"]):
        jax_grouped.straight_through(jnp.ones((1, 32, 32), jnp.float64), q)
