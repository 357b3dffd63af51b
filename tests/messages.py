"""Bad calls of the linear operation and the message of each: one table for the core and for every frontend (ERR-1).

A frontend's arguments are named by placeholders in the texts: `{x}`, `{w}`, `{transposed}`, `{result}`, ...
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from grouped_core.linear_spec import Names
from grouped_core.recipes import BF16

Spec = tuple[str, tuple[int, ...]]

GOOD: dict[str, Any] = {
    "x": ("float32", (6, 8)),
    "w": ("float32", (3, 8, 4)),
    "group_sizes": ("int32", (3,)),
    "transposed": False,
    "bias": None,
    "row_scale": None,
    "scale_bias": False,
    "out": None,
    "recipe": None,
    "result_dtype": None,
    "implementation": None,
}
"""A call that works. Arrays are (dtype, shape); `row_scale`, `bias` and `out` are absent."""
BIAS = ("float32", (3, 4))
ROW_SCALE = ("float32", (6,))


@dataclass(frozen=True)
class Bad:
    """One bad call.

    Attributes:
        name: test id.
        kind: the exception, exactly.
        thing, came, wanted, remedy: fragments of the message, in this order.
        change: what differs from GOOD.
    """

    name: str
    kind: type[Exception]
    thing: str
    came: str
    wanted: str
    remedy: str
    change: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """GOOD with the change made."""
        return {**GOOD, **self.change}

    def fragments(self, names: Names) -> list[str]:
        """The four parts with the names of a frontend."""
        words = names._asdict()
        return [part.format(**words) for part in (self.thing, self.came, self.wanted, self.remedy)]


def _bad(name: str, kind: type[Exception], thing: str, came: str, wanted: str, remedy: str, **change: Any) -> Bad:
    return Bad(name, kind, thing, came, wanted, remedy, change)


BAD: tuple[Bad, ...] = (
    # Group sizes (GRP-1).
    _bad(
        "sizes_float",
        TypeError,
        "`{sizes}`:",
        "dtype float32",
        "expected an integer dtype (int32 is native)",
        "pass the number of rows of each group as integers",
        group_sizes=("float32", (3,)),
    ),
    _bad(
        "sizes_bool",
        TypeError,
        "`{sizes}`:",
        "dtype bool",
        "expected an integer dtype",
        "pass the number of rows of each group as integers",
        group_sizes=("bool", (3,)),
    ),
    _bad(
        "sizes_rank",
        ValueError,
        "`{sizes}`:",
        "shape (3, 1)",
        "expected one axis [G]",
        "pass one size per group",
        group_sizes=("int32", (3, 1)),
    ),
    _bad(
        "sizes_length",
        ValueError,
        "`{sizes}`:",
        "shape (4,)",
        "expected (3,) = one size for each group of `{w}`",
        "pass one size per group",
        group_sizes=("int32", (4,)),
    ),
    # Operands (MAT-6, MAT-7).
    _bad(
        "x_integers",
        TypeError,
        "`{x}`:",
        "dtype int32",
        "expected one of float32, bfloat16",
        "cast it",
        x=("int32", (6, 8)),
    ),
    _bad(
        "w_integers",
        TypeError,
        "`{w}`:",
        "dtype int32",
        "expected one of float32, bfloat16",
        "cast it",
        w=("int32", (3, 8, 4)),
    ),
    _bad(
        "x_rank",
        ValueError,
        "`{x}`:",
        "shape (2, 3, 8)",
        "expected two axes [M, K]",
        "fold leading axes into rows with a reshape",
        x=("float32", (2, 3, 8)),
    ),
    _bad(
        "w_rank",
        ValueError,
        "`{w}`:",
        "shape (8, 4)",
        "expected three axes [G, K, N]",
        "stack one matrix per group on the first axis",
        w=("float32", (8, 4)),
    ),
    _bad(
        "dtypes_differ",
        TypeError,
        "`{w}`:",
        "dtype bfloat16",
        "expected float32 = dtype of `{x}`",
        "cast one of them; the operation does not cast operands itself",
        w=("bfloat16", (3, 8, 4)),
    ),
    _bad(
        "k_differs",
        ValueError,
        "`{x}`:",
        "shape (6, 7)",
        "expected (M, 8) to match `{w}` [G, K, N] = (3, 8, 4)",
        "check the operands and `{transposed}`",
        x=("float32", (6, 7)),
    ),
    _bad(
        "k_differs_transposed",
        ValueError,
        "`{x}`:",
        "shape (6, 8)",
        "expected (M, 4) to match `{w}` [G, N, K] = (3, 8, 4)",
        "check the operands and `{transposed}`",
        transposed=True,
    ),
    _bad(
        "no_columns",
        ValueError,
        "`{w}`:",
        "shape (3, 8, 0)",
        "expected [G, K, N] with every axis at least 1",
        "only M, the number of rows, may be 0",
        w=("float32", (3, 8, 0)),
    ),
    _bad(
        "no_groups",
        ValueError,
        "`{w}`:",
        "shape (0, 8, 4)",
        "expected [G, K, N] with every axis at least 1",
        "only M, the number of rows, may be 0",
        w=("float32", (0, 8, 4)),
        group_sizes=("int32", (0,)),
    ),
    _bad(
        "too_many_groups",
        ValueError,
        "`{w}`:",
        "shape (65536, 8, 4)",
        "expected at most 65535 groups",
        "split the groups over several calls",
        w=("float32", (65536, 8, 4)),
        group_sizes=("int32", (65536,)),
    ),
    # Bias and row scale (MAT-8, MAT-9).
    _bad(
        "bias_shape",
        ValueError,
        "`{bias}`:",
        "shape (4,)",
        "expected two axes [G, N]",
        "pass one bias vector per group",
        bias=("float32", (4,)),
    ),
    _bad(
        "bias_integers",
        TypeError,
        "`{bias}`:",
        "dtype int32",
        "expected one of float32, bfloat16, float16",
        "cast it",
        bias=("int32", (3, 4)),
    ),
    _bad(
        "row_scale_shape",
        ValueError,
        "`{row_scale}`:",
        "shape (5,)",
        "expected (6,) = all rows of `{x}`, tail included",
        "pass one factor per row",
        row_scale=("float32", (5,)),
    ),
    _bad(
        "row_scale_integers",
        TypeError,
        "`{row_scale}`:",
        "dtype int32",
        "expected one of float32, bfloat16, float16",
        "cast it",
        row_scale=("int32", (6,)),
    ),
    _bad(
        "scale_bias_without_bias",
        ValueError,
        "`{scale_bias}`:",
        "True without `{bias}`",
        "expected both `{bias}` and `{row_scale}`",
        "pass `{bias}` or leave `{scale_bias}` False",
        scale_bias=True,
        row_scale=ROW_SCALE,
    ),
    _bad(
        "scale_bias_without_row_scale",
        ValueError,
        "`{scale_bias}`:",
        "True without `{row_scale}`",
        "expected both `{bias}` and `{row_scale}`",
        "pass `{row_scale}` or leave `{scale_bias}` False",
        scale_bias=True,
        bias=BIAS,
    ),
    # Buffers (BUF-2) and options.
    _bad(
        "out_shape",
        ValueError,
        "`{out}`:",
        "shape (5, 4)",
        "expected (6, 4) = all rows, tail included",
        "allocate a buffer of that shape",
        out=("float32", (5, 4)),
    ),
    _bad(
        "out_dtype",
        ValueError,
        "`{out}`:",
        "dtype bfloat16",
        "expected float32 = dtype of the result",
        "allocate a buffer of that dtype",
        out=("bfloat16", (6, 4)),
    ),
    _bad(
        "recipe_dtype",
        TypeError,
        "`{x}`:",
        "dtype float32",
        "expected bfloat16, the dtype of the recipe BF16",
        "cast it, or pass recipe=None",
        recipe=BF16,
    ),
    _bad(
        "result_dtype",
        TypeError,
        "`{result}`:",
        "int32",
        "expected None or one of float32, bfloat16, float16",
        "choose one of them",
        result_dtype="int32",
    ),
    _bad(
        "no_implementations",
        ValueError,
        "`implementation`:",
        "[]",
        "expected None, a kernel's name or a sequence of names",
        "`explain` lists the kernels of a call",
        implementation=[],
    ),
)
