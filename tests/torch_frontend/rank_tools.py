"""Programs whose checks several ranks run together, each in a process of its own.

A collective in which a rank is missing fails after --timeout seconds, and a rank that ends early ends the others; what
they have printed is shown then.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import SkipTest

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Check = Callable[[DeviceMesh], None]
Checks = dict[str, Check]
SKIPPED = "skipped: "
"""How the report of a check begins which the machine cannot run; every rank raises `unittest.SkipTest` then."""
GRACE = 2.0
"""Seconds that a rank has to report its failure after another one has failed, and then to end on request."""


def check_in(checks: Checks) -> Callable[[Check], Check]:
    """A decorator that adds a check to the list."""

    def add(run: Check) -> Check:
        checks[run.__name__] = run
        return run

    return add


def _process(rank: int, device: str, folder: str, checks: Checks, ranks: int, timeout: float) -> None:
    """The checks on one rank; each leaves a file, empty if it passed, and what is printed goes to another."""
    with Path(folder, f"output.{rank}").open("wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    faulthandler.register(signal.SIGTERM, file=2, chain=True)  # so that a rank that is ended shows where it was
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout),
    )
    mesh = init_device_mesh(device, (ranks,))
    for name, run in checks.items():
        failure = ""
        try:
            run(mesh)
        except SkipTest as reason:
            failure = f"{SKIPPED}{reason}\n"
        except BaseException:
            failure = f"rank {rank}: {traceback.format_exc()}"
        Path(folder, f"{name}.{rank}").write_text(failure)
        dist.barrier()  # fails where a collective has, and this rank with it: nothing behind it would mean anything
    dist.destroy_process_group()


def _end(ranks: list[Any], limit: float) -> list[str]:
    """Waits for the ranks, and ends all when one has failed or `limit` seconds are over. Returns how each ended."""

    def wait_for(seconds: float, done: Callable[[Iterable[Any]], bool]) -> None:
        # Asked again and again: a rank that ends closes its sentinel before it has a status, and then the next wait
        # would be for the other rank alone.
        deadline = time.monotonic() + seconds
        while not done(ranks) and (left := deadline - time.monotonic()) > 0:
            wait([each.sentinel for each in ranks if each.is_alive()], min(left, 0.5))

    def all_ended(ranks: Iterable[Any]) -> bool:
        return not any(each.is_alive() for each in ranks)

    wait_for(limit, lambda ranks: all_ended(ranks) or any(each.exitcode for each in ranks))
    if any(each.exitcode for each in ranks):
        wait_for(GRACE, all_ended)
        why = "after another one had failed"
    else:
        why = f"after {limit:g} seconds"
    running = [each.is_alive() for each in ranks]
    for end in ("terminate", "kill"):
        for each in ranks:
            if each.is_alive():
                getattr(each, end)()
        wait_for(GRACE, all_ended)
    return [
        f"was ended {why}" if ours else f"ended with status {each.exitcode}"
        for each, ours in zip(ranks, running, strict=True)
    ]


def run_all(device: str, checks: Checks, count: int, timeout: float, limit: float) -> tuple[dict[str, str], str]:
    """(the failure of each check, on any of `count` ranks; the output of ranks that did not finish)."""
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(count):
            Path(folder, f"output.{rank}").touch()  # for a rank that is ended while it imports
        # A fork shares what this process has imported, which no thread of PyTorch or JAX uses yet; CUDA needs a spawn.
        context: Any = multiprocessing.get_context("spawn" if device == "cuda" else "fork")
        ranks = [
            context.Process(target=_process, args=(rank, device, folder, checks, count, timeout), daemon=True)
            for rank in range(count)
        ]
        for each in ranks:
            each.start()
        ends = _end(ranks, limit)
        found = {}
        for name in checks:
            files = [Path(folder, f"{name}.{rank}") for rank in range(count)]
            found[name] = "".join(
                file.read_text() if file.exists() else f"rank {rank} did not finish it: it {ends[rank]}\n"
                for rank, file in enumerate(files)
            )
        printed = "".join(
            f"rank {rank} {ends[rank]}; it printed:\n{Path(folder, f'output.{rank}').read_text(errors='replace')}\n"
            for rank in range(count)
        )
        return found, printed if any(each.exitcode for each in ranks) else ""


def main(doc: str, checks: Checks, count: int, failing: Checks, arguments: Sequence[str] | None = None) -> int:
    """The program of a module of checks; those of `failing` run by name alone. Returns its exit status.

    It prints a line for each check, and a failure's traceback behind it.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the problems are made by tools that import it
    every = {**checks, **failing}
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--ranks", type=int, default=count, help="(default: %(default)s)")
    add("--checks", nargs="+", choices=list(every), default=list(checks), metavar="NAME", help="(default: all)")
    add("--timeout", type=float, default=45.0, metavar="SECONDS", help="for a collective (default: %(default)s)")
    add("--limit", type=float, default=540.0, metavar="SECONDS", help="for all checks (default: %(default)s)")
    options = parser.parse_args(arguments)
    chosen = {name: every[name] for name in options.checks}
    found, printed = run_all(options.device, chosen, options.ranks, options.timeout, options.limit)
    skipped = {name for name, failure in found.items() if failure.startswith(SKIPPED)}
    for name, failure in found.items():
        print(f"{'skipped' if name in skipped else 'FAILED' if failure else 'passed'}  {name}")
        if failure:
            print(failure)
    if printed:
        print(printed)
    return int(any(failure for name, failure in found.items() if name not in skipped) or bool(printed))
