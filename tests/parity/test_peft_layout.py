"""Adapters in PEFT's layout, in both frontends: the delta of PEFT's own formula, and there and back bit for bit."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_grouped
import torch_bridge
from tests import asserts, cases
from tests.parity.adapters import to_torch

G, K, N, R = 3, 8, 5, 2
CHECKPOINTS: dict[str, Any] = {"torch": torch_bridge.checkpoint, "jax": jax_grouped.checkpoint}


def matrices() -> tuple[Any, Any]:
    """`lora_A.weight` [G r, K] and `lora_B.weight` [N, r G], as PEFT saves them."""
    return cases.normal((G * R, K), "float32", "a"), cases.normal((N, R * G), "float32", "b")


def delta_of_peft(a: Any, b: Any) -> Any:
    """PEFT's `ParamWrapper.get_delta_weight` of a parameter [G, N, K], without its scaling."""
    of_a, of_b = a.reshape(G, -1, a.shape[-1]), b.reshape(b.shape[0], -1, G)
    return np.einsum("ore,eri->eoi", of_b, of_a)


def held(frontend: str) -> tuple[Any, Any]:
    """The matrices as arrays of a frontend."""
    a, b = matrices()
    return (to_torch(a), to_torch(b)) if frontend == "torch" else (jnp.asarray(a), jnp.asarray(b))


@pytest.mark.rule("LOR-5")
@pytest.mark.parametrize("frontend", CHECKPOINTS)
def test_factors_have_the_delta_of_peft_and_go_back_bit_for_bit(frontend: str):
    of = CHECKPOINTS[frontend]
    a, b = of.from_peft(*held(frontend), num_experts=G)
    wanted = [(G, R, K), (G, N, R)] if frontend == "torch" else [(G, K, R), (G, R, N)]
    assert [tuple(each.shape) for each in (a, b)] == wanted
    left, right = (b, a) if frontend == "torch" else (a, b)
    product = np.matmul(asserts.as_numpy(left).astype(np.float64), asserts.as_numpy(right).astype(np.float64))
    exact = delta_of_peft(*(each.astype(np.float64) for each in matrices()))
    exact = exact if frontend == "torch" else exact.swapaxes(1, 2)
    assert np.array_equal(product, exact), "sums of two exact products"
    for found, given in zip(of.to_peft(a, b), matrices(), strict=True):
        asserts.bitwise(found, given)


@pytest.mark.rule("LOR-5", "ALL-1")
def test_both_frontends_hold_the_same_values():
    torch_pair, jax_pair = (CHECKPOINTS[name].from_peft(*held(name), G) for name in ("torch", "jax"))
    for one, two in zip(torch_pair, jax_pair, strict=True):
        asserts.bitwise(one.swapaxes(1, 2), two)


@pytest.mark.rule("LOR-5")
def test_tensors_can_be_saved_as_they_are():
    """Files want contiguous tensors, and no gradient follows the copy."""
    a, b = (torch.nn.Parameter(each) for each in held("torch"))
    made = torch_bridge.checkpoint.from_peft(a, b, G)
    back = torch_bridge.checkpoint.to_peft(*(torch.nn.Parameter(each) for each in made))
    assert all(each.is_contiguous() and not each.requires_grad for each in (*made, *back))


@pytest.mark.rule("LOR-5")
def test_numpy_arrays_stay_numpy_arrays():
    made = jax_grouped.checkpoint.from_peft(*matrices(), G)
    assert all(isinstance(each, np.ndarray) for each in (*made, *jax_grouped.checkpoint.to_peft(*made)))


@pytest.mark.rule("LOR-5", "ERR-1")
@pytest.mark.parametrize("frontend", CHECKPOINTS)
def test_matrices_that_do_not_fit_are_refused(frontend: str):
    of, (a, b) = CHECKPOINTS[frontend], held(frontend)
    for given, fragments in (
        ((a[None], b, G), ["`a`", "(1, 6, 8)", "a matrix", "that PEFT saves"]),
        ((a, b, 4), ["`a` (6, 8)", "`b` (5, 6)", "G = 4 experts", "check the number"]),
        ((a, b, 0), ["`a` (6, 8)", "G = 0 experts", "check the number"]),
        ((a, b[:, :3], G), ["`a` (6, 8)", "`b` (5, 3)", "one rank r", "check the number"]),
        ((a[:0], b[:, :0], G), ["`a` (0, 8)", "one rank r", "check the number"]),
    ):
        with asserts.refused(ValueError, fragments):
            of.from_peft(*given)
    for number in (True, 3.0):
        with asserts.refused(TypeError, ["`num_experts`", repr(number), "an integer", "pass the number"]):
            of.from_peft(a, b, number)
    for bad in (lambda: of.from_peft(a, None, G), lambda: of.to_peft(a, None)):
        with asserts.refused(TypeError, ["`b`: NoneType", "expected an array", "pass the weights"]):
            bad()
    a, b = of.from_peft(a, b, G)
    for pair in ((a[0], b), (a, b[:2]), (b, a)):
        with asserts.refused(ValueError, ["`a`", "`b`", "one number of experts G and one rank r", "of one adapter"]):
            of.to_peft(*pair)
