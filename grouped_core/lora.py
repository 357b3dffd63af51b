"""Low-rank adapters of frozen grouped weights (docs/lora.md): y = x W + s (x A) B per group, with gradients of A and B.

Letters: G groups, M rows, K in, N out, r rank. The products and what they round:

    u = s (drop(x) A), rounded;  y = x W + u B, in float32 before the bias and the one rounding
    v = s (dy B^T), rounded;  dx = dy W^T + drop(v A^T);  dA = drop(x)^T v;  dB = u^T dy
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from grouped_core import gradients, linear_spec
from grouped_core.calls import ArraySpec, OperandSpec, QuantizedSpec
from grouped_core.formats import WIDE, QTensor, is_finite
from grouped_core.gradients import Amaxes, LinearSpecs, Needs, Term
from grouped_core.hashing import hashed_once
from grouped_core.linear_spec import Linear
from grouped_core.products import (
    Array,
    Listed,
    Low,
    Operand,
    Runner,
    add_rows,
    low_rank_grads,
    operand_spec,
    product,
    scale_rows,
)
from grouped_core.quantizing import NO_EXTRAS, Extras
from grouped_core.ranks import check_rank
from grouped_core.recipes import Recipe, plain

MAX_RANK = 256
LORA = "lora"
"""The argument of public functions that holds an adapter."""
OPTIONS = (LORA, *(f"{LORA}_{name}" for name in ("scaling", "dropout", "key", "wgrad_accum")))
"""All arguments of public functions that belong to adapters."""
_NUMBERS = (int, float, np.integer, np.floating)


@hashed_once
@dataclass(frozen=True)
class Adapter:
    """Static parameters of one adapter: frozen, hashable, without arrays.

    Attributes:
        name: the frontend's name of the pair (A, B), for messages.
        scaling: s. dropout: probability with which an element of x is dropped on its way to A.
        stream: number of the mask among those of one key: 0, or 1 for the second product of an MLP.
    """

    name: str = "lora"
    scaling: float = 1.0
    dropout: float = 0.0
    stream: int = 0

    @property
    def accum(self) -> str:
        """The frontend's name of the accumulators of the pair."""
        return f"{LORA}_wgrad_accum{self.name.removeprefix(LORA)}"

    @property
    def kept(self) -> float:
        """The factor of elements that are not dropped."""
        return 1.0 / (1.0 - self.dropout)

    def down(self, op: Linear) -> Linear:
        """The product with A beside the base product `op`."""
        return self._product(op, op.names.x, f"{self.name}[0]")

    def up(self, op: Linear) -> Linear:
        """The product with B beside the base product `op`."""
        return self._product(op, f"rows of `{self.name}[0]`", f"{self.name}[1]")

    def _product(self, op: Linear, x: str, w: str) -> Linear:
        names = op.names._replace(x=x, w=w, accum=self.accum)
        return Linear(names, transposed=op.transposed, rows_hint=op.rows_hint, fp32=op.fp32)


_ROUNDS_TO_ONE = 1 - 2.0**-25
"""The least number that float32 rounds to 1."""


def option(name: str, scaling: Any, dropout: Any, key: Any, stream: int = 0) -> Adapter:
    """The options of a public function as an `Adapter`. Of `key`, only its presence is checked, not its value.

    Raises:
        ValueError: `scaling` is not a finite number, `dropout` is not from 0 to 1 without 1, or a key is given without
            dropout, or the other way round.
    """
    known = "known when the function is called"
    if not _is_finite(scaling):
        raise ValueError(
            f"`{name}_scaling`: {scaling!r}, expected a finite number, as float32 too, {known}; pass alpha / r."
        )
    if not _is_finite(dropout) or not 0 <= dropout < _ROUNDS_TO_ONE:
        wanted = f"0 to 1, without 1 and what float32 rounds to it, {known}"
        raise ValueError(f"`{name}_dropout`: {dropout!r}, expected {wanted}; pass a rate such as 0.05.")
    if (key is None) == (dropout > 0):
        came = f"None with a dropout of {dropout}" if dropout else "given without dropout"
        raise ValueError(
            f"`{name}_key`: {came}, expected a key if and only if elements are dropped; pass both, or neither."
        )
    return Adapter(name, float(scaling), float(dropout), stream)


def _is_finite(value: Any) -> bool:
    return isinstance(value, _NUMBERS) and not isinstance(value, bool) and is_finite(value)


class LayerOptions(NamedTuple):
    """The adapter of each product of a layer; rank 0: it has none.

    Attributes:
        scaling: alpha / rank. dropout: in training.
    """

    rank: int = 0
    scaling: float = 1.0
    dropout: float = 0.0


def layer_options(layer: str, rank: Any, alpha: Any, dropout: Any) -> LayerOptions:
    """`lora_rank`, `lora_alpha` and `lora_dropout` of a layer. An alpha of None is the rank.

    Raises:
        TypeError: the rank is not an integer. ValueError: an option is out of range, or given without a rank.
    """
    if rank is None:
        if alpha is not None or dropout != 0:
            raise ValueError(
                f"`lora_alpha`, `lora_dropout` of {layer}: {alpha} and {dropout} without `lora_rank`, expected None "
                "and 0.0; pass a rank, or leave them out."
            )
        return LayerOptions()
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
        raise TypeError(f"`lora_rank` of {layer}: {rank!r}, expected an integer or None; pass a rank such as 16.")
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"`lora_rank` of {layer}: {rank}, expected 1 to {MAX_RANK}; choose one of these.")
    if alpha is not None and not _is_finite(alpha):
        raise ValueError(
            f"`lora_alpha` of {layer}: {alpha!r}, expected a finite number, as float32 too, or None; None is the rank."
        )
    scaling = 1.0 if alpha is None else alpha / rank
    option(LORA, scaling, dropout, object() if dropout else None)
    return LayerOptions(int(rank), float(scaling), float(dropout))


def pair_option(given: Any, name: str = LORA) -> tuple[Any, Any]:
    """`lora=` of a public function, or a part of it, as (A, B).

    Raises:
        ValueError: it is not a pair, or lacks a factor.
    """
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise ValueError(f"`{name}`: {type(given).__name__}, expected a pair (A, B); pass both factors.")
    for at, letter in enumerate("AB"):
        if given[at] is None:
            raise ValueError(f"`{name}[{at}]`: None, expected the factor {letter}; pass both factors of an adapter.")
    return given[0], given[1]


def accumulators_option(given: Any, name: str = f"{LORA}_wgrad_accum") -> tuple[Any, Any]:
    """The accumulators of A and of B from `lora_wgrad_accum=`, other than text, or from its part for one weight.

    Raises:
        ValueError: it is neither None nor a pair.
    """
    if given is None:
        return None, None
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise ValueError(
            f"`{name}`: {type(given).__name__}, expected None, or a pair as `{LORA}` is; put None where A or B has no "
            "accumulator."
        )
    return given[0], given[1]


def check_absent(scaling: Any, dropout: Any, key: Any, accum: Any) -> None:
    """Refuses options of an adapter without one.

    Raises:
        ValueError: an option is not its default.
    """
    if not isinstance(scaling, _NUMBERS) or scaling != 1:
        name, default = "scaling", 1.0
    elif not isinstance(dropout, _NUMBERS) or dropout != 0:
        name, default = "dropout", 0.0
    elif key is not None or accum is not None:
        name, default = "wgrad_accum" if key is None else "key", None
    else:
        return
    raise ValueError(
        f"`{LORA}_{name}`: given without `{LORA}`, expected {default}; pass an adapter (A, B), or leave it out."
    )


def check_of_layer(lora: Any, of_shared: Any, scaling: Any, dropout: Any, key: Any, accum: Any) -> None:
    """Refuses options of adapters if neither a layer's experts nor its shared expert have any, and accumulators if the
    experts have none.

    Raises:
        ValueError: an option is not its default.
    """
    if lora is None:
        check_absent(*((scaling, dropout, key) if of_shared is None else (1.0, 0.0, None)), accum)


def check_no_weight_gradient(**options: Any) -> None:
    """Refuses options of the weight gradient, by name, of a weight that is frozen beside an adapter.

    Raises:
        ValueError: one is not None.
    """
    for name, given in options.items():
        if given is not None:
            raise ValueError(
                f"`{name}`: given beside `{LORA}`, expected None, because the weight is frozen; use "
                f"`{LORA}_wgrad_accum` for A and B."
            )


def _wrong(kind: type[Exception], name: str, came: str, wanted: str, remedy: str) -> Exception:
    return kind(f"`{name}`: {came}, expected {wanted}; {remedy}.")


@lru_cache(maxsize=4096)
def check(
    op: Linear, adapter: Adapter, x: OperandSpec, w: OperandSpec, a: ArraySpec, b: ArraySpec, key: ArraySpec | None
) -> None:
    """Refuses an adapter that does not fit its base product, which is checked already.

    Raises:
        TypeError: dtypes; x is quantised. ValueError: shapes, a rank that is not from 1 to 256, a base in two arrays.
    """
    name, transposed = adapter.name, op.transposed
    if op.paired:
        check_whole(op.names.w, LORA)
    if isinstance(x, QuantizedSpec) or x.dtype not in WIDE:
        raise _wrong(
            *(TypeError, op.names.x, f"{x} beside `{name}`", f"one of {', '.join(WIDE)}"),
            "pass the array before it is quantised; a recipe quantises it for the base product",
        )
    for part, spec in (("a", a), ("b", b)):
        place = f"{name}[{'ab'.index(part)}]"
        check_rank("lora", part, place, spec.shape, transposed=transposed)
        if spec.dtype != x.dtype:
            wanted = f"{x.dtype} = dtype of `{op.names.x}`"
            raise _wrong(TypeError, place, f"dtype {spec.dtype}", wanted, "cast it first")
    k_axis, n_axis = op.weight_axes()
    groups, k, n, rank = w.shape[0], w.shape[k_axis], w.shape[n_axis], a.shape[n_axis]
    if not 1 <= rank <= MAX_RANK:
        wanted = f"a rank from 1 to {MAX_RANK}"
        remedy = f"choose a {'smaller' if rank else 'larger'} one"
        raise _wrong(ValueError, f"{name}[0]", f"shape {a.shape}, a rank of {rank}", wanted, remedy)
    for at, spec, depth, width, letters in ((0, a, k, rank, "Kr"), (1, b, rank, n, "rN")):
        wanted_shape = (groups, width, depth) if transposed else (groups, depth, width)
        if spec.shape != wanted_shape:
            axes = ", ".join(letters[::-1] if transposed else letters)
            wanted = f"{wanted_shape} = [G, {axes}] beside `{op.names.w}` {w.shape}"
            raise _wrong(ValueError, f"{name}[{at}]", f"shape {spec.shape}", wanted, "make A and B for this weight")
    if key is not None:
        check_key(key)


def check_key(key: ArraySpec) -> None:
    """Refuses a key that is not two words. Raises ValueError."""
    if key != ArraySpec((2,), "uint32"):
        raise _wrong(ValueError, f"{LORA}_key", f"{key}", "uint32[2], low word first", "pass such an array")


def check_whole(weight: str, name: str) -> None:
    """Refuses a weight in two arrays beside an adapter. Raises ValueError."""
    raise _wrong(
        ValueError, weight, f"two arrays beside `{name}`", "one array", "pass gate and linear half as one array"
    )


class LoraNeeds(NamedTuple):
    """Which gradients the caller asked for. The base weight is frozen, so it has none."""

    x: bool = True
    a: bool = True
    b: bool = True
    bias: bool = True
    row_scale: bool = True


NO_NEEDS = LoraNeeds(*[False] * len(LoraNeeds._fields))


class Kept(NamedTuple):
    """Which arrays backward reads; x: the rows, u: the products of the rows with A, [M, r]."""

    x: bool
    w: bool
    u: bool
    a: bool
    b: bool
    bias: bool
    row_scale: bool


def _of_base(needs: LoraNeeds) -> Needs:
    return Needs(needs.x, False, needs.bias, needs.row_scale)


@lru_cache(maxsize=1024)
def kept(op: Linear, needs: LoraNeeds, has_bias: bool, has_scale: bool) -> Kept:
    """What backward reads for the gradients in `needs`; nothing is kept for a weight gradient of the base."""
    base = gradients.linear_saved(op, _of_base(needs), has_bias, has_scale)
    values = gradients.reads_values(op, _of_base(needs), has_scale)
    scales_rows = has_scale and not op.scale_bias
    return Kept(
        x=needs.a or values,
        w=base.w,
        u=needs.b,
        a=needs.x or values,
        b=needs.x or values or needs.a,
        bias=base.bias,
        row_scale=base.row_scale or (scales_rows and (needs.a or needs.b)),
    )


class Forward(NamedTuple):
    """y [M, N], and what backward reads, in the form that it reads; None where it does not."""

    y: Array
    x: Operand | None
    w: Operand | None
    u: Array | None  # [M, r], of the dtype of x
    amax: Amaxes


def forward(
    run: Runner,
    op: Linear,
    adapter: Adapter,
    x: Array,
    w: Operand,
    a: Array | Listed,
    b: Array | Listed,
    group_sizes: Array,
    bias: Array | Listed | None = None,
    row_scale: Array | None = None,
    out: Array | None = None,
    key: Array | None = None,
    *,
    extras: Extras = NO_EXTRAS,
    needs: LoraNeeds = NO_NEEDS,
) -> Forward:
    """y[r] = c[r] (x[r] W[g] + s (drop(x[r]) A[g]) B[g] + b[g]); c = row_scale or 1, of b alone with `scale_bias`.

    Args:
        x: [M, K], plain. w: [G, K, N], plain or quantised. a: [G, K, r], b: [G, r, N]; all three with the last two axes
            swapped when transposed. key: uint32 [2], of the dropout. The others are those of `linear_forward`.
    """
    x_spec, w_spec = run.spec(x), operand_spec(run, w)
    bias_spec, scale_spec = operand_spec(run, bias), operand_spec(run, row_scale)
    out_spec = operand_spec(run, out)
    linear_spec.check_linear(op, x_spec, w_spec, run.spec(group_sizes), bias_spec, scale_spec, out_spec)
    check(op, adapter, x_spec, w_spec, operand_spec(run, a), operand_spec(run, b), operand_spec(run, key))
    keep = kept(op, needs, bias is not None, row_scale is not None)
    low = beside_forward(run, op, adapter, x, a, b, group_sizes, key)
    operands = (x, w, group_sizes, bias, row_scale, out)
    base = gradients.linear_forward(run, op, *operands, extras=extras, needs=_of_base(needs), low=low)
    return Forward(base.y, x if keep.x else None, base.w if keep.w else None, low.rows if keep.u else None, base.amax)


class MainGrads(NamedTuple):
    """Gradients of everything except A and B, None where not needed, and the operands of their gradients.

    The gradient of B is here where it was made along with v; then it has no operands.
    """

    x: Array | None
    bias: Array | None
    row_scale: Array | None
    rows_a: Array | None  # [M, K]: with dy_a gives dA
    dy_a: Array | None  # [M, r]
    rows_b: Array | None  # [M, r]: with dy_b gives dB
    dy_b: Array | None  # [M, N]
    b: Array | None  # dB
    amax: Amaxes  # that backward found


def main_grads(
    run: Runner,
    op: Linear,
    adapter: Adapter,
    specs: LinearSpecs,
    x: Array | None,
    w: Operand | None,
    u: Array | None,
    a: Array | Listed | None,
    b: Array | Listed | None,
    group_sizes: Array,
    bias: Array | Listed | None,
    row_scale: Array | None,
    dy: Operand,
    key: Array | None,
    needs: LoraNeeds,
    *,
    new_b: bool = False,
    grad_input: Array | None = None,
    extras: Extras = NO_EXTRAS,
) -> MainGrads:
    """The gradients in `needs` except those of A and B, for which `weight_grad` takes the operands.

    Args:
        specs: those of x, w, bias, row_scale. x, w, u: as `forward` saved them; those that `kept` does not name are
            None.
        dy: [M, N]. Other arguments are those of `gradients.main_grads`.
        new_b: the gradient of B is a new array now, so it may be made along with v.
    """
    base_needs = _of_base(needs)
    values = gradients.reads_values(op, base_needs, specs[3] is not None)
    scale = None if row_scale is None or op.scale_bias else run.cast(row_scale, "float32")
    plain_dy = gradients.plain_rows(run, dy, group_sizes) if isinstance(dy, QTensor) else dy
    v = db = beside = rows_a = None
    rows_b = _times(run, u, scale, group_sizes) if needs.b else None
    if needs.x or values or needs.a:
        v, db = low_gradients(run, op, adapter, plain_dy, b, group_sizes, rows_b if new_b else None)
    later = needs.b and db is None
    if needs.x or values:
        beside = beside_backward(run, op, adapter, v, a, group_sizes, key, None if values else scale)
    operands: Any = (x if values else None, w, group_sizes, bias, row_scale, dy, base_needs)
    options: dict[str, Any] = {"grad_input": grad_input, "extras": extras, "beside": beside}
    found = gradients.main_grads(run, op, specs, *operands, **options)
    if needs.a:
        rows_a = dropped(run, adapter, x, group_sizes, key)
        v = _times(run, v, scale, group_sizes)
    return MainGrads(
        *(found.x, found.bias, found.row_scale),
        rows_a=rows_a,
        dy_a=v if needs.a else None,
        rows_b=rows_b if later else None,
        dy_b=plain_dy if later else None,
        b=db,
        amax=found.amax,
    )


class Grads(NamedTuple):
    """Every gradient, in the order of `LoraNeeds`; None where not needed."""

    x: Array | None
    a: Array | None
    b: Array | None
    bias: Array | None
    row_scale: Array | None


def backward(
    run: Runner,
    op: Linear,
    adapter: Adapter,
    specs: LinearSpecs,
    factors: tuple[ArraySpec, ArraySpec],
    *operands: Any,
    needs: LoraNeeds,
    into: tuple[Array | Listed | None, Array | Listed | None] = (None, None),
    extras: Extras = NO_EXTRAS,
    grad_input: Array | None = None,
) -> tuple[Grads, Amaxes]:
    """`main_grads`, then the gradients of A and B.

    Args:
        factors: specs of A and B. operands: x, w, u, a, b, group_sizes, bias, row_scale, dy and key of `main_grads`.
        into: accumulators of A and B, to which gradients are added.
    """
    group_sizes = operands[5]
    given: Any = (*operands, needs)
    options: dict[str, Any] = {"new_b": into[1] is None, "grad_input": grad_input, "extras": extras}
    found = main_grads(run, op, adapter, specs, *given, **options)
    da, db = None, found.b
    if needs.a:
        work = (run, adapter.down(op), factors[0], found.rows_a, found.dy_a, group_sizes)
        da = gradients.weight_grad(*work, into=into[0], accumulate=into[0] is not None)
    if found.rows_b is not None:
        work = (run, adapter.up(op), factors[1], found.rows_b, found.dy_b, group_sizes)
        db = gradients.weight_grad(*work, into=into[1], accumulate=into[1] is not None)
    return Grads(found.x, da, db, found.bias, found.row_scale), found.amax


def beside_forward(
    run: Runner,
    op: Linear,
    adapter: Adapter,
    x: Array,
    a: Array | Listed,
    b: Array | Listed,
    group_sizes: Array,
    key: Array | None,
) -> Low:
    """u B, which is added to x W; its rows are u = s drop(x) A, rounded, [M, r]."""
    u = _scaled_product(run, adapter, adapter.down(op), dropped(run, adapter, x, group_sizes, key), a, group_sizes)
    return Low(u, b, op.weight_axes()[0])


def low_gradients(
    run: Runner, op: Linear, adapter: Adapter, dy: Array, b: Array | Listed, group_sizes: Array, rows_b: Array | None
) -> tuple[Array, Array | None]:
    """v = s dy B^T, rounded, [M, r], and, where one pass over dy can make it along with v, dB = rows_b^T dy.

    Both have the bits of two products. A dy of another dtype than B is read by each product in its own way.

    Args:
        rows_b: [M, r]; None: the gradient of B is not asked for, or is made later.
    """
    up, of_b, of_dy = adapter.up(op), operand_spec(run, b), run.spec(dy)
    if rows_b is None or of_b.dtype != of_dy.dtype:
        return _scaled_product(run, adapter, up, dy, b, group_sizes, backward=True), None
    factor, dtypes = (b, up.weight_axes()[1]), (_before_scaling(adapter, of_dy.dtype), up.gradient_dtype(of_b))
    v, db = low_rank_grads(run, up, _recipe(run, up, dy, b), dy, factor, rows_b, group_sizes, dtypes)
    return _scaled(run, adapter, v, group_sizes, of_dy.dtype), db


def beside_backward(
    run: Runner,
    op: Linear,
    adapter: Adapter,
    v: Array,
    a: Array | Listed,
    group_sizes: Array,
    key: Array | None,
    scale: Array | None = None,
) -> Low | Term:
    """drop(v A^T), which is added to dy W^T: in its sums, or, where elements are dropped, to its float32 result.

    Args:
        scale: float32 [M], of whole rows of that result.
    """
    axis = op.weight_axes()[1]
    if not adapter.dropout:
        return Low(v, a, axis)
    low = _product(run, adapter.down(op), v, a, axis, group_sizes, "float32", scale)
    return Term(low, adapter.kept, adapter.dropout, key, adapter.stream)


def dropped(run: Runner, adapter: Adapter, x: Array, group_sizes: Array, key: Array | None) -> Array:
    """The rows that A multiplies."""
    if not adapter.dropout:
        return x
    options: dict[str, Any] = {"rate": adapter.dropout, "key": key, "stream": adapter.stream}
    return add_rows(run, x, group_sizes, run.spec(x).dtype, factor=adapter.kept, **options)


def _scaled_product(
    run: Runner, adapter: Adapter, op: Linear, rows: Array, w: Operand, group_sizes: Array, *, backward: bool = False
) -> Array:
    """[M, r] = s times rows W, or rows W^T in backward; rounded once to the dtype of W, which is that of x."""
    dtype = operand_spec(run, w).dtype
    axis = op.weight_axes()[int(backward)]
    found = _product(run, op, rows, w, axis, group_sizes, _before_scaling(adapter, dtype))
    return _scaled(run, adapter, found, group_sizes, dtype)


def _before_scaling(adapter: Adapter, dtype: str) -> str:
    """The dtype of a product that `_scaled` makes rows of `dtype` from, so that they are rounded once."""
    return dtype if adapter.scaling == 1.0 else "float32"


def _scaled(run: Runner, adapter: Adapter, rows: Array, group_sizes: Array, dtype: str) -> Array:
    """s times rows."""
    if adapter.scaling == 1.0:
        return rows
    return add_rows(run, rows, group_sizes, dtype, factor=adapter.scaling)


def _product(
    run: Runner,
    op: Linear,
    rows: Array,
    w: Operand,
    axis: int,
    group_sizes: Array,
    dtype: str,
    row_scale: Array | None = None,
) -> Array:
    """A product with A or B, contracted along `axis`."""
    recipe = _recipe(run, op, rows, w)
    return product(run, op, recipe, (rows, 1), (w, axis), group_sizes, dtype, row_scale=row_scale)


def _recipe(run: Runner, op: Linear, rows: Array, w: Operand) -> Recipe:
    """The recipe of the products with A and B and of their gradients: unquantised, even if the base product is not."""
    of_w: Any = operand_spec(run, w)
    recipe = plain(run.spec(rows).dtype, of_w.dtype)
    return recipe if op.fp32 is None else recipe.at_least(op.fp32)


def _times(run: Runner, rows: Array, scale: Array | None, group_sizes: Array) -> Array:
    if scale is None:
        return rows
    return scale_rows(run, rows, scale, group_sizes, run.spec(rows).dtype)


def merged(run: Runner, adapter: Adapter, w: Array, rows: Array, right: Array, sizes: Array) -> Array:
    """W + s A B as rows, [G X, Y], rounded once to the dtype of w: the weight with the adapter merged into it.

    Args:
        w: the plain weight as rows: [G, K, N] as [G K, N], [G, N, K] as [G N, K]. rows: A [G, K, r] as [G K, r], or B
            [G, N, r] as [G N, r] when transposed. right: the other one, [G, r, Y]. sizes: int32 [G], all K, or N.
    """
    op = Linear(linear_spec.Names(f"{adapter.name}[0]", f"{adapter.name}[1]"))
    if not run.spec(rows).dtype == run.spec(right).dtype == run.spec(w).dtype:
        # To round them to the dtype of w would be more than one rounding.
        rows, right = run.cast(rows, "float32"), run.cast(right, "float32")
    low = _product(run, op, rows, right, 1, sizes, "float32")
    return add_rows(run, low, sizes, run.spec(w).dtype, base=run.cast(w, "float32"), factor=adapter.scaling)
