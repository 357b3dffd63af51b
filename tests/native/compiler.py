"""Small C++ programs around our headers, built by the test that runs them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-I.")
CHECKS = ("-O1", "-fsanitize=undefined", "-fno-sanitize-recover=undefined")  # signed overflow is part of the question


def build(output: Path, sources: Sequence[str], flags: Sequence[str]) -> Path:
    """Compiles and links `sources`; without a compiler the test is skipped."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler as $CXX, c++, g++ or clang++")
    command = [compiler, *FLAGS, *flags, *sources, "-o", str(output)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return output
