"""The experts' MLP in all frontends: the same bits, within the bounds of the oracle, and no needless work."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._dynamo.exc import Unsupported

import jax_grouped
import torch_bridge
from grouped_core import arrays
from grouped_core.activations import GATED_KINDS, PLAIN_KINDS, Activation
from grouped_core.calls import SLOTS
from grouped_core.mlp_spec import POLICIES, Mlp, MlpNames, MlpNeeds, Residuals, kept, needs_dz
from grouped_core.recipes import MXFP8, FP8Block
from jax_grouped import accumulate
from tests import asserts, bounds, cases
from tests.jax_frontend.jax_tools import copies, optimised
from tests.parity.adapters import to_torch
from tests.parity.mlp_adapters import ARRAYS, JAX, LEAVES, TORCH, MlpFrontend, in_halves, present, problem
from tests.torch_frontend.torch_tools import counted_launches, leaf, leaves, living, opcheck, saved_tensors
from torch_bridge import _record, exchange
from torch_bridge.debug import _PLANS

CASES = [
    cases.named(name) for name in ("tail", "jagged", "clamped", "negative", "groups_1_tail", "all_empty", "no_rows")
]
KINDS = (*PLAIN_KINDS, *GATED_KINDS)
ALL_NEEDS = tuple(MlpNeeds(*map(bool, bits)) for bits in np.ndindex(2, 2, 2, 2, 2, 2))


def spec_of(kind: str, interleave: int | None, width: int) -> Activation:
    if kind not in GATED_KINDS or (interleave or 1) > width:
        return Activation(kind)
    return Activation(kind, interleave=interleave)


@pytest.mark.rule("ALL-1", "MAT-3", "MLP-1", "MLP-2", "MLP-3", "MLP-5", "MLP-7", "GRP-5", "GRP-6", "GRP-9")
@pytest.mark.matrix(
    case=CASES,
    kind=KINDS,
    interleave=(None, 1, 2, 8),
    dtype=cases.DTYPES,
    transposed=(False, True),
    probs=(None, "float32", "bfloat16"),
    bias=(None, "float32", "bfloat16"),
    policy=POLICIES,
    halves=(False, True),
    valid=lambda kind, interleave, halves, **_: not halves or (kind in GATED_KINDS and interleave is None),
    apart=[("case", "kind"), ("case", "interleave")],  # activations are of single elements
)
def test_frontends_agree_bitwise_and_are_within_the_bounds(
    case, kind, interleave, dtype, transposed, probs, bias, policy, halves
):
    """All frontends give the same bits, whether gate and linear half are one array or, with `halves`, two."""
    activation = spec_of(kind, interleave, case.n)
    given, dy = problem(case, dtype, activation, transposed=transposed, probs=probs, bias=bias)
    needs = present(given)
    options: dict[str, Any] = {"activation": activation, "transposed": transposed}
    y = ARRAYS.forward(given, **options)
    gradients = ARRAYS.gradients(given, dy, needs, **options)
    form = in_halves(given, transposed) if halves else given
    for frontend in (ARRAYS, JAX, TORCH):
        y_found, found = frontend.passes(form, dy, needs, policy == POLICIES[0], residuals=policy, **options)
        asserts.bitwise(y_found, y, f"y of {frontend}")
        for name, need, a, b in zip(LEAVES, needs, found, gradients, strict=True):
            assert (a is not None) == need, f"gradient of {name} from {frontend}"
            if need:
                asserts.bitwise(a, b, f"gradient of {name} from {frontend} with {policy}")
    op = Mlp(MlpNames(), activation, transposed=transposed)
    asserts.within(y, bounds.expect_mlp(op, **given), "y")
    expected = bounds.expect_mlp_grads(op, **given, dy=dy, needs=needs)
    for name, a, b in zip(LEAVES, gradients, expected, strict=True):
        if a is not None:
            asserts.within(a, b, f"gradient of {name}")
    for rows in (y, gradients.x, gradients.probs):
        if rows is not None:
            asserts.zero(rows[case.valid :], "tail")


@pytest.mark.rule("MAT-7", "MAT-3")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("halves", [False, True])
def test_operands_may_be_anywhere_in_memory(policy, halves):
    """Each operand in turn, and then all of them, one element past a multiple of 16 bytes."""
    given, dy = problem(cases.named("tail"), "bfloat16", Activation("swiglu"), transposed=True, bias="float32")
    form = in_halves(given, True) if halves else given
    y = ARRAYS.forward(given, transposed=True)
    gradients = ARRAYS.gradients(given, dy, MlpNeeds(), transposed=True)
    for names in (*((name,) for name in form), tuple(form)):
        moved = {name: shifted(value) if name in names else value for name, value in form.items()}
        asserts.bitwise(ARRAYS.forward(moved, transposed=True), y, f"y of arrays with {names}")
        found = ARRAYS.gradients(moved, shifted(dy), MlpNeeds(), transposed=True)
        for name, a, b in zip(LEAVES, found, gradients, strict=True):
            asserts.bitwise(a, b, f"gradient of {name} from arrays with {names}")
        held = {name: in_torch(value) for name, value in moved.items()}
        with torch.no_grad():
            asserts.bitwise(torch_bridge.grouped_mlp(**held), y, f"y of torch with {names}")
        for name in LEAVES:
            for each in held[name] if isinstance(held[name], tuple) else (held[name],):
                each.requires_grad_()
        torch_bridge.grouped_mlp(**held, residuals=policy).backward(in_torch(shifted(dy)))
        for name, wanted in zip(LEAVES, gradients, strict=True):
            several = held[name] if isinstance(held[name], tuple) else (held[name],)
            grads = torch.cat([each.grad for each in several], dim=1) if len(several) > 1 else several[0].grad
            asserts.bitwise(grads, wanted, f"gradient of {name} from torch with {names}")


def shifted(operand: Any) -> Any:
    """Copies one element past a multiple of 16 bytes."""
    return tuple(map(shifted, operand)) if isinstance(operand, tuple) else cases.unaligned(operand)


def in_torch(operand: Any) -> Any:
    """Tensors that share the memory of the arrays."""
    if isinstance(operand, tuple):
        return tuple(map(in_torch, operand))
    found = exchange.from_array(operand)
    assert found.data_ptr() == operand.ctypes.data
    return found


def check_gradients_asked_for(frontend: MlpFrontend, policy: str, choices: Iterable[MlpNeeds]) -> None:
    """Each gradient has the bits that it has where all are asked for."""
    given, dy = problem(cases.named("tail"), "bfloat16", Activation("swiglu"), bias="float32")
    whole = ARRAYS.gradients(given, dy, MlpNeeds())
    for needs in choices:
        found = frontend.gradients(given, dy, needs, residuals=policy)
        for name, need, a, b in zip(LEAVES, needs, found, whole, strict=True):
            assert (a is not None) == need, f"gradient of {name} with {needs}"
            if need:
                asserts.bitwise(a, b, f"gradient of {name} with {needs}")


@pytest.mark.rule("ALL-4", "MLP-11", "MLP-12")
@pytest.mark.parametrize("policy", POLICIES)
def test_no_gradient_depends_on_which_others_are_asked_for(policy):
    check_gradients_asked_for(TORCH, policy, ALL_NEEDS)


@pytest.mark.rule("ALL-4", "MLP-11", "MLP-12")
@pytest.mark.matrix(policy=POLICIES, **dict.fromkeys(LEAVES, (False, True)))
def test_no_gradient_in_jax_depends_on_which_others_are_asked_for(policy, x, wi, wo, probs, wi_bias, wo_bias):
    """Each choice is a program of its own, so their matrix is drawn."""
    check_gradients_asked_for(JAX, policy, [MlpNeeds(x, wi, wo, probs, wi_bias, wo_bias)])


@pytest.mark.rule("ALL-4", "MLP-9", "MLP-11")
@pytest.mark.parametrize("policy", POLICIES)
def test_torch_keeps_what_the_table_says(policy):
    """The saved rows, weights, biases and probabilities are those that `kept` names, in the policy's bytes."""
    case = cases.named("tail")
    given, _ = problem(case, "bfloat16", Activation("swiglu"), transposed=True, bias="float32")
    sizes = to_torch(given["group_sizes"])
    for needs in ALL_NEEDS:
        held = {name: to_torch(given[name]).requires_grad_(need) for name, need in zip(LEAVES, needs, strict=True)}
        with saved_tensors() as found:
            torch_bridge.grouped_mlp(**held, group_sizes=sizes, residuals=policy)
        op = Mlp(MlpNames(), Activation("swiglu"), residuals=Residuals(policy))
        keep = kept(op, needs, True, True, True)
        rows = case.rows * 2 * (case.k * keep.x + 2 * case.n * keep.h + case.n * keep.z)
        others = sum(held[name].nbytes for name in LEAVES if name != "x" and getattr(keep, name))
        expected = rows + others + sizes.nbytes if any(needs) else 0
        assert sum(each.nbytes for each in found) == expected, f"{policy} with {needs}"


@pytest.mark.rule("MLP-9", "MLM #3221")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("recipe", [None, FP8Block, MXFP8], ids=lambda r: r and r.name)
@pytest.mark.parametrize("implementation", [None, "composed"])
def test_torch_drops_rows_in_backward_as_soon_as_nothing_reads_them(recipe, policy, implementation):
    """The hidden rows once their gradients are there, and the activated rows once they are quantised, or multiplied.

    Dynamo leaves its hook in the interpreter after a failed compilation: frames then hold what they pass to a function
    until it returns.
    """

    def breaks(x: Any) -> Any:
        torch._dynamo.graph_break()
        return x

    with pytest.raises(Unsupported):
        torch.compile(breaks, backend="eager", fullgraph=True)(torch.ones(1))
    large = cases.Case("large rows", (300, 0, 90), 400, 48, 176, frozenset())  # so that no codes share a tensor
    given, dy = problem(large, "bfloat16", Activation("swiglu"), transposed=True)
    rows, width = len(dy), given["wo"].shape[2]
    assert rows * width > _record.SMALL_TEMPORARY
    names = ("x", "wi", "wo", "probs")
    leafy = {name: to_torch(given[name]).requires_grad_() for name in names}
    dy, sizes = to_torch(dy), to_torch(given["group_sizes"])
    assert width not in (rows, given["x"].shape[1])
    options = {"group_sizes": sizes, "recipe": recipe, "residuals": policy, "implementation": implementation}
    with living() as launches:
        torch_bridge.grouped_mlp(**leafy, **options).backward(dy)
    calls = [call for call, _ in launches]
    at_hidden = calls.index("grouped_matmul_dact")

    def hidden(made: Any) -> bool:
        return made.call == "grouped_matmul_act" and made.shape == (rows, 2 * width)

    def activated(made: Any) -> bool:
        return len(made.shape) == 2 and width in made.shape

    assert any(map(hidden, launches[at_hidden][1])), "they are read there"
    for call, alive in launches[at_hidden + 1 :]:
        assert not any(map(hidden, alive)), f"hidden rows at {call}, which is launched after that"
        forms = {made.call == "quantize" for made in alive if activated(made)}
        assert len(forms) <= 1, f"unquantised activated rows beside quantised ones at {call}"
    *_, of_wo, of_x, of_wi = (alive for call, alive in launches if call == "grouped_matmul")
    assert any(map(activated, of_wo)), "the gradient of the second weight reads them"
    for alive in (of_x, of_wi):
        assert not any(map(activated, alive)), "activated rows beside the first product"


@pytest.mark.rule("ALL-4")
def test_torch_launches_only_what_is_needed():
    given, dy = problem(cases.named("tail"), "bfloat16", Activation("swiglu"), transposed=True, bias="float32")
    sizes = to_torch(given["group_sizes"])
    for needs in ALL_NEEDS:
        held = {name: to_torch(given[name]).requires_grad_(need) for name, need in zip(LEAVES, needs, strict=True)}
        y = torch_bridge.grouped_mlp(**held, group_sizes=sizes, residuals="save_fc1")
        with counted_launches() as names:
            if any(needs):
                y.backward(to_torch(dy))
        assert names.count("grouped_matmul_dact") == needs_dz(needs), needs
        assert names.count("grouped_matmul") == needs.x + needs.wi + needs.wo, needs
        assert names.count("group_sum") == needs.wi_bias + needs.wo_bias, needs
        assert names.count("row_dot") == needs.probs, needs
        assert names.count("grouped_matmul_act") == 0, needs


@pytest.mark.rule("MLM #5850")
@pytest.mark.rule("MLP-1")
@pytest.mark.parametrize("frontend", [ARRAYS, JAX, TORCH], ids=str)
def test_the_example_of_the_contract(frontend):
    """Zero weights, b2 = (2, 4): y = p b2, dp = K b2 for dy = 1, db2 = sum of p in each group."""
    K, F = 4, 3
    given = {
        "x": np.ones((3, K), np.float32),
        "wi": np.zeros((2, K, 2 * F), np.float32),
        "wo": np.zeros((2, F, K), np.float32),
        "probs": np.array([0.25, 0.5, 0.125], np.float32),
        "wi_bias": None,
        "wo_bias": np.array([[2.0] * K, [4.0] * K], np.float32),
        "group_sizes": np.array([2, 1], np.int32),
    }
    asserts.bitwise(frontend.forward(given), np.repeat(np.float32([[0.5], [1], [0.5]]), K, axis=1), "y")
    needs = MlpNeeds(False, False, False, True, False, True)
    found = frontend.gradients(given, np.ones((3, K), np.float32), needs)
    asserts.bitwise(found.probs, np.float32([2, 2, 4]) * K, "dp")
    asserts.bitwise(found.wo_bias, np.repeat(np.float32([[0.75], [0.125]]), K, axis=1), "db2")


# ---- buffers and accumulators ----------------------------------------------------------------------------------------


@pytest.mark.rule("BUF-1", "BUF-3", "GRP-7")
def test_torch_writes_into_the_callers_buffers():
    case = cases.named("tail")
    given, dy = problem(case, "bfloat16", Activation("swiglu"), transposed=True, bias="bfloat16")
    sizes = to_torch(given["group_sizes"])
    held = {name: leaf(to_torch(given[name])) for name in LEAVES}
    y = torch_bridge.grouped_mlp(**held, group_sizes=sizes)
    y.backward(to_torch(dy))
    again = {name: leaf(to_torch(given[name])) for name in LEAVES}
    out, grad_input = (torch.full(given["x"].shape, cases.SENTINEL, dtype=torch.bfloat16) for _ in range(2))
    z = torch_bridge.grouped_mlp(**again, group_sizes=sizes, out=out, grad_input=grad_input)
    z.backward(to_torch(dy))
    assert z.data_ptr() == out.data_ptr()
    asserts.bitwise(out[: case.valid], y[: case.valid], "y")
    asserts.filled(out[case.valid :], cases.SENTINEL, "tail of y")
    asserts.bitwise(grad_input[: case.valid], held["x"].grad[: case.valid], "dx")
    asserts.filled(grad_input[case.valid :], cases.SENTINEL, "tail of dx")
    for name in LEAVES[1:]:
        asserts.bitwise(again[name].grad, held[name].grad, name)


@pytest.mark.rule("MAT-3", "GRD-5", "MAT-11")
@pytest.mark.parametrize("to", ["return", "tensors", "main_grad"])
@pytest.mark.parametrize("policy", POLICIES)
def test_torch_lists_of_weights_give_the_same_bits(policy, to):
    given, dy = problem(cases.named("tail"), "bfloat16", Activation("swiglu"), transposed=True, bias="float32")
    sizes = to_torch(given["group_sizes"])
    packed = {name: leaf(to_torch(given[name])) for name in LEAVES}
    options = {"group_sizes": sizes, "residuals": policy}
    torch_bridge.grouped_mlp(**packed, **options).backward(to_torch(dy))
    listed = {name: value for name, value in packed.items() if name in ("x", "probs")}
    listed = {name: leaf(value) for name, value in listed.items()}
    for name in ("wi", "wo", "wi_bias", "wo_bias"):
        listed[name] = leaves(packed[name])
    listed["wi"][1].requires_grad_(False)  # frozen
    accum = None
    # Sums start from zero, so rounding them gives the returned gradient; idle and frozen groups keep what they hold.
    idle = [size == 0 for size in given["group_sizes"]]
    held = {"wi": [each or g == 1 for g, each in enumerate(idle)], "wo": idle}
    buffers = {
        name: [torch.full(w.shape, 0.5 * keep) for w, keep in zip(listed[name], held[name], strict=True)]
        for name in ("wi", "wo")
    }
    if to == "tensors":
        accum = (buffers["wi"], buffers["wo"])
    elif to == "main_grad":
        accum = "main_grad"
        for name in ("wi", "wo"):
            for weight, buffer in zip(listed[name], buffers[name], strict=True):
                weight.main_grad = buffer
    torch_bridge.grouped_mlp(**listed, **options, wgrad_accum=accum).backward(to_torch(dy))
    asserts.bitwise(listed["x"].grad, packed["x"].grad, "dx")
    asserts.bitwise(listed["probs"].grad, packed["probs"].grad, "dp")
    for name in ("wi_bias", "wo_bias"):
        asserts.bitwise(torch.stack([each.grad for each in listed[name]]), packed[name].grad, name)
    for name in ("wi", "wo"):
        for g, (weight, buffer) in enumerate(zip(listed[name], buffers[name], strict=True)):
            if name == "wi" and g == 1:
                assert weight.grad is None
                asserts.filled(buffer, 0.5, "frozen")
            elif to == "return":
                asserts.bitwise(weight.grad, packed[name].grad[g], f"{name}[{g}]")
            else:
                assert weight.grad is None
                if idle[g]:
                    asserts.filled(buffer, 0.5, f"{name} of an empty group")
                else:
                    asserts.bitwise(buffer.to(torch.bfloat16), packed[name].grad[g], f"{name}[{g}]")


def halves_of(wi: torch.Tensor) -> list[torch.Tensor]:
    """Gate and linear half of [G, 2F, K], each a leaf that needs a gradient."""
    return [leaf(half.contiguous()) for half in wi.detach().chunk(2, dim=1)]


@pytest.mark.rule("MAT-3", "GRD-5", "MAT-11")
@pytest.mark.matrix(policy=POLICIES, to=("return", "tensors", "main_grad"), frozen=(None, 0, 1))
def test_torch_halves_have_gradients_of_their_own(policy, to, frozen):
    """Each gradient is computed, returned or added to its accumulator only if its half needs one."""
    given, dy = problem(cases.named("tail"), "bfloat16", Activation("swiglu"), transposed=True, bias="float32")
    options = {"group_sizes": to_torch(given["group_sizes"]), "residuals": policy}
    packed = {name: leaf(to_torch(given[name])) for name in LEAVES}
    torch_bridge.grouped_mlp(**packed, **options).backward(to_torch(dy))
    held: dict[str, Any] = {name: leaf(value) for name, value in packed.items()}
    held["wi"] = halves = halves_of(packed["wi"])
    if frozen is not None:
        halves[frozen].requires_grad_(False)
    # Sums start from zero, so rounding them gives the returned gradient; group 1 is empty and keeps what it holds.
    buffers = [torch.zeros(weight.shape) for weight in (*halves, held["wo"])]
    for buffer in buffers:
        buffer[1] = 0.5
    accum: Any = {"return": None, "tensors": (buffers[:2], buffers[2]), "main_grad": "main_grad"}[to]
    if to == "tensors" and frozen is not None:
        accum[0][frozen] = None
    if to == "main_grad":
        weights: list[Any] = [*halves, held["wo"]]
        for weight, buffer in zip(weights, buffers, strict=True):
            weight.main_grad = buffer
    y = torch_bridge.grouped_mlp(**held, **options, wgrad_accum=accum)
    with counted_launches() as names:
        y.backward(to_torch(dy))
    assert names.count("grouped_matmul") == 3 + (frozen is None), "dx, dwo, and one per half"
    for name in ("x", "wo_bias", "wi_bias", "probs"):
        asserts.bitwise(held[name].grad, packed[name].grad, name)
    expected = [*halves_of(packed["wi"].grad), packed["wo"].grad]
    for at, (weight, buffer, gradient) in enumerate(zip((*halves, held["wo"]), buffers, expected, strict=True)):
        if at == frozen:
            assert weight.grad is None
        elif to == "return":
            asserts.bitwise(weight.grad, gradient, f"weight {at}")
        else:
            assert weight.grad is None
            asserts.filled(buffer[1], 0.5, f"weight {at} of the empty group")
            buffer[1] = 0
            asserts.bitwise(buffer.to(torch.bfloat16), gradient, f"weight {at}")


@pytest.mark.rule("MAT-3", "ALL-4")
@pytest.mark.parametrize("half", [0, 1])
def test_jax_halves_have_gradients_of_their_own(half):
    given, dy = problem(cases.named("tail"), "bfloat16", Activation("swiglu"))
    whole: Any = ARRAYS.gradients(given, dy, MlpNeeds(wi_bias=False, wo_bias=False)).wi
    held, wi = {name: jnp.asarray(given[name]) for name in ("x", "wo", "probs")}, in_halves(given)["wi"]

    def mlp(one):
        pair = [one if at == half else jnp.asarray(each) for at, each in enumerate(wi)]
        return jax_grouped.grouped_mlp(**held, wi=pair, group_sizes=given["group_sizes"])

    gradient = jax.jit(lambda one: jax.vjp(mlp, one)[1](jnp.asarray(dy))[0])
    asserts.bitwise(gradient(wi[half]), np.split(whole, 2, axis=2)[half], f"half {half}")
    calls = optimised(gradient.lower(wi[half])).count('custom_call_target="jg_')
    assert calls == 3, "the first product, the second one's backward, and the half's gradient"


@pytest.mark.rule("ACC-1", "ACC-2", "ACC-3", "MAT-3", "MAT-11")
@pytest.mark.parametrize("form", ["sink", "ref"])
@pytest.mark.parametrize("halves", [False, True])
def test_jax_accumulators_hold_the_sum(form, halves):
    given, dy = problem(cases.named("tail"), "bfloat16", Activation("swiglu"), bias="float32")
    held = jax.tree.map(jnp.asarray, in_halves(given) if halves else given)
    start = jax.tree.map(  # group 1 is empty
        lambda weight: jnp.zeros(weight.shape, jnp.float32).at[1].set(0.5), (held["wi"], held["wo"])
    )

    def loss(x, wi, wo, accum):
        named = {**held, "x": x, "wi": wi, "wo": wo}
        y = jax_grouped.grouped_mlp(**named, wgrad_accum=accum)
        return jnp.sum(y.astype(jnp.float32) * jnp.nan_to_num(jnp.asarray(dy)).astype(jnp.float32))

    dx, dwi, dwo = jax.grad(loss, (0, 1, 2))(held["x"], held["wi"], held["wo"], None)
    if form == "sink":
        dx2, zi, zo, new = jax.grad(loss, (0, 1, 2, 3))(held["x"], held["wi"], held["wo"], start)
    else:
        refs = jax.tree.map(jax.new_ref, start)
        dx2, zi, zo = jax.grad(loss, (0, 1, 2))(held["x"], held["wi"], held["wo"], refs)
        new = jax.tree.map(lambda ref: ref[...], refs)
    asserts.bitwise(dx2, dx, "dx")
    assert not any(np.asarray(each).any() for each in jax.tree.leaves((zi, zo)))
    assert jax.tree.structure(new) == jax.tree.structure((dwi, dwo))
    for at, (got, dw) in enumerate(zip(*map(jax.tree.leaves, (new, (dwi, dwo))), strict=True)):
        asserts.bitwise(np.asarray(got.at[1].set(0)).astype(dw.dtype), np.asarray(dw), f"weight {at}")
        asserts.filled(np.asarray(got)[1], 0.5, f"weight {at} of the empty group")


# ---- deferred weight gradients ---------------------------------------------------------------------------------------


def microbatches(count: int) -> list[tuple[dict[str, Any], np.ndarray]]:
    found = []
    for sizes in ((20, 0, 13), (5, 17, 9), (0, 0, 40))[:count]:
        case = cases.Case(f"micro{sizes}", sizes, 50, 24, 40, frozenset())
        found.append(problem(case, "bfloat16", Activation("swiglu"), transposed=True, bias="float32"))
    return found


@pytest.mark.rule("DLY-3", "ACC-6")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("halves", [False, True])
def test_torch_delayed_microbatches_equal_the_undelayed_run(policy, halves):
    weights: dict[str, Any] = {name: to_torch(microbatches(1)[0][0][name]) for name in ("wi", "wo")}
    weights |= {name: to_torch(microbatches(1)[0][0][name]) for name in ("wi_bias", "wo_bias")}
    if halves:
        weights["wi"] = [half.detach() for half in halves_of(weights["wi"])]

    def like(weight: Any) -> Any:
        return [like(each) for each in weight] if isinstance(weight, list) else torch.zeros(weight.shape)

    def flat(wi: Any, wo: Any) -> list[Any]:
        return [*(wi if isinstance(wi, list) else [wi]), wo]

    now, later = ([like(weights[name]) for name in ("wi", "wo")] for _ in range(2))
    queue, undelayed = [], []
    for given, dy in microbatches(3):
        rows = {name: to_torch(given[name]) for name in ("x", "probs")}
        sizes = to_torch(given["group_sizes"])
        leafy: dict[str, Any] = {
            name: [leaf(each) for each in value] if isinstance(value, list) else leaf(value)
            for name, value in {**weights, **rows}.items()
        }
        y = torch_bridge.grouped_mlp(**leafy, group_sizes=sizes, residuals=policy, wgrad_accum=tuple(now))
        y.backward(to_torch(dy))
        undelayed.append((y, leafy))
        z, res = torch_bridge.grouped_mlp_fwd(**weights, **rows, group_sizes=sizes, residuals=policy)
        asserts.bitwise(z, y, "y")
        dx, dp, db1, db2, deferred = torch_bridge.grouped_mlp_bwd_dx(res, to_torch(dy))
        for name, got in (("x", dx), ("probs", dp), ("wi_bias", db1), ("wo_bias", db2)):
            asserts.bitwise(got, leafy[name].grad, name)
        queue.append(deferred)
    for deferred in queue:
        assert torch_bridge.grouped_mlp_bwd_dw(deferred, tuple(later)) == (None, None)
    for at, (a, b) in enumerate(zip(flat(*later), flat(*now), strict=True)):
        asserts.bitwise(a, b, f"weight {at}")
    returned = torch_bridge.grouped_mlp_bwd_dw(queue[0])
    fresh = [like(weights[name]) for name in ("wi", "wo")]
    torch_bridge.grouped_mlp_bwd_dw(queue[0], tuple(fresh))
    for at, (a, b) in enumerate(zip(flat(*returned), flat(*fresh), strict=True)):
        assert isinstance(a, torch.Tensor)
        asserts.bitwise(a, b.to(a.dtype), f"weight {at}")


@pytest.mark.rule("DLY-3", "ACC-6")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("halves", [False, True])
def test_jax_delayed_microbatches_equal_the_undelayed_run(policy, halves):
    first = microbatches(1)[0][0]
    first = in_halves(first, True) if halves else first
    weights = {name: jax.tree.map(jnp.asarray, first[name]) for name in ("wi", "wo", "wi_bias", "wo_bias")}
    now = later = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), (weights["wi"], weights["wo"]))
    queue = []
    for given, dy in microbatches(3):
        rows = {name: jnp.asarray(given[name]) for name in ("x", "probs")}
        options = {"group_sizes": given["group_sizes"], "rhs_transposed": True, "residuals": policy}

        def run(x, probs, wi, wo, wi_bias, wo_bias, accum, options=options):
            named = {"x": x, "probs": probs, "wi": wi, "wo": wo, "wi_bias": wi_bias, "wo_bias": wo_bias}
            return jax_grouped.grouped_mlp(**named, **options, wgrad_accum=accum)

        y, pull = jax.vjp(run, *rows.values(), *weights.values(), now)
        dx, dp, _, _, db1, db2, now = pull(jnp.asarray(dy))
        z, res = jax.jit(
            lambda rows, weights, options=options: accumulate.grouped_mlp_fwd(**rows, **weights, **options)
        )(rows, weights)
        asserts.bitwise(z, y, "y")
        dx2, dp2, db12, db22, deferred = jax.jit(accumulate.grouped_mlp_bwd_dx)(res, jnp.asarray(dy))
        for name, a, b in (("dx", dx2, dx), ("dp", dp2, dp), ("db1", db12, db1), ("db2", db22, db2)):
            asserts.bitwise(a, b, name)
        queue.append(deferred)
    for deferred in queue:
        later = jax.jit(accumulate.grouped_mlp_bwd_dw, donate_argnums=1)(deferred, later)
    for at, (a, b) in enumerate(zip(*map(jax.tree.leaves, (later, now)), strict=True)):
        asserts.bitwise(a, b, f"weight {at}")


def parts(**changed: Any) -> tuple[dict[str, torch.Tensor], Any, torch.Tensor]:
    """(operands, residuals of the forward part, dy)."""
    given, dy = problem(cases.named("tail"), "bfloat16", Activation("swiglu"), transposed=True, bias="float32")
    held = {name: to_torch(given[name]) for name in LEAVES} | changed
    _, res = torch_bridge.grouped_mlp_fwd(**held, group_sizes=to_torch(given["group_sizes"]))
    return held, res, to_torch(dy)


@pytest.mark.rule("MAT-5", "GRD-5", "DLY-9")
def test_torch_parts_skip_members_without_an_accumulator():
    given, _ = problem(cases.named("tail"), "bfloat16", Activation("swiglu"), transposed=True)
    members = {name: list(to_torch(given[name])) for name in ("wi", "wo")}
    _, res, dy = parts(**members, wi_bias=None, wo_bias=None)
    *_, deferred = torch_bridge.grouped_mlp_bwd_dx(res, dy)
    whole: Any = torch_bridge.grouped_mlp_bwd_dw(deferred)
    some = [torch.zeros(each.shape) if g != 1 else None for g, each in enumerate(members["wi"])]
    none = [None] * len(members["wo"])
    assert torch_bridge.grouped_mlp_bwd_dw(deferred, (some, none)) == (None, None)
    for g, each in enumerate(some):
        if each is not None:
            asserts.bitwise(each.to(torch.bfloat16), whole[0][g], f"wi[{g}]")


@pytest.mark.rule("DLY-3")
@pytest.mark.parametrize("recipe", [None, MXFP8], ids=["plain", "mxfp8"])
def test_torch_parts_add_whatever_parameters_say(recipe):
    held, res, dy = parts(recipe=recipe)
    for name in ("wi", "wo"):
        setattr(held[name], "overwrite_main_grad", True)  # noqa: B010 - Tensor declares no such attributes
        setattr(held[name], "grad_added_to_main_grad", False)  # noqa: B010
    *_, deferred = torch_bridge.grouped_mlp_bwd_dx(res, dy)
    pair = tuple(torch.ones(held[name].shape) for name in ("wi", "wo"))
    assert torch_bridge.grouped_mlp_bwd_dw(deferred, pair) == (None, None)
    for name, accumulator in zip(("wi", "wo"), pair, strict=True):
        assert vars(held[name])["grad_added_to_main_grad"] is False
        asserts.filled(accumulator[1], 1.0, f"{name} of an empty group")


@pytest.mark.rule("MLP-1", "ACC-6")
@pytest.mark.parametrize("recipe", [None, MXFP8], ids=["plain", "mxfp8"])
@pytest.mark.parametrize("frontend", ["torch", "jax"])
def test_parts_take_probabilities_of_16_bits(frontend, recipe):
    """Their gradient has their dtype, and the gradient of the second bias reads them."""
    given, dy = problem(
        cases.named("tail"), "bfloat16", Activation("swiglu"), transposed=True, probs="bfloat16", bias="float32"
    )
    wanted: Any = ARRAYS.gradients(given, dy, MlpNeeds(), transposed=True, recipe=recipe)
    assert wanted[LEAVES.index("probs")].dtype == given["probs"].dtype, "the rule, which all frontends run"
    array, of = (to_torch, torch_bridge) if frontend == "torch" else (jnp.asarray, accumulate)
    held = {name: array(value) for name, value in given.items()}
    options = {} if frontend == "torch" else {"rhs_transposed": True}
    _, kept = of.grouped_mlp_fwd(**held, recipe=recipe, **options)
    dx, dp, db1, db2, deferred = of.grouped_mlp_bwd_dx(kept, array(dy))
    dw1, dw2 = of.grouped_mlp_bwd_dw(deferred)
    for name, found, right in zip(LEAVES, (dx, dw1, dw2, dp, db1, db2), wanted, strict=True):
        asserts.bitwise(found, right, name)


@pytest.mark.rule("ALL-4", "DLY-9")
def test_torch_parts_keep_nothing_for_weights_that_need_no_gradient():
    given, dy = problem(cases.named("tail"), "bfloat16", Activation("swiglu"), transposed=True)
    held = {name: None if given[name] is None else to_torch(given[name]) for name in LEAVES}
    needs = MlpNeeds(wi=False, wo=False)
    _, res = torch_bridge.grouped_mlp_fwd(**held, group_sizes=to_torch(given["group_sizes"]), needs=needs)
    *_, deferred = torch_bridge.grouped_mlp_bwd_dx(res, to_torch(dy))
    assert deferred.work == (None, None)
    assert torch_bridge.grouped_mlp_bwd_dw(deferred) == (None, None)


@pytest.mark.rule("BUF-2")
def test_torch_parts_count_a_buffer_as_written():
    held, res, dy = parts()
    buffer = torch.empty_like(held["x"])
    before = buffer._version
    torch_bridge.grouped_mlp_bwd_dx(res, dy, grad_input=buffer)
    assert buffer._version > before


@pytest.mark.rule("ALL-4", "QNT-7")
def test_torch_parts_keep_nothing_for_quantised_weights_without_a_master():
    held, _, dy = parts(wi_bias=None, wo_bias=None)
    held |= {name: torch_bridge.quantize(held[name], "mxfp8", axis=(2, 1)) for name in ("wi", "wo")}
    given, _ = problem(cases.named("tail"), "bfloat16", Activation("swiglu"), transposed=True)
    _, res = torch_bridge.grouped_mlp_fwd(**held, group_sizes=to_torch(given["group_sizes"]), recipe=MXFP8)
    dx, *_, deferred = torch_bridge.grouped_mlp_bwd_dx(res, dy)
    assert dx is not None
    assert deferred.work == (None, None)
    assert torch_bridge.grouped_mlp_bwd_dw(deferred) == (None, None)


@pytest.mark.rule("BUF-2", "ERR-1", "ACC-6")
def test_refusals_of_the_parts():
    held, res, dy = parts()
    arguments = {**held, "group_sizes": res.sizes}
    for name, part in (("wgrad_accum", "bwd_dw"), ("grad_input", "bwd_dx")):
        with asserts.refused(ValueError, (f"`{name}` of grouped_mlp_fwd", "given", "expected None", part)):
            torch_bridge.grouped_mlp_fwd(**arguments, **{name: "main_grad"})
    with asserts.refused(TypeError, ("`dy`", "float32", "bfloat16", "cast")):
        torch_bridge.grouped_mlp_bwd_dx(res, dy.float())
    with asserts.refused(ValueError, ("`dy`", "(49, 24)", "(50, 24)", "gradient of y")):
        torch_bridge.grouped_mlp_bwd_dx(res, dy[:49])
    with asserts.refused(ValueError, ("`grad_input`", "overlaps `dy`", "of its own", "allocate")):
        torch_bridge.grouped_mlp_bwd_dx(res, dy, grad_input=dy)
    with asserts.refused(ValueError, ("`grad_input`", "overlaps `x`", "of its own", "allocate")):
        torch_bridge.grouped_mlp_bwd_dx(res, dy, grad_input=held["x"])
    with asserts.refused(ValueError, ("`grad_input`", "(50, 23)", "(50, 24)", "allocate")):
        torch_bridge.grouped_mlp_bwd_dx(res, dy, grad_input=torch.zeros(50, 23, dtype=torch.bfloat16))
    *_, deferred = torch_bridge.grouped_mlp_bwd_dx(res, dy)
    memory = torch.zeros(held["wi"].numel() + held["wo"].numel() - 1)
    pair = (memory[: held["wi"].numel()].view_as(held["wi"]), memory[-held["wo"].numel() :].view_as(held["wo"]))
    with asserts.refused(ValueError, ("`wgrad_accum[1]`", "overlaps `wgrad_accum[0]`", "of its own", "allocate")):
        torch_bridge.grouped_mlp_bwd_dw(deferred, pair)
    assert not memory.any(), "nothing was added before the refusal"
    given, cotangent = problem(cases.named("tail"), "bfloat16", Activation("swiglu"))
    _, kept_by_jax = accumulate.grouped_mlp_fwd(**given)
    with asserts.refused(TypeError, ("`dy`", "float32", "bfloat16", "cast")):
        accumulate.grouped_mlp_bwd_dx(kept_by_jax, jnp.asarray(cotangent, jnp.float32))


@pytest.mark.rule("ACC-2", "ERR-1")
def test_jax_refuses_accumulators_of_two_kinds():
    given, _ = problem(cases.named("tail"), "float32", Activation("swiglu"))
    arrays = [jnp.zeros(given[name].shape) for name in ("wi", "wo")]
    with asserts.refused(
        ValueError, ("`wgrad_accum`", "an array beside a jax.Ref", "two of one kind", "pass two arrays")
    ):
        jax_grouped.grouped_mlp(**given, wgrad_accum=(jax.new_ref(arrays[0]), arrays[1]))
    with asserts.refused(ValueError, ("`wgrad_accum`", "one array for both", "expected one each")):
        jax_grouped.grouped_mlp(**given, wgrad_accum=(arrays[0], arrays[0]))


@pytest.mark.rule("MAT-3", "MLP-5", "ERR-1")
@pytest.mark.parametrize("recipe", [None, MXFP8], ids=["plain", "recipe"])
def test_refusals_of_halves(recipe):
    given, _ = problem(cases.named("groups_2"), "float32", Activation("swiglu"))
    given["recipe"] = recipe
    wi = in_halves(given)["wi"]
    short = wi[1][:, :, :-1].copy()
    plain = {**given, "wi": wi, "activation": "relu"}
    for frontend in (
        lambda **o: arrays.grouped_mlp(**o),
        lambda **o: jax_grouped.grouped_mlp(**o),
        lambda **o: torch_bridge.grouped_mlp(
            **{name: jax.tree.map(to_torch, v) if name in (*LEAVES, "group_sizes") else v for name, v in o.items()},
            rhs_transposed=False,
        ),
    ):
        with asserts.refused(ValueError, ("`wi[1]`", f"{short.shape}", f"{wi[0].shape} = shape of `wi[0]`", "pass")):
            frontend(**{**given, "wi": (wi[0], short)})
        with asserts.refused(TypeError, ("`wi[1]`", "float16", "float32", "cast")):
            frontend(**{**given, "wi": (wi[0], wi[1].astype(np.float16))})
        with asserts.refused(ValueError, ("`wi`", "two arrays", "expected one for relu", "pass one array")):
            frontend(**plain)
        with asserts.refused(ValueError, ("`interleave` of Activation", "1 beside `wi`", "expected None", "one piece")):
            frontend(**{**plain, "activation": Activation("swiglu", interleave=1)})
    quantized = [arrays.quantize(each, "mxfp8", axis=1) for each in wi]
    with asserts.refused(TypeError, ("`wi`", "two quantised arrays", "two plain arrays", "pass one array")):
        arrays.grouped_mlp(**{**given, "wi": quantized})
    with asserts.refused(ValueError, ("`wi[1]`", "strides", "expected a C-contiguous array", "copy it")):
        arrays.grouped_mlp(**{**given, "wi": (wi[0], np.asfortranarray(wi[1]))})
    with asserts.refused(TypeError, ("`wi[0]`", "list", "expected a NumPy or CuPy array", "convert it")):
        arrays.grouped_mlp(**{**given, "wi": [each.tolist() for each in wi]})
    for frontend in (arrays.grouped_mlp, jax_grouped.grouped_mlp):
        with asserts.refused(ValueError, ("`wi`", "3 arrays", "expected one, or gate and linear half", "stack")):
            frontend(**{**given, "wi": [wi[0]] * 3})
        with asserts.refused(ValueError, ("`wi[0]`", "expected three axes [G, K, F]", "stack")):
            frontend(**{**given, "wi": (wi[0][0], wi[1][0])})
    with asserts.refused(NotImplementedError, ("`wi`", "two arrays beside recipe MXFP8", "expected one", "one array")):
        accumulate.grouped_mlp_fwd(**{**given, "wi": wi, "recipe": MXFP8})
    zeros = [jnp.zeros(each.shape) for each in wi]
    with asserts.refused(TypeError, ("`wgrad_accum[0]`", "expected None or a pair", "put None")):
        jax_grouped.grouped_mlp(**{**given, "wi": wi}, wgrad_accum=(zeros[0], None))
    with asserts.refused(ValueError, ("`wgrad_accum`", "one array for", "expected one each")):
        jax_grouped.grouped_mlp(**{**given, "wi": wi}, wgrad_accum=((zeros[0], zeros[0]), None))
    held = {name: to_torch(given[name]) for name in ("x", "wo", "group_sizes")}
    leafs = [leaf(to_torch(each)) for each in wi]
    with asserts.refused(ValueError, ("`wgrad_accum[0]`", "1 tensors", "2 weights", "in the same form")):
        accum = (torch.zeros(wi[0].shape), None)
        torch_bridge.grouped_mlp(**held, wi=leafs, rhs_transposed=False, wgrad_accum=accum)


@pytest.mark.rule("MAT-3", "ERR-1")
def test_torch_refuses_operands_that_lack_the_axis_of_groups():
    given, _ = problem(cases.named("groups_1"), "float32", Activation("swiglu"), transposed=True, bias="float32")
    held = {name: to_torch(given[name]) for name in LEAVES}
    for name, letters in (("wi", "[G, W, K]"), ("wo", "[G, K, F]"), ("wi_bias", "[G, W]"), ("wo_bias", "[G, K]")):
        with asserts.refused(ValueError, (f"`{name}`", f"axes {letters}", "one")):
            torch_bridge.grouped_mlp(**{**held, name: held[name][0]}, group_sizes=to_torch(given["group_sizes"]))


@pytest.mark.rule("ERR-3")
def test_torch_explains_the_program_that_runs():
    """Plans of lists include their tables, and buffers count as the caller's."""
    given, _ = problem(cases.named("tail"), "bfloat16", Activation("swiglu"), transposed=True)
    held = {name: None if given[name] is None else leaf(to_torch(given[name])) for name in LEAVES}
    listed = {**held, "wi": leaves(held["wi"]), "wo": leaves(held["wo"])}
    sizes, out = to_torch(given["group_sizes"]), torch.zeros(given["x"].shape, dtype=torch.bfloat16)
    planned = _PLANS[torch_bridge.grouped_mlp]
    defaults = {k: p.default for k, p in signature(torch_bridge.grouped_mlp).parameters.items()}
    made = planned(**{**defaults, **listed, "group_sizes": sizes, "out": out})
    tables = [
        call.name
        for call in made
        if any(spec and "table" in s for s, spec in zip(SLOTS[call.name], call.inputs, strict=True))
    ]
    assert tables == ["grouped_matmul_act", "grouped_matmul", "grouped_matmul_dact", "grouped_matmul"]
    assert made[1].aliases, "the caller's buffer"
    halves = halves_of(held["wi"])
    halves[0].requires_grad_(False)
    accum = ([None, torch.zeros(halves[1].shape)], None)
    made = planned(**{**defaults, **held, "wi": halves, "group_sizes": sizes, "wgrad_accum": accum})
    two = [call.name for call in made if dict(zip(SLOTS[call.name], call.inputs, strict=True)).get("rhs_up")]
    assert two == ["grouped_matmul_act", "grouped_matmul"], "forward and dx"
    read = [dict(call.params).get("lhs_half") for call in made if dict(call.params).get("contract_rows")]
    assert read == [0, 2], "the gradient of wo, and that of the linear half"
    text = torch_bridge.explain(torch_bridge.grouped_mlp, **{**held, "wi": halves}, group_sizes=sizes)
    assert "grouped_matmul_any_cpu" in text


@pytest.mark.rule("GRD-13")
@pytest.mark.parametrize("allow_unused", [False, True])
def test_torch_refuses_a_second_derivative(allow_unused):
    given, _ = problem(cases.named("groups_1"), "float32", Activation("swiglu"), transposed=True)
    held = {name: None if given[name] is None else leaf(to_torch(given[name])) for name in LEAVES}
    y = torch_bridge.grouped_mlp(**held, group_sizes=to_torch(given["group_sizes"]))
    x: Any = held["x"]
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with asserts.refused(RuntimeError, ["grouped_mlp", "differentiated twice", "expected once", "compose"]):
        torch.autograd.grad(dx.sum(), x, allow_unused=allow_unused)


# ---- what frameworks ask ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_operators_pass_opcheck(halves: bool) -> None:
    given, dy = problem(cases.named("tail"), "float32", Activation("swiglu"), transposed=True, bias="float32")
    sizes, dy = to_torch(given["group_sizes"]), to_torch(np.nan_to_num(dy))

    def step() -> None:
        held: Any = {name: leaf(to_torch(np.nan_to_num(given[name]))) for name in LEAVES}
        if halves:
            gate, linear = halves_of(held["wi"])  # the gradient of the linear half is computed by itself
            held["wi"] = [gate.detach(), linear.detach().requires_grad_()]
        torch_bridge.grouped_mlp(**held, group_sizes=sizes).backward(dy)

    assert {"mlp", "mlp_at_hidden", "mlp_first_product", *(["weight_grad"] if halves else [])} == opcheck(step)


@pytest.mark.rule("GRD-12")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo makes an instance of autograd.Function
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.matrix(
    backend=("eager", "aot_eager"), policy=POLICIES, to=("return", "tensors", "main_grad"), halves=(False, True)
)
def test_torch_compiles_whole(backend, policy, to, halves):
    given, dy = problem(cases.named("tail"), "bfloat16", Activation("swiglu"), transposed=True, bias="float32")
    sizes = to_torch(given["group_sizes"])

    def step(accum, x, wi, *values):
        named = {"x": x, "wi": wi, **dict(zip(LEAVES[2:], values, strict=True))}
        return torch_bridge.grouped_mlp(**named, group_sizes=sizes, residuals=policy, wgrad_accum=accum)

    results = []
    torch.compiler.reset()
    for function in (step, torch.compile(step, fullgraph=True, backend=backend)):
        held = [leaf(to_torch(given[name])) for name in LEAVES]
        wi = halves_of(held[1]) if halves else [held[1]]
        weights: list[Any] = [*wi, held[2]]
        buffers = [torch.full(weight.shape, 0.5) for weight in weights]
        if to == "main_grad":
            for weight, buffer in zip(weights, buffers, strict=True):
                weight.main_grad = buffer
        given_to: Any = {"return": None, "tensors": (buffers[:-1], buffers[-1]), "main_grad": "main_grad"}[to]
        if to == "tensors" and not halves:
            given_to = tuple(buffers)
        y = function(given_to, held[0], wi if halves else wi[0], *held[2:])
        y.backward(to_torch(dy))
        results.append([y, *buffers, *(each.grad for each in (held[0], *wi, *held[2:]))])
    for at, (a, b) in enumerate(zip(*results, strict=True)):
        assert (a is None) == (b is None), f"result {at}"
        if a is not None:
            asserts.bitwise(a, b, f"result {at}")


@pytest.mark.rule("marin #5394")
@pytest.mark.rule("ACC-7", "ACC-4", "MAT-3")
@pytest.mark.parametrize("halves", [False, True])
def test_jax_step_has_no_copies_of_weights_and_drops_what_is_frozen(halves):
    given, _ = problem(cases.named("tail"), "bfloat16", Activation("swiglu"))
    given = in_halves(given) if halves else given
    held = {name: jax.tree.map(jnp.asarray, given[name]) for name in ("x", "wi", "wo", "probs")}
    accum = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), (held["wi"], held["wo"]))

    def loss(weights, accum, x, probs):
        y = jax_grouped.grouped_mlp(x, weights[0], weights[1], given["group_sizes"], probs=probs, wgrad_accum=accum)
        return jnp.sum(y.astype(jnp.float32))

    step = jax.jit(accumulate.value_and_accumulate_grad(loss), donate_argnums=1)
    text = optimised(step.lower((held["wi"], held["wo"]), accum, held["x"], held["probs"]))
    assert copies(text, r"(bf16|f32)\[3,") == 0, "a weight or an accumulator is copied"
    assert "concatenate" not in text
    frozen = jax.jit(jax.grad(lambda x: loss((held["wi"], held["wo"]), None, x, held["probs"])))
    calls = optimised(frozen.lower(held["x"])).count('custom_call_target="jg_')
    assert calls == 3, "the first product, which is kept, and backward's two: no weight gradient, no unread y"


@pytest.mark.rule("BUF-7")
@pytest.mark.parametrize("donated", [False, True])
def test_jax_out_is_written_in_place_if_donated(donated):
    case = cases.named("tail")
    given, _ = problem(case, "bfloat16", Activation("swiglu"), bias="float32")
    held = {name: jnp.asarray(given[name]) for name in LEAVES}

    def mlp(held, out):
        return jax_grouped.grouped_mlp(**held, group_sizes=given["group_sizes"], out=out)

    out = jnp.full(held["x"].shape, cases.SENTINEL, jnp.bfloat16)
    lowered = jax.jit(mlp, donate_argnums=(1,) if donated else ()).lower(held, out)
    assert copies(optimised(lowered), r"bf16\[50,24\]") == (0 if donated else 1)
    y = mlp(held, out)
    asserts.bitwise(y[: case.valid], mlp(held, None)[: case.valid], "y")
    asserts.filled(y[case.valid :], cases.SENTINEL, "tail")


@pytest.mark.rule("ACC-9", "ACC-6", "ERR-1")
@pytest.mark.parametrize("at", [0, 1], ids=["wi", "wo"])
@pytest.mark.parametrize(("now", "varies"), [(True, "x"), (False, "x"), (False, "dy")], ids=str)
def test_jax_refuses_replicated_accumulators(now, varies, at):
    """For either weight, if its gradient varies because the rows vary, or because the rows' gradients vary."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    given, dy = problem(cases.named("tail"), "float32", Activation("swiglu"), probs=None)
    held = {name: jnp.asarray(given[name]) for name in ("x", "wi", "wo", "group_sizes")}
    data, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    def local(x, dy, own, replicated):
        pair = (own, replicated) if at else (replicated, own)
        operands = {**held, "x": x}
        if now:
            refs = tuple(map(jax.new_ref, pair))
            y, pull = jax.vjp(lambda x: jax_grouped.grouped_mlp(**{**operands, "x": x}, wgrad_accum=refs), x)
            return pull(dy), y
        _, kept = accumulate.grouped_mlp_fwd(**operands)
        *_, deferred = accumulate.grouped_mlp_bwd_dx(kept, dy)
        return accumulate.grouped_mlp_bwd_dw(deferred, pair)

    specs = (data if varies == "x" else whole, data if varies == "dy" else whole)
    f = jax.shard_map(local, mesh=mesh, in_specs=(*specs, data, whole), out_specs=data)
    rows = [
        jnp.concatenate([jnp.asarray(each)] * (1 + (name == varies))) for name, each in (("x", held["x"]), ("dy", dy))
    ]
    replicated = held["wo" if at else "wi"]
    own = jnp.concatenate([held["wi" if at else "wo"]] * 2)
    with asserts.refused(ValueError, ["`wgrad_accum`", "replicated over the mesh axes ['data']", "give each shard"]):
        jax.eval_shape(f, *rows, own, replicated)


@pytest.mark.rule("MLP-9", "MLP-11")
@pytest.mark.parametrize("policy", POLICIES)
def test_jax_keeps_what_the_table_says(policy):
    """Bytes that forward hands to backward, for every mask of needed gradients."""
    case = cases.named("tail")
    given, _ = problem(case, "bfloat16", Activation("swiglu"), bias="float32")
    held = {name: jnp.asarray(given[name]) for name in LEAVES}
    op = Mlp(MlpNames(), Activation("swiglu"), residuals=Residuals(policy))
    for needs in ALL_NEEDS:
        live = [name for name, need in needs._asdict().items() if need]
        if not live:
            continue

        def mlp(*some, live=live):
            named = {**held, **dict(zip(live, some, strict=True))}
            return jax_grouped.grouped_mlp(**named, group_sizes=given["group_sizes"], residuals=policy)

        _, pull = jax.vjp(mlp, *(held[name] for name in live))
        keep = kept(op, needs, True, True, True)
        rows = case.rows * 2 * (case.k * keep.x + 2 * case.n * keep.h + case.n * keep.z)
        others = sum(held[name].nbytes for name in LEAVES if name != "x" and getattr(keep, name))
        found = sum(leaf.nbytes for leaf in jax.tree.leaves(pull))
        assert found == rows + others + 4 * case.groups, f"{policy} with {needs}"


@pytest.mark.rule("ACC-8", "ACC-9")
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("halves", [False, True])
def test_jax_under_shard_map(check_vma, halves):
    """Rows are split over a data axis, weights replicated: only gradients of replicated operands are summed."""
    shards = len(jax.devices())
    assert shards > 1, "the suite runs on several host devices"
    mesh = jax.make_mesh((shards,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    parts = [problem(cases.named("tail"), "float32", Activation("swiglu"), bias="float32") for _ in range(shards)]
    given = parts[0][0]
    form = in_halves(given) if halves else given
    weights = [jax.tree.map(jnp.asarray, form[name]) for name in ("wi", "wo", "wi_bias", "wo_bias")]
    rows = [np.concatenate([part[0][name] * (1 + i) for i, part in enumerate(parts)]) for name in ("x", "probs")]
    sizes = np.concatenate([part[0]["group_sizes"] for part in parts])
    dy = np.concatenate([part[1] for part in parts])

    def local(sizes, x, probs, wi, wo, wi_bias, wo_bias):
        return jax_grouped.grouped_mlp(x, wi, wo, sizes, probs=probs, wi_bias=wi_bias, wo_bias=wo_bias)

    data, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    specs = (data, data, data, whole, whole, whole, whole)
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=data, check_vma=check_vma)

    def passes(layer, sizes, dy, *values):
        y, pull = jax.vjp(partial(layer, sizes), *values)
        return y, pull(dy)

    z, found = jax.jit(partial(passes, sharded))(sizes, dy, *rows, *weights)
    alone = jax.jit(partial(passes, local))

    m, g = given["x"].shape[0], len(given["group_sizes"])
    terms: list[Any] = []
    for i in range(shards):
        some = slice(m * i, m * (i + 1))
        of = sizes[g * i : g * (i + 1)]
        y, (dx, dp, *rest) = alone(of, dy[some], *(each[some] for each in rows), *weights)
        asserts.bitwise(np.asarray(z)[some], y, "y")
        asserts.bitwise(np.asarray(found[0])[some], dx, "dx")
        asserts.bitwise(np.asarray(found[1])[some], dp, "dp")
        terms.append([np.asarray(each, np.float64) for each in jax.tree.leaves(rest)])
    for at, (a, *each) in enumerate(zip(jax.tree.leaves(found[2:]), *terms, strict=True)):
        error = shards * bounds.F32_HALF_ULP * np.sum(np.abs(each), axis=0)
        asserts.within(a, bounds.Bounded(np.sum(each, axis=0), error, "float32"), f"weight or bias {at}")
    assert "all-gather" not in optimised(jax.jit(sharded).lower(sizes, *rows, *weights))
