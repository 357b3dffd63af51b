"""Gradient rules on the oracle: finite differences, what is saved, and what is not computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from grouped_core import gradients, linear_spec
from grouped_core.calls import RESULTS, ArraySpec, Call
from grouped_core.formats import FORMATS, QTensor
from grouped_core.gradients import Needs
from grouped_core.linear_spec import Linear, Names
from grouped_core.plans import Planner
from grouped_core.quantizing import NO_EXTRAS, Extras
from grouped_core.recipes import SAVED, SAVED_WEIGHTS, FP8Block, FP8Current, FP8Delayed
from grouped_core.reference import Oracle
from tests import asserts, bounds, cases
from tests.bounds import ALL_NEEDS

NAMES = Names("x", "w")
CASE = cases.Case("tiny", (3, 0, 2), 7, 4, 3, frozenset())
EVERYTHING = Needs()


class Recorder(Oracle):
    """The oracle, keeping the names of the calls it ran."""

    def __init__(self, exact: bool = False) -> None:
        super().__init__(exact)
        self.calls: list[Call] = []

    def __call__(self, call: Call, arrays: Sequence) -> tuple:
        self.calls.append(call)
        return super().__call__(call, arrays)

    @property
    def names(self) -> list[str]:
        return [call.name for call in self.calls]


@dataclasses.dataclass
class Setup:
    """The operation, its operands by name in fp64 (None where absent), and dy."""

    op: Linear
    arrays: dict
    sizes: np.ndarray
    dy: np.ndarray

    def forward(self, run: Oracle, **changed) -> np.ndarray:
        a = {**self.arrays, **changed}
        return gradients.linear(run, self.op, a["x"], a["w"], self.sizes, a["bias"], a["row_scale"])

    def backward(self, run: Oracle, needs: Needs, arrays: dict | None = None, **options) -> Any:
        specs = tuple(None if a is None else run.spec(a) for a in self.arrays.values())
        a = arrays or self.arrays
        given = (a["x"], a["w"], self.sizes, a["bias"], a["row_scale"], self.dy)
        return gradients.linear_grads(run, self.op, specs, *given, needs, **options)

    def needs(self, wanted: Needs = EVERYTHING) -> Needs:
        """`wanted` without the operands that are absent, as a frontend asks for them."""
        return Needs(*(need and a is not None for need, a in zip(wanted, self.arrays.values(), strict=True)))


def setup(transposed: bool, bias: bool, row_scale: bool, scale_bias: bool, dtype: str | None = None) -> Setup:
    p = cases.problem(CASE, "float32", transposed=transposed)
    op = Linear(NAMES, transposed=transposed, scale_bias=scale_bias)
    kept = {"x": p.x, "w": p.w, "bias": p.bias if bias else None, "row_scale": p.row_scale if row_scale else None}
    wanted = np.float64 if dtype is None else cases.numpy_dtype(dtype)
    arrays = {name: None if a is None else a.astype(wanted) for name, a in kept.items()}
    return Setup(op, arrays, p.group_sizes, p.dy.astype(wanted))


def legal(bias: bool, row_scale: bool, scale_bias: bool, **_) -> bool:
    return not scale_bias or (bias and row_scale)


OPTIONS = {
    "transposed": (False, True),
    "bias": (False, True),
    "row_scale": (False, True),
    "scale_bias": (False, True),
}
EVERY = cases.product(OPTIONS, legal)
every_option = pytest.mark.parametrize(tuple(OPTIONS), EVERY)


@pytest.mark.rule("MAT-9", "GRP-5", "GRP-6")
@every_option
def test_gradients_are_finite_differences(transposed, bias, row_scale, scale_bias):
    s = setup(transposed, bias, row_scale, scale_bias)
    run = Oracle(exact=True)
    valid = slice(0, CASE.valid)
    found = s.backward(run, s.needs())
    step = 1e-3  # the operation is linear in each operand, so only rounding errs, and less with a larger step
    for name, grad in zip(s.arrays, found, strict=True):
        array = s.arrays[name]
        if array is None:
            assert grad is None
            continue
        expected = np.zeros_like(array)
        for at in np.ndindex(array.shape):
            if name in ("x", "row_scale") and at[0] >= CASE.valid:
                continue  # the tail is not read, so its gradient is zero
            ends = []
            for sign in (1, -1):
                moved = array.copy()
                moved[at] += sign * step
                ends.append(np.sum((s.dy * s.forward(run, **{name: moved}))[valid]))
            expected[at] = (ends[0] - ends[1]) / (2 * step)
        scale = np.max(np.abs(expected))
        error = bounds.Bounded(expected, np.full_like(expected, bounds.FINITE_DIFFERENCES * scale), "float64")
        asserts.within(grad, error, name)
        if name in ("x", "row_scale"):
            asserts.zero(grad[CASE.valid :], name)


@pytest.mark.rule("MAT-1")
@pytest.mark.parametrize("scale_bias", [False, True])
def test_layouts_agree_bitwise(scale_bias):
    run = Oracle()
    one, other = (setup(transposed, True, True, scale_bias, "bfloat16") for transposed in (False, True))
    asserts.bitwise(one.forward(run), other.forward(run))
    a, b = one.backward(run, Needs()), other.backward(run, Needs())
    asserts.bitwise(a.w, np.ascontiguousarray(b.w.swapaxes(1, 2)))
    for name in ("x", "bias", "row_scale"):
        asserts.bitwise(getattr(a, name), getattr(b, name), name)


@pytest.mark.rule("ALL-4", "MLP-12")
@every_option
def test_only_needed_gradients_are_computed_and_none_changes_with_the_others(transposed, bias, row_scale, scale_bias):
    s = setup(transposed, bias, row_scale, scale_bias, "bfloat16")
    full = s.backward(Oracle(), s.needs())
    for wanted in ALL_NEEDS:
        needs = s.needs(wanted)
        run = Recorder()
        found = s.backward(run, needs)
        for name, need, grad in zip(found._fields, needs, found, strict=True):
            if need:
                asserts.bitwise(grad, getattr(full, name), f"{name} with {needs}")
            else:
                assert grad is None, f"{name} was computed though {needs}"
        scales = row_scale and not scale_bias
        products = needs.w + (needs.x or (needs.row_scale and scales))
        assert run.names.count("grouped_matmul") == products, needs
        assert run.names.count("group_sum") == needs.bias, needs
        assert run.names.count("row_dot") == needs.row_scale, needs


@pytest.mark.rule("ALL-4", "MLP-9")
@every_option
def test_what_is_saved_is_enough_and_nothing_is_saved_in_vain(transposed, bias, row_scale, scale_bias):
    s = setup(transposed, bias, row_scale, scale_bias, "bfloat16")
    for wanted in ALL_NEEDS:
        needs = s.needs(wanted)
        full = s.backward(Oracle(), needs)
        saved = gradients.linear_saved(s.op, needs, bias, row_scale)
        kept = {n: a if keep else None for (n, a), keep in zip(s.arrays.items(), saved, strict=True)}
        found = s.backward(Oracle(), needs, kept)
        for name, a, b in zip(found._fields, found, full, strict=True):
            if b is not None:
                asserts.bitwise(a, b, f"{name} from what was saved for {needs}")
        for name, array in kept.items():
            if array is None:
                continue
            poisoned = {**kept, name: np.full_like(array, np.nan)}
            with np.errstate(invalid="ignore"):
                spoilt = s.backward(Oracle(), needs, poisoned)
            assert any(g is not None and np.isnan(g.astype(np.float32)).any() for g in spoilt), (
                f"{name} is saved for {needs} and never read"
            )


@pytest.mark.parametrize(("accumulate", "forward"), [("promote", "every_128"), ("fast", "never")])
def test_gradients_are_promoted_however_forward_accumulates(accumulate, forward):
    s = setup(True, False, False, False, "bfloat16")
    s.op = dataclasses.replace(s.op, recipe=FP8Current.replace(accumulate=accumulate))
    run = Recorder()
    s.forward(run)
    s.backward(run, s.needs())
    found = [dict(call.params)["promote"] for call in run.calls if call.name == "grouped_matmul"]
    assert found == [forward, "every_128", "every_128"]


@pytest.mark.rule("MAT-11", "GRP-9")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_gradients_accumulate_in_place_and_leave_empty_groups(transposed, dtype):
    s = setup(transposed, False, False, False, "bfloat16")
    into = cases.normal(s.arrays["w"].shape, dtype, "into")
    run = Oracle()
    needs = Needs(False, True, False, False)
    found = s.backward(run, needs, into_w=into, accumulate=True).w
    exact = s.backward(Oracle(exact=True), needs).w.astype(np.float64) + into.astype(np.float64)
    asserts.bitwise(found, exact.astype(found.dtype))
    asserts.bitwise(found[1], into[1])
    assert found.dtype == cases.numpy_dtype(dtype)


def test_empty_groups_have_zero_gradients_where_overwritten():
    s = setup(False, True, True, False, "bfloat16")
    found = s.backward(Oracle(), Needs())
    asserts.zero(found.w[1])
    asserts.zero(found.bias[1])


@pytest.mark.rule("MAT-6")
def test_wgrad_dtype_and_dtypes_of_gradients():
    s = setup(False, True, True, False, "bfloat16")
    s.arrays["bias"] = s.arrays["bias"].astype(np.float16)
    s.op = dataclasses.replace(s.op, wgrad_dtype="float32")
    found = s.backward(Oracle(), Needs())
    names = [g.dtype.name for g in found]
    assert names == ["bfloat16", "float32", "float16", "bfloat16"]


@pytest.mark.rule("GRP-7")
def test_grad_input_keeps_its_tail():
    for scaled in (False, True):
        s = setup(False, False, scaled, False, "bfloat16")
        buffer = np.full((CASE.rows, CASE.k), cases.SENTINEL, cases.numpy_dtype("bfloat16"))
        found = s.backward(Oracle(), s.needs(), grad_input=buffer).x
        asserts.filled(found[CASE.valid :], cases.SENTINEL)
        asserts.bitwise(found[: CASE.valid], s.backward(Oracle(), s.needs()).x[: CASE.valid])


@pytest.mark.rule("MAT-9")
def test_a_scaled_bias_alone():
    """The example of contracts 3 for one product: zero weights leave y = c b, dc = <dy, b>, db = sum of c."""
    op = Linear(NAMES, scale_bias=True)
    x, w = np.ones((3, 2)), np.zeros((2, 2, 2))
    bias, scale, sizes = np.array([[2.0, 4.0], [1.0, 1.0]]), np.array([0.25, 0.5, 0.125]), np.array([2, 1], np.int32)
    s = Setup(op, {"x": x, "w": w, "bias": bias, "row_scale": scale}, sizes, np.ones((3, 2)))
    run = Oracle(exact=True)
    asserts.bitwise(s.forward(run), np.array([[0.5, 1.0], [1.0, 2.0], [0.125, 0.125]]))
    found = s.backward(run, Needs())
    asserts.bitwise(found.row_scale, np.array([6.0, 6.0, 2.0]))
    asserts.bitwise(found.bias, np.array([[0.75, 0.75], [0.125, 0.125]]))


@pytest.mark.parametrize("saved", SAVED_WEIGHTS)
def test_weights_are_saved_as_a_product_reads_them_or_as_they_came(saved):
    op = Linear(NAMES, transposed=True, recipe=FP8Current.replace(saved_weights=saved), few_rows=True)
    x, w, dy = ArraySpec((7, 32), "bfloat16"), ArraySpec((3, 16, 32), "bfloat16"), ArraySpec((7, 16), "bfloat16")
    run, needs, sizes = Planner(), Needs(bias=False, row_scale=False), ArraySpec((3,), "int32")
    found = gradients.linear_forward(run, op, x, w, sizes, needs=needs)
    assert (found.w is w) == (saved == "input")
    one = saved in ("auto", "forward")
    assert sum(each is not None for each in run.calls[1].outputs) == (4 if saved == "quantized" else 2)
    run.calls = []
    gradients.linear_backward(run, op, (x, w, None, None), found.x, found.w, sizes, None, None, dy, needs)
    assert [call.name for call in run.calls].count("quantize") == (2 if saved == "input" else 1)
    dgrad = next(call for call in run.calls if call.name == "grouped_matmul" and not dict(call.params)["contract_rows"])
    assert dict(dgrad.params)["rhs_axis"] == (1 if one else 2)


@pytest.mark.rule("MAT-2")
@pytest.mark.parametrize(
    ("recipe", "few", "weight", "one"),
    [
        (FP8Current, True, (3, 16, 32), True),
        (FP8Delayed, True, (3, 32, 16), True),
        (FP8Current, False, (3, 16, 32), False),
        (FP8Current, True, (3, 16, 24), False),
        (FP8Current, True, (3, 24, 16), False),
        (FP8Block, True, (3, 16, 32), False),
        (FP8Current.replace(dgrad=(FP8Current.dgrad[0], FORMATS["fp8_tensor_e5m2"])), True, (3, 16, 32), False),
        (FP8Current.replace(saved_weights="quantized"), True, (3, 16, 32), False),
        (FP8Current.replace(saved_weights="forward"), False, (3, 16, 24), True),
    ],
)
def test_weights_have_one_form_where_it_takes_less_time(recipe, few, weight, one):
    """Not if a layer keeps it for further passes, nor if a second one has other codes."""
    op, run, sizes = Linear(NAMES, recipe=recipe, few_rows=few), Planner(), ArraySpec((3,), "int32")
    x, w, scales = ArraySpec((7, weight[1]), "bfloat16"), ArraySpec(weight, "bfloat16"), ArraySpec((3,), "float32")
    extras = Extras(x=scales, w=scales) if recipe.delayed else NO_EXTRAS
    found = gradients.linear_forward(run, op, x, w, sizes, extras=extras, needs=EVERYTHING)
    assert isinstance(found.w, QTensor)
    assert (found.w.axis, found.w.other) == (1 if one else 2, None)
    forms = [axis for axis, _ in gradients.cached_forms(op, EVERYTHING, False)]
    assert forms == ([1] if recipe.saved_weights == "forward" else [1, 2])


def test_rows_are_few_below_a_number_per_group():
    most = linear_spec.FEW_ROWS * 3 - 1
    assert [linear_spec.has_few_rows(rows, 3) for rows in (0, most, most + 1)] == [True, True, False]


@pytest.mark.parametrize("saved", SAVED)
def test_magnitudes_are_found_once_where_they_are_requested(saved):
    """Of x and w in forward, of dy in backward; an operand that is stored a second time is not measured again."""
    op = Linear(NAMES, transposed=True, recipe=FP8Delayed.replace(saved=saved))
    sizes, scales = ArraySpec((3,), "int32"), ArraySpec((3,), "float32")
    x, w, dy = ArraySpec((7, 32), "bfloat16"), ArraySpec((3, 16, 32), "bfloat16"), ArraySpec((7, 16), "bfloat16")
    extras = Extras(None, scales, scales, scales)

    def measured(run: Planner) -> list[bool]:
        calls, run.calls = run.calls, []
        return [
            call.outputs[RESULTS["quantize"].index("amax")] is not None for call in calls if call.name == "quantize"
        ]

    run, needs = Planner(), Needs(bias=False, row_scale=False)
    found = gradients.linear_forward(run, op, x, w, sizes, extras=extras, needs=needs)
    assert measured(run) == [True, True]
    kept = found.x, found.w
    back = gradients.linear_backward(run, op, (x, w, None, None), *kept, sizes, None, None, dy, needs, extras=extras)
    assert measured(run) == ([True] if saved == "quantized" else [True, False])
    assert [each is not None for each in (*found.amax, *back.amax)] == [True, True, False, False, False, True]
    gradients.linear(run, op, x, w, sizes, scales=(scales, scales))
    assert measured(run) == [False, False]
