"""Where the gradients of one product go, whatever operators compute them: facts, launchers, delivery.

Letters: G groups, M rows, K in, N out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core import memory
from grouped_core.formats import wide
from grouped_core.gradients import Needs
from torch_bridge import _library, main_grad
from torch_bridge._arguments import destinations, weight_names
from torch_bridge._compiling import is_compiling
from torch_bridge._memory import EXCHANGE
from torch_bridge._run import TORCH_DTYPES
from torch_bridge.params import local
from torch_bridge.primary import QuantizedWeight


class Owner(NamedTuple):
    """A module's side of one product: its Parameters, of which the weights may be casts, and what it delays."""

    parameters: tuple[Any, ...]
    delayed: main_grad.Delayed | None


Static = tuple[str, tuple[int, int], tuple[bool, bool], bool, tuple[bool, ...] | None]
"""The operation; how many weights and biases; whether each is one tensor; whether gradients of weights go to
`main_grad`; whether they replace what is there (None: ask the Parameters)."""


class ProductFacts(NamedTuple):
    """What forward tells the backward of one product beside tensors."""

    text: str  # the operation
    dtypes: str  # of x, weight, bias, row_scale
    counts: tuple[int, int]  # weights, biases
    packed: tuple[bool, bool]  # whether weights, biases are one tensor, or weights two that have all groups each
    live: Sequence[int]  # weights that need a gradient
    live_biases: Sequence[int]
    kept_weights: int  # of the saved tensors
    flags: bool  # whether Parameters have flags to raise
    overwrite: tuple[bool, ...] | None  # None: ask the Parameters
    needs: Needs
    k: int
    weight_name: str = _library.NAMES.w  # the argument, for messages


@lru_cache(maxsize=1024)
def facts_of(
    static: Static, dtypes: tuple[torch.dtype | None, ...], needed: tuple[bool, ...], first: int
) -> tuple[Needs, tuple[bool, ...], tuple[Any, ...]]:
    """As `_facts`, of a function whose differentiable arguments start at `first`."""
    text, counts, packed, to_main_grad, overwrite = static
    needs_x, needs_scale, *needs_members = needed[first:]
    live = tuple(at for at in range(counts[0]) if needs_members[at])
    live_biases = tuple(at for at in range(counts[1]) if needs_members[counts[0] + at])
    needs = Needs(needs_x, len(live) > 0, len(live_biases) > 0, needs_scale)
    kept = _library.saved(text, needs, dtypes[2] is not None, dtypes[3] is not None)
    kept_weights = counts[0] if kept.w else 0
    flags = to_main_grad and overwrite is None
    names = _library.dtype_names(*dtypes)
    return kept, tuple(needs), (text, names, counts, packed, live, live_biases, kept_weights, flags, overwrite)


@lru_cache(maxsize=1024)
def product_facts(
    text: str,
    dtypes: tuple[torch.dtype | None, ...],
    k: int,
    members: tuple[int, int, int],
    packed: tuple[bool, bool],
    live: tuple[tuple[int, ...], tuple[int, ...]],
    needs_x: bool,
    flags: bool,
    overwrite: tuple[bool, ...] | None,
    name: str,
) -> ProductFacts:
    """Facts of one product of an MLP, put together once; `members`: weights, biases, weights that are saved."""
    return ProductFacts(
        text,
        dtypes=_library.dtype_names(*dtypes),
        k=k,
        counts=members[:2],
        packed=packed,
        needs=Needs(needs_x, len(live[0]) > 0, len(live[1]) > 0, False),
        live=live[0],
        live_biases=live[1],
        kept_weights=members[2],
        flags=flags,
        weight_name=name,
        overwrite=overwrite,
    )


def owners_of(
    weights: Sequence[Tensor], elsewhere: bool, owner: Owner | None
) -> tuple[Sequence[Any], main_grad.Delayed | None]:
    """(the Parameters of weights whose gradients do not go to autograd, what delays them); () if they do."""
    if owner is None:
        return (weights if elsewhere else ()), None
    return (owner.parameters if elsewhere or owner.delayed is not None else ()), owner.delayed


def check_listed_once(*products: tuple[str, Sequence[Any], Owner | None, bool]) -> None:
    """Refuses a weight that stands twice in one call where its gradient goes to an accumulator, or waits.

    Args:
        products: of each the argument's name, its weights, a module's side, and whether it has accumulators.

    Raises:
        ValueError: two that need a gradient are one, or overlap in memory.
    """
    members = [
        (name, weights if owner is None else owner.parameters)
        for name, weights, owner, accumulates in products
        if accumulates or (owner is not None and owner.delayed is not None)
    ]
    live = [each for _, weights in members for each in weights if each.requires_grad]
    if is_compiling():  # where there are no addresses
        if len(set(live)) == len(live):
            return
    elif not live or _apart(live):
        return
    seen: list[tuple[str, tuple[int, int]]] = []
    for argument, weights in members:
        for name, each in zip(weight_names(weights, argument), weights, strict=True):
            if not each.requires_grad:
                continue
            place = (id(each), 1) if is_compiling() else _place(each)
            for other, taken in seen:
                if not memory.are_apart([taken, place]):
                    raise memory.listed_twice(name, other, "an accumulator")
            seen.append((name, place))


def _apart(live: Sequence[Any]) -> bool:
    if set(map(type, live)) <= {Tensor, torch.nn.Parameter} and not live[0].is_meta:
        return _addresses_apart(EXCHANGE.addresses(live), tuple([each.nbytes for each in live]))
    return memory.are_apart([_place(each) for each in live])


@lru_cache(maxsize=1024)
def _addresses_apart(addresses: bytes, lengths: tuple[int, ...]) -> bool:
    """Found once for weights that stay where they are."""
    return memory.are_apart(list(zip(memoryview(addresses).cast("q").tolist(), lengths, strict=True)))


def _place(weight: Any) -> tuple[int, int]:
    """(address, bytes) of a weight; what has no memory is told by its identity."""
    if type(weight) not in (Tensor, torch.nn.Parameter):
        weight = weight.q.values if isinstance(weight, QuantizedWeight) else local(weight)
    return (id(weight), 1) if weight.is_meta else (weight.data_ptr(), weight.nbytes)


OUTSIDE = "delayed weight gradients, flags of main_grad and weight caches are state of Python: they run beside a graph"


def stays_outside(owner: Owner | None, parameters: Sequence[Tensor], to_main_grad: bool) -> bool:
    """Whether the way of weight gradients is state of Python: delayed ones, and flags that are raised."""
    if owner is not None and owner.delayed is not None:
        return True
    return to_main_grad and main_grad.needs_python(parameters)


def accumulators(given: Any, parameters: Sequence[Tensor], packed: bool, name: str) -> tuple[Any, Any]:
    """(`wgrad_accum` of one weight as tensors, whether each is replaced): both are looked up while a graph is traced.

    Args:
        given: what the user passed. packed: whether the weight is one tensor. name: of the weight.
    """
    if given is None:
        return None, None
    check_listed_once((name, parameters, None, True))
    replaced = tuple([main_grad.overwrites(each) for each in parameters]) or (False,)  # one that has no master
    if not isinstance(given, str):
        return given, replaced
    found = destinations(parameters, name)
    return found[0] if packed else found, replaced


class ProductGradients(NamedTuple):
    """Gradients of one product, None where not needed or written elsewhere; one entry a weight and a bias."""

    x: Tensor | None
    row_scale: Tensor | None
    weights: list[Tensor | None]
    biases: list[Tensor | None]


class Launcher(NamedTuple):
    """The gradient operators of one product with their operands; what no needed gradient reads is None or []."""

    operators: tuple[Any, Any]  # one that returns new tensors, one that writes into the caller's
    operands: tuple[Any, ...]  # of both, x, weight, group_sizes, bias, row_scale and dy first, up to the letters

    def new(self, letters: str, live: list[int]) -> list[Tensor]:
        """Gradients named by `letters`, in that order; of a list of weights those of the groups `live`."""
        return self.operators[0](*self.operands, letters, live)

    def into(
        self,
        letters: str,
        live: list[int],
        accumulate: bool,
        grad_input: Tensor | None,
        wgrad: list[Tensor],
        scale_grad: Tensor | None,
    ) -> None:
        """The same gradients into the caller's tensors."""
        self.operators[1](*self.operands, letters, live, accumulate, grad_input, wgrad, scale_grad)

    def of_weights(self) -> Launcher:
        """This one with nothing but what weight gradients read, for a delayed launch keeps it alive."""
        x, _, sizes, _, *rest = self.operands
        return Launcher(self.operators, (x, [], sizes, [], *rest))

    def tensors(self) -> list[Tensor]:
        """What it keeps alive."""
        parts = [each if isinstance(each, list) else [each] for each in self.operands]
        return [each for part in parts for each in part if isinstance(each, Tensor)]


def plain_launcher(
    x: Tensor | None,
    weights: list[Tensor],
    sizes: Tensor,
    biases: list[Tensor],
    row_scale: Tensor | None,
    dy: Tensor,
    k: int,
    text: str,
    dtypes: str,
) -> Launcher:
    """Of operands as they stand."""
    operands = (x, weights, sizes, biases, row_scale, dy, k, text, dtypes)
    return Launcher((_library.linear_grads, _library.linear_grads_into), operands)


def product_gradients(
    facts: ProductFacts,
    launcher: Launcher | None,
    owners: Sequence[Tensor],
    accumulators: Sequence[Tensor | None],
    grad_input: Tensor | None,
    delayed: main_grad.Delayed | None = None,
    *,
    for_leaf: bool = False,
) -> ProductGradients:
    """What `facts.needs` asks for, each gradient where it belongs.

    Args:
        launcher: None where nothing is asked for.
        owners: the weights, if their gradients do not go to autograd but to `accumulators` or to `main_grad`.
        grad_input: the caller's buffer for the gradient of x.
        delayed: where the weight gradients wait, if they do.
        for_leaf: the gradient of x becomes a `.grad`, which autograd adds to in place: a copy of the buffer then.
    """
    needs, (weight_count, bias_count) = facts.needs, facts.counts
    if launcher is None or not any(needs):
        return ProductGradients(None, None, [None] * weight_count, [None] * bias_count)
    elsewhere = len(owners) > 0 and needs.w
    buffer = grad_input if needs.x else None

    new = needs._replace(w=needs.w and not elsewhere)
    if buffer is not None:  # the gradient of the row scale is a by-product of that of x
        new = new._replace(x=False, row_scale=False)
    dx = db = dc = None
    dw: list[Tensor] = []  # one for each weight that needs one, or for a list [live, N, K]
    if letters := _library.needs_text(new):
        results = iter(launcher.new(letters, _library.subset(facts.live, weight_count)))
        dx = next(results) if new.x else None
        dw = [next(results) for _ in (facts.live if facts.packed[0] else facts.live[:1])] if new.w else []
        db, dc = (next(results) if needed else None for needed in new[2:])
    if buffer is not None:
        if needs.row_scale:
            dc = buffer.new_empty(buffer.shape[:1], dtype=TORCH_DTYPES[facts.dtypes.split(",")[3]])
        letters = _library.needs_text(Needs(True, False, False, needs.row_scale))
        launcher.into(letters, [], False, buffer, [], dc)
        dx = buffer.detach().clone() if for_leaf else buffer.detach()

    weight_gradients: list[Tensor | None] = [None] * weight_count
    bias_gradients: list[Tensor | None] = [None] * bias_count
    if elsewhere:
        later = launcher.of_weights()

        def launch(destinations: list[Tensor], groups: list[int], accumulate: bool) -> None:
            later.into("w", _library.subset(groups, weight_count), accumulate, None, destinations, None)

        weight_gradients = main_grad.deliver(
            weight_names(owners, facts.weight_name),
            owners,
            accumulators or None,
            facts.overwrite,
            facts.live,
            launch,
            flags=facts.flags,
            delayed=delayed,
            operands=later.tensors(),
            dtype=TORCH_DTYPES[wide(facts.dtypes.split(",")[1])],
        )
    if dw:
        for at, gradient in zip(facts.live, dw if facts.packed[0] else dw[0].unbind(), strict=True):
            weight_gradients[at] = gradient
    if db is not None:
        gradients = [db] if facts.packed[1] else db.unbind()
        for at in facts.live_biases:
            bias_gradients[at] = gradients[at]
    return ProductGradients(dx, dc, weight_gradients, bias_gradients)


def mlp_gradients(
    products: tuple[ProductFacts, ProductFacts],
    work: list[Launcher | None],
    owners: Sequence[Sequence[Tensor]],
    accumulators: Sequence[Sequence[Tensor | None]],
    grad_input: Tensor | None,
    delayed: Sequence[main_grad.Delayed | None] = (None, None),
    *,
    for_leaf: bool = False,
) -> tuple[ProductGradients, ProductGradients]:
    """The gradients of an MLP's products, the second's first; arguments as of `product_gradients`.

    Args:
        work: launchers of both products, taken out of the list, so that rows go as soon as nothing reads them.
    """
    second = product_gradients(products[1], work.pop(), owners[1], accumulators[1], None, delayed[1])
    first = product_gradients(
        products[0], work.pop(), owners[0], accumulators[0], grad_input, delayed[0], for_leaf=for_leaf
    )
    return first, second


def once(name: str, gradients: Sequence[Tensor | None], sources: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients, with a history that refuses to be differentiated.

    Args:
        name: of the operation, for the words. sources: what the gradients were made of, whose derivatives are refused.
    """
    apart = (None if each is None else each.detach().requires_grad_() for each in gradients)  # always a history
    return _Once.apply(name, len(gradients), *apart, *sources)


class _Once(torch.autograd.Function):
    """Lets gradients through and refuses to differentiate them again."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """`tensors`: gradients, as many as `count` says, then what they were made of."""
        ctx.name = name
        return tuple(None if each is None else each.view_as(each) for each in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            f"{ctx.name}: differentiated twice, expected once; its gradients have no derivative of their own, "
            "compose it of differentiable torch operations where second derivatives are needed."
        )
