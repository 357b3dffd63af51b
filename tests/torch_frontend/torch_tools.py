"""Helpers of the PyTorch frontend's tests: problems as tensors, and a count of native launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from grouped_core.linear_spec import Linear
from grouped_core.recipes import Recipe
from tests import cases
from torch_bridge import _record, exchange
from torch_bridge._checks import NAMES


def tensor(array: NDArray[Any]) -> Tensor:
    """A copy of `array` as a tensor."""
    return exchange.from_array(array).clone()


class Tensors(NamedTuple):
    """A problem as tensors; weights and bias packed."""

    x: Tensor
    w: Tensor
    sizes: Tensor
    bias: Tensor
    row_scale: Tensor
    dy: Tensor


def tensors(problem: cases.Problem) -> Tensors:
    """Tensors of a problem, none of which needs a gradient."""
    return Tensors(
        *map(tensor, (problem.x, problem.w, problem.group_sizes, problem.bias, problem.row_scale, problem.dy))
    )


def small(name: str = "tail", dtype: str = "float32", *, transposed: bool = True, tail: float = cases.TAIL) -> Tensors:
    """Tensors of one named problem, in torch's layout."""
    return tensors(cases.problem(cases.named(name), dtype, transposed=transposed, tail=tail))


def operation(
    transposed: bool = True, scale_bias: bool = False, recipe: Recipe | None = None, implementation: str = ""
) -> Linear:
    """What `grouped_linear` asks of the core."""
    return Linear(NAMES, transposed, recipe, scale_bias, implementation=implementation)


def leaf(value: Tensor, needed: bool = True) -> Any:
    """A copy without history that does or does not need a gradient."""
    return value.detach().clone().requires_grad_(needed)


def manual_seed(seed: int) -> None:
    """`torch.manual_seed`, where there is no GPU for the generator of the CPU alone.

    For each kind of device that it has not met yet PyTorch notes the seed with the stack as text: 4 ms in all.
    """
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(seed)


def leaves(packed: Tensor, needed: bool = True) -> Any:
    """The members of a packed tensor as tensors of their own."""
    return [leaf(member, needed) for member in packed]


@contextmanager
def watched(note: Callable[[str, Any, list[Any], tuple[int, ...]], None]) -> Iterator[None]:
    """Calls `note` before each launch inside, also of each part of a kernel: with the native call, its launcher, the
    registers, and those of its new results.
    """
    original = _record.observer

    def noted(name: str, launcher: Any, values: list[Any], made: tuple[int, ...], stream: int) -> None:
        note(name, launcher, values, made)
        if original is None:
            launcher.launch(values, stream)
        else:
            original(name, launcher, values, made, stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_record, "observer", noted)
        yield


@contextmanager
def counted_launches() -> Iterator[list[str]]:
    """Names of the native calls launched inside; one whose kernel is in parts counts once."""
    names: list[str] = []

    def note(name: str, launcher: Any, values: list[Any], made: tuple[int, ...]) -> None:
        if not launcher.continues:
            names.append(name)

    with watched(note):
        yield names


@contextmanager
def allocations() -> Iterator[list[StorageWeakRef]]:
    """The storages into which kernels inside write results; `expired()` is true once they are freed."""
    found: list[StorageWeakRef] = []

    def note(name: str, launcher: Any, values: list[Any], made: tuple[int, ...]) -> None:
        found.extend(StorageWeakRef(values[at].untyped_storage()) for at in made)

    with watched(note):
        yield found


class Buffer(NamedTuple):
    """The buffer of one result: the native call that writes it, its shape, its storage."""

    call: str
    shape: tuple[int, ...]
    storage: StorageWeakRef


@contextmanager
def living() -> Iterator[list[tuple[str, list[Buffer]]]]:
    """For each launch inside: (native call, buffers of earlier launches that are still alive at that time)."""
    seen: list[tuple[str, list[Buffer]]] = []
    earlier: list[Buffer] = []

    def note(name: str, launcher: Any, values: list[Any], made: tuple[int, ...]) -> None:
        seen.append((name, [each for each in earlier if not each.storage.expired()]))
        tensors = [values[at] for at in made]
        earlier.extend(Buffer(name, tuple(each.shape), StorageWeakRef(each.untyped_storage())) for each in tensors)

    with watched(note):
        yield seen


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """Tensors that autograd keeps for backward inside."""
    kept: list[Tensor] = []

    def pack(value: Tensor) -> Tensor:
        kept.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        yield kept


class _Operators(TorchDispatchMode):
    """Notes the operators of the package that run inside, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "torch_bridge":
            self.seen.append((func, tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, args)))
        return func(*args, **(kwargs or {}))


def operators_of(function: Callable[[], Any]) -> list[tuple[Any, tuple[Any, ...]]]:
    """(operator, arguments) of each operator of the package that `function` runs."""
    with _Operators() as noted:
        function()
    return noted.seen


def opcheck(function: Callable[[], Any], *, multiplies: bool = True) -> set[str]:
    """Runs `torch.library.opcheck` on every operator that `function` runs; returns their names.

    Args:
        multiplies: whether PyTorch multiplies the operands: its test of schemas does, and 8-bit floats it does not.
    """
    seen = operators_of(function)
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for operator, arguments in seen:
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", *tests) if multiplies else tests)
    return {operator._schema.name.removeprefix("torch_bridge::") for operator, _ in seen}
