"""Every tensor argument of every public function, by how many axes it has and what is said of another number (ERR-1).

A frontend's test gives each function of its own a row of `Function`, made of good shapes; what must be refused follows.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

G, M, K, N, F, T, H, E, SLOTS = 2, 6, 8, 4, 4, 5, 8, 3, 2
"""Lengths of a good call. A gated MLP has W = 2F = K, which other lengths tell apart."""


@dataclass(frozen=True)
class Argument:
    """One tensor argument.

    Attributes:
        shape: of a good one. wanted, remedy: what the message says of another number of axes.
        thing: what the message names, the argument itself if empty; with backticks as it is.
        dtype: of the tensor, "" float32.
        also: numbers of axes that are good, too.
    """

    shape: tuple[int, ...]
    wanted: str
    remedy: str
    thing: str = ""
    dtype: str = ""
    also: tuple[int, ...] = ()

    def wrong(self) -> Iterator[tuple[int, ...]]:
        """Shapes with no axes, one less and one more."""
        for shape in dict.fromkeys(((), self.shape[1:], self.shape[:-1], (1, *self.shape))):
            if len(shape) != len(self.shape) and len(shape) not in self.also:
                yield shape

    def fragments(self, name: str, shape: tuple[int, ...]) -> list[str]:
        """The four parts."""
        thing = self.thing if "`" in self.thing else f"`{self.thing or name}`"
        return [
            thing,
            f"shape {shape}",
            f"expected {self.wanted}",
            self.remedy,
        ]


@dataclass(frozen=True)
class Function:
    """A public function, or one form of its arguments.

    Attributes:
        call: takes the arguments by the names of the table. arguments: those that are tensors.
    """

    call: Callable[..., Any]
    arguments: Mapping[str, Argument] = field(default_factory=dict)


ROWS = "fold leading axes into rows with a reshape"
STACK = "stack one matrix per group on the first axis"
MEMBER = "pass one tensor per group"
VECTORS = "pass one bias vector per group"
RESHAPE = "fold or add axes with a reshape"
BUFFER = "allocate a buffer of that shape"
STATE = "pass what scaling_state made"

SIZES = Argument((G,), "one axis [G]", "pass one size per group", dtype="int32")
X = Argument((M, K), "two axes [M, K]", ROWS)
PROBS = Argument((M,), "one axis [M]", "pass one probability per row", dtype="float32")
ROW_SCALE = Argument((M,), "one axis [M]", "pass one factor per row", dtype="float32")
BIAS = Argument((G, N), "two axes [G, N]", VECTORS)
WI_BIAS = Argument((G, 2 * F), "two axes [G, W]", VECTORS)
WO_BIAS = Argument((G, K), "two axes [G, K]", VECTORS)
OUT = Argument((M, N), f"({M}, {N}) = all rows, tail included", BUFFER)
LIKE_X = Argument((M, K), f"({M}, {K}) = all rows, tail included", BUFFER)
DY = Argument((M, K), f"({M}, {K}) = shape of y", "pass the gradient of y")
QUANTIZED = Argument((M, K), "rows [M, X] or weights [G, A, B]", RESHAPE, also=(3,))
QUANTIZED_WEIGHTS = Argument((G, K, N), "rows [M, X] or weights [G, A, B]", RESHAPE, also=(2,))
KEY = Argument((2,), "one axis [2]", "two words of uint32, low word first", dtype="uint32")
H_ROWS = Argument((M, 2 * F), "two axes [M, W]", ROWS)


def weight(letters: str, *shape: int) -> Argument:
    """A packed weight."""
    return Argument(shape, f"three axes {letters}", STACK)


def member(thing: str, letters: str, *shape: int) -> Argument:
    """The first of a list of weights or biases."""
    number = {1: "one axis", 2: "two axes"}[len(shape)]
    return Argument(shape, f"{number} {letters} in a list", MEMBER, thing)


def accumulator(*shape: int, thing: str = "wgrad_accum") -> Argument:
    """An accumulator."""
    return Argument(shape, f"{shape} = shape of the weight", "allocate one that matches its weight", thing, "float32")


STATES = {
    "scale": Argument((3, G), "two axes [R, G]", STATE, "`scale` of state", "float32"),
    "history": Argument((3, 4, G), "three axes [R, L, G]", STATE, "`history` of state", "float32"),
    "top": Argument((3,), "one axis [R]", STATE, "`top` of state", "float32"),
}
"""The arrays of a state of delayed scaling."""


def public_functions(*modules: ModuleType) -> dict[str, Any]:
    """Public functions and layers of a frontend, by name: those that a module defines, or exports as themselves.

    Other classes are values.
    """
    found = {}
    for module in modules:
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.ImportFrom):
                names = [each.name for each in node.names if each.asname == each.name]
            else:
                names = [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []
            for name in names:
                each = getattr(module, name)
                is_layer = isinstance(each, type) and (hasattr(each, "forward") or "__call__" in vars(each))
                if not name.startswith("_") and (is_layer or inspect.isfunction(each)):
                    found[name] = each
    return found
