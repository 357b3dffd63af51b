"""Adapters of the layers of Flax NNX and of Linen, and accumulators of adapters of the MLP."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as flax_linen
from flax import nnx as flax_nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from grouped_core import recipes
from jax_grouped import _layer_options, grouped_mlp, linen, nnx, parallel, quantize, routed_mlp
from jax_grouped.accumulate import StackedRef
from tests import asserts, bounds
from tests.bounds import Bounded
from tests.jax_frontend.jax_tools import optimised, same
from tests.jax_frontend.lora_layer_tools import (
    ARGUMENTS,
    KINDS,
    LAYERS,
    PARTS,
    PROBS,
    ROWS,
    SCALING,
    SIZES,
    F,
    G,
    H,
    R,
    X,
    build,
    built,
    function,
    loss,
    made,
)
from tests.jax_frontend.parallel_tools import EXPERT, mesh_of

every_kind = pytest.mark.parametrize("kind", KINDS)
every_layer = pytest.mark.parametrize("form", LAYERS)

# ---- what is computed and trained ------------------------------------------------------------------------------------


@pytest.mark.rule("LOR-1", "LOR-4")
@every_layer
@every_kind
def test_layers_call_the_functions_under_jit_too(kind: str, form: str):
    layer = built(kind, form)
    expected = function(layer)
    asserts.bitwise(layer(), expected)
    asserts.bitwise(jax.jit(layer.__call__)(layer.factors), expected)
    found = jax.jit(jax.grad(lambda factors: loss(layer(factors))))(layer.factors)
    same(found, jax.grad(lambda factors: loss(function(layer, factors)))(layer.factors))
    if form != "MoE":  # there every expert may have a token
        for each in jax.tree.leaves(found):
            asserts.zero(np.asarray(each)[1], "an empty group")


@pytest.mark.rule("LOR-1", "LOR-4")
@every_layer
def test_both_kinds_give_the_same_bits(form: str):
    one, two = built("nnx", form), built("linen", form)
    asserts.bitwise(one.apply(one.params, one.factors, X), two.apply(one.params, one.factors, X))


@pytest.mark.rule("LOR-1")
@every_layer
@every_kind
def test_a_new_layer_computes_what_its_weights_do(kind: str, form: str):
    layer = built(kind, form, zero=True)
    base = built(kind, form, lora_rank=None, lora_alpha=None)
    assert sorted(layer.params) == sorted(base.params), "names of weights do not change"
    for name in PARTS[form]:
        a, b = (np.asarray(layer.factors[f"{name}_{part}"], np.float32) for part in "ab")
        limit = a.shape[1] ** -0.5
        assert 0.8 * limit < np.abs(a).max() <= limit
        asserts.zero(b)
    asserts.bitwise(layer(), base.apply(layer.params, {}, X))


@pytest.mark.rule("LOR-2", "LOR-4")
@every_layer
@every_kind
def test_weights_have_no_gradient_and_a_router_has(kind: str, form: str):
    layer = built(kind, form)
    found = jax.grad(lambda params: loss(layer.apply(params, layer.factors, X)))(layer.params)
    frozen = [name for name in found if name != "router"]
    assert frozen
    for name in frozen:
        asserts.zero(np.asarray(found[name]), name)
    if form == "MoE":
        assert np.any(np.asarray(found["router"]["kernel"]) != 0)


@pytest.mark.rule("LOR-2", "LOR-4")
def test_nnx_differentiates_adapters_alone():
    module = built("nnx", "GroupedMLP").module
    named = dict(module.__dict__)
    wanted = [f"{name}_{part}" for name in PARTS["GroupedMLP"] for part in "ab"]
    assert all(type(named[each]) is flax_nnx.LoRAParam for each in wanted)

    def of(layer: Any) -> Any:
        return loss(layer(X, SIZES, PROBS))

    found = flax_nnx.to_pure_dict(flax_nnx.grad(of, argnums=flax_nnx.DiffState(0, flax_nnx.LoRAParam))(module))
    layer = built("nnx", "GroupedMLP")
    same(found, jax.grad(lambda factors: loss(layer(factors)))(layer.factors))


@pytest.mark.rule("LOR-2", "LOR-4")
@every_kind
def test_no_weight_gradient_of_the_base_is_launched(kind: str):
    layer = built(kind, "GroupedMLP")
    program = str(jax.make_jaxpr(jax.grad(lambda factors: loss(layer(factors))))(layer.factors))
    assert program.count("name='low_rank_grads'") == 2, "B of both weights"
    assert program.count("('contract_rows', 1)") == 2, "A of both weights"


# ---- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.rule("LOR-1")
@every_layer
@every_kind
def test_elements_are_dropped_in_training_alone(kind: str, form: str):
    layer, plain = built(kind, form, lora_dropout=0.25), built(kind, form)
    key, other = jax.random.key(3), jax.random.key(4)
    asserts.bitwise(layer(key=key, training=False), plain())
    asserts.bitwise(built(kind, form, lora_dropout=0.25, deterministic=True)(training=False), plain())
    first = layer(key=key)
    asserts.bitwise(layer(key=key), first)
    asserts.bitwise(jax.jit(lambda key: layer(key=key))(key), first)
    assert np.any(np.asarray(layer(key=other)) != np.asarray(first))
    assert np.any(np.asarray(plain()) != np.asarray(first))


@pytest.mark.rule("LOR-1")
def test_nnx_layers_have_a_stream_of_their_own():
    rngs = flax_nnx.Rngs(0, dropout=5)
    module: Any = nnx.GroupedLinear(G, H, F, lora_rank=R, lora_dropout=0.5, param_dtype=jnp.bfloat16, rngs=rngs)
    module.lora_b[...] = made(G, R, F, seed=3)
    first, second = module(X, SIZES), module(X, SIZES)
    assert np.any(np.asarray(first) != np.asarray(second))
    assert int(module.dropout.count[...]) == 2
    module.eval()
    asserts.bitwise(module(X, SIZES), module(X, SIZES))
    assert int(module.dropout.count[...]) == 2, "nothing is drawn where nothing is dropped"
    module.train()
    assert np.any(np.asarray(module(X, SIZES)) != np.asarray(first))


@pytest.mark.rule("LOR-1")
def test_views_have_a_mode_of_their_own():
    """`nnx.view` finds the layers' mode, as it finds that of Flax's dropout."""
    rngs = flax_nnx.Rngs(0)
    module: Any = flax_nnx.Sequential(
        flax_nnx.Dropout(0.5, rngs=rngs), nnx.MoE(H, F, G, 2, jitter=0.5, lora_rank=R, lora_dropout=0.5, rngs=rngs)
    )
    quiet: Any = flax_nnx.view(module, deterministic=True)
    x = made(12, H, seed=1).astype(jnp.float32)
    asserts.bitwise(quiet(x)[0], quiet(x)[0])
    assert [each.deterministic for each in (*quiet.layers, *module.layers)] == [True, True, False, False]
    assert flax_nnx.view(quiet, deterministic=False).layers[1].deterministic is False


@pytest.mark.rule("LOR-1")
def test_one_key_for_a_whole_layer_serves_its_parts_with_different_keys(monkeypatch: pytest.MonkeyPatch):
    options: dict[str, Any] = {"recipe": recipes.NVFP4, "jitter": 0.5, "shared_dim": H, "lora_dropout": 0.5}
    layer, taken = nnx.MoE(H, F, G, 2, lora_rank=R, rngs=flax_nnx.Rngs(0), param_dtype=X.dtype, **options), {}

    def function(x: Any, *_: Any, **given: Any) -> tuple[Any, None]:
        taken.update(given)
        return x, None

    monkeypatch.setattr(_layer_options, "function_of", lambda _: function)
    layer(X, rngs=jax.random.key(3))
    keys = [taken["recipe"].key, taken["shared"].recipe.key, taken["key"], taken["lora_key"]]
    assert len({tuple(each.tolist()) for each in keys}) == len(keys)


@pytest.mark.rule("LOR-1", "ERR-1")
def test_linen_layers_need_keys_of_dropout():
    with pytest.raises(Exception, match="dropout"):
        built("linen", "GroupedLinear", lora_dropout=0.5)()


# ---- merging ---------------------------------------------------------------------------------------------------------


def _merged(kind: str, layer: Any) -> dict[str, Any]:
    """The weights with the adapters added."""
    if kind == "linen":
        found = linen.merge(layer.definition, {"params": layer.params, "lora": layer.factors, "other": {"x": X}})
        assert sorted(found) == ["other", "params"]
        return found["params"]
    layer.module.merge()
    assert not flax_nnx.state(layer.module, flax_nnx.LoRAParam)
    return flax_nnx.to_pure_dict(flax_nnx.state(layer.module, flax_nnx.Param))


@pytest.mark.rule("LOR-5")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every_layer
@every_kind
def test_merged_weights_are_rounded_once(kind: str, form: str, dtype: str):
    """The sum of r products is float32; the norm of the difference is that of a few roundings."""
    layer = build(kind, form, param_dtype=dtype, dtype=dtype, **({} if form == "MoE" else {"use_bias": False}))
    before = np.asarray(layer(), np.float64)
    weights = _merged(kind, layer)
    for name in PARTS[form]:
        weight = "kernel" if name == "lora" else name.removesuffix("_lora")
        w, a, b = (
            np.asarray(each, np.float64)
            for each in (layer.params[weight], layer.factors[f"{name}_a"], layer.factors[f"{name}_b"])
        )
        exact, size = w + SCALING * a @ b, np.abs(w) + SCALING * np.abs(a) @ np.abs(b)
        limit = bounds.half_ulp(np.abs(exact), dtype) + 2.0**-20 * size
        asserts.within(np.asarray(weights[weight]), Bounded(exact, limit, dtype), weight)
    base = built(kind, form, lora_rank=None, lora_alpha=None, param_dtype=dtype, dtype=dtype, use_bias=False)
    after = np.asarray(base.apply(weights, {}, X), np.float64)
    assert np.linalg.norm(after - before) < bounds.MERGED[dtype] * np.linalg.norm(before)
    if kind == "nnx":
        extra = {"GroupedLinear": (SIZES,), "GroupedMLP": (SIZES, PROBS), "MoE": ()}[form]
        own = layer.module(X, *extra)
        asserts.bitwise(own[0] if form == "MoE" else own, base.apply(weights, {}, X))


@pytest.mark.rule("LOR-5")
def test_merged_weights_of_linen_keep_the_names_of_their_axes():
    names = ("expert", "embed", "mlp")
    layer = linen.GroupedLinear(G, H, F, lora_rank=R, param_dtype=X.dtype, kernel_metadata={"out_sharding": names})
    variables: Any = layer.init(jax.random.key(0), X, SIZES)
    assert linen.merge(layer, variables)["params"]["kernel"].names == variables["params"]["kernel"].names == names


@pytest.mark.rule("LOR-5")
@every_kind
def test_adapters_that_are_wider_than_the_weight_are_not_rounded_first(kind: str):
    """A bfloat16 weight and float32 adapters, as some trainers keep them; sums are of few terms, so float32 is exact
    enough to decide every rounding here."""
    layer = build(kind, "GroupedLinear")
    a, b = (made(*layer.factors[f"lora_{part}"].shape, seed=at, dtype=jnp.float32) for at, part in enumerate("ab"))
    factors = {"lora_a": a, "lora_b": b}
    if kind == "nnx":
        for name, value in factors.items():
            getattr(layer.module, name).set_value(value)
    found = _merged(kind, layer._replace(factors=factors))["kernel"]
    w, a, b = (np.asarray(each, np.float64) for each in (layer.params["kernel"], a, b))
    exact = w + SCALING * a @ b
    assert found.dtype == jnp.bfloat16
    asserts.bitwise(found, exact.astype(np.float32).astype(jnp.bfloat16))


@pytest.mark.rule("LOR-5", "LYR-12")
@every_kind
def test_a_shared_expert_has_adapters_and_is_merged_too(kind: str):
    layer = build(kind, "MoE", shared_dim=F, shared_gate=True)
    of_shared = layer.factors["shared"]
    assert {name: each.shape for name, each in of_shared.items()} == {
        "wi_lora_a": (1, H, R),
        "wi_lora_b": (1, R, 2 * F),
        "wo_lora_a": (1, F, R),
        "wo_lora_b": (1, R, H),
    }
    found = jax.grad(lambda factors: loss(layer(factors)))(layer.factors)
    assert all(np.any(np.asarray(each) != 0) for each in jax.tree.leaves(found["shared"]))
    before = np.asarray(layer(), np.float64)
    weights = _merged(kind, layer)
    assert np.any(np.asarray(weights["shared"]["wi"]) != np.asarray(layer.params["shared"]["wi"]))
    base = built(kind, "MoE", shared_dim=F, shared_gate=True, lora_rank=None, lora_alpha=None)
    after = np.asarray(base.apply(weights, {}, X), np.float64)
    assert np.linalg.norm(after - before) < bounds.MERGED["bfloat16"] * np.linalg.norm(before)


@pytest.mark.rule("LOR-5")
@every_layer
@every_kind
def test_stacked_layers_are_merged_as_each_alone(kind: str, form: str):
    """A scan over layers has their weights and adapters on one more axis."""
    layer, definition = build(kind, form), build("linen", form).definition

    def two(each: Any) -> Any:
        return jnp.stack([each, -each / 2])

    weights, factors = (jax.tree.map(two, each) for each in (layer.params, layer.factors))
    if kind == "linen":
        found = linen.merge(definition, {"params": weights, "lora": factors})["params"]
    else:
        flax_nnx.update(layer.module, jax.tree.map(two, flax_nnx.state(layer.module, flax_nnx.Param)))
        found = _merged(kind, layer)
    for at in range(2):
        one = jax.tree.map(lambda each, at=at: each[at], {"params": weights, "lora": factors, "found": found})
        same(one["found"], linen.merge(definition, one)["params"])
        same(one["found"], linen.merge(definition, jax.tree.map(np.asarray, one))["params"])


def _spread(kind: str, layer: Any, mesh: Any, spec: P, of_adapters: P) -> Any:
    """`layer` over a mesh: its experts as `spec`, their adapters as `of_adapters`, everything else whole."""

    def put(path: Any, array: Any) -> Any:
        name = jax.tree_util.keystr(path)
        where = P() if "w" not in name or "shared" in name else of_adapters if "lora" in name else spec
        return jax.device_put(np.asarray(array), NamedSharding(mesh, where))

    if kind == "linen":
        params, factors = (jax.tree_util.tree_map_with_path(put, each) for each in (layer.params, layer.factors))
        return layer._replace(params=params, factors=factors, definition=layer.definition.clone(mesh_axes=EXPERT))
    layer.module.mesh_axes = EXPERT
    state = flax_nnx.state(layer.module, flax_nnx.Param)
    flax_nnx.update(layer.module, jax.tree_util.tree_map_with_path(put, state))
    return layer


@pytest.mark.rule("LOR-5", "LYR-9")
@pytest.mark.matrix(
    kind=KINDS,
    mesh_kind=(AxisType.Auto, AxisType.Explicit),
    jitted=(True, False),
    of_adapters=(P("expert"), P()),
    shared=(F, None),
)
def test_layers_over_a_mesh_are_merged_where_their_experts_are(
    kind: str, mesh_kind: AxisType, jitted: bool, of_adapters: P, shared: int | None
):
    """With the bits of one device. No weight moves, and a shared expert stays whole."""
    expected = _merged(kind, build(kind, "MoE", shared_dim=shared))
    mesh = mesh_of(mesh_kind, data=2, expert=G)
    layer = _spread(kind, build(kind, "MoE", shared_dim=shared), mesh, P("expert"), of_adapters)
    with jax.set_mesh(mesh):
        if kind == "linen":
            merge = partial(linen.merge, layer.definition)
            variables = {"params": layer.params, "lora": layer.factors}
            found = (jax.jit(merge) if jitted else merge)(variables)["params"]
        else:
            (flax_nnx.jit(lambda module: module.merge()) if jitted else nnx.MoE.merge)(layer.module)
            found = flax_nnx.to_pure_dict(flax_nnx.state(layer.module, flax_nnx.Param))
    same(found, expected)
    for name in ("wi", "wo"):
        where = NamedSharding(mesh, P("expert"))
        assert found[name].sharding.is_equivalent_to(where, 3), found[name].sharding
        assert shared is None or found["shared"][name].sharding.is_fully_replicated


@pytest.mark.rule("LOR-5", "LYR-9")
@pytest.mark.parametrize("mesh_kind", [AxisType.Auto, AxisType.Explicit])
def test_merging_over_a_mesh_gathers_nothing(mesh_kind: AxisType):
    mesh = mesh_of(mesh_kind, expert=G)
    layer = _spread("linen", build("linen", "MoE"), mesh, P("expert"), P("expert"))
    with jax.set_mesh(mesh):
        merge = jax.jit(partial(linen.merge, layer.definition))
        text = optimised(merge.lower({"params": layer.params, "lora": layer.factors}))
    assert not any(word in text for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))


@pytest.mark.rule("LOR-5", "LYR-9")
@pytest.mark.parametrize("mesh_kind", [AxisType.Auto, AxisType.Explicit])
def test_whole_weights_stay_whole_beside_split_adapters(mesh_kind: AxisType):
    """As after training a layer whose weights nothing has split: gradients of adapters are split by experts."""
    mesh = mesh_of(mesh_kind, expert=G)
    layer = _spread("nnx", build("nnx", "MoE"), mesh, P(), P("expert"))
    found = _merged("nnx", layer)
    same(found, _merged("nnx", build("nnx", "MoE")))
    assert found["wi"].sharding.is_fully_replicated


@pytest.mark.rule("LOR-5", "ERR-1")
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_split_otherwise_are_not_merged(kind: str):
    mesh = mesh_of(data=2, expert=G)
    layer = _spread(kind, build(kind, "MoE"), mesh, P("expert", None, "data"), P())
    words = ["sharded as", "'data'", "expected an array whose groups alone are split", "reshard it first"]
    with asserts.refused(ValueError, ["`wi` of " + ("merge" if kind == "linen" else "MoE.merge"), *words]):
        _merged(kind, layer)
    layer = build("nnx", "MoE")
    layer.module.mesh_axes = parallel.MeshAxes(expert="expert", tensor="data")
    words = ["`wi` of MoE.merge", "tensor axis 'data'", "experts alone are split", "without that axis"]
    with jax.set_mesh(mesh), asserts.refused(ValueError, words):
        flax_nnx.jit(lambda module: module.merge())(layer.module)


@pytest.mark.rule("LOR-5", "ERR-1")
@pytest.mark.parametrize("form", ["GroupedMLP", "MoE"])
def test_a_refused_merge_changes_nothing(form: str):
    """The last weight that is merged is refused: `wo`, of a MoE that of its shared expert."""
    layer = build("nnx", form, **({"shared_dim": F} if form == "MoE" else {}))
    wo = layer.module.shared.wo if form == "MoE" else layer.module.wo
    whole = wo[...]
    before = flax_nnx.to_pure_dict(flax_nnx.state(layer.module, flax_nnx.Param))
    wo.set_value(jax.device_put(whole, NamedSharding(mesh_of(expert=2), P(None, "expert"))))
    with asserts.refused(ValueError, ["`wo` of", "expected an array whose groups alone are split", "reshard it"]):
        layer.module.merge()
    wo.set_value(whole)
    same(flax_nnx.to_pure_dict(flax_nnx.state(layer.module, flax_nnx.Param)), before)
    extra = (SIZES, PROBS) if form == "GroupedMLP" else ()
    y = layer.module(X, *extra)
    asserts.bitwise(y[0] if form == "MoE" else y, layer())
    assert "wi_lora_a" not in _merged("nnx", layer)


@pytest.mark.rule("LOR-5", "ERR-1")
def test_adapters_are_merged_by_their_own_options_alone():
    layer = build("linen", "GroupedMLP")
    variables = {"params": layer.params, "lora": layer.factors}
    bad = (
        (layer.definition.clone(lora_rank=None, lora_alpha=None), ValueError, ["`layer` of merge", "no `lora_rank`"]),
        (
            layer.definition.clone(lora_rank=2),
            ValueError,
            ["`wi_lora_a` of merge", f"rank {R}", "expected 2", "scales"],
        ),
        (flax_linen.Dense(2), TypeError, ["`layer` of merge", "Dense", "expected a GroupedLinear", "pass the layer"]),
    )
    for other, kind, words in bad:
        with asserts.refused(kind, words):
            linen.merge(other, variables)
    with asserts.refused(TypeError, ["`variables` of merge", "NoneType", "collections by name", "pass those"]):
        linen.merge(layer.definition, None)
    with asserts.refused(ValueError, ["`variables` of merge", "no collection `params`", "expected one", "weights"]):
        linen.merge(layer.definition, {"lora": layer.factors})


@pytest.mark.rule("LOR-5")
def test_what_other_modules_keep_beside_adapters_stays():
    layer = build("linen", "GroupedMLP")
    own = {"down": X, "head_a": X, "head_b": X}
    variables = {"params": {"experts": layer.params, "attn": {"kernel": X}}, "lora": {"experts": layer.factors}}
    expected = linen.merge(layer.definition, variables)
    assert set(expected) == {"params"}
    found = linen.merge(layer.definition, {**variables, "lora": {"experts": {**layer.factors, **own}, "attn": own}})
    same(found["params"], expected["params"])
    same(found["lora"], {"experts": own, "attn": own})


@pytest.mark.rule("LOR-5", "ERR-2")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lora": {"wi_lora_a": None}}, ["`wi_lora_b` of merge", "no `wi_lora_a` beside it", "expected both"]),
        ({"lora": {"wo_lora_b": None}}, ["`wo_lora_a` of merge", "no `wo_lora_b` beside it", "whole adapter"]),
        ({"params": {"wi": None}}, ["`wi_lora_a` of merge", "no weight `wi` beside it", "pass the weights"]),
        ({"params": {"wi": (G + 1, H, 2 * F)}}, ["`wi` of merge", "A of shape", "expected [G, K, r]", "in front of K"]),
        (
            {"params": {"wo": (G, F, H + 1)}},
            ["`wo` of merge", "B of shape", "beside a weight of shape", "pass adapters"],
        ),
        ({"params": {"wo": (F, H)}}, ["`wo` of merge", "expected [G, K, N]"]),
        (
            {"lora": dict.fromkeys(("wi_lora_a", "wi_lora_b", "wo_lora_a", "wo_lora_b"))},
            ["no adapter", "expected that"],
        ),
    ],
)
def test_adapters_that_do_not_fit_are_not_merged(change: dict[str, dict[str, Any]], words: list[str]):
    layer = build("linen", "GroupedMLP")
    variables = {"params": dict(layer.params), "lora": dict(layer.factors)}
    for collection, entries in change.items():
        for name, shape in entries.items():
            if shape is None:
                del variables[collection][name]
            else:
                variables[collection][name] = jnp.zeros(shape)
    with asserts.refused(ValueError, words):
        linen.merge(layer.definition, variables)


@pytest.mark.rule("LOR-5", "ERR-2")
def test_a_weight_that_became_quantised_is_not_merged():
    layer = build("linen", "GroupedMLP")
    codes = quantize(layer.params["wi"], "mxfp8", axis=1)
    with asserts.refused(TypeError, ["`wi` of merge", "quantised values", "expected an array", "dequantised"]):
        linen.merge(layer.definition, {"params": {**layer.params, "wi": codes}, "lora": layer.factors})


@pytest.mark.rule("LOR-5", "ERR-1")
@pytest.mark.parametrize("form", LAYERS)
def test_layers_without_adapters_are_not_merged(form: str):
    module = build("nnx", form).module
    module.merge()
    with asserts.refused(ValueError, ["`merge` of", "no adapter", "expected one", "`lora_rank`"]):
        module.merge()
    layer = build("linen", form)
    with asserts.refused(ValueError, ["`variables` of merge", "no collection `lora`", "expected one", "`lora_rank`"]):
        linen.merge(layer.definition, {"params": layer.params})


# ---- options ---------------------------------------------------------------------------------------------------------


def make(kind: str, form: str, **options: Any) -> Any:
    if kind == "nnx":
        return getattr(nnx, form)(*ARGUMENTS[form], **options, rngs=flax_nnx.Rngs(0))
    extra = () if form == "MoE" else (SIZES,)
    return getattr(linen, form)(*ARGUMENTS[form], **options).init(jax.random.key(0), X, *extra)


@pytest.mark.rule("LOR-1", "ERR-1")
@pytest.mark.parametrize(
    ("options", "kind_of_error", "fragments"),
    [
        ({"lora_rank": 0}, ValueError, ["`lora_rank` of {form}", "0", "1 to 256", "choose"]),
        ({"lora_rank": 2.0}, TypeError, ["`lora_rank` of {form}", "2.0", "an integer or None", "pass a rank"]),
        (
            {"lora_rank": 2, "lora_alpha": "2"},
            ValueError,
            ["`lora_alpha` of {form}", "'2'", "finite number", "the rank"],
        ),
        ({"lora_alpha": 2.0}, ValueError, ["`lora_alpha`", "of {form}", "without `lora_rank`", "pass a rank"]),
        ({"lora_rank": 2, "lora_dropout": 1.0}, ValueError, ["`lora_dropout`", "1.0", "0 to 1", "pass a rate"]),
    ],
)
@every_layer
@every_kind
def test_options_out_of_range_are_refused(kind, form, options, kind_of_error, fragments):
    with asserts.refused(kind_of_error, [each.format(form=form) for each in fragments]):
        make(kind, form, **options)


@pytest.mark.rule("LYR-9", "LOR-1")
@every_kind
def test_adapters_are_spread_with_their_experts(kind: str):
    """A layer with the axes of a mesh of one device gives the bits of the layer without."""
    layer = build(kind, "MoE")
    mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        spread = build(kind, "MoE", mesh_axes=parallel.MeshAxes(expert="expert"))
        asserts.bitwise(spread(), layer())


# ---- accumulators of the MLP -----------------------------------------------------------------------------------------

WEIGHTS = made(G, H, 2 * F, seed=1), made(G, F, H, seed=2)
LORA = (made(G, H, R, seed=3), made(G, R, 2 * F, seed=4)), (made(G, F, R, seed=5), made(G, R, H, seed=6))
EXPERTS = jnp.array(np.random.default_rng(0).integers(0, G, (ROWS, 2)), jnp.int32)


def run(lora: Any, tokens: bool, **options: Any) -> Any:
    options = {"lora": lora, "lora_scaling": SCALING, **options}
    if tokens:
        return loss(routed_mlp(X, EXPERTS, jnp.stack([PROBS, PROBS], 1), *WEIGHTS, **options))
    return loss(grouped_mlp(X, *WEIGHTS, SIZES, probs=PROBS, **options))


def zeros_like(lora: Any, fill: float) -> Any:
    return jax.tree.map(lambda each: jnp.full(each.shape, fill, jnp.float32), lora)


def close(found: Any, exact: Any, start: float) -> None:
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        wide = np.asarray(two, np.float32)
        np.testing.assert_allclose(
            np.asarray(one) - start, wide, rtol=bounds.ADDED[0], atol=bounds.ADDED[1] * max(1.0, np.abs(wide).max())
        )


@pytest.mark.rule("LOR-4", "ACC-1")
@pytest.mark.parametrize("tokens", [False, True])
def test_sinks_get_the_sums_as_their_cotangents(tokens: bool):
    exact = jax.grad(run)(LORA, tokens)
    grads, sums = jax.jit(
        jax.grad(lambda lora, sinks: run(lora, tokens, lora_wgrad_accum=sinks), (0, 1)),
    )(LORA, zeros_like(LORA, 0.5))
    for each in jax.tree.leaves(grads):
        asserts.zero(np.asarray(each))
    close(sums, exact, 0.5)
    if not tokens:
        for each in jax.tree.leaves(sums):
            asserts.filled(np.asarray(each)[1], 0.5, "an empty group")


@pytest.mark.rule("LOR-4", "ACC-2")
@pytest.mark.parametrize("tokens", [False, True])
def test_refs_are_updated_in_place(tokens: bool):
    exact = jax.grad(run)(LORA, tokens)
    stacked = jax.new_ref(jnp.zeros((2, G, H, R), jnp.float32))
    of_b, of_a2 = (jax.new_ref(jnp.zeros(each.shape, jnp.float32)) for each in (LORA[0][1], LORA[1][0]))
    refs = ((StackedRef(stacked, 1), of_b), (of_a2, None))

    def of(last: Any) -> Any:
        return run((LORA[0], (LORA[1][0], last)), tokens, lora_wgrad_accum=refs)

    last = jax.jit(jax.grad(of))(LORA[1][1])
    asserts.bitwise(last, exact[1][1])
    asserts.zero(np.asarray(stacked[0]))
    close((stacked[1], of_b[...], of_a2[...]), (exact[0][0], exact[0][1], exact[1][0]), 0.0)


@pytest.mark.rule("LOR-4", "ACC-4")
def test_accumulators_that_do_not_fit_are_refused():
    sinks = zeros_like(LORA, 0.0)
    with asserts.refused(ValueError, ["`lora_wgrad_accum[0]`", "not differentiated", "expected both", "jax.Ref"]):
        jax.grad(lambda lora: run(lora, False, lora_wgrad_accum=sinks))(LORA)
    with asserts.refused(ValueError, ["`lora_wgrad_accum[1]`", "(3, 4, 16)", "(3, 8, 4)", "allocate"]):
        run(LORA, False, lora_wgrad_accum=((None, None), (sinks[0][1], None)))
    with asserts.refused(ValueError, ["`lora_wgrad_accum[0]`", "expected None, or a pair"]):
        run(LORA, False, lora_wgrad_accum=(1, None))


@pytest.mark.rule("LOR-1", "LOR-4")
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))])
def test_programs_give_the_same_bits(wrap: Any, tokens: bool):
    wrapped = wrap(lambda lora: run(lora, tokens))
    same(jax.grad(wrapped)(LORA), jax.grad(run)(LORA, tokens))


@pytest.mark.rule("LOR-2", "LOR-4", "ACC-7", "ALL-4")
@pytest.mark.parametrize(
    ("live", "wanted"),
    [
        ((0, 1, 2, 3), "x h u1 u2 w2 b1 a2 b2"),
        ((2, 3), "z u2 b2"),
        ((3,), "u2"),
        ((2,), "z b2"),
        ((0, 1), "x h u1 w2 b1 a2 b2"),
    ],
)
def test_nothing_is_saved_for_frozen_parts(live: tuple[int, ...], wanted: str):
    shapes = {"x": (ROWS, H), "h": (ROWS, 2 * F), "z": (ROWS, F), "u1": (ROWS, R), "u2": (ROWS, R)}
    shapes |= {"w2": WEIGHTS[1].shape, "b1": LORA[0][1].shape, "a2": LORA[1][0].shape, "b2": LORA[1][1].shape}
    flat = [*LORA[0], *LORA[1]]

    def of(*some: Any) -> Any:
        now = list(flat)
        for at, each in zip(live, some, strict=True):
            now[at] = each
        return grouped_mlp(X, *WEIGHTS, SIZES, lora=(tuple(now[:2]), tuple(now[2:])), lora_scaling=SCALING)

    _, pull = jax.vjp(of, *(flat[at] for at in live))
    saved = sorted(each.shape for each in jax.tree.leaves(pull) if getattr(each, "ndim", 0) > 1)
    assert saved == sorted(shapes[each] for each in wanted.split())
