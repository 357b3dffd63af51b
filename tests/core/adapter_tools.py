"""Which calls the rules of adapters run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grouped_core.calls import Call
from grouped_core.reference import Oracle


class Recorder(Oracle):
    """The oracle, keeping the calls that it ran."""

    def __init__(self) -> None:
        super().__init__(exact=True)
        self.calls: list[Call] = []

    def __call__(self, call: Call, arrays: Sequence[Any]) -> tuple[Any, ...]:
        self.calls.append(call)
        return super().__call__(call, arrays)

    @property
    def gradients(self) -> list[tuple[int, ...]]:
        """Shapes of the gradients of weights and factors, sorted."""
        alone = [each.outputs[0] for each in self.calls if dict(each.params).get("contract_rows")]
        along = [each.outputs[1] for each in self.calls if each.name == "low_rank_grads"]
        return sorted(spec.shape for spec in [*alone, *along] if spec is not None)

    def count(self, name: str) -> int:
        """How many calls of that name ran."""
        return sum(each.name == name for each in self.calls)
