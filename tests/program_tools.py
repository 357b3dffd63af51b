"""Programs of the project that run inside of the test process, which has imported the frameworks already."""

from __future__ import annotations

import runpy
import sys

import pytest

from tests.conftest import ROOT


def run_program(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What `python *words` does in the folder of the project: a file, or `-m` and a module. A failure is an error.

    Modules of `benchmarks` are imported again, along the path that it would have: its own folder, then installed
    packages, to which those of the project belong.
    """
    module = words[0] == "-m"
    with monkeypatch.context() as during:
        for name in [each for each in sys.modules if each.split(".")[0] == "benchmarks"]:
            during.delitem(sys.modules, name)
        installed = [*(each for each in sys.path if each not in ("", str(ROOT))), str(ROOT)]
        during.setattr(sys, "path", [str(ROOT) if module else str((ROOT / words[0]).parent), *installed])
        during.setattr(sys, "argv", words[1:] if module else words)
        during.chdir(ROOT)
        status: object = 0
        try:
            if module:
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        except SystemExit as end:
            status = end.code
        assert not status, f"{' '.join(words)} ended with {status}"
