"""The description of an activation: what each kind has, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from grouped_core.activations import KINDS, Activation, resolve
from tests import asserts


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
        (("situ_glu", ..., ..., ..., -1.0), ("`beta1` of Activation", "-1.0", "above 0", "4.0")),
        (("relu", ..., ..., ..., ..., ..., 2), ("`interleave` of Activation", "2", "relu is not gated", "leave")),
        (("swiglu", ..., ..., ..., ..., ..., 0), ("`interleave` of Activation", "0", "1 or more", "int")),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple, fragments: tuple[str, ...]) -> None:
    with asserts.refused(ValueError, fragments):
        Activation(*arguments)


@pytest.mark.rule("MLP-3")
def test_a_clamp_may_be_switched_off() -> None:
    assert Activation("clamped_qgeglu", limit=None).limit is None


@pytest.mark.rule("MLP-5", "MLP-6")
def test_width_of_the_first_product() -> None:
    assert Activation("swiglu").fc1_width(6) == 12
    assert Activation("relu").fc1_width(6) == 6
    assert Activation("swiglu", interleave=3).fc1_width(6) == 12
    with asserts.refused(ValueError, ("`interleave` of Activation", "4", "divisor of the expert width 6", "choose")):
        Activation("swiglu", interleave=4).fc1_width(6)
