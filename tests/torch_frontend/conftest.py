"""Programs of several ranks, all started by one process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

Program = Callable[..., tuple[int, str]]


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """(module of checks, options, timeout in seconds) -> (exit status, what it prints: a line for each check)."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.torch_frontend.rank_server"]
    printed: Path = tmp_path_factory.mktemp("ranks") / "printed"
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def run(module: str, *options: str, timeout: float) -> tuple[int, str]:
            server.stdin.write(json.dumps([module, options, str(printed), timeout]) + "\n")
            server.stdin.flush()
            status = server.stdout.readline()
            assert status, "the process that starts programs of ranks has ended"
            return int(status), printed.read_text(errors="replace")

        yield run
        server.stdin.close()  # it ends after its input
