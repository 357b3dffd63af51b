"""Which kernel, why not another, and what is asked of it beforehand."""

from __future__ import annotations

import pytest

from grouped_core import _native, calls, debug, gradients, plans
from grouped_core.activations import Activation
from grouped_core.calls import ArraySpec
from grouped_core.formats import FORMATS
from grouped_core.gradients import Needs
from grouped_core.linear_spec import Linear, Names
from grouped_core.recipes import BF16
from grouped_core.reference import Oracle
from tests import asserts, cases

X, W, SIZES = ArraySpec((6, 8), "bfloat16"), ArraySpec((3, 8, 4), "bfloat16"), ArraySpec((3,), "int32")

ARCHS = {"cpu": ("_cpu",), "sm_80": ("_cuda",), "sm_90a": ("_cuda", "_sm90"), "sm_120": ("_cuda",)}
"""What the names of kernels say that an architecture runs."""


def call(implementation: str = "", rows: int = 6) -> calls.Call:
    x = ArraySpec((rows, 8), "bfloat16")
    return calls.grouped_matmul(x, W, (1, 1), SIZES, "bfloat16", recipe=BF16, implementation=implementation)


def test_a_plan_names_its_kernel():
    assert plans.plan(call(), "cpu").kernel == "grouped_matmul_any_cpu"
    assert plans.plan(call("grouped_matmul_any_cpu"), "cpu").kernel == "grouped_matmul_any_cpu"
    assert "_any_" in plans.plan(call("reference"), "cpu").kernel


@pytest.mark.rule("ERR-3")
def test_a_list_of_kernels_is_tried_in_its_own_order():
    assert plans.plan(call("no_such_kernel,grouped_matmul_any_cpu"), "cpu").kernel == "grouped_matmul_any_cpu"
    found = plans.attempt(call("no_such_kernel"), "cpu")
    assert found.kernel == ""
    assert [name for name, _ in found.refusals] == ["no_such_kernel"]


@pytest.mark.rule("ERR-1", "ERR-3")
def test_refusals_are_not_implemented_errors_with_every_reason():
    parts = [
        "grouped_matmul on cpu with implementation='no_such_kernel'",
        "lhs bfloat16[6, 8], rhs bfloat16[3, 8, 4]",
        "no kernel takes it: no_such_kernel: no kernel of grouped_matmul has this name on this platform",
        "leave `implementation` None",
    ]
    with asserts.refused(NotImplementedError, parts):
        plans.plan(call("no_such_kernel"), "cpu")


@pytest.mark.rule("ERR-1")
def test_a_build_without_cuda_says_so(monkeypatch):
    monkeypatch.setattr(plans._native, "cuda_archs", ())
    said = plans.refusal(call(), "sm_90a", [])
    assert said.startswith("grouped_matmul on sm_90a: lhs bfloat16[6, 8]")
    assert said.endswith("this build has no CUDA kernels. Build it where nvcc is found, or with GROUPED_CUDA=on.")


@pytest.mark.parametrize("arch", ["sm_9x", "sm_9", "sm_80a", "sm_1000", "sm_90ab", "90a"])
def test_an_unknown_arch_is_refused(arch):
    """`a` is behind the numbers of those chips alone that have kernels of their own."""
    with asserts.refused(ValueError, [f'"{arch}"', '"cpu"', '"sm_90a"']):
        plans.plan(call(), arch)


@pytest.mark.parametrize(("chip", "arch"), [(86, "sm_86"), (90, "sm_90a"), (120, "sm_120")])
def test_a_chip_has_one_name_which_a_build_without_code_for_it_says(chip, arch):
    """What CMake was asked for decides; `80` serves 8.x, `90` Hopper and later, `90a` Hopper alone."""
    runs = {86: {"80"}, 90: {"90", "90a"}, 120: {"90"}}[chip]
    if runs & set(_native.cuda_archs):
        assert _native.arch_built_for(chip) == arch
    else:
        with asserts.refused(RuntimeError, [f"the GPU is {arch}", "GROUPED_CUDA_ARCHS=all"]):
            _native.arch_built_for(chip)


@pytest.mark.rule("TensorRT-LLM #17570")
@pytest.mark.parametrize("rows", [0, 6, 4096])
@pytest.mark.parametrize(("arch", "ours"), ARCHS.items())
def test_a_kernel_is_of_the_architecture_that_it_runs_on(arch, ours, rows):
    if arch != "cpu" and not _native.cuda_compiled:
        pytest.skip("this build has no CUDA kernels")
    runs = [name for name in _native.kernels()["grouped_matmul"] if any(part in name for part in ours)]
    assert plans.plan(call(rows=rows), arch).kernel in runs
    for name in _native.kernels()["grouped_matmul"]:
        if name not in runs:
            found = plans.attempt(call(name, rows=rows), arch)
            assert not found.kernel, f"{name} would run on {arch}"


@pytest.mark.rule("GRP-10")
def test_no_rows_have_a_plan():
    assert plans.plan(call(rows=0), "cpu").kernel


def test_explain_has_one_line_per_call():
    text = debug.explain_calls([call(), call("no_such_kernel")], "cpu")
    first, second = text.splitlines()
    assert first == "grouped_matmul -> bfloat16[6, 4]: grouped_matmul_any_cpu on cpu"
    assert "no kernel takes it" in second


@pytest.mark.rule("ERR-3")
@pytest.mark.parametrize("listed", [False, True])
def test_explain_says_what_is_quantised(listed):
    weights = calls.quantize(ArraySpec((3, 16, 32), "float32"), FORMATS["mxfp8"], (True, True), None, table=listed)
    told = f" of float32[3, 16, 32]{', listed' if listed else ''}: quantize_any_cpu on cpu"
    assert debug.explain_calls([weights], "cpu").endswith(told)


@pytest.mark.rule("ERR-3")
def test_explain_names_the_quantiser_behind_a_fused_call():
    fused = calls.grouped_matmul_act(
        *(X, ArraySpec((3, 8, 64), "bfloat16"), 1, SIZES, "bfloat16"),
        activation=Activation("swiglu"),
        recipe=BF16,
        quantized=calls.QuantizedResult(FORMATS["mxfp8"], (True, True)),
    )
    text = debug.explain_calls([fused], "cpu")
    assert "grouped_matmul_act_quantized_cpu on cpu" in text
    assert "\n    quantises of bfloat16[6, 32]: quantize_any_cpu" in text


@pytest.mark.rule("ERR-2")
def test_why_not_says_what_would_be_raised():
    assert debug.why_not(lambda: [call()], "cpu") is None
    reason = debug.why_not(lambda: [call("no_such_kernel")], "cpu")
    with asserts.refused(NotImplementedError, [reason]):
        plans.plan(call("no_such_kernel"), "cpu")

    def broken() -> list[calls.Call]:
        raise ValueError("`x`: wrong")

    assert debug.why_not(broken, "cpu") == "`x`: wrong"


@pytest.mark.parametrize("scale_bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_planning_without_arrays_yields_every_shape_and_dtype(scale_bias, transposed):
    p = cases.problem(cases.named("tail"), "bfloat16", transposed=transposed)
    op = Linear(Names("x", "w"), transposed=transposed, scale_bias=scale_bias)
    planner, oracle = plans.Planner(), Oracle()
    arrays = (p.x, p.w, p.bias, p.row_scale)
    specs = tuple(oracle.spec(array) for array in arrays)
    sizes = oracle.spec(p.group_sizes)
    y = gradients.linear(oracle, op, p.x, p.w, p.group_sizes, p.bias, p.row_scale)
    assert gradients.linear(planner, op, specs[0], specs[1], sizes, specs[2], specs[3]) == oracle.spec(y)
    given = (p.x, p.w, p.group_sizes, p.bias, p.row_scale, p.dy)
    found = gradients.linear_grads(oracle, op, specs, *given, Needs())
    planned = gradients.linear_grads(
        planner, op, specs, specs[0], specs[1], sizes, specs[2], specs[3], oracle.spec(p.dy), Needs()
    )
    assert planned == tuple(oracle.spec(g) for g in found)
    made = {"grouped_matmul", "group_sum", "row_dot"} | (set() if scale_bias else {"scale_rows"})
    assert {c.name for c in planner.calls} == made
