"""The functions of `jax.lax` that `ragged_dot` replaces, with their dtypes and arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike, RaggedDotDimensionNumbers
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from grouped_core.formats import QTensor
from grouped_core.recipes import Recipe
from jax_grouped._arguments import AnyArray
from jax_grouped._replacing import Choice, taken, unknown
from jax_grouped.ops import ragged_dot

NARROW = ("float8_e4m3fn", "float8_e5m2")
"""Dtypes of unscaled 8-bit operands, which widen exactly to any other."""
FLOATS = ("float32", "bfloat16", "float16", *NARROW)


def ragged_dot_as_lax(
    lhs: Float[AnyArray, "M K"],
    rhs: Float[AnyArray, "G K N"] | Float[AnyArray, "G N K"],
    group_sizes: Int[AnyArray, " G"],
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    rhs_transposed: bool = False,
    recipe: Recipe | None = None,
) -> Float[Array, "M N"]:
    """`ragged_dot` with operands of different dtypes, as `jax.lax.ragged_dot` takes them.

    The narrower operand is converted to the dtype of the other (a bfloat16 beside a float16 both to float32), so its
    gradient has its own dtype. The result has the dtype that lax gives it, except that of two 8-bit operands, which is
    bfloat16. Without `precision`, `jax.default_matmul_precision` applies.

    Raises:
        TypeError, ValueError, NotImplementedError: as `ragged_dot`.
    """
    lhs, rhs = (jnp.asarray(each) if isinstance(each, np.ndarray) else each for each in (lhs, rhs))  # dtypes of JAX
    dtypes = [getattr(operand, "dtype", None) for operand in (lhs, rhs)]
    if isinstance(lhs, QTensor) or isinstance(rhs, QTensor) or any(_name(d) not in FLOATS for d in dtypes):
        common = wide = None  # ragged_dot says what is wrong, or takes codes as they are
    else:
        common, wide = _common(*dtypes), _result(*dtypes)
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # pyrefly: ignore[missing-attribute]
    if common is not None:
        lhs, rhs = (jax.lax.convert_element_type(operand, common) for operand in (lhs, rhs))
    return ragged_dot(
        lhs,
        rhs,
        group_sizes,
        precision,
        wide if preferred_element_type is None else preferred_element_type,
        rhs_transposed=rhs_transposed,
        recipe=recipe,
    )


def _name(dtype: Any) -> str:
    return "" if dtype is None else np.dtype(dtype).name


def _common(x: Any, w: Any) -> Any:
    """The dtype in which both are exact; None where nothing has to be converted."""
    narrow = [_name(dtype) in NARROW for dtype in (x, w)]
    if x == w or all(narrow):
        return None
    return w if narrow[0] else x if narrow[1] else np.dtype(np.float32)


def _result(x: Any, w: Any) -> Any:
    """lax's dtype of the result: that of the operand with more range, then more digits; None where ours differs."""
    if x == w or all(_name(dtype) in NARROW for dtype in (x, w)):
        return None
    return max(x, w, key=lambda dtype: (jnp.finfo(dtype).maxexp, jnp.finfo(dtype).nmant))


# ---------------------------------------------------------------------------------------------------------------------
# The replacing functions.

Chosen = Callable[[], Choice | None]
"""() -> the replacement that is in effect at the time of the call, or None."""
LAX = ("lhs", "rhs", "group_sizes", "precision", "preferred_element_type", "group_offset", "out_sharding")


def replacing_ragged_dot(original: Callable[..., Any], chosen: Chosen) -> Callable[..., Any]:
    """The function that replaces `jax.lax.ragged_dot`."""

    def replacement(*args: Any, **kwargs: Any) -> Any:
        choice = chosen()
        if choice is None:
            return original(*args, **kwargs)
        given = taken("jax.lax.ragged_dot", original, args, kwargs, honoured=LAX)
        return _run(choice, given, rhs_transposed=False)

    return replacement


def replacing_ragged_dot_general(original: Callable[..., Any], chosen: Chosen) -> Callable[..., Any]:
    """The function that replaces `jax.lax.ragged_dot_general`."""

    def replacement(*args: Any, **kwargs: Any) -> Any:
        choice = chosen()
        if choice is None:
            return original(*args, **kwargs)
        names = "jax.lax.ragged_dot_general"
        given = taken(names, original, args, kwargs, honoured=(*LAX, "ragged_dot_dimension_numbers"))
        return _run(choice, given, rhs_transposed=_transposed(given.pop("ragged_dot_dimension_numbers"), given))

    return replacement


def _run(choice: Choice, given: dict[str, Any], rhs_transposed: bool) -> Any:
    offset, sharding = given.pop("group_offset", None), given.pop("out_sharding", None)
    if offset is not None or sharding is not None:
        operands = (given.pop(name) for name in ("lhs", "rhs", "group_sizes"))
        return ragged_dot(*operands, group_offset=offset, out_sharding=sharding)  # says why it refuses them
    return ragged_dot_as_lax(**given, rhs_transposed=rhs_transposed, recipe=choice.recipe)


def dimension_numbers(rhs_transposed: bool) -> RaggedDotDimensionNumbers:
    """Returns the dimension numbers of [M, K] times [G, K, N] or, transposed, [G, N, K]."""
    return RaggedDotDimensionNumbers((((1,), (2 if rhs_transposed else 1,)), ((), ())), (0,), (0,))


def _transposed(numbers: RaggedDotDimensionNumbers, given: dict[str, Any]) -> bool:
    """Whether these dimension numbers are those of weights [G, N, K].

    Raises:
        NotImplementedError: they are not those of a product with weights of groups.
    """
    ranks = [np.ndim(given[name]) for name in ("lhs", "rhs", "group_sizes")]
    for transposed in (False, True):
        if numbers == dimension_numbers(transposed) and ranks == [2, 3, 1]:
            return transposed
    raise unknown(
        "`ragged_dot_dimension_numbers` of jax.lax.ragged_dot_general",
        f"{numbers} for operands of ranks {ranks}",
        "those of [M, K] times [G, K, N] or [G, N, K] with group sizes [G]",
        "bring the operands into one of these layouts",
    )
