"""Adapters of hosts that are not installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

from tests import asserts

HOSTS = {
    "torch_bridge.integrations.megatron": "megatron",
    "torch_bridge.integrations.nemo": "nemo_automodel",
    "torch_bridge.integrations.prime_rl": "prime_rl",
    "torch_bridge.integrations.torchtitan": "torchtitan",
    "jax_grouped.integrations.axlearn": "axlearn",
    "jax_grouped.integrations.haliax": "haliax",
    "jax_grouped.integrations.levanter": "levanter",
    "jax_grouped.integrations.maxtext": "maxtext",
}


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize("adapter", HOSTS)
def test_a_host_that_is_not_installed(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, module = HOSTS[adapter], importlib.import_module(adapter)
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    parts = [f"{package}: not installed", "expected a release that docs/hosts", "install it"]
    with asserts.refused(ModuleNotFoundError, parts):
        module.register()
