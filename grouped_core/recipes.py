"""Recipes: a 3 x 2 table of formats, one cell for each operand of each product, and a few options.

=========  ==========  ============  =========================
product    contracts   cells         result
=========  ==========  ============  =========================
forward    K           (x, w)        y  [M, N]
dgrad      N           (dy, w)       dx [M, K]
wgrad      rows of g   (x, dy)       dw, in its weight's layout
=========  ==========  ============  =========================
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from grouped_core.formats import PLAIN, Format

FP32_MODES = ("tf32x3", "tf32", "ieee")


@dataclass(frozen=True)
class Recipe:
    """How the three products of a linear map are computed. Frozen and hashable; `replace` makes a variant.

    Attributes:
        name: shown in messages.
        forward, dgrad, wgrad: formats of the product's two operands, in the order of the module's table.
        batch_invariant: a row of y or dx then depends on that row and its group's weights alone, not on M or G.
        fp32: how float32 operands meet tensor cores: "tf32x3" (float32 accuracy), "tf32", or "ieee". Kernels without
            tensor cores run every mode as "ieee" (numerics 2.5).

    Raises:
        ValueError: an option has a value that it does not take.
    """

    name: str
    forward: tuple[Format, Format]
    dgrad: tuple[Format, Format]
    wgrad: tuple[Format, Format]
    batch_invariant: bool = False
    fp32: str = "tf32x3"

    def __post_init__(self) -> None:
        if self.fp32 not in FP32_MODES:
            raise ValueError(f"`fp32` of Recipe: {self.fp32!r}, wanted one of {FP32_MODES}; choose one of them.")

    def replace(self, **changes: Any) -> Recipe:
        """This recipe with the fields of `changes` changed."""
        return dataclasses.replace(self, **changes)


def plain(x: str, w: str | None = None) -> Recipe:
    """The recipe of operands that are used as they stand: `x` and `w` are element types, dy takes that of x."""
    fx, fw = PLAIN[x], PLAIN[w or x]
    name = fx.name.upper() if fx == fw else f"{fx.name} x {fw.name}"
    return Recipe(name, forward=(fx, fw), dgrad=(fx, fw), wgrad=(fx, fx))


BF16 = plain("bfloat16")
FP16 = plain("float16")
FP32 = plain("float32")
