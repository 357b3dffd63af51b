"""Adapters of the experts' MLP in both frontends: the same bits for rows and tokens, forward and backward."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped
import torch_bridge
from grouped_core import recipes
from grouped_core.mlp_spec import POLICIES
from tests import asserts, cases
from tests.parity.adapters import to_torch
from tests.parity.lora_mlp_adapters import FACTORS, NAMES, by_jax, by_torch, lora_of, of_tokens, problem

CASE = cases.Case("experts", (20, 0, 13), 40, 48, 32, frozenset())
TOKENS = 17
KEY = np.array([0x243F6A88, 0x85A308D3], np.uint32)
BASES = (None, "fp8_128x128", "mxfp8", "mxfp4", "nvfp4")
FROZEN = {
    "": (),
    "x": ("x",),
    "A": ("a_wi", "a_wo"),
    "B": ("b_wi", "b_wo"),
    "first": ("a_wi", "b_wi"),
    "second": ("a_wo", "b_wo"),
    "others": ("x", "probs", "wi_bias", "wo_bias"),
}
"""Operands without gradients."""


def same(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    for name in ("y", *NAMES):
        assert (found[name] is None) == (expected[name] is None), f"{name}: {what}"
        if found[name] is not None:
            asserts.bitwise(found[name], expected[name], f"{name}: {what}")


@pytest.mark.rule("LOR-1", "LOR-2", "LOR-4", "ALL-1", "MLP-8")
@pytest.mark.matrix(
    dtype=cases.DTYPES,
    base=BASES,
    transposed=(False, True),
    policy=POLICIES,
    dropout=(0.0, 0.3),
    probs=(False, True),
    bias=(False, True),
    absent=("", "wi", "wo"),
    frozen=tuple(FROZEN),
    kind=("swiglu", "relu"),
    valid=lambda dtype, base, absent, frozen, **_: (
        not (dtype == "float16" and base == "mxfp4") and (absent, frozen) not in (("wi", "second"), ("wo", "first"))
    ),
)
def test_both_frontends_give_the_same_bits(dtype, base, transposed, policy, dropout, probs, bias, absent, frozen, kind):
    given, dy = problem(CASE, dtype, kind=kind, transposed=transposed, probs=probs, bias=bias, absent=absent)
    options: dict[str, Any] = {"rhs_transposed": transposed, "residuals": policy, "activation": kind, "base": base}
    options |= {"lora_scaling": 0.37, "lora_dropout": dropout, "key": KEY if dropout else None}
    needs = set(NAMES) - set(FROZEN[frozen])
    first = by_jax(given, dy, needs, **options)
    same(by_torch(given, dy, needs, **options), first, "torch")
    if policy != "save_fc1":
        same(by_torch(given, dy, needs, **{**options, "residuals": "save_fc1"}), first, policy)
    assert all((first[name] is not None) == (name in needs and given[name] is not None) for name in NAMES)
    asserts.zero(first["y"][CASE.valid :], "tail")

    tokens, dy = of_tokens(given, dy, TOKENS)
    first = by_jax(tokens, dy, needs, **options)
    same(by_torch(tokens, dy, needs, **options), first, "torch with tokens")
    same(by_torch(tokens, dy, needs, **options, by_rows=True), first, "permuted rows of torch")
    if policy == POLICIES[0]:  # each call is a program of its own, so one value of each pair of options will do
        same(by_jax(tokens, dy, needs, **options, by_rows=True), first, "permuted rows of jax")


@pytest.mark.rule("LOR-1", "MLP-10")
@pytest.mark.parametrize("recipe", ["FP8Current", "FP8Block", "MXFP8", "NVFP4"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tokens", [False, True])
def test_recipes_give_the_same_bits_too(recipe, policy, tokens):
    wide = cases.Case("wide", (20, 0, 13), 40, 128, 64, frozenset())
    given, dy = problem(wide, "bfloat16", bias=False)
    given, dy = of_tokens(given, dy, TOKENS) if tokens else (given, dy)
    options: dict[str, Any] = {"rhs_transposed": True, "residuals": policy, "recipe": recipes.RECIPES[recipe]}
    first = by_jax(given, dy, set(NAMES), **options)
    same(by_torch(given, dy, set(NAMES), **options), first, "torch")
    same(by_torch(given, dy, set(NAMES), **{**options, "residuals": "save_fc1"}), first, policy)


@pytest.mark.rule("LOR-1", "LOR-2")
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("tokens", [False, True])
def test_step_0_is_bitwise_the_base(base, tokens):
    given, dy = problem(CASE, "bfloat16")
    given, dy = of_tokens(given, dy, TOKENS) if tokens else (given, dy)
    for name in ("b_wi", "b_wo"):
        given[name] = np.zeros_like(given[name])
    options: dict[str, Any] = {"rhs_transposed": True, "base": base}
    found = by_torch(given, dy, {"x"}, **options)
    x, wi, wo, b1, b2, p = (to_torch(given[name]) for name in ("x", "wi", "wo", "wi_bias", "wo_bias", "probs"))
    if base is not None:
        wi, wo = (torch_bridge.quantize(each, base, axis=2) for each in (wi, wo))
    x.requires_grad_()
    if tokens:
        y = torch_bridge.routed_mlp(x, to_torch(given["experts"]), p, wi, wo, wi_bias=b1, wo_bias=b2)
    else:
        sizes = to_torch(given["group_sizes"])
        y = torch_bridge.grouped_mlp(x, wi, wo, sizes, probs=p, wi_bias=b1, wo_bias=b2)
    y.backward(to_torch(dy))
    asserts.bitwise(found["y"], y.detach(), "y")
    asserts.bitwise(found["x"], x.grad, "gradient of x")


@pytest.mark.rule("LOR-1", "ERR-1")
@pytest.mark.parametrize("frontend", ["jax", "torch"])
@pytest.mark.parametrize(
    ("options", "kind", "fragments"),
    [
        ({"lora": (None, None)}, ValueError, ["`lora`", "(None, None)", "an adapter of a weight", "leave it out"]),
        ({"lora": 3}, ValueError, ["`lora`", "int", "((A, B) of wi, (A, B) of wo)", "put None"]),
        ({"lora": (None, (None, 1))}, ValueError, ["`lora[1][0]`", "None", "the factor A", "pass both"]),
        ({"lora": ((1, None), None)}, ValueError, ["`lora[0][1]`", "None", "the factor B", "pass both"]),
        ({"lora": (None, (1,))}, ValueError, ["`lora[1]`", "tuple", "a pair (A, B)", "pass both"]),
        ({"lora": None, "lora_scaling": 2.0}, ValueError, ["`lora_scaling`", "without `lora`", "pass an adapter"]),
        ({"lora_dropout": 0.5}, ValueError, ["`lora_key`", "None with", "if and only if", "pass both"]),
        ({"lora_wgrad_accum": 1}, ValueError, ["`lora_wgrad_accum`", "int", "two pairs"]),
        ({"wgrad_accum": ("wi", "wo")}, ValueError, ["`wgrad_accum`", "beside `lora`", "`lora_wgrad_accum`"]),
        ({"halves": True}, ValueError, ["`wi`", "two arrays beside `lora`", "pass gate and linear half as one"]),
        ({"rank": 3}, ValueError, ["`lora[1][1]`", "expected (3, 48, 4)"]),
    ],
)
def test_contradictions_are_refused(frontend, options, kind, fragments):
    given, _ = problem(CASE, "float32")
    array, library = (jnp.asarray, jax_grouped) if frontend == "jax" else (to_torch, torch_bridge)
    held: dict[str, Any] = {name: None if each is None else array(each) for name, each in given.items()}
    options = dict(options)
    if options.pop("halves", False):
        half = held["wi"].shape[1] // 2
        held["wi"] = (held["wi"][:, :half] + 0, held["wi"][:, half:] + 0)
    if rank := options.pop("rank", 0):
        held["b_wo"] = held["b_wo"][:, :, :rank] + 0
    if "wgrad_accum" in options:
        options["wgrad_accum"] = (held["wi"], held["wo"])
    options = {"lora": lora_of(held), "rhs_transposed": True, **options}
    call: Any = library.grouped_mlp
    with asserts.refused(kind, fragments):
        call(held["x"], held["wi"], held["wo"], held["group_sizes"], **options)


@pytest.mark.rule("LOR-2", "ERR-1")
def test_a_base_that_is_not_frozen_is_refused():
    given, _ = problem(CASE, "float32")
    x, wi, wo, sizes = (to_torch(given[name]) for name in ("x", "wi", "wo", "group_sizes"))
    lora = lora_of({name: None if each is None else to_torch(each) for name, each in given.items()})
    with asserts.refused(ValueError, ["`wo`", "requires a gradient", "a frozen weight", "requires_grad_(False)"]):
        torch_bridge.grouped_mlp(x, wi, wo.requires_grad_(), sizes, lora=lora)
    held = {name: None if each is None else jnp.asarray(each) for name, each in given.items()}

    def loss(wi: Any) -> Any:
        options: dict[str, Any] = {"rhs_transposed": True, "lora": lora_of(held)}
        return jnp.sum(jax_grouped.grouped_mlp(held["x"], wi, held["wo"], held["group_sizes"], **options))

    with asserts.refused(ValueError, ["`wi`", "differentiated", "a frozen weight", "stop_gradient"]):
        jax.grad(loss)(held["wi"])


@pytest.mark.rule("ERR-2")
def test_plans_name_the_calls_of_the_adapters():
    given, _ = problem(CASE, "bfloat16", bias=False)
    rank = given["a_wi"].shape[1]
    for array, library in ((jnp.asarray, jax_grouped), (to_torch, torch_bridge)):
        held = {name: None if each is None else array(each) for name, each in given.items()}
        operands = held["x"], held["wi"], held["wo"], held["group_sizes"]
        options: dict[str, Any] = {"rhs_transposed": True, "lora": lora_of(held)}
        told = library.explain(library.grouped_mlp, *operands, **options)
        assert told.count(f"grouped_matmul -> bfloat16[{CASE.rows}, {rank}]: grouped_matmul_any_cpu on cpu") >= 2
        assert "grouped_matmul_act" in told
        assert "grouped_matmul_low_composed_cpu" in told
        assert library.why_unsupported(library.grouped_mlp, *operands, **options) is None


@pytest.mark.rule("LOR-4", "ERR-2")
@pytest.mark.parametrize("frontend", ["jax", "torch"])
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("absent", ["", "wi", "wo"])
def test_gradients_of_b_are_made_along_with_those_of_the_rows_unless_they_are_accumulated(frontend, tokens, absent):
    """One pass over dy, and one over dh, gives both; into an accumulator, each gradient is a product of its own."""
    given, dy = problem(CASE, "bfloat16", bias=False, absent=absent)
    given, _ = of_tokens(given, dy, TOKENS) if tokens else (given, dy)
    library, array = (jax_grouped, jnp.asarray) if frontend == "jax" else (torch_bridge, to_torch)
    held: dict[str, Any] = {name: None if each is None else array(each) for name, each in given.items()}
    if frontend == "torch":
        for name in ("x", *FACTORS):
            if held[name] is not None:
                held[name].requires_grad_()
    call = library.routed_mlp if tokens else library.grouped_mlp
    operands = [held[name] for name in (("x", "experts", "probs", "wi", "wo") if tokens else ("x", "wi", "wo"))]
    operands += [] if tokens else [held["group_sizes"]]
    options: dict[str, Any] = {"rhs_transposed": True, "lora": lora_of(held)}
    present = {name: list(given[name].shape) for name in ("b_wi", "b_wo") if given[name] is not None}
    told = library.explain(call, *operands, **options)
    assert told.count("low_rank_grads ->") == len(present)
    for shape in present.values():
        assert f" bfloat16{shape}: low_rank_grads" in told
        assert f"grouped_matmul -> bfloat16{shape}" not in told
    into = {name: array(np.zeros(shape, np.float32)) for name, shape in present.items()}
    for some in ([each] for each in present):
        accums = tuple([(None, into[name]) if name in some else None for name in ("b_wi", "b_wo")])
        told = library.explain(call, *operands, **options, lora_wgrad_accum=accums)
        assert told.count(f"grouped_matmul -> float32{present[some[0]]}") == 1
        if frontend == "jax":
            assert told.count("low_rank_grads ->") == len(present) - 1
        else:  # gradients that go to different places are delivered by one way
            assert told.count("low_rank_grads ->") == 0
