"""GEMMs of quantised operands as thunks: random codes and scales on the GPU, launched through the native module."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks import harness
from grouped_core import _native, calls, plans
from grouped_core.calls import ArraySpec, OperandSpec, QuantizedSpec, spec_in_format
from grouped_core.formats import FORMATS
from grouped_core.recipes import BF16
from tests import cases

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int32": torch.int32}
_UNIT = {"float8_e8m0fnu": 121, "float8_e4m3fn": 0x38}
"""Codes of scales for which the values are around one."""


def random(spec: ArraySpec, *, scale: bool = False) -> torch.Tensor:
    """An array of `spec`: normal values, or finite codes, or scales."""
    if spec.dtype in _DTYPES:
        if scale:
            return torch.rand(spec.shape, device="cuda") / 64 + 2.0**-7
        return torch.randn(spec.shape, dtype=_DTYPES[spec.dtype], device="cuda")
    if scale:
        return torch.randint(_UNIT[spec.dtype] - 2, _UNIT[spec.dtype] + 3, spec.shape, dtype=torch.uint8, device="cuda")
    codes = torch.randint(0, 256, spec.shape, dtype=torch.uint8, device="cuda")
    return codes if spec.dtype == "uint8" else codes & 0xBB  # finite in E4M3 and E5M2


def spec_of(name: str, shape: tuple[int, ...], axis: int, groups: int) -> OperandSpec:
    """Specs of an array of `shape` quantised in the format `name`."""
    format = FORMATS[name]
    return ArraySpec(shape, format.values) if format.plain else spec_in_format(format, shape, axis, "bfloat16", groups)


def arrays_of(slot: str, spec: OperandSpec) -> dict[str, torch.Tensor]:
    """The arrays of an operand, by slot."""
    if not isinstance(spec, QuantizedSpec):
        return {slot: random(spec)}
    arrays = {slot: random(spec.values)}
    if spec.scales is not None:
        arrays[f"{slot}_scales"] = random(spec.scales, scale=True)
    if spec.group_scales is not None:
        arrays[f"{slot}_group_scales"] = random(spec.group_scales, scale=True)
    return arrays


def specs(case: cases.Case, product: str, formats: tuple[str, str]) -> tuple[OperandSpec, OperandSpec]:
    """Specs of the operands of `forward`, `dgrad` (weights [G, N, K] in either, quantised along K) or `wgrad`."""
    g = case.groups
    if product == "wgrad":
        return spec_of(formats[0], (case.rows, case.k), 0, g), spec_of(formats[1], (case.rows, case.n), 0, g)
    inner = case.n if product == "dgrad" else case.k
    return spec_of(formats[0], (case.rows, inner), 1, g), spec_of(formats[1], (g, case.n, case.k), 2, g)


def thunk(
    case: cases.Case, product: str, formats: tuple[str, str], sets: int, *, result: str = "bfloat16", kernel: str = ""
) -> tuple[harness.Thunk, str]:
    """Returns (a thunk over `sets` sets of operands, the name of the kernel that runs)."""
    lhs, rhs = specs(case, product, formats)
    sizes = torch.tensor(case.sizes, dtype=torch.int32, device="cuda")
    axes = {"forward": (1, 2), "dgrad": (1, 1), "wgrad": (0, 0)}[product]
    size_spec = ArraySpec((case.groups,), "int32")
    call = calls.grouped_matmul(lhs, rhs, axes, size_spec, result, recipe=BF16, implementation=kernel)
    return launched(
        call, [{**arrays_of("lhs", lhs), **arrays_of("rhs", rhs), "group_sizes": sizes} for _ in range(sets)]
    )


def launched(call: calls.Call, operands: list[dict[str, torch.Tensor]]) -> tuple[harness.Thunk, str]:
    """Returns (a thunk that launches the call on one of several sets of operands, by slot; the name of the kernel)."""
    device = next(iter(operands[0].values())).device
    on_gpu = device.type == "cuda"
    plan = plans.attempt(call, _native.device_arch(0) if on_gpu else "cpu")
    assert plan.kernel, plan.refusals
    targets = [
        None if each is None else torch.empty(each.shape, dtype=_DTYPES[each.dtype], device=device)
        for each in call.outputs
    ]
    space = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
    held: list[tuple[Any, ...]] = [call.arrange(**each) for each in operands]
    addresses = [[0 if each is None else each.data_ptr() for each in (*arrays, *targets, space)] for arrays in held]

    def run(i: int) -> Any:
        plan.launch(addresses[i], torch.cuda.current_stream().cuda_stream if on_gpu else 0)
        return held[i], targets, space  # keeps the operands alive

    return run, plan.kernel


def bytes_of(spec: OperandSpec) -> int:
    """Bytes of an operand, scales included."""
    if not isinstance(spec, QuantizedSpec):
        return _size(spec)
    return sum(_size(each) for each in (spec.values, spec.scales, spec.group_scales) if each is not None)


def _size(spec: ArraySpec) -> int:
    count = 1
    for dim in spec.shape:
        count *= dim
    return count * {"float32": 4, "bfloat16": 2, "float16": 2}.get(spec.dtype, 1)
