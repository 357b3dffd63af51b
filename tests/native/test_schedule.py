"""The arithmetic of the wgmma kernels, by brute force: a C++ program that includes their headers and needs no CUDA."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("tests/native/schedule_check.cc", "cc/dispatch/tiles_sm90.cc")
PROPERTIES = 11  # lines that a good run prints
FLAGS = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-I.")
CHECKS = ("-fsanitize=undefined", "-fno-sanitize-recover=undefined")  # signed overflow is part of the question


def test_schedules_addresses_and_layouts(tmp_path):
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler as $CXX, c++, g++ or clang++")
    program = tmp_path / "schedule_check"
    command = [compiler, *FLAGS, *CHECKS, *SOURCES, "-o", str(program)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(ran.stdout.splitlines()) == PROPERTIES, ran.stdout
