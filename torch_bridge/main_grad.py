"""Weight gradients that go to `main_grad` or are delayed, instead of going to autograd in the main backward.

The contract is that of Megatron and TransformerEngine, per weight, with these attributes of the Parameter:

==========================  ==========================================================================================
`main_grad`                 the destination; read when it is written, viewed in the weight's shape
`overwrite_main_grad`       true: the gradient replaces the content; otherwise it is added
`grad_added_to_main_grad`   if it exists it becomes True once the write is queued, and backward returns a zero dummy
`zero_out_wgrad`            true: the dummy is filled with zero again before it is returned
`__fsdp_param__`            if it exists, `main_grad` comes from `get_main_grad()` whenever it is written
==========================  ==========================================================================================

Delayed gradients wait in a `GradientQueue` of their module: the main backward then returns None, writes nothing and
sets no flag; all of that happens when the entry runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from grouped_core.formats import WIDE
from torch_bridge._args import check_apart
from torch_bridge._checks import NEGATED, address, distributed_like, is_distributed, is_freed, local
from torch_bridge._compiling import is_compiling
from torch_bridge._memory import Places, are_apart, places_apart
from torch_bridge._tensors import dtype_name, note_written

Write = Callable[[list[Tensor], list[int], bool], None]
"""A function (destinations, their groups, whether to add) -> None that launches the weight gradients of the groups."""


class Part(NamedTuple):
    """One of the parts in which a layer runs its operations over the tokens; all parts give one gradient per weight.

    Attributes:
        delivered: shared by the parts of one forward pass: for each weight, by `id`, the parts whose gradients were
            delivered since the last backward through the pass began.
        number: of the part.
    """

    delivered: dict[int, set[int]]
    number: int

    def is_first(self, weight: Any) -> bool:
        """Notes a gradient of this part, and returns whether backward delivers no other part's gradient before it."""
        numbers = self.delivered.setdefault(id(weight), set())
        if self.number in numbers:  # a second backward through a retained graph
            numbers.clear()
        numbers.add(self.number)
        return len(numbers) == 1


class _Running(threading.local):
    part: Part | None

    def __init__(self) -> None:
        """Runs in each thread. NOTE: Dynamo of torch 2.11 would read a default of the class instead of the part."""
        self.part = None


_running = _Running()


@contextmanager
def running(part: Part | None) -> Iterator[None]:
    """Makes the operations that are called inside belong to a part."""
    before, _running.part = _running.part, part
    try:
        yield
    finally:
        _running.part = before


def running_part() -> Part | None:
    """Returns the part to which an operation that is called now belongs."""
    return _running.part


Destinations = tuple[Sequence[str], Sequence[int], Sequence[Tensor], Places | None]
"""What was written for one weight: (names of its tensors, positions of those that were written, their `main_grad`, the
places of these if they are known)."""
Earlier = list[Destinations] | None
"""The destinations that the same backward has written to for other weights. Each call of `write` adds its own."""


def destination(weight: Any, name: str) -> Tensor:
    """Returns `main_grad` of `weight`, viewed in the weight's shape without a copy.

    Raises:
        RuntimeError: it is missing, cannot be viewed as a contiguous tensor of the weight's shape, is on another
            device, or has a dtype in which kernels cannot add.
    """
    if hasattr(weight, "__fsdp_param__"):
        weight.main_grad = weight.get_main_grad()
    weight, found = local(weight), local(getattr(weight, "main_grad", None))
    shape = tuple(weight.shape)
    if not isinstance(found, Tensor):
        came = "missing" if found is None else type(found).__name__
        raise RuntimeError(
            f"`main_grad` of `{name}`: {came}, expected a tensor that views as {shape}; create it before backward, "
            "and pass the Parameter that has it, not a cast or a view of it."
        )
    if found.device != weight.device:
        raise RuntimeError(
            f"`main_grad` of `{name}`: {_facts(found)}, expected it on {weight.device} with its weight; "
            "allocate it there."
        )
    if not is_compiling() and found.is_neg():
        raise RuntimeError(f"`main_grad` of `{name}`: {NEGATED}")
    if not is_compiling() and is_freed(found):
        raise RuntimeError(
            f"`main_grad` of `{name}`: its storage is empty, expected elements; restore or allocate it before backward."
        )
    if dtype_name(found.dtype) not in WIDE:
        raise RuntimeError(
            f"`main_grad` of `{name}`: {_facts(found)}, expected one of {', '.join(WIDE)}; allocate it in one of them."
        )
    if found.numel() != weight.numel() or not found.is_contiguous():
        raise RuntimeError(
            f"`main_grad` of `{name}`: {_facts(found)}, expected a contiguous tensor that views as {shape} without "
            "a copy; allocate it so."
        )
    return found.detach().view(shape)


def _facts(found: Tensor) -> str:
    return f"shape {tuple(found.shape)}, strides {tuple(found.stride())}, {found.dtype} on {found.device}"


def write(
    names: Sequence[str],
    weights: Sequence[Tensor],
    given: Sequence[Tensor | None] | None,
    overwrite: Sequence[bool],
    trained: Sequence[int],
    launch: Write,
    operands: Sequence[Any] = (),
    earlier: Earlier = None,
) -> None:
    """Writes the gradients of the weights at `trained`, with one launch per dtype and mode (add or overwrite).

    Args:
        given: for each weight, a destination instead of `main_grad`, or None. overwrite: for each weight, whether its
            gradient replaces the content.
        operands: the operands that `launch` reads. Plain tensors among them must not overlap the destinations.
        earlier: what the same backward has written to for other weights; the destinations of this call are added to it.

    Raises:
        ValueError: `main_grad` overlaps that of another weight, a weight, or the operands.
    """
    batches: dict[tuple[torch.dtype, bool], tuple[list[Tensor], list[int]]] = {}
    found: list[Tensor] = []
    for at in trained:
        to = given[at] if given is not None else None
        if to is None:
            to = destination(weights[at], names[at])
        tensors, groups = batches.setdefault((to.dtype, not overwrite[at]), ([], []))
        tensors.append(to)
        groups.append(at)
        found.append(to)
    if given is None:
        places = _check_apart(names, trained, found, weights, operands, earlier or ())
        if earlier is not None:
            earlier.append((names, trained, found, places))
    for (_, accumulate), (tensors, groups) in batches.items():
        launch(tensors, groups, accumulate)
        note_written(tensors)


_PLAIN = frozenset({Tensor, torch.nn.Parameter})


def _check_apart(
    names: Sequence[str],
    trained: Sequence[int],
    found: Sequence[Tensor],
    weights: Sequence[Tensor],
    operands: Sequence[Any],
    earlier: Sequence[Destinations],
) -> Places | None:
    """Refuses destinations that overlap each other, their weights, `earlier` ones, or the rows that one launch reads.

    Returns their places if the fast test finds them; the comparison of two places is cached.
    """
    own = weights if len(trained) == len(weights) else [weights[at] for at in trained]
    uniform = _PLAIN.issuperset(map(type, own)) and type(found[0]) is Tensor and len({to.dtype for to in found}) == 1
    places = places_apart(found, own, operands) if uniform and not found[0].is_meta else None
    if places is not None:
        for _, _, _, others in earlier:
            if others is None or not are_apart(places, others):
                break
        else:
            return places
    given = sorted(zip(found, trained, strict=True), key=lambda each: address(each[0]))
    written = [(f"main_grad of {names[at]}", to) for to, at in given]
    read = [(names[at], weights[at]) for at in trained if type(weights[at]) in _PLAIN]
    read += [("x or dy", each) for each in operands if type(each) is Tensor]
    for others, numbers, theirs, _ in earlier:
        read += [(f"main_grad of {others[at]}", to) for at, to in zip(numbers, theirs, strict=True)]
    check_apart(written, read)
    return places


def overwrites(weight: Tensor) -> bool:
    """Whether the next gradient replaces the content of the destination."""
    return bool(getattr(weight, "overwrite_main_grad", False))


def returned(weight: Any) -> Tensor | None:
    """Returns what autograd gets for a weight whose write is queued, and sets the weight's flag if it has one."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return dummy(weight, refill=bool(getattr(weight, "zero_out_wgrad", False)))


def deliver(
    names: Sequence[str],
    weights: Sequence[Any],
    given: Sequence[Tensor | None] | None,
    overwrite: Sequence[bool] | None,
    trained: Sequence[int],
    launch: Write,
    *,
    flags: bool,
    queue: GradientQueue | None,
    operands: Sequence[Any],
    dtype: torch.dtype,
    earlier: Earlier = None,
    part: Part | None = None,
) -> list[Tensor | None]:
    """Writes the gradients of the weights at `trained`, now or, with a `queue`, later; returns what autograd gets.

    Args:
        weights, given, earlier: as in `write`. overwrite: for each weight, a value instead of the attribute
            `overwrite_main_grad`, which a graph of torch.compile read while it was traced.
        flags: whether the gradients go to `main_grad` of Parameters that may have flags to set.
        operands: the tensors that `launch` reads, which `queue` keeps until the entry has run; without a queue, only
            the rows.
        dtype: the dtype of gradients that an entry adds to `.grad`.
        part: the one whose gradients these are; only the first that is delivered replaces the content.
    """
    results: list[Tensor | None] = [None] * len(weights)
    replaced = [overwrites(each) for each in weights] if overwrite is None else overwrite
    if part is not None:
        replaced = [part.is_first(each) and own for each, own in zip(weights, replaced, strict=True)]
    if queue is not None:
        tensors = [each for each in operands if each is not None]
        mark = (_versions(tensors), *_finished(tensors[0].device))
        queue.put(Entry(names, weights, trained, replaced, flags, dtype, launch, tensors, *mark, part))
        return results
    write(names, weights, given, replaced, trained, launch, operands, earlier)
    if flags:
        for at in trained:
            results[at] = returned(weights[at])
    return results


_dummies: dict[tuple[type, torch.Size, torch.dtype, torch.device], tuple[Tensor, int]] = {}
"""Zeros that weights share, with their version when they were zero last."""


def dummy(weight: Tensor, *, refill: bool = False) -> Tensor:
    """Returns a zero gradient like the weight (or its local part): a new alias of a tensor that such weights share.

    Autograd makes the alias `.grad`, into which others write: clipping, unscaling, or autograd with a gradient that has
    another source. What they wrote belongs to that weight, so it stays, and the next weights share new zeros; only
    `refill` overwrites it.
    """
    here = local(weight)
    key = (type(here), here.shape, here.dtype, here.device)
    kept, version = _dummies.get(key, (None, 0))
    if kept is not None and refill:
        kept.zero_()
    elif kept is not None and kept._version == version:
        return kept.detach()
    else:
        with torch.inference_mode(False):  # a tensor of inference mode has no version
            kept = torch.zeros(here.shape, dtype=here.dtype, device=here.device)
    # A fake tensor belongs to its mode, and one that is made while a graph is captured to the memory of that graph.
    if type(kept) is Tensor and not (kept.is_cuda and torch.cuda.is_current_stream_capturing()):
        _dummies[key] = kept, kept._version
    return kept.detach()


def needs_python(weights: Sequence[Tensor]) -> bool:
    """Whether writing depends on state that a compiled graph cannot hold: flags, FSDP, a missing `main_grad`, or which
    part is the first to replace its content.
    """
    return any(
        weight.requires_grad
        and (
            hasattr(weight, "grad_added_to_main_grad")
            or hasattr(weight, "__fsdp_param__")
            or getattr(weight, "main_grad", None) is None
            or (overwrites(weight) and running_part() is not None)
        )
        for weight in weights
    )


# ---------------------------------------------------------------------------------------------------------------------
# Delayed gradients


class Entry(NamedTuple):
    """The weight gradients of one backward pass that are still to be computed."""

    names: Sequence[str]
    weights: Sequence[Any]
    trained: Sequence[int]
    overwrite: Sequence[bool]  # as they were in the main backward
    to_main_grad: bool
    dtype: torch.dtype  # of gradients that go to `.grad`, before the cast to the Parameter's dtype
    launch: Write
    operands: Sequence[Tensor]
    versions: Sequence[int | None]  # of the operands in the main backward
    event: Any  # the operands are complete after it; None on the CPU and in a capture, where the caller keeps the order
    captured: bool
    part: Part | None  # of the forward pass, to which the entry belongs

    def fits(self, other: Entry) -> bool:
        """Whether both may belong to one backward pass."""
        apart = self.weights[0] is not other.weights[0]
        if self.part is None or other.part is None:
            return self.part is other.part and apart
        return self.part.delivered is other.part.delivered and (apart or self.part.number != other.part.number)

    def run(self, now: Sequence[Any]) -> list[tuple[Any, Any, Tensor]]:
        """Computes the gradients and adds those that go to `main_grad`.

        Args:
            now: the layer's weights as they are now. If FSDP2 has resharded those of backward, they get the gradients.

        Returns:
            For each gradient that goes to `.grad` (the weight of backward, the one that gets it, the gradient in the
            latter's dtype).
        """
        _await(self)
        if not self.captured and self.versions != _versions(self.operands):
            raise RuntimeError(
                "backward_dw: rows of a pending gradient were modified by an inplace operation since their backward, "
                "expected the values of then; call backward_dw before x or the gradient of y is written."
            )
        if self.to_main_grad:
            write(self.names, self.weights, None, self.overwrite, self.trained, self.launch, self.operands)
            for at in self.trained:
                placeholder = returned(self.weights[at])
                if placeholder is not None and self.weights[at].grad is None:
                    self.weights[at].grad = distributed_like(self.weights[at], placeholder)
            return []
        # Gradients are rounded before they are added, as in autograd.
        own = [local(self.weights[at]) for at in self.trained]
        new = [each.new_empty(each.shape, dtype=self.dtype) for each in own]
        self.launch(new, list(self.trained), False)
        found = []
        for at, gradient in zip(self.trained, new, strict=True):
            to = now[at] if is_distributed(now[at]) else self.weights[at]
            found.append((self.weights[at], to, gradient.to(to.dtype)))
        return found


def _add_to_grad(weight: Any, gradient: Tensor, *, is_whole: bool) -> None:
    """Adds a gradient of the weight's dtype to `.grad`.

    Args:
        is_whole: it belongs to the whole of a DTensor, instead of its local part.
    """
    if is_whole and is_distributed(weight):
        from torch_bridge import _distributed  # imports torch.distributed.tensor, which is slow

        gradient = _distributed.averaged_like(weight, gradient)
    else:
        gradient = distributed_like(weight, gradient)
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)


def _versions(operands: Sequence[Tensor]) -> list[int | None]:
    """Returns the version counters of tensors, which change with their values; None for inference tensors."""
    return [None if each.is_inference() else each._version for each in operands]


def _finished(device: torch.device) -> tuple[Any, bool]:
    """Returns (an event after all work queued so far, or None if none is needed; whether a graph is being captured)."""
    if device.type != "cuda":
        return None, False
    if torch.cuda.is_current_stream_capturing():
        return None, True
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event, False


def _await(entry: Entry) -> None:
    """Makes the current stream wait for the operands, and keeps their memory until that stream has read them."""
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


class GradientQueue:
    """A module's queue of delayed weight gradients, oldest first, and the hooks that follow them.

    A copy, including an unpickled one, starts empty: pending gradients and hooks belong to the original's Parameters.
    """

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self.hooks: list[Callable[[], Any]] = []

    def __reduce__(self) -> tuple[type[GradientQueue], tuple[()]]:
        return GradientQueue, ()

    def __len__(self) -> int:
        """The number of backward passes that are pending: one may queue an entry for each of several weights."""
        return len(self._passes())

    def _passes(self) -> list[list[Entry]]:
        """Returns the entries by backward pass: a second entry for the same weight, or for the same part of a forward
        pass, begins the next pass. Entries of parts may lie between those of other passes.
        """
        found: list[list[Entry]] = []
        for entry in self._entries:
            for begun in found[-1:] if entry.part is None else reversed(found):
                if all(map(entry.fits, begun)):
                    begun.append(entry)
                    break
            else:
                found.append([entry])
        return found

    def __bool__(self) -> bool:
        return True

    def put(self, entry: Entry) -> None:
        """Queues an entry."""
        self._entries.append(entry)

    def run_oldest(self, weights: Sequence[Any]) -> bool:
        """Runs and removes the entries of the oldest pass; returns False if there is none.

        Args:
            weights: the layer's weights as they are now. If a layer trains several weights separately, such as A and B
                of an adapter, these are one tensor for each.
        """
        if not self._entries:
            return False
        entries = self._passes()[0]
        order = list(dict.fromkeys([id(entry.weights[0]) for entry in entries]))
        # What goes to `.grad`, by weight: parts of a pass are summed before they are added, as in autograd.
        sums: dict[int, tuple[Any, Any, Tensor]] = {}
        with torch.no_grad():
            for entry in entries:
                own = weights
                if len(entry.weights) < len(weights):  # one of several, perhaps not the first, as others may be frozen
                    at = order.index(id(entry.weights[0]))
                    own = [each for each in weights if each is entry.weights[0]] or weights[at : at + 1]
                for weight, to, gradient in entry.run(own):  # if it raises, it and what `sums` holds stay queued
                    before = sums.get(id(weight))
                    sums[id(weight)] = (weight, to, gradient if before is None else before[2].add_(gradient))
                if entry.to_main_grad:
                    self._remove(entry)
            for weight, to, gradient in sums.values():
                _add_to_grad(to, gradient, is_whole=to is not weight)
        for entry in entries:
            if not entry.to_main_grad:
                self._remove(entry)
        return True

    def _remove(self, entry: Entry) -> None:
        del self._entries[[each is entry for each in self._entries].index(True)]

    def fire(self) -> None:
        """Calls the hooks that are registered now."""
        for hook in list(self.hooks):
            hook()


class HasQueue(Protocol):
    """A layer with its own queue of delayed gradients."""

    queue: GradientQueue

    def trained_parameters(self) -> Sequence[Any]:
        """Returns its weights, in the order of their groups, or the factors of its adapter."""
        ...


def backward_dw(layers: Sequence[HasQueue], *, every: bool) -> None:
    """Runs the oldest pending gradients of each layer in turn, then their hooks; `every`: until none is left.

    No hook runs while a CUDA graph is captured; the caller then calls `fire_wgrad_hooks` after each replay.
    """
    while ran := [layer for layer in layers if layer.queue.run_oldest(layer.trained_parameters())]:
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            for layer in ran:
                layer.queue.fire()
        if not every:
            return
