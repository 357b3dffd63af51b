"""The MoE layer in JAX: the function against a dense oracle, the layers of Flax NNX and Linen against each other."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from numpy.typing import NDArray

import jax_grouped
from jax_grouped import MXFP8, NVFP4, FP8Delayed, SharedExpert, linen, nnx, route
from jax_grouped._layer_options import CONSTRUCTORS
from tests import asserts, bounds, cases
from tests.conftest import quick_compilation
from tests.jax_frontend.jax_tools import same

T, E, K, H, F, S = 20, 8, 3, 12, 6, 10
"""S is the width of the shared expert."""


def draw(*shape: int, seed: object = 0) -> NDArray[np.float32]:
    return cases.normal(shape, "float32", "jax moe", seed)


def parameters() -> dict[str, Any]:
    shapes = {
        "router": (H, E),
        "wi": (E, H, 2 * F),
        "wo": (E, F, H),
        "shared_wi": (1, H, 2 * S),
        "shared_wo": (1, S, H),
    }
    found = {name: draw(*shape, seed=name) / np.float32(np.sqrt(shape[-2])) for name, shape in shapes.items()}
    return {name: jnp.asarray(each) for name, each in (found | {"gate": draw(H, 1, seed="gate")}).items()}


# ---- the function

OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "normalized": {"normalize": True, "aux_coeff": 0.5, "z_coeff": 0.1},
    "after_topk": {"after_topk": True, "scale": 2.0},
    "sigmoid": {"score": "sigmoid", "aux_coeff": 0.5, "z_coeff": 0.1},
    "groups": {"score": "sqrt_softplus", "num_groups": 4, "topk_groups": 2, "scale": 1.5},
}


@pytest.mark.rule("ALL-1")
@pytest.mark.parametrize("recipe", [None, MXFP8, NVFP4])
@pytest.mark.parametrize("name", ["normalized", "groups"])
def test_bits_do_not_depend_on_how_xla_optimises(name: str, recipe: Any) -> None:
    """At full optimisation LLVM contracts products and sums to FMA; the other tests run without."""
    p, x, dy = parameters(), jnp.asarray(draw(T, H, seed="x")), draw(T, H, seed="dy")

    def total(p: Any, x: Any) -> Any:
        shared = SharedExpert(p["shared_wi"], p["shared_wo"])
        options = OPTIONS[name] | ({} if recipe is None else {"recipe": recipe})
        y, aux = jax_grouped.moe(x, p["router"], p["wi"], p["wo"], K, shared=shared, **options)
        return (y * dy).sum() + aux.aux_loss + aux.z_loss, y

    def found(level: int) -> Any:
        flags: dict[str, Any] = {"xla_backend_optimization_level": level}
        if emitters in quick:
            flags[emitters] = level > 1
        run = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True), compiler_options=flags)
        (_, y), gradients = run(p, x)
        return y, gradients

    quick, emitters = quick_compilation(), "xla_cpu_use_fusion_emitters"
    jax.tree.map(asserts.bitwise, found(3), found(0 if "level=0" in quick else 1))


@pytest.mark.rule("ALL-1", "ALL-3", "LYR-9")
def test_sums_of_bfloat16_are_rounded_inside_of_jit_too() -> None:
    """XLA drops the rounding of a sum that is widened afterwards: of the shared expert, and of the gradients of x."""
    p = parameters()
    x, dy, wi, wo, of_wi, of_wo, gate = (
        jnp.asarray(each, jnp.bfloat16)
        for each in (
            *(draw(T, H, seed=name) for name in ("x", "dy")),
            *(p[name] for name in ("wi", "wo", "shared_wi", "shared_wo", "gate")),
        )
    )
    shared = SharedExpert(of_wi, of_wo, gate)

    def layer(x: Any) -> Any:
        return jax_grouped.moe(x, p["router"], wi, wo, K, shared=shared)[0]

    def widened(x: Any) -> Any:
        y, back = jax.vjp(layer, x)
        return y.astype("float32"), back(dy)[0].astype("float32")

    jax.tree.map(asserts.bitwise, jax.jit(widened)(x), widened(x))


def scores(z: Any, kind: str) -> Any:
    if kind == "softmax":
        e = jnp.exp(z - z.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)
    return 1 / (1 + jnp.exp(-z)) if kind == "sigmoid" else jnp.sqrt(jnp.log1p(jnp.exp(z)))


def swiglu(x: Any, wi: Any, wo: Any, share: Any) -> Any:
    """The sum of all experts' results [T, H], each times its share [T, E] of a token."""
    gate, up = jnp.split(jnp.einsum("th,ehf->etf", x, wi), 2, axis=2)
    return jnp.einsum("te,etf,efh->th", share, gate / (1 + jnp.exp(-gate)) * up, wo)


def dense(p: dict[str, Any], x: Any, experts: Any, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """y, auxiliary loss and z-loss, by the formulas, for a given choice of experts."""
    z = x @ p["router"]
    kind = options.get("score", "softmax")
    s = scores(z, kind)
    hot = np.asarray(experts)[:, :, None] == np.arange(E)
    if options.get("after_topk"):
        weights = scores(jnp.where(hot, z[:, None], 0).sum(axis=2), "softmax")
    else:
        weights = jnp.where(hot, s[:, None], 0).sum(axis=2)
        if options.get("normalize", kind != "softmax"):
            weights = weights / weights.sum(axis=1, keepdims=True)
    share = options.get("scale", 1.0) * jnp.where(hot, weights[:, :, None], 0).sum(axis=1)
    y = swiglu(x, p["wi"], p["wo"], share)
    y = y + swiglu(x, p["shared_wi"], p["shared_wo"], scores(x @ p["gate"], "sigmoid"))
    full = s / s.sum(axis=1, keepdims=True)
    aux = (
        options.get("aux_coeff", 0.0)
        * E
        / (K * T**2)
        * (full.sum(axis=0) * hot.sum(axis=(0, 1)).astype(np.float64)).sum()
    )
    return y, aux, options.get("z_coeff", 0.0) * (jnp.log(jnp.exp(z).sum(axis=1)) ** 2).mean()


def ours(p: dict[str, Any], x: Any, options: dict[str, Any]) -> Any:
    shared = SharedExpert(p["shared_wi"], p["shared_wo"], p["gate"])
    return jax_grouped.moe(x, p["router"], p["wi"], p["wo"], K, shared=shared, **options)


@pytest.mark.rule("LYR-1", "LYR-3", "LYR-12", "LYR-16")
@pytest.mark.parametrize("name", OPTIONS)
def test_the_layer_against_a_dense_one_hot_sum(name: str) -> None:
    """Output, losses and the gradients of tokens, router, experts, shared expert and gate."""
    p, x, dy, options = parameters(), jnp.asarray(draw(T, H, seed="x")), draw(T, H, seed="dy"), OPTIONS[name]

    def total(p: Any, x: Any) -> Any:
        y, aux = ours(p, x, options)
        return (y * dy).sum() + aux.aux_loss + aux.z_loss, (y, aux)

    (_, (y, aux)), found = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(p, x)
    logits = x @ p["router"]
    _, experts, _ = route.topk_router(logits, K, **options)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda each: jnp.asarray(np.asarray(each), jnp.float64), (p, x))

        def of_dense(p: Any, x: Any) -> Any:
            y, aux, z = dense(p, x, experts, options)
            return (y * np.asarray(dy, np.float64)).sum() + aux + z, (y, aux, z)

        of_dense = jax.jit(jax.value_and_grad(of_dense, argnums=(0, 1), has_aux=True))
        (_, (expected_y, *losses)), expected = of_dense(*wide)
    pairs = {"y": (y, expected_y), "aux": (aux.aux_loss, losses[0]), "z": (aux.z_loss, losses[1])}
    pairs |= {f"d_{each}": (found[0][each], expected[0][each]) for each in p} | {"dx": (found[1], expected[1])}
    for what, (a, e) in pairs.items():
        e = np.asarray(e, np.float64)
        asserts.within(a, bounds.Bounded(e, bounds.LAYER * np.abs(e).max(initial=0) + 0 * e, "float32"), what)


@pytest.mark.rule("LYR-12", "LYR-8")
def test_tokens_without_an_expert_still_get_the_shared_one() -> None:
    p, x = parameters(), jnp.asarray(draw(T, H, seed="x"))
    shared = SharedExpert(p["shared_wi"], p["shared_wo"])
    none = jnp.full((T, K), -1, jnp.int32)
    y, aux = jax_grouped.moe(x, p["router"], p["wi"], p["wo"], K, shared=shared, experts=none)
    alone = jax_grouped.grouped_mlp(x, p["shared_wi"], p["shared_wo"], jnp.array([T]))
    asserts.bitwise(y, alone)
    asserts.zero(aux.load)


@pytest.mark.rule("LYR-15", "OFF-7")
def test_recomputing_a_layer_has_the_same_bits() -> None:
    p, x, dy = parameters(), jnp.asarray(draw(T, H, seed="x")), jnp.asarray(draw(T, H, seed="dy"))

    def gradient(wrap: Any) -> Any:
        run = wrap(lambda p, x: ours(p, x, {"capacity_factor": 0.75})[0])
        return jax.jit(lambda p, x: jax.vjp(run, p, x)[1](dy))(p, x)

    policy = jax_grouped.checkpoint_policies.save_gemms()
    expected = gradient(lambda f: f)
    same(gradient(jax.checkpoint), expected)
    same(gradient(lambda f: jax.checkpoint(f, policy=policy)), expected)


@pytest.mark.rule("ACC-8", "LYR-3", "LYR-12")
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_layer_over_data_shards_is_the_whole_layer(check_vma: bool) -> None:
    """Tokens over the mesh, parameters replicated, losses of all shards: the gradients of the unsharded layer."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    p, x, dy = parameters(), jnp.asarray(draw(8 * T, H, seed="x")), jnp.asarray(draw(8 * T, H, seed="dy"))
    options = {"score": "sigmoid", "aux_coeff": 0.5, "z_coeff": 0.1}

    def total(p: Any, x: Any, dy: Any, axis: str | None) -> Any:
        y, aux = ours(p, x, options | {"axis_name": axis})
        of_y = (y * dy).sum()
        return (of_y if axis is None else jax.lax.psum(of_y, axis)) + aux.aux_loss + aux.z_loss

    rows, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    sharded = jax.shard_map(
        lambda p, x, dy: total(p, x, dy, "data"),
        mesh=mesh,
        in_specs=(whole, rows, rows),
        out_specs=whole,
        check_vma=check_vma,
    )
    found = jax.jit(jax.grad(sharded, (0, 1)))(p, x, dy)
    expected = jax.jit(jax.grad(lambda p, x: total(p, x, dy, None), (0, 1)))(p, x)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        wide = np.asarray(e, np.float64)
        asserts.within(a, bounds.Bounded(wide, bounds.LAYER * np.abs(wide).max() + 0 * wide, "float32"))


@pytest.mark.rule("ACC-8")
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_layer_in_shard_map_without_jit(check_vma: bool) -> None:
    """Also if x is not differentiated, where JAX evaluates the sum of copies outside of a gradient."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    p, x = parameters(), jnp.asarray(draw(8 * T, H, seed="x"))
    rows, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    layer = jax.shard_map(
        lambda p, x: ours(p, x, {})[0], mesh=mesh, in_specs=(whole, rows), out_specs=rows, check_vma=check_vma
    )
    for function in (layer, jax.grad(lambda p, x: layer(p, x).astype(jnp.float32).sum())):
        same(function(p, x), jax.jit(function)(p, x))


# ---- layers

FULL = {
    "score": "sigmoid",
    "num_groups": 4,
    "topk_groups": 2,
    "scale": 2.5,
    "capacity_factor": 1.5,
    "aux_coeff": 0.5,
    "z_coeff": 0.1,
    "selection_bias": True,
    "shared_dim": S,
    "shared_gate": True,
    "residuals": "save_input",
    "activation": "geglu_erf",
}


def pair(**options: Any) -> tuple[nnx.MoE, linen.MoE, Any]:
    """A layer of NNX, one of Linen, and the variables of the latter with the parameters of the former."""
    one, other = nnx.MoE(H, F, E, K, rngs=flax_nnx.Rngs(0), **options), linen.MoE(H, F, E, K, **options)
    variables = other.init(jax.random.key(0), jnp.zeros((1, H)))
    pure = flax_nnx.to_pure_dict(flax_nnx.state(one, flax_nnx.Param))
    assert jax.tree.structure(pure) == jax.tree.structure(variables["params"]), "the parameters have the same names"
    return one, other, {**variables, "params": pure}


@pytest.mark.rule("LYR-12", "LYR-13", "ALL-1")
@pytest.mark.parametrize("use_bias", [False, True])
def test_the_layers_of_both_kinds_have_the_same_bits(use_bias: bool) -> None:
    one, other, variables = pair(**FULL, use_bias=use_bias)
    x, dy = jnp.asarray(draw(2, 10, H, seed="x")), draw(2, 10, H, seed="dy")
    structure, params, rest = flax_nnx.split(one, flax_nnx.Param, ...)

    def of_nnx(params: Any, x: Any) -> Any:
        y, aux = flax_nnx.merge(structure, params, rest)(x)
        return (y * dy).sum() + aux.aux_loss + aux.z_loss, (y, aux)

    def of_linen(params: Any, x: Any) -> Any:
        y, aux = applied(other, {**variables, "params": params}, x)
        return (y * dy).sum() + aux.aux_loss + aux.z_loss, (y, aux)

    (_, found), (d_params, dx) = jax.jit(jax.value_and_grad(of_nnx, (0, 1), has_aux=True))(params, x)
    (_, expected), (d_variables, ex) = jax.jit(jax.value_and_grad(of_linen, (0, 1), has_aux=True))(
        variables["params"], x
    )
    same(found, expected)
    same((flax_nnx.to_pure_dict(d_params), dx), (d_variables, ex))
    assert all(np.any(np.asarray(each)) for each in jax.tree.leaves(d_variables)), "every parameter has a gradient"
    assert found[0].shape == x.shape


def applied(layer: linen.MoE, variables: Any, x: Any) -> Any:
    return layer.apply(variables, x)


def as_float32(y: Any) -> Any:
    return y.astype(jnp.float32)


def fields_of(layer: type) -> dict[str, Any]:
    return {
        each.name: each.default
        for each in dataclasses.fields(layer)
        if each.name not in ("parent", "name") and each.init
    }


@pytest.mark.rule("LYR-13")
@pytest.mark.parametrize("layer", CONSTRUCTORS)
def test_the_constructors_of_both_kinds_have_the_same_arguments(layer: str) -> None:
    fields = fields_of(getattr(linen, layer))
    assert set(fields) == set(CONSTRUCTORS[layer])
    arguments: dict[str, Any] = {}
    for each in (getattr(nnx, layer), *getattr(nnx, layer).__mro__[1:2]):
        for name, argument in list(inspect.signature(each.__init__).parameters.items())[1:]:
            if argument.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
                arguments.setdefault(name, argument.default)
    if layer != "MoE":
        assert {name for name in arguments if name != "rngs"} == set(fields)
    for name, default in fields.items():
        if isinstance(default, flax.linen.FrozenDict):
            assert dict(arguments[name]) == dict(default) == {}
        elif default is not dataclasses.MISSING:
            assert arguments[name] is default or arguments[name] == default, name


@pytest.mark.rule("LYR-4")
def test_a_selection_bias_is_no_parameter_and_moves_outside() -> None:
    layer, other, variables = pair(score="sigmoid", selection_bias=True)
    x = jnp.asarray(draw(T, H, seed="x"))
    assert "selection_bias" not in flax_nnx.to_pure_dict(flax_nnx.state(layer, flax_nnx.Param))
    _, aux = layer(x)
    expected = route.update_bias(jnp.zeros(E), aux.load, 0.01)
    layer.update_bias(aux.load, 0.01)
    assert layer.selection_bias is not None
    asserts.bitwise(layer.selection_bias[...], expected)
    push = jnp.where(jnp.arange(E) < K, 100.0, 0.0)
    layer.selection_bias[...] = push
    moved, _ = other.apply({**variables, "selection_bias": {"selection_bias": push}}, x)
    y, aux = layer(x)
    asserts.bitwise(y, moved)
    asserts.bitwise(aux.load, np.where(np.arange(E) < K, T, 0).astype(np.int32))
    with asserts.refused(ValueError, ("`axis_name` of update_bias", "'data'", "inside jax.shard_map")):
        layer.update_bias(aux.load, 0.01, axis_name="data")
    with asserts.refused(
        ValueError, ("`update_bias` of MoE", "no selection bias", "expected one", "selection_bias=True")
    ):
        nnx.MoE(H, F, E, K, rngs=flax_nnx.Rngs(0)).update_bias(aux.load, 0.01)


@pytest.mark.rule("LYR-1", "LYR-15")
def test_masks_and_replay_have_the_axes_of_the_tokens() -> None:
    layer, other, variables = pair()
    x = jnp.asarray(draw(2, 10, H, seed="x"))
    mask = jnp.arange(20).reshape(2, 10) % 4 != 1
    y, aux = layer(x, mask=mask)
    asserts.zero(y[~mask], "padding goes to no expert")
    assert int(aux.load.sum()) == K * int(mask.sum())
    _, chosen, _ = route.topk_router(
        jax_grouped.ragged_dot(x.reshape(-1, H), layer.router.kernel[...][None], jnp.array([20])), K
    )
    again, _ = layer(x, mask=mask, experts=chosen.reshape(2, 10, K))
    asserts.bitwise(again, y)
    same(
        other.apply(variables, x, mask=mask, sequence_sizes=jnp.array([10, 10])),
        layer(x, mask=mask, sequence_sizes=jnp.array([10, 10])),
    )
    balanced, of_linen, _ = pair(aux_coeff=0.5)
    runs: list[Any] = [balanced, lambda x, **given: of_linen.apply(variables, x, **given)]
    for run in runs:
        assert run(x)[1].aux_loss != run(x, sequence_sizes=jnp.array([4, 16]))[1].aux_loss
    with asserts.refused(ValueError, ("`mask` of MoE", "(20,)", "(2, 10)", "one value per token")):
        layer(x, mask=mask.reshape(-1))
    with asserts.refused(ValueError, ("`experts` of MoE", "(20, 3)", "(2, 10) and k", "k experts per token")):
        layer(x, experts=chosen)


@pytest.mark.rule("LYR-1")
def test_jitter_has_a_stream_of_its_own() -> None:
    layer, other, variables = pair(jitter=0.3)
    x = jnp.asarray(draw(T, H, seed="x"))
    first, second = layer(x)[0], layer(x)[0]
    assert np.any(np.asarray(first) != np.asarray(second)), "a new key for each call"
    key = jax.random.key(3)
    asserts.bitwise(layer(x, rngs=key)[0], layer(x, rngs=key)[0])
    one, two = (other.apply(variables, x, rngs={"jitter": jax.random.key(n)})[0] for n in (1, 2))
    assert np.any(np.asarray(one) != np.asarray(two))
    layer.eval()
    expected = linen.MoE(H, F, E, K, jitter=0.3, deterministic=True).apply(variables, x)[0]
    asserts.bitwise(layer(x)[0], expected)
    with asserts.refused(ValueError, ("`rngs` of MoE", "no stream `jitter`", "expected one", "nnx.Rngs(seed)")):
        nnx.MoE(H, F, E, K, jitter=0.3, rngs=flax_nnx.Rngs(params=0))


@pytest.mark.rule("LYR-13")
def test_logical_axes_of_linen_are_the_users_alone() -> None:
    axes = {
        "wi_metadata": {"out_sharding": ("expert", "embed", "mlp")},
        "router_metadata": {"out_sharding": ("embed", None)},
    }
    variables = linen.MoE(H, F, E, K, **axes).init(jax.random.key(0), jnp.zeros((1, H)))
    specs = flax.linen.get_partition_spec(variables)["params"]
    assert specs["wi"] == jax.sharding.PartitionSpec("expert", "embed", "mlp")
    assert specs["router"]["kernel"] == jax.sharding.PartitionSpec("embed", None)
    assert not isinstance(variables["params"]["wo"], flax.linen.LogicallyPartitioned)
    with asserts.refused(ValueError, ("metadata of MoE", "note", "out_sharding alone", "nothing else")):
        linen.MoE(H, F, E, K, wo_metadata={"note": 1}).init(jax.random.key(0), jnp.zeros((1, H)))


@pytest.mark.rule("LYR-12")
def test_delayed_scaling_in_linen_overwrites_with_the_gradient() -> None:
    """The states of experts and shared expert: their cotangents are their next values, as in NNX."""
    layer, other, variables = pair(recipe=FP8Delayed, shared_dim=S, dtype=jnp.bfloat16)
    x, dy = jnp.asarray(draw(T, H, seed="x")), draw(T, H, seed="dy")
    collection = "_overwrite_with_gradient"
    structure, params, scaling, rest = flax_nnx.split(layer, flax_nnx.Param, nnx.Scaling, ...)
    ours = jax.jit(jax.grad(lambda p, s: (as_float32(flax_nnx.merge(structure, p, s, rest)(x)[0]) * dy).sum(), (0, 1)))(
        params, scaling
    )
    theirs = jax.jit(jax.grad(lambda v: (as_float32(other.apply(v, x)[0]) * dy).sum()))(variables)
    same(flax_nnx.to_pure_dict(ours[0]), theirs["params"])
    same(flax_nnx.to_pure_dict(ours[1]), theirs[collection])
    assert set(theirs[collection]) == {"scaling", "shared"}
    amaxes = np.asarray(theirs[collection]["shared"]["scaling"].history[:, 0])
    assert np.all(amaxes > 0), "every operand of the shared expert was measured"
    new = jax.tree.map(jax_grouped.update_scaling, theirs[collection], is_leaf=lambda each: hasattr(each, "history"))
    other.apply({**variables, collection: new}, x)


@pytest.mark.rule("LYR-12")
def test_intermediates_of_linen_are_arrays() -> None:
    """A jitted function returns them, so a shared expert with a recipe may not be among them."""
    _, other, variables = pair(recipe=MXFP8, shared_dim=S, dtype=jnp.bfloat16)
    x = jnp.asarray(draw(T, H, seed="x"))
    run = jax.jit(lambda v, x: other.apply(v, x, capture_intermediates=True)[1]["intermediates"])
    assert all(isinstance(each, jax.Array) for each in jax.tree.leaves(run(variables, x)))


@pytest.mark.parametrize("layer", ["GroupedLinear", "GroupedMLP"])
def test_the_other_layers_of_linen(layer: str) -> None:
    sizes = (E, H, F)
    one, other = (
        getattr(nnx, layer)(*sizes, use_bias=True, rngs=flax_nnx.Rngs(0)),
        getattr(linen, layer)(*sizes, use_bias=True),
    )
    x, groups = jnp.asarray(draw(T, H, seed="x")), jnp.array([3, 0, 5, 1, 4, 2, 1, 2], jnp.int32)
    variables = other.init(jax.random.key(0), x, groups)
    pure = flax_nnx.to_pure_dict(flax_nnx.state(one, flax_nnx.Param))
    assert jax.tree.map(jnp.shape, pure) == jax.tree.map(jnp.shape, variables["params"])
    asserts.bitwise(other.apply({"params": pure}, x, groups), one(x, groups))
    if layer == "GroupedMLP":
        probs = jnp.asarray(np.abs(draw(T)))
        asserts.bitwise(other.apply({"params": pure}, x, groups, probs), one(x, groups, probs))
    kernel = variables["params"]["kernel" if layer == "GroupedLinear" else "wi"]
    assert 0.5 < float(kernel.std()) * np.sqrt(H) < 2, "experts do not count in the fan-in"


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"shared_gate": True}, ("`shared_gate` of MoE", "without `shared_dim`", "expected False", "pass the width")),
        ({"shared_dim": 0}, ("`shared_dim` of MoE", "0", "1 or more", "size")),
        ({"capacity_factor": -1.0}, ("`capacity_factor` of topk_router", "-1.0", "above 0", "1.25")),
        ({"num_groups": 3, "topk_groups": 1}, ("`num_groups` of topk_router", "3", "divisor of 8", "choose")),
        ({"residuals": "some"}, ("`residuals`", "'some'", "save_fc1", "choose")),
    ],
)
def test_refusals_of_both_kinds(options: dict[str, Any], fragments: tuple[str, ...]) -> None:
    with asserts.refused(ValueError, fragments):
        nnx.MoE(H, F, E, K, rngs=flax_nnx.Rngs(0), **options)
    with asserts.refused(ValueError, fragments):
        linen.MoE(H, F, E, K, **options).init(jax.random.key(0), jnp.zeros((2, H)))


@pytest.mark.rule("LYR-13")
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=lambda k: k.name)
def test_a_shared_expert_takes_no_sharding_along_its_one_group(kind: Any) -> None:
    axes = {
        "wi_metadata": {"out_sharding": ("expert", None, None)},
        "wo_metadata": {"out_sharding": ("expert", None, None)},
        "router_metadata": {"out_sharding": (None, "expert")},
    }
    zeros = jax.nn.initializers.zeros  # draws over a mesh compile for seconds
    options: dict[str, Any] = {"shared_dim": S, "shared_gate": True, "kernel_init": zeros, "router_init": zeros, **axes}
    with jax.set_mesh(jax.make_mesh((2,), ("expert",), axis_types=(kind,), devices=jax.devices()[:2])):
        layer = nnx.MoE(H, F, E, K, rngs=flax_nnx.Rngs(0), **options)
        assert not layer.wi[...].sharding.is_fully_replicated
        assert layer.shared is not None
        for alone in (layer.shared.wi, layer.shared.wo, layer.shared.gate):
            assert alone is not None
            assert alone[...].sharding.is_fully_replicated
    init = linen.MoE(H, F, E, K, **options).init
    specs = flax.linen.get_partition_spec(jax.eval_shape(init, jax.random.key(0), jnp.zeros((1, H))))
    assert specs["params"]["wi"][0] == "expert"
    assert specs["params"]["shared"]["wi"] == jax.sharding.PartitionSpec(None, None, None)
    assert specs["params"]["shared"]["gate"] == jax.sharding.PartitionSpec(None, None)


@pytest.mark.rule("ERR-1", "ERR-5")
@pytest.mark.parametrize(
    ("gate", "kind", "fragments"),
    [
        (jnp.zeros((H + 1, 1)), ValueError, (f"({H + 1}, 1)", f"[H, 1] with H = {H}")),
        (jnp.zeros((H, 1), jnp.int32), TypeError, ("int32", "float32, bfloat16, float16", "cast")),
    ],
)
def test_gates_of_a_shared_expert_are_checked(gate: Any, kind: Any, fragments: tuple[str, ...]) -> None:
    shared = SharedExpert(jnp.zeros((1, H, 2 * F)), jnp.zeros((1, F, H)), gate)
    given = (jnp.zeros((T, H)), jnp.zeros((H, E)), jnp.zeros((E, H, 2 * F)), jnp.zeros((E, F, H)))
    with asserts.refused(kind, ("`shared.gate`", *fragments)):
        jax_grouped.moe(*given, K, shared=shared)


@pytest.mark.rule("ERR-1")
def test_names_of_axes_are_text() -> None:
    name: Any = 3
    fragments = ("`axis_name` of MoE", "3", "a name or a tuple of names", "name axes")
    with asserts.refused(TypeError, fragments):
        nnx.MoE(H, F, E, K, rngs=flax_nnx.Rngs(0), axis_name=name)
    with asserts.refused(TypeError, fragments):
        linen.MoE(H, F, E, K, axis_name=name).init(jax.random.key(0), jnp.zeros((2, H)))


@pytest.mark.rule("ERR-1")
def test_a_keyword_that_no_part_of_a_layer_has_is_named() -> None:
    options: Any = {"use_bias": True, "lora_rank": 2, "foo": 1}
    with asserts.refused(
        TypeError, ("`foo` of MoE", "expected no such keyword", "activation", "lora_rank", "use_bias")
    ):
        nnx.MoE(H, F, E, K, rngs=flax_nnx.Rngs(0), **options)


@pytest.mark.rule("ERR-1")
def test_a_router_of_another_width_and_unknown_keywords_are_named() -> None:
    x, router, wi, wo = (jnp.asarray(draw(*shape)) for shape in ((3, H), (H, E), (E, H, 2 * F), (E, F, H)))
    with asserts.refused(ValueError, ("`router` of moe", f"({H - 1}, {E})", f"[H, E] with H = {H}", "one column")):
        jax_grouped.moe(x, router[1:], wi, wo, K)
    unknown: Any = {"foo": 1}
    with asserts.refused(TypeError, ("`foo` of moe", "expected no such keyword", "score", "activation")):
        jax_grouped.moe(x, router, wi, wo, K, **unknown)


@pytest.mark.rule("ERR-1", "LYR-12")
def test_a_shared_expert_is_one() -> None:
    x, router, wi, wo = (jnp.asarray(draw(*shape)) for shape in ((3, H), (H, E), (E, H, 2 * F), (E, F, H)))
    with asserts.refused(ValueError, ("`shared.wo` of moe", f"{E} experts", "expected 1", "pass several")):
        jax_grouped.moe(x, router, wi, wo, K, shared=jax_grouped.SharedExpert(wi, wo))
