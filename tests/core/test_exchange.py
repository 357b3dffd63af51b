"""The exchange of expert parallelism on lists of ranks in NumPy: where rows go, and the bits of one rank."""

from __future__ import annotations

import itertools
import math
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
from tests import asserts, bounds, cases

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


def option(ranks: int, factor: float | None = None, *, once_per_rank: bool = False) -> Exchange:
    return exchange_option(
        "test", ranks=ranks, experts=E, tokens=T, slots=K, budget_factor=factor, once_per_rank=once_per_rank
    )


@pytest.mark.rule("LYR-9", "LYR-10", "LYR-18")
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("factor", [None, 0.1, 0.7, 2.0])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_rows_arrive_where_the_definition_says(ranks: int, factor: float | None, once: bool) -> None:
    op, experts = option(ranks, factor, once_per_rank=once), choices(ranks, skewed=True)
    dropped = check_rows(op, experts)
    # A token that goes to its only rank once is one of T rows, and the smallest budget is 8 of these 12.
    assert any(dropped) == (factor in (0.1, 0.7) and (ranks, factor, once) != (1, 0.7, True))


@pytest.mark.rule("LYR-18")
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_experts_that_a_token_has_twice(ranks: int, once: bool) -> None:
    """They share a row, as others of a rank do, up to the experts of a rank; the second of its only one is dropped."""
    experts = [np.where(np.arange(T)[:, None] % 2 == 0, each[:, :1], each) for each in choices(ranks)]
    dropped = check_rows(option(ranks, once_per_rank=once), experts)
    assert any(dropped) == (once and ranks > 2)


@pytest.mark.rule("LYR-18", "LYR-11")
@pytest.mark.parametrize("once", [False, True])
def test_ranks_that_nothing_goes_to_or_comes_from(once: bool) -> None:
    experts = [np.full((T, K), -1, np.int32) for _ in range(4)]
    experts[1][:, 0], experts[1][:, 2] = 2, 3
    assert check_rows(option(4, once_per_rank=once), experts) == [0] * 4


def check_rows(op: Exchange, experts: list[NDArray[np.int32]]) -> list[int]:
    """Compares what ranks send with the definition, row by row and slot by slot. Returns what they drop."""
    expected, dropped = reference_exchange.exchange(op, experts)
    weights = [np.abs(cases.normal((T, K), "float32", "w", rank)) for rank in range(op.ranks)]
    sent: list[Any] = [exchange.send_order(RUN, op, *each) for each in zip(experts, weights, strict=True)]
    assert [int(each.dropped[0]) for each in sent] == dropped
    several = (op.rows, op.slots_of_row)
    arrays = [
        [each.source for each in sent],
        [each.experts.reshape(several) for each in sent],
        [each.probs.reshape(several) for each in sent],
    ]
    arrived = zip(*(reference_exchange.all_to_all(each) for each in arrays), strict=True)
    for want, (of_slots, of_ids, of_probs) in zip(expected, arrived, strict=True):
        np.testing.assert_array_equal(of_slots, want.slots[:, 0])
        np.testing.assert_array_equal(of_ids, want.experts)
        whole = np.stack(weights).reshape(op.ranks, -1)
        probs = np.where(want.slots >= 0, whole[want.ranks[:, None], want.slots], 0)
        asserts.bitwise(of_probs, probs.astype(np.float32), "weights of rows")
    kept = reference_exchange.travelled(op, expected)
    for rank, each in enumerate(sent):
        rows = each.inverse.reshape(-1)
        np.testing.assert_array_equal(each.source[rows[rows >= 0]], np.flatnonzero(rows >= 0))
        assert each.sizes.sum() == (each.source >= 0).sum() == (rows >= 0).sum()
        entries = each.inverse if each.entries is None else each.entries
        np.testing.assert_array_equal(entries >= 0, kept[rank])
        found = routing.of_slots(RUN, each.probs.reshape(-1), entries, "float32")
        asserts.bitwise(found, np.where(kept[rank], weights[rank], np.float32(0)), "weights that come back")
    return dropped


def forward(op: Mlp, x: Any, experts: Any, weights: Any, wi: Any, wo: Any) -> Any:
    tokens = np.array([len(x)], np.int32)
    return routed.forward(RUN, op, x, experts, weights, wi, wo, tokens).y


@pytest.mark.rule("LYR-9", "LYR-18")
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_layer_has_the_bits_of_one_rank(ranks: int, dtype: str, once: bool) -> None:
    """Once per rank where no token has two experts on one; otherwise within roundings of the sums of ranks."""
    recipe: Recipe = plain(dtype, dtype)
    op = Mlp(MlpNames(), Activation("swiglu"), recipe=recipe)
    experts = choices(ranks)
    x = [cases.normal((T, H), dtype, "x", rank) for rank in range(ranks)]
    weights = [np.abs(cases.normal((T, K), "float32", "w", rank)) for rank in range(ranks)]
    wi, wo = cases.normal((E, H, 2 * F), dtype, "wi"), cases.normal((E, F, H), dtype, "wo")
    tokens, chosen, probs = (np.concatenate(each) for each in (x, experts, weights))
    whole = forward(op, tokens, chosen, probs, wi, wo)
    facts = option(ranks, once_per_rank=once)
    several = (facts.rows, facts.slots_of_row)
    sent = [exchange.send_order(RUN, facts, *each) for each in zip(experts, weights, strict=True)]
    rows = [routing.gather(RUN, tokens, each.source, K) for tokens, each in zip(x, sent, strict=True)]
    ids, of_rows = ([getattr(each, name).reshape(several) for each in sent] for name in ("experts", "probs"))
    arrived = [reference_exchange.all_to_all(each) for each in (rows, ids, of_rows)]
    results = []
    for rank, (came, local, weight) in enumerate(zip(*arrived, strict=True)):
        own = slice(rank * facts.own, (rank + 1) * facts.own)
        results.append(forward(op, came, local, weight, wi[own], wo[own]))
    back = reference_exchange.all_to_all(results)
    found = [routing.combine(RUN, y, each.inverse, dtype) for y, each in zip(back, sent, strict=True)]
    if not once or ranks in (1, E):
        asserts.bitwise(np.concatenate(found), whole)
        return
    parts = [forward(op, tokens, chosen[:, j : j + 1], probs[:, j : j + 1], wi, wo) for j in range(K)]
    error = bounds.of_partial_sums(np.stack(parts), dtype)
    asserts.within(np.concatenate(found), bounds.Bounded(whole.astype(np.float64), error, dtype), "y")


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


@pytest.mark.rule("LYR-10", "LYR-18")
def test_budgets_of_tokens() -> None:
    """At most T rows once per rank; the mean is that of uniform choices of different experts."""
    for ranks, slots in ((1, K), (2, K), (4, 2), (8, 1)):
        assert (option(ranks, once_per_rank=True).budget, option(ranks, once_per_rank=True).slots_of_row) == (T, slots)
    assert option(4, 100.0, once_per_rank=True).budget == T
    assert option(4, 0.01, once_per_rank=True).budget == 8
    large = {"ranks": 4, "experts": E, "tokens": 1000, "slots": K}
    every = list(itertools.combinations(range(E), K))
    reached = sum(any(each < E // 4 for each in chosen) for chosen in every) / len(every)
    assert (
        exchange_option("test", **large, budget_factor=1.0, once_per_rank=True).budget
        == math.ceil(1000 * reached / 8) * 8
    )
    assert (
        exchange_option("test", **large, budget_factor=1.2, once_per_rank=True).budget
        == math.ceil(1200 * reached / 8) * 8
    )
    # As many slots as other ranks have experts, or more: a token then reaches every rank.
    for slots in (E - 1, E, E + 1):
        facts = exchange_option("test", **large | {"slots": slots}, budget_factor=1.0, once_per_rank=True)
        assert (facts.budget, facts.slots_of_row) == (1000, 2)
    none = exchange_option("test", ranks=4, experts=E, tokens=0, slots=K, once_per_rank=True)
    assert (none.budget, none.rows) == (1, 4)


@pytest.mark.rule("LYR-18", "LYR-10")
def test_rows_of_experts_have_the_room_of_a_budget_of_slots() -> None:
    large = {"ranks": 4, "experts": 64, "tokens": 1000, "slots": 8}
    for factor in (0.5, 1.25):
        apart, once = (
            exchange_option("test", **large, budget_factor=factor, once_per_rank=each) for each in (False, True)
        )
        assert (apart.max_rows, once.max_rows) == (None, apart.rows)
    # Without a factor there is room for all; so there is where a rank has one expert, and rows one slot each.
    assert exchange_option("test", **large, once_per_rank=True).max_rows is None
    assert exchange_option("test", **large | {"experts": 4}, budget_factor=100.0, once_per_rank=True).max_rows is None


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
