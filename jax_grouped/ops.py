"""The linear operation: checks of its arguments, and a `custom_vjp` around `grouped_core.gradients`.

GROUPED_DEBUG is read at each trace. With `sizes`, group sizes that do not fit are logged while the program runs.
`poison` and `sync` do nothing in JAX: no result has undefined rows, and XLA reports the errors of a call.

Letters: G groups, M rows, K in, N out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import custom_vjp_primal_tree_values
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt32

from grouped_core import calls, debug, gradients, linear_spec, scaling
from grouped_core import lora as adapters
from grouped_core.calls import ArraySpec, Call
from grouped_core.formats import QTensor, as_flag
from grouped_core.gradients import Needs
from grouped_core.linear_spec import Linear, Names
from grouped_core.plans import Planner
from grouped_core.products import operand_spec
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.sizes import GroupSizes, unwrap
from jax_grouped import _accumulators as accumulate
from jax_grouped import _adapter
from jax_grouped._arguments import AnyArray, as_array, as_bound, as_operand, as_operand_spec, report_sizes, to_int32
from jax_grouped._nodes import (
    cotangent_of,
    extras_of,
    has_gradient,
    master_dtype,
    merged_state,
    named,
    target_of,
    value_of,
)
from jax_grouped._precision import fp32_mode
from jax_grouped._run import RUN, differentiable, reduce_to, varying_axes, with_gradients
from jax_grouped.quantize import StraightThrough

NAMES = Names(x="lhs", w="rhs")


def ragged_dot(
    lhs: Float[AnyArray, "M K"] | QTensor[Array] | StraightThrough,
    rhs: Float[AnyArray, "G K N"] | Float[AnyArray, "G N K"] | QTensor[Array] | StraightThrough,
    group_sizes: Int[AnyArray, " G"] | GroupSizes,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: None = None,
    out_sharding: None = None,
    *,
    rhs_transposed: bool = False,
    bias: Float[AnyArray, "G N"] | None = None,
    row_scale: Float[AnyArray, " M"] | None = None,
    scale_bias: bool = False,
    recipe: Recipe | BoundRecipe | None = None,
    wgrad_accum: accumulate.Accumulator | None = None,
    wgrad_dtype: DTypeLike | None = None,
    out: Float[Array, "M N"] | None = None,
    implementation: str | Sequence[str] | None = None,
    lora: tuple[Float[AnyArray, "G A r"], Float[AnyArray, "G r B"]] | None = None,
    lora_scaling: float = 1.0,
    lora_dropout: float = 0.0,
    lora_key: UInt32[AnyArray, 2] | None = None,
    lora_wgrad_accum: Sequence[accumulate.Accumulator | None] | None = None,
) -> Float[Array, "M N"]:
    """y[r] = row_scale[r] * (lhs[r] @ rhs[g(r)] + bias[g(r)]): each row times the weight of its group.

    Drop-in for `jax.lax.ragged_dot`, whose arguments come first, in its order. Group g owns the next `group_sizes[g]`
    rows; rows past the last group, the tail, are never read; they are zero in y and in every gradient. Sums are fp32,
    and results are rounded once. It works under `jit`, `grad`, `scan`, `checkpoint` and, on local shapes, inside
    `shard_map`.

    Args:
        lhs: [M, K]; float32, bfloat16, float16, or plain float8_e4m3fn / float8_e5m2; or quantised, a `QTensor`.
        rhs: [G, K, N], or [G, N, K] with `rhs_transposed` (read in place); of the dtype of lhs, or a `QTensor`.
            A `QTensor` has a gradient only through `straight_through`, which gives it to the master.
        group_sizes: [G], any integer dtype. Sizes that sum to more than M are clamped, negative ones count as 0
            (`size_status` tells). `GroupSizes` adds the usual number of rows, a hint for speed.
        precision: as in `jax.lax.ragged_dot`; it affects float32 operands only. 'highest' and algorithms on float32
            compute in IEEE float32, as the recipe option fp32="ieee" does; all others need no more than the default,
            "tf32x3". The more accurate of this mode and the recipe's mode is used. None requires nothing, whatever
            `jax.default_matmul_precision` says.
        preferred_element_type: dtype of y; default that of lhs (bfloat16 for float8).
        group_offset, out_sharding: not supported; anything but None is refused.
        bias: [G, N]. row_scale: [M]. Both differentiable, float32 or 16 bits.
        scale_bias: `row_scale` multiplies only the bias: lhs[r] @ rhs[g] + row_scale[r] * bias[g].
        recipe: formats of the three products; default: the operands as given. If it is bound to a state of delayed
            scaling (`Recipe.bind`), the cotangent of the state is the state with the amaxes of this step merged in.
        wgrad_accum: accumulator of the weight's shape; backward adds the weight gradient to it, in its dtype, and the
            weight's own gradient is zero. The cotangent of an array is the new accumulator, so use it once per step. A
            `jax.Ref` or `accumulate.StackedRef` is updated in place.
        wgrad_dtype: dtype of the weight gradient; default that of rhs.
        out: [M, N], the buffer of the result: valid rows are written, tail rows are left unchanged. Donate it, or XLA
            copies it first. It has no gradient.
        implementation: names of the kernels allowed; default: the best one. With an adapter, of the base product.
        lora: an adapter (A, B) of rhs, which is then frozen (docs/lora.md): A [G, K, r] and B [G, r, N], or [G, r, K]
            and [G, N, r] with `rhs_transposed`, r from 1 to 256, of the dtype of lhs. `lora_scaling * (lhs[r] @ A) @ B`
            is added to the product in front of the bias.
        lora_dropout, lora_key: elements of lhs are dropped on their way to A with this probability, by the key: uint32
            [2], low word first, given if and only if the probability is not 0.
        lora_wgrad_accum: a pair for A and B, each as `wgrad_accum` or None.

    Returns:
        y [M, N].

    Raises:
        TypeError: an argument is not an array, or its dtype is not supported; `group_offset` or `out_sharding` is
            given.
        ValueError: shapes that do not fit, options that contradict each other, a precision that does not exist or is
            above float32.
        NotImplementedError: no kernel supports the operands (`why_unsupported` tells beforehand); `jax.vmap`.
    """
    arguments = locals()  # by name
    own = {name: arguments.pop(name) for name in adapters.OPTIONS}
    op, o = _prepare(as_operand, as_array, **arguments)
    adapted = _prepare_adapter(as_array, op, o, arguments, **own)
    if "sizes" in debug.debug_flags():
        jax.debug.callback(report_sizes, size_status(o.sizes, value_of(o.x).shape[0]))
    if adapted is not None:
        return _adapter.run(*adapted)
    run = _linear if o.accum is None or accumulate.is_sink(o.accum) else _linear_into_ref
    return differentiable(run, op, *o._replace(sizes=to_int32(o.sizes)))


def size_status(group_sizes: Int[AnyArray, " G"] | GroupSizes, M: int) -> Int[Array, ""]:
    """Whether the sizes fit M rows: an int32 scalar on the device, bit 0 a negative size, bit 1 a sum above M.

    Nothing is read on the host, so it works in a jitted program; 0 means that the sizes fit.

    Raises:
        TypeError: `group_sizes` is not an array of integers, or M is not an integer. ValueError: `group_sizes` does not
            have one axis, or M is negative.
    """
    sizes = as_array(NAMES.sizes, unwrap(group_sizes)[0], "[G]")
    linear_spec.check_sizes(NAMES, RUN.spec(sizes))
    word = debug.size_word(to_int32(sizes), M, where=jnp.where, total=partial(jnp.sum, dtype=jnp.int32))
    return word.astype(jnp.int32)


def plan_ragged_dot(**arguments: Any) -> list[Call]:
    """Every native call of `ragged_dot` and of all its gradients; arrays may be `jax.ShapeDtypeStruct`."""
    own = {name: arguments.pop(name) for name in adapters.OPTIONS}
    op, o = _prepare(as_operand_spec, as_operand_spec, **arguments)
    o = o._replace(sizes=o.sizes._replace(dtype="int32"))  # as after `to_int32`
    adapted = _prepare_adapter(as_operand_spec, op, o, arguments, **own)
    if adapted is not None:
        return _adapter.plan(*adapted)
    x, w = value_of(o.x), value_of(o.w)
    run = Planner()
    extras = scaling.planned(o.bound, w.shape[0])
    needs = Needs(
        x=has_gradient(o.x),
        w=has_gradient(o.w) or o.accum is not None,
        bias=o.bias is not None,
        row_scale=o.row_scale is not None,
    )
    found = gradients.linear_forward(run, op, x, w, o.sizes, o.bias, o.row_scale, o.out, extras=extras, needs=needs)
    gradients.linear_grads(
        run,
        op,
        (operand_spec(run, x), operand_spec(run, w), o.bias, o.row_scale),
        found.x,
        found.w,
        o.sizes,
        o.bias,
        o.row_scale,
        found.y,
        needs,
        into_w=None if o.accum is None else accumulate.spec(o.accum),
        accumulate=o.accum is not None,
        extras=extras,
    )
    return run.calls


# ---------------------------------------------------------------------------------------------------------------------
# Arguments.


class _Operands(NamedTuple):
    x: Any
    w: Any
    sizes: Any
    bias: Any
    row_scale: Any
    out: Any
    accum: Any
    bound: Any


Take = Callable[[str, Any, str], Any]
"""(name, argument, its shape for messages) -> operand."""


def operand_node(take: Take, name: str, value: Any, shape: str) -> Any:
    """An operand that may be quantised, with or without a master."""
    if isinstance(value, StraightThrough):
        return StraightThrough(take(name, value.master, shape), take(name, value.q, shape))
    return take(name, value, shape)


def _prepare(
    take_operand: Take,
    take: Take,
    *,
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    precision: PrecisionLike,
    preferred_element_type: DTypeLike | None,
    group_offset: Any,
    out_sharding: Any,
    rhs_transposed: bool,
    bias: Any,
    row_scale: Any,
    scale_bias: bool,
    recipe: Recipe | None,
    wgrad_accum: Any,
    wgrad_dtype: DTypeLike | None,
    out: Any,
    implementation: str | Sequence[str] | None,
) -> tuple[Linear, _Operands]:
    """The static parameters and the operands of `ragged_dot`, checked; `take` converts an argument to an operand."""
    n = NAMES
    if group_offset is not None:
        raise TypeError(
            f"`group_offset`: {type(group_offset).__name__}, expected None; slice `{n.sizes}` and `{n.w}` to the local "
            f"groups and let the rows of `{n.x}` start at the first of them."
        )
    if out_sharding is not None:
        raise TypeError(
            f"`out_sharding`: {type(out_sharding).__name__}, expected None; call the operation on each device's own "
            "rows inside `jax.shard_map`, whose `out_specs` place the result."
        )

    def optional(name: str, value: Any, shape: str) -> Any:
        return None if value is None else take(name, value, shape)

    sizes, rows_hint = unwrap(group_sizes)
    bound, transposed = as_bound(linear_spec.recipe_option(recipe)), as_flag(n.transposed, rhs_transposed)
    operands = _Operands(
        operand_node(take_operand, n.x, lhs, "[M, K]"),
        operand_node(take_operand, n.w, rhs, "[G, N, K]" if transposed else "[G, K, N]"),
        take(n.sizes, sizes, "[G]"),
        optional(n.bias, bias, "[G, N]"),
        optional(n.row_scale, row_scale, "[M]"),
        optional(n.out, out, "[M, N]"),
        None if wgrad_accum is None else accumulate.take(take, n.accum, wgrad_accum),
        bound,
    )
    wgrad_dtype = linear_spec.dtype_option(wgrad_dtype)
    if wgrad_dtype is None and isinstance(operands.w, StraightThrough) and wgrad_accum is None:
        wgrad_dtype = calls.spec_of(operands.w.master).dtype
    op = Linear(
        names=n,
        transposed=transposed,
        recipe=bound.recipe,
        fp32=fp32_mode(precision),
        scale_bias=as_flag(n.scale_bias, scale_bias),
        result_dtype=linear_spec.dtype_option(preferred_element_type),
        wgrad_dtype=wgrad_dtype,
        rows_hint=rows_hint,
        implementation=linear_spec.implementation_names(implementation),
    )
    x, w, *others = map(value_of, operands[:6])
    run: Any = Planner() if take is as_operand_spec else RUN
    specs: list[Any] = [operand_spec(run, x), operand_spec(run, w)]
    linear_spec.check_linear(op, *specs, *(None if a is None else calls.spec_of(a) for a in others))
    scaling.check_bound(bound, w.shape[0])
    if operands.accum is not None:
        accumulate.check(op, operands.accum, ArraySpec(tuple(w.shape), specs[1].dtype))
    few_rows = linear_spec.has_few_rows(specs[0].shape[0], specs[1].shape[0])
    return replace(op, few_rows=few_rows), operands


def _prepare_adapter(
    take: Take,
    op: Linear,
    o: _Operands,
    arguments: dict[str, Any],
    *,
    lora: Any,
    lora_scaling: Any,
    lora_dropout: Any,
    lora_key: Any,
    lora_wgrad_accum: Any,
) -> tuple[_adapter.Adapted, _adapter.Operands] | None:
    """The operation with an adapter and its operands, checked, from those without it; None without an adapter."""
    if lora is None:
        adapters.check_absent(lora_scaling, lora_dropout, lora_key, lora_wgrad_accum)
        return None
    adapters.check_no_weight_gradient(**{name: arguments[name] for name in ("wgrad_accum", "wgrad_dtype")})
    adapter = adapters.option(adapters.LORA, lora_scaling, lora_dropout, lora_key)
    shapes = ("[G, r, K]", "[G, N, r]") if op.transposed else ("[G, K, r]", "[G, r, N]")
    factors = adapters.pair_option(lora)
    a, b = (take(f"{adapter.name}[{at}]", factors[at], shapes[at]) for at in (0, 1))
    key = None if lora_key is None else take(f"{adapter.name}_key", lora_key, "[2]")
    given_accums = adapters.accumulators_option(lora_wgrad_accum)
    accumulate.all_refs("lora_wgrad_accum", given_accums)
    accums = [
        None if each is None else accumulate.take(take, f"{adapter.name}_wgrad_accum[{at}]", each)
        for at, each in enumerate(given_accums)
    ]
    run: Any = Planner() if take is as_operand_spec else RUN
    specs: list[Any] = [calls.spec_of(each) for each in (a, b)]
    x, w = operand_spec(run, value_of(o.x)), operand_spec(run, value_of(o.w))
    adapters.check(op, adapter, x, w, *specs, None if key is None else calls.spec_of(key))
    for accum, product, spec in zip(accums, (adapter.down(op), adapter.up(op)), specs, strict=True):
        if accum is not None:
            accumulate.check(product, accum, spec)
    sizes = o.sizes if take is as_operand_spec else to_int32(o.sizes)
    given: Any = (o.x, o.w, a, b, sizes, o.bias, o.row_scale, o.out, key, tuple(accums), o.bound)
    return _adapter.Adapted(op, adapter), _adapter.Operands(*given)


# ---------------------------------------------------------------------------------------------------------------------
# The linear operation.


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "w", "sizes", "bias", "row_scale", "accum", "bound", "amax"],
    meta_fields=["needs", "specs", "masters", "varying"],
)
@dataclass(frozen=True)
class _Saved:
    """What the linear operation saves for its backward; arrays that no needed gradient reads are None."""

    x: Any
    w: Any
    sizes: Any
    bias: Any
    row_scale: Any
    accum: Any
    bound: Any
    amax: Any
    """Amaxes that forward found, for delayed scaling."""
    needs: Needs
    specs: Any
    """Specs of x, w, bias, row_scale; the last two are None where absent."""
    masters: tuple[str | None, ...]
    """`master_dtype` of x and of w."""
    varying: tuple[frozenset[str], ...]
    """Manual mesh axes over which the gradients of x, w, bias and row_scale vary."""


def _linear_value(
    op: Linear, x: Any, w: Any, sizes: Any, bias: Any, row_scale: Any, out: Any, accum: Any, bound: Any
) -> Any:
    extras = extras_of(bound)
    return gradients.linear_forward(RUN, op, value_of(x), value_of(w), sizes, bias, row_scale, out, extras=extras).y


def _linear_save(op: Linear, needs: Needs, *operands: Any) -> tuple[Any, _Saved]:
    x_node, w_node, sizes, bias, row_scale, out, accum, bound = operands
    x, w = value_of(x_node), value_of(w_node)
    keep = gradients.linear_saved(op, needs, bias is not None, row_scale is not None)
    if keep.x:  # named before it is used: a policy that saves it then avoids recomputing it
        x = named(x, "grouped_x")
    found = gradients.linear_forward(RUN, op, x, w, sizes, bias, row_scale, out, extras=extras_of(bound), needs=needs)
    if accum is not None:
        accumulate.check_varying(op, accum, varying_axes(found.y))
    targets = (*map(target_of, (x_node, w_node)), bias, row_scale)
    return found.y, _Saved(
        x=found.x if found.x is x else named(found.x, "grouped_x"),
        w=found.w,
        sizes=sizes,
        bias=bias if keep.bias else None,
        row_scale=row_scale if keep.row_scale else None,
        accum=accum if needs.w else None,
        bound=bound,
        amax=found.amax,
        needs=needs,
        specs=tuple(operand_spec(RUN, a) for a in (x, w, bias, row_scale)),
        masters=tuple(map(master_dtype, (x_node, w_node))),
        varying=tuple(frozenset() if a is None else varying_axes(a) for a in targets),
    )


def _linear_fwd(op: Linear, *primals: Any) -> tuple[Any, _Saved]:
    x, w, _, bias, row_scale, _, accum, _ = (any(leaf.perturbed for leaf in jax.tree.leaves(p)) for p in primals)
    operands = _Operands(*custom_vjp_primal_tree_values(primals))
    w = w and has_gradient(operands.w)
    if operands.accum is not None:
        accumulate.check_asked(op, weight=w, accum=accum)
        w = accum
    return _linear_save(op, Needs(x and has_gradient(operands.x), w, bias, row_scale), *operands)


def _linear_bwd(op: Linear, saved: _Saved, dy: Any) -> tuple[Any, ...]:
    into = None if saved.accum is None else accumulate.read(saved.accum)
    found, amax = gradients.linear_backward(
        RUN,
        op,
        saved.specs,
        saved.x,
        saved.w,
        saved.sizes,
        saved.bias,
        saved.row_scale,
        dy,
        saved.needs,
        into_w=into,
        accumulate=into is not None,
        extras=extras_of(saved.bound),
    )
    state = merged_state(saved.bound, [saved.amax.and_later(amax)])
    accum = None
    if into is not None:
        accum = accumulate.write(saved.accum, found.w)
        found = found._replace(w=None)
    dx, dw, db, dc = (
        None if cotangent is None else reduce_to(cotangent, axes)
        for cotangent, axes in zip(found, saved.varying, strict=True)
    )
    return (
        *map(cotangent_of, saved.masters, (dx, dw)),
        *(None, db, dc, None, accum),
        None if state is None else BoundRecipe(saved.bound.recipe, state, None),
    )


_linear = with_gradients(_linear_value, _linear_fwd, _linear_bwd)

# NOTE: a forward rule with symbolic zeros may not save a Ref when JAX traces it (in scan and checkpoint). So with a Ref
# all gradients are computed; compilation drops the calls of those that are not used.
_linear_into_ref = jax.custom_vjp(_linear_value, nondiff_argnums=(0,))
_linear_into_ref.defvjp(
    lambda op, *operands: _linear_save(op, Needs(x=has_gradient(operands[0])), *operands), _linear_bwd
)
