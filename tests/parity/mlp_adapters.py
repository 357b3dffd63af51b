"""The MLP of the three frontends with one signature, over NumPy arrays, and its problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import jax_grouped
import torch_bridge
from grouped_core import arrays
from grouped_core.activations import Activation
from grouped_core.mlp import MlpGradients
from grouped_core.mlp_spec import MlpNeeds
from tests import cases
from tests.asserts import as_numpy
from tests.parity.adapters import apart, bound_to, to_torch

Operands = dict[str, Any]
"""x, wi, wo, probs, wi_bias, wo_bias (the latter three may be None) and group_sizes, in NumPy."""

LEAVES = MlpNeeds._fields


def problem(
    case: cases.Case,
    dtype: str,
    activation: Activation,
    *,
    transposed: bool = False,
    probs: str | None = "float32",
    bias: str | None = None,
) -> tuple[Operands, NDArray[Any]]:
    """(operands, dy) of an MLP of `case`: K features, N expert width; tail rows hold NaN, weights are scaled."""
    wide, width = activation.fc1_width(case.n), case.n

    def weights(rows: int, cols: int, name: str) -> NDArray[Any]:
        values = cases.normal((case.groups, rows, cols), "float32", name) / np.float32(np.sqrt(rows))
        values = values.swapaxes(1, 2) if transposed else values
        return np.ascontiguousarray(values).astype(cases.numpy_dtype(dtype))

    x = cases.normal((case.rows, case.k), dtype, "x")
    dy = cases.normal((case.rows, case.k), dtype, "dy")
    given = None if probs is None else np.abs(cases.normal((case.rows,), "float32", "probs"))
    if given is not None:
        given[: case.valid : 5] = 0  # probability 0 is legal (MLP-7)
        given = given.astype(cases.numpy_dtype(probs))
    for rows in (x, dy, given):
        if rows is not None:
            rows[case.valid :] = cases.TAIL
    operands = {
        "x": x,
        "wi": weights(case.k, wide, "wi"),
        "wo": weights(width, case.k, "wo"),
        "probs": given,
        "wi_bias": None if bias is None else cases.normal((case.groups, wide), bias, "wi_bias"),
        "wo_bias": None if bias is None else cases.normal((case.groups, case.k), bias, "wo_bias"),
        "group_sizes": np.array(case.sizes, np.int32),
    }
    return operands, dy


def in_halves(operands: Operands, transposed: bool = False) -> Operands:
    """The operands with `wi` as a pair of arrays, gate and linear half."""
    halves = np.split(operands["wi"], 2, axis=1 if transposed else 2)
    return {**operands, "wi": tuple(np.ascontiguousarray(half) for half in halves)}


def present(operands: Operands, needs: MlpNeeds | None = None) -> MlpNeeds:
    """The needs without those of absent operands."""
    asked = needs or MlpNeeds()
    return MlpNeeds(*(need and operands[name] is not None for name, need in asked._asdict().items()))


@dataclass(frozen=True)
class MlpFrontend:
    """One way to the MLP: forward(operands, **options) -> y, gradients(operands, dy, needs, **options) -> gradients.

    `passes` gives both, as that of `adapters.Frontend` does. `wi` may be a pair; its gradient, which then is one, comes
    joined.
    """

    name: str
    forward: Callable[..., NDArray[Any]]
    gradients: Callable[..., MlpGradients]
    passes: Callable[..., tuple[NDArray[Any], MlpGradients]]

    def __str__(self) -> str:
        return self.name


def _numpy(found: list[Any], options: dict[str, Any]) -> MlpGradients:
    def joined(gradient: Any) -> Any:
        if not isinstance(gradient, (tuple, list)):
            return None if gradient is None else as_numpy(gradient)
        halves = [as_numpy(half) for half in gradient if half is not None]
        return np.concatenate(halves, axis=1 if options.get("transposed") else 2) if halves else None

    return MlpGradients(*map(joined, found))


def _held(operands: Operands, convert: Callable[[NDArray[Any]], Any]) -> list[Any]:
    def converted(operand: Any) -> Any:
        if isinstance(operand, tuple):
            return tuple(convert(each) for each in operand)
        return None if operand is None else convert(operand)

    return [converted(operands[name]) for name in LEAVES]


def _arrays_forward(operands: Operands, **options: Any) -> NDArray[Any]:
    options.pop("residuals", None)
    return arrays.grouped_mlp(**operands, **options)


def _arrays_gradients(operands: Operands, dy: NDArray[Any], needs: MlpNeeds, **options: Any) -> MlpGradients:
    return _numpy(list(arrays.grouped_mlp_grads(**operands, dy=dy, needs=needs, **options)), options)


def _jax(values: list[Any], operands: Operands, options: dict[str, Any]) -> Any:
    named = dict(zip(LEAVES, values, strict=True))
    options = dict(options)
    options["rhs_transposed"] = options.pop("transposed", False)
    bound_to(options, jnp.asarray)
    return jax_grouped.grouped_mlp(**named, group_sizes=operands["group_sizes"], **options)


def _jax_forward(operands: Operands, **options: Any) -> NDArray[Any]:
    return np.asarray(_jax(_held(operands, jnp.asarray), operands, options))


def _jax_passes(
    operands: Operands, dy: NDArray[Any], needs: MlpNeeds, alone: bool, **options: Any
) -> tuple[NDArray[Any], MlpGradients]:
    """Forward and backward in one program, where there is a backward; `_jax_forward` launches every call for itself."""
    held = _held(operands, jnp.asarray)
    live = [at for at, need in enumerate(needs) if need]

    def function(*some: Any) -> Any:
        values = list(held)
        for at, value in zip(live, some, strict=True):
            values[at] = value
        return _jax(values, operands, options)

    def run(dy: Any, *some: Any) -> tuple[Any, Any]:
        y, pull = jax.vjp(function, *some)
        return y, pull(dy)

    found: list[Any] = [None] * len(held)
    y = _jax_forward(operands, **options) if alone or not live else None
    if live:
        ours, gradients = jax.jit(run)(jnp.asarray(dy), *(held[at] for at in live))
        y = np.asarray(ours) if y is None else y
        for at, gradient in zip(live, gradients, strict=True):
            found[at] = gradient
    assert y is not None
    return y, _numpy(found, options)


def _jax_gradients(operands: Operands, dy: NDArray[Any], needs: MlpNeeds, **options: Any) -> MlpGradients:
    return _jax_passes(operands, dy, needs, not any(needs), **options)[1]


def _torch(values: list[Any], operands: Operands, options: dict[str, Any]) -> Any:
    named = dict(zip(LEAVES, values, strict=True))
    options = dict(options)
    options["rhs_transposed"] = options.pop("transposed", False)
    bound_to(options, to_torch)
    return torch_bridge.grouped_mlp(**named, group_sizes=to_torch(operands["group_sizes"]), **options)


def _torch_forward(operands: Operands, **options: Any) -> NDArray[Any]:
    return as_numpy(_torch(_held(operands, to_torch), operands, options))


def _torch_gradients(operands: Operands, dy: NDArray[Any], needs: MlpNeeds, **options: Any) -> MlpGradients:
    held = _held(operands, to_torch)
    members = [value if isinstance(value, tuple) else (value,) for value in held]
    for several, need in zip(members, needs, strict=True):
        for value in several if need else ():
            value.requires_grad_()
    y = _torch(held, operands, options)
    if any(needs):
        y.backward(to_torch(dy))
    grads = [[None if value is None else value.grad for value in several] for several in members]
    found = [each if isinstance(value, tuple) else each[0] for value, each in zip(held, grads, strict=True)]
    return _numpy(found, options)


ARRAYS = MlpFrontend("arrays", _arrays_forward, _arrays_gradients, apart(_arrays_forward, _arrays_gradients))
JAX = MlpFrontend("jax", _jax_forward, _jax_gradients, _jax_passes)
TORCH = MlpFrontend("torch", _torch_forward, _torch_gradients, apart(_torch_forward, _torch_gradients))
