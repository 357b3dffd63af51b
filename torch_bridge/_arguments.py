"""Arguments of the public operations: checked, in words, and put in the order of the operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad

from grouped_core import linear_spec, memory
from grouped_core.calls import ArraySpec
from grouped_core.formats import wide
from grouped_core.memory import Span
from grouped_core.ranks import check_rank
from grouped_core.recipes import Recipe
from grouped_core.sizes import GroupSizes, unwrap
from torch_bridge import _graph, _library, main_grad
from torch_bridge._compiling import is_compiling
from torch_bridge._decided import Decided
from torch_bridge._library import NAMES
from torch_bridge._memory import EXCHANGE
from torch_bridge._run import dtype_name, spec_of
from torch_bridge.exchange import is_foreign
from torch_bridge.params import check_operand, members_of
from torch_bridge.sizes import prepare_sizes

Members = Tensor | Sequence[Tensor]
"""One packed tensor, or a list of one tensor a group."""

_Options = tuple[bool, Recipe | None, bool, int, str]
"""rhs_transposed, recipe, scale_bias, the hint of rows a group, pinned kernels: the arguments of `_library.encode`."""


class Arguments(NamedTuple):
    """What a user passed, checked and in the order of the operators."""

    x: Tensor
    weights: list[Tensor]
    sizes: Tensor
    biases: list[Tensor]
    row_scale: Tensor | None
    text: str
    to_main_grad: bool
    accumulators: Sequence[Tensor | None]

    def differentiates(self) -> bool:
        """Whether anybody needs a gradient."""
        if not torch.is_grad_enabled():
            return False
        if self.x.requires_grad or (self.row_scale is not None and self.row_scale.requires_grad):
            return True
        return True in [each.requires_grad for each in (*self.weights, *self.biases)]


def check_arguments(
    x: Tensor,
    weight: Members,
    group_sizes: Tensor | Sequence[int] | GroupSizes,
    rhs_transposed: bool = True,
    bias: Members | None = None,
    row_scale: Tensor | None = None,
    scale_bias: bool = False,
    recipe: Recipe | None = None,
    wgrad_accum: str | Tensor | Sequence[Tensor | None] | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Arguments:
    compiling = is_compiling()
    sizes, rows_hint = unwrap(group_sizes)
    names = linear_spec.implementation_names(implementation)
    options = (bool(rhs_transposed), linear_spec.recipe_option(recipe).recipe, bool(scale_bias), rows_hint, names)
    # What is checked depends on the facts of the operands alone, so it is checked once for them. Facts are None where
    # there is no plain memory; then, and in a trace, every call is checked.
    facts = None
    if not compiling:
        refuse_transforms("grouped_linear", x, weight, bias, row_scale)
        facts = EXCHANGE.describe((x, weight, sizes, bias, row_scale))
    text = None if facts is None else _texts.get((facts, options))
    if text is None:
        given_sizes = sizes
        sizes, text = _check_operands(x, weight, sizes, bias, row_scale, options)
        if facts is not None and sizes is given_sizes:
            _texts.keep((facts, options), text)
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    biases = [] if bias is None else [bias] if isinstance(bias, Tensor) else list(bias)
    to_main_grad = isinstance(wgrad_accum, str)
    accumulators: Sequence[Tensor | None] = ()
    if wgrad_accum is not None and wgrad_accum != "main_grad":
        accumulators = accumulators_of(wgrad_accum, weights)
        if not compiling:  # in a trace there are no addresses yet
            owners = [NAMES.accum] if isinstance(wgrad_accum, Tensor) else _numbered(NAMES.accum, len(accumulators))
            check_apart(zip(owners, accumulators, strict=True), _inputs(x, weights, sizes, biases, row_scale))
    return Arguments(x, weights, sizes, biases, row_scale, text, to_main_grad, accumulators)


_texts: Decided[tuple[bytes, _Options], str] = Decided()  # of operands and options that were checked


def _check_operands(
    x: Tensor, weight: Members, sizes: Any, bias: Members | None, row_scale: Tensor | None, options: _Options
) -> tuple[Tensor, str]:
    """(sizes as kernels read them, the operation as text); raises for what operators would not refuse in words."""
    check_rows(NAMES.x, x, x)
    sizes = check_members(x, weight, sizes, bias, row_scale, transposed=options[0])
    return sizes, text_of(*options)


def check_rows(name: str, x: Tensor, home: Tensor) -> None:
    """A tensor of rows [M, K]."""
    check_operand(name, x, home)
    check_rank("linear", "x", name, x.shape)


def check_members(
    x: Tensor, weight: Any, sizes: Any, bias: Members | None, row_scale: Tensor | None, *, transposed: bool
) -> Tensor:
    """Sizes as kernels read them; raises for operands of the linear operation that are not what is beside rows.

    Operators would take a packed operand of another rank for a list of one, and symbols of graphs hide shapes.

    Args:
        x: whose device counts. weight: None where it is quantised.
    """
    sizes, _ = prepare_sizes(sizes, x, NAMES)
    if weight is not None:
        members_of(("linear", "w"), NAMES.w, weight, x, transposed=transposed)
    if bias is not None:
        members_of(("linear", "bias"), NAMES.bias, bias, x)
    if row_scale is not None:
        check_operand(NAMES.row_scale, row_scale, x)
        check_rank("linear", "row_scale", NAMES.row_scale, row_scale.shape)
    return sizes


def refuse_transforms(name: str, *operands: Any) -> None:
    """Refuses functorch transforms and forward mode; `name` of the operation is for the words."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{name} under torch.func.vmap, grad or jvp: expected plain tensors; fold a mapped axis into rows "
            "or groups, and differentiate with torch.autograd."
        )
    if forward_ad._current_level < 0:  # outside every dual level there are no tangents, which would be lost in silence
        return
    for operand in operands:
        for each in operand if isinstance(operand, (list, tuple)) else [operand]:
            if isinstance(each, Tensor) and forward_ad.unpack_dual(each).tangent is not None:
                raise NotImplementedError(
                    f"{name} in forward mode: a dual tensor, expected plain tensors; "
                    "differentiate with torch.autograd, in reverse mode."
                )


def refuse_vmap(name: str) -> None:
    """Refuses `torch.func.vmap` alone, for what has no derivative; `name` of the operation is for the words."""
    if torch._C._are_functorch_transforms_active():
        stack = _functorch.get_interpreter_stack() or []
        if any(each.key() == _functorch.TransformType.Vmap for each in stack):
            raise NotImplementedError(
                f"{name} under torch.func.vmap: expected plain tensors; fold a mapped axis into rows or groups."
            )


def text_of(transposed: bool, recipe: Recipe | None, scale_bias: bool, rows_hint: int, names: str) -> str:
    options = (transposed, recipe, scale_bias, rows_hint, names)
    return _constant(_graph.taken_apart(options)) if is_compiling() else _library.encode(*options)


@torch.compiler.assume_constant_result
def _constant(options: Any) -> str:
    return _library.encode(*_graph.together(options))


def weight_names(weights: Sequence[Tensor], name: str = NAMES.w) -> list[str]:
    """How messages name each weight of the argument `name`."""
    return [name] if is_packed(weights) else _numbered(name, len(weights))


def is_packed(weights: Sequence[Tensor]) -> bool:
    """Whether a weight is one tensor; else it is one a group, or two that have all groups each."""
    return len(weights) == 1 and weights[0].dim() == 3


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}[{at}]" for at in range(count)]


def accumulators_of(
    given: Any, weights: list[Tensor], accum_name: str = NAMES.accum, weight_name: str = NAMES.w
) -> list[Tensor | None]:
    """`wgrad_accum` as one destination a weight."""
    found: list[Any] | None = (
        [given] if isinstance(given, Tensor) else list(given) if isinstance(given, (list, tuple)) else None
    )
    if found is None:
        raise ValueError(
            f"`{accum_name}`: {given!r}, expected None, a tensor for a packed weight or a list of tensors for a "
            "list of weights, or 'main_grad' for all weights of the operation; pass one of them."
        )
    if len(found) != len(weights) or is_packed(weights) != isinstance(given, Tensor):
        raise ValueError(
            f"`{accum_name}`: {len(found)} tensors, expected one for each of the {len(weights)} weights, in the same "
            "form (a tensor for a packed weight, a list for a list); pass None for a frozen member of a list."
        )
    owners = weight_names(weights, weight_name)
    for at, (accumulator, weight, owner) in enumerate(zip(found, weights, owners, strict=True)):
        name = accum_name if isinstance(given, Tensor) else f"{accum_name}[{at}]"
        if accumulator is None:
            if weight.requires_grad:
                raise ValueError(
                    f"`{name}`: None, expected a tensor, because `{owner}` needs a gradient; pass one or freeze it."
                )
            continue
        check_operand(name, accumulator, weight)
        linear_spec.check_accumulator(name, spec_of(accumulator), spec_of(weight))
        check_writable(name, accumulator)
    return found


def destinations(weights: Sequence[Tensor], name: str = NAMES.w) -> list[Tensor | None]:
    """`main_grad` of every weight that needs a gradient."""
    pairs = zip(weights, weight_names(weights, name), strict=True)
    return [main_grad.destination(each, name) if each.requires_grad else None for each, name in pairs]


def check_writable(name: str, buffer: Tensor) -> None:
    """Refuses a buffer with a history, or of another framework."""
    if buffer.requires_grad:
        raise ValueError(f"`{name}`: requires_grad is True, expected False; pass `{name}.detach()`.")
    if is_foreign(buffer):
        raise ValueError(
            f"`{name}`: memory of another framework (it came by `exchange`), expected memory of torch; "
            "allocate it with torch, nobody else may see it change."
        )


def check_buffers(out: Tensor | None, grad_input: Tensor | None, given: Arguments) -> None:
    """BUF-2 for what the operators do not check themselves; the shape and dtype of `out` are theirs."""
    x = given.x
    buffers = ((NAMES.out, out), (NAMES.grad_input, grad_input))
    for name, buffer in buffers:
        if buffer is not None:
            check_operand(name, buffer, x)
            check_writable(name, buffer)
    if not is_compiling():  # where there are no addresses yet
        check_apart(buffers, _inputs(x, given.weights, given.sizes, given.biases, given.row_scale))
    if grad_input is not None:
        linear_spec.check_buffer(NAMES.grad_input, spec_of(grad_input), ArraySpec(tuple(x.shape), gradient_dtype(x)))
        if not x.requires_grad:
            raise ValueError(
                f"`{NAMES.grad_input}`: given, but `x` needs no gradient; expected None, or an x with requires_grad; "
                "leave it out."
            )


def gradient_dtype(x: Tensor) -> str:
    """Dtype of the gradient of `x`."""
    return wide(dtype_name(x.dtype))


def check_gradient(dy: Tensor, grad_input: Tensor | None, *accumulators: Sequence[Tensor | None]) -> None:
    """BUF-2 for what forward could not see: dy is still read when buffers are written."""
    if is_compiling() or (grad_input is None and not any(accumulators)):
        return
    start, end = dy.data_ptr(), dy.data_ptr() + dy.nbytes
    for name, part in ((NAMES.grad_input, (grad_input,)), *((NAMES.accum, part) for part in accumulators)):
        for each in part:
            if each is not None and each.data_ptr() < end and start < each.data_ptr() + each.nbytes:
                check_apart([(name, each)], [("dy", dy)])  # which finds the words


_Named = Iterable[tuple[str, Tensor | None]]


def _inputs(
    x: Tensor, weights: list[Tensor], sizes: Tensor, biases: list[Tensor], row_scale: Tensor | None
) -> list[tuple[str, Tensor | None]]:
    """What is read, by name."""
    return [
        *((NAMES.x, x), (NAMES.sizes, sizes), (NAMES.row_scale, row_scale)),
        *zip(weight_names(weights), weights, strict=True),
        *((NAMES.bias, each) for each in biases),
    ]


def check_apart(written: _Named, read: _Named) -> None:
    """`memory.check_apart` of named tensors; those without memory lie nowhere."""
    memory.check_apart(*([_span(*each) for each in named if each[1] is not None] for named in (written, read)))


def _span(name: str, tensor: Any) -> Span:
    start = 0 if tensor.is_meta else tensor.data_ptr()
    return Span(name, start, start + tensor.nbytes if start else 0)
