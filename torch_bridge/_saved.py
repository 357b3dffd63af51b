"""Names of the tensors that operations save for backward, announced to listeners (`offload`).

Rows have names; other saved tensors (weights and their casts, sizes, biases, probabilities) have none and stay on the
device. The saved tensors are plain, so that hooks of other libraries work as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from torch_bridge._compiling import is_compiling
from torch_bridge._tensors import Form, Layouts

ROWS, HIDDEN, ACTIVATED = "grouped_x", "grouped_fc1", "grouped_act"
"""The names of rows that a product reads, of pre-activations, and of activated rows."""
OF_ROWS = (ROWS, HIDDEN, ACTIVATED)
NAMES = tuple(f"{name}{part}" for name in (ROWS, HIDDEN, ACTIVATED) for part in ("", "_q", "_scale"))
"""All names; `_q` and `_scale` are the parts of quantised rows."""
UNNAMED = ""
"""The name of every saved tensor that does not belong to rows."""

Listener = Callable[[dict[int, str]], None]
"""A function (the name of each tensor that one operation is about to save, by address) -> None."""

listeners: list[Listener] = []
"""The listeners of all active contexts; the innermost is last."""


def names_of(rows: Sequence[str], layouts: Layouts) -> list[str]:
    """Returns the names of the saved tensors that belong to rows; these tensors come before all others.

    Args:
        rows: the names of the operands that are rows; these come before all other operands. layouts: the layouts of all
            saved operands.
    """
    names: list[str] = []
    for base, (layout, _) in zip(rows, layouts, strict=False):
        if layout is None:
            names.append(base)
        while isinstance(layout, Form):
            names += [f"{base}_q", *[f"{base}_scale"] * sum(layout.scaled)]
            layout = layout.other
    return names


def tell(tensors: Sequence[Tensor | None], names: Sequence[str]) -> None:
    """Announces what is saved next: `names` belong to the first tensors, the others have none."""
    if is_compiling() or not listeners:
        return
    rest = [UNNAMED] * (len(tensors) - len(names))
    pairs = zip(tensors, (*names, *rest), strict=True)
    listeners[-1]({each.data_ptr(): name for each, name in pairs if each is not None})
