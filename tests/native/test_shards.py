"""Weights quantised in parts: the bytes of the whole, whatever the cuts, and nothing beside one's own part."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from grouped_core import calls, plans
from grouped_core.calls import QUANTIZED, RESULTS, spec_of
from grouped_core.formats import FORMATS, Format
from tests import asserts, cases
from tests.native.quantize_tools import FOR_WEIGHTS, MEMBERS, numbers, variant
from tests.native.quantize_tools import nothing_is_exceptional as nothing_is_exceptional
from tests.native.runner import Native, kernels

PARTLY = [row for row in FOR_WEIGHTS if not (row.stochastic or row.four_over_six)]
FORMS = ((True, True), (True, False), (False, True))
AMAX = {name: name.replace("cast", "amax") for name in ("shard_cast_any_cpu", "shard_cast_any_cuda")}
Arrays = dict[str, NDArray[Any]]


def whole(w: NDArray[Any], format: Format, forms: tuple[bool, bool], scale: NDArray[Any] | None = None) -> Arrays:
    """What the quantiser makes of all of it."""
    call = calls.quantize(spec_of(w), format, forms, None, scale=scale is not None)
    found = Native("quantize_any_cpu", check=False)(call, call.arrange(source=w, scale=scale))
    names = zip(RESULTS["quantize"], found, strict=True)
    return {name: array for name, array in names if array is not None and name in QUANTIZED}


class Ranks:
    """Owners of the parts of a weight that is cut at some of its flat elements."""

    def __init__(self, kernel: str, w: NDArray[Any], cuts: list[int]) -> None:
        self.cast, self.measure = Native(kernel, check=False), Native(AMAX[kernel], check=False)
        self.source, self.kept, self.tables = spec_of(w), [], []
        groups, size, flat = w.shape[0], w[0].size, w.reshape(-1)
        for begin, end in zip([0, *cuts], [*cuts, w.size], strict=True):
            table = np.zeros((3, groups), np.int64)
            for g in range(groups):
                first, last = max(begin, g * size), min(end, (g + 1) * size)
                if first < last:
                    held, (address,) = self.cast.hold([flat[first:last]])
                    self.kept.append(held)
                    table[:, g] = address, first - g * size, last - first
            self.tables.append(table)

    def amax(self, format: Format) -> NDArray[np.int32]:
        """Of all of them, as a reduction over ranks gives it."""
        call = calls.shard_amax(self.source, format)
        spec, found = call.outputs[0], []
        assert spec is not None
        for table in self.tables:
            into = np.full(spec.shape, 77, np.int32)
            found.append(self.measure(call, call.arrange(source_table=table, into_amax=into))[0])
        return np.maximum.reduce(found)

    def store(
        self, rank: int, format: Format, forms: tuple[bool, bool], amax: NDArray[Any], into: Arrays, **options: Any
    ) -> Arrays:
        """What a rank writes into `into`."""
        call = calls.shard_cast(self.source, format, forms, **dict.fromkeys(options, True))
        buffers = {f"into_{name}": array for name, array in into.items()}
        found = self.cast(call, call.arrange(source_table=self.tables[rank], amax=amax, **buffers, **options))
        return {name: array for name, array in zip(QUANTIZED, found, strict=True) if array is not None}


def cuts_of(w: NDArray[Any], ranks: int, seed: int) -> list[int]:
    """Anywhere: in the middle of rows, blocks and bytes; two may coincide, so that a rank has nothing."""
    return sorted(np.random.default_rng(seed).integers(0, w.size + 1, ranks - 1).tolist())


def full(arrays: Arrays, byte: int) -> Arrays:
    return {n: np.full(a.nbytes, byte, np.uint8).view(a.dtype).reshape(a.shape) for n, a in arrays.items()}


def same(found: Arrays, wanted: Arrays) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        asserts.bitwise(found[name], array, name)


@pytest.mark.rule("QNT-3")
@pytest.mark.matrix(
    kernel=kernels("shard_cast"), format=PARTLY, shape=MEMBERS, dtype=cases.DTYPES, forms=FORMS, ranks=(1, 2, 3, 7)
)
def test_parts_have_the_bytes_of_the_whole(kernel, format, shape, dtype, forms, ranks):
    w = numbers(shape, dtype)
    wanted = whole(w, format, forms)
    owners = Ranks(kernel, w, cuts_of(w, ranks, ranks))
    amax, held = owners.amax(format), full(wanted, 0x5A)
    for rank in range(ranks):
        held = owners.store(rank, format, forms, amax, held)
    same(held, wanted)


@pytest.mark.rule("QNT-3")
@pytest.mark.matrix(kernel=kernels("shard_cast"), format=PARTLY, shape=((3, 37, 53), (2, 128, 256)))
def test_a_rank_writes_its_own_codes_and_every_scale(kernel, format, shape):
    """Codes as bits: what two passes over different contents agree in was written, and is as many as the shard has."""
    w = numbers(shape, "float32")
    wanted = whole(w, format, (True, True))
    owners = Ranks(kernel, w, cuts_of(w, 3, 5))
    amax = owners.amax(format)
    bits = 4 if format.values == "uint8" else 8
    for rank, table in enumerate(owners.tables):
        ones, zeros = (owners.store(rank, format, (True, True), amax, full(wanted, byte)) for byte in (0xFF, 0x00))
        for name in wanted:
            a, b, c = (array[name].view(np.uint8) for array in (ones, zeros, wanted))
            written = ~(a ^ b)
            asserts.bitwise(a & written, c & written, name)
            if "values" not in name:
                assert (written == 0xFF).all(), f"all of {name}"
                continue
            elements = int(np.unpackbits(written).sum()) // bits
            odd_ends = w.size // w.shape[2 if name == "values" else 1] if bits == 4 else 0
            assert 0 <= elements - int(table[2].sum()) <= odd_ends, name


@pytest.mark.rule("QNT-6")
@pytest.mark.matrix(kernel=kernels("shard_cast"), format=PARTLY, forms=FORMS)
def test_a_device_flag_turns_it_into_nothing(kernel, format, forms):
    w = numbers((3, 37, 53), "bfloat16")
    wanted = whole(w, format, forms)
    owners = Ranks(kernel, w, [])
    amax, before = owners.amax(format), full(wanted, 0x5A)
    for flag in (0, 1, -1):
        found = owners.store(0, format, forms, amax, before, skip=np.array([flag], np.int32))
        same(found, before if flag else wanted)


@pytest.mark.parametrize("kernel", kernels("shard_cast"))
def test_scales_that_are_given(kernel):
    w, format = numbers((3, 37, 53), "float32"), FORMATS["fp8_tensor"]
    scale = np.array([1, 2.5, 0], np.float32)
    owners = Ranks(kernel, w, [100, 2000])
    amax = owners.amax(format)
    with np.errstate(all="ignore"):
        wanted = whole(w, format, (True, True), scale)
    held = full(wanted, 0x5A)
    for rank in range(3):
        held = owners.store(rank, format, (True, True), amax, held, scale=scale)
    same(held, wanted)
    magnitudes = [np.abs(member).max() for member in w]
    found = amax[:, 0].view(np.float32)
    assert all(np.isnan(a) == np.isnan(b) and (np.isnan(a) or a == b) for a, b in zip(found, magnitudes, strict=True))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"block": 24}, "block"),
        ({"block_outer": 16}, "block_outer"),
        ({"rule": "none"}, '`rule`: "none"'),
        ({"rule": "nvfp4"}, "expected"),
        ({"block": 0}, "scales"),
    ],
)
def test_parameters_that_contradict_are_refused(params, words):
    call = calls.shard_cast(spec_of(numbers((3, 32, 64), "float32")), variant("mxfp8"), (True, True))
    call = dataclasses.replace(call, params=tuple({**dict(call.params), **params}.items()))
    with asserts.refused(ValueError, ["shard_cast", words]):
        plans.attempt(call, "cpu")
