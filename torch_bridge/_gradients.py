"""Delivers the weight gradients of all operations to autograd, to accumulators, or to the queue of delayed ones.

Letters: G groups, M rows, K in, N out.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from grouped_core import gradients, memory
from grouped_core.calls import OperandSpec
from grouped_core.linear_spec import Linear
from torch_bridge import main_grad
from torch_bridge._args import leaf_names
from torch_bridge._checks import address, local
from torch_bridge._compiling import is_compiling
from torch_bridge._memory import EXCHANGE
from torch_bridge._operators import call_prepared, define
from torch_bridge._record import prepare
from torch_bridge._tensors import TORCH_DTYPES, tensors_of
from torch_bridge.quantized_weight import QuantizedWeight


class Owner(NamedTuple):
    """The module that owns a weight: its Parameters (the weight may be a cast of them), and its queue, if it has one.

    Messages name each Parameter by `path` and its name in `names`; these are () for the arguments of a function.
    """

    parameters: tuple[Any, ...]
    queue: main_grad.GradientQueue | None
    names: tuple[str, ...] = ()
    path: str = ""


def names_of(owner: Owner | None, weights: Sequence[Any], argument: str) -> list[str]:
    """Returns the names of a weight's tensors in messages: those in its module, or those of the argument."""
    if owner is None or not owner.names:
        return leaf_names(weights, argument)
    return [f"{owner.path}{name}" for name in owner.names]


# ---------------------------------------------------------------------------------------------------------------------
# The operator


WeightFacts = tuple[Linear, OperandSpec, tuple[int, ...], bool]
"""Static facts: the product, the spec of its packed weight, the halves to compute (0: all), whether to accumulate."""

WeightOperands = namedtuple("WeightOperands", "rows dy sizes into into_up")


def weight_grad(run: Any, static: WeightFacts, o: WeightOperands) -> list[Any]:
    """Computes the gradient of a weight, or of each requested half of a weight in two tensors: the operator's rule."""
    op, weight, halves, accumulate = static
    return gradients.half_grads(run, op, weight, halves, *o[:3], into=o[3:], accumulate=accumulate)


_WEIGHT_GRAD = define("weight_grad", weight_grad, WeightOperands, rows=("rows", "dy"), written=("into", "into_up"))


@dataclass(slots=True, eq=False)
class WeightGradient:
    """The gradient of one weight: dW_g = sum rows^T dy over the rows of group g; computed when it is delivered.

    Attributes:
        op: the product. weight: the spec of the packed weight. count: M.
        rows: [M, K], dy: [M, N], as the main gradients return them; None if the gradient is `made`.
        made: (the gradient or its first half, its second half or None), if an operator computed it along with others.
    """

    op: Linear
    weight: Any
    rows: Any
    dy: Any
    sizes: Tensor
    count: Any
    made: Sequence[Any] = field(default=(None, None), kw_only=True)

    def new(self, trained: Sequence[int], count: int, *, packed: bool) -> list[Any]:
        """Returns new gradients of the tensors at `trained`, of `count` tensors. `packed`: the weight is one tensor."""
        whole, up = self.made
        if whole is not None:
            return [whole, up] if self.op.paired else [whole] if packed else list(whole.unbind())
        if packed or self.op.paired:
            return self.launch(self._halves(trained), False, None, None)
        if len(trained) == count:
            return list(self.launch((0,), False, None, None)[0].unbind())
        shape, dtype = (len(trained), *self.weight.shape[1:]), self.op.gradient_dtype(self.weight)
        parts = list(self.sizes.new_empty(shape, dtype=TORCH_DTYPES[dtype]).unbind())
        self.into(parts, trained, False, count=count, packed=False)
        return parts

    def into(
        self, destinations: list[Tensor], trained: Sequence[int], accumulate: bool, *, count: int, packed: bool
    ) -> None:
        """Writes the gradients of the tensors at `trained` into the caller's `destinations`, or adds them to these."""
        into: Any
        into, into_up = (*destinations, None)[:2]
        if not packed and not self.op.paired:  # frozen members of a list have no destination
            each: list[Tensor | None] = [None] * count
            for at, destination in zip(trained, destinations, strict=True):
                each[at] = destination
            into, into_up = each, None
        self.launch(self._halves(trained), accumulate, into, into_up)

    def _halves(self, trained: Sequence[int]) -> tuple[int, ...]:
        return tuple([at + 1 for at in trained]) if self.op.paired else (0,)

    def launch(self, halves: tuple[int, ...], accumulate: bool, into: Any, into_up: Any) -> list[Any]:
        """Computes the gradient, or these halves of it, in the destinations or in new tensors, which it returns."""
        operands = (self.rows, self.dy, self.sizes, into, into_up)  # in the order of WeightOperands
        return call_prepared(prepare(_WEIGHT_GRAD, (self.op, self.weight, halves, accumulate)), operands, self.count)

    def read(self) -> tuple[Any, ...]:
        """Returns the operands that a launch reads besides the sizes."""
        return self.rows, self.dy

    def tensors(self) -> list[Tensor]:
        """Returns the tensors that this object keeps alive."""
        return tensors_of(*self.read(), self.sizes)


# ---------------------------------------------------------------------------------------------------------------------
# Destinations


@dataclass(slots=True, eq=False)
class Route:
    """Where the gradient of one weight goes; forward determines it.

    Attributes:
        name: the argument's name in messages. packed: whether the weight is one tensor with all groups.
        parts: the number of the weight's tensors. trained: the positions of those that need a gradient.
        owners: the tensors or Parameters, if gradients go to accumulators or to a queue; () if they go to autograd.
        accumulators: the destinations; () for `main_grad` of the owners. queue: that of delayed gradients, or None.
        flags: whether flags of the owners are set after accumulation. owner: the module whose Parameters they are.
        overwrite: for each tensor, whether its gradient replaces the content; None: the owner's attribute says so.
        part: the part of a layer's forward pass to which the call belongs, if the layer runs in parts.
    """

    name: str
    parts: int
    packed: bool
    trained: tuple[int, ...]
    owners: Sequence[Any] = ()
    accumulators: Sequence[Tensor | None] = ()
    queue: main_grad.GradientQueue | None = None
    flags: bool = False
    overwrite: tuple[bool, ...] | None = None
    owner: Owner | None = None
    part: main_grad.Part | None = None

    def elsewhere(
        self,
        leaves: Sequence[Tensor],
        accumulators: Sequence[Tensor | None],
        owner: Owner | None,
        overwrite: tuple[bool, ...] | None,
        *,
        to_main_grad: bool,
    ) -> Route:
        """Returns the route for a call whose gradients may go to accumulators, to `main_grad` or to a queue.

        Args:
            leaves: the tensors that receive gradients; () for a quantised weight without a master weight.
            owner: the module that owns the weight.
        """
        owners, queue = (), None if owner is None else owner.queue
        if to_main_grad or len(accumulators) > 0 or queue is not None:
            stand_ins = leaves or [each for each in accumulators if each is not None]
            owners = stand_ins if owner is None else owner.parameters
        flags = to_main_grad and overwrite is None
        facts = (self.name, self.parts, self.packed, self.trained)
        return Route(*facts, owners, accumulators, queue, flags, overwrite, owner, main_grad.running_part())

    def deliver(self, gradient: WeightGradient | None, earlier: main_grad.Earlier = None) -> list[Tensor | None]:
        """Computes or queues the gradient; returns for each tensor what autograd gets, None if it goes elsewhere.

        `earlier`: as in `main_grad.write`.
        """
        if gradient is None or not self.trained:
            return [None] * self.parts
        if not self.owners:
            made = gradient.new(self.trained, self.parts, packed=self.packed)
            if len(made) == self.parts:
                return made
            found = dict(zip(self.trained, made, strict=True))
            return [found.get(at) for at in range(self.parts)]
        return main_grad.deliver(
            names_of(self.owner, self.owners, self.name),
            self.owners,
            self.accumulators or None,
            self.overwrite,
            self.trained,
            partial(gradient.into, count=self.parts, packed=self.packed),
            flags=self.flags,
            queue=self.queue,
            operands=gradient.read() if self.queue is None else gradient.tensors(),
            dtype=TORCH_DTYPES[gradient.op.gradient_dtype(gradient.weight)],
            earlier=earlier,
            part=self.part,
        )


def runs_in_ddp() -> bool:
    """Whether DistributedDataParallel runs forward now, and reduces the gradients of the backward that follows.

    Megatron's own wrapper and FSDP2 are others: they follow the contract of `main_grad` and of delayed gradients.
    """
    wrapper: Any = DistributedDataParallel._active_ddp_module
    return wrapper is not None and wrapper.require_backward_grad_sync


def check_reduced(routes: Sequence[Route]) -> None:
    """Refuses weights of DistributedDataParallel whose gradients do not go to `.grad` in backward.

    Their replicas would drift apart without a word: it reduces what `.grad` holds in backward, and nothing else.

    Raises:
        ValueError: it runs forward now, and reduces such a weight.
    """
    if is_compiling() or not runs_in_ddp():  # `run` leaves such calls outside of graphs
        return
    wrapper: Any = DistributedDataParallel._active_ddp_module
    reduced = set(map(id, wrapper._module_parameters))
    for route in routes:
        owners = () if len(route.accumulators) > 0 else route.owners
        found = [at for at in route.trained if len(owners) > 0 and id(owners[at]) in reduced]
        if not found:
            continue
        came, remedy = "goes to `main_grad`", "accumulate_into_main_grad"
        if route.queue is not None:
            came, remedy = "is delayed until `backward_dw`", "delay_wgrad_compute"
        raise ValueError(
            f"`{names_of(route.owner, owners, route.name)[found[0]]}` in DistributedDataParallel: its gradient {came}, "
            f"expected one in `.grad` in backward, which is all that the wrapper reduces; leave out `{remedy}`, or "
            "leave the weight to another wrapper (`_set_params_and_buffers_to_ignore_for_model`) or run under "
            "`no_sync()`, and reduce its gradient yourself."
        )


def check_listed_once(*products: tuple[str, Sequence[Any]], beside: str = "an accumulator") -> None:
    """Refuses a weight that is passed twice in one call if its gradient is accumulated or delayed.

    Args:
        products: for each product, the name of the weight argument and the `owners` of its route. beside: what asks for
            that, in messages.

    Raises:
        ValueError: two weights that need a gradient are the same tensor, or overlap in memory.
    """
    trained = [each for _, weights in products for each in weights if each.requires_grad]
    if is_compiling():  # there are no addresses
        if len(set(trained)) == len(trained):
            return
    elif not trained or _apart(trained):
        return
    names = [name for argument, weights in products for name in leaf_names(weights, argument)]
    named = zip(names, [each for _, weights in products for each in weights], strict=True)
    places = [(name, (id(each), 1) if is_compiling() else _place(each)) for name, each in named if each.requires_grad]
    for at, (name, place) in enumerate(places):
        for other, taken in places[:at]:
            if not memory.are_apart([taken, place]):
                raise memory.listed_twice(name, other, beside)


def _apart(trained: Sequence[Any]) -> bool:
    if set(map(type, trained)) <= {Tensor, torch.nn.Parameter} and not trained[0].is_meta:
        return _addresses_apart(EXCHANGE.addresses(trained), tuple([each.nbytes for each in trained]))
    return memory.are_apart([_place(each) for each in trained])


@lru_cache(maxsize=1024)
def _addresses_apart(addresses: bytes, lengths: tuple[int, ...]) -> bool:
    """Whether no two of these memory ranges overlap; cached, because weights usually keep their addresses."""
    return memory.are_apart(list(zip(memoryview(addresses).cast("q").tolist(), lengths, strict=True)))


def _place(weight: Any) -> tuple[int, int]:
    """Returns (address, bytes) of a weight; if it has no memory, its identity as the address."""
    if type(weight) not in (Tensor, torch.nn.Parameter):
        weight = weight.q.values if isinstance(weight, QuantizedWeight) else local(weight)
    return (at, weight.nbytes) if (at := address(weight)) else (id(weight), 1)
