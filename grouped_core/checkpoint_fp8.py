"""Weights of a checkpoint that are stored as FP8 codes with a scale for each block, as DeepSeek and Qwen publish them.

`X` holds codes [N, K] of float8_e4m3fn, and `X_scale_inv` [ceil(N / 128), ceil(K / 128)], by which the codes of a block
are multiplied: float32, or bfloat16 or float16 as in files of Qwen3. When such weights are read from files or converted
in memory, they become the bfloat16 weights that codes and scales represent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grouped_core.checkpoint_files import Files
from grouped_core.layout_steps import NUMPY, Arrays
from grouped_core.safetensors_file import Facts

SCALE, BLOCK = "_scale_inv", 128
CODES, WIDE = "float8_e4m3fn", "bfloat16"
SCALES = ("float32", "bfloat16", "float16")


def coded_keys(entries: Mapping[str, Facts]) -> frozenset[str]:
    """The keys of weights beside which there are scales."""
    return frozenset(key for key in entries if f"{key}{SCALE}" in entries)


def widened_entries(entries: Mapping[str, Facts], coded: frozenset[str], where: str = "") -> dict[str, Facts]:
    """The facts once the weights `coded` are bfloat16, without their scales.

    Args:
        where: the path of a file, for messages.

    Raises:
        ValueError: codes and scales do not fit each other.
    """
    found, subject = dict(entries), f"checkpoint `{where}`" if where else "checkpoint"
    for key in sorted(coded):
        codes, scales = entries[key], found.pop(f"{key}{SCALE}")
        blocks = tuple(-(-size // BLOCK) for size in codes.shape)
        if codes.dtype != CODES or len(codes.shape) != 2 or scales.shape != blocks or scales.dtype not in SCALES:
            raise ValueError(
                f"{subject}: `{key}` {codes} with scales {scales}, expected a matrix of {CODES} and "
                f"{list(blocks)} of {', '.join(SCALES)}, one scale for each block of {BLOCK} by {BLOCK}; dequantise it "
                "before."
            )
        found[key] = Facts(codes.shape, WIDE)
    return found


def widened(codes: Any, scales: Any, arrays: Arrays) -> Any:
    """The bfloat16 values of one weight, where its codes are: code times scale in float32, rounded once."""
    columns = np.arange(codes.shape[1])[None] // BLOCK
    strips = []
    for at in range(scales.shape[0]):  # one strip at a time: the scales of all elements are as large as the weight
        strip = arrays.cast(codes[at * BLOCK : (at + 1) * BLOCK], "float32")
        strips.append(arrays.cast(strip * arrays.cast(scales[at], "float32")[columns], WIDE))
    return arrays.concatenate(strips, 0) if strips else arrays.cast(codes, WIDE)


@dataclass
class Dequantized(Files):
    """A checkpoint whose coded weights are read as bfloat16.

    `coded`: the keys of these weights.
    """

    inner: Files | None = None
    coded: frozenset[str] = frozenset()

    def read(self, key: str) -> NDArray[Any]:
        """The values of one tensor, a new array."""
        assert self.inner is not None, "made by `dequantized`"
        found = self.inner.read(key)
        return widened(found, self.inner.read(f"{key}{SCALE}"), NUMPY) if key in self.coded else found


def dequantized(files: Files, *, convert: bool) -> Files:
    """`files` itself without such weights, else a reader that dequantises them.

    Args:
        convert: whether the caller allows it, because bfloat16 holds only powers of two as scales exactly.

    Raises:
        ValueError: it is not allowed, or codes and scales do not fit each other.
    """
    coded = coded_keys(files.entries)
    if files.notes is not None or not coded:
        return files
    if not convert:
        first = next(key for key in files.entries if key in coded)
        raise ValueError(
            f"checkpoint `{files.where}`: `{first}` has scales `{first}{SCALE}`, expected plain weights; pass "
            "convert=True to read it as bfloat16, from which quantised weights of the model are made again."
        )
    return Dequantized(widened_entries(files.entries, coded, files.where), None, files.where, {}, files, coded)
