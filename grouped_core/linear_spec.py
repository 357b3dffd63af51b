"""Static parameters of the linear operation, and the checks of its arguments that all frontends share.

Letters: G groups, M rows, K in, N out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from grouped_core.calls import MAX_GROUPS, MAX_ROWS, ArraySpec, OperandSpec, QuantizedSpec, spec_in_format
from grouped_core.formats import PLAIN, WIDE, Format, wide
from grouped_core.hashing import hashed_once
from grouped_core.ranks import check_rank
from grouped_core.recipes import BoundRecipe, Recipe, plain


class Names(NamedTuple):
    """A frontend's names of the arguments; error messages of the frontends differ in nothing else."""

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


@hashed_once
@dataclass(frozen=True)
class Linear:
    """Static parameters of one grouped linear operation, y[r] = x[r] W[g(r)]: frozen, hashable, without arrays.

    Attributes:
        names: the frontend's argument names, for messages.
        transposed: weights are [G, N, K] instead of [G, K, N].
        recipe: None uses the operands as given.
        scale_bias: row_scale multiplies the bias only.
        result_dtype: dtype of y; None: that of x.
        wgrad_dtype: dtype of a new weight gradient; None: that of the weight.
        rows_hint: usual number of rows per group, for tile choice only; 0 is unknown.
        few_rows: M has few rows per group (`has_few_rows`). The frontend says so, because forward and backward must
            agree, and a program of it may serve every M.
        implementation: pinned kernels, separated by commas; "" lets dispatch choose.
        paired: the weight is two arrays, halves of its N columns.
        fp32: the least accurate mode of float32 operands that the call accepts; None: the recipe decides.
    """

    names: Names
    transposed: bool = False
    recipe: Recipe | None = None
    scale_bias: bool = False
    result_dtype: str | None = None
    wgrad_dtype: str | None = None
    rows_hint: int = 0
    implementation: str = ""
    paired: bool = False
    fp32: str | None = None
    few_rows: bool = False

    def resolve(self, x: OperandSpec, w: OperandSpec) -> Recipe:
        """The recipe for these operands; without one, the operands are used as given, quantised or not.

        Raises:
            NotImplementedError: the weight is two arrays, and operands are quantised.
        """
        recipe = self.recipe or _as_they_are(x.dtype, w.dtype, _format(x), _format(w))
        if self.paired and recipe.quantized:
            raise two_arrays(self.names.w, recipe)
        return recipe if self.fp32 is None else recipe.at_least(self.fp32)

    def gradient_dtype(self, w: OperandSpec) -> str:
        """The dtype of a new gradient of the weight with that spec."""
        return self.wgrad_dtype or wide(w.dtype)

    def weight_axes(self) -> tuple[int, int]:
        """Axes of the weight that hold K and N."""
        return (2, 1) if self.transposed else (1, 2)


FEW_ROWS = 2048
"""Rows per group below which one form of 8-bit weights takes less time than two (benchmarks/RESULTS.md, "One form of
weights"): dgrad takes longer with the codes of forward, by its rows, and one form is made faster, by the weights."""


def has_few_rows(rows: int, groups: int) -> bool:
    """Whether M rows are few for G groups."""
    return rows < FEW_ROWS * groups


def two_arrays(name: str, recipe: Recipe | None) -> NotImplementedError:
    """The error for a weight in two arrays with a quantising recipe or, without a recipe, with quantised operands."""
    beside = "quantised operands" if recipe is None else f"recipe {recipe.name}"
    return NotImplementedError(f"`{name}`: two arrays beside {beside}, expected one here; pass one array.")


def _format(operand: OperandSpec) -> Format | None:
    return operand.format if isinstance(operand, QuantizedSpec) else None


@lru_cache(maxsize=256)
def _as_they_are(x: str, w: str, x_format: Format | None, w_format: Format | None) -> Recipe:
    """Returns the recipe for operands as they are: plain formats, or for a quantised operand its own format."""
    found = plain(x, w)
    if x_format is None and w_format is None:
        return found
    # Rounding does not change how codes are read; forward does not read rotated forms.
    rows, weight = (x_format or found.forward[0]).replace(stochastic=False, rotate=False), w_format or found.forward[1]
    name = f"{rows.name} x {weight.name}"
    return found.replace(name=name, forward=(rows, weight), dgrad=(found.dgrad[0], weight))


def implementation_names(implementation: str | Sequence[str] | None) -> str:
    """`implementation=` of a public function as the comma-separated string of a `Call`."""
    if implementation is None:
        return ""
    if isinstance(implementation, str):
        names = [implementation]
    else:
        names = list(implementation) if isinstance(implementation, Sequence) else []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(
            f"`implementation`: {implementation!r}, expected None, a kernel's name or a sequence of names; "
            "`explain` lists the kernels of a call."
        )
    return ",".join(names)


def recipe_option(recipe: Any) -> BoundRecipe:
    """`recipe=` of a public function, None, a `Recipe` or a `BoundRecipe`, as a `BoundRecipe`.

    Raises:
        TypeError: it is none of these.
    """
    if recipe is None:
        return _NO_RECIPE
    if isinstance(recipe, BoundRecipe):
        return recipe
    if not isinstance(recipe, Recipe):
        raise TypeError(f"`recipe`: {type(recipe).__name__}, expected None or a Recipe; pass one, e.g. BF16.")
    return _without_arrays(recipe)


_NO_RECIPE = BoundRecipe(None)
_without_arrays = lru_cache(maxsize=256)(BoundRecipe)


def check_made_by(function: str, name: str, value: Any, kind: type, maker: str) -> None:
    """Refuses an argument that has to be a result of the function `maker`, but is not of its class `kind`.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, kind):
        raise TypeError(
            f"`{name}` of {function}: {type(value).__name__}, expected the {kind.__name__} that `{maker}` returns; "
            "pass that."
        )


def dtype_option(dtype: Any) -> str | None:
    """The name of the dtype that a user chose; text that names no dtype is kept, and `check_linear` refuses it."""
    if dtype is None:
        return None
    try:
        return np.dtype(dtype).name
    except TypeError:
        return str(dtype)


def wide_option(name: str, dtype: Any) -> str | None:
    """The name of the dtype of a result; None where the user chose none.

    Raises:
        TypeError: results cannot have this dtype.
    """
    found = dtype_option(dtype)
    if found is not None and found not in WIDE:
        raise TypeError(f"`{name}`: {found}, expected None or one of {', '.join(WIDE)}; choose one of them.")
    return found


def _shape(name: str, spec: OperandSpec, wanted: str, remedy: str) -> ValueError:
    return ValueError(f"`{name}`: shape {spec.shape}, expected {wanted}; {remedy}.")


def check_sizes(names: Names, sizes: ArraySpec) -> None:
    """GRP-1: one-dimensional, of integers."""
    if sizes.dtype == "bool" or not sizes.dtype.startswith(("int", "uint")):
        raise TypeError(
            f"`{names.sizes}`: dtype {sizes.dtype}, expected an integer dtype (int32 is native); "
            "pass the number of rows of each group as integers."
        )
    check_rank("linear", "sizes", names.sizes, sizes.shape)


def _check_float(name: str, spec: OperandSpec, allowed: tuple[str, ...]) -> None:
    if spec.dtype not in allowed:
        raise TypeError(f"`{name}`: dtype {spec.dtype}, expected one of {', '.join(allowed)}; cast it first.")


@lru_cache(maxsize=4096)
def check_linear(
    op: Linear,
    x: OperandSpec,
    w: OperandSpec,
    sizes: ArraySpec,
    bias: ArraySpec | None = None,
    row_scale: ArraySpec | None = None,
    out: ArraySpec | None = None,
) -> ArraySpec:
    """Refuses arguments that the linear operation does not accept; returns the spec of y, [M, N].

    Raises:
        TypeError: dtypes. ValueError: ranks, shapes, empty axes, contradictory options.
    """
    n = op.names
    layout = "[G, N, K]" if op.transposed else "[G, K, N]"
    check_sizes(n, sizes)
    _check_float(n.x, x, tuple(PLAIN))
    _check_float(n.w, w, tuple(PLAIN))
    check_rank("linear", "x", n.x, x.shape)
    check_rank("linear", "w", n.w, w.shape, transposed=op.transposed)
    if x.dtype != w.dtype and not (
        isinstance(x, QuantizedSpec)
        or isinstance(w, QuantizedSpec)
        or (x.dtype.startswith("float8") and w.dtype.startswith("float8"))
    ):
        raise TypeError(
            f"`{n.w}`: dtype {w.dtype}, expected {x.dtype} = dtype of `{n.x}`; "
            "cast one of them; the operation does not cast operands itself."
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
        raise _shape(n.sizes, sizes, f"({groups},) = one size for each group of `{n.w}`", "pass one size per group")
    _check_recipe(op, x, w)
    for name, spec in ((n.x, x), (n.w, w)):
        if isinstance(spec, QuantizedSpec):
            check_quantized(name, spec, groups)
    if op.scale_bias and (bias is None or row_scale is None):
        missing = n.bias if bias is None else n.row_scale
        raise ValueError(
            f"`{n.scale_bias}`: True without `{missing}`, expected both `{n.bias}` and `{n.row_scale}`; "
            f"pass `{missing}` or leave `{n.scale_bias}` False."
        )
    if bias is not None:
        _check_float(n.bias, bias, WIDE)
        check_rank("linear", "bias", n.bias, bias.shape)
        if bias.shape != (groups, width):
            raise _shape(n.bias, bias, f"({groups}, {width}) = [G, N]", "pass one bias vector per group")
    if row_scale is not None:
        _check_float(n.row_scale, row_scale, WIDE)
        check_rank("linear", "row_scale", n.row_scale, row_scale.shape)
        if row_scale.shape != (x.shape[0],):
            raise _shape(
                n.row_scale,
                row_scale,
                f"({x.shape[0]},) = all rows of `{n.x}`, tail included",
                "pass one factor per row",
            )
    wide_option(n.result, op.result_dtype)
    wide_option(n.wgrad, op.wgrad_dtype)
    result = ArraySpec((x.shape[0], width), op.result_dtype or wide(x.dtype))
    if out is not None:
        check_buffer(n.out, out, result)
    return result


def check_quantized(name: str, spec: QuantizedSpec, groups: int) -> None:
    """Refuses a quantised operand whose arrays do not fit its format, its shape and the number of groups.

    Raises:
        ValueError: they do not.
    """
    again = "quantise it with the sizes of this call, or pass the sizes that it was quantised with"
    remedy = again if len(spec.shape) == 2 else "quantise it again"
    for form in (spec, spec.other):
        if form is None:
            continue
        if form.shape != spec.shape:
            raise _shape(
                f"{name}.other", form, f"{spec.shape} = shape of `{name}`", "quantise one array along both axes"
            )
        wanted = spec_in_format(form.format, form.shape, form.axis, form.dtype, groups)
        for part, got, want in zip(("codes", "scales", "scales of groups"), form[:3], wanted[:3], strict=True):
            if got != want:
                raise ValueError(
                    f"`{name}`: {part} {got}, expected {want} = those of {form.format.name}{list(form.shape)} along "
                    f"axis {form.axis} in {groups} groups; {remedy}."
                )


def _check_recipe(op: Linear, x: OperandSpec, w: OperandSpec) -> None:
    """Refuses operands that do not fit the recipe's formats.

    A plain format needs an array of its dtype; other formats accept 16-bit and 32-bit floats, or a quantised operand.
    """
    axes = (1, op.weight_axes()[0])
    formats: list[Format | None] = [None, None]
    for at, (name, spec, axis) in enumerate(zip((op.names.x, op.names.w), (x, w), axes, strict=True)):
        if not isinstance(spec, QuantizedSpec):
            continue
        forms = (spec, spec.other)
        formats[at] = next((form.format for form in forms if form is not None and form.axis == axis), None)
        if formats[at] is None:
            raise ValueError(
                f"`{name}`: {spec} along axis {spec.axis}, expected along axis {axis}, which the product contracts; "
                f"quantise it with axis={axis}, or with both."
            )
    reads_fp16 = x.dtype == "float16" and (op.recipe is None or _reads_fp16_rows(op.recipe))
    if isinstance(w, QuantizedSpec) and w.format.powers_of_fp4 and reads_fp16:
        raise TypeError(
            f"`{op.names.x}`: float16 beside {w.format.name}, expected bfloat16 or float32, whose range holds its "
            "scales; cast it."
        )
    if op.recipe is None:
        return
    for name, spec, held, fmt in zip((op.names.x, op.names.w), (x, w), formats, op.recipe.forward, strict=True):
        if held is not None:
            if held.layout != fmt.layout and op.recipe.requantize is None:
                raise ValueError(
                    f"`{name}`: quantised as {held.name}, expected {fmt.name}, the format of the recipe "
                    f"{op.recipe.name}; quantise it so, or pass a recipe with requantize='from_dequantized'."
                )
        elif fmt.plain and spec.dtype != fmt.values:
            raise TypeError(
                f"`{name}`: dtype {spec.dtype}, expected {fmt.values}, the dtype of the recipe {op.recipe.name}; "
                "cast it, or pass recipe=None to use the operands as given."
            )
        elif not fmt.plain and spec.dtype not in WIDE:
            raise TypeError(
                f"`{name}`: dtype {spec.dtype}, expected one of {', '.join(WIDE)}, which the recipe {op.recipe.name} "
                "quantises; pass the array before any rounding, or a QTensor."
            )


def _reads_fp16_rows(recipe: Recipe) -> bool:
    """Whether a product with the weight reads rows as they are in fp16."""
    return "float16" in (recipe.forward[0].values, recipe.dgrad[0].values)


def check_buffer(name: str, got: ArraySpec, wanted: ArraySpec) -> None:
    """BUF-2: a caller's buffer must have exactly the result's shape and dtype."""
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
    """MAT-11: an accumulator must have the weight's shape, and float32 or a 16-bit dtype, whatever the weight's."""
    if got.shape != weight.shape:
        raise _shape(name, got, f"{weight.shape} = shape of the weight", "allocate one that matches its weight")
    _check_float(name, got, WIDE)


def check_wgrad_dtype(op: Linear, accumulator: ArraySpec) -> None:
    """Refuses a `wgrad_dtype` other than the dtype of the accumulator that the weight gradient is added to."""
    if op.wgrad_dtype not in (None, accumulator.dtype):
        n = op.names
        raise ValueError(
            f"`{n.wgrad}`: {op.wgrad_dtype}, expected None or {accumulator.dtype} = dtype of `{n.accum}`; "
            f"leave `{n.wgrad}` None, the accumulator sets the dtype."
        )


def wrong_width(
    layer: str, x: Sequence[int], width: int, option: str, weight: str, of_weight: Sequence[int]
) -> ValueError:
    """The error for rows of another width than that of a layer.

    Args:
        x: the shape of the rows. option: the layer's option for `width`. weight, of_weight: the name and the shape of
            the parameter that they meet.
    """
    return ValueError(
        f"`x` of {layer}: shape {tuple(x)}, expected {width} columns = `{option}`, to match `{weight}` "
        f"{tuple(of_weight)}; pass rows of {width} columns, or make the layer with {option}={x[-1]}."
    )


@lru_cache(maxsize=64)
def _keywords(*kinds: Callable[..., Any]) -> frozenset[str]:
    every = [each for kind in kinds for each in inspect.signature(kind).parameters.values()]
    return frozenset([each.name for each in every if each.kind is each.KEYWORD_ONLY]) - {"scale_bias"}


def check_keywords(layer: str, given: Iterable[str], *kinds: Callable[..., Any]) -> None:
    """Refuses a keyword of `layer` that none of the layers `kinds`, which get its keywords, has. Raises TypeError.

    Without this check the innermost layer would refuse it, by a name that the user did not write. No MLP takes
    `scale_bias`.
    """
    known = _keywords(*kinds)
    for name in given:
        if name not in known:
            raise TypeError(
                f"`{name}` of {layer}: given, expected no such keyword; leave it out, or choose one of "
                f"{', '.join(sorted(known))}."
            )
