"""The adapters of MaxText and AXLearn against published signatures: neither package can be installed here."""

from __future__ import annotations

import importlib
import inspect
import re
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped as jg
from jax_grouped.integrations import axlearn, haliax, maxtext
from tests import asserts, cases
from tests.conftest import ROOT
from tests.hosts import published
from tests.hosts.jax_host_tools import check_product, lax_calls, native_calls

KINDS = {
    "megablox": {"megablox": True, "use_tokamax_gmm": False},
    "tokamax": {"megablox": True, "use_tokamax_gmm": True},
    "ragged_dot": {"megablox": False, "use_tokamax_gmm": False},
}


def small(dtype: str = "float32", **options: Any) -> cases.Problem:
    return cases.problem(cases.named("tail"), dtype, **options)


@pytest.fixture
def maxtext_host() -> Any:
    moe, megablox = published.maxtext()
    with published.installed(moe, megablox):
        yield SimpleNamespace(moe=moe, megablox=megablox)


@pytest.fixture
def axlearn_host() -> Any:
    host = published.axlearn()
    with published.installed(host):
        yield host


# ---------------------------------------------------------------------------------------------------------------------
# MaxText.


@pytest.mark.rule("HST-1", "HST-3")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_maxtext_with_every_value_of_its_switch(maxtext_host, kind, dtype):
    p = small(dtype)
    sizes = jnp.asarray(p.group_sizes)

    def f(x: Any, w: Any) -> jax.Array:
        return maxtext_host.moe.routed(x, w, sizes, dtype=jnp.float32, **KINDS[kind])

    assert lax_calls(f, p.x, p.w) == 1
    with maxtext.register() as done:
        assert done.replaced == (
            "maxtext.kernels.megablox.gmm",
            "jax.lax.ragged_dot in maxtext.layers.moe",
            "tokamax.ragged_dot in maxtext.layers.moe",
        )
        assert len(native_calls(f, p.x, p.w)) == 1
        assert lax_calls(f, p.x, p.w) == 0
        check_product(f, p.x, p.w, p.group_sizes, p.dy, "float32")
        assert lax_calls(jax.lax.ragged_dot, p.x, p.w, sizes) == 1, "only MaxText is concerned"
    assert lax_calls(f, p.x, p.w) == 1, "undone"
    assert maxtext_host.moe.jax is jax
    assert maxtext_host.megablox.gmm is published.gmm


def test_maxtext_with_a_recipe(maxtext_host):
    p = small("bfloat16")
    args = tuple(map(jnp.asarray, (p.x, p.w, p.group_sizes)))
    for kind in KINDS:
        run = jax.jit(lambda *args, kind=kind: maxtext_host.moe.routed(*args, dtype=jnp.bfloat16, **KINDS[kind]))
        before = run(*args)
        with maxtext.register(recipe=jg.FP8Current):
            asserts.bitwise(run(*args), jg.ragged_dot(*args, recipe=jg.FP8Current), kind)
        asserts.bitwise(run(*args), before, kind)


def test_maxtext_transposed_weights(maxtext_host):
    p = small(transposed=True)
    with maxtext.register():

        def f(x: Any, w: Any) -> jax.Array:
            return maxtext_host.megablox.gmm(x, w, jnp.asarray(p.group_sizes), jnp.float32, transpose_rhs=True)

        check_product(f, p.x, p.w, p.group_sizes, p.dy, transposed=True)


REFUSED = {
    "lhs_quantize_dtype": jnp.int8,
    "rhs_quantize_dtype": jnp.int8,
    "use_qwix_quantization": True,
    "use_manual_quantization": True,
    "qwix_rule": object(),
    "weight_gather_axes": [("fsdp", 0)],
    "partial_sum": jnp.zeros((2, 2)),
    "existing_out": jnp.zeros((2, 2)),
    "group_offset": jnp.zeros((1,), jnp.int32),
}


@pytest.mark.rule("HST-1", "ERR-1")
@pytest.mark.parametrize(("name", "value"), [*REFUSED.items(), ("group_offset", 1)])
def test_maxtext_what_is_not_recognised(maxtext_host, name, value):
    p = small()
    given = {**KINDS["megablox"], "dtype": jnp.float32, name: value}
    fragments = [f"`{name}` of maxtext.kernels.megablox.gmm: ", "expected ", "; ", "or undo the replacement"]
    with maxtext.register(), asserts.refused(NotImplementedError, fragments):
        maxtext_host.moe.routed(p.x, p.w, jnp.asarray(p.group_sizes), **given)


@pytest.mark.rule("HST-1")
def test_maxtext_an_argument_added_later(maxtext_host, monkeypatch):
    """It is refused as soon as it has another value than its default."""

    def later(
        lhs: Any, rhs: Any, group_sizes: Any, preferred_element_type: Any = jnp.float32, scale: float = 1.0
    ) -> Any:
        return None

    monkeypatch.setattr(maxtext_host.megablox, "gmm", later)
    p = small()
    with maxtext.register():
        y = maxtext_host.megablox.gmm(p.x, p.w, jnp.asarray(p.group_sizes), scale=1.0)
        asserts.bitwise(y, jg.ragged_dot(p.x, p.w, p.group_sizes))
        with asserts.refused(NotImplementedError, ["`scale` of", "2.0, expected 1.0, its default", "leave it out"]):
            maxtext_host.megablox.gmm(p.x, p.w, jnp.asarray(p.group_sizes), scale=2.0)


def test_maxtext_quantised_by_interception(maxtext_host, monkeypatch):
    """Qwix replaces `jax.lax.ragged_dot` while a layer runs; going around it would leave out its quantisation."""
    p = small()
    run = maxtext_host.moe.routed
    args = (p.x, p.w, jnp.asarray(p.group_sizes))
    with maxtext.register():
        with jg.patch():  # a replacement of ours is none of others
            assert native_calls(lambda *args: run(*args, dtype=jnp.float32, **KINDS["ragged_dot"]), *args)
        monkeypatch.setattr(jax.lax, "ragged_dot", lambda *args, **kwargs: None)
        with asserts.refused(
            NotImplementedError, ["jax.lax.ragged_dot in maxtext.layers.moe: replaced by", "`recipe`"]
        ):
            run(*args, dtype=jnp.float32, **KINDS["ragged_dot"])
        monkeypatch.undo()


def test_maxtext_with_other_parameters(maxtext_host, monkeypatch):
    monkeypatch.setattr(maxtext_host.megablox, "gmm", lambda a, b: None)
    fragments = ["maxtext.kernels.megablox.gmm: parameters a, b", "expected lhs, rhs, group_sizes", "install"]
    with asserts.refused(NotImplementedError, fragments):
        maxtext.register()
    assert maxtext_host.moe.jax is jax


# ---------------------------------------------------------------------------------------------------------------------
# AXLearn.


@pytest.mark.rule("HST-1", "HST-3")
@pytest.mark.parametrize("backend", [None, *published.GMMBackend])
@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_axlearn_with_every_backend(axlearn_host, backend, dtype):
    p = small("bfloat16")
    kind = axlearn_host.TransformerFeedForwardDropFreeMoE
    layer = kind(gmm_backend=backend, preferred_element_type=dtype)

    def f(x: Any, w: Any) -> jax.Array:
        return layer.forward(x, w, jnp.asarray(p.group_sizes))

    original = kind._padded_gmm
    with axlearn.register() as done:
        (name,) = done.replaced
        assert name == "axlearn.common.mixture_of_experts.TransformerFeedForwardDropFreeMoE._padded_gmm"
        assert len(native_calls(f, p.x, p.w)) == 1
        check_product(f, p.x, p.w, p.group_sizes, p.dy, np.dtype(dtype or jnp.bfloat16).name)
    assert kind._padded_gmm is original
    assert lax_calls(f, p.x, p.w) == 1


def test_axlearn_with_a_recipe(axlearn_host):
    p = small("bfloat16")
    args = tuple(map(jnp.asarray, (p.x, p.w, p.group_sizes)))
    run = jax.jit(axlearn_host.TransformerFeedForwardDropFreeMoE().forward)
    before = run(*args)
    with axlearn.register(recipe=jg.FP8Current):
        asserts.bitwise(run(*args), jg.ragged_dot(*args, recipe=jg.FP8Current))
    asserts.bitwise(run(*args), before)


@pytest.mark.rule("HST-1", "ERR-1")
def test_axlearn_with_a_new_backend(axlearn_host):
    p = small("bfloat16")
    layer = axlearn_host.TransformerFeedForwardDropFreeMoE(gmm_backend=SimpleNamespace(name="CUTLASS"))
    fragments = ["`gmm_backend` of TransformerFeedForwardDropFreeMoE:", "CUTLASS", "expected None or one of PALLAS"]
    with axlearn.register(), asserts.refused(NotImplementedError, fragments):
        layer.forward(p.x, p.w, jnp.asarray(p.group_sizes))


def test_axlearn_with_other_parameters(axlearn_host, monkeypatch):
    kind = axlearn_host.TransformerFeedForwardDropFreeMoE
    monkeypatch.setattr(kind, "_padded_gmm", lambda self, lhs, rhs, sizes, scales: None)
    with asserts.refused(NotImplementedError, ["_padded_gmm: parameters self, lhs, rhs, sizes", "expected self, lhs"]):
        axlearn.register()


# ---------------------------------------------------------------------------------------------------------------------
# All adapters.


def test_the_page_names_every_adapter():
    """Each line of code in its table is one of an adapter, which takes a recipe."""
    page = (ROOT / "docs" / "hosts_jax.md").read_text()
    hosts = re.findall(r"`from jax_grouped.integrations import (\w+); \1.register\(\)`", page)
    files = {path.stem for path in (ROOT / "jax_grouped" / "integrations").glob("[a-z]*.py")}
    assert set(hosts) == files
    for host in hosts:
        register = importlib.import_module(f"jax_grouped.integrations.{host}").register
        assert list(inspect.signature(register).parameters) == ["recipe"]


def test_a_haliax_without_grouped_products():
    """Its last release under that name, 1.3, has none."""
    old = ModuleType("haliax")
    old.__dict__["__version__"] = "1.3"
    with (
        published.installed(old, ModuleType("haliax.nn")),
        asserts.refused(
            ImportError, ["haliax.nn.ragged_dot: not in haliax 1.3", "expected a release", "install marin-"]
        ),
    ):
        haliax.register()


@pytest.mark.parametrize("adapter", [maxtext, axlearn], ids=["maxtext", "axlearn"])
def test_recipes_that_need_a_state(adapter):
    with asserts.refused(ValueError, ["`recipe`: FP8Delayed", "FP8Block"]):
        adapter.register(recipe=jg.FP8Delayed)
