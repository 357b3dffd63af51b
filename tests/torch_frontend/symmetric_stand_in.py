"""A stand-in of PyTorch's symmetric memory on ranks of the CPU, behind the published schema of its operator.

`all_to_all_vdev` gets a kernel for the CPU that reads sizes on the host and uses `all_to_all_single`. It insists on
what the real one needs: symmetric buffers of equal shapes, int64 splits, rows that thread blocks divide. Rows that
no rank sent are written with bytes that make NaNs, so that a result that reads them shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory


class StandIn:
    """Symmetric memory of a rank: how many exchanges ran, and how many rows they sent."""

    def __init__(self, *groups: Any) -> None:
        self.groups = groups
        self.allocated: list[Tensor] = []
        self.met: set[tuple[int, str]] = set()
        self.exchanges, self.rows, self.backend = 0, 0, "CUDA"

    def empty(self, *size: Any, dtype: torch.dtype, device: Any) -> Tensor:
        made = torch.empty(*size, dtype=dtype, device=device)
        self.allocated.append(made)
        return made

    def rendezvous(self, tensor: Tensor, group: str) -> None:
        assert any(tensor is each for each in self.allocated), "not made by `empty`"
        self.met.add((tensor.data_ptr(), group))

    def set_backend(self, name: str) -> None:
        self.backend = name

    def get_backend(self, device: Any) -> str:
        del device
        return self.backend

    def exchange(self, source: Tensor, out: Tensor, in_splits: Tensor, out_splits_offsets: Tensor, group: str) -> None:
        """The operator."""
        ranks = next(each for each in self.groups if each.group_name == group)
        for each in (source, out, in_splits, out_splits_offsets):
            assert each.is_contiguous()
            assert (each.data_ptr(), group) in self.met, "not symmetric"
        assert source.dtype == out.dtype
        assert in_splits.dtype == out_splits_offsets.dtype == torch.int64
        assert out_splits_offsets.shape == (2, ranks.size())
        assert self.backend == "NVSHMEM"
        row = source[0].numel() * source.element_size()
        assert all(row % max(1, blocks // ranks.size()) == 0 for blocks in (8, 16, 32, 64))
        came = torch.empty_like(in_splits)
        dist.all_to_all_single(came, in_splits, group=ranks)
        sends, comes = in_splits.tolist(), came.tolist()
        flat = [each.view(torch.uint8).view(each.shape[0], row) for each in (source, out)]
        flat[1].fill_(0xFF)
        arrived = torch.empty(sum(comes), row, dtype=torch.uint8)
        dist.all_to_all_single(arrived, flat[0][: sum(sends)].clone(), comes, sends, group=ranks)
        flat[1][: sum(comes)] = arrived
        out_splits_offsets[0] = came
        out_splits_offsets[1] = came.cumsum(0) - came
        self.exchanges, self.rows = self.exchanges + 1, self.rows + sum(sends)


@contextmanager
def stand_in(group: Any) -> Iterator[StandIn]:
    """Symmetric memory of the ranks of a group on the CPU, while it is open."""
    made, library = StandIn(group), torch.library.Library("symm_mem", "IMPL")
    library.impl("all_to_all_vdev", made.exchange, "CPU")
    names = ("empty", "rendezvous", "set_backend", "get_backend")
    try:
        with patch.multiple(
            _symmetric_memory, is_nvshmem_available=lambda: True, **{name: getattr(made, name) for name in names}
        ):
            yield made
    finally:
        library._destroy()
