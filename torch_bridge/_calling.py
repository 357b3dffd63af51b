"""Runs the public operations: eagerly with checks and autograd, or as one node of a graph of torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_bridge import _autocast, _codec, main_grad
from torch_bridge._autograd import Operation, Owners, differentiable
from torch_bridge._compiling import allow_in_graph, is_compiling
from torch_bridge._gradients import Owner, check_listed_once, names_of, runs_in_ddp
from torch_bridge._symbols import MOST_SYMBOLS, settle_rows
from torch_bridge._tensors import master_of, members
from torch_bridge._weight_forms import WeightForms

OPERATIONS: dict[str, Operation] = {}
"""The operations by name, because a graph can hold a name but not an operation."""


def run(
    name: str,
    arguments: tuple[Any, ...],
    wgrad_accum: Any,
    implementation: Any,
    out: Tensor | None,
    grad_input: Tensor | None,
    owners: Owners | None = None,
    caches: tuple[WeightForms | None, ...] | None = None,
    *,
    cast: tuple[int, ...] = (),
) -> Tensor:
    """Runs an operation.

    Args:
        name: the operation's name. arguments: those of its public function, up to the recipe or the residual policy.
        owners, caches: for each weight, the module that owns it, and the cache of its layer; or None.
        cast: the positions of the arguments to which autocast applies; those at `Operation.places` are added.
    """
    operation = OPERATIONS[name]
    if cast and (dtype := _autocast.dtype_of(arguments[0])) is not None:
        owners = tuple([_autocast.owner(arguments[place]) for place in operation.places])
        places = (*cast, *operation.places)
        arguments = tuple([_autocast.cast(each, dtype) if at in places else each for at, each in enumerate(arguments)])
    if not is_compiling():
        of_layer = () if caches is None else (caches,)
        given = operation.check(*arguments, wgrad_accum, implementation, *of_layer)
        return differentiable(operation, given, out, grad_input, owners)
    # A graph holds tensors but no state of Parameters, so that state is read while the graph is traced.
    masters = [master_of(arguments[place]) for place in operation.places]
    owners = owners or (None,) * len(masters)
    parameters = [
        members(master) if owner is None else owner.parameters for owner, master in zip(owners, masters, strict=True)
    ]
    to_main_grad = isinstance(wgrad_accum, str)
    queued = [owner for owner in owners if owner is not None and owner.queue is not None]
    flagged = [own for own in parameters if to_main_grad and (main_grad.needs_python(own) or runs_in_ddp())]
    if queued or flagged or [each for each in caches or () if each is not None]:
        return _outside(name, arguments, wgrad_accum, implementation, out, grad_input, owners, caches)
    count, replaced = len(masters), [None] * len(masters)
    each = [wgrad_accum] * count if to_main_grad or count == 1 else wgrad_accum
    if isinstance(each, (tuple, list)) and len(each) == count:
        of_weights = zip(each, parameters, masters, operation.weights, owners, strict=True)
        found = [_destinations(*own) for own in of_weights]
        replaced = [own[1] for own in found]
        wgrad_accum = found[0][0] if count == 1 else tuple([own[0] for own in found])
    node = [_codec.to_tuples(each) for each in (*arguments, wgrad_accum, implementation)]
    return _node(name, *node, out, grad_input, tuple(replaced))


_REASON = (
    "delayed weight gradients, flags of main_grad, weight caches and DistributedDataParallel around them are state of "
    "Python: they run beside a graph"
)
_outside: Any = torch.compiler.disable(run, reason=_REASON)


@allow_in_graph
def _node(name: str, *arguments: Any) -> Tensor:
    """Runs `run` as one node of a graph; `arguments` up to `implementation` come from `_codec.to_tuples`."""
    *given, out, grad_input, replaced = arguments
    operation = OPERATIONS[name]
    settle_rows(given[0], given[operation.scale_place], out, grad_input, most=MOST_SYMBOLS)
    checked = operation.check(*[_codec.from_tuples(each) for each in given])
    return differentiable(operation, checked, out, grad_input, None, replaced)


def _destinations(given: Any, parameters: Any, master: Any, name: str, owner: Owner | None) -> tuple[Any, Any]:
    """Returns (the accumulators of one weight as tensors, whether the gradient overwrites each of them).

    Args:
        given: the user's argument. master: the tensor or tensors of the weight. name: the weight's name in messages.
        owner: the module that owns it, if it is not an argument of a function.
    """
    if given is None:
        return None, None
    check_listed_once((name, parameters))
    replaced = tuple([main_grad.overwrites(each) for each in parameters]) or (False,)  # a weight without a master
    if not isinstance(given, str):
        return given, replaced
    pairs = zip(parameters, names_of(owner, parameters, name), strict=True)
    found = [main_grad.destination(each, own) if each.requires_grad else None for each, own in pairs]
    return found[0] if isinstance(master, Tensor) else found, replaced
