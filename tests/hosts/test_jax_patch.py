"""`patch`: `ragged_dot` in code that was written on `jax.lax.ragged_dot`."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from jax_grouped._replacing import Place, Replacement, choice_of, original_of, replacing
from tests import asserts, bounds, cases
from tests.hosts import users_moe
from tests.hosts.jax_host_tools import check_product, lax_calls, module, native_calls

NAMES = ("jax.lax.ragged_dot", "jax.lax.ragged_dot_general")
LAX = (jax.lax.ragged_dot, jax.lax.ragged_dot_general)
RECIPE = jg.FP8Current
"""Its results differ from those of plain operands, which tells what ran."""
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@pytest.fixture(autouse=True)
def _restored() -> Any:
    yield
    found = (jax.lax.ragged_dot, jax.lax.ragged_dot_general)
    jax.lax.ragged_dot, jax.lax.ragged_dot_general = LAX
    assert found == LAX, "the test left the functions replaced"


def small(dtype: str = "float32", name: str = "tail") -> cases.Problem:
    return cases.problem(cases.named(name), dtype)


def product(x: Any, w: Any, sizes: Any) -> jax.Array:
    """A user's function."""
    return jax.lax.ragged_dot(x, w, sizes)


# ---------------------------------------------------------------------------------------------------------------------
# What is replaced, and for how long.


@pytest.mark.rule("HST-3")
def test_names_are_replaced_inside_and_restored():
    with jg.patch() as replaced:
        assert replaced == NAMES
        assert (original_of(jax.lax.ragged_dot), original_of(jax.lax.ragged_dot_general)) == LAX
        assert jax.lax.ragged_dot is not LAX[0]
        assert jax.lax.ragged_dot.__doc__ == LAX[0].__doc__
    assert (jax.lax.ragged_dot, jax.lax.ragged_dot_general) == LAX


@pytest.mark.rule("HST-3")
def test_importing_replaces_nothing(python):
    python(
        "import jax; before = jax.lax.ragged_dot, jax.lax.ragged_dot_general\n"
        "import jax_grouped, jax_grouped.integrations\n"
        "from jax_grouped.integrations import axlearn, haliax, levanter, maxtext\n"
        "assert before == (jax.lax.ragged_dot, jax.lax.ragged_dot_general)"
    )


@pytest.mark.rule("HST-3")
def test_an_exception_ends_it():
    p = small()
    with pytest.raises(RuntimeError, match="of the user"), jg.patch(), jg.patch(recipe=RECIPE):
        raise RuntimeError("of the user")
    assert (jax.lax.ragged_dot, jax.lax.ragged_dot_general) == LAX
    assert not native_calls(product, p.x, p.w, p.group_sizes)
    with pytest.raises(TypeError), jg.patch():
        jax.lax.ragged_dot(p.x, p.w, p.group_sizes.astype(np.float32))
    assert not native_calls(product, p.x, p.w, p.group_sizes)


def test_it_decorates():
    p = small()
    assert native_calls(jg.patch()(product), p.x, p.w, p.group_sizes)
    assert not native_calls(product, p.x, p.w, p.group_sizes)


def test_the_innermost_recipe_counts():
    p = small("bfloat16")
    plain, coded = (jg.ragged_dot(p.x, p.w, p.group_sizes, recipe=recipe) for recipe in (None, RECIPE))
    assert np.any(np.asarray(plain) != np.asarray(coded))
    with jg.patch(recipe=RECIPE):
        asserts.bitwise(product(p.x, p.w, p.group_sizes), coded, "outer")
        with jg.patch():
            asserts.bitwise(product(p.x, p.w, p.group_sizes), plain, "inner")
        asserts.bitwise(product(p.x, p.w, p.group_sizes), coded, "outer again")


def test_names_of_other_modules():
    theirs = module(
        "theirs",
        "from jax.lax import ragged_dot, ragged_dot_general as general\n"
        "def f(x, w, sizes): return ragged_dot(x, w, sizes)\n",
    )
    p = small()
    args = (p.x, p.w, p.group_sizes)
    with jg.patch():
        assert not native_calls(theirs.f, *args), "a name bound before is not reached"
    with jg.patch(), jg.patch(modules=[theirs]) as replaced:
        assert replaced == (*NAMES, "theirs.ragged_dot", "theirs.general")
        assert native_calls(theirs.f, *args)
    assert (theirs.ragged_dot, theirs.general) == LAX
    assert not native_calls(theirs.f, *args)
    empty = module("empty", "import jax")
    with (
        asserts.refused(ValueError, ["`modules`: empty", "expected modules that import them by name", "leave it out"]),
        jg.patch(modules=[theirs, empty]),
    ):
        pass
    assert (theirs.ragged_dot, theirs.general) == LAX


@pytest.mark.parametrize("modules", [np, ("numpy",), "numpy"])
def test_modules_are_modules(modules: Any):
    with asserts.refused(TypeError, ["`modules` of patch", "numpy", "a sequence of imported modules"]):
        jg.patch(modules=modules).__enter__()


def test_names_of_other_modules_inside_another_context():
    """They stay replaced, and the innermost recipe counts there too."""
    theirs = module("theirs", "from jax.lax import ragged_dot")
    p = small("bfloat16")
    args = (p.x, p.w, p.group_sizes)
    with jg.patch(modules=[theirs]), jg.patch(recipe=RECIPE):
        asserts.bitwise(theirs.ragged_dot(*args), jg.ragged_dot(*args, recipe=RECIPE))


def test_names_that_another_thread_replaces():
    """A context concerns the modules that it was given, whatever other threads were given."""
    theirs = module("theirs", "from jax.lax import ragged_dot")
    p = small()
    args = (p.x, p.w, p.group_sizes)
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        with jg.patch(modules=[theirs]):
            inside.set()
            done.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(60)
    try:
        with jg.patch():
            assert native_calls(product, *args)
            assert lax_calls(lambda *args: theirs.ragged_dot(*args), *args) == 1
    finally:
        done.set()
        thread.join()
    assert theirs.ragged_dot is LAX[0]


def test_a_module_imported_inside_means_lax_afterwards():
    p = small()
    args = (p.x, p.w, p.group_sizes)
    with jg.patch():
        theirs = module("theirs", "from jax.lax import ragged_dot")
        assert native_calls(theirs.ragged_dot, *args)
    assert lax_calls(theirs.ragged_dot, *args) == 1
    with jg.patch(modules=[theirs]):
        assert native_calls(theirs.ragged_dot, *args)
    assert lax_calls(theirs.ragged_dot, *args) == 1


def test_what_another_library_replaces_meanwhile_stays():
    def other(*args: Any) -> Any:
        return None

    try:
        with jg.patch():
            jax.lax.ragged_dot = other  # pyrefly: ignore[bad-assignment]
        assert jax.lax.ragged_dot is other
    finally:
        jax.lax.ragged_dot = LAX[0]


def test_other_threads_are_not_affected():
    p = small("bfloat16")
    args = (p.x, p.w, p.group_sizes)
    jitted = jax.jit(product)
    first_in, second_in, second_out = (threading.Event() for _ in range(3))
    found: dict[str, Any] = {}

    def first() -> None:
        with jg.patch(recipe=RECIPE):
            first_in.set()
            assert second_in.wait(60)
            found["first"] = jitted(*args)
        found["first, after"] = jitted(*args)
        second_out.set()

    def second() -> None:
        assert first_in.wait(60)
        found["second, outside"] = lax_calls(product, *args)
        with jg.patch():
            second_in.set()
            assert second_out.wait(60)  # the first thread has left, and ours is still in
            found["second"] = jitted(*args)
            found["second, name"] = jax.lax.ragged_dot is not LAX[0]

    threads = [threading.Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asserts.bitwise(found["first"], jg.ragged_dot(*args, recipe=RECIPE), "first")
    asserts.bitwise(found["first, after"], jitted(*args), "first, after")
    assert found["second, outside"] == 1
    asserts.bitwise(found["second"], jg.ragged_dot(*args), "second")
    assert found["second, name"]


# ---------------------------------------------------------------------------------------------------------------------
# Caches of traces.


def nested(f: Any) -> Any:
    return jax.jit(lambda *args: f(*args) * 1)


def scanned(f: Any) -> Any:
    def body(carry: Any, x: Any, w: Any, sizes: Any) -> Any:
        return carry + 1, f(x, w, sizes)

    return lambda x, w, sizes: jax.lax.scan(lambda c, x: body(c, x, w, sizes), 0, x[None])[1][0]


WRAPPERS = {"jit": jax.jit, "jit in jit": lambda f: nested(jax.jit(f)), "checkpoint": jax.checkpoint, "scan": scanned}


@pytest.mark.rule("HST-3")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("starts", ["inside", "outside"])
def test_programs_of_both_are_kept_apart(wrapper, starts):
    """Whatever was traced first; each is traced once, also in contexts that are entered again."""
    p = small("bfloat16")
    traces: list[None] = []

    def f(x: Any, w: Any, sizes: Any) -> jax.Array:
        traces.append(None)
        return jax.lax.ragged_dot(x, w, sizes)

    run, args = WRAPPERS[wrapper](f), (p.x, p.w, jnp.asarray(p.group_sizes))
    coded = jg.ragged_dot(*args, recipe=RECIPE)
    found: dict[str, list[Any]] = {"inside": [], "outside": []}
    for where in (starts, "outside", "inside", "outside", "inside"):
        if where == "inside":
            with jg.patch(recipe=RECIPE):
                found[where].append(run(*args))
        else:
            found[where].append(run(*args))
    for y in found["inside"]:
        asserts.bitwise(y, coded, "inside")
    for y in found["outside"]:
        asserts.bitwise(y, found["outside"][0], "outside")
        assert np.any(np.asarray(y) != np.asarray(coded))
    if "jit" in wrapper:
        assert len(traces) == 2, "one trace inside, one outside"


def test_a_pullback_is_that_of_its_trace():
    p = small()
    y, outside = jax.vjp(lambda x, w: product(x, w, p.group_sizes), p.x, p.w)
    with jg.patch():
        _, inside = jax.vjp(lambda x, w: product(x, w, p.group_sizes), p.x, p.w)
        assert lax_calls(outside, y) == 2
        assert not native_calls(outside, y)
    assert len(native_calls(inside, y)) == 2
    assert not lax_calls(inside, y)


def test_compiled_ahead_of_time():
    p = small("bfloat16")
    args = (p.x, p.w, jnp.asarray(p.group_sizes))
    with jg.patch(recipe=RECIPE):
        compiled = jax.jit(product).lower(*args).compile()
    asserts.bitwise(compiled(*args), jg.ragged_dot(*args, recipe=RECIPE))


# ---------------------------------------------------------------------------------------------------------------------
# Values, gradients and dtypes.


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("name", ["tail", "idle_ends"])
def test_values_and_gradients(name, dtype):
    p = small(dtype, name)
    with jg.patch():
        assert len(native_calls(product, p.x, p.w, p.group_sizes)) == 1
        check_product(lambda x, w: product(x, w, p.group_sizes), p.x, p.w, p.group_sizes, p.dy)


@pytest.mark.rule("MAT-6")
@pytest.mark.parametrize(("x_dtype", "w_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_dtypes_are_those_of_lax(x_dtype, w_dtype):
    """Of the result and of gradients, for all pairs; two 8-bit operands are documented to differ."""
    x, w = (jnp.ones(shape, dtype) for shape, dtype in (((6, 8), x_dtype), ((2, 8, 4), w_dtype)))
    sizes = jnp.array([2, 3], jnp.int32)

    def types() -> tuple[str, ...]:
        y, pullback = jax.eval_shape(lambda x, w: jax.vjp(lambda x, w: product(x, w, sizes), x, w), x, w)
        return tuple(each.dtype.name for each in (y, *jax.eval_shape(lambda f, y: f(y), pullback, y)))

    wanted = types()
    with jg.patch():
        found = types()
    both_narrow = x_dtype.startswith("float8") and w_dtype.startswith("float8")
    assert found == (("bfloat16",) * 3 if both_narrow else wanted)


@pytest.mark.rule("MAT-6")
@pytest.mark.parametrize(
    ("x_dtype", "w_dtype"), [("bfloat16", "float32"), ("float32", "float16"), ("float16", "bfloat16")]
)
def test_values_of_mixed_dtypes(x_dtype, w_dtype):
    x, w, sizes, dy = small(x_dtype).x, small(w_dtype).w, small().group_sizes, small().dy
    with jg.patch():
        check_product(lambda x, w: product(x, w, sizes), x, w, sizes, dy)


def test_an_8_bit_operand_widens_exactly():
    p, x = small("bfloat16"), small("float8_e4m3fn").x
    with jg.patch():
        y = product(x, p.w, p.group_sizes)
    asserts.bitwise(y, jg.ragged_dot(jnp.asarray(x).astype(jnp.bfloat16), p.w, p.group_sizes))


def test_preferred_element_type():
    p = small("bfloat16")
    for dtype in (jnp.float32, jnp.bfloat16, "float16"):
        with jg.patch():
            for given in ((None, dtype), ()):
                keyword = {} if given else {"preferred_element_type": dtype}
                f = partial(jax.lax.ragged_dot, **keyword)
                run = lambda x, w, f=f, given=given: f(x, w, p.group_sizes, *given)  # noqa: E731
                check_product(run, p.x, p.w, p.group_sizes, p.dy, np.dtype(dtype).name)
    mixed = small("float32").w
    with jg.patch():
        y = jax.lax.ragged_dot(p.x, mixed, p.group_sizes, preferred_element_type=jnp.bfloat16)
    assert y.dtype == jnp.bfloat16


def modes(precision: Any = None) -> set[str]:
    p = small()

    def f(x: Any, w: Any) -> Any:
        return jax.grad(lambda x, w: jax.lax.ragged_dot(x, w, p.group_sizes, precision).sum(), argnums=(0, 1))(x, w)

    return {dict(call.params)["fp32_mode"] for call in native_calls(f, p.x, p.w)}


def test_precision():
    with jg.patch():
        assert modes() == modes("default") == modes(jax.lax.DotAlgorithmPreset.BF16_BF16_F32) == {"tf32x3"}
        assert modes("highest") == modes(jax.lax.Precision.HIGHEST) == {"ieee"}
        with jax.default_matmul_precision("highest"):
            assert modes() == {"ieee"}
            assert modes("default") == {"tf32x3"}
        with asserts.refused(ValueError, ["`precision`"]):
            modes("no such precision")


def test_numpy_operands_as_in_lax():
    p = small()
    x, w = (np.asarray(each, np.float64) for each in (p.x, p.w))
    with jg.patch():
        y = product(x, w, p.group_sizes.astype(np.int64))
    asserts.bitwise(y, jg.ragged_dot(p.x, p.w, p.group_sizes))


@pytest.mark.parametrize("transposed", [False, True])
def test_ragged_dot_general(transposed):
    p = cases.problem(cases.named("tail"), "float32", transposed=transposed)
    numbers = jax.lax.RaggedDotDimensionNumbers((([1], [2 if transposed else 1]), ([], [])), [0], [0])

    def f(x: Any, w: Any) -> jax.Array:
        return jax.lax.ragged_dot_general(x, w, p.group_sizes, numbers)

    with jg.patch():
        assert len(native_calls(f, p.x, p.w)) == 1
        check_product(f, p.x, p.w, p.group_sizes, p.dy, transposed=transposed)


# ---------------------------------------------------------------------------------------------------------------------
# Refusals.

GENERAL = jax.lax.RaggedDotDimensionNumbers
OTHER_PRODUCTS = {
    "ragged contraction": (GENERAL((([0], [0]), ([], [])), [0], []), (6, 8), (6, 4), (2,)),
    "columns of lhs": (GENERAL((([0], [1]), ([], [])), [1], [0]), (8, 6), (2, 8, 4), (2,)),
    "groups last": (GENERAL((([1], [0]), ([], [])), [0], [2]), (6, 8), (8, 4, 2), (2,)),
    "ragged batch": (GENERAL((([2], [1]), ([0], [0])), [0], []), (6, 3, 8), (6, 8, 4), (2,)),
}


@pytest.mark.rule("ERR-3")
@pytest.mark.parametrize("name", OTHER_PRODUCTS)
def test_other_products_are_refused(name):
    numbers, *shapes = OTHER_PRODUCTS[name]
    x, w, sizes = (jnp.ones(shape, dtype) for shape, dtype in zip(shapes, ("float32", "float32", "int32"), strict=True))
    fragments = ["`ragged_dot_dimension_numbers`", "expected those of [M, K] times [G, K, N]", "bring the operands"]
    with jg.patch(), asserts.refused(NotImplementedError, fragments):
        jax.lax.ragged_dot_general(x, w, sizes, numbers)


@pytest.mark.rule("GRP-14")
@pytest.mark.parametrize("name", ["group_offset", "out_sharding"])
def test_arguments_without_a_meaning_here(name):
    p = small()
    numbers = GENERAL((([1], [1]), ([], [])), [0], [0])
    with jg.patch():
        for f in (jax.lax.ragged_dot, partial(jax.lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers)):
            with asserts.refused(TypeError, [f"`{name}`", "expected None"]):
                f(p.x, p.w, p.group_sizes, **{name: jnp.zeros(1, jnp.int32)})


def test_dtypes_without_kernels():
    x, w = jnp.ones((6, 8), jnp.int8), jnp.ones((2, 8, 4), jnp.float32)
    with jg.patch(), asserts.refused(TypeError, ["`lhs`", "int8"]):
        jax.lax.ragged_dot(x, w, jnp.array([2, 3], jnp.int32))


def test_vmap():
    p = small()
    x = jnp.asarray(p.x)[None]
    with jg.patch(), asserts.refused(NotImplementedError, ["jax.vmap", "fold the axis into rows"]):
        jax.vmap(product, in_axes=(0, None, None))(x, p.w, p.group_sizes)


@pytest.mark.parametrize(
    ("recipe", "kind", "fragments"),
    [
        ("bf16", TypeError, ["`recipe`: str", "expected None or a Recipe"]),
        (
            jg.BF16.bind(key=jnp.zeros(2, jnp.uint32)),
            TypeError,
            ["`recipe`: BoundRecipe", "call jax_grouped.ragged_dot"],
        ),
        (jg.FP8Delayed, ValueError, ["`recipe`: FP8Delayed", "expected a recipe without one", "FP8Block"]),
    ],
    ids=["text", "bound", "with a state"],
)
def test_recipes_that_do_not_fit(recipe, kind, fragments):
    with asserts.refused(kind, fragments), jg.patch(recipe=recipe):
        pass


# ---------------------------------------------------------------------------------------------------------------------
# A user's model.


def near(found: Any, exact: Any, what: str) -> None:
    a, e = np.asarray(found, np.float64), np.asarray(exact, np.float64)
    distance = np.linalg.norm(a - e) / np.linalg.norm(e)
    assert distance <= bounds.LAYER, f"{what}: off by {distance:.2e} of its norm, expected {bounds.LAYER:.2e} at most"


def loss(p: dict[str, jax.Array], x: jax.Array, f: Any = users_moe.moe) -> tuple[jax.Array, jax.Array]:
    y = f(p, x)
    return jnp.sum(y * jnp.cos(y)), y


step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), static_argnums=2)


def test_a_users_layer_and_all_its_gradients():
    p, x = users_moe.parameters(), users_moe.tokens()
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (p, x))
        (_, exact), exact_grads = step(*wide, users_moe.moe)
        assert exact.dtype == jnp.float64
    with jg.patch():
        assert len(native_calls(partial(step, f=users_moe.moe), p, x)) == 9, "three products and two gradients of each"
        (_, y), grads = step(p, x, users_moe.moe)
    near(y, exact, "y")
    jax.tree.map_with_path(lambda path, a, e: near(a, e, jax.tree_util.keystr(path)), grads, exact_grads)


@pytest.mark.parametrize("how", ["checkpoint", "scan", "shard_map"])
def test_a_users_layer_under_transformations(how):
    """The same bits as without."""
    p, x = users_moe.parameters(), users_moe.tokens()

    def scanned_layers(p: Any, x: Any) -> Any:
        stacked = jax.tree.map(lambda a: a[None], p)
        return jax.lax.scan(lambda x, layer: (users_moe.moe(layer, x), None), x, stacked)[0]

    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    run = {
        "checkpoint": jax.checkpoint(users_moe.moe),
        "scan": scanned_layers,
        "shard_map": jax.shard_map(users_moe.moe, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")),
    }[how]
    with jg.patch():
        wanted, found = step(p, x, users_moe.moe), step(p, x, run)
        assert native_calls(run, p, x)
        assert not lax_calls(run, p, x)
    jax.tree.map(asserts.bitwise, found, wanted)


def test_a_users_layer_with_a_recipe():
    """Every product has it, forward and backward."""
    p, x = users_moe.parameters(jnp.bfloat16), users_moe.tokens(jnp.bfloat16)
    with jg.patch(recipe=jg.FP8Block):
        calls = native_calls(partial(step, f=users_moe.moe), p, x)
    products = [call for call in calls if call.name == "grouped_matmul"]
    assert len(products) == 9
    for call in products:
        assert [spec.dtype for spec in call.inputs[:2]] == ["float8_e4m3fn"] * 2


def test_what_cannot_be_replaced_leaves_nothing_replaced() -> None:
    holder: Any = ModuleType("holder")
    holder.f = holder.g = function = lambda: 1

    def fails(original: Any) -> Any:
        raise TypeError("no such host")

    good = Place(holder, "f", replacing(lambda original: lambda: original()), "holder.f")
    for bad in (Place(holder, "g", fails, "holder.g"), Place(holder, "h", fails, "holder.h")):
        with pytest.raises((TypeError, KeyError)):
            Replacement("host", choice_of(None), (good, bad))
        assert holder.f is function
