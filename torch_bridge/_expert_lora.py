"""Adapters of experts that are spread over ranks: the options that they share, and the keys of their dropout masks."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from grouped_core import lora, lora_mlp
from torch_bridge._checks import check_operand
from torch_bridge._tensors import fixed_spec
from torch_bridge.moe import SharedExpert, key_of_part, key_of_shared


class AdapterOptions(NamedTuple):
    """What the adapters of the experts and of a shared expert have in common."""

    scaling: float
    dropout: float
    key: Tensor | None

    def of_part(self, number: int, *, shared: bool = False) -> dict[str, Any]:
        """Returns the keywords for part `number` of the tokens of all ranks; each part gets a key of its own."""
        key = None if self.key is None else key_of_part(self.key, number)
        key = key_of_shared(key) if shared and key is not None else key
        return {"lora_scaling": self.scaling, "lora_dropout": self.dropout, "lora_key": key}


def check_adapters(x: Tensor, given: Any, shared: SharedExpert | None, options: AdapterOptions, accum: Any) -> None:
    """Refuses options of adapters that contradict each other, before a rank communicates.

    Raises:
        ValueError: options contradict each other, or the key has another shape or dtype. TypeError: the key is not a
            tensor.
    """
    adapted = [each for each in (given, None if shared is None else shared.lora) if each is not None]
    if not adapted:
        lora.check_absent(*options, accum)
    elif given is None:
        lora.check_absent(1, 0, None, accum)
    for each in adapted:
        lora_mlp.option(each, *options)
    if options.key is not None:
        check_operand("lora_key", options.key, x)
        lora.check_key(fixed_spec(options.key))
