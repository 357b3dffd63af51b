"""What CMake says where the native module cannot be built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("system", "advice"), [("Darwin", "a container or a virtual machine"), ("Windows", "WSL 2")])
def test_other_systems_are_told_what_to_use(tmp_path, system, advice):
    cmake = shutil.which("cmake", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    if cmake is None:
        pytest.skip("no cmake")
    command = [cmake, "-S", str(ROOT), "-B", str(tmp_path), f"-DCMAKE_SYSTEM_NAME={system}"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    words = " ".join(ran.stderr.split())
    assert ran.returncode != 0
    assert f"built for Linux alone, not for {system}" in words, words
    assert advice in words
