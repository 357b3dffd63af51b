"""`routed_mlp`: the bits of permute, MLP and sum, the dense oracle, what is kept, where gradients go, graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from grouped_core.mlp_spec import POLICIES
from tests import asserts, bounds
from tests.torch_frontend.routing_tools import Layer, dense_mlp, draw, experts_of, layer, near
from tests.torch_frontend.torch_tools import allocations, leaf, opcheck, saved_tensors, tensor
from torch_bridge import (
    BF16,
    MXFP8,
    NVFP4,
    Activation,
    FP8Block,
    FP8Current,
    FP8Delayed,
    grouped_mlp,
    quantize,
    route,
    routed_mlp,
    scaling_state,
    straight_through,
    update_scaling,
)

T, E, K, H, F = 33, 5, 2, 32, 16
RECIPES = (None, FP8Current, FP8Block, MXFP8, NVFP4)


@pytest.fixture(scope="module", autouse=True)
def _nothing_of_other_modules() -> None:
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch.compiler.reset()  # for the next test, too


def _slots(tokens: int = T, k: int = K, experts: int = E, *, away: bool = True) -> tuple[Tensor, Any]:
    """Experts [T, k], some of which are none, and weights as a leaf."""
    chosen = torch.from_numpy(experts_of(tokens, k, experts))
    if away:
        chosen[3, 0], chosen[4, :], chosen[5, k - 1] = -1, experts, 2**32 + 1
    return chosen, leaf(tensor(draw(tokens, k, seed="weights")).abs())


def _composed(p: Layer, experts: Tensor, weights: Tensor, max_rows: int | None = None, **options: Any) -> Tensor:
    rows, sizes, permutation = route.permute(p.x, experts, p.wi.shape[0], probs=weights, max_rows=max_rows)
    biases = {"wi_bias": p.wi_bias, "wo_bias": p.wo_bias}
    y = grouped_mlp(rows, p.wi, p.wo, sizes, probs=permutation.probs, **biases, **options)
    return route.unpermute(y, permutation)


def _routed(p: Layer, experts: Tensor, weights: Tensor, **options: Any) -> Tensor:
    return routed_mlp(p.x, experts, weights, p.wi, p.wo, wi_bias=p.wi_bias, wo_bias=p.wo_bias, **options)


def _operands(p: Layer, weights: Tensor) -> dict[str, Tensor]:
    return {name: each for name, each in p.leaves().items() if name != "router"} | {"weights": weights}


def _gradients(y: Tensor, operands: dict[str, Tensor], dy: Tensor) -> dict[str, Tensor | None]:
    found = torch.autograd.grad(y, list(operands.values()), dy, allow_unused=True)
    return dict(zip(operands, found, strict=True))


def _same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name, each in theirs.items():
        asserts.bitwise(ours[name], each, f"gradient of {name}")


@pytest.mark.rule("LYR-16", "LYR-5", "LYR-6", "MLP-8")
@pytest.mark.matrix(
    recipe=RECIPES, residuals=POLICIES, dtype=("float32", "bfloat16"), bias=(False, True), room=(None, 30, 1000)
)
def test_it_has_the_bits_of_rows_that_are_kept(
    recipe: Any, residuals: str, dtype: str, bias: bool, room: int | None
) -> None:
    """Also where some of the 66 places have no room."""
    p = layer(T, E, 128, 64, dtype=dtype, bias=bias)
    experts, weights = _slots()
    dy = tensor(draw(T, 128, seed="dy", dtype=dtype))
    options = {"recipe": recipe, "residuals": residuals, "max_rows": room}
    ours, theirs = (run(p, experts, weights, **options) for run in (_routed, _composed))
    asserts.bitwise(ours, theirs, "y")
    operands = _operands(p, weights)
    _same(_gradients(ours, operands, dy), _gradients(theirs, operands, dy))


@pytest.mark.rule("LYR-16")
@pytest.mark.parametrize(
    ("tokens", "k", "experts"), [(T, K, E), (T, E, E), (T, 1, E), (7, 2, 9)], ids=["some", "all", "one", "empty"]
)
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_near_the_dense_oracle(tokens: int, k: int, experts: int, bias: bool) -> None:
    p = layer(tokens, experts, H, F, bias=bias)
    chosen, weights = _slots(tokens, k, experts, away=k < experts)
    dy = tensor(draw(tokens, H, seed="dy"))
    wide, wide_weights = p.to(lambda each: each.double()), leaf(weights.double())
    ours, exact = _routed(p, chosen, weights), dense_mlp(wide, wide_weights, chosen)
    near(ours, exact, "y")
    found = _gradients(ours, _operands(p, weights), dy)
    for name, each in _gradients(exact, _operands(wide, wide_weights), dy.double()).items():
        near(found[name], each, f"gradient of {name}")


def test_one_expert_may_take_all_tokens_and_the_others_none() -> None:
    p = layer()
    chosen, weights = torch.full((T, 1), 3), leaf(torch.ones(T, 1))
    y = _routed(p, chosen, weights)
    near(y, dense_mlp(p.to(lambda each: each.double()), weights.double(), chosen), "y")
    (dw,) = torch.autograd.grad(y.sum(), p.wi)
    assert [bool(each.any()) for each in dw] == [e == 3 for e in range(E)]
    nothing = _routed(p, torch.full((T, 1), -1), weights)
    assert not nothing.any()
    assert not any(each.any() for each in torch.autograd.grad(nothing.sum(), [p.x, p.wi, p.wo, weights]))


@pytest.mark.rule("LYR-11")
def test_no_tokens() -> None:
    p = layer(0)
    y = _routed(p, torch.zeros(0, K, dtype=torch.int32), leaf(torch.zeros(0, K)))
    y.sum().backward()
    assert y.shape == (0, H)
    assert p.wi.grad is not None
    assert not p.wi.grad.any()


@pytest.mark.rule("MLP-11", "MLP-12")
@pytest.mark.matrix(
    x=(False, True),
    wi=(False, True),
    wo=(False, True),
    weights=(False, True),
    wi_bias=(False, True),
    residuals=POLICIES,
)
def test_only_needed_gradients_are_computed(
    residuals: str, x: bool, wi: bool, wo: bool, weights: bool, wi_bias: bool
) -> None:
    needs = {"x": x, "wi": wi, "wo": wo, "weights": weights, "wi_bias": wi_bias}
    p, (experts, factors) = layer(), _slots()
    operands = _operands(p, factors)
    full = _gradients(_routed(p, experts, factors), operands, torch.ones(T, H))
    for name, each in operands.items():
        each.requires_grad_(needs.get(name, False))
    y = _routed(p, experts, factors, residuals=residuals)
    live = {name: each for name, each in operands.items() if needs.get(name, False)}
    assert y.requires_grad == bool(live)
    if live:
        _same(_gradients(y, live, torch.ones(T, H)), {name: full[name] for name in live})


# ---- memory


@pytest.mark.rule("LYR-16", "MLP-9")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("residuals", POLICIES)
def test_tokens_are_kept_and_not_their_rows(recipe: Any, residuals: str) -> None:
    hidden, width = 128, 64  # then no other array has as many columns as the tokens
    p, (experts, weights) = layer(T, E, hidden, width + 64, dtype="bfloat16", bias=False), _slots()
    width += 64
    with saved_tensors() as kept:
        y = _routed(p, experts, weights, recipe=recipe, residuals=residuals)
    rows = T * K
    assert any(each.data_ptr() == p.x.data_ptr() for each in kept), "the caller's tokens themselves"
    others = [each for each in kept if each.data_ptr() != p.x.data_ptr() and each.dim() == 2]
    # The rows of a policy: h [M, 2F] and z [M, F], F = H here, so that at most one array of the size of rows is there.
    of_rows = [each for each in others if each.shape == (rows, hidden)]
    assert len(of_rows) <= (1 if residuals == "save_all" and recipe is None else 0)
    wide = [each for each in others if each.shape == (rows, 2 * width)]
    assert len(wide) == (0 if residuals == "save_input" else 1)
    assert all(each.dtype is torch.bfloat16 for each in wide)
    y.sum().backward()


@pytest.mark.rule("LYR-16")
def test_rows_are_freed_after_forward() -> None:
    p, (experts, weights) = layer(dtype="bfloat16"), _slots()
    with allocations() as made:
        y = _routed(p, experts, weights)
    held = sum(not each.expired() for each in made)
    # y, sizes, source, inverse, weights of rows, h
    assert held == 6
    del y


# ---- the options of `grouped_mlp`


@pytest.mark.rule("MAT-2", "MAT-3", "MLP-5")
@pytest.mark.parametrize("form", ["lists", "pair", "untransposed", "interleaved"])
@pytest.mark.parametrize("recipe", [None, FP8Current])
def test_weights_in_every_form(form: str, recipe: Any) -> None:
    p, (experts, weights) = layer(T, E, 128, 128, bias=False), _slots()
    options: dict[str, Any] = {"recipe": recipe}
    wi: Any = p.wi.detach()
    wo: Any = p.wo.detach()
    if form == "lists":
        wi, wo = [leaf(each) for each in wi], [leaf(each) for each in wo]
    elif form == "pair":
        wi = [leaf(wi[:, :128].contiguous()), leaf(wi[:, 128:].contiguous())]
        wo = leaf(wo)
    else:
        if form == "untransposed":
            wi, wo = wi.mT.contiguous(), wo.mT.contiguous()
            options["rhs_transposed"] = False
        else:
            options["activation"] = Activation("swiglu", interleave=32)
        wi, wo = leaf(wi), leaf(wo)
    leaves = [p.x, *(wi if isinstance(wi, list) else [wi]), *(wo if isinstance(wo, list) else [wo])]
    rows, sizes, permutation = route.permute(p.x, experts, E, probs=weights)
    theirs = route.unpermute(grouped_mlp(rows, wi, wo, sizes, probs=permutation.probs, **options), permutation)
    ours = routed_mlp(p.x, experts, weights, wi, wo, **options)
    asserts.bitwise(ours, theirs, "y")
    dy = tensor(draw(T, 128, seed="dy"))
    for one, two in zip(torch.autograd.grad(ours, leaves, dy), torch.autograd.grad(theirs, leaves, dy), strict=True):
        asserts.bitwise(one, two, "gradient")


@pytest.mark.rule("QNT-2")
def test_weights_that_are_quantised_already() -> None:
    p, (experts, weights) = layer(T, E, 128, 128, bias=False), _slots()
    q: Any = [straight_through(w, quantize(w.detach(), "fp8_tensor", axis=(2, 1))) for w in (p.wi, p.wo)]
    rows, sizes, permutation = route.permute(p.x, experts, E, probs=weights)
    y = grouped_mlp(rows, q[0], q[1], sizes, probs=permutation.probs, recipe=FP8Current)
    theirs = route.unpermute(y, permutation)
    ours = routed_mlp(p.x, experts, weights, *q, recipe=FP8Current)
    asserts.bitwise(ours, theirs, "y")
    for one, two in zip(*(torch.autograd.grad(y.sum(), [p.x, p.wi, p.wo]) for y in (ours, theirs)), strict=True):
        asserts.bitwise(one, two, "gradient")


@pytest.mark.rule("LYR-17", "QNT-8")
@pytest.mark.parametrize("recipe", [FP8Block, MXFP8, None], ids=["FP8Block", "MXFP8", "no_recipe"])
@pytest.mark.parametrize("policy", ["save_all", "save_fc1", "save_input"])
def test_tokens_may_be_quantised(policy: str, recipe: Any) -> None:
    """The bits of a recipe that quantises them, with a gradient for their master; a recipe is not needed."""
    p, (experts, weights) = layer(T, E, 128, 128, bias=False, dtype="bfloat16"), _slots()
    leaves, dy = (p.x, p.wi, p.wo, weights), tensor(draw(T, 128, seed="dy")).bfloat16()
    found = []
    for quantised in (True, False):
        x: Any = p.x
        if quantised:
            x = straight_through(p.x, quantize(p.x.detach(), "mxfp8" if recipe is MXFP8 else "fp8_1x128"))
        y = routed_mlp(x, experts, weights, p.wi, p.wo, recipe=recipe, residuals=policy)
        found.append([y, *torch.autograd.grad(y, leaves, dy)])
    for at, (ours, theirs) in enumerate(zip(*found, strict=True)):
        assert ours.dtype == theirs.dtype
        if recipe is None:
            assert (ours - theirs).norm() <= bounds.RING_CODES * theirs.norm(), at
        else:  # scales are powers of two, so the gradient of wi has the same bits as well
            asserts.bitwise(ours, theirs, str(at))


@pytest.mark.rule("LYR-16")
@pytest.mark.parametrize(
    "recipe", [FP8Delayed, FP8Delayed.replace(forward=FP8Current.forward)], ids=["both", "backward_alone"]
)
def test_delayed_scaling_sees_the_rows_of_slots(recipe: Any) -> None:
    """Both operations measure the same magnitudes, in forward and backward, and start from the same scales."""
    p, (experts, weights) = layer(T, E, 128, 128), _slots()
    states = [scaling_state(recipe, E, products=2) for _ in range(2)]
    for step in range(3):
        found = []
        for run, state in zip((_routed, _composed), states, strict=True):
            y = run(p, experts, weights, recipe=recipe.bind(state))
            found.append([y, *torch.autograd.grad(y.square().sum(), list(_operands(p, weights).values()))])
            update_scaling(state)
        for one, two in zip(*found, strict=True):
            asserts.bitwise(one, two, f"step {step}")
        asserts.bitwise(states[0].history, states[1].history, f"magnitudes of step {step}")


@pytest.mark.rule("GRD-1", "GRD-5", "GRD-6")
@pytest.mark.parametrize("listed", [False, True])
def test_gradients_are_added_to_main_grad_and_to_accumulators(listed: bool) -> None:
    p, (experts, weights) = layer(dtype="bfloat16", bias=False), _slots()
    wi: Any = [leaf(each) for each in p.wi] if listed else p.wi
    wo: Any = [leaf(each) for each in p.wo] if listed else p.wo
    every: list[Any] = [*(wi if listed else [wi]), *(wo if listed else [wo])]
    dy = tensor(draw(T, H, seed="dy", dtype="bfloat16"))

    def buffers(weight: Any) -> Any:
        return [torch.full(each.shape, 0.5) for each in weight] if listed else torch.full(weight.shape, 0.5)

    to = (buffers(wi), buffers(wo))
    routed_mlp(p.x, experts, weights, wi, wo, wgrad_accum=to).backward(dy)
    assert all(each.grad is None for each in every)
    for each in every:
        each.main_grad = torch.full(each.shape, 0.5)
        each.grad_added_to_main_grad = False
    routed_mlp(p.x, experts, weights, wi, wo, wgrad_accum="main_grad").backward(dy)
    flat = [*(to[0] if listed else [to[0]]), *(to[1] if listed else [to[1]])]
    for each, written in zip(every, flat, strict=True):
        asserts.bitwise(each.main_grad, written, "main_grad")
        assert each.grad_added_to_main_grad
        assert not each.grad.any()
    rows, sizes, permutation = route.permute(p.x, experts, E, probs=weights)
    again = (buffers(wi), buffers(wo))
    y = grouped_mlp(rows, wi, wo, sizes, probs=permutation.probs, wgrad_accum=again)
    route.unpermute(y, permutation).backward(dy)
    for one, two in zip(
        flat, [*(again[0] if listed else [again[0]]), *(again[1] if listed else [again[1]])], strict=True
    ):
        asserts.bitwise(one, two, "accumulator")


@pytest.mark.rule("BUF-1", "BUF-2", "BUF-4")
def test_the_buffers_of_the_caller() -> None:
    p, (experts, weights) = layer(), _slots()
    plain = _routed(p, experts, weights)
    (dx,) = torch.autograd.grad(plain.sum(), p.x)
    x = p.x * 1  # no leaf, whose gradient would be a copy
    out, into = torch.full((T, H), 7.0), torch.full((T, H), 7.0)
    y = routed_mlp(x, experts, weights, p.wi, p.wo, wi_bias=p.wi_bias, wo_bias=p.wo_bias, out=out, grad_input=into)
    assert y.data_ptr() == out.data_ptr()
    asserts.bitwise(y, plain, "y")
    (found,) = torch.autograd.grad(y.sum(), x)
    assert found.data_ptr() == into.data_ptr()
    asserts.bitwise(found, dx, "gradient of x")
    for name, wrong, said in (
        ("out", torch.empty(T * K, H), ["`out`", f"({T * K}, {H})", f"expected ({T}, {H})", "allocate"]),
        ("out", torch.empty(T, H, dtype=torch.bfloat16), ["`out`", "bfloat16", "expected float32", "allocate"]),
        ("grad_input", torch.empty(T, 1), ["`grad_input`", f"({T}, 1)", f"expected ({T}, {H})", "allocate"]),
    ):
        with asserts.refused(ValueError, said):
            _routed(p, experts, weights, **{name: wrong})
    with asserts.refused(ValueError, ["`out`", "overlap", "`x`"]):
        _routed(p, experts, weights, out=p.x.detach())


def test_autocast_casts_tokens_and_weights() -> None:
    p, (experts, weights) = layer(), _slots()
    with torch.autocast("cpu", torch.bfloat16):
        y = _routed(p, experts, weights)
    low = p.to(lambda each: each.bfloat16())
    asserts.bitwise(y, _routed(low, experts, weights), "y")
    (dw,) = torch.autograd.grad(y.float().sum(), p.wi)
    assert dw.dtype is torch.float32


# ---- graphs


@pytest.mark.rule("GRD-12", "LYR-16")
@pytest.mark.matrix(recipe=RECIPES, residuals=POLICIES, listed=(False, True), room=(None, 30))
def test_compiled_calls_have_the_bits_of_eager_ones(
    recipe: Any, residuals: str, listed: bool, room: int | None
) -> None:
    p, (experts, weights) = layer(T, E, 128, 64), _slots()
    wi: Any = [leaf(each) for each in p.wi] if listed else p.wi

    def run(x: Tensor, weights: Tensor) -> Tensor:
        biases = {"wi_bias": p.wi_bias, "wo_bias": p.wo_bias}
        options: dict[str, Any] = {"recipe": recipe, "residuals": residuals, "max_rows": room}
        return routed_mlp(x * 2, experts, weights, wi, p.wo, **biases, **options)

    leaves: list[Any] = [p.x, weights, p.wo, p.wi_bias, *(wi if listed else [wi])]
    found = [
        (y, *torch.autograd.grad(y, leaves, torch.ones_like(y)))
        for y in (run(p.x, weights), torch.compile(run, fullgraph=True, backend="aot_eager")(p.x, weights))
    ]
    for one, two in zip(*found, strict=True):
        asserts.bitwise(two, one, "compiled")


def test_one_graph_serves_every_number_of_tokens() -> None:
    p, graphs = layer(), []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    def run(x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        return routed_mlp(x, experts, weights, p.wi, p.wo, wi_bias=p.wi_bias)

    compiled = torch.compile(run, fullgraph=True, backend=backend, dynamic=True)
    for tokens in (T, 41, 50):
        x, (experts, weights) = layer(tokens).x, _slots(tokens)
        found = [
            (y, *torch.autograd.grad(y, [x, weights, p.wi], torch.ones_like(y)))
            for y in (run(x, experts, weights), compiled(x, experts, weights))
        ]
        for one, two in zip(*found, strict=True):
            asserts.bitwise(two, one, f"{tokens} tokens")
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("recipe", "accumulates"),
    # PyTorch's test of schemas, which looks for operands that are written, runs without a recipe alone.
    [
        (None, True),
        (MXFP8, False),
        pytest.param(None, False, marks=pytest.mark.slow),
        pytest.param(MXFP8, True, marks=pytest.mark.slow),
    ],
)
def test_the_operators_pass_opcheck(recipe: Any, accumulates: bool) -> None:
    p, (experts, weights) = layer(T, E, 64, 64), _slots()
    accum = (torch.zeros_like(p.wi, requires_grad=False), torch.zeros_like(p.wo, requires_grad=False))
    options: dict[str, Any] = {"recipe": recipe, "wgrad_accum": accum if accumulates else None}
    out = torch.empty(T, 64) if accumulates else None
    seen = opcheck(
        lambda: _routed(p, experts, weights, out=out, **options).backward(torch.ones(T, 64)), multiplies=recipe is None
    )
    names = {name.split("_into")[0] for name in seen}
    of_weights = {"routed_weight_grad", "weight_grad"} if accumulates else set()
    assert names == {"routed_mlp", "routed_at_hidden", "routed_first_product", *of_weights}


@pytest.mark.rule("GRD-13")
def test_gradients_are_not_differentiable() -> None:
    p, (experts, weights) = layer(), _slots()
    (dx,) = torch.autograd.grad(_routed(p, experts, weights).sum(), p.x, create_graph=True)
    with asserts.refused(RuntimeError, ["routed_mlp", "differentiated twice", "expected once"]):
        dx.sum().backward()


def _call(**changed: Any) -> Tensor:
    p, (experts, weights) = layer(bias=False), _slots()
    given = {"x": p.x, "experts": experts, "weights": weights, "wi": p.wi, "wo": p.wo} | changed
    return routed_mlp(**given)


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize(
    ("changed", "kind", "said"),
    [
        (
            {"x": quantize(torch.ones(T, 128), "fp8_tensor")},
            ValueError,
            ["`x` of routed_mlp", "fp8_tensor contracting axis 1", "single rows", "mxfp8"],
        ),
        ({"activation": ["swiglu"]}, ValueError, ["`kind` of Activation", "['swiglu']", "expected one of", "choose"]),
        ({"max_rows": 0}, ValueError, ["`max_rows` of routed_mlp", "0", "expected 1 or more", "every slot"]),
        ({"max_rows": 2.0}, TypeError, ["`max_rows` of routed_mlp", "2.0", "expected an integer", "pass an int"]),
        ({"residuals": {}}, ValueError, ["`residuals`", "{}", "expected one of save_all", "choose"]),
        ({"recipe": (BF16, BF16)}, TypeError, ["`recipe`", "tuple", "expected None or a Recipe", "pass one"]),
        ({"recipe": ()}, TypeError, ["`recipe`", "tuple", "expected None or a Recipe", "pass one"]),
        (
            {"wo": torch.zeros(E, H + 1, F)},
            ValueError,
            ["`wo`", f"({E}, {H + 1}, {F})", f"K = {H}", "check the operands"],
        ),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], kind: type[Exception], said: list[str]) -> None:
    with asserts.refused(kind, said):
        _call(**changed)
