"""Quantising a weight in parts, each by whoever holds it, with the bits of the whole: magnitudes first, codes then.

Letters: G groups, A and B axes of a weight, S magnitudes of one member (`calls.shard_slots`).
"""

from __future__ import annotations

from collections.abc import Sequence

from grouped_core import calls
from grouped_core.calls import QUANTIZED, ArraySpec
from grouped_core.formats import Format, QTensor
from grouped_core.products import Array, Listed, Runner, arranged


def check_format(format: Format) -> None:
    """Refuses what cannot be made of parts.

    Raises:
        NotImplementedError: a scale that is chosen by looking at all values of a block.
    """
    if format.four_over_six:
        raise NotImplementedError(
            f"shard cast to {format.name}: `four_over_six` chooses scales by the errors of whole blocks, expected a "
            "format whose scales follow from magnitudes; gather the weight and quantise it whole."
        )


def amax(run: Runner, source: ArraySpec, format: Format, table: Array, into: Array) -> Array:
    """Bits of the largest magnitudes among the elements that lie here, int32 [G, S], in place.

    Args:
        source: of the whole weights [G, A, B]; its dtype is that of the parts.
        table: int64 [3, G]: address of what lies here of each member (0: nothing), its first element (-1: the
            member stays as it is), its length.
    """
    call = calls.shard_amax(source, format)
    return run(call, arranged(call, source=Listed(source, table), into_amax=into))[0]


def cast(
    run: Runner,
    source: ArraySpec,
    forms: Sequence[QTensor[Array]],
    table: Array,
    magnitudes: Array,
    encode: Array | None,
    skip: Array | None,
) -> None:
    """The codes of the elements that lie here, and every scale, in place; formats that differ take a pass each.

    Args:
        source, table: as of `amax`. magnitudes: int32 [G, S], of all parts together; of `forms`, which have one format.
        encode: float32 [G], multipliers of delayed scaling. skip: int32 [1]; not zero leaves all as it is.
    """
    wanted = tuple(any(form.axis == axis for form in forms) for axis in (2, 1))
    fmt = forms[0].format
    call = calls.shard_cast(
        *(source, fmt, (wanted[0], wanted[1])), encode=encode is not None and fmt.delayed, skip=skip is not None
    )
    places = {2: QUANTIZED[:3], 1: QUANTIZED[3:]}
    buffers = {name: slot for form in forms for name, slot in zip(places[form.axis], form.slots, strict=True)}
    named = {"amax": magnitudes, "encode": encode if fmt.delayed else None, "skip": skip}
    named |= {f"into_{name}": buffer for name, buffer in buffers.items()}
    run(call, arranged(call, source=Listed(source, table), **named))
