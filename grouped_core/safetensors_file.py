"""Files in the safetensors format: every fact is checked before any data is read, and tensors are streamed one by one.

A file is 8 bytes of header length, a JSON object {name: {dtype, shape, data_offsets}}, and the data without gaps.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

HEADER_LIMIT = 100_000_000
"""Bytes; that of the safetensors library."""

_CODES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
_NAMES = {name: code for code, name in _CODES.items()}
DTYPES = tuple(_NAMES)
"""Dtypes that a file may have."""
_METADATA = "__metadata__"
_ENTRY = {"dtype", "shape", "data_offsets"}


class Facts(NamedTuple):
    """What is known of a tensor without its values. dtype: as NumPy and ml_dtypes spell it."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of that name, of NumPy or of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, name, name))


class File:
    """An open file whose header is valid.

    Attributes:
        path: where it is. entries: the facts of every tensor. metadata: text by name.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Reads and checks the header.

        Raises:
            ValueError: the header or the length of the file is wrong. OSError: it cannot be read.
        """
        self.path = Path(path)
        self._offsets: dict[str, int] = {}
        self.entries: dict[str, Facts] = {}
        self.metadata: dict[str, str] = {}
        with self.path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            self._parse(stream, size)

    def _refuse(self, found: str, wanted: str) -> ValueError:
        return ValueError(f"checkpoint file `{self.path}`: {found}, expected {wanted}; load a complete, intact file.")

    def _parse(self, stream: BinaryIO, size: int) -> None:
        start = stream.read(8)
        if len(start) < 8:
            raise self._refuse(f"{size} bytes", "a safetensors file, which has 8 bytes of header length first")
        (length,) = struct.unpack("<Q", start)
        if length > min(HEADER_LIMIT, size - 8):
            raise self._refuse(f"a header of {length} bytes in {size}", f"one of at most {min(HEADER_LIMIT, size - 8)}")
        try:
            header = json.loads(stream.read(length).decode(), object_pairs_hook=_without_doubles)
        except (ValueError, RecursionError) as error:
            raise self._refuse(f"a header that is no JSON ({str(error)[:80]})", "the header of safetensors") from error
        if not isinstance(header, dict):
            raise self._refuse(f"a header that is a {type(header).__name__}", "an object of names")
        notes = header.pop(_METADATA, {})
        if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
            raise self._refuse("metadata that are no texts by name", "an object of texts")
        self.metadata = notes
        ranges = []
        for name, entry in header.items():
            facts, begin, end = self._entry(name, entry)
            self.entries[name] = facts
            self._offsets[name] = 8 + length + begin
            ranges.append((begin, end))
        position = 0
        for begin, end in sorted(ranges):
            if begin != position:
                raise self._refuse(f"data at {begin} after data that end at {position}", "tensors without gaps")
            position = end
        if 8 + length + position != size:
            raise self._refuse(f"{size} bytes", f"{8 + length + position} by its header")

    def _entry(self, name: str, entry: Any) -> tuple[Facts, int, int]:
        if not isinstance(entry, dict) or entry.keys() != _ENTRY:
            raise self._refuse(f"`{name[:80]}` with other fields", "dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _CODES:
            raise self._refuse(f"`{name[:80]}` of dtype {str(dtype)[:20]!r}", f"one of {', '.join(_CODES)}")
        if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._refuse(f"`{name[:80]}` with a shape or offsets that are no sizes", "numbers of 0 or more")
        facts = Facts(tuple(shape), _CODES[dtype])
        if facts.nbytes != offsets[1] - offsets[0]:
            raise self._refuse(
                f"`{name[:80]}` with {offsets[1] - offsets[0]} bytes", f"{facts.nbytes} for {str(facts)[:80]}"
            )
        return facts, offsets[0], offsets[1]

    def read(self, name: str) -> NDArray[Any]:
        """The values of one tensor, a new array.

        Raises:
            ValueError: the file became shorter since its header was read.
        """
        facts = self.entries[name]
        with self.path.open("rb") as stream:
            stream.seek(self._offsets[name])
            data = np.fromfile(stream, np.uint8, facts.nbytes)
        if data.nbytes != facts.nbytes:
            raise self._refuse(f"`{name[:80]}` cut off after {data.nbytes} bytes", f"{facts.nbytes}")
        return data.view(numpy_dtype(facts.dtype)).reshape(facts.shape)


def _are_sizes(values: Any) -> bool:
    # Shapes of 2**48 and more are no shapes: NumPy cannot make such arrays, even empty ones.
    return (
        isinstance(values, list)
        and len(values) <= 32
        and all(type(each) is int and 0 <= each < 1 << 48 for each in values)
    )


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def parse_json(text: str) -> Any:
    """The value of a JSON text without double names.

    Raises:
        ValueError: it is none, or nests too deep.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_doubles)
    except RecursionError as error:
        raise ValueError("it nests too deep") from error


def write(
    path: str | os.PathLike[str],
    entries: Mapping[str, Facts],
    metadata: Mapping[str, str],
    values: Iterable[tuple[str, NDArray[Any]]],
) -> None:
    """Writes a file tensor by tensor, under another name in the same folder first, then renames it.

    Args:
        entries: those of all tensors, in the order of their data. values: each name with its values, in that order.

    Raises:
        ValueError: values do not have the facts of their entry, or are not those of `entries`; or a name is reserved.
    """
    if _METADATA in entries:
        raise ValueError(
            f"checkpoint file `{path}`: a tensor named `{_METADATA}`, expected another name, because the format keeps "
            "this one for texts; rename it."
        )
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    position = 0
    for name, facts in entries.items():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"checkpoint file `{path}`: a tensor named {name!a}, expected a name that UTF-8 can express; rename it."
            ) from None
        end = position + facts.nbytes
        header[name] = {"dtype": _NAMES[facts.dtype], "shape": list(facts.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise ValueError(
            f"checkpoint file `{path}`: a header of {len(text)} bytes, expected at most {HEADER_LIMIT}; save fewer "
            "tensors in one file."
        )
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    name = target.parent / f".{target.name}.{os.getpid()}.{secrets.token_hex(8)}.part"
    number = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)  # less the umask
    try:
        with open(number, "wb") as stream:
            stream.write(struct.pack("<Q", len(text)))
            stream.write(text)
            left = iter(entries.items())
            for given, value in values:
                expected, facts = next(left, ("no further tensor", None))
                if given != expected or facts != Facts(value.shape, value.dtype.name):
                    raise ValueError(
                        f"`{given}`: {value.dtype.name}{list(value.shape)}, expected {expected} {facts}; pass the "
                        "values of the entries in their order."
                    )
                np.ascontiguousarray(value).reshape(-1).view(np.uint8).tofile(stream)
            if (rest := next(left, None)) is not None:
                raise ValueError(f"`{rest[0]}`: no values, expected {rest[1]}; pass all of them.")
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
