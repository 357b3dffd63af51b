"""Group sizes as kernels read them, int32 on the device, and a debug word that records invalid sizes."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from grouped_core import calls
from grouped_core.debug import describe_status, size_word
from grouped_core.linear_spec import Names, check_sizes
from grouped_core.ranks import check_rank
from grouped_core.sizes import GroupSizes, unwrap
from torch_bridge._checks import check_layout, check_memory, device_integers
from torch_bridge._compiling import is_compiling
from torch_bridge._memory import capture_on, raw_stream
from torch_bridge._tensors import spec_of

_INT32 = torch.iinfo(torch.int32)


def device_sizes(values: Sequence[int] | Tensor, device: torch.device | str) -> Tensor:
    """int32 [G] on `device` from host integers or a CPU tensor, without a synchronisation; too large ones saturate.

    While a CUDA graph is captured this works and warns: the graph keeps these values permanently.

    Raises:
        TypeError: not integers. ValueError: more than one axis, or a tensor that is not on the CPU or without memory.
    """
    device = torch.device(device)
    if isinstance(values, Tensor):
        check_layout(_NAMES.sizes, values)
        check_memory(_NAMES.sizes, values)
        check_sizes(_NAMES, spec_of(values))
        if values.device.type != "cpu":
            raise ValueError(
                f"`values`: on {values.device}, expected host integers or a CPU tensor; "
                "pass a tensor of the device directly as `group_sizes`."
            )
        values = values.tolist()
    elif hasattr(values, "dtype"):  # NumPy's
        check_sizes(_NAMES, calls.spec_of(values))
    try:
        if isinstance(values, (str, bytes, Set, Mapping, Iterator)) or any(map(_is_bool, values)):
            raise TypeError
        numbers = [min(max(operator.index(value), _INT32.min), _INT32.max) for value in values]
    except TypeError:
        raise TypeError(
            f"`group_sizes`: {values!r}, expected integers (a tensor, or a sequence of ints); "
            "pass the number of rows of each group."
        ) from None
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        warnings.warn("group_sizes came from the host: the captured graph keeps these values", stacklevel=3)
    return device_integers(numbers, torch.int32, device)


def _is_bool(value: Any) -> bool:
    # A tensor of a bool has `__index__` too.
    return isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype is torch.bool)


def prepare_sizes(group_sizes: Any, x: Tensor, names: Names) -> tuple[Tensor, int]:
    """(int32 [G] on the device of `x`, hint of rows per group or 0) from the user's argument.

    Raises:
        TypeError: not integers. ValueError: another device than x's, not contiguous, without memory, more than one
            axis.
    """
    sizes, hint = unwrap(group_sizes)
    if not isinstance(sizes, Tensor) or (sizes.device.type == "cpu" and x.device.type == "cuda"):
        return device_sizes(sizes, x.device), hint
    if sizes.device != x.device:
        raise ValueError(
            f"`{names.sizes}`: on {sizes.device}, expected {x.device} = device of `x`; move it with `.to`."
        )
    check_layout(names.sizes, sizes)
    check_memory(names.sizes, sizes)
    if not sizes.is_contiguous():
        raise ValueError(
            f"`{names.sizes}`: strides {tuple(sizes.stride())}, expected a contiguous tensor; call `.contiguous()`."
        )
    if sizes.dtype is not torch.int32:
        check_sizes(names, spec_of(sizes))
        sizes = saturate(sizes)
    check_rank("linear", "sizes", names.sizes, sizes.shape)
    return sizes, hint


def saturate(sizes: Tensor) -> Tensor:
    """Integers of any type as int32, clamped."""
    if sizes.dtype is torch.uint64:  # viewed as int64, too large values are negative
        signed = sizes.view(torch.int64)
        sizes = torch.where(signed < 0, _INT32.max, signed)
    elif sizes.dtype is torch.uint32:
        sizes = sizes.to(torch.int64)
    if sizes.dtype is torch.int64:
        sizes = sizes.clamp(_INT32.min, _INT32.max)
    return sizes.to(torch.int32)


_kept: dict[tuple[torch.device, int], Tensor] = {}  # by device and stream, on which it was filled


def every_row(x: Tensor) -> Tensor:
    """int32 [1] on the device of `x`: the size of one group of all rows, or of one sequence of all tokens.

    Sizes above the number of rows are clamped by every kernel, so one tensor serves every number.
    """
    if is_compiling() or x.is_meta or type(x) not in (Tensor, torch.nn.Parameter):  # also fake tensors
        return torch.full((1,), calls.MAX_ROWS, dtype=torch.int32, device=x.device)
    on_gpu = x.device.type == "cuda"
    key = (x.device, raw_stream(x.device.index) if on_gpu else 0)
    kept = _kept.get(key)
    if kept is None:
        with torch.inference_mode(mode=False):  # later calls save it for backward
            kept = device_integers([calls.MAX_ROWS], torch.int32, x.device)
        if not (on_gpu and torch.cuda.is_current_stream_capturing()):  # otherwise it belongs to the graph
            _kept[key] = kept
    return kept


def _choose(condition: Tensor, a: int, b: int) -> Tensor:
    return torch.where(condition, a, b)


def size_status(group_sizes: Tensor | Sequence[int] | GroupSizes, M: int) -> Tensor:
    """An int32 scalar on the device of `group_sizes` [G]: bit 0 if one is negative, bit 1 if they sum to more than M.

    Raises:
        TypeError: not integers. ValueError: more than one axis, or a negative M.
    """
    sizes, _ = unwrap(group_sizes)
    if not isinstance(sizes, Tensor):
        sizes = device_sizes(sizes, "cpu")
    sizes, _ = prepare_sizes(sizes, sizes, _NAMES)
    check_sizes(_NAMES, spec_of(sizes))
    return size_word(sizes, M, where=_choose, total=torch.sum).to(torch.int32)


_words: dict[torch.device, Tensor] = {}


def note_sizes(sizes: Tensor, rows: int) -> None:
    """Adds the status of int32 `sizes` to the debug word of their device."""
    status = size_status(sizes, rows)
    word = _words.get(sizes.device)
    if word is None:
        if capture_on(sizes.device):  # memory of a graph, which each replay would clear
            raise RuntimeError(
                "GROUPED_DEBUG=sizes: the first call on this device is in the capture of a CUDA graph, expected one "
                "before, because the debug word outlives the graph; run the call once before the capture."
            )
        with torch.inference_mode(mode=False):  # later calls write it
            word = _words[sizes.device] = torch.zeros((), dtype=torch.int32, device=sizes.device)
    word |= status


def check_debug_word() -> None:
    """Reads and clears the debug words of all devices; it waits for them.

    They are written under GROUPED_DEBUG=sizes.

    Raises:
        ValueError: since the last call some group sizes were negative or summed to more rows than there were.
    """
    found = {device: int(word) for device, word in _words.items()}
    for word in _words.values():
        word.zero_()
    if wrong := "; ".join(f"on {device}: {describe_status(word)}" for device, word in found.items() if word):
        raise ValueError(
            f"group_sizes {wrong}; expected sizes from 0 on that sum to at most M; "
            "check what computed them; `size_status` checks one tensor."
        )


_NAMES = Names(x="x", w="weight")
