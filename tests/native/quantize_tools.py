"""Sources and formats for the tests of quantisers."""

from __future__ import annotations

import zlib
from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from grouped_core.formats import FORMATS, Format
from tests import cases

FORMATS_WITH_SCALES = [row for row in FORMATS.values() if not row.plain]


def variant(name: str, **changes: Any) -> Format:
    return FORMATS[name].replace(name="_".join([name, *changes]), **changes)


VARIANTS = [
    *FORMATS_WITH_SCALES,
    variant("fp8_tensor", pow2=True),
    variant("fp8_tensor_e5m2", eps=0.5),
    variant("fp8_1x128", pow2=False),
    variant("fp8_1x128", eps=2.0**-3),
    variant("fp8_128x128", pow2=False),
    variant("mxfp8", square=False, segment=128),
    variant("nvfp4", stochastic=True),
    variant("nvfp4", rotate=True),
    variant("nvfp4", rotate=True, stochastic=True),
    variant("nvfp4", four_over_six="absolute"),
    variant("nvfp4", four_over_six="square"),
    variant("nvfp4_2d", four_over_six="absolute"),
    variant("nvfp4_2d", four_over_six="square"),
    variant("nvfp4", four_over_six="square", full_range=True),
]


FOR_WEIGHTS = [row for row in VARIANTS if not row.rotate]


LISTED = ((1, 16, 8), (3, 48, 72), (2, 144, 264), (64, 16, 40), (2, 16, 1040), (3, 37, 1032))
"""Weights whose rows are whole vectors, mostly with columns that can be transposed."""


MEMBERS = ((3, 37, 53), (2, 128, 256), (1, 1, 1), (2, 130, 300), (5, 16, 32), (1, 257, 31), *LISTED)


@pytest.fixture(autouse=True)
def nothing_is_exceptional():
    """Sources hold infinities, NaN and numbers that no narrower type has."""
    with np.errstate(all="ignore"):
        yield


def numbers(shape: tuple[int, ...], dtype: str, seed: Hashable = 0) -> NDArray[Any]:
    """Normal numbers whose rows and columns reach over many binades, zeros, subnormals, and a few special ones."""
    return _numbers(shape, dtype, seed).copy()


@lru_cache(maxsize=128)
def _numbers(shape: tuple[int, ...], dtype: str, seed: Hashable) -> NDArray[Any]:
    rng = np.random.default_rng(zlib.crc32(repr((shape, dtype, seed)).encode()))
    spread = 6 if dtype == "float16" else 20
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-spread, spread, (*shape[:-1], 1)) / 2)
    x *= np.exp2(rng.integers(-spread, spread, shape[-1]) / 2)
    x[rng.random(shape) < 0.05] = 0
    x[rng.random(shape[:-1]) < 0.1] = 0
    x[rng.random(shape[:-1]) < 0.05] *= 2.0 ** (-20 if dtype == "float16" else -130)
    for special in (np.nan, -np.inf, np.inf, 3e38, -1e-45, -0.0):
        x[rng.random(shape) < 0.3 / max(x.size / 64, 8)] = special
    return x.astype(cases.numpy_dtype(dtype))
