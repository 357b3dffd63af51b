"""What ranks check of adapters of experts that are spread over them; `expert_parallel_checks` runs it.

Every rank draws the adapters of all experts, so it has what one rank computes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests import asserts
from tests.torch_frontend.expert_parallel_tools import (
    E,
    F,
    H,
    K,
    T,
    all_parts,
    check,
    check_of_graphs,
    compiled,
    drawn,
    in_jax,
    own_part,
    weights_of,
)
from tests.torch_frontend.routing_tools import near
from tests.torch_frontend.torch_tools import leaf
from torch_bridge import MXFP8, SharedExpert, grouped_mlp, moe, nn, parallel, quantize, route
from torch_bridge._router import router_logits

RANK, SCALING = 4, 0.5
SHAPES = ((RANK, H), (2 * F, RANK), (RANK, F), (H, RANK))
"""A and B of wi, A and B of wo, of one expert."""


def _factors(mesh: DeviceMesh, experts: int = E, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    found = [drawn(mesh, experts, *shape, seed=("adapter", shape), dtype=dtype) for shape in SHAPES]
    return [each * 0.2 for each in found]


def _pairs(factors: Any) -> Any:
    return (tuple(factors[:2]), tuple(factors[2:]))


def _tokens(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """x and dy of all ranks."""
    x, dy = (drawn(mesh, mesh.size() * T, H, seed=each, dtype=dtype) for each in ("x", "dy"))
    return x, dy


def _key(mesh: DeviceMesh, low: int = 1, high: int = 2) -> Tensor:
    return torch.tensor([low, high], dtype=torch.uint32).to(mesh.device_type)


@check
def adapters_live_where_their_experts_do(mesh: DeviceMesh) -> None:
    """The adapters of a rank's experts in a layer have the gradients that they have on one rank."""
    torch.manual_seed(5)
    options: dict[str, Any] = {"lora_rank": RANK, "lora_alpha": 8, "dtype": torch.bfloat16}
    one = nn.MoE(H, F, E, K, **options).to(mesh.device_type)
    ours = nn.MoE(H, F, E, K, process_group=mesh.get_group(), **options).to(mesh.device_type)
    with torch.no_grad():
        for (name, mine), theirs in zip(ours.named_parameters(), one.parameters(), strict=True):
            if name.endswith("lora_B"):
                theirs.normal_()
            mine.copy_(own_part(theirs, mesh) if mine.shape != theirs.shape else theirs)
    x, _ = _tokens(mesh, torch.bfloat16)
    y, y2 = one(x)[0], ours(own_part(x, mesh))[0]
    asserts.bitwise(all_parts(y2.detach()), y.detach(), "y")
    y.sum().backward()
    y2.sum().backward()
    for (name, mine), theirs in zip(ours.named_parameters(), one.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None) == (not mine.requires_grad), name
        if "lora" in name:
            assert mine.grad is not None
            asserts.bitwise(all_parts(mine.grad), theirs.grad, name)
    with asserts.refused(ValueError, ["`send` of MoE", "'codes' beside `lora`", "None or 'tokens'"]):
        nn.MoE(H, F, E, K, process_group=mesh.get_group(), recipe=MXFP8, send="codes", **options)


@check
def adapters_of_the_function_have_the_bits_of_one_rank(mesh: DeviceMesh) -> None:
    """y and the gradients of tokens and adapters, for plain and quantised weights; frozen factors have no gradient."""
    group = mesh.get_group()
    cases: list[tuple[torch.dtype, str | None, Any]] = [(torch.float32, None, None), (torch.bfloat16, None, MXFP8)]
    if mesh.device_type == "cpu":  # on GPUs the kernel for codes depends on the number of rows
        cases.append((torch.bfloat16, "mxfp4", None))
    for dtype, base, recipe in cases:
        x, dy = _tokens(mesh, dtype)
        router, *weights = weights_of(mesh, dtype)
        for trained in ((True,) * 4, (False, True, True, False)):
            results = []
            for part, run in ((lambda each: each, moe), (lambda each: own_part(each, mesh), parallel.moe)):
                held = leaf(part(x))
                wi, wo = (part(each) if base is None else quantize(part(each), base, axis=2) for each in weights)
                factors = [leaf(part(a), on) for a, on in zip(_factors(mesh, dtype=dtype), trained, strict=True)]
                options: dict[str, Any] = {"lora": _pairs(factors), "lora_scaling": SCALING, "recipe": recipe}
                if run is parallel.moe:
                    options["process_group"] = group
                y, _ = run(held, router, wi, wo, K, **options)
                y.backward(part(dy))
                results.append((y.detach(), held.grad, *(each.grad for each in factors if each.requires_grad)))
                assert all(each.requires_grad or each.grad is None for each in factors)
            for theirs, mine in zip(*results, strict=True):
                asserts.bitwise(all_parts(mine), theirs, f"{dtype}, {base}, {trained}")


@check
def adapters_may_be_lists_and_of_one_weight(mesh: DeviceMesh) -> None:
    """A and B as one tensor per expert, in the order of experts; or of wo alone."""
    (x, dy), (router, wi, wo) = _tokens(mesh), weights_of(mesh, torch.float32)
    a_wi, b_wi, a_wo, b_wo = [own_part(each, mesh) for each in _factors(mesh)]
    given = (own_part(x, mesh), router, own_part(wi, mesh), own_part(wo, mesh), K)
    for of_wi in (None, (a_wi, b_wi)):
        found = []
        for listed in (False, True):
            factors: list[Any] = [leaf(each) for each in (a_wo, b_wo)]
            held = [list(each.unbind()) for each in factors] if listed else factors
            y, _ = parallel.moe(*given, process_group=mesh.get_group(), lora=(of_wi, tuple(held)))
            y.backward(own_part(dy, mesh))
            found.append((y.detach(), *(each.grad for each in factors)))
        for packed, members in zip(*found, strict=True):
            asserts.bitwise(members, packed)


@check
def adapters_of_a_shared_expert_add_up(mesh: DeviceMesh) -> None:
    """They are replicated: their gradients are those of a rank's tokens. `lora` itself may be absent."""
    (x, dy), (router, wi, wo) = _tokens(mesh), weights_of(mesh, torch.float32)
    shared = SharedExpert(drawn(mesh, 1, 2 * F, H, seed="a"), drawn(mesh, 1, H, F, seed="b"))
    of_one, of_ours = ([leaf(each) for each in _factors(mesh, 1)] for _ in range(2))
    options: dict[str, Any] = {"lora": _pairs(_factors(mesh)), "lora_scaling": SCALING}
    y, _ = moe(x, router, wi, wo, K, shared=shared._replace(lora=_pairs(of_one)), **options)
    y.backward(dy)
    options["lora"] = _pairs([own_part(each, mesh) for each in _factors(mesh)])
    given = (own_part(x, mesh), router, own_part(wi, mesh), own_part(wo, mesh), K)
    options |= {"process_group": mesh.get_group(), "shared": shared._replace(lora=_pairs(of_ours))}
    y2, _ = parallel.moe(*given, **options)
    y2.backward(own_part(dy, mesh))
    asserts.bitwise(all_parts(y2.detach()), y.detach(), "y")
    for mine, theirs in zip(of_ours, of_one, strict=True):
        total = mine.grad.clone()
        dist.all_reduce(total)
        near(total, theirs.grad.double(), "an adapter of the shared expert")
    alone, _ = parallel.moe(*given, **{**options, "lora": None})
    assert not torch.equal(alone, y2), "the experts have adapters in one of the two"


@check
def masks_of_adapters_are_those_of_a_rank(mesh: DeviceMesh) -> None:
    """Each rank adds its number to the high word of the key; on a rank alone they are those of the key itself."""
    (x, dy), (router, wi, wo) = _tokens(mesh), weights_of(mesh, torch.float32)
    rank, ranks = mesh.get_rank(), mesh.size()
    dropout: dict[str, Any] = {"lora_scaling": SCALING, "lora_dropout": 0.5}
    ours = [leaf(own_part(each, mesh)) for each in (x, *_factors(mesh))]
    own: dict[str, Any] = {"process_group": mesh.get_group(), "lora": _pairs(ours[1:]), "lora_key": _key(mesh)}
    given = (router, own_part(wi, mesh), own_part(wo, mesh), K)
    y, _ = parallel.moe(ours[0], *given, **own, **dropout)
    y.backward(own_part(dy, mesh))

    by_hand = [leaf(own_part(each, mesh)) for each in (x, *_factors(mesh))]
    weights, chosen, _ = route.topk_router(router_logits(by_hand[0], router), K)
    rows, sizes, handle = parallel.dispatch(by_hand[0], chosen, weights, E, process_group=mesh.get_group())
    options = {"probs": handle.probs, "lora": _pairs(by_hand[1:]), "lora_key": _key(mesh, 1, 2 + rank)}
    results = grouped_mlp(rows, *given[1:3], sizes, **options, **dropout)
    y2 = parallel.combine(results, handle)
    y2.backward(own_part(dy, mesh))
    asserts.bitwise(y.detach(), y2.detach(), "y")
    for mine, theirs in zip(ours[1:], by_hand[1:], strict=True):
        asserts.bitwise(mine.grad, theirs.grad, "an adapter")

    shared = SharedExpert(wi[:1].clone(), wo[:1].clone(), lora=_pairs(_factors(mesh, 1)))
    options = {"lora": shared.lora, "lora_key": _key(mesh, 2**32 - 2, 2 + rank)}  # the low word's bits inverted
    tokens = torch.full((1,), T, dtype=torch.int32, device=wi.device)
    beside = grouped_mlp(by_hand[0], shared.wi, shared.wo, tokens, **options, **dropout)
    y3, _ = parallel.moe(ours[0], *given, shared=shared, **own, **dropout)
    asserts.bitwise(y3.detach(), (y2 + beside).detach(), "y with a shared expert")

    alone = [dist.new_group([each]) for each in range(ranks)][rank]
    options = {"lora": _pairs(_factors(mesh)), "lora_key": _key(mesh), **dropout}
    one, _ = moe(x, router, wi, wo, K, shared=shared, **options)
    spread, _ = parallel.moe(x, router, wi, wo, K, process_group=alone, shared=shared, **options)
    asserts.bitwise(spread, one, "y of one rank alone")


@check
def chunks_have_masks_of_their_own(mesh: DeviceMesh) -> None:
    """Without dropout y and dx keep their bits; with it each chunk adds P to the key, and the next call repeats it."""
    group, ranks = mesh.get_group(), mesh.size()
    (x, dy), (router, wi, wo) = _tokens(mesh), weights_of(mesh, torch.float32)
    given = (router, own_part(wi, mesh), own_part(wo, mesh), K)
    factors = [own_part(each, mesh) for each in _factors(mesh)]

    def run(x: Tensor, **options: Any) -> Tensor:
        return parallel.moe(x, *given, process_group=group, lora=_pairs(factors), **options)[0]

    found = []
    for chunks in (1, 2):
        held = leaf(own_part(x, mesh))
        y = run(held, chunks=chunks)
        y.backward(own_part(dy, mesh))
        found.append((y.detach(), held.grad))
    for one, other in zip(*found, strict=True):
        asserts.bitwise(other, one, "without dropout")
    options: dict[str, Any] = {"lora_dropout": 0.5}
    mine = own_part(x, mesh)
    whole = run(mine, lora_key=_key(mesh), chunks=2, **options)
    asserts.bitwise(run(mine, lora_key=_key(mesh), chunks=2, **options), whole, "again")
    halves = [
        run(each.clone(), lora_key=_key(mesh, 1, 2 + at * ranks), **options) for at, each in enumerate(mine.chunk(2))
    ]
    asserts.bitwise(whole, torch.cat(halves), "each half with a key of its own")


@check
def gradients_of_adapters_go_to_accumulators(mesh: DeviceMesh) -> None:
    (x, dy), (router, wi, wo) = _tokens(mesh), weights_of(mesh, torch.float32)
    given = (own_part(x, mesh), router, own_part(wi, mesh), own_part(wo, mesh), K)
    found = []
    for way in ("grad", "given", "main_grad"):
        factors = [leaf(own_part(each, mesh)) for each in _factors(mesh)]
        sums = [torch.zeros_like(each) for each in factors]
        if way == "main_grad":
            for each, into in zip(factors, sums, strict=True):
                each.main_grad = into
        accum: Any = {"grad": None, "given": _pairs(sums), "main_grad": "main_grad"}[way]
        y, _ = parallel.moe(*given, process_group=mesh.get_group(), lora=_pairs(factors), lora_wgrad_accum=accum)
        y.backward(own_part(dy, mesh))
        found.append([each.grad for each in factors] if way == "grad" else sums)
    for other in found[1:]:
        for mine, theirs in zip(other, found[0], strict=True):
            asserts.bitwise(mine, theirs)


@check_of_graphs
def a_compiled_layer_with_adapters_is_one_graph(mesh: DeviceMesh) -> None:
    router, wi, wo = weights_of(mesh, torch.float32)
    wi, wo = own_part(wi, mesh), own_part(wo, mesh)
    shared = SharedExpert(wi[:1].clone(), wo[:1].clone(), lora=_pairs(_factors(mesh, 1)))

    def run(x: Tensor, key: Tensor, *factors: Tensor) -> Tensor:
        options: dict[str, Any] = {"lora": _pairs(factors), "lora_scaling": SCALING, "lora_dropout": 0.5}
        options |= {"lora_key": key, "shared": shared, "chunks": 2}
        return parallel.moe(x, router, wi, wo, K, process_group=mesh.get_group(), **options)[0]

    found = []
    for each in (run, compiled(run, mesh)):
        args = [leaf(drawn(mesh, T, H)), *(leaf(own_part(factor, mesh)) for factor in _factors(mesh))]
        y = each(args[0], _key(mesh), *args[1:])
        y.sum().backward()
        found.append([y.detach(), *(arg.grad for arg in args)])
    for mine, theirs in zip(*found, strict=True):
        asserts.bitwise(mine, theirs)


@check
def jax_gives_the_same_bits_with_adapters(mesh: DeviceMesh) -> None:
    """`jax_grouped.parallel.moe` over as many devices, with the masks of the same key: y, dx, dA and dB."""
    if mesh.device_type != "cpu":
        return
    (x, dy), (router, wi, wo) = _tokens(mesh), weights_of(mesh, torch.float32)
    ours = [leaf(own_part(each, mesh)) for each in (x, *_factors(mesh))]
    options: dict[str, Any] = {"lora_scaling": SCALING, "lora_dropout": 0.5}
    own = {"process_group": mesh.get_group(), "lora": _pairs(ours[1:]), "lora_key": _key(mesh)}
    y, _ = parallel.moe(ours[0], router, own_part(wi, mesh), own_part(wo, mesh), K, **own, **options)
    y.backward(own_part(dy, mesh))
    found = [all_parts(each) for each in (y.detach(), *(each.grad for each in ours))]
    if mesh.get_rank() == 0:
        given = {"x": x, "router": router, "wi": wi, "wo": wo, "lora": _pairs(_factors(mesh)), "lora_key": _key(mesh)}
        theirs = in_jax(mesh.size(), given, dy, ("x", "lora"), **options)
        for name, mine, other in zip(("y", "dx", "a_wi", "b_wi", "a_wo", "b_wo"), found, theirs, strict=True):
            asserts.bitwise(mine, torch.from_numpy(other), name)


@check
def options_that_adapters_do_not_meet_are_refused(mesh: DeviceMesh) -> None:
    """Before a rank communicates, so that none waits for another."""
    router, wi, wo = weights_of(mesh, torch.float32)
    lora = _pairs([own_part(each, mesh) for each in _factors(mesh)])
    shared = SharedExpert(wi[:1].clone(), wo[:1].clone(), lora=_pairs(_factors(mesh, 1)))
    wrong: list[tuple[dict[str, Any], list[str]]] = [
        ({"send": "codes", "recipe": MXFP8}, ["`send` of parallel.moe", "'codes' beside `lora`", "None or 'tokens'"]),
        ({"lora_dropout": 0.5}, ["`lora_key`", "if and only if"]),
        ({"lora": None, "lora_scaling": 2.0}, ["`lora_scaling`", "without `lora`"]),
        ({"lora": None, "lora_wgrad_accum": "main_grad", "shared": shared}, ["`lora_wgrad_accum`", "without `lora`"]),
        ({"lora": (None, None)}, ["`lora`", "(None, None)"]),
        ({"lora_dropout": 0.5, "lora_key": torch.zeros(2, device=mesh.device_type)}, ["`lora_key`", "uint32[2]"]),
        ({"shared": shared._replace(lora=())}, ["`lora`", "a pair"]),
    ]
    for options, words in wrong:
        with asserts.refused(ValueError, words):
            given = {"process_group": mesh.get_group(), "lora": lora, **options}
            parallel.moe(drawn(mesh, T, H), router, own_part(wi, mesh), own_part(wo, mesh), K, **given)
