"""How one rule runs in PyTorch: recorded once for its shapes and dtypes, then replayed on addresses.

A rule of `grouped_core.gradients` never looks at values, so what it does follows from the specs of its operands. Its
first run notes casts and native calls; later ones allocate, collect addresses and launch. The same notes, without a
launch, are the fake implementation that torch.compile asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core import _native, calls, plans
from grouped_core.calls import ArraySpec, Call
from grouped_core.debug import debug_flags
from grouped_core.products import Listed
from torch_bridge._decided import Decided
from torch_bridge._memory import (
    EXCHANGE,
    address_table,
    aligned,
    current_device,
    empty_on_cpu,
    empty_on_cuda,
    raw_stream,
)
from torch_bridge.params import check_operand

DTYPES: dict[torch.dtype, str] = {
    getattr(torch, name): name
    for name in (
        *("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    )
}
"""Torch dtypes by the names that specs carry."""

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

E8M0 = torch.float8_e8m0fnu
MADE_DTYPES = TORCH_DTYPES | {"float8_e8m0fnu": torch.uint8}
"""Torch dtypes of results. E8M0 goes through operators as bytes: inductor lowers no operator that reads it and writes
into an argument."""

Operand = Tensor | Sequence[Tensor | None] | None
"""What a rule reads: a tensor, one tensor a group (None: a destination that is skipped), or nothing."""


SYMBOLIC_ROWS = calls.MAX_ROWS
"""Stands for M where torch.compile has a symbol: no K, N or G comes near it."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch dtype in specs; one that specs do not know keeps torch's."""
    return DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


def spec_of(tensor: Tensor) -> ArraySpec:
    """Shape and dtype of a tensor."""
    return ArraySpec(tuple(tensor.shape), dtype_name(tensor.dtype))


def fixed_spec(tensor: Tensor) -> ArraySpec:
    """As `spec_of`; sizes for which torch.compile has symbols become numbers, so that the spec is a key."""
    return ArraySpec(tuple(map(int, tensor.shape)), dtype_name(tensor.dtype))


def rows_spec(tensor: Tensor) -> ArraySpec:
    """As `fixed_spec`, of rows, whose number may be a symbol: `SYMBOLIC_ROWS` then stands for it."""
    if not tensor.shape or not _is_symbol(tensor.shape[0]):
        return fixed_spec(tensor)
    return ArraySpec((SYMBOLIC_ROWS, *map(int, tensor.shape[1:])), dtype_name(tensor.dtype))


@lru_cache(maxsize=64)
def arch_of(device: torch.device) -> str:
    """The arch that plans are made for on `device`: "cpu", "sm_90a".

    Raises:
        ValueError: neither CPU nor CUDA.
    """
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda":
        return _native.device_arch(0 if device.index is None else device.index)
    raise ValueError(f"device {device}: expected a CPU or CUDA device; move the tensors there, or pass `arch`.")


class Register(NamedTuple):
    """Stands for an array while a rule is recorded."""

    at: int
    spec: ArraySpec


class Cast(NamedTuple):
    """values[result] = values[source] rounded to `dtype`."""

    source: int
    result: int
    dtype: torch.dtype


class Launch(NamedTuple):
    """One native call. A result slot has a register, new or that of a buffer; None: absent, or goes to a table."""

    call: Call
    operands: tuple[tuple[int, int], ...]  # (slot, register) of those that are there
    results: tuple[int | None, ...]


Rule = Callable[["Recorder", Any, Sequence[Any]], Sequence[Any]]
"""(runner, static facts, operands) -> results; a module's function, so that it can be a key."""


class Given(NamedTuple):
    """What planning knows of an operand: its packed spec, and whether a table of (aligned) addresses gives it."""

    spec: ArraySpec
    listed: bool = False
    aligned: bool = True


class Recorder:
    """The runner that notes what a rule does."""

    def __init__(self, operands: Sequence[Given | None]) -> None:
        self.steps: list[Cast | Launch] = []
        self.specs: list[ArraySpec] = []
        self.operands = [None if each is None else self._operand(each) for each in operands]

    def _operand(self, given: Given) -> Register | Listed:
        if given.listed:
            return Listed(given.spec, self._register(ArraySpec(given.spec.shape[:1], "int64")), given.aligned)
        return self._register(given.spec)

    def _register(self, spec: ArraySpec) -> Register:
        self.specs.append(spec)
        return Register(len(self.specs) - 1, spec)

    def __call__(self, call: Call, arrays: Sequence[Register | None]) -> tuple[Register | None, ...]:
        present = tuple((slot, array.at) for slot, array in enumerate(arrays) if array is not None)
        buffers = {output: arrays[slot] for slot, output in call.aliases}  # None where a table says where to write
        results = tuple(
            buffers[at] if at in buffers else None if spec is None else self._register(spec)
            for at, spec in enumerate(call.outputs)
        )
        ats = tuple(None if result is None else result.at for result in results)
        self.steps.append(Launch(call, present, ats))
        return results

    def spec(self, array: Register) -> ArraySpec:
        return array.spec

    def cast(self, array: Register, dtype: str) -> Register:
        if array.spec.dtype == dtype:
            return array
        result = self._register(ArraySpec(array.spec.shape, dtype))
        self.steps.append(Cast(array.at, result.at, TORCH_DTYPES[dtype]))
        return result


class Recording(NamedTuple):
    """What a rule does. Registers are numbered: operands that are there, in order, then whatever is made."""

    steps: tuple[Cast | Launch, ...]
    results: tuple[Register | None, ...]
    registers: int

    @property
    def calls(self) -> list[Call]:
        return [step.call for step in self.steps if isinstance(step, Launch)]


def record(rule: Rule, static: Hashable, operands: Sequence[Given | None]) -> Recording:
    """Runs `rule` on what is known of its operands; raises what the rule raises."""
    run = Recorder(operands)
    results = rule(run, static, run.operands)
    return Recording(tuple(run.steps), tuple(results), len(run.specs))


def calls_of(rule: Rule, static: Hashable, operands: Sequence[Operand]) -> list[Call]:
    """Native calls that `rule` makes for operands like these; meta tensors do."""
    return record(rule, static, [None if each is None else _given(each, has_memory=False) for each in operands]).calls


planned: list[list[Call]] = []
"""Lists of those who want to know the calls that `imagine` would launch, innermost last."""


# ---------------------------------------------------------------------------------------------------------------------
# Replay


class _Planned(NamedTuple):
    """A `Launch` with its kernel chosen and everything prepared that does not depend on addresses."""

    call: str  # its name
    launch: Callable[[list[Any], int], None]  # on the values of all registers, and a stream
    made: tuple[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype], ...]  # register, shape, strides, dtype
    last_used: tuple[int, ...]  # registers that nobody reads afterwards


class Program(NamedTuple):
    """A recording planned for one device. Its last register is the workspace, one for all launches."""

    steps: tuple[Cast | _Planned, ...]
    results: tuple[int | None, ...]
    blank: list[None]  # registers beyond the operands
    workspace_bytes: int
    device: int  # the CUDA device, -1 on the CPU
    empty: Callable[..., Tensor]  # (shape, strides, dtype) -> new tensor


def _program(rule: Rule, static: Hashable, operands: Sequence[Operand], device: torch.device) -> Program:
    specs = [None if each is None else _given(each) for each in operands]
    recording = record(rule, static, specs)
    # Of addresses only whether they are aligned matters, which facts tell; what a replay allocates is.
    places = [0 if not isinstance(each, Tensor) else each.data_ptr() for each in operands if each is not None]
    given = len(places)
    made = recording.registers - given
    keep = {result.at for result in recording.results if result is not None}
    steps: list[Cast | _Planned] = []
    workspace_bytes = 0
    for step in reversed(recording.steps):
        if isinstance(step, Cast):
            steps.append(step)
            keep.add(step.source)
            continue
        read = {register for _, register in step.operands}
        plan = plans.plan(step.call, arch_of(device))
        inputs = len(step.call.inputs)
        registers = [-1] * (inputs + len(step.call.outputs) + 1)
        for slot, register in step.operands:
            registers[slot] = register
        for slot, register in enumerate(step.results, inputs):
            registers[slot] = -1 if register is None else register
        needed = plan.workspace_for([places[at] if 0 <= at < given else 0 for at in registers])
        if needed:
            registers[-1] = recording.registers
        workspace_bytes = max(workspace_bytes, needed)
        shared = {output for _, output in step.call.aliases}
        new = [
            (register, spec.shape, _strides(spec.shape), MADE_DTYPES[spec.dtype])
            for at, (register, spec) in enumerate(zip(step.results, step.call.outputs, strict=True))
            if register is not None and spec is not None and at not in shared
        ]
        steps.append(
            _Planned(
                step.call.name,
                _native.Launcher(EXCHANGE, plan, registers).launch,
                tuple(new),
                tuple(register for register in read - keep if register >= given),
            )
        )
        keep |= read
    results = tuple(None if result is None else result.at for result in recording.results)
    index, empty = (-1, empty_on_cpu) if device.type == "cpu" else (device.index, empty_on_cuda)
    return Program(tuple(reversed(steps)), results, [None] * (made + 1), workspace_bytes, index, empty)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _given(operand: Tensor | Sequence[Tensor | None], *, has_memory: bool = True) -> Given:
    if isinstance(operand, Tensor):
        return Given(spec_of(operand))
    members = [each for each in operand if each is not None]
    one = spec_of(members[0])
    return Given(ArraySpec((len(operand), *one.shape), one.dtype), True, not has_memory or aligned(members))


_programs: Decided[Hashable, Program] = Decided()


def run(rule: Rule, static: Hashable, operands: tuple[Operand, ...], flags: frozenset[str]) -> list[Any]:
    """The results of `rule` on real tensors, launched on the current stream of their device.

    Args:
        operands: the first one that is there says which device it is. flags: of GROUPED_DEBUG.

    Raises:
        ValueError, TypeError: the operands do not fit. NotImplementedError: no kernel takes them.
    """
    facts = EXCHANGE.describe(operands)
    program = _programs.get((rule, static, facts))
    if program is None:
        device = _check_plain(operands, facts)
        program = _programs.keep((rule, static, facts), _program(rule, static, operands, device))
    if program.device >= 0 and program.device != current_device():
        with torch.cuda.device(program.device):
            return _replay(program, operands, flags)
    return _replay(program, operands, flags)


def execute(rule: Rule, static: Hashable, operands: tuple[Operand, ...], *_: Any) -> list[Any]:
    """`run` in the form that `imagine` shares, for operators that are written once for both."""
    return run(rule, static, operands, debug_flags())


def _check_plain(operands: Sequence[Operand], facts: bytes | None) -> torch.device:
    """The device of the operands. Raises ValueError for what kernels cannot read where it lies."""
    named = [
        (f"operand {at}", each)
        for at, operand in enumerate(operands)
        for each in ([operand] if isinstance(operand, Tensor) else operand or [])
        if each is not None
    ]
    _, first = named[0]
    for name, each in named:
        check_operand(name, each, first)
    if facts is None:
        raise ValueError(
            "operands of a torch_bridge operator: tensors without memory, or a list of unlike ones, expected plain "
            "tensors; call grouped_linear, which says what is wrong with its arguments."
        )
    return first.device


def _replay(program: Program, operands: Sequence[Operand], flags: frozenset[str]) -> list[Any]:
    stream = 0 if program.device < 0 else raw_stream(program.device)
    values: list[Any] = [
        each if isinstance(each, Tensor) else address_table(each, program.device)
        for each in operands
        if each is not None
    ]
    values += program.blank
    if program.workspace_bytes:
        values[-1] = program.empty((program.workspace_bytes,), (1,), torch.uint8)
    for step in program.steps:
        if isinstance(step, Cast):
            values[step.result] = values[step.source].to(step.dtype)
        else:
            _launch(step, values, program, stream, flags)
    return [None if index is None else values[index] for index in program.results]


def _launch(step: _Planned, values: list[Any], program: Program, stream: int, flags: frozenset[str]) -> None:
    for register, shape, strides, dtype in step.made:
        values[register] = program.empty(shape, strides, dtype)
    if "poison" in flags:
        _poison(values[-1], *(values[register] for register, *_ in step.made))
    step.launch(values, stream)
    for register in step.last_used:
        values[register] = None
    if "sync" in flags and program.device >= 0 and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(program.device)


def _poison(*tensors: Tensor | None) -> None:
    """Fills tensors with bytes that every float type reads as NaN."""
    for each in tensors:
        if each is not None:
            each.view(torch.uint8).fill_(0xFF)


# ---------------------------------------------------------------------------------------------------------------------
# Without arrays


def _is_symbol(length: Any) -> bool:
    return isinstance(length, torch.SymInt) and length.node.expr.is_Symbol


def settle_rows(*operands: Any) -> None:
    """Makes M a number unless it is a symbol in all of these, None apart, of which a quantised one is no tensor."""
    rows = [each.shape[0] if isinstance(each, Tensor) and each.shape else 0 for each in operands if each is not None]
    if not all(map(_is_symbol, rows)):
        for each in rows:
            int(each)


def _known(length: Any, symbol: Any) -> int:
    """A number for a length that follows from M, `SYMBOLIC_ROWS` standing for M if that is `symbol`."""
    if symbol is None or not isinstance(length, torch.SymInt) or length.node.expr.free_symbols != {symbol.node.expr}:
        return int(length)
    return int(length.node.expr.subs(symbol.node.expr, SYMBOLIC_ROWS))


def fake(
    rule: Rule,
    static: Hashable,
    operands: Sequence[Any],
    device: torch.device,
    rows: Sequence[int] = (),
    forms: Sequence[int] = (),
    lengths: Callable[[Any], Sequence[Any]] | None = None,
) -> list[Any]:
    """New tensors shaped as the results of `rule`.

    Args:
        rows: positions of operands that have M rows, which may be a symbol; without any M becomes a number too.
        forms: positions of operands any of whose axes may follow from M.
        lengths: of axes of the results that follow from M in another way than being it.

    NOTE: specs must be hashable, and torch's symbols are not. M alone may stay symbolic, other axes become numbers.
    """
    given = [None if each is None else _given(each, has_memory=False) for each in operands]
    for at, each in enumerate(given):  # numbers first: M may be the same symbol
        if each is not None and at not in forms:
            for length in each.spec.shape[at in rows :]:
                int(length)
    found = [operands[at].shape[0] for at in rows if operands[at] is not None]
    symbol = found[0] if found and all(map(_is_symbol, found)) else None
    if symbol is not None:
        for length in found:
            torch._check(length == symbol)

    def spec(each: Given | None) -> Given | None:
        if each is None:
            return None
        return each._replace(
            spec=ArraySpec(tuple(_known(length, symbol) for length in each.spec.shape), each.spec.dtype)
        )

    recording = record(rule, static, [spec(each) for each in given])
    if planned:
        planned[-1] += recording.calls
    symbols = {}
    if symbol is not None:
        symbols = dict(zip(lengths(SYMBOLIC_ROWS), lengths(symbol), strict=True)) if lengths else {}
        symbols[SYMBOLIC_ROWS] = symbol
    made = []
    for result in recording.results:
        if result is None:
            made.append(None)
            continue
        shape = [symbols.get(length, length) for length in result.spec.shape]
        made.append(torch.empty(shape, dtype=MADE_DTYPES[result.spec.dtype], device=device))
    return made


def imagine(rule: Rule, static: Hashable, operands: tuple[Operand, ...], *facts: Any) -> list[Any]:
    """`fake` in the form that `execute` shares; `facts` are its arguments from `rows` on."""
    first = next(each for each in operands if each is not None)
    if not isinstance(first, Tensor):
        first = next(each for each in first if each is not None)
    return fake(rule, static, operands, first.device, *facts)
