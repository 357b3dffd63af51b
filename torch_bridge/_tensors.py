"""Specs of tensors for the rules of `grouped_core`, and the conversion of operands to lists of tensors with a layout.

The operand of a rule is a tensor, a list of one tensor per group, a pair, or quantised. Native calls, operators of
`torch.library` and `save_for_backward` take only tensors. `flatten` converts an operand to a list of tensors and a
hashable layout that describes them; `unflatten` is its inverse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core.calls import ArraySpec
from grouped_core.formats import Format, QTensor
from grouped_core.products import Cached, Paired
from grouped_core.quantizing import Extras
from torch_bridge._cache import MOST
from torch_bridge._compiling import is_compiling
from torch_bridge._memory import EXCHANGE, FactsCache
from torch_bridge._symbols import SYMBOLIC_ROWS, multiple

DTYPES: dict[torch.dtype, str] = {
    getattr(torch, name): name
    for name in (
        *("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    )
}
"""Names of dtypes in specs, by torch dtype."""

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

E8M0 = torch.float8_e8m0fnu
RESULT_DTYPES = TORCH_DTYPES | {"float8_e8m0fnu": torch.uint8}
"""Torch dtypes of results. E8M0 scales are uint8 inside this package, because inductor cannot lower an operator that
reads E8M0 and writes into an argument."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch dtype in specs; a dtype unknown to specs keeps torch's name."""
    return DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


def spec_of(tensor: Tensor) -> ArraySpec:
    """Shape and dtype of a tensor."""
    return ArraySpec(tuple(tensor.shape), dtype_name(tensor.dtype))


def fixed_spec(tensor: Tensor) -> ArraySpec:
    """Like `spec_of`, but symbolic sizes of torch.compile become numbers, so that the spec can be a key."""
    return ArraySpec(tuple(map(int, tensor.shape)), dtype_name(tensor.dtype))


def rows_spec(tensor: Tensor) -> ArraySpec:
    """Like `fixed_spec`, but `SYMBOLIC_ROWS` represents a symbol if the number of rows is a multiple of it."""
    times = multiple(tensor.shape[0]) if tensor.shape else 0
    if not times:
        return fixed_spec(tensor)
    return ArraySpec((times * SYMBOLIC_ROWS, *map(int, tensor.shape[1:])), dtype_name(tensor.dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class StraightThrough:
    """A quantised operand whose gradient goes to another tensor; see `quantize.straight_through`."""

    master: Tensor
    q: QTensor[Tensor]


def as_read(gradient: Tensor) -> Tensor:
    """Returns a gradient from autograd as kernels read it: contiguous, not lazily negated, not a zero tensor."""
    gradient = gradient.contiguous()
    if is_compiling() or not (gradient.is_neg() or gradient._is_zerotensor()):
        return gradient
    return gradient.clone(memory_format=torch.contiguous_format)


def master_of(operand: Any) -> Any:
    """Returns what receives an operand's gradient, tensor or tensors; None for a quantised one without a master."""
    if isinstance(operand, StraightThrough):
        return operand.master
    return None if isinstance(operand, QTensor) else operand


def draw_key(device: torch.device) -> Tensor:
    """A key of random numbers, uint32 [2], drawn from the device's generator, which graphs advance at each replay."""
    drawn = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=device)  # there are no unsigned numbers
    return drawn.view(torch.uint32)


def home(rows: Any) -> Any:
    """Returns the tensor that determines the device of the operation: the rows, or their quantised values."""
    rows = rows.q if isinstance(rows, StraightThrough) else rows
    return rows.values if isinstance(rows, QTensor) else rows


def members(operand: Tensor | Sequence[Tensor] | None) -> list[Tensor]:
    """The tensors of an operand: one packed tensor, one per group, or none."""
    return [] if operand is None else [operand] if isinstance(operand, Tensor) else list(operand)


def forms_of(q: QTensor[Any]) -> list[QTensor[Any]]:
    """The rowwise and columnwise forms that a quantised operand has."""
    return [q] if q.other is None else [q, *forms_of(q.other)]


def parts_of(q: QTensor[Any]) -> list[Tensor]:
    """The tensors of all forms of a quantised operand."""
    return [part for form in forms_of(q) for part in form.slots if part is not None]


# ---------------------------------------------------------------------------------------------------------------------
# Operands as lists of tensors


class Form(NamedTuple):
    """Layout of a quantised operand: everything in the `QTensor` except its tensors.

    Attributes:
        shape: the logical shape; for rows, -1 represents M.
        scaled: whether there are block scales, and group scales. other: the layout of the other form, or None.
    """

    format: Format
    axis: int
    shape: tuple[int, ...]
    dtype: str
    scaled: tuple[bool, bool]
    other: Form | None


class PairLayout(NamedTuple):
    """Layout of a weight in two tensors; `axis`: the axis along which they would be concatenated."""

    axis: int


class CachedLayout(NamedTuple):
    """Layout of a weight together with the quantised forms that its layer keeps."""

    forms: Form


class ProductExtras(NamedTuple):
    """Where the `Extras` of a product are: for x, the weight and dy, (index of the array, row in it) or None.

    Attributes:
        scales: the places of scales [G]. amaxes: the places of histories [L, G]; their first step takes the amax.
    """

    scales: tuple[tuple[int, int] | None, ...]
    amaxes: tuple[tuple[int, int] | None, ...]


class ExtrasLayout(NamedTuple):
    """Layout of the states and the key that are bound to a recipe: the leaves are the key, then arrays.

    Attributes:
        products: for each product, where its extras are in these arrays. measure: whether rules find the amax.
        scales, histories: the numbers of arrays with scales [R, G] and with histories [R, L, G].
    """

    products: tuple[ProductExtras, ...]
    measure: bool
    scales: int
    histories: int


Layout = Form | PairLayout | CachedLayout | ExtrasLayout | None
"""The layout of an operand. None: the operand is one leaf: a tensor, a list of tensors, or nothing."""

Leaf = Tensor | Sequence[Tensor | None] | None
"""A tensor, one tensor per group (None: a skipped destination), or nothing."""


class Flat(NamedTuple):
    """An operand of several leaves inside this package: what rules return to each other and backward saves.

    The code that passes it on does not look at its parts, so it need not spend time on making a `QTensor` of them.
    """

    layout: Layout
    leaves: tuple[Any, ...]


PLAIN = frozenset({type(None), Tensor, torch.nn.Parameter, list})
"""The types of operands that are one leaf. They are tested first, because that is fast."""


def flatten(operand: Any, leaves: list[Any]) -> Layout:
    """Appends the leaves of an operand to `leaves` and returns its layout."""
    kind = type(operand)
    if kind not in PLAIN:
        if kind is Flat:
            leaves += operand.leaves
            return operand.layout
        if isinstance(operand, QTensor):
            return _flatten_form(operand, leaves)
        if kind is Paired:
            leaves += (operand.gate, operand.up)
            return PairLayout(operand.axis)
        if kind is Cached:
            leaves.append(operand.source)
            return CachedLayout(_flatten_form(operand.forms, leaves))
    leaves.append(operand)
    return None


def flatten_all(operands: Sequence[Any]) -> tuple[tuple[Layout, ...], list[Any]]:
    """(layouts, leaves) of several operands."""
    leaves: list[Any] = []
    return tuple([flatten(each, leaves) for each in operands]), leaves


def flats(layouts: Sequence[Layout], leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Restores the operands of `flatten_all`, those of several leaves as `Flat` with one object per layout."""
    rest = iter(leaves)
    parts = [next(rest) if layout is None else tuple(islice(rest, leaf_count(layout))) for layout in layouts]
    pairs = zip(layouts, parts, strict=True)
    return tuple([own if layout is None else Flat(same(layout), own) for layout, own in pairs])


same: Callable[[Layout], Layout] = lru_cache(maxsize=MOST)(lambda layout: layout)
"""Returns the same object for equal layouts, so that caches compare layouts by identity."""


def facts_cache() -> FactsCache:
    """A cache of results by the facts of operands; like `Cache`, it is emptied when it is full."""
    return FactsCache(EXCHANGE, MOST, Flat)


def _flatten_form(q: QTensor[Any], leaves: list[Any]) -> Form:
    values, scales, group_scales = q.slots
    leaves.append(values)
    if scales is not None:
        leaves.append(scales.view(torch.uint8) if isinstance(scales, Tensor) and scales.dtype is E8M0 else scales)
    if group_scales is not None:
        leaves.append(group_scales)
    shape = tuple(map(int, q.shape)) if len(q.shape) == 3 else (-1, int(q.shape[1]))
    other = None if q.other is None else _flatten_form(q.other, leaves)
    return Form(q.format, q.axis, shape, q.dtype, (scales is not None, group_scales is not None), other)


def unflatten(
    layout: Layout,
    leaves: Iterator[Any],
    rows: Any,
    scales_of: Callable[[Any, Format], Any] | None = None,
    row_of: Callable[[Any, int], Any] | None = None,
) -> Any:
    """Makes the operand with that layout from the next leaves.

    Args:
        rows: M. scales_of: converts block scales, given their format; None: they are not converted.
        row_of: (array, n) -> row n of the array, or of a history that row's first step; only for extras.
    """
    if layout is None:
        return next(leaves)
    if isinstance(layout, PairLayout):
        return Paired(next(leaves), next(leaves), layout.axis)
    if isinstance(layout, CachedLayout):
        return Cached(next(leaves), unflatten(layout.forms, leaves, rows, scales_of))
    if isinstance(layout, ExtrasLayout):
        assert row_of is not None, "rules read extras and never return them"
        key, *arrays = [next(leaves) for _ in range(leaf_count(layout))]
        products = []
        for scales, amaxes in layout.products:
            x, w, dy, *of_amax = [None if at is None else row_of(arrays[at[0]], at[1]) for at in (*scales, *amaxes)]
            products.append(Extras(key, x, w, dy, layout.measure, *of_amax))
        return tuple(products)
    values, (has_scales, has_group_scales) = next(leaves), layout.scaled
    scales = next(leaves) if has_scales else None
    if has_scales and scales_of is not None:
        scales = scales_of(scales, layout.format)
    group_scales = next(leaves) if has_group_scales else None
    shape = layout.shape if layout.shape[0] >= 0 else (rows, layout.shape[1])
    other = None if layout.other is None else unflatten(layout.other, leaves, rows, scales_of)
    return QTensor(values, scales, group_scales, layout.format, layout.axis, shape, layout.dtype, other)


def leaf_count(layout: Layout) -> int:
    """The number of leaves of an operand with that layout."""
    if layout is None:
        return 1
    if isinstance(layout, PairLayout):
        return 2
    if isinstance(layout, CachedLayout):
        return 1 + leaf_count(layout.forms)
    if isinstance(layout, ExtrasLayout):
        return 1 + layout.scales + layout.histories
    return 1 + sum(layout.scaled) + (0 if layout.other is None else leaf_count(layout.other))


def written_leaves(layout: Layout, *, written: bool) -> list[bool]:
    """Returns for each leaf of an operand whether it is written; `written`: whether the operand is."""
    if isinstance(layout, ExtrasLayout):
        return [False] * (1 + layout.scales) + [True] * layout.histories
    return [written] * leaf_count(layout)


Layouts = tuple[tuple[Layout, Any], ...]
"""For each operand of `pack`: (its layout, the number of tensors that it became; -1: one tensor or None). For an
operand of several leaves, some of them lists, the second part is the `Layouts` of these leaves instead of a number."""

_ITSELF = (None, -1)
_ITSELVES = [(_ITSELF,) * count for count in range(32)]
_ONE = PLAIN - {list}


def pack(operands: Sequence[Any]) -> tuple[Sequence[Tensor | None], Layouts]:
    """Operands as `save_for_backward` takes them: tensors, and the layouts from which `unpack` restores operands."""
    if _ONE.issuperset(map(type, operands)):
        return operands, _ITSELVES[len(operands)]
    tensors: list[Tensor | None] = []
    layouts: list[tuple[Layout, Any]] = []
    for operand in operands:
        kind = type(operand)
        if kind in _ONE:
            tensors.append(operand)
            layouts.append(_ITSELF)
        elif kind is list or kind is tuple:
            tensors += operand
            layouts.append((None, len(operand)))
        else:
            layout, leaves = operand if kind is Flat else (flatten(operand, own := []), own)
            parts, count = leaves, -1 if layout is None else len(leaves)  # None: another class of tensors
            if layout is not None and not _ONE.issuperset(map(type, leaves)):
                parts, count = pack(leaves)
            tensors += parts
            layouts.append((layout, count))
    return tensors, tuple(layouts)


def tensors_of(*operands: Any) -> list[Tensor]:
    """All tensors of these operands."""
    return [each for each in pack(operands)[0] if each is not None]


def unpack(layouts: Layouts, tensors: Iterable[Any]) -> list[Any]:
    """The operands that `pack` converted; those of several leaves are `Flat`."""
    if layouts is _ITSELVES[len(layouts)]:
        return list(tensors)
    operands: list[Any] = []
    rest = iter(tensors)
    for layout, count in layouts:
        if count == -1:
            operands.append(next(rest))
            continue
        parts = islice(rest, count) if type(count) is int else unpack(count, rest)
        operands.append(list(parts) if layout is None else Flat(layout, tuple(parts)))
    return operands


def note_written(tensors: Sequence[Tensor]) -> None:
    """Tells autograd that kernels have written the caller's tensors, by counting a new version of each.

    Autograd then refuses a backward that would read what one of them held before, as after any in-place operation.
    """
    if not is_compiling():  # a graph knows what its operators write
        torch.autograd.graph.increment_version([each for each in tensors if not each.is_inference()])
