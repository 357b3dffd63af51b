"""Adapters in the layout of PEFT's `target_parameters`: all experts in two matrices, A [G r, K] and B [N, r G].

Row g r + i of A is row i of expert g; column i G + g of B is column i of expert g.
Letters: G groups (experts), K in, N out, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Array = Any
"""An array of NumPy, JAX or PyTorch."""


def from_peft(
    a: Array, b: Array, groups: int, names: Sequence[str] = ("A", "B"), *, transposed: bool
) -> tuple[Array, Array]:
    """(A, B) of all groups from PEFT's two matrices.

    Args:
        a: [G r, K]. b: [N, r G]. names: of both, for messages.
        transposed: A [G, r, K] and B [G, N, r]; else A [G, K, r] and B [G, r, N].

    Raises:
        ValueError: they are not matrices, or their ranks differ or are no multiple of G.
    """
    if groups < 1:
        raise ValueError(f"`num_experts`: {groups}, expected 1 or more; pass the number of experts of the layer.")
    for name, each in zip(names, (a, b), strict=True):
        if len(each.shape) != 2:
            raise ValueError(
                f"`{name}`: shape {tuple(each.shape)}, expected a matrix; pass the weights that PEFT saves."
            )
    if a.shape[0] != b.shape[1] or a.shape[0] % groups:
        raise ValueError(
            f"`{names[0]}` {tuple(a.shape)} and `{names[1]}` {tuple(b.shape)}: expected [G r, K] and [N, r G] of one "
            f"rank r and G = {groups} experts; check the number of experts."
        )
    rank = a.shape[0] // groups
    of_a = a.reshape(groups, rank, a.shape[1])
    of_b = b.reshape(b.shape[0], rank, groups).swapaxes(0, 2)  # [G, r, N]
    return (of_a, of_b.swapaxes(1, 2)) if transposed else (of_a.swapaxes(1, 2), of_b)


def to_peft(a: Array, b: Array, *, transposed: bool) -> tuple[Array, Array]:
    """The inverse of `from_peft`.

    Raises:
        ValueError: they are not the two factors of one adapter.
    """
    shapes = tuple(a.shape), tuple(b.shape)
    rank_at = (1, 2) if transposed else (2, 1)
    if (
        any(len(shape) != 3 for shape in shapes)
        or shapes[0][0] != shapes[1][0]
        or (shapes[0][rank_at[0]] != shapes[1][rank_at[1]])
    ):
        wanted = "[G, r, K] and [G, N, r]" if transposed else "[G, K, r] and [G, r, N]"
        raise ValueError(f"`A` {shapes[0]} and `B` {shapes[1]}: expected {wanted} of one adapter; pass both factors.")
    of_a, of_b = (a, b.swapaxes(1, 2)) if transposed else (a.swapaxes(1, 2), b)  # [G, r, K], [G, r, N]
    groups, rank, depth = of_a.shape
    return of_a.reshape(groups * rank, depth), of_b.swapaxes(0, 2).reshape(of_b.shape[2], rank * groups)
