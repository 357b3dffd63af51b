"""Comparing trees of arrays, and looking into compiled JAX programs."""

from __future__ import annotations

import re
from typing import Any

import jax

from tests import asserts


def same(actual: Any, expected: Any) -> None:
    """The leaves of two trees have the same bits."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        asserts.bitwise(a, b)


def optimised(lowered: Any) -> str:
    """The text of a program as XLA will run it; takes what `jax.jit(f).lower(...)` returns."""
    text = lowered.compile().as_text()
    assert text, "this backend shows no program"
    return text


def copies(hlo: str, shape: str = r"\S+") -> int:
    """Copies of whole buffers in optimised HLO; `shape` as HLO writes it, by default any."""
    return len(re.findall(rf"= {shape}\S* copy\(", hlo))
