"""Honest assertions: a failure prints the coordinate, both values and the bound. Arrays of any framework are taken."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.bounds import Bounded, half_ulp
from tests.cases import numpy_dtype


def as_numpy(array: Any) -> NDArray[Any]:
    """A NumPy array with the same bits; narrow types become those of ml_dtypes."""
    if type(array).__module__.split(".")[0] != "torch":
        return np.asarray(array)
    import torch

    tensor = array.detach().cpu().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
        bits = torch.uint8 if name.startswith("float8") else torch.uint16
        return tensor.view(bits).numpy().view(numpy_dtype(name))
    return tensor.numpy()


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def _same_kind(actual: NDArray[Any], expected: NDArray[Any], what: str) -> None:
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"


def _first(wrong: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))


def bitwise(actual: Any, expected: Any, what: str = "result") -> None:
    """Same shape, dtype and bits: NaN equals the same NaN, -0 differs from 0."""
    a, e = as_numpy(actual), as_numpy(expected)
    _same_kind(a, e, what)
    if a.size == 0:
        return
    wrong = _bits(a) != _bits(e)
    if wrong.any():
        at = _first(wrong)
        raise AssertionError(
            f"{what}{list(at)}: {a[at]!r} (bits {_bits(a)[at]:#x}), expected exactly {e[at]!r} (bits {_bits(e)[at]:#x})"
            f"; {int(wrong.sum())} of {wrong.size} elements differ"
        )


def within_ulps(actual: Any, expected: Any, ulps: float, what: str = "result") -> None:
    """At most `ulps` units in the last place of the expected array's dtype apart; NaN only beside NaN."""
    a, e = as_numpy(actual), as_numpy(expected)
    _same_kind(a, e, what)
    wide = e.astype(np.float64)
    _close(a, wide, 2 * ulps * half_ulp(wide, e.dtype.name), what)


def within(actual: Any, expected: Bounded, what: str = "result") -> None:
    """Same shape and dtype as expected, and each element within its own bound; a bound of 0 wants that value.

    An infinite bound accepts every value, including NaN: the content is undefined.
    """
    a = as_numpy(actual)
    assert a.shape == expected.shape, f"{what}: shape {a.shape}, expected {expected.shape}"
    assert a.dtype == numpy_dtype(expected.dtype), f"{what}: dtype {a.dtype}, expected {expected.dtype}"
    _close(a, expected.value, expected.error, what)


def _close(actual: NDArray[Any], expected: NDArray[np.float64], bound: NDArray[np.float64], what: str) -> None:
    if actual.size == 0:
        return
    wide = actual.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.abs(wide - expected)
    fine = (error <= bound) | (wide == expected) | (np.isnan(wide) & np.isnan(expected)) | np.isinf(bound)
    if not fine.all():
        with np.errstate(invalid="ignore", divide="ignore"):
            excess = np.where(fine, -1.0, np.nan_to_num(error / bound, nan=np.inf))
        at = tuple(int(i) for i in np.unravel_index(int(np.argmax(excess)), excess.shape))
        raise AssertionError(
            f"{what}{list(at)}: {wide[at]!r}, expected {expected[at]!r} within {bound[at]:.3g} but off by"
            f" {error[at]:.3g}; {int((~fine).sum())} of {fine.size} elements are outside their bound"
        )


def zero(actual: Any, what: str = "result") -> None:
    """Every element is +0, bit by bit."""
    a = as_numpy(actual)
    if a.size and _bits(a).any():
        at = _first(_bits(a) != 0)
        raise AssertionError(f"{what}{list(at)}: {a[at]!r} (bits {_bits(a)[at]:#x}), expected exactly +0")


def filled(actual: Any, value: float, what: str = "buffer") -> None:
    """Every element is still `value`: it was not written."""
    a = as_numpy(actual)
    bitwise(a, np.full(a.shape, value, a.dtype), what)


@contextlib.contextmanager
def refused(kind: type[Exception], fragments: Sequence[str]) -> Iterator[list[str]]:
    """The block raises exactly `kind`, with each of `fragments` in its message; yields a list that gets the message."""
    message: list[str] = []
    with pytest.raises(kind) as caught:
        yield message
    assert caught.type is kind, f"raised {caught.type.__name__}, expected {kind.__name__}: {caught.value}"
    message.append(str(caught.value))
    for fragment in fragments:
        assert fragment in message[0], f"the message lacks {fragment!r}:\n{message[0]}"
