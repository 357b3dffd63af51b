"""A transfer that stays on the CPU, to test what `offload.cpu_offload` moves, and when, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from torch_bridge import _saved, _transfer, offload


class Sent:
    """Replaces a transfer: a copy comes back, even if the original has changed."""

    log: list[Sent]
    started: list[Sent]

    def __init__(self, tensor: Tensor, retain: bool) -> None:
        self.copy, self.source, self.retain = tensor.detach().clone(), tensor.detach(), retain
        self.saved = self.taken = 0
        Sent.log.append(self)

    def start(self) -> None:
        """Starts to bring it back."""
        if self not in Sent.started:
            Sent.started.append(self)

    def take(self, shape: torch.Size) -> Tensor:
        """It is back."""
        assert self in Sent.started, "it was read before it was on its way"
        self.taken += 1
        return self.copy.view(shape)


@contextmanager
def recorded() -> Iterator[list[Sent]]:
    """The tensors that are moved inside, oldest first."""
    Sent.log, Sent.started = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_transfer, "Moved", Sent)
        patch.setattr(offload, "_MOVABLE", ("cpu",))
        patch.setattr(offload, "_said", [True])
        offload._last.clear()
        offload._moved.clear()
        yield Sent.log
        assert not _saved.listeners
    offload._last.clear()
    offload._moved.clear()
