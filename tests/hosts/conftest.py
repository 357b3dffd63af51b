"""Hosts are imported by the tests that need them, and left as they were found."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from tests.hosts import families


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`family`: those that are drawn, and the others where slow tests run."""
    if "family" in metafunc.fixturenames:
        drawn = families.drawn()
        rows = [
            pytest.param(each, id=str(each), marks=() if each in drawn else pytest.mark.slow)
            for each in families.families()
        ]
        metafunc.parametrize("family", rows)


@pytest.fixture(scope="session")
def _transformers() -> Any:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed; `make test-hosts` installs it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        import transformers

    transformers.logging.set_verbosity_error()
    return transformers


@pytest.fixture
def transformers(_transformers: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package; what others registered before is set aside, and a test must leave the registry of experts clean."""
    from transformers.integrations import moe

    from torch_bridge.integrations import transformers as adapter

    monkeypatch.setattr(adapter, "_ACTIVE", [])
    monkeypatch.setattr(adapter, "_HOST", adapter._Host())
    table = moe.ALL_EXPERTS_FUNCTIONS
    others = table.get(adapter.NAME)
    if others is not None:
        del table[adapter.NAME]
    before = dict(table)
    yield _transformers
    left = dict(table)
    for name in left.keys() - before.keys():
        del table[name]
    if others is not None:
        table[adapter.NAME] = others
    assert left == before, f"the test left {sorted(left.keys() - before.keys())} in the registry of experts"


@pytest.fixture
def registered(transformers: Any) -> Iterator[Any]:
    """The package with `register()` in force."""
    from torch_bridge.integrations.transformers import register

    with register():
        yield transformers
