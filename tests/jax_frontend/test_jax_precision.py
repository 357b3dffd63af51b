"""`ragged_dot` called as `jax.lax.ragged_dot` is: its arguments by position and by name, and what a precision asks."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import DotAlgorithm, DotAlgorithmPreset, Precision
from jax.sharding import PartitionSpec as P

import jax_grouped as jg
from grouped_core.calls import Call
from grouped_core.linear_spec import Linear
from grouped_core.recipes import FP32_MODES
from jax_grouped import _run
from jax_grouped.ops import NAMES
from tests import asserts, cases
from tests.bounds import expect_linear, expect_linear_grads

IN_FLOAT32 = DotAlgorithm(np.float32, np.float32, np.float32)
SPLIT_BF16 = DotAlgorithm(jnp.bfloat16, jnp.bfloat16, np.float32, 3, 3, 6)
ONE_BF16 = DotAlgorithm(jnp.bfloat16, jnp.bfloat16, np.float32)
WANTS_IEEE = ("highest", "float32", Precision.HIGHEST, "F32_F32_F32", DotAlgorithmPreset.F32_F32_F32, IN_FLOAT32)
WANTS_TF32X3 = ("TF32_TF32_F32_X3", DotAlgorithmPreset.BF16_BF16_F32_X9, SPLIT_BF16)
WANTS_LESS = (
    *("default", "fastest", "high", "tensorfloat32", "bfloat16", "bfloat16_3x", Precision.DEFAULT, Precision.HIGH),
    *("BF16_BF16_F32", "TF32_TF32_F32", "DEFAULT", "F16_F16_F16", DotAlgorithmPreset.BF16_BF16_BF16, ONE_BF16),
    *(("high", "default"), [Precision.DEFAULT, Precision.HIGH]),
)
PAIRS_WITH_HIGHEST = (("highest", "default"), (Precision.HIGH, Precision.HIGHEST), ["default", Precision.HIGHEST])


def small(dtype: str = "float32") -> cases.Problem:
    return cases.problem(cases.named("tail"), dtype)


def modes(*args: Any, **options: Any) -> set[str]:
    """Modes of float32 operands in every native call of `ragged_dot(*args)` and of its gradients."""
    p = small()

    def loss(x, w):
        return jnp.sum(jg.ragged_dot(x, w, p.group_sizes, *args, **options) ** 2)

    found: list[Call] = []
    nested = [jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(p.x, p.w).jaxpr]
    while nested:
        for eqn in nested.pop().eqns:
            if eqn.primitive is _run.call_p:
                found.append(eqn.params["call"])
            nested += [getattr(inner, "jaxpr", inner) for inner in eqn.params.values() if hasattr(inner, "eqns")]
    assert len(found) == 3
    return {str(dict(call.params)["fp32_mode"]) for call in found}


def test_arguments_of_lax_come_first_in_its_order() -> None:
    ours, lax = (list(inspect.signature(f).parameters.values()) for f in (jg.ragged_dot, jax.lax.ragged_dot))
    shared = ours[: len(lax)]
    assert [each.name for each in shared] == [each.name for each in lax]
    assert [each.kind for each in shared] == [each.kind for each in lax]
    assert [each.default for each in shared] == [each.default for each in lax]
    assert {each.kind for each in ours[len(lax) :]} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("precision", [None, Precision.HIGHEST, "high", ("highest", "highest"), "F32_F32_F32"], ids=str)
def test_calls_as_of_lax(precision: Any, dtype: str) -> None:
    p = small(dtype)
    op = Linear(NAMES, result_dtype="float32")
    sizes = jnp.asarray(p.group_sizes)
    wanted = expect_linear(op, p.x, p.w, p.group_sizes)
    for function in (jg.ragged_dot, jax.lax.ragged_dot):
        by_position = function(p.x, p.w, sizes, precision, jnp.float32, None, None)
        by_name = function(
            lhs=jnp.asarray(p.x),
            rhs=jnp.asarray(p.w),
            group_sizes=sizes,
            precision=precision,
            preferred_element_type=jnp.float32,
            group_offset=None,
            out_sharding=None,
        )
        asserts.bitwise(by_position, by_name)
        if dtype == "bfloat16" or precision is not None or function is jg.ragged_dot:
            asserts.within(by_position, wanted, f"y of {function}")
    _, pullback = jax.vjp(lambda x, w: jg.ragged_dot(x, w, sizes, precision, jnp.float32), p.x, p.w)
    dy = p.dy.astype(np.float32)
    grads = expect_linear_grads(op, p.x, p.w, p.group_sizes, None, None, dy)
    for what, got, bounded in zip(("dx", "dw"), pullback(jnp.asarray(dy)), grads, strict=False):
        asserts.within(got, bounded, what)


@pytest.mark.rule("MAT-12")
@pytest.mark.parametrize(
    ("precision", "mode"),
    [
        (None, "tf32x3"),
        *((each, "ieee") for each in (*WANTS_IEEE, *PAIRS_WITH_HIGHEST)),
        *((each, "tf32x3") for each in (*WANTS_TF32X3, *WANTS_LESS)),
    ],
    ids=str,
)
def test_what_a_precision_asks_without_a_recipe(precision: Any, mode: str) -> None:
    assert modes(precision) == {mode}
    assert modes(precision=precision) == modes(recipe=jg.FP32.replace(fp32=mode))


@pytest.mark.rule("MAT-12")
@pytest.mark.parametrize("mode", FP32_MODES)
@pytest.mark.parametrize(
    ("precision", "least"), [(None, "tf32"), ("high", "tf32"), ("TF32_TF32_F32_X3", "tf32x3"), ("highest", "ieee")]
)
def test_a_precision_only_raises_the_mode_of_a_recipe(precision: Any, least: str, mode: str) -> None:
    assert FP32_MODES == ("tf32", "tf32x3", "ieee")
    recipe = jg.FP32.replace(fp32=mode)
    assert modes(precision, recipe=recipe) == {max(mode, least, key=FP32_MODES.index)}


@pytest.mark.rule("MAT-12")
def test_the_context_of_jax_changes_nothing() -> None:
    with jax.default_matmul_precision("highest"):
        assert modes() == {"tf32x3"}
    with jax.default_matmul_precision("bfloat16"):
        assert modes() == {"tf32x3"}
        assert modes("highest") == {"ieee"}


def test_explain_takes_a_precision() -> None:
    p = small()
    given = (jg.ragged_dot, p.x, p.w, p.group_sizes)
    assert jg.explain(*given, "highest") == jg.explain(*given, precision="highest")
    assert "`precision`" in (jg.why_unsupported(*given, "nonsense") or "")


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize(
    "precision",
    [
        *("nonsense", "HIGHEST", 2, True, 0.5, np.float32, (), ("highest",), ("high",) * 3, ("high", None)),
        *(("F32_F32_F32", "high"), [None, None], DotAlgorithm("nonsense", "bfloat16", "float32")),
    ],
    ids=str,
)
def test_what_is_no_precision_is_refused(precision: Any) -> None:
    p = small()
    parts = ["`precision`", repr(precision), "expected None, a jax.lax.Precision", "pass one of these"]
    with asserts.refused(ValueError, parts):
        jg.ragged_dot(p.x, p.w, p.group_sizes, precision)
    with pytest.raises((ValueError, TypeError)):  # neither does lax take it
        jax.block_until_ready(jax.lax.ragged_dot(p.x, p.w, jnp.asarray(p.group_sizes), precision))


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize(
    "precision",
    ["F64_F64_F64", DotAlgorithmPreset.F64_F64_F64, DotAlgorithm(np.float32, np.float32, np.float64)],
    ids=str,
)
def test_more_than_float32_is_refused(precision: Any) -> None:
    p = small()
    with asserts.refused(ValueError, ["`precision`", repr(precision), "expected at most float32", "pass 'highest'"]):
        jg.ragged_dot(p.x, p.w, p.group_sizes, precision)


@pytest.mark.rule("ERR-1", "GRP-14")
def test_what_lax_has_besides_is_refused_in_words() -> None:
    p = small()
    with asserts.refused(TypeError, ["`group_offset`: ndarray", "expected None", "slice `group_sizes`"]):
        jg.ragged_dot(p.x, p.w, p.group_sizes, None, None, np.zeros(1, np.int32))
    with asserts.refused(
        TypeError, [f"`out_sharding`: {type(P()).__name__}", "expected None", "inside `jax.shard_map`"]
    ):
        jg.ragged_dot(p.x, p.w, p.group_sizes, None, None, None, P())


@pytest.mark.gpu
@pytest.mark.rule("MAT-12")
def test_bits_are_those_of_the_mode() -> None:
    p = cases.problem(cases.named("jagged"), "float32")

    def both(*args: Any, **options: Any) -> Any:
        y, pullback = jax.vjp(lambda x, w: jg.ragged_dot(x, w, p.group_sizes, *args, **options), p.x, p.w)
        return y, *pullback(jnp.asarray(p.dy))

    with jax.default_device(jax.devices("cuda")[0]):
        for precision, mode in (("highest", "ieee"), (None, "tf32x3"), ("high", "tf32x3")):
            for got, wanted in zip(both(precision), both(recipe=jg.FP32.replace(fp32=mode)), strict=True):
                asserts.bitwise(got, wanted)
        if not jg.why_unsupported(jg.ragged_dot, p.x, p.w, p.group_sizes, implementation="grouped_matmul_fp32_sm90"):
            assert np.any(np.asarray(both("highest")[0]) != np.asarray(both()[0]))
