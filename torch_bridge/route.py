"""Routing: the choice of experts, rows sorted by expert, sums per token, and balancing. `grouped_core` does the
arithmetic, so that all frontends give the same bits on one device.

Letters: T tokens, E experts, k experts per token, S sequences, M rows, H columns, G groups (experts that have rows
here), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core import routing_spec
from grouped_core.calls import ArraySpec
from grouped_core.formats import as_flag
from grouped_core.linear_spec import check_made_by
from grouped_core.routing_spec import Router, router_option
from grouped_core.routing_spec import alignment_for as alignment_for
from torch_bridge import _codec, _routing
from torch_bridge._agreement import Fact, check_agreement
from torch_bridge._cache import Cache
from torch_bridge._checks import check_group, check_readable, is_negated, refuse_transforms, refuse_vmap
from torch_bridge._compiling import allow_in_graph, is_compiling
from torch_bridge._memory import EXCHANGE
from torch_bridge._operators import call
from torch_bridge._routing import PermuteFacts, PermuteOperands, RouterOperands
from torch_bridge._serialized import name_in_files
from torch_bridge._symbols import SYMBOLIC_ROWS, settle_rows
from torch_bridge._tensors import dtype_name, fixed_spec
from torch_bridge.sizes import every_row, saturate


class MoEAux(NamedTuple):
    """Losses and metrics of one routing, on the device of the logits; only the two losses have gradients.

    Attributes:
        load: int32 [E], slots that chose each expert, dropped ones too; of this rank alone, but of all ranks where
            `parallel.moe` gives it.
        aux_loss, z_loss: fp32 scalars, times their coefficients.
        dropped: int32 scalar, slots beyond the capacity of their expert; of the same ranks as `load`.
        overflow: bool scalar, whether any slot was dropped.
        entropy: fp32 scalar, the mean entropy of the scores of a token, in nats.
    """

    load: Tensor
    aux_loss: Tensor
    z_loss: Tensor
    dropped: Tensor
    overflow: Tensor
    entropy: Tensor


class Permutation(NamedTuple):
    """How `permute` placed rows.

    Attributes:
        source: int32 [M], slot token * k + place in each row, -1 for padding. inverse: int32 [T, k], row of each slot,
            -1 for none. probs: fp32 [M], the probability of the slot in each row, 0 for padding; None without any.
        dropped: int32 scalar, slots that have an expert here but no row.
    """

    source: Tensor
    inverse: Tensor
    probs: Tensor | None
    dropped: Tensor


class Padding(NamedTuple):
    """How `pad_groups` placed rows: the row in each padded row [P], and the place of each row [M]; -1 for none."""

    source: Tensor
    inverse: Tensor


_codec.register(Permutation, Padding)
name_in_files(MoEAux, Permutation, Padding)


def topk_router(
    logits: Tensor,
    k: int,
    *,
    score: str = "softmax",
    bias: Tensor | None = None,
    after_topk: bool = False,
    normalize: bool | None = None,
    scale: float = 1.0,
    num_groups: int | None = None,
    topk_groups: int | None = None,
    group_topk: int | None = None,
    experts: Tensor | None = None,
    mask: Tensor | None = None,
    jitter: float = 0.0,
    key: Tensor | None = None,
    sinkhorn: int = 0,
    capacity_factor: float | None = None,
    drop: str = "probs",
    aux_coeff: float = 0.0,
    z_coeff: float = 0.0,
    process_group: Any = None,
    sequence_sizes: Tensor | None = None,
    split_sequences: bool = False,
) -> tuple[Tensor, Tensor, MoEAux]:
    """(weights, experts, aux): the k experts of each token, best first, their weights, and the losses.

    Logits and scores are fp32 inside. Ties go to the lower expert. The weights and the two losses are differentiable in
    the logits, once; the choice has no gradient.

    Args:
        logits: [T, E] fp32, bf16 or fp16, contiguous; E is at most 1024.
        k: experts per token, at most 32 and at most E.
        score: "softmax", "sigmoid" or "sqrt_softplus".
        bias: [E], added to the scores that choose experts, not to the weights; see `update_bias`.
        after_topk: weights are the softmax of the k chosen logits; only with "softmax".
        normalize: weights are divided by their sum over the chosen experts. None: if k > 1 and not "softmax".
        scale: factor of the weights.
        num_groups, topk_groups: the experts form `num_groups` groups of equal size, and only experts of the
            `topk_groups` best groups can be chosen. group_topk: a group's score is the sum of its `group_topk` best
            scores; None: k // topk_groups, at least 1 and at most the size of a group.
        experts: integers [T, k], chosen elsewhere, -1 for none (replay, `hash_experts`); the weights are those of this
            pass's scores.
        mask: bool [T], False for padding: such tokens get experts -1 and weights 0, and count nowhere. Their values
            must be finite: the gradient of the router is a product with all tokens, those times 0.
        jitter: logits are multiplied by random factors of 1 - jitter to 1 + jitter, from `key`, uint32 [2].
        sinkhorn: number of iterations that balance the values which choose experts; 0: none.
        capacity_factor: an expert takes at most ceil(T k capacity_factor / E) slots. drop: the others are those with
            the smallest weights ("probs"), or the last ones ("position"); they get expert -1 and weight 0.
        aux_coeff, z_coeff: coefficients of the losses.
        process_group: tokens, scores and slots are summed over its ranks before losses are formed, so every rank
            returns the losses of all, and its backward gives their gradient in its own logits. None: this rank alone.
        sequence_sizes: integers [S], consecutive sequences whose auxiliary losses are averaged. None: one sequence.
            With `process_group` the sequences of every rank are its own, as many on each rank, and the mean is over
            those of all ranks; None: the tokens of all ranks are one sequence.
        split_sequences: sequence s of all ranks is one sequence instead, of which each rank has a part.

    Returns:
        weights: fp32 [T, k]. experts: int32 [T, k], -1 where masked or dropped. aux: `MoEAux`.

    Raises:
        TypeError: wrong dtypes, or an argument is not a tensor. ValueError: shapes, devices, layouts or options.
            RuntimeError: differentiated twice.
    """
    options = (
        *(score, after_topk, normalize, scale, num_groups, topk_groups, group_topk),
        *(jitter, sinkhorn, capacity_factor, drop, aux_coeff, z_coeff),
    )
    group = _name_of("topk_router", process_group)
    split, place = as_flag("split_sequences", split_sequences, "topk_router"), (0, 1)
    if process_group is not None:
        _check_sequences(sequence_sizes, process_group)
        if sequence_sizes is not None and not split:
            place = (process_group.rank(), process_group.size())
    weights, chosen, load, aux_loss, z_loss, entropy, dropped, overflow = _run(
        "topk_router", logits, k, options, bias, mask, experts, key, sequence_sizes, group, place
    )
    return weights, chosen, MoEAux(load, aux_loss, z_loss, dropped, overflow, entropy)


def _check_sequences(sequence_sizes: Any, process_group: Any) -> None:
    """Checks for GROUPED_DEBUG=ranks that all ranks have as many sequences. Raises ValueError on all ranks."""
    shape = tuple(getattr(sequence_sizes, "shape", ()))  # what is no vector is refused later
    expected = "the same number on every rank, or `sequence_sizes` on none; pad with sequences of no tokens"
    check_agreement("topk_router", process_group, lambda: (Fact(shape[0] if shape else None, "sequences", expected),))


_COUNTS = frozenset((int, type(None)))
"""Types of options that count something, once they are checked."""


def _topk_router(
    logits: Tensor,
    k: int,
    options: tuple[Any, ...],
    bias: Tensor | None,
    mask: Tensor | None,
    experts: Tensor | None,
    key: Tensor | None,
    sequence_sizes: Tensor | None,
    group: str | None,
    place: tuple[int, int],
) -> tuple[Tensor, ...]:
    """`place`: (rank, ranks) where the sequences of each rank are its own, otherwise (0, 1)."""
    refuse_transforms("topk_router", logits, bias)
    if not _COUNTS.issuperset(map(type, (k, *options[4:7], options[8]))):  # caches take 2.0 for 2
        counts = {"num_groups": options[4], "topk_groups": options[5], "group_topk": options[6], "sinkhorn": options[8]}
        k, *limit, sinkhorn = routing_spec.integers("topk_router", k=k, **counts)
        options = (*options[:4], *limit, options[7], sinkhorn, *options[9:])
    tensors = {
        "logits": logits,
        "bias": bias,
        "mask": mask,
        "experts": experts,
        "sequence_sizes": sequence_sizes,
        "key": key,
    }

    def check(**specs: Any) -> Router:
        routing_spec.check_topk_router(k, **specs, jitter=options[7], ranks=place[1])
        try:
            hash(options)
        except TypeError:  # such as a list, which is refused
            return _router.__wrapped__(int(logits.shape[1]), k, options)
        return _router(int(logits.shape[1]), k, options)

    op = _checked("topk_router", tensors, (k, options, place[1]), check)
    operands = RouterOperands(
        *(logits, every_row(logits), None if bias is None else bias.detach(), _bytes(mask)),
        *(_int32(experts), key, _among_all(_int32(sequence_sizes), *place)),
    )
    return tuple(_routing.choose(op, group, operands))


def _among_all(sizes: Tensor | None, rank: int, ranks: int) -> Tensor | None:
    """The sizes [P S] of the sequences of all ranks, of which only the own ones, of `sizes` [S], have tokens here.

    The sums over ranks then are those of different sequences, and sequences without tokens do not count.
    """
    if sizes is None or ranks == 1:
        return sizes
    count = sizes.shape[0]
    return torch.nn.functional.pad(sizes, (rank * count, (ranks - 1 - rank) * count))


@lru_cache(maxsize=1024)
def _router(experts: int, k: int, options: tuple[Any, ...]) -> Router:
    names = ("score", "after_topk", "normalize", "scale", "num_groups", "topk_groups", "group_topk")
    names += ("jitter", "sinkhorn", "capacity_factor", "drop", "aux_coeff", "z_coeff")
    return router_option(experts, k, **dict(zip(names, options, strict=True)))


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def permute(
    x: Tensor,
    experts: Tensor,
    num_groups: int,
    *,
    probs: Tensor | None = None,
    align: int = 1,
    max_rows: int | None = None,
) -> tuple[Tensor, Tensor, Permutation]:
    """(rows, group_sizes, permutation): each token once per expert, sorted by expert, then token, then place.

    Differentiable in x and in the probabilities, once; the gradient of a token is the sum of those of its rows in the
    order of its places, in fp32, rounded once. Rows in 8 bits have no gradient.

    Args:
        x: [T, H]. experts: integers [T, k]; slots with numbers other than 0 to G - 1 have no row. num_groups: G.
        probs: [T, k], travel with the rows as `permutation.probs`.
        align: every group is padded to a multiple of so many rows; an empty one stays empty.
        max_rows: M, a multiple of `align`. None: T * k rows, plus the most that padding can need. In a smaller buffer
            the last slots have no row, and are counted in `permutation.dropped`.

    Returns:
        rows: [M, H] in the dtype of x, padding is zero. group_sizes: int32 [G], with padding. permutation:
            `Permutation`.

    Raises:
        TypeError: wrong dtypes, or an argument is not a tensor. ValueError: shapes, devices, layouts or options; x has
            8 bits and needs a gradient. RuntimeError: differentiated twice.
    """
    rows, sizes, source, inverse, dropped, *of_rows = _run("permute", x, experts, probs, num_groups, align, max_rows)
    permutation = Permutation(source, inverse, of_rows[0] if len(of_rows) > 0 else None, dropped)
    return _in_dtype_of(x, rows), sizes, permutation


def _in_dtype_of(rows: Tensor, moved: Tensor) -> Tensor:
    """`moved` rows in the dtype of those that were given: operators return E8M0 as uint8."""
    return moved if moved.dtype == rows.dtype else moved.view(rows.dtype)


def _permute(
    x: Tensor, experts: Tensor, probs: Tensor | None, num_groups: int, align: int, max_rows: int | None
) -> tuple[Tensor, ...]:
    refuse_transforms("permute", x, probs)
    num_groups, align = routing_spec.counts("permute", num_groups=num_groups, align=align)
    if not isinstance(max_rows, torch.SymInt):
        (max_rows,) = routing_spec.integers("permute", max_rows=max_rows)
    static = PermuteFacts(num_groups, align, max_rows)
    needs_x = torch.is_grad_enabled() and getattr(x, "requires_grad", False)  # what is no tensor the checks refuse

    def check(x: Any, experts: Any, probs: Any) -> None:
        routing_spec.check_permute(x, experts, num_groups, probs)
        routing_spec.row_count(experts.shape[0] * experts.shape[1], *static)
        if needs_x:
            routing_spec.check_added("permute", "x", x.dtype)

    _checked("permute", {"x": x, "experts": experts, "probs": probs}, (static, needs_x), check)
    rows, sizes, source, inverse, dropped, *rest = _routing.permute(static, PermuteOperands(x, _int32(experts), probs))
    return rows, sizes, source, inverse, dropped.reshape(()), *rest


def unpermute(y: Tensor, permutation: Permutation, weights: Tensor | None = None) -> Tensor:
    """[T, H]: the sum of each token's rows in the order of its places, in fp32, rounded once to the dtype of y.

    Differentiable in y and the weights, once.

    Args:
        y: [M, H] fp32, bf16 or fp16, all rows of `permute`; padding is not read. permutation: the one that `permute`
            returned.
        weights: [T, k], factors of the rows; None: 1. Slots without a row add nothing.

    Raises:
        TypeError: wrong dtypes, or an argument is not a tensor. ValueError: shapes, devices or layouts.
            RuntimeError: differentiated twice.
    """
    check_made_by("unpermute", "permutation", permutation, Permutation, "permute")
    return _run("unpermute", y, permutation.source, permutation.inverse, weights)[0]


def _unpermute(y: Tensor, source: Tensor, inverse: Tensor, weights: Tensor | None) -> tuple[Tensor, ...]:
    refuse_transforms("unpermute", y, weights)

    def check(y: Any, source: Any, inverse: Any, weights: Any) -> None:
        routing_spec.check_unpermute(y, source.shape[0], inverse, weights)

    _checked("unpermute", {"y": y, "source": source, "inverse": inverse, "weights": weights}, None, check)
    return (_routing.unpermute(y, source, inverse, weights),)


def pad_groups(rows: Tensor, sizes: Tensor, align: int) -> tuple[Tensor, Tensor, Padding]:
    """(rows [P, H], sizes [G], map): groups padded with zero rows to multiples of `align` rows; empty ones stay empty.

    For wire formats and kernels of other libraries (`alignment_for`); the products of this package take any sizes.
    Padding padded groups a second time only appends unused rows. Differentiable in the rows, once.

    Args:
        rows: [M, H] of any dtype, sorted by group. sizes: integers [G]. align: 1 or more.

    Raises:
        TypeError: wrong dtypes, or an argument is not a tensor. ValueError: shapes, devices, layouts or options.
            RuntimeError: differentiated twice.
    """
    padded, padded_sizes, source, inverse = _run("pad_groups", rows, sizes, align)
    return _in_dtype_of(rows, padded), padded_sizes, Padding(source, inverse)


def _pad_groups(rows: Tensor, sizes: Tensor, align: int) -> tuple[Tensor, ...]:
    refuse_transforms("pad_groups", rows)
    (align,) = routing_spec.integers("pad_groups", align=align)

    def check(rows: Any, sizes: Any) -> None:
        routing_spec.check_pad_groups(rows, sizes, align)

    _checked("pad_groups", {"rows": rows, "sizes": sizes}, align, check)
    found, source, inverse = _routing.padding(rows, saturate(sizes), align)
    return _routing.gather(rows, source, inverse), found, source, inverse


def unpad_groups(rows: Tensor, map: Padding) -> Tensor:
    """[M, H]: the rows that `pad_groups` padded; rows past the groups are zero. Differentiable in the rows, once.

    Args:
        rows: [P, H]. map: the one that `pad_groups` returned.

    Raises:
        TypeError: `rows` is not a tensor, or `map` no padding. ValueError: shapes, devices or layouts. RuntimeError:
        differentiated twice.
    """
    check_made_by("unpad_groups", "map", map, Padding, "pad_groups")
    return _in_dtype_of(rows, _run("unpad_groups", rows, map.source, map.inverse)[0])


def _unpad_groups(rows: Tensor, source: Tensor, inverse: Tensor) -> tuple[Tensor, ...]:
    refuse_transforms("unpad_groups", rows)

    def check(rows: Any, source: Any, inverse: Any) -> None:
        routing_spec.check_unpad_groups(rows, source)

    _checked("unpad_groups", {"rows": rows, "source": source, "inverse": inverse}, None, check)
    return (_routing.gather(rows, inverse, source),)


# ---------------------------------------------------------------------------------------------------------------------
# Experts without a router, and biases


def hash_experts(token_ids: Tensor, k: int, E: int, *, table: Tensor | None = None) -> Tensor:
    """int32 [T, k]: k distinct experts that depend on the id of a token alone, for `topk_router(experts=...)`.

    Args:
        token_ids: integers [T]; those outside int32 count as the nearest one. E: number of experts.
        table: integers [V, k], the experts of each id; an id outside of it has experts -1. None: random draws without
            replacement from the id. int32 ones are read in place.

    Raises:
        TypeError: wrong dtypes, or an argument is not a tensor. ValueError: shapes, devices, layouts or options.
    """
    return _run("hash_experts", token_ids, k, E, table)[0]


def _hash_experts(token_ids: Tensor, k: int, experts: int, table: Tensor | None) -> tuple[Tensor, ...]:
    refuse_vmap("hash_experts")
    k, experts = routing_spec.integers("hash_experts", k=k, E=experts)

    def check(token_ids: Any, table: Any) -> None:
        routing_spec.check_hash_experts(token_ids, k, experts, table)

    _checked("hash_experts", {"token_ids": token_ids, "table": table}, (k, experts), check)
    operands = _routing.HashOperands(saturate(token_ids), _int32(table))
    return (call(_routing.HASH, _routing.HashFacts(k, experts), operands, token_ids.shape[0])[0],)


def update_bias(bias: Tensor, load: Tensor, rate: float, *, process_group: Any = None) -> Tensor:
    """fp32 [E] = bias + rate * sign(mean load - load): up for experts below the mean load, down for those above.

    Without gradients: call it once per step, after backward, and copy the result into the bias of the router.

    Args:
        bias: [E]. load: integers [E], `MoEAux.load`, perhaps summed over microbatches. rate: e.g. 1e-3.
        process_group: the load is summed over its ranks; `MoEAux.load` is that of one rank, even if its router had one.

    Raises:
        TypeError: wrong dtypes, or an argument is not a tensor. ValueError: shapes, devices or layouts.
    """
    group = _name_of("update_bias", process_group)
    return _run("update_bias", bias, load, rate, group)[0]


def _update_bias(bias: Tensor, load: Tensor, rate: float, group: str | None) -> tuple[Tensor, ...]:
    refuse_vmap("update_bias")
    (rate,) = routing_spec.numbers("update_bias", rate=rate)
    _checked("update_bias", {"bias": bias, "load": load}, None, routing_spec.check_update_bias)
    with torch.no_grad():
        load = saturate(load)
        load = load if group is None else _routing.summed(group, load)[0]
        operands = _routing.BiasOperands(bias.detach(), load)
        return (call(_routing.BIAS, _routing.BiasFacts(rate), operands, 0)[0],)


def balance_quantile(
    logits: Tensor,
    bias: Tensor,
    k: int,
    *,
    score: str = "sigmoid",
    bins: int = 1000,
    low: float = -1.0,
    high: float = 1.0,
    mask: Tensor | None = None,
    process_group: Any = None,
) -> Tensor:
    """fp32 [E]: the bias with which each expert is among the k best of k / E of the tokens, minus its mean.

    A token's margin for an expert is the (k + 1)-th largest score + bias of the token, minus its score of the expert:
    the bias from which on the expert is chosen. The result is the (k / E)-quantile of the margins over a histogram: the
    upper edge of the first bin that reaches it. Without gradients, as `update_bias`.

    Args:
        logits: [T, E]. bias: [E], that of the router. score: that of the router.
        k: experts per token, at most 31, one fewer than a router may have, and fewer than E.
        bins, low, high: the number of bins, at most 65536, and the ends of the histogram; margins outside fall into the
            first and the last bin.
        mask: bool [T], False for padding. process_group: the histogram is summed over its ranks.

    Raises:
        TypeError: wrong dtypes, or an argument is not a tensor. ValueError: shapes, devices, layouts or options.
    """
    group = _name_of("balance_quantile", process_group)
    return _run("balance_quantile", logits, bias, mask, (k, score, bins, low, high), group)[0]


def _balance_quantile(
    logits: Tensor, bias: Tensor, mask: Tensor | None, options: tuple[Any, ...], group: str | None
) -> tuple[Tensor, ...]:
    refuse_vmap("balance_quantile")
    static = _routing.QuantileFacts(*options)
    k, bins = routing_spec.integers("balance_quantile", k=static.k, bins=static.bins)
    low, high = routing_spec.numbers("balance_quantile", low=static.low, high=static.high)
    static = static._replace(k=k, bins=bins, low=low, high=high)

    def check(logits: Any, bias: Any, mask: Any) -> None:
        routing_spec.check_balance_quantile(logits, bias, *static, mask)

    _checked("balance_quantile", {"logits": logits, "bias": bias, "mask": mask}, static, check)
    with torch.no_grad():
        operands = _routing.MarginOperands(logits.detach(), bias.detach(), _bytes(mask))
        (counts,) = call(_routing.MARGINS, static, operands, logits.shape[0])
        counts = counts if group is None else _routing.summed(group, counts)[0]
        return (call(_routing.QUANTILE, static, _routing.CountOperands(counts), 0)[0],)


# ---------------------------------------------------------------------------------------------------------------------
# Calls


_FUNCTIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "topk_router": _topk_router,
    "permute": _permute,
    "unpermute": _unpermute,
    "pad_groups": _pad_groups,
    "unpad_groups": _unpad_groups,
    "hash_experts": _hash_experts,
    "update_bias": _update_bias,
    "balance_quantile": _balance_quantile,
}
_OF_TOKENS: dict[str, tuple[int, ...]] = {
    "topk_router": (0, 4, 5),
    "permute": (0, 1, 2),
    "unpermute": (2, 3),
    "hash_experts": (0,),
    "balance_quantile": (0, 2),
}
"""The arguments with T rows, for functions that take a symbol of torch.compile for T."""


_WITHOUT_TOKENS = frozenset({"bias", "key", "load", "sequence_sizes", "sizes", "table"})
"""The arguments whose lengths do not follow from T; graphs of torch.compile are specialised to them."""


def _run(name: str, *arguments: Any) -> tuple[Tensor, ...]:
    """The results of a function, eagerly or as one node of a graph of torch.compile."""
    if not is_compiling():
        return _FUNCTIONS[name](*arguments)
    return _node(name, *[_codec.to_tuples(each) for each in arguments])


@allow_in_graph
def _node(name: str, *arguments: Any) -> tuple[Tensor, ...]:
    """`_run` as one node of a graph; `arguments` come from `_codec.to_tuples`."""
    given = [_codec.from_tuples(each) for each in arguments]
    settle_rows(*[given[at] for at in _OF_TOKENS.get(name, ())])
    return _FUNCTIONS[name](*given)


def _name_of(function: str, process_group: Any) -> str | None:
    if process_group is None:
        return None
    check_group(function, process_group)
    return process_group.group_name


_OPTIONAL: dict[str, tuple[str, ...]] = {
    "topk_router": ("bias", "mask", "experts", "sequence_sizes", "key"),
    "permute": ("probs",),
    "unpermute": ("weights",),
    "hash_experts": ("table",),
    "balance_quantile": ("mask",),
}
"""The arguments that may be None."""

_results: Cache[Any, Any] = Cache()


def _checked(name: str, tensors: dict[str, Any], static: Any, check: Callable[..., Any]) -> Any:
    """What `check` returns for the specs of the tensors, by name; cached under their facts and `static`."""
    facts = None if is_compiling() else EXCHANGE.describe(tuple(tensors.values()))
    if facts is not None and is_negated([*tensors.values()]):
        facts = None  # which do not show it; the checks refuse it
    key = (name, facts, static)
    try:
        if facts is not None and key in _results:
            return _results[key]
    except TypeError:  # an option without a hash, such as a list, which the checks refuse
        facts = None
    of, first = next(iter(tensors.items()))
    for argument, each in tensors.items():
        if each is None and argument in _OPTIONAL.get(name, ()):
            continue
        check_readable(argument, each, first, of)
    found = check(**{argument: _spec(argument, each) for argument, each in tensors.items()})
    return found if facts is None else _results.keep(key, found)


def _spec(argument: str, tensor: Tensor | None) -> ArraySpec | None:
    """Shape and dtype; a symbol of torch.compile, or a multiple of one, has the number that represents it."""
    if tensor is None:
        return None
    if argument in _WITHOUT_TOKENS:
        return fixed_spec(tensor)
    length = tensor.shape[0] if tensor.shape else 0
    if isinstance(length, torch.SymInt) and len(length.node.expr.free_symbols) == 1:
        (symbol,) = length.node.expr.free_symbols
        number = int(length.node.expr.subs(symbol, SYMBOLIC_ROWS))
        return ArraySpec((number, *map(int, tensor.shape[1:])), dtype_name(tensor.dtype))
    return fixed_spec(tensor)


def _bytes(mask: Tensor | None) -> Tensor | None:
    """A bool mask as kernels read it."""
    if mask is None:
        return None
    return mask.to(torch.uint8) if is_compiling() else mask.view(torch.uint8)  # as in _routing: no view for inductor


def _int32(numbers: Tensor | None) -> Tensor | None:
    """Integers as int32; those out of its range stay out of range of the experts."""
    return None if numbers is None else saturate(numbers)
