"""The arithmetic of the wgmma kernels, by brute force: a C++ program that includes their headers and needs no CUDA."""

from __future__ import annotations

import subprocess

from tests.native import compiler

SOURCES = ("tests/native/schedule_check.cc", "cc/dispatch/tiles_sm90.cc")
PROPERTIES = 23  # lines that a good run prints


def test_schedules_addresses_and_layouts(tmp_path):
    program = compiler.build(tmp_path / "schedule_check", SOURCES, compiler.CHECKS)
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(ran.stdout.splitlines()) == PROPERTIES, ran.stdout
