"""The three frontends with one signature, over NumPy arrays; only this file contains their differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from numpy.typing import NDArray

import jax_grouped
import torch_bridge
from grouped_core import arrays
from grouped_core.gradients import Gradients, Needs
from grouped_core.linear_spec import Names
from grouped_core.recipes import BoundRecipe
from grouped_core.scaling import ScalingState
from tests.asserts import as_numpy

Operands = dict[str, Any]
"""x, w, group_sizes, bias, row_scale (the latter two may be None), in NumPy."""


def to_torch(array: NDArray[Any]) -> torch.Tensor:
    """A tensor with the same bits on torch's default device; ml_dtypes' types become torch's own."""
    array = np.ascontiguousarray(array)
    device = torch.get_default_device()
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array.copy()).to(device)
    bits = torch.from_numpy(array.view(f"u{array.itemsize}").copy())
    return bits.view(getattr(torch, array.dtype.name)).to(device)


@dataclass(frozen=True)
class Frontend:
    """One way to the linear operation.

    Attributes:
        names: its arguments' names.
        absent: options that it does not have.
        forward: (operands, **options) -> y.
        gradients: (operands, dy, needs, **options) -> gradients; None where not needed.
        passes: (operands, dy, needs, alone, **options) -> (y, gradients). JAX runs both passes as one program; with
            `alone`, and where no gradients are needed, y is that of a forward pass that launches each call for itself.
        call: (arrays and options under this frontend's own names) -> y, whatever they are; for bad calls.
        array: NumPy -> its kind of array.
    """

    name: str
    names: Names
    absent: frozenset[str]
    forward: Callable[..., NDArray[Any]]
    gradients: Callable[..., Gradients]
    passes: Callable[..., tuple[NDArray[Any], Gradients]]
    call: Callable[..., Any]
    array: Callable[[NDArray[Any]], Any]

    def __str__(self) -> str:
        return self.name


def apart(forward: Callable[..., Any], gradients: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """`passes` of a frontend that launches every call for itself."""

    def run(operands: Any, dy: Any, needs: Any, alone: bool, **options: Any) -> tuple[Any, Any]:
        return forward(operands, **options), gradients(operands, dy, needs, **options)

    return run


def _numpy(gradients: list[Any]) -> Gradients:
    return Gradients(*(None if g is None else as_numpy(g) for g in gradients))


# ---------------------------------------------------------------------------------------------------------------------


def _jax_call(x: Any, w: Any, group_sizes: Any, *, transposed: bool, result_dtype: Any = None, **options: Any) -> Any:
    options.update(rhs_transposed=transposed, preferred_element_type=result_dtype)
    bound_to(options, jnp.asarray)
    return jax_grouped.ragged_dot(x, w, group_sizes, **options)


def bound_to(options: dict[str, Any], array: Callable[[NDArray[Any]], Any]) -> None:
    """A recipe that is bound to NumPy arrays, bound to arrays of a frontend."""
    recipe = options.get("recipe")
    if isinstance(recipe, BoundRecipe):
        state = recipe.state
        if state is not None:
            state = ScalingState(array(state.scale), array(state.history), array(state.top), state.algorithm)
        options["recipe"] = BoundRecipe(recipe.recipe, state, None if recipe.key is None else array(recipe.key))


def _jax_operands(operands: Operands) -> list[Any]:
    return [None if a is None else jnp.asarray(a) for a in (operands[n] for n in ("x", "w", "bias", "row_scale"))]


def _jax_forward(operands: Operands, **options: Any) -> NDArray[Any]:
    x, w, bias, row_scale = _jax_operands(operands)
    if options.get("out") is not None:
        options["out"] = jnp.asarray(options["out"])
    return np.asarray(_jax_call(x, w, operands["group_sizes"], bias=bias, row_scale=row_scale, **options))


def _jax_passes(
    operands: Operands, dy: NDArray[Any], needs: Needs, alone: bool, **options: Any
) -> tuple[NDArray[Any], Gradients]:
    """Forward and backward in one program, where there is a backward; `_jax_forward` launches every call for itself."""
    held = _jax_operands(operands)
    live = [i for i, need in enumerate(needs) if need]

    def function(*some: Any) -> Any:
        given = list(held)
        for i, a in zip(live, some, strict=True):
            given[i] = a
        x, w, bias, row_scale = given
        return _jax_call(x, w, operands["group_sizes"], bias=bias, row_scale=row_scale, **options)

    def run(dy: Any, *some: Any) -> tuple[Any, Any]:
        y, pull = jax.vjp(function, *some)
        return y, pull(dy)

    found: list[Any] = [None] * len(held)
    y = _jax_forward(operands, **options) if alone or not live else None
    if live:
        ours, gradients = jax.jit(run)(jnp.asarray(dy), *(held[i] for i in live))
        y = np.asarray(ours) if y is None else y
        for i, gradient in zip(live, gradients, strict=True):
            found[i] = gradient
    assert y is not None
    return y, _numpy(found)


def _jax_gradients(operands: Operands, dy: NDArray[Any], needs: Needs, **options: Any) -> Gradients:
    return _jax_passes(operands, dy, needs, not any(needs), **options)[1]


# ---------------------------------------------------------------------------------------------------------------------


def _torch_call(x: Any, w: Any, group_sizes: Any, *, transposed: bool, **options: Any) -> Any:
    bound_to(options, to_torch)
    return torch_bridge.grouped_linear(x, w, group_sizes, rhs_transposed=transposed, **options)


def _torch_operands(operands: Operands) -> list[Any]:
    return [None if a is None else to_torch(a) for a in (operands[n] for n in ("x", "w", "bias", "row_scale"))]


def _torch_forward(operands: Operands, **options: Any) -> NDArray[Any]:
    x, w, bias, row_scale = _torch_operands(operands)
    if options.get("out") is not None:
        options["out"] = to_torch(options["out"])
    sizes = to_torch(operands["group_sizes"])
    return as_numpy(_torch_call(x, w, sizes, bias=bias, row_scale=row_scale, **options))


def _torch_gradients(operands: Operands, dy: NDArray[Any], needs: Needs, **options: Any) -> Gradients:
    held = _torch_operands(operands)
    for array, need in zip(held, needs, strict=True):
        if need:
            array.requires_grad_()
    x, w, bias, row_scale = held
    y = _torch_call(x, w, to_torch(operands["group_sizes"]), bias=bias, row_scale=row_scale, **options)
    if any(needs):
        y.backward(to_torch(dy))
    return _numpy([None if array is None else array.grad for array in held])


# ---------------------------------------------------------------------------------------------------------------------


def _arrays_forward(operands: Operands, **options: Any) -> NDArray[Any]:
    if options.get("out") is not None:
        options["out"] = options["out"].copy()
    return arrays.grouped_linear(**operands, **options)


def _arrays_gradients(operands: Operands, dy: NDArray[Any], needs: Needs, **options: Any) -> Gradients:
    return arrays.grouped_linear_grads(**operands, dy=dy, needs=needs, **options)


ARRAYS = Frontend(
    "arrays",
    Names("x", "w", transposed="transposed", result="result_dtype"),
    frozenset(),
    _arrays_forward,
    _arrays_gradients,
    apart(_arrays_forward, _arrays_gradients),
    arrays.grouped_linear,
    lambda array: array,
)
JAX = Frontend(
    "jax", Names("lhs", "rhs"), frozenset(), _jax_forward, _jax_gradients, _jax_passes, _jax_call, jnp.asarray
)
TORCH = Frontend(
    "torch",
    Names("x", "weight"),
    frozenset({"result_dtype"}),
    _torch_forward,
    _torch_gradients,
    apart(_torch_forward, _torch_gradients),
    _torch_call,
    to_torch,
)
FRONTENDS = (ARRAYS, JAX, TORCH)
