"""Activations weighted by row, for use between two grouped linear layers. They hold no parameters."""

from __future__ import annotations

from torch import Tensor

from grouped_core.activations import Activation, resolve
from grouped_core.literals import fields_of
from torch_bridge.activation import scaled_activation_rows
from torch_bridge.nn._state import OrderedColumns


def shortest(activation: Activation) -> str | Activation:
    """Only the kind if all options have defaults, because any release of torch's compiler takes text as a constant."""
    return activation.kind if activation == Activation(activation.kind) else activation


class ScaledActivation(OrderedColumns):
    """z[r] = probs[r] act(h[r]), computed in fp32 and rounded once to the dtype of h.

    Args:
        activation: a kind with its defaults, or an `Activation`.
    """

    def __init__(self, activation: str | Activation) -> None:
        super().__init__()
        self.activation = resolve(activation)
        self.as_given = shortest(self.activation)

    def forward(self, h: Tensor, probs: Tensor | None = None) -> Tensor:
        """z [M, F] of h [M, W], W = 2F for gated kinds, gate half first or interleaved. probs: [M], None: 1.

        Raises:
            TypeError: wrong dtypes. ValueError: shapes, devices, layouts. RuntimeError: differentiated twice.
        """
        return scaled_activation_rows(h, probs, self.as_given)

    def extra_repr(self) -> str:
        """The activation and its options."""
        given = [(name, getattr(self.activation, name)) for name in fields_of(Activation)]
        return ", ".join(f"{name}={value!r}" for name, value in given if value is not None)


class ScaledSwiGLU(ScaledActivation):
    """`ScaledActivation("swiglu")`; glu_interleave_size: block in which gate and linear columns alternate."""

    def __init__(self, glu_interleave_size: int | None = None) -> None:
        super().__init__(Activation("swiglu", interleave=glu_interleave_size))


class ScaledSReLU(ScaledActivation):
    """`ScaledActivation("srelu")`: the square of ReLU."""

    def __init__(self) -> None:
        super().__init__("srelu")


class ScaledSiTUGLU(ScaledActivation):
    """`ScaledActivation("situ_glu")`; glu_interleave_size: block in which gate and linear columns alternate."""

    def __init__(self, glu_interleave_size: int | None = None) -> None:
        super().__init__(Activation("situ_glu", interleave=glu_interleave_size))


class ScaledClampedQGeGLU(ScaledActivation):
    """`ScaledActivation("clamped_qgeglu")`, the activation of GPT-OSS.

    Args:
        limit: clamp of the gate from above and of the linear half on both sides; None clamps nothing.
        alpha: factor inside the logistic function. glu_linear_offset: added to the linear half after its clamp.
        glu_interleave_size: block in which gate and linear columns alternate.
    """

    def __init__(
        self,
        limit: float | None = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(
            Activation(
                "clamped_qgeglu", alpha=alpha, limit=limit, offset=glu_linear_offset, interleave=glu_interleave_size
            )
        )
