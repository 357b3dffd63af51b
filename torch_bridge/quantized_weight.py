"""Quantised primary weights: Parameters of quantised values and scales; the optimiser has the master weight (QNT-1).

A `QuantizedWeight` has the shape, the device and the nominal dtype of the weight that it represents, so gradients,
`main_grad` and optimisers treat it like any Parameter. Reading it gives dequantised values; writing to it quantises
again, in place and in both forms. Members of a packed one are views; other views are copies of values, like the result
of any expression. Products read the quantised values directly.

Letters: G groups, A and B the axes of a member.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from grouped_core.calls import ArraySpec, spec_in_format
from grouped_core.formats import Format, QTensor
from torch_bridge._quantizing import dequantized, quantize_into
from torch_bridge._tensors import dtype_name, forms_of

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)
_OF_MEMBERS = (_aten.select.int, _aten.unbind.int)
_LIKE = tuple(
    getattr(_aten, name).default
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
    )
)
"""Operators that read only shapes, dtypes and devices."""

PARTS = ("values", "scales", "group_scales")
"""The tensors of one form, by their names in checkpoints."""
SOURCES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that quantisers read."""

# NOTE: an operation on such a weight breaks a graph. Dynamo then calls it, and would trace what it calls in turn.
_beside_graphs: Any = torch.compiler.disable(reason="quantised Parameters stay outside of graphs")


class QuantizedWeight(Tensor):
    """A weight [A, B], or [G, A, B], in quantised form.

    Writing to views other than members (`w[1:3].zero_()`) writes to a copy of values and changes nothing.

    Attributes:
        q: values and scales of one or G members, in the forms that products read; its tensors keep their addresses.
        home: the `QTensor` that contains it, and its index there, if several members share one; otherwise `q` and 0.
        scaling: for delayed scaling, the scales and the current amax of all members of `home`, views of the state; or
            None.
    """

    q: QTensor[Tensor]
    home: tuple[QTensor[Tensor], int]
    scaling: tuple[Tensor, Tensor] | None
    _initial: Tensor | None

    def __new__(cls, q: QTensor[Tensor], *, packed: bool, requires_grad: bool = False) -> QuantizedWeight:
        """`packed`: whether the shape keeps the axis of members; otherwise there is only one."""
        shape = q.shape if packed else q.shape[1:]
        dtype = getattr(torch, q.dtype)
        self: Any = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=q.values.device, requires_grad=requires_grad
        )
        self.q, self.home, self.scaling, self._initial = q, (q, 0), None, None
        return self

    def __init__(self, q: QTensor[Tensor], *, packed: bool, requires_grad: bool = False) -> None:
        del q, packed, requires_grad  # used in __new__

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        del tensor_contents
        return f"QuantizedWeight({tuple(self.shape)}, {self.q.format.name}, nominally {self.dtype}, on {self.device})"

    # ---- values ------------------------------------------------------------------------------------------------------

    # NOTE: tools for checkpoints access the names in a state dict as attributes, e.g. `weight.scales`.
    values = property(lambda self: self.q.values)  # pyrefly: ignore[bad-override]
    scales = property(lambda self: self.q.scales)
    group_scales = property(lambda self: self.q.group_scales)
    other = property(lambda self: self.q.other)

    @property
    def data(self) -> Tensor:
        """The weight without an autograd history. Assigning a value quantises it into this weight, like any write."""
        return Tensor.data.__get__(self)  # pyrefly: ignore[missing-attribute]

    @data.setter
    def data(self, value: Tensor) -> None:  # that of PyTorch replaces memory that is not there
        if value.device != self.device:
            raise ValueError(
                f"`data` of a quantised weight: on {value.device}, expected {self.device} = its own device; move the "
                "layer with `.to`."
            )
        self.store(value)

    @_beside_graphs
    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dequantised values, in `dtype` or else the nominal one."""
        dtype = dtype or self.dtype
        if self.q.values.is_meta:
            return torch.empty(self.shape, dtype=dtype, device="meta")
        return dequantized(self.q, None, dtype_name(dtype)).view(self.shape)

    @_beside_graphs
    def store(self, value: Tensor) -> None:
        """Quantises `value` into its own tensors; from another quantised weight it copies values and scales unchanged.

        Raises:
            ValueError: another shape; a quantised weight in another format.
        """
        if tuple(value.shape) != tuple(self.shape):
            raise ValueError(
                f"value of a quantised weight: shape {tuple(value.shape)}, expected {tuple(self.shape)} = its own; "
                "pass a tensor of that shape."
            )
        if isinstance(value, QuantizedWeight):
            parts, given = named_parts(self.q), named_parts(value.q)
            if facts_of(self.q) != facts_of(value.q):
                raise ValueError(
                    f"value of a quantised weight: {facts_of(value.q)}, expected {facts_of(self.q)} = its own forms; "
                    "pass a plain tensor, which is quantised again."
                )
            for name, part in parts.items():
                part.copy_(given[name])
        elif not self.q.values.is_meta:
            source = value.detach().to(self.device, value.dtype if value.dtype in SOURCES else self.dtype)
            at = self.home[1]
            own = slice(None) if self.dim() == 3 else slice(at, at + 1)
            scale, amax = (None, None) if self.scaling is None else (each[own] for each in self.scaling)
            quantize_into(source.contiguous().view(self.q.shape), forms_of(self.q), scale=scale, amax=amax)
        # A pending backward must not silently read changed values. It saved the tensors of `home`; an expert's views of
        # them have versions of their own, because `__torch_dispatch__` makes them below autograd.
        changed = [*named_parts(self.q).values(), *named_parts(self.home[0]).values()]
        torch.autograd.graph.increment_version(changed)

    # ---- the initial value -------------------------------------------------------------------------------------------

    def high_precision_init_val(self) -> Tensor | None:
        """The initial value, on the host, if it was preserved (QNT-2)."""
        return self._initial

    get_high_precision_init_val = high_precision_init_val  # Megatron's name

    def clear_high_precision_init_val(self) -> None:
        """Releases that value."""
        self._initial = None

    # ---- hooks of PyTorch --------------------------------------------------------------------------------------------

    # NOTE: these methods of PyTorch go to the memory of a tensor without a dispatch, and crash where it has none.
    def share_memory_(self) -> QuantizedWeight:
        """Moves values and scales to shared memory."""
        for part in named_parts(self.q).values():
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether values and scales are in shared memory."""
        return all(part.is_shared() for part in named_parts(self.q).values())

    def apply_(self, function: Any) -> QuantizedWeight:  # pyrefly: ignore[bad-override-param-name]
        """Quantises `function` of each dequantised element."""
        self.store(self.dequantize().apply_(function))
        return self

    def map_(self, tensor: Tensor, function: Any) -> QuantizedWeight:  # pyrefly: ignore[bad-override-param-name]
        """Quantises `function` of each dequantised element and the one of `tensor`."""
        self.store(self.dequantize().map_(tensor, function))
        return self

    def map2_(self, x: Tensor, y: Tensor, function: Any) -> QuantizedWeight:  # pyrefly: ignore[bad-override-param-name]
        """Quantises `function` of each dequantised element and those of `x` and `y`."""
        self.store(self.dequantize().map2_(x, y, function))
        return self

    def __dlpack__(self, **options: Any) -> Any:
        """A copy of the dequantised values."""
        return self.dequantize().__dlpack__(**options)

    @classmethod
    @_beside_graphs
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if func in _SAME:
            return args[0]._like(args[0].q)
        if func is _aten.clone.default:
            return args[0]._like(mapped(args[0].q, torch.clone), shares=False)
        if func is _aten.copy_.default and isinstance(args[0], QuantizedWeight):
            args[0].store(args[1])
            return args[0]
        if func in _OF_MEMBERS and args[0].dim() == 3 and (args[1] if len(args) > 1 else 0) in (0, -3):
            return args[0]._member(args[2]) if func is _aten.select.int else args[0]._members()
        flat, tree = tree_flatten((args, kwargs))
        read = QuantizedWeight._stand_in if func in _LIKE else QuantizedWeight.dequantize
        own = {id(each): each for each in flat if isinstance(each, QuantizedWeight)}
        copies = {at: read(each) for at, each in own.items()}  # one of a weight that is given twice
        given, keywords = tree_unflatten([copies.get(id(each), each) for each in flat], tree)
        result = func(*given, **keywords)
        if not func._schema.is_mutable:
            return result
        for weight in _written(func, args, kwargs):
            weight.store(copies[id(weight)])
        return next((own[at] for at, value in copies.items() if value is result), result)

    def __setitem__(self, index: Any, value: Any) -> None:
        """PyTorch writes to a view of the part. Only the whole and an expert have one here; of other parts the whole
        weight is written.
        """
        whole = index is Ellipsis or (isinstance(index, slice) and index == slice(None))
        if whole or (self.dim() == 3 and isinstance(index, int) and not isinstance(index, bool)):
            super().__setitem__(index, value)
            return
        values = self.dequantize()
        values[index] = value
        self.copy_(values)

    def _members(self) -> tuple[QuantizedWeight, ...]:
        return tuple(self._member(at) for at in range(self.shape[0]))

    def _member(self, at: int) -> QuantizedWeight:
        if not -self.shape[0] <= at < self.shape[0]:
            raise IndexError(
                f"member {at} of a quantised weight: expected one of its {self.shape[0]}; pass such a number."
            )
        at %= self.shape[0]
        made = QuantizedWeight(quantized_members(self.q)[at], packed=False)
        made.home, made.scaling = (self.q, at), self.scaling
        return made

    def _stand_in(self) -> Tensor:
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)

    def _like(self, q: QTensor[Tensor], *, shares: bool = True) -> QuantizedWeight:
        made = QuantizedWeight(q, packed=self.dim() == 3)
        if shares:
            made.home, made.scaling, made._initial = self.home, self.scaling, self._initial
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedWeight:
        if id(self) in memo:
            return memo[id(self)]
        made = memo[id(self)] = self._restored(copy.deepcopy(self.q, memo), copy.deepcopy(dict(self.__dict__), memo))
        made.grad = copy.deepcopy(self.grad, memo)
        return made

    def __reduce_ex__(self, proto: Any) -> Any:
        del proto
        # NOTE: pickle does not know all element types of scales, and a copy is independent.
        state = {name: value for name, value in self.__dict__.items() if name not in ("q", "home", "scaling")}
        static = (self.dim() == 3, self.requires_grad, isinstance(self, torch.nn.Parameter))
        return _unpickled, (mapped(self.q, lambda part: part.view(torch.uint8)), *static, state)

    def _restored(self, q: QTensor[Tensor], state: dict[str, Any]) -> QuantizedWeight:
        return _made(q, self.dim() == 3, self.requires_grad, isinstance(self, torch.nn.Parameter), state)


def _made(
    q: QTensor[Tensor], packed: bool, requires_grad: bool, is_parameter: bool, state: dict[str, Any]
) -> QuantizedWeight:
    made: Any = QuantizedWeight(q, packed=packed, requires_grad=requires_grad)
    if is_parameter:
        made = torch.nn.Parameter(made, requires_grad)
    made.__dict__.update(state)
    return made


def _unpickled(raw: QTensor[Tensor], *rest: Any) -> QuantizedWeight:
    return _made(typed(raw), *rest)


def typed(q: QTensor[Tensor]) -> QTensor[Tensor]:
    """`q`, whose tensors are bytes, with the element types of its format."""
    types = {"values": q.format.values, "scales": q.format.scales or "float32", "group_scales": "float32"}
    made = {name: getattr(q, name).view(getattr(torch, types[name])) for name in PARTS if getattr(q, name) is not None}
    return dataclasses.replace(q, **made, other=None if q.other is None else typed(q.other))


def _written(func: Any, args: Any, kwargs: Any) -> list[QuantizedWeight]:
    """The quantised weights among the arguments that an operator writes."""
    found: list[QuantizedWeight] = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, (list, tuple)) else [value]
        found += [each for each in values if isinstance(each, QuantizedWeight)]
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Their values and scales


def quantized_members(q: QTensor[Tensor]) -> list[QTensor[Tensor]]:
    """The G members [1, A, B] of a packed quantised weight [G, A, B], views of it in both forms.

    Raises:
        ValueError: it is not a weight.
    """
    if len(q.shape) != 3:
        raise ValueError(f"`q`: shape {q.shape}, expected a weight [G, A, B]; rows have no members.")
    groups, *member = q.shape

    def part(group: int, form: QTensor[Tensor]) -> QTensor[Tensor]:
        own = slice(group, group + 1)
        return dataclasses.replace(
            form,
            values=form.values[own],
            scales=None if form.scales is None else form.scales[own],
            group_scales=None if form.group_scales is None else form.group_scales[own],
            shape=(1, *member),
            other=None if form.other is None else part(group, form.other),
        )

    return [part(group, q) for group in range(groups)]


def named_parts(q: QTensor[Tensor]) -> dict[str, Tensor]:
    """The tensors of `q` by their names in checkpoints: "values", "scales", ..., "other.values", ..."""
    return {
        prefix + name: getattr(form, name)
        for prefix, form in zip(("", "other."), forms_of(q), strict=False)
        for name in PARTS
        if getattr(form, name) is not None
    }


def facts_of(q: QTensor[Tensor]) -> tuple[Any, ...]:
    """The facts in which two quantised weights must agree to share values and scales."""
    return q.shape, *((form.axis, form.format.layout) for form in forms_of(q))


def mapped(q: QTensor[Tensor], function: Any) -> QTensor[Tensor]:
    """`q` with `function` applied to each of its tensors."""
    made = {name: function(part) for name in PARTS if (part := getattr(q, name)) is not None}
    return dataclasses.replace(q, **made, other=None if q.other is None else mapped(q.other, function))


def empty(
    shape: tuple[int, int, int], formats: tuple[Format, Format | None], dtype: str, device: Any
) -> QTensor[Tensor]:
    """A weight [G, A, B] of zeros, with a form that contracts B and perhaps one that contracts A."""
    other = None if formats[1] is None else empty_form(shape, 1, formats[1], dtype, device)
    return dataclasses.replace(empty_form(shape, 2, formats[0], dtype, device), other=other)


def empty_form(shape: tuple[int, ...], axis: int, fmt: Format, dtype: str, device: Any) -> QTensor[Tensor]:
    """One form of a weight [G, A, B] of zeros, contracted along `axis`."""

    def zeros(spec: ArraySpec | None) -> Any:
        return None if spec is None else torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)

    spec = spec_in_format(fmt, shape, axis, dtype)
    return QTensor(zeros(spec.values), zeros(spec.scales), zeros(spec.group_scales), fmt, axis, shape, dtype, None)
