"""Problems, written once: tests, benchmarks and tuning read the same rows.

Letters: G groups, M rows of the buffer, S rows that belong to groups, K in, N out.
"""

from __future__ import annotations

import inspect
import itertools
import random
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from grouped_core.reference import numpy_dtype as numpy_dtype

DTYPES = ("float32", "bfloat16", "float16")
"""Element types of the plain products that have gradients."""
FP8 = ("float8_e4m3fn", "float8_e5m2")
TAIL = float("nan")
"""What rows past the last group hold: whoever reads them poisons its result (GRP-5)."""
SENTINEL = 7.0
"""What a caller's buffer holds beforehand; exact in every dtype."""


@dataclass(frozen=True)
class Case:
    """One problem.

    Attributes:
        name: unique; a test id and a benchmark label.
        sizes: rows of each group, as the caller hands them in; they may be negative or sum to more than `rows`.
        rows: M. k: contracted features. n: features of the result.
        tags: `small` a few thousand products at most; `edge` an odd distribution of rows; `tail` S < M; `clamp` sizes
            that do not fit; `groups` an odd number of groups; `width` odd K or N; `tiles` more tiles than a device
            has room for; `bench`, `few_rows`, `router`, `cpu_bench`, `decode` shapes of the
            benchmarks.
    """

    name: str
    sizes: tuple[int, ...]
    rows: int
    k: int
    n: int
    tags: frozenset[str]

    @property
    def groups(self) -> int:
        """G."""
        return len(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """Last row of each group, exclusive, in Python integers (GRP-4)."""
        return tuple(min(self.rows, end) for end in itertools.accumulate(max(size, 0) for size in self.sizes))

    @property
    def valid(self) -> int:
        """S: rows that belong to some group."""
        return self.ends[-1]

    def spans(self) -> Iterator[slice]:
        """The rows of each group."""
        start = 0
        for end in self.ends:
            yield slice(start, end)
            start = end

    def __str__(self) -> str:
        return self.name


def generator(*parts: object) -> np.random.Generator:
    """A generator that depends on the text of `parts` alone, not on the order in which tests run."""
    return np.random.default_rng(zlib.crc32(repr(parts).encode()))


def jagged(groups: int, rows: int) -> tuple[int, ...]:
    """Sizes drawn from a multinomial: they sum to `rows` and nothing is aligned."""
    return tuple(int(m) for m in generator("jagged", groups, rows).multinomial(rows, [1 / groups] * groups))


def zipf(groups: int, rows: int) -> tuple[int, ...]:
    """Sizes that fall off as 1/rank, ranks shuffled."""
    rng = generator("zipf", groups, rows)
    weights = rng.permutation(1.0 / np.arange(1, groups + 1))
    return tuple(int(m) for m in rng.multinomial(rows, weights / weights.sum()))


def third_empty(groups: int, rows: int) -> tuple[int, ...]:
    """Sizes of which every third is zero."""
    taken = np.arange(groups) % 3 != 2
    return tuple(int(m) for m in generator("third_empty", groups, rows).multinomial(rows, taken / taken.sum()))


def _row(name: str, sizes: Sequence[int], k: int, n: int, tags: str, rows: int | None = None) -> Case:
    sizes = tuple(sizes)
    return Case(name, sizes, sum(sizes) if rows is None else rows, k, n, frozenset(tags.split()))


CASES: tuple[Case, ...] = (
    # Distributions of rows.
    _row("uniform", [16] * 4, 32, 48, "small"),
    _row("jagged", jagged(5, 61), 24, 40, "small"),
    _row("idle_middle", [128, 0, 96], 16, 24, "edge"),
    _row("around_64_and_128", [65, 128, 97], 16, 24, "edge"),
    _row("one_row_each", [1, 1, 1], 16, 8, "small edge"),
    _row("rows_1_15_127", [1, 15, 127], 16, 24, "edge"),
    _row("even_tiles", [130, 0, 97, 250], 24, 72, "edge"),  # tiles of even height on Hopper (tiles_sm90.h)
    _row("rows_1027", [1027, 3], 8, 16, "edge"),
    _row("one_takes_all", [0, 0, 70, 0], 24, 16, "small edge"),
    _row("all_empty", [0, 0, 0], 16, 24, "small edge tail", rows=9),
    _row("no_rows", [0, 0], 16, 8, "small edge", rows=0),
    _row("idle_ends", [0, 9, 0, 14, 0], 16, 24, "small edge"),
    # Sizes and the capacity of the buffer.
    _row("tail", [20, 0, 13], 24, 40, "small tail", rows=50),
    _row("tail_long", [3, 2], 16, 24, "small tail", rows=150),
    _row("clamped", [30, 30, 30], 24, 16, "small clamp", rows=70),
    _row("clamped_idle", [80, 5, 0, 7], 16, 24, "small clamp", rows=64),
    _row("negative", [12, -5, 20], 24, 16, "small clamp", rows=40),
    _row("overflow_32", [2**31 - 1, 2**31 - 1, 4], 16, 24, "small clamp", rows=33),
    _row("most_negative", [-(2**31), 10, 3], 16, 8, "small clamp", rows=20),
    # Numbers of groups.
    _row("groups_1", [37], 24, 40, "small groups"),
    _row("groups_1_tail", [37], 24, 40, "small groups tail", rows=64),
    _row("groups_1_long", [3001], 264, 136, "groups"),
    _row("groups_2", [5, 31], 24, 40, "small groups"),
    _row("groups_8", jagged(8, 90), 16, 24, "small groups"),
    _row("groups_64", jagged(64, 130), 8, 16, "groups"),
    _row("groups_65", jagged(65, 130), 8, 16, "groups"),
    _row("groups_256", jagged(256, 300), 8, 8, "groups"),
    _row("groups_1024", jagged(1024, 700), 8, 8, "groups"),
    _row("groups_1025", jagged(1025, 700), 8, 8, "groups tail", rows=710),
    _row("groups_4096", jagged(4096, 900), 4, 4, "groups"),
    # Widths.
    _row("k_1", [9, 14], 1, 24, "small width"),
    _row("n_1", [9, 14], 24, 1, "small width"),
    _row("k_8", [9, 14], 8, 100, "small width"),
    _row("k_100", [9, 14], 100, 8, "small width"),
    _row("k_n_odd", [9, 14], 37, 53, "small width"),
    _row("k_2880", [33, 7], 2880, 40, "width"),
    _row("n_2880", [7, 33], 40, 2880, "width"),
    # More tiles than a device has room for, so that a block takes one after the other, tail rows behind them.
    _row("many_tiles", jagged(7, 9000), 16, 1024, "tiles", rows=9100),
    # Benchmarks: models' layers (rows are routed rows), gate and up together.
    _row("A", jagged(8, 16384), 4096, 28672, "bench"),
    _row("B", jagged(32, 32768), 7168, 4096, "bench"),
    _row("C", jagged(128, 65536), 2048, 1536, "bench"),
    _row("Cz", zipf(128, 65536), 2048, 1536, "bench"),
    _row("Ce", third_empty(128, 65536), 2048, 1536, "bench"),
    _row("D", jagged(64, 65536), 2048, 2048, "bench"),
    _row("E", jagged(32, 32768), 2880, 5760, "bench"),
    # The same with few rows per group.
    _row("D8k", jagged(64, 8192), 2048, 2048, "few_rows"),
    _row("G256", jagged(256, 65536), 2048, 1536, "few_rows"),
    _row("router", [16384], 2048, 128, "router"),
    _row("cpu", zipf(8, 4096), 1024, 2048, "cpu_bench"),
    _row("cpu_many", jagged(64, 8192), 512, 1024, "cpu_bench"),
    *(
        _row(f"decode_{model}_{tokens}", jagged(groups, tokens * active), k, n, "decode")
        for model, groups, active, k, n in (
            ("mixtral", 8, 2, 4096, 28672),
            ("qwen3", 128, 8, 2048, 1536),
            ("gpt_oss", 32, 4, 2880, 5760),
            ("olmoe", 64, 8, 2048, 2048),
        )
        for tokens in (64, 128, 256, 512)
    ),
)
"""All problems."""

_HEAVY = frozenset({"bench", "few_rows", "router", "cpu_bench", "decode", "tiles"})


def select(*tags: str) -> list[Case]:
    """Cases that have all of `tags`; without tags, all that a test can afford."""
    wanted = frozenset(tags)
    return [case for case in CASES if wanted <= case.tags and (wanted & _HEAVY or not case.tags & _HEAVY)]


ADDED = Case("added", (1700, 300, 0, 900, 1536, 768, 3), 5300, 144, 328, frozenset())
"""Rows per group around the numbers from which L2 adds float32 sums on Hopper; columns end inside of a slice."""


STAGED = Case("staged", (700, 0, 5, 1000, 412, 193), 2600, 200, 264, frozenset())
"""Rows for which Hopper's weight gradients have more stages where they are only stored (`choices` of
schedule_check.cc); the last tile of columns is not whole."""


HEIGHTS = (1, 16, 17, 0, 33, 47, 64, 65, 80, 96, 97, 112, 128, 129, 144, 160, 176, 192, 193, 0, 385, 577, 90)
"""Rows per group that have every height of Hopper's tiles of even height, in one tile and in several, odd and even
numbers of them, with the ends of tiles and of their steps."""
EVEN_ROWS, OTHER_ROWS = len(HEIGHTS) * 160, len(HEIGHTS) * 220
"""Rows of buffers for them, with such tiles and with tiles of 128 rows: `choices` of schedule_check.cc holds that."""


def named(name: str) -> Case:
    """The case called `name`."""
    found = {case.name: case for case in CASES}
    if name not in found:
        raise ValueError(f"no problem is called {name!r}; there are {', '.join(found)}")
    return found[name]


# ---------------------------------------------------------------------------------------------------------------------
# Data.


class Problem(NamedTuple):
    """Arrays of one case; rows past the groups hold `TAIL` in x, dy and row_scale."""

    case: Case
    transposed: bool
    x: NDArray[Any]  # [M, K]
    w: NDArray[Any]  # [G, K, N], or [G, N, K] when transposed
    group_sizes: NDArray[Any]  # int32 [G]
    bias: NDArray[Any]  # [G, N]
    row_scale: NDArray[Any]  # float32 [M]
    dy: NDArray[Any]  # [M, N]


def normal(shape: Sequence[int], dtype: str, *seed: object) -> NDArray[Any]:
    """Standard normal values, rounded to `dtype`, the same for the same arguments in every run."""
    return generator("normal", tuple(shape), *seed).standard_normal(tuple(shape)).astype(numpy_dtype(dtype))


def problem(case: Case, dtype: str, *, transposed: bool = False, tail: float = TAIL, seed: int = 0) -> Problem:
    """Random arrays for `case`. Both layouts hold the same numbers, and dtypes the same numbers up to rounding.

    Args:
        dtype: of x, w, bias and dy; with fp8 values bias and dy are bfloat16.
        tail: what rows past the last group hold.
    """
    wide = "bfloat16" if dtype.startswith("float8") else dtype
    x = normal((case.rows, case.k), dtype, "x", seed)
    w = normal((case.groups, case.k, case.n), dtype, "w", seed)
    bias = normal((case.groups, case.n), wide, "bias", seed)
    row_scale = normal((case.rows,), "float32", "row_scale", seed)
    dy = normal((case.rows, case.n), wide, "dy", seed)
    for rows in (x, row_scale, dy):
        rows[case.valid :] = tail
    if transposed:
        w = np.ascontiguousarray(w.swapaxes(1, 2))
    sizes = np.array(case.sizes, np.int32)
    return Problem(case, transposed, x, w, sizes, bias, row_scale, dy)


def unaligned(array: NDArray[Any]) -> NDArray[Any]:
    """A contiguous copy whose base address is not a multiple of 16 bytes, but one of its element's."""
    offset = array.itemsize
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 16 + offset
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


# ---------------------------------------------------------------------------------------------------------------------
# Option matrices.


def _places(options: Mapping[str, Sequence[Any]], valid: Callable[..., bool] | None) -> NDArray[np.intp]:
    """Places of the values in every combination that `valid` accepts, in the product's order: [rows, options].

    `valid` is asked for each combination of the options that it names, which are few, not for each row.
    """
    lengths = [len(values) for values in options.values()]
    named = frozenset(options if valid is None else inspect.signature(valid).parameters) & frozenset(options)
    asked = {name: values for name, values in options.items() if name in named}
    accepted: NDArray[np.bool_] = np.ones(lengths, bool)
    if valid is not None:
        found = [valid(**dict(zip(asked, row, strict=True))) for row in itertools.product(*asked.values())]
        lengths_asked = [len(values) if name in asked else 1 for name, values in options.items()]
        accepted = np.broadcast_to(np.array(found, bool).reshape(lengths_asked), lengths)
    return np.argwhere(accepted)


def _row_at(options: Mapping[str, Sequence[Any]], places: Iterable[int]) -> tuple[Any, ...]:
    return tuple(values[at] for values, at in zip(options.values(), places, strict=True))


def _parts(places: NDArray[np.int32], values: Sequence[Any]) -> list[NDArray[np.int32]]:
    """What counts as an option for pairs, one value per row: the option itself, or the bools of its tuples."""

    def of_bools(value: object) -> bool:
        return isinstance(value, tuple) and len(value) > 0 and all(isinstance(part, bool) for part in value)

    if not all(map(of_bools, values)):
        return [places]
    return list(np.array(values, np.int32)[places].T)


def product(options: Mapping[str, Sequence[Any]], valid: Callable[..., bool] | None = None) -> list[tuple[Any, ...]]:
    """Every combination of the options' values that `valid` accepts, in the options' order.

    Args:
        valid: takes the options that it depends on by name; further ones that it may take as `**_` are not passed.
    """
    return [_row_at(options, places) for places in _places(options, valid)]


def drawn(
    seed: str, options: Mapping[str, Sequence[Any]], valid: Callable[..., bool] | None = None
) -> list[tuple[Any, ...]]:
    """Combinations at random, half as many again as `pairwise` gives, or all."""
    rows, count = product(options, valid), 3 * len(pairwise(options, valid)) // 2
    return rows if len(rows) <= count else random.Random(seed).sample(rows, count)


def pairwise(
    options: Mapping[str, Sequence[Any]],
    valid: Callable[..., bool] | None = None,
    apart: Collection[tuple[str, str]] = (),
) -> list[tuple[Any, ...]]:
    """Few combinations that hold every pair of values which some valid combination holds; always the same ones.

    An option whose values are tuples of bools, such as the gradients that are needed, counts as one option per bool;
    each of its values is drawn too. Greedy: the next row is the one with the most pairs not seen yet, the first of
    these in the order of the product.

    Args:
        apart: pairs of options that have nothing to do with each other, whose values need not meet.
    """
    at = _places(options, valid).astype(np.int32)
    if len(options) < 2 or not len(at):
        return [_row_at(options, places) for places in at]
    columns = [
        (name, part)
        for (name, values), places in zip(options.items(), at.T, strict=True)
        for part in _parts(places, values)
    ]
    pairs = [
        one * (other.max() + 1) + other
        for (of_one, one), (of_other, other) in itertools.combinations(columns, 2)
        if (of_one, of_other) not in apart and (of_other, of_one) not in apart
    ]
    pairs += list(at.T) if apart or len(columns) > len(options) else []  # each value, whatever it meets
    gains = np.full(len(at), len(pairs), np.int32)  # pairs of each row that no chosen row holds
    seen: list[set[int]] = [set() for _ in pairs]
    chosen = []
    while gains[best := int(gains.argmax())]:
        chosen.append(_row_at(options, at[best]))
        for codes, before in zip(pairs, seen, strict=True):
            if (code := int(codes[best])) not in before:
                before.add(code)
                gains -= codes == code
    return chosen
