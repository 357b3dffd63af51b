"""What selective checkpointing keeps of layers."""

from __future__ import annotations

from typing import Any

from torch_bridge import _router, _routing
from torch_bridge._calling import OPERATIONS
from torch_bridge._operators import operators_of


def save_list() -> set[Any]:
    """Returns operators for the save list of selective checkpointing; then backward repeats no product of forward.

    They are those of the products of experts (`routed_mlp`, `grouped_mlp` and `grouped_linear`, with every recipe, with
    adapters and with buffers of the caller's), and those of the router: its product, its choice and its losses. Their
    results are kept, including what only their gradients read; so with delayed scaling, maxima are measured once.
    `parallel.save_list` returns the operators of exchanges between ranks.
    """
    products = [operation.product for operation in OPERATIONS.values()]
    return operators_of(*products, _router.FORWARD, _routing.ROUTER, _routing.LOSSES)
