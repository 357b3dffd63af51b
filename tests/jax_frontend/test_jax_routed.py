"""`routed_mlp` in JAX: a dense oracle, the bits of its parts, what it keeps for backward, and where that waits."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import checkpoint_policies as jax_policies
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

import jax_grouped
from grouped_core.mlp_spec import POLICIES
from jax_grouped import (
    MXFP8,
    NVFP4,
    FP8Block,
    FP8Current,
    FP8Delayed,
    Residuals,
    checkpoint_policies,
    grouped_mlp,
    route,
    routed_mlp,
)
from tests import asserts, bounds, cases
from tests.jax_frontend.jax_tools import optimised, same

T, G, K, H, F = 24, 6, 3, 10, 7
NAMES = ("x", "weights", "wi", "wo", "wi_bias", "wo_bias")


def draw(*shape: int, seed: object = 0) -> NDArray[np.float32]:
    return cases.normal(shape, "float32", "jax routed", seed)


def problem(
    tokens: int = T, slots: int = K, hidden: int = H, width: int = F, dtype: str = "float32", groups: int = G
) -> tuple[dict[str, Any], Any, Any]:
    """Operands by name, experts, and the gradient of y."""
    given = {
        "x": draw(tokens, hidden, seed="x"),
        "weights": np.abs(draw(tokens, slots, seed="w")),
        "wi": draw(groups, hidden, 2 * width, seed="wi"),
        "wo": draw(groups, width, hidden, seed="wo"),
        "wi_bias": draw(groups, 2 * width, seed="b1"),
        "wo_bias": draw(groups, hidden, seed="b2"),
    }
    experts = np.argsort(draw(tokens, groups, seed="experts"), axis=1)[:, :slots].astype(np.int32)
    dtypes = {"weights": "float32"}
    arrays = {name: jnp.asarray(each.astype(dtypes.get(name, dtype))) for name, each in given.items()}
    return arrays, jnp.asarray(experts), jnp.asarray(draw(tokens, hidden, seed="dy").astype(dtype))


def call(a: dict[str, Any], experts: Any, **options: Any) -> Any:
    return routed_mlp(
        a["x"], experts, a["weights"], a["wi"], a["wo"], wi_bias=a["wi_bias"], wo_bias=a["wo_bias"], **options
    )


def in_parts(a: dict[str, Any], experts: Any, max_rows: int | None = None, **options: Any) -> Any:
    """The same from rows that are kept."""
    of_rows: dict[str, Any] = {"probs": a["weights"], "max_rows": max_rows}
    rows, sizes, permutation = route.permute(a["x"], experts, a["wo"].shape[0], **of_rows)
    biases = {"wi_bias": a["wi_bias"], "wo_bias": a["wo_bias"]}
    y = grouped_mlp(rows, a["wi"], a["wo"], sizes, probs=permutation.probs, **biases, **options)
    return route.unpermute(y, permutation)


def dense(a: dict[str, Any], experts: Any) -> Any:
    """Each expert on every token, times what the token gives it."""
    gate, up = jnp.split(jnp.einsum("th,ehf->etf", a["x"], a["wi"]) + a["wi_bias"][:, None], 2, axis=2)
    hot = np.asarray(experts)[:, :, None] == np.arange(G)
    share = jnp.where(hot, a["weights"][:, :, None], 0).sum(axis=1)
    act = gate / (1 + jnp.exp(-gate)) * up
    return jnp.einsum("te,etf,efh->th", share, act, a["wo"]) + share @ a["wo_bias"]


def relative(found: Any, expected: Any, what: str) -> None:
    wide = np.asarray(expected, np.float64)
    asserts.within(found, bounds.Bounded(wide, bounds.LAYER * np.abs(wide).max(initial=0) + 0 * wide, "float32"), what)


def chosen(kind: str, experts: Any) -> Any:
    if kind == "one":
        return jnp.zeros((T, 1), jnp.int32) + 3
    if kind == "dropped":
        return jnp.where(
            jnp.arange(T)[:, None] % 3 == jnp.arange(K)[None], jnp.array([[-1, G, 2**31 - 1]], jnp.int32), experts
        )
    if kind == "empty":  # two experts without tokens
        return jnp.where(experts >= G - 2, -1, experts)
    return experts


@pytest.mark.rule("LYR-16", "MLP-1", "GRP-6")
@pytest.mark.parametrize("kind", ["plain", "one", "dropped", "empty", "all"])
def test_tokens_against_a_dense_one_hot_sum(kind: str) -> None:
    a, experts, dy = problem(slots={"one": 1, "all": G}.get(kind, K))
    experts = chosen(kind, experts)
    y, pull = jax.vjp(jax.jit(lambda a: call(a, experts)), a)
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(np.asarray(each), jnp.float64) for name, each in a.items()}
        expected, of_dense = jax.vjp(jax.jit(lambda a: dense(a, experts)), wide)
        (gradients,) = of_dense(jnp.asarray(np.asarray(dy), jnp.float64))
    relative(y, expected, "y")
    for name, found in pull(dy)[0].items():
        relative(found, gradients[name], name)
    if kind == "empty":
        asserts.zero(pull(dy)[0]["wi"][G - 2 :], "weight gradients of experts without tokens")


RECIPES = {recipe.name: recipe for recipe in (FP8Block, MXFP8, FP8Current, NVFP4)}


@pytest.mark.rule("LYR-16", "MLP-2")
@pytest.mark.matrix(policy=POLICIES, recipe=("none", *RECIPES), room=(None, 40, 1000))
def test_the_bits_are_those_of_rows(policy: str, recipe: str, room: int | None) -> None:
    """Also where some of the 72 slots have no room."""
    quantized = recipe != "none"
    a, experts, dy = problem(hidden=128, width=128, dtype="bfloat16") if quantized else problem(dtype="bfloat16")
    options = {"residuals": policy, "recipe": RECIPES.get(recipe), "max_rows": room}
    found, pull = jax.vjp(jax.jit(lambda a: call(a, experts, **options)), a)
    expected, of_parts = jax.vjp(jax.jit(lambda a: in_parts(a, experts, **options)), a)
    asserts.bitwise(found, expected, "y")
    same(pull(dy), of_parts(dy))


@pytest.mark.rule("LYR-16")
def test_a_state_of_delayed_scaling_moves_as_with_rows() -> None:
    a, experts, dy = problem(hidden=32, width=32, dtype="bfloat16")
    state = jax_grouped.scaling_state(FP8Delayed, G, products=2)
    for _ in range(2):
        found, expected = (
            jax.vjp(jax.jit(lambda a, s, f=f: f(a, experts, recipe=FP8Delayed.bind(s))), a, state)
            for f in (call, in_parts)
        )
        asserts.bitwise(found[0], expected[0], "y")
        same(found[1](dy), expected[1](dy))
        state = jax_grouped.update_scaling(found[1](dy)[1])


@pytest.mark.rule("MAT-3", "GRD-1")
def test_a_first_weight_in_halves_has_the_same_bits() -> None:
    a, experts, dy = problem()
    halves = a | {"wi": tuple(jnp.split(a["wi"], 2, axis=2))}
    y, pull = jax.vjp(lambda a: call(a, experts), a)
    other, of_halves = jax.vjp(lambda a: call(a, experts), halves)
    asserts.bitwise(other, y)
    one, two = pull(dy)[0], of_halves(dy)[0]
    same(two | {"wi": jnp.concatenate(two["wi"], axis=2)}, one)


@pytest.mark.rule("ACC-1", "ACC-2", "ACC-3", "ACC-4")
@pytest.mark.parametrize("form", ["sink", "ref"])
def test_accumulators(form: str) -> None:
    a, experts, dy = problem(dtype="bfloat16")
    start = tuple(jnp.ones(a[name].shape, jnp.float32) for name in ("wi", "wo"))
    plain = jax.vjp(lambda wi, wo: call(a | {"wi": wi, "wo": wo}, experts, wgrad_dtype="float32"), a["wi"], a["wo"])[1]
    expected = [1 + each for each in plain(dy)]

    def run(wi: Any, wo: Any, accum: Any) -> Any:
        return call(a | {"wi": wi, "wo": wo}, experts, wgrad_accum=accum)

    if form == "sink":
        found = jax.vjp(run, a["wi"], a["wo"], start)[1](dy)[2]
    else:
        refs = tuple(map(jax.new_ref, start))
        jax.vjp(lambda wi, wo: run(wi, wo, refs), a["wi"], a["wo"])[1](dy)
        found = [ref[...] for ref in refs]
    for one, other in zip(found, expected, strict=True):
        relative(one, other, "accumulator")


# ---- what is kept


def kept(function: Any, *primals: Any) -> list[Any]:
    """Arrays that the pullback holds."""
    return [each for each in jax.tree.leaves(jax.vjp(function, *primals)[1]) if hasattr(each, "shape")]


@pytest.mark.rule("LYR-16", "MLP-9", "MLP-11")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("recipe", [None, FP8Block, FP8Current], ids=str)
def test_tokens_are_kept_and_not_their_rows(policy: str, recipe: Any) -> None:
    """x [T, H] once; of rows only hidden and activated ones, as the policy says, and vectors of integers."""
    tokens, slots, hidden, width = 40, 3, 128, 256
    a, experts, _ = problem(tokens, slots, hidden, width, "bfloat16")
    arrays = kept(lambda a: call(a, experts, residuals=policy, recipe=recipe), a)
    rows = tokens * slots
    assert not [each for each in arrays if each.ndim == 2 and set(each.shape) >= {rows, hidden}], "rows of x"
    matrices = [each for each in arrays if each.ndim == 2 and tokens in each.shape and hidden in each.shape]
    assert [(each.shape, each.dtype.name) for each in matrices] == [((tokens, hidden), "bfloat16")], "tokens"
    of_h = [each for each in arrays if each.shape == (rows, 2 * width)]
    assert len(of_h) == (policy != "save_input")
    vectors = sum(each.nbytes for each in arrays if each.ndim <= 2 and each.dtype == jnp.int32)
    assert vectors <= 4 * (2 * rows + G) + 64, "source, inverse and sizes"


@pytest.mark.rule("LYR-17", "QNT-8")
@pytest.mark.parametrize("recipe", [FP8Block, MXFP8, None], ids=["FP8Block", "MXFP8", "no_recipe"])
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_may_be_quantised(policy: str, recipe: Any) -> None:
    """The bits of a recipe that quantises them, with a gradient for their master; a recipe is not needed."""
    a, experts, dy = problem(hidden=64, width=32, dtype="bfloat16")

    def result(quantised: bool) -> Any:
        def run(a: dict[str, Any]) -> Any:
            x = a["x"]
            if quantised:
                x = jax_grouped.straight_through(
                    x, jax_grouped.quantize(x, "mxfp8" if recipe is MXFP8 else "fp8_1x128")
                )
            return call(a | {"x": x}, experts, recipe=recipe, residuals=policy)

        return jax.jit(lambda a: jax.vjp(run, a))(a)

    (y, pull), (expected, expected_pull) = result(True), result(False)
    found, wanted = pull(dy)[0], expected_pull(dy)[0]
    assert set(found) == set(wanted)
    for what, e, f in (("y", expected, y), *((name, wanted[name], found[name]) for name in wanted)):
        if recipe is None:
            assert f.dtype == e.dtype
            assert np.linalg.norm(np.asarray(f - e)) <= bounds.RING_CODES * np.linalg.norm(np.asarray(e)), what
        else:  # scales are powers of two, so the gradient of wi has the same bits as well
            asserts.bitwise(f, e, what)


@pytest.mark.rule("LYR-17", "ERR-1")
def test_tokens_quantised_otherwise_are_refused() -> None:
    a, experts, _ = problem()
    for format, axis in (("fp8_tensor", 1), ("mxfp8", 0), ("nvfp4", 1)):
        x = jax_grouped.quantize(jnp.ones((T, 64)), format, axis=axis)
        with asserts.refused(ValueError, ("`x` of routed_mlp", format, f"axis {axis}", "single rows", "mxfp8")):
            call(a | {"x": x}, experts)


@pytest.mark.rule("MLP-11", "ALL-4", "ACC-7")
def test_what_no_gradient_reads_is_not_kept() -> None:
    a, experts, dy = problem(dtype="bfloat16")
    frozen = kept(lambda x, weights: call(a | {"x": x, "weights": weights}, experts), a["x"], a["weights"])
    assert not [each for each in frozen if each.shape == (T, H)], "x without a gradient of wi"
    of_bias = kept(lambda b: call(a | {"wo_bias": b}, experts), a["wo_bias"])
    assert not [each for each in of_bias if each.ndim == 2 and each.dtype == jnp.bfloat16], "only b2"
    constant = jax.make_jaxpr(lambda a: call(a, experts))(a)
    assert "combine_dot" not in str(constant)
    text = str(jax.make_jaxpr(lambda w, dy: jax.vjp(lambda w: call(a | {"wi": w}, experts), w)[1](dy))(a["wi"], dy))
    assert text.count("name='combine_rows'") == 1, "only forward sums rows where x needs no gradient"


@pytest.mark.rule("LYR-1", "LYR-16")
def test_the_layer_keeps_no_fp32_copy_for_its_router() -> None:
    a, _, _ = problem(40, 3, 32, 20, "bfloat16")
    router = jnp.asarray(draw(32, G, seed="router"), "bfloat16")
    arrays = kept(lambda x, r, wi, wo: jax_grouped.moe(x, r, wi, wo, 2)[0], a["x"], router, a["wi"], a["wo"])
    tokens = [each.dtype.name for each in arrays if each.shape == (40, 32)]
    assert set(tokens) == {"bfloat16"}, tokens
    assert not [each for each in arrays if each.shape == (80, 32)]


# ---- names, policies, host memory


def in_backward(function: Any, policy: Any, *primals: Any) -> str:
    """The calls of the gradient of a rematerialised function, after what nothing reads is removed."""
    jaxpr = jax.make_jaxpr(jax.grad(lambda *p: jax.checkpoint(function, policy=policy)(*p).astype(jnp.float32).sum()))
    return str(jaxpr(*primals))


@pytest.mark.rule("OFF-7", "OFF-8")
def test_policies_spare_what_they_save() -> None:
    a, experts, _ = problem(dtype="bfloat16")

    def run(x: Any) -> Any:
        return call(a | {"x": jnp.sin(x)}, experts)

    def products(policy: Any) -> int:
        return in_backward(run, policy, a["x"]).count("name='grouped_matmul_act'")

    assert products(jax_policies.nothing_saveable) == 2
    assert products(checkpoint_policies.save_gemms()) == 1

    def sines(policy: Any) -> int:
        return in_backward(
            lambda wi: call(a | {"x": jnp.sin(a["x"] * wi[0, 0, 0]), "wi": wi}, experts), policy, a["wi"]
        ).count("sin ")

    assert sines(jax_policies.save_only_these_names("grouped_x", "grouped_fc1")) < sines(jax_policies.nothing_saveable)


@pytest.mark.rule("OFF-8")
def test_a_saved_quantised_pair_is_not_quantised_again() -> None:
    x, w = (jnp.asarray(draw(*shape), "bfloat16") for shape in ((64, 128), (2, 128, 128)))
    sizes = jnp.array([40, 24], jnp.int32)

    def run(w: Any) -> Any:
        return jax_grouped.ragged_dot(jnp.sin(x * w[0, 0, 0]), w, sizes, recipe=FP8Block)

    def passes(policy: Any) -> int:
        return in_backward(run, policy, w).count("name='quantize'")

    assert passes(checkpoint_policies.save_quantized()) < passes(jax_policies.nothing_saveable)


@pytest.mark.rule("OFF-8")
@pytest.mark.parametrize("adapted", [False, True], ids=["weights", "lora"])
@pytest.mark.parametrize("recipe", [FP8Block, MXFP8, FP8Current, FP8Delayed], ids=lambda each: each.name)
def test_an_mlp_that_saves_codes_quantises_no_rows_again(recipe: Any, adapted: bool) -> None:
    shapes = {"x": (64, 128), "wi": (2, 128, 256), "wo": (2, 128, 128)}
    given = {name: jnp.asarray(draw(*shape, seed=name), "bfloat16") for name, shape in shapes.items()}
    sizes = jnp.array([40, 24], jnp.int32)
    state = jax_grouped.scaling_state(recipe, 2, products=2) if recipe.delayed else None
    options: dict[str, Any] = {"recipe": recipe.bind(state)}
    if adapted:
        factors = (jnp.asarray(draw(*shape, seed="lora"), "bfloat16") for shape in ((2, 128, 16), (2, 16, 256)))
        options["lora"] = (tuple(factors), None)

    def gradients(policy: Any) -> Any:
        run = jax.checkpoint(lambda a: grouped_mlp(a["x"], a["wi"], a["wo"], sizes, **options), policy=policy)
        wanted = {"x": given["x"]} if adapted else given
        return jax.jit(jax.grad(lambda a: run(given | a).astype(jnp.float32).sum())), wanted

    def passes(policy: Any) -> int:
        gradient, wanted = gradients(policy)
        rows = r"name='quantize', inputs=\(ArraySpec\(shape=\(\d+, \d+\)"
        return len(re.findall(rows, str(gradient.trace(wanted).jaxpr)))

    quantized, nothing = checkpoint_policies.save_quantized(), jax_policies.nothing_saveable
    assert passes(quantized) == passes(nothing) - 1
    (gradient, wanted), (again, _) = gradients(quantized), gradients(nothing)
    same(gradient(wanted), again(wanted))


@pytest.mark.rule("OFF-7", "OFF-8")
def test_offloaded_names_move_to_host_memory() -> None:
    a, experts, _ = problem(dtype="bfloat16")

    def gradient(policy: Any) -> Any:
        run = jax.checkpoint(lambda a: call(a, experts), policy=policy)
        return jax.grad(lambda a: run(a).astype(jnp.float32).sum())

    policy = checkpoint_policies.offload_activations("grouped_fc1")
    text = str(jax.make_jaxpr(gradient(policy))(a))
    assert f"bf16<host>[{T * K},{2 * F}]" in text or "<host>" in text, "the hidden rows wait on the host"
    same(jax.jit(gradient(policy))(a), jax.jit(gradient(jax_policies.nothing_saveable))(a))
    assert "<host>" in str(jax.make_jaxpr(gradient(checkpoint_policies.offload_activations()))(a))


@pytest.mark.rule("OFF-9")
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("operation", ["grouped_mlp", "routed_mlp"])
def test_residuals_wait_in_host_memory(operation: str, scan: bool) -> None:
    """Without jax.checkpoint; the placement is in the types of the program, results are the same bits."""
    a, experts, dy = problem(dtype="bfloat16")
    f = call if operation == "routed_mlp" else in_parts
    away = ("grouped_x", "grouped_fc1")

    def gradient(offload: Any) -> Any:
        residuals = Residuals("save_fc1", offload=offload)

        def run(a: Any) -> Any:
            if not scan:
                return f(a, experts, residuals=residuals)
            return jax.lax.scan(lambda x, _: (f(a | {"x": x}, experts, residuals=residuals), None), a["x"], length=2)[0]

        return lambda a: jax.vjp(run, a)[1](dy)

    text = str(jax.make_jaxpr(gradient(away))(a))
    assert "<host>" in text
    assert "<host>" not in str(jax.make_jaxpr(gradient(()))(a))
    same(jax.jit(gradient(away))(a), jax.jit(gradient(()))(a))


@pytest.mark.rule("OFF-8", "OFF-9")
@pytest.mark.parametrize("check_vma", [True, False])
def test_host_memory_under_shard_map_and_remat(check_vma: bool) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    a, experts, _ = problem(8 * 3)

    def gradient(residuals: Any, wrap: Any) -> Any:
        def local(x: Any, weights: Any, experts: Any) -> Any:
            run = wrap(lambda x: call(a | {"x": x, "weights": weights}, experts, residuals=residuals))
            return run(x)

        rows = P("data")
        sharded = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=check_vma)
        return jax.jit(jax.grad(lambda x: sharded(x, a["weights"], experts).sum()))(a["x"])

    expected = gradient("save_fc1", lambda f: f)
    asserts.bitwise(gradient(Residuals("save_fc1", offload=("grouped_fc1",)), lambda f: f), expected)
    policy = checkpoint_policies.offload_activations("grouped_fc1")
    asserts.bitwise(gradient("save_fc1", lambda f: jax.checkpoint(f, policy=policy)), expected)


@pytest.mark.rule("OFF-9", "ERR-1")
def test_names_of_what_is_offloaded_are_checked() -> None:
    with asserts.refused(ValueError, ("`offload` of Residuals", "'hidden'", "grouped_fc1", "choose")):
        Residuals(offload=("hidden",))
    assert Residuals(offload="grouped_x") == Residuals(offload=("grouped_x",))


# ---- meshes, buffers, messages


@pytest.mark.rule("ACC-8", "LYR-16")
@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map(check_vma: bool) -> None:
    """Tokens over the mesh, weights replicated: local rows, sums of the weights' gradients alone."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    a, experts, dy = problem(8 * 6)
    weights = {name: a[name] for name in NAMES[2:]}

    def local(tokens: Any, weights: Any) -> Any:
        return call(tokens | weights, tokens["experts"])

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=check_vma)
    run = jax.jit(lambda x, p, weights: sharded({"x": x, "weights": p, "experts": experts}, weights))
    y, pull = jax.vjp(run, a["x"], a["weights"], weights)
    expected, of_all = jax.vjp(
        lambda x, p, w: local({"x": x, "weights": p, "experts": experts}, w), a["x"], a["weights"], weights
    )
    asserts.bitwise(y, expected)
    (dx, dp, dw), (ex, ep, ew) = pull(dy), of_all(dy)
    asserts.bitwise(dx, ex)
    asserts.bitwise(dp, ep)
    for name, found in dw.items():
        relative(found, ew[name], name)
    assert "all-gather" not in optimised(run.lower(a["x"], a["weights"], weights))


def test_the_result_may_be_in_the_callers_buffer() -> None:
    a, experts, _ = problem()
    asserts.bitwise(call(a, experts, out=jnp.full((T, H), jnp.nan)), call(a, experts))


@pytest.mark.rule("ERR-1", "ERR-2")
@pytest.mark.parametrize(
    ("kind", "change", "fragments"),
    [
        (ValueError, {"x": jnp.ones((T, 4))}, ("`x`", "(24, 4)", "(M, 10) to match `wi`", "check the operands")),
        (ValueError, {"wi": jnp.ones((2, H, 2 * F))}, ("`", "expected", "group", "")),
        (ValueError, {"max_rows": 0}, ("`max_rows` of routed_mlp", "0", "expected 1 or more", "every slot")),
        (TypeError, {"x": np.float64(1)}, ("`x`", "float64", "expected a JAX or NumPy array [T, K]", "convert")),
    ],
)
def test_refusals(kind: type[Exception], change: dict[str, Any], fragments: tuple[str, ...]) -> None:
    a, experts, _ = problem()
    options = {name: change[name] for name in change.keys() - a.keys()}
    with asserts.refused(kind, fragments):
        call(a | change, experts, **options)


@pytest.mark.rule("ERR-2")
def test_its_calls_can_be_seen_beforehand() -> None:
    a, experts, _ = problem()
    shapes = {name: jax.ShapeDtypeStruct(each.shape, each.dtype) for name, each in a.items()}
    given = (shapes["x"], jax.ShapeDtypeStruct(experts.shape, "int32"), shapes["weights"], shapes["wi"], shapes["wo"])
    text = jax_grouped.explain(routed_mlp, *given)
    for name in ("sort_slots", "gather_rows", "grouped_matmul_act", "combine_rows", "grouped_matmul_dact"):
        assert name in text
    assert jax_grouped.why_unsupported(routed_mlp, *given) is None
