"""The description of an activation: what each kind has, what is refused, and the oracle's formulas."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from grouped_core.activations import KINDS, Activation, deinterleave, half_columns, interleave, resolve
from grouped_core.reference import activation_of, hidden_row_of
from tests import asserts, bounds

ROOT = Path(__file__).resolve().parents[2]
KINKS: dict[str, tuple[float, ...]] = {
    "relu": (0.0,),
    "srelu": (0.0,),
    "clamped_qgeglu": (7.0, -7.0),
    "clamped_swiglu": (10.0, -10.0),
}
KINKS["silu_clamped_glu"] = (7.0, -7.0, 7.006342814601791)
"""Where a kind has no second derivative; the last number is where silu is 7."""


@pytest.mark.rule("MLP-3")
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_its_defaults_and_nothing_else(kind: str) -> None:
    spec = Activation(kind)
    defaults = KINDS[kind].defaults
    for name in ("alpha", "limit", "offset", "beta1", "beta2"):
        assert getattr(spec, name) == defaults.get(name), name
    assert dataclasses.replace(spec) == spec
    assert resolve(kind) == spec
    assert resolve(spec) is spec
    assert hash(spec) == hash(Activation(kind))


@pytest.mark.rule("MLP-3")
@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (("silo",), ("`kind` of Activation", "'silo'", "swiglu", "choose")),
        (("swiglu", 1.0), ("`alpha` of Activation", "1.0", "swiglu has no parameter", "leave")),
        (("clamped_qgeglu", ..., 0.0), ("`limit` of Activation", "0.0", "finite number above 0", "7.0")),
        (("clamped_qgeglu", float("nan")), ("`alpha` of Activation", "nan", "finite number", "1.702")),
        (("clamped_qgeglu", ..., ..., None), ("`offset` of Activation", "None", "finite number", "1.0")),
        (("clamped_swiglu", 1.0), ("`alpha` of Activation", "1.0", "clamped_swiglu has limit", "leave")),
        (("silu_clamped_glu", ..., -1), ("`limit` of Activation", "-1", "finite number above 0", "7.0")),
        (("situ_glu", ..., ..., ..., -1.0), ("`beta1` of Activation", "-1.0", "above 0", "4.0")),
        (("situ_glu", ..., ..., ..., 1e-60), ("`beta1` of Activation", "1e-60", "above 0, as float32", "4.0")),
        (("clamped_qgeglu", 1e39), ("`alpha` of Activation", "1e+39", "finite number, as float32", "1.702")),
        (("clamped_qgeglu", ..., 10**400), ("`limit` of Activation", "000", "above 0, as float32", "7.0")),
        (("relu", ..., ..., ..., ..., ..., 2), ("`interleave` of Activation", "2", "relu is not gated", "leave")),
        (("swiglu", ..., ..., ..., ..., ..., 0), ("`interleave` of Activation", "0", "1 or more", "int")),
        (("swiglu", ..., ..., ..., ..., ..., True), ("`interleave` of Activation", "True", "1 or more", "int")),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple, fragments: tuple[str, ...]) -> None:
    with asserts.refused(ValueError, fragments):
        Activation(*arguments)


@pytest.mark.rule("MLP-3")
@pytest.mark.parametrize("kind", ["clamped_qgeglu", "clamped_swiglu", "silu_clamped_glu"])
def test_a_clamp_may_be_switched_off(kind: str) -> None:
    activation = Activation(kind, limit=None)
    assert activation.limit is None
    row = np.array([[1e4, -1e5], [-3.0, 1e5], [20.0, 20.0]])
    if kind != "clamped_qgeglu":
        swiglu = activation_of(Activation("swiglu").params(), row)
        for found, wanted in zip(activation_of(activation.params(), row), swiglu, strict=True):
            asserts.bitwise(found, wanted)


@pytest.mark.rule("MLP-3")
def test_a_case_of_a_kind_is_that_kind_with_its_parameters_fixed() -> None:
    for limit in (None, 7.0, 10.0):
        general = Activation("clamped_qgeglu", alpha=1.0, limit=limit, offset=0.0)
        assert Activation("clamped_swiglu", limit=limit).params() == general.params()
    for kind in KINDS.values():
        if kind.case_of:
            general = KINDS[kind.case_of]
            assert not general.case_of
            assert kind.gated == general.gated
            assert kind.formula is general.formula
            assert not kind.defaults.keys() & kind.fixed.keys()
            assert kind.defaults.keys() | kind.fixed.keys() == general.defaults.keys()


@pytest.mark.rule("MLP-3")
def test_clamped_kinds_are_the_formulas_of_published_models() -> None:
    """DeepSeek-V4 and GLM clamp the gate in front of silu, Step 3.5 and later what silu made of it."""
    grid = np.linspace(-15, 15, 61)
    a, u = (axis.reshape(-1) for axis in np.meshgrid(grid, grid))

    def silu(x: np.ndarray) -> np.ndarray:
        return x / (1 + np.exp(-x))

    wanted = {
        "clamped_swiglu": silu(np.minimum(a, 10)) * np.clip(u, -10, 10),
        "silu_clamped_glu": np.minimum(silu(a), 7) * np.clip(u, -7, 7),
    }
    for kind, t in wanted.items():
        found = activation_of(Activation(kind).params(), np.stack([a, u], axis=1)).t[:, 0]
        asserts.within(found, bounds.Bounded(t, bounds.FINITE_DIFFERENCES * np.ones_like(t), "float64"), kind)


@pytest.mark.rule("MLP-5", "MLP-6")
def test_width_of_the_first_product() -> None:
    assert Activation("swiglu").fc1_width(6) == 12
    assert Activation("relu").fc1_width(6) == 6
    assert Activation("swiglu", interleave=3).fc1_width(6) == 12
    with asserts.refused(ValueError, ("`interleave` of Activation", "4", "divisor of the expert width 6", "choose")):
        Activation("swiglu", interleave=4).fc1_width(6)


def test_kinds_are_those_of_the_native_code() -> None:
    rows = re.findall(
        r'^  X\("(\w+)", (\w+), (true|false)\)', (ROOT / "cc/math/activation.h").read_text(), re.MULTILINE
    )
    assert [name for name, _, _ in rows] == [name for name, kind in KINDS.items() if not kind.case_of]
    for name, tag, gated in rows:
        assert tag == name
        assert (gated == "true") == KINDS[name].gated, name


@pytest.mark.rule("MLP-1")
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_are_finite_differences(kind: str) -> None:
    activation = Activation(kind)
    grid = np.linspace(-30, 30, 241) + 0.013  # which is more than the step away from every kink
    a, u = (axis.reshape(-1) for axis in np.meshgrid(grid, grid[::8]))
    step = 1e-4  # errs as its square, and as rounding over it: 1e-8 either way

    def at(da: float, du: float) -> np.ndarray:
        row = np.stack([a + da, u + du], axis=1) if activation.gated else (a + da)[:, None]
        return activation_of(activation.params(), row).t[:, 0]

    row = np.stack([a, u], axis=1) if activation.gated else a[:, None]
    exact = activation_of(activation.params(), row)
    assert all(np.abs(grid - kink).min() > step for kink in KINKS.get(kind, ()))
    for derivative, ends in (
        (exact.da[:, 0], (at(step, 0), at(-step, 0))),
        (exact.du[:, 0], (at(0, step), at(0, -step))),
    ):
        expected = (ends[0] - ends[1]) / (2 * step)
        error = bounds.FINITE_DIFFERENCES * (1 + np.abs(expected))
        asserts.within(derivative, bounds.Bounded(expected, error, "float64"), kind)


@pytest.mark.rule("MLP-5")
def test_the_interleave_of_the_contract() -> None:
    contiguous, interleaved = np.arange(1.0, 9.0), np.array([1.0, 2, 5, 6, 3, 4, 7, 8])
    gate, linear = half_columns(4, 2)
    asserts.bitwise(np.concatenate([interleaved[gate], interleaved[linear]]), contiguous)
    asserts.bitwise(hidden_row_of({"kind": "swiglu", "interleave": 2}, contiguous[:4], contiguous[4:]), interleaved)
    for block in (None, 4):
        assert [list(half) for half in half_columns(4, block)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [list(half) for half in half_columns(4, 1)] == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.rule("prime-rl #2365")
@pytest.mark.rule("MLP-3", "MLP-4")
def test_clamps_include_their_limit_and_keep_nan() -> None:
    above = np.nextafter(7.0, 8.0)
    a, u = np.array([7.0, above, 7.0, -above, np.nan, 1.0]), np.array([7.0, -7.0, above, -above, 1.0, np.nan])
    found = activation_of(Activation("clamped_qgeglu").params(), np.stack([a, u], axis=1))
    assert list(found.da[:4, 0] != 0) == [True, False, True, True]
    assert list(found.du[:4, 0] != 0) == [True, True, False, False]
    assert np.isnan(found.t[4:]).all()
    above = np.nextafter(40.0, 41.0)  # silu gives numbers of this size back
    a, u = np.array([40.0, above, 40.0, -above, np.nan, 1.0]), np.array([40.0, -40.0, above, -above, 1.0, np.nan])
    found = activation_of(Activation("silu_clamped_glu", limit=40.0).params(), np.stack([a, u], axis=1))
    assert list(found.t[:3, 0]) == [1600.0, -1600.0, 1600.0]
    assert list(found.da[:4, 0] != 0) == [True, False, True, True]
    assert list(found.du[:4, 0] != 0) == [True, True, False, False]
    assert np.isnan(found.t[4:]).all()
    assert np.isnan(activation_of(Activation("relu").params(), np.array([[np.nan]])).t).all()


@pytest.mark.rule("MLP-5")
@pytest.mark.parametrize("library", ["numpy", "jax", "torch"])
def test_layouts_convert_there_and_back(library: str) -> None:
    """The contract's example, and every block that divides a width, in each library and on any axis."""
    if library == "torch":
        import torch

        make = torch.tensor
    elif library == "jax":
        import jax.numpy as jnp

        make = jnp.asarray
    else:
        make = np.asarray
    example = interleave(make(np.arange(1, 9, dtype=np.float32)), 2)
    asserts.bitwise(np.asarray(example), np.float32([1, 2, 5, 6, 3, 4, 7, 8]))
    weight = np.arange(3 * 24 * 5, dtype=np.float32).reshape(3, 24, 5)
    for block in (1, 2, 3, 4, 6, 12):
        mixed = interleave(make(weight), block, axis=1)
        gate, linear = half_columns(12, block)
        asserts.bitwise(np.asarray(mixed)[:, np.concatenate([gate, linear])], weight)
        asserts.bitwise(np.asarray(deinterleave(mixed, block, axis=1)), weight)


@pytest.mark.rule("MLP-3")
def test_numbers_of_numpy_are_numbers() -> None:
    given = Activation("clamped_qgeglu", alpha=np.float32(1.5), limit=np.int64(7), interleave=np.int64(2))
    assert given == Activation("clamped_qgeglu", alpha=1.5, limit=7.0, interleave=2)
    assert [type(each) for each in (given.alpha, given.limit, given.interleave)] == [float, float, int]


@pytest.mark.rule("ERR-1", "MLP-5")
def test_layouts_that_do_not_divide_are_refused() -> None:
    for shape, block in (((4, 10), 3), ((4, 9), 1), ((4, 8), 0)):
        with asserts.refused(ValueError, ("`block` of interleave", str(block), str(shape), "divisor", "choose")):
            interleave(np.zeros(shape), block)
    for bad, fragments in (
        ((np.zeros((4, 8)), 2, 2), ("`axis` of deinterleave", "2", "axes of (4, 8)", "columns")),
        ((np.zeros((4, 8)), None, 1), ("`block` of deinterleave", "None", "an integer", "pass an int")),
        (([1.0, 2.0], 1, 0), ("`weight` of deinterleave", "list", "an array", "convert it")),
    ):
        weight, block, axis = bad
        with asserts.refused(ValueError if axis == 2 else TypeError, fragments):
            deinterleave(weight, block, axis=axis)
