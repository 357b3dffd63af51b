"""Converts operands to the formats of a recipe: by a cast, or by one pass that makes rowwise and columnwise forms.

Letters: G groups, M rows, X the features of a row, A and B axes of a weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from grouped_core import calls, routing
from grouped_core.calls import ArraySpec, OperandSpec
from grouped_core.formats import WIDE, Format, QTensor
from grouped_core.linear_spec import Names, check_quantized, check_sizes
from grouped_core.products import Array, Cached, Gathered, Listed, Operand, Runner, arranged, operand_spec, rounded
from grouped_core.ranks import check_either, check_rank


class Extras(NamedTuple):
    """Arrays that a recipe needs besides the operands; None where it does not need them.

    Attributes:
        key: uint32 [2], the key of stochastic rounding.
        x, w, dy: float32 [G] each, the quantisation scales of delayed scaling.
        measure: whether to find the amax of operands with delayed scaling.
        x_amax, w_amax, dy_amax: float32 [G] each; the amaxes are merged into them, in place where the runner works in
            place. None: the amaxes are returned only.
    """

    key: Array | None = None
    x: Array | None = None
    w: Array | None = None
    dy: Array | None = None
    measure: bool = True
    x_amax: Array | None = None
    w_amax: Array | None = None
    dy_amax: Array | None = None


NO_EXTRAS = Extras()
NO_MEASURES = Extras(measure=False)


class Quantized(NamedTuple):
    """An operand in the requested formats, in their order; and its amax [G] if it has delayed scaling, else None."""

    forms: list[Operand]
    amax: Array | None


def in_formats(
    run: Runner,
    operand: Operand,
    wanted: Sequence[tuple[int, Format]],
    group_sizes: Array | None,
    *,
    scale: Array | None = None,
    amax: Array | None = None,
    measure: bool = True,
    key: Array | None = None,
    stream: int = 0,
    requantize: str | None = None,
    into: Sequence[QTensor[Any]] | None = None,
    skip: Array | None = None,
) -> Quantized:
    """Converts `operand` to each (contracted axis, format) of `wanted`; one pass makes all forms of one format.

    Args:
        operand: rows [M, X] with group_sizes, or weights [G, A, B] without. `Gathered` rows are gathered by the pass
            that quantises them, or before it if a format does not allow that. A quantised operand needs every form in
            `wanted`, unless `requantize` allows quantising its dequantised values again. A `Cached` operand supplies
            the forms that it has; the others are made from its source.
        scale: [G], quantisation scales of delayed scaling. amax: [G], merged into the amax that is returned.
        measure: whether to find the amax.
        stream: the number of this operand among those that share one key of stochastic rounding.
        into: buffers that the forms are written to in place; every form is then quantised.
        skip: int32 [1]; a value other than 0 leaves the buffers unchanged.

    Raises:
        ValueError: the operand is quantised in another format or along another axis.
    """
    if isinstance(operand, Cached):
        ready = [given_form(operand.forms, *each) for each in wanted]
        missing = [each for each, form in zip(wanted, ready, strict=True) if form is None]
        options: dict[str, Any] = {"scale": scale, "amax": amax, "measure": measure, "key": key, "stream": stream}
        rest = in_formats(run, operand.source, missing, group_sizes, **options)
        made = iter(rest.forms)
        return Quantized([next(made) if form is None else form for form in ready], rest.amax)
    if isinstance(operand, QTensor):
        if (ready := given_forms(operand, wanted)) is not None:
            return Quantized(ready, None)
        operand = _values(run, operand, wanted, group_sizes, requantize)
    if isinstance(operand, Gathered) and not _gathers(run, operand, wanted):
        slots = run.spec(operand.inverse).shape[1]
        operand = routing.gather(run, operand.tokens, operand.source, slots, inverse=operand.inverse)
    forms: list[Operand | None] = [None] * len(wanted)
    passes: dict[Format, dict[int, int]] = {}  # format -> {axis: place in `wanted`}
    for place, (axis, fmt) in enumerate(wanted):
        if fmt.plain:
            forms[place] = rounded(run, operand, fmt.values)
        else:
            passes.setdefault(fmt.replace(rotate=False), {})[axis] = place
    for fmt, places in passes.items():
        buffers = {} if into is None else {axis: into[place] for axis, place in places.items()}
        randoms = (key if fmt.stochastic else None, 2 * stream)
        delayed = _Delayed(scale, amax, measure)
        made, amax = _quantize(run, operand, fmt, places, wanted, group_sizes, delayed, randoms, buffers, skip)
        for place, form in made.items():
            forms[place] = form
    return Quantized([form for form in forms if form is not None], amax)


def _gathers(run: Runner, rows: Gathered, wanted: Sequence[tuple[int, Format]]) -> bool:
    return run.spec(rows.tokens).dtype != "float32" and all(fmt.gathers for _, fmt in wanted)


class _Delayed(NamedTuple):
    """Delayed scaling in one pass: scales [G], the array that the amax is merged with, and whether to find the amax."""

    scale: Array | None
    amax: Array | None
    measure: bool


def _quantize(
    run: Runner,
    source: Array | Listed | Gathered,
    fmt: Format,
    places: dict[int, int],
    wanted: Sequence[tuple[int, Format]],
    group_sizes: Array | None,
    delayed: _Delayed,
    randoms: tuple[Array | None, int],
    buffers: dict[int, QTensor[Any]],
    skip: Array | None,
) -> tuple[dict[int, QTensor[Any]], Array | None]:
    spec: ArraySpec = operand_spec(run, source)
    last = len(spec.shape) - 1
    rotate = any(wanted[place][1].rotate for place in places.values())
    scale, merged, measure = delayed if fmt.delayed else _Delayed(None, None, measure=False)
    merged = merged if measure else None
    key, stream = randoms
    gathered = source if isinstance(source, Gathered) else None
    call = calls.quantize(
        spec if gathered is None else run.spec(gathered.tokens),
        fmt.replace(rotate=rotate),
        (last in places, last - 1 in places),
        None if group_sizes is None else run.spec(group_sizes),
        table=isinstance(source, Listed),
        scale=scale is not None,
        amax=measure,
        merge=merged is not None,
        key=key is not None,
        skip=skip is not None,
        reuse=bool(buffers),
        stream=stream,
        gather=None if gathered is None else (spec.shape[0], run.spec(gathered.inverse).shape[1]),
    )
    named = {
        "source": source if gathered is None else gathered.tokens,
        "places": None if gathered is None else gathered.source,
        "group_sizes": group_sizes,
        "scale": scale,
        "into_amax": merged,
        "key": key,
        "skip": skip,
    }
    for axis, buffer in buffers.items():
        prefix = "into_" if axis == last else "into_cross_"
        named |= dict(zip((prefix + name for name in calls.QUANTIZED[:3]), buffer.slots, strict=True))
    results = dict(zip(calls.RESULTS[call.name], run(call, arranged(call, **named)), strict=True))
    made = {place: _form(results, spec, axis, wanted[place][1]) for axis, place in places.items()}
    return made, results["amax"] if measure else delayed.amax


def _form(results: dict[str, Any], spec: ArraySpec, axis: int, fmt: Format) -> QTensor[Any]:
    """Returns the form contracted along `axis`, from the results of a call that quantises."""
    prefix = "" if axis == len(spec.shape) - 1 else "cross_"
    values, scales, group_scales = (results[prefix + name] for name in calls.QUANTIZED[:3])
    return QTensor(values, scales, group_scales, fmt, axis, spec.shape, spec.dtype)


class Within(NamedTuple):
    """How a fused call quantises one of its results, rows [M, X], in one pass.

    Attributes:
        call: what the plan of the call has to know. wanted: (contracted axis, format) of each form. arrays: the
            operands of quantising by slot.
    """

    call: calls.QuantizedResult
    wanted: tuple[tuple[int, Format], ...]
    arrays: dict[str, Array | None]

    def forms(self, call: calls.Call, results: Sequence[Any], spec: ArraySpec) -> Quantized:
        """The forms in `wanted`, from the results of `call`; `spec` is the spec of the rows."""
        by_name = dict(zip(calls.RESULTS[call.name], results, strict=True))
        return Quantized([_form(by_name, spec, axis, fmt) for axis, fmt in self.wanted], by_name["amax"])

    def activated_form(self, call: calls.Call, results: Sequence[Any], spec: ArraySpec) -> QTensor[Any]:
        """Returns the activated rows in the only form of `wanted`; `call` has made it besides its result.

        `spec` is the spec of the activated rows.
        """
        by_name = dict(zip(calls.RESULTS[call.name], results, strict=True))
        ((axis, fmt),) = self.wanted
        return _form({own: by_name[name] for name, own in calls.ACTIVATED.items()}, spec, axis, fmt)


def within(
    wanted: Sequence[tuple[int, Format]],
    *,
    scale: Array | None = None,
    amax: Array | None = None,
    measure: bool = True,
    key: Array | None = None,
    stream: int = 0,
) -> Within | None:
    """Returns how a fused call quantises its result as `in_formats` does for the same arguments; None where
    `in_formats` needs more than one pass, or a cast.
    """
    bases = {fmt.replace(rotate=False) for _, fmt in wanted}
    if len(bases) != 1 or (fmt := bases.pop()).plain:
        return None
    scale, amax = (scale, amax if measure else None) if fmt.delayed else (None, None)
    key = key if fmt.stochastic else None
    axes = {axis for axis, _ in wanted}
    call = calls.QuantizedResult(
        fmt.replace(rotate=any(each.rotate for _, each in wanted)),
        (1 in axes, 0 in axes),
        scale is not None,
        fmt.delayed and measure,
        amax is not None,
        key is not None,
        2 * stream,
    )
    return Within(call, tuple(wanted), {"scale": scale, "into_amax": amax, "key": key})


def quantize(
    run: Runner,
    source: Array | Listed,
    format: Format,
    axes: Sequence[int],
    group_sizes: Array | None,
    *,
    key: Array | None = None,
) -> QTensor[Any]:
    """Quantises `source` in one pass for products that contract `axes`, one or both of its last two axes.

    Args:
        source: rows [M, X] with group_sizes, or weights [G, A, B] without.
        key: uint32 [2], the key of stochastic rounding.
    """
    wanted = forms_along(format, axes, len(operand_spec(run, source).shape))
    made: list[Any] = in_formats(run, source, wanted, group_sizes, key=key).forms
    return joined([dataclasses.replace(each, group_sizes=group_sizes) for each in made])


def forms_along(format: Format, axes: Sequence[int], rank: int) -> tuple[tuple[int, Format], ...]:
    """Returns (contracted axis, format) of each form for `quantize`; only the one contracted along rows is rotated."""
    return tuple([(axis, format.along(rows=axis == rank - 2)) for axis in axes])


def joined(forms: Sequence[Any]) -> QTensor[Any]:
    """Returns forms of one array as one quantised array."""
    first, *others = forms
    return dataclasses.replace(first, other=joined(others) if others else None)


def check_quantize(
    source: ArraySpec,
    format: Format,
    axis: int | Sequence[int],
    sizes: ArraySpec | None,
    key: ArraySpec | None = None,
) -> tuple[int, ...]:
    """The contracted axes, counted from 0; refuses arguments that `quantize` does not accept.

    Raises:
        TypeError: dtypes, axes that are not integers. ValueError: shapes, axes, a format that does not fit the array.
    """
    given: tuple[Any, ...] = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    if not all(hasattr(each, "__index__") for each in given):
        raise TypeError(f"`axis`: {axis!r}, expected an integer or several; pass the axes that products contract.")
    return _axes(source, format, tuple(map(int, given)), sizes, key)


@lru_cache(maxsize=1024)
def _axes(
    source: ArraySpec, format: Format, given: tuple[int, ...], sizes: ArraySpec | None, key: ArraySpec | None
) -> tuple[int, ...]:
    rank, weights = len(source.shape), len(source.shape) == 3
    if source.dtype not in WIDE:
        raise TypeError(f"`x`: dtype {source.dtype}, expected one of {', '.join(WIDE)}; cast it first.")
    check_either("quantize", ("rows", "weights"), "x", source.shape)
    if 0 in source.shape[0 if weights else 1 :]:
        raise ValueError(
            f"`x`: shape {source.shape}, expected every axis at least 1; only M, the number of rows, may be 0."
        )
    axes = tuple(each + rank if each < 0 else each for each in given)
    if not axes or len(set(axes)) < len(axes) or not set(axes) <= {rank - 2, rank - 1}:
        raise ValueError(
            f"`axis`: {given}, expected {rank - 1}, {rank - 2} or both, the axes that products contract; pass one of "
            "them, or a tuple of both."
        )
    check_sizes_absent(source.shape, sizes)
    if sizes is not None:
        check_sizes(Names("x", "w"), sizes)
        if not sizes.shape[0]:
            raise ValueError("`group_sizes`: shape (0,), expected at least one group; pass one size per group.")
    _check_groups("x" if weights else "group_sizes", source if weights else sizes)
    if key is not None:
        check_rank("quantize", "key", "key", key.shape)
    if key is not None and (key.dtype, key.shape) != ("uint32", (2,)):
        raise ValueError(f"`key`: {key}, expected uint32[2], low word first; pass such an array.")
    if format.plain or format.delayed:
        raise ValueError(
            f"`format`: {format.name}{' with delayed scaling' if format.delayed else ''}, expected one that finds its "
            "scales in the array; choose one, e.g. 'mxfp8'."
        )
    if not weights and format.for_weights:
        raise ValueError(
            f"`format`: {format.name} for rows [M, X], expected one that is not only for weights; choose e.g. 'mxfp8'."
        )
    if weights and (format.rotate or format.stochastic):
        raise ValueError(
            f"`format`: {format.name} with rotation or random rounding for weights, expected neither; leave both out."
        )
    return axes


def check_sizes_absent(shape: tuple[int, ...], sizes: Any) -> None:
    """Refuses group sizes beside weights, whose groups are their first axis.

    Raises:
        ValueError: they are given.
    """
    if len(shape) == 3 and sizes is not None:
        raise ValueError(f"`group_sizes`: {tuple(sizes.shape)} beside weights {shape}, expected None; leave it out.")


def _check_groups(name: str, array: OperandSpec | None) -> None:
    if array is not None and array.shape[0] > calls.MAX_GROUPS:
        raise ValueError(
            f"`{name}`: shape {tuple(array.shape)}, expected at most {calls.MAX_GROUPS} groups; split the groups over "
            "several calls."
        )


def unrotated(q: QTensor[Any]) -> QTensor[Any]:
    """Returns the form of `q` that is not rotated; `q` itself where its only form is rotated."""
    return q.other if q.format.rotate and q.other is not None and not q.other.format.rotate else q


def dequantize(run: Runner, q: QTensor[Any], group_sizes: Array | None, dtype: str) -> Array:
    """Returns the values of `q`, codes times scales, in its logical shape. Rows need group sizes; None: those of `q`.

    Where `q` is rotated and has no other form, the values are rotated too.

    Raises:
        ValueError: rows without group sizes, or arrays that do not fit the number of groups.
    """
    group_sizes = q.group_sizes if group_sizes is None else group_sizes
    q = unrotated(q)
    if len(q.shape) == 2 and group_sizes is None:
        raise ValueError("`group_sizes`: None, expected one size per group, which rows are quantised by; pass them.")
    sizes = None if group_sizes is None else run.spec(group_sizes)
    check_sizes_absent(q.shape, sizes)
    spec: Any = operand_spec(run, q)
    if sizes is not None:
        check_sizes(Names("q", "q"), sizes)
        _check_groups("group_sizes", sizes)
        check_quantized("q", spec, sizes.shape[0])
    else:
        _check_groups("q", spec)
        check_quantized("q", spec, q.shape[0])
    call = calls.dequantize(spec, sizes, dtype)
    named = dict(zip(calls.QUANTIZED[:3], q.slots, strict=True)) | {"group_sizes": group_sizes}
    return run(call, call.arrange(**named))[0]


def given_forms(q: QTensor[Any], wanted: Sequence[tuple[int, Format]]) -> list[Operand] | None:
    """The forms of `q` in `wanted`, or None where `q` lacks one of them."""
    ready = [given_form(q, axis, fmt) for axis, fmt in wanted]
    return None if any(form is None for form in ready) else list(ready)


def given_form(q: QTensor[Any], axis: int, fmt: Format) -> QTensor[Any] | None:
    """Returns the form of `q` along `axis` in the layout of `fmt`, or None; rounding and rule of scales may differ."""
    for form in (q, q.other):
        if form is not None and (form.axis, form.format.layout) == (axis, fmt.layout):
            return form
    return None


def _values(
    run: Runner,
    q: QTensor[Any],
    wanted: Sequence[tuple[int, Format]],
    group_sizes: Array | None,
    requantize: str | None,
) -> Array:
    check_requantize(q, wanted, requantize)
    return dequantize(run, q, group_sizes, q.dtype)


def check_requantize(
    q: QTensor[Any], wanted: Sequence[tuple[int, Format]], requantize: str | None, name: str = ""
) -> None:
    """Refuses a quantised operand that lacks a form, unless the recipe allows making it from the dequantised values.

    Args:
        name: that of the argument, where it is known.

    Raises:
        ValueError: the recipe does not allow it, or the values are rotated.
    """
    of = f"`{name}`: " if name else ""
    if requantize is not None:
        if unrotated(q).format.rotate:
            raise ValueError(
                f"{of}quantised rows {q.shape}: only a rotated {q.format.name} form, expected one that is not rotated, "
                "to make another from; pass the form along features too (`quantize` with both axes)."
            )
        return
    axis, fmt = next(each for each in wanted if given_form(q, *each) is None)
    operand = "quantised rows" if len(q.shape) == 2 else "a quantised weight"
    found = " and ".join(f"{_shown(form.format)} along axis {form.axis}" for form in (q, q.other) if form is not None)
    how = "both axes and the recipe's own format, e.g. `recipe.wgrad[0]`" if fmt.rotate else "both axes"
    form = "a recipe that reads its format" if fmt.plain else f"that form too (`quantize` with {how})"
    one = len(q.shape) == 3 and fmt.one_scale and fmt.layout == q.format.layout
    shared = "saved_weights='forward', for which one form is enough, or " if one else ""
    raise ValueError(
        f"{of}{operand} {q.shape}: {found}, expected {_shown(fmt)} along axis {axis}, which a product reads; pass "
        f"{form}, pass the plain array, or a recipe with {shared}requantize='from_dequantized'."
    )


def _shown(fmt: Format) -> str:
    return f"rotated {fmt.name}" if fmt.rotate else fmt.name
