"""The operators of routing and their gradients; `route` checks arguments and has the public functions.

Letters: T tokens, E experts, k experts per token, S sequences, M rows, H columns, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core import routing
from grouped_core.calls import ArraySpec
from grouped_core.routing_calls import GroupLimit, Scores
from grouped_core.routing_spec import Router, row_count
from torch_bridge import _saved
from torch_bridge._compiling import is_compiling
from torch_bridge._memory import part_of
from torch_bridge._once_differentiable import once_differentiable
from torch_bridge._operators import call, define
from torch_bridge._tensors import as_read, dtype_name

Gradients = tuple[Tensor | None, ...]


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """Keeps tensors for backward; none of them is worth moving to the host."""
    _saved.tell(tensors, ())
    ctx.save_for_backward(*tensors)


def differentiate_once(
    name: str, ctx: Any, upstream: Sequence[Tensor | None], backward: Callable[..., Gradients]
) -> Gradients:
    """Returns the gradients `backward(ctx, *upstream)`, which refuse to be differentiated; `name`: for messages."""
    upstream = [None if each is None else as_read(each) for each in upstream]
    if is_compiling() or not torch.is_grad_enabled():
        return backward(ctx, *upstream)
    with torch.no_grad():
        found = backward(ctx, *upstream)
    return once_differentiable(name, found, (*upstream, *ctx.saved_tensors))


def summed(group: Any, *tensors: Tensor) -> list[Tensor]:
    """Returns the sums of tensors of one dtype over the ranks of a process group, from one all-reduce.

    Args:
        group: the name of the group, because a graph of torch.compile can hold a name but not a group.
    """
    from torch.distributed import _functional_collectives as collectives  # absent in builds without distributed

    flat = torch.cat([each.reshape(-1) for each in tensors])
    whole = collectives.wait_tensor(collectives.all_reduce(flat, "sum", group))
    parts = whole.split([each.numel() for each in tensors])
    return [part.reshape(each.shape) for part, each in zip(parts, tensors, strict=True)]


# ---------------------------------------------------------------------------------------------------------------------
# The router


class RouterFacts(NamedTuple):
    """Static facts of the router; `alone`: whether the losses follow from the sums of this rank alone."""

    op: Router
    alone: bool


class RouterOperands(NamedTuple):
    """Operands of the router; `tokens`: int32 [1], T, the size of the one sequence if `sequence_sizes` is None."""

    logits: Any
    tokens: Any
    bias: Any
    mask: Any
    experts: Any
    key: Any
    sequence_sizes: Any


def _router_rule(run: Any, static: RouterFacts, o: RouterOperands) -> tuple[Any, ...]:
    bias = None if o.bias is None else run.cast(o.bias, "float32")
    options = {"mask": o.mask, "experts": o.experts, "key": o.key, "sequence_sizes": o.sequence_sizes}
    found = routing.choose(run, static.op, o.logits, o.tokens, bias=bias, **options)
    chosen = (found.weights, found.experts, found.load, found.first, found.read)
    if static.alone:
        return (*chosen, None, None, None, None, *routing.losses(run, static.op, found.sums, found.dropped))
    return (*chosen, *found.sums, found.dropped, None, None, None, None, None)


ROUTER = define(
    *("router", _router_rule, RouterOperands, RouterFacts, Router, Scores, GroupLimit),
    rows=("logits", "mask", "experts"),
)


class LossFacts(NamedTuple):
    """Static facts of the losses."""

    op: Router


class LossOperands(NamedTuple):
    """The sums over the tokens of all ranks, and how many slots this rank dropped."""

    probs: Any
    counts: Any
    stats: Any
    dropped: Any


def _losses_rule(run: Any, static: LossFacts, o: LossOperands) -> tuple[Any, ...]:
    return routing.losses(run, static.op, routing.Sums(o.probs, o.counts, o.stats), o.dropped)


LOSSES = define("router_losses", _losses_rule, LossOperands, LossFacts)


class RouterGradFacts(NamedTuple):
    """Static facts of the router's gradient; `experts` and `dtype`: E, and the dtype of the logits."""

    op: Router
    experts: int
    dtype: str


class RouterGradOperands(NamedTuple):
    """Operands of the router's gradient; `read` and `first` are those of `routing.Chosen`."""

    read: Any
    first: Any
    kept: Any
    slopes: Any
    z_slope: Any
    tokens: Any
    mask: Any
    key: Any
    sequence_sizes: Any
    d_weights: Any
    d_losses: Any


def _router_grad_rule(run: Any, static: RouterGradFacts, o: RouterGradOperands) -> tuple[Any]:
    found = None if o.d_losses is None else routing.Losses(None, o.slopes, o.z_slope, None, None)
    logits = ArraySpec((run.spec(o.read).shape[0], static.experts), static.dtype)
    operands = (o.read, o.first, o.kept, found, o.tokens, o.d_weights, o.d_losses, logits)
    options = {"mask": o.mask, "key": o.key, "sequence_sizes": o.sequence_sizes}
    return (routing.router_grad(run, static.op, *operands, **options),)


_ROUTER_GRAD = define(
    "router_grad",
    _router_grad_rule,
    RouterGradOperands,
    RouterGradFacts,
    rows=("read", "first", "kept", "mask", "d_weights"),
)


class Routed(NamedTuple):
    """Weights and experts [T, k], the load [E], then scalars. The weights and the two losses have gradients."""

    weights: Tensor
    experts: Tensor
    load: Tensor
    aux_loss: Tensor
    z_loss: Tensor
    entropy: Tensor
    dropped: Tensor
    overflow: Tensor


class _Chosen(NamedTuple):
    """The results of the router, and what backward reads."""

    routed: Routed
    first: Tensor
    read: Tensor
    slopes: Tensor
    z_slope: Tensor


def choose(op: Router, group: str | None, o: RouterOperands) -> Routed:
    """Chooses the experts of tokens; `group`: the name of the process group whose ranks share the losses, or None."""
    if torch.is_grad_enabled() and o.logits.requires_grad:
        return Routed(*_Router.apply(op, group, *o))
    return _chosen(op, group, o).routed


def _chosen(op: Router, group: str | None, o: RouterOperands) -> _Chosen:
    found = call(ROUTER, RouterFacts(op, group is None), o, o.logits.shape[0])
    weights, experts, load, first, read, *rest = found
    sums, dropped, of_losses = rest[:3], rest[3], rest[4:]
    if group is not None:
        probs, stats = summed(group, sums[0], sums[2])
        (counts,) = summed(group, sums[1])
        of_losses = call(LOSSES, LossFacts(op), LossOperands(probs, counts, stats, dropped), 0)
    values, slopes, z_slope, lost, overflow = of_losses
    aux_loss, z_loss, entropy = _elements(values)
    flag = overflow != 0 if is_compiling() else overflow.view(torch.bool)  # inductor of PyTorch 2.11 has no such view
    metrics = (aux_loss, z_loss, entropy, lost.reshape(()), flag.reshape(()))
    routed = Routed(weights, experts, load.reshape(-1), *metrics)
    return _Chosen(routed, first, read, slopes, z_slope)


def _elements(values: Tensor) -> list[Tensor]:
    """The elements of a vector, as tensors in its memory that are no views.

    PyTorch does not let users change views in place that come from one function together.
    """
    if is_compiling() or type(values) is not Tensor:
        return [torch.ops.aten._unsafe_view(each, ()) for each in values.unbind()]
    return [part_of(values, (), (), at) for at in range(values.shape[0])]  # 2 us of the host instead of 8


class _Router(torch.autograd.Function):
    """The autograd function of the router.

    It saves the choice [T, k], the logits [T, E] or the weights [T, k], and the slopes of the losses [S, E].
    """

    @staticmethod
    def forward(ctx: Any, op: Router, group: str | None, *operands: Any) -> tuple[Tensor, ...]:
        """`operands`: the fields of `RouterOperands`."""
        o = RouterOperands(*operands)
        found = _chosen(op, group, o)
        routed = found.routed
        ctx.facts = RouterGradFacts(op, o.logits.shape[1], dtype_name(o.logits.dtype))
        kept = None if op.capacity_factor is None else routed.experts
        slopes = (found.slopes, found.z_slope) if op.has_losses else (None, None)
        save(ctx, found.read, found.first, kept, *slopes, o.tokens, o.mask, o.key, o.sequence_sizes)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(routed.experts, routed.load, routed.entropy, routed.dropped, routed.overflow)
        return tuple(routed)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Gradients:
        """Returns the gradients of forward's arguments; only the logits have one."""
        upstream = Routed(*grad_outputs)  # pyrefly: ignore[bad-argument-type]
        return differentiate_once(
            "topk_router", ctx, (upstream.weights, upstream.aux_loss, upstream.z_loss), _router_backward
        )


def _router_backward(
    ctx: Any, d_weights: Tensor | None, d_aux_loss: Tensor | None, d_z_loss: Tensor | None
) -> Gradients:
    nothing = [None] * len(RouterOperands._fields)
    if not ctx.facts.op.has_losses:
        d_aux_loss = d_z_loss = None  # the losses are constants
    if d_weights is None and d_aux_loss is None and d_z_loss is None:
        return (None, None, *nothing)
    saved = ctx.saved_tensors
    d_losses = None
    if d_aux_loss is not None or d_z_loss is not None:
        zero = saved[0].new_zeros(())
        d_losses = torch.stack([zero if each is None else each for each in (d_aux_loss, d_z_loss)])
    operands = RouterGradOperands(*[*saved, d_weights, d_losses])
    (d_logits,) = call(_ROUTER_GRAD, ctx.facts, operands, saved[0].shape[0])
    return (None, None, d_logits, *nothing[1:])


# ---------------------------------------------------------------------------------------------------------------------
# Rows


class PermuteFacts(NamedTuple):
    """Static facts of `permute`."""

    num_groups: int
    align: int
    max_rows: int | None


class PermuteOperands(NamedTuple):
    """Operands of `permute`."""

    x: Any
    experts: Any
    probs: Any


def _permute_rule(run: Any, static: PermuteFacts, o: PermuteOperands) -> tuple[Any, ...]:
    tokens, slots = run.spec(o.experts).shape
    rows = row_count(tokens * slots, static.num_groups, static.align, static.max_rows)
    found = routing.order(run, o.experts, static.num_groups, rows, align=static.align, weights=o.probs)
    return (routing.gather(run, o.x, found.source, slots, inverse=found.inverse), *found)


_PERMUTE = define("permute", _permute_rule, PermuteOperands, PermuteFacts, rows=("x", "experts", "probs"))


class PermuteGradFacts(NamedTuple):
    """The dtypes of the gradients of x and of the probabilities; None for a gradient that is not needed."""

    x: str | None
    probs: str | None


class PermuteGradOperands(NamedTuple):
    """Operands of the gradients of `permute`.

    `entries` [T, k] has the place of each slot in `d_probs`; it is None if these are the places in `inverse`.
    """

    d_rows: Any
    d_probs: Any
    inverse: Any
    entries: Any


def _permute_grad_rule(run: Any, static: PermuteGradFacts, o: PermuteGradOperands) -> tuple[Any, ...]:
    dx = None if static.x is None else routing.combine(run, o.d_rows, o.inverse, static.x)
    places = o.inverse if o.entries is None else o.entries
    return dx, None if static.probs is None else routing.of_slots(run, o.d_probs, places, static.probs)


_PERMUTE_GRAD = define(
    *("permute_grad", _permute_grad_rule, PermuteGradOperands, PermuteGradFacts),
    rows=("inverse", "entries"),
    derived=("d_rows", "d_probs"),
)


def permute(static: PermuteFacts, o: PermuteOperands) -> tuple[Tensor, ...]:
    """Returns rows [M, H], sizes [G], source [M], inverse [T, k], dropped [1], and with probs those of rows [M]."""
    differs = o.x.requires_grad or (o.probs is not None and o.probs.requires_grad)
    if torch.is_grad_enabled() and differs:
        return _Permute.apply(static, *o)
    return _permuted(static, o)


def _permuted(static: PermuteFacts, o: PermuteOperands) -> tuple[Tensor, ...]:
    tokens = o.x.shape[0]
    if static.align > 1 and static.max_rows is None:  # rounding up cannot be expressed by a symbol of torch.compile
        tokens = int(tokens)
    return tuple([each for each in call(_PERMUTE, static, o, tokens) if each is not None])


class _Permute(torch.autograd.Function):
    """The autograd function of `permute`. It saves the inverse map [T, k]."""

    @staticmethod
    def forward(ctx: Any, static: PermuteFacts, *operands: Any) -> tuple[Tensor, ...]:
        """`operands`: the fields of `PermuteOperands`."""
        o = PermuteOperands(*operands)
        found = _permuted(static, o)
        rows, sizes, source, inverse, dropped, *probs = found
        ctx.dtypes = (o.x.dtype, None if o.probs is None else o.probs.dtype)
        save(ctx, inverse)
        ctx.set_materialize_grads(False)
        fixed = [sizes, source, inverse, dropped]
        if not ctx.needs_input_grad[1]:
            fixed.append(rows)
        if not ctx.needs_input_grad[3]:
            fixed += probs
        ctx.mark_non_differentiable(*fixed)
        return found

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Gradients:
        """Returns the gradients of forward's arguments, given those of the rows and of their probabilities."""
        d_rows, _, _, _, _, *rest = grad_outputs
        return differentiate_once("permute", ctx, (d_rows, rest[0] if rest else None), permute_backward)


def permute_backward(ctx: Any, d_rows: Tensor | None, d_probs: Tensor | None) -> Gradients:
    """Returns gradients of (facts, x, experts, probs); `ctx` holds the maps of slots and the dtypes of x and probs."""
    needs_x, _, needs_probs = ctx.needs_input_grad[1:]
    inverse, *entries = ctx.saved_tensors
    d_rows, d_probs = d_rows if needs_x else None, d_probs if needs_probs else None
    if d_rows is None and d_probs is None:
        return None, None, None, None
    names = [None if of is None else dtype_name(dtype) for of, dtype in zip((d_rows, d_probs), ctx.dtypes, strict=True)]
    operands = PermuteGradOperands(d_rows, d_probs, inverse, entries[0] if entries else None)
    dx, dp = call(_PERMUTE_GRAD, PermuteGradFacts(*names), operands, inverse.shape[0])
    return None, dx, None, dp


class CombineFacts(NamedTuple):
    """Static facts of `unpermute`; `dtype`: the dtype of y."""

    dtype: str


class CombineOperands(NamedTuple):
    """Operands of `unpermute`."""

    y: Any
    inverse: Any
    weights: Any


def _combine_rule(run: Any, static: CombineFacts, o: CombineOperands) -> tuple[Any]:
    return (routing.combine(run, o.y, o.inverse, static.dtype, o.weights),)


_COMBINE = define(
    "unpermute", _combine_rule, CombineOperands, CombineFacts, rows=("inverse", "weights"), derived=("y",)
)


class CombineGradFacts(NamedTuple):
    """Static facts of the gradients of `unpermute`: the dtype of y, and whether y and the weights need a gradient."""

    dtype: str
    of_rows: bool
    of_weights: bool


class CombineGradOperands(NamedTuple):
    """Operands of the gradients of `unpermute`."""

    y: Any
    source: Any
    inverse: Any
    weights: Any
    grad: Any


def _combine_grad_rule(run: Any, static: CombineGradFacts, o: CombineGradOperands) -> tuple[Any, ...]:
    return routing.combine_grads(run, *o, static.dtype, (static.of_rows, static.of_weights))


_COMBINE_GRAD = define(
    *("unpermute_grad", _combine_grad_rule, CombineGradOperands, CombineGradFacts),
    rows=("inverse", "weights", "grad"),
    derived=("y", "source"),
)


def unpermute(y: Tensor, source: Tensor, inverse: Tensor, weights: Tensor | None) -> Tensor:
    """Returns [T, H]: the (weighted) sum of each token's rows of y [M, H]."""
    differs = y.requires_grad or (weights is not None and weights.requires_grad)
    if torch.is_grad_enabled() and differs:
        return _Combine.apply(y, source, inverse, weights)
    return _combined(y, inverse, weights)


def _combined(y: Tensor, inverse: Tensor, weights: Tensor | None) -> Tensor:
    operands = CombineOperands(y, inverse, weights)
    return call(_COMBINE, CombineFacts(dtype_name(y.dtype)), operands, inverse.shape[0])[0]


class _Combine(torch.autograd.Function):
    """The autograd function of `unpermute`. It saves y only for the gradient of the weights."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, source: Tensor, inverse: Tensor, weights: Tensor | None) -> Tensor:
        """Returns the sums [T, H]."""
        of_rows, of_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
        ctx.facts = CombineGradFacts(dtype_name(y.dtype), of_rows, of_weights)
        # The gradient of weights has their dtype, so they are read for it too.
        save(ctx, y if of_weights else None, source if of_rows else None, inverse, weights)
        return _combined(y, inverse, weights)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Gradients:
        """Returns the gradients of forward's arguments, given that of the result [T, H]."""
        return differentiate_once("unpermute", ctx, grad_outputs, _combine_backward)


def _combine_backward(ctx: Any, grad: Tensor) -> Gradients:
    y, source, inverse, weights = ctx.saved_tensors
    operands = CombineGradOperands(y, source, inverse, weights, grad)
    dy, dw = call(_COMBINE_GRAD, ctx.facts, operands, inverse.shape[0])
    return dy, None, None, dw


# ---------------------------------------------------------------------------------------------------------------------
# Padding


class PadFacts(NamedTuple):
    """Static facts of `padding`."""

    align: int


class PadOperands(NamedTuple):
    """Operands of `padding`."""

    rows: Any
    sizes: Any


def _pad_rule(run: Any, static: PadFacts, o: PadOperands) -> tuple[Any, ...]:
    return routing.padding(run, o.sizes, run.spec(o.rows).shape[0], static.align)


_PAD = define("pad_groups", _pad_rule, PadOperands, PadFacts)


class GatherFacts(NamedTuple):
    """A gather has no static facts."""


class GatherOperands(NamedTuple):
    """Operands of a gather of rows."""

    rows: Any
    source: Any


def _gather_rule(run: Any, static: GatherFacts, o: GatherOperands) -> tuple[Any]:
    del static
    return (routing.gather(run, o.rows, o.source, 1),)


_GATHER = define("gather_rows", _gather_rule, GatherOperands, GatherFacts)


def padding(rows: Tensor, sizes: Tensor, align: int) -> tuple[Tensor, ...]:
    """Returns the padded sizes [G], the row in each padded place [P], and the place of each row [M]."""
    return tuple(call(_PAD, PadFacts(align), PadOperands(rows.detach(), sizes), int(rows.shape[0])))


def gather(rows: Tensor, source: Tensor, inverse: Tensor) -> Tensor:
    """Returns rows[source], with zeros where source is -1; the gradient reads `inverse`, the map back."""
    if torch.is_grad_enabled() and rows.requires_grad:
        return _Gather.apply(rows, source, inverse)
    return _gathered(rows, source)


def _gathered(rows: Tensor, source: Tensor) -> Tensor:
    return call(_GATHER, GatherFacts(), GatherOperands(rows, source), int(source.shape[0]))[0]


class _Gather(torch.autograd.Function):
    """The autograd function of `gather`. It saves the inverse map."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, inverse: Tensor) -> Tensor:
        """Returns rows[source]."""
        save(ctx, inverse)
        return _gathered(rows, source)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Gradients:
        """Returns the gradients of forward's arguments."""
        return differentiate_once("pad_groups", ctx, grad_outputs, _gather_backward)


def _gather_backward(ctx: Any, grad: Tensor) -> Gradients:
    return _gathered(grad, *ctx.saved_tensors), None, None


# ---------------------------------------------------------------------------------------------------------------------
# Without gradients


class HashFacts(NamedTuple):
    """Static facts of `hash_experts`, which chooses experts by token ids."""

    k: int
    num_experts: int


class HashOperands(NamedTuple):
    """Operands of `hash_experts`."""

    token_ids: Any
    table: Any


def _hash_rule(run: Any, static: HashFacts, o: HashOperands) -> tuple[Any]:
    return (routing.hash_experts(run, o.token_ids, static.k, static.num_experts, o.table),)


HASH = define("hash_experts", _hash_rule, HashOperands, HashFacts, rows=("token_ids",))


class BiasFacts(NamedTuple):
    """Static facts of the sign rule, which updates the router's bias."""

    rate: float


class BiasOperands(NamedTuple):
    """Operands of the sign rule."""

    bias: Any
    load: Any


def _bias_rule(run: Any, static: BiasFacts, o: BiasOperands) -> tuple[Any]:
    return (routing.update_bias(run, o.bias, o.load, static.rate),)


BIAS = define("update_bias", _bias_rule, BiasOperands, BiasFacts)


class QuantileFacts(NamedTuple):
    """Static facts of quantile balancing."""

    k: int
    score: str
    bins: int
    low: float
    high: float


class MarginOperands(NamedTuple):
    """Operands of the histogram of margins."""

    logits: Any
    bias: Any
    mask: Any


def _margins_rule(run: Any, static: QuantileFacts, o: MarginOperands) -> tuple[Any]:
    return (routing.margins(run, o.logits, o.bias, *static, o.mask),)


MARGINS = define("margins", _margins_rule, MarginOperands, QuantileFacts, rows=("logits", "mask"))


class CountOperands(NamedTuple):
    """The histogram of margins, summed over all ranks."""

    counts: Any


def _quantile_rule(run: Any, static: QuantileFacts, o: CountOperands) -> tuple[Any]:
    return (routing.quantile_bias(run, o.counts, static.k, static.low, static.high),)


QUANTILE = define("quantile_bias", _quantile_rule, CountOperands, QuantileFacts)
