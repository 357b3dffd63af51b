"""The activation between the two products of an expert: one frozen description for every backend.

A row h of FC1 holds the gate half a first, then the linear half u (contiguous, or interleaved in blocks); kinds that
are not gated have only a. Formulas and derivatives: numerics.md, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from grouped_core.formats import is_finite
from grouped_core.hashing import hashed_once
from grouped_core.literals import Literal, fields_of, literal

Array = NDArray[np.float64]
Parameter = Any
"""A float, or `...` for the kind's default. None: the kind does not have this parameter; for `limit`, no clamp."""

_POSITIVE = ("limit", "beta1", "beta2")
_PARAMETERS = ("alpha", "limit", "offset", "beta1", "beta2")


class Slopes(NamedTuple):
    """t = act(a, u), unscaled, and its derivatives; `du` is zero for kinds that are not gated."""

    t: Array
    da: Array
    du: Array


Formula = Callable[[Mapping[str, float], Array, Array], Slopes]
"""(parameters, a, u) -> value and derivatives, in float64; the reference definition of a kind."""


@dataclass(frozen=True)
class Kind:
    """One activation function. Kinds are listed only in this file and, except those with `case_of`, in
    cc/math/activation.h, with their arithmetic.

    Attributes:
        gated: whether it multiplies a function of the gate half by the linear half; other kinds read the whole of h.
        formula: value and derivatives.
        defaults: default values of its parameters.
        case_of: the kind of which this one is a special case: that kind computes it, with the parameters `fixed` added
            to those of this one. "": it is not a special case.
    """

    gated: bool
    formula: Formula
    defaults: Mapping[str, float] = field(default_factory=dict)
    case_of: str = ""
    fixed: Mapping[str, float] = field(default_factory=dict)


def _logistic(x: Array) -> tuple[Array, Array]:
    """1 / (1 + exp(-x)) and its derivative, with small relative errors for both signs of x."""
    e = np.exp(-np.abs(x))
    s = np.where(x < 0, e, 1.0) / (1.0 + e)
    return s, e / (1.0 + e) ** 2


def _tanh(x: Array) -> tuple[Array, Array]:
    return np.tanh(x), 4.0 * _logistic(2.0 * x)[1]


def _plain(function: Callable[[Mapping[str, float], Array], tuple[Array, Array]]) -> Formula:
    def formula(p: Mapping[str, float], a: Array, u: Array) -> Slopes:
        f, slope = function(p, a)
        return Slopes(f, slope, np.zeros_like(a))

    return formula


def _times_linear(function: Callable[[Mapping[str, float], Array], tuple[Array, Array]]) -> Formula:
    def formula(p: Mapping[str, float], a: Array, u: Array) -> Slopes:
        f, slope = function(p, a)
        return Slopes(f * u, slope * u, f)

    return formula


def _relu(p: Mapping[str, float], a: Array) -> tuple[Array, Array]:
    return np.where(a <= 0, 0.0, a), np.where(a > 0, 1.0, 0.0)


def _srelu(p: Mapping[str, float], a: Array) -> tuple[Array, Array]:
    positive = np.where(a <= 0, 0.0, a)
    return positive**2, 2.0 * positive


def _silu(p: Mapping[str, float], a: Array) -> tuple[Array, Array]:
    s, slope = _logistic(a)
    return a * s, s + a * slope


def _quick_gelu(p: Mapping[str, float], a: Array) -> tuple[Array, Array]:
    s, slope = _logistic(p["alpha"] * a)
    return a * s, s + p["alpha"] * a * slope


def _gelu_tanh(p: Mapping[str, float], a: Array) -> tuple[Array, Array]:
    # (1 + tanh(y)) / 2 is the logistic function of 2y, which does not cancel.
    c0, c1 = math.sqrt(8.0 / math.pi), 0.044715
    s, slope = _logistic(c0 * (a + c1 * a**3))
    return a * s, s + a * slope * c0 * (1.0 + 3.0 * c1 * a**2)


_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _gelu_erf(p: Mapping[str, float], a: Array) -> tuple[Array, Array]:
    phi = 0.5 * _erfc(-a / math.sqrt(2.0))
    return a * phi, phi + a * np.exp(-0.5 * a**2) / math.sqrt(2.0 * math.pi)


def _clamped_qgeglu(p: Mapping[str, float], a: Array, u: Array) -> Slopes:
    limit = p["limit"]
    gate = np.where(a > limit, limit, a)
    linear = np.where(u > limit, limit, np.where(u < -limit, -limit, u)) + p["offset"]
    f, slope = _quick_gelu(p, gate)
    return Slopes(f * linear, np.where(a > limit, 0.0, slope * linear), np.where(np.abs(u) > limit, 0.0, f))


def _silu_clamped_glu(p: Mapping[str, float], a: Array, u: Array) -> Slopes:
    limit = p["limit"]
    f, slope = _silu(p, a)
    gate = np.where(f > limit, limit, f)
    linear = np.where(u > limit, limit, np.where(u < -limit, -limit, u))
    return Slopes(gate * linear, np.where(f > limit, 0.0, slope * linear), np.where(np.abs(u) > limit, 0.0, gate))


def _situ_glu(p: Mapping[str, float], a: Array, u: Array) -> Slopes:
    s, s_slope = _logistic(a)
    gate, gate_slope = _tanh(a / p["beta1"])
    linear, linear_slope = _tanh(u / p["beta2"])
    f, v = p["beta1"] * gate * s, p["beta2"] * linear
    return Slopes(f * v, (gate_slope * s + p["beta1"] * gate * s_slope) * v, f * linear_slope)


_QUICK = MappingProxyType({"alpha": 1.702})
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "relu": Kind(False, _plain(_relu)),
        "srelu": Kind(False, _plain(_srelu)),
        "silu": Kind(False, _plain(_silu)),
        "gelu_tanh": Kind(False, _plain(_gelu_tanh)),
        "gelu_erf": Kind(False, _plain(_gelu_erf)),
        "quick_gelu": Kind(False, _plain(_quick_gelu), _QUICK),
        "swiglu": Kind(True, _times_linear(_silu)),
        "geglu_tanh": Kind(True, _times_linear(_gelu_tanh)),
        "geglu_erf": Kind(True, _times_linear(_gelu_erf)),
        "quick_geglu": Kind(True, _times_linear(_quick_gelu), _QUICK),
        "clamped_qgeglu": Kind(True, _clamped_qgeglu, MappingProxyType({**_QUICK, "limit": 7.0, "offset": 1.0})),
        "silu_clamped_glu": Kind(True, _silu_clamped_glu, MappingProxyType({"limit": 7.0})),
        "situ_glu": Kind(True, _situ_glu, MappingProxyType({"beta1": 4.0, "beta2": 25.0})),
        "clamped_swiglu": Kind(
            True,
            _clamped_qgeglu,
            MappingProxyType({"limit": 10.0}),
            case_of="clamped_qgeglu",
            fixed=MappingProxyType({"alpha": 1.0, "offset": 0.0}),
        ),
    }
)
"""Every kind by name: first those of cc/math/activation.h, in the order of that file, then the special cases."""

PLAIN_KINDS = tuple(name for name, kind in KINDS.items() if not kind.gated)
"""Kinds that read the whole of h."""
GATED_KINDS = tuple(name for name, kind in KINDS.items() if kind.gated)
"""Kinds that multiply a function of the gate half by the linear half."""


def half_columns(width: int, interleave: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Columns of a hidden row that hold the gate and the linear half of `width` activated columns (MLP-5)."""
    block = interleave or width
    column = np.arange(width)
    gate = column // block * 2 * block + column % block
    return gate, gate + block


@hashed_once
@dataclass(frozen=True)
class Activation(Literal):
    """An activation and its parameters.

    Attributes:
        kind: a name of `KINDS`.
        alpha: factor inside the logistic function of the quick kinds.
        limit: bound of the gate half from above and of the linear half on both sides; None: no bound. The gate half is
            clamped before its function is applied, except in `silu_clamped_glu`, which clamps the result of silu.
        offset: added to the linear half after its clamp.
        beta1, beta2: ranges of the two tanh of `situ_glu`.
        interleave: block s in which gate and linear columns alternate; None: all gate columns, then all linear ones.

    Raises:
        ValueError: an unknown kind, a parameter that its kind does not have, or one out of range.
    """

    kind: str
    alpha: Parameter = ...
    limit: Parameter = ...
    offset: Parameter = ...
    beta1: Parameter = ...
    beta2: Parameter = ...
    interleave: int | None = None

    def __post_init__(self) -> None:
        kind = KINDS.get(self.kind) if isinstance(self.kind, str) else None
        if kind is None:
            raise ValueError(
                f"`kind` of Activation: {self.kind!r}, expected one of {', '.join(KINDS)}; choose one of them."
            )
        for name in _PARAMETERS:
            object.__setattr__(self, name, self._checked(name, getattr(self, name), kind.defaults))
        self._check_interleave()
        object.__setattr__(self, "_text", literal("Activation", [getattr(self, name) for name in _FIELDS]))

    def _checked(self, name: str, value: Parameter, defaults: Mapping[str, float]) -> float | None:
        if value is ...:
            return defaults.get(name)
        if name not in defaults:
            if value is not None:
                has = ", ".join(defaults) or "no parameter"
                raise ValueError(
                    f"`{name}` of Activation: {value!r}, expected None, because {self.kind} has {has}; leave "
                    f"`{name}` out."
                )
            return None
        if value is None and name == "limit":
            return None
        positive, number = name in _POSITIVE, isinstance(value, (int, float, np.integer, np.floating))
        if not number or not is_finite(value, above_zero=positive):
            wanted = "a finite number above 0" if positive else "a finite number"
            raise ValueError(
                f"`{name}` of Activation: {value!r}, expected {wanted}, as float32 too, for {self.kind}; default: "
                f"{defaults[name]}."
            )
        return float(value)

    def _check_interleave(self) -> None:
        s = self.interleave
        if s is None:
            return
        if not self.gated:
            raise ValueError(
                f"`interleave` of Activation: {s!r}, expected None, because {self.kind} is not gated; leave it out."
            )
        if isinstance(s, bool) or not isinstance(s, (int, np.integer)) or s < 1:
            raise ValueError(f"`interleave` of Activation: {s!r}, expected None or a block of 1 or more; use an int.")
        object.__setattr__(self, "interleave", int(s))

    @property
    def gated(self) -> bool:
        """Whether FC1 has a gate and a linear half."""
        return KINDS[self.kind].gated

    def fc1_width(self, mlp_dim: int) -> int:
        """Columns of FC1 for an FC2 that reads `mlp_dim` columns: twice as many for gated kinds.

        Raises:
            ValueError: the interleave block does not divide `mlp_dim`.
        """
        if self.interleave is not None and mlp_dim % self.interleave:
            raise ValueError(
                f"`interleave` of Activation: {self.interleave}, expected a divisor of the expert width {mlp_dim}; "
                "choose one, or None for contiguous halves."
            )
        return 2 * mlp_dim if self.gated else mlp_dim

    def params(self) -> dict[str, int | float | str]:
        """The parameters of native calls (`ActivationParams` in cc/api/calls.h)."""
        kind = KINDS[self.kind]
        values = {name: getattr(self, name) for name in _PARAMETERS}
        numbers = {name: (math.inf if name == "limit" else 0.0) if v is None else v for name, v in values.items()}
        return {"kind": kind.case_of or self.kind, **numbers, **kind.fixed, "interleave": self.interleave or 0}


_FIELDS = fields_of(Activation)


def resolve(activation: str | Activation) -> Activation:
    """`activation` itself if it is an `Activation`; for the name of a kind, that kind with default parameters."""
    return activation if isinstance(activation, Activation) else Activation(activation)


def interleave(weight: Any, block: int, *, axis: int = -1) -> Any:
    """Interleaves a first weight or bias with contiguous halves: its 2F columns in blocks of `block` (MLP-5).

    The result is for `Activation(interleave=block)`. It is a view where no data moves.

    Args:
        weight: an array of NumPy, CuPy, JAX or PyTorch, gate half first along `axis`: `wi` or `wi_bias`, or hidden rows
            computed with them.

    Raises:
        ValueError: the axis does not exist, its length is odd, or the block does not divide half of that length.
        TypeError: the weight is no array, or the block no integer.
    """
    return _swap_blocks(weight, block, axis, blocked=False)


def deinterleave(weight: Any, block: int, *, axis: int = -1) -> Any:
    """The inverse of `interleave`: gate half first, then the linear half. It raises the same errors."""
    return _swap_blocks(weight, block, axis, blocked=True)


def _swap_blocks(weight: Any, block: int, axis: int, *, blocked: bool) -> Any:
    function = "deinterleave" if blocked else "interleave"
    if not hasattr(weight, "shape") or not hasattr(weight, "swapaxes"):
        raise TypeError(
            f"`weight` of {function}: {type(weight).__name__}, expected an array of NumPy, CuPy, JAX or PyTorch; "
            "convert it first."
        )
    for name, value in (("block", block), ("axis", axis)):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"`{name}` of {function}: {value!r}, expected an integer; pass an int.")
    shape = tuple(weight.shape)
    if not shape:
        raise ValueError(
            f"`weight` of {function}: shape (), expected at least one axis of columns; pass a weight or a bias."
        )
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"`axis` of {function}: {axis}, expected one of the axes of {shape}; the last one is that of columns."
        )
    axis %= len(shape)
    width, odd = divmod(shape[axis], 2)
    if odd or block < 1 or width % block:
        raise ValueError(
            f"`block` of {function}: {block} for axis {axis} of shape {shape}, expected a divisor of half that axis; "
            "choose one."
        )
    parts = (width // block, 2, block) if blocked else (2, width // block, block)
    apart = weight.reshape(*shape[:axis], *parts, *shape[axis + 1 :])
    return apart.swapaxes(axis, axis + 1).reshape(shape)
