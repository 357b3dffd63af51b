"""Adapters in checkpoints: the names of their factors, and the layout of PEFT's `target_parameters`.

In that layout all experts are in two matrices, A [G r, K] and B [N, r G].
Row g r + i of A is row i of expert g; column i G + g of B is column i of expert g.
Letters: G groups (experts), K in, N out, r rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from grouped_core.layouts import join

Array = Any
"""An array of NumPy, JAX or PyTorch."""


_FACTOR = re.compile(r"(.*[._/])?lora_[abAB]")


def is_factor(key: str) -> bool:
    """Whether a parameter of this name is a factor of a layer's adapter, in either framework."""
    return _FACTOR.fullmatch(key) is not None


class FirstFactor(NamedTuple):
    """Factor B of the adapter of the first weight of an MLP. Its columns are those of the weight, in the same order.

    Attributes:
        path: where the names of the MLP start. axis: the axis of the columns. second: the name of factor A of the
            second weight, "" if the layer is outside of an MLP. depth: the axis of that factor that has the expert
            width.
    """

    path: str
    axis: int
    second: str = ""
    depth: int = 0


_FIRST = {"linear_fc1.lora_B": (-2, "linear_fc2.lora_A", -1), "wi_lora_b": (-1, "wo_lora_a", -2)}
"""By the name of B in PyTorch, [G, N, r], and in JAX, [G, r, N]: the last three attributes of `FirstFactor`."""


def first_factor(key: str) -> FirstFactor | None:
    """What a name says of factor B of a first weight, in either framework; None if it names another tensor."""
    for name, (axis, second, depth) in _FIRST.items():
        path = key.removesuffix(name)
        if path != key and (not path or path.endswith(".")):
            path = path.removesuffix(".")
            return FirstFactor(path, axis, join(path, second), depth)
    return None


def from_peft(
    a: Array, b: Array, groups: int, names: Sequence[str] = ("a", "b"), *, transposed: bool
) -> tuple[Array, Array]:
    """(A, B) of all groups from PEFT's two matrices.

    Args:
        a: [G r, K]. b: [N, r G]. names: the names of both in messages.
        transposed: A [G, r, K] and B [G, N, r]; else A [G, K, r] and B [G, r, N].

    Raises:
        TypeError: `groups` is not an integer, or they are no arrays. ValueError: it is not positive, they are not
            matrices, or their ranks differ or are no multiple of G.
    """
    if isinstance(groups, bool) or not isinstance(groups, int):
        raise TypeError(f"`num_experts`: {groups!r}, expected an integer; pass the number of experts of the weights.")
    _check_arrays(names, a, b)
    for name, each in zip(names, (a, b), strict=True):
        if len(each.shape) != 2:
            raise ValueError(
                f"`{name}`: shape {tuple(each.shape)}, expected a matrix; pass the weights that PEFT saves."
            )
    if groups < 1 or a.shape[0] != b.shape[1] or a.shape[0] % groups or not a.shape[0]:
        raise ValueError(
            f"`{names[0]}` {tuple(a.shape)} and `{names[1]}` {tuple(b.shape)}: expected [G r, K] and [N, r G] of one "
            f"rank r and G = {groups} experts; check the number of experts."
        )
    rank = a.shape[0] // groups
    of_a = a.reshape(groups, rank, a.shape[1])
    of_b = b.reshape(b.shape[0], rank, groups).swapaxes(0, 2)  # [G, r, N]
    return (of_a, of_b.swapaxes(1, 2)) if transposed else (of_a.swapaxes(1, 2), of_b)


def _check_arrays(names: Sequence[str], *arrays: Any) -> None:
    for name, each in zip(names, arrays, strict=True):
        if not hasattr(each, "shape") or not hasattr(each, "swapaxes"):
            raise TypeError(f"`{name}`: {type(each).__name__}, expected an array; pass the weights of one adapter.")


def to_peft(a: Array, b: Array, names: Sequence[str] = ("a", "b"), *, transposed: bool) -> tuple[Array, Array]:
    """The inverse of `from_peft`.

    Raises:
        TypeError: they are no arrays. ValueError: they have not three axes, or other groups or ranks.
    """
    _check_arrays(names, a, b)
    axes = ("[G, r, K]", "[G, N, r]") if transposed else ("[G, K, r]", "[G, r, N]")
    r_axis = 1 if transposed else 2
    if len(a.shape) != 3 or len(b.shape) != 3 or (a.shape[0], a.shape[r_axis]) != (b.shape[0], b.shape[3 - r_axis]):
        raise ValueError(
            f"`{names[0]}` {tuple(a.shape)} and `{names[1]}` {tuple(b.shape)}: expected {axes[0]} and {axes[1]} of one "
            "number of experts G and one rank r; pass the factors of one adapter."
        )
    of_a, of_b = (a, b.swapaxes(1, 2)) if transposed else (a.swapaxes(1, 2), b)  # [G, r, K], [G, r, N]
    groups, rank, depth = of_a.shape
    return of_a.reshape(groups * rank, depth), of_b.swapaxes(0, 2).reshape(of_b.shape[2], rank * groups)
