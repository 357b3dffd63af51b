"""Static options of routing, and the checks of its arguments.

Letters: T tokens, E experts, k experts per token, S sequences, M rows, H columns, G groups.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grouped_core.calls import MAX_GROUPS, ArraySpec, OperandSpec, QuantizedSpec
from grouped_core.formats import WIDE, as_flag, is_finite
from grouped_core.hashing import hashed_once
from grouped_core.ranks import check_rank
from grouped_core.recipes import Recipe
from grouped_core.routing_calls import MAX_BINS, MAX_EXPERTS, MAX_SLOTS, SCORES, GroupLimit, Scores
from grouped_core.schema import schema

DROPS = ("probs", "position")
"""Which slots an expert beyond its capacity drops: those with the smallest weights, or the last ones."""

MAX_SINKHORN = 1024

ROWS = schema("gather_rows").inputs["rows"].dtypes
"""Element types of rows that are copied and not computed with."""


@hashed_once
@dataclass(frozen=True)
class Router:
    """Options of `topk_router`, checked by `router_option`.

    Attributes:
        k: experts per token. scores: how scores and weights follow from logits. limit: which groups of experts take
            part.
        jitter: logits are multiplied by random factors of 1 - jitter to 1 + jitter.
        sinkhorn: iterations; experts are then ranked by the balanced values, not by their scores.
        capacity_factor: each expert takes at most ceil(T k capacity_factor / E) slots; None: any number.
        drop: one of `DROPS`. aux_coeff, z_coeff: the coefficients of the two losses.
    """

    k: int
    scores: Scores
    limit: GroupLimit
    jitter: float
    sinkhorn: int
    capacity_factor: float | None
    drop: str
    aux_coeff: float
    z_coeff: float

    @property
    def has_losses(self) -> bool:
        """Whether a loss has a gradient: the losses of coefficients 0 are constants and take no part in backward, where
        0 times an infinite logit would be NaN.
        """
        return self.aux_coeff != 0 or self.z_coeff != 0

    @property
    def reads_logits(self) -> bool:
        """Whether the gradient of the logits reads them. That of weights which are a softmax over the chosen experts
        follows from the weights.
        """
        of_chosen = self.scores.score == "softmax" and (self.scores.after_topk or self.scores.normalize)
        return not of_chosen or self.scores.scale == 0 or self.has_losses

    def capacity(self, tokens: int, experts: int) -> int | None:
        """Slots per expert; None: as many as there are."""
        if self.capacity_factor is None:
            return None
        slots = tokens * self.k
        return max(1, min(slots, math.ceil(slots * self.capacity_factor / experts)))


def router_option(
    experts: int,
    k: int,
    *,
    score: str = "softmax",
    after_topk: bool = False,
    normalize: bool | None = None,
    scale: float = 1.0,
    num_groups: int | None = None,
    topk_groups: int | None = None,
    group_topk: int | None = None,
    jitter: float = 0.0,
    sinkhorn: int = 0,
    capacity_factor: float | None = None,
    drop: str = "probs",
    aux_coeff: float = 0.0,
    z_coeff: float = 0.0,
) -> Router:
    """The options of `topk_router` for E = `experts`; layers call it when they are made.

    Raises:
        TypeError: an option that counts something is not an integer. ValueError: an option is out of range, or two
            contradict each other.
    """
    k, sinkhorn = counts("topk_router", k=k, sinkhorn=sinkhorn)
    num_groups, topk_groups, group_topk = integers(
        "topk_router", num_groups=num_groups, topk_groups=topk_groups, group_topk=group_topk
    )
    if score not in SCORES:
        raise _wrong("score", repr(score), f"one of {', '.join(SCORES)}", "choose one of them")
    if not 1 <= experts <= MAX_EXPERTS:
        raise _wrong("logits", f"{experts} experts", f"1 to {MAX_EXPERTS}", "route in two steps, or to fewer experts")
    if not 1 <= k <= min(experts, MAX_SLOTS):
        most = f"1 to {min(experts, MAX_SLOTS)}, at most one slot per expert and {MAX_SLOTS}"
        raise _wrong("k", k, most, "choose a smaller k")
    factors = {"scale": scale, "aux_coeff": aux_coeff, "z_coeff": z_coeff, "jitter": jitter}
    # -0.0 becomes 0.0, which has the same key in caches.
    scale, aux_coeff, z_coeff, jitter = [each + 0.0 for each in numbers("topk_router", **factors)]
    after_topk = as_flag("after_topk", after_topk)
    if after_topk and score != "softmax":
        words = "its default, because only a softmax can be taken over the chosen experts instead of all"
        remedy = "leave it out, or pass score='softmax'; `normalize` says whether the weights of the others sum to 1"
        raise _wrong("after_topk", f"True with score {score!r}", words, remedy)
    if after_topk and k == 1:
        words = "k of 2 or more, because a softmax over one expert is always 1 and the router would not learn"
        raise _wrong("after_topk", "True with k = 1", words, "use after_topk=False")
    if not 0 <= jitter < 1:
        raise _wrong("jitter", jitter, "0 to 1, without 1", "choose a small one, e.g. 0.01")
    if not 0 <= sinkhorn <= MAX_SINKHORN:
        raise _wrong("sinkhorn", sinkhorn, f"0 to {MAX_SINKHORN} iterations", "choose e.g. 8")
    factor = None if capacity_factor is None else numbers("topk_router", capacity_factor=capacity_factor)[0]
    if factor is not None and factor <= 0:
        raise _wrong("capacity_factor", capacity_factor, "None or a finite number above 0", "1.25 is usual")
    if drop not in DROPS:
        raise _wrong("drop", repr(drop), f"one of {', '.join(DROPS)}", "choose one of them")
    limit = _group_limit(experts, k, num_groups, topk_groups, group_topk)
    normalize = score != "softmax" and k > 1 if normalize is None else as_flag("normalize", normalize)
    scores = Scores(score, after_topk, normalize and not after_topk, scale)
    return Router(k, scores, limit, jitter, sinkhorn, factor, drop, aux_coeff, z_coeff)


def _group_limit(
    experts: int, k: int, num_groups: int | None, topk_groups: int | None, group_topk: int | None
) -> GroupLimit:
    if (num_groups is None) != (topk_groups is None):
        given = "num_groups" if topk_groups is None else "topk_groups"
        raise _wrong(given, "given alone", "num_groups and topk_groups together", "pass both, or neither")
    if num_groups is None or topk_groups is None:
        if group_topk is not None:
            raise _wrong("group_topk", group_topk, "None without num_groups", "pass num_groups and topk_groups too")
        return GroupLimit()
    if not 1 <= num_groups <= experts or experts % num_groups:
        raise _wrong("num_groups", num_groups, f"a divisor of {experts}, the number of experts", "choose one")
    size = experts // num_groups
    if not 1 <= topk_groups <= num_groups or topk_groups * size < k:
        words = f"1 to {num_groups}, with at least k = {k} experts in the groups, which have {size} each"
        raise _wrong("topk_groups", topk_groups, words, "choose more groups")
    best = min(size, max(1, k // topk_groups)) if group_topk is None else group_topk
    if not 1 <= best <= size:
        raise _wrong("group_topk", best, f"1 to {size}, the experts of a group", "choose fewer")
    return GroupLimit(num_groups, topk_groups, best)


def integers(function: str, **numbers: Any) -> tuple[Any, ...]:
    """Options that count something, as Python integers; None stays None. 2, 2.0 and NumPy's 2 are the same key of a
    cache, so a program compiled for one of them would otherwise run for another.

    Raises:
        TypeError: one is not an integer.
    """
    return tuple(None if value is None else _integer(function, name, value) for name, value in numbers.items())


def counts(function: str, **numbers: Any) -> tuple[int, ...]:
    """`integers` for options that cannot be None."""
    return tuple(_integer(function, name, value) for name, value in numbers.items())


def _integer(function: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"`{name}` of {function}: {value!r}, expected an integer; pass an int.")
    try:
        return operator.index(value)
    except TypeError as error:  # of an array with several elements, or of one without a value
        raise TypeError(
            f"`{name}` of {function}: {value!r}, expected an integer that is known when the function is called; pass "
            "an int, in JAX as a static argument."
        ) from error


def numbers(function: str, **values: Any) -> tuple[float, ...]:
    """Factors and bounds as Python floats.

    Raises:
        TypeError: one is not a number. ValueError: one is not finite as float32.
    """
    return tuple(_number(function, name, value) for name, value in values.items())


def _number(function: str, name: str, value: Any) -> float:
    found = as_float(function, name, value)
    if not is_finite(found):
        raise ValueError(
            f"`{name}` of {function}: {value!r}, expected a finite number, as float32 too; pass another one."
        )
    return found


def as_float(function: str, name: str, value: Any) -> float:
    """A number as a Python float, also one that is not finite. Raises TypeError: it is none."""
    if not hasattr(value, "__float__") and not hasattr(value, "__index__"):
        raise TypeError(f"`{name}` of {function}: {value!r}, expected a number; pass a float.")
    try:
        return float(value)
    except (TypeError, ValueError) as error:  # of an array with several elements, or of one without a value
        raise TypeError(
            f"`{name}` of {function}: {value!r}, expected a number that is known when the function is called; pass a "
            "float, in JAX as a static argument."
        ) from error


def _wrong(option: str, came: Any, expected: str, remedy: str) -> ValueError:
    return ValueError(f"`{option}` of topk_router: {came}, expected {expected}; {remedy}.")


# ---------------------------------------------------------------------------------------------------------------------
# Arrays


def _shape(function: str, name: str, spec: ArraySpec | None, wanted: tuple[int, ...], of: str) -> None:
    """Refuses an array whose shape is not `wanted`; `of` says what that shape follows from."""
    if spec is not None and tuple(spec.shape) != wanted:
        raise ValueError(f"`{name}` of {function}: shape {tuple(spec.shape)}, expected {wanted} {of}; reshape it.")


def _integers(function: str, name: str, spec: ArraySpec | None) -> None:
    if spec is not None and not spec.dtype.startswith(("int", "uint")):
        remedy = "pass numbers of experts" if name in ("experts", "table") else "cast it to int32"
        raise TypeError(f"`{name}` of {function}: dtype {spec.dtype}, expected integers; {remedy}.")


def check_floats(function: str, name: str, spec: ArraySpec | None) -> None:
    """Refuses an array whose elements are not floating point numbers of 16 or 32 bits. Raises TypeError."""
    if spec is not None and spec.dtype not in WIDE:
        raise TypeError(f"`{name}` of {function}: dtype {spec.dtype}, expected one of {', '.join(WIDE)}; cast it.")


def check_added(function: str, name: str, dtype: str) -> None:
    """Refuses a dtype in which the gradient of `name`, a sum of rows, cannot be. Raises ValueError."""
    if dtype not in WIDE:
        raise ValueError(
            f"`{name}` of {function}: {dtype} that needs a gradient, expected one of {', '.join(WIDE)}, in which rows "
            "are added; cast it, or take no gradient of it."
        )


def _slots(function: str, experts: ArraySpec) -> None:
    if experts.shape[1] < 1:
        raise ValueError(
            f"`experts` of {function}: shape {tuple(experts.shape)}, expected [T, k] with k of 1 or more; pass -1 for "
            "tokens without an expert."
        )


def _copied(function: str, name: str, spec: ArraySpec) -> None:
    if spec.shape[1] < 1:
        raise ValueError(f"`{name}` of {function}: shape {tuple(spec.shape)}, expected 1 or more columns; pass rows.")
    if spec.dtype not in ROWS:
        raise TypeError(f"`{name}` of {function}: dtype {spec.dtype}, expected one of {', '.join(ROWS)}; cast it.")


def _mask(function: str, spec: ArraySpec | None) -> None:
    if spec is not None and spec.dtype != "bool":
        raise TypeError(f"`mask` of {function}: dtype {spec.dtype}, expected bool; pass False for padding.")


def check_ranks(function: str, **arrays: OperandSpec | None) -> None:
    """Refuses arrays that do not have the axes listed in `grouped_core.ranks`."""
    for name, spec in arrays.items():
        if spec is not None:
            check_rank(function, name, name, spec.shape, of=function)


def check_sequence_sizes(function: str, sizes: ArraySpec) -> None:
    """Refuses sizes of sequences that are no integers [S]. Raises TypeError: dtype. ValueError: axes."""
    check_rank("topk_router", "sequence_sizes", "sequence_sizes", sizes.shape, of=function)
    _integers(function, "sequence_sizes", sizes)


def check_topk_router(
    k: int,
    logits: ArraySpec,
    *,
    bias: ArraySpec | None = None,
    mask: ArraySpec | None = None,
    experts: ArraySpec | None = None,
    sequence_sizes: ArraySpec | None = None,
    key: ArraySpec | None = None,
    jitter: float = 0.0,
    ranks: int = 1,
) -> None:
    """Checks the arrays of `topk_router`; the names are those of its arguments.

    Args:
        ranks: the number of ranks that each have as many sequences of their own.

    Raises:
        TypeError: dtypes. ValueError: shapes, or a key without jitter and the other way round.
    """
    name = "topk_router"
    arrays = {"bias": bias, "mask": mask, "experts": experts, "sequence_sizes": sequence_sizes, "key": key}
    check_ranks(name, logits=logits, **arrays)
    tokens, count = logits.shape
    check_floats(name, "logits", logits)
    check_floats(name, "bias", bias)
    _integers(name, "experts", experts)
    _integers(name, "sequence_sizes", sequence_sizes)
    _shape(name, "bias", bias, (count,), "= one value per expert")
    _shape(name, "mask", mask, (tokens,), "= one value per token")
    _shape(name, "experts", experts, (tokens, k), "= k experts per token")
    _mask(name, mask)
    if sequence_sizes is not None and not 1 <= sequence_sizes.shape[0] <= MAX_GROUPS // ranks:
        came, most = f"{sequence_sizes.shape[0]} sequences", f"1 to {MAX_GROUPS // ranks}"
        if ranks > 1:
            came, most = f"{came} on each of {ranks} ranks", f"{most}, of {MAX_GROUPS} on all ranks"
        raise _wrong("sequence_sizes", came, most, "pass their sizes")
    if (key is None) != (not jitter):
        came = "None with jitter" if jitter else "given without jitter"
        raise _wrong("key", came, "a key if and only if logits are jittered", "pass both, or neither")
    check_key(name, key)


def check_of_layer(lead: tuple[int, ...], mask: tuple[int, ...] | None, experts: tuple[int, ...] | None) -> None:
    """Checks what a layer takes beside x [..., H]. `lead`: the axes of x but the last. The others are shapes or None.

    Raises:
        ValueError: the mask is not [...], or the experts are not [..., k].
    """
    if mask is not None and tuple(mask) != tuple(lead):
        raise ValueError(
            f"`mask` of MoE: shape {tuple(mask)}, expected {tuple(lead)}, the axes of `x` but the last; pass one value "
            "per token."
        )
    if experts is not None and (len(experts) == 0 or tuple(experts)[:-1] != tuple(lead)):
        raise ValueError(
            f"`experts` of MoE: shape {tuple(experts)}, expected {tuple(lead)} and k, the axes of `x` but the last; "
            "pass k experts per token."
        )


def check_key(function: str, key: ArraySpec | None) -> None:
    """Refuses a key of jitter that is not two words. Raises ValueError."""
    if key is not None and (key.dtype, tuple(key.shape)) != ("uint32", (2,)):
        raise ValueError(f"`key` of {function}: {key}, expected uint32[2], low word first; pass such an array.")


def row_count(slots: int, num_groups: int, align: int, max_rows: int | None) -> int:
    """M of `permute`: rows for all slots and for any padding, or `max_rows`.

    Raises:
        ValueError: `align` or `max_rows` is out of range.
    """
    if align < 1:
        raise ValueError(f"`align` of permute: {align}, expected 1 or more; 1 pads nothing.")
    if max_rows is not None:
        if max_rows < 1 or max_rows % align:
            raise ValueError(
                f"`max_rows` of permute: {max_rows}, expected a positive multiple of `align` {align}; round it up."
            )
        return max_rows
    return -(-(slots + num_groups * (align - 1)) // align) * align


def check_permute(x: ArraySpec, experts: ArraySpec, num_groups: int, probs: ArraySpec | None) -> None:
    """Checks the arguments of `permute`.

    Raises:
        TypeError: dtypes. ValueError: shapes, or the number of groups.
    """
    name = "permute"
    check_ranks(name, x=x, experts=experts, probs=probs)
    _copied(name, "x", x)
    _integers(name, "experts", experts)
    _slots(name, experts)
    check_floats(name, "probs", probs)
    if not 1 <= num_groups <= MAX_GROUPS:
        raise ValueError(
            f"`num_groups` of permute: {num_groups}, expected 1 to {MAX_GROUPS}; give the experts' number."
        )
    if x.shape[0] != experts.shape[0]:
        raise ValueError(
            f"`x` of permute: {x.shape[0]} tokens, expected {experts.shape[0]} as in `experts`; route these tokens."
        )
    _shape(name, "probs", probs, tuple(experts.shape), "as `experts`")


def check_unpermute(y: ArraySpec, rows: int, inverse: ArraySpec, weights: ArraySpec | None) -> None:
    """Checks the arguments of `unpermute`; `rows` and `inverse` are those of its permutation.

    Raises:
        TypeError: dtypes. ValueError: shapes.
    """
    name = "unpermute"
    check_ranks(name, y=y, weights=weights)
    check_floats(name, "y", y)
    check_floats(name, "weights", weights)
    if y.shape[0] != rows:
        raise ValueError(f"`y` of unpermute: {y.shape[0]} rows, expected {rows}; give all rows of `permute`.")
    _shape(name, "weights", weights, tuple(inverse.shape), "as the experts of `permute`")


def check_router(function: str, router: Sequence[int], columns: int, *, transposed: bool = False) -> None:
    """Refuses a router [H, E] ([E, H] if transposed) for tokens of another width than H.

    Args:
        router: its shape. columns: of the tokens.

    Raises:
        ValueError: the widths differ.
    """
    if router[transposed] != columns:
        layout, each = ("[E, H]", "row") if transposed else ("[H, E]", "column")
        raise ValueError(
            f"`router` of {function}: shape {tuple(router)}, expected {layout} with H = {columns} = columns of `x`; "
            f"pass one {each} per expert."
        )


def check_experts_held(function: str, name: str, routed: int, held: int) -> None:
    """Refuses a weight whose number of experts is not that of the router: slots of missing experts would add nothing.

    Raises:
        ValueError: the numbers differ.
    """
    if held != routed:
        raise ValueError(
            f"`{name}` of {function}: {held} experts, expected {routed} as in `router`; pass the weights of all of "
            "them."
        )


def check_shared(function: str, shared: Any, kind: type) -> None:
    """Refuses a shared expert that is no `kind`, the frontend's `SharedExpert`.

    Raises:
        TypeError: it is not.
    """
    if shared is not None and not isinstance(shared, kind):
        raise TypeError(
            f"`shared` of {function}: {type(shared).__name__}, expected None or a SharedExpert; pass "
            "SharedExpert(wi, wo)."
        )


def check_shared_held(function: str, held: int) -> None:
    """Refuses weights of a shared expert that hold several experts.

    Raises:
        ValueError: they hold several.
    """
    if held != 1:
        raise ValueError(
            f"`shared.wo` of {function}: {held} experts, expected 1, to which every token goes; pass several shared "
            "experts as one, with their widths together."
        )


def check_gate(gate: ArraySpec, hidden: Any, *, transposed: bool) -> None:
    """Refuses a gate of a shared expert that is not [H, 1], or [1, H] if it is `transposed`.

    Args:
        hidden: H.

    Raises:
        ValueError: another shape. TypeError: a dtype in which routers have no weights.
    """
    shape = gate.shape
    check_rank("moe", "gate", "shared.gate", shape, transposed=transposed)
    if shape != ((1, hidden) if transposed else (hidden, 1)):
        letters = "[1, H]" if transposed else "[H, 1]"
        raise ValueError(
            f"`shared.gate`: shape {shape}, expected {letters} with H = {hidden}; pass one vector of H elements."
        )
    check_floats("moe", "shared.gate", gate)


def check_routed_mlp(x: OperandSpec, experts: ArraySpec, weights: ArraySpec) -> None:
    """Checks those arguments of `routed_mlp` that `grouped_mlp` does not have.

    Raises:
        TypeError: dtypes. ValueError: shapes.
    """
    name = "routed_mlp"
    check_ranks(name, x=x, experts=experts, weights=weights)
    check_by_row(x)
    _integers(name, "experts", experts)
    _slots(name, experts)
    check_floats(name, "weights", weights)
    if x.shape[0] != experts.shape[0]:
        raise ValueError(
            f"`x` of {name}: {x.shape[0]} tokens, expected {experts.shape[0]} as in `experts`; route these tokens."
        )
    _shape(name, "weights", weights, tuple(experts.shape), "as `experts`")


def max_rows_option(max_rows: Any) -> int | None:
    """`max_rows` of `routed_mlp` as a Python integer.

    Raises:
        TypeError: it is not an integer. ValueError: it is below 1.
    """
    (found,) = integers("routed_mlp", max_rows=max_rows)
    if found is not None and found < 1:
        raise ValueError(f"`max_rows` of routed_mlp: {found}, expected 1 or more; None leaves room for every slot.")
    return found


def check_by_row(x: OperandSpec) -> None:
    """Refuses tokens of `routed_mlp` that are quantised in a format whose scales are not those of single rows.

    Raises:
        ValueError: they are, or contract another axis.
    """
    if isinstance(x, QuantizedSpec) and (x.axis != 1 or not x.format.by_row):
        raise ValueError(
            f"`x` of routed_mlp: {x.format.name} contracting axis {x.axis}, expected tokens whose scales are those of "
            "single rows, in the form that contracts axis 1; quantise to fp8_1x128 or mxfp8 with axis=1, or pass "
            "unquantised tokens."
        )


def _one_or_more(function: str, name: str, spec: ArraySpec, remedy: str) -> None:
    if not 1 <= spec.shape[0] <= MAX_GROUPS:
        raise ValueError(f"`{name}` of {function}: {spec.shape[0]} elements, expected 1 to {MAX_GROUPS}; {remedy}.")


def check_pad_groups(rows: ArraySpec, sizes: ArraySpec, align: int) -> None:
    """Checks the arguments of `pad_groups`.

    Raises:
        TypeError: dtypes. ValueError: shapes, or the alignment.
    """
    name = "pad_groups"
    check_ranks(name, rows=rows, sizes=sizes)
    _copied(name, "rows", rows)
    _integers(name, "sizes", sizes)
    _one_or_more(name, "sizes", sizes, "pass one size per group")
    if align < 1:
        raise ValueError(f"`align` of pad_groups: {align}, expected 1 or more; 1 pads nothing.")


def check_unpad_groups(rows: ArraySpec, source: ArraySpec) -> None:
    """Checks the arguments of `unpad_groups`; `source` is that of the map from `pad_groups`.

    Raises:
        TypeError: the dtype. ValueError: shapes.
    """
    name = "unpad_groups"
    check_ranks(name, rows=rows)
    _copied(name, "rows", rows)
    if rows.shape[0] != source.shape[0]:
        raise ValueError(
            f"`rows` of {name}: {rows.shape[0]} rows, expected {source.shape[0]}; give all rows of `pad_groups`."
        )


def check_hash_experts(token_ids: ArraySpec, k: int, experts: int, table: ArraySpec | None) -> None:
    """Checks the arguments of `hash_experts`.

    Raises:
        TypeError: dtypes. ValueError: shapes, k or E.
    """
    name = "hash_experts"
    check_ranks(name, token_ids=token_ids, table=table)
    _integers(name, "token_ids", token_ids)
    _integers(name, "table", table)
    if not 1 <= experts <= MAX_GROUPS:
        raise ValueError(f"`E` of {name}: {experts}, expected 1 to {MAX_GROUPS}; give the number of experts.")
    if not 1 <= k <= min(MAX_SLOTS, experts):
        raise ValueError(f"`k` of {name}: {k}, expected 1 to {min(MAX_SLOTS, experts)}; choose a smaller k.")
    if table is not None and (len(table.shape) != 2 or table.shape[1] != k or table.shape[0] < 1):
        raise ValueError(
            f"`table` of {name}: shape {tuple(table.shape)}, expected [V, {k}]; pass k experts per token id."
        )


def check_update_bias(bias: ArraySpec, load: ArraySpec) -> None:
    """Checks the arguments of `update_bias`.

    Raises:
        TypeError: dtypes. ValueError: shapes.
    """
    name = "update_bias"
    check_ranks(name, bias=bias, load=load)
    check_floats(name, "bias", bias)
    _integers(name, "load", load)
    _one_or_more(name, "bias", bias, "pass one value per expert")
    _shape(name, "load", load, tuple(bias.shape), "as `bias`, one count per expert")


def check_balance_quantile(
    logits: ArraySpec, bias: ArraySpec, k: int, score: str, bins: int, low: float, high: float, mask: ArraySpec | None
) -> None:
    """Checks the arguments of `balance_quantile`.

    k is one less than a router may have: a margin is measured from the (k + 1)-th largest score, and kernels rank at
    most `MAX_SLOTS` of them.

    Raises:
        TypeError: dtypes. ValueError: shapes, or an option that is out of range.
    """
    name = "balance_quantile"
    check_ranks(name, logits=logits, bias=bias, mask=mask)
    check_floats(name, "logits", logits)
    check_floats(name, "bias", bias)
    tokens, experts = logits.shape
    _shape(name, "bias", bias, (experts,), "= one value per expert")
    _shape(name, "mask", mask, (tokens,), "= one value per token")
    _mask(name, mask)
    if score not in SCORES:
        raise ValueError(f"`score` of {name}: {score!r}, expected one of {', '.join(SCORES)}; choose one of them.")
    if not 2 <= experts <= MAX_EXPERTS:
        remedy = "route to fewer experts" if experts > MAX_EXPERTS else "one alone has nothing to balance"
        raise ValueError(f"`logits` of {name}: {experts} experts, expected 2 to {MAX_EXPERTS}; {remedy}.")
    if not 1 <= k < min(experts, MAX_SLOTS):
        raise ValueError(
            f"`k` of {name}: {k}, expected 1 to {min(experts, MAX_SLOTS) - 1}: fewer than all experts, and than "
            f"{MAX_SLOTS}, because the (k + 1)-th largest score is needed too; choose another k, or use `update_bias`."
        )
    if not 1 <= bins <= MAX_BINS:
        raise ValueError(f"`bins` of {name}: {bins}, expected 1 to {MAX_BINS}; 1000 is the default.")
    # Kernels compare and subtract the ends as float32.
    ends = np.float32(low), np.float32(high)
    if not ends[0] < ends[1] or not is_finite(float(ends[1]) - float(ends[0])):
        raise ValueError(
            f"`low`, `high` of {name}: {low}, {high}, expected low < high at a finite distance, as float32 too; "
            "without a bias, margins of sigmoid and softmax scores are from -1 to 1."
        )


def alignment_for(recipe: Recipe | None) -> int:
    """Rows that every group has to be a multiple of for wire formats and foreign kernels with this recipe; the kernels
    of this library take any size.

    It is 1 without quantised operands, else the longest segment of an operand contracted along rows, at least 16: rows
    become the contiguous axis of such operands, whose lines have to be multiples of 16 bytes.

    Raises:
        TypeError: it is neither None nor a `Recipe`.
    """
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(
            f"`recipe` of alignment_for: {type(recipe).__name__}, expected None or a Recipe; pass one, without state "
            "and key."
        )
    if recipe is None or not recipe.quantized:
        return 1
    return max(16, *(operand.segment for operand in recipe.wgrad))
