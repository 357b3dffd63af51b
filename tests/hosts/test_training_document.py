"""The code of docs/hosts_training.md runs, each block where its host is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from tests.conftest import ROOT
from tests.hosts import torch_host_tools as host_tools
from tests.hosts.torch_host_tools import F, G, H

pytestmark = pytest.mark.filterwarnings("ignore")  # the hosts' own

BLOCKS = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "docs" / "hosts_training.md").read_text(), re.MULTILINE | re.DOTALL
)
MEGATRON = """
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
"""
CALL = f"""
import torch, torch_bridge
x, probs, tokens_per_expert = torch.randn(9, {H}), torch.rand(9), torch.tensor([4, 0, 2, 1, 2])
wi, wo = torch.randn({G}, {H}, {2 * F}), torch.randn({G}, {F}, {H})
"""
ROWS = {"import torchtitan": "", "import megatron": MEGATRON, "import nemo": "", "y = torch_bridge": CALL}
PACKAGES = {"import torchtitan": "torchtitan", "import megatron": "megatron", "import nemo": "nemo_automodel"}
UNTESTED = {"import prime_rl"}
"""prime-rl cannot be installed; tests/hosts/test_seams.py has stand-ins."""


@pytest.mark.rule("HST-3")
@pytest.mark.parametrize("words", ROWS)
def test_code_runs(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if words in PACKAGES:
        host_tools.host(PACKAGES[words])
    (block,) = (each for each in BLOCKS if words in each)
    names: dict[str, Any] = {}
    from torch_bridge.integrations import _replacing

    monkeypatch.setattr(_replacing, "_ACTIVE", {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(ROWS[words] + block, names)
    for registrations in _replacing._ACTIVE.values():
        for each in list(registrations):
            each.undo()
    if "y" in names:
        assert names["y"].shape == (9, H)
        assert isinstance(names["y"], torch.Tensor)


def test_every_block_is_known() -> None:
    known = ROWS.keys() | UNTESTED
    assert all(sum(words in block for words in known) == 1 for block in BLOCKS)
    assert len(BLOCKS) == len(known)
    assert "prime_rl" not in sys.modules


@pytest.mark.parametrize(("framework", "package"), [("torchtitan", "torchtitan"), ("nemo", "nemo_automodel")])
def test_the_example_runs(framework: str, package: str) -> None:
    """As its users run it; both round to bfloat16."""
    pytest.importorskip(package, reason=f"{package} is not installed (make test-hosts)")
    program = [sys.executable, str(ROOT / "examples" / "training_frameworks.py"), framework]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    distances = [float(line.split()[-3]) for line in done.stdout.splitlines() if line.endswith(" relative distance")]
    assert len(distances) >= 4, done.stdout
    assert max(distances) <= 2**-7, done.stdout
