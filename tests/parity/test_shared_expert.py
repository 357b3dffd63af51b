"""The shared expert of `moe` in both frameworks: the same bits, and dropout masks of its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_grouped
import torch_bridge
from tests import asserts, cases
from tests.parity.adapters import to_torch

T, E, K, H, F, R = 37, 4, 2, 32, 16, 4
KEY = np.array([0x243F6A88, 0x85A308D3], np.uint32)


def draw(*shape: int, seed: object) -> Any:
    """Normal values."""
    return cases.normal(shape, "float32", "shared", seed) * np.float32(0.5)


def problem() -> dict[str, Any]:
    """x, router, weights and adapters of the experts, and those of the shared expert, in the layout of JAX."""
    shapes = {"wi": (H, 2 * F), "wo": (F, H), "a_wi": (H, R), "b_wi": (R, 2 * F), "a_wo": (F, R), "b_wo": (R, H)}
    made = {f"{name}{part}": draw(count, *shape, seed=name + part) for name, shape in shapes.items()
            for part, count in (("", E), ("_shared", 1))}  # fmt: skip
    return {"x": draw(T, H, seed="x"), "router": draw(H, E, seed="router"), "gate": draw(H, 1, seed="gate"), **made}


def _parts(p: dict[str, Any], part: str = "") -> tuple[Any, Any, Any]:
    """wi, wo and both adapters."""
    wi, wo, *factors = (p[f"{name}{part}"] for name in ("wi", "wo", "a_wi", "b_wi", "a_wo", "b_wo"))
    return wi, wo, (tuple(factors[:2]), tuple(factors[2:]))


def by_jax(p: dict[str, Any], gated: bool, adapted: bool, **options: Any) -> list[Any]:
    """y, and the gradients of x, the shared expert's weights or its adapters."""

    def run(p: dict[str, Any]) -> Any:
        (wi, wo, lora), (shared_wi, shared_wo, of_shared) = _parts(p), _parts(p, "_shared")
        shared = jax_grouped.SharedExpert(
            shared_wi, shared_wo, p["gate"] if gated else None, lora=of_shared if adapted else None
        )
        own = {"lora": lora, "lora_key": jnp.asarray(KEY), "lora_scaling": 0.37, **options} if adapted else {}
        return jax_grouped.moe(p["x"], p["router"], wi, wo, K, shared=shared, **own)[0]

    y = run(p)
    read = {name: jnp.asarray(p[name]) for name in _read(adapted)}
    grads = jax.grad(lambda read: run(p | read).sum())(read)
    return [y, *(grads[name] for name in _read(adapted))]


def _read(adapted: bool) -> tuple[str, ...]:
    return ("x", "a_wi_shared", "b_wo_shared") if adapted else ("x", "wi_shared", "wo_shared")


def by_torch(p: dict[str, Any], gated: bool, adapted: bool, **options: Any) -> list[Any]:
    tensors = {name: torch.from_numpy(np.ascontiguousarray(np.swapaxes(each, -1, -2) if name != "x" else each))
               for name, each in p.items()}  # fmt: skip
    tensors = {name: each.requires_grad_(name in _read(adapted)) for name, each in tensors.items()}
    (wi, wo, lora), (shared_wi, shared_wo, of_shared) = _parts(tensors), _parts(tensors, "_shared")
    shared = torch_bridge.SharedExpert(
        shared_wi, shared_wo, tensors["gate"] if gated else None, lora=of_shared if adapted else None
    )
    own = {"lora": lora, "lora_key": to_torch(KEY), "lora_scaling": 0.37, **options} if adapted else {}
    y = torch_bridge.moe(tensors["x"], tensors["router"], wi, wo, K, shared=shared, **own)[0]
    y.sum().backward()
    found: list[Any] = [tensors[name].grad for name in _read(adapted)]
    return [y.detach(), *(each if name == "x" else each.mT for name, each in zip(_read(adapted), found, strict=True))]


@pytest.mark.rule("LYR-12", "LOR-1", "ALL-1")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dropout", [None, 0.0, 0.25])
def test_both_frameworks_give_the_same_bits(gated: bool, dropout: float | None):
    options: dict[str, Any] = {"lora_dropout": dropout} if dropout else {"lora_key": None}
    adapted = dropout is not None
    p = problem()
    for mine, theirs in zip(by_torch(p, gated, adapted, **options), by_jax(p, gated, adapted, **options), strict=True):
        asserts.bitwise(mine, theirs)


@pytest.mark.rule("LYR-12", "LOR-1")
def test_its_masks_are_not_those_of_the_first_expert():
    """The layer adds the expert under its own key, which is the documented one, and differs from that of the others."""
    p = problem()
    options: dict[str, Any] = {"lora_dropout": 0.5}
    wi, wo, lora = _parts(p, "_shared")
    sizes = jnp.array([T], jnp.int32)
    nothing = {**p, "wo": np.zeros_like(p["wo"]), "b_wo": np.zeros_like(p["b_wo"])}
    found = by_jax(nothing, False, True, **options)[0]
    options["lora_scaling"] = 0.37
    own, of_experts = (
        jax_grouped.grouped_mlp(p["x"], wi, wo, sizes, lora=lora, lora_key=jnp.array(key, jnp.uint32), **options)
        for key in ((~KEY[0], KEY[1]), KEY)
    )
    asserts.bitwise(found, own)
    assert np.any(np.asarray(found) != np.asarray(of_experts))


@pytest.mark.rule("ERR-1")
def test_a_buffer_beside_a_shared_expert_is_refused():
    wi, wo, x = torch.zeros(E, 2 * F, H), torch.zeros(E, H, F), torch.zeros(T, H)
    shared = torch_bridge.SharedExpert(wi[:1], wo[:1])
    with asserts.refused(ValueError, ["`out` of moe", "beside `shared`", "expected None", "leave it out"]):
        torch_bridge.moe(x, torch.zeros(E, H), wi, wo, K, shared=shared, out=torch.empty(T, H))


def _both(change: dict[str, Any]) -> list[Any]:
    """Calls of `moe` in both frameworks with the same change of arguments; arrays are in the layout of JAX."""
    arrays = {name: np.zeros(shape, np.float32) for name, shape in {
        "x": (T, H), "router": (H, E), "wi": (E, H, 2 * F), "wo": (E, F, H),
    }.items()}  # fmt: skip

    def jax_call() -> Any:
        given = {name: jnp.asarray(each) if isinstance(each, np.ndarray) else each
                 for name, each in (arrays | change).items()}  # fmt: skip
        if "gate" in given:
            given["shared"] = jax_grouped.SharedExpert(given["wi"][:1], given["wo"][:1], given.pop("gate"))
        return jax_grouped.moe(**given, k=K)

    def torch_call() -> Any:
        given = {name: torch.from_numpy(np.ascontiguousarray(np.swapaxes(each, -1, -2) if name != "x" else each))
                 if isinstance(each, np.ndarray) else each
                 for name, each in (arrays | change).items()}  # fmt: skip
        if "gate" in given:
            given["shared"] = torch_bridge.SharedExpert(given["wi"][:1], given["wo"][:1], given.pop("gate"))
        return torch_bridge.moe(**given, k=K)

    return [jax_call, torch_call]


@pytest.mark.rule("ERR-1", "LYR-12")
@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"x": [1.0]}, TypeError, ["`x`", "list", "expected", "convert it"]),
        ({"router": None}, TypeError, ["`router`", "NoneType", "expected", "convert it"]),
        ({"router": np.zeros((H, E), np.int32)}, TypeError, ["`router`", "int32", "one of float32", "cast it"]),
        ({"router": np.zeros((H, E + 1), np.float32)}, ValueError,
         ["`wi` of moe", f"{E} experts", f"expected {E + 1} as in `router`", "pass the weights of all"]),
        ({"wo": np.zeros((E - 1, 4, H), np.float32)}, ValueError,
         ["`wo` of moe", f"{E - 1} experts", f"expected {E} as in `router`", "pass the weights of all"]),
        ({"shared": (0, 1)}, TypeError, ["`shared` of moe", "tuple", "a SharedExpert", "pass SharedExpert(wi, wo)"]),
        ({"gate": np.zeros((H, 2), np.float32)}, ValueError, ["`shared.gate`", "shape (", "expected [", "one vector"]),
        ({"gate": np.zeros((1, H, 1), np.float32)}, ValueError, ["`shared.gate`", "expected two axes [", "reshape"]),
        ({"gate": [1.0]}, TypeError, ["`shared.gate`", "list", "expected", "convert it"]),
        ({"lora_scaling": 2.0}, ValueError, ["`lora_scaling`", "without `lora`", "expected 1.0", "leave it out"]),
        ({"lora_wgrad_accum": (None, None)}, ValueError, ["`lora_wgrad_accum`", "without `lora`", "leave it out"]),
    ],
)  # fmt: skip
def test_both_frontends_refuse_the_same_arguments(change: dict[str, Any], kind: type[Exception], said: list[str]):
    for call in _both(change):
        with asserts.refused(kind, said):
            call()


@pytest.mark.rule("LYR-12", "LOR-1", "ALL-1")
def test_the_shared_expert_alone_may_have_adapters():
    """Scale, dropout and key are then those of its adapters, and the key is checked before it is derived from."""
    p = problem()
    (wi, wo, _), (shared_wi, shared_wo, lora) = _parts(p), _parts(p, "_shared")
    options: dict[str, Any] = {"lora_scaling": 0.37, "lora_dropout": 0.25}
    shared: Any = jax_grouped.SharedExpert(shared_wi, shared_wo, lora=lora)
    given: tuple[Any, ...] = (p["x"], p["router"], wi, wo, K)
    y = jax_grouped.moe(*given, shared=shared, lora_key=jnp.asarray(KEY), **options)[0]
    routed = jax_grouped.moe(*given)[0]
    own = jnp.asarray(np.array([~KEY[0], KEY[1]]))
    sizes = jnp.array([T], jnp.int32)
    alone = jax_grouped.grouped_mlp(p["x"], shared_wi, shared_wo, sizes, lora=lora, lora_key=own, **options)
    asserts.bitwise(y, routed + alone)

    def by_rows(each: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(np.swapaxes(each, -1, -2)))

    adapters = tuple(tuple(map(by_rows, pair)) for pair in lora)
    shared = torch_bridge.SharedExpert(by_rows(shared_wi), by_rows(shared_wo), lora=adapters)
    given = (torch.from_numpy(p["x"]), *(by_rows(p[name]) for name in ("router", "wi", "wo")), K)
    asserts.bitwise(torch_bridge.moe(*given, shared=shared, lora_key=to_torch(KEY), **options)[0], y)

    said = ["`lora_key`", "float32[2]", "expected uint32[2]", "pass such an array"]
    with asserts.refused(ValueError, said):
        torch_bridge.moe(*given, shared=shared, lora_key=torch.ones(2), **options)
    with asserts.refused(ValueError, ["`lora_key`", "key<fry>[]", "expected uint32[2]", "pass such an array"]):
        shared = jax_grouped.SharedExpert(shared_wi, shared_wo, lora=lora)
        jax_grouped.moe(p["x"], p["router"], wi, wo, K, shared=shared, lora_key=jax.random.key(0), **options)
