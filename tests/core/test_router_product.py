"""The router's product and its gradients: what they compute, and that they are as accurate as products of float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from grouped_core import router_product
from grouped_core.arrays import ArrayRunner
from grouped_core.calls import spec_of
from grouped_core.linear_spec import Linear, Names
from grouped_core.reference import Oracle
from tests import asserts, bounds, cases
from tests.bounds import Bounded

T, H = 70, 200


def _case(experts: int, x_dtype: str, router_dtype: str, transposed: bool, spread: int) -> dict[str, NDArray[Any]]:
    """Operands; the router's values spread over 2^`spread`, so that small ones beside large ones count."""
    weight = cases.normal((experts, H), "float32", "weight") * np.exp2(np.arange(H) % (spread + 1) - spread)
    weight = weight.astype(cases.numpy_dtype(router_dtype))
    return {
        "x": cases.normal((T, H), "float32", "x").astype(cases.numpy_dtype(x_dtype)),
        "router": np.ascontiguousarray(weight if transposed else weight.T)[None],
        "d_logits": cases.normal((T, experts), "float32", "d").astype(np.float32),
    }


def _run(run: Any, op: Linear, o: dict[str, Any], needs: tuple[bool, bool] = (True, True)) -> list[Any]:
    tokens = np.array([len(o["x"])], np.int32)
    specs = (spec_of(o["x"]), spec_of(o["router"]))
    logits = router_product.router_logits(run, op, o["x"], o["router"], tokens)
    x, router = o["x"] if needs[1] else None, o["router"] if needs[0] else None
    return [logits, *router_product.router_grads(run, op, specs, x, router, tokens, o["d_logits"], needs)]


def _expected(o: dict[str, Any], transposed: bool) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Logits and both gradients in float64, each beside the same of magnitudes."""

    def products(x: Any, w: Any, d: Any) -> list[NDArray[np.float64]]:
        dw = d.T @ x
        return [x @ w.T, d @ w, (dw if transposed else dw.T)[None]]

    router = o["router"][0].astype(np.float64)
    given = o["x"].astype(np.float64), router if transposed else router.T, o["d_logits"].astype(np.float64)
    return list(zip(products(*given), products(*map(np.abs, given)), strict=True))


@pytest.mark.rule("LYR-1")
@pytest.mark.matrix(
    experts=(8, 24, 5),
    x_dtype=("float32", "bfloat16", "float16"),
    router_dtype=("float32", "bfloat16"),
    transposed=(False, True),
    spread=(0, 20),
)
def test_products_are_those_of_float32(experts, x_dtype, router_dtype, transposed, spread):
    o = _case(experts, x_dtype, router_dtype, transposed, spread)
    found = _run(ArrayRunner(o["x"]), Linear(Names("x", "router"), transposed=transposed), o)
    dtypes = ("float32", x_dtype, router_dtype)
    terms = (3 * H, 6 * experts, T)
    for result, (value, size), dtype, count in zip(found, _expected(o, transposed), dtypes, terms, strict=True):
        error = (bounds.gamma(count, "bfloat16", "") + bounds.LEFT_OUT) * size
        asserts.within(result, Bounded(value, error + bounds.half_ulp(np.abs(value) + error, dtype), dtype))


@pytest.mark.parametrize("transposed", [False, True])
def test_the_rule_without_rounding(transposed):
    o = _case(8, "float32", "float32", transposed, 0)
    found = _run(Oracle(exact=True), Linear(Names("x", "router"), transposed=transposed), o)
    for result, (value, size) in zip(found, _expected(o, transposed), strict=True):
        np.testing.assert_allclose(result, value, rtol=0, atol=bounds.ORACLES * size.max())


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("experts", [8, 5])
def test_gradients_that_are_not_needed_are_not_computed(needs, experts):
    o = _case(experts, "bfloat16", "float32", True, 0)
    op, run = Linear(Names("x", "router"), transposed=True), ArrayRunner(o["x"])
    _, dx, dw = _run(run, op, o)
    _, *found = _run(run, op, o, needs)
    for each, whole, needed in zip(found, (dx, dw), needs, strict=True):
        if needed:
            asserts.bitwise(each, whole)
        else:
            assert each is None


def test_a_bad_logit_stays_with_its_token_and_expert():
    """An infinite weight gives infinite logits of its expert, not NaN."""
    o = _case(8, "bfloat16", "float32", True, 0)
    o["router"][0, 3] = 0
    o["router"][0, 3, 0] = np.inf
    o["x"][:, 0] = 1
    logits = _run(ArrayRunner(o["x"]), Linear(Names("x", "router"), transposed=True), o, (False, False))[0]
    assert (logits[:, 3] == np.inf).all()
    assert np.isfinite(np.delete(logits, 3, axis=1)).all()
