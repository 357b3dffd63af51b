"""`integrations.haliax` against the installed Haliax."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from jax_grouped._replacing import original_of
from jax_grouped.integrations import haliax as adapter
from tests import asserts, cases
from tests.hosts.jax_host_tools import check_product, lax_calls, native_calls

hax: Any = pytest.importorskip("haliax", reason="Haliax is not installed")
host: Any = pytest.importorskip("haliax.nn.ragged_dot", reason="this Haliax has no ragged_dot")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def _as_the_host_runs() -> Iterator[None]:
    """Haliax counts on JAX's own promotion of ranks and dtypes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    assert original_of(host.ragged_dot) is host.ragged_dot, "the test left it replaced"


def small(dtype: str = "float32", **options: Any) -> cases.Problem:
    return cases.problem(cases.named("tail"), dtype, tail=0.0, **options)


@pytest.mark.rule("HST-3")
def test_what_is_replaced():
    linear = importlib.import_module("haliax.nn.linear")
    before = (host.ragged_dot, linear.ragged_dot, hax.nn.ragged_dot, linear.jax)
    with adapter.register() as done:
        assert {"haliax.nn.ragged_dot.ragged_dot", "haliax.nn.linear.ragged_dot", "haliax.nn.ragged_dot"} < {
            *done.replaced
        }
        assert "jax.lax.ragged_dot_general in haliax.nn.linear" in done.replaced
        inside = (host.ragged_dot, linear.ragged_dot, hax.nn.ragged_dot, linear.jax)
        assert all(new is not old for new, old in zip(inside, before, strict=True))
        assert linear.jax.Array is jax.Array
        assert linear.jax.lax.psum is jax.lax.psum
    assert (host.ragged_dot, linear.ragged_dot, hax.nn.ragged_dot, linear.jax) == before
    done.undo()  # again: nothing happens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["auto", "jax_grouped"])
def test_values_and_gradients(dtype, implementation):
    p = small(dtype)

    def f(x: Any, w: Any) -> jax.Array:
        return hax.nn.ragged_dot(x, w, jnp.asarray(p.group_sizes), implementation=implementation)

    with adapter.register():
        assert len(native_calls(f, p.x, p.w)) == 1
        check_product(f, p.x, p.w, p.group_sizes, p.dy)


def test_other_implementations_stay():
    p = small()
    args = tuple(map(jnp.asarray, (p.x, p.w, p.group_sizes)))
    with adapter.register():
        assert lax_calls(partial(hax.nn.ragged_dot, implementation="xla"), *args) == 1
        with asserts.refused(ValueError, ["no_such"]):
            hax.nn.ragged_dot(*args, implementation="no_such")
    with asserts.refused(ValueError, ["jax_grouped"]):
        hax.nn.ragged_dot(*args, implementation="jax_grouped")


def test_jitted_functions_follow():
    p = small("bfloat16")
    args = tuple(map(jnp.asarray, (p.x, p.w, p.group_sizes)))
    run = jax.jit(lambda *args: hax.nn.ragged_dot(*args))
    before = run(*args)
    first = adapter.register()
    asserts.bitwise(run(*args), jg.ragged_dot(*args), "registered")
    second = adapter.register(recipe=jg.FP8Current)
    coded = jg.ragged_dot(*args, recipe=jg.FP8Current)
    asserts.bitwise(run(*args), coded, "the last call counts")
    first.undo()
    asserts.bitwise(run(*args), coded, "the other is undone")
    second.undo()
    asserts.bitwise(run(*args), before, "all are undone")
    assert lax_calls(lambda *args: hax.nn.ragged_dot(*args), *args) == 1


def test_all_reduce_over_the_model_axis():
    """Contracted columns that are sharded: the sum of both shards is the whole product."""
    p = small()
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(
        lambda x, w, sizes: hax.nn.ragged_dot(x, w, sizes, ar=True),
        mesh=mesh,
        in_specs=(P(None, "model"), P(None, "model", None), P()),
        out_specs=P(),
        check_vma=False,
    )
    half = p.x.shape[1] // 2
    args = tuple(map(jnp.asarray, (p.x, p.w, p.group_sizes)))
    with adapter.register():
        assert native_calls(f, *args)
        y = f(*args)
    parts = [jg.ragged_dot(args[0][:, s], args[1][:, s], args[2]) for s in (slice(half), slice(half, None))]
    asserts.bitwise(y, parts[0] + parts[1])


@pytest.mark.parametrize("use_gmm", [False, True])
@pytest.mark.parametrize("out_first", [False, True])
def test_moe_linear(use_gmm, out_first):
    """The layer that Levanter's models are made of, in both of its forms."""
    if use_gmm and out_first:
        pytest.skip("Haliax's own use_gmm reads weights as [experts, in, out] only")
    p = small(transposed=out_first)
    G, K, N = p.w.shape[0], p.x.shape[1], p.dy.shape[1]
    rows, experts, into, out = (hax.Axis(*each) for each in zip("REIO", (len(p.x), G, K, N), strict=True))
    layer = hax.nn.MoELinear.init(
        experts, into, out, key=jax.random.key(0), use_bias=False, out_first=out_first, use_gmm=use_gmm
    )
    axes = (experts, out, into) if out_first else (experts, into, out)
    assert layer.weight.axes == axes
    sizes = hax.named(jnp.asarray(p.group_sizes), experts)

    def f(x: Any, w: Any) -> jax.Array:
        filled = dataclasses.replace(layer, weight=hax.named(w, axes))
        return filled(hax.named(x, (rows, into)), sizes).array

    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), hax.axis_mapping({}), adapter.register():
        assert len(native_calls(f, p.x, p.w)) == 1
        assert lax_calls(f, p.x, p.w) == 0
        check_product(f, jnp.asarray(p.x), jnp.asarray(p.w), p.group_sizes, p.dy, transposed=out_first)


def test_a_haliax_with_other_parameters_is_refused(monkeypatch):
    monkeypatch.setattr(host, "ragged_dot", lambda lhs, rhs, sizes, backend: None)
    with asserts.refused(NotImplementedError, ["haliax.nn.ragged_dot: parameters lhs,", "expected lhs_", "install"]):
        adapter.register()
    monkeypatch.undo()


def test_the_reason_of_a_refusal_is_seen():
    """Haliax takes NotImplementedError of its own implementations as a sign to try the next one."""
    p = small()

    def f(x: Any, w: Any) -> jax.Array:
        return hax.nn.ragged_dot(x, w, jnp.asarray(p.group_sizes))

    with adapter.register(), asserts.refused(NotImplementedError, ["jax.vmap", "fold the axis"]):
        jax.vmap(f, in_axes=(0, None))(jnp.asarray(p.x)[None], jnp.asarray(p.w))


def test_rows_are_not_padded():
    """Haliax pads to 512 rows for its own kernels; ours read the rows that there are."""
    p = small()
    with adapter.register():
        (call,) = native_calls(hax.nn.ragged_dot, *map(jnp.asarray, (p.x, p.w, p.group_sizes)))
    assert call.outputs[0].shape == (len(p.x), p.dy.shape[1])
    assert np.shape(p.x)[0] % 512
