"""Where weight gradients go, and when, if not to autograd in the main backward; what backward then returns.

The contract is that of Megatron and TransformerEngine, per weight, with these attributes of the Parameter:

==========================  ==========================================================================================
`main_grad`                 the destination; looked up when it is written, viewed in the weight's shape
`overwrite_main_grad`       true: the gradient replaces what is there; else it is added
`grad_added_to_main_grad`   if it exists it becomes True once the write is queued, and backward returns a zero dummy
`zero_out_wgrad`            true: the dummy is filled with zero again before it is returned
`__fsdp_param__`            if it exists, `main_grad` comes from `get_main_grad()` whenever it is written
==========================  ==========================================================================================

Delayed gradients wait in a `Delayed` of their module: the main backward then returns None, writes nothing and raises no
flag; all of that happens when the entry runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from grouped_core import memory
from grouped_core.formats import WIDE
from grouped_core.memory import Span
from torch_bridge._checks import distributed_like, is_distributed, local
from torch_bridge._tensors import dtype_name

Write = Callable[[list[Tensor], list[int], bool], None]
"""(destinations, their groups, whether to add) -> None; launches the weight gradients of these groups."""


def destination(weight: Any, name: str) -> Tensor:
    """`main_grad` of `weight`, in its shape and without a copy.

    Raises:
        RuntimeError: it is missing, or does not view as a contiguous tensor of the weight's shape, or has another
            device, or a dtype that kernels do not add in.
    """
    if hasattr(weight, "__fsdp_param__"):
        weight.main_grad = weight.get_main_grad()
    found = getattr(weight, "main_grad", None)
    weight, found = local(weight), None if found is None else local(found)
    shape = tuple(weight.shape)
    if found is None:
        raise RuntimeError(
            f"`main_grad` of `{name}`: missing, expected a tensor that views as {shape}; create it before backward, "
            "and pass the Parameter that has it, not a cast or a view of it."
        )
    facts = f"shape {tuple(found.shape)}, strides {tuple(found.stride())}, {found.dtype} on {found.device}"
    if found.device != weight.device:
        raise RuntimeError(
            f"`main_grad` of `{name}`: {facts}, expected it on {weight.device} with its weight; allocate it there."
        )
    if dtype_name(found.dtype) not in WIDE:
        raise RuntimeError(
            f"`main_grad` of `{name}`: {facts}, expected one of {', '.join(WIDE)}; allocate it in one of them."
        )
    if found.numel() != weight.numel() or not found.is_contiguous():
        raise RuntimeError(
            f"`main_grad` of `{name}`: {facts}, expected a contiguous tensor that views as {shape} without a copy; "
            "allocate it so."
        )
    return found.detach().view(shape)


def write(
    names: Sequence[str],
    weights: Sequence[Tensor],
    given: Sequence[Tensor | None] | None,
    overwrite: Sequence[bool] | None,
    live: Sequence[int],
    launch: Write,
) -> None:
    """Writes the gradients of the weights at `live`, with one launch for each dtype and way of writing.

    Args:
        given: destinations instead of `main_grad`. overwrite: instead of the attribute, for graphs that read it when
            they were traced.

    Raises:
        ValueError: `main_grad` of two of them overlap.
    """
    batches: dict[tuple[torch.dtype, bool], tuple[list[Tensor], list[int]]] = {}
    for at in live:
        to = given[at] if given is not None else None
        if to is None:
            to = destination(weights[at], names[at])
        replaces = overwrites(weights[at]) if overwrite is None else overwrite[at]
        tensors, groups = batches.setdefault((to.dtype, not replaces), ([], []))
        tensors.append(to)
        groups.append(at)
    if given is None:
        _check_apart(
            [
                (names[at], each)
                for tensors, groups in batches.values()
                for each, at in zip(tensors, groups, strict=True)
            ]
        )
    for (_, accumulate), (tensors, groups) in batches.items():
        launch(tensors, groups, accumulate)


def _check_apart(found: Sequence[tuple[str, Tensor]]) -> None:
    """Refuses destinations of one call that overlap: tiles of one launch would write them at the same time."""
    spans = [(0 if each.is_meta else each.data_ptr(), 0 if each.is_meta else each.nbytes) for _, each in found]
    if not memory.are_apart(spans):
        ordered = sorted((start, length, name) for (start, length), (name, _) in zip(spans, found, strict=True))
        memory.check_apart([Span(f"main_grad of {name}", start, start + length) for start, length, name in ordered], ())


def overwrites(weight: Tensor) -> bool:
    """Whether the next gradient replaces what the destination holds."""
    return bool(getattr(weight, "overwrite_main_grad", False))


def returned(weight: Any) -> Tensor | None:
    """What autograd is given for a weight whose write is queued; raises the flag where there is one."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return dummy(weight, refill=bool(getattr(weight, "zero_out_wgrad", False)))


def deliver(
    names: Sequence[str],
    weights: Sequence[Any],
    given: Sequence[Tensor | None] | None,
    overwrite: Sequence[bool] | None,
    live: Sequence[int],
    launch: Write,
    *,
    flags: bool,
    delayed: Delayed | None,
    operands: Sequence[Tensor | None],
    dtype: torch.dtype,
) -> list[Tensor | None]:
    """What backward returns for each weight, those at `live` being written now, or later if there is a `delayed`.

    Args:
        weights, given, overwrite: as in `write`.
        flags: whether the gradients go to `main_grad` of Parameters that may have flags to raise.
        operands: what `launch` reads; all of it is kept until the entry of `delayed` has run.
        dtype: of gradients that an entry adds to `.grad`.
    """
    results: list[Tensor | None] = [None] * len(weights)
    if delayed is not None:
        tensors = [each for each in operands if each is not None]
        replaced = [overwrites(each) for each in weights]
        mark = _finished(tensors[0].device)
        delayed.put(Entry(names, weights, live, replaced, flags, dtype, launch, tensors, *mark))
        return results
    write(names, weights, given, overwrite, live, launch)
    if flags:
        for at in live:
            results[at] = returned(weights[at])
    return results


_dummies: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}


def dummy(weight: Tensor, *, refill: bool = False) -> Tensor:
    """A zero gradient like the weight, or its part that lies here: a fresh alias of the one kept for such weights."""
    here = local(weight)
    key = (here.shape, here.dtype, here.device)
    kept = _dummies.get(key)
    if kept is None:
        kept = _dummies[key] = torch.zeros(here.shape, dtype=here.dtype, device=here.device)
    elif refill:
        kept.zero_()
    return kept.detach()


def needs_python(weights: Sequence[Tensor]) -> bool:
    """Whether writing depends on state that a compiled graph cannot hold: flags, FSDP, or a `main_grad` yet to come."""
    return any(
        weight.requires_grad
        and (
            hasattr(weight, "grad_added_to_main_grad")
            or hasattr(weight, "__fsdp_param__")
            or getattr(weight, "main_grad", None) is None
        )
        for weight in weights
    )


# ---------------------------------------------------------------------------------------------------------------------
# Delayed gradients


class Entry(NamedTuple):
    """The weight gradients of one backward pass that are still to be computed."""

    names: Sequence[str]
    weights: Sequence[Any]
    live: Sequence[int]
    overwrite: Sequence[bool]  # as the main backward found them
    to_main_grad: bool
    dtype: torch.dtype  # of gradients that go to `.grad`, before they take that of their Parameter
    launch: Write
    operands: Sequence[Tensor]
    event: Any  # after which the operands are complete; None on the CPU, and in a capture, whose order the caller keeps
    captured: bool

    def run(self, now: Sequence[Any]) -> None:
        """Computes the gradients and delivers them, adding to what earlier entries left.

        Args:
            now: the layer's weights as they are now: others than in backward where FSDP2 has sharded them again.
        """
        _await(self)
        if self.to_main_grad:
            write(self.names, self.weights, None, self.overwrite, self.live, self.launch)
            for at in self.live:
                placeholder = returned(self.weights[at])
                if placeholder is not None and self.weights[at].grad is None:
                    self.weights[at].grad = distributed_like(self.weights[at], placeholder)
            return
        # Rounded before they are added, as autograd does it.
        new = [local(self.weights[at]).new_empty(local(self.weights[at]).shape, dtype=self.dtype) for at in self.live]
        self.launch(new, list(self.live), False)
        for at, gradient in zip(self.live, new, strict=True):
            _add_to_grad(now[at], gradient, is_whole=now[at] is not self.weights[at])


def _add_to_grad(weight: Any, gradient: Tensor, *, is_whole: bool) -> None:
    """`is_whole`: it is not that of the part which lies here, where the weight is a DTensor."""
    gradient = gradient.to(weight.dtype)
    if is_whole and is_distributed(weight):
        from torch_bridge import _distributed  # which imports torch.distributed.tensor

        gradient = _distributed.averaged_like(weight, gradient)
    else:
        gradient = distributed_like(weight, gradient)
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)


def _finished(device: torch.device) -> tuple[Any, bool]:
    """(event after what is queued now, whether a graph is being captured)."""
    if device.type != "cuda":
        return None, False
    if torch.cuda.is_current_stream_capturing():
        return None, True
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event, False


def _await(entry: Entry) -> None:
    """Lets the current stream wait for the operands, and keeps them for it."""
    device = entry.operands[0].device
    if device.type != "cuda":
        return
    if torch.cuda.is_current_stream_capturing() and not entry.captured:
        raise RuntimeError(
            "backward_dw: a CUDA graph is captured, but the oldest pending gradient belongs to an eager backward, "
            "expected one of a captured backward, whose tensors stay where they are; drain the eager ones first."
        )
    if entry.event is not None:
        stream = torch.cuda.current_stream(device)
        stream.wait_event(entry.event)
        for each in entry.operands:
            each.record_stream(stream)


class Delayed:
    """A module's weight gradients that wait, oldest first, and the hooks that follow them.

    A copy, also one that was pickled, starts empty: pending gradients and hooks belong to the original's Parameters.
    """

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        self.hooks: list[Callable[[], Any]] = []

    def __reduce__(self) -> tuple[type[Delayed], tuple[()]]:
        return Delayed, ()

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        return True

    def put(self, entry: Entry) -> None:
        """Queues an entry."""
        self._entries.append(entry)

    def run_oldest(self, weights: Sequence[Any]) -> bool:
        """Runs the oldest entry and drops it; False if there is none. `weights`: of the layer, as they are now."""
        if not self._entries:
            return False
        with torch.no_grad():
            self._entries[0].run(weights)  # stays if it raises, so that nothing is lost
        self._entries.popleft()
        return True

    def fire(self) -> None:
        """Calls the hooks that are registered now."""
        for hook in list(self.hooks):
            hook()


class HasDelayed(Protocol):
    """A layer with delayed gradients of its own."""

    delayed: Delayed

    def weight_parameters(self) -> Sequence[Any]:
        """Its weights, in the order of their groups."""
        ...


def backward_dw(layers: Sequence[HasDelayed], *, every: bool) -> None:
    """The oldest pending gradients of each layer in turn, then the hooks of these layers; `every`: until none is left.

    While a CUDA graph is captured no hook fires: after a replay `fire_wgrad_hooks` is the caller's to call.
    """
    while ran := [layer for layer in layers if layer.delayed.run_oldest(layer.weight_parameters())]:
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            for layer in ran:
                layer.delayed.fire()
        if not every:
            return
