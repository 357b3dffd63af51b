"""Quantised arrays and the state of delayed scaling in JAX.

Letters: G groups, M rows, X the features of a row, A and B axes of a weight, R roles, L steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt32

from grouped_core import calls, linear_spec, quantizing, scaling
from grouped_core.calls import ArraySpec, Call
from grouped_core.formats import Format, QTensor, check_quantized, format_option
from grouped_core.plans import Planner
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.scaling import ScalingState
from grouped_core.sizes import GroupSizes, unwrap
from jax_grouped._arguments import (
    AnyArray,
    as_array,
    as_operand,
    as_operand_spec,
    as_spec,
    axis_names,
    one_group,
    to_int32,
)
from jax_grouped._run import RUN, reduce_to, varying_axes


@partial(jax.tree_util.register_dataclass, data_fields=["master", "q"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class StraightThrough:
    """A quantised operand whose gradient is given to another array; see `straight_through`."""

    master: Any
    q: QTensor[Any] | None


def quantize(
    x: Float[AnyArray, "M X"] | Float[AnyArray, "G A B"],
    format: str | Format,
    *,
    axis: int | tuple[int, ...] = -1,
    group_sizes: Int[AnyArray, " G"] | GroupSizes | None = None,
    key: UInt32[AnyArray, " 2"] | None = None,
) -> QTensor[jax.Array]:
    """x quantised for products that contract `axis`; for two axes, one pass makes both forms.

    It has no derivative: `straight_through` gives the gradient of a product with the result to another array.

    Args:
        x: rows [M, X] or weights [G, A, B]; float32, bfloat16 or float16.
        format: a name of `FORMATS`, e.g. "fp8_1x128", or a `Format`.
        axis: the contracted axis. Rows: 1, or 0, where blocks run along rows and restart at each group. Weights: 2 or
            1. Or a tuple of both; `other` of the result is then the second form.
        group_sizes: integers [G], of rows; None: one group of all rows.
        key: [2], low word first, of stochastic rounding; None: zeros.

    Raises:
        TypeError, ValueError: arguments do not fit together. NotImplementedError: no kernel supports them.
    """
    rows, sizes, words, fmt, axes = _prepare(as_array, x, format, axis, group_sizes, key)
    if rows.ndim == 2:
        sizes = one_group(rows.shape[0]) if sizes is None else to_int32(sizes)
    return quantizing.quantize(RUN, jax.lax.stop_gradient(rows), fmt, axes, sizes, key=words)


def plan_quantize(x: Any, format: Any, *, axis: Any, group_sizes: Any, key: Any) -> list[Call]:
    """The native calls of `quantize`; arrays may be `jax.ShapeDtypeStruct`."""
    rows, sizes, words, fmt, axes = _prepare(as_spec, x, format, axis, group_sizes, key)
    if len(rows.shape) == 2:
        sizes = ArraySpec((1,) if sizes is None else sizes.shape, "int32")
    run = Planner()
    quantizing.quantize(run, rows, fmt, axes, sizes, key=words)
    return run.calls


def _prepare(take: Callable[..., Any], x: Any, format: Any, axis: Any, group_sizes: Any, key: Any) -> Any:
    """Rows, sizes and key as `take` converts them, the format and the contracted axes; checked."""
    rows = take("x", x, "[M, X] or [G, A, B]")
    sizes = None if group_sizes is None else take("group_sizes", unwrap(group_sizes)[0], "[G]")
    words = None if key is None else take("key", key, "[2]")
    fmt = format_option(format)

    def spec(array: Any) -> ArraySpec:
        return array if isinstance(array, ArraySpec) else calls.spec_of(array)

    specs = (None if each is None else spec(each) for each in (sizes, words))
    return rows, sizes, words, fmt, quantizing.check_quantize(spec(rows), fmt, axis, *specs)


def dequantize(
    q: QTensor[Any], dtype: DTypeLike | None = None, *, group_sizes: Int[AnyArray, " G"] | GroupSizes | None = None
) -> jax.Array:
    """The values of q in its logical shape, code * scales in float32 with one rounding; tail rows are zero.

    If q has only a rotated form (as NVFP4 uses for wgrad), the values are rotated too.

    Args:
        dtype: float32, bfloat16 or float16; None: the nominal dtype of q.
        group_sizes: needed for rows; None: those of q.

    Raises:
        TypeError: q is not quantised; results cannot have the dtype. ValueError: rows without group sizes.
    """
    check_quantized(q)
    sizes = None if group_sizes is None else to_int32(as_array("group_sizes", unwrap(group_sizes)[0], "[G]"))
    operand = jax.lax.stop_gradient(as_operand("q", q, "codes and scales"))
    return quantizing.dequantize(RUN, operand, sizes, linear_spec.wide_option("dtype", dtype) or q.dtype)


def plan_dequantize(q: Any, dtype: Any, *, group_sizes: Any) -> list[Call]:
    """The native calls of `dequantize`; arrays may be `jax.ShapeDtypeStruct`."""
    check_quantized(q)
    sizes = (
        None if group_sizes is None else as_spec("group_sizes", unwrap(group_sizes)[0], "[G]")._replace(dtype="int32")
    )
    operand = as_operand_spec("q", q, "codes and scales")
    run = Planner()
    quantizing.dequantize(run, operand, sizes, linear_spec.wide_option("dtype", dtype) or q.dtype)
    return run.calls


def straight_through(master: Float[AnyArray, ...], q: QTensor[Any]) -> StraightThrough:
    """q as an operand whose gradient, that of its dequantised values, is the gradient of `master`, in its dtype.

    Args:
        master: an array of the logical shape of q, e.g. the float32 weight that q was quantised from once for several
            uses; at most 32 bits.

    Raises:
        ValueError: shapes that differ. TypeError: q is not quantised, or the dtype of the master.
    """
    check_quantized(q)
    array = as_array("master", master, "of the shape of q")
    if tuple(array.shape) != tuple(q.shape):
        raise ValueError(
            f"`master`: shape {tuple(array.shape)}, expected {q.shape} = shape of `q`; pass its own master."
        )
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"`master`: dtype {array.dtype}, expected one of floats, which have a gradient; cast it first.")
    if array.dtype.itemsize > 4:
        raise TypeError(f"`master`: dtype {array.dtype}, expected at most 32 bits, as gradients have; cast it first.")
    return StraightThrough(array, q)


def scaling_state(recipe: Recipe, num_groups: int, *, products: int = 1) -> ScalingState[jax.Array]:
    """A new state of delayed scaling, for one linear operation, or with products=2 for one MLP.

    Its cotangent is the state with the amaxes of this step merged in, which replaces the state (overwrite with
    gradient); `update_scaling` then makes the state of the next step. Use one state in one place: cotangents of two
    uses would be summed.

    Raises:
        ValueError: the recipe has no delayed scaling.
    """
    scaling.check_groups(num_groups)
    fp8_max = jnp.asarray(scaling.fp8_maxes(recipe, products), jnp.float32)
    scale = jnp.zeros((fp8_max.size, num_groups), jnp.float32)
    history = jnp.zeros((fp8_max.size, recipe.history, num_groups), jnp.float32)
    return ScalingState(scale, history, fp8_max, recipe.amax_algorithm)


def update_scaling(
    state: ScalingState[jax.Array],
    *,
    axis_name: str | tuple[str, ...] | None = None,
    previous: ScalingState[jax.Array] | None = None,
) -> ScalingState[jax.Array]:
    """The state of the next step (numerics 2.5): scales from the amax history, and an empty slot for new amaxes.

    Args:
        state: the cotangent of the state; leading axes, such as those of a scan over layers, are kept. Its groups may
            be sharded; each shard is then updated where it is.
        axis_name: mesh axes over which the amaxes of this step are reduced to their maximum first, inside `shard_map`.
        previous: the state that `state` is the cotangent of. Where backward did not reach the state (a layer was
            skipped, or nothing read its result), JAX gives a cotangent of zeros: then the previous state is returned as
            it is; without `previous`, the next use starts as with a new state.

    Raises:
        TypeError: `state` or `previous` is not a state of delayed scaling. ValueError: `previous` is no
            state of the same shapes and algorithm.
    """
    scaling.check_state(state, stacked=True)
    if previous is not None:
        scaling.check_state(previous, stacked=True)
        _check_previous(state, previous)
        state = _reached(state, previous)
    if (axes := axis_names("update_scaling", axis_name)) is not None:
        current = _values(jax.lax.pmax(_bits(state.history[..., 0, :]), axes))
        state = ScalingState(state.scale, state.history.at[..., 0, :].set(current), state.top, state.algorithm)
    (*lead, _, groups), steps = state.scale.shape, state.history.shape[-2]
    if not lead:
        return scaling.update(RUN, state)
    flat = (state.scale.reshape(-1, groups), state.history.reshape(-1, steps, groups), state.top.reshape(-1))
    new = scaling.update(RUN, ScalingState(*flat, state.algorithm))
    arrays = (new.scale.reshape(state.scale.shape), new.history.reshape(state.history.shape), state.top)
    return ScalingState(*arrays, state.algorithm)


def _check_previous(state: ScalingState[Any], previous: ScalingState[Any]) -> None:
    facts = [(name, *(jnp.shape(getattr(each, name)) for each in (previous, state))) for name in scaling.ARRAYS]
    for name, came, wanted in (*facts, ("algorithm", previous.algorithm, state.algorithm)):
        if came != wanted:
            raise ValueError(
                f"`previous` of update_scaling: {name} {came!r}, expected {wanted!r} as `state` has it; pass the state "
                "that `state` is the gradient of."
            )


def _reached(state: ScalingState[jax.Array], previous: ScalingState[jax.Array]) -> ScalingState[jax.Array]:
    """`state` where backward reached it, else `previous`; a state from an operation never has a zero in `top`."""
    lost = state.top == 0
    return ScalingState(
        jnp.where(lost[..., None], previous.scale, state.scale),
        jnp.where(lost[..., None, None], previous.history, state.history),
        jnp.where(lost, previous.top, state.top),
        state.algorithm,
    )


def scales_of(bound: BoundRecipe) -> tuple[jax.Array, ...]:
    """The quantisation scales [G] of each role, for a recipe that is bound to a state."""
    return _scales(bound.state, _fp8_maxes(bound))


def merged(bound: BoundRecipe, found: dict[int, Array | None]) -> ScalingState[jax.Array]:
    """The state of `bound` with the amaxes [G] of some roles merged into slot 0 of its history.

    A state that shards share gets the maximum over the shards, just as a shared weight gets the sum of their gradients.
    """
    return _merged(bound.state, found, _fp8_maxes(bound))


def _fp8_maxes(bound: BoundRecipe) -> tuple[float, ...]:
    assert bound.recipe is not None, "a state belongs to a recipe"
    return tuple(scaling.fp8_maxes(bound.recipe, bound.state.top.shape[0] // len(scaling.ROLES)))


@partial(jax.jit, static_argnums=1, inline=True)
def _in_use(state: ScalingState[Any], fp8_maxes: tuple[float, ...]) -> ScalingState[Any]:
    """The state as one of this recipe: `top` belongs to it, and is zero in a state that backward did not reach.

    A state of other formats or another margin, e.g. from a checkpoint, gets scales for these: powers of two apart.
    """
    own = jnp.asarray(fp8_maxes, jnp.float32)
    same = state.top == own
    kept = (same | (state.top == 0))[:, None]  # bit for bit: compilers may divide approximately, and flush to zero
    scale = jnp.where(kept, state.scale, state.scale * (own / state.top)[:, None])
    top = jnp.where(same, state.top, own)  # varies over the mesh axes that the state varies over
    return ScalingState(scale, jnp.asarray(state.history), top, state.algorithm)


@partial(jax.jit, static_argnums=1, inline=True)
def _scales(state: ScalingState[Any], fp8_maxes: tuple[float, ...]) -> tuple[jax.Array, ...]:
    scale = _in_use(state, fp8_maxes).scale
    return tuple(jax.lax.index_in_dim(scale, role, keepdims=False) for role in range(scale.shape[0]))


@partial(jax.jit, static_argnums=2, inline=True)
def _merged(
    state: ScalingState[Any], found: dict[int, Array | None], fp8_maxes: tuple[float, ...]
) -> ScalingState[jax.Array]:
    state = _in_use(state, fp8_maxes)
    current = _bits(state.history[:, 0])
    for role, amax in found.items():
        if amax is not None:
            current = current.at[role].max(_bits(amax))
    current = _values(reduce_to(current, varying_axes(state.history), jax.lax.pmax))
    return ScalingState(state.scale, state.history.at[:, 0].set(current), state.top, state.algorithm)


def _bits(amax: jax.Array) -> jax.Array:
    """Amax as integers of the same order: on a CPU, XLA's maximum of floats takes subnormals for zeros."""
    return jax.lax.bitcast_convert_type(amax, jnp.int32)


def _values(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
