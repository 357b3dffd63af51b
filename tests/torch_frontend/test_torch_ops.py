"""grouped_linear against the oracle, in every form, with every mask of needed gradients."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import torch_bridge
from grouped_core import _native
from grouped_core.gradients import Needs
from tests import asserts, bounds, cases
from tests.torch_frontend.torch_tools import (
    counted_launches,
    leaf,
    leaves,
    opcheck,
    operation,
    saved_tensors,
    small,
    tensor,
    tensors,
)
from torch_bridge import GroupSizes, exchange, grouped_linear
from torch_bridge._checks import NAMES

SMALL = [case for case in cases.select("small") if case.groups <= 8]


def _call(t: Any, *, listed: bool = False, **options: Any) -> Tensor:
    """grouped_linear of whole problem tensors; a list form splits weight and bias."""
    weight = list(t.w.unbind()) if listed else t.w
    return grouped_linear(t.x, weight, t.sizes, **options)


# ---------------------------------------------------------------------------------------------------------------------
# Against the oracle


@pytest.mark.rule("MAT-1")
@pytest.mark.rule("MAT-8")
@pytest.mark.rule("MAT-9")
@pytest.mark.rule("GRP-4")
@pytest.mark.rule("GRP-5")
@pytest.mark.rule("GRP-6")
@pytest.mark.matrix(
    case=SMALL,
    dtype=cases.DTYPES,
    transposed=(True, False),
    listed=(True, False),
    bias=(None, "packed", "listed"),
    scale=(None, "rows", "bias"),
    valid=lambda scale, bias, **_: scale != "bias" or bias is not None,
)
def test_results_and_gradients_are_the_oracles(
    case: cases.Case, dtype: str, transposed: bool, listed: bool, bias: str | None, scale: str | None
) -> None:
    problem = cases.problem(case, dtype, transposed=transposed)
    t = tensors(problem)
    x, row_scale = leaf(t.x), leaf(t.row_scale)
    weight = leaves(t.w) if listed else leaf(t.w)
    biases = leaves(t.bias) if bias == "listed" else leaf(t.bias)
    y = grouped_linear(
        x,
        weight,
        t.sizes,
        rhs_transposed=transposed,
        bias=None if bias is None else biases,
        row_scale=None if scale is None else row_scale,
        scale_bias=scale == "bias",
    )
    y.backward(t.dy)

    op = operation(transposed, scale == "bias")
    bias_array, scale_array = problem.bias if bias else None, problem.row_scale if scale else None
    operands = (problem.x, problem.w, problem.group_sizes, bias_array, scale_array)
    asserts.within(y, bounds.expect_linear(op, *operands), "y")
    expected = bounds.expect_linear_grads(op, *operands, problem.dy)
    asserts.within(x.grad, expected.x, "dx")
    asserts.within(torch.stack([w.grad for w in weight]) if listed else weight.grad, expected.w, "dw")
    if bias is not None:
        asserts.within(torch.stack([b.grad for b in biases]) if bias == "listed" else biases.grad, expected.bias, "db")
    if scale is not None:
        asserts.within(row_scale.grad, expected.row_scale, "dc")


@pytest.mark.rule("MAT-6")
@pytest.mark.parametrize("x_dtype", cases.FP8)
@pytest.mark.parametrize("w_dtype", cases.FP8)
def test_unscaled_fp8_values(x_dtype: str, w_dtype: str) -> None:
    case = cases.named("tail")
    problem = cases.problem(case, x_dtype, transposed=True)
    problem = problem._replace(w=cases.problem(case, w_dtype, transposed=True).w)
    t = tensors(problem)
    assert torch_bridge.why_unsupported(grouped_linear, t.x, t.w, t.sizes) is None
    y = _call(t)
    assert y.dtype == torch.bfloat16
    asserts.within(y, bounds.expect_linear(operation(), problem.x, problem.w, problem.group_sizes), "y")


@pytest.mark.rule("TE #3019")
@pytest.mark.rule("GRP-10")
@pytest.mark.parametrize("name", ["all_empty", "no_rows"])
@pytest.mark.parametrize("listed", [True, False])
def test_no_rows_at_all(name: str, listed: bool) -> None:
    t = small(name)
    x, weight = leaf(t.x), leaves(t.w) if listed else leaf(t.w)
    y = grouped_linear(x, weight, t.sizes, bias=t.bias)
    y.backward(t.dy)
    asserts.zero(y, "y")
    asserts.zero(x.grad, "dx")
    for member in weight if listed else [weight]:
        asserts.zero(member.grad, "dw")


# ---------------------------------------------------------------------------------------------------------------------
# Forms


@pytest.mark.rule("MAT-3")
@pytest.mark.rule("MAT-1")
@pytest.mark.matrix(dtype=cases.DTYPES, transposed=(True, False), unaligned=(True, False))
def test_forms_and_layouts_have_the_same_bits(dtype: str, transposed: bool, unaligned: bool) -> None:
    t = small("jagged", dtype)
    if not transposed:
        t = t._replace(w=t.w.transpose(1, 2).contiguous())
    base_x, base_w, base_bias = leaf(t.x), leaf(t.w), leaf(t.bias)
    base = grouped_linear(base_x, base_w, t.sizes, rhs_transposed=transposed, bias=base_bias)
    base.backward(t.dy)
    x, weight, bias = leaf(t.x), leaves(t.w), leaves(t.bias)
    if unaligned:  # members at any address
        weight = [tensor(cases.unaligned(asserts.as_numpy(w))).requires_grad_() for w in weight]
    y = grouped_linear(x, weight, t.sizes, rhs_transposed=transposed, bias=bias)
    y.backward(t.dy)
    asserts.bitwise(y, base, "y")
    asserts.bitwise(x.grad, base_x.grad, "dx")
    for g, (w, b) in enumerate(zip(weight, bias, strict=True)):
        asserts.bitwise(w.grad, base_w.grad[g], f"dw[{g}]")
        asserts.bitwise(b.grad, base_bias.grad[g], f"db[{g}]")
    other = t.w.transpose(1, 2).contiguous()
    asserts.bitwise(grouped_linear(t.x, other, t.sizes, rhs_transposed=not transposed, bias=t.bias), base, "y")


@pytest.mark.rule("MAT-5")
@pytest.mark.parametrize("frozen", [(0,), (1, 4), (0, 1, 2, 3), (0, 1, 2, 3, 4)])
def test_frozen_members_of_a_list(frozen: tuple[int, ...]) -> None:
    t = small("jagged")
    base_w, base_bias = leaf(t.w), leaf(t.bias)
    grouped_linear(t.x, base_w, t.sizes, bias=base_bias).backward(t.dy)
    x = leaf(t.x)
    weight = [leaf(w, g not in frozen) for g, w in enumerate(t.w)]
    bias = [leaf(b, g in frozen) for g, b in enumerate(t.bias)]  # the other half, so that the masks differ
    with counted_launches() as calls:
        y = grouped_linear(x, weight, t.sizes, bias=bias)
        y.backward(t.dy)
    assert calls.count("grouped_matmul") == 2 + (len(frozen) < 5), calls
    for g in range(5):
        if g in frozen:
            assert weight[g].grad is None, f"expert {g} is frozen and got a gradient"
            asserts.bitwise(bias[g].grad, base_bias.grad[g], f"db[{g}]")
        else:
            assert bias[g].grad is None, f"bias {g} is frozen and got a gradient"
            asserts.bitwise(weight[g].grad, base_w.grad[g], f"dw[{g}]")


@pytest.mark.rule("MLM #6228")
@pytest.mark.rule("MAT-4")
def test_list_follows_members_that_move() -> None:
    t = small("jagged")
    weight = leaves(t.w, needed=False)
    first = grouped_linear(t.x, weight, t.sizes)
    weight[2].data = weight[2].data.clone() * 2
    packed = torch.stack(weight)
    asserts.bitwise(grouped_linear(t.x, weight, t.sizes), grouped_linear(t.x, packed, t.sizes))
    assert not torch.equal(first, grouped_linear(t.x, weight, t.sizes))


@pytest.mark.rule("MAT-3")
@pytest.mark.rule("MAT-5")
def test_a_list_of_one() -> None:
    t = small("groups_1")
    packed, listed = leaf(t.w), leaves(t.w)
    for weight, bias in ((packed, t.bias), (listed, list(t.bias))):
        grouped_linear(t.x, weight, t.sizes, bias=bias).backward(t.dy)
    asserts.bitwise(listed[0].grad, packed.grad[0])


# ---------------------------------------------------------------------------------------------------------------------
# Exactly the gradients that are needed

MASKS = [Needs(*mask) for mask in itertools.product((False, True), repeat=4)]


def _launches(needs: Needs, scale_bias: bool) -> list[str]:
    """Native calls of backward with bias and row scale, read off the formulas of contracts.md, MAT-9."""
    scales_rows = not scale_bias
    calls = []
    if needs.x or (needs.row_scale and scales_rows):
        calls.append("grouped_matmul")  # dy W^T
    if needs.x and needs.row_scale and scales_rows:
        calls.append("scale_rows")  # the other factor of dx, after dc has read the product
    if needs.w:
        calls += ["scale_rows"] * scales_rows + ["grouped_matmul"]
    return calls + ["group_sum"] * needs.bias + ["row_dot"] * needs.row_scale


def _saved(needs: Needs, scale_bias: bool) -> set[str]:
    through_product = needs.row_scale and not scale_bias
    saved = set()
    if needs.w or through_product:
        saved.add("x")
    if needs.x or through_product:
        saved.add("w")
    if needs.row_scale:
        saved.add("bias")
    if needs.bias or (not scale_bias and (needs.x or needs.w)):
        saved.add("row_scale")
    return saved | ({"sizes"} if any(needs) else set())


@pytest.mark.rule("TE #2923")
@pytest.mark.rule("ALL-4")
@pytest.mark.rule("MLP-12")
@pytest.mark.parametrize("scale_bias", [False, True])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("needs", MASKS, ids=lambda needs: "".join("01"[each] for each in needs))
def test_every_mask_of_needed_gradients(needs: Needs, listed: bool, scale_bias: bool) -> None:
    t = small("tail")
    x, row_scale = leaf(t.x, needs.x), leaf(t.row_scale, needs.row_scale)
    weight = leaves(t.w, needs.w) if listed else [leaf(t.w, needs.w)]
    bias = leaves(t.bias, needs.bias) if listed else [leaf(t.bias, needs.bias)]
    owners = {"x": [x], "w": weight, "bias": bias, "row_scale": [row_scale], "sizes": [t.sizes]}
    with counted_launches() as forward, saved_tensors() as saved:
        y = grouped_linear(
            x,
            weight if listed else weight[0],
            t.sizes,
            bias=bias if listed else bias[0],
            row_scale=row_scale,
            scale_bias=scale_bias,
        )
    assert forward == ["grouped_matmul"]
    assert y.requires_grad == any(needs)
    wanted = sorted(member.data_ptr() for name in _saved(needs, scale_bias) for member in owners[name])
    assert sorted(each.data_ptr() for each in saved) == wanted, "saved something else than backward reads"
    if not any(needs):
        return
    with counted_launches() as backward:
        y.backward(t.dy)
    assert sorted(backward) == sorted(_launches(needs, scale_bias))

    full_x, full_w, full_bias, full_scale = leaf(t.x), leaf(t.w), leaf(t.bias), leaf(t.row_scale)
    grouped_linear(full_x, full_w, t.sizes, bias=full_bias, row_scale=full_scale, scale_bias=scale_bias).backward(t.dy)
    for got, full, needed in ((x, full_x, needs.x), (row_scale, full_scale, needs.row_scale)):
        assert (got.grad is not None) == needed
        if needed:
            asserts.bitwise(got.grad, full.grad)
    for got, full, needed in ((weight, full_w, needs.w), (bias, full_bias, needs.bias)):
        assert all((member.grad is not None) == needed for member in got)
        if needed:
            asserts.bitwise(torch.stack([m.grad for m in got]) if listed else got[0].grad, full.grad)


@pytest.mark.rule("ALL-4")
def test_nothing_is_saved_without_grad_mode() -> None:
    t = small()
    with torch.no_grad(), saved_tensors() as saved:
        y = grouped_linear(leaf(t.x), leaf(t.w), t.sizes)
    assert not saved
    assert not y.requires_grad


@pytest.mark.rule("MAT-7")
def test_dy_that_is_not_contiguous_is_made_so() -> None:
    t = small(tail=0.0)
    x, other = leaf(t.x), leaf(t.x)
    grouped_linear(x, t.w, t.sizes).sum().backward()  # autograd expands a scalar
    grouped_linear(other, t.w, t.sizes).backward(torch.ones_like(t.dy))
    asserts.bitwise(x.grad, other.grad)


@pytest.mark.rule("GRD-13")
def test_second_derivatives_are_refused() -> None:
    t = small(tail=0.0)
    x = leaf(t.x)
    (dx,) = torch.autograd.grad(grouped_linear(x, t.w, t.sizes).sum(), x, create_graph=True)
    with asserts.refused(RuntimeError, ["grouped_linear", "differentiated twice", "expected once", "compose"]):
        dx.sum().backward()


def test_retained_graph_runs_again() -> None:
    t = small()
    x = leaf(t.x)
    y = grouped_linear(x, t.w, t.sizes)
    y.backward(t.dy, retain_graph=True)
    once = x.grad.clone()
    y.backward(t.dy)
    asserts.bitwise(x.grad, once * 2)


def test_inputs_changed_in_place_before_backward_are_noticed() -> None:
    t = small()
    x, w = leaf(t.x), leaf(t.w)
    y = grouped_linear(x, w, t.sizes)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(t.dy)


@pytest.mark.parametrize("batched", [True, False])
def test_transforms_are_refused_with_a_remedy(batched: bool) -> None:
    t = small()
    f = torch.func.vmap if batched else lambda f: torch.func.grad(lambda x: f(x).sum())
    with asserts.refused(NotImplementedError, ["grouped_linear", "vmap", "expected plain tensors", "fold"]):
        f(lambda x: grouped_linear(x, t.w, t.sizes))(torch.stack([t.x, t.x]) if batched else t.x)


@pytest.mark.rule("ERR-1")
def test_gradients_of_several_dy_at_once_are_refused() -> None:
    t = small()
    x = leaf(t.x)
    with asserts.refused(NotImplementedError, ["batched gradients", "expected a plain one", "once per gradient"]):
        torch.autograd.grad(grouped_linear(x, t.w, t.sizes), x, torch.stack([t.dy, t.dy]), is_grads_batched=True)


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script:DeprecationWarning", "ignore:.*torch.jit.script:FutureWarning"
)  # torch's own
def test_forward_mode_is_refused() -> None:
    """A tangent would be dropped in silence."""
    t = small()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(t.x, torch.ones_like(t.x))
        with asserts.refused(
            NotImplementedError, ["grouped_linear", "a dual tensor", "plain tensors", "torch.autograd"]
        ):
            grouped_linear(dual, t.w, t.sizes)
        asserts.bitwise(_call(t), _call(t))


# ---------------------------------------------------------------------------------------------------------------------
# Group sizes

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)


@pytest.mark.rule("GRP-1")
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_any_integer_type_of_sizes(dtype: torch.dtype) -> None:
    t = small()
    asserts.bitwise(grouped_linear(t.x, t.w, t.sizes.to(dtype)), _call(t))


@pytest.mark.rule("GRP-1")
@pytest.mark.parametrize(
    ("dtype", "value", "saturated"),
    [
        (torch.int64, 2**32 + 1, 2**31 - 1),
        (torch.int64, -(2**32) + 5, -(2**31)),
        (torch.uint32, 2**31 + 7, 2**31 - 1),
        (torch.uint64, 2**63 + 9, 2**31 - 1),
        (torch.uint64, 2**32 + 9, 2**31 - 1),
    ],
    ids=str,
)
def test_sizes_saturate(dtype: torch.dtype, value: int, saturated: int) -> None:
    t = small("jagged")
    wide = torch.tensor([3, value, 4, 0, 0], dtype=dtype)
    narrow = torch.tensor([3, saturated, 4, 0, 0], dtype=torch.int32)
    asserts.bitwise(grouped_linear(t.x, t.w, wide), grouped_linear(t.x, t.w, narrow))


@pytest.mark.rule("GRP-2")
def test_sizes_from_the_host() -> None:
    t = small("clamped")
    for given in ([30, 30, 30], (30, 30, 2**40), np.array([30, 30, 30]), GroupSizes([30, 30, 30], 16)):
        asserts.bitwise(grouped_linear(t.x, t.w, given), _call(t))
    made = torch_bridge.device_sizes([1, 2**40, -(2**40)], "cpu")
    assert made.dtype == torch.int32
    assert made.tolist() == [1, 2**31 - 1, -(2**31)]
    assert torch_bridge.device_sizes(torch.tensor([4, 5]), "cpu").tolist() == [4, 5]


@pytest.mark.rule("GRP-13")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_size_status_in_a_graph(dtype: torch.dtype) -> None:
    """The status is part of the graph of the program that asks for it."""
    status = torch.compile(lambda sizes: torch_bridge.size_status(sizes, 6), fullgraph=True, backend="aot_eager")
    for sizes in ([1, 2, 3], [3, -1, 3], [3, -1, 5], [4, 0, 3]):
        tensor = torch.tensor(sizes, dtype=dtype)
        assert status(tensor) == torch_bridge.size_status(tensor, 6)


@pytest.mark.rule("GRP-13")
def test_size_status_and_debug_word(monkeypatch: pytest.MonkeyPatch) -> None:
    assert int(torch_bridge.size_status([1, 2], 3)) == 0
    with asserts.refused(TypeError, ["`M`", "str", "expected an integer", "number of rows"]):
        torch_bridge.size_status([1, 2], "3")
    with asserts.refused(ValueError, ["`M`: -1", "expected 0 or more", "pass the number of rows"]):
        torch_bridge.size_status([1, 2], -1)
    assert int(torch_bridge.size_status(torch.tensor([1, 3]), 3)) == 2
    status = torch_bridge.size_status(torch.tensor([-1, 7], dtype=torch.int32), 3)
    assert status.dtype == torch.int32
    assert int(status) == 3
    t = small()
    grouped_linear(t.x, t.w, [-1, 2, 3])
    torch_bridge.check_debug_word()  # the check was not requested
    monkeypatch.setenv("GROUPED_DEBUG", "sizes")
    _call(t)
    torch_bridge.check_debug_word()
    grouped_linear(t.x, t.w, [-1, 2, 3])
    grouped_linear(t.x, t.w, [100, 2, 3])
    _call(t)
    with asserts.refused(ValueError, ["group_sizes", "negative", "clamped", "check what computed them"]):
        torch_bridge.check_debug_word()
    torch_bridge.check_debug_word()  # reading cleared it
    for run in (
        lambda sizes: grouped_linear(t.x, t.w, sizes, recipe=torch_bridge.MXFP8),
        lambda sizes: torch_bridge.grouped_mlp(
            t.x, t.w, t.w[:, : t.w.shape[1] // 2].mT.contiguous(), sizes, recipe=torch_bridge.MXFP8
        ),
    ):
        run([-1, 2, 3])
        with asserts.refused(ValueError, ["group_sizes", "negative", "check what computed them"]):
            torch_bridge.check_debug_word()


@pytest.mark.rule("ERR-4")
def test_debug_checks_change_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    t = small()

    def run() -> list[Any]:
        x, w, bias, row_scale = leaf(t.x), leaf(t.w), leaf(t.bias), leaf(t.row_scale)
        y = grouped_linear(x, w, t.sizes, bias=bias, row_scale=row_scale)
        y.backward(t.dy)
        return [y, x.grad, w.grad, bias.grad, row_scale.grad]

    plain = run()
    monkeypatch.setenv("GROUPED_DEBUG", "sizes,poison,sync")
    for got, expected in zip(run(), plain, strict=True):
        asserts.bitwise(got, expected)
    monkeypatch.setenv("GROUPED_DEBUG", "fast")
    with asserts.refused(ValueError, ["GROUPED_DEBUG", "fast", "expected", "unset"]):
        run()


@pytest.mark.rule("GRP-8")
@pytest.mark.rule("ERR-4")
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_poison_fills_new_results(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    t = small("tail", dtype)
    out = torch.full_like(t.dy, cases.SENTINEL)
    monkeypatch.setattr(_native.Launcher, "launch", lambda *_: None)
    monkeypatch.setenv("GROUPED_DEBUG", "poison")
    assert _call(t).isnan().all()
    _call(t, out=out)
    asserts.filled(out, cases.SENTINEL)  # the caller's buffer is not ours to poison


def test_activation_checkpointing() -> None:
    t = small()
    x, w, other_x, other_w = leaf(t.x), leaf(t.w), leaf(t.x), leaf(t.w)
    grouped_linear(x, w, t.sizes).backward(t.dy)
    checkpoint(grouped_linear, other_x, other_w, t.sizes, use_reentrant=False).backward(t.dy)
    asserts.bitwise(other_x.grad, x.grad)
    asserts.bitwise(other_w.grad, w.grad)


# ---------------------------------------------------------------------------------------------------------------------
# Buffers


@pytest.mark.rule("BUF-1")
@pytest.mark.rule("BUF-3")
@pytest.mark.rule("BUF-4")
@pytest.mark.rule("GRP-7")
@pytest.mark.matrix(dtype=cases.DTYPES, listed=(True, False), scale=(True, False), needs_scale=(True, False))
def test_results_go_to_the_callers_buffers(dtype: str, listed: bool, scale: bool, needs_scale: bool) -> None:
    case = cases.named("tail")
    t = small("tail", dtype)
    options = {"row_scale": leaf(t.row_scale, needs_scale)} if scale else {}
    x, w = leaf(t.x), leaf(t.w)
    expected = grouped_linear(x, w, t.sizes, bias=t.bias, **options)
    expected.backward(t.dy)
    scale_grad = options["row_scale"].grad if scale else None

    out = torch.full_like(t.dy, cases.SENTINEL)
    grad_input = torch.full_like(t.x, cases.SENTINEL)
    if scale:
        options["row_scale"] = leaf(t.row_scale, needs_scale)
    other_x, weight = leaf(t.x), leaves(t.w) if listed else leaf(t.w)
    y = grouped_linear(other_x, weight, t.sizes, bias=t.bias, out=out, grad_input=grad_input, **options)
    assert y.data_ptr() == out.data_ptr()
    assert not out.requires_grad, "the caller's tensor got a history"
    y.backward(t.dy, retain_graph=True)
    for what, got, wanted in (("y", y, expected), ("dx", other_x.grad, x.grad), ("buffer", grad_input, x.grad)):
        asserts.bitwise(got[: case.valid], wanted[: case.valid], what)
        asserts.filled(got[case.valid :], cases.SENTINEL, what)
    asserts.bitwise(torch.stack([each.grad for each in weight]) if listed else weight.grad, w.grad, "dw")
    if scale and needs_scale:
        asserts.bitwise(options["row_scale"].grad, scale_grad, "dc")
    other_x.grad = None
    grad_input.fill_(cases.SENTINEL)
    y.backward(t.dy)
    asserts.bitwise(grad_input[: case.valid], x.grad[: case.valid], "second backward")


@pytest.mark.rule("BUF-1")
def test_out_without_gradients() -> None:
    t = small()
    out = torch.full_like(t.dy, cases.SENTINEL)
    y = _call(t, out=out)
    assert y.data_ptr() == out.data_ptr()
    asserts.bitwise(y[:33], _call(t)[:33])
    asserts.filled(y[33:], cases.SENTINEL)


@pytest.mark.rule("BUF-3")
def test_buffers_are_not_saved() -> None:
    t = small()
    out, grad_input = torch.empty_like(t.dy), torch.empty_like(t.x)
    with saved_tensors() as saved:
        y = grouped_linear(leaf(t.x), leaf(t.w), t.sizes, out=out, grad_input=grad_input)
    assert {each.data_ptr() for each in saved}.isdisjoint({out.data_ptr(), grad_input.data_ptr()})
    out.fill_(0)  # its consumer is done
    y.backward(t.dy)


@pytest.mark.rule("BUF-2")
def test_a_leaf_adds_up_what_one_buffer_holds_in_turn() -> None:
    t = small()
    x, plain, dx = leaf(t.x), leaf(t.x), torch.zeros_like(t.x)
    for factor in (1, 3):
        grouped_linear(x, t.w, t.sizes, grad_input=dx).backward(t.dy * factor)
        grouped_linear(plain, t.w, t.sizes).backward(t.dy * factor)
    asserts.bitwise(x.grad, plain.grad)


@pytest.mark.rule("BUF-2", "BUF-3")
def test_what_was_saved_is_not_read_after_a_buffer_was_written_again() -> None:
    """Buffers and accumulators count as modified in place, so that autograd refuses instead of computing nonsense."""
    t, w2 = small(), leaf(torch.ones(3, 24, 40))
    w, out, accumulator = leaf(t.w), torch.empty_like(t.dy), torch.zeros_like(t.w)
    dx, x = torch.empty_like(t.x), leaf(t.x)
    y = grouped_linear(grouped_linear(x, w, t.sizes, out=out), w2, t.sizes)
    versions = [each._version for each in (out, accumulator, dx)]
    again = grouped_linear(x * 1, w, t.sizes, out=out, wgrad_accum=accumulator, grad_input=dx)
    with asserts.refused(RuntimeError, ["modified by an inplace operation"]):
        y.sum().backward()
    again.sum().backward()
    assert all(each._version > before for each, before in zip((out, accumulator, dx), versions, strict=True))


def _bad_buffers() -> dict[str, tuple[dict[str, Any], type[Exception], list[str]]]:
    t = small()
    memory = torch.zeros(50, 24)
    exported = np.zeros((50, 40), np.float32)
    return {
        "no_tensor": ({"out": [1]}, TypeError, ["`out`", "list", "torch.Tensor", "convert"]),
        "shape": ({"out": t.dy[:20]}, ValueError, ["`out`", "(20, 40)", "(50, 40)", "tail included", "allocate"]),
        "dtype": ({"out": t.dy.bfloat16()}, ValueError, ["`out`", "bfloat16", "float32", "allocate"]),
        "device": ({"out": t.dy.to("meta")}, ValueError, ["`out`", "meta", "cpu", "move it"]),
        "strides": ({"out": t.dy.t().contiguous().t()}, ValueError, ["`out`", "(1, 50)", "contiguous", "call"]),
        "history": ({"out": leaf(t.dy)}, ValueError, ["`out`", "requires_grad is True", "expected False", "detach"]),
        "overlap": (
            {"grad_input": memory, "x": memory},
            ValueError,
            ["`grad_input`", "overlaps `x`", "expected", "allocate"],
        ),
        "both": (
            {
                "out": memory.view(-1)[:1200].view(50, 24),
                "grad_input": memory.view(-1)[:1200].view(50, 24),
                "w": torch.zeros(3, 24, 24),
            },
            ValueError,
            ["`grad_input`", "overlaps `out`", "expected", "allocate"],
        ),
        "accumulator": (
            {
                "grad_input": memory.view(-1)[:1200].view(50, 24),
                "w": torch.zeros(3, 8, 24),
                "wgrad_accum": memory.view(-1)[600:1176].view(3, 8, 24),
            },
            ValueError,
            ["`grad_input`", "overlaps `wgrad_accum`", "expected", "allocate"],
        ),
        "no_need": (
            {"grad_input": torch.empty_like(t.x), "x": t.x},
            ValueError,
            ["`grad_input`", "needs no gradient", "expected None", "leave it out"],
        ),
        "grad_shape": ({"grad_input": t.dy}, ValueError, ["`grad_input`", "(50, 40)", "(50, 24)", "allocate"]),
        "foreign": (
            {"out": exchange.from_array(exported)},
            ValueError,
            ["`out`", "another framework", "expected", "allocate"],
        ),
    }


@pytest.mark.rule("BUF-2")
@pytest.mark.parametrize("name", list(_bad_buffers()))
def test_buffers_that_do_not_fit_are_refused(name: str) -> None:
    changes, kind, fragments = _bad_buffers()[name]
    t = small()
    x = changes.pop("x", leaf(t.x))
    if name == "overlap":
        x.requires_grad_()
        changes["grad_input"] = x.detach()
    with asserts.refused(kind, fragments):
        grouped_linear(x, changes.pop("w", t.w), t.sizes, **changes)


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


def _bad_calls() -> dict[str, tuple[dict[str, Any], type[Exception], list[str]]]:
    t = small()
    members = list(t.w)
    spare = torch.zeros_like(members[0])
    return {
        "x_array": ({"x": [[1.0]]}, TypeError, ["`x`", "list", "torch.Tensor", "convert"]),
        "x_rank": ({"x": t.x[0]}, ValueError, ["`x`", "(24,)", "[M, K]", "reshape"]),
        "x_strides": ({"x": t.x.t().contiguous().t()}, ValueError, ["`x`", "strides (1, 50)", "contiguous", "call"]),
        "x_dtype": ({"x": t.x.double(), "weight": t.w.double()}, TypeError, ["`x`", "float64", "bfloat16", "cast"]),
        "mixed": ({"x": t.x.half()}, TypeError, ["`weight`", "float32", "float16", "cast one of them"]),
        "w_strides": (
            {"weight": t.w.transpose(1, 2)},
            ValueError,
            ["`weight`", "strides", "contiguous", "rhs_transposed"],
        ),
        "w_device": ({"weight": t.w.to("meta")}, ValueError, ["`weight`", "meta", "cpu", "move"]),
        "w_layout": ({"rhs_transposed": False}, ValueError, ["`x`", "(50, 24)", "[G, K, N]", "`rhs_transposed`"]),
        "w_type": ({"weight": 3}, TypeError, ["`weight`", "int", "[G, N, K]", "pass one"]),
        "w_empty": ({"weight": []}, ValueError, ["`weight`", "empty list", "one tensor per group", "at least one"]),
        "w_zero": ({"weight": t.w[:, :0]}, ValueError, ["`weight`", "(3, 0, 24)", "at least 1", "may be 0"]),
        "list_rank": (
            {"weight": [t.w]},
            ValueError,
            ["`weight[0]`", "(3, 40, 24)", "two axes [N, K]", "without a list"],
        ),
        "list_shape": (
            {"weight": [*members[:2], members[2][:5].contiguous()]},
            ValueError,
            ["`weight[2]`", "(5, 24)", "(40, 24)", "one shape"],
        ),
        "list_dtype": (
            {"weight": [*members[:2], members[2].half()]},
            TypeError,
            ["`weight[2]`", "float16", "float32", "one dtype"],
        ),
        "list_strides": (
            {"weight": [members[0], members[1].t().contiguous().t(), members[2]]},
            ValueError,
            ["`weight[1]`", "strides", "contiguous", "call"],
        ),
        "sizes_float": ({"group_sizes": t.sizes.float()}, TypeError, ["`group_sizes`", "float32", "integer", "pass"]),
        "sizes_bool": ({"group_sizes": t.sizes.bool()}, TypeError, ["`group_sizes`", "bool", "integer", "pass"]),
        "sizes_rank": (
            {"group_sizes": t.sizes[None]},
            ValueError,
            ["`group_sizes`", "(1, 3)", "[G]", "one size per group"],
        ),
        "sizes_length": (
            {"group_sizes": t.sizes[:2]},
            ValueError,
            ["`group_sizes`", "(2,)", "(3,)", "one size per group"],
        ),
        "sizes_strides_of_wide_integers": (
            {"group_sizes": torch.zeros(6, dtype=torch.int64)[::2]},
            ValueError,
            ["`group_sizes`", "strides (2,)", "contiguous", "call"],
        ),
        "sizes_of_bools": (
            {"group_sizes": [True, False, True]},
            TypeError,
            ["`group_sizes`", "True", "integers", "pass"],
        ),
        "sizes_of_tensors_of_bools": (
            {"group_sizes": [torch.tensor(True), torch.tensor(True), torch.tensor(True)]},
            TypeError,
            ["`group_sizes`", "tensor(True)", "integers", "pass"],
        ),
        "sizes_without_order": (
            {"group_sizes": {1, 2, 3}},
            TypeError,
            ["`group_sizes`", "{1, 2, 3}", "integers", "pass"],
        ),
        "sizes_once": (
            {"group_sizes": (size for size in (1, 2, 3))},
            TypeError,
            ["`group_sizes`", "generator", "integers", "pass"],
        ),
        "sizes_numpy_rank": (
            {"group_sizes": np.ones((1, 3), np.int64)},
            ValueError,
            ["`group_sizes`", "(1, 3)", "[G]", "one size per group"],
        ),
        "weight_rank": ({"weight": t.w[None]}, ValueError, ["`weight`", "(1, 3, 40, 24)", "three axes", "stack"]),
        "bias_rank": ({"bias": t.bias[:, None]}, ValueError, ["`bias`", "(3, 1, 40)", "two axes [G, N]", "pass"]),
        "sparse": ({"x": t.x.to_sparse()}, ValueError, ["`x`", "sparse_coo", "plain dense", "convert"]),
        "foreign_layout": ({"x": t.x.to_mkldnn()}, ValueError, ["`x`", "_mkldnn", "plain dense", "convert"]),
        "recipe": ({"recipe": "BF16"}, TypeError, ["`recipe`", "str", "expected None or a Recipe", "pass one"]),
        "accum_is_weight": (
            {"weight": t.w, "wgrad_accum": t.w},
            ValueError,
            ["`wgrad_accum`", "overlaps `weight`", "of its own", "allocate"],
        ),
        "accum_twice": (
            {"weight": members, "wgrad_accum": [spare, torch.zeros_like(spare), spare]},
            ValueError,
            ["`wgrad_accum[2]`", "overlaps `wgrad_accum[0]`", "of its own", "allocate"],
        ),
        "sizes_list": ({"group_sizes": [1.5, 2]}, TypeError, ["`group_sizes`", "1.5", "integers", "pass"]),
        "sizes_device": ({"group_sizes": t.sizes.to("meta")}, ValueError, ["`group_sizes`", "meta", "cpu", "move"]),
        "sizes_strides": (
            {"group_sizes": torch.zeros(6, dtype=torch.int32)[::2]},
            ValueError,
            ["`group_sizes`", "strides (2,)", "contiguous", "call"],
        ),
        "bias_shape": ({"bias": t.bias[:, :5].contiguous()}, ValueError, ["`bias`", "(3, 5)", "(3, 40)", "pass"]),
        "bias_dtype": ({"bias": t.bias.double()}, TypeError, ["`bias`", "float64", "expected one of", "cast"]),
        "scale_shape": (
            {"row_scale": t.row_scale[:4]},
            ValueError,
            ["`row_scale`", "(4,)", "(50,)", "one factor per row"],
        ),
        "scale_bias": (
            {"scale_bias": True, "bias": t.bias},
            ValueError,
            ["`scale_bias`", "True without `row_scale`", "expected both", "leave"],
        ),
        "accum_word": ({"wgrad_accum": "grad"}, ValueError, ["`wgrad_accum`", "'grad'", "'main_grad'", "pass one"]),
        "accum_shape": (
            {"wgrad_accum": t.w[:2].clone()},
            ValueError,
            ["`wgrad_accum`", "(2, 40, 24)", "(3, 40, 24)", "allocate"],
        ),
        "accum_dtype": ({"wgrad_accum": t.w.double()}, TypeError, ["`wgrad_accum`", "float64", "float32", "cast"]),
        "accum_form": ({"wgrad_accum": members}, ValueError, ["`wgrad_accum`", "3 tensors", "one for each", "form"]),
        "accum_history": (
            {"wgrad_accum": leaf(t.w)},
            ValueError,
            ["`wgrad_accum`", "requires_grad", "expected False", "detach"],
        ),
        "kernel": (
            {"implementation": "fastest"},
            NotImplementedError,
            ["grouped_matmul on cpu", "implementation='fastest'", "no kernel", "`implementation` None"],
        ),
        "kernel_type": ({"implementation": 3}, ValueError, ["`implementation`", "3", "expected None", "explain"]),
    }


@pytest.mark.rule("ERR-1")
@pytest.mark.rule("MAT-7")
@pytest.mark.parametrize("name", list(_bad_calls()))
def test_bad_calls_are_refused_in_words(name: str) -> None:
    changes, kind, fragments = _bad_calls()[name]
    t = small()
    arguments = {"x": t.x, "weight": t.w, "group_sizes": t.sizes} | changes
    with asserts.refused(kind, fragments):
        grouped_linear(**arguments)


@pytest.mark.rule("ERR-2")
@pytest.mark.parametrize("name", list(_bad_calls()))
def test_why_unsupported_says_what_the_call_says(name: str) -> None:
    changes, kind, _ = _bad_calls()[name]
    t = small()
    arguments = {"x": t.x, "weight": t.w, "group_sizes": t.sizes} | changes
    with asserts.refused(kind, []) as message:
        grouped_linear(**arguments)
    reason = torch_bridge.why_unsupported(grouped_linear, arch="cpu", **arguments)
    assert reason == message[0]


@pytest.mark.rule("ERR-2")
def test_planning_needs_neither_device_nor_weights() -> None:
    x = torch.empty(1000, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    w = torch.empty(8, 128, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    sizes = torch.empty(8, dtype=torch.int32, device="meta")
    assert torch_bridge.why_unsupported(grouped_linear, x, w, sizes, arch="cpu") is None
    text = torch_bridge.explain(grouped_linear, x, w, sizes, arch="cpu")
    assert text.count("grouped_matmul") == 3 + text.count("grouped_matmul_any"), text
    assert len([line for line in text.splitlines() if line.startswith("grouped_matmul ->")]) == 3
    assert torch_bridge.explain(torch_bridge.nn.GroupedLinear, x, w, sizes, arch="cpu") == text
    wi, wo = torch.empty(8, 256, 64, device="meta"), torch.empty(8, 64, 128, device="meta")
    operands = (x.float(), wi, wo, sizes)
    assert torch_bridge.explain(torch_bridge.nn.GroupedMLP, *operands, arch="cpu") == torch_bridge.explain(
        torch_bridge.grouped_mlp, *operands, arch="cpu"
    )
    into = torch_bridge.explain(grouped_linear, x, w, sizes, wgrad_accum="main_grad", arch="cpu")
    assert "float32[8, 128, 64]" in into
    with asserts.refused(TypeError, ["`op`", "expected one of grouped_linear", "pass"]):
        torch_bridge.explain(print, x)


@pytest.mark.rule("ERR-3")
def test_a_pinned_kernel_runs() -> None:
    t = small()
    with counted_launches() as calls:
        got = _call(t, implementation="reference")
    assert calls == ["grouped_matmul"]
    op = operation(implementation="reference")
    arrays = [asserts.as_numpy(each) for each in (t.x, t.w, t.sizes)]
    asserts.within(got, bounds.expect_linear(op, *arrays))


# ---------------------------------------------------------------------------------------------------------------------
# Operators and exchange


@pytest.mark.rule("ALL-5")
@pytest.mark.matrix(listed=(True, False), extras=(True, False), into=(True, False))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck(listed: bool, extras: bool, into: bool) -> None:
    t = small("groups_2", tail=0.0)
    weight = leaves(t.w) if listed else leaf(t.w)
    if listed:
        weight[0].requires_grad_(False)
    bias = None if not extras else leaves(t.bias) if listed else leaf(t.bias)
    scale = leaf(t.row_scale) if extras else None
    accumulators = [None, torch.zeros(40, 24)] if listed else torch.zeros(2, 40, 24)

    def step() -> None:
        buffers = {"out": torch.zeros_like(t.dy), "grad_input": torch.zeros_like(t.x)} if into else {}
        accum = accumulators if into else None
        y = grouped_linear(leaf(t.x), weight, t.sizes, bias=bias, row_scale=scale, wgrad_accum=accum, **buffers)
        y.backward(t.dy)

    names = opcheck(step)
    alone = listed or into  # then the gradient of the weight is computed by itself
    assert len(names) == 2 + alone, names
    assert any(name.startswith("weight_grad") for name in names) == alone


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int32", "uint8"])
def test_exchange_with_numpy(dtype: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(cases.numpy_dtype(dtype))
    made = exchange.from_array(array)
    assert str(made.dtype) == f"torch.{dtype}"
    assert made.data_ptr() == array.ctypes.data, "the array was copied"
    asserts.bitwise(made, array)
    if array.itemsize <= 2:
        memory, name = exchange.to_bytes(made)
        assert name == dtype
        assert memory.data_ptr() == made.data_ptr()
        asserts.bitwise(memory.numpy().view(array.dtype), array)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int32"])
def test_exchange_with_jax(dtype: str) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    array = jax.numpy.asarray(np.arange(12).reshape(3, 4).astype(cases.numpy_dtype(dtype)))
    made = exchange.from_array(array)
    assert made.data_ptr() == array.unsafe_buffer_pointer(), "the array was copied"
    asserts.bitwise(made, array)
    t = made.clone()
    asserts.bitwise(jax.dlpack.from_dlpack(t), array)


def test_exchange_refuses_in_words() -> None:
    with asserts.refused(TypeError, ["`array`", "list", "DLPack", "convert"]):
        exchange.from_array([1])
    with asserts.refused(ValueError, ["`array`", "int4", "expected one of", "uint8"]):
        exchange.from_array(np.zeros(2, ml_dtypes.int4))
    with asserts.refused(ValueError, ["`tensor`", "float32", "2 bytes", "pass the tensor"]):
        exchange.to_bytes(torch.zeros(2))


def test_names_are_torchs() -> None:
    assert (NAMES.x, NAMES.w) == ("x", "weight")


@pytest.mark.rule("ERR-2")
def test_planning_refuses_what_is_no_operation() -> None:
    t = small()
    for ask in (torch_bridge.why_unsupported, torch_bridge.explain):
        for op in (torch.matmul, []):
            with asserts.refused(TypeError, ["`op`", "expected one of grouped_linear", "pass the public function"]):
                ask(op, t.x, t.w, t.sizes)
        with asserts.refused(TypeError, ["unexpected keyword argument 'nonsense'"]):
            ask(grouped_linear, t.x, t.w, t.sizes, nonsense=1)
        with asserts.refused(TypeError, ["`arch`: 90", "expected None or a name", "sm_90a"]):
            ask(grouped_linear, t.x, t.w, t.sizes, arch=90)


@pytest.mark.rule("ALL-5")
def test_profilers_see_operators_and_the_same_bits() -> None:
    """A call that no profiler watches replays its kernels without the dispatcher."""
    t = small("tail", "bfloat16")
    found = []
    # Without events of several cycles, of which there is one, PyTorch 2.11 warns.
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)
    for watch in (nullcontext(), profiler):
        x, w = leaf(t.x), leaf(t.w)
        with watch:
            y = grouped_linear(x, w, t.sizes)
            y.backward(t.dy)
        found.append((y, x.grad, w.grad))
    names = {event.name for event in profiler.events() or ()}
    assert {f"torch_bridge::{name}" for name in ("linear", "linear_main_grads")} <= names
    for a, b in zip(*found, strict=True):
        asserts.bitwise(a, b)
