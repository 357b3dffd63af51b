"""A process that has imported what programs of ranks need, and forks for each of them: PyTorch is imported once.

    python -m tests.torch_frontend.rank_server

Each line of its input is JSON: a module of checks, its options, a file for what it prints, and the seconds after which
it is killed with its ranks. A line of its output is the program's exit status.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path

from tests.conftest import COLLECTED_AFTER, measure_no_guards

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the problems are made by tools that import it
MODULES = ("parallel_checks", "expert_parallel_checks")
OF_GRAPHS = "torch._inductor.compile_fx"
"""The first graph of a process imports it with 200 other modules, whatever the backend, which takes 1.7 s."""


def _program(module: str, options: list[str], printed: str) -> None:
    os.setsid()  # so that its ranks are killed with it
    with Path(printed).open("wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    sys.exit(importlib.import_module(module).PROGRAM(options))


def _served(module: str, options: list[str], printed: str, timeout: float) -> int | None:
    run = multiprocessing.get_context("fork").Process(target=_program, args=(module, options, printed))
    run.start()
    run.join(timeout)
    if run.is_alive() and run.pid is not None:
        os.killpg(run.pid, signal.SIGKILL)
        run.join()
    return run.exitcode


if __name__ == "__main__":
    package = __spec__.parent
    for name in MODULES:
        importlib.import_module(f"{package}.{name}")
    importlib.import_module(OF_GRAPHS)
    measure_no_guards()
    gc.freeze()  # what is imported is never garbage, and no rank copies its pages to look at it
    gc.set_threshold(*COLLECTED_AFTER)
    for line in sys.stdin:
        module, options, printed, timeout = json.loads(line)
        print(_served(f"{package}.{module}", options, printed, timeout), flush=True)
