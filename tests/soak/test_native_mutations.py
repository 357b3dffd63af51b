"""Randomly changed native calls: those that planning accepts stay inside their operands, the others are refused.

A serialised program, or a caller of `grouped_core._native`, bypasses the public checks. So calls of every kind are
changed at random (parameters, ranks, axes, element types, presence of operands) and planned for a CPU and two GPUs.
Those that a CPU kernel accepts are run, each operand directly after or directly before memory that must not be touched.
A crash ends only a subprocess, which has printed its seed; the changes depend only on the seed.

`python -m tests.soak.test_native_mutations 123` runs only seed 123 and prints its call.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grouped_core import _native
from grouped_core.activations import KINDS
from grouped_core.calls import RESULTS, SLOTS, Call
from grouped_core.formats import PLAIN
from tests import cases
from tests.native.every_call import every_call

SHORT, LONG = 20_000, 1_000_000
SEEDS_A_PROCESS = {SHORT: 20_000, LONG: 50_000}
ROOT = Path(__file__).resolve().parents[2]

Spec = tuple[str, tuple[int, ...]]

LIKELY = (0, 1, 2, 16, 32, 64, 128)
NUMBERS = (
    *LIKELY,
    *(3, -1, 7, 8, 15, 17, 24, 31, 48, 100, 127, 129, 256, 1024, 65535, 65536),
    *(2**31 - 1, 2**31, 2**31 + 128, 2**32, 2**32 + 16, 2**40, 2**48, 2**61, 2**62, 2**63 - 1, -(2**31), -(2**63)),
)
FLOATS = (0.0, 1.0, -1.0, 1e38, float("inf"), float("-inf"), float("nan"))
WORDS = (
    *("", "x" * 99, "fp32", "e8m0", "nvfp4", "tf32", "tf32x3", "ieee", "every_128", "never", "absolute", "square"),
    *("max", "most_recent", *PLAIN, *KINDS, "int32", "float8_e4m3fn"),
)
ARCHES = ("cpu", "cpu", "cpu", "cpu", "sm_90a", "sm_80")
IMPLEMENTATIONS = {
    name: ("",) * 12 + ("reference", "composed", "none,", *kernels) for name, kernels in _native.kernels().items()
}


USUAL = ((3, 20, 24, 40), (1, 1, 1, 1), (2, 0, 16, 32), (4, 33, 47, 17), (5, 130, 64, 48), (2, 9, 130, 129))
UNUSUAL = (
    *((0, 20, 24, 40), (3, 20, 0, 40), (3, 20, 24, 0), (70, 64, 32, 16), (1, 2**31, 16, 16), (2, 3, 2**32, 16)),
    *((65535, 7, 16, 16), (2**31, 7, 16, 16), (2, 2**40, 48, 16)),
)
"""G, M, K and N of the calls before they are changed; calls of large ones are planned alone."""


def corpus() -> tuple[list[Call], list[Call]]:
    """Calls to change, of usual lengths and of others; the first are all taken as they are."""
    usual, unusual = ([call for each in sizes for call in every_call(*each)] for sizes in (USUAL, UNUSUAL))
    return usual, unusual


class Mutation:
    """A call in pieces, some of them changed."""

    def __init__(self, bases: tuple[list[Call], list[Call]], rng: random.Random) -> None:
        call = rng.choice(bases[rng.random() < 0.1])
        self.rng = rng
        self.name = call.name
        self.operands = [None if s is None else (s.dtype, tuple(s.shape)) for s in (*call.inputs, *call.outputs)]
        self.inputs = len(call.inputs)
        self.params: dict[str, Any] = dict(call.params)
        self.implementation = rng.choice(IMPLEMENTATIONS[call.name])
        self.arch = rng.choice(ARCHES)
        ways = (*(self.param,) * 4, *(self.axis_everywhere,) * 2, self.operand, self.axis, self.presence, self.dtype)
        for _ in range(rng.choice((0, 0, 1, 1, 1, 1, 1, 2, 2, 4))):
            rng.choice(ways)()

    def param(self) -> None:
        name = self.rng.choice(
            [*self.params, "unknown"] if self.rng.random() < 0.02 or not self.params else [*self.params]
        )
        kind = self.rng.random()
        if kind < 0.03:
            self.params.pop(name, None)
            return
        like = self.params.get(name, 0) if kind > 0.05 else self.rng.choice((0, 0.0, ""))
        numbers = LIKELY if self.rng.random() < 0.5 else NUMBERS
        choices = WORDS if isinstance(like, str) else FLOATS if isinstance(like, float) else numbers
        self.params[name] = self.rng.choice(choices)

    def _present(self) -> tuple[int, Spec]:
        present = [(i, spec) for i, spec in enumerate(self.operands) if spec is not None]
        return self.rng.choice(present or [(0, ("float32", (1,)))])

    def _number(self, dim: int) -> int:
        found = self.rng.choice((0, 1, dim + 1, dim - 1, 2 * dim, dim // 2, dim + 16, self.rng.choice(NUMBERS)))
        return max(-(2**63), min(found, 2**63 - 1))

    def operand(self) -> None:
        at, (dtype, shape) = self._present()
        kind = self.rng.randrange(5)
        if kind == 0:
            shape = shape[:-1]
        elif kind == 1:
            shape = (*shape, self.rng.choice((0, 1, 2)))
        elif kind == 2:
            shape = shape[::-1]
        elif kind == 3:
            shape = (1,) * self.rng.randrange(5)
        else:
            _, (dtype, shape) = self._present()
        self.operands[at] = dtype, shape

    def axis(self) -> None:
        at, (dtype, shape) = self._present()
        if shape:
            i = self.rng.randrange(len(shape))
            self.operands[at] = dtype, (*shape[:i], self._number(shape[i]), *shape[i + 1 :])

    def axis_everywhere(self) -> None:
        """One length becomes another in every operand, so that calls stay whole."""
        dims = sorted({dim for spec in self.operands if spec for dim in spec[1]})
        if not dims:
            return
        old = self.rng.choice(dims)
        new = self._number(old)
        self.operands = [
            spec and (spec[0], tuple(new if dim == old else dim for dim in spec[1])) for spec in self.operands
        ]

    def presence(self) -> None:
        at = self.rng.randrange(len(self.operands))
        if self.operands[at] is not None:
            self.operands[at] = None
        else:
            _, (dtype, shape) = self._present()
            self.operands[at] = dtype if self.rng.random() < 0.5 else "float32", shape

    def dtype(self) -> None:
        at, (_, shape) = self._present()
        self.operands[at] = self.rng.choice(_native.dtypes()), shape

    def plan(self) -> _native.Plan:
        given, made = self.operands[: self.inputs], self.operands[self.inputs :]
        return _native.plan(self.name, self.arch, self.implementation, given, made, self.params)

    def __str__(self) -> str:
        slots = (*SLOTS[self.name], *RESULTS[self.name])
        found = {name: spec for name, spec in zip(slots, self.operands, strict=True) if spec is not None}
        return f"{self.name} on {self.arch}, pinned to {self.implementation!r}: {found}, {self.params}"


class Memory:
    """One region for each operand, between pages that must not be touched."""

    REGION = 1 << 18  # bytes of the largest operand that is run
    _NOTHING = 0  # PROT_NONE

    def __init__(self) -> None:
        slots = max(len(SLOTS[name]) + len(RESULTS[name]) for name in SLOTS)
        page = mmap.PAGESIZE
        self._step = self.REGION + page
        count = 2 * slots + 1  # operands, members that tables lead to, and the workspace
        self._memory = mmap.mmap(-1, page + count * self._step)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + page
        libc = ctypes.CDLL(None, use_errno=True)
        for i in range(count + 1):
            address = ctypes.c_void_p(self._start - page + i * self._step)
            if libc.mprotect(address, ctypes.c_size_t(page), self._NOTHING) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")
        self.slots = slots
        self._noise = random.Random(0).randbytes(2 * self.REGION)

    def place(self, region: int, nbytes: int, rng: random.Random, content: bytes | None = None) -> int:
        """The address of `nbytes` bytes that end, or else start, where a region does."""
        start = self._start + region * self._step
        address = start + (self.REGION - nbytes if rng.random() < 0.75 else 0)
        if content is None:
            first = rng.randrange(self.REGION)
            content = self._noise[first : first + nbytes]
        ctypes.memmove(address, content, nbytes)
        return address


def nbytes_of(spec: Spec) -> int:
    total = cases.numpy_dtype(spec[0]).itemsize
    for dim in spec[1]:
        total *= dim
    return total


def content_of(m: Mutation, name: str, spec: Spec, memory: Memory, region: int) -> bytes | None:
    """What an operand holds where noise will not do: sizes of any sign, and addresses that lead somewhere."""
    rng = m.rng
    if name == "group_sizes":
        sizes = rng.choices((0, 1, 7, 20, 33, -1, 2**31 - 1, -(2**31)), (4, 4, 8, 8, 4, 1, 1, 1), k=spec[1][0])
        return struct.pack(f"{len(sizes)}i", *sizes)
    if name == "skip":
        return struct.pack("i", int(rng.random() < 0.2))
    if not name.endswith("_table"):
        return None
    packed = m.operands[SLOTS[m.name].index(name.removesuffix("_table"))]
    assert packed is not None, "a table comes with its operand"
    groups = packed[1][0]
    member = nbytes_of(packed) // groups
    address = memory.place(memory.slots + region, member, rng)
    if m.name.startswith("shard"):
        elements = member // cases.numpy_dtype(packed[0]).itemsize
        parts = []
        for _ in range(groups):
            first = rng.randrange(elements)
            parts.append((address, first, rng.randrange(elements - first + 1)))
        table = np.array(parts, np.int64).T
    else:
        table = np.array(
            [0 if name == "into_table" and rng.random() < 0.3 else address for _ in range(groups)], np.int64
        )
    return np.ascontiguousarray(table).tobytes()


def execute(m: Mutation, plan: _native.Plan, memory: Memory) -> bool:
    """Runs a plan for the CPU; False where an operand is too large."""
    if any(spec is not None and nbytes_of(spec) > memory.REGION for spec in m.operands):
        return False
    slots, results = SLOTS[m.name], RESULTS[m.name]
    addresses = [0] * len(m.operands)
    for i, spec in enumerate(m.operands):
        if spec is not None:
            name = slots[i] if i < m.inputs else results[i - m.inputs]
            addresses[i] = memory.place(i, nbytes_of(spec), m.rng, content_of(m, name, spec, memory, i))
    for i, name in enumerate(slots):
        if name.startswith("into") and not name.endswith("_table") and m.operands[i] is not None:
            result = m.inputs + (0 if name == "into" else results.index(name.removeprefix("into_")))
            addresses[i] = addresses[result]
    needed = plan.workspace_for([*addresses, 0])
    if needed > memory.REGION:
        return False
    addresses.append(memory.place(2 * memory.slots, needed, m.rng, bytes(needed)) if needed else 0)
    plan.launch(addresses, 0)
    return True


def check(seed: int, bases: tuple[list[Call], list[Call]], memory: Memory) -> str:
    """What became of a seed: refused, no kernel, planned, run."""
    rng = random.Random(seed)
    m = Mutation(bases, rng)
    try:
        plan = m.plan()
    except ValueError as error:
        if not str(error):
            raise AssertionError(f"seed {seed}: refused without words: {m}") from error
        return "refused"
    if not plan.kernel:
        assert all(reason for _, reason in plan.refusals), f"seed {seed}: refused without words: {m}"
        return "no kernel"
    if m.arch != "cpu":
        needed = plan.workspace_for([16 + rng.choice((0, 0, 0, 1, 8)) for _ in m.operands] + [0])
        assert needed in (plan.workspace_bytes, plan.aligned_workspace_bytes), f"seed {seed}: {needed}: {m}"
        return "planned"
    try:
        return "run" if execute(m, plan, memory) else "planned"
    except Exception as error:
        raise AssertionError(f"seed {seed}: {m}") from error


def main(first: int, count: int, progress: Path | None) -> None:
    """Checks seeds, and leaves the one it is at where it survives a crash."""
    bases, memory, found = corpus(), Memory(), dict.fromkeys(("refused", "no kernel", "planned", "run"), 0)
    if progress is None:
        rng = random.Random(first)
        print(Mutation(bases, rng), flush=True)
        print(check(first, bases, memory))
        return
    with progress.open("r+b") as file, mmap.mmap(file.fileno(), 8) as at:
        for seed in range(first, first + count):
            at[:] = seed.to_bytes(8, "little")
            found[check(seed, bases, memory)] += 1
    print(", ".join(f"{number} {what}" for what, number in found.items()))
    assert found["run"] > count // 20, "hardly any call was run"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first_seed" in metafunc.fixturenames:
        count = LONG if metafunc.config.getoption("--soak") else SHORT
        metafunc.parametrize(
            ("first_seed", "count"), [(i, SEEDS_A_PROCESS[count]) for i in range(0, count, SEEDS_A_PROCESS[count])]
        )


@pytest.mark.rule("ERR-6", "MAT-7")
def test_changed_calls(first_seed, count, tmp_path):
    progress = tmp_path / "seed"
    progress.write_bytes(bytes(8))
    options = ["-S"] if sys.flags.no_site else []
    done = subprocess.run(
        [
            sys.executable,
            *options,
            "-m",
            "tests.soak.test_native_mutations",
            str(first_seed),
            str(count),
            str(progress),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    seed = int.from_bytes(progress.read_bytes(), "little")
    print(done.stdout)
    assert done.returncode == 0, f"seed {seed} ended the process with {done.returncode}:\n{done.stderr[-4000:]}"


if __name__ == "__main__":
    main(int(sys.argv[1]), *((int(sys.argv[2]), Path(sys.argv[3])) if len(sys.argv) > 2 else (1, None)))
