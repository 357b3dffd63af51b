"""Checks the arguments of the public operations and converts them to the form that the rules take.

The checks depend only on facts of the operands (shapes, dtypes, layouts) and on the options, so their result is cached
under these. Operands without plain memory have no such facts; then every call is checked.
Letters: G groups, M rows, K in, N out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from grouped_core import activations, linear_spec, memory, ranks, scaling
from grouped_core.activations import Activation
from grouped_core.calls import ArraySpec, OperandSpec, QuantizedSpec
from grouped_core.formats import WIDE, Format, QTensor, wide
from grouped_core.linear_spec import Linear, Names
from grouped_core.lora import LORA
from grouped_core.memory import Span
from grouped_core.mlp_spec import (
    Mlp,
    MlpNames,
    MlpSpecs,
    Residuals,
    check,
    check_join,
    check_pair,
    joins,
    residuals_option,
)
from grouped_core.plans import Planner
from grouped_core.products import Paired, in_form, operand_spec, quantized_spec
from grouped_core.ranks import check_rank
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.routing_calls import MAX_SLOTS
from grouped_core.routing_spec import check_by_row
from grouped_core.scaling import ScalingState
from grouped_core.sizes import GroupSizes, unwrap
from torch_bridge._cache import Cache
from torch_bridge._checks import MLP_NAMES, NAMES, ROUTED_NAMES, check_memory, check_operand, refuse_transforms
from torch_bridge._compiling import is_compiling
from torch_bridge._memory import FactsCache
from torch_bridge._scaling import Scaling
from torch_bridge._tensors import (
    PLAIN,
    StraightThrough,
    dtype_name,
    facts_cache,
    fixed_spec,
    forms_of,
    home,
    master_of,
    members,
    parts_of,
    rows_spec,
    settle_rows,
)
from torch_bridge.exchange import is_foreign
from torch_bridge.sizes import prepare_sizes, saturate

Members = Tensor | Sequence[Tensor]
"""One packed tensor, or a list of one tensor per group."""

Accumulators = str | tuple[Tensor | Sequence[Tensor | None] | None, Tensor | Sequence[Tensor | None] | None]
"""The argument `wgrad_accum` of an MLP: "main_grad", or a pair for the two weights."""


class WeightForms(Protocol):
    """The cache of a layer: it keeps the quantised weight between forward passes."""

    def __call__(
        self,
        weight: Tensor | list[Tensor],
        wanted: tuple[tuple[int, Format], ...],
        scale: Tensor | None,
        amax: Tensor | None,
        scale_mark: tuple[Any, ...],
    ) -> Sequence[QTensor[Tensor]]:
        """The weight quantised for each requested axis and format; delayed scaling updates `amax` with its amax.

        Args:
            scale: [G], scales of delayed scaling. scale_mark: identifies the scales; it differs after each update.
        """
        ...


@dataclass(slots=True, eq=False)
class Arguments:
    """The checked arguments of a linear operation, or of an MLP, which has two products.

    Attributes:
        x, weights, biases: the operands as the rules read them. row_scale: for an MLP, the probabilities.
        leaf: the tensor that receives the gradient of x, or None. leaves: for each weight, those of its gradient.
        checked: the operation, the specs of its operands, and what follows from them.
        scaling: the states and the key that are bound to the recipe.
        accumulators: for each weight, a tensor or None per leaf; () without accumulators.
        caches: for each weight, the quantised weight that its layer keeps, or None.
        names: of `weights`, for messages.
        base: (name, operand) of the frozen weights whose adapters `weights` are; () without. key: of the dropout.
    """

    x: Tensor | QTensor[Tensor]
    weights: tuple[Any, ...]
    sizes: Tensor
    biases: tuple[Any, ...]
    row_scale: Tensor | None
    leaf: Tensor | None
    leaves: tuple[list[Tensor], ...]
    checked: Checked
    scaling: Scaling
    to_main_grad: bool
    accumulators: tuple[Sequence[Tensor | None], ...]
    caches: tuple[WeightForms | None, ...]
    names: tuple[str, ...] = (NAMES.w,)
    base: tuple[tuple[str, Any], ...] = ()
    key: Tensor | None = None

    def receivers(self) -> list[Tensor | None]:
        """The inputs of autograd: `leaf`, the row scale, the leaves of each weight (None for a quantised one without
        a master weight), the tensors of each bias.
        """
        found: list[Tensor | None] = [self.leaf, self.row_scale]
        for leaves in self.leaves:
            found += leaves or _NO_LEAF
        for bias in self.biases:
            if bias is not None:
                found += members(bias)
        return found


_NO_LEAF = (None,)


class Checked:
    """The result of the checks, which is cached, so that what follows from it is found only once.

    Attributes:
        op: the operation. specs: the specs of its operands.
        lists: for each weight, then each bias: the number of its tensors, 1 for a quantised weight without a master
            weight, and whether it is one packed tensor.
        asked: what follows from it for the gradients that are needed; `_autograd` fills it.
    """

    __slots__ = ("asked", "lists", "op", "specs")

    def __init__(self, op: Any, specs: Any, lists: Lists) -> None:
        self.op = op
        self.specs = specs
        self.lists = lists
        self.asked: dict[tuple[bool, ...], Any] = {}


Lists = tuple[tuple[int, bool], ...]
"""For each weight, then each bias: the number of its tensors, and whether it is one packed tensor."""

_checked: Cache[Any, FactsCache] = Cache()
"""By the options: the results of the checks by the facts of the operands."""


def lists_of(leaves: Sequence[list[Tensor]], biases: Sequence[Members | None]) -> Lists:
    """`Checked.lists` for the tensors of each weight, and the biases."""
    weights = [(len(own) or 1, not own or is_packed(own)) for own in leaves]
    return (*weights, *[(len(members(bias)), isinstance(bias, Tensor)) for bias in biases])


# ---------------------------------------------------------------------------------------------------------------------
# The linear operation


def linear_arguments(
    x: Any,
    weight: Any,
    group_sizes: Tensor | Sequence[int] | GroupSizes,
    rhs_transposed: bool,
    bias: Members | None,
    row_scale: Tensor | None,
    scale_bias: bool,
    recipe: Recipe | BoundRecipe | None,
    wgrad_accum: str | Tensor | Sequence[Tensor | None] | None,
    implementation: str | Sequence[str] | None,
    caches: tuple[WeightForms | None] = (None,),
) -> Arguments:
    """The checked arguments of `grouped_linear`; it raises the same errors."""
    refuse_transforms("grouped_linear", x, weight, bias, row_scale)
    bound = linear_spec.recipe_option(recipe)
    sizes, rows_hint = unwrap(group_sizes)
    leaf, rows, x_master = (x, x, None) if type(x) in PLAIN else _with_master(x)
    master, operand, w_master = (weight, weight, None) if type(weight) in PLAIN else _with_master(weight)
    names = linear_spec.implementation_names(implementation)
    options = (_LINEAR, bool(rhs_transposed), bound.recipe, bool(scale_bias), rows_hint, names, x_master, w_master)
    operands = (rows, operand, sizes, bias, row_scale)
    free = bound.state is None and bound.key is None
    cache, arrays, found = _known(options, operands, () if free else (bound,))
    if found is None:
        sizes, op, specs = _check_linear(operands, bound, options)
        found = Checked(op, specs, lists_of((members(master),), (bias,)))
        if cache is not None and sizes is operands[2]:
            cache.keep(arrays, 0, found)
    leaves = members(master)
    accumulators: Sequence[Tensor | None] = ()
    if wgrad_accum is not None:
        accumulators = accumulators_of_product(wgrad_accum, leaves, found.specs[1], rows, NAMES.accum, NAMES.w)
    given = Arguments(
        rows,
        (operand if isinstance(operand, Tensor) else whole_operand(operand),),
        sizes,
        (None if bias is None else whole_operand(bias),),
        row_scale,
        leaf,
        (leaves,),
        found,
        _UNBOUND if free else _scaling(bound),
        isinstance(wgrad_accum, str),
        (accumulators,),
        caches,
    )
    if accumulators:
        single = isinstance(wgrad_accum, Tensor)
        named = [(NAMES.accum if single else f"{NAMES.accum}[{n}]", each) for n, each in enumerate(accumulators)]
        check_apart_from_operands(named, given)
    return given


_LINEAR = "linear"
"""The first of the options, so that those of the operations differ; the MLPs have their names of arguments there."""


def _scaling(*bounds: BoundRecipe) -> Scaling:
    """What the recipe of an operation is bound to; the second of two belongs to the second product."""
    one = bounds[0]
    return Scaling(one.key, tuple([bound.state for bound in bounds if bound.state is not None]))


_UNBOUND = Scaling()


def _check_linear(operands: tuple[Any, ...], bound: BoundRecipe, options: tuple[Any, ...]) -> tuple[Tensor, Any, Any]:
    """(sizes as the kernels read them, the operation, specs); raises if the operands do not fit together."""
    rows, weight, sizes, bias, row_scale = operands
    _, transposed, recipe, scale_bias, rows_hint, names, x_master, w_master = options
    first = home(rows)
    _check_rows("linear", NAMES.x, rows, first)
    sizes, _ = prepare_sizes(sizes, first, NAMES)
    _check_weight(("linear", "w"), NAMES.w, weight, first, transposed=transposed)
    if bias is not None:
        check_members(("linear", "bias"), NAMES.bias, bias, first)
    if row_scale is not None:
        check_operand(NAMES.row_scale, row_scale, first)
        check_rank("linear", "row_scale", NAMES.row_scale, row_scale.shape)
    op = Linear(
        NAMES,
        transposed=transposed,
        recipe=recipe,
        scale_bias=scale_bias,
        rows_hint=rows_hint,
        implementation=names,
    )
    specs = (packed_spec(rows, 0), packed_spec(weight, 3), packed_spec(bias, 2), packed_spec(row_scale, 0))
    linear_spec.check_linear(op, specs[0], specs[1], fixed_spec(sizes), *specs[2:])
    check_bound(bound, specs[1].shape[0], first)
    if isinstance(rows, QTensor) or isinstance(weight, QTensor):  # gradients have the dtypes of the master tensors
        op = dataclasses.replace(op, recipe=op.resolve(*specs[:2]), wgrad_dtype=w_master and w_master.dtype)
        specs = (specs[0]._replace(dtype=x_master.dtype if x_master else specs[0].dtype), *specs[1:])
    return sizes, op, tuple(map(_static, specs))


# ---------------------------------------------------------------------------------------------------------------------
# The experts' MLP


def mlp_arguments(
    x: Any,
    wi: Any,
    wo: Any,
    group_sizes: Any,
    rhs_transposed: bool,
    activation: str | Activation,
    probs: Tensor | None,
    wi_bias: Members | None,
    wo_bias: Members | None,
    recipe: Any,
    residuals: str | Residuals,
    wgrad_accum: Any,
    implementation: str | Sequence[str] | None,
    caches: tuple[WeightForms | None, WeightForms | None] = (None, None),
    *,
    join: bool = True,
) -> Arguments:
    """The checked arguments of `grouped_mlp`; it raises the same errors.

    Args:
        recipe: may also be a pair of bound recipes, for two layers that each have their own scaling state.
        join: whether gate and linear half are concatenated if they have to be quantised; otherwise that is refused.
    """
    sizes, rows_hint = unwrap(group_sizes)
    operands, options = (x, wi, wo, sizes, probs, wi_bias, wo_bias), (rhs_transposed, activation, residuals, rows_hint)
    return _arguments_of_mlp(MLP_NAMES, operands, options, recipe, wgrad_accum, implementation, caches, join=join)


def routed_arguments(
    x: Any,
    experts: Any,
    weights: Any,
    wi: Any,
    wo: Any,
    rhs_transposed: bool,
    activation: str | Activation,
    wi_bias: Members | None,
    wo_bias: Members | None,
    recipe: Any,
    residuals: str | Residuals,
    wgrad_accum: Any,
    implementation: str | Sequence[str] | None,
    caches: tuple[WeightForms | None, WeightForms | None] = (None, None),
) -> Arguments:
    """The checked arguments of `routed_mlp`; it raises the same errors. Their `sizes` are the experts."""
    names = ROUTED_NAMES
    if isinstance(experts, Tensor):
        if experts.is_floating_point() or experts.is_complex() or experts.dtype is torch.bool:
            raise TypeError(
                f"`{names.sizes}` of routed_mlp: dtype {experts.dtype}, expected integers; pass numbers of experts."
            )
        experts = saturate(experts)
    operands, options = (x, wi, wo, experts, weights, wi_bias, wo_bias), (rhs_transposed, activation, residuals, 0)
    return _arguments_of_mlp(names, operands, options, recipe, wgrad_accum, implementation, caches, join=True)


def _arguments_of_mlp(
    names: MlpNames,
    given: tuple[Any, ...],
    own: tuple[Any, ...],
    recipe: Any,
    wgrad_accum: Any,
    implementation: str | Sequence[str] | None,
    caches: tuple[WeightForms | None, WeightForms | None],
    *,
    join: bool,
) -> Arguments:
    """The checked arguments of an MLP.

    Args:
        names: of its arguments, which say whether it is `grouped_mlp` or `routed_mlp`.
        given: x, wi, wo, sizes or experts, probabilities or weights, both biases.
        own: `rhs_transposed`, `activation`, `residuals`, the hint of rows per group.
    """
    x, wi, wo, sizes, probs, wi_bias, wo_bias = given
    rhs_transposed, activation, residuals, rows_hint = own
    if join and is_pair(wi):
        wi = _joined_pair(x, wi, wgrad_accum, rhs_transposed, activation, recipe, residuals)
    refuse_transforms("grouped_mlp" if names is MLP_NAMES else "routed_mlp", x, wi, wo, probs, wi_bias, wo_bias)
    bounds = recipe if isinstance(recipe, tuple) else (linear_spec.recipe_option(recipe),)
    leaf, rows, _ = (x, x, None) if type(x) in PLAIN else _with_master(x)
    wi_master, first, one = (wi, wi, None) if type(wi) in PLAIN else _with_master(wi)
    wo_master, second, two = (wo, wo, None) if type(wo) in PLAIN else _with_master(wo)
    paired = is_pair(first)
    pinned = linear_spec.implementation_names(implementation)
    options = (
        names,
        bool(rhs_transposed),
        activation,
        bounds[0].recipe,
        residuals,
        rows_hint,
        pinned,
        paired,
        one,
        two,
    )
    operands = (rows, first, second, sizes, probs, wi_bias, wo_bias)
    cache, arrays, found = _known(options, operands, bounds)
    if found is None:
        sizes, op, specs = _check_mlp(operands, bounds, options)
        found = Checked(op, specs, lists_of((members(wi_master), members(wo_master)), (wi_bias, wo_bias)))
        if cache is not None and sizes is operands[3]:
            cache.keep(arrays, 0, found)
    leaves = (members(wi_master), members(wo_master))
    weights = (in_form(found.op.fc1(), tuple(first)) if paired else whole_operand(first), whole_operand(second))
    accumulators = ((), ())
    if wgrad_accum is not None:
        accumulators = _accumulators_of_mlp(wgrad_accum, leaves, found.specs, rows)
    arguments = Arguments(
        rows,
        weights,
        sizes,
        (None if wi_bias is None else whole_operand(wi_bias), None if wo_bias is None else whole_operand(wo_bias)),
        probs,
        leaf,
        leaves,
        found,
        _UNBOUND if bounds[0].state is None and bounds[0].key is None else _scaling(*bounds),
        isinstance(wgrad_accum, str),
        accumulators,
        caches,
        (names.wi, names.wo),
    )
    if any(accumulators):
        written = [(f"{names.accum}[{at}]", each) for at, some in enumerate(accumulators) for each in some]
        check_apart_from_operands(written, arguments)
    return arguments


def _mlp(options: Sequence[Any]) -> Mlp:
    names, transposed, activation, recipe, residuals, rows_hint, pinned, paired = options
    return Mlp(
        names,
        activations.resolve(activation),
        transposed=transposed,
        recipe=recipe,
        residuals=Residuals(residuals_option(residuals).policy),
        rows_hint=rows_hint,
        implementation=pinned,
        paired=paired,
    )


def _check_mlp(
    operands: tuple[Any, ...], bounds: tuple[BoundRecipe, ...], options: tuple[Any, ...]
) -> tuple[Tensor, Any, Any]:
    """(sizes as the kernels read them, the operation, specs); raises if the operands do not fit together."""
    rows, wi, wo, sizes, probs, wi_bias, wo_bias = operands
    *static, wi_master, wo_master = options
    op = _mlp(static)
    names, first = op.names, home(rows)
    routed = names == ROUTED_NAMES
    _check_rows("linear", names.x, rows, first)
    if routed:
        _check_routing(rows, sizes, probs)
    else:
        sizes, _ = prepare_sizes(sizes, first, Names(names.x, names.wi))
        if probs is not None:
            check_operand(names.probs, probs, first)
            check_rank("mlp", "probs", names.probs, probs.shape)
    if op.paired:
        for at, half in enumerate(wi):
            check_operand(f"{names.wi}[{at}]", half, first)
            check_rank("mlp", "half", f"{names.wi}[{at}]", half.shape, transposed=op.transposed)
        check_pair(op, *map(fixed_spec, wi))
        wi_spec: Any = operand_spec(Planner(), in_form(op.fc1(), tuple(map(fixed_spec, wi))))
    else:
        _check_weight(("mlp", "wi"), names.wi, wi, first, transposed=op.transposed)
        wi_spec = packed_spec(wi, 3)
    _check_weight(("mlp", "wo"), names.wo, wo, first, transposed=op.transposed)
    for name, bias in (("wi_bias", wi_bias), ("wo_bias", wo_bias)):
        if bias is not None:
            check_members(("mlp", name), getattr(names, name), bias, first)
    specs = MlpSpecs(
        packed_spec(rows, 0),
        wi_spec,
        packed_spec(wo, 3),
        packed_spec(probs, 0),
        packed_spec(wi_bias, 2),
        packed_spec(wo_bias, 2),
    )
    sizes_spec = ArraySpec(specs.wo.shape[:1], "int32") if routed else fixed_spec(sizes)
    if (
        routed and specs.probs is not None
    ):  # the MLP is that of the rows of slots, in as many groups as there are weights
        if isinstance(rows, QTensor):  # formats are checked here; where gradients are concerned rows are plain
            check(op, *specs[:3], sizes_spec, None, *specs[4:])
        count = specs.x.shape[0] * int(sizes.shape[1])
        of_rows = {"x": ArraySpec((count, specs.x.shape[1]), specs.x.dtype)}
        specs = specs._replace(**of_rows, probs=ArraySpec((count,), specs.probs.dtype))
    if not (routed and isinstance(rows, QTensor)):
        check(op, *specs[:3], sizes_spec, *specs[3:])
    for each in bounds:
        check_bound(each, specs.wo.shape[0], first, products=3 - len(bounds))
    dtypes = (wi_master and wi_master.dtype, wo_master and wo_master.dtype)  # those of gradients
    op = dataclasses.replace(op, master_dtypes=dtypes)
    return sizes, op, MlpSpecs(*map(_static, specs))


def _check_routing(tokens: Tensor | QTensor[Tensor], experts: Tensor, weights: Tensor) -> None:
    """Checks tokens [T, K] and their experts and weights [T, k]. Raises TypeError or ValueError."""
    names, x = ROUTED_NAMES, home(tokens)
    if isinstance(tokens, QTensor):
        check_by_row(packed_spec(tokens, 0))
    elif dtype_name(x.dtype) not in WIDE:
        raise TypeError(
            f"`{names.x}` of routed_mlp: dtype {x.dtype}, expected one of {', '.join(WIDE)}; cast it first."
        )
    check_operand(names.sizes, experts, x)
    check_rank("routed_mlp", "experts", names.sizes, experts.shape, of="routed_mlp")
    check_operand(names.probs, weights, x)
    check_rank("routed_mlp", "weights", names.probs, weights.shape, of="routed_mlp")
    if dtype_name(weights.dtype) not in WIDE:
        raise TypeError(
            f"`{names.probs}` of routed_mlp: dtype {weights.dtype}, expected one of {', '.join(WIDE)}; cast it first."
        )
    settle_rows(x, experts, weights)  # values of tokens have T rows in every format whose scales are per row
    found = rows_spec(experts).shape
    if found[0] != rows_spec(x).shape[0] or not 1 <= found[1] <= MAX_SLOTS:
        raise ValueError(
            f"`{names.sizes}` of routed_mlp: shape {tuple(experts.shape)}, expected [T, k] with T = {x.shape[0]} "
            f"tokens of `{names.x}` and k from 1 to {MAX_SLOTS}; route these tokens."
        )
    if rows_spec(weights).shape != found:
        raise ValueError(
            f"`{names.probs}` of routed_mlp: shape {tuple(weights.shape)}, expected {tuple(experts.shape)} = shape of "
            f"`{names.sizes}`; pass one weight per slot."
        )
    for each in (experts, weights):
        torch._check(each.shape[0] == x.shape[0])  # torch.compile may have given them symbols of their own


def is_pair(operand: Any) -> bool:
    """Whether a first weight is a pair of gate and linear half, each with all groups, not a list of one per group."""
    if not isinstance(operand, (list, tuple)) or len(operand) != 2:
        return False
    return isinstance(operand[0], Tensor) and operand[0].dim() == 3


def _joined_pair(
    x: Any,
    wi: Any,
    wgrad_accum: Any,
    rhs_transposed: bool,
    activation: Any,
    recipe: Any,
    residuals: Any,
) -> Any:
    """`wi`; a pair that has to be quantised is concatenated to one weight [G, 2F, K] ([G, K, 2F]), because scales
    cover both halves. Each half receives its own gradient.

    Raises:
        TypeError, ValueError: the halves do not fit together. NotImplementedError: the pair has accumulators.
    """
    bound = recipe[0] if isinstance(recipe, tuple) else linear_spec.recipe_option(recipe)
    op = _mlp((MLP_NAMES, bool(rhs_transposed), activation, bound.recipe, residuals, 0, "", True))
    if not joins(op, _with_master(x)[1]):
        return wi
    for at, half in enumerate(wi):
        check_operand(f"{MLP_NAMES.wi}[{at}]", half, wi[0])
    check_pair(op, *map(fixed_spec, wi))
    check_join(op, wgrad_accum is not None and (isinstance(wgrad_accum, str) or wgrad_accum[0] is not None))
    return torch.cat(list(wi), dim=op.fc1().weight_axes()[1])


# ---------------------------------------------------------------------------------------------------------------------
# Operands


_Known = tuple[FactsCache | None, tuple[Any, ...], Checked | None]
"""The cache of checks with the same options, or None if nothing can be cached; the arrays whose facts it knows results
by; the result for these, or None."""


def _known(options: tuple[Any, ...], operands: tuple[Any, ...], bounds: Sequence[BoundRecipe]) -> _Known:
    arrays, key = operands, options
    if not PLAIN.issuperset(map(type, operands)):
        if is_compiling():  # lengths may be symbols, which have no hash
            return None, (), None
        arrays, layouts = _arrays(operands)
        key = (*key, *layouts)
    for bound in bounds:
        if bound.key is not None or bound.state is not None:
            own = (bound.state.scale, bound.state.history) if isinstance(bound.state, ScalingState) else ()
            arrays, key = (*arrays, bound.key, *own), (*key, bound.key is None)
    cache = _checked.get(key)
    if cache is None:
        cache = _checked.keep(key, facts_cache())
    return cache, arrays, cache.find(arrays)


def _arrays(operands: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any]]:
    """(the operands, quantised ones as their tensors, the facts about these that the tensors do not show)."""
    arrays: list[Any] = []
    layouts: list[Any] = []
    for each in operands:
        if isinstance(each, QTensor):
            arrays += parts_of(each)
            layouts.append(tuple([_form_facts(form) for form in forms_of(each)]))
        else:
            arrays.append(each)
    return tuple(arrays), layouts


def _form_facts(form: QTensor[Any]) -> tuple[Any, ...]:
    """The facts of a quantised tensor that its component tensors do not show."""
    there = (form.scales is not None, form.group_scales is not None)
    return form.format, form.axis, tuple(form.shape), form.dtype, there


class _Master(NamedTuple):
    """Facts of the master tensors of a quantised operand: the dtype as a spec names it, and their form."""

    dtype: str
    tensors: int
    packed: bool


def _with_master(operand: Any) -> tuple[Any, Any, _Master | None]:
    """(what receives the gradient, the operand itself, facts of the former if it is the master of a quantised one)."""
    master = master_of(operand)
    if master is None or master is operand:
        return master, operand, None
    several = members(master)
    facts = _Master(dtype_name(several[0].dtype), len(several), is_packed(several))
    return master, operand.q if isinstance(operand, StraightThrough) else operand, facts


def whole_operand(operand: Any) -> Any:
    """A weight or bias as the rules read it: a packed tensor, a list of one per group, a quantised tensor, or None."""
    return list(operand) if isinstance(operand, tuple) else operand


def packed_spec(operand: Any, packed_rank: int) -> Any:
    """The spec of an operand; a list has the spec of the packed tensor, and None has none.

    Args:
        packed_rank: number of axes of the packed tensor; 0 for an operand of rows.
    """
    if operand is None:
        return None
    if isinstance(operand, QTensor):
        return quantized_spec(operand, fixed_spec)
    if isinstance(operand, Tensor):
        return fixed_spec(operand) if packed_rank else rows_spec(operand)
    one = fixed_spec(operand[0])
    return ArraySpec((len(operand), *one.shape), one.dtype)


def _static(spec: OperandSpec | None) -> Any:
    """A spec without arrays and without M, so that the static facts are the same for every M."""
    if spec is None:
        return None
    shape = spec.shape if len(spec.shape) == 3 else (-1, *spec.shape[1:])
    if isinstance(spec, QuantizedSpec):
        nothing = ArraySpec((), spec.values.dtype)
        return spec._replace(values=nothing, scales=None, group_scales=None, shape=shape, other=None)
    return spec._replace(shape=shape)


def _check_rows(operation: str, name: str, rows: Any, first: Tensor) -> None:
    if isinstance(rows, QTensor):
        for part in parts_of(rows):
            check_operand(name, part, first)
        return
    check_operand(name, rows, first)
    check_memory(name, rows)
    check_rank(operation, "x", name, rows.shape)


def _check_weight(kind: tuple[str, str], name: str, weight: Any, first: Tensor, *, transposed: bool) -> None:
    if isinstance(weight, QTensor):
        for part in parts_of(weight):
            check_operand(name, part, first)
        return
    check_members(kind, name, weight, first, transposed=transposed)


def check_members(
    kind: tuple[str, str], name: str, value: Tensor | Sequence[Tensor], x: Tensor, *, transposed: bool = False
) -> None:
    """Checks a weight or bias: one packed tensor, or G tensors with one axis less.

    Args:
        kind: operation and argument in `grouped_core.ranks.AXES`. name: the argument's name in messages. x: the tensor
            whose device is expected. transposed: layout of weights.

    Raises:
        TypeError: not a tensor, or a list of mixed dtypes. ValueError: an empty list, members of different shapes, a
            wrong number of axes, another device, not contiguous, or without memory.
    """
    if isinstance(value, Tensor):
        check_operand(name, value, x)
        check_memory(name, value)
        ranks.check_rank(*kind, name, value.shape, transposed=transposed)
        return
    if not isinstance(value, (list, tuple)):
        raise TypeError(
            f"`{name}`: {type(value).__name__}, expected a torch.Tensor {ranks.letters(*kind, transposed=transposed)} "
            "or a list of tensors, one per group; pass one of them."
        )
    if not value:
        raise ValueError(f"`{name}`: an empty list, expected one tensor per group; pass at least one.")
    for index, member in enumerate(value):
        check_operand(f"{name}[{index}]", member, x)
        check_memory(f"{name}[{index}]", member)
        ranks.check_member(*kind, f"{name}[{index}]", member.shape, transposed=transposed)
        if member.shape != value[0].shape:
            raise ValueError(
                f"`{name}[{index}]`: shape {tuple(member.shape)}, expected {tuple(value[0].shape)} = shape of "
                f"`{name}[0]`; pass tensors of one shape."
            )
        if member.dtype != value[0].dtype:
            raise TypeError(
                f"`{name}[{index}]`: dtype {member.dtype}, expected {value[0].dtype} = dtype of `{name}[0]`; "
                "pass tensors of one dtype."
            )


def check_bound(bound: BoundRecipe, groups: int, x: Tensor, products: int = 1) -> None:
    """`scaling.check_bound` for tensors on the device of `x`; if `x` is a meta tensor, a state may be on any device.

    Raises:
        TypeError, ValueError: not a tensor, on another device, not contiguous, or not fit for this use.
    """
    if bound.key is not None:
        check_operand("key", bound.key, x)
    if isinstance(bound.state, ScalingState):
        for name in ("scale", "history"):
            each = getattr(bound.state, name)
            check_operand(f"state.{name}", each, each if x.device.type == "meta" else x)
    scaling.check_bound(bound, groups, products, fixed_spec)


# ---------------------------------------------------------------------------------------------------------------------
# Accumulators and buffers


def leaf_names(leaves: Sequence[Tensor], name: str) -> list[str]:
    """The names that messages use for the tensors of the weight argument `name`."""
    return [name] if is_packed(leaves) else [f"{name}[{at}]" for at in range(len(leaves))]


def is_packed(leaves: Sequence[Tensor]) -> bool:
    """Whether a weight is one packed tensor; otherwise it is one tensor per group, or a pair with all groups each."""
    return len(leaves) == 1 and leaves[0].dim() == 3


def accumulators_of_product(
    given: Any, leaves: list[Tensor], spec: OperandSpec, rows: Any, accum_name: str, weight_name: str
) -> Sequence[Tensor | None]:
    """`wgrad_accum` of one weight as one destination per tensor of the weight; () without accumulators."""
    if given is None or (isinstance(given, str) and given == "main_grad"):
        return ()
    if leaves:
        return accumulators_of(given, leaves, accum_name, weight_name)
    if not isinstance(given, Tensor):
        raise ValueError(
            f"`{accum_name}`: {given!r}, expected a tensor {spec.shape}, because the weight is quantised and packed; "
            "pass one."
        )
    _check_accumulator(accum_name, given, ArraySpec(spec.shape, spec.dtype), home(rows))
    return [given]


def _accumulators_of_mlp(
    given: Any, leaves: tuple[list[Tensor], ...], specs: MlpSpecs, rows: Any
) -> tuple[Sequence[Tensor | None], ...]:
    if given is None or (isinstance(given, str) and given == "main_grad"):
        return (), ()
    pair = accumulator_pair(given, "put None where a weight has no accumulator")
    names = ((f"{MLP_NAMES.accum}[0]", MLP_NAMES.wi), (f"{MLP_NAMES.accum}[1]", MLP_NAMES.wo))
    one, two = (
        accumulators_of_product(each, own, spec, rows, *name)
        for each, own, spec, name in zip(pair, leaves, (specs.wi, specs.wo), names, strict=True)
    )
    return one, two


def accumulator_pair(given: Any, advice: str) -> Sequence[Any]:
    """`wgrad_accum` of an MLP, other than "main_grad", as (the part of wi, the part of wo).

    Raises:
        ValueError: it is not a pair; the message ends with `advice`.
    """
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise ValueError(
            f"`{MLP_NAMES.accum}`: {given!r}, expected None, 'main_grad' or a pair for `{MLP_NAMES.wi}` and "
            f"`{MLP_NAMES.wo}`; {advice}."
        )
    return given


def accumulators_of(given: Any, leaves: list[Tensor], accum_name: str, weight_name: str) -> list[Tensor | None]:
    """`wgrad_accum` of a weight as one destination per tensor of the weight.

    Raises:
        ValueError, TypeError: its form differs from the weight's (one tensor or a list), or a tensor does not fit.
    """
    found: list[Any] | None = (
        [given] if isinstance(given, Tensor) else list(given) if isinstance(given, (list, tuple)) else None
    )
    if found is None:
        raise ValueError(
            f"`{accum_name}`: {given!r}, expected None, a tensor for a packed weight or a list of tensors for a "
            "list of weights, or 'main_grad' for all weights of the operation; pass one of them."
        )
    if len(found) != len(leaves) or is_packed(leaves) != isinstance(given, Tensor):
        raise ValueError(
            f"`{accum_name}`: {len(found)} tensors, expected one for each of the {len(leaves)} weights, in the same "
            "form (a tensor for a packed weight, a list for a list); pass None for a frozen member of a list."
        )
    owners = leaf_names(leaves, weight_name)
    for at, (accumulator, leaf, owner) in enumerate(zip(found, leaves, owners, strict=True)):
        name = accum_name if isinstance(given, Tensor) else f"{accum_name}[{at}]"
        if accumulator is None:
            if leaf.requires_grad:
                raise ValueError(
                    f"`{name}`: None, expected a tensor, because `{owner}` needs a gradient; pass one or freeze it."
                )
            continue
        _check_accumulator(name, accumulator, fixed_spec(leaf), leaf)
    return found


def _check_accumulator(name: str, accumulator: Tensor, spec: ArraySpec, first: Tensor) -> None:
    check_operand(name, accumulator, first)
    linear_spec.check_accumulator(name, fixed_spec(accumulator), spec)
    check_writable(name, accumulator)


def check_writable(name: str, buffer: Tensor) -> None:
    """Refuses a buffer that requires a gradient or belongs to another framework."""
    if buffer.requires_grad:
        raise ValueError(f"`{name}`: requires_grad is True, expected False; pass `{name}.detach()`.")
    if is_foreign(buffer):
        raise ValueError(
            f"`{name}`: memory of another framework (it came by `exchange`), expected memory of torch; "
            "allocate it with torch, because the other framework must not see it change."
        )


def check_buffers(given: Arguments, out: Tensor | None, grad_input: Tensor | None) -> None:
    """BUF-2 for what the rules do not check themselves; they check the shape and dtype of `out`."""
    written = []
    for name, buffer in ((NAMES.out, out), (NAMES.grad_input, grad_input)):
        if buffer is not None:
            check_operand(name, buffer, home(given.x))
            check_writable(name, buffer)
            written.append((name, buffer))
    check_apart_from_operands(written, given)
    if grad_input is None:
        return
    spec: Any = packed_spec(given.x, 0)
    linear_spec.check_buffer(NAMES.grad_input, rows_spec(grad_input), ArraySpec(spec.shape, wide(spec.dtype)))
    if given.leaf is None or not given.leaf.requires_grad:
        raise ValueError(
            f"`{NAMES.grad_input}`: given, but `x` needs no gradient; expected None, or an x with requires_grad; "
            "leave it out."
        )


def check_gradient(dy: Tensor, grad_input: Tensor | None, accumulators: Sequence[Sequence[Tensor | None]]) -> None:
    """BUF-2 for dy, which forward cannot check: dy is still read while the buffers are written."""
    if is_compiling():
        return
    start, end = dy.data_ptr(), dy.data_ptr() + dy.nbytes
    for name, part in ((NAMES.grad_input, (grad_input,)), *((NAMES.accum, part) for part in accumulators)):
        for each in part:
            if each is not None and each.data_ptr() < end and start < each.data_ptr() + each.nbytes:
                check_apart([(name, each)], [("dy", dy)])  # raises with the full message


Named = Iterable[tuple[str, Tensor | None]]
"""Tensors and their names in messages."""


def check_apart_from_operands(written: Named, given: Arguments) -> None:
    """Refuses tensors that backward or forward writes where they overlap an operand."""
    if is_compiling():  # there are no addresses yet
        return
    names, two = given.checked.op.names, len(given.biases) == 2
    read = [(names.sizes, given.sizes), (names.probs if two else names.row_scale, given.row_scale)]
    read += [(f"{LORA}_key", given.key), *[(name, each) for name, base in given.base for each in _tensors(base)]]
    read += [(names.x, each) for each in _tensors(given.x)]
    for name, operand in zip(given.names, given.weights, strict=True):
        tensors = _tensors(operand)
        plain = not isinstance(operand, QTensor)
        read += zip(leaf_names(tensors, name) if plain else [name] * len(tensors), tensors, strict=True)
    biases = (MLP_NAMES.wi_bias, MLP_NAMES.wo_bias) if two else (NAMES.bias,)
    read += [(name, each) for name, some in zip(biases, given.biases, strict=True) for each in members(some)]
    check_apart(written, read)


def _tensors(operand: Any) -> list[Tensor]:
    if isinstance(operand, QTensor):
        return parts_of(operand)
    return [operand.gate, operand.up] if isinstance(operand, Paired) else members(operand)


def check_apart(written: Named, read: Named) -> None:
    """`memory.check_apart` for named tensors; tensors without memory overlap with nothing."""
    memory.check_apart(*([_span(*each) for each in named if each[1] is not None] for named in (written, read)))


def _span(name: str, tensor: Any) -> Span:
    start = 0 if tensor.is_meta else tensor.data_ptr()
    return Span(name, start, start + tensor.nbytes if start else 0)
