"""How many threads CPU kernels use: affinity, quotas of cgroups v1 and v2, the number that PyTorch is set to, and what
the system gives.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.native import compiler

SOURCES = ("tests/native/processors_check.cc", "cc/cpu/processors.cc")

V2 = "0::/a/b\n"
V1 = "9:name=systemd:/x\n4:cpu,cpuacct:/a/b\n2:cpuset:/\n"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return compiler.build(tmp_path_factory.mktemp("processors") / "check", SOURCES, compiler.CHECKS)


def v1(quota: int) -> dict[str, str]:
    return {"cpu.cfs_quota_us": f"{quota}\n", "cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("", {}, 0),
        (V2, {}, 0),
        (V2, {"a/b": {"cpu.max": "max 100000\n"}}, 0),
        (V2, {"a/b": {"cpu.max": "150000 100000\n"}}, 1.5),
        (V2, {"a/b": {"cpu.max": "400000 100000\n"}, "a": {"cpu.max": "300000 100000\n"}}, 3),
        (V2, {"": {"cpu.max": "50000 100000\n"}}, 0.5),  # in a container, whose path is that outside of it
        (V2, {"a/b": {"cpu.max": "nonsense\n"}}, 0),
        (f"{V1}{V2}", {"unified/a/b": {"cpu.max": "200000 100000\n"}}, 2),
        (V1, {"cpu,cpuacct/a/b": v1(250000)}, 2.5),
        (V1, {"cpu/a/b": v1(-1)}, 0),
        (V1, {"cpu/a/b": v1(400000), "cpu/a": v1(100000)}, 1),
        (V1, {"cpuset/a/b": v1(100000)}, 0),
    ],
)
def test_quotas(program, tmp_path, groups, files, expected):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for folder, contents in files.items():
        path = tmp_path / "sys/fs/cgroup" / folder
        path.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (path / name).write_text(text)
    ran = subprocess.run([str(program), str(tmp_path)], capture_output=True, text=True, check=True, timeout=60)
    quota, usable = map(float, ran.stdout.split())
    assert quota == expected
    allowed = len(os.sched_getaffinity(0))
    assert usable == (min(allowed, max(1, -int(-expected // 1))) if expected else allowed)


@pytest.fixture(scope="module")
def refusing(tmp_path_factory):
    """A program whose threads are refused; six processors are usable."""
    flags = (*compiler.CHECKS, "-pthread", "-ldl")
    sources = ("tests/native/parallel_check.cc", "cc/cpu/parallel.cc")
    return compiler.build(tmp_path_factory.mktemp("parallel") / "check", sources, flags)


@pytest.mark.parametrize(("given", "threads"), [(0, 1), (1, 2), (3, 4), (9, 6)])
def test_threads_and_helpers_that_are_refused(refusing, given, threads):
    """Those that there are do all tasks, and nobody is told; in the pool that throws they may still run then."""
    ran = subprocess.run([str(refusing), str(given)], capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [str(threads), "1000", "1000"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_affinity():
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from grouped_core import _native"
    ran = subprocess.run(
        [sys.executable, "-c", f"{code}; print(_native.cpu_threads())"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=compiler.ROOT,
    )
    assert ran.stdout.strip() == "1"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_torch_says_how_many_threads():
    """No thread but the caller's takes part after `torch.set_num_threads(1)`; others do before and afterwards.

    How soon others take part depends on what else the machine does, so there are calls until they have.
    """
    code = """
import os
import time
import torch, torch_bridge

x, w = torch.randn(4096, 256), torch.randn(8, 256, 256)
sizes = torch.full((8,), 512, dtype=torch.int32)

def others():
    own, total = 0, 0
    for task in os.listdir("/proc/self/task"):
        fields = open(f"/proc/self/task/{task}/stat").read().rsplit(")", 1)[1].split()
        spent = int(fields[11]) + int(fields[12])
        total += spent
        own += spent if int(task) == os.getpid() else 0
    return total - own

def calls_until_others_spend(ticks):
    before, calls, deadline = others(), 0, time.monotonic() + 200
    while others() - before < ticks:
        assert time.monotonic() < deadline, "no other thread takes part"
        torch_bridge.grouped_linear(x, w, sizes)
        calls += 1
    return calls

TICKS = 5  # what other threads spend when they take part; the system's own rounding of ticks gives at most one
torch.set_num_threads(2)
calls = calls_until_others_spend(TICKS)
torch.set_num_threads(1)
torch_bridge.grouped_linear(x, w, sizes)
before = others()
for _ in range(calls):
    torch_bridge.grouped_linear(x, w, sizes)
alone = others() - before
assert alone <= 1, f"{alone} ticks of other threads in {calls} calls"
torch.set_num_threads(2)
calls_until_others_spend(TICKS)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        cwd=compiler.ROOT,
    )
    assert ran.returncode == 0, ran.stderr
