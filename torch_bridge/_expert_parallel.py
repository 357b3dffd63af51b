"""Layers whose experts are spread over the ranks of a process group, on `torch.distributed`.

`moe` is the whole layer; `dispatch` and `combine` are its two exchanges, for layers that users write themselves. The
results do not depend on how the experts are spread (docs/contracts.md, LYR-9). docs/parallel.md describes all of it.

Letters: P ranks, T tokens of a rank, E experts, L = E / P experts of a rank, k experts per token, B rows that one rank
sends to one rank at most, H hidden size, M rows that a rank receives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from grouped_core import exchange
from grouped_core.activations import Activation
from grouped_core.exchange import Exchange
from grouped_core.formats import Format, QTensor, as_flag
from grouped_core.mlp_spec import Residuals
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.routing_spec import check_shared
from torch_bridge import _autocast, _codec, _exchange, _routing, _symmetric, main_grad, route
from torch_bridge._args import Accumulators, Members
from torch_bridge._checks import check_group, check_readable
from torch_bridge._expert_lora import AdapterOptions, check_adapters
from torch_bridge._router import check_routing, router_logits
from torch_bridge._serialized import name_in_files
from torch_bridge._tensors import E8M0, StraightThrough, dtype_name, rows_spec
from torch_bridge.moe import SharedExpert, experts_held, of_shared
from torch_bridge.route import MoEAux, Permutation, topk_router
from torch_bridge.routed import routed_mlp
from torch_bridge.sizes import saturate

FUNCTION = "parallel.moe"


class Arrived(NamedTuple):
    """What a rank received.

    Attributes:
        rows: [M, H]; if codes were sent, a `straight_through` operand that holds them.
        experts: int32 [M, j], local numbers 0 to L - 1 of the experts of each row, -1 for none.
        weights: fp32 [M, j], the router's weights. handle: what `combine` needs. dropped: int32 scalar, the number of
            slots of this rank's tokens that did not travel, plus the number of slots that arrived and have no room.
        max_rows: the number of rows that the experts have room for; None: M j.
    """

    rows: Tensor | StraightThrough
    experts: Tensor
    weights: Tensor
    handle: Any
    dropped: Tensor
    max_rows: int | None = None


@runtime_checkable
class Transport(Protocol):
    """How tokens travel: a class of this module, or an object of the caller's around another library.

    All ranks call both methods, in the same order, also ranks without tokens. `dispatch` is differentiable in tokens
    and weights, `combine` in the results. A transport may also have `begin_dispatch` and `begin_combine`, with the same
    arguments. They begin the exchange and return a function that finishes it and returns its result, so that the
    exchange overlaps with the work in between.
    """

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor, num_experts: int) -> Arrived:
        """Sends tokens x [T, H] to the ranks of their experts [T, k] of E, with their weights [T, k]."""
        ...

    def combine(self, y: Tensor, handle: Any) -> Tensor:
        """Returns [T, H]: for each token the sum of the results y [M, H] of its rows, in fp32, rounded once."""
        ...


class Way(NamedTuple):
    """Where the rows went: the slot in each row that was sent [P B], and the row of each slot [T, k]. If only the rows
    in use travel, also how many were sent to each rank and how many came from it, int64 [P] each.
    """

    source: Tensor
    inverse: Tensor
    went: Tensor | None = None
    came: Tensor | None = None


name_in_files(Arrived, Way)


@dataclass(frozen=True)
class AllToAll:
    """Sends one part of a static size from every rank to every rank; no size is read on the host.

    Attributes:
        process_group: the group of the P ranks; rank r has experts r L to (r + 1) L - 1.
        budget_factor: a rank sends to one rank at most this many times the mean number of rows; rows beyond are
            dropped. None: as many as there can be.
        codes: the format, with scales per row, in which tokens travel; None: they travel in their dtype.
        once_per_rank: whether a token is sent to a rank once, for all its experts there.
        function: what messages call the operation that uses it.
    """

    process_group: Any
    budget_factor: float | None = None
    codes: Format | None = None
    once_per_rank: bool = False
    function: str = FUNCTION

    def option(self, experts: Tensor, num_experts: int) -> Exchange:
        """Returns the facts of the exchange for tokens with experts [T, k]."""
        fixed = (num_experts, experts.shape[1], self.budget_factor)
        num_experts, slots, factor = [_codec.constant(each) for each in fixed]
        tokens = experts.shape[0]
        if factor is not None:  # rounding up cannot be expressed by a symbol of torch.compile
            tokens = _codec.constant(tokens)
        facts = {"ranks": self.process_group.size(), "experts": num_experts, "tokens": tokens, "slots": slots}
        return exchange.exchange_option(self.function, **facts, budget_factor=factor, once_per_rank=self.once_per_rank)

    @property
    def _group(self) -> _exchange.Group:
        return _exchange.Group(self.process_group.group_name, self.process_group.size())

    def begin_dispatch(self, x: Tensor, experts: Tensor, weights: Tensor, num_experts: int) -> Callable[[], Arrived]:
        """Begins `dispatch`; a call of the result finishes it."""
        _exchange.check_sent(self.function, x, weights, self.process_group)
        option = self.option(experts, num_experts)
        sent, room = _exchange.send(option, x, experts, weights, self.codes), option.max_rows
        # Float32 scales are stored block by block, others row by row.
        along = 0 if self.codes is None else int(self.codes.scales == "float32")
        found = _exchange.begin_dispatch(sent, self._group, along)

        def finish() -> Arrived:
            brought, rows = found(), None
            if self.codes is not None:
                shape, dtype = tuple(brought.rows.shape), dtype_name(x.dtype)
                values, scales = brought.values, brought.scales
                assert values is not None, "codes were sent"
                assert scales is not None, "codes were sent"
                scales = scales.view(E8M0) if self.codes.scales == "float8_e8m0fnu" else scales
                q = QTensor(values, scales, None, self.codes, 1, shape, dtype)
                rows = StraightThrough(brought.rows, q)
            counts = [_exchange.counts_of(each, self._group) for each in (sent.experts, brought.experts)]
            way, dropped = Way(sent.source, sent.inverse, *counts), sent.dropped.reshape(())
            if room is not None:
                dropped = dropped + _exchange.beyond(brought.experts, room)
            rows = brought.rows if rows is None else rows
            return Arrived(rows, brought.experts, brought.probs, way, dropped, room)

        return finish

    def begin_combine(self, y: Tensor, handle: Way) -> Callable[[], Tensor]:
        """Begins `combine`; a call of the result finishes it."""
        _exchange.check_results(self.function, y, self.process_group)
        rows = _exchange.begin(y, self._group, handle.came)
        return lambda: _exchange.sums(rows(handle.went), handle.source, handle.inverse)

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor, num_experts: int) -> Arrived:
        """Does what `Transport.dispatch` describes, with M = P B and j = 1, or min(k, L) with `once_per_rank`.

        Rows that are not used have the expert -1.
        """
        return self.begin_dispatch(x, experts, weights, num_experts)()

    def combine(self, y: Tensor, handle: Way) -> Tensor:
        """Sends results back and sums them, as `Transport.combine` describes."""
        return self.begin_combine(y, handle)()


@dataclass(frozen=True, eq=False)
class SymmetricMemory(AllToAll):
    """Works as `AllToAll` does, but only the rows in use travel, through PyTorch's symmetric memory and NVSHMEM.

    The numbers of rows stay on the device. Buffers have the size of the budget and are made once per process group,
    shape and dtype, for all layers; they are never freed. Experts, weights and scales travel as in `AllToAll`.

    Raises:
        RuntimeError: this machine has no such memory.
    """

    def __post_init__(self) -> None:
        _symmetric.require(self.function)

    @property
    def _group(self) -> _exchange.Group:
        return _exchange.Group(self.process_group.group_name, self.process_group.size(), True)


def _begin_dispatch(by: Transport, *arguments: Any) -> Callable[[], Arrived]:
    begin = getattr(by, "begin_dispatch", None)
    if begin is not None:
        return begin(*arguments)
    arrived = by.dispatch(*arguments)
    return lambda: arrived


def _begin_combine(by: Transport, y: Tensor, handle: Any) -> Callable[[], Tensor]:
    begin = getattr(by, "begin_combine", None)
    if begin is not None:
        return begin(y, handle)
    found = by.combine(y, handle)
    return lambda: found


TRANSPORTS = {"all_to_all": AllToAll, "symmetric_memory": SymmetricMemory}


def transport_option(
    function: str,
    transport: str | Transport,
    process_group: Any,
    budget_factor: float | None,
    once_per_rank: bool,
    send: str | None = "tokens",
    recipe: Recipe | BoundRecipe | None = None,
    *,
    adapted: bool = False,
) -> Transport:
    """Returns the transport that the arguments of `function` choose.

    Args:
        adapted: whether the experts have adapters.

    Raises:
        ValueError: no transport has this name; or an option of the exchange is given beside a transport of the
            caller's; or codes are to be sent beside adapters, or with a recipe whose scales are not those of single
            rows. TypeError: no process group, or an object without `dispatch` and `combine`. RuntimeError: the machine
            lacks what the transport needs.
    """
    once_per_rank = as_flag("once_per_rank", once_per_rank, function)
    budget_factor = _codec.constant(budget_factor)
    exchange.check_budget_factor(function, budget_factor)
    codes = None
    if send != "tokens" and (send, recipe) != (None, None):
        codes = exchange.format_sent(function, send, recipe, adapted=adapted)
    if not isinstance(transport, str):
        if not isinstance(transport, Transport):
            raise TypeError(
                f"`transport` of {function}: {type(transport).__name__}, expected a name or an object with `dispatch` "
                "and `combine`; see torch_bridge.parallel.Transport."
            )
        if budget_factor is not None:
            raise ValueError(
                f"`budget_factor` of {function}: {budget_factor} beside an own transport, expected None; give the "
                "transport its budget."
            )
        if once_per_rank:
            raise ValueError(
                f"`once_per_rank` of {function}: True beside an own `transport`, expected False; let its `dispatch` "
                "bring rows with several experts each."
            )
        if send == "codes":
            raise ValueError(
                f"`send` of {function}: 'codes' beside an own transport, expected None or 'tokens'; quantise in its "
                "`dispatch`."
            )
        return transport
    if transport not in TRANSPORTS:
        raise ValueError(
            f"`transport` of {function}: {transport!r}, expected {', '.join(TRANSPORTS)} or an object with `dispatch` "
            "and `combine`; all_to_all is the default."
        )
    check_group(function, process_group)
    return TRANSPORTS[transport](process_group, budget_factor, codes, once_per_rank, function)


# ---------------------------------------------------------------------------------------------------------------------
# The two exchanges


@dataclass(frozen=True, eq=False)
class Handle:
    """What `combine` has to know about a `dispatch`.

    Attributes:
        probs: the router's weight of each row, fp32 [M], 0 where there is no row; differentiable.
        dropped: the number of slots without a row, on all ranks, int32 scalar. overflow: whether there are any, bool
            scalar.
        permutation, way, transport: where the rows are, and how they were sent.
    """

    probs: Tensor
    dropped: Tensor
    overflow: Tensor
    permutation: Permutation
    way: Any
    transport: Transport


def dispatch(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    num_experts: int,
    *,
    process_group: Any,
    transport: str | Transport = "all_to_all",
    budget_factor: float | None = None,
    once_per_rank: bool = False,
) -> tuple[Tensor, Tensor, Handle]:
    """Sends each token to the ranks of its experts; rank r has experts r L to (r + 1) L - 1. Every rank calls it.

    Args:
        x: [T, H], the tokens of this rank, as many on every rank; differentiable.
        experts: integers [T, k]; numbers other than 0 to E - 1 choose no expert.
        weights: [T, k], the router's weights; they travel as fp32 and come out as `handle.probs`; differentiable.
        num_experts: E. process_group: the group of the P ranks.
        transport: "all_to_all", "symmetric_memory", or a `Transport`. budget_factor, once_per_rank: as in `moe`.

    Returns:
        rows [M, H] of the experts of this rank, sorted by expert, then source rank, token and place, with zeros behind
        the last one, M = P B, or with `once_per_rank` at most P B j, j = min(k, L); their sizes, int32 [L]; and
        `Handle`.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    function = "parallel.dispatch"
    by = transport_option(function, transport, process_group, budget_factor, once_per_rank)
    check_readable("experts", experts, x)
    check_readable("weights", weights, x)
    exchange.check_dispatch(function, rows_spec(x), rows_spec(experts), rows_spec(weights))
    own = exchange.own_experts(function, num_experts, process_group.size())
    arrived = by.dispatch(x, saturate(experts), weights, num_experts)
    assert isinstance(arrived.rows, Tensor), "no codes were asked for"
    options: dict[str, Any] = {"probs": arrived.weights, "max_rows": arrived.max_rows}
    rows, sizes, permutation = route.permute(arrived.rows, arrived.experts, own, **options)
    (lost,) = _routing.summed(process_group.group_name, arrived.dropped)
    probs = permutation.probs
    assert probs is not None, "weights were given"
    return rows, sizes, Handle(probs, lost, lost > 0, permutation, arrived.handle, by)


def combine(y: Tensor, handle: Handle) -> Tensor:
    """Sends the results of the rows of `dispatch` back, and sums them per token in the order of places, in fp32.

    Weights are not applied again: multiply by `handle.probs`, or give it to `grouped_mlp` as `probs`. Every rank calls
    it.

    Args:
        y: [M, H]; differentiable. handle: the one that `dispatch` returned.

    Returns:
        [T, H] in the dtype of y, rounded once; slots without a row add 0.

    Raises:
        ValueError: another number of rows. TypeError: a dtype does not fit.
    """
    exchange.check_combine("parallel.combine", rows_spec(y), handle.permutation.source.shape[0])
    return handle.transport.combine(route.unpermute(y, handle.permutation), handle.way)


# ---------------------------------------------------------------------------------------------------------------------
# The layer


class Layer(NamedTuple):
    """What an expert-parallel layer runs around its exchanges.

    Attributes:
        transport: how tokens travel. chunks: number of parts of the tokens; exchanges of one part overlap with the
            experts' work on another.
        experts: a function (number of the chunk, rows, local experts, weights, room=) -> results [M, H] of the rows.
        meanwhile: a function () -> a term of y, or None, which is computed while the first tokens travel.
    """

    process_group: Any
    transport: Transport
    num_experts: int
    chunks: int
    experts: Callable[..., Tensor]
    meanwhile: Callable[[], Tensor | None]

    def run(self, x: Tensor, weights: Tensor, experts: Tensor, aux: MoEAux) -> tuple[Tensor, MoEAux]:
        """Returns (y, aux) of tokens x [T, H] with experts [T, k] of all ranks; aux covers the tokens of all ranks."""
        parts = list(zip(*(each.tensor_split(self.chunks) for each in (x, experts, weights)), strict=True))
        pending = [_begin_dispatch(self.transport, *each, self.num_experts) for each in parts]
        beside, lost, coming, delivered = self.meanwhile(), aux.dropped, [], {}
        for number, finish in enumerate(pending):
            arrived = finish()
            lost = lost + arrived.dropped
            results = self._results(None if self.chunks == 1 else main_grad.Part(delivered, number), arrived)
            coming.append(_begin_combine(self.transport, results, arrived.handle))
        (whole,) = _routing.summed(self.process_group.group_name, torch.cat([aux.load, lost.reshape(1)]))
        found = [finish() for finish in coming]
        y = found[0] if self.chunks == 1 else torch.cat(found)
        load, lost = whole[:-1], whole[-1]
        # Not `_replace`: Dynamo of PyTorch 2.11 cannot return a tuple that is made so.
        aux = MoEAux(load, aux.aux_loss, aux.z_loss, lost, lost > 0, aux.entropy)
        return y if beside is None else y + beside, aux

    def _results(self, part: main_grad.Part | None, arrived: Arrived) -> Tensor:
        of_tokens = (arrived.rows, arrived.experts, arrived.weights)
        with main_grad.running(part):
            return self.experts(part.number if part else 0, *of_tokens, room=arrived.max_rows)


def save_list() -> set[Any]:
    """Operators for the save list of selective checkpointing: it then keeps what has arrived, and sends nothing twice.

    Add `nn.save_list()` if the results of the router and of the experts are to be kept as well.
    """
    return {*_exchange.operators(), _symmetric.operator(), torch.ops.torch_bridge.send.default}


def check_chunks(function: str, chunks: int) -> None:
    """Refuses a number of chunks that is not an integer from 1 on.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ValueError(
            f"`chunks` of {function}: {chunks!r}, expected an integer from 1 on; 2 lets the exchange of one half "
            "of the tokens overlap with the experts of the other."
        )


def moe(
    x: Tensor,
    router: Tensor,
    wi: Members | QTensor[Tensor] | StraightThrough,
    wo: Members | QTensor[Tensor] | StraightThrough,
    k: int,
    *,
    process_group: Any,
    transport: str | Transport = "all_to_all",
    budget_factor: float | None = None,
    once_per_rank: bool = False,
    send: str | None = None,
    chunks: int = 1,
    shared: SharedExpert | None = None,
    rhs_transposed: bool = True,
    activation: str | Activation = "swiglu",
    wi_bias: Members | None = None,
    wo_bias: Members | None = None,
    recipe: Recipe | BoundRecipe | None = None,
    residuals: str | Residuals = "save_fc1",
    wgrad_accum: Accumulators | None = None,
    implementation: str | Sequence[str] | None = None,
    lora: Sequence[Any] | None = None,
    lora_scaling: float = 1,  # not 1.0, which Dynamo would make a symbol
    lora_dropout: float = 0,
    lora_key: Tensor | None = None,
    lora_wgrad_accum: str | Sequence[Any] | None = None,
    **routing: Any,
) -> tuple[Tensor, MoEAux]:
    """`torch_bridge.moe` over the ranks of a process group: experts on different ranks, to which rows travel and back.

    Every rank calls it, also one without tokens, and the same things need gradients on each. Gradients of `router` are
    those of this rank's tokens, and losses are those of all: sum the gradients of replicated parameters over the ranks,
    as data parallel training does.

    Args:
        x: [T, H], the tokens of this rank, as many on every rank: pad with tokens that `mask` leaves out.
        router: [E, H], with the E experts of all ranks. k: experts per token.
        wi, wo: the weights of the L experts of this rank, which start at expert rank * L.
        process_group: the group of the P ranks.
        transport: "all_to_all" exchanges parts of a static size between all ranks, "symmetric_memory" only the rows in
            use, between GPUs with NVSHMEM. Both give the same bits. Or a `Transport`.
        budget_factor: a rank sends to one rank at most this many times the mean number of rows, T k / P; rows beyond
            are dropped and counted in `MoEAux`. None: as many as there can be.
        once_per_rank: a token is sent to a rank once, with all its experts there, instead of once for each; the sum of
            their results, rounded to the dtype of x, comes back. The mean number of rows is then that of the tokens
            with an expert on a rank, T (1 - C(E - L, k) / C(E, k)). y and the gradient of x differ from those of one
            rank by these roundings; no other gradient does.
        send: what travels to the experts. "tokens": rows of x, quantised where they arrive. "codes": rows quantised
            where they are sent, half the bytes or less, for recipes whose scales are those of single rows (FP8Block,
            MXFP8); the gradient of wi reads the dequantised codes. None: codes where the recipe allows it.
        chunks: the number of parts of the tokens; the exchanges of one part overlap with the experts' work on another.
            y and the gradient of x keep their bits, but for recipes whose scales follow from all rows of an expert (the
            beginning of docs/parallel.md); the gradients of the experts are sums over the parts.
        shared: an expert that every rank holds, computed while the first tokens travel.
        lora, lora_scaling, lora_dropout, lora_key, lora_wgrad_accum: adapters of the L experts of this rank, as in
            `grouped_mlp`; those of `shared` are replicated. Tokens then travel as they are. The key is the same on all
            ranks: each adds its number to the high word, and P for each chunk before, so masks are not those of one
            rank.
        The others: as in `torch_bridge.moe`; `routing` without `process_group`. `sequence_sizes` are those of this
            rank's tokens, as many on every rank, or parts with `split_sequences`.

    Returns:
        y: [T, H]. aux: `MoEAux` of the tokens of all ranks, equal on all of them.

    Raises:
        TypeError, ValueError: an argument does not fit; and what `topk_router` and `routed_mlp` raise.
    """
    check_routing(FUNCTION, moe, routing)
    how = (transport, process_group, budget_factor, once_per_rank, send, recipe)
    by = transport_option(FUNCTION, *how, adapted=lora is not None)
    check_chunks(FUNCTION, chunks)
    of_lora = AdapterOptions(lora_scaling, lora_dropout, lora_key)
    for name, each in (("x", x), ("router", router)):
        check_readable(name, each, x)
    check_shared(FUNCTION, shared, SharedExpert)
    check_adapters(x, lora, shared, of_lora, lora_wgrad_accum)
    experts = _codec.constant(router.shape[0])
    check_own(experts, wo, process_group)
    rank, ranks = process_group.rank(), process_group.size()

    def run_experts(number: int, rows: Any, local: Tensor, probs: Tensor, *, room: int | None) -> Tensor:
        of_adapters: dict[str, Any] = {}
        if lora is not None:
            of_adapters = {"lora": lora, "lora_wgrad_accum": lora_wgrad_accum, **of_lora.of_part(rank + number * ranks)}
        return routed_mlp(
            *(rows, local, probs, wi, wo),
            rhs_transposed=rhs_transposed,
            activation=activation,
            wi_bias=wi_bias,
            wo_bias=wo_bias,
            recipe=recipe,
            residuals=residuals,
            max_rows=room,
            wgrad_accum=wgrad_accum,
            implementation=implementation,
            **of_adapters,
        )

    def meanwhile() -> Tensor | None:
        if shared is None:
            return None
        options: dict[str, Any] = {"activation": activation, "residuals": residuals, "implementation": implementation}
        if shared.lora is not None:
            options |= {"lora": shared.lora, **of_lora.of_part(rank, shared=True)}
        return of_shared(x, shared, rhs_transposed=rhs_transposed, **options)

    layer = Layer(process_group, by, experts, chunks, run_experts, meanwhile)
    weights, chosen, aux = topk_router(router_logits(x, router), k, process_group=process_group, **routing)
    return layer.run(_autocast.cast(x, _autocast.dtype_of(x)), weights, chosen, aux)


def check_own(experts: int, wo: Any, process_group: Any) -> None:
    """Refuses weights that do not have as many experts as one rank holds.

    Raises:
        ValueError: ranks do not divide the experts, or the number of those given is wrong.
    """
    own = exchange.own_experts(FUNCTION, experts, process_group.size())
    held = experts_held(wo)
    if held is not None and held != own:  # what is no weight is refused with the others
        raise ValueError(
            f"`wo` of {FUNCTION}: {held} experts on a rank, expected {own} of the {experts} that `router` chooses "
            "from; pass those of this rank, in order of ranks."
        )
