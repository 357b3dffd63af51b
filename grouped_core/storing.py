"""How an operand gets into the formats that a recipe asks for: a cast, or one pass that quantises both of its forms.

Letters: G groups, M rows, X the features of a row, A and B axes of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from grouped_core import calls
from grouped_core.calls import ArraySpec
from grouped_core.formats import Format, QTensor
from grouped_core.products import Array, Listed, Operand, Runner, arranged, operand_spec


class Delayed(NamedTuple):
    """One operand's part of the state of delayed scaling, float32 [G] each (numerics 2.5)."""

    encode: Array  # multipliers to use
    amax: Array  # largest magnitudes so far in this step; merged in place where the runner can


class Extras(NamedTuple):
    """Arrays that a recipe needs beside the operands; None where it does not."""

    key: Array | None = None  # uint32 [2], of stochastic rounding
    x: Delayed | None = None
    w: Delayed | None = None
    dy: Delayed | None = None


class Stored(NamedTuple):
    """An operand in the formats asked for, in that order, and the merged amax of delayed scaling."""

    forms: list[Operand]
    amax: Array | None


def store(
    run: Runner,
    operand: Operand,
    wanted: Sequence[tuple[int, Format]],
    group_sizes: Array | None,
    *,
    delayed: Delayed | None = None,
    key: Array | None = None,
    stream: int = 0,
) -> Stored:
    """`operand` once for each (contracted axis, format) of `wanted`; forms of one format come from one pass.

    Args:
        operand: rows [M, X] with group_sizes, or weights [G, A, B] without; one that is quantised already has to be
            what is wanted, or is dequantised where a plain format is.
        stream: number of this operand among those that a key rounds.

    Raises:
        ValueError: a quantised operand in another format or form.
    """
    if isinstance(operand, QTensor):
        return Stored([_given(run, operand, axis, cell, group_sizes) for axis, cell in wanted], None)
    forms: list[Operand | None] = [None] * len(wanted)
    passes: dict[Format, dict[int, int]] = {}  # format -> {axis: place in `wanted`}
    for place, (axis, cell) in enumerate(wanted):
        if cell.plain:
            forms[place] = operand if isinstance(operand, Listed) else run.cast(operand, cell.values)
        else:
            passes.setdefault(cell.replace(rotate=False), {})[axis] = place
    amax = None if delayed is None else delayed.amax
    for cell, places in passes.items():
        made, amax = _quantize(run, operand, cell, places, wanted, group_sizes, delayed, amax, key, 2 * stream)
        for place, form in made.items():
            forms[place] = form
    return Stored([form for form in forms if form is not None], amax)


def _quantize(
    run: Runner,
    source: Array | Listed,
    cell: Format,
    places: dict[int, int],
    wanted: Sequence[tuple[int, Format]],
    group_sizes: Array | None,
    delayed: Delayed | None,
    amax: Array | None,
    key: Array | None,
    stream: int,
) -> tuple[dict[int, QTensor[Any]], Array | None]:
    spec: ArraySpec = operand_spec(run, source)
    last = len(spec.shape) - 1
    rotate = any(wanted[place][1].rotate for place in places.values())
    given = delayed if cell.delayed else None
    key = key if cell.stochastic else None
    call = calls.quantize(
        spec,
        cell.replace(rotate=rotate),
        (last in places, last - 1 in places),
        None if group_sizes is None else run.spec(group_sizes),
        table=isinstance(source, Listed),
        encode=given is not None,
        amax=given is not None,
        key=key is not None,
        stream=stream,
    )
    named = {
        "source": source,
        "group_sizes": group_sizes,
        "encode": None if given is None else given.encode,
        "into_amax": None if given is None else amax,
        "key": key,
    }
    results = dict(zip(calls.RESULTS[call.name], run(call, arranged(call, **named)), strict=True))
    made = {}
    for axis, place in places.items():
        prefix = "" if axis == last else "cross_"
        values, scales, group_scales = (results[prefix + name] for name in calls.QUANTIZED[:3])
        made[place] = QTensor(values, scales, group_scales, wanted[place][1], axis, spec.shape, spec.dtype)
    return made, amax if given is None else results["amax"]


def dequantize(run: Runner, q: QTensor[Any], group_sizes: Array | None, dtype: str) -> Array:
    """The values of `q` in its logical shape; rows need group sizes."""
    sizes = None if group_sizes is None else run.spec(group_sizes)
    call = calls.dequantize(operand_spec(run, q), sizes, dtype)
    named = {"values": q.values, "scales": q.scales, "group_scales": q.group_scales, "group_sizes": group_sizes}
    return run(call, call.arrange(**named))[0]


def _given(run: Runner, q: QTensor[Any], axis: int, cell: Format, group_sizes: Array | None) -> Operand:
    if cell.plain:
        return dequantize(run, q, group_sizes, cell.values)
    if (q.axis, q.format) != (axis, cell):
        raise ValueError(
            f"a quantised operand: {q.format.name} along axis {q.axis}, expected {cell.name} along axis {axis} as the "
            "recipe stores it; quantise it so, hand in that form too, or hand in the plain array."
        )
    return q
