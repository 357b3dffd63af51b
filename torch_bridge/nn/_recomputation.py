"""What selective checkpointing keeps of layers."""

from __future__ import annotations

from typing import Any

from torch_bridge import _router, _routing
from torch_bridge._calling import OPERATIONS
from torch_bridge._operators import operators_of


def save_list() -> set[Any]:
    """Operators for the save list of selective checkpointing, with which backward does not multiply again in forward.

    They are those of the products of experts (`routed_mlp`, `grouped_mlp` and `grouped_linear`, with every recipe, with
    adapters and with buffers of the caller's), and those of the router: its product, its choice and its losses. What
    they return is kept, also what their gradients read; with delayed scaling, maxima are measured once. Exchanges
    between ranks are those of `parallel.save_list`.
    """
    products = [operation.product for operation in OPERATIONS.values()]
    return operators_of(*products, _router.FORWARD, _routing.ROUTER, _routing.LOSSES)
