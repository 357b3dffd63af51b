"""One native call under suspicion: results start as NaN between guard bytes and are held against the oracle's bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from grouped_core import _native, calls, plans, reference_quantized, reference_routing
from grouped_core.calls import RESULTS, SLOTS, ArraySpec, Call, spec_of
from grouped_core.linear_spec import Linear, Names
from grouped_core.recipes import plain
from grouped_core.reference import Oracle, is_quantized
from tests import asserts, bounds, cases
from tests.bounds import SCALES, Bounded, Expected

_GUARD = 256  # bytes before and after each result
_CANARY = 0xA5
_NAN = 0xFF  # this byte throughout is a NaN in every float type


JOINED = "_joined_"
"""In the names of kernels that take nothing but weights in two arrays."""


LOW = "_low_"
"""In the names of kernels that take nothing but products with a low-rank one beside them."""


TAKE_LOW = (
    *("_bf16_sm90", "_codes_sm90", "_widened_cuda", "_quantized_fp8_cuda", "_quantized_cuda", "_composed_cuda"),
    *("_quantized_cpu", "_composed_cpu"),
)
"""Ends of the names of kernels that take a low-rank product beside the one that they compute."""


QUANTIZED = "_quantized_"
"""In the names of kernels that give quantised results alone."""


def takes_low(kernel: str) -> bool:
    """Whether a kernel takes a product with a low-rank one beside it."""
    return kernel.endswith(TAKE_LOW)


def kernels(call: str, *, joined: bool = False, quantized: bool = False, low: bool | None = False) -> list[Any]:
    """Names of the kernels of `call`, as test parameters; those that need a GPU or a wider CPU carry a mark.

    Args:
        joined: those of weights in two arrays too. quantized: those of quantised results instead of plain ones.
        low: those that take a low-rank product instead of those that take calls without one; None: both.
    """
    names = [n for n in _native.kernels()[call] if (joined or JOINED not in n) and quantized == (QUANTIZED in n)]
    names = [n for n in names if low is None or (takes_low(n) if low else LOW not in n)]
    return [_parameter(name) for name in names]


def _parameter(kernel: str) -> Any:
    if "_cpu" not in kernel:
        return pytest.param(kernel, marks=pytest.mark.gpu)
    if wider_than_here(kernel):
        return pytest.param(kernel, marks=pytest.mark.wider)
    return kernel


def wider_than_here(kernel: str) -> bool:
    """Whether a kernel is of instructions that this CPU lacks."""
    narrow = ("plain",) if kernel.endswith("_avx2") else ("plain", "avx2") if kernel.endswith("_avx512") else ()
    return _native.cpu_isa() in narrow


def plain_kernels(call: str, kernel: str) -> str:
    """Those of `call` on the device of `kernel` that give plain results, as a list to pin."""
    device = [name for name in _native.kernels()[call] if ("_cpu" in name) == ("_cpu" in kernel)]
    return ",".join(name for name in device if QUANTIZED not in name)


def on_cpu(call: str) -> list[str]:
    """Names of the kernels of `call` that run here, whatever the machine."""
    return [name for name in _native.kernels()[call] if "_cpu" in name]


def may_refuse(kernel: str, call: Call) -> bool:
    """Whether a kernel may decline a call that tests ask of it: on the CPU nothing but what is listed here."""
    if "_cpu" not in kernel:
        return True
    operands = dict(zip(SLOTS[call.name], call.inputs, strict=True))
    weight, halves = operands.get("rhs"), operands.get("rhs_up") is not None
    odd = False
    if call.name == "grouped_matmul" and halves and weight is not None:
        params: dict[str, Any] = dict(call.params)
        odd = weight.shape[params["rhs_axis"]] % 2 != 0
    if JOINED in kernel:  # for weights in two arrays that no other kernel reads in place
        return not odd
    return odd or wider_than_here(kernel)


class _Cpu:
    """Memory where the CPU kernels read it."""

    arch = "cpu"
    stream = 0

    def put(self, array: NDArray[Any], *, unaligned: bool = False) -> NDArray[Any]:
        return cases.unaligned(array) if unaligned else np.ascontiguousarray(array)

    def address(self, array: NDArray[Any]) -> int:
        return array.ctypes.data

    def back(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    def dtype(self, name: str) -> Any:
        return np.dtype(name)

    def wait(self) -> None:
        pass


class _Gpu:
    """Memory of the first GPU, by way of torch; bytes only, so that every element type passes."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.arch = _native.device_arch(0)
        self.stream = torch.cuda.current_stream().cuda_stream

    def put(self, array: NDArray[Any], *, unaligned: bool = False) -> Any:
        data = np.ascontiguousarray(array)
        if data.dtype.isbuiltin != 1:
            data = data.view(f"u{data.itemsize}")
        held = self.torch.from_numpy(data.copy()).cuda()
        if not unaligned:
            return held
        room = self.torch.empty(data.size + 1, dtype=held.dtype, device="cuda")[1:].view(held.shape)
        return room.copy_(held)

    def address(self, array: Any) -> int:
        return array.data_ptr()

    def back(self, array: Any) -> NDArray[Any]:
        return array.cpu().numpy()

    def dtype(self, name: str) -> Any:
        return getattr(self.torch, name)

    def wait(self) -> None:
        self.torch.cuda.synchronize()


class Native:
    """A runner over NumPy arrays; every call that the oracle knows is checked on the very operands it got.

    Args:
        kernel: pinned for the call it belongs to; a refusal skips the test with the kernel's reason, if it is one that
            it may refuse (`may_refuse`), and fails else. Several, with commas: the first that takes the call, and for
            addresses that it does not, the next. None: dispatch.
        dlpack: through the DLPack entry instead of plan and addresses.
        check: compare with the oracle.
        unaligned: operands and result start one element past an aligned address.
    """

    def __init__(
        self, kernel: str | None = None, *, dlpack: bool = False, check: bool = True, unaligned: bool = False
    ) -> None:
        self.kernel = kernel
        self.dlpack = dlpack
        self.check = check
        self.unaligned = unaligned
        self.memory = _Gpu() if kernel and "_cpu" not in kernel else _Cpu()

    def __call__(self, call: Call, arrays: Sequence[Any]) -> tuple[Any, ...]:
        if self.kernel and self.kernel.split(",")[0] in _native.kernels()[call.name]:
            call = dataclasses.replace(call, implementation=self.kernel)
        plan = plans.attempt(call, self.memory.arch)
        if not plan.kernel:
            reasons = "; ".join(f"{kernel}: {reason}" for kernel, reason in plan.refusals)
            assert all(may_refuse(kernel, call) for kernel, _ in plan.refusals), f"{call.name} has to run: {reasons}"
            pytest.skip(reasons)
        into = {result: arrays[slot] for slot, result in call.aliases}
        tabled = dict(zip(SLOTS[call.name], call.inputs, strict=True)).get("into_table") is not None
        guarded = [
            None if tabled or spec is None else self._buffer(spec, into.get(i)) for i, spec in enumerate(call.outputs)
        ]
        self._launch(call, plan, arrays, guarded)
        if tabled:
            return (None,)
        results = tuple(
            None if spec is None else self._result(buffer, spec, plan.kernel)
            for buffer, spec in zip(guarded, call.outputs, strict=True)
        )
        if self.check and all(table is None for s, table in zip(SLOTS[call.name], arrays, strict=True) if "table" in s):
            self.compare(call, arrays, results, plan.kernel)
        return results

    def compare(self, call: Call, arrays: Sequence[Any], results: Sequence[Any], kernel: str) -> None:
        """Results against the oracle's: bit by bit where bits are promised, else within the bound."""
        exact = call.name in (*reference_quantized.CALLS, *reference_routing.EXACT)
        if exact:
            expected = Oracle()(call, arrays)
        elif call.name in reference_routing.CALLS:
            expected = bounds.routing(call, arrays)
        else:
            names = zip(SLOTS[call.name], arrays, strict=True)
            codes = ("group_sizes", "lhs", "rhs", *SCALES) if is_quantized(call) else ("group_sizes",)
            bounded = [a if a is None or s in codes else Bounded.of(a) for s, a in names]
            expected = Expected({call.name: kernel})(call, bounded)
        for name, result, wanted in zip(RESULTS[call.name], results, expected, strict=True):
            if result is not None:
                same = exact or not isinstance(wanted, Bounded)
                (asserts.bitwise if same else asserts.within)(result, wanted, f"{name} of {kernel}")

    def _buffer(self, spec: ArraySpec, into: NDArray[Any] | None) -> Any:
        dtype = cases.numpy_dtype(spec.dtype)
        inner, front = int(np.prod(spec.shape)) * dtype.itemsize, self._front(spec)
        memory = np.full(front + inner + _GUARD, _CANARY, np.uint8)
        body = memory[front : front + inner]
        body[:] = _NAN if into is None else np.ascontiguousarray(into).view(np.uint8).reshape(-1)
        return self.memory.put(memory)

    def _front(self, spec: ArraySpec) -> int:
        """Bytes before a result."""
        return _GUARD + (cases.numpy_dtype(spec.dtype).itemsize if self.unaligned else 0)

    def _result(self, guarded: Any, spec: ArraySpec, kernel: str) -> NDArray[Any]:
        memory = self.memory.back(guarded)
        front = self._front(spec)
        body = memory[front:-_GUARD]
        for name, guard in (("before", memory[:front]), ("behind", memory[-_GUARD:])):
            assert (guard == _CANARY).all(), f"{kernel} wrote {name} its result"
        return body.view(cases.numpy_dtype(spec.dtype)).reshape(spec.shape).copy()

    def _launch(self, call: Call, plan: _native.Plan, arrays: Sequence[Any], guarded: list[Any]) -> None:
        held = [None if array is None else self.memory.put(array, unaligned=self.unaligned) for array in arrays]
        if self.dlpack:
            self._call(call, held, guarded)
            self.memory.wait()
        else:
            addresses = [0 if a is None else self.memory.address(a) for a in held]
            targets = [
                0 if buffer is None or spec is None else self.memory.address(buffer) + self._front(spec)
                for buffer, spec in zip(guarded, call.outputs, strict=True)
            ]
            for slot, result in call.aliases:
                addresses[slot] = targets[result]
            self._at(plan, [*addresses, *targets])

    def _at(self, plan: _native.Plan, addresses: list[int]) -> None:
        """The launch, with a workspace as small as it may be, and nothing written behind it."""
        needed = plan.workspace_for([*addresses, 0])
        memory = np.full(needed + _GUARD, _NAN, np.uint8)
        memory[needed:] = _CANARY
        workspace = self.memory.put(memory)
        plan.launch([*addresses, self.memory.address(workspace) if needed else 0], self.memory.stream)
        self.memory.wait()
        assert (self.memory.back(workspace)[needed:] == _CANARY).all(), f"{plan.kernel} wrote behind its workspace"

    def _body(self, guarded: Any, spec: ArraySpec) -> Any:
        """A result between its guards, as unsigned integers."""
        width = cases.numpy_dtype(spec.dtype).itemsize
        body = guarded[self._front(spec) : guarded.shape[0] - _GUARD]
        return body.view(self.memory.dtype(f"uint{8 * width}")).reshape(spec.shape)

    def _call(self, call: Call, held: list[Any], guarded: list[Any]) -> None:
        outputs = [
            None if buffer is None or spec is None else (self._body(buffer, spec), spec.dtype)
            for buffer, spec in zip(guarded, call.outputs, strict=True)
        ]
        for slot, result in call.aliases:
            aliased = outputs[result]
            held[slot] = None if aliased is None else aliased[0]
        inputs = [
            None if array is None or given is None else (_bits(array), given.dtype)
            for array, given in zip(held, call.inputs, strict=True)
        ]
        params = dict(call.params)
        arch, stream = self.memory.arch, self.memory.stream
        _native.call(call.name, arch, call.implementation, inputs, outputs, params, self._workspace, stream)

    def _workspace(self, count: int) -> Any:
        return self.memory.put(np.full(count, _NAN, np.uint8))

    def hold(
        self, members: Sequence[NDArray[Any] | None], *, unaligned: Container[int] = ()
    ) -> tuple[list[Any], NDArray[np.int64]]:
        """(arrays where the kernel reads them, the table of their addresses); None has address 0.

        Args:
            unaligned: members that are one element past an aligned address.
        """
        held = [
            None if member is None else self.memory.put(member.copy(), unaligned=g in unaligned)
            for g, member in enumerate(members)
        ]
        return held, np.array([0 if each is None else self.memory.address(each) for each in held], np.int64)

    def release(self, held: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
        """What a held array contains now."""
        return self.memory.back(held).view(dtype)

    def spec(self, array: NDArray[Any]) -> ArraySpec:
        """Shape and dtype."""
        return spec_of(array)

    def cast(self, array: NDArray[Any], dtype: str) -> NDArray[Any]:
        """The array rounded to `dtype`."""
        return array.astype(cases.numpy_dtype(dtype))


def _bits(array: Any) -> Any:
    if isinstance(array, np.ndarray) and array.dtype.isbuiltin != 1:
        return array.view(f"u{array.itemsize}")
    return array


PRODUCTS = ("forward", "dgrad", "wgrad")


def product(
    run: Native,
    which: str,
    p: cases.Problem,
    *,
    result_dtype: str | None = None,
    recipe: dict[str, Any] | None = None,
    halves: bool = False,
    **options: Any,
) -> NDArray[Any]:
    """One of the three products of a problem; `options` are arrays by slot (bias, row_scale, into) and flags.

    With `halves` the weight, or its gradient, is two arrays. The gradient's are computed apart and come joined; forward
    makes the columns of each in turn, in `into`, which must be given.
    """
    op = Linear(Names("x", "w"), transposed=p.transposed)
    k_axis, n_axis = op.weight_axes()
    if which == "wgrad":
        (lhs, rhs), axes = ((p.dy, p.x) if p.transposed else (p.x, p.dy)), (0, 0)
    else:
        lhs, rhs, axes = (p.x, p.w, (1, k_axis)) if which == "forward" else (p.dy, p.w, (1, n_axis))
    if halves and which == "wgrad":
        columns = [(half, 0) if p.transposed else (0, half) for half in (1, 2)]
        found = [_product(run, lhs, rhs, axes, p, result_dtype, recipe, options, columns=each) for each in columns]
        return np.concatenate(found, axis=n_axis)
    if not halves:
        return _product(run, lhs, rhs, axes, p, result_dtype, recipe, options)
    parts = [np.ascontiguousarray(part) for part in np.split(rhs, 2, axis=n_axis)]
    if which == "dgrad":
        return _product(run, lhs, parts[0], axes, p, result_dtype, recipe, options, up=parts[1])
    result = options["into"]
    for half, part in enumerate(parts, 1):
        before, width = result, parts[0].shape[n_axis]
        wanted = {**options, "into": before, "result_half": half}
        result = _product(run, lhs, part, axes, p, result_dtype, recipe, wanted)
        others = slice(width, None) if half == 1 else slice(width)
        asserts.bitwise(result[:, others], before[:, others], f"columns beside half {half}")
    return result


def _product(
    run: Native,
    lhs: NDArray[Any],
    rhs: NDArray[Any],
    axes: tuple[int, int],
    p: cases.Problem,
    result_dtype: str | None,
    recipe: dict[str, Any] | None,
    options: dict[str, Any],
    *,
    up: NDArray[Any] | None = None,
    columns: tuple[int, int] = (0, 0),
) -> NDArray[Any]:
    dtype = p.x.dtype.name
    arrays = {"lhs": lhs, "rhs": rhs, "group_sizes": p.group_sizes}
    if up is not None:
        arrays["rhs_up"] = up
    arrays.update((name, a) for name, a in options.items() if isinstance(a, np.ndarray))
    specs = {name: spec_of(arrays[name]) for name in ("bias", "row_scale", "into", "rhs_up") if name in arrays}
    flags = {name: value for name, value in options.items() if value is not None and name not in arrays}
    call = calls.grouped_matmul(
        spec_of(lhs),
        spec_of(rhs),
        axes,
        spec_of(p.group_sizes),
        result_dtype or ("bfloat16" if dtype.startswith("float8") else dtype),
        recipe=plain(lhs.dtype.name, rhs.dtype.name).replace(**(recipe or {})),
        halves=columns,
        **specs,
        **flags,
    )
    return run(call, [arrays.get(slot) for slot in SLOTS["grouped_matmul"]])[0]
