"""The MLP's rules on the oracle: finite differences, what is kept, and what is refused in which words."""

from __future__ import annotations

import numpy as np
import pytest

from grouped_core import mlp
from grouped_core.activations import GATED_KINDS, PLAIN_KINDS, Activation
from grouped_core.calls import RESULTS, ArraySpec
from grouped_core.mlp_spec import POLICIES, Mlp, MlpNames, MlpNeeds, MlpSpecs, Residuals, check, kept
from grouped_core.plans import Planner
from grouped_core.quantizing import Extras
from grouped_core.recipes import FP8Current, FP8Delayed
from grouped_core.reference import Oracle
from tests import asserts, bounds, cases

CASE = cases.Case("tiny", (3, 0, 2), 7, 4, 3, frozenset())
FIELDS = MlpNeeds._fields
ALL_NEEDS = tuple(MlpNeeds(*map(bool, bits)) for bits in np.ndindex(2, 2, 2, 2, 2, 2))


def arrays(activation: Activation, transposed: bool, dtype: str = "float64") -> dict[str, np.ndarray]:
    wide = activation.fc1_width(CASE.n)
    shapes = {
        "x": (CASE.rows, CASE.k),
        "wi": (CASE.groups, CASE.k, wide),
        "wo": (CASE.groups, CASE.n, CASE.k),
        "probs": (CASE.rows,),
        "wi_bias": (CASE.groups, wide),
        "wo_bias": (CASE.groups, CASE.k),
    }
    held = {name: cases.normal(shape, "float32", name) for name, shape in shapes.items()}
    if transposed:
        held |= {name: np.ascontiguousarray(held[name].swapaxes(1, 2)) for name in ("wi", "wo")}
    return {name: array.astype(cases.numpy_dtype(dtype)) for name, array in held.items()}


def gradients(
    run: Oracle, op: Mlp, a: dict[str, np.ndarray], dy: np.ndarray, needs: MlpNeeds
) -> list[np.ndarray | None]:
    """Every gradient that is needed, from nothing but what the policy keeps."""
    sizes = np.array(CASE.sizes, np.int32)
    keep = kept(op, needs, True, True, True)
    x, wi, wo, p, b1, b2 = (a[name] for name in FIELDS)
    found = mlp.mlp(run, op, x, wi, wo, sizes, p, b1, b2, needs=needs)
    h, z = found.h, found.z
    assert (h is not None, z is not None) == (keep.h, keep.z)
    specs = MlpSpecs(*(run.spec(a[name]) for name in FIELDS))

    def held(name: str) -> np.ndarray | None:
        return a[name] if getattr(keep, name) else None

    x, wi, wo, p, b1, b2 = (held(name) for name in FIELDS)
    main = mlp.main_grads(run, op, specs, x, h, z, wi, wo, sizes, p, b1, b2, dy, needs)
    dw1 = dw2 = None
    if needs.wi:
        dw1 = mlp.weight_grad(run, op.fc1(), specs.wi, x, main.dh, sizes)
    if needs.wo:
        dw2 = mlp.weight_grad(run, op.fc2(), specs.wo, main.z, dy, sizes)
    return [main.x, dw1, dw2, main.probs, main.wi_bias, main.wo_bias]


@pytest.mark.rule("MLP-1", "MLP-3", "MLP-5")
@pytest.mark.parametrize(
    ("kind", "transposed"),
    # Layouts of weights in turn: an activation does not see them.
    [
        pytest.param(kind, transposed, marks=() if at % 2 == transposed else pytest.mark.slow)
        for kinds in (PLAIN_KINDS, GATED_KINDS)
        for at, kind in enumerate(kinds)
        for transposed in (False, True)
    ],
)
def test_gradients_are_finite_differences(kind, transposed):
    activation = Activation(kind, interleave=3 if kind == "swiglu" else None)
    op = Mlp(MlpNames(), activation, transposed=transposed)
    run, a = Oracle(exact=True), arrays(activation, transposed)
    sizes, dy = np.array(CASE.sizes, np.int32), cases.normal((CASE.rows, CASE.k), "float32", "dy").astype(np.float64)
    found = gradients(run, op, a, dy, MlpNeeds())

    def total(**moved: np.ndarray) -> float:
        given = {**a, **moved}
        y = mlp.mlp(run, op, given["x"], given["wi"], given["wo"], sizes, *(given[n] for n in FIELDS[3:])).y
        return float(np.sum((dy * y)[: CASE.valid]))

    step = 1e-4  # errs as its square, and as rounding over it: 1e-8 either way
    for name, gradient in zip(FIELDS, found, strict=True):
        expected = np.zeros_like(a[name])
        for at in np.ndindex(expected.shape):
            if name in ("x", "probs") and at[0] >= CASE.valid:
                continue
            ends = []
            for sign in (1, -1):
                moved = a[name].copy()
                moved[at] += sign * step
                ends.append(total(**{name: moved}))
            expected[at] = (ends[0] - ends[1]) / (2 * step)
        error = bounds.FINITE_DIFFERENCES * np.max(np.abs(expected))
        asserts.within(gradient, bounds.Bounded(expected, np.full_like(expected, error), "float64"), name)


@pytest.mark.rule("ALL-4", "MLP-2", "MLP-9", "MLP-11")
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_kept_is_enough_and_policies_agree(policy):
    activation = Activation("clamped_qgeglu")
    a, dy = arrays(activation, False, "bfloat16"), cases.normal((CASE.rows, CASE.k), "bfloat16", "dy")
    full = gradients(Oracle(), Mlp(MlpNames(), activation), a, dy, MlpNeeds())
    op = Mlp(MlpNames(), activation, residuals=Residuals(policy))
    for needs in ALL_NEEDS:
        for name, need, one, whole in zip(FIELDS, needs, gradients(Oracle(), op, a, dy, needs), full, strict=True):
            assert (one is not None) == need, f"{name} with {needs}"
            if need:
                asserts.bitwise(one, whole, f"{name} with {needs} under {policy}")


KEPT = {
    "grad_mode_off": ("save_fc1", (), ""),
    "save_fc1": ("save_fc1", FIELDS, "x h wi wo probs wo_bias"),
    "save_all": ("save_all", FIELDS, "x h z wi wo probs wo_bias"),
    "save_input": ("save_input", FIELDS, "x wi wo probs wi_bias wo_bias"),
    "w1_frozen": ("save_fc1", ("x", "wo", "probs"), "h wi wo probs wo_bias"),  # no x
    "w2_frozen": ("save_all", ("x", "wi"), "x h wi wo probs"),  # no z
    "x_needs_none": ("save_fc1", ("wi",), "x h wo probs"),  # no W1
    "w2_alone": ("save_fc1", ("wo",), "z"),  # no dz
    "w2_alone_save_input": ("save_input", ("wo",), "x wi probs wi_bias"),
    "b2_alone": ("save_fc1", ("wo_bias",), "probs"),
    "p_alone": ("save_fc1", ("probs",), "h wo wo_bias"),
}
"""Rows of the contract: policy, arguments that need gradients, what is kept."""


@pytest.mark.rule("MLP-9", "MLP-11")
@pytest.mark.parametrize(("policy", "needed", "expected"), KEPT.values(), ids=KEPT)
def test_the_table_of_what_is_kept(policy: str, needed: tuple[str, ...], expected: str):
    op = Mlp(MlpNames(), Activation("swiglu"), residuals=Residuals(policy))
    found = kept(op, MlpNeeds(*(name in needed for name in FIELDS)), True, True, True)
    assert " ".join(name for name, keep in found._asdict().items() if keep) == expected


@pytest.mark.rule("ERR-1", "MLP-5", "MLP-6")
def test_refusals():
    def spec(*shape: int, dtype: str = "bfloat16") -> ArraySpec:
        return ArraySpec(shape, dtype)

    op = Mlp(MlpNames(), Activation("swiglu"))
    x, wi, wo, sizes = spec(6, 8), spec(3, 8, 32), spec(3, 16, 8), spec(3, dtype="int32")
    assert check(op, x, wi, wo, sizes) == spec(6, 8)
    with asserts.refused(ValueError, ("`wi`", "24 columns", "expected 32 for swiglu", "F = 16", "side by side")):
        check(op, x, spec(3, 8, 24), wo, sizes)
    with asserts.refused(ValueError, ("`wo`", "(3, 16, 9)", "K = 8", "rhs_transposed")):
        check(op, x, wi, spec(3, 16, 9), sizes)
    with asserts.refused(ValueError, ("`wo`", "(16, 8)", "three axes", "stack")):
        check(op, x, wi, spec(16, 8), sizes)
    with asserts.refused(TypeError, ("`wo`", "float32", "bfloat16", "cast")):
        check(op, x, wi, spec(3, 16, 8, dtype="float32"), sizes)
    with asserts.refused(ValueError, ("`probs`", "(5,)", "(6,)", "one probability per row")):
        check(op, x, wi, wo, sizes, spec(5, dtype="float32"))
    with asserts.refused(TypeError, ("`probs`", "int32", "float32", "cast")):
        check(op, x, wi, wo, sizes, spec(6, dtype="int32"))
    with asserts.refused(ValueError, ("`wo_bias`", "(3, 7)", "(3, 8)", "one bias vector per group")):
        check(op, x, wi, wo, sizes, None, None, spec(3, 7))
    with asserts.refused(ValueError, ("`out`", "(5, 8)", "(6, 8)", "allocate")):
        check(op, x, wi, wo, sizes, None, None, None, spec(5, 8))
    with asserts.refused(ValueError, ("`interleave`", "5", "16", "choose")):
        check(Mlp(MlpNames(), Activation("swiglu", interleave=5)), x, wi, wo, sizes)
    with asserts.refused(ValueError, ("`residuals`", "'all'", "save_fc1", "choose")):
        Residuals("all")
    with asserts.refused(ValueError, ("`names`", "'x'", "grouped_x", "rename")):
        Residuals(names={"x": "y"})
    for names in (["grouped_x"], {"grouped_x": 3}, None):
        with asserts.refused(TypeError, ("`names` of Residuals", repr(names), "a mapping", "pass e.g.")):
            Residuals(names=names)
    with asserts.refused(TypeError, ("`offload` of Residuals", "None", "some of grouped_x", "leave it out")):
        Residuals(offload=None)


@pytest.mark.parametrize("policy", POLICIES)
def test_magnitudes_of_operands_are_found_once(policy):
    """Of x, wi, z and wo in forward, of dy and dh in backward, whatever is computed again."""
    op = Mlp(MlpNames(), Activation("swiglu"), transposed=True, recipe=FP8Delayed, residuals=Residuals(policy))
    x, wi, wo = (ArraySpec(shape, "bfloat16") for shape in ((64, 256), (3, 512, 256), (3, 256, 256)))
    sizes, each = ArraySpec((3,), "int32"), ArraySpec((3,), "float32")
    extras = (Extras(None, each, each, each),) * 2
    run, needs = Planner(), MlpNeeds(probs=False, wi_bias=False, wo_bias=False)

    def measured() -> int:
        calls, run.calls = run.calls, []
        found = [dict(zip(RESULTS[call.name], call.outputs, strict=True)).get("amax") for call in calls]
        return sum(amax is not None for amax in found)

    found = mlp.mlp(run, op, x, wi, wo, sizes, needs=needs, extras=extras)
    assert measured() == 4
    keep = kept(op, needs, False, False, False)
    specs = MlpSpecs(x, wi, wo, None, None, None)
    kept_x = found.x if found.x is not None else x if keep.x else None
    held = (found.wi if found.wi is not None else wi, found.wo if found.wo is not None else wo)
    mlp.main_grads(run, op, specs, kept_x, found.h, found.z, *held, sizes, None, None, None, x, needs, extras=extras)
    assert measured() == 2


def test_fast_accumulation_is_asked_for_in_forward_alone():
    op = Mlp(MlpNames(), Activation("swiglu"), transposed=True, recipe=FP8Current.replace(accumulate="fast"))
    x, wi, wo = (ArraySpec(shape, "bfloat16") for shape in ((64, 256), (3, 512, 256), (3, 256, 256)))
    run = Planner()
    mlp.plan(op, (x, wi, wo, None, None, None), ArraySpec((3,), "int32"), run)
    products = [(call.name, dict(call.params).get("promote")) for call in run.calls if "matmul" in call.name]
    assert products == [
        ("grouped_matmul_act", "never"),
        ("grouped_matmul", "never"),
        ("grouped_matmul_dact", "every_128"),
        *[("grouped_matmul", "every_128")] * 3,  # dx and both weight gradients
    ]
