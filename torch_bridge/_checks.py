"""Checks that apply to any tensor, because kernels read its memory directly; and local parts of DTensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

from grouped_core.linear_spec import Names
from grouped_core.mlp_spec import MlpNames
from torch_bridge._compiling import is_compiling

NAMES = Names(x="x", w="weight")
MLP_NAMES = MlpNames()
ROUTED_NAMES = MlpNames(sizes="experts", probs="weights")
"""Names of the arguments of the operations in messages."""
_TRANSPOSED = (NAMES.w, MLP_NAMES.wi, MLP_NAMES.wo)


def check_operand(name: str, value: Any, x: Tensor, of: str = "x", *, written: bool = False) -> None:
    """Checks that `value` is a contiguous tensor on the device of `x`, which messages call `of`.

    Args:
        written: whether it is a buffer of the caller that is written, of which a copy is of no use.

    Raises:
        TypeError, ValueError: it is not.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"`{name}`: {type(value).__name__}, expected a torch.Tensor; convert it first.")
    if value.device != x.device:
        raise ValueError(f"`{name}`: on {value.device}, expected {x.device} = device of `{of}`; move it with `.to`.")
    check_layout(name, value)
    if not value.is_contiguous():
        remedy = "call `.contiguous()`"
        if written:
            remedy = "call e.g. `torch.empty` for one, because what `.contiguous()` returns may be a copy"
        if name.split("[")[0] in _TRANSPOSED:
            remedy += ", or for a transposed weight change `rhs_transposed`"
        raise ValueError(
            f"`{name}`: strides {tuple(value.stride())} of shape {tuple(value.shape)}, expected a contiguous tensor; "
            f"{remedy}."
        )


def check_readable(name: str, value: Any, x: Tensor, of: str = "x", *, written: bool = False) -> None:
    """Checks what a kernel reads: as `check_operand`, and that it has memory. Raises TypeError or ValueError."""
    check_operand(name, value, x, of, written=written)
    check_memory(name, value)


NEGATED = "a lazily negated view, expected a tensor whose memory has its signs; call `.resolve_neg()`."
"""The message for tensors whose `is_neg()` is true. Dynamo cannot trace `is_neg`, so graphs are not checked for it."""


def is_negated(value: Any) -> bool:
    """Whether a tensor, or a member of a list of tensors, is a lazily negated view; False for what is neither."""
    if isinstance(value, Tensor):
        return value.is_neg()
    if type(value) not in (list, tuple):
        return False
    try:
        return any(map(Tensor.is_neg, value))
    except TypeError:  # some members are no tensors
        return any(map(is_negated, value))


def _check_local(name: str, value: Tensor) -> None:
    if is_distributed(value):
        raise ValueError(
            f"`{name}`: a DTensor, expected the local part, because each rank computes by itself; call `.to_local()`."
        )


def check_layout(name: str, value: Tensor) -> None:
    """Refuses tensors without plain dense memory: DTensors, sparse, nested, quantised, foreign, lazily negated ones."""
    _check_local(name, value)
    if value.layout is torch.strided and not value.is_nested and not value.is_quantized:
        if not is_compiling() and value.is_neg():
            raise ValueError(f"`{name}`: {NEGATED}")
        return
    came = "nested" if value.is_nested else "quantised" if value.is_quantized else f"layout {value.layout}"
    raise ValueError(f"`{name}`: {came}, expected a plain dense tensor; convert it, e.g. with `.to_dense()`.")


def is_freed(value: Tensor) -> bool:
    """Whether a tensor has elements and its storage none, as that of a sharded parameter between its uses."""
    try:
        return value.nbytes > 0 and value.untyped_storage().nbytes() == 0
    except NotImplementedError:  # in a transform of torch.func, which shows none
        return False


def check_memory(name: str, value: Any) -> None:
    """Refuses a plain tensor whose elements have no memory; Dynamo cannot trace that. Raises ValueError."""
    if is_compiling() or type(value) not in (Tensor, torch.nn.Parameter) or value.nbytes == 0:
        return
    if value._is_zerotensor():
        raise ValueError(f"`{name}`: a zero tensor without memory, expected elements; pass `torch.zeros_like` of it.")
    if is_freed(value):
        raise ValueError(
            f"`{name}`: its storage is empty, expected elements; gather or restore a sharded parameter first."
        )


def check_group(function: str, process_group: Any) -> None:
    """Refuses anything but a process group. Raises TypeError."""
    if not isinstance(process_group, torch.distributed.ProcessGroup):
        raise TypeError(
            f"`process_group` of {function}: {type(process_group).__name__}, expected a "
            "torch.distributed.ProcessGroup; pass one, such as torch.distributed.group.WORLD for all ranks."
        )


def address(tensor: Tensor) -> int:
    """The address of the first element; 0 on the meta device and of fake tensors, which have no memory."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return 0 if tensor.is_meta else tensor.data_ptr()
    return 0 if tensor.untyped_storage().device.type == "meta" else tensor.data_ptr()


def device_integers(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host integers as a tensor on `device`, without a synchronisation or a copy from pageable memory."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype, device=device)  # not on the default device
    # NOTE: a foreach operation carries its scalars as kernel arguments, in chunks; a copy would read host memory.
    result = torch.zeros(len(values), dtype=dtype, device=device)
    if values:
        torch._foreach_add_(list(result.unbind()), list(values))
    return result


@torch.compiler.assume_constant_result  # Dynamo would look at each of thousands of modules
def _dtensor_type() -> type | None:
    """The class DTensor, or None if nothing has imported it; it is not imported here, because that takes 0.6 s."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def is_distributed(*tensors: Any) -> bool:
    """Whether any of them is a DTensor."""
    dtensor = _dtensor_type()
    if dtensor is not None:
        for each in tensors:
            if isinstance(each, dtensor):
                return True
    return False


def local(tensor: Any) -> Tensor:
    """The local part of a DTensor, without a history; any other tensor unchanged."""
    return tensor._local_tensor if is_distributed(tensor) else tensor


def distributed_like(parameter: Any, part: Tensor) -> Tensor:
    """Returns `part` as the local part of a DTensor placed like `parameter`; unchanged if that is no DTensor."""
    if not is_distributed(parameter):
        return part
    dtensor: Any = type(parameter.data)
    shape, stride = parameter.shape, parameter.stride()
    return dtensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


_tracing = torch._C._get_tracing_state
"""The trace that `torch.jit.trace` makes; None without one."""


def _traced(name: str) -> Exception:
    """Returns the error for `torch.jit.trace`: its sizes are tensors, which programs kept for later would hold."""
    return NotImplementedError(
        f"{name} under torch.jit.trace: expected eager execution, torch.compile or torch.export; use one of these."
    )


def refuse_transforms(name: str, *operands: Any) -> None:
    """Refuses functorch transforms, forward mode and `torch.jit.trace`; `name`: the operation's name in the message."""
    if _tracing() is not None:
        raise _traced(name)
    if torch._C._are_functorch_transforms_active() and not is_compiling():
        raise NotImplementedError(
            f"{name} under torch.func.vmap, grad or jvp: expected plain tensors; fold a mapped axis into rows "
            "or groups, and differentiate with torch.autograd."
        )
    if forward_ad._current_level < 0:  # tangents exist only inside a dual level; they would be lost silently
        return
    for operand in operands:
        if not isinstance(operand, Tensor):
            operand = getattr(operand, "master", operand)  # of a `StraightThrough`, whose module imports this one
        for each in operand if isinstance(operand, (list, tuple)) else [operand]:
            if isinstance(each, Tensor) and forward_ad.unpack_dual(each).tangent is not None:
                raise NotImplementedError(
                    f"{name} in forward mode: a dual tensor, expected plain tensors; "
                    "differentiate with torch.autograd, in reverse mode."
                )


def refuse_vmap(name: str) -> None:
    """Refuses `torch.func.vmap` and `torch.jit.trace`, for operations without a derivative; `name` is for messages."""
    if _tracing() is not None:
        raise _traced(name)
    if torch._C._are_functorch_transforms_active():
        stack = _functorch.get_interpreter_stack() or []
        if any(each.key() == _functorch.TransformType.Vmap for each in stack):
            raise NotImplementedError(
                f"{name} under torch.func.vmap: expected plain tensors; fold a mapped axis into rows or groups."
            )


def check_gradients(name: str, operands: Sequence[Any]) -> None:
    """Refuses DTensors, and batches of dy (`is_grads_batched`, vectorised Jacobians); `name` is for messages."""
    for each in operands:
        _check_local(f"an operand of {name}", each)
    if any(isinstance(each, Tensor) and _functorch.is_legacy_batchedtensor(each) for each in operands):
        raise NotImplementedError(
            f"{name} of batched gradients: a tensor under vmap, expected a plain one; differentiate once per gradient."
        )
