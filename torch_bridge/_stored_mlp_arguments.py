"""What a user passes to `grouped_mlp` of quantised operands, and to recipes that quantise, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core import linear_spec, scaling
from grouped_core.calls import ArraySpec, OperandSpec
from grouped_core.formats import QTensor
from grouped_core.linear_spec import Linear
from grouped_core.mlp_spec import MlpSpecs, check, check_join, check_pair
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.sizes import unwrap
from torch_bridge import _graph, _library, _mlp_arguments, _mlp_library
from torch_bridge._arguments import accumulators_of, check_apart, check_rows, refuse_transforms
from torch_bridge._compiling import is_compiling
from torch_bridge._decided import Decided
from torch_bridge._memory import EXCHANGE
from torch_bridge._mlp_library import NAMES
from torch_bridge._run import TORCH_DTYPES, fixed_spec, rows_spec
from torch_bridge._stored_arguments import (
    Cache,
    accumulator_of,
    arrays,
    check_bound,
    check_buffers,
    form_facts,
    home,
    is_stored,
    listed,
    packed_spec,
    parts_of,
    taken,
)
from torch_bridge.params import check_operand
from torch_bridge.quantize import Use


def is_stored_mlp(x: Any, wi: Any, wo: Any, recipe: Any) -> bool:
    """Whether an operand is quantised, or the recipe quantises one."""
    return is_stored(x, wi, recipe) or is_stored(None, wo, None)


class Product(NamedTuple):
    """What is known of one of the two products beside arrays."""

    op: Linear
    recipe: Recipe  # in force
    text: str  # of the operation with this recipe


class Checked(NamedTuple):
    """What follows from the facts of operands and options, decided once for them."""

    text: str
    specs: MlpSpecs
    hidden: ArraySpec  # of the activated rows
    products: tuple[Product, Product]
    dtypes: tuple[torch.dtype | None, ...]  # of what `specs` has


class Arguments(NamedTuple):
    """What a user passed, checked."""

    x: Any  # tensors, lists of one a group, or QTensors
    wi: Any
    wo: Any
    sizes: Tensor
    probs: Tensor | None
    wi_bias: list[Tensor]
    wo_bias: list[Tensor]
    checked: Checked
    uses: tuple[Use, Use]  # of the products
    leaf: Tensor | None  # what the gradient of x belongs to
    wi_leaves: list[Tensor]
    wo_leaves: list[Tensor]
    to_main_grad: bool
    accum_wi: Sequence[Tensor | None]
    accum_wo: Sequence[Tensor | None]
    caches: tuple[Cache | None, Cache | None] = (None, None)  # of a layer's weights

    def differentiates(self) -> bool:
        """Whether anybody needs a gradient."""
        if not torch.is_grad_enabled():
            return False
        return self.needed_by_inputs() or bool(self.accum_wi) or bool(self.accum_wo)

    def needed_by_inputs(self) -> bool:
        """Whether an operand has a gradient in autograd."""
        leaves = (self.leaf, self.probs, *self.wi_leaves, *self.wo_leaves, *self.wi_bias, *self.wo_bias)
        return True in [each is not None and each.requires_grad for each in leaves]


def check_arguments(
    x: Any,
    wi: Any,
    wo: Any,
    group_sizes: Any,
    rhs_transposed: bool,
    activation: Any,
    probs: Tensor | None,
    wi_bias: Any,
    wo_bias: Any,
    recipe: Any,
    residuals: Any,
    wgrad_accum: Any,
    implementation: Any,
    caches: tuple[Cache | None, Cache | None] = (None, None),
) -> Arguments:
    """The arguments of `grouped_mlp`; raises what it raises."""
    compiling = is_compiling()
    refuse_transforms("grouped_mlp", x, wi, wo, probs, wi_bias, wo_bias)
    # Layers that have a state each come with a pair.
    bounds = recipe if isinstance(recipe, tuple) else (linear_spec.recipe_option(recipe),)
    sizes, rows_hint = unwrap(group_sizes)
    if _mlp_arguments.is_pair(wi):
        raise linear_spec.two_arrays(NAMES.wi, bounds[0].recipe)
    text = _mlp_arguments.text_of(
        rhs_transposed, activation, bounds[0].recipe, residuals, rows_hint, implementation, False
    )
    leaf, rows = taken(x)
    (wi_leaves, first), (wo_leaves, second) = taken(wi), taken(wo)
    operands = (rows, first, second, sizes, probs, wi_bias, wo_bias)
    # As with plain operands: what is checked depends on facts alone, those of what is bound among them.
    facts = key = found = None
    if not compiling:
        held = [array for each in bounds for array in (each.key, *arrays(each.state))]
        facts = EXCHANGE.describe((*arrays(rows), *arrays(first), *arrays(second), *operands[3:], *held))
    if facts is not None:
        key = (facts, text, len(bounds), form_facts(rows), form_facts(first), form_facts(second))
        found = _checked.get(key)
    if found is None:
        given_sizes = sizes
        sizes, found = _check_operands(operands, bounds, text)
        if key is not None and sizes is given_sizes:
            _checked.keep(key, found)
    wi_members = first if isinstance(first, QTensor) else listed(first)
    wo_members = second if isinstance(second, QTensor) else listed(second)
    leaves = [[] if each is None else listed(each) for each in (wi_leaves, wo_leaves)]
    accums: list[Sequence[Tensor | None]] = [(), ()]
    if wgrad_accum is not None and wgrad_accum != "main_grad":
        if not isinstance(wgrad_accum, (tuple, list)) or len(wgrad_accum) != 2:
            raise ValueError(
                f"`{NAMES.accum}`: {wgrad_accum!r}, expected None, 'main_grad' or a pair, of `{NAMES.wi}` and of "
                f"`{NAMES.wo}`; put None where a weight has no accumulator."
            )
        specs = (found.specs.wi, found.specs.wo)
        for at, (each, members, name) in enumerate(zip(wgrad_accum, leaves, (NAMES.wi, NAMES.wo), strict=True)):
            own = f"{NAMES.accum}[{at}]"
            if each is not None and members:
                accums[at] = accumulators_of(each, members, own, name)
            elif each is not None:
                accums[at] = [accumulator_of(each, specs[at], home(rows), own)]
        if not compiling:
            written = [(f"{NAMES.accum}[{at}]", each) for at, some in enumerate(accums) for each in some]
            check_apart(written, [(NAMES.x, home(rows)), (NAMES.sizes, sizes), (NAMES.probs, probs)])
    biases = [[] if each is None else listed(each) for each in (wi_bias, wo_bias)]
    one, two = bounds[0], bounds[-1]
    uses = (Use(one.state, one.key), Use(two.state, two.key, 0 if len(bounds) == 2 else len(scaling.ROLES)))
    return Arguments(
        *(rows, wi_members, wo_members, sizes, probs, biases[0], biases[1]),
        *(found, uses, leaf, leaves[0], leaves[1], isinstance(wgrad_accum, str), accums[0], accums[1], caches),
    )


_checked: Decided[Any, Checked] = Decided()  # by facts of arrays, options as text, and how quantised operands lie


def in_one_array(
    wi: Any,
    wgrad_accum: Any,
    rhs_transposed: bool,
    activation: Any,
    recipe: Any,
    residuals: Any,
    **_: Any,
) -> Any:
    """`wi`; gate and linear half as one weight [G, 2F, K] ([G, K, 2F]), for scales are those of both. Gradients go to
    each.

    Raises:
        TypeError, ValueError: halves that do not fit together. NotImplementedError: accumulators for them.
    """
    if not _mlp_arguments.is_pair(wi):
        return wi
    accumulates = wgrad_accum is not None and (isinstance(wgrad_accum, str) or wgrad_accum[0] is not None)
    arguments = [list(wi), accumulates, rhs_transposed, activation, recipe, residuals]
    if is_compiling():
        return _join_node(*_graph.taken_apart(arguments))
    return _join(*arguments)


def _join(
    halves: list[Tensor], accumulates: bool, rhs_transposed: bool, activation: Any, recipe: Any, residuals: Any
) -> Tensor:
    bound = recipe[0] if isinstance(recipe, tuple) else linear_spec.recipe_option(recipe)
    op = _mlp_library.decode(_mlp_arguments.text_of(rhs_transposed, activation, bound.recipe, residuals, 0, None, True))
    for at, half in enumerate(halves):
        check_operand(f"{NAMES.wi}[{at}]", half, halves[0])
    check_pair(op, *map(fixed_spec, halves))
    check_join(op, accumulates)
    return torch.cat(halves, dim=1 if rhs_transposed else 2)


@torch.compiler.allow_in_graph
def _join_node(*arguments: Any) -> Tensor:
    """`_join` as one node of a graph; `arguments` as `_graph` takes them apart."""
    return _join(*_graph.together(list(arguments)))


def _check_operands(operands: tuple[Any, ...], bounds: tuple[BoundRecipe, ...], text: str) -> tuple[Tensor, Checked]:
    """(sizes as kernels read them, what was decided); raises for what does not fit, in words."""
    rows, first, second, sizes, probs, wi_bias, wo_bias = operands
    op = _mlp_library.decode(text)
    one = home(rows)
    for name, operand in ((NAMES.x, rows), (NAMES.wi, first), (NAMES.wo, second)):
        if isinstance(operand, QTensor):
            for part in parts_of(operand):
                check_operand(name, part, one)
    if not isinstance(rows, QTensor):
        check_rows(NAMES.x, rows, one)
    wi, wo = (None if isinstance(each, QTensor) else each for each in (first, second))
    sizes = _mlp_arguments.check_members(one, wi, wo, sizes, probs, wi_bias, wo_bias, transposed=op.transposed)
    wi_spec: Any = packed_spec(first if isinstance(first, QTensor) else listed(first))
    wo_spec: Any = packed_spec(second if isinstance(second, QTensor) else listed(second))
    bias_specs = [packed_spec(listed(each), 2) if each is not None else None for each in (wi_bias, wo_bias)]
    specs = MlpSpecs(packed_spec(rows, 0), wi_spec, wo_spec, packed_spec(probs, 0), *bias_specs)
    check(op, *specs[:3], fixed_spec(sizes), *specs[3:])
    for each in bounds:
        check_bound(each, specs.wo.shape[0], one, products=3 - len(bounds))
    weighted = specs.wo_bias is not None and specs.probs is not None
    hidden = ArraySpec((specs.x.shape[0], specs.wo.shape[op.fc2().weight_axes()[0]]), specs.x.dtype)
    products = (_product(op.fc1(), specs.x, specs.wi), _product(op.fc2(weighted), hidden, specs.wo))
    dtypes = tuple([None if each is None else TORCH_DTYPES[each.dtype] for each in specs])
    return sizes, Checked(text, specs, hidden, products, dtypes)


def _product(op: Linear, rows: OperandSpec, weight: OperandSpec) -> Product:
    recipe = op.resolve(rows, weight)
    return Product(op, recipe, _library.encode(op.transposed, recipe, op.scale_bias, op.rows_hint, op.implementation))


def check_results(given: Arguments, out: Tensor | None, grad_input: Tensor | None = None) -> None:
    """BUF-2."""
    operands = (given.x, given.wi, given.wo, given.sizes, given.probs, given.wi_bias, given.wo_bias)
    spec = given.checked.specs.x
    check_buffers(out, grad_input, given.sizes, given.leaf, spec, operands)
    if out is not None:
        wanted = linear_spec.ArraySpec(spec.shape, spec.dtype)
        linear_spec.check_buffer(NAMES.out, rows_spec(out), wanted)
