"""The axes of each tensor argument of the public functions: one table for all frontends.

Arguments with the shape of another one (`out`, `grad_input`, accumulators, `master`, gradients) are not listed: they
are checked against the whole shape, where that shape is known.

Letters: G groups, M rows, K in, N out; of an MLP F expert width, W columns of the hidden rows; X features of a row, A
and B axes of a weight; of routing T tokens, E experts, k experts per token, H columns, S sequences, V token ids; of a
state R roles, L steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Axes(NamedTuple):
    """The axes of one argument.

    Attributes:
        letters: the axes, as messages write them.
        remedy: what to do where the number of axes is wrong.
        transposed: the letters with `rhs_transposed`, where they differ.
    """

    letters: str
    remedy: str
    transposed: str = ""


_ROWS = "fold leading axes into rows with a reshape"
_STACK = "stack one matrix per group on the first axis"
_VECTORS = "pass one bias vector per group"
_SIZES = Axes("[G]", "pass one size per group")
_PROBS = Axes("[M]", "pass one probability per row")
_KEY = Axes("[2]", "pass two words of uint32, low word first")
_RESHAPE = "fold or add axes with a reshape"

AXES: dict[str, dict[str, Axes]] = {
    "linear": {
        "x": Axes("[M, K]", _ROWS),
        "w": Axes("[G, K, N]", _STACK, "[G, N, K]"),
        "sizes": _SIZES,
        "bias": Axes("[G, N]", _VECTORS),
        "row_scale": Axes("[M]", "pass one factor per row"),
    },
    "lora": {
        "a": Axes("[G, K, r]", _STACK, "[G, r, K]"),
        "b": Axes("[G, r, N]", _STACK, "[G, N, r]"),
        "key": _KEY,
    },
    "mlp": {
        "x": Axes("[M, K]", _ROWS),
        "wi": Axes("[G, K, W]", _STACK, "[G, W, K]"),
        "half": Axes("[G, K, F]", _STACK, "[G, F, K]"),
        "wo": Axes("[G, F, K]", _STACK, "[G, K, F]"),
        "sizes": _SIZES,
        "probs": _PROBS,
        "wi_bias": Axes("[G, W]", _VECTORS),
        "wo_bias": Axes("[G, K]", _VECTORS),
    },
    "activation": {"h": Axes("[M, W]", _ROWS), "probs": _PROBS},
    "quantize": {"rows": Axes("[M, X]", _RESHAPE), "weights": Axes("[G, A, B]", _RESHAPE), "key": _KEY},
    "recipe": {"key": _KEY},
    "state": {
        "scale": Axes("[R, G]", "pass what scaling_state made"),
        "history": Axes("[R, L, G]", "pass what scaling_state made"),
        "top": Axes("[R]", "pass what scaling_state made"),
    },
    "topk_router": {
        "logits": Axes("[T, E]", _RESHAPE),
        "bias": Axes("[E]", _RESHAPE),
        "mask": Axes("[T]", _RESHAPE),
        "experts": Axes("[T, k]", _RESHAPE),
        "sequence_sizes": Axes("[S]", "pass one size per sequence"),
        "key": _KEY,
    },
    "balance_quantile": {
        "logits": Axes("[T, E]", _RESHAPE),
        "bias": Axes("[E]", _RESHAPE),
        "mask": Axes("[T]", _RESHAPE),
    },
    "hash_experts": {"token_ids": Axes("[T]", _RESHAPE), "table": Axes("[V, k]", "pass k experts per token id")},
    "pad_groups": {"rows": Axes("[M, H]", _RESHAPE), "sizes": _SIZES},
    "unpad_groups": {"rows": Axes("[P, H]", _RESHAPE)},
    "update_bias": {"bias": Axes("[E]", _RESHAPE), "load": Axes("[E]", _RESHAPE)},
    "permute": {
        "x": Axes("[T, H]", _RESHAPE),
        "experts": Axes("[T, k]", _RESHAPE),
        "probs": Axes("[T, k]", _RESHAPE),
    },
    "routed_mlp": {
        "x": Axes("[T, K]", _RESHAPE),
        "experts": Axes("[T, k]", _RESHAPE),
        "weights": Axes("[T, k]", _RESHAPE),
    },
    "dispatch": {
        "x": Axes("[T, H]", _RESHAPE),
        "experts": Axes("[T, k]", _RESHAPE),
        "weights": Axes("[T, k]", _RESHAPE),
    },
    "combine": {"y": Axes("[M, H]", _RESHAPE)},
    "moe": {
        "x": Axes("[T, H]", _RESHAPE),
        "router": Axes("[H, E]", _RESHAPE, "[E, H]"),
        "gate": Axes("[H, 1]", _RESHAPE, "[1, H]"),
    },
    "unpermute": {"y": Axes("[M, H]", _RESHAPE), "weights": Axes("[T, k]", _RESHAPE)},
}
"""By operation and argument, both named as in grouped_core."""


def letters(operation: str, argument: str, *, transposed: bool = False) -> str:
    """The axes of one argument, as messages write them, in one layout of the weights."""
    axes = AXES[operation][argument]
    return axes.transposed if transposed and axes.transposed else axes.letters


# NOTE: functions, because torch.compile does not see through tuples that have properties.
def _count(axes: Axes) -> int:
    return axes.letters.count(",") + 1


_NUMBERS = ("no axes", "one axis", "two axes", "three axes", "four axes")


def check_rank(
    operation: str, argument: str, name: str, shape: Sequence[Any], *, transposed: bool = False, of: str = ""
) -> None:
    """Refuses an argument whose number of axes is not the one in the table.

    Args:
        name: the frontend's name of the argument. of: the function, where the message names it.

    Raises:
        ValueError: the number of axes is wrong.
    """
    axes = AXES[operation][argument]
    if len(shape) != _count(axes):
        raise ValueError(
            f"`{name}`{of and ' of '}{of}: shape {tuple(shape)}, expected {_NUMBERS[_count(axes)]} "
            f"{letters(operation, argument, transposed=transposed)}; {axes.remedy}."
        )


def check_either(operation: str, arguments: Sequence[str], name: str, shape: Sequence[Any]) -> None:
    """Does what `check_rank` does, for an argument that may be any one of `arguments`."""
    kinds = AXES[operation]
    if all(len(shape) != _count(kinds[each]) for each in arguments):
        either = " or ".join(f"{each} {kinds[each].letters}" for each in arguments)
        raise ValueError(f"`{name}`: shape {tuple(shape)}, expected {either}; {kinds[arguments[0]].remedy}.")


def check_member(operation: str, argument: str, name: str, shape: Sequence[Any], *, transposed: bool = False) -> None:
    """Does what `check_rank` does, for one member of a list with a tensor per group: it lacks the axis of groups."""
    axes = AXES[operation][argument]
    if len(shape) != _count(axes) - 1:
        one = "[" + letters(operation, argument, transposed=transposed).removeprefix("[G, ")
        raise ValueError(
            f"`{name}`: shape {tuple(shape)}, expected {_NUMBERS[_count(axes) - 1]} {one} in a list; "
            "pass one tensor per group, or the packed tensor without a list."
        )
