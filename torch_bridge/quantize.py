"""Quantised tensors and the state of delayed scaling in PyTorch.

Letters: G groups, M rows, X the features of a row, A and B axes of a weight, R roles, L steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grouped_core import linear_spec, quantizing, scaling
from grouped_core.formats import Format, QTensor, check_quantized, format_option
from grouped_core.recipes import Recipe
from grouped_core.scaling import ScalingState
from grouped_core.sizes import GroupSizes, unwrap
from torch_bridge import _codec, _quantizing
from torch_bridge._checks import NAMES, check_group, check_operand, check_readable, refuse_vmap
from torch_bridge._compiling import allow_in_graph, is_compiling
from torch_bridge._quantizing import dequantized, quantized
from torch_bridge._tensors import DTYPES, E8M0, StraightThrough, dtype_name, fixed_spec, parts_of, rows_spec
from torch_bridge.sizes import prepare_sizes


def quantize(
    x: Tensor,
    format: str | Format,
    *,
    axis: int | tuple[int, ...] = -1,
    group_sizes: Tensor | Sequence[int] | GroupSizes | None = None,
    key: Tensor | None = None,
) -> QTensor[Tensor]:
    """x as quantised values and scales, for products that contract `axis`; two axes are quantised in one pass.

    It has no derivative: `straight_through` sends the gradient of a product with it to another tensor.

    Args:
        x: rows [M, X] or weights [G, A, B]; float32, bfloat16 or float16.
        format: a name of `FORMATS`, e.g. "fp8_1x128", or a `Format`.
        axis: the contracted axis: for rows 1 (rowwise) or 0 (columnwise: blocks run along M and restart at each group);
            for weights 2 or 1. With a pair of axes, `other` of the result belongs to the second.
        group_sizes: G integers, only for rows; None: all rows are one group.
        key: uint32 [2], low word first, of stochastic rounding; None: zeros.

    Raises:
        TypeError, ValueError: arguments do not fit together. NotImplementedError: no kernel supports it; under vmap.
    """
    fmt = format_option(format)
    if is_compiling():
        arrays = _quantize_node(*[_codec.to_tuples(each) for each in (x, fmt, axis, group_sizes, key)])
    else:
        arrays = _quantize(x, fmt, axis, group_sizes, key)
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    count = 1 + bool(fmt.scales) + fmt.per_group
    sizes = arrays[-1] if x.dim() == 2 else None
    form = None
    for place in reversed(range(len(axes))):
        values, scales, *others = arrays[place * count : (place + 1) * count]
        scales = scales.view(E8M0) if fmt.scales == "float8_e8m0fnu" else scales
        along, shape, dtype = axes[place] % x.dim(), tuple(x.shape), dtype_name(x.dtype)
        group_scales = others[0] if others else None
        ((_, own),) = quantizing.forms_along(fmt, (along,), x.dim())
        form = QTensor(values, scales, group_scales, own, along, shape, dtype, form, sizes)
    assert form is not None, "axes were checked"
    return form


def _quantize(x: Tensor, fmt: Format, axis: Any, group_sizes: Any, key: Tensor | None) -> list[Tensor]:
    """Returns the arrays of `quantize`: those of each form, then int32 group sizes if x is rows."""
    axes, sizes = check_quantize(x, fmt, axis, group_sizes, key)
    if x.dim() == 2 and sizes is None:
        sizes = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
    elif sizes is not None:
        sizes = sizes.clone()  # the caller may write the next sizes into its own
    made = quantized(x.detach(), quantizing.forms_along(fmt, axes, x.dim()), sizes, key=key)
    return [*(array for form in made for array in parts_of(form)), *([] if sizes is None else [sizes])]


def check_quantize(
    x: Tensor, format: str | Format, axis: Any, group_sizes: Any, key: Tensor | None
) -> tuple[tuple[int, ...], Tensor | None]:
    """(axes, sizes as kernels read them, or None) for arguments that fit together."""
    refuse_vmap("quantize")
    check_readable("x", x, x)
    sizes = None
    if group_sizes is not None:
        sizes, _ = prepare_sizes(unwrap(group_sizes)[0], x, NAMES)
    if key is not None:
        check_operand("key", key, x)
    source = rows_spec(x) if x.dim() == 2 else fixed_spec(x)  # of a weight no length may be a symbol
    specs = (None if each is None else fixed_spec(each) for each in (sizes, key))
    return quantizing.check_quantize(source, format_option(format), axis, *specs), sizes


@allow_in_graph
def _quantize_node(*arguments: Any) -> list[Tensor]:
    """`_quantize` as one node of a graph; `arguments` come from `_codec.to_tuples`."""
    return _quantize(*[_codec.from_tuples(each) for each in arguments])


def dequantize(
    q: QTensor[Tensor],
    dtype: torch.dtype | None = None,
    *,
    group_sizes: Tensor | Sequence[int] | GroupSizes | None = None,
) -> Tensor:
    """The values of q in its logical shape: value * scales in float32, rounded once; rows past the groups are zero.

    A rotated q (NVFP4 for wgrad) gives rotated values, unless its other form is not rotated.

    Args:
        dtype: float32, bfloat16 or float16; None: the nominal dtype of q.
        group_sizes: only for rows; None: those with which q was quantised.

    Raises:
        TypeError: q is not quantised, or a dtype that results cannot have. ValueError: rows without group sizes.
        NotImplementedError: under vmap.
    """
    check_quantized(q)
    if is_compiling():
        return _dequantize_node(*[_codec.to_tuples(each) for each in (q, dtype, group_sizes)])
    return _dequantize(q, dtype, group_sizes)


def _dequantize(q: QTensor[Tensor], dtype: torch.dtype | None, group_sizes: Any) -> Tensor:
    sizes, wide = check_dequantize(q, dtype, group_sizes)
    return dequantized(q, sizes, wide)


def check_dequantize(q: QTensor[Tensor], dtype: torch.dtype | None, group_sizes: Any) -> tuple[Tensor | None, str]:
    """(sizes as kernels read them, the result's dtype) for arguments that fit together."""
    check_quantized(q)
    refuse_vmap("dequantize")
    if dtype is not None and not isinstance(dtype, (torch.dtype, str)):
        raise TypeError(f"`dtype` of dequantize: {type(dtype).__name__}, expected a torch.dtype or None; pass one.")
    wide = linear_spec.wide_option("dtype", None if dtype is None else DTYPES.get(dtype, str(dtype))) or q.dtype
    for part in parts_of(q):
        check_operand("q", part, q.values)
    sizes = q.group_sizes
    if group_sizes is not None:
        sizes, _ = prepare_sizes(unwrap(group_sizes)[0], q.values, NAMES)
    quantizing.check_sizes_absent(q.shape, sizes)
    if len(q.shape) == 2 and sizes is None:
        raise ValueError(
            "`group_sizes`: None, expected one size per group, because rows are quantised by group; pass them."
        )
    return sizes, wide


@allow_in_graph
def _dequantize_node(*arguments: Any) -> Tensor:
    """`_dequantize` as one node of a graph; `arguments` come from `_codec.to_tuples`."""
    return _dequantize(*[_codec.from_tuples(each) for each in arguments])


def straight_through(master: Tensor, q: QTensor[Tensor]) -> StraightThrough:
    """q as an operand whose gradient, that of its dequantised values, goes to `master`, in the dtype of `master`.

    Args:
        master: has the logical shape of q, e.g. the float32 master weight that was quantised once for several uses; at
            most 32 bits.

    Raises:
        TypeError: q is not quantised, or the dtype of the master. ValueError: the shapes differ.
    """
    check_quantized(q)
    check_operand("master", master, q.values)
    if not master.is_floating_point():
        raise TypeError(
            f"`master`: dtype {dtype_name(master.dtype)}, expected one of floats, which have a gradient; cast it first."
        )
    if tuple(master.shape) != tuple(q.shape):
        raise ValueError(
            f"`master`: shape {tuple(master.shape)}, expected {q.shape} = shape of `q`; pass its own master."
        )
    if master.dtype.itemsize > 4:
        raise TypeError(
            f"`master`: dtype {dtype_name(master.dtype)}, expected at most 32 bits, as gradients have; cast it first."
        )
    return StraightThrough(master, q)


def scaling_state(
    recipe: Recipe, num_groups: int, *, products: int = 1, device: torch.device | str | None = None
) -> ScalingState[Tensor]:
    """A new state of delayed scaling, for one linear operation, or with products=2 for one MLP.

    Operations that are bound to it and need a gradient update the amax in `history[:, 0]`, in place on the device;
    `update_scaling` advances the state to the next step.

    Raises:
        ValueError: the recipe has no delayed scaling.
    """
    scaling.check_groups(num_groups)
    fp8_max = torch.tensor(scaling.fp8_maxes(recipe, products), dtype=torch.float32, device=device)
    scale = torch.zeros((len(fp8_max), num_groups), dtype=torch.float32, device=device)
    history = torch.zeros((len(fp8_max), recipe.history, num_groups), dtype=torch.float32, device=device)
    return ScalingState(scale, history, fp8_max, recipe.amax_algorithm)


def update_scaling(state: ScalingState[Tensor], *, process_group: Any = None) -> ScalingState[Tensor]:
    """Advances the state to the next step (numerics 2.5), in place, and returns it; it may be part of a graph.

    Args:
        process_group: the group over whose ranks the maximum of the current amax is taken first.

    Raises:
        NotImplementedError: under vmap. TypeError: not a state, or not a process group.
    """
    scaling.check_state(state)
    if not is_compiling():
        refuse_vmap("update_scaling")
        if not state.scale.is_inference():
            torch.autograd.graph.increment_version(state.scale)  # caches of weights compare it
    if process_group is not None:
        check_group("update_scaling", process_group)
        current = state.history[:, 0].contiguous()
        largest_of_ranks(current, process_group)
        state.history[:, 0].copy_(current)
    _quantizing.update_scaling(state)
    return state


def largest_of_ranks(amax: Tensor, process_group: Any) -> None:
    """Replaces contiguous amax, float32 or their int32 bits, by the maximum over the ranks of a group, in place.

    It compares bits, which order like the numbers with NaN on top; a maximum of floats may drop NaN.
    """
    torch.distributed.all_reduce(amax.view(torch.int32), torch.distributed.ReduceOp.MAX, group=process_group)
