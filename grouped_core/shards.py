"""Quantises a sharded weight, with the same bits as the whole weight: ranks first find amaxes, then write codes.

Letters: G groups, A and B axes of a weight, S amaxes per group (`calls.shard_slots`).
"""

from __future__ import annotations

from collections.abc import Sequence

from grouped_core import calls
from grouped_core.calls import QUANTIZED, ArraySpec
from grouped_core.formats import Format, QTensor
from grouped_core.products import Array, Listed, Runner, arranged


def check_format(format: Format) -> None:
    """Refuses formats that a sharded weight cannot be quantised in.

    Raises:
        NotImplementedError: the format chooses scales by all values of a block.
    """
    if format.four_over_six:
        raise NotImplementedError(
            f"shard cast to {format.name}: `four_over_six` chooses scales by the errors of whole blocks, expected a "
            "format whose scales follow from the amax; gather the weight and quantise it whole."
        )


def amax(run: Runner, source: ArraySpec, format: Format, table: Array, into: Array) -> Array:
    """The bits of the amaxes over this rank's elements, int32 [G, S], in place.

    Args:
        source: spec of the whole weights [G, A, B]; its dtype is that of the shards.
        table: int64 [3, G]: for each group, the address of this rank's elements (0: none), the index of the first one
            in the group (-1: the group is left unchanged), and their number.
    """
    call = calls.shard_amax(source, format)
    return run(call, arranged(call, source=Listed(source, table), into_amax=into))[0]


def cast(
    run: Runner,
    source: ArraySpec,
    forms: Sequence[QTensor[Array]],
    table: Array,
    amaxes: Array,
    scale: Array | None,
    skip: Array | None,
) -> None:
    """Writes the codes of this rank's elements, and all scales, in place; each format needs its own call.

    Args:
        source, table: as in `amax`. forms: the buffers, all of one format. amaxes: int32 [G, S], amaxes of all
            ranks together.
        scale: float32 [G], scales of delayed scaling. skip: int32 [1]; a value other than 0 leaves all unchanged.
    """
    wanted = tuple(any(form.axis == axis for form in forms) for axis in (2, 1))
    fmt = forms[0].format
    call = calls.shard_cast(
        *(source, fmt, (wanted[0], wanted[1])), scale=scale is not None and fmt.delayed, skip=skip is not None
    )
    places = {2: QUANTIZED[:3], 1: QUANTIZED[3:]}
    buffers = {name: slot for form in forms for name, slot in zip(places[form.axis], form.slots, strict=True)}
    named = {"amax": amaxes, "scale": scale if fmt.delayed else None, "skip": skip}
    named |= {f"into_{name}": buffer for name, buffer in buffers.items()}
    run(call, arranged(call, source=Listed(source, table), **named))
