"""Every experts class of the installed transformers: results and gradients against its own paths.

`make test` runs one family of each kind of decorator and gate, and others by lot; `--full` runs all.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import bounds
from tests.hosts.families import Family, InFloat64, drawn, experts_module, families, problem, results
from tests.torch_frontend.routing_tools import near
from torch_bridge.integrations.transformers import register

pytestmark = pytest.mark.rule("HST-1", "HST-2")

REFUSED: dict[str, str] = {}
"""Classes that are refused, with a part of the reason; none at present."""
LEAST = 50
"""Families that must run."""


def _exact(module: Any, p: Any) -> dict[str, Tensor]:
    """The results of the model's own eager path in float64."""
    with InFloat64():
        return results(copy.deepcopy(module).double(), p.to(torch.float64), "eager")


def test_results_in_float32(registered: Any, family: Family) -> None:
    if family.name in REFUSED:
        pytest.skip(f"refused: {REFUSED[family.name]}")
    module = experts_module(family)
    p = problem(module)
    exact, own, ours = _exact(module, p), results(module, p, "eager"), results(module, p, "jax_grouped")
    assert exact.keys() == ours.keys()
    for name, each in exact.items():
        near(ours[name], each, f"{name} against float64")
        error, norm = (ours[name].double() - own[name].double()).norm(), each.norm()
        assert error <= 2 * bounds.LAYER * norm, (
            f"{name} against eager: {error:.3g}, allowed {2 * bounds.LAYER * norm:.3g}"
        )


def test_bfloat16_is_no_farther_from_float64_than_its_own_path(registered: Any, family: Family) -> None:
    """Its own path is `grouped_mm`, which a model takes if nothing is said."""
    if family.name in REFUSED:
        pytest.skip(f"refused: {REFUSED[family.name]}")
    module = experts_module(family, dtype=torch.bfloat16)
    p = problem(module).to(torch.bfloat16)
    exact, own, ours = _exact(module, p), results(module, p, "grouped_mm"), results(module, p, "jax_grouped")
    for name, each in exact.items():
        assert ours[name].dtype == own[name].dtype == torch.bfloat16
        error, allowed = (float((found[name].double() - each).norm()) for found in (ours, own))
        allowed *= bounds.of_two_roundings(each.numel())
        assert error <= allowed, f"{name}: {error:.3g} from float64, allowed {allowed:.3g}"


def test_the_draw_has_every_kind(transformers: Any) -> None:
    found = families()
    assert {(each.decorator, each.own_gate) for each in found} == {(each.decorator, each.own_gate) for each in drawn()}
    assert 8 <= len(drawn()) <= 12
    for each in drawn():  # the sources say what the classes are
        kind = getattr(importlib.import_module(each.module), each.name)
        assert kind.__init__.__wrapped__ is not None
        assert (kind._apply_gate.__name__ != "_default_apply_gate") == each.own_gate


@pytest.mark.slow
def test_enough_families_run_and_the_others_say_why(transformers: Any) -> None:
    reasons = {}
    with register():
        for family in families():
            module = experts_module(family)
            try:
                results(module, problem(module), "jax_grouped")
            except NotImplementedError as error:
                reasons[family.name] = str(error)
    assert reasons.keys() == REFUSED.keys()
    for name, part in REFUSED.items():
        assert part in reasons[name]
    assert len({each.model for each in families() if each.name not in REFUSED}) >= LEAST
