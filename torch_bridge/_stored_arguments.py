"""What a user passes of quantised operands, and to recipes that quantise, checked: facts first, as plain operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from grouped_core import linear_spec, scaling
from grouped_core.calls import ArraySpec, OperandSpec
from grouped_core.formats import QTensor, wide
from grouped_core.products import stored_spec
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.scaling import ScalingState
from grouped_core.sizes import GroupSizes, unwrap
from torch_bridge import _library
from torch_bridge._arguments import (
    Members,
    accumulators_of,
    check_apart,
    check_members,
    check_rows,
    check_writable,
    refuse_transforms,
    text_of,
)
from torch_bridge._compiling import is_compiling
from torch_bridge._decided import Decided
from torch_bridge._library import NAMES
from torch_bridge._memory import EXCHANGE
from torch_bridge._run import TORCH_DTYPES, fixed_spec, rows_spec
from torch_bridge._stored import Wanted
from torch_bridge.params import check_operand
from torch_bridge.quantize import StraightThrough, Use


def is_stored(x: Any, weight: Any, recipe: Any) -> bool:
    """Whether an operand is quantised, or the recipe quantises one."""
    kinds = (QTensor, StraightThrough)
    if isinstance(x, kinds) or isinstance(weight, kinds):
        return True
    recipe = recipe.recipe if isinstance(recipe, BoundRecipe) else recipe
    return isinstance(recipe, Recipe) and recipe.quantized


class Cache(Protocol):
    """What keeps the forms of a layer's weight between forward passes."""

    def __call__(
        self,
        members: list[Tensor],
        wanted: Wanted,
        encode: Tensor | None,
        live: Tensor | None,
        multipliers: tuple[Any, ...],
    ) -> Sequence[QTensor[Tensor]]:
        """The forms wanted, all quantised; magnitudes of delayed scaling are merged into `live`.

        Args:
            multipliers: what differs once those of delayed scaling were updated.
        """
        ...


class Checked(NamedTuple):
    """What follows from the facts of operands and options, decided once for them."""

    text: str  # of the operation, with the recipe in force
    recipe: Recipe
    specs: tuple[OperandSpec, OperandSpec, ArraySpec | None, ArraySpec | None]  # of x, weight, bias, row_scale
    dtypes: tuple[torch.dtype | None, ...]  # of these


class Arguments(NamedTuple):
    """What a user passed, checked."""

    x: Tensor | QTensor[Tensor]
    weight: list[Tensor] | QTensor[Tensor]
    sizes: Tensor
    biases: list[Tensor]
    row_scale: Tensor | None
    checked: Checked
    use: Use
    leaf: Tensor | None  # what the gradient of x belongs to
    leaves: list[Tensor]  # what those of the weights belong to
    to_main_grad: bool
    accumulators: Sequence[Tensor | None]
    cache: Cache | None = None  # of a layer's weight

    def differentiates(self) -> bool:
        """Whether anybody needs a gradient."""
        if not torch.is_grad_enabled():
            return False
        return self.needed_by_inputs() or True in [each is not None for each in self.accumulators]

    def needed_by_inputs(self) -> bool:
        """Whether an operand has a gradient in autograd."""
        targets = (self.leaf, self.row_scale, *self.leaves, *self.biases)
        return True in [each is not None and each.requires_grad for each in targets]


def check_arguments(
    x: Tensor | QTensor[Tensor] | StraightThrough,
    weight: Members | QTensor[Tensor] | StraightThrough,
    group_sizes: Tensor | Sequence[int] | GroupSizes,
    rhs_transposed: bool,
    bias: Members | None,
    row_scale: Tensor | None,
    scale_bias: bool,
    recipe: Recipe | BoundRecipe | None,
    wgrad_accum: str | Tensor | Sequence[Tensor | None] | None,
    implementation: str | Sequence[str] | None,
    cache: Cache | None = None,
) -> Arguments:
    """The arguments of `grouped_linear`; raises what it raises."""
    compiling = is_compiling()
    refuse_transforms("grouped_linear", x, weight, bias, row_scale)
    bound = linear_spec.recipe_option(recipe)
    sizes, rows_hint = unwrap(group_sizes)
    names = implementation_text(implementation)
    leaf, rows = taken(x)
    leaves, weights = taken(weight)
    options = (bool(rhs_transposed), bound.recipe, bool(scale_bias), rows_hint, names)
    # As with plain operands: what is checked depends on facts alone, those of what is bound among them.
    facts = key = found = None
    if not compiling:
        facts = EXCHANGE.describe(
            (*arrays(rows), *arrays(weights), sizes, bias, row_scale, bound.key, *arrays(bound.state))
        )
    if facts is not None:
        key = (facts, options, form_facts(rows), form_facts(weights))
        found = _checked.get(key)
    if found is None:
        given_sizes = sizes
        sizes, found = _check_operands(rows, weights, sizes, bias, row_scale, bound, options)
        if key is not None and sizes is given_sizes:
            _checked.keep(key, found)
    owners = [] if leaves is None else listed(leaves)
    members = weights if isinstance(weights, QTensor) else owners
    accumulators: Sequence[Tensor | None] = ()
    if wgrad_accum is not None and wgrad_accum != "main_grad":
        first = home(rows)
        if owners:
            accumulators = accumulators_of(wgrad_accum, owners)
        else:
            accumulators = [accumulator_of(wgrad_accum, found.specs[1], first, NAMES.accum)]
        if not compiling:
            written = [(NAMES.accum, each) for each in accumulators]
            check_apart(written, [(NAMES.x, first), (NAMES.sizes, sizes), (NAMES.row_scale, row_scale)])
    to_main_grad = isinstance(wgrad_accum, str) and wgrad_accum == "main_grad"
    biases = [] if bias is None else listed(bias)
    operands = (rows, members, sizes, biases, row_scale)
    use = Use(bound.state, bound.key)
    return Arguments(*operands, found, use, leaf, owners, to_main_grad, accumulators, cache)


def accumulator_of(given: Any, weight: OperandSpec, home: Tensor, name: str) -> Tensor:
    """`wgrad_accum` of a quantised weight without a master, whose gradient nothing else takes."""
    if not isinstance(given, Tensor):
        raise ValueError(
            f"`{name}`: {given!r}, expected a tensor {weight.shape}, for the weight is quantised and packed; pass one."
        )
    check_operand(name, given, home)
    linear_spec.check_accumulator(name, fixed_spec(given), ArraySpec(weight.shape, weight.dtype))
    check_writable(name, given)
    return given


_checked: Decided[Any, Checked] = Decided()  # by facts of arrays, options, and how quantised operands lie


def _check_operands(
    rows: Any, weights: Any, sizes: Any, bias: Any, row_scale: Any, bound: BoundRecipe, options: tuple[Any, ...]
) -> tuple[Tensor, Checked]:
    """(sizes as kernels read them, what was decided); raises for what does not fit, in words.

    Args:
        options: of `text_of`.
    """
    first = home(rows)
    for name, operand in ((NAMES.x, rows), (NAMES.w, weights)):
        if isinstance(operand, QTensor):
            for part in parts_of(operand):
                check_operand(name, part, first)
    if not isinstance(rows, QTensor):
        check_rows(NAMES.x, rows, first)
    plain = None if isinstance(weights, QTensor) else weights
    sizes = check_members(first, plain, sizes, bias, row_scale, transposed=options[0])
    specs = (
        packed_spec(rows, 0),
        packed_spec(weights if isinstance(weights, QTensor) else listed(weights)),
        None if bias is None else packed_spec(listed(bias), 2),
        packed_spec(row_scale, 0),
    )
    text = text_of(*options)
    op = _library.decode(text)
    linear_spec.check_linear(op, specs[0], specs[1], fixed_spec(sizes), *specs[2:])
    check_bound(bound, specs[1].shape[0], first)
    recipe = op.resolve(*specs[:2])
    if op.recipe is None:  # operators are told what the operands, which they see in parts, stand for
        text = text_of(op.transposed, recipe, op.scale_bias, op.rows_hint, op.implementation)
        op = _library.decode(text)
    dtypes = tuple([None if spec is None else TORCH_DTYPES[spec.dtype] for spec in specs])
    return sizes, Checked(text, recipe, specs, dtypes)


def check_bound(bound: BoundRecipe, groups: int, x: Tensor, products: int = 1) -> None:
    """`scaling.check_bound` of tensors, which lie where `x` does; beside a meta tensor a state may lie anywhere.

    Raises:
        TypeError, ValueError: what is no tensor, lies elsewhere, is not contiguous, or does not fit the use.
    """
    if bound.key is not None:
        check_operand("key", bound.key, x)
    if isinstance(bound.state, ScalingState):
        for name in ("scale", "history"):
            each = getattr(bound.state, name)
            check_operand(f"state.{name}", each, each if x.device.type == "meta" else x)
    scaling.check_bound(bound, groups, products, fixed_spec)


def arrays(operand: Any) -> Sequence[Any]:
    """The arrays of an operand or of a state, as facts are asked of them: parts of what is quantised."""
    if isinstance(operand, QTensor):
        return parts_of(operand)
    if isinstance(operand, ScalingState):
        return operand.scale, operand.history
    return (operand,)


def form_facts(operand: Any) -> tuple[Any, ...] | None:
    """What parts of a quantised operand do not tell of it."""
    if not isinstance(operand, QTensor):
        return None
    there = (operand.scales is not None, operand.group_scales is not None)
    return operand.format, operand.axis, tuple(operand.shape), operand.dtype, there, form_facts(operand.other)


def home(rows: Any) -> Any:
    """The tensor that says where rows are, quantised or not."""
    rows = rows.q if isinstance(rows, StraightThrough) else rows
    return rows.values if isinstance(rows, QTensor) else rows


def taken(operand: Any) -> tuple[Any, Any]:
    """(what the gradient belongs to, the operand itself)."""
    if isinstance(operand, StraightThrough):
        return operand.master, operand.q
    return (None if isinstance(operand, QTensor) else operand), operand


@torch.compiler.assume_constant_result
def implementation_text(implementation: Any) -> str:
    """`implementation=` as operators carry it."""
    return linear_spec.implementation_names(implementation)


def parts_of(q: QTensor[Any]) -> list[Tensor]:
    """The tensors of both forms."""
    own = [each for each in (q.values, q.scales, q.group_scales) if each is not None]
    return own if q.other is None else [*own, *parts_of(q.other)]


def listed(operand: Members) -> list[Tensor]:
    """One packed tensor, or one a group, as a list."""
    return [operand] if isinstance(operand, Tensor) else list(operand)


def packed_spec(operand: Any, packed_rank: int = 3) -> Any:
    """Spec of an operand, packed where it is a list; None for None.

    Args:
        packed_rank: axes of what is packed; 0: these are rows.
    """
    if operand is None:
        return None
    if isinstance(operand, QTensor):
        return stored_spec(operand, fixed_spec)
    if isinstance(operand, Tensor):
        return fixed_spec(operand) if packed_rank else rows_spec(operand)
    one = fixed_spec(operand[0])
    return one if len(one.shape) == packed_rank else ArraySpec((len(operand), *one.shape), one.dtype)


def check_buffers(
    out: Tensor | None, grad_input: Tensor | None, sizes: Tensor, leaf: Tensor | None, x: OperandSpec, operands: Any
) -> None:
    """BUF-2; the shape and dtype of `out` are the operators'. `operands`: what is read, in any form."""
    buffers = ((NAMES.out, out), (NAMES.grad_input, grad_input))
    for name, buffer in buffers:
        if buffer is not None:
            check_operand(name, buffer, sizes)
            check_writable(name, buffer)
    if not is_compiling():  # where there are no addresses yet
        read: list[Tensor] = []
        for each in operands:
            read += parts_of(each) if isinstance(each, QTensor) else [] if each is None else listed(each)
        check_apart(buffers, [("an operand", each) for each in read])
    if grad_input is None:
        return
    linear_spec.check_buffer(NAMES.grad_input, rows_spec(grad_input), ArraySpec(x.shape, wide(x.dtype)))
    if leaf is None or not leaf.requires_grad:
        raise ValueError(
            f"`{NAMES.grad_input}`: given, but `x` needs no gradient; expected None, or an x with requires_grad; "
            "leave it out."
        )


def check_results(given: Arguments, out: Tensor | None, grad_input: Tensor | None) -> None:
    """BUF-2."""
    operands = (given.x, given.weight, given.sizes, given.biases, given.row_scale)
    check_buffers(out, grad_input, given.sizes, given.leaf, given.checked.specs[0], operands)
