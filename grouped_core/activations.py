"""The activation between the two products of an expert: one frozen description for every backend.

FC1's row h holds the gate half a first, then the linear half u (contiguous, or interleaved in blocks); kinds that are
not gated read a alone. Formulas and derivatives: numerics.md, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Parameter = Any
"""A float; `...` for the default of the kind, and None where the kind has none (or, as `limit`, does not clamp)."""

_POSITIVE = ("limit", "beta1", "beta2")
_PARAMETERS = ("alpha", "limit", "offset", "beta1", "beta2")

PLAIN_KINDS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "relu": {},
        "srelu": {},
        "silu": {},
        "gelu_tanh": {},
        "gelu_erf": {},
        "quick_gelu": {"alpha": 1.702},
    }
)
"""Kinds that read the whole of h, with the default of each parameter they have."""

GATED_KINDS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "swiglu": {},
        "geglu_tanh": {},
        "geglu_erf": {},
        "quick_geglu": {"alpha": 1.702},
        "clamped_qgeglu": {"alpha": 1.702, "limit": 7.0, "offset": 1.0},
        "situ_glu": {"beta1": 4.0, "beta2": 25.0},
    }
)
"""Kinds that multiply a function of the gate half by the linear half."""


@dataclass(frozen=True)
class Activation:
    """An activation and its parameters.

    Attributes:
        kind: a name of `PLAIN_KINDS` or `GATED_KINDS`.
        alpha: factor inside the logistic function of the quick kinds.
        limit: clamp of the gate from above and of the linear half on both sides; None clamps nothing.
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
        kinds = {**PLAIN_KINDS, **GATED_KINDS}
        defaults = kinds.get(self.kind) if isinstance(self.kind, str) else None
        if defaults is None:
            raise ValueError(
                f"`kind` of Activation: {self.kind!r}, wanted one of {', '.join(kinds)}; choose one of them."
            )
        for name in _PARAMETERS:
            object.__setattr__(self, name, self._checked(name, getattr(self, name), defaults))
        self._check_interleave()

    def _checked(self, name: str, value: Parameter, defaults: Mapping[str, float]) -> float | None:
        if value is ...:
            return defaults.get(name)
        if name not in defaults:
            if value is not None:
                has = ", ".join(defaults) or "no parameter"
                raise ValueError(f"`{name}` of Activation: {value!r}, but {self.kind} has {has}; leave `{name}` out.")
            return None
        if value is None and name == "limit":
            return None
        low = 0.0 if name in _POSITIVE else -math.inf
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= low:
            wanted = "a finite number above 0" if name in _POSITIVE else "a finite number"
            raise ValueError(
                f"`{name}` of Activation: {value!r}, wanted {wanted} for {self.kind}; the default is {defaults[name]}."
            )
        return float(value)

    def _check_interleave(self) -> None:
        s = self.interleave
        if s is None:
            return
        if not self.gated:
            raise ValueError(f"`interleave` of Activation: {s!r}, but {self.kind} is not gated; leave it out.")
        if not isinstance(s, int) or s < 1:
            raise ValueError(f"`interleave` of Activation: {s!r}, wanted None or a block of 1 or more; use an int.")

    @property
    def gated(self) -> bool:
        """Whether FC1 has a gate and a linear half."""
        return self.kind in GATED_KINDS

    def fc1_width(self, mlp_dim: int) -> int:
        """Columns of FC1 in front of an FC2 that reads `mlp_dim`: twice as many for gated kinds.

        Raises:
            ValueError: the interleave block does not divide `mlp_dim`.
        """
        if self.interleave is not None and mlp_dim % self.interleave:
            raise ValueError(
                f"`interleave` of Activation: {self.interleave}, wanted a divisor of the expert width {mlp_dim}; "
                "choose one, or None for contiguous halves."
            )
        return 2 * mlp_dim if self.gated else mlp_dim

    def params(self) -> dict[str, int | float | str]:
        """The parameters of native calls (`ActivationParams` in cc/api/calls.h)."""
        values = {name: getattr(self, name) for name in _PARAMETERS}
        numbers = {name: (math.inf if name == "limit" else 0.0) if v is None else v for name, v in values.items()}
        return {"kind": self.kind, **numbers, "interleave": self.interleave or 0}


def resolve(activation: str | Activation) -> Activation:
    """An `Activation` as it stands, or the one of that kind with its defaults."""
    return activation if isinstance(activation, Activation) else Activation(activation)
