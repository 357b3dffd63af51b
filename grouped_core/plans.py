"""Asks the native dispatch which kernel runs a call, at trace time and without a device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from grouped_core import _native
from grouped_core.calls import SLOTS, ArraySpec, Call


@lru_cache(maxsize=2048)
def attempt(call: Call, arch: str) -> _native.Plan:
    """The native plan of `call` on `arch` ("cpu", "sm_80", "sm_90a"); its `kernel` is "" if no kernel supports it."""
    inputs = [None if spec is None else (spec.dtype, spec.shape) for spec in call.inputs]
    outputs = [None if spec is None else (spec.dtype, spec.shape) for spec in call.outputs]
    return _native.plan(call.name, arch, call.implementation, inputs, outputs, dict(call.params))


@lru_cache(maxsize=2048)
def plan(call: Call, arch: str) -> _native.Plan:
    """Returns the plan of `attempt` for a call that will run.

    Raises:
        NotImplementedError: no kernel supports the call; the message gives the reason of each candidate.
    """
    found = attempt(call, arch)
    if not found.kernel:
        raise NotImplementedError(refusal(call, arch, found.refusals))
    return found


def refusal(call: Call, arch: str, refusals: Sequence[tuple[str, str]]) -> str:
    """The message that no kernel supports `call`, with the reason of each candidate."""
    operands = ", ".join(
        f"{slot} {spec}" for slot, spec in zip(SLOTS[call.name], call.inputs, strict=True) if spec is not None
    )
    asked = f" with implementation={call.implementation!r}" if call.implementation else ""
    head = f"{call.name} on {arch}{asked}: {operands}; no kernel takes it:"
    if not refusals and arch != "cpu" and not _native.cuda_archs:
        return f"{head} this build has no CUDA kernels. Build it where nvcc is found, or with GROUPED_CUDA=on."
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals) or "there is no kernel of that name"
    return f"{head} {reasons}. Change what the reasons name, or leave `implementation` None."


class Planner:
    """A runner without arrays: it works on specs instead of arrays, and records every call in `calls`.

    It finds all result shapes of an operation, for fake tensors, `explain` and `why_unsupported`.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, call: Call, arrays: Sequence[Any]) -> tuple[ArraySpec | None, ...]:
        """Records the call; returns the specs of its results, None where not requested."""
        self.calls.append(call)
        return call.outputs

    def spec(self, array: ArraySpec) -> ArraySpec:
        """The spec itself."""
        return array

    def cast(self, array: ArraySpec, dtype: str) -> ArraySpec:
        """The spec with another dtype."""
        return ArraySpec(array.shape, dtype)
