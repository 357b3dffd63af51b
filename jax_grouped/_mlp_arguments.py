"""The arguments of the experts' MLP, of sorted rows (`grouped_mlp`) and of tokens (`routed_mlp`), checked.

Letters: G groups, M rows, T tokens, k experts per token, K hidden size of the model, F expert width, W columns of the
hidden rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from grouped_core import activations, calls, debug, linear_spec, routed, routing_spec, scaling
from grouped_core.activations import Activation
from grouped_core.calls import ArraySpec
from grouped_core.formats import as_flag
from grouped_core.mlp_spec import (
    Mlp,
    MlpNames,
    MlpSpecs,
    Residuals,
    check,
    check_join,
    check_pair,
    check_ranks,
    joins,
    residuals_option,
)
from grouped_core.plans import Planner
from grouped_core.products import in_form, operand_spec
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.sizes import unwrap
from jax_grouped import _accumulators as accumulate
from jax_grouped._arguments import as_bound, as_operand_spec, one_group, report_sizes, to_int32
from jax_grouped._mlp_gradients import NAMES, accumulators_of, like, members
from jax_grouped._nodes import master_dtype, value_of
from jax_grouped._run import RUN
from jax_grouped.ops import Take, operand_node, size_status
from jax_grouped.quantize import StraightThrough

ROUTED_NAMES = MlpNames(sizes="experts", probs="weights")


class Operands(NamedTuple):
    """The operands, as the operation takes them.

    Attributes:
        sizes: int32 [G]; of tokens the experts, int32 [T, k]. probs: [M]; of tokens the weights [T, k].
        tokens: int32 [1], T; None where x are sorted rows.
    """

    x: Any
    wi: Any
    wo: Any
    sizes: Any
    probs: Any
    wi_bias: Any
    wo_bias: Any
    out: Any
    accum_wi: Any
    accum_wo: Any
    bound: Any
    tokens: Any = None


def specs_of(op: Mlp, o: Operands, run: Any = RUN) -> MlpSpecs:
    """Specs of the operands that have gradients, in packed form, None where absent; of tokens those of their rows."""
    arrays = (value_of(o.x), in_form(op.fc1(), value_of(o.wi)), value_of(o.wo), o.probs, o.wi_bias, o.wo_bias)
    found: Any = [operand_spec(run, each) for each in arrays]
    specs = MlpSpecs(*found)
    return specs if op.keeps_rows else routed.row_specs(op, found[0], run.spec(o.sizes).shape[1], specs)


def prepare(
    take_operand: Take,
    take: Take,
    *,
    x: Any,
    wi: Any,
    wo: Any,
    rhs_transposed: bool,
    activation: str | Activation,
    wi_bias: Any,
    wo_bias: Any,
    recipe: Recipe | BoundRecipe | None,
    residuals: str | Residuals,
    wgrad_accum: Any,
    wgrad_dtype: DTypeLike | None,
    out: Any,
    implementation: str | Sequence[str] | None,
    group_sizes: Any = None,
    probs: Any = None,
    experts: Any = None,
    weights: Any = None,
    max_rows: int | None = None,
    join: bool = True,
) -> tuple[Mlp, Operands]:
    """The static parameters and the operands, checked; `take` converts an argument to an operand.

    Args:
        group_sizes, probs: those of sorted rows. experts, weights, max_rows: those of tokens.
        join: whether a `wi` in two arrays is concatenated where it is quantised.
    """
    of_tokens = experts is not None
    n = ROUTED_NAMES if of_tokens else NAMES

    def optional(name: str, value: Any, shape: str) -> Any:
        return None if value is None else take(name, value, shape)

    sizes, rows_hint = (experts, 0) if of_tokens else unwrap(group_sizes)
    paired = isinstance(wi, (tuple, list))
    accum_wi, accum_wo = accumulators_of(n.accum, wgrad_accum, paired)
    bound, transposed = as_bound(linear_spec.recipe_option(recipe)), as_flag(n.transposed, rhs_transposed)
    o = Operands(
        operand_node(take_operand, n.x, x, "[T, K]" if of_tokens else "[M, K]"),
        tuple(take(f"{n.wi}[{at}]", each, "[G, F, K]" if transposed else "[G, K, F]") for at, each in enumerate(wi))
        if paired
        else operand_node(take_operand, n.wi, wi, "[G, W, K]" if transposed else "[G, K, W]"),
        operand_node(take_operand, n.wo, wo, "[G, K, F]" if transposed else "[G, F, K]"),
        take(n.sizes, sizes, "[T, k]" if of_tokens else "[G]"),
        take(n.probs, weights, "[T, k]") if of_tokens else optional(n.probs, probs, "[M]"),
        optional(n.wi_bias, wi_bias, "[G, W]"),
        optional(n.wo_bias, wo_bias, "[G, K]"),
        optional(n.out, out, "[T, K]" if of_tokens else "[M, K]"),
        like(accum_wi, [None if each is None else accumulate.take(take, n.accum, each) for each in members(accum_wi)]),
        None if accum_wo is None else accumulate.take(take, n.accum, accum_wo),
        bound,
    )
    masters = [
        master_dtype(weight) if isinstance(weight, StraightThrough) and accum is None else None
        for weight, accum in ((o.wi, o.accum_wi), (o.wo, o.accum_wo))
    ]
    op = Mlp(
        n,
        activations.resolve(activation),
        transposed=transposed,
        recipe=bound.recipe,
        residuals=residuals_option(residuals, can_offload=True),
        wgrad_dtype=linear_spec.dtype_option(wgrad_dtype),
        master_dtypes=(masters[0], masters[1]),
        rows_hint=rows_hint,
        implementation=linear_spec.implementation_names(implementation),
        clear_residuals=bool(jax.config.jax_debug_nans),  # pyrefly: ignore[missing-attribute]
        paired=paired,
        keeps_rows=not of_tokens,
        max_rows=routing_spec.max_rows_option(max_rows),
    )
    run: Any = Planner() if take is as_operand_spec else RUN
    if of_tokens:
        tokens: Any = operand_spec(run, value_of(o.x))
        routing_spec.check_routed_mlp(tokens, run.spec(o.sizes), run.spec(o.probs))
    shapes = {"wi": None if paired else o.wi, "wo": o.wo, "x": o.x}
    check_ranks(op, **{name: None if each is None else tuple(value_of(each).shape) for name, each in shapes.items()})
    if paired:
        check_pair(op, *(calls.spec_of(each) for each in o.wi))
    if join and joins(op, value_of(o.x)):
        check_join(op, any(each is not None for each in o.accum_wi))
        op, o = replace(op, paired=False), o._replace(wi=_joined(op, o.wi), accum_wi=None)
    groups = value_of(o.wo).shape[0]
    # Tokens are checked as rows of their own, so that messages give the shapes that the caller knows.
    specs = specs_of(replace(op, keeps_rows=True), o._replace(probs=None) if of_tokens else o, run)
    sizes_spec = ArraySpec((groups,), "int32") if of_tokens else run.spec(o.sizes)
    check(op, *specs[:3], sizes_spec, *specs[3:], operand_spec(run, o.out))
    scaling.check_bound(bound, groups, products=2)
    of_weights = [*((op.fc1(), weight) for weight in members(value_of(o.wi))), (op.fc2(), value_of(o.wo))]
    for (linear, weight), accum in zip(of_weights, (*members(o.accum_wi), o.accum_wo), strict=True):
        if accum is not None:
            spec: Any = operand_spec(run, weight)
            accumulate.check(linear, accum, ArraySpec(tuple(spec.shape), spec.dtype))
    rows = specs_of(op, o, run).x.shape[0]
    return replace(op, few_rows=linear_spec.has_few_rows(rows, groups)), o


def _joined(op: Mlp, halves: tuple[Any, ...]) -> Any:
    """Gate and linear half as one weight, or its spec."""
    axis = op.fc1().weight_axes()[1]
    if not isinstance(halves[0], ArraySpec):
        return jnp.concatenate(halves, axis)
    shape = halves[0].shape
    return ArraySpec((*shape[:axis], 2 * shape[axis], *shape[axis + 1 :]), halves[0].dtype)


def on_device(o: Operands) -> Operands:
    """Sizes or experts as int32 on the device, and the number of tokens."""
    if o.sizes.ndim == 2:
        return o._replace(sizes=to_int32(o.sizes), tokens=one_group(o.sizes.shape[0]))
    if "sizes" in debug.debug_flags():
        jax.debug.callback(report_sizes, size_status(o.sizes, value_of(o.x).shape[0]))
    return o._replace(sizes=to_int32(o.sizes))


def into_refs(o: Operands) -> bool:
    """Whether the accumulators are Refs.

    Raises:
        ValueError: one is a Ref, the other an array.
    """
    return accumulate.all_refs(NAMES.accum, (*members(o.accum_wi), o.accum_wo))
