"""The Hopper kernels hold what they were written for: wgmma fed by tensor copies, no spills, nothing serialised."""

from __future__ import annotations

import difflib

import pytest

from grouped_core import _native
from tests.native import sass

SPILLING = "grouped_product_sm90<ScaledRowsProduct<bf16,bf16,"
"""Keeps some ten words of a tile's epilogue in memory, once per tile and outside its main loop."""


@pytest.fixture(scope="module")
def kernels():
    if reason := sass.missing():
        pytest.skip(reason)
    return sass.counts()


def test_no_kernel_spills_or_falls_back(kernels):
    assert any(found["HGMMA"] for found in kernels.values()), f"no wgmma in {sorted(kernels)}"
    for name, found in kernels.items():
        most = 24 if name.startswith(SPILLING) else 0
        assert found["LDL"] + found["STL"] <= most, f"{name} keeps registers in memory"
        assert not found["HMMA"], f"{name} multiplies with instructions of older chips"
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
