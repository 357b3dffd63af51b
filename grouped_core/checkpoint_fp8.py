"""Weights of a checkpoint that are stored as FP8 codes with a scale for each block, as DeepSeek publishes them.

`X` holds codes [N, K] of float8_e4m3fn, and `X_scale_inv` float32 [ceil(N / 128), ceil(K / 128)], by which the codes of
a block are multiplied. A reader shows them as the bfloat16 weights that they stand for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grouped_core.checkpoint_files import Files
from grouped_core.safetensors_file import Facts, numpy_dtype

SCALE, BLOCK = "_scale_inv", 128
CODES, WIDE = "float8_e4m3fn", "bfloat16"


@dataclass
class Dequantized(Files):
    """A checkpoint whose coded weights are read as bfloat16: code times scale in float32, rounded once.

    `coded`: the keys of these weights.
    """

    inner: Files | None = None
    coded: frozenset[str] = frozenset()

    def read(self, key: str) -> NDArray[Any]:
        """The values of one tensor, a new array."""
        assert self.inner is not None, "made by `dequantized`"
        found = self.inner.read(key)
        if key not in self.coded:
            return found
        made = found.astype(np.float32)
        columns = made.shape[1]
        scales = self.inner.read(f"{key}{SCALE}")
        for at, row in enumerate(scales):  # one strip at a time: the scales of all elements are as large as the weight
            made[at * BLOCK : (at + 1) * BLOCK] *= np.repeat(row, BLOCK)[None, :columns]
        return made.astype(numpy_dtype(WIDE))


def dequantized(files: Files, *, convert: bool) -> Files:
    """`files` itself without such weights, else a reader that dequantises them.

    Args:
        convert: whether the caller allows it, because bfloat16 holds only powers of two as scales exactly.

    Raises:
        ValueError: it is not allowed, or codes and scales do not fit each other.
    """
    coded = [key for key in files.entries if f"{key}{SCALE}" in files.entries]
    if files.notes is not None or not coded:
        return files
    if not convert:
        raise ValueError(
            f"checkpoint `{files.where}`: `{coded[0]}` has scales `{coded[0]}{SCALE}`, expected plain weights; pass "
            "convert=True to read it as bfloat16, from which quantised weights of the model are made again."
        )
    entries = dict(files.entries)
    for key in coded:
        codes, scales = entries[key], entries.pop(f"{key}{SCALE}")
        blocks = tuple(-(-size // BLOCK) for size in codes.shape)
        if codes.dtype != CODES or len(codes.shape) != 2 or scales != Facts(blocks, "float32"):
            raise ValueError(
                f"checkpoint `{files.where}`: `{key}` {codes} with scales {scales}, expected a matrix of {CODES} and "
                f"float32{list(blocks)}, one scale for each block of {BLOCK} by {BLOCK}; dequantise it before."
            )
        entries[key] = Facts(codes.shape, WIDE)
    return Dequantized(entries, None, files.where, {}, files, frozenset(coded))
