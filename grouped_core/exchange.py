"""Expert parallelism: what the ranks of an exchange send each other, whichever library moves it.

Each of P ranks holds T tokens and E / P of the E experts, rank r those from r E / P on. A rank sorts its slots by
expert, then token, then place, and gives every rank at most B of them, its budget: one buffer of P B rows in which the
part of rank d starts at row d B (`send_order`). An all-to-all of these parts gives each rank a buffer of P B rows
again, the part of source s at row s B, with the expert of each row, or -1 where a budget was not used up. These are
tokens with one expert each, so the experts run on them as on any tokens (`grouped_core.routed`), and sort them by local
expert, then source rank, then token: the order of all tokens on one rank, whose bits follow (docs/contracts.md, LYR-9,
LYR-10). Results go back the same way and are summed per token.

With `once_per_rank` a token is sent to a rank at most once, with the numbers and weights of its experts there. What
arrives are tokens with j experts each, j = min(k, E / P), whose results are summed and rounded where they are computed,
so that one row per token and rank goes back (LYR-18).

Letters: P ranks, T tokens of a rank, k experts per token, E experts, B rows of the budget, j experts of a row at most,
H columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from grouped_core import routing, routing_calls
from grouped_core.calls import MAX_GROUPS, ArraySpec
from grouped_core.formats import WIDE, Format
from grouped_core.products import Array, Runner
from grouped_core.ranks import check_rank
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.routing_spec import as_float

ALIGN = 8
"""A budget that follows from a factor is a multiple of this many rows, so that the part of each rank is aligned."""


SENDS = (None, "tokens", "codes")
"""What travels to the experts: tokens, their codes, or codes where the recipe allows it."""


@dataclass(frozen=True)
class Exchange:
    """The static facts of an exchange, checked by `exchange_option`.

    Attributes:
        ranks: P. experts: E, of all ranks. tokens: T, of this rank. slots: k.
        budget: B, rows that one rank sends to one rank at most.
        once_per_rank: whether a token is sent to a rank once, for all its experts there, instead of once for each.
        slot_budget: with `once_per_rank` and a budget factor, the budget without it.
    """

    ranks: int
    experts: int
    tokens: int
    slots: int
    budget: int
    once_per_rank: bool = False
    slot_budget: int | None = None

    @property
    def own(self) -> int:
        """Experts of each rank, E / P."""
        return self.experts // self.ranks

    @property
    def rows(self) -> int:
        """Rows that a rank sends, and those that it receives, unused ones too."""
        return self.ranks * self.budget

    @property
    def slots_of_row(self) -> int:
        """j, the most experts of the receiving rank that one row can have, if no token chooses an expert twice."""
        return min(self.slots, self.own) if self.once_per_rank else 1

    @property
    def max_rows(self) -> int | None:
        """How many rows the experts of a rank have room for: as many as without `once_per_rank`; None: one per slot."""
        if self.slot_budget is None or self.slot_budget >= self.budget * self.slots_of_row:
            return None
        return self.ranks * self.slot_budget


def exchange_option(
    function: str,
    *,
    ranks: int,
    experts: int,
    tokens: int,
    slots: int,
    budget_factor: float | None = None,
    once_per_rank: bool = False,
) -> Exchange:
    """The facts of the exchange that `function` asks for.

    Args:
        budget_factor: a rank sends to one rank at most this many times the mean number of rows, rounded up; None: as
            many as there can be if no token chooses an expert twice.
        once_per_rank: whether a token is sent to a rank once, for all its experts there. A rank then sends at most T
            rows to one rank, and T (1 - C(E - E / P, k) / C(E, k)) on average if choices are uniform. If a token is
            sent once for each expert, these numbers are T min(k, E / P) and T k / P.

    Raises:
        ValueError: ranks do not divide the experts, or the factor is out of range.
    """
    own = own_experts(function, experts, ranks)
    factor = check_budget_factor(function, budget_factor)
    most, wanted = tokens * min(slots, own), None if factor is None else factor * tokens * slots / ranks
    of_slots = _budget(wanted, most)
    if not once_per_rank:
        return Exchange(ranks, experts, tokens, slots, of_slots)
    wanted = None if factor is None else factor * tokens * _reach(experts, own, slots)
    budget = _budget(wanted, tokens)
    return Exchange(ranks, experts, tokens, slots, budget, once_per_rank, None if factor is None else of_slots)


def _budget(wanted: float | None, most: int) -> int:
    """B: the rows `wanted`, rounded up, but not more than `most`, the rows that there can be; None asks for `most`."""
    most = max(1, most)
    return most if wanted is None else min(most, max(ALIGN, -(-math.ceil(wanted) // ALIGN) * ALIGN))


def _reach(experts: int, own: int, slots: int) -> float:
    """The probability that `slots` different experts, drawn uniformly, include one of the `own` experts of a rank."""
    drawn = min(slots, experts)
    return 1 - math.comb(experts - own, drawn) / math.comb(experts, drawn)


def own_experts(function: str, experts: int, ranks: int) -> int:
    """Experts of each rank.

    Raises:
        ValueError: ranks do not divide the experts.
    """
    if not 1 <= experts <= MAX_GROUPS:
        raise ValueError(f"experts of {function}: {experts}, expected 1 to {MAX_GROUPS}; use fewer.")
    if experts % ranks:
        raise ValueError(
            f"experts of {function}: {experts} over {ranks} ranks, expected a multiple of {ranks}; give every rank "
            "equally many, or make the axis of experts smaller."
        )
    return experts // ranks


def check_budget_factor(function: str, factor: Any) -> float | None:
    """A factor as a Python float; refuses one that gives no budget.

    Raises:
        TypeError: it is not a number. ValueError: it is not finite, or not above 0.
    """
    if factor is None:
        return None
    found = as_float(function, "budget_factor", factor)
    if not 0 < found < math.inf:
        raise ValueError(
            f"`budget_factor` of {function}: {factor}, expected None or a finite number above 0; 2.0 leaves room for "
            "twice the mean, None for every row."
        )
    return found


def format_sent(
    function: str, send: str | None, recipe: Recipe | BoundRecipe | None, *, adapted: bool = False
) -> Format | None:
    """The format that tokens travel in; None: as they are.

    Args:
        adapted: whether the experts have adapters, which read the tokens themselves.

    Raises:
        ValueError: `send` has another value; or it asks for codes although the experts have adapters, or the scales of
            the recipe are not those of single rows.
    """
    if send not in SENDS:
        raise ValueError(
            f"`send` of {function}: {send!r}, expected None, 'tokens' or 'codes'; None sends codes where the recipe "
            "allows it."
        )
    if isinstance(recipe, BoundRecipe):
        recipe = recipe.recipe
    if adapted and send == "codes":
        raise ValueError(
            f"`send` of {function}: 'codes' beside `lora`, expected None or 'tokens'; adapters read tokens."
        )
    if adapted or send == "tokens":
        return None
    fmt = recipe.forward[0] if isinstance(recipe, Recipe) else None  # the experts refuse what is none
    if fmt is not None and fmt.by_row:
        return fmt
    if send is None:
        return None
    raise ValueError(
        f"`send` of {function}: 'codes' with recipe {None if recipe is None else recipe.name}, expected one whose "
        "scales are those of single rows, such as FP8Block or MXFP8; use send=None, which then sends tokens."
    )


def check_dispatch(function: str, x: ArraySpec, experts: ArraySpec, weights: ArraySpec) -> None:
    """Checks the arguments of `dispatch`, x [T, H], experts and weights [T, k].

    Raises:
        TypeError: dtypes. ValueError: shapes.
    """
    for name, spec in (("x", x), ("experts", experts), ("weights", weights)):
        check_rank("dispatch", name, name, spec.shape, of=function)
    if not experts.dtype.startswith(("int", "uint")):
        raise TypeError(f"`experts` of {function}: dtype {experts.dtype}, expected integers; pass numbers of experts.")
    for name, spec in (("x", x), ("weights", weights)):
        if spec.dtype not in WIDE:
            raise TypeError(f"`{name}` of {function}: dtype {spec.dtype}, expected one of {', '.join(WIDE)}; cast it.")
        tokens = spec.shape[: 1 if name == "x" else 2]
        if tokens != experts.shape[: len(tokens)]:
            raise ValueError(
                f"`{name}` of {function}: shape {tuple(spec.shape)}, expected one entry for each of those of "
                f"`experts`, {tuple(experts.shape)}; route these tokens."
            )


def check_combine(function: str, y: ArraySpec, rows: int) -> None:
    """Checks the argument of `combine`, y [M, H], of an exchange with so many rows.

    Raises:
        TypeError: its dtype. ValueError: its shape.
    """
    check_rank("combine", "y", "y", y.shape, of=function)
    if y.dtype not in WIDE:
        raise TypeError(f"`y` of {function}: dtype {y.dtype}, expected one of {', '.join(WIDE)}; cast it.")
    if y.shape[0] != rows:
        raise ValueError(f"`y` of {function}: {y.shape[0]} rows, expected {rows}; give all rows of `dispatch`.")


class Sent(NamedTuple):
    """What a rank sends, and where each slot is in it.

    Attributes:
        sizes: int32 [E], rows that are sent to each expert, in the order of ranks and of the experts of each rank. With
            `once_per_rank` int32 [P], rows that are sent to each rank.
        source: int32 [P B], slot of each row, -1 for none; with `once_per_rank` the first of its slots.
        experts: int32 [P B j], experts of each row, counted from the first one of the rank that gets it, -1 for none.
        inverse: int32 [T, k], row of each slot that is the `source` of a row, -1 for the other slots.
        dropped: int32 [1], how many slots have an expert but are not sent.
        probs: float32 [P B j], the weights of these experts, 0 for none; None without weights.
        entries: int32 [T, k], place of each slot in `experts` and `probs`, -1 for none; None if it equals `inverse`.
    """

    sizes: Array
    source: Array
    experts: Array
    inverse: Array
    dropped: Array
    probs: Array | None
    entries: Array | None = None


def send_order(run: Runner, op: Exchange, experts: Array, weights: Array | None = None) -> Sent:
    """Which slots of `experts` [T, k] are sent in which rows to which ranks, with `weights` [T, k].

    The rows are `routing.gather(run, x, sent.source, k)`; results that came back in their places are summed per token
    by `routing.combine(run, rows, sent.inverse, dtype)`. Each is the gradient of the other; that of the weights is
    `routing.of_slots` of the gradient of `probs`. `experts` and `probs` have the axes of the native calls, [P B] or
    [P B, j].
    """
    wide = None if weights is None else run.cast(weights, "float32")
    if not op.once_per_rank:
        return _cut(run, op, experts, op.experts, wide)
    call = routing_calls.rank_slots(run.spec(experts), op.experts, op.ranks)
    (ranks,) = run(call, call.arrange(experts=experts))
    sent = _cut(run, op, ranks, op.ranks, None)
    facts = (op.experts, op.ranks, op.slots_of_row)
    call = routing_calls.row_slots(run.spec(experts), run.spec(sent.source), *facts, weights=wide is not None)
    arrays = {"experts": experts, "sent": sent.source, "places": sent.inverse, "weights": wide}
    local, entries, dropped, probs = run(call, call.arrange(**arrays))
    return sent._replace(experts=local, dropped=dropped, probs=probs, entries=entries)


def _cut(run: Runner, op: Exchange, groups: Array, count: int, weights: Array | None) -> Sent:
    """Sorts the slots by group, one of `count`, and cuts this order into the rows that each rank gets."""
    order = routing.order(run, groups, count, op.tokens * op.slots)
    specs = (run.spec(each) for each in (order.sizes, order.source, order.inverse))
    call = routing_calls.send_order(*specs, op.ranks, op.budget, weights=weights is not None)
    arrays = {"group_sizes": order.sizes, "source": order.source, "inverse": order.inverse, "weights": weights}
    return Sent(*run(call, call.arrange(**arrays)))
