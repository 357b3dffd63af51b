"""The functions of `torch_bridge.route`: bits of the rules, gradients, graphs, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from grouped_core.routing import Sums
from grouped_core.routing_spec import router_option
from tests import asserts, bounds
from tests.asserts import as_numpy
from tests.torch_frontend.routing_tools import (
    ROUTERS,
    Rules,
    dense_router,
    draw,
    experts_of,
    mask_of,
    near,
)
from tests.torch_frontend.torch_tools import leaf, opcheck, saved_tensors, tensor
from torch_bridge import FP8Block, FP8Current, FP8Delayed, route

T, E, K, H = 23, 8, 3, 16
LOSSES = {"aux_coeff": 0.5, "z_coeff": 0.25}
KEY = np.array([7, 11], np.uint32)


def _given(which: str) -> dict[str, Any]:
    """Arrays besides the logits, for one kind of call, as the public function takes them."""
    return {
        "plain": {},
        "bias": {"bias": draw(E, seed="bias")},
        "mask": {"mask": mask_of(T)},
        "replay": {"experts": np.where(experts_of(T, K, E) == 2, -1, experts_of(T, K, E))},
        "jitter": {"key": KEY, "jitter": 0.1},
        "sequences": {"sequence_sizes": np.array([9, 0, 10], np.int64)},
    }[which]


def _rules(logits: Any, options: dict[str, Any], given: dict[str, Any]) -> Rules:
    """The rules for the same call."""
    given = dict(given)
    options = {**options, **({"jitter": given.pop("jitter")} if "jitter" in given else {})}
    arrays = {
        name: each.view(np.uint8) if name == "mask" else each.astype(np.int32) if each.dtype == np.int64 else each
        for name, each in given.items()
    }
    return Rules.of(logits, K, options, **arrays)


def _torch(given: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(each) if isinstance(each, np.ndarray) else each for name, each in given.items()}


def _step(logits: Any, options: dict[str, Any], given: dict[str, Any], d_weights: Any) -> list[Any]:
    """Results and the gradient, of weights and both losses."""
    weights, experts, aux = route.topk_router(logits, K, **LOSSES, **options, **_torch(given))
    torch.autograd.backward([weights, aux.aux_loss, aux.z_loss], [d_weights, torch.tensor(2.0), torch.tensor(3.0)])
    return [weights, experts, *aux, logits.grad]


@pytest.mark.rule("LYR-1", "LYR-3", "LYR-8", "LYR-13", "LYR-15")
@pytest.mark.matrix(
    router=tuple(ROUTERS),
    which=("plain", "bias", "mask", "replay", "jitter", "sequences"),
    dtype=("float32", "bfloat16"),
)
def test_the_router_has_the_bits_of_the_rules(router: str, which: str, dtype: str) -> None:
    options, given, values = ROUTERS[router], _given(which), draw(T, E, dtype=dtype)
    rules = _rules(values, {**options, **LOSSES}, given)
    chosen = rules.choose()
    losses = rules.losses(chosen.sums)
    d_weights = draw(T, K, seed="dw")
    logits = leaf(tensor(values))
    weights, experts, load, aux, z, dropped, overflow, entropy, grad = _step(logits, options, given, tensor(d_weights))
    asserts.bitwise(weights, chosen.weights, "weights")
    asserts.bitwise(experts, chosen.experts, "experts")
    asserts.bitwise(load, chosen.load[0], "load")
    asserts.bitwise(torch.stack([aux, z, entropy]), losses.values, "losses and entropy")
    wanted = 0 if chosen.dropped is None else int(chosen.dropped[0])
    assert (int(dropped), bool(overflow)) == (wanted, wanted > 0)
    assert all(each.dim() == 0 for each in (aux, z, dropped, overflow, entropy))
    asserts.bitwise(grad, rules.grad(chosen, losses, d_weights, (2.0, 3.0)), "gradient")
    assert not load.requires_grad
    assert not entropy.requires_grad


@pytest.mark.rule("LYR-1", "LYR-3")
@pytest.mark.parametrize("router", [name for name in ROUTERS if name not in ("capacity_probs", "capacity_position")])
def test_weights_and_losses_are_those_of_the_formulas(router: str) -> None:
    logits = leaf(tensor(draw(T, E)))
    d_weights = tensor(draw(T, K, seed="dw"))
    weights, experts, _, aux, z, *_, grad = _step(logits, ROUTERS[router], {}, d_weights)
    wide = leaf(logits.detach().double())
    op = router_option(E, K, **ROUTERS[router], **LOSSES)
    exact = dense_router(wide, experts, op)
    for name, ours, formula in zip(("weights", "aux_loss", "z_loss"), (weights, aux, z), exact, strict=True):
        near(ours, formula, name)
    (exact_grad,) = torch.autograd.grad((exact[0] * d_weights).sum() + 2 * exact[1] + 3 * exact[2], wide)
    near(grad, exact_grad, "gradient")


@pytest.mark.rule("LYR-2")
def test_ties_go_to_the_lower_expert_and_all_experts_may_be_chosen() -> None:
    logits = torch.zeros(4, E)
    logits[1, 5] = 1
    _, experts, _ = route.topk_router(logits, 2)
    assert experts.tolist() == [[0, 1], [5, 0], [0, 1], [0, 1]]
    weights, experts, aux = route.topk_router(logits, E, aux_coeff=1.0)
    assert experts[0].tolist() == list(range(E))
    near(weights.sum(1), torch.ones(4, dtype=torch.float64), "weights of all experts")
    assert aux.load.tolist() == [4] * E


@pytest.mark.rule("LYR-3")
def test_uniform_scores_have_the_coefficient_as_loss() -> None:
    logits = torch.zeros(E, E)
    experts = torch.stack([torch.arange(E).roll(-t)[:2] for t in range(E)])
    _, _, aux = route.topk_router(logits, 2, experts=experts, aux_coeff=0.125)
    assert float(aux.aux_loss) == 0.125


@pytest.mark.rule("LYR-1", "LYR-8")
@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8])
def test_numbers_of_experts_of_any_type_never_wrap_into_range(dtype: torch.dtype) -> None:
    experts = torch.tensor([[0, 1], [2, 3]], dtype=dtype)
    if dtype is torch.int64:
        experts[0, 1], experts[1, 0] = 2**32, -(2**32) + 1
        wanted = [[0, 2**31 - 1], [-(2**31), 3]]
    else:
        wanted = [[0, 1], [2, 3]]

    def sizes(experts: torch.Tensor) -> list[int]:
        return route.permute(torch.ones(2, H), experts, 4)[1].tolist()

    found = [int(any(each == e for row in wanted for each in row)) for e in range(4)]
    assert sizes(experts) == found
    assert torch.compile(sizes, backend="aot_eager", dynamic=False)(experts) == found
    weights, chosen, _ = route.topk_router(torch.zeros(2, 4), 2, experts=experts)
    none = [[each if each < 4 and each >= 0 else -1 for each in row] for row in wanted]
    assert chosen.tolist() == none
    assert (weights == 0).tolist() == [[each < 0 for each in row] for row in none]


@pytest.mark.rule("LYR-5", "LYR-6")
@pytest.mark.matrix(
    align=(1, 4),
    max_rows=(None, 24),
    probs=(None, torch.float32, torch.bfloat16),
    dtype=(torch.float32, torch.bfloat16),
)
def test_rows_and_sums_are_those_of_plain_indexing(
    align: int, max_rows: int | None, probs: torch.dtype | None, dtype: torch.dtype
) -> None:
    x = leaf(tensor(draw(T, H)).to(dtype))
    experts = torch.from_numpy(experts_of(T, K, E))
    experts[2, 1], experts[4] = -1, E
    p = None if probs is None else leaf(tensor(np.abs(draw(T, K, seed="p"))).to(probs))
    rows, sizes, permutation = route.permute(x, experts, E, probs=p, align=align, max_rows=max_rows)
    source, inverse = permutation.source, permutation.inverse
    # The order: expert, then token, then place; groups padded.
    place = 0
    for e in range(E):
        own = (experts.reshape(-1) == e).nonzero().reshape(-1).tolist()
        room = min(-(-len(own) // align) * align, len(source) - place)
        assert int(sizes[e]) == room
        assert source[place : place + min(len(own), room)].tolist() == own[:room]
        assert (source[place + len(own) : place + room] == -1).all()
        place += room
    assert int(permutation.dropped) == int(((experts >= 0) & (experts < E) & (inverse < 0)).sum())
    there = source >= 0
    wanted = torch.where(there[:, None], x[source.clamp(min=0) // K], 0)
    asserts.bitwise(rows, wanted, "rows")
    if p is not None:
        of_rows = torch.where(there, p.reshape(-1)[source.clamp(min=0)].float(), 0)
        asserts.bitwise(permutation.probs, of_rows, "probabilities")
    y = route.unpermute(rows, permutation, p)
    total = torch.zeros(T, H)
    for j in range(K):
        term = torch.where(inverse[:, j, None] >= 0, rows[inverse[:, j].clamp(min=0)].float(), 0)
        total = total + (term if p is None else p[:, j, None].float() * term)
    asserts.bitwise(y, total.to(dtype), "sums")
    dy = tensor(draw(T, H, seed="dy")).to(dtype)
    operands = [x] if p is None else [x, p]
    ours = torch.autograd.grad(y, operands, dy, retain_graph=True)
    d_rows, *d_weights = torch.autograd.grad(y, [rows, *operands[1:]], dy)
    factor = 1.0 if p is None else torch.where(there, p.detach().reshape(-1)[source.clamp(min=0)].float(), 0)[:, None]
    of_dy = torch.where(there[:, None], dy[source.clamp(min=0) // K], 0)
    asserts.bitwise(d_rows, of_dy if p is None else (factor * of_dy.float()).to(dtype), "gradient of rows")
    total = torch.zeros(T, H)
    for j in range(K):
        total = total + torch.where(inverse[:, j, None] >= 0, d_rows[inverse[:, j].clamp(min=0)].float(), 0)
    asserts.bitwise(ours[0], total.to(dtype), "gradient of x")
    if p is not None:
        dots = torch.where(inverse >= 0, (rows.double()[inverse.clamp(min=0)] * dy.double()[:, None]).sum(2), 0)
        assert d_weights[0].dtype is probs
        if probs is torch.float32:
            near(d_weights[0], dots, "gradient of weights")


@pytest.mark.rule("LYR-5")
def test_probabilities_that_travel_have_gradients() -> None:
    p = leaf(torch.rand(T, K))
    experts = torch.from_numpy(experts_of(T, K, E))
    experts[1, 2] = -1
    _, _, permutation = route.permute(torch.ones(T, H), experts, E, probs=p)
    d = torch.arange(float(T * K))
    assert permutation.probs is not None
    permutation.probs.backward(d)
    inverse = permutation.inverse
    asserts.bitwise(p.grad, torch.where(inverse >= 0, d[inverse.clamp(min=0)], 0), "gradient of probabilities")


@pytest.mark.rule("ALL-4")
@pytest.mark.parametrize("of", ["x", "probs"])
def test_only_results_whose_gradient_is_needed_are_differentiable(of: str) -> None:
    x, p = torch.ones(T, H), torch.rand(T, K)
    (x if of == "x" else p).requires_grad_()
    rows, _, permutation = route.permute(x, torch.from_numpy(experts_of(T, K, E)), E, probs=p)
    assert permutation.probs is not None
    assert (rows.requires_grad, permutation.probs.requires_grad) == (of == "x", of == "probs")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_gradient_of_rows_in_8_bits_is_refused_at_the_call(dtype: torch.dtype) -> None:
    x, experts = torch.ones(4, 8).to(dtype), torch.zeros(4, 2, dtype=torch.int32)
    rows, *_ = route.permute(x, experts, 3)
    asserts.bitwise(rows.view(torch.uint8), x.view(torch.uint8).repeat_interleave(2, 0), "rows without a gradient")
    needy = x.clone().requires_grad_()
    for _ in range(2):
        with asserts.refused(ValueError, ["`x` of permute", "float8", "needs a gradient", "float16", "cast it"]):
            route.permute(needy, experts, 3)
    with torch.no_grad():
        asserts.bitwise(route.permute(needy, experts, 3)[0].view(torch.uint8), rows.view(torch.uint8), "no_grad")


@pytest.mark.rule("LYR-5")
@pytest.mark.parametrize(("align", "max_rows"), [(4, None), (1, 8)])
def test_rows_of_no_token_have_the_probability_zero(align: int, max_rows: int | None) -> None:
    garbage = [torch.full((64,), 1e30) for _ in range(64)]
    del garbage  # what an allocator hands out again
    experts, probs = torch.zeros(0, K, dtype=torch.int32), torch.zeros(0, K)
    *_, permutation = route.permute(torch.zeros(0, H), experts, E, probs=probs, align=align, max_rows=max_rows)
    asserts.bitwise(permutation.probs, torch.zeros(permutation.source.shape[0]), "probabilities")


@pytest.mark.rule("LYR-5", "LYR-7")
def test_moved_rows_keep_the_dtype_of_scales() -> None:
    codes = torch.arange(T * H).to(torch.uint8).reshape(T, H)
    rows, sizes, _ = route.permute(codes.view(torch.float8_e8m0fnu), torch.zeros(T, 1, dtype=torch.int32), 2)
    padded, _, places = route.pad_groups(rows, sizes, 8)
    for name, moved in {"rows": rows, "padded": padded[:T], "unpadded": route.unpad_groups(padded, places)}.items():
        assert moved.dtype == torch.float8_e8m0fnu, name
        asserts.bitwise(moved.view(torch.uint8), codes, name)


@pytest.mark.rule("LYR-6")
def test_sums_do_not_read_padding() -> None:
    experts = torch.from_numpy(experts_of(T, K, E))
    rows, _, permutation = route.permute(torch.ones(T, H), experts, E, align=8)
    rows = torch.where((permutation.source >= 0)[:, None], rows, torch.nan)
    assert torch.equal(route.unpermute(rows, permutation), torch.full((T, H), float(K)))


@pytest.mark.rule("LYR-7")
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_padding_of_groups(dtype: torch.dtype) -> None:
    sizes = torch.tensor([3, 0, 8, 1], dtype=torch.int64)
    rows = torch.arange(1, 14 * H + 1).reshape(14, H).to(dtype)
    padded, found, map = route.pad_groups(rows, sizes, 4)
    assert found.tolist() == [4, 0, 8, 4]
    assert sizes.tolist() == [3, 0, 8, 1]
    wanted = [*rows[:3], torch.zeros(H), *rows[3:11], rows[11], *[torch.zeros(H)] * 3]
    asserts.bitwise(padded[:16], torch.stack([each.to(dtype) for each in wanted]), "padded rows")
    assert not padded[16:].any()
    back = route.unpad_groups(padded, map)
    asserts.bitwise(back, torch.cat([rows[:12], torch.zeros(2, H, dtype=dtype)]), "rows again")
    again, same, _ = route.pad_groups(padded, found, 4)
    assert same.tolist() == found.tolist()
    asserts.bitwise(again[:16], padded[:16], "padded twice")
    if dtype is torch.float32:
        x = leaf(rows)
        y, _, map = route.pad_groups(x, sizes, 4)
        route.unpad_groups(y, map).backward(torch.ones(14, H))
        asserts.bitwise(x.grad, torch.cat([torch.ones(12, H), torch.zeros(2, H)]), "gradient")


@pytest.mark.rule("LYR-7")
def test_alignment_for_recipes() -> None:
    assert route.alignment_for(None) == 1
    assert route.alignment_for(FP8Current) == route.alignment_for(FP8Delayed) == 128
    assert route.alignment_for(FP8Block) == 128


@pytest.mark.rule("LYR-15")
def test_hash_routing() -> None:
    ids = torch.tensor([5, 0, 5, 2**40, 7])
    experts = route.hash_experts(ids, K, E)
    assert experts.dtype is torch.int32
    assert experts.shape == (5, K)
    assert torch.equal(experts[0], experts[2])
    assert all(len(set(row)) == K and min(row) >= 0 and max(row) < E for row in experts.tolist())
    table = torch.tensor([[3, 1], [2, 0]])
    assert route.hash_experts(torch.tensor([1, 0, 9]), 2, E, table=table).tolist() == [[2, 0], [3, 1], [-1, -1]]
    weights, chosen, _ = route.topk_router(torch.randn(5, E), K, experts=experts, score="sigmoid")
    assert torch.equal(chosen, experts)
    assert weights.shape == (5, K)


@pytest.mark.rule("LYR-4")
def test_the_sign_rule() -> None:
    bias = leaf(torch.tensor([0.5, 0.25, 0.0], dtype=torch.bfloat16))
    found = route.update_bias(bias, torch.tensor([7, 1, 4]), 0.125)
    assert found.tolist() == [0.375, 0.375, 0.0]
    assert found.dtype is torch.float32
    assert not found.requires_grad
    assert bias.tolist() == [0.5, 0.25, 0.0]


@pytest.mark.rule("LYR-14")
def test_quantile_balancing_evens_the_load_out() -> None:
    logits = tensor(draw(512, E)) + torch.linspace(-1, 1, E)
    bias = torch.zeros(E)
    before = route.topk_router(logits, 2, score="sigmoid", bias=bias)[2].load
    for _ in range(8):
        bias = route.balance_quantile(logits, bias, 2)
    after = route.topk_router(logits, 2, score="sigmoid", bias=bias)[2].load
    assert (after - 128).abs().max() <= 8 < (before - 128).abs().max()
    assert abs(float(bias.mean())) < bounds.MEAN_OF_BIASES
    masked = torch.cat([logits, torch.full((9, E), torch.nan)])
    mask = torch.arange(521) < 512
    asserts.bitwise(
        route.balance_quantile(masked, bias, 2, mask=mask), route.balance_quantile(logits, bias, 2), "with a mask"
    )


@pytest.mark.rule("LYR-11")
def test_no_tokens() -> None:
    logits, x = leaf(torch.zeros(0, E)), leaf(torch.zeros(0, H))
    weights, experts, aux = route.topk_router(logits, K, **LOSSES)
    rows, sizes, permutation = route.permute(x, experts, E, probs=weights)
    y = route.unpermute(rows, permutation)
    (y.sum() + aux.aux_loss + aux.z_loss).backward()
    assert sizes.tolist() == [0] * E
    assert y.shape == (0, H)
    assert aux.aux_loss.item() == aux.z_loss.item() == 0
    assert logits.grad is not None
    assert x.grad is not None


# ---- under the machinery of PyTorch


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _all(logits: Any, x: Any, **given: Any) -> tuple[Any, ...]:
    """Every function with gradients, in one."""
    weights, experts, aux = route.topk_router(logits, K, **LOSSES, **given)
    rows, sizes, permutation = route.permute(x, experts, E, probs=weights)
    padded, _, map = route.pad_groups(rows, sizes, 4)
    y = route.unpermute(route.unpad_groups(padded, map), permutation, weights)
    assert permutation.probs is not None
    scaled = y * permutation.probs[0]
    return scaled, aux.aux_loss, aux.z_loss, experts, sizes, aux.load, aux.entropy


def _gradients(run: Callable[..., Any], tokens: int, given: dict[str, Any]) -> list[Any]:
    logits, x = leaf(tensor(draw(tokens, E))), leaf(tensor(draw(tokens, H, seed="x")))
    y, *rest = run(logits, x, **_torch(given))
    torch.autograd.backward([y, *rest[:2]], [tensor(draw(tokens, H, seed="dy")), torch.tensor(2.0), torch.tensor(3.0)])
    return [y, *rest, logits.grad, x.grad]


@pytest.mark.rule("GRD-12")
@pytest.mark.parametrize(
    ("which", "options"),
    [("plain", {}), ("mask", {"capacity_factor": 1.0}), ("replay", {}), ("jitter", {}), ("sequences", {})],
)
def test_compiled_functions_have_the_bits_of_eager_ones(which: str, options: dict[str, Any]) -> None:
    given = {**_given(which), **options}
    run = torch.compile(_all, fullgraph=True, backend="aot_eager")
    for ours, eager in zip(_gradients(run, T, given), _gradients(_all, T, given), strict=True):
        asserts.bitwise(ours, eager, "compiled")


def test_one_graph_serves_every_number_of_tokens() -> None:
    """Without padding, whose rounding up no symbol expresses."""

    def some(logits: Any, x: Any) -> tuple[Any, ...]:
        weights, experts, aux = route.topk_router(logits, K, **LOSSES)
        rows, sizes, permutation = route.permute(x, experts, E, probs=weights)
        return route.unpermute(rows, permutation, weights), aux.aux_loss, aux.z_loss, sizes

    graphs, compiles = [], []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(graph, inputs)

    run = torch.compile(some, fullgraph=True, backend=backend, dynamic=True)
    for tokens in (T, 31, 40):
        for ours, eager in zip(_gradients(run, tokens, {}), _gradients(some, tokens, {}), strict=True):
            asserts.bitwise(ours, eager, f"{tokens} tokens")
        compiles.append(len(graphs))
    assert compiles[1:] == compiles[:1] * 2


def test_lengths_that_are_not_those_of_tokens_may_be_symbols() -> None:
    def some(logits: Any, bias: Any, sizes: Any) -> tuple[Any, ...]:
        weights, experts, aux = route.topk_router(logits, K, bias=bias, sequence_sizes=sizes, **LOSSES)
        return weights, experts, aux.aux_loss, route.balance_quantile(logits, bias, K)

    run = torch.compile(some, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens, experts, sizes in ((T, E, [9, 14]), (31, E, [9, 14, 8]), (31, 2 * E, [9, 14, 8])):
        logits, bias = tensor(draw(tokens, experts)), tensor(draw(experts, seed="bias"))
        arguments = (logits, bias, torch.tensor(sizes))
        for ours, eager in zip(run(*arguments), some(*arguments), strict=True):
            asserts.bitwise(ours, eager, f"{tokens} tokens, {experts} experts")


def test_the_operators_pass_opcheck() -> None:
    logits, x = tensor(draw(T, E)), tensor(draw(T, H, seed="x"))
    seen = opcheck(lambda: _gradients(_all, T, _given("mask")))
    seen |= opcheck(lambda: route.update_bias(torch.zeros(E), torch.arange(E), 0.1))
    seen |= opcheck(lambda: route.balance_quantile(logits, torch.zeros(E), K))
    seen |= opcheck(lambda: route.hash_experts(torch.arange(T), K, E))
    del x
    assert seen == {
        *("router", "router_grad", "permute", "permute_grad", "unpermute", "unpermute_grad", "pad_groups"),
        *("gather_rows", "update_bias", "margins", "quantile_bias", "hash_experts"),
    }


@pytest.mark.rule("GRD-13")
def test_gradients_are_not_differentiable() -> None:
    logits, x = leaf(torch.randn(T, E)), leaf(torch.randn(T, H))
    weights, experts, _ = route.topk_router(logits, K)
    rows, sizes, permutation = route.permute(x, experts, E)
    summed = route.unpermute(leaf(rows), permutation)
    padded, *_ = route.pad_groups(leaf(rows), sizes, 4)
    for name, result in (("topk_router", weights), ("permute", rows), ("unpermute", summed), ("pad_groups", padded)):
        inputs = logits if name == "topk_router" else x if name == "permute" else None
        if inputs is None:
            assert result.grad_fn is not None
            (edge,) = [each for each, _ in result.grad_fn.next_functions if each is not None]
            inputs = getattr(edge, "variable")  # noqa: B009
        (gradient,) = torch.autograd.grad(result.sum(), inputs, create_graph=True)
        with asserts.refused(RuntimeError, [name, "differentiated twice", "expected once"]):
            gradient.sum().backward()


@pytest.mark.rule("MLP-11", "LYR-16")
def test_only_what_gradients_read_is_saved() -> None:
    logits, x = torch.randn(T, E), torch.randn(T, H)
    with saved_tensors() as kept:
        _, experts, _ = route.topk_router(logits, K)
        rows, _, permutation = route.permute(x, experts, E)
        route.unpermute(rows, permutation)
    assert not kept
    with saved_tensors() as kept:
        rows, _, permutation = route.permute(leaf(x), experts, E)
    assert [tuple(each.shape) for each in kept] == [(T, K)]
    with saved_tensors() as kept:
        route.unpermute(rows, permutation)
    assert sorted(tuple(each.shape) for each in kept) == [(T, K), (T * K,)]
    with saved_tensors() as kept:
        route.topk_router(leaf(logits), K)
    assert sum(each.numel() for each in kept) == T * E + T * K + 1, "no slopes of losses whose coefficients are 0"
    for options in ({"after_topk": True}, {"normalize": True}):
        with saved_tensors() as kept:
            route.topk_router(leaf(logits), K, **options)
        assert sum(each.numel() for each in kept) == 2 * T * K + 1, "weights and experts, no logits"
        with saved_tensors() as kept:
            route.topk_router(leaf(logits), K, z_coeff=0.1, **options)
        assert sum(each.numel() for each in kept) == T * E + T * K + E + 2, "the losses read the logits"


def test_no_memory_of_the_gradient_is_shared_with_the_sums() -> None:
    """Backward twice, and in another order, gives the same bits."""
    logits = leaf(torch.randn(T, E))
    weights, _, aux = route.topk_router(logits, K, **LOSSES)
    total = weights.square().sum() + aux.aux_loss
    (one,) = torch.autograd.grad(total, logits, retain_graph=True)
    (two,) = torch.autograd.grad(total, logits)
    asserts.bitwise(one, two, "second backward")


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda r: r.topk_router(torch.zeros(2, 4), 5), ValueError, ["`k`", "5", "1 to 4", "smaller"]),
        (lambda r: r.topk_router(np.zeros((2, 4)), 1), TypeError, ["`logits`", "ndarray", "torch.Tensor", "convert"]),
        (lambda r: r.topk_router(None, 1), TypeError, ["`logits`", "NoneType", "torch.Tensor", "convert"]),
        (lambda r: r.topk_router(torch.zeros(2, 4), None), TypeError, ["`k` of topk", "None", "an integer", "pass"]),
        (
            lambda r: r.topk_router(torch.zeros(2, 4), 1, score=["softmax"]),
            ValueError,
            ["`score`", "['softmax']", "expected one of", "choose"],
        ),
        (
            lambda r: r.topk_router(torch.zeros(2, 4), 1, process_group=3),
            TypeError,
            ["`process_group` of topk_router", "int", "expected a torch.distributed.ProcessGroup", "pass"],
        ),
        (
            lambda r: r.permute(torch.zeros(2, 4), None, 4),
            TypeError,
            ["`experts`", "NoneType", "expected a torch.Tensor", "convert"],
        ),
        (
            lambda r: r.permute(torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.int64), None),
            TypeError,
            ["`num_groups` of permute", "None", "expected an integer", "pass an int"],
        ),
        (
            lambda r: r.unpermute(torch.zeros(2, 4), torch.zeros(2)),
            TypeError,
            ["`permutation` of unpermute", "Tensor", "the Permutation that `permute` returns", "pass that"],
        ),
        (
            lambda r: r.unpad_groups(torch.zeros(2, 4), None),
            TypeError,
            ["`map` of unpad_groups", "NoneType", "the Padding that `pad_groups` returns", "pass that"],
        ),
        (
            lambda r: r.topk_router(torch.zeros(4, 2).t(), 1),
            ValueError,
            ["`logits`", "strides (1, 2)", "contiguous", "call `.contiguous()`"],
        ),
        (
            lambda r: r.topk_router(torch.zeros(2, 4), 1, mask=torch.ones(2)),
            TypeError,
            ["`mask`", "float32", "expected bool", "pass False for padding"],
        ),
        (
            lambda r: r.topk_router(torch.zeros(2, 4), 1, jitter=0.1),
            ValueError,
            ["`key`", "None with jitter", "a key", "pass both"],
        ),
        (
            lambda r: r.permute(torch.zeros(2, 4), torch.zeros(3, 1, dtype=torch.int64), 4),
            ValueError,
            ["`x` of permute", "2 tokens", "expected 3", "route these tokens"],
        ),
        (
            lambda r: r.permute(torch.zeros(2, 4), torch.zeros(2, 1), 4),
            TypeError,
            ["`experts` of permute", "float32", "expected integers", "pass numbers"],
        ),
        (
            lambda r: r.permute(torch.zeros(2, 4), torch.zeros(2, 0, dtype=torch.int64), 4),
            ValueError,
            ["`experts` of permute", "(2, 0)", "k of 1 or more", "pass -1"],
        ),
        (
            lambda r: r.permute(torch.zeros(2, 0), torch.zeros(2, 1, dtype=torch.int64), 4),
            ValueError,
            ["`x` of permute", "(2, 0)", "1 or more columns", "pass rows"],
        ),
        (
            lambda r: r.permute(torch.zeros(2, 4).double(), torch.zeros(2, 1, dtype=torch.int64), 4),
            TypeError,
            ["`x` of permute", "float64", "one of float32", "cast it"],
        ),
        (
            lambda r: r.pad_groups(torch.zeros(2, 4, dtype=torch.bool), torch.zeros(2, dtype=torch.int32), 4),
            TypeError,
            ["`rows` of pad_groups", "bool", "one of float32", "cast it"],
        ),
        (
            lambda r: r.unpad_groups(
                torch.zeros(4, 4).double(), r.pad_groups(torch.zeros(4, 4), torch.tensor([4]), 1)[2]
            ),
            TypeError,
            ["`rows` of unpad_groups", "float64", "one of float32", "cast it"],
        ),
        (
            lambda r: r.topk_router(torch.zeros(2, 4), 1, mask=torch.ones(2, 2, dtype=torch.bool)[:, 0]),
            ValueError,
            ["`mask`", "strides (2,)", "contiguous", "call `.contiguous()`."],
        ),
        (
            lambda r: r.pad_groups(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int32), 0),
            ValueError,
            ["`align` of pad_groups", "0", "1 or more", "pads nothing"],
        ),
        (
            lambda r: r.hash_experts(torch.zeros(2, dtype=torch.int64), 3, 2),
            ValueError,
            ["`k` of hash_experts", "3", "1 to 2", "smaller"],
        ),
        (
            lambda r: r.balance_quantile(torch.zeros(2, 4), torch.zeros(4), 2, low=-float("inf")),
            ValueError,
            ["`low` of balance_quantile", "-inf", "finite", "pass another"],
        ),
        (
            lambda r: r.update_bias(torch.zeros(3), torch.zeros(3, dtype=torch.int64), float("nan")),
            ValueError,
            ["`rate` of update_bias", "nan", "finite", "pass another"],
        ),
        (
            lambda r: r.update_bias(torch.zeros(3), torch.zeros(2, dtype=torch.int64), 0.1),
            ValueError,
            ["`load` of update_bias", "(2,)", "expected (3,)", "one count per expert"],
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, kind: type[Exception], said: list[str]) -> None:
    with asserts.refused(kind, said):
        call(route)


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("k", lambda k: route.topk_router(torch.ones(2, 8), k)[1]),
        ("num_groups", lambda groups: route.permute(torch.ones(2, 4), torch.ones(2, 1, dtype=torch.int32), groups)[0]),
        ("align", lambda align: route.pad_groups(torch.ones(2, 4), torch.ones(2, dtype=torch.int32), align)[0]),
        ("k", lambda k: route.hash_experts(torch.ones(2, dtype=torch.int32), k, 8)),
        ("bins", lambda bins: route.balance_quantile(torch.ones(2, 8), torch.zeros(8), 2, bins=bins)),
    ],
)
def test_numbers_of_other_types_do_not_reach_caches(name: str, call: Callable[[Any], torch.Tensor]) -> None:
    """The number is in no other test, so nothing is cached for it: 7.0 and NumPy's 7 have the hash of 7."""
    with asserts.refused(TypeError, [f"`{name}`", "7.0", "expected an integer", "pass an int"]):
        call(7.0)
    first = call(np.int64(7))
    asserts.bitwise(first, call(7), "an int after a number of NumPy")


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize("name", ["k", "num_groups", "topk_groups", "group_topk", "sinkhorn"])
def test_options_of_the_router_are_integers_after_a_call_with_them_too(name: str) -> None:
    logits = torch.ones(2, 8)
    options = {"k": 2, "num_groups": 2, "topk_groups": 2, "group_topk": 2, "sinkhorn": 2}
    first = route.topk_router(logits, **options)[1]
    with asserts.refused(TypeError, [f"`{name}` of topk_router", "2.0", "expected an integer", "pass an int"]):
        route.topk_router(logits, **(options | {name: 2.0}))
    asserts.bitwise(first, route.topk_router(logits, **(options | {name: np.int64(2)}))[1], "a number of NumPy")


@pytest.mark.rule("ERR-1")
def test_transforms_are_refused() -> None:
    experts = torch.zeros(T, K, dtype=torch.int32)
    _, _, permutation = route.permute(torch.ones(T, H), experts, E)
    rows, biases = torch.ones(2, T, H), torch.zeros(2, E)
    for name, run, batch in (
        ("topk_router", lambda x: route.topk_router(x, 1)[0], rows),
        ("permute", lambda x: route.permute(x, experts, E)[0], rows),
        ("unpermute", lambda x: route.unpermute(x, permutation), torch.ones(2, T * K, H)),
        ("pad_groups", lambda x: route.pad_groups(x, torch.tensor([T]), 4)[0], rows),
        ("update_bias", lambda x: route.update_bias(x, torch.zeros(E, dtype=torch.int32), 0.1), biases),
        ("balance_quantile", lambda x: route.balance_quantile(torch.zeros(T, E), x, K), biases),
        ("hash_experts", lambda x: route.hash_experts(x, K, E), torch.zeros(2, T, dtype=torch.int32)),
    ):
        with asserts.refused(NotImplementedError, [name, "vmap", "expected plain tensors", "fold"]):
            torch.func.vmap(run)(batch)


@pytest.mark.rule("ERR-1")
def test_tensors_on_another_device_are_compared_with_the_first() -> None:
    rows, away = torch.zeros(T, E), {"device": "meta"}
    calls: dict[tuple[str, str], Callable[[], Any]] = {
        ("load", "bias"): lambda: route.update_bias(rows[0], torch.zeros(E, dtype=torch.int32, **away), 0.1),
        ("bias", "logits"): lambda: route.topk_router(rows, K, bias=torch.zeros(E, **away)),
        ("sizes", "rows"): lambda: route.pad_groups(rows, torch.zeros(2, dtype=torch.int32, **away), 4),
        ("experts", "x"): lambda: route.permute(rows, torch.zeros(T, K, dtype=torch.int32, **away), E),
    }
    for (name, first), call in calls.items():
        with asserts.refused(ValueError, [f"`{name}`: on meta", f"expected cpu = device of `{first}`", "move it"]):
            call()


@pytest.mark.rule("LYR-4")
def test_a_bias_has_no_gradient_in_transforms_either() -> None:
    bias, load, scores = torch.randn(E), torch.arange(E, dtype=torch.int32), torch.rand(T, E)
    for run in (lambda x: route.update_bias(x, load, 0.1), lambda x: route.balance_quantile(scores, x, K)):
        asserts.bitwise(torch.func.grad(lambda x, run=run: run(x).sum())(bias), torch.zeros(E))


@pytest.mark.rule("LYR-3", "LYR-13")
def test_losses_of_all_ranks_follow_from_their_sums() -> None:
    """What two ranks compute in parallel_checks.py, here by the rules alone: the sums of halves are those of all."""
    values = draw(T, E)
    whole = Rules.of(values, K, LOSSES)
    parts = [Rules.of(np.ascontiguousarray(part), K, LOSSES).choose().sums for part in (values[:9], values[9:])]
    total = Sums(*(a + b for a, b in zip(*parts, strict=True)))
    near(
        torch.from_numpy(as_numpy(whole.losses(total).values)),
        torch.from_numpy(as_numpy(whole.losses(whole.choose().sums).values)).double(),
        "losses",
    )
