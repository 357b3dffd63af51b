"""Numbers of rows that torch.compile keeps as symbols, and the number that represents them in specs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grouped_core.calls import MAX_ROWS

SYMBOLIC_ROWS = 2**26 - 5
"""The number that represents M in specs if torch.compile has a symbol for it. It is a prime, and K, N and G are far
smaller, so a length that is a multiple of it is a multiple of M. It is the largest prime for which 32 M, the rows of 32
slots per token, do not exceed the limit of rows."""

MOST_SYMBOLS = MAX_ROWS // SYMBOLIC_ROWS
"""The largest multiple of a symbol that specs can represent as a number of rows."""


def is_symbol(length: Any) -> bool:
    """Whether a length is a single symbol of torch.compile."""
    return isinstance(length, torch.SymInt) and length.node.expr.is_Symbol


def multiple(length: Any) -> int:
    """Returns n if a length is n times a single symbol of torch.compile, n at most `MOST_SYMBOLS`; otherwise 0."""
    if not isinstance(length, torch.SymInt) or len(length.node.expr.free_symbols) != 1:
        return 0
    expression = length.node.expr
    (symbol,) = expression.free_symbols
    times = expression.subs(symbol, SYMBOLIC_ROWS) // SYMBOLIC_ROWS
    return int(times) if expression == times * symbol and times <= MOST_SYMBOLS else 0


def settle_rows(*operands: Any, most: int = 1) -> None:
    """Makes M a number unless it is a symbol in all of these operands; in quantised rows it is a number.

    Args:
        most: the largest multiple of a symbol that may remain, so that rows made from these fit into specs too.
    """
    rows = [each.shape[0] if isinstance(each, Tensor) and each.shape else 0 for each in operands if each is not None]
    if not all(1 <= multiple(each) <= most for each in rows):
        for each in rows:
            int(each)
