"""The table of numeric formats, which say how an operand of a product is quantised, and the quantised operand.

Kernels never see the name of a format, only its element types, block sizes and rule number.

Letters: G groups, M rows, K in, N out, X the features of a row, P rows padded to segments (`padded_rows`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from grouped_core.hashing import hashed_once
from grouped_core.literals import Literal, fields_of, literal, with_fields

_LARGEST = float(np.finfo(np.float32).max)


def is_finite(number: Any, *, above_zero: bool = False) -> bool:
    """Whether a number is finite as float32, in which kernels take every number, and if asked not 0 there either.

    A larger one would be infinite in a kernel, and lead to NaN in results or silently switch an option off.
    """
    return abs(number) <= _LARGEST and (not above_zero or bool(np.float32(number) > 0))


def as_flag(name: str, value: Any, of: str = "") -> bool:
    """Returns an option that is a bool; `of` names the function or class, for the message.

    Raises:
        TypeError: it is none; text would count as True.
    """
    if not isinstance(value, (bool, np.bool_)):
        place = f" of {of}" if of else ""
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"a {type(value).__name__}"  # a recipe is 2 000 letters long
        raise TypeError(f"`{name}`{place}: {shown}, expected True or False; pass one of them.")
    return bool(value)


def check_flags(of: str, **flags: Any) -> None:
    """Refuses options of `of`, a function or class, that are no bools. Raises TypeError."""
    for name, flag in flags.items():
        as_flag(name, flag, of)


@hashed_once
@dataclass(frozen=True)
class Format(Literal):
    """The format of one operand (numerics 2.5). Frozen and hashable; `replace` makes a variant.

    A plain format holds the values themselves. Others hold codes and decode scales (scale_inv): value = code * scale of
    its block * scale of its group, as far as the format has them. Blocks run along the contracted axis.

    Attributes:
        name: the public name, e.g. "fp8_1x128".
        values: element type of values or codes, as NumPy and ml_dtypes spell it; "uint8" is two E2M1 codes per byte.
        rule: how scales are computed from the amax: "" (plain), "fp32", "e8m0" or "nvfp4".
        scales: element type of block scales; "" where there are none.
        block: contracted elements that share a scale; 0: the whole group shares one.
        square: blocks are equally long along the other axis (weights only).
        segment: in the form contracted along rows, the rows of a group are padded to a multiple of this.
        turned: the form contracted along rows is transposed: rows are the last axis of its codes.
        delayed: the quantisation scale comes from a state, from the amax of earlier steps.
        starts_at_one: with delayed: a group without a scale yet (its state holds 0) has scale 1, instead of the scale
            that follows from its rows in this call. Recipes set it where a row must not depend on others.
        pow2: "fp32" quantisation scales are rounded down to powers of two.
        eps: "fp32" scales use at least this amax.
        stochastic: E2M1 codes are rounded stochastically.
        rotate: where rows are contracted, blocks go through a Hadamard transform.
        four_over_six: "nvfp4": "absolute" or "square" errors choose one of two scales per block; "" takes the first.
        full_range: with four_over_six: groups are scaled to 2688, as without it, instead of 1536.

    Raises:
        TypeError: a field has another type. ValueError: a field has an invalid value, or fields contradict each other.
    """

    name: str
    values: str
    rule: str = ""
    scales: str = ""
    block: int = 0
    square: bool = False
    segment: int = 0
    turned: bool = False
    delayed: bool = False
    starts_at_one: bool = False
    pow2: bool = False
    eps: float = 0.0
    stochastic: bool = False
    rotate: bool = False
    four_over_six: str = ""
    full_range: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        self._check_layout()
        allowed = {
            "delayed": self.one_scale,
            "starts_at_one": self.delayed,
            "pow2": self.rule == "fp32",
            "eps": self.rule == "fp32" and not self.delayed,
            "stochastic": self.values == "uint8",
            "rotate": self.rule == "nvfp4" and not self.square,
            "four_over_six": self.rule == "nvfp4" and not (self.rotate or self.stochastic),
            "full_range": self.four_over_six != "",
        }
        for option, legal in allowed.items():
            if getattr(self, option) and not legal:
                raise ValueError(
                    f"`{option}` of format {self.name}: {getattr(self, option)!r}, expected its default; this format, "
                    "with its other options, does not have it."
                )
        if self.four_over_six not in ("", "absolute", "square"):
            raise ValueError(
                f"`four_over_six` of format {self.name}: {self.four_over_six!r}, expected '', 'absolute' or 'square'; "
                "choose one of them."
            )
        if not (self.eps >= 0 and is_finite(self.eps)):
            raise ValueError(
                f"`eps` of format {self.name}: {self.eps}, expected a number >= 0 that is finite as float32; pass one."
            )
        object.__setattr__(self, "eps", float(self.eps))
        object.__setattr__(self, "_text", literal("Format", [getattr(self, name) for name in _FIELDS]))

    def _check_types(self) -> None:
        """Refuses fields whose type is not that of the table: a flag that is text would count as True."""
        for name, kind in _TYPE_OF:
            value = getattr(self, name)
            # A bool is an integer too, but no number of elements.
            if not isinstance(value, kind.types) or (isinstance(value, bool) and bool not in kind.types):
                raise TypeError(f"`{name}` of format {self.name}: {value!r}, expected {kind.words}; pass such a value.")

    def _check_layout(self) -> None:
        """Refuses element types and lengths that do not fit the rule, which kernels would refuse in every use."""
        if self.rule not in _RULES:
            raise self._wrong("rule", f"one of {', '.join(map(repr, _RULES))}", "choose one of them")
        for name, lengths in (("block", _BLOCKS), ("segment", _SEGMENTS)):
            if getattr(self, name) not in lengths:
                raise self._wrong(name, f"one of {', '.join(map(str, lengths))}", "choose one of them")
        has = _RULES[self.rule]
        of_rule = f"rule {self.rule!r}" if self.rule else "values that are not quantised"
        if self.values not in has.values:
            raise self._wrong("values", f"one of {', '.join(has.values)} with {of_rule}", "change one of the two")
        if self.block not in has.blocks:
            lengths = ", ".join(map(str, has.blocks))
            raise self._wrong("block", f"one of {lengths} with {of_rule}", "change one of the two")
        scales = has.scales if self.block else ""
        if self.scales != scales:
            raise self._wrong("scales", f"{scales!r} with {of_rule} and block {self.block}", "pass that")
        if self.square and not self.block:
            raise self._wrong("square", "False without blocks", "pass a block, or leave it out")
        if self.segment and self.plain:
            raise self._wrong("segment", f"0 with {of_rule}", "leave it out")
        if self.segment and self.block and self.segment % self.block:
            raise self._wrong("segment", f"a multiple of its block {self.block}", "pass one")
        if self.turned and (not self.segment or self.values == "uint8"):
            words = "False without segments" if not self.segment else "False with codes of four bits"
            raise self._wrong("turned", words, "leave it out")

    def _wrong(self, field: str, expected: str, remedy: str) -> ValueError:
        return ValueError(f"`{field}` of format {self.name}: {getattr(self, field)!r}, expected {expected}; {remedy}.")

    @property
    def plain(self) -> bool:
        """Whether the operand is not quantised."""
        return not self.rule

    @property
    def by_row(self) -> bool:
        """Whether the scales of a row follow from it alone, so that rows can be quantised before they are moved."""
        return not self.plain and self.block > 0 and not self.square and not self.per_group

    @property
    def gathers(self) -> bool:
        """Whether the pass that quantises rows can gather them, from values of 16 bits."""
        return not self.plain and self.values != "uint8"

    @property
    def block_outer(self) -> int:
        """Elements of the other axis that share a block's scale."""
        return self.block if self.square else 1

    @property
    def transposed(self) -> bool:
        """`turned` by the name that internal code and native calls have for it."""
        return self.turned

    @property
    def layout(self) -> tuple[Any, ...]:
        """What a reader of codes and scales has to know; other fields only affect how they are computed."""
        return (
            self.values,
            self.scales,
            self.block,
            self.square,
            self.segment,
            self.turned,
            self.per_group,
            self.rotate,
        )

    def params(self) -> dict[str, str | int | float]:
        """The parameters of native calls that quantise in this format, by their names in cc/api/calls.h."""
        values = {name: getattr(self, name) for name in PARAMS}
        flags = {name: int(value) for name, value in values.items() if isinstance(value, bool)}
        return {**values, **flags}

    @property
    def per_group(self) -> bool:
        """Whether each group has a scale."""
        return self.rule == "nvfp4" or self.one_scale

    @property
    def one_scale(self) -> bool:
        """Whether each group has one scale and nothing else, so that both forms of a weight have the same codes."""
        return self.rule == "fp32" and self.block == 0

    def shares_codes(self, other: Format | None) -> bool:
        """Whether the forms of a weight in this format and, contracted along the other axis, in `other` have the same
        codes.
        """
        return self.one_scale and self == other

    @property
    def powers_of_fp4(self) -> bool:
        """Whether it is E2M1 codes with power-of-two scales (MXFP4), only for weights; float16 has a smaller range."""
        return self.values == "uint8" and self.rule == "e8m0"

    @property
    def for_weights(self) -> bool:
        """Whether the format is only for weights."""
        return self.square or self.powers_of_fp4

    def replace(self, **changes: Any) -> Format:
        """This format with the fields of `changes` changed. TypeError: it has no such field."""
        return with_fields(self, changes)

    def along(self, *, rows: bool) -> Format:
        """The format of the form contracted along rows, or along the other axis, which is never rotated."""
        return self.replace(rotate=False) if self.rotate and not rows else self


_FIELDS = fields_of(Format)

PARAMS = (
    *("rule", "block", "block_outer", "segment", "transposed", "pow2", "eps", "starts_at_one"),
    *("stochastic", "rotate", "four_over_six", "full_range"),
)
"""What a quantising kernel has to know of a format; a new option of formats is added here."""

_E4M3, _E5M2, _E8M0 = "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"

WIDE = ("float32", "bfloat16", "float16")
"""Element types of results, biases and accumulators."""


class _Type(NamedTuple):
    types: tuple[type, ...]
    words: str


_TYPES = {
    "str": _Type((str,), "text"),
    "int": _Type((int,), "an integer"),
    "bool": _Type((bool,), "True or False"),
    "float": _Type((int, float, np.integer, np.floating), "a number"),
}
"""What a field may hold, by its annotation."""
_TYPE_OF = tuple([(field.name, _TYPES[str(field.type)]) for field in dataclasses.fields(Format)])


class _Rule(NamedTuple):
    """What goes with a rule: element types of values, lengths of blocks, element type of their scales."""

    values: tuple[str, ...]
    blocks: tuple[int, ...]
    scales: str = ""


_BLOCKS = (0, 16, 32, 64, 128)
_SEGMENTS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
_RULES = {
    "": _Rule((*WIDE, _E4M3, _E5M2), (0,)),
    "fp32": _Rule((_E4M3, _E5M2), _BLOCKS, "float32"),
    "e8m0": _Rule((_E4M3, _E5M2, "uint8"), _BLOCKS[1:], _E8M0),
    "nvfp4": _Rule(("uint8",), (16,), _E4M3),
}

_TENSOR: dict[str, Any] = {"rule": "fp32", "segment": 128, "turned": True}
_MX: dict[str, Any] = {"rule": "e8m0", "scales": _E8M0, "block": 32, "segment": 32}
_NV: dict[str, Any] = {"rule": "nvfp4", "scales": _E4M3, "block": 16, "segment": 16}

FORMATS = {
    row.name: row
    for row in (
        Format("fp32", "float32"),
        Format("bf16", "bfloat16"),
        Format("fp16", "float16"),
        Format("e4m3fn", _E4M3),
        Format("e5m2", _E5M2),
        Format("fp8_tensor", _E4M3, **_TENSOR),
        Format("fp8_tensor_e5m2", _E5M2, **_TENSOR),
        Format("fp8_1x128", _E4M3, scales="float32", block=128, pow2=True, **_TENSOR),
        Format("fp8_1x128_e5m2", _E5M2, scales="float32", block=128, pow2=True, **_TENSOR),
        Format("fp8_128x128", _E4M3, scales="float32", block=128, square=True, pow2=True, rule="fp32"),
        Format("mxfp8", _E4M3, **_MX),
        Format("mxfp8_e5m2", _E5M2, **_MX),
        Format("mxfp8_2d", _E4M3, square=True, **_MX),
        Format("mxfp4", "uint8", **_MX),
        Format("nvfp4", "uint8", **_NV),
        Format("nvfp4_2d", "uint8", square=True, **_NV),
    )
}
"""Every format by its public name."""

PLAIN = {row.values: row for row in FORMATS.values() if row.plain}
"""Plain formats by element type."""


def wide(dtype: str) -> str:
    """Dtype of results and gradients of an operand of `dtype`: the same dtype, or bfloat16 for 8-bit values."""
    return dtype if dtype in WIDE else "bfloat16"


def format_option(format: Any) -> Format:
    """`format=` of a public function: a name, or a `Format`.

    Raises:
        ValueError: no format has that name. TypeError: neither a name nor a `Format`.
    """
    if isinstance(format, Format):
        return format
    if not isinstance(format, str):
        raise TypeError(f"`format`: {type(format).__name__}, expected a name or a Format; pass one, e.g. 'mxfp8'.")
    if format not in FORMATS:
        raise ValueError(f"`format`: {format!r}, expected one of {', '.join(FORMATS)}; choose one of them.")
    return FORMATS[format]


def padded_rows(rows: int, groups: int, segment: int) -> int:
    """P: rows that hold `rows` rows of `groups` groups, each padded to a multiple of `segment` (numerics 2.4).

    Raises:
        ValueError: the format has no segment.
    """
    if not segment:
        raise ValueError(
            "`segment` of the format: 0, expected the length that contracted rows are padded to; pass one."
        )
    return (rows + groups * (segment - 1)) // segment * segment


_Array = TypeVar("_Array")


@dataclass(frozen=True, eq=False)
class QTensor(Generic[_Array]):
    """A quantised operand: codes, decode scales (scale_inv), and their format. It has no arithmetic; see `dequantize`.

    Attributes:
        values: codes. Rows [M, X] contracted along X: [M, X]; contracted along rows: [X, P] if the format is transposed
            (`turned`), else [P, X]. Weights: [G, O, C], the contracted axis last. E2M1 halves the last axis, rounding
            up.
        scales: one per block of b elements. Rows: [M, X/b], float32 ones [X/b, M]; contracted along rows [P/b, X].
            Weights [G, O, C/b], square blocks [G, O/b, C/b]. Divisions round up. Without blocks: float32 [G].
        group_scales: float32 [G] of formats that have them in addition to block scales, else None.
        format: its format, an entry of FORMATS or a variant of one.
        axis: the contracted axis of the logical shape.
        shape: the logical shape: rows [M, X] or weights [G, A, B].
        dtype: the nominal element type: the dtype of `dequantize` and of products with this operand.
        other: the same array quantised for products that contract the other one of its last two axes, or None.
        group_sizes: int32 [G] of rows, for `dequantize`; None for weights.
    """

    values: _Array
    scales: _Array | None
    group_scales: _Array | None
    format: Format
    axis: int
    shape: tuple[int, ...]
    dtype: str
    other: QTensor[_Array] | None = None
    group_sizes: _Array | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.format, Format):
            raise TypeError(
                f"`format` of a QTensor: {type(self.format).__name__}, expected a Format; pass an entry of FORMATS."
            )
        if self.scales is None and not self.format.scales:  # made from `slots`
            object.__setattr__(self, "scales", self.group_scales)
            object.__setattr__(self, "group_scales", None)

    @property
    def slots(self) -> tuple[_Array, _Array | None, _Array | None]:
        """Codes, block scales and group scales, in the order of native calls."""
        if self.format.scales:
            return self.values, self.scales, self.group_scales
        return self.values, None, self.scales


def check_quantized(q: Any) -> None:
    """Refuses anything but a `QTensor`.

    Raises:
        TypeError: `q` is not a `QTensor`.
    """
    if not isinstance(q, QTensor):
        raise TypeError(f"`q`: {type(q).__name__}, expected a QTensor; make one with quantize.")
