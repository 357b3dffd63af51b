"""Adapters in both frontends: the same bits as the rules on plain arrays, forward and backward."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped
import torch_bridge
from grouped_core import recipes
from tests import asserts, cases
from tests.asserts import as_numpy
from tests.parity.adapters import to_torch

CASE = cases.named("tail")
KEY = np.array([0x243F6A88, 0x85A308D3], np.uint32)
NAMES = ("x", "a", "b", "bias", "row_scale")


def problem(dtype: str, *, transposed: bool, bias: bool, row_scale: bool, rank: int = 4) -> tuple[dict[str, Any], Any]:
    p = cases.problem(CASE, dtype, transposed=transposed)
    a, b = cases.normal((CASE.groups, CASE.k, rank), dtype, "a"), cases.normal((CASE.groups, rank, CASE.n), dtype, "b")
    if transposed:
        a, b = (np.ascontiguousarray(each.swapaxes(1, 2)) for each in (a, b))
    arrays = {"x": p.x, "a": a, "b": b, "bias": p.bias if bias else None}
    return {**arrays, "row_scale": p.row_scale if row_scale else None, "w": p.w, "sizes": p.group_sizes}, p.dy


def by_jax(given: dict[str, Any], dy: Any, needs: tuple[bool, ...], base: str | None, **options: Any) -> list[Any]:
    """y and the gradients that `needs` names, in the order of NAMES."""
    held: dict[str, Any] = {name: None if each is None else jnp.asarray(each) for name, each in given.items()}
    key = options.pop("key")
    if base is not None:
        held["w"] = jax_grouped.quantize(held["w"], base, axis=2 if options["rhs_transposed"] else 1)
    live = [name for name, need in zip(NAMES, needs, strict=True) if need and held[name] is not None]

    def function(*some: Any) -> Any:
        now = held | dict(zip(live, some, strict=True))
        return jax_grouped.ragged_dot(
            *(now["x"], now["w"], held["sizes"]),
            bias=now["bias"],
            row_scale=now["row_scale"],
            lora=(now["a"], now["b"]),
            lora_key=None if key is None else jnp.asarray(key),
            **options,
        )

    y, pull = jax.vjp(function, *(held[name] for name in live))
    found = dict(zip(live, pull(jnp.asarray(dy)), strict=True))
    return [np.asarray(y), *(None if name not in found else np.asarray(found[name]) for name in NAMES)]


def by_torch(given: dict[str, Any], dy: Any, needs: tuple[bool, ...], base: str | None, **options: Any) -> list[Any]:
    held: dict[str, Any] = {name: None if each is None else to_torch(each) for name, each in given.items()}
    key = options.pop("key")
    for name, need in zip(NAMES, needs, strict=True):
        if need and held[name] is not None:
            held[name].requires_grad_()
    if base is not None:
        held["w"] = torch_bridge.quantize(held["w"], base, axis=2 if options["rhs_transposed"] else 1)
    y = torch_bridge.grouped_linear(
        *(held["x"], held["w"], held["sizes"]),
        bias=held["bias"],
        row_scale=held["row_scale"],
        lora=(held["a"], held["b"]),
        lora_key=None if key is None else to_torch(key),
        **options,
    )
    if y.requires_grad:
        y.backward(to_torch(dy))
    grads = [None if held[name] is None else held[name].grad for name in NAMES]
    return [as_numpy(y.detach()), *(None if each is None else as_numpy(each) for each in grads)]


BASES = (None, "fp8_128x128", "mxfp8", "mxfp4", "nvfp4")


@pytest.mark.rule("LOR-1", "LOR-2", "LOR-4", "ALL-1")
@pytest.mark.matrix(
    dtype=cases.DTYPES,
    base=BASES,
    transposed=(False, True),
    bias=(False, True),
    row_scale=(False, True),
    scale_bias=(False, True),
    dropout=(0.0, 0.3),
    scaling=(1.0, 0.37),
    frozen=("", "a", "b", "x"),
    valid=lambda dtype, base, bias, row_scale, scale_bias, **_: (
        (not scale_bias or (bias and row_scale)) and not (dtype == "float16" and base == "mxfp4")
    ),
)
def test_both_frontends_give_the_same_bits(
    dtype, base, transposed, bias, row_scale, scale_bias, dropout, scaling, frozen
):
    given, dy = problem(dtype, transposed=transposed, bias=bias, row_scale=row_scale)
    needs = tuple(name != frozen for name in NAMES)
    options = {"rhs_transposed": transposed, "scale_bias": scale_bias, "lora_dropout": dropout, "lora_scaling": scaling}
    options["key"] = KEY if dropout else None
    first = by_jax(given, dy, needs, base, **options)
    second = by_torch(given, dy, needs, base, **options)
    for name, one, two in zip(("y", *NAMES), first, second, strict=True):
        assert (one is None) == (two is None), name
        if one is not None:
            asserts.bitwise(two, one, name)
    assert (first[1 + NAMES.index(frozen)] is None) if frozen else True


@pytest.mark.rule("LOR-1")
@pytest.mark.parametrize("recipe", ["FP8Current", "FP8Block", "MXFP8"])
def test_a_recipe_concerns_the_base_alone(recipe):
    """With a base of zeros, the recipe changes nothing: the adapter runs in the dtype of x."""
    given, dy = problem("bfloat16", transposed=True, bias=False, row_scale=False)
    given["w"] = np.zeros_like(given["w"])
    options: dict[str, Any] = {"rhs_transposed": True, "key": None}
    found = by_torch(given, dy, (True,) * 5, None, recipe=recipes.RECIPES[recipe], **options)
    plain = by_torch(given, dy, (True,) * 5, None, **options)
    for one, two in zip(found, plain, strict=True):
        if one is not None:
            asserts.bitwise(one, two)
    given["w"] = cases.normal(given["w"].shape, "bfloat16", "w")
    assert np.any(
        by_torch(given, dy, (True,) * 5, None, recipe=recipes.RECIPES[recipe], **options)[0]
        != by_torch(given, dy, (True,) * 5, None, **options)[0]
    )


@pytest.mark.rule("LOR-1", "ERR-1")
@pytest.mark.parametrize("frontend", ["jax", "torch"])
@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"lora": ("a",)}, ["`lora`", "tuple", "a pair (A, B)", "pass both"]),
        ({"lora": ("a", None)}, ["`lora[1]`", "None", "the factor B", "pass both"]),
        ({"lora": None, "lora_scaling": 2.0}, ["`lora_scaling`", "without `lora`", "1.0", "pass an adapter"]),
        ({"lora_dropout": 0.5}, ["`lora_key`", "None with", "if and only if", "pass both"]),
        ({"wgrad_accum": "weight"}, ["`wgrad_accum`", "beside `lora`", "None", "`lora_wgrad_accum`"]),
        ({"lora_wgrad_accum": 1}, ["`lora_wgrad_accum`", "int", "a pair", "put None"]),
    ],
)
def test_contradictions_are_refused(frontend, options, fragments):
    given, _ = problem("float32", transposed=False, bias=False, row_scale=False)
    array = jnp.asarray if frontend == "jax" else to_torch
    x, w, sizes, a, b = (array(given[name]) for name in ("x", "w", "sizes", "a", "b"))
    call: Any = jax_grouped.ragged_dot if frontend == "jax" else torch_bridge.grouped_linear
    options = {name: w if each == "weight" else each for name, each in options.items()}
    with asserts.refused(ValueError, fragments):
        call(x, w, sizes, **{"rhs_transposed": False, "lora": (a, b)} | options)


@pytest.mark.rule("LOR-2", "ERR-1")
def test_a_base_that_is_not_frozen_is_refused():
    given, _ = problem("float32", transposed=False, bias=False, row_scale=False)
    x, w, sizes, a, b = (to_torch(given[name]) for name in ("x", "w", "sizes", "a", "b"))
    with asserts.refused(ValueError, ["`weight`", "requires a gradient", "a frozen weight", "requires_grad_(False)"]):
        torch_bridge.grouped_linear(x, w.requires_grad_(), sizes, rhs_transposed=False, lora=(a, b))
    x, w, sizes, a, b = (jnp.asarray(given[name]) for name in ("x", "w", "sizes", "a", "b"))
    with asserts.refused(ValueError, ["`rhs`", "differentiated", "a frozen weight", "stop_gradient"]):
        jax.grad(lambda w: jnp.sum(jax_grouped.ragged_dot(x, w, sizes, lora=(a, b))))(w)


@pytest.mark.rule("ERR-2")
def test_plans_name_the_calls_of_the_adapter():
    """The product with B is part of the base product's call; that with A, and gradients, are calls of their own."""
    given, _ = problem("bfloat16", transposed=True, bias=False, row_scale=False)
    rows, width, rank = *given["x"].shape[:1], given["w"].shape[1], given["a"].shape[1]
    calls = [
        f"grouped_matmul -> bfloat16[{rows}, {rank}]: grouped_matmul_any_cpu on cpu",
        f"grouped_matmul -> bfloat16[{rows}, {width}]: grouped_matmul_low_composed_cpu on cpu",
    ]
    x, w, sizes, a, b = (to_torch(given[name]) for name in ("x", "w", "sizes", "a", "b"))
    told = torch_bridge.explain(torch_bridge.grouped_linear, x, w, sizes, lora=(a, b.requires_grad_()))
    of_b = f"grouped_matmul -> bfloat16[{w.shape[0]}, {width}, {rank}]: grouped_matmul_any_cpu on cpu"
    assert all(call in told for call in (*calls, of_b))
    assert told.count("grouped_matmul ->") == len(calls) + 1
    x, w, sizes, a, b = (jnp.asarray(given[name]) for name in ("x", "w", "sizes", "a", "b"))
    told = jax_grouped.explain(jax_grouped.ragged_dot, x, w, sizes, rhs_transposed=True, lora=(a, b))
    assert all(call in told for call in calls)
    assert jax_grouped.why_unsupported(jax_grouped.ragged_dot, x, w, sizes, rhs_transposed=True, lora=(a, b)) is None


@pytest.mark.rule("LOR-4", "ERR-2")
@pytest.mark.parametrize("frontend", ["jax", "torch"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_gradient_of_b_is_made_along_with_that_of_the_rows_unless_it_is_accumulated(frontend, transposed):
    """One pass over dy gives both; into an accumulator, the gradient of B is a product of its own."""
    given, _ = problem("bfloat16", transposed=transposed, bias=False, row_scale=True)
    library, array = (jax_grouped, jnp.asarray) if frontend == "jax" else (torch_bridge, to_torch)
    held: dict[str, Any] = {name: None if each is None else array(each) for name, each in given.items()}
    if frontend == "torch":
        for name in ("x", "a", "b"):
            held[name].requires_grad_()
    call: Any = jax_grouped.ragged_dot if frontend == "jax" else torch_bridge.grouped_linear
    operands = held["x"], held["w"], held["sizes"]
    options: dict[str, Any] = {"rhs_transposed": transposed, "row_scale": held["row_scale"]}
    options["lora"] = held["a"], held["b"]
    of_b = str(list(given["b"].shape))
    alone = f"grouped_matmul -> bfloat16{of_b}"
    along = f"low_rank_grads -> bfloat16[{CASE.rows}, 4] bfloat16{of_b}"
    told = library.explain(call, *operands, **options)
    assert (told.count(along), told.count(alone)) == (1, 0)
    into = array(np.zeros(given["b"].shape, np.float32))
    told = library.explain(call, *operands, **options, lora_wgrad_accum=(None, into))
    assert told.count("low_rank_grads") == 0
    assert told.count(alone.replace("bfloat16", "float32")) == 1


@pytest.mark.rule("LOR-1", "LOR-4")
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_may_be_wider_than_x(transposed):
    """v is rounded to the dtype of x, where dy is float32 because y is: it is multiplied by A and by x."""
    given, dy = problem("bfloat16", transposed=transposed, bias=False, row_scale=False)
    options: dict[str, Any] = {"rhs_transposed": transposed, "key": None, "lora_scaling": 0.5}
    plain = by_jax(given, dy, (True,) * 5, None, **options)
    found = by_jax(given, dy.astype(np.float32), (True,) * 5, None, **options, preferred_element_type=jnp.float32)
    assert found[0].dtype == np.float32
    for name, one, two in zip(NAMES, found[1:], plain[1:], strict=True):
        if one is not None:
            asserts.bitwise(one, two, name)
