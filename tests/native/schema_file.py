"""Renews `grouped_core/_schema.py`, what the native module says of its calls: `python -m tests.native.schema_file`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from grouped_core import _native

FILE = Path(__file__).resolve().parents[2] / "grouped_core" / "_schema.py"

HEAD = '''"""The schema of the native calls, which `make stub` writes from cc/api/calls.h; do not edit.

By call: operands and results, name to words (cc/api/schema.h has their grammar), and parameters, name to default.
"""
'''


def text() -> str:
    """The file, laid out."""
    calls = (f"{name!r}: {value!r}," for name, value in _native.schema().items())
    body = (
        f"{HEAD}\nTYPES: dict[str, tuple[str, ...]] = {_native.types()!r}\n\n"
        "CALLS: dict[str, tuple[dict[str, str], dict[str, str], dict[str, int | float | str]]] = "
        f"{{{' '.join(calls)}}}\n"
    )
    ruff = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(FILE), "-"]
    return subprocess.run(ruff, input=body, check=True, capture_output=True, text=True, timeout=60).stdout


if __name__ == "__main__":
    FILE.write_text(text())
