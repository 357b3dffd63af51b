"""The exchange of expert parallelism on lists of ranks in NumPy: where rows go, and the bits of one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from grouped_core import exchange, reference_exchange, routed, routing
from grouped_core.activations import Activation
from grouped_core.calls import ArraySpec
from grouped_core.exchange import Exchange, exchange_option
from grouped_core.mlp_spec import Mlp, MlpNames
from grouped_core.recipes import Recipe, plain
from grouped_core.reference import Oracle
from tests import asserts, cases

T, E, K, H, F = 12, 8, 3, 6, 4
RUN = Oracle()


def choices(ranks: int, *, missing: float = 0.1, skewed: bool = False) -> list[NDArray[np.int32]]:
    """[T, k] distinct experts of each rank's tokens, some of them none; skewed: the low ones more often."""
    random = np.random.default_rng(ranks)
    found = []
    for _ in range(ranks):
        order = random.random((T, E)) + (np.arange(E) / 4 if skewed else 0)
        chosen = np.argsort(order, axis=1)[:, :K].astype(np.int32)
        found.append(np.where(random.random((T, K)) < missing, -1, chosen).astype(np.int32))
    return found


def option(ranks: int, factor: float | None = None) -> Exchange:
    return exchange_option("test", ranks=ranks, experts=E, tokens=T, slots=K, budget_factor=factor)


@pytest.mark.rule("LYR-9", "LYR-10")
@pytest.mark.parametrize("factor", [None, 0.1, 0.7, 2.0])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_rows_arrive_where_the_definition_says(ranks: int, factor: float | None) -> None:
    op, experts = option(ranks, factor), choices(ranks, skewed=True)
    expected, dropped = reference_exchange.exchange(op, experts)
    sent = [exchange.send_order(RUN, op, chosen, np.abs(cases.normal((T, K), "float32", "w"))) for chosen in experts]
    assert [int(each.dropped[0]) for each in sent] == dropped
    assert any(dropped) == (factor in (0.1, 0.7))
    slots, ids = ([getattr(each, name) for each in sent] for name in ("source", "experts"))
    arrived = zip(reference_exchange.all_to_all(slots), reference_exchange.all_to_all(ids), strict=True)
    for rank, (of_slots, of_ids) in enumerate(arrived):
        np.testing.assert_array_equal(of_slots, expected[rank].slots)
        np.testing.assert_array_equal(of_ids, expected[rank].experts)
    for each in sent:
        rows = each.inverse.reshape(-1)
        np.testing.assert_array_equal(each.source[rows[rows >= 0]], np.flatnonzero(rows >= 0))
        assert each.sizes.sum() == (each.source >= 0).sum()


def forward(op: Mlp, x: Any, experts: Any, weights: Any, wi: Any, wo: Any) -> Any:
    tokens = np.array([len(x)], np.int32)
    return routed.forward(RUN, op, x, experts, weights, wi, wo, tokens).y


@pytest.mark.rule("LYR-9")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_layer_has_the_bits_of_one_rank(ranks: int, dtype: str) -> None:
    recipe: Recipe = plain(dtype, dtype)
    op = Mlp(MlpNames(), Activation("swiglu"), recipe=recipe)
    experts = choices(ranks)
    x = [cases.normal((T, H), dtype, "x", rank) for rank in range(ranks)]
    weights = [np.abs(cases.normal((T, K), "float32", "w", rank)) for rank in range(ranks)]
    wi, wo = cases.normal((E, H, 2 * F), dtype, "wi"), cases.normal((E, F, H), dtype, "wo")
    whole = forward(op, np.concatenate(x), np.concatenate(experts), np.concatenate(weights), wi, wo)
    facts = option(ranks)
    sent = [exchange.send_order(RUN, facts, *each) for each in zip(experts, weights, strict=True)]
    rows = [routing.gather(RUN, tokens, each.source, K) for tokens, each in zip(x, sent, strict=True)]
    ids, probs = ([getattr(each, name) for each in sent] for name in ("experts", "probs"))
    arrived = [reference_exchange.all_to_all(each) for each in (rows, ids, probs)]
    results = []
    for rank, (tokens, chosen, weight) in enumerate(zip(*arrived, strict=True)):
        own = slice(rank * facts.own, (rank + 1) * facts.own)
        results.append(forward(op, tokens, chosen[:, None], weight[:, None], wi[own], wo[own]))
    back = reference_exchange.all_to_all(results)
    found = [routing.combine(RUN, y, each.inverse, dtype) for y, each in zip(back, sent, strict=True)]
    asserts.bitwise(np.concatenate(found), whole)


@pytest.mark.rule("LYR-10")
def test_budgets() -> None:
    """The worst case, and a factor of the mean, rounded up and at most the worst case."""
    assert option(1).budget == T * K
    assert option(4).budget == T * 2
    assert option(8).budget == T
    assert option(4, 1.0).budget == 16  # of 9 rows
    assert option(2, 0.01).budget == 8
    assert option(4, 100.0).budget == T * 2
    none = exchange_option("test", ranks=4, experts=E, tokens=0, slots=K)
    assert (none.budget, none.rows) == (1, 4)


@pytest.mark.rule("ERR-1", "LYR-9")
def test_refusals() -> None:
    with asserts.refused(ValueError, ("experts of test", "8 over 3 ranks", "a multiple of 3", "give every rank")):
        option(3)
    x, chosen, weights = ArraySpec((T, H), "float32"), ArraySpec((T, K), "int32"), ArraySpec((T, K), "float32")
    exchange.check_dispatch("test", x, chosen, weights)
    few = ArraySpec((T - 1, H), "float32")
    with asserts.refused(ValueError, ("`x` of test", "(11, 6)", "`experts`, (12, 3)", "route these tokens")):
        exchange.check_dispatch("test", few, chosen, weights)
    with asserts.refused(ValueError, ("`weights` of test", "(12, 6)", "`experts`, (12, 3)", "route these tokens")):
        exchange.check_dispatch("test", x, chosen, x)
    with asserts.refused(TypeError, ("`experts` of test", "float32", "integers", "numbers of experts")):
        exchange.check_dispatch("test", x, weights, weights)
    with asserts.refused(TypeError, ("`weights` of test", "int32", "float32", "cast it")):
        exchange.check_dispatch("test", x, chosen, chosen)
    with asserts.refused(ValueError, ("`y` of test", "11 rows", "expected 12", "all rows of `dispatch`")):
        exchange.check_combine("test", few, T)
    with asserts.refused(TypeError, ("`y` of test", "int32", "float32", "cast it")):
        exchange.check_combine("test", chosen, T)
    for factor in (0.0, -1.0, float("inf"), float("nan")):
        with asserts.refused(ValueError, ("`budget_factor` of test", str(factor), "above 0", "2.0 leaves room")):
            option(2, factor)
