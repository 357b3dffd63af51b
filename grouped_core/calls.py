"""Native calls: what each takes, what it returns, what is refused and in which words.

A `Call` is made from shapes and dtypes alone, at trace time. Its slots and parameters are those of cc/api/calls.h,
in the same order; a test compares the two.

Letters: G groups, M rows, K in, N out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import ml_dtypes as ml_dtypes  # NumPy then knows the narrow types by name
import numpy as np

from grouped_core.activations import Activation
from grouped_core.formats import PLAIN, WIDE
from grouped_core.recipes import Recipe, plain

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
    ),
    "group_sum": ("rows", "group_sizes", "row_scale"),
    "row_dot": ("group_sizes", "lhs", "rhs", "group_lhs", "group_rhs", "group_rhs_table"),
    "scale_rows": ("rows", "row_scale", "group_sizes", "into"),
    "grouped_matmul_act": ("lhs", "rhs", "group_sizes", "bias", "row_scale", "rhs_table", "bias_table"),
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
    `aligned_tables` that those addresses are multiples of 16 bytes, which fast kernels want.
    """
    groups = group_sizes.shape[0]
    if axes[0] == 0:
        shape: tuple[int, ...] = (groups, lhs.shape[1], rhs.shape[1])
    else:
        shape = (lhs.shape[0], rhs.shape[3 - axes[1]])
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
    }
    params: dict[str, Param] = {
        "contract_rows": int(axes[0] == 0),
        "rhs_axis": axes[1],
        "scale_bias": int(scale_bias),
        "accumulate": int(accumulate),
        "batch_invariant": int(recipe.batch_invariant),
        "aligned_tables": int(aligned_tables),
        "rows_hint": rows_hint,
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
    aligned_tables: bool = True,
    hidden: bool = True,
    zero_tail: bool = True,
    rows_hint: int = 0,
    implementation: str = "",
) -> Call:
    """result [M, F] = row_scale[r] * act(hidden[r]), hidden [M, W] = lhs [M, K] @ rhs + bias, rounded to lhs's dtype.

    rhs is [G, K, W] (`rhs_axis` 1) or [G, W, K] (2), W = 2F for gated kinds. `tables` as in `grouped_matmul`, for rhs
    and bias; `hidden` says whether the hidden rows are wanted as a second result.
    """
    wide = rhs.shape[3 - rhs_axis]
    table = ArraySpec(group_sizes.shape, "int64")
    operands = {
        "lhs": lhs,
        "rhs": rhs,
        "group_sizes": group_sizes,
        "bias": bias,
        "row_scale": row_scale,
        "rhs_table": table if tables[0] else None,
        "bias_table": table if tables[1] else None,
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


# ---------------------------------------------------------------------------------------------------------------------
# The linear operation: what a user hands in, checked once for both faces.


class Names(NamedTuple):
    """What a face calls its arguments; the only difference between the two faces' messages."""

    x: str
    w: str
    transposed: str = "rhs_transposed"
    sizes: str = "group_sizes"
    bias: str = "bias"
    row_scale: str = "row_scale"
    scale_bias: str = "scale_bias"
    result: str = "preferred_element_type"
    wgrad: str = "wgrad_dtype"
    accum: str = "wgrad_accum"
    out: str = "out"
    grad_input: str = "grad_input"


@dataclass(frozen=True)
class Linear:
    """Static facts of one grouped linear operation, y[r] = x[r] W[g(r)]: frozen, hashable, free of arrays.

    Attributes:
        names: the face's argument names, for messages.
        transposed: weights are [G, N, K] instead of [G, K, N].
        recipe: None computes with the operands as they stand.
        scale_bias: row_scale multiplies the bias only.
        result_dtype: dtype of y; None: that of x.
        wgrad_dtype: dtype of a new weight gradient; None: that of the weight.
        rows_hint: usual rows a group, for tile choice only; 0 is unknown.
        implementation: pinned kernels, a comma list; "" lets dispatch choose.
    """

    names: Names
    transposed: bool = False
    recipe: Recipe | None = None
    scale_bias: bool = False
    result_dtype: str | None = None
    wgrad_dtype: str | None = None
    rows_hint: int = 0
    implementation: str = ""

    def resolve(self, x: ArraySpec, w: ArraySpec) -> Recipe:
        """The recipe in force for these operands."""
        return self.recipe or plain(x.dtype, w.dtype)

    def weight_axes(self) -> tuple[int, int]:
        """Axes of the weight that hold K and N."""
        return (2, 1) if self.transposed else (1, 2)


def implementation_names(implementation: str | Sequence[str] | None) -> str:
    """`implementation=` of a public function as the comma list that a `Call` carries."""
    if implementation is None:
        return ""
    if isinstance(implementation, str):
        names = [implementation]
    else:
        names = list(implementation) if isinstance(implementation, Sequence) else []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(
            f"`implementation`: {implementation!r}, wanted None, a kernel's name or a sequence of names; "
            "`explain` lists the kernels of a call."
        )
    return ",".join(names)


def recipe_option(recipe: Any) -> Recipe | None:
    """`recipe=` of a public function, which is a `Recipe` or None."""
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"`recipe`: {type(recipe).__name__}, expected None or a Recipe; pass one, e.g. BF16.")
    return recipe


def dtype_option(dtype: Any) -> str | None:
    """The name of a dtype that a user chose; what is none keeps its text, and `check_linear` refuses it by that."""
    if dtype is None:
        return None
    try:
        return np.dtype(dtype).name
    except TypeError:
        return str(dtype)


def _shape(name: str, spec: ArraySpec, wanted: str, remedy: str) -> ValueError:
    return ValueError(f"`{name}`: shape {spec.shape}, expected {wanted}; {remedy}.")


def check_sizes(names: Names, sizes: ArraySpec) -> None:
    """GRP-1: one-dimensional, of integers."""
    if sizes.dtype == "bool" or not sizes.dtype.startswith(("int", "uint")):
        raise TypeError(
            f"`{names.sizes}`: dtype {sizes.dtype}, expected an integer dtype (int32 is native); "
            "pass the number of rows of each group as integers."
        )
    if len(sizes.shape) != 1:
        raise _shape(names.sizes, sizes, "one axis [G]", "pass one size a group")


def _check_float(name: str, spec: ArraySpec, allowed: tuple[str, ...]) -> None:
    if spec.dtype not in allowed:
        raise TypeError(f"`{name}`: dtype {spec.dtype}, expected one of {', '.join(allowed)}; cast it first.")


@lru_cache(maxsize=4096)
def check_linear(
    op: Linear,
    x: ArraySpec,
    w: ArraySpec,
    sizes: ArraySpec,
    bias: ArraySpec | None = None,
    row_scale: ArraySpec | None = None,
    out: ArraySpec | None = None,
) -> ArraySpec:
    """Refuses what the linear operation does not take, in words; returns the spec of y, [M, N].

    Raises:
        TypeError: dtypes. ValueError: ranks, shapes, empty axes, contradictory options.
    """
    n = op.names
    layout = "[G, N, K]" if op.transposed else "[G, K, N]"
    check_sizes(n, sizes)
    _check_float(n.x, x, tuple(PLAIN))
    _check_float(n.w, w, tuple(PLAIN))
    if len(x.shape) != 2:
        raise _shape(n.x, x, "two axes [M, K]", "fold leading axes into rows with a reshape")
    if len(w.shape) != 3:
        raise _shape(n.w, w, f"three axes {layout}", "stack one matrix a group on the first axis")
    if x.dtype != w.dtype and not (x.dtype.startswith("float8") and w.dtype.startswith("float8")):
        raise TypeError(
            f"`{n.w}`: dtype {w.dtype}, expected {x.dtype} = dtype of `{n.x}`; "
            "cast one of them, nothing is cast behind your back."
        )
    groups = w.shape[0]
    k_axis, n_axis = op.weight_axes()
    k, width = w.shape[k_axis], w.shape[n_axis]
    if min(groups, k, width) < 1:
        raise _shape(n.w, w, f"{layout} with every axis at least 1", "only M, the number of rows, may be 0")
    if groups > MAX_GROUPS:
        raise _shape(n.w, w, f"at most {MAX_GROUPS} groups", "split the groups over several calls")
    if x.shape[1] != k:
        raise _shape(
            n.x, x, f"(M, {k}) to match `{n.w}` {layout} = {w.shape}", f"check the operands and `{n.transposed}`"
        )
    if x.shape[0] > MAX_ROWS:
        raise _shape(n.x, x, f"at most {MAX_ROWS} rows", "split the rows over several calls")
    if sizes.shape[0] != groups:
        raise _shape(n.sizes, sizes, f"({groups},) = one size for each group of `{n.w}`", "pass one size a group")
    _check_recipe(op, x, w)
    if op.scale_bias and (bias is None or row_scale is None):
        missing = n.bias if bias is None else n.row_scale
        raise ValueError(
            f"`{n.scale_bias}`: True without `{missing}`, expected both `{n.bias}` and `{n.row_scale}`; "
            f"pass `{missing}` or leave `{n.scale_bias}` False."
        )
    if bias is not None:
        _check_float(n.bias, bias, WIDE)
        if bias.shape != (groups, width):
            raise _shape(n.bias, bias, f"({groups}, {width}) = [G, N]", "pass one bias vector a group")
    if row_scale is not None:
        _check_float(n.row_scale, row_scale, WIDE)
        if row_scale.shape != (x.shape[0],):
            raise _shape(
                n.row_scale, row_scale, f"({x.shape[0]},) = all rows of `{n.x}`, tail included", "pass one factor a row"
            )
    for name, dtype in ((n.result, op.result_dtype), (n.wgrad, op.wgrad_dtype)):
        if dtype is not None and dtype not in WIDE:
            raise TypeError(f"`{name}`: {dtype}, expected None or one of {', '.join(WIDE)}; choose one of them.")
    default = x.dtype if x.dtype in WIDE else "bfloat16"
    result = ArraySpec((x.shape[0], width), op.result_dtype or default)
    if out is not None:
        check_buffer(n.out, out, result)
    return result


def _check_recipe(op: Linear, x: ArraySpec, w: ArraySpec) -> None:
    if op.recipe is None:
        return
    for name, spec, cell in zip((op.names.x, op.names.w), (x, w), op.recipe.forward, strict=True):
        if spec.dtype != cell.values:
            raise TypeError(
                f"`{name}`: dtype {spec.dtype}, expected {cell.values} as the recipe {op.recipe.name} stores it; "
                "cast it, or pass recipe=None to use the operands as they stand."
            )


def check_buffer(name: str, got: ArraySpec, wanted: ArraySpec) -> None:
    """BUF-2: a caller's buffer has exactly the result's shape and dtype."""
    if got.shape != wanted.shape:
        raise ValueError(
            f"`{name}`: shape {got.shape}, expected {wanted.shape} = all rows, tail included; "
            "allocate a buffer of that shape."
        )
    if got.dtype != wanted.dtype:
        raise ValueError(
            f"`{name}`: dtype {got.dtype}, expected {wanted.dtype} = dtype of the result; "
            "allocate a buffer of that dtype."
        )


def check_accumulator(name: str, got: ArraySpec, weight: ArraySpec) -> None:
    """MAT-11: an accumulator has the weight's shape, and float32 or a 16-bit dtype of its own."""
    if got.shape != weight.shape:
        raise _shape(name, got, f"{weight.shape} = shape of the weight", "allocate one that matches its weight")
    _check_float(name, got, WIDE)


def check_wgrad_dtype(op: Linear, accumulator: ArraySpec) -> None:
    """The dtype of a weight gradient that goes to an accumulator is the accumulator's."""
    if op.wgrad_dtype not in (None, accumulator.dtype):
        n = op.names
        raise ValueError(
            f"`{n.wgrad}`: {op.wgrad_dtype}, expected None or {accumulator.dtype} = dtype of `{n.accum}`; "
            f"leave `{n.wgrad}` None, the accumulator's dtype decides."
        )


def spec_of(array: Any) -> ArraySpec:
    """Spec of anything with `shape` and a NumPy-like `dtype` (JAX, NumPy, CuPy).

    A dtype in foreign byte order keeps its mark (">f4"), so that no check takes it for the native one.
    """
    dtype = array.dtype
    name = getattr(dtype, "name", dtype) if getattr(dtype, "isnative", True) else dtype.str
    return ArraySpec(tuple(int(d) for d in array.shape), str(name))
