"""Whether autograd asks a node for the gradient of a weight; `torch.autograd.grad` of other inputs does not.

`ctx.needs_input_grad` only says which inputs have `requires_grad`. A gradient that goes to `main_grad` or to a queue
must not go there unasked: the parts of a split backward (first of inputs, then of weights) would each deliver it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from torch_bridge._compiling import is_compiling

Places = tuple[range, ...]
"""For each weight, the positions of its tensors among the node's inputs that are tensors."""

_executes: Any = torch._C._will_engine_execute_node


def places_of(receivers: Sequence[Tensor | None], routes: Iterable[Any]) -> Places:
    """Returns the positions of the weights of `_gradients.Route`s, given `_args.Arguments.receivers`."""
    before = [0, *accumulate(each is not None for each in receivers)]
    ends = list(accumulate([route.parts for route in routes], initial=2))  # behind x and the row scale
    return tuple([range(before[start], before[end]) for start, end in pairwise(ends)])


def is_asked(ctx: Any, place: range) -> bool:
    """Whether this backward wants the gradient of any of these inputs; True for a weight that is no input."""
    if is_compiling() or not place:
        return True
    nodes = ctx.next_functions  # made anew each time
    try:
        return any(_executes(nodes[at][0]) for at in place)
    except RuntimeError:  # a leaf that `torch.autograd.grad` is asked for, or a backward outside of autograd's engine
        return True
