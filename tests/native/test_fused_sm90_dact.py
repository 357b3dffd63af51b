"""Gradients at the hidden rows behind a product on Hopper, over more than one tile: bits, masks, poison, layouts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from grouped_core.activations import Activation
from tests import asserts, cases
from tests.native.activation_tools import Product, product_gradients, product_of, values
from tests.native.runner import Native

KERNEL = "grouped_matmul_dact_bf16_sm90"
pytestmark = pytest.mark.gpu

# Tiles are 128 x 128, for sums of 4096 elements and more 128 x 192. Their epilogue works on 64 x 64, a stage of the
# ring holds 64 contracted elements.
CASES = tuple(
    cases.Case(name, sizes, rows, k, n, frozenset())
    for name, sizes, rows, k, n in (
        ("several_tiles", (300, 0, 17, 129, 64, 0, 65, 1), 620, 200, 392),
        ("even_tiles", (128, 256, 0, 64), 448, 64, 256),
        ("one_tile", (130, 7), 137, 392, 72),
        ("long_group", (1500, 3), 1600, 136, 192),
        ("long_sums", (300, 0, 17, 129), 460, 4104, 392),
        ("no_rows_owned", (0, 0, 0), 77, 64, 64),
    )
)
KINDS = ("swiglu", "clamped_qgeglu", "geglu_erf", "situ_glu", "relu", "gelu_tanh")
INTERLEAVES = (None, 1, 8, 16, 32, 64, 128)
MASKS = tuple(mask for mask in itertools.product((False, True), repeat=3) if any(mask))


def fits(case: cases.Case, kind: str, interleave: int | None, **_: object) -> bool:
    return interleave is None or (Activation(kind).gated and case.n % interleave == 0)


def gradients_of(p: Product, run: Native | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    run = run or Native(KERNEL, check=False)
    return product_gradients(run, p, p.dy.dtype.name, scaled=True, based=True)


@pytest.mark.rule("MLP-1", "MLP-2", "MLP-5", "MLP-7", "GRP-5", "GRP-6")
@pytest.mark.matrix(
    kind=KINDS, case=CASES, dtype=("bfloat16", "float16"), interleave=INTERLEAVES, rhs_axis=(1, 2), valid=fits
)
def test_tiles(kind, case, dtype, interleave, rhs_axis):
    p = product_of(case, Activation(kind, interleave=interleave), dtype, rhs_axis)
    found = gradients_of(p, Native(KERNEL))
    for name, array in zip(("result", "activated", "row_sum"), found, strict=True):
        asserts.zero(array[case.valid :], f"tail of {name}")
    alone = values(Native("activation_any_cuda", check=False), p.rows, dtype, scaled=True)
    asserts.bitwise(found[1], alone, "activated")


@pytest.mark.rule("ALL-2", "MLP-11")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", ["swiglu", "silu"])
def test_what_is_asked_for_changes_no_bits(case, kind):
    p = product_of(case, Activation(kind), "bfloat16")
    run = Native(KERNEL, check=False)
    whole = gradients_of(p, run)
    for wanted in MASKS:
        found = product_gradients(run, p, "bfloat16", scaled=True, based=True, wanted=wanted)
        for array, want, expected in zip(found, wanted, whole, strict=True):
            assert (array is not None) == want
            if want:
                asserts.bitwise(array, expected, f"of {wanted}")


@pytest.mark.rule("ALL-2", "MAT-3")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_layouts_and_lists_give_the_same_bits(case):
    p = product_of(case, Activation("swiglu"), "bfloat16")
    run = Native(KERNEL, check=False)
    members, table = run.hold(list(p.wo))
    other = p._replace(wo=np.ascontiguousarray(p.wo.swapaxes(1, 2)), rhs_axis=2)
    listed = product_gradients(run, p, "bfloat16", scaled=True, based=True, table=table)
    for found in (gradients_of(other, run), listed):
        for array, expected in zip(found, gradients_of(p, run), strict=True):
            asserts.bitwise(array, expected)
    assert len(members) == case.groups  # alive until here


@pytest.mark.rule("MLP-4", "MLP-7")
@pytest.mark.parametrize("operand", ["dy", "hidden"])
@pytest.mark.parametrize("case", [case for case in CASES if case.valid], ids=str)
def test_nan_stays_in_its_row(case, operand):
    p = product_of(case, Activation("swiglu"), "bfloat16")
    bad = p._replace(dy=p.dy.copy(), rows=p.rows._replace(hidden=p.rows.hidden.copy()))
    row = case.valid // 2
    (bad.dy if operand == "dy" else bad.rows.hidden)[row] = np.nan
    others = np.arange(case.rows) != row
    for array, expected in zip(gradients_of(bad), gradients_of(p), strict=True):
        asserts.bitwise(array[others], expected[others])
    assert np.isnan(gradients_of(bad)[0][row].astype(np.float32)).all()
    assert np.isnan(gradients_of(bad)[2][row])


def test_the_same_twice():
    p = product_of(CASES[0], Activation("swiglu"), "bfloat16")
    first = gradients_of(p)
    for _ in range(5):
        for array, expected in zip(gradients_of(p), first, strict=True):
            asserts.bitwise(array, expected)
