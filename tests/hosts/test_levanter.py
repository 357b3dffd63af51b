"""`integrations.levanter` against the installed Levanter: Grug's mixture of experts, and Mixtral's MLP."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from jax_grouped.integrations import levanter as adapter
from tests import asserts, bounds
from tests.hosts.jax_host_tools import lax_calls, native_calls

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
pytest.importorskip("haliax.nn.ragged_dot", reason="no Haliax with ragged_dot is installed")
grug: Any = pytest.importorskip("levanter.grug.grug_moe", reason="no Levanter with Grug is installed")

T, E, K, H, F = 24, 4, 2, 16, 8


@pytest.fixture(autouse=True)
def _as_the_host_runs() -> Iterator[None]:
    """Levanter counts on JAX's own promotion of ranks and dtypes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def draw(*shape: int, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) * shape[-2] ** -0.5


X, W13, W2 = draw(T, H, seed=1), draw(E, H, 2 * F, seed=2), draw(E, F, H, seed=3)
EXPERTS = jax.lax.top_k(draw(T, E, seed=4), K)[1].astype(jnp.int32)
WEIGHTS = jax.nn.softmax(draw(T, K, seed=5))
DY = np.asarray(draw(T, H, seed=6))


def dense(x: Any, w13: Any, w2: Any, weights: Any) -> Any:
    """The formula, token by token and expert by expert."""
    hot = weights[:, :, None] * (np.asarray(EXPERTS)[:, :, None] == np.arange(E))
    gate, up = jnp.split(jnp.einsum("th,ehf->etf", x, w13), 2, axis=-1)
    return jnp.einsum("te,etf,efh->th", hot.sum(axis=1), gate * jax.nn.sigmoid(gate) * up, w2)


def near(found: Any, exact: Any) -> None:
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        distance = np.linalg.norm(a - e) / np.linalg.norm(e)
        assert distance <= bounds.LAYER, f"off by {distance:.2e} of its norm, expected {bounds.LAYER:.2e} at most"


def exact() -> Any:
    with jax.enable_x64(True):
        args = [jnp.asarray(np.asarray(a, np.float64)) for a in (X, W13, W2, WEIGHTS)]
        y, pullback = jax.vjp(dense, *args)
        return y, pullback(jnp.asarray(DY, jnp.float64))


def test_grugs_experts():
    def f(x: Any, w13: Any, w2: Any, weights: Any) -> Any:
        return grug.moe_mlp(x, EXPERTS, weights, w13, w2, implementation="scatter")

    args = (X, W13, W2, WEIGHTS)
    with adapter.register() as done:
        paths = ("scatter", "sonic", "ep_ring", "ep_ragged_all_to_all")
        assert {f"levanter.grug._moe.{path}.ragged_dot" for path in paths} < {*done.replaced}
        assert len([c for c in native_calls(f, *args) if c.name == "grouped_matmul"]) == 2
        assert lax_calls(f, *args) == 0
        y, pullback = jax.vjp(f, *args)
        grads = pullback(jnp.asarray(DY))
    near((y, grads), exact())
    assert lax_calls(f, *args) == 2, "undone"


def test_a_module_of_levanter_that_was_imported_before_and_one_after():
    """Both hold the function by name."""
    scatter = importlib.import_module("levanter.grug._moe.scatter")
    before = scatter.ragged_dot
    with adapter.register():
        assert scatter.ragged_dot is not before
        from haliax.nn.ragged_dot import ragged_dot  # as a module imported now

        assert ragged_dot is importlib.import_module("haliax.nn.ragged_dot").ragged_dot
        assert ragged_dot is not before
    assert scatter.ragged_dot is before


def test_mixtrals_mlp():
    """Its layers are `MoELinear`, which calls `jax.lax.ragged_dot_general`."""
    mixtral: Any = pytest.importorskip("levanter.models.mixtral", reason="what Mixtral imports is not installed")
    hax: Any = importlib.import_module("haliax")
    rows, experts, into, out = (hax.Axis(*each) for each in zip("RXIO", (T * K, E, H, F), strict=True))
    mlp = mixtral.MixtralMoEMlp.init(experts, into, out, hax.nn.silu, key=jax.random.key(0))
    order = jnp.argsort(EXPERTS.reshape(-1))
    flat = X[order // K]
    sizes = hax.named(jnp.bincount(EXPERTS.reshape(-1), length=E), experts)

    def f(mlp: Any, x: Any) -> Any:
        return mlp(hax.named(x, (rows, into)), sizes).array

    def by_hand(mlp: Any, x: Any) -> Any:
        gate, up = (jg.ragged_dot(x, w.weight.array, sizes.array) for w in (mlp.w1, mlp.w3))
        return jg.ragged_dot(jax.nn.silu(gate) * up, mlp.w2.weight.array, sizes.array)

    with adapter.register():
        assert len(native_calls(f, mlp, flat)) == 3
        assert lax_calls(f, mlp, flat) == 0
        found = jax.grad(lambda m, x: f(m, x).sum(), argnums=(0, 1))(mlp, flat)
    wanted = jax.grad(lambda m, x: by_hand(m, x).sum(), argnums=(0, 1))(mlp, flat)
    jax.tree.map(asserts.bitwise, found, wanted)
    assert lax_calls(f, mlp, flat) == 3, "undone"


def test_other_kernels_are_named_in_the_page():
    """The path that does not call Haliax's function stays, and docs/hosts_jax.md says so."""
    from tests.conftest import ROOT

    assert "sonic_cute" in (ROOT / "docs" / "hosts_jax.md").read_text()
