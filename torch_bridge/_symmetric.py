"""The exchange of rows through PyTorch's symmetric memory, which sends only the rows in use.

`torch.ops.symm_mem.all_to_all_vdev` reads on the device how many rows go to each rank, and its kernels fetch them from
the memory of the other ranks by NVSHMEM. Letters: P ranks, B rows of the budget.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_bridge._compiling import is_compiling

OPERATOR = "all_to_all_vdev"
BACKEND = "NVSHMEM"
BLOCKS = (8, 16, 32, 64)
"""The numbers of thread blocks that the operator may use; it chooses one by the size of its input."""

_LIBRARY = torch.library.Library("torch_bridge", "FRAGMENT")
_LIBRARY.define(
    "symmetric_exchange(Tensor rows, Tensor counts, str group) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


def _library() -> Any:
    from torch.distributed import _symmetric_memory  # absent in builds without distributed

    return _symmetric_memory


# ---------------------------------------------------------------------------------------------------------------------
# Whether there is such memory


@torch.compiler.assume_constant_result
def why_unavailable() -> str:
    """Why this machine cannot exchange rows through symmetric memory; empty if it can."""
    try:
        library = _library()
    except ImportError:
        return "this build of PyTorch has no symmetric memory"
    device = "CUDA" if torch.cuda.is_available() else "CPU"
    if not hasattr(torch.ops.symm_mem, OPERATOR):
        return f"this build of PyTorch has no torch.ops.symm_mem.{OPERATOR}"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{OPERATOR}", device):
        return f"torch.ops.symm_mem.{OPERATOR} has no kernel for {device} here"
    if not library.is_nvshmem_available():
        return "NVSHMEM is not installed (the package nvidia-nvshmem for the CUDA version of PyTorch)"
    return ""


@torch.compiler.assume_constant_result
def require(function: str) -> None:
    """Chooses NVSHMEM as the backend of symmetric memory, for the whole process.

    Raises:
        RuntimeError: there is none, or another backend is in use.
    """
    reason = why_unavailable()
    remedy = "use transport='all_to_all'"
    if reason:
        raise RuntimeError(
            f"`transport` of {function}: 'symmetric_memory', expected a machine that has such memory, but {reason}; "
            f"{remedy}."
        )
    library, device = _library(), "cuda" if torch.cuda.is_available() else "cpu"
    if library.get_backend(device) == BACKEND:
        return
    try:
        library.set_backend(BACKEND)
    except RuntimeError as error:
        raise RuntimeError(
            f"`transport` of {function}: 'symmetric_memory', but the backend of symmetric memory is "
            f"{library.get_backend(device)}, expected {BACKEND}; call torch.distributed._symmetric_memory.set_backend"
            f"({BACKEND!r}) before the first allocation, or {remedy}."
        ) from error


def check_row(ranks: int, row_bytes: int) -> None:
    """Refuses rows that the operator's thread blocks cannot divide among themselves.

    Raises:
        ValueError: the bytes of a row are no multiple of the number of thread blocks per rank.
    """
    shares = [max(1, blocks // ranks) for blocks in BLOCKS]
    if any(row_bytes % share for share in shares):
        raise ValueError(
            f"`transport` of parallel: 'symmetric_memory' with rows of {row_bytes} bytes over {ranks} ranks, expected "
            f"a multiple of {', '.join(map(str, sorted(set(shares))))} bytes, because that many thread blocks copy "
            "parts of a row; use a multiple of 64 bytes and a power of two of ranks, or transport='all_to_all'."
        )


# ---------------------------------------------------------------------------------------------------------------------
# Buffers


class _Buffers(NamedTuple):
    """The symmetric memory of an exchange: the rows that are sent and those that came, [P B, columns] each; how many
    rows go to each rank [P]; how many came from each rank, and where they start [2, P].
    """

    sent: Tensor
    came: Tensor
    counts: Tensor
    places: Tensor


_BUFFERS: dict[tuple[Any, ...], _Buffers] = {}
"""The buffers by process group, device, shape and dtype. All layers use them, one exchange after the other."""


def _buffers(rows: Tensor, ranks: int, group: str) -> _Buffers:
    key = (group, rows.device, tuple(rows.shape), rows.dtype)
    found = _BUFFERS.get(key)
    if found is not None:
        return found
    if rows.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"transport 'symmetric_memory': the first exchange of {tuple(rows.shape)} {rows.dtype} is in the capture "
            "of a CUDA graph, expected one before, because its memory is made together with the other ranks; run the "
            "layer once before the capture, forward and backward."
        )
    library = _library()
    shapes = ((rows.shape, rows.dtype), (rows.shape, rows.dtype), ((ranks,), torch.int64), ((2, ranks), torch.int64))
    made = _Buffers(*[library.empty(shape, dtype=dtype, device=rows.device) for shape, dtype in shapes])
    for each in made:
        library.rendezvous(each, group)
        each.zero_()
    _BUFFERS[key] = made
    return made


# ---------------------------------------------------------------------------------------------------------------------
# The exchange


def _operator(rows: Tensor, counts: Tensor, group: str) -> Tensor:
    ranks, budget = counts.shape[0], rows.shape[0] // counts.shape[0]
    flat = rows.contiguous().view(rows.shape[0], -1)
    flat = flat.view(torch.uint8) if flat.element_size() == 1 else flat
    buffers = _buffers(flat, ranks, group)
    _meet(rows.device, group)
    torch.index_select(flat, 0, _rows_there_are(counts, budget), out=buffers.sent)
    buffers.counts.copy_(counts)
    getattr(torch.ops.symm_mem, OPERATOR)(buffers.sent, buffers.came, buffers.counts, buffers.places, group)
    inside = torch.arange(budget, device=rows.device)
    at = (buffers.places[1][:, None] + inside).clamp_(max=flat.shape[0] - 1)
    return torch.index_select(buffers.came, 0, at.view(-1)).view(rows.dtype).view(rows.shape)


def _meet(device: torch.device, group: str) -> None:
    """Waits on the device until all ranks have fetched the previous exchange's rows; the operator itself does not wait.

    Only then may the buffers be written again, by this rank or by another one.
    """
    from torch.distributed import _functional_collectives as collectives

    name: Any = group
    collectives.wait_tensor(collectives.all_reduce(torch.zeros(1, dtype=torch.int32, device=device), "sum", name))


def _rows_there_are(counts: Tensor, budget: int) -> Tensor:
    """Returns int64 [P B]: the indices of the rows in use, the first counts[p] of each part p; then any indices."""
    ends = counts.cumsum(0)
    at = torch.arange(counts.shape[0] * budget, device=counts.device)
    rank = torch.searchsorted(ends, at, right=True).clamp_(max=counts.shape[0] - 1)
    return (rank * budget + at - (ends - counts)[rank]).clamp_(max=at.shape[0] - 1)


def _fake(rows: Tensor, counts: Tensor, group: str) -> Tensor:
    del counts, group
    return torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("symmetric_exchange", _operator, _device)
torch.library.register_fake("torch_bridge::symmetric_exchange", _fake, lib=_LIBRARY)


def operator() -> Any:
    """Returns the operator that exchanges rows. It queues the whole exchange on the current stream."""
    return torch.ops.torch_bridge.symmetric_exchange.default


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}
_ARRIVALS: dict[int, torch.cuda.Event] = {}
"""For each exchange that is not finished, by the address of its result: the event after which the rows have arrived."""


def begin(rows: Tensor, counts: Tensor, group: str) -> Tensor:
    """Begins an exchange of parts and returns its result [P B, ...], which must not be read before `finish`.

    Part s of the result has the rows in use of the part that rank s had for this rank; the other rows have arbitrary
    values. Every rank calls it. It runs on its own stream, in parallel with what follows; in a graph of torch.compile
    it runs on the stream of the graph.

    Args:
        rows: [P B, ...], B rows for each rank. counts: int64 [P], how many of these rows are in use.

    Raises:
        ValueError: the operator's thread blocks cannot divide the bytes of a row.
    """
    check_row(counts.shape[0], rows[0].numel() * rows.element_size())
    if is_compiling() or not rows.is_cuda:
        return operator()(rows, counts, group)
    stream = _STREAMS.get(rows.device)
    if stream is None:
        stream = _STREAMS[rows.device] = torch.cuda.Stream(rows.device)
    stream.wait_stream(torch.cuda.current_stream(rows.device))
    with torch.cuda.stream(stream):
        pending = operator()(rows, counts, group)
        arrival = torch.cuda.Event()
        arrival.record(stream)
    for each in (rows, counts):
        each.record_stream(stream)
    _ARRIVALS[pending.data_ptr()] = arrival
    return pending


def finish(pending: Tensor) -> Tensor:
    """Makes the current stream wait for the rows, and returns `pending`."""
    if is_compiling() or not pending.is_cuda:
        return pending
    arrival = _ARRIVALS.pop(pending.data_ptr(), None)
    current = torch.cuda.current_stream(pending.device)
    if arrival is not None:
        current.wait_event(arrival)
    pending.record_stream(current)
    return pending
