"""The Hopper kernels hold what they were written for: wgmma fed by tensor copies, no spills, nothing serialised."""

from __future__ import annotations

import difflib
import re

import pytest

from grouped_core import _native
from tests.native import sass

SPILLING = {
    r"coded_product_sm90<": 80,
    r"swapped_product_sm90<": 50,
    r"DactProduct<.*TileShape<192": 90,
    r"EvenUpProduct<fp16": 9,
    r"MnRows<.*fp?16>": 2,
    r"MnRows<.*,float>": 9,
}
"""Kernels that keep words in memory, and how many loads and stores of them there may be. Those of gradients at the
hidden rows are outside of the loops over elements, those of `MnRows` outside of the loops over blocks; where those of
codes and of fp16 are was not looked up."""


@pytest.fixture(scope="module")
def kernels():
    if reason := sass.missing():
        pytest.skip(reason)
    return sass.counts()


def test_no_kernel_spills_or_falls_back(kernels):
    assert any(found["HGMMA"] for found in kernels.values()), f"no wgmma in {sorted(kernels)}"
    for name, found in kernels.items():
        most = max((words for kernel, words in SPILLING.items() if re.search(kernel, name)), default=0)
        assert found["LDL"] + found["STL"] <= most, f"{name} keeps registers in memory"
        # Both gradients of a low-rank factor multiply too little for wgmma.
        assert name.startswith("low_rank_grads<") or not found["HMMA"], f"{name} multiplies as older chips do"
        if found["HGMMA"] or found["QGMMA"]:
            assert found["UTMALDG"], f"{name} loads without tensor copies"
            assert found["USETMAXREG"], f"{name} does not hand registers over"


def test_golden_counts(kernels):
    wanted = sass.GOLDEN.read_text()
    if f"nvcc {_native.cuda_compiler};" not in wanted:
        pytest.skip(f"compiled by {_native.cuda_compiler}, the golden file by {wanted.splitlines()[0]}")
    found = sass.table()
    changes = difflib.unified_diff(wanted.splitlines(), found.splitlines(), "golden", "built", n=0, lineterm="")
    assert found == wanted, "\n".join([*changes, "meant? `make sass` renews the file"])
