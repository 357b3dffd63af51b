"""What the operations call the tensors that they save for backward, told to who listens (`offload`).

Rows have names; what an operation saves beside rows (weights and their casts, sizes, biases, probabilities) has none
and stays where it is. Saved tensors themselves are plain, so that hooks of others work as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from torch_bridge._compiling import is_compiling

ROWS, HIDDEN, ACTIVATED = "grouped_x", "grouped_fc1", "grouped_act"
"""Rows that a product reads, pre-activations, activated rows."""
OF_ROWS = (ROWS, HIDDEN, ACTIVATED)
NAMES = tuple(f"{name}{part}" for name in (ROWS, HIDDEN, ACTIVATED) for part in ("", "_q", "_scale"))
"""All names; `_q` and `_scale` are the parts of quantised rows."""
UNNAMED = ""
"""Stands for the name of a tensor that an operation saves beside its rows."""

Listener = Callable[[dict[int, str]], None]
"""(name by address of all tensors that one operation is about to save) -> None."""

listeners: list[Listener] = []
"""Those inside of whose context we are, innermost last."""


def tell(tensors: Sequence[Tensor | None], names: Sequence[str]) -> None:
    """Says what is saved next: `names` for the first tensors, the others have none."""
    if is_compiling() or not listeners:
        return
    rest = [UNNAMED] * (len(tensors) - len(names))
    pairs = zip(tensors, (*names, *rest), strict=True)
    listeners[-1]({each.data_ptr(): name for each, name in pairs if each is not None})
