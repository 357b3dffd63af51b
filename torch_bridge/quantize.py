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
from torch_bridge._checks import NAMES, check_operand, refuse_vmap
from torch_bridge._compiling import is_compiling
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
    """x as codes and scales, for products that contract `axis`; both forms of two axes come from one pass.

    It has no derivative: `straight_through` sends the gradient of a product with it to another tensor.

    Args:
        x: rows [M, X] or weights [G, A, B]; float32, bfloat16 or float16.
        format: a name of `FORMATS`, e.g. "fp8_1x128", or a `Format`.
        axis: the contracted one: of rows 1, or 0, where blocks run along rows and restart at each group; of weights 2
            or 1. Or both, and `other` of the result is the second.
        group_sizes: G integers, of rows; None: one group of all rows.
        key: uint32 [2], low word first, of stochastic rounding; None: zeros.

    Raises:
        TypeError, ValueError: what does not fit together. NotImplementedError: no kernel takes it; under vmap.
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
    """The arrays of `quantize`: those of each form, then int32 group sizes if x is rows."""
    axes, sizes = check_quantize(x, fmt, axis, group_sizes, key)
    if x.dim() == 2 and sizes is None:
        sizes = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
    made = quantized(x.detach(), quantizing.forms_along(fmt, axes, x.dim()), sizes, key=key)
    return [*(array for form in made for array in parts_of(form)), *([] if sizes is None else [sizes])]


def check_quantize(
    x: Tensor, format: str | Format, axis: Any, group_sizes: Any, key: Tensor | None
) -> tuple[tuple[int, ...], Tensor | None]:
    """(axes, sizes as kernels read them, if any are given) of arguments that fit together."""
    refuse_vmap("quantize")
    check_operand("x", x, x)
    sizes = None
    if group_sizes is not None:
        sizes, _ = prepare_sizes(unwrap(group_sizes)[0], x, NAMES)
    if key is not None:
        check_operand("key", key, x)
    source, specs = rows_spec(x), (None if each is None else fixed_spec(each) for each in (sizes, key))
    return quantizing.check_quantize(source, format_option(format), axis, *specs), sizes


@torch.compiler.allow_in_graph
def _quantize_node(*arguments: Any) -> list[Tensor]:
    """`_quantize` as one node of a graph; `arguments` as `_codec.to_tuples` gives them."""
    return _quantize(*[_codec.from_tuples(each) for each in arguments])


def dequantize(
    q: QTensor[Tensor],
    dtype: torch.dtype | None = None,
    *,
    group_sizes: Tensor | Sequence[int] | GroupSizes | None = None,
) -> Tensor:
    """The values of q in its logical shape, code * scales in float32 with one rounding; tail rows are zero.

    Of a rotated form (NVFP4's for weight gradients) these are rotated, too, unless q has another that is not.

    Args:
        dtype: float32, bfloat16 or float16; None: the nominal one of q.
        group_sizes: of rows; None: those that came with q.

    Raises:
        TypeError: q is not quantised, or a dtype that results do not have. ValueError: rows without group sizes.
        NotImplementedError: under vmap.
    """
    check_quantized(q)
    if is_compiling():
        return _dequantize_node(*[_codec.to_tuples(each) for each in (q, dtype, group_sizes)])
    return _dequantize(q, dtype, group_sizes)


def _dequantize(q: QTensor[Tensor], dtype: torch.dtype | None, group_sizes: Any) -> Tensor:
    sizes, wide = check_dequantize(q, dtype, group_sizes)
    return dequantized(q, sizes if len(q.shape) == 2 else None, wide)


def check_dequantize(q: QTensor[Tensor], dtype: torch.dtype | None, group_sizes: Any) -> tuple[Tensor | None, str]:
    """(sizes as kernels read them, the result's dtype) of arguments that fit together."""
    check_quantized(q)
    refuse_vmap("dequantize")
    wide = linear_spec.wide_option("dtype", None if dtype is None else DTYPES.get(dtype, str(dtype))) or q.dtype
    for part in parts_of(q):
        check_operand("q", part, q.values)
    sizes = q.group_sizes
    if group_sizes is not None:
        sizes, _ = prepare_sizes(unwrap(group_sizes)[0], q.values, NAMES)
    if len(q.shape) == 2 and sizes is None:
        raise ValueError("`group_sizes`: None, expected one size a group, for rows are stored by groups; pass them.")
    return sizes, wide


@torch.compiler.allow_in_graph
def _dequantize_node(*arguments: Any) -> Tensor:
    """`_dequantize` as one node of a graph; `arguments` as `_codec.to_tuples` gives them."""
    return _dequantize(*[_codec.from_tuples(each) for each in arguments])


def straight_through(master: Tensor, q: QTensor[Tensor]) -> StraightThrough:
    """q as an operand whose gradient, that of its dequantised values, is the gradient of `master`, in its dtype.

    Args:
        master: of the logical shape of q, e.g. the float32 weight that q was quantised from, once for several uses.

    Raises:
        TypeError: q is not quantised. ValueError: shapes that differ.
    """
    check_quantized(q)
    check_operand("master", master, q.values)
    if tuple(master.shape) != tuple(q.shape):
        raise ValueError(
            f"`master`: shape {tuple(master.shape)}, expected {q.shape} = shape of `q`; pass its own master."
        )
    return StraightThrough(master, q)


def scaling_state(
    recipe: Recipe, num_groups: int, *, products: int = 1, device: torch.device | str | None = None
) -> ScalingState[Tensor]:
    """A fresh state of delayed scaling, for one linear operation, or with products=2 for one MLP.

    Operations bound to it that somebody differentiates merge their magnitudes into `history[:, 0]`, in place and on the
    device; `update_scaling` makes the next step's.

    Raises:
        ValueError: nothing of the recipe is scaled with delay.
    """
    scaling.check_groups(num_groups)
    top = torch.tensor(scaling.tops(recipe, products), dtype=torch.float32, device=device)
    scale = torch.zeros((len(top), num_groups), dtype=torch.float32, device=device)
    history = torch.zeros((len(top), recipe.history, num_groups), dtype=torch.float32, device=device)
    return ScalingState(scale, history, top, recipe.amax_algorithm)


def update_scaling(state: ScalingState[Tensor], *, process_group: Any = None) -> ScalingState[Tensor]:
    """Makes the state that of the next step (numerics 2.5), in place, and returns it; graphs may hold it.

    Args:
        process_group: over which the live magnitudes take their maximum first.

    Raises:
        NotImplementedError: under vmap. TypeError: no state, no process group.
    """
    scaling.check_state(state)
    if not is_compiling():
        refuse_vmap("update_scaling")
        if not state.scale.is_inference():
            torch.autograd.graph.increment_version(state.scale)  # which caches of weights look at
    if process_group is not None:
        if not isinstance(process_group, torch.distributed.ProcessGroup):
            raise TypeError(
                f"`process_group`: {type(process_group).__name__}, expected a torch.distributed.ProcessGroup; "
                "pass one, or None."
            )
        live = state.history[:, 0].contiguous()
        largest_of_ranks(live, process_group)
        state.history[:, 0].copy_(live)
    _quantizing.update_scaling(state)
    return state


def largest_of_ranks(magnitudes: Tensor, process_group: Any) -> None:
    """Makes contiguous magnitudes, float32 or their int32 bits, the largest among the ranks of a group, in place.

    They are compared by their bits, which have the order of numbers with NaN on top; a maximum of floats may drop it.
    """
    torch.distributed.all_reduce(magnitudes.view(torch.int32), torch.distributed.ReduceOp.MAX, group=process_group)
