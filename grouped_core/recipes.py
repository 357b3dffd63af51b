"""Recipes: a 3 x 2 table of formats, one for each operand of each product, and a few options.

=========  ==========  ============  =========================
product    contracts   operands      result
=========  ==========  ============  =========================
forward    K           (x, w)        y  [M, N]
dgrad      N           (dy, w)       dx [M, K]
wgrad      rows of g   (x, dy)       dw, in the weight's layout
=========  ==========  ============  =========================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grouped_core.formats import FORMATS, PLAIN, Format, as_flag, wide
from grouped_core.hashing import hashed_once
from grouped_core.literals import Literal, fields_of, literal, with_fields

FP32_MODES = ("tf32", "tf32x3", "ieee")
"""How products of float32 operands use tensor cores; each mode is more accurate than the one before it."""
ACCUMULATE_MODES = ("promote", "fast")
SAVED = ("quantized", "input")
SAVED_WEIGHTS = ("auto", "quantized", "forward", "input")
AMAX_ALGORITHMS = ("max", "most_recent")
MOST_MARGIN = 100

__all__ = ["BF16", "FP16", "FP32", "MXFP8", "NVFP4", "FP8Block", "FP8Current", "FP8Delayed", "Recipe", "weight_only"]
"""What every package of this library offers under its own name."""


@hashed_once
@dataclass(frozen=True)
class Recipe(Literal):
    """How the three products of a linear layer are computed. Frozen and hashable; `replace` makes a variant.

    Attributes:
        forward, dgrad, wgrad: formats of the two operands of each product, in the order of the module's table. Each
            operand is made from the high-precision array, so forward and wgrad may round the same x differently.
        name: shown in messages; "" is replaced by the formats of forward.
        batch_invariant: a row of y or dx depends only on that row and on the weights and scales of its group, not on M
            or G; a weight gradient depends only on the rows of its group, not on G. Formats whose scales depend on all
            rows of a group are refused; delayed scaling that has not started multiplies by 1. It costs time where few
            weights meet many rows, because long sums are not split.
        fp32: how products of float32 operands use tensor cores: "tf32x3" (float32 accuracy), "tf32", or "ieee". CPUs
            run every mode as "ieee", and so do GPUs on which "tf32x3" would be slower (numerics 2.5).
        accumulate: where the hardware keeps partial sums of 8-bit products in fewer bits than fp32: "promote" adds them
            to an fp32 sum every 128 contracted elements; "fast" never does. "fast" needs per-tensor scales and holds
            for forward only; dgrad and wgrad are promoted in either case.
        saved: what forward saves of x for wgrad: the form that wgrad reads ("quantized"), or the caller's array
            ("input"), which backward quantises to the same bits. With "input" an MLP also quantises the gradient of its
            result twice, for dgrad and later for wgrad, so that both forms are never alive at once with h.
        requantize: for an operand that the caller passes quantised, where a gradient needs a form that it lacks: None
            refuses it, "from_dequantized" makes the form from the dequantised values.
        history: number of steps in the amax history of delayed scaling. margin: its scales are smaller by 2^margin.
        amax_algorithm: which amax delayed scaling uses: the "max" of the history, or its "most_recent" entry.
        saved_weights: what forward saves of the weight for dgrad: the form that dgrad reads ("quantized"), a byte per
            weight of an 8-bit format; the form that forward reads ("forward"), whose codes dgrad then contracts along
            their other axis, so that caches of layers and quantised Parameters hold one byte per weight instead of two;
            or the caller's array ("input"), which backward quantises to the same bits, so that nothing of the size of
            the weights is kept. "forward" needs 8-bit weights with one scale per group, whose two forms have the same
            codes; where rows of codes are no multiples of 16 bytes, and on GPUs before sm_89, dgrad widens them. "auto"
            is "forward" for such weights if a pass quantises them for itself and its groups have few rows on average,
            so that making the second form takes longer than what it saves (`linear_spec.FEW_ROWS`); otherwise it is
            "quantized". The bits are the same with all of them.

    Raises:
        TypeError: a value is not a pair of formats, an integer, or a bool. ValueError: an option has an invalid value,
            or formats do not fit together.
    """

    forward: tuple[Format, Format]
    dgrad: tuple[Format, Format]
    wgrad: tuple[Format, Format]
    name: str = ""
    batch_invariant: bool = False
    fp32: str = "tf32x3"
    accumulate: str = "promote"
    saved: str = "quantized"
    requantize: str | None = None
    history: int = 1024
    margin: int = 0
    amax_algorithm: str = "max"
    saved_weights: str = "auto"

    def __post_init__(self) -> None:
        for name in ("forward", "dgrad", "wgrad"):
            formats: Any = getattr(self, name)
            if (
                not isinstance(formats, tuple)
                or len(formats) != 2
                or not all(isinstance(fmt, Format) for fmt in formats)
            ):
                raise TypeError(
                    f"`{name}` of Recipe: {formats!r}, expected a tuple of two Formats; take them from FORMATS."
                )
        for name in ("history", "margin"):
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"`{name}` of Recipe: {value!r}, expected an integer; pass one.")
        as_flag("batch_invariant", self.batch_invariant, "Recipe")
        options: tuple[tuple[str, tuple[Any, ...]], ...] = (
            ("fp32", FP32_MODES),
            ("accumulate", ACCUMULATE_MODES),
            ("saved", SAVED),
            ("saved_weights", SAVED_WEIGHTS),
            ("requantize", (None, "from_dequantized")),
            ("amax_algorithm", AMAX_ALGORITHMS),
        )
        for name, allowed in options:
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"`{name}` of Recipe: {getattr(self, name)!r}, expected one of {allowed}; choose one of them."
                )
        if not self.name:
            object.__setattr__(self, "name", _name_of(self.forward))
        if self.history < 1:
            raise ValueError(f"`history` of Recipe: {self.history}, expected at least 1 step; pass a larger number.")
        if abs(self.margin) > MOST_MARGIN:
            raise ValueError(
                f"`margin` of Recipe: {self.margin}, expected at most {MOST_MARGIN} in magnitude, so that scales are "
                "finite; pass a smaller one."
            )
        for name in ("forward", "dgrad", "wgrad"):
            object.__setattr__(self, name, tuple(self._started(fmt) for fmt in getattr(self, name)))
        _check_formats(self)
        # Every call asks for these. They are no cached properties, whose lock Dynamo cannot trace in Python 3.11.
        formats = self.formats()
        object.__setattr__(self, "_quantized", any(not fmt.plain for fmt in formats))
        object.__setattr__(self, "_delayed", any(fmt.delayed for fmt in formats))
        object.__setattr__(self, "_stochastic", any(fmt.stochastic for fmt in formats))
        object.__setattr__(self, "_text", literal("Recipe", [getattr(self, name) for name in _FIELDS]))

    def _started(self, fmt: Format) -> Format:
        """The format with `starts_at_one` where rows must not share a scale that is found in them."""
        return fmt.replace(starts_at_one=self.batch_invariant) if fmt.delayed else fmt

    @property
    def quantized(self) -> bool:
        """Whether an operand is quantised."""
        return self.__dict__["_quantized"]

    @property
    def delayed(self) -> bool:
        """Whether an operand has delayed scaling."""
        return self.__dict__["_delayed"]

    @property
    def stochastic(self) -> bool:
        """Whether an operand is rounded stochastically."""
        return self.__dict__["_stochastic"]

    @property
    def takes_arrays(self) -> bool:
        """Whether a pass takes arrays that `bind` gives to it: a state of delayed scaling, or a random key."""
        return self.delayed or self.stochastic

    @property
    def one_form(self) -> bool:
        """Whether the forms of the weight for forward and for dgrad have the same codes."""
        return self.forward[1].shares_codes(self.dgrad[1])

    @property
    def of_gradients(self) -> Recipe:
        """This recipe for dgrad and wgrad: fast accumulation is for forward only."""
        return self if self.accumulate == "promote" else self.replace(accumulate="promote")

    def formats(self) -> tuple[Format, ...]:
        """All six formats."""
        return (*self.forward, *self.dgrad, *self.wgrad)

    def replace(self, **changes: Any) -> Recipe:
        """This recipe with the fields of `changes` changed. TypeError: it has no such field."""
        if self.name == _name_of(self.forward):
            changes = {"name": "", **changes}
        return with_fields(self, changes)

    def at_least(self, fp32: str) -> Recipe:
        """This recipe with `fp32` as the mode of float32 operands, unless its own mode is more accurate."""
        return self.replace(fp32=max(self.fp32, fp32, key=FP32_MODES.index))

    def bind(self, state: Any = None, key: Any = None) -> BoundRecipe:
        """This recipe with the arrays of one use of it.

        Args:
            state: the state of delayed scaling, from `scaling_state`; None for recipes without delayed scaling.
            key: the key of stochastic rounding, uint32 [2], low word first; None: zeros, so every step draws the same
                numbers.

        Raises:
            ValueError: a state is given, and the recipe has no delayed scaling.
        """
        return BoundRecipe(self, state, key)


@dataclass(frozen=True, eq=False)
class BoundRecipe:
    """A recipe and the arrays of one use of it; see `Recipe.bind`. Without a recipe it holds no arrays."""

    recipe: Recipe | None
    state: Any = None
    key: Any = None

    def __post_init__(self) -> None:
        if self.state is not None and not (self.recipe and self.recipe.delayed):
            name = self.recipe.name if self.recipe else None
            raise ValueError(
                f"`state` of recipe {name}: given, expected None, because it has no delayed scaling; bind no state."
            )


_FIELDS = fields_of(Recipe)


def _name_of(forward: tuple[Format, Format]) -> str:
    """The name of a recipe that the caller gave none."""
    return " x ".join(fmt.name for fmt in forward)


def _check_formats(recipe: Recipe) -> None:
    """Refuses formats that do not fit together in one product."""

    def refuse(product: str, came: str, wanted: str) -> None:
        raise ValueError(f"`{product}` of recipe {recipe.name}: {came}, expected {wanted}; change one of the formats.")

    for product in ("forward", "dgrad"):
        rows, weight = getattr(recipe, product)
        if rows.square:
            refuse(product, f"{rows.name} for rows", "blocks of one row: square blocks are for weights")
        if weight.stochastic or weight.rotate:
            refuse(product, f"{weight.name} with rounding or rotation for a weight", "neither")
        if rows.rotate:
            refuse(product, f"{rows.name} with a rotation along features", "a rotation along rows, in wgrad")
        if product == "forward" and rows.stochastic:
            refuse(product, f"{rows.name} with random rounding of x", "random rounding of dy only")
        if rows.powers_of_fp4:
            refuse(product, f"{rows.name} for rows", "a format for rows: E2M1 with E8M0 scales is for weights")
        if rows.values == "float16" and weight.powers_of_fp4:
            refuse(product, f"{rows.name} against {weight.name}", "rows whose range holds its scales, e.g. bf16")
    x, dy = recipe.wgrad
    for fmt in (x, dy):
        if fmt.for_weights:
            refuse("wgrad", f"{fmt.name}", "a format for rows")
    if (x.segment, x.transposed, x.block) != (dy.segment, dy.transposed, dy.block):
        refuse("wgrad", f"{x.name} and {dy.name}", "two formats with the same segment, block and layout along rows")
    if x.stochastic:
        refuse("wgrad", f"{x.name} with random rounding of x", "random rounding of dy only")
    if x.rotate != dy.rotate:
        refuse("wgrad", "one operand rotated", "both or none, otherwise the rotations do not cancel")
    if recipe.accumulate == "fast" and any(fmt.block or fmt.plain for fmt in recipe.forward):
        refuse("forward", "accumulate='fast'", "one scale per tensor and group with it")
    if recipe.saved_weights == "forward" and not recipe.one_form:
        raise ValueError(
            f"`saved_weights` of recipe {recipe.name}: 'forward' with {recipe.forward[1].name} and "
            f"{recipe.dgrad[1].name}, expected weights of one 8-bit format with one scale per group, whose two forms "
            "have the same codes; use 'auto', 'quantized' or 'input'."
        )
    if recipe.batch_invariant:
        for fmt in (*recipe.forward, *recipe.dgrad):
            if fmt.rule == "nvfp4" or (fmt.one_scale and not fmt.delayed):
                raise ValueError(
                    f"`batch_invariant` of recipe {recipe.name}: True with {fmt.name}, whose scales depend on all "
                    "rows of a group, expected False; use delayed or block scales."
                )


def plain(x: str, w: str | None = None) -> Recipe:
    """The recipe of unquantised operands: `x` and `w` are element types; dy has the element type of x."""
    fx, fw, fy = PLAIN[x], PLAIN[w or x], PLAIN[wide(x)]
    name = fx.name.upper() if fx == fw else f"{fx.name} x {fw.name}"
    return Recipe((fx, fw), (fy, fw), (fx, fy), name)


def weight_only(format: str, dtype: str = "bfloat16") -> Recipe:
    """The recipe of rows of `dtype`, an element type, against weights in `format`, a name of `FORMATS`: for frozen
    weights.

    Gradients of x read quantised weights as well: the same ones if the caller quantised them; weights that an operation
    quantises are quantised for it along the axis that it contracts. Gradients of the weights read unquantised operands.

    Raises:
        TypeError: an argument is not text. ValueError: there is no such format or element type, or they do not fit
            together.
    """
    for name, value, known in (("format", format, FORMATS), ("dtype", dtype, PLAIN)):
        if not isinstance(value, str):
            raise TypeError(
                f"`{name}` of weight_only: {value!r}, expected one of {', '.join(known)}, as text; choose one."
            )
        if value not in known:
            raise ValueError(f"`{name}` of weight_only: {value!r}, expected one of {', '.join(known)}; choose one.")
    rows, weight = PLAIN[dtype], FORMATS[format]
    return Recipe((rows, weight), (rows, weight), (rows, rows), f"{format} weights")


def _scaled(name: str, x: Format, w: Format, dy: Format, wgrad: tuple[Format, Format] | None = None) -> Recipe:
    return Recipe((x, w), (dy, w), wgrad or (x, dy), name)


_CURRENT, _CURRENT_DY = FORMATS["fp8_tensor"], FORMATS["fp8_tensor_e5m2"]
_DELAYED, _DELAYED_DY = _CURRENT.replace(delayed=True), _CURRENT_DY.replace(delayed=True)
_MXFP8, _NVFP4 = FORMATS["mxfp8"], FORMATS["nvfp4"]
_ROTATED = _NVFP4.replace(rotate=True)

BF16 = plain("bfloat16")
FP16 = plain("float16")
FP32 = plain("float32")
FP8Delayed = _scaled("FP8Delayed", _DELAYED, _DELAYED, _DELAYED_DY)
FP8Current = _scaled("FP8Current", _CURRENT, _CURRENT, _CURRENT_DY)
FP8Block = _scaled("FP8Block", FORMATS["fp8_1x128"], FORMATS["fp8_128x128"], FORMATS["fp8_1x128"])
MXFP8 = _scaled("MXFP8", _MXFP8, _MXFP8, _MXFP8)
NVFP4 = _scaled(
    "NVFP4",
    _NVFP4,
    FORMATS["nvfp4_2d"],
    _NVFP4.replace(stochastic=True),
    (_ROTATED, _ROTATED.replace(stochastic=True)),
)

RECIPES = {name: row for name, row in globals().items() if isinstance(row, Recipe)}
"""Every recipe by its public name."""
