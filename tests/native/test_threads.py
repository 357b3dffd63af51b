"""Launches as the first thing that a thread does with CUDA: calls of the driver need a context, and make none."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from typing import Any

import numpy as np
import pytest

from grouped_core import _native, plans
from grouped_core.calls import RESULTS, SLOTS, ArraySpec, Call
from tests import asserts, cases
from tests.native.every_call import every_call

pytestmark = pytest.mark.gpu

CALLS = every_call(3, 64, 256, 384)
KERNELS = [
    (name, kernel) for name, kernels in _native.kernels().items() for kernel in ("", *kernels) if "_cpu" not in kernel
]
"""Each kernel, and what dispatch chooses."""


def current_context() -> int | None:
    """That of this thread, asked of the driver itself."""
    context = ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value


class Launch:
    """A plan with operands on the first GPU."""

    def __init__(self, call: Call, plan: _native.Plan) -> None:
        import torch

        self.torch, self.plan = torch, plan
        self.specs = dict(zip(SLOTS[call.name], call.inputs, strict=True))
        self.held = {name: self._operand(name, spec) for name, spec in self.specs.items() if spec is not None}
        self.results = [None if spec is None else self._zeros(spec) for spec in call.outputs]
        for name, spec in self.specs.items():
            if spec is not None and name.endswith("_table"):
                self.held[name] = self._table(call.name, name.removesuffix("_table"), spec)
        addresses = [self.held[name].data_ptr() if name in self.held else 0 for name in SLOTS[call.name]]
        targets = [0 if result is None else result.data_ptr() for result in self.results]
        for slot, name in enumerate(SLOTS[call.name]):
            if name in self.held and name.startswith("into") and not name.endswith("_table"):
                addresses[slot] = targets[0 if name == "into" else RESULTS[call.name].index(name.removeprefix("into_"))]
        if "into_table" in self.held:
            targets = [0]
        needed = plan.workspace_for([*addresses, *targets, 0])
        self.workspace = torch.zeros(needed, dtype=torch.uint8, device="cuda")
        self.addresses = [*addresses, *targets, self.workspace.data_ptr() if needed else 0]

    def _zeros(self, spec: ArraySpec) -> Any:
        count = int(np.prod(spec.shape)) * cases.numpy_dtype(spec.dtype).itemsize
        return self.torch.zeros(count, dtype=self.torch.uint8, device="cuda")

    def _operand(self, name: str, spec: ArraySpec) -> Any:
        """Bytes that are small positive numbers in every type; sizes that sum to less than M."""
        made = self._zeros(spec)
        if name == "group_sizes":
            return self.torch.tensor([21, 0, 40], dtype=self.torch.int32, device="cuda")
        if name != "skip":
            made += self.torch.arange(len(made), device="cuda").remainder(16).to(self.torch.uint8) + 48
        return made

    def _table(self, call: str, packed: str, spec: ArraySpec) -> Any:
        groups, held = spec.shape[-1], self.held[packed]
        addresses = [held.data_ptr() + g * len(held) // groups for g in range(groups)]
        if call.startswith("shard"):
            whole = self.specs[packed]
            assert whole is not None, "a table comes with its operand"
            addresses += [0] * groups + [int(np.prod(whole.shape[1:]))] * groups
        return self.torch.tensor(addresses, dtype=self.torch.int64, device="cuda")

    def run(self, stream: int) -> None:
        self.plan.launch(self.addresses, stream)

    def take(self) -> list[np.ndarray]:
        """What the launch wrote, which is then zero again."""
        self.torch.cuda.synchronize()
        written = [*self.results, self.held["into"] if "into_table" in self.held else None]
        found = [each.cpu().numpy() for each in written if each is not None]
        for each in written:
            if each is not None:
                each.zero_()
        self.torch.cuda.synchronize()
        return found


def in_a_new_thread(launch: Launch, stream: int) -> tuple[int | None, int | None]:
    """Launches; the contexts that were current in the thread before and after."""
    found: list[Any] = []

    def work() -> None:
        before = current_context()
        try:
            launch.run(stream)
            found.append((before, current_context()))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def test_a_question_that_failed_fails_no_launch():
    """The runtime keeps its last error, which the next launch would take for its own."""
    call = next(call for call in CALLS if call.name == "scale_rows")
    launch = Launch(call, plans.attempt(call, _native.device_arch(0)))
    with pytest.raises(RuntimeError, match="asking for the device's arch: "):
        _native.device_arch(4096)
    launch.run(0)
    launch.take()


@pytest.mark.rule("ERR-7")
@pytest.mark.parametrize(("name", "kernel"), KERNELS, ids=[kernel or f"{name}-dispatch" for name, kernel in KERNELS])
def test_the_first_gpu_work_of_a_thread(name, kernel):
    """The bits of a launch in a thread that has a context; a stream of its own says the device, and leaves no trace."""
    import torch

    arch = _native.device_arch(0)
    own = torch.cuda.Stream()
    tried = [dataclasses.replace(call, implementation=kernel) for call in CALLS if call.name == name]
    taken = {plan.kernel: (call, plan) for call in tried if (plan := plans.attempt(call, arch)).kernel}
    if not taken:
        pytest.skip(f"no call of these shapes: {plans.attempt(tried[0], arch).refusals}")
    for chosen, (call, plan) in taken.items():
        launch = Launch(call, plan)
        launch.take()  # results of tables are operands, too
        launch.run(0)
        expected = launch.take()
        for stream in (0, own.cuda_stream):
            before, after = in_a_new_thread(launch, stream)
            assert before is None, "a new thread has no context"
            assert (after is None) == (stream != 0)
            for result, wanted in zip(launch.take(), expected, strict=True):
                asserts.bitwise(result, wanted, f"{chosen} on stream {stream:#x}")
