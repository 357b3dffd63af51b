"""Runs a rule in PyTorch: it is recorded once per combination of shapes and dtypes, then replayed on addresses.

A rule of `grouped_core` never reads values, so its steps follow from the specs of its operands. The first run records
casts and native calls; later runs allocate, collect addresses and launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core import _native, plans
from grouped_core.calls import ArraySpec, Call
from grouped_core.debug import debug_flags
from grouped_core.products import Listed
from torch_bridge._checks import check_operand
from torch_bridge._memory import (
    ALIGNMENT,
    EXCHANGE,
    address_table,
    current_device,
    empty_on_cpu,
    empty_on_cuda,
    raw_stream,
)
from torch_bridge._tensors import (
    RESULT_DTYPES,
    TORCH_DTYPES,
    Flat,
    Layout,
    Leaf,
    facts_cache,
    flats,
    flatten,
    leaf_count,
    same,
    spec_of,
    unflatten,
)
from torch_bridge.sizes import note_sizes


@lru_cache(maxsize=64)
def arch_of(device: torch.device) -> str:
    """The architecture for which plans are made on `device`: "cpu", "sm_90a".

    Raises:
        ValueError: the device is neither CPU nor CUDA.
    """
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda":
        return _native.device_arch(0 if device.index is None else device.index)
    raise ValueError(f"device {device}: expected a CPU or CUDA device; move the tensors there, or pass `arch`.")


@dataclass(frozen=True, eq=False)
class Rule:
    """A rule of `grouped_core` that runs as an operator of this package.

    Attributes:
        name: the name of the operator.
        run: a function (runner, static facts, operands) -> results: operands, new arrays, or None.
        operands: the named tuple class of the operands.
        rows: the fields of `operands` that have M rows. written: the fields that are written.
        notes_sizes: whether GROUPED_DEBUG=sizes checks `sizes`.
        derived: the fields whose lengths follow from M without being M, such as the rows of all slots if M counts
            tokens.
    """

    name: str
    run: Callable[[Recorder, Any, Any], Sequence[Any]]
    operands: type[Any]
    rows: frozenset[str]
    written: frozenset[str]
    notes_sizes: bool = False
    derived: frozenset[str] = frozenset()


class Prepared:
    """A rule with its static facts, and a cache of its planned programs by the facts of the operands."""

    __slots__ = ("programs", "rule", "run", "static")

    def __init__(self, rule: Rule, static: Hashable) -> None:
        self.rule = rule
        self.static = static
        self.programs = facts_cache()
        self.run = self.programs.run


prepare = lru_cache(maxsize=1024)(Prepared)
"""Returns the one `Prepared` of (rule, static facts). Callers that run often keep it, because hashing takes time."""


# ---------------------------------------------------------------------------------------------------------------------
# Recording


class Register(NamedTuple):
    """Represents an array while a rule is recorded."""

    at: int
    spec: ArraySpec


class Part(NamedTuple):
    """An array with a register but no tensor of its own: a row of a leaf, or one of several temporaries in a tensor.

    Launches find it at an offset from the address of the tensor.
    """

    whole: int  # the register of the tensor
    offset: int  # in bytes


class Cast(NamedTuple):
    """values[result] = values[source] rounded to `dtype`."""

    source: int
    result: int
    dtype: torch.dtype


class Launch(NamedTuple):
    """One native call. A result has a new register or that of a buffer; -1: absent, or written through a table."""

    call: Call
    operands: tuple[tuple[int, int], ...]  # (slot, register) of those that are present
    results: tuple[int, ...]

    def new_results(self) -> list[tuple[int, ArraySpec]]:
        """(number, spec) of each result that is neither absent nor a buffer."""
        buffers = {output for _, output in self.call.aliases}
        return [
            (at, spec)
            for at, spec in enumerate(self.call.outputs)
            if spec is not None and self.results[at] >= 0 and at not in buffers
        ]


class Given(NamedTuple):
    """What planning knows about a leaf: its packed spec, and whether it is a table of (aligned) addresses."""

    spec: ArraySpec
    listed: bool = False
    aligned: bool = True


class Recorder:
    """The runner that records the steps of a rule."""

    def __init__(self) -> None:
        self.steps: list[Cast | Launch] = []
        self.specs: list[ArraySpec] = []
        self.rows: dict[int, Part] = {}

    def given(self, leaf: Given | None) -> Register | Listed | None:
        """Returns the array that represents a leaf in the rule."""
        if leaf is None:
            return None
        if leaf.listed:
            return Listed(leaf.spec, self.register(ArraySpec(leaf.spec.shape[:1], "int64")), leaf.aligned)
        return self.register(leaf.spec)

    def row(self, leaf: Register, at: int) -> Register:
        """Returns row `at` of a leaf, or the first step of that row if the leaf is a history: float32 [G]."""
        size = math.prod(leaf.spec.shape[1:]) * TORCH_DTYPES[leaf.spec.dtype].itemsize
        found = self.register(ArraySpec(leaf.spec.shape[-1:], leaf.spec.dtype))
        self.rows[found.at] = Part(leaf.at, at * size)
        return found

    def register(self, spec: ArraySpec) -> Register:
        """Returns a new register."""
        self.specs.append(spec)
        return Register(len(self.specs) - 1, spec)

    def __call__(self, call: Call, arrays: Sequence[Register | None]) -> tuple[Register | None, ...]:
        present = tuple((slot, array.at) for slot, array in enumerate(arrays) if array is not None)
        buffers = {output: arrays[slot] for slot, output in call.aliases}  # None if a table has the destinations
        results = tuple(
            buffers[at] if at in buffers else None if spec is None else self.register(spec)
            for at, spec in enumerate(call.outputs)
        )
        ats = tuple(-1 if result is None else result.at for result in results)
        self.steps.append(Launch(call, present, ats))
        return results

    def spec(self, array: Register) -> ArraySpec:
        return array.spec

    def cast(self, array: Register, dtype: str) -> Register:
        if array.spec.dtype == dtype:
            return array
        assert array.at not in self.rows, "a row of a leaf has no tensor that could be cast"
        result = self.register(ArraySpec(array.spec.shape, dtype))
        self.steps.append(Cast(array.at, result.at, TORCH_DTYPES[dtype]))
        return result


class Output(NamedTuple):
    """One result of a rule: its layout, and what its leaves are, as `_native.Program` takes them.

    Attributes:
        leaves: for each leaf, the register of a new array, -1 for nothing, or -2 - n for leaf n of the operands.
    """

    layout: Layout
    leaves: tuple[int, ...]


class Recording(NamedTuple):
    """The steps of a rule. Registers are numbered: first the leaves that are present, in order, then other arrays."""

    steps: tuple[Cast | Launch, ...]
    outputs: tuple[Output, ...]
    specs: tuple[ArraySpec, ...]  # of all registers
    given: int  # number of registers that are leaves
    rows: dict[int, Part]  # of leaves, by register

    @property
    def calls(self) -> list[Call]:
        return [step.call for step in self.steps if isinstance(step, Launch)]

    def made(self) -> list[int]:
        """The registers of results that are not operands, in order, each once."""
        new = (at for output in self.outputs for at in output.leaves if at >= 0)
        return list(dict.fromkeys(new))


def record(
    rule: Rule, static: Hashable, layouts: Sequence[Layout], leaves: Sequence[Given | None], rows: int
) -> Recording:
    """Records the steps of `rule` for operands that are described by `leaves`; raises what the rule raises.

    Args:
        static: the rule's static facts. layouts: the layouts of its operands. leaves: what is known about the leaves of
            all operands. rows: M.
    """
    run = Recorder()
    held = [run.given(leaf) for leaf in leaves]
    rest = iter(held)
    count = len(run.specs)
    operands = rule.operands(*[unflatten(layout, rest, rows, _typed, run.row) for layout in layouts])
    places = {_register(each): n for n, each in enumerate(held) if each is not None}
    outputs = []
    for result in rule.run(run, static, operands):
        parts: list[Any] = []
        layout = flatten(result, parts)
        at = [-1 if part is None else _register(part) for part in parts]
        outputs.append(Output(layout, tuple([-2 - places[n] if n in places else n for n in at])))
    return Recording(tuple(run.steps), tuple(outputs), tuple(run.specs), count, run.rows)


def _register(leaf: Register | Listed) -> int:
    return leaf.table.at if isinstance(leaf, Listed) else leaf.at


def _typed(scales: Register, fmt: Any) -> Register:
    """Returns block scales in the dtype that rules expect; as leaves, E8M0 scales are uint8."""
    return scales._replace(spec=scales.spec._replace(dtype=fmt.scales)) if scales.spec.dtype == "uint8" else scales


def results_of(outputs: Sequence[Output], leaves: Sequence[Leaf], made: Any) -> list[Any]:
    """Assembles the results of a rule, those of several leaves as `Flat`; operands among them stay as they were passed.

    Args:
        leaves: the leaves of the operands. made: the new tensors by register.
    """
    results: list[Any] = []
    for layout, places in outputs:
        parts = [made[at] if at >= 0 else None if at == -1 else leaves[-2 - at] for at in places]
        results.append(parts[0] if layout is None else Flat(layout, tuple(parts)))
    return results


# ---------------------------------------------------------------------------------------------------------------------
# Replay


class Program(NamedTuple):
    """A recording planned for one device.

    Attributes:
        steps: the native program: it allocates, launches, and returns the results, those of several leaves as `Flat`.
        made: the positions of new tensors among the leaves of the results, each tensor once.
        sizes: the leaf that GROUPED_DEBUG=sizes checks, or None.
        device: the index of the CUDA device; -1 for the CPU.
    """

    steps: _native.Program
    made: tuple[int, ...]
    sizes: int | None
    workspace_bytes: int
    device: int


def _program(
    rule: Rule, static: Hashable, layouts: Sequence[Layout], leaves: Sequence[Leaf], rows: int, device: torch.device
) -> Program:
    recording = record(rule, static, layouts, [given_of(each) for each in leaves], rows)
    steps, registers, workspace_bytes = _planned(recording, _addresses(recording, leaves), arch_of(device))
    index, empty = (-1, empty_on_cpu) if device.type == "cpu" else (device.index, empty_on_cuda)
    leaves_of = [at for output in recording.outputs for at in output.leaves]
    returned = {-2 - at for at in leaves_of if at < -1}
    native = _native.Program(
        EXCHANGE,
        steps,
        [(same(layout), list(ats)) if layout else ats[0] for layout, ats in recording.outputs],
        [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and at not in returned],
        registers,
        empty,
        partial(address_table, device=index),
        Flat,
        None if index < 0 else (index, current_device, raw_stream, torch.uint8),
    )
    made = tuple([leaves_of.index(at) for at in recording.made()])
    sizes = sizes_at(rule, layouts) if rule.notes_sizes else None
    return Program(native, made, sizes, workspace_bytes, index)


def _addresses(recording: Recording, leaves: Sequence[Leaf]) -> list[int]:
    """Returns an address for each register, from which the planner learns only whether it is aligned.

    The program will run on all operands with the facts of `leaves`, which include whether an address is aligned. Memory
    that a replay allocates is aligned, and so are tables; their address is 0 here.
    """
    found = [each.data_ptr() if isinstance(each, Tensor) else 0 for each in leaves if each is not None]
    found += [0] * (len(recording.specs) - recording.given)
    for register, row in recording.rows.items():
        found[register] = found[row.whole] + row.offset if found[row.whole] % ALIGNMENT == 0 else 1
    return found


SHARED_WORKSPACE = 1 << 20
"""Launches of a program share one workspace, which saves allocations, unless they need more bytes than this.

A larger one is freed after its launch, as it would count at the peak of memory.
"""

SMALL_TEMPORARY = 1 << 16
"""Temporaries of at most so many bytes share one tensor of at most `SHARED_WORKSPACE`, which saves allocations."""

LINE = 256
"""Each of these temporaries starts at a multiple of so many bytes, so that no two share a line of a cache."""


def _temporaries(recording: Recording) -> tuple[dict[int, int], int]:
    """Returns (by register, the offset of each small temporary in their common tensor; the bytes of that tensor)."""
    tensors = set(recording.made())  # what has to be a tensor of its own
    for step in recording.steps:
        if isinstance(step, Cast):
            tensors |= {step.source, step.result}
    offsets: dict[int, int] = {}
    end = 0
    for step in recording.steps:
        if isinstance(step, Cast):
            continue
        for output, spec in step.new_results():
            size = math.prod(spec.shape) * RESULT_DTYPES[spec.dtype].itemsize
            if step.results[output] not in tensors and size <= min(SMALL_TEMPORARY, SHARED_WORKSPACE - end):
                offsets[step.results[output]] = end
                end += -(-size // LINE) * LINE
    return offsets, end


def _planned(recording: Recording, addresses: Sequence[int], arch: str) -> tuple[list[tuple[Any, ...]], int, int]:
    """Plans a recording. Returns (steps for `_native.Program`, number of registers, bytes of the largest workspace)."""
    keep = set(recording.made())
    temporaries, temporary_bytes = _temporaries(recording)
    temporary = len(recording.specs)  # the register of the tensor with small temporaries
    shared = temporary + 1  # that of the shared workspace, before those of larger ones
    inside = recording.rows | {at: Part(temporary, offset) for at, offset in temporaries.items()}
    steps: list[tuple[Any, ...]] = []
    first_with_temporary = 0  # in `steps`
    workspaces: dict[int, tuple[int, int]] = {}  # by register: the first launch that uses it, its bytes
    for step in reversed(recording.steps):
        if isinstance(step, Cast):
            steps.append((step.source, step.result, step.dtype))
            keep.add(step.source)
            continue
        plan = plans.plan(step.call, arch)
        inputs = len(step.call.inputs)
        registers = [-1] * (inputs + len(step.call.outputs) + 1)
        for slot, register in step.operands:
            registers[slot] = register
        registers[inputs:-1] = step.results
        at_slots = [0 if at < 0 else addresses[at] for at in registers]
        needed = plan.workspace_for(at_slots)
        new = {
            inputs + at: (registers[inputs + at], (spec.shape, _strides(spec.shape), RESULT_DTYPES[spec.dtype]))
            for at, spec in step.new_results()
            if registers[inputs + at] not in temporaries
        }
        offsets = [inside[at].offset if at in inside else 0 for at in registers]
        registers = [inside[at].whole if at in inside else at for at in registers]
        if needed:
            registers[-1] = shared if needed <= SHARED_WORKSPACE else shared + 1 + len(workspaces)
        for part, touched, first in _parts_from_the_last(plan, at_slots):
            own = [register if slot in touched else -1 for slot, register in enumerate(registers[:-1])]
            used = {register for register in (*own[:inputs], registers[-1]) if register >= 0}
            if temporary in own:
                used.add(temporary)
                first_with_temporary = len(steps)
            launcher = _native.Launcher(EXCHANGE, plan, [*own, registers[-1]], offsets, part)
            made = tuple([new[slot] for slot in first if slot in new])
            steps.append((step.call.name, launcher, made, None, tuple(used - keep)))
            keep |= used
        if needed:
            _, most = workspaces.get(registers[-1], (0, 0))
            workspaces[registers[-1]] = (len(steps) - 1, max(needed, most))
    if temporaries:
        name, launcher, made, *rest = steps[first_with_temporary]
        steps[first_with_temporary] = name, launcher, (*made, (temporary, _bytes(temporary_bytes))), *rest
    for workspace, (first_user, count) in workspaces.items():
        name, launcher, made, _, last_used = steps[first_user]
        steps[first_user] = name, launcher, made, (workspace, _bytes(count)), last_used
    sizes = [count for _, count in workspaces.values()]
    return steps[::-1], shared + 1 + len(workspaces), max(sizes, default=0)


def _parts_from_the_last(plan: _native.Plan, addresses: list[int]) -> list[tuple[int, Sequence[int], Sequence[int]]]:
    """Returns for each part of a kernel, from the last to the first: its number, the slots that it touches, and those
    of them that no earlier part touches.

    A kernel in one part has the number -1.

    Args:
        addresses: those of the slots and of the workspace.
    """
    parts = plan.parts_for(addresses)
    if not parts:
        every = range(len(addresses) - 1)
        return [(-1, every, every)]
    found: list[tuple[int, Sequence[int], Sequence[int]]] = []
    for number, slots in enumerate(parts):
        earlier = [slot for part in parts[:number] for slot in part]
        found.append((number, slots, [slot for slot in slots if slot not in earlier]))
    return found[::-1]


def _bytes(count: int) -> tuple[Any, ...]:
    """Returns (shape, strides, dtype) of a tensor of that many bytes."""
    return (count,), (1,), torch.uint8


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def given_of(leaf: Leaf, *, has_memory: bool = True) -> Given | None:
    """Returns what planning knows about a leaf."""
    if leaf is None:
        return None
    if isinstance(leaf, Tensor):
        return Given(spec_of(leaf))
    there = [each for each in leaf if each is not None]
    one = spec_of(there[0])
    is_aligned = not has_memory or all(each.data_ptr() % ALIGNMENT == 0 for each in there)
    return Given(ArraySpec((len(leaf), *one.shape), one.dtype), True, is_aligned)


def execute(program: Program, leaves: list[Any], rows: int) -> list[Any]:
    """Runs a program on the current stream and returns the results of the rule, those of several leaves as `Flat`.

    Args:
        rows: M.
        leaves: the leaves of all operands. Those that are not results are removed from the list, so that rows are freed
            as soon as no launch reads them.
    """
    flags = debug_flags()
    if program.sizes is not None and "sizes" in flags:
        note_sizes(leaves[program.sizes], rows)
    run, device = program.steps.run, program.device
    watched = partial(_launch, flags, device, observer) if flags else observer
    if device < 0:
        return run(leaves, 0, watched)
    if device != current_device():
        with torch.cuda.device(device):
            return run(leaves, raw_stream(device), watched)
    return run(leaves, raw_stream(device), watched)


def program_for(prepared: Prepared, layouts: tuple[Layout, ...], leaves: Sequence[Leaf], rows: int) -> Program:
    """Returns the program for operands that `flatten_all` has flattened, and makes it if there is none yet.

    Args:
        leaves: the first one determines the device. rows: M.

    Raises:
        ValueError, TypeError: the operands do not fit. NotImplementedError: no kernel supports them.
    """
    operands = flats(layouts, leaves)
    program = prepared.programs.find(operands, rows, [])
    if program is None:
        device = _check_plain(leaves, EXCHANGE.describe(tuple(leaves)))
        program = _program(prepared.rule, prepared.static, layouts, leaves, rows, device)
        prepared.programs.keep(operands, rows, program)
    return program


def sizes_at(rule: Rule, layouts: Sequence[Layout]) -> int:
    """Returns the index of the leaf with the group sizes, for a rule that has them."""
    return sum(map(leaf_count, layouts[: rule.operands._fields.index("sizes")]))


def _check_plain(leaves: Sequence[Leaf], facts: bytes | None) -> torch.device:
    """Returns the device of the operands. Raises ValueError for tensors whose memory kernels cannot read."""
    named = [
        (f"operand {at}", each)
        for at, leaf in enumerate(leaves)
        for each in ([leaf] if isinstance(leaf, Tensor) else leaf or [])
        if each is not None
    ]
    _, first = named[0]
    for name, each in named:
        check_operand(name, each, first)
        if facts is None and each.data_ptr() % each.element_size():
            raise ValueError(
                f"`{name}`: it starts at an address that is no multiple of {each.element_size()} bytes, those of an "
                "element, expected one; clone it."
            )
    if facts is None:
        raise ValueError(
            "operands of a torch_bridge operator: tensors without memory (an empty storage), or a list of mixed ones, "
            "expected plain tensors; call grouped_linear, which reports the argument that is wrong. In backward: FSDP2 "
            "did not gather a weight again, for example because a result of its module was changed in place."
        )
    return first.device


observer: Callable[..., None] | None = None
"""The argument `watch` of `_native.Program.run`: what tests and benchmarks run in place of each launch, or None."""


def _launch(
    flags: frozenset[str],
    device: int,
    instead: Callable[..., None] | None,
    name: str,
    launcher: _native.Launcher,
    values: list[Any],
    made: tuple[int, ...],
    stream: int,
) -> None:
    """Runs one launch with the checks of GROUPED_DEBUG."""
    if "poison" in flags:
        has_workspace = launcher.workspace >= 0 and not launcher.continues
        for register in (*made, *([launcher.workspace] if has_workspace else [])):
            values[register].view(torch.uint8).fill_(0xFF)  # bytes that every float type reads as NaN
    if instead is None:
        launcher.launch(values, stream)
    else:
        instead(name, launcher, values, made, stream)
    if "sync" in flags and device >= 0 and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)
