"""Adapters of frozen weights: finite differences, a float64 formula for every format, what is saved and launched."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from grouped_core import gradients, lora, rounding
from grouped_core.arrays import ArrayRunner, quantize
from grouped_core.calls import RESULTS, ArraySpec, Call, spec_of
from grouped_core.formats import FORMATS, QTensor
from grouped_core.gradients import Needs
from grouped_core.linear_spec import Linear, Names
from grouped_core.lora import NO_NEEDS, Adapter, LoraNeeds
from grouped_core.products import operand_spec
from grouped_core.quantizing import dequantize
from grouped_core.recipes import FP32_MODES, MXFP8
from grouped_core.reference import Oracle
from tests import asserts, bounds, cases
from tests.bounds import Bounded, Expected
from tests.core.adapter_tools import Recorder

NAMES = Names("x", "w")
CASE = cases.Case("tiny", (3, 0, 2), 7, 4, 3, frozenset())
WIDER = cases.Case("wider", (37, 0, 70), 120, 96, 64, frozenset())
KEY = np.array([0x243F6A88, 0x85A308D3], np.uint32)
ALL = LoraNeeds()


@dataclasses.dataclass
class Setup:
    """The operation, its operands by name (None where absent), in the order of the rules, and dy."""

    op: Linear
    adapter: Adapter
    arrays: dict[str, Any]
    sizes: np.ndarray
    dy: np.ndarray
    key: np.ndarray | None

    def forward(self, run: Any, needs: LoraNeeds = NO_NEEDS, **changed: Any) -> lora.Forward:
        a = {**self.arrays, **changed}
        rows = (a["x"], a["w"], a["a"], a["b"], self.sizes, a["bias"], a["row_scale"])
        return lora.forward(run, self.op, self.adapter, *rows, None, self.key, needs=needs)

    def backward(self, run: Any, needs: LoraNeeds, **options: Any) -> Any:
        specs, operands = self.of_backward(run, needs)
        factors = (run.spec(self.arrays["a"]), run.spec(self.arrays["b"]))
        return lora.backward(run, self.op, self.adapter, specs, factors, *operands, needs=needs, **options)[0]

    def of_backward(self, run: Any, needs: LoraNeeds) -> tuple[Any, tuple[Any, ...]]:
        """(specs, operands from x to the key) of backward, from nothing but what forward saves."""
        saved, a = self.forward(run, needs), self.arrays
        specs: Any = tuple(operand_spec(run, a[name]) for name in ("x", "w", "bias", "row_scale"))
        keep = lora.kept(self.op, needs, a["bias"] is not None, a["row_scale"] is not None)
        named: Any = {name: a[name] if getattr(keep, name) else None for name in ("a", "b", "bias", "row_scale")}
        operands = (saved.x, saved.w, saved.u, named["a"], named["b"], self.sizes, named["bias"], named["row_scale"])
        return specs, (*operands, self.dy, self.key)

    def needs(self, wanted: LoraNeeds = ALL) -> LoraNeeds:
        """`wanted` without the operands that are absent."""
        return LoraNeeds(*(need and self.arrays[name] is not None for name, need in wanted._asdict().items()))


def setup(
    case: cases.Case = CASE,
    dtype: str = "float32",
    *,
    transposed: bool = False,
    bias: bool = False,
    row_scale: bool = False,
    scale_bias: bool = False,
    dropout: float = 0.0,
    rank: int = 2,
    exact: bool = False,
) -> Setup:
    p = cases.problem(case, dtype, transposed=transposed)
    op = Linear(NAMES, transposed=transposed, scale_bias=scale_bias)
    a = cases.normal((case.groups, case.k, rank), dtype, "a")
    b = cases.normal((case.groups, rank, case.n), dtype, "b")
    if transposed:
        a, b = (np.ascontiguousarray(each.swapaxes(1, 2)) for each in (a, b))
    kept = {"x": p.x, "w": p.w, "a": a, "b": b}
    kept |= {"bias": p.bias if bias else None, "row_scale": p.row_scale if row_scale else None}
    if exact:
        kept = {name: None if each is None else each.astype(np.float64) for name, each in kept.items()}
    adapter = Adapter("lora", 0.5, dropout)
    return Setup(op, adapter, kept, p.group_sizes, p.dy.astype(np.float64) if exact else p.dy, KEY if dropout else None)


OPTIONS = {
    "transposed": (False, True),
    "bias": (False, True),
    "row_scale": (False, True),
    "scale_bias": (False, True),
    "dropout": (0.0, 0.4),
    "frozen": ("", "row_scale", "x"),
}
every_option = pytest.mark.matrix(
    **OPTIONS, valid=lambda bias, row_scale, scale_bias, **_: not scale_bias or (bias and row_scale)
)


@pytest.mark.rule("LOR-1", "LOR-4")
@every_option
def test_gradients_are_finite_differences(transposed, bias, row_scale, scale_bias, dropout, frozen):
    options = {"bias": bias, "row_scale": row_scale, "scale_bias": scale_bias, "dropout": dropout}
    s = setup(transposed=transposed, exact=True, **options)
    run = Oracle(exact=True)
    found = s.backward(run, s.needs(ALL._replace(**{frozen: False} if frozen else {})))
    step = 1e-3
    for name, grad in found._asdict().items():
        array = s.arrays[name]
        if array is None or name == frozen:
            assert grad is None
            continue
        expected = np.zeros_like(array)
        for at in np.ndindex(array.shape):
            if name in ("x", "row_scale") and at[0] >= CASE.valid:
                continue
            ends = []
            for sign in (1, -1):
                moved = array.copy()
                moved[at] += sign * step
                ends.append(np.sum((s.dy * s.forward(run, **{name: moved}).y)[: CASE.valid]))
            expected[at] = (ends[0] - ends[1]) / (2 * step)
        scale = np.max(np.abs(expected))
        error = Bounded(expected, np.full_like(expected, bounds.FINITE_DIFFERENCES * scale), "float64")
        asserts.within(grad, error, name)


def formula(s: Setup, w: np.ndarray) -> np.ndarray:
    """y in float64, from the values of the weight [G, K, N], rows times the whole matrix W + s A B."""
    a, b, x = (np.asarray(s.arrays[name]).astype(np.float64) for name in ("a", "b", "x"))
    if s.op.transposed:
        a, b = a.swapaxes(1, 2), b.swapaxes(1, 2)
    y = np.zeros((len(x), w.shape[2]))
    start = 0
    for g, end in enumerate(np.cumsum(s.sizes)):
        y[start:end] = x[start:end] @ (w[g] + s.adapter.scaling * a[g] @ b[g])
        start = end
    return y


def values_of(weight: Any, *, transposed: bool) -> np.ndarray:
    """[G, K, N] in float64 of a weight, by the oracle's dequantising."""
    if isinstance(weight, QTensor):
        weight = dequantize(Oracle(), weight, None, "float32")
    weight = np.asarray(weight).astype(np.float64)
    return weight.swapaxes(1, 2) if transposed else weight


BASES = ("float32", "bfloat16", "float16", "fp8_tensor", "fp8_128x128", "mxfp8", "mxfp4", "nvfp4", "nvfp4_2d")


def with_base(s: Setup, base: str) -> Setup:
    """The problem with its weight in a format, quantised along K alone."""
    if base in FORMATS and not FORMATS[base].plain:
        axis = s.op.weight_axes()[0]
        s.arrays["w"] = quantize(s.arrays["w"], FORMATS[base], axis=axis)
    return s


def bounded(s: Setup) -> Setup:
    """The same problem for the runner that bounds errors."""
    kept = {
        name: each if each is None or isinstance(each, QTensor) else Bounded.of(each) for name, each in s.arrays.items()
    }
    return dataclasses.replace(s, arrays=kept, dy=Bounded.of(s.dy))


@pytest.mark.rule("LOR-1", "LOR-2", "LOR-4")
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_base_follows_a_float64_formula(base, transposed):
    """Native results within the rounding of the products; dgrad reads the codes that were made for forward."""
    dtype = base if base in cases.DTYPES else "bfloat16"
    s = with_base(setup(WIDER, dtype, transposed=transposed, rank=8), base)
    run, rows = ArrayRunner(s.dy), slice(0, WIDER.valid)
    w = values_of(s.arrays["w"], transposed=transposed)
    limit = bounded(s).forward(Expected(), ALL).y
    exact = formula(s, w)[rows]
    asserts.within(s.forward(run).y[rows], Bounded(exact, limit.error[rows], dtype), "y")
    asserts.zero(s.forward(run).y[WIDER.valid :], "tail")

    found = s.backward(run, s.needs())
    limits = bounded(s).backward(Expected(), s.needs())
    a, b, x, dy = (np.asarray(each).astype(np.float64) for each in (s.arrays["a"], s.arrays["b"], s.arrays["x"], s.dy))
    if transposed:
        a, b = a.swapaxes(1, 2), b.swapaxes(1, 2)
    dx, da, db = np.zeros(x.shape), np.zeros(a.shape), np.zeros(b.shape)
    start = 0
    for g, end in enumerate(np.cumsum(s.sizes)):
        at, scaling = slice(start, end), s.adapter.scaling
        dx[at] = dy[at] @ (w[g] + scaling * a[g] @ b[g]).T
        da[g] = scaling * x[at].T @ (dy[at] @ b[g].T)
        db[g] = scaling * (x[at] @ a[g]).T @ dy[at]
        start = end
    if transposed:
        da, db = da.swapaxes(1, 2), db.swapaxes(1, 2)
    for name, exact in (("x", dx), ("a", da), ("b", db)):
        error = getattr(limits, name).error
        valid = rows if name == "x" else slice(None)
        asserts.within(getattr(found, name)[valid], Bounded(exact[valid], error[valid], dtype), name)
    asserts.zero(found.a[1], "A of an empty group")
    asserts.zero(found.b[1], "B of an empty group")


@pytest.mark.rule("LOR-1")
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("scaled", [False, True])
def test_step_0_is_bitwise_the_base(base, scaled):
    dtype = base if base in cases.DTYPES else "bfloat16"
    s = with_base(setup(WIDER, dtype, transposed=True, bias=True, row_scale=scaled, rank=8), base)
    run, a = ArrayRunner(s.dy), s.arrays
    zero = np.zeros_like(a["b"])
    found = s.forward(run, b=zero).y
    alone = gradients.linear(run, s.op, a["x"], a["w"], s.sizes, a["bias"], a["row_scale"])
    asserts.bitwise(found, alone)
    assert np.any(np.asarray(s.forward(run).y) != alone), "an adapter that does nothing"


@pytest.mark.rule("LOR-5")
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_merged_weights_equal_the_adapter_within_one_rounding(dtype):
    """Merging rounds each element of W + s A B once; so rows may move by |x| times half a step of the weight."""
    s = setup(WIDER, dtype, rank=8)
    run, rows = ArrayRunner(s.dy), slice(0, WIDER.valid)
    a, b, w, x = (np.asarray(s.arrays[name]).astype(np.float64) for name in ("a", "b", "w", "x"))
    exact, size = w + s.adapter.scaling * a @ b, np.abs(w) + s.adapter.scaling * np.abs(a) @ np.abs(b)
    (k, n), sizes = w.shape[1:], np.full(len(w), w.shape[1], np.int32)
    as_rows = (s.arrays["w"].reshape(-1, n), s.arrays["a"].reshape(-1, 8), s.arrays["b"])
    merged = lora.merged(run, s.adapter, *as_rows, sizes).reshape(-1, k, n)
    assert run.spec(merged) == run.spec(s.arrays["w"])
    asserts.within(merged, Bounded(exact, bounds.half_ulp(np.abs(exact), dtype) + 2.0**-20 * size, dtype), "W")
    plain = gradients.linear(run, s.op, s.arrays["x"], merged, s.sizes)[rows].astype(np.float64)
    unmerged = s.forward(run).y[rows].astype(np.float64)
    moved = np.zeros_like(plain)
    start = 0
    for g, end in enumerate(np.cumsum(s.sizes)):
        moved[start:end] = np.abs(x[start:end]) @ bounds.half_ulp(np.abs(exact[g]), dtype)
        start = end
    limit = bounded(s).forward(Expected()).y.error[rows]
    assert np.all(np.abs(plain - unmerged) <= moved + 2 * limit)


@pytest.mark.rule("LOR-2", "LOR-4")
@pytest.mark.parametrize(
    ("needs", "kept"),
    [
        (LoraNeeds(True, True, True, False, False), "xwuab"),
        (LoraNeeds(True, False, True, False, False), "wuab"),
        (LoraNeeds(False, True, True, False, False), "xub"),
        (LoraNeeds(False, False, True, False, False), "u"),
        (LoraNeeds(False, True, False, False, False), "xb"),
        (LoraNeeds(True, False, False, False, False), "wab"),
        (NO_NEEDS, ""),
    ],
)
def test_nothing_is_saved_or_launched_for_frozen_parts(needs, kept):
    s = setup(exact=True)
    keep = lora.kept(s.op, needs, False, False)
    assert "".join(name for name in "xwuab" if getattr(keep, name)) == kept
    saved = s.forward(Oracle(exact=True), needs)
    assert [saved.x is not None, saved.w is not None, saved.u is not None] == [keep.x, keep.w, keep.u]
    run = Recorder()
    found = s.backward(run, needs)
    assert [each is not None for each in found] == list(needs)
    wanted = [s.arrays[name].shape for name in ("a", "b") if getattr(needs, name)]
    assert run.gradients == sorted(wanted), "a weight gradient too many, or too few"
    assert s.arrays["w"].shape not in run.gradients
    at_once = needs.b and (needs.x or needs.a)
    assert run.count("low_rank_grads") == at_once, "dy is read once for v and for the gradient of B"


@pytest.mark.rule("LOR-4", "MAT-9")
@pytest.mark.matrix(
    dtype=cases.DTYPES,
    transposed=(False, True),
    row_scale=(False, True),
    scale_bias=(False, True),
    dropout=(0.0, 0.4),
    scaling=(1.0, 0.5),
    fp32=(None, *FP32_MODES),
    rows_hint=(0, 64),
    result=(None, "float32"),
    frozen=("", "a", "x", "b"),
)
def test_a_gradient_of_b_made_along_with_v_has_the_bits_of_one_of_its_own(
    dtype, transposed, row_scale, scale_bias, dropout, scaling, fp32, rows_hint, result, frozen
):
    """And every other gradient has its bits. Where y is wider than x, so is dy, which two products read."""
    s = setup(WIDER, dtype, transposed=transposed, bias=True, row_scale=row_scale, dropout=dropout, rank=8)
    s.op = dataclasses.replace(
        s.op, scale_bias=scale_bias and row_scale, fp32=fp32, rows_hint=rows_hint, result_dtype=result
    )
    s.adapter, s.dy = dataclasses.replace(s.adapter, scaling=scaling), s.dy.astype(cases.numpy_dtype(result or dtype))
    needs = s.needs(ALL._replace(**{frozen: False} if frozen else {}))
    run = Counting(s.dy)
    specs, operands = s.of_backward(run, needs)
    one, two = (
        lora.main_grads(run, s.op, s.adapter, specs, *operands, needs=needs, new_b=new_b) for new_b in (True, False)
    )
    at_once = needs.b and (result or dtype) == dtype
    assert run.counts["low_rank_grads"] == at_once
    assert (one.b is not None) == at_once
    assert two.b is None
    if at_once:
        assert (one.rows_b, one.dy_b) == (None, None)
        up = s.adapter.up(s.op)
        db = gradients.weight_grad(run, up, run.spec(s.arrays["b"]), two.rows_b, two.dy_b, s.sizes)
        asserts.bitwise(one.b, db, "b")
    mode = "ieee" if fp32 == "ieee" else "tf32x3"  # `fp32` is the least accurate one that is accepted
    assert run.options == {(mode, rows_hint, 0, 1)}, "every product has the same options"
    assert one.dy_a is None or run.spec(one.dy_a).dtype == dtype, "v has the dtype of x"
    for name in ("x", "bias", "row_scale", "rows_a", "dy_a", *(() if at_once else ("rows_b", "dy_b"))):
        first, second = getattr(one, name), getattr(two, name)
        assert (first is None) == (second is None), name
        if first is not None:
            asserts.bitwise(first, second, name)


@pytest.mark.rule("LOR-4", "MAT-11")
def test_a_gradient_of_b_that_is_accumulated_is_a_product_of_its_own():
    s, run = setup(exact=True), Recorder()
    into = np.zeros(s.arrays["b"].shape)
    s.backward(run, s.needs(), into=(None, into))
    assert run.count("low_rank_grads") == 0
    assert run.gradients == sorted(s.arrays[name].shape for name in ("a", "b"))


@pytest.mark.rule("LOR-2")
def test_nothing_is_scaled_or_quantised_for_a_gradient_of_the_base():
    """The weight gradient of a base that is not frozen would scale rows [M, N] and quantise along rows."""
    s = setup(exact=True, row_scale=True)
    run = Recorder()
    s.backward(run, ALL._replace(bias=False, row_scale=False))
    found = [call.outputs[0] for call in run.calls if call.name == "scale_rows"]
    assert {spec.shape[1] for spec in found if spec is not None} == {2}
    wider = setup(WIDER, "bfloat16", rank=8)
    wider.op = dataclasses.replace(wider.op, recipe=MXFP8)
    kept = Counting(wider.dy)
    wider.backward(kept, ALL._replace(bias=False, row_scale=False))
    assert kept.counts["quantize"] == 3, "x, both forms of W at once, and dy, each along features"
    assert all(not cross for cross in kept.crossed)


class Counting(ArrayRunner):
    """Counts the calls that it runs, and notes the options of products and which rows are quantised along rows."""

    def __init__(self, like: Any) -> None:
        super().__init__(like)
        self.counts: Counter[str] = Counter()
        self.options: set[tuple[Any, ...]] = set()
        self.crossed: list[bool] = []

    def __call__(self, call: Call, arrays: Sequence[Any]) -> tuple[Any, ...]:
        self.counts[call.name] += 1
        if "fp32_mode" in (params := dict(call.params)):
            names = ("fp32_mode", "rows_hint", "batch_invariant", "aligned_tables")
            self.options.add(tuple([params[name] for name in names]))
        if call.name == "quantize" and (spec := call.inputs[0]) is not None and len(spec.shape) == 2:
            self.crossed.append(call.outputs[RESULTS["quantize"].index("cross_values")] is not None)
        return super().__call__(call, arrays)


@pytest.mark.rule("LOR-2")
def test_dgrad_reads_the_form_that_was_made_for_it_if_there_is_one():
    s = setup(WIDER, "bfloat16", rank=8)
    both = quantize(s.arrays["w"], FORMATS["mxfp4"], axis=(1, 2))
    run = ArrayRunner(s.dy)
    found = []
    for w in (both, both.other, dataclasses.replace(both, other=None)):
        specs: Any = (run.spec(s.arrays["x"]), operand_spec(run, w), None, None)
        needs = Needs(True, False, False, False)
        op = dataclasses.replace(s.op, recipe=s.op.resolve(specs[0], operand_spec(run, both)))
        found.append(gradients.linear_grads(run, op, specs, None, w, s.sizes, None, None, s.dy, needs).x)
    asserts.bitwise(found[0], found[1])
    assert np.any(found[0] != found[2])


@pytest.mark.rule("LOR-1")
def test_masks_and_factors_are_those_of_the_specification():
    """Word `c mod 4` of Philox at (c / 4, row in its group, group, stream); what is kept grows by 1 / (1 - p)."""
    s = setup(WIDER, "float32", dropout=0.25, rank=8)
    s.adapter = dataclasses.replace(s.adapter, stream=1)
    x, start = s.arrays["x"].copy(), 0
    for g, end in enumerate(np.cumsum(s.sizes)):
        words = rounding.random_words(int(KEY[0]) | int(KEY[1]) << 32, end - start, WIDER.k, g, 1)
        x[start:end] *= np.where((words >> 8) * 2.0**-24 < 0.25, 0, np.float32(1 / 0.75))
        start = end
    run, plain = ArrayRunner(s.dy), dataclasses.replace(s, adapter=Adapter("lora", 0.5), key=None)
    zero = {"w": np.zeros_like(s.arrays["w"])}
    asserts.bitwise(s.forward(run, **zero).y, plain.forward(run, x=x, **zero).y)


@pytest.mark.rule("LOR-1", "MAT-9")
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_the_gradient_of_x_is_the_same_without_a_gradient_of_the_row_scale(dropout):
    """dx then comes from one pass, and else from the unscaled product that the gradient of the row scale reads."""
    s = setup(exact=True, row_scale=True, dropout=dropout)
    run, needs = Oracle(exact=True), s.needs()
    both: tuple[Any, Any] = s.backward(run, needs), s.backward(run, needs._replace(row_scale=False))
    np.testing.assert_allclose(both[1].x, both[0].x, rtol=bounds.ORACLES, atol=bounds.ORACLES)
    np.testing.assert_allclose(both[1].a, both[0].a, rtol=bounds.ORACLES, atol=bounds.ORACLES)


@pytest.mark.rule("LOR-4", "MAT-11")
def test_gradients_are_added_to_accumulators():
    s = setup(WIDER, "bfloat16", rank=8)
    run = ArrayRunner(s.dy)
    fresh = s.backward(run, s.needs())
    into = tuple(np.full(s.arrays[name].shape, 0.5, np.float32) for name in "ab")
    s.backward(run, s.needs(), into=into)
    for name, array in zip("ab", into, strict=True):
        asserts.filled(array[1], 0.5, f"{name} of an empty group")
        rounded = (array - np.float32(0.5)).astype(np.float64)
        close = Bounded(rounded, np.abs(rounded) * 2.0**-8 + 2.0**-18 * (1 + np.abs(rounded)), "bfloat16")
        asserts.within(getattr(fresh, name), close, name)


@pytest.mark.rule("LOR-1")
def test_the_mask_of_backward_is_that_of_forward():
    """With W = 0 and x = 1, y = s drop(1) A B; the elements that are dropped have no gradient."""
    s = setup(WIDER, "float32", dropout=0.5, rank=1)
    run = ArrayRunner(s.dy)
    s.arrays["w"][...] = 0
    for name in ("a", "b"):
        s.arrays[name][...] = 1
    dx = s.backward(run, s.needs()).x[: WIDER.valid]
    dropped = dx == 0
    assert 0.45 < np.mean(dropped) < 0.55
    x = s.arrays["x"].copy()
    x[: WIDER.valid][dropped] = 1e6
    asserts.bitwise(s.forward(run, x=x).y, s.forward(run).y)
    other = dataclasses.replace(s, key=KEY + np.uint32(1))
    assert np.any((other.backward(run, s.needs()).x[: WIDER.valid] == 0) != dropped)
    streams = dataclasses.replace(s, adapter=dataclasses.replace(s.adapter, stream=1))
    assert np.any((streams.backward(run, s.needs()).x[: WIDER.valid] == 0) != dropped)


X, W = ArraySpec((6, 8), "bfloat16"), ArraySpec((3, 8, 4), "bfloat16")
A, B = ArraySpec((3, 8, 2), "bfloat16"), ArraySpec((3, 2, 4), "bfloat16")
BAD = {
    "rank_0": ({"a": A._replace(shape=(3, 8, 0))}, ValueError, ["`lora[0]`", "a rank of 0", "from 1 to 256", "choose"]),
    "rank_257": (
        {"a": A._replace(shape=(3, 8, 257))},
        ValueError,
        ["`lora[0]`", "a rank of 257", "from 1 to 256", "choose a smaller"],
    ),
    "two_axes": ({"a": A._replace(shape=(8, 2))}, ValueError, ["`lora[0]`", "(8, 2)", "[G, K, r]", "stack"]),
    "groups": ({"a": A._replace(shape=(2, 8, 2))}, ValueError, ["`lora[0]`", "(2, 8, 2)", "(3, 8, 2)", "make"]),
    "inner": ({"b": B._replace(shape=(3, 3, 4))}, ValueError, ["`lora[1]`", "(3, 3, 4)", "(3, 2, 4)", "make"]),
    "dtype": ({"b": B._replace(dtype="float32")}, TypeError, ["`lora[1]`", "float32", "bfloat16", "cast"]),
    "float8": (
        {"x": X._replace(dtype="float8_e4m3fn")},
        TypeError,
        ["`x`", "float8_e4m3fn", "bfloat16", "pass the array before"],
    ),
    "key": ({"key": ArraySpec((2,), "int32")}, ValueError, ["`lora_key`", "int32[2]", "uint32[2]", "pass such"]),
}


@pytest.mark.rule("ERR-1", "LOR-1")
@pytest.mark.parametrize("name", BAD)
def test_adapters_that_do_not_fit_are_refused(name):
    changed, kind, fragments = BAD[name]
    given = {"x": X, "w": W, "a": A, "b": B, "key": None} | changed
    with asserts.refused(kind, fragments):
        lora.check(Linear(NAMES), Adapter(), **given)


@pytest.mark.rule("ERR-1", "LOR-1")
def test_a_pair_of_weights_is_refused():
    with asserts.refused(ValueError, ["`w`", "two arrays beside `lora`", "one array", "pass gate"]):
        lora.check(Linear(NAMES, paired=True), Adapter(), X, W, A, B, None)


@pytest.mark.rule("ERR-1", "LOR-1")
@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ((float("inf"), 0.0, None), ["`lora_scaling`", "inf", "a finite number", "alpha / r"]),
        ((1e39, 0.0, None), ["`lora_scaling`", "1e+39", "a finite number, as float32", "alpha / r"]),
        (("2", 0.0, None), ["`lora_scaling`", "'2'", "a finite number", "alpha / r"]),
        ((1.0, 1.0, KEY), ["`lora_dropout`", "1.0", "0 to 1", "pass a rate"]),
        ((1.0, 0.1, None), ["`lora_key`", "None with a dropout", "if and only if", "pass both"]),
        ((1.0, 0.0, KEY), ["`lora_key`", "given without", "if and only if", "pass both"]),
    ],
)
def test_options_out_of_range_are_refused(options, fragments):
    with asserts.refused(ValueError, fragments):
        lora.option("lora", *options)


@pytest.mark.rule("LOR-2")
@pytest.mark.parametrize("format", [name for name, fmt in FORMATS.items() if not (fmt.plain or fmt.rotate)])
@pytest.mark.parametrize("shape", [(2, 33, 47), (2, 64, 128)])
def test_codes_are_contracted_along_either_axis(format, shape):
    """The product of dgrad with codes made for forward is bitwise that with their values."""
    found = FORMATS[format]
    w = cases.normal(shape, "float32", "w")
    q = quantize(w.astype(cases.numpy_dtype("bfloat16")), found, axis=2)
    run, sizes = ArrayRunner(w), np.array([5, 4], np.int32)
    dy = cases.normal((9, shape[1]), "float32", "dy")
    op = Linear(NAMES, transposed=True)
    specs: Any = (ArraySpec((9, shape[2]), "float32"), operand_spec(run, q), None, None)
    needs = Needs(True, False, False, False)
    dx: Any = gradients.linear_grads(run, op, specs, None, q, sizes, None, None, dy, needs).x
    plain = dequantize(run, q, None, "float32")
    specs = (specs[0], spec_of(plain), None, None)
    if found.block and q.group_scales is None:
        exact = gradients.linear_grads(run, op, specs, None, plain, sizes, None, None, dy, needs).x
        asserts.bitwise(dx, exact)
    else:  # scales of whole groups multiply sums
        close = dy[:5].astype(np.float64) @ plain[0].astype(np.float64)
        limit = np.abs(dy[:5]).astype(np.float64) @ np.abs(plain[0]).astype(np.float64) * shape[1] * 2.0**-23
        asserts.within(dx[:5], Bounded(close, limit, "float32"))


@pytest.mark.rule("LOR-1")
def test_numbers_of_numpy_are_numbers() -> None:
    option = lora.option("lora", np.float32(0.5), np.float32(0.25), object())
    assert (type(option.scaling), option.scaling, option.dropout) == (float, 0.5, 0.25)
    assert lora.layer_options("MoE", np.int64(4), np.int32(2), 0.0) == lora.LayerOptions(4, 0.5, 0.0)
