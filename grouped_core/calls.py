"""Native calls: the operands, parameters and results of each.

A `Call` is made from shapes and dtypes only, at trace time. Its slots and parameters are those of cc/api/calls.h
(`grouped_core/schema.py`). Every spec that follows from the given operands is derived from that schema.

Letters: G groups, M rows, K in, N out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import ml_dtypes as ml_dtypes  # NumPy then knows the narrow types by name

from grouped_core.activations import KINDS, Activation
from grouped_core.formats import Format, padded_rows
from grouped_core.recipes import Recipe
from grouped_core.schema import RESULTS as RESULTS
from grouped_core.schema import SLOTS as SLOTS
from grouped_core.schema import Param, Slot, schema

MAX_GROUPS = 65535
MAX_ROWS = 2**31 - 1  # rows are addressed by int32 coordinates on the device


class ArraySpec(NamedTuple):
    """Shape and dtype (named as in NumPy and ml_dtypes) of an array; planning needs nothing else."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class QuantizedSpec(NamedTuple):
    """The spec of a `formats.QTensor`: specs of its arrays, and its static fields."""

    values: ArraySpec
    scales: ArraySpec | None
    group_scales: ArraySpec | None
    format: Format
    axis: int
    shape: tuple[int, ...]
    dtype: str
    other: QuantizedSpec | None = None  # the form for the other axis, where there is one

    def __str__(self) -> str:
        return f"{self.format.name}[{', '.join(map(str, self.shape))}]"


OperandSpec = ArraySpec | QuantizedSpec
"""An operand of a product: its shape is the logical one in either case."""


@dataclass(frozen=True)
class Call:
    """One native call, without its arrays.

    Attributes:
        name: as in cc/api/calls.h.
        inputs: one entry per slot, in order; None where an optional operand is absent. An operand that is given by a
            table of addresses has the spec of its packed form here and no array.
        outputs: specs of the results, one entry per slot; None where an optional result is not requested.
        params: static parameters by name.
        aliases: (input slot, output) pairs that share one buffer.
        implementation: requested kernels, separated by commas; empty leaves the choice to dispatch.
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

    def arrange(self, **arrays: Any) -> tuple[Any, ...]:
        """`arrays` in the order of the slots; None where an operand is absent."""
        slots = SLOTS[self.name]
        if unknown := arrays.keys() - set(slots):
            raise KeyError(f"{self.name} has no operands {sorted(unknown)}; it has {', '.join(slots)}")
        return tuple(arrays.get(slot) for slot in slots)


QUANTIZED = RESULTS["shard_cast"]
"""Results of `quantize`, in order: the form contracted along the last axis, then the form contracted along the axis
before it."""

_QUANTIZING = ("scale", "key", "into_amax")
"""Operands of quantising, besides its source."""

_QUANTIZING_PARAMS = tuple([name for name in schema("quantize").params if name != "slots"])
"""Parameters of quantising a result; rows of a result are not gathered."""

ACTIVATED = {name: name.replace("activated_", "cross_") for name in RESULTS["grouped_matmul_dact"][-3:]}
"""Results that are the quantised form of the activated rows, and their names in `quantize`."""

_ACTIVATED_PARAMS = tuple(
    name.removeprefix("activated_") for name in schema("grouped_matmul_dact").params if name.startswith("activated_")
)

FUSED = ("grouped_matmul_act", "grouped_matmul_dact")
"""Calls that fuse a product and an activation."""

Given = ArraySpec | str | bool | None
"""What `new_call` is told about a slot: its spec; or its dtype, if the shape follows from the schema and from the axes
of other slots; or True, if the dtype follows from the schema too. False or None: the slot is absent."""


def new_call(
    name: str,
    operands: Mapping[str, Given],
    results: Given | Mapping[str, Given] = True,
    params: Mapping[str, Param] | None = None,
    implementation: str = "",
    lengths: Mapping[str, int] | None = None,
) -> Call:
    """The call `name`.

    Args:
        operands: what is given for each slot; a slot without an entry is absent.
        results: what is given for each slot, or one value for all results. A result without an entry is present unless
            it is optional.
        lengths: the lengths of the letters that occur in no operand given as a spec.
    """
    known = schema(name)
    given = dict(results) if isinstance(results, Mapping) else dict.fromkeys(known.outputs, results)
    params = params or {}
    for what, names, own in (
        ("operands", operands, known.inputs),
        ("results", given, known.outputs),
        ("parameters", params, known.params),
    ):
        if unknown := names.keys() - own.keys():
            raise KeyError(f"{name} has no {what} {sorted(unknown)}; it has {', '.join(own)}")
    letters = dict(lengths or {})
    for slot in known.inputs.values():
        if isinstance(spec := operands.get(slot.name), ArraySpec):
            letters |= {letter: length for letter, length in slot.lengths(spec.shape) if letter not in letters}
    outputs = {
        slot.name: _spec(slot, given.get(slot.name, not slot.optional), letters) for slot in known.outputs.values()
    }
    inputs = {
        slot.name: outputs[slot.like]
        if slot.like in outputs and operands.get(slot.name) is True
        else _spec(slot, operands.get(slot.name), letters)
        for slot in known.inputs.values()
    }
    shared = {slot: i for i, slot in enumerate(known.outputs)}
    aliases = tuple(
        (at, shared[slot.like])
        for at, slot in enumerate(known.inputs.values())
        if slot.like in shared and inputs[slot.name] is not None
    )
    ordered = tuple((param, params[param]) for param in known.params if param in params)
    return Call(name, tuple(inputs.values()), tuple(outputs.values()), ordered, aliases, _wishes(name, implementation))


def _spec(slot: Slot, given: Given, letters: Mapping[str, int]) -> ArraySpec | None:
    """The spec of a slot that is `given`."""
    if isinstance(given, ArraySpec) or given is None or given is False:
        return given or None
    return ArraySpec(slot.shape(letters), given if isinstance(given, str) else slot.dtype())


def _wishes(name: str, implementation: str) -> str:
    """The entries of `implementation` that concern the call `name`: its own kernels, and names of kinds of kernels.

    If every entry concerns other calls, the result is empty, and dispatch chooses the kernel. Only fused calls have
    kernels of the kind "composed".
    """
    if not implementation:
        return ""
    wishes = []
    for wish in implementation.split(","):
        owner = max((call for call in SLOTS if wish.startswith(f"{call}_")), key=len, default=None)
        if wish == "composed":
            owner = name if name in FUSED else "another"
        if owner in (None, name):
            wishes.append(wish)
    return ",".join(wishes)


def _operands(lhs: OperandSpec, rhs: OperandSpec) -> dict[str, Given]:
    """The slots of a product's two operands."""
    slots: dict[str, Given] = {}
    for name, operand in (("lhs", lhs), ("rhs", rhs)):
        quantized = isinstance(operand, QuantizedSpec)
        slots[name] = operand.values if quantized else operand
        slots[f"{name}_scales"] = operand.scales if quantized else None
        slots[f"{name}_group_scales"] = operand.group_scales if quantized else None
    return slots


class LowRank(NamedTuple):
    """Specs of a product of low rank that is added to another one in its fp32 sums: rows [M, r] times weights.

    Attributes:
        rows: [M, r]. weight: [G, r, N] with `axis` 1, [G, N, r] with 2; of the dtype of rows.
        axis: the contracted axis of the weight. table: whether the weight is given by a table of addresses.
    """

    rows: ArraySpec
    weight: ArraySpec
    axis: int
    table: bool = False


def _low_rank(low: LowRank | None) -> tuple[dict[str, Given], dict[str, Param]]:
    """Operands and parameters of a low-rank product, if it is given."""
    if low is None:
        return {}, {"low_rhs_axis": 1}
    return {"low_lhs": low.rows, "low_rhs": low.weight, "low_rhs_table": low.table}, {"low_rhs_axis": low.axis}


def _quantized_axis(rhs: OperandSpec, axis: int) -> int:
    """The contracted axis of rhs in memory: the last axis of quantised weights, if they were quantised along it."""
    if not isinstance(rhs, QuantizedSpec) or not axis:
        return axis
    return 2 if axis == rhs.axis else 1


def _scale_params(lhs: OperandSpec, rhs: OperandSpec, recipe: Recipe) -> dict[str, Param]:
    """Block sizes of the operands' scales, and how often partial sums of 8-bit products are added to an fp32 sum."""
    return {
        "lhs_block": lhs.format.block if isinstance(lhs, QuantizedSpec) else 0,
        "rhs_block": rhs.format.block if isinstance(rhs, QuantizedSpec) else 0,
        "rhs_block_outer": rhs.format.block_outer if isinstance(rhs, QuantizedSpec) else 1,
        "promote": "never" if recipe.accumulate == "fast" else "every_128",
    }


def _segment_params(lhs: OperandSpec, contract_rows: bool) -> dict[str, Param]:
    """How contracted rows are padded."""
    if not (contract_rows and isinstance(lhs, QuantizedSpec)):
        return {"segment": 0, "transposed": 0, "rows": 0}
    return {"segment": lhs.format.segment, "transposed": int(lhs.format.transposed), "rows": lhs.shape[0]}


@lru_cache(maxsize=4096)
def grouped_matmul(
    lhs: OperandSpec,
    rhs: OperandSpec,
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
    low: LowRank | None = None,
    rows_hint: int = 0,
    implementation: str = "",
) -> Call:
    """A grouped product. `axes` are the contracted axes of lhs and rhs.

    - (1, 1): [M, N] = [M, K] @ [G, K, N];  (1, 2): [M, N] = [M, K] @ [G, N, K]^T
    - (0, 0): [G, A, B] = [M, A]^T @ [M, B], the sum running over each group's rows

    The axes of quantised operands are logical ones; their layout in memory follows from their formats.

    `tables` says which of rhs, bias, into are given by a table of addresses instead of one packed array, and
    `aligned_tables` that those addresses are multiples of 16 bytes, which fast kernels need. `rhs_up`: the weight's
    second half along the contracted axis; rhs is then the first. `halves`, in the third form: which half of the columns
    of lhs and rhs is read, 1 or 2; 0 reads all. `result_half`, in the other forms: which half of a result (and bias) of
    2N columns is computed.
    """
    groups = group_sizes.shape[0]
    if axes[0] == 0:
        a, b = (rows.shape[1] // 2 if half else rows.shape[1] for rows, half in zip((lhs, rhs), halves, strict=True))
        shape: tuple[int, ...] = (groups, a, b)
    else:
        shape = (lhs.shape[0], rhs.shape[3 - axes[1]] * (2 if result_half else 1))
    operands = {
        **_operands(lhs, rhs),
        "group_sizes": group_sizes,
        "bias": bias,
        "row_scale": row_scale,
        "into": into,
        "rhs_table": tables[0],
        "bias_table": tables[1],
        "into_table": tables[2],
        "rhs_up": rhs_up,
    }
    added = _low_rank(low)
    params: dict[str, Param] = {
        "contract_rows": int(axes[0] == 0),
        "rhs_axis": _quantized_axis(rhs, axes[1]),
        "scale_bias": int(scale_bias),
        "accumulate": int(accumulate),
        "batch_invariant": int(recipe.batch_invariant),
        "aligned_tables": int(aligned_tables),
        "rows_hint": rows_hint,
        "lhs_half": halves[0],
        "rhs_half": halves[1],
        "result_half": result_half,
        "fp32_mode": recipe.fp32,
        **_scale_params(lhs, rhs, recipe),
        **added[1],
        **_segment_params(lhs, axes[0] == 0),
    }
    return new_call("grouped_matmul", operands | added[0], ArraySpec(shape, result_dtype), params, implementation)


@lru_cache(maxsize=1024)
def low_rank_grads(
    rows: ArraySpec,
    factor: ArraySpec,
    factor_axis: int,
    low_rows: ArraySpec,
    group_sizes: ArraySpec,
    dtypes: tuple[str, str],
    *,
    recipe: Recipe,
    table: bool = False,
    aligned_tables: bool = True,
    rows_hint: int = 0,
    implementation: str = "",
) -> Call:
    """Gradients of both operands of an adapter's second product, from one pass over its gradient `rows` [M, N].

    rows_grad [M, R] = rows @ factor[g]^T, and factor_grad = sum over each group's rows of outer(low_rows[r], rows[r]),
    shaped as the factor: [G, R, N] (`factor_axis` 2, the axis of N), or [G, N, R] (1). `dtypes`: those of both
    results. `table`: the factor is given by a table of addresses, multiples of 16 bytes with `aligned_tables`.
    """
    operands = {"rows": rows, "factor": factor, "low_rows": low_rows, "group_sizes": group_sizes, "factor_table": table}
    results: dict[str, Given] = {"rows_grad": dtypes[0], "factor_grad": ArraySpec(factor.shape, dtypes[1])}
    params: dict[str, Param] = {
        "factor_axis": factor_axis,
        "batch_invariant": int(recipe.batch_invariant),
        "aligned_tables": int(aligned_tables),
        "rows_hint": rows_hint,
        "fp32_mode": recipe.fp32,
    }
    return new_call("low_rank_grads", operands, results, params, implementation)


@lru_cache(maxsize=1024)
def group_sum(rows: ArraySpec, group_sizes: ArraySpec, result_dtype: str, row_scale: ArraySpec | None = None) -> Call:
    """[G, N] = sums of the (scaled) rows [M, N] of each group."""
    return new_call("group_sum", {"rows": rows, "group_sizes": group_sizes, "row_scale": row_scale}, result_dtype)


@lru_cache(maxsize=1024)
def row_dot(
    group_sizes: ArraySpec,
    rows: int,
    pair: tuple[ArraySpec, ArraySpec] | None,
    group_pair: tuple[ArraySpec, ArraySpec] | None,
    table: bool = False,
) -> Call:
    """[M] float32 = <lhs[r], rhs[r]> + <group_lhs[r], group_rhs[g(r)]>; `table`: group_rhs is a table of addresses."""
    lhs, rhs = pair or (None, None)
    group_lhs, group_rhs = group_pair or (None, None)
    operands = {
        "group_sizes": group_sizes,
        "lhs": lhs,
        "rhs": rhs,
        "group_lhs": group_lhs,
        "group_rhs": group_rhs,
        "group_rhs_table": table,
    }
    return new_call("row_dot", operands, lengths={"M": rows})


@lru_cache(maxsize=1024)
def scale_rows(
    rows: ArraySpec, row_scale: ArraySpec, group_sizes: ArraySpec, result_dtype: str, into: ArraySpec | None = None
) -> Call:
    """[M, N] = row_scale[r] * rows[r]."""
    operands = {"rows": rows, "row_scale": row_scale, "group_sizes": group_sizes, "into": into}
    return new_call("scale_rows", operands, result_dtype)


@lru_cache(maxsize=1024)
def add_rows(
    rows: ArraySpec,
    group_sizes: ArraySpec,
    result_dtype: str,
    *,
    base: ArraySpec | None = None,
    into: ArraySpec | None = None,
    factor: float = 1.0,
    rate: float = 0.0,
    stream: int = 0,
) -> Call:
    """[M, N] = base[r] + factor * rows[r], without the terms that are dropped at random with probability `rate`.

    `stream`: number of the mask among those of one key.
    """
    operands = {"rows": rows, "group_sizes": group_sizes, "base": base, "key": bool(rate), "into": into}
    params: dict[str, Param] = {"factor": float(factor), "rate": float(rate), "stream": stream}
    return new_call("add_rows", operands, result_dtype, params)


def _activation_params(activation: Activation, width: int) -> dict[str, Param]:
    """Parameters for `width` activated columns; an interleave of `width` columns means contiguous halves."""
    params: dict[str, Param] = dict(activation.params())
    if params["interleave"] == width:
        params["interleave"] = 0
    return params


def _product_params(
    lhs: OperandSpec, rhs: OperandSpec, recipe: Recipe, aligned_tables: bool, rows_hint: int
) -> dict[str, Param]:
    return {
        "batch_invariant": int(recipe.batch_invariant),
        "aligned_tables": int(aligned_tables),
        "rows_hint": rows_hint,
        "fp32_mode": recipe.fp32,
        **_scale_params(lhs, rhs, recipe),
    }


class QuantizedResult(NamedTuple):
    """How a call quantises one of its results.

    Attributes:
        format: the format of both forms; `rotate` and `segment` affect only the form contracted along rows.
        forms: whether to make the rowwise form, contracted along the last axis, and the columnwise one, along the axis
            before it.
        scale: whether quantisation scales [G] are given (delayed scaling).
        amax: whether the amax [G] is a result; with `merge` it is merged into a buffer.
        key: whether a key of stochastic rounding is given. stream: the number of the stream of random numbers.
    """

    format: Format
    forms: tuple[bool, bool]
    scale: bool = False
    amax: bool = False
    merge: bool = False
    key: bool = False
    stream: int = 0

    def operands(self) -> dict[str, Given]:
        """Returns the operand slots that quantising the result adds to the call, and which of them are given."""
        return {"scale": self.scale, "key": self.key, "into_amax": self.merge}

    def results(self, source: ArraySpec, groups: int) -> dict[str, Given]:
        """Returns the result slots, with their specs, that quantising the result `source` adds to the call."""
        last = len(source.shape) - 1
        found: dict[str, Given] = {"amax": self.amax}
        for prefix, wanted, axis in (("", self.forms[0], last), ("cross_", self.forms[1], last - 1)):
            if wanted:
                spec = spec_in_format(self.format, source.shape, axis, source.dtype, groups)
                found |= {
                    f"{prefix}values": spec.values,
                    f"{prefix}scales": spec.scales,
                    f"{prefix}group_scales": spec.group_scales,
                }
        return found

    def params(self) -> dict[str, Param]:
        """Returns the parameters that quantising the result adds to the call."""
        return {**self.format.params(), "stream": self.stream}


def _quantized_activated(quantized: QuantizedResult | None, rows: ArraySpec, groups: int) -> tuple[dict[str, Any], ...]:
    """Returns what `_quantized_result` does, for the activated rows as a second quantised result of a call."""
    if quantized is None:
        return {}, {}, {}
    made, params = quantized.results(rows, groups), quantized.params()
    return (
        {"activated_scale": quantized.scale},
        {name: made.get(own) for name, own in ACTIVATED.items()},
        {f"activated_{name}": params[name] for name in _ACTIVATED_PARAMS},
    )


def _quantized_result(quantized: QuantizedResult | None, source: ArraySpec, groups: int) -> tuple[dict[str, Any], ...]:
    """Returns the operands, results and parameters that `quantized` adds to a call, if it is given."""
    if quantized is None:
        return {}, {}, {}
    return quantized.operands(), quantized.results(source, groups), quantized.params()


@lru_cache(maxsize=1024)
def grouped_matmul_act(
    lhs: OperandSpec,
    rhs: OperandSpec,
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
    low: LowRank | None = None,
    quantized: QuantizedResult | None = None,
    zero_tail: bool = True,
    rows_hint: int = 0,
    implementation: str = "",
) -> Call:
    """result [M, F] = row_scale[r] * act(hidden[r]), hidden [M, W] = lhs [M, K] @ rhs + bias, rounded to lhs's dtype
    (the nominal one of a quantised lhs).

    With `quantized` the result, rounded to that dtype too, is returned only in quantised forms.

    rhs is [G, K, W] (`rhs_axis` 1) or [G, W, K] (2), W = 2F for gated kinds; with `rhs_up` each has F columns. `tables`
    as in `grouped_matmul`, for rhs and bias; `hidden` says whether the hidden rows are a second result; `low` is added
    to their sums.
    """
    wide = rhs.shape[3 - rhs_axis] * (2 if rhs_up is not None else 1)
    operands = {
        **_operands(lhs, rhs),
        "group_sizes": group_sizes,
        "bias": bias,
        "row_scale": row_scale,
        "rhs_table": tables[0],
        "bias_table": tables[1],
        "rhs_up": rhs_up,
    }
    width = wide // 2 if activation.gated else wide
    rows = (lhs.shape[0], width)
    added = _quantized_result(quantized, ArraySpec(rows, lhs.dtype), group_sizes.shape[0])
    results = {
        "result": result_dtype if quantized is None else None,
        "hidden": lhs.dtype if hidden else None,
        **added[1],
    }
    axis = _quantized_axis(rhs, rhs_axis)
    params = {"rhs_axis": axis, **_activation_params(activation, width), "zero_tail": int(zero_tail)}
    of_low = _low_rank(low)
    params |= _product_params(lhs, rhs, recipe, aligned_tables, rows_hint) | of_low[1]
    params |= {"compute": lhs.dtype, **added[2]}
    operands |= of_low[0] | added[0]
    return new_call("grouped_matmul_act", operands, results, params, implementation, {"W": wide, "F": width})


def _hidden_grads(dtype: str, wanted: tuple[bool, bool, bool]) -> dict[str, Given]:
    """Returns the gradients at the hidden rows that `wanted` asks for, in `dtype`; row sums are float32."""
    return dict(zip(RESULTS["activation_grad"], (wanted[0] and dtype, wanted[1] and dtype, wanted[2]), strict=True))


@lru_cache(maxsize=1024)
def grouped_matmul_dact(
    lhs: OperandSpec,
    rhs: OperandSpec,
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
    low: LowRank | None = None,
    quantized: QuantizedResult | None = None,
    quantized_activated: QuantizedResult | None = None,
    zero_tail: bool = True,
    rows_hint: int = 0,
    implementation: str = "",
) -> Call:
    """Gradients at the hidden rows, with dz [M, F] = lhs [M, N] @ rhs, where lhs is dy; `low` is added to dz.

    `quantized`: quantised forms of `result`, whether or not `wanted` asks for the unquantised one too.
    `quantized_activated`, only with `quantized`: the form of `activated`, rounded to the dtype of hidden, contracted
    along rows; it has no amax and no key.

    `wanted`, in this order: result [M, W] = row_scale[r] dz[r] act'(hidden[r]); activated [M, F] = row_scale[r]
    act(hidden[r]); row_sum [M] float32 = row_base[r] + <dz[r], act(hidden[r])>.
    """
    operands = {
        **_operands(lhs, rhs),
        "group_sizes": group_sizes,
        "hidden": hidden,
        "row_scale": row_scale,
        "row_base": row_base,
        "rhs_table": table,
    }
    width = rhs.shape[3 - rhs_axis]
    axis = _quantized_axis(rhs, rhs_axis)
    params = {"rhs_axis": axis, **_activation_params(activation, width), "zero_tail": int(zero_tail)}
    of_low = _low_rank(low)
    params |= _product_params(lhs, rhs, recipe, aligned_tables, rows_hint) | of_low[1]
    operands |= of_low[0]
    results = _hidden_grads(result_dtype, wanted)
    groups, rows = group_sizes.shape[0], ArraySpec((hidden.shape[0], width), hidden.dtype)
    for added in (
        _quantized_result(quantized, hidden, groups),
        _quantized_activated(quantized_activated, rows, groups),
    ):
        operands, results, params = operands | added[0], results | added[1], params | added[2]
    return new_call("grouped_matmul_dact", operands, results, params, implementation, {"F": width})


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
    return new_call("activation", operands, result_dtype, params, lengths={"F": width})


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
    return new_call("activation_grad", operands, _hidden_grads(result_dtype, wanted), params)


def spec_in_format(format: Format, shape: tuple[int, ...], axis: int, dtype: str, groups: int = 1) -> QuantizedSpec:
    """Spec of an array of `shape` quantised in `format` for a product that contracts `axis`.

    Args:
        shape: rows [M, X], or weights [G, A, B]. axis: an axis of that shape. dtype: the nominal element type.
        groups: number of groups of rows; weights have theirs in the first axis.
    """
    weights = len(shape) == 3
    groups = shape[0] if weights else groups
    depth, outer = shape[axis], shape[-1 if axis == len(shape) - 2 else -2]
    block = format.block or 1
    if weights:
        codes = (groups, outer, _codes(format, depth))
        scales = (groups, -(-outer // format.block_outer), -(-depth // block))
    elif axis == 1:
        codes = (outer, _codes(format, depth))
        scales = (outer, -(-depth // block))
        scales = scales[::-1] if format.scales == "float32" else scales
    else:
        padded = padded_rows(depth, groups, format.segment)
        codes = (outer, padded) if format.transposed else (padded, _codes(format, outer))
        scales = (padded // block, outer)
    return QuantizedSpec(
        ArraySpec(codes, format.values),
        ArraySpec(scales, format.scales) if format.scales else None,
        ArraySpec((groups,), "float32") if format.per_group else None,
        format,
        axis,
        tuple(shape),
        dtype,
    )


def _codes(format: Format, count: int) -> int:
    """Quantized elements that hold `count` codes along the last axis."""
    return -(-count // 2) if format.values == "uint8" else count


def _block_params(format: Format) -> dict[str, Param]:
    params = format.params()
    return {name: params[name] for name in ("block", "block_outer", "segment", "transposed")}


@lru_cache(maxsize=1024)
def quantize(
    source: ArraySpec,
    format: Format,
    forms: tuple[bool, bool],
    group_sizes: ArraySpec | None,
    *,
    table: bool = False,
    scale: bool = False,
    amax: bool = False,
    merge: bool = False,
    key: bool = False,
    skip: bool = False,
    reuse: bool = False,
    stream: int = 0,
    gather: tuple[int, int] | None = None,
) -> Call:
    """Codes and scales of rows [M, X], or, without group sizes, of weights [G, A, B].

    Args:
        format, forms, scale, amax, merge, key, stream: as in `QuantizedResult`.
        table: weights are given by a table of addresses. skip: a flag that skips the call is given.
        reuse: results are written into the caller's buffers.
        gather: (number of rows, k). Row r is then row places[r] // k of `source` [T, X], or zeros if there is no such
            row.
    """
    rows, slots = gather or (source.shape[0], 1)
    groups = group_sizes.shape[0] if group_sizes is not None else source.shape[0]
    quantized = QuantizedResult(format, forms, scale, amax, merge, key, stream)
    results = quantized.results(source._replace(shape=(rows, *source.shape[1:])), groups)
    operands = {
        "source": source,
        "group_sizes": group_sizes,
        "source_table": table,
        **quantized.operands(),
        "skip": skip,
        "places": None if gather is None else ArraySpec((rows,), "int32"),
    }
    if reuse:
        operands |= {f"into_{name}": results.get(name) for name in QUANTIZED}
    params = quantized.params() | {"slots": slots}
    return new_call("quantize", operands, results, params, lengths={"G": groups})


class QuantizedParts(NamedTuple):
    """The calls that a fused call with quantised results combines; None where it does not quantise activated rows."""

    plain: Call
    quantize: Call  # of `result`
    activated: Call | None  # of `activated`


def quantized_parts(call: Call) -> QuantizedParts | None:
    """The plain call and each `quantize` that a fused call with quantised results combines; None for other calls."""
    results = dict(zip(RESULTS[call.name], call.outputs, strict=True))
    if call.name not in FUSED or (results["values"] is None and results["cross_values"] is None):
        return None
    operands, params = dict(zip(SLOTS[call.name], call.inputs, strict=True)), dict(call.params)
    added = {name: params.pop(name) for name in _QUANTIZING_PARAMS}
    source = operands.get("hidden") or _activated_spec(operands, params)
    own = {name: results.pop(name) for name in (*QUANTIZED, "amax")}
    reads = {name: operands.pop(name) for name in _QUANTIZING}
    sizes = {"group_sizes": operands["group_sizes"]}
    results["result"], activated = source, None
    specs = {own: results.pop(name, None) for name, own in ACTIVATED.items()}
    scale = {"scale": operands.pop("activated_scale", None)}
    how = {name: params.pop(f"activated_{name}") for name in _ACTIVATED_PARAMS if f"activated_{name}" in params}
    if specs["cross_values"] is not None:
        assert source is not None, "hidden rows are given"
        width = source.shape[1] // (2 if KINDS[str(params["kind"])].gated else 1)
        results["activated"] = ArraySpec((source.shape[0], width), source.dtype)
        activated = new_call("quantize", {"source": results["activated"], **sizes, **scale}, specs, how)
    plain = new_call(call.name, operands, results, params)
    return QuantizedParts(plain, new_call("quantize", {"source": source, **sizes, **reads}, own, added), activated)


def _activated_spec(operands: dict[str, ArraySpec | None], params: dict[str, Param]) -> ArraySpec:
    """Spec of the activated rows of a `grouped_matmul_act`."""
    lhs, rhs = operands["lhs"], operands["rhs"]
    assert lhs is not None, "lhs is always given"
    assert rhs is not None, "rhs is always given"
    width = rhs.shape[3 - int(params["rhs_axis"])]
    halves = KINDS[str(params["kind"])].gated and operands["rhs_up"] is None
    return ArraySpec((lhs.shape[0], width // 2 if halves else width), str(params["compute"]))


@lru_cache(maxsize=1024)
def dequantize(q: QuantizedSpec, group_sizes: ArraySpec | None, result_dtype: str) -> Call:
    """The values of a quantised array, in its logical shape; rows need group sizes."""
    operands = {
        "values": q.values,
        "group_sizes": group_sizes,
        "scales": q.scales,
        "group_scales": q.group_scales,
    }
    params: dict[str, Param] = {"cross": int(q.axis == len(q.shape) - 2), **_block_params(q.format)}
    return new_call("dequantize", operands, ArraySpec(q.shape, result_dtype), params)


@lru_cache(maxsize=64)
def scale_update(scale: ArraySpec, history: ArraySpec, algorithm: str, *, reuse: bool = False) -> Call:
    """Scales [R, G] and amax history [R, L, G] of R operand roles after one step of delayed scaling."""
    operands: dict[str, Given] = {"scale": scale, "history": history, "top": True}
    operands |= {"into_new_scale": reuse, "into_new_history": reuse}
    return new_call("scale_update", operands, params={"algorithm": algorithm})


def shard_slots(shape: tuple[int, ...], format: Format) -> int:
    """S: the number of amaxes that ranks exchange for one group [A, B] of weights [G, A, B]."""
    _, a, b = shape
    if not format.block:
        return 1
    along_b = -(-a // format.block_outer) * -(-b // format.block)
    return 1 + along_b + (0 if format.square else b * -(-a // format.block))


@lru_cache(maxsize=256)
def shard_amax(source: ArraySpec, format: Format) -> Call:
    """int32 [G, S]: the bits of the amaxes over this rank's elements of weights [G, A, B], updated in place."""
    operands: dict[str, Given] = {"source": source, "source_table": True, "into_amax": True}
    params: dict[str, Param] = {"block": format.block, "block_outer": format.block_outer}
    return new_call("shard_amax", operands, True, params, lengths={"L": shard_slots(source.shape, format)})


@lru_cache(maxsize=256)
def shard_cast(
    source: ArraySpec, format: Format, forms: tuple[bool, bool], *, scale: bool = False, skip: bool = False
) -> Call:
    """The codes of this rank's elements, and all scales, from the amaxes of all ranks, written in place.

    Args:
        forms, scale, skip: as in `quantize`.
    """
    whole = quantize(source, format, forms, None)
    results = {name: spec for name, spec in zip(RESULTS["quantize"], whole.outputs, strict=True) if name in QUANTIZED}
    operands = {
        "source": source,
        "source_table": True,
        "amax": True,
        "scale": scale,
        "skip": skip,
        **{f"into_{name}": spec for name, spec in results.items()},
    }
    params = {name: value for name, value in whole.params if name in schema("shard_cast").params}
    lengths = {"L": shard_slots(source.shape, format)}
    return new_call("shard_cast", operands, results, params, lengths=lengths)


def spec_of(array: Any) -> ArraySpec:
    """Spec of anything with `shape` and a NumPy-like `dtype` (JAX, NumPy, CuPy).

    A dtype in foreign byte order keeps its mark (">f4"), so that no check mistakes it for the native one.
    """
    dtype = array.dtype
    name = getattr(dtype, "name", dtype) if getattr(dtype, "isnative", True) else dtype.str
    return ArraySpec(tuple(int(d) for d in array.shape), str(name))
