"""Checks the arguments of the public operations and converts them to the form that the rules take.

The checks depend only on facts of the operands (shapes, dtypes, layouts) and on the options, so their result is cached,
with these as the key. Operands without plain memory have no such facts; their checks run in every call.
Letters: G groups, M rows, K in, N out.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core import activations, linear_spec, memory, mlp_spec, scaling
from grouped_core.activations import Activation
from grouped_core.calls import ArraySpec, OperandSpec, QuantizedSpec
from grouped_core.formats import QTensor, as_flag, wide
from grouped_core.linear_spec import Linear, Names, implementation_names, recipe_option
from grouped_core.lora import LORA
from grouped_core.memory import Span
from grouped_core.mlp_spec import Mlp, MlpNames, MlpSpecs, Residuals
from grouped_core.plans import Planner
from grouped_core.products import in_form, operand_spec, quantized_spec
from grouped_core.ranks import check_member, check_rank, letters
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.scaling import ScalingState
from grouped_core.sizes import GroupSizes, unwrap
from torch_bridge._cache import Cache
from torch_bridge._checks import MLP_NAMES, NAMES, address, check_operand, check_readable, is_negated, refuse_transforms
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
    tensors_of,
)
from torch_bridge._weight_forms import WeightForms
from torch_bridge.exchange import is_foreign
from torch_bridge.sizes import prepare_sizes

Members = Tensor | Sequence[Tensor]
"""One packed tensor, or a list of one tensor per group."""

Accumulators = str | tuple[Tensor | Sequence[Tensor | None] | None, Tensor | Sequence[Tensor | None] | None]
"""The argument `wgrad_accum` of an MLP: "main_grad", or a pair of accumulators for the two weights."""


class Arguments(NamedTuple):
    """The checked arguments of a linear operation, or of an MLP, which has two products.

    Attributes:
        x, weights, biases: the operands as the rules read them. row_scale: for an MLP, the probabilities.
        sizes: the group sizes; for `routed_mlp`, the experts of the tokens.
        leaf: the tensor that receives the gradient of x, or None. leaves_of: for each weight, the tensor or the tensors
            that receive its gradient, or None.
        checked: the result of the checks. scaling: the states and the key that are bound to the recipe.
        accumulators: for each weight, a tensor or None per leaf; () without accumulators.
        caches: for each weight, the cache in which its layer keeps the quantised weight, or None.
        base: with adapters, (name, operand) of each frozen weight; `weights` are then the factors A and B of the
            adapters. Without adapters: (). key: the random key of the adapters' dropout, or None.
    """

    x: Tensor | QTensor[Tensor]
    weights: Sequence[Any]
    sizes: Tensor
    biases: tuple[Any, ...]
    row_scale: Tensor | None
    leaf: Tensor | None
    leaves_of: Sequence[Any]
    checked: Checked
    scaling: Scaling
    to_main_grad: bool
    accumulators: tuple[Sequence[Tensor | None], ...]
    caches: tuple[WeightForms | None, ...]
    base: tuple[tuple[str, Any], ...] = ()
    key: Tensor | None = None

    @property
    def leaves(self) -> tuple[list[Tensor], ...]:
        """For each weight, the tensors that receive its gradient."""
        return tuple(map(members, self.leaves_of))

    def receivers(self) -> list[Tensor | None]:
        """Returns the tensors that the autograd function takes as inputs: `leaf`, the row scale, the leaves of each
        weight, and the tensors of each bias. None takes the place of a quantised weight without a master weight.
        """
        found: list[Tensor | None] = [self.leaf, self.row_scale]
        for each in self.leaves_of:
            found += members(each) or [None]
        for bias in self.biases:
            if bias is not None:
                found += members(bias)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Checked:
    """The result of the checks of a call. It is cached, and all calls with the same facts and options share it.

    Attributes:
        op: the operation. specs: the specs of its operands.
        lists: how many tensors its weights and biases consist of. names: the names of the weights in messages.
        asked: two dictionaries, filled by `_autograd`, from the gradients that a call needs to the facts for forward
            and backward: for calls in which autograd gets all gradients, and for other calls.
    """

    op: Any
    specs: Any
    lists: Lists
    names: tuple[str, ...]
    asked: tuple[dict[tuple[bool, ...], Any], ...] = field(default_factory=lambda: ({}, {}))


Lists = tuple[tuple[int, bool], ...]
"""One entry (number of tensors, whether it is one packed tensor) for each weight, then one for each bias. A quantised
weight without a master weight counts as one packed tensor, and an absent bias has the entry (0, False)."""

_checked: Cache[Any, FactsCache] = Cache()
"""For each set of options, a cache of the results of the checks, with the facts of the operands as the key."""


def lists_of(leaves_of: Sequence[Members | None], biases: Sequence[Members | None]) -> Lists:
    """Returns the entries of `Lists` for the tensors of each weight (`Arguments.leaves_of`) and for the biases."""
    weights = [(len(own) or 1, not own or is_packed(own)) for own in map(members, leaves_of)]
    return (*weights, *[(len(members(bias)), isinstance(bias, Tensor)) for bias in biases])


def positions(check: Callable[..., Arguments], *names: str) -> tuple[int, ...]:
    """Returns the positions of the arguments with these names among those of a function that checks arguments."""
    order = list(inspect.signature(check).parameters)
    return tuple([order.index(name) for name in names])


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
    """Checks the arguments of `grouped_linear` and returns them; it raises the errors of that function."""
    refuse_transforms("grouped_linear", x, weight, bias, row_scale)
    sizes, rows_hint = unwrap(group_sizes)
    bound = recipe_option(recipe)
    names = implementation_names(implementation)
    flags = as_flag("rhs_transposed", rhs_transposed), as_flag("scale_bias", scale_bias)
    options = (flags[0], bound.recipe, flags[1], rows_hint, names)
    return _arguments(
        _check_linear, _WEIGHT, x, (weight,), sizes, row_scale, (bias,), options, (bound,), wgrad_accum, caches
    )


_WEIGHT = (NAMES.w,)


def _check_linear(
    operands: tuple[Any, ...], bounds: tuple[BoundRecipe, ...], options: tuple[Any, ...], dtypes: tuple[Any, ...]
) -> tuple[Tensor, Any, Any]:
    """Returns (sizes as the kernels read them, the operation, its specs), or raises if operands do not fit together."""
    rows, weight, sizes, row_scale, bias = operands
    transposed, recipe, scale_bias, rows_hint, names = options
    x_dtype, w_dtype = dtypes
    first = home(rows)
    check_rows(NAMES.x, rows, first)
    sizes, _ = prepare_sizes(sizes, first, NAMES)
    _check_weight(("linear", "w"), NAMES.w, weight, first, transposed=transposed)
    if bias is not None:
        check_members(("linear", "bias"), NAMES.bias, bias, first)
    if row_scale is not None:
        check_readable(NAMES.row_scale, row_scale, first)
    specs = (packed_spec(rows, rows=True), packed_spec(weight), packed_spec(bias), packed_spec(row_scale, rows=True))
    op = Linear(
        NAMES,
        transposed=transposed,
        recipe=recipe,
        scale_bias=scale_bias,
        rows_hint=rows_hint,
        implementation=names,
        few_rows=linear_spec.has_few_rows(specs[0].shape[0], specs[1].shape[0]),
    )
    linear_spec.check_linear(op, specs[0], specs[1], fixed_spec(sizes), *specs[2:])
    check_bound(bounds[0], specs[1].shape[0], first)
    if isinstance(rows, QTensor) or isinstance(weight, QTensor):  # gradients have the dtypes of the master tensors
        op = dataclasses.replace(op, recipe=op.resolve(*specs[:2]), wgrad_dtype=w_dtype)
        specs = (specs[0]._replace(dtype=x_dtype or specs[0].dtype), *specs[1:])
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
    operation: str = "grouped_mlp",
    names: MlpNames = MLP_NAMES,
    check: Callable[..., tuple[Tensor, Mlp, MlpSpecs]] | None = None,
    max_rows: int | None = None,
) -> Arguments:
    """Checks the arguments of `grouped_mlp` and returns them; it raises the errors of that function.

    Args:
        recipe: may also be a pair of bound recipes, for two layers that each have their own scaling state.
        join: whether gate and linear half are concatenated if they have to be quantised; otherwise that is refused.
        operation, names, check: the name, the argument names and the check function (see `_arguments`) of an MLP with
            corresponding arguments, such as `routed_mlp`; by default those of `grouped_mlp`.
        max_rows: the option of `routed_mlp`.
    """
    refuse_transforms(operation, x, wi, wo, probs, wi_bias, wo_bias)
    sizes, hint = unwrap(group_sizes)
    of_layers = isinstance(recipe, tuple) and len(recipe) == 2 and isinstance(recipe[0], BoundRecipe)
    bounds = recipe if of_layers else (recipe_option(recipe),)
    pinned = implementation_names(implementation)
    paired = is_pair(wi)
    transposed = as_flag(names.transposed, rhs_transposed)
    options = (names, activation, transposed, bounds[0].recipe, residuals, hint, max_rows, pinned, paired)
    if paired and join and mlp_spec.joins(op := mlp_of(options), _with_master(x)[1]):
        wi, options = _joined_pair(op, wi, wgrad_accum), (*options[:-1], False)
    weights, biases, of_weights = (wi, wo), (wi_bias, wo_bias), (names.wi, names.wo)
    check = check or _check_mlp
    return _arguments(check, of_weights, x, weights, sizes, probs, biases, options, bounds, wgrad_accum, caches)


def mlp_of(options: Sequence[Any]) -> Mlp:
    """Makes the operation from the options that `mlp_arguments` collects."""
    names, activation, transposed, recipe, residuals, hint, max_rows, pinned, paired = options
    kind, policy = activations.resolve(activation), Residuals(mlp_spec.residuals_option(residuals).policy)
    return Mlp(
        names, kind, transposed, recipe, policy, rows_hint=hint, implementation=pinned, paired=paired, max_rows=max_rows
    )


def _check_mlp(
    operands: tuple[Any, ...], bounds: tuple[BoundRecipe, ...], options: tuple[Any, ...], dtypes: tuple[Any, ...]
) -> tuple[Tensor, Any, Any]:
    """Returns (sizes as the kernels read them, the operation, its specs), or raises if operands do not fit together."""
    rows, wi, wo, sizes, probs, *biases = operands
    op, first = mlp_of(options), home(rows)
    check_rows(op.names.x, rows, first)
    sizes, _ = prepare_sizes(sizes, first, Names(op.names.x, op.names.wi))
    if probs is not None:
        check_readable(op.names.probs, probs, first)
    of_wi, of_wo, *of_biases = weight_specs(op, wi, wo, biases, first)
    specs = MlpSpecs(packed_spec(rows, rows=True), of_wi, of_wo, packed_spec(probs, rows=True), *of_biases)
    mlp_spec.check(op, *specs[:3], fixed_spec(sizes), *specs[3:])
    return sizes, *checked_mlp(op, specs, bounds, dtypes, first)


def weight_specs(op: Mlp, wi: Any, wo: Any, biases: Sequence[Any], first: Tensor) -> tuple[Any, ...]:
    """Checks each weight and bias by itself, against the device of `first`; returns the specs of all of them."""
    names = op.names
    if op.paired:
        for at, half in enumerate(wi):
            check_operand(f"{names.wi}[{at}]", half, first)
        mlp_spec.check_pair(op, *map(fixed_spec, wi))
        of_wi: Any = operand_spec(Planner(), in_form(op.fc1(), tuple(map(fixed_spec, wi))))
    else:
        _check_weight(("mlp", "wi"), names.wi, wi, first, transposed=op.transposed)
        of_wi = packed_spec(wi)
    _check_weight(("mlp", "wo"), names.wo, wo, first, transposed=op.transposed)
    for name, bias in zip(("wi_bias", "wo_bias"), biases, strict=True):
        if bias is not None:
            check_members(("mlp", name), getattr(names, name), bias, first)
    return of_wi, packed_spec(wo), *[packed_spec(bias) for bias in biases]


def checked_mlp(
    op: Mlp, specs: MlpSpecs, bounds: tuple[BoundRecipe, ...], dtypes: tuple[Any, ...], first: Tensor
) -> tuple[Mlp, MlpSpecs]:
    """Checks the bound recipes of an MLP; returns (the operation, static specs). `dtypes`: see `_arguments`."""
    groups = specs.wo.shape[0]
    for each in bounds:
        check_bound(each, groups, first, products=3 - len(bounds))
    few_rows = linear_spec.has_few_rows(specs.x.shape[0], groups)
    return dataclasses.replace(op, master_dtypes=dtypes[1:], few_rows=few_rows), MlpSpecs(*map(_static, specs))


def is_pair(operand: Any) -> bool:
    """Whether a first weight is a pair (gate half, linear half) with all groups each, not a list of one per group."""
    if not isinstance(operand, (list, tuple)) or len(operand) != 2:
        return False
    return isinstance(operand[0], Tensor) and operand[0].dim() == 3


def _joined_pair(op: Mlp, wi: Any, wgrad_accum: Any) -> Tensor:
    """Concatenates a pair to one weight [G, 2F, K] ([G, K, 2F]) for quantisation, whose scales cover both halves.

    Each half still receives its own gradient.

    Raises:
        TypeError, ValueError: the halves do not fit together. NotImplementedError: the pair has accumulators.
    """
    for at, half in enumerate(wi):
        check_operand(f"{MLP_NAMES.wi}[{at}]", half, wi[0])
    mlp_spec.check_pair(op, *map(fixed_spec, wi))
    if isinstance(wgrad_accum, str):  # `main_grad` of frozen halves is not looked up
        accumulates = any(half.requires_grad for half in wi)
    else:
        accumulates = wgrad_accum is not None and wgrad_accum[0] is not None
    mlp_spec.check_join(op, accumulates)
    return torch.cat(list(wi), dim=op.fc1().weight_axes()[1])


# ---------------------------------------------------------------------------------------------------------------------
# Operands


def _arguments(
    check: Callable[..., tuple[Tensor, Any, Any]],
    names: tuple[str, ...],
    x: Any,
    weights: Sequence[Any],
    sizes: Any,
    row_scale: Tensor | None,
    biases: tuple[Any, ...],
    options: tuple[Any, ...],
    bounds: tuple[BoundRecipe, ...],
    wgrad_accum: Any,
    caches: tuple[WeightForms | None, ...],
) -> Arguments:
    """Checks the arguments of an operation, unless the result for such operands is cached, and returns them.

    Args:
        check: a function (operands, bound recipes, options, dtypes of the master tensors of x and of the weights) ->
            (sizes as the kernels read them, the operation, specs). It runs only if there is no cached result.
        names: the names of the weight arguments; they also tell the operations apart in the key of the cache.
        sizes: the group sizes, or the experts of `routed_mlp`. row_scale: for an MLP, the probabilities.
        options: the other options, hashable. bounds: one bound recipe for all products, or one for each product.
    """
    leaf, leaves_of, masters = x, weights, ()
    arrays = operands = (x, *weights, sizes, row_scale, *biases)
    key = (names, options)
    is_plain = PLAIN.issuperset(map(type, operands))
    if not is_plain:
        (leaf, *leaves_of), (x, *weights), masters = zip(*map(_with_master, (x, *weights)), strict=True)
        operands = (x, *weights, sizes, row_scale, *biases)
        arrays, layouts = _arrays(operands)
        key = (names, options, masters, *layouts)
    bound_scaling = _UNBOUND
    if bounds[0].key is not None or bounds[0].state is not None:
        bound_scaling = Scaling(bounds[0].key, tuple([bound.state for bound in bounds if bound.state is not None]))
        for bound in bounds:
            own = (bound.state.scale, bound.state.history) if isinstance(bound.state, ScalingState) else ()
            arrays, key = (*arrays, bound.key, *own), (*key, bound.key is None)
    cache = found = None
    if is_plain or not is_compiling():  # otherwise lengths may be symbols, which have no hash
        try:
            cache = _checked.get(key)
            if cache is None:
                cache = _checked.keep(key, facts_cache())
        except TypeError:  # an option without a hash, such as a list, which the checks refuse
            cache = None
        for each in arrays:  # facts do not show that a tensor is negated; the checks refuse it
            if each.is_neg() if type(each) is Tensor else each is not None and is_negated(each):
                break
        else:
            found = None if cache is None else cache.find(arrays)
    if found is None:
        dtypes = tuple([each and each[0] for each in masters]) or (None,) * (1 + len(weights))
        checked_sizes, op, specs = check(operands, bounds, options, dtypes)
        found = Checked(op, specs, lists_of(leaves_of, biases), names)
        if cache is not None and checked_sizes is sizes:
            cache.keep(arrays, 0, found)
        sizes = checked_sizes
    if not is_plain:
        weights, biases = tuple(map(whole_operand, weights)), tuple(map(whole_operand, biases))
    if found.op.paired:
        weights = (in_form(found.op.fc1(), tuple(weights[0])), weights[1])
    accumulators: tuple[Sequence[Tensor | None], ...] = ((),) * len(weights)
    if wgrad_accum is not None:
        accumulators = _accumulators(wgrad_accum, names, leaves_of, found.specs[1 : 1 + len(weights)], x)
    to_main_grad = isinstance(wgrad_accum, str)
    arguments = Arguments(
        x, weights, sizes, biases, row_scale, leaf, leaves_of, found, bound_scaling, to_main_grad, accumulators, caches
    )
    if wgrad_accum is not None and any(accumulators):
        single = isinstance(wgrad_accum, Tensor)
        parts = [[each] for each in accumulators[0]] if len(weights) == 1 else accumulators
        named = [(NAMES.accum if single else f"{NAMES.accum}[{at}]", part) for at, part in enumerate(parts)]
        check_apart_from_operands([(name, each) for name, part in named for each in part], arguments)
    return arguments


_UNBOUND = Scaling()


def _arrays(operands: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any]]:
    """Replaces quantised operands by their tensors. Returns (all operands, per operand the layouts of its forms)."""
    arrays: list[Any] = []
    layouts: list[Any] = []
    for each in operands:
        forms = forms_of(each) if isinstance(each, QTensor) else []
        arrays += [part for form in forms for part in form.slots] or [each]
        layouts.append(tuple([(form.format, form.axis, tuple(form.shape), form.dtype) for form in forms]))
    return tuple(arrays), layouts


def _with_master(operand: Any) -> tuple[Any, Any, tuple[Any, ...] | None]:
    """Returns (what receives the gradient, the operand itself, (dtype, entry of `Lists`) of its master or None)."""
    if not isinstance(operand, StraightThrough):
        return master_of(operand), operand, None
    return operand.master, operand.q, (dtype_name(members(operand.master)[0].dtype), *lists_of((operand.master,), ()))


def whole_operand(operand: Any) -> Any:
    """Converts a tuple to a list: rules read a packed tensor, a list of one per group, a quantised tensor, or None."""
    return list(operand) if isinstance(operand, tuple) else operand


def packed_spec(operand: Any, *, rows: bool = False) -> Any:
    """Returns the spec of an operand, for a list that of the packed tensor. `rows`: the first axis is M."""
    if operand is None:
        return None
    if isinstance(operand, QTensor):
        return quantized_spec(operand, fixed_spec)
    if isinstance(operand, Tensor):
        return rows_spec(operand) if rows else fixed_spec(operand)
    one = fixed_spec(operand[0])
    return ArraySpec((len(operand), *one.shape), one.dtype)


def _static(spec: OperandSpec | None) -> Any:
    """Removes arrays and M from a spec, so that the static facts are the same for every M."""
    if spec is None:
        return None
    shape = spec.shape if len(spec.shape) == 3 else (-1, *spec.shape[1:])
    if isinstance(spec, QuantizedSpec):
        nothing = ArraySpec((), spec.values.dtype)
        return spec._replace(values=nothing, scales=None, group_scales=None, shape=shape, other=None)
    return spec._replace(shape=shape)


def check_rows(name: str, rows: Any, first: Tensor) -> None:
    """Checks rows, quantised or not, as operands on the device of `first`. Raises TypeError or ValueError."""
    for part in parts_of(rows) if isinstance(rows, QTensor) else [rows]:
        check_readable(name, part, first)
    if isinstance(rows, Tensor):
        check_rank("linear", "x", name, rows.shape)


def _check_weight(kind: tuple[str, str], name: str, weight: Any, first: Tensor, *, transposed: bool) -> None:
    if isinstance(weight, QTensor):
        check_rows(name, weight, first)
    else:
        check_members(kind, name, weight, first, transposed=transposed)


def check_members(
    kind: tuple[str, str], name: str, value: Tensor | Sequence[Tensor], x: Tensor, *, transposed: bool = False
) -> None:
    """Checks a weight or bias: one packed tensor, or G tensors with one axis less.

    Args:
        kind: operation and argument, keys of `grouped_core.ranks.AXES`. name: the argument's name in messages. x: a
            tensor on the device that is expected. transposed: the layout of a weight.

    Raises:
        TypeError: not a tensor, or a list of mixed dtypes. ValueError: an empty list, members of different shapes, a
            wrong number of axes, another device, not contiguous, or without memory.
    """
    if isinstance(value, Tensor):
        check_readable(name, value, x)
        check_rank(*kind, name, value.shape, transposed=transposed)
        return
    if not isinstance(value, (list, tuple)):
        raise TypeError(
            f"`{name}`: {type(value).__name__}, expected a torch.Tensor {letters(*kind, transposed=transposed)} "
            "or a list of tensors, one per group; pass one of them."
        )
    if not value:
        raise ValueError(f"`{name}`: an empty list, expected one tensor per group; pass at least one.")
    for index, member in enumerate(value):
        check_readable(f"{name}[{index}]", member, x)
        check_member(*kind, f"{name}[{index}]", member.shape, transposed=transposed)
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
    """Returns the accumulators of one weight, one for each of its tensors; () if `wgrad_accum` gives none."""
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


def _accumulators(
    given: Any, names: tuple[str, ...], leaves_of: Sequence[Any], specs: Sequence[OperandSpec], rows: Any
) -> tuple[Sequence[Tensor | None], ...]:
    """Returns the accumulators of each weight from `wgrad_accum`; `names` and `specs` are those of the weights."""
    each, accums = [given] * len(names), [NAMES.accum]
    if len(names) > 1:
        accums = [f"{NAMES.accum}[{at}]" for at in range(len(names))]
        if not (isinstance(given, str) and given == "main_grad"):
            each = accumulator_pair(given, "put None where a weight has no accumulator")
    products = zip(each, map(members, leaves_of), specs, accums, names, strict=True)
    return tuple([accumulators_of_product(own, tensors, spec, rows, *of) for own, tensors, spec, *of in products])


def accumulator_pair(given: Any, advice: str, expected: str = "None, 'main_grad' or a pair") -> Sequence[Any]:
    """Checks that `wgrad_accum` of an MLP, if it is not "main_grad", is a pair (for wi, for wo), and returns it.

    Args:
        advice: the end of the message, which says what to do. expected: what the message says was expected.

    Raises:
        ValueError: it is not a pair.
    """
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        shown = repr(given) if isinstance(given, str) else f"a {type(given).__name__}"
        shown = f"{shown} of {len(given)}" if isinstance(given, (tuple, list)) else shown
        raise ValueError(
            f"`{MLP_NAMES.accum}`: {shown}, expected {expected} for `{MLP_NAMES.wi}` and `{MLP_NAMES.wo}`; {advice}."
        )
    return given


def accumulators_of(given: Any, leaves: list[Tensor], accum_name: str, weight_name: str) -> list[Tensor | None]:
    """Returns `wgrad_accum` of a weight as a list with one accumulator or None for each tensor of the weight.

    Raises:
        ValueError, TypeError: its form differs from the weight's (one tensor or a list), or a tensor does not fit.
    """
    if not isinstance(given, (Tensor, list, tuple)):
        raise ValueError(
            f"`{accum_name}`: {given!r}, expected None, a tensor for a packed weight or a list of tensors for a "
            "list of weights, or 'main_grad' for all weights of the operation; pass one of them."
        )
    found: list[Any] = members(given)
    if len(found) != len(leaves) or is_packed(leaves) != isinstance(given, Tensor):
        raise ValueError(
            f"`{accum_name}`: {len(found)} tensors, expected one for each of the {len(leaves)} weights, in the same "
            "form (a tensor for a packed weight, a list for a list); pass None for a frozen member of a list."
        )
    names = (leaf_names(leaves, accum_name), leaf_names(leaves, weight_name))
    for accumulator, leaf, name, owner in zip(found, leaves, *names, strict=True):
        if accumulator is not None:
            _check_accumulator(name, accumulator, fixed_spec(leaf), leaf)
        elif leaf.requires_grad:
            raise ValueError(
                f"`{name}`: None, expected a tensor, because `{owner}` needs a gradient; pass one or freeze it."
            )
    return found


def _check_accumulator(name: str, accumulator: Tensor, spec: ArraySpec, first: Tensor) -> None:
    check_operand(name, accumulator, first, written=True)
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
    """Checks `out` and `grad_input` as BUF-2 says, except the shape and the dtype of `out`, which the rules check."""
    written = []
    for name, buffer in ((NAMES.out, out), (NAMES.grad_input, grad_input)):
        if buffer is not None:
            check_readable(name, buffer, home(given.x), written=True)
            check_writable(name, buffer)
            written.append((name, buffer))
    check_apart_from_operands(written, given)
    if not is_compiling():
        check_apart(written, [(NAMES.accum, each) for part in given.accumulators for each in part])
    if grad_input is None:
        return
    spec: Any = packed_spec(given.x, rows=True)
    linear_spec.check_buffer(NAMES.grad_input, rows_spec(grad_input), ArraySpec(spec.shape, wide(spec.dtype)))
    if given.leaf is None or not given.leaf.requires_grad:
        raise ValueError(
            f"`{NAMES.grad_input}`: given, but `x` needs no gradient; expected None, or an x with requires_grad; "
            "leave it out."
        )


def check_gradient(dy: Tensor, grad_input: Tensor | None, accumulators: Sequence[Sequence[Tensor | None]]) -> None:
    """Refuses a dy that overlaps a buffer or an accumulator (BUF-2): backward reads dy while it writes these."""
    if is_compiling():
        return
    start = address(dy)
    end = start + dy.nbytes
    for name, part in ((NAMES.grad_input, (grad_input,)), *((NAMES.accum, part) for part in accumulators)):
        for each in part:
            if each is not None and address(each) < end and start < address(each) + each.nbytes:
                check_apart([(name, each)], [("dy", dy)])  # raises with the full message


Named = Iterable[tuple[str, Tensor | None]]
"""Pairs of the name of a tensor in messages and the tensor itself, or None."""


def check_apart_from_operands(written: Named, given: Arguments) -> None:
    """Refuses a tensor in `written`, which forward or backward writes, if it overlaps an operand."""
    if is_compiling():  # there are no addresses yet
        return
    names, two = given.checked.op.names, len(given.biases) == 2
    read = [(names.sizes, given.sizes), (names.probs if two else names.row_scale, given.row_scale)]
    read += [(f"{LORA}_key", given.key), *[(name, each) for name, base in given.base for each in tensors_of(base)]]
    read += [(names.x, each) for each in tensors_of(given.x)]
    for name, operand in zip(given.checked.names, given.weights, strict=True):
        tensors = tensors_of(operand)
        plain = not isinstance(operand, QTensor)
        read += zip(leaf_names(tensors, name) if plain else [name] * len(tensors), tensors, strict=True)
    biases = (MLP_NAMES.wi_bias, MLP_NAMES.wo_bias) if two else (NAMES.bias,)
    read += [(name, each) for name, some in zip(biases, given.biases, strict=True) for each in members(some)]
    check_apart(written, read)


def check_apart(written: Named, read: Named) -> None:
    """Refuses tensors in `written` that overlap another tensor; tensors without memory overlap with nothing."""
    placed = [[(name, each, address(each)) for name, each in named if each is not None] for named in (written, read)]
    memory.check_apart(*[[Span(name, at, at and at + each.nbytes) for name, each, at in some] for some in placed])
