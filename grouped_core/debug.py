"""Diagnostics: which kernels would run and why, whether group sizes fit, and the checks of GROUPED_DEBUG.

GROUPED_DEBUG is a comma list of `sizes`, `poison`, `sync`, `ranks`. It only adds checks; it changes neither results
nor paths.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from numbers import Integral
from typing import Any

from grouped_core.calls import SLOTS, Call, quantized_parts
from grouped_core.plans import attempt, refusal

SIZE_NEGATIVE = 1
"""Bit of the status word: a group size is negative (it counts as 0)."""
SIZE_OVERFLOW = 2
"""Bit of the status word: the sizes sum to more than M (they are clamped)."""

FLAGS = ("sizes", "poison", "sync", "ranks")
_logger = logging.getLogger("grouped_core")


def debug_flags() -> frozenset[str]:
    """The checks that GROUPED_DEBUG asks for, read now.

    Raises:
        ValueError: the variable names a check that does not exist.
    """
    # NOTE: reads the dict inside `os.environ`, because `os.environ.get` raises and catches an error for a variable that
    # is not set, which takes as long as all other checks of a call.
    value = _environment.get(_VARIABLE)
    return _NO_FLAGS if value is None else _parse_flags(value)


_environment: dict[Any, Any] = os.environ._data  # pyrefly: ignore[missing-attribute]
_VARIABLE = os.environ.encodekey("GROUPED_DEBUG")
_NO_FLAGS: frozenset[str] = frozenset()


@lru_cache(maxsize=16)
def _parse_flags(value: Any) -> frozenset[str]:
    text = os.environ.decodevalue(value)
    flags = frozenset(part.strip() for part in text.split(",") if part.strip())
    if unknown := flags - set(FLAGS):
        raise ValueError(
            f"GROUPED_DEBUG: {', '.join(sorted(unknown))}, expected a comma list of {', '.join(FLAGS)}; "
            "correct or unset the variable."
        )
    if flags:
        _logger.warning("GROUPED_DEBUG adds the checks: %s", ", ".join(sorted(flags)))
    return flags


def describe_status(word: int) -> str:
    """The text for a status word of group sizes."""
    parts = []
    if word & SIZE_NEGATIVE:
        parts.append("a group size is negative and counted as 0")
    if word & SIZE_OVERFLOW:
        parts.append("the group sizes sum to more rows than there are and were clamped")
    return "; ".join(parts) or "the group sizes fit"


def size_word(sizes: Any, rows: int, *, where: Callable[[Any, int, int], Any], total: Callable[[Any], Any]) -> Any:
    """The status word of int32 `sizes` [G] against `rows`, an int32 scalar on their device, without a host read.

    Sums are exact in 32 bits: the low and the high 16 bits of up to 65535 sizes are summed separately.

    Args:
        where: (condition, a, b) -> elementwise choice of two ints, int32. total: sum over the axis, in int32 or wider.

    Raises:
        TypeError: `rows` is not an integer. ValueError: it is negative.
    """
    if not hasattr(rows, "__index__"):
        raise TypeError(f"`M`: {type(rows).__name__}, expected an integer; pass the number of rows.")
    if isinstance(rows, Integral) and rows < 0:  # else it is a symbol
        raise ValueError(f"`M`: {rows}, expected 0 or more; pass the number of rows.")
    counted = where(sizes > 0, 1, 0) * sizes
    low = counted & 0xFFFF
    # Two partial sums of at most 65535 * 255 each: the low halves would overflow a signed 32-bit sum.
    low_sum_0, low_sum_1 = total(low & 0xFF), total(low >> 8)
    carry = (low_sum_0 >> 8) + low_sum_1
    low_part = ((carry & 0xFF) << 8) + (low_sum_0 & 0xFF)
    high_part = total(counted >> 16) + (carry >> 8)
    over = (high_part > (rows >> 16)) | ((high_part == (rows >> 16)) & (low_part > (rows & 0xFFFF)))
    negative = total(where(sizes < 0, 1, 0)) > 0
    return where(negative, SIZE_NEGATIVE, 0) | where(over, SIZE_OVERFLOW, 0)


Planned = Callable[..., Sequence[Call]]
"""The native calls of a public operation, given all its arguments by name."""


def bound_arguments(known: Mapping[Any, Planned], op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """(the planner of `op`, all arguments of `op(*args, **kwargs)` by name).

    Args:
        op: one of `known`, or a layer class, for its `operation`.

    Raises:
        TypeError: `op` is none of these, or does not accept such arguments.
    """
    operation = getattr(op, "operation", op)
    planner = next((each for function, each in known.items() if function is operation), None)
    if planner is None:
        names = ", ".join(function.__name__ for function in known)
        raise TypeError(
            f"`op`: {op!r}, expected one of {names}; pass the public function itself, or its layer's class."
        )
    bound = inspect.signature(operation).bind(*args, **kwargs)
    bound.apply_defaults()
    return planner, bound.arguments


def explain_calls(calls: Sequence[Call], arch: str) -> str:
    """One line per native call: its results, the kernel that runs it, and why better kernels declined.

    For a `quantize` the line also has its source, and "listed" where the source is given by addresses. If the kernel of
    a fused call leaves quantising its results to other kernels, these are listed too.
    """
    lines = []
    for call in calls:
        found = attempt(call, arch)
        if not found.kernel:
            lines.append(refusal(call, arch, found.refusals))
            continue
        least, most = found.aligned_workspace_bytes, found.workspace_bytes
        more = _declined(found.refusals)
        if found.spare or most > least:
            bytes_more = _workspace(most) if most > least else ""
            more += f"\n    {found.spare or found.kernel} where an address is not a multiple of 16 bytes{bytes_more}"
        if any(name.endswith("starts_at_one") and on for name, on in call.params):
            more += "\n    batch_invariant: groups of delayed scaling that have not started are multiplied by 1"
        results = " ".join(str(spec) for spec in call.outputs if spec)
        lines.append(
            f"{call.name} -> {results}{_source(call)}: {found.kernel} on {arch}{_workspace(least)}{more}"
            f"{_quantisers(call, found.kernel, arch)}"
        )
    return "\n".join(lines)


def _declined(refusals: Sequence[tuple[str, str]], indent: str = "    ") -> str:
    return "".join(f"\n{indent}{name} declined: {reason}" for name, reason in refusals)


def _source(call: Call) -> str:
    """The source of a `quantize`, and whether it is listed; "" for other calls."""
    given = dict(zip(SLOTS[call.name], call.inputs, strict=True))
    if call.name != "quantize":
        return ""
    return f" of {given['source']}{', listed' if given['source_table'] else ''}"


def _quantisers(call: Call, kernel: str, arch: str) -> str:
    """The quantising kernels that run after the kernel of a fused call, where that kernel does not quantise."""
    parts = quantized_parts(call)
    if parts is None or not kernel.endswith(("_quantized_cpu", "_quantized_cuda")):
        return ""
    text = ""
    for part in filter(None, parts[1:]):
        found = attempt(part, arch)
        text += f"\n    quantises{_source(part)}: {found.kernel}{_declined(found.refusals, '        ')}"
    return text


def _workspace(count: int) -> str:
    return f", workspace {count} bytes" if count else ""


def check_arch(arch: Any) -> None:
    """Refuses an `arch` that is neither a name nor None. Raises TypeError."""
    if arch is not None and not isinstance(arch, str):
        raise TypeError(f'`arch`: {arch!r}, expected None or a name such as "cpu", "sm_80" or "sm_90a"; pass its name.')


def why_not(plan_calls: Callable[[], Sequence[Call]], arch: str) -> str | None:
    """None where all calls of `plan_calls` run on `arch`, else the message of the error that the operation raises."""
    try:
        for call in plan_calls():
            found = attempt(call, arch)
            if not found.kernel:
                return refusal(call, arch, found.refusals)
    except (TypeError, ValueError, NotImplementedError) as error:
        return str(error)
    return None
