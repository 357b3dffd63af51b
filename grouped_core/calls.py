"""Native calls: what each takes, what it returns, what is refused and in which words.

A `Call` is made from shapes and dtypes alone, at trace time. Its slots and parameters are those of cc/api/calls.h,
in the same order; a test compares the two.

Letters: G groups, M rows, K in, N out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import ml_dtypes as ml_dtypes  # NumPy then knows the narrow types by name

from grouped_core.activations import Activation
from grouped_core.recipes import Recipe

MAX_GROUPS = 65535
MAX_ROWS = 2**31 - 1  # rows are addressed by int32 coordinates on the device


class ArraySpec(NamedTuple):
    """Shape and dtype (named as NumPy and ml_dtypes do) of an array; all that planning ever looks at."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


Param = int | float | str
"""A static parameter of a call."""


@dataclass(frozen=True)
class Call:
    """One native call, without its arrays.

    Attributes:
        name: as in cc/api/calls.h.
        inputs: one entry a slot, in order; None where an optional operand is absent. An operand that is given by a
            table of addresses has its packed spec here and no array.
        outputs: specs of the results, one entry a slot; None where an optional result is not asked for.
        params: static parameters by name.
        aliases: (input slot, output) pairs that are one buffer.
        implementation: kernels asked for, a comma list; empty leaves the choice to dispatch.
    """

    name: str
    inputs: tuple[ArraySpec | None, ...]
    outputs: tuple[ArraySpec | None, ...]
    params: tuple[tuple[str, Param], ...] = ()
    aliases: tuple[tuple[int, int], ...] = ()
    implementation: str = ""

    def slot(self, name: str) -> int:
        """Position of the operand `name`."""
        return SLOTS[self.name].index(name)


SLOTS: dict[str, tuple[str, ...]] = {
    "grouped_matmul": (
        "lhs",
        "rhs",
        "group_sizes",
        "bias",
        "row_scale",
        "into",
        "rhs_table",
        "bias_table",
        "into_table",
        "rhs_up",
    ),
    "group_sum": ("rows", "group_sizes", "row_scale"),
    "row_dot": ("group_sizes", "lhs", "rhs", "group_lhs", "group_rhs", "group_rhs_table"),
    "scale_rows": ("rows", "row_scale", "group_sizes", "into"),
    "grouped_matmul_act": ("lhs", "rhs", "group_sizes", "bias", "row_scale", "rhs_table", "bias_table", "rhs_up"),
    "grouped_matmul_dact": ("lhs", "rhs", "group_sizes", "hidden", "row_scale", "row_base", "rhs_table"),
    "activation": ("rows", "group_sizes", "row_scale"),
    "activation_grad": ("grad", "rows", "group_sizes", "row_scale", "row_base"),
}
"""Operand slots of every native call, in order."""

_HIDDEN_GRADS = ("result", "activated", "row_sum")
RESULTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("grouped_matmul", "group_sum", "row_dot", "scale_rows", "activation"), ("result",)),
    "grouped_matmul_act": ("result", "hidden"),
    "grouped_matmul_dact": _HIDDEN_GRADS,
    "activation_grad": _HIDDEN_GRADS,
}
"""Result slots of every native call, in order."""


def _call(
    name: str,
    operands: dict[str, ArraySpec | None],
    results: ArraySpec | dict[str, ArraySpec | None],
    params: dict[str, Param] | None = None,
    implementation: str = "",
) -> Call:
    slots = SLOTS[name]
    inputs = tuple(operands.get(slot) for slot in slots)
    outputs = (results,) if isinstance(results, ArraySpec) else tuple(results.get(slot) for slot in RESULTS[name])
    aliases = ((slots.index("into"), 0),) if operands.get("into") is not None else ()
    return Call(name, inputs, outputs, tuple((params or {}).items()), aliases, _wishes(name, implementation))


def _wishes(name: str, implementation: str) -> str:
    """What of a comma list of kernels concerns the call `name`: its own kernels, and the words for kinds of kernels.

    Nothing is left where the list speaks of other calls alone, and the choice is free. "composed" is a kind that
    fused calls alone have.
    """
    if not implementation:
        return ""
    wishes = []
    for wish in implementation.split(","):
        owner = max((call for call in SLOTS if wish.startswith(f"{call}_")), key=len, default=None)
        if wish == "composed":
            owner = name if name in ("grouped_matmul_act", "grouped_matmul_dact") else "another"
        if owner in (None, name):
            wishes.append(wish)
    return ",".join(wishes)


@lru_cache(maxsize=4096)
def grouped_matmul(
    lhs: ArraySpec,
    rhs: ArraySpec,
    axes: tuple[int, int],
    group_sizes: ArraySpec,
    result_dtype: str,
    *,
    recipe: Recipe,
    bias: ArraySpec | None = None,
    row_scale: ArraySpec | None = None,
    into: ArraySpec | None = None,
    tables: tuple[bool, bool, bool] = (False, False, False),
    rhs_up: ArraySpec | None = None,
    halves: tuple[int, int] = (0, 0),
    result_half: int = 0,
    aligned_tables: bool = True,
    scale_bias: bool = False,
    accumulate: bool = False,
    rows_hint: int = 0,
    implementation: str = "",
) -> Call:
    """A grouped product. `axes` are the contracted axes of lhs and rhs.

    - (1, 1): [M, N] = [M, K] @ [G, K, N];  (1, 2): [M, N] = [M, K] @ [G, N, K]^T
    - (0, 0): [G, A, B] = [M, A]^T @ [M, B], the sum running over each group's rows

    `tables` says which of rhs, bias, into are given by a table of addresses instead of one packed array, and
    `aligned_tables` that those addresses are multiples of 16 bytes, which fast kernels want. `rhs_up`: the weight's
    second half along the contracted axis, rhs being the first. `halves`: which half of the columns of lhs and rhs is
    read in the third form, 1 or 2; 0 reads all. `result_half`: which half of a result (and bias) of 2N columns is made
    in the others.
    """
    groups = group_sizes.shape[0]
    if axes[0] == 0:
        a, b = (rows.shape[1] // 2 if half else rows.shape[1] for rows, half in zip((lhs, rhs), halves, strict=True))
        shape: tuple[int, ...] = (groups, a, b)
    else:
        shape = (lhs.shape[0], rhs.shape[3 - axes[1]] * (2 if result_half else 1))
    table = ArraySpec((groups,), "int64")
    operands = {
        "lhs": lhs,
        "rhs": rhs,
        "group_sizes": group_sizes,
        "bias": bias,
        "row_scale": row_scale,
        "into": into,
        "rhs_table": table if tables[0] else None,
        "bias_table": table if tables[1] else None,
        "into_table": table if tables[2] else None,
        "rhs_up": rhs_up,
    }
    params: dict[str, Param] = {
        "contract_rows": int(axes[0] == 0),
        "rhs_axis": axes[1],
        "scale_bias": int(scale_bias),
        "accumulate": int(accumulate),
        "batch_invariant": int(recipe.batch_invariant),
        "aligned_tables": int(aligned_tables),
        "rows_hint": rows_hint,
        "lhs_half": halves[0],
        "rhs_half": halves[1],
        "result_half": result_half,
        "fp32_mode": recipe.fp32,
    }
    return _call("grouped_matmul", operands, ArraySpec(shape, result_dtype), params, implementation)


@lru_cache(maxsize=1024)
def group_sum(rows: ArraySpec, group_sizes: ArraySpec, result_dtype: str, row_scale: ArraySpec | None = None) -> Call:
    """[G, N] = sums of the (scaled) rows [M, N] of each group."""
    result = ArraySpec((group_sizes.shape[0], rows.shape[1]), result_dtype)
    return _call("group_sum", {"rows": rows, "group_sizes": group_sizes, "row_scale": row_scale}, result)


@lru_cache(maxsize=1024)
def row_dot(
    group_sizes: ArraySpec,
    rows: int,
    pair: tuple[ArraySpec, ArraySpec] | None,
    group_pair: tuple[ArraySpec, ArraySpec] | None,
    table: bool = False,
) -> Call:
    """[M] float32 = <lhs[r], rhs[r]> + <group_lhs[r], group_rhs[g(r)]>; `table`: group_rhs is a table of addresses."""
    operands: dict[str, ArraySpec | None] = {"group_sizes": group_sizes}
    if pair:
        operands.update(lhs=pair[0], rhs=pair[1])
    if group_pair:
        operands.update(group_lhs=group_pair[0], group_rhs=group_pair[1])
    if table:
        operands["group_rhs_table"] = ArraySpec(group_sizes.shape, "int64")
    return _call("row_dot", operands, ArraySpec((rows,), "float32"))


@lru_cache(maxsize=1024)
def scale_rows(
    rows: ArraySpec, row_scale: ArraySpec, group_sizes: ArraySpec, result_dtype: str, into: ArraySpec | None = None
) -> Call:
    """[M, N] = row_scale[r] * rows[r]."""
    operands = {"rows": rows, "row_scale": row_scale, "group_sizes": group_sizes, "into": into}
    return _call("scale_rows", operands, ArraySpec(rows.shape, result_dtype))


def _activation_params(activation: Activation, width: int) -> dict[str, Param]:
    """Parameters in front of `width` activated columns; blocks of half a row are halves in one piece."""
    params: dict[str, Param] = dict(activation.params())
    if params["interleave"] == width:
        params["interleave"] = 0
    return params


def _product_params(recipe: Recipe, aligned_tables: bool, rows_hint: int) -> dict[str, Param]:
    return {
        "batch_invariant": int(recipe.batch_invariant),
        "aligned_tables": int(aligned_tables),
        "rows_hint": rows_hint,
        "fp32_mode": recipe.fp32,
    }


@lru_cache(maxsize=1024)
def grouped_matmul_act(
    lhs: ArraySpec,
    rhs: ArraySpec,
    rhs_axis: int,
    group_sizes: ArraySpec,
    result_dtype: str,
    *,
    activation: Activation,
    recipe: Recipe,
    bias: ArraySpec | None = None,
    row_scale: ArraySpec | None = None,
    tables: tuple[bool, bool] = (False, False),
    rhs_up: ArraySpec | None = None,
    aligned_tables: bool = True,
    hidden: bool = True,
    zero_tail: bool = True,
    rows_hint: int = 0,
    implementation: str = "",
) -> Call:
    """result [M, F] = row_scale[r] * act(hidden[r]), hidden [M, W] = lhs [M, K] @ rhs + bias, rounded to lhs's dtype.

    rhs is [G, K, W] (`rhs_axis` 1) or [G, W, K] (2), W = 2F for gated kinds, or with `rhs_up` F of each. `tables` as
    in `grouped_matmul`, for rhs and bias; `hidden` says whether the hidden rows are wanted as a second result.
    """
    wide = rhs.shape[3 - rhs_axis] * (2 if rhs_up is not None else 1)
    table = ArraySpec(group_sizes.shape, "int64")
    operands = {
        "lhs": lhs,
        "rhs": rhs,
        "group_sizes": group_sizes,
        "bias": bias,
        "row_scale": row_scale,
        "rhs_table": table if tables[0] else None,
        "bias_table": table if tables[1] else None,
        "rhs_up": rhs_up,
    }
    width = wide // 2 if activation.gated else wide
    results = {
        "result": ArraySpec((lhs.shape[0], width), result_dtype),
        "hidden": ArraySpec((lhs.shape[0], wide), lhs.dtype) if hidden else None,
    }
    params = {"rhs_axis": rhs_axis, **_activation_params(activation, width), "zero_tail": int(zero_tail)}
    params |= _product_params(recipe, aligned_tables, rows_hint)
    return _call("grouped_matmul_act", operands, results, params, implementation)


def _hidden_grads(
    hidden: ArraySpec, width: int, dtype: str, wanted: tuple[bool, bool, bool]
) -> dict[str, ArraySpec | None]:
    rows = hidden.shape[0]
    specs = (ArraySpec(hidden.shape, dtype), ArraySpec((rows, width), dtype), ArraySpec((rows,), "float32"))
    return {name: spec if want else None for name, spec, want in zip(_HIDDEN_GRADS, specs, wanted, strict=True)}


@lru_cache(maxsize=1024)
def grouped_matmul_dact(
    lhs: ArraySpec,
    rhs: ArraySpec,
    rhs_axis: int,
    group_sizes: ArraySpec,
    hidden: ArraySpec,
    result_dtype: str,
    *,
    activation: Activation,
    recipe: Recipe,
    wanted: tuple[bool, bool, bool],
    row_scale: ArraySpec | None = None,
    row_base: ArraySpec | None = None,
    table: bool = False,
    aligned_tables: bool = True,
    zero_tail: bool = True,
    rows_hint: int = 0,
    implementation: str = "",
) -> Call:
    """Gradients at the hidden rows, with dz [M, F] = lhs [M, N] @ rhs, lhs being dy.

    `wanted`, in this order: result [M, W] = row_scale[r] dz[r] act'(hidden[r]); activated [M, F] = row_scale[r]
    act(hidden[r]); row_sum [M] float32 = row_base[r] + <dz[r], act(hidden[r])>.
    """
    operands = {
        "lhs": lhs,
        "rhs": rhs,
        "group_sizes": group_sizes,
        "hidden": hidden,
        "row_scale": row_scale,
        "row_base": row_base,
        "rhs_table": ArraySpec(group_sizes.shape, "int64") if table else None,
    }
    width = rhs.shape[3 - rhs_axis]
    params = {"rhs_axis": rhs_axis, **_activation_params(activation, width), "zero_tail": int(zero_tail)}
    params |= _product_params(recipe, aligned_tables, rows_hint)
    results = _hidden_grads(hidden, width, result_dtype, wanted)
    return _call("grouped_matmul_dact", operands, results, params, implementation)


@lru_cache(maxsize=1024)
def activation(
    rows: ArraySpec,
    group_sizes: ArraySpec,
    result_dtype: str,
    *,
    activation: Activation,
    row_scale: ArraySpec | None = None,
    zero_tail: bool = True,
) -> Call:
    """[M, F] = row_scale[r] * act(rows[r]); rows are [M, W]."""
    operands = {"rows": rows, "group_sizes": group_sizes, "row_scale": row_scale}
    width = rows.shape[1] // 2 if activation.gated else rows.shape[1]
    params = {**_activation_params(activation, width), "zero_tail": int(zero_tail)}
    return _call("activation", operands, ArraySpec((rows.shape[0], width), result_dtype), params)


@lru_cache(maxsize=1024)
def activation_grad(
    grad: ArraySpec,
    rows: ArraySpec,
    group_sizes: ArraySpec,
    result_dtype: str,
    *,
    activation: Activation,
    wanted: tuple[bool, bool, bool],
    row_scale: ArraySpec | None = None,
    row_base: ArraySpec | None = None,
    zero_tail: bool = True,
) -> Call:
    """The results of `grouped_matmul_dact`, given grad [M, F] = dz and the hidden rows [M, W]."""
    operands = {
        "grad": grad,
        "rows": rows,
        "group_sizes": group_sizes,
        "row_scale": row_scale,
        "row_base": row_base,
    }
    params = {**_activation_params(activation, grad.shape[1]), "zero_tail": int(zero_tail)}
    return _call("activation_grad", operands, _hidden_grads(rows, grad.shape[1], result_dtype, wanted), params)


def spec_of(array: Any) -> ArraySpec:
    """Spec of anything with `shape` and a NumPy-like `dtype` (JAX, NumPy, CuPy).

    A dtype in foreign byte order keeps its mark (">f4"), so that no check takes it for the native one.
    """
    dtype = array.dtype
    name = getattr(dtype, "name", dtype) if getattr(dtype, "isnative", True) else dtype.str
    return ArraySpec(tuple(int(d) for d in array.shape), str(name))
