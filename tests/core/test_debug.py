"""The size status word against Python integers, and GROUPED_DEBUG."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grouped_core import debug
from tests import asserts

TOP = 2**31 - 1
BOTTOM = -(2**31)


def word(sizes: list[int], rows: int) -> int:
    """The word in 32-bit arithmetic that wraps, as on a device; a wrong intermediate would show."""
    with np.errstate(over="ignore"):
        found = debug.size_word(
            np.array(sizes, np.int32),
            np.int32(rows),
            where=lambda condition, a, b: np.where(condition, np.int32(a), np.int32(b)).astype(np.int32),
            total=lambda array: array.sum(dtype=np.int32),
        )
    assert np.asarray(found).dtype == np.int32
    return int(found)


def expected(sizes: list[int], rows: int) -> int:
    negative = any(size < 0 for size in sizes)
    over = sum(max(size, 0) for size in sizes) > rows
    return debug.SIZE_NEGATIVE * negative + debug.SIZE_OVERFLOW * over


@pytest.mark.rule("GRP-13")
@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ([0], 0),
        ([1], 0),
        ([TOP], TOP),
        ([TOP, 1], TOP),
        ([TOP, TOP], TOP),
        ([TOP] * 65535, TOP),
        ([TOP] * 65535, 0),
        ([0xFFFF] * 65535, TOP),
        ([0xFF] * 65535, 65535 * 0xFF),
        ([0xFF] * 65535, 65535 * 0xFF - 1),
        ([32768] * 65535, 32768 * 65535),
        ([32768] * 65535, 32768 * 65535 - 1),
        ([0x10000, 0xFFFF], 0x1FFFF),
        ([0x10000, 0xFFFF], 0x1FFFE),
        ([BOTTOM], 0),
        ([BOTTOM] * 65535, TOP),
        ([-1, 5], 5),
        ([-1, 6], 5),
    ],
    ids=lambda part: part if isinstance(part, int) else f"{part[0]}x{len(part)}",
)
def test_extremes(sizes, rows):
    assert word(sizes, rows) == expected(sizes, rows)


@pytest.mark.rule("GRP-13")
@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_any_sizes(data):
    number = st.one_of(st.integers(BOTTOM, TOP), st.integers(-3, 70000), st.sampled_from([0, 0xFF, 0xFFFF, 0x10000]))
    sizes = data.draw(st.lists(number, min_size=1, max_size=40))
    exact = min(sum(max(size, 0) for size in sizes), TOP)
    rows = data.draw(st.one_of(st.integers(0, TOP), st.integers(max(exact - 2, 0), min(exact + 2, TOP))))
    assert word(sizes, rows) == expected(sizes, rows)


def test_the_status_word_is_described_in_text():
    assert debug.describe_status(0) == "the group sizes fit"
    assert "negative" in debug.describe_status(debug.SIZE_NEGATIVE)
    both = debug.describe_status(debug.SIZE_NEGATIVE | debug.SIZE_OVERFLOW)
    assert "negative" in both
    assert "more rows than there are" in both


@pytest.mark.rule("ERR-4")
class TestVariable:
    def test_unset_asks_for_nothing(self):
        assert debug.debug_flags() == frozenset()

    @pytest.mark.parametrize(
        ("text", "flags"),
        [
            ("", set()),
            ("sizes", {"sizes"}),
            (" sizes , sync,", {"sizes", "sync"}),
            ("poison,ranks,sizes,sync", {*debug.FLAGS}),
        ],
    )
    def test_a_comma_list_is_read_at_each_call(self, monkeypatch, text, flags):
        monkeypatch.setenv("GROUPED_DEBUG", text)
        assert debug.debug_flags() == flags
        monkeypatch.delenv("GROUPED_DEBUG")
        assert debug.debug_flags() == frozenset()

    def test_an_unknown_check_is_refused(self, monkeypatch):
        monkeypatch.setenv("GROUPED_DEBUG", "sizes,fast")
        with asserts.refused(ValueError, ["GROUPED_DEBUG:", "fast", "sizes, poison, sync", "correct or unset"]):
            debug.debug_flags()

    def test_checks_are_logged_once(self, monkeypatch, logged):
        debug._parse_flags.cache_clear()
        monkeypatch.setenv("GROUPED_DEBUG", "sizes,poison")
        debug.debug_flags()
        debug.debug_flags()
        assert logged == ["GROUPED_DEBUG adds the checks: poison, sizes"]
