"""What tests of hosts written in JAX share."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import numpy as np

from grouped_core.linear_spec import Linear
from jax_grouped import _run
from jax_grouped.ops import NAMES
from tests import asserts
from tests.bounds import Bounded, Expected, expect_linear, expect_linear_grads


def native_calls(f: Any, *args: Any) -> list[Any]:
    """Every native call in the program of `f`, whatever it is nested in."""
    return [eqn.params["call"] for eqn in _equations(jax.make_jaxpr(f)(*args)) if eqn.primitive is _run.call_p]


def lax_calls(f: Any, *args: Any) -> int:
    """How many of lax's own grouped products are in the program of `f`."""
    names = [eqn.primitive.name for eqn in _equations(jax.make_jaxpr(f)(*args))]
    return sum(name.startswith("ragged_dot") for name in names)


def _equations(program: Any) -> list[Any]:
    found = []
    for eqn in program.eqns:
        found.append(eqn)
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            if hasattr(inner, "eqns"):
                found += _equations(inner)
    return found


def check_product(
    f: Any, x: Any, w: Any, sizes: Any, dy: Any, result_dtype: str | None = None, *, transposed: bool = False
) -> None:
    """`f(x, w)` is the grouped product, and its gradients those of one, within the derived bounds.

    Operands of two dtypes are expected to be converted to float32, and the gradients back.
    """
    y, pullback = jax.vjp(f, x, w)
    mixed = x.dtype != w.dtype
    wide_x, wide_w = (np.asarray(each).astype(np.float32) if mixed else np.asarray(each) for each in (x, w))
    result_dtype = result_dtype or (y.dtype.name if mixed else None)
    op = Linear(NAMES, transposed=transposed, result_dtype=result_dtype)
    dy = np.asarray(dy).astype(y.dtype)
    asserts.within(y, expect_linear(op, wide_x, wide_w, np.asarray(sizes)), "y")
    expected = expect_linear_grads(op, wide_x, wide_w, np.asarray(sizes), None, None, dy)
    for what, given, found, wanted in zip(
        ("dx", "dw"), (x, w), pullback(jax.numpy.asarray(dy)), (expected.x, expected.w), strict=True
    ):
        assert isinstance(wanted, Bounded)
        asserts.within(found, Expected().cast(wanted, np.dtype(given.dtype).name), what)


def module(name: str, source: str, **names: Any) -> ModuleType:
    """A module of that text, which is not imported."""
    made = ModuleType(name)
    made.__dict__.update(names)
    exec(source, made.__dict__)
    return made
