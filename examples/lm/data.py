"""The text: reads it, holds some files out, draws batches, and measures how well compressors compress it."""

from __future__ import annotations

import lzma
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lm.errors import UserError

HELD_OUT_EVERY = 48
"""One of this many files is held out."""

HELD_OUT_BYTES = 1 << 17
"""At most this much held-out text is used, so that evaluation takes seconds."""

TEXT_BYTES = 1 << 26
"""At most this much text is read."""

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


@dataclass(frozen=True)
class Text:
    """Training bytes and held-out bytes, from different files (or from the two ends of a single file)."""

    name: str
    train: np.ndarray
    held_out: np.ndarray


def _python_files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*.py") if not SKIPPED_FOLDERS.intersection(p.relative_to(folder).parts)]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _text_files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file() and not _hidden(p.relative_to(folder))]


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def load(path: str | None) -> Text:
    """Loads the text at `path` (a file, or all files of a folder), or the standard library of the running Python."""
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        name, files = "Python standard library", _python_files(root)
    else:
        root = Path(path)
        try:
            root.stat()
        except FileNotFoundError:
            raise UserError(f"--text {path}: no such file or folder") from None
        except OSError as error:
            raise UserError(f"--text {path}: {error.strerror}") from None
        name, files = root.resolve().name, _text_files(root) if root.is_dir() else [root]
    parts: list[bytes] = []
    room = TEXT_BYTES
    for file in sorted(files):  # sorted, so that the same files always give the same split
        parts.append(_read(file, room))
        room -= len(parts[-1])
    parts = [part for part in parts if part]
    if not parts:
        raise UserError(f"--text {path or root}: there is no text in it")
    if len(parts) == 1:  # a single file: its last tenth is held out
        cut = max(1, len(parts[0]) * 9 // 10)
        parts = [parts[0][:cut], parts[0][cut:]]
        held = [1]
    else:
        held = list(range(len(parts) // 2 % HELD_OUT_EVERY, len(parts), HELD_OUT_EVERY))
    train = b"".join(part for i, part in enumerate(parts) if i not in held)
    held_out = b"".join(parts[i] for i in held)[:HELD_OUT_BYTES]
    return Text(name, np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8))


class Batches:
    """Random windows of the training text. The state of the random generator is the position in the data."""

    def __init__(self, train: np.ndarray, batch: int, length: int, seed: int) -> None:
        self._train = train
        self._shape = (batch, length)
        self._random = np.random.default_rng(seed)

    def draw(self) -> np.ndarray:
        """Draws the next batch: uint8 [batch, length + 1], inputs and the bytes that follow them."""
        batch, length = self._shape
        starts = self._random.integers(0, len(self._train) - length, size=batch)
        return self._train[starts[:, None] + np.arange(length + 1)]

    @property
    def position(self) -> dict[str, Any]:
        """The position in the stream of batches, as JSON; setting it continues from there."""
        return self._random.bit_generator.state

    @position.setter
    def position(self, state: dict[str, Any]) -> None:
        self._random.bit_generator.state = state


def held_out_windows(held_out: np.ndarray, length: int) -> np.ndarray:
    """uint8 [n, length + 1]: each held-out byte but the first is predicted exactly once (the last few are left out)."""
    count = (len(held_out) - 1) // length
    return held_out[np.arange(count)[:, None] * length + np.arange(length + 1)]


def bits_per_byte_of_others(held_out: np.ndarray, read: np.ndarray) -> dict[str, float]:
    """Bits per byte without a model: byte frequencies alone, and two compressors at their best level.

    The compressors adapt to the held-out text as they read it. The last one reads `read` first and may copy from it,
    as a model may use its training text.
    """
    counts = np.bincount(held_out, minlength=256)
    p = counts[counts > 0] / len(held_out)
    raw, before = held_out.tobytes(), read.tobytes()
    return {
        "byte frequencies": float(-(p * np.log2(p)).sum()),
        "zlib": 8 * len(zlib.compress(raw, 9)) / len(raw),
        "lzma": 8 * _lzma_bytes(raw) / len(raw),
        f"lzma after {len(before) / 1e6:.1f} MB": 8 * (_lzma_bytes(before + raw) - _lzma_bytes(before)) / len(raw),
    }


def _lzma_bytes(data: bytes) -> int:
    return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
