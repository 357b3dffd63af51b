"""Operands that may be quantised, with or without a master: their arrays, gradients and names; what recipes bind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import custom_vjp_primal_tree_values

from grouped_core import calls, scaling
from grouped_core.calls import Call
from grouped_core.formats import QTensor
from grouped_core.gradients import Amaxes
from grouped_core.quantizing import Extras
from grouped_core.recipes import BoundRecipe
from jax_grouped._run import JaxRunner
from jax_grouped.quantize import StraightThrough, merged, scales_of


def value_of(node: Any) -> Any:
    """The array or quantised array of an operand, without its master."""
    return node.q if isinstance(node, StraightThrough) else node


def target_of(node: Any) -> Any:
    """The array that an operand's gradient belongs to."""
    if isinstance(node, StraightThrough):
        return node.master
    return node.values if isinstance(node, QTensor) else node


def master_dtype(node: Any) -> str | None:
    """Dtype of a quantised operand's master, None where it has none; "" for an operand that is not quantised."""
    if isinstance(node, StraightThrough):
        return calls.spec_of(node.master).dtype
    return None if isinstance(node, QTensor) else ""


def has_gradient(node: Any) -> bool:
    """Whether an operand has a gradient: a quantised one has it only with a master."""
    return not isinstance(node, QTensor)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def frozen(name: str, beside: str, weight: Any) -> Any:
    """The weight of the argument `name`, which may not be differentiated, since the argument `beside` has adapters.

    Raises:
        ValueError: the weight is differentiated.
    """
    return weight


def _frozen_fwd(name: str, beside: str, weight: Any) -> tuple[Any, None]:
    if any(leaf.perturbed for leaf in jax.tree.leaves(weight)):
        raise weight_differentiated(name, beside)
    return custom_vjp_primal_tree_values(weight), None


frozen.defvjp(_frozen_fwd, lambda name, beside, saved, cotangent: (None,), symbolic_zeros=True)


def weight_differentiated(name: str, beside: str) -> ValueError:
    """A weight with adapters needs a gradient."""
    return ValueError(
        f"`{name}`: differentiated beside `{beside}`, expected a frozen weight; differentiate with respect to A and B, "
        "or pass jax.lax.stop_gradient of the weight."
    )


def cotangent_of(master: str | None, gradient: Any) -> Any:
    """The gradient as the cotangent of an operand, given its `master_dtype`."""
    if gradient is None or master is None:
        return None
    return StraightThrough(gradient.astype(master), None) if master else gradient


def extras_of(bound: BoundRecipe, product: int = 0) -> Extras:
    """The bound key, and the scales of one linear operation: product 0, or product 0 or 1 of an MLP."""
    return scaling.extras(bound, product, None if bound.state is None else scales_of(bound))


def merged_state(bound: BoundRecipe, amaxes: Sequence[Amaxes]) -> Any:
    """The state that a recipe is bound to, with the amaxes of each product merged in; None where it has none."""
    if bound.state is None:
        return None
    return merged(bound, dict(enumerate(amax for product in amaxes for amax in product)))


def named(operand: Any, name: str) -> Any:
    """`operand` named for policies of `jax.checkpoint`; parts of a quantised one are `<name>_q` and `<name>_scale`."""
    if not isinstance(operand, QTensor):
        return None if operand is None else checkpoint_name(operand, name)
    scales, group_scales = (
        None if each is None else _named_bits(each, f"{name}_scale") for each in (operand.scales, operand.group_scales)
    )
    values = _named_bits(operand.values, f"{name}_q")
    return replace(operand, values=values, scales=scales, group_scales=group_scales)


def _named_bits(array: jax.Array, name: str) -> jax.Array:
    """Codes or scales with a name, which floats of 8 bits get as integers.

    NOTE: `jax.checkpoint` rounds a float that it saves and forward reads too, with `reduce_precision` to the bits that
    `finfo` counts (JAX 0.10 and 0.11). That has the range of IEEE: of float8_e4m3fn it would make all beyond 240 NaN.
    """
    if array.dtype.itemsize > 1 or not jnp.issubdtype(array.dtype, jnp.floating):
        return checkpoint_name(array, name)
    bits = checkpoint_name(jax.lax.bitcast_convert_type(array, jnp.uint8), name)
    return jax.lax.bitcast_convert_type(bits, array.dtype)


class NamingRunner(JaxRunner):
    """Names all that a pass makes of `rows`, both forms and the amax, as `named` names a quantised operand.

    The products of a forward read a form that its backward does not read. A policy that saves one form and computes the
    product again has to save the other one too, or the pass runs again for it and makes both.

    Args:
        rows: passes that gather from it are not named: what they make is larger than `rows`.
    """

    def __init__(self, rows: Any, name: str) -> None:
        self._rows, self._name = rows, name

    def __call__(self, call: Call, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Runs `call` on `arrays`, as `JaxRunner` does."""
        made = super().__call__(call, arrays)
        operands = dict(zip(calls.SLOTS[call.name], arrays, strict=True))
        if call.name != "quantize" or operands["source"] is not self._rows or operands["places"] is not None:
            return made
        return tuple(
            None if each is None else _named_bits(each, f"{self._name}_{'q' if 'values' in slot else 'scale'}")
            for slot, each in zip(calls.RESULTS[call.name], made, strict=True)
        )
